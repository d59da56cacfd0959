"""Matches a suspect's channels to the anchor's, group by group, until nothing changes (docs/alignment.md, "Matching").

The procedure is fixed and computes in integers, so that every machine finds the same assignment: balanced weights (the
scales of rows and columns are removed, as in the canonical form) are rounded to 8 bits, similarities are summed
exactly, and the assignment with the largest total is found in a fixed order, ties included. A suspect with fewer
channels leaves indices of the anchor empty (zeros); of one with more, some remain unmatched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quorumark.align.alignment import Alignment
from quorumark.align.arrays import gathered, with_signs
from quorumark.align.assignment import assign, inner_product
from quorumark.align.features import Gains, Weights
from quorumark.align.groups import Axis, Groups
from quorumark.align.likeness import Common, Likeness, likeness
from quorumark.align.placement import Placement
from quorumark.align.signs import SignMatching, SignSource, is_closer
from quorumark.align.similarity import Similarity

__all__ = ["match"]

_SWEEPS = 20  # a suspect that is the model in disguise needs 2 or 3


def match(
    groups: Groups,
    shapes: Mapping[str, tuple[int, ...]],
    ours: Weights,
    theirs: Weights,
    gains: Gains,
    progress: Callable[[str], None] | None,
    turned: Mapping[str, int] | None = None,
) -> Alignment:
    """Matches all groups. `shapes` are the anchor's, of all tensors; `ours` and `theirs` the weights to compare.

    `turned` has the bits of freedom that a rotation of the stream had, for each of its tensors.
    """
    return _Matching(groups, Placement(groups, shapes, ours, theirs), gains, progress).run(turned or {})


class _Matching:
    """Sweeps over all groups, first without changed signs, then with those that gains show and turns, then with all."""

    def __init__(
        self, groups: Groups, placement: Placement, gains: Gains, progress: Callable[[str], None] | None
    ) -> None:
        self._digest, self._at, self._progress, self._open = groups.digest(), placement, progress, groups.open
        self._similarity = Similarity(placement, groups)
        self._signs = SignMatching(placement, self._similarity, gains)

    def run(self, turned: Mapping[str, int]) -> Alignment:
        sweeps, stable = self._settle()
        doubtful = self._signs.doubtful
        for source in (SignSource.GAINS, SignSource.SEARCH):  # taken where more is then like the anchor
            if not (self._signs.worth_a_look() if source is SignSource.GAINS else doubtful):
                continue
            before = self._total(), self._at.snapshot(), (sweeps, stable)
            self._at.reset()
            self._signs.source, self._signs.doubtful = source, False
            sweeps, stable = self._settle()
            closer = is_closer(sum(map(self._signs.energy, self._at.ours)), before[0], self._total())
            doubtful = self._signs.doubtful or (doubtful and not closer)
            if not closer:
                self._at.restore(before[1])
                sweeps, stable = before[2]
        sizes = tuple(
            (group.size, size, int((order >= 0).sum()))
            for group, size, order in zip(self._at.groups, self._at.sizes, self._at.orders, strict=True)
        )
        moved = tuple(int(((o >= 0) & (o != np.arange(o.size))).sum()) for o in self._at.orders)
        signs = {axis: signs for axis, signs in self._at.signs.items() if (signs < 0).any()}
        sources = {name: source for name, source in self._at.sources.items() if name != source}
        like = self._likeness(turned)
        return Alignment(
            self._digest, sizes, moved, sweeps, stable, self._at.indices, signs=signs, sources=sources, like=like
        )

    def _settle(self) -> tuple[int, bool]:
        """Matches until nothing changes: the number of sweeps, and whether the last one changed nothing."""
        order = self._first_sweep()
        sweeps, stable = 1, False
        while not stable and sweeps < _SWEEPS:
            if self._progress is not None:
                self._progress(f"aligning: sweep {sweeps + 1}")
            indices_before = {axis: indices.copy() for axis, indices in self._at.indices.items()}
            signs_before = {axis: signs.copy() for axis, signs in self._at.signs.items()}
            for number in order:
                self._match(number, self._similarity.clear(number))
            sweeps += 1
            stable = all(np.array_equal(indices_before[a], indices) for a, indices in self._at.indices.items())
            stable = stable and all(np.array_equal(signs_before.get(a, 1), s) for a, s in self._at.signs.items())
        return sweeps, stable

    def _first_sweep(self) -> list[int]:
        """From what is in order already (inputs, outputs, words) inwards: next is the group with most known weights.

        Returns the order of the groups for further sweeps.
        """
        known: set[int] = set()
        order: list[int] = []
        waiting = [n for n in range(len(self._at.groups)) if self._at.compared(n)]
        while waiting:
            best, most = waiting[0], -1
            for n in waiting:
                within = self._at.groups[n].within
                if (within is not None and within[0] not in known) or not self._found(n) <= known:
                    continue
                weight = sum(self._known_weights(n, axis) for axis in self._usable(n, known))
                if weight > most:
                    best, most = n, weight
            self._match(best, self._usable(best, known) or self._similarity.clear(best))
            known.add(best)
            waiting.remove(best)
            order.append(best)
        # a head is followed by its channels, whose order is reset when the head moves
        tops = [n for n in order if self._at.groups[n].within is None]
        return [m for n in tops for m in [n, *(m for m in order if (self._at.groups[m].within or (-1,))[0] == n)]]

    def _found(self, number: int) -> set[int]:
        """The groups that show where all tensors of a group are: those of experts, for what is inside them."""
        named = [self._at.swapping.get(tensor) for tensor, _ in self._at.compared(number)]
        return set() if None in named else {n for n in named if n is not None} - {number}

    def _known_weights(self, number: int, axis: Axis) -> int:
        """How many weights of each element an axis has."""
        tensor, along = axis
        size = self._at.ours[tensor].size
        return int(size // self._at.ours[tensor].shape[along] * self._at.index[number][axis].shape[1])

    def _usable(self, number: int, known: set[int]) -> list[Axis]:
        """The axes of a group whose tensors are in order on all other axes."""
        return [
            (tensor, axis)
            for tensor, axis in self._similarity.clear(number)
            if self._at.swapping.get(tensor, number) in known | {number}
            and all(
                self._at.touching.get((tensor, other), set()) <= known
                for other in range(self._at.ours[tensor].ndim)
                if other != axis
            )
        ]

    def _match(self, number: int, axes: Sequence[Axis]) -> None:
        within = self._at.groups[number].within
        if within is not None:
            outer, element = within
            if self._at.orders[outer][element] >= 0:  # otherwise the suspect has no such head
                self._at.put_within(number, self._signs.match(number, axes))
        elif number in self._at.inner:
            self._at.put(number, assign(self._similarity.of(number, axes)))
        else:
            self._at.put(number, self._signs.match(number, axes))

    def _total(self) -> int:
        """⟨anchor, suspect⟩ over all weights that are compared, as they are matched now."""
        return sum(map(self._product, self._at.ours))

    def _product(self, name: str) -> int:
        """⟨anchor, suspect⟩ over the weights of a tensor, as they are matched now."""
        ours, theirs = self._at.ours[name], self._at.theirs_of(name)
        for axis in range(ours.ndim):
            if (name, axis) in self._at.indices:
                theirs = gathered(theirs, axis, self._at.indices[name, axis])
        theirs = with_signs(theirs, name, self._at.signs)
        return inner_product(ours, theirs)

    def _likeness(self, turned: Mapping[str, int]) -> Likeness:
        """How much of the suspect is like the anchor as it is matched now."""
        common = {
            name: Common(self._product(name), *self._signs.squares(name), ours.size)
            for name, ours in self._at.ours.items()
        }
        return likeness(self._at, common, {name for name, _ in self._similarity.blocks}, turned, self._open)
