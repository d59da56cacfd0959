"""The coupled channels of a torch module, and what can be rescaled or get the other sign."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from quorumark.align.groups import Axis, Groups, Mixing, Slot, Stream
from quorumark.align.trace import check, symmetries
from quorumark.align.trace.atoms import Trace
from quorumark.align.trace.experts import find_experts
from quorumark.align.trace.grouping import group_atoms
from quorumark.align.trace.labels import Knob, Scaling
from quorumark.align.trace.running import trace_model, trace_signs
from quorumark.errors import LayoutError

__all__ = ["UnknownOperation", "derive_groups", "derive_scalings", "derive_signs"]


class UnknownOperation(UserWarning):
    """An operation of a model is not understood: what touches it is in no group."""


def derive_groups(model: Any, example: Any) -> Groups:
    """The coupled groups of a torch module, run on an example: a tensor, a tuple of them, or keyword arguments.

    Groups, mixings and the stream are kept only if they leave the output as it is when they are tried. An operation
    that is not understood pins what touches it, and a warning names it.
    """
    trace = trace_model(model, example)
    if trace.unknown:
        named = ", ".join(sorted(trace.unknown))
        warnings.warn(
            f"channels that go through {named} are in no group: not understood", UnknownOperation, stacklevel=2
        )
    groups = _keep_sound_groups(model, example, group_atoms(trace))
    groups = _with_experts(model, example, groups)
    mixings = _keep_sound(model, example, symmetries.find_mixings(trace, groups))
    pairs: list[Mixing] = []
    for halves in (True, False):
        pairs = pairs or _keep_sound(model, example, symmetries.find_rotary_pairs(trace, halves=halves))
    every = tuple(sorted([*mixings, *pairs], key=lambda m: (m.slots, m.against)))
    signed = _with_signs(model, example, trace, Groups(groups.groups, every))
    found = Groups(signed.groups, every, _find_stream(model, example, trace, groups))
    return replace(found, open=_open_axes(trace, found))


def _open_axes(trace: Trace, groups: Groups) -> tuple[Axis, ...]:
    """Axes of matrices that are in no group, though neither inputs nor outputs hold all their indices in place."""
    held = {trace.atoms.root(atom) for atom in trace.held}
    free: set[Axis] = {trace.indices[atom][:2] for atom in trace.indices if trace.atoms.root(atom) not in held}
    covered = {(slot.tensor, slot.axis) for group in groups.groups for slot in group.slots} | groups.blocks().keys()
    matrices = {
        name for name, axis in ((trace.indices[atom][0], trace.indices[atom][1]) for atom in trace.indices) if axis
    }
    parts = {
        (name, axis) for name, axis in (trace.indices[a][:2] for a in trace.indices) if name in trace.apart and axis
    }
    return tuple(sorted(axis for axis in (free - covered) | parts if axis[0] in matrices))


def _with_signs(model: Any, example: Any, trace: Trace, groups: Groups) -> Groups:
    """The groups with the signs that their elements can get, as far as these leave the output as it is."""
    noisy = check.map_tensors(example, check.noise_like)  # the signs of what reads zeros would change nothing

    def sound(tried: list[tuple[int, tuple[Slot, ...], bool]]) -> list[tuple[int, tuple[Slot, ...], bool]]:
        if not tried:
            return []
        signs = [(groups.groups[number].size, slots, whole) for number, slots, whole in tried]
        if check.error_of(model, noisy, partial(check.flip_elements, signs=signs)) < check.EXACT:
            return tried
        half = len(tried) // 2
        return [*sound(tried[:half]), *sound(tried[half:])] if half else []

    signs: dict[tuple[int, bool], list[tuple[Slot, ...]]] = {}
    for number, slots, whole in sound(trace_signs(model, noisy, groups, trace.aliases).generators()):
        named = [replace(slot, tensor=name) for slot in slots for name in trace.aliases[slot.tensor]]
        signs.setdefault((number, whole), []).append(tuple(sorted(named)))
    kept = [
        replace(group, signs=tuple(signs.get((number, False), ())), turns=tuple(signs.get((number, True), ())))
        for number, group in enumerate(groups.groups)
    ]
    return replace(groups, groups=tuple(kept))


def _keep_sound_groups(model: Any, example: Any, groups: Groups) -> Groups:
    """The groups that can be permuted without changing the output, found by halving; those within them go along."""

    def sound(numbers: list[int]) -> list[int]:
        if not numbers:
            return []
        tried = groups.only(numbers)
        if check.error_of(model, example, partial(check.permute, groups=tried)) < check.EXACT:
            return numbers
        half = len(numbers) // 2
        return [*sound(numbers[:half]), *sound(numbers[half:])] if half else []

    return groups.only(sound(list(range(len(groups.groups)))))


def _with_experts(model: Any, example: Any, groups: Groups) -> Groups:
    """The groups, and those of experts that can be exchanged without changing the output."""
    noisy = check.map_tensors(example, check.noise_like)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    taken = {(slot.tensor, slot.axis) for group in groups.groups for slot in group.slots}
    for group in find_experts(shapes):
        free = not any((slot.tensor, slot.axis) in taken for slot in group.slots)
        tried = partial(check.permute, groups=Groups((group,)))
        if free and check.error_of(model, noisy, tried) < check.EXACT:
            groups = replace(groups, groups=(*groups.groups, group))
    return groups


def _keep_sound(model: Any, example: Any, mixings: list[Mixing]) -> list[Mixing]:
    """The mixings that leave the output as it is, found by halving."""
    if not mixings:
        return []
    try:
        check.check_change(model, example, partial(check.mix, mixings=mixings), "mixed")
    except LayoutError:
        half = len(mixings) // 2
        parts = (mixings[:half], mixings[half:]) if half else ()
        return [mixing for part in parts for mixing in _keep_sound(model, example, part)]
    return mixings


def _find_stream(model: Any, example: Any, trace: Trace, groups: Groups) -> Stream | None:
    """The largest group that can be rotated as a whole once gains are folded into what reads them, or None.

    Output weights that are tied to the embeddings read the stream through the last norm, but embeddings do not. So a
    copy is traced in which they are two tensors.
    """
    if any(len(names) > 1 for names in trace.aliases.values()):
        model = symmetries.untied(model)
        trace = trace_model(model, example)
        groups = _keep_sound_groups(model, example, group_atoms(trace))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    first = [tuple(knob for knob in scaling if knob.index == 0) for scaling in trace.scales.scalings()]
    found = [flow for group in groups.groups if (flow := symmetries.as_stream(group, first, shapes)) is not None]
    for flow in sorted(found, key=lambda flow: -flow.size):
        try:
            check.check_change(model, example, partial(check.rotate_stream, flow=flow), "rotated")
        except LayoutError:
            continue
        return flow
    return None


def derive_scalings(model: Any, example: Any) -> tuple[Scaling, ...]:
    """What can be rescaled: across ReLU, BatchNorm, the gains of norms, queries and keys, values and outputs."""
    scalings: tuple[Scaling, ...] = trace_model(model, example).scales.scalings()
    check.check_change(model, example, partial(check.rescale, scalings=scalings), "rescaled")
    return scalings


def derive_signs(model: Any, example: Any) -> tuple[Scaling, ...]:
    """What can get the other sign: scalings by s = −1 that leave the output as it is when they are tried.

    A BatchNorm passes on the sign of its channel, so that its gain must change as well.
    """
    kinds: dict[tuple[tuple[str, int, int], ...], list[Scaling]] = {}
    for scaling in derive_scalings(model, example):
        kinds.setdefault(tuple((k.tensor, k.axis, k.exponent) for k in scaling), []).append(scaling)
    found: list[Scaling] = []
    noisy = check.map_tensors(example, check.noise_like)  # the signs of what reads zeros would change nothing
    for same_kind in kinds.values():
        for tried in (same_kind, [(*scaling, *_batch_norm_gains(scaling)) for scaling in same_kind]):
            odd = [tuple(k for k in scaling if k.exponent % 2) for scaling in tried]
            if check.error_of(model, noisy, partial(check.flip_signs, signs=odd)) < check.EXACT:
                found += odd
                break
    return tuple(found)


def _batch_norm_gains(scaling: Scaling) -> Iterator[Knob]:
    """The gains of the BatchNorms whose variances are in a scaling."""
    for knob in scaling:
        layer, _, name = knob.tensor.rpartition(".")
        if name == "running_var":
            yield Knob(f"{layer}.weight" if layer else "weight", 0, knob.index, 1)
