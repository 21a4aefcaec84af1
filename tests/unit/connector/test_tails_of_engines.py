"""Prompts with tails at the scheduler's side: which engines have none, and what waits for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connector import scheduler_side
from kvstore.connector.checks import _check_groups
from kvstore.connector.groups import EngineGroups
from kvstore.wire import messages as m
from kvstore.wire.messages import PushExpect
from tests.unit.connector.test_groups import KEY, engine, spec
from tests.unit.connector.test_scheduler_side import (
    FullSocket,
    MakeSide,
    clock,
    make_side,
    output,
    request,
)

__all__ = ["clock", "make_side"]

pytestmark = pytest.mark.engine

DECODE: dict[str, Any] = {
    "do_remote_prefill": True,
    "kvstore": {"transfer": "t", "node": "n2"},
}


def attached() -> FullSocket:
    link = FullSocket(room=10**6)
    link.inbox[1] = m.SessionOpen(session=1, shard_counts=(1,), node="n1")
    return link


def decoding(number: int, blocks: int, *, rest: int) -> Any:
    """A decode request of so many blocks and `rest` tokens."""
    found, tokens = request(number, blocks), blocks * KEY + rest
    found.num_prompt_tokens = found.num_tokens = tokens
    found.prompt_token_ids, found.prompt_embeds, found.max_tokens = list(range(tokens)), None, 16
    found.kv_transfer_params = DECODE
    return found


@pytest.mark.parametrize("kinds", ["full", "full and a ring"])
def test_beside_scratch_of_a_request_a_prompt_has_no_tail(make_side: MakeSide, kinds: str) -> None:
    """A ring holds the keys of the tokens that are still being compressed: a hit that ends among
    them needs them, and they are in no block of ours."""
    from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheGroupSpec

    config, cache = engine("window")
    config.speculative_config = None
    its = [cache.kv_cache_groups[1]]
    if kinds != "full":
        dtype = spec("full", KEY, 0).dtype
        ring = CircularBufferSpec(block_size=KEY, num_kv_heads=1, head_size=8, dtype=dtype)
        its.append(KVCacheGroupSpec(["ring"], ring))
    cache = replace(cache, kv_cache_groups=its)
    _check_groups(config, cache)  # it is served
    groups = EngineGroups(config, cache)
    assert groups.rules is None
    link = attached()
    names = {"group_tokens": groups.block_sizes, "group_names": groups.names}
    side = make_side(link, groups, key_tokens=groups.key_tokens, **names)
    its_request = decoding(1, 3, rest=5)
    side.on_new_request(its_request)
    (expected,) = [word.keys for word in link.sent if isinstance(word, PushExpect)]
    assert len(expected) // 32 == (4 if kinds == "full" else 3)
    assert expected.startswith(b"".join(its_request.block_hashes))


def test_a_wait_for_a_push_delays_nothing_that_this_step_computes(
    make_side: MakeSide, clock: SimpleNamespace
) -> None:
    side = make_side(attached())
    computed, waits = request(1, 16), decoding(2, 16, rest=1)
    computed.skip_reading_prefix_cache = True
    side.on_new_request(waits)
    assert side.get_num_new_matched_tokens(waits, 0) == (None, False)
    side.build_plan(output())
    clock.now_ns += 10**9
    side.on_new_request(computed)
    assert side.get_num_new_matched_tokens(computed, 0) == (0, False)
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([1],))
    side.update_state_after_alloc(computed, blocks, 0)
    assert side.get_num_new_matched_tokens(waits, 0) == (None, False)
    assert side._watched_ns <= scheduler_side._SPIN_NS_PER_STEP
