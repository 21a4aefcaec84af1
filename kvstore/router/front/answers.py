"""Answers of the router itself: rejections, errors in OpenAI's form."""

from __future__ import annotations

import msgspec
from aiohttp import web

from kvstore.router.front import heads
from kvstore.routing.events import Rejected, RejectReason


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
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json_response(
        status, {"error": {"message": text, "type": kind, "param": None, "code": code}}
    )


def json_response(status: int, content: object) -> web.Response:
    """An answer of the router itself."""
    return web.Response(
        status=status,
        body=msgspec.json.encode(content),
        content_type="application/json",
        headers={heads.SERVER: "kvstore"},
    )
