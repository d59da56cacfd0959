"""The research door: z with a key that is known.

Attack suites and the lab ask for z thousands of times, of models that they made themselves, with keys that protect
nothing. That needs no ledger and no coalition, and must never be possible with a key that matters; so it lives here,
apart, and no command that members use in earnest reaches it (tests/house/test_layers.py holds them to it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.consortium.records import Manifest
from quorumark.errors import InputError
from quorumark.field import Vector
from quorumark.model.blocks import blocks_of
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import STATISTICS, Canonical, Model, canonical_form
from quorumark.verify.null import log10_layers

__all__ = ["KnownKey", "SeededKey", "TensorsInMemory"]


@dataclass(frozen=True, eq=False)
class TensorsInMemory:
    """A model as named arrays (numpy, or torch on the CPU), read in blocks."""

    tensors: Mapping[str, Any]

    @classmethod
    def of(cls, layout: ModelLayout, vector: NDArray[Any]) -> TensorsInMemory:
        """The carriers of a model that lies in one vector."""
        return cls({spec.name: vector[place].reshape(spec.shape) for spec, place in layout.spans("carrier")})

    def blocks(self, name: str, limit: int = 1 << 22) -> Any:
        tensor = self.tensors[name]
        array = np.atleast_1d(np.asarray(tensor.detach().float().numpy() if hasattr(tensor, "detach") else tensor))
        rows = max(1, limit // max(1, array[0].size))
        for begin in range(0, array.shape[0], rows):
            yield begin, array[begin : begin + rows]


class SeededKey:
    """d random signs from a seed: a key for experiments, which everybody who knows the seed knows.

    `number` tells the keys of one seed apart.
    """

    def __init__(self, coordinates: int, seed: int, number: int = 0) -> None:
        self.coordinates = coordinates
        words = np.random.default_rng([0x6B6579, seed, number]).bytes(-(-coordinates // 8))
        self._bits: NDArray[np.uint8] = np.frombuffer(words, np.uint8)

    @classmethod
    def of_signs(cls, signs: NDArray[Any]) -> SeededKey:
        """A key that came from elsewhere."""
        key = cls(0, 0)
        key.coordinates, key._bits = signs.size, np.packbits(signs > 0, bitorder="little")
        return key

    def __repr__(self) -> str:
        return f"SeededKey({self.coordinates} signs, hidden)"

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

    def z_by_block(self, form: Canonical) -> list[float]:
        """z of every block by the default rule; 0 where x is 0."""
        found = []
        for span in blocks_of(self.layout).spans:
            x = form.x[span].astype(np.int64)
            length = math.sqrt(int((x * x).sum()))
            found.append(float((x * self.key[span]).sum()) / length if length else 0.0)
        return found

    def q_of(self, form: Canonical) -> tuple[float, float] | None:
        """Q over all blocks and log10 of its bound; None for a model of one block."""
        z = self.z_by_block(form)
        q = sum(one * one for one in z)
        return (q, float(log10_layers(f"{q:.2f}", len(z)))) if len(z) > 1 else None

    def all_z(self, model: Model | Mapping[str, Any]) -> dict[str, float]:
        """By every statistic there is, side by side."""
        return {statistic: self.z(model, statistic) for statistic in STATISTICS}
