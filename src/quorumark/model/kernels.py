"""Integer kernels of the canonical form (docs/format.md, "The canonical form x").

A weight is taken apart as the bits of a float32: w = ±m·2^(e−23) with 2^23 ≤ m < 2^24. Nothing here multiplies or adds
floating-point numbers, so every machine and every number of threads gets the same result. Zeros, subnormal numbers
(below 2^-126) and what is not finite count as 0.

Logarithms are integer multiples of 1/256 octave, balanced weights of 2^-12.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
from numba import njit

from quorumark.field.kernels import kernel

UNIT = 12
"""Balanced weights have 12 fractional bits."""

_SATURATED = 1 << 17  # 32 times the size that balanced weights have in the middle
_COEFFICIENT = 16  # fractional bits of the coefficients that the anchor is removed with
_LARGEST_COEFFICIENT = 1 << 20
_NOTHING = -(1 << 15)  # below every logarithm: the weight does not count
_MOST_ROWS = 1 << 19  # deviations, 2^11 at most in size, that are added up in 32 bits


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
    """⌊2^(30 − i/256)⌋ by eight square roots in integers: 2^(−1/256) to 200 bits, then its powers."""
    root = 1 << 199  # 1/2, in units of 2^-200
    for _ in range(8):
        root = isqrt(root << 200)
    table, power = np.empty(256, np.int64), 1 << 200
    for i in range(256):
        table[i] = power >> 170
        power = power * root >> 200
    return table


LOGS, POWERS = _log_table(), _power_table()


def _every_log() -> np.ndarray[Any, Any]:
    """log2|w| in 1/256 octaves by the upper bits of w without its sign: 8 of the exponent, 8 of the mantissa."""
    table = np.full((256, 256), _NOTHING, np.int16)
    for exponent in range(1, 255):
        table[exponent] = (exponent - 127) * 256 + LOGS
    return table.reshape(-1)


EVERY_LOG = _every_log()


@njit(forceinline=True)
def _counts(bits: Any) -> Any:
    """Whether a weight is a number other than 0."""
    exponent = (bits >> 23) & 255
    return (exponent != 0) & (exponent != 255)


# The loops below are written so that LLVM makes vector instructions of them: one row, or a part of it, as an array of
# its own; 32 bits wherever they hold the number; look-ups in a loop of their own.


@njit(forceinline=True)
def _row_sum(line: Any, columns: Any, row: Any, limit: Any) -> Any:
    """Σ of what is left of a row's logarithms, each cut to ±limit, and how many weights count."""
    total: Any = np.int64(0)
    count: Any = np.int64(0)
    for k in range(line.size):
        counts = line[k] != np.int16(_NOTHING)
        left = max(-limit, min(limit, np.int32(line[k]) - row - columns[k]))
        total += left if counts else np.int32(0)
        count += np.int32(counts)
    return total, count


@njit(forceinline=True)
def _add_line(line: Any, scale: Any, columns: Any, most: Any, part: Any, seen: Any) -> None:
    """Adds what is left of a row's logarithms to the columns' sums, each cut to ±most, and counts them."""
    for k in range(line.size):
        counts = line[k] != np.int16(_NOTHING)
        left = max(-most, min(most, np.int32(line[k]) - scale - columns[k]))
        part[k] += left if counts else np.int32(0)
        seen[k] += np.int32(counts)


@njit(forceinline=True)
def _add_up(part: Any, seen: Any, sums: Any) -> None:
    for k in range(part.size):
        sums[0, k] += part[k]
        sums[1, k] += seen[k]
    part[:] = 0
    seen[:] = 0


@kernel
def turn(bits: Any, rows: Any, columns: Any, own: int, cut: int, sums: Any, logs: Any) -> None:
    """One turn of the scales: each row's anew, and what is then left of its weights' logarithms added for the columns.

    What is left of a logarithm without its row's and its column's scale counts for ±own at most in the row's mean, and
    for ±cut (2^11 or less) in the columns' sums. `rows` (int64) is changed. `columns` (int32) has an entry for every
    weight of a row, and so have the two lines of `sums`: Σ of what is left, and how many weights count.
    """
    width = columns.size
    line, part, seen = np.empty(width, np.int16), np.zeros(width, np.int32), np.zeros(width, np.int32)
    for i in range(rows.size):
        row = bits[i * width : (i + 1) * width]
        for k in range(width):
            line[k] = logs[(row[k] >> np.uint32(15)) & np.uint32(0xFFFF)]
        total, count = _row_sum(line, columns, np.int32(rows[i]), np.int32(own))
        if count:
            rows[i] += total // count
        _add_line(line, np.int32(rows[i]), columns, np.int32(cut), part, seen)
        if (i + 1) % _MOST_ROWS == 0 or i + 1 == rows.size:
            _add_up(part, seen, sums)


@kernel
def logarithms(bits: Any, out: Any, logs: Any) -> None:
    """The logarithm of every weight (int16), for `turn_again`."""
    for k in range(bits.size):
        out[k] = logs[(bits[k] >> np.uint32(15)) & np.uint32(0xFFFF)]


@kernel
def turn_again(lines: Any, rows: Any, columns: Any, own: int, cut: int, sums: Any) -> None:
    """The same as `turn` for weights whose logarithms are known."""
    width = columns.size
    part, seen = np.zeros(width, np.int32), np.zeros(width, np.int32)
    for i in range(rows.size):
        line = lines[i * width : (i + 1) * width]
        total, count = _row_sum(line, columns, np.int32(rows[i]), np.int32(own))
        if count:
            rows[i] += total // count
        _add_line(line, np.int32(rows[i]), columns, np.int32(cut), part, seen)
        if (i + 1) % _MOST_ROWS == 0 or i + 1 == rows.size:
            _add_up(part, seen, sums)


@njit(forceinline=True)
def _balance_row(bits: Any, row: Any, columns: Any, factors: Any, out: Any, powers: Any) -> None:
    """w·2^(−both/256) in units of 2^-12 for both = row + column, rounded to nearest (halves away from 0), cut to ±2^17.

    With both = 256·q + f: m·2^(−f/256)·2^(e−23−q) = (m·⌊2^(30−f/256)⌋)·2^(e−q−53). The product is 2^52 to 2^54, so
    shifts below 35 give what is cut anyway, and shifts above 62 give 0, as those of 35 and 62 do.
    """
    for k in range(columns.size):
        factors[k] = powers[(row + columns[k]) & 255]
    for k in range(columns.size):
        exponent = np.int32((bits[k] >> np.uint32(23)) & np.uint32(255))
        mantissa = (bits[k] & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
        if (exponent == 0) | (exponent == 255):
            mantissa = np.uint32(0)
        shift = np.int32(53 - UNIT + 127) - exponent + ((row + columns[k]) >> 8)
        shift = max(np.int32(35), min(np.int32(62), shift))
        halves = (np.uint64(mantissa) * np.uint64(factors[k])) >> np.uint64(shift - 1)
        size = np.int32(min(np.uint64(_SATURATED), (halves + np.uint64(1)) >> np.uint64(1)))
        sign = np.int32(bits[k]) >> 31  # 0 or −1
        out[k] = (size ^ sign) - sign


@kernel
def balance(bits: Any, rows: Any, columns: Any, out: Any, powers: Any) -> None:
    """Balanced weights (int32), one for each of bits; `columns` (int32) has an entry for every weight of a row."""
    width = columns.size
    factors = np.empty(width, np.uint32)
    for i in range(rows.size):
        span = slice(i * width, (i + 1) * width)
        _balance_row(bits[span], np.int32(rows[i]), columns, factors, out[span], powers)


@kernel
def balance_coarse(bits: Any, rows: Any, columns: Any, out: Any, powers: Any) -> None:
    """The same in 8 bits (int8): in units of 2^-4, rounded to nearest (halves up), cut to ±127."""
    width = columns.size
    factors, line = np.empty(width, np.uint32), np.empty(width, np.int32)
    for i in range(rows.size):
        span = slice(i * width, (i + 1) * width)
        _balance_row(bits[span], np.int32(rows[i]), columns, factors, line, powers)
        coarse = out[span]
        for k in range(width):
            coarse[k] = max(np.int32(-127), min(np.int32(127), np.int32((line[k] + 128) >> 8)))


@njit(forceinline=True)
def _product(one: Any, two: Any) -> Any:
    """Σ one·two of 8-bit numbers, exactly: 2^16 products are below 2^30."""
    total: Any = np.int64(0)
    for begin in range(0, one.size, 1 << 16):
        x, y = one[begin : begin + (1 << 16)], two[begin : begin + (1 << 16)]
        part: Any = np.int32(0)
        for k in range(x.size):
            part = np.int32(part + np.int32(x[k]) * np.int32(y[k]))
        total += part
    return total


@kernel
def row_products(one: Any, two: Any, order: Any, out: Any) -> None:
    """⟨row i of one, row order[i] of two⟩ of 8-bit numbers, exactly."""
    for i in range(one.shape[0]):
        out[i] = _product(one[i], two[order[i]])


@njit(forceinline=True)
def _bit_length(value: Any) -> Any:
    bits = 0
    while value:
        value >>= 1
        bits += 1
    return bits


@njit(forceinline=True)
def _coefficient(along: Any, squared: Any) -> Any:
    """along/squared in units of 2^-16, rounded to nearest, cut to ±2^20; 0 if there is nothing to divide by."""
    negative = along < 0
    along = -along if negative else along
    shift = max(0, _bit_length(max(along, squared)) - 46)
    along, squared = along >> shift, squared >> shift
    if squared == 0:
        return np.int64(0)
    coefficient = min(_LARGEST_COEFFICIENT, ((along << _COEFFICIENT) + squared // 2) // squared)
    return np.int64(-coefficient if negative else coefficient)


@njit(forceinline=True)
def _remove_row(values: Any, anchor: Any) -> Any:
    """Takes a row's part along the anchor's out of it, in place; returns Σ|what is left|.

    The coefficient is ⟨v, a⟩/‖a‖². Cut values are at most 2^17, so that the sums of a row of fewer than 2^29 weights
    fit 63 bits.
    """
    along: Any = np.int64(0)
    squared: Any = np.int64(0)
    for k in range(values.size):
        along += np.int64(values[k]) * np.int64(anchor[k])
        squared += np.int64(anchor[k]) * np.int64(anchor[k])
    coefficient = _coefficient(along, squared)
    total: Any = np.int64(0)
    for k in range(values.size):
        # >> rounds down: half a unit more makes it the nearest
        part = (coefficient * np.int64(anchor[k]) + (1 << (_COEFFICIENT - 1))) >> _COEFFICIENT
        left = np.int64(values[k]) - part
        values[k] = left
        total += abs(left)
    return total


@kernel
def leave(
    bits: Any, rows: Any, columns: Any, anchor: Any, their_rows: Any, their_columns: Any, out: Any, powers: Any
) -> Any:
    """out (int32) is what is left of balanced weights without the balanced anchor, row by row; returns Σ|out|."""
    width = columns.size
    factors, line = np.empty(width, np.uint32), np.empty(width, np.int32)
    total: Any = np.int64(0)
    for i in range(rows.size):
        span = slice(i * width, (i + 1) * width)
        left = out[span]
        _balance_row(bits[span], np.int32(rows[i]), columns, factors, left, powers)
        _balance_row(anchor[span], np.int32(their_rows[i]), their_columns, factors, line, powers)
        total += _remove_row(left, line)
    return total


@kernel
def to_int8(values: Any, numerator: int, denominator: int, out: Any) -> None:
    """values·numerator/denominator, rounded to nearest (halves away from 0), cut to ±127."""
    half = denominator // 2
    for k in range(values.size):
        value = np.int64(values[k])
        size: Any = min(127, (abs(value) * numerator + half) // denominator)
        out[k] = -size if value < 0 else size


@kernel
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


@kernel
def exponents(bits: Any, histogram: Any) -> None:
    """Counts the exponents of what counts."""
    for k in range(bits.size):
        if _counts(bits[k]):
            histogram[(bits[k] >> 23) & 255] += 1


@kernel
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


@kernel
def count_sizes(x: Any, counts: Any) -> None:
    """Adds to counts[v] how many entries of 8 bits have the size v, 0 to 128.

    Four tables take turns: entries of the same size follow each other often, and would wait for one another.
    """
    tables = np.zeros((4, counts.size), np.int64)
    whole = x.size - x.size % 4
    for k in range(0, whole, 4):
        for turn in range(4):
            tables[turn, abs(np.int64(x[k + turn]))] += 1
    for k in range(whole, x.size):
        tables[0, abs(np.int64(x[k]))] += 1
    for size in range(counts.size):
        counts[size] += tables[0, size] + tables[1, size] + tables[2, size] + tables[3, size]


@kernel
def is_best(known: Any, ours: Any, theirs: Any, order: Any, value: Any) -> bool:
    """Whether no other assignment can have as large a total as `order`, a permutation with the values `value`.

    Elsewhere values are at most known[i, j] + Σ_p ours[p, i]·theirs[p, j]. With the prices u_i = value_i/2 for rows and
    v_j = value_i/2 for the column j = order[i], any assignment has at most Σu + Σv, which is what this one has; and
    less, if every other value is below u_i + v_j.
    """
    prices = np.empty(order.size, np.int64)
    for i in range(order.size):
        prices[order[i]] = value[i]
    for i in range(order.size):
        for j in range(order.size):
            if j != order[i]:
                most = 0.0
                for p in range(ours.shape[0]):
                    most += ours[p, i] * theirs[p, j]
                if 2.0 * (known[i, j] + most) + 1.0 >= value[i] + prices[j]:
                    return False
    return True


@kernel
def is_largest(known: Any, ours: Any, theirs: Any, order: Any, value: Any) -> bool:
    """Whether no other value of a row, known[i, j] + Σ_p ours[p, i]·theirs[p, j] at most, is above value[i]."""
    for i in range(order.size):
        for j in range(order.size):
            if j != order[i]:
                most = 0.0
                for p in range(ours.shape[0]):
                    most += ours[p, i] * theirs[p, j]
                if known[i, j] + most + 1.0 >= value[i]:
                    return False
    return True


@kernel
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
