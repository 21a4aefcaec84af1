"""Flags of the router: each mistake is one sentence that says how to mend it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvstore.config.router import load_policy, load_router_config
from kvstore.errors import ConfigError
from kvstore.router.front.intake import load_tenants
from tests.style.tree import ROOT

HERE = ["a=http://127.0.0.1:8000"]
INDEX: dict[str, Any] = {"index": ["127.0.0.1:9470"], "insecure": True}


def test_a_worker_with_all_options() -> None:
    text = "a=http://[::1]:8000,kind=sglang,node=n1,engine=e,block=64,seed=s,role=any,rank=1"
    config = load_router_config(None, {"worker": [text], **INDEX})
    (address,) = config.workers
    assert (address.url, address.kind, address.node, address.engine) == (
        "http://[::1]:8000",
        *("sglang", "n1", "e"),
    )
    assert (address.block_tokens, address.hash_seed, address.role, address.rank) == (
        *(64, "s"),
        *("any", 1),
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "name the engines"),
        ({"worker": HERE, "receipts": "/nowhere/at/all"}, "in a directory that exists"),
        ({"worker": HERE, "receipts": "/tmp:1MiB"}, "must be a file"),
        ({"worker": ["http://127.0.0.1:8000"]}, "must be NAME=URL"),
        ({"worker": ["a=ftp://127.0.0.1"]}, "must be NAME=URL"),
        ({"worker": ["a=http://user:word@127.0.0.1:1"]}, "must be NAME=URL"),
        ({"worker": ["a\nb=http://127.0.0.1:1"]}, "must be NAME=URL"),
        ({"worker": ["a=http://127.0.0.1:1/v2"]}, "must be NAME=URL.*: scheme, host and port, wi"),
        ({"worker": [*HERE, *HERE]}, "twice"),
        ({"worker": ["a=http://127.0.0.1:1,role=prefill"]}, "role=decode or both"),
        ({"worker": ["a=http://127.0.0.1:1,kind=other"]}, "kind is one of"),
        ({"worker": ["a=http://127.0.0.1:1,block=x"]}, "block is a number"),
        ({"worker": ["a=http://127.0.0.1:1,blok=1"]}, "unknown key 'blok': did you mean 'block'"),
        ({"worker": ["a=http://127.0.0.1:1,x=1"]}, "unknown key 'x'; keys are kind, pool, node"),
        ({"worker": ["a=http://127.0.0.1:1,block="]}, "block has no value; keys are kind, pool"),
        ({"worker": ["a=http://127.0.0.1:1,space=3f9a"], **INDEX}, "64 hex digits"),
        ({"worker": ["a=http://10.0.0.1:8000"]}, "--insecure"),
        ({"worker": ["a=http://vllm.example:8000"]}, "--insecure"),
        ({"worker_dns": ["http://vllm.example:8000"]}, "--insecure"),
        ({"worker_slices": "svc"}, "NAMESPACE/SERVICE:PORT"),
        ({"worker_slices": "ns/svc:http"}, "scheme=https"),
        ({"worker": HERE, "listen": "0.0.0.0:8080"}, "--insecure"),
        ({"worker": HERE, "listen": "8080"}, "an IP address and a port"),
        ({"worker": HERE, "index": ["127.0.0.1:9470"]}, "--index needs TLS"),
        ({"worker": HERE, "index": ["x"], "insecure": True}, "HOST:PORT"),
        ({"worker": HERE, "body_max": "1"}, "body-max"),
        ({"worker": HERE, "allowed_origins": ["chat.example"]}, "must be \\* or an origin such as"),
        ({"worker": HERE, "allowed_origins": ["https://a\nX: 1"]}, "or an origin such as"),
        ({"worker": HERE, "allowed_origins": ["none", "https://a"]}, "or an origin such as"),
        ({"worker": HERE, "drain_delay": -1}, "from 0 to 3600"),
        ({"worker": HERE, "drain_timeout": 86_401}, "from 0 to 86400"),
        ({"worker": HERE, "index_timeout": 2000, **INDEX}, "from 1 to 1000, such as 5$"),
        (
            {"worker_dns": ["vllm:8000"]},
            "^--worker-dns 'vllm:8000' must be a URL, such as http://v",
        ),
        ({"worker": HERE, "tokenizer": ["m=/nowhere"], **INDEX}, "MODEL=DIRECTORY"),
        ({"worker": HERE, "tokenizer": ["m=/usr/bin"], **INDEX}, "no tokenizer in that directory"),
        ({"worker": HERE, "tokenizer": ["m=/usr/bin"]}, "does nothing without --index"),
        ({"worker": ["a=http://127.0.0.1:1,kind=tgi,node=n"]}, "node does nothing without an ind"),
        ({"worker_dns": ["http://127.0.0.1:1,seed=s"], "insecure": True}, "seed does nothing"),
        ({"worker_slices": "n/s:http,scheme=https,space=0"}, "space does nothing without an ind"),
        ({"worker_slices": "n/s:http,scheme=https,kind=x"}, "kind is one of"),
        ({"worker_slices": "n/s:http,scheme=HTTPS", "insecure": True}, "scheme is one of"),
        ({"worker": HERE, "worker_key_file": "/nowhere"}, "cannot be read"),
        ({"worker": HERE, "cert": "x"}, "needs TLS"),
        ({"worker": HERE, "peer_router": ["a:1"]}, "route-listen"),
        ({"worker": HERE, "peer_router": ["a"], "route_listen": "127.0.0.1:0"}, "must be HOST"),
        ({"worker": HERE, "peer_router": ["a:1"], "route_listen": "127.0.0.1:0"}, "needs TLS"),
        ({"worker": HERE, "listen_cert": "x"}, "does nothing without --listen-key"),
        ({"worker": HERE, "listen_ca": "x"}, "does nothing without --listen-cert or --cert"),
        ({"worker": HERE, "listen_cert": "x", "listen_key": "y"}, "would admit every client"),
        (
            {"worker": HERE, "listen_cert": "/none", "listen_key": "y", "api_keys": "z"},
            "--listen-cert /none cannot be read",
        ),
    ],
)
def test_mistakes_are_said(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_router_config(None, flags)


def test_an_empty_file_of_clients_cas_counts_as_not_given() -> None:
    assert load_router_config(None, {"worker": HERE, "listen_ca": ""}).front is None


@pytest.mark.parametrize("end", ["/v1", "/v1/", "/"])
def test_the_base_url_of_clients_of_an_engine_is_its_address(end: str) -> None:
    (worker,) = load_router_config(None, {"worker": [HERE[0] + end]}).workers
    assert worker.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (None, ("*",)),
        (["none"], ()),
        (["*"], ("*",)),
        (["https://Chat.Example:8443", "app+x://h"], ("https://chat.example:8443", "app+x://h")),
    ],
)
def test_pages_of_all_origins_are_allowed_unless_others_are_named(
    given: list[str] | None, allowed: tuple[str, ...]
) -> None:
    config = load_router_config(None, {"worker": HERE, "allowed_origins": given})
    assert config.allowed_origins == allowed


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.9", "[::1]"])
def test_a_worker_of_this_machine_needs_no_tls(host: str) -> None:
    assert load_router_config(None, {"worker": [f"a=http://{host}:8000"]}).workers
    if host == "localhost":
        load_router_config(None, {"worker_dns": [f"http://{host}:8000"]})
    for other in (f"{host.strip('[]')}.example".replace(":", "x"), "localhosts"):
        with pytest.raises(ConfigError, match="--insecure"):
            load_router_config(None, {"worker": [f"a=http://{other}:8000"]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML"),
        ("[]", "must hold lines"),
        ("A B: key-of-sixteen-characters", "cannot be a tenant"),
        ("a: short", "at least 16"),
        ("a: sha256:00", "64 hex digits"),
        ("a: key-of-sixteen-characters\nb: key-of-sixteen-characters", "share a key"),
        ("a: key-of-sixteen-characters\na: another-key-of-more", "'a' twice"),
    ],
)
def test_wrong_keys_are_said(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_tenants(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tenants(tmp_path / "none")


def test_hashes_stand_for_keys(tmp_path: Path) -> None:
    import hashlib

    digest = hashlib.sha256(b"the-key-of-team-a").hexdigest()
    (tmp_path / "keys").write_text(f"team-a: ['sha256:{digest}']\n")
    tenants = load_tenants(tmp_path / "keys")
    assert tenants[bytes.fromhex(digest)] == "team-a"
    assert len(tenants) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML: line 1, column 5"),
        ("policy: best", "policy"),
        ("polcy: cost", "polcy"),
        ("policy: cost\nlimits:\n  queue_max: 1\n  queue_max: 2", "'queue_max' twice"),
        ("models: {m: {pools: [{pool: a}, {pool: b, pool: c}]}}", "'pool' twice"),
        ("models: &a {m: *a}", "models.m"),
        ("[" * 1000, "too deeply"),
        ("models: {m: {pools: [{pool: a, weight: .inf}]}}", r"models\.m\.pools\[0\]\.weight must"),
        ("costs: {base_s: .inf}", r"costs\.base_s must be a finite number"),
    ],
)
def test_a_wrong_policy_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_policy(path)


@pytest.mark.parametrize("other", ["b=http://127.0.0.1:80/", "b=https://127.0.0.1:80,pool=p"])
def test_two_names_of_one_engine_are_refused(other: str) -> None:
    says = r"twice, as 'a' and 'b': leave one out, or with --index give .* its rank=N"
    with pytest.raises(ConfigError, match=says):
        load_router_config(None, {"worker": ["a=http://127.0.0.1", other]})


def test_ranks_of_one_engine_share_its_url() -> None:
    ranks = [f"r{n}=http://127.0.0.1:1,node=n,engine=e,rank={n}" for n in range(2)]
    config = load_router_config(None, {"worker": ranks, **INDEX})
    assert [each.rank for each in config.workers] == [0, 1]


def test_prefill_and_decode_engines_have_nodes_without_an_index() -> None:
    pair = ["p=http://127.0.0.1:1,node=n1,role=prefill", "d=http://127.0.0.1:2,node=n2,engine=e"]
    assert len(load_router_config(None, {"worker": pair}).workers) == 2
    with pytest.raises(ConfigError, match="seed does nothing without an index"):
        load_router_config(None, {"worker": [*pair, "c=http://127.0.0.1:3,seed=s"]})


def test_examples_of_the_guide_are_read(tmp_path: Path) -> None:
    guide = (ROOT / "kvstore" / "docs" / "guides" / "router.md").read_text()
    planner, keys, policy = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "planner").write_text(planner)
    assert load_policy(tmp_path / "planner").planner.pools["default"].decode_min == 2
    (tmp_path / "keys").write_text(keys)
    assert "team-a" in load_tenants(tmp_path / "keys").values()
    (tmp_path / "policy").write_text(policy)
    assert [pool.weight for pool in load_policy(tmp_path / "policy").models["chat"].pools] == [
        90,
        10,
    ]
