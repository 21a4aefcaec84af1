"""Answers of the router itself: rejections, errors in OpenAI's form."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash
from aiohttp import web

from kvstore.router.engines.connections import SERVER
from kvstore.router.engines.workers import Worker
from kvstore.routing.events import Rejected, RejectReason
from kvstore.routing.models import ModelMap
from kvstore.routing.policy import RoutingPolicy

if TYPE_CHECKING:
    from kvstore.router.front.intake import Peek

# ── responses ─────────────────────────────────────────────────────────────────────────────────────
# Stored responses (`/v1/responses`): the worker that keeps one is part of the response's id.
#
#     request_id of the body: resp_ + tags of worker, tenant + random ─▶ engine ─▶ response id
#     previous_response_id, /v1/responses/{id} ─▶ tags ─▶ worker, at any router, for its tenant only
#                                              no tag ─▶ all are asked
#
# Engines keep responses in memory of one process. vLLM and SGLang take the id from the request, so
# no table of ids has to be kept, shared by routers or lost at a restart.

RESPONSES: Final = "/v1/responses"
PREFIX: Final = "resp_"
TAG_DIGITS: Final = 8
_TAKES_ID: Final = ("vllm", "sglang")
"""Kinds of engines that take the id from the request; others may refuse an unknown field."""


def tag(worker: Worker) -> str:
    """Tag of a worker's engine in ids, of TAG_DIGITS hex digits; the same at each router."""
    return _tag(f"{worker.address.url}#{worker.address.rank}")


def _tag(name: str) -> str:
    return f"{xxhash.xxh32_intdigest(name.encode()):08x}"


def new_id(worker: Worker, tenant: str) -> str:
    """Id of a response that this worker will store for a tenant; as long as vLLM's own."""
    return f"{PREFIX}{tag(worker)}{_tag(tenant)}{secrets.token_hex(8)}"


def id_for(worker: Worker, path: str, read: Peek, tenant: str) -> dict[str, str]:
    """Fields to set in the body for this worker: the id of the response that it will store; empty
    if it stores none, or if the client gave an id of its own.
    """
    is_ours = bool(tenant) or not read.request_id  # a client's own id says no tenant
    is_stored = path == RESPONSES and worker.address.kind in _TAKES_ID and is_ours
    return {"request_id": new_id(worker, tenant)} if is_stored else {}


def is_of(response_id: str, tenant: str, workers: Iterable[Worker]) -> bool:
    """Whether a tenant may ask for a response: not for one that another tenant has stored."""
    begin = len(PREFIX) + TAG_DIGITS
    is_its = response_id[begin : begin + TAG_DIGITS] == _tag(tenant)
    return is_its or not tenant or worker_of(response_id, workers) is None


def worker_of(response_id: str, workers: Iterable[Worker]) -> Worker | None:
    """Worker whose tag an id has; None: no tag, as of engines that make their own ids, or the tag
    of another worker.
    """
    if not response_id.startswith(PREFIX):
        return None
    wanted = response_id[len(PREFIX) :][:TAG_DIGITS]
    return next((worker for worker in workers if tag(worker) == wanted), None)


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


def rejection(rejected: Rejected) -> web.Response:
    """The answer to a request that no worker gets."""
    known = f"there are {', '.join(rejected.known_models) or 'none'}"
    text = {
        400: f"the body names no model; {known}",
        404: f"no such model; {known}",
        429: "too much load: try again later",
        500: "the router failed at this request",
        502: "every worker that was tried failed",
    }.get(rejected.status, "no ready worker serves this model")
    if rejected.reason == RejectReason.OBJECTIVE:
        its, goal = 1e3 * rejected.predicted_s, 1e3 * rejected.objective_s
        text = f"the predicted TTFT of {its:.0f} ms is above the class's objective of {goal:.0f} ms"
    answer = error_response(rejected.status, text, rejected.reason)
    answer.headers["X-Kvstore-Dropped-Reason"] = rejected.reason
    if rejected.retry_after_s is not None:
        answer.headers["Retry-After"] = str(max(1, round(rejected.retry_after_s)))
    return answer


def error_response(status: int, text: str, code: str) -> web.Response:
    """Response with an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json_response(
        status, {"error": {"message": text, "type": kind, "param": None, "code": code}}
    )


def json_response(status: int, content: object) -> web.Response:
    """Response of the router itself, with JSON content."""
    return web.Response(
        status=status,
        body=msgspec.json.encode(content),
        content_type="application/json",
        headers={SERVER: "kvstore"},
    )


# ── models ────────────────────────────────────────────────────────────────────────────────────────
# `/v1/models`: the names that clients may use, with the longest context of each.
#
#     policy.models, or else what engines list ─▶ rows in OpenAI's form, one a name
#
# Covers: names and rows. Does not cover: which pool serves a name (`kvstore.routing.models`).

MODELS: Final = "/v1/models"


def models_answer(
    path: str, policy: RoutingPolicy, workers: Iterable[Worker], created_s: int
) -> web.Response:
    """Response with all models, or with the one that the path names. `created_s`: Unix time for
    each.
    """
    contexts: dict[str, int] = {}
    served = set[str]()
    for worker in workers:
        served.update(worker.models, worker.adapters)
        for name, tokens in worker.contexts.items():
            contexts[name] = max(tokens, contexts.get(name, 0))
    models, rows = ModelMap(policy), dict[str, dict[str, Any]]()
    for name in models.known or sorted(served):
        row = {"id": name, "object": "model", "created": created_s, "owned_by": "kvstore"}
        tokens = max((contexts.get(each, 0) for each in models.served(name)), default=0)
        rows[name] = row | ({"max_model_len": tokens} if tokens else {})
    if path == MODELS:
        return json_response(200, {"object": "list", "data": list(rows.values())})
    wanted = path.removeprefix(MODELS + "/")
    if wanted not in rows:
        return error_response(404, f"the model {wanted[:1024]!r} does not exist", "model_not_found")
    return json_response(200, rows[wanted])
