"""Ties a command to the process that starts it, whatever ends that: SIGKILL leaves no time to clean
up.

    python -I -S tied.py PARENT COMMAND [ARGUMENT …]         becomes the command
    python -I -S tied.py PARENT --all COMMAND [ARGUMENT …]   guards it and all its descendants

Nothing of ours can run between a fork and an exec, so this program runs first: asks the kernel for
a signal at the end of its parent *thread* (PR_SET_PDEATHSIG), checks that the parent still lives,
and becomes the command. A guard stays instead: it adopts orphans (PR_SET_CHILD_SUBREAPER), and on
SIGTERM, or when the command has ended, kills and reaps every descendant. Its exit status is that of
the command, 128 + signal if killed.

multiprocessing's resource trackers are killed last, and only when they do not end by themselves:
they remove the killed processes' shared memory.

Run as a script, so that no installed package is needed: without site-packages it starts in a
hundredth of a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TRACKER_GRACE_S = 10.0
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main(arguments: list[str]) -> int:
    """Run the command line, without the program's name; returns the exit status."""
    parent, name, *others = arguments
    if name != "--all":
        die_with(int(parent), signal.SIGKILL)
        os.execvp(name, [name, *others])
    start = partial(os.posix_spawnp, others[0], others, os.environ, setsigmask=())
    return watch(int(parent), start)


def die_with(parent: int, number: int) -> None:
    """Have this process get a signal when its parent ends; exits if it has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(128 + number)


def watch(parent: int, start: Callable[[], int]) -> int:
    """Be the guard of the child that `start` makes; returns the exit status.

    Args:
        parent: pid of this process's parent, with which it dies.
        start: returns the child's pid. Signals are blocked when it is called.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with(parent, signal.SIGTERM)
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
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    except ChildProcessError:
        pass
    return found


def _end_descendants() -> None:
    """Kill children until none is left; orphans of a killed one become children."""
    give_up = time.monotonic() + TRACKER_GRACE_S
    while children := _text(f"/proc/self/task/{os.getpid()}/children").split():
        others = [pid for pid in children if not _is_tracker(pid)]
        if others:  # a tracker begins when the last of them has ended
            give_up = time.monotonic() + TRACKER_GRACE_S
        for pid in others or (children if time.monotonic() > give_up else ()):
            os.kill(int(pid), signal.SIGKILL)  # unreaped children of ours: no pid can be reused
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap(0)


def _is_tracker(pid: str) -> bool:
    """Whether a process is, or may be, a resource tracker: a program that is just being started has
    no command line yet.
    """
    try:
        command = _text(f"/proc/{pid}/cmdline")
    except OSError:
        return False
    return not command or "resource_tracker" in command


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
