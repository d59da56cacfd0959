"""A server optimiser in integers: every member computes the same model from the same sum (docs/optimisers.md).

    state = OptimiserState.start(optimiser, layout.size)
    taken = state.take(raw)              # raw = E(Σ a_k·θ_k + S ⊙ τ) − E(θ), signed, in 2^-40
    θ + taken.moves, taken.after         # rounded to the model's types once; the state of the next round

Floating point would do the same on one machine, but powers, roots and fused products differ between machines, and one
unit of difference between two members ends a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.optimiser import RATE_BITS, RATIO_BITS, ROOT_BITS, Optimiser
from quorumark.field import parallel
from quorumark.round import steps

__all__ = ["KINDS", "LARGEST", "Followed", "OptimiserState", "Taken", "power"]

KINDS = {"fedadam": steps.ADAM, "fedyogi": steps.YOGI, "fedadagrad": steps.ADAGRAD}
LARGEST = (1 << 60) - 1  # no update or step is larger: 2^20
_POWER_BITS = 62


def power(ratio: int, exponent: int) -> int:
    """(ratio/2^32)^exponent in 2^-62, each product rounded down: by squaring, from the exponent's highest bit."""
    base, found = ratio << (_POWER_BITS - RATIO_BITS), 1 << _POWER_BITS
    for bit in bin(exponent)[2:]:
        found = found * found >> _POWER_BITS
        if bit == "1":
            found = found * base >> _POWER_BITS
    return found


@dataclass(frozen=True, eq=False)
class OptimiserState:
    """Of all weights: the momentum m, and r = √v where the optimiser adapts. `steps` counts the rounds so far."""

    optimiser: Optimiser
    steps: int
    momentum: NDArray[np.int64]
    root: NDArray[np.uint64]

    @classmethod
    def start(cls, optimiser: Optimiser, size: int) -> OptimiserState:
        return cls(optimiser, 0, np.zeros(size, np.int64), np.zeros(size if optimiser.adapts else 0, np.uint64))

    def rate(self, after: int = 1) -> int:
        """The server's learning rate in the next step, or in a later one, in 2^-40. FedAdam's has Adam's correction,
        with Flower's exponents: eta·√(1 − β2^(q+1))/(1 − β1^(q+1)) in step q."""
        if not self.optimiser.adapts:
            return self.optimiser.integer("server_learning_rate", RATE_BITS)
        eta = self.optimiser.integer("eta", RATE_BITS)
        if self.optimiser.name != "fedadam":
            return eta
        one, exponent = 1 << _POWER_BITS, self.steps + after + 1
        first, second = (one - power(self.beta(which), exponent) for which in (1, 2))
        return eta * isqrt(second << _POWER_BITS) // first

    def beta(self, which: int) -> int:
        """β1 (the momentum) or β2, in 2^-32."""
        name = f"beta_{which}" if self.optimiser.adapts else "server_momentum"
        return self.optimiser.integer(name, RATIO_BITS)

    @property
    def tau(self) -> int:
        return self.optimiser.integer("tau", ROOT_BITS)

    def take(self, raw: NDArray[np.int64]) -> Taken:
        """The next step: what the sum of a round makes of the model, and of this state."""
        raw = np.clip(raw, -LARGEST, LARGEST)
        moves, momentum, root = np.empty_like(raw), np.empty_like(raw), np.empty_like(self.root)
        rate, kind = np.uint64(self.rate()), KINDS.get(self.optimiser.name, 0)
        betas, tau = [np.uint64(self.beta(which)) for which in (1, 2)], np.uint64(self.tau)

        def part(b: int, e: int) -> None:
            own = raw[b:e], self.momentum[b:e]
            if self.optimiser.adapts:
                out = moves[b:e], momentum[b:e], root[b:e]
                steps.adaptive_step(kind, *own, self.root[b:e], rate, *betas, tau, *out)
            else:
                steps.momentum_step(*own, rate, betas[0], moves[b:e], momentum[b:e])

        parallel.spread(part, raw.size)
        return Taken(raw, moves, self, OptimiserState(self.optimiser, self.steps + 1, momentum, root))


@dataclass(frozen=True, eq=False)
class Followed:
    """What a step makes of the mark, for each carrying coordinate: what is in the momentum then (`mark`), what it does
    to r (`drag`), and what of it is in the step (`shown`)."""

    mark: NDArray[np.int64]
    drag: NDArray[np.int64]
    shown: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Taken:
    """A step that was taken from the state `before`: the sum's `raw` update, the `moves` that follow from it, and the
    state `after`. `held` are places that took no part in it, `anew` says of each weight whether its momentum began with
    0 (None: of no weight), and `followed` is what the step makes of the mark (`quorumark.round.applied`)."""

    raw: NDArray[np.int64]
    moves: NDArray[np.int64]
    before: OptimiserState
    after: OptimiserState
    held: tuple[slice, ...] = ()
    anew: NDArray[np.bool_] | None = None
    followed: Followed | None = None

    def averaged(self, places: Sequence[slice]) -> Taken:
        """The same, but for tensors that take the sum as it is."""
        for place in places:
            self.moves[place], self.after.momentum[place] = self.raw[place], 0
            if self.after.root.size:
                self.after.root[place] = 0
        return self

    def begun_anew(self, anew: NDArray[np.bool_]) -> Taken:
        """The same, but for weights whose momentum is 0 before the step. Roots do not depend on it."""
        moves, momentum, root = self.moves.copy(), self.after.momentum.copy(), self.before.root
        own = replace(self.before, momentum=np.zeros_like(momentum[anew]), root=root[anew] if root.size else root)
        again = own.take(self.raw[anew])
        moves[anew], momentum[anew] = again.moves, again.after.momentum
        return replace(self, moves=moves, after=replace(self.after, momentum=momentum), anew=anew)

    def without(self, places: Sequence[slice]) -> Taken:
        """The same, but for tensors that keep their weights: their momentum and root stay as well."""
        if not places:
            return self
        raw, moves = self.raw.copy(), self.moves.copy()
        momentum, root = self.after.momentum.copy(), self.after.root.copy()
        for place in places:
            raw[place], moves[place] = 0, 0
            momentum[place] = self.before.momentum[place]
            if root.size:
                root[place] = self.before.root[place]
        after = replace(self.after, momentum=momentum, root=root)
        return replace(self, raw=raw, moves=moves, after=after, held=tuple(places))
