"""A small consortium that trains in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.consortium.records import anchor_of, roster_of
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.round.amplitudes import Amplitudes
from quorumark.setup.inprocess import make_key
from quorumark.simulation import Federation, FederationMember
from tests.kit.ceremony import identities, make_terms
from tests.kit.opened import summed

Model = dict[str, NDArray[Any]]
SHAPES = {"a.weight": (24, 30), "a.bias": (24,), "b.weight": (9, 24), "c.weight": (12, 5, 3, 3)}
CARRIERS = ("a.weight", "b.weight", "c.weight")


def initial() -> Model:
    rng = np.random.default_rng(5)
    model: Model = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {**model, "steps": np.array(7, np.int64)}


def train(model: Model, data: float, seed: int) -> Model:
    """A step that differs between members and rounds, and moves every weight."""
    rng = np.random.default_rng(seed)
    moved = {k: v + np.float32(data) * rng.standard_normal(v.shape).astype(np.float32) for k, v in model.items()}
    return {**moved, "steps": model["steps"]}


class World:
    """A small consortium; its members can be made again for every run."""

    def __init__(self, count: int = 5, threshold: int = 3, **changes: Any) -> None:
        self.people = identities(count)
        self.model = changes.pop("model_of", None) or initial()
        self.layout = ModelLayout.of(self.model, max_coordinates=changes.pop("max_coordinates", None))
        anchor = anchor_of(self.layout, self.model)
        plain = {"rho": "0.05", "c_max": "0.03", "dither": "0"}  # exact sums; test_dither.py has those with noise
        policy = {"sums": "unchecked"}  # test_sums.py has those that are checked
        counts = changes.pop("examples", None) or [100 * x for x in range(1, count + 1)]
        roster = roster_of((p.card(), n) for p, n in zip(self.people, counts, strict=True))
        settings = {
            "roster": roster,
            "layout": self.layout.digest(),
            "anchor": anchor,
            "strength": plain,
            "policy": policy,
            **changes,
        }
        terms = make_terms(self.people, threshold, self.layout.coordinates, **settings)
        self.manifest, self.shares = make_key(self.people, terms)

    def key(self) -> NDArray[np.int64]:
        t = self.manifest.terms.threshold
        return field.to_signed(shamir.reconstruct({x: self.shares[x] for x in range(1, t + 1)}, t))

    def members(self, training: Callable[..., Any] = train, **options: Any) -> dict[int, FederationMember]:
        return {
            x: FederationMember(person, self.manifest, self.layout, training, 0.01 * x, self.shares[x], **options)
            for x, person in enumerate(self.people, 1)
        }

    def federation(self, **options: Any) -> Federation:
        mark = options.pop("mark", True)
        members = options.pop("members", None) or self.members(mark=mark)
        return Federation(self.manifest, self.layout, self.model, members, **{"seed": 3, **options})


def consent(run: Federation) -> None:
    """All operators let their members go on from the present model."""
    for member in run.members.values():
        with member.secagg.state.edit() as memory:
            memory["consents"][member.state.hex()] = True


def vector(run: Federation) -> NDArray[Any]:
    """The global model."""
    return run.layout.flatten(run.model)


def opened_sums(run: Federation) -> list[tuple[Vector, Amplitudes | None]]:
    """Fills with the sums of models that the server opens from now on, as E, and what is embedded in them."""
    seen: list[tuple[Vector, Amplitudes | None]] = []
    honest = run.server.finish

    def spy() -> Any:
        weights = honest()
        seen.append((summed(run.server), run.server.settled.embedded))
        return weights

    run.server.finish = spy  # type: ignore[method-assign]
    return seen


def rounding(run: Federation, members: int) -> NDArray[np.float64]:
    """How far a sum of so many members may be from FedAvg, for each weight: K/2 units and float64's."""
    out = np.zeros(run.layout.size)
    for place, shift in run.history.mark.spans():
        out[place] = members * (2.0 ** (shift - 41) + 2.0**-50)
    return out


def average(world: World, run: Federation, points: tuple[int, ...]) -> NDArray[np.float64]:
    """Plain FedAvg in float64, by another way: the same local results of the next round, weighted by examples."""
    counts = {x: world.manifest.terms.member(x).examples for x in points}
    total = sum(counts.values())
    out = np.zeros(world.layout.size)
    before = run.model
    for x in points:
        seed = run._seed_for(x)
        assert seed is not None
        out += counts[x] / total * world.layout.flatten(train(before, 0.01 * x, seed)).astype(np.float64)
    return out
