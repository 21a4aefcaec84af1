"""A push between two real nodes, held at a stage while something happens to somebody.

    stage                  who is stopped, so that it lasts    how it is seen
    before the grant       nobody: nothing is expected yet
    mid push               the decode node's transfer worker   bytes wait in its sockets, or it
                                                               was killed for its silence
    after the last chunk   the process of the decode node      the other node has said all
    after the seal         nobody                              the lease has all blocks

Node b prefills, node a decodes. From the second stage on half of the blocks have come before.

Does not cover: what happens then, and what must hold (`test_pushes`, `test_partition`).
"""

from __future__ import annotations

import contextlib
from itertools import count
from pathlib import Path
from typing import Final, Self

import psutil

from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.wire.messages import (
    LeaseRelease,
    LeaseReply,
    PushClose,
    PushExpect,
    PushOpen,
)
from tests.integration.cluster.other_engine import OtherEngine
from tests.integration.node.conftest import eventually
from tests.kit.gauges import descriptors
from tests.kit.peers import PeerPair, attached, metrics, transfer_worker_of

STAGES: Final = ("before the grant", "mid push", "after the last chunk", "after the seal")
BLOCKS: Final = 64
HALF: Final = BLOCKS // 2
LANDING: Final = 16 << 20
FLAGS: Final = ("--landing", str(LANDING), "--slab", "4MiB")
DEADLINE_MS: Final = 5_000
ENDS_S: Final = 60.0
BASELINE_S: Final = 25.0
"""Promise P3 says 15 s; a busy machine is given more."""
QUARANTINED: Final = 'kvstore_slots{state="quarantined"}'
BASELINE: Final = {
    'kvstore_landing_bytes{state="free"}': LANDING,
    'kvstore_pushes{side="decode"}': 0,
    'kvstore_pushes{side="prefill"}': 0,
    "kvstore_leases": 0,
    'kvstore_slots{state="granted"}': 0,
    QUARANTINED: 0,
    'kvstore_pinned_bytes{tier="dram"}': 0,
}
"""Pinned is what a transfer worker writes from: to a peer that has died it may be writing until its
deadline, when it is killed; what comes next would find it starting."""
_numbers = count()


def fresh() -> tuple[str, list[bytes]]:
    """Name of a transfer, and the keys of its blocks."""
    name = f"cmpl-{next(_numbers)}"
    return name, make_keys(BLOCKS, seed=name)


class Push:
    """One push. Use as a context: who is stopped for it goes on in any case."""

    def __init__(
        self, pair: PeerPair, prefill: RawEngine | OtherEngine, decode: RawEngine | OtherEngine
    ) -> None:
        self._pair, self._prefill, self._decode = pair, prefill, decode
        self.name, self.keys = fresh()
        self.reply: LeaseReply | None = None
        self.held: psutil.Process | None = None
        """Who is stopped."""
        prefill.timeout_s = decode.timeout_s = ENDS_S
        assert prefill.scheduler.send(PushOpen(self.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()

    def reach(self, stage: str) -> None:
        """Bring it to a stage, from its beginning."""
        if stage == "before the grant":
            self._prefill.store(self.keys)
        else:
            self.begin()
            self.hold(stage)

    def begin(self) -> None:
        """Half of it comes."""
        self.expect()
        self._prefill.store(self.keys[:HALF])
        self._until_come(HALF)

    def hold(self, stage: str) -> None:
        """Bring it to one of the later stages."""
        pushed = self._pushed()
        if stage == "mid push":
            self._stop(transfer_worker_of(self._pair.a))
        elif stage == "after the last chunk":
            self._stop(psutil.Process(self._pair.a.pid))
        self._prefill.store(self.keys[HALF:])
        if stage == "mid push":
            assert self.held is not None
            held = self.held
            assert eventually(lambda: unread_bytes(held) != 0, timeout_s=ENDS_S)
        elif stage == "after the last chunk":
            assert eventually(lambda: self._pushed() == pushed + BLOCKS - HALF, timeout_s=ENDS_S)
        else:
            self._until_come(BLOCKS)

    def expect(self) -> None:
        keys = b"".join(self.keys)
        self._decode.scheduler.send(PushExpect(self.name, "b", keys, DEADLINE_MS))
        self.reply = self._decode.ask(self.keys)

    def go_on(self) -> None:
        """Nobody is stopped for it any more."""
        held, self.held = self.held, None
        if held is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was killed
                held.resume()

    def close(self) -> None:
        """The prefill engine stores no more."""
        self._prefill.scheduler.send(PushClose(self.name))

    def finish(self) -> int:
        """The request ends, every block that came is right. Returns how many came."""
        if self.reply is None:
            self.expect()
        assert isinstance(self._decode, RawEngine)
        assert self.reply is not None
        reply = self._decode.finish(self.reply)
        assert self._decode.is_right(reply, self.keys)
        self._decode.scheduler.send(LeaseRelease([reply.lease]))  # perhaps to nobody
        return len(reply.slots) // 4 // self._decode.columns

    def _until_come(self, blocks: int) -> None:
        reply = self.reply
        assert reply is not None

        def have_come() -> bool:
            self._decode.hear()
            return self._decode.coming(reply) <= BLOCKS - blocks

        assert eventually(have_come, timeout_s=ENDS_S)

    def _stop(self, process: psutil.Process) -> None:
        self.held = process
        process.suspend()

    def _pushed(self) -> float:
        """Blocks that node b has said to have pushed."""
        with self._pair.inside("b"):
            return metrics(self._pair.b, "kvstore_pushed_blocks_total")[0]


def unread_bytes(process: psutil.Process) -> int | None:
    """Bytes that have arrived at a process, and that it has not read from its TCP sockets. None: it
    is gone: a transfer worker is killed after 5 s of silence, and on a busy machine bytes may come
    later."""
    pid, found = process.pid, 0
    try:
        its = {name[8:-1] for name in descriptors(pid) if name.startswith("socket:")}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text("ascii").splitlines()[1:]:
                words = line.split()
                is_its = words[9] in its and words[3] == "01"
                found += int(words[4].partition(":")[2], 16) * is_its
    except (FileNotFoundError, ProcessLookupError, psutil.Error):
        return None
    return found if process.is_running() else None


def at_baseline(pair: PeerPair) -> None:
    """Nothing is expected, granted or in limbo on either node."""

    seen: dict[str, list[float]] = {}

    def free() -> bool:
        for name, node in (("a", pair.a), ("b", pair.b)):
            with pair.inside(name):
                seen[name] = metrics(node, *BASELINE)
        return all(values == list(BASELINE.values()) for values in seen.values())

    assert eventually(free, timeout_s=BASELINE_S), (seen, BASELINE)


def heals(pair: PeerPair) -> bool:
    """Whether a push comes to go well, with transfer workers that stay: one that writes to a dead
    peer is killed at the write's deadline, when others may have been written long since."""
    while True:
        restarts = _transfer_worker_restarts(pair)
        if not _is_pushed_whole(pair):
            return False
        at_baseline(pair)
        if _transfer_worker_restarts(pair) == restarts:
            return True


def _is_pushed_whole(pair: PeerPair) -> bool:
    """Whether a push comes to go well."""
    with attached(pair.b.socket) as prefill, attached(pair.a.socket) as decode:

        def is_whole() -> bool:
            with Push(pair, prefill, decode) as push:
                push.reach("before the grant")
                push.close()
                return push.finish() == BLOCKS

        return eventually(is_whole, timeout_s=ENDS_S)


def _transfer_worker_restarts(pair: PeerPair) -> list[tuple[float, ...]]:
    """Of both nodes, each with the process that counts them."""
    found: list[tuple[float, ...]] = []
    for name, node in (("a", pair.a), ("b", pair.b)):
        with pair.inside(name):
            found.append((node.pid, *metrics(node, "kvstore_transfer_worker_restarts_total")))
    return found
