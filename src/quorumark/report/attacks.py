"""What a suite of attacks found: the table of results, the paper's figures of it, and one page with all of them.

    results.csv     one row for each attacked model; the first six columns are for everybody
    pareto.svg      accuracy against z, with the attacker's frontier for each data budget
    ATTACK.svg      z and accuracy over what was varied, with 95 % intervals over seeds
    index.html      all of it, in one file that needs nothing else

The figures need the extra `report`. Nothing here knows a key.
"""

from __future__ import annotations

import io
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from quorumark.errors import MissingDependencyError, RecordError
from quorumark.home import read_file
from quorumark.keystore import write_shared
from quorumark.outcomes import COLUMNS, ORIGINAL, Row, parsed_rows, table_text

__all__ = ["COLUMNS", "ORIGINAL", "Row", "attacks_page", "figures", "read_rows", "write_report", "write_rows"]

_INK = "#010203"  # becomes the page's own colour of text
_COLOURS = ("#888888", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7")  # Okabe and Ito's
_MARKERS: tuple[Any, ...] = (*"osD^v<>PXphdH8", (4, 1, 45), (3, 0, 30), (6, 1, 0), (3, 1, 0))  # all can be hollow
_DIALS = ("alpha", "fraction", "ratio", "scheme", "strength", "share", "octaves", "noise")
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # two-sided 95 %, 1 to 9 degrees of freedom


# --- results ----------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """All rows at once: whoever is interrupted has the ones before."""
    write_shared(path, table_text(rows).encode())


def read_rows(path: Path) -> list[Row]:
    """The rows of a results.csv."""
    return parsed_rows(read_file(path, "a table of results").decode(), str(path))


def _original(rows: Iterable[Row]) -> Row:
    found = next((row for row in rows if row.attack == ORIGINAL), None)
    if found is None:
        raise RecordError(f"the results lack the model as it was released (attack {ORIGINAL!r}): run the suite again")
    return found


# --- figures ----------------------------------------------------------------------------------------------


def figures(rows: Sequence[Row], threshold: float) -> dict[str, str]:
    """SVG by name: `pareto` first, one for each attack with something to vary, and `fixed` for all others."""
    original = _original(rows)
    attacked = [row for row in rows if row.attack != ORIGINAL]
    found = {"pareto": _drawn("pareto", (8.6, 4.8), lambda f: _pareto(f, original, attacked, threshold))}
    fixed: list[Row] = []
    last = [row for row in attacked if "epoch" not in row.settings]  # others are on the way: the frontiers have them
    for name in dict.fromkeys(row.attack for row in last):
        mine = [row for row in last if row.attack == name]
        dial = _dial(mine)
        if dial is None:
            fixed += mine
            continue
        file = re.sub(r"[^a-z0-9-]+", "-", name.lower())

        def draw(figure: Any, mine: list[Row] = mine, dial: str = dial) -> None:
            _over(figure, mine, dial, original, threshold)

        found[file] = _drawn(file, (8.6, 3.4), draw)
    if fixed:
        kinds = len({(row.attack, row.budget) for row in fixed})
        found["fixed"] = _drawn("fixed", (8.6, 1.3 + 0.32 * kinds), lambda f: _fixed(f, fixed, original, threshold))
    return found


def _drawn(name: str, size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    """A figure as SVG that takes the page's colour of text; the same rows give the same bytes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("quorumark[report]", "drawing the attacks' figures") from None
    style: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    )
    style |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "axes.facecolor": "none"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'<g id="[^"]*"', "<g", text)  # several figures share a page, and ids must not


def _pareto(figure: Any, original: Row, rows: Sequence[Row], threshold: float) -> None:
    axes = figure.subplots()
    tested = [row for row in rows if row.best is not None]
    budgets = sorted({row.fraction for row in tested})
    colours = {budget: _COLOURS[i % len(_COLOURS)] for i, budget in enumerate(budgets)}
    names = list(dict.fromkeys(row.attack for row in tested))
    markers = {name: _MARKERS[i % len(_MARKERS)] for i, name in enumerate(names)}
    for row in tested:
        colour = colours[row.fraction]
        axes.plot(
            row.best, 100 * row.accuracy, marker=markers[row.attack], color=colour, markersize=5, linestyle="none",
            markerfacecolor="none" if row.surplus else colour,
        )  # fmt: skip
    for budget in budgets:
        line = _frontier([row for row in tested if row.fraction == budget])
        if len(line) > 1:
            axes.step(*zip(*line, strict=True), where="post", color=colours[budget], linewidth=1.2)
    axes.axvline(threshold, color=_INK, linestyle="--", linewidth=1)
    axes.plot(original.best, 100 * original.accuracy, "*", color="#D55E00", markersize=15, markeredgecolor=_INK)
    axes.set(xlabel="z, the larger of aligned and unaligned", ylabel="accuracy in %")

    def key(colour: str, label: str, **more: Any) -> Any:
        return axes.plot([], [], color=colour, label=label, **more)[0]

    handles = [key("#D55E00", "the original", marker="*", markersize=11, markeredgecolor=_INK, linestyle="none")]
    handles.append(key(_INK, f"threshold z* = {threshold:g}", linestyle="--"))
    handles += [key(colours[b], f"{100 * b:g} % of the data" if b else "no data") for b in budgets]
    handles += [key(_INK, n, marker=markers[n], markersize=5, linestyle="none") for n in names]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=7.5, labelcolor=_INK)


def _frontier(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """What an attacker cannot better: no other model has less z and more accuracy. By rising z."""
    found: list[tuple[float, float]] = []
    best = -1.0
    for row in sorted(rows, key=lambda row: (row.best or 0.0, -row.accuracy)):
        if row.accuracy > best:
            best = row.accuracy
            found.append((row.best or 0.0, 100 * row.accuracy))
    return found


def _dial(rows: Sequence[Row]) -> str | None:
    """The setting that a figure goes over: the one with the most values, None if there is nothing to vary."""
    values: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for name, value in row.settings.items():
            values[name].add(str(value))
    varied = [name for name in _DIALS if len(values[name]) > 1]
    return max(varied, key=lambda name: len(values[name]), default=None)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds, and half the width of its 95 % interval by Student's t; 0 for one seed."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, 0.0
    factor = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 1.96
    return mean, factor * statistics.stdev(values) / count**0.5


def _over(figure: Any, rows: Sequence[Row], dial: str, original: Row, threshold: float) -> None:
    left, right = figure.subplots(1, 2)
    lines: dict[str, list[Row]] = defaultdict(list)
    varied = [k for k in {k for row in rows for k in row.settings} if k != dial]
    varied = sorted(k for k in varied if len({str(row.settings.get(k)) for row in rows}) > 1)
    for row in rows:
        lines[", ".join(f"{name} {row.settings.get(name)}" for name in varied)].append(row)
    texts = any(isinstance(row.settings[dial], str) for row in rows)
    places = sorted({row.settings[dial] for row in rows}) if not texts else list(dict.fromkeys(
        str(row.settings[dial]) for row in rows
    ))  # fmt: skip
    for number, (label, mine) in enumerate(lines.items()):
        colour = _COLOURS[(2 * number + 2) % len(_COLOURS)]
        for axes, name, style, what in (
            (left, "z_aligned", "o-", "aligned"),
            (left, "z", "s:", "as it is"),
            (right, "accuracy", "o-", ""),
        ):
            points = []
            for place in places:
                here = [getattr(row, name) for row in mine if row.settings[dial] == place]
                here = [100 * v if name == "accuracy" else v for v in here if v is not None]
                if here:
                    points.append((places.index(place) if texts else place, *_interval(here)))
            if points:
                shown = ", ".join(part for part in (label, what) if part)
                axes.errorbar(
                    *zip(*points, strict=True), fmt=style, color=colour, capsize=3, markersize=4, label=shown or None,
                    linewidth=1.2,
                )  # fmt: skip
    left.axhline(threshold, color=_INK, linestyle="--", linewidth=1)
    left.axhline(original.best, color="#D55E00", linewidth=0.8)
    right.axhline(100 * original.accuracy, color="#D55E00", linewidth=0.8)
    if dial == "fraction" and not texts:
        for axes in (left, right):
            axes.set_xscale("log")
            axes.minorticks_off()
    for axes in (left, right):
        axes.set_xticks(range(len(places)) if texts else places, [f"{place}" for place in places])
    left.set(xlabel=dial, ylabel="z")
    right.set(xlabel=dial, ylabel="accuracy in %")
    low, high = right.get_ylim()
    if high - low < 10:  # a point more or less is not a cliff
        low, high = (low + high) / 2 - 5, (low + high) / 2 + 5
    right.set_ylim(low, min(high, 101))
    if len(lines) > 1 or any(row.z is not None for row in rows):
        left.legend(frameon=False, fontsize=7, labelcolor=_INK)


def _fixed(figure: Any, rows: Sequence[Row], original: Row, threshold: float) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    kinds = list(dict.fromkeys((row.attack, row.budget) for row in rows))
    labels = dict.fromkeys(attack for attack, _ in kinds)
    for place, (attack, budget) in enumerate(kinds):
        mine = [row for row in rows if (row.attack, row.budget) == (attack, budget)]
        for axes, name, marker in ((left, "z_aligned", "o"), (left, "z", "x"), (right, "accuracy", "o")):
            values = [getattr(row, name) for row in mine]
            values = [100 * v if name == "accuracy" else v for v in values if v is not None]
            if values:
                mean, half = _interval(values)
                axes.errorbar(mean, -place, xerr=half, fmt=marker, color="#0072B2", capsize=3, markersize=5)
    left.plot([], [], "o", color="#0072B2", label="aligned")
    left.plot([], [], "x", color="#0072B2", label="as it is")
    left.axvline(threshold, color=_INK, linestyle="--", linewidth=1, label="z*")
    left.axvline(original.best, color="#D55E00", linewidth=0.8, label="the original")
    right.axvline(100 * original.accuracy, color="#D55E00", linewidth=0.8)
    left.set_yticks([-i for i in range(len(kinds))], [_wrapped(attack) for attack, _ in kinds])
    left.set(xlabel="z", ylim=(-len(kinds) + 0.4, 0.6))
    right.set(xlabel="accuracy in %")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=7.5, labelcolor=_INK)
    if len(labels) < len(kinds):
        left.tick_params(axis="y", labelsize=8)


def _wrapped(name: str) -> str:
    """A chain's name in lines of two attacks."""
    parts = name.split(" + ")
    return "\n+ ".join(" + ".join(parts[i : i + 2]) for i in range(0, len(parts), 2))


# --- the page ---------------------------------------------------------------------------------------------


def attacks_page(title: str, rows: Sequence[Row], threshold: float) -> str:
    """All figures and the table as one HTML page."""
    from quorumark.report import _environment

    original = _original(rows)
    drawn = figures(rows, threshold)
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.attack, json.dumps(dict(row.settings), sort_keys=True)].append(row)
    table = [_summary(mine, threshold) for mine in groups.values()]
    kept = [row for row in rows if row.attack != ORIGINAL and row.accuracy >= original.accuracy - 0.02]
    below = [row for row in kept if row.best is not None and row.best < threshold]
    return (
        _environment()
        .get_template("attacks.html")
        .render(
            title=title,
            original=original,
            threshold=f"{threshold:g}",
            pareto=drawn.pop("pareto"),
            fixed=drawn.pop("fixed", None),
            drawn=drawn,
            table=table,
            attacked=len(rows) - 1,
            kept=len(kept),
            below=sorted({row.attack for row in below if not row.surplus}),
            hidden=sorted({row.attack for row in below if row.surplus}),
        )
    )


def _summary(rows: Sequence[Row], threshold: float) -> dict[str, str]:
    def shown(values: list[float | None], form: str = "{:.1f}", factor: float = 1.0) -> str:
        there = [factor * v for v in values if v is not None]
        return form.format(statistics.fmean(there)).replace("-", "−") if there else "–"

    best = [row.best for row in rows if row.best is not None]
    found = bool(best) and min(best) >= threshold
    verdict = "found" if found else "not found" if not any(row.surplus for row in rows) else "inconclusive: decoys?"
    return {
        "attack": "as released" if rows[0].attack == ORIGINAL else rows[0].attack,
        "budget": rows[0].budget,
        "seeds": str(len(rows)),
        "accuracy": shown([row.accuracy for row in rows], "{:.1f} %", 100),
        "z": shown([row.z for row in rows]),
        "z_aligned": shown([row.z_aligned for row in rows]),
        "verdict": verdict,
    }


def write_report(folder: Path, title: str, rows: Sequence[Row], threshold: float) -> list[Path]:
    """Writes every figure as a file of its own, and index.html; says which files."""
    written = []
    for name, svg in figures(rows, threshold).items():
        path = folder / f"{name}.svg"
        write_shared(path, ('<?xml version="1.0" encoding="utf-8"?>\n' + svg).encode())
        written.append(path)
    page = folder / "index.html"
    write_shared(page, attacks_page(title, rows, threshold).encode())
    return [page, *written]
