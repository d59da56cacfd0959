"""Elements whose weights have the other sign on some of their axes (docs/alignment.md, "Signs").

Which indices of an element can get the other sign together is in the groups (`Group.signs`): each such set has one
unknown sign g for every element, and the weights at an index are multiplied by the product of the g of its sets. Gains
of norms show such products: they are positive in the anchor, and negative where a sign was changed. What they leave
open is found from the similarities: the sign that all axes with the same open product share is that of the sum of their
similarities. A sign that only all elements of a group can change at once (`Group.turns`: that of a stream between
LayerNorms) is the one with which the best assignment is closer to the anchor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product

import numpy as np
from numpy.typing import NDArray

from quorumark.align.assignment import assign, assigned, bound, inner_product, pair_products, squares
from quorumark.align.features import Gains
from quorumark.align.groups import Axis, Group, Indices, Signs
from quorumark.align.placement import Placement
from quorumark.align.similarity import Similarity
from quorumark.model import kernels

__all__ = ["SignMatching", "SignSource", "is_closer"]

_PART = 16  # signs count as changed where they make more than one part in so many of the squared distance
_MEAN_DEVIATIONS = 1.5  # of noise that similarities must have on average: otherwise signs are not known
_TRIED_TOGETHER = 3  # turns whose combinations are all tried: 2³ assignments
_ROW_DEVIATIONS = 3.0  # of noise that a single element must have to count as negative

_Values = NDArray[np.int64]


class SignSource(Enum):
    """Which changed signs matching considers."""

    NONE = "none"
    GAINS = "those that gains of norms show, and those of all elements at once"
    SEARCH = "all"


def is_closer(energy: int, before: int, after: int) -> bool:
    """Whether a similarity that rises from `before` to `after` removes a sixteenth of the squared distance.

    ‖a − s‖²/2 = (‖a‖² + ‖s‖²)/2 − ⟨a, s⟩, and the energy is the first of these. A row of the other sign is twice its
    size away from the anchor's: few of them outweigh all that training did.
    """
    return _PART * (after - before) > energy - before


@dataclass(frozen=True)
class _Part:
    """Some columns of an axis' indices whose signs are the same.

    Attributes:
        shown: the gains whose product shows the sign, as sets of gains that show the same.
        open: the unknown signs that gains do not show, as bits; 0 for none.
        turned: the unknown signs of all elements at once that gains do not show, as bits.
    """

    axis: Axis
    columns: Indices
    shown: tuple[tuple[str, ...], ...]
    open: int
    turned: int


def _parts(group: Group, gains: Gains) -> list[_Part]:
    """The axes of a group in parts, with what gains show about them (elimination over GF(2))."""
    axes = group.axes()
    bits: dict[Axis, NDArray[np.int64]] = {axis: np.zeros(at.shape[1], np.int64) for axis, at in axes.items()}
    for number, slots in enumerate((*group.turns, *group.signs)):  # so that gains show signs first, then turns
        for slot in slots:
            axis = slot.tensor, slot.axis
            bits[axis] ^= np.isin(axes[axis][0], slot.indices(group.size)[0]).astype(np.int64) << number
    alike: dict[int, list[str]] = {}
    for (name, _), of in sorted(bits.items()):
        if name in gains and of.size == 1 and of[0]:
            alike.setdefault(int(of[0]), []).append(name)
    basis: dict[int, tuple[int, tuple[tuple[str, ...], ...]]] = {}  # by the highest bit: a product and what shows it
    for vector, names in alike.items():
        rest, shown = _reduced(vector, basis)
        if rest:
            basis[rest.bit_length() - 1] = rest, (*shown, tuple(names))
    found = []
    for axis, of in sorted(bits.items()):
        for vector in np.unique(of).tolist():
            rest, shown = _reduced(vector, basis)
            odd = tuple(names for names in dict.fromkeys(shown) if shown.count(names) % 2)
            whole = rest & ((1 << len(group.turns)) - 1)
            found.append(_Part(axis, np.flatnonzero(of == vector), odd, rest ^ whole, whole))
    return found


def _reduced(
    vector: int, basis: Mapping[int, tuple[int, tuple[tuple[str, ...], ...]]]
) -> tuple[int, tuple[tuple[str, ...], ...]]:
    """What is left of a product of signs when those that are shown are taken out, and what shows them."""
    shown: tuple[tuple[str, ...], ...] = ()
    for pivot in sorted(basis, reverse=True):
        if vector >> pivot & 1:
            vector, shown = vector ^ basis[pivot][0], (*shown, *basis[pivot][1])
    return vector, shown


def _spanned(bits: int, others: Sequence[int]) -> bool:
    """Whether a product of signs follows from others."""
    turns: dict[int, tuple[int, int]] = {}
    for other in others:
        _learn(turns, other, 1)
    return _sign_of(bits, turns) != 0


def _learn(turns: dict[int, tuple[int, int]], bits: int, sign: int) -> None:
    """Adds a product of signs and what it is, unless it follows from those that are known. Kept by highest bits."""
    while bits and bits.bit_length() in turns:
        other, known = turns[bits.bit_length()]
        bits, sign = bits ^ other, sign * known
    if bits:
        turns[bits.bit_length()] = bits, sign


def _sign_of(bits: int, turns: Mapping[int, tuple[int, int]]) -> int:
    """A product of signs, 0 if it does not follow from those that are known."""
    sign = 1
    while bits:
        if bits.bit_length() not in turns:
            return 0
        other, known = turns[bits.bit_length()]
        bits, sign = bits ^ other, sign * known
    return sign


class SignMatching:
    """Matches a group's elements together with their signs.

    Attributes:
        source: which changed signs are considered now.
        doubtful: whether other signs could have brought a group closer to the anchor, since this was last set to False.
    """

    def __init__(self, placement: Placement, similarity: Similarity, gains: Gains) -> None:
        self._at, self._similarity, self._gains = placement, similarity, gains
        self.source = SignSource.NONE
        self.doubtful = False
        self._parts = [
            [
                p
                for p in _parts(group, gains)
                if p.axis[0] in placement.ours and not similarity.blocks_of(number, p.axis)
            ]
            for number, group in enumerate(placement.groups)
        ]
        self._squares: dict[str, tuple[int, int]] = {}
        self._turns: list[dict[int, tuple[int, int]]] = [{} for _ in placement.groups]
        similarity.inner_signs = self.inner_signs

    def worth_a_look(self) -> bool:
        """Whether gains may show signs, as one of them is negative, or a turn may have been done, as there is doubt."""
        negative = any(ours.any() or theirs.any() for ours, theirs in self._gains.values())
        return negative or (self.doubtful and any(part.turned for parts in self._parts for part in parts))

    def squares(self, name: str) -> tuple[int, int]:
        """‖a‖² and ‖s‖² of a tensor."""
        if name not in self._squares:
            ours, theirs = self._at.ours[name], self._at.theirs[name]
            self._squares[name] = inner_product(ours, ours), inner_product(theirs, theirs)
        return self._squares[name]

    def energy(self, name: str) -> int:
        """(‖a‖² + ‖s‖²)/2 of a tensor."""
        return sum(self.squares(name)) // 2

    def match(self, number: int, axes: Sequence[Axis]) -> NDArray[np.int64]:
        """The best order of a group's elements by some axes. Their signs are noted for all axes.

        Weights are taken with the signs that gains show. Then, for all axes that share an open sign, the size of the
        sum of their similarities counts, if an assignment by these is far closer to the anchor. With `SignSource.NONE`
        nothing of this is done, and only doubt is noted; with `SignSource.GAINS` only what gains show is done, and
        turns, which leaves little to chance.
        """
        used = [part for part in self._parts[number] if part.axis in axes]
        confirmed = self._confirmed(number, axes, used)
        if confirmed is not None:
            return confirmed
        rest = self._similarity.of(number, [axis for axis in axes if axis not in {part.axis for part in used}])
        each = [self._similarity.of_columns(number, part.axis, part.columns) for part in used]
        if self.source is not SignSource.NONE:
            each = [value * self.shown_signs(number, part) for part, value in zip(used, each, strict=True)]
        energy = sum(self.energy(name) for name, _ in axes)
        if self.source is not SignSource.NONE:
            each = self._turned(number, used, each, rest, energy)
        fixed = [part.open == 0 and (part.turned == 0 or self.source is not SignSource.NONE) for part in used]
        together = rest + sum((v for v, known in zip(each, fixed, strict=True) if known), np.zeros_like(rest))
        by_sign = self._by_open_sign(used, each)
        total = together + sum(by_sign.values(), np.zeros_like(rest))
        sizes = together + sum(map(np.abs, by_sign.values()), np.zeros_like(rest))
        order = assign(total)
        in_doubt = bool(by_sign) and is_closer(energy, int(assigned(total, order).sum()), bound(sizes))
        searching = self.source is SignSource.SEARCH
        self.doubtful |= in_doubt
        if in_doubt and searching:
            by_size = assign(sizes)
            if is_closer(energy, int(assigned(sizes, order).sum()), int(assigned(sizes, by_size).sum())):
                order = by_size
        if self.source is not SignSource.NONE:
            found: dict[tuple[int, int], Signs] = {}
            for bits, value in by_sign.items() if searching else ():
                if self._has_signs(number, [p for p in used if (p.open, p.turned) == bits], value, order):
                    found[bits] = np.where(assigned(value, order) < 0, -1, 1).astype(np.int8)
            self._note(number, order, found)
        return order

    def _confirmed(self, number: int, axes: Sequence[Axis], used: Sequence[_Part]) -> NDArray[np.int64] | None:
        """The order that `match` would find, where that is known without all similarities; None where it is not.

        Of tensors that were compared already, or else of one of them, similarities are known. Those of the others are
        at most ‖a_i‖·‖s_j‖, and those of the pairs of one order are computed. That is enough to confirm the order if
        the suspect is much like the anchor. What `match` notes is then noted.
        """
        size = self._at.groups[number].size
        if (
            self.source is SignSource.SEARCH
            or len(used) < 2
            or {part.axis for part in used} != set(axes)
            or self._at.sizes[number] != size
            or (self.source is SignSource.GAINS and any(part.turned and not part.open for part in used))
        ):
            return None
        known = [self._similarity.known(number, part.axis, part.columns) for part in used]
        if all(value is not None for value in known):
            return None
        if all(value is None for value in known):
            most = max(range(len(used)), key=lambda at: self._weights(used[at]))
            known[most] = self._similarity.of_columns(number, used[most].axis, used[most].columns)
        each = [
            None
            if value is None
            else value
            if self.source is SignSource.NONE
            else value * self.shown_signs(number, part)
            for part, value in zip(used, known, strict=True)
        ]
        total = sum((value for value in each if value is not None), np.zeros((size, size), np.int64))
        order: NDArray[np.int64] = total.argmax(axis=1)
        if np.unique(order).size != size or not self._is_best(number, axes, used, each, total, order):
            return None
        if self.source is not SignSource.NONE:
            self._note(number, order, {})
        return order

    def _weights(self, part: _Part) -> int:
        """How many weights of each element a part has."""
        tensor = self._at.ours[part.axis[0]]
        return int(tensor.size // tensor.shape[part.axis[1]] * part.columns.size)

    def _is_best(
        self,
        number: int,
        axes: Sequence[Axis],
        used: Sequence[_Part],
        known: Sequence[_Values | None],
        total: _Values,
        order: NDArray[np.int64],
    ) -> bool:
        """Whether no other order can be as good, by the similarities that are known; if so, doubt is noted."""
        fixed = [part.open == 0 and (part.turned == 0 or self.source is not SignSource.NONE) for part in used]
        keys = [(0, 0) if sure else (part.open, part.turned) for sure, part in zip(fixed, used, strict=True)]
        at_order = {key: np.zeros(order.size, np.int64) for key in (*keys, (0, 0))}
        by_sign: dict[tuple[int, int], _Values] = {}
        ours, theirs, rows = [], [], np.arange(order.size)
        for part, value, key in zip(used, known, keys, strict=True):
            if value is not None:
                at_order[key] += value[rows, order]
                if key != (0, 0):
                    by_sign[key] = by_sign[key] + value if key in by_sign else value
                continue
            one, two = (
                self._similarity.rows(part.axis, at[:, part.columns], anchor=anchor)
                for at, anchor in zip(self._similarity.indices_of(number, part.axis), (True, False), strict=True)
            )
            pairs = pair_products(one, two, order)
            if self.source is not SignSource.NONE:
                pairs = pairs * np.broadcast_to(self.shown_signs(number, part), total.shape)[rows, order]
            at_order[key] += pairs
            ours.append(np.sqrt(squares(one).astype(np.float64)))
            theirs.append(np.sqrt(squares(two).astype(np.float64)))
        limits = np.stack(ours), np.stack(theirs)
        found = sum(at_order.values(), np.zeros(order.size, np.int64))
        if not kernels.is_best(total, *limits, order, found):
            return False
        open_signs = [key for key in at_order if key != (0, 0)]
        if open_signs:
            sizes = at_order[0, 0] + sum(np.abs(at_order[key]) for key in open_signs)
            most = total + sum((np.abs(value) - value for value in by_sign.values()), np.zeros_like(total))
            if not kernels.is_largest(most, *limits, order, sizes):
                return False
            energy = sum(self.energy(name) for name, _ in axes)
            self.doubtful |= is_closer(energy, int(found.sum()), int(sizes.sum()))
        return True

    def _by_open_sign(self, parts: Sequence[_Part], each: Sequence[_Values]) -> dict[tuple[int, int], _Values]:
        """Similarities summed over all parts that share an open sign, or a turn that was not looked for."""
        found: dict[tuple[int, int], _Values] = {}
        for part, value in zip(parts, each, strict=True):
            if part.open or (part.turned and self.source is SignSource.NONE):
                key = part.open, part.turned
                found[key] = found[key] + value if key in found else value
        return found

    def _turned(
        self, number: int, parts: Sequence[_Part], each: Sequence[_Values], rest: _Values, energy: int
    ) -> list[_Values]:
        """Similarities with the turns that bring a group closest to the anchor, if that is far closer.

        The first three independent turns are tried in all combinations, the others one by one.
        """
        by_turn: dict[int, _Values] = {}
        for part, value in zip(parts, each, strict=True):
            if not part.open:
                by_turn[part.turned] = by_turn[part.turned] + value if part.turned in by_turn else value
        known = rest + by_turn.pop(0, np.zeros_like(rest))
        if not by_turn:
            return list(each)
        best: dict[int, tuple[int, int]] = {}
        waiting = sorted(by_turn, key=lambda bits: (-int(np.abs(by_turn[bits]).sum()), bits))
        free = [bits for at, bits in enumerate(waiting) if not _spanned(bits, waiting[:at])]
        for some in [free[:_TRIED_TOGETHER], *([bits] for bits in free[_TRIED_TOGETHER:])]:
            tried = []
            for signs in product((1, -1), repeat=len(some)):
                turns = dict(best)
                for bits, sign in zip(some, signs, strict=True):
                    _learn(turns, bits, sign)
                value = known + sum(
                    (by_turn[bits] * sign for bits in by_turn if (sign := _sign_of(bits, turns))), np.zeros_like(known)
                )
                tried.append((int(assigned(value, assign(value)).sum()), turns))
            best = max(tried, key=lambda each: each[0])[1]  # the first of those that are equal
        as_they_are = known + sum(by_turn.values(), np.zeros_like(known))
        turned = known + sum((v * _sign_of(bits, best) for bits, v in by_turn.items()), np.zeros_like(known))
        before, after = (int(assigned(value, assign(value)).sum()) for value in (as_they_are, turned))
        self._turns[number] = best if is_closer(energy, before, after) else {}
        return [v * self._turn(number, part) for part, v in zip(parts, each, strict=True)]

    def _turn(self, number: int, part: _Part) -> int:
        """The sign of all elements of a part; 1 where it is not known."""
        return _sign_of(part.turned, self._turns[number]) or 1

    def _note(self, number: int, order: NDArray[np.int64], found: Mapping[tuple[int, int], Signs]) -> None:
        """Notes the signs of all axes of a group, with its elements in this order."""
        there = np.flatnonzero(order >= 0)
        for part in self._parts[number]:
            signs = self._at.signs.setdefault(part.axis, np.ones(self._at.shapes[part.axis[0]][part.axis[1]], np.int8))
            index = self._at.index[number][part.axis][:, part.columns]
            shown = np.broadcast_to(self.shown_signs(number, part), (order.size, self._at.sizes[number]))
            signs[index] = 1
            more = found.get((part.open, part.turned), np.ones(there.size, np.int8)) * np.int8(self._turn(number, part))
            signs[index[there]] = (shown[there, order[there]] * more)[:, None]

    def _has_signs(self, number: int, parts: Sequence[_Part], value: _Values, order: NDArray[np.int64]) -> bool:
        """Whether an open sign was changed: negative similarities add much to the distance, and are not noise.

        Of n weights, the noise of ⟨a, s⟩ has a deviation of ‖a‖·‖s‖/√n.
        """
        found, rows = assigned(value, order), np.flatnonzero(order >= 0)
        size, before = int(np.abs(found).sum()), int(found.sum())
        energy = sum(self.energy(name) for name in {part.axis[0] for part in parts})
        if not is_closer(energy, before, size):
            return False
        variance = np.zeros(rows.size)
        for part in parts:
            ours_at, theirs_at = self._similarity.indices_of(number, part.axis)
            one = self._similarity.rows(part.axis, ours_at[rows][:, part.columns], anchor=True).astype(np.int64)
            two = self._similarity.rows(part.axis, theirs_at[order[rows]][:, part.columns], anchor=False).astype(
                np.int64
            )
            ours, theirs = ((x * x).sum(axis=1).astype(np.float64) for x in (one, two))
            variance += np.rint(ours * theirs / one.shape[1])
        noise = np.rint(np.sqrt(variance))
        negative = found < -_ROW_DEVIATIONS * noise  # an element that is only noise says nothing about signs
        gained = int(np.abs(found[negative]).sum())
        return size > _MEAN_DEVIATIONS * float(noise.sum()) and is_closer(energy, before, before + 2 * gained)

    # --- what gains show ---

    def shown_signs(self, number: int, part: _Part) -> Signs:
        """What gains show for a part: ±1 for the anchor's × the suspect's elements."""
        found = np.ones((1, 1), np.int8)
        for names in part.shown:
            found = found * _majority([self._gain_signs(number, name) for name in names])
        return found

    def inner_signs(self, number: int, k: int, axis: Axis) -> list[tuple[Indices, Signs]]:
        """What gains show for the elements within those of a group, for some columns of an axis at a time."""
        inner = self._at.inner[number][0][k]
        found = []
        for part in (part for part in self._parts[inner] if part.axis == axis):
            signs = np.ones((1, 1), np.int8)
            for names in part.shown if self.source is not SignSource.NONE else ():
                each = [
                    self._compared_gains(name, *self._similarity.inner_indices(number, k, (name, 0))) for name in names
                ]
                signs = signs * _majority(each)
            found.append((part.columns, signs))
        return found

    def _gain_signs(self, number: int, name: str) -> Signs:
        return self._compared_gains(name, *self._similarity.indices_of(number, (name, 0)))

    def _compared_gains(self, name: str, ours_at: Indices, theirs_at: Indices) -> Signs:
        """Whether a gain has the same sign, for the anchor's × the suspect's elements."""
        ours, theirs = self._gains[name][0], self._gains[self._at.sources.get(name, name)][1]
        if theirs_at.max() >= theirs.size:
            return np.ones((1, 1), np.int8)
        return np.where(ours[ours_at] != theirs[theirs_at].T, np.int8(-1), np.int8(1))


def _majority(signs: Sequence[Signs]) -> Signs:
    votes = sum((each.astype(np.int64) for each in signs), np.zeros((1, 1), np.int64))
    return np.where(votes < 0, -1, 1).astype(np.int8)
