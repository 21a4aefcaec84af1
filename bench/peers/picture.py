"""The plot of `make bench-peers`: time to first token over hit rate, and what hits cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bench import plot

COLOURS: Final = {"vLLM alone": plot.GREY, "LMCache": plot.AMBER, "kvstore": plot.BLUE}
SIDES: Final = ("kvstore", "LMCache")


def draw(result: dict[str, Any], path: Path) -> Path:
    """Of a whole run."""
    rounds = result["serving"]["rounds"]
    figure, (left, right) = plot.figure(
        "The same requests: vLLM alone, with LMCache, with kvstore",
        f"194 M parameters in bfloat16; questions in rounds, "
        f"histories of {rounds['working_set_tokens']:,} tokens, the engine's own cache holds "
        f"{rounds['own_cache_tokens']:,}"
        + ("; provisional: see the note in the record" if result.get("note") else ""),
        columns=2,
        widths=(1.5, 1),
    )
    _draw_rounds(left, rounds["engines"])
    _draw_hits(right, {"dram": result["serving"]["dram"], "file": result["files"]})
    return plot.save(figure, path)


def _draw_rounds(axes: Any, engines: dict[str, Any]) -> None:
    for name, row in engines.items():
        colour = COLOURS[name]
        points = [(cached / prompt, ttft) for _, prompt, cached, ttft in row["turns"]]
        axes.plot(*zip(*points, strict=True), "o", ms=4.5, color=colour, alpha=0.4, mew=0)
        bins = row["by_hit_rate"]
        axes.plot(
            [entry["hit_rate"] for entry in bins],
            [entry["ttft_ms_p50"] for entry in bins],
            "-s",
            color=colour,
            ms=6,
            mec="white",
            lw=2,
            label=f"{name}: p50 {row['ttft_ms']['p50']:,.0f}, p95 {row['ttft_ms']['p95']:,.0f} ms, "
            f"hit rate {row['hit_rate']:.0%}, {row['prompt_tokens_per_s']:,.0f} tokens/s",
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("share of the request's prompt found in a cache")
    axes.set_title("Time to first token, seconds; squares: median of a bin")
    axes.grid(axis="both")
    axes.tick_params(length=0)
    axes.legend(frameon=False, fontsize=9.5, loc="upper left", bbox_to_anchor=(-0.05, -0.15))


def _draw_hits(axes: Any, tiers: dict[str, Any]) -> None:
    labels: list[str] = []
    for tier, times in tiers.items():
        for name in SIDES:
            place, share = len(labels), times[name]["hit_over_own_hit"]
            axes.barh(place, share, 0.6, color=COLOURS[name])
            axes.annotate(
                f"{share:.2f} ×  ({times[name]['hit_ms']['p50']:,.0f} ms)",
                (share, place),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontweight="bold",
            )
            labels.append(f"{tier}, {name}")
    longest = max(times[name]["hit_over_own_hit"] for times in tiers.values() for name in SIDES)
    axes.axvline(1, color=plot.INK, lw=1, ls=":")
    axes.set_xlim(0, 1.45 * longest)
    axes.set_yticks(range(len(labels)), labels, color=plot.INK)
    axes.invert_yaxis()
    axes.set_xlabel("median hit ÷ median hit in that engine's own cache")
    axes.set_title("What a hit of 3,200 tokens costs")
    axes.grid(axis="x")
    axes.tick_params(length=0)
