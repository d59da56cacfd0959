"""What can be learnt about the key from outside while a run trains, without keeping its models.

All global models are public, and so are the amplitudes S_r of every round. `Observer` sums up what the estimates of
`attacks.estimate_key` need, round by round: of what anybody sees, D_r = θ_r − θ_(r−1), and of what coalitions
of the first c members see, who know their own part of it, Σ a_k·(θ_k − θ_(r−1)). The estimates are the same, which a
test compares; here they take a few vectors instead of all models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout
from quorumark.research.attacks.learning import ESTIMATES, LeastSquares, carrier_rows

__all__ = ["LAST", "Observer"]

LAST = 5  # rounds that the estimate `last` sums up


class _View:
    """The sums of one observer: anybody, or a coalition."""

    def __init__(self, layout: ModelLayout, device: Any) -> None:
        def zeros() -> Tensor:
            return torch.zeros(layout.coordinates, dtype=torch.float64, device=device)

        self.total, self.product = zeros(), zeros()  # Σ D_r, Σ S_r·D_r
        self.gls = LeastSquares(carrier_rows(layout), zeros(), zeros())
        self.last: deque[Tensor] = deque(maxlen=LAST)

    def saved(self) -> dict[str, Any]:
        parts = {"total": self.total, "product": self.product, "above": self.gls.above, "below": self.gls.below}
        return {name: part.cpu() for name, part in parts.items()} | {"last": [part.cpu() for part in self.last]}

    def restore(self, saved: dict[str, Any], device: Any) -> None:
        self.total, self.product = saved["total"].to(device), saved["product"].to(device)
        self.gls.above, self.gls.below = saved["above"].to(device), saved["below"].to(device)
        self.last = deque((part.to(device) for part in saved["last"]), maxlen=LAST)


class Observer:
    """Follows a run; `coalitions` are the sizes c of those who put their own updates together, 0 for anybody."""

    def __init__(self, layout: ModelLayout, initial: Tensor, coalitions: Sequence[int] = (), members: int = 1) -> None:
        if layout.coordinates != layout.carrier_size:
            raise InputError("layout", "must carry in all carriers' weights in the lab")
        if any(not 0 <= c < members for c in coalitions):
            raise InputError("--observe", f"must be numbers of members below all {members}", list(coalitions))
        self.coalitions = tuple(sorted({0, *coalitions}))
        self.device, self._end = initial.device, layout.coordinates
        self._initial = initial[: self._end].double()
        self._zeros = torch.zeros_like(self._initial)
        self._views = {c: _View(layout, self.device) for c in self.coalitions}
        self._marks, self._squares = self._zeros.clone(), self._zeros.clone()  # Σ S_r, Σ S_r²
        self._before: tuple[Tensor, Tensor] | None = None  # D and S of the round before
        self.rounds = 0

    def see(self, before: Tensor, after: Tensor, scale: Tensor | None, own: dict[int, Tensor]) -> None:
        """A round: the global models in the layout's order, S_r (None: no mark), each coalition's own part."""
        start = before[: self._end].double()
        delta = after[: self._end].double() - start
        scale = self._zeros if scale is None else scale
        foreseen = [] if self._before is None else [self._before, (start - self._initial, self._marks)]
        for c, view in self._views.items():
            left = delta - own[c] if c else delta
            view.total += left
            view.product += scale * left
            view.last.append(left.float())  # they are kept for a while: half the memory
            view.gls.see(delta, scale, [*([(own[c], self._zeros)] if c else []), *foreseen])
        self._marks = self._marks + scale
        self._squares += scale * scale
        self._before = delta, scale
        self.rounds += 1

    def own(self, models: Tensor, weights: Sequence[Fraction], before: Tensor, to_layout: Tensor) -> dict[int, Tensor]:
        """Σ a_k·(θ_k − θ_(r−1)) of the first c members, for each c; a row of `models` is θ_k in the device's order."""
        start, found = before[: self._end].double(), {}
        total, place = torch.zeros_like(start), to_layout[: self._end]
        for k in range(max(self.coalitions)):
            total = total + float(weights[k]) * (models[k][place].double() - start)
            if k + 1 in self._views:
                found[k + 1] = total
        return found

    def estimate(self, how: str, coalition: int = 0) -> Tensor:
        """τ′ over the carriers, as `quorumark.research.attacks.estimate_key` computes it from all models."""
        if how not in ESTIMATES or coalition not in self._views:
            raise InputError("estimate", f"must be one of {', '.join(ESTIMATES)} of who was observed", (how, coalition))
        view = self._views[coalition]
        if how == "gls":
            return view.gls.estimate()  # type: ignore[no-any-return]
        if how == "last":
            return torch.stack(list(view.last)).double().sum(0)
        if how == "sum":
            return view.total
        return torch.where(self._squares > 0, view.product / self._squares.clamp_min(1e-300), self._zeros)

    # --- keeping it ---

    def saved(self) -> dict[str, Any]:
        """For a checkpoint."""
        before = None if self._before is None else [part.cpu() for part in self._before]
        return {
            "coalitions": self.coalitions,
            "views": {c: view.saved() for c, view in self._views.items()},
            "marks": self._marks.cpu(),
            "squares": self._squares.cpu(),
            "before": before,
            "rounds": self.rounds,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        for c, view in self._views.items():
            view.restore(saved["views"][c], self.device)
        self._marks, self._squares = saved["marks"].to(self.device), saved["squares"].to(self.device)
        if saved["before"] is not None:
            first, second = (part.to(self.device) for part in saved["before"])
            self._before = first, second
        self.rounds = saved["rounds"]
