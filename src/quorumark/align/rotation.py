"""Finds how a suspect's residual stream was rotated (docs/alignment.md, "The residual stream").

`quorumark.align.stream` has the mathematics; here it is decided which vectors the matrix is fitted to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quorumark.align import stream
from quorumark.align.arrays import finite, gathered, read, with_signs
from quorumark.align.features import compared_weights
from quorumark.align.groups import Axis, Group, Groups, Indices, Signs, Stream
from quorumark.align.matching import match
from quorumark.align.mixing import Rows
from quorumark.align.placement import GROWTH
from quorumark.align.stream import Agreement, ChannelCosines, Rotation
from quorumark.model.layout import TensorSpec
from quorumark.model.statistic import Model

__all__ = ["find_rotation"]


def find_rotation(
    suspect: Model,
    anchor: Model,
    groups: Groups,
    flow: Stream,
    shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, TensorSpec],
    names: Mapping[str, str] | None,
    progress: Callable[[str], None] | None,
) -> Rotation | None:
    """How the suspect's stream was rotated; None if it was not.

    The matrix is first fitted to what nothing else can move (words). With that rotated back, channels that cannot be
    mixed (neurons) are matched, and the matrix is fitted to these as well.
    """
    axes = {name: at for name, at in flow.axes().items() if name in specs}
    unmixed, ordered, rigid = _unmixed_groups(groups, axes)
    gains = {name: finite(read(anchor, name)) for name in flow.gains()}
    vectors = _Vectors(suspect, anchor, names, axes, gains, flow.size, progress, rigid)
    agreement = vectors.agreement()
    if agreement is None or not agreement.count:
        return None
    rotation = Rotation(stream.polar(agreement.matrix), flow.axes(), gains)
    if unmixed.groups:
        used = sorted({slot.tensor for group in unmixed.groups for slot in group.slots} & specs.keys())
        back = rotation.model(suspect, names)
        ours, theirs = compared_weights(back, anchor, {name: specs[name] for name in used}, None, progress)
        matched = match(unmixed, shapes, ours, theirs, {}, progress)
        vectors = dataclasses.replace(vectors, tensors=ordered, indices=matched.indices, signs=matched.signs)
        others = dataclasses.replace(vectors, tensors=[name for name in ordered if name not in rigid])
        agreement = others.agreement(agreement)  # of what nothing moves it has all sums already
        if agreement is None:
            return None
        rotation = dataclasses.replace(rotation, matrix=stream.polar(agreement.matrix))
    permutation = stream.signed_permutation(rotation.matrix)
    if agreement.is_rotated(rotation.matrix, permutation):
        return rotation
    cosines = ChannelCosines(rotation.matrix, permutation)
    for pair in vectors.pairs():
        if pair is not None:
            cosines.add(*pair)
    return rotation if cosines.is_rotated() else None


@dataclass(frozen=True, eq=False)
class _Vectors:
    """Pairs of vectors of the stream, the suspect's and the anchor's, from `tensors`.

    `axes` and `gains` are those of the stream; `indices` and `signs` bring the tensors' other axes into the anchor's
    order.
    """

    suspect: Model
    anchor: Model
    names: Mapping[str, str] | None
    axes: Mapping[str, tuple[int, str | None]]
    gains: Mapping[str, NDArray[np.float64]]
    size: int
    progress: Callable[[str], None] | None
    tensors: Sequence[str]
    indices: Mapping[Axis, Indices] = dataclasses.field(default_factory=dict)
    signs: Mapping[Axis, Signs] = dataclasses.field(default_factory=dict)

    def pairs(self) -> Iterator[tuple[Rows, Rows] | None]:
        """The vectors of each tensor; None, and no more, if a tensor's sizes do not fit."""
        width = None
        for name in self.tensors:
            if self.progress is not None:
                self.progress(f"the stream: {name}")
            axis, gain = self.axes[name]
            values, ours = read(self.suspect, name if self.names is None else self.names[name]), read(self.anchor, name)
            for other in range(ours.ndim):
                if (name, other) in self.indices:
                    values = gathered(values, other, self.indices[name, other])
            values = with_signs(values, name, self.signs)
            size = values.shape[axis] if values.ndim == ours.ndim else 0
            width = width or size
            fits = values.shape == (*ours.shape[:axis], width, *ours.shape[axis + 1 :])
            if not fits or not 2 <= size <= GROWTH * self.size:
                yield None
                return
            theirs = stream.vectors(values, axis, stream.gain_of(self.suspect, gain, self.names, size))
            yield theirs, stream.vectors(ours, axis, None if gain is None else self.gains[gain])

    def agreement(self, found: Agreement | None = None) -> Agreement | None:
        """C = Σ s·aᵀ of all vectors, added to `found`; None if sizes do not fit or there are no tensors."""
        for pair in self.pairs():
            if pair is None or (found is not None and found.matrix.shape[0] != pair[0].shape[1]):
                return None
            found = found or Agreement(pair[0].shape[1], self.size)
            found.add(*pair)
        return found


def _unmixed_groups(groups: Groups, axes: Mapping[str, tuple[int, str | None]]) -> tuple[Groups, list[str], list[str]]:
    """Groups whose tensors no mixing touches; tensors of the stream that only these move; those that nothing moves."""
    mixed = {tensor for tensor, _ in groups.blocks()}
    numbers: dict[int, int] = {}  # from numbers in `groups` to numbers in `kept`
    kept: list[Group] = []
    moving: dict[Axis, set[int]] = {}
    for number, group in enumerate(groups.groups):
        for slot in group.slots:
            moving.setdefault((slot.tensor, slot.axis), set()).add(number)
        apart = all(slot.tensor not in mixed and axes.get(slot.tensor, (-1,))[0] != slot.axis for slot in group.slots)
        if apart and (group.within is None or group.within[0] in numbers):
            within = None if group.within is None else (numbers[group.within[0]], group.within[1])
            numbers[number] = len(kept)
            kept.append(dataclasses.replace(group, within=within))
    ordered, rigid = [], []
    for name, (axis, _) in sorted(axes.items()):
        movers = set().union(*(which for (tensor, other), which in moving.items() if tensor == name and other != axis))
        if name not in mixed and movers <= numbers.keys():
            ordered.append(name)
            if not movers:
                rigid.append(name)
    return Groups(tuple(kept)), ordered, rigid
