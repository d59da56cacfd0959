"""Consortia of every way in which a round may go: of all members or of some who are drawn, with a server optimiser or
without one, sums checked. What attacks one of them attacks all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.node.consent import give_consent
from quorumark.node.journal import Journal
from tests.kit.drawn import Drawn
from tests.kit.flowers import Consortium
from tests.kit.states import Tuned, key_of

WAYS: dict[str, dict[str, str]] = {
    "plain": {},
    "cohort": {"cohort": "5"},
    "fedadam": {"optimiser": "fedadam:eta=0.01"},
    "cohort, fedadam": {"cohort": "5", "optimiser": "fedadam:eta=0.01"},
}


def ways(*quick: str, of: Any = WAYS) -> list[Any]:
    """For `parametrize`: all of these, of which only some are quick enough for every change."""
    return [way if way in quick else pytest.param(way, marks=pytest.mark.slow) for way in of]


def of_way(folder: Path, way: str, **changes: Any) -> Consortium:
    """Five members of a round: five altogether, or drawn from eight; t = 3."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = {"sums": "checked", **WAYS[way]}
    if "cohort" in policy:
        return Consortium.deal(folder, 8, 3, policy=policy, **changes)
    return Consortium.make(folder, policy=policy, **changes)


def cached(folder: Path, **changes: Any) -> Callable[[str, Path], Consortium]:
    """Copies of them, each made once."""
    known: dict[str, Consortium] = {}

    def find(way: str, target: Path) -> Consortium:
        if way not in known:
            known[way] = of_way(folder / way.replace(", ", "-"), way, **changes)
        return known[way].copy(target)

    return find


class Attacked(Drawn, Tuned):
    """A run whose server asks those who are drawn, and sets their learning rate."""


def marked_at(run: Attacked) -> Any:
    """Which weights have a mark in the next round from the state that the server is at: an optimiser leaves some
    without one."""
    marked = run.server.history.amplitudes().vector > 0
    assert marked.mean() > 0.5
    return marked


def right_signs(world: Consortium, estimate: Any, marked: Any) -> float:
    """The share of the signs of these weights that an estimate has right. Where it says nothing a coin is thrown."""
    coin = np.random.default_rng(3).choice([-1, 1], estimate.size)
    return float(np.mean((np.where(estimate == 0, coin, np.sign(estimate)) == key_of(world))[marked]))


def guessed(world: Consortium) -> float:
    """Four standard deviations of the share that a guess gets right, of half of the carriers."""
    return float(4 * 0.5 / np.sqrt(world.layout.carrier_size / 2))


def consent(world: Consortium, *, here: bool = False) -> None:
    """All operators consent to another run from the anchor, or to another sum from the last model; who never took part
    has nothing to consent to."""
    for x in range(1, world.count + 1):
        home, unlock = world.home(x)
        place = home.only_consortium()
        if (place.path / "rounds/anchor.npy").exists():
            give_consent(Journal(place, home.identity(unlock)), here=here)
