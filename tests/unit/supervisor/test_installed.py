"""Whether the code that runs is the code that is installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.node.pages import make_pages
from kvstore.supervisor import installed
from kvstore.supervisor.installed import LoadedCode, installed_code
from tests.unit.node.test_pages import EmptyCollector, ScriptedDriver


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place where packages are, with kvstore 1.0."""
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "1.0", "a")
    return tmp_path


def remove(site: Path) -> None:
    for each in site.glob("*.dist-info"):
        for file in each.iterdir():
            file.unlink()
        each.rmdir()


def install(site: Path, version: str, record: str) -> None:
    remove(site)
    info = site / f"{installed.DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {installed.DISTRIBUTION}\nVersion: {version}\n")
    (info / "RECORD").write_text(record)


def test_what_was_replaced_is_told_with_what_to_do(site: Path) -> None:
    loaded = LoadedCode()
    assert (loaded.version, loaded.trouble()) == ("1.0", "")
    install(site, "1.1", "b")
    assert loaded.version == "1.0"
    assert loaded.trouble() == (
        "kvstore 1.1 is installed, and this process runs kvstore 1.0, which it loaded before:"
        " 'kvstore upgrade' has the node run the installed one"
    )
    assert LoadedCode().trouble() == "", "a process that begins now runs it"
    install(site, "1.0", "c")
    assert loaded.trouble().startswith("another build of kvstore 1.0 is installed, and this")
    install(site, "1.0", "a")
    assert loaded.trouble() == "", "the same again"


def test_while_it_is_being_replaced_nothing_is_told(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = LoadedCode()
    monkeypatch.setattr(installed, "DISTRIBUTION", "kvstore-that-is-not-there")
    remove(site)
    assert installed_code() is None
    assert loaded.trouble() == ""


def test_healthz_says_it() -> None:
    listener = SimpleNamespace(is_in_place=True, path="/run/n")
    pages = make_pages(
        *cast("Any", (EmptyCollector(), ScriptedDriver(), listener)),
        code_trouble=lambda: "kvstore 2 is installed",
    )
    assert pages["/healthz"]().body == b"ok, but kvstore 2 is installed\n"
