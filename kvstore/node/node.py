"""Puts one node process together and takes it apart again.

    config, what the supervisor holds ─▶ arena, journal ─▶ tier ─▶ engine ─▶ attach ─▶ executor
                                                    ─▶ driver, with inspect and http beside

Covers: order of start and stop, what is taken over from the process before. Does not cover: any of
the parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import platform
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvstore import __version__
from kvstore.arena import Arena
from kvstore.config.machine import available_memory, warn_of_too_little_room
from kvstore.config.node import NodeConfig
from kvstore.engine.engine import Engine, EngineConfig
from kvstore.engine.events import Event
from kvstore.engine.why.report import hottest_runs
from kvstore.errors import ConfigError, NodeBusy
from kvstore.installation import lacking
from kvstore.net.aio import LoopThread
from kvstore.net.http import HttpServer, PageMaker
from kvstore.node.attach import Attach
from kvstore.node.driver import Driver, Executor
from kvstore.node.files import FILE_ROW_BYTES, FileEnd, LateTier
from kvstore.node.inspect import InspectServer
from kvstore.node.pages import NodeCollector, make_pages
from kvstore.node.scrub import DramScrub
from kvstore.node.turns import ThreadPriority, TurnKind, TurnSource
from kvstore.node.warm import NodeMemory, take_memory
from kvstore.obs import logs
from kvstore.ports import Clock, FileStore
from kvstore.supervisor import control
from kvstore.supervisor.control import Addresses, Serving
from kvstore.supervisor.handover import Handover
from kvstore.supervisor.sockets import Door
from kvstore.tiers.dram import DramTier
from kvstore.tiers.file.parts import Outbox
from kvstore.tiers.file.tier import FileTier
from kvstore.types import SLOT_BYTES_MIN, AdmissionMode, ConnectionId, Incarnation
from kvstore.units import NS_PER_MS, format_size
from kvstore.wire.load import Learned
from kvstore.wire.peers import PrepareRequest

if TYPE_CHECKING:
    from kvstore.node.publish import Publisher
    from kvstore.node.traces import NodeTraces
    from kvstore.peers.member import ClusterMember
    from kvstore.tiers.hbm import HbmTier


# ── clock ─────────────────────────────────────────────────────────────────────────────────────────
# The one real clock, at the edge of the pure core.


class MonotonicClock:
    """A `Clock` on CLOCK_MONOTONIC, on which the heartbeat word counts too."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


# ── node ──────────────────────────────────────────────────────────────────────────────────────────

CONNECTION_COUNT_MAX: Final = 256
DRAIN_SHARE: Final = 0.1
"""The hottest tenth of dram goes to other nodes when this one leaves."""
HELD_TIMEOUT_S: Final = 1.0
HBM_ROOM_S_MAX: Final = 2.0
"""How long engines may hold the hbm of a node that crashed, before the next serves without."""
NEWCOMER_COUNT_MAX: Final = 16
CONNECTIONS_PER_LIFE: Final = 1 << 32
"""Connections of one process have numbers that no other has."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class _Closes(Protocol):
    def close(self) -> object: ...


_Part = TypeVar("_Part", bound=_Closes)


def run_node(config: NodeConfig, handover: Handover) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP (a closed terminal), or until the supervisor ends. Call
    it in the main thread.

    Raises:
        ConfigError: the node cannot start with this configuration on this machine.
        SupervisorGone: it ended.
    """
    with contextlib.ExitStack() as stack:
        _restore_ports(config, handover.begin.places)
        node = NodeAssembly(config, handover, stack)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: node.driver.stop())
        signal.signal(signal.SIGTERM, lambda *_: node.leave())
        # Start-up objects live for ever: no collection needs to look at them again.
        gc.freeze()
        serving = node.serving()
        handover.send_message(serving)
        if handover.begin.life == 0:
            logs.say(__name__, node.ready_line())
        else:
            away_ms = (time.monotonic_ns() - handover.begin.died_ns) // NS_PER_MS
            node.collector.away_ns = away_ms * NS_PER_MS
            _log.info(
                "serves again after %d ms: %d blocks (%s) were kept in memory",
                *(away_ms, serving.blocks, format_size(serving.size_bytes)),
            )
            if trouble := handover.code.trouble():
                _log.warning("%s", trouble)
        # Last: threads that are made before have the place of any other.
        node.driver.run(ThreadPriority(time.monotonic_ns()))


def _restore_ports(config: NodeConfig, places: Addresses) -> None:
    """Have the config name the ports at which the last process could be reached."""
    ports = {
        "metrics": places.metrics_port,
        "index_listen": places.index_port,
        "peer_listen": places.peer_port,
    }
    for name, port in ports.items():
        if port and (listen := getattr(config, name)) is not None:
            setattr(config, name, listen._replace(port=port))
    if config.published is not None and places.events:
        config.published = dataclasses.replace(
            config.published, endpoint=places.events, replay_endpoint=places.events_replay
        )


class NodeAssembly:
    """All parts of a node, made in order; `stack` takes them apart in the opposite one."""

    def __init__(self, config: NodeConfig, handover: Handover, stack: contextlib.ExitStack) -> None:
        self._config, self._handover, self._stack = config, handover, stack
        self._clock, self._life = MonotonicClock(), handover.begin.life
        self._incarnation = Incarnation(secrets.randbelow(2**63 - 1) + 1)
        door = self._own(Door(config.socket, socket.socket(fileno=handover.listener_fd)))
        memory = take_memory(config, self._incarnation, handover)
        arena, tier = memory.arena, self._own(_make_tier(memory))
        attach = self._own(self._make_attach(door))
        files = _open_files(config, arena, self._clock, handover, stack)
        publisher = self._open_publisher()
        loop = self._own(LoopThread("grpc"))
        member, hbm = self._open_member(arena, loop), self._open_hbm(tier)
        self._parts = parts = Executor(
            arena=arena,
            tier=tier,
            attach=attach,
            files=files,
            publisher=publisher,
            member=member,
            hbm=hbm,
            traces=self._open_traces(),
        )
        self._engine = _make_engine(config, memory, self._life, parts)
        self.driver = driver = Driver(self._engine, parts, self._clock)
        source = TurnSource(TurnKind.WAKE, None, lambda _: _supervisor_ended(driver))
        attach.watch(handover.fileno(), source)
        for number in [*handover.writers]:
            attach.adopt(ConnectionId(number), handover.writers.pop(number)[1])
        driver.begin(memory.adopt)
        self.collector = NodeCollector(driver, self._incarnation, handover.code)
        pages = make_pages(self.collector)
        self._http = self._serve_pages(pages)
        self._own(InspectServer(config.socket, loop, driver, pages["/state.json"]))
        tier.start()
        if config.scrub_rate is not None:
            self._own(DramScrub(driver, tier, config.scrub_rate)).start()
        if publisher is not None:
            publisher.start(lambda row: self._ask(lambda engine: engine.held(row)))
        if member is not None:
            member.start(
                lambda row: self._ask(lambda engine: engine.offered(row)),
                lambda: self._ask(Engine.load),
                lambda: self._ask(Engine.engines),
            )
        self.leave = _make_leave(config, driver, loop)
        """End, after a drain if there is to be one."""

    def _own(self, part: _Part) -> _Part:
        """The part, which is closed at the end."""
        return self._stack.enter_context(contextlib.closing(part))

    def _ask(self, ask: Callable[[Engine], _T]) -> _T:
        return self.driver.query(ask, timeout_s=HELD_TIMEOUT_S)

    # ── made ─────────────────────────────────────────────────────────────────────────────────────

    def _make_attach(self, door: Door) -> Attach:
        return Attach(
            door,
            allow_uids=self._config.allow_uid,
            # A process that attaches again holds two sockets for a moment.
            connection_count_max=CONNECTION_COUNT_MAX + NEWCOMER_COUNT_MAX,
            clock=self._clock,
            register=self._handover.attached,
            unregister=self._handover.released,
            first_number=self._life * CONNECTIONS_PER_LIFE + 1,
        )

    # ── made where the configuration has it ──────────────────────────────────────────────────────

    def _open_publisher(self) -> Publisher | None:
        config = self._config.published
        if config is None:
            return None
        try:
            # Only here: a node without --events needs no ZeroMQ.
            from kvstore.node.publish import Publisher
        except ImportError:
            raise ConfigError(lacking("--events", "pyzmq", "events")) from None
        if config.beyond_loopback:
            _log.warning(
                "--insecure: every client that reaches %s can read, without TLS, names of blocks",
                config.endpoint,
            )
        return self._own(Publisher(config, incarnation=self._incarnation, clock=self._clock))

    def _open_member(self, arena: Arena, loop: LoopThread) -> ClusterMember | None:
        if self._config.cluster is None:
            return None
        # Only here: a node by itself needs no gRPC beyond its own socket.
        from kvstore.peers.member import ClusterMember

        its = self._config, self._config.cluster, self._incarnation
        return self._own(ClusterMember(*its, arena=arena, clock=self._clock, loop=loop))

    def _open_hbm(self, dram: DramTier) -> HbmTier | None:
        size, gpu = self._config.hbm_bytes, self._config.hbm_gpu
        if not size:
            return None
        # Only here: a node without hbm loads nothing of CUDA.
        from kvstore.tiers.hbm import HbmTier, device_for_hbm

        try:
            with device_for_hbm(gpu, size) as device:
                room_s = HBM_ROOM_S_MAX if self._life else 0.0
                its = self._incarnation
                hbm = HbmTier(device, dram, capacity_bytes=size, incarnation=its, room_s_max=room_s)
        except ConfigError as error:
            if self._life == 0:
                raise
            _log.error("serves without hbm: %s", error)  # what is in dram is served all the same
            return None
        return self._own(hbm)

    def _open_traces(self) -> NodeTraces | None:
        config = self._config
        if config.trace is None:
            return None
        # Only here: a node without --trace loads nothing of OpenTelemetry.
        from kvstore.node.traces import NodeTraces

        name = config.cluster.node if config.cluster else platform.node()
        return self._own(NodeTraces(config.trace, name, config.trace_sample))

    def _serve_pages(self, pages: Mapping[str, PageMaker]) -> HttpServer | None:
        if self._config.metrics is None:
            return None
        held_fd = self._handover.places.pop(control.METRICS, -1)
        http = self._own(HttpServer(self._config.metrics, pages, held_fd=held_fd))
        self._handover.keep(control.METRICS, http.fileno())
        http.start()
        return http

    # ── told ─────────────────────────────────────────────────────────────────────────────────────

    def serving(self) -> Serving:
        """Addresses and descriptors of this process, for its supervisor."""
        http, publisher, member = self._http, self._parts.publisher, self._parts.member
        places = Addresses(
            metrics_port=http.port if http else 0,
            events=publisher.endpoint if publisher else "",
            events_replay=publisher.replay_endpoint if publisher else "",
            index_port=member.index_port if member else 0,
            peer_port=member.peer_port if member else 0,
        )
        kept_bytes = self._engine.tiers()[0].used_bytes
        blocks = self._engine.counters.blocks_kept
        return Serving(places, blocks=blocks, size_bytes=kept_bytes)

    def ready_line(self) -> str:
        """The line that announces to an operator, and a script, that the node is ready."""
        config, http, parts = self._config, self._http, self._parts
        events, member, file = parts.publisher, parts.member, config.disk
        facts = {
            "version": __version__,
            "socket": config.socket,
            "metrics": f"{http.url}/metrics" if http else "",
            "events": f"{events.endpoint},{events.replay_endpoint}" if events else "",
            "index": member.tells if member else "",
            "serves-index": member.index if member else "",
            "peers": member.reached if member else "",
            "incarnation": f"{self._incarnation:016x}",
            "huge-pages": "yes" if parts.arena.huge_pages else "no",
            "slab": format_size(config.slab_bytes),
            "file": f"{file.home}:{format_size(file.capacity_bytes)}" if file else "",
            "dram": format_size(config.dram_bytes),
        }
        note = f" ({config.dram_note})" if config.dram_note else ""
        shown = " ".join(f"{name}={value or 'off'}" for name, value in facts.items())
        return f"kvstore node ready: {shown}{note}"


def _make_leave(config: NodeConfig, driver: Driver, loop: LoopThread) -> Callable[[], None]:
    member = driver.executor.member
    peering = member and member.peering
    if not peering or not config.drain_s:
        return driver.stop

    def ask(question: Callable[[Engine], _T]) -> _T:
        return driver.query(question, timeout_s=HELD_TIMEOUT_S)

    def find_runs() -> list[PrepareRequest]:
        used = ask(Engine.used_slots)
        return hottest_runs(used, DRAIN_SHARE, lambda words: ask(lambda its: its.named(words)))

    async def drain() -> None:
        try:
            runs = await asyncio.to_thread(find_runs)
            await peering.drain(runs, timeout_s=config.drain_s)
        except NodeBusy as error:
            _log.warning("leaves without a drain: %s", error)
        finally:
            driver.stop()

    begun = list[object]()

    def leave() -> None:
        # Once: systemd, say, signals every process of a unit, and the supervisor passes it on.
        if not begun and not driver.has_ended:
            begun.append(asyncio.run_coroutine_threadsafe(drain(), loop.loop))

    return leave


def _make_tier(memory: NodeMemory) -> DramTier:
    return DramTier(
        memory.arena,
        ready_bytes=memory.journal.ready_bytes,
        on_ready=memory.journal.set_ready,
        room_bytes=lambda: available_memory()[0],
    )


def _supervisor_ended(driver: Driver) -> list[Event]:
    _log.warning("the supervisor has ended: so does its node")
    driver.stop()
    return []


def _open_files(
    config: NodeConfig, arena: Arena, clock: Clock, handover: Handover, stack: contextlib.ExitStack
) -> FileEnd | None:
    if config.disk is None:
        return None
    where, lock_fd = config.disk, handover.places.get(control.STORE, -1)

    def open_tier(outbox: Outbox | None) -> FileTier:
        tier = FileTier(
            where, arena.array, clock, lock_fd=lock_fd, outbox=outbox, look=arena.read
        ).start()
        handover.keep(control.STORE, tier.lock_fd)
        return tier

    tier: FileStore
    if handover.begin.life == 0:
        warn_of_too_little_room(where)
    try:
        tier = open_tier(None)
    except ConfigError as error:
        if handover.begin.life == 0:
            raise
        tier = LateTier(where.home, open_tier, str(error))
    stack.callback(tier.close)
    return FileEnd(tier, day_bytes=config.file_writes_per_day or 0, on_hang=handover.disk_hangs)


def _make_engine(config: NodeConfig, memory: NodeMemory, life: int, parts: Executor) -> Engine:
    files, member, hbm = parts.files, parts.member, parts.hbm
    file_bytes = config.disk.capacity_bytes if config.disk else 0
    return Engine(
        EngineConfig(
            incarnation=memory.incarnation,
            seed=secrets.randbits(64),
            arena_bytes=config.dram_bytes,
            slab_bytes=config.slab_bytes,
            generation_bytes=memory.arena.generation_bytes,
            block_count_max=config.dram_bytes // SLOT_BYTES_MIN + file_bytes // FILE_ROW_BYTES,
            first_generation=memory.first_generation,
            restarts=life,
            hbm=hbm.slab if hbm else None,
            file_bytes=file_bytes,
            policy=config.policy,
            file_admission=AdmissionMode(config.file_admission),
            file_day_bytes=config.file_writes_per_day or 0,
            file_spent_bytes=files.spent_bytes() if files else 0,
            learned=files.learned if files else Learned(),
            connection_count_max=CONNECTION_COUNT_MAX,
            quotas=config.quotas,
            tell_changes=config.published is not None,
            tell_offers=config.cluster is not None,
            tell_stories=config.trace is not None,
            follows=member is not None and member.memory is not None,
            fetches=config.cluster is not None and config.cluster.transport is not None,
            node=config.cluster.node if config.cluster else "",
            landing_bytes=config.landing_bytes,
            fetches_always=config.fetch == "always",
        ),
        memory.journal,
    )
