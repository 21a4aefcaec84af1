"""From a head and a body to a request of the decision core, for all front ends that see both.

    head ─▶ tenant      body ─▶ peek ─▶ edited, where it must be ─▶ prefix ─▶ RequestJob

Covers: rules about fields and headers of requests. Does not cover: bytes of HTTP or gRPC.
"""

from __future__ import annotations

import secrets
from typing import Any, Final, NamedTuple

from multidict import CIMultiDictProxy

from kvstore.errors import KVStoreError
from kvstore.router.front import heads
from kvstore.router.front.bodies import STRIPPED, Peek, edited, peek
from kvstore.router.front.prefill import can_split
from kvstore.router.front.tenants import Tenants, salt
from kvstore.router.keys.prefixes import Prefix, Prefixes
from kvstore.routing.events import Arrived
from kvstore.routing.values import RouteRequest

OUTPUT_TOKENS: Final = 256
"""Estimated for requests without a limit."""
SESSION_HEADER: Final = "X-Session-Id"
CLASS_HEADERS: Final = ("X-Kvstore-Class", "X-Llm-D-Inference-Objective")
GIVEN_ID_CHARACTERS_MAX: Final = 96
NO_ID: Final = "req"


class Unauthorized(KVStoreError):
    """The API key is missing or unknown."""


class RequestJob(NamedTuple):
    """A request for the core, and what its engine gets."""

    asked: Arrived
    body: bytes
    read: Peek
    prefix: Prefix

    @property
    def request_id(self) -> str:
        return self.asked.request.request_id

    def body_for(self, model: str) -> bytes:
        """The body, with the name by which the chosen engine serves the model."""
        return self.body if model == self.read.model else edited(self.body, put={"model": model})


class RequestIntake:
    """See the module."""

    def __init__(self, prefixes: Prefixes, tenants: Tenants | None) -> None:
        self._prefixes, self._tenants = prefixes, tenants

    @property
    def has_tenants(self) -> bool:
        return self._tenants is not None

    def tenant(self, headers: CIMultiDictProxy[str]) -> str:
        """Whose request it is; empty: this router has no tenants. Raises Unauthorized."""
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
        may_split: bool = False,
    ) -> RequestJob:
        """`may_split`: its sender can drive a remote prefill. Raises BadBody."""
        read = peek(body)
        salted, put = read.salt, dict[str, Any]()
        if tenant:
            salted = put["cache_salt"] = salt(tenant, read.salt)
        if (kept := read.vllm_xargs_kept) is not None:
            put["vllm_xargs"] = kept
        if put or read.is_stripped:
            body = edited(body, drop=STRIPPED, put=put)
        prefix = await self._prefixes.of(path, body, read, salted)
        given = heads.given_id(headers)[:GIVEN_ID_CHARACTERS_MAX] or NO_ID
        request = RouteRequest(
            # A client's id may be that of another request under way.
            request_id=f"{given}-{secrets.token_hex(8)}",
            model=read.model,
            prompt_tokens=prefix.prompt_tokens,
            keys=prefix.keys,
            block_tokens=prefix.block_tokens,
            output_tokens_max=read.output_tokens or OUTPUT_TOKENS,
            tenant=tenant,
            service=next((headers[name] for name in CLASS_HEADERS if name in headers), ""),
            session=headers.get(SESSION_HEADER, "") or read.session,
            subset=subset,
            must_be_local=not (may_split and can_split(path, read)),
        )
        return RequestJob(Arrived(request, prefix.answer), body, read, prefix)
