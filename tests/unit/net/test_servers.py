"""gRPC servers of all components: a port for one alone, and an end that is said first."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.errors import ConfigError
from kvstore.net.server import HealthyServer, make_server
from tests.kit.coroutines import on_loop

HEALTH = health_pb2.HealthCheckResponse


def server() -> HealthyServer:
    return HealthyServer(make_server(message_bytes_max=1024, calls_max=8), "its name")


@on_loop
async def test_a_port_belongs_to_one_server() -> None:
    first = await server().begun("--a-listen", ("127.0.0.1", 0), None)
    with pytest.raises(ConfigError, match="--b-listen"):
        await server().begun("--b-listen", ("127.0.0.1", first.port), None)
    await first.close()


@on_loop
async def test_a_server_that_ends_says_so_first() -> None:
    its = await server().begun("--a-listen", ("127.0.0.1", 0), None, is_ready=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{its.port}") as channel:
        request = health_pb2.HealthCheckRequest(service="its name")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await watch.read()).status == HEALTH.SERVING
        closing = asyncio.create_task(its.close())
        assert (await watch.read()).status == HEALTH.NOT_SERVING
        watch.cancel()
        await closing
