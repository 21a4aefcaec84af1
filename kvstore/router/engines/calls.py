"""Calls of the router itself to engines: a request, and the whole of its answer.

    fetch(url, body) ─▶ HttpAnswer; NoConnection; NoAnswer

Covers: whole answers, whatever their status, bounded in length. Does not cover: connections, and
answers for clients (`connections`); time limits.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from yarl import URL

from kvstore.router.engines.connections import ROUTERS, EngineConnection, EnginePlaces, request_head
from kvstore.router.engines.failures import NoAnswer


class HttpAnswer(NamedTuple):
    """A whole answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class _Whole:
    """Collects a whole answer of at most `bytes_max` bytes, as an AnswerTaker."""

    def __init__(self, connection: EngineConnection, bytes_max: int) -> None:
        self._connection, self._bytes_max = connection, bytes_max
        self._pieces: list[bytes] = []
        self._size = 0
        self.done: asyncio.Future[HttpAnswer | None] = asyncio.get_running_loop().create_future()
        """Result: the answer, or NoAnswer; None: the connection was stale."""

    def heard(self, piece: bytes, *, is_over: bool) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self.done.done():
            return
        if self._size > self._bytes_max:
            self.done.set_exception(NoAnswer("the answer is too large"))
        elif is_over:
            headers = self._connection.headers
            whole = HttpAnswer(self._connection.status, headers, b"".join(self._pieces))
            self.done.set_result(whole)

    def broke(self, why: str, *, is_stale: bool) -> None:
        if not self.done.done():
            if is_stale:
                self.done.set_result(None)
            else:
                self.done.set_exception(NoAnswer(why))


class EngineHttp(EnginePlaces):
    """HTTP to all engines of a router."""

    async def fetch(
        self,
        url: URL,
        *,
        headers: list[tuple[str, str]] | None = None,
        body: bytes = b"",
        bytes_max: int,
    ) -> HttpAnswer:
        """A whole answer, whatever its status, without a time limit. `headers`: all of them; None:
        those of the router's own requests. `body`: JSON to POST; empty: GET.

        Raises:
            NoConnection: the engine cannot be reached.
            NoAnswer: its answer broke off, or is too large.
        """
        place = self.place(url)
        if headers is None:
            headers = [(ROUTERS, self.name)]
            headers += [("Authorization", self.authorization)] * bool(self.authorization)
            headers += [("Content-Type", "application/json")] * bool(body)
        method = "POST" if body else "GET"
        head = request_head(method, url.raw_path_qs, place.host, headers, len(body))
        connection = place.idle()
        while True:
            connection = connection or await place.connected()
            whole = _Whole(connection, bytes_max)
            connection.ask(head, body, whole)
            try:
                found = await whole.done
            except (NoAnswer, asyncio.CancelledError):
                connection.abort()
                raise
            if found is not None:
                return found
            connection = None
