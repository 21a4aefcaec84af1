"""The index service: feeds in, answers out, over gRPC.

    Feed ─▶ checked messages ─▶ IndexStore.hear ─▶ go on, ask for a snapshot, or close
    Match, Nodes, Watch ─▶ IndexStore.match, .members

One asyncio loop owns the store, so nothing is locked. Bounded: messages of 1 MiB; the number of
calls, watchers and questions by tokens; the time of unread answers; each caller by `shares`, which
also answers a call with the status and sentence of a `RefusedCall`.

When a stream breaks, the node's peer address is dialled: a refused connection means that no process
is there, and the node leaves every answer at once. Only an address at the host that the stream came
from is dialled, so that no node can make this process dial elsewhere.

Covers: the service. Does not cover: trust (`kvstore.index`), storage (`kvstore.stores`), forms of
messages (`kvstore.wire.feed`, `kvstore.proto.forms`), sockets, threads and pages (`replica`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import unquote

import grpc
import msgspec

from kvstore.config.values import address_of
from kvstore.errors import ProtocolError
from kvstore.index.chain import block_keys
from kvstore.index.feed import ConnectRefused, Event, FeedClosed, Rivals, Trust, Verdict
from kvstore.index.index import Answer, Member
from kvstore.net.aio import Tasks
from kvstore.net.server import Context, RefusedCall, Threads, require_node
from kvstore.ports import IndexStore
from kvstore.proto import forms, index_pb2 as pb
from kvstore.proto.index_pb2_grpc import IndexServicer
from kvstore.types import KEY_BYTES, SpaceId
from kvstore.wire import feed as wire

FEED_COUNT_MAX: Final = 4096
WATCHER_COUNT_MAX: Final = 64
WATCH_KEYS_MAX: Final = 1024
TOKEN_QUESTIONS_MAX: Final = 16
"""Most queries by tokens that wait for their keys: a second of work and 32 MiB, or so."""
WATCH_PERIOD_S: Final = 0.1
"""Shortest interval between two updates to a watcher; nodes that come and go in between are left
out. The list of the nodes is made once per interval for all callers."""
READER_TIMEOUT_S: Final = 5.0
"""A watcher that takes longer to read its news is disconnected."""
HELLO_TIMEOUT_S: Final = 5.0
DIAL_TIMEOUT_S: Final = 1.0
DIALS_MAX: Final = 3
TICK_S: Final = 0.1
OLDER_FEEDS: Final = "kvstore.index.v1.Index"
OWN_NAMES: Final = "Give each machine a certificate, or with --insecure a --node-name, of its own"

_log = logging.getLogger(__name__)
_INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT
_EXHAUSTED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED
_REPLACED: Final = "a newer stream of this node is open"


class IndexCounters:
    """Counts of the service since the start."""

    def __init__(self) -> None:
        self.matches = 0
        self.words = 0
        self.keys_told = 0
        self.snapshots_asked = 0
        self.words_refused = 0
        self.feeds_refused = 0
        self.watchers_dropped = 0
        self.calls_refused = 0


class _Sight:
    """Nodes as callers see them, read from the store once per period for all of them."""

    def __init__(self, store: IndexStore, *, engines: bool) -> None:
        self._store, self._engines = store, engines
        self.due_ms = 0
        """Time until which nothing is read again."""
        self.reply = b""
        """Reply to `Nodes` with these members, encoded; empty: not made yet."""
        self._news: dict[str, Member] = {}
        self.members: dict[str, Member] = {}

    def look(self, now_ms: int) -> dict[str, Member]:
        """Nodes by name without sequence numbers and loads, which change all the time; the same
        object as before unless a node has changed."""
        if now_ms >= self.due_ms:
            self.due_ms, self.reply = now_ms + int(WATCH_PERIOD_S * 1000), b""
            self.members = {member.node: member for member in self._store.members(now_ms)}
            news = {
                name: msgspec.structs.replace(
                    its, sequence=0, load=None, engines=its.engines if self._engines else ()
                )
                for name, its in self.members.items()
            }
            if news != self._news:
                self._news = news
        return self._news


class IndexService(IndexServicer):
    """The gRPC service of one replica. All of it runs on one loop."""

    def __init__(self, store: IndexStore, *, demands_names: bool) -> None:
        """`demands_names`: a feed must come from the node that its certificate names."""
        self.store = store
        self.counters = IndexCounters()
        self._demands_names = demands_names
        self.feeds: dict[str, tuple[wire.Hello, str]] = {}
        """Hello of the newest stream of each connected node, and the IP address that it comes
        from."""
        self._rivals = Rivals()
        self.watcher_count = 0
        self._endings = Tasks("a bug at the end of a feed")
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="index-keys")
        """Thread that makes the keys of prompts, since those of long ones take tens of
        milliseconds."""
        full = f"{TOKEN_QUESTIONS_MAX} prompts of tokens wait already"
        self._keying = Threads(self._hashing, count_max=TOKEN_QUESTIONS_MAX, full=full)
        self._sights = {wanted: _Sight(store, engines=wanted) for wanted in (False, True)}

    async def trust(self) -> Trust:
        """Trust in the index itself: that in its answer about an empty prompt."""
        return (await self.store.match("", SpaceId(bytes(KEY_BYTES)), b"", loop_ms())).trust

    async def tick(self) -> None:
        """Run the store's timed work until cancelled."""
        while True:
            await self.store.tick(loop_ms())
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        """Stop the thread that makes keys."""
        self._hashing.shutdown(wait=False, cancel_futures=True)

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        keys = await self._keys(request)
        return forms.reply_of(await self._match(request, keys), blocks=len(keys) // KEY_BYTES)

    async def Nodes(self, request: pb.NodesRequest, context: Context) -> bytes:
        # Every node asks each second: a list for each of them would be the square of the nodes.
        sight, engines = self._sights[request.engines], request.engines
        sight.look(loop_ms())
        if not (reply := sight.reply):
            trust = forms.TRUSTS[await self.trust()]
            sight.look(loop_ms())  # a node may have come meanwhile
            rows = [forms.node_row(each, engines=engines) for each in sight.members.values()]
            reply = sight.reply = pb.NodesReply(trust=trust, nodes=rows).SerializeToString()
        return reply

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:
        keys = b""
        if request.HasField("prefix"):
            keys = await self._keys(request.prefix)
        if len(keys) > WATCH_KEYS_MAX * KEY_BYTES:
            raise RefusedCall(_INVALID, f"a watcher names {WATCH_KEYS_MAX} blocks at most")
        if not request.nodes and not keys:
            raise RefusedCall(_INVALID, "watch nodes, or a prefix, or both")
        if self.watcher_count >= WATCHER_COUNT_MAX:
            raise RefusedCall(_EXHAUSTED, f"{WATCHER_COUNT_MAX} watchers are there already")
        self.watcher_count += 1
        try:
            await self._watch(request, keys, context)
        finally:
            self.watcher_count -= 1

    async def _watch(self, request: pb.WatchRequest, keys: bytes, context: Context) -> None:
        told: dict[str, Member] = {}
        sight = self._sights[request.engines]
        answered: pb.MatchReply | None = None
        is_first = True
        while True:
            reply = pb.WatchReply()
            if request.nodes and (news := sight.look(loop_ms())) is not told:
                changed = [name for name, its in news.items() if its != told.get(name)]
                reply.nodes.extend(
                    forms.node_row(sight.members[name], engines=request.engines) for name in changed
                )
                reply.gone.extend(told.keys() - news.keys())
                told = news
            if keys:
                blocks = len(keys) // KEY_BYTES
                answer = forms.reply_of(await self._match(request.prefix, keys), blocks=blocks)
                if answer != answered:
                    reply.prefix.CopyFrom(answer)
                    answered = answer
            if is_first or reply.ByteSize():
                try:
                    await asyncio.wait_for(context.write(reply), READER_TIMEOUT_S)
                except TimeoutError:
                    self.counters.watchers_dropped += 1
                    raise RefusedCall(_EXHAUSTED, "it is not read") from None
            is_first = False
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _match(self, request: pb.MatchRequest, keys: bytes) -> Answer:
        self.counters.matches += 1
        return await self.store.match(request.tenant, SpaceId(request.space), keys, loop_ms())

    async def _keys(self, request: pb.MatchRequest) -> bytes:
        """Keys of the prompt in a question. Raises RefusedCall."""
        try:
            forms.check_match(request)
        except ProtocolError as error:
            raise RefusedCall(_INVALID, str(error)) from None
        if request.WhichOneof("prompt") == "keys":
            return request.keys
        return await self._keying.run(_keys_of_tokens, request.tokens)

    # ── feeds ────────────────────────────────────────────────────────────────────────────────────

    def feed_handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """gRPC handlers of feeds. Messages are decoded in `feed`: if gRPC decoded them, it would
        end the stream without saying what is wrong. Nodes of the version before only get the
        message to upgrade."""
        feed = grpc.stream_stream_rpc_method_handler(self.feed, bytes, wire.encode)
        older = grpc.stream_stream_rpc_method_handler(_refuse_older, bytes, bytes)
        return (
            grpc.method_handlers_generic_handler(wire.FEEDS, {"Feed": feed}),
            grpc.method_handlers_generic_handler(OLDER_FEEDS, {"Feed": older}),
        )

    async def feed(
        self, words: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[wire.FeedOrder]:
        """The feed of one node: its messages come in, and orders such as a snapshot request go
        out."""
        hello = await self._hello(words, context)
        verdict = await self._tell_store(hello)
        if verdict is Verdict.CLOSE:
            raise self._refusal(hello, _host_of(context.peer()))
        # A stream that this one replaces is closed at its next word, or by keep-alive.
        link = self.feeds[hello.node] = hello, _host_of(context.peer())
        _log.info("node %s publishes, stream %d", hello.node, hello.stream)
        try:
            await context.send_initial_metadata(())
            if verdict is Verdict.ASK:
                yield self._order()
            async for word in words:
                try:
                    verdict = await self._hear(word, hello)
                except wire.RegistryRefused as error:
                    yield wire.FeedOrder(refused=str(error))
                    continue
                if verdict is Verdict.ASK:
                    yield self._order()
                if (rival := self._rivals.of(hello.node, loop_ms())) is not None:
                    yield wire.FeedOrder(another=rival)
        finally:
            if self.feeds.get(hello.node) is link:
                del self.feeds[hello.node]
            # Not here: a call that was cancelled has no time to wait for a store.
            self._endings.run(self._ended(hello, context.peer()))

    async def _hello(self, words: AsyncIterator[bytes], context: Context) -> wire.Hello:
        """The Hello that begins a feed. Raises RefusedCall if it is missing, late or malformed, or
        if this caller may not send it."""
        try:
            hello = wire.decode_hello(await asyncio.wait_for(anext(words), HELLO_TIMEOUT_S))
        except (TimeoutError, StopAsyncIteration):
            text = f"a feed begins with Hello, within {HELLO_TIMEOUT_S:.0f} s"
            raise RefusedCall(_INVALID, text) from None
        except ProtocolError as error:
            self.counters.words_refused += 1
            raise RefusedCall(_INVALID, str(error)) from None
        if self._demands_names:
            try:
                require_node(context, hello.node)
            except RefusedCall as error:
                self.counters.feeds_refused += 1
                _log.warning("a feed is refused: %s", error)
                raise
        if len(self.feeds) >= FEED_COUNT_MAX and hello.node not in self.feeds:
            raise RefusedCall(_EXHAUSTED, f"{FEED_COUNT_MAX} nodes publish already")
        return hello

    async def _hear(self, message: bytes, hello: wire.Hello) -> Verdict:
        """Apply one message of a feed. Raises RegistryRefused, RefusedCall."""
        try:
            word = wire.decode_word(message, hello)
        except ProtocolError as error:
            self.counters.words_refused += 1
            if isinstance(error, wire.RegistryRefused):
                raise
            raise RefusedCall(_INVALID, str(error)) from None
        counters = self.counters
        counters.words += 1
        counters.keys_told += wire.key_count(word)
        verdict = await self._tell_store(word)
        if verdict is Verdict.CLOSE:
            raise RefusedCall(grpc.StatusCode.ABORTED, _REPLACED)
        return verdict

    def _refusal(self, hello: wire.Hello, host: str) -> RefusedCall:
        """Why a Hello from this host is refused: it came too late, or from a second process with
        the node's name."""
        now_ms, name = loop_ms(), hello.node
        heard = next((each for each in self.store.members(now_ms) if each.node == name), None)
        if heard is not None and heard.incarnation != hello.incarnation:
            was_known = self._rivals.of(name, now_ms) is not None
            if self._rivals.refused(name, hello.incarnation, host, now_ms):
                _, other = self.feeds.get(name, (None, "another machine"))
                text = f"another process, at {other}, is node {name} already"
                if not was_known:
                    _log.error("%s: the one at %s is ignored. %s", text, host, OWN_NAMES)
                return RefusedCall(grpc.StatusCode.ALREADY_EXISTS, text)
        return RefusedCall(grpc.StatusCode.ABORTED, _REPLACED)

    @property
    def trouble(self) -> str:
        """Error to report on /healthz; empty while the service is healthy."""
        names = self._rivals.names(now_ms())
        return f"two processes claim to be node {', '.join(names)}" if names else ""

    async def _tell_store(self, event: Event) -> Verdict:
        """Apply an event to the store. If a node came, went or is in sync again, the list of nodes
        is made anew for the next caller."""
        verdict = await self.store.hear(event, loop_ms())
        match event:
            case wire.Delta() | wire.FeedBeat() | wire.SnapshotPart(is_last=False) if (
                verdict is Verdict.GO_ON
            ):
                pass
            case _:
                for sight in self._sights.values():
                    sight.due_ms = 0
        return verdict

    def _order(self) -> wire.FeedOrder:
        self.counters.snapshots_asked += 1
        return wire.FeedOrder()

    async def _ended(self, hello: wire.Hello, peer: str) -> None:
        """A node's stream has ended: dial the node's address to find out whether the node has
        ended, too."""
        await self._tell_store(FeedClosed(hello.node, hello.incarnation, hello.stream))
        found = address_of(hello.address)
        if found is None or found.host != _host_of(peer) or hello.node in self.feeds:
            return
        for _ in range(DIALS_MAX):
            try:
                async with asyncio.timeout(DIAL_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(*found)
                    with contextlib.closing(writer):
                        if await reader.read(1):
                            return  # somebody is there
            except ConnectionRefusedError:
                if hello.node not in self.feeds:
                    _log.info("node %s is gone: its address refuses connections", hello.node)
                    await self._tell_store(ConnectRefused(hello.node))
                return
            except ConnectionResetError:
                continue
            except OSError:
                return  # slow or unreachable: its silence decides (TimeoutError is an OSError)
            # Hung up on at once: a process that dies closes its sockets one after the other.


def now_ms() -> int:
    """Time of the index, in ms of the monotonic clock."""
    return time.monotonic_ns() // 1_000_000


def loop_ms() -> int:
    """Time of the index as in `now_ms`, from the running loop: its clock is the monotonic one, or
    in tests a virtual one."""
    return int(asyncio.get_running_loop().time() * 1000)


async def _refuse_older(_words: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
    text = "this index is of a later version of kvstore: run one on nodes and indexes"
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
    yield b""  # never: it makes this a stream


def _keys_of_tokens(tokens: pb.Tokens) -> bytes:
    keys = block_keys(
        tokens.ids,
        block_tokens=tokens.block_tokens,
        seed=tokens.hash_seed,
        cache_salt=tokens.cache_salt,
    )
    return b"".join(keys)


def _host_of(peer: str) -> str:
    """The IP address in gRPC's name of a peer: ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5."""
    found = address_of(unquote(peer).partition(":")[2])
    # On a server that listens on [::], callers over IPv4 have addresses such as ::ffff:10.0.0.1.
    mapped = getattr(ipaddress.ip_address(found.host), "ipv4_mapped", None) if found else None
    return str(mapped) if mapped else found.host if found else ""
