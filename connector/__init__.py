"""The vLLM side of kvstore, loaded by `--kv-transfer-config`.

| module              | cares about                                          | runs in           |
|---------------------|------------------------------------------------------|-------------------|
| `vllm.py`           | vllm's connector interface, the one guard            | both              |
| `scheduler_side.py` | requests, steps, idle times → `client.core.scheduler` | scheduler process |
| `worker_side.py`    | the step's hooks → jobs, fences, results             | each worker       |
| `copier.py`         | the copy thread: socket, copies, exchange of plans   | each worker       |
| `mapping.py`        | engine configuration → space, shard, drafts (pure)   | both              |
| `devices.py`        | the cache's pages, the copy engine of its device     | each worker       |
| `groups.py`         | KV cache groups, the engine's rules for hits         | both              |
| `weights.py`        | digests of weights and adapters on disk              | both              |
| `config.py`         | keys of kv_connector_extra_config, KV events         | both              |
| `checks.py`         | engine configurations that are not served            | both              |
| `prompts.py`        | prompts and their keys: images, tails, adapters      | scheduler process |
| `stats.py`          | counts in vllm's metrics                             | both, frontend    |

Importing this package is cheap and imports no engine: `KVStoreConnector` is loaded when asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVStoreConnector", "register"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreConnector":
        from kvstore.connector.vllm import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Entry point of `vllm.general_plugins`: makes "kv_connector":"KVStoreConnector" enough."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVStoreConnector" not in KVConnectorFactory._registry:  # noqa: SLF001 - no public question
        KVConnectorFactory.register_connector(
            "KVStoreConnector", "kvstore.connector.vllm", "KVStoreConnector"
        )
