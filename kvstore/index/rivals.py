"""Nodes that are two processes: one certificate, or one --node-name, on two machines.

A restarted node replaces its past, which is dead and never speaks again. So a process that says
Hello after it was replaced, and again after that was refused, lives beside the one that replaced
it. Only the second time counts: one Hello of a dead process may come late.

Pure. Covers: which names. Does not cover: which of the two is heard (`feed`), notices
(`kvstore.indexer.service`).
"""

from __future__ import annotations

from typing import Final

from kvstore.types import Incarnation

RIVAL_MS: Final = 15_000
"""A process dials every 2 s: after so much silence it is gone."""
NAMES_MAX: Final = 1024


class Rivals:
    """Twins among the nodes of one replica; at most NAMES_MAX, the latest."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[Incarnation, int, str]] = {}
        """When last, and from where, the replaced incarnation of a node said Hello."""
        self._rivals: dict[str, tuple[int, str]] = {}
        """Refused nodes for which that was not the first time."""

    def refused(self, node: str, incarnation: Incarnation, host: str, now_ms: int) -> bool:
        """Its Hello was, since another incarnation is heard. Returns whether both are alive."""
        last = self._refused.pop(node, None)
        self._refused[node] = (incarnation, now_ms, host)
        if len(self._refused) > NAMES_MAX:
            oldest = next(iter(self._refused))
            del self._refused[oldest]
            self._rivals.pop(oldest, None)
        if last is None or last[0] != incarnation or now_ms - last[1] > RIVAL_MS:
            return False
        self._rivals[node] = (now_ms, host)
        return True

    def of(self, node: str, now_ms: int) -> str | None:
        """Address of the node's rival; None: it has none."""
        found = self._rivals.get(node)
        return None if found is None or now_ms - found[0] > RIVAL_MS else found[1]

    def names(self, now_ms: int) -> list[str]:
        """Names of nodes that are two processes now."""
        return sorted(node for node in list(self._rivals) if self.of(node, now_ms) is not None)
