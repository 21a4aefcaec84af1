"""Addresses of names: whatever is wrong with a name is an OSError, which those who ask expect."""

from __future__ import annotations

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
