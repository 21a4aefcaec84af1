"""Who cannot take a request, who is a last resort, and when a request waits instead.

Requests end where a pod terminates, and new ones go there as the last resort only.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Ending,
    Failure,
    FirstToken,
    Joined,
    Lack,
    RequestEnded,
    Routed,
    RouteTick,
    Scraped,
)
from kvstore.routing.policy import parse
from kvstore.routing.rows import REST_NS
from kvstore.routing.values import LoadSample, PrefixAnswer, RouteRequest, WorkerWord
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    comes_back,
    core_of,
    explain,
    fail,
    goes_down,
    hbm,
    rejected,
    request,
    routed,
    spec,
    turn,
)

CONTEXT = {"m": 8000}
FLAWS = ["rests", "breaker", "down", "media", "context"]
"""In the order in which they are tried."""
ORDER_OF_COMING = ["media", "breaker", "rests", "down", "context"]
"""In which a worker can get several: what is down gets no request that could fail."""


def flawed(*flaws: str, policy: Any = None) -> RouterCore:
    """Workers w0, w1, … each with its flaws, separated by spaces, for `special`; empty: none."""
    contexts = [CONTEXT if "context" in flaw else {} for flaw in flaws]
    specs = [spec(n, context_tokens=contexts[n]) for n in range(len(flaws))]
    core = core_of(*specs, policy=policy)
    for worker, its in ((f"w{number}", flaw.split()) for number, flaw in enumerate(flaws)):
        for flaw in sorted(its, key=ORDER_OF_COMING.index):
            if flaw == "down":
                goes_down(core, worker)
            for n in range({"breaker": 3, "media": 1, "rests": 1}.get(flaw, 0)):
                name = f"{worker} {flaw} {n}"
                routed(arrive(core, request(name, 16, subset=(worker,), media={"image": 1})))
                failure = {"breaker": Failure.STATUS, "media": Failure.REFUSED}
                lack = Lack.MEDIA if flaw == "media" else None
                turn(core, fail(name, failure.get(flaw, Failure.BUSY), lack=lack))
    assert not core.open
    return core


def special(name: str, **more: Any) -> RouteRequest:
    """A request with images and a long prompt."""
    return request(name, 8192, media={"image": 1}, **more)


# ── last resorts ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_worker_without_a_flaw_comes_first_and_whoever_is_left_is_a_last_resort(
    flaw: str,
) -> None:
    core = flawed(flaw, "")
    for n in range(3):
        sent = routed(arrive(core, special(f"r{n}"), answer(hbm(0, 512))))
        assert (sent.worker, sent.draft.plain.filtered) == ("w1", {"w0": flaw})
        assert "last-resort" not in sent.draft.plain.degraded
    sent = routed(arrive(flawed(flaw), special("r")))
    assert sent.worker == "w0"
    assert sent.draft.plain.degraded[-1] == "last-resort"


@pytest.mark.parametrize(("mild", "bad"), list(pairwise(FLAWS)))
def test_the_mildest_flaw_is_tried_first_and_the_next_one_after_it(mild: str, bad: str) -> None:
    core = flawed(bad, mild)
    likes_w0 = answer(hbm(0, 512))
    sent = routed(arrive(core, special("r"), likes_w0))
    assert (sent.worker, sent.draft.plain.filtered) == ("w1", {"w0": bad})
    again = routed(turn(core, fail("r", Failure.CONNECT))[0])
    assert (again.worker, again.draft.plain.filtered) == ("w0", {"w1": "failed-before"})
    assert rejected(turn(core, fail("r", Failure.CONNECT))[0]).status == 503


@pytest.mark.parametrize(("mild", "bad"), list(combinations(FLAWS, 2)))
def test_of_several_flaws_of_a_worker_the_worst_counts(mild: str, bad: str) -> None:
    """Whoever has both comes after whoever has what lies between, or is no worse in the worst."""
    between = FLAWS[FLAWS.index(mild) : FLAWS.index(bad)][-1]
    core = flawed(f"{mild} {bad}", between)
    sent = routed(arrive(core, special("r"), answer(hbm(0, 512))))
    assert (sent.worker, sent.draft.plain.filtered) == ("w1", {"w0": bad})


@pytest.mark.parametrize("flaw", ["media", "context"])
def test_of_two_that_lack_the_same_the_one_that_is_up_comes_first(flaw: str) -> None:
    core = flawed(f"down {flaw}", flaw)
    sent = routed(arrive(core, special("r"), answer(hbm(0, 512))))
    assert (sent.worker, sent.draft.plain.filtered) == ("w1", {"w0": flaw})
    again = routed(turn(core, fail("r", Failure.CONNECT))[0])
    assert (again.worker, again.draft.plain.filtered) == ("w0", {"w1": "failed-before"})


@pytest.mark.parametrize("flaw", FLAWS)
def test_no_last_resort_is_tried_while_waiting_can_help(flaw: str) -> None:
    core = flawed(flaw, "", policy=parse({"limits": {"running_max": 1}}))
    assert routed(arrive(core, special("first"))).worker == "w1"
    assert arrive(core, special("r")) is None
    [sent] = turn(core, RequestEnded("first", Ending.DONE))
    assert routed(sent).worker == "w1"
    assert "last-resort" not in routed(sent).draft.plain.degraded


@pytest.mark.parametrize("bad", FLAWS[2:])
def test_a_mild_last_resort_that_has_no_room_is_waited_for(bad: str) -> None:
    core = flawed(bad, "breaker", policy=parse({"limits": {"running_max": 1}}))
    assert routed(arrive(core, special("a"))).worker == "w1"
    assert arrive(core, special("b")) is None
    [sent] = turn(core, RequestEnded("a", Ending.DONE))
    assert routed(sent).worker == "w1"


def test_what_no_engine_can_change_is_no_last_resort() -> None:
    policy = parse({"draining": ["w0"], "models": {"m": {"pools": [{"pool": "p"}]}}})
    core = core_of(spec(0), spec(1, models=("other",)), spec(2), policy=policy)
    assert rejected(arrive(core, request("a", subset=("w0", "w1")))).status == 503
    assert rejected(arrive(core, request("b", subset=()))).status == 503
    adapters = {"models": {"m": {"pools": [{"pool": "p"}], "adapters": ["lora"]}}}
    core.adopt(parse(adapters), S)
    refused = rejected(arrive(core, request("c", model="lora")))
    assert (refused.status, refused.reason) == (503, "rejected-no-endpoints")


def test_what_is_down_and_lacks_something_is_still_found_when_it_is_back() -> None:
    core = flawed("down", "media")
    assert routed(arrive(core, special("a"))).worker == "w0"
    comes_back(core, "w0")
    sent = routed(arrive(core, special("b")))
    assert (sent.worker, sent.draft.plain.filtered) == ("w0", {"w1": "media"})


# ── contexts ─────────────────────────────────────────────────────────────────────────────────────


def test_prompt_and_output_must_fit_into_the_context_of_their_model() -> None:
    core = core_of(spec(0, context_tokens={"m": 1000, "big": 9000}), spec(1))
    likes_w0 = answer(hbm(0, 62))

    def goes_to(name: str, tokens: int, **more: Any) -> str:
        sent = routed(arrive(core, request(name, tokens, **more), likes_w0))
        core.step(RequestEnded(name, Ending.DONE), S)
        return sent.worker

    assert goes_to("a", 1000) == "w0", "an output without a limit ends where the context does"
    both = ("w0", "w1")
    assert goes_to("b", 900, output_tokens_max=100, subset=both) == "w0"
    assert goes_to("c", 900, output_tokens_max=101) == "w1"
    assert goes_to("d", 1001) == "w1"
    assert goes_to("e", 1001, model="big") == "w0"
    assert goes_to("f", 1001, model="unknown") == "w0"


def counted(core: RouterCore, tokens: int, prefix: PrefixAnswer | None = None) -> int:
    receipt = explain(core, request("x", tokens, output_tokens_max=0), prefix, S)
    return receipt.prompt_tokens


def test_a_prompt_counts_as_no_more_than_the_longest_context_of_its_pool() -> None:
    """Engines refuse a longer one at once: it is no reason to expect minutes of prefill."""
    long, short = spec(0, context_tokens={"m": 9000}), spec(1, context_tokens={"m": 1000})
    core = core_of(long, short, spec(2, pool="other", models=("other",)))
    assert counted(core, 8000) == 8000
    assert counted(core, 1_000_000) == 9000
    assert counted(core, 1_000_000, answer(hbm(0, 700))) == 9000
    receipt = routed(arrive(core, request("r", 100_000))).draft.receipt()
    assert receipt.predicted_s == pytest.approx(1.3, abs=0.3)
    assert [flight.tokens for flight in core.fleet.flights] == [9000 + 256]
    assert counted(core_of(long, spec(1)), 1_000_000) == 1_000_000, "one is not known"


def test_an_objective_is_of_what_an_engine_would_compute() -> None:
    classes = {"interactive": {"rank": 1, "ttft_s": 2.0}}
    core = core_of(spec(0, context_tokens={"m": 8000}), policy=parse({"classes": classes}))
    sent = routed(arrive(core, request("r", 1_000_000)))
    assert "last-resort" in sent.draft.plain.degraded, "its engine says no, and how much it takes"


# ── memory, queue, running ───────────────────────────────────────────────────────────────────────


def report(core: RouterCore, now_ns: int = S, worker: str = "w0", **numbers: Any) -> list[Any]:
    sample = LoadSample(**{"waiting": 0, "running": 0, "memory_used": 0.9, **numbers})
    return turn(core, Scraped(worker, sample, now_ns), now_ns)


def test_memory_drops_a_worker_only_while_requests_wait_in_its_engine() -> None:
    core = core_of(spec(0, memory_tokens=10_000), spec(1, memory_tokens=100_000))
    report(core, waiting=0)
    report(core, worker="w1", memory_used=0.0)
    assert routed(arrive(core, request("a", 8000, subset=("w0",)))).worker == "w0"
    report(core, worker="w1", waiting=5, memory_used=0.0)
    assert routed(arrive(core, request("x", 8000, subset=("w0",)))).worker == "w0"
    report(core, waiting=1)
    sent = routed(arrive(core, request("b", 4000), answer(hbm(0, 100))))
    assert (sent.worker, sent.draft.plain.filtered) == ("w1", {"w0": "memory"})
    assert arrive(core, request("c", 4000, subset=("w0",))) is None
    [sent, *_] = report(core, 2 * S, waiting=0)
    assert routed(sent).request_id == "c"


def test_a_prompt_that_its_engine_holds_needs_no_more_memory() -> None:
    core = core_of(spec(0, memory_tokens=10_000))
    report(core, waiting=1, memory_used=0.8)
    cached = request("a", 4000, output_tokens_max=16)
    assert routed(arrive(core, cached, answer(hbm(0, 250)))).worker == "w0"
    report(core, waiting=1, memory_used=0.8)
    assert arrive(core, request("b", 4000, output_tokens_max=16), answer()) is None


@pytest.mark.parametrize("is_first_token", [True, False])
def test_an_own_request_that_left_the_engines_queue_makes_room(is_first_token: bool) -> None:
    core = core_of(spec(0, memory_tokens=10_000))
    routed(arrive(core, request("a", 8000)))
    report(core, waiting=1)
    assert arrive(core, request("b", 4000)) is None
    event = FirstToken("a") if is_first_token else RequestEnded("a", Ending.DONE)
    [sent] = turn(core, event)
    assert routed(sent).request_id == "b"


def test_a_request_larger_than_memory_goes_to_an_engine_that_has_nobody_waiting() -> None:
    core = core_of(spec(0, memory_tokens=10_000))
    for n in range(3):
        assert routed(arrive(core, request(f"r{n}", 50_000))).worker == "w0"


def test_nobody_waits_for_an_engine_whose_metrics_cannot_be_read_any_more() -> None:
    core = core_of(spec(0, memory_tokens=10_000))
    report(core, waiting=10, memory_used=0.97)
    assert arrive(core, request("large", 9800)) is None, "it would need all of its memory"
    assert arrive(core, request("behind", 16)) is None
    assert turn(core, RouteTick(), 3 * S) == [], "the last numbers are two seconds old"
    sent = turn(core, RouteTick(), 13 * S)
    assert [routed(each).request_id for each in sent] == ["large", "behind"]


def test_memory_that_is_not_known_drops_nobody() -> None:
    core = core_of(spec(0, memory_tokens=0))
    report(core, waiting=5, memory_used=1.0)
    assert routed(arrive(core, request("r", 50_000))).worker == "w0"


@pytest.mark.parametrize("limit", ["queue_max", "running_max"])
def test_limits_hold_requests_back(limit: str) -> None:
    core = core_of(spec(0), policy=parse({"limits": {limit: 2}}))
    for n in range(2):
        routed(arrive(core, request(f"r{n}")))
    assert arrive(core, request("held")) is None
    freed = turn(core, FirstToken("r0"))
    assert len(freed) == (limit == "queue_max")
    assert len(turn(core, RequestEnded("r0", Ending.DONE))) == (limit == "running_max")


# ── keys that differ ─────────────────────────────────────────────────────────────────────────────


def test_a_red_worker_keeps_its_prefixes_where_there_is_no_index() -> None:
    """Then there is only what was sent there, and that is the same whatever the keys are."""
    core = core_of(spec(0), spec(1))
    first = routed(arrive(core, request("a", prefix="x")))
    core.step(RequestEnded("a", Ending.DONE), S)
    for number in (0, 1):
        core.step(Joined(spec(number, is_red=True)), S)
    for n in range(5):
        its = request(f"r{n}", prefix="x", load_only={"w0": "other keys"})
        again = routed(arrive(core, its, now_ns=(30 + n) * S))
        assert again.worker == first.worker
        assert max(again.draft.receipt().features["hbm"]) > 4000
        core.step(RequestEnded(f"r{n}", Ending.DONE), (30 + n) * S)
    blind = routed(
        arrive(core, request("b", prefix="x"), answer(hbm(0, 256)), 36 * S)
    ).draft.receipt()
    assert blind.features["hbm"] == [0, 0]


# ── pods that terminate ──────────────────────────────────────────────────────────────────────────


ALL = answer(hbm(0, 256))
"""The prompt is in the KV cache of w0."""


def terminates(core: RouterCore, number: int) -> None:
    turn(core, Joined(spec(number, is_terminating=True)))


def goes(core: RouterCore, name: str) -> Routed:
    return routed(arrive(core, request(name), ALL))


@pytest.mark.parametrize("policy", ["cost", "least-load", "session", "round-robin"])
def test_it_gets_nothing_while_another_worker_is_there(policy: str) -> None:
    core = core_of(spec(0), spec(1), policy=parse({"policy": policy}))
    terminates(core, 0)
    assert core.fleet.workers[0].word is WorkerWord.DRAINING
    for n in range(6):
        sent = goes(core, f"r{n}")
        assert (sent.worker, sent.draft.plain.filtered) == ("w1", {"w0": "terminating"})
        assert sent.fallbacks == ()


def test_its_requests_end_there() -> None:
    core = core_of(spec(0), spec(1))
    assert goes(core, "a").worker == "w0"
    terminates(core, 0)
    assert core.fleet.in_flight("w0") == 1
    turn(core, FirstToken("a"))
    turn(core, RequestEnded("a", Ending.DONE, output_tokens=3))
    assert core.fleet.in_flight("w0") == 0
    turn(core, Joined(spec(0)))
    assert goes(core, "b").worker == "w0", "another pod of its name"


def test_conversations_move() -> None:
    core = core_of(spec(0), spec(1), policy=parse({"policy": "session"}))
    home = routed(arrive(core, request("a", session="s"))).worker
    number = int(home[1:])
    terminates(core, number)
    other = routed(arrive(core, request("b", session="s"))).worker
    assert other != home
    for name in "ab":
        turn(core, RequestEnded(name, Ending.DONE))
    turn(core, Joined(spec(number)))
    assert routed(arrive(core, request("c", session="s"))).worker == other, "and stay"


def test_it_is_the_last_resort_before_one_that_is_down() -> None:
    core = core_of(spec(0), spec(1))
    terminates(core, 0)
    for n in range(3):
        assert goes(core, f"a{n}").worker == "w1"
    for n in range(3):
        core.step(fail(f"a{n}"), S)
    assert core.fleet.workers[1].breaker.is_open
    assert goes(core, "b").worker == "w1", "which is there, and has one more try"
    goes_down(core, "w1")
    sent = goes(core, "c")
    assert (sent.worker, sent.draft.plain.degraded) == ("w0", ("last-resort",))
    goes_down(core, "w0")
    assert core.fleet.workers[0].word is WorkerWord.DOWN
    assert goes(core, "d").worker in ("w0", "w1"), "nothing is worse than an error"


def test_what_the_policy_drains_gets_nothing_all_the_same() -> None:
    core = core_of(spec(0), policy=parse({"draining": ["w0"]}))
    terminates(core, 0)
    assert arrive(core, request("a")).reason == "rejected-no-endpoints"  # type: ignore[union-attr]


# ── workers that are full by their own word ──────────────────────────────────────────────────────


def test_a_worker_that_is_full_by_its_own_word_is_left_alone_for_a_moment() -> None:
    core = core_of(spec(0), spec(1))
    first = routed(arrive(core, request("r")))
    other = routed(turn(core, fail("r", Failure.BUSY))[0])
    assert other.worker != first.worker
    core.step(RequestEnded("r", Ending.DONE), S)
    for n in range(8):
        again = routed(arrive(core, request(f"s{n}"), now_ns=S + REST_NS - 1))
        assert again.worker == other.worker
        core.step(FirstToken(f"s{n}"), S + REST_NS - 1)
    late = routed(arrive(core, request("t"), now_ns=S + REST_NS))
    assert late.worker == first.worker, "it has nothing to do"
    core.step(FirstToken("t"), S + REST_NS)
    assert not core.fleet.doubtful


def test_nobody_waits_for_a_worker_that_rests() -> None:
    """A client whose requests are refused with 429 would hold up all others."""
    core = core_of(spec(0), spec(1), spec(2))
    for n in range(2):
        routed(arrive(core, request(f"r{n}", subset=(f"w{n}",))))
        turn(core, fail(f"r{n}", Failure.BUSY))
    goes_down(core, "w2")
    sent = routed(arrive(core, request("other")))
    assert sent.worker in ("w0", "w1")
    assert sent.draft.plain.filtered == {"w2": "down"}
    assert "last-resort" in sent.draft.plain.degraded


def test_a_rest_is_as_long_as_the_last_word_says() -> None:
    core = core_of(spec(0), spec(1))
    for n in range(2):
        routed(arrive(core, request(f"r{n}", subset=("w0",))))
    turn(core, fail("r0", Failure.BUSY))
    turn(core, fail("r1", Failure.BUSY), S + 100 * MS)
    for now_ns, filtered in ((S + REST_NS, {"w0": "rests"}), (S + 100 * MS + REST_NS, {})):
        sent = routed(arrive(core, request(f"at {now_ns}"), now_ns=now_ns))
        assert sent.draft.plain.filtered == filtered
