"""Preparations at nodes: blocks that the core wants brought to dram ahead of time, by gRPC.

    core: Prepare ─▶ worker ─▶ its node ─ address by the index ─▶ kvstore.peer.v3.Ahead/Prepare
    core ◀─ PrepareAnswered ◀─ counts, or why not, within DEADLINE_S

Nothing waits for a call. A node that fails or is silent gets none for a while (a breaker each); one
has CALLS_MAX at a time. A call names tenant, space and keys (hashes of the prompt's tokens), no
text and no token. Addresses come from the index, and the node proves its name by its certificate.

Does not cover: what is prepared, and how much (`kvstore.routing.ahead`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import grpc

from kvstore.breaker import Breaker
from kvstore.client.index import aio_channel, channel_options, reason_of
from kvstore.client.tls import Tls
from kvstore.errors import ProtocolError
from kvstore.net.aio import Tasks
from kvstore.router.engines.workers import Worker
from kvstore.router.keys.index_calls import Spaces
from kvstore.routing.events import Prepare, PrepareAnswered
from kvstore.types import SpaceId
from kvstore.wire.identity import Identity
from kvstore.wire.peers import AHEAD, PrepareReply, PrepareRequest, decode_reply, encode

DEADLINE_S: Final = 1.0
CALLS_MAX: Final = 8
PLACES_MAX: Final = 4
"""Most spaces of one worker that are tried for a preparation."""
FAILURES_MAX: Final = 3
COOLDOWN_MS: Final = 2000
KEEPALIVE_MS: Final = 10_000
"""Longer than half the pause that a node demands between pings, below which it hangs up."""
_NO_PREPARE: Final = "it is of a version without preparations"
_FULL: Final = grpc.StatusCode.RESOURCE_EXHAUSTED

_log = logging.getLogger(__name__)


class _NodeChannel:
    """A node and the channel to it."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address, self.channel = address, channel
        self.prepare = channel.unary_unary(f"/{AHEAD}/Prepare", encode, bytes)
        self.breaker = Breaker(failures_max=FAILURES_MAX, cooldown_ms=COOLDOWN_MS)
        self.calls = 0
        self.trouble = ""
        """Reason why the node gets no calls; empty: it gets them."""


class Preparations:
    """Carries out Prepare commands of the core; on the router's loop. See the module."""

    def __init__(
        self, tls: Tls | None, spaces: Spaces, *, answered: Callable[[PrepareAnswered], None]
    ) -> None:
        self._credentials = tls.channel_credentials() if tls is not None else None
        self._spaces, self._answered = spaces, answered
        self._nodes: dict[str, _NodeChannel] = {}
        self._tasks = Tasks("a bug in what prepares blocks")
        self.counts = Counter[tuple[str, str]]()
        """Preparations by (reason, result)."""
        self.blocks = Counter[tuple[str, str]]()
        """Blocks whose move to dram was begun, by (reason, `file` or `node` that they
        come from).
        """

    @property
    def trouble(self) -> str:
        """Nodes that get no calls and the reason, in one sentence; empty: all nodes get calls."""
        return "; ".join(
            f"nothing is brought ahead at node {name}: {node.trouble}"
            for name, node in sorted(self._nodes.items())
            if node.trouble
        )

    def begin(self, command: Prepare) -> None:
        """Ask the worker's node to carry out a command; the core gets a PrepareAnswered later, in
        any case.
        """
        self._tasks.run(self._carry_out(command))

    async def _carry_out(self, command: Prepare) -> None:
        said = PrepareReply(refused="the router ends")
        result = "failed"
        try:
            result, said = await self._say(command)
        finally:
            reason = command.reason.value
            self.counts[reason, result] += 1
            self.blocks[reason, "file"] += said.reading
            self.blocks[reason, "node"] += said.sought
            self._answered(PrepareAnswered(command.number, said))

    async def _say(self, command: Prepare) -> tuple[str, PrepareReply]:
        worker = self._spaces.workers.get(command.worker)
        if worker is None:
            return "failed", PrepareReply(refused="the worker has left")
        node = self._node(worker.address.node)
        if node is None:
            return "failed", PrepareReply(refused="the index has no address of its node")
        if node.calls >= CALLS_MAX:
            return "failed", PrepareReply(refused="its node has not answered others yet")
        if not node.breaker.allows(time.monotonic_ns()):
            return "failed", PrepareReply(refused=node.trouble)
        node.calls += 1
        try:
            said = await self._call(worker, node, command.keys)
        except (grpc.aio.AioRpcError, ProtocolError, TimeoutError) as error:
            why = reason_of(error, unimplemented=_NO_PREPARE)
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is _FULL:
                node.breaker.return_probe()
            elif node.breaker.failed(time.monotonic_ns()):
                node.trouble = why
                _log.warning("nothing is brought ahead at node %s: %s", worker.address.node, why)
            return "failed", PrepareReply(refused=why)
        except asyncio.CancelledError:
            node.breaker.return_probe()
            raise
        finally:
            node.calls -= 1
        if node.breaker.succeeded():
            node.trouble = ""
        return _result(said), said

    async def _call(self, worker: Worker, node: _NodeChannel, keys: bytes) -> PrepareReply:
        """Ask a node for each space of a worker. Returns the last reply that found blocks, else the
        first one. Raises AioRpcError, ProtocolError, TimeoutError.
        """
        whole = PrepareReply(refused="its space is not known")
        async with asyncio.timeout(DEADLINE_S):
            for tenant, space in self._spaces.of(worker)[:PLACES_MAX]:
                request = PrepareRequest(tenant, SpaceId(space), worker.address.engine, keys)
                said = decode_reply(await node.prepare(request, timeout=2 * DEADLINE_S))
                if whole.refused or said.dram + said.reading + said.sought:
                    whole = said
        return whole

    def _node(self, name: str) -> _NodeChannel | None:
        """Channel to a node at the address that the index has now; None: it has none."""
        addresses = self._spaces.index.addresses
        for gone in [each for each in self._nodes if each not in addresses]:
            self._forget(gone)
        address = addresses.get(name, "")
        if name in self._nodes and self._nodes[name].address != address:
            self._forget(name)
        if not address:
            return None
        if name not in self._nodes:
            options = channel_options(str(Identity("node", name)), KEEPALIVE_MS)
            channel = aio_channel(address, self._credentials, options)
            self._nodes[name] = _NodeChannel(address, channel)
        return self._nodes[name]

    def _forget(self, name: str) -> None:
        self._tasks.run(self._nodes.pop(name).channel.close())

    async def close(self) -> None:
        """End all calls, and close the channels."""
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)
        for node in self._nodes.values():
            await node.channel.close()


def _result(said: PrepareReply) -> str:
    if said.refused:
        return "refused"
    return "begun" if said.reading + said.sought else "there" if said.dram else "nothing"
