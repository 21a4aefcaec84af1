"""Code that runs, code that is installed, and the command that adds an extra to it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore import __version__, installation
from kvstore.installation import DISTRIBUTION, pip_install
from kvstore.node.pages import make_pages
from kvstore.supervisor import handover
from kvstore.supervisor.handover import LoadedCode, installed_code
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
    info = site / f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {DISTRIBUTION}\nVersion: {version}\n")
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
    monkeypatch.setattr(handover, "DISTRIBUTION", "kvstore-that-is-not-there")
    remove(site)
    assert installed_code() is None
    assert loaded.trouble() == ""


def test_healthz_says_it() -> None:
    listener = SimpleNamespace(is_in_place=True, path="/run/n")
    collector = EmptyCollector(ScriptedDriver(), listener, "kvstore 2 is installed")
    pages = make_pages(cast("Any", collector))
    assert pages["/healthz"]().body == b"ok, but kvstore 2 is installed\n"


def installed_from(site: Path, origin: dict[str, object] | str | None) -> str:
    """What a process says whose code is in `site`, put there from `origin`."""
    (info,) = site.glob("*.dist-info")
    if origin is not None:
        text = origin if isinstance(origin, str) else json.dumps(origin)
        (info / "direct_url.json").write_text(text)
    return pip_install("node,router")


NEUTRAL = (
    f"pip install 'PATH/kvstore_llm-{__version__}-py3-none-any.whl[node,router]', where PATH has"
    " the wheel that kvstore was installed from"
)


@pytest.fixture
def packages(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with the code of this process in it."""
    monkeypatch.setattr(installation, "__file__", str(site / "kvstore" / "installation.py"))
    return site


def test_an_extra_comes_from_the_wheel_that_was_installed(packages: Path) -> None:
    wheel = packages / "our wheels" / "kvstore_llm-1.0-py3-none-any.whl"
    origin: dict[str, object] = {"archive_info": {}, "url": wheel.as_uri()}
    assert "%20" in wheel.as_uri()
    assert installed_from(packages, origin) == NEUTRAL, "it has been removed"
    wheel.parent.mkdir()
    wheel.touch()
    assert pip_install("node,router") == f"pip install '{wheel}[node,router]'"


def test_an_extra_comes_from_the_folder_that_was_installed(packages: Path) -> None:
    origin: dict[str, object] = {"dir_info": {}, "url": packages.as_uri()}
    assert installed_from(packages, origin) == f"pip install '{packages}[node,router]'"


def test_an_extra_comes_from_the_clone_that_runs(packages: Path) -> None:
    """Installed with `pip install -e`, or not at all."""
    (packages / "pyproject.toml").touch()
    editable: dict[str, object] = {"dir_info": {"editable": True}, "url": "file:///elsewhere"}
    for origin in (None, editable):
        assert installed_from(packages, origin) == f"pip install -e '{packages}[node,router]'"


@pytest.mark.parametrize(
    "origin",
    [None, {"url": "https://example.org/kvstore.whl", "archive_info": {}}, {}, "", "not JSON"],
    ids=["from an index", "from a server", "no address", "empty", "damaged"],
)
def test_an_extra_of_unknown_origin_names_the_wheel_and_no_index(
    packages: Path, origin: dict[str, object] | str | None
) -> None:
    assert installed_from(packages, origin) == NEUTRAL


def test_an_extra_without_metadata_names_the_wheel(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "DISTRIBUTION", "kvstore-that-is-not-there")
    assert pip_install("node,router") == NEUTRAL
