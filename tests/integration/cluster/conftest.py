"""A network between two nodes, for partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.kit.lan import Lan, LanError


@pytest.fixture
def lan() -> Iterator[Lan]:
    try:
        made = Lan("a", "b").__enter__()
    except LanError as error:
        pytest.skip(f"no network namespaces here: {error}")
    with contextlib.closing(made):
        yield made
