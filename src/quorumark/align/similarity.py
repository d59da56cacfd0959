"""How similar the suspect's channels are to the anchor's, in integers.

The similarity of two channels is the inner product of all their weights, with the other axes in the order found so
far. Channels that can be mixed with each other are compared by what mixing leaves of them (`quorumark.align.mixing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quorumark.align import mixing
from quorumark.align.arrays import gathered, with_signs
from quorumark.align.assignment import assign, inner_products
from quorumark.align.groups import Axis, Groups, Indices, Signs
from quorumark.align.placement import Placement

__all__ = ["Similarity"]

_KEPT = 1 << 29  # bytes of similarities that are kept
_Of = tuple[str, Axis, tuple[int, ...], bytes, bytes]  # how they are compared, on which axis, at which indices


class Similarity:
    """Similarities of a group's elements, as a placement has the rest."""

    def __init__(self, placement: Placement, groups: Groups) -> None:
        self._at = placement
        self.blocks = groups.blocks()
        self.inner_signs: Callable[[int, int, Axis], list[tuple[Indices, Signs]]] | None = None
        self._kept: dict[_Of, tuple[tuple[bytes | str | None, ...], NDArray[np.int64]]] = {}
        self._room = _KEPT
        self._in_blocks = {number for number in range(len(groups.groups)) if self._is_in_blocks(number)}
        mixed: dict[str, set[int]] = {}
        for tensor, along in self.blocks:
            mixed.setdefault(tensor, set()).add(along)
        self._clear = [
            [axis for axis in axes if not mixed.get(axis[0], set()) - {axis[1]}] or axes
            for axes in (placement.compared(number) for number in range(len(groups.groups)))
        ]

    def clear(self, number: int) -> list[Axis]:
        """The compared axes of a group whose tensors are not mixed along another axis; all of them if none is left."""
        return self._clear[number]

    def _is_in_blocks(self, number: int) -> bool:
        """Whether a group's elements are channels of blocks, which are compared whatever their order is."""
        axes = self._at.compared(number)
        return bool(axes) and all(
            any(np.isin(pair, indices).all() for _, copies in self.blocks.get(axis, []) for indices in copies)
            for axis in axes
            for pair in self._at.index[number][axis][:2].T
        )  # fmt: skip

    def blocks_of(self, number: int, axis: Axis) -> list[tuple[bool, Indices]]:
        """The blocks inside a group's element, as columns of its indices: the same for all elements."""
        row = self._at.index[number][axis][0]
        order = np.argsort(row, kind="stable")
        found = []
        for rotates, indices in ((r, i) for r, copies in self.blocks.get(axis, []) for i in copies):
            if np.isin(indices, row).all():
                found.append((rotates, order[np.searchsorted(row[order], indices)]))
        return found

    def rows(self, axis: Axis, indices: Indices, *, anchor: bool) -> NDArray[np.int8]:
        """Elements × features: the weights at the indices of each element, other axes in the anchor's order."""
        tensor, along = axis
        taken = gathered(self._at.ours[tensor] if anchor else self._at.theirs_of(tensor), along, indices.reshape(-1))
        for other in range(taken.ndim) if not anchor else ():
            if other != along and (tensor, other) in self._at.indices:
                taken = gathered(taken, other, self._at.indices[tensor, other])
                if (tensor, other) in self._at.signs:
                    taken = with_signs(taken, tensor, {(tensor, other): self._at.signs[tensor, other]})
        return np.ascontiguousarray(np.moveaxis(taken, along, 0)).reshape(indices.shape[0], -1)

    def of(self, number: int, axes: Sequence[Axis]) -> NDArray[np.int64]:
        """A group's elements in the anchor × in the suspect, over some axes.

        For a group within an element, the suspect's are those that are placed there now.
        """
        group, index, inside = self._at.groups[number], self._at.index[number], self._at.inner.get(number)
        total = np.zeros((group.size, self._at.sizes[number]), np.int64)
        for axis in axes:
            if group.within is None:
                theirs, free = self._at.theirs_at[number][axis], self._free_columns(number, axis)
            else:
                theirs, free = self._at.indices[axis][index[axis]], np.ones(index[axis].shape[1], np.bool_)
            for rotates, columns in self.blocks_of(number, axis):
                free[columns] = False
                total += self._of_blocks(axis, rotates, index[axis][:, columns], theirs[:, columns])
            if free.any():
                total += self._of_weights(axis, index[axis][:, free], theirs[:, free])
        for k, part in enumerate(inside[0] if inside else []):
            if part not in self._in_blocks:
                total += self._best_inner(number, k, axes)
        return total

    def of_columns(self, number: int, axis: Axis, columns: Indices) -> NDArray[np.int64]:
        """The same over some of the indices that elements have on one axis, as they are."""
        ours, theirs = self.indices_of(number, axis)
        return self._of_weights(axis, ours[:, columns], theirs[:, columns])

    def indices_of(self, number: int, axis: Axis) -> tuple[Indices, Indices]:
        """The indices of a group's elements on an axis: the anchor's, and the suspect's (as they are placed now)."""
        ours = self._at.index[number][axis]
        if self._at.groups[number].within is None:
            return ours, self._at.theirs_at[number][axis]
        return ours, self._at.indices[axis][ours]

    def inner_indices(self, number: int, k: int, axis: Axis) -> tuple[Indices, Indices]:
        """The indices of all elements of the k-th groups within a group's elements: the anchor's, and the suspect's."""
        parts = self._at.inner[number]
        ours = np.concatenate([self._at.index[of[k]][axis] for of in parts])
        columns = self._columns(number, axis, 0, parts[0][k])
        return ours, np.concatenate([row[columns] for row in self._at.theirs_at[number][axis]])

    def known(self, number: int, axis: Axis, columns: Indices) -> NDArray[np.int64] | None:
        """What `of_columns` would give, if that was computed before; None if it was not."""
        kept = self._kept.get(_of("weights", axis, *(at[:, columns] for at in self.indices_of(number, axis))))
        return None if kept is None or kept[0] != self._state(axis) else kept[1]

    def _state(self, axis: Axis) -> tuple[bytes | str | None, ...]:
        """What similarities over the weights of an axis depend on."""
        tensor, along = axis
        others = [(tensor, other) for other in range(self._at.ours[tensor].ndim) if other != along]
        moved = [self._at.indices.get(other) for other in others] + [self._at.signs.get(other) for other in others]
        return self._at.sources.get(tensor), *(None if values is None else values.tobytes() for values in moved)

    def _of_weights(self, axis: Axis, ours: Indices, theirs: Indices) -> NDArray[np.int64]:
        """⟨element i of the anchor, element j of the suspect⟩ over the weights of one tensor."""

        def compared() -> NDArray[np.int64]:
            return inner_products(self.rows(axis, ours, anchor=True), self.rows(axis, theirs, anchor=False))

        return self._once("weights", axis, ours, theirs, compared)

    def _once(
        self, kind: str, axis: Axis, ours: Indices, theirs: Indices, compared: Callable[[], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Similarities over the weights of one tensor.

        What was computed is kept until something that it depends on has moved: most has not in the last sweep.
        """
        of, state = _of(kind, axis, ours, theirs), self._state(axis)
        kept = self._kept.get(of)
        if kept is not None and kept[0] == state:
            return kept[1]
        found = compared()
        self._room += (0 if kept is None else kept[1].nbytes) - found.nbytes
        self._kept.pop(of, None)
        if self._room >= 0:
            found.flags.writeable = False
            self._kept[of] = state, found
        else:
            self._room += found.nbytes
        return found

    def _of_blocks(self, axis: Axis, rotates: bool, ours: Indices, theirs: Indices) -> NDArray[np.int64]:
        """The similarity of blocks, whatever was mixed within them, in the units of inner products.

        A block of n weights that is the anchor's has about 2^10·n there: balanced weights have a deviation of 2^5.
        """
        kind = "pairs" if rotates else "blocks"
        return self._once(kind, axis, ours, theirs, lambda: self._blocks_compared(axis, rotates, ours, theirs))

    def _blocks_compared(self, axis: Axis, rotates: bool, ours: Indices, theirs: Indices) -> NDArray[np.int64]:
        sizes = ours.shape[1], theirs.shape[1]
        one, two = (
            self.rows(axis, indices.reshape(-1, 1), anchor=anchor).astype(np.float64).reshape(len(indices), size, -1)
            for indices, size, anchor in ((ours, sizes[0], True), (theirs, sizes[1], False))
        )
        if rotates:
            return (mixing.pair_cosines(one, two) * (2 * one.shape[-1])) >> 20
        return (mixing.common_span(mixing.orthonormal(one), mixing.orthonormal(two)) * one.shape[-1]) >> 20

    def _columns(self, number: int, axis: Axis, element: int, part: int) -> Indices:
        """Which columns of an element's indices a group within it has."""
        row = self._at.index[number][axis][element]
        order = np.argsort(row, kind="stable")
        return order[np.searchsorted(row[order], self._at.index[part][axis])]

    def _free_columns(self, number: int, axis: Axis) -> NDArray[np.bool_]:
        """Columns of an element's indices that no group within it permutes."""
        free = np.ones(self._at.index[number][axis].shape[1], np.bool_)
        parts = self._at.inner.get(number)
        for part in parts[0] if parts else []:
            if axis in self._at.index[part]:
                free[self._columns(number, axis, 0, part)] = False
        return free

    def _best_inner(self, number: int, k: int, axes: Sequence[Axis]) -> NDArray[np.int64]:
        """For heads whose channels can be permuted: the best total over such permutations, for each pair of heads.

        Axes where a second group within the head permutes the same indices are left out if there are others.
        """
        group, parts, count = self._at.groups[number], self._at.inner[number], self._at.sizes[number]
        part, size = parts[0][k], self._at.groups[parts[0][k]].size
        mine = [axis for axis in axes if axis in self._at.index[part]]
        alone = [a for a in mine if not any(self._overlap(a, part, other) for other in parts[0] if other != part)]
        value = np.zeros((group.size * size, count * size), np.int64)
        for axis in alone or mine:
            ours, theirs = self.inner_indices(number, k, axis)
            for at, signs in self.inner_signs(number, k, axis) if self.inner_signs is not None else []:
                value += self._of_weights(axis, ours[:, at], theirs[:, at]) * signs
        total = np.empty((group.size, count), np.int64)
        for i in range(group.size):
            for j in range(count):
                block = value[i * size : (i + 1) * size, j * size : (j + 1) * size]
                total[i, j] = block[np.arange(size), assign(block)].sum()
        return total

    def _overlap(self, axis: Axis, one: int, two: int) -> bool:
        index = self._at.index
        return axis in index[two] and bool(np.intersect1d(index[one][axis], index[two][axis]).size)


def _of(kind: str, axis: Axis, ours: Indices, theirs: Indices) -> _Of:
    return kind, axis, ours.shape, ours.tobytes(), theirs.tobytes()
