"""In which units members send their updates (docs/secagg.md, "Packed sums"): public, a function of the state.

Each tensor has units of 2^shift · 2^-40. They follow from its *reach*, the largest public move of a weight in the last
rounds: with h bits for a number, members' own updates may be 2^margin times the reach, or more. Members' updates are
larger than their average, by about √K; how much larger, the *lift* of each tensor learns.

    reach   = max(the largest move in the last round, a quarter of the reach before, 2^-14 of the largest weight, 2^-20)
              at first: an eighth of the largest weight, at least 2^-6
    2^shift ≥ reach·2^(margin + lift + step·level)/2^(h−2)

A *level* widens the units of a tensor for one round: with *ready* each member says, signed, the levels that its update
needs, none unless it is larger than expected, and the round has the largest ones of its members. So an update that is
larger than the units allow costs no training and no attempt. After it the lift is what the reach did not tell, at most
5 bits; it falls by half a bit a round. (One false level then blurs one round, and not those after it.)

Nobody can see whether a level is needed. So what fewer members need than could stop the round by staying away widens
units, lift included, by 12, 9 or 8 bits at most for two, three or four numbers in an element, and whose update does not
fit even then is left out of the round: a unit stays below a quarter of the reach, whatever these few say.

A member's own numbers stay within R = 3·2^(h−3) − K/2 − 1 units, before they are weighted; rounding adds K/2 at most
to a sum, and mark and dither together 2^(h−3) at most, since the mark is limited to that. So every sum is below
2^(h−1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from quorumark.consortium.strength import KEY_BITS, ONE, Strength
from quorumark.errors import MessageError, RoundError
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.packing import BITS, Span, elements, largest_moves, largest_weight

__all__ = ["LEVELS", "Packing", "are_possible", "first_reach", "follow_lift", "follow_reach", "is_level", "widest"]

LEVELS = 8
"""Of units (`round.units`), from 0 on. A level is a byte for each tensor; no bytes if all are 0."""

_MOST_TENSORS = 1 << 18
_MARGIN = {2: 6, 3: 4, 4: 2}
_STEP = {2: 4, 3: 3, 4: 2}
_HALVES = 2  # a lift is in halves of a bit
_HIGHEST_LIFT = 5 * _HALVES
_ALONE = {2: 12, 3: 9, 4: 8}  # bits that a few members may widen units by
_LEAST, _FIRST = 1 << 20, 1 << 34  # 2^-20 and 2^-6, in 2^-40
_RANGE = 58  # bits of the largest number of 2^-40 that units are for: 2^18, a half of what weights may be
_TAILS = 4  # bits: no value of a Gaussian key is above 16


def is_level(level: object) -> bool:
    """Whether these bytes are a level, in its one spelling."""
    if not isinstance(level, bytes) or len(level) > _MOST_TENSORS:
        return False
    return not level or 0 < max(level) < LEVELS


def are_possible(reach: Sequence[int], lift: Sequence[int]) -> bool:
    """Whether a state may hold these: a server that could name others would have members compute without end."""
    return all(n < 1 << 61 for n in reach) and all(n <= _HIGHEST_LIFT for n in lift)


def widest(levels: Iterable[bytes]) -> bytes:
    """The level of a round from those that its members need: the largest of each tensor."""
    needed = [level for level in levels if level]
    if len({len(level) for level in needed}) > 1:
        raise MessageError("members' levels of units are for models of several sizes", code="message.malformed")
    return bytes(map(max, zip(*needed, strict=True))) if needed else b""


@dataclass(frozen=True)
class Packing:
    """How many numbers an element holds, and of how many members there may be a sum."""

    count: int = 1
    members: int = 0

    @property
    def packs(self) -> bool:
        return self.count > 1

    @property
    def own_limit(self) -> int:
        """R: a member's own numbers are at most this, in units, before they are weighted."""
        return 3 * (1 << (BITS[self.count] - 3)) - (self.members + 1) // 2 - 1

    def length(self, layout: ModelLayout) -> int:
        """Elements that hold a model."""
        return elements(layout.size, self.count)

    def spans(self, layout: ModelLayout, reach: Sequence[int], lift: Sequence[int], level: bytes = b"") -> list[Span]:
        """Each tensor's place, and the shift of its units. No lift and no level are 0 for each."""
        bits, found = BITS[self.count], []
        for i, (_, place) in enumerate(layout.spans()):
            wide = _MARGIN[self.count] + (lift[i] // _HALVES if lift else 0)
            wide += _STEP[self.count] * level[i] if level else 0
            needed = ((reach[i] << wide) - 1).bit_length() - (bits - 2)
            found.append((place, max(0, min(needed, _RANGE - bits + 1))))
        return found

    def largest_mark(self, strength: Strength, key: str) -> int:
        """The largest amplitude, in units: with its dither, of K members, it stays within 2^(h−3)."""
        noise = -(-3 * strength.dither * (isqrt(self.members) + 1) // ONE)
        tails = _TAILS if KEY_BITS[key] else 0
        return (1 << (BITS[self.count] - 3)) // ((1 << tails) + noise)

    def level(self, moved: Sequence[int], spans_at: Callable[[bytes], list[Span]]) -> bytes:
        """The least levels in whose units a member's own update fits, from its largest move in each tensor; `spans_at`
        gives the spans at a level."""
        needed: list[int | None] = [None] * len(moved)
        for number in range(LEVELS):
            level = bytes([number] * len(moved)) if number else b""
            for i, (most, (_, shift)) in enumerate(zip(moved, spans_at(level), strict=True)):
                if needed[i] is None and most <= self.own_limit << shift:
                    needed[i] = number
            if None not in needed:
                found = bytes(number or 0 for number in needed)
                return found if any(found) else b""
        raise RoundError(
            "this member's update is larger than the widest units of a packed round allow: train with a lower "
            "learning rate, or let all members sign packing=1 (quorumark consortium amend --policy packing=1)",
            code="round.does-not-fit",
        )

    def unbacked(self, levels: Mapping[int, bytes], lift: Sequence[int], backing: int) -> set[int]:
        """Of these members those whose level is more than fewer than `backing` of them may ask for."""
        left = {x: np.frombuffer(level, np.uint8) for x, level in levels.items() if level}
        if not self.packs or not left:
            return set()
        tensors = len(next(iter(left.values())))
        lifted = np.array(lift or [0] * tensors) // _HALVES
        alone = np.maximum(0, _ALONE[self.count] - lifted) // _STEP[self.count]
        while left:
            table = np.stack(list(left.values()))
            backed = np.sort(table, axis=0)[-backing] if len(left) >= backing else np.zeros(tensors, np.uint8)
            over = (table > np.maximum(alone, backed + 1)).any(axis=1)
            if not over.any():
                break
            left = {x: level for (x, level), out in zip(left.items(), over, strict=True) if not out}
        return {x for x, level in levels.items() if level and x not in left}


def first_reach(layout: ModelLayout, model: Vector) -> tuple[int, ...]:
    """Before anything moved."""
    return tuple(max(largest_weight(model[place]) >> 3, _FIRST) for _, place in layout.spans())


def follow_reach(layout: ModelLayout, reach: Sequence[int], model: Vector, before: Vector) -> tuple[int, ...]:
    """After a round; `reach` is empty before the first one."""
    places = [place for _, place in layout.spans()]
    moved, found = largest_moves(model, before, places), []
    for i, place in enumerate(places):
        least = max(_LEAST, largest_weight(model[place]) >> 14, reach[i] >> 2 if reach else 0)
        found.append(max(least, moved[i]))
    return tuple(found)


def follow_lift(
    count: int, lift: Sequence[int], level: bytes, used: Sequence[Span], reach: Sequence[int]
) -> tuple[int, ...]:
    """After a round of this level, whose units were `used`; `reach` is the one after it. Empty if there is no lift."""
    found = []
    for i, (_, shift) in enumerate(used):
        old = max(0, lift[i] - 1) if lift else 0
        told = (reach[i] - 1).bit_length() + _MARGIN[count] - (BITS[count] - 2)  # the shift without any lift
        found.append(min(_HIGHEST_LIFT, max(old, _HALVES * (shift - told))) if level and level[i] else old)
    return tuple(found) if any(found) else ()
