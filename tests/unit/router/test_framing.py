"""What clients send, byte by byte: framing, sizes of heads and bodies, what is said back."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.router.front.intake import BODIES_SHARE
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_loop import MemorySocket
from tests.kit.virtual_router import VirtualRouter, until

BODY = b'{"model":"m","prompt":"x"}'
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


def say(router: VirtualRouter, text: bytes, *, then: bytes = b"") -> bytes:
    """Everything that comes back until the connection is closed, or 2 s of silence."""
    with router.connected(timeout_s=2.0) as client:
        heard = b""
        client.sendall(text + then)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := client.recv(65536):
                heard += piece
        return heard


def hear(client: MemorySocket, end: bytes) -> bytes:
    heard = b""
    while end not in heard and (piece := client.recv(65536)):
        heard += piece
    return heard


def test_framing_that_parsers_read_differently_reaches_no_engine(worker: VirtualWorker) -> None:
    with VirtualRouter([worker.flag]) as router:
        for text in FRAMINGS:
            heard = say(router, text, then=SMUGGLED)
            assert b" 200 OK" not in heard, text
            assert heard[9:12] in (b"400", b"415", b""), (text, heard[:80])
        assert router.ask()[0] == 200
    assert worker.seen()["requests"] == 1


def test_a_pipeline_is_answered_in_order(worker: VirtualWorker) -> None:
    with VirtualRouter([worker.flag]) as router:
        one = HEAD + LENGTH + b"\r\n" + BODY
        last = HEAD + b"Connection: close\r\n" + LENGTH + b"\r\n" + BODY
        heard = say(router, 4 * one, then=last)
        assert heard.count(b"HTTP/1.1 200 OK") == 5


def test_bodies_and_heads_have_bounds(worker: VirtualWorker) -> None:
    with VirtualRouter([worker.flag], body_max="64KiB") as router:
        big = b'{"model":"m","prompt":"' + b"x" * (64 << 10) + b'"}'
        assert router.ask(big)[0] == 413
        chunk = b"%x\r\n%b\r\n" % (len(big), big)
        heard = say(router, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
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
    worker: VirtualWorker,
) -> None:
    with VirtualRouter([worker.flag]) as router:
        for text, says in WRONG_HEADS:
            head, _, body = say(router, text).partition(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            assert lines[0].split()[1] == b"400", (text[:80], head)
            error = json.loads(body)["error"]
            assert (error["type"], says in error["message"]) == ("invalid_request_error", True)
            assert [each for each in lines if each.startswith(b"server")] == [b"server: kvstore"]
            assert b"python" not in head.lower()
        assert router.ask()[0] == 200
    assert worker.seen()["requests"] == 1


def test_a_head_behind_a_request_under_way_has_the_same_bound(worker: VirtualWorker) -> None:
    worker.script("hang")
    with VirtualRouter([worker.flag]) as router, router.connected() as client:
        client.sendall(HEAD + REST)
        until(lambda: router.router.proxy.in_flight == 1)
        client.sendall(HEAD + FIELDS)
        until(lambda: router.router.proxy.in_flight == 0)
        until(lambda: router.router.door.connection_count == 0)
    until(lambda: worker.seen()["aborted"] == 1)
    assert worker.seen()["requests"] == 1


def test_a_body_close_behind_its_head_is_none_of_it(worker: VirtualWorker) -> None:
    """Pieces of a body may come before its request has begun, and after its answer."""
    large = json.dumps({"model": "m", "prompt": "x" * 300_000}).encode()
    framed = HEAD + b"Content-Length: %d\r\n\r\n" % len(large)
    with VirtualRouter([worker.flag], body_max="200KiB") as router:
        for _ in range(5):
            assert say(router, framed, then=large)[9:12] == b"413"
    with VirtualRouter([worker.flag]) as router:
        for _ in range(5):
            with router.connected() as client:
                client.sendall(framed)
                client.sendall(large)
                assert hear(client, b"}}}").startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_client_that_waits_for_100_continue_gets_it(worker: VirtualWorker) -> None:
    expecting = HEAD + LENGTH + b"Expect: 100-Continue\r\n\r\n"
    with VirtualRouter([worker.flag]) as router:
        with router.connected() as client:
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
    worker: VirtualWorker, tmp_path: Path, head: bytes, status: bytes
) -> None:
    (tmp_path / "keys").write_text("team-a: key-of-team-a-0001\n")
    flags: dict[str, Any] = {"api_keys": str(tmp_path / "keys"), "body_max": "64KiB"}
    with (
        VirtualRouter([worker.flag], **flags) as router,
        router.connected() as client,
    ):
        client.sendall(HEAD + head + b"\r\n")
        assert hear(client, b"\r\n\r\n")[9:12] == status


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
def test_no_answer_gives_much_of_its_request_back(worker: VirtualWorker, text: bytes) -> None:
    """A client that does not read it would hold memory that nothing counts."""
    with VirtualRouter([worker.flag]) as router:
        until(lambda: all(each.models for each in router.router.workers))
        heard = say(router, text)
        assert heard.startswith(b"HTTP/1.1 ")
        assert len(heard) < 64 << 10, heard[:100]
