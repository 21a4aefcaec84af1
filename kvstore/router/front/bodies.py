"""Bodies of requests: read as far as routing needs, and sent on as they came.

    {"model": "m", "prompt": "…", …} ─▶ peek ─▶ Peek (values stay raw bytes)
                                      ─▶ edited: fields dropped or set, all other bytes kept

Ways to be wrong, each a BadBody of one sentence: no JSON, no object, nested too deeply, a model
that is no text. All other faults are the engine's to report. Names of fields are compared after
JSON's escapes, and of a repeated field the last one counts, as in engines; `edited` leaves one.

Covers: JSON. Does not cover: tokens (`rendering`), rules about fields (`proxy`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from kvstore.errors import KVStoreError

STRIPPED: Final = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port"),
        *("bootstrap_room", "data_parallel_rank"),
    }
)
"""Fields with which an engine would connect to an address, or compute at a rank, of the client's
choice (the last four: SGLang's)."""
TENANTS_STRIPPED: Final = STRIPPED | {"priority"}
"""Where there are tenants: with it, one would be served before the others."""
_EMPTY: Final = msgspec.Raw()


class BadBody(KVStoreError):
    """The body of a request is invalid."""


class Peek(msgspec.Struct):
    """Fields of a request that routing reads. Raw values are JSON; empty: absent."""

    model: str = ""
    stream: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    max_tokens: msgspec.Raw = _EMPTY
    max_completion_tokens: msgspec.Raw = _EMPTY
    max_output_tokens: msgspec.Raw = _EMPTY
    user: msgspec.Raw = _EMPTY
    session_id: msgspec.Raw = _EMPTY
    cache_salt: msgspec.Raw = _EMPTY
    kv_transfer_params: msgspec.Raw = _EMPTY
    ec_transfer_params: msgspec.Raw = _EMPTY
    bootstrap_host: msgspec.Raw = _EMPTY
    bootstrap_port: msgspec.Raw = _EMPTY
    bootstrap_room: msgspec.Raw = _EMPTY
    data_parallel_rank: msgspec.Raw = _EMPTY
    vllm_xargs: msgspec.Raw = _EMPTY
    prompt_logprobs: msgspec.Raw = _EMPTY
    echo: msgspec.Raw = _EMPTY
    store: msgspec.Raw = _EMPTY
    n: msgspec.Raw = _EMPTY
    best_of: msgspec.Raw = _EMPTY

    @property
    def is_streamed(self) -> bool:
        return bytes(self.stream) == b"true"

    @property
    def content(self) -> bytes:
        """JSON of the prompt, whatever its field. Equal prefixes of prompts are equal bytes."""
        return b"".join(map(bytes, (self.tools, self.prompt, self.messages, self.input)))

    @property
    def output_tokens(self) -> int | None:
        """Tokens to make at most; None: the request has no limit."""
        return _number(self.max_completion_tokens or self.max_tokens or self.max_output_tokens)

    @property
    def session(self) -> str:
        """Name of the conversation that the body gives; empty: none."""
        return _text(self.session_id) or _text(self.user)

    @property
    def salt(self) -> str:
        return _text(self.cache_salt)

    @property
    def is_stripped(self) -> bool:
        """Whether it has fields of `STRIPPED`."""
        return any(bytes(getattr(self, name)) for name in STRIPPED)

    def vllm_xargs_without(self, names: Collection[str]) -> dict[str, msgspec.Raw] | None:
        """`vllm_xargs` without these fields, which vLLM reads there, too: a text fails in every
        engine that it is sent to. None: it has none of them."""
        if not bytes(self.vllm_xargs):
            return None
        try:
            fields = fields_of(self.vllm_xargs)
        except msgspec.MsgspecError:
            return None
        kept = {name: value for name, value in fields.items() if name not in names}
        return kept if len(kept) < len(fields) else None

    def token_ids(self) -> list[int] | None:
        """The prompt, where it is one list of token ids; None: anything else."""
        if bytes(self.prompt)[:1] != b"[":
            return None
        try:
            return _ids.decode(self.prompt)
        except msgspec.DecodeError:
            return None


_peek: Final = msgspec.json.Decoder(Peek)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any: Final = msgspec.json.Decoder()
_ids: Final = msgspec.json.Decoder(list[int])


def peek(body: bytes) -> Peek:
    """Raises BadBody."""
    try:
        return _peek.decode(body)
    except msgspec.ValidationError as error:
        raise BadBody(f"the body is not valid: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {error}") from None


def fields_of(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Fields of a body that is known to be an object; values stay raw."""
    return _fields.decode(body)


def edited(
    body: bytes, *, drop: Collection[str] = (), put: Mapping[str, Any] | None = None
) -> bytes:
    """The body, known to be an object, without some fields and with others set."""
    fields: dict[str, Any] = {
        name: value for name, value in fields_of(body).items() if name not in drop
    }
    return msgspec.json.encode(fields | (dict(put) if put else {}))


def _plain(raw: msgspec.Raw) -> object:
    if not bytes(raw):
        return None
    try:
        return _any.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _text(raw: msgspec.Raw) -> str:
    found = _plain(raw)
    return found if isinstance(found, str) else ""


def _number(raw: msgspec.Raw) -> int | None:
    found = _plain(raw)
    return found if isinstance(found, int) and not isinstance(found, bool) else None
