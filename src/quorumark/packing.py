"""Several numbers in one field element (docs/secagg.md, "Packed sums").

A vector of n numbers, in units that fit, is cut into q rows of M = ⌈n/q⌉ (the last one is filled up with zeros), and
element m holds one number of each row:

    y_m = Σ_i 2^(i·h)·v_{i·M+m}     h = 30 for q = 2, 20 for q = 3, 15 for q = 4

Sums of such elements are the elements of the sums as long as each sum stays within ±(2^(h−1) − 1): the parts are read
from the lowest up, each as a signed remainder mod 2^h. Σ 2^(i·h)·(2^(h−1) − 1) < 2^59 < p/2, so nothing wraps.

`pack_update` and `unpack_onto` take CUDA tensors as well, with field elements as int64, and give the same bits.

Numbers come as integers of 2^-40, as `quorumark.codec` has them, and their units are 2^shift of that, one shift for
each *span* of the vector (a tensor). Rounding to units is to nearest, with ties to even.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from quorumark import field
from quorumark.errors import EncodingError, InputError
from quorumark.field import Vector, norms, parallel, parts

__all__ = [
    "BITS",
    "Noise",
    "Span",
    "elements",
    "largest_moves",
    "largest_weight",
    "move",
    "pack",
    "pack_update",
    "unpack",
    "unpack_onto",
    "weighted_moves",
]

BITS = {1: 60, 2: 30, 3: 20, 4: 15}
"""h by how many numbers an element has; 1 is not packed."""

Span = tuple[slice, int]
"""A part of the vector, and the shift of its units."""

Moves = NDArray[np.int64]
Noise = Callable[[int, Moves], bool]
"""Writes what is added to the numbers from a place on, in 2^-40; False, with nothing written, where there is none."""

_TOGETHER = 1 << 15  # elements whose noise is made at a time: it stays in the second-level cache


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


def largest_moves(after: NDArray[Any], before: Vector, spans: Iterable[slice]) -> list[int]:
    """The largest |E(after) − before| of each span, in 2^-40, 0 for an empty one; `after` are floats below 2^19 in size
    or E of them already. Spans follow each other from the first place on, and leave none out."""
    stops = np.array([place.stop for place in spans], np.int64)
    if not stops.size or not after.size:
        return [0] * stops.size

    def part(begin: int, end: int) -> NDArray[np.uint64]:
        most = np.zeros(stops.size, np.uint64)
        norms.largest_moves(after, before, stops, begin, end, most)
        return most

    found: list[Any] = parallel.spread(part, after.size)
    return [int(most) for most in np.max(found, axis=0)]


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
    noise: Noise | Moves | None = None,
) -> Vector:
    """weight·(E(after) − before) + noise, in one pass: a member's weighted update, from the floats that it trained and
    E of the model that it started from, packed in the units of its spans. `noise` is in 2^-40: a vector, or on the CPU
    a function that makes it piece by piece."""
    if field.on_cuda(before):
        return _packed_on_device(after, before, weight, spans, count, out, noise)
    length, bits = elements(after.size, count), BITS[count]
    target = np.empty(length, np.uint64) if out is None else out
    field.check_output(target, (length,))
    stops, shifts = _pieces(spans, count, length)
    scales, add = 2.0**-shifts, _writer(noise) if isinstance(noise, np.ndarray) else noise
    told = after, before, weight

    def part(begin: int, end: int) -> list[tuple[int, int]]:
        step = end - begin if add is None else _TOGETHER
        rows = np.zeros((0, 0) if add is None else (count, min(step, end - begin)), np.int64)
        found = []
        for start in range(begin, end, step):
            stop = min(start + step, end)
            noisy = add is not None and _fill(add, rows, start, stop, length, after.size)
            extra = rows if noisy else rows[:0]
            found.append(parts.pack_update(*told, extra, stops, scales, bits, length, start, stop, target))
        return found

    for found in parallel.spread(part, length, smallest=parallel.SMALLEST_PART // count):
        if _outermost(found) >= 1 << (bits - 1):  # type: ignore[arg-type]
            raise _too_large(count, 0)
    return target


def _fill(add: Noise, rows: Moves, start: int, stop: int, length: int, size: int) -> bool:
    """The noise of elements start … stop−1, a row for each of their parts; whether there is any."""
    found = False
    for j, row in enumerate(rows):
        first = j * length + start
        here = row[: max(0, min(stop - start, size - first))]
        if here.size and add(first, here):
            found = True
        else:
            here[:] = 0
    return found


def _writer(noise: Moves) -> Noise:
    def write(start: int, out: Moves) -> bool:
        out[:] = noise[start : start + out.size]
        return True

    return write


def _packed_on_device(
    after: Any, before: Any, weight: float, spans: Sequence[Span], count: int, out: Any, noise: Any
) -> Vector:
    from quorumark.field import parts_on_device  # imported only when a CUDA tensor comes in

    _check_count(count)
    field.check(before, "before")
    made: Any
    made, fits = parts_on_device.pack_update(after, before, weight, spans, BITS[count], count, noise)
    if not fits:
        raise _too_large(count, 0)
    found: Vector = made if out is None else out.copy_(made)
    return found


def _too_large(count: int, where: int) -> EncodingError:
    rule = f"must be below 2^{BITS[count] - 1} units to be packed {count} in an element"
    return EncodingError("an update", rule, "a larger one", where)


def unpack(packed: Vector, size: int, spans: Sequence[Span], count: int) -> tuple[Moves, list[bool]]:
    """The numbers in integers of 2^-40, and for each span whether all of its elements can be sums of what members may
    send. One that has a part out of range, or a number where there is none, says nothing about its other parts."""
    table = _table(packed, size, count)
    moves, fits = table.reshape(-1)[:size], _fits(table, size, spans)
    for place, shift in spans:
        moves[place] <<= shift
    return moves, fits


def unpack_onto(
    before: Vector, packed: Vector, spans: Sequence[Span], count: int, dtype: DTypeLike = np.float32
) -> tuple[NDArray[Any], list[bool]]:
    """The floats that `before`, E of a model, becomes with the numbers of a packed sum, in one pass, rounded once; and
    what `unpack` says of each span. A number that does not fit counts all the same."""
    if field.on_cuda(before):
        return _unpacked_on_device(before, packed, spans, count, dtype)
    length, bits = elements(before.size, count), BITS[count]
    kind: np.dtype[Any] = np.dtype(dtype)
    if packed.dtype != np.uint64:
        field.check(packed, "packed")  # says what is wrong; the range is checked on the way
    _check_length(packed, length)
    if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise InputError("dtype", "must be float32 or float64", kind)
    out, scale = np.empty(before.size, kind), 2.0**-40
    stops, shifts = _pieces(spans, count, length)
    found: list[Any] = parallel.spread(
        lambda b, e: parts.move_by_parts(packed, before, stops, shifts, bits, length, b, e, scale, out),
        length,
        smallest=parallel.SMALLEST_PART // count,
    )
    if any(one[3] for one in found):
        field.check(packed, "packed")
    fine = _outermost(found) < 1 << (bits - 1) and not any(one[2] for one in found)
    return out, [True] * len(spans) if fine else _fits(_table(packed, before.size, count), before.size, spans)


def _unpacked_on_device(
    before: Any, packed: Any, spans: Sequence[Span], count: int, dtype: DTypeLike
) -> tuple[Any, list[bool]]:
    from quorumark.field import parts_on_device

    field.check(before, "before")
    field.check(packed, "packed")
    if packed.shape != (elements(before.numel(), count),):
        raise InputError("packed", f"must have {elements(before.numel(), count)} elements", tuple(packed.shape))
    return parts_on_device.move_by_parts(packed, before, spans, BITS[count], count, np.dtype(dtype).name)


def _pieces(spans: Sequence[Span], count: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pieces of the elements in each of which every part has one unit: where they end, and the shifts of these."""
    cuts = {0, length, *(place.start % length for place, _ in spans), *(place.stop % length for place, _ in spans)}
    starts, table = [place.start for place, _ in spans], []
    stops = sorted(cuts)[1:]
    for begin, _ in pairwise(sorted(cuts)):
        found = (bisect_right(starts, row * length + begin) - 1 for row in range(count))
        table.append([spans[i][1] if i >= 0 else 0 for i in found])
    return np.array(stops, np.int64), np.array(table, np.int64)


def _table(packed: Vector, size: int, count: int) -> Moves:
    """The parts of all elements, in units: a row for each place in an element."""
    length = elements(size, count)
    _check_packed(packed, length)
    table = np.empty((count, length), np.int64)
    parallel.spread(lambda b, e: parts.split(packed[b:e], BITS[count], b, table), length)
    return table


def _check_packed(packed: Vector, length: int) -> None:
    _check_length(packed, length)
    field.check(packed, "packed")


def _check_length(packed: Vector, length: int) -> None:
    if packed.shape != (length,):
        raise InputError("packed", f"must have {length} elements", packed.shape)


def _fits(table: Moves, size: int, spans: Sequence[Span]) -> list[bool]:
    count, length = table.shape
    wrong = np.any(np.abs(table) >= 1 << (BITS[count] - 1), axis=0)
    beyond = table.reshape(-1)[size:]
    wrong[(size + np.flatnonzero(beyond)) % length] = True
    if not wrong.any():
        return [True] * len(spans)
    return [not wrong[np.arange(place.start, place.stop) % length].any() for place, _ in spans]


def _size_of(part: Moves) -> int:
    return _most(parallel.spread(lambda b, e: parts.size_of(part[b:e]), part.size))


def _most(found: Iterable[Any]) -> int:
    return max(int(most) for most in found)


def _outermost(found: Iterable[Any]) -> int:
    """The largest size among pairs of a largest and a least number."""
    return max(max(int(high), -int(low)) for high, low, *_ in found)


def _check_count(count: int) -> None:
    if count not in BITS or isinstance(count, bool):
        raise InputError("count", f"must be one of {', '.join(map(str, BITS))}", repr(count))
