"""The coupled channels of a torch module, and what can be rescaled or get the other sign."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from quorumark.align.groups import Groups, Mixing, Stream
from quorumark.align.trace import check, symmetries
from quorumark.align.trace.atoms import Trace
from quorumark.align.trace.grouping import group_atoms
from quorumark.align.trace.labels import Knob, Scaling
from quorumark.align.trace.running import trace_model
from quorumark.errors import LayoutError

__all__ = ["derive_groups", "derive_scalings", "derive_signs"]


def derive_groups(model: Any, example: Any) -> Groups:
    """The coupled groups of a torch module, run on an example: a tensor, a tuple of them, or keyword arguments.

    Raises a LayoutError if an operation of the model is not understood, or if permuting the groups changes the output.
    Mixings and the stream are kept only if they leave the output as it is.
    """
    trace = trace_model(model, example)
    groups = group_atoms(trace)
    check.check_change(model, example, partial(check.permute, groups=groups), "permuted")
    mixings = _keep_sound(model, example, symmetries.find_mixings(trace, groups))
    pairs: list[Mixing] = []
    for halves in (True, False):
        pairs = pairs or _keep_sound(model, example, symmetries.find_rotary_pairs(trace, halves=halves))
    every = tuple(sorted([*mixings, *pairs], key=lambda m: (m.slots, m.against)))
    return Groups(groups.groups, every, _find_stream(model, example, trace, groups))


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
        groups = group_atoms(trace)
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
