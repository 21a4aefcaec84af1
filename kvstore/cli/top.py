"""`kvstore top`: samples of nodes and routers made into figures. Covers sources and arithmetic of
nodes.

    a node's socket ─┐
    the index ───────┴▶ Sample per node ─▶ Tally (the sample before) ─▶ Figures

Loads of other nodes come from the index, to which nodes publish them with their heartbeats: a
silent node is seen there and delays nothing. Rates are differences of two samples over the node's
own clock. Does not cover: routers (`top_routers`), the layout (`top_view`), the terminal
(`top_screen`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import msgspec

from kvstore.cli.ask import LOAD_TIMEOUT_S, node_client
from kvstore.index.feed import Trust
from kvstore.proto.rows import INDEX_IS_STALE, UNKNOWN
from kvstore.wire.load import Load

if TYPE_CHECKING:
    from kvstore.client.index import IndexClient

_S = TypeVar("_S")
_F = TypeVar("_F")
MS_PER_S: Final = 1000
UP, SILENT, GONE = "up", "silent", "gone"
_STATES: Final = {Trust.EXACT: UP, Trust.CATCHING_UP: UP, Trust.STALE: SILENT, None: GONE}
THIS_NODE: Final = "(this node)"


class Tally(Generic[_S, _F]):
    """The last sample of each node or router, and figures with the rates since the one before."""

    def __init__(self, figures_of: Callable[[str, _S, tuple[_S, _F] | None], _F]) -> None:
        """`figures_of`: a name, its sample, and the sample before with its figures → figures."""
        self._figures_of = figures_of
        self.last: dict[str, tuple[_S, _F]] = {}

    def take(self, samples: Mapping[str, _S]) -> list[_F]:
        """Figures of all of them."""
        self.last = {
            name: (sample, self._figures_of(name, sample, self.last.get(name)))
            for name, sample in samples.items()
        }
        return [figures for _, figures in self.last.values()]


class Sample(NamedTuple):
    """State and load of a node at one moment."""

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
    served_bytes_per_s: float | None = None

    @property
    def has_rates(self) -> bool:
        """Whether there are rates, or will be none: of a node that publishes no load."""
        return self.stored_bytes_per_s is not None or self.dram_bytes is None


Source = Callable[[], tuple[dict[str, Sample], str]]
"""All nodes, now; and why this may be wrong (empty: it is right). Raises KVStoreError."""


def of_socket(socket: Path) -> tuple[dict[str, Sample], str]:
    """The node at a socket. Raises AttachError."""
    with node_client(socket) as client:
        node, incarnation, load = client.load()
    return {node or THIS_NODE: Sample(UP, "", incarnation, load)}, ""


def of_index(client: IndexClient) -> tuple[dict[str, Sample], str]:
    """The nodes that the index knows. Raises IndexUnavailable."""
    trust, nodes = client.nodes(timeout_s=LOAD_TIMEOUT_S)
    if trust is Trust.STALE:
        unknown = {m.node: Sample(UNKNOWN, UNKNOWN, m.incarnation, None) for m in nodes}
        return unknown, INDEX_IS_STALE
    words = {None: "out"} | {trust: trust.word for trust in Trust}
    return {
        m.node: Sample(_STATES[m.trust], words[m.trust], m.incarnation, m.load) for m in nodes
    }, ""


_GAUGES: Final = set(Figures.__struct_fields__) & set(Load.__struct_fields__)
_COUNTED: Final = ("stored_bytes", "leased_bytes", "fetched_bytes", "served_bytes")
_CHANGES: Final = (*(f"{name}_per_s" for name in _COUNTED), "saved_per_s", "hit_percent")


def node_figures(name: str, sample: Sample, before: tuple[Sample, Figures] | None) -> Figures:
    """Figures of a node, with rates if there is a load of the same process before this one."""
    load, figures = sample.load, Figures(name, sample.state, sample.trust)
    if load is None or sample.state != UP:
        return figures
    figures = msgspec.structs.replace(figures, **{n: getattr(load, n) for n in _GAUGES})
    if before is None or before[0].load is None or before[0].incarnation != sample.incarnation:
        return figures
    earlier, told = before[0].load, before[1]
    if load.at_ms <= earlier.at_ms:  # the same load
        return msgspec.structs.replace(figures, **{n: getattr(told, n) for n in _CHANGES})
    seconds = (load.at_ms - earlier.at_ms) / MS_PER_S
    hit = max(0, load.blocks_hit - earlier.blocks_hit)
    asked = hit + max(0, load.blocks_missed - earlier.blocks_missed)
    rates: dict[str, float | None] = {
        f"{name}_per_s": max(0, getattr(load, name) - getattr(earlier, name)) / seconds
        for name in _COUNTED
    }
    saved_ms = load.saved_ms - earlier.saved_ms - (load.waited_ms - earlier.waited_ms)
    rates["saved_per_s"] = saved_ms / MS_PER_S / seconds
    rates["hit_percent"] = 100 * hit / asked if asked else None
    return msgspec.structs.replace(figures, **rates)
