"""The manifests of `deploy/examples`, which the chart renders: valid for Kubernetes, and every flag
and key in them is one that we have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvstore.connector.config import parse_config
from kvstore.router.keys.rendering import UNRENDERED
from kvstore.supervisor import child, supervisor
from kvstore.units import GIB, NS_PER_S, parse_size
from scripts import chart
from tests.docs.commands import node_config, parse
from tests.unit.deploy.crds import CRDS
from tests.unit.deploy.manifests import (
    COMPONENT,
    DEPLOY,
    EXAMPLES,
    INSTANCE,
    ONE_NODE,
    POD_IP,
    Object,
    component,
    connector,
    container,
    flags,
    objects,
    of_kind,
    pod,
    template,
    validate,
    workload,
    workloads,
)

KUBERNETES_VERSIONS = ("1.34", "1.35", "1.36", "1.37")
SOCKET = "/run/kvstore/node.sock"


def _engines(found: list[Object]) -> list[str]:
    return [part for each in workloads(found) if (part := component(each)).endswith("-engine")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_what_the_chart_renders(name: str) -> None:
    """After a change of the chart run scripts/chart.py."""
    path = chart.CHART / "values" / f"{name}.yaml"
    assert (chart.EXAMPLES / path.name).read_text() == chart.example(path)


def test_every_values_file_has_its_example_and_its_row() -> None:
    assert len(EXAMPLES) == 8
    assert {path.name for path in chart.EXAMPLES.iterdir()} == {f"{name}.yaml" for name in EXAMPLES}
    page = (DEPLOY / "README.md").read_text()
    assert all(f"| `{name}.yaml` | " in page for name in EXAMPLES)


def test_the_page_names_values_that_exist() -> None:
    page = (DEPLOY / "README.md").read_text()
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    given = re.findall(r"--set ([\w.]+)=", page)
    named = re.findall(rf"`((?:{'|'.join(values)})(?:\.\w+)+)", page)
    assert len(given) == 2
    assert len(named) > 10
    for path in (*given, *named):
        found = values
        for key in path.split("."):
            assert key in found, path
            found = found[key]
    files = re.findall(r" -f (deploy/chart/values/\S+)", page)
    assert files
    assert all((DEPLOY.parent / path).exists() for path in files)


def test_they_are_valid_for_kubernetes() -> None:
    """Each object once: examples have most in common."""
    found = {json.dumps(each): each for name in EXAMPLES for each in objects(name)}
    assert len(found) > 50
    for each in found.values():
        for version in KUBERNETES_VERSIONS:
            validate(each, version)
    used = {(each["apiVersion"], each["kind"]) for each in found.values()}
    assert used >= CRDS.keys()


def test_an_unknown_field_is_seen() -> None:
    broken = workload(objects(ONE_NODE), "node")
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="livenesProbe"):
        validate(broken, KUBERNETES_VERSIONS[-1])


def test_an_unknown_field_of_a_custom_resource_is_seen() -> None:
    (broken,) = of_kind(objects("gke-inference-gateway"), "InferencePool")
    broken["spec"]["endpointPickerRef"]["portNumber"] = 9002
    with pytest.raises(jsonschema.ValidationError, match="portNumber"):
        validate(broken, KUBERNETES_VERSIONS[-1])
    (group,) = of_kind(objects("leaderworkerset"), "LeaderWorkerSet")
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["container"] = []
    with pytest.raises(jsonschema.ValidationError, match="container"):
        validate(group, KUBERNETES_VERSIONS[-1])


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_object_is_there_once(name: str) -> None:
    found = [
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for each in objects(name)
    ]
    assert sorted(found, key=str) == sorted(set(found), key=str)


@pytest.mark.parametrize("name", EXAMPLES)
def test_services_and_budgets_find_their_own_pods_and_no_others(name: str) -> None:
    found = objects(name)
    for each in (*of_kind(found, "Service"), *of_kind(found, "PodDisruptionBudget")):
        wanted = each["spec"]["selector"]
        wanted = wanted.get("matchLabels", wanted)
        assert wanted.keys() == {"app.kubernetes.io/name", INSTANCE, COMPONENT}
        assert workload(found, wanted[COMPONENT])


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_namespace_allows_the_directory_of_the_host(name: str) -> None:
    found = objects(name)
    (namespace,) = of_kind(found, "Namespace")
    assert found[0] == namespace, "kubectl applies objects in their order"
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}
    inside = {each["metadata"].get("namespace") for each in found} - {None}
    assert inside == {namespace["metadata"]["name"]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_engine_uses_exactly_the_public_names(name: str) -> None:
    found = objects(name)
    roles = {"prefill-engine": "kv_producer", "decode-engine": "kv_consumer"}
    assert _engines(found)
    for part in _engines(found):
        config = connector(found, part)
        extra = config.pop("kv_connector_extra_config")
        assert config == {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.connector",
            "kv_role": roles.get(part, "kv_both"),
            "kv_load_failure_policy": "recompute",
        }
        ports = {each["name"]: each["containerPort"] for each in container(found, part)["ports"]}
        assert extra["address"] == f"http://$(POD_IP):{ports['http']}", "as Kubernetes puts it in"
        extra["address"] = "http://10.0.0.7:8000"
        assert parse_config(extra).socket == SOCKET
        args = container(found, part)["args"]
        assert "--prefix-caching-hash-algo=sha256_cbor" in args
        assert f"--port={ports['http']}" in args


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_engine_makes_tokens_for_routers(name: str) -> None:
    """The flag that a router's `/healthz` names where it is missing."""
    flag = UNRENDERED.split()[-1]
    assert flag == "--enable-scale-out"
    for part in _engines(objects(name)):
        assert flag in container(objects(name), part)["args"]


@pytest.mark.engine
def test_the_engine_takes_its_flags() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    distinct = {
        tuple(container(objects(name), part)["args"])
        for name in EXAMPLES
        for part in _engines(objects(name))
    }
    for args in distinct:
        addressed = [text.replace("$(LWS_LEADER_ADDRESS)", POD_IP) for text in args]
        made = parser.parse_args([*addressed, "--data-parallel-start-rank=8"])
        assert (made.model_tag, made.enable_scale_out) == ("/models/model", True)
        assert made.kv_transfer_config.kv_connector == "KVStoreConnector"
        assert made.shutdown_timeout in (50, 15), "with 0 requests in flight are aborted"
    assert {"--data-parallel-hybrid-lb" in args for args in distinct} == {True, False}
    with pytest.raises(SystemExit):
        parser.parse_args(["--enable-scale-up"])


def test_ranks_of_a_group_are_numbered_through() -> None:
    found = objects("leaderworkerset")
    engine, group = container(found, "wide-engine"), workload(found, "wide-engine")
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    local = int(engine["resources"]["limits"]["nvidia.com/gpu"])
    assert f"--data-parallel-size={size * local}" in engine["args"]
    assert f"--data-parallel-size-local={local}" in engine["args"]
    assert "--data-parallel-hybrid-lb" in engine["args"], "each pod serves"
    shell, option, script, program = engine["command"]
    assert (shell, option, program) == ("/bin/sh", "-c", "vllm")
    assert script.startswith('exec vllm serve "$@" ')
    assert script.endswith(f" --data-parallel-start-rank $((LWS_WORKER_INDEX * {local}))")


@pytest.mark.parametrize("name", EXAMPLES)
def test_node_and_engine_meet_in_one_directory(name: str) -> None:
    found = objects(name)
    assert f"--socket={SOCKET}" in container(found, "node")["args"]
    hosts = set()
    for part in ("node", *_engines(found)):
        mounts = {m["mountPath"]: m["name"] for m in container(found, part)["volumeMounts"]}
        volumes = {v["name"]: v for v in pod(found, part)["volumes"]}
        hosts.add(volumes[mounts[str(Path(SOCKET).parent)]]["hostPath"]["path"])
    assert hosts == {"/run/kvstore/kvstore/kvstore"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_node_and_engine_are_the_user_who_may_attach(name: str) -> None:
    found = objects(name)
    parts = ("node", *_engines(found))
    (uid,) = {pod(found, part)["securityContext"]["runAsUser"] for part in parts}
    assert uid != 0
    assert f"--allow-uid={uid}" in container(found, "node")["args"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_volumes_that_are_mounted_are_there(name: str) -> None:
    for each in workloads(objects(name)):
        made = template(each)
        assert made is not None
        volumes = {volume["name"] for volume in made["spec"]["volumes"]}
        inits = made["spec"].get("initContainers", [])
        for one in (*made["spec"]["containers"], *inits):
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes


def test_the_node_takes_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects(ONE_NODE)
    config = node_config(flags(found, "node"), monkeypatch)
    assert config.allow_uid >= {pod(found, "node")["securityContext"]["runAsUser"]}
    resources = container(found, "node")["resources"]
    assert config.dram_bytes + 2 * GIB == parse_size(resources["limits"]["memory"] + "B")
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert config.cluster is None


def test_the_probes_reach_the_health_page(monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects(ONE_NODE)
    http = node_config(flags(found, "node"), monkeypatch).metrics
    assert http is not None
    assert http.host == POD_IP
    node = container(found, "node")
    ports = {port["name"]: port["containerPort"] for port in node["ports"]}
    assert ports["metrics"] == http.port
    for probe in ("startupProbe", "readinessProbe"):
        assert node[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    made = template(workload(found, "node"))
    assert made is not None
    assert made["metadata"]["annotations"]["prometheus.io/port"] == str(http.port)


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_probe_ends_a_node_that_its_supervisor_still_helps(name: str) -> None:
    node = container(objects(name), "node")
    liveness, startup = node["livenessProbe"], node["startupProbe"]
    program, *command = liveness["exec"]["command"]
    assert program == "kvstore"
    topic, given = parse(command)
    assert (topic, given["topic"]) == ("inspect", "nodes")
    (socket,) = (flag for flag in node["args"] if flag.startswith("--socket="))
    assert str(given["socket"]) == socket.partition("=")[2]
    # It is seen to stand still, is ended, and as many as may die early begin, each at its latest.
    helps_ns = supervisor.STILL_LOOKS_MAX * supervisor.LOOK_NS + supervisor.STOP_LIMIT_NS
    helps_ns += child.WARM_ATTEMPTS_MAX * supervisor.START_LIMIT_NS + sum(child.PAUSES_NS)
    assert liveness["periodSeconds"] * liveness["failureThreshold"] * NS_PER_S > helps_ns
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_node_is_throttled(name: str) -> None:
    resources = container(objects(name), "node")["resources"]
    assert "cpu" not in resources["limits"]
    assert resources["requests"]["cpu"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_container_can_gain_anything(name: str) -> None:
    for workload_ in workloads(objects(name)):
        made = template(workload_)
        assert made is not None
        its, shared = made["spec"], {"hostNetwork", "hostPID", "hostIPC"}
        assert shared & its.keys() == (
            {"hostIPC"} if name == "fast-hardware" and "hostIPC" in its else set()
        )
        for each in [*its["containers"], *its.get("initContainers", [])]:
            context = each["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert not context.get("privileged")
