"""A node that leaves: its hottest blocks go to the dram of other nodes before it ends.

    SIGTERM ─▶ hottest runs ─▶ Prepare at a peer ─▶ the peer fetches them from here
                    ▲                    │
                    └── asked again ─────┘ until the peer has the run in dram, or will not take it

Each peer takes one run after the other, by the means and limits of any fetch; what one refuses,
since no engine of that space is attached to it, or since computing is quicker there, is offered to
the next. Meanwhile this node serves as before. Does not cover: which blocks
(`engine.why.hottest`), when the process ends (`supervisor`, `node.node`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import grpc

from kvstore.client.index import aio_channel, channel_options
from kvstore.client.reasons import reason_of
from kvstore.errors import ProtocolError
from kvstore.types import KEY_BYTES
from kvstore.wire.identity import Identity
from kvstore.wire.peers import AHEAD, PrepareReply, PrepareRequest, decode_reply, encode

ASK_AGAIN_S: Final = 0.05
CALL_TIMEOUT_S: Final = 2.0
PATIENCE_S: Final = 5.0
"""A peer without progress for this long is taken not to fetch a run. A fetch that failed is tried
again after a second or two."""
FAILURES_MAX: Final = 3
"""Failed calls in a row after which a peer is left out: one that hangs would hold up every run."""
Ask = Callable[[str, PrepareRequest], Awaitable[PrepareReply]]
"""Sends one Prepare to a peer, by its name; returns the reply."""

_log = logging.getLogger(__name__)


class Drain:
    """One departure: hands runs of blocks to peers through `ask`. Runs on the asyncio loop."""

    def __init__(self, runs: Sequence[PrepareRequest], peers: Sequence[str], ask: Ask) -> None:
        self._runs, self._peers, self._ask = runs, peers, ask
        self._turns = {peer: asyncio.Semaphore() for peer in peers}
        self.block_count = sum(len(run.keys) for run in runs) // KEY_BYTES
        self._failures = dict.fromkeys(peers, 0)
        self._drained = [0] * len(runs)

    @property
    def drained_count(self) -> int:
        """Number of blocks that some peer has reported to be in its dram."""
        return sum(self._drained)

    async def run(self) -> None:
        """Offer all runs to the peers; returns when each is at a peer or was refused by all."""
        await asyncio.gather(*(self._place(number) for number in range(len(self._runs))))

    async def _place(self, number: int) -> None:
        first = number % max(1, len(self._peers))
        for peer in (*self._peers[first:], *self._peers[:first]):
            async with self._turns[peer]:
                is_lost = self._failures[peer] >= FAILURES_MAX
                if not is_lost and await self._is_taken(peer, number):
                    return

    async def _is_taken(self, peer: str, number: int) -> bool:
        run, best = self._runs[number], 0
        count, since_s = len(run.keys) // KEY_BYTES, time.monotonic()
        try:
            while time.monotonic() - since_s < PATIENCE_S:
                its = await self._ask(peer, run)
                if its.refused:
                    return False
                if min(its.dram, count) > best:
                    best, since_s = min(its.dram, count), time.monotonic()
                    self._drained[number] = max(best, self._drained[number])
                if best == count:
                    self._failures[peer] = 0
                    return True
                await asyncio.sleep(ASK_AGAIN_S)
        except (grpc.aio.AioRpcError, ProtocolError, TimeoutError) as error:
            self._failures[peer] += 1
            if self._failures[peer] == FAILURES_MAX:
                _log.warning("node %s is asked for no more: %s", peer, reason_of(error))
        return False


async def drain_node(
    runs: Sequence[PrepareRequest],
    addresses: Mapping[str, str],
    credentials: grpc.ChannelCredentials | None,
    timeout_s: float,
) -> None:
    """Hand the runs to peers, within `timeout_s`, and log how far that went. `addresses`: peer
    address of each node."""
    channels = {
        name: aio_channel(address, credentials, channel_options(str(Identity("node", name))))
        for name, address in addresses.items()
    }

    async def ask(peer: str, request: PrepareRequest) -> PrepareReply:
        call = channels[peer].unary_unary(f"/{AHEAD}/Prepare", encode, bytes)
        return decode_reply(await call(request, timeout=CALL_TIMEOUT_S))

    drain, begin_s = Drain(runs, sorted(addresses), ask), time.monotonic()
    _log.info("leaves: its %d hottest blocks go to %d nodes", drain.block_count, len(channels))
    try:
        async with asyncio.timeout(timeout_s):
            await drain.run()
    except TimeoutError:
        _log.warning("--drain-s is over before all was handed over")
    finally:
        _log.info(
            "drained: %d of the %d hottest blocks are in dram of %d other nodes, after %.1f s",
            *(drain.drained_count, drain.block_count, len(channels), time.monotonic() - begin_s),
        )
        await asyncio.gather(*(channel.close() for channel in channels.values()))
