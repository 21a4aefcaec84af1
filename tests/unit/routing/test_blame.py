"""Whose fault a failure is: workers are found that fail by themselves, and requests that would
make any worker fail harm nobody."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.routing import legs
from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Ending,
    Failure,
    Fault,
    FirstToken,
    Lack,
    Late,
    Leg,
    PrefillDone,
    Raced,
    RaceOver,
    RequestEnded,
    RouteCommand,
    Routed,
)
from kvstore.routing.legs import REFUSALS_MAX
from kvstore.routing.values import WorkerRole
from tests.kit.routing_check import check
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    comes_back,
    core_of,
    explain,
    fail,
    fault,
    goes_down,
    hbm,
    prefiller,
    rejected,
    request,
    routed,
    spec,
    turn,
)

SUSPECT = [Failure.ERROR, Failure.BROKEN]
COUNTLESS = [Failure.CONNECT, Failure.SILENT, Failure.BUSY, Failure.REFUSED]


def faults(core: RouterCore) -> dict[str, int]:
    """Faults of each worker since it answered last."""
    return {s.spec.worker: s.breaker._failures for s in core.fleet.workers}


def is_open(core: RouterCore, worker: str) -> bool:
    return core.fleet.workers[core.fleet.row_of[worker]].breaker.is_open


def serve(core: RouterCore, name: str, now_ns: int = S, **more: Any) -> str:
    """A request that is served. Returns the worker."""
    sent = routed(arrive(core, request(name, 160, **more), now_ns=now_ns))
    core.step(FirstToken(name), now_ns)
    core.step(RequestEnded(name, Ending.DONE, None, 5), now_ns)
    return sent.worker


def at(worker: str) -> tuple[str, ...]:
    return (worker,)


# ── what counts ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("failure", COUNTLESS)
def test_what_is_no_fault_of_a_worker_opens_no_breaker(failure: Failure) -> None:
    core = core_of(spec(0), spec(1))
    for n in range(10):
        serve(core, f"s{n}", n * S, subset=at("w1"))
        routed(arrive(core, request(f"r{n}", subset=at("w0")), now_ns=n * S))
        [last] = turn(core, fail(f"r{n}", failure), n * S)
        assert isinstance(last, Routed) == (failure is Failure.SILENT), "there it goes back to"
        core.step(RequestEnded(f"r{n}", Ending.ABORTED), n * S)
    assert faults(core) == {"w0": 0, "w1": 0}
    assert core._retries_left == 256


def test_a_4xx_is_an_answer_and_a_success_of_its_worker() -> None:
    core = core_of(spec(0))
    for n in range(50):
        routed(arrive(core, request(f"r{n}")))
        core.step(RequestEnded(f"r{n}", Ending.REFUSED), S)
        assert core.fleet.workers[0].succeeded_ns == S
    assert faults(core) == {"w0": 0}


# ── requests that may be the cause ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("failure", SUSPECT)
@pytest.mark.parametrize("workers", [2, 5])
def test_requests_that_fail_everywhere_end_at_the_second_worker_and_harm_none(
    failure: Failure, workers: int
) -> None:
    core = core_of(*(spec(n) for n in range(workers)))
    for n in range(5):
        assert serve(core, f"good{n}", (n + 1) * S, subset=at("w1")) == "w1"
        tried = [routed(arrive(core, request(f"r{n}"), answer(hbm(0, 250)))).worker]
        tried.append(routed(turn(core, fail(f"r{n}", failure))[0]).worker)
        assert len(set(tried)) == 2
        [last] = turn(core, fail(f"r{n}", failure))
        assert (rejected(last).status, rejected(last).reason) == (502, "rejected-attempts")
    assert set(faults(core).values()) == {0}
    assert core._retries_left == 256, "attempts of others have nothing to do with it"
    serve(core, "good")


@pytest.mark.parametrize("failure", SUSPECT)
def test_a_worker_that_always_fails_is_found_when_another_one_serves(failure: Failure) -> None:
    core = core_of(spec(0), spec(1))
    for n in range(3):
        assert not is_open(core, "w0")
        prefix = answer(hbm(0, 250))
        assert routed(arrive(core, request(f"r{n}"), prefix)).worker == "w0"
        assert routed(turn(core, fail(f"r{n}", failure, why="status 500"))[0]).worker == "w1"
        core.step(FirstToken(f"r{n}"), S)
        core.step(RequestEnded(f"r{n}", Ending.DONE), S)
    assert is_open(core, "w0")
    assert core.fleet.workers[0].why == "status 500"
    assert routed(arrive(core, request("x"), answer(hbm(0, 250)))).worker == "w1"


def test_an_answer_that_comes_whole_proves_it_as_well() -> None:
    core = core_of(spec(0), spec(1))
    for n in range(3):
        routed(arrive(core, request(f"r{n}", is_streamed=False), answer(hbm(0, 250))))
        turn(core, fail(f"r{n}", Failure.ERROR))
        core.step(RequestEnded(f"r{n}", Ending.DONE), S)
    assert is_open(core, "w0")


@pytest.mark.parametrize("failure", SUSPECT)
def test_one_worker_alone_is_at_fault_if_others_have_served_since_it_did(failure: Failure) -> None:
    core = core_of(*(spec(n, models=("m",)) for n in range(2)), spec(2, pool="q", models=("q",)))

    def try_at_w0(name: str, now_ns: int) -> int:
        routed(arrive(core, request(name, subset=at("w0")), now_ns=now_ns))
        rejected(turn(core, fail(name, failure), now_ns)[0])
        return faults(core)["w0"]

    assert try_at_w0("a", S) == 0, "nobody has ever served anything"
    core.fleet.answered("w2", 2 * S, is_whole=True)
    assert try_at_w0("b", 2 * S) == 0, "another pool proves nothing"
    serve(core, "good", 3 * S, subset=at("w1"))
    assert try_at_w0("c", 3 * S) == 1
    serve(core, "own", 4 * S, subset=at("w0"))
    assert try_at_w0("d", 4 * S) == 0, "it serves others"


def test_an_answer_that_broke_counts_if_others_have_served_since() -> None:
    core = core_of(spec(0), spec(1))
    for n, now_ns in enumerate((S, 2 * S)):
        routed(arrive(core, request(f"r{n}", subset=at("w0")), now_ns=now_ns))
        core.step(FirstToken(f"r{n}"), now_ns)
        if n:
            serve(core, "good", now_ns + MS, subset=at("w1"))
        rejected(turn(core, fail(f"r{n}", Failure.BROKEN, has_streamed=True), now_ns + MS)[0])
        assert faults(core)["w0"] == n


def test_a_race_that_one_of_two_wins_blames_the_one_that_failed() -> None:
    core = core_of(spec(0), spec(1))
    first = routed(arrive(core, request("r", 160, has_side_effects=False)))
    assert isinstance(turn(core, Late("r"), 20 * S)[0], Raced)
    core.step(RaceOver("r", first.worker, Fault(Failure.BROKEN)), 20 * S)
    core.step(FirstToken("r"), 20 * S)
    other = "w1" if first.worker == "w0" else "w0"
    assert faults(core) == {first.worker: 1, other: 0}


# ── requests that are refused ────────────────────────────────────────────────────────────────────


def refusals(core: RouterCore, name: str, **more: Any) -> list[RouteCommand]:
    """Attempts until the end, each of them refused."""
    found: list[RouteCommand] = [routed(arrive(core, request(name, **more)))]
    while isinstance(found[-1], Routed):
        found += turn(core, fail(name, Failure.REFUSED))
    return found


def test_a_request_that_three_workers_refuse_is_not_asked_of_others() -> None:
    core = core_of(*(spec(n) for n in range(5)))
    *tried, last = refusals(core, "r")
    assert (len(tried), REFUSALS_MAX) == (3, 3)
    assert (rejected(last).status, rejected(last).reason) == (502, "rejected-attempts")


def test_what_one_worker_keeps_is_asked_of_all() -> None:
    core = core_of(*(spec(n) for n in range(5)))
    *tried, last = refusals(core, "r", is_bound_to_one=True)
    assert len({routed(each).worker for each in tried}) == 5
    assert rejected(last).status == 502


def test_a_model_without_media_is_remembered_by_the_word_of_its_engine() -> None:
    core = core_of(spec(0), spec(1))
    likes_w0 = answer(hbm(0, 250))
    assert routed(arrive(core, request("a", media={"image": 1}), likes_w0)).worker == "w0"
    [again] = turn(core, fail("a", Failure.REFUSED, lack=Lack.MEDIA))
    assert routed(again).worker == "w1"
    later = routed(arrive(core, request("b", media={"image": 1}), likes_w0))
    assert (later.worker, later.draft.plain.filtered) == ("w1", {"w0": "media"})
    text = request("c", subset=("w0", "w1"))
    assert routed(arrive(core, text, likes_w0)).worker == "w0", "text is another matter"
    other = request("d", model="m2", media={"image": 1})
    assert routed(arrive(core, other, likes_w0)).worker == "w0", "and so is another model"
    goes_down(core, "w0")
    comes_back(core, "w0")
    again = routed(arrive(core, request("e", media={"image": 1}), likes_w0))
    assert again.worker == "w0", "it may be another engine now"


def test_names_that_clients_invent_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "MODELS_MAX", 3)
    core = core_of(spec(0), spec(1))
    for number in range(9):
        routed(arrive(core, request(f"r{number}", model=f"m{number}", media={"image": 1})))
        turn(core, fail(f"r{number}", Failure.REFUSED, lack=Lack.MEDIA))
    states = [core.fleet.state(name) for name in ("w0", "w1")]
    assert 3 <= sum(len(state.without_media) for state in states if state is not None) <= 6


# ── claims of callers, and gateways ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("failure", list(Failure))
@pytest.mark.parametrize("has_streamed", [False, True])
def test_a_claim_counts_for_its_own_request_only(failure: Failure, has_streamed: bool) -> None:
    core = core_of(spec(0), spec(1))
    serve(core, "good", subset=at("w1"))
    for n in range(5):
        sent = routed(arrive(core, request(f"r{n}"), answer(hbm(0, 250))))
        assert sent.worker == "w0", "it does not even rest"
        claim = fail(
            f"r{n}", failure, is_claim=True, has_streamed=has_streamed, lack=Lack.MEDIA, why="x"
        )
        [command] = turn(core, claim)
        if has_streamed:
            assert rejected(command).status == 502
        else:
            assert routed(command).worker == "w1"
            core.step(RequestEnded(f"r{n}", Ending.DONE), S)
    assert faults(core)["w0"] == 0
    assert not core.fleet.doubtful
    assert not core.fleet.workers[0].without_media


def behind_a_gateway(core: RouterCore, name: str, **end: Any) -> None:
    assert routed(arrive(core, request(name), answer(hbm(0, 250)))).worker == "w0"
    core.step(RequestEnded(name, **end), S)
    check(core)


def test_a_gateway_that_was_served_elsewhere_blames_the_worker_that_was_chosen() -> None:
    core = core_of(spec(0), spec(1))
    for _ in range(3):
        end = {"end": Ending.DONE, "served_by": "w1", "why": "Envoy was served by w1"}
        assert not is_open(core, "w0")
        behind_a_gateway(core, "r", **end)
    assert is_open(core, "w0")
    assert core.fleet.workers[0].why == "Envoy was served by w1"
    assert core.fleet.workers[1].succeeded_ns == S


def test_a_worker_that_served_a_gateway_is_not_blamed() -> None:
    core = core_of(spec(0), spec(1))
    for _ in range(5):
        behind_a_gateway(core, "r", end=Ending.DONE, served_by="w0")
        behind_a_gateway(core, "r", end=Ending.DONE)
    assert faults(core) == {"w0": 0, "w1": 0}


def test_a_failure_behind_a_gateway_counts_where_others_have_served() -> None:
    core = core_of(spec(0), spec(1))
    behind_a_gateway(core, "r", end=Ending.FAILED, why="status 500 behind Envoy")
    assert faults(core)["w0"] == 0
    serve(core, "good", subset=at("w1"))
    behind_a_gateway(core, "s", end=Ending.FAILED, why="status 500 behind Envoy")
    behind_a_gateway(core, "t", end=Ending.FAILED, served_by="w1", why="status 500")
    assert faults(core) == {"w0": 1, "w1": 0}


def test_a_row_of_requests_that_fail_behind_a_gateway_counts_once() -> None:
    """Each of them may fail everywhere: what others answered before says so once."""
    core = core_of(spec(0), spec(1))
    serve(core, "ours", S, subset=at("w0"))
    serve(core, "theirs", 2 * S, subset=at("w1"))

    def fails(name: str, now_ns: int) -> None:
        routed(arrive(core, request(name, subset=at("w0")), now_ns=now_ns))
        core.step(RequestEnded(name, Ending.FAILED, why="status 500"), now_ns)

    for second in range(3, 8):
        fails(f"r{second}", second * S)
    assert faults(core) == {"w0": 1, "w1": 0}
    for second in (8, 10):
        serve(core, f"good{second}", second * S, subset=at("w1"))
        fails(f"r{second}", (second + 1) * S)
    assert is_open(core, "w0"), "others answer, again and again, and it never does"


def test_cached_tokens_at_another_worker_say_nothing_of_the_one_that_was_chosen() -> None:
    core = core_of(spec(0), spec(1))
    end = {"end": Ending.DONE, "cached_tokens": 0}
    behind_a_gateway(core, "a", served_by="w1", **end)
    assert explain(core, request("x"), None, S).features["hit_ratio"] == [1, 1]
    behind_a_gateway(core, "b", **end)
    assert explain(core, request("x"), None, S).features["hit_ratio"][0] < 1


# ── prefillers ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("failure", [*Failure, None])
def test_the_result_of_a_remote_prefill_counts_for_its_prefiller(failure: Failure | None) -> None:
    core = core_of(spec(0, role=WorkerRole.DECODE), prefiller(10))
    for n in range(3):
        now_ns = (n + 1) * S  # one that was busy has rested
        sent = routed(arrive(core, request(f"r{n}"), now_ns=now_ns))
        assert sent.prefill_worker == "w10"
        core.step(PrefillDone(f"r{n}", fault(failure)), now_ns)
        core.step(FirstToken(f"r{n}"), now_ns)
        core.step(RequestEnded(f"r{n}", Ending.DONE), now_ns)
        check(core)
    own = (Failure.STATUS, Failure.ERROR, Failure.BROKEN)
    assert is_open(core, "w10") == (failure in own), "the request was served without it"
    assert (core.fleet.workers[1].succeeded_ns >= 0) == (failure is None)
    assert faults(core)["w0"] == 0


def test_a_prefiller_that_always_fails_is_found_when_the_request_is_served_without_it() -> None:
    core = core_of(spec(0, role=WorkerRole.DECODE), prefiller(10))
    for n in range(3):
        assert routed(arrive(core, request(f"r{n}"))).prefill_worker == "w10"
        local = turn(core, fail(f"r{n}", Failure.ERROR, Leg.PREFILL))[0]
        assert routed(local).prefill_worker is None
        core.step(FirstToken(f"r{n}"), S)
        core.step(RequestEnded(f"r{n}", Ending.DONE), S)
    assert is_open(core, "w10")
    assert routed(arrive(core, request("x"))).prefill_worker is None


# ── what pages show ──────────────────────────────────────────────────────────────────────────────


def test_attempts_and_failures_are_counted_by_worker() -> None:
    core = core_of(spec(0))
    state = core.fleet.workers[0]
    for n, failure in enumerate(Failure):
        routed(arrive(core, request(f"r{n}"), now_ns=(n + 1) * S))
        turn(core, fail(f"r{n}", failure), (n + 1) * S)
        core.step(RequestEnded(f"r{n}", Ending.ABORTED), (n + 1) * S)
    assert state.request_count == len(Failure) + 1, "to a silent one it goes back"
    assert state.failure_count == len(Failure) - 2, "busy and refused are no failures"


def test_an_engine_that_cuts_every_stream_gets_no_more_of_them() -> None:
    """Its first bytes are no answers."""
    core = core_of(spec(0), spec(1))
    for n in range(3):
        now_ns = (n + 1) * S
        serve(core, f"good{n}", now_ns, subset=at("w1"))
        routed(arrive(core, request(f"r{n}", subset=at("w0")), now_ns=now_ns))
        core.step(FirstToken(f"r{n}"), now_ns + MS)
        turn(core, fail(f"r{n}", Failure.BROKEN, has_streamed=True), now_ns + 2 * MS)
    for n in range(10):
        sent = routed(arrive(core, request(f"s{n}"), now_ns=3 * S + 3 * MS))
        assert (sent.worker, sent.draft.plain.filtered) == ("w1", {"w0": "breaker"})
