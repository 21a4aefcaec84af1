"""Several prompts in one request: each has a chain of its own, and hits are added up."""

from __future__ import annotations

from kvstore.routing.core import RouterCore
from kvstore.routing.events import Ending, Failure, FirstToken, RequestEnded
from kvstore.routing.values import PrefixAnswer, RouteRequest
from tests.unit.routing.fleets import (
    S,
    answer,
    arrive,
    core_of,
    explain,
    fail,
    hbm,
    keys,
    request,
    routed,
    spec,
    turn,
)

BLOCKS = 60
"""Of each prompt: 960 tokens, …"""
HIT = 896
"""… of which the tree remembers so many: one key in 128."""


def batch(name: str, *prompts: str) -> RouteRequest:
    chains = b"".join(keys(each, BLOCKS) for each in prompts)
    parts = (BLOCKS,) * len(prompts)
    return request(name, 16 * BLOCKS * len(prompts), keys=chains, parts=parts)


def single(name: str, prompt: str) -> RouteRequest:
    return request(name, 16 * BLOCKS, prefix=prompt)


def serve(core: RouterCore, its: RouteRequest, worker: str) -> None:
    limited = {"subset": (worker,)}
    fields = {name: getattr(its, name) for name in its.__struct_fields__} | limited
    routed(arrive(core, RouteRequest(**fields)))
    core.step(FirstToken(its.request_id), S)
    core.step(RequestEnded(its.request_id, Ending.DONE), S)


def hits(core: RouterCore, its: RouteRequest, prefix: PrefixAnswer | None = None) -> list[float]:
    return explain(core, its, prefix, 30 * S).features["hbm"]


def test_chains_are_cut_where_each_prompt_ends() -> None:
    its = batch("r", "a", "b", "c")
    assert its.chains == [keys(name, BLOCKS) for name in "abc"]
    assert request("s").chains == [request("s").keys]
    mixed = request("t", keys=keys("a", 2) + keys("b", 3), parts=(2, 0, 3))
    assert mixed.chains == [keys("a", 2), b"", keys("b", 3)]


def test_hits_of_all_prompts_are_added_up() -> None:
    core = core_of(spec(0), spec(1))
    serve(core, single("one", "a"), "w0")
    serve(core, single("two", "b"), "w0")
    serve(core, single("three", "b"), "w1")
    assert hits(core, batch("x", "a", "b", "c")) == [2 * HIT, HIT]
    assert hits(core, batch("y", "c", "b")) == [HIT, HIT], "the second may be there alone"
    assert routed(arrive(core, batch("r", "a", "b"), now_ns=30 * S)).worker == "w0"


def test_what_follows_finds_each_of_the_prompts() -> None:
    core = core_of(spec(0), spec(1))
    serve(core, batch("r", "a", "b"), "w1")
    for prompt in "ab":
        assert hits(core, single("x", prompt)) == [0, HIT]
    assert hits(core, single("x", "c")) == [0, 0]


def test_without_parts_all_keys_are_one_chain() -> None:
    core = core_of(spec(0))
    chain = keys("a", BLOCKS) + keys("b", BLOCKS)
    serve(core, request("r", 1920, keys=chain), "w0")
    assert hits(core, single("x", "a")) == [HIT]
    assert hits(core, request("y", 1920, keys=keys("c", BLOCKS) + keys("b", BLOCKS))) == [0]


def test_the_index_answers_for_all_prompts_together() -> None:
    core = core_of(spec(0), spec(1))
    assert hits(core, batch("x", "a", "b"), answer(hbm(1, 100))) == [0, 1600]
    assert hits(core, batch("x", "a", "b"), answer(hbm(1, 120))) == [0, 1919]


def test_what_was_just_sent_counts_beside_the_index() -> None:
    core = core_of(spec(0))
    serve(core, batch("r", "a", "b"), "w0")
    features = explain(core, batch("x", "b", "a"), answer(), 2 * S).features
    assert features["hbm"] == [2 * HIT]
    assert hits(core, batch("x", "b", "a"), answer()) == [0], "later the index knows better"


def test_an_attempt_that_failed_leaves_none_of_its_prompts_behind() -> None:
    core = core_of(spec(0), spec(1))
    serve(core, single("one", "a"), "w0")
    assert routed(arrive(core, batch("r", "a", "b"))).worker == "w0"
    turn(core, fail("r", Failure.CONNECT))
    assert [hits(core, single("x", prompt)) for prompt in "ab"] == [[0, HIT], [0, HIT]]
