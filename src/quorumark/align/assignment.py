"""The best assignment, and the similarities that it is made from, in exact integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quorumark.model import kernels

__all__ = ["assign", "assigned", "bound", "inner_product", "inner_products", "row_products"]

_MILLION = 1 << 20
_FEATURES = 1024  # 127²·1024 < 2^24: a product of so many 8-bit numbers is exact in float32, in any order


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
    """⟨row i of one, row j of two⟩, exactly."""
    total = np.zeros((one.shape[0], two.shape[0]), np.int64)
    for begin in range(0, one.shape[1], _FEATURES):
        part = slice(begin, begin + _FEATURES)
        total += (one[:, part].astype(np.float32) @ two[:, part].astype(np.float32).T).astype(np.int64)
    return total


def inner_product(one: NDArray[np.int8], two: NDArray[np.int8]) -> int:
    """Σ one·two, exactly: a million products of 8-bit numbers are below 2^34, which float64 sums exactly."""
    x, y = one.reshape(-1), two.reshape(-1)
    parts = (slice(begin, begin + _MILLION) for begin in range(0, x.size, _MILLION))
    return sum(int(np.dot(x[part].astype(np.float64), y[part].astype(np.float64))) for part in parts)


def row_products(rows: NDArray[np.int8]) -> NDArray[np.int64]:
    """⟨row i, row j⟩, exactly, then shifted to 18 bits so that sums of products of two of them fit 64 bits."""
    total = inner_products(rows, rows)
    return total >> max(0, int(np.abs(total).max()).bit_length() - 18)
