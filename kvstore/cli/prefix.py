"""`kvstore inspect prefix`: locations of a prompt's blocks, asked of one node, or of the index for
all of a cluster.

Tokens become keys here, in the CLI's own process, with the hash settings of a node's engines; node
and index receive keys only. Does not cover: the layout (`look`).
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvstore.cli.ask import NodeClient
from kvstore.config.defaults import PREFIX_KEYS_MAX
from kvstore.engine.why.explain import HashingReport
from kvstore.engine.why.findings import SPACE_DIGITS, RangeReport
from kvstore.errors import ConfigError
from kvstore.index.chain import ALGORITHM, block_keys
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.rows import MemoryReport
from kvstore.types import KEY_BYTES
from kvstore.wire.feed import KEYS_MAX

if TYPE_CHECKING:
    from kvstore.client.index import IndexClient

TOKENS_FILE_BYTES_MAX: Final = 64 << 20
TOKEN_MAX: Final = 2**32 - 1
TOKENIZER_TIMEOUT_S: Final = 20.0
_IN_TIERS: Final = ("hbm_blocks", "dram_blocks", "file_blocks")


PrefixRow = dict[str, Any]
"""Locations of a prompt's blocks, as --json prints them."""


class Prompt(NamedTuple):
    """The prompt to look up."""

    hashing: HashingReport
    """Space, tenant and hash settings of the prompt."""
    keys: Sequence[bytes]
    """Keys of its full blocks."""
    tokens: int


def read_keys(path: Path) -> list[bytes]:
    """Keys of blocks in chain order, from a file: 64 hex digits each, with white space between.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    words = _read(path).split()
    try:
        keys = [bytes.fromhex(word) for word in words]
    except ValueError:
        keys = []
    if not keys or any(len(key) != KEY_BYTES for key in keys):
        raise ConfigError(
            f"{path} holds no keys of blocks: write 64 hex digits for each, one a line"
        )
    return keys


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > TOKENS_FILE_BYTES_MAX:
            raise ConfigError(f"{path} is too long for a prompt: at most 64 MiB")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {why}") from None


def read_tokens(path: Path) -> list[int]:
    """Token ids from a file: a JSON list, or numbers with white space between.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    text = _read(path)
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
        tokens = [int(token) for token in found if not isinstance(token, (bool, float))]
    except (ValueError, TypeError, RecursionError):
        tokens, found = [], [""]
    is_wrong = not tokens or len(tokens) != len(found)
    if is_wrong or not all(0 <= token <= TOKEN_MAX for token in tokens):
        raise ConfigError(
            f"{path} holds no token ids: write a JSON list of numbers, or numbers with spaces"
        )
    return tokens


def tokenize(text: str, tokenizer: str) -> list[int]:
    """Token ids of a plain prompt, as the engine makes them for /v1/completions.

    Raises:
        ConfigError: there is no such tokenizer, it does not come in time, or there is nothing to
            load it with.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            "--text needs the package transformers, which comes with the engine: run this where "
            "the engine is installed, or give --tokens-file"
        ) from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry
    found: list[int] = []
    problem = "it could not be loaded"
    ended = threading.Event()

    def load() -> None:
        nonlocal problem
        try:
            found.extend(AutoTokenizer.from_pretrained(tokenizer)(text).input_ids)
            problem = ""
        except (OSError, ValueError) as error:
            problem = str(error).strip().splitlines()[0]
        finally:
            ended.set()

    # A hub that cannot be reached is asked for file after file, again and again: that is not
    # waited for, and a thread that still asks keeps no program from ending.
    threading.Thread(target=load, name="tokenizer", daemon=True).start()
    if not ended.wait(TOKENIZER_TIMEOUT_S):
        raise ConfigError(
            f"no tokenizer at {tokenizer!r} within {TOKENIZER_TIMEOUT_S:.0f} s: the hub is slow or"
            " not reachable; give --tokenizer a directory, or set HF_HUB_OFFLINE=1 to use what was"
            " downloaded before"
        )
    if problem:
        raise ConfigError(f"no tokenizer at {tokenizer!r}: {problem}")
    return found


def choose(known: Sequence[HashingReport], *, space: str, tenant: str) -> HashingReport:
    """The space among `known` that fits a prefix of its digits and a tenant (empty: any).

    Raises:
        ConfigError: none or several do.
    """
    found = [
        row
        for row in known
        if row.space.startswith(space.lower()) and (not tenant or row.tenant == tenant)
    ]
    if not found:
        raise ConfigError(
            "no engine of that space has attached since the node started, so its keys are not "
            "known: see 'kvstore inspect spaces'"
        )
    if len(found) > 1:
        names = ", ".join(f"{row.space[:16]} (tenant {row.tenant}, {row.label})" for row in found)
        raise ConfigError(f"several spaces fit, say which with --space and --tenant: {names}")
    if found[0].hash_algorithm != ALGORITHM:
        raise ConfigError(f"keys of {found[0].hash_algorithm} cannot be computed, {ALGORITHM} only")
    return found[0]


def hashing_of_keys(space: str, tenant: str) -> HashingReport | None:
    """Space of keys that the user gives: hash settings are unknown, and tokens per block 0. None:
    `space` does not have all 64 digits.
    """
    is_whole = re.fullmatch(r"[0-9a-fA-F]{64}", space)
    return HashingReport(space.lower(), tenant, "", 0, ALGORITHM, "") if is_whole else None


def prompt_of(
    hashing: HashingReport, keys: Sequence[bytes], tokens: Sequence[int] = (), cache_salt: str = ""
) -> Prompt:
    """A prompt made of its keys, or of its tokens, of which engines of the space make the keys."""
    size = hashing.block_tokens
    if tokens:
        keys = block_keys(tokens, block_tokens=size, seed=hashing.hash_seed, cache_salt=cache_salt)
    return Prompt(hashing, keys, len(tokens) or len(keys) * size)


def look_up(client: NodeClient, prompt: Prompt) -> PrefixRow:
    """Ask the node about a prompt's blocks. Raises AttachError.

    `held_tokens` are those from the start of the prompt that a request would find; `ranges` are
    RangeReports, `engines` the leading blocks in each engine's own memory (MemoryReports).
    """
    size = prompt.hashing.block_tokens
    ranges = [
        msgspec.structs.replace(row, first_block=begin + row.first_block)
        for begin, _, asked in _batches(prompt)
        for row in client.rows("prefix", RangeReport, asked)
    ]
    held = sum(row.blocks for row in itertools.takewhile(lambda row: not row.reason, ranges))
    counts = {"block_tokens": size, "prompt_tokens": prompt.tokens, "held_tokens": held * size}
    return _space(prompt) | counts | {"ranges": ranges, "engines": _in_engines(client, prompt)}


def _space(prompt: Prompt) -> PrefixRow:
    """Space of a prompt, as it is shown."""
    hashing = prompt.hashing
    shown = hashing.space[:SPACE_DIGITS]
    return {"space": shown, "tenant": hashing.tenant, "label": hashing.label}


def _batches(prompt: Prompt) -> Iterator[tuple[int, int, pb.Filter]]:
    """(first block, number of blocks, filter) of each part of the prompt that fits one query."""
    tenant, space = prompt.hashing.tenant, bytes.fromhex(prompt.hashing.space)
    for begin in range(0, len(prompt.keys), PREFIX_KEYS_MAX):
        keys = prompt.keys[begin : begin + PREFIX_KEYS_MAX]
        asked = pb.Prompt(space=space, tenant=tenant, keys=b"".join(keys))
        yield begin, len(keys), pb.Filter(prompt=asked)


def _in_engines(client: NodeClient, prompt: Prompt) -> list[MemoryReport]:
    """Leading blocks of a prompt in each engine's memory, by the events of the node's engines. Asks
    batch after batch while an engine has all blocks of one.
    """
    found: dict[tuple[str, int], MemoryReport] = {}
    for begin, count, asked in _batches(prompt):
        rows = client.rows("engines", MemoryReport, asked)
        for row in rows:
            name = (row.engine, row.rank)
            if begin == (found[name].blocks if name in found else 0):
                found[name] = msgspec.structs.replace(row, blocks=begin + row.blocks)
        if all(row.blocks < count for row in rows):
            break
    return list(found.values())


def look_up_everywhere(index: IndexClient, prompt: Prompt) -> PrefixRow:
    """Ask the index about a prompt's first KEYS_MAX blocks. Raises IndexUnavailable.

    `trust` is exact: no other node has the first block; catching-up: another may; stale: not known.
    `holders`, the longest prefix first, are nodes and engines with the blocks in their own memory,
    and their leading blocks in each tier or in a faster one. Tokens are None if no node was asked
    for the size of blocks.
    """
    hashing, keys = prompt.hashing, prompt.keys[:KEYS_MAX]
    answer = index.match(hashing.tenant, bytes.fromhex(hashing.space), b"".join(keys))
    ranked = sorted(
        answer.matches,
        key=lambda match: (-match.file_blocks, *msgspec.structs.astuple(match.holder)),
    )
    held, size = max((match.file_blocks for match in ranked), default=0), hashing.block_tokens
    return _space(prompt) | {
        "block_tokens": size or None,
        "prompt_tokens": prompt.tokens if size else None,
        "asked_blocks": len(keys),
        "held_blocks": held,
        "held_tokens": held * size if size else None,
        "trust": answer.trust.word,
        "holders": [
            msgspec.structs.asdict(match.holder)
            | {"trust": match.trust.word}
            | {name: getattr(match, name) for name in _IN_TIERS}
            for match in ranked
        ],
    }
