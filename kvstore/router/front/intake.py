"""From a client's request to a request of the decision core, for all front ends that see both.

    head ─▶ tenant      body: in time, within its memory ─▶ peek ─▶ edited, where it must be
                                                                     └─▶ prefix ─▶ RequestJob

Covers: API keys, bytes and fields of bodies, headers that are read. Does not cover: bytes of
connections (`door`), headers that go on (`proxy`), tokens (`keys`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Collection, Iterable, Mapping
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11
from multidict import CIMultiDictProxy, istr

from kvstore.config.reading import read_yaml
from kvstore.errors import ConfigError, KVStoreError
from kvstore.net.aio import end_now
from kvstore.router.engines.connections import CONTENT_LENGTH, TRANSFER_ENCODING
from kvstore.router.front.answers import is_of, worker_of
from kvstore.routing.values import RouteRequest
from kvstore.wire.identity import is_name

if TYPE_CHECKING:
    from kvstore.router.dispatch import Dispatcher
    from kvstore.router.keys.prefixes import Prefixes

# ── tenants ───────────────────────────────────────────────────────────────────────────────────────
# API keys of clients, and the tenants that they belong to.
#
#     team-a: [sha256:9f86d0…, another-key]        one line a tenant, in YAML
#     team-b: sha256:2c26b4…
#
# A key is compared by its SHA-256, which the file may hold in its place. A tenant's requests get
# the tenant's own `cache_salt`, so that no cache, of an engine or of a node, answers one tenant
# with blocks of another, and nobody learns from a quick answer what others asked. A salt of the
# client is kept behind the tenant's.
#
# Ways to be wrong, each a ConfigError: no YAML, no mapping, a tenant or a key twice, a key that is
# short, a hash of another length, a name that is none.

KEY_CHARACTERS_MIN: Final = 16
API_KEY: Final = istr("X-Api-Key")
AUTHORIZATION: Final = istr("Authorization")
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")


Tenants = Mapping[bytes, str]
"""Tenants by the SHA-256 of their API keys."""


def load_tenants(path: Path) -> Tenants:
    """Tenants in a file of API keys. Raises ConfigError."""
    content = read_yaml("--api-keys", path)
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"--api-keys {path} must hold lines such as 'team-a: [KEY]'")
    found: dict[bytes, str] = {}
    for name, keys in content.items():
        if not isinstance(name, str) or not is_name(name):
            raise ConfigError(
                f"--api-keys {path}: {name!r} cannot be a tenant: use lower-case letters, digits,"
                " '-' and '.'"
            )
        for key in keys if isinstance(keys, list) else [keys]:
            digest = _digest(key)
            if digest is None:
                raise ConfigError(
                    f"--api-keys {path}: a key of {name!r} must be a text of at least"
                    f" {KEY_CHARACTERS_MIN} characters, or sha256: and 64 hex digits"
                )
            if found.setdefault(digest, name) != name:
                raise ConfigError(f"--api-keys {path}: {found[digest]!r} and {name!r} share a key")
    return found


def _digest(key: object) -> bytes | None:
    if not isinstance(key, str):
        return None
    if match := _HASH.fullmatch(key):
        return bytes.fromhex(match[1])
    is_key = len(key) >= KEY_CHARACTERS_MIN and not key.startswith("sha256:")
    return hashlib.sha256(key.encode()).digest() if is_key else None


def bearer(headers: CIMultiDictProxy[str]) -> str:
    """The API key of a request, as clients of OpenAI or of Anthropic send it; empty: none."""
    kind, _, key = headers.get(AUTHORIZATION, "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get(API_KEY, "")


# ── bytes of bodies ───────────────────────────────────────────────────────────────────────────────
# Bodies have a budget for all requests together: once it is used up, those that are stalled give
# way. Compressed bodies are refused: nothing in them could be read. A client that expects
# 100-continue gets it after all checks that need no body.

CONTENT_ENCODING: Final = istr("Content-Encoding")
EXPECT: Final = istr("Expect")
BODY_STALL_S: Final = 600.0
"""Longest time for the next STEP_BYTES of a body, as for a client that does not read."""
BODIES_SHARE: Final = 8
"""Number of bodies of the largest size that the memory for bodies holds."""
SMALL_BYTES: Final = 64 << 10
"""Bodies up to this are read without waiting for memory."""
ROOM_LOOK_S: Final = 0.02
STALLED_S: Final = 2.0
"""When memory is used up, a body gives way whose last STEP_BYTES took longer than this."""
WHOLE_S: Final = 120.0
"""When memory is used up, a body also gives way if at its present rate it would take longer than
this in all.
"""
STEP_BYTES: Final = 16 << 10
_COMPRESSION: Final = re.compile(r"zip|deflate|compress|br|zst|dc[bz]|exi", re.IGNORECASE)
"""In a Content-Encoding; clients also name `identity` there, or a character set."""
NO_MEMORY: Final = "the bodies under way use up their memory"


class BodyRefused(Exception):
    """The body is not read on. Carries the status and one sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Coming:
    """A body that is being read."""

    def __init__(self, limit: asyncio.Timeout, taken: int, now_s: float) -> None:
        self.limit = limit
        self.taken = taken
        """Bytes of the memory budget that it has."""
        self.size = self.step_size = 0
        """Bytes that came, and how many there were at the last step of STEP_BYTES."""
        self.step_s = self._begun_s = now_s
        """When the last step was, and when reading began."""
        self.gives_way = False

    def is_slow(self, now_s: float) -> bool:
        """Whether the body comes too slowly for the memory that it has."""
        age_s = now_s - self._begun_s
        is_behind = age_s >= STALLED_S and self.size * WHOLE_S < self.taken * age_s
        return is_behind or now_s - self.step_s >= STALLED_S


class Bodies:
    """Reads bodies, within a budget for all of them."""

    def __init__(self, *, bytes_max: int) -> None:
        self.bytes_max, self._clock = bytes_max, asyncio.get_running_loop().time
        self.left = bytes_max * BODIES_SHARE
        """Bytes of memory that no body has; below 0: more than there are, until bodies give way."""
        self._coming: dict[_Coming, None] = {}
        """Bodies that are being read; the one with the oldest last step first."""
        self._turn = asyncio.Lock()

    async def read(self, request: web.BaseRequest, whole: bytes | None) -> bytes:
        """The whole body of a request; the caller adds its length to `left` afterwards. `whole`: it
        came together with its head.

        Raises:
            BodyRefused: framing, coding, size or time.
        """
        _refuse_framing(request)
        announced = request.content_length
        if announced is not None and announced > self.bytes_max:
            raise BodyRefused(413, f"the body has {announced} bytes: at most {self.bytes_max}")
        if whole is not None:
            if len(whole) > self.bytes_max:
                raise BodyRefused(413, f"the body is larger than {self.bytes_max} bytes")
            self.take(len(whole))
            return whole
        if (taken := announced or 0) > SMALL_BYTES:
            await self._room(taken)
        else:
            self.take(taken)
        is_modern, transport = request.version >= HttpVersion11, request.transport
        expects = request.headers.get(EXPECT, "").lower() == "100-continue"  # others: as uvicorn
        if expects and is_modern and transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        pieces: list[bytes] = []
        coming = _Coming(asyncio.timeout(BODY_STALL_S), taken, self._clock())
        self._coming[coming] = None
        try:
            async with coming.limit:
                while piece := await request.content.readany():
                    pieces.append(piece)
                    self._came(coming, len(piece))
                if coming.gives_way:  # in the turn in which its end came
                    raise TimeoutError
        except BaseException as error:
            self.left += coming.taken
            if not isinstance(error, TimeoutError):
                raise
            late = f"did not go on for {BODY_STALL_S:g} s"
            why = "came too slowly: others need its memory" if coming.gives_way else late
            raise BodyRefused(408, f"the body {why}") from None
        finally:
            self._coming.pop(coming, None)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _came(self, coming: _Coming, size: int) -> None:
        if coming.size + size > self.bytes_max:
            raise BodyRefused(413, f"the body is larger than {self.bytes_max} bytes")
        coming.size += size
        if coming.size - coming.step_size >= STEP_BYTES:
            coming.step_size, coming.step_s = coming.size, self._clock()
            if not (coming.gives_way or coming.limit.expired()):
                coming.limit.reschedule(coming.step_s + BODY_STALL_S)
                del self._coming[coming]
                self._coming[coming] = None
        more = max(0, coming.size - coming.taken)
        coming.taken += more
        if more and not self.take(more):
            raise BodyRefused(503, NO_MEMORY)

    async def _room(self, size: int) -> None:
        """Wait, in turn, until there is memory for `size` bytes: an engine could take the request,
        so it is not refused.
        """
        async with self._turn:
            while not self.take(size):
                self.left += size
                await asyncio.sleep(ROOM_LOOK_S)

    def take(self, size: int) -> bool:
        """Count `size` bytes against the memory; they stay counted until they are added to `left`
        again, whatever the result. Returns whether there is room, for which slow bodies give way.
        """
        self.left -= size
        now_s = self._clock()
        while self.left < 0:
            slowest = next((each for each in self._coming if each.is_slow(now_s)), None)
            if slowest is None:
                break
            del self._coming[slowest]
            slowest.gives_way = True
            self.left += slowest.taken
            slowest.taken = slowest.size = slowest.step_size = 0
            end_now(slowest.limit)
        return self.left >= 0


def _refuse_framing(request: web.BaseRequest) -> None:
    headers = request.headers
    codings = headers.getall(TRANSFER_ENCODING, ())
    lengths = headers.getall(CONTENT_LENGTH, ())
    if len(codings) + len(lengths) > 1 or (codings and codings[0].strip().lower() != "chunked"):
        raise BodyRefused(400, "give one Content-Length, or one Transfer-Encoding: chunked")
    if _COMPRESSION.search(",".join(headers.getall(CONTENT_ENCODING, ()))):
        raise BodyRefused(415, "compressed bodies are refused: send it without Content-Encoding")


# ── fields of bodies ──────────────────────────────────────────────────────────────────────────────
# Read as far as routing needs, and sent on as they came.
#
#     {"model": "m", "prompt": "…", …} ─▶ peek ─▶ Peek (values stay raw bytes)
#                                       ─▶ edited: fields dropped or set, all other bytes kept
#     JSON as Python reads it ─▶ plain ─▶ peek; the body goes on as it came
#     multipart/form-data ─▶ peek_form ─▶ Peek (the model), refused if it has fields of STRIPPED
#
# Ways to be wrong, each a BadBody of one sentence: no JSON, no object, nested too deeply, a model
# that is no text, or a long one. All other faults are the engine's to report. Names of fields are
# compared after JSON's escapes, and of a repeated field the last one counts, as in engines;
# `edited` leaves one, unless there may be very many.

NAME_BYTES_MAX: Final = 1024

STRIPPED: Final = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port"),
        *("bootstrap_room", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
    }
)
"""Fields with which an engine would connect to an address, or compute at a rank, of the client's
choice (the last six: SGLang's)."""
TENANTS_STRIPPED: Final = STRIPPED | {"priority"}
"""Fields that are dropped where there are tenants: by `priority`, one tenant would be served before
the others.
"""
CONTENT: Final = (
    *("tools", "system", "instructions", "prompt", "messages", "input", "query", "queries"),
    *("text_1", "documents", "items", "text_2"),
)
"""Fields that a prompt is made of, those first that requests share."""
COLONS_MAX: Final = 1 << 18
"""Bodies with more colons are not taken apart, since they may have as many fields: that takes
seconds.
"""
ODD_BYTES_MAX: Final = 4 << 20
"""Larger bodies are read as JSON of the standard only."""
PARTS_MAX: Final = 1000
"""Most parts of a form in which fields are looked for."""
_ESCAPED: Final = re.compile(rb"\\u00(5f|[67])", re.IGNORECASE)
"""An escape of a letter of those names; encoders of JSON escape none."""
_EMPTY: Final = msgspec.Raw()


class BadBody(KVStoreError):
    """The body of a request is invalid."""


class NotJson(BadBody):
    """The body is not JSON of the standard; engines may read it all the same."""


class Peek(msgspec.Struct):
    """Fields of a request that routing reads, those of CONTENT and STRIPPED among them. Raw values
    are JSON; empty: absent.
    """

    model: str = ""
    stream: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    previous_response_id: msgspec.Raw = _EMPTY
    request_id: msgspec.Raw = _EMPTY
    priority: msgspec.Raw = _EMPTY
    max_tokens: msgspec.Raw = _EMPTY
    max_completion_tokens: msgspec.Raw = _EMPTY
    max_output_tokens: msgspec.Raw = _EMPTY
    user: msgspec.Raw = _EMPTY
    session_id: msgspec.Raw = _EMPTY
    cache_salt: msgspec.Raw = _EMPTY
    vllm_xargs: msgspec.Raw = _EMPTY
    prompt_logprobs: msgspec.Raw = _EMPTY
    echo: msgspec.Raw = _EMPTY
    use_beam_search: msgspec.Raw = _EMPTY
    store: msgspec.Raw = _EMPTY
    n: msgspec.Raw = _EMPTY
    best_of: msgspec.Raw = _EMPTY

    @property
    def is_streamed(self) -> bool:
        return bytes(self.stream) == b"true"

    def given(self, names: Iterable[str]) -> list[str]:
        """The names among `names` of fields that the body has."""
        return [name for name in names if getattr(self, name)]

    def vllm_xargs_without(self, names: Collection[str]) -> dict[str, msgspec.Raw] | None:
        """`vllm_xargs` without these fields, which vLLM reads there, too: with a text in one of
        them the request fails in every engine. None: it has none of them.
        """
        try:
            fields = fields_of(self.vllm_xargs)
        except msgspec.MsgspecError:
            return None
        kept = {name: value for name, value in fields.items() if name not in names}
        return kept if len(kept) < len(fields) else None


_whole = msgspec.defstruct(
    "_whole",
    [("model", str | None, ""), *((name, msgspec.Raw, _EMPTY) for name in (*CONTENT, *STRIPPED))],
    bases=(Peek,),
)
_peek: Final = msgspec.json.Decoder(cast("type[Peek]", _whole))
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def peek(body: bytes) -> Peek:
    """Fields that routing reads from a JSON body. Raises NotJson, BadBody."""
    try:
        read = _peek.decode(body)
    except msgspec.ValidationError as error:
        raise BadBody(f"the body is not valid: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(f"the body is not JSON: {error}") from None
    read.model = read.model or ""
    if len(read.model) > NAME_BYTES_MAX:  # names are kept, wrong ones included
        raise BadBody(f"the name of the model is longer than {NAME_BYTES_MAX} characters")
    return read


def plain(body: bytes) -> bytes | None:
    """A body as JSON of the standard, for one that `peek` refuses and engines read: with a byte
    order mark, in UTF-16, with half a surrogate pair or NaN, which are lost. None: they do not read
    it either, or it is large.
    """
    if len(body) > ODD_BYTES_MAX:
        return None
    try:
        found = json.loads(body, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")


_FIELD: Final = re.compile(rb'\bname="?([^";\r\n]*)"?', re.IGNORECASE)
_NAMED: Final = re.compile(rb"(?i:name)[^\w=]*=\W*(%b)\b" % "|".join(STRIPPED).encode())
_ENCODED: Final = re.compile(rb"\Wname\*[^a-z_=]*=", re.IGNORECASE)
"""Name of a field as in RFC 2231, in pieces or with percent signs: old engines decode it."""


def peek_form(body: bytes, content_type: str) -> Peek:
    """Fields that routing reads from a form, which is sent on as it came: nothing in it can be
    dropped or set.

    Raises:
        BadBody: it is no form, or has a field by which it would steer its engine.
    """
    if len(content_type) > NAME_BYTES_MAX:  # the module reads it in quadratic time
        raise BadBody(f"the Content-Type is longer than {NAME_BYTES_MAX} characters")
    said = Message()
    said[CONTENT_TYPE] = content_type
    boundary = dict(said.get_params([])).get("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise BadBody("the form has no boundary in its Content-Type")
    # In the whole body: an engine may see other parts than those that the boundary makes here.
    if b"name*" in body.lower() and _ENCODED.search(body):
        raise BadBody("the form has a field with an encoded name: give it as it is")
    if (has_more := b"vllm_xargs" in body) and b"\\u00" in body:
        raise BadBody("the form has escapes in vllm_xargs")
    steering = next((name for name in STRIPPED if name.encode() in body), "")
    if steering and not has_more:  # it may be in the bytes of a file only
        steering = found[1].decode() if (found := _NAMED.search(body)) else ""
    if steering:
        raise BadBody(f"the form has a field that no client may set: {steering}")
    read, parts = peek(b"{}"), body.split(b"--" + boundary.encode(), PARTS_MAX)
    for part in parts[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        names = _FIELD.findall(head)
        if b"model" in names:
            read.model = value[:NAME_BYTES_MAX].decode("utf-8", "replace").strip()
        elif b"stream" in names:
            read.stream = msgspec.Raw(value[:8].strip().lower())
    return read


def peek_unknown(body: bytes, content_type: str) -> Peek:
    """Fields that routing reads from a body of which nothing is known, and that is sent on as it
    came; none if it is no JSON. Raises BadBody if a field in it, however deep, would steer its
    engine.
    """
    if content_type.lower().startswith(FORM):
        return peek_form(body, content_type)
    shown = body.translate(None, b"\0") if b"\0" in body else body  # of UTF-16 and UTF-32
    if any(name.encode() in shown for name in STRIPPED) or _ESCAPED.search(shown):
        if len(body) > ODD_BYTES_MAX:
            raise BadBody(f"above {ODD_BYTES_MAX} bytes no body may mention {sorted(STRIPPED)}")
        try:  # numbers as floats: others have a limit of digits
            json.loads(body, object_pairs_hook=_refuse_steering, parse_int=float)
        except RecursionError:
            raise BadBody("the body is nested too deeply") from None
        except ValueError:
            pass  # no JSON, for engines neither
    try:
        return peek(body)
    except BadBody:
        return peek(b"{}")


def _refuse_steering(pairs: list[tuple[str, object]]) -> None:
    if steering := STRIPPED.intersection(name for name, _ in pairs):
        raise BadBody(f"the body has a field that no client may set: {min(steering)}")


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
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def text_of(raw: msgspec.Raw) -> str:
    """The text in a field; empty: it is no text."""
    found = _plain(raw)
    return found if isinstance(found, str) else ""


def number_of(raw: msgspec.Raw) -> int | None:
    """The whole number in a field; None: it is none."""
    found = _plain(raw)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


# ── requests of the core ──────────────────────────────────────────────────────────────────────────

OUTPUT_TOKENS_MAX: Final = 1 << 24
"""Larger limits count as this one: engines have the last word about the limit itself."""
PRIORITY_MAX: Final = 1 << 31
SESSION_CHARACTERS_MAX: Final = 256
SESSION_HEADER: Final = istr("X-Session-Id")
CONTENT_TYPE: Final = istr("Content-Type")
FORM: Final = "multipart/form-data"
PIN_HEADER: Final = istr("X-Kvstore-Pin-Ttl-S")
END_HEADER: Final = istr("X-Kvstore-Session-End")
PRIORITY_HEADER: Final = istr("X-Kvstore-Priority")
CLASS_HEADERS: Final = (istr("X-Kvstore-Class"), istr("X-Llm-D-Inference-Objective"))
TWO_ENGINES: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths whose requests may go to two engines, by a race or a remote prefill. Answers of
`/v1/responses` are stored by engines, which may also call tools for them.
"""
_PRIORITY: Final = re.compile(r"-?[0-9]{1,10}")
_NOTHING: Final = frozenset({b"", b"null", b"false"})
_ONE: Final = frozenset({b"", b"null", b"1"})


class Unauthorized(KVStoreError):
    """The API key is missing or unknown."""


class RequestJob(NamedTuple):
    """A request for the core, and what its engine gets."""

    request: RouteRequest
    path: str
    body: bytes
    read: Peek
    editable: bytes
    """The body as JSON, in which fields can be set; empty: it is a form, and goes on as it came."""
    came_ns: int
    """Unix time at which its body was there, in ns."""
    size: int
    """Length of the body as it came."""

    def body_for(self, model: str, put: Mapping[str, Any] | None = None) -> bytes:
        """The body for an engine that serves the model by the name `model`, with the fields of
        `put` set.
        """
        fields = dict(put or {})
        if model != self.read.model:
            fields["model"] = model
        return edited(self.editable, put=fields) if fields and self.editable else self.body


def can_race(path: str, read: Peek) -> bool:
    """Whether two engines may compute the request, of which one is aborted: one answer is asked
    for, nothing is stored, and no plug-in of the engine gets arguments. Only streams, since the
    first byte of a whole answer says nothing about its first token."""
    return (
        path in TWO_ENGINES
        and read.is_streamed
        and {bytes(read.store), bytes(read.vllm_xargs)} <= _NOTHING
        and {bytes(read.n), bytes(read.best_of)} <= _ONE
    )


def can_split(path: str, read: Peek) -> bool:
    """Whether a remote prefill is of use for a request: for log probabilities of a prompt an engine
    computes it itself, and of a beam search vLLM says no parameters.
    """
    alone = (read.prompt_logprobs, read.echo, read.use_beam_search)
    return path in TWO_ENGINES and set(map(bytes, alone)) <= _NOTHING


class RequestIntake:
    """Makes requests of the decision core from heads and bodies; see the module."""

    def __init__(
        self, prefixes: Prefixes, tenants: Tenants | None, dispatcher: Dispatcher, bodies: Bodies
    ) -> None:
        self.prefixes, self.tenants, self.bodies = prefixes, tenants, bodies
        self._dispatcher = dispatcher
        self._workers = dispatcher.workers

    def tenant(self, headers: CIMultiDictProxy[str]) -> str:
        """Tenant whose API key the headers have; empty: this router has no tenants. Raises
        Unauthorized.
        """
        if self.tenants is None:
            return ""
        key = bearer(headers).encode("utf-8", "surrogateescape")
        found = self.tenants.get(hashlib.sha256(key).digest())
        if found is None:
            raise Unauthorized("the API key is missing or unknown")
        return found

    async def take(
        self, request: web.BaseRequest, whole: bytes | None, path: str, tenant: str, request_id: str
    ) -> RequestJob:
        """The request of a client, with its body, which stays counted in `bodies`; its caller can
        drive a remote prefill, and a race. Raises BodyRefused, BadBody.
        """
        body = await self.bodies.read(request, whole)
        try:
            return await self.job(
                request.headers, path, body, tenant, request_id=request_id, drives_legs=True
            )
        except BaseException:
            self.bodies.left += len(body)
            raise

    async def job(
        self,
        headers: CIMultiDictProxy[str],
        path: str,
        body: bytes,
        tenant: str,
        *,
        request_id: str,
        subset: tuple[str, ...] | None = None,
        drives_legs: bool = False,
    ) -> RequestJob:
        """A request for the core. `drives_legs`: the caller can drive a remote prefill, and a race.
        Raises BadBody.
        """
        came_ns, size = time.time_ns(), len(body)
        read, editable = await _read(body, headers.get(CONTENT_TYPE, ""), tenant)
        shown, is_fixed = editable or body, editable is not body
        drives_legs = drives_legs and not is_fixed
        read.model = read.model or self._dispatcher.core.arrivals.models.sole
        salted, put = text_of(read.cache_salt), dict[str, Any]()
        if tenant:
            salted = put["cache_salt"] = f"{tenant}/{salted}" if salted else tenant
        never = TENANTS_STRIPPED if tenant else STRIPPED
        drop = read.given(never)
        if (kept := read.vllm_xargs_without(never)) is not None:
            put["vllm_xargs"] = kept
        if is_fixed and (drop or kept is not None):
            raise BadBody("the body is not JSON, and has a field that no client may set")
        if (put or drop) and not is_fixed:
            body = shown = editable = edited(body, drop=drop, put=put)
        prefix = await self.prefixes.of(path, shown, read, salted, tenant)
        before = text_of(read.previous_response_id)
        if before and not is_of(before, tenant, self._workers):
            raise BadBody(f"there is no response {before[:NAME_BYTES_MAX]}")
        keeper = worker_of(before, self._workers) if before else None
        most = read.max_completion_tokens or read.max_tokens or read.max_output_tokens
        named = text_of(read.session_id) or text_of(read.user)
        request = RouteRequest(
            **msgspec.structs.asdict(prefix),
            request_id=request_id,
            model=read.model,
            output_tokens_max=output_tokens(number_of(most)),
            is_streamed=read.is_streamed,
            priority=_priority(headers, read),
            tenant=tenant,
            service=next((headers[name] for name in CLASS_HEADERS if name in headers), ""),
            session=session_of(headers.get(SESSION_HEADER, "") or named),
            subset=subset if keeper is None else (keeper.name,),
            is_bound_to_one=bool(before),
            pin_s=_pin_s(headers.get(PIN_HEADER)),
            ends_session=headers.get(END_HEADER, "").lower() in ("1", "true"),
            has_side_effects=not (drives_legs and can_race(path, read)),
            must_be_local=not (drives_legs and can_split(path, read)),
        )
        return RequestJob(request, path, body, read, editable, came_ns, size)


async def _read(body: bytes, content_type: str, tenant: str) -> tuple[Peek, bytes]:
    """(fields, body as JSON of the standard, in which they can be set; empty: it is a form). Raises
    BadBody.
    """
    if content_type.lower().startswith(FORM):
        return peek_form(body, content_type), b""
    try:
        return peek(body), body
    except NotJson:
        # On a thread: a large one takes half a second.
        found = None if tenant else await asyncio.to_thread(plain, body)
        if found is None:
            raise
        return peek(found), found


def output_tokens(given: int | None) -> int | None:
    """The client's limit of output tokens, kept between 1 and OUTPUT_TOKENS_MAX; None: it gave
    none.
    """
    return min(max(1, given), OUTPUT_TOKENS_MAX) if given else None


def _priority(headers: CIMultiDictProxy[str], read: Peek) -> int:
    """Priority by the header, else by the body, else 0; lower is first, as in vLLM."""
    text = headers.get(PRIORITY_HEADER, "")
    given = int(text) if _PRIORITY.fullmatch(text) else number_of(read.priority)
    return min(max(-PRIORITY_MAX, given or 0), PRIORITY_MAX)


def session_of(given: str) -> str:
    """Name of a session for the core: a name that is long, or not printable, is hashed."""
    if len(given) <= SESSION_CHARACTERS_MAX and given.isprintable():
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()


def _pin_s(given: str | None) -> float:
    """Seconds of a pin by its header; 0: none is wanted; below 0: the value is not valid."""
    if given is None:
        return 0.0
    return float(given) if given.isascii() and given.isdigit() and len(given) <= 6 else -1.0
