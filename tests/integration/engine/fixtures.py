"""Fixtures of all tests that need a real engine; the conftest of all tests imports them.

A start of an engine takes the processor for 1 s and more, so what needs no special one shares
`plain`, which lives to the end of the run and through many nodes. Models and the truth that answers
are compared with are made by the process of a run that needs them first, for all (`made_once`).
"""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvstore.demo.models import BLOCK_TOKENS, encoder
from kvstore.demo.workload import Encode, text_tokens
from tests.amounts import amount
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import PATIENT
from tests.kit.engines import EngineConfig, EngineServer, complete_many
from tests.kit.models import build_model
from tests.kit.prompts import varied_prompts

SEED = 20261121
PROMPT_COUNT = amount(36, nightly=120)
"""Three of each kind, or ten."""
CONVERSATION_COUNT = amount(8, nightly=12)
MAX_TOKENS = 8
ANSWER_TOKENS = BLOCK_TOKENS + 72
"""Decoding fills one or two blocks."""


@dataclass(frozen=True)
class Conversation:
    """Two turns; the second's prompt holds the first and its answer."""

    first: tuple[int, ...]
    answer: tuple[int, ...]
    second: tuple[int, ...]
    second_answer: tuple[int, ...]


@dataclass(frozen=True)
class Reference:
    """What an engine says that has no connector and no cache: the truth for all others."""

    answers: list[tuple[int, ...]]
    """To `prompts`, MAX_TOKENS each."""
    conversations: list[Conversation]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The path of a thing that all processes of a run share: the first one that needs it makes it
    there with `make`, and others wait for that."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-once"
    folder.mkdir(exist_ok=True)
    path = folder / name
    # Locks of POSIX, which no forked child inherits.
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2.5 M parameters, 4 layers: 512 KiB of KV a block in float32."""
    return made_once(tmp_path_factory, "tiny", partial(build_model, size="tiny"))


@pytest.fixture(scope="session")
def medium_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough to prefill that a kill can land in the middle."""
    return made_once(tmp_path_factory, "medium", partial(build_model, size="medium"))


@pytest.fixture(scope="session")
def encode(tiny_model: Path) -> Encode:
    """The models' tokenizer; one for all sizes."""
    return encoder(tiny_model)


VERIFIED: dict[str, object] = {**PATIENT, "verify_every": 1, "log_requests": True}


@pytest.fixture(scope="session")
def vllm() -> Iterator[EngineNursery]:
    """Starts engines, which end with the test that starts them."""
    with EngineNursery() as nursery:
        yield nursery


@pytest.fixture(scope="session")
def plain(
    vllm: EngineNursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """In float32. Nodes come and go at its socket (`support.node_for`), one at a time; between
    tests there is none. Nobody may `forget(external=True)`: others share what it stores."""
    directory = tmp_path_factory.mktemp("plain")
    config = EngineConfig(
        model=tiny_model, socket=directory / "node.sock", connector_extra=VERIFIED
    )
    with vllm.start(config, log=directory / "engine.log") as engine:
        yield engine


@pytest.fixture(scope="session")
def prompts(encode: Encode) -> Sequence[tuple[int, ...]]:
    """Every edge of block caching; half of them are hits on each other."""
    return varied_prompts(
        SEED, count=PROMPT_COUNT, block_tokens=BLOCK_TOKENS, blocks_max=6, encode=encode
    )


@pytest.fixture(scope="session")
def reference(
    vllm: EngineNursery,
    tiny_model: Path,
    prompts: Sequence[tuple[int, ...]],
    encode: Encode,
    tmp_path_factory: pytest.TempPathFactory,
) -> Reference:
    """Computed once, in float32."""
    log = tmp_path_factory.mktemp("reference") / "engine.log"
    config = EngineConfig(model=tiny_model, arguments=("--no-enable-prefix-caching",))

    def make(path: Path) -> None:
        with vllm.start(config, log=log) as engine:
            found = _ask(engine, prompts, encode)
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(found))
        draft.rename(path)

    path = made_once(tmp_path_factory, "reference.json", make)
    return msgspec.json.decode(path.read_bytes(), type=Reference)


def _ask(engine: EngineServer, prompts: Sequence[tuple[int, ...]], encode: Encode) -> Reference:
    rng = random.Random(SEED)
    firsts = [
        text_tokens(rng, encode, rng.randint(1, 3) * BLOCK_TOKENS + rng.randint(5, 100))
        for _ in range(CONVERSATION_COUNT)
    ]
    answers = complete_many(engine, prompts, max_tokens=MAX_TOKENS, concurrency=8)
    turns = complete_many(engine, firsts, max_tokens=ANSWER_TOKENS, concurrency=8)
    seconds = [
        (*first, *turn.tokens, *text_tokens(rng, encode, 20))
        for first, turn in zip(firsts, turns, strict=True)
    ]
    second_turns = complete_many(engine, seconds, max_tokens=MAX_TOKENS, concurrency=8)
    return Reference(
        answers=[done.tokens for done in answers],
        conversations=[
            Conversation(first, turn.tokens, second, second_turn.tokens)
            for first, turn, second, second_turn in zip(
                firsts, turns, seconds, second_turns, strict=True
            )
        ],
    )
