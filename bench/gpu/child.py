"""Processes of a part, spoken to in lines: an order each, answered by one JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.gpu.findings import NotHere

ANSWER_S = 40.0


class Child:
    """One that does not answer in time is killed, and its silence is an error."""

    def __init__(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> None:
        """
        Raises:
            NotHere: what it needs is not on this machine.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        self.greeting = self.answer()
        if "not_here" in self.greeting:
            self.end()
            raise NotHere(self.greeting["not_here"])

    def ask(self, line: str) -> dict[str, Any]:
        self.send(line)
        return self.answer()

    def send(self, line: str) -> None:
        """Give an order whose `answer` is fetched later."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        late = threading.Timer(ANSWER_S, self.process.kill)
        late.start()
        try:
            line = self.process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            raise RuntimeError("a process ended or did not answer; its error is in the log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Kill it; reaped in any case."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def serve(make: Callable[[], Any]) -> None:
    """In a child: obey the parent's lines. A verb is a method of what is made, whose `greeting`
    comes first; numbers become ints."""
    try:
        side = make()
    except NotHere as error:
        say({"not_here": str(error)})
        return
    say(side.greeting())
    for line in sys.stdin:
        verb, *given = line.split()
        say(getattr(side, verb)(*(int(each) if each.isdecimal() else each for each in given)))


def say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
