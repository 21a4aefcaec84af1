"""TCP with TLS 1.3 on both sides: the owner copies its bytes out when it is asked for them, and
into its landing memory when they are sent.

Bytes go from the socket into their places in this process, by this thread alone: a connection that
is closed writes no more, so every end is known. The forms are in `tcp_ends`.

Options: `listen` (HOST:PORT, port 0: the kernel's choice), `host` (what peers dial, default that of
`listen`), `ca`, `certificate`, `key` (paths of PEM files); `insecure=yes` instead of those three,
in labs. Both ends must be nodes by their certificates, and who is dialled the one that is meant.

Does not cover: who may read what (the node serves, ADR 11), when a peer is given up (the caller).
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec

from kvstore.errors import ConfigError, TransportError
from kvstore.mailbox import Wake
from kvstore.ports import End, Outcome, Pieces, TransportCapabilities, TransportMemory
from kvstore.transport.guests import Guests
from kvstore.transport.pieces import check_pieces, described, open_descriptor
from kvstore.transport.tcp_ends import (
    PIECES_MAX,
    Address,
    ConnectionClosed,
    Stream,
    TcpOwner,
    TcpReader,
)
from kvstore.wire.identity import is_name
from kvstore.wire.transfer_worker import Direction, encode
from kvstore.wording import cannot_listen

BACKLOG: Final = 1024
"""Length of the listen queue; the kernel limits it to net.core.somaxconn."""
ACCEPTS_PER_TURN: Final = 64
PORT_PATIENCE_S: Final = 5.0
"""Time for which a port that is in use is tried again."""
PORT_PAUSE_S: Final = 0.05
UNREACHABLE: Final = (OSError, ValueError, TypeError)
"""Errors of connecting, also to an address that is invalid by its scope."""
LABEL_CHARS_MAX: Final = 63
"""Longest label of a DNS name."""


class Tcp:
    """A `Transport` over TCP and TLS."""

    capabilities = TransportCapabilities(
        takes_writes=True, ends_forgotten=True, is_secure=True, options={"port": "NUMBER"}
    )

    def __init__(self, name: str, memory: TransportMemory, options: Mapping[str, str]) -> None:
        """Listen. Raises ConfigError: certificates or the address cannot be used."""
        self._name, self._arena = name, memoryview(memory.arena.data)
        self._source, self._landing = memory.source, memory.landing
        self._theirs, self._ours = _contexts(options)
        self._listener = _listen(options)
        self._address = _address(options, self._listener, secure=self._theirs is not None)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake = Wake()
        """Makes the selector ready when a turn ended before its bytes did: those may be in TLS's
        buffers.
        """
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._spare_fd = os.eventfd(0)
        """Descriptor that is closed for a moment to accept and refuse a connection, when there is
        no other.
        """
        self._again: set[TcpReader | TcpOwner] = set()
        self._guests: Guests[TcpReader] = Guests()
        self._owners: dict[str, TcpOwner] = {}
        self._dialled: set[TcpOwner] = set()
        """Owners whose connection may not be open yet."""
        self._outcomes: list[Outcome] = []
        self.refused_count = 0

    @staticmethod
    def is_at(details: bytes, host: str) -> bool:
        told = _address_in(details)
        return told is not None and msgspec.msgpack.encode(told) == details and told.host == host

    def describe(self) -> bytes:
        details = msgspec.msgpack.encode(self._address)
        return encode(described("tcp", self._name, len(self._source), details, self._landing))

    def connect(self, peer: str, descriptor: bytes) -> None:
        assert peer not in self._owners, peer
        found = open_descriptor(descriptor, peer=peer, backend="tcp")
        address = _address_in(found.details)
        if address is None:
            raise TransportError(f"the descriptor of {peer} has no address")
        if address.secure != (self._ours is not None):
            raise TransportError(f"only one of {peer} and this node is insecure")
        if address.secure and not _is_dns_name(peer):
            raise TransportError(f"no certificate can name {peer}")
        self._owners[peer] = TcpOwner(peer, found, address)

    def post(self, number: int, peer: str, pieces: Pieces, direction: Direction) -> None:
        owner = self._owners.get(peer)
        if owner is None:
            raise TransportError(f"{peer} is not connected")
        check_pieces(pieces, direction, local_bytes=len(self._arena), found=owner.found)
        if len(pieces.length) > PIECES_MAX:
            raise TransportError(f"more than {PIECES_MAX} pieces in one transfer")
        ranges = zip(pieces.local.tolist(), pieces.length.tolist(), strict=True)
        places = [self._arena[at : at + size] for at, size in ranges]
        if owner.stream is None:
            try:
                owner.stream = self._dial(owner)
            except UNREACHABLE as error:
                raise TransportError(f"{peer} cannot be reached: {error}") from None
            self._dialled.add(owner)
        owner.waiting.append((number, pieces, direction, places))
        self._turn(owner)

    def poll(self) -> list[Outcome]:
        self._wake.clear()
        due, self._again = self._again, set()
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is not None:
                due.add(key.data)
        for end in due:
            self._turn(end)
        self._expire()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def fileno(self) -> int:
        return self._selector.fileno()

    def forget(self, peer: str) -> None:
        owner = self._owners.pop(peer, None)
        if owner is not None:
            self._fail(owner, "forgotten")

    def close(self) -> None:
        if self._wake.fileno() < 0:
            return
        for peer in list(self._owners):
            self.forget(peer)
        for reader in self._guests.everybody:
            self._end(reader)
        self._outcomes.clear()
        self._selector.close()
        self._listener.close()
        self._wake.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)

    # ── connections ──────────────────────────────────────────────────────────────────────────────

    def _dial(self, owner: TcpOwner) -> Stream:
        address = owner.address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                sock.connect((address.host, address.port))
        except UNREACHABLE:
            sock.close()
            raise
        secure = None
        if self._ours is not None:
            secure = partial(
                self._ours.wrap_socket, server_hostname=owner.name, do_handshake_on_connect=False
            )
        stream = Stream(sock, secure)
        self._selector.register(stream.fd, stream.events, owner)
        return stream

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # no more, or it left
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                return
            self._arrived(sock)

    def _turn_away(self) -> None:
        """Out of descriptors: accept one connection and close it, or the listener would stay ready
        for as long as it waits.
        """
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
            self.refused_count += 1
        self._spare_fd = -1
        with contextlib.suppress(OSError):
            self._spare_fd = os.eventfd(0)

    def _arrived(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secure = None
        if self._theirs is not None:
            secure = partial(
                self._theirs.wrap_socket, server_side=True, do_handshake_on_connect=False
            )
        # It speaks first. Who is silent costs no more than a place.
        stream = Stream(sock, secure, selectors.EVENT_READ)
        reader = TcpReader(stream, self._source, self._landing)
        self._selector.register(reader.stream.fd, reader.stream.events, reader)
        if (oldest := self._guests.arrive(reader)) is not None:
            self._end(oldest)

    def _serve(self, reader: TcpReader) -> bool:
        """Serve a peer that connected. Returns whether there may be more to do at once. Raises
        OSError, ConnectionClosed.
        """
        if not reader.stream.shake():
            return False
        now_ns = time.monotonic_ns()
        if reader in self._guests.arriving:
            gone = self._guests.admit(reader, reader.stream.node, now_ns)
            if gone is reader:
                self.refused_count += 1
                raise ConnectionClosed("no connection is free for it")
            if gone is not None:
                self._end(gone)
        self._guests.heard(reader, now_ns)
        return reader.turn()

    def _turn(self, end: TcpReader | TcpOwner) -> None:
        if end.stream is None or (isinstance(end, TcpReader) and end not in self._guests):
            return
        try:
            if isinstance(end, TcpOwner):
                done, more = end.turn()
                self._outcomes += [Outcome(number, End.DONE) for number in done]
            else:
                more = self._serve(end)
        except (OSError, ConnectionClosed) as error:
            if isinstance(end, TcpOwner):
                self._fail(end, str(error))
            else:
                self._end(end)
            return
        self._selector.modify(end.stream.fd, end.stream.wants(write=end.wants_to_write), end)
        if more:
            self._again.add(end)
            self._wake.set()

    def _fail(self, owner: TcpOwner, reason: str) -> None:
        """Close the connection to an owner, and fail its transfers: nothing of it writes
        any more.
        """
        self._end(owner)
        why = f"{owner.name}: {reason}"
        self._outcomes += [Outcome(number, End.FAILED, why) for number in owner.lose()]

    def _end(self, end: TcpReader | TcpOwner) -> None:
        self._again.discard(end)
        if end.stream is not None:
            self._selector.unregister(end.stream.fd)
            end.stream.close()
        if isinstance(end, TcpOwner):
            end.stream = None
        else:
            self._guests.leave(end)

    def _expire(self) -> None:
        now_ns = time.monotonic_ns()
        for reader in list(self._guests.arriving):
            if reader.stream.deadline_ns and now_ns > reader.stream.deadline_ns:
                self._end(reader)
        for owner in list(self._dialled):
            if owner.stream is None or not owner.stream.deadline_ns:
                self._dialled.discard(owner)
            elif now_ns > owner.stream.deadline_ns:
                self._fail(owner, "it does not respond")


def _contexts(options: Mapping[str, str]) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """TLS (for peers that dial this node, for peers that it dials); None: insecure. Raises
    ConfigError.
    """
    if options.get("insecure") == "yes":
        return None, None
    try:
        ca, certificate, key = (options[name] for name in ("ca", "certificate", "key"))
    except KeyError as error:
        raise ConfigError(
            f"the tcp transport lacks the option {error}: give ca, certificate and key, or in a lab"
            " insecure=yes"
        ) from None
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.hostname_checks_common_name = False
        try:
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificates cannot be used: {error}") from None
        contexts.append(context)
    return contexts[0], contexts[1]


def _is_dns_name(name: str) -> bool:
    return is_name(name) and max(map(len, name.split("."))) <= LABEL_CHARS_MAX


def _address_in(details: bytes) -> Address | None:
    """The address in a descriptor's details; None: they have none."""
    try:
        return msgspec.msgpack.decode(details, type=Address)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _address(options: Mapping[str, str], listener: socket.socket, *, secure: bool) -> Address:
    """The address that peers dial. Raises ConfigError: its host is no IP address."""
    host, port = listener.getsockname()[:2]
    host = options.get("host") or host
    try:
        return Address(host, port, secure)
    except ValueError:
        listener.close()
        raise ConfigError(f"the tcp transport's host {host!r} is no IP address") from None


def _listen(options: Mapping[str, str]) -> socket.socket:
    address = options.get("listen", "127.0.0.1:0")
    host, _, port = address.rpartition(":")
    pause, give_up_s = threading.Event(), time.monotonic() + PORT_PATIENCE_S
    while True:
        try:
            listener = socket.create_server(
                (host.strip("[]"), int(port)),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=BACKLOG,
            )
        except (OSError, ValueError) as error:
            # The transfer worker of the process before may take a moment to be gone.
            if getattr(error, "errno", 0) == errno.EADDRINUSE and time.monotonic() < give_up_s:
                pause.wait(PORT_PAUSE_S)
                continue
            why = error if isinstance(error, OSError) else OSError(errno.EINVAL, "")
            raise ConfigError(cannot_listen("--transport tcp,port", address, why)) from None
        listener.setblocking(False)
        return listener
