"""Workers that send requests away without having failed."""

from __future__ import annotations

from kvstore.routing.events import Ending, Failure, FirstToken, RequestEnded
from kvstore.routing.rows import REST_NS
from tests.unit.routing.fleets import (
    MS,
    S,
    arrive,
    core_of,
    fail,
    goes_down,
    request,
    routed,
    spec,
    turn,
)


def test_a_worker_that_is_full_by_its_own_word_is_left_alone_for_a_moment() -> None:
    core = core_of(spec(0), spec(1))
    first = routed(arrive(core, request("r")))
    other = routed(turn(core, fail("r", Failure.BUSY))[0])
    assert other.worker != first.worker
    core.step(RequestEnded("r", Ending.DONE), S)
    for n in range(8):
        again = routed(arrive(core, request(f"s{n}"), now_ns=S + REST_NS - 1))
        assert again.worker == other.worker
        core.step(FirstToken(f"s{n}"), S + REST_NS - 1)
    late = routed(arrive(core, request("t"), now_ns=S + REST_NS))
    assert late.worker == first.worker, "it has nothing to do"
    core.step(FirstToken("t"), S + REST_NS)
    assert not core.fleet.doubtful


def test_nobody_waits_for_a_worker_that_rests() -> None:
    """A client whose requests are refused with 429 would hold up all others."""
    core = core_of(spec(0), spec(1), spec(2))
    for n in range(2):
        routed(arrive(core, request(f"r{n}", subset=(f"w{n}",))))
        turn(core, fail(f"r{n}", Failure.BUSY))
    goes_down(core, "w2")
    sent = routed(arrive(core, request("other")))
    assert sent.worker in ("w0", "w1")
    assert sent.draft.plain.filtered == {"w2": "down"}
    assert "last-resort" in sent.draft.plain.degraded


def test_a_rest_is_as_long_as_the_last_word_says() -> None:
    core = core_of(spec(0), spec(1))
    for n in range(2):
        routed(arrive(core, request(f"r{n}", subset=("w0",))))
    turn(core, fail("r0", Failure.BUSY))
    turn(core, fail("r1", Failure.BUSY), S + 100 * MS)
    for now_ns, filtered in ((S + REST_NS, {"w0": "rests"}), (S + 100 * MS + REST_NS, {})):
        sent = routed(arrive(core, request(f"at {now_ns}"), now_ns=now_ns))
        assert sent.draft.plain.filtered == filtered
