"""The Envoy beside a router, for gateways that show no certificate: it takes their TLS, and the
picker behind it sees the certificate of the router."""

from __future__ import annotations

import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvstore.cli.main import cli
from kvstore.client.certificates import load
from kvstore.client.tls import TlsFiles
from kvstore.net.server import server_credentials
from kvstore.testing.process import popen_tied, reap
from tests.kit import envoy
from tests.unit.deploy.manifests import flags, objects, of_kind, pod

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
