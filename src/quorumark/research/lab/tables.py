"""Small parts of the results' pages: tables in Markdown, means with their deviations."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorumark.research.lab.loop import Run
    from quorumark.research.lab.tuning import LanguageRun

    AnyRun = Run | LanguageRun

__all__ = ["as_long", "mean_of", "table"]


def as_long(one: dict[str, Any] | None, other: dict[str, Any]) -> bool:
    return one is not None and bool(one["rounds"] == other["rounds"])


def mean_of(values: list[float], digits: int) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
