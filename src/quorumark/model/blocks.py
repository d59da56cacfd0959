"""Blocks of coordinates, for the test by layers (docs/layers.md, "Blocks").

    rows/v1     carriers with fewer than j/2 coordinates are joined with those that follow them; then each carrier is
                cut along its rows into n/s blocks, rounded, of its n coordinates. j and s are the smallest of 8,192,
                16,384, … that give 64 blocks at most: first j, without cutting anything, then s ≥ j.

So the layers of a small or medium model are blocks by themselves, and large ones are cut further.

Cuts that somebody chooses when the key is known make an innocent model look marked. So a rule has a version, which the
first terms name for good, and blocks follow from it and the layout alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout

__all__ = ["MOST", "RULES", "SMALLEST", "Blocks", "blocks_of", "cut_blocks"]

RULES = ("rows/v1",)
SMALLEST = 8192
"""Coordinates that a block has at least, as far as tensors allow: below that, single blocks are no broad queries."""
MOST = 64
"""Blocks at most: each is an equation in the key."""


@dataclass(frozen=True)
class Blocks:
    """Block b has the coordinates edges[b] … edges[b+1]−1 of the key; `names` says in words which weights those are."""

    edges: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def spans(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.edges[:-1], self.edges[1:], strict=True))

    def of(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """How coordinates start … stop−1 fall into blocks: (block, from, to), in order."""
        first = int(np.searchsorted(self.edges, start, "right")) - 1
        last = int(np.searchsorted(self.edges, stop, "left"))
        return [(b, max(start, self.edges[b]), min(stop, self.edges[b + 1])) for b in range(first, last)]


def blocks_of(layout: ModelLayout, rule: str = RULES[0]) -> Blocks:
    """The blocks of a layout by a rule's name; one block for a model that is too small for more."""
    if rule not in RULES:
        raise InputError("the rule for blocks", f"must be one of {', '.join(RULES)}", repr(rule))
    carriers = _carriers(layout)
    join = _smallest(SMALLEST, lambda size: _cut(carriers, size, layout.coordinates).count)
    return _cut(carriers, join, _smallest(join, lambda size: _cut(carriers, join, size).count))


def cut_blocks(layout: ModelLayout, join: int, size: int) -> Blocks:
    """Blocks of about `size` coordinates, whatever their number: for measurements beside the rules."""
    return _cut(_carriers(layout), join, size)


def _smallest(size: int, blocks: Callable[[int], int]) -> int:
    """The first of size, 2·size, 4·size, … that gives few enough blocks."""
    while blocks(size) > MOST:
        size *= 2
    return size


def _carriers(layout: ModelLayout) -> list[tuple[str, NDArray[np.int64]]]:
    """Each carrier with the coordinates at which its rows begin, and the one after its last; those that carry some."""
    carrying, found = layout.carrying(), []
    for spec, place in layout.spans("carrier"):
        rows = spec.shape[0] if spec.size else 0
        weights = place.start + (spec.size // max(rows, 1)) * np.arange(rows + 1, dtype=np.int64)
        places = weights if isinstance(carrying, slice) else np.searchsorted(carrying, weights).astype(np.int64)
        if places[-1] > places[0]:
            found.append((spec.name, places))
    return found


def _cut(carriers: Sequence[tuple[str, NDArray[np.int64]]], join: int, size: int) -> Blocks:
    """Blocks of about `size` coordinates, small carriers joined to `join` or so."""
    ends: list[tuple[int, str]] = []
    joined: list[str] = []  # small carriers that wait for what follows
    begin = 0
    for name, places in carriers:
        joined.append(name)
        stop, rows = int(places[-1]), places.size - 1
        if 2 * (stop - begin) < join:
            continue
        parts = min(rows, max(1, (2 * (stop - begin) + size) // (2 * size)))
        cuts = [rows * k // parts for k in range(parts + 1)]
        for low, high in itertools.pairwise(cuts):
            whole = f"{joined[0]} to {name}" if low == 0 and len(joined) > 1 else name
            ends.append((int(places[high]), whole if parts == 1 else f"{whole}, rows {low}–{high - 1}"))
        begin, joined = stop, []
    if joined:  # what is left at the end goes to the last block
        last = f"{ends.pop()[1]}, {joined[-1]}" if ends else f"{joined[0]} to {joined[-1]}"
        ends.append((int(carriers[-1][1][-1]), last))
    kept = [(end, name) for i, (end, name) in enumerate(ends) if end > (ends[i - 1][0] if i else 0)]
    return Blocks((0, *(end for end, _ in kept)), tuple(name for _, name in kept))
