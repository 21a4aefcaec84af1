"""The index, asked on the router's loop: answers within milliseconds or none; the engines it lists.

    match ─▶ first replica ─ deadline ─▶ Answer        failures ─▶ breaker: no call for a second
    follow ─▶ Watch(nodes, engines) ─▶ members, again and again; the next replica after an end

A router without an index routes by its own tree; so a late answer is worth nothing, and a silent
replica must not cost each request its deadline: after FAILURES_MAX in a row nobody is asked until
one probe has succeeded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import grpc
import msgspec

from kvstore.breaker import Breaker
from kvstore.client.index import aio_channel, reason_of
from kvstore.client.tls import Tls
from kvstore.index.index import Answer
from kvstore.proto import forms, index_pb2 as pb
from kvstore.proto.index_pb2_grpc import IndexStub
from kvstore.routing.values import PrefixAnswer, PrefixMatch, PrefixTrust
from kvstore.wire.load import EngineEntry

TIMEOUT_S_PER_KEY: Final = 2e-6
FAILURES_MAX: Final = 3
COOLDOWN_MS: Final = 250
RETRY_S: Final = 1.0
_log = logging.getLogger(__name__)


class Listed(msgspec.Struct, frozen=True):
    """An engine that a node lists in the index."""

    node: str
    entry: EngineEntry


class IndexCalls:
    """Calls to the replicas of the index; on one loop."""

    def __init__(self, endpoints: Sequence[str], tls: Tls | None, *, timeout_s: float) -> None:
        """`timeout_s`: limit for a match of few keys; each key adds TIMEOUT_S_PER_KEY."""
        self._timeout_s = timeout_s
        credentials = tls.channel_credentials() if tls is not None else None
        self._channels = [aio_channel(each, credentials) for each in endpoints]
        self._stubs = [IndexStub(each) for each in self._channels]
        self._first = 0
        self._breaker = Breaker(failures_max=FAILURES_MAX, cooldown_ms=COOLDOWN_MS)
        self.trouble = ""
        """Reason why the index is not asked for matches; empty: it is asked."""
        self.lost = ""
        """Why no replica lists nodes and engines; empty: one does."""
        self._lost_count = 0
        self.match_count = 0
        self.late_count = 0
        self.epoch = 0
        """Counts updates of the lists of nodes and engines."""
        self.listed: tuple[Listed, ...] = ()
        self.addresses: dict[str, str] = {}
        """Node → address for other nodes and routers; a node without an address neither serves nor
        fetches blocks.
        """

    @property
    def peers(self) -> frozenset[str]:
        """Nodes that serve blocks and fetch them."""
        return frozenset(self.addresses)

    async def match(self, tenant: str, space: bytes, keys: bytes) -> Answer | None:
        """Matches of keys in a space; None: no answer in time."""
        if not self._breaker.allows(time.monotonic_ns()):
            return None
        self.match_count += 1
        timeout_s = self._timeout_s + len(keys) // 32 * TIMEOUT_S_PER_KEY
        request = pb.MatchRequest(tenant=tenant, space=space, keys=keys)
        try:
            # Two limits: gRPC's own is as late as its loop is, and cancels the call at the server.
            async with asyncio.timeout(timeout_s):
                reply = await self._stubs[self._first].Match(request, timeout=2 * timeout_s)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            self._failed(error)
            return None
        except asyncio.CancelledError:
            self._breaker.return_probe()
            raise
        if self._breaker.succeeded():
            _log.info("the index answers again")
            self.trouble = ""
        return forms.answer_of(reply)

    def _failed(self, error: grpc.aio.AioRpcError | TimeoutError) -> None:
        self.late_count += 1
        self._first = (self._first + 1) % len(self._stubs)
        if self._breaker.failed(time.monotonic_ns()):
            self.trouble = f"the index is not used: {reason_of(error)}"
            _log.warning("%s; prefixes are those that this router sent", self.trouble)

    async def follow(self, changed: Callable[[], None]) -> None:
        """Follow the engines that nodes list, calling `changed` after each update, until the stream
        ends; its owner repeats it.
        """
        number = self._first
        members: dict[str, tuple[EngineEntry, ...]] = {}
        addresses: dict[str, str] = {}
        call = self._stubs[number].Watch(pb.WatchRequest(nodes=True, engines=True))
        try:
            async for reply in call:
                self._lost_count, self.lost = 0, ""
                for row in reply.nodes:
                    members[row.node] = forms.engines_of(row.engines)
                    addresses[row.node] = row.address
                for gone in reply.gone:
                    members.pop(gone, None)
                    addresses.pop(gone, None)
                self.addresses = {node: at for node, at in addresses.items() if at}
                self.epoch += 1
                self.listed = tuple(
                    Listed(node, entry) for node, entries in members.items() for entry in entries
                )
                changed()
        except grpc.aio.AioRpcError as error:
            self._first = (number + 1) % len(self._stubs)
            self._unfollowed(error)
        finally:
            call.cancel()

    def _unfollowed(self, error: grpc.aio.AioRpcError) -> None:
        """A replica's stream failed: set `lost` when every replica has failed in a row."""
        self._lost_count += 1
        if self._lost_count < len(self._stubs):
            return
        was, self.lost = self.lost, f"the index is lost: {reason_of(error)}"
        if not was:
            _log.warning("%s; engines that nodes list stay as they are", self.lost)

    async def close(self) -> None:
        for each in self._channels:
            await each.close()


def prefix_answer(answers: Sequence[Answer], epoch: int, peers: frozenset[str]) -> PrefixAnswer:
    """The index's answers about one prompt, a place of its blocks each, in the form that the core
    takes."""
    return PrefixAnswer(
        trust=PrefixTrust[max(each.trust for each in answers).name],
        matches=tuple(
            PrefixMatch(
                node=each.holder.node,
                engine=each.holder.engine,
                rank=each.holder.rank,
                hbm_blocks=each.hbm_blocks,
                dram_blocks=each.dram_blocks,
                file_blocks=each.file_blocks,
                trust=PrefixTrust[each.trust.name],
            )
            for answer in answers
            for each in answer.matches
        ),
        peers=peers,
        epoch=epoch,
    )
