"""A process that makes tokens and keys, so that the streaming loop never does.

    python -m kvstore.router.keys.child [MODEL=DIRECTORY …]     orders on stdin, answers on stdout

Both are msgpack behind a length of four bytes, answered in order. Tokens of 32k characters of text
take a core tens of milliseconds, keys of 32k tokens as long: here they delay other prompts only.
Tokenizers are those of `transformers`, from directories that an operator named, without code of
their own, for bodies of the shapes in `rendering`.
"""

from __future__ import annotations

import sys
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from kvstore.index.chain import adapter_keys, block_keys

ORDER_BYTES_MAX: Final = 64 << 20
STRIPPED: Final = "x-anthropic-billing-header"
"""Prefix of a system text that vLLM drops, as it differs in each request: such prompts are left to
the engine.
"""


class KeyPlan(NamedTuple):
    """Parameters by which the keys of a model are made."""

    block_tokens: int = 0
    """Tokens of a block; 0: no keys are made."""
    seed: str = ""
    adapter: tuple[str, str] | None = None
    """(name, path) of the LoRA adapter; None: none."""
    digest: bytes = b""
    """Digest of the adapter's weights."""


class KeyOrder(msgspec.Struct, array_like=True):
    """Order to make keys, and tokens first where they are not given."""

    model: str = ""
    """Model whose tokenizer is used; empty: none, the tokens are in the body or were rendered."""
    body: bytes = b""
    """JSON of the request."""
    rendered: bytes = b""
    """The engine's answer to the request at its render endpoint; empty: none."""
    plan: KeyPlan = KeyPlan()
    salt: str = ""
    wants_ids: bool = False


class KeyAnswer(msgspec.Struct, array_like=True):
    """Result of an order. `why`: reason why nothing was made; empty: done."""

    token_count: int = 0
    keys: bytes = b""
    ids: list[int] = []
    why: str = ""


class _Rendered(msgspec.Struct):
    token_ids: list[int]


class _Tokens(msgspec.Struct):
    prompt: list[int]


class _Text(msgspec.Struct):
    """Body with one of both: a prompt, or messages."""

    prompt: str | None = None
    messages: list[dict[str, str]] = []


class Tokenizers:
    """Tokenizers by model, each loaded when it is first used."""

    def __init__(self, directories: dict[str, str]) -> None:
        self._directories, self._loaded = directories, dict[str, Any]()

    def ids(self, model: str, body: bytes) -> list[int] | None:
        """Tokens of a request's prompt; None: only the engine can make them. Raises OSError,
        ValueError.
        """
        if model not in self._directories:
            return None
        text = msgspec.json.decode(body, type=_Text)
        said = (m["content"] for m in text.messages if m["role"] == "system")
        if any(each.startswith(STRIPPED) for each in said):
            return None
        if model not in self._loaded:
            from transformers import AutoTokenizer

            self._loaded[model] = AutoTokenizer.from_pretrained(
                self._directories[model], trust_remote_code=False, local_files_only=True
            )
        tokenizer = self._loaded[model]
        if text.prompt is not None:
            return list(tokenizer(text.prompt).input_ids)
        chat = tokenizer.apply_chat_template(
            text.messages, add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer(chat, add_special_tokens=False).input_ids)


def _ids(order: KeyOrder, tokenizers: Tokenizers) -> list[int] | None:
    if order.rendered[:1] == b"[":
        rendered = msgspec.json.decode(order.rendered, type=list[_Rendered])
        return rendered[0].token_ids if len(rendered) == 1 else None
    if order.rendered:
        return msgspec.json.decode(order.rendered, type=_Rendered).token_ids
    if order.model:
        return tokenizers.ids(order.model, order.body)
    return msgspec.json.decode(order.body, type=_Tokens).prompt


def answer_to(order: KeyOrder, tokenizers: Tokenizers) -> KeyAnswer:
    """Carry out an order. Never raises for the contents of a request."""
    try:
        ids = _ids(order, tokenizers)
        if ids is None:
            return KeyAnswer(why="not rendered here")
        keys, plan = b"", order.plan
        if plan.block_tokens:
            made = block_keys(
                ids,
                block_tokens=plan.block_tokens,
                seed=plan.seed,
                cache_salt=order.salt,
                adapter=plan.adapter,
            )
            keys = b"".join(adapter_keys(made, plan.digest) if plan.digest else made)
        return KeyAnswer(len(ids), keys, ids if order.wants_ids else [])
    except Exception as error:  # noqa: BLE001 -- templates raise what they like
        return KeyAnswer(why=type(error).__name__)


def _serve(source: BinaryIO, out: BinaryIO, tokenizers: Tokenizers) -> None:
    while len(head := source.read(4)) == 4:
        size = int.from_bytes(head, "little")
        assert size <= ORDER_BYTES_MAX
        order = msgspec.msgpack.decode(source.read(size), type=KeyOrder)
        answer = msgspec.msgpack.encode(answer_to(order, tokenizers))
        out.write(len(answer).to_bytes(4, "little") + answer)
        out.flush()


if __name__ == "__main__":
    named = dict(text.split("=", 1) for text in sys.argv[1:])
    _serve(sys.stdin.buffer, sys.stdout.buffer, Tokenizers(named))
