"""The approximate tree against a slow, obvious one."""

from __future__ import annotations

from hypothesis import given, strategies as st

from kvstore.routing.tree import ApproximateTree
from tests.unit.routing.fleets import S, keys

PROMPTS = {name: keys(name, 6) for name in "abc"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(0, 6),
            st.sampled_from(["w0", "w1", "w2"]),
            st.integers(0, 8),
        ),
        max_size=12,
    ),
    st.sampled_from("abc"),
    st.integers(0, 6),
)
def test_matches_are_what_was_sent(
    sent: list[tuple[str, int, str, int]], asked: str, blocks: int
) -> None:
    tree = ApproximateTree(blocks_max=1000)
    longest: dict[str, int] = {}
    young: dict[str, int] = {}
    now_ns = 0
    for prompt, count, worker, seconds in sent:
        now_ns += seconds * S
        tree.insert(PROMPTS[prompt][: 32 * count], worker, now_ns, block_tokens=512)
        tree.check()
        if prompt == asked and count:
            longest[worker] = max(longest.get(worker, 0), min(count, blocks))
    asked_keys = PROMPTS[asked][: 32 * blocks]
    found = tree.match(asked_keys, now_ns, block_tokens=512, young_only=False)
    assert found == {worker: count for worker, count in longest.items() if count}
    young = tree.match(asked_keys, now_ns, block_tokens=512, young_only=True)
    assert all(count <= found[worker] for worker, count in young.items())


def test_what_is_not_recent_is_not_young() -> None:
    tree = ApproximateTree(blocks_max=100)
    prompt = keys("a", 4)
    tree.insert(prompt, "w0", 0, block_tokens=512)
    tree.insert(prompt, "w1", 11 * S, block_tokens=512)
    assert tree.match(prompt, 12 * S, block_tokens=512, young_only=True) == {"w1": 4}
    assert tree.match(prompt, 12 * S, block_tokens=512, young_only=False) == {"w0": 4, "w1": 4}


def test_it_is_bounded_and_forgets_ends_of_chains_first() -> None:
    tree = ApproximateTree(blocks_max=6)
    tree.insert(keys("a", 4), "w0", 0, block_tokens=512)
    tree.insert(keys("b", 4), "w0", 1, block_tokens=512)
    tree.check()
    assert len(tree) == 6
    assert tree.match(keys("a", 4), 2, block_tokens=512, young_only=False) == {"w0": 2}
    assert tree.match(keys("b", 4), 2, block_tokens=512, young_only=False) == {"w0": 4}


def test_small_blocks_are_counted_in_steps() -> None:
    tree = ApproximateTree(blocks_max=100)
    tree.insert(keys("a", 20), "w0", 0, block_tokens=16)  # a step is 8 blocks
    assert tree.match(keys("a", 20), 0, block_tokens=16, young_only=False) == {"w0": 16}


def test_long_chains_are_remembered_coarsely() -> None:
    tree = ApproximateTree(blocks_max=1000)
    tree.insert(keys("a", 103), "w0", 0, block_tokens=512)
    assert len(tree) == 64 + (103 - 64) // 4
    for blocks, found in ((63, 63), (64, 64), (67, 64), (68, 68), (103, 100)):
        asked = keys("a", blocks)
        assert tree.match(asked, 0, block_tokens=512, young_only=False) == {"w0": found}


def test_a_worker_that_left_is_forgotten() -> None:
    tree = ApproximateTree(blocks_max=100)
    tree.insert(keys("a", 4), "w0", 0, block_tokens=512)
    tree.insert(keys("a", 2), "w1", 0, block_tokens=512)
    tree.forget("w0")
    tree.check()
    assert tree.match(keys("a", 4), 0, block_tokens=512, young_only=False) == {"w1": 2}
    assert len(tree) == 2
    tree.insert(keys("b", 1), "w2", 0, block_tokens=512)  # takes over the bit
    assert tree.match(keys("a", 4), 0, block_tokens=512, young_only=False) == {"w1": 2}


def test_what_came_to_nothing_is_withdrawn() -> None:
    tree = ApproximateTree(blocks_max=100)
    prompt = keys("a", 6)
    for worker in ("w0", "w1"):
        tree.insert(prompt, worker, 0, block_tokens=512)
    tree.withdraw(prompt, "w0", block_tokens=512, after_tokens=1100)
    tree.withdraw(prompt, "unknown", block_tokens=512, after_tokens=0)
    tree.check()
    assert tree.match(prompt, S, block_tokens=512, young_only=True) == {"w0": 2, "w1": 6}
    tree.withdraw(prompt, "w1", block_tokens=512, after_tokens=0)
    tree.check()
    assert len(tree) == 2, "keys without a worker are gone"
