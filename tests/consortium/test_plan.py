"""The plan: what strength a run needs, and what its members are told before they make a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import quorumark as qm
from quorumark.consortium.plan import MOST_C, MOST_RHO, Plan, PlanWarning
from quorumark.consortium.records import Terms
from quorumark.consortium.strength import Strength
from quorumark.errors import InputError
from tests.kit.commands import run

CNN = 151_072  # weights that carry in the README's model


def codes(plan: Plan) -> list[str]:
    return [advice.code for advice in plan.advice]


def test_the_readmes_run_gets_a_strength_that_is_enough() -> None:
    plan = Plan.propose(CNN, 30)
    assert plan.enough
    assert plan.expected_z >= plan.least_z >= 12
    assert codes(plan) == []
    assert plan.strength["rounds"] == "30"
    default = Plan.of(Strength.of({}, CNN), CNN, 30)  # what it had before, which ended in FAILED
    assert not default.enough
    assert codes(default) == ["plan.too-weak"]


@pytest.mark.parametrize(
    ("rho", "which", "carriers"),
    [("0.05", "expected_z", 80_000), ("0.1", "expected_z", 20_000),
     ("0.05", "least_z", 300_000), ("0.1", "least_z", 74_000)],
)  # fmt: skip
def test_how_small_a_model_may_be_is_what_a_plan_says(root: Path, rho: str, which: str, carriers: int) -> None:
    """The figures of the FAQ: a z of 12 at that size, in 60 rounds, and not at a twentieth less."""
    page = (root / "docs/faq.md").read_text().split("## How small may a model be?")[1].split("## ")[0]
    assert f"{carriers:,}" in page
    assert (MOST_C, MOST_RHO) == (0.1, 0.1)
    found = [
        getattr(Plan.propose(size, 60, strength={"rho": rho, "c_max": "0.1"}), which)
        for size in (carriers, carriers * 19 // 20)
    ]
    assert found[0] >= 12 > found[1]


@pytest.mark.parametrize(
    ("coordinates", "rounds", "code"),
    [(20_000, 30, "plan.too-small"), (20_000, 1000, "plan.too-small"), (CNN, 5, "plan.too-short"),
     (CNN, 2, "plan.too-short"), (5000, 5, "plan.too-small")],
)  # fmt: skip
def test_what_is_too_small_or_too_short_is_told(coordinates: int, rounds: int, code: str) -> None:
    plan = Plan.propose(coordinates, rounds)
    assert not plan.enough
    assert codes(plan) == [code]
    assert plan.least_z < 12


def test_it_proposes_the_fewest_rounds_that_are_enough() -> None:
    for given in ({}, {"dither": "2"}, {"lr": "cosine:40"}, {"decay": "0.005"}):
        plan = Plan.propose(CNN, strength=given)
        assert plan.enough
        assert plan == Plan.propose(CNN, plan.rounds, strength=given)
        assert not Plan.propose(CNN, plan.rounds - 1, strength=given).enough
    assert Plan.propose(CNN, target_z=14).rounds > Plan.propose(CNN).rounds
    never = Plan.propose(20_000)
    assert (never.rounds, codes(never)) == (60, ["plan.too-small"])


def test_what_it_says_would_help_helps() -> None:
    """The rounds and the carriers that an advice names are enough, and clearly fewer are not."""
    short = Plan.propose(CNN, 5)
    assert "20 rounds" in short.advice[0].text
    assert Plan.propose(CNN, 20).least_z >= 12 > Plan.propose(CNN, 15).least_z
    assert "1,400,000 carrying" in short.advice[0].text
    assert Plan.propose(1_400_000, 5).enough
    small = Plan.propose(20_000, 30)
    assert "82,000 carrying" in small.advice[0].text
    assert Plan.propose(82_000, 30).enough
    assert not Plan.propose(75_000, 30).enough


@pytest.mark.parametrize("coordinates", [1000, 20_000, CNN, 11_000_000, 10**9])
@pytest.mark.parametrize("rounds", [1, 3, 10, 30, 300])
@pytest.mark.parametrize("given", [{}, {"dither": "10"}, {"dither": "0"}, {"lr": "cosine:20"}, {"warmup_rounds": "5"}])
def test_a_proposal_stays_within_its_limits_and_is_a_strength(
    coordinates: int, rounds: int, given: dict[str, str]
) -> None:
    plan = Plan.propose(coordinates, rounds, strength=given)
    strength = Strength.of(plan.strength, coordinates)  # refuses dither·c_max > 1/2
    assert 0.05 <= float(plan.strength["rho"]) <= MOST_RHO
    assert 0.03 <= float(plan.strength["c_max"]) <= MOST_C
    assert given.items() <= strength.as_dict().items()
    assert plan.enough == (plan.least_z >= 12)
    assert plan.enough or any(code.startswith("plan.too-") for code in codes(plan))


def test_it_leaves_what_is_set_and_tells_what_it_costs() -> None:
    loud = Plan.propose(20_000, 30, strength={"rho": "0.2", "c_max": "0.16"})
    assert (loud.strength["rho"], loud.strength["c_max"]) == ("0.2", "0.16")
    assert "plan.loud" in codes(loud)
    assert loud.expected_z > Plan.propose(20_000, 30).expected_z
    assert Plan.propose(CNN, 30, target_z=15).least_z >= 15
    assert codes(Plan.propose(CNN, 30, strength={"rule": "paper", "c": "0.02"})) == ["plan.no-forecast"]
    assert codes(Plan.propose(CNN, 200, strength={"lr": "cosine:40"})) == ["plan.rate-ends"]
    assert Plan.propose(CNN, 30, strength={"rule": "relative", "c": "0.08"}).enough


@pytest.mark.parametrize(("rounds", "target"), [(0, 12), (-1, 12), (True, 12), (2.5, 12), (30, 0), (30, -3)])
def test_it_refuses_what_is_no_plan(rounds: Any, target: float) -> None:
    with pytest.raises(InputError):
        Plan.propose(CNN, rounds, target_z=target)


@pytest.fixture
def cards(tmp_path: Path) -> list[Any]:
    homes = [qm.Home.create(tmp_path / n, n, key_file=tmp_path / f"{n}.key") for n in ("Avon", "Birch", "Cedar")]
    return [(home.card, 100) for home in homes]


def model(rows: int, columns: int) -> dict[str, Any]:
    return {"w.weight": np.zeros((rows, columns), np.float32)}


def test_terms_are_agreed_on_with_a_plan(cards: list[Any]) -> None:
    large = model(400, 400)
    options: dict[str, Any] = {"without_alignment": True}
    terms = qm.Terms.agree("trial", 2, cards, large, rounds=30, **options)
    assert terms.strength.as_dict().items() >= Plan.propose(160_000, 30).strength.items()
    assert terms.strength.rounds == 30
    assert Terms.from_bytes(terms.to_bytes()) == terms
    own = {"rho": "0.05", "c_max": "0.03"}
    with pytest.warns(PlanWarning, match=r"plan\.too-weak"):
        weak = qm.Terms.agree("trial", 2, cards, large, rounds=30, strength=own, **options)
    assert weak.strength.as_dict()["c_max"] == "0.03"
    with pytest.warns(PlanWarning, match=r"plan\.too-short"):
        qm.Terms.agree("trial", 2, cards, large, rounds=5, **options)
    with pytest.warns(PlanWarning, match=r"plan\.too-small"):
        qm.Terms.agree("trial", 2, cards, model(100, 200), rounds=30, **options)
    with pytest.warns(PlanWarning, match=r"plan\.no-rounds"):
        qm.Terms.agree("trial", 2, cards, large, **options)
    told = qm.Terms.agree("trial", 2, cards, large, target_z=12, **options)
    assert told.strength.rounds == Plan.propose(160_000).rounds
    with pytest.raises(InputError, match="target_z"):
        qm.Terms.agree("trial", 2, cards, large, target_z=0, **options)


def test_who_sets_the_strength_is_told_as_well(cards: list[Any]) -> None:
    """What a model of this size may end with, before there is a key; nothing where it is enough for the rounds."""
    options: dict[str, Any] = {"without_alignment": True}
    own = {"rho": "0.05", "c_max": "0.03"}
    with pytest.warns(PlanWarning, match=r"as little as z = 2, .* What would help: .*plan\.too-small"):
        small = qm.Terms.agree("trial", 2, cards, model(100, 200), strength=own, **options)
    assert small.strength.rounds == 0
    with pytest.warns(PlanWarning, match=r"takes about 20 rounds.*plan\.no-rounds"):
        qm.Terms.agree("trial", 2, cards, model(400, 400), strength={"rho": "0.1", "c_max": "0.1"}, **options)
    short = {"rho": "0.1", "c_max": "0.1", "rounds": "5"}
    with pytest.warns(PlanWarning, match=r"plan\.too-short"):
        qm.Terms.agree("trial", 2, cards, model(400, 400), strength=short, **options)
    with pytest.warns(PlanWarning, match=r"plan\.no-forecast"):
        qm.Terms.agree("trial", 2, cards, model(400, 400), strength={"rule": "paper", "c": "0.02"}, **options)
    enough = {"rho": "0.1", "c_max": "0.1", "rounds": "30"}
    assert qm.Terms.agree("trial", 2, cards, model(400, 400), strength=enough, **options).strength.rounds == 30


def test_the_command_line_plans_and_shows_it(tmp_path: Path, cards: list[Any]) -> None:
    save_file(model(400, 400), tmp_path / "large.safetensors")
    save_file(model(100, 200), tmp_path / "small.safetensors")
    del cards
    members = [f"--member={tmp_path / n / 'member.json'}:100" for n in ("Avon", "Birch", "Cedar")]

    def create(out: str, source: str, *options: str, code: int = 0) -> str:
        command = ["consortium", "create", "--without-alignment", "--name", "h", "--threshold", "2", *members]
        files = ["--model", str(tmp_path / source), "--out", str(tmp_path / out)]
        result = run({}, *command, *files, *options)
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout

    def agreed(out: str) -> dict[str, str]:
        return Terms.from_bytes((tmp_path / out / "terms.json").read_bytes()).strength.as_dict()

    assert "WARNING" not in create("one", "large.safetensors", "--rounds", "30")
    assert agreed("one").items() >= Plan.propose(160_000, 30).strength.items()
    assert "WARNING: the model is small" in create("two", "small.safetensors", "--rounds", "30")
    assert "WARNING: the run is short" in create("three", "large.safetensors", "--rounds", "5")
    assert "WARNING" in create("four", "large.safetensors")
    create("five", "large.safetensors", "--rounds", "30", "--target-z", "20", "--strength", "rho=0.09")
    assert agreed("five")["rho"] == "0.09"
    assert float(agreed("five")["c_max"]) > float(agreed("one")["c_max"])
    told = create("adam", "large.safetensors", "--rounds", "30", "--policy", "optimiser=fedadam:eta=0.010")
    assert "that is for FedAvg" in told  # a plan knows nothing of optimisers
    policy = Terms.from_bytes((tmp_path / "adam" / "terms.json").read_bytes()).policy.as_dict()
    assert policy["optimiser"] == "fedadam:eta=0.01,beta_1=0.9,beta_2=0.99,tau=0.001"
    create("wrong", "large.safetensors", "--rounds", "30", "--policy", "optimiser=fedadam:eta=7e3", code=2)
    longer = create("six", "large.safetensors", "--target-z", "14")
    assert agreed("six")["rounds"] == str(Plan.propose(160_000, target_z=14).rounds)
    assert f"plan: after {agreed('six')['rounds']} rounds" in longer
    create("eight", "large.safetensors", "--target-z", "0", code=2)
    create("seven", "large.safetensors", "--rounds", "0", code=2)
    shown = run({}, "consortium", "show", str(tmp_path / "one" / "terms.json")).stdout
    assert f"a z of {Plan.propose(160_000, 30).expected_z:.0f} is expected" in " ".join(shown.split())
