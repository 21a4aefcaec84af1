"""vLLM servers forked from one process that has imported vLLM: a start of 1 s of processor, not 29.

    python nursery.py DOOR     forks a server for each order that comes through this descriptor

Each of vLLM's three processes takes 8 s to import itself, which is most of what a test with an
engine costs. The nursery imports once and forks; the server's own processes are forked too, where
vLLM on CPUs would spawn them (on GPUs it forks unless told otherwise). But for what `frugal` leaves
out, all else is the server's own code with its own command line. An engine with variables that are
not vLLM's own is started by its command, as users do it; so are those of demos, benchmarks and
vLLM's own tests.

A forked server is guarded as one by command is, and ends with the nursery, which ends with whoever
made it.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final, Self

import msgspec
import psutil

sys.path.append(str(Path(__file__).resolve().parents[3]))  # tests/ is not installed

from kvstore.demo.engine import EngineError, ServerConfig, launch
from kvstore.testing import tied
from kvstore.testing.process import popen_tied
from tests.integration.engine.frugal import be_frugal
from tests.kit.engines import EngineConfig, EngineServer

ORDER_BYTES_MAX: Final = 64 << 10
READY_TIMEOUT_S: Final = 300.0
IMPORTED: Final = [
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    # What vLLM imports late: its own routes, kinds of quantization, and the connector.
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.rl.online.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.core.sched.scheduler",
    "kvstore.connector.vllm",
]


class Order(msgspec.Struct):
    """One server; a descriptor for its output comes along."""

    arguments: list[str]
    environment: dict[str, str]


class EngineNursery:
    """Starts engines: what `Engine.start` does, in a thirtieth of the time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door = ours
        self._environment = EngineConfig(model=Path()).full_environment()
        with theirs:
            self.process = popen_tied(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A forked child of a process with threads would wait for locks that nobody holds.
                # And a second thread of an engine takes a fifth more of the processor.
                env={**self._environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )

    def start(self, config: EngineConfig, *, log: Path, warm: bool = True) -> EngineServer:
        """As `Engine.start`."""
        # vLLM reads its own variables when it needs them; others are read at import.
        is_late = all(name.startswith("VLLM_") for name in config.environment)
        how = self._launch if is_late else launch
        engine = EngineServer(config, how(config, log), log)
        try:
            engine.await_ready(warm=warm)
        except BaseException:
            engine.kill()
            raise
        return engine

    def _launch(self, config: ServerConfig, log: Path) -> psutil.Process:
        arguments = config.command()[3:]
        order = msgspec.json.encode(Order(arguments, config.full_environment()))
        with log.open("wb") as output:
            socket.send_fds(self._door, [order], [output.fileno()])
        self._door.settimeout(READY_TIMEOUT_S)
        data = self._door.recv(4)
        if not data:
            raise EngineError("the nursery of engines has ended: see what it printed")
        return psutil.Process(int.from_bytes(data, "little"))

    def close(self) -> None:
        """End it; its engines have been stopped."""
        self._door.close()
        self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(arguments: Sequence[str]) -> None:
    """Command line without the program's name."""
    # Processes that vLLM would spawn are forked.
    import multiprocessing.context as contexts

    known = vars(contexts)["_concrete_contexts"]
    known["spawn"] = known["fork"]
    for name in IMPORTED:
        import_module(name)
    be_frugal()
    # Where titles are written is looked for once, and is not found when the environment has moved.
    import_module("setproctitle").getproctitle()
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(fileno=int(arguments[0])) as door:
        while True:
            data, descriptors, _, _ = socket.recv_fds(door, ORDER_BYTES_MAX, 1)
            if not data:
                return
            order = msgspec.json.decode(data, type=Order)
            parent = os.getpid()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            pid = os.fork()
            if pid == 0:
                door.close()
                _become_guard(order, descriptors[0], parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            door.send(pid.to_bytes(4, "little"))
            for descriptor in descriptors:
                os.close(descriptor)


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _become_guard(order: Order, output: int, parent: int) -> None:
    """In a child of the nursery; does not return."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        status = tied.watch(parent, partial(_fork_server, order))
    finally:
        os._exit(status)


def _fork_server(order: Order) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ.clear()
        os.environ.update(order.environment)
        sys.argv = ["api_server", *order.arguments]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, tied.SIGNALS)
        # The server's, as when it spawns: vLLM kills an engine's core with all its children, and
        # who tracks shared memory must be left to remove it.
        resource_tracker.ensure_running()
        from vllm.entrypoints.launchers.api_server.entry import main as serve

        serve()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 -- said where the interpreter would say it
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
