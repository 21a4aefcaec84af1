"""Parity: do keys that this router makes name the blocks that an engine stores?

    probe (a fresh prompt) ─▶ engine: rendered, then computed ─▶ index: blocks of our keys there?
                                                           all: exact       none: load-only, red
    usage.cached_tokens of answers ─▶ predicted − observed ─▶ drift ─▶ load-only until a probe

"Cache-aware" routing with 0 matched blocks and green health has many causes (tokenizer, template,
block size, hash seed, salt, space, events that do not arrive), and one sign: this one. A worker is
compared when it joins, every PERIOD_S, and until then it counts as load-only. An engine without a
node in the index is not compared: it has no keys to be right about. LoRA adapters that requests
name are compared one by one, in the same way: their digests are in the answers to the probes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Final

import msgspec

from kvstore.router.engines.failures import NoAnswer
from kvstore.router.engines.workers import ComparedKeys, Worker, WorkerAdapter
from kvstore.router.front.legs import PARAMETERS
from kvstore.router.keys.child import KeyOrder
from kvstore.router.keys.index_calls import Spaces, plan_of
from kvstore.router.keys.rendering import COMPARE_TIMEOUT_S, Rendering
from kvstore.wire.requests import ADAPTER_QUESTION, adapter_digest

PERIOD_S: Final = 300.0
RETRY_S: Final = 10.0
"""Pause of a worker's comparison after a failure."""
BLOCKS: Final = 3
STORED_S: Final = 5.0
"""Longest wait until the index shows blocks that an engine has computed."""
COMPUTED_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 1 << 20
ASK_AGAIN_S: Final = 0.1
DRIFT_SHARE: Final = 0.5
DRIFT_WEIGHT: Final = 0.05
DRIFT_REQUESTS_MIN: Final = 20
UNSAID: Final = "its engine does not report its weights: its connector is off, or an older one"
UNPROVEN: Final = "keys not compared yet"
AHEAD: Final = '; with EAGLE or MTP: add "disable_lookahead_block_hashes" to --speculative-config'
"""Advice for engines without the connector. Their flag names the space, since nodes do not list
them.
"""

_log = logging.getLogger(__name__)


class _Answer(msgspec.Struct):
    kv_transfer_params: object = None


class Parity:
    """See the module; `once` is repeated by its owner."""

    pause_s: Final = 1.0

    def __init__(self, rendering: Rendering, spaces: Spaces) -> None:
        self._rendering, self._spaces = rendering, spaces
        self._workers, self._index = spaces.workers, spaces.index

    async def once(self) -> None:
        """Compare the keys of each worker that is due."""
        followed = [worker for worker in self._workers if worker.address.node]
        for worker in followed:
            if worker.parity == "" and not worker.has_parity:
                self._judge(worker, worker, UNPROVEN)
        for worker in followed:
            is_away = bool(self._index.lost or self._index.trouble)
            if is_away and worker.has_parity:
                continue  # equal keys stay equal, and lead to what this router sent
            if time.monotonic() >= worker.compared_again_s and worker.is_answering:
                if why := self._unready(worker):
                    self._judge(worker, worker, why)
                else:
                    why = await self._compared(worker)
                    self._judge(worker, worker, why, pause_s=RETRY_S if why else PERIOD_S)
            if worker.has_parity and worker.is_answering:
                await self._compare_adapters(worker)

    async def _compare_adapters(self, worker: Worker) -> None:
        """Compare the adapters that requests name; any other one would have to be loaded by the
        engine.
        """
        for name, adapter in list(worker.adapters.items()):
            if adapter.is_wanted and time.monotonic() >= adapter.compared_again_s:
                try:
                    why = await self._adapter_compared(worker, name, adapter)
                except msgspec.MsgspecError:
                    why = "its engine answered a probe with no JSON object"
                self._judge(worker, adapter, why, name, pause_s=RETRY_S if why else PERIOD_S)

    def _judge(
        self, worker: Worker, held: ComparedKeys, why: str, name: str = "", *, pause_s: float = 0.0
    ) -> None:
        """Take the result of a comparison of a worker's keys, or of those of its adapter `name`:
        why they are not used, or empty: they are equal. The next one is due after `pause_s`.
        """
        held.compared_again_s = time.monotonic() + pause_s
        if held.has_parity and not why:
            return
        whose = f"adapter {name} of worker {worker.name}" if name else f"worker {worker.name}"
        if why and why not in (held.parity, UNPROVEN):
            _log.warning("%s is load-only: %s", whose, why)
        elif why != held.parity and not why:
            _log.info("%s: keys are equal", whose)
        is_news = (held.parity, held.has_parity) != (why, not why)
        held.parity, held.has_parity, held.drift, held.drift_count = why, not why, 0.0, 0
        if is_news:
            self._workers.describe(worker)

    def _unready(self, worker: Worker) -> str:
        """Reason why a probe would prove nothing; empty: a probe can be sent."""
        if why := self._index.lost or self._index.trouble:
            return why
        if not self._spaces.of(worker):
            return f"the index lists no engine of it at node {worker.address.node!r}"
        return "" if worker.block_tokens else "its block size is not known: give block=N"

    async def _compared(self, worker: Worker) -> str:
        """Compare a worker's keys with a probe. Returns why they are not used; empty: they are
        equal.
        """
        model = next(iter(worker.models), "")
        await self._rendering.compare(model, worker)
        order = await self._probe(worker, model)
        answer = await self._computed(worker, order.body)
        return answer if isinstance(answer, str) else await self._shown(worker, order)

    async def _adapter_compared(self, worker: Worker, name: str, adapter: WorkerAdapter) -> str:
        """Compare the keys of one adapter of a worker, as `_compared`; its engine reports the
        digest.
        """
        order = await self._probe(worker, adapter.base)
        asked = {**msgspec.json.decode(order.body), "model": name, PARAMETERS: ADAPTER_QUESTION}
        answer = await self._computed(worker, msgspec.json.encode(asked))
        if isinstance(answer, str):
            return answer
        found = adapter_digest(msgspec.json.decode(answer, type=_Answer).kv_transfer_params)
        if isinstance(found, str):
            return found or UNSAID
        if adapter.digest != found:  # its weights were loaded anew
            adapter.digest, adapter.has_parity = found, False
        order.plan = order.plan._replace(adapter=(name, adapter.path), digest=found)
        return await self._shown(worker, order)

    async def _probe(self, worker: Worker, model: str) -> KeyOrder:
        """Order for the keys of a request that was never sent before, rendered unless its prompt is
        given as token ids.
        """
        size = worker.block_tokens * BLOCKS * 6
        text, one = secrets.token_urlsafe(size)[:size], {"max_tokens": 1, "temperature": 0}
        fields: dict[str, object] = {"model": model, "prompt": text, **one, "stream": False}
        body = msgspec.json.encode(fields)
        rendered = await self._rendering.rendered(
            "/v1/completions", body, [worker], timeout_s=COMPARE_TIMEOUT_S
        )
        if rendered is not None:
            return KeyOrder(body=body, rendered=rendered, plan=plan_of(worker))
        # Token ids need no rendering: what is compared is the chain alone.
        fields["prompt"] = [5 + byte % 90 for byte in text.encode()]
        return KeyOrder(body=msgspec.json.encode(fields), plan=plan_of(worker))

    async def _computed(self, worker: Worker, body: bytes) -> bytes | str:
        """Body of the answer to a probe, or as a sentence the reason why there is none."""
        url = worker.url.with_path("/v1/completions")
        try:
            async with asyncio.timeout(COMPUTED_S):
                found = await self._rendering.engines.fetch(
                    url, body=body, bytes_max=ANSWER_BYTES_MAX
                )
        except TimeoutError:
            return f"a probe was not computed within {COMPUTED_S:g} s"
        except NoAnswer as error:
            return f"a probe failed: {error}"
        return found.body if found.status == 200 else f"a probe got status {found.status}"

    async def _shown(self, worker: Worker, order: KeyOrder) -> str:
        """Wait until the index shows the blocks of a probe at the worker's node. Returns why it
        does not; empty: it does.
        """
        made = await self._rendering.keys.make(order, delays_request=False)
        if made is None or made.why or not made.keys:
            return f"no keys of a probe: {made.why if made else 'late'}"
        keys, places = made.keys, self._spaces.of(worker)
        wanted = len(keys) // 32
        most = 0
        until_s = time.monotonic() + STORED_S
        while time.monotonic() < until_s:
            for tenant, space in places:
                answer = await self._index.match(tenant, space, keys)
                for match in answer.matches if answer is not None else ():
                    if match.holder.node == worker.address.node:
                        most = max(most, match.longest)
            if most >= min(BLOCKS, wanted):
                return ""
            await asyncio.sleep(ASK_AGAIN_S)
        if self._index.trouble:
            return self._index.trouble
        return (
            f"the index shows {most} of {wanted} blocks of a probe: block size, hash seed, space or"
            " tokens differ, or its node stores nothing"
        )

    def observed(self, worker: Worker, model: str, predicted: int, cached: int) -> None:
        """Compare the cached tokens of an answered request with those predicted. Too large a mean
        difference makes the worker or adapter load-only until the next probe.
        """
        if not predicted or not worker.has_parity:
            return
        held: ComparedKeys = worker.adapters.get(model, worker)
        missed = max(0, predicted - cached) / predicted
        held.drift += DRIFT_WEIGHT * (missed - held.drift)
        held.drift_count += 1
        if held.drift <= DRIFT_SHARE or held.drift_count < DRIFT_REQUESTS_MIN:
            return
        why = f"its engine had {100 * (1 - held.drift):.0f} % of the tokens that the index showed"
        why += AHEAD if worker.address.space else ""
        self._judge(worker, held, why, model if held is not worker else "", pause_s=RETRY_S)
