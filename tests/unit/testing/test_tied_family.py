"""The guard: nothing survives the command, its killing, or the death of whoever started it."""

from __future__ import annotations

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
pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("guarded", ["sys.exit(7)"], indirect=True)
def test_the_commands_end_takes_its_orphans_along(guarded: subprocess.Popen[str]) -> None:
    pids = family(guarded)
    assert guarded.wait(10) == 7
    assert_gone(pids)


@pytest.mark.parametrize("guarded", ["signal.pause()"], indirect=True)
def test_sigterm_ends_all(guarded: subprocess.Popen[str]) -> None:
    pids = family(guarded)
    guarded.terminate()
    assert guarded.wait(10) == 128 + signal.SIGTERM
    assert_gone(pids)


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
