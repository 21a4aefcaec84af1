"""A child process: its socket, its end, and signals for it alone."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
from contextlib import ExitStack
from unittest.mock import patch

import pytest

from kvstore.net.process import Child, pair, spawn

TALKER = """
import os, socket, sys
its = socket.socket(fileno=int(sys.argv[1]))
its.send(f"{sys.argv[2]} {os.environ.get('COLOUR')}".encode())
its.recv(1)
"""
PROGRAM = ("-c", TALKER)
SELECT_FD_END = 1024


@pytest.fixture
def child() -> Child:
    with patch.dict(os.environ, COLOUR="red"):
        return Child(spawn(PROGRAM))


def test_it_has_its_end_of_the_pair_its_parent_and_its_environment(child: Child) -> None:
    child.socket.settimeout(20)
    assert child.socket.recv(100).decode() == f"{os.getpid()} red"
    assert not child.has_ended
    assert child.close() == -signal.SIGKILL


def test_an_end_of_its_own_is_readable_and_keeps_its_status(child: Child) -> None:
    child.socket.settimeout(20)
    child.socket.recv(100)
    child.socket.send(b"0")
    assert select.select([child.pidfd], [], [], 20)[0]
    assert child.has_ended
    assert child.close() == 0


def test_its_end_is_seen_behind_a_thousand_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as restored:
        restored.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * SELECT_FD_END, hard))
        child = Child(spawn(PROGRAM))
        restored.callback(child.close)
        low, child.pidfd = child.pidfd, fcntl.fcntl(child.pidfd, fcntl.F_DUPFD, SELECT_FD_END)
        os.close(low)
        assert not child.has_ended
        child.signal(signal.SIGKILL)
        ended = select.poll()
        ended.register(child.pidfd, select.POLLIN)
        assert ended.poll(20_000)
        assert child.has_ended


def test_on_return_of_close_it_is_gone_with_its_descriptors(child: Child) -> None:
    pid, pidfd = child.pid, child.pidfd
    child.close()
    assert child.socket.fileno() == -1
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(pidfd)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_signal_for_one_that_has_been_reaped_reaches_nobody() -> None:
    spawned = spawn(PROGRAM)
    child = Child(spawned)
    child.signal(signal.SIGKILL)
    spawned.wait()
    child.signal(signal.SIGKILL)
    assert child.close() == -signal.SIGKILL


def test_without_room_for_it_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is free")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(BlockingIOError):
        spawn(PROGRAM)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_longest_message_fits_into_the_pair() -> None:
    ours, its = pair()
    with ours, its:
        assert ours.send(bytes(128 << 10), socket.MSG_DONTWAIT) == 128 << 10
        assert len(its.recv(256 << 10)) == 128 << 10
