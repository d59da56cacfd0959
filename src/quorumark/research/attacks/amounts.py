"""How much of an estimate an oracle has taken out of each block, so that the block's z is 0 (docs/layers.md).

z_b of x_b − a·g is (Y_b − a·⟨τ_b, g⟩)/‖x_b − a·g‖. Its sign changes once, at a = Y_b/⟨τ_b, g⟩, but it does not fall on
the way: where g resembles x_b the length falls before Y_b does, and z rises. A secant then leaves for good. So each
block's zero is enclosed first, by steps that double, and then narrowed down within what encloses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quorumark.research.rows import MOST_LEFT

__all__ = ["Amounts", "zeroed"]

Floats = NDArray[np.float64]

_ASKED = 40  # times that the oracle is asked, for all blocks at once
_NEAR = 0.05  # |z_b| that is not narrowed down any further
_FIRST, _DOUBLED = 0.1, 9  # steps of enclosing, in units of `scale`: 0.1, 0.2, … 25.6, and the same below 0


@dataclass(frozen=True, eq=False)
class Amounts:
    """What is taken of the estimate in each block, z of each block right after it, how often the oracle was asked."""

    taken: Floats
    z: Floats
    asked: int

    @property
    def left(self) -> float:
        """The largest |z_b| right after the removal."""
        return float(np.abs(self.z).max(initial=0.0))

    @property
    def found(self) -> bool:
        """Whether every block is within chance: a removal that did not find its amounts shows nothing."""
        return self.left <= MOST_LEFT


def zeroed(oracle: Callable[[Floats], Sequence[float] | Floats], scale: Floats, most: int = _ASKED) -> Amounts:
    """Amounts that bring z of every block to 0, by an `oracle` that tells all z_b once so much was taken.

    `scale`: ‖θ_b − θ_0b‖/‖τ′_b‖, the size of an amount. A block whose z does not change its sign is left as it is: so
    large an amount that it drowns the block takes nothing out, and ruins the model.
    """
    start = np.asarray(oracle(np.zeros_like(scale)), np.float64)
    blocks = [_Block(float(size), float(z)) for size, z in zip(scale, start, strict=True)]
    asked = 1
    while asked < most - 1 and not all(block.done for block in blocks):
        wanted = np.array([block.next for block in blocks])
        for block, z in zip(blocks, np.asarray(oracle(wanted), np.float64), strict=True):
            block.told(float(z))
        asked += 1
    taken = np.array([block.best for block in blocks])
    return Amounts(taken, np.asarray(oracle(taken), np.float64), asked + 1)  # all at once: blocks may touch each other


class _Block:
    """The search in one block: `next` is asked for, `told` hears what it gives."""

    def __init__(self, scale: float, z: float) -> None:
        steps = [_FIRST * scale * 2.0**k for k in range(_DOUBLED)]
        self._steps = [*steps, *(-step for step in steps)]
        self._near, self._far = (0.0, z), (0.0, 0.0)  # (amount, z) on both sides of the zero, once it is enclosed
        self._start, self._enclosed, self._straight, self._kept = z, False, False, 0
        self.best, self._least = 0.0, abs(z)
        self.done = self._least <= _NEAR or scale <= 0 or not np.isfinite(scale)
        self.next = 0.0 if self.done else self._steps.pop(0)

    def told(self, z: float) -> None:
        if self.done:
            return
        crossed = self._enclosed or z * self._start <= 0
        if crossed and abs(z) < self._least:
            self.best, self._least = self.next, abs(z)
        if self._least <= _NEAR:
            self.done, self.next = True, self.best
        elif self._enclosed:
            self._narrow(z)
        elif z * self._start < 0:
            self._enclosed, self._far = True, (self.next, z)
            self.next = self._between()
        elif self._steps:
            before, self.next = self.next, self._steps.pop(0)
            self._near = (before, z) if before * self.next > 0 else (0.0, self._start)  # the other way, from 0 again
        else:
            self.done, self.next = True, self.best  # 0

    def _narrow(self, z: float) -> None:
        """Keeps the zero enclosed. An end that stays twice counts half, so that both ends move (Illinois)."""
        if z * self._start > 0:
            self._near, self._kept = (self.next, z), max(self._kept, 0) + 1
            if self._kept > 1:
                self._far = (self._far[0], self._far[1] / 2)
        else:
            self._far, self._kept = (self.next, z), min(self._kept, 0) - 1
            if self._kept < -1:
                self._near = (self._near[0], self._near[1] / 2)
        self.next = self._between()

    def _between(self) -> float:
        """Where the straight line crosses 0; every other time the middle, whatever the line says."""
        (low, a), (high, b) = self._near, self._far
        self._straight = not self._straight
        if self._straight:
            return low + (high - low) * a / (a - b)
        return (low + high) / 2
