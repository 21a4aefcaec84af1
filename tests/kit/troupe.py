"""Engines whose scheduler and ranks are processes of their own, and the truth about their blocks.

    with Troupe() as troupe:
        engine = SplitEngine(troupe, "a")
        engine.attach(node.socket)
        engine.store(keys)
        engine.verify(keys)        # every byte, or Wrong; what is not there is a miss

The caller is the engine's core: it carries credits and leases from the scheduler to the ranks. What
a block's bytes are is known here, by its key alone, and the node is never asked. Does not cover:
what the processes do (`tests.kit.actor`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import xxhash

from kvstore.testing.raw_engine import HEAD_COUNT, LAYER_COUNT, make_space
from kvstore.types import CHECKSUM_BYTES, Shard
from kvstore.wire.messages import HelloRank, HelloScheduler
from tests.kit import actor
from tests.kit.actor import (
    AnswerMessage,
    Ask,
    Attach,
    Copied,
    Credits,
    Failed,
    Go,
    Halt,
    Halted,
    Leased,
    Look,
    OrderMessage,
    Read,
    Release,
    State,
    Take,
    Write,
    Written,
    contents,
)
from tests.kit.hello import group_of, rank_hello, scheduler_hello

ANSWER_TIMEOUT_S: Final = 60.0
"""An actor waits for the node no longer than a third of this."""
_encoder = msgspec.msgpack.Encoder()
_answers: msgspec.msgpack.Decoder[AnswerMessage] = msgspec.msgpack.Decoder(AnswerMessage)


class Wrong(AssertionError):
    """A block was handed over that is not what was stored under its key."""


class Member:
    """One actor, from outside."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.name = f"{pid}-{secrets.token_hex(4)}"
        """For its Hello: the same for all its life."""
        self._pidfd = os.pidfd_open(pid)
        self._socket = sock

    def tell(self, order: OrderMessage) -> None:
        """Give an order; `hear` has the answer."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(_encoder.encode(order))

    def hear(self) -> AnswerMessage:
        """The next answer; Failed when there is nobody any more."""
        if not select.select([self._socket], [], [], ANSWER_TIMEOUT_S)[0]:
            raise TimeoutError(f"process {self.pid} does not answer")
        with contextlib.suppress(ConnectionResetError):
            if data := self._socket.recv(actor.ORDER_BYTES_MAX):
                return _answers.decode(data)
        return Failed("killed")

    def ask(self, order: OrderMessage) -> AnswerMessage:
        self.tell(order)
        return self.hear()

    @property
    def attached(self) -> bool:
        """Whether the node has not hung up on it."""
        found = self.ask(Look())
        return isinstance(found, State) and found.attached

    @property
    def alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def kill(self) -> None:
        """SIGKILL; gone on return."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [], ANSWER_TIMEOUT_S)

    def close(self) -> None:
        """Kill it and forget it."""
        self.kill()
        self._socket.close()
        os.close(self._pidfd)


class Troupe:
    """Makes actors; takes them along when it ends."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._door = ours
            self._nursery = subprocess.Popen(
                [sys.executable, actor.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A forked child of a process with threads would wait for locks that nobody holds.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
            )
        self._members: list[Member] = []

    def member(self) -> Member:
        """A new process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, actor.ORDER_BYTES_MAX)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, actor.ORDER_BYTES_MAX)
        with theirs:
            socket.send_fds(self._door, [b"+"], [theirs.fileno()])
        made = Member(int.from_bytes(self._door.recv(4), "little"), ours)
        self._members.append(made)
        return made

    def dismiss(self, member: Member) -> None:
        """Kill and forget."""
        self._members.remove(member)
        member.close()

    def close(self) -> None:
        """End all of them."""
        for member in self._members:
            member.close()
        self._door.close()
        try:
            self._nursery.wait(10)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SplitEngine:
    """A scheduler and `rank_count` ranks, a process each. `members[0]` is the scheduler."""

    def __init__(
        self,
        troupe: Troupe,
        engine_id: str,
        *,
        block_bytes: int = 64 << 10,
        rank_count: int = 2,
        tenant: str = "default",
    ) -> None:
        """`block_bytes`: of all ranks together; engines with the same share their blocks."""
        assert HEAD_COUNT % rank_count == 0
        self._troupe = troupe
        self._engine_id, self._tenant = engine_id, tenant
        self._space = make_space(model=f"blocks of {block_bytes}", block_bytes=block_bytes)
        self.rank_count = rank_count
        self.shard_bytes = block_bytes // rank_count
        self._nonce = secrets.token_hex(4)
        self.members = [troupe.member() for _ in range(1 + rank_count)]

    @property
    def scheduler(self) -> Member:
        return self.members[0]

    @property
    def ranks(self) -> list[Member]:
        return self.members[1:]

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.alive]

    @property
    def attached(self) -> list[Member]:
        return [member for member in self.members if member.attached]

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    def replace_the_dead(self) -> None:
        """A new process for each that was killed, of the same engine."""
        for index, member in enumerate(self.members):
            if not member.alive:
                self._troupe.dismiss(member)
                self.members[index] = self._troupe.member()

    def start_anew(self) -> None:
        """End what is left of it: it is another engine from now on."""
        for index, member in enumerate(self.members):
            self._troupe.dismiss(member)
            self.members[index] = self._troupe.member()
        self._nonce = secrets.token_hex(4)

    def introduce(
        self, socket_path: Path, *, members: Sequence[int] | None = None, anew: bool = False
    ) -> list[str]:
        """Attach those that are not, or only these of them, or `anew` those that are, too. Who was
        refused is not `attached` afterwards. Returns why, for each that was."""
        chosen = range(len(self.members)) if members is None else members
        told = [
            number
            for number in chosen
            if self.members[number].alive and (anew or not self.members[number].attached)
        ]
        for number in told:
            self.members[number].tell(Attach(str(socket_path), self._hello(number)))
        heard = [self.members[number].hear() for number in told]
        return [answer.reason for answer in heard if isinstance(answer, Failed)]

    def open(self, *, wait_s: float = actor.WAIT_S) -> State | Failed:
        """Wait until a session is open."""
        found = self.scheduler.ask(Look(wait_s))
        if isinstance(found, Failed):
            return found
        assert isinstance(found, State), found
        return found

    def attach(self, socket_path: Path, *, timeout_s: float = ANSWER_TIMEOUT_S) -> State:
        """Attach all that are not, until there is a session. Raises TimeoutError."""
        found: State | Failed = Failed("not all are attached")
        refused: list[str] = []
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            refused = self.introduce(socket_path) or refused
            if len(self.attached) == len(self.members):
                found = self.open(wait_s=2.0)
                if isinstance(found, State):
                    return found
            threading.Event().wait(0.05)
        raise TimeoutError(
            f"{self._engine_id} gets no session: {found}, {len(self.alive)} of"
            f" {len(self.members)} alive, last refused: {refused}"
        )

    def _hello(self, number: int) -> HelloScheduler | HelloRank:
        told: dict[str, Any] = {
            "nonce": self._nonce,
            "tenant": self._tenant,
            "process": self.members[number].name,
        }
        if number == 0:
            told |= {"rank_count": self.rank_count, "label": self._space.model}
            return scheduler_hello(self._engine_id, **told)
        heads, rank = HEAD_COUNT // self.rank_count, number - 1
        shard = Shard(0, LAYER_COUNT, rank * heads, (rank + 1) * heads)
        group = group_of(self._space, shard)
        return rank_hello(group, name=self._engine_id, rank=rank, **told)

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────

    def begin_store(self, keys: Sequence[bytes], halts: Sequence[Halt] = ()) -> int:
        """Take credits and tell the ranks to fill them; how many of `keys`, 0 without a session.

        `halts`: of each rank. `end` hears the ranks' answers.
        """
        credits_ = self.scheduler.ask(Take(len(keys)))
        if not isinstance(credits_, Credits):
            return 0
        width = self.rank_count
        count = len(credits_.slots) // 4 // width
        for rank, member in enumerate(self.ranks):
            member.tell(
                Write(
                    credits_.session,
                    b"".join(keys[:count]),
                    _column(credits_.slots, 4, rank, width),
                    _column(credits_.generations, 8, rank, width),
                    halts[rank] if halts else "",
                )
            )
        return count

    def store(self, keys: Sequence[bytes]) -> int:
        """Store them; how many were sealed before something went wrong."""
        done = 0
        while done < len(keys):
            count = self.begin_store(keys[done:])
            answers = [member.hear() for member in self.ranks] if count else []
            if not count or not all(isinstance(answer, Written) for answer in answers):
                break
            done += count
        return done

    def lease(self, keys: Sequence[bytes], *, while_promoting: bool = False) -> Leased | Failed:
        """Lease the longest run of them from the front."""
        found = self.scheduler.ask(Ask(b"".join(keys), while_promoting))
        assert isinstance(found, Leased | Failed), found
        return found

    def begin_load(self, leased: Leased, halts: Sequence[Halt] = ()) -> None:
        """Tell the ranks to copy what is leased. `end` hears the ranks' answers."""
        for rank, member in enumerate(self.ranks):
            slots = _column(leased.slots, 4, rank, self.rank_count)
            generations = _column(leased.generations, 8, rank, self.rank_count)
            member.tell(Read(slots, generations, halts[rank] if halts else ""))

    def wait_for_halts(self, halts: Sequence[Halt]) -> list[bool]:
        """Of each rank whether it has halted where it was told to; hears of no other."""
        return [
            bool(halt) and isinstance(member.hear(), Halted)
            for member, halt in zip(self.ranks, halts, strict=True)
        ]

    def end(self, halted: Sequence[bool], told: Sequence[bool]) -> list[AnswerMessage]:
        """Let those that halted go on; what each rank that was told something answers."""
        for member, is_halted in zip(self.ranks, halted, strict=True):
            if is_halted:
                member.tell(Go())
        return [
            member.hear() if is_told else Failed("killed")
            for member, is_told in zip(self.ranks, told, strict=True)
        ]

    def release(self, leased: Leased) -> None:
        self.scheduler.ask(Release(leased.lease))

    def verify(self, keys: Sequence[bytes]) -> int:
        """Load the longest run of `keys` there is; how many blocks came, all of them right.

        Raises:
            Wrong: other bytes than were stored.
        """
        leased = self.lease(keys)
        if isinstance(leased, Failed):
            return 0
        count = len(leased.slots) // 4 // self.rank_count
        found = 0
        if count:
            self.begin_load(leased)
            found = self.judge(keys[:count], [member.hear() for member in self.ranks])
        self.release(leased)
        return found

    def judge(self, keys: Sequence[bytes], answers: Sequence[AnswerMessage]) -> int:
        """How many blocks were handed over whole.

        Raises:
            Wrong: a shard passed for valid and is not what was stored under its key.
        """
        whole = [True] * len(keys)
        for column, answer in enumerate(answers):
            if not isinstance(answer, Copied):
                whole = [False] * len(keys)
                continue
            for index, key in enumerate(keys):
                if not answer.valid[index]:
                    whole[index] = False
                    continue
                begin = index * CHECKSUM_BYTES
                digest = answer.digests[begin : begin + CHECKSUM_BYTES]
                if digest != xxhash.xxh3_128_digest(contents(key, column, self.shard_bytes).data):
                    raise Wrong(f"block {key.hex()[:16]}, shard {column}: not what was stored")
        return sum(whole)


def _column(array: bytes, size: int, column: int, width: int) -> bytes:
    """ShardColumn of a packed [n][width] array whose elements have `size` bytes."""
    step = size * width
    return b"".join(
        array[at + column * size : at + (column + 1) * size] for at in range(0, len(array), step)
    )
