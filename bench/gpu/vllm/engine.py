"""One vLLM in this process: prompts, their tokens, what they found cached, time to first token.

    python bench/gpu/vllm/engine.py MODEL OUT.json --device cuda [--socket NODE] [--graphs]

Every prompt runs twice, one at a time. The first round is computed, or loaded where the node has
it; the second one finds the engine's own prefix cache. Two prompts of the same length go before,
unmeasured, so that kernels are compiled and a bfloat16 engine on a CPU with AMX does not begin with
a single token, of which it dies.

cuda     As it will run there: Triton's attention, no operator of the compiled extension.
cpu      The installed vLLM for CPUs, float32: the program's own logic.
virtual  vLLM for GPUs on a device that is not there (`virtual.py`): every kernel compiled for it,
         with --graphs those of vLLM's warm-up too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[3]))  # bench/ is not installed

from bench.gpu.vllm.model import VOCABULARY

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One process: nothing of NCCL or Gloo needs more network than this.
    "VLLM_HOST_IP": "127.0.0.1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
SEED: Final = 11
SHORT: Final = tuple(range(3, 19))
SETTLE_S: Final = 20.0
QUIET_S: Final = 1.0
"""Stores have ended when the node's blocks did not grow for so long."""


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Random token ids without the special ones; the same in every process."""
    draw = random.Random(SEED)
    return [[draw.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Of vLLM's `LLM`, for this device."""
    length = options.length or options.prompt_tokens + options.new_tokens + 1
    common: dict[str, Any] = {
        "model": str(options.model),
        "skip_tokenizer_init": True,
        "enforce_eager": not options.graphs,
        "max_model_len": length,
        "max_num_batched_tokens": max(length, 512),
        "max_num_seqs": 8,
        "seed": 0,
        "load_format": "safetensors",
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
    }
    if options.socket is not None:
        common["kv_transfer_config"] = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "socket": str(options.socket),
                "min_load_tokens": 0,
                "lookup_deadline_ms": 500,
            },
        }
    if options.device == "cpu":
        return {**common, "dtype": "float32"}
    compilation: dict[str, Any] = {"custom_ops": ["none"]}
    if options.graphs:  # of decodes, whole; those of pieces need torch's compiler
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        compilation |= {"cudagraph_capture_sizes": [1, 2, 4, 8]}
        # Every kernel of every sampling parameter, which the virtual GPU is there to compile.
        common["kernel_config"] = {"enable_jit_warmup": options.device == "virtual"}
    return {
        **common,
        "dtype": "bfloat16",
        "block_size": 16,
        "kv_cache_memory_bytes": options.kv_mib << 20,
        "gpu_memory_utilization": 0.5,
        "compilation_config": compilation,
        "attention_config": {"backend": "TRITON_ATTN"},
        # Without torch's compiler vLLM takes its compiled norms first, whatever custom_ops says.
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
    }


class Engine:
    """vLLM, one request at a time."""

    def __init__(self, llm_arguments: Mapping[str, Any], new_tokens: int) -> None:
        from vllm import LLM, SamplingParams

        self._engine = LLM(**llm_arguments).llm_engine
        self._greedy = SamplingParams(
            max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self._drawn = SamplingParams(
            max_tokens=2, temperature=0.8, seed=1, ignore_eos=True, detokenize=False
        )
        self._count = 0

    def run(self, prompt: Sequence[int], *, drawn: bool = False) -> dict[str, Any]:
        """Tokens, cached prompt tokens and seconds to the first token."""
        self._count += 1
        begin = time.monotonic()
        first_s = 0.0
        self._engine.add_request(
            str(self._count),
            {"prompt_token_ids": list(prompt)},
            self._drawn if drawn else self._greedy,
        )
        last: Any = None
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                last = output
                if not first_s and output.outputs[0].token_ids:
                    first_s = time.monotonic() - begin
        return {
            "tokens": list(last.outputs[0].token_ids),
            "cached": int(last.num_cached_tokens or 0),
            "ttft_s": first_s,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """What vLLM made of the arguments, as far as a reader of the result needs it."""
        config = self._engine.vllm_config
        return {
            "runner": "v2" if getattr(config, "use_v2_model_runner", False) else "v1",
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "block_tokens": int(config.cache_config.block_size),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "dtype": str(config.model_config.dtype),
        }


def measured(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Both rounds, behind the two prompts that nobody looks at."""
    warm_up, *asked = prompts(options.prompts + 1, options.prompt_tokens)
    engine.run(warm_up)
    engine.run(warm_up)
    first = [engine.run(each) for each in asked]
    again = [engine.run(each) for each in asked]
    return {"first": first, "again": again}


def ready(socket: Path, engine: Engine) -> bool:
    """Wait until the engine is attached and all of dram is there; False: not within SETTLE_S."""
    from kvstore.cli.ask import node_client
    from kvstore.engine.why.report import NodeReport, TierReport

    deadline = time.monotonic() + SETTLE_S
    with node_client(socket) as node:
        while time.monotonic() < deadline:
            engine.run(SHORT)  # an idle engine does not attach
            sessions = sum(each.sessions for each in node.rows("nodes", NodeReport))
            dram = next(each for each in node.rows("tiers", TierReport) if each.tier == "dram")
            if sessions and dram.ready_bytes == dram.capacity_bytes:
                return True
            threading.Event().wait(0.1)
    return False


def settle(socket: Path, engine: Engine) -> int:
    """Wait until the node's blocks no longer grow; returns how many it has."""
    from kvstore.cli.ask import node_client
    from kvstore.engine.why.report import TierReport

    deadline = time.monotonic() + SETTLE_S
    blocks, since = -1, time.monotonic()
    with node_client(socket) as node:
        while time.monotonic() < min(deadline, since + QUIET_S):
            engine.run(SHORT)  # an idle engine does not step, and stores end in steps
            found = sum(each.blocks for each in node.rows("tiers", TierReport))
            if found != blocks:
                blocks, since = found, time.monotonic()
            threading.Event().wait(0.1)
    return blocks


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu", "virtual"), default="cuda")
    parser.add_argument("--socket", type=Path, help="of a node; default: without kvstore")
    parser.add_argument("--graphs", action="store_true", help="decode in CUDA graphs")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--length", type=int, default=0, help="longest request; 0: of these")
    parser.add_argument("--kv-mib", type=int, default=4096, help="the engine's own cache")
    return parser.parse_args(given)


def main() -> None:
    options = parsed()
    os.environ.update(ENVIRONMENT)
    gpu: Any = None
    if options.device == "virtual":
        from bench.gpu.vllm.virtual import VirtualGpu

        gpu = VirtualGpu(tolerant=options.graphs)
        gpu.install()
    engine = Engine(arguments(options), options.new_tokens)
    attached = options.socket is not None and ready(options.socket, engine)
    found = {**measured(engine, options), **engine.settings, "attached": attached}
    found["drawn"] = engine.run(prompts(1, options.prompt_tokens // 2)[0], drawn=True)["tokens"]
    if options.socket is not None:
        found["node_blocks"] = settle(options.socket, engine)
    if gpu is not None:
        found["kernels"] = gpu.rows()
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the answer is written; what vLLM's threads do at exit is not measured
