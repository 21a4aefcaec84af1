"""Headers in both directions: what is dropped, replaced and kept, byte for byte."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.router.front import heads


def lines(head: bytes) -> list[bytes]:
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].split(b"\r\n")


def test_an_engine_names_no_server_and_no_header_of_one_hop() -> None:
    engines = [
        (b"Connection", b"close, X-Hop"),
        (b"x-hop", b"1"),
        (b"Server", b"uvicorn"),
        (b"X-Kvstore-Worker", b"forged"),
        (b"X-Kept", b"caf\xe9"),
    ]
    assert heads.back(engines) == [(b"X-Kept", b"caf\xe9"), (b"Server", b"kvstore")]


def test_headers_of_the_router_stand_in_place_of_the_engines() -> None:
    engines = [(b"DATE", b"today"), (b"x-request-id", b"theirs"), (b"x-kept", b"1")]
    head = heads.answer_head(200, engines, {"X-Request-Id": "ours"})
    assert lines(head) == [
        b"HTTP/1.1 200 OK",
        b"DATE: today",
        b"x-kept: 1",
        b"X-Request-Id: ours",
    ]
    assert sum(line.startswith(b"Date: ") for line in lines(heads.answer_head(200, [], {}))) == 1


@pytest.mark.parametrize("bad", [b"1\r\nX-Forged: 1", b"1\n", b"1\r"])
def test_no_header_brings_another_line(bad: bytes) -> None:
    with pytest.raises(ValueError, match="line break"):
        heads.answer_head(200, [(b"X-Kept", bad)], {})
    with pytest.raises(ValueError, match="line break"):
        heads.request_head("POST", "/", "host", [("X-Kept", bad.decode())])


def test_a_client_steers_nothing_and_keeps_its_key_where_there_is_no_other() -> None:
    given = CIMultiDict(
        [("Connection", "X-Hop"), ("X-Hop", "1"), ("X-Prefiller-Host", "evil"), ("Accept", "*/*")]
    )
    given.add("authorization", "Bearer mine")
    seen = CIMultiDictProxy(given)
    own = [("X-Request-Id", "id"), ("X-Kvstore-Routers", "r")]
    kept = [("Accept", "*/*"), ("authorization", "Bearer mine")]
    onward = heads.onward(seen, request_id="id", authorization=None, way="r")
    assert onward == [*kept, *own]
    onward = heads.onward(seen, request_id="id", authorization="Bearer w", way="r")
    assert onward == [kept[0], ("Authorization", "Bearer w"), *own]
    assert heads.onward(seen, request_id="id", authorization="", way="r") == [kept[0], *own]
