"""One picture of all methods: accuracy against log10 p for every attack, with matplotlib (needs the extra `report`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quorumark.errors import MissingDependencyError
from quorumark.research.lab.rivals import chance
from quorumark.research.lab.rivals.table import ATTACKS, FULL_RATE, PAPERS_RATE, SHOWN, best_p, rate_of

__all__ = ["Dot", "digest", "dots", "draw"]

_LOOKS = {"none": ("no attack", "*"), "fine-tuning 20 %": ("fine-tuning on 20 %", "o"),
          "fine-tuning 20 %, a tenth of the rate": ("fine-tuning, a tenth of the rate", "s"),
          "adaptive fine-tuning": ("adaptive, a tenth of the rate", "X"),
          FULL_RATE: ("adaptive, the full rate", "P"), "pruning 50 %": ("pruning 50 %", "^"),
          "4 bits": ("4 bits", "v"), "permutation and rescaling": ("permutation and rescaling", "D")}  # fmt: skip
_CLAIMS = {"FedIPR": "FedIPR, all members together", "FedTracker": "FedTracker, triggers or fingerprint"}
_COLOURS = ("#0b6e4f", "#d1495b", "#edae49", "#00798c", "#6a4c93")


@dataclass(frozen=True)
class Dot:
    """A method's model after an attack; p of the strongest claim that its detector supports."""

    method: str
    attack: str
    accuracy: float
    log10_p: float


def dots(bodies: Mapping[str, Mapping[str, Any]]) -> list[Dot]:
    """Of all attacked runs, but those at a rate that does not reach what the method's paper does."""
    found = []
    for (method, rate), name in SHOWN.items():
        for body in bodies.values():
            if (body["method"], rate_of(body)) == (method, rate) and rate != PAPERS_RATE and "attacks" in body:
                name = _CLAIMS.get(name, name)
                found.append(Dot(name, "none", body["accuracy"]["released"], best_p(body["detection"])))
                rows = {row["attack"]: row for row in body["attacks"]}
                found += [Dot(name, a, rows[a]["accuracy"], best_p(rows[a])) for a in ATTACKS if a in rows]
    return found


def digest(found: list[Dot]) -> str:
    """Names what a picture shows: it stands in the file, so that an old picture is known for one."""
    return hashlib.sha256(json.dumps([asdict(dot) for dot in found]).encode()).hexdigest()


def draw(found: list[Dot], path: Path) -> None:
    """An SVG: accuracy to the right, evidence upwards, a colour for each method and a sign for each attack."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        raise MissingDependencyError("quorumark[report]", "drawing figures") from None
    style: dict[Any, Any] = {"svg.hashsalt": "rivals", "font.size": 9}
    with mpl.rc_context(style):
        figure = Figure(figsize=(8.5, 4.8), layout="constrained")
        axes = figure.subplots()
        methods = list(dict.fromkeys(dot.method for dot in found))
        for number, method in enumerate(methods):
            for dot in (d for d in found if d.method == method):
                size = 13 if dot.attack == "none" else 8
                axes.plot(
                    [100 * dot.accuracy], [-dot.log10_p], _LOOKS[dot.attack][1], color=_COLOURS[number],
                    markersize=size, alpha=0.85, markeredgecolor="white", zorder=3 if size > 8 else 2,
                )  # fmt: skip
        axes.axhline(-chance.signs(4), color="grey", linewidth=1, linestyle="--")
        axes.annotate(
            "z = 4, the paper's threshold",
            (0.005, -chance.signs(4)),
            xycoords=("axes fraction", "data"),
            va="bottom",
            color="grey",
        )
        axes.set_yscale("symlog", linthresh=1)
        axes.set(xlabel="accuracy of the attacked model, % (trained in few rounds: not converged)", ylim=(-0.3, 3e4),
                 ylabel="evidence, −log10 p (more is better)")  # fmt: skip
        axes.set_yticks([0, 1, 10, 100, 1000, 10000], ["0", "1", "10", "100", "1000", "10000"])
        axes.grid(alpha=0.25)
        handles = [Line2D([], [], color=_COLOURS[n], marker="o", linestyle="", label=m) for n, m in enumerate(methods)]
        handles += [
            Line2D([], [], color="black", marker=sign, linestyle="", label=label)
            for attack, (label, sign) in _LOOKS.items()
            if any(dot.attack == attack for dot in found)
        ]
        figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
        figure.savefig(path, metadata={"Date": None, "Description": digest(found)})
