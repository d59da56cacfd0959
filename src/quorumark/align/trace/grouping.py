"""From atoms to groups: those that were joined move together; those that look alike can be permuted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quorumark.align.groups import Axis, Group, Groups, Slot
from quorumark.align.trace.atoms import Trace

__all__ = ["group_atoms"]


def group_atoms(trace: Trace) -> Groups:
    """The groups of a model: outer ones first, then heads, each with the groups within it."""
    classes: dict[int, dict[Axis, list[int]]] = defaultdict(lambda: defaultdict(list))
    for atom, (tensor, axis, index) in trace.indices.items():
        for name in trace.aliases[tensor]:
            classes[trace.atoms.root(atom)][name, axis].append(index)
    pinned = {trace.atoms.root(x) for x in trace.pinned}
    held = {trace.atoms.root(x) for x in trace.held_in_head}
    inside = {trace.atoms.root(x): trace.atoms.root(head) for x, head in trace.head_of.items()}
    children: dict[int, list[int]] = defaultdict(list)
    for atom, head in inside.items():
        if atom in classes:
            children[head].append(atom)
            if atom in pinned:
                pinned.add(head)

    used: dict[int, set[int]] = defaultdict(set)
    for atom, operations in trace.operations_of.items():
        used[trace.atoms.root(atom)] |= operations

    def kind(root: int) -> tuple[Any, ...]:
        """Channels look alike if they have as many indices on the same axes and went through the same operations."""
        sizes = sorted((axis, len(indices)) for axis, indices in classes[root].items())
        return tuple(sizes), frozenset(used[root])

    def together(head: int) -> dict[Axis, list[int]]:
        """All indices of a head, its channels in the order of their first indices."""
        merged: dict[Axis, list[int]] = defaultdict(list)
        for child in sorted(children[head], key=lambda c: sorted((a, sorted(i)) for a, i in classes[c].items())):
            for axis, indices in classes[child].items():
                merged[axis] += indices
        return {axis: sorted(indices) for axis, indices in merged.items()}

    alike: dict[Any, list[dict[Axis, list[int]]]] = defaultdict(list)
    for root, members in classes.items():
        if root not in inside and root not in pinned and root not in held:
            alike[kind(root)].append({a: sorted(i) for a, i in members.items()})
    tops = [members for members in alike.values() if len(members) > 1]
    merged_heads: dict[Any, list[int]] = defaultdict(list)
    for head in children:
        alone = head in pinned
        kinds = Counter(kind(child) for child in children[head])
        merged_heads[head if alone else frozenset(kinds.items())].append(head)
    groups = _in_order(_group(members, None) for members in tops)
    for heads in sorted(merged_heads.values(), key=lambda hs: sorted(together(hs[0]).items())):
        heads = sorted(heads, key=lambda h: sorted(together(h).items()))
        outer = _group([together(h) for h in heads], None) if len(heads) > 1 else None
        if outer is not None:
            groups.append(outer)
        number = len(groups) - 1
        for element, head in enumerate(heads):
            inner: dict[Any, list[dict[Axis, list[int]]]] = defaultdict(list)
            for child in children[head]:
                if child not in pinned and child not in held:
                    inner[kind(child)].append({a: sorted(i) for a, i in classes[child].items()})
            within = None if outer is None else (number, element)
            found = [_group(members, within) for members in inner.values() if len(members) > 1]
            repeats = _repeats(trace, head, [classes[c] for c in children[head]], within)
            groups += _in_order([*found, repeats])
    return Groups(tuple(groups))


def _in_order(groups: Iterable[Group | None]) -> list[Group]:
    return sorted((group for group in groups if group is not None), key=lambda group: group.slots)


def _repeats(
    trace: Trace, head: int, members: Sequence[Mapping[Axis, Sequence[int]]], within: tuple[int, int] | None
) -> Group | None:
    """The group of query heads that share a head of keys and values, or None."""
    count = sum(trace.atoms.root(h) == head for h in trace.heads.values())
    if count < 2:
        return None
    parts: list[dict[Axis, list[int]]] = [defaultdict(list) for _ in range(count)]
    for channel in members:
        # what is shared has as many indices under all its names: the bias of a key moves with its row
        shared = {len(indices) for axis, indices in channel.items() if axis in trace.shared_axes}
        for axis, indices in channel.items():
            if len(indices) in shared or len(indices) % count:
                continue
            size = len(indices) // count
            for r in range(count):
                parts[r][axis] += sorted(indices)[r * size : (r + 1) * size]
    return _group([{a: sorted(i) for a, i in part.items()} for part in parts], within) if parts[0] else None


def _group(members: list[dict[Axis, list[int]]], within: tuple[int, int] | None) -> Group | None:
    """The indices of n elements as slots: offset + i·stride + j·step. None if they are not that regular."""
    members = sorted(members, key=lambda m: sorted(m.items()))
    slots = []
    for tensor, axis in sorted(members[0]):
        indices = np.array([m[tensor, axis] for m in members], np.int64)
        first, start = indices[0], 0
        while start < first.size:
            stop = start + 1
            while stop < first.size and (
                stop == start + 1 or first[stop] - first[stop - 1] == first[start + 1] - first[start]
            ):
                stop += 1
            part = indices[:, start:stop]
            offset, stride = int(part[0, 0]), int(part[1, 0] - part[0, 0])
            step = int(part[0, 1] - part[0, 0]) if stop - start > 1 else 1
            slot = Slot(tensor, axis, offset, stride, stop - start, step)
            if not np.array_equal(slot.indices(len(members)), part):
                return None
            slots.append(slot)
            start = stop
    return Group(len(members), tuple(slots), within)
