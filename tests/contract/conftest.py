"""A copy engine on each simulated device, for the suites about them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.copy_parties import DEVICE_PARTIES, DeviceParty


@pytest.fixture(params=DEVICE_PARTIES)
def party(request: pytest.FixtureRequest) -> Iterator[DeviceParty]:
    party: DeviceParty = request.param((96, 40), block_major=False, values="float32")
    yield party
    party.close()
