"""Settings of the mark's strength: what they mean, and which are refused."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from quorumark.consortium.records import DEFAULT_STRENGTH
from quorumark.consortium.strength import ONE, Strength, _cosine
from tests.kit.marks import RHO
from tests.kit.refusals import wrong_argument


def test_settings() -> None:
    default = Strength.of({}, 1000)
    assert default == DEFAULT_STRENGTH
    assert (default.rule, default.rho, default.c_max) == ("rho", ONE // 20, ONE * 3 // 100)
    assert (default.warmup_rounds, default.below_threshold) == (0, "refuse")
    assert (default.dither, default.continuity) == (3 * ONE, 0)
    short = {"rho": "0.0500", "dither": "3"}
    assert Strength.of(short, 1000) == default, "what is left out has its default"
    assert (default.alike, default.needs_norms) == ("skip", True)
    assert not Strength.of(RHO, 1000).needs_norms
    assert Strength.of(RHO, 1000).digest() != default.digest(), "it is among the settings that all sign"
    assert not Strength.of({"rule": "paper", "c": "0.01"}, 9).needs_norms
    target = Strength.of({"rule": "target", "z": "8"}, 25600)
    assert target.rho == ONE // 20, "z/√d = 8/160"
    relative = Strength.of({"rule": "relative", "c": "0.01"}, 9)
    assert relative.c_max == relative.c == ONE // 100
    assert len({Strength.of({**RHO, "lr": lr}, 9).digest() for lr in ("constant", "list:1", "cosine:9")}) == 3


@pytest.mark.parametrize(
    ("change", "setting", "received"),
    [
        ({"rule": "loud"}, "", "'loud'"),
        ({"rule": "relative"}, "", "without 'c'"),
        ({"c": "0.01"}, "", "with 'c'"),
        ({"rule": "paper", "c": "0.01", "rho": "0.05"}, "", "with 'alike'"),
        ({"rho": "0"}, "rho", "'0'"),
        ({"rho": "0.6"}, "rho", "'0.6'"),
        ({"rho": "5e-2"}, "rho", "'5e-2'"),
        ({"rho": "-0.1"}, "rho", "'-0.1'"),
        ({"c_max": "0.3"}, "c_max", "'0.3'"),
        ({"warmup_rounds": "-1"}, "warmup_rounds", "'-1'"),
        ({"below_threshold": "maybe"}, "below_threshold", "'maybe'"),
        ({"alike": "maybe"}, "alike", "'maybe'"),
        ({"lr": "linear"}, "lr", "'linear'"),
        ({"lr": "cosine:0"}, "lr", "'cosine:0'"),
        ({"lr": "step:9=0.1,9=0.2"}, "lr", "'step:9=0.1,9=0.2'"),
        ({"lr": "list:1,.5"}, "lr", "'.5'"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, str], setting: str, received: str) -> None:
    with wrong_argument(f"strength {setting!r}" if setting else "strength", received=received):
        Strength.of({**RHO, **change}, 1000)


def test_more_bad_settings() -> None:
    with wrong_argument("strength 'z'", received="51"):
        Strength.of({"rule": "target", "z": "51"}, 10000)
    with wrong_argument("strength 'per'", received="'row'"):
        Strength.of({"rule": "paper", "c": "0.01", "per": "row"}, 9)
    with wrong_argument("strength", received="str"):
        Strength.of("rho", 9)  # type: ignore[arg-type]


def test_learning_rates() -> None:
    def rates(lr: str, rounds: int = 6) -> list[Fraction]:
        strength = Strength.of({**RHO, "lr": lr}, 9)
        return [strength.rate(r) for r in range(1, rounds + 1)]

    tenth = Fraction(1, 10)
    assert rates("constant") == [1] * 6
    assert rates("step:3=0.1,5=0") == [1, 1, tenth, tenth, 0, 0]
    assert rates("list:1,0.5,0.1") == [1, Fraction(1, 2), tenth, tenth, tenth, tenth]
    assert rates("cosine:4") == [1, *(Fraction(_cosine(r, 4), ONE) for r in (1, 2, 3)), 0, 0]
    for rounds in (1, 2, 3, 50, 997):
        for done in range(rounds):
            exact = (1 + math.cos(math.pi * done / rounds)) / 2 * ONE
            assert abs(_cosine(done, rounds) - exact) < 0.51
