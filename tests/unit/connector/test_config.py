"""Configuration mistakes raise one sentence that names what to change; nothing is silent. KV events
are read where the engine listens."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.connector.config import event_endpoints, parse_config

if TYPE_CHECKING:
    from vllm.config.kv_events import KVEventsConfig


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"socket": ""}, "socket must not be empty"),
        ({"min_laod_tokens": 3}, "unknown key 'min_laod_tokens': did you mean 'min_load_tokens'?"),
        ({"colour": 3}, "unknown key 'colour'; known keys are socket, tenant, store"),
        ({"store": "some"}, "store 'some' must be one of all, none, prompt"),
        ({"lookup_deadline_ms": 0}, "lookup_deadline_ms must be at least 1"),
        ({"heartbeat_timeout_ms": 10_001}, "heartbeat_timeout_ms must be at most 10000"),
        ({"tenant": "x" * 256}, "tenant must be at most 255 characters long"),
        ({"tenant": "é" * 128}, "tenant has 256 bytes"),
        ({"address": "10.0.0.7:8000"}, "address '10.0.0.7:8000' must be http:// or https://"),
        ({"address": "http://h:1/v1"}, "such as http://10.0.0.7:8000"),
        ({"socket": 7}, "socket must be a text, not a number"),
    ],
)
def test_a_bad_key_or_value_is_named(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        parse_config(extra)
    assert str(caught.value).startswith("kv_connector_extra_config in --kv-transfer-config: ")


IMAGES_NOT_KEPT = SimpleNamespace(mm_processor_cache_gb=0)


def engine(**changes: Any) -> Any:
    values = {"algorithm": "sha256_cbor", "policy": "recompute", **changes}
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=values["algorithm"],
            enable_prefix_caching=values.get("prefix_caching", True),
        ),
        model_config=SimpleNamespace(
            multimodal_config=values.get("images"), enable_sleep_mode=values.get("sleep", False)
        ),
        speculative_config=values.get("drafts"),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=values["policy"]),
        parallel_config=SimpleNamespace(
            world_size=4,
            decode_context_parallel_size=values.get("dcp", 1),
            prefill_context_parallel_size=values.get("pcp", 1),
            nnodes=values.get("nodes", 1),
            nnodes_within_dp=values.get("nodes", 1),
        ),
    )


def groups(*specs: object, hash_tokens: int | None = None) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs],
        hash_block_size=hash_tokens,
    )


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"algorithm": "sha256"}, "--prefix-caching-hash-algo sha256_cbor"),
        ({"policy": "fail"}, '"kv_load_failure_policy":"recompute"'),
        ({"dcp": 2}, "--decode-context-parallel-size 1"),
        ({"pcp": 2}, "--prefill-context-parallel-size 1"),
        ({"nodes": 2}, "--nnodes 1"),
        ({"images": IMAGES_NOT_KEPT, "prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"sleep": True}, "drop --enable-sleep-mode"),
    ],
)
def test_a_wrong_engine_setting_names_its_flag(changes: dict[str, object], flag: str) -> None:
    from kvstore.connector.checks import check_engine

    check_engine(engine(), None)
    with pytest.raises(ValueError, match=flag):
        check_engine(engine(**changes), None)


def test_images_that_the_engine_hashes_are_served() -> None:
    from kvstore.connector.checks import check_engine

    kept = SimpleNamespace(mm_processor_cache_gb=4)
    check_engine(engine(images=IMAGES_NOT_KEPT), None)
    check_engine(engine(images=kept, prefix_caching=False), None)
    check_engine(engine(prefix_caching=False), None)


@pytest.mark.engine
def test_full_attention_is_served_alone_or_beside_windows() -> None:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    from kvstore.connector.checks import check_engine

    full = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)
    window = SlidingWindowSpec(
        block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=256
    )
    check_engine(engine(), groups(full, hash_tokens=128))
    latent = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    uneven = UniformTypeKVCacheSpecs.from_specs({"a": full, "b": latent})
    check_engine(engine(), groups(uneven, hash_tokens=128))
    sink = SinkFullAttentionSpec(
        block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32, sink_len=4
    )
    with pytest.raises(ValueError, match="SinkFullAttentionSpec"):
        check_engine(engine(), groups(UniformTypeKVCacheSpecs.from_specs({"a": full, "b": sink})))
    chunks = ChunkedLocalAttentionSpec(
        block_size=128,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.float32,
        attention_chunk_size=512,
    )
    check_engine(engine(), groups(window, full, chunks, hash_tokens=64))
    with pytest.raises(ValueError, match="SlidingWindowSpec"):
        check_engine(engine(), groups(window))
    with pytest.raises(ValueError, match="has none"):
        check_engine(engine(), groups(window, chunks))
    state = MambaSpec(
        block_size=128, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    check_engine(engine(), groups(state, full, window, hash_tokens=128))
    with pytest.raises(ValueError, match="MambaSpec"):
        check_engine(engine(), groups(state))
    with pytest.raises(ValueError, match="--prefix-match-unit"):
        check_engine(engine(), groups(full, state, hash_tokens=64))
    with pytest.raises(ValueError, match=r"--mamba-cache-mode align .*is none"):
        check_engine(engine(), groups(full, replace(state, mamba_cache_mode="none")))
    with pytest.raises(ValueError, match="--speculative-config"):
        check_engine(engine(drafts=object()), groups(full, state))
    drafts = SimpleNamespace(use_eagle_block_drop=lambda: True)
    check_engine(engine(drafts=drafts), groups(full))
    with pytest.raises(ValueError, match="--speculative-config"):
        check_engine(engine(drafts=drafts), groups(full, window))
    with pytest.raises(ValueError, match="--prefix-match-unit"):
        check_engine(engine(), groups(full, hash_tokens=64))


# ── where the node reads KV events, by --kv-events-config, or one line why it does not ───────────


def config(endpoint: str = "tcp://*:5557", **changes: Any) -> KVEventsConfig:
    from vllm.config.kv_events import KVEventsConfig

    return KVEventsConfig(**{"enable_kv_cache_events": True, "endpoint": endpoint} | changes)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("endpoint", "replay", "rank", "expected"),
    [
        ("tcp://*:5557", None, 0, ("tcp://127.0.0.1:5557", "")),
        ("tcp://*:5557", "tcp://*:6557", 2, ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:6559")),
        ("tcp://[::]:5557", "tcp://127.0.0.1:7", 0, ("tcp://[::1]:5557", "tcp://127.0.0.1:7")),
        ("ipc:///run/e.kv", "ipc:///run/r:1", 0, ("ipc:///run/e.kv", "ipc:///run/r:1")),
    ],
)
def test_what_the_engine_listens_on_is_reached_on_this_machine(
    endpoint: str, replay: str | None, rank: int, expected: tuple[str, str]
) -> None:
    assert event_endpoints(config(endpoint, replay_endpoint=replay), rank) == expected


@pytest.mark.engine
@pytest.mark.parametrize(
    ("endpoint", "rank"),
    [("tcp://127.0.0.1:5557", 0), ("tcp://*:0", 0), ("ipc:///run/e.kv", 1)],
)
def test_where_the_node_cannot_read_is_one_line(
    endpoint: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "kvstore.connector.config.logger.warning", lambda text, *more: said.append(text % more)
    )
    assert event_endpoints(config(endpoint), rank) == ("", "")
    (line,) = said
    assert f"KV events at {endpoint} are not read by the node" in line
