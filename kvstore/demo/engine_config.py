"""Start of a vLLM server: model, memory, connector, and settings common to all tests."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

SERVED_NAME: Final = "model"
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one vLLM server."""

    model: Path
    dtype: Dtype = "float32"
    """float32 where tokens are compared: in bfloat16 a prefix-cache hit of vLLM already changes one
    greedy output in about a hundred against a full recompute."""
    socket: Path | None = None
    """The node's attach socket; None: vLLM without the connector."""
    max_model_len: int = 4096
    kv_blocks: int | None = None
    """Blocks (128 tokens) of the engine's own cache; None: as many as fit `kv_space_gib`."""
    kv_space_gib: int = 1
    max_num_seqs: int = 64
    hash_algorithm: str = "sha256_cbor"
    load_failure_policy: str = "recompute"
    connector: tuple[str, str] = ("kvstore.connector", "KVStoreConnector")
    """Module and class."""
    engine_id: str = ""
    """Empty: vLLM makes one."""
    connector_extra: dict[str, object] = field(default_factory=dict)
    """Further keys of `kv_connector_extra_config`."""
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Further arguments of the server."""

    def command(self) -> list[str]:
        """The server's command line."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", SERVED_NAME]
        command += ["--host", "127.0.0.1", "--port", "0", "--enforce-eager", "--dtype", self.dtype]
        command += ["--max-model-len", str(self.max_model_len)]
        command += ["--max-num-seqs", str(self.max_num_seqs)]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        command += ["--prefix-caching-hash-algo", self.hash_algorithm]
        if self.kv_blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.kv_blocks)]
        if self.socket is not None:
            transfer = {
                **({"engine_id": self.engine_id} if self.engine_id else {}),
                "kv_connector": self.connector[1],
                "kv_connector_module_path": self.connector[0],
                "kv_role": "kv_both",
                "kv_load_failure_policy": self.load_failure_policy,
                "kv_connector_extra_config": {"socket": str(self.socket), **self.connector_extra},
            }
            command += ["--kv-transfer-config", msgspec.json.encode(transfer).decode()]
        return [*command, *self.arguments]

    def full_environment(self) -> dict[str, str]:
        """The server's environment."""
        return {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_space_gib),
            # Binding would pin every engine of the machine to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",  # offers /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # The working directory must not shadow the installed package.
            "PYTHONSAFEPATH": "1",
            # Threads that spin while they wait, the default, are right on cores of their own. On
            # cores that others use too, a step then waits again and again for a thread that is
            # not running: seconds instead of milliseconds.
            "OMP_WAIT_POLICY": "PASSIVE",
            **self.environment,
        }
