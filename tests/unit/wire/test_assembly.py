"""Blocks between parallel sizes: every byte in its place, and no wrong one unnoticed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.types import BlockKey, Shard
from kvstore.wire.assembly import Assembly, Runs, shared
from kvstore.wire.record import Scope, header
from tests.kit import reference

LAYERS, HEADS, EVEN, UNEVEN = 4, 8, (24,), (24, 8, 40, 16)
KEY = BlockKey(bytes(range(32)))
Sizes = tuple[int, ...]


def ranks(count: int, stages: int = 1) -> list[Shard]:
    """Shards of `count` tensor-parallel ranks in each of `stages` stages."""
    heads, layers = HEADS // count, LAYERS // stages
    return [
        Shard(stage * layers, (stage + 1) * layers, rank * heads, (rank + 1) * heads)
        for stage in range(stages)
        for rank in range(count)
    ]


def scopes(
    shards: list[Shard], head_bytes: tuple[int, ...] = EVEN, tenant: str = "t"
) -> list[Scope]:
    def size(shard: Shard) -> int:
        layers = range(shard.layer_begin, shard.layer_end)
        heads = shard.head_end - shard.head_begin
        return heads * sum(head_bytes[layer % len(head_bytes)] for layer in layers)

    return [Scope(tenant, b"s" * 32, shard, size(shard)) for shard in shards]


def assembly(sources: list[Scope], targets: list[Scope], head_bytes: Sizes = EVEN) -> Assembly:
    return Assembly(sources, targets, head_bytes=head_bytes)


def cut(block: list[np.ndarray], shard: Shard) -> bytes:
    """The bytes of a shard, [layer][head][byte], the obvious way."""
    layers = block[shard.layer_begin : shard.layer_end]
    return b"".join(layer[shard.head_begin : shard.head_end].tobytes() for layer in layers)


def checksum(scope: Scope, payload: bytes) -> bytes:
    return reference.checksum(header(scope.prefix(), KEY), payload)


class Move:
    """One block that goes from a peer's arena into ours."""

    def __init__(self, source: list[Shard], target: list[Shard], head_bytes: Sizes = EVEN) -> None:
        random, sizes = np.random.default_rng(1), np.resize(head_bytes, LAYERS)
        self.block = [random.integers(0, 256, (HEADS, size), dtype=np.uint8) for size in sizes]
        self.sources, self.targets = scopes(source, head_bytes), scopes(target, head_bytes)
        self.assembly = assembly(self.sources, self.targets, head_bytes)
        payloads = [cut(self.block, scope.shard) for scope in self.sources]
        self.checksums = [checksum(s, p) for s, p in zip(self.sources, payloads, strict=True)]
        slot = 4096
        there = bytearray(slot * len(payloads))
        for number, payload in enumerate(payloads):
            there[number * slot : number * slot + len(payload)] = payload
        self.here = bytearray(slot * len(target))
        begins, ends, lengths = self.assembly.moves(
            np.arange(len(source), dtype=np.int64)[None] * slot,
            np.arange(len(target), dtype=np.int64)[None] * slot,
        )
        for begin, end, length in zip(begins, ends, lengths, strict=True):
            self.here[end : end + length] = there[begin : begin + length]
        self.slots = [memoryview(self.here)[n * slot : (n + 1) * slot] for n in range(len(target))]

    def verify(self, by: Assembly | None = None, key: bytes = KEY) -> list[bytes] | None:
        slots, here = np.arange(0, len(self.here), 4096)[None], np.frombuffer(self.here, np.uint8)
        (made,) = (by or self.assembly).verify(slots, here, key, b"".join(self.checksums))
        return made


SIZES = [(1, 1), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]


@pytest.mark.parametrize(("there", "here"), SIZES)
@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("head_bytes", [EVEN, UNEVEN])
def test_every_byte_is_in_its_place(
    there: int, here: int, stages: tuple[int, int], head_bytes: Sizes
) -> None:
    move = Move(ranks(there, stages[0]), ranks(here, stages[1]), head_bytes=head_bytes)
    made = move.verify()
    expected = [cut(move.block, scope.shard) for scope in move.targets]
    assert [bytes(s[: len(e)]) for s, e in zip(move.slots, expected, strict=True)] == expected
    assert made == [checksum(s, e) for s, e in zip(move.targets, expected, strict=True)]


def each_byte(move: Move) -> Iterator[tuple[memoryview, int]]:
    for slot, scope in zip(move.slots, move.targets, strict=True):
        for at in range(0, scope.block_bytes, 37):
            yield slot, at


@pytest.mark.parametrize(("there", "here"), SIZES)
def test_a_flipped_bit_anywhere_is_noticed(there: int, here: int) -> None:
    move = Move(ranks(there), ranks(here))
    for slot, at in each_byte(move):
        slot[at] ^= 1
        assert move.verify() is None
        slot[at] ^= 1
    assert move.verify() is not None


def test_a_block_of_another_key_or_tenant_is_noticed() -> None:
    move = Move(ranks(2), ranks(1))
    assert move.verify(key=bytes(32)) is None
    others = assembly(scopes(ranks(2), tenant="u"), scopes(ranks(1), tenant="u"))
    assert move.verify(others) is None


def test_equal_shards_are_one_run_each() -> None:
    half = LAYERS * HEADS // 2 * EVEN[0]
    made = assembly(scopes(ranks(2)), scopes(ranks(2)))
    assert [array.tolist() for array in made.runs] == [
        [0, 1],
        [0, 1],
        [0] * 2,
        [0] * 2,
        [half] * 2,
    ]


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (ranks(2)[:1], ranks(1)),
        (ranks(1), ranks(2)[:1]),
        (ranks(1) + ranks(1), ranks(1)),
        ([Shard(0, 4, 0, 16)], ranks(1)),
        # Half of it twice, and the other half not.
        (ranks(2)[:1] + ranks(2)[:1], ranks(2)),
        # As many bytes, elsewhere, or beyond what any layer is.
        ([Shard(0, 4, 8, 16)], ranks(1)),
        ([Shard(2**32 - 4, 2**32, 0, 8)], ranks(1)),
    ],
)
def test_what_is_not_the_same_blocks_is_refused(there: list[Shard], here: list[Shard]) -> None:
    with pytest.raises(ValueError, match="cover"):
        assembly(scopes(there), scopes(here))


def test_too_many_bytes_are_refused_before_shards_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer may name a thousand shards."""

    def compared(*sides: np.ndarray, offsets: np.ndarray) -> None:
        raise AssertionError(f"{len(sides)} sides were compared by {offsets}")

    monkeypatch.setattr("kvstore.wire.assembly.shared", compared)
    with pytest.raises(ValueError, match="cover"):
        assembly(scopes([Shard(n, n + 1, 0, 1) for n in range(1024)]), scopes(ranks(1)))


def test_as_many_shards_as_a_peer_may_name_are_compared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a million pairs, one after the other, would stop the loop for seconds."""
    calls = []

    def counted(*sides: np.ndarray, offsets: np.ndarray) -> Runs:
        calls.append([len(side) for side in sides])
        return shared(*sides, offsets=offsets)

    monkeypatch.setattr("kvstore.wire.assembly.shared", counted)
    cells = [Shard(n, n + 1, head, head + 1) for n in range(128) for head in range(8)]
    assembly(scopes(cells), scopes([Shard(0, 128, 0, 8)]))
    assert calls == [[1024, 1]]


def test_blocks_of_other_sizes_are_refused() -> None:
    whole, double = scopes(ranks(1)), scopes(ranks(1), (48,))
    with pytest.raises(ValueError, match="sizes"):
        assembly(double, double)
    # As many bytes in all, but not in each layer.
    stages, swapped = (scopes(ranks(1, stages=2), each) for each in (UNEVEN, UNEVEN[::-1]))
    for sides in ((stages, swapped), (swapped, stages)):
        with pytest.raises(ValueError, match="sizes"):
            assembly(*sides, UNEVEN)
    for shard in (Shard(0, 1, 0, 3), Shard(1, 1, 0, 3), Shard(1000, 1, 0, 3)):
        with pytest.raises(ValueError, match="sizes"):
            assembly([Scope("t", b"s" * 32, shard, whole[0].block_bytes)], whole)
