"""Several numbers in one field element (docs/secagg.md, "Packed sums").

A vector of n numbers, in units that fit, is cut into q rows of M = ⌈n/q⌉ (the last one is filled up with zeros), and
element m holds one number of each row:

    y_m = Σ_i 2^(i·h)·v_{i·M+m}     h = 30 for q = 2, 20 for q = 3, 15 for q = 4

Sums of such elements are the elements of the sums as long as each sum stays within ±(2^(h−1) − 1): the parts are read
from the lowest up, each as a signed remainder mod 2^h. Σ 2^(i·h)·(2^(h−1) − 1) < 2^59 < p/2, so nothing wraps.

Numbers come as integers of 2^-40, as `quorumark.codec` has them, and their units are 2^shift of that, one shift for
each *span* of the vector (a tensor). Rounding to units is to nearest, with ties to even.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.errors import EncodingError, InputError
from quorumark.field import Vector, parallel, parts

__all__ = [
    "BITS",
    "Span",
    "elements",
    "largest_move",
    "largest_weight",
    "move",
    "pack",
    "pack_update",
    "unpack",
    "weighted_moves",
]

BITS = {1: 60, 2: 30, 3: 20, 4: 15}
"""h by how many numbers an element has; 1 is not packed."""

Span = tuple[slice, int]
"""A part of the vector, and the shift of its units."""

Moves = NDArray[np.int64]


def elements(size: int, count: int) -> int:
    """M: how many elements hold `size` numbers, `count` in each."""
    _check_count(count)
    return -(-size // count)


def weighted_moves(after: Vector, before: Vector, weight: float) -> Moves:
    """weight·(after − before) in integers of 2^-40, from E of both."""
    out = np.empty(after.size, np.int64)
    parallel.spread(lambda b, e: parts.weigh(after[b:e], before[b:e], weight, out[b:e]), after.size)
    return out


def move(before: Vector, moves: Moves) -> Vector:
    """before + moves, for E of a model and integers of 2^-40."""
    out = np.empty_like(before)
    parallel.spread(lambda b, e: parts.move(before[b:e], moves[b:e], out[b:e]), before.size)
    return out


def largest_move(after: Vector, before: Vector) -> int:
    """The largest |after − before|, in 2^-40; 0 for nothing."""
    if not after.size:
        return 0
    return _most(parallel.spread(lambda b, e: parts.largest(after[b:e], before[b:e]), after.size))


def largest_weight(x: Vector) -> int:
    """The largest |x|, in 2^-40; 0 for nothing."""
    if not x.size:
        return 0
    return _most(parallel.spread(lambda b, e: parts.largest_weight(x[b:e]), x.size))


def pack(moves: Moves, spans: Iterable[Span], count: int, out: Vector | None = None) -> Vector:
    """Integers of 2^-40, rounded to their spans' units, `count` in an element. `moves` is changed.

    A number of 2^(h−1) units or more is refused: it would wrap, and change its neighbour.
    """
    length = elements(moves.size, count)
    most = (1 << (BITS[count] - 1)) - 1
    rows = np.zeros(count * length, np.int64)
    for place, shift in spans:
        part = rows[place]
        part[:] = moves[place]
        parallel.spread(lambda b, e, p=part, s=shift: parts.to_units(p[b:e], s), part.size)  # type: ignore[misc]
        if part.size and _size_of(part) > most:
            where = place.start + int(np.flatnonzero(np.abs(part) > most)[0])
            rule = f"must be below 2^{BITS[count] - 1} units to be packed {count} in an element"
            raise EncodingError("an update", rule, f"{rows[where]} units at index {where}", where)
    table = rows.reshape(count, length)
    target = np.empty(length, np.uint64) if out is None else out
    field.check_output(target, (length,))
    parallel.spread(lambda b, e: parts.join(table, BITS[count], b, target[b:e]), length)
    return target


def pack_update(
    after: NDArray[Any],
    before: Vector,
    weight: float,
    spans: Sequence[Span],
    count: int,
    out: Vector | None = None,
    *,
    noise: Moves | None = None,
) -> Vector:
    """weight·(E(after) − before) + noise, in one pass: a member's weighted update, from the floats that it trained and
    E of the model that it started from, packed in the units of its spans. `noise` is in 2^-40."""
    length, bits = elements(after.size, count), BITS[count]
    target = np.empty(length, np.uint64) if out is None else out
    field.check_output(target, (length,))
    extra = np.empty(0, np.int64) if noise is None else noise
    # pieces of the elements in each of which every row has one unit
    cuts = {0, length, *(place.start % length for place, _ in spans), *(place.stop % length for place, _ in spans)}
    ordered = sorted(cuts)
    for begin, end in pairwise(ordered):
        scales = np.array([2.0 ** -_shift_at(spans, row * length + begin) for row in range(count)])
        found = parallel.spread(
            lambda b, e, s=begin, k=scales: parts.pack_update(  # type: ignore[misc]
                after, before, weight, extra, k, bits, length, s + b, target[s + b : s + e]
            ),
            end - begin,
            smallest=parallel.SMALLEST_PART // count,
        )
        if _most(found) >= 1 << (bits - 1):
            rule = f"must be below 2^{bits - 1} units to be packed {count} in an element"
            raise EncodingError("an update", rule, "a larger one", begin)
    return target


def _shift_at(spans: Sequence[Span], place: int) -> int:
    return next((shift for where, shift in spans if where.start <= place < where.stop), 0)


def unpack(packed: Vector, size: int, spans: Iterable[Span], count: int) -> tuple[Moves, list[bool]]:
    """The numbers in integers of 2^-40, and for each span whether all of its elements can be sums of what members may
    send. One that has a part out of range, or a number where there is none, says nothing about its other parts."""
    length = elements(size, count)
    if packed.shape != (length,):
        raise InputError("packed", f"must have {length} elements", packed.shape)
    field.check(packed, "packed")
    most = (1 << (BITS[count] - 1)) - 1
    table = np.empty((count, length), np.int64)
    found = parallel.spread(lambda b, e: parts.split(packed[b:e], BITS[count], b, table), length)
    moves, beyond = table.reshape(-1)[:size], table.reshape(-1)[size:]
    wrong: NDArray[np.bool_] = np.zeros(0, np.bool_)
    if beyond.any() or (length and _most(found) > most):
        wrong = np.any(np.abs(table) > most, axis=0)
        wrong[(size + np.flatnonzero(beyond)) % length] = True
    fits = []
    for place, shift in spans:
        fits.append(not wrong.size or not wrong[np.arange(place.start, place.stop) % length].any())
        moves[place] <<= shift
    return moves, fits


def _size_of(part: Moves) -> int:
    return _most(parallel.spread(lambda b, e: parts.size_of(part[b:e]), part.size))


def _most(found: Iterable[Any]) -> int:
    return max(int(most) for most in found)


def _check_count(count: int) -> None:
    if count not in BITS or isinstance(count, bool):
        raise InputError("count", f"must be one of {', '.join(map(str, BITS))}", repr(count))
