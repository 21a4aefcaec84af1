"""Plain UCX through ucxx: tagged messages, for machines without NIXL.

    reader                                        owner
      │ receives for every piece, with a tag of its own
      │── CONTROL: own address, tag, pieces ─────▶│
      │◀──────────────── tag: the bytes of each ──│   in order, from the owner's arena

ucxx has no one-sided reads in Python, so the owner's loop takes part. A receive that has completed,
well or in error, is a place that UCX is done with; others of a peer that has ended or is forgotten
are not, and end in limbo. Writes are refused: a tagged message lands where its receiver says.

Options: none; UCX itself reads UCX_* of the environment.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import xxhash

from kvstore.errors import ConfigError, TransportError
from kvstore.ports import Pieces, TransportCapabilities, TransportMemory
from kvstore.transport.pieces import BackEnd, check_within
from kvstore.wire import transfer_worker as wire
from kvstore.wire.transfer_worker import Descriptor, Direction, Words

CONTROL: Final = 1
DATA: Final = 1 << 62
REQUESTS_PER_TURN: Final = 64
READERS_MAX: Final = 2048


class _UcxRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of a reader to an owner."""

    address: Annotated[bytes, msgspec.Meta(max_length=8192)]
    tag: Annotated[int, msgspec.Meta(ge=DATA, le=2**63 - 1)]
    begin: Words
    length: Words


_decoder = msgspec.msgpack.Decoder(_UcxRequest)


class _Owner:
    """A peer that is read from."""

    def __init__(self, found: Descriptor, endpoint: Any) -> None:
        self.found, self.endpoint = found, endpoint


class _UcxRead:
    def __init__(self, owner: _Owner, requests: list[Any], ask: bytes) -> None:
        self.owner, self.requests = owner, requests
        self._ask = ask
        """Encoded request, kept since UCX reads a long message in place when the owner
        fetches it.
        """
        self.completed = 0
        """Number of leading requests that are known to have completed."""

    def is_over(self) -> bool:
        """Whether all of its requests have completed. Looks at each completed one once."""
        while self.completed < len(self.requests) and self.requests[self.completed].completed:
            self.completed += 1
        return self.completed == len(self.requests)


class Ucx(BackEnd[_Owner]):
    """A `Transport` over UCX."""

    capabilities = TransportCapabilities(
        takes_writes=False, ends_forgotten=False, is_secure=False, options={}, modules=("ucxx",)
    )

    def __init__(self, name: str, memory: TransportMemory, options: Mapping[str, str]) -> None:
        """Set up UCX; ucxx must be installed. Raises ConfigError: UCX cannot work here."""
        super().__init__("ucx", name, memory)
        self._arena, self._source, landing = memory
        assert landing is None, "it takes no writes"
        if options:
            raise ConfigError(f"the ucx transport knows no option {next(iter(options))!r}")
        self._lib: Any = importlib.import_module("ucxx._lib.libucxx")
        self._array: Any = importlib.import_module("ucxx._lib.arr").Array
        feature = self._lib.Feature
        try:
            context = self._lib.UCXContext({}, feature_flags=(feature.TAG, feature.WAKEUP))
            self._worker: Any = self._lib.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
        except self._lib.UCXError as error:
            raise ConfigError(f"UCX cannot work here: {error}") from None
        address: bytes = self._worker.address.tobytes()
        self._address = xxhash.xxh3_64_digest(address) + address
        """Address of this worker behind its checksum, since UCX itself does not check the bytes of
        an address.
        """
        self._readers: dict[bytes, Any] = {}
        """Address → endpoint of each peer that reads from here."""
        self._reads: dict[int, _UcxRead] = {}
        self._given_up: list[_UcxRead] = []
        """Reads that were given up: their places may still be written to, and their requests must
        not be freed.
        """
        self._sends: deque[Any] = deque()
        self._next_tag = DATA

    def describe(self) -> bytes:
        return self._described(self._address)

    def _connected(self, found: Descriptor) -> _Owner:
        return _Owner(found, self._dial(found.details))

    def _begin(self, number: int, to: _Owner, pieces: Pieces, _: Direction) -> None:
        if not to.endpoint.alive:
            raise TransportError(f"{to.found.name} has ended")
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        places = zip(pieces.local.tolist(), pieces.length.tolist(), strict=True)
        requests = [
            to.endpoint.tag_recv(self._array(self._arena[at : at + size]), self._tag(tag))
            for at, size in places
            if size
        ]
        ask = msgspec.msgpack.encode(
            _UcxRequest(self._address, tag, wire.words(pieces.remote), wire.words(pieces.length))
        )
        requests.append(to.endpoint.tag_send(self._array(ask), self._tag(CONTROL)))
        self._reads[number] = _UcxRead(to, requests, ask)
        self._progress()

    def _go_on(self) -> None:
        self._progress()
        self._answer()
        while self._sends and self._sends[0].completed:
            self._sends.popleft()
        for read, begun in list(self._reads.items()):
            self._look(read, begun)
        self._readers = {at: end for at, end in self._readers.items() if end.alive}
        self._progress()

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    def forget(self, peer: str) -> None:
        gone = self._peers.pop(peer, None)
        under_way = [read for read, begun in self._reads.items() if begun.owner is gone]
        for read in under_way:
            self._give_up(read)
        if gone is not None and not under_way and gone.endpoint.alive:
            gone.endpoint.close()

    def _tag(self, number: int) -> Any:
        return self._lib.UCXXTag(number)

    def _dial(self, address: bytes) -> Any:
        if len(address) < 8 or xxhash.xxh3_64_digest(address[8:]) != address[:8]:
            raise TransportError("this is no address of UCX")
        try:
            place = self._lib.UCXAddress.create_from_buffer(address[8:])
            return self._worker.create_endpoint_from_worker_address(place, True)
        except (self._lib.UCXError, ValueError, TypeError) as error:
            raise TransportError(f"UCX cannot use this address: {error}") from None

    def _progress(self) -> None:
        """Make all progress that is due, and arm the descriptor for what comes next."""
        self._worker.progress()
        while not self._worker.arm():
            self._worker.progress()

    def _look(self, read: int, begun: _UcxRead) -> None:
        if begun.is_over():
            del self._reads[read]
            try:
                for request in begun.requests:
                    request.check_error()
            except self._lib.UCXError as error:
                self._outcomes.append(wire.Failed(read, str(error)))
            else:
                self._outcomes.append(wire.Done(read))
        elif not begun.owner.endpoint.alive:
            self._give_up(read)

    def _give_up(self, read: int) -> None:
        """End a read in limbo. Its receives stay posted: to cancel them at an endpoint that has
        failed crashes UCX.
        """
        begun = self._reads.pop(read)
        self._given_up.append(begun)
        self._outcomes.append(wire.Limbo(read))

    # ── for readers ──────────────────────────────────────────────────────────────────────────────

    def _answer(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            found = self._worker.tag_probe(self._tag(CONTROL), remove=True)
            if not found.matched:
                return
            data = np.empty(found.length, np.uint8)
            request = self._worker.tag_recv_with_handle(self._array(data), found)
            while not request.completed:  # it is here already, or its sender is gone
                self._worker.progress()
            try:
                self._give(_decoder.decode(data.tobytes()))
            except (msgspec.DecodeError, TransportError):
                continue  # whoever asked so waits for its own deadline

    def _give(self, ask: _UcxRequest) -> None:
        """Send the bytes that a reader asks for. Raises TransportError."""
        if len(ask.begin) != len(ask.length) or len(ask.begin) % 8:
            raise TransportError("the arrays of a request are not equally long")
        begin, length = wire.array_of(ask.begin), wire.array_of(ask.length)
        check_within(begin, length, 0, len(self._source), "the arena")
        endpoint = self._readers.get(ask.address)
        if endpoint is None:
            if len(self._readers) >= READERS_MAX:
                self.refused_count += 1
                raise TransportError("too many readers")
            endpoint = self._readers[ask.address] = self._dial(ask.address)
        for at, size in zip(begin.tolist(), length.tolist(), strict=True):
            if size:
                part = self._array(self._source[at : at + size])
                self._sends.append(endpoint.tag_send(part, self._tag(ask.tag)))
