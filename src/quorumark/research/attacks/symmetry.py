"""Attacks that leave the function as it is, or nearly so, and the weights somewhere else: permuted, rescaled, resized.

They use the same groups that alignment does (`quorumark.align.trace`), on the model as it is.
"""

from __future__ import annotations

from collections import Counter
from math import floor
from typing import Any

import numpy as np

from quorumark.align.groups import Axis, Group
from quorumark.errors import InputError
from quorumark.research.attacks.base import Attack, Target, Weights, _torch, aliases, kind_of

# layers that can have another number of channels, and the axis of their weight that the outputs are on
_OUTPUT_AXIS = {"Linear": 0, "Conv1d": 0, "Conv2d": 0, "Conv1D": 1, "BatchNorm1d": 0, "BatchNorm2d": 0}


def permute(target: Target, seed: int) -> tuple[Weights, dict[str, Any]]:
    """A random permutation of every group: channels, neurons, experts, heads and what is within them."""
    torch = _torch()
    rng = np.random.default_rng(seed)
    weights = target.copied()
    orders = [rng.permutation(group.size) for group in target.groups.groups]
    moved = target.groups.axis_orders({name: tuple(w.shape) for name, w in weights.items()}, orders)
    for (name, axis), order in moved.items():
        weights[name] = weights[name].index_select(axis, torch.from_numpy(order).to(weights[name].device))
    swapped = {name: weights[source] for name, source in target.groups.swapped(orders).items()}
    return weights | swapped, {"groups": len(orders)}


def rescale(target: Target, seed: int, *, octaves: float = 2.0) -> tuple[Weights, dict[str, Any]]:
    """Every channel that may be scaled is, by 2^u with u uniform in ±octaves.

    A running variance v counts as v + ε, so that BatchNorm's ε does not show: v → s²·(v + ε) − ε, but not below 0.
    """
    from quorumark.align.trace import derive_scalings

    rng = np.random.default_rng(seed)
    module, weights = target.module().cpu(), target.copied()
    scalings = derive_scalings(module, target.one())
    epsilon = {
        f"{path}.running_var" if path else "running_var": layer.eps
        for path, layer in module.named_modules()
        if "BatchNorm" in type(layer).__name__
    }
    for scaling in scalings:
        octave = rng.uniform(-octaves, octaves)
        for knob in scaling:
            factor = float(np.exp2(octave * knob.exponent))
            place = weights[knob.tensor].select(knob.axis, knob.index)
            eps = epsilon.get(knob.tensor, 0.0)
            place.copy_(((place + eps) * factor - eps).clamp_min(0) if eps else place * factor)
    for alias, original in aliases(module).items():
        weights[alias] = weights[original].clone()
    return weights, {"scalings": len(scalings)}


def change_signs(target: Target, seed: int) -> tuple[Weights, dict[str, Any]]:
    """Half of what may get the other sign gets it: gains of norms with what reads or writes them, gated neurons."""
    from quorumark.align.trace import derive_signs

    rng = np.random.default_rng(seed)
    module, weights = target.module().cpu(), target.copied()
    signs = derive_signs(module, target.one())
    changed = [places for places in signs if rng.integers(2)]
    for places in changed:
        for knob in places:
            weights[knob.tensor].select(knob.axis, knob.index).neg_()
    for alias, original in aliases(module).items():
        weights[alias] = weights[original].clone()
    return weights, {"signs": len(changed)}


# --- other sizes ------------------------------------------------------------------------------------------


def _resizable(target: Target) -> list[Group]:
    """Groups whose layers can all have another number of channels: no norm over them, no heads, no embedding."""
    module = target.module()
    found = []
    outer = [group for group in target.groups.groups if group.within is None]
    touched = Counter(axis for group in outer for axis in group.axes())
    heads = {group.within[0] for group in target.groups.groups if group.within is not None}
    for group in (g for number, g in enumerate(target.groups.groups) if g.within is None and number not in heads):
        layers = [module.get_submodule(slot.tensor.rpartition(".")[0]) for slot in group.slots]
        regular = all(group.segments(axis) is not None and touched[axis] == 1 for axis in group.axes())
        if regular and all(kind_of(layer) in _OUTPUT_AXIS for layer in layers):
            found.append(group)
    return found


def _reads(target: Target, module: Any, axis: Axis) -> bool:
    """Whether a layer takes these channels in, rather than giving them out."""
    layer = module.get_submodule(axis[0].rpartition(".")[0])
    return target.weights[axis[0]].dim() > 1 and axis[1] != _OUTPUT_AXIS[kind_of(layer)]


def _taken(weights: Weights, group: Group, elements: np.ndarray[Any, Any]) -> dict[Axis, Any]:
    """Puts elements (by number, some left out, some twice) into each tensor; says where they are on each axis now."""
    torch = _torch()
    now: dict[Axis, Any] = {}
    for axis, places in group.axes().items():
        name, a = axis
        order: list[np.ndarray[Any, Any]] = []
        columns: dict[int, np.ndarray[Any, Any]] = {}
        done = length = 0
        for start, column, width in group.segments(axis) or []:
            order.append(np.arange(done, start))
            order.append(places[elements][:, column : column + width].reshape(-1))
            length += start - done
            for j in range(width):
                columns[column + j] = length + j + np.arange(elements.size) * width
            length += elements.size * width
            done = start + group.size * width
        order.append(np.arange(done, weights[name].shape[a]))
        weights[name] = weights[name].index_select(a, torch.from_numpy(np.concatenate(order)).to(weights[name].device))
        now[axis] = torch.from_numpy(np.stack([columns[j] for j in range(places.shape[1])], axis=1))
    return now


def _scaled_places(weights: Weights, axis: Axis, places: Any, factors: Any) -> None:
    """Multiplies the elements' places on an axis, one factor for each element."""
    name, a = axis
    w = weights[name].movedim(a, 0).clone()
    flat = places.reshape(-1).to(w.device)
    each = factors.repeat_interleave(places.shape[1]).view(-1, *[1] * (w.dim() - 1)).to(w)
    w[flat] = w[flat] * each
    weights[name] = w.movedim(0, a).contiguous()


def _ratio(ratio: float) -> float:
    if not 0 < ratio < 1:
        raise InputError("ratio", "must be above 0 and below 1", ratio)
    return ratio


def remove(target: Target, _seed: int, *, ratio: float = 0.3) -> tuple[Weights, dict[str, Any]]:
    """Takes the channels of the least ℓ1 norm out of every group, with all that belongs to them: a smaller model."""
    torch = _torch()
    _ratio(ratio)
    weights, count = target.copied(), 0
    for group in _resizable(target):
        size = torch.zeros(group.size)
        for (name, axis), places in group.axes().items():
            if weights[name].dim() > 1:
                each = weights[name].movedim(axis, 0).flatten(1).abs().mean(1).float().cpu()
                size += each[torch.from_numpy(places)].mean(1)
        gone = min(floor(ratio * group.size), group.size - 1)
        keep = np.sort(size.argsort(stable=True).numpy()[gone:])
        _taken(weights, group, keep)
        count += gone
    return weights, {"channels": count}


def pad(target: Target, seed: int, *, ratio: float = 0.25) -> tuple[Weights, dict[str, Any]]:
    """More channels in every group: copies of others, with noise, that nothing reads (their outgoing weights are 0)."""
    torch = _torch()
    _ratio(ratio)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    module, weights, count = target.module(), target.copied(), 0
    for group in _resizable(target):
        more = max(1, floor(ratio * group.size))
        elements = np.concatenate([np.arange(group.size), rng.integers(0, group.size, more)])
        new = torch.arange(elements.size) >= group.size
        for axis, places in _taken(weights, group, elements).items():
            if _reads(target, module, axis):
                _scaled_places(weights, axis, places, (~new).float())
            elif weights[axis[0]].dim() > 1:
                noise = torch.ones(elements.size)
                noise[new] = torch.randn(more, generator=generator)
                _scaled_places(weights, axis, places, noise)
        count += more
    return weights, {"channels": count}


def split(target: Target, seed: int, *, ratio: float = 0.25) -> tuple[Weights, dict[str, Any]]:
    """Some channels of every group twice, and what reads them gets a part from each: a and 1 − a, a in [0.3, 0.7]."""
    torch = _torch()
    _ratio(ratio)
    rng = np.random.default_rng(seed)
    module, weights, count = target.module(), target.copied(), 0
    for group in _resizable(target):
        more = max(1, floor(ratio * group.size))
        twice = np.sort(rng.permutation(group.size)[:more])
        elements = np.concatenate([np.arange(group.size), twice])
        part = rng.uniform(0.3, 0.7, more)
        factors = np.ones(elements.size)
        factors[twice], factors[group.size :] = part, 1 - part
        for axis, places in _taken(weights, group, elements).items():
            if _reads(target, module, axis):
                _scaled_places(weights, axis, places, torch.from_numpy(factors))
        count += more
    return weights, {"channels": count}


def add_decoys(target: Target, seed: int, *, noise: float = 0.3) -> tuple[Weights, dict[str, Any]]:
    """Two more channels for each: both are the initial model's, which is public, and cancel in all that reads them.

    The function stays, at three times the width, and what looks most like the anchor is not the released model any
    more. Alignment is misled; that the suspect has more channels than the anchor shows (docs/alignment.md, "Limits").
    `noise`, relative to each tensor, makes the decoys look trained.
    """
    torch = _torch()
    generator = torch.Generator().manual_seed(seed)
    module, weights = target.module(), target.copied()
    decoys = {name: tensor.detach().clone() for name, tensor in target.checkpoints[0].items()}
    for name in target.carriers:
        w = decoys[name]
        decoys[name] = w + noise * w.std() * torch.randn(w.shape, generator=generator).to(w)
    kinds: dict[Axis, Any] = {}  # for each place: 0 as it was, 1 a decoy, 2 its opposite
    groups = _resizable(target)
    for group in groups:
        elements = np.tile(np.arange(group.size), 3)
        _taken(decoys, group, elements)
        for axis, places in _taken(weights, group, elements).items():
            w = weights[axis[0]]
            kinds[axis] = torch.zeros(w.shape[axis[1]], dtype=torch.int64, device=w.device)
            for kind in (1, 2):
                kinds[axis][places[kind * group.size : (kind + 1) * group.size].to(w.device)] = kind
    for name in {name for name, _ in kinds}:
        w, z = weights[name], decoys[name]
        axes = {}
        for a in (a for n, a in kinds if n == name):
            shape = [-1 if other == a else 1 for other in range(w.dim())]
            axes[_reads(target, module, (name, a))] = kinds[name, a].view(shape).expand(w.shape)
        outgoing, incoming = axes.get(False, torch.zeros(w.shape, device=w.device)), axes.get(True)
        if incoming is None:
            weights[name] = torch.where(outgoing == 0, w, z)
            continue
        read = torch.where(incoming == 0, w, torch.where(incoming == 1, z, -z))
        weights[name] = torch.where(outgoing == 0, read, torch.where(incoming == 1, z, torch.zeros_like(z)))
    return weights, {"channels": 2 * sum(group.size for group in groups)}


ATTACKS = (
    Attack("permutation", permute, keeps=True),
    Attack("rescaling", rescale, ({"octaves": 2.0},), keeps=True),
    Attack("signs", change_signs, keeps=True),
    Attack("channel-removal", remove, tuple({"ratio": r} for r in (0.1, 0.3, 0.5))),
    Attack("padding", pad, ({"ratio": 0.25},), keeps=True),
    Attack("splitting", split, ({"ratio": 0.25},), keeps=True),
    Attack("decoys", add_decoys, needs=("checkpoints",), keeps=True),
)
