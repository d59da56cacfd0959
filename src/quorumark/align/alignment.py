"""The result of an alignment, and the suspect as it is read with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.align.arrays import gathered, in_blocks, read, with_signs
from quorumark.align.groups import Axis, Indices, Signs
from quorumark.align.likeness import NOT_JUDGED, Likeness
from quorumark.align.stream import Rotation, Trimmed
from quorumark.canonical import canonical, digest
from quorumark.model.statistic import BLOCK, Model

__all__ = ["PROCEDURE", "AlignedModel", "Alignment"]

PROCEDURE = "anchor-assignment/v1"


@dataclass(frozen=True, eq=False)
class Alignment:
    """How a suspect was aligned.

    Attributes:
        groups: the digest of the groups.
        sizes: for each group, its elements in the anchor, in the suspect, and how many of them were matched.
        moved: for each group, how many matched elements are at another index than in the anchor.
        sweeps: how often all groups were matched; `stable` says whether the last sweep changed nothing.
        indices: for each axis, the suspect's index for each of the anchor's; −1 where the suspect has nothing.
        unmixed: tensors with channels that were mixed, as float32, with these channels restored.
        blocks: how many blocks of channels were restored.
        rotation: how the residual stream was rotated, or None; it is rotated back before anything else.
        words: for matrices of the stream, the axis of words and how many there are: a suspect's others are cut off.
        widest: how many channels a word of the suspect may have.
        signs: for axes on which weights of the suspect have the other sign, ±1 for each of the anchor's indices.
        sources: for tensors of experts that were exchanged, the name (of the layout) under which the suspect has them.
        like: how much of the suspect is more like the anchor than a random model would be.
    """

    groups: str
    sizes: tuple[tuple[int, int, int], ...]
    moved: tuple[int, ...]
    sweeps: int
    stable: bool
    indices: Mapping[Axis, Indices]
    unmixed: Mapping[str, NDArray[np.float32]] = dataclasses.field(default_factory=dict)
    blocks: int = 0
    rotation: Rotation | None = None
    words: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    widest: int = 0
    signs: Mapping[Axis, Signs] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    like: Likeness = NOT_JUDGED

    @property
    def surplus(self) -> int:
        """How many of the suspect's elements were not matched. If there are any, a small z does not clear it."""
        rotated = 0 if self.rotation is None else self.rotation.surplus
        return rotated + sum(theirs - matched for _, theirs, matched in self.sizes)

    def digest(self) -> str:
        """A digest of all indices, restored tensors, changed signs, and the rotation of the stream."""
        parts = [
            canonical([tensor, axis]) + self.indices[tensor, axis].astype("<i8").tobytes()
            for tensor, axis in sorted(self.indices)
        ]
        parts += [canonical([name]) + self.unmixed[name].astype("<f4").tobytes() for name in sorted(self.unmixed)]
        parts += [canonical(["signs", *axis]) + self.signs[axis].tobytes() for axis in sorted(self.signs)]
        parts += [canonical(["sources", name, self.sources[name]]) for name in sorted(self.sources)]
        parts += [] if self.rotation is None else [canonical(["stream"]) + self.rotation.to_bytes()]
        return digest("alignment", *parts).hex()

    def as_dict(self) -> dict[str, Any]:
        """A summary as JSON."""
        return {
            "procedure": PROCEDURE,
            "groups": self.groups,
            "sizes": [list(sizes) for sizes in self.sizes],
            "moved": list(self.moved),
            "surplus": self.surplus,
            "sweeps": self.sweeps,
            "stable": self.stable,
            "digest": self.digest(),
            "blocks": self.blocks,
            "like": [self.like.groups, self.like.judged, self.like.weights, self.like.compared],
            "rotated": None if self.rotation is None else len(self.rotation.matrix),
        }

    def model(self, suspect: Model, names: Mapping[str, str] | None = None) -> AlignedModel:
        """The suspect in the anchor's order, under the layout's names."""
        return AlignedModel(suspect, self, names)


class AlignedModel:
    """A suspect that is read in the anchor's order: what `canonical_form` takes, under the layout's names."""

    def __init__(self, suspect: Model, alignment: Alignment, names: Mapping[str, str] | None = None) -> None:
        self._alignment, self._names = alignment, names
        self._suspect: Model = suspect
        if alignment.words:
            self._suspect = Trimmed(suspect, alignment.words, names, alignment.widest)
        if alignment.rotation is not None:
            self._suspect, self._names = alignment.rotation.model(self._suspect, names), None

    def tensor(self, name: str) -> NDArray[Any]:
        """A whole tensor, with zeros where the suspect has nothing."""
        if name in self._alignment.unmixed:
            return self._alignment.unmixed[name]
        source = self._alignment.sources.get(name, name)
        values = read(self._suspect, source if self._names is None else self._names[source])
        for axis in range(values.ndim):
            indices = self._alignment.indices.get((name, axis))
            if indices is not None:
                values = gathered(values, axis, indices)
        return with_signs(values, name, self._alignment.signs)

    def blocks(self, name: str, limit: int = BLOCK) -> Iterator[tuple[int, NDArray[Any]]]:
        """Some rows of a tensor at a time."""
        return in_blocks(self.tensor(name), limit)
