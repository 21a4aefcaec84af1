"""`kv_transfer_params` at vLLM's interface: real requests in, words to the node and answers out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.core.pushes import WATCH_SHARE
from kvstore.units import NS_PER_MS
from kvstore.wire import messages as m
from kvstore.wire.messages import PushCancel, PushClose, PushExpect, PushOpen
from tests.unit.connector.real_requests import real_request
from tests.unit.connector.test_scheduler_side import (
    BLOCK_TOKENS,
    FullSocket,
    MakeSide,
    clock,
    make_side,
    output,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["clock", "make_side"]

DECODE = {"do_remote_prefill": True, "kvstore": {"node": "node-p", "transfer": "t1"}}
PREFILL = {"do_remote_decode": True, "kvstore": {"transfer": "t1"}}
WORDS = (PushOpen, PushClose, PushExpect, PushCancel)


class Fixture:
    """A scheduler's half, attached to a node that serves pushes."""

    def __init__(self, make_side: MakeSide) -> None:
        self.link = FullSocket(room=10**6)
        self.link.inbox[1] = m.SessionOpen(1, (1,), node="node-1")
        self.side = make_side(self.link, engine_id="engine-p", min_load_tokens=BLOCK_TOKENS)

    def arrive(self, params: Any, images: Any = ()) -> Request:
        found = real_request(
            "cmpl-77-0-0123abcd",
            list(range(4 * BLOCK_TOKENS + 1)),
            extra={"kv_transfer_params": params},
        )
        found.mm_features = list(images)
        self.side.on_new_request(found)
        return found

    def end(self, request: Request, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus[status]
        return self.side.request_finished(request)

    def words(self) -> list[m.Message]:
        found: list[m.Message] = [word for word in self.link.sent if isinstance(word, WORDS)]
        self.link.sent.clear()
        return found


@pytest.fixture
def on(make_side: MakeSide) -> Fixture:
    return Fixture(make_side)


def test_an_answer_of_prefill_names_this_node(on: Fixture) -> None:
    request = on.arrive(PREFILL)
    assert on.end(request) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-p",
        "remote_request_id": "cmpl-77-0-0123abcd",
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "remote_num_tokens": 4 * BLOCK_TOKENS + 1,
        "kvstore": {"transfer": "t1", "node": "node-1"},
    }
    assert on.words() == [PushOpen("t1/0"), PushClose("t1/0")]


def test_a_prefill_that_ended_early_has_no_answer(on: Fixture) -> None:
    assert on.end(on.arrive(PREFILL), "FINISHED_ERROR") is None
    _, closed = on.words()
    assert isinstance(closed, PushClose)
    assert closed.reason


def test_a_preemption_reaches_the_node(on: Fixture) -> None:
    request = on.arrive(PREFILL)
    on.side.build_plan(
        SimpleNamespace(**{**vars(output()), "preempted_req_ids": {request.request_id}})
    )
    assert on.words() == [PushOpen("t1/0"), PushClose("t1/0", "preempted")]
    on.side.get_num_new_matched_tokens(request, 0)
    assert on.words() == [PushOpen("t1/0")]


def test_a_request_that_is_left_out_says_so_to_decode(on: Fixture) -> None:
    request = on.arrive(PREFILL, [SimpleNamespace(identifier="of a client")])
    assert on.words() == [PushOpen("t1/0"), PushClose("t1/0", "not stored: image uuid")]
    assert on.end(request)["kvstore"] == {"transfer": "t1", "node": "node-1"}
    assert on.end(request) is None  # forgotten with its end


def test_an_engine_that_only_waits_for_a_push_makes_few_steps(
    on: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes processor time, which a prefill engine on the same machine computes with."""
    request = on.arrive(DECODE)
    watched: list[int] = []

    def watch(watch_ns: int) -> None:
        watched.append(watch_ns)
        on.side._watched_ns += watch_ns

    monkeypatch.setattr(on.side, "_watch", watch)
    lookup = on.side._core.requests[request.request_id]
    lookup.pushed_until_ns -= 10 * WATCH_SHARE * NS_PER_MS  # it has waited so long
    assert on.side.get_num_new_matched_tokens(request, 0) == (None, False)
    assert sum(watched) >= 10 * NS_PER_MS
    on.side.build_plan(SimpleNamespace(**{**vars(output()), "num_scheduled_tokens": {"other": 1}}))
    watched.clear()
    assert on.side.get_num_new_matched_tokens(request, 0) == (None, False)
    assert watched == [], "a step of others is late for nobody"


@pytest.mark.parametrize(
    "broken", ["text", {"do_remote_prefill": 1.5}, {**DECODE, "kvstore": {"node": "x" * 999}}]
)
def test_broken_parameters_of_a_client_are_counted_and_ignored(on: Fixture, broken: Any) -> None:
    request = on.arrive(broken)
    assert on.words() == []
    on.side.get_num_new_matched_tokens(request, 0)
    assert any(isinstance(sent, m.LeaseAsk) for sent in on.link.sent)  # served like any other
    assert on.end(request) is None
    assert on.side.take_stats()["pushes_malformed"] == 1
