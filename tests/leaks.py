"""What a test may not leave behind: processes, names in /dev/shm, open descriptors."""

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
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None)
        libc.mount(b"tmpfs", bytes(SHM), b"tmpfs", 0, b"mode=1777")
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Baseline:
    """What there is when it is made; `wait` says what has been added since, if it stays."""

    def __init__(self) -> None:
        self._children = _children()
        self._shm = set(os.listdir(SHM))
        self._files = _open_files()

    def leaks(self) -> list[str]:
        """What is more than at the start, one line each."""
        new = [pid for pid in sorted(_children() - self._children) if not self._is_a_nodes(pid)]
        found = [f"process {pid}: {_command(pid)}" for pid in new]
        names = sorted(set(os.listdir(SHM)) - self._shm)
        found += [f"/dev/shm/{name}" for name in names if _is_ours(SHM / name)]
        more = _open_files() - self._files
        return found + [f"{count} more open: {kind}" for kind, count in sorted(more.items())]

    def _is_a_nodes(self, pid: int) -> bool:
        """Whether a node that was there before, and may live on, started it: a standby, say."""
        try:
            parent = psutil.Process(pid).ppid()
        except psutil.NoSuchProcess:
            return False
        return parent in self._children and "kvstore.serve.process" in _command(pid)

    def wait(self, deadline_s: float = DEADLINE_S) -> list[str]:
        """What is still more than at the start when the deadline has passed; empty is good."""
        end = time.monotonic() + deadline_s
        while True:
            gc.collect()
            found = self.leaks()
            if not found or time.monotonic() >= end:
                return found
            time.sleep(0.05)


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
    """False when a process that is not ours has it mapped, some other program of this machine; nor
    is anybody's what is gone by now."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    # Not by its name: a semaphore is mapped under another one, before it gets its own.
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    mapped = f" {device} {status.st_ino} "
    ours = _children() | {os.getpid()}
    for pid in psutil.pids():
        if pid not in ours:
            try:
                if mapped in Path(f"/proc/{pid}/maps").read_text():
                    return False
            except OSError:
                continue  # ended meanwhile, or is not ours to look at
    return True


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
