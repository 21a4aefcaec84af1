"""The node process's end of its supervisor: descriptors received, and descriptors to be held.

Covers: the messages of a start in order, the end of the supervisor, pidfds of ranks. Does not
cover: their use (`node`), the messages (`control`).
"""

from __future__ import annotations

import hashlib
import socket
from collections import deque
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple, Self

from kvstore import __version__
from kvstore.engine.memory.journal import LAYOUT_VERSION
from kvstore.installation import DISTRIBUTION
from kvstore.supervisor import control

# ── installed ─────────────────────────────────────────────────────────────────────────────────────
# Code of this process, and code on disk: replacing a package changes no running process, nor the
# standby.
#
# Covers: comparing both. Does not cover: changing over (`supervisor`, `kvstore upgrade`).


class Code(NamedTuple):
    """An installed package."""

    version: str
    build: str
    """Digest of its files: two builds may have one version."""


def installed_code() -> Code | None:
    """The package on disk; None while it is being replaced."""
    try:
        found = distribution(DISTRIBUTION)
        record = found.read_text("RECORD") or ""
        return Code(found.version, hashlib.blake2b(record.encode(), digest_size=8).hexdigest())
    except (PackageNotFoundError, OSError, KeyError):
        return None


class LoadedCode:
    """The code of this process. Created when the code has been loaded."""

    def __init__(self) -> None:
        try:
            self._site = Path(str(distribution(DISTRIBUTION).locate_file("")))
        except PackageNotFoundError:
            self._site = Path()
        self._stamp = self._look()
        self._code = installed_code() or Code(__version__, "")
        self.version = self._code.version

    def trouble(self) -> str:
        """A sentence for the operator when other code is installed by now; empty when not."""
        if self._look() == self._stamp:  # reading all of it takes milliseconds
            return ""
        installed = installed_code()
        if installed is None or installed == self._code:
            return ""
        other = f"kvstore {installed.version}"
        if installed.version == self.version:
            other = f"another build of {other}"
        return (
            f"{other} is installed, and this process runs kvstore {self.version}, which it loaded"
            " before: 'kvstore upgrade' has the node run the installed one"
        )

    def _look(self) -> int:
        """A number that changes with every installation beside this package."""
        try:
            return self._site.stat().st_mtime_ns
        except OSError:
            return 0


# ── handover ──────────────────────────────────────────────────────────────────────────────────────


class SupervisorGone(Exception):
    """The supervisor ended; this process is to end, too."""


class Handover(control.HeldDescriptors):
    """State of a node process at its start; code that takes a descriptor out of it closes that. Use
    as a context."""

    def __init__(self, sock: socket.socket) -> None:
        """Report that the code is loaded, and receive the hand-over.

        Raises:
            SupervisorGone: the supervisor ended.
        """
        super().__init__()
        self._socket = sock
        self._unsaid: deque[int] = deque()
        """Ranks released while the supervisor did not read."""
        self.code = LoadedCode()
        prepared = control.Prepared(control.CONTROL_VERSION, LAYOUT_VERSION, self.code.version)
        self.send_message(prepared)
        while True:
            message, fd = self._hear()
            match message:
                case control.Held(name=name):
                    self.hold(name, fd)
                case control.RegisteredWriter(number, hello):
                    self.writers[number] = hello, fd
                case control.BeginServing():
                    self.begin = message
                    self.listener_fd = fd
                    self.send_message(control.Begun())
                    return
                case _:
                    raise AssertionError(f"{message} before Begin")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._socket.close()

    # ── at a start ───────────────────────────────────────────────────────────────────────────────

    def drop(self) -> None:
        """Let memory of earlier processes go, here and in the supervisor: it is of no use."""
        self.forget()
        self.send_message(control.DropKept())

    def share_page(self, fd: int) -> None:
        """Void the old generation page, and have this one held. Raises SupervisorGone."""
        self.send_message(control.GenerationPage(), fd)
        answer, _ = self._hear()
        assert isinstance(answer, control.PageTaken), answer

    def keep(self, name: str, fd: int) -> None:
        """Have a descriptor held for the next process."""
        self.send_message(control.Keep(name), fd)

    def send_message(self, message: control.Control, fd: int | None = None) -> None:
        """Send a message, and a descriptor with it. Raises SupervisorGone."""
        try:
            control.send(self._socket, message, fd)
        except OSError:
            raise SupervisorGone from None

    def _hear(self) -> tuple[control.FromSupervisor, int]:
        try:
            heard = control.receive(self._socket, control.from_supervisor)
        except OSError:
            heard = None
        if heard is None:
            raise SupervisorGone
        return heard

    # ── while serving: never waits ───────────────────────────────────────────────────────────────

    def fileno(self) -> int:
        """Readable when the supervisor has ended: no more messages follow."""
        return self._socket.fileno()

    def attached(self, number: int, hello: bytes, pidfd: int) -> bool:
        """Have this rank's pidfd held beyond this process. False: impossible, so nothing may be
        granted to it."""
        return self._offer(control.Attached(number, hello), pidfd)

    def disk_hangs(self, hangs: bool) -> None:
        """Report whether the disk tier hangs."""
        # Unsaid, an upgrade ends this process as it would without.
        self._offer(control.DiskHangs(hangs))

    def released(self, number: int) -> None:
        """Report that no slot depends on this rank any more, and what could not be sent before."""
        self._unsaid.append(number)
        while self._unsaid and self._offer(control.Released(self._unsaid[0])):
            self._unsaid.popleft()  # the rest is said with the next one

    def _offer(self, message: control.Control, fd: int | None = None) -> bool:
        """Send a message, if the supervisor takes it now."""
        try:
            control.send(self._socket, message, fd, flags=socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True
