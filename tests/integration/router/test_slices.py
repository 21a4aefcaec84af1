"""EndpointSlices, from an API server that says what a script says; and names in DNS."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from kvstore.config.router import WorkerAddress, load_router_config
from kvstore.router.engines.discovery import Discovery, KubernetesApi, Slices
from kvstore.router.engines.workers import Workers
from kvstore.testing.process import Lab
from tests.kit.coroutines import on_loop
from tests.kit.processes import transport_options

WAIT_S = 10.0
SERVICE = WorkerAddress(name="svc", url="http://ns/svc/http", kind="sglang")


Conditions = dict[str, bool | None]


def piece(
    name: str, *pods: tuple[str, bool | Conditions | None], port: int = 8000
) -> dict[str, Any]:
    """A slice; pods are (name, ready), or (name, conditions)."""
    return {
        "metadata": {"name": name},
        "ports": [{"name": "metrics", "port": 1}, {"name": "http", "port": port}],
        "endpoints": [
            {
                "addresses": [f"10.0.0.{n + 1}"],
                "conditions": conditions_of(ready),
                "targetRef": {"kind": "Pod", "name": pod},
            }
            for n, (pod, ready) in enumerate(pods)
        ],
    }


def conditions_of(given: bool | Conditions | None) -> Conditions:
    if isinstance(given, dict):
        return given
    return {} if given is None else {"ready": given, "serving": True}


class ApiServer:
    """One list, then changes as they are put."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self.changes: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()
        self.tokens: list[str] = []
        self.versions: list[str] = []
        self.status = 200

    async def get(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers["Authorization"])
        assert request.path == "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"
        assert request.query["labelSelector"] == "kubernetes.io/service-name=svc"
        if self.status != 200:
            return web.json_response({}, status=self.status)
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": self.listed})
        self.versions.append(request.query["resourceVersion"])
        out = web.StreamResponse()
        await out.prepare(request)
        while (change := await self.changes.get()) is not None:
            line = json.dumps({"type": change[0], "object": change[1]}).encode() + b"\n"
            for at in range(0, len(line), 50):  # in pieces
                await out.write(line[at : at + 50])
        return out


@asynccontextmanager
async def served(api: ApiServer, directory: Path) -> AsyncIterator[KubernetesApi]:
    lab = Lab(directory)
    options = transport_options(lab, "localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(options["certificate"], options["key"])
    app = web.Application()
    app.router.add_get("/{path:.*}", api.get)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    token = directory / "token"
    token.write_text("first\n")
    try:
        yield KubernetesApi(
            url=f"https://localhost:{runner.addresses[0][1]}", ca=Path(options["ca"]), token=token
        )
    finally:
        await runner.cleanup()


class Heard:
    """What a source says."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._changed = asyncio.Event()
        self.kinds: set[str] = set()
        self.terminating: set[str] = set()
        self.troubles: list[str] = []

    def found(self, _: str, addresses: Iterable[WorkerAddress]) -> None:
        addresses = list(addresses)
        self.names = {each.name: each.url for each in addresses}
        self.kinds = {each.kind for each in addresses}
        self.terminating = {each.name for each in addresses if each.is_terminating}
        self._changed.set()

    def failed(self, _: str, why: str) -> None:
        self.troubles.append(why)

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while set(self.names) != set(names):
                self._changed.clear()
                await self._changed.wait()


@on_loop
async def test_pods_come_and_go(tmp_path: Path) -> None:
    api, heard = ApiServer(), Heard()
    api.listed = [piece("s1", ("a", True), ("b", False), ("c", None))]
    async with served(api, tmp_path) as place:
        slices = Slices(SERVICE, place, cast("Discovery", heard))
        task = asyncio.create_task(slices.once())
        await heard.until("a", "c")
        assert heard.names["a"] == "http://10.0.0.1:8000"
        assert heard.kinds == {"sglang"}
        await api.changes.put(("ADDED", piece("s2", ("d", True), port=9000)))
        await heard.until("a", "c", "d")
        assert heard.names["d"] == "http://10.0.0.1:9000"
        await api.changes.put(("MODIFIED", piece("s1", ("a", False), ("b", True))))
        await heard.until("b", "d")
        await api.changes.put(("BOOKMARK", {"metadata": {"resourceVersion": "9"}}))
        await api.changes.put(("DELETED", piece("s2")))
        await heard.until("b")
        await api.changes.put(("ERROR", {"code": 410, "message": "too old"}))
        await task
        assert (api.versions, heard.troubles) == (["7"], [])
        place.token.write_text("second\n")
        api.status = 500
        await slices.once()
        assert heard.troubles == ["the API server answers 500"]
        await heard.until("b")  # it stays
        assert api.tokens[-1] == "Bearer second"


@on_loop
async def test_a_pod_that_terminates_is_a_worker_as_long_as_it_serves(tmp_path: Path) -> None:
    """With `publishNotReadyAddresses` it is ready to its end. Conditions that are null: ready,
    serving, not terminating."""
    pods: dict[str, Conditions] = {
        "null": {"ready": None, "serving": None, "terminating": None},
        "plain": {"ready": True, "serving": True, "terminating": False},
        "unready": {"ready": False, "serving": False, "terminating": False},
        "published": {"ready": True, "serving": False, "terminating": False},
        "ends": {"ready": False, "serving": True, "terminating": True},
        "ends-unsaid": {"ready": False, "terminating": True},
        "ends-published": {"ready": True, "serving": True, "terminating": True},
        "ended": {"ready": False, "serving": False, "terminating": True},
        "ended-published": {"ready": True, "serving": False, "terminating": True},
    }
    ends = {"ends", "ends-unsaid", "ends-published"}

    api, heard = ApiServer(), Heard()
    api.listed = [piece("s", *pods.items())]
    async with served(api, tmp_path) as place:
        slices = Slices(SERVICE, place, cast("Discovery", heard))
        task = asyncio.create_task(slices.once())
        await heard.until("null", "plain", "published", *ends)
        assert heard.terminating == ends
        await api.changes.put(("MODIFIED", piece("s", ("plain", pods["ended-published"]))))
        await heard.until()
        await api.changes.put(None)
        await task


@on_loop
async def test_a_source_that_fails_keeps_its_workers() -> None:
    flags = {"worker": ["a=http://127.0.0.1:1"], "worker_dns": ["http://localhost:2"]}
    config = load_router_config(None, {**flags, "insecure": True})
    workers = Workers(lambda _: None)
    discovery = Discovery(config, workers)
    await discovery.once()
    names = {worker.name for worker in workers}
    assert "a" in names
    assert "127.0.0.1:2" in names
    discovery.failed("--worker-dns localhost:2", "down")
    assert {worker.name for worker in workers} == names
    assert "down" in str(discovery.troubles)
    await discovery.once()
    assert str(discovery.troubles) == ""
    discovery.found("index", [])
    assert {worker.name for worker in workers} == names
