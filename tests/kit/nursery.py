"""kvstore's own commands, forked from one process that has imported them: a start of a node takes
0.14 s of processor, not 0.95.

    python -m tests.kit.nursery DOOR PARENT     forks a command for each order that comes through
                                                this descriptor

What a user starts by three exec's (command line, supervisor, node process) is forked here, and all
else is the command's own code with its own arguments: it is a child of the tests' process, has a
session, descriptors and signals as after an exec, in the network of the thread that starts it, and
ends with the tests. A command with limits or early variables (`EARLY`) of its own is started by
exec, and so are those of tests marked `by_exec`, and all in `make nightly`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, NoReturn, Self

import msgspec

from kvstore.net.process import Spawned, die_with, pair
from kvstore.testing import process
from kvstore.testing.process import popen_tied

ROOT: Final = Path(__file__).resolve().parents[2]
ORDER_BYTES_MAX: Final = 64 << 10
EARLY: Final = ("PYTHON", "LD_PRELOAD", "NUMBA_", "OMP_", "OPENBLAS_", "OTEL_")
"""Variables that begin so are read when Python starts or a module is imported."""
LIMITS: Final = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
MAINS: Final = ("kvstore.cli.main", "tests.integration.cluster.other_engine")
"""Modules whose `main` is forked."""
OWN_NETWORK: Final = Path("/proc/thread-self/ns/net")
"""That of a thread, and of all that it starts."""
CLONE_NEWNET: Final = 0x40000000
IMPORTED: Final = (
    "kvstore.cli.main",
    "kvstore.config.cluster",
    "kvstore.config.node",
    "kvstore.config.router",
    "kvstore.indexer.replica",
    "kvstore.node.node",
    "kvstore.node.process",
    "kvstore.node.publish",
    "kvstore.peers.member",
    "kvstore.router.process",
    "kvstore.supervisor.supervisor",
    "kvstore.testing.raw_engine",
)


class Order(msgspec.Struct):
    """One command, its module first; descriptors of its network, stdin, stdout and stderr come
    along."""

    arguments: list[str]
    directory: str
    environment: dict[str, str]


# ── in the tests' process ─────────────────────────────────────────────────────────────────────────


class Forked(subprocess.Popen[str]):
    """A process that was not started here, but is a child of this one."""

    def __init__(self, command: Sequence[str], pid: int, stdout: int) -> None:
        self._child_created, self._waitpid_lock = False, threading.Lock()
        self.args, self.pid, self.returncode = command, pid, None
        self.stdin = self.stderr = None
        self.stdout = os.fdopen(stdout, "r", buffering=1, encoding="utf-8")
        self._child_created = True


class Nursery:
    """Starts commands of kvstore; of one process of the tests, which is a subreaper."""

    def __init__(self) -> None:
        self._lock, self._place = threading.Lock(), Inherited.now()
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = popen_tied(
                [
                    *(sys.executable, "-m", "tests.kit.nursery"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A forked child of a process with threads would wait for locks that nobody holds.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )
        self._heard(1)  # it has imported all
        process.launch = self.popen

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """As `popen_tied`, by fork where that makes no difference."""
        is_ours = command[:2] == [sys.executable, "-m"] and command[2] in MAINS
        if not is_ours or Inherited.now(options["env"]) != self._place:
            return popen_tied(command, **options)
        order = msgspec.json.encode(Order(command[2:], os.getcwd(), options["env"]))
        out, its_out = os.pipe()
        try:
            with open(os.devnull, "r+b") as nothing, OWN_NETWORK.open("rb") as network, self._lock:
                given = (options["stdin"], its_out, options["stderr"])
                files = [nothing if each == subprocess.DEVNULL else each for each in given]
                socket.send_fds(self._door, [order], [_number(each) for each in (network, *files)])
                pid = int.from_bytes(self._heard(4), "little")
        except BaseException:
            os.close(out)
            raise
        finally:
            os.close(its_out)
        return Forked(command, pid, out)

    def _heard(self, size_bytes: int) -> bytes:
        """Its answer. Never that of a dead one, since signals to pid 0 reach all processes here."""
        data = self._door.recv(size_bytes)
        if len(data) != size_bytes:
            raise RuntimeError("the nursery of commands has ended: see what it printed")
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        process.launch = popen_tied
        self._door.close()
        self._process.wait(60)


class Inherited(NamedTuple):
    """What a process has from the one that made it, or reads before its code runs: it is the
    nursery's in a forked command. All other variables are those of its order."""

    early: dict[str, str]
    """Variables, by name."""
    limits: tuple[tuple[int, int], ...]
    """Soft and hard, of LIMITS."""

    @classmethod
    def now(cls, environment: Mapping[str, str] = os.environ) -> Inherited:
        """By a child of this process with this environment."""
        early = {name: text for name, text in environment.items() if _is_early(name)}
        return cls(early, tuple(map(resource.getrlimit, LIMITS)))

    def restore(self) -> None:
        """Make it so again in this process."""
        for name in [name for name in os.environ if _is_early(name) and name not in self.early]:
            del os.environ[name]
        os.environ.update(self.early)
        for limit, values in zip(LIMITS, self.limits, strict=True):
            if resource.getrlimit(limit) != values:
                resource.setrlimit(limit, values)


def _is_early(name: str) -> bool:
    return name.startswith(EARLY) and name not in ("PYTHONUNBUFFERED", "PYTHONSAFEPATH")


def _number(file: int | IO[Any]) -> int:
    return file if isinstance(file, int) else file.fileno()


def enter_network(space: int) -> None:
    """Move this thread to a network, by its descriptor. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


# ── in the nursery ────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str]) -> None:
    """Command line without the program's name."""
    parent, given = int(arguments[1]), set(os.environ)
    for name in IMPORTED:
        import_module(name)
    added = {name: os.environ[name] for name in os.environ if name not in given}
    supervisor = import_module("kvstore.supervisor.supervisor")
    supervisor.Supervisor.__init__.__kwdefaults__["spawn"] = _fork_node_process
    os.execv = functools.partial(_become, supervisor.main)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(arguments[0])) as door:
        door.send(b"!")
        while True:
            data, files, _, _ = socket.recv_fds(door, ORDER_BYTES_MAX, 4)
            if not data:
                return
            order = msgspec.json.decode(data, type=Order)
            order.environment = added | order.environment
            said, says = os.pipe()
            between = os.fork()
            if between == 0:  # ends at once: its child becomes one of the tests' process
                if pid := os.fork():
                    os.write(says, pid.to_bytes(4, "little"))
                    os._exit(0)
                _leave_only([0, 1, 2, *files])
                _end_with(functools.partial(_run, order, files, parent))
            os.waitpid(between, 0)
            door.send(os.read(said, 4))
            for fd in (said, says, *files):
                os.close(fd)


def _run(order: Order, files: list[int], parent: int) -> None:
    """The command, in a process of its own."""
    while os.getppid() != parent:
        os.sched_yield()
    die_with(parent)
    network, *files = files
    if not os.path.samestat(os.fstat(network), OWN_NETWORK.stat()):
        enter_network(network)
    for number, fd in enumerate(files):
        os.dup2(fd, number)
    _leave_only([0, 1, 2])
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = order.arguments
    import_module(order.arguments[0]).main()


def _become(supervise: Callable[[list[str]], int], _: str, command: list[str]) -> NoReturn:
    """In place of exec: the supervisor's module, whose arguments follow its name."""
    assert command[1:4] == ["-P", "-m", "kvstore.supervisor.supervisor"], command
    sys.exit(supervise(command[4:]))


def _fork_node_process() -> Spawned:
    """What `kvstore.net.process.spawn` does by exec."""
    parent, (ours, its) = os.getpid(), pair()
    pid = os.fork()
    if pid == 0:
        _end_with(functools.partial(_be_node_process, its, parent))
    its.close()
    return Spawned(pid, functools.partial(_wait, pid), ours)


def _be_node_process(its: socket.socket, parent: int) -> int:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _leave_only([0, 1, 2, its.fileno()])
    status: int = import_module("kvstore.node.process").main([str(its.detach()), str(parent)])
    return status


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _leave_only(files: Sequence[int]) -> None:
    """Close all other descriptors."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in files:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))


def _end_with(work: Callable[[], int | None]) -> NoReturn:
    """Do the work, then what the interpreter does at its end; never returns."""
    status: Any = 1
    try:
        status = work()
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001 -- said where the interpreter would say it
        sys.excepthook(*sys.exc_info())
    finally:
        if isinstance(status, str):
            sys.stderr.write(f"{status}\n")
            status = 1
        vars(threading)["_shutdown"]()
        vars(atexit)["_run_exitfuncs"]()
        os._exit(status or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
