"""The paper's figure of the null: a histogram of z under random keys, and a normality plot."""

from __future__ import annotations

import io
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from quorumark.errors import MissingDependencyError
from quorumark.files import write_shared
from quorumark.verify.calibration import Calibration

__all__ = ["draw"]

_BLUE, _VERMILION = "#0072B2", "#D55E00"  # Okabe and Ito's


def draw(found: Calibration, target: Path) -> None:
    """Writes the figure as SVG; the same z give the same bytes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("quorumark[report]", "the figure of the null") from None
    values = np.sort(found.z.reshape(-1))
    grid = np.linspace(-5, 5, 401)
    normal = NormalDist()
    style: dict[Any, Any] = {"svg.hashsalt": "quorumark", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.6, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.hist(values, bins=np.arange(-5, 5.01, 0.25), density=True, color=_BLUE, alpha=0.5, label="measured")
        left.plot(grid, [normal.pdf(x) for x in grid], color=_VERMILION, label="standard normal")
        left.set(xlabel="z", ylabel="density", title=f"z under {found.z.shape[1]:,} random keys")
        left.legend(frameon=False)
        ideal = [normal.inv_cdf((i + 0.5) / values.size) for i in range(values.size)]
        right.plot([-4, 4], [-4, 4], color=_VERMILION, linewidth=1)
        right.plot(ideal, values, ".", color=_BLUE, markersize=2, rasterized=values.size > 20_000)
        right.set(xlabel="standard normal quantile", ylabel="z", title="normality plot")
        text = f"mean {found.mean:+.3f}\ndeviation {found.deviation:.3f}\nn = {values.size:,}"
        right.text(0.05, 0.95, text, transform=right.transAxes, va="top")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    write_shared(target, buffer.getvalue())
