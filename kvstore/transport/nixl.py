"""NIXL: one-sided reads and writes, by UCX or another of its plugins.

The arena is registered as one mapping for each use: what this node moves into and out of, writable;
what peers read from, which may only be read; and the landing memory, if there is any, which peers
may write to. Peers learn of the latter two alone (ADR 11 has what a remote write elsewhere does). A
plugin that cannot register read-only memory gets the first instead of the second.

A connection that works is kept when its peer is forgotten, for when it comes back: with each new
one UCX leaves two sockets open. Only FORGOTTEN_MAX are: some never come back.

When a read ends with an error, the other requests of the same read may still be under way, and NIXL
asks no more about them. One range has one request, whose end is an end.

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
from kvstore.installation import is_installed
from kvstore.ports import Pieces, TransportCapabilities, TransportMemory
from kvstore.transport.pieces import BackEnd
from kvstore.wire.transfer_worker import Descriptor, Direction, Done, Failed, Limbo

UNIT_BYTES: Final = 64 << 10
PREPARED_MIN: Final = 16
"""From this many pieces on, a prepared list of units is worth the indices into it."""
FORGOTTEN_MAX: Final = 64
"""Most connections that are kept for peers that are forgotten, as these may come back."""
PROGRESS_US: Final = 50_000
"""Longest sleep of NIXL's progress thread, in µs; whatever arrives wakes it (nixl pull request 347:
some transports of UCX must be polled now and then all the same).
"""


class _NixlPeer:
    """A peer's process, while no other one has taken its name."""

    def __init__(self, agent: str, found: Descriptor, units: Any) -> None:
        self.agent = agent
        self.found = found
        self.units = units
        """Prepared list of its arena, in UNIT_BYTES."""
        self.is_broken = False


class _NixlMove(NamedTuple):
    handle: Any
    peer: _NixlPeer
    ranges: int


class Nixl(BackEnd[_NixlPeer]):
    """A `Transport` over NIXL."""

    capabilities = TransportCapabilities(
        takes_writes=True,
        ends_forgotten=False,
        is_secure=False,
        options={"plugin": "NAME", "plugin.OPTION": "VALUE"},
        modules=("nixl_cu13", "nixl_cu12"),
    )

    def __init__(self, name: str, memory: TransportMemory, options: Mapping[str, str]) -> None:
        """Register the memory; NIXL must be installed. Raises ConfigError: NIXL has no
        such plugin.
        """
        self._arena, source, landing = memory
        self._plugin = options.get("plugin", "UCX")
        super().__init__(f"nixl/{self._plugin}", name, memory)
        # Another one with each start: peers do not mistake this agent for an earlier one.
        self._agent, self._faults = _open_agent(f"{name}/{secrets.token_hex(8)}")
        own = {key[7:]: value for key, value in options.items() if key.startswith("plugin.")}
        try:
            self._agent.create_backend(self._plugin, own)
        except self._faults as error:
            raise ConfigError(f"NIXL cannot open its plugin {self._plugin}: {error}") from None
        self._register(self._arena)
        try:
            self._register(source)
        except self._faults:
            source = self._arena
        self._told = [source]
        """Mappings that peers may use, kept mapped as long as they may."""
        if landing is not None:
            self._register(landing.memory)
            self._told.append(landing.memory)
        details: bytes = self._agent.get_partial_agent_metadata(
            _ranges(self._agent, *self._told), True, [self._plugin]
        )
        self._descriptor = self._described(details, base=source.ctypes.data)
        self._units = self._prepare("", self._arena.ctypes.data, len(self._arena))
        self._forgotten: dict[str, _NixlPeer] = {}
        """Peers whose connection is kept, in the order in which they were forgotten."""
        self._moves: dict[int, _NixlMove] = {}

    def describe(self) -> bytes:
        return self._descriptor

    def _connected(self, found: Descriptor) -> _NixlPeer:
        known = self._forgotten.pop(found.name, None)
        if known is not None and known.found == found:
            return known
        if known is not None:
            self._drop(known)
        agent = ""
        try:
            agent = self._agent.add_remote_agent(found.details).decode()
            units = self._prepare(agent, found.base, found.size_bytes)
        except self._faults as error:
            if agent:
                self._quietly(self._agent.remove_remote_agent, agent)
            raise TransportError(
                f"NIXL cannot use the descriptor of {found.name}: {error}"
            ) from None
        return _NixlPeer(agent, found, units)

    def _begin(self, number: int, to: _NixlPeer, pieces: Pieces, direction: Direction) -> None:
        try:
            handle = self._request(to, pieces, direction)
        except self._faults as error:
            text = f"NIXL cannot {direction.value} at {to.found.name}: {error}"
            raise TransportError(text) from None
        begun = self._moves[number] = _NixlMove(handle, to, len(pieces.length))
        self._look(number, begun, self._agent.transfer)

    def _go_on(self) -> None:
        for number, begun in list(self._moves.items()):
            self._look(number, begun, self._agent.check_xfer_state)

    def fileno(self) -> int:
        return -1

    def forget(self, peer: str) -> None:
        """Give up transfers with this peer, which says nothing about the ends of their requests."""
        gone = self._peers.pop(peer, None)
        if gone is None:
            return
        for number, begun in list(self._moves.items()):
            if begun.peer is gone:
                self._end(number, begun, None)
        if gone.is_broken:
            self._drop(gone)
            return
        self._forgotten[peer] = gone
        if len(self._forgotten) > FORGOTTEN_MAX:
            self._drop(self._forgotten.pop(next(iter(self._forgotten))))

    def close(self) -> None:
        super().close()
        while self._forgotten:
            self._drop(self._forgotten.popitem()[1])

    def _look(self, number: int, begun: _NixlMove, ask: Callable[[Any], str]) -> None:
        """Handle the state of a move. `ask`: a call of NIXL that returns it."""
        try:
            state = ask(begun.handle)
        except self._faults as error:
            self._end(number, begun, str(error))
            return
        if state == "DONE":
            del self._moves[number]
            self._quietly(begun.handle.release)
            self._outcomes.append(Done(number))
        elif state != "PROC":
            self._end(number, begun, "NIXL reports an error")

    def _end(self, number: int, begun: _NixlMove, reason: str | None) -> None:
        """End a move that failed; `reason` None: it is given up. With a single range it has one
        request, so the end of one that was not is known; with more ranges, other requests may be
        under way."""
        begun.peer.is_broken = True
        del self._moves[number]
        self._quietly(begun.handle.release)
        is_known = reason is not None and begun.ranges == 1
        failed = Failed(number, f"{begun.peer.found.name}: {reason}")
        self._outcomes.append(failed if is_known else Limbo(number))

    def _drop(self, gone: _NixlPeer) -> None:
        """End the connection to a peer."""
        self._quietly(gone.units.release)
        self._quietly(self._agent.remove_remote_agent, gone.agent)

    def _quietly(self, release: Callable[..., object], *arguments: object) -> None:
        """Release something; if that fails, NIXL keeps it until this process ends."""
        with contextlib.suppress(*self._faults):
            release(*arguments)

    def _register(self, memory: NDArray[np.uint8]) -> None:
        self._agent.register_memory(_ranges(self._agent, memory), backends=[self._plugin])

    def _prepare(self, agent: str, base: int, size_bytes: int) -> Any:
        """Prepare the list of all units of an arena; transfers then name units by number."""
        rows = [(base, UNIT_BYTES, 0, UNIT_BYTES, max(1, size_bytes // UNIT_BYTES))]
        return self._agent.prep_xfer_dlist(
            agent, np.array(rows, np.uint64), "DRAM", backends=[self._plugin]
        )

    def _request(self, to: _NixlPeer, pieces: Pieces, direction: Direction) -> Any:
        every, reads = np.concatenate(pieces), direction is Direction.READ
        is_whole = not (every % np.uint64(UNIT_BYTES)).any()
        if reads and len(pieces.length) >= PREPARED_MIN and is_whole:
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
                (
                    to.found.base if reads else to.found.landing_base,
                    pieces.remote - np.uint64(0 if reads else to.found.landing_begin),
                ),
            )
        ]
        kind = "READ" if reads else "WRITE"
        return self._agent.initialize_xfer(kind, *lists, to.agent, backends=[self._plugin])


def _open_agent(name: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """(an agent of NIXL, the exceptions that its calls raise)."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # errors are outcomes, and told as such
    # `nixl` itself would load torch, to learn which of the two to take; host memory needs neither.
    package = next(filter(is_installed, Nixl.capabilities.modules))
    api = importlib.import_module(f"{package}._api")
    faults = [each for each in vars(api.nixlBind).values() if isinstance(each, type)]
    raised = tuple(each for each in faults if issubclass(each, Exception))
    with sleeping_progress(api.nixlBind):
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
    return agent, (*raised, RuntimeError, ValueError, TypeError)


@contextlib.contextmanager
def sleeping_progress(bindings: Any) -> Iterator[None]:
    """Context in which the progress threads of new agents sleep when there is nothing to do.

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


def _ranges(agent: Any, *memories: NDArray[np.uint8]) -> Any:
    rows = [(memory.ctypes.data, len(memory), 0, "") for memory in memories]
    return agent.get_reg_descs(rows, "DRAM")


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
