"""The end of a run from outside: a signal is noted, and whoever waits for a process looks for it.

Imports the standard library only: `run.py` needs it before anything is unpacked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK_S = 0.2
"""Between two looks whether the run is to end."""
KILL_S_MAX = 5.0


class Stop:
    """Whether the run is to end."""

    def __init__(self) -> None:
        self.reason = ""
        """Empty: it goes on."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals do not end this process meanwhile. Those that are ignored stay so."""
        before = {each: signal.getsignal(each) for each in SIGNALS}
        chosen = [each for each, handler in before.items() if handler is not signal.SIG_IGN]
        for each in chosen:
            signal.signal(each, self._hear)
        try:
            yield
        finally:
            for each in chosen:
                signal.signal(each, before[each])

    def because(self, otherwise: str) -> str:
        """Why something was ended."""
        return self.reason or otherwise

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.reason = f"stopped by {signal.Signals(number).name}"


def run_process(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    limit_s: float,
    stop: Stop,
    folder: Path | None = None,
) -> int | None:
    """Its exit code; None: it was killed, since its time was over, or the run's. What is left of
    its processes is killed in any case. `folder`: to run in."""
    end = time.monotonic() + limit_s
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
        )
    code: int | None = None
    try:
        while code is None and not stop.reason and (left_s := end - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(LOOK_S, left_s))
    finally:
        _kill(process)
    return code


def _kill(process: subprocess.Popen[bytes]) -> None:
    """A process that a driver holds is left behind."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(KILL_S_MAX)
