"""The real kernels, run on the host under sanitizers, give what the references say."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings, strategies as st
from numpy.typing import NDArray

from kvstore.kernels import fp8, launches, planes, reference
from kvstore.kernels.launches import KERNELS, MANY_MAX, PIECES_MAX
from kvstore.kernels.reference import Bytes
from kvstore.types import Shard
from kvstore.wire.checksum import PIECE_BYTES
from kvstore.wire.layout import corners, layer_offsets, shared
from tests.amounts import amount, covered
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


SIZES = st.sampled_from([1, 2, 4, 8])


@RUNS
@given(
    head_bytes=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    sizes=st.tuples(SIZES, SIZES),
    stages=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    block_count=st.integers(1, 4),
    skew=SKEW,
    seed=SEEDS,
)
def test_heads_move_between_parallel_sizes(
    device: HostKernels,
    head_bytes: list[int],
    sizes: tuple[int, int],
    stages: tuple[int, int],
    block_count: int,
    skew: int,
    seed: int,
) -> None:
    """Layers of several sizes, in stages of a pipeline too; the reference knows heads only."""
    sides = [
        _shards(len(head_bytes), parallel, stage)
        for parallel, stage in zip(sizes, stages, strict=True)
    ]
    heads = [noise(seed + layer, 8 * size) for layer, size in enumerate(head_bytes)]
    blocks = [[data ^ np.uint8(block) for data in heads] for block in range(block_count)]
    held = [[[_cut(block, shard) for shard in side] for block in blocks] for side in sides]
    runs = shared(
        corners(sides[0]),
        corners(sides[1]),
        offsets=layer_offsets(head_bytes, len(head_bytes)),
    )
    sources = [[device.put(data, skew) for data in block] for block in held[0]]
    targets = [[device.room(data.size, skew) for data in block] for block in held[1]]
    launches.resharded(
        device.launch,
        runs=device.put(launches.run_table(runs)),
        run_count=len(runs.lengths),
        sources=device.put(np.array(sources, np.uint64)),
        targets=device.put(np.array(targets, np.uint64)),
        shard_counts=(len(sides[0]), len(sides[1])),
        block_count=block_count,
        run_bytes=int(runs.lengths.max()),
    )
    for block, row in zip(held[1], targets, strict=True):
        for data, address in zip(block, row, strict=True):
            assert device.get(address, data.size) == data.tobytes()
    device.free()
    covered("reshards on the host", 1)


def _shards(layer_count: int, parallel: int, stages: int) -> list[Shard]:
    """Of so many ranks, in so many stages of the pipeline."""
    cuts = np.linspace(0, layer_count, min(stages, layer_count) + 1).astype(int).tolist()
    each = 8 // parallel
    return [
        Shard(begin, end, rank * each, (rank + 1) * each)
        for begin, end in itertools.pairwise(cuts)
        for rank in range(parallel)
    ]


def _cut(block: list[Bytes], shard: Shard) -> Bytes:
    """[layer][head][…] of a shard, of what each layer has of 8 heads."""
    layers = block[shard.layer_begin : shard.layer_end]
    parts = [data.reshape(8, -1)[shard.head_begin : shard.head_end].ravel() for data in layers]
    return np.concatenate(parts)


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


# ── codecs ───────────────────────────────────────────────────────────────────────────────────────


@RUNS
@given(
    kind=st.sampled_from(sorted(launches.KINDS)),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 300)),
    scale=st.floats(-140, 130),
    is_any=st.booleans(),
    seed=SEEDS,
)
def test_fp8_is_that_of_the_reference(
    device: HostKernels,
    kind: str,
    shape: tuple[int, int],
    scale: float,
    is_any: bool,
    seed: int,
) -> None:
    """Normally distributed rows of any size, or any 16 bits: subnormals, infinities, NaN."""
    values = _rows(seed, shape, kind, scale, is_any=is_any)
    expected = fp8.encode(values, kind)
    places = {
        "largest": device.put(bytes(4 * shape[0])),
        "scales": device.room(shape[0]),
        "codes": device.put(bytes(values.size)),
        "errors": device.put(bytes(4 * shape[0])),
    }
    launches.fp8_encoded(device.launch, device.put(values), shape, kind, **places)
    assert device.get(places["scales"], shape[0]) == expected.scales.tobytes()
    assert device.get(places["codes"], values.size) == expected.codes.tobytes()
    assert device.get(places["errors"], 4 * shape[0]) == expected.errors.tobytes()

    codes = noise(seed, values.size).reshape(shape) if is_any else expected.codes
    out = device.room(values.nbytes)
    launches.fp8_decoded(
        device.launch, device.put(codes), shape, kind, scales=places["scales"], values=out
    )
    back = device.array(out, shape, np.uint16)
    np.testing.assert_array_equal(back, fp8.decode(expected.scales, codes, kind))
    device.free()
    covered("FP8 codings on the host", 1)


def _rows(
    seed: int, shape: tuple[int, int], kind: str, scale: float, *, is_any: bool
) -> NDArray[np.uint16]:
    if is_any:
        return noise(seed, 2 * shape[0] * shape[1]).view(np.uint16).reshape(shape)
    numbers = np.random.default_rng(seed).standard_normal(shape) * 2.0**scale
    return fp8._halves(np.clip(numbers, -3.3e38, 3.3e38).astype(np.float32), kind)


def payload_of(seed: int, size: int, kind: str) -> bytes:
    """Bytes of values: normally distributed, with zeros, all equal, or noise."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(size // 2 + 1).astype(np.float32)
    if kind == "zeros":
        numbers[len(numbers) // 3 :] = 0
    if kind == "equal":
        numbers[:] = 1.5
    if kind == "noise":
        return noise(seed, size).tobytes()
    return fp8._halves(numbers, "bfloat16").tobytes()[:size]


@RUNS
@given(
    size=st.integers(1, 9000),
    planes_=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["normal", "zeros", "equal", "noise"]),
    seed=SEEDS,
)
@example(size=2 * 32 * 64, planes_=2, kind="normal", seed=1)
@example(size=4 * 32 * 64 * 3 + 3, planes_=4, kind="zeros", seed=1)
@example(size=32 * 3, planes_=1, kind="equal", seed=1)
def test_planes_are_those_of_the_reference(
    device: HostKernels, size: int, planes_: int, kind: str, seed: int
) -> None:
    payload = payload_of(seed, size, kind)
    expected, plan = planes.encode(payload, planes_), planes.Plan(size, planes_)
    place = device.put(b"\xaa" * size)
    launches.planes_encoded(
        device.launch,
        device.put(payload),
        plan,
        sizes=device.room(4 * plan.planes * plan.tiles),
        encoded=place,
    )
    if expected is None:
        if plan.words_max >= 0:
            total = struct.unpack("<I", device.get(place + plan.groups_at - 4, 4))[0]
            assert total > plan.words_max
        device.free()
        return
    words = (len(expected) - plan.words_at - plan.tail_bytes) // 4
    end = plan.words_at + 4 * words
    assert device.get(place, end) == expected[:end]
    assert device.get(place + end, size - end) == b"\xaa" * (size - end), "no more than that"

    fault, data = device.put(bytes(4)), device.put(bytes(size))
    # No byte more than there are.
    launches.planes_decoded(
        device.launch, device.put(expected[:end]), plan, words, data=data, faults=fault
    )
    assert device.get(data, size - plan.tail_bytes) == payload[: size - plan.tail_bytes]
    assert device.get(fault, 4) == bytes(4)
    device.free()
    covered("plane codings on the host", 1)


@RUNS
@given(
    planes_=st.sampled_from([1, 2, 4]),
    at=st.integers(0, 10_000),
    to=st.integers(1, 255),
    seed=SEEDS,
)
@example(planes_=2, at=25, to=1, seed=1)  # the sum of the words
def test_a_damaged_payload_is_read_within_its_bounds(
    device: HostKernels, planes_: int, at: int, to: int, seed: int
) -> None:
    """As the reference: refused, or other bytes, which a checksum finds."""
    payload = payload_of(seed, 4 * 32 * 70, "zeros")
    encoded = bytearray(planes.encode(payload, planes_) or b"")
    plan = planes.Plan(len(payload), planes_)
    encoded[at % (plan.words_at if at % 2 else len(encoded))] ^= to
    try:
        expected = planes.decode(bytes(encoded), len(payload), planes_)
    except ValueError:
        expected = b""
    fault, data = device.put(bytes(4)), device.put(bytes(len(payload)))
    words = (len(encoded) - plan.words_at) // 4
    launches.planes_decoded(
        device.launch, device.put(bytes(encoded)), plan, words, data=data, faults=fault
    )
    is_refused = device.get(fault, 4) != bytes(4)
    assert is_refused == (not expected)
    if expected:
        assert device.get(data, len(payload)) == expected
    device.free()


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
