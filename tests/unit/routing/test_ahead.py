"""Blocks that nodes are asked to bring to dram before an engine asks for them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.index.feed import Holder
from kvstore.index.index import Match
from kvstore.routing.ahead import HEAT_MAX, REST_NS
from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    Failure,
    Joined,
    Prepare,
    PrepareAnswered,
    PrepareReason,
    Probed,
    RequestEnded,
    Routed,
    RouteTick,
    Shared,
    WorkerLeft,
)
from kvstore.routing.policy import parse
from kvstore.routing.receipts import Preparation
from kvstore.routing.rows import FleetColumn
from kvstore.routing.values import (
    PrefixAnswer,
    ProbeResult,
    RouteRequest,
    WorkerSpec,
)
from kvstore.wire.load import EngineLoad
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX
from kvstore.wire.peers import PrepareReply
from tests.kit.routing_check import check
from tests.unit.routing.fleets import (
    S,
    answer,
    core_of,
    fail,
    hbm,
    keys,
    knowing,
    request,
    spec,
    turn,
)

HELD: dict[str, Any] = {"classes": {"interactive": {"rank": 0, "backlog_s": 0.05}}}
"""A request waits for the one before."""


def dram(number: int, blocks: int, file: int = 0) -> Match:
    return Match(Holder(f"n{number}"), 0, blocks, max(blocks, file))


def held_core(*specs: WorkerSpec, **ahead: Any) -> RouterCore:
    """Both its workers are busy."""
    core = core_of(*(specs or (spec(0),)), policy=parse({**HELD, "ahead": ahead}))
    busy = tuple(EngineLoad(each.spec.url, 0, 4000, 0) for each in core.fleet.workers)
    core.step(Shared("other", busy), S)
    return core


def prepares(core: RouterCore, its: RouteRequest, prefix: PrefixAnswer | None) -> list[Prepare]:
    """Those of a request that is held."""
    found = turn(core, Arrived(knowing(its, prefix)))
    assert its.request_id in core.room.entries
    assert all(isinstance(each, Prepare) for each in found)
    return [each for each in found if isinstance(each, Prepare)]


def test_what_a_node_holds_on_disk_is_brought_while_the_request_waits() -> None:
    core = held_core()
    [prepare] = prepares(core, request("r"), answer(dram(0, 10, file=100)))
    assert (prepare.worker, prepare.reason) == ("w0", PrepareReason.WAITS)
    assert prepare.keys == keys("r", 100)
    assert [c for c in core.step(RouteTick(), S) if isinstance(c, Prepare)] == [], "once"


def test_what_another_node_holds_is_fetched_behind_what_the_engine_has() -> None:
    core = held_core()
    [prepare] = prepares(core, request("r"), answer(hbm(0, 40), dram(1, 30, file=120)))
    assert prepare.keys == keys("r", 120)[40 * 32 :]


@pytest.mark.parametrize(
    ("prefix", "ahead"),
    [
        (None, {}),
        (answer(), {}),
        (answer(dram(0, 100, file=110)), {}),  # too little is missing
        (answer(hbm(0, 100), dram(0, 0, file=100)), {}),
        (answer(dram(0, 10, file=100)), {"is_on": False}),
        (answer(dram(0, 10, file=100)), {"open_max": 1}),
    ],
)
def test_nothing_is_brought_that_is_near_or_unknown_or_unwanted(
    prefix: PrefixAnswer | None, ahead: dict[str, Any]
) -> None:
    core = held_core(**ahead)
    if "open_max" in ahead:
        assert len(prepares(core, request("first"), prefix)) == 1
    assert prepares(core, request("r"), prefix) == []


def test_a_worker_without_a_node_or_with_other_keys_is_left_alone() -> None:
    prefix = answer(dram(1, 100))
    assert prepares(held_core(spec(0, node="", engine="")), request("r"), prefix) == []
    core = held_core()
    core.step(Joined(spec(0, is_red=True)), S)
    assert prepares(core, request("r"), prefix) == []


def test_a_long_prompt_comes_in_parts_of_what_one_message_holds() -> None:
    core = held_core(spec(0, memory_tokens=0))
    its = request("r", 16 * 20_000)
    parts = prepares(core, its, answer(dram(0, 0, file=20_000)))
    assert [len(part.keys) // 32 for part in parts] == [KEYS_PER_DATAGRAM_MAX] * 4
    assert b"".join(part.keys for part in parts) == its.keys[: 4 * 32 * KEYS_PER_DATAGRAM_MAX]


def test_a_request_that_is_held_again_was_prepared_before() -> None:
    core = held_core(spec(0), spec(1))
    assert len(prepares(core, request("r"), answer(dram(2, 100)))) == 1
    core.step(Shared("other", ()), S)
    busy = tuple(EngineLoad(f"w{n}", 0, 4000, 0) for n in range(2))
    core.step(Shared("other", busy), S)
    assert turn(core, fail("r", Failure.CONNECT)) == []
    assert "r" in core.room.entries


def test_the_receipt_has_the_answer() -> None:
    core = held_core()
    [prepare] = prepares(core, request("r"), answer(dram(0, 10, file=100)))
    core.step(PrepareAnswered(prepare.number, PrepareReply(10, 80, 5)), S)
    core.step(Shared("other", ()), S)
    core.step(RequestEnded("r", Ending.DONE), S)
    [receipt] = [draft.receipt() for draft in core.take_drafts()]
    assert receipt.outcome.prepared == (
        Preparation(worker="w0", reason="waits", blocks=100, dram=10, reading=80, sought=5),
    )


# ── hot prefixes ─────────────────────────────────────────────────────────────────────────────────


def hot_core(**ahead: Any) -> RouterCore:
    """w0 holds the prefix and is saturated; w1 and w2 are idle, w1 less so."""
    policy = parse({"ahead": {"hot_requests": 3, "copy_bytes_per_s": 1e9, **ahead}})
    core = core_of(spec(0), spec(1), spec(2), policy=policy)
    loads = EngineLoad("w0", 0, 40_000, 0), EngineLoad("w1", 0, 4000, 0)
    core.step(Shared("other", loads), S)
    return core


def copies(
    core: RouterCore, count: int, *, now_ns: int = S, prefix: str = "hot", blocks: int = 64
) -> list[Prepare]:
    """Of so many requests that begin alike."""
    found: list[Prepare] = []
    for number in range(count):
        name = f"{prefix} {now_ns} {number}"
        its = request(name, prefix=prefix, pin_s=0)
        commands = core.step(Arrived(knowing(its, answer(dram(0, blocks)))), now_ns)
        check(core)
        found += [each for each in commands if isinstance(each, Prepare)]
        core.step(RequestEnded(name, Ending.ABORTED), now_ns)
    return found


def test_a_hot_prefix_is_copied_once_to_the_least_loaded_worker() -> None:
    core = hot_core()
    assert copies(core, 2) == []
    [copy] = copies(core, 10)
    assert (copy.worker, copy.reason) == ("w2", PrepareReason.HOT)
    assert copy.keys == keys("hot", 64)
    assert copies(core, 10, now_ns=3 * S) == [], "until the index shows it"
    assert len(copies(core, 10, now_ns=S + REST_NS)) == 1


def test_a_prefix_is_hot_by_requests_in_time() -> None:
    core = hot_core(hot_s=1)
    for second in range(20):
        assert copies(core, 1, now_ns=(1 + 3 * second) * S) == []


def test_nothing_is_copied_while_a_holder_has_room() -> None:
    core = hot_core()
    core.step(Shared("other", ()), S)
    assert copies(core, 10) == []


def test_the_longest_run_that_is_hot_is_copied() -> None:
    core = hot_core()
    copies(core, 2, blocks=30)
    [copy] = copies(core, 1, blocks=250)
    assert copy.keys == keys("hot", 24), "16 and 24 blocks were counted three times"


@pytest.mark.parametrize("event", [Probed("w2", ProbeResult.UNWELL), Joined(spec(2, is_red=True))])
def test_a_worker_that_gets_no_requests_gets_no_copy(event: Joined | Probed) -> None:
    core = hot_core()
    core.step(event, S)
    [copy] = copies(core, 5)
    assert copy.worker == "w1"


def test_a_node_that_refused_is_left_alone_for_a_while() -> None:
    core = hot_core()
    [copy] = copies(core, 5)
    core.step(PrepareAnswered(copy.number, PrepareReply(refused="memory is short")), S)
    [other] = copies(core, 5, prefix="other")
    assert other.worker == "w1"


def test_a_full_worker_gets_no_copy() -> None:
    core = hot_core()
    core.step(Joined(spec(3, node="n2", memory_tokens=0)), S)
    for name in ("w1", "w2", "w3"):
        core.fleet.columns[FleetColumn.USED, core.fleet.row_of[name]] = 0.99
    assert copies(core, 10) == []


def test_copies_are_within_their_budget() -> None:
    """A prefix of 1,024 tokens has 128 MiB, by the policy."""
    core = hot_core(copies_max=100, copy_bytes_per_s=2.5 * 2**27)
    made = []
    for second in range(1, 9):
        names = [f"hot{second} {n}" for n in range(6)]
        made.append(sum(len(copies(core, 3, prefix=name, now_ns=second * S)) for name in names))
    assert made[0] == 3
    assert 2.5 * 8 <= sum(made) <= 2.5 * 8 + 1


def test_another_policy_has_another_budget_at_once() -> None:
    core = hot_core()
    core.adopt(parse({"ahead": {"hot_requests": 3, "copy_bytes_per_s": 0.0}}), S)
    assert copies(core, 10) == []
    core.adopt(parse({"ahead": {"hot_requests": 3}}), S)
    assert len(copies(core, 10, now_ns=2 * S)) == 1


def test_copies_at_a_time_are_bounded() -> None:
    core = hot_core(copies_max=2, copy_bytes_per_s=1e12)
    names = [f"hot{n}" for n in range(10)]
    assert sum(len(copies(core, 5, prefix=name)) for name in names) == 2


def test_the_memory_of_prefixes_is_bounded() -> None:
    core = hot_core()
    for number in range(HEAT_MAX // 2):
        its = request(f"r{number}", 1024)
        core.ahead._hottest(its.keys, 64, 16, S)
    check(core)
    assert len(core.ahead._heat) == HEAT_MAX


# ── pins ─────────────────────────────────────────────────────────────────────────────────────────


def pinned(core: RouterCore, name: str, now_ns: int = S, **more: Any) -> Routed:
    its = request(name, **{"pin_s": 100.0, "answer": answer(), **more})
    [sent] = (c for c in core.step(Arrived(its), now_ns) if isinstance(c, Routed))
    core.step(RequestEnded(name, Ending.DONE), now_ns)
    check(core)
    return sent


def touched(core: RouterCore, now_ns: int) -> list[Prepare]:
    found = [each for each in core.step(RouteTick(), now_ns) if isinstance(each, Prepare)]
    for each in found:
        core.step(PrepareAnswered(each.number, PrepareReply()), now_ns)
    check(core)
    return found


def test_a_pinned_prompt_is_touched_where_it_went_until_its_time_is_over() -> None:
    core = core_of(spec(0), spec(1))
    sent = pinned(core, "r")
    assert sent.hints is not None
    assert (sent.hints.pinned_s, sent.hints.pinned_tokens, sent.hints.refused) == (100, 4096, "")
    assert touched(core, 30 * S) == []
    for second in (31, 61, 91):
        [prepare] = touched(core, second * S)
        assert (prepare.worker, prepare.reason) == (sent.worker, PrepareReason.PINNED)
        assert prepare.keys == keys("r", 256)
        assert touched(core, (second + 1) * S) == []
    assert touched(core, 121 * S) == []
    assert len(core.ahead.pins) == 0


def test_a_pin_whose_time_is_over_when_it_is_due_is_not_touched_again() -> None:
    core = core_of(spec(0))
    pinned(core, "r", pin_s=60.0)
    assert len(touched(core, 31 * S)) == 1
    assert touched(core, 61 * S) == []
    assert len(core.ahead.pins) == 0


def test_pins_are_bounded_by_tenant_and_the_client_is_told() -> None:
    core = core_of(spec(0), policy=parse({"ahead": {"pins_per_tenant": 2, "pin_s_max": 50}}))
    answers = [pinned(core, f"r{n}", tenant="a").hints for n in range(3)]
    assert [each and each.refused for each in answers] == ["", "", "tenant-full"]
    other = pinned(core, "other", tenant="b").hints
    assert other is not None
    assert (other.refused, other.pinned_s) == ("", 50)
    again = pinned(core, "again", tenant="a", prefix="r0").hints
    assert again is not None
    assert not again.refused, "the same prompt has one pin"


def test_a_session_has_one_pin_and_its_end_ends_it() -> None:
    core = core_of(spec(0))
    pinned(core, "r1", session="s")
    pinned(core, "r2", session="s")
    assert [each.keys for each in touched(core, 31 * S)] == [keys("r2", 256)]
    last = pinned(core, "r3", session="s", pin_s=0.0, ends_session=True).hints
    assert last is not None
    assert last.ends_session
    assert touched(core, 62 * S) == []


def test_the_end_of_a_session_ends_nothing_of_another_tenant() -> None:
    core = core_of(spec(0))
    pinned(core, "r1", session="s", tenant="a")
    pinned(core, "r2", session="s", tenant="b", pin_s=0.0, ends_session=True)
    assert len(touched(core, 31 * S)) == 1


def test_several_prompts_in_one_request_are_neither_pinned_nor_brought() -> None:
    """Their keys are no chain: what lies behind the first prompt is no prefix of anything."""
    found = answer(dram(0, 10, file=100))
    assert prepares(held_core(), request("r", parts=(128, 128)), found) == []
    core = core_of(spec(0))
    hints = pinned(core, "r", parts=(128, 128)).hints
    assert hints is not None
    assert hints.refused == "no-keys"
    hot = hot_core()
    for n in range(10):
        its = request(f"r{n}", prefix="hot", parts=(128, 128))
        assert [type(c) for c in turn(hot, Arrived(knowing(its, answer(dram(0, 64)))))] == [Routed]


def test_without_keys_of_the_index_nothing_is_pinned() -> None:
    core = core_of(spec(0))
    [sent] = core.step(Arrived(request("r", pin_s=5.0)), S)
    assert isinstance(sent, Routed)
    assert sent.hints is not None
    assert sent.hints.refused == "no-keys"
    assert pinned(core, "unpinned", pin_s=0.0).hints is None, "not asked for"


def test_a_pin_leaves_with_its_worker() -> None:
    core = core_of(spec(0))
    pinned(core, "r")
    core.step(WorkerLeft("w0"), S)
    assert touched(core, 31 * S) == []
    assert len(core.ahead.pins) == 0
