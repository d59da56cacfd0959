"""Candidates for mixings and for the stream; `derive` keeps those that leave the output as it is."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quorumark.align.groups import Axis, Group, Groups, Mixing, Slot, Stream
from quorumark.align.trace.atoms import Trace
from quorumark.align.trace.labels import Scaling

__all__ = ["as_stream", "find_mixings", "find_rotary_pairs", "untied"]


def find_mixings(trace: Trace, groups: Groups) -> list[Mixing]:
    """Groups of channels that only go through sums and products with matrices, and can be scaled.

    The exponent of an index's scale shows on which side it is.
    """
    nonlinear = {trace.indices[atom] for atom in trace.nonlinear if atom in trace.indices}
    exponents = {
        (name, k.axis, k.index): (number, k.exponent)
        for number, scaling in enumerate(trace.scales.scalings())
        for k in scaling
        for name in trace.aliases[k.tensor]
    }
    found = []
    for group in groups.groups:
        if any((slot.tensor, slot.axis, slot.offset) in nonlinear for slot in group.slots):
            continue
        sides: dict[int, list[Slot]] = {1: [], -1: []}
        scalings = set()
        for slot in group.slots:
            for j in range(slot.count):
                index = (slot.tensor, slot.axis, slot.offset + j * slot.step)
                scaling, exponent = exponents.get(index, (-1, 0))
                scalings.add(scaling)
                if abs(exponent) == 1:
                    sides[exponent].append(Slot(slot.tensor, slot.axis, index[2], slot.stride, 1, 1))
        if len(scalings) == 1 and -1 not in scalings and sides[1] and sides[-1]:
            first, second = sorted(tuple(sorted(side)) for side in sides.values())
            found.append(Mixing(group.size, first, second))
    return found


def find_rotary_pairs(trace: Trace, *, halves: bool) -> list[Mixing]:
    """Heads of queries and keys that constants hold in place: if those are angles, pairs can be rotated.

    The pairs are channels i and i + h/2 (`halves`), or 2i and 2i + 1.
    """
    classes: dict[int, dict[Axis, list[int]]] = defaultdict(lambda: defaultdict(list))
    for atom, (tensor, axis, index) in trace.indices.items():
        for name in trace.aliases[tensor]:
            classes[trace.atoms.root(atom)][name, axis].append(index)
    held, pinned = ({trace.atoms.root(x) for x in some} for some in (trace.held_in_head, trace.pinned))
    inside = {trace.atoms.root(x) for x in trace.head_of}
    found = []
    for root in sorted((held & inside & classes.keys()) - pinned):
        size = min(len(indices) for indices in classes[root].values())
        runs = [
            (tensor, axis, run)
            for (tensor, axis), indices in sorted(classes[root].items())
            for run in np.array_split(np.sort(indices), max(1, len(indices) // size))
        ]
        regular = all(np.array_equal(run, np.arange(run[0], run[0] + size)) for _, _, run in runs)
        if size >= 2 and size % 2 == 0 and regular and len(runs) > 1:
            stride, step = (1, size // 2) if halves else (2, 1)
            slots = [Slot(tensor, axis, int(run[0]), stride, 2, step) for tensor, axis, run in runs]
            found.append(Mixing(size // 2, tuple(sorted(slots))))
    return found


def as_stream(group: Group, scalings: Sequence[Scaling], shapes: Mapping[str, tuple[int, ...]]) -> Stream | None:
    """A group as a stream: gains, what reads through them (it is scaled against them), and the rest, which writes.

    `scalings` are those of the first channels. None if the group is not a stream: one with a bias in a norm, which is
    scaled along with the gain, cannot be rotated.
    """
    whole = all(
        (s.offset, s.stride, s.count) == (0, 1, 1) and shapes[s.tensor][s.axis] == group.size for s in group.slots
    )
    if group.within is not None or not whole:
        return None
    axes = {(slot.tensor, slot.axis) for slot in group.slots}
    norms: dict[str, tuple[Axis, ...]] = {}
    for scaling in scalings:
        first = [k for k in scaling if (k.tensor, k.axis) in axes]
        gains = [k for k in first if len(shapes[k.tensor]) == 1]
        readers = [k for k in first if len(shapes[k.tensor]) > 1]
        if len(gains) == 1 and readers and all(k.exponent == -gains[0].exponent for k in readers):
            norms[gains[0].tensor] = tuple(sorted((k.tensor, k.axis) for k in readers))
    read = {axis for readers in norms.values() for axis in readers} | {(gain, 0) for gain in norms}
    writers = tuple(sorted(axes - read))
    if not norms or not any(len(shapes[tensor]) > 1 for tensor, _ in writers):
        return None
    return Stream(group.size, writers, tuple(sorted(norms.items())))


def untied(model: Any) -> Any:
    """A copy without tied weights."""
    import torch

    model = copy.deepcopy(model)
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, torch.nn.Parameter(tensor.detach().clone()))
        seen.add(id(tensor))
    return model
