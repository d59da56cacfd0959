"""One state, one mark, one opened sum (docs/secagg.md): servers that try to open two, each with a control in which the
rule is taken out and the attack succeeds; and runs with every kind of bad luck, which go on or say why not."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import field
from quorumark.errors import QuorumarkError, RecordError, RoundError
from quorumark.model.layout import ModelLayout
from quorumark.node.consent import consent_text
from quorumark.node.journal import Journal
from quorumark.round import checked_sums, statements
from quorumark.round.group import group_of
from quorumark.round.history import packing_of
from quorumark.round.mark import weights
from quorumark.round.movement import norm_places
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.statements import Turn
from tests.kit.flowers import Consortium, Model
from tests.kit.opened import summed, summed_norms
from tests.kit.oracle import spelled
from tests.kit.refusals import stopped
from tests.kit.rounds import Run
from tests.kit.states import (
    CHECKED,
    Tuned,
    amend,
    begun,
    carriers,
    forget,
    key_of,
    lose_memory,
    opened_at,
    small,
    small_model,
)
from tests.kit.ways import Attacked, cached, consent, guessed, marked_at, of_way, right_signs, ways


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return Consortium.make(tmp_path_factory.mktemp("states"), policy=CHECKED)


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    """The consortium, before its first round."""
    return made.copy(tmp_path / "world")


@pytest.fixture
def other(made: Consortium, tmp_path: Path) -> Consortium:
    """The same, for a control."""
    return made.copy(tmp_path / "other")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Consortium]:
    """Consortia of each way in which a round may go."""
    return cached(tmp_path_factory.mktemp("ways"))


FEW = pytest.mark.parametrize("way", ways("plain", "cohort, fedadam"))
MOST = pytest.mark.parametrize("way", ways("plain"))


def cosine(world: Consortium, estimate: Any) -> float:
    key, size = key_of(world), float(np.linalg.norm(estimate))
    return float(estimate @ key) / (size * np.sqrt(key.size)) if size else 0.0


def without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members who answer from a state as often as they are asked."""
    monkeypatch.setattr(SecAggMember, "check_free", lambda *_, **__: {})


def extrapolated(world: Consortium, start: Model, sums: list[tuple[float, Any]]) -> Any:
    """What is in the sums at a learning rate of 0, by least squares: θ + S ⊙ τ, if each is θ + rate·Δ + S ⊙ τ."""
    if len(sums) < 2:
        return np.zeros(world.layout.carrier_size)
    rates = np.array([rate for rate, _ in sums])
    found = np.stack([opened for _, opened in sums]) - carriers(world, start)
    fit = np.stack([np.ones_like(rates), rates], axis=1)
    return np.linalg.lstsq(fit, found, rcond=None)[0][0]


def repeated_at_other_rates(run: Tuned, times: int) -> Any:
    """The first attack: the same round again and again, with a learning rate that changes. A sum that is made again
    from the same results is the first one, and says nothing new."""
    start, refused = begun(run), set()
    sums: list[tuple[float, Any]] = []
    for i in range(times):
        run.rate = 1.0 if i % 2 else 0.5
        try:
            found = opened_at(run, start)
        except RoundError:
            refused |= set(run.refused)
            forget(run, start)
            continue
        if not any((found == before).all() for _, before in sums):
            sums.append((run.rate, found))
    if len(sums) < times:
        assert refused == set(run.server.cohort)
    return extrapolated(run.world, start, sums)


@FEW
def test_a_round_cannot_be_repeated_at_another_rate(every: Any, tmp_path: Path, way: str) -> None:
    run = Attacked(every(way, tmp_path / "world"))
    estimate = repeated_at_other_rates(run, 3)
    assert abs(right_signs(run.world, estimate, marked_at(run)) - 0.5) < guessed(run.world)


@FEW
def test_without_the_rule_two_rates_give_the_key(
    every: Any, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_the_rule(monkeypatch)
    run = Attacked(every(way, tmp_path / "world"))
    estimate = repeated_at_other_rates(run, 2)
    assert right_signs(run.world, estimate, marked_at(run)) == 1.0


@pytest.mark.parametrize("times", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_nor_with_training_that_varies(world: Consortium, times: int) -> None:
    run = Tuned(world)
    run.rng = np.random.default_rng(5)
    assert abs(cosine(world, repeated_at_other_rates(run, times))) <= 0.06


@pytest.mark.slow
def test_without_the_rule_noise_is_averaged_away(world: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    without_the_rule(monkeypatch)
    run = Tuned(world)
    run.rng = np.random.default_rng(5)
    assert cosine(world, repeated_at_other_rates(run, 24)) > 0.06


def pairs_of_runs(world: Consortium, pairs: int, rng: np.random.Generator | None) -> tuple[Any, Any]:
    """The second attack: pairs of runs from the anchor; in one of each the server says that the mark of the third round
    was too strong three times, so that it is left out. Operators consent to every run. Also: which weights are marked
    in the other one."""
    total, after = np.zeros(world.layout.carrier_size), 0
    marked: Any = None
    for number in range(pairs):
        moves = []
        for unmarked in (False, True):
            if after:
                consent(world)
            run = Attacked(world, run=f"{number}{unmarked}", after=after)
            run.rng = rng
            try:
                start = begun(run)
                run.server.accept(start)  # now, so that it can speak about the state
                marked = marked_at(run) if marked is None else marked
                if unmarked:
                    run.server._current_past().halvings = statements.HALVINGS
                moves.append(opened_at(run, start) - carriers(world, start))
            except RoundError:
                if unmarked and "round.not-halved" in run.refused.values():
                    forget(run, start)  # it takes what it can get: the round as it is
                    run.server._current_past().halvings = 0
                    moves.append(opened_at(run, start) - carriers(world, start))
            after = run.server.round_no
        if len(moves) == 2:
            total += moves[0] - moves[1]
    return total, marked


@MOST
def test_two_runs_from_the_anchor_do_not_show_the_key(every: Any, tmp_path: Path, way: str) -> None:
    """Where training repeats itself the second run comes to a state that members have answered from, and ends."""
    world = every(way, tmp_path / "world")
    assert abs(right_signs(world, *pairs_of_runs(world, 1, None)) - 0.5) < guessed(world)


@pytest.mark.parametrize("pairs", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_nor_do_many_pairs_of_runs_whose_training_varies(world: Consortium, pairs: int) -> None:
    assert abs(cosine(world, pairs_of_runs(world, pairs, np.random.default_rng(6))[0])) <= 0.06


@MOST
def test_without_the_rules_two_runs_give_the_key(
    every: Any, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members who let a server say that the mark is too strong, and who answer from a state twice."""
    monkeypatch.setattr(statements, "check_halved", lambda *_: None)
    if way == "plain":
        varied = every(way, tmp_path / "varied")
        assert cosine(varied, pairs_of_runs(varied, 3, np.random.default_rng(6))[0]) > 0.06
    without_the_rule(monkeypatch)
    world = every(way, tmp_path / "world")
    assert right_signs(world, *pairs_of_runs(world, 1, None)) == 1.0


def left_out(run: Tuned, start: Model, who: int) -> Any:
    """The third attack, with a member that helps the server: two sums, one of them without it. Their weighted
    difference is n_s·(θ_s + S ⊙ τ), and it knows θ_s. A wrong tag would make the others repeat the round, too."""
    world = run.world
    assert world.manifest is not None
    whole = opened_at(run, start)
    cohort = run.server.cohort
    counts, helper = {x: world.manifest.terms.member(x).examples for x in cohort}, cohort[who]
    part = opened_at(run, start, absent=[helper]) * sum(n for x, n in counts.items() if x != helper)
    own = carriers(world, run.trained(helper, dict(start), {"rate": 1.0}))
    return (whole * sum(counts.values()) - part) / counts[helper] - own


@MOST
def test_a_member_that_is_left_out_of_a_second_sum(
    every: Any, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Attacked(every(way, tmp_path / "world"))
    start = begun(run)
    with stopped("round.too-few"):
        left_out(run, start, 2)
    cohort = run.server.cohort
    assert run.refused == dict.fromkeys((x for x in cohort if x != cohort[2]), "round.answered-already")
    assert weights(run.server.manifest, run.refused)  # the smaller set would have been a sound one
    without_the_rule(monkeypatch)
    run = Attacked(every(way, tmp_path / "other"))
    estimate = left_out(run, begun(run), 2)
    assert right_signs(run.world, estimate, marked_at(run)) == 1.0


def signs_from_norms(run: Tuned, start: Model, left: Iterable[int]) -> Any:
    """The fourth attack, by a server alone: three sums from one state, two of them without one member each. Sums and
    norms, weighted, differ by n_s·(θ + Δ_s + S ⊙ τ) and n_s·‖Δ_s‖, so that the server has D = Δ_s + S ⊙ τ, and from the
    norm of each row ⟨D, S ⊙ τ⟩ = (‖D‖² + ‖S‖² − ‖Δ_s‖²)/2: few enough signs to try all of them."""
    world = run.world
    assert world.manifest is not None
    shape, terms = (8, 6), world.manifest.terms
    base = carriers(world, start).reshape(shape)

    def opened(absent: Iterable[int] = ()) -> tuple[Any, Any]:
        run.model = start
        run.round(absent=absent)
        total = sum(terms.member(x).examples for x in run.server.members)
        found = carriers(world, summed(run.server))
        norms = field.to_signed(summed_norms(run.server)) / 2.0**40
        forget(run, start)
        return total * found.reshape(shape), total * norms[: shape[0]]

    whole, norms = opened()
    cohort = run.server.cohort
    counts = {x: terms.member(x).examples for x in cohort}
    marks = run.server.history.amplitudes().vector.reshape(shape) / 2.0**40
    tries = np.array(list(itertools.product((-1, 1), repeat=shape[1])))
    wrong = np.zeros((shape[0], len(tries)))
    for s in (cohort[who] for who in left):
        part, part_norms = opened([s])
        moved = (whole - part) / counts[s] - base
        own = (norms - part_norms) / counts[s]
        wanted = ((moved**2).sum(axis=1) + (marks**2).sum(axis=1) - own**2) / 2
        wrong += ((moved * marks) @ tries.T - wanted[:, None]) ** 2
    return tries[wrong.argmin(axis=1)].reshape(-1)


@MOST
def test_the_norms_of_three_sums(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = of_way(tmp_path / "c", way, model=small_model())
    run = Attacked(made.copy(tmp_path / "world"))
    with stopped("round.too-few"):  # with the rule there is no second sum to read
        signs_from_norms(run, begun(run), [1, 3])
    cohort = run.server.cohort
    assert run.refused == dict.fromkeys((x for x in cohort if x != cohort[1]), "round.answered-already")
    without_the_rule(monkeypatch)
    run = Attacked(made.copy(tmp_path / "other"))
    estimate = signs_from_norms(run, begun(run), [1, 3])
    assert right_signs(run.world, estimate, marked_at(run)) == 1.0


def _other_run(run: Run) -> Run:
    again = type(run)(run.world, run="2", after=run.server.round_no)
    again.server.survey(again.ask, go_on=True)
    again.model = dict(again.server.resumed or {})
    return again


def _forged(run: Run) -> Run:
    """Statements that the server makes up, takes from fewer members than must give up, or takes from elsewhere."""
    past, group = run.server._current_past(), run.server.group
    one, two, three, *colluders = past.cohort
    said: dict[int, bytes] = {}
    for x in colluders:  # they say anything
        home, unlock = run.world.home(x)
        said[x] = statements.sign(home.identity(unlock), group, "never", past.state, (3).to_bytes(8, "big"))
    four, five = colluders
    past.answered[3] = past.cohort
    past.never[3] = {one: said[four], two: b"never", three: said[five], **said}
    past.drawn[3], past.is_given_up = 0, lambda *_: True  # type: ignore[method-assign]
    return run


def _repeats(run: Run) -> Run:
    """It says that the sum is made again, with others in it."""
    cohort = run.server._current_past().cohort
    run.server.take_answered(cohort[0], 3, cohort[:4])
    return run


@pytest.mark.parametrize("trick", ["plain", "another run", "forged statements", "made again by others"])
@MOST
def test_ways_to_a_second_sum(every: Any, tmp_path: Path, way: str, trick: str) -> None:
    run: Run = Attacked(every(way, tmp_path / "world"))
    start = begun(run)
    first = opened_at(run, start)
    if trick == "another run":  # it is asked where everybody is, and gets the same sum once more
        run = _other_run(run)
        run.round()
        assert (carriers(run.world, summed(run.server)) == first).all()
        return
    if trick == "forged statements":
        run = _forged(run)
    if trick == "made again by others":
        run = _repeats(run)
        with stopped("round.too-few"):
            run.round()
        assert "round.other-repeat" in run.refused.values(), run.refused
        return
    with stopped("round.too-few"):
        run.round()
    wanted = "round.not-given-up" if trick == "forged statements" else "round.answered-already"
    assert run.refused == dict.fromkeys(run.server.cohort, wanted)


@MOST
def test_a_sum_that_is_made_again_is_the_same(every: Any, tmp_path: Path, way: str) -> None:
    """Members have answered, too many to give it up, and the server's files are gone: the same members send the same
    results once more, untrained, and the same sum opens."""
    run = Attacked(every(way, tmp_path / "world"))
    start = begun(run)
    first = opened_at(run, start)
    run = _other_run(run)  # type: ignore[assignment]
    run.rate = 0.1  # nobody trains again
    run.round()
    assert run.server.turn.round == 4
    assert (carriers(run.world, summed(run.server)) == first).all()
    run.rate = 1.0
    run.round()
    assert run.refused == {}


# --- statements -------------------------------------------------------------------------------------------


def test_a_round_that_enough_members_give_up_is_replaced(world: Consortium) -> None:
    """One of five has answered: the four others say that they never will, and then it takes part again."""
    run = Run(world)
    begun(run)
    with stopped("round.too-few-answers"):
        run.round(silent=[2, 3, 4, 5])
    request = run.server.request(2)
    run.server._ask_again = lambda *_: False  # type: ignore[method-assign]  # they are silent once more
    run.gone = [2]  # and of the four one cannot be reached
    with stopped("round.sum-open"):
        run.round()
    run.gone = []
    run.round()
    assert run.refused == {1: "round.answered-already"}  # which it says when it is asked for "never"
    assert run.server.members == (1, 2, 3, 4, 5)
    with pytest.raises(RoundError):  # who gave it up never answers there
        run.node(2).handle("unmask", {"request": request}, {})
    run.round()


def test_a_mark_halves_when_enough_members_say_so_and_not_otherwise(world: Consortium) -> None:
    class Timid(Run):
        """Members whose update of one carrier is all but nothing: a mark of 0.1 of the public move shows in it."""

        timid: Iterable[int] = ()

        def trained(self, x: int, model: Model, reply: dict[str, Any]) -> Model:
            made = super().trained(x, model, reply)
            if x in set(self.timid):
                made["b.weight"] = model["b.weight"] + (made["b.weight"] - model["b.weight"]) * np.float32(0.1)
            return made

    run = Timid(world)
    start = begun(run, 3)
    run.timid = [2]
    run.round()  # one cannot have it halved, nor stop the others
    assert run.refused == {2: "round.too-strong"}
    assert run.server.turn.halvings == 0
    start = dict(run.model)
    run.timid = [2, 5]
    with stopped("round.too-strong", names="'Hospital 2', 'Hospital 5'"):
        run.round()
    run.model, run.timid = start, []
    run.round()
    assert run.server.turn.halvings == 1
    assert run.refused == {}
    level = run.server.settled.embedded
    assert level is not None
    full = run.server.history.amplitudes(0)
    units = {place.start: 1 << shift for place, shift in run.server.history.mark.spans()}
    for (_, place), whole, halved in zip(world.layout.spans("carrier"), full.scales, level.scales, strict=True):
        unit = units[place.start]  # both were rounded down to units
        pairs = zip(itertools.chain(*whole), itertools.chain(*halved), strict=True)
        assert all(half in ((w // 2) // unit * unit, (w // 2 + unit) // unit * unit) for w, half in pairs)
    # the count of halvings is in what members check the sum by
    offer, told = run.offer()
    with stopped("round.wrong-tag"):
        run.node(1).handle("join", {**offer, "sum-halvings": 0}, told)
    run.node(1).handle("join", offer, told)


def test_a_turn_survives_its_bytes_and_nothing_else_is_one() -> None:
    said = {3: b"three", 1: b"one"}
    turn = Turn(7, 2, 5, {5: said}, {0: said, 1: {}}, {"ab" * 32: said}, {2: said}, draw=1)
    assert Turn.from_bytes(turn.to_bytes()) == turn
    whole = json.loads(turn.to_bytes())
    changes: tuple[dict[str, Any], ...] = (
        {"round": 0},
        {"round": True},
        {"halvings": -1},
        {"repeats": "5"},
        {"draw": -1},
        {"draw": 1 << 70},
        {"never": []},
        {"newer": {"x": {}}},
        {"strong": {"0": {"1": "zz"}}},
    )
    for change in changes:
        with pytest.raises(QuorumarkError):
            Turn.from_bytes(spelled({**whole, **change}))
    for name in ("never", "round"):
        with pytest.raises(QuorumarkError):
            Turn.from_bytes(spelled({k: v for k, v in whole.items() if k != name}))


def test_a_member_that_lost_its_memory_waits_for_a_newer_model(world: Consortium) -> None:
    run = Run(world)
    begun(run, 3)
    lose_memory(world, 2)
    waited = 0
    for _ in range(6):
        run.round()
        waited += 2 in run.refused
        if 2 in run.server.members:
            break
        assert run.refused[2] == "round.memory-anew"
    assert waited == 2  # it says that it lost its memory; the others see that, go on once, and say so
    run.round()
    assert run.refused == {}


def test_a_lost_memory_signs_nothing_and_forged_words_do_not_help(world: Consortium, monkeypatch: Any) -> None:
    """A member answered, and its memory is gone: a server that could take it for one that has not would open a second
    sum with it, or have the first one given up."""
    run = Tuned(world)
    start = begun(run)
    opened_at(run, start)
    state = run.server.history.state
    for x in (2, 3, 4):
        lose_memory(world, x)
    about = {"state": state.hex(), "of-round": 3, "of-manifest": run.server.manifest.digest().hex()}
    for x in (2, 3, 4):
        with stopped("round.memory-anew"):
            run.node(x).handle("never", {**about, "run": "1", "node": "1"}, {})
    with stopped("round.too-few"):
        run.round(absent=[1, 5])
    assert all(run.refused[x] == "round.memory-anew" for x in (2, 3, 4))
    # two colluders, 1 and 5, say that the model is newer than the nonces: three must
    past = run.server._current_past()
    for x, nonce in run.server._nonces.items():
        for liar in (1, 5):
            home, unlock = world.home(liar)
            group = run.server.group
            message = statements.sign(home.identity(unlock), group, "newer", state, bytes.fromhex(nonce))
            past.newer.setdefault(x, {})[liar] = message
            past.newer[x][2] = message  # a copy counts for nobody else
    forget(run, start)
    with stopped("round.too-few"):
        run.round(absent=[1, 5])
    assert all(run.refused[x] == "round.memory-anew" for x in (2, 3, 4))
    # without the rule they would take part: with the colluders that is a second sum
    monkeypatch.setattr("quorumark.round.secagg.member.is_newer", lambda *_: True)
    forget(run, start)
    with stopped("round.too-few"):
        run.round(absent=[1, 5])
    assert run.refused == {}


# --- other ways in ----------------------------------------------------------------------------------------


def test_another_key_for_a_marked_model_is_refused(world: Consortium) -> None:
    """Sums from one model with two keys differ where the keys do."""
    run = Run(world)
    begun(run, 3)
    assert run.server.marked
    run.server.close(run.model)
    names = {}
    for x in range(1, 6):
        home, unlock = world.home(x)
        journal = Journal(home.only_consortium(), home.identity(unlock))
        names[x] = (journal.consortium.path / "rounds" / "marked.txt").read_text().split()
    assert all(len(found) == 1 for found in names.values())
    home, unlock = world.home(1)
    other = home.path / "consortia" / ("f" * 64)
    shutil.copytree(home.only_consortium().path, other)
    (home.only_consortium("f" * 8).path / "rounds" / "marked.txt").unlink()
    journal = Journal(home.only_consortium("f" * 8), home.identity(unlock))
    start = world.layout.encode(world.model)
    journal.marked.check_other_keys(start)  # the anchor has no mark
    layout = world.layout
    with stopped("round.other-consortium"):
        journal.marked.check_other_keys(journal.history(layout).mark.model)


def test_integers_at_the_start_are_those_that_were_agreed_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    model: Model = {"a.weight": rng.standard_normal((8, 6)).astype(np.float32), "mask": np.array([1, 1, 0])}
    layout = ModelLayout.of(model)
    (tmp_path / "b").mkdir()
    bound = Consortium.make(tmp_path / "b", model=model, policy=CHECKED, buffers=layout.buffers_digest(model).hex())
    (tmp_path / "c").mkdir()
    loose = Consortium.make(tmp_path / "c", model=model, policy=CHECKED)

    class Masked(Run):
        def trained(self, x: int, model: Model, reply: dict[str, Any]) -> Model:
            return {**model, "a.weight": model["a.weight"] + np.float32(0.01 * x * reply["rate"])}

    def lie(_: dict[str, Any], told: dict[str, Any]) -> None:
        told["model:mask"] = np.array([0, 0, 0])

    run = Masked(bound)
    with stopped("round.too-few"):
        run.round(lie=lie)
    assert set(run.refused.values()) == {"round.other-integers"}
    assert len(run.refused) == 5
    run.round()
    assert run.refused == {}
    with pytest.raises(RecordError, match="buffers"):
        Consortium.agree(tmp_path, model=model, buffers="xyz")
    # where the terms name none, a server chooses: nobody can tell
    run = Masked(loose)
    run.server.history.buffers = layout.buffers_digest({**model, "mask": np.array([0, 0, 0])})
    run.server.like = {**model, "mask": np.array([0, 0, 0])}
    run.model = run.server.like
    run.round(lie=lie)
    assert run.refused == {}


def test_a_changed_setting_is_noticed(world: Consortium) -> None:
    run = Run(world)
    offer, told = run.offer()
    first, _ = run.node(1).handle("join", {**offer, "settings": "a"}, told)
    same, _ = run.node(1).handle("join", {**offer, "settings": "a"}, told)
    other, _ = run.node(1).handle("join", {**offer, "settings": "b"}, told)
    assert [reply["settings-changed"] for reply in (first, same, other)] == [False, False, True]


def test_seeds_are_the_members_own_unless_they_opted_in(world: Consortium) -> None:
    run = Run(world)
    offer, told = run.offer()
    chosen = [run.node(1).handle("join", offer, told)[0]["seed"] for _ in range(2)]
    assert chosen[0] == chosen[1]
    from quorumark.node.member import MemberNode

    own = [MemberNode(*world.home(1)).handle("join", offer, told)[0]["seed"] for _ in range(2)]
    assert len({*own, chosen[0]}) == 3


def test_a_sum_that_is_no_model_has_a_successor(world: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member sends norms that no update may have: the tensor keeps its weights, and embeds nothing; the run goes
    on, from one opened sum."""
    honest_upload = SecAggMember.upload
    place = dict(norm_places(world.layout))["b.weight"]
    assert world.manifest is not None
    length = packing_of(world.manifest).length(world.layout)

    def wild_upload(self: SecAggMember, plan: Any, vector: Any, **about: Any) -> Any:
        if self.point == 2:  # with a tag that fits
            key = bytes.fromhex(about["known"]["key"])
            vector[length:-1][place] = field.P // 2
            vector[-1] = checked_sums.tag(key, vector[:-1], first=plan.members[0] == 2)
        return honest_upload(self, plan, vector, **about)

    run = Run(world)
    begun(run, 3)
    before = dict(run.model)
    state = run.server.history.state
    monkeypatch.setattr(SecAggMember, "upload", wild_upload)
    run.round()
    monkeypatch.setattr(SecAggMember, "upload", honest_upload)
    assert run.server.settled.held == ("b.weight",)
    assert run.server.history.state != state
    assert np.array_equal(run.model["b.weight"], before["b.weight"])
    assert not np.array_equal(run.model["a.weight"], before["a.weight"])
    embedded = run.server.settled.embedded
    assert embedded is not None
    assert not any(any(axis) for axis in embedded.scales[1])
    with stopped("round.too-few"):  # two sums from the same weights could show the mark of the first
        run.round()
    assert len(run.refused) == 5
    consent(world, here=True)
    run.round()  # everybody derives the same from it
    assert run.refused == {}
    assert not run.server.settled.held


# --- every kind of bad luck -------------------------------------------------------------------------------

SIZES = [(5, 3), *(pytest.param(size, marks=pytest.mark.slow) for size in ((3, 2), (5, 4), (5, 5), (16, 9)))]


def closing(size: tuple[int, int]) -> tuple[int, int, int]:
    """T, n − T + t, and how many answers can still be given up."""
    n, t = size
    quorum = (n + t - 1) // 2 + 1
    return quorum, n - quorum + t, quorum - t


@pytest.mark.parametrize("kept", [True, False], ids=["files kept", "files lost"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_server_that_dies_goes_on(tmp_path: Path, size: tuple[int, int], kept: bool) -> None:
    """Before, between and after the answers; with its files it opens the same sum, without them the members' answers
    are given up if they are few enough, or the same sum is made again."""
    n, _ = size
    world = small(tmp_path / "c", *size)
    quorum, _, few = closing(size)
    folder = tmp_path / "run"
    options: dict[str, Any] = {"folder": folder} if kept else {}
    run = Run(world, **options)
    begun(run)
    for number, answered in enumerate(sorted({0, 1, few, quorum - 1, quorum, n})):
        with nullcontext() if answered >= quorum else stopped("round.too-few-answers"):
            run.round(silent=range(answered + 1, n + 1))
        state = run.server.history.state
        run = Run(world, run=f"again {number}", after=run.server.round_no, **options)
        if not kept:
            run.server.survey(run.ask, go_on=True)
            run.model = dict(run.server.resumed or {})
        assert run.server.history.state == state
        run.round()
        run.round()
        assert run.refused == {}


@pytest.mark.parametrize("when", ["train", "upload", "unmask", "answered"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_one_member_lost_for_ever(tmp_path: Path, size: tuple[int, int], when: str) -> None:
    """At any point: the others go on, or stop because there are fewer than a round needs."""
    n, _ = size
    world = small(tmp_path, *size)
    quorum, *_ = closing(size)
    run = Run(world)
    begun(run)
    ways: dict[str, dict[str, Any]] = {
        "train": {"absent": [n]},
        "upload": {"lost": [n]},
        "unmask": {"silent": [n]},
        "answered": {"silent": range(1, n)},
    }
    with suppress(RoundError):
        run.round(**ways[when])
    run.gone = [n]
    reasons = []
    for _ in range(4):
        try:
            run.round()
        except RoundError as error:
            reasons.append(error.code)
    if n - 1 >= max(quorum, 3):
        assert len(reasons) <= 1, reasons
        assert n not in run.server.members
    else:  # without it no round has enough members
        assert len(reasons) >= 3
        assert set(reasons) <= {"round.too-few", "round.sum-open", "round.repeat-waits"}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_number_of_members_may_stay_away(tmp_path: Path, size: tuple[int, int]) -> None:
    n, _ = size
    world = small(tmp_path, *size)
    quorum, *_ = closing(size)
    run = Run(world)
    begun(run)
    for absent in range(n):
        enough = n - absent >= max(quorum, 3)
        with nullcontext() if enough else stopped("round.too-few"):
            run.round(absent=range(n - absent + 1, n + 1))
        run.round()  # when they are back, nothing is in the way
        assert run.refused == {}


def under(world: Consortium, before: Consortium, run: Run, **options: Any) -> Run:
    """The next run, under the amended manifest."""
    assert before.manifest is not None
    again = Run(world, run="amended", after=run.server.round_no, earlier=(before.manifest,), **options)
    again.server.survey(again.ask, go_on=True)
    again.model = dict(again.server.resumed or {})
    return again


_AMENDED = [((5, 3), 0), ((5, 3), 2), ((3, 2), 1)]
_AMENDED_SLOW = [((5, 3), None), ((5, 3), 5), ((3, 2), None), ((3, 2), 0), ((3, 2), 2), ((3, 2), 3)]
_AMENDED_SLOW += [((5, 4), n) for n in (None, 0, 1, 4, 5)] + [((16, 9), n) for n in (None, 0, 4, 12, 16)]


@pytest.mark.parametrize(
    ("size", "answered"), [*_AMENDED, *(pytest.param(*case, marks=pytest.mark.slow) for case in _AMENDED_SLOW)]
)
def test_an_amendment_at_any_point(tmp_path: Path, size: tuple[int, int], answered: int | None) -> None:
    """Between rounds, or when so many members have answered: the sum that is open is opened first, under the manifest
    that it belongs to."""
    world = small(tmp_path / "c", *size)
    run = Run(world, folder=tmp_path / "run")
    begun(run)
    if answered is not None:
        with suppress(RoundError):
            run.round(silent=range(answered + 1, size[0] + 1))
    later = amend(world, tmp_path / "amendment", examples={2: 150})
    assert world.manifest is not None
    again = Run(later, run="amended", after=run.server.round_no, earlier=(world.manifest,), folder=tmp_path / "run")
    assert again.server.history.state == run.server.history.state
    again.round()
    assert again.server._under.digest() == world.manifest.digest()
    again.round()
    assert again.server._under.digest() == again.server.manifest.digest()
    again.round()
    assert again.refused == {}


_CLOSED = [((5, 3), 0), ((5, 3), 1), ((5, 3), 2), ((3, 2), 1), ((3, 2), 2)]
_CLOSED_SLOW = [((5, 4), n) for n in (0, 1, 2)] + [((16, 9), n) for n in (0, 4, 5)]


@pytest.mark.parametrize(
    ("size", "answered"), [*_CLOSED, *(pytest.param(*case, marks=pytest.mark.slow) for case in _CLOSED_SLOW)]
)
def test_an_amendment_when_the_server_s_files_are_gone(tmp_path: Path, size: tuple[int, int], answered: int) -> None:
    """The state is closed under the old manifest, if few enough have answered there: T − t at most."""
    world = small(tmp_path / "c", *size)
    run = Run(world)
    begun(run)
    with suppress(RoundError):
        run.round(silent=range(answered + 1, size[0] + 1))
    *_, few = closing(size)
    goes_on = answered <= few
    later = amend(world, tmp_path / "amendment", examples={2: 150})
    again = under(later, world, run)
    if not goes_on:
        with stopped("round.too-few", "round.repeat-waits"):
            again.round()
        assert "round.not-closed" in again.refused.values()
        return
    again.round()
    assert again.server._under.digest() == again.server.manifest.digest()
    assert set(again.server.members) == set(range(1, size[0] + 1))
    again.round()
    assert again.refused == {}


def test_no_state_is_used_under_two_manifests(tmp_path: Path) -> None:
    """A sum was opened under the old manifest, and its server acts as if it had not been. Of the members under the new
    one t could be others: so the old ones must say that they answer nothing more, and those who answered cannot."""
    world = small(tmp_path / "c", 5, 3)
    run = Run(world)
    begun(run)
    run.round()
    later = amend(world, tmp_path / "amendment", examples={2: 150})
    again = under(later, world, run)
    with stopped("round.too-few", "round.repeat-waits"):
        again.round()
    assert "round.not-closed" in again.refused.values(), again.refused
    # one statement too few, and copies
    state, before = again.server.history.state, group_of(world.manifest)  # type: ignore[arg-type]
    said = {}
    for x in (4, 5):
        home, unlock = world.home(x)
        said[x] = statements.sign(home.identity(unlock), before, "never", state, statements.in_draw(0))
    with stopped("round.not-closed"):
        statements.check_closed(before, state, {statements.place_of(before, 0): {**said, 1: said[4], 2: said[5]}})
    # the operators' consent goes on, and says what it means
    for x in range(1, 6):
        home, unlock = later.home(x)
        assert "can show the key" in consent_text(Journal(home.only_consortium(), home.identity(unlock)), here=True)
    consent(later, here=True)
    again = under(later, world, again)
    again.server._past.answered.clear()
    again.round()
    assert set(again.server.members) == {1, 2, 3, 4, 5}


def test_a_second_run_takes_consent_once(world: Consortium) -> None:
    run = Tuned(world)
    home, unlock = world.home(1)
    run.round()
    journal = Journal(home.only_consortium(), home.identity(unlock))
    assert "Nothing was marked yet" in consent_text(journal, here=False)
    begun(run)
    assert run.server.marked
    assert "this can show the key" in consent_text(journal, here=False)
    second = Run(world, run="2", after=run.server.round_no)
    with stopped("round.too-few"):
        second.round()
    assert set(second.refused.values()) == {"round.gone-on"}, second.refused
    consent(world)
    forget(second, world.model)
    second.server._past.answered.clear()
    second.round()
    assert second.refused == {}
    third = Run(world, run="3", after=second.server.round_no)
    with stopped("round.too-few"):
        third.round()
