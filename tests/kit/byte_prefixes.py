"""Prefixes as of a router without an index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kvstore.router.keys.prefixes import Prefixes
from kvstore.routing.learning import TokenEstimates


class BytePrefixes(Prefixes):
    """By keys of bytes alone."""

    def __init__(self) -> None:
        spaces = SimpleNamespace(index=SimpleNamespace(endpoints=()))
        super().__init__(TokenEstimates(), cast("Any", None), cast("Any", spaces))
