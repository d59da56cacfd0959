"""What a suite of attacks found: the table of results, the paper's figures of it, and one page with all of them.

    results.csv     one row for each attacked model; the first six columns are for everybody
    pareto.svg      accuracy against z, with the attacker's frontier for each data budget
    ATTACK.svg      z and accuracy over what was varied, with 95 % intervals over seeds
    index.html      all of it, in one file that needs nothing else

The figures need the extra `report`. Nothing here knows a key.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from quorumark.consortium.home import read_file
from quorumark.errors import MissingDependencyError, RecordError
from quorumark.files import write_shared
from quorumark.research.rows import COLUMNS, LEAST_LOG10, ORIGINAL, Row, parsed_rows, table_text

__all__ = [
    "COLUMNS",
    "ORIGINAL",
    "Row",
    "attacks_page",
    "figures",
    "read_rows",
    "rows_digest",
    "standalone",
    "write_report",
    "write_rows",
]

_INK = "#010203"  # becomes the page's own colour of text
_RELEASED, _NO_DATA = "#D55E00", "#888888"
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")  # Okabe and Ito's, but the released model's
_DIALS = ("alpha", "fraction", "ratio", "scheme", "strength", "share", "octaves", "noise")
_NAMES = {"alpha": "α", "fraction": "share of the data"}
_LINES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ("--", "v"), (":", "P"), ("-.", "X"))
_USUAL = {"lr": 0.001}  # what rows that do not name it have: the paper's
_CHAIN, _OTHER = "chain of attacks", "other"
_KINDS: dict[str, tuple[str, ...]] = {  # by the Pareto plot's markers: few, so that eyes can tell them apart
    "o": ("fine-tuning",),
    "s": ("adaptive-fine-tuning", "adaptive-by-part", "removal"),
    "D": ("distillation",),
    "^": ("pruning", "structured-pruning", "channel-removal"),
    "v": ("quantisation", "noise", "overwriting", "averaging", "merging"),
    "X": ("permutation", "rescaling", "signs", "rotation", "residual-rotation", "padding", "splitting", "decoys"),
    "P": (_CHAIN,),
    "<": (_OTHER,),
}
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # two-sided 95 %, 1 to 9 degrees of freedom


# --- results ----------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """All rows at once: an interrupted run has the ones before."""
    write_shared(path, table_text(rows).encode())


def read_rows(path: Path) -> list[Row]:
    """The rows of a results.csv."""
    try:
        return parsed_rows(read_file(path, "a table of results").decode(), str(path))
    except UnicodeDecodeError:
        raise RecordError(f"{str(path)!r} is not text: remove it, and run again") from None


def _original(rows: Iterable[Row]) -> Row:
    found = next((row for row in rows if row.attack == ORIGINAL), None)
    if found is None:
        raise RecordError(f"the results lack the model as it was released (attack {ORIGINAL!r}): run the suite again")
    return found


# --- figures ----------------------------------------------------------------------------------------------


def figures(rows: Sequence[Row], threshold: float) -> dict[str, str]:
    """SVG by name: `pareto` first, `price` if Q by layers is there, one for each attack with something to vary, and
    `fixed` for all others.

    They are for a page, whose colour of text they take; `standalone` makes files of them.
    """
    original = _original(rows)
    attacked = [row for row in rows if row.attack != ORIGINAL]
    layered = any(row.log10_q is not None for row in attacked)
    size = (11.5 if layered else 8.6, 4.8)
    found = {"pareto": _drawn("pareto", size, lambda f: _pareto(f, original, attacked, threshold))}
    if any(row.q is not None for row in attacked):
        found["price"] = _drawn("price", (8.6, 4.8), lambda f: _price(f, original, attacked))
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

        found[file] = _drawn(file, (8.6, 3.0), draw)
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
        figure = Figure(figsize=size)
        figure.set_layout_engine("constrained", w_pad=0.07, h_pad=0.07)
        draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'<g id="[^"]*"', "<g", text)  # several figures share a page, and ids must not


def rows_digest(rows: Sequence[Row], threshold: float) -> str:
    """Names the rows and the threshold that figures were drawn from: an old figure is known for one."""
    return hashlib.sha256(f"{threshold:g}\n{table_text(rows)}".encode()).hexdigest()


def standalone(svg: str, digest: str) -> str:
    """A figure as a file of its own: on white, since the page that shows it may be dark. `digest` stands in it."""
    head = f'<?xml version="1.0" encoding="utf-8"?>\n<!-- drawn from {digest} -->\n'
    return head + svg.replace("<svg ", '<svg style="background: #fff" ', 1)


def _colours(count: int) -> Sequence[str]:
    """So many colours, no two alike: Okabe and Ito's, and if they do not suffice, steps of cividis."""
    if count <= len(_COLOURS):
        return _COLOURS[:count]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["cividis"](i / (count - 1))) for i in range(count)]


def _key(label: str, **style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style)


def _legend(figure: Any, groups: dict[str, list[Any]]) -> None:
    """Beside the panels, where no data are: each group below its heading."""
    keys: list[Any] = []
    for heading, members in groups.items():
        keys += [_key(text, linestyle="none") for text in ([" ", heading] if keys else [heading])] + members
    if keys:
        legend = figure.legend(handles=keys, loc="outside right upper", frameon=False, fontsize=8, labelcolor=_INK)
        for text in legend.get_texts():
            if text.get_text() in groups:
                text.set_fontweight("bold")


def _of_data(fraction: float) -> str:
    return f"{100 * fraction:g} % of the data" if fraction else "no data"


def _kind(attack: str) -> tuple[str, str]:
    """The marker, and the name that the legend has."""
    name = _CHAIN if " + " in attack else attack
    return next(((marker, name) for marker, names in _KINDS.items() if name in names), ("<", _OTHER))


def _by_layers(row: Row) -> float | None:
    """−log10 of the bound for Q by layers, where it was measured."""
    return None if row.log10_q is None else -row.log10_q


def _pareto(figure: Any, original: Row, rows: Sequence[Row], threshold: float) -> None:
    """Accuracy against z, and beside it against Q by layers, if it is there."""
    tested = [row for row in rows if row.best is not None]
    budgets = sorted({row.fraction for row in tested})
    colours = dict(zip((b for b in budgets if b), _colours(sum(map(bool, budgets))), strict=True)) | {0.0: _NO_DATA}
    widths = {budget: max(1.5, 3 - 0.4 * i) for i, budget in enumerate(reversed(budgets))}
    layered = any(row.log10_q is not None for row in tested)
    panels = figure.subplots(1, 2, sharey=True) if layered else [figure.subplots()]
    _panel(panels[0], original, tested, lambda row: row.best, colours, widths)
    panels[0].axvline(threshold, color=_INK, linestyle="--", linewidth=1)
    top = {"ha": "center", "va": "bottom"}
    panels[0].text(threshold, 1.01, f"z* = {threshold:g}", transform=panels[0].get_xaxis_transform(), **top)
    panels[0].set(xlabel="z, the larger of aligned and unaligned", ylabel="accuracy in %")
    if layered:
        _panel(panels[1], original, tested, _by_layers, colours, widths)
        panels[1].axvline(-LEAST_LOG10, color=_INK, linestyle="--", linewidth=1)
        panels[1].text(-LEAST_LOG10, 1.01, "PASSED by layers", transform=panels[1].get_xaxis_transform(), **top)
        panels[1].set_xscale("symlog", linthresh=10)
        panels[1].set(xlabel="Q by layers: −log10 of its bound", xlim=(-0.5, None))
    frontiers = [_key(_of_data(b), color=colours[b], linewidth=widths[b]) for b in budgets]
    kinds: dict[str, dict[str, None]] = defaultdict(dict)
    for row in tested:
        marker, name = _kind(row.attack)
        kinds[marker][name] = None
    dot = {"color": _INK, "linestyle": "none", "markersize": 5}
    keys = [_key(textwrap.fill(", ".join(kinds[m]), 30), marker=m, **dot) for m in _KINDS if m in kinds]
    if any("epoch" in row.settings for row in tested):
        keys.append(_key("small: after fewer epochs", marker="o", **dot | {"markersize": 3}))
    if any(row.surplus for row in tested):
        keys.append(_key("hollow: channels left over", marker="o", markerfacecolor="none", **dot))
    _legend(figure, {"frontier with": frontiers, "attack": [_key("none, as released", markersize=10, **_STAR), *keys]})


_STAR = {"marker": "*", "color": _RELEASED, "markeredgecolor": _INK, "markeredgewidth": 0.8, "linestyle": "none"}


def _panel(
    axes: Any, original: Row, tested: Sequence[Row], place: Callable[[Row], float | None],
    colours: dict[float, str], widths: dict[float, float],
) -> None:  # fmt: skip
    """All models, by accuracy and what `place` says of them, with the frontier for each share of the data."""
    tested = [row for row in tested if place(row) is not None]
    points: dict[tuple[bool, str, str, bool], list[Row]] = defaultdict(list)
    for row in tested:
        points["epoch" not in row.settings, _kind(row.attack)[0], colours[row.fraction], row.surplus > 0].append(row)
    for (last, marker, colour, hollow), mine in points.items():
        axes.plot(
            [place(row) for row in mine], [100 * row.accuracy for row in mine], marker, color=colour,
            markersize=5 if last else 3, alpha=0.7 if last else 0.4, markeredgewidth=0.8 if hollow else 0,
            markerfacecolor="none" if hollow else colour,
        )  # fmt: skip
    for budget in widths:  # the widest first: what lies below another is seen
        line = _frontier([row for row in tested if row.fraction == budget], place)
        if line:
            axes.step(*zip(*line, strict=True), where="post", color=colours[budget], linewidth=widths[budget])
    if place(original) is not None:
        axes.plot(place(original), 100 * original.accuracy, markersize=14, zorder=5, clip_on=False, **_STAR)


def _group(row: Row) -> str:
    """Who attacks, for the figure of what removal costs."""
    if row.attack == "removal":
        return "estimate taken out, an oracle's amounts" if row.settings.get("amounts") == "oracle" else _KNOWING
    if row.attack == "adaptive-by-part":
        return _KNOWING
    return {"distillation": "distillation", "fine-tuning": "fine-tuning", "adaptive-fine-tuning": "adaptive"}.get(
        row.attack, "without training, chains"
    )


_KNOWING = "adaptive, know the test by layers"
_GROUPS = {  # marker, colour
    "fine-tuning": ("o", "#E69F00"),
    "adaptive": ("s", "#0072B2"),
    _KNOWING: ("D", "#009E73"),
    "estimate taken out, an oracle's amounts": ("X", "#CC79A7"),
    "distillation": ("v", _INK),
    "without training, chains": ("^", "#888888"),
}


def _price(figure: Any, original: Row, rows: Sequence[Row]) -> None:
    """Accuracy against evidence, by z or by Q, whichever is more: what it costs to escape both."""
    axes = figure.subplots()
    tested = [row for row in rows if row.evidence is not None]
    drawn = [name for name in _GROUPS if any(_group(row) == name for row in tested)]
    for name in drawn:
        marker, colour = _GROUPS[name]
        for last in (False, True):
            mine = [row for row in tested if _group(row) == name and ("epoch" not in row.settings) == last]
            axes.plot(
                [row.evidence for row in mine], [100 * row.accuracy for row in mine], marker,
                color=colour, markersize=5.5 if last else 3,
                alpha=0.8 if last else 0.35, markeredgewidth=0,
            )  # fmt: skip
    passed = -LEAST_LOG10
    escaped = [row.accuracy for row in tested if (row.evidence or 0.0) < passed and row.attack != "distillation"]
    axes.axvline(passed, color=_INK, linestyle="--", linewidth=1)
    axes.text(passed, 1.01, "PASSED from here", transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.axhline(100 * original.accuracy, color=_RELEASED, linewidth=1)
    tuned = [
        r.accuracy for r in rows if r.attack == "fine-tuning" and "epoch" not in r.settings and "lr" not in r.settings
    ]
    lines = [(100 * original.accuracy, "as released")]
    lines += [(100 * max(tuned), "fine-tuned")] if tuned else []
    lines += [(100 * max(escaped), "best that escapes")] if escaped else []
    shift = 0.0
    for y, text in sorted(lines, reverse=True):
        axes.axhline(y, color=_RELEASED if text == "as released" else _INK, linewidth=0.8, linestyle=":")
        axes.text(1.01, y - shift, f"{y:.1f} %, {text}", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        shift = 2.2 if text.startswith("fine") else 0.0  # beside each other they could not be read
    axes.set_xscale("symlog", linthresh=10)
    axes.set(xlabel="−log10 of the bound, by z or by Q, whichever is more", ylabel="accuracy in %", xlim=(-0.5, None))
    dot = {"linestyle": "none", "markersize": 5.5, "markeredgewidth": 0}
    keys = [
        _key(textwrap.fill(name, 30), marker=_GROUPS[name][0], color=_GROUPS[name][1], **dot)
        for name in drawn
    ]  # fmt: skip
    if any("epoch" in row.settings for row in tested):
        keys.append(_key("small: after fewer epochs", marker="o", color=_INK, linestyle="none", markersize=3))
    _legend(figure, {"attack": keys})


def _frontier(rows: Sequence[Row], place: Callable[[Row], float | None]) -> list[tuple[float, float]]:
    """What an attacker cannot better: no other model has less evidence and more accuracy. By rising evidence."""
    found: list[tuple[float, float]] = []
    best = -1.0
    for row in sorted(rows, key=lambda row: (place(row) or 0.0, -row.accuracy)):
        if row.accuracy > best:
            best = row.accuracy
            found.append((place(row) or 0.0, 100 * row.accuracy))
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
    """z and accuracy over the dial: a panel for each share of the data, a colour for each of the other settings, a
    dash for each coalition.
    """
    shares = [] if dial == "fraction" else sorted({row.fraction for row in rows})
    if len(shares) > 1:
        figure.set_size_inches(max(8.6, 2 + 1.6 * len(shares)), 4.6)
        above, below = figure.subplots(2, len(shares), sharex=True, sharey="row")
        panels = [[row for row in rows if row.fraction == share] for share in shares]
        for axes, share in zip(above, shares, strict=True):
            axes.set_title(_of_data(share), fontsize=9)
    else:
        above, below = figure.subplots(1, 2, squeeze=False).T
        panels = [list(rows)]
    names = {name for row in rows for name in row.settings} - {dial, "fraction", "coalition"}
    varied = sorted(name for name in names if len({str(row.settings.get(name)) for row in rows}) > 1)

    def hue(row: Row) -> str:
        return ", ".join(str(row.settings.get(name, _USUAL.get(name, "–"))) for name in varied)

    def coalition(row: Row) -> int:
        return int(row.settings.get("coalition") or 0)

    hues = list(dict.fromkeys(map(hue, rows)))
    colours = dict(zip(hues, _colours(len(hues)), strict=True))
    sizes = sorted(set(map(coalition, rows)))
    lines = {size: _LINES[i % len(_LINES)] for i, size in enumerate(sizes)}
    places = list(dict.fromkeys(row.settings[dial] for row in rows))
    texts = any(isinstance(place, str) for place in places)
    places = places if texts else sorted(places)
    zs = _told_apart(rows)
    for upper, lower, mine in zip(above, below, panels, strict=True):
        for label, size in ((label, size) for label in hues for size in sizes):
            curve = [row for row in mine if hue(row) == label and coalition(row) == size]
            for axes, name, hollow in (*((upper, z, z != zs[0]) for z in zs), (lower, "accuracy", False)):
                points = []
                for number, place in enumerate(places):
                    here = [getattr(row, name) for row in curve if row.settings[dial] == place]
                    here = [100 * v if name == "accuracy" else v for v in here if v is not None]
                    if here:
                        points.append((number if texts else place, *_interval(here)))
                _curve(axes, points, colours[label], "none" if texts else lines[size][0], lines[size][1], hollow)
    _frame(above, below, original, threshold)
    for axes in (*above, *below):
        if dial == "fraction" and not texts:
            axes.set_xscale("log")
            axes.minorticks_off()
        shown = [f"{100 * place:g} %" if dial == "fraction" and not texts else f"{place}" for place in places]
        leaning = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if texts else {}
        axes.set_xticks(range(len(places)) if texts else places, shown, **leaning)
    for axes in below if len(shares) > 1 else (*above, *below):
        axes.set_xlabel(_NAMES.get(dial, dial))
    above[0].set_ylabel("z, aligned" if all(row.z is None for row in rows) else "z")
    below[0].set_ylabel("accuracy in %")
    dot = {"color": _INK, "linewidth": 1.3, "markersize": 4}
    groups: dict[str, list[Any]] = {}
    if varied:
        groups[", ".join(varied)] = [_key(h, color=colour, linewidth=2) for h, colour in colours.items()]
    if len(sizes) > 1:
        groups["who"] = [
            _key(f"{size} members" if size else "anybody", linestyle=lines[size][0], marker=lines[size][1], **dot)
            for size in sizes
        ]
    if len(zs) > 1:
        groups["z"] = [
            _key("aligned", marker="o", linestyle="none", **dot),
            _key("as it is", marker="o", linestyle="none", markerfacecolor="none", **dot),
        ]
    _legend(figure, groups)


def _told_apart(rows: Sequence[Row]) -> list[str]:
    """Which z there are to draw; if both are the same in every row, to the digit that tables show, only one."""
    found = [name for name in ("z_aligned", "z") if any(getattr(row, name) is not None for row in rows)]
    same = all(
        (row.z is None) == (row.z_aligned is None) and abs((row.z or 0.0) - (row.z_aligned or 0.0)) < 0.05
        for row in rows
    )
    return found[:1] if same else found


def _curve(
    axes: Any, points: list[tuple[float, float, float]], colour: str, dash: str, marker: str, hollow: bool
) -> None:
    """Means with their intervals, where there is more than one seed; hollow ones lie below the others."""
    if points:
        axes.plot(
            [x for x, _, _ in points], [y for _, y, _ in points], linestyle=dash, marker=marker, color=colour,
            markersize=4, linewidth=0.7 if hollow else 1.3, markerfacecolor="none" if hollow else colour,
            zorder=2 if hollow else 3,
        )  # fmt: skip
    for x, y, half in points:
        if half:
            axes.errorbar(x, y, half, fmt="none", ecolor=colour, capsize=3, linewidth=1)


def _frame(above: Any, below: Any, original: Row, threshold: float) -> None:
    """The released model and the threshold, named at the right of the panels; accuracies with room around."""
    for upper, lower in zip(above, below, strict=True):
        upper.axhline(threshold, color=_INK, linestyle="--", linewidth=1)
        upper.axhline(original.best, color=_RELEASED, linewidth=1)
        lower.axhline(100 * original.accuracy, color=_RELEASED, linewidth=1)
    for axes, y, text in (
        (above[-1], threshold, f"z* = {threshold:g}"),
        (above[-1], original.best, "released"),
        (below[-1], 100 * original.accuracy, "released"),
    ):
        axes.text(1.02, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    low, high = above[0].get_ylim()
    above[0].set_ylim(min(low, -0.05 * high), high)  # with 0, where nothing is left
    low, high = below[0].get_ylim()
    if high - low < 10:  # a point more or less is not a cliff
        low, high = (low + high) / 2 - 5, (low + high) / 2 + 5
    below[0].set_ylim(low, min(high, 100.9))  # there is no 101 %


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
                axes.errorbar(mean, -place, xerr=half or None, fmt=marker, color=_COLOURS[0], capsize=3, markersize=5)
    left.plot([], [], "o", color=_COLOURS[0], label="aligned")
    left.plot([], [], "x", color=_COLOURS[0], label="as it is")
    left.axvline(threshold, color=_INK, linestyle="--", linewidth=1, label=f"z* = {threshold:g}")
    left.axvline(original.best, color=_RELEASED, linewidth=0.8, label="as released")
    right.axvline(100 * original.accuracy, color=_RELEASED, linewidth=0.8)
    left.set_yticks([-i for i in range(len(kinds))], [_wrapped(attack) for attack, _ in kinds])
    left.set(xlabel="z", ylim=(-len(kinds) + 0.4, 0.6))
    right.set(xlabel="accuracy in %")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8, labelcolor=_INK)
    if len(labels) < len(kinds):
        left.tick_params(axis="y", labelsize=8)


def _wrapped(name: str) -> str:
    """A chain's name in lines of two attacks."""
    parts = name.split(" + ")
    return "\n+ ".join(" + ".join(parts[i : i + 2]) for i in range(0, len(parts), 2))


# --- the page ---------------------------------------------------------------------------------------------


def attacks_page(title: str, rows: Sequence[Row], threshold: float) -> str:
    """All figures and the table as one HTML page."""
    from quorumark.report import environment

    original = _original(rows)
    drawn = figures(rows, threshold)
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.attack, json.dumps(dict(row.settings), sort_keys=True)].append(row)
    table = [_summary(mine, threshold) for mine in groups.values()]
    kept = [row for row in rows if row.attack != ORIGINAL and row.accuracy >= original.accuracy - 0.02]
    below = [row for row in kept if row.best is not None and row.best < threshold]
    return (
        environment()
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
    written, digest = [], rows_digest(rows, threshold)
    for name, svg in figures(rows, threshold).items():
        path = folder / f"{name}.svg"
        write_shared(path, standalone(svg, digest).encode())
        written.append(path)
    page = folder / "index.html"
    write_shared(page, attacks_page(title, rows, threshold).encode())
    return [page, *written]
