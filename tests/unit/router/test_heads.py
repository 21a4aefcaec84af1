"""Headers in both directions: what is dropped, replaced and kept, byte for byte."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.router.engines.connections import answer_head, back, request_head
from kvstore.router.front import proxy
from kvstore.router.front.intake import bearer


def of(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def lines(head: bytes) -> list[bytes]:
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].split(b"\r\n")


def test_an_engine_names_no_server_no_header_of_one_hop_and_no_origin() -> None:
    engines = [
        (b"Connection", b"close, X-Hop"),
        (b"x-hop", b"1"),
        (b"Server", b"uvicorn"),
        (b"access-control-allow-origin", b"*"),
        (b"Access-Control-Allow-Credentials", b"1"),
        (b"X-Kvstore-Worker", b"forged"),
        (b"X-Kept", b"caf\xe9"),
    ]
    assert back(engines) == [(b"X-Kept", b"caf\xe9"), (b"Server", b"kvstore")]


def test_headers_of_the_router_stand_in_place_of_the_engines() -> None:
    engines = [(b"DATE", b"today"), (b"x-request-id", b"theirs"), (b"x-kept", b"1")]
    head = answer_head(200, engines, {"X-Request-Id": "ours"})
    assert lines(head) == [
        b"HTTP/1.1 200 OK",
        b"DATE: today",
        b"x-kept: 1",
        b"X-Request-Id: ours",
    ]
    assert sum(line.startswith(b"Date: ") for line in lines(answer_head(200, [], {}))) == 1


@pytest.mark.parametrize("bad", ["1\r\nX-Forged: 1", "1\n", "1\r"])
def test_no_header_brings_another_line(bad: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        answer_head(200, [(b"X-Kept", bad.encode())], {})
    for method, target, host, headers in (
        ("POST" + bad, "/", "h", []),
        ("GET", "/?" + bad, "h", []),
        ("GET", "/", "h" + bad, []),
        ("GET", "/", "h", [("X-Kept", bad)]),
        ("GET", "/", "h", [("X-Kept" + bad, "1")]),
        ("GET", "/", "h", [("A", "1\r"), ("\nB", "2")]),  # split over two parts
    ):
        with pytest.raises(ValueError, match="line break"):
            request_head(method, target, host, headers, 0)


def test_a_head_has_its_host_and_its_length_once_and_keeps_odd_bytes() -> None:
    given = [("X-Odd", b"caf\xe9".decode("utf-8", "surrogateescape")), ("X-Text", "é")]
    assert lines(request_head("POST", "/v1?a=b", "h:80", given, 7)) == [
        b"POST /v1?a=b HTTP/1.1",
        b"Host: h:80",
        b"X-Odd: caf\xe9",
        b"X-Text: \xc3\xa9",
        b"Content-Length: 7",
    ]


@pytest.mark.parametrize("name", ["X-Api-Key", "x-api-key", "AUTHORIZATION"])
def test_a_client_steers_nothing_and_keeps_its_key_where_there_is_no_other(name: str) -> None:
    key = (name, "Bearer mine")
    seen = of(
        ("Connection", "X-Hop"),
        ("X-Hop", "1"),
        ("X-Prefiller-Host", "evil"),
        ("Accept", "*/*"),
        key,
    )
    kept, own = ("Accept", "*/*"), [("X-Request-Id", "id"), ("X-Kvstore-Routers", "r")]
    for authorization, keys in (
        (None, [key]),  # this router has no tenants: the engine's own check
        ("Bearer w", [("Authorization", "Bearer w")]),
        ("", []),
    ):
        onward = proxy.onward(seen, request_id="id", authorization=authorization, way="r")
        assert onward == [kept, *keys, *own]


@pytest.mark.parametrize(
    ("pairs", "key"),
    [
        ([], ""),
        ([("Authorization", "Bearer k")], "k"),
        ([("authorization", "bEARER   k ")], "k"),
        ([("X-Api-Key", "k")], "k"),
        ([("Authorization", "Basic b"), ("X-Api-Key", "k")], "k"),
        ([("Authorization", "Bearer k"), ("X-Api-Key", "other")], "k"),
        ([("Authorization", "Bearer"), ("X-Api-Key", "other")], ""),
        ([("Authorization", "Bearerk"), ("X-Api-Key", "")], ""),
    ],
)
def test_a_key_comes_as_openai_or_anthropic_send_it(pairs: list[tuple[str, str]], key: str) -> None:
    assert bearer(of(*pairs)) == key


PAGE = "https://chat.example"
HOSTILE = [
    *("", "null", "*", PAGE + ".evil", "https://evil.chat.example", PAGE.upper(), PAGE + "/"),
    *("http://chat.example", PAGE + ":443", f"{PAGE}, https://evil", f" {PAGE}", PAGE + "\udcff"),
    *("https://chat.example@evil", "https://chat.example%0d%0aX: 1", "é"),
]


@pytest.mark.parametrize("origin", HOSTILE)
def test_no_other_origin_looks_like_an_allowed_one(origin: str) -> None:
    origins = proxy.Origins([PAGE])
    asked = of(("Origin", origin), ("Access-Control-Request-Method", "POST"))
    assert origins.allowed(asked) == {}
    assert origins.preflight(asked) == {}


def test_an_allowed_page_is_named_and_with_all_allowed_none_is() -> None:
    two = of(("Origin", PAGE), ("Origin", "https://evil"))
    named = proxy.Origins([PAGE, "https://b"]).allowed(two)
    assert (named["Access-Control-Allow-Origin"], named["Vary"]) == (PAGE, "Origin")
    for origin in (PAGE, *HOSTILE):
        every = proxy.Origins(["*"]).allowed(of(("Origin", origin)))
        assert every["Access-Control-Allow-Origin"] == "*", "nothing of a client comes back"
    assert proxy.Origins(["*"]).allowed(of(("Accept", "*/*"))) == {}
    assert proxy.Origins([]).allowed(of(("Origin", "*"))) == {}

    asked = of(("Origin", PAGE), ("Access-Control-Request-Method", "PUT"))
    for origins in (["*"], [PAGE]):
        found = proxy.Origins(origins).preflight(asked) or {}
        assert found["Access-Control-Allow-Methods"] == "GET, POST, PUT, PATCH, DELETE"
        assert "Access-Control-Allow-Credentials" not in found, "a page sends no cookies"


def test_a_request_comes_back_to_no_router() -> None:
    assert proxy.way(of(), "r") == "r"
    assert proxy.way(of(("X-Kvstore-Routers", "a")), "r") == "a,r"
    assert proxy.way(of(("x-kvstore-routers", "a,r")), "r") is None
    assert proxy.way(of(("X-Kvstore-Routers", "a,b,c,d")), "r") is None


@pytest.mark.parametrize(
    "given", ["", "a b", "a\nb", "é", "x" * 129, "a___b", "\udcff", "a/b", 'a"', "a%0d"]
)
def test_an_id_of_a_client_that_may_do_harm_is_dropped(given: str) -> None:
    assert proxy.new_id(of(("X-Request-Id", given))).startswith("req-")


def test_an_id_of_a_client_is_the_beginning_of_one_that_is_new_each_time() -> None:
    found = {proxy.new_id(of(("X-Request-Id", "a.b:c_d-1" + "x" * 100))) for _ in range(100)}
    assert len(found) == 100
    assert {each[: proxy.GIVEN_ID_CHARACTERS_MAX] for each in found} == {"a.b:c_d-1" + "x" * 87}
    assert {len(each) for each in found} == {proxy.GIVEN_ID_CHARACTERS_MAX + 17}
