"""Runs whose states are repeated, lost and amended."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quorumark import field
from quorumark.node.journal import create_lost_memory
from quorumark.research.known import KnownKey
from quorumark.setup.amend import propose
from quorumark.setup.amend import sign as sign_amendment
from quorumark.verify.reference import Reference
from tests.kit.flowers import Consortium, Model, train
from tests.kit.opened import summed
from tests.kit.rounds import Repeating, Run

CHECKED = {"sums": "checked"}


def small_model() -> Model:
    rng = np.random.default_rng(1)
    return {"a.weight": rng.standard_normal((8, 6)).astype(np.float32), "steps": np.array(7)}


def small(folder: Path, count: int, threshold: int, **changes: Any) -> Consortium:
    """A consortium with a model that is quick to train, for questions of who may do what."""
    folder.mkdir(parents=True, exist_ok=True)
    make = Consortium.make if count >= 2 * threshold - 1 and count < 10 else Consortium.deal
    return make(folder, count, threshold, model=small_model(), policy=CHECKED, **changes)


def with_cohorts(
    folder: Path, count: int, threshold: int, cohort: int, sums: str = "unchecked", **policy: str
) -> Consortium:
    """The same, with so many members drawn from each state."""
    folder.mkdir(parents=True, exist_ok=True)
    policy |= {"cohort": str(cohort), "sums": sums}
    return Consortium.deal(folder, count, threshold, model=small_model(), policy=policy)


def key_of(world: Consortium) -> Any:
    """What nobody has: the signs of all carriers."""
    assert world.manifest is not None
    shares = {x: world.home(x)[0].only_consortium().share(world.home(x)[1]).vector() for x in range(1, world.count + 1)}
    known = KnownKey.from_shares(world.manifest, shares, world.layout, Reference.read(world.path).anchor)
    return known.key[: world.layout.carrier_size]


def carriers(world: Consortium, summed_models: Any) -> Any:
    """The carriers of a sum of models, or of a model, as real numbers."""
    encodes = isinstance(summed_models, dict)
    vector = world.layout.encode(summed_models) if encodes else summed_models
    return field.to_signed(vector[: world.layout.carrier_size]) / 2.0**40


def share_of_signs(world: Consortium, estimate: Any) -> float:
    """How many signs an estimate gets right; where it says nothing, a coin is thrown."""
    coin = np.random.default_rng(3).choice([-1, 1], estimate.size)
    return float(np.mean(np.where(estimate == 0, coin, np.sign(estimate)) == key_of(world)))


# --- servers that try to open a second sum ----------------------------------------------------------------


class Tuned(Repeating):
    """An app whose learning rate the server sets, by its run config say; training repeats itself, or is new noise."""

    rate = 1.0
    rng: np.random.Generator | None = None

    def trained(self, x: int, model: Model, reply: dict[str, Any]) -> Model:
        if self.rng is not None:
            return train(model, 0.01, int(self.rng.integers(1 << 62)), self.rate)
        return super().trained(x, model, {**reply, "rate": self.rate})


def begun(run: Run, rounds: int = 2) -> Model:
    """A run up to the first state with a mark."""
    for _ in range(rounds):
        model = run.round()
    return model


def opened_at(run: Run, start: Model, **how: Any) -> Any:
    """A round from a model that is opened and kept back: the server goes on as if it had been given up."""
    run.model = start
    run.round(**how)
    found = carriers(run.world, summed(run.server))
    forget(run, start)
    return found


def forget(run: Run, start: Model) -> None:
    """The server acts as if the last sum had never been asked for."""
    server = run.server
    server._settled = server._opened = server._open = server._sum = None
    run.model = start


# --- memory that was lost ---------------------------------------------------------------------------------


def lose_memory(world: Consortium, x: int) -> None:
    """As after a restored backup: the rounds' folder is not in it."""
    home, unlock = world.home(x)
    place = home.only_consortium()
    shutil.rmtree(place.path / "rounds")
    create_lost_memory(place, home.identity(unlock))


# --- amendments -------------------------------------------------------------------------------------------


def amend(world: Consortium, folder: Path, **changes: Any) -> Consortium:
    """All members sign other terms, which are in force at once."""
    assert world.manifest is not None
    terms = propose(world.manifest.terms, **changes)
    manifest = None
    for _ in range(2):
        for x in range(1, world.count + 1):
            home, unlock = world.home(x)
            manifest = sign_amendment(home, unlock, terms, folder, home.only_consortium()).manifest
    assert manifest is not None
    return replace(world, manifest=manifest, terms=terms)
