"""Kernels for several numbers in one field element (`quorumark.packing`). Integers throughout, but for one rounding.

A file of its own: numba's cache watches the file that a kernel stands in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quorumark.field.kernels import (
    P,
    add64,
    add_double,
    add_scaled,
    and64,
    kernel,
    least_signed,
    load,
    max64,
    most_signed,
    move_lanes,
    shl_by,
    shr_signed_by,
    signed_lanes,
    splat,
    store,
    store_scaled,
    sub64,
)

_HALF = P // 2
_SCALE, _ROUND = 2.0**40, 1.5 * 2.0**52
_ROUND_BITS = int(np.float64(_ROUND).view(np.int64))
_MIDDLE = np.float64(3 << 33)  # 3/2 in 2^-34


@kernel
def weigh(after: Any, before: Any, factor: float, out: Any) -> None:
    """out = (after − before)·factor, as signed numbers, to nearest with ties to even."""
    for i in range(out.size):
        d = np.int64(after[i]) - np.int64(before[i])
        if d > _HALF:
            d -= P
        elif d < -_HALF:
            d += P
        out[i] = np.int64(np.rint(d * factor))


@kernel
def largest_weight(x: Any) -> Any:
    """The largest |x|, as signed numbers."""
    most = np.int64(0)
    for i in range(x.size):
        v = np.int64(x[i])
        most = max(most, P - v if v > _HALF else v)
    return most


@kernel
def move(before: Any, moves: Any, out: Any) -> None:
    """out = before + moves mod p, for signed moves below p in size."""
    for i in range(out.size):
        v = np.int64(before[i]) + moves[i]
        if v >= P:
            v -= P
        elif v < 0:
            v += P
        out[i] = np.uint64(v)


@kernel
def to_units(values: Any, shift: int) -> None:
    """values/2^shift, to nearest with ties to even, in place."""
    if shift == 0:
        return
    half, rest = np.int64(1) << (shift - 1), (np.int64(1) << shift) - 1
    for i in range(values.size):
        v = values[i]
        whole, left = v >> shift, v & rest
        values[i] = whole + np.int64(left > half or (left == half and (whole & 1) == 1))


@kernel
def size_of(values: Any) -> Any:
    """The largest |v|."""
    most = np.int64(0)
    for i in range(values.size):
        most = max(most, abs(values[i]))
    return most


@kernel
def join(parts: Any, bits: int, begin: int, out: Any) -> None:
    """out[i] = Σ_j parts[j, begin + i]·2^(j·bits) as field elements."""
    count = parts.shape[0]
    for i in range(out.size):
        total = np.int64(0)
        for j in range(count - 1, -1, -1):
            total = (total << bits) + parts[j, begin + i]
        out[i] = np.uint64(total + P if total < 0 else total)


@kernel
def pack_update(
    after: Any,
    before: Any,
    weight: float,
    noise: Any,
    stops: Any,
    scales: Any,
    bits: int,
    length: int,
    begin: int,
    end: int,
    out: Any,
) -> Any:
    """out[i] = Σ_j 2^(j·bits)·v_j as field elements for i = begin … end−1, with v_j = ((after·2^40 − before)·weight +
    noise)·scale at place j·length + i, to nearest with ties to even; places beyond the end are 0. Returns the largest
    and the least v_j.

    `after` are floats, `before` is E of others; noise[j, i − begin] is in 2^-40, or there is none. The scales of piece
    k, which ends before stops[k], are scales[k, j]. A number below 2^51 rounds to an integer where it is added to
    1.5·2^52, and that integer is the difference of the two floats' bits. Of a larger number, or none, the difference is
    2^51 or more in size, since bits of positive floats are in order, and those of negative ones are far away. Eight
    elements are made at a time, in one pass.
    """
    last, noisy = scales.shape[1] - 1, noise.size > 0
    one = np.empty(1, np.float64)
    bits_of_one = one.view(np.int64)
    nothing, offset, p = splat(np.uint64(0)), splat(np.uint64(_ROUND_BITS)), splat(np.uint64(P))
    most, least = nothing, nothing
    high, low = np.int64(0), np.int64(0)
    piece, start = 0, begin
    while start < end:
        while stops[piece] <= start:
            piece += 1
        stop = min(end, stops[piece])
        count = max(0, min(stop, after.size - last * length) - start)
        full = start + count - count % 8
        for i in range(start, full, 8):
            total = nothing
            for j in range(last, -1, -1):
                at, scale = j * length + i, scales[piece, j]
                number = move_lanes(after, at, signed_lanes(load(before, at)), weight * scale)
                if noisy:
                    number = add_scaled(number, load(noise[j], i - begin), scale)
                v = sub64(add_double(number, _ROUND), offset)
                most, least = most_signed(most, v), least_signed(least, v)
                total = add64(shl_by(total, bits), v)
            store(out, i, add64(total, and64(shr_signed_by(total, 63), p)))
        for i in range(full, stop):
            whole = np.int64(0)
            for j in range(last, -1, -1):
                at, scale = j * length + i, scales[piece, j]
                whole <<= bits
                if at >= after.size:
                    continue
                b = np.int64(before[at])
                b -= P if b > _HALF else 0
                one[0] = (np.float64(after[at]) * _SCALE - np.float64(b)) * (weight * scale)
                if noisy:
                    one[0] += noise[j, i - begin] * scale
                one[0] += _ROUND
                v_of_one = bits_of_one[0] - _ROUND_BITS
                whole += v_of_one
                high, low = max(high, v_of_one), min(low, v_of_one)
            out[i] = np.uint64(whole + P if whole < 0 else whole)
        start = stop
    found = np.zeros(16, np.uint64)
    store(found, 0, most)
    store(found, 8, least)
    sizes = found.view(np.int64)
    return max(high, sizes[:8].max()), min(low, sizes[8:].min())


@kernel
def dither(words: Any, scales: Any, factor: float, out: Any) -> None:
    """out[i] = round(g·scales[i]·factor) with g = u_1 + u_2 + u_3 − 3/2 in 2^-34, from 34, 15 and 15 bits of words[i]
    from the top down (`quorumark.round.dither`). `out` may be the words' own memory."""
    for i in range(out.size):
        w = words[i]
        total = (w >> np.uint64(30)) + ((w & np.uint64(0x7FFF)) << np.uint64(19))
        total += ((w >> np.uint64(15)) & np.uint64(0x7FFF)) << np.uint64(19)
        g = np.float64(np.int64(total)) - _MIDDLE
        out[i] = np.int64(np.rint(g * (np.float64(scales[i]) * factor)))


@kernel
def move_by_parts(
    elements: Any,
    before: Any,
    stops: Any,
    shifts: Any,
    bits: int,
    length: int,
    begin: int,
    end: int,
    scale: float,
    out: Any,
) -> Any:
    """out = (before + v·2^shift)·scale in out's own precision, for the parts v of elements[begin:end], as `split` reads
    them: part j of element i is at place j·length + i, and its shift is shifts[k, j] in piece k, which ends before
    stops[k]. Returns the largest of the highest parts (all others are below 2^(bits−1)) and the least part, whether a
    place beyond the end has a number, and whether an element is p or more. With a power of two for the scale there is
    one rounding. Eight elements are read at a time: LLVM alone makes it take almost twice as long."""
    last = shifts.shape[1] - 1
    half, rest = np.int64(1) << (bits - 1), (np.int64(1) << bits) - 1
    halves, rests = splat(np.uint64(half)), splat(np.uint64(rest))
    most, above, below = splat(np.uint64(0)), splat(np.uint64(0)), splat(np.uint64(0))
    high, low, beyond, largest = np.int64(0), np.int64(0), np.int64(0), np.uint64(0)
    piece, start = 0, begin
    while start < end:
        while stops[piece] <= start:
            piece += 1
        stop = min(end, stops[piece])
        count = max(0, min(stop, out.size - last * length) - start)
        full = start + count - count % 8
        for i in range(start, full, 8):
            element = load(elements, i)
            most = max64(most, element)
            left = signed_lanes(element)
            for j in range(last):
                v = sub64(and64(add64(left, halves), rests), halves)
                left = shr_signed_by(sub64(left, v), bits)
                below = least_signed(below, v)
                n = add64(signed_lanes(load(before, j * length + i)), shl_by(v, shifts[piece, j]))
                store_scaled(out, j * length + i, n, scale)
            above, below = most_signed(above, left), least_signed(below, left)
            n = add64(signed_lanes(load(before, last * length + i)), shl_by(left, shifts[piece, last]))
            store_scaled(out, last * length + i, n, scale)
        for i in range(full, stop):
            largest = max(largest, elements[i])
            rest_of = np.int64(elements[i])
            rest_of -= P if rest_of > _HALF else 0
            for j in range(last + 1):
                part, place = rest_of, j * length + i
                if j < last:
                    part = ((rest_of + half) & rest) - half
                    rest_of = (rest_of - part) >> bits
                else:
                    high = max(high, part)
                low = min(low, part)
                if place >= out.size:
                    beyond |= part
                    continue
                old = np.int64(before[place])
                out[place] = old + (part << shifts[piece, j]) - (P if old > _HALF else 0)
                out[place] *= scale
        start = stop
    found = np.zeros(24, np.uint64)
    store(found, 0, most)
    store(found, 8, above)
    store(found, 16, below)
    parts = found.view(np.int64)
    high, low = max(high, parts[8:16].max()), min(low, parts[16:24].min())
    return high, low, beyond != 0, max(largest, found[:8].max()) >= np.uint64(P)


@kernel
def split(elements: Any, bits: int, begin: int, parts: Any) -> None:
    """The parts of each element, from the lowest up, each as a signed remainder; the last one is what is left."""
    count = parts.shape[0]
    half, rest = np.int64(1) << (bits - 1), (np.int64(1) << bits) - 1
    for i in range(elements.size):
        left = np.int64(elements[i])
        if left > _HALF:
            left -= P
        for j in range(count - 1):
            v = ((left + half) & rest) - half
            parts[j, begin + i] = v
            left = (left - v) >> bits
        parts[count - 1, begin + i] = left
