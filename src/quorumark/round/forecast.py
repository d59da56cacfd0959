"""What z a verification of the present model would give, from what is public alone (docs/strength.md, "Forecast").

The mark moves weight j by A_j·τ_j, where A is what was embedded in all rounds, as far as it is still there. A statistic
makes x of the model, and z = ⟨x, τ⟩/‖x‖. So

    E[z] = Σ_j (∂x_j/∂θ_j)·A_j / ‖x‖

and no key is needed: the derivative is measured with random signs ε in the key's place,

    E[z] ≈ ½·⟨ε, x(θ + ε⊙A) − x(θ − ε⊙A)⟩ / ‖x(θ)‖

What the measured z differs by: the key's own chance, a normal number of variance 1, and what training does to a mark
besides weight decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import BLOCK, canonical_form
from quorumark.round.amplitudes import MarkState

__all__ = ["expected_z"]

_SIGNS = 0x7A  # any seed: the same forecast for everybody


class _Carriers:
    """The carriers of a model in one vector, as a statistic reads them."""

    def __init__(self, layout: ModelLayout, weights: NDArray[np.float64]) -> None:
        self._weights = weights
        self._places = {spec.name: (spec, place) for spec, place in layout.spans("carrier")}

    def blocks(self, name: str, limit: int = BLOCK) -> Iterator[tuple[int, NDArray[Any]]]:
        spec, place = self._places[name]
        rows = self._weights[place].reshape(spec.shape[0], -1)
        step = max(1, limit // max(1, rows.shape[1]))
        for begin in range(0, rows.shape[0], step):
            yield begin, rows[begin : begin + step].astype(np.float32)


def expected_z(state: MarkState, statistic: str) -> float:
    """z of the state's model, as far as the mark's amplitudes tell; 0 before there is a mark."""
    embedded = state.embedded()
    if not embedded.any():
        return 0.0
    layout, end = state.layout, state.layout.carrier_size
    model, anchor = _decoded(state.model[:end]), _Carriers(layout, _decoded(state.anchor[:end]))
    signs = np.where(np.random.default_rng(_SIGNS).integers(0, 2, embedded.size, np.int8), 1, -1).astype(np.int8)
    probe = np.zeros(end)
    probe[layout.carrying()] = signs * embedded

    def form(weights: NDArray[np.float64]) -> NDArray[Any]:
        return canonical_form(statistic, layout, _Carriers(layout, weights), anchor).x

    rise = sum(sign * float(signs @ form(model + sign * probe).astype(np.float64)) for sign in (1, -1)) / 2
    size = sqrt(float(np.square(form(model).astype(np.float64)).sum()))
    return rise / size if size else 0.0


def _decoded(vector: Vector) -> NDArray[np.float64]:
    return np.asarray(codec.decode(vector, np.float64), np.float64)
