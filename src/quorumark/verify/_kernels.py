"""Whole-number kernels of the canonical form (docs/verification.md, "Canonical form").

A weight is taken apart as the bits of a float32: w = ±m·2^(e−23) with 2^23 ≤ m < 2^24. Nothing here multiplies or adds
floating-point numbers, so every machine and every number of threads gets the same result. Zeros, subnormal numbers
(below 2^-126) and what is not finite count as 0.

Logarithms are whole numbers of 1/256 octave, balanced weights whole numbers of 2^-12.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
from numba import njit

from quorumark.field._cpu import _kernel

UNIT = 12
"""Balanced weights have 12 fractional bits."""

_SATURATED = 1 << 17  # 32 times the size that balanced weights have in the middle
_COEFFICIENT = 16  # fractional bits of the coefficients that the anchor is removed with
_LARGEST_COEFFICIENT = 1 << 20


def _log_table() -> np.ndarray[Any, Any]:
    """⌊256·log2(1 + i/256)⌋: the largest k with 2^(k/256) ≤ 1 + i/256, that is 2^k·256^256 ≤ (256 + i)^256."""
    table = np.empty(256, np.int64)
    for i in range(256):
        power, k = (256 + i) ** 256, 0
        while 2 ** (k + 1) * 256**256 <= power:
            k += 1
        table[i] = k
    return table


def _power_table() -> np.ndarray[Any, Any]:
    """⌊2^(30 − i/256)⌋ by eight square roots in whole numbers: 2^(−1/256) to 200 bits, then its powers."""
    root = 1 << 199  # 1/2, in units of 2^-200
    for _ in range(8):
        root = isqrt(root << 200)
    table, power = np.empty(256, np.int64), 1 << 200
    for i in range(256):
        table[i] = power >> 170
        power = power * root >> 200
    return table


LOGS, POWERS = _log_table(), _power_table()


@njit(forceinline=True)
def _log(bits: Any, logs: Any) -> Any:
    """log2|w| in 1/256 octaves."""
    return ((np.int64(bits >> 23) & 255) - 127) * 256 + logs[(bits >> 15) & 255]


@njit(forceinline=True)
def _counts(bits: Any) -> Any:
    """Whether a weight is a number other than 0."""
    exponent = (bits >> 23) & 255
    return (exponent != 0) & (exponent != 255)


@_kernel
def add_logs(
    bits: Any, width: int, taps: int, rows: Any, columns: Any, limit: int, by_row: Any, by_column: Any, logs: Any
) -> None:
    """Adds what is left of each weight's logarithm without its row's and column's, cut to ±limit, and the counts.

    by_row[i] and by_column[j] are (sum, count).
    """
    for i in range(rows.size):
        row, total, count, start = rows[i], 0, 0, i * width
        for j in range(columns.size):
            both = row + columns[j]
            part, seen = 0, 0
            for k in range(start + j * taps, start + (j + 1) * taps):
                if _counts(bits[k]):
                    part += max(-limit, min(limit, _log(bits[k], logs) - both))
                    seen += 1
            total += part
            count += seen
            by_column[j, 0] += part
            by_column[j, 1] += seen
        by_row[i, 0] += total
        by_row[i, 1] += count


@njit(forceinline=True)
def _balanced(bits: Any, both: Any, powers: Any) -> Any:
    """w·2^(−both/256) in units of 2^-12, rounded to nearest (halves away from 0), cut to ±2^17.

    With both = 256·q + f: m·2^(−f/256)·2^(e−23−q) = (m·⌊2^(30−f/256)⌋)·2^(e−q−53).
    """
    if not _counts(bits):
        return 0
    mantissa = np.int64(bits & 0x7FFFFF) | 0x800000
    exponent = (np.int64(bits >> 23) & 255) - 127
    shift = 53 - UNIT - exponent + (both >> 8)
    if shift > 62:
        return 0
    value = _SATURATED
    if shift >= 35:  # the product is 2^52 at least: below 35 it is beyond the cut
        product = mantissa * powers[both & 255]
        value = min(_SATURATED, (product + (np.int64(1) << (shift - 1))) >> shift)
    return -value if bits >> 31 else value


@_kernel
def balance(bits: Any, width: int, taps: int, rows: Any, columns: Any, out: Any, powers: Any) -> None:
    """Balanced weights: out has the shape of bits."""
    for i in range(rows.size):
        for j in range(columns.size):
            both = rows[i] + columns[j]
            for k in range(i * width + j * taps, i * width + (j + 1) * taps):
                out[k] = _balanced(bits[k], both, powers)


@njit(forceinline=True)
def _bit_length(value: Any) -> Any:
    bits = 0
    while value:
        value >>= 1
        bits += 1
    return bits


@_kernel
def remove(values: Any, anchor: Any, width: int) -> Any:
    """Takes each row's part along the anchor's row out of it, in place; returns Σ|what is left|.

    The coefficient ⟨v, a⟩/‖a‖² is rounded to 2^-16. Cut values are below 2^17, so that the sums of a row of fewer than
    2^29 weights fit 63 bits.
    """
    total: Any = 0
    for start in range(0, values.size, width):
        along: Any = 0
        squared: Any = 0
        for k in range(start, start + width):
            along += np.int64(values[k]) * np.int64(anchor[k])
            squared += np.int64(anchor[k]) * np.int64(anchor[k])
        negative = along < 0
        along = -along if negative else along
        shift = max(0, _bit_length(max(along, squared)) - 46)
        along, squared = along >> shift, squared >> shift
        coefficient: Any = 0
        if squared:
            coefficient = min(_LARGEST_COEFFICIENT, ((along << _COEFFICIENT) + squared // 2) // squared)
            coefficient = -coefficient if negative else coefficient
        for k in range(start, start + width):
            # >> rounds down: half a unit more makes it the nearest
            part = (coefficient * np.int64(anchor[k]) + (1 << (_COEFFICIENT - 1))) >> _COEFFICIENT
            left = np.int64(values[k]) - part
            values[k] = left
            total += abs(left)
    return total


@_kernel
def to_int8(values: Any, numerator: int, denominator: int, out: Any) -> None:
    """values·numerator/denominator, rounded to nearest (halves away from 0), cut to ±127."""
    half = denominator // 2
    for k in range(values.size):
        value = np.int64(values[k])
        size: Any = min(127, (abs(value) * numerator + half) // denominator)
        out[k] = -size if value < 0 else size


@_kernel
def fixed_point(bits: Any, exponent: int, out: Any) -> None:
    """w·2^(−exponent), rounded to nearest (halves away from 0), cut to ±2^24."""
    for k in range(bits.size):
        value: Any = 0
        if _counts(bits[k]):
            mantissa = np.int64(bits[k] & 0x7FFFFF) | 0x800000
            shift = 23 - ((np.int64(bits[k] >> 23) & 255) - 127) + exponent
            if shift <= 0:
                value = 1 << 24
            elif shift < 63:
                value = min(1 << 24, (mantissa + (np.int64(1) << (shift - 1))) >> shift)
        out[k] = -value if bits[k] >> 31 else value


@_kernel
def exponents(bits: Any, histogram: Any) -> None:
    """Counts the exponents of what counts."""
    for k in range(bits.size):
        if _counts(bits[k]):
            histogram[(bits[k] >> 23) & 255] += 1


@_kernel
def dot_int8(x: Any, share: Any, sums: Any) -> None:
    """Σ x·s without reduction: sums = (over the low 32 bits of s, over the high ones).

    |x| < 2^7 and s < 2^61: 2^24 elements a call stay within 63 bits.
    """
    low: Any = 0
    high: Any = 0
    for k in range(x.size):
        low += np.int64(x[k]) * np.int64(share[k] & np.uint64(0xFFFFFFFF))
        high += np.int64(x[k]) * np.int64(share[k] >> np.uint64(32))
    sums[0], sums[1] = low, high


@_kernel
def assign(cost: Any, found: Any) -> None:
    """Each row to a column of its own (no more rows than columns) so that the costs' sum is smallest: found[row].

    Shortest augmenting paths. With prices u of rows and v of columns, cost[i, j] − u[i] − v[j] ≥ 0 everywhere, and 0
    where i is assigned to j: first each row takes its cheapest column if that is free, then one row after the other
    gets a column along a path of least reduced cost (the first one, where several are the least).
    """
    rows, columns = cost.shape
    u, v = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    owner = np.full(columns, -1, np.int64)
    for i in range(rows):
        best = 0
        for j in range(1, columns):
            if cost[i, j] < cost[i, best]:
                best = j
        u[i] = cost[i, best]
        found[i] = -1
        if owner[best] < 0:
            owner[best], found[i] = i, best
    least, back, done = np.empty(columns, np.int64), np.empty(columns, np.int64), np.empty(columns, np.bool_)
    for start in range(rows):
        if found[start] >= 0:
            continue
        least[:] = np.int64(1) << 62
        done[:] = False
        row, end, distance = start, -1, np.int64(0)
        while end < 0:
            nearest = -1
            base = distance - u[row]
            for j in range(columns):
                if not done[j]:
                    reduced = base + cost[row, j] - v[j]
                    if reduced < least[j]:
                        least[j], back[j] = reduced, row
                    if nearest < 0 or least[j] < least[nearest]:
                        nearest = j
            distance = least[nearest]
            done[nearest] = True
            if owner[nearest] < 0:
                end = nearest
            else:
                row = owner[nearest]
        for j in range(columns):
            if done[j] and j != end:
                u[owner[j]] += distance - least[j]
                v[j] -= distance - least[j]
        u[start] += distance
        while end >= 0:
            row = back[end]
            owner[end] = row
            end, found[row] = found[row], end
