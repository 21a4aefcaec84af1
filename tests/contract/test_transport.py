"""What every `Transport` promises, run by each in processes of its own. Add one to `MAKERS`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvstore.testing.process import Lab
from tests.kit.loopback import Hub
from tests.kit.processes import transport_options
from tests.kit.transport_checks import CHECKS, TransportChecks, TransportParty
from tests.kit.transport_parties import LocalParty, TransferWorkerParty
from tests.leaks import Baseline

Make = Callable[[str], TransportParty]
# Over shared memory, as over RDMA devices, a read may go on when its peer is stopped: only tcp
# shows what faults do. `make rdma-check` names devices.
_WAY = os.environ.get("KVSTORE_CONTRACT_UCX_TLS", "tcp")
_UCX = {"UCX_TLS": _WAY}


def _secure(folder: Path) -> Make:
    lab = Lab(folder)
    return lambda name: TransferWorkerParty(
        name, "tcp", options=transport_options(lab, name), has_landing=True
    )


_ucx = partial(TransferWorkerParty, environment=_UCX)
_INSECURE = {"insecure": "yes"}


class DeviceParty(LocalParty):
    """As an RDMA device serves reads: no process is needed, so a stopped one is none the worse."""

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass


MAKERS: dict[str, Callable[[Path], Make]] = {
    "loopback": lambda _: partial(LocalParty, Hub()),
    "loopback-device": lambda _: partial(DeviceParty, Hub()),
    "loopback-read-only": lambda _: partial(LocalParty, Hub(), has_landing=False),
    "nixl": lambda _: partial(_ucx, backend="nixl", has_landing=True),
    "tcp": _secure,
    "tcp-insecure": lambda _: partial(
        TransferWorkerParty, backend="tcp", options=_INSECURE, has_landing=True
    ),
    "ucx": lambda _: partial(_ucx, backend="ucx"),
}
TAKES_NO_WRITES = ("loopback-read-only", "ucx")


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Parties live on for the next check; `checks` looks in the end."""


@pytest.fixture(scope="module", params=MAKERS)
def checks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TransportChecks]:
    backend, baseline = request.param, Baseline()
    serves_stopped = "device" in backend or (backend in ("nixl", "ucx") and _WAY != "tcp")
    with TransportChecks(
        MAKERS[backend](tmp_path_factory.mktemp(backend)),
        serves_stopped=serves_stopped,
        takes_writes=backend not in TAKES_NO_WRITES,
    ) as checks:
        yield checks
    assert not baseline.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", CHECKS)
def test_contract(checks: TransportChecks, check: str) -> None:
    getattr(checks, check)()


def test_a_back_end_that_takes_no_writes_refuses_landing_memory() -> None:
    with pytest.raises(AssertionError, match="the ucx transport takes no writes: use nixl or tcp"):
        _ucx("a", backend="ucx", has_landing=True)
