"""A run that goes on from the members' last model: what one member says about it, true or false, does not decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.errors import RoundError
from quorumark.round.server import RoundServer
from quorumark.round.survey import HANDED_OUT, Where, candidates
from tests.kit.flowers import Consortium
from tests.kit.refusals import stopped
from tests.kit.rounds import Run

CHECKED = {"sums": "checked"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    """Three rounds are accepted; the members' disks have the model after two of them."""
    rng = np.random.default_rng(1)
    model = {"a.weight": rng.standard_normal((8, 6)).astype(np.float32), "steps": np.array(7)}
    world = Consortium.make(tmp_path_factory.mktemp("survey"), model=model, policy=CHECKED)
    run = Run(world)
    for _ in range(3):
        run.round()
    return world


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    return made.copy(tmp_path / "world")


@pytest.fixture(scope="module")
def made_up(made: Consortium, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A state that fits together, two rounds later, which nobody but its inventor has seen."""
    run = going_on(made.copy(tmp_path_factory.mktemp("elsewhere") / "world"))
    for _ in range(3):
        run.round()
    return run.ask("state", {"of-state": run.server.history.state.hex(), "with-model": True})[5]


class Lied(Run):
    """Member 5 says something else about where it is."""

    lie: dict[str, Any] | None = None

    def ask(self, stage: str, config: dict[str, Any], /, **more: Any) -> dict[int, dict[str, Any]]:
        said = super().ask(stage, config, **more)
        if stage == "state" and self.lie is not None:
            said[5] = {**said[5], **self.lie}
        return said


def going_on(world: Consortium, lie: dict[str, Any] | None = None) -> Lied:
    run = Lied(world, run="2")
    run.lie = lie
    run.server.survey(run.ask, go_on=True)
    run.model = dict(run.server.resumed or world.model)
    return run


def test_a_run_goes_on_from_the_newest_state_that_t_members_name(world: Consortium, made_up: dict[str, Any]) -> None:
    run = going_on(world, made_up)
    assert run.server.history.mark.round == 2
    run.round()
    assert not run.refused
    assert run.server.members == (1, 2, 3, 4, 5)


def test_with_one_member_s_word_a_liar_stops_the_run(
    world: Consortium, made_up: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the newest state that anybody names."""
    monkeypatch.setattr(RoundServer, "names_needed", 1)
    run = going_on(world, made_up)
    assert run.server.history.mark.round > 2
    with pytest.raises(RoundError):
        run.round()


LIES: dict[str, dict[str, Any]] = {
    "a text": {"accepted": "9"},
    "nothing": {"accepted": None},
    "true": {"accepted": True},
    "below 0": {"accepted": -1},
    "a fraction": {"round": 1.5},
    "no list": {"over": "{"},
    "names": {"over": '["a"]'},
    "very deep": {"over": "[" * 100_000},
    "no arrays": {"accepted": 9, "arrays": {}},
    "odd arrays": {"accepted": 9, "arrays": {"state": "text"}},
    "another sum": {"sum-tag": 1},
    "an odd sum": {"sum-tag": b"1"},
    "far ahead": {"accepted": (1 << 53) - 1},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_member_that_says_odd_things_costs_nothing(world: Consortium, lie: str) -> None:
    run = going_on(world, LIES[lie])
    assert run.server.history.mark.round == 2
    run.round()
    assert run.refused == {}


def test_too_few_at_one_model_are_told_apart(world: Consortium, made_up: dict[str, Any]) -> None:
    """Two members are at the last model, the others are not there: nothing is chosen, and the error says what to do."""
    run = Lied(world, run="2")
    run.gone = (1, 2)
    run.lie = made_up
    with stopped("round.no-common-model"):
        run.server.survey(run.ask, go_on=True)
    assert run.server.resumed is None
    run.gone, run.lie = (), None
    run.server.survey(run.ask, go_on=True)
    assert run.server.resumed is not None


def test_members_that_never_took_part_do_not_hold_the_others_back() -> None:
    there: dict[str, Any] = {"accepted": 4, "arrays": {}, **{f"sum-{name}": 0 for name in HANDED_OUT}}
    later = {**there, "accepted": 5}
    assert candidates([there] * 3 + [{"accepted": 0}] * 7, 0, 3) == [there]
    assert candidates([there] * 3 + [later] * 3, 0, 3) == [later, there]
    assert candidates([there] * 3 + [later] * 2, 0, 3) == [there]
    assert candidates([{"accepted": 0}] * 3 + [later] * 2, 0, 3) == []
    assert candidates([later] * 2 + [{"accepted": 4}] * 3, 4, 3) == []
    with pytest.raises(RoundError):
        candidates([there] * 2 + [later] * 2 + [{"accepted": 0}] * 2, 0, 3)
    assert Where.of({"over": json.dumps([1, 2]), "answered": 3}) == Where(answered=3, over=(1, 2))
