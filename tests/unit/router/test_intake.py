"""Numbers and names of clients, as they go into the core."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any, cast

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.config.router import WorkerAddress
from kvstore.proto import router_pb2 as pb
from kvstore.router.dispatch import Dispatcher
from kvstore.router.front import intake
from kvstore.router.front.answers import new_id
from kvstore.router.front.intake import (
    OUTPUT_TOKENS_MAX,
    PRIORITY_MAX,
    SESSION_CHARACTERS_MAX,
    STRIPPED,
    BadBody,
    RequestIntake,
    RequestJob,
    Tenants,
    Unauthorized,
    output_tokens,
    session_of,
)
from kvstore.router.rpc import _request
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import Prefix
from tests.kit.byte_prefixes import BytePrefixes


@pytest.mark.parametrize(
    ("given", "counted"),
    [(None, None), (0, None), (7, 7), (-(10**400), 1), (10**400, OUTPUT_TOKENS_MAX)],
)
def test_a_limit_of_an_answer_is_bounded_and_none_stays_none(
    given: int | None, counted: int | None
) -> None:
    assert output_tokens(given) == counted


def test_a_session_keeps_its_name_if_that_is_short_text() -> None:
    for name in ("", "s-1", "séance", "a b", "s" * SESSION_CHARACTERS_MAX):
        assert session_of(name) == name


def test_other_sessions_are_told_apart_by_a_hash() -> None:
    odd = ["\udcff", "\udcfe", "\ud800", "a\nb", *("s" * 300 + str(n) for n in range(3))]
    found = {session_of(name) for name in odd}
    assert len(found) == len(odd)
    assert all(name.isascii() and len(name) == 64 for name in found)


def test_of_limits_and_names_the_more_specific_one_counts() -> None:
    body = {"model": "m", "max_tokens": 1, "max_completion_tokens": 2, "max_output_tokens": 3}
    assert Site().job(body).request.output_tokens_max == 2
    assert Site().job({"model": "m", "max_output_tokens": 3}).request.output_tokens_max == 3
    asked = Site().job({"model": "m", "user": "u", "session_id": "s", "priority": -3}).request
    assert (asked.session, asked.priority) == ("s", -3)


def test_bodies_headers_and_callers_of_the_route_service_have_these_bounds() -> None:
    long = "s" * 100_000
    ask = pb.Ask(model="m", session=long, output_tokens_max=2**32 - 1)
    by_body = {"model": "m", "max_tokens": 10**400, "user": long}
    for request in (_request(ask, "rpc-1", Prefix(1)), Site().job(by_body).request):
        assert request.output_tokens_max == OUTPUT_TOKENS_MAX
        assert request.session == session_of(long)
    odd = Site().job({"max_tokens": -(10**400)}, {"X-Session-Id": "\udcff"}).request
    assert (odd.output_tokens_max, odd.session) == (1, session_of("\udcff"))


KEY = "key-of-sixteen-characters"
TENANTS = {hashlib.sha256(KEY.encode()).digest(): "team-a"}


class Site:
    def __init__(self, tenants: Tenants | None = None) -> None:
        dispatcher = Dispatcher(RouterCore(RoutingPolicy(), seed=1))
        self.workers, prefixes = dispatcher.workers, BytePrefixes()
        self.workers.replace(
            WorkerAddress(name=n, url=f"http://{n}", models=("sole",)) for n in "ab"
        )
        self.intake = RequestIntake(prefixes, tenants, dispatcher, cast("Any", None))

    def job(
        self,
        body: bytes | dict[str, Any],
        headers: dict[str, str] | None = None,
        *,
        path: str = "/v1/completions",
        tenant: str = "",
        **more: Any,
    ) -> RequestJob:
        given = CIMultiDictProxy(CIMultiDict(headers or {}))
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return asyncio.run(
            self.intake.job(given, path, content, tenant, **{"request_id": "r"} | more)
        )


@pytest.mark.parametrize(
    ("header", "body", "priority"),
    [
        (None, None, 0),
        (None, 5, 5),
        (None, -(10**400), -PRIORITY_MAX),
        (None, 10**12, PRIORITY_MAX),
        (None, -(10**12), -PRIORITY_MAX),
        (None, True, 0),
        (None, "1", 0),
        ("3", 5, 3),
        ("-3", 5, -3),
        ("9999999999", None, PRIORITY_MAX),
        ("99999999999", 5, 5),
        ("x", 5, 5),
        ("", 5, 5),
        ("٣", 5, 5),
        ("1\n", 5, 5),
    ],
)
def test_a_priority_is_that_of_the_header_or_the_body_within_bounds(
    header: str | None, body: Any, priority: int
) -> None:
    content = {"model": "m", "prompt": "x"} | ({} if body is None else {"priority": body})
    headers = {} if header is None else {"X-Kvstore-Priority": header}
    job = Site().job(content, headers)
    assert job.request.priority == priority
    assert json.loads(job.body) == content, "the engine's own queue has it, too"


def test_a_tenant_has_its_salt_and_neither_steers_nor_goes_before_others() -> None:
    given = {"model": "m", "prompt": "x", "priority": -9, "cache_salt": "mine"}
    given |= {"vllm_xargs": {"priority": 1, "top": 2}, **dict.fromkeys(STRIPPED, 1)}
    site = Site(TENANTS)
    job = site.job(given, {"X-Kvstore-Class": "inline"}, tenant="team-a")
    assert json.loads(job.body) == {
        "model": "m",
        "prompt": "x",
        "cache_salt": "team-a/mine",
        "vllm_xargs": {"top": 2},
    }
    assert (job.request.tenant, job.request.service) == ("team-a", "inline")
    assert site.job(given, tenant="team-b").request.keys == b""
    long = {"model": "m", "prompt": "x" * 2000}
    ours, theirs = (site.job(long, tenant=name).request.keys for name in ("team-a", "team-b"))
    assert ours
    assert ours != theirs, "nobody's prefixes are another tenant's"


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({}, None),
        ({"Authorization": f"Bearer {KEY}"}, "team-a"),
        ({"x-api-key": KEY}, "team-a"),
        ({"x-api-key": KEY + "x"}, None),
        ({"Authorization": f"Basic {KEY}"}, None),
        ({"x-api-key": "\udcff"}, None),
    ],
)
def test_a_key_is_that_of_a_tenant_or_nobody_gets_in(
    headers: dict[str, str], tenant: str | None
) -> None:
    given = CIMultiDictProxy(CIMultiDict(headers))
    assert Site().intake.tenant(given) == "", "a router without tenants"
    if tenant is None:
        with pytest.raises(Unauthorized):
            Site(TENANTS).intake.tenant(given)
    else:
        assert Site(TENANTS).intake.tenant(given) == tenant


def test_a_response_goes_on_where_the_one_before_is_kept() -> None:
    site = Site()
    made = new_id(site.workers["b"], "")
    ask = {"model": "m", "input": "x"}
    kept = site.job(ask | {"previous_response_id": made}, path="/v1/responses")
    assert (kept.request.subset, kept.request.is_bound_to_one) == (("b",), True)
    odd = site.job(ask | {"previous_response_id": "resp_x"}, path="/v1/responses", subset=("a",))
    assert (odd.request.subset, odd.request.is_bound_to_one) == (("a",), True)
    for none in (None, "", 7):
        first = site.job(ask | {"previous_response_id": none}, path="/v1/responses")
        assert (first.request.subset, first.request.is_bound_to_one) == (None, False)


def test_a_body_that_is_odd_json_goes_on_as_it_came_or_with_its_fields_set() -> None:
    body = b'\xef\xbb\xbf{"model":"m","prompt":"x"}'
    job = Site().job(body)
    assert job.body_for("m") == body
    sent = json.loads(job.body_for("served", {"request_id": "r"}))
    assert sent == {"model": "served", "prompt": "x", "request_id": "r"}


def test_a_body_that_is_wrong_json_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "plain", None)
    for body in b'{"model":1}', b'{"model":"%b"}' % (b"m" * 5000), b"[]":
        with pytest.raises(BadBody):
            Site().job(body)


def test_media_forms_and_hints_are_seen() -> None:
    site = Site()
    part = {"type": "image_url", "image_url": {"url": "data:;base64," + "A" * 5000}}
    chat = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    request = site.job(chat, path="/v1/chat/completions").request
    assert request.media
    assert request.prompt_tokens < 1200, "not 1,250 tokens of text"
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nw\r\n--b--\r\n'
    kind = {"Content-Type": "Multipart/Form-Data; boundary=b"}
    job = site.job(form, kind, path="/v1/audio/transcriptions", tenant="team-a")
    assert (job.request.model, job.body, job.body_for("other")) == ("w", form, form)
    assert site.job(b"{}").request.model == "sole"
    with pytest.raises(BadBody):
        site.job(form)
    for text, pin_s in (("60", 60.0), ("x", -1.0), ("1e9", -1.0), ("9999999", -1.0), ("²", -1.0)):
        assert site.job(b"{}", {"X-Kvstore-Pin-Ttl-S": text}).request.pin_s == pin_s
    assert site.job(b"{}", {"X-Kvstore-Session-End": "TRUE"}).request.ends_session


@pytest.mark.parametrize(
    ("path", "more", "races"),
    [
        ("/v1/completions", {}, True),
        ("/v1/chat/completions", {"n": 1, "store": False, "vllm_xargs": None}, True),
        ("/v1/completions", {"stream": False}, False),
        ("/v1/completions", {"n": 2}, False),
        ("/v1/completions", {"best_of": 3}, False),
        ("/v1/completions", {"store": True}, False),
        ("/v1/completions", {"vllm_xargs": {"a": 1}}, False),
        ("/v1/responses", {}, False),
    ],
)
def test_only_plain_streams_may_be_raced(path: str, more: dict[str, Any], races: bool) -> None:
    ask = {"model": "m", "prompt": "x", "stream": True, **more}
    job = Site().job(ask, path=path, drives_legs=True)
    assert job.request.has_side_effects is not races
    assert Site().job(ask, path=path).request.has_side_effects, "Envoy races nobody"
