"""HOST:PORT, of both kinds of addresses, with brackets or as Kubernetes puts them together."""

from __future__ import annotations

import pytest

from kvstore.config.values import address_of, joined
from kvstore.indexer.service import _host_of


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
