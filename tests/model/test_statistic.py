"""The canonical form: integers only, the same everywhere, and blind to what an attacker may do for nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quorumark import field
from quorumark.errors import InputError
from quorumark.field import P
from quorumark.model import kernels
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import STATISTICS, Canonical, canonical_form, inner_product, vector_digest
from quorumark.research.known import KnownKey, SeededKey, TensorsInMemory

BALANCED = "balanced-anchor/v1"
Tensors = dict[str, NDArray[Any]]


def _form(model: Tensors, anchor: Tensors, statistic: str = BALANCED, **options: Any) -> Canonical:
    layout = options.pop("layout", None) or ModelLayout.of(anchor)
    return canonical_form(statistic, layout, TensorsInMemory(model), TensorsInMemory(anchor), **options)


def _pair(seed: int = 0, rows: int = 40, columns: int = 30, taps: tuple[int, ...] = (3, 3)) -> tuple[Tensors, Tensors]:
    """An anchor, and a model that was trained from it: the anchor, moved."""
    rng = np.random.default_rng(seed)
    anchor = {
        "conv": rng.standard_normal((rows, columns, *taps)).astype(np.float32) * np.float32(0.05),
        "fc": rng.standard_normal((20, 64)).astype(np.float32) * np.float32(0.1),
    }
    model = {name: (w + 0.4 * w.std() * rng.standard_normal(w.shape)).astype(np.float32) for name, w in anchor.items()}
    return model, anchor


# --- an oracle in plain Python ----------------------------------------------------------------------------


@cache
def _log(w: float) -> int:
    """⌊256·log2|w|⌋ with the mantissa cut to 8 bits, from the fraction itself."""
    fraction, exponent = math.frexp(abs(w))  # w = fraction·2^exponent, 1/2 ≤ fraction < 1
    cut = int(fraction * 512)  # 256 … 511
    k = 0
    while Fraction(2) ** (k + 1) * 256**256 <= Fraction(cut) ** 256:
        k += 1
    return 256 * (exponent - 1) + k


def _counts(w: float) -> bool:
    return math.isfinite(w) and abs(w) >= 2.0**-126


def _oracle_scales(w: NDArray[Any]) -> tuple[list[int], list[int]]:
    rows, columns = w.shape[:2]
    by_row, by_column = [0] * rows, [0] * columns
    logs = [
        [[_log(v) for v in map(float, w[i, j].reshape(-1)) if _counts(v)] for j in range(columns)] for i in range(rows)
    ]
    limit = 1 << 30
    for _ in range(3):
        for i in range(rows):
            left = [max(-limit, min(limit, v - by_row[i] - by_column[j])) for j in range(columns) for v in logs[i][j]]
            by_row[i] += sum(left) // len(left) if left else 0
        limit = 2048
        for j in range(columns):
            left = [max(-limit, min(limit, v - by_row[i] - by_column[j])) for i in range(rows) for v in logs[i][j]]
            by_column[j] += sum(left) // len(left) if left else 0
    return by_row, by_column


@cache
def _power(i: int) -> int:
    """⌊2^(30 − i/256)⌋: the largest p with p^256 ≤ 2^(7680 − i)."""
    low, high = 0, 1 << 31
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**256 <= 1 << (7680 - i) else (low, middle)
    return low


def _oracle_balanced(w: NDArray[Any]) -> list[list[int]]:
    by_row, by_column = _oracle_scales(w)
    taps = w[0, 0].size
    out = []
    for i, row in enumerate(w.reshape(w.shape[0], -1)):
        line = []
        for k, v in enumerate(map(float, row)):
            value = 0
            if _counts(v):
                q, f = divmod(by_row[i] + by_column[k // taps], 256)
                # |w| = m·2^(e−23); round half up on the exact fraction
                exact = Fraction(abs(v)) * _power(f) / (1 << 30) * Fraction(2) ** (12 - q)
                value = min(1 << 17, math.floor(exact + Fraction(1, 2)))
            line.append(-value if v < 0 else value)
        out.append(line)
    return out


def _oracle(w: NDArray[Any], a: NDArray[Any]) -> list[int]:
    ours, theirs = _oracle_balanced(w), _oracle_balanced(a)
    left = []
    for v, b in zip(ours, theirs, strict=True):
        along, squared = sum(x * y for x, y in zip(v, b, strict=True)), sum(y * y for y in b)
        size = (abs(along) * 65536 + squared // 2) // squared if squared else 0
        coefficient = min(size, 1 << 20) * (-1 if along < 0 else 1)
        left += [x - ((coefficient * y + 32768) >> 16) for x, y in zip(v, b, strict=True)]
    total = max(sum(map(abs, left)), 4 * len(left))
    sizes = [min(127, (abs(x) * 25 * len(left) + total // 2) // total) for x in left]
    return [-s if x < 0 else s for s, x in zip(sizes, left, strict=True)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.sampled_from([(), (3,), (2, 2)]), st.booleans())
def test_the_canonical_form_is_the_oracles(
    seed: int, rows: int, columns: int, taps: tuple[int, ...], odd: bool
) -> None:
    rng = np.random.default_rng(seed)
    a = (rng.standard_normal((rows, columns, *taps)) * 10.0 ** rng.integers(-6, 3)).astype(np.float32)
    w = (a + rng.standard_normal(a.shape) * 10.0 ** rng.integers(-7, 2)).astype(np.float32)
    if odd:  # zeros, subnormal numbers, infinities, NaN, huge ones
        for value in (0.0, 1e-40, np.inf, np.nan, -3e38, 1e-37):
            w.reshape(-1)[rng.integers(w.size)] = value
        a[rng.integers(rows)] = 0
    assert _form({"w": w}, {"w": a}).x.tolist() == _oracle(w, a)


def test_a_long_row_of_cut_weights_does_not_overflow() -> None:
    """One row of 2^16 weights, half of them beyond the cut: ⟨ŵ, â⟩ is 2^48, and 2^16 times that no int64."""
    rng = np.random.default_rng(1)
    sizes = rng.permutation(np.repeat([1.0, 2.0**16], 1 << 15))
    a, w = (np.float32(sizes * rng.choice([-1, 1], 1 << 16, p=(p, 1 - p))).reshape(1, 1, -1) for p in (0.1, 0.2))
    assert _form({"w": w}, {"w": a}).x.tolist() == _oracle(w, a)


def test_the_paper_statistics_are_scaled_by_the_weight_in_the_middle() -> None:
    """2^10 times the power of two of the middle one: of three weights that is the second, of four too."""
    for weights, unit in (([1, 2, 4], 2), ([1, 2, 4, 8], 2), ([4, 4, 1], 4), ([0, 0, 8], 8)):
        w: Tensors = {"w": np.array([weights], np.float32)}
        form = _form(w, w, statistic="global-cosine/v1")
        assert form.x.tolist() == [1024 * v // unit for v in weights]
    w = {"w": np.array([[1, 1, 1, 3e4, -1e30]], np.float32)}  # what is beyond is cut
    assert _form(w, w, statistic="global-cosine/v1").x.tolist() == [1024, 1024, 1024, 1 << 24, -(1 << 24)]


def test_the_tables_are_what_they_say() -> None:
    for i in range(0, 256, 5):
        assert kernels.LOGS[i] == _log(1 + i / 256)
    assert [kernels.POWERS[i] for i in range(0, 256, 5)] == [_power(i) for i in range(0, 256, 5)]


GOLDEN = {
    "balanced-anchor/v1": "a0a2f05060bf0d8f0cb165a27dea3ca5e259ea034aff8728f1f50075e0f8f991",
    "global-cosine/v1": "06e4f4f6ff5ea9b07e7bd01e06c77221fcb3fba183d4ab023c6d29af398f2db8",
    "mean-tensor-cosine/v1": "889fa9e78c6c4d7c46f628abdedebe2ffa11037d878961d8768c65dafbc81101",
}


@pytest.mark.parametrize("statistic", STATISTICS)
def test_the_bytes_stay_the_same_for_ever(statistic: str) -> None:
    """From numbers that need no library: a certificate of today must check out on the machines of tomorrow."""
    words = np.frombuffer(hashlib.shake_128(b"quorumark golden").digest(4 * 6000), "<u4")
    values = ((words.astype(np.int64) - (1 << 31)).astype(np.float64) / (1 << 33)).astype(np.float32)
    anchor = {"a": values[:1800].reshape(20, 10, 3, 3), "b": values[1800:3000].reshape(30, 40)}
    model = {
        "a": anchor["a"] + values[3000:4800].reshape(20, 10, 3, 3) / 4,
        "b": anchor["b"] - values[4800:].reshape(30, 40) / 8,
    }
    assert _form(model, anchor, statistic).digest == GOLDEN[statistic]


def test_threads_and_blocks_and_libraries_make_no_difference() -> None:
    torch = pytest.importorskip("torch")
    model, anchor = _pair(rows=300, columns=60)
    expected = {statistic: _form(model, anchor, statistic).digest for statistic in STATISTICS}
    before = field.threads()
    try:
        for threads in (1, 2, 3, 7):
            field.set_threads(threads)
            assert {statistic: _form(model, anchor, statistic).digest for statistic in STATISTICS} == expected
    finally:
        field.set_threads(before)
    as_torch = {name: torch.from_numpy(w) for name, w in model.items()}
    assert _form(as_torch, anchor).digest == expected[BALANCED]
    as_float64 = {name: w.astype(np.float64) for name, w in model.items()}
    assert _form(as_float64, anchor).digest == expected[BALANCED]

    class Rowwise(TensorsInMemory):
        def blocks(self, name: str, limit: int = 1 << 22) -> Iterator[tuple[int, NDArray[Any]]]:
            yield from super().blocks(name, min(limit, 1))  # a row at a time

    layout = ModelLayout.of(anchor)
    for statistic in STATISTICS:
        found = canonical_form(statistic, layout, Rowwise(model), Rowwise(anchor))
        assert found.digest == expected[statistic]


def test_large_tensors_are_walked_in_blocks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model, anchor = _pair()
    expected = _form(model, anchor).digest
    monkeypatch.setattr("quorumark.model.statistic.KEPT", 100)
    monkeypatch.setattr("quorumark.model.statistic.BLOCK", 1000)
    assert _form(model, anchor).digest == expected


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_sample_is_a_part_of_the_whole(statistic: str) -> None:
    model, anchor = _pair()
    whole = _form(model, anchor, statistic)
    layout = ModelLayout.of(anchor, max_coordinates=3000)
    part = _form(model, anchor, statistic, layout=layout)
    assert part.x.size == 3000
    if statistic != "mean-tensor-cosine/v1":  # there each tensor is divided by the norm of what carries
        assert np.array_equal(part.x, whole.x[layout.carrying()])


# --- what an attacker may do for nothing -------------------------------------------------------------------


def _marked(seed: int = 1, strength: float = 0.3) -> tuple[Tensors, KnownKey]:
    model, anchor = _pair(seed, rows=100, columns=50)
    layout = ModelLayout.of(anchor)
    key = SeededKey(layout.coordinates, seed).numpy()
    for spec, place in layout.spans("carrier"):
        moved = (model[spec.name] - anchor[spec.name]).std()
        model[spec.name] = model[spec.name] + (strength * moved * key[place]).reshape(spec.shape).astype(np.float32)
    return model, KnownKey(key, layout, TensorsInMemory(anchor))


def test_rescaled_channels_do_not_hide_the_mark() -> None:
    model, known = _marked()
    before = known.z(model)
    rng = np.random.default_rng(3)
    rescaled = {}
    for name, w in model.items():
        out = np.exp(rng.uniform(-6, 6, (w.shape[0],) + (1,) * (w.ndim - 1)))
        into = np.exp(rng.uniform(-6, 6, (1, w.shape[1]) + (1,) * (w.ndim - 2)))
        rescaled[name] = (w * out * into).astype(np.float32)
    assert before > 40
    assert abs(known.z(rescaled) / before - 1) < 0.02
    assert abs(known.z(rescaled, "global-cosine/v1")) < 0.5 * known.z(model, "global-cosine/v1")


@pytest.mark.parametrize("what", ["1e30", "zeroed tensor", "denormals", "fp16", "bf16", "scaled", "nan", "int8"])
def test_one_odd_thing_moves_z_by_less_than_a_tenth(what: str) -> None:
    model, known = _marked()
    before = known.z(model)
    changed = {name: w.copy() for name, w in model.items()}
    if what == "1e30":
        for w in changed.values():
            w.reshape(-1)[7] = 1e30
    elif what == "zeroed tensor":
        changed["fc"][:] = 0
    elif what == "denormals":
        changed["conv"].reshape(-1)[::50] = 1e-41
    elif what == "fp16":
        changed = {name: w.astype(np.float16).astype(np.float32) for name, w in changed.items()}
    elif what == "bf16":
        changed = {name: (w.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, w in changed.items()}
    elif what == "scaled":
        changed = {name: w * np.float32(1000.1) for name, w in changed.items()}
    elif what == "nan":
        changed["conv"].reshape(-1)[::100] = np.nan
    elif what == "int8":
        for name, w in changed.items():
            step = np.abs(w).max() / 127
            changed[name] = (np.round(w / step) * step).astype(np.float32)
    assert abs(known.z(changed) / before - 1) < 0.1


def test_the_anchor_itself_gives_nothing() -> None:
    _, anchor = _pair()
    form = _form(anchor, anchor)
    assert not form.x.any()
    assert (form.norm1, form.norm2, form.norm4) == (0, 0, 0)


def test_missing_carriers_and_omitted_coordinates_are_zero() -> None:
    model, anchor = _pair()
    layout = ModelLayout.of(anchor)
    names = {"conv": "conv"}
    partly = _form({"conv": model["conv"]}, anchor, names=names)
    whole = _form(model, anchor)
    place = {spec.name: place for spec, place in layout.spans("carrier")}
    assert not partly.x[place["fc"]].any()
    assert np.array_equal(partly.x[place["conv"]], whole.x[place["conv"]])
    omit = np.zeros(layout.coordinates, np.bool_)
    omit[100:228] = True
    found = _form(model, anchor, omit=omit).x
    assert not found[omit].any()
    assert np.array_equal(found[~omit], whole.x[~omit])


# --- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistic", STATISTICS)
def test_norms_are_exact(statistic: str) -> None:
    model, anchor = _pair()
    model["fc"][0, 0] = 1e30  # the paper's statistics do not cut it away
    form = _form(model, anchor, statistic)
    values = [int(v) for v in form.x]
    assert form.norm1 == sum(map(abs, values))
    assert form.norm2 == sum(v**2 for v in values)
    assert form.norm4 == sum(v**4 for v in values)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=1, max_size=50))
def test_norms_of_extreme_vectors_are_exact(values: list[int]) -> None:
    form = Canonical.of("any", np.array(values, np.int32))
    expected = (sum(map(abs, values)), sum(v**2 for v in values), sum(v**4 for v in values))
    assert (form.norm1, form.norm2, form.norm4) == expected


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_the_inner_product_is_exact(dtype: type[Any]) -> None:
    rng = np.random.default_rng(5)
    info = np.iinfo(dtype)
    for size in (1, 7, 1000, 70_000):
        x = rng.integers(-info.max, info.max, size, dtype, endpoint=True)
        share = field.random(size)
        share[0] = P - 1
        expected = sum(int(a) * int(b) for a, b in zip(x, share, strict=True)) % P
        assert inner_product(x, share) == expected
        cut = -(-size // 3)
        parts = inner_product(x, share[:cut]) + inner_product(x, share[cut:], cut)
        assert parts % P == expected
    assert inner_product(x, share[:0]) == 0
    with pytest.raises(InputError, match="as many elements"):
        inner_product(x, share, 1)


def test_the_papers_statistics_are_the_papers() -> None:
    """In floating point: z of the whole vector's cosine, and of the mean of the tensors' cosines."""
    model, known = _marked()
    key = known.key.astype(np.float64)
    flat = known.layout.flatten(model).astype(np.float64)[: known.layout.carrier_size]
    whole = flat @ key / np.linalg.norm(flat)
    assert known.z(model, "global-cosine/v1") == pytest.approx(whole, rel=1e-3)
    cosines, weights = [], []
    for _, place in known.layout.spans("carrier"):
        part = flat[place]
        cosines.append(part @ key[place] / (np.linalg.norm(part) * np.sqrt(part.size)))
        weights.append(1 / part.size)
    expected = np.mean(cosines) / (np.sqrt(np.sum(weights)) / len(weights))  # over its deviation under random keys
    assert known.z(model, "mean-tensor-cosine/v1") == pytest.approx(expected, rel=1e-3)


def test_digests_name_the_type() -> None:
    x = np.arange(5)
    assert vector_digest(x.astype(np.int8)) != vector_digest(x.astype(np.int32))
    assert vector_digest(x.astype(">i4").astype(np.int32)) == vector_digest(x.astype(np.int32))


def test_an_unknown_statistic_is_refused() -> None:
    model, anchor = _pair()
    with pytest.raises(InputError, match=r"statistic must be one of balanced-anchor/v1"):
        _form(model, anchor, "balanced-anchor/v9")


def test_models_that_come_in_different_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small tensor is put together first; a large one is refused rather than paired with other rows."""

    class Rowwise(TensorsInMemory):
        def blocks(self, name: str, limit: int = 1 << 22) -> Iterator[tuple[int, NDArray[Any]]]:
            yield from super().blocks(name, min(limit, 1))

    model, anchor = _pair()
    layout = ModelLayout.of(anchor)
    found = canonical_form(BALANCED, layout, Rowwise(model), TensorsInMemory(anchor))
    assert found.digest == _form(model, anchor).digest
    monkeypatch.setattr("quorumark.model.statistic.KEPT", 100)
    with pytest.raises(InputError, match="must come in the same blocks of 'conv'"):
        canonical_form(BALANCED, layout, Rowwise(model), TensorsInMemory(anchor))
