"""The plot of `make bench-cluster`: what an index of a whole cluster takes, and how quick it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import plot
from kvstore.units import GIB


def draw(result: dict[str, Any], path: Path) -> Path:
    """Of a run that has its part `scale`."""
    sizes = result["scale"]["detail"]["sizes"]
    last = sizes[-1]
    churn = last["churn"]
    entries = [size["entries"] for size in sizes]
    figure, (left, right) = plot.figure(
        f"One index replica: {last['nodes']:,} nodes, {last['entries']:,} blocks by holder",
        f"simulated in one process; 1 % of the blocks are replaced within a minute, in "
        f"{churn['words']:,} words, known after {churn['lag_ms']['p99']:.1f} ms at p99",
        columns=2,
        widths=(1, 1),
    )
    memory = [size["resident_bytes"] / GIB for size in sizes]
    left.plot(entries, memory, "-o", color=plot.BLUE, mec="white", ms=8, lw=2)
    for count, gib, size in zip(entries, memory, sizes, strict=True):
        left.annotate(
            f"{size['bytes_per_entry']:.0f} bytes each",
            (count, gib),
            xytext=(-8, 6),
            textcoords="offset points",
            ha="right",
            fontweight="bold",
            path_effects=plot.halo(),
        )
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set_ylabel("resident memory, GiB")
    left.set_title("Memory goes with the entries")
    for name, colour in (("p99", plot.AMBER), ("p50", plot.BLUE)):
        values = [size["match_us"][name] for size in sizes]
        right.plot(entries, values, "-o", color=colour, mec="white", ms=8, lw=2, label=name)
    right.plot(
        entries[-1:],
        [churn["match_us"]["p99"]],
        "D",
        color=plot.VIOLET,
        mec="white",
        ms=9,
        label="p99 while it churns",
    )
    right.set_ylim(bottom=0)
    right.set_ylabel("µs")
    right.set_title("A prompt of 500 blocks, all holders found")
    right.legend(frameon=False, fontsize=9.5, loc="upper left")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("blocks by holder (log scale)")
        axes.grid(axis="both")
        axes.tick_params(length=0)
    return plot.save(figure, path)
