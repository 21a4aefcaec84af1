"""The leak check itself: each kind of leak is seen, and its end too."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.leaks import SHM, Baseline
from tests.style.tree import ROOT


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Of earlier tests: a socket that goes in the middle of a test hides one that comes."""
    gc.collect()


def test_a_clean_test_leaves_nothing() -> None:
    assert Baseline().wait(deadline_s=0.0) == []


def test_a_child_is_seen_until_it_ends() -> None:
    baseline = Baseline()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert any(line.startswith(f"process {child.pid}") for line in baseline.leaks())
    child.communicate(b"\n")
    assert baseline.wait() == []


def test_an_orphan_is_seen_and_reaped() -> None:
    baseline = Baseline()
    parent = """if True:
        import signal, subprocess, sys
        sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
        null = subprocess.DEVNULL
        print(subprocess.Popen(sleeper, stdout=null, stderr=null).pid)
    """
    shown = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, check=True
    )
    orphan = psutil.Process(int(shown.stdout))
    assert any(line.startswith(f"process {orphan.pid}") for line in baseline.leaks())
    orphan.send_signal(signal.SIGKILL)
    assert baseline.wait() == []
    assert not psutil.pid_exists(orphan.pid)


def test_a_name_in_shared_memory_is_seen() -> None:
    baseline = Baseline()
    name = f"kvstore-test-{uuid.uuid4().hex}"
    (SHM / name).touch()
    try:
        assert baseline.leaks() == [f"/dev/shm/{name}"]
    finally:
        (SHM / name).unlink()
    assert baseline.wait() == []


# As semaphores come about: mapped under one name, used under another.
MAPS = """if True:
    import mmap, os, sys
    first = sys.argv[1] + "-first"
    with open(first, "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        mapping = mmap.mmap(file.fileno(), 0)
    os.link(first, sys.argv[1])
    os.unlink(first)
"""
# As simulations of another run: nothing of it is mapped.
OPENS = """if True:
    import os, sys
    os.mkdir(sys.argv[1])
    open(sys.argv[1] + "/file", "w").close()
    os.open(sys.argv[1], os.O_RDONLY)
"""
OPENS_INSIDE = OPENS.replace("os.open(sys.argv[1]", 'os.open(sys.argv[1] + "/file"')


@pytest.mark.parametrize("program", [MAPS, OPENS, OPENS_INSIDE], ids=["maps", "opens", "inside"])
def test_what_another_program_uses_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    baseline = Baseline()
    path = SHM / f"kvstore-test-{uuid.uuid4().hex}"
    command = [sys.executable, "-c", program + "    print(flush=True)\n    input()\n", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert f"/dev/shm/{path.name}" in baseline.leaks(), "of a child it is"
        with monkeypatch.context() as patch:
            patch.setattr("tests.leaks._children", set)  # as if the child were a stranger
            assert not any(path.name in line for line in baseline.leaks())
        child.communicate(b"\n")
    assert f"/dev/shm/{path.name}" in baseline.leaks(), "nobody's any more"
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert baseline.wait() == []


def test_a_run_of_root_sees_nobody_elses_names() -> None:
    """Left-overs of another run, whose processes are gone."""
    program = """if True:
        import os
        from tests.leaks import SHM, _take_own_shared_memory
        print(_take_own_shared_memory(), os.listdir(SHM))
        (SHM / "kvstore-test-inside").touch()
    """
    path = SHM / f"kvstore-test-{uuid.uuid4().hex}"
    path.touch()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
        )
        if not done.stdout.startswith("True"):
            pytest.skip("this user may not mount")
        assert done.stdout == "True []\n"
        assert not (SHM / "kvstore-test-inside").exists()
    finally:
        path.unlink()


def test_a_name_that_comes_after_the_end_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs side by side make names all the time: one of them is always new."""
    baseline = Baseline()
    listed = os.listdir
    names: list[Path] = []

    def more(path: str | Path) -> list[str]:
        if path == SHM:
            names.append(SHM / f"kvstore-test-{uuid.uuid4().hex}")
            names[-1].touch()
        return listed(path)

    monkeypatch.setattr("tests.leaks.os.listdir", more)
    try:
        found = baseline.wait(deadline_s=0.0)
        assert str(names[0]) in found
        assert str(names[-1]) not in found
    finally:
        for name in names:
            name.unlink()


def test_a_name_that_is_gone_by_now_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs make names and remove them while this one looks."""
    baseline = Baseline()
    listed = os.listdir

    def earlier(path: str | Path) -> list[str]:
        return [*listed(path), *(["kvstore-test-gone"] if path == SHM else [])]

    monkeypatch.setattr("tests.leaks.os.listdir", earlier)
    assert baseline.leaks() == []


def test_a_descriptor_is_seen(tmp_path: Path) -> None:
    baseline = Baseline()
    with socket.socket(), (tmp_path / "file").open("w"):
        memory = os.memfd_create("kvstore-test")
        kinds = sorted(line.split(": ")[1] for line in baseline.leaks())
        assert kinds == sorted([f"{tmp_path}/file", "/memfd:kvstore-test (deleted)", "socket"])
        os.close(memory)
    assert baseline.wait() == []


@pytest.mark.parametrize("deadline_s", [0.0, 0.2])
def test_waiting_ends(deadline_s: float) -> None:
    baseline = Baseline()
    with socket.socket():
        assert baseline.wait(deadline_s=deadline_s) == ["1 more open: socket"]
