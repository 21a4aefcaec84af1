"""What the connector refuses, asked with vLLM's own configuration and its own MultiConnector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
BLOCK_TOKENS = 128


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Makes the configuration of an engine with these connectors."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from tests.kit.models import build_model

    model = build_model(tmp_path_factory.mktemp("configs") / "model", size="tiny")

    def make(*extras: dict[str, str]) -> Any:
        ours = [
            {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "kvstore.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
            for extra in extras
        ]
        several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        transfer = several | {"kv_connector_extra_config": {"connectors": ours}}
        config = EngineArgs(
            model=str(model),
            prefix_caching_hash_algo="sha256_cbor",
            kv_transfer_config=KVTransferConfig(**(ours[0] if len(ours) == 1 else transfer)),
        ).create_engine_config()
        config.cache_config.block_size = BLOCK_TOKENS
        return config

    return make


def connector(config: Any, role: str = "SCHEDULER") -> Any:
    """The engine's connector, made as the engine makes it."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    cache = KVCacheConfig(
        num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
    )
    return KVConnectorFactory.create_connector(config, KVConnectorRole[role], cache)


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_sleep_mode_is_refused(role: str, configured: Callable[..., Any], tmp_path: Path) -> None:
    """0.33 asks the class before it makes a connector, 0.32 does not ask."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    from kvstore.connector.vllm import KVStoreConnector

    config = configured({"socket": str(tmp_path / "node.sock")})
    connector(config, role).shutdown()
    config.model_config.enable_sleep_mode = True  # a CPU platform refuses the flag itself
    with pytest.raises(ValueError, match="drop --enable-sleep-mode"):
        connector(config, role)
    assert not KVStoreConnector.supports_sleep_mode(config.kv_transfer_config)
    asks = getattr(multi_connector.MultiConnector, "supports_sleep_mode", None)
    if asks is not None:
        several = configured({"socket": "a"}, {"socket": "b"})
        assert not asks(several.kv_transfer_config)


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_a_second_connector_of_one_engine_is_refused(
    role: str, configured: Callable[..., Any], tmp_path: Path
) -> None:
    here, there = {"socket": str(tmp_path / "a.sock")}, {"socket": str(tmp_path / "b.sock")}
    with pytest.raises(ValueError, match=r"name it once in \"connectors\" of --kv-transfer-config"):
        connector(configured(here, here), role)
    connector(configured(here, there), role).shutdown()
    other_tenant = connector(configured(here, here | {"tenant": "another"}), role)
    other_tenant.shutdown()


def test_an_engine_that_was_shut_down_makes_room_for_its_next_connector(
    configured: Callable[..., Any], tmp_path: Path
) -> None:
    config = configured({"socket": str(tmp_path / "node.sock")})
    first = connector(config)
    with pytest.raises(ValueError, match="configured twice"):
        connector(config)
    first.shutdown()
    connector(config).shutdown()
    other = configured({"socket": str(tmp_path / "node.sock")})
    both = [connector(each) for each in (config, other)]
    for each in both:
        each.shutdown()
