"""Two real engines, two nodes, the index and the router: prefixes found, wrong keys seen. With its
defaults before engines that are slow, the router serves all that is asked.

Cases of engines that fail, and of latency: `tests/sim/test_serving_first.py`, in virtual time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.demo.engine import SERVED_NAME
from kvstore.testing.process import NodeProcess, RouterProcess
from tests.amounts import amount
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import BLOCK_TOKENS, attached, wait_until
from tests.kit.engines import EngineConfig
from tests.kit.gauges import page, samples
from tests.kit.router_thread import ask

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SYSTEM = "You are a careful assistant of a library. " * 24


def _keys_are_equal(router: RouterProcess) -> bool:
    return (text := page(router, "/healthz")[1]).startswith("ok") and "load-only" not in text


def _said(router: RouterProcess, name: str) -> float:
    """The sum of a metric of workers."""
    its = f"kvstore_router_worker_{name}{{"
    return sum(value for row, value in samples(router).items() if row.startswith(its))


def _chat(port: int, messages: Sequence[dict[str, str]]) -> tuple[str, int, str]:
    """(worker, cached tokens, answer)."""
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 8, "temperature": 0}
    status, headers, content = ask(port, body, "/v1/chat/completions", timeout_s=60)
    assert status == 200, content
    found = json.loads(content)
    details = found["usage"]["prompt_tokens_details"] or {}
    text = found["choices"][0]["message"]["content"]
    return headers["x-kvstore-worker"], details.get("cached_tokens") or 0, text


def test_turns_of_a_conversation_go_where_their_prefix_is(
    vllm: EngineNursery, tiny_model: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    insecure = ("--insecure", "--node-name")
    with (
        NodeProcess.start(
            tmp_path / "a", dram="256MiB", flags=("--index-listen", "127.0.0.1:0", *insecure, "a")
        ) as a,
        NodeProcess.start(
            tmp_path / "b", dram="256MiB", flags=("--index", a.index, *insecure, "b")
        ) as b,
        vllm.start(_config(tiny_model, a), log=tmp_path / "a.log") as first,
        vllm.start(_config(tiny_model, b), log=tmp_path / "b.log") as other,
    ):
        wait_until(lambda: attached(first, a) and attached(other, b), "attached", seconds=60)
        workers = [
            *("--worker", f"a=http://127.0.0.1:{first.port},node=a"),
            *("--worker", f"b=http://127.0.0.1:{other.port},node=b"),
        ]
        flags = [*workers, "--index", a.index, "--index-timeout", "500", "--insecure"]
        tokenizer = ["--tokenizer", f"{SERVED_NAME}={tiny_model}"]
        with RouterProcess.start(tmp_path, [*flags, *tokenizer]) as router:
            wait_until(lambda: _keys_are_equal(router), "keys are equal", seconds=60)
            assert f"tokenizer of {SERVED_NAME}: accepted" in router.log
            port = int(router.address.rpartition(":")[2])
            # The second user comes while the first is served: otherwise one engine may do for all.
            with ThreadPoolExecutor(2) as pool:
                homes = list(pool.map(lambda user: _converse(port, user), range(2)))
            homes += [_converse(port, user) for user in (2, 3)]
            assert len(set(homes)) == 2, "both engines serve"
            predicted, cached = (
                _said(router, f"{x}_tokens_total") for x in ("predicted", "cached")
            )
            assert predicted > 8 * BLOCK_TOKENS
            assert cached >= 0.9 * predicted, "what is shown is there"
            assert router.stop() == 0
        # Keys of another seed name no block: red, with the reason, and requests go on by load.
        wrong = [f"{flag},seed=other" if "=http" in flag else flag for flag in flags]
        with RouterProcess.start(tmp_path, wrong, name="wrong") as router:
            wait_until(
                lambda: "0 of" in page(router, "/healthz")[1], "the difference is seen", seconds=60
            )
            assert "worker a is load-only (the index shows 0 of" in page(router, "/healthz")[1]
            port = int(router.address.rpartition(":")[2])
            assert _chat(port, [{"role": "user", "content": "Hello"}])[0] in ("a", "b")


def _config(model: Path, node: NodeProcess) -> EngineConfig:
    return EngineConfig(model=model, socket=node.socket, arguments=("--enable-scale-out",))


def _converse(port: int, user: int) -> str:
    """Four turns of a user's own conversation; the worker of all turns but the first."""
    messages = [{"role": "system", "content": f"User {user}. {SYSTEM}"}]
    seen = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn} of user {user}: why?"})
        worker, cached, text = _chat(port, messages)
        messages.append({"role": "assistant", "content": text})
        seen.append((worker, cached))
    assert len({worker for worker, _ in seen}) == 1, seen
    assert all(cached >= 4 * BLOCK_TOKENS for _, cached in seen[1:]), seen
    return seen[0][0]


PROMPTS = amount(12, nightly=24)
PROMPT_TOKENS = 2500
SEED = 20261127


def test_prompts_that_wait_for_many_times_their_own_seconds_are_all_served(
    vllm: EngineNursery, medium_model: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                vllm.start(EngineConfig(model=medium_model), log=tmp_path / f"{name}.log")
            )
            for name in "ab"
        ]
        flags = [
            f"--worker={n}=http://127.0.0.1:{e.port}" for n, e in zip("ab", engines, strict=True)
        ]
        router = stack.enter_context(RouterProcess.start(tmp_path, flags))

        def asked(number: int) -> tuple[int, bytes, str]:
            ids = random.Random(SEED + number).choices(range(3, 250), k=PROMPT_TOKENS)
            body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": 4, "temperature": 0}
            body |= {"stream": number % 2 == 0}
            status, headers, content = ask(router.port, body, timeout_s=300)
            return status, content, headers["x-kvstore-worker"]

        with ThreadPoolExecutor(PROMPTS) as pool:
            found = list(pool.map(asked, range(PROMPTS)))
        for number, (status, content, _) in enumerate(found):
            assert (status, b"error" in content) == (200, False), content
            assert number % 2 or content.endswith(b"data: [DONE]\n\n")
        assert {worker for *_, worker in found} == {"a", "b"}
        assert "is down" not in router.log
        assert "breaker" not in router.log
