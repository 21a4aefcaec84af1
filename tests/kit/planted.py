"""Bugs that tests plant in the product, each in place of one of its functions.

@instead_of(Slots, "free")
def generation_stays(free, self: Slots, words: Words, cause: int) -> None:
    free(self, words, cause)  # the real one
    self.generation[words] -= 1

generation_stays(monkeypatch)  # it is there until the test ends
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


def instead_of(owner: object, name: str) -> Callable[[Callable[..., Any]], Patch]:
    """What is decorated is called in place of `owner.name`, with that in front of its arguments."""

    def decorate(broken: Callable[..., Any]) -> Patch:
        @functools.wraps(broken)
        def plant(patch: pytest.MonkeyPatch) -> None:
            real = getattr(owner, name)
            patch.setattr(owner, name, lambda *given, **named: broken(real, *given, **named))

        return plant

    return decorate
