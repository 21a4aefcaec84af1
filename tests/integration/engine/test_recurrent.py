"""Engines whose models have recurrent layers beside full attention: the shape of Qwen3-Next.

Such layers exist in bfloat16 only on CPUs, and their states differ in the last bits with the chunks
that made them. So the standard is the engine's own cache after the same requests: hits of the same
length give the same tokens. The engine keeps a state at the end of a prompt's last full block if
chunks end there, and where a second prompt has left the first one; so hits begin with the third.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.demo.workload import Encode, text_tokens
from kvstore.testing.process import NodeProcess
from tests.amounts import amount
from tests.integration.engine.fixtures import ANSWER_TOKENS, MAX_TOKENS, SEED, VERIFIED
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import (
    PATIENT,
    PREEMPTIONS,
    SHADOWED,
    damage,
    hits,
    inspect,
    no_alarm,
    node_for,
    wait_until,
)
from tests.kit.engines import EngineConfig, EngineServer, complete_many
from tests.kit.hybrid_models import STATE_BLOCK_TOKENS, build_hybrid

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

STEMS = amount(2, nightly=30)
STEM_TOKENS = amount(STATE_BLOCK_TOKENS, nightly=20), amount(2, nightly=4) * STATE_BLOCK_TOKENS
"""Shortest and longest: at least a block where they are few, so that each can be hit."""
PROMPTS_PER_STEM = 4
FEW = amount(1, nightly=3) * PROMPTS_PER_STEM
HURT = amount(2, nightly=3) * PROMPTS_PER_STEM
"""Prompts of which the node is hurt, again and again."""
FEW_BLOCKS = amount(30, nightly=44)
"""Of all groups together: too few for as many requests as run at once."""
FEW_TOKENS = amount(1536, nightly=2560)
"""Of the longest request of an engine that has so few."""
OWN_ERRORS = "vllm:kvstore_connector_errors_total"


class Answer(NamedTuple):
    """What an engine made of one prompt."""

    cached_tokens: int
    tokens: tuple[int, ...]


class Recurrent(NamedTuple):
    """A model, prompts, and the answers of an engine that has all of them in its own cache, and of
    one that has none."""

    model: Path
    prompts: list[tuple[int, ...]]
    answers: list[Answer]
    computed: list[Answer]

    def served(self, socket: Path, **changes: Any) -> EngineConfig:
        """An engine with the connector; it verifies every load unless `changes` say otherwise."""
        changes = {"connector_extra": VERIFIED, **changes}
        return EngineConfig(model=self.model, dtype="bfloat16", socket=socket, **changes)


def ask(engine: EngineServer, prompts: Sequence[tuple[int, ...]], *, forget: bool) -> list[Answer]:
    """Answers one by one, each with the engine's own cache emptied before it or not."""
    answers = []
    for prompt in prompts:
        if forget:
            engine.forget()
        done = engine.complete(prompt, max_tokens=MAX_TOKENS)
        answers.append(Answer(done.cached_tokens, done.tokens))
    return answers


@pytest.fixture(scope="module")
def recurrent(
    vllm: EngineNursery, tiny_model: Path, encode: Encode, tmp_path_factory: pytest.TempPathFactory
) -> Recurrent:
    directory = tmp_path_factory.mktemp("recurrent")
    model = build_hybrid(directory / "model", tiny_model, shape="qwen3-next")
    source = random.Random(SEED)
    prompts = []
    for _ in range(STEMS):
        stem = text_tokens(source, encode, source.randrange(*STEM_TOKENS))
        for _ in range(PROMPTS_PER_STEM):
            tail = text_tokens(source, encode, source.randrange(1, STATE_BLOCK_TOKENS))
            prompts.append((*stem, *tail))
    with vllm.start(
        EngineConfig(model=model, dtype="bfloat16"), log=directory / "own.log"
    ) as engine:
        for _ in range(2):
            ask(engine, prompts, forget=False)
        answers = ask(engine, prompts, forget=False)
        return Recurrent(model, prompts, answers, ask(engine, prompts, forget=True))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess.start(tmp_path, dram="512MiB") as node:
        yield node


def test_hits_and_tokens_are_those_of_the_engines_own_cache(
    vllm: EngineNursery, recurrent: Recurrent, node: NodeProcess, tmp_path: Path
) -> None:
    config = recurrent.served(node.socket)
    with vllm.start(config, log=tmp_path / "engine.log") as engine:
        for _ in range(2):
            ask(engine, recurrent.prompts, forget=False)
        assert ask(engine, recurrent.prompts, forget=True) == recurrent.answers
        assert sum(each.cached_tokens > 0 for each in recurrent.answers) > STEMS
        assert not engine.metrics().get(OWN_ERRORS)
        wait_until(lambda: not inspect(node, "leases"), "every lease was given back")


def test_states_stored_amid_preemption_are_those_of_their_keys(
    vllm: EngineNursery, recurrent: Recurrent, node: NodeProcess, tmp_path: Path
) -> None:
    config = recurrent.served(node.socket, kv_blocks=FEW_BLOCKS, max_model_len=FEW_TOKENS)
    with vllm.start(config, log=tmp_path / "few.log") as engine:
        for _ in range(2):
            complete_many(engine, recurrent.prompts, max_tokens=ANSWER_TOKENS, concurrency=16)
        assert engine.metrics()[PREEMPTIONS] > 0, "blocks were few"
        answers = ask(engine, recurrent.prompts, forget=True)
        compared = [
            (answer, own)
            for answer, own in zip(answers, recurrent.answers, strict=True)
            if answer.cached_tokens == own.cached_tokens > 0
        ]
        assert len(compared) > STEMS
        # Steps of other sizes round the states otherwise, which may turn a token that is nearly as
        # likely as another one. States of another prompt are nothing like these.
        assert [(a, own) for a, own in compared if a.tokens[0] != own.tokens[0]] == []
        other = [(a, own) for a, own in compared if a.tokens != own.tokens]
        assert len(other) <= len(compared) // 4, other
        assert not engine.metrics().get(OWN_ERRORS)
        wait_until(lambda: not inspect(node, "leases"), "every lease was given back")


def test_a_node_that_is_killed_or_stopped_and_damaged_states_change_no_answer(
    vllm: EngineNursery, recurrent: Recurrent, tmp_path: Path
) -> None:
    config = recurrent.served(tmp_path / "node.sock")
    hurt = slice(HURT)
    prompts, own = recurrent.prompts[hurt], recurrent.answers[hurt]
    computed = recurrent.computed[hurt]

    def check(answers: list[Answer]) -> None:
        # A load that failed is computed: the answer is that of one way or of the other.
        for at, answer in enumerate(answers):
            assert answer.tokens in (own[at].tokens, computed[at].tokens), at

    with vllm.start(config, log=tmp_path / "engine.log") as engine, ThreadPoolExecutor(1) as pool:

        def damage_is_met() -> bool:
            if engine.metrics().get("vllm:kvstore_load_failures_total"):
                return True
            check(ask(engine, prompts, forget=True))
            return False

        for fault in (NodeProcess.kill, NodeProcess.pause, damage):
            # Loads shall find the damage, not the scrub, which would drop it first.
            with node_for(engine, tmp_path, flags=("--scrub", "off")) as node:
                for _ in range(2):
                    check(ask(engine, prompts, forget=False))
                before = hits(engine)
                load = pool.submit(ask, engine, prompts, forget=True)
                while hits(engine) == before and not load.done():
                    continue
                fault(node)
                check(load.result())
                if fault is NodeProcess.pause:
                    node.resume()
                check(ask(engine, prompts, forget=True))
                if fault is damage:
                    # A busy machine computes what it does not find in time.
                    wait_until(damage_is_met, "damage was met", seconds=240)
        assert not engine.metrics().get(OWN_ERRORS)


def test_shadow_checks_raise_no_alarm_where_recurrence_is_not_exact(
    vllm: EngineNursery, recurrent: Recurrent, node: NodeProcess, tmp_path: Path
) -> None:
    config = recurrent.served(node.socket, connector_extra=SHADOWED)
    few = recurrent.prompts[:FEW]
    with vllm.start(config, log=tmp_path / "shadow.log") as engine:
        for _ in range(3):
            ask(engine, few, forget=True)
        assert engine.hits().external_hits == 0, "every hit is computed"
        wait_until(lambda: not inspect(node, "leases"), "every lease was given back")
        assert not engine.metrics().get(OWN_ERRORS)
    no_alarm(node, "bfloat16", compared_min=1)


def test_two_ranks_load_what_they_would_have_had_themselves(
    vllm: EngineNursery, recurrent: Recurrent, node: NodeProcess, tmp_path: Path
) -> None:
    config = recurrent.served(
        node.socket,
        connector_extra={**VERIFIED, **PATIENT},
        arguments=("--tensor-parallel-size", "2"),
    )
    few = recurrent.prompts[:FEW]
    with vllm.start(config, log=tmp_path / "two.log") as engine:
        for _ in range(2):
            ask(engine, few, forget=False)
        own = ask(engine, few, forget=False)
        assert ask(engine, few, forget=True) == own
        assert any(each.cached_tokens for each in own)
        assert engine.hits().external_hits > 0
        assert not engine.metrics().get(OWN_ERRORS)
