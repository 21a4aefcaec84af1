"""Stored responses (`/v1/responses`): the worker that keeps one is part of the response's id.

    request_id of the body: resp_ + tag of the worker + random ─▶ engine ─▶ id of the response
    previous_response_id, /v1/responses/{id} ─▶ tag ─▶ worker, at any router; no tag: all are asked

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


def tag(worker: Worker) -> str:
    """The tag of an engine, the same at each router."""
    place = f"{worker.address.url}#{worker.address.rank}"
    return f"{xxhash.xxh32_intdigest(place.encode()):08x}"


def new_id(worker: Worker) -> str:
    """For a response that this worker will store; as long as vLLM's own."""
    return f"{PREFIX}{tag(worker)}{secrets.token_hex(12)}"


def id_for(worker: Worker, path: str, read: Peek) -> dict[str, str]:
    """Fields for the body of a request that this worker gets: the id of what it will store."""
    is_stored = path == RESPONSES and not bytes(read.request_id)
    return {"request_id": new_id(worker)} if is_stored else {}


def worker_of(response_id: str, workers: Iterable[Worker]) -> Worker | None:
    """The worker that made an id; None: another one, or an engine that makes its own ids."""
    if not response_id.startswith(PREFIX):
        return None
    wanted = response_id[len(PREFIX) :][:TAG_DIGITS]
    return next((worker for worker in workers if tag(worker) == wanted), None)
