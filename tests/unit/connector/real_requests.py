"""Requests of vLLM itself, with the keys that vLLM gives their blocks.

vLLM is imported by the first one that is made: it takes longer to import than all of kvstore, and
every process of a run collects every test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.unit.connector.test_scheduler_side import BLOCK_TOKENS

if TYPE_CHECKING:
    from vllm.v1.request import Request


def real_request(
    request_id: str,
    token_ids: list[int] | None,
    *,
    extra: dict[str, Any] | None = None,
    **more: Any,
) -> Request:
    """One that asks for a token; `extra` are its sampling parameters' own, `more` the rest."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1, extra_args=extra),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
        **more,
    )
