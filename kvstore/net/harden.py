"""Limits and protections of a process of the node, before there is anything to protect."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0005
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4


def harden_process() -> None:
    """No debugger or core dump; as many descriptors as allowed; short turns of threads."""
    # No core file and no ptrace by the same user: the arena is other people's prompts. /proc/self
    # becomes root's, but a process may always look at itself, which `pidfd.pid_of` needs.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A thread that renders /metrics must not keep the loop from the interpreter for 5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def die_with(parent: int) -> None:
    """Have this process killed when its parent, or the parent's thread that made it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before it could be watched
