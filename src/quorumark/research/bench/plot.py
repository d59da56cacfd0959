"""`quorumark bench plot`: the paper's figure of the setup's overhead, drawn from the committed rows alone."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from quorumark.errors import InputError, MissingDependencyError
from quorumark.files import write_shared

_NEEDED = {"role", "members", "size", "seconds", "communication_seconds", "paper_seconds", "paper_best_seconds"}
# Okabe and Ito's palette, which colour-blind readers tell apart; line and marker differ as well
_VERMILION, _BLUE, _GREEN = "#D55E00", "#0072B2", "#009E73"


def draw(dkg: Path, dealer: Path, target: Path) -> None:
    """Writes the figure as SVG; the same rows give the same bytes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("quorumark[report]", "the figure of the setup's overhead") from None
    free, dealt = _rows(dkg), _rows(dealer)
    owner = [row for row in dealt if row["role"] == "dealer"]
    taker = [row for row in dealt if row["role"] == "member"]
    size = max(row["size"] for row in [*free, *dealt])
    lines: list[tuple[str, list[dict[str, Any]], str, dict[str, str]]] = [
        ("the paper's, per member", free, "paper_", {"color": _VERMILION, "marker": "s", "linestyle": "-"}),
        ("dealer-free, per member", free, "", {"color": _BLUE, "marker": "o", "linestyle": "-"}),
        ("with a dealer: the dealer", owner, "", {"color": _GREEN, "marker": "^", "linestyle": "--"}),
        ("with a dealer, per member", taker, "", {"color": _GREEN, "marker": "v", "linestyle": ":"}),
    ]
    style: dict[Any, Any] = {"svg.hashsalt": "quorumark", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.6, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, title, key in (
            (left, "Computation, one thread", "seconds"),
            (right, "Communication at 1 Gbit/s", "communication_seconds"),
        ):
            for label, rows, prefix, look in lines:
                at = [row["members"] for row in rows]
                # per element: a row that was measured on fewer elements stands for the full vector
                values = [row[prefix + key] * size / row["size"] for row in rows]
                axes.plot(at, values, label=label, linewidth=1.6, markersize=4.5, **look)
            if key == "seconds":
                at = [row["members"] for row in free]
                low, high = ([row[f"paper_{s}seconds"] * size / row["size"] for row in free] for s in ("best_", ""))
                label = "… down to its best case, all in a cache"
                axes.fill_between(at, low, high, color=_VERMILION, alpha=0.15, linewidth=0, label=label)
            ticks = sorted({row["members"] for row in free})
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(ticks, [str(k) for k in ticks])
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("members K, threshold K/2")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        left.set_ylabel(f"seconds, {size / 1e6:.1f}M coordinates")
        handles, labels = left.get_legend_handles_labels()
        order = [0, len(labels) - 1, *range(1, len(labels) - 1)]  # the band belongs to the first line
        left.legend(
            [handles[i] for i in order], [labels[i] for i in order], frameon=False, loc="upper left", fontsize=8
        )
        buffer = io.BytesIO()
        # neither a date nor a version: the file changes only when the rows do
        about = {"Date": None, "Creator": None, "Description": digest(free, dealt)}
        figure.savefig(buffer, format="svg", metadata=about)
    write_shared(target, buffer.getvalue())


def digest(*rows: list[dict[str, Any]]) -> str:
    """Names what is drawn: it stands in the figure, so that an old one is known for one."""
    drawn = [[{name: row[name] for name in sorted(_NEEDED)} for row in group] for group in rows]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            "--results", "must be a folder with the rows of the benchmarks dkg and dealer", error
        ) from None
    if not rows or not all(row.keys() >= _NEEDED for row in rows):
        raise InputError("--results", "must hold rows of the present shape: run the benchmark again", path.name)
    return sorted(rows, key=lambda row: row["members"])
