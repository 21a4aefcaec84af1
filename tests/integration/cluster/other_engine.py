"""An engine that is a process of its own, so that it can be killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Self

from kvstore.testing import process
from kvstore.testing.raw_engine import RawEngine
from tests.kit.nursery import ROOT

LIMIT_S: Final = 60.0


class OtherEngine:
    """With the methods of RawEngine, and `send` of its scheduler. Use as a context: it is gone
    afterwards, whatever it was doing."""

    def __init__(self, socket: Path) -> None:
        self.timeout_s = LIMIT_S
        self.scheduler = self
        self._orders, its = Pipe()
        with its:
            self.process = process.launch(
                [sys.executable, "-m", __name__, str(socket)],
                stdin=its.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=dict(os.environ),
                cwd=ROOT,
            )
        self._orders.recv()

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._orders.send((name, arguments))
        return self._orders.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        process.reap(self.process)
        self._orders.close()


def main() -> None:
    """The process: one answer to each order."""
    with (
        Connection(0) as orders,
        RawEngine(Path(sys.argv[1]), engine_id="victim", timeout_s=LIMIT_S) as engine,
        contextlib.suppress(EOFError),
    ):
        engine.open()
        engine.wait(lambda: bool(engine.credits))
        orders.send("ready")
        while True:
            name, arguments = orders.recv()
            its = engine.scheduler if name == "send" else engine
            orders.send(getattr(its, name)(*arguments))


if __name__ == "__main__":
    main()
