"""The door of a process or a machine that has no room for another connection."""

from __future__ import annotations

import errno
import os
import resource
import select
from collections.abc import Callable
from typing import cast

import pytest

from kvstore.engine.events import Received
from kvstore.node import attach as attach_module
from kvstore.types import ConnectionId
from tests.unit.node.conftest import (
    FakeClock,
    MakeAttach,
    Peer,
    all_events,
    hello_rank,
    this_process,
)

Connect = Callable[[], Peer]


class Reluctant:
    """An epoll for which there is no memory."""

    def register(self, fd: int, mask: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_without_descriptors_the_door_waits_instead_of_spinning(
    make_attach: MakeAttach,
    connect: Connect,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    attach = make_attach()
    peer = connect()
    peer.introduce(hello_rank())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert all_events(attach) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in caplog.text
    assert all_events(attach) == [], "not yet"
    clock.ns += attach_module.ACCEPT_PAUSE_NS
    epoll, attach._epoll = attach._epoll, cast("select.epoll", Reluctant())
    with pytest.raises(OSError, match="Cannot allocate memory"):
        attach.expire(clock.ns)
    attach._epoll = epoll
    attach.expire(clock.ns)
    assert all_events(attach) == [Received(ConnectionId(1), hello_rank(), this_process())]


@pytest.mark.parametrize("left", [1, 2])
def test_a_hello_that_takes_the_last_descriptors_is_not_refused_for_good(
    make_attach: MakeAttach, connect: Connect, left: int
) -> None:
    """One for its pidfd, one to see whose it is; who sent it is known without another."""
    attach = make_attach()
    peer = connect()
    assert all_events(attach) == []
    peer.introduce(hello_rank())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, hard))
    try:
        events = all_events(attach)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if left == 1:
        assert (events, peer.hear()) == ([], b""), "hung up on: it comes again"
    else:
        assert events == [Received(ConnectionId(1), hello_rank(), this_process())]
