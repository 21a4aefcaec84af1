"""What vLLM does at each start or while it waits, and engines of tests do not: each second of the
processor that one saves is another test's.

Answers stay the same. In `make nightly` functions are compiled as vLLM compiles them.
"""

from __future__ import annotations

import gc
import logging.config
import mmap
import time
from functools import partial
from importlib import import_module
from typing import Any, Final

from tests.amounts import IS_NIGHTLY

POLL_S: Final = 0.0005


def be_frugal() -> None:
    """In a process that has imported vLLM, before engines are forked from it. What was imported is
    no garbage, and its pages stay shared."""
    _wait_without_spinning()
    _begin_quickly()
    if not IS_NIGHTLY:
        _compile_nothing()
    gc.collect()
    gc.freeze()


def _wait_without_spinning() -> None:
    """Processes of one engine look for messages every half millisecond, where vLLM spins: its
    scheduler while the worker computes, and a worker for a second after each request. Ranks add up
    their sums, and stages of a pipeline pass on their tensors, over sockets of PyTorch's, where
    vLLM spins on shared memory: a rank whose neighbour has no core would keep it from getting one.
    """
    queues = import_module("vllm.distributed.device_communicators.shm_broadcast")
    assert callable(queues.sched_yield)
    vars(queues)["sched_yield"] = partial(time.sleep, POLL_S)
    groups = import_module("vllm.distributed.device_communicators.cpu_communicator")
    assert callable(groups.CpuCommunicator._all_group_ranks_share_shm_group_name)
    groups.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False


def _begin_quickly() -> None:
    """Half of a start: each worker looks through all modules for kernels to replace, which is done
    once here; writes zeros to 1 GiB of cache, whose pages the kernel clears when they are used; and
    each process resets a thousand loggers, which are as they were."""
    platform = import_module("vllm.platforms").current_platform
    platform.register_triton_kernel_overrides()
    type(platform).register_triton_kernel_overrides = lambda *_: None
    memory = import_module("vllm.v1.worker.utils")
    assert callable(memory.allocate_kv_cache)
    vars(memory)["torch"] = _Lazily(memory.torch)
    assert callable(vars(logging.config)["_handle_existing_loggers"])
    vars(logging.config)["_handle_existing_loggers"] = lambda *_: None


class _Lazily:
    """PyTorch, with zeros that take no memory before they are used."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, size: int, *, dtype: Any, device: Any) -> Any:
        """Shape [size], on the CPU. It begins with a page, which PyTorch's does not."""
        assert self._torch.device(device).type == "cpu"
        memory = mmap.mmap(-1, size * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return self._torch.frombuffer(memory, dtype=dtype)


def _compile_nothing() -> None:
    """Functions that vLLM compiles even in an eager engine are called as they are: each rank would
    compile them for 4 s and more. (By a setting, for by the variable of PyTorch vLLM would choose
    another configuration.)

    A later stage of a pipeline has the tensors that it receives into from a warm-up, which an eager
    engine for CPUs skips. It makes them here, as vLLM's second model runner does."""
    compiler: Any = import_module("torch._dynamo.config")
    compiler.disable = True
    runner = import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner
    stages = import_module("vllm.distributed.parallel_state")
    load = runner.load_model

    def load_model(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        if not stages.get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    runner.load_model = load_model
