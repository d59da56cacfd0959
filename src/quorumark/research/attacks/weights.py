"""Attacks that change the weights as they lie there: quantisation, pruning, noise, another mark, averaging, merging."""

from __future__ import annotations

from collections.abc import Callable
from math import floor
from typing import Any

from quorumark.errors import InputError
from quorumark.research.attacks.base import Attack, Target, Weights, _torch

# --- quantisation -----------------------------------------------------------------------------------------


def _symmetric(bits: int, *, by_row: bool = False) -> Callable[[Any], Any]:
    """w → scale·round(w/scale), scale = max|w|/(2^(bits−1) − 1) of a tensor or of each row."""

    def function(rows: Any) -> Any:
        largest = rows.abs().amax(1, keepdim=True) if by_row else rows.abs().max()
        scale = largest / (2 ** (bits - 1) - 1)
        return (rows / scale.clamp_min(1e-30)).round() * scale

    return function


def _in_blocks(size: int, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same for blocks of so many weights that follow each other in a row, the last one filled up with zeros."""

    def blockwise(rows: Any) -> Any:
        count, width = rows.shape
        filled = _torch().nn.functional.pad(rows, (0, -width % size)).reshape(-1, size)
        return function(filled).reshape(count, -1)[:, :width]

    return blockwise


def _inverse(scale: Any) -> Any:
    """1/scale, and 0 for 0."""
    return _torch().where(scale == 0, scale, 1 / scale)


def _q8_0(blocks: Any) -> Any:
    """GGUF's Q8_0: d = max|w|/127, q = round(w/d) (halves away from 0), and d·q with d as float16."""
    scale = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    return scaled.sign() * (scaled.abs() + 0.5).floor() * scale.half().float()


def _q4_0(blocks: Any) -> Any:
    """GGUF's Q4_0: d = m/−8 for the weight m of the largest size, q = ⌊w/d + 8.5⌋ cut to 0 … 15, and d·(q − 8)."""
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    return ((blocks * _inverse(scale) + 8.5).floor().clamp(0, 15) - 8) * scale.half().float()


SCHEMES: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "static8": (8, _symmetric(8)),
    "static4": (4, _symmetric(4)),
    "dynamic8": (8, _symmetric(8, by_row=True)),
    "q8_0": (8, _in_blocks(32, _q8_0)),
    "q4_0": (4, _in_blocks(32, _q4_0)),
    "absmax4": (4, _in_blocks(64, _symmetric(4, by_row=True))),
}
"""Bits, and what is done to the rows of a tensor: one scale for all, for each row, for each block of 32 or 64."""


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise InputError(name, "must be from 0 to 1", value)
    return value


def quantise(target: Target, _seed: int, *, scheme: str = "static8") -> tuple[Weights, dict[str, Any]]:
    """Weight-only quantisation and back, in float32 whatever the type of the weights is."""
    if scheme not in SCHEMES:
        raise InputError("scheme", f"must be one of {', '.join(SCHEMES)}", repr(scheme))
    bits, function = SCHEMES[scheme]
    weights = target.copied()
    for name in target.carriers:
        w = weights[name]
        weights[name] = function(w.float().flatten(1)).view(w.shape).to(w.dtype)
    return weights, {"bits": bits}


# --- the rest ---------------------------------------------------------------------------------------------


def prune(target: Target, _seed: int, *, ratio: float = 0.5) -> tuple[Weights, dict[str, Any]]:
    """Magnitude pruning over all layers together: the ⌊ratio·n⌋ smallest weights become 0."""
    torch = _torch()
    weights = target.copied()
    flat = torch.cat([weights[name].abs().flatten() for name in target.carriers])
    gone = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
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
        weights[name] = w + strength * w.std() * torch.randn(w.shape, generator=generator).to(w)
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
        moved = w - target.checkpoints[0][name].to(w) if target.checkpoints else w
        size = moved.flatten(1).pow(2).mean(1).sqrt().view(-1, *[1] * (w.dim() - 1))
        signs = torch.randint(0, 2, w.shape, generator=generator) * 2 - 1
        weights[name] = w + strength * size * signs.to(w)
    return weights, {}


def average(target: Target, _seed: int, *, share: float = 0.5) -> tuple[Weights, dict[str, Any]]:
    """(1 − share)·released + share·another model's weights."""
    _share("share", share)
    weights = target.copied()
    other = target.other or {}
    for name, w in weights.items():
        if w.is_floating_point():
            weights[name] = (1 - share) * w + share * other[name].to(w)
    return weights, {}


def merge(target: Target, _seed: int, *, strength: float = 0.5) -> tuple[Weights, dict[str, Any]]:
    """θ_0 + strength·(θ − θ_0) for the model θ_0 that training began with: back towards it, or (above 1) beyond."""
    if not 0 <= strength <= 10:
        raise InputError("strength", "must be from 0 to 10", strength)
    weights = target.copied()
    base = target.base or {}
    for name, w in weights.items():
        if w.is_floating_point():
            start = base[name].to(w.device).float()
            weights[name] = (start + strength * (w.float() - start)).to(w.dtype)
    return weights, {}


_RATIOS = tuple({"ratio": ratio} for ratio in (0.3, 0.5, 0.7, 0.9))
ATTACKS = (
    Attack("quantisation", quantise, tuple({"scheme": scheme} for scheme in SCHEMES)),
    Attack("pruning", prune, _RATIOS),
    Attack("structured-pruning", prune_channels, _RATIOS),
    Attack("noise", add_noise, tuple({"strength": s} for s in (0.05, 0.1, 0.2, 0.5))),
    Attack("overwriting", overwrite, tuple({"strength": s} for s in (0.05, 0.1, 0.2))),
    Attack("averaging", average, tuple({"share": s} for s in (0.25, 0.5)), needs=("other",)),
    Attack("merging", merge, tuple({"strength": s} for s in (0.5, 0.7, 0.9, 1.3)), needs=("base",)),
)
