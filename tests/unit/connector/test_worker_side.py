"""WorkerSide as vllm drives it, on real CPU tensors, against a scripted node."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.client.core.plan import LoadJob, RankReport, StepPlan, StoreJob
from kvstore.connector import devices, worker_side
from kvstore.connector.checks import NotServed
from kvstore.connector.config import ConnectorConfig
from kvstore.connector.mapping import GroupLayers, describe
from kvstore.connector.worker_side import WorkerSide
from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.host import HostCopies
from kvstore.ports import BlockCopy
from kvstore.types import PAGE_BYTES
from kvstore.wire.messages import Seal
from kvstore.wire.space import Group
from tests.kit.cores import reading
from tests.kit.fake_cuda import FakeCuda, FakeKernels
from tests.kit.scripted_node import WAIT_S, ScriptedNode
from tests.kit.simulated_device import SimulatedDevice

pytestmark = pytest.mark.engine

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 12, 6, 2, 32, 64
BLOCK = LAYERS * HEADS * TOKENS * CONTENT * 4


NAMES = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]


class Layer:
    isa: str | None = "vec"

    @staticmethod
    def get_attn_backend() -> Any:
        return SimpleNamespace(get_name=lambda: "CPU_ATTN")


class HfConfig:
    architectures = ("LlamaForCausalLM",)

    def __init__(self, **changes: object) -> None:
        self.changes = changes

    def to_dict(self) -> dict[str, object]:
        return {"hidden_size": 256, "_name_or_path": "/a", "dtype": "float32", **self.changes}


def kv_caches(dtype: str = "float32") -> dict[str, Any]:
    """As vllm lays them: one allocation, layer after layer; given in no useful order."""
    import torch

    memory = torch.rand(LAYERS, BLOCKS, HEADS, TOKENS, CONTENT).to(getattr(torch, dtype))
    return dict(sorted(zip(NAMES, memory, strict=True)))


def vllm_config(path: str, **changes: Any) -> Any:
    import torch

    model = SimpleNamespace(
        model=path,
        seed=0,
        revision=None,
        dtype=changes.get("dtype", torch.float32),
        quantization=None,
        quantization_config=None,
        model_impl="auto",
        model_class_overrides=None,
        disable_sliding_window=False,
        max_model_len=changes.get("max_model_len", 4096),
        hf_config=changes.get("hf_config", HfConfig()),
        multimodal_config=changes.get("images"),
        get_total_num_kv_heads=lambda: changes.get("total_heads", HEADS),
        get_total_num_hidden_layers=lambda: LAYERS,
        use_mla=False,
    )
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor"),
        parallel_config=SimpleNamespace(
            rank=0, tensor_parallel_size=changes.get("tp", 1), pipeline_parallel_size=1
        ),
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
        instance_id="instance",
        speculative_config=changes.get("speculative"),
        num_prefill_lookahead_tokens=changes.get("lookahead", 0),
        lora_config=changes.get("lora"),
        compilation_config=SimpleNamespace(
            static_forward_context={
                name: changes.get("layer", Layer())
                for name in (*NAMES, *changes.get("draft_names", ()))
            }
        ),
    )


class CacheConfig(SimpleNamespace):
    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        return tuple(range(len(self.kv_cache_groups)))


def kv_cache_config(layout: str = "LBHNC", names: Sequence[str] = NAMES) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32
    )
    groups = [SimpleNamespace(layer_names=names, kv_cache_spec=spec)]
    return CacheConfig(
        num_blocks=BLOCKS,
        kv_cache_groups=groups,
        kv_cache_layout=layout,
        hash_block_size=TOKENS,
        kv_tp_replicas=1,
    )


def described(**changes: Any) -> Group:
    config = vllm_config("/a", **changes)
    return describe(config, kv_cache_config(), kv_caches(), weights=["w"])[0]


def drafting(
    method: str, *names: str, heads: int = 1, tp: int = 1, weights: str = "d"
) -> tuple[Group, GroupLayers]:
    """An engine with a draft model of such layers, of one KV head in all."""
    import torch

    speculative = SimpleNamespace(
        method=method,
        draft_load_config=None,
        use_eagle_block_drop=lambda: method != "draft_model",
        draft_model_config=vllm_config("/draft", total_heads=1).model_config,
    )
    config = vllm_config("/a", speculative=speculative, draft_names=names, lookahead=1, tp=tp)
    config.model_config.get_total_num_kv_heads = lambda: tp * HEADS
    caches = kv_caches() | {
        name: torch.rand(BLOCKS, heads, TOKENS, CONTENT) for name in names if name not in NAMES
    }
    cache_config = kv_cache_config(names=list(caches))
    return describe(config, cache_config, caches, weights=["w", weights])


# ── mapping ──────────────────────────────────────────────────────────────────────────────────────


def test_the_models_path_is_not_in_the_space_and_its_configuration_is() -> None:
    import torch

    base = described().space
    assert described(hf_config=HfConfig(_name_or_path="/b", transformers_version="9")).space == base
    assert described(max_model_len=100).space == base
    longrope = HfConfig(rope_parameters={"rope_type": "longrope"})
    others = [
        described(hf_config=HfConfig(rope_theta=5)).space,
        described(hf_config=longrope).space,
        described(hf_config=longrope, max_model_len=100).space,
        described(dtype=torch.bfloat16).space,
    ]
    assert len({*others, base}) == 5


def test_what_the_model_sees_of_an_image_is_in_the_space() -> None:
    from vllm.config.multimodal import MultiModalConfig

    settings: list[dict[str, Any]] = [
        {},
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"mm_processor_kwargs": {"num_crops": 16}},
        {"media_io_kwargs": {"video": {"num_frames": 40}}},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        {"mm_device_do_normalize": False},
        {"mm_encoder_attn_dtype": "fp8"},
    ]
    spaces = {described(images=MultiModalConfig(**each)).space for each in settings}
    assert len(spaces | {described().space}) == len(settings) + 1
    cache = MultiModalConfig(mm_processor_cache_gb=1)
    assert described(images=cache).space in spaces


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative": SimpleNamespace(method="dflash")},
        {"total_heads": 4 * HEADS, "tp": 2},
        {"layer": SimpleNamespace()},
    ],
)
def test_what_cannot_be_told_for_certain_is_not_served(changes: dict[str, Any]) -> None:
    with pytest.raises(NotServed):
        describe(vllm_config("/a", **changes), kv_cache_config(), kv_caches(), weights=["w"])
    with pytest.raises(NotServed, match="layout"):
        describe(vllm_config("/a"), kv_cache_config("LHBNC"), kv_caches(), weights=["w"])


# ── a step ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def caches() -> dict[str, Any]:
    return kv_caches()


class OnCuda:
    """A tensor of the host's that says that it is on a GPU: its memory is the simulated one's."""

    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __getitem__(self, index: Any) -> Any:
        return self._tensor[index]


BOTH_DEVICES = pytest.mark.parametrize("side", ["cpu", "cuda"], indirect=True)


@pytest.fixture
def side(
    tmp_path: Path,
    caches: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[WorkerSide]:
    config = ConnectorConfig(socket=str(tmp_path / "node.sock"))
    side = WorkerSide(config, vllm_config("/a"), kv_cache_config())
    if getattr(request, "param", "cpu") == "cuda":
        import torch

        device = SimulatedDevice(seed=3)
        runtime, kernels = FakeCuda(device), FakeKernels(device)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        stream = SimpleNamespace(cuda_stream=runtime.engine_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: stream)
        made = partial(CudaDevice, runtime=runtime, driver=runtime, kernels=kernels)
        monkeypatch.setattr(devices, "CudaDevice", made)
        side.register_kv_caches({name: OnCuda(cache) for name, cache in caches.items()})
    else:
        side.register_kv_caches(caches)
    yield side
    side.shutdown()


def job(kind: type[Any], blocks: tuple[int, ...], **more: Any) -> Any:
    slots = np.arange(len(blocks), dtype="<u4") * (-(-BLOCK // 65536) * 65536 // PAGE_BYTES)
    return kind(
        session=5,
        block_ids=blocks,
        keys=b"".join(bytes([block]) * 32 for block in blocks),
        slots=slots.tobytes(),
        generations=np.ones(len(blocks), "<u8").tobytes(),
        **more,
    )


def step(side: WorkerSide, plan: StepPlan, *, idle: bool) -> tuple[set[str], set[int]]:
    """Requests whose load ended, and blocks that hold nothing valid."""
    side.handle_preemptions(plan)
    side.start_load_kv(plan)
    side.wait_for_save(plan)
    finished, _ = side.get_finished(idle=idle)
    return finished, side.block_ids_with_load_errors()


def finish(side: WorkerSide) -> tuple[set[str], set[int], list[RankReport]]:
    """Idle steps until a load ends."""
    reports = []
    for _ in range(int(WAIT_S / 0.005)):
        finished, errors = step(side, StepPlan(), idle=True)
        report = side.build_worker_meta()
        reports += [report] if report else []
        if finished:
            return finished, errors, reports
    raise AssertionError("no load ended")


def test_a_timed_step_is_reported_once_with_or_without_a_node(side: WorkerSide) -> None:
    for plan in (StepPlan(step=7), StepPlan(), StepPlan(step=8)):
        assert step(side, plan, idle=False) == (set(), set())
    report = side.build_worker_meta()
    assert report is not None
    assert (report.step, report.loads, report.store_jobs_done) == (8, (), ())
    assert step(side, StepPlan(), idle=False) == (set(), set())
    assert side.build_worker_meta() is None, "nothing to say costs the engine nothing"


@BOTH_DEVICES
def test_blocks_go_to_the_node_and_come_back(
    node: ScriptedNode, side: WorkerSide, caches: dict[str, Any]
) -> None:
    hello = node.open_session(5)
    assert (hello.engine_id, hello.nonce, hello.tenant) == ("engine", "instance", "default")
    assert hello.groups[0].block_bytes == BLOCK
    assert hello.groups[0].space.isa.split("/")[0] in ("vec", "cuda")
    step(side, StepPlan(stores=(job(StoreJob, (2, 4), job=1),)), idle=False)
    checksums = node.receive(Seal).checksums
    before = [cache[2].clone() for cache in caches.values()]
    for cache in caches.values():
        cache[2] = 0
    load = job(LoadJob, (2, 4), request="r", lease=1, checksums=checksums)
    side.start_load_kv(StepPlan(loads=(load,)))
    finished, errors, reports = finish(side)
    assert (finished, errors) == ({"r"}, set())
    assert all((cache[2] == b).all() for cache, b in zip(caches.values(), before, strict=True))
    assert sum(report.blocks_sealed for report in reports) == 2
    assert [len(report.loads) for report in reports if report.loads] == [1]
    assert step(side, StepPlan(), idle=True) == (set(), set())
    assert side.build_worker_meta() is None


@BOTH_DEVICES
def test_a_failed_load_is_told_once_with_its_blocks(node: ScriptedNode, side: WorkerSide) -> None:
    node.open_session(5)
    load = job(LoadJob, (2, 4), request="r", lease=1, checksums=b"\1" * 32)
    side.start_load_kv(StepPlan(loads=(load,)))
    finished, errors, reports = finish(side)
    assert (finished, errors) == ({"r"}, {2, 4})
    assert reports[-1].loads[0].failed_block_ids == (2, 4)
    assert step(side, StepPlan(), idle=True) == (set(), set())


@pytest.mark.parametrize("is_told_to_save", [True, False])
def test_a_steps_stores_are_submitted_once_on_every_pipeline_stage(
    side: WorkerSide, monkeypatch: pytest.MonkeyPatch, is_told_to_save: bool
) -> None:
    submitted: list[StepPlan] = []
    monkeypatch.setattr(side, "_submit", submitted.append)
    plans = [StepPlan(stores=(job(StoreJob, (n,), job=n),)) for n in (1, 2)]
    for plan in (*plans, StepPlan()):
        side.handle_preemptions(plan)
        side.start_load_kv(plan)
        if is_told_to_save:
            side.wait_for_save(plan)
        side.get_finished()
    assert submitted == plans


def test_a_store_that_comes_late_is_fenced_too(
    node: ScriptedNode, side: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.open_session(5)
    monkeypatch.setattr(worker_side, "FENCE_S_MAX", WAIT_S)
    side.start_load_kv(StepPlan(stores=(job(StoreJob, (2, 4), job=1),)))
    side.handle_preemptions(StepPlan(fence_blocks=(4,)))
    assert side._handoff is not None
    with side._handoff.core() as core:
        assert 4 not in reading(core)
    assert len(node.receive(Seal).slots) == 8


@BOTH_DEVICES
def test_after_shutdown_loads_still_end(node: ScriptedNode, side: WorkerSide) -> None:
    node.open_session(5)
    side.shutdown()
    side.shutdown()
    plan = StepPlan(loads=(job(LoadJob, (2,), request="r", lease=1),), fence_blocks=(1,))
    assert step(side, plan, idle=True) == ({"r"}, {2})
    assert step(side, StepPlan(), idle=True) == (set(), set())


@pytest.mark.parametrize("asks_for_meta", [True, False])
def test_a_rank_without_a_cache_says_why_once_and_ends_every_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asks_for_meta: bool
) -> None:
    config = ConnectorConfig(socket=str(tmp_path / "node.sock"))
    side = WorkerSide(config, vllm_config("/a"), kv_cache_config())
    side.register_kv_caches({name: cache.to("meta") for name, cache in kv_caches().items()})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("kvstore: the cache is off: the KV cache is on meta")
    assert side.unserved in line
    load = job(LoadJob, (2,), request="r", lease=1)
    plan = StepPlan(loads=(load,), stores=(job(StoreJob, (3,), job=9),))
    assert step(side, plan, idle=True) == ({"r"}, {2})
    if asks_for_meta:
        report = side.build_worker_meta()
        assert report is not None
        assert (report.store_jobs_done, report.loads[0].request) == ((9,), "r")
        assert side.build_worker_meta() is None
    assert step(side, StepPlan(), idle=True) == (set(), set())
    side.shutdown()


def test_a_rank_whose_copies_are_wrong_is_not_served_and_gives_them_back(
    tmp_path: Path, caches: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(HostCopies):
        closed = False

        def begin(self, copy: BlockCopy) -> None:
            super().begin(msgspec.structs.replace(copy, block_id=(copy.block_id + 1) % BLOCKS))

        def close(self) -> None:
            self.closed = True

    made: list[Wrong] = []

    def open_wrong(groups: Any, block_count: int) -> Wrong:
        made.append(Wrong(devices.host_caches(groups, block_count)))
        return made[-1]

    config = ConnectorConfig(socket=str(tmp_path / "node.sock"))
    side = WorkerSide(config, vllm_config("/a"), kv_cache_config(), open_copies=open_wrong)
    side.register_kv_caches(caches)
    reason = "copies from and to the KV cache do not work on cpu: a stored block has other bytes"
    assert side.unserved.startswith(reason)
    assert reason in caplog.text
    assert made[0].closed
    plan = StepPlan(loads=(job(LoadJob, (2,), request="r", lease=1),))
    assert step(side, plan, idle=True) == ({"r"}, {2})


def test_a_fence_is_waited_for_through_the_copy_thread(
    node: ScriptedNode, side: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.open_session(5)
    assert side._handoff is not None
    assert isinstance(side._copies, HostCopies)
    core, cache, fenced = side._handoff._core, side._copies._caches[0], threading.Event()
    fence, store = core.fence, cache.store

    def note_fence(blocks: Any) -> bool:
        fenced.set()
        return fence(blocks)

    def store_when_fenced(*args: Any) -> bytes:
        assert fenced.wait(WAIT_S)
        return store(*args)

    monkeypatch.setattr(core, "fence", note_fence)
    monkeypatch.setattr(cache, "store", store_when_fenced)
    monkeypatch.setattr(worker_side, "FENCE_S_MAX", WAIT_S)
    monkeypatch.setattr(worker_side, "STALL_NS_MIN", 0)
    side.wait_for_save(StepPlan(stores=(job(StoreJob, (1, 2, 3), job=1),)))
    side.handle_preemptions(StepPlan(fence_blocks=(3,)))
    side.get_finished()
    report = side.build_worker_meta()
    assert report is not None
    assert report.fence_ns > 0
    with side._handoff.core():
        assert 3 not in reading(core)
    fenced.set()
    assert len(node.receive(Seal).slots) == 12


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_nothing(node: ScriptedNode, side: WorkerSide) -> None:
    node.open_session(5)
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        plan = StepPlan(loads=(job(LoadJob, (2,), request="r", lease=1),))
        said = step(side, plan, idle=True) == ({"r"}, {2})
        side.shutdown()
        os.write(write_fd, b"y" if said else b"n")
        os._exit(0)
    os.close(write_fd)
    answer = os.read(read_fd, 1)
    os.close(read_fd)
    os.waitpid(pid, 0)
    assert answer == b"y"
    side.wait_for_save(StepPlan(stores=(job(StoreJob, (1,), job=1),)))
    node.receive(Seal)  # the parent goes on
