"""Children end with the process that started them, whatever ends that, whichever thread it was."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

from kvstore.testing import tied
from kvstore.testing.process import popen_tied

PARENT = """if True:
    import signal, subprocess, sys, threading
    from kvstore.testing.process import popen_tied

    idle = "import signal; print(1, flush=True); signal.pause()"
    made = []

    def start():
        command = [sys.executable, "-c", idle]
        made.append(popen_tied(command, stdout=subprocess.PIPE))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert made[0].stdout.readline()
    print(made[0].pid, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_parent_and_not_with_the_thread(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())  # said by a child whose maker, a thread, has ended
        pidfd = os.pidfd_open(pid)
        assert not select.select([pidfd], [], [], 0)[0]
        parent.send_signal(number)
        parent.wait(30)
        assert select.select([pidfd], [], [], 30)[0], "the child lives on"
    os.close(pidfd)
    with contextlib.suppress(ChildProcessError):  # its parent had time for that
        os.waitpid(pid, 0)  # this process adopts orphans


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    nobody = str(os.getppid())
    command = [sys.executable, "-I", "-S", tied.__file__, nobody, "echo", "begun"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (137, "")


def test_a_forked_child_starts_its_own() -> None:
    popen_tied(["true"]).wait()
    pid = os.fork()
    if pid == 0:
        os._exit(popen_tied(["true"]).wait())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
