"""Ways to a second opened sum from one state, and to a run that stands still, that a review of the rounds found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.canonical import canonical
from quorumark.errors import QuorumarkError, RoundError
from quorumark.node.journal import Journal
from quorumark.node.member import RESULT
from quorumark.round import statements
from quorumark.round.history import History
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.statements import Turn
from tests.kit.flowers import Consortium, Model
from tests.kit.opened import summed
from tests.kit.refusals import stopped
from tests.kit.rounds import Run
from tests.kit.states import Tuned, amend, begun, carriers, forget, lose_memory, opened_at, small, small_model
from tests.kit.ways import Attacked, cached, marked_at, right_signs, ways


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return small(tmp_path_factory.mktemp("review"), 5, 3)


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    return made.copy(tmp_path / "world")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Consortium]:
    """Consortia of each way in which a round may go."""
    return cached(tmp_path_factory.mktemp("ways"), model=small_model())


FEW = pytest.mark.parametrize("way", ways("plain", "cohort, fedadam"))
MOST = pytest.mark.parametrize("way", ways("plain"))


def second_sum(run: Run, start: Model, first: Any, **how: Any) -> Any:
    """What another opened sum from the same state is more than the first; None if there is none."""
    try:
        found = opened_at(run, start, **how)
    except QuorumarkError:
        return None
    return found - first


# --- two different sums from one state --------------------------------------------------------------------


def halved_when_made_again(run: Tuned) -> Any:
    """A server sets a learning rate of 0, and all members say that the mark is too strong, however often it is halved.
    Then it opens a sum with the whole mark, and lets it be made again from the same results with none."""
    start = begun(run)
    run.rate = 0.0
    with stopped("round.too-strong"):
        run.round()
    forget(run, start)
    past = run.server._current_past()
    assert past.halvings == statements.HALVINGS
    run.rate, past.halvings = 1.0, 0
    first = opened_at(run, start)
    past.halvings = statements.HALVINGS
    run.server.take_answered(past.cohort[0], run.server.round_no, past.cohort)
    advance = run.server.advance

    def lying(model: Model) -> Turn:
        turn = replace(advance(model), halvings=statements.HALVINGS)
        run.server._turn, run.server._amplitudes = turn, run.server.history.amplitudes(statements.HALVINGS)
        return turn

    run.server.advance = lying  # type: ignore[method-assign,assignment]
    return second_sum(run, start, first)


@FEW
def test_a_sum_that_is_made_again_has_the_same_mark(every: Any, tmp_path: Path, way: str) -> None:
    run = Attacked(every(way, tmp_path / "world"))
    gained = halved_when_made_again(run)
    assert gained is None, right_signs(run.world, -gained, marked_at(run))
    assert set(run.refused) == set(run.server.cohort)


@FEW
def test_without_that_rule_the_difference_is_the_key(
    every: Any, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SecAggMember, "_repeated", lambda _, memory, *__: memory["sent"]["model"]["members"])
    run = Attacked(every(way, tmp_path / "world"))
    gained = halved_when_made_again(run)
    assert right_signs(run.world, -gained, marked_at(run)) == 1.0


def new_for_one(run: Tuned) -> tuple[Any, Model]:
    """All but the last one have answered. They make the sum again, and that one is told that it is a new one: it
    trains. What is gained, and from which model."""
    start = begun(run)
    run.server.close(start)
    who = run.server.cohort[-1]
    first = opened_at(run, start, silent=[who])
    last = run.server.round_no
    run.server.take_answered(run.server.cohort[0], last, run.server.cohort)
    join_one = run.join_one

    def told(x: int, offer: dict[str, Any], arrays: dict[str, Any]) -> None:
        if x == who:
            turn = Turn.from_bytes(offer["turn"])
            assert turn.repeats == last
            offer = {**offer, "turn": replace(turn, repeats=0).to_bytes()}
        join_one(x, offer, arrays)

    run.join_one = told  # type: ignore[method-assign,assignment]
    run.rate = 0.5
    return second_sum(run, start, first), start


@MOST
def test_nobody_trains_anew_for_a_sum_that_the_others_make_again(every: Any, tmp_path: Path, way: str) -> None:
    gained, _ = new_for_one(Attacked(every(way, tmp_path / "world")))
    assert gained is None, "the difference is half of what the last member alone has learnt, times its weight"


@MOST
def test_without_that_rule_a_member_s_update_shows(
    every: Any, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding = History.binding
    monkeypatch.setattr(History, "binding", lambda self, number, marks, _=0: binding(self, number, marks))
    world = every(way, tmp_path / "world")
    run = Attacked(world)
    gained, start = new_for_one(run)
    cohort = run.server.cohort
    learnt = carriers(world, run.trained(cohort[-1], start, {"rate": 0.5})) - carriers(world, start)
    weight = (100 + cohort[-1]) / sum(100 + x for x in cohort)
    assert np.allclose(gained, -weight * learnt, atol=1e-6)


@pytest.mark.parametrize("way", ways("plain", of=("plain", "fedadam")))  # of all members: three have parts of their own
def test_a_lost_memory_is_not_led_back_by_one_member_that_lags_behind(every: Any, tmp_path: Path, way: str) -> None:
    world = every(way, tmp_path / "world")
    run = Tuned(world)
    begun(run)
    offer, told = run.offer()  # a round from the state before, which is never held
    old = offer, {**told, **run.told_model(), **run.server.catch_up("model")}
    old_server = run.server.history.state
    run.round(silent=[3])
    start = dict(run.model)
    first = opened_at(run, start, absent=[3])
    assert run.server.history.state != old_server
    lose_memory(world, 1)
    with pytest.raises(RoundError):
        run.round(absent=[2, 3, 4, 5])
    forget(run, start)
    nonces = json.dumps({str(x): nonce for x, nonce in run.server._nonces.items()})
    # 3, which has not answered from the state before, gets ready there once more, and sees the nonce
    offer, told = old
    turn = Turn.from_bytes(offer["turn"])
    number = run.server.round_no + 1
    offer = {**offer, "round": number, "turn": replace(turn, round=number).to_bytes(), "nonces": nonces}
    model = {name.removeprefix("model:"): tensor for name, tensor in told.items() if name.startswith("model:")}
    reply, _ = run.node(3).handle("join", offer, told)
    made = {RESULT + name: tensor for name, tensor in run.trained(3, model, reply).items()}
    run.node(3).handle("ready", {**offer, "examples": 103, "joined": reply["joined"]}, made)
    run.server.round_no = number
    # now it accepts the state from which 1 answered, and says truly that it is newer for it
    past, group = run.server._current_past(), run.server.group
    nonce = bytes.fromhex(run.server._nonces[1])
    for liar in (4, 5):
        home, unlock = world.home(liar)
        message = statements.sign(home.identity(unlock), group, "newer", past.state, nonce)
        past.newer.setdefault(1, {})[liar] = message
        with Journal(home.only_consortium(), home.identity(unlock)).memory().edit() as memory:
            memory["answered"].clear()  # they answer whatever they like
    gained = second_sum(run, start, first, absent=[2])
    assert 3 not in run.refused
    assert gained is None, "a second sum was opened: of 1, 3, 4 and 5"


@pytest.mark.parametrize("lies", [False, True])
def test_a_false_manifest_of_a_sum_is_noticed(world: Consortium, tmp_path: Path, lies: bool) -> None:
    """A sum from a state was opened under a manifest. Told that the state's own model was summed under the next one, a
    member would not ask whether the state is closed under the first."""
    run = Tuned(world)
    begun(run)
    run.round()
    run.round(absent=[5])  # 5 has not been told of the model that this round starts from
    later = amend(world, tmp_path / "amendment", examples={2: 150})
    assert world.manifest is not None
    assert later.manifest is not None
    again = Tuned(later, run="amended", after=run.server.round_no, earlier=(world.manifest,))
    home, unlock = world.home(1)
    config, arrays = Journal(home.only_consortium(), home.identity(unlock)).hand_out()
    if lies:
        name = later.manifest.digest().hex()
        mark = json.loads(arrays["state"].tobytes())
        mark["under"] = name
        arrays["state"] = np.frombuffer(canonical(mark), np.uint8)
        config["sum-under"] = name
    again.server._adopt(config, arrays)
    again.model = dict(again.server.resumed or {})
    offer, told = again.offer()
    told |= again.told_model() | again.server.catch_up("model")
    try:
        reply, _ = again.node(5).handle("join", offer, told)
    except QuorumarkError as error:
        reply = {"refused": str(error)}
    assert "refused" in reply, "the member takes part, and nobody said that the state is closed"
    assert ("is not that of the last round" if lies else "answer nothing more from it there") in reply["refused"]


def test_other_integers_do_not_make_another_state(world: Consortium) -> None:
    """The terms of this consortium name no integers, so that the server chooses them when a run begins."""
    run = Tuned(world)
    begun(run)
    start = dict(run.model)
    first = opened_at(run, start)
    model = {**world.model, "steps": np.array(8)}
    second = Tuned(replace(world, model=model), run="2", after=run.server.round_no)
    try:
        begun(second)
        second.rate = 0.5
        gained = opened_at(second, dict(second.model)) - first
    except RoundError:
        gained = None
    assert gained is None, "nobody consented to a second run"
    assert set(second.refused.values()) == {"round.gone-on"}
    assert len(second.refused) == 5


def test_a_member_says_once_what_it_trained(world: Consortium) -> None:
    """A turn for another round than the message's would let a result that was uploaded be replaced: what is made again
    would be another sum."""
    run = Tuned(world)
    begun(run)
    start = dict(run.model)
    opened_at(run, start, silent=[5])
    last = run.server.round_no
    offer, told = run.offer()
    turn = Turn.from_bytes(offer["turn"])
    with pytest.raises(QuorumarkError, match="turn"):
        run.node(5).handle("join", {**offer, "turn": replace(turn, round=last).to_bytes()}, told)
    # nor a second time for the same message
    reply, _ = run.node(5).handle("join", offer, told)
    about = {**offer, "examples": 105, "joined": reply["joined"]}
    made = {RESULT + name: tensor for name, tensor in run.trained(5, start, reply).items()}
    run.node(5).handle("ready", about, made)
    with stopped("round.result-kept"):
        run.node(5).handle("ready", about, {name: tensor + tensor.dtype.type(1) for name, tensor in made.items()})


# --- runs that stand still --------------------------------------------------------------------------------


def test_a_run_that_is_begun_anew_by_mistake_does_not_cost_the_last_model(world: Consortium, tmp_path: Path) -> None:
    """The server is started without its folder, and without `go_on`: members refuse. Then it is started properly."""
    run = Run(world, folder=tmp_path / "run")
    begun(run, 3)
    run.server.close(run.model)
    wrong = Run(world, run="2")
    wrong.server.survey(wrong.ask)
    with pytest.raises(RoundError):
        wrong.round()
    run = Run(world, run="3", after=wrong.server.round_no, folder=tmp_path / "run")
    run.round()
    assert run.refused == {}


@pytest.mark.parametrize("way", ["upload", "ready"])
def test_a_sum_can_be_made_again_more_than_once(world: Consortium, way: str) -> None:
    run = Tuned(world)
    start = begun(run)
    first = opened_at(run, start, silent=[5])
    run = Tuned(world, run="2", after=run.server.round_no)
    run.server.survey(run.ask, go_on=True)
    run.model = dict(run.server.resumed or {})
    with pytest.raises(RoundError):  # a message is lost
        run.round(lost=[2] if way == "upload" else [], absent=[2] if way == "ready" else [])
    run.round()
    assert run.refused == {}
    assert (carriers(world, summed(run.server)) == first).all()
    run.round()
    assert run.refused == {}


def test_a_sum_with_a_halved_mark_can_be_made_again(world: Consortium) -> None:
    run = Tuned(world)
    start = begun(run)
    run.rate = 0.045  # updates so small that half of the mark is hidden by them, and all of it is not
    with stopped("round.too-strong"):
        run.round()
    forget(run, start)
    run.rate = 1.0
    first = opened_at(run, start)
    assert run.server.turn.halvings == 1
    run = Tuned(world, run="2", after=run.server.round_no)
    run.server.survey(run.ask, go_on=True)
    run.model = dict(run.server.resumed or {})
    run.round()
    assert (carriers(world, summed(run.server)) == first).all()
    run.round()
    assert run.refused == {}


def test_one_member_cannot_use_up_all_numbers(world: Consortium) -> None:
    """It says that it has answered in a round that will not be for a long time: the others must not go there."""
    run = Tuned(world)
    begun(run)
    run.server.close(run.model)
    last = (1 << 53) - 2
    run.server.take_answered(5, last, (1, 2, 3, 4, 5))
    run.round()
    assert run.refused == {}
    # nor can a server, with one message
    about = {"state": run.server.history.state.hex(), "of-manifest": run.server.manifest.digest().hex()}
    with stopped("round.wrong-number", names="round 3"):
        run.node(1).handle("never", {**about, "of-round": last, "run": "1", "node": "1"}, {})
    ask = run.ask

    def lying(stage: str, config: dict[str, Any], /, **more: Any) -> dict[int, dict[str, Any]]:
        said = ask(stage, config, **more)
        said[5] |= {"round": last, "answered": last}
        return said

    run.server.close(run.model)
    run.server.survey(lying)
    run.round()
    assert run.refused == {}


def test_points_of_nobody_are_not_remembered(world: Consortium) -> None:
    run = Tuned(world)
    offer, told = run.offer(lambda offer, _: offer.update(nonces=json.dumps({str(x): "ab" * 32 for x in range(99)})))
    run.join(offer, told)
    home, unlock = world.home(1)
    with Journal(home.only_consortium(), home.identity(unlock)).memory().edit() as memory:
        assert set(memory["nonces"]) <= {"1", "2", "3", "4", "5"}
