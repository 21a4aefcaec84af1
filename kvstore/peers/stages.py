"""Stages of pushes: durations, and a warning for each that takes longer than any load explains.

    asked ─push_grant─▶ granted ─push_first─▶ first byte ─push─▶ last byte   write: the other end
    report that blocks are there ─land_copy─▶ ─land_verify─▶ sealed           push_seal: all of it
    last byte ─push_token─▶ the engine has the first token of its answer

`push_first` and `push` follow a prefill that may still run, and are never slow. Does not cover:
pushes one by one (`engine.why.trail`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kvstore.obs.timings import Timings
from kvstore.ports import Clock
from kvstore.units import NS_PER_S, format_size

SLOW_S: Final = 0.5
SLOW_TCP_S: Final = 2.0
FRESH_NS: Final = 60 * NS_PER_S
"""How long /healthz names a slow stage."""
_SLOW: Final = {
    "push_grant": "granting room to node {node} took {took:.1f} s: it is stopped or busy",
    "write": "pushing {size} to node {node} took {took:.1f} s: its link or one of the two hosts"
    " is busy",
    "push_seal": "{size} from node {node} were checked and stored in {took:.1f} s: this host is"
    " busy",
    "push_token": "{took:.1f} s from the end of a push of node {node} to the first token: the"
    " engine has a queue",
}

_log = logging.getLogger(__name__)


class Stages:
    """Durations by stage, and warnings. Stages that have a warning are reported on the asyncio loop
    only."""

    def __init__(self, kinds: Sequence[str], clock: Clock, *, slow_s: float) -> None:
        """`kinds`: names of the stages. `slow_s`: a stage that takes longer is logged as slow."""
        self.timings = {kind: Timings() for kind in kinds}
        self._clock, self.slow_ns = clock, int(slow_s * NS_PER_S)
        self._slow = ""
        self._slow_ns = 0

    def since(self, kind: str, begun_ns: int, size_bytes: int = 0, *, node: str = "") -> None:
        """Record a stage that began at `begun_ns` and ends now. `node`: the other node, for the
        warning."""
        self.took(kind, self._clock.now_ns() - begun_ns, size_bytes, node=node)

    def took(self, kind: str, took_ns: int, size_bytes: int = 0, *, node: str = "") -> None:
        """Record a stage that took `took_ns`, and log a warning if it was slow."""
        self.timings[kind].add(took_ns, size_bytes)
        if took_ns > self.slow_ns and kind in _SLOW:
            its = {"node": node, "took": took_ns / NS_PER_S, "size": format_size(size_bytes)}
            self._slow, self._slow_ns = _SLOW[kind].format(**its), self._clock.now_ns()
            _log.warning("%s", self._slow)

    @property
    def trouble(self) -> str:
        """Text about the last slow stage, for FRESH_NS; empty: there was none."""
        ago_ns = self._clock.now_ns() - self._slow_ns
        if not self._slow or ago_ns > FRESH_NS:
            return ""
        return f"{self._slow} ({ago_ns // NS_PER_S} s ago)"
