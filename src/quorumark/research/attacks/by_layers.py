"""Attackers who know the test by layers (docs/layers.md, docs/attacks.md): penalties part by part, and taking an
estimate of the key out of each block.

    adaptive-by-part    minimises (1 − α)·loss + α·Σ_p w_p·|cos(θ_p − θ_0p, τ′_p)| over parts p, which are the agreed
                        blocks or single rows; the weights w are even, drawn anew in every step, or alternate
    removal             subtracts a_b·τ′ from every block, then repairs by fine-tuning. The amounts are those that an
                        attacker expects, a_b = ρ·‖Δ_b‖·√n/‖τ′_b‖², or those that an oracle gives who knows the key
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError
from quorumark.model.blocks import blocks_of
from quorumark.model.layout import ModelLayout
from quorumark.research.attacks.amounts import Amounts, zeroed
from quorumark.research.attacks.base import Attack, Target, Weights, _torch
from quorumark.research.attacks.learning import _fit, _subset, _weights, carrier_rows, carrying_weights, estimate_key

__all__ = ["ATTACKS", "parts_of"]


def parts_of(layout: ModelLayout, by: str) -> NDArray[np.int64]:
    """For each coordinate the number of its part: the agreed blocks, or the rows of the carriers."""
    if by == "block":
        spans = blocks_of(layout).spans
        return np.repeat(np.arange(len(spans)), [span.stop - span.start for span in spans])
    if by == "row":
        sizes = [(place.stop - place.start) // rows for place, rows in carrier_rows(layout) for _ in range(rows)]
        return np.repeat(np.arange(len(sizes)), sizes)
    raise InputError("by", "must be block or row", repr(by))


def _part_weights(kind: str, count: int, step: int, generator: Any) -> Any:
    """w_p of a step, with a sum of 1."""
    torch = _torch()
    if kind == "even":
        weights = torch.ones(count)
    elif kind == "random":
        weights = torch.rand(count, generator=generator)
    elif kind == "alternating":
        weights = ((torch.arange(count) + step) % 2).float()
    else:
        raise InputError("weights", "must be even, random or alternating", repr(kind))
    return weights / weights.sum().clamp_min(1e-30)


def fine_tune_by_part(
    target: Target,
    seed: int,
    *,
    alpha: float = 0.7,
    estimate: str = "sum",
    coalition: bool = False,
    by: str = "block",
    weights: str = "even",
    fraction: float = 0.2,
    epochs: int = 100,
    batch: int = 128,
    learning_rate: float = 1e-3,
    decay: float = 1e-4,
) -> tuple[Weights, dict[str, Any]]:
    """Adaptive fine-tuning that keeps every part's cosine small, not their sum."""
    torch = _torch()
    if not 0 <= alpha <= 1:
        raise InputError("alpha", "must be from 0 to 1", alpha)
    layout = target.layout or ModelLayout.of(target.module())
    module = target.module()
    device = next(module.parameters()).device
    part = torch.from_numpy(parts_of(layout, by)).to(device)
    count = int(part[-1]) + 1

    def sums(values: Any) -> Any:
        return torch.zeros(count, device=device).index_add(0, part, values)

    guess = torch.from_numpy(estimate_key(target, estimate, coalition=coalition)).float().to(device)
    guess = guess / sums(guess * guess).sqrt().clamp_min(1e-30)[part]
    carrying = carrying_weights(target, module, layout, from_anchor=True)
    generator, steps = torch.Generator().manual_seed(seed), iter(range(1 << 62))

    def loss(module: Any, inputs: Any, labels: Any) -> Any:
        theta = carrying()
        cosines = sums(theta * guess) / sums(theta * theta).clamp_min(1e-30).sqrt()
        even = _part_weights(weights, count, next(steps), generator).to(device)
        return (1 - alpha) * target.loss(module, inputs, labels) + alpha * (even * cosines.abs()).sum()

    data = _subset(target, fraction, seed)
    cost = _fit(module, data, loss, seed, epochs=epochs, batch=batch, learning_rate=learning_rate, decay=decay)
    return _weights(module), cost


def remove_by_block(
    target: Target,
    seed: int,
    *,
    estimate: str = "sum",
    coalition: bool = False,
    amounts: str = "expected",
    rho: float = 0.05,
    fraction: float = 0.2,
    epochs: int = 100,
    batch: int = 128,
    learning_rate: float = 1e-3,
    decay: float = 1e-4,
) -> tuple[Weights, dict[str, Any]]:
    """Takes an estimate of the key out of every block, then repairs what that broke. With an oracle the record has
    `left`, the largest |z_b| right after the removal: above 1 the amounts were not found, and nothing follows."""
    layout = target.layout or ModelLayout.of(target.module())
    guess = estimate_key(target, estimate, coalition=coalition)
    part = parts_of(layout, "block")
    released, anchor = (layout.flatten(model).astype(np.float64) for model in (target.copied(), target.checkpoints[0]))
    carrying, left = layout.carrying(), dict[str, Any]()
    if amounts == "expected":
        moved = (released - anchor)[carrying]
        size = np.bincount(part)
        taken = rho * np.sqrt(np.bincount(part, moved**2) * size) / np.maximum(np.bincount(part, guess**2), 1e-300)
    elif amounts == "oracle":
        if target.oracle is None:
            raise InputError("target", "must have an oracle for the attack 'removal' with its amounts")
        amount = _zeroed(target.oracle, target, layout, released, guess, part)
        taken, left = amount.taken, {"left": amount.left}
    else:
        raise InputError("amounts", "must be expected or oracle", repr(amounts))
    weights = layout.unflatten(_less(layout, released, guess, taken[part]), target.copied())
    module = target.module(weights)
    if not epochs:
        return _weights(module), left
    data = _subset(target, fraction, seed)
    cost = _fit(module, data, target.loss, seed, epochs=epochs, batch=batch, learning_rate=learning_rate, decay=decay)
    return _weights(module), cost | left


def _less(
    layout: ModelLayout, released: NDArray[np.float64], guess: NDArray[np.float64], taken: NDArray[np.float64]
) -> NDArray[Any]:
    vector = released.copy()
    vector[layout.carrying()] -= taken * guess
    return vector.astype(layout.dtype)


def _zeroed(
    oracle: Callable[[Weights], Sequence[float]],
    target: Target,
    layout: ModelLayout,
    released: NDArray[np.float64],
    guess: NDArray[np.float64],
    part: NDArray[Any],
) -> Amounts:
    """Amounts that bring z of every block to 0, by an oracle that tells z_b of a model."""

    def asked(taken: NDArray[np.float64]) -> Sequence[float]:
        return oracle(layout.unflatten(_less(layout, released, guess, taken[part]), target.copied()))

    anchor = layout.flatten(target.checkpoints[0]).astype(np.float64)
    moved = np.sqrt(np.bincount(part, (released - anchor)[layout.carrying()] ** 2))
    return zeroed(asked, moved / np.maximum(np.sqrt(np.bincount(part, guess**2)), 1e-300))


ATTACKS = (
    Attack(
        "adaptive-by-part",
        fine_tune_by_part,
        tuple(
            {"by": by, "weights": weights, "estimate": how, "alpha": alpha}
            for by, weights in (("block", "even"), ("block", "random"), ("block", "alternating"), ("row", "even"))
            for how in ("sum", "regression", "gls")
            for alpha in (0.5, 0.9)
        ),
        needs=("data", "checkpoints"),
    ),
    Attack(
        "removal",
        remove_by_block,
        tuple(
            {"estimate": how, "amounts": amounts} for how in ("regression", "gls") for amounts in ("expected", "oracle")
        ),
        needs=("data", "checkpoints", "oracle"),
    ),
)
