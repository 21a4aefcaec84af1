"""The background scrub of dram.

    the loop ──Engine.sealed──▶ list of blocks ──hashed here, slowly──▶ Scrubbed ──▶ the loop

One thread. A block is copied and hashed without the interpreter's lock; its generation is read
after that, so a slot that was reused meanwhile is nobody's fault. The loop is asked for lists of
some hundred blocks and answers when it gets to it: a busy node is scrubbed later.

Does not cover: what is logged (`files.PassLog`), which blocks, and what becomes of bad ones
(`kvstore.engine.trust`), how fast (`kvstore.tiers.file.config`), the disk tier's scrub
(`kvstore.tiers.file.scrub`).
"""

from __future__ import annotations

import logging
import threading
from typing import Final

import numpy as np

from kvstore.engine.trust import SealedBlock
from kvstore.errors import NodeBusy
from kvstore.node.driver import Driver, StepFailed
from kvstore.node.files import PassLog
from kvstore.ports import Memory
from kvstore.tier_events import Scrubbed
from kvstore.tiers.file.config import PASS_PAUSE_S, ScrubRate
from kvstore.types import SlotId, Tier as TierName
from kvstore.wire.record import checksum_of

ASK_TIMEOUT_S: Final = 2.0
BUSY_PAUSE_S: Final = 1.0
"""Pause after the loop was busy, or failed."""
IDLE_PAUSE_S: Final = 0.05
"""Pause after a list without blocks: of an arena that is all but empty, or of spaces that no engine
has named yet, there are thousands in a row."""

_log = logging.getLogger(__name__)


class DramScrub:
    """Verifies sealed blocks of dram, over and over, from `start` until `close`."""

    def __init__(self, driver: Driver, tier: Memory, rate: ScrubRate) -> None:
        self._driver = driver
        self._tier = tier
        self._rate = rate
        self._log = PassLog("dram")
        self._buffer = memoryview(b"")
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)

    def start(self) -> None:
        """Start the thread. Once."""
        self._thread.start()

    def close(self) -> None:
        """End after the block at hand. Idempotent."""
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        word, has_failed = 0, False
        while not self._leaving.is_set():
            try:
                word = self.look(word)
            except NodeBusy:
                self._leaving.wait(BUSY_PAUSE_S)
            except StepFailed:
                if not has_failed:
                    _log.warning("scrub of dram: processing the findings failed; trying again")
                has_failed = True
                self._leaving.wait(BUSY_PAUSE_S)
            else:
                has_failed = False
                if word == 0:
                    self._leaving.wait(PASS_PAUSE_S)

    def look(self, first_word: int) -> int:
        """Verify the next few blocks, from `first_word` of the arena on. Returns the word to go on
        from, 0 at the end of a pass.

        Raises:
            NodeBusy: the loop has other things to do; look again from the same word.
            StepFailed: it could not take what was found; the same.
        """
        batch = self._driver.query(
            lambda engine: engine.scrubs.sealed(first_word), timeout_s=ASK_TIMEOUT_S
        )
        bad: list[SealedBlock] = []
        for block in batch.blocks:
            size = block.scope.block_bytes
            pause_s = self._rate.seconds(size, held_bytes=self._tier.capacity_bytes)
            if self._leaving.wait(pause_s):
                return first_word
            bad += [] if self._is_good(block) else [block]
        event = Scrubbed(
            TierName.DRAM,
            len(batch.blocks),
            sum(block.scope.block_bytes for block in batch.blocks),
            slots=np.array([block.slot for block in bad], "<u4").tobytes(),
            generations=np.array([block.generation for block in bad], "<u8").tobytes(),
            pass_ended=batch.next_word == 0,
        )
        if event.blocks or event.pass_ended:
            self._driver.tell(event, timeout_s=ASK_TIMEOUT_S)
        if not event.blocks:
            self._leaving.wait(IDLE_PAUSE_S)
        self._log.add(event, len(bad), bad[0].key if bad else b"")
        return batch.next_word

    def _is_good(self, block: SealedBlock) -> bool:
        """Whether a block matches its checksum. True, too, if its slot was given to another block
        meanwhile: then nothing can be said."""
        slot, size = SlotId(block.slot), block.scope.block_bytes
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        payload = self._buffer[:size]
        self._tier.read(slot, payload)
        if checksum_of(block.scope.prefix() + block.key, [payload]) == block.checksum:
            return True
        return self._tier.generation(slot) != block.generation
