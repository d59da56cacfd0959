"""The rule and the statistic of the paper's public code, for comparison. They are not those of the paper's text.

They cover every trainable tensor T of n_T weights, gains and shifts of norms too, each with signs τ_T of norm 1:

    m_k = mean over T of ‖Δ_kT‖          EMA_k = 0.9·EMA_k + 0.1·m_k, from 0          scale_kT = c·EMA_k·‖Δ_kT‖

A round adds (1/K)·Σ_k scale_kT·τ_T to tensor T, with one key for all members; the baseline, in which each member has a
key of its own, adds (1/K)·Σ_k scale_kT·τ_kT. The statistic is the mean over T of cos(θ_T, τ_T), divided by σ = 0.01.
For random signs σ is √(Σ 1/n_T) divided by the number of tensors, about that; `code_scores` measures it.

As everywhere in the lab, what is added is rounded to integer multiples of 2^-40. The key is known: for research only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor

from quorumark.model.layout import ModelLayout
from quorumark.research.known import SeededKey
from quorumark.research.lab.mark import decoded

__all__ = ["CODE", "SIGMA", "CodeKey", "CodeMark", "Trainable", "code_scores", "mean_cosines"]

CODE = "paper-code"  # the statistic's name in result files; it is none of `verify.statistic`
SIGMA = 0.01  # what the code divides by
KEYS = 1000  # random keys that σ is measured with: it is then known to 2 %
_DECAY = 0.9
_SCALE = float(1 << 40)


class Trainable:
    """Where the trainable tensors are in a vector of the layout's order: carriers first, as in the layout."""

    def __init__(self, layout: ModelLayout, names: Collection[str], device: Any) -> None:
        found = [(spec, place) for spec, place in layout.spans() if spec.name in names and spec.size]
        self.places = [place for _, place in found]
        sizes = [spec.size for spec, _ in found]
        self.carriers = sum(spec.role == "carrier" for spec, _ in found)  # so many of the tensors carry our mark
        self.size, self.others = sum(sizes), sum(sizes[self.carriers :])
        self.sizes = torch.tensor(sizes, device=device)
        self.index = torch.cat([torch.arange(place.start, place.stop) for place in self.places]).to(device)

    def norms(self, vector: Tensor) -> Tensor:
        """‖v_T‖ of each tensor."""
        return torch.stack(torch._foreach_norm([vector[place] for place in self.places])).double()

    def spread(self, values: Tensor) -> Tensor:
        """A value for each tensor to one for each of its weights."""
        return values.repeat_interleave(self.sizes, output_size=self.size)


class Signs(Protocol):
    def signs(self, device: Any) -> Any: ...


@dataclass(frozen=True)
class CodeKey:
    """Signs for all trainable tensors: those of a key over the carriers, and others for the rest."""

    carriers: SeededKey
    others: SeededKey

    @classmethod
    def of(cls, trainable: Trainable, key: SeededKey, seed: int, number: int) -> CodeKey:
        return cls(key, SeededKey(trainable.others, seed, (1 << 32) + number))

    def signs(self, device: Any) -> Tensor:
        return torch.cat([self.carriers.signs(device), self.others.signs(device)])


class CodeMark:
    """What is added in each round; used like `mark.Mark`. With several keys it is the baseline, a key per member."""

    def __init__(
        self, c: float, layout: ModelLayout, trainable: Trainable, initial: Tensor, keys: Sequence[CodeKey], device: Any
    ) -> None:
        self._c, self._tensors, self._keys, self.device = c, trainable, list(keys), device
        self._end = layout.carrier_size
        self._initial = self._model = initial
        self._roots = trainable.sizes.double().sqrt()
        self._signs = keys[0].signs(device) if len(keys) == 1 else None
        self._ema: Tensor | None = None  # one for each member
        self._total = torch.zeros(len(trainable.places), dtype=torch.float64, device=device)  # Σ A_T
        self.added: Tensor | None = None  # the last round's amplitudes over the carriers in 2^-40

    expected_z = None  # of the rule and the statistic of the paper's code there is no forecast

    @property
    def rho(self) -> float:
        """‖ΣA‖/‖θ − θ_0‖ over the carriers, as `Mark.rho`."""
        some = slice(0, self._tensors.carriers)
        mark = float((self._total[some] * self._roots[some]).norm())
        distance = float((self._model[: self._end] - self._initial[: self._end]).double().norm())
        return mark / distance if distance else 0.0

    def apply(
        self,
        round_no: int,  # noqa: ARG002 - as Mark.apply
        before: Tensor,
        total: Tensor,
        weights: Sequence[Fraction],
        model: Callable[[int], Tensor],
        sums: Any = None,  # noqa: ARG002 - as Mark.apply
        packed: Any = None,  # noqa: ARG002 - as Mark.apply
    ) -> tuple[Tensor, float]:
        """The round's global model, and c. Members count alike, as in the code. Nothing waits for the device."""
        tensors, members = self._tensors, len(weights)
        norms = torch.stack([tensors.norms(model(k) - before) for k in range(members)])  # ‖Δ_kT‖
        zero = torch.zeros(members, dtype=torch.float64, device=norms.device)
        self._ema = _DECAY * (zero if self._ema is None else self._ema) + (1 - _DECAY) * norms.mean(1)
        each = self._c * self._ema[:, None] * norms / (members * self._roots)  # scale_kT/K, for each weight
        amplitudes = torch.round(each.sum(0) * _SCALE)
        self._total = self._total + amplitudes / _SCALE
        spread = tensors.spread(amplitudes.to(torch.int64))
        self.added = spread[: self._end]
        if self._signs is not None:
            mark = spread * self._signs
        else:
            mark = torch.zeros_like(spread)
            for key, own in zip(self._keys, each, strict=True):
                mark += tensors.spread(torch.round(own * _SCALE).to(torch.int64)) * key.signs(self.device)
        total[tensors.index] += mark
        self._model = decoded(total)
        return self._model, self._c

    # --- keeping it ---

    def saved(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"ema": None if self._ema is None else self._ema.cpu(), "total": self._total.cpu()}

    def restore(self, saved: dict[str, Any], model: Tensor) -> None:
        """Goes on from a checkpoint; `model` is the last global one."""
        self._ema = None if saved["ema"] is None else saved["ema"].to(self._total.device)
        self._total, self._model = saved["total"].to(self._total.device), model

    def close(self) -> None:
        """There is no thread to end."""


# --- the statistic ----------------------------------------------------------------------------------------


def mean_cosines(trainable: Trainable, vector: Tensor, keys: Iterable[Signs], device: Any) -> list[float]:
    """The mean over the tensors of cos(θ_T, τ_T), for each key; a tensor of zeros counts as 0."""
    norms = trainable.norms(vector)
    scale = torch.where(norms > 0, 1 / norms, 0.0) / (trainable.sizes.double().sqrt() * len(trainable.places))
    x = vector[trainable.index].double() * trainable.spread(scale)
    return [float(x @ key.signs(device).double()) for key in keys]


def code_scores(
    trainable: Trainable, vector: Tensor, keys: Sequence[Signs], device: Any, count: int = KEYS
) -> dict[str, float]:
    """z by the paper's code: divided by its σ, and by the one that random keys have on this very model.

    With a key for each member the mean over them, and the least and the largest.
    """
    random = (SeededKey(trainable.size, 1 << 33, number) for number in range(count))  # one at a time: 1.4 MB each
    sigma = statistics.pstdev(mean_cosines(trainable, vector, random, device), 0.0)
    cosines = mean_cosines(trainable, vector, keys, device)
    mean = statistics.fmean(cosines)
    out = {CODE: mean / SIGMA, f"{CODE} calibrated": mean / sigma}
    if len(cosines) > 1:
        out |= {f"{CODE} least": min(cosines) / SIGMA, f"{CODE} largest": max(cosines) / SIGMA}
    return {name: round(z, 3) for name, z in out.items()} | {f"{CODE} sigma": round(sigma, 6)}
