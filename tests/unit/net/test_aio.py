"""Addresses of names: whatever is wrong with a name is an OSError, which those who ask expect."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvstore.net.aio import HostAddresses, resolved
from tests.kit.coroutines import on_loop


@on_loop
@pytest.mark.parametrize("name", ["a..b", "a" * 64, "."])
async def test_a_name_that_dns_cannot_have_has_no_address(name: str) -> None:
    with pytest.raises(OSError, match="label"):
        await resolved(name, 9470)
    with pytest.raises(OSError, match="label"):
        await HostAddresses(name).now()


@on_loop
async def test_a_link_local_address_keeps_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 2))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    assert await HostAddresses("printer.local").now() == ["fe80::1%2"]
