"""The demo of a cluster, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_demo_of_a_cluster_keeps_its_word(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "demo", "--cluster"]
    done = subprocess.run(
        [*command, "--users", "2", "--rounds", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "came to node b from node a" in " ".join(done.stdout.split())
    assert "All answers are identical" in done.stdout
