"""Prompts with tails at the scheduler's side: which engines have none, and what waits for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client.core.config import SchedulerConfig
from kvstore.connector import scheduler_side
from kvstore.connector.checks import _check_groups
from kvstore.connector.config import ConnectorConfig
from kvstore.connector.groups import EngineGroups
from kvstore.connector.scheduler_side import SchedulerSide
from kvstore.wire import messages as m
from kvstore.wire.messages import PushExpect
from tests.unit.connector.test_groups import KEY, engine, spec
from tests.unit.connector.test_scheduler_side import (
    FullSocket,
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


@pytest.mark.parametrize("kinds", ["full", "full and a ring"])
def test_beside_scratch_of_a_request_a_prompt_has_no_tail(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kinds: str
) -> None:
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
    monkeypatch.setattr("kvstore.connector.scheduler_side.Link.connect", lambda path, hello: link)
    core = SchedulerConfig(
        engine_id="e",
        nonce="n",
        process="p",
        tenant="t",
        rank_count=1,
        block_tokens=KEY,
        group_tokens=groups.block_sizes,
        group_names=groups.names,
        key_tokens=groups.key_tokens,
    )
    side = SchedulerSide(ConnectorConfig(socket="/nowhere"), core, groups)
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
    tokens = 3 * KEY + 5
    its_request = SimpleNamespace(
        request_id="r",
        block_hashes=keys,
        num_prompt_tokens=tokens,
        prompt_token_ids=list(range(tokens)),
        prompt_embeds=None,
        max_tokens=16,
        num_tokens=tokens,
        num_computed_tokens=0,
        lora_request=None,
        mm_features=[],
        skip_reading_prefix_cache=False,
        kv_transfer_params=DECODE,
        trace_headers=None,
    )
    side.on_new_request(its_request)
    (expected,) = [word.keys for word in link.sent if isinstance(word, PushExpect)]
    assert len(expected) // 32 == (4 if kinds == "full" else 3)
    assert expected.startswith(b"".join(keys))


def test_a_wait_for_a_push_delays_nothing_that_this_step_computes(
    make_side: Callable[[FullSocket], SchedulerSide], clock: SimpleNamespace
) -> None:
    side = make_side(attached())
    computed, waits = request(1, 16), request(2, 16)
    computed.skip_reading_prefix_cache = True
    waits.num_prompt_tokens += 1
    waits.prompt_token_ids, waits.prompt_embeds, waits.max_tokens = list(range(257)), None, 16
    waits.kv_transfer_params = DECODE
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
