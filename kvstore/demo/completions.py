"""A client of the completions of vLLM: tokens, times and counts of single requests.

Covers: requests on one port of this machine, streamed. Does not cover: the server (`engine`).
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kvstore.demo.engine_config import SERVED_NAME
from kvstore.errors import KVStoreError

REQUEST_TIMEOUT_S: Final = 120.0
JSON: Final = {"Content-Type": "application/json"}


class EngineError(KVStoreError):
    """The engine did not start, ended, or answered something other than a completion."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request."""

    id: str = ""
    """Id of the request, as the client gets it."""
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed: prefix cache and connector together."""
    ttft_s: float
    """Seconds from before the request was sent until its first token arrived."""
    duration_s: float
    token_s: tuple[float, ...] = ()
    """Seconds from before the request was sent until each token arrived."""


class _Usage(msgspec.Struct):
    class Details(msgspec.Struct):
        cached_tokens: int | None = None

    prompt_tokens: int
    prompt_tokens_details: Details | None = None


class _Chunk(msgspec.Struct):
    """The used part of a streamed completion."""

    class Choice(msgspec.Struct):
        token_ids: list[int] | None = None

    id: str = ""
    choices: list[Choice] = []
    usage: _Usage | None = None
    error: object = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


class CompletionClient:
    """Client of a server, or of a proxy in front of some, at a port of 127.0.0.1."""

    def __init__(self, port: int = 0, served_name: str = SERVED_NAME) -> None:
        self.port, self._served_name = port, served_name

    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        timeout_s: float | None = REQUEST_TIMEOUT_S,
        extra: dict[str, object] | None = None,
    ) -> Completion:
        """Greedy completion of token ids, streamed. `extra` goes into the request's body.

        Raises:
            EngineError: refused, broken off, or later than `timeout_s` between two tokens.
        """
        body = {
            "model": self._served_name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **(extra or {}),
        }
        tokens: list[int] = []
        arrived_s: list[float] = []
        usage: _Usage | None = None
        name = ""
        data = msgspec.json.encode(body)
        begin = time.perf_counter()
        try:
            for chunk in self._stream(data, timeout_s):
                new = [token for choice in chunk.choices for token in choice.token_ids or ()]
                arrived_s += [time.perf_counter() - begin] * len(new)
                tokens += new
                name = chunk.id or name
                usage = chunk.usage or usage
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise EngineError(f"the completion broke off: {error!r}") from error
        if usage is None or not tokens:
            raise EngineError("the completion ended without a token or its usage")
        details = usage.prompt_tokens_details
        return Completion(
            id=name,
            tokens=tuple(tokens),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            ttft_s=arrived_s[0],
            duration_s=time.perf_counter() - begin,
            token_s=tuple(arrived_s),
        )

    def _stream(self, body: bytes, timeout_s: float | None) -> Iterator[_Chunk]:
        with self._connection(timeout_s) as connection:
            connection.request("POST", "/v1/completions", body, JSON)
            response = connection.getresponse()
            if response.status != http.client.OK:
                text = response.read(2000).decode(errors="replace")
                raise EngineError(f"the engine answered {response.status}: {text}")
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = _chunk_decoder.decode(line[6:])
                if chunk.error is not None:
                    raise EngineError(f"the engine reported {str(chunk.error)[:400]}")
                yield chunk

    def _request(self, method: str, path: str, *, timeout_s: float = 30.0) -> tuple[int, bytes]:
        with self._connection(timeout_s) as connection:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()

    def _connection(
        self, timeout_s: float | None
    ) -> contextlib.closing[http.client.HTTPConnection]:
        made = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        return contextlib.closing(made)
