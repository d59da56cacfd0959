"""Packed rounds: several weights in one element, exactly, with the mark in them (docs/secagg.md, "Packed sums")."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from copy import copy
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quorumark import codec, field, packing
from quorumark.canonical import canonical
from quorumark.consortium.policy import Policy
from quorumark.errors import InputError, RecordError
from quorumark.model.layout import ModelLayout
from quorumark.packing import BITS
from quorumark.round import units
from quorumark.round.amplitudes import MarkState
from quorumark.round.history import packing_of
from quorumark.round.mark import weights
from quorumark.round.movement import norm_count
from quorumark.round.units import Packing, is_level, widest
from quorumark.round.update import Update
from quorumark.simulation import Federation, Losses, RoundReport
from tests.kit.counted import CountedRun, typical
from tests.kit.federation import Model, World, initial, train, vector
from tests.kit.flowers import Consortium
from tests.kit.refusals import stopped

PACKED = ("2", "3", "4")
PLAIN = {"rho": "0.05", "c_max": "0.03", "dither": "0"}


def world(packing_: str, **changes: Any) -> World:
    return World(policy={"packing": packing_}, **changes)


def results(run: Federation, points: tuple[int, ...]) -> dict[int, NDArray[np.uint64]]:
    """E of what members will train in the next round, by another way."""
    found = {}
    for x in points:
        seed = run._seed_for(x)
        assert seed is not None
        found[x] = run.layout.encode(train(run.model, 0.01 * x, seed))
    return found


def moves_of(run: Federation) -> Callable[[], list[int]]:
    """A function that gives the last opened sum, unpacked, in 2^-40, for a server before its round."""
    seen: list[list[int]] = []
    honest = run.server.finish

    def spy() -> Any:
        history, server = run.history, run.server
        count = history.packing.count
        made = honest()
        length = packing.elements(run.layout.size, count)
        if count == 1:  # a sum of whole models
            seen.append(field.to_signed(server.opened[:length]).tolist())
            return made
        spans = history.mark.spans(server.level)
        seen.append(packing.unpack(server.opened[:length], run.layout.size, spans, count)[0].tolist())
        return made

    run.server.finish = spy  # type: ignore[method-assign]
    return lambda: seen[-1]


# --- exact ------------------------------------------------------------------------------------------------


@functools.cache
def eight(count: str, sums: str) -> World:
    """Eight members of whom five must answer (t = 2)."""
    strength = {"rule": "relative", "c": "0.03", "dither": "0"}
    return World(
        8, 2, policy={"packing": count, "sums": sums}, strength=strength, examples=[100 + 7 * x for x in range(8)]
    )


@st.composite
def several_losses(draw: st.DrawFn) -> dict[tuple[str, int], set[int]]:
    """By stage and attempt: three members at most before the upload that counts, and of those who are left so many
    before they answer that five do."""
    gone = draw(st.lists(st.integers(1, 8), max_size=3, unique=True))
    stages = [("train", 1), ("upload", 1), ("upload", 2)]
    found: dict[tuple[str, int], set[int]] = {}
    for x in gone:
        found.setdefault(draw(st.sampled_from(stages)), set()).add(x)
    if ("upload", 1) not in found and ("upload", 2) in found:  # there is no second attempt without a first
        found[("upload", 1)] = found.pop(("upload", 2))
    left = [x for x in range(1, 9) if x not in gone]
    found[("unmask", 1)] = set(draw(st.permutations(left))[: draw(st.integers(0, len(left) - 5))])
    return found


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(PACKED), several_losses(), st.sampled_from(["checked", "unchecked"]), st.integers(0, 3))
def test_a_sum_is_fedavg_within_half_a_unit_for_each_member_and_the_mark_is_exact(
    count: str, lost: dict[tuple[str, int], set[int]], sums: str, earlier: int
) -> None:
    """For every set that takes part, whoever was lost on the way: |Σ a_k·Δ_k − the sum| ≤ K/2 units, and with the mark
    it is that sum plus S·τ, to the last unit."""
    made = eight(count, sums)
    plan = {(earlier + 1, stage, attempt): points for (stage, attempt), points in lost.items()}
    before = {x for (stage, _), points in lost.items() if stage != "unmask" for x in points}
    taking = tuple(x for x in range(1, 9) if x not in before)
    marked, plain = (made.federation(losses=Losses(plan), mark=mark) for mark in (True, False))
    for _ in range(earlier):
        marked.round()
    # from one state: the run without the mark goes on from where the marked one is
    history, anchor = marked.history, made.layout.encode(initial())
    start, mark_then, amplitudes = history.mark.model, copy(history.mark), history.amplitudes()
    plain.server.history.mark = MarkState.from_bytes(
        history.mark.to_bytes(), history.strength, made.layout, "rademacher", start, anchor, history.packing
    )
    plain.server.like, plain.round_no, plain.server.round_no = dict(marked.server.like), earlier, earlier
    trained, shares = results(marked, taking), weights(made.manifest, taking)
    with_mark, without = moves_of(marked), moves_of(plain)
    attempts = 1 + sum(stage == "upload" for stage, _ in lost)
    for report in (marked.round(), plain.round()):
        assert not report.given_up, report.given_up
        assert (report.members, report.attempts) == (taking, attempts)
        assert set(report.lost["unmask"]) == lost["unmask", 1]
    exact = [Fraction(0)] * made.layout.size
    for x, after in trained.items():
        moved = field.to_signed(field.sub(after, start))
        exact = [e + shares[x] * int(m) for e, m in zip(exact, moved, strict=True)]
    key = np.zeros(made.layout.size, np.int64)
    key[: made.layout.coordinates] = np.where(
        made.manifest.genesis.whitening(0, made.layout.coordinates), -made.key(), made.key()
    )
    mark = np.zeros(made.layout.size, np.int64)
    level = marked.server.level  # of those who need wider units, if they take part
    assert level == plain.server.level
    mark[: made.layout.coordinates] = mark_then.in_units(amplitudes, level).vector.astype(np.int64)
    assert amplitudes.marks == (earlier >= 2)
    mark *= key
    for place, shift in mark_then.spans(level):
        for i in range(place.start, place.stop):
            assert abs(without()[i] - exact[i]) <= Fraction(len(taking), 2) * (1 << shift) + 1
            assert with_mark()[i] - without()[i] == mark[i]


@pytest.mark.parametrize("count", ["1", *PACKED])
def test_the_mark_is_exact_for_every_set_that_may_take_part(count: str) -> None:
    """All 22 sets of four, five or six of six members (T = 4), from one state: the opened sum with the mark is the one
    without it plus S·τ, whatever coefficients the set gives its members."""
    made = World(6, 2, policy={"packing": count}, strength={"rule": "relative", "c": "0.03", "dither": "0"},
                 examples=[90, 100, 95, 110, 105, 98])  # fmt: skip
    before = made.federation()
    for _ in range(2):
        assert not before.round().given_up
    history, anchor = before.history, made.layout.encode(initial())
    record, start, like = history.mark.to_bytes(), history.mark.model, dict(before.server.like)
    d = made.layout.coordinates
    signs = np.where(made.manifest.genesis.whitening(0, d), -made.key(), made.key())
    expected = np.zeros(made.layout.size, np.int64)
    expected[:d] = history.amplitudes().vector.astype(np.int64) * signs
    assert np.count_nonzero(expected) > d / 2

    def sum_of(taking: tuple[int, ...], mark: bool) -> list[int]:
        run = made.federation(losses=Losses({(3, "train"): set(range(1, 7)) - set(taking)}), mark=mark)
        run.server.history.mark = MarkState.from_bytes(
            record, history.strength, made.layout, "rademacher", start, anchor, history.packing
        )
        run.server.like, run.round_no, run.server.round_no = dict(like), 2, 2
        moves = moves_of(run)
        report = run.round()
        assert (report.given_up, report.members, report.marked) == ("", taking, mark)
        return moves()

    for size in (4, 5, 6):
        for taking in combinations(range(1, 7), size):
            difference = np.subtract(sum_of(taking, True), sum_of(taking, False))
            assert np.array_equal(difference, expected), taking


@st.composite
def federations(draw: st.DrawFn) -> tuple[World, set[int], str, list[int]]:
    """Members with numbers of examples of their own, a model of a few tensors, and who is lost when."""
    members = draw(st.integers(4, 7))
    shapes = draw(st.lists(st.sampled_from([(1,), (7,), (3, 5), (4, 1), (2, 3, 3, 3)]), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    model = {
        f"{i}.{'weight' if len(shape) > 1 else 'bias'}": (
            rng.standard_normal(shape) * 2.0 ** draw(st.integers(-8, 4))
        ).astype(np.float32)
        for i, shape in enumerate([(3, 4), *shapes])
    }
    model["steps"] = np.array(7, np.int64)
    counts = [draw(st.integers(70, 130)) for _ in range(members)]
    made = World(members, 2, model_of=model, policy={"packing": draw(st.sampled_from(PACKED))}, examples=counts)
    return made, draw(st.sets(st.integers(1, members), max_size=1)), draw(st.sampled_from(["train", "upload"])), counts


@settings(max_examples=15, deadline=None)
@given(federations(), st.integers(1, 3))
def test_a_sum_is_fedavg_for_all_shapes_weights_members_and_losses(
    drawn: tuple[World, set[int], str, list[int]], rounds: int
) -> None:
    """Σ n_k·Δ_k/Σ n_k in fractions, within half a unit for each member of each tensor."""
    made, lost, stage, counts = drawn
    run = made.federation(losses=Losses({(rounds, stage): lost}), mark=False)
    opened = moves_of(run)
    for number in range(1, rounds + 1):
        taking = tuple(x for x in range(1, len(counts) + 1) if number < rounds or x not in lost)
        trained, mark = results(run, taking), copy(run.history.mark)
        report = run.round()
        assert not report.given_up, report.given_up
        assert (report.members, report.held) == (taking, ())
        total = sum(counts[x - 1] for x in taking)
        moved = {x: field.to_signed(field.sub(after, mark.model)).tolist() for x, after in trained.items()}
        for place, shift in mark.spans(run.server.level):
            for i in range(place.start, place.stop):
                exact = sum(Fraction(counts[x - 1], total) * moved[x][i] for x in taking)
                assert abs(opened()[i] - exact) <= Fraction(len(taking), 2) * (1 << shift) + 1


# --- updates that are larger than expected ----------------------------------------------------------------


class Scaled:
    """Training whose steps are `sizes[round]` times as large, for members in `only` (all if None); and other faults."""

    def __init__(self, sizes: dict[int, float], only: set[int] | None = None, tensors: tuple[str, ...] = ()) -> None:
        self.sizes, self.only, self.tensors = sizes, only, tensors

    def __call__(self, model: Model, data: float, seed: int, round_no: int) -> Model:
        mine = self.only is None or round(data / 0.01) in self.only
        factor = np.float32(self.sizes.get(round_no, self.sizes.get(0, 1.0)) if mine else 1.0)
        made = train(model, data, seed)
        chosen = self.tensors or tuple(name for name in model if name != "steps")
        return {k: model[k] + factor * (v - model[k]) if k in chosen else v for k, v in made.items()}


def runs(count: str, training: Any, rounds: int, **options: Any) -> tuple[Federation, list[RoundReport]]:
    """Rounds that must all be finished at once, each with the average of the members' models, within the units and the
    mark; nobody trains twice."""
    made, trained = world(count, strength=PLAIN), list[int]()

    def counted(model: Model, data: float, seed: int, round_no: int) -> Model:
        trained.append(round_no)
        made: Model = training(model, data, seed, round_no)
        return made

    run, reports = made.federation(members=made.members(counted, **options)), []
    for _ in range(rounds):
        expected, mark, largest = _average(made, run, training), run.history.mark, run.history.amplitudes()
        spans_at, before = mark.packing.spans, (mark._reach or units.first_reach(run.layout, mark.model), mark._lift)
        reports.append(run.round())
        assert not reports[-1].given_up, reports[-1].given_up
        assert reports[-1].attempts == 1
        assert trained.count(run.history.mark.round) == 5
        found = vector(run).astype(np.float64)
        level = run.server._running().plan.level
        for place, shift in spans_at(run.layout, *before, level):
            off = np.abs(found[place] - expected[place]).max()
            unit, most = 2.0 ** (shift - 40), np.abs(expected[place]).max()
            assert off <= 2.5 * unit + largest.vector.max() / 2**40 + 2.0**-23 * most
    return run, reports


def _average(made: World, run: Federation, training: Any) -> NDArray[np.float64]:
    out = np.zeros(made.layout.size)
    for x, share in weights(made.manifest, range(1, 6)).items():
        seed = run._seed_for(x)
        trained = training(run.model, 0.01 * x, seed, run.history.round)
        out += float(share) * made.layout.flatten(trained).astype(np.float64)
    return out


def unit_of(run: Federation, name: str) -> float:
    """Of the next round, as it begins."""
    places = {
        spec.name: shift for (spec, _), (_, shift) in zip(run.layout.spans(), run.history.mark.spans(), strict=True)
    }
    return float(2.0 ** (places[name] - 40))


@pytest.mark.parametrize("count", PACKED)
def test_warm_up_and_a_step_of_ten_cost_no_round(count: str) -> None:
    rates = {1: 0.01, 2: 0.05, 3: 0.2, 4: 1.0, 5: 1.0, 6: 10.0, 7: 10.0}
    run, reports = runs(count, Scaled(rates), 7)
    assert all(report.members == (1, 2, 3, 4, 5) for report in reports)
    # units follow: they are a thousandth of the last move or less
    assert unit_of(run, "a.weight") < 0.01 * 0.5


@pytest.mark.parametrize("count", PACKED)
def test_one_member_with_updates_a_hundred_times_as_large(count: str) -> None:
    """Without the mark, which is too strong then for the others' updates: `test_caution.py` has it."""
    run, reports = runs(count, Scaled({0: 100.0, 1: 1.0}, only={3}), 6, mark=False)
    assert all(report.members == (1, 2, 3, 4, 5) for report in reports)
    assert {x for report in reports for x in report.widened} <= {3}
    assert reports[1].widened or count == "2"
    assert not reports[5].widened  # what members need is known by then
    assert run.history.mark.round == 6


@pytest.mark.parametrize("count", PACKED)
def test_running_statistics_that_jump_widen_their_own_units_only(count: str) -> None:
    """`a.bias` stands for them: it is no carrier."""
    run, reports = runs(count, Scaled({4: 5000.0}, tensors=("a.bias",)), 12)
    assert reports[3].widened == dict.fromkeys(range(1, 6), 1)
    assert reports[3].marked
    assert not any(report.widened for report in reports[4:])
    assert unit_of(run, "a.bias") < 0.01 * (0.1 if count == "4" else 0.01)  # and they come back


@pytest.mark.parametrize("count", PACKED)
def test_a_network_whose_running_variance_jumps_loses_nothing(count: str) -> None:
    """PyTorch's BatchNorm after inputs that are 300 times as large: its variance moves by thousands. No round is lost,
    the variance is the members' average within its units, and the layers' own units stay as they were."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))

    def step(model: Any, data: float, seed: Any, round_no: int) -> Any:
        net.load_state_dict(model)
        net.train()
        torch.manual_seed(seed & (1 << 62) - 1)
        size = 300.0 if round_no == 4 else 1.0
        optimiser = torch.optim.SGD(net.parameters(), lr=data / 10)
        for _ in range(3):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(size * torch.randn(16, 6)), torch.randint(0, 4, (16,))).backward()
            optimiser.step()
        return {name: tensor.clone() for name, tensor in net.state_dict().items()}

    made = world(count, model_of={name: tensor.clone() for name, tensor in net.state_dict().items()}, strength=PLAIN)
    run = made.federation(members=made.members(step, mark=False))
    jumps = []
    for number in range(1, 8):
        shares, model = weights(made.manifest, range(1, 6)), run.model
        rounds = {x: step(model, 0.01 * x, run._seed_for(x), number)["1.running_var"].double() for x in shares}
        wanted = sum(float(share) * rounds[x] for x, share in shares.items())
        report = run.round()
        assert (report.given_up, report.members, report.held) == ("", (1, 2, 3, 4, 5), ())
        jumps.append(float((run.model["1.running_var"] - model["1.running_var"]).abs().max()))
        assert float((run.model["1.running_var"] - wanted).abs().max()) < 0.1 * max(jumps) + 1e-3
        assert all(tensor.isfinite().all() for tensor in run.model.values())
    assert jumps[3] > 1000
    assert jumps[2] < 1
    assert unit_of(run, "0.weight") < 1e-3


@pytest.mark.parametrize("count", PACKED)
def test_a_tensor_that_stood_still_for_twenty_rounds_moves_again(count: str) -> None:
    run, reports = runs(count, Scaled(dict.fromkeys(range(1, 22), 0.0), tensors=("b.weight",)), 24)
    assert set(reports[21].widened.values()) <= {1}
    places = {spec.name: place for spec, place in run.layout.spans()}
    start, place = run.layout.encode(initial()), places["b.weight"]
    moved = field.to_signed(field.sub(run.history.mark.model[place], start[place]))
    assert np.abs(moved).max() > 1 << 30


@pytest.mark.parametrize("count", PACKED)
def test_a_member_whose_update_is_no_number_is_left_out(count: str) -> None:
    class Broken(Scaled):
        def __call__(self, model: Model, data: float, seed: int, round_no: int) -> Model:
            made = train(model, data, seed)
            if round_no == 2 and round(data / 0.01) == 4:
                made["a.weight"][3, 3] = np.nan
            return made

    made = world(count)
    run = made.federation(members=made.members(Broken({})))
    run.round()
    report = run.round()
    assert not report.given_up
    assert report.members == (1, 2, 3, 5)
    assert report.excluded_codes == {4: "round.not-encodable"}
    assert np.isfinite(vector(run)).all()


@pytest.mark.parametrize("count", PACKED)
def test_an_update_beyond_the_widest_units_leaves_its_member_out(count: str) -> None:
    made = world(count)
    huge = Scaled({2: 1.0e7}, only={2})
    run = made.federation(members=made.members(huge))
    run.round()
    report = run.round()
    assert not report.given_up
    assert 2 not in report.members
    assert report.excluded_codes[2] in ("round.does-not-fit", "round.not-encodable")


@pytest.mark.parametrize("count", PACKED)
def test_the_largest_update_of_a_level_needs_it_and_one_unit_more_needs_the_next(count: str) -> None:
    made = world(count)
    run = made.federation()
    history = run.history
    start, own = history.mark.model, history.packing.own_limit
    tensors = history.tensors
    for number in range(3):
        level = bytes([number] * tensors) if number else b""
        place, shift = history.mark.spans(level)[1]
        for more in (0, 1):
            moved = field.to_signed(start.copy())
            moved[place.start + 5] += (own + more) << shift
            found = history.level(Update(run.layout, start, codec.decode(field.from_signed(moved), np.float64)))
            needed = number + more
            assert found == (bytes([0, needed, *[0] * (tensors - 2)]) if needed else b"")


# --- units ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([2, 3, 4]),
    st.integers(3, 500),
    st.integers(1, 1 << 57),
    st.integers(0, 60),
    st.integers(0, 7),
    st.sampled_from(["rademacher", "gaussian"]),
)
def test_updates_mark_dither_and_rounding_stay_within_a_part(
    count: int, members: int, reach: int, lift: int, level: int, key: str
) -> None:
    """R + K/2 + mark + dither < 2^(h−1), and R units are at least what the reach promises, up to the widest units."""
    from quorumark.consortium.strength import ONE, Strength

    layout = ModelLayout.of({"w": np.zeros((2, 2), np.float32)})
    packs = Packing(count, members)
    strength = Strength.of({"rule": "relative", "c": "0.03", "dither": "3"}, 4)
    most = packs.largest_mark(strength, key)
    largest_key = 16 if key == "gaussian" else 1
    dither = 3 * 3 * most * members**0.5
    half = 1 << (BITS[count] - 1)
    assert packs.own_limit + members / 2 + most * largest_key + dither + 1 <= half
    assert strength.dither == 3 * ONE
    ((_, shift),) = packs.spans(layout, [reach], (lift,), bytes([level]) if level else b"")
    widest_units = shift == 59 - BITS[count]
    assert widest_units or packs.own_limit << shift >= reach << (units._MARGIN[count] - 1)
    ((_, wider),) = packs.spans(layout, [reach], (lift,), bytes([min(7, level + 1)]))
    assert wider >= shift


def test_what_a_level_of_a_round_is() -> None:
    assert widest([]) == b""
    assert widest([b"", b"\1\0\3", b"\0\2\1"]) == b"\1\2\3"
    assert all(map(is_level, (b"", b"\0\7")))
    assert not any(map(is_level, (b"\0\0", b"\x08", "1", 3, None)))
    with stopped("message.malformed"):
        widest([b"\1", b"\1\1"])


def test_the_lift_learns_what_members_need_and_forgets_it() -> None:
    """A reach of 2^30 has units of 2^19 with 15 bits; 2^21 were used because a member needed them. Where the reach has
    grown to that meanwhile, nothing is lifted."""
    used = [(slice(0, 1), 21)] * 3
    lift = units.follow_lift(4, (), b"\1\0\1", used, (1 << 30, 1 << 30, 1 << 32))
    assert lift == (4, 0, 0)
    assert units.follow_lift(4, (), b"\7\7\7", [(slice(0, 1), 40)] * 3, (1 << 30,) * 3) == (10, 10, 10)
    for _ in range(4):
        lift = units.follow_lift(4, lift, b"", used, (1 << 30,) * 3)
    assert lift == ()


# --- terms ------------------------------------------------------------------------------------------------


def test_packing_is_agreed_on_and_refused_where_it_cannot_work() -> None:
    assert Policy.of({"packing": "3"}).packing == 3
    assert Policy(packing=2).as_dict()["packing"] == "2"
    assert Policy().packing == 2
    assert Policy.of({"packing": "1"}).as_dict()["packing"] == "1"
    for wrong in ("0", "5", "two", ""):
        with pytest.raises(InputError, match="packing"):
            Policy.of({"packing": wrong})
    for count in (3, 4):
        with pytest.raises(InputError, match="Gaussian"):
            Policy(packing=count).check_possible(5, 3, 100, "gaussian")
    Policy(packing=2).check_possible(5, 3, 100, "gaussian")
    with pytest.raises(InputError, match="packing"):
        Policy(packing=4).check_possible(4096, 3, 100)


# --- bytes ------------------------------------------------------------------------------------------------


def test_what_a_round_of_32_members_sends_beside_its_vectors(tmp_path: Path) -> None:
    """Real messages, all stages, counted by name and value: heads, boxes, vouchers, announcements, requests. With 11.2
    million weights that is less than 0.004 bytes a weight; `benchmarks/results/bytes.json` has them whole."""
    shapes = {"a.weight": (20, 30), "b.weight": (9, 4, 3, 3), "c.bias": (20,)}
    rng = np.random.default_rng(1)
    model: Model = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    made = Consortium.deal(tmp_path, 32, 16, model=model, policy={"sums": "checked"})
    run, everybody = CountedRun(made), range(1, 33)
    first, later = run.counted(), run.counted()
    vector = 8 * (packing_of(run.server.manifest).length(made.layout) + norm_count(made.layout) + 1)
    assert 0 < typical(later, everybody, "up") - vector < 12_000
    assert 0 < typical(later, everybody, "down") - vector < 44_000
    assert 0 < typical(first, everybody, "down") - 4 * made.layout.size < 44_000
    assert run.server.opened.size * 8 == vector
    assert 44_000 / 11.2e6 < 0.004


# --- what a member may do ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", PACKED)
def test_a_member_that_overflows_its_parts_changes_what_it_could_change_anyway(count: str) -> None:
    """It sends parts outside their range. In the sum that is another number in its own parts and one unit beside them,
    or a tensor that keeps its weights: the members' own parts of all other elements are as they were."""
    made = world(count, strength=PLAIN)
    honest, forged = made.federation(), made.federation()
    bits = BITS[int(count)]
    run = forged.members[2]
    true_fill = run._fill

    def fill(y: Any, *others: Any) -> None:
        true_fill(y, *others)
        y[0] = field.add(y[:1], np.array([1 << (bits - 1)], np.uint64))[0]  # its lowest part, by half of the range
        y[1] = field.add(y[1:2], np.array([(1 << 59) + (1 << 58)], np.uint64))[0]  # the highest one, out of it

    run._fill = fill  # type: ignore[method-assign,assignment]
    opened = [moves_of(honest), moves_of(forged)]
    reports = [honest.round(), forged.round()]
    assert not any(report.given_up for report in reports)
    length = packing.elements(made.layout.size, int(count))
    a, b = (np.array(found()).reshape(-1) for found in opened)
    differs = np.flatnonzero(a != b)
    assert {int(i) % length for i in differs} <= {0, 1}
    assert reports[1].held
    assert np.isfinite(vector(forged)).all()
    assert np.abs(vector(forged)).max() < codec.LIMIT


def test_a_state_with_units_out_of_range_is_refused() -> None:
    """A late joiner takes the state from the server: a lift of 10^11 would have it compute numbers of as many bits."""
    made = world("2", strength=PLAIN)
    run = made.federation()
    for _ in range(2):
        run.round()
    mark = run.history.mark
    about = mark.strength, made.layout, made.manifest.terms.key, mark.model, mark.anchor
    body = json.loads(mark.to_bytes())
    assert MarkState.from_bytes(mark.to_bytes(), *about).to_bytes() == mark.to_bytes()
    for name, wrong in (("lift", 10**11), ("reach", 1 << 61)):
        changed = {**body, name: [wrong] * len(body["reach"])}
        with pytest.raises(RecordError):
            MarkState.from_bytes(canonical(changed), *about)


# --- models of other types --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", PACKED)
@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_models_of_other_types_round_to_them(kind: str, count: str) -> None:
    model = {
        "a.weight": np.random.default_rng(1).standard_normal((6, 8)).astype(kind),
        "b.weight": np.random.default_rng(2).standard_normal((5, 6)).astype(np.float32),
        "count": np.array(3, np.int64),
    }
    made = world(count, model_of=model)
    run = made.federation(members=made.members(lambda m, data, seed: _step(m, data, seed)))
    for _ in range(4):
        assert not run.round().given_up
    assert run.model["a.weight"].dtype == np.dtype(kind)
    assert run.model["count"] == 3
    assert not np.array_equal(run.model["a.weight"], model["a.weight"])


def _step(model: Model, data: float, seed: int) -> Model:
    rng = np.random.default_rng(seed)
    return {
        k: (v + (data * rng.standard_normal(v.shape)).astype(v.dtype)) if v.dtype.kind == "f" else v
        for k, v in model.items()
    }


@pytest.mark.parametrize("count", PACKED)
def test_a_network_with_running_statistics_half_precision_and_tied_weights(count: str) -> None:
    """PyTorch's own tensors: BatchNorm's statistics move, its counter stays, a bfloat16 layer rounds to its type, and
    tied weights stay one."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 6, dtype=torch.bfloat16)
    )
    net.add_module("tied", torch.nn.Linear(6, 8, bias=False))
    net.tied.weight = net[0].weight
    made = world(count, model_of=net.state_dict())

    def step(model: Any, data: float, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed & (1 << 62) - 1)
        moved = {
            name: v + (data * torch.randn(v.shape, generator=generator)).to(v.dtype) if v.is_floating_point() else v + 1
            for name, v in model.items()
        }
        return {**moved, "tied.weight": moved["0.weight"]}

    run = made.federation(members=made.members(step))
    reports = [run.round() for _ in range(4)]
    assert not any(report.given_up or report.held for report in reports)
    assert reports[-1].marked
    model, start = run.model, net.state_dict()
    assert model["2.weight"].dtype == torch.bfloat16
    assert model["1.num_batches_tracked"] == 0
    assert torch.equal(model["tied.weight"], model["0.weight"])
    for name in ("0.weight", "1.running_mean", "1.running_var", "2.weight"):
        assert model[name].isfinite().all()
        assert not torch.equal(model[name], start[name])
