"""Small parts of the results' pages: tables in Markdown, means with their deviations."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorumark.research.lab.image_run import ImageRun
    from quorumark.research.lab.language_run import LanguageRun

    AnyRun = ImageRun | LanguageRun

__all__ = ["as_long", "compared_means", "mean_of", "table"]


def as_long(one: dict[str, Any] | None, other: dict[str, Any]) -> bool:
    return one is not None and bool(one["rounds"] == other["rounds"])


_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # Student's, 97.5 %, for 1 … 10 degrees


def compared_means(ours: list[float], theirs: list[float]) -> tuple[float, float | None]:
    """The difference of the means, and ± for 95 % by Welch: from the deviations of both sides.

        SE² = s²/n + t²/m          degrees of freedom: SE⁴/((s²/n)²/(n − 1) + (t²/m)²/(m − 1)), rounded down

    None where a side has one run only: its deviation is not known.
    """
    change = statistics.fmean(ours) - statistics.fmean(theirs)
    if min(len(ours), len(theirs)) < 2:
        return change, None
    parts = [statistics.variance(side) / len(side) for side in (ours, theirs)]
    spread = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (ours, theirs), strict=True))
    degrees = int(sum(parts) ** 2 / spread + 1e-9) if spread else len(ours) + len(theirs) - 2
    return change, _T[min(degrees, len(_T)) - 1] * sum(parts) ** 0.5


def mean_of(values: list[float], digits: int) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
