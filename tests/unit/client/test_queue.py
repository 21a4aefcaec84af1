"""What is left to compute, by which waits are weighed: counted once, and never for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.client.core.costs import VAIN_SHARE
from tests.unit.client.conftest import BLOCK_TOKENS, chain
from tests.unit.client.test_promotions import COMPUTE_NS_PER_TOKEN, SlowDisk

BLOCKS = 10
PROMPT = BLOCKS * BLOCK_TOKENS + 3
"""Tokens of a request that `AnsweredCore.look_up` makes of so many blocks."""
PROMPT_NS = PROMPT * COMPUTE_NS_PER_TOKEN


def measured(*, coming: int = 0, promoting_ms: int = 1) -> SlowDisk:
    """An engine that has measured its pace."""
    node = SlowDisk(coming=coming, promoting_ms=promoting_ms)
    node.attach()
    step = node.core.costs.compute.planned(1000, node.now_ns)
    node.core.costs.reported(step, node.now_ns + 1000 * COMPUTE_NS_PER_TOKEN)
    node.wait(1000)
    return node


def left(node: SlowDisk) -> tuple[int, int]:
    """Tokens of those that compute, and of those that wait."""
    its = node.core.costs.left_tokens
    return its[True], its[False]


def ask(node: SlowDisk, name: str) -> None:
    node.look_up(name, chain(name, BLOCKS))


def computing(node: SlowDisk, name: str) -> None:
    """A request of which nothing is stored, in the queue."""
    node.coming = 0
    ask(node, name)
    assert isinstance(node.match(name), str)
    node.coming = BLOCKS


def test_what_is_computed_is_left_no_more() -> None:
    node = measured()
    computing(node, "a")
    assert left(node) == (PROMPT, 0)
    entry = node.core.requests["a"]
    node.core.lookups.queue(entry, entry.prompt_tokens - 1000)
    assert left(node) == (PROMPT - 1000, 0)
    node.core.lookups.queue(entry, entry.prompt_tokens - PROMPT - 20)
    assert left(node) == (0, 0), "its answer is not of its prompt"


@pytest.mark.parametrize("where", ["computing", "waiting"])
def test_a_request_that_ends_leaves_nothing(where: str) -> None:
    node = measured(coming=BLOCKS)
    if where == "computing":
        computing(node, "a")
    else:
        ask(node, "a")
        assert node.match("a") is None
    assert sum(left(node)) == PROMPT
    node.core.finished("a")
    assert left(node) == (0, 0)


def _preempted(node: SlowDisk) -> None:
    node.core.allocated("a", tables=(), external_tokens=0, now_ns=node.now_ns)


def _session_ended(node: SlowDisk) -> None:
    node.reopen("upgraded")


@pytest.mark.parametrize("happens", [_preempted, _session_ended])
def test_a_request_that_asks_anew_is_not_counted_meanwhile(
    happens: Callable[[SlowDisk], None],
) -> None:
    node = measured(coming=BLOCKS)
    computing(node, "a")
    ask(node, "b")
    assert node.match("b") is None
    assert left(node) == (PROMPT, PROMPT)
    happens(node)
    assert node.match("a") is None
    assert left(node)[0] == 0


def test_the_rest_of_what_came_is_in_the_queue_of_those_who_look_in_the_same_step() -> None:
    node = measured(coming=BLOCKS)
    ask(node, "a")
    node.bring(4)
    assert left(node) == (PROMPT - 4 * BLOCK_TOKENS, 0)


def test_what_a_hit_loads_is_not_left() -> None:
    node = measured()
    node.keys = set(chain("a", BLOCKS)[:4])
    ask(node, "a")
    assert node.match("a") == 4 * BLOCK_TOKENS
    assert left(node) == (PROMPT - 4 * BLOCK_TOKENS, 0)


def test_those_who_wait_before_it_are_before_it_if_nothing_comes() -> None:
    node = measured(coming=BLOCKS)
    computing(node, "a")
    waits = []
    for name in ("b", "c"):
        ask(node, name)
        assert node.match(name) is None
        waits.append(node.core.requests[name].wait)
    assert [wait and wait.queue_ns_max for wait in waits] == [PROMPT_NS, 2 * PROMPT_NS]


def test_a_step_under_way_is_before_it() -> None:
    node = measured(coming=BLOCKS)
    step = node.core.costs.compute.planned(1000, node.now_ns)
    node.wait(30)
    ask(node, "a")
    wait = node.core.requests["a"].wait
    assert wait is not None
    assert wait.queue_ns_max == 70_000_000
    node.core.costs.reported(step, node.now_ns)
    assert node.core.costs.queued_ns(node.now_ns) == 0


def test_a_load_earns_by_its_turn() -> None:
    node = measured(coming=BLOCKS)
    computing(node, "a")
    ask(node, "b")
    turn_ns = PROMPT_NS + BLOCKS * BLOCK_TOKENS * COMPUTE_NS_PER_TOKEN
    account = node.core.costs._account("")
    assert account.balance_ns == pytest.approx(turn_ns / VAIN_SHARE)
