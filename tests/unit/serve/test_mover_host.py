"""The mover on a loop: whoever lends is told when its memory is reached by another descriptor."""

from __future__ import annotations

import asyncio
import os

from kvstore.serve.clock import MonotonicClock
from kvstore.serve.mover import Down, MoverEvent, Unusable, Up
from kvstore.serve.mover_host import MoverHost
from kvstore.wire.mover import Registered


class ScriptedMover:
    """Says what a test lets it say."""

    def __init__(self) -> None:
        self.events: list[MoverEvent] = []
        self.taken: asyncio.Queue[MoverEvent] = asyncio.Queue()
        self._ends = os.pipe()

    def start(self) -> None: ...

    def fileno(self) -> int:
        return self._ends[0]

    def read(self) -> list[MoverEvent]:
        taken, self.events = self.events, []
        for event in taken:
            os.read(self._ends[0], 1)
            # Heard after the host has taken it: on the next turn of the loop.
            asyncio.get_running_loop().call_soon(self.taken.put_nowait, event)
        return taken

    def say(self, event: MoverEvent) -> None:
        self.events.append(event)
        os.write(self._ends[1], b"!")

    def next_ns(self) -> int:
        return 0

    def close(self) -> list[MoverEvent]:
        for end in self._ends:
            os.close(end)
        return []


def up(descriptor: bytes) -> Up:
    return Up(Registered("memory", descriptor, True, True, True))


def test_every_change_of_the_descriptor_is_told_once() -> None:
    scripted = ScriptedMover()

    async def main() -> list[bytes]:
        host, told = MoverHost(scripted, MonotonicClock()), []  # type: ignore[arg-type]
        host.changed = lambda: told.append(host.descriptor)
        host.start()
        words = (up(b"one"), up(b"one"), Down("killed"), up(b"two"), Unusable("no device"))
        for event in words:
            scripted.say(event)
            await asyncio.wait_for(scripted.taken.get(), 60)
        assert "no device" in host.trouble
        host.close()
        return told

    assert asyncio.run(main()) == [b"one", b"", b"two", b""]
