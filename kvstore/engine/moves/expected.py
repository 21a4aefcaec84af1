"""Expectations of prefill nodes: requests that wait, and keys by scopes, with how many of them want
each.

Does not cover: what becomes of them (`grants`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.table import Keys, each
from kvstore.engine.sessions.askers import Asker
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.witness import PushTimes
from kvstore.wire.pushes import PushExpect


class Expectation(msgspec.Struct):
    """A PushExpect that has not ended."""

    connection: Connection
    session: int
    message: PushExpect
    asker: Asker
    missing: Keys
    """Keys that no tier held."""
    times: PushTimes
    until_ns: int
    has_come: NDArray[np.bool_]
    """Flags of those that were sealed since."""
    granted: int = 0
    """Leading ones of these that were granted room."""
    reason: str | None = None
    """Why it has ended; None: it has not."""


class ExpectedKeys:
    """By all the scopes together that a key is wanted in."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], Counter[bytes]] = {}

    def add(self, scopes: tuple[int, ...], keys: Keys) -> None:
        """One more expectation wants these."""
        if len(keys):
            self._counts.setdefault(scopes, Counter()).update(each(keys))

    def remove(self, scopes: tuple[int, ...], keys: Keys) -> None:
        """One expectation does not want these any more."""
        its = self._counts.get(scopes, Counter())
        for key in each(keys):
            its[key] -= 1
            if not its[key]:
                del its[key]
        if not its:
            self._counts.pop(scopes, None)

    def flags(self, scopes: Sequence[int], keys: Keys) -> NDArray[np.bool_]:
        """Flags of the keys that are expected, [S][n]."""
        flags = np.zeros((len(scopes), len(keys)), dtype=bool)
        for these, its in self._counts.items():
            among = np.isin(scopes, these)
            if among.any():
                found = (key in its for key in each(keys))
                flags[among] |= np.fromiter(found, dtype=bool, count=len(keys))
        return flags

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpectedKeys) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]
