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
import os
import platform
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore import __version__
from kvstore.arena import Arena
from kvstore.config.machine import available_memory, warn_of_too_little_room
from kvstore.config.node import NodeConfig
from kvstore.engine import Engine, EngineConfig, hottest_runs
from kvstore.engine.events import Event
from kvstore.errors import ConfigError, NodeBusy
from kvstore.installation import lacking
from kvstore.net.aio import LoopThread
from kvstore.net.http import HttpServer, PageMaker
from kvstore.net.turns import TURN_WAKE, TurnSource
from kvstore.node.attach import Attach
from kvstore.node.driver import Driver
from kvstore.node.executor import Executor
from kvstore.node.files import FILE_ROW_BYTES, FileEnd
from kvstore.node.inspect import InspectServer
from kvstore.node.late import LateTier
from kvstore.node.pages import NodeCollector, make_pages
from kvstore.node.priority import ThreadPriority
from kvstore.node.scrub import DramScrub
from kvstore.node.warm import NodeMemory, take_memory
from kvstore.obs import logs
from kvstore.peers.changes import EventCounters
from kvstore.ports import Clock, FileStore
from kvstore.supervisor import control
from kvstore.supervisor.control import Addresses, Serving
from kvstore.supervisor.handover import Handover
from kvstore.supervisor.listener import Door
from kvstore.tiers.dram import DramTier
from kvstore.tiers.file.outbox import Outbox
from kvstore.tiers.file.tier import FileTier
from kvstore.types import SLOT_BYTES_MIN, Incarnation
from kvstore.units import NS_PER_MS, format_size
from kvstore.wire.learned import Learned
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

_log = logging.getLogger(__name__)


class Running(NamedTuple):
    """A node that serves, as shown to an operator."""

    socket: str
    dram_bytes: int
    dram_note: str
    slab_bytes: int
    file: str
    """Directory and size of the disk tier; empty when there is none."""
    huge_pages: bool
    metrics_url: str
    """Empty when off."""
    events: str
    """Where KV events and their replay are; empty when off."""
    replica: str
    """Where the replica inside this node is; empty when there is none."""
    tells: str
    """Replicas that the node publishes to and asks, its own first; empty when there is none."""
    peers: str
    """Where other nodes reach it, and by what blocks move; empty when off."""
    incarnation: Incarnation

    def line(self) -> str:
        """The line that announces to an operator, and a script, that the node is ready."""
        note = f" ({self.dram_note})" if self.dram_note else ""
        return (
            f"kvstore node ready: version={__version__} socket={self.socket}"
            f" metrics={self.metrics_url or 'off'}"
            f" events={self.events or 'off'} index={self.tells or 'off'}"
            f" serves-index={self.replica or 'off'} peers={self.peers or 'off'}"
            f" incarnation={self.incarnation:016x} huge-pages={'yes' if self.huge_pages else 'no'}"
            f" slab={format_size(self.slab_bytes)} file={self.file or 'off'}"
            f" dram={format_size(self.dram_bytes)}{note}"
        )


def run_node(config: NodeConfig, handover: Handover) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP (a closed terminal), or until the supervisor ends. Call
    it in the main thread.

    Raises:
        ConfigError: the node cannot start with this configuration on this machine.
        SupervisorGone: it ended.
    """
    with contextlib.ExitStack() as stack:
        node = _assemble(_in_place(config, handover.begin.places), handover, stack)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: node.driver.stop())
        signal.signal(signal.SIGTERM, lambda *_: node.leave())
        # Start-up objects live for ever: no collection needs to look at them again.
        gc.freeze()
        handover.serving(node.serving)
        if handover.begin.life == 0:
            logs.say(__name__, node.running.line())
        else:
            away_ms = (time.monotonic_ns() - handover.begin.died_ns) // NS_PER_MS
            node.collector.away_ns = away_ms * NS_PER_MS
            _log.info(
                "serves again after %d ms: %d blocks (%s) were kept in memory",
                *(away_ms, node.serving.blocks, format_size(node.serving.size_bytes)),
            )
            if trouble := handover.code.trouble():
                _log.warning("%s", trouble)
        # Last: threads that are made before have the place of any other.
        node.driver.run(ThreadPriority(time.monotonic_ns()))


class _NodeParts(NamedTuple):
    driver: Driver
    running: Running
    serving: Serving
    collector: NodeCollector
    leave: Callable[[], None]
    """End, after a drain if there is to be one."""


def _in_place(config: NodeConfig, places: Addresses) -> NodeConfig:
    """The config with the ports at which the last process could be reached."""
    http, events = config.http, config.events
    if http is not None and places.metrics_port:
        http = http._replace(port=places.metrics_port)
    if events is not None and places.events:
        events = dataclasses.replace(
            events, endpoint=places.events, replay_endpoint=places.events_replay
        )
    cluster = config.cluster
    if cluster is not None and cluster.replica is not None and places.index_port:
        replica = dataclasses.replace(cluster.replica, port=places.index_port)
        cluster = dataclasses.replace(cluster, replica=replica)
    if cluster is not None and cluster.peers is not None and places.peer_port:
        peers = dataclasses.replace(cluster.peers, port=places.peer_port)
        cluster = dataclasses.replace(cluster, peers=peers)
    return dataclasses.replace(config, http=http, events=events, cluster=cluster)


def _assemble(config: NodeConfig, handover: Handover, stack: contextlib.ExitStack) -> _NodeParts:
    """Make all parts, in order; `stack` takes them apart in the opposite one."""
    clock, life = MonotonicClock(), handover.begin.life
    incarnation = Incarnation(secrets.randbelow(2**63 - 1) + 1)
    door = Door(config.socket, socket.socket(fileno=handover.listener_fd))
    stack.callback(door.close)
    memory = take_memory(config, incarnation, handover)
    arena, tier = memory.arena, _make_tier(memory)
    stack.callback(tier.close)
    attach = _make_attach(config, door, handover, clock)
    stack.callback(attach.close)
    files = _open_files(config, arena, clock, handover, stack)
    publisher = _open_publisher(config, incarnation, clock, stack)
    loop = LoopThread("grpc")
    stack.callback(loop.close)
    member = _open_member(config, incarnation, arena, tier, clock, loop, stack)
    hbm = _open_hbm(config, tier, incarnation, life, stack)
    engine = _make_engine(config, memory, life, files, member, hbm)
    traces = _open_traces(config, stack)
    driver = Driver(
        engine=engine,
        tier=tier,
        attach=attach,
        executor=_make_executor(arena, tier, attach, files, publisher, member, hbm, traces),
        clock=clock,
        files=files,
        exchange=member.peering.exchange if member and member.peering else None,
        hbm=hbm,
    )
    source = TurnSource(TURN_WAKE, None, lambda _: _supervisor_ended(driver))
    attach.watch(handover.fileno(), source)
    _adopt_writers(memory, attach)
    driver.begin(memory.adopt)
    collector = NodeCollector(
        driver=driver,
        attach=attach,
        tier=tier,
        incarnation=incarnation,
        version=handover.code.version,
        events=publisher.counters if publisher else EventCounters(),
        member=member,
        traces=traces,
    )
    parts = collector, driver, door, files, publisher, member
    pages = make_pages(*parts, code_trouble=handover.code.trouble)
    http = _serve_pages(config, pages, handover, stack)
    stack.callback(InspectServer(config.socket, loop, driver, pages["/state.json"], member).close)
    tier.start()
    _start_scrub(config, driver, tier, stack)
    if publisher is not None:
        _start_publisher(publisher, driver)
    if member is not None:
        _start_member(member, driver)
    return _NodeParts(
        driver,
        _running(config, arena, incarnation, http, publisher, member),
        _serving(engine, http, publisher, member),
        collector,
        _make_leave(config, driver, member, loop),
    )


def _make_leave(
    config: NodeConfig, driver: Driver, member: ClusterMember | None, loop: LoopThread
) -> Callable[[], None]:
    peering, peers = member and member.peering, config.cluster and config.cluster.peers
    if not peering or not peers or not peers.drain_s:
        return driver.stop

    def find_runs() -> list[PrepareRequest]:
        used = driver.query(Engine.used_slots, timeout_s=HELD_TIMEOUT_S)
        return hottest_runs(
            used,
            DRAIN_SHARE,
            lambda words: driver.query(
                lambda engine: engine.named(words), timeout_s=HELD_TIMEOUT_S
            ),
        )

    async def drain() -> None:
        try:
            runs = await asyncio.to_thread(find_runs)
            await peering.drain(runs, timeout_s=peers.drain_s)
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


def _make_executor(
    arena: Arena,
    tier: DramTier,
    attach: Attach,
    files: FileEnd | None,
    publisher: Publisher | None,
    member: ClusterMember | None,
    hbm: HbmTier | None,
    traces: NodeTraces | None,
) -> Executor:
    return Executor(
        tier=tier,
        attach=attach,
        arena_fd=arena.arena_fd,
        generation_fd=arena.generation_fd,
        files=files,
        publish=publisher.log.append if publisher else None,
        offer=member.feeder.log.append if member else None,
        exchange=member.peering.exchange if member and member.peering else None,
        memory=member.memory if member else None,
        hbm=hbm,
        trace=traces.put if traces else None,
    )


def _make_attach(config: NodeConfig, door: Door, handover: Handover, clock: Clock) -> Attach:
    return Attach(
        door,
        allow_uids=config.allow_uids,
        # A process that attaches again holds two sockets for a moment.
        connection_count_max=CONNECTION_COUNT_MAX + NEWCOMER_COUNT_MAX,
        clock=clock,
        register=handover.attached,
        unregister=handover.released,
        first_number=handover.begin.life * CONNECTIONS_PER_LIFE + 1,
    )


def _serving(
    engine: Engine,
    http: HttpServer | None,
    publisher: Publisher | None,
    member: ClusterMember | None,
) -> Serving:
    places = Addresses(
        metrics_port=http.port if http else 0,
        events=publisher.endpoint if publisher else "",
        events_replay=publisher.replay_endpoint if publisher else "",
        index_port=member.index_port if member else 0,
        peer_port=member.peer_port if member else 0,
    )
    kept_bytes = engine.tiers()[0].used_bytes
    return Serving(places, blocks=engine.counters.blocks_kept, size_bytes=kept_bytes)


def _supervisor_ended(driver: Driver) -> list[Event]:
    _log.warning("the supervisor has ended: so does its node")
    driver.stop()
    return []


def _serve_pages(
    config: NodeConfig,
    pages: Mapping[str, PageMaker],
    handover: Handover,
    stack: contextlib.ExitStack,
) -> HttpServer | None:
    if config.http is None:
        return None
    http = HttpServer(config.http, pages, held_fd=handover.places.pop(control.METRICS, -1))
    stack.callback(http.close)
    handover.keep(control.METRICS, http.fileno())
    http.start()
    return http


def _running(
    config: NodeConfig,
    arena: Arena,
    incarnation: Incarnation,
    http: HttpServer | None,
    publisher: Publisher | None,
    member: ClusterMember | None,
) -> Running:
    return Running(
        socket=str(config.socket),
        dram_bytes=config.dram_bytes,
        dram_note=config.dram_note,
        slab_bytes=config.slab_bytes,
        file=f"{config.file.home}:{format_size(config.file.capacity_bytes)}" if config.file else "",
        huge_pages=arena.huge_pages,
        metrics_url=http.url + "/metrics" if http else "",
        events=f"{publisher.endpoint},{publisher.replay_endpoint}" if publisher else "",
        replica=member.index if member else "",
        tells=member.tells if member else "",
        peers=member.reached if member else "",
        incarnation=incarnation,
    )


def _open_publisher(
    config: NodeConfig, incarnation: Incarnation, clock: Clock, stack: contextlib.ExitStack
) -> Publisher | None:
    if config.events is None:
        return None
    try:
        # Only here: a node without --events needs no ZeroMQ.
        from kvstore.node.publish import Publisher
    except ImportError:
        raise ConfigError(lacking("--events", "pyzmq", "events")) from None
    if config.events.beyond_loopback:
        _log.warning(
            "--insecure: every client that reaches %s can read, without TLS, names of blocks",
            config.events.endpoint,
        )
    publisher = Publisher(config.events, incarnation=incarnation, clock=clock)
    stack.callback(publisher.close)
    return publisher


def _adopt_writers(memory: NodeMemory, attach: Attach) -> None:
    for writer, pidfd in memory.writers:
        attach.adopt(writer.connection, pidfd)


def _start_scrub(
    config: NodeConfig, driver: Driver, tier: DramTier, stack: contextlib.ExitStack
) -> None:
    if config.scrub is not None:
        scrub = DramScrub(driver, tier, config.scrub)
        stack.callback(scrub.close)
        scrub.start()


def _open_member(
    config: NodeConfig,
    incarnation: Incarnation,
    arena: Arena,
    tier: DramTier,
    clock: Clock,
    loop: LoopThread,
    stack: contextlib.ExitStack,
) -> ClusterMember | None:
    if config.cluster is None:
        return None
    # Only here: a node by itself needs no gRPC beyond its own socket.
    from kvstore.peers.member import ClusterMember

    member = ClusterMember(
        config.cluster, incarnation, arena=arena, tier=tier, clock=clock, loop=loop
    )
    stack.callback(member.close)
    return member


def _start_member(member: ClusterMember, driver: Driver) -> None:
    member.start(
        lambda row: driver.query(lambda engine: engine.offered(row), timeout_s=HELD_TIMEOUT_S),
        lambda: driver.query(lambda engine: engine.load(), timeout_s=HELD_TIMEOUT_S),
        lambda: driver.query(lambda engine: engine.engines(), timeout_s=HELD_TIMEOUT_S),
    )


def _start_publisher(publisher: Publisher, driver: Driver) -> None:
    publisher.start(
        lambda row: driver.query(lambda engine: engine.held(row), timeout_s=HELD_TIMEOUT_S)
    )


def _open_hbm(
    config: NodeConfig,
    dram: DramTier,
    incarnation: Incarnation,
    life: int,
    stack: contextlib.ExitStack,
) -> HbmTier | None:
    if not config.hbm_bytes:
        return None
    # Only here: a node without hbm loads nothing of CUDA.
    from kvstore.tiers.hbm import open_hbm

    try:
        size, room_s_max = config.hbm_bytes, HBM_ROOM_S_MAX if life else 0.0
        hbm = open_hbm(config.hbm_gpu, dram, size, incarnation, room_s_max=room_s_max)
    except ConfigError as error:
        if life == 0:
            raise
        _log.error("serves without hbm: %s", error)  # what is in dram is served all the same
        return None
    stack.callback(hbm.close)
    return hbm


def _open_traces(config: NodeConfig, stack: contextlib.ExitStack) -> NodeTraces | None:
    if config.trace is None:
        return None
    # Only here: a node without --trace loads nothing of OpenTelemetry.
    from kvstore.node.traces import NodeTraces

    name = config.cluster.node if config.cluster else platform.node()
    traces = NodeTraces(config.trace, name, config.trace_sample)
    stack.callback(traces.close)
    return traces


def _open_files(
    config: NodeConfig,
    arena: Arena,
    clock: Clock,
    handover: Handover,
    stack: contextlib.ExitStack,
) -> FileEnd | None:
    if config.file is None:
        return None
    where, lock_fd = config.file, handover.places.get(control.STORE, -1)

    def open_tier(outbox: Outbox | None) -> FileTier:
        held_fd = os.dup(lock_fd) if lock_fd >= 0 else -1
        tier = FileTier.open(
            where, arena.array, clock, lock_fd=held_fd, outbox=outbox, look=arena.read
        )
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
    return FileEnd(tier, day_bytes=config.file_day_bytes, on_hang=handover.disk_hangs)


def _make_engine(
    config: NodeConfig,
    memory: NodeMemory,
    life: int,
    files: FileEnd | None,
    member: ClusterMember | None,
    hbm: HbmTier | None = None,
) -> Engine:
    file_bytes = config.file.capacity_bytes if config.file else 0
    peers = config.cluster.peers if config.cluster else None
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
            file_admission=config.file_admission,
            file_day_bytes=config.file_day_bytes,
            file_spent_bytes=files.spent_bytes() if files else 0,
            learned=files.learned if files else Learned(),
            connection_count_max=CONNECTION_COUNT_MAX,
            quotas=config.quotas,
            tell_changes=config.events is not None,
            tell_offers=config.cluster is not None,
            tell_stories=config.trace is not None,
            follows=member is not None and member.memory is not None,
            fetches=peers is not None,
            node=config.cluster.node if config.cluster else "",
            landing_bytes=peers.landing_bytes if peers else 0,
            fetches_always=peers is not None and peers.is_fetched_always,
        ),
        memory.journal,
    )
