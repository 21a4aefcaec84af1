"""The memory of a node: taken over from the process before, or made.

Nothing is taken over by halves. Without a journal that can be trusted, the processes that still
write to the arena are unknown: then all of it is let go, and new memory is made.

Covers: arena, generation page, journal, the ranks of earlier processes. Does not cover: how they
come here (`handover`), what the engine makes of them (`kvstore.engine.state`).
"""

from __future__ import annotations

import logging
import os
from typing import Final, NamedTuple

from kvstore.arena import Arena, journal_memory, wait_for_holders
from kvstore.config.node import NodeConfig
from kvstore.engine.events import Adopt, AdoptedWriter
from kvstore.engine.memory.journal import UNREADABLE, Journal, JournalUnusable
from kvstore.errors import ConfigError, ProtocolError
from kvstore.net.process import process_of
from kvstore.supervisor.handover import Handover
from kvstore.types import ConnectionId, Incarnation
from kvstore.units import format_size
from kvstore.wire.messages import HelloRank, decode_from_engine

HOLDERS_WAIT_S: Final = 30.0
"""Longest wait for the end of transfer workers of the process before: the kernel takes less to
unmap 1 TiB of small pages twice."""
GENERATIONS_PER_LIFE: Final = 1 << 40
"""Each process has its own generations: a reader of an earlier one finds its copy void."""
_ARENA, _JOURNAL, _HOLDERS = "arena", "journal", "holders"

_log = logging.getLogger(__name__)


class NodeMemory(NamedTuple):
    """Memory of a node process, and what it takes over from the process before."""

    arena: Arena
    journal: Journal
    incarnation: Incarnation
    first_generation: int
    adopt: Adopt | None
    """State taken over from the process before, whose ranks' pidfds are left in the `Handover`;
    None: everything is new."""


def take_memory(config: NodeConfig, incarnation: Incarnation, handover: Handover) -> NodeMemory:
    """The memory that the supervisor holds if it can be used, else new memory, which it holds then.

    Raises:
        ConfigError: the machine does not have as much memory.
        SupervisorGone: it ended.
    """
    first_generation = 1 + handover.begin.life * GENERATIONS_PER_LIFE
    found: tuple[Journal, Adopt] | None = None
    if handover.memory:
        try:
            found = _examine(config, handover)
        except (JournalUnusable, ProtocolError, OSError) as error:
            _log.error("all that was in memory is lost: its journal cannot be used: %s", error)
            handover.drop()
    try:
        arena = Arena(
            arena_bytes=config.dram_bytes,
            incarnation=incarnation,
            held_fd=handover.memory.pop(_ARENA, -1),
            first_generation=first_generation,
            share_page=handover.share_page,
        )
        # Before a transfer worker is started.
        handover.keep(_HOLDERS, arena.holders_fd)
        if found is None:
            handover.keep(_ARENA, arena.arena_fd)
            journal, adopt = _new_journal(config, handover), None
        else:
            journal, adopt = found
    except OSError as error:
        raise ConfigError(
            f"dram of {format_size(config.dram_bytes)} cannot be had: {error.strerror};"
            " choose a smaller --dram"
        ) from None
    return NodeMemory(arena, journal, incarnation, first_generation, adopt)


def _new_journal(config: NodeConfig, handover: Handover) -> Journal:
    fd, memory = journal_memory(Journal.size_bytes(config.dram_bytes, config.slab_bytes))
    journal = Journal.fresh(
        arena_bytes=config.dram_bytes,
        slab_bytes=config.slab_bytes,
        quotas=config.quotas,
        memory=memory,
    )
    handover.keep(_JOURNAL, fd)
    os.close(fd)
    return journal


def _wait_for_transfer_workers(holders_fd: int) -> None:
    """Wait for the end of the transfer worker of the process before, which was killed with it and
    may still write, in the kernel, to slots that are taken for free. Raises JournalUnusable: it has
    not ended in time."""
    ended = wait_for_holders(holders_fd, timeout_s=HOLDERS_WAIT_S)
    os.close(holders_fd)
    if not ended:
        raise JournalUnusable(
            f"a transfer worker of the last process has not ended within {HOLDERS_WAIT_S:.0f} s,"
            " and may still write to its slots"
        )


def _examine(config: NodeConfig, handover: Handover) -> tuple[Journal, Adopt]:
    """The journal that the supervisor holds, and the state in it to go on with. Raises
    JournalUnusable, ProtocolError, OSError: it cannot be used."""
    if set(handover.memory) != {_ARENA, _JOURNAL, _HOLDERS}:
        raise JournalUnusable("a part of it was never kept")
    _wait_for_transfer_workers(handover.memory.pop(_HOLDERS))
    size_bytes = Journal.size_bytes(config.dram_bytes, config.slab_bytes)
    fd, memory = journal_memory(size_bytes, held_fd=handover.memory.pop(_JOURNAL))
    os.close(fd)
    journal = Journal(memory, arena_bytes=config.dram_bytes, slab_bytes=config.slab_bytes)
    writers = []
    for number, (its, pidfd) in handover.writers.items():
        hello = decode_from_engine(its)
        assert isinstance(hello, HelloRank), "a scheduler was registered as a writer"
        process = process_of(pidfd, number)
        writers.append(AdoptedWriter(ConnectionId(number), hello, process))
    numbers = {int(writer.connection) for writer in writers}
    found = journal.examine(quotas=config.quotas, writers=numbers)
    lost_count = int((found.slot_bytes == UNREADABLE).sum())
    if len(found.doubtful) or lost_count:
        _log.error(
            "the journal is damaged: %d slots and %d slabs are out of use until the whole node is"
            " restarted; look at this machine's memory",
            *(len(found.doubtful), lost_count),
        )
    return journal, Adopt(found, tuple(writers))
