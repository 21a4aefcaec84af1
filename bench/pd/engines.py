"""Engines of `make bench-pd`: each has a core of its own and waits without spinning; vLLM's own
connector."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvstore.demo.engine import EngineError, VllmServer
from tests.kit.engines import EngineConfig

SIDE_PORT: Final = 17600
CORE: Final = "KVSTORE_BENCH_CORE"
"""Variable of an engine's processes."""
SHIM: Final = """import sys
import nixl_cu13._api, nixl_cu13._bindings
from kvstore.transport.nixl import sleeping_progress
resting = sleeping_progress(nixl_cu13._bindings)
resting.__enter__()  # for as long as this module lives
sys.modules["nixl._api"] = nixl_cu13._api
sys.modules["nixl._bindings"] = nixl_cu13._bindings
"""
"""vLLM imports nixl by a name that its wheels for one CUDA version do not have. Progress threads
rest as those of our transfer workers do; NIXL's own never rest, and take a core each."""


FRUGAL: Final = f"""import functools, os, time
os.sched_yield = functools.partial(time.sleep, 0.0005)
if core := os.environ.get("{CORE}"):
    os.sched_setaffinity(0, [int(core)])
"""
"""vLLM's scheduler and workers call `os.sched_yield` without end while they wait for each other; a
worker does for a second after its last step."""


def frugal_environment(folder: Path) -> dict[str, str]:
    """For an engine whose processes wait for each other without spinning. Writes `folder`/frugal,
    which Python reads when it starts."""
    (folder / "frugal").mkdir()
    (folder / "frugal" / "sitecustomize.py").write_text(FRUGAL)
    return {"PYTHONPATH": _with_path(folder / "frugal", os.environ.get("PYTHONPATH", ""))}


def on_its_core(config: EngineConfig, number: int) -> EngineConfig:
    """All processes of this engine on one core, as each engine of a cluster has a GPU of its own:
    two that share cores slow each other down, and one alone computes with those of two."""
    cores = sorted(os.sched_getaffinity(0))
    its = {CORE: str(cores[number % len(cores)]), "OMP_NUM_THREADS": "1"}
    return replace(config, environment=config.environment | its)


def nixl_environment(folder: Path, path: str) -> dict[str, str] | None:
    """For an engine that finds nixl, beside what `path` has; None: it is not installed."""
    if importlib.util.find_spec("nixl_cu13") is None:
        return None
    (folder / "shim" / "nixl").mkdir(parents=True)
    (folder / "shim" / "nixl" / "__init__.py").write_text(SHIM)
    return {"PYTHONPATH": _with_path(folder / "shim", path)}


def _with_path(first: Path, path: str) -> str:
    return os.pathsep.join([str(first), *filter(None, [path])])


@contextmanager
def nixl_pair(config: EngineConfig, folder: Path) -> Iterator[tuple[VllmServer, VllmServer] | str]:
    """vLLM's own connector; a text where it does not run: why."""
    environment = nixl_environment(folder, config.environment.get("PYTHONPATH", ""))
    if environment is None:
        yield "vLLM's NixlConnector needs nixl, which is not installed"
        return
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    engines: list[VllmServer] = []
    why = ""
    try:
        for number, name in enumerate(("p", "d")):
            its = json.dumps({**transfer, "engine_id": f"nixl-{name}"})
            flags = (*config.arguments, "--kv-transfer-config", its)
            port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_PORT + number)}
            its_environment = config.environment | environment | port
            with_nixl = replace(config, arguments=flags, environment=its_environment)
            with_nixl = on_its_core(with_nixl, number)
            engines.append(VllmServer.start(with_nixl, log=folder / f"nixl-{name}.log"))
    except EngineError as error:
        why = f"vLLM's NixlConnector does not start on this machine: {str(error)[:300]}"
    try:
        yield why or (engines[0], engines[1])
    finally:
        for engine in engines:
            engine.stop()
