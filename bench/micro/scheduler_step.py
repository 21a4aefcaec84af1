"""Time that the connector takes on the engine's scheduler thread, per step, with 64 requests.

Drives `KVStoreConnector` itself, in vLLM's order of calls, against a real node process; another
process plays the rank (it attaches, is quiet, and seals what it is told to store). Requests arrive,
are looked up, decode 128-token blocks full, and finish; a step's time is the sum of all calls into
the connector. Goal: p99 <= 1 ms. Writes bench/results/scheduler_step.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from kvstore.client.core.plan import RankReport, StepPlan
from kvstore.client.core.rank import RankCore
from kvstore.client.link import Link, Lost
from kvstore.ports import CopyEnd
from kvstore.testing.process import NodeProcess
from kvstore.types import Shard
from kvstore.wire.messages import DATAGRAM_BYTES_MAX, PROTOCOL_VERSION, HelloRank, Welcome
from kvstore.wire.space import Group, Space

RESULT = Path(__file__).parents[1] / "results" / "scheduler_step.json"
BLOCK_TOKENS = 128
CHECKSUM = bytes(range(16))
RUNNING = 64
STEPS = 3000
PROMPT_BLOCKS = 25
SEED = 1


class FakeRank:
    """A rank without a model, in a process of its own as in vLLM: says the right things, copies
    nothing."""

    def __init__(self, socket_path: Path, engine_id: str, nonce: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [
                *(sys.executable, __file__, "--rank-of", engine_id, "--nonce", nonce),
                *("--socket", str(socket_path), "--fd", str(theirs.fileno())),
            ],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def submit(self, plan: StepPlan) -> None:
        self._socket.send(msgspec.msgpack.encode(plan))

    def reports(self) -> list[RankReport]:
        """Of the steps so far, without waiting."""
        found = []
        while select.select([self._socket], [], [], 0)[0]:
            datagram = self._socket.recv(DATAGRAM_BYTES_MAX)
            assert datagram, "the rank has ended"
            found.append(msgspec.msgpack.decode(datagram, type=RankReport))
        return found

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv(DATAGRAM_BYTES_MAX):
            pass  # reports of the last steps
        self._socket.close()
        assert self._process.wait(10) == 0, "the rank failed"


def run_rank(socket_path: Path, engine_id: str, nonce: str, plans: socket.socket) -> None:
    """The process of a FakeRank: until the other end of `plans` is closed."""
    space = Space(
        *("bench", "w", "", "", "float32", "float32", "", "none", "LBHNC", ""),
        *(BLOCK_TOKENS, BLOCK_TOKENS, 1, 1, (BLOCK_TOKENS * 512,), "sha256_cbor", "", "bench"),
    )
    core = RankCore(
        HelloRank(
            protocol=PROTOCOL_VERSION,
            engine_id=engine_id,
            nonce=nonce,
            tenant="default",
            rank=0,
            process="bench-rank",
            groups=(Group(space, Shard(0, 1, 0, 1), 512 * BLOCK_TOKENS),),
        )
    )
    link = Link.connect(socket_path, core.hello())
    while True:
        ready, _, _ = select.select([link.fileno(), plans.fileno()], [], [])
        if plans.fileno() in ready:
            datagram = plans.recv(DATAGRAM_BYTES_MAX)
            if not datagram:
                return
            core.submit(msgspec.msgpack.decode(datagram, type=StepPlan))
        for message in link.receive():
            if isinstance(message, Lost):
                return
            if isinstance(message, Welcome):
                core.connected(message)
            else:
                core.received(message)
        while (copy := core.next_copy()) is not None:
            core.finished(copy, CopyEnd(copy.number, CHECKSUM))  # loads are what was stored
        for reply in core.take_outbox():
            link.send(reply)
        if plans.fileno() in ready:
            plans.send(msgspec.msgpack.encode(core.take_report()))


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
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request, RequestStatus

        self._number += 1
        shared = self.random.randrange(PROMPT_BLOCKS)
        chain = [
            hashlib.sha256(f"{'s' if i < shared else self._number}/{i}".encode()).digest()
            for i in range(PROMPT_BLOCKS + 10)
        ]
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS + self.random.randrange(BLOCK_TOKENS)
        self._blocks += len(chain)
        request: Any = Request(f"r{self._number}", [0] * tokens, SamplingParams(), None)
        request.block_hashes = chain
        request.status = RequestStatus.FINISHED_STOPPED  # what its end reads
        request.table = list(range(self._blocks - len(chain), self._blocks))
        request.left = self.random.randrange(50, 400)
        return request

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
            request.append_output_token_ids(0)
            request.left -= 1
        self.running += [request for request, _ in new]
        for request in [r for r in self.running if r.left <= 0]:
            self.running.remove(request)
            self.call("request_finished_all_groups", request, ([],))

    def step_end(self, scheduled: list[tuple[Any, int]], new: list[tuple[Any, int]]) -> None:
        tables = {request.request_id: request.table for request, _ in scheduled + new}
        output = SimpleNamespace(
            num_scheduled_tokens={r.request_id: n for r, n in scheduled + new},
            scheduled_new_reqs=[
                SimpleNamespace(block_ids=(r.table,), num_computed_tokens=r.num_computed_tokens)
                for r, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, _ in scheduled],
                new_block_ids=[None] * len(scheduled),
                num_computed_tokens=[r.num_computed_tokens for r, _ in scheduled],
                resumed_req_ids=set(),
            ),
            kv_cache_block_copies=None,
            preempted_req_ids=None,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda request_id: (tables[request_id],), boundary_state_offloads={}
            ),
        )
        metadata = self.call("build_connector_meta", output)
        self.rank.submit(metadata.plan)
        from kvstore.connector.vllm import KVStoreWorkerMetadata

        reports = KVStoreWorkerMetadata(self.rank.reports())
        self.call("update_connector_output", SimpleNamespace(kv_connector_worker_meta=reports))
        self.call("has_pending_push_work")
        self.call("get_kv_connector_stats")
        self.times_ns.append(self._spent_ns)
        self._spent_ns = 0


def make_connector(socket: Path, model: Path) -> Any:
    """The real class, with vLLM's real configuration, in the scheduler's role."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

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
    attention = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    groups = KVCacheConfig(
        num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], attention)]
    )
    return KVStoreConnector(config, KVConnectorRole.SCHEDULER, groups), config


def main() -> int:
    """Run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULT)
    for name in ("--rank-of", "--nonce", "--socket", "--fd"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        plans = socket.socket(fileno=int(arguments.fd))
        run_rank(Path(arguments.socket), arguments.rank_of, arguments.nonce, plans)
        return 0
    logging.disable(logging.INFO)
    from tests.kit.models import build_model

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
    if not bench.hits:
        sys.exit("no lookup hit: this measures nothing")
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
        "machine": {"cpus": os.cpu_count(), "load_average_1min": round(os.getloadavg()[0], 2)},
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
