"""Elements whose weights have the other sign on some of their axes (docs/alignment.md, "Matching").

Signs can be changed at no cost: of a norm's gain and of what it reads or what reads it, or of what a gated neuron
computes and what reads that. Similarities are then negative. A norm's gains show where: BatchNorm's gain has the sign
of what writes its channel, and other norms' gains have the sign of what reads it. Where no gain shows it, signs are
found by search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from quorumark.align.assignment import assign, assigned, bound, row_products
from quorumark.align.features import Gains
from quorumark.align.groups import Axis, Indices, Signs
from quorumark.align.placement import Placement
from quorumark.align.similarity import Similarity

__all__ = ["SignMatching", "SignSource", "is_closer"]

_PART = 16  # signs count as changed where they make more than one part in so many of the squared distance
_MEAN_DEVIATIONS = 1.5  # of noise that similarities must have on average: otherwise signs are not known
_ROW_DEVIATIONS = 3.0  # of noise that a single row must have to count as negative


class SignSource(Enum):
    """Which changed signs matching considers."""

    NONE = "none"
    GAINS = "those that gains of norms show"
    SEARCH = "all"


def is_closer(energy: int, before: int, after: int) -> bool:
    """Whether a similarity that rises from `before` to `after` removes a sixteenth of the squared distance.

    ‖a − s‖²/2 = (‖a‖² + ‖s‖²)/2 − ⟨a, s⟩, and the energy is the first of these. A row of the other sign is twice its
    size away from the anchor's: few of them outweigh all that training did.
    """
    return _PART * (after - before) > energy - before


def _shared_length(one: str, two: str, *, ends: bool = True) -> int:
    """How many characters two tensors' names share at the start (and at the end), without the last part ("weight")."""
    first, second = (name.rpartition(".")[0] for name in (one, two))
    pairs = [(first, second), (first[::-1], second[::-1])][: 1 + ends]
    return sum(sum(takewhile(bool, (a == b for a, b in zip(*pair, strict=False)))) for pair in pairs)


class SignMatching:
    """Matches a group's elements together with their signs.

    Attributes:
        source: which changed signs are considered now.
        doubtful: groups that other signs could bring closer to the anchor.
    """

    def __init__(self, placement: Placement, similarity: Similarity, gains: Gains) -> None:
        self._at, self._similarity, self._gains = placement, similarity, gains
        self._shapes = placement.shapes
        self.source = SignSource.NONE
        self.doubtful: set[int] = set()
        self._read_by: dict[Axis, str] = {}  # the gain that shows the signs of what reads channels
        self._energies: dict[str, int] = {}

    def reset(self, source: SignSource) -> None:
        """Begins again with another source of signs."""
        self.source = source
        self._read_by = {}

    def has_negative_gains(self) -> bool:
        """Whether a gain of either model is negative, which may be the trace of changed signs."""
        return any(ours.any() or theirs.any() for ours, theirs in self._gains.values())

    def energy(self, name: str) -> int:
        """(‖a‖² + ‖s‖²)/2 of a tensor."""
        if name not in self._energies:
            both = (self._at.ours[name], self._at.theirs[name])
            self._energies[name] = sum(int((row.astype(np.int64) ** 2).sum()) for values in both for row in values) // 2
        return self._energies[name]

    def match(self, number: int, axes: Sequence[Axis], free: Sequence[Axis]) -> None:
        """Matches elements whose weights may have the other sign on the `free` axes.

        Each free axis is taken with the signs of the gain that makes most of it similar. If an assignment by the sizes
        of similarities then selects far more than the one by their sums, it is taken. After that, axes with many
        negative similarities get signs. With `SignSource.NONE` nothing of this is done, and the group is only marked as
        doubtful; with `SignSource.GAINS` only what gains show is done, which leaves nothing to chance.
        """
        each = {axis: self._similarity.of(number, [axis]) for axis in free}
        rest = self._similarity.of(number, [axis for axis in axes if axis not in free])
        shown: dict[Axis, Signs] = {}
        for axis in free if self.source is not SignSource.NONE else ():
            shown[axis] = self._shown_signs(number, axis, each[axis])
            each[axis] = each[axis] * shown[axis]
        total: NDArray[np.int64] = sum(each.values(), rest)
        sizes: NDArray[np.int64] = sum((np.abs(value) for value in each.values()), rest)
        order = assign(total)
        energy = sum(self.energy(name) for name, _ in axes)
        in_doubt = is_closer(energy, int(assigned(total, order).sum()), bound(sizes))
        searching = self.source is SignSource.SEARCH
        if not searching:
            (self.doubtful.add if in_doubt else self.doubtful.discard)(number)
        if self.source is SignSource.NONE:
            self._at.put(number, order)
            return
        if in_doubt and searching:
            by_size = assign(sizes)
            if is_closer(energy, int(assigned(sizes, order).sum()), int(assigned(sizes, by_size).sum())):
                order = by_size
        self._at.put(number, order)
        for axis, known in self._written_signs(number).items():
            if axis not in each:  # the axis itself is not in order yet, but its signs are known now
                shown[axis], each[axis] = known, np.zeros_like(total)
        for axis, value in each.items():
            signs = self._at.signs.setdefault(axis, np.ones(self._shapes[axis[0]][axis[1]], np.int8))
            index = self._at.index[number][axis]
            signs[index] = 1
            there = index[order >= 0]
            signs[there] = assigned(np.broadcast_to(shown[axis], value.shape), order)[:, None]
            if searching and self._has_signs(number, axis, value, order):
                signs[there] *= np.where(assigned(value, order) < 0, -1, 1).astype(np.int8)[:, None]
        self._sign_readers(number)

    def _has_signs(self, number: int, axis: Axis, value: NDArray[np.int64], order: NDArray[np.int64]) -> bool:
        """Whether signs were changed on an axis: negative similarities add much to the distance, and are not noise.

        Of n weights, the noise of ⟨a, s⟩ has a deviation of ‖a‖·‖s‖/√n.
        """
        found, rows = assigned(value, order), np.flatnonzero(order >= 0)
        size = int(np.abs(found).sum())
        if not is_closer(self.energy(axis[0]), int(found.sum()), size):
            return False
        one = self._similarity.rows(axis, self._at.index[number][axis][rows], anchor=True).astype(np.int64)
        two = self._similarity.rows(axis, self._at.theirs_at[number][axis][order[rows]], anchor=False).astype(np.int64)
        ours, theirs = ((x * x).sum(axis=1).astype(np.float64) for x in (one, two))
        noise = np.rint(np.sqrt(ours * theirs / one.shape[1]))
        negative = found < -_ROW_DEVIATIONS * noise  # a row that is only noise says nothing about signs
        gained = int(np.abs(found[negative]).sum())
        before = int(found.sum())
        beyond_noise = size > _MEAN_DEVIATIONS * float(noise.sum())
        return beyond_noise and is_closer(self.energy(axis[0]), before, before + 2 * gained)

    # --- what gains show ---

    def _shown_signs(self, number: int, axis: Axis, value: NDArray[np.int64]) -> Signs:
        """The signs, for each of the suspect's elements, that a gain of the group shows for an axis, or 1.

        BatchNorm's gains are for what writes their channels; where it is not known which belongs to which, the gain is
        taken that makes most similar. What other norms' gains show is known from `_sign_readers`.
        """
        written, gains = self._written_signs(number), self._gain_signs(number)
        if axis in written:
            return written[axis]
        if axis in self._read_by:
            return gains[self._read_by[axis]]
        best, most = np.ones((1, 1), np.int8), bound(value)
        for signs in [of for name, of in gains.items() if self._is_batch_norm(name) and axis[1] == 0]:
            if (similar := bound(value * signs)) > most:
                best, most = signs, similar
        return best

    def _gain_signs(self, number: int) -> dict[str, Signs]:
        """For each gain of a group, ±1 for the anchor's × the suspect's elements."""
        found = {}
        for (name, _), index in self._at.index[number].items():
            at = self._at.theirs_at[number].get((name, 0))
            if name in self._gains and index.shape[1] == 1 and at is not None and at.max() < len(self._gains[name][1]):
                ours, theirs = self._gains[name]
                found[name] = np.where(ours[index] != theirs[at].T, np.int8(-1), np.int8(1))
        return found

    def _is_batch_norm(self, gain: str) -> bool:
        return f"{gain.removesuffix('weight')}running_var" in self._shapes

    def _written_signs(self, number: int) -> dict[Axis, Signs]:
        """Signs of what writes a group's channels (on its first axis), if there are as many BatchNorms as writers.

        The layout's names show which BatchNorm follows which writer: a layer and its norm share most of their names
        (layer2.0.conv2 and layer2.0.bn2). Similarity cannot show it before the layer itself is in order.
        """
        signs = {name: of for name, of in self._gain_signs(number).items() if self._is_batch_norm(name)}
        writers = [axis for axis in self._at.compared(number) if axis[1] == 0]
        if not signs or len(signs) != len(writers):
            return {}
        gains = list(signs)
        pairs = assign(np.array([[_shared_length(name, gain) for gain in gains] for name, _ in writers], np.int64))
        return {axis: signs[gains[pair]] for axis, pair in zip(writers, pairs, strict=True)}

    # --- what reads channels through a norm ---

    def _sign_readers(self, number: int) -> None:
        """Gives signs to what reads a group's channels after a LayerNorm or RMSNorm, by the norm's gain.

        Of the gains whose names start most like the reader's, it is the one that makes the reader most similar.
        """
        gains = {name: of for name, of in self._gain_signs(number).items() if not self._is_batch_norm(name)}
        order = self._at.orders[number]
        there = np.flatnonzero(order >= 0)
        for axis in self._at.compared(number) if gains and there.size else ():
            index = self._at.index[number][axis]
            if axis in self._similarity.blocks or index.shape[1] != 1:
                continue
            near = {name: _shared_length(axis[0], name, ends=False) for name in gains}
            tried = {name: gains[name][there, order[there]] for name in gains if near[name] == max(near.values())}
            across = [(name, a) for name, a in self._similarity.blocks if name == axis[0] and a != axis[1]]
            signs_before, gain_before = self._at.signs.pop(axis, None), self._read_by.pop(axis, None)
            if across:
                found = self._gain_by_heads(axis, across[0], index[there], tried)
            else:
                found = self._gain_by_products(number, axis, there, tried)
            if found is not None:
                self._read_by[axis] = found
                self._at.signs[axis] = self._spread(axis, index[there], tried[found])
            elif signs_before is not None and gain_before is None:
                self._at.signs[axis] = signs_before  # what was found without gains stays

    def _spread(self, axis: Axis, indices: Indices, signs: Signs) -> Signs:
        """Signs of some elements as signs of an axis."""
        every = np.ones(self._shapes[axis[0]][axis[1]], np.int8)
        every[indices] = signs[:, None]
        return every

    def _gain_by_products(self, number: int, axis: Axis, there: Indices, tried: Mapping[str, Signs]) -> str | None:
        """The gain of a reader by the products of its rows, or None.

        For the rows W of a reader, one for each channel, W·Wᵀ is the same whatever the order of its other axis is, and
        signs d make it d·dᵀ ∘ W·Wᵀ. So Σ d·dᵀ ∘ (A·Aᵀ) ∘ (W·Wᵀ) with the anchor's A shows which gain it is: without its
        diagonal that is noise for the wrong signs, of deviation √2·‖(A·Aᵀ)∘(W·Wᵀ)‖, and two deviations are required.
        """
        ours = self._similarity.rows(axis, self._at.index[number][axis][there], anchor=True)
        at = self._at.theirs_at[number][axis][self._at.orders[number][there]]
        both = (row_products(ours) * row_products(self._similarity.rows(axis, at, anchor=False))) >> 21
        np.fill_diagonal(both, 0)
        noise = int((both * both).sum())
        best, most = None, int(both.sum())
        for name, signs in tried.items():
            similar = int(signs.astype(np.int64) @ both @ signs.astype(np.int64))
            if similar > most and similar**2 > 8 * noise:
                best, most = name, similar
        return best

    def _gain_by_heads(self, axis: Axis, across: Axis, indices: Indices, tried: Mapping[str, Signs]) -> str | None:
        """The gain by which the spans of heads come an eighth closer, whatever was mixed within them, or None."""
        heads = self._at.outer(across)
        if not heads:
            return None
        best, most = None, 9 * bound(self._similarity.of(heads[0], [across])) // 8
        for name, signs in tried.items():
            self._at.signs[axis] = self._spread(axis, indices, signs)
            similar = bound(self._similarity.of(heads[0], [across]))
            if similar > most:
                best, most = name, similar
        self._at.signs.pop(axis)
        return best
