"""gRPC servers of the router: decisions (`route_service`), and the endpoint picker for Envoy.

Both on the router's loop, bounded as the index's server is, with mutual TLS, or on loopback and
with --insecure without. The picker is registered under Envoy's own name; its health answers to
`liveness`, `readiness` and that name: all but the first serve while a worker takes requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvstore.client.tls import Tls
from kvstore.config.values import joined
from kvstore.net.server import connection_limits, listen
from kvstore.proto import picker_pb2, router_pb2
from kvstore.proto.router_pb2_grpc import add_RouterServicer_to_server
from kvstore.router.picker import SERVICE, Picker
from kvstore.router.route_service import RouteService

STREAMS_MAX: Final = 8192
STREAMS_PER_CONNECTION_MAX: Final = 1024
MESSAGE_BYTES_MAX: Final = 4 << 20
DRAIN_S: Final = 1.0
ALIVE: Final = "liveness"
HEALTH_NAMES: Final = ("", "readiness")
_HEALTH: Final = health_pb2.HealthCheckResponse
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
    ("grpc.max_metadata_size", 16 << 10),
    # Other routers ping twice as rarely; more often than this gRPC hangs up on them.
    ("grpc.http2.min_ping_interval_without_data_ms", 900),
)


class RpcServer:
    """One listening server."""

    def __init__(
        self,
        server: grpc.aio.Server,
        port: int,
        state: health.aio.HealthServicer,
        names: Sequence[str],
    ) -> None:
        self.port = port
        self._server, self._health, self._names = server, state, names
        self._is_ready = False

    async def show(self, *, is_ready: bool) -> None:
        """Report as serving or not, by every name but `liveness`."""
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            status = _HEALTH.SERVING if is_ready else _HEALTH.NOT_SERVING
            for name in self._names:
                await self._health.set(name, status)

    async def close(self) -> None:
        """Report as not serving, let streams end for a moment, and stop."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(DRAIN_S)


async def serve_route(place: tuple[str, int], tls: Tls | None, service: RouteService) -> RpcServer:
    """Start the server for Route. Raises ConfigError if it cannot listen."""
    server = _server()
    add_RouterServicer_to_server(service, server)
    server.add_generic_rpc_handlers((service.loads_handler(),))
    name = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
    return await _begun(server, "--route-listen", place, tls, (*HEALTH_NAMES, name))


async def serve_picker(place: tuple[str, int], tls: Tls | None, picker: Picker) -> RpcServer:
    """Start the server for the endpoint picker. Raises ConfigError if it cannot listen."""
    server = _server()
    handler = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=picker_pb2.ProcessingRequest.FromString,
        response_serializer=picker_pb2.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
    )
    return await _begun(server, "--picker-listen", place, tls, (*HEALTH_NAMES, SERVICE))


def _server() -> grpc.aio.Server:
    options: list[tuple[str, Any]] = [*_OPTIONS, *connection_limits()]
    return grpc.aio.server(options=options, maximum_concurrent_rpcs=STREAMS_MAX)


async def _begun(
    server: grpc.aio.Server,
    option: str,
    place: tuple[str, int],
    tls: Tls | None,
    names: Sequence[str],
) -> RpcServer:
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    await state.set(ALIVE, _HEALTH.SERVING)
    for name in names:
        await state.set(name, _HEALTH.NOT_SERVING)
    port = listen(server, joined(*place), tls, option)
    await server.start()
    return RpcServer(server, port, state, names)
