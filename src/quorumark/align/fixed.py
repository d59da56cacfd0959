"""Fixed-point matrices, integers times a power of two: products and inverses that are the same bytes on every machine.

Floating-point sums depend on the order of their terms, and so on the library, its version and the number of threads.
Here every rounding is defined: a product is the sum of products of limbs, which are integers below 2^53 and so exact in
float64 in any order; then it is rounded once. Inverses are computed in Python's integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fixed", "SingularError", "inverse", "minus", "plus", "stack", "times", "transposed"]

_BITS = 40  # of the largest number of a matrix that are kept
_ROOM = 58  # bits that the parts of a product may have before they are summed
_NARROW = 16  # bits that the limbs of the other matrix have at least
_FRACTION = 192  # fractional bits of an inverse while it is computed


class SingularError(ArithmeticError):
    """The matrix has no inverse."""


@dataclass(frozen=True, eq=False)
class Fixed:
    """values·2^exponent."""

    values: NDArray[np.int64]
    exponent: int

    @classmethod
    def of(cls, numbers: NDArray[Any], bits: int = _BITS) -> Fixed:
        """Floats, rounded to so many bits of the largest, ties to even; what is not finite counts as 0."""
        wide = np.where(np.isfinite(numbers), numbers, 0).astype(np.float64)
        _, exponent = np.frexp(np.abs(wide).max(initial=0.0))
        shift = bits - int(exponent)
        return cls(np.rint(np.ldexp(wide, shift)).astype(np.int64), -shift)

    def floats(self) -> NDArray[np.float64]:
        """The numbers as float64, exactly."""
        with np.errstate(over="ignore"):  # what is beyond float64 is infinite, which counts as 0 later
            return np.ldexp(self.values.astype(np.float64), self.exponent)

    def shifted(self, bits: int) -> Fixed:
        """The same in units that are 2^bits times as large, rounded to the nearest."""
        return self if bits <= 0 else Fixed(_rounded(self.values, bits), self.exponent + bits)

    def kept(self) -> Fixed:
        """Rounded to 40 bits of the largest."""
        return self.shifted(_length(self.values) - _BITS)


def _length(values: NDArray[np.int64]) -> int:
    return int(np.abs(values).max(initial=0)).bit_length()


def _rounded(values: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """values/2^bits, rounded to the nearest, halves up."""
    if bits > 62:
        return np.zeros_like(values)
    return (values + (np.int64(1) << np.int64(bits - 1))) >> np.int64(bits)


def transposed(x: Fixed) -> Fixed:
    return Fixed(np.ascontiguousarray(x.values.T), x.exponent)


def times(x: Fixed, y: Fixed) -> Fixed:
    """x·y, rounded to 40 bits of the largest.

    v = Σ_i v_i·2^(w·i) with 0 ≤ v_i < 2^w for all limbs but the highest; the two widths and the bits of the inner
    dimension add up to 53, so that sums are exact. A matrix of few bits is one limb.
    """
    bits = _length(x.values), _length(y.values)
    if not all(bits):  # zeros have no limbs
        return Fixed(np.zeros((x.values.shape[0], y.values.shape[1]), np.int64), x.exponent + y.exponent)
    inner = (x.values.shape[1] - 1).bit_length()
    drop = max(0, sum(bits) + inner + 1 - _ROOM)
    widths = _widths(*bits, 53 - inner)
    out = np.zeros((x.values.shape[0], y.values.shape[1]), np.int64)
    others = _limbs(y.values, widths[1], bits[1])
    for i, one in enumerate(_limbs(x.values, widths[0], bits[0])):
        for j, other in enumerate(others):
            part, shift = (one @ other).astype(np.int64), widths[0] * i + widths[1] * j - drop
            out += part << np.int64(shift) if shift >= 0 else _rounded(part, -shift)
    return Fixed(out, x.exponent + y.exponent + drop).kept()


def _widths(one: int, other: int, room: int) -> tuple[int, int]:
    """The widths of the limbs of two matrices with so many bits, `room` bits together."""
    if one + other <= room or one <= room - _NARROW:
        return max(one, 1), room - max(one, 1)
    if other <= room - _NARROW:
        return room - max(other, 1), max(other, 1)
    return room // 2, room // 2


def _limbs(values: NDArray[np.int64], width: int, bits: int) -> list[NDArray[np.float64]]:
    """Limbs as float64, the lowest first; the highest has the sign."""
    found, left = [], values
    for _ in range((bits - 1) // width):
        found.append((left & np.int64((1 << width) - 1)).astype(np.float64))
        left = left >> np.int64(width)
    return [*found, left.astype(np.float64)]


def _same_units(parts: list[Fixed]) -> tuple[list[NDArray[np.int64]], int]:
    """All in the same units: the coarsest of the parts that are not all zeros."""
    exponent = max((part.exponent for part in parts if part.values.any()), default=0)
    return [
        part.shifted(exponent - part.exponent).values if part.values.any() else part.values for part in parts
    ], exponent


def stack(parts: list[Fixed]) -> Fixed:
    """The rows of all parts, below each other."""
    values, exponent = _same_units(parts)
    return Fixed(np.concatenate(values), exponent)


def plus(x: Fixed, y: Fixed) -> Fixed:
    (one, two), exponent = _same_units([x, y])
    return Fixed(one + two, exponent).kept()


def minus(x: Fixed, y: Fixed) -> Fixed:
    return plus(x, Fixed(-y.values, y.exponent))


def inverse(x: Fixed, ridge: int | None = None) -> Fixed:
    """(x + λ·1)^-1 of a symmetric matrix without negative eigenvalues, λ = trace/(r·2^ridge), or 0 if `ridge` is None.

    Gauss–Jordan elimination in units of 2^-192 of the trace, every quotient rounded down.
    """
    size = x.values.shape[0]
    rows = [[int(v) for v in row] for row in x.values]
    trace = sum(rows[i][i] for i in range(size))
    if trace <= 0:
        raise SingularError
    one, added = 1 << _FRACTION, 0 if ridge is None else (1 << _FRACTION) // (size << ridge)
    work = [
        [(v << _FRACTION) // trace + (added if i == j else 0) for j, v in enumerate(row)]
        + [one if i == j else 0 for j in range(size)]
        for i, row in enumerate(rows)
    ]
    for c in range(size):
        pivot = work[c][c]
        if pivot < one >> _BITS:  # only rounding errors are left of the row
            raise SingularError
        work[c] = own = [(v << _FRACTION) // pivot for v in work[c]]
        for i in range(size):
            factor = work[i][c]
            if i != c and factor:
                work[i] = [v - (factor * w >> _FRACTION) for v, w in zip(work[i], own, strict=True)]
    found = [row[size:] for row in work]  # in units of 2^-192/trace
    # divided by the trace, to 40 bits of the largest
    largest = max(abs(v) for row in found for v in row)
    shift = _BITS - (largest.bit_length() - trace.bit_length()) - 1
    values = [[_quotient(v, trace, shift) for v in row] for row in found]
    return Fixed(np.array(values, np.int64), -shift - _FRACTION - x.exponent)


def _quotient(value: int, divisor: int, shift: int) -> int:
    """value·2^shift/divisor, rounded down."""
    return (value << shift) // divisor if shift >= 0 else value // (divisor << -shift)
