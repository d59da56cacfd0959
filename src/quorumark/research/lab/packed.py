"""The sum of packed updates on the device: the numbers that the parts of a packed round's elements add up to.

Nothing is put into field elements here, since the sum of the parts is the same number (docs/secagg.md, "Packed sums"):

    θ_new = decode(E(θ) + Σ_k 2^shift·round((2^40·θ_k − E(θ))·a_k/2^shift) + S ⊙ τ)        a shift for each tensor

Shifts follow from the state, and from the largest update of a round (`quorumark.round.units`). Rounding is that of
`quorumark.packing.pack_update`, bit for bit: 2^40·θ_k is exact in float64, the difference is rounded once and its
product once to float64, and that to the nearest integer, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from quorumark.model.layout import ModelLayout
from quorumark.packing import Span

__all__ = ["PackedSum", "Units", "backing", "largest_moves", "shares_of"]

_SCALE = float(1 << 40)


@dataclass(frozen=True, eq=False)
class PackedSum:
    """`total` is E(θ) + Σ 2^shift·v_k; `level` says which tensors had wider units; `squares` are the sums of squares by
    rows, columns and taps of each member's update in units (`mark.axis_sums`), where the mark needs norms. All of that
    is of those who took part, `members` by index: whose level too few others need is left out."""

    total: Tensor
    level: bytes
    squares: Tensor | None
    members: tuple[int, ...]


def backing(members: int) -> int:
    """How many must ask for a level before it counts: `Group.blocking`, where more than a half make the threshold."""
    threshold = max(2, members // 2 + 1)
    quorum = (members + threshold - 1) // 2 + 1
    return min(threshold, members - quorum + 1)


def shares_of(weights: Sequence[Fraction], members: Sequence[int]) -> list[Fraction]:
    """The weights of those who took part: they make 1 again."""
    total = sum(weights[k] for k in members)
    return [weights[k] / total for k in members]


def largest_moves(layout: ModelLayout, before: Tensor, model: Callable[[int], Tensor], members: int) -> list[list[int]]:
    """The largest |E(θ_k) − E(θ)| of each member, for each tensor in the layout's order. Waits for the device."""
    origin, found = _encoded(before), []
    zero = origin.new_zeros(())
    for k in range(members):
        moved = (_encoded(model(k)) - origin).abs()
        places = (place for _, place in layout.spans())
        found.append(torch.stack([moved[p].max() if p.stop > p.start else zero for p in places]))
    return [[int(n) for n in row] for row in torch.stack(found).cpu().tolist()]


class Units:
    """The units of one round, weight by weight, and what updates from the model `before` are in them."""

    def __init__(self, layout: ModelLayout, spans: Sequence[Span], before: Tensor) -> None:
        sizes = torch.tensor([place.stop - place.start for place, _ in spans], device=before.device)
        shifts = torch.tensor([shift for _, shift in spans], device=before.device)
        scales = torch.tensor([2.0**-shift for _, shift in spans], dtype=torch.float64, device=before.device)
        self._shift = shifts.repeat_interleave(sizes, output_size=layout.size)
        self._scale = scales.repeat_interleave(sizes, output_size=layout.size)
        self._end = layout.carrier_size
        self._origin = _encoded(before)

    def total(self, model: Callable[[int], Tensor], weights: Sequence[Fraction]) -> Tensor:
        """E(θ) + Σ_k 2^shift·v_k, in 2^-40."""
        origin = self._origin.double()
        units = torch.zeros_like(origin)  # whole numbers, far below 2^53: adding them is exact
        for k, weight in enumerate(weights):
            units += torch.round((model(k).double() * _SCALE - origin) * (self._scale * float(weight)))
        return self._origin + (units.to(torch.int64) << self._shift)

    def rounded(self, model: Tensor, weight: Fraction) -> Tensor:
        """A member's weighted update of the carriers in 2^-40, rounded to units as `movement.upload_norms` does it: to
        2^-40 first."""
        shift, moved = self._shift[: self._end], _encoded(model[: self._end]) - self._origin[: self._end]
        moves = torch.round(moved.double() * float(weight)).to(torch.int64)
        whole = moves >> shift
        left, unit = (moves - (whole << shift)) << 1, torch.ones_like(shift) << shift
        return (whole + ((left > unit) | ((left == unit) & (whole & 1 == 1)))) << shift


def _encoded(vector: Tensor) -> Tensor:
    """E, as `mark.encoded`."""
    return torch.round(vector.double() * _SCALE).to(torch.int64)
