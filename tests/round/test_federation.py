"""Rounds in one process: exact sums, and the mark exactly where it belongs."""

from __future__ import annotations

import zlib
from copy import copy
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from quorumark import codec, field, packing
from quorumark.round import member as member_module
from quorumark.round.amplitudes import Amplitudes
from quorumark.round.history import History
from quorumark.round.mark import ideal_mark, weights
from quorumark.round.movement import ideal_norms, norm_count
from quorumark.simulation import FederationMember, Losses, _table, watch
from tests.kit.federation import CARRIERS, Model, World, average, consent, opened_sums, rounding, train, vector
from tests.kit.opened import summed, summed_norms

# --- exactness --------------------------------------------------------------------------------------------

PATTERNS = [
    {},
    {(1, "train"): [2]},
    {(1, "upload"): [4]},
    {(1, "unmask"): [5]},
    {(1, "train"): [1], (1, "unmask"): []},
]


@pytest.fixture(scope="module", params=["1", "2"])
def packed(request: pytest.FixtureRequest) -> World:
    """One weight in an element, and two, as everywhere else."""
    return World(policy={"sums": "unchecked", "packing": request.param})


@pytest.mark.parametrize("plan", PATTERNS)
def test_without_the_mark_a_round_is_fedavg(packed: World, plan: dict[Any, Any]) -> None:
    world = packed
    run = world.federation(mark=False, losses=Losses(plan))
    out = set(plan.get((1, "train"), ())) | set(plan.get((1, "upload"), ()))
    points = tuple(x for x in range(1, 6) if x not in out)
    wanted, allowed = average(world, run, points), rounding(run, len(points))
    report = run.round()
    assert report.members == points
    assert not report.given_up
    assert report.attempts == (2 if (1, "upload") in plan else 1)
    got = vector(run).astype(np.float64)
    # the sum itself is within K/2 units; the model is that, rounded once to float32
    assert (np.abs(got - wanted) <= allowed + np.abs(wanted).max() * 2.0**-24).all()
    assert run.model["steps"] == 7  # integers survive


def test_the_sum_is_within_half_a_unit_for_each_member(packed: World) -> None:
    """Before it is rounded to float32. With one weight in an element a unit is 2^-40."""
    run = packed.federation(mark=False)
    sums = opened_sums(run)
    wanted, allowed = average(packed, run, (1, 2, 3, 4, 5)), rounding(run, 5)
    run.round()
    assert (np.abs(codec.decode(sums[0][0], np.float64) - wanted) <= allowed).all()
    if not run.history.packing.packs:
        assert allowed.max() <= 5 * 2.0**-40.9


def test_masks_that_cancel_change_nothing(world: World) -> None:
    """With and without the masks of pairs: the same models, losses and second attempts included."""
    plan: dict[Any, Any] = {(1, "upload"): [4], (3, "train"): [2], (4, "unmask"): [5]}
    models = []
    for pair_masks in (True, False):
        run = world.federation(losses=Losses(plan), pair_masks=pair_masks)
        reports = [run.round() for _ in range(4)]
        assert not any(report.given_up for report in reports)
        assert reports[-1].marked
        models.append(vector(run))
    assert models[0].tobytes() == models[1].tobytes()


def test_with_the_mark_the_difference_is_exactly_the_amplitudes_times_the_key(world: World) -> None:
    """For every set U of three members or more that may take part, and for the fast path."""
    key = world.key()
    for out in [(), *((x,) for x in range(1, 6))]:
        pair: list[Any] = []
        for mark in (True, False):
            run = world.federation(mark=mark, losses=Losses({(4, "train"): out}))
            seen = opened_sums(run)
            for _ in range(3):
                run.round()
            if pair:  # the unmarked run goes on from the marked one's model, so that only round 4 differs
                run.server.like, mark_state = pair[0]
                run.history.restored(mark_state)
            else:
                pair.append((run.model, copy(run.history.mark)))
            report = run.round()
            assert len(report.members) == 5 - len(out)
            pair.append(seen[-1])
        (marked, amplitudes), (plain, nothing) = pair[1], pair[2]
        assert isinstance(amplitudes, Amplitudes)
        assert nothing is None
        assert amplitudes.marks
        ideal_mark(plain, amplitudes, key, world.manifest.genesis)
        assert (marked == plain).all()


@pytest.mark.parametrize("plan", [{}, {(1, "upload"): [4]}])
def test_the_norms_that_are_opened_are_those_of_all_updates(packed: World, plan: dict[Any, Any]) -> None:
    """Bit for bit what research adds up in the clear, for the members of the attempt that succeeds; of packed updates,
    less at most what rounding took off them."""
    world = packed
    run = world.federation(losses=Losses(plan))
    sums, honest = list[Any](), run.server.finish

    def spy() -> Any:
        made = honest()
        sums.append(summed_norms(run.server))
        return made

    run.server.finish = spy  # type: ignore[method-assign]
    points = (1, 2, 3, 5) if plan else (1, 2, 3, 4, 5)
    results = {}
    for x in points:
        seed = run._seed_for(x)
        assert seed is not None
        results[x] = world.layout.encode(train(run.model, 0.01 * x, seed))
    report = run.round()
    assert report.members == points
    before = world.layout.encode(world.model)
    wanted = ideal_norms(world.layout, before, results, weights(world.manifest, points))
    less = wanted.astype(np.int64) - sums[0].astype(np.int64)
    assert (less >= 0).all()
    assert (less <= (1e-4 * wanted if run.history.packing.packs else 0)).all()
    assert wanted.size == norm_count(world.layout) == 24 + 30 + 9 + 24 + 12 + 5 + 9
    assert wanted.all()


def test_norms_are_uploaded_where_the_mark_needs_them_and_only_there(world: World) -> None:
    size = packing.elements(world.layout.size, 2)
    assert {member.length() for member in world.members().values()} == {size + norm_count(world.layout)}
    assert {member.length() for member in world.members(mark=False).values()} == {size}
    free = World(strength={"rule": "rho", "rho": "0.05", "alike": "mark", "dither": "0"})
    assert {member.length() for member in free.members().values()} == {size}
    run = free.federation()
    assert [run.round().marked for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("alike", ["skip", "mark"])
def test_a_row_that_moves_alike_at_all_members_gets_no_mark(alike: str) -> None:
    """By the protocol's own sums, and with members who look at nothing but what is public."""
    world = World(strength={"rule": "rho", "rho": "0.05", "alike": alike, "dither": "0"})

    def training(model: Model, data: float, seed: int) -> Model:
        """Row 4 gets no gradient: it moves by the sign of its weights, further at members with more data."""
        moved = train(model, data, seed)
        row = model["a.weight"][4]
        return {**moved, "a.weight": np.vstack([moved["a.weight"][:4], [row - np.float32(data) * np.sign(row)],
                                                moved["a.weight"][5:]])}  # fmt: skip

    members = world.members(training)
    for member in members.values():
        member.history = History(world.manifest, world.layout, world.layout.encode(world.model))
    run = world.federation(members=members)
    for _ in range(4):
        assert not run.round().given_up
    assert members[2].history is not None
    amplitudes = members[2].history.amplitudes()
    _, place = next(iter(world.layout.spans("carrier")))
    rows = amplitudes.vector[place].reshape(24, 30)
    assert [i for i, row in enumerate(rows) if not row.any()] == ([4] if alike == "skip" else [])


def test_a_sum_of_norms_that_cannot_be_leaves_its_tensors_as_they_were(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An opened sum always has a successor: what is right of it counts, what is not keeps its weights."""
    run = world.federation()
    for _ in range(2):
        run.round()
    before, rho = run.model, run.history.mark.rho
    plain = average(world, run, (1, 2, 3, 4, 5))
    wanted = world.layout.unflatten(plain.astype(np.float32), before)
    with monkeypatch.context() as patch:
        patch.setattr(member_module, "upload_norms", lambda layout, *_: field.random(norm_count(layout)))
        report = run.round()
    assert not report.given_up
    assert report.held == CARRIERS
    assert (report.marked, run.history.mark.rho) == (False, rho)
    assert all((run.model[name] == before[name]).all() for name in CARRIERS)
    assert np.abs(run.model["a.bias"] - wanted["a.bias"]).max() < 1e-6
    assert np.abs(run.model["a.bias"] - before["a.bias"]).min() > 0
    assert set(run.round().excluded_codes.values()) == {"round.stood-still"}
    consent(run)
    # where all of it is right, nothing is held; a state whose carriers stood still has nothing to be hidden in
    reports = [run.round() for _ in range(3)]
    assert not any(report.given_up or report.held for report in reports)
    assert [report.marked for report in reports] == [False, True, True]


@pytest.mark.parametrize("defended", [True, False])
def test_a_helper_that_makes_the_model_stand_still_gets_no_second_sum(
    defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a marked round it sends norms out of range for every carrier, which all keep their weights then. The next
    round, from the same weights, has no mark: where training repeats itself, the difference is every sign."""

    def repeating(model: Model, data: float, seed: int) -> Model:  # noqa: ARG001 - it depends on the carriers alone
        drawn = zlib.crc32(b"".join(model[name].tobytes() for name in CARRIERS)) + round(data * 100)
        return train(model, data, drawn)

    world = World(strength={"rho": "0.05", "c_max": "0.03", "dither": "0"})
    run, layout = world.federation(members=world.members(repeating)), world.layout
    liar = run.members[2]
    true_fill, opened, lies = liar._fill, list[Any](), [False]

    def fill(y: Any, norms: Any, *others: Any) -> None:
        true_fill(y, norms, *others)
        if lies[0]:
            norms[:] = field.P // 2

    true_finish = run.server.finish

    def finish() -> Model:
        made = true_finish()
        opened.append(field.to_signed(field.sub(summed(run.server), run.history.mark.model)))
        return made

    liar._fill = fill  # type: ignore[method-assign,assignment]
    run.server.finish = finish  # type: ignore[method-assign]
    if not defended:
        monkeypatch.setattr(member_module.RoundMember, "_check_moved", lambda *_: None)
    for _ in range(2):
        run.round()
    amplitudes, lies[0] = run.history.amplitudes().vector, True
    assert run.round().held
    lies[0] = False
    second = run.round()
    if defended:
        assert second.given_up
        assert set(second.excluded_codes.values()) == {"round.stood-still"}
        return
    assert not second.marked
    key = np.where(world.manifest.genesis.whitening(0, layout.coordinates), -world.key(), world.key())
    marked, difference = amplitudes > 0, (opened[-2] - opened[-1])[: layout.coordinates]
    assert (np.sign(difference[marked]) == key[marked]).mean() > 0.99


@pytest.mark.parametrize(("count", "code"), [("1", "round.not-encodable"), ("2", "round.does-not-fit")])
def test_an_update_whose_norms_do_not_fit_excludes_its_member(count: str, code: str) -> None:
    world = World(policy={"sums": "unchecked", "packing": count})

    def training(model: Model, data: float, seed: int) -> Model:
        good = train(model, data, seed)
        if data == 0.03:
            good["a.weight"][0] = 4e5  # each of them fits
        return good

    report = world.federation(members=world.members(training)).round()
    assert report.members == (1, 2, 4, 5)
    assert report.excluded_codes == {3: code}


def test_two_runs_with_one_seed_are_one(world: World) -> None:
    runs = [world.federation() for _ in range(2)]
    for run in runs:
        for _ in range(5):
            run.round()
    assert (vector(runs[0]) == vector(runs[1])).all()
    assert runs[0].history.mark.digest() == runs[1].history.mark.digest()
    other = world.federation(seed=4)
    other.round()
    assert not (vector(other) == vector(runs[0])).all()


def test_without_a_research_seed_the_order_comes_from_the_operating_system(world: World) -> None:
    runs = [world.federation(seed=None) for _ in range(2)]
    for run in runs:
        run.round()
    assert (vector(runs[0]) == vector(runs[1])).mean() < 0.01  # a few weights may round to the same number


# --- other rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["model", "tensor"])
def test_the_papers_rule_sums_scales_first(per: str) -> None:
    world = World(strength={"rule": "paper", "c": "0.001", "c_max": "0.1", "per": per})
    run = world.federation(losses=Losses({(2, "train"): [2]}))
    reports = [run.round() for _ in range(3)]
    # neither a retry nor a round that is given up moves the members' averages on twice
    averages = []
    for losses in (Losses(), Losses({(1, "upload"): [2]})):
        other = world.federation(losses=losses)
        assert other.round().attempts == 1 + bool(losses.plan)
        averages.append([other.members[x]._scale._ema for x in (1, 3, 4, 5)])  # type: ignore[union-attr]
    assert averages[0] == averages[1]
    assert all(averages[0])
    once = {x: list(member._scale._ema) for x, member in run.members.items() if member._scale and member._scale._ema}
    lost = world.federation(losses=Losses({(2, "train"): [2], (4, "unmask"): [1, 2]}))
    for _ in range(4):
        report = lost.round()
    assert report.given_up
    again = {x: list(member._scale._ema) for x, member in lost.members.items() if member._scale and member._scale._ema}
    assert again == once
    assert lost.round().marked  # and it goes on
    assert all(report.marked for report in reports)
    assert reports[1].members == (1, 3, 4, 5)
    key = world.key() * np.where(world.manifest.genesis.whitening(0, world.layout.coordinates), -1, 1)
    moved = (vector(run) - world.layout.flatten(world.model))[world.layout.carrying()]
    plain = world.federation(mark=False, losses=Losses({(2, "train"): [2]}))
    for _ in range(3):
        plain.round()
    unmarked = (vector(plain) - world.layout.flatten(world.model))[world.layout.carrying()]
    assert (moved - unmarked) @ key > 0


def test_the_baseline_of_a_key_for_each_member(world: World) -> None:
    """The mark of one of five is a fifth of the shared key's, weighted by its examples."""
    rng = np.random.default_rng(2)
    keys = {x: rng.choice([-1, 1], world.layout.coordinates) for x in range(1, 6)}
    members = {
        x: FederationMember(person, world.manifest, world.layout, train, 0.01 * x, own_key=keys[x])
        for x, person in enumerate(world.people, 1)
    }
    run = world.federation(members=members)
    plain = world.federation(mark=False)
    for _ in range(3):
        plain.round()
        report = run.round()
    assert report.marked
    difference = (vector(run).astype(np.float64) - vector(plain))[world.layout.carrying()]
    shares = weights(world.manifest, range(1, 6))
    found = {x: float(difference @ keys[x]) / float(shares[x]) for x in keys}
    middle = np.median(list(found.values()))
    assert all(abs(value / middle - 1) < 0.35 for value in found.values())


def test_a_run_can_be_watched(world: World) -> None:
    console = Console(record=True, width=140, force_terminal=True)
    run = world.federation(
        losses=Losses({(2, "train"): [1, 2]}), evaluate=lambda model: {"mean": model["a.bias"].mean()}
    )
    watch(run, 4, console)
    assert run.round_no == 4
    shown = Console(record=True, width=140)
    shown.print(_table(run, 4, "training", 12))
    text = shown.export_text()
    assert "training: round 4 of 4" in text
    assert "given up" in text
    assert "mean" in text
