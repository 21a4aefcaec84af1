"""The node's transfer worker over a scripted child: who is connected and forgotten when, and what
an end of the child ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from kvstore.errors import ProtocolError
from kvstore.node.node import MonotonicClock
from kvstore.peers import transfer_worker
from kvstore.peers.transfer_worker import (
    TransferWorker,
    TransferWorkerChild,
)
from kvstore.transport.pieces import make_pieces
from kvstore.wire import transfer_worker as wire
from kvstore.wire.transfer_worker import (
    Beat,
    Connect,
    Done,
    Forget,
    FromNode,
    FromTransferWorker,
    MovePieces,
    Registered,
    Unable,
    encode,
)

LIMIT_S = 60.0
BEGIN = wire.Begin("tcp", "a", 1 << 20, {})
PIECES = make_pieces([0], [0], [8])


class ScriptedChild:
    """Says what a test lets it say, and ends when it is told to."""

    def __init__(self, *_: object, **__: object) -> None:
        self.socket, self._its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pidfd, self._life = os.pipe()
        self.pid, self.unsent = 1, ()
        self.heard: list[tuple[str, str]] = []
        self.posted: list[int] = []

    @property
    def has_ended(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def flush(self) -> None: ...

    def say(self, *messages: FromNode) -> bool:
        for message in messages:
            assert isinstance(message, Connect | Forget | MovePieces)
            self.heard.append((type(message).__name__, message.peer))
            if isinstance(message, MovePieces):
                self.posted.append(message.transfer)
        return True

    def hear(self) -> Iterator[FromTransferWorker]:
        while select.select([self.socket], [], [], 0)[0] and (data := self.socket.recv(1 << 16)):
            yield wire.decode_from_transfer_worker(data)

    def tell(self, *messages: FromTransferWorker) -> None:
        for message in messages:
            self._its.send(encode(message))

    def signal(self, number: signal.Signals) -> None:
        self.end()

    def end(self) -> None:
        os.write(self._life, b"!")

    def close(self) -> int:
        for fd in (self.pidfd, self._life):
            os.close(fd)
        self.socket.close()
        self._its.close()
        return 9


class Scripted(TransferWorker):
    """A transfer worker, and how often its descriptor has changed."""

    def __init__(self) -> None:
        super().__init__(-1, -1, BEGIN, MonotonicClock())
        self.told: list[bytes] = []
        self.changed = lambda: self.told.append(self.descriptor)
        self._started = asyncio.Event()

    @property
    def child(self) -> ScriptedChild:
        assert isinstance(self._child, ScriptedChild)
        return self._child

    async def hear(self, *messages: FromTransferWorker) -> None:
        """Hears all of these in one turn."""
        self.child.tell(*messages)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not select.select([self.child.socket], [], [], 0)[0]

    def start(self) -> None:
        super().start()
        self._started.set()

    async def another(self) -> None:
        """Ends the child; returns when there is another one."""
        self._started.clear()
        self.child.end()
        await self._started.wait()

    async def begin(self, count: int) -> list[asyncio.Task[str]]:
        """Begins so many reads from a peer."""
        reads = [
            asyncio.create_task(self.move("b", b"its", PIECES, timeout_s=60)) for _ in range(count)
        ]
        await asyncio.sleep(0)
        return reads


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    monkeypatch.setattr(transfer_worker, "TransferWorkerChild", ScriptedChild)
    return Scripted()


def up(descriptor: bytes, *, ends_reads: bool = True) -> Registered:
    return Registered(descriptor, ends_reads)


def run(worker: Scripted, steps: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        worker.start()
        try:
            await asyncio.wait_for(steps, LIMIT_S)
        finally:
            worker.close()

    asyncio.run(main())


def test_every_change_of_the_descriptor_is_told_once(worker: Scripted) -> None:
    async def steps() -> None:
        await worker.hear(up(b"one"), up(b"one"))
        await worker.another()
        assert worker.trouble == "the transfer worker ended: it ended with status 9"
        await worker.hear(up(b"two"))
        assert worker.trouble == ""

    run(worker, steps())
    assert worker.told == [b"one", b"", b"two"]


def test_a_back_end_that_was_never_usable_is_not_started_again(worker: Scripted) -> None:
    async def steps() -> None:
        await worker.hear(Unable("no device"))
        worker.child.end()
        await asyncio.sleep(0.05)
        assert worker.pid is None
        assert worker.trouble == "blocks cannot be moved: no device"

    run(worker, steps())
    assert worker.told == []


def test_nothing_is_begun_by_a_child_that_has_said_that_it_ends(worker: Scripted) -> None:
    async def steps() -> None:
        await worker.hear(up(b"one"))
        await worker.another()
        await worker.hear(up(b"two"), Unable("its certificate cannot be used"))
        trouble = await worker.move("b", b"its", PIECES, timeout_s=60)
        assert trouble == "the transfer worker takes nothing now"
        assert worker.child.heard == []
        await worker.another()
        assert worker.trouble == "the transfer worker ended: its certificate cannot be used"

    run(worker, steps())


@pytest.mark.parametrize("ends_reads", [False, True])
def test_a_peer_that_is_read_from_is_forgotten_when_that_has_ended(
    worker: Scripted, *, ends_reads: bool
) -> None:
    # With NIXL a session that ended would leave its reads in limbo, and the child to be killed.
    async def steps() -> None:
        child = worker.child
        (before,) = await worker.begin(1)
        assert await before == "the transfer worker is starting"
        assert child.heard == []
        await worker.hear(up(b"one", ends_reads=ends_reads))
        reads = await worker.begin(2)
        assert child.heard == [("Connect", "b"), ("MovePieces", "b"), ("MovePieces", "b")]
        child.heard.clear()
        worker.forget("b")
        for number in list(child.posted):
            assert child.heard == ([("Forget", "b")] if ends_reads else [])
            await worker.hear(Done(number))
        assert [await each for each in reads] == ["", ""]
        assert child.heard == [("Forget", "b")]

    run(worker, steps())


def test_a_peer_is_forgotten_once_when_its_reads_end_together(worker: Scripted) -> None:
    async def steps() -> None:
        await worker.hear(up(b"one", ends_reads=False))
        reads = await worker.begin(2)
        worker.forget("b")
        worker.child.heard.clear()
        await worker.hear(*map(Done, worker.child.posted))
        assert [await each for each in reads] == ["", ""]
        assert worker.child.heard == [("Forget", "b")]

    run(worker, steps())


def test_a_peer_that_is_read_from_again_is_not_forgotten(worker: Scripted) -> None:
    async def steps() -> None:
        await worker.hear(up(b"one", ends_reads=False))
        reads = await worker.begin(1)
        worker.forget("b")
        reads += await worker.begin(1)
        for number in list(worker.child.posted):
            await worker.hear(Done(number))
        assert [await each for each in reads] == ["", ""]
        assert worker.child.heard == [("Connect", "b"), ("MovePieces", "b"), ("MovePieces", "b")]

    run(worker, steps())


def test_a_peer_that_was_given_up_is_connected_again(worker: Scripted) -> None:
    async def steps() -> None:
        await worker.hear(up(b"one"))
        late = asyncio.create_task(worker.move("b", b"its", PIECES, timeout_s=0))
        await asyncio.sleep(0.01)
        assert worker.child.heard == [("Connect", "b"), ("MovePieces", "b"), ("Forget", "b")]
        await worker.hear(wire.Failed(worker.child.posted[0], ""))
        assert await late == "it failed"
        worker.child.heard.clear()
        (read,) = await worker.begin(1)
        assert worker.child.heard == [("Connect", "b"), ("MovePieces", "b")]
        await worker.hear(Done(worker.child.posted[1]))
        assert await read == ""

    run(worker, steps())


def test_peers_that_found_no_room_are_said_at_the_first_and_when_they_doubled(
    worker: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    async def steps() -> None:
        await worker.hear(up(b"one"), *map(Beat, (0, 1, 1, 2, 3, 4)))
        await worker.another()
        await worker.hear(up(b"another"), Beat(1))

    run(worker, steps())
    said = [record.getMessage() for record in caplog.records if "refused peers" in record.message]
    assert [text.split(" times")[0][-1] for text in said] == ["1", "2", "4", "1"]
    assert worker.refused == 5, "those of the child before included"


_SPEAKER = """if True:
    import socket, sys
    with socket.socket(fileno=int(sys.argv[1])) as end:
        end.recv(65536)  # Begin: unread, it would end the connection with an error
        for data in {data}:
            end.send(data)
"""


def test_messages_before_a_malformed_one_are_heard() -> None:
    said = [encode(Done(7)), b"not a message", encode(Done(8))]
    arena = os.memfd_create("arena")
    heard: list[object] = []
    try:
        child = TransferWorkerChild(
            arena, arena, BEGIN, program=("-I", "-S", "-c", _SPEAKER.format(data=said))
        )
        select.select([child.pidfd], [], [])
        with pytest.raises(ProtocolError):
            heard.extend(child.hear())
        child.close()
    finally:
        os.close(arena)
    assert heard == [Done(7)]
