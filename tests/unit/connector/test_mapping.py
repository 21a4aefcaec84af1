"""Which part of a model a rank of tensor and pipeline parallelism holds, and which versions of an
engine share blocks: those that were compared, and of which models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.connector.checks import NotServed
from kvstore.connector.mapping import FORMATS, RankPart, kv_format, part_of
from kvstore.wire.space import fingerprint
from tests.unit.client.rank_kit import SPACE

LAYERS = 6
STAGES, HALVES = ((0, 3), (3, 6)), ((0, 2), (2, 4))


def part(
    rank: int,
    *,
    heads: int,
    tp: int = 1,
    pp: int = 1,
    replicas: int = 1,
    held: int | None = None,
    use_mla: bool = False,
    names: list[str] | None = None,
) -> RankPart:
    """Of a model of 6 layers and `heads` KV heads; `held` of them are in the rank's cache."""
    begin = rank // tp * (LAYERS // pp)
    end = begin + LAYERS // pp
    config: Any = SimpleNamespace(
        speculative_config=None,
        load_config=None,
        parallel_config=SimpleNamespace(
            rank=rank, tensor_parallel_size=tp, pipeline_parallel_size=pp
        ),
        model_config=SimpleNamespace(
            use_mla=use_mla,
            get_total_num_kv_heads=lambda: heads,
            get_total_num_hidden_layers=lambda: LAYERS,
            get_layers_start_end_indices=lambda _: (begin, end),
        ),
    )
    cache: Any = SimpleNamespace(kv_tp_replicas=replicas)
    layers = [f"model.layers.{n}.self_attn.attn" for n in range(begin, end)]
    held = max(1, heads // tp) if held is None else held
    return part_of(config, cache, dict.fromkeys(names or layers, held))


def shards(count: int, **of: Any) -> list[tuple[int, int, int, int]]:
    parts = [part(rank, **of) for rank in range(count)]
    totals = {(p.layer_count, p.head_count) for p in parts}
    assert totals == {(LAYERS, 1 if of.get("use_mla") else of["heads"])}
    found = [p.shard for p in parts]
    return [(s.layer_begin, s.layer_end, s.head_begin, s.head_end) for s in found]


@pytest.mark.parametrize(
    ("count", "of", "expected"),
    [
        (1, {"heads": 4}, [(0, 6, 0, 4)]),
        (2, {"heads": 4, "tp": 2}, [(0, 6, 0, 2), (0, 6, 2, 4)]),
        # Fewer heads than ranks: neighbours hold the same one.
        (4, {"heads": 2, "tp": 4}, [(0, 6, 0, 1)] * 2 + [(0, 6, 1, 2)] * 2),
        # A latent vector is one head on all ranks.
        (2, {"heads": 16, "tp": 2, "replicas": 2, "held": 1, "use_mla": True}, [(0, 6, 0, 1)] * 2),
        (2, {"heads": 2, "pp": 2}, [(0, 3, 0, 2), (3, 6, 0, 2)]),
        (4, {"heads": 4, "tp": 2, "pp": 2}, [(*a, *b) for a in STAGES for b in HALVES]),
    ],
)
def test_a_rank_holds_its_layers_and_heads(
    count: int, of: dict[str, Any], expected: list[tuple[int, int, int, int]]
) -> None:
    assert shards(count, **of) == expected


@pytest.mark.parametrize(
    "of",
    [
        {"heads": 4, "tp": 2, "held": 4},  # a rank that holds more than its part
        {"heads": 4, "tp": 2, "replicas": 2},  # the engine says that they are alike
        {"heads": 2, "tp": 3},
        {"heads": 4, "tp": 2, "use_mla": True, "held": 2},
        {"heads": 2, "pp": 2, "names": ["model.layers.0.attn", "model.layers.2.attn"]},
        {"heads": 2, "pp": 2, "names": ["layers.0.attn.1", "layers.1.attn.1", "layers.2.attn.1"]},
    ],
)
def test_what_does_not_add_up_is_not_served(of: dict[str, Any]) -> None:
    with pytest.raises(NotServed):
        part(0, **of)


# ── which versions share blocks ──────────────────────────────────────────────────────────────────


def engine(**changes: Any) -> Any:
    """What the format depends on, of a model that was compared."""
    config = {"rope_parameters": {"rope_type": "default"}, **changes.pop("config", {})}
    architectures = [changes.pop("architecture", "LlamaForCausalLM")]
    model = {
        "hf_config": SimpleNamespace(architectures=architectures, to_dict=lambda: config),
        "dtype": "torch.bfloat16",
        "quantization": None,
        "model_impl": "auto",
        "model_class_overrides": {},
    }
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "auto")),
        lora_config=changes.pop("lora", None),
        speculative_config=changes.pop("speculative", None),
        model_config=SimpleNamespace(**(model | changes)),
    )


def space(version: str, isa: str = "vec/AVX512/x86_64", **changes: Any) -> bytes:
    name = kv_format(version, engine(**changes), isa=isa)
    return fingerprint(msgspec.structs.replace(SPACE, kv_format=name), weights_epoch="")


def test_an_upgrade_between_versions_that_were_compared_keeps_the_space() -> None:
    assert len({space(version) for version in FORMATS}) == 1
    llama3 = {"rope_parameters": {"rope_type": "llama3"}}
    assert space("0.31.0", config=llama3) == space("0.32.0", config=llama3)


@pytest.mark.parametrize(
    "version", ["0.30.0", "0.32.1", "0.33.0", "0.32.0+ours", "0.32", "vllm-cpu-1"]
)
def test_a_version_that_was_not_compared_stands_alone(version: str) -> None:
    assert space(version) not in {space(known) for known in FORMATS}
    assert space(version) == space(version)


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "GemmaForCausalLM"},
        {"config": {"rope_parameters": {"rope_type": "yarn"}}},
        {"config": {"sliding_window": 4096}},
        {"config": {"hidden_act": "gelu"}},
        {"dtype": "torch.float64"},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"model_impl": "transformers"},
        {"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
        {"lora": True},
        {"speculative": SimpleNamespace(method="eagle")},
        {"isa": "amx/AVX512/x86_64"},
    ],
    ids=str,
)
def test_a_model_that_was_not_compared_keeps_to_its_version(changes: dict[str, Any]) -> None:
    old, new = (space(version, **changes) for version in ("0.31.0", "0.32.0"))
    assert old != new
    assert new != space("0.32.0")
