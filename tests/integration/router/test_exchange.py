"""Routers of the same engines count what the others have in flight, and one port serves several."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.errors import ConfigError
from kvstore.router.exchange import PEERS_MAX
from kvstore.router.pages import health_of
from kvstore.routing.events import Shared
from kvstore.routing.rows import FleetColumn
from kvstore.testing.process import Lab, RouterProcess
from kvstore.wire.load import LOADS, EngineLoad, RouterLoads, decode_loads, encode_loads
from tests.kit.processes import IndexProcess, route_address
from tests.kit.router_thread import ASK, WAIT_S, RouterThread, until
from tests.kit.scripted_worker import ScriptedWorker

ENGINE = "http://127.0.0.1:1"
"""Nothing listens there."""


def loads_at(router: RouterThread) -> str:
    """HOST:PORT of its Loads."""
    return f"127.0.0.1:{router.router.servers['route'].port}"


def reporting(*workers: str, **more: Any) -> RouterThread:
    given: dict[str, Any] = {"route_listen": "127.0.0.1:0", **more}
    return RouterThread(workers or [f"a={ENGINE}"], **given)


def listener(place: str, *workers: str, **more: Any) -> RouterThread:
    flags = workers or (f"z={ENGINE}",)
    return reporting(*flags, **{"peer_router": [place], "insecure": True, **more})


def heard(router: RouterThread) -> list[Shared]:
    return router.on_loop(lambda: [e for e in router.core.events if isinstance(e, Shared)])


def health(router: RouterThread) -> str:
    return router.on_loop(lambda: health_of(router.router).body.decode())


def counted(router: RouterThread) -> dict[str, list[float]]:
    """Worker → what others have there: uncached tokens, streams."""
    columns = slice(FleetColumn.SHARED_TOKENS, FleetColumn.SHARED_STREAMS + 1)
    fleet = router.core.fleet
    return router.on_loop(
        lambda: {name: fleet.columns[columns, row].tolist() for name, row in fleet.row_of.items()}
    )


def test_loads_go_by_the_address_of_an_engine_and_leave_with_their_router() -> None:
    with ExitStack() as ends:
        other = ends.enter_context(reporting())
        name = other.router.proxy.name
        other.core.flying = (
            EngineLoad(ENGINE, 0, 700, 2),
            EngineLoad("http://left", 0, 1, 1),
        )
        with listener(loads_at(other)) as router:
            until(lambda: counted(router) == {"z": [700, 2]})
            assert router.on_loop(lambda: len(router.router.exchange.routers)) == 1
            other.core.flying = (EngineLoad(ENGINE, 0, 0, 1),)
            until(lambda: counted(router) == {"z": [0, 1]})
            assert "loads of the router" not in health(router)
            place = loads_at(other)
            ends.close()
            until(lambda: heard(router)[-1] == Shared(name, ()))
            assert counted(router) == {"z": [0, 0]}
            until(lambda: f"loads of the router at {place} are not counted: " in health(router))
            assert router.on_loop(lambda: len(router.router.exchange.routers)) == 0


def test_data_parallel_ranks_at_one_address_are_apart() -> None:
    index: dict[str, Any] = {"index": ["127.0.0.1:1"], "insecure": True}
    with reporting(f"a0={ENGINE},rank=0", f"a1={ENGINE},rank=1", **index) as other:
        other.core.flying = (EngineLoad(ENGINE, 1, 5, 0),)
        names = (f"x={ENGINE},rank=1", f"y={ENGINE}")
        with listener(loads_at(other), *names, **index) as router:
            until(lambda: counted(router)["x"] == [5, 0])
            assert counted(router)["y"] == [0, 0]


def test_what_is_no_router_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    with (
        IndexProcess.start(tmp_path) as index,
        socket.create_server(("127.0.0.1", 0)) as mute,
    ):
        places = [index.address, f"127.0.0.1:{mute.getsockname()[1]}", "none.invalid:1"]
        with reporting(peer_router=places, insecure=True) as router:
            until(lambda: f"{places[0]} are not counted: it is no router, or one" in health(router))
            until(lambda: f"{places[1]} are not counted: " in health(router))
            until(lambda: "none.invalid:1 are not counted: " in health(router))
            assert heard(router) == []


def ask_loads(channel: grpc.Channel, timeout_s: float | None = None) -> Any:
    """A stream of another router's loads."""
    ask: Any = channel.unary_stream(f"/{LOADS}/Loads", bytes, decode_loads)
    return ask(b"", timeout=timeout_s)


def test_loads_of_a_router_that_is_stuck_or_talks_nonsense_leave_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.router.exchange.SILENCE_S", 1.0)
    monkeypatch.setattr("kvstore.router.exchange.RETRY_S", 0.5)
    is_over, server = threading.Event(), grpc.server(ThreadPoolExecutor(8))
    says = [encode_loads(RouterLoads("stuck", (EngineLoad(ENGINE, 0, 0, 9),)))]

    def loads(_request: bytes, _context: Any) -> Iterator[bytes]:
        yield from says
        is_over.wait(WAIT_S)

    handler = grpc.unary_stream_rpc_method_handler(loads, bytes, bytes)
    named = grpc.method_handlers_generic_handler(LOADS, {"Loads": handler})
    server.add_generic_rpc_handlers((named,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with listener(f"127.0.0.1:{port}") as router:
            until(lambda: Shared("stuck", ()) in heard(router))
            assert heard(router)[0] == Shared("stuck", (EngineLoad(ENGINE, 0, 0, 9),))
            until(lambda: "are not counted: it is silent" in health(router))
            says.append(b"\x0a\x05stuck")
            until(lambda: "are not counted: malformed loads: " in health(router))
    finally:
        is_over.set()
        server.stop(None).wait(WAIT_S)


@contextmanager
def two_routers(directory: Path, worker_flags: list[str]) -> Iterator[list[RouterProcess]]:
    """With cores of their own; the second counts what the first has in flight."""
    flags = [text for flag in worker_flags for text in ("--worker", flag)]
    flags += ["--route-listen", "127.0.0.1:0", "--insecure"]
    with RouterProcess.start(directory, flags, name="first") as first:
        peers = ["--peer-router", route_address(first)]
        with RouterProcess.start(directory, [*flags, *peers], name="second") as second:
            yield [first, second]


def streams_seen(router: RouterProcess) -> list[float]:
    """By worker, in a decision that is not made."""
    request = urllib.request.Request(
        f"{router.url}/kvstore/explain/v1/completions",
        json.dumps(ASK).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return list(json.loads(answer.read())["features"]["streams"])


def test_who_asks_for_loads_without_end_is_refused() -> None:
    with reporting() as router, grpc.insecure_channel(loads_at(router)) as channel:
        calls = [ask_loads(channel) for _ in range(PEERS_MAX)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError, match="others ask for the loads"):
            next(ask_loads(channel))
        calls.pop().cancel()
        until(lambda: router.on_loop(lambda: router.router.exchange.listener_count) < PEERS_MAX)
        calls.append(ask_loads(channel))
        assert next(calls[-1]).router == router.router.proxy.name


@pytest.mark.parametrize("end", ["kill", "pause"])
def test_streams_of_another_router_count_until_it_is_gone(tmp_path: Path, end: str) -> None:
    """Engines whose metrics do not show them: only the exchange can."""
    with ScriptedWorker.start(tmp_path, "a") as a, ScriptedWorker.start(tmp_path, "b") as b:
        for worker in (a, b):
            worker.script("ok", pieces=100_000, pause_s=0.05)
        blind = [f"{w.flag},kind=openai" for w in (a, b)]
        with two_routers(tmp_path, blind) as (first, second):
            host, _, port = first.address.partition(":")
            client = http.client.HTTPConnection(host, int(port), timeout=30)
            body = json.dumps({**ASK, "stream": True})
            client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            assert client.getresponse().read(1)
            until(lambda: sorted(streams_seen(second)) == [0.0, 1.0])
            first.kill() if end == "kill" else first.pause()
            until(lambda: streams_seen(second) == [0.0, 0.0])
            if end == "pause":
                first.resume()
                until(lambda: sorted(streams_seen(second)) == [0.0, 1.0])
            client.close()


def test_a_router_whose_certificate_has_another_name_is_not_believed(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "pki")

    def tls(name: str) -> dict[str, str]:
        files = lab.files("client", name)
        return {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}

    with reporting(**tls("router")) as other:
        with reporting(peer_router=[loads_at(other)], **tls("router")) as router:
            until(lambda: heard(router) != [])
        with reporting(peer_router=[loads_at(other)], **tls("other")) as router:
            until(lambda: "its certificate is of another component" in health(router))
            assert heard(router) == []


def test_a_certificate_of_a_node_cannot_name_other_routers(tmp_path: Path) -> None:
    files = Lab(tmp_path / "pki").files("node", "n")
    given = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    with pytest.raises(ConfigError, match="a name in the role client"):
        reporting(peer_router=["a:1"], **given).__exit__(None, None, None)


def served(router: RouterThread) -> int:
    return router.on_loop(lambda: router.router.proxy.counts["done"])


def test_routers_that_share_a_port_share_its_connections(tmp_path: Path) -> None:
    with (
        ScriptedWorker.start(tmp_path, "a") as worker,
        RouterThread([worker.flag], share_port=True) as first,
    ):
        place = f"127.0.0.1:{first.port}"
        says = f"--listen cannot listen on {place}: the address is in use; choose another --listen"
        with pytest.raises(ConfigError, match=says):
            RouterThread([worker.flag], listen=place).__exit__(None, None, None)
        with RouterThread([worker.flag], listen=place, share_port=True) as second:
            statuses = [first.ask()[0] for _ in range(60)]
            until(lambda: sum(served(each) for each in (first, second)) == 60)
            assert min(served(first), served(second)) > 0
        assert statuses == [200] * 60


def test_loads_come_at_once_and_a_stop_ends_the_streams(tmp_path: Path) -> None:
    flags = ["--worker", f"a={ENGINE}", "--route-listen", "127.0.0.1:0"]
    with RouterProcess.start(tmp_path, flags) as router:
        with grpc.insecure_channel(route_address(router)) as channel:
            stream = ask_loads(channel, 30)
            assert list(next(stream).loads) == []
            next(stream)  # the beat
            router.process.terminate()
            assert list(stream) is not None  # it ends, and not by the time-out of the call
        assert router.process.wait(10) == 0
