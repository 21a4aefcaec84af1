"""Tests in several processes (`pytest -n N`): who stays together, who runs alone, and the summary.

Every process has fixtures of its own. What shares one that is dear stays in one process: the tests
of the engine that all share, those of a class or a module with a fixture of that scope, modules of
unit tests, and unit tests that import vLLM. The longest groups begin first, by the time limits of
what is marked `slow` in them; the others fill the gaps at the end.

A test marked `alone` measures time or processor: it waits until all others pause. A lock on a file
does it, which every test takes shared and such a test takes exclusively.

Covers: order, processes, the summary. Does not cover: amounts (`amounts`), leaks (`leaks`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.amounts import COVERED
from tests.steps import STEPS

LONGEST: Final = 40
SHARED_ENGINE: Final = "plain"
"""Session fixture with an engine: one in a run, not one in each process."""
SHARED: Final = "engine"
IMPORTING: Final = "tests/unit/connector/"
"""Tests that import vLLM, which takes a process as long as all of them: one process does."""
GROUPS: Final = "groups.json"
COVERED_BY: Final = "covered."
_TIMEOUT_S: Final = 300.0


def add_options(parser: pytest.Parser) -> None:
    """`--steps-min`."""
    parser.addoption(
        "--steps-min",
        type=int,
        default=0,
        metavar="N",
        help="fail a run whose state machines took fewer steps than this",
    )


# ── who goes where ───────────────────────────────────────────────────────────────────────────────


class Order:
    """Groups, for the process that hands out tests, and the order in which they begin."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """After the tests were shuffled."""
        yield
        groups = {item: _group(item) for item in items}
        limits: dict[str, float] = defaultdict(float)
        turns: dict[str, int] = {}
        for item, group in groups.items():
            if item.get_closest_marker("slow"):
                limits[group] += _time_limit_s(item)
            turns.setdefault(group, len(turns))

        def place(item: pytest.Item) -> tuple[bool, bool, float, int]:
            group = groups[item]
            return (is_alone(item), group != SHARED, -limits[group], turns[group])

        items.sort(key=place)
        if self._directory is not None:
            draft = self._directory / f"groups.{os.getpid()}"
            draft.write_bytes(msgspec.json.encode({i.nodeid: groups[i] for i in items}))
            draft.rename(self._directory / GROUPS)


class Scheduler(LoadScopeScheduling):
    """Hands out whole groups. That of xdist itself reads a group's name from a test's, which pytest
    no longer lets it change."""

    directory: Path

    @functools.cached_property
    def _groups(self) -> dict[str, str]:
        """By test; all processes have written the same."""
        return msgspec.json.decode((self.directory / GROUPS).read_bytes(), type=dict[str, str])

    def _split_scope(self, nodeid: str) -> str:
        return self._groups[nodeid]

    def mark_test_pending(self, item: str) -> None:
        """The test during which a process died may run again: it is in the queue already."""

    def _reschedule(self, node: Any) -> None:
        """A process keeps its last test until it has another one or is told that there is none. In
        the place of one that died it would get one group, of one test or of tests that have run
        already, and wait for ever."""
        while node in self.registered_collections and not node.shutting_down:
            super()._reschedule(node)
            if self._pending_of(self.assigned_work[node]) >= 2:
                return


def _group(item: pytest.Item) -> str:
    if SHARED_ENGINE in getattr(item, "fixturenames", ()):
        return SHARED
    module = item.nodeid.split("::")[0]
    scopes = set()
    if isinstance(item, pytest.Function):
        scopes = {found[-1].scope for found in item._fixtureinfo.name2fixturedefs.values()}
    suffix = "-alone" if is_alone(item) else ""
    is_unit = module.startswith("tests/unit/")
    if module.startswith(IMPORTING) or (is_unit and item.get_closest_marker("engine")):
        return IMPORTING + suffix
    if "module" in scopes or is_unit:
        return module + suffix
    if "class" in scopes:
        return item.nodeid.rsplit("::", 1)[0] + suffix
    return item.nodeid


def is_alone(item: pytest.Item) -> bool:
    """Whether nothing else may run meanwhile."""
    return item.get_closest_marker("alone") is not None


def _time_limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else _TIMEOUT_S


class Turns:
    """One file, locked shared by each test and exclusively by one that runs alone. A second file is
    the queue: without it new tests would overtake who waits for all to pause.

    The locks are those of POSIX: a forked child has none of them, so that they end with the process
    of the tests whatever it leaves behind.
    """

    def __init__(self, directory: Path) -> None:
        self._room = os.open(directory / "room", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._queue = os.open(directory / "queue", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Before the timeout of the test begins."""
        how = fcntl.LOCK_EX if is_alone(item) else fcntl.LOCK_SH
        fcntl.lockf(self._queue, fcntl.LOCK_EX)
        fcntl.lockf(self._room, how)
        fcntl.lockf(self._queue, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.lockf(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """Leave, whatever is locked."""
        os.close(self._room)
        os.close(self._queue)


# ── what a run says in the end ───────────────────────────────────────────────────────────────────


class Summary:
    """Seconds by test and by folder, and what was covered, of all processes together."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps_min = config.getoption("--steps-min")
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._own: set[int] = set()

    def _shared(self) -> tempfile.TemporaryDirectory[str]:
        """What all processes read and write."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="kvstore-turns-")
        return self._directory

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A process has started, and has no tests yet."""
        node.workerinput["turns"] = self._shared().name
        self._own |= {child.pid for child in psutil.Process().children()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Scheduler:
        """Before a process has tests, too."""
        config.option.loadscopereorder = False  # as they were collected
        scheduler = Scheduler(config, log)
        scheduler.directory = Path(self._shared().name)
        return scheduler

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """What a process that died has left behind is adopted by this one (`leaks`) and would be in
        the way of all tests to come."""
        if error is None:
            return
        process = node.gateway._io  # there is no public name
        process.kill()
        process.wait()  # its pipes close before its children are adopted
        for child in psutil.Process().children():
            if child.pid not in self._own:
                for each in (*child.children(recursive=True), child):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                child.wait()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    @property
    def _steps_are_missing(self) -> bool:
        return bool(COVERED[STEPS] < self._steps_min)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._directory is not None:
            for path in Path(self._directory.name).glob(f"{COVERED_BY}*"):
                COVERED.update(msgspec.json.decode(path.read_bytes(), type=dict[str, int]))
            self._directory.cleanup()
        if self._steps_are_missing:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        folders: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self._seconds.items():
            folders["/".join(name.split("::")[0].split("/")[1:3]).removesuffix(".py")] += seconds
        if sum(self._seconds.values()) > LONGEST:
            write(f"the {LONGEST} longest, in seconds:")
            for name, seconds in _largest(self._seconds)[:LONGEST]:
                write(f"{seconds:8.1f}  {name}")
            write("by folder, in seconds of all processes:")
            for folder, spent in _largest(folders):
                write(f"{spent:8.1f}  tests/{folder}")
        for what, number in sorted(COVERED.items()):
            write(f"covered: {number:,} {what}")
        if self._steps_are_missing:
            write(f"fewer property steps than {self._steps_min:,}", red=True)


def _largest(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


class Worker:
    """One of several processes: it tells what it covered, and its end is seen."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{COVERED_BY}{os.getpid()}"

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Before a test forks: a child that kept the pipes of this process would hide its death."""
        plugins = session.config.pluginmanager.get_plugins()
        channel = next(plugin.channel for plugin in plugins if hasattr(plugin, "channel"))
        pipes = channel.gateway._io  # there is no public name
        descriptors = [pipes.infile.fileno(), pipes.outfile.fileno()]
        os.register_at_fork(after_in_child=functools.partial(_close, descriptors))

    def pytest_runtest_logfinish(self) -> None:
        """After each test, since it may be the last one before this process dies."""
        draft = self._path.with_name(f"draft.{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(COVERED))
        draft.rename(self._path)


def _close(descriptors: Iterable[int]) -> None:
    """Keep the numbers, of which nobody else may think that they are free."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def configure(config: pytest.Config) -> None:
    """Register what this process needs."""
    told: Mapping[str, Any] | None = getattr(config, "workerinput", None)
    directory = Path(told["turns"]) if told else None
    config.pluginmanager.register(Order(directory), "kvstore-order")
    if directory is None:
        config.pluginmanager.register(Summary(config), "kvstore-summary")
        return
    turns = Turns(directory)
    config.add_cleanup(turns.close)
    config.pluginmanager.register(turns, "kvstore-turns")
    config.pluginmanager.register(Worker(directory), "kvstore-worker")
