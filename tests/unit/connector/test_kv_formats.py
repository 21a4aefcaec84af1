"""Which versions of an engine share blocks: those that were compared, and of which models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.connector.mapping import FORMATS, kv_format
from kvstore.wire.space import fingerprint
from tests.unit.client.rank_kit import SPACE


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
