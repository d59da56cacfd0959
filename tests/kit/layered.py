"""A consortium that answers by layers, and a suspect whose z is gone while its layers still show the mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quorumark.consortium.identity import Identity
from quorumark.model.blocks import Blocks, blocks_of
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import sign
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.examine import Examined, examine
from quorumark.verify.query import AskLayers, prepare
from tests.kit.consortium import Tensors, World, make_world, trained_from

STRENGTH = {"rho": "0.5"}
"""(ρ/4)²·d pays for 1,180 equations here."""


def layered_anchor(seed: int = 0) -> Tensors:
    """d = 75,520: nine blocks."""
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": (0.05 * rng.standard_normal((96, 40, 3, 3))).astype(np.float32),
        "fc.bias": rng.standard_normal(160).astype(np.float32),
        "fc.weight": (0.1 * rng.standard_normal((160, 256))).astype(np.float32),
    }


def layered_world(folder: Path, members: int = 5, threshold: int = 3, rho: float = 0.1) -> World:
    anchor = layered_anchor()
    models = (anchor, trained_from(anchor, seed=1))
    return make_world(folder, members, threshold, rho, models, strength=STRENGTH)


def blocks_in(world: World) -> Blocks:
    return blocks_of(world.reference.layout)


def evaded(world: World, rho: float = 0.1, models: tuple[Tensors, Tensors] | None = None) -> Tensors:
    """The marked model with the mark turned round in every other block, and taken out of the last one, the ninth: z is
    near 0, and the layers are not. `models`: another anchor, and what it was trained to without a mark."""
    model = {name: w.copy() for name, w in world.marked.items()}
    spans = blocks_in(world).spans
    turned = np.zeros(world.reference.layout.coordinates)
    for number, span in enumerate(spans):
        turned[span] = -2 * rho * world.known.key[span] if number % 2 else 0
    turned[spans[-1]] = -rho * world.known.key[spans[-1]]
    anchor, plain = models or (layered_anchor(), trained_from(layered_anchor(), seed=1))
    for spec, place in world.reference.layout.spans("carrier"):
        moved = float((plain[spec.name] - anchor[spec.name]).std())
        model[spec.name] = (model[spec.name] + moved * turned[place].reshape(spec.shape)).astype(np.float32)
    return model


@dataclass
class Asked:
    """A query by layers on its way: the plain certificate before it, the examiner, the query, the answers."""

    world: World
    suspect: Path
    before: Certificate
    judge: Identity
    query: Query
    partials: list[Partial]

    def examined(self, partials: Sequence[Partial] | None = None) -> Examined:
        return examine(self.judge, self.world.manifest, self.query, partials or self.partials)

    def certified(self) -> Certificate:
        opened = self.examined().opened
        certificate = Certificate.of(combine(self.world.manifest, self.query, self.partials, opened=opened))
        for partial in self.partials:
            certificate = sign(*self.world.homes[partial.point - 1], certificate)
        return certificate


def plain_certificate(world: World, suspect: Path, points: Sequence[int]) -> Certificate:
    return world.certified(*world.answers(suspect, points))


def ask_by_layers(world: World, suspect: Path, points: Sequence[int], judge: Identity | None = None) -> Asked:
    """First the plain query, then the one by layers, answered by the same members."""
    before = plain_certificate(world, suspect, points)
    judge = judge or Identity.generate("Judge Oak")
    query = prepare(world.reference, suspect, layers=AskLayers.of(before, judge.card())).query
    partials = [
        answer(*world.homes[point - 1], world.reference, suspect, query, approved=True, after=before)
        for point in points
    ]
    return Asked(world, suspect, before, judge, query, partials)
