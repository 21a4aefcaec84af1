"""A prompt on the command line: what counts as token ids, whose keys they are, what is asked."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec
import pytest

from kvstore.cli import prefix
from kvstore.cli.ask import NodeClient
from kvstore.cli.prefix import (
    choose,
    look_up,
    look_up_everywhere,
    prompt_of,
    read_keys,
    read_tokens,
    tokenize,
)
from kvstore.client.index import IndexClient
from kvstore.engine.why.explain import HashingReport
from kvstore.engine.why.findings import RangeReport
from kvstore.engine.why.reasons import Reason
from kvstore.errors import ConfigError
from kvstore.index.chain import block_keys
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Answer, Match
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.rows import MemoryReport, Row
from kvstore.types import BlockKey

LLAMA = HashingReport("ab" * 32, "default", "llama", 4, "sha256_cbor", "seed")
QWEN = msgspec.structs.replace(LLAMA, space="ac" * 32, label="qwen")
OTHER = msgspec.structs.replace(LLAMA, tenant="other")


@pytest.mark.parametrize("text", ["[1, 2, 70000]", " [1,2,70000]\n", "1 2\n70000\n", "1\t2 70000"])
def test_token_ids_from_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    assert read_tokens(tmp_path / "f") == [1, 2, 70_000]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "words",
        "[1, true]",
        "[1, 2.5]",
        '["a"]',
        '{"a": 1}',
        "-1",
        "[1",
        "[[1]]",
        "4294967296",
        "[" * 9999,
    ],
)
def test_anything_else_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(ConfigError, match="holds no token ids: write a JSON list"):
        read_tokens(tmp_path / "f")


def test_a_file_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        read_tokens(tmp_path / "none")
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot be read: .*utf-8"):
        read_tokens(tmp_path / "f")
    monkeypatch.setattr(prefix, "TOKENS_FILE_BYTES_MAX", 1)
    with pytest.raises(ConfigError, match="too long for a prompt"):
        read_tokens(tmp_path / "f")


def test_the_one_space_that_is_meant() -> None:
    assert choose([LLAMA], space="", tenant="") is LLAMA
    assert choose([LLAMA, QWEN], space="AC", tenant="") is QWEN
    assert choose([LLAMA, OTHER], space="ab", tenant="other") is OTHER


@pytest.mark.parametrize(
    ("known", "space", "sentence"),
    [
        ([], "", "no engine of that space has attached"),
        ([LLAMA], "ff", "no engine of that space has attached"),
        (
            *([LLAMA, QWEN], "a"),
            r"several spaces fit, say which with --space and --tenant: .*\(tenant default, qwen\)",
        ),
        (
            [msgspec.structs.replace(LLAMA, hash_algorithm="xxhash")],
            "",
            "keys of xxhash cannot be computed",
        ),
    ],
)
def test_no_space_or_several(known: list[HashingReport], space: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        choose(known, space=space, tenant="")


def test_without_the_engine_text_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="--text needs the package transformers"):
        tokenize("text", "model")


def test_a_hub_that_does_not_answer_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def answer_late(_: str) -> None:
        over.wait()
        raise OSError("too late")

    hub = SimpleNamespace(from_pretrained=answer_late)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=hub))
    monkeypatch.setattr(prefix, "TOKENIZER_TIMEOUT_S", 0.01)
    try:
        with pytest.raises(
            ConfigError, match=r"within 0 s: the hub .* not reachable; give --token"
        ):
            tokenize("text", "model")
    finally:
        over.set()
        join_loading()


def test_a_text_becomes_what_its_tokenizer_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(name: str) -> Callable[[str], SimpleNamespace]:
        assert not logging.getLogger("huggingface_hub.utils").isEnabledFor(logging.WARNING)
        return lambda text: SimpleNamespace(input_ids=[*f"{name}:{text}".encode()])

    hub = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=hub))
    assert bytes(tokenize("text", "model")) == b"model:text"
    join_loading()


@pytest.mark.parametrize(
    ("error", "said"), [(OSError("not here\nnor there"), "not here"), (None, "could not be loaded")]
)
def test_why_a_tokenizer_does_not_come_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, said: str
) -> None:
    hub = SimpleNamespace(from_pretrained=mock.Mock(side_effect=error or RuntimeError))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=hub))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(ConfigError, match=f"^no tokenizer at 'model': .*{said}$"):
        tokenize("text", "model")
    join_loading()


def join_loading() -> None:
    for thread in threading.enumerate():
        if thread.name == "tokenizer":
            thread.join()


@pytest.mark.engine
def test_a_tokenizer_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer at '") as caught:
        tokenize("text", str(tmp_path / "none"))
    assert "\n" not in str(caught.value)


class Node:
    """Holds the first `held` blocks of a prompt, whatever it is."""

    def __init__(self, held: int) -> None:
        self.held = held
        self.asked: list[bytes] = []

    def rows(self, topic: str, kind: type[Row], asked: pb.Filter) -> list[Any]:
        assert (asked.prompt.tenant, asked.prompt.space.hex()) == (LLAMA.tenant, LLAMA.space)
        find: Any = {"prefix": self._prefix, "engines": self._engines}[topic]
        rows: list[Any] = find(asked.prompt.keys)
        assert {type(row) for row in rows} <= {kind}
        return rows

    def _prefix(self, keys: bytes) -> list[RangeReport]:
        begin = sum(len(k) for k in self.asked) // 32
        self.asked.append(keys)
        count = len(keys) // 32
        held = min(count, max(0, self.held - begin))
        rows = [
            RangeReport(0, held, "dram"),
            RangeReport(held, count - held, "", Reason.NEVER_STORED),
        ]
        return [row for row in rows if row.blocks]

    def _engines(self, keys: bytes) -> list[MemoryReport]:
        """One engine holds as many, another has none of the first three."""
        whole = block_keys(range(4 * 7 + 1), block_tokens=4, seed="seed")
        begin = whole.index(BlockKey(keys[:32]))
        held = {"e": range(self.held), "late": range(3, 7)}
        rows = []
        for engine, blocks in held.items():
            asked = range(begin, begin + len(keys) // 32)
            count = next((n for n, b in enumerate(asked) if b not in blocks), len(asked))
            rows.append(MemoryReport(engine, 0, "ab", "default", "live", count, 0))
        return [row for row in rows if row.blocks]


@pytest.mark.parametrize("held", [0, 3, 5, 7])
def test_a_long_prompt_is_asked_for_in_pieces(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setattr(prefix, "PREFIX_KEYS_MAX", 5)
    node, tokens = Node(held), list(range(4 * 7 + 1))
    prompt = prompt_of(LLAMA, [], tokens)
    found = look_up(cast("NodeClient", node), prompt)
    assert b"".join(node.asked) == b"".join(block_keys(tokens, block_tokens=4, seed="seed"))
    assert [len(keys) // 32 for keys in node.asked] == [5, 2]
    assert (found["held_tokens"], found["prompt_tokens"]) == (4 * held, 29)
    assert [row.first_block for row in found["ranges"]] == sorted({0, held % 7, 5} - {7})
    assert json.loads(msgspec.json.encode(found))["ranges"]
    assert {row.engine: row.blocks for row in found["engines"]} == ({"e": held} if held else {})


def test_keys_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(f"{'ab' * 32}\n{'CD' * 32}\n")
    assert read_keys(tmp_path / "f") == [b"\xab" * 32, b"\xcd" * 32]


@pytest.mark.parametrize("text", ["", "ab", "ab" * 31, f"{'ab' * 32} {'ab' * 33}", "z" * 64, "[]"])
def test_what_is_no_key_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(ConfigError, match="holds no keys of blocks: write 64 hex digits"):
        read_keys(tmp_path / "f")


class Index:
    """Two nodes hold the beginning of whatever it is, and an engine the first block."""

    def __init__(self) -> None:
        self.asked = 0

    def match(self, tenant: str, space: bytes, keys: bytes) -> Answer:
        self.asked = len(keys) // 32
        return Answer(
            Trust.CATCHING_UP,
            [
                Match(Holder("n1", "e", 1), 1, 1, 1, Trust.EXACT),
                Match(Holder("n1"), 0, 2, 2, Trust.STALE),
                Match(Holder("n2"), 0, 1, 5, Trust.EXACT),
            ],
        )


def test_the_whole_cluster_is_asked_who_goes_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "KEYS_MAX", 6)
    index = Index()
    prompt = prompt_of(LLAMA, [bytes([n]) * 32 for n in range(9)])
    found = look_up_everywhere(cast("IndexClient", index), prompt)
    assert (index.asked, found["asked_blocks"], found["prompt_tokens"]) == (6, 6, 36)
    assert (found["held_tokens"], found["trust"]) == (20, "catching-up")
    assert [tuple(row.values())[:4] for row in found["holders"]] == [
        ("n2", "", 0, "exact"),
        ("n1", "", 0, "stale"),
        ("n1", "e", 1, "exact"),
    ]
    assert tuple(found["holders"][0].values())[4:] == (0, 1, 5)
