"""The lab's figures from result files, with matplotlib (needs the extra `report`)."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quorumark.errors import InputError, MissingDependencyError
from quorumark.research.lab.config import Configuration
from quorumark.research.lab.results import BALANCED, CODE, best_evidence, finished, groups

__all__ = ["Point", "digest", "draw", "joined", "points"]


@dataclass(frozen=True)
class Point:
    """z of the runs of one setting, by the project's statistic and by the paper's code; `full` if they are whole.

    Results that are older than the code's statistic have no z by it.
    """

    line: str
    at: float
    ours: float
    papers: float | None
    full: bool
    rounds: int


def points(configuration: Configuration, results: dict[str, dict[str, Any]]) -> list[Point]:
    """What there is to draw against the number of members or the strength."""
    if configuration.plot not in ("members", "strength"):
        raise InputError("configuration", "must be one with a figure: clients or strength", configuration.name)
    found = []
    for runs in groups(configuration):
        bodies, first = best_evidence(runs, results), runs[0]
        if not bodies:
            continue
        rule, _, number = first.strength.partition(":")
        members = configuration.plot == "members"
        at, name = (first.members, first.strength) if members else (float(number), f"{first.dataset}, {rule}")
        ours = statistics.fmean(b["z"]["released"][BALANCED] for b in bodies)
        code = [b["z"]["released"][CODE] for b in bodies if CODE in b["z"]["released"]]
        papers = statistics.fmean(code) if code else None
        found.append(Point(name, at, ours, papers, finished(bodies[0], first), bodies[0]["rounds"]))
    return found


def joined(drawn: list[Point]) -> list[Point]:
    """The points of a line that are drawn as one: those of the length that most of its runs have.

    z may grow with the rounds, and a longer run among shorter ones would look like an effect of what is on the x axis.
    """
    lengths = [point.rounds for point in drawn]
    usual = max(sorted(set(lengths), reverse=True), key=lengths.count, default=0)  # the longer one, if there are two
    return [point for point in drawn if point.rounds == usual]


def digest(found: list[Point]) -> str:
    """Names what a figure shows: it stands in the file, so that an old figure is known for one."""
    return hashlib.sha256(json.dumps([asdict(point) for point in found]).encode()).hexdigest()


def draw(configuration: Configuration, results: dict[str, dict[str, Any]], path: Path) -> int:
    """z as an SVG, solid by our statistic, dashed by the paper's; points are filled where runs are full. How many.

    A line joins runs of one length only; others of it are points beside it.
    """
    found = points(configuration, results)
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        raise MissingDependencyError("quorumark[report]", "drawing figures") from None
    style: dict[Any, Any] = {"svg.hashsalt": configuration.name, "font.size": 9}
    with mpl.rc_context(style):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.subplots()
        lines: dict[str, list[Point]] = defaultdict(list)
        for point in found:
            lines[point.line].append(point)
        for number, (name, drawn) in enumerate(lines.items()):
            drawn.sort(key=lambda point: point.at)
            line, colour = joined(drawn), f"C{number}"
            axes.plot([point.at for point in line], [point.ours for point in line], "-", color=colour, label=name)
            code = [(point.at, point.papers) for point in line if point.papers is not None]
            axes.plot([at for at, _ in code], [z for _, z in code], "--", color=colour, alpha=0.6)
            for point in drawn:
                face = colour if point.full else "white"
                for z, mark in ((point.ours, "o"), (point.papers, "s")):
                    if z is not None:
                        axes.plot([point.at], [z], mark, color=colour, markerfacecolor=face, markersize=5)
        axes.axhline(4, color="grey", linewidth=1)
        zs = [z for point in found for z in (point.ours, point.papers) if z is not None] or [10.0]
        axes.set(ylabel="z", yscale="symlog", ylim=(min(0.0, 1.5 * min(zs)), 2 * max(zs)))
        if configuration.plot == "members":
            axes.set_xscale("log", base=2)
            ticks = sorted({point.at for point in found}) or [1]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xlabel("members")
        else:
            axes.set_xlabel("c or ρ*")
        signs = [
            Line2D([], [], color="black", marker="o", label="balanced statistic"),
            Line2D([], [], color="black", linestyle="--", marker="s", alpha=0.6, label="the paper's code"),
            Line2D([], [], color="black", linestyle="", marker="o", markerfacecolor="white", label="shorter runs"),
            Line2D([], [], color="grey", linewidth=1, label="z = 4"),
        ]
        handles = axes.get_legend_handles_labels()[0] + signs
        figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
        figure.savefig(path, metadata={"Date": None, "Description": digest(found)})
    return sum(1 if point.papers is None else 2 for point in found)
