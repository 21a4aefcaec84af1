"""NIXL: one-sided reads, by UCX or another of its plugins.

The arena is registered once, as two mappings: what this node reads into, writable, and what peers
read from, which may only be read. Peers are told the second one alone (ADR 23 has what a remote
write does). A plugin that cannot register read-only memory gets one registration, and says so.

A connection that works is kept when its peer is forgotten, for when it comes back: with each new
one UCX leaves two sockets open. Only FORGOTTEN_MAX are: some never come back.

When a read ends with an error, the other requests of the same read may still be under way, and NIXL
asks no more about them. Of one range there is one request, whose end is an end.

Options: `plugin` (default UCX), and its own, `plugin.NAME`. UCX itself reads UCX_* of the
environment.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError, TransportError
from kvstore.ports import End, Outcome, Pieces, TransportCapabilities
from kvstore.transport.loopback import open_descriptor
from kvstore.transport.pieces import check_pieces
from kvstore.wire.mover import Descriptor, encode

UNIT_BYTES: Final = 64 << 10
PREPARED_MIN: Final = 16
"""Pieces from which on a list that was prepared is worth its indices."""
FORGOTTEN_MAX: Final = 64
"""Connections whose peers may come back."""
PROGRESS_US: Final = 50_000
"""How long NIXL's progress thread sleeps at most; whatever arrives wakes it (nixl pull request 347:
some transports of UCX want to be looked after now and then all the same)."""


class _NixlPeer:
    """A process, as long as its name is not taken by another."""

    def __init__(self, agent: str, found: Descriptor, units: Any) -> None:
        self.agent = agent
        self.found = found
        self.units = units
        """Its arena, prepared in UNIT_BYTES."""
        self.is_connected = True
        self.is_broken = False


class _NixlRead(NamedTuple):
    handle: Any
    peer: _NixlPeer
    ranges: int


class Nixl:
    """A `Transport` over NIXL."""

    def __init__(
        self,
        name: str,
        *,
        arena: NDArray[np.uint8],
        source: NDArray[np.uint8],
        options: Mapping[str, str],
    ) -> None:
        """Register `arena`, which is written to, and `source`, the same bytes to be read.

        Raises:
            ConfigError: NIXL is not installed, or has no such plugin.
        """
        self._name, self._arena = name, arena
        self._plugin = options.get("plugin", "UCX")
        # Another one with each start: peers do not mistake this agent for an earlier one.
        self._agent, self._faults = _open_agent(f"{name}/{secrets.token_hex(8)}")
        own = {key[7:]: value for key, value in options.items() if key.startswith("plugin.")}
        try:
            self._agent.create_backend(self._plugin, own)
        except self._faults as error:
            raise ConfigError(f"NIXL cannot open its plugin {self._plugin}: {error}") from None
        self._register(arena)
        self._base = source.ctypes.data
        self._read_only = True
        try:
            registered = self._register(source)
        except self._faults:
            self._base, self._read_only = arena.ctypes.data, False
            registered = _ranges(self._agent, arena)
        self._details: bytes = self._agent.get_partial_agent_metadata(
            registered, True, [self._plugin]
        )
        self._units = self._prepare("", arena.ctypes.data, len(arena))
        self._peers: dict[str, _NixlPeer] = {}
        """Those that are forgotten in the order in which they were."""
        self._reads: dict[int, _NixlRead] = {}
        self._outcomes: list[Outcome] = []

    refused_count = 0
    """Who reads from here is not known here."""

    @property
    def capabilities(self) -> TransportCapabilities:
        return TransportCapabilities(one_sided=True, read_only_source=self._read_only, secure=False)

    def describe(self) -> bytes:
        return encode(
            Descriptor(
                f"nixl/{self._plugin}", self._name, len(self._arena), self._base, self._details
            )
        )

    def connect(self, peer: str, descriptor: bytes) -> None:
        known = self._peers.get(peer)
        assert known is None or not known.is_connected, peer
        found = open_descriptor(descriptor, peer=peer, backend=f"nixl/{self._plugin}")
        if known is not None and known.found == found and not known.is_broken:
            known.is_connected = True
            return
        self._drop(peer)
        agent = ""
        try:
            agent = self._agent.add_remote_agent(found.details).decode()
            units = self._prepare(agent, found.base, found.size_bytes)
        except self._faults as error:
            if agent:
                self._quietly(self._agent.remove_remote_agent, agent)
            raise TransportError(f"NIXL cannot use the descriptor of {peer}: {error}") from None
        self._peers[peer] = _NixlPeer(agent, found, units)

    def post_read(self, read: int, peer: str, pieces: Pieces) -> None:
        to = self._peers.get(peer)
        if to is None or not to.is_connected:
            raise TransportError(f"{peer} is not connected")
        check_pieces(pieces, local_bytes=len(self._arena), remote_bytes=to.found.size_bytes)
        if not len(pieces.length):
            self._outcomes.append(Outcome(read, End.DONE))
            return
        try:
            handle = self._request(to, pieces)
        except self._faults as error:
            raise TransportError(f"NIXL cannot read from {peer}: {error}") from None
        begun = _NixlRead(handle, to, len(pieces.length))
        self._reads[read] = begun
        try:
            state = self._agent.transfer(handle)
        except self._faults as error:
            self._end(read, begun, str(error))
        else:
            self._look(read, begun, state)

    def poll(self) -> list[Outcome]:
        for read, begun in list(self._reads.items()):
            try:
                state = self._agent.check_xfer_state(begun.handle)
            except self._faults as error:
                self._end(read, begun, str(error))
            else:
                self._look(read, begun, state)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def fileno(self) -> int:
        return -1

    def forget(self, peer: str) -> None:
        """A read under way is given up, which says nothing about its writes."""
        gone = self._peers.get(peer)
        if gone is None:
            return
        gone.is_connected = False
        for read, begun in list(self._reads.items()):
            if begun.peer is gone:
                self._end(read, begun, "given up", End.UNKNOWN)
        if gone.is_broken:
            self._drop(peer)
            return
        del self._peers[peer]
        self._peers[peer] = gone  # as the last
        forgotten = [name for name, each in self._peers.items() if not each.is_connected]
        if len(forgotten) > FORGOTTEN_MAX:
            self._drop(forgotten[0])

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
            self._drop(peer)
        self._outcomes.clear()

    def _look(self, read: int, begun: _NixlRead, state: str) -> None:
        if state == "DONE":
            del self._reads[read]
            self._quietly(begun.handle.release)
            self._outcomes.append(Outcome(read, End.DONE))
        elif state != "PROC":
            self._end(read, begun, "NIXL reports an error")

    def _end(self, read: int, begun: _NixlRead, reason: str, end: End = End.FAILED) -> None:
        """It came to nothing. Of one range one request; of more, others may be under way."""
        begun.peer.is_broken = True
        del self._reads[read]
        self._quietly(begun.handle.release)
        end = end if begun.ranges == 1 else End.UNKNOWN
        self._outcomes.append(Outcome(read, end, f"{begun.peer.found.name}: {reason}"))

    def _drop(self, peer: str) -> None:
        """End the connection, if there is one."""
        gone = self._peers.pop(peer, None)
        if gone is not None:
            self._quietly(gone.units.release)
            self._quietly(self._agent.remove_remote_agent, gone.agent)

    def _quietly(self, release: Callable[..., object], *arguments: object) -> None:
        """What cannot be given back stays until this process ends."""
        with contextlib.suppress(*self._faults):
            release(*arguments)

    def _register(self, memory: NDArray[np.uint8]) -> Any:
        registered = _ranges(self._agent, memory)
        self._agent.register_memory(registered, backends=[self._plugin])
        return registered

    def _prepare(self, agent: str, base: int, size_bytes: int) -> Any:
        """All units of an arena, of which reads then name some by number."""
        rows = [(base, UNIT_BYTES, 0, UNIT_BYTES, max(1, size_bytes // UNIT_BYTES))]
        return self._agent.prep_xfer_dlist(
            agent, np.array(rows, np.uint64), "DRAM", backends=[self._plugin]
        )

    def _request(self, to: _NixlPeer, pieces: Pieces) -> Any:
        every = np.concatenate(pieces)
        if len(pieces.length) >= PREPARED_MIN and not (every % np.uint64(UNIT_BYTES)).any():
            return self._agent.make_prepped_xfer(
                "READ",
                self._units,
                _units(pieces.local, pieces.length),
                to.units,
                _units(pieces.remote, pieces.length),
                backends=[self._plugin],
            )
        lists = [
            self._agent.get_xfer_descs(_rows(base, begin, pieces.length), "DRAM")
            for base, begin in (
                (self._arena.ctypes.data, pieces.local),
                (to.found.base, pieces.remote),
            )
        ]
        return self._agent.initialize_xfer("READ", *lists, to.agent, backends=[self._plugin])


def _open_agent(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """An agent, and what its calls raise."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # errors are outcomes, and told as such
    # `nixl` itself would load torch, to learn which of the two to take; host memory needs neither.
    for package in ("nixl_cu13", "nixl_cu12"):
        try:
            api = importlib.import_module(f"{package}._api")
        except ModuleNotFoundError:
            continue
        faults = [each for each in vars(api.nixlBind).values() if isinstance(each, type)]
        raised = tuple(each for each in faults if issubclass(each, Exception))
        with sleeping_progress(api.nixlBind):
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
        return agent, (*raised, RuntimeError, ValueError, TypeError)
    raise ConfigError("NIXL is not installed: pip install 'kvstore-llm[nixl]'")


@contextlib.contextmanager
def sleeping_progress(bindings: Any) -> Iterator[None]:
    """The progress threads of agents that are made meanwhile sleep when there is nothing to do.

    NIXL's Python interface sets their sleep to 0, and nobody can choose: an idle agent then takes a
    core, for ever (0.97 of one with 1.5.1).
    """
    made = bindings.nixlAgentConfig
    its = getattr(made, "pthrDelay", None)
    if not isinstance(its, property) or its.fset is None:  # another release, which may do without
        yield
        return
    change = its.fset

    def sleep(config: Any, _: int) -> None:
        change(config, PROGRESS_US)

    bindings.nixlAgentConfig = type("Config", (made,), {"pthrDelay": property(its.fget, sleep)})
    try:
        yield
    finally:
        bindings.nixlAgentConfig = made


def _ranges(agent: Any, memory: NDArray[np.uint8]) -> Any:
    return agent.get_reg_descs([(memory.ctypes.data, len(memory), 0, "")], "DRAM")


def _rows(base: int, begin: NDArray[np.uint64], length: NDArray[np.uint64]) -> NDArray[np.uint64]:
    rows = np.zeros((len(begin), 3), np.uint64)
    rows[:, 0] = np.uint64(base) + begin
    rows[:, 1] = length
    return rows


def _units(begin: NDArray[np.uint64], length: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Numbers of the units that these ranges consist of."""
    counts = (length // np.uint64(UNIT_BYTES)).astype(np.int64)
    firsts = (begin // np.uint64(UNIT_BYTES)).astype(np.int64)
    before = np.cumsum(counts) - counts
    units = np.repeat(firsts - before, counts) + np.arange(counts.sum())
    return units.astype(np.int32)
