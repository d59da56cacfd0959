"""No mark after a jump (docs/strength.md, "Continuity"): a public rule, in integers, the same for all members.

A member that helps the server can poison its own update so that units of the network die: then the next round's sum
shows the mark of their weights bare, in their own rows and in the columns of the next layer. To kill a unit in one
round it must move a row (or a bias) much further than training does. So each row, column and tap, and each plain
tensor, has a *pace*, a running average of its public moves. What moved by more than `factor` times its pace gets no
mark in the next round. If a plain tensor jumped, or more than one in 1024 of all rows, columns and taps, the next round
rests: it has no mark at all.

    pace = ⌊(9·pace + min(move, factor·pace))/10⌋, at least 2^-20; the first time: move

A jump counts as `factor` times the pace at most: otherwise one jump would raise the pace so far that the next one
passes. A pace grows by (9 + factor)/10 in a round at most, 1.3 for a factor of 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quorumark import field
from quorumark.field import Vector
from quorumark.layout import ModelLayout

__all__ = ["Pace", "plain_moves"]

_LEAST = 1 << 20  # 2^-20: what stood still may move so far, times the factor, without a jump
_FEW = 1024  # a round rests after jumps of more than 1/1024 of all rows, columns and taps
_ONE = 1 << 32


@dataclass(frozen=True)
class Pace:
    """Running averages of moves, in 2^-40: one for each row, column and tap in order, and one for each plain tensor."""

    axes: tuple[int, ...] = ()
    plain: tuple[int, ...] = ()

    def after(self, axes: Iterable[int], plain: Iterable[int], factor: int) -> tuple[Pace, list[bool], bool]:
        """With a round's moves: the pace after it, which of the axes jumped, and whether the next round rests.

        `factor` is in 2^-32. The first round has nothing to compare with: nothing jumps in it.
        """
        moves, others = list(axes), list(plain)
        if not self.axes:
            first = Pace(tuple(max(m, _LEAST) for m in moves), tuple(max(m, _LEAST) for m in others))
            return first, [False] * len(moves), False
        most, rest = ([pace * factor // _ONE for pace in paces] for paces in (self.axes, self.plain))
        jumped = [move > limit for move, limit in zip(moves, most, strict=True)]
        rests = any(move > limit for move, limit in zip(others, rest, strict=True)) or sum(jumped) * _FEW > len(jumped)
        return Pace(_moved_on(self.axes, moves, most), _moved_on(self.plain, others, rest)), jumped, rests


def _moved_on(paces: Iterable[int], moves: Iterable[int], most: Iterable[int]) -> tuple[int, ...]:
    each = zip(paces, moves, most, strict=True)
    return tuple(max(_LEAST, (9 * pace + min(move, limit)) // 10) for pace, move, limit in each)


def plain_moves(layout: ModelLayout, now: Vector, before: Vector) -> list[int]:
    """The largest move of a number in each plain tensor: one bias can kill a unit."""
    found = []
    for _, place in layout.spans("plain"):
        moves = field.to_signed(field.sub(now[place], before[place], checked=False)) if place.stop > place.start else []
        found.append(int(np.abs(moves).max()) if len(moves) else 0)
    return found
