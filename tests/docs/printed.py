"""Where the numbers that README and the performance page print in tables stand in the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

Read = Callable[[str], Any]
RECORDED_ELSEWHERE: Final = "of other runs or another machine: no record here"
Value = str | Callable[[Read], float]
"""A record and a path in it, with a factor when units differ; or what is made from several."""
Entry = tuple[str, str, Sequence[Value]]
"""Beginning of the section's heading, part of the row's first cell, and the numbers in order."""


def _with_ends(path: str) -> list[Value]:
    """A ratio that carries its interval's name."""
    return [path, f"{path}_interval_95/0", f"{path}_interval_95/1"]


def _figure(path: str) -> list[Value]:
    """A figure with its interval beside it."""
    return [f"{path}/value", f"{path}/interval_95/0", f"{path}/interval_95/1"]


def _ratio(path: str) -> list[Value]:
    return [f"{path}/ratio", f"{path}/interval_95/0", f"{path}/interval_95/1"]


def _over(over: str, under: str) -> Value:
    def value(read: Read) -> float:
        return _at(read, over) / _at(read, under)

    return value


def _at(read: Read, path: str) -> float:
    name, *keys = path.split("/")
    found = read(name)
    for key in keys:
        found = found[int(key) if isinstance(found, list) else key]
    return float(found)


def _reuse_over_lru(place: int) -> Value:
    size = f"policies/workloads/trace/sizes/{place}"
    return _over(f"{size}/reuse/miss_blocks", f"{size}/lru/miss_blocks")


def _layout(block: str, key: str, most: Callable[[list[float]], float]) -> Value:
    def value(read: Read) -> float:
        sizes = read("push_layout")[block]["sizes"]
        return most([its[key] for name, its in sizes.items() if name != "1→1"])

    return value


def _most_late(record: Any) -> float:
    """The part of late lookups beside 40 processes, on the node where it is greatest."""
    return max(float(record[f"flood_40x1_{where}"]["late_part"]) for where in ("peers", "here"))


def _groups(path: str) -> list[Value]:
    return [f"groups/shapes/{shape}/{path}" for shape in ("gemma3", "gpt-oss", "qwen3-next")]


def _slowest_pace(read: Read) -> float:
    return max(float(pace["sum_slowed_over_sum_computed"]) for pace in read("slow_disk")["paces"])


def _quality(trace: str, gain: bool = True) -> list[Value]:
    keys = [
        "goodput_over_best_other",
        "ttft_p99_over_best_other",
        *(["ttft_mean_gain_over_round_robin"] if gain else []),
        "ttft_mean_gain_over_prefix_load",
        "that_gain_of_the_bound",
    ]
    return [f"router_quality/quality/{trace}/{key}" for key in keys]


def _shell(trace: str) -> list[Value]:
    sides = ("core", "router", "router, 1 in 4 whole")
    return [f"router_quality/shell/{trace}/{side}/goodput" for side in sides]


def _latency(size: int) -> list[Value]:
    sides = ("kvstore", "sglang-router", "vllm-router")
    return [f"router/latency/{size}/{side}/added_p50_us × 0.001" for side in sides]


_ELSEWHERE: Final[Value] = RECORDED_ELSEWHERE
_PEERS: Final = "peers/serving"
_FILES: Final = "peers/files"
_PEER_ROUNDS: Final = "peers/serving/rounds/engines/{}/prompt_tokens_per_s"
_ROUNDS: Final = _over(_PEER_ROUNDS.format("kvstore"), _PEER_ROUNDS.format("LMCache"))
_FETCHED: Final = _figure("cluster/ttft/figures/fetched_hit_over_own_hit")


def _added(part: str) -> Value:
    return _over(f"{part}/kvstore/added_to_own_hit_ms", f"{part}/LMCache/added_to_own_hit_ms")


def _sweep(proportion: str) -> list[Value]:
    names = ("goodput_tokens_per_s", "tokens_per_s", "ttft_s", "per_token_s")
    row = f"pd/sweep/detail/by_proportion/{proportion}/pd_over_colocated"
    return [f"{row}/{name}" for name in names]


README: Final[list[Entry]] = [
    ("Status", "engine", [_ELSEWHERE, _ELSEWHERE]),  # versions
    ("", "dram hit", _ratio(f"{_PEERS}/dram/kvstore_over_lmcache")),
    ("", "disk hit", _ratio(f"{_FILES}/kvstore_over_lmcache")),
    ("", "disk hit", [f"{_FILES}/kvstore_over_lmcache/ratio_of_means"]),
    ("", "disk hit", _ratio(f"{_FILES}/kvstore_over_lmcache/complete_on_both")),
    ("", "exceed the engine's cache", [_ROUNDS]),
    ("", "cold prompts", _with_ends("single/cold/cold_throughput_on_over_off")),
    ("", "index updates", ["cluster/index/figures/events_over_peer/value"]),
    ("", "fetched from another node", _FETCHED),
]

_SINGLE: Final[list[Entry]] = [
    ("One", "dram hit ÷ prefix-cache hit", _with_ends("single/hits/dram_hit_over_own_hit")),
    ("One", "recompute ÷ dram hit", ["single/hits/recompute_over_dram_hit"]),
    ("One", "throughput of cold", _with_ends("single/cold/cold_throughput_on_over_off")),
    (
        "One",
        "tokens per CPU second",
        _with_ends("single/cold/cold_tokens_per_processor_second_on_over_off"),
    ),
    (
        "One",
        "connector in the scheduler thread",
        [_ELSEWHERE, _ELSEWHERE, "single/micro/scheduler_step/p99_us × 0.001"],
    ),
    ("One", "node process killed", ["warm_restart/first_hit_after_kill/p50_s"]),
    ("One", "interruption by", ["warm_restart/away_in_upgrade/p50_s"]),
    ("One", "store ÷ memcpy", ["pack_speed/alone/store/share_of_memcpy", _ELSEWHERE]),
    (
        "One",
        "load with checksum ÷ memcpy",
        ["pack_speed/alone/load_checked/share_of_memcpy", _ELSEWHERE],
    ),
    ("Models", "hit length", _groups("hit_tokens_over_own_hit_tokens")),
    ("Models", "bytes loaded", _groups("loaded_bytes_over_full_attention")),
    ("Models", "bytes stored", _groups("stored_bytes_over_full_attention")),
    (
        "Models",
        "dram hit ÷ prefix-cache hit",
        [v for ours in _groups("dram_hit_over_own_hit") for v in (_ELSEWHERE, _ELSEWHERE, ours)],
    ),
    ("Models", "dram hit ÷ prefix-cache hit", _groups("dram_hit_over_own_hit")),
    ("Models", "from disk", _groups("disk/disk_tokens_over_prompt_tokens")),
    ("Models", "from dram", _groups("disk/dram_tokens_over_prompt_tokens")),
    ("Conversations", "from round 2 on", ["demo/runs/1/speed_up_rounds_2_on"]),
    ("Conversations", "after an engine restart", ["demo/runs/2/speed_up_rounds_2_on"]),
    ("Conversations", "after a node restart", ["demo/runs/3/speed_up_rounds_2_on"]),
]

_DISK: Final[list[Entry]] = [
    ("Disk", "disk hit with a cold page cache", ["files/hit_over_own_hit"]),
    ("Disk", "complete hits only", ["files/complete_hit_over_own_hit"]),
    ("Disk", "write through the disk tier", ["file_speed/write_over_plain"]),
    ("Disk", "verified read through the disk tier", ["file_speed/read_over_plain"]),
    ("Disk", "time to the first hit", ["file_restart/node/first_hit_s_p50"]),
    ("Disk", "all records indexed", ["file_restart/node/all_known_at_most_s_p50"]),
    ("Disk", "sums over the run", ["slow_disk/sum_slowed_over_sum_computed"]),
    ("Disk", "slowest pace", [_slowest_pace]),
    (
        "Disk",
        "worst single request",
        ["slow_disk/worst_request/slowed_over_median_computed"],
    ),
    ("Disk", "disk writes with", ["policies/disk/trace/written_share"]),
    ("Disk", "misses of", [_reuse_over_lru(place) for place in (0, 2, 3)]),
    ("Beside", "dram hit, time", _ratio(f"{_PEERS}/dram/kvstore_over_lmcache")),
    ("Beside", "disk hit, cold page cache", _ratio(f"{_FILES}/kvstore_over_lmcache")),
    ("Beside", "means", [f"{_FILES}/kvstore_over_lmcache/ratio_of_means"]),
    ("Beside", "complete", _ratio(f"{_FILES}/kvstore_over_lmcache/complete")),
    ("Beside", "complete", _ratio(f"{_FILES}/kvstore_over_lmcache/complete_on_both")),
    ("Beside", "dram hit less", [_added(f"{_PEERS}/dram")]),
    ("Beside", "disk hit less", [_added(_FILES)]),
    (
        "Beside",
        "tokens found",
        [f"{_FILES}/{side}/found_over_stored_tokens" for side in ("kvstore", "LMCache")],
    ),
    (
        "Beside",
        "cold throughput",
        [
            *_ratio(f"{_PEERS}/cold/over_vllm_alone/kvstore"),
            *_ratio(f"{_PEERS}/cold/over_vllm_alone/LMCache"),
        ],
    ),
    ("Beside", "multi-round questions", [_ROUNDS]),
]

_CLUSTER: Final[list[Entry]] = [
    ("Cluster", "block updates per second", ["cluster/index/figures/events_over_peer/value"]),
    (
        "Cluster",
        "queries of",
        [f"cluster/index/figures/match_{keys}_over_peer/value" for keys in (32, 128, 512)],
    ),
    *(
        ("Cluster", name, [f"cluster/index/figures/long_prompt_{kind}_p99_us/value × 0.001"])
        for name, kind in (
            ("all nodes have all blocks", "whole"),
            ("a different prefix length", "stairs"),
            ("a different set of nodes", "ragged"),
        )
    ),
    (
        "Cluster",
        "index over gRPC",
        [
            f"cluster/index_grpc/figures/blocks_per_s_told_by_{count}/value × 1e-6"
            for count in (256, 1)
        ],
    ),
    ("Cluster", "snapshot", ["cluster/index_grpc/figures/snapshot_1m_s/value"]),
    (
        "Cluster",
        "`Match` of 512 keys",
        [
            "cluster/index_grpc/figures/empty_call_p50_ms/value",
            "cluster/index_grpc/figures/match_512_p50_ms/value",
        ],
    ),
    ("Cluster", "128 open calls", ["index_crowd/compiled/quiet/p99_ms"]),
    ("Cluster", "blocks of 2 MiB", _figure("cluster/fetch/figures/fetch_over_raw_2MiB")),
    ("Cluster", "blocks of 64 KiB", _figure("cluster/fetch/figures/fetch_over_raw_64KiB")),
    ("Cluster", "fetched from another node", _FETCHED),
    ("Cluster", "fetched completely", ["cluster/ttft/figures/wholly_fetched/value"]),
    (
        "Cluster",
        "slowdown of another flow",
        _figure("cluster/congestion/figures/slow_down_paced_over_unpaced"),
    ),
    (
        "Cluster",
        "without other flows",
        _figure("cluster/congestion/figures/alone_paced_over_unpaced"),
    ),
    ("Cluster", "simulated, 1,000 nodes", ["cluster/scale/figures/lag_p99_ms/value"]),
]

_PUSH: Final[list[Entry]] = [
    *(
        ("Pushes", name, [f"push_speed/{size}/speed_over_raw/{side}" for size in ("2MiB", "64KiB")])
        for name, side in (("by the transfer worker", "transfer_worker"), ("with checks", "node"))
    ),
    (
        "Pushes",
        "÷ off, transfer workers",
        [
            _over(
                f"push_speed/{size}/seconds/paced/p50",
                f"push_speed/{size}/seconds/transfer_worker/p50",
            )
            for size in ("2MiB", "64KiB")
        ],
    ),
    (
        "Pushes",
        "copy from the landing buffer",
        [_layout(size, "layout_share", of) for size in ("2MiB", "64KiB") for of in (min, max)],
    ),
    (
        "Pushes",
        "minus the copy for",
        [_layout("64KiB", "added_share", of) for of in (min, max)],
    ),
    (
        "",
        "for a landed write",
        [f"push_crowd/decode_{size}/landed/ms/p50" for size in ("128KiB", "8MiB")],
    ),
    ("", "each expect 256 transfers", [lambda read: 100 * _most_late(read("push_crowd"))]),
    ("Pushes", "share of the push", _figure("pd/hidden/figures/not_hidden_over_whole_push")),
    (
        "Pushes",
        "from the prefill response",
        _figure("pd/hand_over/figures/hand_over_together_over_nixl_connector"),
    ),
    (
        "Pushes",
        "the same, one request",
        _figure("pd/hand_over/figures/hand_over_over_nixl_connector"),
    ),
    ("Pushes", "TTFT ÷ TTFT", _figure("pd/ttft/figures/ttft_in_turn_over_own")),
    ("Pushes", "the same, both requests", _figure("pd/ttft/figures/ttft_together_over_own")),
    (
        "Pushes",
        "while long prompts arrive",
        _figure("pd/decode/figures/time_per_output_token_over_one_engine"),
    ),
    ("Pushes", "longest gap", ["pd/decode/figures/longest_gap_over_one_engine/value"]),
    (
        "Pushes",
        "its node pushing",
        _figure("pd/pushing/figures/time_per_output_token_while_pushing_over_not"),
    ),
    (
        "Pushes",
        "push between nodes",
        [
            *_figure("pd/push/figures/push_over_raw_write_2MiB"),
            *_figure("pd/push/figures/push_over_raw_write_64KiB"),
        ],
    ),
    (
        "Pushes",
        "÷ off, 2 MiB",
        [f"pd/push/figures/paced_over_unpaced_{size}/value" for size in ("2MiB", "64KiB")],
    ),
    *(("Pushes", f"{at} : 1", _sweep(f"{at}:1")) for at in (20, 10, 5)),
    ("Pushes", "1 : 1", _sweep("1:1")),
]

_TRACES: Final = (
    ("conversation", "conversation@1"),
    ("conversation, three times", "conversation@3"),
    ("tool agent", "tool-agent@1"),
    ("tool agent, four times", "tool-agent@4"),
    ("shared prefix", "shared-prefix@1"),
    ("no sharing", "low-sharing@1"),
)
_ROUTER: Final[list[Entry]] = [
    ("Router", "request of 2 KB", _latency(2000)),
    ("Router", "the same, 128 KB", _latency(128000)),
    (
        "Router",
        "200 streams",
        [
            f"router/streams/{side}/200/delay_p99_ms"
            for side in ("kvstore", "sglang-router", "vllm-router")
        ],
    ),
    (
        "Router",
        "endpoint picker",
        ["router/latency/2000/kvstore picker, Envoy/added_p50_us × 0.001"],
    ),
    (
        "Router",
        "decision for a prompt",
        [
            f"route_decision/with_answer_of_the_index/processor_{p}_us × 0.001"
            for p in ("p50", "p99")
        ],
    ),
    ("Router", "a worker leaves", ["worker_left/left_ms/p50", "worker_left/left_ms/max"]),
    *(("Router", name, _quality(trace)) for name, trace in _TRACES),
    ("Router", "shared prefix, four times", _quality("shared-prefix@4", gain=False)),
    *(
        ("Router", name, _shell(trace))
        for name, trace in (
            ("conversation", "conversation@1"),
            ("conversation, three times", "conversation@3"),
            ("tool agent, four times", "tool-agent@4"),
            ("shared prefix, four times", "shared-prefix@4"),
        )
    ),
    ("Router", "highest rate", [f"router_quality/shapes/{name}/gain" for name in ("S2", "S3")]),
    ("Router", "goodput per engine", ["router_quality/disaggregated/gain"]),
    ("Faults", "bytes verified", [lambda read: float(read("soak")["verified_bytes"] / 2**30)]),
    ("Faults", "return to baseline", ["soak/baseline_slowest_s"]),
]

PAGES: Final = {
    "README.md": README,
    "kvstore/docs/performance.md": [*_SINGLE, *_DISK, *_CLUSTER, *_PUSH, *_ROUTER],
}

OUTDATED: Final[dict[tuple[str, tuple[str, ...]], str]] = {}
"""Numbers of a page that are known to be wrong, and why they stand there still."""
