"""Keys, index and parity: a real node with its index, a scripted engine whose blocks a raw engine
stores as they are asked for."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.index.chain import adapter_keys, block_keys
from kvstore.index.feed import Trust
from kvstore.router import pages
from kvstore.router.engines.workers import UNASKED
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Arrived, Joined
from kvstore.routing.policy import parse
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS
from kvstore.types import BlockKey
from tests.kit.peers import attached
from tests.kit.router_thread import ASK, STEADY, RouterThread, until
from tests.kit.scripted_worker import ScriptedWorker

SEED = "0"
ADAPTER, DIGEST = ("lora", "/models/lora"), b"d" * 32
TEXT = "A prefix of some length that fills several blocks of sixteen tokens each. " * 12


def keys_of(
    ids: list[int], salt: str = "", adapter: tuple[str, str] | None = None
) -> list[BlockKey]:
    return block_keys(ids, block_tokens=BLOCK_TOKENS, seed=SEED, cache_salt=salt, adapter=adapter)


def index_node(directory: Path) -> NodeProcess:
    flags = ("--index-listen", "127.0.0.1:0", "--insecure", "--node-name", "n1")
    return NodeProcess.start(directory, dram="64MiB", flags=flags)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with index_node(tmp_path_factory.mktemp("node")) as started:
        yield started


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[ScriptedWorker]:
    with ScriptedWorker.start(tmp_path, "a") as started:
        yield started


@contextlib.contextmanager
def storing(node: NodeProcess, worker: ScriptedWorker, *, digest: bytes = DIGEST) -> Iterator[None]:
    """While it lasts, the node holds the blocks of every prompt that the worker completed.
    `digest`: of the weights of its adapter."""
    is_over = threading.Event()

    def run() -> None:
        stored: set[bytes] = set()
        with attached(node.socket) as engine:
            while not is_over.wait(0.02):
                engine.hear(0.0)
                for body in map(json.loads, worker.bodies()):
                    prompt = body.get("prompt", [])
                    ids = prompt if isinstance(prompt, list) else list(prompt.encode())
                    salt = body.get("cache_salt", "")
                    keys = keys_of(ids, salt)
                    if body.get("model") == ADAPTER[0]:
                        keys = adapter_keys(keys_of(ids, salt, ADAPTER), digest)
                    if fresh := [key for key in keys if key not in stored]:
                        engine.store(fresh)
                        stored.update(fresh)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(30)


def routed(
    node: NodeProcess, worker: ScriptedWorker, *, seed: str = SEED, timeout_ms: int = 500
) -> RouterThread:
    flag = f"{worker.flag},node=n1,block={BLOCK_TOKENS},seed={seed}"
    return RouterThread([flag], index=[node.index], index_timeout=timeout_ms, insecure=True)


def state(router: RouterThread) -> str:
    return str(router.on_loop(lambda: router.router.workers["a"].state))


def healthz(router: RouterThread) -> str:
    return router.on_loop(lambda: pages.health_of(router.router)).body.decode()


def arrived(router: RouterThread) -> list[Arrived]:
    return [event for event in router.core.events if isinstance(event, Arrived)]


def test_equal_keys_make_a_worker_exact(node: NodeProcess, worker: ScriptedWorker) -> None:
    with storing(node, worker), routed(node, worker) as router:
        until(lambda: state(router) == "up" and router.router.workers["a"].has_parity)
        judged = [e.spec.is_red for e in router.core.events if isinstance(e, Joined)]
        assert judged[-1] is False
        assert any(judged), "until it was compared"
        for _ in range(2):
            assert router.ask(ASK | {"prompt": TEXT})[0] == 200
            until(lambda: "A prefix" in worker.seen()["body"])
        expected = b"".join(block_keys(list(TEXT.encode()), block_tokens=BLOCK_TOKENS, seed=SEED))
        assert [e.request.keys for e in arrived(router)] == [expected] * 2

        def is_found() -> bool:
            router.ask(ASK | {"prompt": TEXT})
            prefix = arrived(router)[-1].request.answer
            if prefix is None:  # a busy machine
                return False
            found = {match.holder.node: match.dram_blocks for match in prefix.matches}
            return prefix.trust is Trust.EXACT and found == {"n1": len(TEXT) // BLOCK_TOKENS}

        until(is_found)


def test_without_render_endpoints_token_ids_prove_the_chain(
    node: NodeProcess, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.script("ok", renders=False)
    with storing(node, worker), routed(node, worker) as router:
        until(lambda: router.router.workers["a"].has_parity)
        warned = "worker a tokenizes no prompts: /render answers 403: start its vLLM with --enable"
        assert caplog.text.count(warned) == 1, "before any request"
        assert router.ask(ASK | {"prompt": TEXT})[0] == 200
        assert arrived(router)[-1].request.answer is None, "no tokens: nobody rendered"
        assert arrived(router)[-1].request.keys[:32] != b""
        note = "tokenized by a, so the index is not used for them (/render answers 403: start its"
        assert f"{note} vLLM with --enable-scale-out)" in healthz(router)
        assert caplog.text.count(warned) == 1, "once"
        worker.script("ok", renders=True)
        router.router.workers["a"].renders_after_s = 0.0
        assert router.ask(ASK | {"prompt": TEXT})[0] == 200
        assert "tokenized" not in healthz(router)


def test_requests_with_an_adapter_are_routed_by_its_own_keys(
    node: NodeProcess, worker: ScriptedWorker
) -> None:
    worker.script("ok", adapters=dict([ADAPTER]), digest=DIGEST.hex())
    ask = ASK | {"model": ADAPTER[0], "prompt": TEXT}
    with storing(node, worker), routed(node, worker) as router:
        until(lambda: state(router) == "up" and router.router.workers["a"].has_parity)
        assert "asked_for_adapters" not in worker.seen(), "no request named it"
        assert router.ask(ask)[0] == 200
        note = f"adapter lora of worker a is load-only ({UNASKED})"
        assert note in healthz(router)
        until(lambda: router.router.workers["a"].adapters["lora"].digest == DIGEST)
        until(lambda: "adapter" not in healthz(router))

        def is_found() -> bool:
            router.ask(ask)
            last = arrived(router)[-1]
            if last.request.answer is None:  # a busy machine
                return False
            expected = adapter_keys(keys_of(list(TEXT.encode()), adapter=ADAPTER), DIGEST)
            assert last.request.keys == b"".join(expected)
            found = {match.holder.node: match.dram_blocks for match in last.request.answer.matches}
            return found == {"n1": len(TEXT) // BLOCK_TOKENS}

        until(is_found)
        assert worker.seen()["asked_for_adapters"] == 1
        router.ask(ASK | {"prompt": TEXT})
        plain = b"".join(keys_of(list(TEXT.encode())))
        assert arrived(router)[-1].request.keys == plain, "the base model has keys of its own"


def test_a_silent_index_costs_milliseconds_and_then_nothing(
    node: NodeProcess, worker: ScriptedWorker
) -> None:
    with storing(node, worker), routed(node, worker, timeout_ms=50) as router:
        until(lambda: router.router.workers["a"].has_parity)
        index = router.router.index
        assert index is not None
        node.pause()
        try:
            for _ in range(6):
                assert router.ask(ASK | {"prompt": TEXT})[0] == 200
            assert "not used" in index.trouble
            assert index.late_count <= 4, "then nobody was asked"
            assert arrived(router)[-1].request.answer is None
            text = router.on_loop(lambda: pages.health_of(router.router)).body.decode()
            assert "the index is not used" in text
        finally:
            node.resume()
        until(lambda: router.ask(ASK | {"prompt": TEXT})[0] == 200 and index.trouble == "")


def test_nodes_that_fetch_are_those_with_an_address_for_others(
    worker: ScriptedWorker, tmp_path: Path
) -> None:
    first, second = tmp_path / "n1", tmp_path / "n2"
    first.mkdir()
    second.mkdir()
    # An index of its own: one that has lost a node answers nobody exactly for a minute.
    with index_node(first) as node, routed(node, worker) as router, storing(node, worker):
        index = router.router.index
        assert index is not None
        assert router.ask(ASK | {"prompt": TEXT})[0] == 200
        assert not index.addresses
        flags = ["--index", node.index, "--insecure", "--node-name", "n2"]
        flags += ["--peer-listen", "127.0.0.1:0"]
        with NodeProcess.start(second, dram="16MiB", flags=flags):
            until(lambda: set(index.addresses) == {"n2"})
            until(lambda: state(router) == "up")
            assert router.ask(ASK | {"prompt": TEXT})[0] == 200
        prefix = arrived(router)[-1].request.answer
        assert prefix is not None
        assert prefix.peers == frozenset({"n2"})


def test_an_engine_that_its_node_lists_needs_no_flag(
    node: NodeProcess, worker: ScriptedWorker
) -> None:
    with RouterThread([], index=[node.index], insecure=True) as router:
        index = router.router.index
        assert index is not None
        with attached(node.socket, engine_id="listed", address=worker.url):
            until(lambda: router.ask(ASK)[0] == 200)
            (found,) = router.on_loop(lambda: list(router.router.workers))
            assert (found.name, found.address.node) == ("n1/listed/0", "n1")
        until(lambda: index.listed == ())
        assert router.ask(ASK)[0] == 200, "without its node it serves all the same"


def test_without_its_index_from_the_start_a_router_goes_by_what_it_sent_and_says_why(
    worker: ScriptedWorker, tmp_path: Path
) -> None:
    with socket.socket() as closed, ScriptedWorker.start(tmp_path, "b") as other:
        closed.bind(("127.0.0.1", 0))  # and does not listen; nobody else gets the port
        away = "{}:{}".format(*closed.getsockname())
        flags = [f"{w.flag},node=n-{w.name},block=16,seed={SEED}" for w in (worker, other)]
        core = RouterCore(parse(STEADY), seed=1)
        with RouterThread(flags, core=core, index=[away], insecure=True) as router:
            until(lambda: set(router.words().values()) == {"load-only"})
            until(lambda: healthz(router).count("the index is lost") == 3)
            homes = [
                router.ask(ASK | {"prompt": f"{user} {TEXT} {turn}"})[1]["x-kvstore-worker"]
                for turn in range(4)
                for user in range(8)
            ]
            assert [set(homes[user::8]) for user in range(8)] == [{home} for home in homes[:8]]
            assert set(homes) == {"a", "b"}
            said = healthz(router)
            assert said.count("the index is lost: nothing listens there") == 3
            assert not [why for why in ("compared", "differ", "stores nothing") if why in said]
