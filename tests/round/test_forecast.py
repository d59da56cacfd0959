"""The forecast of z: from what is public, near what a verification measures, and wrong if the amplitudes are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from quorumark import codec, simulation
from quorumark.consortium.strength import Strength
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import STATISTICS, canonical_form
from quorumark.model.suspect import read_suspect
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.amplitudes import MarkState
from quorumark.round.forecast import course, expected_z
from tests.kit.federation import World

BALANCED = "balanced-anchor/v1"
SHAPES = {"a.weight": (60, 40, 3, 3), "b.weight": (120, 90), "c.weight": (10, 120)}
KEYS = 12


def trained(seed: int, rounds: int = 20, limit: int | None = None) -> tuple[MarkState, float, np.ndarray[Any, Any]]:
    """A model that walks at random, with rows that move differently, and a mark by the rule; z by its key, x."""
    rng = np.random.default_rng(seed)
    start = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}
    layout = ModelLayout.of({**start, "bias": np.zeros(9, np.float32)}, max_coordinates=limit)
    weights = np.concatenate([value.reshape(-1) for value in start.values()] + [np.zeros(9)])
    rates = np.concatenate([np.repeat(rng.uniform(0.2, 2.0, s[0]), np.prod(s[1:])) for s in SHAPES.values()])
    strength = Strength.of({"rho": "0.1", "c_max": "0.05", "alike": "mark", "dither": "0"}, layout.coordinates)
    state = MarkState(strength, layout, "rademacher", codec.encode(weights))
    key = rng.choice([-1.0, 1.0], layout.coordinates)
    for number in range(1, rounds + 1):
        amplitudes = state.amplitudes(number)
        weights[: rates.size] += 0.01 * rates * rng.normal(size=rates.size)
        weights[layout.carrying()] += amplitudes.vector.astype(np.float64) * 2.0**-40 * key
        state.advance(number, codec.encode(weights), amplitudes if amplitudes.marks else None)
    x = _form(state).astype(np.float64)
    return state, float(x @ key / np.linalg.norm(x)), x


def _form(state: MarkState, statistic: str = BALANCED) -> np.ndarray[Any, Any]:
    """By way of models as they are saved."""

    def saved(vector: Any) -> Any:
        weights, at, found = codec.decode(vector, np.float32), 0, {}
        for name, shape in SHAPES.items():
            found[name] = weights[at : at + int(np.prod(shape))].reshape(shape)
            at += int(np.prod(shape))
        return read_suspect({**found, "bias": weights[at:]})

    return canonical_form(statistic, state.layout, saved(state.model), saved(state.anchor)).x


@pytest.mark.parametrize("limit", [None, 20_000])
def test_the_forecast_is_near_what_is_measured(limit: int | None) -> None:
    """Within max(10 %, 2) in the mean over keys, whose own chance is 1/√12 there: a false alarm is 7 deviations off.
    Halved, or doubled, it is not."""
    runs = [trained(seed, limit=limit) for seed in range(KEYS)]
    measured = float(np.mean([z for _, z, _ in runs]))
    expected = float(np.mean([expected_z(state, BALANCED) for state, _, _ in runs]))
    assert measured > 8
    assert abs(expected - measured) < max(0.1 * measured, 2)
    for wrong in (0.5 * expected, 2 * expected):
        assert abs(wrong - measured) > max(0.1 * measured, 2)


def test_it_needs_no_key_and_is_the_same_for_everybody() -> None:
    state, _, _ = trained(0)
    again = MarkState.from_bytes(
        state.to_bytes(), state.strength, state.layout, "rademacher", state.model, state.anchor
    )
    assert expected_z(state, BALANCED) == expected_z(again, BALANCED)


def test_before_there_is_a_mark_nothing_is_expected() -> None:
    state, _, _ = trained(0, rounds=2)
    assert not state.embedded().any()
    assert expected_z(state, BALANCED) == 0.0


def test_what_was_embedded_is_known_weight_by_weight() -> None:
    """Against the sum of all rounds' amplitudes, which the state does not keep."""
    rng = np.random.default_rng(3)
    layout = ModelLayout.of({"w": np.zeros((50, 40), np.float32)})
    strength = Strength.of({"rho": "0.1", "c_max": "0.05", "alike": "mark", "dither": "0"}, layout.coordinates)
    weights = rng.normal(size=layout.size)
    state, total = MarkState(strength, layout, "rademacher", codec.encode(weights)), np.zeros(layout.size)
    for number in range(1, 16):
        amplitudes = state.amplitudes(number)
        total += amplitudes.vector * 2.0**-40
        weights = weights + rng.normal(0, 0.01, (50, 1)).repeat(40, 1).reshape(-1) * rng.normal(size=layout.size)
        state.advance(number, codec.encode(weights), amplitudes if amplitudes.marks else None)
    known = state.embedded()
    assert known.sum() == pytest.approx(total.sum(), rel=1e-6)
    assert np.corrcoef(known, total)[0, 1] > 0.95  # the least of sums is not the sum of the least


@pytest.mark.parametrize("statistic", sorted(STATISTICS))
def test_every_statistic_has_a_forecast(statistic: str) -> None:
    state, _, _ = trained(1)
    assert 1 < expected_z(state, statistic) < 60


# --- is the run on course? ---


def on_course(
    done: int, planned: int, z: float, rho: float = 0.02, threshold: float = 6.0, spent: float = 0.0, **settings: str
) -> Any:
    strength = Strength.of({"rho": "0.1", "c_max": "0.03", **settings}, 150_000)
    return course(strength, threshold, done, planned, z, rho, coordinates=150_000, spent=spent)


def test_a_run_on_course_for_too_little_says_so_as_soon_as_it_can_be_known() -> None:
    assert on_course(4, 30, 1.0).final_z == 0  # the mark has hardly begun
    weak = on_course(5, 30, 4.0)
    assert 4 < weak.final_z < 10
    assert weak.advice
    assert "--strength c_max=" in weak.advice
    strong = on_course(5, 30, 8.0)
    assert strong.final_z > 10
    assert strong.advice == ""
    assert on_course(5, 30, 8.0, threshold=20.0).advice  # a higher threshold wants more
    assert on_course(5, 0, 4.0).advice == ""  # nobody said how long
    assert on_course(3, 3, 2.0).final_z == 2.0  # a run that is over


def test_what_the_rule_will_stop_at_limits_what_is_expected() -> None:
    """Near ρ* no more is to come, however many rounds are left; and more rounds are advised only where they help."""
    free, stopped = on_course(10, 60, 5.0, rho=0.02), on_course(10, 60, 5.0, rho=0.099)
    assert stopped.final_z == pytest.approx(5.0 * 0.1 / 0.099, rel=1e-6)
    assert free.final_z > 1.5 * stopped.final_z
    assert "rounds instead" in on_course(10, 12, 8.0).advice
    assert "rounds instead" not in stopped.advice


def test_a_leak_that_is_used_up_limits_what_is_expected() -> None:
    """Eight marked rounds took half of it: the mark ends after eight more. Where nothing is left, z stays."""
    free, half, over = (on_course(10, 60, 7.0, spent=spent) for spent in (0.0, 0.5, 1.0))
    assert over.final_z == pytest.approx(7.0)
    assert half.final_z == pytest.approx(on_course(10, 18, 7.0).final_z)
    assert over.final_z < half.final_z < free.final_z
    assert "rounds instead" in on_course(10, 12, 7.0).advice
    assert "rounds instead" not in over.advice
    assert "a lower learning rate" in over.advice  # it is at a fifth of ρ*, and no mark is to come
    assert "a lower learning rate" not in half.advice + on_course(10, 60, 7.0, rho=0.09, spent=1.0).advice


def test_a_federation_says_so_in_its_reports_its_events_and_its_last_line(tmp_path: Path) -> None:
    """1,476 carrying weights are too few, and the run says so from round 5 on; without a mark nothing is said."""
    world = World()
    run = world.federation(folder=tmp_path / "run")
    console = Console(record=True, width=200)
    simulation.watch(run, 7, console)
    assert [bool(report.advice) for report in run.reports] == [False] * 4 + [True] * 3
    assert all(0 < report.final_z < 10 for report in run.reports[4:])
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["advice"] for event in events] == [report.advice for report in run.reports]
    shown = console.export_text()
    assert (shown.count("on course for"), shown.count("has come to")) == (
        1,
        1,
    )  # as soon as it is known, and at the end
    assert f"z = {run.reports[-1].expected_z:.1f}" in simulation.summary(run)
    plain = world.federation(mark=False)
    list(plain.rounds(6))
    assert not any(report.advice or report.final_z for report in plain.reports)
    assert simulation.summary(plain) == ""


# --- weight decay ---


def decayed(seed: int, told: bool, rounds: int = 60, lost: float = 0.05) -> tuple[MarkState, float]:
    """A random walk whose weights shrink by a twentieth in each round, as weight decay does it."""
    rng = np.random.default_rng(seed)
    layout = ModelLayout.of({"w": np.zeros((150, 120), np.float32)})
    settings = {"rho": "0.1", "c_max": "0.1", "alike": "mark", "dither": "0", **({"decay": str(lost)} if told else {})}
    weights, key = rng.normal(0, 0.1, layout.size), rng.choice([-1.0, 1.0], layout.size)
    state = MarkState(Strength.of(settings, layout.coordinates), layout, "rademacher", codec.encode(weights))
    known = KnownKey(key.astype(np.int8), layout, TensorsInMemory.of(layout, weights.copy()))
    for number in range(1, rounds + 1):
        amplitudes = state.amplitudes(number)
        weights = (1 - lost) * weights + rng.normal(0, 0.02, layout.size)
        weights += amplitudes.vector * 2.0**-40 * key
        state.advance(number, codec.encode(weights), amplitudes if amplitudes.marks else None)
    return state, known.z(TensorsInMemory.of(layout, weights))


def test_weight_decay_takes_the_mark_along_and_the_forecast_knows() -> None:
    """Told of the decay it is right in the mean over eight keys (± 0.35); not told, it is not."""
    for told in (True, False):
        runs = [decayed(seed, told) for seed in range(8)]
        measured = float(np.mean([z for _, z in runs]))
        expected = float(np.mean([expected_z(state, BALANCED) for state, _ in runs]))
        near = abs(expected - measured) < max(0.1 * measured, 2)
        assert near == told, (told, expected, measured)


def test_the_leak_is_limited_however_much_decays() -> None:
    """Decay would let the rule add a new mark in every round, for ever; who sees all updates adds them up."""
    state, _ = decayed(1, told=True, rounds=150)
    assert 0.5 * state.leak_limit < state.leak <= 1.02 * state.leak_limit
    short, _ = decayed(1, told=True, rounds=40)
    assert short.leak <= state.leak < 0.2
