"""The alternatives that benchmarks run beside ours. Each is None where its package is not installed."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

from quorumark.field import P


def missing() -> list[str]:
    """The peers' packages that are not installed."""
    return [name for name in ("galois", "torch") if importlib.util.find_spec(name) is None]


def galois_field() -> Any:
    """GF(2^61−1) of the galois package."""
    try:
        import galois
    except ImportError:
        return None
    return galois.GF(P, primitive_element=37, verify=False)


def galois_sharing(secrets: list[int], threshold: int, members: int) -> Callable[[], object] | None:
    """Shamir sharing with galois: a Vandermonde matrix times random coefficients."""
    gf = galois_field()
    if gf is None:
        return None
    points = gf([[pow(x, j, P) for j in range(threshold)] for x in range(1, members + 1)])
    constant = gf(secrets).reshape(1, -1)

    def call() -> object:
        import numpy as np

        rest = gf.Random((threshold - 1, len(secrets)))
        return points @ np.vstack([constant, rest]).view(gf)

    return call


PAPER_MODULUS = 2**53 - 1  # composite: 6361 · 69431 · 20394401
PAPER_COEFFICIENT_BITS = 8


LAYER_BYTES = 1 << 26
BEST_BYTES = 1 << 20
"""The paper's code keeps a K×n matrix of int64 for a tensor of n weights: 75 MB to 2.4 GB for ResNet-18's largest ones
and K = 4 to 128. 64 MiB stand for those; 1 MiB stays in a cache, where the same code runs several times faster."""


def paper_elements(members: int, size: int) -> int:
    """n for a matrix of so many bytes."""
    return max(1, size // 8 // members)


def paper_sharing(secrets: list[int], threshold: int, members: int) -> Callable[[], object] | None:
    """What the paper's public code does: Horner's rule on int64 tensors, modulus 2^53−1, coefficients of 8 bits."""
    try:
        import torch
    except ImportError:
        return None
    constant = torch.tensor([s % PAPER_MODULUS for s in secrets], dtype=torch.int64)

    def call() -> object:
        torch.set_num_threads(1)
        shape = (len(secrets), threshold - 1)
        rest = torch.randint(0, 1 << PAPER_COEFFICIENT_BITS, shape, dtype=torch.int64)
        coefficients = torch.cat([constant[:, None], rest], dim=1)
        points = torch.arange(1, members + 1, dtype=torch.int64)[:, None]
        values = coefficients[:, -1].expand(members, -1)
        for j in range(threshold - 2, -1, -1):
            values = (values * points + coefficients[:, j]) % PAPER_MODULUS
        return values

    return call


def python_sharing(secrets: list[int], threshold: int, members: int) -> Callable[[], object]:
    """Horner's rule on Python's integers, mod 2^61−1."""

    def call() -> object:
        shares = []
        for secret in secrets:
            coefficients = [secret, *(random.getrandbits(61) for _ in range(threshold - 1))]
            row = []
            for x in range(1, members + 1):
                value = 0
                for c in reversed(coefficients):
                    value = (value * x + c) % P
                row.append(value)
            shares.append(row)
        return shares

    return call
