"""The look that all plots of kvstore share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK = "#1f2933"
MUTED = "#7b8794"
GREY = "#9aa5b1"
BLUE = "#2f6fde"
GREEN = "#1a9c73"
AMBER = "#e0912f"
VIOLET = "#8a5fbf"


def figure(title: str, subtitle: str, *, columns: int, widths: Sequence[float]) -> tuple[Any, Any]:
    """A figure with a title line, a quieter line below it, and `columns` axes side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10.5,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": "#cbd2d9",
            "axes.titlesize": 11.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 12,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "grid.color": "#e4e7eb",
        }
    )
    made, axes = plt.subplots(
        1, columns, figsize=(11.5, 5.2), gridspec_kw={"width_ratios": list(widths)}
    )
    made.suptitle(title, x=0.02, y=0.975, ha="left", fontsize=15, fontweight="bold")
    made.text(0.02, 0.875, subtitle, fontsize=10, color=MUTED)
    return made, axes


def halo() -> list[Any]:
    """Path effects that keep a label legible on top of marks."""
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=2.5, foreground="white")]


def whole_numbers() -> Any:
    """A locator for an axis that counts."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def save(made: Any, path: Path) -> Path:
    """Lay out below the title lines and write a PNG."""
    import matplotlib.pyplot as plt

    made.tight_layout(rect=(0.01, 0.01, 0.99, 0.9), w_pad=3.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=150)
    plt.close(made)
    return path
