"""A child process of our own code, which can be killed at any time.

    spawn ─▶ python -P -m MODULE DESCRIPTOR PARENT    ends with its parent (`harden.die_with`)
    Child ◀═ SOCK_SEQPACKET pair: one datagram a message ═▶ DESCRIPTOR
          ── pidfd ─▶ its end is readable; signals never reach another process

Covers: start, signals, end. Does not cover: messages (`supervisor.control`,
`wire.transfer_worker`), its deadlines, when another is started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

BUFFER_BYTES: Final = 1 << 20


class Spawned(NamedTuple):
    """A process as `spawn` returns it to its parent."""

    pid: int
    wait: Callable[[], int]
    """Returns the exit status, negative for a signal; to be called after its pidfd fired."""
    socket: socket.socket


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a SOCK_SEQPACKET pair, blocking."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return ends


def spawn(program: Sequence[str], environment: Mapping[str, str] | None = None) -> Spawned:
    """Start the code on disk as a process of its own, out of reach of the terminal's signals.

    Args:
        program: arguments of Python, before a descriptor and our pid.
        environment: added to ours.

    Raises:
        OSError: the machine has no room for it.
    """
    ours, its = pair()
    with its:
        fd = its.fileno()
        try:
            started = subprocess.Popen(  # noqa: S603 -- our own program
                [sys.executable, *program, str(fd), str(os.getpid())],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # Nothing of ours multiplies matrices, and numpy would start a thread for each core.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(environment or {})},
            )
        except OSError:
            ours.close()
            raise
    return Spawned(started.pid, started.wait, ours)


class Child:
    """One child process and its pidfd, until `close`."""

    def __init__(self, spawned: Spawned) -> None:
        self.pid, self._wait, self.socket = spawned
        self.pidfd = os.pidfd_open(self.pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child, never to another process; no error if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    @property
    def has_ended(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def close(self) -> int:
        """Kill and reap it: on return nothing of it writes any more. Returns its exit status."""
        self.signal(signal.SIGKILL)
        status = self._wait()
        os.close(self.pidfd)
        self.socket.close()
        return status
