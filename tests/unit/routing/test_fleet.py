"""Counts of requests at workers: unstreamed ones, engines' own queues, use of memory."""

from __future__ import annotations

from typing import Any

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Ending,
    FirstToken,
    Late,
    Raced,
    RaceOver,
    RequestEnded,
    Routed,
    RouteTick,
    Scraped,
    Shared,
)
from kvstore.routing.values import LoadSample
from kvstore.wire.load import EngineLoad
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    core_of,
    explain,
    hbm,
    request,
    routed,
    spec,
    turn,
)


def quiet(core: RouterCore, name: str, tokens: int = 8000, now_ns: int = S, **more: Any) -> Routed:
    """An unstreamed request: nobody sees its first token."""
    its = request(name, tokens, is_streamed=False, **more)
    return routed(arrive(core, its, now_ns=now_ns))


def counts(core: RouterCore, worker: int = 0) -> tuple[float, float]:
    """Requests before their first token, and after it."""
    features = explain(core, request("x"), None, S).features
    return features["queued"][worker], features["streams"][worker]


def report(
    core: RouterCore, now_ns: int, asked_ns: int, worker: str = "w0", **numbers: Any
) -> None:
    sample = LoadSample(**{"waiting": 0, "running": 0, **numbers})
    turn(core, Scraped(worker, sample, asked_ns), now_ns)


def test_a_request_that_ended_when_the_page_was_asked_for_may_be_in_it() -> None:
    core = core_of(spec(0))
    for name in ("before", "then"):
        routed(arrive(core, request(name, 16)))
        core.step(FirstToken(name), S)
    core.step(RequestEnded("before", Ending.DONE), 2 * S - 1)
    core.step(RequestEnded("then", Ending.DONE), 2 * S)
    report(core, 2 * S + MS, 2 * S, running=2)
    assert counts(core) == (0, 1), "one of them is nobody else's"


# ── requests whose first token nobody sees ───────────────────────────────────────────────────────


def test_its_queue_is_no_backlog_for_those_after_it() -> None:
    core = core_of(spec(0))
    quiet(core, "r", 80_000)
    assert explain(core, request("x"), None, S).features["queue_s"][0] > 10
    turn(core, RouteTick(), 60 * S)
    assert explain(core, request("x"), None, 60 * S).features["queue_s"] == [0]


def test_a_second_worker_is_predicted_by_its_own_time() -> None:
    core = core_of(spec(0), spec(1))
    loads = EngineLoad("w0", 0, 80_000, 0), EngineLoad("w1", 0, 200_000, 0)
    core.step(Shared("other", loads), S)
    first = quiet(core, "r", 16_000, has_side_effects=False)
    assert first.worker == "w0"
    core.step(Shared("other", ()), S)
    [second] = turn(core, Late("r"), 20 * S)
    assert isinstance(second, Raced)
    raced = core.open["r"].race
    assert raced is not None
    assert raced.predicted_s < first.draft.plain.predicted_s / 3, "others were ahead of it there"
    core.step(RaceOver("r", first.worker), 20 * S)
    turn(core, RouteTick(), 20 * S + int(raced.predicted_s * S) - MS)
    assert counts(core, 1) == (1, 0)
    turn(core, RouteTick(), 20 * S + int(raced.predicted_s * S) + MS)
    assert counts(core, 1) == (0, 1)


# ── the engine's own queue ───────────────────────────────────────────────────────────────────────


def waiting(core: RouterCore) -> float:
    return explain(core, request("x"), None, S).features["waiting"][0]


def test_own_requests_that_begin_or_end_leave_the_engines_queue() -> None:
    core = core_of(spec(0))
    for n in range(3):
        routed(arrive(core, request(f"r{n}")))
    report(core, S + 2, S + 1, waiting=2, running=3)
    assert waiting(core) == 2
    turn(core, FirstToken("r0"), S + 3)
    assert waiting(core) == 1
    turn(core, RequestEnded("r1", Ending.ABORTED), S + 3)
    assert waiting(core) == 0
    turn(core, RequestEnded("r2", Ending.ABORTED), S + 3)
    assert waiting(core) == 0, "never less"
    routed(arrive(core, request("s"), now_ns=S + 4))
    assert waiting(core) == 0, "a request that was sent may begin at once"


def test_the_engines_queue_is_forgotten_when_its_numbers_grow_old() -> None:
    core = core_of(spec(0))
    report(core, S, S, waiting=8)
    later = {}
    for seconds in (0, 2, 4, 6, 12):
        features = explain(core, request("x"), None, (1 + seconds) * S).features
        later[seconds] = features["waiting"]
    assert later == {0: [8], 2: [8], 4: [4], 6: [2], 12: [0]}


def test_what_others_have_there_is_what_own_requests_do_not_explain() -> None:
    core = core_of(spec(0))
    for n in range(5):
        routed(arrive(core, request(f"r{n}")))
        if n < 3:
            core.step(FirstToken(f"r{n}"), S)
    cases = [
        # waiting, running → queued, streams, of 2 and 3 own
        (2, 3, 2, 3),
        (4, 3, 4, 3),
        (0, 5, 2, 3),
        (5, 0, 5, 3),
        (2, 9, 2, 9),
        (0, 0, 2, 3),
    ]
    for number, (scraped_waiting, running, queued, streams) in enumerate(cases):
        now_ns = S + (number + 1) * MS
        report(core, now_ns, now_ns, waiting=scraped_waiting, running=running)
        assert counts(core) == (queued, streams)


# ── use of memory ────────────────────────────────────────────────────────────────────────────────


def memory(core: RouterCore) -> float:
    return round(explain(core, request("x"), None, S).features["memory"][0], 6)


def test_the_use_of_memory_is_what_the_engine_says_and_what_was_sent_since() -> None:
    core = core_of(spec(0, memory_tokens=10_000))
    report(core, S, S - MS, memory_used=0.5)
    assert memory(core) == 0.5
    routed(arrive(core, request("a", 1000, output_tokens_max=0), now_ns=S + 1))
    assert memory(core) == 0.6, "it needs a tenth"
    routed(arrive(core, request("b", 2000, output_tokens_max=0), now_ns=S + 2 * MS))
    assert memory(core) == 0.8
    report(core, S + 4 * MS, S + MS, memory_used=0.55)
    assert memory(core) == 0.75, "the first is part of it, the second was sent since"
    turn(core, RequestEnded("a", Ending.DONE), S + 5 * MS)
    assert memory(core) == 0.75, "its engine has not said so yet"
    turn(core, RequestEnded("b", Ending.DONE), S + 5 * MS)
    assert memory(core) == 0.55
    report(core, S + 6 * MS, S + 6 * MS, memory_used=None)
    assert memory(core) == 0.55
    report(core, S + 7 * MS, S + 7 * MS, memory_used=0.1)
    assert memory(core) == 0.1


def test_what_was_sent_to_others_is_no_need_here() -> None:
    core = core_of(spec(0, memory_tokens=10_000), spec(1, memory_tokens=10_000))
    for n in range(2):
        its = request(f"r{n}", 1000, output_tokens_max=0, subset=(f"w{n}",))
        routed(arrive(core, its, now_ns=S + MS))
    report(core, S + 2 * MS, S, memory_used=0.5)
    assert memory(core) == 0.6


def test_blocks_that_the_engine_holds_are_no_need() -> None:
    core = core_of(spec(0, memory_tokens=10_000))
    its = request("a", 1600, output_tokens_max=400)
    routed(arrive(core, its, answer(hbm(0, 50))))
    assert memory(core) == 0.1056, "800 of the prompt, and 256 of an answer as long as most are"


def test_an_answer_to_an_older_question_is_understood() -> None:
    core = core_of(spec(0, memory_tokens=10_000))
    report(core, S, S, memory_used=0.2)
    for n in range(3):
        its = request(f"r{n}", 1000, output_tokens_max=0)
        routed(arrive(core, its, now_ns=S + n * MS))
    report(core, S + 5 * MS, S + 5 * MS, memory_used=0.4)
    assert memory(core) == 0.4
    report(core, S + 6 * MS, S + MS, memory_used=0.3)
    assert memory(core) == 0.5, "two of them were sent since"
    for n in range(3):
        turn(core, RequestEnded(f"r{n}", Ending.DONE), S + 7 * MS)
    assert memory(core) == 0.3


def test_own_requests_that_ended_since_the_page_was_made_are_not_those_of_others() -> None:
    """Else short requests leave a load behind that is not there, until the next page."""
    core = core_of(spec(0))
    for n in range(3):
        quiet(core, f"r{n}")
    for n in range(2):
        core.step(RequestEnded(f"r{n}", Ending.DONE), S + 20 * MS)
    report(core, S + 30 * MS, S + 10 * MS, running=3)
    assert sum(counts(core)) == 1
    report(core, S + 40 * MS, S + 35 * MS, running=3)
    assert sum(counts(core)) == 3, "two of another router"
