"""Ranges of NVIDIA's tools (Nsight Systems), in the domain `kvstore`: one for each batch of copies.

A range lasts from the launch until the end is reported, hashing included. Without a tool that
listens one costs 0.2 us; without the package `nvtx` there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

DOMAIN: Final = "kvstore"
Range = Callable[[], object]
"""Ends a range."""


def begin_range(name: str) -> Range:
    """A range that has begun."""
    if _nvtx is None:
        return _nothing
    nvtx, begun = _nvtx, _nvtx.start_range(message=name, domain=DOMAIN)
    return lambda: nvtx.end_range(begun)


def _nothing() -> None:
    pass


def _import() -> Any:
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx


_nvtx = _import()
