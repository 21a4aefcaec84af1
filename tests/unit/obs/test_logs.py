"""The log never floods, and says what it left out."""

from __future__ import annotations

import logging

import pytest

from kvstore.obs import logs
from kvstore.obs.logs import RECORDS_PER_PERIOD_MAX, OneLine, RateLimit, short


def record(template: str) -> logging.LogRecord:
    return logging.LogRecord("kvstore.x", logging.INFO, "x.py", 1, template, (1,), None)


def test_a_template_is_limited_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    limit = RateLimit()
    passed = [limit.filter(record("a %d")) for _ in range(50)]
    assert passed == [True] * RECORDS_PER_PERIOD_MAX + [False] * (50 - RECORDS_PER_PERIOD_MAX)
    assert limit.filter(record("b %d"))
    clock[0] = logs.PERIOD_S
    again = record("a %d")
    assert limit.filter(again)
    assert again.getMessage() == "a 1 (30 like this were left out)"


def test_the_filter_itself_is_bounded() -> None:
    limit = RateLimit()
    for n in range(3 * logs.TEMPLATE_COUNT_MAX):
        limit.filter(record(f"{n} %d"))
    assert len(limit._seen) <= logs.TEMPLATE_COUNT_MAX


def test_a_peers_words_stay_on_one_line() -> None:
    shout = logging.LogRecord("kvstore.x", logging.INFO, "x.py", 1, "%s", ("a\n\x1b[2Jé",), None)
    assert OneLine("%(name)s: %(message)s").format(shout) == r"kvstore.x: a\n\x1b[2J\xe9"
    long = logging.LogRecord("kvstore.x", logging.INFO, "x.py", 1, "x" * 9999, None, None)
    assert len(OneLine("%(message)s").format(long)) == logs.MESSAGE_CHARACTERS_MAX


def test_keys_are_cut() -> None:
    assert short(bytes(range(32))) == "00010203"
