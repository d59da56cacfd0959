"""What members on machines of their own tell of the mark that is left, from the noise that each of them keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.consortium.keystore import SealedReader, Unlock
from quorumark.errors import KeystoreError
from quorumark.node.standing import standing
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.survival import Step, Survival, Tracer, middle
from quorumark.simulation import Federation, FederationMember, Losses
from tests.kit.commands import run
from tests.kit.flowers import Consortium, Model
from tests.kit.loopback import SEED, Course, Loopback

BALANCED = "balanced-anchor/v1"
SHAPES = {"a.weight": (100, 60), "b.weight": (120, 100)}
NOISY = {"rho": "0.1", "c_max": "0.1"}  # and dither 3, as by default
ROUNDS = 15  # members are asked in rounds 5, 10 and 15


def big() -> Model:
    rng = np.random.default_rng(8)
    model: Model = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {**model, "bias": np.zeros(100, np.float32)}


def wander(model: Mapping[str, Any], data: float, seed: int, rate: float) -> Model:  # noqa: ARG001
    """Steps at random, and a tenth of the way back to where training began."""
    rng, start = np.random.default_rng(seed & (1 << 63) - 1), big()
    return {
        n: (w + 0.02 * rng.standard_normal(w.shape) - 0.1 * (w - start[n])).astype(np.float32) for n, w in model.items()
    }


def world(folder: Path, count: int = 5, threshold: int = 3, c_max: str = "0.1", **policy: str) -> Consortium:
    rules, strength = {"sums": "checked", **policy}, {**NOISY, "c_max": c_max}
    make = Consortium.make if count == 5 else Consortium.deal
    return make(folder, count, threshold, model=big(), strength=strength, policy=rules)


def z_of(of: Consortium, model: Mapping[str, Any]) -> float:
    shares = {}
    for x in range(1, of.terms.threshold + 1):
        home, unlock = of.home(x)
        share = home.only_consortium().share(unlock)
        shares[x] = np.concatenate(list(share.pieces()))
    assert of.manifest is not None
    return KnownKey.from_shares(of.manifest, shares, of.layout, TensorsInMemory(of.model)).z(model)


class Traced(Federation):
    """The same run in one process, in which each member's noise is followed by itself, round by round."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.alone = {x: Tracer(self.layout.coordinates, self.history.strength.dither) for x in self.members}
        self.found: list[dict[int, Survival | None]] = []

    def _accept(self, weights: Any, report: Any) -> None:
        members, embedded, step = self.server.members, self.server.settled.embedded, Step(self.history.mark)
        noise = {x: self.members[x].noise(members) for x in members}
        super()._accept(weights, report)
        for x, tracer in self.alone.items():
            tracer.follow(step, self.history.mark, [noise[x]] if x in noise else [], embedded)
        self.found.append({x: tracer.survival(self.history.mark, BALANCED) for x, tracer in self.alone.items()})


def traced(of: Consortium, losses: Mapping[tuple[int, str], list[int]], rounds: int) -> Traced:
    assert of.manifest is not None
    members = {}
    for x in range(1, of.count + 1):
        home, unlock = of.home(x)
        share = home.only_consortium().share(unlock)
        members[x] = FederationMember(home.identity(unlock), of.manifest, of.layout, wander, 0.01, share)
    run = Traced(of.manifest, of.layout, of.model, members, seed=SEED, losses=Losses(losses))
    list(run.rounds(rounds))
    return run


def told_in(wire: Loopback, number: int) -> dict[int, Survival]:
    """What members told in a round, counted from 1."""
    said = {x: Survival.said(r.get("survival"), r.get("survival-error")) for x, r in wire.ready[number - 1].items()}
    return {x: found for x, found in said.items() if found is not None}


# who joins late, who misses rounds, who does not upload, who does not answer
GONE: dict[tuple[int, str], list[int]] = {
    **{(number, "train"): [5] for number in range(1, 6)},
    (8, "train"): [4],
    (9, "train"): [4],
    (7, "upload"): [2],
    (11, "unmask"): [3],
}


@pytest.mark.parametrize(
    "policy",
    [
        {"packing": "1"},
        {"packing": "2"},
        {"packing": "4"},
        {"sums": "unchecked"},
        {"optimiser": "fedavgm:server_momentum=0.5"},
        {"optimiser": "fedadam:eta=0.01"},
    ],
    ids=str,
)
def test_each_member_tells_what_its_own_noise_says(tmp_path: Path, policy: dict[str, str]) -> None:
    """The same numbers as where all is in one process, whoever joins late or is lost; and the figure to count on is the
    z that the key finds. A key's chance and the noise's: 4.5 deviations, one false alarm in 10^5."""
    options: dict[str, Any] = dict(policy)
    of = world(tmp_path, **options)
    course = Course(of, Loopback(of, training=wander, lost=GONE), ROUNDS)
    reports = course.go(ROUNDS)
    same = traced(of, GONE, ROUNDS)
    assert all((course.model[name] == same.model[name]).all() for name in SHAPES)  # the same run, bit for bit
    optimised = "optimiser" in policy
    for number in (5, 10, 15):
        told, right = told_in(course.wire, number), same.found[number - 2]
        here = {x for x, found in right.items() if found is not None} & course.wire.ready[number - 1].keys()
        # 4 was gone before it heard what became of round 7, and its noise there counts for nothing; under an optimiser
        # who missed rounds begins anew; where sums are unchecked, 3 did not answer and cannot say that it had a part
        unlike = {4} if number > 5 else set()
        unlike |= {5} if optimised else {3} if policy.get("sums") == "unchecked" and number > 11 else set()
        assert told.keys() - unlike == here - unlike
        for x in told.keys() - unlike:
            assert told[x].part == pytest.approx(right[x].part, abs=0.011)  # type: ignore[union-attr]
            assert told[x].error == pytest.approx(right[x].error, abs=0.011)  # type: ignore[union-attr]
    assert len(told_in(course.wire, 15)) >= (3 if optimised else 5)  # who began anew may know too little yet
    assert not any(told_in(course.wire, number) for number in (1, 4, 6, 14))  # nobody was asked
    last, z = reports[-1], z_of(of, course.model)
    assert (last.survival, last.survival_error) == _pair(middle(list(told_in(course.wire, 15).values())))
    assert abs(last.corrected_z - z) < 4.5 * (1 + last.corrected_error**2) ** 0.5
    if "fedadam" not in policy.get("optimiser", ""):  # whose steps hardly take anything back here
        assert last.survival + 2 * last.survival_error < 1
        assert abs(last.expected_z - z) > 4.5
    assert f"a verification should find z = {last.corrected_z:.1f}" in course.rounds.last_line()


def _pair(found: Survival | None) -> tuple[float, float]:
    assert found is not None
    return found.part, found.error


def test_reports_are_of_the_model_that_a_round_made(tmp_path: Path) -> None:
    """Forecast and ρ are those of the run in one process, where the model is known: the last round's, too."""
    of = world(tmp_path)
    course = Course(of, Loopback(of, training=wander), 8)
    reports, same = course.go(8), traced(of, {}, 8)
    assert [report.expected_z for report in reports] == [report.expected_z for report in same.reports]
    assert [report.rho for report in reports] == [report.rho for report in same.reports]
    assert reports[-1].expected_z > 5
    assert course.server.round_no == 8  # and nobody was asked for anything more


def test_a_member_sees_what_its_last_model_came_to(tmp_path: Path) -> None:
    """`consortium show` of the manifest in its home: the model that it trained from last, and what it told of that."""
    of = world(tmp_path)
    place = of.home(1)[0].only_consortium()
    before = run({}, "consortium", "show", str(place.manifest_path))
    assert "last model" not in before.stdout
    course = Course(of, Loopback(of, training=wander), 8)
    reports = course.go(8)
    found = standing(place)
    assert found is not None
    rounds, outlook = found
    assert (rounds, outlook.expected_z, outlook.rho) == (7, reports[6].expected_z, reports[6].rho)
    told = told_in(course.wire, 8)[1]
    assert (outlook.survival, outlook.survival_error) == (told.part, told.error)
    shown = " ".join(run({"COLUMNS": "200"}, "consortium", "show", str(place.manifest_path)).stdout.split())
    assert f"this member's last model: 7 rounds; a verification should find z = {outlook.corrected_z:.1f}" in shown
    assert f"{100 * told.part:.0f} ± {100 * told.error:.0f} %" in shown
    (model,) = (place.path / "rounds").glob("state-*/model.safetensors")
    model.unlink()
    assert "cannot be read" in run({"COLUMNS": "200"}, "consortium", "show", str(place.manifest_path)).stdout
    of.path.with_name("copy.json").write_bytes(of.path.read_bytes())  # nobody's home
    assert "last model" not in run({}, "consortium", "show", str(of.path.with_name("copy.json"))).stdout


@pytest.mark.slow
def test_of_cohorts_those_who_are_drawn_tell(tmp_path: Path) -> None:
    """Nine members of whom about six are drawn in each round: each knows of the rounds in which it took part."""
    of = world(tmp_path, 9, 3, cohort="6")
    course = Course(of, Loopback(of, training=wander), 20)
    reports, same = course.go(20), traced(of, {}, 20)
    assert len({report.members for report in reports}) > 5
    for number in (10, 15, 20):
        told, right = told_in(course.wire, number), same.found[number - 2]
        assert told.keys() == course.wire.ready[number - 1].keys()
        for x, found in told.items():
            assert found.part == pytest.approx(right[x].part, abs=0.011)  # type: ignore[union-attr]
            assert found.error == pytest.approx(right[x].error, abs=0.011)  # type: ignore[union-attr]
    last = reports[-1]
    assert abs(last.corrected_z - z_of(of, course.model)) < 4.5 * (1 + last.corrected_error**2) ** 0.5
    assert last.survival + 2 * last.survival_error < 1


def noise_files(of: Consortium, x: int) -> list[Path]:
    """That of the state that the member is at."""
    return list((of.home(x)[0].only_consortium().path / "rounds").glob("state-*/noise.sealed"))


def test_a_run_that_goes_on_and_a_member_that_lost_its_noise(tmp_path: Path) -> None:
    """A server that starts again asks again; a member without its file tells what it saw since, with a larger error."""
    of = world(tmp_path, c_max="0.03")  # so weak that it goes on growing
    Course(of, Loopback(of, training=wander), 10, folder=tmp_path / "run").go(8)
    noise = {x: noise_files(of, x)[0] for x in (1, 2, 3)}
    noise[1].unlink()
    noise[2].write_bytes(noise[2].read_bytes()[:500])
    again = Course(of, Loopback(of, training=wander), 15, folder=tmp_path / "run")
    again.go(7)
    told = told_in(again.wire, len(again.wire.ready))
    assert told.keys() == {1, 2, 3, 4, 5}
    assert min(told[1].error, told[2].error) > max(told[x].error for x in (3, 4, 5))
    last = again.rounds.reports[-1]
    assert abs(last.corrected_z - z_of(of, again.model)) < 4.5 * (1 + last.corrected_error**2) ** 0.5


def test_liars_move_the_figure_no_further_than_the_others_say(tmp_path: Path) -> None:
    """Two of five, the most that a threshold of three allows for. What is no number counts for nothing."""
    lies: list[Any] = [(1.0, 0.01), (-1e300, 1.0), (float("nan"), 0.1), ("0.9", 0.1), (None, None)]
    of = world(tmp_path)

    def lie(number: int, said: dict[str, Any]) -> None:
        if number in (1, 2) and "survival" in said:
            said["survival"], said["survival-error"] = lies[(course.server.round_no + number) % len(lies)]

    course = Course(of, Loopback(of, training=wander, change=lie), 10)
    for report in course.go(10):
        if report.round in (5, 10):
            told = told_in(course.wire, report.round)
            parts = [told[x].part for x in (3, 4, 5)]
            assert min(parts) <= report.survival <= max(parts)
            assert not report.excluded


def test_noise_stays_with_its_member(tmp_path: Path) -> None:
    """Sealed under its identity, nobody else's opens it, and nothing of it is in what the member sends."""
    of = world(tmp_path)
    course = Course(of, Loopback(of, training=wander), 6)
    course.go(6)
    home, unlock = of.home(1)
    (path,) = noise_files(of, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    opened = b"".join(SealedReader(path, Unlock.by_identity(home.identity(unlock))).chunks())
    assert len(opened) > 4 * 6 * of.layout.coordinates
    assert opened[100:200] not in path.read_bytes()
    other, key = of.home(2)
    with pytest.raises(KeystoreError):
        b"".join(SealedReader(path, Unlock.by_identity(other.identity(key))).chunks())
    sent = [said for ready in course.wire.ready for said in ready.values() if "survival" in said]
    assert sent
    assert all(re.fullmatch(r"-?\d+\.\d{1,2}", repr(said["survival"])) for said in sent)  # two digits


def test_nothing_is_told_without_dither_or_before_it_can_be(tmp_path: Path) -> None:
    of = Consortium.make(tmp_path, model=big(), strength={**NOISY, "dither": "0"}, policy={"sums": "checked"})
    course = Course(of, Loopback(of, training=wander), 5)
    reports = course.go(5)
    assert not any("survival" in said for ready in course.wire.ready for said in ready.values())
    assert reports[-1].corrected_z == reports[-1].expected_z > 0
    assert not reports[-1].survival_error
    assert not noise_files(of, 1)
