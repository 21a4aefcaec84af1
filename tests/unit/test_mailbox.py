"""The mailbox of a loop: order, bounds, its end, and a descriptor that tells the truth."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from kvstore.mailbox import Mailbox, Wake


@pytest.fixture
def mailbox() -> Iterator[Mailbox[int]]:
    made = Mailbox[int](3)
    yield made
    made.close()


def is_readable(source: Mailbox[int] | Wake) -> bool:
    return bool(select.select([source], [], [], 0)[0])


def test_messages_come_in_order_and_the_descriptor_says_whether_there_are_any(
    mailbox: Mailbox[int],
) -> None:
    assert not is_readable(mailbox)
    assert all([mailbox.put(1), mailbox.put(2)])
    assert is_readable(mailbox)
    assert next(mailbox.take()) == 1
    assert is_readable(mailbox), "what is not asked for stays"
    taken = mailbox.take()
    assert next(taken) == 2
    mailbox.put(3)
    assert is_readable(mailbox)
    assert list(taken) == [3], "what comes meanwhile is taken too"
    assert not is_readable(mailbox)


def test_a_call_that_fails_loses_no_message(
    mailbox: Mailbox[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox.put(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_read", mock.Mock(side_effect=InterruptedError))
        with pytest.raises(InterruptedError):
            next(mailbox.take())
    assert list(mailbox.take()) == [1]


def test_a_full_one_takes_no_more(mailbox: Mailbox[int]) -> None:
    assert [mailbox.put(n) for n in range(4)] == [True, True, True, False]
    assert list(mailbox.take()) == [0, 1, 2]
    assert mailbox.put(4)


@pytest.mark.parametrize("waiting", [[], [1]])
def test_its_end_wakes_the_loop_and_what_waits_can_be_taken(
    mailbox: Mailbox[int], waiting: list[int]
) -> None:
    for message in waiting:
        mailbox.put(message)
    mailbox.end()
    assert mailbox.has_ended
    assert is_readable(mailbox)
    assert not mailbox.put(2)
    assert list(mailbox.take()) == waiting


def test_closed_it_takes_nothing_and_wakes_nobody_else(mailbox: Mailbox[int]) -> None:
    fd = mailbox.fileno()
    mailbox.close()
    mailbox.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)  # which gets the number that is free now
    assert other == fd
    assert not mailbox.put(1)
    mailbox.end()
    assert list(mailbox.take()) == []
    assert not select.select([other], [], [], 0)[0]
    os.close(other)


def test_no_message_of_many_threads_is_lost_or_taken_twice() -> None:
    mailbox, found = Mailbox[int](), list[int]()
    threads = [
        threading.Thread(target=lambda at=at: [mailbox.put(at + n) for n in range(500)])
        for at in range(0, 2000, 500)
    ]
    for thread in threads:
        thread.start()
    while len(found) < 2000:
        assert select.select([mailbox], [], [], 10)[0], "messages wait, and nobody is told"
        found += mailbox.take()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(2000))
    assert not is_readable(mailbox)
    mailbox.close()


def test_a_signal_does_not_silence_a_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    wake, real, tries = Wake(), os.eventfd_write, list[int]()

    def interrupted(fd: int, value: int) -> None:
        tries.append(value)
        if len(tries) == 1:
            raise InterruptedError
        real(fd, value)

    monkeypatch.setattr(os, "eventfd_write", interrupted)
    wake.set()
    assert len(tries) == 2
    assert is_readable(wake)
    wake.close()


def test_a_handler_may_set_what_its_thread_is_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    wake, real, handled = Wake(), os.eventfd_write, list[int]()

    def signalled(fd: int, value: int) -> None:
        if not handled:
            signal.raise_signal(signal.SIGUSR1)
        real(fd, value)

    def handle(number: int, _: object) -> None:
        handled.append(number)
        wake.set()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        monkeypatch.setattr(os, "eventfd_write", signalled)
        wake.set()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [signal.SIGUSR1]
    wake.clear()
    assert not is_readable(wake)
    wake.close()
