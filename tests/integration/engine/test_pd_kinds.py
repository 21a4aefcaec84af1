"""Prefill and decode on two engines for models that are not plain: several KV cache groups, and
adapters. Tokens are those of one engine, which answers first and then forgets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kvstore.cli.ask import node_client
from kvstore.demo.engine import SERVED_NAME, Completion, CompletionClient
from kvstore.demo.models import BLOCK_TOKENS
from kvstore.demo.workload import Encode, text_tokens
from kvstore.engine.why.explain import RequestReport
from kvstore.proto import inspect_pb2 as pb
from tests.amounts import IS_NIGHTLY, amount, covered
from tests.integration.engine.fixtures import MAX_TOKENS, SEED, VERIFIED
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import OWN_ERRORS, wait_until
from tests.integration.engine.test_adapters import _post
from tests.integration.engine.test_pd import PUSHED_SHARE, at_rest, forget, pushed_blocks
from tests.kit.engines import EngineConfig
from tests.kit.hybrid_models import STATE_BLOCK_TOKENS, build_hybrid
from tests.kit.pd_pair import ALL_REMOTE, PdPair, pd_pair, pd_router
from tests.kit.side_models import RANK, build_adapter

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = amount(6, nightly=104)
"""Of each kind."""
RECURRENT = 24
SHAPES = ("gpt-oss", "gemma3")[: amount(1, nightly=2)]
CONCURRENCY = 4
ADAPTERS = ("one", "two")
Start = Callable[[EngineConfig], AbstractContextManager[PdPair]]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Each test looks at what engines and nodes hold in the end."""


@pytest.fixture
def start(vllm: EngineNursery, tmp_path: Path) -> Start:
    @contextmanager
    def started(config: EngineConfig) -> Iterator[PdPair]:
        work = tmp_path / "pair"
        work.mkdir()
        with pd_pair(
            work, config, lambda its, log: vllm.start(its, log=log), policy=ALL_REMOTE
        ) as pair:
            yield pair

    return started


def prompts_of(encode: Encode) -> list[tuple[int, ...]]:
    """Long enough to leave every window, with common beginnings."""
    rng = random.Random(SEED)
    stem = text_tokens(rng, encode, 4 * BLOCK_TOKENS + 5)
    return [
        (*stem[: rng.randrange(len(stem))], *text_tokens(rng, encode, 2 * BLOCK_TOKENS + 40))
        for _ in range(PROMPTS)
    ]


def ask(
    client: CompletionClient, prompts: Sequence[tuple[int, ...]], model: str = SERVED_NAME
) -> list[tuple[int, ...]]:
    extra: dict[str, object] = {"model": model}
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        its = [pool.submit(client.complete, p, max_tokens=MAX_TOKENS, extra=extra) for p in prompts]
        return [each.result().tokens for each in its]


def pushed_groups(pair: PdPair) -> set[int]:
    """KV cache groups of which node d was pushed blocks."""
    with node_client(pair.node_d.socket) as client:
        rows = client.rows("requests", RequestReport, pb.Filter(limit=100))
    return {push.group for row in rows for push in row.pushes if push.pushed}


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_all_groups_are_pushed(
    start: Start, shape: str, tiny_model: Path, encode: Encode, tmp_path: Path
) -> None:
    model = build_hybrid(tmp_path / "model", tiny_model, shape=shape)
    prompts = prompts_of(encode)
    with start(EngineConfig(model=model, connector_extra=VERIFIED)) as pair:
        truth = ask(pair.d, prompts)
        forget(pair)
        before = pushed_blocks(pair)
        assert ask(pair.router, prompts) == truth
        assert pushed_blocks(pair) > before
        assert len(pushed_groups(pair)) > 1
        assert pair.d.hits().external_hits > 0
        for engine in (pair.p, pair.d):
            assert not engine.metrics().get(OWN_ERRORS)
        wait_until(lambda: at_rest(pair), "both nodes and engines are at rest")
    covered("requests of models with groups through prefill and decode", len(prompts))


@pytest.mark.skipif(
    not IS_NIGHTLY, reason="tests/unit/client/test_pushes.py has the rule; make nightly runs it"
)
def test_states_of_recurrent_layers_are_pushed(
    start: Start, tiny_model: Path, encode: Encode, tmp_path: Path
) -> None:
    """States differ in their last bits with the chunks that made them: so hits are as long as in
    the engine's own cache, and an answer is of a hit or computed. The engine keeps the last state
    of a prompt that ends soon behind a block."""
    model = build_hybrid(tmp_path / "model", tiny_model, shape="qwen3-next")
    config = EngineConfig(model=model, dtype="bfloat16", connector_extra=VERIFIED)
    rng = random.Random(SEED)
    ends = ((number % 3 + 1, 319 if number % 4 == 3 else 46) for number in range(RECURRENT))
    lengths = [blocks * STATE_BLOCK_TOKENS + rest for blocks, rest in ends]
    prompts = [text_tokens(rng, encode, length) for length in lengths]
    with start(config) as pair:

        def answers(client: CompletionClient) -> list[Completion]:
            return [client.complete(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]

        computed, own = answers(pair.d), answers(pair.d)
        forget(pair)
        pushed = answers(pair.router)
        cached = [done.cached_tokens for done in own]
        assert [done.cached_tokens for done in pushed] == cached
        assert sum(count > 0 for count in cached) > len(prompts) // 2
        for at, done in enumerate(pushed):
            assert done.tokens in (computed[at].tokens, own[at].tokens), at
        assert len(pushed_groups(pair)) > 1
        wait_until(lambda: at_rest(pair), "both nodes and engines are at rest")
    covered("requests of recurrent models through prefill and decode", len(prompts))


def test_blocks_of_each_adapter_are_pushed(
    start: Start, tiny_model: Path, encode: Encode, tmp_path: Path
) -> None:
    prompts = prompts_of(encode)
    config = EngineConfig(
        model=tiny_model,
        connector_extra=VERIFIED,
        environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
        arguments=("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK)),
    )
    with start(config) as pair:
        for seed, name in enumerate(ADAPTERS):
            folder = build_adapter(tmp_path / name, tiny_model, seed=seed)
            for engine in (pair.p, pair.d):
                _post(engine, "load_lora_adapter", lora_name=name, lora_path=str(folder))
        models = (SERVED_NAME, *ADAPTERS)
        truth = {name: ask(pair.d, prompts, name) for name in models}
        assert len({tuple(answers) for answers in truth.values()}) == len(models)
        forget(pair)
        blocks = {
            prompt[: end * BLOCK_TOKENS]
            for prompt in prompts
            for end in range(1, (len(prompt) - 1) // BLOCK_TOKENS + 1)
        }
        # The router of the pair reads lists of models every ten seconds: another one does at once.
        with pd_router(
            tmp_path, pair.p.port, pair.d.port, policy=ALL_REMOTE, is_named=True
        ) as process:
            for name in models:
                before = pushed_blocks(pair)
                assert ask(CompletionClient(process.port), prompts, name) == truth[name]
                assert pushed_blocks(pair) - before >= PUSHED_SHARE * len(blocks), name
        wait_until(lambda: at_rest(pair), "both nodes and engines are at rest")
    covered("requests of adapters through prefill and decode", len(models) * len(prompts))
