"""Features of masked vectors by which a wrong mask would be told from noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALARM = 1e-10


def features(threshold: int, modulus: int) -> dict[str, Callable[[NDArray[np.uint64]], NDArray[Any]]]:
    """Six-bit views of what t−1 members hold: single shares, and the sum that would cancel a lower degree."""

    def top(x: NDArray[np.uint64]) -> NDArray[Any]:
        return (x.astype(object) * 64 // modulus).astype(int)

    def combined(shares: NDArray[np.uint64]) -> NDArray[Any]:
        # pretend that the degree were t−2: Lagrange on the t−1 shares would give the secret
        weights = _lagrange_over(list(range(1, threshold)), modulus)
        return top(sum(w * row.astype(object) for w, row in zip(weights, shares, strict=False)) % modulus)

    return {
        "first share, high bits": lambda s: top(s[0]),
        "last share, high bits": lambda s: top(s[threshold - 2]),
        "first share, low bits": lambda s: (s[0] & np.uint64(63)).astype(int),
        "t−1 shares combined": combined,
    }


def _lagrange_over(points: list[int], modulus: int) -> list[int]:
    weights = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * -other % modulus, below * (x - other) % modulus
        weights.append(above * pow(below, -1, modulus) % modulus)
    return weights
