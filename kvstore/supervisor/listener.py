"""The attach socket's files: taken over from a dead node, never from a living one.

Covers: directory, lock file, socket file, their modes, and their removal. Does not cover: access
control (`kvstore.node.attach`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError

INSPECT_SUFFIX: Final = ".rpc"
"""Suffix of a socket of the node process, which a killed one leaves behind."""

_log = logging.getLogger(__name__)


class Door:
    """A listening attach socket, made here or given; files of a given one belong to its maker."""

    def __init__(self, path: Path, sock: socket.socket) -> None:
        self.path = path
        self.socket = sock
        self._file: os.stat_result | None = None
        with contextlib.suppress(OSError):
            self._file = os.stat(path)

    @property
    def is_in_place(self) -> bool:
        """Whether engines that connect to the path still reach this socket. Any thread."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return self._file is not None and os.path.samestat(found, self._file)

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
    remove_socket_file(path)
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


def remove_socket_file(path: Path) -> None:
    """Remove the socket of a dead node. Raises ConfigError when another file is in its place."""
    refuse_what_is_not_ours(path, option="--socket")
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        raise ConfigError(f"{path} belongs to another user: choose another --socket") from None


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
