"""The lab's figures from result files, with matplotlib (needs the extra `report`)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from quorumark.errors import InputError, MissingDependencyError
from quorumark.lab.config import Configuration
from quorumark.lab.results import BALANCED, MEAN, best_evidence, groups

__all__ = ["draw"]


def draw(configuration: Configuration, results: dict[str, dict[str, Any]], path: Path) -> int:
    """z against the number of members or the strength, solid by our statistic, dashed by the paper's; points drawn."""
    if configuration.plot not in ("members", "strength"):
        raise InputError("configuration", "must be one with a figure: clients or strength", configuration.name)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("quorumark[report]", "drawing figures") from None
    lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for runs in groups(configuration):
        found, first = best_evidence(runs, results), runs[0]
        rule, _, number = first.strength.partition(":")
        against, name = (first.members, first.strength) if configuration.plot == "members" else (float(number), rule)
        for statistic in (BALANCED, MEAN):
            values = [body["z"]["released"][statistic] for body in found]
            if values:
                lines[f"{first.dataset}, {name}", statistic].append((against, statistics.fmean(values)))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in lines))}
    for (name, statistic), points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        ours = statistic == BALANCED
        label = name if ours else None
        axes.plot(xs, ys, "o-" if ours else "s--", color=colours[name], label=label, alpha=1.0 if ours else 0.6)
    axes.axhline(4, color="grey", linewidth=1)
    axes.set(xlabel="members" if configuration.plot == "members" else "c or ρ", ylabel="z", yscale="symlog")
    if configuration.plot == "members":
        axes.set_xscale("log", base=2)
    if lines:
        axes.legend(fontsize=8)
    axes.set_title("z: solid balanced statistic, dashed mean of the tensors' cosines; grey z = 4", fontsize=9)
    figure.savefig(path)
    return sum(map(len, lines.values()))
