"""What every `Transport` promises, run by each in processes of its own. Add one to `MAKERS`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvstore.testing.index_process import Lab
from kvstore.testing.transports import CHECKS, LocalParty, MoverParty, Party, TransportChecks
from kvstore.transport.loopback import Hub

Make = Callable[[str], Party]
# Over shared memory a read goes on when its peer is stopped: only tcp shows what faults do, or RDMA
# devices, where `make rdma-check` names them.
_UCX = {"UCX_TLS": os.environ.get("KVSTORE_CONTRACT_UCX_TLS", "tcp")}


def _secure(folder: Path) -> Make:
    lab = Lab(folder)
    return lambda name: MoverParty(name, "tcp", options=lab.options(name))


MAKERS: dict[str, Callable[[Path], Make]] = {
    "loopback": lambda _: partial(LocalParty, Hub()),
    "nixl": lambda _: partial(MoverParty, backend="nixl", environment=_UCX),
    "tcp": _secure,
    "tcp-insecure": lambda _: partial(MoverParty, backend="tcp", options={"insecure": "yes"}),
    "ucx": lambda _: partial(MoverParty, backend="ucx", environment=_UCX),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", MAKERS)
@pytest.mark.parametrize("check", CHECKS)
def test_contract(backend: str, check: str, tmp_path: Path) -> None:
    getattr(TransportChecks(MAKERS[backend](tmp_path)), check)()
