"""Attackers who know the test by layers (docs/layers.md): they keep the cosine of every part small, not their sum.

    (1 − α)·CE(z, y) + α·Σ_p w_p·|cos(θ_p, τ′_p)|        parts p: the agreed blocks, or single rows of the carriers

with weights w that are even, drawn anew in every step, or alternate between the parts of even and of odd number; and
what is left of a model once an estimate was taken out of every block, with the amounts of an oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quorumark.research.lab.retrain import Attacker, Attackers

__all__ = ["PartedAttackers", "removed"]

_ASKED = 4  # times that the oracle is asked


class PartedAttackers(Attackers):
    """A fleet whose attackers are penalised part by part; all of a group have the same parts."""

    def __init__(self, *arguments: Any, most: int, **options: Any) -> None:
        """`most`: of how many parts there may be."""
        super().__init__(*arguments, **options)
        members = len(self._alpha)
        self._part = torch.zeros(self.order.low, dtype=torch.int64, device=self.device)
        self._shares = torch.zeros(members, most, device=self.device)  # w
        self._kinds: list[str] = ["even"] * members
        self._count, self._drawn = 1, torch.Generator(self.device).manual_seed(1)

    def begin_parts(self, attackers: Sequence[Attacker], parts: Tensor, kinds: Sequence[str]) -> None:
        """As `begin`, with the number of each coordinate's part in the layout's order, and how w is drawn for each."""
        self._part.copy_(parts.to(self.device)[self.order.to_device[: self.order.low]])
        self._count, self._kinds = int(parts.max()) + 1, list(kinds)
        self.begin(attackers)
        for k in range(len(attackers)):
            self._guess[k].div_(self._sums(self._guess[k] ** 2).sqrt().clamp_min(1e-30)[self._part])

    def _sums(self, values: Tensor) -> Tensor:
        return torch.zeros(self._shares.shape[1], device=self.device).index_add(0, self._part, values)

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
        theta, guess, alpha, wide = self.theta[k, : order.low], self._guess[k], self._alpha[k], self._wide[lane]
        norm = self._sums(theta * theta).sqrt().clamp_min(1e-30)
        cosine = self._sums(theta * guess) / norm
        pull = alpha * self._shares[k] * cosine.sign() / norm
        wide.copy_(torch.cat(gradients[:carriers], out=self._grads_low[lane]))
        wide.mul_(1 - alpha).addcmul_(guess, pull[self._part])
        wide.addcmul_(theta, (pull * cosine / norm)[self._part], value=-1)
        self._descend(k, lane, gradients, wide)


def removed(
    released: Tensor, guess: Tensor, parts: Tensor, scale: Tensor, oracle: Callable[[Tensor], Sequence[float]]
) -> Tensor:
    """A model less a_b·τ′ in each block, with the amounts that bring the oracle's z of every block to 0.

    `scale`: ‖θ_b − θ_0b‖/‖τ′_b‖ of each block, the size of a first try.
    """

    def less(amounts: Tensor) -> Tensor:
        vector = released.clone()
        vector[: len(parts)] -= amounts[parts].to(vector.dtype) * guess
        return vector

    def asked(amounts: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(oracle(less(amounts)))).to(amounts)

    before, now = torch.zeros_like(scale), 0.1 * scale
    was = asked(before)
    for _ in range(_ASKED - 1):
        found = asked(now)
        slope = torch.where((found - was).abs() > 1e-9, found - was, torch.inf)
        before, now, was = now, now - found * (now - before) / slope, found
    return less(now)
