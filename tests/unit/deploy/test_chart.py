"""The chart under any values: Helm's own lint, wrong values refused by name, selectors that never
change, releases that share nothing, memory that suffices."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import helm_python
import pytest
import yaml
from hypothesis import example, given, settings, strategies as st

from kvstore import __version__
from kvstore.cli.main import cli
from kvstore.config.settings import IndexSettings, NodeSettings, RouterSettings
from kvstore.connector.config import parse_config
from kvstore.router.front.intake import BODIES_SHARE
from kvstore.routing.policy import RoutingPolicy
from kvstore.units import GIB, KIB, MIB, TIB, parse_size
from scripts import chart
from tests.docs.commands import index_config, node_config, router_config
from tests.unit.deploy.manifests import (
    ALL,
    CLUSTER,
    COMPONENT,
    EXAMPLES,
    Object,
    component,
    connector,
    container,
    example_values,
    flags,
    merged,
    objects,
    of_kind,
    pod,
    rendered,
    template,
    validate,
    workload,
    workloads,
)

# ── Helm itself ──────────────────────────────────────────────────────────────────────────────────


def test_helm_is_version_4() -> None:
    assert helm_python.helm_sdk_version().startswith("v4.")


@pytest.mark.parametrize("name", [*EXAMPLES, ""])
def test_lint_finds_nothing(name: str) -> None:
    values = example_values(name) if name else {}
    report = helm_python.lint(chart.CHART, values, strict=True)
    assert (report["messages"], report["errors"]) == ([], [])


def test_lint_finds_something_in_a_broken_chart(tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", str(chart.CHART), str(tmp_path / "kvstore")], check=True)
    (tmp_path / "kvstore" / "templates" / "index.yaml").write_text("{{ .Values.index.replica.x }}")
    assert helm_python.lint(tmp_path / "kvstore", {}, strict=True)["errors"]


def test_the_chart_is_of_this_version() -> None:
    told = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert (told["version"], told["appVersion"]) == (__version__, __version__)


def test_the_schema_is_made_from_the_settings() -> None:
    """After a change of a setting run scripts/chart.py."""
    assert json.loads((chart.CHART / "values.schema.json").read_text()) == chart.schema()


def test_every_flag_is_a_value_or_set_by_the_chart() -> None:
    for program, kind in (
        ("node", NodeSettings),
        ("index", IndexSettings),
        ("router", RouterSettings),
    ):
        flags_ = {
            option.removeprefix("--")
            for each in cli.commands[program].params
            for option in each.opts
        }
        known = chart.flags_of(kind)["properties"].keys() | chart.SET_BY_THE_CHART[kind]
        assert flags_ - {"config"} == known


def test_rendered_twice_is_the_same() -> None:
    assert chart.rendered(ALL) == chart.rendered(ALL)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        *(
            ({"node": {"args": {flag: value}}}, flag)
            for flag, value in (
                ("drams", "64GiB"),
                *(("dram", "64"), ("dram", "auto"), ("dram", 64), ("policy", "fifo")),
                *(("socket", "/x"), ("insecure", True), ("hbm", "8GiB,gpu=a"), ("quota", ["a"])),
                *(("file", "/x:1TiB"), ("scrub", False), ("allow-uid", ["root"])),
                ("file-writes-per-day", "much"),
            )
        ),
        *(
            ({"index": {"args": {flag: value}}}, flag)
            for flag, value in (("entries", 10), ("entries", "10M"), ("listen", ":1"), ("plain", 1))
        ),
        *(
            ({"router": {"args": {flag: value}}}, flag)
            for flag, value in (
                *(("drain-delay", 3601), ("worker", "a=http://b"), ("body-max", "big")),
                *(("share-port", "yes"), ("api-keys", "/x"), ("connections", 0)),
            )
        ),
        *(
            ({"router": {"args": {"worker-slices": text}}}, "worker-slices")
            for text in ("vllm:8000", "llm/vllm", "llm/vllm:8000,https", "/vllm:8000", "llm/:8000")
        ),
        ({"router": {"args": {"body-max": "1.5GiB"}}}, "body-max"),
        ({"router": {"policy": {"limit": {}}}}, "limit"),
        ({"router": {"policy": {"limits": {"held_max": "all"}}}}, "held_max"),
        ({"router": {"service": {"type": "External"}}}, "type"),
        ({"index": {"replicas": 0}}, "replicas"),
        ({"node": {"overhead": "2G"}}, "overhead"),
        ({"node": {"disk": {"size": "1T"}}}, "size"),
        *(({"node": {"disk": {"hostPath": path}}}, "hostPath") for path in ("", "/", "mnt/nvme")),
        *(({"node": {"socketDirectory": path}}, "socketDirectory") for path in ("/", "run")),
        *(({"image": {"registry": name}}, "registry") for name in ("https://a b", "a/")),
        *(({part: {"image": ""}}, "image") for part in ("node", "index", "router")),
        ({"engineDefaults": {"image": ""}}, "image"),
        ({"engines": {"a": {"image": ""}}}, "image"),
        *(({"node": {"cpu": cpu}}, "cpu") for cpu in (0, "", "1 core", True)),
        ({"node": {"resources": {"memory": "1Gi"}}}, "memory"),
        ({"node": {"podLabels": {COMPONENT: "x"}}}, COMPONENT),
        ({"node": {"updateStrategy": {"type": "Recreate"}}}, "type"),
        ({"engines": {"a-b": {}}}, "a-b"),
        ({"engines": {"a": {"terminationGracePeriodSeconds": 9}}}, "terminationGracePeriodSeconds"),
        ({"engines": {"a": {"rollingUpdate": {"maxSurge": "x"}}}}, "maxSurge"),
        ({"engines": {"a": {"role": "kv_both"}}}, "role"),
        ({"engines": {"a": {"connector": {"min_load": 1}}}}, "min_load"),
        ({"engines": {"a": {"connector": {"socket": "/x"}}}}, "socket"),
        ({"engineDefaults": {"autoscaling": {"saturation": 1.5}}}, "saturation"),
        ({"certificates": {"mode": "vault"}}, "mode"),
        ({"gateway": {"kind": "nginx"}}, "kind"),
        ({"insecure": "false"}, "insecure"),
        ({"nodes": {}}, "nodes"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_wrong_value_is_refused_by_name(wrong: Object, name: str) -> None:
    with (
        helm_python.Chart.load(chart.CHART) as loaded,
        pytest.raises(helm_python.HelmError, match=rf"[/']{re.escape(name)}\b"),
    ):
        loaded.render(wrong, name="kvstore", namespace="kvstore")


INDEXED: Object = {"index": {"enabled": True}, "router": {"enabled": True}}
GATEWAY: Object = merged(INDEXED, {"router": {"apiKeysSecret": "keys"}})


@pytest.mark.parametrize(
    ("values", "release", "sentence"),
    [
        ({"gateway": {"kind": "istio"}}, "kvstore", "gateway.kind needs router.enabled"),
        (
            {**GATEWAY, "gateway": {"kind": "istio", "failureMode": "FailOpen"}},
            "kvstore",
            "gateway.failureMode: FailOpen lets requests past router.apiKeysSecret",
        ),
        (
            {**GATEWAY, "gateway": {"kind": "gke", "className": "x", "namespace": "y"}},
            "kvstore",
            "gateway.className makes a Gateway in the namespace of the release",
        ),
        ({}, "a" * 41, "has more than 40 characters"),
        (
            {"engines": {"a": {"autoscaling": {"kind": "hpa"}}}},
            "kvstore",
            "engines.a.autoscaling needs router.enabled",
        ),
        (
            {"router": {"enabled": True}},
            "kvstore",
            "router.enabled needs engines: set router.args.worker, worker-dns or worker-slices",
        ),
        (
            {**INDEXED, "engines": {"a": {"autoscaling": {"kind": "hpa", "minReplicas": 5}}}},
            "kvstore",
            "engines.a.autoscaling: minReplicas is above maxReplicas",
        ),
        (
            {"router": {"enabled": True, "autoscaling": {"maxReplicas": 1}}, "engines": {"a": {}}},
            "kvstore",
            "router.autoscaling: minReplicas is above maxReplicas",
        ),
    ],
)
def test_what_the_schema_cannot_say_is_a_sentence(
    values: Object, release: str, sentence: str
) -> None:
    with pytest.raises(helm_python.HelmError, match=sentence):
        rendered(values, release=release)


def notes(values: Object) -> str:
    with helm_python.Chart.load(chart.CHART) as loaded:
        made = loaded.render(values, name="kvstore", namespace="ai")
    return made["kvstore/templates/NOTES.txt"]


def test_the_notes_have_the_engine_flags_to_paste() -> None:
    text = notes({})
    (snippet,) = re.findall(r"(?m)^  spec:\n(?:    .*\n)+", text)
    spec = yaml.safe_load(snippet)["spec"]
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": spec}, "1.37")
    (engine,) = spec["containers"]
    args = engine["args"]
    config = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert config == connector(objects(CLUSTER), "vllm-engine")
    extra = config["kv_connector_extra_config"] | {"address": "http://10.0.0.7:8000"}
    assert parse_config(extra).socket == "/run/kvstore/node.sock"
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert volumes["kvstore"]["hostPath"]["path"] == "/run/kvstore/ai/kvstore"
    assert {each["name"] for each in engine["volumeMounts"]} == volumes.keys()
    assert spec["securityContext"]["runAsUser"] == 10001
    assert {"name": "HOME", "value": "/tmp"} in engine["env"]
    assert "hostIPC" not in spec
    assert "    hostIPC: true\n" in notes({"node": {"args": {"hbm": "1GiB"}}})
    assert "kv_producer" in text
    assert "--kv-transfer-config" not in notes({"engines": {"a": {}}}), "which has it already"
    assert "kubectl label namespace ai pod-security.kubernetes.io/enforce=privileged" in text
    assert "secrets" not in text


@pytest.mark.parametrize("kind", ["gke", "istio"])
def test_the_notes_name_the_gateway(kind: str) -> None:
    gateway = {"kind": kind, "name": "shared", "namespace": "edge"}
    text = notes({**INDEXED, "gateway": {**gateway, "hostnames": ["llm.example.com"]}})
    assert "Clients: https://llm.example.com/v1, through the Gateway shared in edge" in text
    assert "without API keys" in text
    keys = {**GATEWAY, "gateway": gateway}
    assert "without API keys" not in notes(keys)
    assert "Clients: https://ADDRESS/v1, through the Gateway shared in edge" in notes(keys)


def test_the_notes_name_what_is_missing() -> None:
    text = notes(example_values(CLUSTER))
    assert all(f"kvstore-{part}-certificates" in text for part in ("node", "index", "router"))
    assert "https://kvstore-router.ai.svc:443/v1" in text
    assert "For labs" not in text
    assert "For labs" in notes({"insecure": True})


# ── names and selectors ──────────────────────────────────────────────────────────────────────────

NAMES = st.lists(
    st.sampled_from(
        ["a", "b", "node", "index", "router", "peers", "picker", "engine", "policy", "kvstore"]
    ),
    min_size=1,
    max_size=3,
).map("-".join)
"""Of releases; made of the words that objects' names end with."""


def identities(found: list[Object]) -> set[tuple[str, ...]]:
    """Names in the API, and directories of hosts. A Gateway's name is given by the operator."""
    names = {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"])
        for each in found
        if each["kind"] not in ("Namespace", "Gateway")
    }
    pods = [made for each in workloads(found) if (made := template(each))]
    paths = {
        (volume["hostPath"]["path"], mount.get("subPath", ""))
        for made in pods
        for volume in made["spec"]["volumes"]
        for mount in made["spec"]["containers"][0]["volumeMounts"]
        if "hostPath" in volume and mount["name"] == volume["name"]
    }
    return names | paths


@settings(max_examples=12)
@example(one="a", other="a", spaces=("x", "y"))
@example(one="a", other="a-kvstore", spaces=("x", "x"))
@example(one="a-b", other="b", spaces=("x", "x-a"))
@example(one="a", other="a-router", spaces=("x", "x"))
@example(one="a", other="a-node", spaces=("x", "x"))
@given(one=NAMES, other=NAMES, spaces=st.sampled_from([("x", "x"), ("x", "y")]))
def test_two_releases_share_no_name(one: str, other: str, spaces: tuple[str, str]) -> None:
    if (one, spaces[0]) == (other, spaces[1]):
        return
    first = rendered(ALL, release=one, namespace=spaces[0])
    second = rendered(ALL, release=other, namespace=spaces[1])
    assert identities(first).isdisjoint(identities(second))
    if spaces[0] == spaces[1]:
        wanted = [
            each["spec"]["selector"]["matchLabels"]
            for each in workloads(first)
            if "selector" in each["spec"]
        ]
        for each in workloads(second):
            made = template(each)
            assert made is not None
            labels = made["metadata"]["labels"]
            assert not any(one_.items() <= labels.items() for one_ in wanted)


def _maps(keys: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, str]]:
    return st.dictionaries(keys, st.sampled_from(["x", "y"]), max_size=2)


ANY_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "insecure": st.booleans(),
        "image": st.fixed_dictionaries({"tag": st.sampled_from(["1", "2"])}),
        "index": st.fixed_dictionaries(
            {"enabled": st.just(True)},
            optional={
                "replicas": st.integers(1, 5),
                "podLabels": _maps(st.sampled_from(["a", "sidecar.istio.io/inject"])),
            },
        ),
        "node": st.fixed_dictionaries(
            {},
            optional={
                "podLabels": _maps(st.sampled_from(["a", "b/c"])),
                "podAnnotations": _maps(st.sampled_from(["a", "b/c"])),
                "hugepages": st.booleans(),
                "nodeSelector": _maps(st.sampled_from(["a", "b"])),
                "disk": st.fixed_dictionaries(
                    {"size": st.sampled_from(["", "1TiB", "3GiB"])},
                    optional={"storageClassName": st.sampled_from(["", "local"])},
                ),
            },
        ),
        "router": st.fixed_dictionaries(
            {"enabled": st.just(True)},
            optional={
                "autoscaling": st.fixed_dictionaries({"enabled": st.booleans()}),
                "policy": st.just({"limits": {"held_max": 3}}),
                "apiKeysSecret": st.sampled_from(["", "keys"]),
                "args": st.fixed_dictionaries(
                    {},
                    optional={
                        "drain-delay": st.integers(0, 60),
                        "drain-timeout": st.integers(0, 900),
                        "worker-slices": st.just("other/vllm:8000"),
                    },
                ),
            },
        ),
        "certificates": st.fixed_dictionaries(
            {"mode": st.sampled_from(["secret", "cert-manager"])}
        ),
        "monitoring": st.just({"serviceMonitors": {"enabled": True}}),
        "networkPolicy": st.fixed_dictionaries({"enabled": st.booleans()}),
    },
)


@settings(max_examples=20)
@given(values=ANY_VALUES)
def test_selectors_are_the_same_under_any_values_and_all_is_valid(values: Object) -> None:
    """Kubernetes refuses an upgrade that changes the selector of a workload."""
    found = rendered(merged({"engines": {"vllm": {}}}, values))
    fixed = {component(each): each["spec"]["selector"] for each in workloads(objects(CLUSTER))}
    for each in workloads(found):
        assert each["spec"]["selector"] == fixed[component(each)]
        made = template(each)
        assert made is not None
        assert each["spec"]["selector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
    for each in found:
        validate(each, "1.37")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"insecure": True},
        {"gateway": {"kind": "istio"}, "certificates": {"mode": "cert-manager"}},
        {"router": {"autoscaling": {"enabled": True}, "args": {"worker-slices": "a/b:80"}}},
    ],
    ids=str,
)
def test_objects_that_no_example_has_are_valid(more: Object) -> None:
    found = rendered(merged(ALL, more))
    assert of_kind(found, "HorizontalPodAutoscaler")
    for each in found:
        validate(each, "1.34")
        validate(each, "1.37")


@settings(max_examples=10)
@given(delay=st.integers(0, 3600), timeout=st.integers(0, 86_400))
def test_requests_may_end_before_a_router_is_killed(delay: int, timeout: int) -> None:
    args = {"drain-delay": delay, "drain-timeout": timeout}
    found = rendered(merged(INDEXED, {"router": {"args": args}}))
    waits_s = container(found, "router")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits_s >= max(1, delay)
    assert pod(found, "router")["terminationGracePeriodSeconds"] >= waits_s + delay + timeout + 10


@pytest.mark.parametrize(("grace", "left"), [(60, 50), (25, 15), (10, 0)])
def test_requests_may_end_before_an_engine_is_killed(grace: int, left: int) -> None:
    found = rendered({"engines": {"a": {"terminationGracePeriodSeconds": grace}}})
    engine = container(found, "a-engine")
    assert f"--shutdown-timeout={left}" in engine["args"]
    waits_s = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits_s + left + 5 == pod(found, "a-engine")["terminationGracePeriodSeconds"] == grace


def test_an_engine_is_replaced_on_the_gpus_that_it_has() -> None:
    found = rendered({"engines": {"a": {}, "b": {"rollingUpdate": {"maxSurge": "25%"}}}})
    spec = workload(found, "a-engine")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    probe = container(found, "a-engine")["startupProbe"]
    assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]
    rolls = workload(found, "b-engine")["spec"]["strategy"]["rollingUpdate"]
    assert rolls == {"maxSurge": "25%", "maxUnavailable": 1}


def test_nodes_may_be_replaced_by_hand() -> None:
    def updates(values: Object) -> Object:
        strategy: Object = workload(rendered({"node": values}), "node")["spec"]["updateStrategy"]
        return strategy

    assert updates({}) == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    share = updates({"updateStrategy": {"maxUnavailable": "10%"}})
    assert share["rollingUpdate"] == {"maxUnavailable": "10%"}
    assert updates({"updateStrategy": {"type": "OnDelete"}}) == {"type": "OnDelete"}


def test_one_engine_at_a_time_is_evicted_where_there_are_several() -> None:
    engines = {"a": {}, "b": {"replicas": 2}, "c": {"autoscaling": {"kind": "keda"}}}
    engines["d"] = {"replicas": 2, "autoscaling": {"kind": "keda", "maxReplicas": 1}}
    found = rendered({"router": {"enabled": True}, "engines": engines})
    budgets = of_kind(found, "PodDisruptionBudget")
    assert {component(each) for each in budgets} == {"router", "b-engine", "c-engine"}
    assert {each["spec"]["maxUnavailable"] for each in budgets} == {1}


def test_engines_have_what_their_machines_need() -> None:
    found = rendered({"engines": {"a": {}, "b": {"runtimeClassName": "nvidia"}}})
    assert "runtimeClassName" not in pod(found, "a-engine")
    assert pod(found, "b-engine")["runtimeClassName"] == "nvidia"
    assert container(found, "a-engine")["readinessProbe"]["timeoutSeconds"] == 5, "under load"


def test_variables_of_the_operator_replace_those_of_the_chart() -> None:
    """Kubernetes refuses a name that is there twice."""
    mine = [{"name": name, "value": "x"} for name in ("HOME", "NODE_NAME", "MINE")]
    mine += [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}, {"name": "POLICY_DIGEST"}]
    parts = {part: {"enabled": True, "env": mine} for part in ("node", "index", "router")}
    parts["node"]["args"] = {"hbm": "1GiB"}
    parts["router"]["policy"] = {"limits": {"held_max": 3}}
    found = rendered({**parts, "engines": {"a": {"env": mine}}})
    for part in ("node", "index", "router", "a-engine"):
        env = container(found, part)["env"]
        assert env[-len(mine) :] == mine
        names = [each["name"] for each in env]
        assert len({*names}) == len(names)
        assert {"POD_IP", "POD_NAME"} <= {*names}, "which flags use"


@pytest.mark.parametrize(("claim", "offline"), [("models", True), ("", False)])
def test_engines_without_a_claim_may_download_the_model(claim: str, offline: bool) -> None:
    env = container(rendered({"engines": {"a": {"modelsClaim": claim}}}), "a-engine")["env"]
    assert ({"name": "HF_HUB_OFFLINE", "value": "1"} in env) is offline
    assert {"name": "HOME", "value": "/tmp"} in env


# ── flags ────────────────────────────────────────────────────────────────────────────────────────


def test_flags_of_every_kind_reach_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {
        "dram": "16GiB",
        "quota": {"llama": "30%", "b": "2GiB"},
        "allow-uid": [10001, 20002],
        "file-admission": "second-sight",
        "scrub": "off",
        "log-level": "debug",
    }
    found = rendered({"node": {"args": args, "disk": {"size": "1TiB"}}})
    made = node_config(flags(found, "node"), monkeypatch)
    assert made.dram_bytes == 16 * GIB
    assert dict(made.quotas)["b"] == 2 * GIB
    assert made.allow_uid >= {10001, 20002}
    assert (made.scrub_rate, made.log_level) == (None, "debug")
    found = rendered(
        {
            "insecure": True,
            "index": {"enabled": True, "args": {"entries": 20_000_000, "plain": True}},
        }
    )
    assert index_config(flags(found, "index")).entries == 20_000_000


def test_nothing_has_tls_in_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rendered({"insecure": True, "index": {"enabled": True}, "router": {"enabled": True}})
    made = node_config(flags(found, "node"), monkeypatch).cluster
    assert made is not None
    assert made.tls is None
    assert index_config(flags(found, "index")).tls is None
    assert router_config(flags(found, "router")).front is None
    volumes = [
        volume["name"]
        for part in ("node", "index", "router")
        for volume in pod(found, part)["volumes"]
    ]
    assert "certificates" not in volumes


def test_a_router_without_an_index_finds_the_engines_by_dns() -> None:
    engines = {"a": {"port": 8001}, "p": {"role": "prefill"}}
    mine = {"enabled": True, "args": {"worker-dns": ["http://other:8000"]}}
    found = rendered({"insecure": True, "router": mine, "engines": engines})
    names = router_config(flags(found, "router")).names
    assert [(each.url, each.role) for each in names] == [
        ("http://other:8000", "both"),
        ("http://kvstore-a-engine.kvstore:8001", "both"),
        ("http://kvstore-p-engine.kvstore:8000", "prefill"),
    ]
    (service,) = of_kind(found, "Service", "a-engine")
    assert service["spec"]["clusterIP"] == "None", "or its name has one address"
    assert [port["port"] for port in service["spec"]["ports"]] == [8001]
    cluster = flags(objects(CLUSTER), "router")
    assert not [flag for flag in cluster if flag.startswith("--worker-dns")]


def test_plain_engines_are_an_option() -> None:
    assert "--insecure" in container(rendered(INDEXED), "router")["args"]
    found = rendered(merged(INDEXED, {"router": {"plainEngines": False}}))
    assert "--insecure" not in container(found, "router")["args"]


def test_the_policy_file_is_one_that_a_router_takes() -> None:
    found = objects("spot")
    (policy,) = of_kind(found, "ConfigMap", "router-policy")
    limits = yaml.safe_load(policy["data"]["policy.yaml"])["limits"]
    assert limits["holds_without_workers"] is True
    assert RoutingPolicy().limits.holds_without_workers is False
    digests = {
        each["value"]
        for held in (1, 2)
        for each in container(
            rendered(merged(INDEXED, {"router": {"policy": {"limits": {"held_max": held}}}})),
            "router",
        )["env"]
        if each["name"] == "POLICY_DIGEST"
    }
    assert len(digests) == 2, "a change replaces the pods"


def test_slices_may_be_read_and_nothing_else() -> None:
    found = rendered({"router": {"enabled": True, "args": {"worker-slices": "llm/vllm:8000"}}})
    (role,), (binding,) = of_kind(found, "Role"), of_kind(found, "RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "llm"
    (account,) = of_kind(found, "ServiceAccount")
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], "kvstore")
    assert pod(found, "router")["serviceAccountName"] == account["metadata"]["name"]
    others = rendered(merged(ALL, {"engines": {}}))
    assert all(
        pod(others, part)["automountServiceAccountToken"] is False
        for part in ("node", "index", "router")
    )


# ── memory, disk, devices ────────────────────────────────────────────────────────────────────────


@settings(max_examples=12)
@given(
    dram=st.integers(1, 4096),
    disk=st.sampled_from(["", "512MiB", "1GiB", "1TiB", "30TiB"]),
    overhead=st.sampled_from(["512MiB", "2GiB"]),
    hugepages=st.booleans(),
)
def test_a_node_has_memory_for_dram_its_tables_and_itself(
    dram: int, disk: str, overhead: str, hugepages: bool
) -> None:
    node = {
        "args": {"dram": f"{dram}GiB"},
        "disk": {"size": disk},
        "overhead": overhead,
        "hugepages": hugepages,
    }
    resources = container(rendered({"node": node}), "node")["resources"]
    blocks = parse_size(disk) // (256 * KIB) if disk else 0
    least = parse_size(overhead) + 233 * blocks + (0 if hugepages else dram * GIB)
    memory = parse_size(resources["limits"]["memory"] + "B")
    assert least <= memory <= least + 2 * 1024 * KIB
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    pages = parse_size(resources["limits"].get("hugepages-2Mi", "0") + "B")
    assert pages == (dram * GIB if hugepages else 0)
    assert resources["requests"].get("hugepages-2Mi") == resources["limits"].get("hugepages-2Mi")


@pytest.mark.parametrize(
    ("body", "overhead"), [("", "1GiB"), ("16MiB", "512MiB"), ("1GiB", "2GiB")]
)
def test_a_router_has_memory_for_bodies_and_itself(body: str, overhead: str) -> None:
    args = {"body-max": body} if body else {}
    lab = {"insecure": True, "router": {"args": args, "overhead": overhead}}
    found = rendered(merged(INDEXED, lab))
    made = router_config(flags(found, "router"))
    resources = container(found, "router")["resources"]
    memory = parse_size(resources["limits"]["memory"] + "B")
    assert memory == BODIES_SHARE * made.body_max + parse_size(overhead)
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


@pytest.mark.parametrize("key", ["worker", "worker-dns", "worker-slices"])
def test_a_router_may_have_engines_of_the_operator_alone(key: str) -> None:
    worker = {"worker-slices": "llm/vllm:http,scheme=https"}.get(key, ["http://127.0.0.1:8000"])
    found = rendered({"router": {"enabled": True, "args": {key: worker}}})
    assert [each for each in container(found, "router")["args"] if each.startswith(f"--{key}=")]


def test_the_node_takes_its_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rendered({"node": {"disk": {"size": "1TiB"}}})
    file = node_config(flags(found, "node"), monkeypatch).disk
    assert file is not None
    assert file.capacity_bytes == TIB
    mounts = {m["mountPath"]: m["name"] for m in container(found, "node")["volumeMounts"]}
    volumes = {each["name"]: each for each in pod(found, "node")["volumes"]}
    disk = volumes[mounts[str(file.directory)]]
    assert disk["hostPath"]["type"] == "Directory", "of a disk that is not mounted nothing is made"
    owners = [each["command"][-1] for each in pod(found, "node")["initContainers"]]
    assert [command.split()[-1] for command in owners] == [str(file.directory), "/run/kvstore"]
    own, main = pod(found, "node")["initContainers"][0], container(found, "node")
    for each in (own, main):
        (mount,) = (m for m in each["volumeMounts"] if m["name"] == "blocks")
        assert mount["subPath"] == "kvstore/kvstore", "and nothing else below hostPath is changed"


def test_a_disk_may_be_a_local_volume() -> None:
    disk = {"size": "1TiB", "storageClassName": "local-nvme"}
    (volume,) = (
        each
        for each in pod(rendered({"node": {"disk": disk}}), "node")["volumes"]
        if each["name"] == "blocks"
    )
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == "local-nvme"
    size = parse_size(claim["resources"]["requests"]["storage"] + "B")
    assert 1.1 * TIB <= size < 1.1 * TIB + 2 * MIB, "the file system takes a part of it"
    mounts = container(rendered({"node": {"disk": disk}}), "node")["volumeMounts"]
    assert {"name": "blocks", "mountPath": "/var/lib/kvstore"} in mounts


@pytest.mark.parametrize(
    ("uids", "mode"),
    [([10001], "0700"), (10001, "0700"), ([10001, 20002], "0711"), (20002, "0711")],
)
def test_users_who_may_attach_reach_the_socket(
    uids: int | list[int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rendered({"node": {"args": {"allow-uid": uids}, "disk": {"size": "1GiB"}}})
    owners = {each["name"]: each["command"][-1] for each in pod(found, "node")["initContainers"]}
    assert owners["own-socket"].startswith(f"chmod {mode} /run/kvstore ")
    assert owners["own-blocks"].startswith("chmod 0700 "), "the tier is the node's alone"
    allowed = node_config(flags(found, "node"), monkeypatch).allow_uid
    assert allowed >= {*(uids if isinstance(uids, list) else [uids])}


@pytest.mark.parametrize(("cpu", "text"), [(2, "2"), (0.5, "0.5"), ("500m", "500m")])
def test_cpu_may_be_a_number(cpu: float | str, text: str) -> None:
    parts = {part: {"enabled": True, "cpu": cpu} for part in ("node", "index", "router")}
    found = rendered({**parts, "engines": {"a": {"cpu": cpu}}})
    for part in ("node", "index", "router", "a-engine"):
        assert container(found, part)["resources"]["requests"]["cpu"] == text


def test_gpu_memory_comes_with_what_cuda_needs() -> None:
    found = objects("fast-hardware")
    assert "--hbm=8GiB" in container(found, "node")["args"]
    spec = pod(found, "node")
    assert (spec["hostIPC"], spec["runtimeClassName"]) == (True, "nvidia")
    assert pod(found, "vllm-engine")["hostIPC"] is True
    env = {each["name"]: each.get("value") for each in container(found, "node")["env"]}
    assert env["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "hostIPC" not in pod(objects(CLUSTER), "node")


def test_rdma_devices_are_requested() -> None:
    found = objects("fast-hardware")
    assert container(found, "node")["resources"]["limits"]["rdma/hca"] == 1
    assert "--transport=nixl" in container(found, "node")["args"]
