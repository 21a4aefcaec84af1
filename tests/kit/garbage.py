"""Datagrams that are broken, thrown at a real node's socket.

A stranger connects, introduces itself well or badly, says a few things that were valid before a
byte was flipped, cut, or put in, and hangs up. The node may refuse and hang up; it must serve
others as before, which is for the caller to see. Does not cover: a node that says what is broken.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstore.testing.raw_engine import BLOCK_BYTES, HEAD_COUNT, LAYER_COUNT, make_keys, make_space
from kvstore.types import Shard
from kvstore.wire.messages import (
    PROTOCOL_VERSION,
    Distrust,
    Drop,
    HelloRank,
    HelloScheduler,
    Hint,
    LeaseAsk,
    LeaseRelease,
    LeaseRenew,
    Measured,
    Message,
    Pinned,
    Quiet,
    Seal,
    Story,
    Unserved,
    encode,
)
from kvstore.wire.space import Group

SAID_MAX: Final = 8
_CONNECT_TIMEOUT: Final = struct.pack("ll", 30, 0)
_KEYS: Final = b"".join(make_keys(4, seed="garbage"))
_SLOTS: Final = bytes(range(16))
_GENERATIONS: Final = bytes(4 * 8)
_WORDS: Final[tuple[Message, ...]] = (
    Quiet(1),
    Hint(1, _KEYS),
    LeaseAsk(1, _KEYS),
    LeaseRenew([1, 2]),
    LeaseRelease([1, 2]),
    Measured(1, 1),
    Unserved("reason"),
    Pinned(4096, "reason"),
    Story("request"),
    Seal(1, _KEYS, _SLOTS, _GENERATIONS, bytes(4 * 16)),
    Drop(1, _SLOTS, _GENERATIONS),
    Distrust(_SLOTS, _GENERATIONS),
)


class Garbage:
    """Strangers, made from a seed."""

    def __init__(self, socket_path: Path, *, seed: int) -> None:
        self._path = str(socket_path)
        self._random = random.Random(seed)

    def throw(self) -> int:
        """One stranger; how many datagrams it said."""
        rng = self._random
        said = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            # Others may be waiting to be accepted: only a blocking socket waits for its turn.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _CONNECT_TIMEOUT)
            sock.connect(self._path)
            sock.setblocking(False)
            with suppress(OSError):  # it was hung up on
                pidfd = os.pidfd_open(os.getpid())
                try:
                    hello = encode(self._hello())
                    data = hello if rng.random() < 0.7 else self._broken(hello)
                    socket.send_fds(sock, [data], [pidfd] * rng.choice((0, 1, 1, 1, 1, 2)))
                finally:
                    os.close(pidfd)
                said = 1
                for _ in range(rng.randrange(SAID_MAX)):
                    data = encode(rng.choice(_WORDS))
                    sock.send(data if rng.random() < 0.3 else self._broken(data))
                    said += 1
        return said

    def _hello(self) -> HelloScheduler | HelloRank:
        name = f"stranger{self._random.randrange(4)}"
        if self._random.random() < 0.5:
            return HelloScheduler(PROTOCOL_VERSION, name, "nonce", "strangers", 1, name)
        shard = Shard(0, LAYER_COUNT, 0, HEAD_COUNT)
        space = make_space(model=name)
        groups = (Group(space, shard, BLOCK_BYTES),)
        return HelloRank(PROTOCOL_VERSION, name, "nonce", "strangers", 0, name, groups)

    def _broken(self, data: bytes) -> bytes:
        rng = self._random
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 1:
                return data[:at]
            case 2:
                return data[:at] + rng.randbytes(rng.randint(1, 200)) + data[at:]
            case 3:
                return data[:at] + b"\xff" * rng.randint(1, 9) + data[at:]
            case _:
                return rng.randbytes(rng.randint(1, 500))
