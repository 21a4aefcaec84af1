"""Sockets of a supervisor: the attach socket's files, and requests for the code on disk.

Files are taken over from a dead node, never from a living one. Another socket beside them is for
upgrades: a connection to it is the request, and gets the outcome.

    kvstore upgrade ──connect──▶ node.sock.sup       ◀── at once: TAKEN
                                                     ◀── then: done or refused, a sentence

Covers: directory, lock file, socket file, their modes, and their removal; both ends of a request.
Does not cover: access control (`kvstore.node.attach`), the upgrade itself (`supervisor`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pwd
import selectors
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvstore.errors import AttachError, ConfigError, KVStoreError
from kvstore.net.process import peer_of

INSPECT_SUFFIX: Final = ".rpc"
"""Suffix of a socket of the node process, which a killed one leaves behind."""

_log = logging.getLogger(__name__)


class SocketFile:
    """The file of a listening socket, as it was when this was made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: os.stat_result | None = None
        with contextlib.suppress(OSError):
            self._file = os.stat(path)

    @property
    def is_in_place(self) -> bool:
        """Whether processes that connect to the path still reach this socket. Any thread."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return self._file is not None and os.path.samestat(found, self._file)


class Door(SocketFile):
    """A listening attach socket, made here or given; files of a given one belong to its maker."""

    def __init__(self, path: Path, sock: socket.socket) -> None:
        super().__init__(path)
        self.socket = sock

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        self.socket.close()


class Listener(Door):
    """The listening socket and the files that belong to it.

    A lock file beside it distinguishes a living node from the socket file of a dead one; a
    connection for that would look like an engine to a living node.
    """

    def __init__(self, path: Path, *, others_may_connect: bool) -> None:
        """Take over `path`.

        Raises:
            ConfigError: the path is in use by a living node, cannot be a socket, or its directory
                belongs to another user.
        """
        try:
            path.parent.mkdir(mode=0o711 if others_may_connect else 0o700)
            _log.warning("made the directory %s for --socket", path.parent)
        except FileExistsError:
            if not path.parent.exists():  # a link to what is not there, or to itself
                raise ConfigError(
                    f"socket directory {path.parent} is a link to nothing: choose another --socket"
                ) from None
        except FileNotFoundError:
            raise ConfigError(
                f"--socket {path}: there is no {path.parent.parent}; make it, or choose another"
                " --socket"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"socket directory {path.parent} cannot be made: {error.strerror}; choose another"
                " --socket"
            ) from None
        _refuse_foreign(path.parent)
        _warn_of_others(path.parent.resolve())
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock_fd = _lock(self._lock_path, path)
        try:
            sock = listening_socket(path, mode=0o666 if others_may_connect else 0o600, backlog=128)
        except ConfigError:
            self._unlock()
            raise
        super().__init__(path, sock)

    def close(self) -> None:
        """Stop listening and remove the files. Idempotent."""
        if self.socket.fileno() < 0:
            return
        left = self.path.with_name(self.path.name + INSPECT_SUFFIX)
        for path in (self.path, *([left] if left.is_socket() else ())):
            with contextlib.suppress(OSError):
                path.unlink()
        self.socket.close()
        self._unlock()

    def _unlock(self) -> None:
        """Remove the lock file before others can have the lock."""
        with contextlib.suppress(OSError):
            self._lock_path.unlink()
        os.close(self._lock_fd)


def listening_socket(path: Path, *, mode: int, backlog: int) -> socket.socket:
    """A listening socket at `path`, in the place of a dead node's.

    Raises:
        ConfigError: another file is in its place, or it cannot be made.
    """
    refuse_what_is_not_ours(path, option="--socket")
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        raise ConfigError(f"{path} belongs to another user: choose another --socket") from None
    kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        # The mode is set before anyone can connect: until listen() nobody can.
        sock.bind(os.fspath(path))
        path.chmod(mode)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"socket {path} cannot be made: {error.strerror or error}; choose another --socket"
        ) from None
    return sock


def _refuse_foreign(directory: Path) -> None:
    """Refuse a directory of another user, who may replace every file in it, and so the node.

    Raises:
        ConfigError: its owner is neither this user nor root.
    """
    owner = directory.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise ConfigError(
            f"socket directory {directory} belongs to uid {owner}, which could replace the socket:"
            f" choose another --socket, or chown it to uid {os.geteuid()} or root"
        )


def _warn_of_others(directory: Path) -> None:
    """Log other users that may rename a directory on the way, and so replace the socket, too."""
    for place in (directory, *directory.parents):
        found = place.stat()
        if found.st_uid not in (0, os.geteuid()):
            _log.warning(
                "uid %d owns %s, and may replace the socket below it: choose another --socket",
                found.st_uid,
                place,
            )
        elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            _log.warning(
                "other users may replace files in %s: choose another --socket, or chmod o-w", place
            )


def refuse_what_is_not_ours(path: Path, *, option: str) -> None:
    """Refuse a path with anything but nothing or a socket without a listener.

    Raises:
        ConfigError: another file is in its place; names the option to change.
    """
    try:
        if not path.is_socket():
            if path.exists():
                raise ConfigError(f"{path} exists and is no socket: choose another {option}")
            return
    except PermissionError:
        raise ConfigError(f"{path} belongs to another user: choose another {option}") from None
    # A datagram socket distinguishes living sockets of every kind from dead ones, and connects to
    # neither streams nor packets.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        answer = probe.connect_ex(str(path))
    if answer not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ConfigError(f"{path} is in use by another program: choose another {option}")


def _lock(lock_path: Path, path: Path) -> int:
    """Descriptor of an exclusive lock for the life of this process. Raises ConfigError."""
    while True:
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{lock_path} cannot be opened: {error.strerror}; choose another --socket"
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(lock_path)):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"another kvstore node is running on {path}: stop it first, or choose another"
                " --socket"
            ) from None
        except FileNotFoundError:
            pass
        os.close(fd)  # its last owner removed it between our open and our lock: once more


# ── upgrades ──────────────────────────────────────────────────────────────────────────────────────

UPGRADE_SUFFIX: Final = ".sup"
WAIT_S: Final = 200.0
"""Longer than any limit of a supervisor."""
FIRST_WORD_S: Final = 15.0
"""A running supervisor acknowledges within this time."""
TAKEN: Final = b"taken"
"""The acknowledgement."""


class UpgradeReport(msgspec.Struct, frozen=True):
    """Outcome of a request."""

    done: bool
    text: str


class UpgradeRefused(KVStoreError):
    """The node goes on as it was; the text says why."""


class UpgradeDoor:
    """The supervisor's end. One request at a time, by the node's own user or root only."""

    def __init__(self, node_socket: Path, ask: Callable[[], None]) -> None:
        """Listen beside the attach socket, whose lock the caller holds.

        Raises:
            ConfigError: the socket cannot be made.
        """
        self.path = node_socket.with_name(node_socket.name + UPGRADE_SUFFIX)
        self._ask = ask
        self._waiting: socket.socket | None = None
        self._socket = listening_socket(self.path, mode=0o600, backlog=4)

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Watch for requests. To be called now and again, since listening pauses while descriptors
        are used up."""
        with contextlib.suppress(KeyError, OSError):  # it listens; or there is no room for that
            selector.register(self._socket, selectors.EVENT_READ, lambda: self._read(selector))

    def _read(self, selector: selectors.BaseSelector) -> None:
        """Take a request."""
        try:
            asker, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                selector.unregister(self._socket)  # still readable: it would spin
            return
        asker.setblocking(False)
        if peer_of(asker)[1] not in (0, os.geteuid()):
            _answer(asker, UpgradeReport(False, "only the node's own user may upgrade it"))
        elif self._waiting is not None:
            _answer(asker, UpgradeReport(False, "an upgrade is under way already: wait for it"))
        elif _send(asker, TAKEN):
            self._waiting = asker
            self._ask()
        else:
            asker.close()  # it did not wait for us: nobody wants an upgrade any more

    def answer(self, text: str, *, done: bool) -> None:
        """Send its outcome to the request under way, if there is one: the upgrade has happened, or
        will not."""
        if self._waiting is not None:
            _answer(self._waiting, UpgradeReport(done, text))
            self._waiting = None

    def close(self) -> None:
        """Stop listening and remove the file."""
        self.answer("the node ends", done=False)
        self._socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


def _answer(asker: socket.socket, answer: UpgradeReport) -> None:
    with asker:
        _send(asker, msgspec.json.encode(answer))


def _send(asker: socket.socket, data: bytes) -> bool:
    """Send data to the process that asked. False: it has gone meanwhile."""
    try:
        asker.send(data, socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def why_no_answer(node_socket: Path, error: OSError, otherwise: str) -> str:
    """Why nothing answers at an attach socket, and what to do; `otherwise`: what an error means
    that is neither of a path without a node nor of a user without the right to ask.
    """
    if isinstance(error, PermissionError):
        return not_yours(node_socket)
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED):
        return f"{otherwise}: {error.strerror}"
    if node_socket.exists() and not node_socket.is_socket():
        return f"{node_socket} is no socket: name the --socket of a node"
    return (
        f"no node at {node_socket}: start one with"
        f" 'kvstore node --socket {node_socket} --dram auto', or name another --socket"
    )


def not_yours(node_socket: Path) -> str:
    """Answer for a user without the right to ask."""
    owner = "another user"
    for path in (node_socket, node_socket.parent):  # the socket of a closed directory is not seen
        with contextlib.suppress(OSError, KeyError):
            uid = path.stat().st_uid
            owner = f"uid {uid}"
            owner = f"user {pwd.getpwuid(uid).pw_name}"
        if owner != "another user":
            break
    return f"the node at {node_socket} belongs to {owner}: run this as that user or root"


def ask_for_upgrade(node_socket: Path) -> str:
    """Have the node at this attach socket run the code on disk; returns its report.

    Raises:
        AttachError: no node, or no answer.
        UpgradeRefused: the node goes on as it was.
    """
    path = node_socket.absolute()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(FIRST_WORD_S)
        try:
            sock.connect(os.fspath(path.with_name(path.name + UPGRADE_SUFFIX)))
            data = _first_word(sock)
            if data == TAKEN:
                sock.settimeout(WAIT_S)
                data = sock.recv(64 << 10)
        except TimeoutError:
            raise AttachError(f"the node did not answer within {WAIT_S:.0f} s") from None
        except OSError as error:
            why = why_no_answer(node_socket, error, f"no node at {node_socket}")
            raise AttachError(why) from None
    if not data:
        raise AttachError("the node ended before it answered")
    answer = msgspec.json.decode(data, type=UpgradeReport)
    if not answer.done:
        raise UpgradeRefused(answer.text)
    return answer.text


def _first_word(sock: socket.socket) -> bytes:
    """The acknowledgement. Raises OSError; AttachError without one."""
    try:
        return sock.recv(64 << 10)
    except TimeoutError:
        pid, _ = peer_of(sock)
        raise AttachError(
            f"the node's supervisor, process {pid}, did not answer within {FIRST_WORD_S:.0f} s: it"
            f" is stopped ('kill -CONT {pid}' lets it go on) or the machine is overloaded; nothing"
            " was upgraded"
        ) from None
