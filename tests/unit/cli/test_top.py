"""`kvstore top`: rates between two samples, whoever is silent, and what fits a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console

from kvstore.cli.commands import as_json
from kvstore.cli.top import GONE, SILENT, UP, Figures, Sample, Tally, node_figures
from kvstore.cli.top_routers import RouterPages
from kvstore.cli.top_screen import Sampler
from kvstore.cli.top_view import NODES, Seen, page
from kvstore.errors import KVStoreError
from kvstore.wire.load import Load

GIB = 1 << 30
WIDE_COLUMNS = NODES.wide_columns
FIRST = Load(
    at_ms=10_000,
    dram_bytes=64 * GIB,
    dram_used_bytes=63 * GIB,
    file_bytes=2048 * GIB,
    file_used_bytes=1999 * GIB,
    blocks_hit=100,
    blocks_missed=50,
    saved_ms=9_000,
    waited_ms=2_000,
    stored_bytes=7 * GIB,
    leased_bytes=9 * GIB,
    fetched_bytes=GIB,
    served_bytes=5,
    fetch_p50_us=12_345,
    fetch_p99_us=987_654,
    leases=12_345,
    engines=8,
    slots_quarantined=3,
    replicas=2,
    replicas_reached=2,
)
LATER = msgspec.structs.replace(
    FIRST,
    at_ms=12_000,
    blocks_hit=175,
    blocks_missed=75,
    saved_ms=12_000,
    waited_ms=2_500,
    stored_bytes=9 * GIB,
    leased_bytes=9 * GIB,
    fetched_bytes=GIB + 2000,
    served_bytes=15,
)


def sample(load: Load | None, *, state: str = UP, incarnation: int = 1) -> Sample:
    return Sample(state, "exact", incarnation, load)


def rates(figures: Figures) -> tuple[float | None, ...]:
    return (
        figures.hit_percent,
        figures.saved_per_s,
        figures.stored_bytes_per_s,
        figures.leased_bytes_per_s,
        figures.fetched_bytes_per_s,
        figures.served_bytes_per_s,
    )


NOTHING = (None,) * 6
RATES = (75.0, 1.25, GIB, 0.0, 1000.0, 5.0)


def test_rates_are_of_what_was_counted_between_two_samples() -> None:
    tally = Tally(node_figures)
    (first,) = tally.take({"n1": sample(FIRST)})
    assert rates(first) == NOTHING
    assert not first.has_rates
    assert (first.dram_used_bytes, first.leases, first.fetch_p99_us) == (63 * GIB, 12_345, 987_654)
    (second,) = tally.take({"n1": sample(LATER)})
    assert rates(second) == RATES
    assert second.has_rates
    (again,) = tally.take({"n1": sample(LATER)})
    assert rates(again) == RATES, "it told nothing new since"
    idle = msgspec.structs.replace(LATER, at_ms=13_000)
    (idle_figures,) = tally.take({"n1": sample(idle)})
    assert rates(idle_figures) == (None, 0.0, 0.0, 0.0, 0.0, 0.0), "no lookups are no misses"


def test_a_process_that_began_anew_has_no_rates_yet() -> None:
    tally = Tally(node_figures)
    tally.take({"n1": sample(FIRST)})
    (figures,) = tally.take({"n1": sample(LATER, incarnation=2)})
    assert rates(figures) == NOTHING
    assert figures.leases == FIRST.leases


def test_who_is_silent_or_gone_is_shown_without_figures() -> None:
    tally = Tally(node_figures)
    tally.take({"n1": sample(FIRST), "n2": sample(FIRST), "old": sample(None)})
    here, silent, old = tally.take(
        {"n1": sample(LATER), "n2": sample(FIRST, state=SILENT), "old": sample(None)}
    )
    assert rates(here) == RATES
    assert (silent.state, silent.leases, rates(silent)) == (SILENT, None, NOTHING)
    assert (old.state, old.dram_bytes) == (UP, None), "it is of a version that tells no load"
    assert silent.has_rates, "it has none to wait for"
    assert old.has_rates, "it has none to wait for"


def sampler(*answers: Sample | None) -> Sampler:
    """Of answers one after the other (None: none), and of no router."""
    left = list(answers)

    def ask() -> tuple[dict[str, Sample], str]:
        answer = left.pop(0)
        if answer is None:
            raise KVStoreError("nobody is there")
        return {"n1": answer}, ""

    return Sampler(ask, RouterPages([], None))


def test_when_nobody_answers_the_nodes_stay_and_are_silent_until_somebody_does() -> None:
    tops = sampler(sample(FIRST), None, None, sample(LATER))
    tops.take(keeps=True)
    for _ in range(2):
        seen = tops.take(keeps=True)
        (figures,) = seen.nodes or ()
        assert (figures.node, figures.state, seen.trouble) == ("n1", SILENT, "nobody is there")
    seen = tops.take(keeps=True)
    (figures,) = seen.nodes or ()
    assert (figures.state, seen.trouble, rates(figures)) == (UP, "", RATES)
    assert sampler(None).take(keeps=True) == ([], [], "nobody is there")
    with pytest.raises(KVStoreError, match="nobody is there"):
        sampler(None).take()


def test_one_view_waits_until_there_are_rates() -> None:
    waits: list[float] = []
    tops = sampler(sample(FIRST), sample(FIRST), sample(LATER))
    seen = tops.take_rates(waits.append, interval_s=0.5)
    (figures,) = seen.nodes or ()
    assert (rates(figures), seen.trouble) == (RATES, "")
    assert waits == [0.5, 0.5]
    frozen = sampler(*([sample(FIRST)] * 9))
    (figures,) = frozen.take_rates(waits.append, interval_s=0.5).nodes or ()
    assert rates(figures) == NOTHING, "for ever is too long"
    assert figures.leases == FIRST.leases


def drawn(
    figures: Sequence[Figures], width: int, *, trouble: str = "", height: int | None = None
) -> list[str]:
    """Each line."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    seen = Seen(figures, [], trouble)
    console.print(page(seen, "kvstore top", width=width, height=height))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def figures_of(*names: str) -> list[Figures]:
    tally = Tally(node_figures)
    tally.take({name: sample(FIRST) for name in names})
    return tally.take({name: sample(LATER) for name in names})


ROW = (
    *("n1", "up", "63.0/64 GiB", "2.0/2 TiB", "75%", "12345", "8", "3"),
    *("1 GiB", "0 B", "1000 B", "5 B", "12.3 ms", "988 ms", "exact"),
)


@pytest.mark.parametrize("width", [WIDE_COLUMNS, 160, 240])
def test_a_wide_terminal_has_all_in_one_line(width: int) -> None:
    _, _, header, row, saved = drawn(figures_of("n1"), width)
    assert saved == "saved: 1.25 s of prefill per second, waits deducted"
    assert len(header.split()) == len(ROW)
    assert not {"quar.", "lent/s", "own", "told"} & {*header.split(), *row.split()}
    assert row.split() == " ".join(ROW).split()


@pytest.mark.parametrize("width", [80, WIDE_COLUMNS - 1])
def test_a_narrow_one_has_two_tables(width: int) -> None:
    worst = "a-node-with-a-very-long-name.example.com"
    figures = figures_of("n1", worst)
    figures.append(Figures("n3", GONE, "out"))
    lines = drawn(figures, width)
    assert [line.split()[0] for line in lines if line][1:] == [
        *("node", "n1", "a-node-wi…", "n3"),
        *("node", "n1", "a-node-wi…", "n3"),
        "saved:",
    ]
    assert "…" not in "".join(line.split("…", 1)[1] for line in lines if "…" in line)
    assert lines[3].split() + lines[8].split()[1:] == " ".join(ROW).split()
    assert lines[5].split() == ["n3", "gone", *"------"]


MOST = 1023_900_000 << 20
"""976.5 TiB: no size is longer in words."""


def test_the_largest_figures_fit_eighty_columns() -> None:
    lines = drawn(
        [
            Figures(
                *("n" * 40, SILENT, "catching-up", 16, 15),
                *(99 << 40, MOST, 99 << 40, MOST),
                *(99_999, 99, 9999, 99_900, 99_900),
                *(-999.99, 100.0, MOST, MOST, MOST, MOST),
            )
        ],
        80,
    )
    assert [line.count("…") for line in lines if line.startswith("nnn")] == [1, 1]
    assert lines[-2].endswith("976.5 TiB 976.5 TiB 976.5 TiB 976.5 TiB 99.9 ms 99.9 ms 15 of 16")


def test_more_nodes_than_lines_say_so() -> None:
    figures = figures_of(*(f"n{n}" for n in range(30)))
    for width in (80, 160):
        lines = drawn(figures, width, height=24, trouble="trouble")
        assert len(lines) <= 24
        assert "more: --json has all of them" in lines[-1]
        assert lines[1] == "trouble"


def test_nobody_at_all_and_unprintable_words() -> None:
    assert "no node is known" in drawn([], 80)[-1]
    lines = drawn([Figures("n\x1b[2J", UP, "")], 80, trouble="a\x1bb" * 99)
    assert "\x1b" not in "".join(lines)


def test_an_index_that_is_not_reached_is_told() -> None:
    reached = msgspec.structs.replace(LATER, replicas_reached=1)
    (figures,) = Tally(node_figures).take({"n1": sample(reached)})
    assert drawn([figures], 160)[3].endswith("1 of 2")
    none = msgspec.structs.replace(LATER, replicas=0, replicas_reached=0)
    (alone,) = Tally(node_figures).take({"(this node)": Sample(UP, "", 1, none)})
    assert drawn([alone], 160)[3].endswith("-")


def test_json_has_every_figure() -> None:
    (row,) = json.loads(as_json(nodes=figures_of("n1"), trouble=""))["nodes"]
    assert set(row) == set(Figures.__struct_fields__)
    assert (row["hit_percent"], row["stored_bytes_per_s"]) == (75.0, GIB)
