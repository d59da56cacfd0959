"""z of a run's models for keys that are known (`research.known`), by each statistic, on the device that trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import STATISTICS, Canonical, canonical_form
from quorumark.research.known import SeededKey, TensorsInMemory

__all__ = ["null_scores", "shown", "z_scores"]

_BARE, _WIDE = 0.95, 16  # share of a row's signs that shows it bare; rows with fewer weights tell nothing


def z_scores(
    layout: ModelLayout,
    vector: NDArray[Any],
    anchor: NDArray[Any],
    keys: Mapping[str, SeededKey],
    device: Any = "cpu",
    statistics: Iterable[str] = tuple(STATISTICS),
) -> dict[str, dict[str, float]]:
    """z = ⟨x, τ⟩/‖x‖ by each of the statistics, for each key; models in the layout's order."""
    suspect, initial = TensorsInMemory.of(layout, vector), TensorsInMemory.of(layout, anchor)
    out: dict[str, dict[str, float]] = {}
    for statistic in statistics:
        form = canonical_form(statistic, layout, suspect, initial)
        out[statistic] = dict(zip(keys, _scores(form, keys.values(), device), strict=True))
    return out


def null_scores(
    layout: ModelLayout, vector: NDArray[Any], anchor: NDArray[Any], count: int, device: Any = "cpu"
) -> list[float]:
    """z of so many keys that no run uses, by the default statistic."""
    suspect, start = TensorsInMemory.of(layout, vector), TensorsInMemory.of(layout, anchor)
    form = canonical_form("balanced-anchor/v1", layout, suspect, start)
    keys = (SeededKey(layout.coordinates, 1 << 32, number) for number in range(count))
    return _scores(form, keys, device)


def shown(layout: ModelLayout, model: Any, initial: Any, key: SeededKey) -> dict[str, float]:
    """What θ − θ_0, which everybody who saw the run knows, shows of the key, over the carriers.

    `cosine` is its cosine with the key, `signs` the share of weights that moved the way of their sign (one half is
    chance), `bare` the share of weights in rows where 95 % of them did: rows that little but the mark moved.
    """
    moved = (model[: layout.carrier_size] - initial[: layout.carrier_size]).double()
    signs = key.signs(moved.device)
    right = moved * signs > 0
    bare = 0
    for spec, place in layout.spans("carrier"):
        width = spec.size // max(1, spec.shape[0])
        if width >= _WIDE:
            bare += width * int((right[place].view(-1, width).double().mean(1) >= _BARE).sum())
    cosine = float(moved @ signs.double() / (moved.norm() * moved.numel() ** 0.5)) if float(moved.norm()) else 0.0
    found = {"cosine": cosine, "signs": float(right.double().mean()), "bare": bare / moved.numel()}
    return {name: round(value, 5) for name, value in found.items()}


def _scores(form: Canonical, keys: Iterable[SeededKey], device: Any) -> list[float]:
    """z for each key. float64 holds the sums of integers below 2^53 exactly, and larger ones well enough."""
    import torch

    x = torch.from_numpy(form.x).to(device, torch.float64)
    dots = torch.stack([x @ key.signs(device).to(torch.float64) for key in keys]).cpu().tolist()
    norm = float(form.norm2) ** 0.5 or 1.0
    return [dot / norm for dot in dots]
