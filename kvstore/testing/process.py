"""Real processes for tests, demos and benchmarks: a node, a router; any that ends with us.

    with NodeProcess.start(tmp_path) as node:
        link = Link.connect(node.socket, hello)

Ready means its ready line: nothing sleeps. The processes are reaped in any case; if this process is
killed, so are they.

A node is two processes: its supervisor, which is the one that is started, signalled and waited for,
and the node process, whose pid is `pid` and which alone is stopped by `pause` or killed by `crash`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from kvstore.cli.certs import make_certificates
from kvstore.client.tls import TlsFiles
from kvstore.testing import tied
from kvstore.wire.identity import Identity, Role

_T = TypeVar("_T")

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
open_local: Final[Callable[..., HTTPResponse]] = _opener.open
"""As `urllib.request.urlopen`, but it asks no proxy: all servers are on this machine."""

# ── processes that end with this one ─────────────────────────────────────────────────────────────
# They end in any case, by `kvstore.testing.tied`. Processes of a node or an index end with their
# supervisor in turn. The kernel means the *thread* that made the child, so all are made by one
# thread that lasts.


def tie(command: Sequence[str], *, guarded: bool = False) -> list[str]:
    """Command line of a child that ends with this process, if `on_lasting_thread` makes it.

    `guarded`: the child is a guard of the command, which ends with all its descendants: when the
    command ends, and at SIGTERM.
    """
    flags = ["--all"] if guarded else []
    return [sys.executable, "-I", "-S", tied.__file__, str(os.getpid()), *flags, *command]


def popen_tied(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen` of a child that ends with this process; see `tie`."""
    return on_lasting_thread(lambda: subprocess.Popen(tie(command), **options))


def on_lasting_thread(call: Callable[[], _T]) -> _T:
    """Call a function on a thread that ends only with this process. Returns its result."""
    return _threads(os.getpid()).submit(call).result()


@functools.cache
def _threads(_pid: int) -> ThreadPoolExecutor:
    """The pool with that thread, by process: a forked child has no threads of its parent."""
    return ThreadPoolExecutor(1, thread_name_prefix="nursery")


# ── nodes ─────────────────────────────────────────────────────────────────────────────────────────

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
launch: Callable[..., subprocess.Popen[str]] = popen_tied
"""Starts a command as a child. The project's own tests fork instead (`tests/kit/nursery.py`)."""


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
    """Start Python with these arguments. Returns the process and its ready line, which contains
    `says`.

    Raises:
        NodeFailed: it exited, said something else, or was not ready in time.
    """
    with log.open("a", encoding="utf-8") as stderr:
        process = launch(
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
    """A child process that serves; reaped at the end of its `with`."""

    def __init__(
        self, process: subprocess.Popen[str], ready_line: str = "", log_file: Path | None = None
    ) -> None:
        """`log_file`: file that its stderr goes to."""
        self.process = process
        self.ready_line = ready_line
        self.log_file = log_file

    @classmethod
    def _run(
        cls,
        log: Path,
        command: str,
        *flags: str,
        timeout_s: float,
        program: Sequence[str] = ("-m", "kvstore.cli.main"),
        python: str | Path = sys.executable,
    ) -> Self:
        """Start a command of kvstore, with /metrics on a port that the kernel chooses, and wait for
        its ready line. The last of equal `flags` wins. `program`: arguments of `python` for
        `kvstore`.

        Raises:
            NodeFailed: it exited, or was not ready within `timeout_s`.
        """
        process, line = start_ready(
            [*program, command, "--metrics", "127.0.0.1:0", *flags],
            log=log,
            says=f"kvstore {command} ready:",
            timeout_s=timeout_s,
            python=python,
        )
        return cls(process, line, log)

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
        """Send SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def kill(self) -> int:
        """Send SIGKILL; returns the exit code."""
        self.process.kill()
        return self._wait()

    def pause(self) -> None:
        """Stop the process (SIGSTOP) until `resume`."""
        stop_process(self.process.pid)

    def resume(self) -> None:
        """Continue the process (SIGCONT)."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        reap(self.process)

    def _said(self, pattern: str) -> str:
        """Part of the ready line that a pattern's group matches; empty when it does not match."""
        found = re.search(pattern, self.ready_line)
        return found[1] if found else ""

    def _wait(self) -> int:
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            reap(self.process)


class NodeProcess(ChildServer):
    """One `kvstore node` in a directory of its own; `process` is its supervisor."""

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        dram: str = "64MiB",
        flags: Sequence[str] = (),
        timeout_s: float = READY_TIMEOUT_S,
        **how: Any,
    ) -> NodeProcess:
        """Start a node with its log and its socket in `directory`, and wait for its ready line.
        `flags` come last, so they win, that of another socket too. `how`: `program` and `python`.

        Raises:
            NodeFailed: it exited, or was not ready within `timeout_s`.
        """
        own = ("--socket", str(directory / "node.sock"), "--dram", dram)
        log = directory / "node.log"
        return cls._run(log, "node", *own, *flags, timeout_s=timeout_s, **how)

    @property
    def directory(self) -> Path:
        assert self.log_file is not None
        return self.log_file.parent

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
        """Pid of the supervisor, whose end ends the node."""
        return self.process.pid

    @property
    def index(self) -> str:
        """Address of the index replica inside the node; empty without one."""
        return self._said(r"serves-index=([^ ]+:\d+)")

    def kill(self) -> int:
        """Kill the supervisor; returns its exit code once all processes are gone, memory
        included.
        """
        pidfds = [os.pidfd_open(pid) for pid in children_of(self.process.pid)]
        code = super().kill()
        for pidfd in pidfds:
            _wait_gone(pidfd)
        return code

    def crash(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the node process, and wait until it is gone. The supervisor starts
        another one.
        """
        pid = self.pid
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, number)
        _wait_gone(pidfd)

    def pause(self) -> None:
        """Stop the node process (SIGSTOP) until `resume`."""
        stop_process(self.pid)

    def resume(self) -> None:
        """Continue the node process (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)


def children_of(pid: int) -> list[int]:
    """Pids of the living children of a process; empty when it is gone itself."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text(encoding="utf-8").split())
    return found


def stop_process(pid: int) -> None:
    """Send SIGSTOP, and wait until every thread has stopped: on a busy machine a process goes on
    for some 10 ms, and serves others meanwhile. Raises ProcessLookupError.
    """
    os.kill(pid, signal.SIGSTOP)
    while any(map(_runs, Path(f"/proc/{pid}/task").glob("*/stat"))):
        threading.Event().wait(0.001)


def _runs(stat: Path) -> bool:
    """Whether a thread is neither stopped nor gone."""
    try:
        return stat.read_text(encoding="utf-8").rpartition(") ")[2][0] not in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_gone(pidfd: int) -> None:
    """Wait for the end of a process, and close its pidfd."""
    assert wait_readable([pidfd], STOP_TIMEOUT_S), "a process outlived its end"
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
    """The first line of stdout; empty when the process ended or `timeout_s` passed, which may be
    `math.inf`.
    """
    output = process.stdout
    assert output is not None
    is_there = wait_readable([output.fileno()], None if timeout_s == math.inf else timeout_s)
    return output.readline() if is_there else ""


# ── certificates ──────────────────────────────────────────────────────────────────────────────────


class Lab:
    """A CA and certificates in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def files(
        self,
        role: Role,
        name: str,
        *,
        days: int = 2,
        with_index: bool = False,
        hosts: Sequence[str] = (),
    ) -> TlsFiles:
        """Files of a component's certificate, which is made if missing."""
        cert = self.directory / f"{role}-{name}.crt"
        if not cert.exists():
            identity = Identity(role, name)
            make_certificates(
                *(self.directory, [identity]), hosts=hosts, days=days, nodes_are_indexes=with_index
            )
        return TlsFiles(ca=self.directory / "ca.crt", cert=cert, key=cert.with_suffix(".key"))

    def flags(self, role: Role, name: str, *, with_index: bool = False) -> tuple[str, ...]:
        """Flags of a command for a component's certificate."""
        files = self.files(role, name, with_index=with_index)
        return ("--ca", str(files.ca), "--cert", str(files.cert), "--key", str(files.key))


# ── router process ────────────────────────────────────────────────────────────────────────────────
# A real router process, for tests and benchmarks.
#
#     with RouterProcess.start(tmp_path, ["--worker", "a=http://127.0.0.1:8000"]) as router:
#         router.await_worker()
#         urllib.request.urlopen(router.url + "/v1/completions", …)
#
# Started means its ready line; its workers are probed after that. The process is reaped in any
# case.


class RouterProcess(ChildServer):
    """One `kvstore router`, whose log is in a directory."""

    @classmethod
    def start(
        cls,
        directory: Path,
        flags: Sequence[str],
        *,
        name: str = "router",
        policy: str = "",
        timeout_s: float = READY_TIMEOUT_S,
    ) -> RouterProcess:
        """Start a router and wait for its ready line. `flags` come last, so they take precedence.
        `policy`: text of its policy file; empty: it has none.

        Raises:
            NodeFailed: it exited, or was not ready in time.
        """
        log, own = directory / f"{name}.log", ["--listen", "127.0.0.1:0", "--drain-delay", "0"]
        if policy:
            file = log.with_suffix(".yaml")
            file.write_text(policy, encoding="utf-8")
            own += ["--policy", str(file)]
        return cls._run(log, "router", *own, *flags, timeout_s=timeout_s)

    @property
    def port(self) -> int:
        """Port of the API."""
        return int(self.address.rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def await_worker(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until a worker that serves requests has answered a probe. Raises TimeoutError."""
        self._await(f"{self.url}/health", "has no worker that answers", lambda _: True, timeout_s)

    def await_parity(self) -> None:
        """Wait until the router routes by prefixes to all workers. Raises TimeoutError: one stays
        load-only or down.
        """
        url = self.metrics_url.replace("metrics", "healthz")
        self._await(url, "does not route by prefixes", lambda page: "worker" not in page)

    def _await(
        self,
        url: str,
        lacks: str,
        is_good: Callable[[str], bool],
        timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        deadline_s, page = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline_s:
            try:
                with open_local(url, timeout=READY_TIMEOUT_S) as answer:
                    if is_good(page := answer.read().decode()):
                        return
            except urllib.error.HTTPError as error:
                page = error.read().decode()
            threading.Event().wait(0.02)
        raise TimeoutError(f"The router {lacks}: {page.strip() or self.log}")
