"""HTTP on both sides: one request of a client is one leg to each kind of engine.

    in-turn    prefill ──answer, parameters──▶ decode ──────────────▶ client
    together   prefill ──────────┐
               decode, parameters known from an earlier answer ─────▶ client

Rules. 1: whatever becomes of the prefill leg, the decode engine can answer alone: the prefill leg
failed, was late, or its engine is left out, so the decode leg goes without parameters; only a
status of 400 to 499, which is about the request, goes back to the client. 2: as long as the client
has got no byte, a decode engine that cannot be reached is replaced by the next one. 3: a client
that hangs up takes both legs along, and so the engines abort. 4: bytes are passed on as they come.
No prompt and no token is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

from kvstore import __version__
from kvstore.config.addresses import joined
from kvstore.errors import ConfigError
from kvstore.obs import logs
from kvstore.pd.config import PdConfig
from kvstore.pd.engines import PooledEngine, Rotation
from kvstore.pd.legs import (
    FORWARDED,
    RETURNED,
    BadRequest,
    Body,
    body_of,
    decode_body,
    early_parameters,
    error_body,
    parameters_of,
    prefill_body,
    source_of,
    wants_prefill,
)
from kvstore.wording import cannot_listen

BODY_BYTES_MAX: Final = 16 << 20
"""Two million token ids; decoding them takes a quarter of a second of the loop."""
BODIES_BYTES_MAX: Final = 16 * BODY_BYTES_MAX
"""Bodies of all requests that are under way."""
ANSWER_BYTES_MAX: Final = 4 << 20
"""Longest answer of a prefill engine: one token and parameters."""
REQUESTS_MAX: Final = 2048
"""Under way; the next one is refused with 503."""
CONNECT_S: Final = 5.0
HEALTH_S: Final = 2.0
IDLE_CONNECTION_S: Final = 2.0
"""vLLM's server closes after 5 s, and a request sent into a closed connection is lost."""
DRAIN_S: Final = 20.0
MUTE: Final = (
    "the prefill engine at %s answers without kv_transfer_params, and so the decode engine computes"
    " each prompt again: start it with KVStoreConnector in --kv-transfer-config, beside a node with"
    " --peer-listen that runs"
)

_log = logging.getLogger(__name__)


class LegTrouble(Exception):
    """An engine could not answer; carries a clause for the log."""


class ClientGone(Exception):
    """The client takes no more bytes."""


class Refusal(NamedTuple):
    """An engine's answer that the request is wrong."""

    status: int
    headers: dict[str, str]
    body: bytes


class PdProxy:
    """See the module."""

    def __init__(self, config: PdConfig, session: ClientSession) -> None:
        self._config = config
        self._session = session
        self.prefill = Rotation(config.prefill)
        self.decode = Rotation(config.decode)
        self._under_way = 0
        self._body_bytes = 0
        self.counts = dict.fromkeys(("requests", "prefilled", "decode_alone", "aborted"), 0)

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        return app

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A completion or chat completion."""
        size_bytes = min(request.content_length or BODY_BYTES_MAX, BODY_BYTES_MAX)
        is_full = self._body_bytes + size_bytes > BODIES_BYTES_MAX
        if self._under_way >= REQUESTS_MAX or is_full:
            return _error(503, "Too many requests in flight.", {"Retry-After": "1"})
        self._under_way += 1
        self._body_bytes += size_bytes
        self.counts["requests"] += 1
        try:
            body = body_of(await request.read())
            return await self._legs(request, body)
        except BadRequest as error:
            return _error(400, str(error))
        except asyncio.CancelledError:
            self.counts["aborted"] += 1
            raise
        finally:
            self._under_way -= 1
            self._body_bytes -= size_bytes

    async def _legs(self, request: web.Request, body: Body) -> web.StreamResponse:
        transfer = uuid.uuid4().hex
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        # Ours: two clients may use the same id, and engines match legs by it.
        headers |= {"X-Request-Id": transfer, "Content-Type": "application/json"}
        engine = self.prefill.pick_healthy(time.monotonic_ns()) if wants_prefill(body) else None
        if engine is None:
            return await self._decode(request, body, None, headers)
        prefill = self._prefill(engine, request.path, prefill_body(body, transfer), headers)
        if self._config.legs == "together" and engine.source is not None:
            early = early_parameters(engine.source, transfer)
            return await self._together(request, body, early, headers, prefill)
        parameters = await prefill
        if isinstance(parameters, Refusal):
            return web.Response(
                status=parameters.status, headers=parameters.headers, body=parameters.body
            )
        return await self._decode(request, body, parameters, headers)

    async def _prefill(
        self, engine: PooledEngine, path: str, body: Body, headers: dict[str, str]
    ) -> dict[str, Any] | Refusal | None:
        """Parameters for the decode engine; None: it has to answer alone."""
        try:
            async with asyncio.timeout(self._config.prefill_timeout_s):
                async with self._post(engine, path, body, headers) as answer:
                    data = await answer.content.read(ANSWER_BYTES_MAX)
                    while not answer.content.at_eof() and len(data) < ANSWER_BYTES_MAX:
                        data += await answer.content.read(ANSWER_BYTES_MAX - len(data))
        except (LegTrouble, ClientError, TimeoutError) as error:
            engine.breaker.failed(time.monotonic_ns())
            self.counts["decode_alone"] += 1
            why = str(error) or "no answer in time"
            _log.warning("prefill at %s failed: %s; the decode engine computes", engine.url, why)
            return None
        engine.breaker.succeeded()
        if answer.status >= 400:
            return Refusal(answer.status, _returned(answer), data)
        parameters = parameters_of(data)
        engine.source = source_of(parameters)
        self.counts["decode_alone" if parameters is None else "prefilled"] += 1
        if parameters is None and not engine.is_mute:
            _log.warning(MUTE, engine.url)
        engine.is_mute = parameters is None
        return parameters

    async def _together(
        self,
        request: web.Request,
        body: Body,
        early: dict[str, Any],
        headers: dict[str, str],
        prefill: Awaitable[dict[str, Any] | Refusal | None],
    ) -> web.StreamResponse:
        """Both legs at once. If the prefill leg fails first, the decode leg begins anew, alone."""
        prefilling = asyncio.ensure_future(prefill)
        out = web.StreamResponse()
        decoding = asyncio.ensure_future(self._decode(request, body, early, headers, out))
        try:
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            failed = prefilling.done() and not isinstance(prefilling.result(), dict)
            if failed and not out.prepared and not decoding.done():
                decoding.cancel()
                await asyncio.wait((decoding,))
                return await self._decode(request, body, None, headers)
            return await decoding
        finally:
            for leg in (prefilling, decoding):
                leg.cancel()
            await asyncio.gather(prefilling, decoding, return_exceptions=True)

    async def _decode(
        self,
        request: web.Request,
        body: Body,
        parameters: dict[str, Any] | None,
        headers: dict[str, str],
        out: web.StreamResponse | None = None,
    ) -> web.StreamResponse:
        """The answer, from the first decode engine that can be reached."""
        sent, tried = decode_body(body, parameters), list[PooledEngine]()
        out = out if out is not None else web.StreamResponse()
        while engine := self.decode.pick(time.monotonic_ns(), not_these=tried):
            tried.append(engine)
            try:
                async with self._post(engine, request.path, sent, headers) as answer:
                    await _pass_on(request, answer, out)
            except ClientGone:
                return out
            except (LegTrouble, ClientError) as error:
                engine.breaker.failed(time.monotonic_ns())
                _log.warning("decoding at %s failed: %s", engine.url, error)
                if out.prepared:  # a client that got half an answer has to see that it is half
                    if request.transport is not None:
                        request.transport.abort()
                    return out
            else:
                engine.breaker.succeeded()
                return out
        return _error(502, "No decode engine is reachable.")

    @contextlib.asynccontextmanager
    async def _post(
        self, engine: PooledEngine, path: str, body: Body, headers: dict[str, str]
    ) -> AsyncIterator[ClientResponse]:
        """Raises LegTrouble: the engine is in trouble."""
        async with self._session.post(
            engine.url + path,
            data=msgspec.json.encode(body),
            headers=headers,
            allow_redirects=False,
        ) as answer:
            if answer.status >= 500:
                raise LegTrouble(f"status {answer.status}")
            yield answer

    # ── pages ────────────────────────────────────────────────────────────────────────────────────

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Models of a decode engine."""
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        tried = list[PooledEngine]()
        while engine := self.decode.pick(time.monotonic_ns(), not_these=tried):
            tried.append(engine)
            with contextlib.suppress(ClientError, TimeoutError):
                async with (
                    asyncio.timeout(HEALTH_S),
                    self._session.get(
                        engine.url + request.path, headers=headers, allow_redirects=False
                    ) as answer,
                ):
                    data = await answer.read()
                    return web.Response(status=answer.status, headers=_returned(answer), body=data)
        return _error(502, "No decode engine is reachable.")

    async def health(self, _request: web.Request) -> web.Response:
        """200 if a decode engine is well: it can answer alone."""
        kinds = {"prefill": self.prefill, "decode": self.decode}
        found = {
            kind: {
                engine.url: well
                for engine, well in zip(
                    rotation.engines,
                    await asyncio.gather(*(self._is_well(e) for e in rotation.engines)),
                    strict=True,
                )
            }
            for kind, rotation in kinds.items()
        }
        status = 200 if any(found["decode"].values()) else 503
        return web.json_response({**found, "counts": self.counts}, status=status)

    async def _is_well(self, engine: PooledEngine) -> bool:
        with contextlib.suppress(ClientError, TimeoutError):
            async with (
                asyncio.timeout(HEALTH_S),
                self._session.get(engine.url + "/health", allow_redirects=False) as answer,
            ):
                return answer.status == 200
        return False


def _returned(answer: ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in RETURNED if name in answer.headers}


async def _pass_on(request: web.Request, answer: ClientResponse, out: web.StreamResponse) -> None:
    """Bytes as they come. The client gets the headers with the first of them: until then another
    engine may answer. Raises ClientGone."""
    chunks = answer.content.iter_any()
    while True:
        chunk = await anext(chunks, b"")
        try:
            if not out.prepared:
                out.set_status(answer.status)
                out.headers.update(_returned(answer))
                await out.prepare(request)
            await (out.write(chunk) if chunk else out.write_eof())
        except ConnectionResetError as error:
            raise ClientGone from error
        if not chunk:
            return


def _error(status: int, sentence: str, headers: dict[str, str] | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    body = error_body(sentence, kind=kind, code=status)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


# ── the process ──────────────────────────────────────────────────────────────────────────────────


async def _serve(config: PdConfig) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    connector = TCPConnector(
        limit=0, keepalive_timeout=IDLE_CONNECTION_S, ssl=config.client_tls or True
    )
    async with ClientSession(
        connector=connector,
        timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
        skip_auto_headers=("Accept-Encoding", "User-Agent"),
        auto_decompress=False,
    ) as session:
        proxy = PdProxy(config, session)
        runner = web.AppRunner(
            proxy.app(), handler_cancellation=True, access_log=None, shutdown_timeout=DRAIN_S
        )
        await runner.setup()
        site = web.TCPSite(runner, config.host, config.port, ssl_context=config.server_tls)
        try:
            await site.start()
        except OSError as error:
            address = joined(config.host, config.port)
            raise ConfigError(cannot_listen("--listen", address, error)) from None
        port = runner.addresses[0][1]
        logs.say(
            __name__,
            f"kvstore pd-proxy ready: version={__version__} listen={joined(config.host, port)}",
        )
        await stopped.wait()
        await runner.cleanup()


def run_proxy(config: PdConfig) -> None:
    """Serve until SIGTERM. Raises ConfigError: the address cannot be used."""
    asyncio.run(_serve(config))
