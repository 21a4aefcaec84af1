"""Remote prefills in front of scripted engines: both legs, and what faults of either become."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
from msgspec import structs

from kvstore.router.engines.connections import Attempt
from kvstore.router.front import proxy
from kvstore.router.front.legs import beside
from kvstore.router.pages import _metrics
from kvstore.routing import legs, rows
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import (
    PolicyProbes,
    PolicySplit,
    RoutingPolicy,
)
from kvstore.routing.receipts import Receipt
from kvstore.routing.rows import FAULTS_MAX
from tests.amounts import amount, covered
from tests.kit.router_thread import ASK
from tests.kit.routing_check import check
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

REQUESTS = amount(24, nightly=1000)
"""Of each fault."""
SILENCE_S = 1.0
ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
LONG = "a prompt of some length " * 100
Engines = dict[str, VirtualWorker]


@pytest.fixture
def engines(crew: Engines) -> Engines:
    return {name: crew[name] for name in ROLES}


@contextmanager
def routed(
    engines: Engines,
    names: Sequence[str] = "pqde",
    *,
    together: bool,
    silence_s: float = 60.0,
    **settings: Any,
) -> Iterator[VirtualRouter]:
    """A router whose decision core is the real one; nothing is left of any request at the end.
    `together`: nodes are known, so both legs begin at once."""
    policy = RoutingPolicy(
        probes=PolicyProbes(period_s=0.2, silence_s=silence_s),
        # A busy machine would teach the router that remote prefills do not pay.
        split=PolicySplit(is_learned=False),
    )
    flags = [f"{engines[name].flag},role={ROLES[name]}" for name in names]
    core = RouterCore(policy, seed=7)
    with VirtualRouter(flags, core=cast("Any", core), **settings) as router:
        if together:  # as the index lists them: a flag names no node without an index
            workers = router.router.workers
            known = [structs.replace(w.address, node=f"n-{w.name}") for w in workers]
            router.on_loop(lambda: workers.replace(known))
        yield router
        until(lambda: not core.open)
        router.on_loop(lambda: check(core))
        assert not core.fleet.flights
        assert not any(worker.attempts for worker in router.router.workers)


def body(number: int = 0, **more: object) -> dict[str, object]:
    """Different from its first byte, so that no prefix of it is cached."""
    return ASK | {"prompt": f"{number} {LONG}", **more}


def _receipts(router: VirtualRouter) -> list[Receipt]:
    return [draft.receipt() for draft in router.core.take_drafts()]


BOTH_WAYS = pytest.mark.parametrize("together", [False, True], ids=["in-turn", "together"])


@BOTH_WAYS
def test_a_long_prompt_is_two_legs_of_one_transfer(engines: Engines, together: bool) -> None:
    engines["d"].script("ok", push_s=0.2)  # else it may answer before the prefiller is done
    with routed(engines, "pd", together=together) as router:
        forged = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}}
        status, headers, answer = router.ask(body(min_tokens=3, seed=1) | forged)
        assert (status, json.loads(answer)["choices"]) == (200, [{"text": "abc"}])
        assert (headers["x-kvstore-worker"], headers["x-kvstore-prefill-worker"]) == ("d", "p")
        at = {name: engines[name].seen() for name in "pd"}
        sent = {name: json.loads(seen["body"]) for name, seen in at.items()}
        lines = [{k.lower(): v for k, v in seen["headers"]} for seen in at.values()]
        ids = [each["x-request-id"] for each in lines]
        assert ids == [headers["x-request-id"]] * 2
        to_p, to_d = (sent[name].pop("kv_transfer_params") for name in "pd")
        assert to_p["do_remote_decode"]
        assert to_d["do_remote_prefill"]
        assert "10.0.0.1" not in json.dumps([to_p, to_d])
        name = to_p["kvstore"]["transfer"]
        assert name == f"{ids[0]}.1"
        assert to_d["kvstore"] == {"transfer": name, "node": "n-p" if together else "p"}
        assert sent["p"] == body(seed=1, max_tokens=1, stream=False)
        assert sent["d"] == body(min_tokens=3, seed=1)
        until(lambda: not router.core.open)
        [receipt] = router.on_loop(lambda: _receipts(router))
        assert (receipt.prefill_worker, receipt.chosen) == ("p", "d")
        assert (receipt.split_reason, receipt.outcome.end) == ("long", "done")
        assert router.router.proxy.prefills == {"done": 1}
        values: Any = router.on_loop(lambda: _metrics(router.router))
        assert values["router_splits_total"] == {"long": 1}


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("p", {"mode": "fail"}),
    ("p", {"mode": "cut"}),
    ("d", {"mode": "fail", "status": 503}),
    ("d", {"mode": "cut"}),
]


@BOTH_WAYS
@pytest.mark.parametrize(("bad", "how"), FAULTS, ids=["p-500", "p-cut", "d-503", "d-cut"])
def test_one_of_two_always_failing_fails_no_request(
    engines: Engines, together: bool, bad: str, how: dict[str, Any]
) -> None:
    for name in "de":  # counts of few tokens would make all prompts short ones for the router
        engines[name].script("ok", push_s=0.02, prompt_tokens=1000)
    engines[bad].script(**how)
    with routed(engines, together=together) as router:
        statuses = []
        for first in range(0, REQUESTS, 8):
            asked = [router.begin(body(n, stream=n % 2 == 0)) for n in range(first, first + 8)]
            statuses += [each.result()[0] for each in asked]
        assert statuses == [200] * REQUESTS
        assert engines[bad].seen()["requests"], "it was tried"
        splits = router.router.proxy.splits
        assert splits["long"] > REQUESTS / 2, splits
    covered("requests with a failing leg", REQUESTS)


def test_a_decode_leg_that_answers_while_it_is_ended_for_its_prefill_is_no_answer(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first piece came, for the core: then the failure of the prefill had no remedy."""
    heard = Attempt.heard
    kept: dict[Attempt, asyncio.Queue[tuple[bytes, bool]]] = {}

    def keep(attempt: Attempt, piece: bytes, *, is_over: bool) -> None:
        if attempt in kept:
            kept[attempt].put_nowait((piece, is_over))
        else:
            heard(attempt, piece, is_over=is_over)

    @contextlib.asynccontextmanager
    async def late(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
        names = cast("Any", work).cr_frame.f_locals
        attempt, worker = names.get("attempt"), getattr(names.get("routed"), "prefill_worker", "")
        if attempt is not None and worker == "p":
            kept[attempt] = asyncio.Queue()
        async with beside(work) as task:
            yield task
            if attempt in kept:
                piece, is_over = await kept[attempt].get()
                del kept[attempt]
                task.cancel()  # and before it runs:
                heard(attempt, piece, is_over=is_over)

    monkeypatch.setattr(Attempt, "heard", keep)
    monkeypatch.setattr(proxy, "beside", late)
    engines["p"].script("cut")
    engines["d"].script("ok", push_s=0.05)
    with routed(engines, "pqd", together=True) as router:
        for number in range(4):
            status, _, answer = router.ask(body(number, stream=True))
            assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert router.router.proxy.prefills["failed"], "it was tried"


@BOTH_WAYS
def test_prefillers_that_are_silent_are_left(engines: Engines, together: bool) -> None:
    for name in "pq":
        engines[name].script("hang")
    for name in "de":
        engines[name].script("ok", push_s=60)
    with routed(engines, together=together, silence_s=SILENCE_S) as router:
        status, headers, _ = router.ask(body())
        assert status == 200
        assert "x-kvstore-prefill-worker" not in headers
        assert router.router.proxy.prefills["failed"]
        until(lambda: all(engines[name].seen()["running"] == 0 for name in "pq"))


def test_a_decoder_does_not_wait_for_ever_for_a_prefiller_that_only_answers_probes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legs, "LATE_S_MIN", 0.5)
    engines["p"].script("stuck")
    with routed(engines, "pd", together=False) as router:
        assert router.ask(body())[0] == 200
        until(lambda: router.router.proxy.prefills == {"aborted": 1})
        assert router.words() == {"p": "up", "d": "up"}


@BOTH_WAYS
def test_a_prefiller_that_refuses_leaves_the_word_to_the_decoder(
    engines: Engines, together: bool
) -> None:
    engines["p"].script("refuse", status=404)
    engines["d"].script("ok", push_s=60 * together)
    with routed(engines, "pd", together=together) as router:
        assert router.ask(body())[0] == 200
        # The leg that was given up may come to its engine after the one that was sent for it.
        assert any("kv_transfer_params" not in json.loads(each) for each in engines["d"].bodies())
        assert router.router.proxy.prefills == {"refused": 1}
        until(lambda: router.router.workers["p"].state == "up")
        engines["d"].script("refuse", status=422)
        assert router.ask(body(1))[0] == 422


@BOTH_WAYS
def test_a_prefiller_without_parameters_is_soon_left_alone(
    engines: Engines, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "COOLDOWN_MS", 600_000)
    engines["p"].script("ok", params=False)
    engines["d"].script("ok", push_s=60 * together)
    with routed(engines, "pd", together=together) as router:
        for number in range(FAULTS_MAX + 2):
            assert router.ask(body(number))[0] == 200
        # Then no prompt is computed twice, until a trial after the breaker's cool-down.
        assert router.router.proxy.prefills == {"useless": FAULTS_MAX}
        left = router.router.workers["p"]
        until(lambda: left.state == "open")
        assert "without kv_transfer_params" in left.why


WAITS: list[tuple[bool, str, dict[str, Any]]] = [
    (False, "p", {"delay_s": 60}),
    (True, "p", {"delay_s": 60}),
    (False, "d", {"push_s": 60}),
    (True, "d", {"push_s": 60}),
]


@pytest.mark.parametrize(("together", "slow", "how"), WAITS)
def test_a_client_that_leaves_aborts_both_legs(
    engines: Engines, together: bool, slow: str, how: dict[str, Any]
) -> None:
    engines["d"].script("ok", push_s=60)
    engines[slow].script("ok", **how)
    running = {"p": 1 * (slow == "p"), "d": 1 * (together or slow == "d")}

    def are_running() -> dict[str, int]:
        return {name: engines[name].seen()["running"] for name in running}

    with routed(engines, "pd", together=together) as router:
        core = router.core
        asked = router.begin(body(stream=True))
        until(lambda: are_running() == running)
        asked.leave()
        left_s = router.loop.time()
        until(lambda: not any(are_running().values()))
        assert router.loop.time() - left_s < 2.0
        until(lambda: router.router.proxy.counts["aborted"] == 1)
        assert not core.open
