"""On how many coordinates of the key an answer depends, as a number and as a remainder (docs/verification.md, "The
guard").

An answer opens Y = Σ x_j·τ_j, exactly. As a number it depends on ‖x‖₂⁴/‖x‖₄⁴ coordinates. But Y is an integer, and its
remainders may depend on far fewer: if all x_j are ±25 but for four entries 26, 27, 29 and 33, then

    Y mod 25 = τ_a + 2·τ_b + 4·τ_c + 8·τ_d                       which shows four signs, whatever the others are.

In general, for a frequency ω, Y·ω mod 1 = Σ φ_j·τ_j mod 1, where φ_j is x_j·ω less the nearest integer: the answer
modulo 1/ω sees the vector φ instead of x. So the rule for x is asked of every φ: it is 0, or it rests on E coordinates,

    ‖φ‖₂⁴/‖φ‖₄⁴ ≥ E                                                for all ω = a/m with m ≤ 254.

For ω → 0 that is the old rule, since φ = ω·x there. What it bounds: Σ φ_j·τ_j is a sum in which, as in Y, no coordinate
has more than √(1/E) of the squared length, so that its sign shows through the others' noise with at most 1/√E of the
variance, and the remainder on top only takes away.

Why m ≤ 254 is enough for entries of 8 bits: φ_j = 0 for x_j ≠ 0 needs ω = k/x_j, a fraction with m ≤ 127. Between such
fractions no entry vanishes. Near one of them, at ω = a/m + ε, the entries that vanish at a/m have φ_j = ε·x_j; and if
two parts of a vector rest on E coordinates each, so does the whole, since (A + B)² ≥ E·(A²/E + B²/E). Up to 254 there
are fractions between any two with m ≤ 127, so that the places between them are looked at as well.

The entries of the paper's statistics have up to 31 bits. There only exact common divisors are looked for, so a crafted
model can come nearer to them than the rule sees: those statistics are for comparison.

The rule is about one answer. Several answers combine, Σ c_i·Y_i mod m, with as many moduli as there are lattices; what
they add as real numbers is bounded (`guard`), their remainders are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Narrow", "narrow_histograms", "narrow_remainder"]

_LARGEST = 127  # an entry of 8 bits
_ORDER = 2 * _LARGEST
_DIVISORS = 64  # that are counted, of entries with more bits


@dataclass(frozen=True)
class Narrow:
    """A remainder that rests on few coordinates: of Y·`times` modulo `modulus`."""

    times: int
    modulus: int
    effective: int


def narrow_remainder(x: NDArray[Any], least: int) -> Narrow | None:
    """The narrowest remainder of ⟨x, τ⟩ that rests on fewer than `least` coordinates; None if there is none."""
    sizes = np.abs(x.astype(np.int16) if x.dtype == np.int8 else x.astype(np.int64))
    if not sizes.any():
        return None
    if sizes.max() > _LARGEST:
        return _narrow_divisor(sizes[sizes > 0], least)
    return _narrow_fraction(np.bincount(sizes, minlength=_LARGEST + 1).astype(np.float64), least)


def narrow_histograms(counts: NDArray[np.int64], least: int) -> NDArray[np.bool_]:
    """Which of several vectors of 8-bit entries have a narrow remainder; `counts[i, v]` entries of i have the size v.

    One walk over all fractions does it for all of them.
    """
    table, values = counts.astype(np.float64).T, np.arange(counts.shape[1])
    narrow = np.zeros(len(counts), np.bool_)
    for m in range(2, _ORDER + 1):
        effective = _effective(m, _coprime(m), values, table)
        narrow |= effective.min(0) < least
    return narrow


def _coprime(m: int) -> NDArray[np.int64]:
    return np.array([a for a in range(1, m // 2 + 1) if gcd(a, m) == 1])


def _effective(
    m: int, times: NDArray[np.int64], values: NDArray[np.int64], counts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """‖φ‖₂⁴/‖φ‖₄⁴ for ω = a/m and each column of `counts`; infinite where φ is 0."""
    rest = times[:, None] * values % m
    squares = np.minimum(rest, m - rest).astype(np.float64) ** 2
    two, four = squares @ counts, squares**2 @ counts
    # floating point errs by less than 10^-13 here, far below 1 of 10^9 coordinates
    found: NDArray[np.float64] = np.where(four > 0, two * two / np.maximum(four, 1), np.inf)
    return found


def _narrow_fraction(counts: NDArray[np.float64], least: int) -> Narrow | None:
    """`counts[v]` entries have the size v. A histogram is all that it takes, whatever the number of coordinates."""
    values, found = np.arange(counts.size), []
    for m in range(2, _ORDER + 1):
        times = _coprime(m)
        effective = _effective(m, times, values, counts)
        worst = int(np.argmin(effective))
        if effective[worst] < least:
            found.append(Narrow(int(times[worst]), m, int(effective[worst])))
    return min(found, key=lambda narrow: narrow.effective) if found else None


def _narrow_divisor(sizes: NDArray[Any], least: int) -> Narrow | None:
    """Whether some m divides all but a few entries, and not all.

    The entries are dealt to groups. If the greatest common divisor of a group is that of all entries, every other m
    leaves a remainder in that group: as many such groups, as many coordinates at least. Where they are too few (models
    with few different weights), the divisors that most groups have are counted one by one.
    """
    groups = max(1, min(sizes.size // 4, 4 * least))
    each = sizes.size // groups
    common = np.gcd.reduce(sizes[: groups * each].reshape(each, groups), axis=0)
    whole = int(np.gcd.reduce(np.append(common, sizes[groups * each :])))
    if int(np.count_nonzero(common == whole)) >= least:
        return None
    values, counts = np.unique(common, return_counts=True)
    found = []
    for m in values[np.argsort(-counts, kind="stable")][:_DIVISORS]:
        left = int(np.count_nonzero(sizes % m))
        if 0 < left < least:
            found.append(Narrow(1, int(m), left))
    return min(found, key=lambda narrow: narrow.effective) if found else None
