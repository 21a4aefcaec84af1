"""Prefill on one engine, decode on another, each on a node of its own, behind the router.

Legs are in turn as long as the router does not know the node of the prefill engine, then together.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstore.cli.ask import node_client
from kvstore.demo.engine import SERVED_NAME, CompletionClient
from kvstore.demo.workload import Encode, text_tokens
from kvstore.router.receipt_log import read_receipts
from kvstore.routing.receipts import Receipt
from kvstore.testing.process import NodeProcess, popen_tied, reap, stop_process
from tests.amounts import amount, covered
from tests.integration.engine.fixtures import MAX_TOKENS, PROMPT_COUNT, SEED, Reference
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import BLOCK_TOKENS, PATIENT, metric, wait_until
from tests.integration.engine.test_cluster import hit_tokens, leading_blocks, wrong_answers
from tests.kit.engines import (
    EngineConfig,
    EngineServer,
    abandon,
    complete_many,
    scheduler_pid,
    server_pid,
    worker_pids,
)
from tests.kit.gauges import look
from tests.kit.pd_pair import ALL_REMOTE, PdPair, pd_pair, pd_router
from tests.upstream.run import NoSources, fetch

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ABORTS = amount(12, nightly=200)
ABREAST = 6
"""Requests at a time."""
UPSTREAM_PROMPTS = amount(6, nightly=PROMPT_COUNT)
SUBMITTED = "vllm:kvstore_store_blocks_submitted_total"
PUSHED_SHARE = 0.8
"""Of all blocks: several requests of one prefix may be computed at the same time."""
PUSH_DEADLINE_MS = 3000
ANSWER_S = 30.0
"""No request takes longer, whatever happens to a process."""
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """A node process that crashes is followed by another with a transfer worker of its own; what
    nodes and engines hold is looked at by each test."""


@pytest.fixture(scope="module")
def pair(
    vllm: EngineNursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PdPair]:
    """Both lose what they hold between tests; no test leaves a process killed."""
    config = EngineConfig(
        model=tiny_model,
        connector_extra={**PATIENT, "push_deadline_ms": PUSH_DEADLINE_MS, "log_requests": True},
    )
    with pd_pair(
        tmp_path_factory.mktemp("pd"),
        config,
        lambda config, log: vllm.start(config, log=log),
        policy=ALL_REMOTE,
    ) as found:
        yield found


@contextmanager
def router_of(
    pair: PdPair, legs: str, directory: Path, *, p_port: int = 0
) -> Iterator[CompletionClient]:
    """A router in front of the pair, or of another engine in the place of P. In turn: it knows no
    node yet. Together: an earlier request has named P's to it."""
    with pd_router(directory, p_port or pair.p.port, pair.d.port, policy=ALL_REMOTE) as process:
        client = CompletionClient(process.port)
        if legs == "together":
            client.complete((1, 2, 3), max_tokens=1)
        yield client


def forget(pair: PdPair) -> None:
    """Nothing of earlier tests is anywhere. (A reset of the connectors would move both engines to
    spaces of their own.)"""
    for engine, node in ((pair.p, pair.node_p), (pair.d, pair.node_d)):
        engine.forget()
        with node_client(node.socket) as client:
            client.clear(space="")


def pushed_blocks(pair: PdPair) -> float:
    """Blocks that came to node d from node p by pushes so far."""
    return metric(pair.node_d, "kvstore_push_blocks_landed_total")


def requests_under_way(engine: EngineServer) -> float:
    found = engine.metrics()
    return found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]


def at_rest(pair: PdPair) -> bool:
    """No request in an engine, no lease, no slot in doubt on a node."""
    if any(requests_under_way(engine) for engine in (pair.p, pair.d)):
        return False
    try:
        return not any(
            held.leases or held.slots_leased or held.slots_quarantined or held.failures
            for held in map(look, (pair.node_p, pair.node_d))
        )
    except OSError:  # a node process that is being replaced
        return False


@pytest.mark.parametrize("node", ["learned", "named"])
def test_tokens_are_those_of_one_engine(
    pair: PdPair,
    prompts: Sequence[tuple[int, ...]],
    reference: Reference,
    tmp_path: Path,
    node: str,
) -> None:
    """The router has the names of both nodes, or learns that of P's from its first answers."""
    forget(pair)
    flags = ["--receipts", str(tmp_path / "receipts")]
    with pd_router(
        tmp_path,
        pair.p.port,
        pair.d.port,
        flags,
        policy=ALL_REMOTE,
        is_named=node == "named",
    ) as process:
        router, before = CompletionClient(process.port), pushed_blocks(pair)
        done = complete_many(router, prompts, max_tokens=MAX_TOKENS, concurrency=ABREAST)
        assert wrong_answers(done, reference) == []
        assert pushed_blocks(pair) - before >= PUSHED_SHARE * len(leading_blocks(prompts))
        asked = reference.conversations[: amount(3, nightly=12)]
        for each in asked:
            first = router.complete(each.first, max_tokens=len(each.answer))
            assert first.tokens == each.answer
            second = router.complete(each.second, max_tokens=MAX_TOKENS)
            assert second.tokens == each.second_answer
        wait_until(lambda: at_rest(pair), "both nodes and engines are at rest")
        assert process.stop() == 0
    found = [(r.prefill_worker, r.chosen, r.split_reason) for r in receipts_of(tmp_path)]
    assert found == [("p", "d", "long")] * (len(prompts) + 2 * len(asked))
    covered("requests through prefill and decode", PROMPT_COUNT)


def receipts_of(directory: Path) -> list[Receipt]:
    return list(read_receipts(directory / "receipts"))


def chat(client: CompletionClient, **more: object) -> dict[str, Any]:
    """The first choice of an answer to a chat."""
    messages = [{"role": "user", "content": "tell me about the garden. " * 30}]
    # Greedy; vLLM gives several answers at temperatures above 0 only.
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 12, "top_k": 1, **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{client.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    assert "logprobs" in found["choices"][0]
    return found


@pytest.mark.parametrize("legs", ["in-turn", "together"])
def test_the_decode_engine_loads_the_incomplete_block_of_a_prompt(
    pair: PdPair, encode: Encode, tmp_path: Path, legs: str
) -> None:
    """And its answer, which goes on in that block, is what it computes alone. It stores the block
    that the answer completes, and none that was pushed."""
    forget(pair)
    rng = random.Random(SEED)
    size = BLOCK_TOKENS
    prompts = [text_tokens(rng, encode, 6 * size + tail) for tail in (2, size // 2, size - 1)]
    before, stored = hit_tokens(pair.d), pair.d.metrics().get(SUBMITTED, 0)
    through = []
    for prompt in prompts:  # each the first one of its router, or the second
        with router_of(pair, legs, tmp_path) as router:
            through.append(router.complete(prompt, max_tokens=size).tokens)
    assert hit_tokens(pair.d) - before == sum(map(len, prompts))
    stored += len(prompts)
    wait_until(lambda: pair.d.metrics()[SUBMITTED] >= stored, "its answers are stored")
    assert pair.d.metrics()[SUBMITTED] == stored
    before = hit_tokens(pair.d)
    one_token_more = (*prompts[0][: 6 * size], 7)
    with router_of(pair, legs, tmp_path) as router:
        router.complete(one_token_more, max_tokens=1)
    assert hit_tokens(pair.d) == before, "the engine has the whole blocks itself"
    forget(pair)
    alone = CompletionClient(pair.d.port)
    assert [alone.complete(prompt, max_tokens=size).tokens for prompt in prompts] == through


def test_chats_lists_of_prompts_and_several_answers(pair: PdPair, encode: Encode) -> None:
    forget(pair)
    more = {"n": 2, "kv_transfer_params": {"do_remote_prefill": True, "kvstore": {"node": "p"}}}
    through = chat(pair.router, **more)["choices"]
    alone = chat(pair.d)["choices"]
    assert [choice["message"] for choice in through] == [alone[0]["message"]] * 2
    prompts = fresh(encode, "list")
    before = pushed_blocks(pair)
    done = pair.router.complete(prompts, max_tokens=1)  # type: ignore[arg-type]
    assert len(done.tokens) == len(prompts)
    assert pushed_blocks(pair) - before >= PUSHED_SHARE * 5 * len(prompts)


@pytest.mark.parametrize("legs", ["in-turn", "together"])
def test_an_abort_leaves_nothing_behind(
    pair: PdPair, encode: Encode, tmp_path: Path, legs: str
) -> None:
    forget(pair)
    rng = random.Random(SEED)
    prompts = [text_tokens(rng, encode, 7 * BLOCK_TOKENS + 9) for _ in range(ABORTS)]

    def half(number: int, client: CompletionClient) -> int:
        if number % 2:
            return len(client.complete(prompts[number], max_tokens=4).tokens)
        moment = threading.Timer(0.002 * (number % 40), lambda: None)
        moment.start()
        abandon(client, prompts[number], max_tokens=64, until=lambda: not moment.is_alive())
        return 4

    size = ABREAST if legs == "in-turn" else ABORTS
    for first in range(0, ABORTS, size):
        numbers = range(first, min(first + size, ABORTS))
        with router_of(pair, legs, tmp_path) as router, ThreadPoolExecutor(ABREAST) as pool:
            assert set(pool.map(half, numbers, itertools.repeat(router))) == {4}
            wait_until(lambda: at_rest(pair), "both nodes and engines are at rest")


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """SIGSTOP to these processes, until the context ends."""
    for pid in pids:
        stop_process(pid)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _engine_of(server: EngineServer) -> list[int]:
    return [server_pid(server), scheduler_pid(server), *worker_pids(server)]


STOPS: dict[str, Callable[[PdPair], Sequence[int]]] = {
    "engine p": lambda pair: _engine_of(pair.p),
    "scheduler p": lambda pair: [scheduler_pid(pair.p)],
    "node p": lambda pair: _all_of(pair.node_p),
    "node d": lambda pair: _all_of(pair.node_d),
}


def _all_of(node: NodeProcess) -> list[int]:
    """With its transfer worker."""
    serving = psutil.Process(node.pid)
    return [serving.pid, *(child.pid for child in serving.children(recursive=True))]


def ask_all(
    router: CompletionClient, prompts: Sequence[tuple[int, ...]], meanwhile: Callable[[], object]
) -> list[tuple[int, ...]]:
    """Tokens of all prompts, sent together; `meanwhile` runs as soon as they are under way."""
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        asked = [
            pool.submit(router.complete, prompt, max_tokens=MAX_TOKENS, timeout_s=ANSWER_S)
            for prompt in prompts
        ]
        threading.Event().wait(0.05)
        meanwhile()
        return [each.result().tokens for each in asked]


def fresh(encode: Encode, seed: object) -> list[tuple[int, ...]]:
    rng = random.Random(str(seed))
    return [text_tokens(rng, encode, 5 * BLOCK_TOKENS + 40) for _ in range(5)]


@pytest.mark.parametrize("legs", ["together", "in-turn"][: amount(1, nightly=2)])
def test_every_request_is_right_while_a_process_is_stopped_or_crashes(
    pair: PdPair, encode: Encode, tmp_path: Path, legs: str
) -> None:
    forget(pair)
    for name, pids in STOPS.items():
        prompts = fresh(encode, (legs, name))
        found: list[list[tuple[int, ...]]] = []
        with router_of(pair, legs, tmp_path) as router:
            stop = stopped(pids(pair))
            found.append(ask_all(router, prompts, stop.__enter__))
            found.append(ask_all(router, prompts[::-1], lambda: None)[::-1])
            stop.__exit__(None, None, None)
            wait_until(lambda: at_rest(pair), f"all is at rest after a stop of {name}")
            truth = answers_of_d(pair, prompts)
            assert found == [truth, truth], name
            wait_until(lambda: pushes(pair, router, encode), f"pushes after a stop of {name}")
    for node in (pair.node_p, pair.node_d):
        prompts = fresh(encode, (legs, node.pid))
        with router_of(pair, legs, tmp_path) as router:
            found = [ask_all(router, prompts, node.crash)]
            wait_until(lambda: at_rest(pair), "all is at rest after a crash")
            pair.d.forget()
            found.append(ask_all(router, prompts, lambda: None))
        assert found[0] == found[1]


def answers_of_d(pair: PdPair, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """By itself."""
    done = complete_many(pair.d, prompts, max_tokens=MAX_TOKENS, concurrency=len(prompts))
    return [each.tokens for each in done]


def pushes(pair: PdPair, router: CompletionClient, encode: Encode) -> bool:
    """Whether blocks of a new prompt come to node d from node p."""
    before = pushed_blocks(pair)
    router.complete(fresh(encode, next(_numbers))[0], max_tokens=1, timeout_s=ANSWER_S)
    return pushed_blocks(pair) > before


@pytest.mark.parametrize("legs", ["in-turn", "together"])
def test_a_killed_prefill_engine_costs_no_answer(
    pair: PdPair, vllm: EngineNursery, encode: Encode, tmp_path: Path, legs: str
) -> None:
    forget(pair)
    prompts = fresh(encode, ("kill", legs))
    truth = answers_of_d(pair, prompts)
    forget(pair)
    with (
        vllm.start(pair.p.config, log=tmp_path / "victim.log") as victim,
        router_of(pair, legs, tmp_path, p_port=victim.port) as router,
    ):
        assert ask_all(router, prompts, victim.kill) == truth
        assert ask_all(router, prompts, lambda: None) == truth
    wait_until(lambda: at_rest(pair), "both nodes and engines are at rest")


def test_a_prefill_engine_without_the_connector_costs_no_answer(
    pair: PdPair, vllm: EngineNursery, encode: Encode, tmp_path: Path
) -> None:
    """Its answers have no parameters. It is left alone after a few."""
    forget(pair)
    prompts = fresh(encode, "mute")
    truth = answers_of_d(pair, prompts)
    forget(pair)
    with (
        vllm.start(replace(pair.p.config, socket=None), log=tmp_path / "mute.log") as mute,
        pd_router(tmp_path, mute.port, pair.d.port, policy=ALL_REMOTE) as process,
    ):
        router = CompletionClient(process.port)
        assert [ask_all(router, prompts, lambda: None) for _ in range(2)] == [truth] * 2
        (said,) = [line for line in process.log.splitlines() if "kv_transfer_params" in line]
        assert "worker p: breaker open after prefills without" in said


# ── vLLM's own proxies ───────────────────────────────────────────────────────────────────────────


@contextmanager
def upstream_proxy(
    name: str, flags: Callable[[int], Sequence[str]], log: Path
) -> Iterator[CompletionClient]:
    """A demo proxy of vLLM's source distribution, as it is; `flags` from the port to listen on."""
    try:
        script = next((fetch() / "examples").rglob(name))
    except NoSources as error:
        pytest.skip(str(error))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as output:
        process = popen_tied(
            [sys.executable, "-P", str(script), *flags(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: _listens(port) or process.poll() is not None, "the proxy is ready")
        assert process.poll() is None, log.read_text()
        yield CompletionClient(port)
    finally:
        reap(process)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _plain_flags(pair: PdPair, port: int) -> list[str]:
    engines = ["--prefill", f"127.0.0.1:{pair.p.port}", "--decode", f"127.0.0.1:{pair.d.port}"]
    return ["--model", SERVED_NAME, *engines, "--port", str(port)]


def _turn_flags(pair: PdPair, port: int) -> list[str]:
    prefill = ["--prefiller-host", "127.0.0.1", "--prefiller-port", str(pair.p.port)]
    decode = ["--decoder-host", "127.0.0.1", "--decoder-port", str(pair.d.port)]
    return ["--host", "127.0.0.1", "--port", str(port), *prefill, *decode]


def _push_flags(pair: PdPair, port: int) -> list[str]:
    more = ["--prefill-engine-id", pair.p.config.engine_id, "--prefill-kv-host", "127.0.0.1"]
    return [*_plain_flags(pair, port), *more]


UPSTREAM: dict[str, Callable[[PdPair, int], Sequence[str]]] = {
    "disagg_proxy_demo.py": _plain_flags,
    "disagg_proxy_multiturn.py": _turn_flags,
    "disagg_proxy_pushconnector_demo.py": _push_flags,
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_vllms_own_proxy_works_as_it_is(
    pair: PdPair,
    prompts: Sequence[tuple[int, ...]],
    reference: Reference,
    tmp_path: Path,
    name: str,
) -> None:
    forget(pair)
    with upstream_proxy(name, partial(UPSTREAM[name], pair), tmp_path / "proxy.log") as proxy:
        done = complete_many(
            proxy, prompts[:UPSTREAM_PROMPTS], max_tokens=MAX_TOKENS, concurrency=4
        )
        assert wrong_answers(done, reference) == []
    wait_until(lambda: at_rest(pair), "both nodes and engines are at rest")
