"""The transfer worker on a loop: whoever serves is told when its memory is reached by another
descriptor."""

from __future__ import annotations

import asyncio
import os
import select

import pytest

from kvstore.errors import ProtocolError
from kvstore.node.node import MonotonicClock
from kvstore.peers.transfer_worker import (
    Down,
    TransferEnded,
    TransferWorker,
    TransferWorkerChild,
    TransferWorkerEvent,
    TransferWorkerSettings,
    Unusable,
    Up,
)
from kvstore.peers.transfer_worker_host import TransferWorkerHost
from kvstore.ports import Pieces
from kvstore.transport.pieces import make_pieces
from kvstore.wire.transfer_worker import Beat, Direction, Done, Registered, encode


class ScriptedTransferWorker:
    """Says what a test lets it say."""

    def __init__(self) -> None:
        self.events: list[TransferWorkerEvent] = []
        self.taken: asyncio.Queue[TransferWorkerEvent] = asyncio.Queue()
        self.said: list[tuple[str, str]] = []
        self.posted: dict[int, str] = {}
        """Transfers that have not ended, each with its peer."""
        self._ends = os.pipe()

    def start(self) -> None: ...

    def fileno(self) -> int:
        return self._ends[0]

    def read(self) -> list[TransferWorkerEvent]:
        taken, self.events = self.events, []
        for event in taken:
            os.read(self._ends[0], 1)
            if isinstance(event, TransferEnded):  # as of one batch: all of it is known at once
                self.posted.pop(event.transfer)
            # Heard after the host has taken it: on the next turn of the loop.
            asyncio.get_running_loop().call_soon(self.taken.put_nowait, event)
        return taken

    def say(self, event: TransferWorkerEvent) -> None:
        self.events.append(event)
        os.write(self._ends[1], b"!")

    def connect(self, peer: str, descriptor: bytes) -> None:
        self.said.append(("connect", peer))

    def is_reading(self, peer: str) -> bool:
        return peer in self.posted.values()

    def forget(self, peer: str) -> None:
        self.said.append(("forget", peer))

    def post(
        self, transfer: int, peer: str, pieces: Pieces, direction: Direction, *, deadline_ns: int
    ) -> bool:
        self.said.append(("post", peer))
        self.posted[transfer] = peer
        return True

    def next_ns(self) -> int:
        return 0

    def close(self) -> list[TransferWorkerEvent]:
        for end in self._ends:
            os.close(end)
        return []


def up(descriptor: bytes, *, ends_reads: bool = True) -> Up:
    return Up(Registered(descriptor, ends_reads))


PIECES = make_pieces([0], [0], [8])


async def started(scripted: ScriptedTransferWorker) -> TransferWorkerHost:
    """A host whose transfer worker is up, with a back end that ends no reads."""
    host = TransferWorkerHost(scripted, MonotonicClock())  # type: ignore[arg-type]
    host.start()
    scripted.say(up(b"one", ends_reads=False))
    await asyncio.wait_for(scripted.taken.get(), 60)
    return host


def test_every_change_of_the_descriptor_is_told_once() -> None:
    scripted = ScriptedTransferWorker()

    async def main() -> list[bytes]:
        host, told = TransferWorkerHost(scripted, MonotonicClock()), []  # type: ignore[arg-type]
        host.changed = lambda: told.append(host.descriptor)
        host.start()
        words: list[TransferWorkerEvent] = [up(b"one"), up(b"one"), Down("killed"), up(b"two")]
        words += [Unusable("no device"), Down("it ended with status 2")]
        for event in words:
            scripted.say(event)
            await asyncio.wait_for(scripted.taken.get(), 60)
        assert "no device" in host.trouble
        host.close()
        return told

    assert asyncio.run(main()) == [b"one", b"", b"two", b""]


@pytest.mark.parametrize("ends_reads", [False, True])
def test_a_peer_that_is_read_from_is_forgotten_when_that_has_ended(*, ends_reads: bool) -> None:
    # With NIXL a session that ended would leave its reads in limbo, and the transfer worker to be
    # killed.
    scripted = ScriptedTransferWorker()

    async def main() -> None:
        host = TransferWorkerHost(scripted, MonotonicClock())  # type: ignore[arg-type]
        host.start()

        async def move() -> TransferEnded:
            return await host.move("b", b"its", make_pieces([0], [0], [8]), timeout_s=60)

        assert (await move()).reason == "the transfer worker is starting"
        assert scripted.said == []
        scripted.say(up(b"one", ends_reads=ends_reads))
        await asyncio.wait_for(scripted.taken.get(), 60)
        moves = [asyncio.create_task(move()) for _ in range(2)]
        await asyncio.sleep(0)
        assert scripted.said == [("connect", "b"), ("post", "b"), ("post", "b")]
        scripted.said.clear()
        host.forget("b")
        assert scripted.said == ([("forget", "b")] if ends_reads else [])
        for number in list(scripted.posted):
            assert scripted.said == ([("forget", "b")] if ends_reads else [])
            scripted.say(TransferEnded(number, "b", good=True))
            await asyncio.wait_for(scripted.taken.get(), 60)
        assert all([(await each).good for each in moves])
        assert scripted.said == [("forget", "b")]
        host.close()

    asyncio.run(main())


def test_a_peer_is_forgotten_once_when_its_reads_end_together() -> None:
    scripted = ScriptedTransferWorker()

    async def main() -> None:
        host = await started(scripted)
        moves = [
            asyncio.create_task(host.move("b", b"its", PIECES, timeout_s=60)) for _ in range(2)
        ]
        await asyncio.sleep(0)
        host.forget("b")
        scripted.said.clear()
        for number in list(scripted.posted):
            scripted.say(TransferEnded(number, "b", good=True))
        assert all([(await each).good for each in moves])
        assert scripted.said == [("forget", "b")]
        host.close()

    asyncio.run(main())


def test_a_peer_that_is_read_from_again_is_not_forgotten() -> None:
    scripted = ScriptedTransferWorker()

    async def main() -> None:
        host = await started(scripted)
        moves = []
        for _ in range(2):
            moves.append(asyncio.create_task(host.move("b", b"its", PIECES, timeout_s=60)))
            await asyncio.sleep(0)
            if len(moves) == 1:
                host.forget("b")
        for number in list(scripted.posted):
            scripted.say(TransferEnded(number, "b", good=True))
            await asyncio.wait_for(scripted.taken.get(), 60)
        await asyncio.gather(*moves)
        assert scripted.said == [("connect", "b"), ("post", "b"), ("post", "b")]
        host.close()

    asyncio.run(main())


def test_peers_that_found_no_room_are_said_at_the_first_and_when_they_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transfer_worker = TransferWorker(
        -1, -1, 0, TransferWorkerSettings(backend="ucx", name="a"), MonotonicClock()
    )
    scripted = ScriptedTransferWorker()

    async def main() -> None:
        host = TransferWorkerHost(scripted, MonotonicClock())  # type: ignore[arg-type]
        host.start()
        for refused in (0, 1, 1, 2, 3, 4):
            for event in transfer_worker._take(Beat(refused)):
                scripted.say(event)
                await scripted.taken.get()
        host.close()

    try:
        asyncio.run(main())
        transfer_worker._take(up(b"another").registered)
        transfer_worker._take(Beat(1))
    finally:
        transfer_worker.close()
    said = [record.getMessage() for record in caplog.records if "refused peers" in record.message]
    assert [text.split(" times")[0][-1] for text in said] == ["1", "2", "4"]
    assert transfer_worker.refused == 5, "those of the transfer worker before included"


_SPEAKER = """if True:
    import socket, sys
    with socket.socket(fileno=int(sys.argv[1])) as end:
        end.recv(65536)  # Begin: unread, it would end the connection with an error
        for data in {data}:
            end.send(data)
"""


def test_messages_before_a_malformed_one_are_heard() -> None:
    said = [encode(Done(7)), b"not a message", encode(Done(8))]
    settings = TransferWorkerSettings(backend="tcp", name="a")
    arena = os.memfd_create("arena")
    heard: list[object] = []
    try:
        child = TransferWorkerChild(
            arena, arena, 0, settings, program=("-I", "-S", "-c", _SPEAKER.format(data=said))
        )
        select.select([child.pidfd], [], [])
        with pytest.raises(ProtocolError):
            heard.extend(child.hear())
        child.close()
    finally:
        os.close(arena)
    assert heard == [Done(7)]
