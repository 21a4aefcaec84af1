"""The file tier killed in a process of its own, and on a disk that is full.

Does not cover: calls that fail in the kernel (`test_calls_that_fail.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.fsck import fsck
from tests.style.tree import ROOT
from tests.unit.tiers.file.kit import Driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CHILD = """if True:
    import sys
    from pathlib import Path
    from tests.unit.tiers.file.kit import Driver
    directory, node, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    shared = {"shared": True, "node": node, "poll_interval_ms": 1 << 30} if node else {}
    driver = Driver(directory, **shared).recovered()
    for number in range(count):
        written = driver.write([number])
        print(number, written[0], flush=True)
    sys.stdin.read()
"""


def child(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def killed_after(process: subprocess.Popen[str], lines: int) -> None:
    """kill -9 once it has said so many lines."""
    with process:
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline(), "it ended early"
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("lines", [1, 8, 16])
def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path, lines: int) -> None:
    store = tmp_path / "store"
    killed_after(child(str(store), "", "16"), lines)
    driver = Driver(store).recovered()
    assert driver.read(range(lines)) == [True] * lines
    driver.close()
    assert fsck(store).status == 0


def test_another_node_serves_what_a_killed_one_stored(tmp_path: Path) -> None:
    killed_after(child(str(tmp_path), "a", "10"), 10)
    b = Driver(tmp_path, shared=True, node="b", poll_interval_ms=1 << 30).recovered()
    assert b.read(range(10)) == [True] * 10, "the unfinished segment too"
    b.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_full_disk_stops_writes_and_frees_itself_of_nothing(small_disk: Path) -> None:
    ballast = small_disk / "lost+found"  # the one name that is not ours and may be there
    ballast.write_bytes(bytes(1_500_000))
    driver = Driver(small_disk).recovered()
    results = []
    for number in range(40):
        results.append(driver.write([number])[0] != 0)
        driver.clock.advance_ms(100)
    assert True in results
    assert False in results
    stored = [number for number, is_written in enumerate(results) if is_written]
    assert driver.read(stored) == [True] * len(stored), "loads go on"
    ballast.unlink()
    driver.clock.advance_ms(60_000)
    assert 0 not in driver.write([100]), "room came back"
    driver.close()
    again = Driver(small_disk).recovered()
    assert again.read([*stored, 100]) == [True] * (len(stored) + 1)
    again.close()
