"""P2: ways of the node being down, and 40 real requests through each of them.

Never started, killed, stopped, full, lying, and slow. Each request ends with the tokens that an
engine computes by itself, and the connector's own counters say that the way was met. One engine
lives through all of them, which is a test of its own: after each the next node is found again.

Times are judged where machines are quiet (bench/micro/scheduler_step.py); here requests only may
not hang.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.demo.workload import Encode, text_tokens
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_BYTES, RawEngine, make_keys
from kvstore.wire.messages import LeaseReply
from tests.faults.liar import LIES, NOISE, Liar
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import BLOCK_TOKENS, OWN_ERRORS, cache_off_lines, wait_until
from tests.integration.node.conftest import eventually
from tests.kit.engines import EngineConfig, EngineServer
from tests.kit.programs import need

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

SEED = 5
REQUESTS = 40
AT_ONCE = 4
BEGUN = 10
"""Requests that were answered before the node is hurt."""
MAX_TOKENS = 4
AWAY, LATE = 'misses{reason="node unreachable"}', 'misses{reason="deadline"}'
Prompt = tuple[int, ...]


class Victim:
    """The engine, its prompts, and what it answered before there ever was a node."""

    def __init__(self, engine: EngineServer, socket: Path, prompts: list[Prompt]) -> None:
        self.engine = engine
        self.socket = socket
        self.prompts = prompts
        self.truth = self.answers()
        self.without_node = engine.metrics()
        self.told_without_node = cache_off_lines(engine)

    def answers(
        self, hurt: Callable[[], object] | None = None, *, at_once: int = AT_ONCE
    ) -> list[Prompt]:
        """To all prompts, with the engine's own cache empty; `hurt` is called amid them."""
        self.engine.forget()
        count, lock = iter(range(REQUESTS)), threading.Lock()

        def ask(prompt: Prompt) -> Prompt:
            answer = self.engine.complete(prompt, max_tokens=MAX_TOKENS)
            with lock:
                if next(count) == BEGUN and hurt is not None:
                    hurt()
            return answer.tokens

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(ask, self.prompts))

    def through(
        self, hurt: Callable[[], object] | None = None, *, at_once: int = AT_ONCE
    ) -> dict[str, float]:
        """40 requests, all of them right. Returns how far the engine's counters went meanwhile."""
        before = self.engine.metrics()
        answers = self.answers(hurt, at_once=at_once)
        wrong = {n: tokens for n, tokens in enumerate(answers) if tokens != self.truth[n]}
        assert wrong == {}
        after = self.engine.metrics()
        assert after.get(OWN_ERRORS, 0.0) == 0.0
        assert "Traceback" not in self.engine.log.read_text()
        return {
            name.removeprefix("vllm:kvstore_").replace("_total", ""): value - before.get(name, 0.0)
            for name, value in after.items()
        }

    def served(self) -> bool:
        """Whether the node gives back what was stored."""
        self.engine.complete(self.prompts[0], max_tokens=1)
        self.engine.forget()
        before = self.engine.hits().external_hits
        self.engine.complete(self.prompts[0], max_tokens=1)
        return self.engine.hits().external_hits > before

    @contextmanager
    def with_node(self, directory: Path) -> Iterator[NodeProcess]:
        """A node that holds all the prompts, and serves."""
        flags = ("--socket", str(self.socket))
        with NodeProcess.start(directory, dram="128MiB", flags=flags) as node:
            wait_until(self.served, "the engine found the node", seconds=60)
            assert self.through()["store_blocks_sealed"] > 0
            yield node


@pytest.fixture(scope="module")
def victim(
    vllm: EngineNursery, tiny_model: Path, encode: Encode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Victim]:
    directory = tmp_path_factory.mktemp("victim")
    rng = random.Random(SEED)
    shared = text_tokens(rng, encode, BLOCK_TOKENS)
    prompts = [
        (*shared, *text_tokens(rng, encode, rng.randint(1, 2) * BLOCK_TOKENS + rng.randint(1, 60)))
        for _ in range(REQUESTS)
    ]
    config = EngineConfig(
        model=tiny_model, socket=directory / "node.sock", connector_extra={"verify_every": 1}
    )
    with vllm.start(config, log=directory / "engine.log") as engine:
        yield Victim(engine, directory / "node.sock", prompts)


def test_never_started(victim: Victim) -> None:
    assert victim.without_node['vllm:kvstore_misses_total{reason="node unreachable"}'] >= REQUESTS
    assert victim.without_node["vllm:external_prefix_cache_hits_total"] == 0
    assert victim.told_without_node == 1
    assert victim.through()[AWAY] >= REQUESTS


def test_killed(victim: Victim, tmp_path: Path) -> None:
    with victim.with_node(tmp_path) as node:
        told = cache_off_lines(victim.engine)
        counts = victim.through(node.kill)
        assert not victim.served()
    assert counts[AWAY] > 0
    # Once; and once more for each time that a busy machine kept a heart from beating.
    stops = victim.engine.log.read_text().count("computed: the node's heartbeat stopped")
    assert cache_off_lines(victim.engine) - stops <= told + 1 <= cache_off_lines(victim.engine)


def test_stopped(victim: Victim, tmp_path: Path) -> None:
    with victim.with_node(tmp_path) as node:
        counts = victim.through(node.pause)
        node.resume()
        wait_until(victim.served, "it is found again", seconds=60)
    assert counts[AWAY] + counts[LATE] > 0


@contextmanager
def renewing(engine: RawEngine, leases: Sequence[LeaseReply]) -> Iterator[None]:
    """The leases last; nobody else may use the engine meanwhile."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(1.0):
            for lease in leases:
                engine.renew(lease)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_full(victim: Victim, tmp_path: Path) -> None:
    """All of dram is read by somebody else, who does not let go."""
    dram_bytes = 8 << 20
    with (
        NodeProcess.start(tmp_path, dram=str(dram_bytes), flags=("--socket", str(victim.socket))),
        RawEngine(victim.socket, timeout_s=3) as greedy,
    ):
        greedy.open()
        held = {}
        with contextlib.suppress(TimeoutError):  # what it stores last goes for lack of room
            for key in make_keys(dram_bytes // BLOCK_BYTES):
                greedy.store([key])
                held[key] = greedy.lease_stored([key])
                for reply in held.values():
                    greedy.renew(reply)
        assert len(held) > dram_bytes // BLOCK_BYTES // 2
        with renewing(greedy, [*held.values()]):
            wait_until(lambda: victim.through()["store_blocks_without_credit"] > 0, "it is there")
            victim.through()
        assert all(greedy.is_right(reply, [key]) for key, reply in held.items())
        for reply in held.values():
            greedy.release(reply)
        wait_until(victim.served, "blocks of the engine find room again")


@contextmanager
def lying(victim: Victim, lies: Sequence[int] = LIES) -> Iterator[None]:
    """The engine is attached to a liar, and asks it meanwhile."""
    with Liar(victim.socket, seed=SEED, lies=lies) as liar:

        def is_asked() -> bool:
            victim.engine.complete(victim.prompts[0], max_tokens=1)
            victim.engine.forget()
            return liar.asked > 0

        wait_until(is_asked, "the engine asks the liar", seconds=60)
        before = liar.asked
        yield
        assert liar.asked > before


def test_noise_that_was_loaded_in_vain_is_in_nobodys_way(victim: Victim, tmp_path: Path) -> None:
    """Some of its numbers are NaN. The engine's attention reads whole blocks, and multiplies what
    lies behind the last token by 0."""
    with victim.with_node(tmp_path):
        pass  # its loads close the breakers
    with lying(victim, [NOISE]):
        # On a busy machine the breakers may be open still, and all is computed.
        assert eventually(lambda: victim.through(at_once=REQUESTS)["load_failures"] > 0)


def test_lying(victim: Victim) -> None:
    with lying(victim):
        counts = victim.through()
    assert counts["misses"] + counts["load_failures"] > 0


def test_slow(victim: Victim, tmp_path: Path) -> None:
    """Each answer takes 60 ms: three times what a lookup may."""
    need("strace")
    with victim.with_node(tmp_path) as node:
        pid = node.pid
        command = ["strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-p", str(pid)]
        command += ["-e", "trace=sendmsg", "-e", "inject=sendmsg:delay_enter=60000"]
        with subprocess.Popen(command) as strace:
            try:
                counts = victim.through()
            finally:
                strace.send_signal(signal.SIGINT)
    assert counts[LATE] + counts[AWAY] > 0
