"""The picture in a report: where a model falls beside models that know nothing of the key. SVG, drawn by hand.

The axis is linear. Where more than 30 units hold nothing of interest it is cut, and says so: the bell around 0, the
threshold and the model stay at one scale, whether z is 0.7, 21 or 1000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Axis", "Mark", "Plot", "draw"]

_BELL = 4.0  # the normal density is drawn from −4 to 4; beyond, the line would lie on the axis
_AROUND = 2.5  # units on either side of a mark
_LONGEST = 30.0  # units without anything; longer stretches are cut
_CUT = 40.0  # pixels of a cut
_EDGE = 14.0
_LETTER = 8.0  # pixels of a letter, on average, in the widest of usual fonts
_LABEL = 124.0  # pixels of the longest label below the axis


@dataclass(frozen=True)
class Axis:
    """Stretches (from, to) of the number line, side by side at one scale, with cuts between them."""

    stretches: tuple[tuple[float, float], ...]
    width: float

    @classmethod
    def over(cls, *marks: float, width: float) -> Axis:
        """Shows the bell and all marks; stretches that nearly touch are one."""
        found: list[tuple[float, float]] = []
        wanted = [(-_BELL, _BELL), *((math.floor(m - _AROUND), math.ceil(m + _AROUND)) for m in marks)]
        for low, high in sorted(wanted):
            if found and low - found[-1][1] <= _LONGEST:
                found[-1] = (found[-1][0], max(high, found[-1][1]))
            else:
                found.append((low, high))
        return cls(tuple(found), width)

    @property
    def scale(self) -> float:
        """Pixels of one unit."""
        units = sum(high - low for low, high in self.stretches)
        return (self.width - 2 * _EDGE - _CUT * (len(self.stretches) - 1)) / units

    def place(self, value: float) -> float:
        """The pixel of a number that is shown."""
        left = _EDGE
        for low, high in self.stretches:
            if value <= high:
                return left + (max(value, low) - low) * self.scale
            left += (high - low) * self.scale + _CUT
        return left - _CUT

    def cuts(self) -> list[float]:
        """The middles of the cuts."""
        return [(self.place(a[1]) + self.place(b[0])) / 2 for a, b in pairwise(self.stretches)]

    def ticks(self) -> list[int]:
        """Integers, at least 30 pixels apart, more where they are long."""
        shown = []
        for low, high in self.stretches:
            room = 14 + 8 * max(len(f"{low:.0f}"), len(f"{high:.0f}"))
            step = next(s * 10**k for k in range(20) for s in (1, 2, 5) if s * 10**k * self.scale >= room)
            first = math.ceil(low / step) * step
            shown += list(range(first, math.floor(high) + 1, step)) or [round((low + high) / 2)]
        return shown


@dataclass(frozen=True)
class Mark:
    """A vertical line with its label, which stays inside the picture: from `left`, about `span` pixels."""

    x: float
    label: str
    left: float
    span: float


@dataclass(frozen=True)
class Plot:
    """Everything that the template draws, in pixels."""

    name: str
    width: float
    height: float
    base: float
    top: float
    runs: tuple[tuple[float, float], ...]
    cuts: tuple[float, ...]
    ticks: tuple[tuple[float, str], ...]
    bell: str
    chance: tuple[float, float]
    chance_text: float
    marked: tuple[float, float]
    marked_y: float
    marked_text: float
    marked_anchor: str
    threshold: Mark
    threshold_top: float
    model: Mark


def draw(name: str, z: float, threshold: float, labels: tuple[str, str], width: float) -> Plot:
    """Places z and the threshold; `labels` are their texts. It computes nothing about the model."""
    axis = Axis.over(z, threshold, width=width)
    base, top = 190.0, 62.0
    height = base + (60 if threshold > 3 else 84)
    points = [i / 20 for i in range(int(-20 * _BELL), int(20 * _BELL) + 1)]
    curve = [f"{axis.place(p):.1f},{base - (base - top - 16) * math.exp(-p * p / 2):.1f}" for p in points]
    bell = f"M{axis.place(-_BELL):.1f},{base:.1f} L{' '.join(curve)} L{axis.place(_BELL):.1f},{base:.1f} Z"

    def mark(value: float, label: str) -> Mark:
        x, span = axis.place(value), _LETTER * len(label)
        return Mark(x, label, min(max(x - span / 2, 0), width - span), span)

    limit, model = mark(threshold, labels[0]), mark(z, labels[1])
    # the dashed line passes behind the model's label: then it starts below it
    behind = model.left - 4 < limit.x < model.left + model.span + 4
    start, end = axis.place(threshold), axis.place(max(a[1] for a in axis.stretches))
    wide = end - start > _LABEL  # whether a label fits under the range, from its start
    runs = tuple((axis.place(low), axis.place(low) + (high - low) * axis.scale) for low, high in axis.stretches)
    return Plot(
        name=name,
        width=width,
        height=height,
        base=base,
        top=top,
        runs=runs,
        cuts=tuple(axis.cuts()),
        ticks=tuple((axis.place(tick), f"{tick:,}".replace("-", "−")) for tick in axis.ticks()),
        bell=bell,
        chance=(axis.place(-3), axis.place(3)),
        chance_text=max(axis.place(0), _LABEL / 4),
        marked=(start, end),
        marked_y=base + (31 if threshold > 3 else 56),  # beside the other range, or below it
        marked_text=start if wide else width - 2,
        marked_anchor="start" if wide else "end",
        threshold=limit,
        threshold_top=46.0 if behind else 22.0,
        model=model,
    )
