"""What makes matching fast gives the same integers as what is slow."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumark.align.arrays import octaves_of
from quorumark.align.assignment import assign, inner_product, inner_products, pair_products, squares
from quorumark.model import kernels
from quorumark.model.statistic import bits_of, scales_of


@pytest.mark.parametrize("features", [1, 7, 1024, 1025, 8192, 20_000])
@pytest.mark.parametrize("largest", [True, False])
def test_products_of_8_bits_are_exact(features: int, largest: bool) -> None:
    """Also of rows with the largest numbers, whose sums float32 does not hold."""
    rng = np.random.default_rng(features)
    one, two = (rng.integers(-127, 128, (rows, features), np.int8) for rows in (5, 6))
    if largest:
        one[0], two[0], one[1] = 127, 127, -127
        two[0, -1] = 126  # an odd sum: float32 would round it
    wide = one.astype(np.int64), two.astype(np.int64)
    assert np.array_equal(inner_products(one, two), wide[0] @ wide[1].T)
    assert np.array_equal(squares(one), (wide[0] ** 2).sum(axis=1))
    order = rng.permutation(6)[:5]
    assert np.array_equal(pair_products(one, two, order), (wide[0] * wide[1][order]).sum(axis=1))
    assert inner_product(one, two[:5]) == int((wide[0] * wide[1][:5]).sum())
    if largest and features == 20_000:
        rounded = (one.astype(np.float32) @ two.astype(np.float32).T).astype(np.int64)
        assert not np.array_equal(rounded, wide[0] @ wide[1].T)


@given(st.integers(0, 2**32 - 1))
def test_balanced_weights_in_8_bits_are_the_wide_ones_rounded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(5, 3, 4)) * np.exp(3 * rng.normal(size=(5, 1, 1)))).astype(np.float32)
    values.reshape(-1)[rng.integers(0, values.size, 4)] = [0.0, np.inf, 1e30, -1e-40]
    bits, by_row, by_column = octaves_of(values)
    again = scales_of(lambda: iter([(0, bits_of(values))]), values.shape)
    assert np.array_equal(by_row, again[0])
    assert np.array_equal(by_column, again[1])
    wide, coarse = np.empty(bits.size, np.int32), np.empty(bits.size, np.int8)
    kernels.balance(bits, by_row, by_column, wide, kernels.POWERS)
    kernels.balance_coarse(bits, by_row, by_column, coarse, kernels.POWERS)
    assert np.array_equal(coarse, np.clip(np.floor(wide / 256 + 0.5), -127, 127))


@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(0, 40))
def test_an_order_is_confirmed_only_if_no_other_is_as_good(seed: int, size: int, noise: int) -> None:
    """A part of the similarities is known, of the rest only what Cauchy and Schwarz say."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(size)
    known, rest = (rng.integers(-noise, noise + 1, (2, size, 6), np.int8) for _ in range(2))
    for rows in (known, rest):
        rows[1, order] += rows[0] + rng.integers(-1, 2, (size, 6), np.int8)
    first, second = (x.astype(np.int64) @ y.astype(np.int64).T for x, y in (known, rest))
    total = first + second
    limits = [np.sqrt(squares(rows).astype(np.float64))[None] for rows in rest]
    value = total[np.arange(size), order]
    best = max(sum(total[i, j] for i, j in enumerate(each)) for each in permutations(range(size)))
    if kernels.is_best(first, *limits, order, value):
        assert value.sum() == best
        assert np.array_equal(assign(total), order)
        assert sum(sum(total[i, j] for i, j in enumerate(each)) == best for each in permutations(range(size))) == 1
    if kernels.is_largest(first, *limits, order, value):
        assert np.array_equal(total.max(axis=1), value)


def test_orders_are_confirmed_where_a_suspect_is_like_the_anchor() -> None:
    """Otherwise the last test would say nothing."""
    rng = np.random.default_rng(1)
    rows = rng.integers(-100, 101, (20, 300), np.int8)
    first = rows[:, :200].astype(np.int64) @ rows[:, :200].astype(np.int64).T
    limits = [np.sqrt(squares(rows[:, 200:]).astype(np.float64))[None]] * 2
    value = squares(rows)
    assert kernels.is_best(first, *limits, np.arange(20), value)
    assert kernels.is_largest(first, *limits, np.arange(20), value)
    assert not kernels.is_best(first, *limits, np.roll(np.arange(20), 1), value)


@pytest.mark.research
@pytest.mark.parametrize("name", ["resnet-bn", "resnet-gn8", "mobilenetv2", "lstm", "gpt2"])
def test_alignment_is_the_same_without_confirmed_orders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from tests.kit import zoo_runs, zoo_table
    from tests.kit.zoo_disguises import disguised

    made = zoo_runs.marked(name)
    hidden = disguised(name, made.released, 3)
    suspects = [hidden, zoo_table.rounded(name, hidden), zoo_runs.innocent(name, 1), zoo_runs.marked(name, 2).released]
    suspects.append(disguised(name, made.anchor, 4))
    confirmed: list[bool] = []
    plain = kernels.is_best

    def counted(*arguments: Any) -> bool:
        confirmed.append(bool(plain(*arguments)))
        return confirmed[-1]

    monkeypatch.setattr(kernels, "is_best", counted)
    fast = [made.align(weights) for weights in suspects]
    assert any(confirmed)
    monkeypatch.setattr(kernels, "is_best", lambda *_: False)
    for quick, weights in zip(fast, suspects, strict=True):
        slow = made.align(weights)
        assert (quick.sweeps, quick.stable, quick.moved, quick.like) == (
            slow.sweeps,
            slow.stable,
            slow.moved,
            slow.like,
        )
        assert quick.indices.keys() == slow.indices.keys()
        assert all(np.array_equal(quick.indices[axis], at) for axis, at in slow.indices.items())
        assert quick.signs.keys() == slow.signs.keys()
        assert all(np.array_equal(quick.signs[axis], at) for axis, at in slow.signs.items())
