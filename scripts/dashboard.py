"""The Grafana dashboard: a table of panels, from which the chart's JSON is made.

    deploy/chart/files/dashboard.json   import it into Grafana; the chart's ConfigMap has the same

Four rows: is it worth it, what does it hold, cluster and pushes, router. Objectives are variables,
to which the chart gives the values of `monitoring.objectives`. Does not cover: alerts
(`scripts.alerts`).
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24
HEIGHT: Final = 8
PANEL: Final = 8
OBJECTIVES: Final = {"ttft_objective": ("TTFT (s)", "0.2"), "success_objective": ("OK", "0.999")}
"""Variable → label, value."""
_QUANTILES: Final = (0.5, 0.95, 0.99)


class Panel(NamedTuple):
    """One graph. `queries`: legend → PromQL."""

    title: str
    unit: str
    about: str
    queries: dict[str, str]


def _rates(names: dict[str, str], *, by: str = "") -> dict[str, str]:
    """Legend → rate of a counter without `kvstore_`."""
    return {
        legend: f"sum{f' by ({by})' if by else ''} (rate(kvstore_{name}[$__rate_interval]))"
        for legend, name in names.items()
    }


def _quantiles(histogram: str, by: str, objective: str = "") -> dict[str, str]:
    """p50, p95 and p99 of a histogram, and the objective beside them."""
    found = {
        f"p{share * 100:g} {{{{{by}}}}}": (
            f"histogram_quantile({share},"
            f" sum by ({by}, le) (rate({histogram}_bucket[$__rate_interval])))"
        )
        for share in _QUANTILES
    }
    return found | ({"objective": f"vector(${objective})"} if objective else {})


ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Is it worth it?": (
        Panel(
            "Prefill saved, and time spent for it",
            "s",
            "Seconds in each second. While 'spent' is above 'saved', the cache costs more than it"
            " saves: see 'Requests are slower' in the troubleshooting guide.",
            _rates({name: f"{name}_seconds_total" for name in ("saved", "spent", "lost")}),
        ),
        Panel(
            "Prompt tokens loaded, by model",
            "percentunit",
            "Share of prompt tokens that were not computed. If it falls, look at the reasons of"
            " misses.",
            {
                "{{model}}": "sum by (model) (rate(kvstore_loaded_tokens_total[$__rate_interval]))"
                " / sum by (model) (rate(kvstore_prompt_tokens_total[$__rate_interval]))"
            },
        ),
        Panel(
            "Misses by reason",
            "cps",
            "evicted: more dram or disk. too-late, no-room: a faster disk, more dram. The guide"
            " 'Is it worth it' has the others.",
            _rates({"{{reason}}": "blocks_missed_total"}, by="reason"),
        ),
        Panel(
            "TTFT by role",
            "s",
            "Time to first token as vLLM measures it. Above the objective: compare queue and"
            " saturation in the row 'Router'.",
            _quantiles("vllm:time_to_first_token_seconds", "role", "ttft_objective"),
        ),
        Panel(
            "Inter-token latency by role",
            "s",
            "If it rises with hits, loads compete with decoding: separate prefill and decode.",
            _quantiles("vllm:inter_token_latency_seconds", "role"),
        ),
        Panel(
            "Tokens per second by role",
            "cps",
            "Prompt and generated tokens of all engines.",
            {
                f"{kind} {{{{role}}}}": f"sum by (role) (rate(vllm:{kind}_tokens_total"
                "[$__rate_interval]))"
                for kind in ("prompt", "generation")
            },
        ),
        Panel(
            "Engines: waiting requests, preemptions",
            "short",
            "Requests that wait, by role, and preemptions per second. Preemptions: fewer"
            " concurrent requests, or more memory for the engine's own cache.",
            {
                "waiting {{role}}": "sum by (role) (vllm:num_requests_waiting)",
                "preemptions {{role}}": "sum by (role)"
                " (rate(vllm:num_preemptions_total[$__rate_interval]))",
            },
        ),
        Panel(
            "Engines: use of their own KV cache",
            "percentunit",
            "Near 1, prefixes leave the engine soon, and kvstore's hits matter most.",
            {"{{role}}": "max by (role) (vllm:kv_cache_usage_perc)"},
        ),
        Panel(
            "Engines: requests finished by reason",
            "reqps",
            "error and abort should stay near 0.",
            {
                "{{finished_reason}}": "sum by (finished_reason)"
                " (rate(vllm:request_success_total[$__rate_interval]))"
            },
        ),
    ),
    "What does it hold?": (
        Panel(
            "Use of tiers",
            "percentunit",
            "Full is normal: blocks are evicted by need. Compare with misses by reason 'evicted'.",
            {
                "{{instance}} {{tier}}": "sum by (instance, tier) (kvstore_used_bytes)"
                " / sum by (instance, tier) (kvstore_capacity_bytes)"
            },
        ),
        Panel(
            "Evicted within an hour of the last use",
            "cps",
            "Blocks that leave sooner than prompts come back are computed again: 'kvstore inspect"
            " curve' tells what more dram would serve.",
            {
                "{{tier}}": "sum by (tier)"
                ' (rate(kvstore_eviction_age_seconds_bucket{le="3600"}[$__rate_interval]))'
            },
        ),
        Panel(
            "Hit ratio with more or less dram",
            "percentunit",
            "Prompt tokens that dram of so many times its size would serve. A steep step: buy that"
            " size. Absent until there were enough lookups.",
            {"{{capacity}}": "avg by (capacity) (kvstore_expected_hit_ratio)"},
        ),
        Panel(
            "Blocks hit by tier",
            "cps",
            "Source of loaded blocks. Many from disk: more dram shortens waits.",
            _rates({"{{tier}}": "blocks_hit_total"}, by="tier"),
        ),
        Panel(
            "Blocks stored and evicted",
            "cps",
            "Evictions near stores: the cache turns over faster than prompts return.",
            _rates({"stored": "stores_sealed_total", "evicted": "evictions_total"}),
        ),
        Panel(
            "Disk: blocks per second",
            "cps",
            "Not written for long: the disk is full, slow, or its write budget is used up.",
            _rates({"written": "file_blocks_written_total", "read": "file_blocks_read_total"})
            | _rates({"not written {{reason}}": "file_blocks_not_written_total"}, by="reason"),
        ),
        Panel(
            "Damaged blocks",
            "short",
            "Of the last hour; each was dropped and computed. Above 0: test memory, disk, network.",
            {
                "read": "sum (increase(kvstore_blocks_distrusted_total[1h]))",
                "disk": "sum (increase(kvstore_file_blocks_damaged_total[1h]))",
                "scrub {{tier}}": "sum by (tier) (increase(kvstore_scrub_bad_total[1h]))",
                "shadow check": "sum (increase(kvstore_shadow_blocks_diverged_total[1h]))",
            },
        ),
        Panel(
            "Longest heartbeat gap",
            "s",
            "At 0.25 s engines stop caching: give the node more CPU.",
            {"{{instance}}": "max by (instance) (kvstore_heartbeat_gap_seconds)"},
        ),
    ),
    "Cluster and pushes": (
        Panel(
            "Engines of nodes",
            "short",
            "Not served: 'kvstore inspect nodes' has the reason.",
            {"served": "sum (kvstore_sessions)", "not served": "sum (kvstore_engines_unserved)"},
        ),
        Panel(
            "Nodes in the index, by trust",
            "short",
            "All but 'exact' are asked for no blocks. stale, out: the node, or the network to it.",
            {"{{instance}} {{trust}}": "sum by (instance, trust) (kvstore_index_nodes)"},
        ),
        Panel(
            "Index replicas that follow a node",
            "short",
            "0: blocks of this node are not found by others. Start a replica, or open its port.",
            {"{{instance}}": "sum by (instance) (kvstore_feeds)"},
        ),
        Panel(
            "Bytes between nodes",
            "Bps",
            "Compare with the network. Served much above fetched at one node: a hot prefix.",
            _rates(
                {
                    "fetched": "fetched_bytes_total",
                    "served": "served_bytes_total",
                    "pushed": "pushed_bytes_total",
                }
            ),
        ),
        Panel(
            "Pushed blocks",
            "cps",
            "Pushed, but not landed: compare spaces of the two nodes. Cut short: slow prefill.",
            _rates(
                {
                    "pushed": "pushed_blocks_total",
                    "landed": "push_blocks_landed_total",
                    "pushes cut short": "pushes_cut_short_total",
                }
            ),
        ),
        Panel(
            "Certificates: time left",
            "s",
            "Renew below 30 days; 'kvstore upgrade' loads the new one and keeps the memory.",
            {
                "{{instance}}": "min by (instance)"
                " (kvstore_certificate_expires_timestamp_seconds - time())"
            },
        ),
    ),
    "Router": (
        Panel(
            "TTFT: achieved and predicted",
            "s",
            "Achieved far above predicted: the router's estimates are wrong, or engines stall.",
            _quantiles("kvstore_router_ttft_seconds", "kind", "ttft_objective"),
        ),
        Panel(
            "Success",
            "percentunit",
            "Share of requests that did not fail, without those that clients aborted or got"
            " wrong (4xx). Below the objective: the outcomes beside.",
            {
                "success": 'sum (rate(kvstore_router_requests_total{outcome="done"}'
                "[$__rate_interval])) / sum (rate(kvstore_router_requests_total"
                '{outcome!~"refused|aborted"}[$__rate_interval]))',
                "objective": "vector($success_objective)",
            },
        ),
        Panel(
            "Requests by outcome",
            "reqps",
            "broken, failed: the engines' logs. Others than done: reasons of rejections.",
            _rates({"{{outcome}}": "router_requests_total"}, by="outcome"),
        ),
        Panel(
            "Workers by state",
            "short",
            "load-only: keys differ, so no hit is foreseen. down, open: /healthz has the reason.",
            {"{{state}}": "sum by (state) (kvstore_router_workers)"},
        ),
        Panel(
            "Cached tokens: reported and predicted",
            "cps",
            "Predicted 0 while reported is not: the router is blind. Predicted above reported:"
            " blocks are evicted before they are used.",
            _rates(
                {
                    "reported": "router_worker_cached_tokens_total",
                    "predicted": "router_worker_predicted_tokens_total",
                    "of prompts": "router_worker_prompt_tokens_total",
                }
            ),
        ),
        Panel(
            "Saturation of pools",
            "percentunit",
            "Near 1: more workers; kvstore_router_desired_replicas says how many.",
            {"{{pool}} {{cause}}": "max by (pool, cause) (kvstore_router_saturation)"},
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []}
        )
        y += 1
        for number, panel in enumerate(row):
            line, column = divmod(number, WIDTH // PANEL)
            place = {"x": column * PANEL, "y": y + line * HEIGHT, "w": PANEL, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place} | _graph(panel))
        y += -(-len(row) // (WIDTH // PANEL)) * HEIGHT
    return {
        "uid": "kvstore",
        "title": "kvstore",
        "tags": ["kvstore", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _graph(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + n), "datasource": DATASOURCE, "expr": query, "legendFormat": name}
        for n, (name, query) in enumerate(panel.queries.items())
    ]
    bounds = {"min": 0, "max": 1} if panel.unit == "percentunit" else {"min": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **bounds}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": targets,
    }


def _variables() -> list[dict[str, Any]]:
    """`current` is empty: a name of ours would be a data source that no other Grafana has."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource"}
    return [source | {"query": "prometheus", "current": {}}] + [
        {"name": name, "label": f"Objective: {label}", "type": "textbox", "query": value}
        for name, (label, value) in OBJECTIVES.items()
    ]


def text() -> str:
    """The JSON file."""
    return json.dumps(dashboard(), indent=1) + "\n"
