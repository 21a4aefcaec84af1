"""The manifests of a cluster: node and index take their flags, with the certificates that the page
has made, and know each other by the names that Kubernetes gives."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from kvstore.cli.main import cli
from kvstore.config.cluster import ClusterConfig, IndexConfig
from kvstore.units import GIB, parse_size
from tests.docs.commands import index_config, node_config, router_config
from tests.unit.deploy.manifests import (
    CLUSTER_INDEX,
    CLUSTER_NODE,
    DEPLOY,
    NODE,
    POD_IP,
    ROUTER,
    container,
    documents,
    flags,
    pod,
    workload,
)

ENTRY_BYTES_MAX = 92
"""ADR 10."""
CLUSTER = (CLUSTER_INDEX, CLUSTER_NODE, ROUTER)
MOUNT = "/etc/kvstore/pki"
NODES = ("gpu-1", "gpu-2")


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The directory that each secret is made from, by the commands of deploy/README.md."""
    blocks = re.findall(r"```bash\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    (block,) = (each for each in blocks if "kvstore certs" in each)
    monkeypatch.chdir(tmp_path)
    made = {}
    for line in block.splitlines():
        match shlex.split(line):
            case ["kvstore", *arguments]:
                cli.main(arguments, prog_name="kvstore", standalone_mode=False)
            case ["kubectl", "create", "secret", "generic", name, source]:
                made[name] = tmp_path / source.removeprefix("--from-file=")
            case ["kubectl", "apply", "-f", "deploy/examples/cluster", *_]:
                assert {Path(each).parent.name for each in CLUSTER} == {"cluster"}
            case _:
                subprocess.run(["bash", "-ec", line], check=True)
    return made


def given(name: str, secrets: dict[str, Path], **variables: str) -> list[str]:
    """Flags as they are in a pod, where its certificates are those of its secret."""
    mounts = {each["name"]: each["mountPath"] for each in container(name)["volumeMounts"]}
    (volume,) = (each for each in pod(name)["volumes"] if "secret" in each)
    assert mounts[volume["name"]] == MOUNT
    place = str(secrets[volume["secret"]["secretName"]])
    return [flag.replace(MOUNT, place) for flag in flags(name, **variables)]


def node(name: str, secrets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    made = node_config(given(CLUSTER_NODE, secrets, NODE_NAME=name), monkeypatch).cluster
    assert made is not None
    return made


def index(number: int, secrets: dict[str, Path]) -> IndexConfig:
    pod_name = f"{workload(CLUSTER_INDEX)['metadata']['name']}-{number}"
    return index_config(given(CLUSTER_INDEX, secrets, POD_NAME=pod_name))


@pytest.mark.parametrize("name", NODES)
def test_each_node_takes_its_flags_and_its_certificate(
    name: str, secrets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = node(name, secrets, monkeypatch)
    assert made.node == name
    assert made.tls is not None
    assert made.peers is not None
    ports = {each["name"]: each["containerPort"] for each in container(CLUSTER_NODE)["ports"]}
    assert (made.peers.host, made.peers.port) == (POD_IP, ports["peers"])
    assert (made.peers.transport.name, made.peers.transport.port) == (
        "tcp",
        ports["transfer"],
    )


def test_each_replica_takes_its_flags_and_its_certificate(secrets: dict[str, Path]) -> None:
    for number in range(workload(CLUSTER_INDEX)["spec"]["replicas"]):
        made = index(number, secrets)
        assert made.tls is not None
        assert made.tls.name_as("index") == f"kvstore-index-{number}"
        ports = {each["name"]: each["containerPort"] for each in container(CLUSTER_INDEX)["ports"]}
        assert (made.replica.host, made.replica.port) == (POD_IP, ports["index"])
        assert made.http is not None
        assert (made.http.host, made.http.port) == (POD_IP, ports["metrics"])


def test_nodes_name_every_replica_and_no_address_of_all(
    secrets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (service,) = (each for each in documents(CLUSTER_INDEX) if each["kind"] == "Service")
    replicas = workload(CLUSTER_INDEX)
    assert service["spec"]["clusterIP"] == "None", "headless, or its pods have no names"
    assert replicas["spec"]["serviceName"] == service["metadata"]["name"]
    labels = replicas["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    names = (replicas["metadata"]["name"], service["metadata"]["name"])
    port = index(0, secrets).replica.port
    assert [each["port"] for each in service["spec"]["ports"]] == [port]
    assert node("gpu-1", secrets, monkeypatch).indexes == tuple(
        f"{names[0]}-{number}.{names[1]}:{port}" for number in range(replicas["spec"]["replicas"])
    )


def test_routers_take_their_flags_and_find_each_other_and_the_index(
    secrets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = router_config(given(ROUTER, secrets))
    assert made.tls is not None
    assert made.tls.name_as("client") == "router"
    assert made.index == node("gpu-1", secrets, monkeypatch).indexes
    ports = {each["name"]: each["containerPort"] for each in container(ROUTER)["ports"]}
    listens = {"https": made.listen, "route": made.route_listen, "metrics": made.metrics}
    assert listens == {name: (POD_IP, ports[name]) for name in listens}
    front, peers = (each for each in documents(ROUTER) if each["kind"] == "Service")
    labels = workload(ROUTER)["spec"]["template"]["metadata"]["labels"]
    for service in (front, peers):
        assert service["spec"]["selector"].items() <= labels.items()
    assert front["spec"]["ports"][0]["targetPort"] == "https"
    assert peers["spec"]["clusterIP"] == "None", "headless, or its name has one address"
    assert made.peer_router == (f"{peers['metadata']['name']}:{ports['route']}",)
    certificate = x509.load_pem_x509_certificate(made.tls.cert)
    hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert front["metadata"]["name"] in hosts.get_values_for_type(x509.DNSName)


def test_requests_may_end_before_a_router_is_killed(secrets: dict[str, Path]) -> None:
    made, router = router_config(given(ROUTER, secrets)), container(ROUTER)
    waits_s = router["lifecycle"]["preStop"]["sleep"]["seconds"]
    probe = router["readinessProbe"]
    assert probe["httpGet"] == {"path": "/healthz", "port": "metrics"}, "503 from SIGTERM on"
    assert made.drain_delay > probe["periodSeconds"] + probe["timeoutSeconds"], "it is seen"
    drains_s = waits_s + made.drain_delay + made.drain_timeout
    assert waits_s > 0
    assert pod(ROUTER)["terminationGracePeriodSeconds"] >= drains_s + 10, "and it closes"


def test_the_key_of_the_ca_goes_nowhere(secrets: dict[str, Path]) -> None:
    secret_names = [f"kvstore-{part}-certificates" for part in ("index", "node", "router")]
    assert sorted(secrets) == secret_names
    for place in secrets.values():
        names = {file.name for file in place.iterdir()}
        assert "ca.crt" in names
        assert "ca.key" not in names
    files = secrets["kvstore-node-certificates"].iterdir()
    assert {file.stem for file in files} == {"ca", *(f"node-{name}" for name in NODES)}


def test_who_runs_can_read_the_certificates() -> None:
    for name in CLUSTER:
        (volume,) = (each for each in pod(name)["volumes"] if "secret" in each)
        assert volume["secret"]["defaultMode"] == 0o440
        context = pod(name)["securityContext"]
        assert context["fsGroup"] == context["runAsGroup"]


def test_the_probes_of_the_index_reach_its_health_page() -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(CLUSTER_INDEX)[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    annotations = workload(CLUSTER_INDEX)["spec"]["template"]["metadata"]["annotations"]
    ports = {each["name"]: each["containerPort"] for each in container(CLUSTER_INDEX)["ports"]}
    assert annotations["prometheus.io/port"] == str(ports["metrics"])


def test_the_index_has_room_for_its_entries(secrets: dict[str, Path]) -> None:
    limit = parse_size(container(CLUSTER_INDEX)["resources"]["limits"]["memory"] + "B")
    assert index(0, secrets).replica.entry_count_max * ENTRY_BYTES_MAX + GIB <= limit


def test_a_node_of_a_cluster_is_a_lone_node_but_for_that() -> None:
    there, alone = workload(CLUSTER_NODE), workload(NODE)
    its = there["spec"]["template"]["spec"]
    (main,) = its["containers"]
    about = ("--index=", "--peer-listen=", "--transport=", "--ca=", "--cert=", "--key=")
    main["args"] = [flag for flag in main["args"] if not flag.startswith(about)]
    for rows, name in (
        (main["env"], "NODE_NAME"),
        (main["env"], "CERTIFICATE"),
        (main["ports"], "peers"),
        (main["ports"], "transfer"),
        (main["volumeMounts"], "certificates"),
        (its["volumes"], "certificates"),
    ):
        _take(rows, name)
    del its["securityContext"]["fsGroup"]
    assert there == alone


def _take(rows: list[dict[str, Any]], name: str) -> None:
    (row,) = (each for each in rows if each["name"] == name)
    rows.remove(row)
