"""Kernels for how far a model moved: the largest moves, and sums of squares along rows and columns.

A file of its own: numba's cache watches the file that a kernel stands in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quorumark.field.kernels import (
    add64,
    inlined,
    kernel,
    load,
    load_encoded,
    low32,
    max64,
    min64,
    mul32,
    p_minus,
    shl1,
    shr32,
    splat,
    store,
    submod,
    unit_lanes,
)

__all__ = ["PARTS", "largest_moves", "update_squares"]

PARTS = 4
"""Words of a sum: Σ_k part_k·2^(32·k)."""

_COLUMNS = 2048  # columns worked on at a time: their sums stay near


@inlined
def _moved(after: Any, before: Any, at: int) -> Any:
    """E(after) − before at eight places, as field elements."""
    return submod(load_encoded(after, at), load(before, at))


@inlined
def _moved_tail(after: Any, before: Any, at: int, count: int) -> Any:
    """The same at fewer than eight places; 0 beyond them."""
    x, y = np.zeros(8, after.dtype), np.zeros(8, np.uint64)
    for i in range(count):
        x[i], y[i] = after[at + i], before[at + i]
    return submod(load_encoded(x, 0), load(y, 0))


@inlined
def _size(x: Any) -> Any:
    """|v| for the signed v that x stands for."""
    return min64(x, p_minus(x))


@kernel
def largest_moves(after: Any, before: Any, stops: Any, begin: int, end: int, most: Any) -> None:
    """most[i] = the largest |E(after) − before| of the places from `begin` to `end` that belong to span i, which ends
    before stops[i]. `after` are floats, or E of them already."""
    buffer, i, start = np.zeros(8, np.uint64), 0, begin
    while i < stops.size and stops[i] <= begin:
        i += 1
    while start < end:
        stop = min(end, stops[i])
        full = stop - (stop - start) % 8
        best = splat(np.uint64(0))
        for at in range(start, full, 8):
            best = max64(best, _size(_moved(after, before, at)))
        if full < stop:
            best = max64(best, _size(_moved_tail(after, before, full, stop - full)))
        store(buffer, 0, best)
        most[i] = buffer.max()
        start = stop
        i += 1


@inlined
def _sum_squares(
    sizes: Any, count: int, most: Any, buffer: Any, by_row: Any, row: int, by_column: Any, first: int, stride: int
) -> None:
    """Squares of numbers below 2^60 into the sums of a row and of its columns.

    v² = s0 + s1·2^32 + s2·2^64 + s3·2^96, each part below 2^33: 2^31 of them add up in a word. Of numbers below 2^32
    only the first two are not 0.
    """
    zero = splat(np.uint64(0))
    r0, r1, r2, r3 = zero, zero, zero, zero
    store(buffer, 0, most)
    small = buffer.max() < np.uint64(1 << 32)
    if small:
        for j in range(0, count, 8):
            v, at = load(sizes, j), first + j
            square = mul32(v, v)
            p0, p1 = low32(square), shr32(square)
            r0, r1 = add64(r0, p0), add64(r1, p1)
            store(by_column, at, add64(load(by_column, at), p0))
            store(by_column, at + stride, add64(load(by_column, at + stride), p1))
    else:
        for j in range(0, count, 8):
            v, at = load(sizes, j), first + j
            h, low = shr32(v), low32(v)
            ll, mid = mul32(low, low), shl1(mul32(low, h))
            top = add64(mul32(h, h), shr32(mid))
            p0, p1, p2, p3 = low32(ll), add64(shr32(ll), low32(mid)), low32(top), shr32(top)
            r0, r1, r2, r3 = add64(r0, p0), add64(r1, p1), add64(r2, p2), add64(r3, p3)
            store(by_column, at, add64(load(by_column, at), p0))
            store(by_column, at + stride, add64(load(by_column, at + stride), p1))
            store(by_column, at + 2 * stride, add64(load(by_column, at + 2 * stride), p2))
            store(by_column, at + 3 * stride, add64(load(by_column, at + 3 * stride), p3))
        _add_lanes(by_row, row + 2, r2, buffer)
        _add_lanes(by_row, row + 3, r3, buffer)
    _add_lanes(by_row, row, r0, buffer)
    _add_lanes(by_row, row + 1, r1, buffer)


@inlined
def _add_lanes(sums: Any, at: int, x: Any, buffer: Any) -> None:
    store(buffer, 0, x)
    for lane in range(8):
        sums[at] += buffer[lane]


@kernel
def update_squares(
    after: Any, before: Any, width: int, weight: float, scale: float, by_row: Any, by_column: Any
) -> None:
    """Σ v² along each row and each column of matrices with `width` columns, where v is D = E(after) − before if `scale`
    is 0, else round(round(weight·D)·scale), both to nearest with ties to even. `after` are floats, or E of them.

    by_row[rows, PARTS] and by_column[PARTS, stride], flat, zero at first, stride = width rounded up to a multiple of
    8. Exact for up to 2^31 numbers below 2^60.
    """
    rows, stride = after.size // width, by_column.size // PARTS
    sizes, buffer = np.zeros(_COLUMNS, np.uint64), np.zeros(8, np.uint64)
    for first in range(0, width, _COLUMNS):
        count = min(_COLUMNS, width - first)
        full = count - count % 8
        for i in range(rows):
            at, most = i * width + first, splat(np.uint64(0))
            if scale == 0:
                for j in range(0, full, 8):
                    v = _size(_moved(after, before, at + j))
                    most = max64(most, v)
                    store(sizes, j, v)
            else:
                for j in range(0, full, 8):
                    v = unit_lanes(_moved(after, before, at + j), weight, scale)
                    most = max64(most, v)
                    store(sizes, j, v)
            if full < count:
                d = _moved_tail(after, before, at + full, count - full)
                v = _size(d) if scale == 0 else unit_lanes(d, weight, scale)
                most = max64(most, v)
                store(sizes, full, v)
            _sum_squares(sizes, count, most, buffer, by_row, PARTS * i, by_column, first, stride)
