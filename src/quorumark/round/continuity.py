"""No mark after a jump (docs/strength.md, "Continuity"): a public rule, in integers, the same for all members.

A member that helps the server can poison its own update so that units of the network die: then the next round's sum
shows the mark of their weights bare, in their own rows and in the columns of the next layer. To kill a unit in one
round it must move a row (or a bias) much further than training does. So each row, column and tap, and each plain
tensor, has a *pace*, a running average of its public moves, and a limit:

    limit = factor · max(pace, the mean pace of all rows (columns, taps) of its tensor); plain tensors: factor · pace
    pace  = ⌊(9·pace + min(move, limit))/10⌋, at least 2^-20; the first time: move

What moved beyond its limit gets no mark in the next round. If a plain tensor jumped, or more than one in 1024 of all
rows, columns and taps, the next round rests: it has no mark at all.

A row that stood still and now moves as far as its neighbours did not jump: hence the mean. A jump counts as its limit:
otherwise one jump would raise the pace so far that the next one passes. A pace grows by (9 + factor)/10 in a round at
most, 1.3 for a factor of 4, once it is above the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quorumark import field
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout

__all__ = ["Pace", "plain_moves"]

_LEAST = 1 << 20  # 2^-20: what stood still may move so far, times the factor, without a jump
_FEW = 1024  # a round rests after jumps of more than 1/1024 of all rows, columns and taps
_ONE = 1 << 32


@dataclass(frozen=True)
class Pace:
    """Running averages of moves, in 2^-40: for the rows, the columns and the taps of each carrier, in order, and one
    for each plain tensor."""

    axes: tuple[tuple[int, ...], ...] = ()
    plain: tuple[int, ...] = ()

    def after(
        self, axes: Sequence[Sequence[int]], plain: Sequence[int], factor: int
    ) -> tuple[Pace, list[list[bool]], bool]:
        """With a round's moves: the pace after it, which of the axes jumped, and whether the next round rests.

        `factor` is in 2^-32. The first round has nothing to compare with: nothing jumps in it.
        """
        if not self.axes:
            first = Pace(
                tuple(tuple(max(m, _LEAST) for m in axis) for axis in axes), tuple(max(m, _LEAST) for m in plain)
            )
            return first, [[False] * len(axis) for axis in axes], False
        limits = [[factor * max(pace, sum(paces) // len(paces)) // _ONE for pace in paces] for paces in self.axes]
        rest = [factor * pace // _ONE for pace in self.plain]
        jumped = [[move > most for move, most in zip(*pair, strict=True)] for pair in zip(axes, limits, strict=True)]
        moved = tuple(_moved_on(*three) for three in zip(self.axes, axes, limits, strict=True))
        many = sum(map(sum, jumped)) * _FEW > sum(map(len, jumped))
        rests = many or any(move > most for move, most in zip(plain, rest, strict=True))
        return Pace(moved, _moved_on(self.plain, plain, rest)), jumped, rests


def _moved_on(paces: Iterable[int], moves: Iterable[int], most: Iterable[int]) -> tuple[int, ...]:
    each = zip(paces, moves, most, strict=True)
    return tuple(max(_LEAST, (9 * pace + min(move, limit)) // 10) for pace, move, limit in each)


def plain_moves(layout: ModelLayout, now: Vector, before: Vector) -> list[int]:
    """The largest move of a number in each plain tensor: one bias can kill a unit."""
    found = []
    for _, place in layout.spans("plain"):
        empty = place.start == place.stop
        moves = None if empty else np.abs(field.to_signed(field.sub(now[place], before[place], checked=False)))
        found.append(0 if moves is None else int(moves.max()))
    return found
