"""Attackers who know the test by layers (docs/layers.md): they keep the cosine of every part small, not their sum.

    (1 − α)·CE(z, y) + α·Σ_p w_p·|cos(θ_p − θ_0p, τ′_p)|        parts p: the agreed blocks, or single rows

with weights w that are even, drawn anew in every step, or alternate between the parts of even and of odd number; and
what is left of a model once an estimate was taken out of every block, with the amounts of an oracle. The anchor θ_0 is
public, and what it has in common with the estimate by chance is nothing that a penalty should move.

A part is made of whole rows, and a row's weights lie side by side on the device. So sums are taken row by row first:
adding eleven million numbers into fifty places at once would take longer than the training step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quorumark.errors import InputError
from quorumark.research.attacks.amounts import Amounts, zeroed
from quorumark.research.lab.fleet import _rows
from quorumark.research.lab.retrain import Attacker, Attackers

__all__ = ["PartedAttackers", "expected", "less", "removed"]


class PartedAttackers(Attackers):
    """A fleet whose attackers are penalised part by part; all of a group have the same parts."""

    def __init__(self, *arguments: Any, most: int, anchor: Tensor, **options: Any) -> None:
        """`most`: of how many parts there may be; `anchor`: θ_0, in the layout's order."""
        super().__init__(*arguments, **options)
        members, low = len(self._alpha), self.order.low
        self._anchor = anchor.to(self.device)[self.order.to_device[:low]]
        self._moved = _rows(len(self._wide), low, torch.float32, self.device)  # θ − θ_0, for each lane
        self._spans = [(place.start, place.stop, place.shape[0]) for place in self.order.carriers]
        self._part = torch.zeros(sum(rows for _, _, rows in self._spans), dtype=torch.int64, device=self.device)
        self._shares = torch.zeros(members, most, device=self.device)  # w
        self._kinds: list[str] = ["even"] * members
        self._count, self._drawn = 1, torch.Generator(self.device).manual_seed(1)

    def begin_parts(self, attackers: Sequence[Attacker], parts: Tensor, kinds: Sequence[str]) -> None:
        """As `begin`, with the number of each coordinate's part in the layout's order, and how w is drawn for each."""
        own = parts.to(self.device)[self.order.to_device[: self.order.low]]
        firsts = [own[start:stop].view(rows, -1) for start, stop, rows in self._spans]
        if not all(bool((rows == rows[:, :1]).all()) for rows in firsts):
            raise InputError("parts", "must be made of whole rows", "a row with weights of several parts")
        self._part.copy_(torch.cat([rows[:, 0] for rows in firsts]))
        self._count, self._kinds = int(parts.max()) + 1, list(kinds)
        self.begin(attackers)
        for k in range(len(attackers)):
            factor = self._sums(self._guess[k], self._guess[k]).sqrt().clamp_min(1e-30).reciprocal()
            for target, by in self._by_row(self._guess[k], factor):
                target.mul_(by)

    def _sums(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a_p, b_p⟩ of every part."""
        rows = [(a[start:stop].view(n, -1) * b[start:stop].view(n, -1)).sum(1) for start, stop, n in self._spans]
        return torch.zeros(self._shares.shape[1], device=self.device).index_add(0, self._part, torch.cat(rows))

    def _by_row(self, vector: Tensor, factors: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each tensor's rows, beside the factors of their parts."""
        own = factors[self._part].split([n for _, _, n in self._spans])
        return [
            (vector[start:stop].view(n, -1), factor[:, None])
            for (start, stop, n), factor in zip(self._spans, own, strict=True)
        ]

    def _before(self, step: int) -> None:
        """w of this step, where the recorded step reads it."""
        for k, kind in enumerate(self._kinds[: self.active]):
            row = self._shares[k].zero_()
            own = row[: self._count]
            if kind == "random":
                own.uniform_(generator=self._drawn)
            elif kind == "alternating":
                own[step % 2 :: 2] = 1
            else:
                own.fill_(1)
            row.div_(row.sum().clamp_min(1e-30))

    def _follow(self, k: int, lane: int, gradients: list[Tensor]) -> None:
        """As the fleet's, with a cosine for each part."""
        order, carriers = self.order, len(self.order.carriers)
        guess, alpha, wide, moved = self._guess[k], self._alpha[k], self._wide[lane], self._moved[lane]
        torch.sub(self.theta[k, : order.low], self._anchor, out=moved)
        norm = self._sums(moved, moved).sqrt().clamp_min(1e-30)
        cosine = self._sums(moved, guess) / norm
        pull = alpha * self._shares[k] * cosine.sign() / norm
        wide.copy_(torch.cat(gradients[:carriers], out=self._grads_low[lane]))
        wide.mul_(1 - alpha)
        for source, factors in ((guess, pull), (moved, -pull * cosine / norm)):
            for (target, by), (start, stop, n) in zip(self._by_row(wide, factors), self._spans, strict=True):
                target.addcmul_(source[start:stop].view(n, -1), by)
        self._descend(k, lane, gradients, wide)


def expected(moved: Tensor, guess: Tensor, parts: Tensor, rho: float) -> Tensor:
    """The amounts that an attacker expects, a_b = ρ·‖θ_b − θ_0b‖·√n_b/‖τ′_b‖², if all of τ′ were the mark."""
    size = torch.bincount(parts).double()
    length2, guess2 = (torch.bincount(parts, (v * v).double()) for v in (moved, guess))
    return rho * (length2 * size).sqrt() / guess2.clamp_min(1e-300)


def less(released: Tensor, guess: Tensor, parts: Tensor, amounts: Tensor) -> Tensor:
    """A model less a_b·τ′ in each block."""
    vector = released.clone()
    vector[: len(parts)] -= amounts[parts].to(vector.dtype) * guess
    return vector


def removed(
    released: Tensor, guess: Tensor, parts: Tensor, scale: Tensor, oracle: Callable[[Tensor], Sequence[float]]
) -> tuple[Tensor, Amounts]:
    """A model less a_b·τ′ in each block, with the amounts that bring the oracle's z of every block to 0.

    `scale`: ‖θ_b − θ_0b‖/‖τ′_b‖ of each block, the size of an amount.
    """

    def asked(amounts: NDArray[np.float64]) -> Sequence[float]:
        return oracle(less(released, guess, parts, torch.from_numpy(amounts)))

    amounts = zeroed(asked, scale.double().numpy())
    return less(released, guess, parts, torch.from_numpy(amounts.taken)), amounts
