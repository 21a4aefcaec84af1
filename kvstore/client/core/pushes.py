"""Transfers of this engine's requests: from its prefill to other nodes, and to its decode (ADR 12).

    prefill   open ──PushOpen──▶ node   finished ── its stores have ended ──PushClose──▶ node
                                        aborted, preempted ────────────────PushClose, reason──▶
    decode    expect ──PushExpect──▶ node ──PushEnd──▶ the lookup may ask
                                     left: admitted or ended meanwhile ──PushCancel──▶ node

Rules. 1: several requests may share a transfer (a list of prompts, several answers to one): it is
open from the first to the end of the last, and cancelled when nobody waits for it any more. 2: the
lookup of a request begins when its blocks have come, or will not, or after push_deadline_ms: a node
that is lost, silent or replaced ends the wait at once. 3: a transfer that is open survives the
node: it is opened again in the next session.
Does not cover: which requests these are (`kvstore.wire.requests`), lookups (`lookups.py`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvstore.client.core.attachment import Attachment
from kvstore.client.core.plan import HitRules
from kvstore.client.core.request import Request, block_keys, needed_blocks
from kvstore.client.core.stores import WORK_NS_MAX, EngineStores
from kvstore.units import NS_PER_MS
from kvstore.wire import messages as wire
from kvstore.wire.requests import PrefillPart, answer_of

WATCH_SHARE: Final = 16
WATCH_NS_MAX: Final = 16 * NS_PER_MS


class EnginePushes:
    """All transfers of one engine."""

    def __init__(
        self, attachment: Attachment, stores: EngineStores, rules: HitRules | None
    ) -> None:
        """`rules`: of an engine with several KV cache groups."""
        self._config, self._stats = attachment.config, attachment.stats
        self._attachment, self._stores, self._rules = attachment, stores, rules
        self._producing: dict[str, Request] = {}
        """Requests that are being prefilled."""
        self._left_out: dict[str, PrefillPart] = {}
        """By request id: the part of one that is prefilled, of which nothing is stored."""
        self._closing: list[tuple[str, int, int]] = []
        """(transfer, last store of its request, time of its end)."""
        self._waiting: dict[str, Request] = {}
        """Requests for whose blocks PushExpects are out."""
        self._session = 0
        """Session of the PushExpects that are out."""

    @property
    def node(self) -> str:
        """Name of this node; empty: no pushes."""
        return self._attachment.node if self._attachment.is_open else ""

    # ── prefill ──────────────────────────────────────────────────────────────────────────────────

    def open(self, request: Request) -> None:
        """A request arrives that is prefilled for other nodes: open its transfer."""
        self._stats["pushes_opened"] += 1
        self._open(request.transfer_id)
        self._producing[request.id] = request

    def leave_out(self, request: str, part: PrefillPart, reason: str) -> None:
        """A request arrives that is prefilled for other nodes, and of which nothing is stored."""
        self._left_out[request] = part
        self._open(part.transfer)  # the node would take no word of one that it does not know
        self.close(part.transfer, f"not stored: {reason}")

    def answer(self, request: str, tokens: int) -> dict[str, Any] | None:
        """Parameters for the decode engine of a request that ends; None: none. Called once. A
        request of which nothing is stored has them, too: without them a router would take this
        engine for one without a node."""
        entry = self._producing.get(request)
        part = entry.transfer if entry is not None else self._left_out.pop(request, None)
        if not isinstance(part, PrefillPart) or not self.node:
            return None
        return answer_of(
            part,
            node=self.node,
            engine=self._config.hello.engine_id,
            request_id=request,
            tokens=tokens,
        )

    @property
    def _transfers(self) -> set[str]:
        """Transfers that are open."""
        producing = (own.transfer_id for own in self._producing.values() if not own.is_paused)
        return {*producing, *(own for own, *_ in self._closing)}

    def _open(self, transfer: str) -> None:
        if transfer not in self._transfers:
            self._say(wire.PushOpen(transfer))

    def close(self, transfer: str, reason: str = "") -> None:
        """Close a transfer that no request keeps open, such as one whose blocks are not stored."""
        if transfer not in self._transfers:
            self._say(wire.PushClose(transfer, reason))

    def preempted(self, request: str) -> None:
        """The engine preempted the request, which loses its blocks: close its transfer. Blocks that
        were stored stay."""
        entry = self._producing.get(request)
        if entry is not None and not entry.is_paused:
            entry.is_paused = True
            self.close(entry.transfer_id, "preempted")

    def resumed(self, request: Request) -> None:
        """The request goes on after a preemption, or was not preempted."""
        if request.is_paused:
            self._open(request.transfer_id)
            request.is_paused = False

    def finished(self, request: Request, reason: str, now_ns: int) -> None:
        """The request ended; `reason` is empty where its prefill was complete."""
        self._leave(request)
        if self._producing.pop(request.id, None) is None or request.is_paused:
            return  # the transfer of a paused one was closed then
        if not reason:
            self._closing.append((request.transfer_id, self._stores.last_job, now_ns))
            self.settle(now_ns)
        else:
            self.close(request.transfer_id, reason)

    def settle(self, now_ns: int) -> None:
        """Close transfers whose stores have ended."""
        for entry in list(self._closing):
            transfer, last_job, ended_ns = entry
            if not self._stores.has_running(last_job) or now_ns - ended_ns > WORK_NS_MAX:
                self._closing.remove(entry)
                self.close(transfer)

    # ── decode ───────────────────────────────────────────────────────────────────────────────────

    def expect(self, request: Request, node: str, now_ns: int) -> None:
        """A request arrives whose blocks `node` pushes: send PushExpects, and hold its lookup back
        until they end. Called before its hints are sent."""
        keys = request.sought
        if not (self.node and keys and node):
            return
        twin = next((w for w in self._waiting.values() if w.sought[-1] == keys[-1]), None)
        if twin is not None and twin.transfer_id == request.transfer_id:
            request.expected = set(twin.expected)
        else:
            self._expect(request, node)
        if not request.expected:
            return
        self._stats["pushes_expected"] += 1
        self._session = self._attachment.session
        self._waiting[request.id] = request
        request.pushed_until_ns = now_ns + self._config.push_deadline_ms * NS_PER_MS

    def _expect(self, request: Request, node: str) -> None:
        keys = request.sought
        for group, blocks in enumerate(self._wanted(len(keys), request.prompt_tokens - 1)):
            names = block_keys(keys, self._config.keys_per_block(group))
            for first in range(blocks.start, blocks.stop, wire.KEYS_PER_DATAGRAM_MAX):
                part = names[first : min(first + wire.KEYS_PER_DATAGRAM_MAX, blocks.stop)]
                request.expected.add((group, first))
                self._say(
                    wire.PushExpect(
                        transfer=request.transfer_id,
                        node=node,
                        keys=b"".join(part),
                        deadline_ms=self._config.push_deadline_ms,
                        group=group,
                        first_block=first,
                    )
                )

    def _wanted(self, key_count: int, tokens_max: int) -> list[range]:
        """Blocks of each group that the longest hit of at most `tokens_max` tokens needs. Others
        may not be stored on the other node (of recurrent states only the last one is), and blocks
        behind a gap are not pushed."""
        sizes, plan = self._config.block_sizes, None
        counts = [key_count // self._config.keys_per_block(at) for at in range(len(sizes))]
        tokens = counts[0] * sizes[0]
        if self._rules is not None:
            present = [np.ones(count, np.bool_) for count in counts]
            plan = self._rules.longest(present, tokens_max=tokens_max)
            tokens = plan.tokens
        return needed_blocks(plan, sizes, 0, tokens)

    def watch_ns(self, request: str, now_ns: int) -> int:
        """Longest time that an otherwise idle engine may look for the end of this wait in one step;
        0: the request does not wait. A share of the wait so far: a request that arrives meanwhile
        waits as long, and an engine that steps on and on takes the processor of a prefill."""
        waiting = self._waiting.get(request)
        if waiting is None:
            return 0
        deadline_ns = self._config.push_deadline_ms * NS_PER_MS
        waited_ns = now_ns - waiting.pushed_until_ns + deadline_ns
        return min(waited_ns // WATCH_SHARE, WATCH_NS_MAX)

    def ended(self, end: wire.PushEnd) -> None:
        """Take a PushEnd: blocks that were expected are here, or will not come."""
        for request, waiting in list(self._waiting.items()):
            if waiting.transfer_id != end.transfer:
                continue
            waiting.expected.discard((end.group, end.first_block))
            if end.reason:
                waiting.detail = f"push: {end.reason}"
                self._stats["pushes_short"] += 1
            if not waiting.expected:
                waiting.pushed_until_ns = 0
                del self._waiting[request]

    def admitted(self, request: Request, now_ns: int) -> None:
        """The engine admitted the request, and computes what it has not loaded: end its wait."""
        if request.id in self._waiting and now_ns >= request.pushed_until_ns:
            self._stats["pushes_given_up"] += 1
            request.detail = "push: deadline"
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if self._waiting.pop(request.id, None) is None:
            return
        request.pushed_until_ns = 0
        if all(other.transfer_id != request.transfer_id for other in self._waiting.values()):
            self._say(wire.PushCancel(request.transfer_id))

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """End waits for a node that is gone or silent; after each change of the connection."""
        if self._waiting and not (
            self._attachment.is_open and self._attachment.session == self._session
        ):
            for waiting in self._waiting.values():
                waiting.pushed_until_ns = 0
                waiting.detail = "push: no node"
            self._waiting.clear()

    def session_opened(self) -> None:
        """Name the transfers under way to the node, which knows none of them."""
        self.look()
        for transfer in sorted(self._transfers):
            self._say(wire.PushOpen(transfer))

    def _say(self, message: wire.PushMessage) -> None:
        if self.node:
            self._attachment.outbox.append(message)
