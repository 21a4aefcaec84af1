"""Set-up of a machine for the tests: what root installs, and what everybody else is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.programs import PACKAGES

SCRIPT = Path(__file__).resolve().parents[3] / ".ci" / "programs"
TOOLS = ("bash", "dirname", "grep")
INSTALLS = """#!/bin/bash
echo "$*" >> "${0%/*}/asked"
for each in "$@"; do case $each in
  -* | update | install) ;;
  iproute2) ln -s /bin/true "${0%/*}/ip" ;;
  systemd) ln -s /bin/true "${0%/*}/systemd-analyze" ;;
  *) ln -s /bin/true "${0%/*}/$each" ;;
esac; done
"""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """All programs of a machine that has none of them."""
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    (tmp_path / "ln").symlink_to(shutil.which("ln") or "")
    return tmp_path


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [path / "bash", SCRIPT],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def packages() -> list[str]:
    lines = (SCRIPT.parent / "debian-packages.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#") and line != "ca-certificates"]


def test_every_program_of_a_test_has_its_package() -> None:
    assert set(PACKAGES.values()) == set(packages())


def test_without_a_package_manager_what_is_left_out_is_said(bare: Path) -> None:
    done = run(bare)
    listed = " ".join(packages())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"kvstore: the tests that need {listed} are left out: apt-get install {listed}\n"
    )
    for program in PACKAGES:
        (bare / program).symlink_to("/bin/true")
    done = run(bare)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(os.getuid() != 0, reason="only root installs packages")
@pytest.mark.parametrize("works", [True, False])
def test_root_installs_what_is_missing(bare: Path, *, works: bool) -> None:
    (bare / "apt-get").write_text(INSTALLS if works else "#!/bin/bash\nexit 100\n")
    (bare / "apt-get").chmod(0o755)
    (bare / "strace").symlink_to("/bin/true")
    done = run(bare)
    missing = " ".join(each for each in packages() if each != "strace")
    first, *rest = done.stderr.splitlines()
    assert first == f"installing what the tests start: {missing}"
    if works:
        assert (done.returncode, rest) == (0, [])
        assert (bare / "asked").read_text().splitlines()[1].endswith(missing), "and nothing else"
    else:
        assert done.returncode == 1
        assert [line.partition(" are left out")[0] for line in rest] == [
            f"kvstore: the tests that need {missing}"
        ]
