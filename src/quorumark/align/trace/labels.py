"""Labels that follow the operations of a model: atoms, which are joined or pinned, and scales (docs/alignment.md).

Each index of each axis of each parameter is an atom. Every element of an activation carries the atom of the channel
that it belongs to, and the scale that this channel may have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "Component",
    "DisjointSets",
    "Knob",
    "Labels",
    "Scales",
    "Scaling",
    "along",
    "first_along",
    "line_of",
    "narrowed",
    "pairs_of",
    "selected",
    "values_of",
]

Labels = Any  # a torch tensor of integers, of the shape of what it labels


@dataclass(frozen=True, order=True)
class Knob:
    """One index of one axis of a tensor, whose weights are multiplied by s^exponent."""

    tensor: str
    axis: int
    index: int
    exponent: int


Scaling = tuple[Knob, ...]
"""Indices that can be scaled together, by any s > 0, without changing the function."""


class DisjointSets:
    """Disjoint sets of integers: atoms that move together."""

    def __init__(self) -> None:
        self.parent: list[int] = [0]

    def new(self, count: int) -> int:
        """Adds so many sets of one; returns the first number."""
        first = len(self.parent)
        self.parent.extend(range(first, first + count))
        return first

    def root(self, x: int) -> int:
        parent = self.parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def join(self, x: int, y: int) -> tuple[int, int]:
        """Joins two sets: the root that stays, and the one that goes (the same if they were one set)."""
        x, y = self.root(x), self.root(y)
        x, y = min(x, y), max(x, y)
        self.parent[y] = x
        return x, y


class Scales:
    """Integers that stand for scales: joined as equal or inverse, fixed to 1, with the indices that they multiply."""

    def __init__(self) -> None:
        self.parent, self.sign = [0], [1]
        self.fixed: set[int] = {0}
        self.knobs: dict[int, list[Knob]] = defaultdict(list)

    def new(self, count: int) -> int:
        first = len(self.parent)
        self.parent.extend(range(first, first + count))
        self.sign.extend([1] * count)
        return first

    def root(self, x: int) -> tuple[int, int]:
        sign = 1
        while self.parent[x] != x:
            sign, x = sign * self.sign[x], self.parent[x]
        return x, sign

    def fix(self, labels: Iterable[int]) -> None:
        self.fixed.update(self.root(x)[0] for x in labels)

    def join(self, pairs: Iterable[tuple[int, int]], sign: int) -> None:
        """s_x = s_y^sign."""
        for one, two in pairs:
            (x, a), (y, b) = self.root(one), self.root(two)
            if x == y:
                if a * b != sign:
                    self.fixed.add(x)  # s = 1/s
                continue
            x, y = min(x, y), max(x, y)
            self.parent[y], self.sign[y] = x, a * b * sign
            if y in self.fixed:
                self.fixed.add(x)

    def scalings(self) -> tuple[Scaling, ...]:
        """The scales that are not fixed, each with all its indices."""
        together: dict[int, list[Knob]] = defaultdict(list)
        for label, knobs in self.knobs.items():
            root, sign = self.root(label)
            if root not in self.fixed:
                together[root] += [Knob(k.tensor, k.axis, k.index, sign * k.exponent) for k in knobs]
        return tuple(tuple(sorted(knobs)) for _, knobs in sorted(together.items()) if len(knobs) > 1)


@dataclass
class Component:
    """One way in which a tensor's elements belong to channels: the atom and the scale of each element (0 for none)."""

    label: Labels
    scale: Labels

    def map(self, function: Callable[[Labels], Labels]) -> Component:
        return Component(function(self.label), function(self.scale))

    def axes(self) -> frozenset[int]:
        """The axes along which the atoms differ."""
        label = self.label
        return frozenset(
            a
            for a in range(label.dim())
            if label.shape[a] > 1 and label.stride(a) != 0 and bool((label != label.narrow(a, 0, 1)).any())
        )


def without_repeats(*labels: Labels) -> list[Labels]:
    """The same labels without the axes along which all of them are only repeated."""
    for axis in range(labels[0].dim()):
        if all(x.stride(axis) == 0 for x in labels):
            labels = tuple(x.narrow(axis, 0, min(1, x.shape[axis])) for x in labels)
    return list(labels)


def pairs_of(one: Labels, two: Labels) -> list[tuple[int, int]]:
    """Which labels meet at the same element, without those that meet nothing (0)."""
    one, two = without_repeats(one, two)
    one, two = one.reshape(-1).numpy(), two.reshape(-1).numpy()
    both = np.unique((one.astype(np.int64) << 32) | two.astype(np.int64))
    return [(int(p >> 32), int(p & 0xFFFFFFFF)) for p in both if p >> 32 and p & 0xFFFFFFFF]


def along(axis: int, shape: tuple[int, ...]) -> Callable[[Labels], Labels]:
    """Spreads the labels of an axis over all elements."""
    return lambda x: x.view([-1 if a == axis else 1 for a in range(len(shape))]).expand(shape)


def line_of(axis: int) -> Callable[[Labels], Labels]:
    """The labels along an axis, where they differ along no other."""
    return lambda x: x.movedim(axis, 0).flatten(1)[:, 0] if x.dim() > 1 else x


def narrowed(axis: int) -> Callable[[Labels], Labels]:
    return lambda x: x.narrow(axis, 0, 1)


def selected(axis: int) -> Callable[[Labels], Labels]:
    return lambda x: x.select(axis, 0)


def first_along(axis: int, shape: tuple[int, ...]) -> Callable[[Labels], Labels]:
    """Spreads the first labels along an axis over a new shape."""
    return lambda x: x.narrow(axis, 0, 1).expand(shape)


def values_of(labels: Labels) -> list[int]:
    """The different labels, without 0."""
    return [int(x) for x in np.unique(without_repeats(labels)[0].numpy()) if x]
