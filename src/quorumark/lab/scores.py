"""z of a run's models for keys that are known (`quorumark.research`), by each statistic, on the device that trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from quorumark.layout import ModelLayout
from quorumark.research import SeededKey, TensorsInMemory
from quorumark.verify.statistic import STATISTICS, Canonical, canonical_form

__all__ = ["null_scores", "z_scores"]


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


def _scores(form: Canonical, keys: Iterable[SeededKey], device: Any) -> list[float]:
    """z for each key. float64 holds the sums of whole numbers below 2^53 exactly, and larger ones well enough."""
    import torch

    x = torch.from_numpy(form.x).to(device, torch.float64)
    dots = torch.stack([x @ key.signs(device).to(torch.float64) for key in keys]).cpu().tolist()
    norm = float(form.norm2) ** 0.5 or 1.0
    return [dot / norm for dot in dots]
