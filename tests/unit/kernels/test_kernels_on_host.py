"""The real kernels, run on the host under sanitizers, give what the references say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings, strategies as st

from kvstore.kernels import launches
from kvstore.kernels.launches import KERNELS, MANY_MAX, PIECES_MAX
from kvstore.kernels.port import Bytes
from kvstore.wire.record import PIECE_BYTES
from tests.amounts import amount, covered
from tests.kit import reference
from tests.kit.host_kernels import SKEWS, HostKernels, Stray

RUNS = settings(max_examples=amount(60, nightly=10_000), deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
SKEW = st.sampled_from(SKEWS)


@pytest.fixture(scope="module")
def device(program: Path) -> Iterator[HostKernels]:
    device = HostKernels(program)
    yield device
    device.close()


def noise(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def test_an_access_out_of_bounds_ends_the_process(program: Path) -> None:
    """One byte too many, on either side of the copy."""
    for target_bytes, source_bytes in ((100, 99), (99, 100)):
        device = HostKernels(program)
        target, source = device.room(target_bytes), device.put(bytes(source_bytes))
        pieces = (np.array([value], np.uint64) for value in (target, source, 100))
        with pytest.raises(Stray, match="heap-buffer-overflow"):
            launches.moved(device.launch, *pieces)
        device.close()


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────


@RUNS
@given(
    pages=st.lists(st.integers(1, 700) | st.sampled_from([16, 256, 4096]), min_size=1, max_size=20),
    pad=st.sampled_from([0, 1, 16, 64]),
    block_major=st.booleans(),
    blocks=st.permutations(range(4)),
    skews=st.tuples(SKEW, SKEW),
    seed=SEEDS,
)
@example([16] * (PIECES_MAX + 3), 0, False, [2, 0, 1, 3], (0, 0), 1)
@example([16] * (MANY_MAX // 4 + 1), 0, False, [2, 0, 1, 3], (0, 0), 1)
@example([4096], 0, False, [0, 1, 2, 3], (1, 2), 2)
def test_blocks_are_gathered_and_scattered(
    device: HostKernels,
    pages: list[int],
    pad: int,
    block_major: bool,
    blocks: list[int],
    skews: tuple[int, int],
    seed: int,
) -> None:
    """Many blocks in one call, into slots one after the other and back into other blocks."""
    lie = [size + pad for size in pages]
    whole, count = sum(pages), len(blocks)
    before = np.cumsum([0, *lie[:-1]])
    begins = before if block_major else before * count
    strides = np.full(len(pages), sum(lie)) if block_major else np.array(lie)
    memory = noise(seed, sum(lie) * count)
    layers = [
        np.lib.stride_tricks.as_strided(memory[at:], (count, size), (stride, 1))
        for at, stride, size in zip(begins, strides, pages, strict=True)
    ]
    slots = np.zeros(whole * count, np.uint8)
    for slot, block in enumerate(blocks):
        reference.pack(layers, block, slots[slot * whole :], b"")

    cache, held = device.put(memory, skews[0]), device.room(slots.size, skews[1])
    offsets = np.cumsum([0, *pages[:-1]])
    places = np.concatenate([cache + begins + strides * block for block in blocks])
    ends = np.concatenate([held + offsets + whole * slot for slot in range(count)])
    sizes = np.tile(pages, count).astype(np.uint64)
    launches.moved(device.launch, ends.astype(np.uint64), places.astype(np.uint64), sizes)
    assert device.get(held, slots.size) == slots.tobytes()
    assert device.get(cache, memory.size) == memory.tobytes()

    places = np.concatenate([cache + begins + strides * block for block in reversed(blocks)])
    launches.moved(device.launch, places.astype(np.uint64), ends.astype(np.uint64), sizes)
    for slot, block in enumerate(reversed(blocks)):
        reference.unpack(slots[slot * whole :], layers, block, b"")
    assert device.get(cache, memory.size) == memory.tobytes()  # paddings, too
    device.free()
    covered("gathers and scatters on the host", 2)


# ── checksums ────────────────────────────────────────────────────────────────────────────────────

EDGES = sorted(
    {
        *range(1, 19),
        *(at + near for at in (*range(32, 257, 32), 240, 1024, 2048) for near in (-1, 0, 1)),
        *(PIECE_BYTES + near for near in (-1, 0, 1, 3, 100, 240, 241, 1100)),
        2 * PIECE_BYTES + 65,
    }
)


def _digests(device: HostKernels, payloads: list[Bytes], skew: int) -> bytes:
    size, count = payloads[0].size, len(payloads)
    found = device.room(16 * count * -(-size // PIECE_BYTES))
    launches.digests(
        device.launch,
        np.array([device.put(payload, skew) for payload in payloads], np.uint64),
        size,
        sums=device.room(launches.sums_bytes(count, size)),
        found=found,
    )
    digests = device.get(found, 16 * count * -(-size // PIECE_BYTES))
    device.free()
    return digests


@pytest.mark.parametrize("size", EDGES)
def test_digests_are_those_of_xxh3_at_every_edge(device: HostKernels, size: int) -> None:
    payloads = [noise(size + number, size) for number in range(3)]
    expected = [
        xxhash.xxh3_128_digest(payload[at : at + PIECE_BYTES].tobytes())
        for payload in payloads
        for at in range(0, size, PIECE_BYTES)
    ]
    assert _digests(device, payloads, 16) == b"".join(expected)


@RUNS
@given(size=st.integers(1, 9000), count=st.integers(1, 5), skew=st.sampled_from([0, 16, 32]))
def test_the_root_is_that_of_the_tree(
    device: HostKernels, size: int, count: int, skew: int
) -> None:
    payloads = [noise(size + number, size) for number in range(count)]
    digests = _digests(device, payloads, skew)
    for number, payload in enumerate(payloads):
        root = xxhash.xxh3_128_digest(b"header" + digests[16 * number : 16 * number + 16])
        assert root == reference.checksum(b"header", payload.tobytes())
    covered("checksums on the host", count)


def test_more_payloads_than_an_argument_holds(device: HostKernels) -> None:
    payloads = [noise(number, 300) for number in range(launches.PAYLOADS_MAX + 3)]
    expected = b"".join(xxhash.xxh3_128_digest(payload.tobytes()) for payload in payloads)
    assert _digests(device, payloads, 0) == expected


def test_every_kernel_was_launched(device: HostKernels) -> None:
    """Those of a source that no launch names would be compiled and never run."""
    sources = Path(launches.__file__).resolve().with_name("csrc")
    names = {
        line.split("__global__ void ")[1].split("(")[0]
        for source in sources.glob("*.cu")
        for line in source.read_text().splitlines()
        if "__global__ void " in line
    }
    assert names == {kernel.name for kernel in KERNELS}
    assert {kernel.source for kernel in KERNELS} == {file.stem for file in sources.glob("*.cu")}
