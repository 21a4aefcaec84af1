"""What every test gets: fixed seeds, skipped hardware, and a check that nothing was left behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import Generator, Iterator
from datetime import datetime
from pathlib import Path

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from kvstore.testing.process import popen_tied
from tests import side_by_side
from tests.amounts import IS_NIGHTLY
from tests.integration.engine.fixtures import (
    encode,
    medium_model,
    plain,
    prompts,
    reference,
    tiny_model,
    vllm,
)
from tests.kit.logs import warnings_since
from tests.kit.nursery import Inherited, Nursery
from tests.leaks import Baseline, prepare

__all__ = [
    "encode",
    "medium_model",
    "plain",
    "prompts",
    "reference",
    "tiny_model",
    "vllm",
]

_LEAK_CHECKED = ("contract", "integration", "faults")
_PARSING = ("style", "docs")
EARLIER_S = 30.0
NVIDIA = Path("/dev/nvidiactl")

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
PROFILE = os.environ.get("KVSTORE_HYPOTHESIS_PROFILE", "fixed")
hypothesis.settings.load_profile(PROFILE)
if PROFILE == "fixed":
    # It draws constants of our modules as well, of those that are loaded by then: which examples
    # a test has would depend on the tests beside it.
    vars(providers)["_get_local_constants"] = Constants


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare()
    if NVIDIA.exists():
        from tests.kit.gpu_party import prepare_gpu

        prepare_gpu()
    side_by_side.configure(config)


def pytest_collection_finish() -> None:
    """Collected tests and loaded modules, a million objects, are no garbage: a collection looks at
    what came later only."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    side_by_side.add_options(parser)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = {}
    if importlib.util.find_spec("vllm") is None:
        lacking["engine"] = pytest.mark.skip(reason="vLLM is not installed: run make test")
    if not NVIDIA.exists():
        lacking["gpu"] = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        for name, skip in lacking.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what the processes warned about, from half a minute before it on."""
    report = yield
    paths: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    if report.failed and set(_LEAK_CHECKED).intersection(item.path.parts):
        since = datetime.fromtimestamp(call.start - EARLIER_S)
        report.sections += list(warnings_since(paths.getbasetemp(), since))
    return report


@pytest.fixture(scope="session", autouse=True)
def forked_commands(request: pytest.FixtureRequest) -> Iterator[Nursery | None]:
    """Commands of kvstore are forked, but in `make nightly`."""
    paths = {part for item in request.session.items for part in item.path.parts}
    if IS_NIGHTLY or not paths.intersection(_LEAK_CHECKED):
        yield None
        return
    with Nursery() as nursery:
        yield nursery


@pytest.fixture(autouse=True)
def by_exec(
    request: pytest.FixtureRequest,
    forked_commands: Nursery | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is about processes has those that users have."""
    if forked_commands is not None and request.node.get_closest_marker("by_exec"):
        monkeypatch.setattr("kvstore.testing.process.launch", popen_tied)


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """What processes inherit from this one before their code runs is as it was: vLLM names
    libraries to load first when it makes a configuration, and a node raises its limits. Nodes of
    later tests would be started by exec."""
    before = Inherited.now()
    yield
    before.restore()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test with real processes: no child, no name in /dev/shm, no descriptor more."""
    if not set(_LEAK_CHECKED).intersection(request.path.parts):
        yield
        return
    baseline = Baseline()
    yield
    found = baseline.wait()
    assert not found, "left behind:\n  " + "\n  ".join(found)


@pytest.fixture(autouse=True)
def no_collection(request: pytest.FixtureRequest) -> Iterator[None]:
    """No garbage collection while sources are parsed.

    What an earlier test left may be finalized amid `ast.parse`, and a finalizer that prints a
    traceback parses as well: CPython before 3.11.8 then raises SystemError, "AST constructor
    recursion depth mismatch" (python/cpython#106905).
    """
    if not set(_PARSING).intersection(request.path.parts):
        yield
        return
    gc.disable()
    yield
    gc.enable()
