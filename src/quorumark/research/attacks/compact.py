"""What an examiner does about channels that an attacker added: what does nothing is taken out (docs/layers.md).

Channels that compute the same are joined, with the sum of what reads them, and those that nobody reads are dropped,
until neither is left. The function stays, and anybody can check that it does: so the smaller model is the suspect.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quorumark.align.groups import Group
from quorumark.research.attacks.base import Target, Weights
from quorumark.research.attacks.symmetry import _reads, _resizable, _taken

__all__ = ["compacted"]

_PASSES = 64


def compacted(target: Target) -> tuple[Weights, int]:
    """The target's model without channels that are there twice or that nothing reads; and how many those were."""
    gone = 0
    for _ in range(_PASSES):
        weights, found = target.copied(), 0
        for group in _resizable(target):
            found = _compact(target, weights, group)
            if found:
                break  # the other groups' places are as they were before
        if not found:
            break
        gone, target = gone + found, target.with_weights(weights)
    return dict(target.weights), gone


def _compact(target: Target, weights: Weights, group: Group) -> int:
    """Joins and drops channels of one group; how many."""
    module = target.module()
    writes = {axis: places for axis, places in group.axes().items() if not _reads(target, module, axis)}
    reads = {axis: places for axis, places in group.axes().items() if axis not in writes}
    if not writes or not reads:
        return 0
    first: dict[bytes, int] = {}
    for element in range(group.size):
        same = b"".join(_part(weights, axis, places[element]).tobytes() for axis, places in writes.items())
        kept = first.setdefault(same, element)
        if kept != element:
            for (name, a), places in reads.items():
                w = weights[name].movedim(a, 0)
                w[places[kept]] += w[places[element]]
    keep = [
        element
        for element in sorted(first.values())
        if any(_part(weights, axis, places[element]).any() for axis, places in reads.items())
    ]
    if not keep or len(keep) == group.size:
        return 0
    _taken(weights, group, np.array(keep))
    return group.size - len(keep)


def _part(weights: Weights, axis: tuple[str, int], places: Any) -> np.ndarray[Any, Any]:
    name, a = axis
    return np.ascontiguousarray(weights[name].movedim(a, 0)[places].detach().cpu().numpy())
