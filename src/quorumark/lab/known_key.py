"""A key that is known, for research: signs from a seed, and z of a model for it.

Nobody holds such a key in a consortium; there z comes from `quorumark verify`, by t members. The statistic is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.layout import ModelLayout
from quorumark.verify.statistic import STATISTICS, Canonical, canonical_form

__all__ = ["KnownKey", "MemoryModel", "null_scores", "z_scores"]


class KnownKey:
    """d random signs. `number` tells the keys of one seed apart."""

    def __init__(self, coordinates: int, seed: int, number: int = 0) -> None:
        self.coordinates = coordinates
        words = np.random.default_rng([0x6B6579, seed, number]).bytes(-(-coordinates // 8))
        self._bits: NDArray[np.uint8] = np.frombuffer(words, np.uint8)

    @classmethod
    def of_signs(cls, signs: NDArray[Any]) -> KnownKey:
        """A key that came from elsewhere."""
        key = cls(0, 0)
        key.coordinates, key._bits = signs.size, np.packbits(signs > 0, bitorder="little")
        return key

    def __repr__(self) -> str:
        return f"KnownKey({self.coordinates} signs, hidden)"

    def numpy(self) -> NDArray[np.int8]:
        """The signs, ±1."""
        ones = np.unpackbits(self._bits, count=self.coordinates, bitorder="little")
        return (2 * ones.astype(np.int8) - 1).astype(np.int8)

    def signs(self, device: Any) -> Any:
        """The same on a device, as int8."""
        import torch

        packed = torch.from_numpy(self._bits.copy()).to(device)
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        ones = ((packed[:, None] >> shifts) & 1).view(-1)[: self.coordinates]
        return 2 * ones.to(torch.int8) - 1


class MemoryModel:
    """A model in memory, in the form that the statistic reads: some rows of a tensor at a time."""

    def __init__(self, layout: ModelLayout, vector: NDArray[Any]) -> None:
        self._parts = {spec.name: (spec.shape, vector[place]) for spec, place in layout.spans("carrier")}

    def blocks(self, name: str, limit: int = 1 << 22) -> Iterator[tuple[int, NDArray[Any]]]:
        shape, values = self._parts[name]
        rows = values.reshape(shape[0], -1)
        step = max(1, limit // max(1, rows.shape[1]))
        for begin in range(0, shape[0], step):
            yield begin, rows[begin : begin + step].reshape(-1, *shape[1:])


def z_scores(
    layout: ModelLayout, vector: NDArray[Any], anchor: NDArray[Any], keys: Mapping[str, KnownKey], device: Any = "cpu"
) -> dict[str, dict[str, float]]:
    """z = ⟨x, τ⟩/‖x‖ by each of the three statistics, for each key; models in the layout's order."""
    suspect, initial = MemoryModel(layout, vector), MemoryModel(layout, anchor)
    out: dict[str, dict[str, float]] = {}
    for statistic in STATISTICS:
        form = canonical_form(statistic, layout, suspect, initial)
        out[statistic] = dict(zip(keys, _scores(form, keys.values(), device), strict=True))
    return out


def null_scores(
    layout: ModelLayout, vector: NDArray[Any], anchor: NDArray[Any], count: int, device: Any = "cpu"
) -> list[float]:
    """z of so many keys that no run uses, by the default statistic."""
    form = canonical_form("balanced-anchor/v1", layout, MemoryModel(layout, vector), MemoryModel(layout, anchor))
    return _scores(form, (KnownKey(layout.coordinates, 1 << 32, number) for number in range(count)), device)


def _scores(form: Canonical, keys: Iterable[KnownKey], device: Any) -> list[float]:
    """z for each key. float64 holds the sums of whole numbers below 2^53 exactly, and larger ones well enough."""
    import torch

    x = torch.from_numpy(form.x).to(device, torch.float64)
    dots = torch.stack([x @ key.signs(device).to(torch.float64) for key in keys]).cpu().tolist()
    norm = float(form.norm2) ** 0.5 or 1.0
    return [dot / norm for dot in dots]
