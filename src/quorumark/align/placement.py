"""Where the suspect's channels are, and where each of them goes: the state that matching improves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quorumark.align.features import Weights
from quorumark.align.groups import Axis, Groups, Indices, Signs
from quorumark.errors import InconclusiveError

__all__ = ["GROWTH", "Placement", "Snapshot"]

GROWTH = 8  # a suspect with more than so many times the channels is refused: the work grows with them

Snapshot = tuple[dict[Axis, Indices], dict[Axis, Signs], list[NDArray[np.int64]], dict[str, str]]


class Placement:
    """For every axis that groups touch, the suspect's index for each of the anchor's.

    Attributes:
        groups: the groups, by number.
        shapes: the anchor's shapes, of all tensors.
        ours, theirs: the anchor's and the suspect's weights that are compared.
        index: for each group, the anchor's indices of its elements on each axis: one row per element.
        theirs_at: the same for the suspect's elements, of outer groups.
        inner: for an outer group, the numbers of the groups within each of its elements.
        touching: for each axis, the numbers of the groups on it.
        sizes: for each group, how many elements the suspect has.
        indices: the suspect's index for each of the anchor's, on each axis; −1 for none.
        signs: ±1 for each of the anchor's indices, on axes with changed signs.
        orders: for each group, the suspect's element for each of the anchor's.
        sources: for tensors that were exchanged, the suspect's name of what has the anchor's name.
    """

    def __init__(self, groups: Groups, shapes: Mapping[str, tuple[int, ...]], ours: Weights, theirs: Weights) -> None:
        self.groups, self.shapes, self.ours, self.theirs = groups.groups, shapes, ours, theirs
        self.index = [group.axes() for group in self.groups]
        self.inner: dict[int, list[list[int]]] = {}
        self.touching: dict[Axis, set[int]] = {}
        for number, group in enumerate(self.groups):
            if group.within is not None:
                outer, element = group.within
                self.inner.setdefault(outer, [[] for _ in range(self.groups[outer].size)])[element].append(number)
            for axis in self.index[number]:
                self.touching.setdefault(axis, set()).add(number)
        self.sizes = self._suspect_sizes()
        self.theirs_at = [self._suspect_indices(number) for number in range(len(self.groups))]
        self.indices: dict[Axis, Indices] = {}
        self.signs: dict[Axis, Signs] = {}
        self.orders: list[NDArray[np.int64]] = []
        self.sources: dict[str, str] = {}
        self.swapping = {
            name: number
            for number, group in enumerate(self.groups)
            for names in group.swaps
            for name in names
            if len({theirs[n].shape if n in theirs else None for n in names}) == 1
        }
        self.reset()

    def theirs_of(self, name: str) -> NDArray[np.int8]:
        """The suspect's weights that are compared with a tensor of the anchor."""
        return self.theirs[self.sources.get(name, name)]

    def compared(self, number: int) -> list[Axis]:
        """The axes of a group whose weights are compared."""
        return [axis for axis in self.index[number] if axis[0] in self.ours]

    def outer(self, axis: Axis) -> list[int]:
        """The groups on an axis that are not within others."""
        return sorted(g for g in self.touching[axis] if self.groups[g].within is None)

    # --- sizes ---

    def _suspect_sizes(self) -> list[int]:
        """How many elements of each outer group the suspect has, from axes on which that group is alone."""
        sizes: list[int] = []
        for number, group in enumerate(self.groups):
            size = group.size
            for axis in self.compared(number) if group.within is None else ():
                if self.outer(axis) == [number]:
                    index, length = self.index[number][axis], self.ours[axis[0]].shape[axis[1]]
                    size = (self.theirs[axis[0]].shape[axis[1]] - (length - index.size)) // index.shape[1]
                    break
            sizes.append(size)
            if size > GROWTH * group.size:
                name = self.compared(number)[0][0]
                raise InconclusiveError(
                    f"tensor {name!r} of the suspect has more than {GROWTH} times as many channels as the anchor's: "
                    "it is not aligned; try without --align"
                )
        for name, tensor in self.ours.items():
            for a in range(tensor.ndim):
                touched = (name, a) in self.touching
                length = self._length((name, a), sizes) if touched else tensor.shape[a]
                if length != self.theirs[name].shape[a] or (
                    touched and min(sizes[g] for g in self.touching[name, a]) < 1
                ):
                    raise InconclusiveError(
                        f"the suspect's sizes around tensor {name!r} fit no number of channels, so that it cannot be "
                        "aligned: try without --align"
                    )
        return sizes

    def _length(self, axis: Axis, sizes: Sequence[int]) -> int:
        """The length of an axis in the suspect."""
        grown = ((sizes[g] - self.groups[g].size) * self.index[g][axis].shape[1] for g in self.outer(axis))
        return int(self.shapes[axis[0]][axis[1]] + sum(grown))

    def _suspect_indices(self, number: int) -> dict[Axis, Indices]:
        """The indices of the suspect's elements: the anchor's, shifted by what grew or shrank before them."""
        found = {}
        for axis, index in self.index[number].items() if self.groups[number].within is None else ():
            outer = self.outer(axis)
            if all(self.sizes[g] == self.groups[g].size for g in outer):
                found[axis] = index
                continue
            columns: dict[int, Indices] = {}
            shift = 0
            segments = sorted(piece for g in outer for piece in self._segments(g, axis))
            for start, g, column, width in segments:
                if g == number:
                    for j in range(width):
                        columns[column + j] = start + shift + j + np.arange(self.sizes[g]) * width
                shift += (self.sizes[g] - self.groups[g].size) * width
            found[axis] = np.stack([columns[j] for j in range(index.shape[1])], axis=1)
        return found

    def _segments(self, number: int, axis: Axis) -> list[tuple[int, int, int, int]]:
        """Runs of a group's elements on an axis: (start, group, first column, width of an element)."""
        found = self.groups[number].segments(axis)
        if found is None:
            raise InconclusiveError(
                f"tensor {axis[0]!r} of the suspect has another size than the anchor's, and its channels interleave, "
                "so that it cannot be aligned: try without --align"
            )
        return [(start, number, column, width) for start, column, width in found]

    # --- moves ---

    def reset(self) -> None:
        """Puts every channel where it is in the suspect, as far as there are so many, with its own sign."""
        self.indices, self.signs, self.sources = {}, {}, {}
        for axis, touching in self.touching.items():
            rigid = np.ones(self.shapes[axis[0]][axis[1]], np.bool_)
            taken = np.zeros(self._length(axis, self.sizes), np.bool_)
            for g in touching:
                rigid[self.index[g][axis]] = False
            # what is in no outer group keeps its order between the elements of those groups
            for g in self.outer(axis):
                taken[self.theirs_at[g][axis]] = True
            if not self.outer(axis):
                rigid[:] = True
            self.indices[axis] = np.full(rigid.size, -1, np.int64)
            self.indices[axis][rigid] = np.flatnonzero(~taken)
        self.orders = [np.arange(group.size) for group in self.groups]
        for number, group in enumerate(self.groups):
            if group.within is None:
                self.put(number, np.where(self.orders[number] < self.sizes[number], self.orders[number], -1))

    def put(self, number: int, order: NDArray[np.int64]) -> None:
        """Element i of an outer group becomes the suspect's element order[i], with what is within it unchanged."""
        for axis, index in self.index[number].items():
            at = self.theirs_at[number][axis]
            self.indices[axis][index] = np.where((order >= 0)[:, None], at[np.maximum(order, 0)], -1)
        self.orders[number] = order
        for names in (names for names in self.groups[number].swaps if names[0] in self.swapping):
            self.sources |= {names[i]: names[j] for i, j in enumerate(order) if j >= 0}
        for parts in self.inner.get(number, []):
            for part in parts:
                self.orders[part] = np.arange(self.groups[part].size)

    def put_within(self, number: int, order: NDArray[np.int64]) -> None:
        """Permutes a group that is within an element of another one."""
        self.orders[number] = self.orders[number][order]
        for axis, index in self.index[number].items():
            self.indices[axis][index] = self.indices[axis][index[order]]

    def snapshot(self) -> Snapshot:
        """The present state, to `restore` after a `reset`."""
        return self.indices, self.signs, self.orders, self.sources

    def restore(self, state: Snapshot) -> None:
        self.indices, self.signs, self.orders, self.sources = state
