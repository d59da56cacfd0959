"""Alignment: a suspect's channels are brought into the anchor's order (docs/alignment.md).

1. A residual stream that was rotated is rotated back (`quorumark.align.rotation`).
2. Channels, heads and neurons are matched to the anchor's, with their signs (`quorumark.align.matching`).
3. Channels that were mixed with each other are restored (`quorumark.align.restoring`).

The suspect is matched to the anchor only. The released model contains the key: a match to it picks, among the
permutations of an innocent model, one that correlates with the key, and then z is no longer standard normal (up to 9
was seen).

What this does not undo: docs/alignment.md, "Limits".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from quorumark.align.alignment import Alignment
from quorumark.align.arrays import read
from quorumark.align.features import compared_weights, is_vector, negative_gains
from quorumark.align.groups import Groups
from quorumark.align.matching import match
from quorumark.align.placement import GROWTH
from quorumark.align.restoring import restored_tensors
from quorumark.align.rotation import find_rotation
from quorumark.align.stream import Trimmed
from quorumark.errors import InconclusiveError
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import Model

__all__ = ["align"]


def align(
    suspect: Model,
    anchor: Model,
    layout: ModelLayout,
    groups: Groups,
    names: Mapping[str, str] | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> Alignment:
    """Aligns a suspect to the anchor.

    `names` maps tensors of the layout to the suspect's names for them; tensors without an entry are missing from the
    suspect. All tensors of two dimensions or more are compared, embeddings included. Raises an InconclusiveError if the
    suspect's sizes fit no number of channels.
    """
    groups.check(layout)
    specs = {s.name: s for s in layout.tensors if s.role in ("carrier", "plain") and not is_vector(s.shape) and s.size}
    specs = {name: spec for name, spec in specs.items() if len(spec.shape) >= 2}
    if names is not None:
        specs = {name: spec for name, spec in specs.items() if name in names}
    shapes = {spec.name: spec.shape for spec in layout.tensors}
    rotation, words, widest = None, {}, 0
    if groups.stream is not None:
        widest = GROWTH * groups.stream.size
        words = {n: (axis, shapes[n][axis]) for n, axis in groups.words().items() if n in specs}
        suspect = Trimmed(suspect, words, names, widest)
        rotation = find_rotation(suspect, anchor, groups, groups.stream, shapes, specs, names, progress)
    if rotation is not None:
        suspect, names = rotation.model(suspect, names), None
    blocks = groups.blocks()
    mixed = {tensor for tensor, _ in blocks} & specs.keys()
    used = sorted(({slot.tensor for group in groups.groups for slot in group.slots} | mixed) & specs.keys())
    if not used:
        raise InconclusiveError("the suspect has no tensor that could be aligned: try without --align")
    ours, theirs = compared_weights(suspect, anchor, {name: specs[name] for name in used}, names, progress)
    gains = negative_gains(suspect, anchor, groups, shapes, names)
    free = (
        {} if rotation is None or groups.stream is None else dict.fromkeys(groups.stream.axes(), groups.stream.size**2)
    )
    found = match(groups, shapes, ours, theirs, gains, progress, free)
    matched = found.model(suspect, names)
    unmixed, count = {}, 0
    for each in restored_tensors(groups, mixed, matched.tensor, partial(read, anchor)):
        if progress is not None:
            progress(each.name)
        unmixed[each.name] = each.values
        count += each.blocks
    return dataclasses.replace(found, unmixed=unmixed, blocks=count, rotation=rotation, words=words, widest=widest)
