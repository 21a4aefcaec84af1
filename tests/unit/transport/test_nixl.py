"""Which connections of NIXL are kept, with an agent that only counts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.ports import TransportMemory
from kvstore.transport import nixl
from kvstore.transport.nixl import FORGOTTEN_MAX, PROGRESS_US, Nixl, sleeping_progress
from kvstore.wire.transfer_worker import decode_descriptor, encode

SIZE = 1 << 16


class Units:
    """A list that was prepared."""

    def __init__(self, agent: Agent, of: str) -> None:
        self._agent, self._of = agent, of
        agent.prepared.append(of)

    def release(self) -> None:
        self._agent.prepared.remove(self._of)


class Agent:
    """As much of NIXL's as connections need."""

    def __init__(self) -> None:
        self.remote: list[str] = []
        self.prepared: list[str] = []
        self.added = 0

    def create_backend(self, plugin: str, options: dict[str, str]) -> None:
        pass

    def get_reg_descs(self, rows: object, kind: str) -> object:
        return rows

    def register_memory(self, rows: object, backends: list[str]) -> None:
        pass

    def get_partial_agent_metadata(self, rows: object, _: bool, backends: list[str]) -> bytes:
        return b"details"

    def prep_xfer_dlist(self, agent: str, rows: object, kind: str, backends: list[str]) -> Units:
        return Units(self, agent)

    def add_remote_agent(self, details: bytes) -> bytes:
        self.added += 1
        self.remote.append(details.decode())
        return details

    def remove_remote_agent(self, agent: str) -> None:
        self.remote.remove(agent)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent()
    monkeypatch.setattr(nixl, "_open_agent", lambda name: (made, (RuntimeError,)))
    return made


@pytest.fixture
def transport(agent: Agent) -> Nixl:
    memory = np.zeros(SIZE, np.uint8)
    return Nixl("a", TransportMemory(memory, memory), {})


def connect(transport: Nixl, peer: str) -> None:
    own = decode_descriptor(transport.describe())
    transport.connect(peer, encode(msgspec.structs.replace(own, name=peer, details=peer.encode())))


def test_some_that_were_forgotten_are_kept(transport: Nixl, agent: Agent) -> None:
    connect(transport, "stays")
    names = [f"node-{number}" for number in range(FORGOTTEN_MAX + 3)]
    for name in names:
        connect(transport, name)
        transport.forget(name)
    assert agent.remote == ["stays", *names[3:]]
    assert agent.prepared == ["", "stays", *names[3:]]
    added = agent.added
    connect(transport, names[3])
    assert agent.added == added, "it has come back"
    connect(transport, names[2])
    assert agent.added == added + 1
    transport.close()
    assert agent.remote == []


def test_who_was_forgotten_longest_ago_leaves_first(transport: Nixl, agent: Agent) -> None:
    names = [f"node-{number}" for number in range(FORGOTTEN_MAX)]
    for name in (*names, names[0]):  # the first one comes back, and is forgotten again
        connect(transport, name)
        transport.forget(name)
    connect(transport, "new")
    transport.forget("new")
    assert agent.remote == [names[0], *names[2:], "new"]


def test_all_that_are_connected_stay(transport: Nixl, agent: Agent) -> None:
    names = [f"node-{number}" for number in range(2 * FORGOTTEN_MAX)]
    for name in names:
        connect(transport, name)
    transport.forget(names[0])
    transport.forget("nobody")
    assert agent.remote == names


class Config:
    """As in 1.5: whoever makes an agent sets a delay of 0."""

    def __init__(self) -> None:
        self.us = -1

    @property
    def pthrDelay(self) -> int:
        return self.us

    @pthrDelay.setter
    def pthrDelay(self, us: int) -> None:
        self.us = us


class OtherConfig:
    """Of a release that has no such delay."""


@pytest.mark.parametrize(("made", "us"), [(Config, PROGRESS_US), (OtherConfig, 0)])
def test_progress_threads_sleep_where_that_can_be_said(made: type[Any], us: int) -> None:
    bindings = SimpleNamespace(nixlAgentConfig=made)
    with sleeping_progress(bindings):
        config = bindings.nixlAgentConfig()
        config.pthrDelay = 0
    assert isinstance(config, made)
    assert config.pthrDelay == us
    assert bindings.nixlAgentConfig is made
