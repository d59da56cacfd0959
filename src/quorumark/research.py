"""The research door: z with a key that is known.

Attack suites and the lab ask for z thousands of times, of models that they made themselves, with keys that protect
nothing. That needs no ledger and no coalition, and must never be possible with a key that matters; so it lives here,
apart, and no command that members use in earnest reaches it (tests/test_layers.py holds them to it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.errors import InputError
from quorumark.field import Vector
from quorumark.layout import ModelLayout
from quorumark.records import Manifest
from quorumark.verify.statistic import STATISTICS, Canonical, Model, canonical_form

__all__ = ["KnownKey", "TensorsInMemory", "random_key"]


@dataclass(frozen=True, eq=False)
class TensorsInMemory:
    """A model as named arrays (numpy, or torch on the CPU), read in blocks."""

    tensors: Mapping[str, Any]

    def blocks(self, name: str, limit: int = 1 << 22) -> Any:
        tensor = self.tensors[name]
        array = np.asarray(tensor.detach().float().numpy() if hasattr(tensor, "detach") else tensor)
        rows = max(1, limit // max(1, array[0].size))
        for begin in range(0, array.shape[0], rows):
            yield begin, array[begin : begin + rows]


def random_key(coordinates: int, seed: int) -> NDArray[np.int8]:
    """Signs from a seed: a key for experiments, which everybody who knows the seed knows."""
    generator = np.random.Generator(np.random.SFC64(seed))
    return (1 - 2 * generator.integers(0, 2, coordinates, dtype=np.int8)).astype(np.int8)


@dataclass(frozen=True, eq=False)
class KnownKey:
    """A key in use (σ ⊙ τ_raw) that somebody put together, with the layout and the anchor that it goes with."""

    key: NDArray[np.int8]
    layout: ModelLayout
    anchor: Model

    def __post_init__(self) -> None:
        if self.key.shape != (self.layout.coordinates,):
            raise InputError("key", f"must have {self.layout.coordinates} coordinates", self.key.shape)

    @classmethod
    def from_shares(
        cls, manifest: Manifest, shares: Mapping[int, Vector], layout: ModelLayout, anchor: Model
    ) -> KnownKey:
        """From t shares of a key of ±1 that is given up for it."""
        size = manifest.terms.coordinates
        parts = {point: share[:size] for point, share in list(shares.items())[: manifest.terms.threshold]}
        raw = field.to_signed(shamir.reconstruct(parts, manifest.terms.threshold))
        return cls(np.where(manifest.genesis.whitening(0, size), -raw, raw).astype(np.int8), layout, anchor)

    def form(self, model: Model, statistic: str = "balanced-anchor/v1") -> Canonical:
        return canonical_form(statistic, self.layout, model, self.anchor)

    def z(self, model: Model | Mapping[str, Any], statistic: str = "balanced-anchor/v1") -> float:
        """z of a model that lies in memory or is read in blocks."""
        opened: Model = TensorsInMemory(model) if isinstance(model, Mapping) else model
        return self.z_of(self.form(opened, statistic))

    def z_of(self, form: Canonical) -> float:
        """z of a canonical form, such as `prepare` makes of a suspect, aligned or not."""
        total = sum(int((form.x[part].astype(np.int64) * self.key[part]).sum()) for part in field.chunks(form.x.size))
        return float(total / np.sqrt(float(form.norm2))) if form.norm2 else 0.0

    def all_z(self, model: Model | Mapping[str, Any]) -> dict[str, float]:
        """By every statistic there is, side by side."""
        return {statistic: self.z(model, statistic) for statistic in STATISTICS}
