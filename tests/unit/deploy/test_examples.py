"""The manifests: valid for Kubernetes, and every flag and key in them is one that we have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from kvstore.connector.config import parse_config
from kvstore.router.keys.rendering import UNRENDERED
from kvstore.supervisor import restarts, supervisor
from kvstore.units import GIB, NS_PER_S, parse_size
from tests.docs.commands import node_config, parse
from tests.unit.deploy.manifests import (
    CLUSTER_NODE,
    DEPLOY,
    ENGINE,
    EXAMPLES,
    NODE,
    POD_IP,
    WORKLOADS,
    applied_together,
    container,
    documents,
    flags,
    pod,
    workload,
)

KUBERNETES_VERSIONS = ("1.31", "1.34", "1.37")
OVERHEAD_BYTES = 2 * GIB


def _kv_transfer_config() -> dict[str, Any]:
    args = container(ENGINE)["args"]
    config = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_it_is_valid_for_kubernetes(name: str, version: str) -> None:
    for document in documents(name):
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_every_example_is_looked_at_and_applied() -> None:
    """`kubectl apply -f` of the folder above applies nothing: it does not look into folders."""
    assert {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.*")} == set(WORKLOADS)
    applied = {folder for folders in applied_together() for folder in folders}
    assert applied == {f"deploy/examples/{Path(name).parent}" for name in WORKLOADS}
    assert not [path for path in EXAMPLES.iterdir() if path.is_file()]


@pytest.mark.parametrize("folders", applied_together(), ids=" ".join)
def test_what_is_applied_together_has_each_object_once(folders: list[str]) -> None:
    objects = [
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for folder in folders
        for path in (DEPLOY.parent / folder).iterdir()
        for each in documents(str(path.relative_to(EXAMPLES)))
    ]
    assert len(objects) >= len(folders)
    assert sorted(map(str, objects)) == sorted(map(str, set(objects)))


def test_an_unknown_field_is_seen() -> None:
    (broken,) = documents(NODE)
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES_VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", WORKLOADS)
def test_selector_and_labels_agree(name: str) -> None:
    spec = workload(name)["spec"]
    wanted = spec["selector"]["matchLabels"]
    assert wanted.items() <= spec["template"]["metadata"]["labels"].items()


def test_the_engine_uses_exactly_the_public_names() -> None:
    config = _kv_transfer_config()
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert extra["address"] == "http://$(POD_IP):8000", "as Kubernetes puts it in"
    extra["address"] = "http://10.0.0.7:8000"
    assert parse_config(extra).socket == extra["socket"]
    assert "--prefix-caching-hash-algo=sha256_cbor" in container(ENGINE)["args"]


def test_the_engine_makes_tokens_for_routers() -> None:
    """The flag that a router's `/healthz` names where it is missing."""
    flag = UNRENDERED.split()[-1]
    assert flag == "--enable-scale-out"
    assert flag in container(ENGINE)["args"]


@pytest.mark.parametrize("node", [NODE, CLUSTER_NODE])
def test_node_and_engine_meet_in_one_directory(node: str) -> None:
    socket = _kv_transfer_config()["kv_connector_extra_config"]["socket"]
    assert f"--socket={socket}" in container(node)["args"]
    hosts = set()
    for name in (node, ENGINE):
        mounts = {m["name"]: m["mountPath"] for m in container(name)["volumeMounts"]}
        volumes = {v["name"]: v for v in pod(name)["volumes"]}
        (volume,) = (n for n, path in mounts.items() if path == str(Path(socket).parent))
        hosts.add(volumes[volume]["hostPath"]["path"])
    assert len(hosts) == 1


def test_node_and_engine_are_the_user_who_may_attach() -> None:
    uids = {pod(name)["securityContext"]["runAsUser"] for name in (NODE, ENGINE)}
    (uid,) = uids
    assert uid != 0
    assert f"--allow-uid={uid}" in container(NODE)["args"]


def test_the_node_takes_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    config = node_config(flags(NODE), monkeypatch)
    assert config.allow_uids >= {pod(NODE)["securityContext"]["runAsUser"]}
    limits = container(NODE)["resources"]["limits"]
    assert config.dram_bytes + OVERHEAD_BYTES == parse_size(limits["memory"] + "B")
    assert container(NODE)["resources"]["requests"]["memory"] == limits["memory"]


def test_the_probes_reach_the_health_page(monkeypatch: pytest.MonkeyPatch) -> None:
    http = node_config(flags(NODE), monkeypatch).http
    assert http is not None
    assert http.host == POD_IP
    node = container(NODE)
    ports = {port["name"]: port["containerPort"] for port in node["ports"]}
    assert ports["metrics"] == http.port
    for probe in ("startupProbe", "readinessProbe"):
        assert node[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    annotations = workload(NODE)["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(http.port)


@pytest.mark.parametrize("name", [NODE, CLUSTER_NODE])
def test_no_probe_ends_a_node_that_its_supervisor_still_helps(name: str) -> None:
    node = container(name)
    liveness, startup = node["livenessProbe"], node["startupProbe"]
    program, *command = liveness["exec"]["command"]
    assert program == "kvstore"
    topic, flags = parse(command)
    assert (topic, flags["topic"]) == ("inspect", "nodes")
    (socket,) = (flag for flag in node["args"] if flag.startswith("--socket="))
    assert str(flags["socket"]) == socket.partition("=")[2]
    # It is seen to stand still, is ended, and as many as may die early begin, each at its latest.
    helps_ns = supervisor.STILL_LOOKS_MAX * supervisor.LOOK_NS + supervisor.STOP_LIMIT_NS
    helps_ns += restarts.WARM_ATTEMPTS_MAX * supervisor.START_LIMIT_NS + sum(restarts.PAUSES_NS)
    assert liveness["periodSeconds"] * liveness["failureThreshold"] * NS_PER_S > helps_ns
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600


@pytest.mark.parametrize("name", [NODE, CLUSTER_NODE])
def test_no_node_is_throttled(name: str) -> None:
    assert "cpu" not in container(name)["resources"]["limits"]
    assert container(name)["resources"]["requests"]["cpu"]


def test_no_container_can_gain_anything() -> None:
    for name in WORKLOADS:
        its = pod(name)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & its.keys()
        for each in [*its["containers"], *its.get("initContainers", [])]:
            context = each["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert not context.get("privileged")
