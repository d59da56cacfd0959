"""How far models move: exact sums of squares, and the norms of members' updates."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import isqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.errors import EncodingError
from quorumark.round.movement import distance, least, norm_count, sum_squares, update_norms, upload_norms
from quorumark.round.update import Update
from tests.kit.marks import make_layout
from tests.kit.oracle import P
from tests.kit.refusals import wrong_argument


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 2**70), min_size=1, max_size=5), min_size=1, max_size=3))
def test_norm_of_least(axes: list[list[int]]) -> None:
    lowest = [min(each) for each in itertools.product(*axes)]
    assert least(tuple(map(tuple, axes))) == (sum(lowest), sum(v * v for v in lowest))


@given(st.lists(st.tuples(st.integers(-(2**60) + 1, 2**60 - 1), st.integers(-(2**59), 2**59)), min_size=1, max_size=40))
def test_sums_of_squares_are_exact(pairs: list[tuple[int, int]]) -> None:
    x = np.array([v % P for v, _ in pairs], np.uint64)
    assert sum_squares(x) == sum(v * v for v, _ in pairs)
    halves = [v // 2 for v, _ in pairs]
    y = np.array([v % P for _, v in pairs], np.uint64)
    expected = sum((a - b) ** 2 for a, (_, b) in zip(halves, pairs, strict=True))
    assert distance(np.array([v % P for v in halves], np.uint64), y) == expected


def test_norms() -> None:
    """What is too small to tell is not learnt; what is too large is refused, as in the models themselves."""
    layout = make_layout()
    assert norm_count(layout) == 5 + 3 + 4 + 4 + 7, "nothing about tensors of single weights"
    start, step = np.zeros(layout.size), np.zeros(layout.size)
    step[0] = 3.0
    before = codec.encode(start)
    norms = update_norms(layout, before, codec.encode(step), Fraction(1, 3))
    assert sorted(norms.tolist()) == [0] * 20 + [1 << 40] * 3
    tiny = np.full(layout.size, 2.0**-40)
    assert not update_norms(layout, before, codec.encode(tiny), Fraction(1, 10)).any()
    with pytest.raises(EncodingError, match="must have norms below 524288 in each row"):
        update_norms(layout, before, codec.encode(np.full(layout.size, 3e5)), Fraction(1, 10))
    with wrong_argument("after"):
        update_norms(layout, before, before[1:], Fraction(1, 2))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from([(3, 4), (5, 1), (1, 6), (2, 3, 3, 3), (9, 33), (2, 2100), (4, 2, 1, 1)]),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1 << 30),
    st.one_of(
        st.fractions(Fraction(1, 500), 1, max_denominator=1000),
        st.fractions(Fraction(1, 500), 1, max_denominator=10**10),  # numbers of examples may be large
    ),
    st.sampled_from([1, 20, 44, 52]),
    st.lists(st.integers(0, 44), min_size=5, max_size=5),
)
def test_norms_of_uploads_in_whole_numbers(
    shapes: list[tuple[int, ...]], seed: int, weight: Fraction, bits: int, shifts: list[int]
) -> None:
    """min(⌊a·‖D‖⌋, ⌊‖V‖⌋) by rows, columns and taps, with V the weighted update in units: in Python's ints."""
    layout = make_layout({f"t{i}": shape for i, shape in enumerate(shapes)})
    rng = np.random.default_rng(seed)
    start = rng.integers(-(1 << 45), 1 << 45, layout.size)
    moves = rng.integers(-(1 << bits), 1 << bits, layout.size)
    before, after = (field.from_signed(v) for v in (start, start + moves))
    spans = [(place, shift) for (_, place), shift in zip(layout.spans(), shifts, strict=False)]
    wanted = []
    for (spec, place), (_, shift) in zip(layout.spans(), spans, strict=True):
        d = np.array([int(m) for m in moves[place]], object).reshape(*spec.shape[:2], -1)
        if spec.size <= max(d.shape):
            continue
        v = np.array([round(Fraction(round(m * float(weight)), 1 << shift)) << shift for m in d.flat], object)
        v = v.reshape(d.shape)
        for axes in ((1, 2), (0, 2), (0, 1))[: 3 if d.shape[2] > 1 else 2]:
            own, rounded = ((x * x).sum(axis=axes) for x in (d, v))
            wanted += [
                min(isqrt(weight.numerator**2 * a // weight.denominator**2), isqrt(b))
                for a, b in zip(own.tolist(), rounded.tolist(), strict=True)
            ]
    assert upload_norms(layout, before, after, weight, spans).tolist() == wanted


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1e-7, 1e-3, 1.0, 3e3]), st.sampled_from([np.float32, np.float64]))
def test_what_is_measured_of_floats_is_what_is_measured_of_them_encoded(seed: int, scale: float, kind: type) -> None:
    """Norms, distances and the largest moves, as a member finds them without encoding what it trained."""
    layout = make_layout({"a": (9, 33), "b": (2, 3, 3, 3), "c": (4, 1300), "d": (5,)})
    rng = np.random.default_rng(seed)
    before = codec.encode(scale * rng.standard_normal(layout.size))
    after: NDArray[Any] = (scale * rng.standard_normal(layout.size)).astype(kind)
    encoded, weight = codec.encode(after), Fraction(int(rng.integers(1, 9)), 17)
    spans = [(place, int(rng.integers(0, 30))) for _, place in layout.spans()]
    update = Update(layout, before, after)
    norms = upload_norms(layout, before, encoded, weight, spans)
    assert upload_norms(layout, before, after, weight, spans).tolist() == norms.tolist()
    assert upload_norms(layout, before, after, weight, spans, update.squares).tolist() == norms.tolist()
    places = {spec.name: place for spec, place in layout.spans("carrier")}
    assert update.distances == {name: distance(encoded[place], before[place]) for name, place in places.items()}
    moved = np.abs(field.to_signed(field.sub(encoded, before)))
    assert update.largest == [int(moved[place].max()) for _, place in layout.spans()]


def test_norms_are_few() -> None:
    """ResNet-18: uploads stay below 8.1 bytes a parameter."""
    shapes: dict[str, tuple[int, ...]] = {"stem": (64, 3, 7, 7), "fc": (1000, 512)}
    for i, (wide, last) in enumerate(((64, 64), (128, 64), (256, 128), (512, 256))):
        shapes |= {f"{i}.a": (wide, last, 3, 3), **{f"{i}.{n}": (wide, wide, 3, 3) for n in "bcd"}}
        shapes |= {f"{i}.short": (wide, last, 1, 1)} if wide != last else {}
    layout = make_layout(shapes)
    assert layout.size > 11_000_000
    assert 8 * (layout.size + norm_count(layout)) < 8.02 * layout.size
