"""What a member keeps of its training: one sealed file for each round, from before it says that it is ready until that
round can no longer be asked for. Members are killed at every step in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.errors import RoundError
from quorumark.node.journal import MODEL, Journal
from quorumark.node.marked import MarkedModels
from quorumark.node.member import RESULT, with_prefix
from quorumark.round.member import RoundMember
from tests.kit.flowers import Consortium, Model
from tests.kit.refusals import stopped
from tests.kit.rounds import Repeating

CHECKED = {"sums": "checked"}


class Killed(BaseException):
    """The process ends here: nothing after it happens, and nobody handles it."""


STEPS: dict[str, tuple[type, str]] = {
    "before the result is written": (Journal, "keep_result"),
    "between the result and *ready*": (RoundMember, "ready"),
    "after *ready*": (Journal, "drop_results"),
    "after older results are removed": (MarkedModels, "note"),
    "before it is noted": (Journal, "note"),
}


def kill_at(patch: pytest.MonkeyPatch, step: str) -> None:
    def dies(*_: Any, **__: Any) -> Any:
        raise Killed

    patch.setattr(*STEPS[step], dies)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return Consortium.make(tmp_path_factory.mktemp("results"), policy=CHECKED)


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    return made.copy(tmp_path / "world")


def kept(world: Consortium, x: int) -> set[str]:
    return {path.name for path in world.home(x)[0].only_consortium().path.glob("rounds/result-*.sealed")}


class Killing(Repeating):
    """Member 5 is killed where the test says when it should get ready in round `when`."""

    when = 0
    step = ""
    killed = 0

    def join_one(self, x: int, offer: dict[str, Any], told: dict[str, Any]) -> None:
        if (x, self.server.round_no) != (5, self.when):
            super().join_one(x, offer, told)
            return
        reply, computed = self.node(x).handle("join", offer, told)
        model = with_prefix(computed, MODEL)
        about = {**offer, "examples": 105, "joined": reply["joined"]}
        result = {RESULT + name: tensor for name, tensor in self.trained(x, model, reply).items()}
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, self.step)
            with pytest.raises(Killed):
                self.node(x).handle("ready", about, result)
        self.killed += 1


@pytest.fixture(scope="module")
def without_5(made: Consortium, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The model of a run in which member 5 is absent in round 2."""
    run = Repeating(made.copy(tmp_path_factory.mktemp("absent") / "world"))
    for number in (1, 2, 3):
        model = run.round(absent=[5] if number == 2 else [])
    return model


@pytest.mark.parametrize("step", STEPS)
def test_a_member_that_is_killed_while_it_gets_ready_is_back_in_the_next_round(
    world: Consortium, without_5: Model, step: str
) -> None:
    """It costs its part in that round, and nothing else."""
    run = Killing(world)
    run.when, run.step = 2, step
    for number in (1, 2, 3):
        model = run.round()
        assert run.refused == {}
        assert run.server.members == ((1, 2, 3, 4) if number == 2 else (1, 2, 3, 4, 5))
        assert kept(world, 1) == {f"result-{number}.sealed"}  # only what may be asked for again
    assert run.killed == 1
    assert kept(world, 5) == {"result-3.sealed"}
    assert all(np.array_equal(model[name], without_5[name]) for name in model)


def open_and_forget(run: Repeating) -> Any:
    """A round whose sum opens without member 5's answer, at a server that then loses all its files."""
    start = dict(run.model)
    run.round(silent=[5])
    opened = run.server.opened.copy()
    run.model = start
    return opened


def one_file(patch: pytest.MonkeyPatch) -> None:
    """As if a member kept the result of its last round only."""
    path: Callable[[Journal, int], Path] = lambda journal, _: journal._folder / "result-0.sealed"  # noqa: E731
    patch.setattr(Journal, "_result_path", path)


@pytest.mark.parametrize("files", ["one for each round", "one for all rounds"])
def test_a_sum_can_be_made_again_after_a_member_was_killed_in_a_later_try(
    world: Consortium, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    """All have uploaded in round 3, four have answered, and the server has lost its files. It tries another round from
    the same model, in which member 5 is killed after its new result is on disk. Then all five must make the sum of
    round 3 again, and member 5 needs what it trained for that one."""
    if files == "one for all rounds":
        one_file(monkeypatch)
    run = Killing(world)
    for _ in range(2):
        run.round()
    opened = open_and_forget(run)
    again = Killing(world, run="2", after=run.server.round_no)
    again.server.survey(again.ask, go_on=True)
    again.model = dict(again.server.resumed or {})
    again.server._past.answered.clear()  # a server that does not know yet, or does not say, that four have answered
    again.when, again.step = 4, "between the result and *ready*"
    with pytest.raises(RoundError):
        again.round()
    assert again.killed == 1
    if files == "one for all rounds":
        with stopped("round.repeat-waits", names="'Hospital 5'"):
            again.round()
        assert again.refused[5] == "round.not-trained"
        return
    assert kept(world, 5) == {"result-3.sealed", "result-4.sealed"}
    again.round()
    assert again.refused == {}
    assert np.array_equal(again.server.opened[:-1], opened[:-1])  # the tag is under another key
    assert kept(world, 5) == {"result-3.sealed"}
    again.round()
    assert again.refused == {}
    assert kept(world, 5) == {"result-6.sealed"}


def test_who_is_ready_for_a_later_round_has_left_the_one_before(world: Consortium) -> None:
    """Why the older result may go then: no message makes a member upload it again."""
    run = Repeating(world)
    for _ in range(2):
        run.round()
    open_and_forget(run)
    later = Repeating(world, run="2", after=run.server.round_no)
    later.server.survey(later.ask, go_on=True)
    later.model = dict(later.server.resumed or {})
    later.server._past.answered.clear()
    offer, told = later.offer()
    later.join_one(5, offer, told)
    assert later.refused == {}
    assert kept(world, 5) == {"result-4.sealed"}
    later.server.take_answered(1, 3, (1, 2, 3, 4, 5))
    with pytest.raises(RoundError):
        later.round()
    assert later.refused[5] == "round.other-repeat"
