"""The two caches as the measurements see them: an engine, a directory of files, and a few verbs.

`Side` is the port. What a verb costs is never measured: each side may bring itself into the state
that was asked for in its own way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from bench import disk
from bench.peers.lmcache import LMCacheEngineConfig, LMCacheServer
from bench.peers.memory import Memory, memory_of, open_memfds
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS
from kvstore.demo.stage import settled
from kvstore.testing.process import NodeProcess
from kvstore.units import GIB
from tests.kit.engines import EngineConfig
from tests.kit.models import SHAPES

Name = Literal["kvstore", "LMCache"]
REST_TIMEOUT_S: Final = 60.0
FILE: Final = 8 * GIB


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What both sides have in common."""

    model: Path
    dtype: Literal["float32", "bfloat16"]
    work: Path
    """Sockets, logs and files."""
    python: Path
    """Of the environment that LMCache is in."""
    kv_blocks: int
    """Of the engine's own cache."""
    memory_gib: int
    """Of either's dram."""
    with_files: bool

    def engine(self, socket: Path | None = None) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            dtype=self.dtype,
            # A request must fit the engine's own cache, of which it keeps a block for itself.
            max_model_len=min(SHAPES["bench"].position_count, (self.kv_blocks - 1) * BLOCK_TOKENS),
            kv_blocks=self.kv_blocks,
            max_num_seqs=8,
            socket=socket,
        )


class Side(Protocol):
    """One cache with an engine on it."""

    @property
    def name(self) -> Name: ...

    @property
    def engine(self) -> VllmServer:
        """The engine now: a restart may have brought another."""

    @property
    def files(self) -> Path:
        """Where it keeps blocks on disk."""

    def rest(self, blocks: int) -> None:
        """Wait until that many blocks of 128 tokens are on disk.

        Raises:
            TimeoutError: it took too long.
        """

    def empty_dram(self) -> None:
        """Let nothing be in dram, nor of the files in the page cache."""

    def restart(self, meanwhile: Callable[[], None]) -> None:
        """End the cache, call `meanwhile`, and start it again on what is on disk then."""

    def memory(self) -> Memory:
        """Of the cache, without the engine."""


class KVStoreSide:
    """A node and its engine, which outlives it."""

    name: Name = "kvstore"

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        self.files = setup.work / "files-kvstore"
        self._setup = setup
        self._stack = stack
        self._on_disk = 0
        self._node = self._start_node()
        config = setup.engine(self._node.socket)
        log = setup.work / "engine-kvstore.log"
        self.engine = stack.enter_context(VllmServer.start(config, log=log))
        settled(self.engine, self._node, lambda _dram, _disk: True)

    def _start_node(self) -> NodeProcess:
        setup = self._setup
        flags = ("--file", f"{self.files}:{FILE}") if setup.with_files else ()
        return self._stack.enter_context(
            NodeProcess.start(setup.work, dram=str(setup.memory_gib * GIB), flags=flags)
        )

    def rest(self, blocks: int) -> None:
        self._on_disk = settled(self.engine, self._node, lambda _, found: found >= blocks)

    def empty_dram(self) -> None:
        self.restart(lambda: None)
        settled(self.engine, self._node, lambda _, found: found >= self._on_disk)

    def restart(self, meanwhile: Callable[[], None]) -> None:
        self._node.kill()
        meanwhile()
        self._node = self._start_node()
        settled(self.engine, self._node, lambda _dram, _disk: True)
        disk.drop_page_cache(self.files)

    def memory(self) -> Memory:
        return memory_of(self._node.process.pid, shared=open_memfds(self._node.pid))


class LMCacheSide:
    """LMCache's server and its engine. A restart brings new ones of both: an engine that met the
    end of its server has been seen to end as well."""

    name: Name = "LMCache"

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        self.files = setup.work / "files-lmcache"
        self._setup = setup
        self._stack = stack.enter_context(ExitStack())
        self._start()

    def _start(self) -> None:
        setup = self._setup
        self._server = self._stack.enter_context(
            LMCacheServer.start(
                setup.python,
                log=setup.work / "lmcache.log",
                memory_gib=setup.memory_gib,
                files=self.files if setup.with_files else None,
            )
        )
        config = LMCacheEngineConfig(
            **vars(setup.engine()), python=setup.python, port=self._server.port
        )
        log = setup.work / "engine-lmcache.log"
        self.engine = self._stack.enter_context(VllmServer.start(config, log=log))

    def rest(self, blocks: int) -> None:
        deadline = time.monotonic() + REST_TIMEOUT_S
        while len(list(self.files.glob("*.data"))) < blocks:  # a chunk is a block
            if time.monotonic() > deadline:
                raise TimeoutError(f"LMCache did not write {blocks} chunks; see its log.")
            threading.Event().wait(0.1)

    def empty_dram(self) -> None:
        self.engine.forget()
        self._server.clear()
        disk.drop_page_cache(self.files)

    def restart(self, meanwhile: Callable[[], None]) -> None:
        self._stack.close()
        meanwhile()
        self._start()
        disk.drop_page_cache(self.files)

    def memory(self) -> Memory:
        return memory_of(self._server.pid, shared=(self._server.pool,))


@contextmanager
def both(setup: Setup) -> Iterator[tuple[Side, Side]]:
    """kvstore and LMCache, each with its engine, at the same time."""
    with ExitStack() as stack:
        yield KVStoreSide(setup, stack), LMCacheSide(setup, stack)
