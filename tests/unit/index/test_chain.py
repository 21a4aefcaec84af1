"""The keys computed here are the engine's own."""

from __future__ import annotations

import hashlib

import cbor2
import pytest

from kvstore.index.chain import adapter_keys, block_keys

SEED = "vllm-none-hash"
"""The engine's, unless PYTHONHASHSEED is set."""


def test_a_chain_is_one_digest_a_block_over_its_parent() -> None:
    root = hashlib.sha256(cbor2.dumps(SEED, canonical=True)).digest()
    first = hashlib.sha256(cbor2.dumps((root, (1, 2), None), canonical=True)).digest()
    second = hashlib.sha256(cbor2.dumps((first, (3, 70_000), None), canonical=True)).digest()
    assert block_keys([1, 2, 3, 70_000], block_tokens=2, seed=SEED) == [first, second]


def test_seed_and_salt_change_every_key() -> None:
    plain = set(block_keys(range(8), block_tokens=4, seed=SEED))
    assert not plain & set(block_keys(range(8), block_tokens=4, seed="1"))
    assert not plain & set(block_keys(range(8), block_tokens=4, seed=SEED, cache_salt="s"))


def test_an_adapter_is_in_the_key_of_every_block_before_the_salt() -> None:
    root = hashlib.sha256(cbor2.dumps(SEED, canonical=True)).digest()
    lora, salt = ("lora", "name", "/path"), ("cache_salt", "s")
    first = hashlib.sha256(cbor2.dumps((root, (1, 2), (lora, salt)), canonical=True)).digest()
    second = hashlib.sha256(cbor2.dumps((first, (3, 4), (lora,)), canonical=True)).digest()
    adapter = ("name", "/path")
    found = block_keys([1, 2, 3, 4], block_tokens=2, seed=SEED, cache_salt="s", adapter=adapter)
    assert found == [first, second]
    assert adapter_keys(found, b"d") == [hashlib.sha256(b"d" + key).digest() for key in found]


@pytest.mark.engine
@pytest.mark.parametrize("salt", [None, "pepper"])
@pytest.mark.parametrize(("seed", "adapter"), [(None, None), ("7", None), (None, ("a", "/a"))])
def test_the_engine_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
    seed: str | None,
    salt: str | None,
    adapter: tuple[str, str] | None,
) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    kv_cache_utils.init_none_hash(sha256_cbor)
    tokens = [(n * 7919) % 128_000 for n in range(16 * 5 + 3)]
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        lora_request=LoRARequest(adapter[0], 1, adapter[1]) if adapter else None,
        block_hasher=kv_cache_utils.get_request_block_hasher(16, sha256_cbor),
    )
    its_seed = kv_cache_utils.get_none_hash_seed()
    assert its_seed == (seed or SEED)
    keys = block_keys(
        tokens, block_tokens=16, seed=its_seed, cache_salt=salt or "", adapter=adapter
    )
    assert keys == list(request.block_hashes)
    assert len(keys) == 5
