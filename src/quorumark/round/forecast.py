"""What z a verification of the present model would give, from what is public alone (docs/strength.md, "Forecast").

The mark moves weight j by A_j·τ_j, where A is what was embedded in all rounds, as far as it is still there. A statistic
makes x of the model, and z = ⟨x, τ⟩/‖x‖. So

    E[z] = Σ_j (∂x_j/∂θ_j)·A_j / ‖x‖

where weight decay takes the mark along, and A counts that (`Strength.kept`). No key is needed: the derivative is
measured with random signs ε in the key's place,

    E[z] ≈ ½·⟨ε, x(θ + ε⊙A) − x(θ − ε⊙A)⟩ / ‖x(θ)‖

What the measured z differs by: the key's own chance, a normal number of variance 1, and what training does to a mark
besides weight decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec
from quorumark.consortium.plan import SPARED, Plan, growth
from quorumark.consortium.strength import ONE, Strength
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import BLOCK, Scales, canonical_form
from quorumark.round.amplitudes import MarkState

__all__ = ["SPARE", "Course", "course", "expected_z", "rises"]

SPARE = 4.0  # how far above the threshold a run should end
FIRST = 5  # rounds: before that the mark has hardly begun

_SPENT = 0.9  # of what all rounds together may show: hardly any mark is to come

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
    forms = _Forms(state, statistic)
    size = float(np.linalg.norm(forms.of(np.zeros(embedded.size))))
    return float(forms.rises(embedded).sum()) / size if size else 0.0


def rises(state: MarkState, statistic: str, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """(∂x_j/∂θ_j)·steps_j, weight by weight: ½·ε_j·(x(θ + ε⊙steps) − x(θ − ε⊙steps))_j. Only sums over many are of use:
    x is rounded, and each entry has a part in it of what the other steps do."""
    return _Forms(state, statistic).rises(steps)


class _Forms:
    """x of the state's model after steps of its carrying weights."""

    def __init__(self, state: MarkState, statistic: str) -> None:
        end = state.layout.carrier_size
        self._layout, self._statistic = state.layout, statistic
        self._model = _decoded(state.model[:end])
        self._anchor = _Carriers(state.layout, _decoded(state.anchor[:end]))
        self._scales = _of_anchor(state.anchor_digest, state.layout.digest())

    def of(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        weights = self._model.copy()
        weights[self._layout.carrying()] += steps
        moved = _Carriers(self._layout, weights)
        form = canonical_form(self._statistic, self._layout, moved, self._anchor, known=self._scales)
        return form.x.astype(np.float64)

    def rises(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        signs = _signs(steps.size)
        risen: NDArray[np.float64] = signs * (self.of(signs * steps) - self.of(-signs * steps)) / 2
        return risen


@lru_cache(maxsize=2)
def _of_anchor(anchor: bytes, layout: str) -> dict[str, Scales]:  # noqa: ARG001 - what the scales depend on
    """The scales of an anchor's tensors, once they are known: the same in every round of a run."""
    return {}


@lru_cache(maxsize=1)
def _signs(count: int) -> NDArray[np.int8]:
    return np.where(np.random.default_rng(_SIGNS).integers(0, 2, count, np.int8), 1, -1).astype(np.int8)


@dataclass(frozen=True)
class Course:
    """What z a run is on course for at its planned end, 0 where that is not known yet; what to do if it is little."""

    final_z: float = 0.0
    advice: str = ""


def course(
    strength: Strength,
    threshold: float,
    done: int,
    planned: int,
    z: float,
    rho: float,
    *,
    coordinates: int,
    spent: float = 0.0,
) -> Course:
    """From what is expected after `done` rounds: z grows as it did in most runs, up to where the rule stops.

    It stops at ρ*, and where L is at its limit. `z` and `rho` are those of the present model, `spent` is L² over its
    limit's: if rounds go on to take as much of it, the mark ends after so many more. `threshold` is z*. A run should
    end at z* + 4 or more.
    """
    ends, warm = max(done, planned), strength.warmup_rounds
    if strength.rule == "paper" or not planned or done < min(FIRST + warm, planned):
        return Course()
    steered, limit = strength.rule in ("rho", "target"), strength.rho / ONE
    marked = max(1, done - warm - SPARED)
    stops = done + int(marked * (1 - spent) / spent) if spent else 10**9

    def after(rounds: int) -> float:
        left = prod(strength.kept(number) / ONE for number in range(done + 1, rounds + 1))
        grown = z * (left + growth(strength, done, min(rounds, max(done, stops))) - 1)
        return min(grown, max(z, z * limit / rho) if steered and rho > 0 else inf)

    final, needed = after(ends), threshold + SPARE
    if final >= needed:
        return Course(final)
    helps = []
    if steered and spent > _SPENT and rho < limit / 2:
        helps.append(
            "a lower learning rate from the start, or Adam: the first rounds moved the model so much further than the "
            "later ones that their mark is all that may show"
        )
    longer = next((n for n in range(ends + 1, 10 * ends + 1) if after(n) >= needed), None)
    if longer is not None:
        helps.append(f"train for {longer} rounds instead")
    plan = Plan.propose(coordinates, ends, target_z=needed)
    settings = [(name, plan.strength[name], getattr(strength, name) / ONE) for name in ("c_max", "rho")]
    stronger = [f"--strength {name}={text}" for name, text, now in settings if float(text) > now + 1e-6]
    if strength.rule == "rho" and stronger and ends > done:
        helps.append(f"stop, and let all sign a stronger mark: quorumark consortium amend {' '.join(stronger)}")
    helps.append("a larger model carries a stronger mark")
    comes = (
        f"this run is on course for z = {final:.1f} after {ends} rounds, and should end"
        if ends > done
        else f"this run has come to z = {final:.1f}, and should have ended"
    )
    return Course(
        final,
        f"{comes} at {needed:g} or more: a verification passes from {threshold:g} on, and a suspect may have lost some "
        f"of it. What helps: {'; or '.join(helps)}",
    )


def _decoded(vector: Vector) -> NDArray[np.float64]:
    return np.asarray(codec.decode(vector, np.float64), np.float64)
