"""The mark under server optimisers: both the sums and the steps hide it, and the forecast knows what arrives."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import pytest

from quorumark import codec, field
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Terms, anchor_of
from quorumark.consortium.strength import ONE
from quorumark.consortium.succession import check_terms_follow
from quorumark.errors import InputError, RecordError
from quorumark.model.layout import ModelLayout
from quorumark.round.amplitudes import MarkState
from quorumark.round.applied import Applied
from quorumark.round.history import History
from quorumark.round.movement import norm_count
from tests.kit.federation import World
from tests.kit.marks import make_manifest
from tests.kit.optimised import Ran, aimless, raw_alone, run, sum_of_one, walk, without_momentum

ADAM, SHARP = "fedadam:eta=0.01", "fedadam:eta=0.01,tau=0.000000001"
CASES = [
    "fedavgm:server_momentum=0.9",
    "fedavgm:server_learning_rate=0.3",
    ADAM,
    SHARP,
    "fedyogi:eta=0.01,tau=0.000001",
    "fedadagrad:eta=0.02,tau=0.000001",
]
BARE = {"rho": "0.1", "c_max": "0.1", "dither": "0"}
CHANCE = 4 / sqrt(18_432)  # what a cosine with a key of 18,432 signs may be off by; keys are seeded


@pytest.mark.parametrize("still", [0.0, 0.5])
@pytest.mark.parametrize("text", CASES)
def test_neither_sums_nor_steps_show_the_mark(text: str, still: float) -> None:
    """No round's sum and no step above c, nor any weighted sum of all of them above 1.5·ρ; with weights that stand
    still inside moving rows as well. The forecast is what a verification finds."""
    ran = run(text, 20, 1, BARE, still, world=walk)
    assert ran.marked == 18
    for shown in (ran.raw, ran.applied):
        assert shown.loudest <= 0.1 + CHANCE
        assert max(shown.whole, shown.best) <= 0.15 + CHANCE
    assert abs(ran.expected - ran.z) <= 2 + 1  # one key: the chance of its own is a deviation of 1
    assert ran.expected > 2


@pytest.mark.parametrize("text", [SHARP, "fedyogi:eta=0.01,tau=0.000001", "fedadagrad:eta=0.02,tau=0.000001"])
def test_without_the_limit_for_steps_still_weights_show_the_key(text: str) -> None:
    """The attack: the optimiser divides what is nothing but the mark by its own size, and the step is the key's signs.
    The sums stay quiet all the while."""
    bare, kept = (run(text, 20, 1, BARE, 0.5, room=room, world=walk) for room in (raw_alone, Applied.room))
    assert bare.applied.loudest > 0.5
    assert bare.applied.whole > 0.5
    assert bare.raw.loudest < 0.1 + CHANCE
    assert max(kept.applied.loudest, kept.applied.whole) < 0.1


def test_momentum_averages_noise_and_not_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where updates are noise, the momentum's is smaller than theirs, and the mark's is not. Without both rules: that
    for the momentum in what a mark may be, and that by which a momentum that shows too much begins anew."""
    monkeypatch.setattr(Applied, "_loud", lambda _, layout, *__: np.zeros(layout.size, bool))
    text, strength = "fedavgm:server_momentum=0.9", {**BARE, "rho": "0.5", "c_max": "0.03"}
    loud, quiet = (
        run(text, 20, 2, strength, world=aimless, room=room).applied.loudest
        for room in (without_momentum, Applied.room)
    )
    assert loud > 0.1
    assert quiet < 0.03 + CHANCE


def test_with_dither_the_same_holds() -> None:
    ran = run(SHARP, 15, 1, {"rho": "0.1", "c_max": "0.1"}, 0.3, world=walk)
    assert max(ran.raw.loudest, ran.applied.loudest) <= 0.1 + CHANCE
    assert max(ran.raw.best, ran.applied.best) <= 0.15 + CHANCE


def least(axes: Any) -> list[int]:
    """Of each weight's row and column, by hand; all carriers of `walk` are matrices."""
    found: list[int] = []
    for rows, columns in axes:
        found += [min(r, c) for r in rows for c in columns]
    return found


@pytest.mark.parametrize("text", CASES)
def test_the_limits_hold_weight_by_weight(text: str) -> None:
    """In fractions: (β1·M + (1−β1)·S)·η/(√β2·r + τ) ≤ c·rms(steps), S ≤ c·rms of both, none where r is below its floor
    or nothing; and some weights are at the limit."""
    ran = run(text, 6, 3, {**BARE, "rho": "0.5"}, 0.3, world=walk)
    history = ran.history
    assert history is not None
    mark, applied = history.mark, history.mark.applied
    assert applied is not None
    amplitudes, state = history.amplitudes(), applied.state
    optimiser = state.optimiser
    c, rate = Fraction(mark.strength.c_max, ONE), Fraction(state.rate(), 1 << 40)
    beta = Fraction(state.beta(1), ONE)
    shrinks = min(Fraction(state.rate(), max(1, state.rate(0))), Fraction(1))
    steps, sums = least(applied.moved), least(mark._moved)
    near = 0
    for j in range(0, len(steps), 7):
        size, held = int(amplitudes.vector[j]), max(0, int(applied.mark[j]))
        allowed = c * steps[j] * shrinks
        assert size <= c * sums[j]
        assert size <= allowed
        if optimiser.adapts:
            root, tau = int(state.root[j]), state.tau
            if root == 0:
                assert size == 0
                continue
            kept = Fraction(1) if optimiser.name == "fedadagrad" else Fraction(state.beta(2), ONE)
            # √β2·r from below; the kernel's own bound is a unit or two lower
            lowest = Fraction(int(sqrt(kept) * root * (1 - 1e-9))) + tau
            shows = (beta * held + (1 - beta) * size) * 16 * rate * (1 << 40) / lowest
        else:
            shows = (beta * held + size) * rate
        near += bool(size) and max(shows, Fraction(size)) >= allowed * Fraction(9, 10)
        assert not size or shows <= allowed * Fraction(1_000_001, 1_000_000) + 4
    assert near > 10
    fixed = field.to_signed(field.sub(mark.model, mark.anchor))[: len(steps)] == 0
    if optimiser.adapts:
        assert fixed.sum() > 1000
        assert not amplitudes.vector[fixed].any()


def test_a_tensor_that_is_held_keeps_its_momentum_and_its_mark() -> None:
    """A sum that no model may have: weights, momentum, roots and what is known of the mark stay as they were."""
    ran = run(ADAM, 4, 1, BARE, packing="1", world=walk)  # so that one weight alone can be out of range
    history = ran.history
    assert history is not None
    before = history.copy().mark
    assert before.applied is not None
    layout, amplitudes = history.layout, history.amplitudes()
    place = next(place for spec, place in layout.spans() if spec.name == "a")
    opened = np.concatenate(
        [field.add(before.model, codec.encode(np.full(layout.size, 1e-3))), np.zeros(norm_count(layout), np.uint64)]
    )
    opened[place.start] = field.from_signed(np.array([1 << 59], np.int64))[0]
    settled = history.settle(opened, ran.model, amplitudes, norms=True)
    assert settled.held == ("a",)
    assert settled.stood
    summed = settled.encoded, settled.embedded, settled.norms
    history.accept(history.round, *summed, taken=settled.taken, stood=settled.stood)
    after = history.mark.applied
    assert after is not None
    for name in ("momentum", "root"):
        assert np.array_equal(getattr(after.state, name)[place], getattr(before.applied.state, name)[place])
        assert not np.array_equal(getattr(after.state, name), getattr(before.applied.state, name))
    for name in ("mark", "drag", "embedded"):
        assert np.array_equal(getattr(after, name)[place], getattr(before.applied, name)[place])
    assert np.array_equal(history.mark.model[place], before.model[place])
    assert not np.array_equal(history.mark.model, before.model)


def test_a_step_that_no_model_may_have_is_not_taken() -> None:
    """eta = 100 and a tiny tau lead out of range sooner or later: the tensor stays, and the sum has a successor."""
    layout = ModelLayout.of({"w": np.full((4, 4), 500_000, np.float32), "v": np.zeros((4, 4), np.float32)})
    model = {"w": np.full((4, 4), 524_000, np.float32), "v": np.zeros((4, 4), np.float32)}
    policy = {"optimiser": "fedadagrad:eta=100,tau=0.000000001"}
    agreed: dict[str, Any] = {"anchor": anchor_of(layout, model), "strength": {}, "policy": policy}
    history = History(make_manifest(layout, **agreed), layout, layout.encode(model))
    held: list[tuple[str, ...]] = []
    now = model
    for number in range(1, 9):
        opened = sum_of_one(history, {name: tensor + np.float32(0.5) for name, tensor in now.items()})
        settled = history.settle(opened, now, None, norms=False)
        history.accept(number, settled.encoded, None, None, taken=settled.taken)
        held.append(settled.held)
        now = settled.weights
    assert held[0] == ()
    assert ("w",) in held
    assert np.isfinite(now["w"]).all()


def test_running_statistics_are_averaged() -> None:
    """FedAdam's steps would make a small variance negative."""
    start = {"w": np.ones((4, 4), np.float32), "n.running_var": np.full(4, 1e-3, np.float32)}
    layout = ModelLayout.of(start)
    policy = {"optimiser": ADAM, "packing": "1"}  # so that what is summed is averaged to the last bit
    agreed: dict[str, Any] = {"anchor": anchor_of(layout, start), "strength": {}, "policy": policy}
    history = History(make_manifest(layout, **agreed), layout, layout.encode(start))
    summed = {"w": start["w"] - np.float32(1e-3), "n.running_var": start["n.running_var"] * np.float32(0.5)}
    settled = history.settle(layout.encode(summed), start, None, norms=False)
    assert np.array_equal(settled.weights["n.running_var"], summed["n.running_var"])
    assert not np.array_equal(settled.weights["w"], summed["w"])
    assert settled.taken is not None
    place = next(place for spec, place in layout.spans() if spec.name == "n.running_var")
    assert not settled.taken.after.momentum[place].any()
    assert not settled.taken.after.root[place].any()


def test_gaussian_keys_have_the_same_limits() -> None:
    """Their values have 8 fractional bits, and S has so many fewer."""
    found = {}
    for key in ("rademacher", "gaussian"):
        history = run(ADAM, 4, 1, None, packing="1", world=walk, key=key).history  # not rounded to units
        assert history is not None
        found[key] = history.amplitudes().vector
    assert found["gaussian"].any()
    assert np.array_equal(found["gaussian"], found["rademacher"] >> np.uint64(8))


@pytest.mark.parametrize(("packing", "sampled"), [("1", 900), ("2", None), ("4", None)])
def test_samples_and_packed_sums(packing: str, sampled: int | None) -> None:
    """Whole rounds with checked sums: the mark begins, ρ grows, and nothing is refused."""
    policy = {"optimiser": ADAM, "packing": packing}
    world = World(strength={"rho": "0.3", "c_max": "0.1"}, policy=policy, max_coordinates=sampled)
    federation = world.federation()
    reports = list(federation.rounds(6))
    assert not any(report.given_up or report.excluded for report in reports)
    assert [report.marked for report in reports] == [False, False, True, True, True, True]
    assert reports[-1].rho > reports[2].rho > 0


def test_warm_up_rounds_are_steps_and_count_for_no_limit() -> None:
    """Until the amendment that ends them, which begins a new state; what is counted from the anchor stays 0."""
    world = World(strength={"warmup_rounds": "2", "dither": "0"}, policy={"optimiser": ADAM})
    federation = world.federation()
    reports = list(federation.rounds(2))
    assert not any(report.given_up for report in reports)
    applied = federation.history.mark.applied
    assert applied is not None
    assert applied.state.steps == 2
    assert applied.state.momentum.any()
    assert (applied.path, applied.spent, applied.leak) == (0, 0, 0)
    assert not applied.travelled.any()


def test_members_derive_the_state_and_a_copy_of_it_goes_on_alike() -> None:
    ran = run("fedyogi:eta=0.01", 5, 1, BARE, world=walk)
    history = ran.history
    assert history is not None
    mark = history.mark
    other = history.read_mark(mark.to_bytes(), mark.model, mark.anchor, mark.vectors())
    assert other.digest() == mark.digest()
    assert other.amplitudes(6).digest() == mark.amplitudes(6).digest()
    assert np.array_equal(other.embedded(), mark.embedded())
    plain = MarkState(mark.strength, mark.layout, mark.key, mark.model)
    assert plain.chain != MarkState(mark.strength, mark.layout, mark.key, mark.model, optimiser=history.optimiser).chain
    with pytest.raises(InputError, match="taken"):
        mark.advance(6, mark.model, None)


# --- terms ------------------------------------------------------------------------------------------------


def terms(**policy: str) -> Terms:
    return make_manifest(ModelLayout.of({"w": np.zeros((4, 4), np.float32)}), policy=policy).terms


def test_terms_name_an_optimiser_with_all_its_settings_or_none() -> None:
    agreed = terms(optimiser="fedadam:eta=0.010")
    assert agreed.as_dict()["policy"]["optimiser"] == "fedadam:eta=0.01,beta_1=0.9,beta_2=0.99,tau=0.001"
    assert Terms.from_bytes(agreed.to_bytes()) == agreed
    assert "optimiser" not in terms().as_dict()["policy"]
    short = agreed.to_bytes().replace(b"fedadam:eta=0.01,beta_1=0.9,", b"fedadam:eta=0.01,")
    with pytest.raises(RecordError, match="one spelling"):
        Terms.from_bytes(short)
    for wrong in ({"optimiser": "adam"}, {"optimiser": ADAM, "sums": "unchecked"}):
        with pytest.raises(RecordError):
            terms(**wrong)
    with pytest.raises(RecordError, match="paper"):
        replace(agreed, strength={"rule": "paper", "c": "0.1"})  # type: ignore[arg-type]


def test_no_amendment_changes_the_optimiser() -> None:
    """Its state is of one optimiser: members begin anew with another one."""
    agreed = terms(optimiser=ADAM)
    for other in (Policy.of({}), Policy.of({"optimiser": "fedadam:eta=0.02"})):
        with pytest.raises(RecordError, match="optimiser"):
            check_terms_follow(replace(agreed, policy=other), agreed)


# --- the hospitals' network -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("text", ["fedavgm:server_momentum=0.9", ADAM, "fedyogi:eta=0.01", "fedadagrad:eta=0.02"])
def test_the_hospitals_network(text: str) -> None:
    """20 rounds, two seeds: z of at least 12, the forecast within max(10 %, 2), the accuracy of the same optimiser
    without the mark to 1.5 points. That is of single rounds, where one test image is 0.28 points; the means of five
    seeds and five rounds (docs/optimisers.md) are held to 0.5 points in tests/house/test_project.py."""
    pytest.importorskip("sklearn")
    marked = [run(text, 20, seed) for seed in (0, 1)]
    plain = [run(text, 20, seed, None) for seed in (0, 1)]

    def mean(runs: list[Ran], name: str) -> float:
        return float(np.mean([getattr(one, name) for one in runs]))

    z = mean(marked, "z")
    assert min(one.z for one in marked) >= 12
    assert abs(mean(marked, "expected") - z) <= max(0.1 * z, 2)
    assert abs(mean(marked, "accuracy") - mean(plain, "accuracy")) <= 0.015
    for one in marked:
        assert max(one.raw.loudest, one.applied.loudest) <= 0.1
        assert max(one.raw.best, one.raw.whole, one.applied.best, one.applied.whole) <= 0.15
