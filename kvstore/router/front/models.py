"""`/v1/models`: the names that clients may use, with the longest context of each.

    policy.models, or else what engines list ─▶ rows in OpenAI's form, one a name

Covers: names and rows. Does not cover: which pool serves a name (`kvstore.routing.models`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from aiohttp import web

from kvstore.router.engines.workers import Worker
from kvstore.router.front.answers import error_response, json_response
from kvstore.routing.models import ModelMap
from kvstore.routing.policy import RoutingPolicy

MODELS: Final = "/v1/models"


def models_answer(
    path: str, policy: RoutingPolicy, workers: Iterable[Worker], created_s: int
) -> web.Response:
    """All of them, or the one that the path names. Args: `created_s`: since 1970."""
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
        return error_response(404, f"the model {wanted!r} does not exist", "model_not_found")
    return json_response(200, rows[wanted])
