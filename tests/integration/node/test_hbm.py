"""A real node with a slab of GPU memory, which is simulated; another process maps it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.link import Link
from kvstore.kernels.port import DeviceError
from kvstore.testing.process import NodeFailed, NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.types import PAGE_BYTES
from kvstore.wire.messages import slots_array
from kvstore.wire.space import begin_of
from tests.integration.node.conftest import eventually, rows, tiers
from tests.kit.gauges import samples
from tests.kit.simulated_device import UUID, SimulatedDevice
from tests.style.tree import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="memory of a simulated device is root's"),
]
FLAGS = ("--hbm", "4MiB", "--slab", "1MiB")
KEYS = make_keys(4)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeProcess]:
    path = [str(ROOT / "tests" / "kit" / "simulated_cuda"), str(ROOT)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with NodeProcess.start(tmp_path, flags=FLAGS) as made:
        yield made


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(11, PAGE_BYTES)


def open_engine(node: NodeProcess) -> RawEngine:
    engine = RawEngine(node.socket, gpu=str(UUID))
    engine.open()
    return engine


def lease_again(engine: RawEngine) -> list[int]:
    """Use the blocks twice more; returns their slots of dram."""
    for _ in range(2):
        reply = engine.lease(KEYS)
        engine.release(reply)
    return [int(slot) for slot in slots_array(reply.slots)]


def words(link: Link, slots: list[int]) -> list[int]:
    assert link.places is not None
    return [int(word) for word in link.places.generations(np.array(slots, np.uint32))]


def read(device: SimulatedDevice, address: int, length: int) -> bytes:
    """As the copy engine of a rank: on the device, then to the host."""
    into = np.zeros(length, np.uint8)
    device.pin(into.ctypes.data, length)
    one = (np.array([value], np.uint64) for value in (into.ctypes.data, address, length))
    device.copy(device.stream(is_urgent=True), *one)
    device.finish()
    device.unpin(into.ctypes.data)
    return into.tobytes()


def test_copies_are_read_by_another_process_and_the_next_node_process_has_those_in_dram_only(
    node: NodeProcess, device: SimulatedDevice
) -> None:
    with open_engine(node) as engine:
        engine.store(KEYS)
        slots = lease_again(engine)
        link = engine.ranks[0]
        assert eventually(lambda: all(words(link, slots)))
        assert link.slab is not None
        assert (link.slab.gpu, link.slab.size_bytes) == (str(UUID), 4 << 20)
        address = device.open(link.slab.handle)
        found = [
            read(device, address + begin_of(word), engine.block_bytes)
            for word in words(link, slots)
        ]
        reply = engine.lease(KEYS)
        assert found == engine.read(reply)
        engine.release(reply)
        blocks_of = {name: tier["blocks"] for name, tier in tiers(node).items()}
        assert blocks_of == {"dram": 4, "file": 0, "hbm": 4}
        assert [row["tiers"] for row in rows(node, "blocks")] == ["hbm+dram"] * len(KEYS)
        metrics = samples(node)
        assert metrics['kvstore_blocks{tier="hbm"}'] == 4
        assert metrics['kvstore_capacity_bytes{tier="hbm"}'] == 4 << 20
        assert metrics["kvstore_hbm_blocks_promoted_total"] == 4
        node.crash()
        with pytest.raises(DeviceError, match="invalid handle"):
            SimulatedDevice(1).open(link.slab.handle)
        device.leave(address)
    with open_engine(node) as engine:
        reply = engine.lease(KEYS)
        assert len(slots_array(reply.slots)) == len(KEYS), "dram is kept"
        again = engine.ranks[0]
        assert not any(words(again, [int(slot) for slot in slots_array(reply.slots)])), "cold"
        engine.release(reply)
        slots = lease_again(engine)
        assert eventually(lambda: all(words(again, slots)))


def test_an_engine_elsewhere_is_served_as_without_hbm(node: NodeProcess) -> None:
    with RawEngine(node.socket) as engine:
        engine.open()
        engine.store(KEYS)
        lease_again(engine)
        assert engine.ranks[0].slab is None
        assert len(engine.lease(KEYS).slots) == 4 * len(KEYS)


def test_without_a_gpu_the_flag_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NodeFailed) as failed, NodeProcess.start(tmp_path, flags=FLAGS):
        pass
    assert "hbm of 4 MiB cannot be had on GPU 0: no NVIDIA driver" in failed.value.stderr
    assert "or leave --hbm out" in failed.value.stderr
    assert "Traceback" not in failed.value.stderr
