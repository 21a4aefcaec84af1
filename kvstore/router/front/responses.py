"""Stored responses (`/v1/responses`): the worker that keeps one is part of the response's id.

    request_id of the body: resp_ + tags of worker, tenant + random ─▶ engine ─▶ id of the response
    previous_response_id, /v1/responses/{id} ─▶ tags ─▶ worker, at any router, for its tenant only
                                             no tag ─▶ all are asked

Engines keep responses in memory of one process. vLLM and SGLang take the id from the request, so
no table of ids has to be kept, shared by routers or lost at a restart.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

import xxhash

from kvstore.router.engines.workers import Worker
from kvstore.router.front.bodies import Peek
from kvstore.router.front.paths import RESPONSES

PREFIX: Final = "resp_"
TAG_DIGITS: Final = 8
_TAKES_ID: Final = ("vllm", "sglang")
"""Kinds that take it; others may refuse a field that they do not know."""


def tag(worker: Worker) -> str:
    """The tag of an engine, the same at each router."""
    place = f"{worker.address.url}#{worker.address.rank}"
    return _tag(place)


def _tag(name: str) -> str:
    return f"{xxhash.xxh32_intdigest(name.encode()):08x}"


def new_id(worker: Worker, tenant: str) -> str:
    """For a response that this worker will store; as long as vLLM's own."""
    return f"{PREFIX}{tag(worker)}{_tag(tenant)}{secrets.token_hex(8)}"


def id_for(worker: Worker, path: str, read: Peek, tenant: str) -> dict[str, str]:
    """Fields for the body of a request that this worker gets: the id of what it will store."""
    is_ours = bool(tenant) or not read.request_id  # a client's own id says no tenant
    is_stored = path == RESPONSES and worker.address.kind in _TAKES_ID and is_ours
    return {"request_id": new_id(worker, tenant)} if is_stored else {}


def is_of(response_id: str, tenant: str, workers: Iterable[Worker]) -> bool:
    """Whether a tenant may ask for a response: not for one that another tenant has stored."""
    begin = len(PREFIX) + TAG_DIGITS
    is_its = response_id[begin : begin + TAG_DIGITS] == _tag(tenant)
    return is_its or not tenant or worker_of(response_id, workers) is None


def worker_of(response_id: str, workers: Iterable[Worker]) -> Worker | None:
    """The worker that made an id; None: another one, or an engine that makes its own ids."""
    if not response_id.startswith(PREFIX):
        return None
    wanted = response_id[len(PREFIX) :][:TAG_DIGITS]
    return next((worker for worker in workers if tag(worker) == wanted), None)
