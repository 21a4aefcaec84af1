"""The engine keeps its promises with every policy, and the policy that is configured decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.engine.memory.policies import POLICIES, Mask, Words, maker
from kvstore.errors import ConfigError
from tests.steps import verify_machine
from tests.unit.engine.disk import DiskNode, known
from tests.unit.engine.harness import DEFAULTS, Node, Peer, attached, short
from tests.unit.engine.test_machine import Machine

CREDITS = 4


def test_any_order_of_events_keeps_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the policy that `test_machine` does not have."""
    monkeypatch.setattr(DEFAULTS, "policy", "reuse")
    verify_machine(Machine, examples=25, steps=50)


def seal_all(peer: Peer, numbers: Sequence[int]) -> None:
    """As many at a time as there are credits."""
    for at in range(0, len(numbers), CREDITS):
        peer.seal(*numbers[at : at + CREDITS])


def survivors(policy: str) -> set[int]:
    """Of ten blocks that were used twice, those left after a scan of three arenas."""
    _, peer = attached(Node(slots=64, slab_slots=16, credit_blocks_max=CREDITS, policy=policy))
    seal_all(peer, range(10))
    for _ in range(2):
        peer.hint(*range(10))
    seal_all(peer, range(1000, 1192))
    return {number for number in range(10) if peer.hint(number) == [True]}


def test_a_scan_takes_what_is_used_from_lru_only() -> None:
    assert survivors("lru") == set()
    assert survivors("reuse") == set(range(10))


@pytest.mark.parametrize(("policy", "stays"), [("lru", False), ("reuse", True)])
def test_what_comes_back_soon_after_it_went_counts_as_used_again(
    policy: str, *, stays: bool
) -> None:
    _, peer = attached(Node(slots=64, slab_slots=16, credit_blocks_max=CREDITS, policy=policy))
    seal_all(peer, (*range(10), *range(1000, 1070), *range(10), *range(2000, 2192)))
    assert all(peer.hint(number) == [stays] for number in range(10))


def test_what_was_read_from_disk_counts_as_used_again() -> None:
    node, peer = attached(DiskNode(slots=64, slab_slots=16, credit_blocks_max=4, policy="reuse"))
    node.step(known(*range(8)))
    peer.hint(*range(8))
    node.read_all()
    for number in range(1000, 1192):
        peer.seal(number)
        node.write_nothing()
    assert all(node.blocks()[short(number)] == "dram+file" for number in range(8))


def test_what_is_used_no_more_goes_in_the_end() -> None:
    _, peer = attached(Node(slots=64, slab_slots=16, credit_blocks_max=CREDITS, policy="reuse"))
    peer.seal(0)
    peer.hint(0)
    for number in range(1000, 1000 + 64 * 12):
        peer.seal(number)
    assert peer.hint(0) == [False]


def test_a_policy_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=" or ".join(POLICIES)):
        Node(policy="random")


def test_as_many_go_as_are_asked_for_however_far_apart_they_are() -> None:
    """A long look over the queue sees more than a short one: what it chose comes all the same."""
    count = 4096
    make = maker("reuse", np.zeros(count, dtype=np.int64))
    order = make(members=lambda: np.ones(count, dtype=bool), slot_count_max=count)
    words = np.arange(count)
    order.insert(words, words + 1, words.astype(np.uint64))
    order.use(words[: count // 2], words[: count // 2] + count + 1)
    order.pop(1, lambda its: words[its] >= 0)
    may: Mask = words % 3 == 0

    def may_go(its: Words | slice) -> Mask:
        chosen: Mask = may[its]
        return chosen

    assert len(order.pop(400, may_go)) == 400
