"""How much of what is tested in mass: what finds the planted bugs, or all of it.

    IMAGES = amount(20_000, nightly=200_000)    # `make test`, `make nightly`
    covered("crash images", count)              # where the test has proved so many

Both commands end with what was covered.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

IS_NIGHTLY: Final = os.environ.get("KVSTORE_AMOUNTS") == "nightly"

COVERED: Final = Counter[str]()
"""Proven in this process."""


def amount(test: int, *, nightly: int) -> int:
    """The first number in `make test` and `make check`, the second in `make nightly`."""
    return nightly if IS_NIGHTLY else test


def covered(what: str, count: int) -> None:
    """Count what a test has proved; `what` is a plural, as the summary prints it."""
    COVERED[what] += count
