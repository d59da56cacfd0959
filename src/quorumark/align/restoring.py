"""Restores the tensors whose channels were mixed, block by block (docs/alignment.md, "Mixings")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.align import mixing
from quorumark.align.arrays import finite, octaves_of
from quorumark.align.groups import Axis, Groups, Indices
from quorumark.align.mixing import Fit, Rows

__all__ = ["Restored", "restored_tensors"]

_CLIP = 6  # octaves above the middle at which weights are clipped while mixtures are fitted
_FAR = 3  # octaves by which the scale of a column must be wrong to be corrected before

Tensor = Callable[[str], NDArray[Any]]
_OfAxis = dict[
    int, list[tuple[Axis, Indices]]
]  # for the first index of each block, what is mixed by the inverse matrix


@dataclass(frozen=True, eq=False)
class Restored:
    """A tensor in the anchor's order with the channels of some blocks restored, and how many these are."""

    name: str
    values: NDArray[np.float32]
    blocks: int


class _Lines:
    """A tensor along one axis, as rows × columns, and its blocks.

    Attributes:
        clipped, rows: the suspect's, clipped and as they are.
        wanted: the anchor's.
        scales: what brings the suspect's columns to the anchor's.
        pairs: the indices of blocks whose pairs are rotated.
        fits: the indices of other blocks, with what was fitted to them.
    """

    def __init__(self, found: Rows, reference: Rows, axis: int, blocks: Sequence[tuple[bool, Indices]]) -> None:
        rows, wanted = (np.moveaxis(x, axis, 0).reshape(found.shape[axis], -1).copy() for x in (found, reference))
        self.wanted = wanted
        self.clipped, self.rows = _clipped(rows, wanted)
        self.scales = self._first_scales = mixing.column_scales(self.clipped, wanted)
        self.pairs: list[Indices] = []
        self.fits: list[tuple[Indices, Fit]] = []
        by_size: dict[tuple[bool, tuple[int, ...]], list[Indices]] = {}
        for rotates, indices in blocks:
            by_size.setdefault((rotates, indices.shape), []).append(indices)
        for (rotates, _), every in by_size.items():
            index = np.stack(every)
            index = index[self.rows[index].any(axis=(1, 2, 3))]  # a head that the suspect lacks stays empty
            if rotates and len(index):
                self.pairs.append(index)
            elif len(index):
                fit = Fit.of(self.clipped[index], wanted[index], self.scales)
                self.scales = fit.scales
                self.fits.append((index, fit))

    def restored(self, others: _OfAxis, lines: Mapping[Axis, _Lines]) -> tuple[Rows, int]:
        """The rows with all blocks restored that were mixed, and how many these are."""
        rows, count = self.rows.copy(), 0
        for index in self.pairs:
            turned = self.clipped[index] * self._first_scales
            rows[index] = mixing.rotated_pairs(rows[index], turned, self.wanted[index])
            count += len(index)
        if any(fit.mixed.any() for _, fit in self.fits):
            rows *= self.scales  # as in the restored blocks
        for index, fit in self.fits:
            for number in np.flatnonzero(fit.mixed).tolist():
                at = index[number]
                rows[at] = fit.restored(number, _side(others.get(int(at[0, 0]), ()), lines))
                count += 1
        return rows, count


def restored_tensors(groups: Groups, names: set[str], suspect: Tensor, anchor: Tensor) -> Iterator[Restored]:
    """The tensors of `names` that mixings touch, those that were changed. Both models are in the anchor's order."""
    blocks = groups.blocks()
    axes = {name: sorted(axis for tensor, axis in blocks if tensor == name) for name in names}
    others = _others(groups, {(name, of[0]) for name, of in axes.items() if len(of) == 1})
    for together in _connected(sorted(name for name, of in axes.items() if of), others):
        weights = {name: (finite(suspect(name)), finite(anchor(name))) for name in together}
        lines = {
            (name, axis): _Lines(*weights[name], axis, blocks[name, axis])
            for name in together
            for axis in axes[name]
            if len(axes[name]) == 1
        }
        for name in together:
            found, reference, count = *weights[name], 0
            for axis in axes[name]:
                at = lines.get((name, axis)) or _Lines(found, reference, axis, blocks[name, axis])
                rows, restored = at.restored(others.get((name, axis), {}), lines)
                shape = np.moveaxis(found, axis, 0).shape
                found, count = np.moveaxis(rows.reshape(shape), 0, axis), count + restored
            if count:
                with np.errstate(over="ignore", under="ignore"):  # what is beyond float32 counts as 0 later
                    yield Restored(name, np.ascontiguousarray(found, np.float32), count)


def _others(groups: Groups, axes: set[Axis]) -> dict[Axis, _OfAxis]:
    """For each axis and the first index of each of its blocks, what the inverse of the same matrix mixes."""
    found: dict[Axis, _OfAxis] = {}
    for mixed in (m for m in groups.mixings if not m.rotates):
        sides = [
            [(axis, indices) for axis, indices in side if axis in axes]
            for side in (mixed.of_side(mixed.slots), mixed.of_side(mixed.against))
        ]
        for one, two in (sides, sides[::-1]):
            for axis, indices in one if two else []:
                found.setdefault(axis, {})[int(indices[0, 0])] = two
    return found


def _connected(names: Sequence[str], others: Mapping[Axis, _OfAxis]) -> Iterator[list[str]]:
    """Tensors in sets that share no mixing with others, so that few have to be in memory."""
    near = {
        name: {axis[0] for at, of in others.items() if at[0] == name for side in of.values() for axis, _ in side}
        for name in names
    }
    left = list(names)
    while left:
        together = {left[0]}
        while True:
            more = {other for name in together for other in near[name]} | together
            if more == together:
                break
            together = more
        left = [name for name in left if name not in together]
        yield sorted(together)


def _side(parts: Sequence[tuple[Axis, Indices]], lines: Mapping[Axis, _Lines]) -> tuple[Rows, Rows] | None:
    """The other side of a mixing, the suspect's and the anchor's: channels × all that they read or write."""
    theirs = [lines[axis].clipped[copy] * lines[axis].scales for axis, copies in parts for copy in copies]
    ours = [lines[axis].wanted[copy] for axis, copies in parts for copy in copies]
    if not theirs or not all(each.any() for each in theirs):
        return None
    return np.concatenate(theirs, axis=1), np.concatenate(ours, axis=1)


def _clipped(rows: Rows, wanted: Rows) -> tuple[Rows, Rows]:
    """Rows after columns far from the anchor's size were corrected: clipped some octaves above the middle, and not.

    A weight that is huge because what it reads is always 0, or a column of such weights, would otherwise dominate its
    row. Smaller differences are left to least squares, which finds them better.
    """
    (_, by_row, by_column), (_, _, theirs) = (octaves_of(x) for x in (rows, wanted))
    octaves = (by_column - theirs + 128) >> 8
    octaves = np.where(np.abs(octaves) >= _FAR, octaves, 0)
    unclipped = np.ldexp(rows, (-octaves).astype(np.int32))
    middle = ((by_row[:, None] + by_column + 128) >> 8) - octaves
    most = np.ldexp(1.0, (middle + _CLIP).astype(np.int32))
    return np.clip(unclipped, -most, most), unclipped
