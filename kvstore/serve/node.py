"""Puts one node process together and takes it apart again.

    config ─▶ arena ─▶ tier ─▶ engine ─▶ attach ─▶ executor ─▶ driver, with inspect and http beside

Covers: order of start and stop, limits of the process. Does not cover: any of the parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.arena import Arena
from kvstore.engine.engine import Engine, EngineConfig
from kvstore.errors import ConfigError
from kvstore.ports import Clock
from kvstore.serve.attach import Attach
from kvstore.serve.clock import MonotonicClock
from kvstore.serve.config import NodeConfig
from kvstore.serve.driver import Driver
from kvstore.serve.executor import Executor
from kvstore.serve.files import FileEnd
from kvstore.serve.http import HttpServer
from kvstore.serve.inspect import InspectServer
from kvstore.serve.listener import Listener
from kvstore.serve.pages import EventCounters, NodeCollector, make_pages
from kvstore.serve.priority import prefer_this_thread
from kvstore.serve.scrub import DramScrub
from kvstore.tiers.dram import DramTier
from kvstore.tiers.file import FileTier
from kvstore.types import SLOT_BYTES_MIN, Incarnation
from kvstore.units import format_size
from kvstore.wire.learned import Learned

if TYPE_CHECKING:
    from kvstore.serve.publish import Publisher

CONNECTION_COUNT_MAX: Final = 256
FILE_ROW_BYTES: Final = 256 << 10
"""One row of metadata for so much of the file tier. Blocks of models that serve are larger; with
smaller ones a part of the tier stays unused."""
HELD_TIMEOUT_S: Final = 1.0
NEWCOMER_COUNT_MAX: Final = 16
SWITCH_INTERVAL_S: Final = 0.0005
_PR_SET_DUMPABLE: Final = 4

_log = logging.getLogger(__name__)


class Running(NamedTuple):
    """A node that serves, as told to `on_ready`."""

    socket: str
    dram_bytes: int
    dram_note: str
    slab_bytes: int
    file: str
    """Directory and size of the file tier; empty when there is none."""
    huge_pages: bool
    metrics_url: str
    """Empty when off."""
    events: str
    """Where KV events and their replay are; empty when off."""
    incarnation: Incarnation

    def line(self) -> str:
        """The line that tells an operator, and a script, that the node is ready."""
        note = f" ({self.dram_note})" if self.dram_note else ""
        return (
            f"kvstore node ready: socket={self.socket} metrics={self.metrics_url or 'off'}"
            f" events={self.events or 'off'}"
            f" incarnation={self.incarnation:016x} huge-pages={'yes' if self.huge_pages else 'no'}"
            f" slab={format_size(self.slab_bytes)} file={self.file or 'off'}"
            f" dram={format_size(self.dram_bytes)}{note}"
        )


def run_node(config: NodeConfig, on_ready: Callable[[Running], None]) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP (a closed terminal). Call it in the main thread.

    Raises:
        ConfigError: the node cannot start with this configuration on this machine.
    """
    harden_process()
    with contextlib.ExitStack() as stack:
        driver, running = _assemble(config, MonotonicClock(), stack)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: driver.stop())
        # Start-up objects live for ever: no collection needs to look at them again.
        gc.freeze()
        on_ready(running)
        # Last: threads that are made before have the place of any other.
        prefer_this_thread()
        driver.run()
    _log.info("stopped")


def _assemble(
    config: NodeConfig, clock: Clock, stack: contextlib.ExitStack
) -> tuple[Driver, Running]:
    """Make all parts, in order; `stack` takes them apart in the opposite one."""
    incarnation = Incarnation(secrets.randbelow(2**63 - 1) + 1)
    listener = Listener(
        config.socket, others_may_connect=bool(config.allow_uids - {0, os.geteuid()})
    )
    stack.callback(listener.close)
    arena = _make_arena(config, incarnation)
    tier = DramTier(arena)
    stack.callback(tier.close)
    attach = _make_attach(config, listener, clock)
    stack.callback(attach.close)
    files = _open_files(config, arena, clock, stack)
    publisher = _open_publisher(config, incarnation, clock, stack)
    driver = Driver(
        engine=_make_engine(config, arena, incarnation, files),
        tier=tier,
        attach=attach,
        executor=Executor(
            tier=tier,
            attach=attach,
            arena_fd=arena.arena_fd,
            generation_fd=arena.generation_fd,
            files=files,
            publish=publisher.put if publisher else None,
        ),
        clock=clock,
        files=files,
    )
    url = ""
    if config.http is not None:
        collector = NodeCollector(
            driver=driver,
            attach=attach,
            tier=tier,
            incarnation=incarnation,
            version=version("kvstore"),
            events=publisher.counters if publisher else EventCounters(),
        )
        http = HttpServer(config.http, make_pages(collector, driver, listener, files, publisher))
        stack.callback(http.close)
        http.start()
        url = http.url + "/metrics"
    rpc = InspectServer(config.socket, driver)
    stack.callback(rpc.close)
    tier.start()
    if config.scrub is not None:
        scrub = DramScrub(driver, tier, config.scrub)
        stack.callback(scrub.close)
        scrub.start()
    if publisher is not None:
        _start_publisher(publisher, driver)
    return driver, _running(config, arena, incarnation, url, publisher)


def _running(
    config: NodeConfig,
    arena: Arena,
    incarnation: Incarnation,
    metrics_url: str,
    publisher: Publisher | None,
) -> Running:
    return Running(
        socket=str(config.socket),
        dram_bytes=config.dram_bytes,
        dram_note=config.dram_note,
        slab_bytes=config.slab_bytes,
        file=f"{config.file.home}:{format_size(config.file.capacity_bytes)}" if config.file else "",
        huge_pages=arena.huge_pages,
        metrics_url=metrics_url,
        events=f"{publisher.endpoint},{publisher.replay_endpoint}" if publisher else "",
        incarnation=incarnation,
    )


def _open_publisher(
    config: NodeConfig, incarnation: Incarnation, clock: Clock, stack: contextlib.ExitStack
) -> Publisher | None:
    if config.events is None:
        return None
    try:
        # Only here: a node without --events needs no ZeroMQ.
        from kvstore.serve.publish import Publisher
    except ImportError:
        raise ConfigError("--events needs pyzmq: pip install 'kvstore[events]'") from None
    if config.events.beyond_loopback:
        _log.warning(
            "--insecure: whoever reaches %s reads, without TLS, which blocks this node holds",
            config.events.endpoint,
        )
    publisher = Publisher(config.events, incarnation=incarnation, clock=clock)
    stack.callback(publisher.close)
    return publisher


def _start_publisher(publisher: Publisher, driver: Driver) -> None:
    publisher.start(
        lambda row: driver.query(lambda engine: engine.held(row), timeout_s=HELD_TIMEOUT_S)
    )


def _make_attach(config: NodeConfig, listener: Listener, clock: Clock) -> Attach:
    return Attach(
        listener,
        allow_uids=config.allow_uids,
        # A process that attaches again holds two sockets for a moment.
        connection_count_max=CONNECTION_COUNT_MAX + NEWCOMER_COUNT_MAX,
        clock=clock,
    )


def _make_arena(config: NodeConfig, incarnation: Incarnation) -> Arena:
    try:
        return Arena(arena_bytes=config.dram_bytes, incarnation=incarnation)
    except OSError as error:
        raise ConfigError(
            f"dram of {format_size(config.dram_bytes)} cannot be had: {error.strerror};"
            " choose a smaller --dram"
        ) from None


def _open_files(
    config: NodeConfig, arena: Arena, clock: Clock, stack: contextlib.ExitStack
) -> FileEnd | None:
    if config.file is None:
        return None
    tier = FileTier.open(config.file, arena.array, clock)
    stack.callback(tier.close)
    return FileEnd(tier, day_bytes=config.file_day_bytes)


def _make_engine(
    config: NodeConfig, arena: Arena, incarnation: Incarnation, files: FileEnd | None
) -> Engine:
    file_bytes = config.file.capacity_bytes if config.file else 0
    return Engine(
        EngineConfig(
            incarnation=incarnation,
            arena_bytes=config.dram_bytes,
            slab_bytes=config.slab_bytes,
            generation_bytes=arena.generation_bytes,
            block_count_max=config.dram_bytes // SLOT_BYTES_MIN + file_bytes // FILE_ROW_BYTES,
            file_bytes=file_bytes,
            policy=config.policy,
            file_admission=config.file_admission,
            file_day_bytes=config.file_day_bytes,
            file_spent_bytes=files.spent_bytes() if files else 0,
            learned=files.learned if files else Learned(),
            connection_count_max=CONNECTION_COUNT_MAX,
            quotas=config.quotas,
            tell_changes=config.events is not None,
        )
    )


def harden_process() -> None:
    """Limits and protections of this process, before there is anything to protect."""
    # No core file and no ptrace by the same user: the arena is other people's prompts. It makes
    # /proc/self root's, but a process may always look at itself, which `pid_of` needs.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A thread that renders /metrics must not keep the loop from the interpreter for 5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
