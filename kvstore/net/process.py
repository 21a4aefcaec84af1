"""Processes: a child of our own code, protections of this one, and what a pidfd stands for.

    spawn ─▶ python -P -m MODULE DESCRIPTOR PARENT    ends with its parent (`die_with`)
    Child ◀═ SOCK_SEQPACKET pair: one datagram a message ═▶ DESCRIPTOR
          ── pidfd ─▶ its end is readable; signals never reach another process

A child can be killed at any time. Covers: start, signals, end; limits and protections of a process
before there is anything to protect; the process that a pidfd refers to. Does not cover: messages
(`supervisor.control`, `wire.transfer_worker`), deadlines, when another child is started, the end of
processes that attached (`node.attach`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

SWITCH_INTERVAL_S: Final = 0.0005
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4


def harden_process() -> None:
    """No debugger or core dump; as many descriptors as allowed; short turns of threads."""
    # No core file and no ptrace by the same user: the arena is other people's prompts. /proc/self
    # becomes root's, but a process may always look at itself, which `pid_of` needs.
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


def spawn(program: Sequence[str]) -> Spawned:
    """Start the code on disk as a process of its own, out of reach of the terminal's signals.

    Args:
        program: arguments of Python, before a descriptor and our pid.

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
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
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
        poller = select.poll()  # not select, which takes descriptors below 1024 only
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> int:
        """Kill and reap it: on return nothing of it writes any more. Returns its exit status."""
        self.signal(signal.SIGKILL)
        status = self._wait()
        os.close(self.pidfd)
        self.socket.close()
        return status


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a unix socket. Raises OSError."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return pid, uid


def pid_of(fd: int) -> int | None:
    """The process that a pidfd refers to; 0 or less when it lives in another pid namespace, None
    when `fd` is no pidfd. Works in a process that is not dumpable too."""
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # that says nothing of `fd`
        return None
    for line in text.splitlines():
        if line.startswith("Pid:"):
            return int(line.removeprefix("Pid:"))
    return None


def vouches_for(pidfd: int, peer_pid: int) -> bool:
    """Whether `pidfd` may stand for the peer: a pidfd, and of that very process as far as both can
    be seen from this pid namespace. With another's, slots would come back too late or, worse, too
    early."""
    pid = pid_of(pidfd)
    return pid is not None and (pid <= 0 or peer_pid <= 0 or pid == peer_pid)


_event = os.eventfd(0)
_WITHOUT_NAME: Final = os.fstat(_event)
"""The inode that all descriptors without a name share; asked once, while there are descriptors."""
os.close(_event)


def process_of(pidfd: int, otherwise: int) -> int:
    """Number below 0 that is the same for all pidfds of a process, also in other pid namespaces.
    Before Linux 6.9 all descriptors without a name share an inode: there it is made of `otherwise`.
    """
    its = os.fstat(pidfd)
    return -1 - (otherwise if os.path.samestat(its, _WITHOUT_NAME) else its.st_ino)


def why_no_descriptor() -> str:
    """Sentence that refuses an engine because this process had no descriptor to receive
    its pidfd.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"the node has used up its {limit} descriptors: raise LimitNOFILE, or ulimit -n"
