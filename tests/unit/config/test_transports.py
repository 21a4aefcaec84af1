"""`--transport`: what it may say, and what is chosen when it says nothing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvstore.config.cluster import TransportConfig, parse_transport
from kvstore.errors import ConfigError
from kvstore.installation import lacking


def test_what_it_says_is_what_the_back_end_gets() -> None:
    assert parse_transport("tcp,port=9481", has_tls=True) == TransportConfig(
        name="tcp", port=9481, takes_writes=True
    )
    text = "nixl,plugin=LIBFABRIC,plugin.num_threads=2,pace=on"
    assert parse_transport(text, has_tls=False) == TransportConfig(
        name="nixl",
        options={"plugin": "LIBFABRIC", "plugin.num_threads": "2"},
        is_paced=True,
        takes_writes=True,
    )
    assert parse_transport("ucx,pace=off", has_tls=False) == TransportConfig(name="ucx")


@pytest.mark.parametrize("name", ["nixl", "ucx"])
def test_certificates_that_a_back_end_cannot_use_are_told_of(name: str) -> None:
    assert parse_transport(name, has_tls=True).is_plain
    assert not parse_transport(name, has_tls=False).is_plain, "that --insecure says already"


@pytest.mark.parametrize(
    ("is_there", "has_tls", "name"),
    [(True, True, "tcp"), (True, False, "nixl"), (False, False, "tcp"), (False, True, "tcp")],
)
def test_nothing_is_moved_in_plain_unless_told(
    monkeypatch: pytest.MonkeyPatch, is_there: bool, has_tls: bool, name: str
) -> None:
    found: Any = object() if is_there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    chosen = parse_transport(None, has_tls=has_tls)
    assert (chosen.name, chosen.is_plain) == (name, False)


@pytest.mark.parametrize(
    ("name", "modules"), [("nixl", "nixl_cu13 or nixl_cu12"), ("ucx,pace=on", "ucxx")]
)
def test_a_back_end_that_is_not_installed_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, modules: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        parse_transport(name, has_tls=False)
    extra = name.partition(",")[0]
    assert str(caught.value) == lacking(f"--transport {extra}", modules, extra)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rdma", "transport 'rdma' must be one of nixl, tcp, ucx"),
        ("tcp,port", "cannot have 'port': write port=NUMBER, pace=on|off, each once"),
        ("tcp,port=", "cannot have 'port='"),
        ("tcp,port=1,port=2", "cannot have 'port=2'"),
        ("tcp,plugin=UCX", "cannot have 'plugin=UCX': write port=NUMBER"),
        ("nixl,plugin.=2", "cannot have 'plugin.=2': write plugin=NAME"),
        ("nixl,listen=0.0.0.0:1", "cannot have 'listen=0.0.0.0:1'"),
        ("ucx,port=1", "cannot have 'port=1': write pace=on|off"),
        ("tcp,pace=yes", "pace is on or off, not 'yes'"),
        ("tcp,port=65536", "port is a number up to 65535, not '65536'"),
        ("tcp,port=-1", "port is a number up to 65535, not '-1'"),
        ("tcp,port=²", "port is a number up to 65535, not '²'"),
        ("tcp,insecure=yes", "cannot have 'insecure=yes'"),
    ],
)
def test_what_cannot_be_says_so(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_transport(text, has_tls=True)
    assert sentence in str(caught.value)
