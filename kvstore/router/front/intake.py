"""From a head and a body to a request of the decision core, for all front ends that see both.

    head ─▶ tenant      body ─▶ peek ─▶ edited, where it must be ─▶ prefix ─▶ RequestJob

Covers: rules about fields and headers of requests. Does not cover: bytes of HTTP or gRPC.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from multidict import CIMultiDictProxy, istr

from kvstore.config.reading import read_yaml
from kvstore.errors import ConfigError, KVStoreError
from kvstore.router.engines.workers import Workers
from kvstore.router.front import heads
from kvstore.router.front.answers import FORM, is_of, worker_of
from kvstore.router.front.bodies import (
    STRIPPED,
    TENANTS_STRIPPED,
    BadBody,
    Peek,
    edited,
    peek,
    peek_form,
)
from kvstore.router.front.prefill import can_split
from kvstore.router.keys.prefixes import Prefix, Prefixes
from kvstore.routing.events import Arrived
from kvstore.routing.values import RouteRequest
from kvstore.wire.identity import is_name

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
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")


class Tenants:
    """Tenants by the SHA-256 of their API keys."""

    def __init__(self, by_hash: dict[bytes, str]) -> None:
        self._by_hash = by_hash

    def of(self, key: str) -> str | None:
        """Tenant of an API key; None: the key is unknown."""
        return self._by_hash.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest())


def salt(tenant: str, given: str) -> str:
    """`cache_salt` for a tenant's request. `given`: the client's own salt, or empty."""
    return f"{tenant}/{given}" if given else tenant


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
    return Tenants(found)


def _digest(key: object) -> bytes | None:
    if not isinstance(key, str):
        return None
    if match := _HASH.fullmatch(key):
        return bytes.fromhex(match[1])
    is_key = len(key) >= KEY_CHARACTERS_MIN and not key.startswith("sha256:")
    return hashlib.sha256(key.encode()).digest() if is_key else None


# ── intake ────────────────────────────────────────────────────────────────────────────────────────

OUTPUT_TOKENS_MAX: Final = 1 << 24
"""Larger limits count as this one: engines have the last word about the limit itself."""
PRIORITY_MAX: Final = 1 << 31
SESSION_CHARACTERS_MAX: Final = 256
SESSION_HEADER: Final = istr("X-Session-Id")
CONTENT_TYPE: Final = istr("Content-Type")
PIN_HEADER: Final = istr("X-Kvstore-Pin-Ttl-S")
END_HEADER: Final = istr("X-Kvstore-Session-End")
PRIORITY_HEADER: Final = istr("X-Kvstore-Priority")
CLASS_HEADERS: Final = (istr("X-Kvstore-Class"), istr("X-Llm-D-Inference-Objective"))
RACED_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths whose requests may go to two engines. Answers of `/v1/responses` are stored by engines,
which may also call tools for them.
"""
_PRIORITY: Final = re.compile(r"-?[0-9]{1,10}")
_NOTHING: Final = frozenset({b"", b"null", b"false"})
_ONE: Final = frozenset({b"", b"null", b"1"})


class Unauthorized(KVStoreError):
    """The API key is missing or unknown."""


class RequestJob(NamedTuple):
    """A request for the core, and what its engine gets."""

    asked: Arrived
    path: str
    body: bytes
    read: Peek
    prefix: Prefix
    is_form: bool = False

    @property
    def request_id(self) -> str:
        return self.asked.request.request_id

    def body_for(self, model: str, put: Mapping[str, Any] | None = None) -> bytes:
        """The body for an engine that serves the model by the name `model`, with the fields of
        `put` set.
        """
        fields = dict(put or {})
        if model != self.read.model:
            fields["model"] = model
        return edited(self.body, put=fields) if fields and not self.is_form else self.body


def can_race(path: str, read: Peek) -> bool:
    """Whether two engines may compute the request, of which one is aborted: one answer is asked
    for, nothing is stored, and no plug-in of the engine gets arguments. Only streams, since the
    first byte of a whole answer says nothing about its first token."""
    return (
        path in RACED_PATHS
        and read.is_streamed
        and {bytes(read.store), bytes(read.vllm_xargs)} <= _NOTHING
        and {bytes(read.n), bytes(read.best_of)} <= _ONE
    )


class RequestIntake:
    """Makes requests of the decision core from heads and bodies; see the module."""

    def __init__(
        self,
        prefixes: Prefixes,
        tenants: Tenants | None,
        workers: Workers,
        sole: Callable[[], str],
    ) -> None:
        """`sole`: returns the model of a body that names none; empty: there are several, or none is
        known.
        """
        self.prefixes, self._tenants, self._sole = prefixes, tenants, sole
        self._workers = workers

    @property
    def has_tenants(self) -> bool:
        return self._tenants is not None

    def tenant(self, headers: CIMultiDictProxy[str]) -> str:
        """Tenant whose API key the headers have; empty: this router has no tenants. Raises
        Unauthorized.
        """
        if self._tenants is None:
            return ""
        found = self._tenants.of(heads.bearer(headers))
        if found is None:
            raise Unauthorized("the API key is missing or unknown")
        return found

    async def job(
        self,
        headers: CIMultiDictProxy[str],
        path: str,
        body: bytes,
        tenant: str,
        *,
        subset: tuple[str, ...] | None = None,
        drives_legs: bool = False,
        request_id: str = "",
    ) -> RequestJob:
        """A request for the core. `drives_legs`: the caller can drive a remote prefill, and a race.
        `request_id`: as of `new_id`; empty: a new one is made. Raises BadBody.
        """
        content_type = headers.get(CONTENT_TYPE, "")
        is_form = content_type.lower().startswith(FORM)
        read = peek_form(body, content_type) if is_form else peek(body)
        read.model = read.model or self._sole()
        salted, put = read.salt, dict[str, Any]()
        if tenant:
            salted = put["cache_salt"] = salt(tenant, read.salt)
        never = TENANTS_STRIPPED if tenant else STRIPPED
        drop = read.given(never)
        if (kept := read.vllm_xargs_without(never)) is not None:
            put["vllm_xargs"] = kept
        if (put or drop) and not is_form:
            body = edited(body, drop=drop, put=put)
        prefix = await self.prefixes.of(path, body, read, salted, tenant)
        before = read.previous_response
        if before and not is_of(before, tenant, self._workers):
            raise BadBody(f"there is no response {before}")
        keeper = worker_of(before, self._workers) if before else None
        request = RouteRequest(
            request_id=request_id or heads.new_id(headers),
            model=read.model,
            prompt_tokens=prefix.prompt_tokens,
            keys=prefix.keys,
            block_tokens=prefix.block_tokens,
            is_of_bytes=bool(prefix.text_bytes),
            parts=prefix.parts,
            output_tokens_max=output_tokens(read.output_tokens),
            is_streamed=read.is_streamed,
            has_media=bool(prefix.media),
            priority=_priority(headers, read),
            tenant=tenant,
            service=next((headers[name] for name in CLASS_HEADERS if name in headers), ""),
            session=session_of(headers.get(SESSION_HEADER, "") or read.session),
            subset=subset if keeper is None else (keeper.name,),
            is_bound_to_one=bool(before),
            load_only=prefix.load_only,
            pin_s=_pin_s(headers.get(PIN_HEADER)),
            ends_session=headers.get(END_HEADER, "").lower() in ("1", "true"),
            has_side_effects=not (drives_legs and can_race(path, read)),
            must_be_local=not (drives_legs and can_split(path, read)),
        )
        return RequestJob(Arrived(request, prefix.answer), path, body, read, prefix, is_form)


def output_tokens(given: int | None) -> int | None:
    """The client's limit of output tokens, kept between 1 and OUTPUT_TOKENS_MAX; None: it gave
    none.
    """
    return min(max(1, given), OUTPUT_TOKENS_MAX) if given else None


def _priority(headers: CIMultiDictProxy[str], read: Peek) -> int:
    """Priority by the header, else by the body, else 0; lower is first, as in vLLM."""
    text = headers.get(PRIORITY_HEADER, "")
    given = int(text) if _PRIORITY.fullmatch(text) else read.urgency
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
