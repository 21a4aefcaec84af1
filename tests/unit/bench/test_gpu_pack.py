"""What travels to a machine with a GPU that reaches no package registry."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from bench.gpu import pack


def wheel(folder: Path, name: str, inside: str = "brought/__init__.py") -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(inside, "x = 1\n")
    return folder / name


def test_wheels_are_unpacked_for_the_python_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PACK", tmp_path)
    assert pack.unpack(tmp_path / "site") is None
    wheel(tmp_path, "brought-1-py3-none-any.whl")
    monkeypatch.setattr(pack, "PYTHON", (2, 7))
    assert pack.unpack(tmp_path / "site") is None
    monkeypatch.setattr(pack, "PYTHON", sys.version_info[:2])
    assert pack.unpack(tmp_path / "site") == tmp_path / "site"
    assert (tmp_path / "site" / "brought" / "__init__.py").read_text() == "x = 1\n"


def test_a_pack_that_was_forgotten_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PACK", tmp_path / "build" / "gpu-pack")
    monkeypatch.setattr(pack, "MODULES", ("json", "os.path"))
    assert pack.forgotten(None) == ""
    monkeypatch.setattr(pack, "MODULES", ("json", "no_such", "nor_this.one"))
    said = pack.forgotten(None)
    assert said.startswith("build/gpu-pack is not here: make gpu-pack, and bring it along")
    assert "no_such, nor_this.one" in said
    assert pack.forgotten(tmp_path) == ""


def test_a_pack_that_is_too_large_or_empty_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PACK", tmp_path)
    monkeypatch.setattr(pack, "tracked_bytes", lambda: 1000)
    assert pack.main() == 1
    wheel(tmp_path, "brought-1-py3-none-any.whl")
    assert pack.main() == 0
    monkeypatch.setattr(pack, "BYTES_MAX", 1000)
    assert pack.main() == 1
