"""What a borrower says of whom it cannot ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.serve.borrower import Borrower


def test_an_index_finds_blocks_and_a_node_lends_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    borrower = cast("Borrower", SimpleNamespace(_told={}))
    for name in ("the index", "node n2"):
        for trouble in ("it is away", "it is away", ""):
            Borrower._note(borrower, name, trouble)
    assert [record.getMessage() for record in caplog.records] == [
        "where blocks are cannot be asked: it is away",
        "where blocks are can be asked again",
        "blocks are not fetched from node n2: it is away",
        "blocks are fetched from node n2 again",
    ]
