"""The chart under any values: Helm's own lint, wrong values refused by name, selectors that never
change, releases that share nothing, memory that suffices, and connections that policies admit."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from hypothesis import example, given, settings, strategies as st

from kvstore import __version__
from kvstore.cli.main import cli
from kvstore.config.settings import IndexSettings, NodeSettings, RouterSettings
from kvstore.connector.config import parse_config
from kvstore.obs.metrics import BY_NAME
from kvstore.routing.policy import RoutingPolicy
from kvstore.units import GIB, KIB, TIB, parse_size
from scripts import chart
from tests.docs.commands import index_config, node_config, router_config
from tests.kit import envoy
from tests.unit.deploy.manifests import (
    CLUSTER,
    COMPONENT,
    EXAMPLES,
    Object,
    component,
    connector,
    container,
    example_values,
    flags,
    objects,
    of_kind,
    pod,
    rendered,
    template,
    validate,
    workload,
    workloads,
)

ALL: Object = {
    "index": {"enabled": True},
    "router": {"enabled": True},
    "monitoring": {"serviceMonitors": {"enabled": True}},
    "engines": {
        "a": {"autoscaling": {"kind": "keda"}},
        "node": {"kind": "LeaderWorkerSet", "autoscaling": {"kind": "hpa"}},
        "p": {"role": "prefill", "autoscaling": {"kind": "hpa"}},
    },
    "gateway": {"kind": "gke", "className": "x", "modelArmor": {"enabled": True}},
    "namespace": {"create": True},
}
"""Values with which every template renders something."""


def merged(values: Object, more: Object) -> Object:
    """As Helm merges values."""
    found = dict(values)
    for key, value in more.items():
        old = found.get(key)
        found[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return found


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
        ({"router": {"policy": {"limit": {}}}}, "limit"),
        ({"router": {"policy": {"limits": {"held_max": "all"}}}}, "held_max"),
        ({"router": {"service": {"type": "External"}}}, "type"),
        ({"index": {"replicas": 0}}, "replicas"),
        ({"node": {"overhead": "2G"}}, "overhead"),
        ({"node": {"disk": {"size": "1T"}}}, "size"),
        ({"node": {"resources": {"memory": "1Gi"}}}, "memory"),
        ({"node": {"podLabels": {COMPONENT: "x"}}}, COMPONENT),
        ({"engines": {"a-b": {}}}, "a-b"),
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


@pytest.mark.parametrize(
    ("values", "release", "sentence"),
    [
        ({"gateway": {"kind": "istio"}}, "kvstore", "gateway.kind needs router.enabled"),
        ({}, "a" * 41, "has more than 40 characters"),
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
    (line,) = re.findall(r"--kv-transfer-config\n +(.+)\n", text)
    config = json.loads(line)
    assert config == connector(objects(CLUSTER), "vllm-engine")
    extra = config["kv_connector_extra_config"] | {"address": "http://10.0.0.7:8000"}
    assert parse_config(extra).socket == "/run/kvstore/node.sock"
    assert "/run/kvstore/ai/kvstore, type: DirectoryOrCreate" in text
    assert "kubectl label namespace ai pod-security.kubernetes.io/enforce=privileged" in text
    assert "secrets" not in text


def test_the_notes_name_what_is_missing() -> None:
    text = notes(example_values(CLUSTER))
    assert all(f"kvstore-{part}-certificates" in text for part in ("node", "index", "router"))
    assert "https://kvstore-router.ai.svc:443/v1" in text
    assert "For labs" not in text
    assert "For labs" in notes({"insecure": True, "router": {"enabled": True}})


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
        (volume["hostPath"]["path"],)
        for made in pods
        for volume in made["spec"]["volumes"]
        if "hostPath" in volume
    }
    return names | paths


@settings(max_examples=12)
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


@settings(max_examples=10)
@given(delay=st.integers(0, 3600), timeout=st.integers(0, 86_400))
def test_requests_may_end_before_a_router_is_killed(delay: int, timeout: int) -> None:
    args = {"drain-delay": delay, "drain-timeout": timeout}
    found = rendered({"router": {"enabled": True, "args": args}})
    waits_s = container(found, "router")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits_s >= max(1, delay)
    assert pod(found, "router")["terminationGracePeriodSeconds"] >= waits_s + delay + timeout + 10


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
    assert made.allow_uids >= {10001, 20002}
    assert (made.scrub, made.log_level) == (None, "debug")
    found = rendered(
        {
            "insecure": True,
            "index": {"enabled": True, "args": {"entries": 20_000_000, "plain": True}},
        }
    )
    assert index_config(flags(found, "index")).replica.entry_count_max == 20_000_000


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
    assert [(each.url, each.options) for each in names] == [
        ("http://other:8000", {}),
        ("http://kvstore-a-engine.kvstore:8001", {"role": "both"}),
        ("http://kvstore-p-engine.kvstore:8000", {"role": "prefill"}),
    ]
    (service,) = of_kind(found, "Service", "a-engine")
    assert service["spec"]["clusterIP"] == "None", "or its name has one address"
    assert [port["port"] for port in service["spec"]["ports"]] == [8001]
    cluster = flags(objects(CLUSTER), "router")
    assert not [flag for flag in cluster if flag.startswith("--worker-dns")]


def test_plain_engines_are_an_option() -> None:
    cluster: Object = {"router": {"enabled": True}}
    assert "--insecure" in container(rendered(cluster), "router")["args"]
    found = rendered({"router": {"enabled": True, "plainEngines": False}})
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
            rendered({"router": {"enabled": True, "policy": {"limits": {"held_max": held}}}}),
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


def test_the_node_takes_its_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rendered({"node": {"disk": {"size": "1TiB"}}})
    file = node_config(flags(found, "node"), monkeypatch).file
    assert file is not None
    assert file.capacity_bytes == TIB
    mounts = {m["mountPath"]: m["name"] for m in container(found, "node")["volumeMounts"]}
    volumes = {each["name"]: each for each in pod(found, "node")["volumes"]}
    disk = volumes[mounts[str(file.directory)]]
    assert disk["hostPath"]["type"] == "Directory", "of a disk that is not mounted nothing is made"
    owners = [each["command"][-1] for each in pod(found, "node")["initContainers"]]
    assert [command.split()[-1] for command in owners] == [str(file.directory), "/run/kvstore"]


def test_a_disk_may_be_a_local_volume() -> None:
    disk = {"size": "1TiB", "storageClassName": "local-nvme"}
    (volume,) = (
        each
        for each in pod(rendered({"node": {"disk": disk}}), "node")["volumes"]
        if each["name"] == "blocks"
    )
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == "local-nvme"
    assert parse_size(claim["resources"]["requests"]["storage"] + "B") == TIB


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


# ── networks ─────────────────────────────────────────────────────────────────────────────────────


def admits(found: list[Object], part: str, port: int, *, of: str) -> bool:
    """Whether policies let pods of a part connect to a port of another; an empty `of` is a pod of
    another namespace."""
    labels: dict[str, dict[str, str]] = {
        component(each): made["metadata"]["labels"]
        for each in workloads(found)
        if (made := template(each))
    }
    rules: list[Any] = []
    policies = [
        each
        for each in of_kind(found, "NetworkPolicy")
        if each["spec"]["podSelector"]["matchLabels"].items() <= labels[part].items()
    ]
    for policy in policies:
        rules += policy["spec"]["ingress"]
    for rule in rules:
        if "ports" in rule and port not in [each["port"] for each in rule["ports"]]:
            continue
        peers = [each.get("podSelector", {}).get("matchLabels") for each in rule.get("from", [])]
        if not peers or any(one and one.items() <= labels.get(of, {}).items() for one in peers):
            return True
    return not policies


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "one-node"])
def test_policies_admit_what_the_parts_do_and_no_more(name: str) -> None:
    found = objects(name)
    (engine,) = {component(each) for each in workloads(found)} & {
        "vllm-engine",
        "wide-engine",
        "decode-engine",
    }
    known = {("node", 9464), ("index", 9471), ("router", 9472)}
    for part, port in known:
        assert admits(found, part, port, of=""), "Prometheus"
    for source, part, port in (
        *(("node", "index", 9470), ("router", "index", 9470), ("node", "node", 9480)),
        *(("index", "node", 9480), ("router", "node", 9480), ("node", "node", 9481)),
        *(("router", "router", 9473), ("router", engine, 8000)),
    ):
        assert admits(found, part, port, of=source), f"{source} to {part}"
    for source, part, port in (
        *(("", "index", 9470), ("", "node", 9480), ("", "node", 9481), ("", "router", 9473)),
        *((engine, "index", 9470), (engine, "node", 9480), ("router", "node", 9481)),
    ):
        assert not admits(found, part, port, of=source), f"{source} to {part}"
    assert admits(found, engine, 8000, of="") == (name == "istio"), "whose gateway has no name"


def test_ports_of_block_transfer_follow_the_transport() -> None:
    def open_ports(transport: str) -> set[int]:
        cluster = {"index": {"enabled": True}, "node": {"args": {"transport": transport}}}
        found = rendered(cluster)
        return {port for port in (9481, 9500, 40_000) if admits(found, "node", port, of="node")}

    assert open_ports("tcp,port=9500") == {9500}
    assert open_ports("tcp") == open_ports("nixl") == {9481, 9500, 40_000}


def test_clients_may_be_named() -> None:
    mine = {"podSelector": {"matchLabels": {"app": "tools"}}}
    values = merged(ALL, {"networkPolicy": {"clients": [mine], "routerClients": [mine]}})
    found = rendered(values)
    for part, port in (("index", 9470), ("node", 9480), ("router", 8443), ("a-engine", 8000)):
        rules = of_kind(found, "NetworkPolicy", part)[0]["spec"]["ingress"]
        (rule,) = (r for r in rules if port in [each["port"] for each in r.get("ports", [])])
        assert mine in rule["from"]


def test_the_gateway_asks_the_picker_of_the_router() -> None:
    for name in ("istio", "gke-inference-gateway"):
        found = objects(name)
        (pool,), (route,) = of_kind(found, "InferencePool"), of_kind(found, "HTTPRoute")
        reference = pool["spec"]["endpointPickerRef"]
        (service,) = of_kind(found, "Service", "router-picker")
        assert reference["name"] == service["metadata"]["name"]
        (port,) = service["spec"]["ports"]
        assert reference["port"]["number"] == port["port"]
        labels = template(workload(found, "vllm-engine"))
        assert labels is not None
        assert (
            pool["spec"]["selector"]["matchLabels"].items() <= labels["metadata"]["labels"].items()
        )
        for part in ("node", "index", "router"):
            made = template(workload(found, part))
            assert made is not None
            assert (
                not pool["spec"]["selector"]["matchLabels"].items()
                <= made["metadata"]["labels"].items()
            )
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        assert backend["name"] == pool["metadata"]["name"]
        (gateway,) = of_kind(found, "Gateway")
        assert {each["protocol"] for each in gateway["spec"]["listeners"]} == {"HTTPS"}


def test_the_filter_sees_prompts_before_the_picker() -> None:
    """A traffic extension of the Gateway acts before the backend's picker is asked."""
    found = objects("gke-inference-gateway")
    (extension,), (gateway,) = of_kind(found, "GCPTrafficExtension"), of_kind(found, "Gateway")
    (target,) = extension["spec"]["targetRefs"]
    assert (target["kind"], target["name"]) == ("Gateway", gateway["metadata"]["name"])
    (armor,) = extension["spec"]["extensionChains"][0]["extensions"]
    assert armor["failOpen"] is False
    assert {"RequestBody", "ResponseBody"} <= {*armor["supportedEvents"]}
    (told,) = json.loads(armor["metadata"]["model_armor_settings"])
    assert {"user_prompt_template_id", "model_response_template_id"} <= told.keys()


def test_istio_shows_a_certificate_to_the_picker() -> None:
    found = objects("istio")
    (rule,), (certificate,) = of_kind(found, "DestinationRule"), of_kind(found, "Certificate")
    tls = rule["spec"]["trafficPolicy"]["tls"]
    assert tls["mode"] == "MUTUAL"
    assert tls["credentialName"] == certificate["spec"]["secretName"]
    assert rule["spec"]["host"] == "kvstore-router-picker.kvstore.svc.cluster.local"
    (name,) = certificate["spec"]["dnsNames"]
    assert name.endswith(".client.kvstore")
    assert "--picker-listen=10.0.0.7:9002" in flags(found, "router")
    labs = rendered(merged(example_values("istio"), {"insecure": True}))
    (rule,) = of_kind(labs, "DestinationRule")
    assert rule["spec"]["trafficPolicy"]["tls"] == {"mode": "DISABLE"}


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    cli.main(["certs", str(tmp_path / "pki"), "--client", "router"], standalone_mode=False)
    return tmp_path / "pki"


def test_envoy_takes_the_configuration_of_the_terminator(pki: Path, tmp_path: Path) -> None:
    program = envoy.binary()
    if program is None:
        pytest.skip("there is no Envoy")
    found = objects("gke-inference-gateway")
    (made,) = of_kind(found, "ConfigMap", "router-terminator")
    text = made["data"]["envoy.yaml"].replace("/etc/kvstore/pki/tls", f"{pki}/client-router")
    (tmp_path / "envoy.yaml").write_text(text.replace("/etc/kvstore/pki", str(pki)))
    command = [str(program), "-c", str(tmp_path / "envoy.yaml"), "--mode", "validate"]
    ran = subprocess.run([*command, "-l", "error"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "--picker-listen=127.0.0.1:9474" in flags(found, "router")
    (sidecar,) = pod(found, "router")["initContainers"]
    assert sidecar["restartPolicy"] == "Always", "it ends after the router has drained"


# ── monitoring and autoscaling ───────────────────────────────────────────────────────────────────


def test_prometheus_finds_each_part_once() -> None:
    found = rendered(ALL)
    monitors = of_kind(found, "ServiceMonitor")
    assert {component(each) for each in monitors} == {"node", "index", "router"}
    for each in monitors:
        wanted = each["spec"]["selector"]["matchLabels"]
        (endpoint,) = each["spec"]["endpoints"]
        services = [
            service
            for service in of_kind(found, "Service")
            if wanted.items() <= service["metadata"]["labels"].items()
            and endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        ]
        assert len(services) == 1
    for part in ("node", "index", "router"):
        made = template(workload(found, part))
        assert made is not None
        assert "annotations" not in made["metadata"], "which would scrape it twice"


def test_scalers_name_metrics_of_the_router_and_engines_that_exist() -> None:
    found = [*rendered(ALL), *objects("prefill-decode"), *objects("spot")]
    scalers = [*of_kind(found, "ScaledObject"), *of_kind(found, "HorizontalPodAutoscaler")]
    there = {
        (each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in workloads(found)
    }
    named: set[str] = set()
    for each in scalers:
        target = each["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"], target["name"]) in there
        for trigger in each["spec"].get("triggers", []):
            query = trigger["metadata"]["query"]
            (name,) = re.findall(r"kvstore_\w+", query)
            labels = {*re.findall(r"(\w+)=", query)} - {"namespace", "service"}
            assert labels <= {*BY_NAME[name].labels}
            named.add(name)
        for metric in each["spec"].get("metrics", []):
            external = metric["external"]["metric"]
            labels = external["selector"]["matchLabels"].keys() - {"namespace", "service"}
            assert labels <= {*BY_NAME[external["name"]].labels}
            named.add(external["name"])
    kinds = ("saturation", "desired_replicas", "held")
    assert named == {f"kvstore_router_{kind}" for kind in kinds}
    assert len(scalers) == 6


def test_replicas_are_those_of_a_scaler_where_there_is_one() -> None:
    found = rendered(merged(ALL, {"router": {"autoscaling": {"enabled": True}}}))
    scaled = {
        each["spec"]["scaleTargetRef"]["name"]
        for each in found
        if "scaleTargetRef" in each.get("spec", {})
    }
    assert scaled == {"kvstore-router", *(f"kvstore-{name}-engine" for name in ALL["engines"])}
    assert all(
        "replicas" not in each["spec"]
        for each in workloads(found)
        if each["metadata"]["name"] in scaled
    )
    (spot,) = of_kind(objects("spot"), "ScaledObject")
    assert spot["spec"]["minReplicaCount"] == 0
