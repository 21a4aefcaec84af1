"""The ratios of a benchmark record, and what each is made from: rules that compute it again from
medians, sums or samples of the same record."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

Path = tuple[str, ...]
Rule = Callable[[Any, Path], float]
"""From the record and the ratio's path. Raises KeyError or TypeError when the record does not hold
what is needed."""

_NAME: Final = re.compile(r"(?<!hand)(^|_)over(_|$)|ratio|_share$|^share_of_|^share$|speed_up|gain")
_NO_RATIO: Final = re.compile(
    r"^goal|^at_least$|^at_most$|interval_95|^medians_ms$|^pairs$|\.|^met$"
)
"""Goals and ends of intervals, what a ratio was made from, and keys of the routing policy."""
_UNROUNDED: Final = 8


def ratios(record: Any) -> Iterator[tuple[Path, float]]:
    """Every number with a name on its path that says "ratio"."""
    for path, value in numbers(record, ()):
        if any(map(_NAME.search, path)) and not any(map(_NO_RATIO.search, path)):
            yield path, value


def at(record: Any, path: str) -> Any:
    """What stands there: keys, and places in lists, between slashes."""
    for key in path.split("/"):
        record = record[int(key) if isinstance(record, list) else key]
    return record


def numbers(value: Any, path: Path) -> Iterator[tuple[Path, float]]:
    """Every number of a record, with its path behind this one."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, (*path, str(key)))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def expected(name: str, record: Any, path: Path) -> float | None:
    """The ratio computed again; None: no rule, or the record lacks what it was made from."""
    place = "/".join((name, *path))
    for pattern, rule in RULES:
        if re.fullmatch(pattern, place):
            try:
                return float(rule(record, path))
            except (KeyError, TypeError):
                return None
    return None


def agrees(written: float, exact: float) -> bool:
    """As far as a record that rounds can say: to the last digit of the ratio, at least two of them,
    and four digits of what it was made from. One that does not round has all digits."""
    decimals = len(repr(written).partition(".")[2])
    if decimals >= _UNROUNDED:
        return abs(written - exact) <= 1e-9 * abs(exact)
    return abs(written - exact) <= 10.0 ** -max(decimals, 2) + 5e-4 * abs(exact)


# ── rules ────────────────────────────────────────────────────────────────────────────────────────


def _median(values: Any) -> float:
    return float(np.median(values))


def _of(over: str, under: str, how: Callable[[Any], float] = float) -> Rule:
    """Of two values in the container of the ratio, or further up: "../"."""

    def rule(record: Any, path: Path) -> float:
        return how(_near(record, path, over)) / how(_near(record, path, under))

    return rule


def _near(record: Any, path: Path, relative: str) -> Any:
    ups = relative.count("../")
    keys = (*path[: len(path) - 1 - ups], *relative.split("/")[ups:])
    return at(record, "/".join(keys))


def _hits(part: Any, side: str) -> tuple[list[float], list[float], list[int]]:
    """Milliseconds, of own hits, and tokens found, of all requests of a side ("": the only one)."""
    rows = [row if not side else row[side] for row in part["samples"] if not side or side in row]
    own = [row["own_hit_ms"] for row in rows if "own_hit_ms" in row]
    own = own or part[f"{side}_own_hit_ms"]
    missing = (part if not side else part[side])["requests"] - len(rows)
    ms = [row["ms"] for row in rows] + [float("inf")] * missing  # computed, slower than all others
    return ms, own, [row["found_tokens"] for row in rows] + [0] * missing


def _hit_rule(depth: int) -> Rule:
    """Of the figures of one side over all its requests: `bench.hits.figures`."""

    def rule(record: Any, path: Path) -> float:
        part = at(record, "/".join(path[:depth])) if depth else record
        side = path[depth] if len(path) > depth + 1 else ""
        ms, own, found = _hits(part, side)
        stored = part["stored_tokens"]
        whole = [one for one, tokens in zip(ms, found, strict=True) if tokens >= stored]
        if path[-1] == "found_over_stored_tokens":
            return float(sum(found) / (stored * len(found)))
        return _median({"hit": ms, "complete": whole}[path[-1].partition("_")[0]]) / _median(own)

    return rule


def _beside_peer(record: Any, path: Path) -> float:
    """kvstore over LMCache: of medians, means, or requests that found everything on both sides."""
    part = at(record, "/".join(path[: path.index("kvstore_over_lmcache")]))
    sides = ("kvstore", "LMCache")
    if path[-2] == "complete_on_both":
        rows = [
            row
            for row in part["samples"]
            if all(row[side]["found_tokens"] >= part["stored_tokens"] for side in sides)
        ]
        over, under = ([row[side]["ms"] for row in rows] for side in sides)
    else:
        over, under = (_hits(part, side)[0] for side in sides)
    if path[-2] == "complete":  # the record of old: each side's complete hits, without their pairs
        over = [ms for ms in over if ms != float("inf")]
    how = np.mean if path[-1] == "ratio_of_means" else np.median
    return float(how(over) / how(under))


def _pd(over: str, under: str, *, where: str) -> Rule:
    """A figure of `bench.scenarios.pd`, of two lists beside it."""

    def rule(record: Any, path: Path) -> float:
        its = at(record, f"{path[0]}/detail/{where}".format(path[2].rpartition("_")[2]))
        return _lowest(its, over) / _lowest(its, under)

    return rule


def _lowest(times: Any, names: str) -> float:
    """The median of one list, or the lowest of several with "|" between them."""
    found = [times[name] for name in names.split("|")]
    return min(_median(one["p50"] if isinstance(one, dict) else one) for one in found)


def _sweep(record: Any, path: Path) -> float:
    what, proportion = path[2].split("_over_colocated_")
    row = record["sweep"]["detail"]["by_proportion"][proportion]
    return float(row["pd"][what] / row["colocated"][what])


def _colocated(record: Any, path: Path) -> float:
    row = at(record, "/".join(path[:-2]))
    return float(row["pd"][path[-1]] / row["colocated"][path[-1]])


def _speed_up(record: Any, path: Path) -> float:
    first, its = record["runs"][0], record["runs"][int(path[1])]
    return float(first["ttft_ms_rounds_2_on"]["p50"] / its["ttft_ms_rounds_2_on"]["p50"])


def _index_match(record: Any, path: Path) -> float:
    keys = path[3] if path[1] == "detail" else path[2].split("_")[1]
    row = record["index"]["detail"]["match"][keys]
    return float(row["peer_us"]["p50"] / row["ours_us"]["p50"])


def _fetch(record: Any, path: Path) -> float:
    size = path[2].rpartition("_")[2]
    seconds = record["fetch"]["detail"][size]["seconds"]
    return float(min(seconds[n]["p50"] for n in seconds if n != "fetch") / seconds["fetch"]["p50"])


def _router_over_others(record: Any, path: Path) -> float:
    rows = record["quality"][path[1]]["routers"]
    others = [row for name, row in rows.items() if name != "cost"]
    if path[-1] == "goodput_over_best_other":
        return float(rows["cost"]["goodput"] / max(row["goodput"] for row in others))
    return float(rows["cost"]["ttft_p99_s"] / min(row["ttft_p99_s"] for row in others))


def _streams(record: Any, path: Path) -> float:
    per_core = _near(record, path, "streams_per_core")
    return float(int(path[-2]) / per_core) if per_core else 0.0


def _layout(record: Any, path: Path) -> float:
    its = record[path[0]]
    plain = its["sizes"]["1→1"]["layout_s"] if path[-1] == "added_share" else 0.0
    return float((its["sizes"][path[2]]["layout_s"] - plain) / its["transfer_seconds"]["p50"])


def _policy_noise(record: Any, path: Path) -> float:
    its = record["effects"][path[1]]
    return float(abs(its["effect"]) - record["noise"][its["where"]])


def _group_bytes(record: Any, path: Path) -> float:
    its = at(record, "/".join(path[:-1]))
    stored = path[-1].startswith("stored")
    tokens = its["dram_hit_tokens" if stored else "loaded_tokens"]
    whole = tokens * its["full_attention_bytes_per_token"]
    return float(its["stored_bytes" if stored else "loaded_bytes"] / whole)


def _group_tokens(record: Any, path: Path) -> float:
    samples = _near(record, path, "samples")
    tier = path[-1].partition("_")[0]
    found = sum(one[tier]["found_tokens"] for one in samples)
    return float(found / sum(one["tokens"] for one in samples))


def _slow_sums(record: Any, path: Path) -> float:
    """Of one pace, or of all of them."""
    paces = [at(record, "/".join(path[:2]))] if path[0] == "paces" else record["paces"]
    over, under = (
        [ms for pace in paces for ms in pace["samples_ms"][side]] for side in ("slowed", "computed")
    )
    how = _median if path[-1].startswith("median") else sum
    return float(how(over) / how(under))


def _slow_worst(record: Any, _: Path) -> float:
    return max(
        float(ms) / _median(pace["samples_ms"]["computed"])
        for pace in record["paces"]
        for ms in pace["samples_ms"]["slowed"]
    )


def _surface(record: Any, path: Path) -> float:
    row = record["rows"][int(path[1])]
    over, under = (
        [ms for burst in bursts for ms in burst["ttft_ms"]]
        for bursts in (row["cells"][int(path[3])]["samples"], row["without_samples"])
    )
    return _median(over) / _median(under)


def _slow_of_old(record: Any, path: Path) -> float:
    """Without the first request at a pace, or it alone; of one pace, or the worst of all."""
    paces = [at(record, "/".join(path[:2]))] if path[0] == "paces" else record["paces"]
    first = "first" in path[-1]
    return max(
        _median(its["slowed"][:1] if first else its["slowed"][1:]) / _median(its["computed"])
        for its in (pace["samples_ms"] for pace in paces)
    )


RULES: Final[list[tuple[str, Rule]]] = [
    (
        "single/hits/dram_hit_over_own_hit",
        _of("samples_ms/dram_hit", "samples_ms/own_hit", _median),
    ),
    (
        "single/hits/recompute_over_dram_hit",
        _of("samples_ms/recompute", "samples_ms/dram_hit", _median),
    ),
    ("single/cold/cold_throughput_on_over_off", _of("samples_s/off", "samples_s/on", sum)),
    (
        "single/cold/cold_tokens_per_processor_second_on_over_off",
        _of("samples_processor_s/off", "samples_processor_s/on", sum),
    ),
    (
        "transfer/speed_over_raw/.*",
        lambda record, path: record["seconds"]["raw"]["p50"] / record["seconds"][path[1]]["p50"],
    ),
    ("transfer/paced_over_unpaced_time", _of("seconds/nixl/p50", "seconds/nixl_unpaced/p50")),
    (".*/share_of_memcpy", _of("../memcpy/median_ms", "median_ms")),
    ("files/.*", _hit_rule(0)),
    ("peers/(serving/dram|files)/kvstore_over_lmcache/.*", _beside_peer),
    ("peers/serving/dram/.*", _hit_rule(2)),
    ("peers/files/.*", _hit_rule(1)),
    (
        "peers/serving/cold/over_vllm_alone/.*/ratio",
        lambda record, path: (
            sum(record["serving"]["cold"]["samples_s"]["vLLM alone"])
            / sum(record["serving"]["cold"]["samples_s"][path[3]])
        ),
    ),
    ("file_speed/write_over_plain", _of("tier_write_gib_s", "plain_write_gib_s")),
    ("file_speed/read_over_plain", _of("tier_read_gib_s", "plain_read_gib_s")),
    ("groups/shapes/[^/]*/dram_hit_over_own_hit", _of("dram_hit_ms", "own_hit_ms")),
    (
        "groups/shapes/[^/]*/hit_tokens_over_own_hit_tokens",
        _of("dram_hit_tokens", "own_hit_tokens"),
    ),
    ("groups/shapes/[^/]*/.*_bytes_over_full_attention", _group_bytes),
    ("groups/shapes/[^/]*/disk/.*_tokens_over_prompt_tokens", _group_tokens),
    ("slow_disk/(paces/.*/)?(sum|median)_slowed_over_(sum|median)_computed", _slow_sums),
    ("slow_disk/worst_request/slowed_over_median_computed", _slow_worst),
    ("slow_disk/(paces/.*/|worst_)(slowed|first)_over_computed", _slow_of_old),
    ("surface/rows/.*/cells/.*/ttft_over_without", _surface),
    ("demo/runs/.*/speed_up_rounds_2_on", _speed_up),
    (
        "cluster/index/figures/events_over_peer/value",
        _of(
            "../../detail/events/ours_from_wire_blocks_per_s",
            "../../detail/events/peer_blocks_per_s",
        ),
    ),
    ("cluster/index/(figures/match_.*_over_peer/value|detail/match/.*/ratio)", _index_match),
    ("cluster/fetch/figures/fetch_over_raw_.*/value", _fetch),
    (
        "cluster/ttft/figures/fetched_hit_over_own_hit/value",
        _of("../../detail/samples_ms/fetched", "../../detail/samples_ms/own", _median),
    ),
    (
        "cluster/congestion/figures/slow_down_paced_over_unpaced/value",
        _of("../../detail/slow_down/paced/p50", "../../detail/slow_down/unpaced/p50"),
    ),
    (
        "cluster/congestion/figures/alone_paced_over_unpaced/value",
        _of("../../detail/read_alone_s/paced/p50", "../../detail/read_alone_s/unpaced/p50"),
    ),
    ("pd/push/figures/push_over_raw_.*", _pd("raw|raw_busy", "node", where="seconds/{}")),
    (
        "pd/push/figures/transfer_worker_over_raw_.*",
        _pd("raw|raw_busy", "transfer_worker", where="seconds/{}"),
    ),
    ("pd/push/figures/paced_over_unpaced_.*", _pd("paced", "transfer_worker", where="seconds/{}")),
    (".*/hand_over_over_nixl_connector/value", _pd("in_turn", "nixl", where="hand_over_ms")),
    (".*/hand_over_together_over_nixl_.*", _pd("together", "nixl", where="hand_over_ms")),
    ("pd/hidden/.*", _of("../../detail/after_prefill_s", "../../detail/whole_push_s", _median)),
    ("pd/ttft/figures/ttft_in_turn_over_own/value", _pd("in_turn", "own", where="ttft_s")),
    ("pd/ttft/figures/ttft_together_over_own/value", _pd("together", "own", where="ttft_s")),
    ("pd/decode/figures/time_per_.*/value", _pd("pd", "one", where="per_token_s")),
    ("pd/decode/figures/longest_gap_.*/value", _pd("pd", "one", where="longest_gap_s")),
    ("pd/pushing/figures/.*/value", _pd("pushing", "not", where="per_token_s")),
    ("pd/sweep/figures/.*/value", _sweep),
    ("pd/sweep/detail/.*", _colocated),
    ("push_layout/.*", _layout),
    (
        "push_speed/.*",
        lambda record, path: (
            _lowest(record[path[0]]["seconds"], "raw|raw_busy")
            / _lowest(record[path[0]]["seconds"], path[2])
        ),
    ),
    (
        "policies/workloads/.*/share",
        lambda record, path: (
            _near(record, path, "slots") / record["workloads"][path[1]]["blocks_different"]
        ),
    ),
    (
        "policies/disk/.*/written_share",
        _of("modes/second-sight/blocks_written", "modes/all/blocks_written"),
    ),
    ("policy_keys/effects/.*/over_noise", _policy_noise),
    ("router/streams/.*/cpu_share", _streams),
    (
        "router_engines/median_mean_ttft_over_round_robin",
        lambda record, _: _median(
            [its["mean_ttft_over_round_robin"] for its in record["seeds"].values()]
        ),
    ),
    (
        "router_engines/seeds/.*/mean_ttft_over_round_robin",
        _of("ttft_ms/kvstore router/mean", "ttft_ms/round robin/mean"),
    ),
    (
        "router_engines/seeds/.*/mean_ttft_over_round_robin_rounds_2_on",
        _of("ttft_ms_rounds_2_on/kvstore router/mean", "ttft_ms_rounds_2_on/round robin/mean"),
    ),
    ("router_quality/quality/.*_over_best_other", _router_over_others),
    (
        "router_quality/quality/.*/ttft_mean_gain_over_prefix_load",
        _of("routers/prefix-load/ttft_mean_s", "routers/cost/ttft_mean_s"),
    ),
    (
        "router_quality/quality/.*/ttft_mean_gain_over_round_robin",
        _of("routers/round-robin/ttft_mean_s", "routers/cost/ttft_mean_s"),
    ),
    ("router_quality/shapes/.*/gain", _of("cost_per_s", "least_load_per_s")),
    (
        "router_quality/disaggregated/gain",
        lambda record, _: (
            max(record["disaggregated"]["split_per_s_by_prefillers"].values())
            / max(record["disaggregated"]["together_per_s_by_chunk"].values())
        ),
    ),
]

WITHOUT_SAMPLES: Final = {
    "checksum/.*/tree_over_one_hash/.*": "a median of ratios within a round; no times",
    "router_engines/seeds/.*": "written before means were, and the medians are of something else",
    "router_quality/quality/.*/that_gain_.*": "the bound's own mean is not in it",
}
"""Ratios whose record does not hold what they were made from, and why."""
