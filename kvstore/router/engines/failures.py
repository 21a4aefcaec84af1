"""Failures at engines: no connection, no answer, an error answer, and what each says of whom.

    connection, answer ─▶ NoConnection, NoAnswer      error answer ─▶ `fault_of` ─▶ Fault
    an attempt for a client ─▶ LegFailure: another engine is asked; Beaten: none is

Does not cover: what follows for the worker (`kvstore.routing.legs`).
"""

from __future__ import annotations

import errno
import os
import re
import ssl
from http import HTTPStatus
from typing import Final

from aiohttp import web

from kvstore.routing.events import Failure, Fault, Lack, Leg

NO_ENTRY: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_NOT_HERE: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED)
READ: Final = (HTTPStatus.BAD_REQUEST, *_NOT_HERE)
"""Statuses whose body is read first, to find whether the answer concerns the engine or
the request.
"""
_LACKS: Final = {
    Lack.MEDIA: re.compile(rb"not a multi-?modal", re.IGNORECASE),
    # Of some requests only: nothing of these is remembered of the engine.
    Lack.CONTEXT: re.compile(
        rb"context (?:length|window)|max_model_len|maximum (?:input|sequence) length", re.IGNORECASE
    ),
    Lack.LIMIT: re.compile(
        rb"may be provided in one (?:prompt|request)|support (?:image|audio|video)", re.IGNORECASE
    ),
}


class NoAnswer(Exception):
    """The answer broke off, or is no HTTP; says why in one clause."""


class NoConnection(NoAnswer):
    """The engine cannot be reached. `is_gone`: nothing listens there."""

    def __init__(self, why: str, *, is_gone: bool) -> None:
        super().__init__(why)
        self.is_gone = is_gone


def why_no_connection(error: OSError) -> str:
    """Reason for a failed connection, in one clause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message or error}"[:200]
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS: give it an http:// URL, or a certificate"
    is_system = error.errno in errno.errorcode and not isinstance(error, ssl.SSLError)
    return os.strerror(error.errno or 0).lower() if is_system else str(error)[:200]


class LegFailure(Exception):
    """The attempt failed. `answer`: the engine's error response, if it gave one."""

    def __init__(
        self,
        failure: Failure,
        why: str,
        *,
        answer: web.Response | None = None,
        has_streamed: bool = False,
        leg: Leg = Leg.DECODE,
        lack: Lack | None = None,
        is_gone: bool = False,
    ) -> None:
        """`leg`: the one that failed. `lack`: the thing that the engine lacks. `is_gone`: nothing
        listens at its address.
        """
        super().__init__(why)
        self.fault, self.answer, self.has_streamed = Fault(failure, lack, why), answer, has_streamed
        self.leg, self.is_gone = leg, is_gone
        self.worker = ""
        """Name of the worker that it was sent to; empty: none."""


def unreached(error: NoConnection, leg: Leg = Leg.DECODE) -> LegFailure:
    """Failure of a leg whose engine cannot be reached."""
    why = f"no connection: {error}"
    return LegFailure(Failure.CONNECT, why, leg=leg, is_gone=error.is_gone)


class Beaten(Exception):
    """Another attempt of the same request answers: this one has ended."""


def fault_of(
    status: int, *, is_put_off: bool, has_client_key: bool, body: bytes = b""
) -> Fault | None:
    """Failure that an answer shows, for which another engine is asked; None: the answer is for the
    client. `is_put_off`: it has Retry-After; `has_client_key`: the engine got the client's API key,
    not the router's; `body`: of a 4xx, which may show what this engine lacks.
    """
    if status < 300:
        return None
    if status == 429 or (status == 503 and is_put_off):
        return Fault(Failure.BUSY)
    # 404, 501: of vLLM, where it does not serve that model, or its model does not have this path.
    if status in _NOT_HERE:
        return Fault(Failure.REFUSED, Lack.MODEL if status == 404 else None)
    if status == 400:
        lack = next((lack for lack, text in _LACKS.items() if text.search(body)), None)
        return Fault(Failure.REFUSED, lack) if lack is not None else None
    if status in NO_ENTRY:
        return Fault(Failure.REFUSED if has_client_key else Failure.STATUS)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return Fault(Failure.ERROR)
    return Fault(Failure.STATUS) if status >= 500 or status < 400 else None
