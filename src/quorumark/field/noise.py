"""A kernel for the noise that members add beside their marks (docs/strength.md, "Dither"), in one pass.

A file of its own: numba's cache watches the file that a kernel stands in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quorumark.field.kernels import kernel

__all__ = ["COARSE", "FINE", "shape_noise"]

FINE, COARSE = 34, 15
"""Bits of the first of three numbers that a word holds, and of the others: 64 in all."""

_HALF = 3 << (FINE - 1)  # 3/2 in 2^-34


@kernel
def shape_noise(words: Any, scales: Any, factor: float, out: Any) -> None:
    """out = round((u_1 + u_2 + u_3 − 3/2)·(scale·factor)), the u's of each word in 2^-34."""
    low = np.uint64((1 << COARSE) - 1)
    for i in range(words.size):
        word = words[i]
        total = word >> np.uint64(2 * COARSE)
        total += (word & low) << np.uint64(FINE - COARSE)
        total += ((word >> np.uint64(COARSE)) & low) << np.uint64(FINE - COARSE)
        out[i] = np.int64(np.rint((np.float64(np.int64(total)) - _HALF) * (np.float64(scales[i]) * factor)))
