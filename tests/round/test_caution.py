"""Where members find the mark too strong, later states remember it: each would cost tries, and training, otherwise."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumark.canonical import canonical, parse
from quorumark.errors import RecordError
from quorumark.round.amplitudes import MarkState
from quorumark.round.caution import Caution
from quorumark.round.history import research_seed
from quorumark.simulation import Federation, Losses
from tests.kit.drawn import Drawn
from tests.kit.federation import Model, World, train, vector
from tests.kit.flowers import Consortium
from tests.kit.flowers import train as step
from tests.kit.refusals import stopped
from tests.kit.rounds import SEED
from tests.kit.ways import of_way, ways

TRIES = 24


class Giant:
    """Member 3's updates are 100 times as large as they would be; how often anybody trained."""

    def __init__(self) -> None:
        self.trained = 0

    def __call__(self, model: Model, data: float, seed: int) -> Model:
        self.trained += 1
        made = train(model, data, seed)
        if round(data / 0.01) != 3:
            return made
        return {k: v if k == "steps" else model[k] + np.float32(100) * (v - model[k]) for k, v in made.items()}


def tried(packing: str, **changes: Any) -> tuple[Federation, Giant]:
    made = World(policy={"packing": packing}, **changes)
    training = Giant()
    run = made.federation(members=made.members(training))
    for _ in range(TRIES):
        before = run.history.state
        assert (run.round().given_up != "") == (run.history.state == before)
    return run, training


@pytest.mark.parametrize(("packing", "dither"), [("1", "3"), ("2", "0"), ("2", "3"), ("3", "3"), ("4", "3")])
def test_a_member_with_updates_a_hundred_times_as_large_costs_few_tries(packing: str, dither: str) -> None:
    """With the mark: it follows the public update, which is that member's, and the others' updates do not hide it."""
    run, training = tried(packing, strength={"dither": dither})
    lost = [report for report in run.reports if report.given_up]
    kept = [report for report in run.reports if not report.given_up]
    assert {report.given_up_code for report in lost} == {"round.too-strong"}
    assert len(lost) <= 4
    assert all(len(report.excluded) >= 2 and not report.uploaded_bytes for report in lost)
    assert not any(report.given_up and after.given_up for report, after in pairwise(run.reports))
    assert all(report.attempts == 1 and len(report.members) >= 4 for report in kept)
    assert sum(report.marked for report in kept) >= len(kept) - 3, "the first two have no mark yet"
    assert kept[-1].rho > 0
    assert run.history.mark.caution.halvings > 0
    assert training.trained == 5 * TRIES
    assert np.isfinite(vector(run)).all()


def test_without_it_most_tries_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Caution, "after", lambda self, _: self)
    run, _ = tried("2")
    assert sum(bool(report.given_up) for report in run.reports) >= TRIES // 2 - 1


@pytest.mark.parametrize("way", ["unchecked", *ways("plain", "cohort, fedadam")])
def test_nodes_remember_what_a_federation_remembers(tmp_path: Path, way: str) -> None:
    """Bit for bit, with one that comes late, and a server that is killed. It is sure that somebody complains where
    all take part, without an optimiser."""
    unchecked = way == "unchecked"
    world = Consortium.make(tmp_path, policy={"sums": way}) if unchecked else of_way(tmp_path, way)
    folder, given_up = tmp_path / "run", []

    def giant(x: int, model: Any, made: Any) -> Any:
        if x != 3:
            return made
        return {k: v if k == "steps" else model[k] + np.float32(100) * (v - model[k]) for k, v in made.items()}

    class Giants(Drawn):
        def trained(self, x: int, model: Any, reply: dict[str, Any]) -> Any:
            return giant(x, model, step(model, 0.01, reply["seed"], reply["rate"]))

    run = Giants(world, folder=folder)
    for number in range(1, 10):
        if number == 5:
            run.server.close(run.model)
            run = Giants(world, folder=folder, run="2")
        try:
            run.round(absent=[5] if number == 6 else [])
        except Exception as error:  # noqa: BLE001 - which one is looked at below
            given_up.append((number, getattr(error, "code", error)))
    run.server.close(run.model)
    assert {code for _, code in given_up} <= {"round.too-strong"}
    caution = run.server.history.mark.caution
    if way in ("unchecked", "plain"):
        assert 1 <= len(given_up) <= 3
        assert caution.halvings > 0

    def seeded(model: Model, data: float, seed: int, rate: float, round_no: int) -> Model:
        (x,) = (x for x in range(1, world.count + 1) if research_seed(SEED, round_no, x) == seed)
        made: Model = giant(x, model, step(model, data, seed, rate))
        return made

    alone = world.in_process(9, SEED, Losses({(6, "train"): [5]}), seeded)
    assert [(r.round, r.given_up_code) for r in alone.reports if r.given_up] == given_up
    assert alone.history.mark.caution == caution
    assert all(run.model[name].tobytes() == alone.model[name].tobytes() for name in run.model if name != "steps")


# --- how it grows and falls -------------------------------------------------------------------------------


def test_each_complaint_doubles_the_wait_and_none_takes_it_back() -> None:
    caution = Caution().after(0)
    assert caution == Caution()
    caution = caution.after(1)
    assert caution == Caution(1, 2, 2)
    assert caution.after(0).after(0) == Caution()
    caution = caution.after(2)
    assert caution == Caution(3, 4, 4)
    for _ in range(4):
        caution = caution.after(0)
    assert caution == Caution(2, 4, 4)
    for _ in range(9):
        caution = caution.after(3)
    assert caution == Caution(6, 32, 32)
    for _ in range(6 * 32):
        assert caution.is_possible
        caution = caution.after(0)
    assert caution == Caution()


@given(st.lists(st.integers(0, 3), max_size=60))
def test_whatever_members_say_it_is_possible_and_bounded(asked: list[int]) -> None:
    caution = Caution()
    for halved in asked:
        caution = caution.after(halved)
        assert caution.is_possible
        assert caution.halvings <= 6
        assert (caution.halvings == 0) == (caution == Caution())


def test_a_state_names_its_caution_and_no_impossible_one() -> None:
    """It is part of the record that a late joiner is given, and of what names the state."""
    run, _ = tried("2")
    mark = run.history.mark
    about = mark.strength, run.layout, run.manifest.terms.key, mark.model, mark.anchor, mark.packing
    again = MarkState.from_bytes(mark.to_bytes(), *about)
    assert (again.caution, again.digest()) == (mark.caution, mark.digest())
    assert again.amplitudes(mark.round + 1).digest() == mark.amplitudes(mark.round + 1).digest()
    body = parse(mark.to_bytes(), mark.FORMAT, "a state")
    for wrong in ([7, 2, 2], [1, 2, 3], [0, 2, 2], [1, 0, 0], [1, -1, -1], [1, 64, 64], [1, 2], "none"):
        with pytest.raises(RecordError):
            MarkState.from_bytes(canonical({**body, "caution": wrong}), *about)


def test_a_state_after_a_complaint_has_another_name_than_one_without() -> None:
    made = World()
    first, second = made.federation(), made.federation()
    for run in (first, second):
        run.round()
    mark = first.history.mark
    for run, halvings in ((first, 0), (second, 1)):
        run.history.mark.advance(2, mark.model, None, np.zeros(run.history.norms, np.uint64), halvings=halvings)
    assert first.history.mark.chain != second.history.mark.chain


def test_complaints_about_halvings_that_were_not_tried_count_once_they_are_enough() -> None:
    """A member says at once how often the mark would have to be halved: one try finds that out, not three. What is
    not signed, or for another number, counts for nothing."""
    made = World()
    run = made.federation(members=made.members(Giant()))
    for _ in range(2):
        run.round()
    server = run.server
    turn = server.advance(server.like)
    server.begin()
    said = {}
    for x, member in run.members.items():
        member.begin(turn)
        member.train(run.model, run._seed_for(x))
        said[x] = member.too_strong()
    assert said[3] == []
    assert max(map(len, said.values())) > 1
    for x, messages in said.items():
        server.take_strong(x, messages)
    loud = [x for x in said if len(said[x]) > 1]
    past = server._current_past()
    assert past.complaints(1) == tuple(loud)
    server.take_strong(3, [b"", said[loud[0]][1]])
    assert 3 not in {*past.complaints(0), *past.complaints(1)}
    with stopped("round.too-strong"):
        server.announce()
    assert past.halvings == past.asked_halvings
