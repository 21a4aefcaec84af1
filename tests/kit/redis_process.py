"""A real redis-server, for tests and benchmarks.

    with RedisProcess.start(tmp_path) as redis:
        store = RedisStore(store_config(redis.url, password_file=None, ca=None), …)

Keeps nothing on disk without a flag. The process is reaped in any case.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvstore.testing.process import (
    READY_TIMEOUT_S,
    STOP_TIMEOUT_S,
    ChildServer,
    NodeFailed,
    popen_tied,
    reap,
)
from tests.kit.programs import need

PROGRAM = "redis-server"
_READY = "Ready to accept connections"
_TRIES = 5
"""Another process may take the port between the kernel's choice and the server's start."""


class RedisProcess(ChildServer):
    """One server."""

    def __init__(self, process: subprocess.Popen[str], port: int, scheme: str) -> None:
        super().__init__(process, "", Path(os.devnull))  # what it says is in its pipe
        self.port = port
        self.url = f"{scheme}://127.0.0.1:{port}/0"

    @classmethod
    def start(
        cls, directory: Path, *flags: str, port: int | None = None, tls: Sequence[str] = ()
    ) -> RedisProcess:
        """Start one and wait until it serves. `port` None: a free one; `tls`: its flags for TLS,
        without which it speaks plainly.

        Raises:
            NodeFailed: it exited.
        """
        need(PROGRAM)
        tries = _TRIES if port is None else 1
        for left in reversed(range(tries)):
            chosen = _free_port() if port is None else port
            listen = ["--port", "0", "--tls-port", str(chosen), *tls] if tls else []
            command = [
                *(PROGRAM, "--port", str(chosen), "--bind", "127.0.0.1", "--save", ""),
                *("--dir", str(directory), "--daemonize", "no", *listen, *flags),
            ]
            process = popen_tied(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                said = _said_until_ready(process)
            except BaseException:
                reap(process)
                raise
            if _READY in said:
                return cls(process, chosen, "rediss" if tls else "redis")
            code = process.wait(STOP_TIMEOUT_S)
            reap(process)
            if not left or "Address already in use" not in said:
                raise NodeFailed(code, said)
        raise AssertionError("it started or failed")

    def cli(self, *command: str) -> str:
        """Output of redis-cli."""
        done = subprocess.run(
            ["redis-cli", "-p", str(self.port), *command],
            check=True,
            capture_output=True,
            text=True,
            timeout=READY_TIMEOUT_S,
        )
        return done.stdout.strip()


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _said_until_ready(process: subprocess.Popen[str]) -> str:
    """The log up to its ready line, or to its end. A server logs little: the pipe never fills."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if _READY in line:
            break
    return said
