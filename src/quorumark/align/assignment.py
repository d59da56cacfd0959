"""The best assignment, and the similarities that it is made from, in exact integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quorumark.model import kernels

__all__ = ["assign", "assigned", "bound", "inner_product", "inner_products", "pair_products", "row_products", "squares"]

_FEATURES = 1024  # 127²·1024 < 2^24: a product of so many 8-bit numbers is exact in float32, in any order
_MANY_FEATURES = 8192  # weights have a deviation of 2^5, so that the products of so many usually are


def assign(value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows to different columns so that Σ value[i, column i] is largest: the columns, −1 for rows that get none.

    Shortest augmenting paths on integers below 2^50, so that nothing is rounded. The steps are fixed, so that ties are
    always broken in the same way. O(n²·m) for n rows and m columns at worst.
    """
    rows, columns = value.shape
    if rows <= columns:
        found = np.empty(rows, np.int64)
        kernels.assign(np.ascontiguousarray(-value), found)
        return found
    mirrored = np.empty(columns, np.int64)
    kernels.assign(np.ascontiguousarray(-value.T), mirrored)
    found = np.full(rows, -1, np.int64)
    found[mirrored] = np.arange(columns)
    return found


def assigned(value: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values that an assignment selects, for each row that gets a column."""
    rows = np.flatnonzero(order >= 0)
    found: NDArray[np.int64] = value[rows, order[rows]]
    return found


def bound(value: NDArray[np.int64]) -> int:
    """An upper bound of what any assignment selects: the sum of the largest of each row, or of each column."""
    return int(value.max(axis=int(value.shape[0] <= value.shape[1])).sum())


def inner_products(one: NDArray[np.int8], two: NDArray[np.int8]) -> NDArray[np.int64]:
    """⟨row i of one, row j of two⟩, exactly.

    Every sum of some of the products is at most ‖row i‖·‖row j‖ in size (Cauchy and Schwarz): where that is below 2^24
    for all rows, float32 holds it, whatever the order. Otherwise fewer features are summed at a time.
    """
    total: NDArray[np.int64] | None = None
    for begin in range(0, one.shape[1], _MANY_FEATURES):
        x, y = (rows[:, begin : begin + _MANY_FEATURES] for rows in (one, two))
        largest = int(squares(x).max(initial=0)) * int(squares(y).max(initial=0))
        step = x.shape[1] if largest < 1 << 48 else _FEATURES
        for at in range(0, x.shape[1], step):
            left, right = (rows[:, at : at + step].astype(np.float32) for rows in (x, y))
            part = (left @ right.T).astype(np.int64)
            total = part if total is None else np.add(total, part, out=total)
    return np.zeros((one.shape[0], two.shape[0]), np.int64) if total is None else total


def squares(rows: NDArray[np.int8]) -> NDArray[np.int64]:
    """‖row i‖², exactly."""
    return pair_products(rows, rows, np.arange(rows.shape[0]))


def pair_products(one: NDArray[np.int8], two: NDArray[np.int8], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """⟨row i of one, row order[i] of two⟩, exactly."""
    found = np.empty(one.shape[0], np.int64)
    kernels.row_products(one, two, order, found)
    return found


def inner_product(one: NDArray[np.int8], two: NDArray[np.int8]) -> int:
    """Σ one·two, exactly."""
    return int(pair_products(one.reshape(1, -1), two.reshape(1, -1), np.zeros(1, np.int64))[0])


def row_products(rows: NDArray[np.int8]) -> NDArray[np.int64]:
    """⟨row i, row j⟩, exactly, then shifted to 18 bits so that sums of products of two of them fit 64 bits."""
    total = inner_products(rows, rows)
    return total >> max(0, int(np.abs(total).max()).bit_length() - 18)
