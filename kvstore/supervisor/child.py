"""One node process, as its supervisor sees it: started, signalled, and closed once it is gone.

Does not cover: messages to and from it (`supervisor`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.supervisor import control


class Spawned(NamedTuple):
    """A process, as its supervisor got it."""

    pid: int
    wait: Callable[[], int]
    """Its exit status, negative for a signal; after its pidfd fired."""
    socket: socket.socket


def spawn_process(program: Sequence[str] = ("-P", "-m", "kvstore.node.process")) -> Spawned:
    """The code on disk as a process of its own, out of reach of the terminal's signals. `program`:
    arguments of Python, before a descriptor and our pid."""
    ours, its = control.pair()
    with its:
        fd = its.fileno()
        command = [sys.executable, *program, str(fd), str(os.getpid())]
        started = subprocess.Popen(  # noqa: S603 -- our own program
            command, pass_fds=[fd], stdin=subprocess.DEVNULL, start_new_session=True
        )
    return Spawned(started.pid, started.wait, ours)


class Process:
    """One node process."""

    def __init__(self, spawned: Spawned) -> None:
        self.spawned = spawned
        self.socket = spawned.socket
        # Blocking, with a limit of the kernel's: a timeout of Python's would make receiving wait.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 10, 0))
        self.pidfd = os.pidfd_open(spawned.pid)
        self.began_ns = time.monotonic_ns()
        self.prepared: control.Prepared | None = None
        self.serving_since_ns = 0
        self.deadline_ns = 0
        """Limit for its answer, service or end; 0: none."""
        self.has_begun = self.asked_to_end = self.was_killed = self.hangs_told = False
        self.disk_hangs = False
        """Its last report."""

    @property
    def is_mute(self) -> bool:
        """Whether it had loaded its code, was killed, and had touched nothing until then."""
        return self.was_killed and self.prepared is not None and not self.has_begun

    def was_a_life(self, status: int) -> bool:
        """Whether the next process must differ from it in generations and numbers of connections.

        A process that never served has given out none; mute ones and refused starts may outnumber
        the numbers."""
        never_served = self.is_mute or status == control.EXIT_REFUSED
        return self.serving_since_ns != 0 or not never_served

    def kill(self) -> None:
        """At once, if it is not in the kernel for good."""
        self.was_killed = True
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Never reaches another process."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> int:
        """Its exit status, once it is gone."""
        os.close(self.pidfd)
        self.socket.close()
        return self.spawned.wait()
