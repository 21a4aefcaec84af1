"""The table of settings: what is entered there is a flag, a key, help, a check and a reference row,
and the configuration of a node comes from there alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from kvstore.cli.commands import settings_options
from kvstore.cli.main import cli
from kvstore.config import machine, node as config_module
from kvstore.config.node import NodeConfig, load_config
from kvstore.config.reading import load_settings
from kvstore.config.settings import (
    DaemonSettings,
    IndexSettings,
    NodeSettings,
    in_group,
    table,
)
from kvstore.config.values import address_of, joined
from kvstore.engine.memory.policies import POLICIES
from kvstore.errors import ConfigError
from kvstore.index.holdings import ENTRY_COUNT_MAX
from kvstore.indexer.service import _host_of
from kvstore.testing.process import Lab
from kvstore.types import AdmissionMode
from kvstore.units import GIB
from scripts.reference import settings_table

_disk = in_group("Disk tier")


class Planted(NodeSettings):
    """A node with settings of every kind more."""

    file_parts: int = _disk("N", default=8, within=(1, 4000))("Parts of a file.")
    file_order: Literal["old", "new"] = _disk(default="old", needs=("file",))("Order of parts.")
    file_hosts: list[str] | None = _disk("H", shown="all")("Hosts of parts.")
    file_shares: dict[str, str | int] | None = _disk("H=SHARE")("Of hosts.")
    file_packed: bool = _disk(default=False, off="file-loose")("Pack the parts.")


PLANTED = {row.key: row for row in table(Planted) if row not in table(NodeSettings)}


def typed(*arguments: str) -> dict[str, Any]:
    """The flags of a command whose settings are planted."""
    command = settings_options(Planted)(lambda **_: None)
    with click.command("planted")(command).make_context("planted", list(arguments)) as context:
        return context.params


def test_what_is_planted_is_a_flag_and_a_key(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("file: /x:1GiB\nfile-parts: 5\nfile-order: NEW\nfile-hosts: [a]\n")
    flags = typed("--config", str(path), "--file-parts", "3K", "--file-packed")
    settings = load_settings(flags.pop("config_path"), flags, Planted)
    assert (settings.file, settings.file_parts) == ("/x:1GiB", 3000), "a flag wins over YAML"
    assert (settings.file_order, settings.file_hosts) == ("new", ["a"])
    assert settings.file_packed
    flags = typed(
        "--file-hosts", "a", "--file-hosts", "b", "--file-loose", "--file-shares", "a=b=1"
    )
    settings = load_settings(None, {**flags, "config_path": None}, Planted)
    assert (settings.file_parts, settings.file_packed) == (8, False)
    assert (settings.file_hosts, settings.file_shares) == (["a", "b"], {"a=b": "1"})


def test_what_is_planted_is_in_the_help_and_in_the_reference() -> None:
    command = click.command("planted")(settings_options(Planted)(lambda **_: None))
    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    page = settings_table(table(Planted))
    for row in PLANTED.values():
        assert f"--{row.key}" in text
        assert f"{row.meaning}" in text
        assert f"| `{row.key}` |" in page
    assert "--file-parts N Parts of a file. [default: 8]" in text
    assert "--file-packed / --file-loose Pack the parts." in text
    assert "| `--file-order [old\\|new]` | `file-order` | old | Order of parts. |" in page
    assert "| `--file-hosts H` | `file-hosts` | all | Hosts of parts. |" in page
    assert "| `--file-packed / --file-loose` | `file-packed` | off | Pack the parts. |" in page


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"file-parts": 4001}, "file-parts 4001 must be a number from 1 to 4000, such as 8"),
        ({"file-parts": True}, "file-parts True must be a number from 1 to 4000"),
        ({"file-order": "any"}, "file-order 'any' must be one of new, old"),
        ({"file-order": 1}, "file-order must be a text, not a number"),
        ({"file-order": "new"}, "--file-order does nothing without --file: add that, or leave"),
        ({"file-hosts": 1}, "file-hosts must be a list or empty, not a number"),
        ({"file-packed": "x"}, "file-packed must be true or false, not a text"),
        ({"file-part": 1}, "unknown key 'file-part': did you mean 'file-parts'?"),
    ],
)
def test_what_is_planted_is_checked(wrong: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, wrong, Planted)
    assert sentence in str(caught.value)


def test_a_name_that_is_there_twice_is_named() -> None:
    with pytest.raises(ConfigError, match="--file-shares names 'a' twice"):
        typed("--file-shares", "a=1", "--file-shares", "a=2")


@pytest.mark.parametrize(("name", "kind"), [("node", NodeSettings), ("index", IndexSettings)])
def test_the_flags_of_a_program_are_its_table(name: str, kind: type[DaemonSettings]) -> None:
    names = [each.name for each in cli.commands[name].params]
    assert names == [*(row.name for row in table(kind)), "config_path"]


def test_choices_and_bounds_are_those_of_what_they_choose() -> None:
    rows = {row.key: row for row in table(NodeSettings)}
    assert set(rows["policy"].choices) == set(POLICIES)
    assert set(rows["file-admission"].choices) == {mode.value for mode in AdmissionMode}
    assert rows["index-entries"].within is not None
    assert rows["index-entries"].within[1] == ENTRY_COUNT_MAX


ELSE: Mapping[str, Any] = {
    "dram": "2GiB",
    "policy": "reuse",
    "quota": {"llama": "30%"},
    "slab": "1MiB",
    "scrub": "off",
    "file": "/y:2GiB",
    "file-admission": "second-sight",
    "file-writes-per-day": "1GiB",
    "socket": "/run/other.sock",
    "allow-uid": [5],
    "metrics": "off",
    "metrics-beyond-loopback": True,
    "log-level": "debug",
    "events": "ipc:///y",
    "event-hashes": "bytes",
    "engine-events": ["e=ipc:///z,space=" + 64 * "a"],
    "node-name": "n8",
    "hbm": "1GiB,gpu=1",
    "index": ["127.0.0.1:1", "127.0.0.1:2"],
    "index-listen": "127.0.0.1:9470",
    "index-entries": "1M",
    "peer-listen": "10.0.0.8:9480",
    "transport": "tcp,pace=on",
    "fetch": "always",
    "drain-s": 60,
    "landing": "128MiB",
    "trace": "http://127.0.0.1:4318",
    "trace-sample": 7,
}
"""Another value than the default, of every setting but those of TLS."""
AS_GIVEN = (
    *("socket", "policy", "file_admission", "file_writes_per_day", "metrics", "allow_uid"),
    *("trace", "trace_sample", "log_level", "fetch", "drain_s"),
    *("index", "index_listen", "index_entries", "peer_listen"),
)
"""Settings that a node uses as they are; fields of the configuration are made of all others."""
BASE: Mapping[str, Any] = {
    "dram": "1GiB",
    "file": "/x:1GiB",
    "events": "ipc:///x",
    "node-name": "n7",
    "index": ["127.0.0.1:1"],
    "index-listen": "127.0.0.1:0",
    "peer-listen": "10.0.0.7:9480",
    "transport": "tcp",
    "insecure": True,
    "trace": "http://127.0.0.1:4317",
}
"""A node of which everything can be set."""


def test_the_configuration_of_a_node_comes_from_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "available_memory", lambda: (8 * GIB, "the test"))
    monkeypatch.setattr(machine, "file_system_bytes", lambda _: 4 << 40)
    files = Lab(tmp_path / "pki").files("node", "n7", with_index=True)
    tls = {name: str(getattr(files, name)) for name in ("ca", "cert", "key")}
    rows = {row.key for row in table(NodeSettings)}
    assert rows == ELSE.keys() | tls.keys() | {"insecure"}, "name another value of a new setting"
    base = load_config(None, BASE)
    moved = set[str]()
    for key in ELSE:
        if key == "metrics-beyond-loopback":  # it allows, and says nothing
            continue
        changed = changed_fields(base, load_config(None, {**BASE, key: ELSE[key]}))
        assert changed, f"{key} is set, and nothing comes of it"
        moved |= changed
    certified = load_config(None, {**BASE, **tls, "insecure": False})
    assert changed_fields(base, certified) == {"cluster"}
    moved |= changed_fields(base, load_config(None, {**BASE, "dram": "auto"}))
    assert moved == {*AS_GIVEN, *NodeConfig.__annotations__}


def changed_fields(one: NodeConfig, other: NodeConfig) -> set[str]:
    """Names of fields that differ."""
    names = {*AS_GIVEN, *NodeConfig.__annotations__}
    return {name for name in names if getattr(one, name) != getattr(other, name)}


# ── HOST:PORT, with brackets or as Kubernetes joins them ──────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("localhost:65535", "127.0.0.1", 65535),
        ("[::1]:9470", "::1", 9470),
        ("[::]:0", "::", 0),
        ("[FD00:0:0::5]:9480", "fd00::5", 9480),
        ("fd00::5:9464", "fd00::5", 9464),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_an_address_and_its_port(text: str, host: str, port: int) -> None:
    assert address_of(text) == (host, port)
    assert address_of(joined(host, port)) == address_of(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", ":80", "80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1"),
        *("127.0.0.1:+80", "127.0.0.1: 80", "127.0.0.1:8_0", "127.0.0.1:٨٠", "example.org:80"),
        *("[::1]", "[::1:80", "::1]:80", "[[::1]]:80", "[127.0.0.1]:80", "[]:80", "fd00::5"),
    ],
)
def test_what_is_no_address_with_a_port(text: str) -> None:
    assert address_of(text) is None


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:5", "10.0.0.1"),
        ("ipv6:%5Bfd00::5%5D:5", "fd00::5"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", "10.0.0.1"),
        ("unix:/x", ""),
    ],
)
def test_the_host_of_a_caller(peer: str, host: str) -> None:
    assert _host_of(peer) == host
