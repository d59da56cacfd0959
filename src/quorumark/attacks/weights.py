"""Attacks that change the weights as they lie there: quantisation, pruning, noise, another mark, averaging."""

from __future__ import annotations

from math import floor
from typing import Any

from quorumark.attacks.base import Attack, Target, Weights, _torch
from quorumark.errors import InputError

SCHEMES = {"static8": (8, False), "static4": (4, False), "dynamic8": (8, True)}
"""Bits, and whether each output channel has its own scale."""


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise InputError(name, "must be from 0 to 1", value)
    return value


def quantise(target: Target, _seed: int, *, scheme: str = "static8") -> tuple[Weights, dict[str, Any]]:
    """Symmetric weight-only quantisation and back: w → scale·round(w/scale), scale = max|w|/(2^(bits−1) − 1)."""
    if scheme not in SCHEMES:
        raise InputError("scheme", f"must be one of {', '.join(SCHEMES)}", repr(scheme))
    bits, by_row = SCHEMES[scheme]
    weights = target.copied()
    for name in target.carriers:
        w = weights[name]
        largest = w.abs().flatten(1).amax(1).view(-1, *[1] * (w.dim() - 1)) if by_row else w.abs().max()
        scale = largest / (2 ** (bits - 1) - 1)
        weights[name] = (w / scale.clamp_min(1e-30)).round() * scale
    return weights, {"bits": bits}


def prune(target: Target, _seed: int, *, ratio: float = 0.5) -> tuple[Weights, dict[str, Any]]:
    """Magnitude pruning over all layers together: the ⌊ratio·n⌋ smallest weights become 0."""
    torch = _torch()
    weights = target.copied()
    flat = torch.cat([weights[name].abs().flatten() for name in target.carriers])
    gone = torch.zeros(flat.numel(), dtype=torch.bool)
    gone[flat.argsort(stable=True)[: floor(_share("ratio", ratio) * flat.numel())]] = True
    parts = gone.split([weights[name].numel() for name in target.carriers])
    for name, part in zip(target.carriers, parts, strict=True):
        weights[name][part.view_as(weights[name])] = 0
    return weights, {"zeros": int(gone.sum())}


def prune_channels(target: Target, _seed: int, *, ratio: float = 0.5) -> tuple[Weights, dict[str, Any]]:
    """Structured pruning: in each layer but the last the output channels of the least ℓ1 norm become 0."""
    weights = target.copied()
    _share("ratio", ratio)
    count = 0
    for name in target.carriers[:-1]:
        w = weights[name]
        if w.dim() < 2 or w.shape[0] < 2:
            continue
        gone = w.abs().flatten(1).sum(1).argsort(stable=True)[: floor(ratio * w.shape[0])]
        w[gone] = 0
        count += len(gone)
    return weights, {"channels": count}


def add_noise(target: Target, seed: int, *, strength: float = 0.1) -> tuple[Weights, dict[str, Any]]:
    """Normal noise of `strength` times each tensor's standard deviation."""
    torch = _torch()
    generator = torch.Generator().manual_seed(seed)
    weights = target.copied()
    for name in target.carriers:
        w = weights[name]
        weights[name] = w + strength * w.std() * torch.randn(w.shape, generator=generator)
    return weights, {}


def overwrite(target: Target, seed: int, *, strength: float = 0.05) -> tuple[Weights, dict[str, Any]]:
    """Another mark over the first: signs of the attacker's own, `strength` times what each row moved in training.

    Without checkpoints, times the row's size.
    """
    torch = _torch()
    generator = torch.Generator().manual_seed(seed)
    weights = target.copied()
    for name in target.carriers:
        w = weights[name]
        moved = w - target.checkpoints[0][name] if target.checkpoints else w
        size = moved.flatten(1).pow(2).mean(1).sqrt().view(-1, *[1] * (w.dim() - 1))
        signs = torch.randint(0, 2, w.shape, generator=generator) * 2 - 1
        weights[name] = w + strength * size * signs
    return weights, {}


def average(target: Target, _seed: int, *, share: float = 0.5) -> tuple[Weights, dict[str, Any]]:
    """(1 − share)·released + share·another model's weights."""
    _share("share", share)
    weights = target.copied()
    other = target.other or {}
    for name, w in weights.items():
        if w.is_floating_point():
            weights[name] = (1 - share) * w + share * other[name]
    return weights, {}


_RATIOS = tuple({"ratio": ratio} for ratio in (0.3, 0.5, 0.7, 0.9))
ATTACKS = (
    Attack("quantisation", quantise, tuple({"scheme": scheme} for scheme in SCHEMES)),
    Attack("pruning", prune, _RATIOS),
    Attack("structured-pruning", prune_channels, _RATIOS),
    Attack("noise", add_noise, tuple({"strength": s} for s in (0.05, 0.1, 0.2, 0.5))),
    Attack("overwriting", overwrite, tuple({"strength": s} for s in (0.05, 0.1, 0.2))),
    Attack("averaging", average, tuple({"share": s} for s in (0.25, 0.5)), needs=("other",)),
)
