"""In place of vLLM's compiled extension, `vllm/_C_stable_libtorch.py` in the packed tree.

The operators that vLLM asks for on its way to a Llama with Triton's attention, and no others: one
that is missing fails with its name. vLLM asks whether some exist while it is imported, for one when
an activation is made, and for one wherever the host writes what the device reads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_OPERATORS = torch.library.Library("_C", "FRAGMENT")

_TYPES = {2: "<i2", 4: "<i4", 8: "<i8"}
"""An integer type of that many bytes, in the notation of the array interface."""


class _HostArray:
    """Pinned memory of the host as CUDA's array interface describes it. Alive while torch uses it,
    and with it the tensor whose memory it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": _TYPES.get(size, "|u1"),
        }


def view_of_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device on the same memory: one address on both sides (UVA)."""
    device = torch.device("cuda", torch.cuda.current_device())
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    seen = torch.as_tensor(_HostArray(tensor), device=device)
    if seen.data_ptr() != tensor.data_ptr():
        raise RuntimeError("torch copied pinned memory instead of sharing it")
    return seen.view(tensor.dtype)


@cache
def views_work() -> bool:
    """Whether the device sees what the host wrote. Without it vLLM copies by itself, as it does
    where memory cannot be pinned."""
    try:
        host = torch.arange(8, dtype=torch.int32).pin_memory()
        seen = view_of_pinned(host)
        host += 1
        return bool(seen.sum().item() == int(host.sum()))
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"vLLM copies what it would share with the device: {error}")
        return False


def _silu_and_mul(result: torch.Tensor, value: torch.Tensor) -> None:
    half = value.shape[-1] // 2
    result.copy_(torch.nn.functional.silu(value[..., :half]) * value[..., half:])


def _define(schema: str, function: Any, key: str = "CompositeExplicitAutograd") -> None:
    _OPERATORS.define(schema)
    _OPERATORS.impl(schema.partition("(")[0], function, key)


for _name in (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
):
    _define(f"{_name}(int capability) -> bool", lambda _: False)
_define("silu_and_mul(Tensor! result, Tensor value) -> ()", _silu_and_mul)
_define(
    "get_cuda_view_from_cpu_tensor(Tensor tensor) -> Tensor",
    lambda tensor: view_of_pinned(tensor),  # looked up at each call: a virtual GPU replaces it
    "CPU",
)
