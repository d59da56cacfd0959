"""The strength rule of the paper's code, which sums the members' scales first (docs/strength.md, "Rules")."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

import numpy as np

from quorumark import field
from quorumark.consortium.strength import Strength
from quorumark.errors import InputError, RoundError
from quorumark.field import P, Vector
from quorumark.model.layout import ModelLayout
from quorumark.round.amplitudes import Amplitudes
from quorumark.round.movement import carriers_of, checked_model, distance

__all__ = ["PaperScale", "paper_amplitudes"]


class PaperScale:
    """A member's own strength under the rule `paper`: scale_k = c·‖Δ_k‖·EMA_k, for the model or for each carrier."""

    def __init__(self, strength: Strength, layout: ModelLayout) -> None:
        _need_paper(strength)
        self._strength, self._layout = strength, layout
        self._ema: list[int] | None = None

    def scale(self, before: Vector, after: Vector) -> Vector:
        """What the member gives to secure aggregation (purpose "scale"), in 2^-40; E of the model before and after."""
        before, after = checked_model("before", before, self._layout), checked_model("after", after, self._layout)
        norms = [distance(after[c.place], before[c.place]) for c in carriers_of(self._layout)]
        norms = [isqrt(n) for n in (norms if self._strength.per == "tensor" else [sum(norms)])]
        self._ema = norms if self._ema is None else [(9 * e + n) // 10 for e, n in zip(self._ema, norms, strict=True)]
        scales = [self._strength.c * n * e >> 72 for n, e in zip(norms, self._ema, strict=True)]
        if max(scales) > P >> 11:  # so that a thousand of them add up
            raise RoundError(
                "this member's update is too large for the rule 'paper': its scale is above 1024",
                code="round.update-too-large",
            )
        return field.from_signed(np.array(scales, np.int64))


def paper_amplitudes(
    strength: Strength, layout: ModelLayout, key: str, round_no: int, total: Vector, members: int
) -> Amplitudes:
    """From the opened sum of the members' scales: scale/√d per coordinate, for the sum divided by their number."""
    _need_paper(strength)
    carriers, sizes = carriers_of(layout), {name: part.stop - part.start for name, part in _parts(layout)}
    counts = list(sizes.values()) if strength.per == "tensor" else [layout.coordinates]
    if total.shape != (len(counts),):
        raise InputError("total", f"must be {len(counts)} numbers", total.shape)
    each = [isqrt(int(v) ** 2 // (members**2 * max(1, n))) for v, n in zip(field.to_signed(total), counts, strict=True)]
    each = each if strength.per == "tensor" else each * len(carriers)
    scales = tuple(tuple((a,) * n for n in carrier.axes) for a, carrier in zip(each, carriers, strict=True))
    return Amplitudes(layout, key, round_no, strength.c, 0, scales)


def _parts(layout: ModelLayout) -> Iterable[tuple[str, slice]]:
    return Amplitudes(layout, "rademacher", 0, 0, 0, ()).tensors()


def _need_paper(strength: Strength) -> None:
    if strength.rule != "paper":
        raise InputError("strength", "must have the rule 'paper'", repr(strength.rule))
