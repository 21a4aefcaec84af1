"""A replica's start with an address that is taken: refused before its loops are compiled."""

from __future__ import annotations

import errno
import socket

import pytest

from kvstore.config.cluster import IndexConfig
from kvstore.config.values import HostPort
from kvstore.errors import ConfigError
from kvstore.index import holdings
from kvstore.indexer.replica import run_index
from kvstore.net.server import refuse_taken


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("option", ["--listen", "--metrics"])
def test_an_address_that_is_taken_is_refused_before_the_loops_are_compiled(
    host: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled() -> None:
        raise AssertionError("it compiles first")

    monkeypatch.setattr(holdings, "compiled", compiled)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        ports = {"--listen": 0, "--metrics": 0, option: taken.getsockname()[1]}
        listen, metrics = (HostPort(host, ports[each]) for each in ("--listen", "--metrics"))
        config = IndexConfig(listen=listen, metrics=metrics, entries=1000, tls=None)
        with pytest.raises(ConfigError, match=f"^{option} cannot listen on .*: the address is in"):
            run_index(config)


def test_a_kernel_without_ipv6_leaves_the_address_to_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_family(family: socket.AddressFamily) -> None:
        asked.append(family)
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_family)
    refuse_taken("--listen", "::", 0)
    assert asked == [socket.AF_INET6]
