"""Runs with the strength that a plan proposes: the README's CNN by the real path, others with a known key."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quorumark as qm
from quorumark.consortium.plan import Plan
from tests.kit import zoo, zoo_runs
from tests.kit.planned import MEMBERS, Recipe, accuracy, cnn, digits, marked_run, mlp, normed, train
from tests.kit.zoo_runs import likely

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]
CNN, ROUNDS = 151_072, 30


def real_run(folder: Path, seed: int, *, mark: bool = True) -> tuple[qm.Federation, float, float]:
    """Five members, t = 3, from homes to a certificate of four answers: the run, z, and its accuracy."""
    recipe = Recipe(make=cnn)
    parts, test = digits(seed=seed)
    torch.manual_seed(seed)
    model = {name: tensor.detach().clone() for name, tensor in cnn().state_dict().items()}
    homes = [qm.Home.create(folder / str(n), f"Member {n}", key_file=folder / f"{n}.key") for n in range(MEMBERS)]
    cards = [(home.card, len(data[1])) for home, data in zip(homes, parts, strict=True)]
    terms = qm.Terms.agree("digits", 3, cards, model, rounds=ROUNDS, without_alignment=True)
    assert terms.coordinates == CNN
    qm.Home.make_key(homes, terms)
    run = qm.Federation.of_homes(homes, model, partial(_train, recipe), parts, mark=mark, seed=seed)
    assert not any(report.given_up for report in run.rounds(ROUNDS))
    right = accuracy(recipe, run.model, test)
    if not mark:
        return run, 0.0, right
    public = qm.Reference.publish(folder / "public", homes[0], model)
    query = public.ask(run.model)
    answers = [home.answer(public, run.model, query, approve=True) for home in homes[:4]]
    finding = public.combine(query, answers).finding
    assert finding.verdict == "PASSED"
    return run, float(finding.z), right


def _train(recipe: Recipe, weights: Any, data: Any, seed: int, rate: float) -> Any:
    return train(recipe, weights, data, seed, rate)


def test_the_readmes_path_reaches_what_its_plan_says(tmp_path: Path) -> None:
    """One seed of five; the forecast is within max(10 %, 2) and the key's own chance (3 deviations)."""
    run, z, right = real_run(tmp_path, 0)
    assert z >= 12
    assert right > 0.95
    last = run.reports[-1]
    assert abs(last.corrected_z - z) < 2 + 3
    assert last.survival_error > 0
    assert last.advice == ""
    assert last.final_z == pytest.approx(last.corrected_z)


@pytest.mark.slow
def test_the_readmes_path_for_five_seeds(tmp_path: Path) -> None:
    """z ≥ 12 each time, and accuracy within half a point of unmarked, or twice its standard error."""
    marked = [real_run(tmp_path / f"marked-{seed}", seed) for seed in range(5)]
    plain = [real_run(tmp_path / f"plain-{seed}", seed, mark=False) for seed in range(5)]
    assert min(z for _, z, _ in marked) >= 12
    expected = float(np.mean([run.reports[-1].corrected_z for run, _, _ in marked]))
    measured = float(np.mean([z for _, z, _ in marked]))
    assert abs(expected - measured) < max(0.1 * measured, 2)
    cost = np.array([one - other for (_, _, one), (_, _, other) in zip(marked, plain, strict=True)])
    assert abs(cost.mean()) < max(0.005, 2 * cost.std(ddof=1) / math.sqrt(len(cost)))


DECAYED = Recipe(make=mlp, optimiser="sgd", learning_rate=0.05, decay=5e-3, epochs=2)
# one round: 18 steps of rate 0.05 with momentum 0.9 from 0: 0.05·5e-3·Σ_j (1 − 0.9^j)/(1 − 0.9)
DECAY = "0.0259"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "rounds", "strength"),
    [
        pytest.param(Recipe(pull=0.1), 30, {}, id="FedProx"),
        pytest.param(Recipe(split="classes"), 30, {}, id="non-IID"),
        pytest.param(Recipe(make=mlp), 30, {}, id="MLP"),
        pytest.param(Recipe(make=normed), 30, {}, id="BatchNorm"),
        pytest.param(DECAYED, 120, {"decay": DECAY}, id="weight decay 0.005"),
    ],
)
def test_the_reported_z_is_near_in_the_mean_over_seeds(recipe: Recipe, rounds: int, strength: dict[str, str]) -> None:
    """Within max(10 %, 2), as a run in one process reports it and as a deployment does; the mean of three keys has a
    chance of 0.6 besides. Not told of decay, the forecast is far off."""
    size = sum(tensor.numel() for tensor in recipe.make().state_dict().values() if tensor.dim() > 1)
    plan = Plan.propose(size, rounds, strength=strength)
    runs = [marked_run(recipe, rounds, plan.strength, seed) for seed in range(3)]
    measured = float(np.mean([run.z for run in runs]))
    for found in ("survival", "told"):
        reported = float(np.mean([run.expected * likely(getattr(run, found)) for run in runs]))
        assert abs(reported - measured) < max(0.1 * measured, 2), [(run.z, run.expected, run.told) for run in runs]
    assert measured > plan.least_z - 2  # what a plan counts on
    if strength:
        untold = marked_run(recipe, rounds, {**plan.strength, "decay": "0"}, 0)
        assert untold.expected > 2 * untold.z


def zoo_of(name: str) -> tuple[float, float, float, float]:
    """The forecast, what a run in one process and what a deployment reports, and z, in the mean over three seeds."""
    runs = [zoo_runs.marked(name, seed, rounds=20, rho="0.1", c_max="0.1", dither="3") for seed in (1, 2, 3)]
    for run in runs:
        assert run.stranger is not None, "noise that is not in the model tells something as well: nothing is left"
        assert abs(run.stranger.part) < 5 * max(run.stranger.error, 0.02)
    found = [(run.expected_z, run.corrected_z, run.told_z, run.z(run.released)) for run in runs]
    expected, corrected, told, measured = (float(np.mean(column)) for column in zip(*found, strict=True))
    return expected, corrected, told, measured


def test_the_members_noise_knows_what_adam_takes_back() -> None:
    """The forecast is three times too high for a model with weight_norm."""
    expected, corrected, told, measured = zoo_of("weight-norm")
    assert abs(corrected - measured) < max(0.1 * measured, 2)
    assert abs(told - measured) < max(0.1 * measured, 2)
    assert expected > 2 * measured


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_reported_z_for_models_of_every_kind(name: str) -> None:
    """Within max(10 %, 2) in the mean over three seeds, in one process and as deployed; nothing is fitted."""
    expected, corrected, told, measured = zoo_of(name)
    assert abs(corrected - measured) < max(0.1 * measured, 2)
    assert abs(told - measured) < max(0.1 * measured, 2)
    assert measured < expected + max(0.1 * measured, 2), "the forecast alone is never far too low"
