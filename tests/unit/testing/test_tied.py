"""Children end with the process that started them, whatever ends that, whichever thread it was."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
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


# ── the guard of a family ─────────────────────────────────────────────────────────────────────────


# A process that starts a grandchild in a session of its own, says both pids, and waits.
FAMILY = """
import os, signal, subprocess, sys
idle = "import signal; print(1, flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", idle], start_new_session=True,
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
{then}
"""


def start(then: str, parent: int | None = None) -> subprocess.Popen[str]:
    code = FAMILY.format(then=then)
    command = [
        sys.executable,
        tied.__file__,
        str(parent or os.getpid()),
        "--all",
        sys.executable,
        "-c",
        code,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def family(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        assert not psutil.pid_exists(pid), pid


@pytest.fixture
def guarded(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    process = start(request.param)
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()  # no read: a survivor would hold the other end open


@pytest.mark.slow
@pytest.mark.parametrize("guarded", ["sys.exit(7)"], indirect=True)
def test_the_commands_end_takes_its_orphans_along(guarded: subprocess.Popen[str]) -> None:
    pids = family(guarded)
    assert guarded.wait(10) == 7
    assert_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("guarded", ["signal.pause()"], indirect=True)
def test_sigterm_ends_all(guarded: subprocess.Popen[str]) -> None:
    pids = family(guarded)
    guarded.terminate()
    assert guarded.wait(10) == 128 + signal.SIGTERM
    assert_gone(pids)


@pytest.mark.slow
def test_the_callers_death_ends_all() -> None:
    caller_code = f"""
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, {tied.__file__!r}, str(os.getpid()), "--all",
                  sys.executable, "-c", {FAMILY.format(then="signal.pause()")!r}])
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", caller_code], stdout=subprocess.PIPE, text=True
    ) as caller:
        watched = [os.pidfd_open(pid) for pid in family(caller)]
        try:
            caller.kill()
            for fd in watched:
                assert select.select([fd], [], [], 10)[0], "a process outlived the caller"
        finally:
            for fd in watched:
                os.close(fd)


@pytest.mark.slow
def test_a_caller_that_is_already_gone_starts_nothing() -> None:
    process = start("signal.pause()", parent=1)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert process.communicate()[0] == ""


# Holds a name that its child, as multiprocessing's tracker does, removes when all others are gone.
TRACKED = """
import os, subprocess, sys, threading
name = sys.argv[1]
open(name, "w").close()
ours, its = os.pipe()
code = f"import os, time; os.close({its}); os.read({ours}, 1); time.sleep(0.5); os.remove({name!r})"
subprocess.Popen([sys.executable, "-c", code, "resource_" + "tracker"], pass_fds=[ours, its])
os.close(ours)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_who_tracks_shared_memory_is_left_to_remove_it(
    tmp_path: Path, ends_by_itself: bool
) -> None:
    then = "" if ends_by_itself else "\nprint(1, flush=True)\nthreading.Event().wait()"
    name = tmp_path / "name"
    command = [sys.executable, tied.__file__, str(os.getpid()), "--all"]
    command += [sys.executable, "-c", TRACKED + then, str(name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        if not ends_by_itself:
            assert process.stdout is not None
            assert process.stdout.readline()
            process.terminate()
        process.wait(20)
    assert not name.exists()
