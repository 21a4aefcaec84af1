"""What the log says of engines that come and go."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvstore.types import ConnectionId
from tests.kit.hello import scheduler_hello
from tests.unit.node.conftest import MakeAttach, Peer, all_events, hello_rank

Connect = Callable[[], Peer]


def test_engines_are_told_of_once_when_they_come_and_when_they_go(
    make_attach: MakeAttach, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvstore")
    attach = make_attach()
    name = "e" * 100
    scheduler, rank = connect(), connect()
    scheduler.introduce(msgspec.structs.replace(scheduler_hello(), engine_id=name))
    rank.introduce(msgspec.structs.replace(hello_rank(), engine_id=name))
    all_events(attach)
    assert caplog.messages == [f"engine {'e' * 64} attached (connection 1)"]
    rank.socket.close()
    scheduler.socket.close()
    all_events(attach)
    attach.release(ConnectionId(1))
    assert caplog.messages[1:] == [f"engine {'e' * 64} detached (connection 1)"]
