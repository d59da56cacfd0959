"""How likely a statistic is for an innocent model whose owner drew the secret honestly, before it: log10 of it.

    bits       h of N signs are right: P(Bin(N, ½) ≥ h). Exact: for any model each secret bit is a fair coin
    labels     n patterns, each with images and a label of its own. The images of one pattern are classed alike also by
               innocent models, so they are no independent trials. What is random is which pattern has which label: the
               probability is over all n! assignments, exactly, and not below 1/n!
    signs      z deviations of Σ x_i·τ_i with random signs τ: at most exp(−z²/2) (Hoeffding)

    agreed     some C numbers meet N random signs, each of a random projection of theirs, which says what gains can
               hold: 2^(1−N)·Σ_{i<C} binom(N − 1, i), and 1 for N ≤ C (Cover, 1965)

`independent` is what papers compute for triggers, as if every image were a trial of its own.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError

__all__ = ["agreed", "bits", "independent", "labels", "many", "signs"]

_MOST = 12  # labels: the sets of labels that are taken are 2^n


def bits(hits: int, count: int, chance: float = 0.5) -> float:
    """log10 P(Bin(count, chance) ≥ hits)."""
    if not 0 <= hits <= count:
        raise InputError("hits", f"must be from 0 to {count}", hits)
    if hits == 0:
        return 0.0
    terms = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        + k * math.log(chance) + (count - k) * math.log1p(-chance)
        for k in range(hits, count + 1)
    ]  # fmt: skip
    top = max(terms)
    return min(0.0, (top + math.log(sum(math.exp(term - top) for term in terms))) / math.log(10))


def independent(hits: int, count: int, classes: int) -> float:
    """log10 of the same for images that are each classed at random. For patterns that is wrong: see `labels`."""
    return bits(hits, count, 1 / classes)


def labels(counts: NDArray[np.int64]) -> float:
    """log10 P(Σ counts[i, π(i)] ≥ Σ counts[i, i]) over all permutations π.

    counts[i, j] is how many images of the pattern with label i are classed as j. By sets: the sums that the first
    patterns can have together with each set of labels that they take.
    """
    n = len(counts)
    if counts.shape != (n, n) or not 1 <= n <= _MOST:
        raise InputError("counts", f"must be a square of up to {_MOST} labels", counts.shape)
    own, most = int(np.trace(counts)), int(counts.max(axis=1).sum())
    ways = np.zeros((1 << n, most + 1))
    ways[0, 0] = 1
    sets = sorted(range(1 << n), key=int.bit_count)
    ends = [0, *(sum(math.comb(n, k) for k in range(size + 1)) for size in range(n + 1))]
    for i, (start, stop) in enumerate(pairwise(ends[: n + 1])):
        for taken in sets[start:stop]:
            for j in range(n):
                if not taken >> j & 1:
                    more = int(counts[i, j])
                    ways[taken | 1 << j, more:] += ways[taken, : most + 1 - more]
    return min(0.0, math.log10(float(ways[-1, own:].sum()) / math.factorial(n)))


def agreed(count: int, numbers: int) -> float:
    """log10 of the probability that some `numbers` numbers meet `count` random signs of random projections."""
    if min(count, numbers) < 1:
        raise InputError("count", "must be 1 or more, and numbers too", (count, numbers))
    if count <= numbers:
        return 0.0
    ways = sum(math.comb(count - 1, i) for i in range(numbers))  # integers of any size
    return min(0.0, math.log10(ways) - (count - 1) * math.log10(2))


def signs(z: float) -> float:
    """log10 exp(−z²/2), and 0 for a z that is not above 0."""
    return -(z**2) / 2 / math.log(10) if z > 0 else 0.0


def many(log10_p: float, tries: int) -> float:
    """log10 of the bound for the best of several tries."""
    return min(0.0, log10_p + math.log10(tries))
