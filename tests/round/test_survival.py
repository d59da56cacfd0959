"""What training leaves of a mark, by members' own noise: right where the forecast is not, and nothing by others'."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark import codec, field, simulation
from quorumark.consortium.strength import Strength
from quorumark.field import Stream
from quorumark.model.layout import ModelLayout
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round import outlook, survival
from quorumark.round.amplitudes import MarkState
from quorumark.round.dither import add_dither, dither_at
from quorumark.round.forecast import expected_z
from quorumark.round.mark import check_size, ideal_mark
from quorumark.round.member import RoundMember
from quorumark.round.movement import ideal_norms
from quorumark.round.survival import Step, Survival, Tracer, middle, traced_spans
from quorumark.simulation import Losses
from tests.kit.federation import World

BALANCED = "balanced-anchor/v1"
MEMBERS, SHAPES = 5, {"a": (150, 120), "b": (120, 150)}
LAYOUT = ModelLayout.of({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})


@dataclass
class Walked:
    state: MarkState
    z: float
    all: Survival | None
    strangers: Survival | None
    each: list[Survival | None]

    @property
    def forecast(self) -> float:
        return expected_z(self.state, BALANCED)


def walked(
    seed: int, taken: float, rounds: int = 20, members: int = MEMBERS, alone: int = 0, **settings: str
) -> Walked:
    """A model that walks at random while training takes this part of everything that was added, mark and noise, back
    in each round. Strangers are as many members whose noise is not in it; so many members ask `alone` as well."""
    rng = np.random.default_rng(seed)
    strength = Strength.of({"rho": "0.1", "c_max": "0.1", "alike": "mark", **settings}, LAYOUT.coordinates)
    start = codec.decode(codec.encode(rng.normal(0, 0.1, LAYOUT.size)), np.float64)
    weights, added, key = start, np.zeros(LAYOUT.size), rng.choice(np.array([-1, 1]), LAYOUT.size)
    state = MarkState(strength, LAYOUT, "rademacher", codec.encode(weights))
    tracers = [Tracer(LAYOUT.coordinates, strength.dither) for _ in range(2 + alone)]
    for number in range(1, rounds + 1):
        amplitudes, step = state.amplitudes(number), Step(state)
        streams = [Stream(bytes([x]) * 32, "test", bytes([seed, number])) for x in range(2 * members)]
        noise = [(Fraction(1, members), stream) for stream in streams]
        new = np.zeros(LAYOUT.size, np.uint64)
        ideal_mark(new, amplitudes, key)
        for weight, stream in noise[:members]:
            add_dither(new, amplitudes, strength.dither, weight, stream)
        learnt = rng.normal(0, 0.01, LAYOUT.size) - taken * added
        added = (1 - taken) * added + codec.decode(new, np.float64)
        weights = weights + learnt + codec.decode(new, np.float64)
        embedded = amplitudes if amplitudes.marks else None
        state.advance(number, codec.encode(weights), embedded)
        asking = [noise[:members], noise[members:], *([each] for each in noise[:alone])]
        for tracer, theirs in zip(tracers, asking, strict=True):
            tracer.follow(step, state, theirs, embedded)
    known = KnownKey(key.astype(np.int8), LAYOUT, TensorsInMemory.of(LAYOUT, start))
    everybody, strangers, *each = (tracer.survival(state, BALANCED) for tracer in tracers)
    return Walked(state, known.z(TensorsInMemory.of(LAYOUT, weights)), everybody, strangers, each)


@pytest.mark.parametrize("taken", [0.0, 0.08])
def test_it_finds_what_training_took_and_the_forecast_does_not(taken: float) -> None:
    """In the mean over four keys, whose chance is 0.5 there, and the noise's 0.2; the seeds are fixed."""
    runs = [walked(seed, taken) for seed in range(4)]
    found = [run.all for run in runs if run.all is not None]
    assert len(found) == len(runs)
    forecast, z = float(np.mean([run.forecast for run in runs])), float(np.mean([run.z for run in runs]))
    corrected = float(np.mean([f.part * run.forecast for f, run in zip(found, runs, strict=True)]))
    assert z > 6
    assert abs(corrected - z) < 2.5
    assert (forecast > 1.5 * z) == bool(taken)
    assert all(each.part + 2 * each.error < 1 for each in found) == bool(taken)


def test_one_member_finds_the_same_with_a_larger_error_and_a_stranger_nothing() -> None:
    """Within four standard errors each; the seeds are fixed."""
    for seed in range(3):
        run = walked(seed, 0.08, alone=1)
        one = run.each[0]
        assert run.all is not None
        assert one is not None
        assert run.strangers is not None
        assert abs(one.part - run.all.part) < 4 * one.error
        assert one.error == pytest.approx(run.all.error * MEMBERS**0.5, abs=0.03)
        assert abs(run.strangers.part) < 4 * max(run.strangers.error, 0.01)
        assert run.all.part > 3 * run.all.error


def test_the_error_that_is_told_is_that_of_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thirty members, each by itself: their spread, which has a chance of 13 %, and three of that."""
    monkeypatch.setattr(survival, "LARGEST", 9.0)
    found = [each for each in walked(5, 0.0, rounds=12, members=30, alone=30).each if each is not None]
    assert len(found) == 30
    spread, told = float(np.std([each.part for each in found])), float(np.mean([each.error for each in found]))
    assert 0.61 < spread / told < 1.39
    assert abs(float(np.mean([each.part for each in found])) - 1) < 4 * told / 30**0.5


def test_decay_that_the_terms_name_is_no_loss() -> None:
    """What the forecast counts already is not counted again: decay takes weights, mark and noise along."""
    told = walked(1, 0.03, decay="0.03")
    assert told.all is not None
    assert abs(told.all.part - 1) < 4 * told.all.error
    assert walked(1, 0.03).all.part < 0.9  # type: ignore[union-attr]


def test_of_a_large_model_some_blocks_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for everybody, spread over all of it; the error grows as 1/√p."""
    for coordinates in (1, 4096, 1 << 20, (1 << 20) + 1, 11_173_962):
        spans = traced_spans(coordinates)
        count = sum(span.stop - span.start for span in spans)
        assert count == coordinates if coordinates <= 1 << 20 else (1 << 18) < count <= (1 << 20) + (1 << 12)
        assert spans[0].start == 0
        assert spans[-1].stop > coordinates - (1 << 12) * -(-coordinates // (1 << 20))
    whole = walked(2, 0.08).all
    monkeypatch.setattr(survival, "MOST", 12_000)
    monkeypatch.setattr(survival, "_BLOCK", 100)
    part = walked(2, 0.08).all
    assert sum(span.stop - span.start for span in traced_spans(LAYOUT.coordinates)) == 12_000
    assert whole is not None
    assert part is not None
    assert abs(part.part - whole.part) < 4 * part.error
    assert part.error == pytest.approx(whole.error * 3**0.5, abs=0.02)


def test_noise_of_another_size_or_run_is_not_gone_on_from() -> None:
    """κ may be amended: what was followed before is then in other units. So is damage noticed, and another state."""
    run = walked(1, 0.0, rounds=6)
    tracer = Tracer(LAYOUT.coordinates, run.state.strength.dither)
    data, chain = tracer.to_bytes(run.state), run.state.chain
    assert Tracer(LAYOUT.coordinates, run.state.strength.dither).restore(data, chain)
    assert not Tracer(LAYOUT.coordinates, run.state.strength.dither // 3).restore(data, chain)
    assert not Tracer(LAYOUT.coordinates - 1, run.state.strength.dither).restore(data, chain)
    assert not Tracer(LAYOUT.coordinates, run.state.strength.dither).restore(data, bytes(32))
    assert not Tracer(LAYOUT.coordinates, run.state.strength.dither).restore(data[: len(data) // 2], chain)


# --- in a federation ---

BIG = {"a.weight": (100, 60), "b.weight": (120, 100)}
NOISY = {"rho": "0.1", "c_max": "0.1"}  # and dither 3, as by default


def big() -> dict[str, Any]:
    rng = np.random.default_rng(8)
    model = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in BIG.items()}
    return {**model, "bias": np.zeros(100, np.float32)}


def wander(model: dict[str, Any], data: float, seed: int) -> dict[str, Any]:  # noqa: ARG001
    """Steps at random, and a tenth of the way back to where training began."""
    rng, start = np.random.default_rng(seed), big()
    return {
        n: (w + 0.02 * rng.standard_normal(w.shape) - 0.1 * (w - start[n])).astype(np.float32) for n, w in model.items()
    }


def world(c_max: str = "0.1", **policy: str) -> World:
    return World(model_of=big(), strength={**NOISY, "c_max": c_max}, policy={"sums": "checked", **policy})


def measured(of: World, run: simulation.Federation) -> float:
    return KnownKey.from_shares(of.manifest, of.shares, of.layout, TensorsInMemory(of.model)).z(run.model)


@pytest.mark.parametrize(
    "policy",
    [
        {"packing": "1"},
        {"packing": "2"},
        {"packing": "4"},
        {"optimiser": "fedavgm:server_momentum=0.5"},
        {"optimiser": "fedadam:eta=0.01"},
    ],
    ids=str,
)
def test_a_federation_reports_it(policy: dict[str, str]) -> None:
    """Whatever is lost, packed or stepped. A key's chance and the noise's: 4.5 deviations, one false alarm in 10^5."""
    of = world(**policy)
    losses = Losses({(5, "upload", 1): [2], (7, "train"): [4], (9, "unmask"): [5]})
    run = of.federation(members=of.members(wander), losses=losses)
    reports = list(run.rounds(14))
    last, z = reports[-1], measured(of, run)
    assert not any(report.given_up for report in reports), [report.given_up for report in reports]
    assert not reports[0].survival
    assert 0 < last.survival_error < 0.2
    told = Survival(last.survival, last.survival_error)
    assert last.corrected_z == pytest.approx(told.likely * last.expected_z)
    assert last.corrected_error == pytest.approx(told.error * last.expected_z)
    assert abs(last.corrected_z - z) < 4.5 * (1 + (last.survival_error * last.expected_z) ** 2) ** 0.5
    if "fedadam" not in policy.get("optimiser", ""):  # whose steps hardly take anything back here
        assert last.survival + 2 * last.survival_error < 1
        assert abs(last.expected_z - z) > 4.5
        assert last.final_z == pytest.approx(last.corrected_z)
        assert "has come to" in last.advice
    assert f"{100 * last.survival:.0f} ± " in simulation.summary(run)


def test_the_noise_of_other_states_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if members counted noise that they did not add: the number is about the model, not about the procedure."""
    honest = RoundMember.noise

    def of_another_state(self: RoundMember, members: Any) -> tuple[Fraction, Stream]:
        weight, _ = honest(self, members)
        return weight, Stream(bytes([self.point]) * 32, "other", self.state)

    monkeypatch.setattr(RoundMember, "noise", of_another_state)
    of = world()
    run = of.federation(members=of.members(wander))
    last = list(run.rounds(12))[-1]
    assert last.survival_error > 0
    assert abs(last.survival) < 4 * max(last.survival_error, 0.01)


def test_nothing_is_told_where_there_is_no_noise_or_too_little_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the forecast is the figure to count on; an error that is too large is told, and the part is not used."""
    quiet = World(model_of=big(), strength={**NOISY, "dither": "0"})
    plain = world()
    runs = [w.federation(members=w.members(wander, mark=mark)) for w, mark in ((quiet, True), (plain, False))]
    for run, mark in zip(runs, (True, False), strict=True):
        reports = list(run.rounds(6))
        assert not any(report.survival or report.survival_error or report.corrected_error for report in reports)
        assert all(report.corrected_z == report.expected_z for report in reports)
        assert (reports[-1].corrected_z > 0) == mark
        assert "is left" not in simulation.summary(run)
    small = World(strength=NOISY)  # 1,476 carriers, and so an error of 0.1 to 0.3
    monkeypatch.setattr(outlook, "ENOUGH", 0.05)
    unsure = small.federation()
    last = list(unsure.rounds(4))[-1]
    assert last.corrected_z == last.expected_z > 0
    assert last.survival_error > 0.05
    assert not last.corrected_error
    assert "too unsure to count on" in simulation.summary(unsure)
    monkeypatch.setattr(survival, "LARGEST", 0.05)
    assert not any(report.survival_error for report in small.federation().rounds(4))


def test_a_run_that_is_taken_up_again_goes_on_with_it(tmp_path: Path) -> None:
    """Bit for bit. Without the file, or with one of another round, it is about what is embedded from then on."""
    of = world("0.03")  # so weak that it goes on growing

    def federation(folder: str) -> simulation.Federation:
        return of.federation(members=of.members(wander), folder=tmp_path / folder)

    whole = list(federation("whole").rounds(8))
    for case in ("kept", "older", "damaged"):
        run = federation(case)
        list(run.rounds(4))
        older = (tmp_path / case / simulation.NOISE).read_bytes()
        run.round()
        file = tmp_path / case / simulation.NOISE
        assert file.stat().st_mode & 0o777 == 0o600
        if case != "kept":
            file.write_bytes(older if case == "older" else older[:500])
        taken_up = federation(case)
        assert taken_up._tracer is not None
        assert taken_up._tracer._mark.any() == (case == "kept")
        list(taken_up.rounds(8))
        again = taken_up.reports
        if case == "kept":
            assert (again[-1].survival, again[-1].survival_error) == (whole[-1].survival, whole[-1].survival_error)
        else:
            assert again[-1].survival_error > whole[-1].survival_error > 0
        events = (tmp_path / case / "events.jsonl").read_text().splitlines()
        assert json.loads(events[-1])["survival"] == again[-1].survival


# --- what members tell, put together ---


def test_what_chance_explains_is_not_corrected() -> None:
    """No factor is fitted: all of a difference from 1 that is no larger than its error is taken for chance, and less
    of a larger one; a sure one counts in full."""
    assert Survival(0.95, 0.06).likely == Survival(1.2, 0.24).likely == 1
    assert Survival(0.62, 0.24).likely == pytest.approx(1 - 0.38 * (1 - (0.24 / 0.38) ** 2))
    assert Survival(0.36, 0.02).likely == pytest.approx(0.36, abs=0.001)
    assert Survival(-0.3, 0.01).likely == 0


def test_fewer_than_half_who_lie_move_it_no_further_than_the_others_say() -> None:
    """The median; the mean, beside it, goes wherever one liar wants."""
    rng = np.random.default_rng(1)
    honest = [Survival(float(part), 0.07) for part in rng.normal(0.85, 0.07, 3)]
    for lie in (Survival(1e6, 1.0), Survival(-1e6, 0.01), Survival(1.0, 0.01)):
        found = middle([*honest, lie, lie])
        assert found is not None
        parts = [round(each.part, 2) for each in honest]
        assert min(parts) <= found.part <= max(parts)
        assert 0.03 < found.error < 0.09
    assert abs(float(np.mean([each.part for each in (*honest, Survival(1e6, 1.0))]))) > 1e5
    assert middle([]) is None
    assert middle([Survival(0.9, 0.1)]) == Survival(0.9, 0.1)


def test_the_error_of_the_median_is_that_of_the_numbers() -> None:
    """The spread of 4000 medians; three deviations of that are 3.4 %, and a median of two or three is a mean, or nearer
    to one."""
    rng = np.random.default_rng(2)
    for count, least in ((1, 0.97), (2, 0.75), (3, 0.89), (5, 0.92), (9, 0.95), (33, 0.96)):
        medians = np.median(rng.normal(0.8, 0.5, (4000, count)), axis=1)
        told = middle([Survival(0.8, 0.5)] * count)
        assert told is not None
        assert least < float(medians.std()) / told.error < 1.05


@pytest.mark.parametrize(
    ("part", "error"),
    [(None, 0.1), (0.9, None), ("0.9", 0.1), (float("nan"), 0.1), (0.9, float("inf")), (0.9, 0), (0.9, -1), (0.9, 2)],
)
def test_what_cannot_be_a_survival_counts_for_nothing(part: Any, error: Any) -> None:
    assert Survival.said(part, error) is None
    assert Survival.said(0.9, 0.1) == Survival(0.9, 0.1)


# --- what nobody can tell from public models, and what noise can tell ---


def twins(seed: int) -> tuple[MarkState, list[Survival | None], list[float]]:
    """Two runs with keys τ and τ′, to the bit the same in all that is public and in all that members report: what they
    have come to, the survivals of all noise together and of each member's own, and both z.

    In both the first four members train alike, the last one's update is exactly negated, its norms are the same: with
    h = S⊙(τ−τ′)/2, whole numbers, and X what was learnt, the members' sums are X + h − h + S⊙τ and X + h + h + S⊙τ′."""
    rng = np.random.default_rng(seed)
    strength = Strength.of({"rho": "0.1", "c_max": "0.1", "dither": "3"}, LAYOUT.coordinates)
    start = codec.decode(codec.encode(rng.normal(0, 0.1, LAYOUT.size)), np.float64)
    keys = rng.choice(np.array([-1, 1]), (2, LAYOUT.size))
    known = [KnownKey(key.astype(np.int8), LAYOUT, TensorsInMemory.of(LAYOUT, start)) for key in keys]
    states = [MarkState(strength, LAYOUT, "rademacher", codec.encode(start)) for _ in keys]
    tracers = [[Tracer(LAYOUT.coordinates, strength.dither) for _ in range(1 + MEMBERS)] for _ in keys]
    shares = {x: Fraction(1, MEMBERS) for x in range(1, MEMBERS + 1)}
    for number in range(1, 21):
        noise = [(Fraction(1, MEMBERS), Stream(bytes([x]) * 32, "twins", bytes([number]))) for x in shares]
        learnt = np.rint(rng.normal(0, 0.004, (MEMBERS - 1, LAYOUT.size)) * 2.0**40).astype(np.int64)
        sums, norms = [], []
        for run, (state, mine) in enumerate(zip(states, tracers, strict=True)):
            amplitudes, step = state.amplitudes(number), Step(state)
            half = amplitudes.vector.astype(np.int64) * (keys[0] - keys[1]) // 2
            parts = [learnt[0] + half, *learnt[1:], half if run else -half]  # of members who weigh alike: a_k·D_k
            after = {
                x: field.add(state.model, field.from_signed(MEMBERS * part))
                for x, part in zip(shares, parts, strict=True)
            }
            for model in after.values() if amplitudes.marks else ():
                check_size(strength, amplitudes, state.model, model)  # what an honest member would refuse
            total = field.add(state.model, field.from_signed(np.sum(parts, axis=0)))
            ideal_mark(total, amplitudes, keys[run])
            for weight, stream in noise:
                add_dither(total, amplitudes, strength.dither, weight, stream)
            sums.append(total)
            norms.append(ideal_norms(LAYOUT, state.model, after, shares))
            embedded = amplitudes if amplitudes.marks else None
            state.advance(number, total, embedded, norms[run])
            for tracer, asking in zip(mine, [noise, *([each] for each in noise)], strict=True):
                tracer.follow(step, state, asking, embedded)
        assert (sums[0] == sums[1]).all()
        assert (norms[0] == norms[1]).all()
    assert strength.needs_norms
    assert states[0].to_bytes() == states[1].to_bytes()
    told = [[each.survival(states[0], BALANCED) for each in mine] for mine in tracers]
    assert told[0] == told[1]
    end = TensorsInMemory.of(LAYOUT, codec.decode(states[0].model, np.float64))
    return states[0], told[0], [each.z(end) for each in known]


def test_no_function_of_what_is_public_can_be_right_for_every_run() -> None:
    """Public models, norms, amplitudes and reports are the same to the bit in a run with a mark and in one without, so
    any figure made of them is the same in both. In the mean over three pairs of keys, too, it is off in one of the two
    by half of their difference: more than max(10 %, 2), whatever the figure is. Ours is right where training treats
    mark and noise alike, as it is assumed."""
    pairs = []
    for seed in range(3):
        state, told, z = twins(seed)
        assert told[0] is not None
        assert abs(told[0].part - 1) < 4 * told[0].error < 0.6
        assert z[0] > 8
        assert abs(z[1]) < 4
        assert abs(expected_z(state, BALANCED) - z[0]) < max(0.1 * z[0], 2) + 3  # and the key's chance, 1
        pairs.append(z)
    marked, unmarked = np.mean(pairs, axis=0)
    assert (marked - unmarked) / 2 > max(0.1 * marked, 2)


SMALL = ModelLayout.of({"a": np.zeros((50, 40), np.float32)})


@dataclass
class Told:
    """A run of five members: what each could tell at its end, exactly (they round, and weigh by ∂x/∂θ, which is public
    and left out here), and what an attacker needs to use it. `along` is public: what a coordinate's noise of each round
    counts for in that number; `noise` is that of all members together, `seen` = τ + κ·noise what somebody sees who
    knows what training did to every weight; `expected` is what all their numbers come to if nothing is taken back."""

    scalars: NDArray[np.float64]
    along: NDArray[np.float64]
    expected: float
    noise: NDArray[np.float64]
    seen: NDArray[np.float64]
    as_if: float  # such a number, had the noise of the first round been the key
    z: float
    key: NDArray[np.int64]


def told_run(seed: int, rounds: int = 8) -> Told:
    rng = np.random.default_rng(seed)
    strength = Strength.of({"rho": "0.1", "c_max": "0.1", "alike": "mark", "dither": "3"}, SMALL.coordinates)
    weights = start = codec.decode(codec.encode(rng.normal(0, 0.1, SMALL.size)), np.float64)
    key = rng.choice(np.array([-1, 1]), SMALL.size)
    state = MarkState(strength, SMALL, "rademacher", codec.encode(weights))
    before: list[NDArray[np.float64]] = []
    noises: list[list[NDArray[np.float64]]] = []
    seen = []
    for number in range(1, rounds + 1):
        amplitudes, new = state.amplitudes(number), np.zeros(SMALL.size, np.uint64)
        about = bytes([seed % 256, number])
        streams = [(Fraction(1, MEMBERS), Stream(bytes([x]) * 32, "told", about)) for x in range(MEMBERS)]
        ideal_mark(new, amplitudes, key)
        for weight, stream in streams:
            add_dither(new, amplitudes, strength.dither, weight, stream)
        added, scale = codec.decode(new, np.float64), amplitudes.vector * 2.0**-40
        before, noises = [*before, weights], [*noises, []]
        for weight, stream in streams:
            noises[-1] += dither_at([slice(0, SMALL.size)], amplitudes, strength.dither, [(weight, stream)])
        seen.append(np.divide(added, scale, out=np.zeros(SMALL.size), where=scale > 0))
        weights = weights + rng.normal(0, 0.01, SMALL.size) + added
        state.advance(number, codec.encode(weights), amplitudes if amplitudes.marks else None)
    z = KnownKey(key.astype(np.int8), SMALL, TensorsInMemory.of(SMALL, start)).z(TensorsInMemory.of(SMALL, weights))
    along, each = np.array([weights - earlier for earlier in before]), np.array(noises)
    scalars, expected = np.einsum("qj,qxj->x", along, each), 3 * float(state.embedded().sum())
    return Told(scalars, along, expected, each.sum(1), np.array(seen), float(along[0] @ key), z, key)


def test_what_members_tell_goes_with_the_key_of_no_run() -> None:
    """Of 64 runs: a member's number is independent of z, of the key's own chance in it. The same number with the key in
    the noise's place, the control, is not. A correlation of 64 pairs has a deviation of 1/8: four of them."""
    runs = [told_run(seed) for seed in range(64)]
    z = [run.z for run in runs]
    for x in range(MEMBERS):
        assert abs(np.corrcoef([run.scalars[x] for run in runs], z)[0, 1]) < 4 / 8
    assert np.corrcoef([run.as_if for run in runs], z)[0, 1] > 5 / 8


def cosine(one: NDArray[np.float64], two: NDArray[Any]) -> float:
    return float(one @ two) / float(np.linalg.norm(one) * np.linalg.norm(two))


def test_to_who_knows_all_else_it_is_one_equation_of_as_many_as_there_are_weights() -> None:
    """Somebody who knows what training did to each weight sees τ + κ·g there, of every round. What all five members
    tell of g, exactly, is one equation about Q·d numbers: it takes about one part in d from the noise. Where they told
    the same by weight, the control, that would be much of it."""
    gains: dict[str, list[float]] = {"one": [], "by weight": []}
    for seed in range(8):
        run, kappa = told_run(seed), 3
        marked = np.abs(run.seen).sum(1) > 0
        along, noise, mean = run.along[marked], run.noise[marked], run.seen[marked].mean(0)
        told, size = (along * noise).sum(0), (along**2).sum(0)
        assert float(told.sum()) == pytest.approx(float(run.scalars.sum()))
        guesses = {
            "one": along
            * (float(told.sum()) - run.expected)
            / size.sum(),  # the likeliest noise that makes such numbers
            "by weight": along * told / size,
        }
        without = cosine(mean, run.key)
        assert without == pytest.approx((1 + kappa**2 / int(marked.sum())) ** -0.5, abs=0.08)
        for name, guess in guesses.items():
            gains[name].append(cosine(mean - kappa * guess.mean(0), run.key) - without)
    assert abs(float(np.mean(gains["one"]))) < 4 / SMALL.coordinates
    assert float(np.mean(gains["by weight"])) > 50 / SMALL.coordinates
