"""The field in Python's own integers: slow, obvious, and what every fast version is compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

P = 2**61 - 1
EDGES = (0, 1, P - 1, P - 2, 2**60)

elements = st.one_of(st.sampled_from(EDGES), st.integers(0, P - 1))
nonzero = elements.filter(bool)


def vectors(count: int, *, size: int = 40, of: st.SearchStrategy[int] = elements) -> st.SearchStrategy[list[list[int]]]:
    """`count` lists of one length, 1..size: past the kernels' eight lanes, and around them."""
    return st.integers(1, size).flatmap(
        lambda n: st.lists(st.lists(of, min_size=n, max_size=n), min_size=count, max_size=count)
    )


def spelled(body: object) -> bytes:
    """JSON as records spell it, also of what they refuse, such as fractions."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def array(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def ints(values: object) -> list[int]:
    return [int(v) for v in np.asarray(values).reshape(-1)]


def evaluate(coefficients: Sequence[int], x: int) -> int:
    return sum(c * pow(x, j, P) for j, c in enumerate(coefficients)) % P


def interpolate(points: Sequence[tuple[int, int]], at: int) -> int:
    """Lagrange's formula, word for word."""
    total = 0
    for i, (x, y) in enumerate(points):
        above = below = 1
        for j, (other, _) in enumerate(points):
            if j != i:
                above = above * (at - other) % P
                below = below * (x - other) % P
        total += y * above * pow(below, -1, P)
    return total % P


def encode(value: float, weight: float = 1.0) -> int:
    """Fixed point: the product in float64, then to the nearest multiple of 2^-40, ties to even."""
    return round(Fraction(float(value) * weight) * 2**40) % P


def lift(x: int) -> int:
    return x - P if x > P // 2 else x
