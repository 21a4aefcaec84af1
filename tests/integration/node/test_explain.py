"""`kvstore explain` and `kvstore inspect prefix` against a real node, as an operator types them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.index.chain import block_keys
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS, RawEngine
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import Story
from tests.integration.node.conftest import eventually
from tests.kit.command import kvstore

pytestmark = pytest.mark.slow

TOKENS = [(n * 7919) % 50_000 for n in range(BLOCK_TOKENS * 5 + 3)]
KEYS: list[bytes] = list(block_keys(TOKENS, block_tokens=BLOCK_TOKENS, seed="0"))
"""Of the raw engine's space."""
STORED = 3


@contextlib.contextmanager
def storing(node: NodeProcess) -> Iterator[RawEngine]:
    """An engine that has stored the first blocks of a prompt."""
    with RawEngine(node.socket, engine_id="one", model="llama") as engine:
        engine.open()
        engine.store(KEYS[:STORED])
        engine.release(engine.lease_stored(KEYS[:STORED]))
        yield engine


@pytest.fixture
def engine(node: NodeProcess) -> Iterator[RawEngine]:
    with storing(node) as engine:
        yield engine


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node with such an engine, for tests that only ask where a prompt is."""
    with NodeProcess.start(tmp_path_factory.mktemp("node")) as node, storing(node):
        yield node


def end_request(node: NodeProcess, engine: RawEngine, request: str, **changes: Any) -> None:
    """Look all of the prompt up, and tell how it ended; wait until the node has heard of it."""
    reply = engine.lease(KEYS)
    fields: dict[str, Any] = {
        "request": request,
        "prompt_tokens": len(TOKENS),
        "loaded_tokens": STORED * BLOCK_TOKENS,
        "session": engine.session,
        "leases": [reply.lease],
        "queued_ns": 3 * NS_PER_MS // 10,
        "lookup_ns": 2 * NS_PER_MS // 10,
        "load_ns": 12 * NS_PER_MS,
        "saved_ns": 40 * NS_PER_MS,
        "stored_blocks": 5,
    }
    assert engine.scheduler.send(Story(**(fields | changes)))
    engine.release(reply)
    told = kvstore("explain", "--json", "--socket", str(node.socket))
    assert request in told.stdout or eventually(
        lambda: request in kvstore("explain", "--json", "--socket", str(node.socket)).stdout
    )


GOLDEN = """\
request  cmpl-4f1a-0-1f2e3d4c
engine   one (llama), tenant default, space SPACE
ended    AGE ago
prompt   83 tokens: 0 in the engine's own cache, 48 loaded (48 from dram, 0 from disk), 35 computed
outcome  loaded
times    queued 0.3 ms, lookup 0.2 ms, waited for blocks 0.0 ms, load 12.0 ms
saved    27.8 ms: 40.0 ms of prefill less 12.2 ms of waits
stored   5 blocks of it are stored, or were already

blocks  tokens  tier  missed         why
0-2     0-47    dram  -              loaded from dram
3-4     48-79   -     never stored   never stored since the node started
-       80-82   -     no full block  a block that is not full is never stored
"""


def test_the_story_of_one_request(node: NodeProcess, engine: RawEngine) -> None:
    end_request(node, engine, "cmpl-4f1a-0-1f2e3d4c")
    done = kvstore("explain", "cmpl-4f1a", "--socket", str(node.socket))
    assert (done.returncode, done.stderr) == (0, "")
    text = re.sub(r"space [0-9a-f]{16}", "space SPACE", done.stdout)
    text = re.sub(r"ended    [0-9.]+ m?s", "ended    AGE", text)
    assert [line.rstrip() for line in text.splitlines()] == GOLDEN.splitlines()
    done = kvstore("explain", "4f1a", "--json", "--socket", str(node.socket))
    (found,) = json.loads(done.stdout)["requests"]
    assert (found["request"], found["engine_id"]) == ("cmpl-4f1a-0-1f2e3d4c", "one")
    assert (found["loaded_tokens"], found["lookup_us"], found["load_us"]) == (48, 200, 12_000)
    assert [(r["blocks"], r["tier"], r["reason"]) for r in found["ranges"]] == [
        (3, "dram", ""),
        (2, "", "never stored"),
    ]


def test_several_that_fit_are_listed(node: NodeProcess, engine: RawEngine) -> None:
    for request in ("cmpl-4f1a-0-aaaaaaaa", "cmpl-4f1a-1-bbbbbbbb", "cmpl-77-0-cccccccc"):
        end_request(node, engine, request, outcome="deadline", loaded_tokens=0)
    done = kvstore("explain", "4f1a", "--socket", str(node.socket))
    header, first, second, advice = done.stdout.splitlines()
    names = ["request", "ended", "prompt", "prefix", "cache", "loaded", "from", "disk", "lookup"]
    assert header.split() == [*names, "outcome"]
    assert first.startswith("cmpl-4f1a-1-bbbbbbbb")
    assert second.startswith("cmpl-4f1a-0-aaaaaaaa")
    assert second.rstrip().endswith("deadline")
    assert advice == "2 requests fit '4f1a': give one of these ids"
    every = kvstore("explain", "--socket", str(node.socket)).stdout
    assert len(every.splitlines()) == 1 + 3
    latest = kvstore("explain", "--last", "1", "--socket", str(node.socket)).stdout
    assert [line.split()[0] for line in latest.splitlines()] == ["request", "cmpl-77-0-cccccccc"]


def test_an_unknown_request_is_one_sentence(node: NodeProcess) -> None:
    done = kvstore("explain", "nobody", "--socket", str(node.socket))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "kvstore: the node has no record of a request with the id 'nobody': it may still be"
        " running, or be too old; 'kvstore explain' lists the latest\n"
    )
    none = kvstore("explain", "--socket", str(node.socket))
    assert (none.returncode, none.stdout) == (0, "no request has ended since the node started\n")


@pytest.mark.parametrize("form", ["json", "numbers"])
def test_where_a_prompt_is_now(stored: NodeProcess, tmp_path: Path, form: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(json.dumps(TOKENS) if form == "json" else "\n".join(map(str, TOKENS)))
    arguments = ["inspect", "prefix", "--tokens-file", str(file), "--socket", str(stored.socket)]
    found = json.loads(kvstore(*arguments, "--json").stdout)["prefix"]
    assert (found["prompt_tokens"], found["held_tokens"]) == (83, 48)
    assert [(r["first_block"], r["blocks"], r["tier"], r["reason"]) for r in found["ranges"]] == [
        (0, 3, "dram", ""),
        (3, 2, "", "never stored"),
    ]
    text = kvstore(*arguments).stdout
    assert "prompt   83 tokens, of which a request would find 48" in text
    assert "in dram" in text
