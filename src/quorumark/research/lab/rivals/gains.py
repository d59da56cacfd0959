"""Signs in the gains γ of norms, by a secret projection: bit n of a member is right if (M·γ)_n has the sign b_n.

FedIPR (arXiv 2109.13236): every member has M and b of its own, for each chosen layer, and minimises α·Σ max(0, −b·Mγ)
beside its loss. Settings of its code: 40 bits over the four norms of the last stage, α = 0.2, SGD with rate 0.01 and
momentum 0.9. Members of the lab train with AdamW, whose steps have one size whatever the gradient is: a term of the
loss would move a gain as little as anything else. So its step stands beside AdamW's, as weight decay does:

    v ← 0.9·v − α·Mᵀ(b where b·Mγ < 0)          γ ← γ − 0.01·v

FedTracker (arXiv 2211.07160): the server gives each member a copy with a fingerprint of 128 bits over two of these
norms together, by up to 6 steps of size 0.005 down Σ max(0, ε − b·Mγ), ε = 0.5, until the copy's score is 0.85 and the
highest of all members'. The score is the mean of min(1, b·Mγ/ε).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout
from quorumark.research.lab.fleet import Fleet

__all__ = ["GainSigns", "SignedFleet", "fingerprinted", "norm_gains"]

ALPHA, RATE, MOMENTUM = 0.2, 0.01, 0.9  # FedIPR
STEP, EPSILON, ENOUGH, STEPS = 0.005, 0.5, 0.85, 6  # FedTracker
_LAYERS: dict[str, dict[str, tuple[str, ...]]] = {  # where a network's gains are that carry: of the last stage
    "fedipr": {"resnet18": ("layer4.0.bn1", "layer4.0.bn2", "layer4.1.bn1", "layer4.1.bn2"), "cnn": ("bn1", "bn2")},
    "fedtracker": {"resnet18": ("layer4.0.bn1", "layer4.1.bn2"), "cnn": ("bn1", "bn2")},
}


def norm_gains(method: str, model: str) -> tuple[str, ...]:
    """The names of the gains that a method uses in a network."""
    found = _LAYERS[method].get(model.removesuffix("-tiny"))
    if found is None:
        raise InputError("model", f"must be one of {', '.join(_LAYERS[method])} for {method}", repr(model))
    return tuple(f"{name}.weight" for name in found)


@dataclass(frozen=True, eq=False)
class GainSigns:
    """Members' secrets: matrix[K, N, C] and bits[K, N] for the C gains at `places` of a vector (the layout's order)."""

    names: tuple[str, ...]
    places: Tensor
    matrix: Tensor
    bits: Tensor

    @classmethod
    def draw(
        cls, layout: ModelLayout, names: Sequence[str], members: int, count: int, seed: int, device: Any,
        *, by_layer: bool,
    ) -> GainSigns:  # fmt: skip
        """Normal projections and fair bits. With `by_layer` a bit is of one layer's gains; layers have equal shares."""
        spans = [place for spec, place in layout.spans() if spec.name in names]
        places = torch.cat([torch.arange(place.start, place.stop) for place in spans])
        generator = torch.Generator().manual_seed(seed)
        matrix = torch.randn(members, count, len(places), generator=generator)
        if by_layer:
            layer = torch.cat([torch.full((place.stop - place.start,), i) for i, place in enumerate(spans)])
            matrix *= (torch.arange(count) * len(spans) // count)[:, None] == layer
        bits = 2.0 * torch.randint(2, (members, count), generator=generator) - 1
        return cls(tuple(names), places.to(device), matrix.to(device), bits.to(device))

    def agreement(self, gains: Tensor) -> Tensor:
        """b·Mγ[K, N] for gains[C], or for each member's own gains[K, C]."""
        wide = gains.expand(len(self.matrix), -1)
        return torch.einsum("knc,kc->kn", self.matrix, wide) * self.bits

    def hits(self, vector: Tensor) -> list[int]:
        """How many of each member's bits are right in a model."""
        found: list[int] = (self.agreement(vector[self.places].float()) > 0).sum(1).tolist()
        return found

    def scores(self, vector: Tensor) -> list[float]:
        """FedTracker's score of each member's fingerprint in a model."""
        found: list[float] = (self.agreement(vector[self.places].float()) / EPSILON).clamp(max=1).mean(1).tolist()
        return found


def fingerprinted(signs: GainSigns, gains: Tensor) -> Tensor:
    """Everybody's copy of the gains[C], with its fingerprint: [K, C]."""
    copies = gains.float().expand(len(signs.matrix), -1).clone()
    for _ in range(STEPS):
        # of copy k with the fingerprint of j
        every = torch.einsum("jnc,kc->kjn", signs.matrix, copies) * signs.bits
        scores = (every / EPSILON).clamp(max=1).mean(2)
        own = torch.arange(len(scores), device=scores.device)
        open_ = (scores.argmax(1) != own) | (scores[own, own] < ENOUGH)
        if not bool(open_.any()):
            break
        short = (every[own, own] < EPSILON) * signs.bits * open_[:, None]
        copies += STEP * torch.einsum("kn,knc->kc", short, signs.matrix)
    return copies


class SignedFleet(Fleet):
    """Members who put signs into gains while they train, by FedIPR's rule."""

    def embed(self, signs: GainSigns) -> None:
        """Before the first round."""
        where = self.order.to_layout  # from a place in the layout's order to the one on the device
        self._signs, self._gains = signs, where[signs.places]
        self._speed = torch.zeros(self.members, len(signs.places), device=self.device)

    def load(self, vector: Tensor) -> None:
        super().load(vector)
        self._speed.zero_()

    def _follow(self, k: int, lane: int, gradients: list[Tensor]) -> None:
        super()._follow(k, lane, gradients)
        row, matrix, bits = self.theta[k], self._signs.matrix[k], self._signs.bits[k]
        wrong = ((matrix @ row[self._gains]) * bits < 0) * bits
        self._speed[k].mul_(MOMENTUM).add_(wrong @ matrix, alpha=-ALPHA)
        row.index_add_(0, self._gains, self._speed[k], alpha=-RATE)
