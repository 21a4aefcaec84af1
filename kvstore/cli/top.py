"""`kvstore top`: loads of nodes made into figures. Covers sources and arithmetic.

    a node's socket ─┐
    the index ───────┴▶ Sample per node ─▶ Tally (the sample before) ─▶ Figures

Loads of other nodes come from the index, to which nodes publish them with their heartbeats: a
silent node is seen there and delays nothing. Rates are differences of two samples over the node's
own clock. Does not cover: the layout (`top_view`), the terminal (`top_screen`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from kvstore.cli.ask import LOAD_TIMEOUT_S, NodeClient
from kvstore.errors import KVStoreError
from kvstore.index.feed import Trust
from kvstore.proto.rows import INDEX_IS_STALE, UNKNOWN
from kvstore.wire.load import Load

if TYPE_CHECKING:
    from kvstore.client.index import IndexClient

MS_PER_S: Final = 1000
UP, SILENT, GONE = "up", "silent", "gone"
_STATES: Final = {Trust.EXACT: UP, Trust.CATCHING_UP: UP, Trust.STALE: SILENT, None: GONE}
THIS_NODE: Final = "(this node)"
WAITS: Final = 3
"""Nodes publish their load every two seconds; the interval between samples may be shorter."""


class Sample(NamedTuple):
    """State and load of a node at one moment."""

    node: str
    state: str
    trust: str
    """Trust of the index in the node; empty: the index was not asked."""
    incarnation: int
    load: Load | None


class Figures(msgspec.Struct, frozen=True):
    """Figures of a node on the screen. None: not known, or not yet."""

    node: str
    state: str
    """up, silent (no answer, or late heartbeats), gone; unknown: the index is stale."""
    index: str
    """Trust of the index in the node: exact, catching-up, stale, out; or unknown."""
    replicas: int | None = None
    """Index replicas that the node is configured to feed …"""
    replicas_reached: int | None = None
    """… and those that it reaches."""
    dram_bytes: int | None = None
    dram_used_bytes: int | None = None
    file_bytes: int | None = None
    file_used_bytes: int | None = None
    leases: int | None = None
    engines: int | None = None
    slots_quarantined: int | None = None
    fetch_p50_us: int | None = None
    fetch_p99_us: int | None = None
    saved_per_s: float | None = None
    """Seconds of prefill that loads saved a second, waits deducted; below 0: they cost more."""
    hit_percent: float | None = None
    """Share of the blocks looked up between two samples; the rates below cover the same time."""
    stored_bytes_per_s: float | None = None
    leased_bytes_per_s: float | None = None
    fetched_bytes_per_s: float | None = None
    lent_bytes_per_s: float | None = None


class TopView(NamedTuple):
    """Contents of the screen."""

    figures: list[Figures]
    trouble: str
    """Why the figures may be wrong; empty: they are right."""


class TopSource(Protocol):
    """Source of samples."""

    name: str
    doubt: str
    """Why the last sample may be wrong; empty: it is right."""

    def sample(self) -> list[Sample]:
        """All nodes, now. Raises KVStoreError."""
        ...


class OneNode:
    """The node at a socket."""

    doubt = ""

    def __init__(self, socket: Path) -> None:
        self.name = f"at {socket}"
        self._socket = socket

    def sample(self) -> list[Sample]:
        """A sample of the node. Raises AttachError."""
        with contextlib.closing(NodeClient(self._socket)) as client:
            node, incarnation, load = client.load()
        return [Sample(node or THIS_NODE, UP, "", incarnation, load)]


class AllNodes:
    """The nodes that the index knows."""

    def __init__(self, client: IndexClient, name: str) -> None:
        self.name = f"by the index {name}"
        self.doubt = ""
        self._client = client

    def sample(self) -> list[Sample]:
        """A sample of each. Raises IndexUnavailable."""
        known = self._client.nodes(timeout_s=LOAD_TIMEOUT_S)
        if known.trust is Trust.STALE:
            self.doubt = INDEX_IS_STALE
            return [Sample(m.node, UNKNOWN, UNKNOWN, m.incarnation, None) for m in known.nodes]
        self.doubt = ""
        words = {None: "out"} | {trust: trust.word for trust in Trust}
        return [
            Sample(m.node, _STATES[m.trust], words[m.trust], m.incarnation, m.load)
            for m in known.nodes
        ]


class Tally:
    """Two samples of each node, and the rates between them."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Sample, Figures]] = {}
        self.trouble = ""
        """Why the last query failed, or its answer may be wrong; empty: all is well."""

    def ask(self, source: TopSource) -> list[Figures]:
        """Figures of all nodes in the answer; if there is none, of the last ones, as silent."""
        try:
            samples = source.sample()
            self.trouble = source.doubt
        except KVStoreError as error:
            self.trouble = str(error)
            lost = [sample for sample, _ in self._last.values()]
            samples = [sample._replace(state=SILENT) for sample in lost]
        return self.take(samples)

    def take(self, samples: list[Sample]) -> list[Figures]:
        """Figures of these nodes."""
        made = {sample.node: (sample, self._figures(sample)) for sample in samples}
        self._last = made
        return [figures for _, figures in made.values()]

    @property
    def has_rates(self) -> bool:
        """Whether every node that is up, and publishes a load, has rates."""
        return all(
            figures.stored_bytes_per_s is not None or figures.state != UP or sample.load is None
            for sample, figures in self._last.values()
        )

    def _figures(self, sample: Sample) -> Figures:
        load = sample.load
        if load is None or sample.state != UP:
            return _nothing(sample)
        before = self._last.get(sample.node)
        figures = _gauges(sample, load)
        if before is None or before[0].load is None or before[0].incarnation != sample.incarnation:
            return figures
        earlier, told = before[0].load, before[1]
        if load.at_ms <= earlier.at_ms:  # the same load
            return msgspec.structs.replace(figures, **{n: getattr(told, n) for n in _CHANGES})
        seconds = (load.at_ms - earlier.at_ms) / MS_PER_S
        hit = max(0, load.blocks_hit - earlier.blocks_hit)
        asked = hit + max(0, load.blocks_missed - earlier.blocks_missed)
        rates: dict[str, float | None] = {
            rate: max(0, getattr(load, name) - getattr(earlier, name)) / seconds
            for name, rate in _RATES.items()
        }
        saved_ms = load.saved_ms - earlier.saved_ms - (load.waited_ms - earlier.waited_ms)
        rates["saved_per_s"] = saved_ms / MS_PER_S / seconds
        rates["hit_percent"] = 100 * hit / asked if asked else None
        return msgspec.structs.replace(figures, **rates)


def one_view(source: TopSource, wait: Callable[[float], object], *, interval_s: float) -> TopView:
    """Figures with rates, as soon as there are some: two samples, at most WAITS intervals apart."""
    tally = Tally()
    tally.take(source.sample())
    figures: list[Figures] = []
    for _ in range(WAITS):
        wait(interval_s)
        figures = tally.take(source.sample())
        if tally.has_rates:
            break
    return TopView(figures, source.doubt)


_RATES: Final = {
    "stored_bytes": "stored_bytes_per_s",
    "leased_bytes": "leased_bytes_per_s",
    "fetched_bytes": "fetched_bytes_per_s",
    "lent_bytes": "lent_bytes_per_s",
}
_CHANGES: Final = (*_RATES.values(), "saved_per_s", "hit_percent")


def _nothing(sample: Sample) -> Figures:
    return Figures(sample.node, sample.state, sample.trust)


def _gauges(sample: Sample, load: Load) -> Figures:
    names = set(Figures.__struct_fields__) & set(Load.__struct_fields__)
    gauges = {name: getattr(load, name) for name in names}
    return msgspec.structs.replace(_nothing(sample), **gauges)
