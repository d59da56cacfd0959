"""Two safety nets for the mark, for the lab to measure: noise beside it, and rows that keep silent after a jump.

*Dither*: every member adds noise of its own to what it uploads. Member k of K adds to its weighted model a_k·θ_k,
weight by weight, normal noise of standard deviation κ·S/√K, where S is the mark's amplitude in that round: to θ_k
itself that is κ·S/(a_k·√K). The opened sum then has noise of standard deviation κ·S beside the mark ±S. The noise comes
from a stream of its own, new for every member and state (in the lab: the run's seed, the round, the member).

*Continuity*: a row whose public move, the rms of θ_r − θ_(r−1) over its weights, is more than 4 times its average so
far would get no mark. The lab counts such rows; it does not take their mark away. The average moves on with every
accepted round, jumps included: EMA = 0.9·EMA + 0.1·move, from the first move.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quorumark.model.layout import ModelLayout

__all__ = ["JUMP", "Continuity", "Dither"]

JUMP = 4.0  # times its average: a row that moves further is silenced
_ALIKE = 64  # as in `round.movement`: members moved apart where 63·N² > 64·‖D‖²


class Dither:
    """The members' noise beside the mark."""

    def __init__(self, kappa: float, seed: int) -> None:
        self.kappa, self._seed = kappa, seed

    def add(self, total: Tensor, place: Any, scale: Tensor, round_no: int, members: int) -> None:
        """total[place] += Σ_k round(g_k·κ·S/√K) with standard normal g_k: κ·S per weight. `scale` is S in 2^-40."""
        spread = scale.double() * (self.kappa / members**0.5)
        noise = torch.zeros_like(total[place])
        for k in range(members):
            words = np.random.SeedSequence([0x646974, self._seed, round_no, k]).generate_state(1, np.uint64)
            generator = torch.Generator(total.device).manual_seed(int(words[0] >> 1))
            normal = torch.randn(scale.numel(), generator=generator, device=total.device)
            noise += torch.round(normal * spread).to(torch.int64)
        total[place] += noise

    def energies(self, scale: Tensor, axes: list[tuple[slice, tuple[int, int, int]]]) -> Tensor:
        """κ²·Σ S² of each row, column and tap, in the order of `mark.axis_sums`: what the noise adds to ‖D‖²."""
        found = []
        for place, shape in axes:
            cube = (scale[place].double() * self.kappa).square().view(shape)
            plane = cube.sum(2)
            found += [plane.sum(1), plane.sum(0)]
            if shape[2] > 1:
                found.append(cube.sum((0, 1)))
        return torch.cat(found)


def raised(norms: NDArray[np.uint64], energies: NDArray[np.float64]) -> NDArray[np.uint64]:
    """The members' norms N, so raised that comparing them with ‖D‖² is comparing N with ‖D‖² less the noise's energy.

    63·N′² > 64·‖D‖² with N′² = N² + 64/63·E is 63·N² > 64·(‖D‖² − E).
    """
    squares = norms.astype(np.float64) ** 2 + energies * (_ALIKE / (_ALIKE - 1))
    higher: NDArray[np.uint64] = np.floor(np.sqrt(squares)).astype(np.uint64)
    return np.maximum(norms, higher)


class Continuity:
    """Which rows of the carriers moved in a round more than `JUMP` times their average."""

    def __init__(self, layout: ModelLayout, device: Any) -> None:
        self._rows = [(place, spec.shape[0]) for spec, place in layout.spans("carrier") if spec.size]
        widths = [(place.stop - place.start) // rows for place, rows in self._rows for _ in range(rows)]
        self._widths = torch.tensor(widths, dtype=torch.float64, device=device)
        self._ema: Tensor | None = None
        self._seen: list[Tensor] = []  # each round's share of rows and of weights, on the device

    def see(self, before: Tensor, after: Tensor) -> Tensor:
        """A round's global models in the layout's order; which rows it would silence."""
        squares = [(after[place] - before[place]).double().square().view(rows, -1).sum(1) for place, rows in self._rows]
        move = (torch.cat(squares) / self._widths).sqrt()
        first = self._ema is None
        ema = move if self._ema is None else self._ema
        over = torch.zeros_like(move, dtype=torch.bool) if first else move > JUMP * ema
        self._ema = 0.9 * ema + 0.1 * move
        weights = (over * self._widths).sum() / self._widths.sum()
        self._seen.append(torch.stack([over.double().mean(), weights]))
        return over

    def summary(self) -> dict[str, Any]:
        """Shares of rows and of carrying weights silenced, over all rounds; `rounds` are those with some, by number."""
        shares = torch.stack(self._seen).cpu().tolist() if self._seen else []
        rows, weights = [row for row, _ in shares], [weight for _, weight in shares]
        return {
            "rows": round(statistics.fmean(rows), 6) if rows else 0.0,
            "rows largest": round(max(rows, default=0.0), 6),
            "coordinates": round(statistics.fmean(weights), 6) if weights else 0.0,
            "coordinates largest": round(max(weights, default=0.0), 6),
            "rounds": [[n, round(row, 5), round(weight, 5)] for n, (row, weight) in enumerate(shares, 1) if row],
        }

    # --- keeping it ---

    def saved(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"ema": None if self._ema is None else self._ema.cpu(), "seen": [part.cpu() for part in self._seen]}

    def restore(self, saved: dict[str, Any]) -> None:
        device = self._widths.device
        self._ema = None if saved["ema"] is None else saved["ema"].to(device)
        self._seen = [part.to(device) for part in saved["seen"]]
