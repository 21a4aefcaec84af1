"""Build `build/stage`: the tree as it is imported, made of symbolic links.

`connector/` and `kernels/` are folders of the root but subpackages of `kvstore`. An editable
install teaches that to Python; mypy and import-linter read folders, so they get one that looks
installed.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / "build" / "stage"
BESIDE = ("tests", "bench", "scripts")


def build(stage: Path = STAGE) -> None:
    """Remake `stage` from `[tool.setuptools.package-dir]`."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    shutil.rmtree(stage, ignore_errors=True)
    for package, folder in sorted(setup["package-dir"].items()):
        target = stage.joinpath(*package.split("."))
        if "." in package:
            target.symlink_to(ROOT / folder, target_is_directory=True)
            continue
        target.mkdir(parents=True)
        for entry in (ROOT / folder).iterdir():
            if entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)
    for name in BESIDE:
        (stage / name).symlink_to(ROOT / name, target_is_directory=True)


if __name__ == "__main__":
    build()
