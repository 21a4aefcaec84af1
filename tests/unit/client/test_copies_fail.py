"""The breaker of loads: a node that answers well but serves what cannot be had is left alone."""

from __future__ import annotations

from tests.kit.cores import is_serving
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain
from tests.unit.client.test_lookups import ended
from tests.unit.client.test_shadow import lookup

HIT = 3 * BLOCK_TOKENS


def begin(node: AnsweredCore, name: str) -> int:
    """A hit whose load has begun; its lease."""
    keys = chain(name, 3)
    node.keys |= set(keys)
    assert lookup(node, name, keys) == HIT
    job = node.load(name, [1, 2, 3], 3)
    return job.lease


def fail(node: AnsweredCore, name: str) -> None:
    ended(node, name, begin(node, name), failed=(1, 2, 3))


def answer(node: AnsweredCore, name: str) -> object:
    keys = chain(name, 3)
    node.keys |= set(keys)
    node.look_up(name, keys)
    return node.match(name)


def test_three_failed_loads_open_it_though_every_question_was_answered(node: AnsweredCore) -> None:
    node.attach()
    for i in range(3):
        assert is_serving(node.core)
        fail(node, f"r{i}")
        assert answer(node, f"s{i}") == (HIT if i < 2 else "breaker open")
        node.core.finished(f"s{i}")
    assert not is_serving(node.core)
    assert node.core.stats.take()["breaker_openings"] == 1
