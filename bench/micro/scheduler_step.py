"""Time that the connector takes on the engine's scheduler thread, per step, with 64 requests.

Drives `KVStoreConnector` itself, in vLLM's order of calls, against a real node process; a thread
plays the rank (it attaches, is quiet, and seals what it is told to store). Requests arrive, are
looked up, decode 128-token blocks full, and finish; a step's time is the sum of all calls into the
connector. Goal: p99 <= 1 ms. Prints JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstore.client.core.plan import StepPlan
from kvstore.client.core.rank import Copied, LoadBlock, RankConfig, RankCore
from kvstore.client.link import Link, Lost
from kvstore.testing.process import NodeProcess
from kvstore.types import Shard
from kvstore.wire.messages import Welcome
from kvstore.wire.space import Space

BLOCK_TOKENS = 128
RUNNING = 64
STEPS = 3000
PROMPT_BLOCKS = 25
SEED = 1


class FakeRank:
    """A rank without a model: says the right things, copies nothing."""

    def __init__(self, socket: Path, engine_id: str, nonce: str) -> None:
        space = Space(
            *("bench", "w", "float32", "float32", "", "none", "LBHNC", ""),
            *(BLOCK_TOKENS, BLOCK_TOKENS, 1, 1, 512, "sha256_cbor", "", "bench"),
        )
        self._core = RankCore(
            RankConfig(
                engine_id=engine_id,
                nonce=nonce,
                tenant="default",
                rank=0,
                process="bench-rank",
                space=space,
                shard=Shard(0, 1, 0, 1),
                block_bytes=512 * BLOCK_TOKENS,
            )
        )
        self._link = Link.connect(socket, self._core.hello())
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        with self._lock:
            self._core.submit(plan)

    def report(self) -> Any:
        with self._lock:
            return self._core.take_report()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        while not self._stop.wait(0.0005):
            with self._lock:
                for message in self._link.receive():
                    if isinstance(message, Lost):
                        return
                    if isinstance(message, Welcome):
                        self._core.connected(message)
                    else:
                        self._core.received(message)
                while (copy := self._core.next_copy()) is not None:
                    done = Copied() if isinstance(copy, LoadBlock) else Copied(bytes(16))
                    self._core.finished(copy, done)
                for reply in self._core.take_outbox():
                    self._link.send(reply)


class Bench:
    """The engine's part: requests that arrive, decode and finish, one step at a time."""

    def __init__(self, connector: Any, rank: FakeRank) -> None:
        self.connector = connector
        self.rank = rank
        self.random = random.Random(SEED)
        self.running: list[Any] = []
        self.times_ns: list[int] = []
        self.hits = 0
        self.lookups = 0
        self._spent_ns = 0
        self._number = 0
        self._blocks = 0

    def call(self, method: str, *arguments: object) -> Any:
        begin_ns = time.perf_counter_ns()
        result = getattr(self.connector, method)(*arguments)
        self._spent_ns += time.perf_counter_ns() - begin_ns
        return result

    def arrive(self) -> Any:
        """A request with a shared prefix of random length and its own rest."""
        self._number += 1
        shared = self.random.randrange(PROMPT_BLOCKS)
        chain = [
            hashlib.sha256(f"{'s' if i < shared else self._number}/{i}".encode()).digest()
            for i in range(PROMPT_BLOCKS + 10)
        ]
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS + self.random.randrange(BLOCK_TOKENS)
        self._blocks += len(chain)
        return SimpleNamespace(
            request_id=f"r{self._number}",
            block_hashes=chain,
            num_prompt_tokens=tokens,
            num_tokens=tokens,
            num_computed_tokens=0,
            lora_request=None,
            skip_reading_prefix_cache=False,
            table=list(range(self._blocks - len(chain), self._blocks)),
            left=self.random.randrange(50, 400),
        )

    def admit(self, request: Any) -> tuple[Any, int]:
        """Look up and allocate; a hit is taken as loaded at once."""
        self.call("on_new_request", request)
        found = None
        while found is None:
            found, _ = self.call("get_num_new_matched_tokens", request, 0)
            if found is None:
                self.step_end([], [])
        self.lookups += 1
        self.hits += found > 0
        blocks = SimpleNamespace(get_block_ids=lambda: (request.table,))
        self.call("update_state_after_alloc", request, blocks, found)
        request.num_computed_tokens = min(found, request.num_tokens - 1)
        return request, request.num_tokens - request.num_computed_tokens

    def step(self) -> None:
        """Decode for all running, at most one arrival."""
        scheduled = [(request, 1) for request in self.running]
        new = []
        if len(self.running) < RUNNING:
            new = [self.admit(self.arrive())]
        self.step_end(scheduled, new)
        for request, count in scheduled + new:
            request.num_computed_tokens += count
            request.num_tokens = request.num_computed_tokens + 1
            request.left -= 1
        self.running += [request for request, _ in new]
        for request in [r for r in self.running if r.left <= 0]:
            self.running.remove(request)
            self.call("request_finished_all_groups", request, ([],))

    def step_end(self, scheduled: list[tuple[Any, int]], new: list[tuple[Any, int]]) -> None:
        tables = {request.request_id: request.table for request, _ in scheduled + new}
        output = SimpleNamespace(
            num_scheduled_tokens={r.request_id: n for r, n in scheduled + new},
            scheduled_new_reqs=[SimpleNamespace(block_ids=(r.table,)) for r, _ in new],
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None] * len(scheduled)),
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda request_id: (tables[request_id],)
            ),
        )
        metadata = self.call("build_connector_meta", output)
        self.rank.submit(metadata.plan)
        from kvstore.connector.vllm import KVStoreWorkerMetadata

        reports = KVStoreWorkerMetadata([self.rank.report()])
        self.call("update_connector_output", SimpleNamespace(kv_connector_worker_meta=reports))
        self.call("has_pending_push_work")
        self.call("get_kv_connector_stats")
        self.times_ns.append(self._spent_ns)
        self._spent_ns = 0


def make_connector(socket: Path, model: Path) -> Any:
    """The real class, with vLLM's real configuration, in the scheduler's role."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs

    from kvstore.connector.vllm import KVStoreConnector

    config = EngineArgs(
        model=str(model),
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"socket": str(socket)},
        ),
    ).create_engine_config()
    config.cache_config.block_size = BLOCK_TOKENS
    groups = SimpleNamespace(kv_cache_groups=[], hash_block_size=BLOCK_TOKENS)
    return KVStoreConnector(config, KVConnectorRole.SCHEDULER, groups), config


def main() -> int:
    """Run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    from kvstore.testing.models import build_model

    with tempfile.TemporaryDirectory() as directory:
        model = build_model(Path(directory) / "model", size="tiny")
        with NodeProcess.start(Path(directory), dram="1GiB") as node:
            connector, config = make_connector(node.socket, model)
            rank = FakeRank(
                node.socket, config.kv_transfer_config.engine_id, config.instance_id or "0"
            )
            bench = Bench(connector, rank)
            while len(bench.running) < RUNNING:
                bench.step()
            bench.times_ns.clear()
            while len(bench.times_ns) < arguments.steps:
                bench.step()
            connector.shutdown()
            rank.close()
    times_us = sorted(t / 1e3 for t in bench.times_ns)
    result = {
        "bench": "scheduler_step",
        "seed": SEED,
        "running_requests": RUNNING,
        "steps": len(times_us),
        "lookups": bench.lookups,
        "lookup_hits": bench.hits,
        "p50_us": round(statistics.median(times_us), 1),
        "p99_us": round(times_us[int(len(times_us) * 0.99)], 1),
        "max_us": round(times_us[-1], 1),
        "goal_p99_us": 1000,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
