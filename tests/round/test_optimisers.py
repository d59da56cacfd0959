"""Server optimisers in integers: against Python's own, and against Flower's formulas."""

from __future__ import annotations

import random
from math import isqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumark.consortium.optimiser import OPTIMISERS, Optimiser
from quorumark.errors import InputError
from quorumark.round.optimiser import OptimiserState, power
from tests.kit.optimiser_oracle import Oracle, flower_step

CASES = [
    "fedavgm:server_learning_rate=0.7,server_momentum=0.9",
    "fedavgm",
    "fedadam:eta=0.01",
    "fedadam:eta=0.1,beta_1=0,beta_2=0,tau=0.000000001",
    "fedadam:eta=0.02,beta_2=0.999,tau=0.000000001",
    "fedyogi:eta=0.01,tau=0.001",
    "fedyogi:eta=0.05,beta_1=0.5,tau=0.000001",
    "fedadagrad:eta=0.05",
    "fedadagrad:eta=100,tau=0.000000001",
]


def settings_of(text: str) -> dict[str, str]:
    return dict(Optimiser.of(text).settings)


@pytest.mark.parametrize("text", CASES)
@given(data=st.data())
def test_every_bit_is_the_oracle_s(text: str, data: st.DataObject) -> None:
    """From updates of one unit to the largest there are, still ones and reversals among them."""
    chosen = Optimiser.of(text)
    sizes = st.one_of(st.integers(-(2**60) + 1, 2**60 - 1), st.integers(-(2**30), 2**30), st.integers(-4, 4))
    rounds = data.draw(st.lists(st.lists(sizes, min_size=5, max_size=5), min_size=1, max_size=6))
    state, oracle = OptimiserState.start(chosen, 5), Oracle(chosen.name, settings_of(text), 5)
    for raw in rounds:
        taken = state.take(np.array(raw, np.int64))
        assert taken.moves.tolist() == oracle.take(raw)
        state = taken.after
        assert state.momentum.tolist() == [m for m, _ in oracle.state]
        if chosen.adapts:
            assert state.root.tolist() == [r for _, r in oracle.state]


@pytest.mark.parametrize("text", CASES)
def test_they_agree_with_flower_s_formulas(text: str) -> None:
    """40 rounds of updates as training makes them, from 10^-5 to 10^-1: the steps differ by less than 10^-3 of the
    largest one, at updates that happen to be tiny; by less than 10^-6 of it in the median."""
    chosen, rng = Optimiser.of(text), np.random.default_rng(3)
    scale = 10.0 ** rng.uniform(-5, -1, 4000)
    state, memory = OptimiserState.start(chosen, scale.size), dict[str, Any]()
    for number in range(1, 41):
        raw = np.rint(scale * (rng.standard_normal(scale.size) + 0.3) * 2.0**40)
        taken = state.take(raw.astype(np.int64))
        state = taken.after
        wanted = flower_step(chosen.name, settings_of(text), memory, raw / 2.0**40, number)
        apart, most = np.abs(taken.moves / 2.0**40 - wanted), np.abs(wanted).max()
        assert apart.max() < 1e-3 * most
        assert np.median(apart) < 1e-6 * most


def test_roots_and_quotients_are_exact_at_their_edges() -> None:
    """Squares and their neighbours up to 2^120, where a float's guess is thousands of units off."""
    chosen = Optimiser.of("fedadagrad:eta=1")
    draw = random.Random(1)
    raws = [draw.getrandbits(draw.randrange(1, 61)) for _ in range(2000)]
    state = OptimiserState.start(chosen, len(raws))
    total = [0] * len(raws)
    for _ in range(3):
        state = state.take(np.array([min(g, 2**60 - 1) for g in raws], np.int64)).after
        total = [
            isqrt(min(t * t + (16 * min(g, 2**60 - 1)) ** 2, 2**128 - 1)) for t, g in zip(total, raws, strict=True)
        ]
        assert state.root.tolist() == total


def test_powers_are_those_of_fractions() -> None:
    for ratio in (0, 1 << 31, int(0.9 * 2**32), int(0.999 * 2**32)):
        for exponent in (1, 2, 3, 17, 100, 5000):
            exact = (ratio / 2**32) ** exponent
            assert power(ratio, exponent) / 2**62 == pytest.approx(exact, rel=1e-9, abs=1e-15)


def test_settings_have_one_spelling_and_nothing_else_is_read() -> None:
    assert str(Optimiser.of("fedadam")) == "fedadam:eta=0.1,beta_1=0.9,beta_2=0.99,tau=0.001"
    assert str(Optimiser.of("fedadam:tau=0.0010,eta=00.50")) == "fedadam:eta=0.5,beta_1=0.9,beta_2=0.99,tau=0.001"
    for name in OPTIMISERS:
        assert Optimiser.of(str(Optimiser.of(name))) == Optimiser.of(name)
    for wrong in (
        "", "adam", "FedAdam", "fedadam:", "fedadam:eta", "fedadam:eta=", "fedadam:eta=0.1,eta=0.1", "fedadam:eta=-1",
        "fedadam:eta=1e-3", "fedadam:eta=0.00001", "fedadam:eta=0.1;", "fedavgm:eta=0.1", "fedadam:beta_1=1",
        "fedadam:beta_2=0.9999", "fedadam:tau=0", "fedadagrad:beta_1=0.9", "fedavgm:server_learning_rate=0",
        "fedadam:eta=٠", "fedadam:eta=101",
    ):  # fmt: skip
        with pytest.raises(InputError):
            Optimiser.of(wrong)
