"""An NVIDIA GPU of capability 9.0 that is not there, for the engine's own path through CUDA.

    VirtualGpu().install()  # before vLLM's engine is imported

torch's tensors lie in the host's memory wherever they are asked for on `cuda`; streams and events
order nothing, since everything happens at once. A Triton kernel that is launched is first compiled
for sm_90 with the arguments of that launch, by the compiler and `ptxas` that a GPU machine uses,
and then run by Triton's interpreter, so that the engine computes real tokens.

Covers: imports, configuration, construction, every kernel that a run reaches with its true
signature, every operator of the compiled extension that is missing. Does not cover: anything that
time, streams, memory of a device or NCCL could do wrong, nor kvstore's copies on a device (the
caches are the host's here). Attributes of torch are replaced, never added: an engine that asks for
what this torch does not have fails here as it would there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, Self

CAPABILITY: Final = (9, 0)
MEMORY_BYTES: Final = 80 << 30
SHARED_BYTES: Final = 227 << 10
"""Shared memory of a block of threads on this capability, the most that a kernel may ask for."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One specialization of a kernel."""

    name: str
    seconds: float
    shared_bytes: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.shared_bytes <= SHARED_BYTES


def _triton(module: str) -> Any:
    return import_module(f"triton.{module}")


class VirtualGpu:
    """The device, and the kernels that were compiled for it."""

    def __init__(self, *, tolerant: bool = False) -> None:
        """
        Args:
            tolerant: go on where the interpreter cannot run what the compiler compiled. Tokens that
                such a kernel helps to choose are then not to be trusted; a warm-up has none.
        """
        self.compiled: list[Compiled] = []
        self._tolerant = tolerant

    def install(self) -> None:
        """Take the place of torch's, Triton's and vLLM's device."""
        _replace_torch()
        self._replace_triton()
        _replace_platform()

    def rows(self) -> list[dict[str, Any]]:
        """The kernels as JSON."""
        return [{**asdict(each), "ok": each.ok} for each in self.compiled]

    def _replace_triton(self) -> None:
        kernel_class = _triton("runtime.jit").JITFunction
        interpreter = _triton("runtime.interpreter")
        _replace(_triton("backends.nvidia.driver").CudaDriver, is_active=staticmethod(lambda: True))
        _triton("runtime").driver.set_active(_Driver())
        compile_only = kernel_class.run
        interpreted: dict[int, Any] = {}

        def host(kernel: Any) -> Any:
            return interpreted.setdefault(id(kernel), interpreter.InterpretedFunction(kernel.fn))

        def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            self._compile(compile_only, kernel, grid, arguments, named)
            if not warmup:
                with contextlib.suppress(*[interpreter.InterpreterError] * self._tolerant):
                    host(kernel)[grid](*arguments, **named)
            return None

        call = lambda kernel, *a, **k: _called(host(kernel), a, k)  # noqa: E731
        _replace(kernel_class, run=run, __call__=call)
        _mend_interpreter()

    def _compile(
        self,
        compile_only: Callable[..., Any],
        kernel: Any,
        grid: Any,
        arguments: Sequence[Any],
        named: Mapping[str, Any],
    ) -> None:
        known = sum(len(cache[0]) for cache in kernel.device_caches.values())
        started = time.monotonic()
        name = f"{kernel.module}.{kernel.__name__}"
        try:
            made = compile_only(kernel, *arguments, grid=grid, warmup=True, **named)
        except Exception as error:  # noqa: BLE001  what a compiler raises has no common base
            found = Compiled(name, time.monotonic() - started, error=_first_line(error))
            if found.error not in {each.error for each in self.compiled if each.name == name}:
                self.compiled.append(found)
            return
        if sum(len(cache[0]) for cache in kernel.device_caches.values()) > known:
            shared = int(made.metadata.shared)
            self.compiled.append(Compiled(name, time.monotonic() - started, shared))


def _called(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """A function that a kernel calls, in the interpreter. Its own way to call one leaves parts of
    the language replaced, and the compiler would see them."""
    scope = vars(_triton("runtime.interpreter"))["_patch_lang"](function.fn)
    try:
        return function.rewrite()(*arguments, **named)
    finally:
        scope.restore()


def _mend_interpreter() -> None:
    """Scalars are arrays of one element there, which numpy 2.5 does not take for an integer."""
    interpreter = _triton("runtime.interpreter")
    replace = vars(interpreter)["_patch_lang_tensor"]

    def replaced(tensor: Any, scope: Any) -> None:
        replace(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    _replace(interpreter, _patch_lang_tensor=replaced)


class _Driver:
    """What Triton asks its driver for while it compiles."""

    def __init__(self) -> None:
        target = _triton("backends.compiler").GPUTarget
        self._target = target("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES}
        )

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


def _replace_platform() -> None:
    """vLLM's CUDA platform as it is without NVML, whose tensors the host's operators take."""
    import torch
    import vllm._C_stable_libtorch as extension
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    class Virtual(NonNvmlCudaPlatform):
        dispatch_key = "CPU"
        dist_backend = "gloo"

    _replace(vllm.platforms, _current_platform=Virtual())
    _replace(extension, view_of_pinned=lambda tensor: tensor)
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.gpu_worker import Worker

    # Of layers on a host kvstore asks for which processor they pack their pages.
    Attention.isa = "virtual"
    name = "_init_workspace_and_model_runner"
    begin = vars(Worker)[name]

    def on_host(worker: Any) -> None:
        worker.device = torch.device("cpu")  # what its tensors say of themselves
        begin(worker)

    _replace(Worker, **{name: on_host})
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    # No graph can be captured, so that all steps are launched one by one.
    _replace(GPUModelRunner, capture_model=lambda _: 0, profile_cudagraph_memory=lambda _: 0)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][:200]}"


class _Stream:
    """Of either kind; also the context that makes it the current one."""

    cuda_stream = 0
    device = None

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, _: Any = None) -> None: ...
    def wait(self, _: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def _properties(_: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="virtual", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY_BYTES,
        multi_processor_count=132, warp_size=32, is_integrated=False, L2_cache_size=50 << 20,
        shared_memory_per_block_optin=SHARED_BYTES, max_threads_per_multi_processor=2048,
    )  # fmt: skip


def _replace_torch() -> None:
    import torch

    @contextlib.contextmanager
    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    main = _Stream()
    both = {
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": lambda *_: main,
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_stream": lambda *_: None,
    }
    _replace(
        torch.cuda,
        **both,
        _lazy_init=lambda: None,
        is_initialized=lambda: False,
        current_device=lambda: 0,
        set_device=lambda *_: None,
        get_device_capability=lambda *_: CAPABILITY,
        get_device_name=lambda *_: "virtual",
        get_device_properties=_properties,
        mem_get_info=lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        manual_seed_all=lambda _: None,
        default_stream=lambda *_: main,
        Stream=_Stream,
        Event=_Event,
        stream=lambda stream: stream or main,
        device=nothing,
        is_current_stream_capturing=lambda: False,
    )
    _replace(
        torch.accelerator,
        **both,
        current_accelerator=lambda *_, **__: torch.device("cuda"),
        current_device_index=lambda: 0,
        set_device_index=lambda *_: None,
        get_memory_info=lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        device_index=nothing,
    )
    _replace(torch, Event=_Event, Stream=_Stream)
    _on_host().__enter__()


def _replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        assert hasattr(owner, name), f"there is no {owner.__name__}.{name} to replace"
        setattr(owner, name, value)


def _on_host() -> Any:
    """A mode that puts on the host what is asked for on the device."""
    import torch
    from torch.overrides import TorchFunctionMode

    host = torch.device("cpu")

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return host
        return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value

    class OnHost(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, _types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            named = {key: moved(value) for key, value in (named or {}).items()}
            if named.get("pin_memory"):
                named["pin_memory"] = False
            if function is torch.Tensor.cuda:
                return arguments[0]
            if function is torch.Tensor.pin_memory:
                return arguments[0]
            return function(*map(moved, arguments), **named)

    return OnHost()
