"""Common parts of all acts of `kvstore demo`: an act has runs, and shows them.

    introduction ─▶ runs ─▶ table ─▶ claims ─▶ picture ─▶ gain

Claims are checked before they are shown: a demo that ends well has proven them.

Does not cover: what an act runs on (`stage`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from kvstore.demo.models import BLOCK_TOKENS, MEDIUM
from kvstore.demo.stage import ENGINE_BLOCKS, LATER, LATER_ROUNDS, Replay, Stage
from kvstore.demo.workload import ConversationPlan
from kvstore.errors import KVStoreError
from kvstore.installation import lacking
from kvstore.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

KV_BYTES: Final = MEDIUM.kv_bytes_per_token(4)
COLOURS: Final = ("#8a94a0", "#0072b2")
"""Colours of both runs in a picture."""
STYLE: Final = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    "lines.markeredgewidth": 0,
    "lines.markersize": 4,
}


class DemoError(KVStoreError):
    """A failure of the demo, in one sentence."""


class Measure(NamedTuple):
    """A column of the table."""

    title: str
    cell: Callable[[Replay, Replay], str]
    """Text of a cell, from a run and the first run."""


class Claim(NamedTuple):
    """A result that an act has shown."""

    sentence: str
    holds: bool = True
    failure: str = ""
    """Error message if the claim does not hold."""


COLUMNS: Final = (
    Measure("TTFT\np50 ms", lambda run, _: f"{run.median_ms:.0f}"),
    Measure("TTFT\np95 ms", lambda run, _: f"{np.percentile(run.ttft_ms(LATER_ROUNDS), 95):.0f}"),
    Measure("speed-up\n", lambda run, one: f"{one.median_ms / run.median_ms:.1f} ×"),
    Measure("prefix-\ncache hits", lambda run, _: f"{run.own_hit_tokens:,}"),
    Measure("hits in\nkvstore", lambda run, _: f"{run.kvstore_hit_tokens:,}"),
    Measure("tokens\ncomputed", lambda run, _: f"{run.computed_tokens:,}"),
    Measure("answers\nidentical", lambda run, one: f"{run.same_answers(one)}/{len(run.answers)}"),
)


class Act(ABC):
    """One way to run the demo: its runs, and what is shown of them."""

    heading = "kvstore demo"
    names: tuple[str, ...]
    """Names of its runs, in order."""
    requests = LATER
    """Words for the requests that the table is about."""
    columns: tuple[Measure, ...] = COLUMNS
    picture = ""
    """File name of its picture; empty: there is none."""

    @abstractmethod
    def runs(self, stage: Stage) -> Iterator[Replay]:
        """Do all runs, one after the other, and yield the result of each."""

    @abstractmethod
    def claims(self, runs: Sequence[Replay]) -> list[Claim]:
        """Claims about the runs, besides equal answers."""

    def introduction(self, plan: ConversationPlan) -> str:
        """Text that is printed before the runs."""
        return (
            f"{plan.users} users × {plan.rounds} rounds, shared system prompt, growing history;"
            f" real vLLM on this machine's CPU, {format_size(KV_BYTES)} of KV per token; its own"
            f" cache holds {ENGINE_BLOCKS * BLOCK_TOKENS:,} tokens."
        )

    def remark(self, runs: Sequence[Replay]) -> str:
        """Text under the table, with markup; empty: none. Raises DemoError: there is nothing to
        show.
        """
        return ""

    def draw(self, figure: Figure, runs: Sequence[Replay]) -> None:  # noqa: B027 -- most draw nothing
        """Draw the picture of the runs, where the act has one."""

    def gain(self, runs: Sequence[Replay]) -> str:
        """Text about the gain, for the last line."""
        factors = (f"{run.name} {runs[0].median_ms / run.median_ms:.1f} ×" for run in runs[1:])
        saved_s = sum(run.saved_s for run in runs)
        return (
            f"Speed-up of the first token {LATER}: {', '.join(factors)};"
            f" {saved_s:.0f} s of prefill saved"
        )

    # ── shown ────────────────────────────────────────────────────────────────────────────────────

    def introduce(self, console: Console, plan: ConversationPlan) -> None:
        """Print name and introduction."""
        console.rule(f"[bold]{self.heading}")
        console.print(f"seed {plan.seed}: {self.introduction(plan)}", highlight=False)

    def show(self, console: Console, runs: Sequence[Replay]) -> None:
        """Print the table."""
        table = Table(
            box=box.SIMPLE_HEAD,
            title_justify="left",
            title=f"Time to first token (TTFT) {self.requests}, and sources of prompt tokens",
        )
        table.add_column("", no_wrap=True)
        for column in self.columns:
            table.add_column(column.title, justify="right", no_wrap=True)
        for run in runs:
            table.add_row(run.name, *(column.cell(run, runs[0]) for column in self.columns))
        console.print(table)

    def conclude(self, console: Console, runs: Sequence[Replay], picture: Path) -> None:
        """Print remark and claims, and draw the picture. Raises DemoError: a claim fails."""
        if remark := self.remark(runs):
            console.print(remark, highlight=False)
        for run in runs:
            if differ := len(run.answers) - run.same_answers(runs[0]):
                those = f"{differ} answers of the run '{run.name}'"
                raise DemoError(f"{those} differ from {runs[0].name}.")
        claims = [*self.claims(runs), Claim("All answers are identical, token by token (float32).")]
        for claim in claims:
            if not claim.holds:
                raise DemoError(claim.failure)
        for claim in claims:
            console.print(f"[green]✓[/] {claim.sentence}")
        if self.picture:
            self._draw(console, runs, picture)

    def _draw(self, console: Console, runs: Sequence[Replay], picture: Path) -> None:
        """Draw and save the picture, if matplotlib is installed."""
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError:
            console.print(lacking("a plot", "matplotlib", "demo"), markup=False)
            return
        with rc_context(STYLE):
            figure = Figure()
            self.draw(figure, runs)
            figure.tight_layout()
            picture.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(picture, dpi=150)
        console.print(f"plot: {picture}", highlight=False)


def dots(axes: Axes, x: ArrayLike, y: ArrayLike, colour: str) -> None:
    """Draw single requests as dots."""
    axes.plot(x, y, "o", color=colour, alpha=0.5)
