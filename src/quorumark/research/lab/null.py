"""Q of a model for keys that it knows nothing of (docs/layers.md, "What is tested"): the tail beside its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorumark.verify.null import log10_layers

__all__ = ["random_q", "tail"]

_TOGETHER = 1 << 28  # signs that are in memory at once
_BEYOND = 10  # keys that must be beyond a value for its tail to be compared


def random_q(x: NDArray[Any], spans: Sequence[slice], keys: int, device: torch.device, seed: int) -> NDArray[Any]:
    """Q of a canonical form x for random signs, one value for each key."""
    generator = torch.Generator(device).manual_seed(seed)
    parts = [torch.from_numpy(x[span].astype(np.float32)).to(device) for span in spans]
    norms = [float(np.sqrt((x[span].astype(np.float64) ** 2).sum())) for span in spans]
    together, found = max(1, min(500, _TOGETHER // x.size)), []
    for start in range(0, keys, together):
        count = min(together, keys - start)
        q = torch.zeros(count, dtype=torch.float64, device=device)
        for part, norm in zip(parts, norms, strict=True):
            if norm:
                ones = torch.randint(2, (count, len(part)), dtype=torch.int8, device=device, generator=generator)
                q += ((2 * (ones.float() @ part) - part.sum()).double() / norm) ** 2
        found.append(q.cpu().numpy())
    return np.concatenate(found)


def tail(q: NDArray[Any], blocks: int) -> dict[str, Any]:
    """How Q of random keys lies to its bound: `largest_ratio` is log10 of the largest ratio of tail to bound, which is
    0 or less if the bound holds, over all values with ten keys or more beyond them."""
    values = np.sort(q)[::-1]
    bounds = [float(log10_layers(f"{value:.2f}", blocks)) for value in values]
    ratios = [math.log10((i + 1) / len(values)) - bound for i, bound in enumerate(bounds) if i >= _BEYOND - 1]
    return {
        "keys": len(values),
        "blocks": blocks,
        "mean": round(float(values.mean()), 3),
        "variance": round(float(values.var()), 3),
        "largest": round(float(values[0]), 2),
        "log10_bound_of_largest": bounds[0],
        "largest_ratio": round(max(ratios), 3),
    }
