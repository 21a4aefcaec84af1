"""Runs a command, and ends all its processes with the command or with the caller.

    python guard.py PARENT_PID COMMAND [ARGUMENT …]

Started as a script, so that no installed package is needed. The guard dies with its parent *thread*
(PR_SET_PDEATHSIG), adopts orphans (PR_SET_CHILD_SUBREAPER), and on SIGTERM, or when the command has
ended, kills and reaps every descendant. Exit status: that of the command, 128 + signal if killed.

multiprocessing's resource trackers are killed last, and only when they do not end by themselves:
they remove the killed processes' shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
TRACKER_GRACE_S: Final = 10.0
SIGNALS: Final = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main(arguments: list[str]) -> int:
    """Run the command line, without the program's name; returns the exit status."""
    command = arguments[1:]
    start = partial(os.posix_spawnp, command[0], command, os.environ, setsigmask=())
    return watch(int(arguments[0]), start)


def watch(parent: int, start: Callable[[], int]) -> int:
    """Be the guard of the child that `start` makes; returns the exit status.

    Args:
        parent: pid of this process's parent, with which it dies.
        start: returns the child's pid. Signals are blocked when it is called.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_PDEATHSIG, signal.SIGTERM), (PR_SET_CHILD_SUBREAPER, 1)):
        if libc.prctl(option, int(value), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        return 128 + signal.SIGTERM  # the parent was gone before it could be watched
    child = start()
    status: int | None = None
    while status is None and signal.sigwait(SIGNALS) == signal.SIGCHLD:
        status = _reap(child)
    _end_descendants()
    if status is None:
        return 128 + signal.SIGTERM
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _reap(child: int) -> int | None:
    """Reap ended children. Returns the wait status of `child` if it was among them; else None."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def _end_descendants() -> None:
    """Kill children until none is left; orphans of a killed one become children."""
    give_up = time.monotonic() + TRACKER_GRACE_S
    while children := _children():
        others = [pid for pid in children if not _is_tracker(pid)]
        if others:  # a tracker begins when the last of them has ended
            give_up = time.monotonic() + TRACKER_GRACE_S
        for pid in others or (children if time.monotonic() > give_up else ()):
            os.kill(pid, signal.SIGKILL)  # unreaped children of ours: no pid can be reused
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap(0)


def _children() -> list[int]:
    pid = os.getpid()
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_tracker(pid: int) -> bool:
    """Whether a process is, or may be, a resource tracker: a program that is just being started has
    no command line yet.
    """
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return not command or b"resource_tracker" in command
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
