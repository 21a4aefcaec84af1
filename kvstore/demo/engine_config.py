"""Start of a vLLM server: model, memory, connector."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

SERVED_NAME: Final = "model"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one vLLM server; by default it computes in float32."""

    model: Path | str
    """Directory, or name of the model in a hub."""
    served_name: str = SERVED_NAME
    socket: Path | None = None
    """The node's attach socket; None: vLLM without the connector."""
    max_model_len: int | None = 4096
    """Longest request in tokens; None: the model's own limit."""
    kv_blocks: int | None = None
    """Blocks (128 tokens) of the engine's own cache; None: as many as fit 1 GiB."""
    flags: tuple[str, ...] = ("--enforce-eager", "--dtype", "float32", "--max-num-seqs", "64")
    """Further flags of the server."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the server."""

    def command(self) -> list[str]:
        """The server's command line."""
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
            *("--port", "0", "--model", str(self.model), "--served-model-name", self.served_name),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--prefix-caching-hash-algo", "sha256_cbor", *self.flags),
        ]
        if self.max_model_len is not None:
            command += ["--max-model-len", str(self.max_model_len)]
        if self.kv_blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.kv_blocks)]
        if self.socket is not None:
            transfer = msgspec.json.encode(self.transfer(self.socket)).decode()
            command += ["--kv-transfer-config", transfer]
        return command

    def transfer(self, socket: Path) -> dict[str, object]:
        """Its connector's configuration, with the node's attach socket."""
        return {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(socket)},
        }

    def full_environment(self) -> dict[str, str]:
        """The server's environment."""
        return {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Binding would pin every engine of the machine to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",  # offers /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            # The working directory must not shadow the installed package.
            "PYTHONSAFEPATH": "1",
            # Threads that spin while they wait, the default, are right on cores of their own. On
            # cores that others use too, a step then waits again and again for a thread that is
            # not running: seconds instead of milliseconds.
            "OMP_WAIT_POLICY": "PASSIVE",
            **({"HF_HUB_OFFLINE": "1"} if isinstance(self.model, Path) else {}),
            **self.environment,
        }
