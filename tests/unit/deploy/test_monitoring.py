"""Alerts and dashboard: names that exist, rules that fire when they should and only then, a runbook
for each, the same in chart and files."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from kvstore.obs.metrics import BY_NAME
from scripts import alerts, chart, dashboard
from scripts.alerts import ALERTS
from tests.kit.programs import need
from tests.unit.deploy.manifests import merged, of_kind, rendered

EVERY = {alert.name: alert.expr for alert in ALERTS}
PANELS = [panel for row in dashboard.ROWS.values() for panel in row]
QUERIES = {f"{panel.title}/{name}": q for panel in PANELS for name, q in panel.queries.items()}
VARIABLES = {"$__rate_interval": "5m", "$ttft_objective": "0.2", "$success_objective": "0.999"}
PARTS = ("_bucket", "_sum", "_count")
OF_HISTOGRAMS = {"le"}
SCRAPED = {"instance", "role", "model_name", "finished_reason"}
"""Labels that a scrape gives, or vLLM."""


def plain(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """Names of its metrics, and the labels that it asks them for."""
    found: list[promql.VectorSelector] = []

    def seen(each: promql.Expr) -> None:
        if isinstance(each, promql.VectorSelector):
            found.append(each)
        elif isinstance(each, promql.MatrixSelector):
            found.append(each.vector_selector)

    promql.walk(promql.parse(plain(query)), seen)
    return [(each.name or "", {one.name for one in each.matchers.matchers}) for each in found]


def family_of(name: str) -> str:
    """The name of a family, from that of a series."""
    return next((name.removesuffix(part) for part in PARTS if name.endswith(part)), name)


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("query", [*EVERY.values(), *QUERIES.values()], ids=[*EVERY, *QUERIES])
def test_a_query_is_promql_and_its_names_are_in_the_table(query: str) -> None:
    labels: set[str] = set()
    for name, asked in selectors(query):
        if not name.startswith("vllm:"):
            metric = BY_NAME[family_of(name)]
            assert (metric.kind == "histogram") == (family_of(name) != name)
            labels |= {*metric.labels}
            assert asked <= {*metric.labels} | (OF_HISTOGRAMS if family_of(name) != name else set())
    used = re.findall(r"(?:by|without|on) \(([\w, ]+)\)", query)
    named = {label for text in used for label in text.split(", ")}
    assert named <= labels | SCRAPED | OF_HISTOGRAMS


@pytest.mark.engine
def test_names_of_vllm_are_in_its_own_list() -> None:
    """As its source has them: an engine exports some only once they have a value."""
    import vllm

    text = Path(str(vllm.__file__)).with_name("v1").joinpath("metrics", "loggers.py").read_text()
    known = set(re.findall(r'"(vllm:\w+)"', text))
    named = {
        family_of(name).removesuffix("_total")
        for query in QUERIES.values()
        for name, _ in selectors(query)
        if name.startswith("vllm:")
    }
    assert len(named) == 8
    assert named <= known


# ── alerts ───────────────────────────────────────────────────────────────────────────────────────

NODE = 'instance="n"'
WORKER = 'instance="r",worker="w"'
MODEL = 'instance="n",model="m",tenant="t"'
GROWS = "0+1000x400"
"""A sample each 5 minutes."""
STAYS = "7x400"
Series = dict[str, str]
FIRES: dict[str, tuple[Series, ...]] = {
    "KVStoreEngineUnserved": (
        {f"kvstore_engines_unserved{{{NODE}}}": "1x400"},
        {'kvstore_router_workers{instance="r",state="down"}': "1x400"},
    ),
    "KVStoreIntegrityFailure": tuple(
        {f"kvstore_{name}{{{NODE}{label}}}": "0+1x400"}
        for name, label in (
            ("blocks_distrusted_total", ""),
            ("file_blocks_damaged_total", ""),
            ("scrub_bad_total", ',tier="dram"'),
            ("fetch_damaged_total", ""),
            ("push_blocks_damaged_total", ""),
        )
    ),
    "KVStoreShadowDiverged": (
        {f"kvstore_shadow_blocks_diverged_total{{{NODE}}}": "0+1x400"},
        {f'kvstore_spaces_off{{{NODE},tier="file"}}': "1x400"},
    ),
    "KVStoreBreakerOpen": ({f'kvstore_breaker_open{{{NODE},direction="reads"}}': "1x400"},),
    "KVStoreNodeRestarting": ({f"kvstore_restarts_total{{{NODE}}}": "0+1x400"},),
    "KVStoreHeartbeatGap": ({f"kvstore_heartbeat_gap_seconds{{{NODE}}}": "0.21x400"},),
    "KVStoreIndexStale": (
        {'kvstore_index_nodes{instance="i",trust="stale"}': "1x400"},
        {'kvstore_index_store_up{instance="i"}': "0x400"},
    ),
    "KVStoreFeedLost": ({f"kvstore_feeds{{{NODE}}}": "0x400"},),
    "KVStoreCertificateExpires": (
        {f"kvstore_certificate_expires_timestamp_seconds{{{NODE}}}": "600000x400"},
    ),
    "KVStoreDiskFull": (
        {
            f'kvstore_file_blocks_not_written_total{{{NODE},reason="disk"}}': "0+3x400",
            f"kvstore_file_blocks_written_total{{{NODE}}}": "0+2x400",
        },
    ),
    "KVStoreHitRateFell": (
        {
            f"kvstore_loaded_tokens_total{{{MODEL}}}": "0+8000x200 1600000+3000x200",
            f"kvstore_prompt_tokens_total{{{MODEL}}}": "0+10000x400",
        },
    ),
    "KVStoreLedgerNegative": (
        {
            f"kvstore_saved_seconds_total{{{MODEL}}}": "0+2x400",
            f"kvstore_spent_seconds_total{{{MODEL}}}": "0+3x400",
        },
    ),
    "KVStoreRouterBlind": (
        {
            f"kvstore_router_worker_cached_tokens_total{{{WORKER}}}": GROWS,
            f"kvstore_router_worker_predicted_tokens_total{{{WORKER}}}": STAYS,
            'kvstore_router_index_used{instance="r"}': "1x400",
        },
    ),
    "KVStoreRouterSaturated": (
        {'kvstore_router_saturation{instance="r",pool="p",cause="queue"}': "0.95x400"},
    ),
}
QUIET: dict[str, tuple[Series, ...]] = {
    "KVStoreEngineUnserved": (
        {
            f"kvstore_engines_unserved{{{NODE}}}": "0x310 1 0x80",
            'kvstore_router_workers{instance="r",state="up"}': "1x400",
        },
    ),
    "KVStoreIntegrityFailure": ({f"kvstore_file_blocks_damaged_total{{{NODE}}}": STAYS},),
    "KVStoreShadowDiverged": ({f'kvstore_spaces_off{{{NODE},tier="file"}}': "0x400"},),
    "KVStoreBreakerOpen": ({f'kvstore_breaker_open{{{NODE},direction="reads"}}': "0x400"},),
    "KVStoreNodeRestarting": ({f"kvstore_restarts_total{{{NODE}}}": "0x306 2x90"},),
    "KVStoreHeartbeatGap": ({f"kvstore_heartbeat_gap_seconds{{{NODE}}}": "0.19x400"},),
    "KVStoreIndexStale": (
        {
            'kvstore_index_nodes{instance="i",trust="exact"}': "9x400",
            'kvstore_index_nodes{instance="i",trust="stale"}': "0x400",
        },
    ),
    "KVStoreFeedLost": ({f"kvstore_feeds{{{NODE}}}": "1x400"},),
    "KVStoreCertificateExpires": (
        {f"kvstore_certificate_expires_timestamp_seconds{{{NODE}}}": "900000x400"},
    ),
    "KVStoreDiskFull": (
        {
            f'kvstore_file_blocks_not_written_total{{{NODE},reason="disk"}}': "0+2x400",
            f'kvstore_file_blocks_not_written_total{{{NODE},reason="admission"}}': "0+9x400",
            f"kvstore_file_blocks_written_total{{{NODE}}}": "0+3x400",
        },
    ),
    "KVStoreHitRateFell": (
        {
            f"kvstore_loaded_tokens_total{{{MODEL}}}": "0+8000x200 1600000+5000x200",
            f"kvstore_prompt_tokens_total{{{MODEL}}}": "0+10000x400",
        },
        {  # little traffic
            f"kvstore_loaded_tokens_total{{{MODEL}}}": "0+80x200 16000+30x200",
            f"kvstore_prompt_tokens_total{{{MODEL}}}": "0+100x400",
        },
    ),
    "KVStoreLedgerNegative": (
        {
            f"kvstore_saved_seconds_total{{{MODEL}}}": "0+3x400",
            f"kvstore_spent_seconds_total{{{MODEL}}}": "0+2x400",
        },
    ),
    "KVStoreRouterBlind": (
        {  # an index that is not used has its own alert
            f"kvstore_router_worker_cached_tokens_total{{{WORKER}}}": GROWS,
            f"kvstore_router_worker_predicted_tokens_total{{{WORKER}}}": STAYS,
            'kvstore_router_index_used{instance="r"}': "0x400",
        },
        {
            f"kvstore_router_worker_cached_tokens_total{{{WORKER}}}": GROWS,
            f"kvstore_router_worker_predicted_tokens_total{{{WORKER}}}": GROWS,
            'kvstore_router_index_used{instance="r"}': "1x400",
        },
    ),
    "KVStoreRouterSaturated": (
        {'kvstore_router_saturation{instance="r",pool="p",cause="queue"}': "0.85x400"},
    ),
}


def promtool(directory: Path, cases: list[tuple[Series, str]]) -> str:
    """Complaints; cases: series, and the one alert that fires after 26 hours (empty: none). Each
    case is an instance and a model of its own, by which all rules tell them apart."""
    (directory / "alerts.yaml").write_text(alerts.text())
    own = r'(instance|model)="\w+"'
    series, fired = [], []
    for number, (given, alert) in enumerate(cases):
        case = f"c{number}"
        for name, text in given.items():
            series.append({"series": re.sub(own, rf'\1="{case}"', name), "values": text})
        if alert:
            by = "model" if "sum by (model)" in EVERY[alert] else "instance"
            labels = f'{{alertname="{alert}",{by}="{case}"}}'
            fired.append({"labels": labels, "value": 1})
    firing = 'count by (alertname, instance, model) (ALERTS{alertstate="firing"})'
    expected = {"expr": firing, "eval_time": "26h", "exp_samples": fired}
    test = {"interval": "5m", "input_series": series, "promql_expr_test": [expected]}
    content = {"rule_files": ["alerts.yaml"], "evaluation_interval": "5m", "tests": [test]}
    (directory / "tests.yaml").write_text(yaml.safe_dump(content))
    command = ["promtool", "test", "rules", str(directory / "tests.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def test_each_alert_fires_alone_and_stays_quiet(tmp_path: Path) -> None:
    need("promtool")
    fires = [(series, alert.name) for alert in ALERTS for series in FIRES[alert.name]]
    quiet = [(series, "") for alert in ALERTS for series in QUIET[alert.name]]
    assert promtool(tmp_path, [*fires, *quiet]) == ""


def test_a_hastened_alert_is_the_same_in_a_shorter_time() -> None:
    fell = next(each for each in ALERTS if each.name == "KVStoreHitRateFell")
    short = alerts.hastened(fell, 60)
    assert short.holds == "30s"
    assert "[60s] offset 1440s" in short.expr
    assert not re.search(r"[0-9][mhd]\b", short.expr)
    assert alerts.hastened(ALERTS[1], 10_000).expr.count("[2s]") == 5


# ── runbooks ─────────────────────────────────────────────────────────────────────────────────────


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    text = (chart.ROOT / alerts.RUNBOOK).read_text()
    sections = text.partition("## Runbooks")[2]
    assert re.findall(r"(?m)^### (\S+)$", sections) == [*EVERY]
    assert f"{len(ALERTS)} alerts" in text
    for alert in ALERTS:
        assert alerts.runbook(alert).endswith(f"observability.md#{alert.name.lower()}")


# ── chart and files ──────────────────────────────────────────────────────────────────────────────


def test_files_are_made_from_the_tables() -> None:
    """After a change of a table run scripts/chart.py."""
    folder = chart.CHART / "files"
    assert {path.name: path.read_text() for path in folder.iterdir()} == chart.files()


def test_the_chart_has_the_same_rules_and_dashboard() -> None:
    values = {"rules": {"enabled": True, "labels": {"release": "x"}}}
    values |= {"dashboard": {"enabled": True}, "objectives": {"ttftSeconds": 1.5, "success": 0.99}}
    found = rendered({"monitoring": values})
    (rules,) = of_kind(found, "PrometheusRule")
    assert rules["spec"] == alerts.rules()
    assert rules["metadata"]["labels"]["release"] == "x"
    (board,) = (e for e in of_kind(found, "ConfigMap") if "kvstore.json" in e["data"])
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    made, wanted = json.loads(board["data"]["kvstore.json"]), dashboard.dashboard()
    queries = {each["name"]: each["query"] for each in made["templating"].pop("list")}
    assert (queries["ttft_objective"], queries["success_objective"]) == ("1.5", "0.99")
    del wanted["templating"]["list"]
    assert made == wanted
    off = merged({"monitoring": values}, {"monitoring": {"rules": {"enabled": False}}})
    assert not of_kind(rendered(off), "PrometheusRule")
    assert not of_kind(rendered({}), "ConfigMap")


def test_defaults_of_objectives_are_those_of_the_dashboard() -> None:
    told = yaml.safe_load((chart.CHART / "values.yaml").read_text())["monitoring"]["objectives"]
    assert [str(value) for value in told.values()] == [v for _, v in dashboard.OBJECTIVES.values()]


# ── dashboard ────────────────────────────────────────────────────────────────────────────────────


def test_panels_cover_no_other_and_say_what_to_do() -> None:
    made = dashboard.dashboard()
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= dashboard.WIDTH
        assert taken.isdisjoint(cells)
        taken |= cells
    graphs = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert len(made["panels"]) - len(graphs) == 4
    for panel in graphs:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"])
        for each in (panel, *panel["targets"]):
            assert each["datasource"]["uid"] == "${datasource}"
    (source, *_) = made["templating"]["list"]
    assert (source["type"], source["current"]) == ("datasource", {})
