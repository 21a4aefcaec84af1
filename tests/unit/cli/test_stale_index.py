"""What commands say of an index that is stale, and without a node to make keys."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.cli import look, top
from kvstore.cli.commands import as_json
from kvstore.cli.main import main
from kvstore.cli.tables import show
from kvstore.client.index import Members
from kvstore.engine.why.report import SpaceReport
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Answer, Match, Member
from kvstore.proto.rows import Row
from kvstore.types import Incarnation

Said = Callable[..., str]
KEYS = [bytes([n]) * 32 for n in range(3)]
SPACE = "aB" * 32
STALE = "the index is stale"


class Index:
    """Knows a node that it does not hear, and who holds two blocks; `trust`: of itself."""

    trust = Trust.STALE

    def nodes(self, *, engines: bool = False, timeout_s: float = 0) -> Members:
        return Members(self.trust, [Member("n1", Incarnation(1), "h:1", None, 5)])

    def match(self, tenant: str, space: bytes, keys: bytes) -> Answer:
        assert (tenant, space.hex(), keys) == ("default", SPACE.lower(), b"".join(KEYS))
        if self.trust is Trust.STALE:
            return Answer(Trust.STALE, [])
        return Answer(self.trust, [Match(Holder("n1"), 0, 2, 2, Trust.EXACT)])


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], index: Index) -> Said:
    """What a command that is answered prints."""

    @contextlib.contextmanager
    def client(flags: object) -> Iterator[Index]:
        yield index

    def run(*arguments: str) -> str:
        where = ("--index", "h:1", "--insecure")
        monkeypatch.setattr(look, "index_client", client)
        monkeypatch.setattr(top, "index_client", client)
        monkeypatch.setattr(sys, "argv", ["kvstore", *arguments, *where])
        main()
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def test_top_by_a_stale_index_calls_nobody_gone(said: Said, index: Index) -> None:
    shown = said("top", "--once", "--interval", "0.5").splitlines()
    assert shown[:2] == ["kvstore index at h:1", STALE]
    assert shown[-1].split()[:2] == ["n1", "unknown"]
    index.trust = Trust.EXACT
    (found,) = json.loads(said("top", "--json", "--interval", "0.5"))["processes"]
    state = found["state"]
    assert (state["health"]["text"], state["nodes"][0]["trust"]) == ("ok", "out")


def test_nodes_by_a_stale_index_are_unknown(said: Said, index: Index) -> None:
    shown = said("inspect", "nodes")
    assert shown.splitlines()[0] == STALE
    assert shown.splitlines()[-1].split()[:2] == ["n1", "unknown"]
    found = json.loads(said("inspect", "nodes", "--json"))
    assert (found["index"], found["members"][0]["trust"]) == ("stale", "unknown")
    assert (found["members"][0]["sequence"], found["members"][0]["engines"]) == (None, None)
    index.trust = Trust.EXACT
    found = json.loads(said("inspect", "nodes", "--json"))
    assert (found["index"], found["members"][0]["trust"]) == ("exact", "out")
    header, row = said("inspect", "nodes").splitlines()[-2:]
    assert dict(zip(header.split(), row.split(), strict=True))["engines"] == "-", "not 0"


def test_keys_need_no_node_and_a_stale_index_does_not_know(
    said: Said, index: Index, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("\n".join(key.hex() for key in KEYS))
    asked = ["inspect", "prefix", "--keys-file", str(tmp_path / "keys"), "--space", SPACE]
    asked += ["--socket", str(tmp_path / "none.sock")]
    shown = said(*asked)
    assert "not known: the index is stale" in shown
    assert "no node holds" not in shown
    assert "at most" not in shown
    index.trust = Trust.EXACT
    assert "3 blocks asked for; at most 2 of them at one location" in said(*asked)
    found = json.loads(said(*asked, "--json"))["prefix"]
    assert (found["held_blocks"], found["held_tokens"], found["block_tokens"]) == (2, None, None)
    assert found["holders"][0]["node"] == "n1"


def test_a_space_is_whole_for_programs_and_short_for_people(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: dict[str, list[Row]] = {"spaces": [SpaceReport(SPACE, "t", "m", "", 1, 2, 3, 4, "")]}
    show(rows)
    shown = capsys.readouterr().out
    assert SPACE[:16] in shown
    assert SPACE[:17] not in shown
    assert json.loads(as_json(**rows))["spaces"][0]["space"] == SPACE


@pytest.mark.parametrize("space", ["", SPACE[:16], "z" * 64])
def test_without_a_node_and_the_whole_space_it_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    space: str,
) -> None:
    (tmp_path / "keys").write_text(KEYS[0].hex())
    asked = ["inspect", "prefix", "--keys-file", str(tmp_path / "keys"), "--space", space]
    asked += ["--socket", str(tmp_path / "none.sock"), "--index", "h:1", "--insecure"]
    monkeypatch.setattr(sys, "argv", ["kvstore", *asked])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "keys are computed with the settings of the engines at --socket" in line
    assert "--keys-file and all 64 digits of --space" in line


def test_a_question_that_is_none_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(KEYS[0].hex())
    asked = ["inspect", "prefix", "--keys-file", str(tmp_path / "keys"), "--space", SPACE]
    asked += ["--tenant", "t" * 999, "--index", "h:1", "--insecure"]
    monkeypatch.setattr(sys, "argv", ["kvstore", *asked])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "kvstore: a name is longer than 256\n"
