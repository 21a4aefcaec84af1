"""The ucx transport, as far as it gets without UCX: who finds no room is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import TransportError
from kvstore.transport import ucx
from kvstore.transport.ucx import Ucx


def test_a_living_reader_too_many_is_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "READERS_MAX", 2)
    made = Ucx.__new__(Ucx)
    made._readers, made.refused_count = {}, 0
    made._source = np.zeros(8, np.uint8)
    monkeypatch.setattr(made, "_dial", lambda address: object())

    def ask(address: bytes) -> Any:
        return ucx._UcxRequest(address, ucx.DATA, b"", b"")

    for address in (b"1", b"2", b"1"):
        made._give(ask(address))
    with pytest.raises(TransportError, match="too many readers"):
        made._give(ask(b"3"))
    assert (list(made._readers), made.refused_count) == ([b"1", b"2"], 1)


def test_it_has_room_for_a_large_cluster() -> None:
    assert ucx.READERS_MAX >= 1000
