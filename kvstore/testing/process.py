"""A real node process for tests, demos and benchmarks.

    with NodeProcess.start(tmp_path) as node:
        link = Link.connect(node.socket, hello)

Ready means its ready line: nothing sleeps. The processes are reaped in any case; if this process is
killed, so are they.

A node is two processes: its supervisor, which is the one that is started, signalled and waited for,
and the node process, whose pid is `pid` and which alone is stopped by `pause` or killed by `crash`.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvstore.testing import tied

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0


class NodeFailed(Exception):
    """The node did not start; carries its exit code and its stderr."""

    def __init__(self, code: int | None, stderr: str) -> None:
        super().__init__(f"the node exited with {code}: {stderr.strip()}")
        self.code = code
        self.stderr = stderr


def start_ready(
    arguments: Sequence[str],
    *,
    log: Path,
    says: str,
    timeout_s: float,
    python: str | Path = sys.executable,
) -> tuple[subprocess.Popen[str], str]:
    """Start Python with these; the process and its ready line, which contains `says`.

    Raises:
        NodeFailed: it exited, said something else, or was not ready in time.
    """
    with log.open("a", encoding="utf-8") as stderr:
        process = tied.popen(
            [str(python), *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"},
        )
    try:
        line = read_line(process, timeout_s)
        if says not in line:
            process.kill()
            raise NodeFailed(process.wait(STOP_TIMEOUT_S), log.read_text(encoding="utf-8"))
    except BaseException:
        reap(process)
        raise
    return process, line


class ChildServer:
    """A child that serves, reaped at the end of its `with`."""

    def __init__(
        self, process: subprocess.Popen[str], ready_line: str = "", log_file: Path | None = None
    ) -> None:
        """`log_file`: of its stderr."""
        self.process = process
        self.ready_line = ready_line
        self.log_file = log_file

    @property
    def address(self) -> str:
        """HOST:PORT of its service; empty for a node, which has a socket."""
        return self._said(r"listen=(\S+)")

    @property
    def log(self) -> str:
        """Its stderr so far."""
        return self.log_file.read_text(encoding="utf-8") if self.log_file is not None else ""

    @property
    def metrics_url(self) -> str:
        """URL of /metrics; empty when off."""
        return self._said(r"metrics=(http\S+)")

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def kill(self) -> int:
        """SIGKILL; returns the exit code."""
        self.process.kill()
        return self._wait()

    def pause(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        reap(self.process)

    def _said(self, pattern: str) -> str:
        """Part of the ready line; empty when not in it."""
        found = re.search(pattern, self.ready_line)
        return found[1] if found else ""

    def _wait(self) -> int:
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            reap(self.process)


class NodeProcess(ChildServer):
    """One `kvstore node` in a directory of its own; `process` is its supervisor."""

    def __init__(self, process: subprocess.Popen[str], directory: Path, ready_line: str) -> None:
        super().__init__(process, ready_line, directory / "node.log")
        self.directory = directory

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        dram: str = "64MiB",
        flags: Sequence[str] = (),
        timeout_s: float = READY_TIMEOUT_S,
        program: Sequence[str] = ("-m", "kvstore.cli.main"),
        python: str | Path = sys.executable,
    ) -> NodeProcess:
        """Start a node with its log in `directory`, its socket too, and wait for its ready line.

        /metrics is on a port that the kernel chooses. `flags` come last, so they win, that of
        another socket too. `program`: arguments of `python` for `kvstore`.

        Raises:
            NodeFailed: it exited, or was not ready within `timeout_s`.
        """
        process, line = start_ready(
            [
                *(*program, "node", "--socket", str(directory / "node.sock")),
                *("--dram", dram, "--metrics", "127.0.0.1:0", *flags),
            ],
            log=directory / "node.log",
            says="kvstore node ready:",
            timeout_s=timeout_s,
            python=python,
        )
        return cls(process, directory, line)

    @property
    def socket(self) -> Path:
        return Path(self._said(r"socket=(\S+)") or self.directory / "node.sock")

    @property
    def pid(self) -> int:
        """Pid of the node process that serves now. Raises ProcessLookupError without one."""
        for pid in children_of(self.process.pid):
            return pid
        raise ProcessLookupError("the node has ended")

    @property
    def supervisor_pid(self) -> int:
        """Pid of the process whose end ends the node."""
        return self.process.pid

    @property
    def index(self) -> str:
        """Address of the replica inside; empty without one."""
        return self._said(r"serves-index=([^ ]+:\d+)")

    @property
    def events(self) -> tuple[str, str]:
        """Endpoints of KV events and of their replay."""
        live, _, replay = self._said(r"events=([^ ,]+,\S+)").partition(",")
        assert live, "the node publishes no events"
        return live, replay

    def kill(self) -> int:
        """SIGKILL to the supervisor; returns the exit code once all is gone, memory included."""
        pidfds = [os.pidfd_open(pid) for pid in children_of(self.process.pid)]
        code = super().kill()
        for pidfd in pidfds:
            _wait_gone(pidfd)
        return code

    def crash(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the node process; returns once it is gone. Another one follows."""
        pid = self.pid
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, number)
        _wait_gone(pidfd)

    def pause(self) -> None:
        """SIGSTOP to the node process."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to the node process."""
        os.kill(self.pid, signal.SIGCONT)


def children_of(pid: int) -> list[int]:
    """Living children of a process; none when it is gone itself."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text(encoding="utf-8").split())
    return found


def _wait_gone(pidfd: int) -> None:
    """Wait for the end of a process, and close its pidfd."""
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        assert selector.select(STOP_TIMEOUT_S), "a process outlived its end"
    os.close(pidfd)


def reap(process: subprocess.Popen[str]) -> None:
    """End a process in any state, and wait for that."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def read_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The first line of stdout; empty when the process ended or `timeout_s` passed."""
    assert process.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline_s - time.monotonic())):
            return ""
        return process.stdout.readline()
