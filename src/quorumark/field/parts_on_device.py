"""The kernels of `field.parts` for CUDA tensors, in torch's own operations: the same bits.

A vector of field elements is a tensor of int64. Nothing here needs a GPU but to be fast: tensors on the CPU do as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quorumark.field._operands import P

__all__ = ["move_by_parts", "pack_update"]

_SCALE = float(1 << 40)
Places = Sequence[tuple[slice, int]]


def pack_update(
    after: Tensor, before: Tensor, weight: float, spans: Places, bits: int, count: int, noise: Tensor | None
) -> tuple[Tensor, bool]:
    """Σ_j 2^(j·bits)·v_j as field elements, with v = ((2^40·after − before)·weight + noise)/2^shift, to nearest with
    ties to even; and whether each v is below 2^(bits−1)."""
    scale = _by_weight(spans, torch.tensor([2.0**-shift for _, shift in spans], dtype=torch.float64), after.device)
    moved = (after.double() * _SCALE - _signed(before).double()) * (scale * weight)
    if noise is not None:
        moved += noise.double() * scale
    units = torch.round(moved)
    fits = bool((units.abs() < 1 << (bits - 1)).all())  # not so where it is no number
    rows = torch.nn.functional.pad(units.to(torch.int64), (0, -units.numel() % count)).view(count, -1)
    total = torch.zeros_like(rows[0])
    for row in reversed(rows):
        total = (total << bits) + row
    return torch.where(total < 0, total + P, total), fits


def move_by_parts(
    packed: Tensor, before: Tensor, spans: Places, bits: int, count: int, kind: str
) -> tuple[Tensor, list[bool]]:
    """before + 2^shift·v as float32 or float64, rounded once, for the parts v of each element, from the lowest up; and
    for each span whether its elements have parts below 2^(bits−1) in size and nothing where there is no place."""
    half, rest, left, rows = 1 << (bits - 1), (1 << bits) - 1, _signed(packed), []
    for _ in range(count - 1):
        rows.append(((left + half) & rest) - half)
        left = (left - rows[-1]) >> bits
    table = torch.stack([*rows, left])
    size, length = before.numel(), packed.numel()
    moves, beyond = table.view(-1)[:size], table.view(-1)[size:]
    shift = _by_weight(spans, torch.tensor([shift for _, shift in spans]), before.device)
    out = (_signed(before) + (moves << shift)).to({"float32": torch.float32, "float64": torch.float64}[kind]) * 2.0**-40
    wrong = (table.abs() >= half).any(0)
    wrong[(size + torch.nonzero(beyond).view(-1)) % length] = True
    wrong = wrong[torch.arange(size, device=wrong.device) % length]
    return out, [not bool(wrong[place].any()) for place, _ in spans]


def _signed(x: Tensor) -> Tensor:
    return torch.where(x > P // 2, x - P, x)


def _by_weight(spans: Places, values: Tensor, device: torch.device) -> Tensor:
    """A value of each span for each of its weights."""
    sizes = torch.tensor([place.stop - place.start for place, _ in spans], device=device)
    return values.to(device).repeat_interleave(sizes)
