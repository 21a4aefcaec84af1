"""Requests for the code on disk: a connection to this socket is the request, and gets the outcome.

    kvstore upgrade ──connect──▶ node.sock.sup       ◀── at once: TAKEN
                                                     ◀── then: done or refused, a sentence

Covers both ends. Does not cover: the upgrade itself (`supervisor`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import selectors
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvstore.errors import AttachError, KVStoreError
from kvstore.supervisor.listener import listening_socket

SUFFIX: Final = ".sup"
WAIT_S: Final = 200.0
"""Longer than any limit of a supervisor."""
FIRST_WORD_S: Final = 15.0
"""A running supervisor acknowledges within this time."""
TAKEN: Final = b"taken"
"""The acknowledgement."""
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


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
        self.path = node_socket.with_name(node_socket.name + SUFFIX)
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
        data = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(data)[1] not in (0, os.geteuid()):
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


def no_node_at(node_socket: Path) -> str:
    """Answer for a path without a node."""
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


def ask_for_upgrade(
    node_socket: Path, *, timeout_s: float = WAIT_S, first_word_s: float = FIRST_WORD_S
) -> str:
    """Have the node at this attach socket run the code on disk; returns its report.

    Raises:
        AttachError: no node, or no answer.
        UpgradeRefused: the node goes on as it was.
    """
    path = node_socket.absolute()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(first_word_s)
        try:
            sock.connect(os.fspath(path.with_name(path.name + SUFFIX)))
            data = _first_word(sock, first_word_s)
            if data == TAKEN:
                sock.settimeout(timeout_s)
                data = sock.recv(64 << 10)
        except PermissionError:
            raise AttachError(not_yours(node_socket)) from None
        except TimeoutError:
            raise AttachError(f"the node did not answer within {timeout_s:.0f} s") from None
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED):
                raise AttachError(f"no node at {node_socket}: {error.strerror}") from None
            raise AttachError(no_node_at(node_socket)) from None
    if not data:
        raise AttachError("the node ended before it answered")
    answer = msgspec.json.decode(data, type=UpgradeReport)
    if not answer.done:
        raise UpgradeRefused(answer.text)
    return answer.text


def _first_word(sock: socket.socket, first_word_s: float) -> bytes:
    """The acknowledgement. Raises OSError; AttachError without one."""
    try:
        return sock.recv(64 << 10)
    except TimeoutError:
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(data)[0]
        raise AttachError(
            f"the node's supervisor, process {pid}, did not answer within {first_word_s:.0f} s: it"
            f" is stopped ('kill -CONT {pid}' lets it go on) or the machine is overloaded; nothing"
            " was upgraded"
        ) from None
