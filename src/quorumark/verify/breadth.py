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
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.model.statistic import SIZES, count_sizes

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
    if x.dtype == np.int8:
        counts = count_sizes(x)
        if not counts[_LARGEST + 1 :].any():
            return _narrow_fraction(counts, least)
    sizes = np.abs(x.astype(np.int64))
    if not sizes.any():
        return None
    if sizes.max() > _LARGEST:
        return _narrow_divisor(sizes[sizes > 0], least)
    return _narrow_fraction(np.bincount(sizes, minlength=SIZES), least)


def narrow_histograms(counts: NDArray[np.int64], least: int) -> NDArray[np.bool_]:
    """Which of several vectors of 8-bit entries have a narrow remainder; `counts[i, v]` entries of i have the size v.

    One walk over all fractions does it for all of them.
    """
    table, narrow = np.ascontiguousarray(counts.T, np.float64), np.zeros(len(counts), np.bool_)
    for m, _, rests in _fractions():
        narrow |= _effective(m, rests, table, least).min(0) < least
    return narrow


@cache
def _fractions() -> list[tuple[int, NDArray[np.int64], NDArray[np.uint8]]]:
    """For each m all a with ω = a/m, and how far a·v is from the nearest multiple of m for sizes v: |φ|·m."""
    found = []
    for m in range(2, _ORDER + 1):
        times = np.arange(1, m // 2 + 1)
        times = times[np.gcd(times, m) == 1]
        rest = times[:, None] * np.arange(SIZES) % m
        found.append((m, times, np.minimum(rest, m - rest).astype(np.uint8)))
    return found


def _effective(m: int, rests: NDArray[np.uint8], counts: NDArray[np.float64], least: int) -> NDArray[np.float64]:
    """‖φ‖₂⁴/‖φ‖₄⁴ for each ω = a/m and each column of `counts`; infinite where φ is 0, or where `least` is met anyway.

    ‖φ‖₄⁴ ≤ max φ²·‖φ‖₂², so that ‖φ‖₂² ≥ least·max φ² is enough, and true of honest models at most ω.
    """
    squares = np.square(rests.astype(np.float64))
    two = squares @ counts
    found = np.full_like(two, np.inf)
    unsure = (two < least * (m // 2) ** 2).any(1)
    if unsure.any():
        two, four = two[unsure], np.square(squares[unsure]) @ counts
        # floating point errs by less than 10^-13 here, far below 1 of 10^9 coordinates
        found[unsure] = np.where(four > 0, two * two / np.maximum(four, 1), np.inf)
    return found


def _narrow_fraction(counts: NDArray[np.int64], least: int) -> Narrow | None:
    """`counts[v]` entries have the size v. A histogram is all that it takes, whatever the number of coordinates."""
    table, found = counts.astype(np.float64)[:, None], []
    for m, times, rests in _fractions():
        effective = _effective(m, rests, table, least)[:, 0]
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
