"""The null by experiment: z of real models under random keys (docs/verification.md, "Calibration").

The null of z needs no experiment: for keys of ±1 its mean and variance are exact. This is the paper's procedure (5
models, 2,000 random keys each) for those who want to see it, and it would show a statistic that is not what it says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError
from quorumark.model.statistic import Canonical

__all__ = ["Calibration", "calibrate"]

# sums of 2^16 numbers below 2^7 stay below 2^24: float32 holds every one of them exactly, in any order
_CHUNK = 1 << 16
_KEYS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Calibration:
    """z of each model (rows) under each key (columns), and how normal they are all together."""

    names: tuple[str, ...]
    z: NDArray[np.float64]

    @property
    def mean(self) -> float:
        return float(self.z.mean())

    @property
    def deviation(self) -> float:
        return float(self.z.std(ddof=1))

    def above(self, limit: float) -> float:
        """The share of z at or above a limit."""
        return float((self.z >= limit).mean())

    @staticmethod
    def expected_above(limit: float) -> float:
        return math.erfc(limit / math.sqrt(2)) / 2

    def distance(self) -> float:
        """Kolmogorov's: the largest difference between the distribution of all z and the standard normal one."""
        ordered = np.sort(self.z.reshape(-1))
        ideal = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in ordered])
        steps = np.arange(ordered.size + 1) / ordered.size
        return float(max(np.abs(steps[1:] - ideal).max(), np.abs(steps[:-1] - ideal).max()))

    def p_normal(self) -> float:
        """The chance of such a distance if z is standard normal: 2·Σ (−1)^(k−1)·exp(−2k²·n·D²).

        For z of one key on several models to be independent, the models must be unlike each other; those of several
        keys on one model always are.
        """
        scaled = self.z.size * self.distance() ** 2
        if scaled < 0.04:  # the series converges slowly there, and the answer is 1
            return 1.0
        return float(
            min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * scaled) for k in range(1, 101))))
        )

    def as_dict(self) -> dict[str, Any]:
        limits = (2, 3, 4, 6)
        return {
            "models": list(self.names),
            "keys": int(self.z.shape[1]),
            "mean": self.mean,
            "deviation": self.deviation,
            "largest": float(self.z.max()),
            "kolmogorov_distance": self.distance(),
            "p_normal": self.p_normal(),
            "above": {str(limit): self.above(limit) for limit in limits},
            "expected_above": {str(limit): self.expected_above(limit) for limit in limits},
        }


def calibrate(
    forms: Sequence[Canonical],
    keys: int = 2000,
    *,
    seed: int | None = None,
    names: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """z of models in canonical form under random keys of ±1, which are thrown away. They are nobody's: no secrets."""
    if not forms or keys < 1 or any(form.x.size != forms[0].x.size or form.x.dtype != np.int8 for form in forms):
        raise InputError(
            "forms", "must be models of one layout in 8 bits, and keys at least 1", f"{len(forms)}, {keys}"
        )
    generator = np.random.Generator(np.random.SFC64(seed))
    size = forms[0].x.size
    sums = np.zeros((len(forms), keys))
    stacked = [form.x for form in forms]
    done = 0
    for first in range(0, keys, _KEYS_AT_ONCE):
        count = min(_KEYS_AT_ONCE, keys - first)
        for start in range(0, size, _CHUNK):
            part = np.stack([x[start : start + _CHUNK] for x in stacked]).astype(np.float32)
            width = part.shape[1]
            words = np.frombuffer(generator.bytes(count * -(-width // 8)), np.uint8).reshape(count, -1)
            signs = np.unpackbits(words, axis=1, count=width).astype(np.float32)
            # τ = 1 − 2·bit, so ⟨x, τ⟩ = Σx − 2·⟨x, bits⟩
            sums[:, first : first + count] += part.sum(axis=1, dtype=np.float64)[:, None] - 2.0 * (part @ signs.T)
        done += count
        if progress is not None:
            progress(done)
    norms = np.array([math.sqrt(form.norm2) for form in forms])
    return Calibration(tuple(names) or tuple(str(i) for i in range(1, len(forms) + 1)), sums / norms[:, None])
