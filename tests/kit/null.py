"""The null of Q over random keys."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.model.statistic import norms
from quorumark.verify.null import log10_layers

_TOGETHER = 1 << 27  # signs that are looked at together: half a gigabyte


def tail_of_q(x: NDArray[Any], spans: Sequence[slice], keys: int, seed: int, norm: float = 1.0) -> float:
    """log10 of the largest ratio of the tail of Q over random keys to its bound, where ten keys or more are beyond."""
    rng = np.random.default_rng(seed)
    lengths = np.array([norm * sqrt(norms(x[s])[1]) for s in spans], np.float32)
    whole = x.astype(np.float32)
    found = []
    together = max(1, min(500, _TOGETHER // x.size))
    for start in range(0, keys, together):
        words = rng.integers(0, 256, (min(together, keys - start), x.size // 8 + 1), np.uint8)
        signs = 1 - 2 * np.unpackbits(words, 1)[:, : x.size].astype(np.float32)
        z = np.stack([signs[:, s] @ whole[s] for s in spans], 1) / lengths
        found.append((z * z).sum(1))
    q = np.sort(np.concatenate(found))[::-1]
    ratios = [
        np.log10((i + 1) / keys) - float(log10_layers(f"{value:.2f}", len(spans)))
        for i, value in enumerate(q)
        if i >= 9
    ]
    return float(max(ratios))
