"""What a test may not leave behind: processes, names in /dev/shm, open descriptors.

Only of this run: others use the same machine, among them workers of one run side by side, each with
children of its own. Processes are descendants, descriptors are this process's. Who made a name in
/dev/shm nobody can tell afterwards, so a name counts that was there when the test ended, stays, and
that no stranger uses: maps, has open, or has anything open below.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import Counter
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
DEADLINE_S = 10.0
"""Promise P3: back to baseline within 10 s."""
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000


def prepare() -> None:
    """Once per run, before any baseline.

    This process and what it starts see a /dev/shm of their own, so that nothing that others do on
    this machine looks like a leak. That takes root; elsewhere names are told apart by their users.

    Orphans of killed processes become children of this one, so that they can be seen. Python's own
    helpers, which live until this process ends, are started now and so belong to every baseline.
    """
    _take_own_shared_memory()
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _take_own_shared_memory() -> bool:
    """An empty /dev/shm for this process and its descendants, if that is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None) == 0
        and libc.mount(b"tmpfs", bytes(SHM), b"tmpfs", ctypes.c_ulong(0), b"mode=1777") == 0
    )


class Baseline:
    """What there is when it is made; `wait` says what has been added since, if it stays."""

    def __init__(self) -> None:
        self._children = _children()
        self._shm = set(os.listdir(SHM))
        self._files = _open_files()

    def leaks(self, names: set[str] | None = None) -> list[str]:
        """What is more than at the start, one line each; of shared memory these names only."""
        new = [pid for pid in sorted(_children() - self._children) if not self._is_a_nodes(pid)]
        found = [f"process {pid}: {_command(pid)}" for pid in new]
        names = self.new_names() if names is None else names & self.new_names()
        found += [f"/dev/shm/{name}" for name in sorted(names) if _is_ours(SHM / name)]
        more = _open_files() - self._files
        return found + [f"{count} more open: {kind}" for kind, count in sorted(more.items())]

    def new_names(self) -> set[str]:
        """In shared memory, whoever made them."""
        return set(os.listdir(SHM)) - self._shm

    def _is_a_nodes(self, pid: int) -> bool:
        """Whether a node that was there before, and may live on, started it: a standby, say."""
        try:
            parent = psutil.Process(pid).ppid()
        except psutil.NoSuchProcess:
            return False
        names = ("kvstore.node.process", "tests.kit.nursery")  # by exec, or forked from the nursery
        return parent in self._children and any(name in _command(pid) for name in names)

    def wait(self, deadline_s: float = DEADLINE_S) -> list[str]:
        """What is still more than at the start when the deadline has passed; empty is good."""
        end = time.monotonic() + deadline_s
        names = self.new_names()
        while self.leaks(names):
            gc.collect()  # a cycle may hold a descriptor
            if time.monotonic() >= end:
                return self.leaks(names)
            time.sleep(0.05)
        return []


def _children() -> set[int]:
    """Living descendants, adopted ones included. Dead ones that nobody waits for are reaped."""
    alive = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                _reap(process)
            else:
                alive.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return alive


def _reap(process: psutil.Process) -> None:
    if process.ppid() == os.getpid():
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            return


def _is_ours(path: Path) -> bool:
    """False when a stranger uses it, some other program of this machine; nor is anybody's what is
    gone by now."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if os.geteuid() not in (0, status.st_uid):
        return False  # whose processes this user cannot look at, and are not of this run
    # Not by its name: a semaphore is mapped under another one, before it gets its own.
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    mapped = f" {device} {status.st_ino} "
    ours = _children() | {os.getpid()}
    for pid in psutil.pids():
        if pid not in ours:
            try:
                if mapped in Path(f"/proc/{pid}/maps").read_text() or _has_open(pid, path):
                    return False
            except OSError:
                continue  # ended meanwhile, or is not ours to look at
    return True


def _has_open(pid: int, path: Path) -> bool:
    """It, or anything below it. Raises OSError."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if target == str(path) or target.startswith(f"{path}/"):
            return True
    return False


def _open_files() -> Counter[str]:
    """Open descriptors of this process by kind (`socket`, `/memfd:…`, a path, …)."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        kinds[target.split(":[")[0]] += 1
    return kinds


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.NoSuchProcess:
        return "ended meanwhile"
