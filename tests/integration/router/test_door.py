"""The listening end against hostile clients: framing, sizes, silence, crowds."""

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

from kvstore.router.engines import connections
from kvstore.router.front import door
from kvstore.router.front.intake import BODIES_SHARE
from kvstore.testing.process import Lab
from tests.kit.router_thread import RouterThread, until
from tests.kit.scripted_worker import ScriptedWorker

BODY = b'{"model":"m","prompt":"x"}'


def say(port: int, text: bytes, *, then: bytes = b"") -> bytes:
    """Everything that comes back until the connection is closed, or 2 s of silence."""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as client:
        heard = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            client.sendall(text + then)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := client.recv(65536):
                heard += piece
        return heard


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
KEY = b"Authorization: Bearer key-of-team-a-0001\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Smuggled: 1\r\n" + LENGTH + b"\r\n" + BODY
)


FRAMINGS = [
    HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    HEAD + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKED,
    HEAD + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY,
    HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
    HEAD + b"Content-Length: +26\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 0x1a\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 26, 26\r\n\r\n" + BODY,
    HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED,
    HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED,
    HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKED,
    HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKED,
    HEAD + b" Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    HEAD + b"X: a\r\n\tTransfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n1g\r\n" + BODY + b"\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n1a\n" + BODY + b"\n0\n\n",
    HEAD + b"X\x00Y: 1\r\n" + LENGTH + b"\r\n" + BODY,
    HEAD + b"Content-Encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY,
]


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


def test_framing_that_parsers_read_differently_reaches_no_engine(worker: ScriptedWorker) -> None:
    before = worker.seen()["requests"]
    with RouterThread([worker.flag]) as router:
        for text in FRAMINGS:
            heard = say(router.port, text, then=SMUGGLED)
            assert b" 200 OK" not in heard, text
            assert heard[9:12] in (b"400", b"415", b""), (text, heard[:80])
        assert router.ask()[0] == 200
    assert worker.seen()["requests"] == before + 1


def test_a_pipeline_is_answered_in_order(worker: ScriptedWorker) -> None:
    with RouterThread([worker.flag]) as router:
        one = HEAD + LENGTH + b"\r\n" + BODY
        last = HEAD + b"Connection: close\r\n" + LENGTH + b"\r\n" + BODY
        heard = say(router.port, 4 * one, then=last)
        assert heard.count(b"HTTP/1.1 200 OK") == 5


def test_bodies_and_heads_have_bounds(worker: ScriptedWorker) -> None:
    with RouterThread([worker.flag], body_max="64KiB") as router:
        big = b'{"model":"m","prompt":"' + b"x" * (64 << 10) + b'"}'
        assert router.ask(big)[0] == 413
        chunk = b"%x\r\n%b\r\n" % (len(big), big)
        heard = say(router.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        assert heard[9:12] == b"413"
        assert router.ask(big[:-10] + b'"}')[0] in (200, 413)
        assert router.ask(headers={"X-Long": "x" * (32_000)})[0] == 200
        assert router.ask(headers={f"X-{n}": "x" * 1000 for n in range(31)})[0] == 200
        for body, says in (
            (b"", b"not JSON"),
            (b"[1]", b"not valid"),
            (b'{"model": 3}', b"not valid"),
            (b'{"a":' * 9_000, b"not JSON"),
            (b"\xff\xfe", b"not JSON"),
        ):
            status, _, answer = router.ask(body)
            assert (status, says in answer) == (400, True), (body[:20], answer)
        assert router.ask()[0] == 200
        until(lambda: router.router.proxy.in_flight == 0)
        left = router.router.intake.bodies.left
        assert left == (64 << 10) * BODIES_SHARE, "what was read is released"


FIELDS = b"".join(b"X-%d: %b\r\n" % (n, b"x" * 950_000) for n in range(5))
REST = LENGTH + b"\r\n" + BODY
LONG = "longer than 4194304 bytes"
WRONG_HEADS = [
    (HEAD + b"X: " + b"x" * 4_200_000 + b"\r\n" + REST, LONG),
    (HEAD + FIELDS + REST, LONG),
    (HEAD + FIELDS, LONG),  # and goes on
    (b"GET /" + b"x" * 4_200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", LONG),
    (HEAD + b"".join(b"X-%d: x\r\n" % n for n in range(16_400)) + REST, "more than 16384 headers"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "badly framed"),
    (b"GET / HTTP/1.1\r\nHost x\r\n\r\n", "badly framed"),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", "badly framed"),
    (b"G@T / HTTP/1.1\r\nHost: x\r\n\r\n", "badly framed"),
    (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", "badly framed"),
    (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", "badly framed"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "badly framed"),
    (bytes.fromhex("1603010200010001fc0303") + bytes(100), "badly framed"),  # TLS
]


def test_a_wrong_head_is_answered_in_json_without_the_name_of_a_server(
    worker: ScriptedWorker,
) -> None:
    before = worker.seen()["requests"]
    with RouterThread([worker.flag]) as router:
        for text, says in WRONG_HEADS:
            head, _, body = say(router.port, text).partition(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            assert lines[0].split()[1] == b"400", (text[:80], head)
            error = json.loads(body)["error"]
            assert (error["type"], says in error["message"]) == ("invalid_request_error", True)
            assert [each for each in lines if each.startswith(b"server")] == [b"server: kvstore"]
            assert b"python" not in head.lower()
        assert router.ask()[0] == 200
    assert worker.seen()["requests"] == before + 1


def test_a_head_behind_a_request_under_way_has_the_same_bound(worker: ScriptedWorker) -> None:
    worker.script("hang")
    before = worker.seen()["aborted"]
    with (
        RouterThread([worker.flag]) as router,
        socket.create_connection(("127.0.0.1", router.port), timeout=20) as client,
    ):
        client.sendall(HEAD + REST)
        until(lambda: router.router.proxy.in_flight == 1)
        with contextlib.suppress(OSError):
            client.sendall(HEAD + FIELDS)
        until(lambda: router.router.proxy.in_flight == 0)
        until(lambda: router.router.door.connection_count == 0)
    until(lambda: worker.seen()["aborted"] > before)
    assert worker.seen()["aborted"] == before + 1


def test_a_body_close_behind_its_head_is_none_of_it(worker: ScriptedWorker) -> None:
    """Pieces of a body may come before its request has begun, and after its answer."""
    large = json.dumps({"model": "m", "prompt": "x" * 300_000}).encode()
    framed = HEAD + b"Content-Length: %d\r\n\r\n" % len(large)
    with RouterThread([worker.flag], body_max="200KiB") as router:
        for _ in range(5):
            assert say(router.port, framed, then=large)[9:12] == b"413"
    with RouterThread([worker.flag]) as router:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", router.port), timeout=10) as client:
                client.sendall(framed)
                client.sendall(large)
                assert hear(client, b"}}}").startswith(b"HTTP/1.1 200 OK\r\n")


def hear(client: socket.socket, end: bytes) -> bytes:
    heard = b""
    while end not in heard and (piece := client.recv(65536)):
        heard += piece
    return heard


def test_a_client_that_waits_for_100_continue_gets_it(worker: ScriptedWorker) -> None:
    expecting = HEAD + LENGTH + b"Expect: 100-Continue\r\n\r\n"
    with RouterThread([worker.flag]) as router:
        with socket.create_connection(("127.0.0.1", router.port), timeout=10) as client:
            for _ in range(2):
                client.sendall(expecting)
                assert hear(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                client.sendall(BODY)
                assert hear(client, b"}]").startswith(b"HTTP/1.1 200 OK\r\n")
        seen = {name.lower() for name, _ in worker.seen()["headers"]}
        assert "expect" not in seen


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (KEY + b"Content-Length: 99999999\r\nExpect: 100-continue\r\n", b"413"),
        (KEY + LENGTH + LENGTH + b"Expect: 100-continue\r\n", b"400"),
        (LENGTH + b"Expect: 100-continue\r\n", b"401"),
    ],
)
def test_a_body_that_is_refused_is_not_asked_for(
    worker: ScriptedWorker, tmp_path: Path, head: bytes, status: bytes
) -> None:
    (tmp_path / "keys").write_text("team-a: key-of-team-a-0001\n")
    flags: dict[str, Any] = {"api_keys": str(tmp_path / "keys"), "body_max": "64KiB"}
    with (
        RouterThread([worker.flag], **flags) as router,
        socket.create_connection(("127.0.0.1", router.port), timeout=10) as client,
    ):
        client.sendall(HEAD + head + b"\r\n")
        assert hear(client, b"\r\n\r\n")[9:12] == status


def test_silent_connections_give_way(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "GIVES_WAY_S", 0.2)
    with RouterThread([worker.flag], connections=20) as router, contextlib.ExitStack() as stack:
        for _ in range(60):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", router.port)))
            client.sendall(b"POST /v1/comp")
        assert router.ask()[0] == 200
        until(lambda: router.router.door.connection_count <= 20)


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


def test_https_with_api_keys_and_without(worker: ScriptedWorker, tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    files = lab.files("client", "router")
    keys = tmp_path / "keys.yaml"
    keys.write_text("team-a: key-of-team-a-0001\n")
    flags: dict[str, Any] = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    context = ssl.create_default_context(cafile=files.ca)
    context.check_hostname = False
    certified = ssl.create_default_context(cafile=files.ca)
    certified.check_hostname = False
    certified.load_cert_chain(files.cert, files.key)

    with RouterThread([worker.flag], **flags) as router:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            https(router.port, context)
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
    with RouterThread([worker.flag], api_keys=str(keys), **flags) as router:
        assert https(router.port, context) == 401
        assert https(router.port, context, Authorization="Bearer key-of-team-a-0001") == 200


def test_handshakes_that_do_not_go_on_give_way(
    worker: ScriptedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "GIVES_WAY_S", 0.2)
    files = Lab(tmp_path).files("client", "router")
    flags: dict[str, Any] = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    certified = ssl.create_default_context(cafile=files.ca)
    certified.check_hostname = False
    certified.load_cert_chain(files.cert, files.key)
    with (
        RouterThread([worker.flag], connections=20, **flags) as router,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", router.port)))
        assert https(router.port, certified) == 200


def https(port: int, given: ssl.SSLContext, **headers: str) -> int:
    """Status of one completion."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=given, timeout=10)
    try:
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", BODY, kind | headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_clients_see_another_certificate_than_the_cluster(
    worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("team-a: key-of-team-a-0001\n")
    cluster = Lab(tmp_path / "cluster").files("client", "router")
    public = Lab(tmp_path / "public").files("client", "public")
    flags: dict[str, Any] = {
        "ca": str(cluster.ca),
        "cert": str(cluster.cert),
        "key": str(cluster.key),
        "listen_cert": str(public.cert),
        "listen_key": str(public.key),
    }
    outside, inside = (ssl.create_default_context(cafile=ca) for ca in (public.ca, cluster.ca))
    outside.check_hostname = inside.check_hostname = False
    with RouterThread([worker.flag], api_keys=str(keys), **flags) as router:
        assert https(router.port, outside, Authorization="Bearer key-of-team-a-0001") == 200
        with pytest.raises(ssl.SSLError):
            https(router.port, inside)
        assert router.config.tls is not None
        assert router.config.tls.cert == cluster.cert.read_bytes()
    with RouterThread([worker.flag], **flags) as router:  # clients show what the cluster's CA made
        with pytest.raises((ssl.SSLError, ConnectionError)):
            https(router.port, outside)
        outside.load_cert_chain(cluster.cert, cluster.key)
        assert https(router.port, outside) == 200
    other = {**flags, "listen_ca": str(public.ca)}
    with RouterThread([worker.flag], **other) as router:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            https(router.port, outside)
        outside.load_cert_chain(public.cert, public.key)
        assert https(router.port, outside) == 200


ODD = b"%01" * 1_000_000
"""Three bytes of a path, and six of its JSON."""
ASKED = (
    b"Origin: https://a\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: "
)
ECHOED = [
    b"GET /metrics/%b HTTP/1.1\r\nHost: x\r\n\r\n" % ODD,
    b"PUT /v1/audio/%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 1_000_000),
    b"GET /v1/models/%b HTTP/1.1\r\nHost: x\r\n\r\n" % ODD,
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\n" + ASKED + b"x" * 1_000_000 + b"\r\n\r\n",
    b"POST /v1/completions%b HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % (b"/" * 1_000_000),
]


@pytest.mark.parametrize("text", ECHOED, ids=range(len(ECHOED)))
def test_no_answer_gives_much_of_its_request_back(worker: ScriptedWorker, text: bytes) -> None:
    """A client that does not read it would hold memory that nothing counts."""
    with RouterThread([worker.flag]) as router:
        until(lambda: all(each.models for each in router.router.workers))
        heard = say(router.port, text)
        assert heard.startswith(b"HTTP/1.1 ")
        assert len(heard) < 64 << 10, heard[:100]
