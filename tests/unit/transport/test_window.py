"""Windows: nothing is lost on a link of one's own, others are given way, and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvstore.transport.reads import (
    CEILING_BYTES,
    LEAST_BYTES,
    SHARE,
    STEP_BYTES,
    Reads,
    Window,
)
from kvstore.units import NS_PER_MS, NS_PER_S
from tests.unit.transport.link import Link, begin

GIB = 1 << 30
LONG_NS = 10_000 * NS_PER_S


def _carried_ns(link: Link, *, paced: bool) -> int:
    reads = Reads(paced=paced)
    begin(reads, 1, GIB // 4)
    before_ns = link.now_ns
    return link.carry(reads, until_ns=LONG_NS)[1] - before_ns


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_ns"),
    [(125e6, 200_000), (2e9, 100_000), (12e9, 50_000), (1e9, 5_000_000)],
)
def test_a_link_of_ones_own_is_filled(bytes_per_s: float, latency_ns: int) -> None:
    link = Link(bytes_per_s=bytes_per_s, latency_ns=latency_ns)
    unpaced_ns = _carried_ns(link, paced=False)
    assert _carried_ns(link, paced=True) / unpaced_ns <= 1.02


@pytest.mark.parametrize("other_mib", [2, 16])
def test_another_flow_is_given_way(other_mib: int) -> None:
    def share(*, paced: bool) -> float:
        busy = [False]
        link = Link(
            bytes_per_s=125e6,
            latency_ns=200_000,
            other_queue=lambda _: other_mib << 20 if busy[0] else 0,
        )
        reads = Reads(paced=paced)
        begin(reads, 1, 64 << 20)
        link.carry(reads, until_ns=LONG_NS)  # what the link is like when nobody else is there
        busy[0] = True
        before = link.ours_bytes, link.others_bytes
        begin(reads, 2, GIB)
        link.carry(reads, until_ns=link.now_ns + 5 * NS_PER_S)
        ours, others = link.ours_bytes - before[0], link.others_bytes - before[1]
        return ours / (ours + others)

    paced, unpaced = share(paced=True), share(paced=False)
    slower, slower_unpaced = 1 / (1 - paced) - 1, 1 / (1 - unpaced) - 1
    assert slower <= 0.5 * slower_unpaced
    assert paced > 0.01


@pytest.mark.parametrize("delay_ms", [20, 100])
def test_a_busy_host_does_not_stop_a_read(delay_ms: int) -> None:
    """Each post waits for a processor, however little is under way."""
    link = Link(bytes_per_s=1e9, latency_ns=100_000)
    reads = Reads()
    begin(reads, 1, 64 << 20)
    link.carry(reads, until_ns=LONG_NS)  # what the link is like when nothing else runs
    link.latency_ns += delay_ms * NS_PER_MS
    begins_ns = link.now_ns
    begin(reads, 2, 256 << 20)
    link.carry(reads, until_ns=LONG_NS)
    due_ns = SHARE * (256 << 20)  # at a byte a nanosecond
    assert link.now_ns - begins_ns <= 2 * due_ns


def test_it_comes_back_when_the_other_has_gone() -> None:
    busy_ns = (NS_PER_S // 2, 3 * NS_PER_S // 2)
    link = Link(
        bytes_per_s=1e9,
        latency_ns=100_000,
        other_queue=lambda now_ns: 8 << 20 if busy_ns[0] < now_ns < busy_ns[1] else 0,
    )
    reads = Reads()
    begin(reads, 1, 100 * GIB)
    link.carry(reads, until_ns=5 * NS_PER_S // 2)
    before = link.ours_bytes
    link.carry(reads, until_ns=3 * NS_PER_S)
    assert link.ours_bytes - before >= 0.95e9 / 2


events = st.lists(
    st.tuples(
        st.sampled_from(["done", "failed", "wait"]),
        st.integers(1, 1 << 26),
        st.integers(1, 10 * NS_PER_S),
    ),
    max_size=60,
)


@given(events)
def test_it_is_bounded_and_never_starves(steps: list[tuple[str, int, int]]) -> None:
    window, now_ns = Window(), 1
    for kind, size, took_ns in steps:
        now_ns += took_ns
        if kind == "done":
            window.ended(
                size_bytes=size, queued_bytes=size, posted_ns=now_ns - took_ns, now_ns=now_ns
            )
        elif kind == "failed":
            window.failed(posted_ns=now_ns - took_ns, now_ns=now_ns)
        assert LEAST_BYTES <= window.size_bytes <= CEILING_BYTES
        assert window.room_bytes(CEILING_BYTES, now_ns) == 0
        pause_ns = window.pause_ns(now_ns)
        assert pause_ns <= now_ns + 3 * took_ns * 10
        assert window.room_bytes(0, max(now_ns, pause_ns)) >= STEP_BYTES


def test_failures_halve_it_once_for_what_was_under_way() -> None:
    window = Window()
    size = window.size_bytes
    window.failed(posted_ns=10, now_ns=20)
    window.failed(posted_ns=11, now_ns=21)
    assert window.size_bytes == size / 2
    window.failed(posted_ns=20, now_ns=30)
    assert window.size_bytes == size / 4
