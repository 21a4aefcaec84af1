"""Dynamo's router in the simulation: `SelectionService` of `ai-dynamo-runtime`, in this process.

    python -m bench.routing.dynamo TRACE_FILE NAME@SPEED …      one JSON object, by name

Engines publish their KV events over ZMQ on loopback, as vLLM does, so that the service has an exact
index: before each selection its overlaps are compared with the engines' caches and waited for.
Runs in the environment of requirements/dynamo.txt, with pyzmq.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

import msgspec
import zmq

os.environ.setdefault("DYN_LOG", "error")  # read when the library is loaded

from dynamo._core import SelectionService

from bench.routing.drive import Sending, figures, mean_figures, run
from bench.routing.engine import BLOCK_TOKENS, EngineModel, Job, SimulatedEngine
from bench.routing.traces import RouterTrace, samples

_TAIL: Final = 1 << 30
_POLLS_MAX: Final = 100


class DynamoChooser:
    """One service with all workers."""

    def __init__(self, trace: RouterTrace, model: EngineModel, workers: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._context = zmq.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        self._parent = {
            block: parent
            for job in trace.jobs
            for parent, block in zip((None, *job.blocks), job.blocks, strict=False)
        }
        self._sequences = [0] * workers
        self.mismatches = 0
        """Selections whose overlaps were not those of the caches in time."""
        self._sockets = [self._context.socket(zmq.PUB) for _ in range(workers)]
        for socket in self._sockets:
            socket.setsockopt(zmq.SNDHWM, 0)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in self._sockets]
        self._service = self._do(self._start(ports, model))

    async def _start(self, ports: list[int], model: EngineModel) -> Any:
        service = SelectionService(indexer_threads=1)
        for number, port in enumerate(ports):
            await service.upsert_worker(
                {
                    "worker_id": number,
                    "model_name": "m",
                    "endpoint": f"http://127.0.0.1:{number + 1}",
                    "block_size": BLOCK_TOKENS,
                    "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
                    "total_kv_blocks": model.cache_blocks,
                    "max_num_batched_tokens": model.chunk_tokens,
                }
            )
        await asyncio.sleep(1.0)  # subscriptions take effect
        return service

    @property
    def holds(self) -> bool:
        return False

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def _publish(self, number: int, engine: SimulatedEngine) -> None:
        events: list[list[Any]] = []
        for is_stored, block in engine.changes:
            if is_stored:
                parent = self._parent[block]
                up = None if parent is None else parent + 1
                tokens = [block + 1] * BLOCK_TOKENS
                events.append(["BlockStored", [block + 1], up, tokens, BLOCK_TOKENS, None])
            else:
                events.append(["BlockRemoved", [block + 1]])
        engine.changes.clear()
        if events:
            payload = self._encode([0.0, events, 0])
            sequence = struct.pack(">Q", self._sequences[number])
            self._sockets[number].send_multipart([b"kv-events", sequence, payload])
            self._sequences[number] += 1

    def arrived(self, job: Job, engines: Sequence[SimulatedEngine], now_s: float) -> list[Sending]:
        for number, engine in enumerate(engines):
            self._publish(number, engine)
        expected = [engine.hit_blocks(job.blocks) for engine in engines]
        return [Sending(job.number, self._do(self._select(job, expected)))]

    async def _select(self, job: Job, expected: list[int]) -> int:
        tokens = [block + 1 for block in job.blocks for _ in range(BLOCK_TOKENS)]
        tokens += [_TAIL + job.number] * (job.prompt_tokens - len(tokens))
        asked = {"model_name": "m", "token_ids": tokens}
        for _ in range(_POLLS_MAX):
            scores = await self._service.overlap_scores(asked)
            found = {each["worker_id"]: each["device_blocks"] for each in scores["workers"]}
            if [found.get(n, 0) for n in range(len(expected))] == expected:
                break
            await asyncio.sleep(0.001)
        else:
            self.mismatches += 1
        chosen = await self._service.select_and_reserve({**asked, "selection_id": str(job.number)})
        return int(chosen["worker_id"])

    async def _call(self, verb: str, job: Job) -> None:
        await getattr(self._service, verb)(str(job.number))

    def prefill_done(self, job: Job, now_s: float) -> list[Sending]:
        raise AssertionError("no worker here is a prefiller")

    def first_token(self, job: Job, now_s: float) -> list[Sending]:
        self._do(self._call("prefill_complete", job))
        return []

    def ended(self, job: Job, now_s: float) -> list[Sending]:
        self._do(self._call("free_reservation", job))
        return []

    def tick(self, now_s: float) -> list[Sending]:
        return []

    def probe(self, engines: Sequence[SimulatedEngine], now_s: float) -> list[Sending]:
        return []

    def close(self) -> None:
        """Stop the service and the sockets."""
        self._service.shutdown()
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
        self._loop.close()


def main() -> int:
    path, workers, requests, *names = sys.argv[1:]
    model = EngineModel()
    result = {}
    for name in names:
        rows = []
        for trace in samples(name, Path(path), requests=int(requests)):
            chooser = DynamoChooser(trace, model, int(workers))
            row = figures(run(trace, chooser, model, workers=int(workers)))
            rows.append(row | {"index_mismatches": chooser.mismatches})
            chooser.close()
        row = result[name] = mean_figures(rows)
        print(name, row, file=sys.stderr, flush=True)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
