"""Alerts, as rules of Prometheus: one table, from which the chart and a plain file are made.

    deploy/chart/files/alerts.yaml   for `rule_files` of a Prometheus; groups of the chart's
                                     PrometheusRule

Each alert has a section of its name in `kvstore/docs/guides/observability.md`, to which
`runbook_url` points. Does not cover: the dashboard (`scripts.dashboard`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import yaml

RUNBOOK: Final = "kvstore/docs/guides/observability.md"
NOTE: Final = "# Made by scripts/chart.py from scripts/alerts.py: change it there.\n"
_DURATION: Final = re.compile(r"(?<=[\[ ])([0-9]+)([mhd])(?=[\] )]|$)")
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400}


class Alert(NamedTuple):
    """One rule. `holds`: how long the expression has to hold, such as 5m."""

    name: str
    holds: str
    severity: str
    summary: str
    expr: str


ALERTS: Final = (
    Alert(
        "KVStoreEngineUnserved",
        "5m",
        "warning",
        "An engine gets nothing from node or router {{ $labels.instance }}",
        "kvstore_engines_unserved > 0"
        ' or sum without (state) (kvstore_router_workers{state=~"down|open"}) > 0',
    ),
    Alert(
        "KVStoreIntegrityFailure",
        "0m",
        "critical",
        "Damaged blocks were found, and dropped, at {{ $labels.instance }}",
        "increase(kvstore_blocks_distrusted_total[15m]) > 0"
        " or increase(kvstore_file_blocks_damaged_total[15m]) > 0"
        " or sum without (tier) (increase(kvstore_scrub_bad_total[15m])) > 0"
        " or increase(kvstore_fetch_damaged_total[15m]) > 0"
        " or increase(kvstore_push_blocks_damaged_total[15m]) > 0",
    ),
    Alert(
        "KVStoreShadowDiverged",
        "0m",
        "critical",
        "Cached values differ from recomputed ones at {{ $labels.instance }}",
        "increase(kvstore_shadow_blocks_diverged_total[1h]) > 0"
        " or sum without (tier) (kvstore_spaces_off) > 0",
    ),
    Alert(
        "KVStoreBreakerOpen",
        "5m",
        "warning",
        "The disk of {{ $labels.instance }} fails: no {{ $labels.direction }}",
        "kvstore_breaker_open > 0",
    ),
    Alert(
        "KVStoreNodeRestarting",
        "0m",
        "warning",
        "The node process of {{ $labels.instance }} ended or was upgraded three times in an hour",
        "increase(kvstore_restarts_total[1h]) > 2.5",  # increase() extrapolates
    ),
    Alert(
        "KVStoreHeartbeatGap",
        "5m",
        "warning",
        "Node {{ $labels.instance }} is late: at 0.25 s its engines stop caching",
        "kvstore_heartbeat_gap_seconds > 0.2",
    ),
    Alert(
        "KVStoreIndexStale",
        "5m",
        "warning",
        "Index {{ $labels.instance }} does not follow {{ $value }} nodes",
        'sum without (trust) (kvstore_index_nodes{trust!="exact"}) > 0'
        " or kvstore_index_store_up == 0",
    ),
    Alert(
        "KVStoreFeedLost",
        "2m",
        "warning",
        "Node {{ $labels.instance }} reaches no index replica",
        "kvstore_feeds == 0",
    ),
    Alert(
        "KVStoreCertificateExpires",
        "1h",
        "critical",
        "The certificate in use at {{ $labels.instance }} expires in"
        " {{ $value | humanizeDuration }}",
        "kvstore_certificate_expires_timestamp_seconds - time() < 7 * 86400",
    ),
    Alert(
        "KVStoreDiskFull",
        "15m",
        "warning",
        "The disk tier of {{ $labels.instance }} drops more blocks than it writes",
        "sum without (reason)"
        ' (increase(kvstore_file_blocks_not_written_total{reason=~"disk|budget"}[15m]))'
        " > increase(kvstore_file_blocks_written_total[15m])",
    ),
    Alert(
        "KVStoreHitRateFell",
        "30m",
        "warning",
        "Model {{ $labels.model }} hits half as often as yesterday",
        "sum by (model) (increase(kvstore_loaded_tokens_total[1h]))"
        " / (sum by (model) (increase(kvstore_prompt_tokens_total[1h])) > 100000)"
        " < 0.5 * sum by (model) (increase(kvstore_loaded_tokens_total[1h] offset 1d))"
        " / (sum by (model) (increase(kvstore_prompt_tokens_total[1h] offset 1d)) > 100000)",
    ),
    Alert(
        "KVStoreLedgerNegative",
        "30m",
        "warning",
        "Model {{ $labels.model }} waits longer for its cache than the cache saves",
        "sum by (model) (rate(kvstore_saved_seconds_total[30m]))"
        " < sum by (model) (rate(kvstore_spent_seconds_total[30m]))",
    ),
    Alert(
        "KVStoreRouterBlind",
        "15m",
        "warning",
        "Router {{ $labels.instance }} expects no hits of {{ $labels.worker }}, which has some",
        "(increase(kvstore_router_worker_cached_tokens_total[15m]) > 0"
        " unless increase(kvstore_router_worker_predicted_tokens_total[15m]) > 0)"
        " and on (instance) kvstore_router_index_used == 1",
    ),
    Alert(
        "KVStoreRouterSaturated",
        "10m",
        "warning",
        "Pool {{ $labels.pool }} is saturated ({{ $labels.cause }})",
        "kvstore_router_saturation > 0.9",
    ),
)


def runbook(alert: Alert) -> str:
    """Section of the guide that says what to do."""
    return f"{RUNBOOK}#{alert.name.lower()}"


def rules(alerts: Sequence[Alert] = ALERTS) -> dict[str, Any]:
    """Content of a rules file, and `spec` of a PrometheusRule."""
    made = [
        {
            "alert": each.name,
            "expr": each.expr,
            **({"for": each.holds} if each.holds != "0m" else {}),
            "labels": {"severity": each.severity},
            "annotations": {"summary": each.summary, "runbook_url": runbook(each)},
        }
        for each in alerts
    ]
    return {"groups": [{"name": "kvstore", "rules": made}]}


def hastened(alert: Alert, factor: int) -> Alert:
    """With all its durations divided, at least 2 s each: for a test that cannot wait."""

    def shorter(found: re.Match[str]) -> str:
        return f"{max(2, int(found[1]) * _SECONDS[found[2]] // factor)}s"

    holds = _DURATION.sub(shorter, f" {alert.holds}").strip() if alert.holds != "0m" else "0m"
    return alert._replace(expr=_DURATION.sub(shorter, alert.expr), holds=holds)


def text() -> str:
    """The rules file."""
    return NOTE + yaml.safe_dump(rules(), sort_keys=False, width=10_000)
