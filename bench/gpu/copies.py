"""Part `copies`: GB/s of blocks through the copy engine, as ratios of cupy's pinned copy.

    peak      one large cudaMemcpyAsync each way, and both at once, by cupy in the same run
    shapes    caches of six models and pieces of three sizes, staged and by pieces: stores, loads,
              both at once, with verification, through shuffled block tables; then random cycles
              compared byte by byte
    crossing  blocks that lie across two pinned chunks of the host's memory

`both_ratio` is of the sum of both peaks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.gpu.findings import Findings, Options
from bench.gpu.goals import PAGES, RUNS
from bench.gpu.machine import Gpu, open_gpu
from bench.gpu.rank import Rank, Shape
from kvstore.kernels.pinning import CHUNK_BYTES
from kvstore.ports import CopyWay
from kvstore.units import KIB, MIB

_TOKENS, _BF16 = 16, 2


def _page(heads: int, head: int, *, tokens: int = _TOKENS) -> int:
    """Bytes of keys and values of a layer."""
    return 2 * heads * head * _BF16 * tokens


SHAPES = {
    PAGES: Shape(32, _page(8, 128)),
    RUNS: Shape(32, _page(8, 128), is_block_major=True),
    "Llama-3-70B tp8": Shape(80, _page(1, 128)),
    "gpt-oss-20b, group of 12": Shape(12, _page(8, 64)),
    "Qwen3-Next, 12 of attention": Shape(12, _page(2, 256, tokens=1088)),
    "DeepSeek MLA": Shape(61, 576 * _BF16 * _TOKENS),
    "pieces of 16 KiB": Shape(16, 16 * KIB),
    "pieces of 256 KiB": Shape(16, 256 * KIB),
    "pieces of 4 MiB": Shape(2, 4 * MIB),
}
CROSSING = "Llama-3-70B tp8"
"""Its blocks of 640 KiB do not divide a chunk."""
CACHE_BYTES = 128 * MIB
BLOCKS_MAX = 96
SECONDS = 0.4
CYCLES = 40
CROSSING_CYCLES = 200
WAYS = {"staged": False, "pieces": True}


def run(findings: Findings, options: Options) -> None:
    gpu = open_gpu(options)
    seconds = 0.01 if options.is_rehearsal else SECONDS
    peak = gpu.witness.peak(0.01 if options.is_rehearsal else 1.0)
    findings.say(peak={name: round(value, 2) for name, value in peak.items()})
    crossing: dict[str, Any] = {}
    for name, by_pieces in WAYS.items():
        crossing[name] = across_chunks(gpu, options, by_pieces=by_pieces)
        findings.say(crossing=crossing)
    rows: dict[str, Any] = {}
    for shape_name, whole in SHAPES.items():
        shape = rehearsed(whole) if options.is_rehearsal else whole
        row = rows[shape_name] = {}
        for name, by_pieces in WAYS.items():
            row[name] = measured(gpu, shape, peak, seconds, options, by_pieces=by_pieces)
            findings.say(shapes=rows)


def rehearsed(shape: Shape) -> Shape:
    """The same with less to move."""
    return shape._replace(layers=min(shape.layers, 5), page_bytes=shape.page_bytes // 64 + 16)


def measured(
    gpu: Gpu,
    shape: Shape,
    peak: dict[str, float],
    seconds: float,
    options: Options,
    *,
    by_pieces: bool,
) -> dict[str, float]:
    """Rates and ratios of a shape; 0 wrong cycles."""
    blocks = max(4, min(BLOCKS_MAX, CACHE_BYTES // shape.block_bytes))
    if options.is_rehearsal:
        blocks = 5
    rank = Rank(gpu, shape, blocks, seed=options.seed, by_pieces=by_pieces)
    row: dict[str, float] = {"block_mib": round(shape.block_bytes / MIB, 3)}
    for way in (CopyWay.STORE, CopyWay.LOAD):
        row[way.value] = round(rank.rate((way,), seconds), 2)
        row[f"{way.value}_ratio"] = round(row[way.value] / peak[way.value], 3)
    row["both"] = round(rank.rate((CopyWay.STORE, CopyWay.LOAD), seconds), 2)
    row["both_ratio"] = round(row["both"] / (peak["store"] + peak["load"]), 3)
    row["wrong_cycles"] = rank.wrong_cycles(3 if options.is_rehearsal else CYCLES, options.seed)
    rank.close()
    return row


def across_chunks(gpu: Gpu, options: Options, *, by_pieces: bool) -> dict[str, Any]:
    """Random cycles of blocks of which one lies across the border of two chunks."""
    shape = rehearsed(SHAPES[CROSSING]) if options.is_rehearsal else SHAPES[CROSSING]
    blocks, crossing = 6, 3
    begin = CHUNK_BYTES - crossing * shape.block_bytes - shape.block_bytes // 2 - 24
    rank = Rank(gpu, shape, blocks, seed=options.seed, by_pieces=by_pieces, slots_begin=begin)
    place = begin + crossing * shape.block_bytes
    assert place // CHUNK_BYTES < (place + shape.block_bytes) // CHUNK_BYTES
    count = 3 if options.is_rehearsal else CROSSING_CYCLES
    wrong = rank.wrong_cycles(count, options.seed, slots=(crossing,))
    pinned = rank.copies.pinned_bytes
    rank.close()
    return {"cycles": count, "wrong_cycles": wrong, "pinned_mib": int(np.ceil(pinned / MIB))}
