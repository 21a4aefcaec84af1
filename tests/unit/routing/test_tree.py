"""The approximate tree against a slow, obvious one."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
from hypothesis import given, settings, strategies as st

from kvstore.routing.tree import ApproximateTree
from tests.kit.routing_check import check_tree
from tests.unit.routing.fleets import S, keys

PROMPTS = {name: keys(name, 6) for name in "abc"}


WORKERS = ["w0", "w1", "w2"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "forget", "withdraw", "look"]),
            st.sampled_from("abc"),
            st.sampled_from([0, 1, 3, 6]),
            st.sampled_from(WORKERS),
            st.sampled_from([0, 1, 8]),
        ),
        min_size=4,
        max_size=20,
    ),
    st.integers(0, 6),
)
def test_matches_are_what_was_sent(
    steps: list[tuple[str, str, int, str, int]], blocks: int
) -> None:
    tree = ApproximateTree(blocks_max=1000)
    held: dict[tuple[str, str], dict[int, int]] = {(p, w): {} for p in PROMPTS for w in WORKERS}
    """When each block was sent."""
    now_ns = 0

    def look(prompt: str, blocks: int) -> None:
        asked = PROMPTS[prompt][: 32 * blocks]
        found = tree.match(asked, now_ns, step=1, young_only=False)
        runs = {w: leading(held[prompt, w], blocks) for w in WORKERS}
        assert found == {worker: run for worker, run in runs.items() if run}
        young = tree.match(asked, now_ns, step=1, young_only=True)
        for worker in WORKERS:
            sent = held[prompt, worker].items()
            recent = {number for number, at_ns in sent if now_ns - at_ns <= 10 * S}
            assert leading(recent, blocks) <= young.get(worker, 0) <= found.get(worker, 0)

    for what, prompt, count, worker, seconds in steps:
        now_ns += seconds * S
        sent = PROMPTS[prompt][: 32 * count]
        if what == "insert":
            tree.insert(sent, worker, now_ns, step=1)
            held[prompt, worker] |= dict.fromkeys(range(count), now_ns)
        elif what == "withdraw":
            tree.withdraw(sent, worker, step=1, after_blocks=seconds)
            for number in range(seconds, count):
                held[prompt, worker].pop(number, None)
        elif what == "forget":
            tree.forget(worker)
            held |= {(p, worker): {} for p in PROMPTS}
        else:
            look(prompt, count)
    for prompt in PROMPTS:
        look(prompt, blocks)
    check_tree(tree)


def leading(held: Container[int], most: int) -> int:
    """Blocks from the start without a gap."""
    return next((n for n in range(most) if n not in held), most)


def test_what_is_not_recent_is_not_young() -> None:
    tree = ApproximateTree(blocks_max=100)
    prompt = keys("a", 4)
    tree.insert(prompt, "w0", 0, step=1)
    tree.insert(prompt, "w1", 11 * S, step=1)
    assert tree.match(prompt, 12 * S, step=1, young_only=True) == {"w1": 4}
    assert tree.match(prompt, 12 * S, step=1, young_only=False) == {"w0": 4, "w1": 4}


def test_it_is_bounded_and_forgets_ends_of_chains_first() -> None:
    tree = ApproximateTree(blocks_max=6)
    tree.insert(keys("a", 4), "w0", 0, step=1)
    tree.insert(keys("b", 4), "w0", 1, step=1)
    check_tree(tree)
    assert len(tree) == 6
    assert tree.match(keys("a", 4), 2, step=1, young_only=False) == {"w0": 2}
    assert tree.match(keys("b", 4), 2, step=1, young_only=False) == {"w0": 4}


def test_small_blocks_are_counted_in_steps() -> None:
    tree = ApproximateTree(blocks_max=100)
    tree.insert(keys("a", 20), "w0", 0, step=8)  # a step is 8 blocks
    assert tree.match(keys("a", 20), 0, step=8, young_only=False) == {"w0": 16}


def test_long_chains_are_remembered_coarsely() -> None:
    tree = ApproximateTree(blocks_max=1000)
    tree.insert(keys("a", 103), "w0", 0, step=1)
    assert len(tree) == 64 + (103 - 64) // 4
    for blocks, found in ((63, 63), (64, 64), (67, 64), (68, 68), (103, 100)):
        asked = keys("a", blocks)
        assert tree.match(asked, 0, step=1, young_only=False) == {"w0": found}


def sent_to(tree: ApproximateTree, prompt: bytes, *, young: bool = False) -> dict[str, int]:
    return tree.match(prompt, S, step=1, young_only=young)


def test_a_prefix_is_withdrawn_from_the_worker_that_has_it_now() -> None:
    tree = ApproximateTree(blocks_max=100)
    tree.insert(keys("a", 4), "w0", 0, step=1)
    tree.insert(keys("a", 4), "w1", 0, step=1)
    tree.forget("w0")
    tree.insert(keys("b", 4), "w2", 0, step=1)
    tree.withdraw(keys("a", 4), "w2", step=1, after_blocks=0)
    assert sent_to(tree, keys("a", 4)) == {"w1": 4}
    tree.insert(keys("b", 4), "w1", 0, step=1)
    tree.withdraw(keys("a", 4), "w1", step=1, after_blocks=0)
    assert len(tree) == 4, "those that nobody has are gone"
    tree.forget("w2")
    tree.withdraw(keys("b", 4), "w1", step=1, after_blocks=0)
    assert len(tree) == 0, "somebody who has left does not keep them"


def test_what_is_new_is_of_the_one_who_has_the_bit_now() -> None:
    tree = ApproximateTree(blocks_max=100)
    tree.insert(keys("a", 4), "w0", 0, step=1)
    tree.forget("w0")
    tree.insert(keys("b", 4), "w1", 0, step=1)
    assert sent_to(tree, keys("b", 4)) == {"w1": 4}
    for name in ("x", "y"):  # the bit leaves a second time, after another one
        tree.insert(keys("c", 1), name, 0, step=1)
    tree.forget("y")
    assert sent_to(tree, keys("b", 4)) == {"w1": 4}
    tree.forget("w1")
    assert sent_to(tree, keys("b", 4)) == {}


def test_a_worker_that_leaves_costs_no_look_at_what_is_remembered() -> None:
    """A million entries would take a second, in which the router stands still."""
    tree = ApproximateTree(blocks_max=200_000)
    random = np.random.default_rng(1)
    chains = [random.bytes(32 * 64) for _ in range(1600)]
    for chain in chains:
        tree.insert(chain, "w0", 0, step=1)
        tree.insert(chain[: 32 * 10], "w1", 0, step=1)
    before = {key: list(entry) for key, entry in tree._blocks.items()}
    assert len(before) == 1600 * 64 > 100_000
    for _ in range(1000):
        tree.forget("w0")
        tree.insert(chains[0][:32], "w0", 0, step=1)
    changed = [key for key, entry in tree._blocks.items() if entry != before[key]]
    assert len(changed) == 1, "the one that was written"
    assert sent_to(tree, chains[-1]) == {"w1": 10}
    changed = [key for key, entry in tree._blocks.items() if entry != before[key]]
    assert len(changed) == 1 + 11, "and those that were read"
    assert sent_to(tree, chains[0]) == {"w0": 1, "w1": 10}
