"""Bodies of requests: read as far as routing needs, and sent on as they came.

    {"model": "m", "prompt": "…", …} ─▶ peek ─▶ Peek (values stay raw bytes)
                                      ─▶ edited: fields dropped or set, all other bytes kept
    multipart/form-data ─▶ peek_form ─▶ Peek (the model), refused if it has fields of STRIPPED

Ways to be wrong, each a BadBody of one sentence: no JSON, no object, nested too deeply, a model
that is no text, or a long one. All other faults are the engine's to report. Names of fields are
compared after JSON's escapes, and of a repeated field the last one counts, as in engines; `edited`
leaves one, unless there may be very many.

Covers: JSON, forms. Does not cover: tokens (`rendering`), rules about fields (`intake`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

import msgspec

from kvstore.errors import KVStoreError

NAME_BYTES_MAX: Final = 1024

STRIPPED: Final = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port"),
        *("bootstrap_room", "data_parallel_rank"),
    }
)
"""Fields with which an engine would connect to an address, or compute at a rank, of the client's
choice (the last four: SGLang's)."""
TENANTS_STRIPPED: Final = STRIPPED | {"priority"}
"""Fields that are dropped where there are tenants: by `priority`, one tenant would be served before
the others.
"""
COLONS_MAX: Final = 1 << 18
"""Bodies with more colons are not taken apart, since they may have as many fields: that takes
seconds.
"""
PROMPTS_BYTES_MAX: Final = 4 << 20
"""A larger list of prompts is routed as one."""
PARTS_MAX: Final = 1000
"""Most parts of a form in which fields are looked for."""
_EMPTY: Final = msgspec.Raw()


class BadBody(KVStoreError):
    """The body of a request is invalid."""


class Peek(msgspec.Struct):
    """Fields of a request that routing reads. Raw values are JSON; empty: absent."""

    model: str = ""
    stream: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    system: msgspec.Raw = _EMPTY
    instructions: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY
    query: msgspec.Raw = _EMPTY
    queries: msgspec.Raw = _EMPTY
    text_1: msgspec.Raw = _EMPTY
    documents: msgspec.Raw = _EMPTY
    items: msgspec.Raw = _EMPTY
    text_2: msgspec.Raw = _EMPTY
    previous_response_id: msgspec.Raw = _EMPTY
    request_id: msgspec.Raw = _EMPTY
    priority: msgspec.Raw = _EMPTY
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
        """JSON of the prompt, joined from all fields that it is made of. Equal prefixes of prompts
        are equal bytes.
        """
        return b"".join(_content(self))

    @property
    def prompts(self) -> list[msgspec.Raw]:
        """JSON of each prompt of a list of several; empty: there is one."""
        prompt = bytes(self.prompt)[:64].lstrip()
        is_list = prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"[")
        if not is_list or len(self.prompt) > PROMPTS_BYTES_MAX:
            return []
        try:
            found = _list.decode(self.prompt)
        except msgspec.MsgspecError:
            return []
        return found if len(found) > 1 else []

    @property
    def output_tokens(self) -> int | None:
        """Most tokens that the client wants; None: no limit given."""
        return _number(self.max_completion_tokens or self.max_tokens or self.max_output_tokens)

    @property
    def urgency(self) -> int | None:
        """Priority among requests that wait, lower first; None: it gives none."""
        return _number(self.priority)

    @property
    def previous_response(self) -> str:
        """Id of the stored response that the request continues; empty: none."""
        return _text(self.previous_response_id)

    @property
    def session(self) -> str:
        """Name of the conversation that the body gives; empty: none."""
        return _text(self.session_id) or _text(self.user)

    @property
    def salt(self) -> str:
        return _text(self.cache_salt)

    def given(self, names: Iterable[str]) -> list[str]:
        """The names among `names` of fields that the body has."""
        return [name for name in names if getattr(self, name)]

    def vllm_xargs_without(self, names: Collection[str]) -> dict[str, msgspec.Raw] | None:
        """`vllm_xargs` without these fields, which vLLM reads there, too: with a text in one of
        them the request fails in every engine. None: it has none of them.
        """
        if not bytes(self.vllm_xargs):
            return None
        try:
            fields = fields_of(self.vllm_xargs)
        except msgspec.MsgspecError:
            return None
        kept = {name: value for name, value in fields.items() if name not in names}
        return kept if len(kept) < len(fields) else None

    def token_ids(self) -> list[int] | None:
        """Token ids of the prompt, if it is one list of them; None: anything else."""
        if bytes(self.prompt)[:1] != b"[":
            return None
        try:
            return _ids.decode(self.prompt)
        except msgspec.DecodeError:
            return None


_content: Final = attrgetter(
    *("tools", "system", "instructions", "prompt", "messages", "input", "query", "queries"),
    *("text_1", "documents", "items", "text_2"),
)
"""Values of the fields that a prompt is made of, those first that requests share."""


class _NullablePeek(Peek):
    model: str | None = ""  # type: ignore[assignment]


_peek: Final = msgspec.json.Decoder(_NullablePeek)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any: Final = msgspec.json.Decoder()
_list: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ids: Final = msgspec.json.Decoder(list[int])


def peek(body: bytes) -> Peek:
    """Fields that routing reads from a JSON body. Raises BadBody."""
    try:
        read = _peek.decode(body)
    except msgspec.ValidationError as error:
        raise BadBody(f"the body is not valid: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {error}") from None
    read.model = read.model or ""
    if len(read.model) > NAME_BYTES_MAX:  # names are kept, wrong ones included
        raise BadBody(f"the name of the model is longer than {NAME_BYTES_MAX} characters")
    return read


_BOUNDARY: Final = re.compile(r'boundary="?([^";,\s]{1,70})"?', re.IGNORECASE)
_FIELD: Final = re.compile(rb'\bname="?([^";\r\n]*)"?', re.IGNORECASE)
_NAMED: Final = re.compile(rb'name\s*=[\s"<]*(\w+)', re.IGNORECASE)


def peek_form(body: bytes, content_type: str) -> Peek:
    """Fields that routing reads from a form, which is sent on as it came: nothing in it can be
    dropped or set.

    Raises:
        BadBody: it is no form, or has a field by which it would steer its engine.
    """
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise BadBody("the form has no boundary in its Content-Type")
    # In the whole body: an engine may see other parts than those that the boundary makes here.
    has_more = b"vllm_xargs" in body
    if has_more and b"\\u00" in body:
        raise BadBody("the form has escapes in vllm_xargs")
    for steering in STRIPPED:
        name = steering.encode()
        if name in body and (has_more or name in _NAMED.findall(body)):
            raise BadBody(f"the form has a field that no client may set: {steering}")
    read, parts = Peek(), body.split(b"--" + boundary[1].encode(), PARTS_MAX)
    for part in parts[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        names = _FIELD.findall(head)
        if b"model" in names:
            read.model = value[:NAME_BYTES_MAX].decode("utf-8", "replace").strip()
        elif b"stream" in names:
            read.stream = msgspec.Raw(value[:8].strip().lower())
    return read


def fields_of(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Fields of a body that is known to be an object; values stay raw."""
    return _fields.decode(body)


def edited(
    body: bytes, *, drop: Collection[str] = (), put: Mapping[str, Any] | None = None
) -> bytes:
    """The body, known to be an object, without some fields and with others set. A body of perhaps
    very many fields gets the changes behind its own fields, null for those dropped: the last one
    counts.
    """
    if body.count(b":") > COLONS_MAX:
        more = msgspec.json.encode(dict.fromkeys(drop) | dict(put or {}))
        head = body.rstrip()[:-1].rstrip()
        return head + (b"" if head.endswith(b"{") else b",") + more[1:] if len(more) > 2 else body
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
