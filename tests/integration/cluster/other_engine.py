"""An engine that is a process of its own, so that it can be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from kvstore.testing.raw_engine import RawEngine
from kvstore.types import KEY_BYTES
from kvstore.wire.messages import LeaseReply, Message, decode_from_engine, encode

ROOT: Final = Path(__file__).resolve().parents[3]
LIMIT_S: Final = 60.0


class OtherEngine:
    """With the part of RawEngine that a request or a push needs, for one lease. Use as a context:
    it is gone afterwards, whatever it was doing."""

    def __init__(self, socket: Path) -> None:
        self.timeout_s = LIMIT_S
        self.scheduler = self
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._hears()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, message: Message) -> bool:
        self._say("send", encode(message))
        return True

    def store(self, keys: Sequence[bytes]) -> None:
        self._say("store", b"".join(keys))

    def ask(self, keys: Sequence[bytes]) -> LeaseReply:
        """Has the number of the lease only."""
        return LeaseReply(self._say("ask", b"".join(keys)), 0, b"", b"")

    def hear(self) -> None:
        """It does when it is asked for anything."""

    def coming(self, _: LeaseReply) -> int:
        return self._say("coming", b"")

    def finish(self, reply: LeaseReply) -> LeaseReply:
        self._say("finish", b"")
        return reply

    def is_right(self, _: LeaseReply, keys: Sequence[bytes]) -> bool:
        return bool(self._say("right", b"".join(keys)))

    def release(self, _: LeaseReply) -> None:
        self._say("release", b"")

    def _say(self, order: str, data: bytes) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order} {data.hex()}\n")
        self.process.stdin.flush()
        return self._hears()

    def _hears(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


def _answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main(socket: str) -> None:
    """The process: one answer, a number, to each order."""
    with RawEngine(Path(socket), engine_id="victim", timeout_s=LIMIT_S) as engine:
        engine.open()
        engine.wait(lambda: bool(engine.credits))
        _answer(0)
        for line in sys.stdin:
            order, text = line.split(" ")
            data, said = bytes.fromhex(text), 0
            keys = [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
            match order:
                case "send":
                    assert engine.scheduler.send(decode_from_engine(data))
                case "store":
                    engine.store(keys)
                case "ask":
                    reply = engine.ask(keys)
                    said = reply.lease
                case "coming":
                    engine.hear()
                    said = engine.coming(reply)
                case "finish":
                    reply = engine.finish(reply)
                case "right":
                    said = engine.is_right(reply, keys)
                case "release":
                    engine.release(reply)
            _answer(int(said))


if __name__ == "__main__":
    main(sys.argv[1])
