"""Records of nodes, as they are and as they were, and trust in them between two polls."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.errors import ProtocolError
from kvstore.index.feed import OUT_MS, STALE_MS, Body, Trust
from kvstore.stores.records import Row, View, decode, encode
from kvstore.types import Incarnation
from kvstore.wire.load import Load

BODY = Body(Incarnation(1), (), "n:1", 7, is_open=True, is_exact=True, is_short=False)
NOW = 10_000
EXACT = Body(Incarnation(1), (), "", 0, is_open=True, is_exact=True, is_short=False)
FILLING = Body(Incarnation(1), (), "", 0, is_open=True, is_exact=False, is_short=False)
BEFORE_LOADS = [1, [], "n:1", 7, True, True, False]


def test_a_record_that_was_written_before_there_were_loads_is_read() -> None:
    body = decode(Body, msgspec.msgpack.encode(BEFORE_LOADS))
    assert body == BODY
    assert body.load is None


def test_a_load_of_a_version_that_tells_more_or_less_is_read() -> None:
    count = len(Load.__struct_fields__)
    body = decode(Body, msgspec.msgpack.encode([*BEFORE_LOADS, list(range(count + 3))]))
    assert body.load is not None
    assert list(msgspec.structs.astuple(body.load)) == list(range(count))
    assert decode(Body, encode(body)) == body
    fewer = decode(Body, msgspec.msgpack.encode([*BEFORE_LOADS, [5]]))
    assert fewer.load == Load(at_ms=5)


def test_a_load_of_what_no_node_tells_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(Body, msgspec.msgpack.encode([*BEFORE_LOADS, [-1]]))


def seen(count: int) -> View:
    """A view that saw all of them change."""
    view = View(0)
    view.polled({}, 0)
    view.polled({str(n): (b"1", EXACT, b"") for n in range(count)}, NOW)
    assert view.trust(NOW) is Trust.EXACT
    return view


def test_a_word_does_not_make_the_next_answer_look_at_every_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = seen(500)
    looks = 0
    trust = Row.trust

    def counted(row: Row, now_ms: int) -> Trust | None:
        nonlocal looks
        looks += 1
        return trust(row, now_ms)

    monkeypatch.setattr(Row, "trust", counted)
    for number in range(100):
        view.changed(str(number), b"2", EXACT, NOW + number)
        assert view.trust(NOW + number) is Trust.EXACT
    assert looks == 100


def test_answers_doubt_who_is_in_answers_and_not_exact() -> None:
    view = seen(3)
    view.changed("0", b"2", FILLING, NOW + 1)
    assert view.trust(NOW + 1) is Trust.CATCHING_UP
    view.changed("0", b"3", EXACT, NOW + 2)
    assert view.trust(NOW + 2) is Trust.EXACT
    view.changed("0", b"4", FILLING, NOW + 3)
    view.gone("0", b"3", NOW + 3)
    assert view.trust(NOW + 3) is Trust.CATCHING_UP, "it spoke since"
    view.gone("0", b"4", NOW + 3)
    assert view.trust(NOW + 3) is Trust.EXACT
    assert view.trust(NOW + STALE_MS) is Trust.CATCHING_UP, "the others are silent"
    assert view.trust(NOW + OUT_MS) is Trust.EXACT
    view.polled({"0": (b"5", FILLING, b"")}, NOW + OUT_MS)
    assert view.trust(NOW + OUT_MS) is Trust.CATCHING_UP
    view.polled({"0": (b"5", FILLING, b"5")}, NOW + OUT_MS)
    assert view.trust(NOW + OUT_MS) is Trust.EXACT
    view.polled({"0": (b"6", FILLING, b"")}, NOW + OUT_MS)
    assert view.trust(NOW + OUT_MS) is Trust.CATCHING_UP
    view.polled({}, NOW + OUT_MS)
    assert view.trust(NOW + OUT_MS) is Trust.EXACT, "another replica has forgotten it"
