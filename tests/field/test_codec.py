"""quorumark.codec against exact fractions: rounding, range, fused forms."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumark import codec, field
from quorumark.errors import EncodingError, InputError
from tests.kit.oracle import P, array, elements, encode, ints, lift

LARGEST = float(np.nextafter(2.0**19, 0))
HALF_STEP = 2.0**-41
numbers = st.one_of(
    st.floats(-LARGEST, LARGEST),
    st.sampled_from([0.0, -0.0, HALF_STEP, -HALF_STEP, 3 * HALF_STEP, 5e-324, -1e-310, LARGEST, -LARGEST, 1.0, -1.0]),
)


@given(st.lists(numbers, min_size=1, max_size=20))
def test_encoding_rounds_to_the_nearest_step_ties_to_even(values: list[float]) -> None:
    assert ints(codec.encode(np.array(values))) == [encode(v) for v in values]
    single = np.clip(
        np.array(values, np.float32), -np.nextafter(np.float32(2**19), 0), np.nextafter(np.float32(2**19), 0)
    )
    assert ints(codec.encode(single)) == [encode(float(v)) for v in single]


@given(st.lists(numbers, min_size=1, max_size=20), st.floats(1e-3, 1.0), elements, st.data())
def test_fused_encoding_is_the_two_steps(values: list[float], weight: float, a: int, data: st.DataObject) -> None:
    x = data.draw(st.lists(elements, min_size=len(values), max_size=len(values)))
    expected = [(encode(v, weight) + a * u) % P for v, u in zip(values, x, strict=True)]
    assert ints(codec.encode_axpy(np.array(values), weight, a, array(x))) == expected
    in_place = array(x)
    assert codec.encode_axpy(np.array(values), weight, a, in_place, out=in_place) is in_place
    assert ints(in_place) == expected
    assert ints(codec.encode(np.array(values), weight)) == [encode(v, weight) for v in values]


@given(st.lists(elements, min_size=1, max_size=20))
def test_decoding_rounds_once(values: list[int]) -> None:
    double, single = codec.decode(array(values), np.float64), codec.decode(array(values))
    for x, d, s in zip(values, double, single, strict=True):
        exact = Fraction(lift(x), 2**40)
        assert float(d) == exact.numerator / exact.denominator  # Python divides integers with one rounding
        assert s.dtype == np.float32
        assert _is_nearest_float32(s, exact)


def _is_nearest_float32(found: np.float32, exact: Fraction) -> bool:
    """No neighbour is nearer, and at a tie the last bit is zero."""
    error = abs(Fraction(float(found)) - exact)
    for direction in (-math.inf, math.inf):
        neighbour = np.nextafter(found, np.float32(direction))
        other = abs(Fraction(float(neighbour)) - exact)
        if other < error or (other == error and int(found.view(np.uint32)) & 1):
            return False
    return True


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 8, 1003, 200_001])
def test_round_trip_is_within_half_a_step(dtype: Any, size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(dtype)
    back = codec.decode(codec.encode(values), np.float64)
    assert np.abs(back - values).max() <= HALF_STEP


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, 8, 1003])
def test_the_round_trip_in_one_pass_is_that_in_two(dtype: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    values = (rng.standard_normal(size) * 2.0 ** rng.integers(-60, 15, size)).astype(dtype).reshape(1, size)
    found = codec.round_trip(values)
    assert found.dtype == dtype
    assert found.tobytes() == codec.decode(codec.encode(values), dtype).tobytes()
    values[0, -1] = np.nan
    with pytest.raises(EncodingError, match="anchor must be finite"):
        codec.round_trip(values, name="anchor")


def test_float32_weights_of_usual_size_come_back_exactly() -> None:
    values = (np.random.default_rng(0).standard_normal(100_000) * 0.05).astype(np.float32)
    values[np.abs(values) < 2.0**-16] = 2.0**-16  # 24 bits above 2^-40
    assert (codec.decode(codec.encode(values)) == values).all()


def test_a_weighted_sum_is_an_average() -> None:
    """The sum of encoded, weighted models is the float64 average to K·2^-41 (docs/protocol.md, "Numbers")."""
    rng = np.random.default_rng(3)
    models = rng.standard_normal((5, 10_000)).astype(np.float32)
    weights = np.array([1, 2, 3, 4, 5]) / 15
    total = np.zeros(10_000, np.uint64)
    for model, weight in zip(models, weights, strict=True):
        field.add(total, codec.encode(model, float(weight)), out=total)
    average = weights @ models.astype(np.float64)
    assert np.abs(codec.decode(total, np.float64) - average).max() <= 5 * 2.0**-41 + 1e-15


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "must be finite, but got nan at index 2"),
        (math.inf, "must be finite, but got inf at index 2"),
        (-math.inf, "must be finite, but got -inf at index 2"),
        (2.0**19, "must be below 524288 in size to fit into fixed point, but got 524288 at index 2"),
        (-1e30, "must be below 524288 in size to fit into fixed point, but got -1e+30 at index 2"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_does_not_fit_is_refused_and_nothing_is_written(value: float, text: str, dtype: Any) -> None:
    values = np.array([1, 2, value, math.nan], dtype)
    out = np.full(4, 7, np.uint64)
    with pytest.raises(EncodingError) as caught:
        codec.encode(values, out=out, name="update")
    assert str(caught.value) == f"update {text}"
    assert caught.value.index == 2
    with pytest.raises(EncodingError, match=r"^values must"):
        codec.encode_axpy(values, 1.0, 1, out.copy(), out=out)
    assert ints(out) == [7] * 4


def test_the_limit_is_on_the_value_and_on_what_it_becomes() -> None:
    # an average of values below the limit is below it; a small weight must not let larger ones through
    with pytest.raises(EncodingError, match="below 524288"):
        codec.encode(np.array([2.0**20]), 0.25)
    with pytest.raises(EncodingError, match="below 262144"):
        codec.encode(np.array([2.0**18]), 2.0)
    assert ints(codec.encode(np.array([2.0**18]), 1.5)) == [3 * 2**57]
    assert ints(codec.encode(np.array([LARGEST]))) == [round(Fraction(LARGEST) * 2**40)]
    assert ints(codec.encode(np.array([-LARGEST]))) == [P - round(Fraction(LARGEST) * 2**40)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: codec.encode(np.array([1, 2])), "values must be a numpy array of float32 or float64, but got int64"),
        (lambda: codec.encode([1.0]), "but got list"),
        (lambda: codec.encode(np.array([], np.float32)), "must not be empty"),
        (lambda: codec.encode(np.ones(2), True), "weight must be a number other than 0"),
        (lambda: codec.decode(array([1]), out=[1]), "out must be a numpy array, but got list"),  # type: ignore[arg-type]
        (lambda: codec.encode(np.ones(2), 0.0), "weight must be a number other than 0"),
        (lambda: codec.encode(np.ones(2), math.nan), "weight must be a number other than 0"),
        (lambda: codec.encode(np.ones(2), out=np.zeros(3, np.uint64)), "out must be a uint64 array of shape (2,)"),
        (lambda: codec.encode_axpy(np.ones(2), 1.0, P, array([1, 2])), "a must be in [0, p)"),
        (lambda: codec.encode_axpy(np.ones(2), 1.0, 1, array([1])), "x must be a vector of values' shape (2,)"),
        (lambda: codec.encode_axpy(np.ones(2), 1.0, 1, array([1, P])), f"but got {P} at index 1"),
        (lambda: codec.decode(array([P])), f"x must hold values in [0, p) for p = 2^61−1, but got {P} at index 0"),
        (lambda: codec.decode(array([1]), np.float16), "dtype must be float32 or float64, but got float16"),
        (lambda: codec.decode(np.array([], np.uint64)), "x must not be empty"),
        (lambda: codec.decode(array([1]), out=np.zeros(1)), "out must be a contiguous float32 array of shape (1,)"),
    ],
)
def test_bad_input_is_refused(call: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert text in str(caught.value)


def test_partial_overlap_is_refused() -> None:
    x = field.random(10)
    with pytest.raises(InputError, match="overlap"):
        codec.encode_axpy(np.ones(9), 1.0, 1, x[:9], out=x[1:])
    values = np.arange(1.0, 101.0)
    with pytest.raises(InputError, match="share memory"):
        codec.encode(values[:-1], out=values.view(np.uint64)[1:])
    with pytest.raises(InputError, match="share memory"):
        codec.decode(x, out=x.view(np.float32)[:10])
