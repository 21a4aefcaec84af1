"""Settings of what reaches beyond one machine: what cannot work says so before it listens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.certificates import load
from kvstore.client.index import IndexClient
from kvstore.client.tls import address_parts
from kvstore.config.cluster import TransportConfig, load_index_config, parse_transport
from kvstore.config.node import load_config
from kvstore.errors import ConfigError
from kvstore.installation import lacking
from kvstore.testing.process import Lab

LEAST = {"dram": "64MiB"}
STORE = {"insecure": True, "store": "redis://store.example/1"}
LAB = {"index": ["127.0.0.1:9470"], "insecure": True}


def test_a_node_is_alone_by_default() -> None:
    assert load_config(None, LEAST).cluster is None


def test_an_empty_peer_listen_counts_as_not_given() -> None:
    cluster = load_config(None, LAB | {"peer-listen": ""}).cluster
    assert cluster is not None
    assert cluster.transport is None
    assert load_config(None, LEAST | {"peer-listen": ""}).cluster is None


def test_a_node_has_the_name_of_its_certificate(tmp_path: Path) -> None:
    files = Lab(tmp_path / "pki").files("node", "n1")
    paths = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    settings = LEAST | paths | {"index": "i.example:9470", "peer-listen": "10.0.0.7:9480"}
    config = load_config(None, settings)
    assert config.cluster is not None
    assert (config.cluster.node, config.index) == ("n1", ("i.example:9470",))
    assert (config.peer_listen, config.index_listen) == (("10.0.0.7", 9480), None)
    assert config.cluster.tls == load(files)
    events = {"events": f"ipc://{tmp_path}/events", "file": f"{tmp_path}:1GiB,shared"}
    config = load_config(None, settings | events)
    assert config.published is not None
    assert config.disk is not None
    assert (config.published.node, config.disk.node) == ("n1", "n1")
    with pytest.raises(ConfigError, match=r"--cert .* is of node 'n1': leave node-name out"):
        load_config(None, settings | {"node-name": "n2"})
    with pytest.raises(ConfigError, match="is of a node only, and --index-listen"):
        load_config(None, settings | {"index-listen": "127.0.0.1:0"})
    files = Lab(tmp_path / "pki").files("client", "c1")
    wrong = {"cert": str(files.cert), "key": str(files.key)}
    with pytest.raises(ConfigError, match="names no node: make one with 'kvstore certs"):
        load_config(None, settings | wrong)
    with pytest.raises(ConfigError, match="names no index: make one with 'kvstore certs"):
        load_index_config(None, paths)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"index": ["127.0.0.1:9470"]}, "the index needs TLS: give --ca, --cert and --key"),
        ({"index-listen": "127.0.0.1:0"}, "or --insecure: no encryption and no authentication"),
        (LAB | {"ca": "/x"}, "the index needs TLS: give --ca, --cert and --key"),
        (LAB | {"index": ["nowhere"]}, "index 'nowhere' must be HOST:PORT"),
        (LAB | {"index": ["a:1", "a:1"]}, "each once"),
        (LAB | {"index-listen": "example:1"}, "--index-listen 'example:1' must be an IP address"),
        (LAB | {"index-entries": 100_000}, "index-entries does nothing without --index-listen"),
        (LAB | {"index-listen": "127.0.0.1:0", "index-entries": "many"}, "entries 'many' must be"),
        (LAB | {"node-name": "No"}, "node-name 'No' cannot be a name in a cluster"),
        (LAB | {"peer-listen": "0.0.0.0:9480"}, "peer-listen '0.0.0.0:9480' must be"),
        (LAB | {"peer-listen": "example:1"}, "peer-listen 'example:1' must be"),
        (LAB | {"transport": "tcp"}, "transport does nothing without --peer-listen: add that, or"),
        (LAB | {"peer-listen": "10.0.0.7:1", "transport": "x"}, "transport 'x' must be one of"),
        (
            LAB | {"peer-listen": "10.0.0.7:9480", "transport": "tcp,port=9480"},
            "transport 'tcp,port=9480' uses the port of peer-listen",
        ),
        (LAB | {"landing": "auto"}, "landing does nothing without --peer-listen"),
        (
            LAB | {"peer-listen": "10.0.0.7:1", "landing": "1TiB"},
            "is more than half of dram: choose a smaller --landing or --slab",
        ),
        (
            LAB | {"peer-listen": "10.0.0.7:1", "transport": "ucx", "landing": "1MiB"},
            "takes no writes, which --landing is for",
        ),
        (LAB | {"fetch": "auto"}, "fetch does nothing without --peer-listen"),
        (
            LAB | {"peer-listen": "10.0.0.7:1", "fetch": "x"},
            "fetch 'x' must be one of always, auto",
        ),
        ({"fetch": "always"}, "fetch does nothing without --peer-listen"),
        (
            {"peer-listen": "10.0.0.7:1"},
            "peer-listen does nothing without --index or --index-listen",
        ),
        ({"cert": "/x"}, "cert does nothing without --index or --index-listen"),
    ],
)
def test_what_cannot_work_says_so(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, LEAST | wrong)
    assert sentence in str(caught.value)


def test_a_store_beyond_this_machine_needs_tls(tmp_path: Path) -> None:
    files = Lab(tmp_path / "pki").files("index", "i1")
    paths = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    with pytest.raises(ConfigError, match=r"redis://h:6379/0 is on another machine.* use rediss:"):
        load_index_config(None, paths | {"store": "redis://h"})
    for url in ("rediss://h:1/0", "redis://127.0.0.1:1/0", "redis://[::1]:1/3"):
        store = load_index_config(None, paths | {"store": url}).shared
        assert store is not None
        assert store.place == url
    store = load_index_config(None, STORE).shared
    assert store is not None
    assert (store.host, store.port, store.database) == ("store.example", 6379, 1)
    (tmp_path / "password").write_text(" secret\n")
    named = paths | {
        "store": "rediss://me@h:7/2",
        "store-password-file": str(tmp_path / "password"),
    }
    store = load_index_config(None, named).shared
    assert store is not None
    assert (store.username, store.password, store.tls) == ("me", "secret", True)
    assert "secret" not in repr(store)


def test_a_store_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "redis" else there(name)
    )
    with pytest.raises(ConfigError, match=r"needs redis, .*: pip install .*\[redis\]'$"):
        load_index_config(None, STORE)


def test_an_index_is_told_by_yaml_too(tmp_path: Path) -> None:
    path = tmp_path / "index.yaml"
    path.write_text("listen: 127.0.0.1:0\nentries: 100000\ninsecure: true\nmetrics: off\n")
    config = load_index_config(path, {"entries": 200000})
    assert (config.listen.port, config.entries) == (0, 200000)
    assert (config.tls, config.metrics) == (None, None)


@pytest.mark.parametrize(
    "endpoint", ["", "host", ":1", "host:", "host:0", "host:x", "a/b:1", "::1:1"]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        address_parts(endpoint)


def test_endpoints_may_have_names() -> None:
    assert address_parts("index.example:9470") == ("index.example", 9470)
    assert address_parts("[::1]:9470") == ("::1", 9470)


def test_a_client_says_whom_it_believes() -> None:
    with pytest.raises(ConfigError, match="give tls, or insecure=True"):
        IndexClient(["127.0.0.1:1"])
    with pytest.raises(ConfigError, match="name at least one replica"):
        IndexClient([], insecure=True)


@pytest.mark.parametrize("text", ["10M", "10000k", "10_000_000", 10_000_000])
def test_entries_are_counted_in_millions_too(text: str | int) -> None:
    settings = {"insecure": True, "entries": text}
    assert load_index_config(None, settings).entries == 10_000_000


# ── --transport: what it may say, and what is chosen ──────────────────────────────────────────────


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
