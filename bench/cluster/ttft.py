"""Time to first token of a prompt that another node holds, beside the engine's own cache.

Two nodes, a real engine on each. The engine on a computes a prompt, which node a keeps. The engine
on b, which never saw it, asks for it: a *fetched hit*, whether all its blocks came from node a or
not; how often they did, by the engine's own counters, stands beside. An *own hit* is the same
prompt once more. Every prompt is fresh, one request at a time. The first prompt warms the way and
is not counted. UCX over tcp, as between machines.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from bench import record
from bench.cluster.fetch import UCX, environment
from bench.cluster.figures import SEED, NotMeasured, at_least, at_most, ratio, spread
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS, encoder
from kvstore.demo.stage import settled
from kvstore.demo.workload import fresh_prompts
from kvstore.testing.process import NodeProcess
from tests.kit.engines import EngineConfig, server_pid
from tests.kit.models import build_model
from tests.kit.peers import PeerPair

Size = Literal["tiny", "bench"]
PROMPT_TOKENS: Final = 3283
HIT_TOKENS: Final = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
PEER_TOKENS: Final = 'vllm:kvstore_hit_tokens_total{tier="peer"}'
DRAM: Final = "3GiB"
FETCH: Final = ("--fetch", "always")
"""The models here are small: to compute may be as quick, and that is not what is asked."""
TRANSPORT: Final = "nixl"
GOAL: Final = 1.6
GOAL_CAME: Final = 0.95
"""Of prompts. What did not come wholly is in the medians, too: it is what a request took."""
PATIENCE_S: Final = 30.0
LOOK_S, REST = 0.3, 0.1
"""An engine is at rest that takes less than this part of a core, for so long."""


def measure(*, prompts: int, size: Size) -> dict[str, Any]:
    """So many of each hit."""
    model = build_model(record.ROOT / ".cache" / "models" / size, size=size)
    fresh = fresh_prompts(SEED, count=prompts + 1, tokens=PROMPT_TOKENS, encode=encoder(model))
    times: dict[str, list[float]] = {"computed": [], "fetched": [], "own": []}
    partial = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
        stack.enter_context(environment(UCX))
        pair = stack.enter_context(
            PeerPair.start(folder, transport=TRANSPORT, dram=DRAM, flags=FETCH)
        )
        there, here = (_engine(stack, model, node) for node in (pair.a, pair.b))
        settled(here, pair.b, lambda *_: True)
        for number, prompt in enumerate(fresh, start=1):
            computed_ms, *_ = _ask(there, prompt)
            # A prompt is stored, and told to the index, when the node has it in whole blocks.
            settled(there, pair.a, _holds(number * HIT_TOKENS // BLOCK_TOKENS))
            _wait_for_rest(there)
            fetched_ms, own, external, from_peer = _ask(here, prompt)
            own_ms, again, *_ = _ask(here, prompt)
            if number == 1:
                continue
            for name, took_ms in zip(times, (computed_ms, fetched_ms, own_ms), strict=True):
                times[name].append(took_ms)
            if (own, external, from_peer, again) != (0, HIT_TOKENS, HIT_TOKENS, HIT_TOKENS):
                partial.append(from_peer)
    value, interval = ratio(times["fetched"], times["own"])
    return {
        "figures": {
            "fetched_hit_over_own_hit": at_most(GOAL, value, interval_95=interval),
            "wholly_fetched": at_least(GOAL_CAME, 1 - len(partial) / prompts),
        },
        "detail": {
            "model": size,
            "prompt_tokens": PROMPT_TOKENS,
            "ms": {name: spread(its) for name, its in times.items()},
            "not_wholly_fetched_tokens": partial,
            "samples_ms": times,
        },
    }


def _wait_for_rest(engine: VllmServer) -> None:
    """Until it does nothing: vLLM's processes look for more work for a second without a pause, on
    cores that are the other engine's here, and would not be on a machine of their own."""
    root = psutil.Process(server_pid(engine))
    processes = [root, *root.children(recursive=True)]
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        before_s = sum(sum(each.cpu_times()[:2]) for each in processes)
        threading.Event().wait(LOOK_S)
        if sum(sum(each.cpu_times()[:2]) for each in processes) - before_s < REST * LOOK_S:
            return
        if time.monotonic() > deadline_s:
            raise NotMeasured("the engine that has nothing to do does not rest")


def _holds(blocks: int) -> Callable[[int, int], bool]:
    return lambda dram, _: dram >= blocks


def _engine(stack: ExitStack, model: Path, node: NodeProcess) -> VllmServer:
    config = EngineConfig(
        model=model, dtype="bfloat16", kv_blocks=64, max_num_seqs=8, socket=node.socket
    )
    log = node.directory / "engine.log"
    engine = stack.enter_context(VllmServer.start(config, log=log))
    engine.warm_up()
    return engine


def _ask(engine: VllmServer, prompt: tuple[int, ...]) -> tuple[float, int, int, int]:
    """Milliseconds to the first token; tokens from the own cache, from the node, and from another
    node."""
    before, of_peer = engine.hits(), engine.metrics().get(PEER_TOKENS, 0.0)
    answer = engine.complete(prompt, max_tokens=1)
    after = engine.hits()
    return (
        1000 * answer.ttft_s,
        round(after.local_hits - before.local_hits),
        round(after.external_hits - before.external_hits),
        round(engine.metrics().get(PEER_TOKENS, 0.0) - of_peer),
    )
