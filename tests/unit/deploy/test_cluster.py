"""Examples of a cluster: node, index and router take their flags, with the certificates that the
page has made, and know each other by the names that Kubernetes gives."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from cryptography import x509

from kvstore.cli.main import cli
from kvstore.config.cluster import ClusterConfig, IndexConfig
from kvstore.config.node import NodeConfig
from kvstore.config.router import RouterConfig
from kvstore.net.server import WARNING_DAYS
from kvstore.units import GIB, parse_size
from tests.docs.commands import index_config, node_config, router_config
from tests.unit.deploy.manifests import (
    CLUSTER,
    CLUSTERS,
    COMPONENTS,
    DEPLOY,
    ONE_NODE,
    POD_IP,
    Object,
    container,
    flags,
    objects,
    of_kind,
    parsed,
    pod,
    template,
    validate,
    workload,
)

ENTRY_BYTES_MAX = 92
"""ADR 10."""
MOUNT = "/etc/kvstore/pki"
NODES = ("gpu-1", "gpu-2")
OWN_NAMES = {"node": "node-gpu-1", "index": "index-kvstore-index-0", "router": "client-router"}
"""Part → certificate of one of its pods."""


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory that each secret is made from, by the commands of deploy/README.md."""
    blocks = re.findall(r"```bash\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    (block,) = (each for each in blocks if "kvstore certs" in each)
    place, made = tmp_path_factory.mktemp("pki"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for line in block.splitlines():
            match shlex.split(line):
                case ["kvstore", *arguments]:
                    cli.main(arguments, prog_name="kvstore", standalone_mode=False)
                case ["kubectl", "create", "secret", "generic", name, "--namespace", _, source]:
                    made[name] = place / source.removeprefix("--from-file=")
                case ["helm", "install", "kvstore", "deploy/chart", *_, "-f", values]:
                    assert Path(values).stem == CLUSTER
                case _:
                    subprocess.run(["bash", "-ec", line], check=True, cwd=place)
    return made


def given(found: list[Object], part: str, secrets: dict[str, Path], **variables: str) -> list[str]:
    """Flags as they are in a pod, with certificates of its secret, or those that cert-manager would
    issue in their place."""
    mounts = {each["name"]: each["mountPath"] for each in container(found, part)["volumeMounts"]}
    (volume,) = (each for each in pod(found, part)["volumes"] if each["name"] == "certificates")
    assert mounts["certificates"] == MOUNT
    if "secret" in volume:
        place = secrets[volume["secret"]["secretName"]]
        return [flag.replace(MOUNT, str(place)) for flag in flags(found, part, **variables)]
    place = secrets[f"kvstore-{part}-certificates"]
    stem = f"{place}/{OWN_NAMES[part]}"
    of_pod = [flag.replace(f"{MOUNT}/tls", stem) for flag in flags(found, part, **variables)]
    return [flag.replace(MOUNT, str(place)) for flag in of_pod]


def node(
    found: list[Object], secrets: dict[str, Path], patch: pytest.MonkeyPatch, name: str = "gpu-1"
) -> tuple[NodeConfig, ClusterConfig]:
    made = node_config(given(found, "node", secrets, NODE_NAME=name), patch)
    assert made.cluster is not None
    return made, made.cluster


def index(found: list[Object], number: int, secrets: dict[str, Path]) -> IndexConfig:
    pod_name = f"{workload(found, 'index')['metadata']['name']}-{number}"
    return index_config(given(found, "index", secrets, POD_NAME=pod_name))


def router(
    found: list[Object], secrets: dict[str, Path], patch: pytest.MonkeyPatch, at: Path
) -> RouterConfig:
    """With its policy file."""
    for each in of_kind(found, "ConfigMap", "router-policy"):
        (at / "policy.yaml").write_text(each["data"]["policy.yaml"])
    args = given(found, "router", secrets)
    return router_config([flag.replace("/etc/kvstore/policy", str(at)) for flag in args])


@pytest.mark.parametrize("name", NODES)
def test_each_node_takes_its_flags_and_its_certificate(
    name: str, secrets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = objects(CLUSTER)
    made, cluster = node(found, secrets, monkeypatch, name)
    assert cluster.node == name
    assert cluster.tls is not None
    assert cluster.transport is not None
    ports = {each["name"]: each["containerPort"] for each in container(found, "node")["ports"]}
    assert made.peer_listen == (POD_IP, ports["peers"])
    assert (cluster.transport.name, cluster.transport.port) == ("tcp", ports["transfer"])


def test_each_replica_takes_its_flags_and_its_certificate(secrets: dict[str, Path]) -> None:
    found = objects(CLUSTER)
    for number in range(workload(found, "index")["spec"]["replicas"]):
        made = index(found, number, secrets)
        assert made.tls is not None
        assert made.tls.name_as("index") == f"kvstore-index-{number}"
        ports = {each["name"]: each["containerPort"] for each in container(found, "index")["ports"]}
        assert made.listen == (POD_IP, ports["index"])
        assert made.metrics is not None
        assert (made.metrics.host, made.metrics.port) == (POD_IP, ports["metrics"])


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_part_of_every_cluster_takes_its_flags_with_tls(
    name: str, secrets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = objects(name)
    if "--transport=nixl" in container(found, "node")["args"]:
        pytest.importorskip("nixl_cu13")
    made, cluster = node(found, secrets, monkeypatch)
    assert cluster.tls is not None
    assert index(found, 0, secrets).tls is not None
    front = router(found, secrets, monkeypatch, tmp_path)
    assert front.tls is not None
    assert front.front is not None, "clients see TLS"
    assert front.index == made.index
    for part in ("node", "index"):
        assert "--insecure" not in container(found, part)["args"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_nodes_name_every_replica_and_no_address_of_all(
    name: str, secrets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = objects(name)
    (service,) = of_kind(found, "Service", "index")
    replicas = workload(found, "index")
    assert service["spec"]["clusterIP"] == "None", "headless, or its pods have no names"
    assert replicas["spec"]["serviceName"] == service["metadata"]["name"]
    port = index(found, 0, secrets).listen.port
    assert port in [each["port"] for each in service["spec"]["ports"]]
    its, behind = replicas["metadata"]["name"], service["metadata"]
    named = [flag for flag in flags(found, "node") if flag.startswith("--index=")]
    assert named == [
        f"--index={its}-{number}.{behind['name']}.{behind['namespace']}:{port}"
        for number in range(replicas["spec"]["replicas"])
    ]


def test_routers_take_their_flags_and_find_each_other_and_the_index(
    secrets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = objects(CLUSTER)
    made = router(found, secrets, monkeypatch, tmp_path)
    assert made.tls is not None
    assert made.tls.name_as("client") == "router"
    ports = {each["name"]: each["containerPort"] for each in container(found, "router")["ports"]}
    listens = {"https": made.listen, "route": made.route_listen, "metrics": made.metrics}
    assert listens == {name: (POD_IP, ports[name]) for name in listens}
    (front,) = of_kind(found, "Service", "router")
    (peers,) = of_kind(found, "Service", "router-peers")
    assert front["spec"]["ports"][0]["targetPort"] == ports["https"]
    assert peers["spec"]["clusterIP"] == "None", "headless, or its name has one address"
    where = f"{peers['metadata']['name']}.{peers['metadata']['namespace']}"
    assert made.peer_router == (f"{where}:{ports['route']}",)
    certificate = x509.load_pem_x509_certificate(made.tls.cert)
    hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    names = hosts.get_values_for_type(x509.DNSName)
    assert {front["metadata"]["name"], f"{front['metadata']['name']}.kvstore.svc"} <= {*names}


def test_requests_may_end_before_a_router_is_killed(
    secrets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = objects(CLUSTER)
    made, its = router(found, secrets, monkeypatch, tmp_path), container(found, "router")
    waits_s = its["lifecycle"]["preStop"]["sleep"]["seconds"]
    probe = its["readinessProbe"]
    assert probe["httpGet"] == {"path": "/healthz", "port": "metrics"}, "503 from SIGTERM on"
    assert made.drain_delay > probe["periodSeconds"] + probe["timeoutSeconds"], "it is seen"
    assert waits_s >= made.drain_delay
    drains_s = waits_s + made.drain_delay + made.drain_timeout
    assert pod(found, "router")["terminationGracePeriodSeconds"] >= drains_s + 10, "and it closes"


def test_the_key_of_the_ca_goes_nowhere(secrets: dict[str, Path]) -> None:
    secret_names = [f"kvstore-{part}-certificates" for part in ("index", "node", "router")]
    assert sorted(secrets) == secret_names
    for place in secrets.values():
        names = {file.name for file in place.iterdir()}
        assert "ca.crt" in names
        assert "ca.key" not in names
    files = secrets["kvstore-node-certificates"].iterdir()
    assert {file.stem for file in files} == {"ca", *(f"node-{name}" for name in NODES)}


@pytest.mark.parametrize("name", CLUSTERS)
def test_who_runs_can_read_the_certificates(name: str) -> None:
    for part in COMPONENTS:
        its = pod(objects(name), part)
        (volume,) = (each for each in its["volumes"] if each["name"] == "certificates")
        context = its["securityContext"]
        assert context["fsGroup"] == context["runAsGroup"]
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440
        else:
            told = volume["csi"]["volumeAttributes"]
            assert told["csi.cert-manager.io/fs-group"] == str(context["fsGroup"])


def test_each_pod_gets_its_own_certificate_from_cert_manager() -> None:
    found = objects("fast-hardware")
    wanted = {
        "node": "${POD_NAME}.node.kvstore",
        "index": "${POD_NAME}.index.kvstore,index.kvstore",
        "router": "router.client.kvstore,kvstore-router,kvstore-router.kvstore,"
        "kvstore-router.kvstore.svc",
    }
    for part, names in wanted.items():
        (volume,) = (v for v in pod(found, part)["volumes"] if v["name"] == "certificates")
        assert volume.keys() == {"name", "csi"}, "and no secret"
        told = volume["csi"]["volumeAttributes"]
        assert told["csi.cert-manager.io/dns-names"] == names
        its = dict(flag.partition("=")[::2] for flag in flags(found, part))
        assert [its[f"--{file}"] for file in ("ca", "cert", "key")] == [
            f"{MOUNT}/{file}" for file in ("ca.crt", "tls.crt", "tls.key")
        ]


def test_the_page_has_the_issuer_of_the_chart() -> None:
    (block,) = re.findall(
        r"```yaml\n(apiVersion.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL
    )
    issuer, certificate = parsed(block)
    told = pod(objects("fast-hardware"), "router")["volumes"][0]["csi"]["volumeAttributes"]
    assert issuer["kind"] == told["csi.cert-manager.io/issuer-kind"]
    assert issuer["metadata"]["name"] == told["csi.cert-manager.io/issuer-name"]
    assert certificate["spec"]["issuerRef"] == {"name": "kvstore-ca", "kind": issuer["kind"]}
    assert certificate["spec"]["dnsNames"] == ["tools.client.kvstore"]
    validate(certificate, "1.37")


def test_certificates_of_cert_manager_last_longer_than_the_warning() -> None:
    """They are read at start, so a process has to be restarted once in their time."""
    for part in COMPONENTS:
        volumes = {each["name"]: each for each in pod(objects("fast-hardware"), part)["volumes"]}
        told = volumes["certificates"]["csi"]["volumeAttributes"]
        hours = int(told["csi.cert-manager.io/duration"].removesuffix("h"))
        assert hours / 24 / 3 > WARNING_DAYS, "what is left of them when they are renewed"


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_probes_of_the_index_reach_its_health_page(name: str) -> None:
    found = objects(name)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        made = container(found, "index")[probe]
        assert made["httpGet"] == {"path": "/healthz", "port": "metrics"}


@pytest.mark.parametrize("name", [CLUSTER, "fast-hardware"])
def test_the_index_has_room_for_its_entries(name: str, secrets: dict[str, Path]) -> None:
    found = objects(name)
    limit = parse_size(container(found, "index")["resources"]["limits"]["memory"] + "B")
    assert index(found, 0, secrets).entries * ENTRY_BYTES_MAX + GIB <= limit


def test_a_node_of_a_cluster_is_a_lone_node_but_for_that() -> None:
    there, alone = (workload(objects(name), "node") for name in (CLUSTER, ONE_NODE))
    made = template(there)
    assert made is not None
    its = made["spec"]
    (main,) = its["containers"]
    about = ("--index=", "--peer-listen=", "--transport=", "--ca=", "--cert=", "--key=")
    main["args"] = [flag for flag in main["args"] if not flag.startswith(about)]
    for rows, name in (
        (main["ports"], "peers"),
        (main["ports"], "transfer"),
        (main["volumeMounts"], "certificates"),
        (its["volumes"], "certificates"),
    ):
        (row,) = (each for each in rows if each["name"] == name)
        rows.remove(row)
    assert there == alone
