"""The listening end against hostile clients: silence, crowds, TLS. Framing is in
`tests/unit/router/test_framing.py`."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp.http import RawRequestMessage

from kvstore.client.tls import TlsFiles
from kvstore.router.engines import connections
from kvstore.router.front import door
from kvstore.testing.process import Lab
from tests.kit.router_thread import RouterThread, until
from tests.kit.scripted_worker import ScriptedWorker

BODY = b'{"model":"m","prompt":"x"}'


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


def test_long_heads_that_wait_behind_a_request_are_bounded_and_answered(
    worker: ScriptedWorker,
) -> None:
    worker.script("held")
    asked = HEAD + LENGTH + b"\r\n" + BODY
    long = HEAD + b"X: %b\r\n" % (b"x" * (1 << 20)) + LENGTH + b"\r\n" + BODY
    with RouterThread([worker.flag]) as router:
        (front, held) = router.router.door, list[int]()

        def waiting() -> int:
            heads = [m for each in front.connections for m, _ in each._messages]
            pairs = [pair for m in heads for pair in cast("RawRequestMessage", m).raw_headers]
            return sum(len(value) for _, value in pairs)

        def talk(client: socket.socket) -> None:
            with contextlib.suppress(ConnectionError):
                client.sendall(asked + 6 * long)

        with socket.create_connection(("127.0.0.1", router.port), timeout=30) as client:
            sender = threading.Thread(target=talk, args=(client,))
            sender.start()
            until(lambda: router.on_loop(waiting) > 1 << 20)
            for _ in range(20):
                held.append(router.on_loop(waiting))
            assert max(held) < 3 << 20, "the rest waits in the kernel"
            assert router.on_loop(lambda: front.head_bytes) > 0, "and what came counts"
            worker.script("ok")
            heard = b""
            while heard.count(b"HTTP/1.1 200") < 7:
                piece = client.recv(1 << 20)
                assert piece, "each is answered"
                heard += piece
            sender.join()
        until(lambda: router.on_loop(lambda: front.head_bytes) == 0)


def test_a_connection_whose_request_is_on_its_way_does_not_give_way(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait until it is silent for too long."""
    monkeypatch.setattr(door, "GIVES_WAY_S", 3600.0)
    asked = HEAD + b"Connection: close\r\n" + LENGTH + b"\r\n" + BODY
    looks: list[int] = []
    has_room = door.FrontDoor.has_room

    def look(its: door.FrontDoor, coming: int) -> bool:
        looks.append(coming)
        return has_room(its, coming)

    monkeypatch.setattr(door.FrontDoor, "has_room", look)
    with (
        RouterThread([worker.flag], connections=1) as router,
        socket.create_connection(("127.0.0.1", router.port), timeout=20) as first,
    ):
        until(lambda: router.router.door.connection_count == 1)
        with socket.create_connection(("127.0.0.1", router.port), timeout=20) as other:
            other.sendall(asked)
            before = len(looks)
            until(lambda: len(looks) > before + 4)
            first.sendall(asked)
            assert first.recv(1000).startswith(b"HTTP/1.1 200")
            assert other.recv(1000).startswith(b"HTTP/1.1 200")
        assert router.router.door.refused_count == 0


def test_a_slow_reader_holds_back_the_engine_and_is_cut_off(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unread answer is bounded, whatever the engine makes."""
    monkeypatch.setattr(connections, "STALL_S", 1.0)
    worker.script("flood", pieces=2000)
    with RouterThread([worker.flag]) as router:
        before = worker.seen()["aborted"]
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", router.port))
        with client:
            client.sendall(HEAD + LENGTH + b"\r\n" + BODY)
            until(lambda: worker.seen()["aborted"] > before)
            assert 0 < worker.seen()["flooded"] < 32 << 20
            until(lambda: [e.end.value for e in router.core.ended.values()] == ["aborted"])


def test_https_with_api_keys_and_without(worker: ScriptedWorker, tmp_path: Path, keys: str) -> None:
    files, flags = cluster(tmp_path)
    certified = trusting(files.ca, files)
    with RouterThread([worker.flag], **flags) as router:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            https(router.port, trusting(files.ca))
        assert https(router.port, certified) == 200
        requests = worker.seen()["requests"]
        plain = http.client.HTTPConnection("127.0.0.1", router.port, timeout=10)
        with contextlib.closing(plain):
            plain.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
            answer = plain.getresponse()
            assert answer.status == 400
            assert json.loads(answer.read())["error"]["message"] == door.NEEDS_TLS
        assert worker.seen()["requests"] == requests
        assert https(router.port, certified) == 200
    with RouterThread([worker.flag], api_keys=keys, **flags) as router:
        assert https(router.port, trusting(files.ca)) == 401
        assert https(router.port, trusting(files.ca), **KEY) == 200


def cluster(directory: Path, **more: Any) -> tuple[TlsFiles, dict[str, Any]]:
    """Files of a router in a cluster of its own, and its flags."""
    files = Lab(directory).files("client", "router")
    return files, {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key), **more}


def trusting(ca: Path, own: TlsFiles | None = None) -> ssl.SSLContext:
    """A client's, which shows `own`."""
    context = ssl.create_default_context(cafile=ca)
    context.check_hostname = False
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file with the key of team-a."""
    (tmp_path / "keys.yaml").write_text("team-a: key-of-team-a-0001\n")
    return str(tmp_path / "keys.yaml")


KEY = {"Authorization": "Bearer key-of-team-a-0001"}


def https(port: int, given: ssl.SSLContext, **headers: str) -> int:
    """Status of one completion."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=given, timeout=10)
    with contextlib.closing(connection):
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", BODY, kind | headers)
        return connection.getresponse().status


def test_clients_see_another_certificate_than_the_cluster(
    worker: ScriptedWorker, tmp_path: Path, keys: str
) -> None:
    public = Lab(tmp_path / "public").files("client", "public")
    shown = {"listen_cert": str(public.cert), "listen_key": str(public.key)}
    its, flags = cluster(tmp_path / "cluster", **shown)
    with RouterThread([worker.flag], api_keys=keys, **flags) as router:
        assert https(router.port, trusting(public.ca), **KEY) == 200
        with pytest.raises(ssl.SSLError):
            https(router.port, trusting(its.ca))
        assert router.config.tls is not None
        assert router.config.tls.cert == its.cert.read_bytes()
    # Without keys clients show what the cluster's CA made, or another one.
    for more, own in (({}, its), ({"listen_ca": str(public.ca)}, public)):
        with RouterThread([worker.flag], **(flags | more)) as router:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                https(router.port, trusting(public.ca))
            assert https(router.port, trusting(public.ca, own)) == 200


@pytest.mark.parametrize("has_tls", [False, True])
def test_silent_connections_give_way(
    worker: ScriptedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_tls: bool
) -> None:
    """With TLS those whose handshakes do not go on."""
    monkeypatch.setattr(door, "GIVES_WAY_S", 0.2)
    files, flags = cluster(tmp_path) if has_tls else (None, {})
    with (
        RouterThread([worker.flag], connections=20, **flags) as router,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(60):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", router.port)))
            if files is None:
                client.sendall(b"POST /v1/comp")
        if files is None:
            assert router.ask()[0] == 200
        else:
            assert https(router.port, trusting(files.ca, files)) == 200
        until(lambda: router.router.door.connection_count <= 20)
