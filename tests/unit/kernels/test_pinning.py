"""Chunks that cannot be pinned, or not yet: which is tried next, and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.kernels import pinning
from kvstore.kernels.pinning import CHUNK_BYTES, PinnedChunks
from kvstore.kernels.port import DeviceError
from tests.kit.copy_parties import room

CHUNKS = 12
FAILS = "out of memory"


class Tried:
    """A device that pins what `answer` lets it."""

    def __init__(self, answer: Callable[[int, int], str], ready: int = CHUNKS) -> None:
        self.memory = room(CHUNKS * CHUNK_BYTES)
        self.tries: list[int] = []
        self._answer = answer
        begin = int(self.memory.ctypes.data)

        def pin(address: int, size: int) -> None:
            chunk = (address - begin) // CHUNK_BYTES
            self.tries.append(chunk)
            if reason := answer(chunk, self.tries.count(chunk)):
                raise DeviceError(reason)

        device: Any = SimpleNamespace(pin=pin, unpin=lambda _: None)
        self.pins = PinnedChunks(device, self.memory, lambda: ready * CHUNK_BYTES)

    def want(self, chunk: int) -> bool:
        return self.pins.has(chunk * CHUNK_BYTES, chunk * CHUNK_BYTES + 1)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "AGAIN_S", 0.02)


@pytest.mark.usefixtures("quickly")
def test_a_second_try_is_not_behind_chunks_whose_pages_never_arrive() -> None:
    tried = Tried(lambda chunk, count: "" if count > 1 else FAILS, ready=CHUNKS - 1)
    tried.want(CHUNKS - 1)
    while not tried.want(0):
        pass
    assert tried.tries == [0, 0]
    tried.pins.close()


def test_another_failure_does_not_put_a_second_try_off() -> None:
    tried = Tried(lambda chunk, count: FAILS)
    tried.want(0)
    while not tried.pins.trouble_of(0, 1):
        pass
    at_s = tried.pins._again_at_s
    tried.want(1)
    while not tried.pins.trouble_of(CHUNK_BYTES, CHUNK_BYTES + 1):
        pass
    assert tried.pins._again_at_s == at_s
    tried.pins.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_bytes_are_pinned_when_all_their_chunks_are(is_first: bool) -> None:
    tried = Tried(lambda chunk, count: FAILS if (chunk == 0) is is_first else "")
    begin, end = CHUNK_BYTES - 1, CHUNK_BYTES + 1
    while not (tried.want(int(is_first)) and tried.pins.trouble_of(begin, end)):
        assert not tried.pins.has(begin, end)
    assert not tried.pins.has(begin, end)
    tried.pins.close()


def test_nothing_is_pinned_ahead_while_there_is_trouble() -> None:
    """Each would fail, and hold the driver's locks."""
    tried = Tried(lambda chunk, count: FAILS)
    tried.want(0)
    while not tried.pins.trouble:
        pass
    for _ in range(20):
        tried.pins.pin_ahead(CHUNKS * CHUNK_BYTES)
    assert tried.pins._asked == {0}
    tried.pins.close()
