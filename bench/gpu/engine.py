"""An engine without a model: caches in torch tensors behind the connector's own worker side.

    Scheduler  the scheduler's socket by hand: a session, credits, leases
    Engine     caches of Llama-3-8B, which the engine's stream fills; jobs of blocks, and their ends

Does not cover: what the scheduler's side decides, the node (`node.py`).
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.gpu import stubs
from bench.gpu.stubs import HEAD, HEADS, LAYERS, NAMES, TOKENS
from kvstore.client.core.plan import LoadJob, StepPlan, StoreJob
from kvstore.client.link import Link, Lost
from kvstore.connector.config import ConnectorConfig
from kvstore.connector.devices import OpenCopies, open_copies
from kvstore.wire.messages import (
    PROTOCOL_VERSION,
    Grant,
    HelloScheduler,
    LeaseAsk,
    LeaseRelease,
    LeaseReply,
    Refused,
    SessionClosed,
    SessionOpen,
    generations_array,
    slots_array,
)

WAIT_S = 30.0
STORED_AT_ONCE = 32
_PAUSE = threading.Event()
"""Never set."""


class Scheduler:
    """See the module."""

    def __init__(self, socket: Path, engine_id: str, nonce: str) -> None:
        self._socket, self._who = socket, (engine_id, nonce)
        self._numbers = itertools.count(1)
        self.connect()

    def connect(self) -> None:
        hello = HelloScheduler(
            PROTOCOL_VERSION,
            *self._who,
            "default",
            rank_count=1,
            process="scheduler-" + secrets.token_hex(4),
            label="bench",
        )
        self._link = Link.connect(self._socket, hello)
        self.session, self.gone = 0, ""
        self._credits: list[tuple[int, int]] = []
        self._replies: dict[int, LeaseReply] = {}

    def hear(self) -> None:
        for message in self._link.receive():
            match message:
                case SessionOpen():
                    self.session = message.session
                case SessionClosed():
                    self.session, self._credits = 0, []
                case Grant():
                    slots = slots_array(message.slots).tolist()
                    generations = generations_array(message.generations).tolist()
                    self._credits += zip(slots, generations, strict=True)
                case LeaseReply():
                    self._replies[message.lease] = message
                case Lost() | Refused():
                    self.gone = message.reason

    def until(self, is_done: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """
        Raises:
            TimeoutError: it did not happen.
            RuntimeError: the node is gone.
        """
        end = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > end:
                raise TimeoutError(what)
            self.hear()
            if self.gone:
                raise RuntimeError(f"{what}: {self.gone}")
            _PAUSE.wait(0.0005)

    def take(self, most: int) -> tuple[bytes, bytes]:
        """Slots and generations of blocks to be stored."""
        self.until(lambda: bool(self._credits), "credits")
        some, self._credits = self._credits[:most], self._credits[most:]
        slots, generations = zip(*some, strict=True)
        return np.array(slots, "<u4").tobytes(), np.array(generations, "<u8").tobytes()

    def lease(self, keys: Sequence[bytes]) -> LeaseReply:
        number = next(self._numbers)
        self._link.send(LeaseAsk(lease=number, keys=b"".join(keys)))
        self.until(lambda: number in self._replies, "a lease")
        return self._replies[number]

    def release(self, reply: LeaseReply) -> None:
        self._link.send(LeaseRelease(leases=[reply.lease]))


class Loaded(NamedTuple):
    """Of a load."""

    leased: int
    bad: int
    wrong: int
    """Blocks that hold neither their bytes nor were called bad."""
    seconds: float
    reasons: list[str]


class Engine:
    """See the module."""

    def __init__(
        self, socket: Path, device: str, block_count: int, *, opens: OpenCopies = open_copies
    ) -> None:
        """`device`: of torch's. `opens`: makes the copy engine."""
        import torch

        from kvstore.connector.worker_side import WorkerSide

        self._torch = torch
        engine_id, nonce = "bench-" + secrets.token_hex(3), secrets.token_hex(4)
        shape = (LAYERS, block_count, HEADS, TOKENS, 2 * HEAD)
        self.memory = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        vllm_config, cache_config = stubs.configs(block_count, engine_id, nonce)
        config = ConnectorConfig(socket=str(socket))
        self.side = WorkerSide(config, vllm_config, cache_config, open_copies=opens)
        self.side.register_kv_caches(dict(zip(NAMES, self.memory, strict=True)))
        assert not self.side.unserved, self.side.unserved
        self.scheduler = Scheduler(socket, engine_id, nonce)
        self.scheduler.until(lambda: self.scheduler.session != 0, "a session")
        self._jobs = itertools.count(1)
        self.loading = threading.Event()
        """Set while a load is under way."""
        self._truth: dict[bytes, Any] = {}
        self.block_bytes = int(self.memory[:, 0].nbytes)

    def fill(self, block: int, seed: int) -> bytes:
        """Random bytes, which the engine's stream writes; returns their key."""
        torch = self._torch
        key, draw = secrets.token_bytes(32), torch.Generator().manual_seed(seed)
        shape = (LAYERS, HEADS, TOKENS, 4 * HEAD)
        data = torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8)
        self._truth[key] = data
        self._bytes(block).copy_(data.to(self.memory.device))
        return key

    def spoil(self, blocks: Sequence[int], value: float) -> None:
        for block in blocks:
            self.memory[:, block].fill_(value)

    def is_right(self, block: int, key: bytes) -> bool:
        """By torch."""
        return bool(self._torch.equal(self._bytes(block).cpu(), self._truth[key]))

    def _bytes(self, block: int) -> Any:
        return self.memory[:, block].view(self._torch.int8)

    def _step(self, plan: StepPlan, *, idle: bool = False) -> set[str]:
        self.side.handle_preemptions(plan)
        self.side.start_load_kv(plan)
        self.side.wait_for_save(plan)
        return self.side.get_finished(idle=idle)[0]

    def store(self, blocks: Sequence[int], keys: Sequence[bytes]) -> dict[str, float]:
        left, jobs = list(zip(blocks, keys, strict=True)), set[int]()
        begin, sealed, dropped = time.perf_counter(), 0, 0
        while left or jobs:
            plan = StepPlan()
            if left:
                slots, generations = self.scheduler.take(min(len(left), STORED_AT_ONCE))
                some, left = left[: len(slots) // 4], left[len(slots) // 4 :]
                job = StoreJob(
                    job=next(self._jobs),
                    session=self.scheduler.session,
                    block_ids=tuple(block for block, _ in some),
                    keys=b"".join(key for _, key in some),
                    slots=slots,
                    generations=generations,
                )
                jobs.add(job.job)
                plan = StepPlan(stores=(job,))
            self.scheduler.hear()
            self._step(plan)
            if report := self.side.build_worker_meta():
                jobs -= set(report.store_jobs_done)
                sealed, dropped = sealed + report.blocks_sealed, dropped + report.blocks_dropped
            if time.perf_counter() - begin > WAIT_S:
                raise TimeoutError(f"{len(jobs)} store jobs did not end")
            if not left:
                _PAUSE.wait(0.0002)
        return {"sealed": sealed, "dropped": dropped, "seconds": time.perf_counter() - begin}

    def load(
        self, blocks: Sequence[int], keys: Sequence[bytes], *, is_verified: bool = True
    ) -> Loaded:
        """Load blocks with these keys into those, as many as there are."""
        reply = self._leased(keys)
        count, name = len(reply.slots) // 4, secrets.token_hex(4)
        if not count:
            self.scheduler.release(reply)
            return Loaded(0, 0, 0, 0.0, ["nothing was leased"])
        job = LoadJob(
            request=name,
            lease=reply.lease,
            session=self.scheduler.session,
            block_ids=tuple(blocks[:count]),
            keys=b"".join(keys[:count]),
            slots=reply.slots,
            generations=reply.generations,
            checksums=reply.checksums if is_verified else b"",
        )
        begin = time.perf_counter()
        bad = self._run(StepPlan(loads=(job,)), name)
        seconds = time.perf_counter() - begin
        self.scheduler.release(reply)
        report = self.side.build_worker_meta()
        reasons = sorted({load.reason for load in report.loads if load.reason}) if report else []
        wrong = sum(
            not self.is_right(block, key)
            for block, key in zip(blocks[:count], keys, strict=False)
            if block not in bad
        )
        return Loaded(count, len(bad), wrong, seconds, reasons)

    def _run(self, plan: StepPlan, name: str) -> set[int]:
        """Steps until the load of that name has ended; its bad blocks."""
        end, bad = time.monotonic() + WAIT_S, set[int]()
        self.loading.set()
        try:
            done = self._step(plan, idle=True)
            bad |= self.side.block_ids_with_load_errors()
            while name not in done:
                done = self._step(StepPlan(), idle=True)
                bad |= self.side.block_ids_with_load_errors()
                if time.monotonic() > end:
                    raise TimeoutError("a load did not end")
        finally:
            self.loading.clear()
        return bad

    def _leased(self, keys: Sequence[bytes]) -> LeaseReply:
        """Of all keys; after a while of those that there are."""
        end = time.monotonic() + WAIT_S / 2
        while True:
            reply = self.scheduler.lease(keys)
            if len(reply.slots) == 4 * len(keys) or time.monotonic() > end:
                return reply
            self.scheduler.release(reply)
            _PAUSE.wait(0.01)
