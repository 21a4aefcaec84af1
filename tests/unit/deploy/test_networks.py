"""Connections of the chart: those that policies admit, gateways that ask the picker, Prometheus
that finds each part, and scalers that follow metrics of the router."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import helm_python
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvstore.cli.main import cli
from kvstore.client.certificates import load
from kvstore.client.tls import TlsFiles
from kvstore.net.server import server_credentials
from kvstore.obs.metrics import BY_NAME
from kvstore.router.front import paths as router_paths
from kvstore.testing.process import popen_tied, reap
from scripts import chart
from tests.kit import envoy
from tests.unit.deploy.manifests import (
    ALL,
    EXAMPLES,
    Object,
    component,
    example_values,
    flags,
    merged,
    objects,
    of_kind,
    parsed,
    pod,
    rendered,
    template,
    workload,
    workloads,
)

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


@pytest.mark.parametrize("name", ["istio", "gke-inference-gateway"])
def test_a_gateway_routes_the_paths_of_the_router_and_no_others(name: str) -> None:
    (route,) = of_kind(objects(name), "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    paths = [each["path"] for each in rule["matches"]]

    def is_routed(path: str) -> bool:
        return any(
            path == each["value"]
            or (each["type"] == "PathPrefix" and path.startswith(each["value"] + "/"))
            for each in paths
        )

    mine = [
        *router_paths.PROMPTS,
        "/health",
        "/v1/models",
        "/v1/models/llama",
        "/v1/responses/resp_1",
    ]
    mine += ["/v1/responses/resp_1/cancel", "/v1/audio/transcriptions"]
    assert [path for path in mine if not is_routed(path)] == []
    others = ["/", "/metrics", "/invocations", "/inference/v1/generate", "/v1/load_lora_adapter"]
    others += ["/sleep", "/pause", "/v1", "/v1/chat/completions/render", "/server_info", "/docs"]
    assert [path for path in others if is_routed(path)] == []
    exact = {each["value"] for each in paths if each["type"] == "Exact"}
    assert exact - {"/health"} <= router_paths.PROMPTS, "a path that the router no longer takes"


@pytest.mark.parametrize(
    ("keys", "given", "mode"),
    [("", "", "FailOpen"), ("keys", "", "FailClose"), ("", "FailClose", "FailClose")],
)
def test_no_picker_no_requests_past_api_keys(keys: str, given: str, mode: str) -> None:
    more = {"router": {"apiKeysSecret": keys}, "gateway": {"failureMode": given}}
    (pool,) = of_kind(rendered(merged(example_values("istio"), more)), "InferencePool")
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == mode


def test_googles_proxies_wait_for_long_answers() -> None:
    found = objects("gke-inference-gateway")
    (policy,), (pool,) = of_kind(found, "GCPBackendPolicy"), of_kind(found, "InferencePool")
    assert policy["spec"]["targetRef"]["kind"] == "InferencePool"
    assert policy["spec"]["targetRef"]["name"] == pool["metadata"]["name"]
    assert policy["spec"]["default"]["timeoutSec"] == 3600, "30 s without it"
    longer = rendered(merged(ALL, {"gateway": {"timeoutSeconds": 7200}}))
    (policy,) = of_kind(longer, "GCPBackendPolicy")
    assert policy["spec"]["default"]["timeoutSec"] == 7200


def test_a_gateway_of_another_namespace_is_used() -> None:
    shared = {"className": "", "namespace": "edge", "sectionName": "https"}
    for name, beside in (
        ("istio", "Certificate"),
        ("gke-inference-gateway", "GCPTrafficExtension"),
    ):
        found = rendered(merged(example_values(name), {"gateway": shared}))
        (route,) = of_kind(found, "HTTPRoute")
        (parent,) = route["spec"]["parentRefs"]
        assert (parent["namespace"], parent["sectionName"]) == ("edge", "https")
        assert route["metadata"]["namespace"] == "kvstore"
        assert not of_kind(found, "Gateway")
        (made,) = of_kind(found, beside)
        assert made["metadata"]["namespace"] == "edge", "where the gateway looks for it"


def test_the_filter_sees_prompts_before_the_picker() -> None:
    """A traffic extension of the Gateway acts before the backend's picker is asked."""
    found = objects("gke-inference-gateway")
    (extension,), (gateway,) = of_kind(found, "GCPTrafficExtension"), of_kind(found, "Gateway")
    (target,) = extension["spec"]["targetRefs"]
    assert (target["kind"], target["name"]) == ("Gateway", gateway["metadata"]["name"])
    (chain,) = extension["spec"]["extensionChains"]
    assert chain["matchCondition"] == {
        "celExpressions": [{"celMatcher": 'request.path.startsWith("/")'}]
    }, "all that is routed"
    (armor,) = chain["extensions"]
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


# ── monitoring and autoscaling ───────────────────────────────────────────────────────────────────


def test_prometheus_finds_each_part_once() -> None:
    found = rendered(ALL)
    monitors = of_kind(found, "ServiceMonitor")
    assert {component(each) for each in monitors} == {"node", "index", "router"}
    for each in of_kind(found, "PodMonitor"):
        made = template(workload(found, component(each)))
        assert made is not None
        assert each["spec"]["selector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
        (endpoint,) = each["spec"]["podMetricsEndpoints"]
        (port,) = made["spec"]["containers"][0]["ports"]
        assert endpoint["port"] == port["name"]
    engines = {f"{name}-engine" for name in ALL["engines"]}
    assert {component(each) for each in of_kind(found, "PodMonitor")} == engines
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


def test_monitors_leave_the_annotations_of_pods_as_they_are() -> None:
    """A change of them would restart every node."""
    without = merged(ALL, {"monitoring": {"serviceMonitors": {"enabled": False}}})
    never = merged(ALL, {"monitoring": {"scrapeAnnotations": False}})
    there, before, none = rendered(ALL), rendered(without), rendered(never)
    for each in workloads(there):
        assert template(each) == template(workload(before, component(each)))
        made, bare = template(each), template(workload(none, component(each)))
        assert made is not None
        assert bare is not None
        assert made["metadata"]["annotations"]["prometheus.io/scrape"] == "true"
        assert "annotations" not in bare["metadata"]


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


def test_without_a_metric_the_count_of_engines_stays() -> None:
    def nulls(name: str) -> set[str]:
        return {
            trigger["metadata"].get("ignoreNullValues", "true")
            for each in of_kind(objects(name), "ScaledObject")
            for trigger in each["spec"]["triggers"]
        }

    assert nulls("prefill-decode") == {"false"}
    assert nulls("spot") == {"true"}, "a pool of none has no saturation"


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


@pytest.mark.parametrize("live", [0, 5])
def test_an_upgrade_keeps_the_count_of_a_scaler(live: int, tmp_path: Path) -> None:
    """With a cluster, which no test has: `lookup` finds the object in it."""
    place = tmp_path / "kvstore"
    shutil.copytree(chart.CHART, place)
    helpers = place / "templates" / "_helpers.tpl"
    text, found = re.subn(
        r"lookup (?:\([^)]*\) ?)+(?:\.Release\.Namespace) \([^)]*\)",
        f'dict "spec" (dict "replicas" {live})',
        helpers.read_text(),
    )
    assert found == 1
    helpers.write_text(text)
    more = {"router": {"autoscaling": {"enabled": True}}, "engines": {"fixed": {"replicas": 3}}}
    values = merged(ALL, more)
    with helm_python.Chart.load(place) as loaded:
        made = loaded.render(values, name="kvstore", namespace="kvstore")
    counts = {
        component(each): each["spec"]["replicas"]
        for name in ("engines", "router")
        for each in workloads(parsed(made[f"kvstore/templates/{name}.yaml"]))
    }
    scaled = {"router", "a-engine", "node-engine", "p-engine"}
    assert counts == {**dict.fromkeys(scaled, live), "fixed-engine": 3}


def test_engines_may_be_scaled_to_none() -> None:
    (spot,) = of_kind(objects("spot"), "ScaledObject")
    assert spot["spec"]["minReplicaCount"] == 0


# ── the Envoy beside a router, for gateways without a certificate ─────────────────────────────────


NAME = "gke-inference-gateway"
READY_S = 20.0
PROGRAM = envoy.binary()
needs_envoy = pytest.mark.skipif(PROGRAM is None, reason="there is no Envoy")


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    cli.main(["certs", str(tmp_path / "pki"), "--client", "router"], standalone_mode=False)
    return tmp_path / "pki"


def configuration(pki: Path) -> str:
    """As the container reads it, with certificates of the test."""
    (made,) = of_kind(objects(NAME), "ConfigMap", "router-terminator")
    text: str = made["data"]["envoy.yaml"].replace("/etc/kvstore/pki/tls", f"{pki}/client-router")
    return text.replace("/etc/kvstore/pki", str(pki))


def command(path: Path, *more: str) -> list[str]:
    assert PROGRAM is not None
    return [str(PROGRAM), "-c", str(path), "--disable-hot-restart", "-l", "error", *more]


@needs_envoy
def test_envoy_takes_the_configuration(pki: Path, tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(configuration(pki))
    validate = command(path, "--mode", "validate")
    ran = subprocess.run(validate, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = objects(NAME)
    assert "--picker-listen=127.0.0.1:9474" in flags(found, "router"), "where Envoy connects to"
    (sidecar,) = pod(found, "router")["initContainers"]
    assert sidecar["restartPolicy"] == "Always", "it ends after the router has drained"


@pytest.mark.slow
@needs_envoy
def test_a_proxy_without_a_certificate_reaches_the_picker(pki: Path, tmp_path: Path) -> None:
    tls = load(
        TlsFiles(ca=pki / "ca.crt", cert=pki / "client-router.crt", key=pki / "client-router.key")
    )
    server = grpc.server(ThreadPoolExecutor(2))
    state = health.HealthServicer()
    state.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    behind = server.add_secure_port("127.0.0.1:0", server_credentials(tls))
    server.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    path = tmp_path / "envoy.yaml"
    text = configuration(pki).replace("port_value: 9474", f"port_value: {behind}")
    path.write_text(text.replace("port_value: 9002", f"port_value: {port}"))
    process = popen_tied(command(path), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert _status(port, tls.ca) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            _ask(behind, tls.ca, 1.0)  # not without Envoy
    finally:
        process.terminate()
        reap(process)
        server.stop(None).wait()


def _status(port: int, ca: bytes) -> int:
    end_s = time.monotonic() + READY_S
    while True:
        try:
            return _ask(port, ca, 2.0)
        except grpc.RpcError:
            assert time.monotonic() < end_s


def _ask(port: int, ca: bytes, timeout_s: float) -> int:
    """As Google's proxies do: TLS, and no certificate."""
    name = [("grpc.ssl_target_name_override", "router.client.kvstore")]
    credentials = grpc.ssl_channel_credentials(root_certificates=ca)
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest()
        return int(stub.Check(asked, timeout=timeout_s, wait_for_ready=True).status)
