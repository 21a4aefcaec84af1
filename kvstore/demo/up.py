"""`kvstore up`: a node, engines that share it and a router on this machine, from one command.

    node ── engine a (vLLM) ──┐
      └──── engine b (vLLM) ──┴── router :8000

Commands to try are printed when it serves; all of it goes on until Ctrl-C or SIGTERM, and then
ends. An engine that ends by itself is named, and the router goes on with the others. Each engine
has its own share of the machine's GPUs, if there are as many. Logs and sockets are in a directory
that is removed at Ctrl-C, but kept once something has gone wrong: what is said then names its logs.

Everything listens on loopback only, without TLS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import shlex
import shutil
import signal
import socket
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from kvstore.demo.engine import SERVED_NAME, ServerConfig, VllmServer, launch
from kvstore.demo.models import MEDIUM, build_model, default_cache
from kvstore.demo.stage import DRAM
from kvstore.errors import ConfigError, KVStoreError
from kvstore.supervisor.child import told
from kvstore.testing.process import NodeFailed, NodeProcess, RouterProcess

WATCH_S: Final = 0.5
WRONG_SETTING: Final = 2
"""Exit status of a command that refuses a flag or setting, in one sentence."""
NODE: Final = "up"
"""Name of the node in its index."""
_RENDERS: Final = "--enable-scale-out"
"""Flag of an engine by which the router can ask it for the tokens of a prompt, to find its keys."""


def engine_names(count: int) -> Iterator[str]:
    """Names of `count` engines: a, b, … z, then a1, b1, …"""
    names = (f"{x}{n or ''}" for n in itertools.count() for x in string.ascii_lowercase)
    return itertools.islice(names, count)


def gpus_of_engines(count: int, gpus: Sequence[str]) -> list[str]:
    """`CUDA_VISIBLE_DEVICES` of each engine: equal shares, neighbours together; empty where engines
    outnumber the GPUs, so that they share all of them."""
    share = len(gpus) // count
    return [",".join(gpus[share * at : share * (at + 1)]) for at in range(count)]


def gpus_here(devices: Path = Path("/dev")) -> list[str]:
    """Numbers of the GPUs that this process may use."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return chosen.split(",") if chosen else []
    return sorted(
        (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*")), key=int
    )


def engine_configs(
    model: str | None, count: int, flags: Sequence[str], attach: Path
) -> list[ServerConfig]:
    """Settings of the engines on the node with this attach socket. `model` None: the demo's, which
    is built if missing.
    """
    places = {"VLLM_RPC_BASE_PATH": str(attach.parent)}  # vLLM leaves sockets there
    if model is None:
        small = ServerConfig(model=build_model(default_cache() / "models" / MEDIUM.size))
        config = dataclasses.replace(
            small, socket=attach, flags=(*small.flags, _RENDERS, *flags), environment=places
        )
        return [config] * count
    path = Path(model).resolve()
    return [
        ServerConfig(
            model=path if path.is_dir() else model,
            served_name=path.name if path.is_dir() else model,
            socket=attach,
            max_model_len=None,
            flags=(_RENDERS, *flags),
            # What the operator has set wins over the demo's.
            environment={**places, **os.environ, **({"CUDA_VISIBLE_DEVICES": own} if own else {})},
        )
        for own in gpus_of_engines(count, gpus_here())
    ]


def commands_to_try(
    router: RouterProcess,
    ports: Sequence[int],
    node: NodeProcess,
    request: Path,
    file: str | None,
) -> list[tuple[str, str]]:
    """(purpose, command) for another terminal, with engines at these ports. `file`: --file."""
    program = shlex.quote(str(Path(sys.executable).with_name("kvstore")))
    at = f"--socket {shlex.quote(str(node.socket))}"
    disk = f" --file {shlex.quote(file)}" if file else ""
    post = f"{router.url}/v1/completions -H 'Content-Type: application/json' -d @{request}"
    pages = [each.metrics_url.removesuffix("metrics") for each in (node, router)]
    reset = " ".join(f"http://127.0.0.1:{port}/reset_prefix_cache" for port in ports)
    return [
        ("ask; the second time usage shows how much of the prompt was cached", f"curl -s {post}"),
        ("engines forget their own caches: ask again, kvstore serves", f"curl -s -X POST {reset}"),
        ("why the latest requests hit or missed", f"{program} explain {at} --last 5"),
        ("what the node holds", f"{program} inspect {at}"),
        ("live", f"{program} top {at}"),
        ("the same in a browser, for the node", pages[0]),
        ("the same in a browser, for the router", pages[1]),
        ("what is wrong with this machine, if anything", f"{program} doctor {at}{disk}"),
        ("metrics of node and router", f"curl -s {node.metrics_url} {router.metrics_url}"),
        ("the node forgets too", f"{program} clear {at}"),
        ("kill the node's process: another goes on with its memory", f"kill -9 {node.pid}"),
        ("kill the node: the engines go on without", f"kill -9 {node.supervisor_pid}"),
    ]


def refuse_taken_port(port: int) -> None:
    """Raises OSError if a port is taken, before the minute in which the engines start."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise OSError(f"port {port} is taken ({why}): give another --port") from error


def start_node(work: Path, dram: str, file: str | None) -> NodeProcess:
    """Start the node by the flags of `kvstore up`. Raises ConfigError: it refuses one of them;
    NodeFailed: it does not start.
    """
    flags = ["--node-name", NODE, "--index-listen", "127.0.0.1:0", "--insecure"]
    flags += ["--file", file] if file else []
    try:  # no limits: large memory takes minutes to pin, and Ctrl-C ends every wait
        return NodeProcess.start(work, dram=dram, flags=flags, timeout_s=math.inf)
    except NodeFailed as error:
        if error.code != WRONG_SETTING:
            raise
        raise ConfigError(error.stderr.rpartition("kvstore: ")[2].strip()) from None


def start_engines(
    console: Console, stack: ExitStack, configs: Sequence[ServerConfig], logs: Path
) -> dict[str, VllmServer]:
    """Start all engines side by side, and show the logs' last lines until they answer; they end
    with `stack`. Returns them by name. Raises EngineError: one does not start."""
    engines = {}
    for name, config in zip(engine_names(len(configs)), configs, strict=True):
        log = logs / f"engine-{name}.log"
        engines[name] = stack.enter_context(VllmServer(config, launch(config, log), log))
    with console.status("") as status:
        for name, engine in engines.items():
            engine.await_ready(waiting=partial(_show_start, status, name, engine))
    return engines


def _show_start(status: Status, name: str, engine: VllmServer) -> None:
    status.update(escape(f"engine {name}: {engine.last_line()[:100] or 'no output yet'}"))


@contextlib.contextmanager
def work_directory(wrong: Sequence[str]) -> Iterator[Path]:
    """Directory for logs and sockets, removed if a setting is refused, and at Ctrl-C before
    anything is `wrong`.
    """
    work = Path(mkdtemp(prefix="kvstore-up-"))
    try:
        yield work
    except (KeyboardInterrupt, ConfigError):
        if not wrong:
            shutil.rmtree(work, ignore_errors=True)
        raise


def watch(
    complain: Callable[[str], object],
    engines: dict[str, VllmServer],
    router: RouterProcess,
    node: NodeProcess,
) -> None:
    """Complain when the node or an engine ends; returns when all engines or the router have
    ended.
    """
    left, has_node = dict(engines), True
    while left:
        if (code := router.process.poll()) is not None:
            complain(f"the router has ended with {told(code)}: {router.log[-400:].rstrip()}")
            return
        if has_node and (code := node.process.poll()) is not None:
            has_node = False
            log = node.directory / "node.log"
            complain(f"the node has ended with {told(code)}, engines go on without it (log: {log})")
        for name, engine in list(left.items()):
            if engine.wait(WATCH_S / len(left)):
                del left[name]
                rest = "the others go on" if left else "there is no other"
                complain(f"engine {name} has ended, {rest}: {engine.last_error()}")


def main(
    model: str | None = None,
    *,
    engines: int = 2,
    port: int = 8000,
    dram: str | None = None,
    file: str | None = None,
    flags: Sequence[str] = (),
) -> int:
    """Run the command; returns the exit status: 0 after Ctrl-C or SIGTERM, 1 when something does
    not start, or when the router or the last engine has ended. Raises ConfigError: the node refuses
    a setting.
    """
    console, wrong = Console(soft_wrap=True), list[str]()

    def complain(text: str) -> None:
        wrong.append(text)
        console.print(f"✗ {text}", markup=False, highlight=False)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with ExitStack() as stack:
            refuse_taken_port(port)
            work = stack.enter_context(work_directory(wrong))
            node = start_node(work, dram or ("auto" if model else DRAM), file)
            stack.enter_context(node)
            console.print(f"node: ready; logs are in {work}", highlight=False)
            configs = engine_configs(model, engines, flags, node.socket)
            count = f"{len(configs)} engine{'s' if len(configs) > 1 else ''}"
            console.print(f"{count}: starting, for a minute or more", highlight=False)
            running = start_engines(console, stack, configs, work)
            serve = ["--listen", f"127.0.0.1:{port}", "--insecure", "--index", node.index]
            serve += [engine.as_worker(name, NODE) for name, engine in running.items()]
            router = RouterProcess.start(work, serve, timeout_s=math.inf)
            stack.enter_context(router).await_worker(math.inf)
            _name_commands(console, router, running, node, configs[0].served_name, file)
            watch(complain, running, router, node)
    except KeyboardInterrupt:
        console.print("All of it was stopped.")
        return 0
    except ConfigError:
        raise
    except (KVStoreError, NodeFailed, OSError, TimeoutError, ImportError, ValueError) as error:
        complain(str(error))
    return 1


def _name_commands(
    console: Console,
    router: RouterProcess,
    engines: dict[str, VllmServer],
    node: NodeProcess,
    model: str = SERVED_NAME,
    file: str | None = None,
) -> None:
    request = node.directory / "request.json"
    prompt = " ".join(map(str, range(600)))
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    request.write_bytes(msgspec.json.encode(body))
    said = f"{router.url}/v1 serves {model} until Ctrl-C; in another terminal:"
    console.print(said, style="bold", markup=False, highlight=False)
    ports = [engine.port for engine in engines.values()]
    for what, command in commands_to_try(router, ports, node, request, file):
        console.print(f"[dim]# {what}[/]")
        console.print(command, highlight=False, markup=False)
