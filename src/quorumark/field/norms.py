"""A kernel for the norms that members upload: squares of an update, and of the same rounded to units, in one pass.

A file of its own: numba's cache watches the file that a kernel stands in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quorumark.field.kernels import P, add_square, kernel, load

__all__ = ["PARTS", "update_squares"]

PARTS = 8
"""Words for each row, column and tap: four for either of two sums."""

_HALF = P // 2
_COLUMNS = 2048  # columns worked on at a time: their sums, 8 words each, stay in the second-level cache


@kernel
def update_squares(after: Any, before: Any, width: int, weight: float, shift: int, by_row: Any, by_column: Any) -> None:
    """Σ D² for D = after − before, and Σ V² for V = 2^shift·round(round(weight·D)/2^shift), both to nearest with ties
    to even, along each row and each column of matrices with `width` columns. No V with a negative shift.

    by_row[rows, 8] and by_column[8, stride], flat, zero at first, stride = width rounded up to a multiple of 8;
    entries 4k … 4k+3 are the parts of the k-th of the two sums. Exact for up to 2^31 elements.
    """
    rows, stride = after.size // width, by_column.size // 8
    both, up = shift >= 0, max(shift, 0)
    half, rest = np.int64(1) << max(up - 1, 0), (np.int64(1) << up) - 1
    whole, rounded = np.zeros(_COLUMNS, np.uint64), np.zeros(_COLUMNS, np.uint64)
    lanes = np.zeros(64, np.uint64)
    for first in range(0, width, _COLUMNS):
        count = min(_COLUMNS, width - first)
        padded = count + -count % 8
        whole[count:padded], rounded[count:padded] = 0, 0
        for i in range(rows):
            at = i * width + first
            mine, theirs = after[at : at + count], before[at : at + count]
            sizes, others = whole[:count], rounded[:count]
            for j in range(count):
                d = np.int64(mine[j]) - np.int64(theirs[j])
                d -= P if d > _HALF else 0
                d += P if d < -_HALF else 0
                sizes[j] = np.uint64(abs(d))
                if both:
                    v = np.int64(np.rint(d * weight))
                    n, left = v >> up, v & rest
                    more = (left > half) | ((left == half) & ((n & 1) == 1) & (up > 0))
                    others[j] = np.uint64(abs((n + np.int64(more)) << up))
            lanes[:] = 0
            for j in range(0, padded, 8):
                add_square(load(whole, j), lanes, 0, by_column, first + j, stride)
                if both:
                    add_square(load(rounded, j), lanes, 32, by_column, 4 * stride + first + j, stride)
            for k in range(8):
                for lane in range(8):
                    by_row[8 * i + k] += lanes[8 * k + lane]
