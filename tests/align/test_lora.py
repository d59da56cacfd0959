"""quorumark.align.lora: re-factoring, merging or re-extracting an adapter leaves its mark where it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from quorumark import field
from quorumark.align.fixed import Fixed, SingularError, inverse, times
from quorumark.align.groups import Group, Groups, Mixing, Slot
from quorumark.align.lora import Base, Factors, Gauged, Lora, _scalings, base_layout, find_factors, gauge, gauge_suspect
from quorumark.consortium.policy import Policy
from quorumark.consortium.succession import check_terms_follow
from quorumark.errors import EvidenceError, InconclusiveError, LayoutError, RecordError
from quorumark.model.layout import BFLOAT16, ModelLayout, write_safetensors
from quorumark.model.statistic import canonical_form
from quorumark.model.suspect import read_suspect
from quorumark.reasons import Reason
from quorumark.research.known import KnownKey, SeededKey, TensorsInMemory
from quorumark.setup.inprocess import deal_key
from quorumark.verify.answer import answer
from quorumark.verify.check import check_certificate
from quorumark.verify.combine import combine
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference, describe_lora
from tests.kit.ceremony import identities, make_terms
from tests.kit.commands import run
from tests.kit.consortium import Tensors, World, make_world
from tests.kit.oracle import spelled

RANK = 8
SHAPES = {"q": (160, 192), "up": (256, 192), "v": (96, 192), "down": (192, 256)}
PEFT = "base_model.model.model.layers.0."
GOLDEN = "f5e286655b3415ec74cb7fe766623e3b63e4c35d73be9d4072bab3fd4c00c86a"
SEVERAL = [
    "c7d1994a46dc6f8324929ee504a253c1cbb547c6690f21b5519c9ba8230c78ed",
    "c7d1994a46dc6f8324929ee504a253c1cbb547c6690f21b5519c9ba8230c78ed",
]


# --- adapters ---------------------------------------------------------------------------------------------


def base_model(seed: int = 0) -> Tensors:
    rng = np.random.default_rng([1, seed])
    model: Tensors = {"model.embed_tokens.weight": rng.standard_normal((50, 192)).astype(np.float32)}
    for name, (rows, columns) in SHAPES.items():
        weight = 0.05 * rng.standard_normal((rows, columns))
        model[f"model.layers.0.{name}.weight"] = weight.astype(np.float32)
        model[f"model.layers.0.{name}.bias"] = np.zeros(rows, np.float32)
    return model


def down(name: str) -> str:
    return f"{PEFT}{name}.lora_A.weight"


def up(name: str) -> str:
    return f"{PEFT}{name}.lora_B.weight"


def initial(seed: int = 0) -> Tensors:
    """As PEFT begins: A uniform, B zero."""
    rng = np.random.default_rng([2, seed])
    model: Tensors = {}
    for name, (rows, columns) in SHAPES.items():
        model[down(name)] = (rng.uniform(-1, 1, (RANK, columns)) / np.sqrt(columns)).astype(np.float32)
        model[up(name)] = np.zeros((rows, RANK), np.float32)
    return model


def trained(start: Tensors, seed: int, moved: float = 0.7) -> Tensors:
    """Somebody's training: A moved by a fraction of its size, B of a size that makes a tenth of the base's weights."""
    rng = np.random.default_rng([3, seed])
    model = {}
    for name, w in start.items():
        size = moved * float(w.std()) if "lora_A" in name else 0.04
        model[name] = (w + size * rng.standard_normal(w.shape)).astype(np.float32)
    return model


def product(adapter: Tensors, name: str) -> NDArray[np.float64]:
    found: NDArray[np.float64] = adapter[up(name)].astype(np.float64) @ adapter[down(name)].astype(np.float64)
    return found


def merged(adapter: Tensors, strength: float = 2.0, base: Tensors | None = None) -> Tensors:
    model = dict(base_model() if base is None else base)
    for name in SHAPES:
        whole = f"model.layers.0.{name}.weight"
        model[whole] = (model[whole] + strength * product(adapter, name)).astype(np.float32)
    return model


def refactored(adapter: Tensors, seed: int, condition: float = 30.0) -> Tensors:
    rng = np.random.default_rng(seed)
    model = dict(adapter)
    for name in SHAPES:
        one, two = (np.linalg.qr(rng.standard_normal((RANK, RANK)))[0] for _ in range(2))
        turn = one @ np.diag(condition ** np.linspace(-0.5, 0.5, RANK)) @ two
        model[down(name)] = (turn @ adapter[down(name)]).astype(np.float32)
        model[up(name)] = (adapter[up(name)] @ np.linalg.inv(turn)).astype(np.float32)
    return model


def of_rank(adapter: Tensors, rank: int) -> Tensors:
    """The nearest product of a rank, padded with zeros if there is no more."""
    model = {}
    for name in SHAPES:
        left, sizes, right = np.linalg.svd(product(adapter, name), full_matrices=False)
        model[up(name)] = (left[:, :rank] * sizes[:rank]).astype(np.float32)
        model[down(name)] = right[:rank].astype(np.float32)
    return model


def bfloat16(model: Tensors) -> Tensors:
    """Rounded to nearest, ties to even."""
    out = {}
    for name, w in model.items():
        bits = w.view(np.uint32).astype(np.uint64)
        out[name] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(BFLOAT16)
    return out


def quantised(model: Tensors, bits: int) -> Tensors:
    out = dict(model)
    for name, w in model.items():
        if w.ndim == 2 and "layers" in name:
            step = np.abs(w).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
            out[name] = (np.round(w / step) * step).astype(np.float32)
    return out


def pruned(model: Tensors, part: float) -> Tensors:
    out = dict(model)
    for name, w in model.items():
        if w.ndim == 2 and "layers" in name:
            out[name] = np.where(np.abs(w) < np.quantile(np.abs(w), part), np.float32(0), w)
    return out


LAYOUT = ModelLayout.of(initial())
LORA = describe_lora(LAYOUT, base_model())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    policy = {"z": "6", "lora": LORA.digest()}
    made = make_world(folder, rho=0.3, models=(initial(), trained(initial(), 1)), policy=policy)
    (folder / "lora.json").write_bytes(LORA.to_bytes())
    write_safetensors(base_model(), folder / "base.safetensors")
    made.reference = Reference.read(folder / "consortium.json")
    return made


def z_of(world: World, suspect: Any) -> float:
    return world.known.z_of(prepare(world.reference, suspect, lora=True).form)


# --- integers -----------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(-60, 60))
def test_products_are_right_and_need_no_order(seed: int, bits: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    rows, inner, columns = (int(n) for n in rng.integers(1, [5, 300, 5]))
    limit = 1 << bits
    one = rng.integers(-limit, limit, (rows, inner), endpoint=True)
    two = rng.integers(-limit, limit, (inner, columns), endpoint=True)
    found = times(Fixed(one, exponent), Fixed(two, 3))
    unit = found.exponent - exponent - 3
    exact = one.astype(object) @ two.astype(object)
    for mine, theirs in zip(found.values.reshape(-1), exact.reshape(-1), strict=True):
        assert abs((int(mine) << unit) - theirs) <= 2 << unit if unit else int(mine) == theirs
    order = rng.permutation(inner)
    again = times(Fixed(one[:, order], exponent), Fixed(two[order], 3))
    assert (again.exponent, again.values.tolist()) == (found.exponent, found.values.tolist())


@pytest.mark.parametrize("inner", [1, 4096, 5000, 8192])
def test_products_with_zeros(inner: int) -> None:
    """Of any length, and whatever room the other matrix leaves."""
    for number in (1.0, 1 - 2.0**-50):
        one, zeros = Fixed.of(np.full((2, inner), number)), Fixed(np.zeros((inner, 3), np.int64), 5)
        assert not times(one, zeros).values.any()
        assert not times(zeros_of(3, inner), Fixed.of(np.full((inner, 2), number))).values.any()


def zeros_of(*shape: int) -> Fixed:
    return Fixed(np.zeros(shape, np.int64), -7)


def test_products_of_floats_are_not_like_that() -> None:
    """What the integers are for: the last bits of a plain product depend on the order."""
    rng = np.random.default_rng(0)
    one, two, order = rng.standard_normal((8, 300)), rng.standard_normal((300, 8)), rng.permutation(300)
    assert (one @ two != one[:, order] @ two[order]).any()


@pytest.mark.parametrize(("rank", "ridge"), [(1, None), (5, None), (24, None), (24, 12)])
def test_inverses(rank: int, ridge: int | None) -> None:
    x = np.random.default_rng(rank).standard_normal((3 * rank, rank))
    square = 1e-9 * (x.T @ x)
    found = inverse(Fixed.of(square), ridge).floats()
    whole = square + (0 if ridge is None else np.trace(square) / rank / 2**ridge) * np.eye(rank)
    assert np.allclose(found @ whole, np.eye(rank), atol=1e-7)


def test_what_has_no_inverse() -> None:
    x = np.ones((4, 3))
    for square in (np.zeros((3, 3)), x.T @ x):
        with pytest.raises(SingularError):
            inverse(Fixed.of(square))
    assert np.isfinite(inverse(Fixed.of(x.T @ x), 12).floats()).all()


# --- the gauge --------------------------------------------------------------------------------------------


def blocks(delta: NDArray[Any], step: int = 1000) -> Any:
    def read() -> Iterator[tuple[int, NDArray[Any]]]:
        for begin in range(0, len(delta), step):
            yield begin, delta[begin : begin + step].astype(np.float64)

    return read


def test_the_formula() -> None:
    """Beside floating point; and the gauge: A − A₀ stands on A₀, B·A is Δ."""
    start, model = initial(), trained(initial(), 5)
    for name in SHAPES:
        delta, anchor = product(model, name), start[down(name)].astype(np.float64)
        for step in (1000, 7):
            a, b = gauge(blocks(delta, step), start[down(name)])
            right = delta @ anchor.T @ np.linalg.inv(anchor @ anchor.T)
            square = right.T @ right
            ridge = np.trace(square) / RANK / 2**12 * np.eye(RANK)
            left = anchor + np.linalg.solve(square + ridge, right.T @ (delta - right @ anchor))
            assert np.allclose(b, right, rtol=0, atol=1e-6 * np.abs(right).max())
            assert np.allclose(a, left, rtol=0, atol=1e-6 * np.abs(left).max())
        assert np.abs((a - anchor) @ anchor.T).max() < 2e-3 * np.abs(anchor @ anchor.T).max()
        assert np.linalg.norm(b @ a - delta) < 2e-3 * np.linalg.norm(delta)


def test_the_factors_of_one_product_are_one() -> None:
    """Re-factored, padded, merged: the same A, and the same B up to the strength."""
    model = trained(initial(), 6)
    wide = {n: np.pad(w, ((0, 3), (0, 0)) if "lora_A" in n else ((0, 0), (0, 3))) for n, w in model.items()}
    found = {}
    suspects = {
        "as it is": model,
        "re-factored": refactored(model, 1, 1000.0),
        "wider": wide,
        "re-extracted": of_rank(model, 8),
        "merged": merged(model, 1.0),
        "stronger": merged(model, 1.5),
    }
    for text, suspect in suspects.items():
        gauged = gauged_by(read_suspect(suspect))
        assert gauged.merged == (text in ("merged", "stronger"))
        found[text] = {name: next(gauged.blocks(name))[1].copy() for name in gauged.names}
    for text, factors in found.items():
        for name, w in factors.items():
            scale = 1.5 if text == "stronger" and "lora_B" in name else 1.0
            expected = scale * found["as it is"][name]
            assert np.allclose(w, expected, rtol=0, atol=2e-4 * np.abs(expected).max()), (text, name)


def gauged_by(suspect: Any, anchor: Tensors | None = None) -> Gauged:
    base = read_suspect(base_model())
    start = TensorsInMemory(initial() if anchor is None else anchor)
    return gauge_suspect(suspect, LAYOUT, start, LORA, lambda: Base(base, base))


def test_the_same_bytes_everywhere() -> None:
    before, digests = field.threads(), set()
    for threads in (1, 2):
        field.set_threads(threads)
        form = canonical_form(
            "balanced-anchor/v1", LAYOUT, gauged_by(read_suspect(trained(initial(), 7))), TensorsInMemory(initial())
        )
        digests.add(form.digest)
    field.set_threads(before)
    assert digests == {GOLDEN}


def test_the_same_bytes_of_a_layer_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are rounded block by block: how many weights a block has is part of the procedure."""

    def numbers(label: str, *shape: int) -> NDArray[np.float32]:
        words = np.frombuffer(hashlib.shake_128(label.encode()).digest(2 * int(np.prod(shape))), "<i2")
        return (words.astype(np.float32) / np.float32(1 << 20)).reshape(shape)

    anchor = {"l.lora_A": numbers("A0", 3, 1024), "l.lora_B": np.zeros((2200, 3), np.float32)}
    layout, base = ModelLayout.of(anchor), {"l.weight": numbers("W", 2200, 1024)}
    lora = describe_lora(layout, base)
    adapter = {"l.lora_A": numbers("A", 4, 1024), "l.lora_B": numbers("B", 2200, 4)}
    adapter["l.lora_B"][:1000] *= np.float32(3)
    whole = {"l.weight": (base["l.weight"] + adapter["l.lora_B"].astype(np.float64) @ adapter["l.lora_A"])}
    monkeypatch.setattr("quorumark.model.statistic.BLOCK", 1 << 16)  # whatever the canonical form works on at a time
    public = read_suspect(base)
    digests = []
    for suspect in (adapter, {"l.weight": np.round(whole["l.weight"] * 2**30) / 2**30}):
        gauged = gauge_suspect(
            read_suspect(suspect), layout, TensorsInMemory(anchor), lora, lambda: Base(public, public)
        )
        factors = [_together(gauged.blocks(name)) for name in ("l.lora_A", "l.lora_B")]
        digests.append(hashlib.sha256(b"".join(x.astype("<f4").tobytes() for x in factors)).hexdigest())
    assert digests == SEVERAL


def _together(blocks: Any) -> NDArray[Any]:
    return np.concatenate([values for _, values in blocks])


def test_a_layer_that_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again for every pass, and gives the same."""
    delta, anchor = product(trained(initial(), 7), "q"), initial()[down("q")]
    expected = gauge(blocks(delta, 7), anchor)
    monkeypatch.setattr("quorumark.align.lora.KEPT", 1000)
    assert all((one == two).all() for one, two in zip(gauge(blocks(delta, 7), anchor), expected, strict=True))


def test_an_anchor_after_warm_up_rounds() -> None:
    """B₀ is not 0 then; what is taken out of B is the anchor's, whatever the strength of the merge."""
    anchor = trained(initial(), 20)
    model, key = trained(anchor, 21, 0.3), SeededKey(LAYOUT.coordinates, 3).numpy()
    for spec, place in LAYOUT.spans("carrier"):
        moved = float((model[spec.name] - anchor[spec.name]).std())
        model[spec.name] += (0.3 * moved * key[place].reshape(spec.shape)).astype(np.float32)
    known = KnownKey(key, LAYOUT, TensorsInMemory(anchor))
    for suspect in (refactored(model, 1), merged(model, 0.5)):
        assert known.z(gauged_by(read_suspect(suspect), anchor)) > 0.9 * known.z(model) > 20


def test_layers_that_nothing_was_added_to() -> None:
    model = trained(initial(), 8)
    model[up("v")][:] = 0
    for suspect in (model, merged(model)):
        gauged = gauged_by(read_suspect(suspect))
        assert (next(gauged.blocks(down("v")))[1] == initial()[down("v")]).all()
        assert not next(gauged.blocks(up("v")))[1].any()


def test_one_huge_weight_is_next_to_nothing(world: World) -> None:
    model = merged(world.marked)
    plain = z_of(world, model)
    for huge in (1e6, np.inf, np.nan):
        model["model.layers.0.q.weight"][3, 5] = huge
        assert abs(z_of(world, model) - plain) < 1


P = "model.layers.0."
NEURONS = Groups((Group(256, (Slot(f"{P}down.weight", 1, 0, 1, 1, 1), Slot(f"{P}up.weight", 0, 0, 1, 1, 1))),))
HEADS = (
    Mixing(32, (Slot(f"{P}q.weight", 0, 0, 1, 1, 1),), (Slot(f"{P}v.weight", 0, 0, 1, 1, 1),)),
    Mixing(16, (Slot(f"{P}q.weight", 0, 32, 1, 2, 16),)),
)


def aligned(suspect: Tensors, groups: Groups) -> Gauged:
    base = read_suspect(base_model())
    return gauge_suspect(
        read_suspect(suspect), LAYOUT, TensorsInMemory(initial()), LORA, lambda: Base(base, base), groups
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w * np.float32(1e30),
        lambda w: w * np.float32(1e-30) * np.float32(1e-12),
        lambda w: np.full_like(w, np.finfo(np.float32).max),
        lambda w: np.full_like(w, np.nan),
        lambda w: np.full_like(w, np.inf),
        lambda w: 0 * w,
        lambda w: w.astype(np.float64) * 1e300,
        lambda w: w.astype(np.float64) * 1e-320,
        lambda w: np.full(w.shape, np.finfo(np.float64).max),
        lambda w: (w.T * 10.0 ** np.linspace(-300, 300, w.shape[0])).T,
        lambda w: np.where(np.arange(w.size).reshape(w.shape) % 97, w.astype(np.float64) * 1e-200, 1e300),
    ],
    ids=[
        "large",
        "subnormal",
        "largest",
        "nan",
        "infinite",
        "zeros",
        "float64",
        "tiny",
        "largest float64",
        "all sizes",
        "tiny and huge",
    ],
)
def test_suspects_of_any_numbers(change: Any) -> None:
    """No error and no warning, whatever the numbers are: x is what is left, or nothing."""
    adapter = trained(initial(), 3)
    for suspect in (adapter, merged(adapter)):
        gauged = gauged_by(read_suspect({name: change(w) for name, w in suspect.items()}))
        assert canonical_form("balanced-anchor/v1", LAYOUT, gauged, TensorsInMemory(initial())).norm2 >= 0
    gauged = aligned({name: change(w) for name, w in merged(adapter).items()}, replace(NEURONS, mixings=HEADS))
    assert canonical_form("balanced-anchor/v1", LAYOUT, gauged, TensorsInMemory(initial())).norm2 >= 0


def test_channels_that_nothing_reads_hide_nothing(world: World) -> None:
    """Permuted, rescaled neurons, and huge weights where the input is always 0: a whole channel, or one weight."""
    rng = np.random.default_rng(0)
    order, scale = rng.permutation(256), np.exp2(rng.uniform(-2, 2, 256)).astype(np.float32)
    plain = world.known.z(world.marked)
    for size in (1e6, 1e12, 1e30):
        for place in (np.s_[:, 7], np.s_[7, 9]):
            model = merged(world.marked)
            for name in SHAPES:
                weight = model[f"{P}{name}.weight"]
                weight[place] = size * rng.standard_normal(weight[place].shape)
            model[f"{P}up.weight"] = (model[f"{P}up.weight"] * scale[:, None])[order]
            model[f"{P}down.weight"] = (model[f"{P}down.weight"] / scale)[:, order]
            assert world.known.z(aligned(model, NEURONS)) > 0.75 * plain, (size, place)


def test_channels_that_are_not_there_are_not_covered(world: World) -> None:
    """A merged model without a third of its neurons: neither what goes into them nor what comes out was seen."""
    model, left = merged(world.marked), np.arange(256) % 3 > 0
    model[f"{P}up.weight"], model[f"{P}up.bias"] = model[f"{P}up.weight"][left], model[f"{P}up.bias"][left]
    model[f"{P}down.weight"] = model[f"{P}down.weight"][:, left]
    found = aligned(model, NEURONS)
    assert found.covered(LAYOUT) == LAYOUT.carrier_size - 2 * RANK * int((~left).sum())
    assert aligned(merged(world.marked), NEURONS).covered(LAYOUT) == LAYOUT.carrier_size
    assert world.known.z(found) > 0.7 * world.known.z(world.marked)


def test_scales_are_found_among_weights_with_heavy_tails(world: World) -> None:
    """Large language models have some weights far above the others, and Δ is a few percent: scales must be right to
    less than that. Rescaled by up to four times either way, permuted, and with a third of the weights pruned.
    """
    rng = np.random.default_rng(0)
    base = base_model()
    for name in SHAPES:
        base[f"{P}{name}.weight"] = (0.05 * rng.standard_t(3, SHAPES[name])).astype(np.float32)
    public, lora = read_suspect(base), describe_lora(LAYOUT, base)
    order, scale = rng.permutation(256), np.exp2(rng.uniform(-2, 2, 256)).astype(np.float32)
    plain = world.known.z(world.marked)
    for part, least in ((0.0, 0.9), (0.33, 0.75)):
        model = merged(world.marked, 0.4, base)  # Δ is about 5 % of the base
        added = product(world.marked, "q").std() * 0.4 / base[f"{P}q.weight"].std()
        assert 0.02 < added < 0.08
        model = {n: w if w.ndim < 2 or "layers" not in n else _smallest_gone(w, part) for n, w in model.items()}
        model[f"{P}up.weight"] = (model[f"{P}up.weight"] * scale[:, None])[order]
        model[f"{P}down.weight"] = (model[f"{P}down.weight"] / scale)[:, order]
        anchor = TensorsInMemory(initial())
        found = gauge_suspect(read_suspect(model), LAYOUT, anchor, lora, lambda: Base(public, public), NEURONS)
        assert world.known.z(found) > least * plain, part


def test_scales_of_rows_and_columns_are_right_to_less_than_what_was_added() -> None:
    """Δ of 2 % of the base, the scales of both sides in four octaves: what they add to Δ is a tenth of it."""
    rng = np.random.default_rng(1)
    for freedom in (3, 100):
        base = 0.05 * rng.standard_t(freedom, (300, 400))
        rows, columns = (np.exp2(rng.uniform(-2, 2, n)) for n in base.shape)
        delta = 0.02 * base.std() * rng.standard_normal(base.shape)
        whole = (base + delta) * rows[:, None] * columns
        d, c = _scalings(whole, base)
        assert (whole / (d[:, None] * c) - base - delta).std() < 0.2 * delta.std()
        d, c = _scalings(base * rows[:, None] * columns, base)  # nothing was added
        assert np.allclose(d[:, None] * c, rows[:, None] * columns, rtol=1e-3)


def _smallest_gone(weight: NDArray[Any], part: float) -> NDArray[Any]:
    return np.where(np.abs(weight) < np.quantile(np.abs(weight), part), np.float32(0), weight)


# --- what is left of the mark -----------------------------------------------------------------------------


def test_what_is_left_after_each(world: World) -> None:
    """z of the released factors, and what is kept of it; without the gauge only the first is seen at all."""
    marked, released = world.marked, world.known.z(world.marked)
    assert released > 20
    cases: dict[str, tuple[Tensors, float]] = {
        "as released": (marked, 0.9),
        "re-factored": (refactored(marked, 1), 0.9),
        "badly re-factored": (refactored(marked, 2, 1e4), 0.9),
        "merged": (merged(marked), 0.9),
        "merged at a third": (merged(marked, 2 / 3), 0.9),
        "merged, bfloat16": (bfloat16(merged(marked)), 0.9),
        "merged, 8 bits": (quantised(merged(marked), 8), 0.8),
        "merged, 4 bits": (quantised(merged(marked), 4), 0.4),
        "merged, half pruned": (pruned(merged(marked), 0.5), 0.3),
        "of rank 5": (of_rank(marked, 5), 0.5),
        "of rank 12": (of_rank(marked, 12), 0.9),
        "names without wrappers": ({n.removeprefix("base_model.model."): w for n, w in marked.items()}, 0.9),
    }
    for text, (suspect, least) in cases.items():
        assert z_of(world, suspect) > least * released, text
    assert abs(world.known.z(refactored(marked, 1))) < 4
    # another strength is no other query: x is the same but for roundings
    assert z_of(world, merged(marked)) == pytest.approx(z_of(world, merged(marked, 0.7)), abs=0.05)


def cancelled(adapter: Tensors, size: float) -> Tensors:
    """Two more ranks, in float64, whose products are huge and cancel exactly."""
    rng = np.random.default_rng(6)
    model = {}
    for name in SHAPES:
        a, b = adapter[down(name)].astype(np.float64), adapter[up(name)].astype(np.float64)
        row, column = rng.standard_normal((1, a.shape[1])), size * rng.standard_normal((b.shape[0], 1))
        model[down(name)] = np.concatenate([row, row, a])
        model[up(name)] = np.concatenate([column, -column, b], axis=1)
    return model


def refactored_64(adapter: Tensors, condition: float) -> Tensors:
    wide = refactored({name: w.astype(np.float64) for name, w in adapter.items()}, 3, 1.0)
    rng, model = np.random.default_rng(7), {}
    for name in SHAPES:
        sizes = condition ** np.linspace(-0.5, 0.5, RANK)
        turn = np.linalg.qr(rng.standard_normal((RANK, RANK)))[0]
        model[down(name)] = sizes[:, None] * (turn @ wide[down(name)].astype(np.float64))
        model[up(name)] = wide[up(name)].astype(np.float64) @ turn.T / sizes
        # and mixed once more, so that the sizes are not those of rows
        model[down(name)], model[up(name)] = turn @ model[down(name)], model[up(name)] @ turn.T
    return model


def test_factors_that_are_the_same_function_in_float64_hide_nothing(world: World) -> None:
    """Whatever sizes numbers have on the way to the product: each weight of it is made by itself."""
    marked = world.marked
    expected = z_of(world, marked)
    cases = {
        "ill-conditioned": refactored_64(marked, 1e10),
        "cancelling": cancelled(marked, 2.0**24),
        "tiny, for a huge strength": {n: w.astype(np.float64) * 1e-145 for n, w in marked.items()},
        "sizes moved": {n: w.astype(np.float64) * (1e-280 if "lora_A" in n else 1e280) for n, w in marked.items()},
    }
    rng = np.random.default_rng(8)
    for text, suspect in cases.items():
        for name in SHAPES:
            x = rng.standard_normal(SHAPES[name][1])
            ours, theirs = (m[up(name)].astype(np.float64) @ (m[down(name)] @ x) for m in (marked, suspect))
            scale = 1e-290 if "tiny" in text else 1.0
            assert np.allclose(theirs, scale * ours, rtol=0, atol=1e-4 * scale * ours.std()), text
        assert z_of(world, suspect) == pytest.approx(expected, abs=0.1), text


@pytest.mark.parametrize("size", [1e3, 1e12, 1e30])
def test_huge_numbers_that_nothing_reads_hide_nothing(world: World, size: float) -> None:
    """An input that is always 0, or an output that nobody reads, may be multiplied with anything."""
    expected = z_of(world, world.marked)
    for axis, factor in ((1, down), (0, up)):
        suspect = dict(world.marked)
        for name in SHAPES:
            suspect[factor(name)] = suspect[factor(name)].copy()
            np.moveaxis(suspect[factor(name)], axis, 0)[0] *= size
        assert z_of(world, suspect) > 0.8 * expected


def test_a_layer_of_a_real_model_s_shapes() -> None:
    """The table in docs/lora.md, for one of four layers: z is half of what is said there, what is kept is the same.

    SmolLM2-135M's shapes, Δ of 2 % of the base's size, A moved by 0.3 of its own, ρ = 0.05. z varies by about 1 from
    seed to seed, which is 0.06 of it.
    """
    shapes = {"q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576)}
    shapes |= {"gate": (1536, 576), "up": (1536, 576), "down": (576, 1536)}
    rng = np.random.default_rng(0)
    base, start, model = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name, (rows, columns) in shapes.items():
        base[f"{name}.weight"] = (0.05 * rng.standard_normal((rows, columns))).astype(np.float32)
        start[f"{name}.lora_A"] = (rng.uniform(-1, 1, (16, columns)) / np.sqrt(columns)).astype(np.float32)
        start[f"{name}.lora_B"] = np.zeros((rows, 16), np.float32)
        a = start[f"{name}.lora_A"] + 0.3 / np.sqrt(3 * columns) * rng.standard_normal((16, columns))
        b = rng.standard_normal((rows, 16))
        model |= {f"{name}.lora_A": a, f"{name}.lora_B": b * (0.02 * 0.05 / np.std(b @ a))}
    layout = ModelLayout.of(start)
    assert layout.coordinates == 651_264 // 4
    key = SeededKey(layout.coordinates, 0).numpy()
    for spec, place in layout.spans("carrier"):
        added = 0.05 * (model[spec.name] - start[spec.name]).std() * key[place].reshape(spec.shape)
        model[spec.name] = (model[spec.name] + added).astype(np.float32)
    anchor, lora, public = TensorsInMemory(start), describe_lora(layout, base), read_suspect(base)
    known = KnownKey(key, layout, anchor)

    def z(suspect: Tensors) -> float:
        found = gauge_suspect(read_suspect(suspect), layout, anchor, lora, lambda: Base(public, public))
        return known.z(found) / released

    def whole(change: Any = lambda _name, weight, delta: weight + delta) -> Tensors:
        return {
            f"{name}.weight": change(
                name, base[f"{name}.weight"].astype(np.float64), model[f"{name}.lora_B"] @ model[f"{name}.lora_A"]
            ).astype(np.float32)
            for name in shapes
        }

    def noise(size: float) -> Any:
        return lambda _, weight, delta: weight + delta + size * delta.std() * rng.standard_normal(delta.shape)

    def noise_in_rows(size: float) -> Any:
        """Of somebody who knows the rule: where B is read."""

        def change(name: str, weight: Any, delta: Any) -> Any:
            more = rng.standard_normal((len(delta), 16)) @ start[f"{name}.lora_A"]
            return weight + delta + size * delta.std() / more.std() * more

        return change

    def rounded(bits: int) -> Any:
        def change(_name: str, weight: Any, delta: Any) -> Any:
            step = np.abs(weight + delta).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
            return np.round((weight + delta) / step) * step

        return change

    released = known.z(model)
    assert 15 < released < 21
    assert z(model) > 0.95
    assert z(whole()) > 0.95
    assert z(bfloat16(whole())) > 0.95
    assert z(whole(rounded(8))) > 0.9
    assert 0.3 < z(whole(rounded(4))) < 0.65
    assert z(whole(lambda *x: np.where(np.abs(x[1] + x[2]) < 0.0337, 0, x[1] + x[2]))) > 0.85  # half of them
    kept = {size: (z(whole(noise(size))), z(whole(noise_in_rows(size)))) for size in (1, 3)}
    assert kept[1][0] > 0.8
    assert 0.55 < kept[3][0] < 0.85
    assert 0.6 < kept[1][1] < 0.9
    assert 0.25 < kept[3][1] < 0.55


def test_innocents_and_random_keys(world: World) -> None:
    """24 adapters that know nothing of the key, from the same beginning and from others; then 2,000 keys on one."""
    known = KnownKey(SeededKey(LAYOUT.coordinates, 4).numpy(), LAYOUT, world.known.anchor)  # the same in every run
    models = [trained(initial(seed % 2 * seed), 100 + seed) for seed in range(24)]
    found = [known.z_of(prepare(world.reference, model, lora=True).form) for model in models]
    assert max(map(abs, found)) < 4
    assert abs(np.mean(found)) < 4 / np.sqrt(24)
    form = prepare(world.reference, merged(trained(initial(), 99)), lora=True).form
    zs = [
        KnownKey(SeededKey(LAYOUT.coordinates, 5, n).numpy(), LAYOUT, world.known.anchor).z_of(form)
        for n in range(2000)
    ]
    assert stats.kstest(zs, "norm").pvalue > 1e-4
    assert stats.kstest(np.array(zs) * 1.15, "norm").pvalue < 1e-4  # and it would notice


def test_who_may_choose_the_factors_finds_any_mark(world: World) -> None:
    """Why the rule is fixed by the anchor: R fitted to the key gives z ≈ r for every factor of an innocent model."""
    model, key = trained(initial(), 9), world.known.key.astype(np.float64)
    signs = {spec.name: key[place].reshape(spec.shape) for spec, place in LAYOUT.spans("carrier")}
    fitted = dict(initial())
    for name in SHAPES:
        fitted[up(name)] = (model[up(name)] @ np.linalg.lstsq(model[up(name)], signs[up(name)])[0]).astype(np.float32)
    assert world.known.z(fitted) > 12
    assert abs(z_of(world, model)) < 4


# --- what is agreed on ------------------------------------------------------------------------------------


def test_factors_are_found_by_name() -> None:
    base = base_layout(read_suspect(base_model()))
    found = find_factors(LAYOUT, base)
    assert found == LORA.layers
    assert found[1] == Factors(down("q"), up("q"), "model.layers.0.q.weight")
    short = ModelLayout.of({n.removeprefix(PEFT).removesuffix(".weight"): w for n, w in initial().items()})
    turned = {f"transformer.{n.removeprefix('model.layers.0.')}": w.T for n, w in base_model().items() if "layers" in n}
    named = find_factors(short, base_layout(read_suspect(turned)))
    assert named[1] == Factors("q.lora_A", "q.lora_B", "transformer.q.weight", True)
    # a square weight lies as the others do
    square = ModelLayout.of({**initial(), "o.lora_A": np.zeros((4, 16), np.float32), "o.lora_B": np.zeros((16, 4))})
    for lies in (base_model(), {n: w.T for n, w in base_model().items()}):
        named = find_factors(square, base_layout(read_suspect({**lies, "o.weight": np.zeros((16, 16), np.float32)})))
        assert {layer.transposed for layer in named} == {lies["model.layers.0.q.weight"].shape[0] == 192}
    twice = {**base_model(), "q.weight": np.zeros(SHAPES["q"], np.float32)}
    short = ModelLayout.of({"q.lora_A": np.zeros((4, 192), np.float32), "q.lora_B": np.zeros((160, 4), np.float32)})
    assert find_factors(short, base_layout(read_suspect(twice)))[0].weight == "q.weight"
    with pytest.raises(LayoutError, match=r"must have one weight.*but has 2"):
        find_factors(short, base_layout(read_suspect({**twice, "model.q.weight": twice["q.weight"]})))
    with pytest.raises(LayoutError, match=r"must have one weight.*but has 0"):
        find_factors(LAYOUT, base_layout(read_suspect({"model.layers.0.q.weight": np.zeros((3, 4), np.float32)})))
    with pytest.raises(LayoutError, match="the layout has no factors"):
        find_factors(base, base)


def test_a_base_that_keeps_inputs_first(world: World) -> None:
    turned = {n: np.ascontiguousarray(w.T) if "layers" in n and w.ndim == 2 else w for n, w in base_model().items()}
    lora = describe_lora(LAYOUT, turned)
    assert all(layer.transposed for layer in lora.layers)
    suspect = merged(world.marked)
    expected = z_of(world, suspect)
    suspect = {n: np.ascontiguousarray(w.T) if "layers" in n and w.ndim == 2 else w for n, w in suspect.items()}
    base = read_suspect(turned)
    anchor = TensorsInMemory(initial())
    gauged = gauge_suspect(read_suspect(suspect), LAYOUT, anchor, lora, lambda: Base(base, base))
    assert world.known.z(gauged) == pytest.approx(expected, abs=0.02)


def test_the_description_travels() -> None:
    assert Lora.from_bytes(LORA.to_bytes()) == LORA
    assert len(LORA.digest()) == 64
    for spoil, text in (
        (lambda b: b.update(base="ab"), "base's digest"),
        (lambda b: b.update(layers=[]), "must name each tensor once"),
        (lambda b: b["layers"].reverse(), "must name each tensor once"),
        (lambda b: b["layers"].append(b["layers"][0]), "must name each tensor once"),
        (lambda b: b["layers"][0].pop(), "must list each layer"),
        (lambda b: b["layers"][0].__setitem__(3, 1), "must name tensors"),
        (lambda b: b.update(more=1), "unknown field"),
    ):
        body = json.loads(LORA.to_bytes())
        spoil(body)
        with pytest.raises(RecordError, match=text):
            Lora.from_bytes(spelled(body))
    LORA.check(LAYOUT)
    with pytest.raises(LayoutError, match="is not a factor"):
        LORA.check(ModelLayout.of({**initial(), "head.weight": np.zeros((4, 4), np.float32)}))
    with pytest.raises(LayoutError, match="must be carriers of the shapes"):
        LORA.check(ModelLayout.of({n: w for n, w in initial().items() if n != up("q")}))
    wide = {**initial(), down("q"): np.zeros((193, 192), np.float32), up("q"): np.zeros((160, 193), np.float32)}
    with pytest.raises(LayoutError, match="must be carriers of the shapes"):  # more ranks than inputs fix no gauge
        LORA.check(ModelLayout.of(wide))


def test_a_description_that_does_not_fit_is_refused(world: World) -> None:
    """Members who agreed on it are told: with a sentence, when it is read, or when the base is needed."""
    q, v = (next(layer for layer in LORA.layers if layer.down == down(name)) for name in "qv")
    rest = [layer for layer in LORA.layers if layer not in (q, v)]

    def read(*layers: Factors) -> Reference:
        lora = replace(LORA, layers=tuple(sorted([*rest, *layers])))
        people, agreed = identities(3), world.manifest.terms
        terms = make_terms(
            people, 2, LAYOUT.coordinates, layout=agreed.layout, anchor=agreed.anchor, setup="dealer",
            policy={"z": "6", "lora": lora.digest()},
        )  # fmt: skip
        manifest, _ = deal_key(people, terms)
        return Reference.of([manifest], LAYOUT, initial(), None, lora, base_model())

    with pytest.raises(LayoutError, match="must be carriers of the shapes"):
        read(replace(q, down="nobody"), v)
    with pytest.raises(LayoutError, match="is not a factor"):
        read(v)
    for layers in (
        (replace(q, up=v.up), replace(v, up=q.up)),
        (replace(q, weight=v.weight), replace(v, weight=q.weight)),
    ):
        with pytest.raises(LayoutError, match="the base has no weight"):
            prepare(read(*layers), merged(world.marked), lora=True)


@pytest.mark.parametrize(
    "spoil", [lambda a: 0 * a, lambda a: a[[0, 1, 2, 3, 4, 5, 6, 6]], lambda a: a - a.mean(axis=0)]
)
def test_an_anchor_that_fixes_no_gauge_is_refused_at_the_beginning(
    spoil: Any, world: World, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Once terms are signed it would be too late: no adapter could ever be tested."""
    LORA.check_anchor(TensorsInMemory(initial()))
    anchor = {**initial(), down("v"): spoil(initial()[down("v")])}
    with pytest.raises(LayoutError, match=r"v\.lora_A\.weight' has dependent rows and fixes no gauge"):
        LORA.check_anchor(TensorsInMemory(anchor))
    with pytest.raises(LayoutError, match="fixes no gauge"):
        list(gauged_by(read_suspect(world.marked), anchor).blocks(down("v")))
    write_safetensors(anchor, tmp_path / "initial.safetensors")
    card = tmp_path / "1.json"
    card.write_bytes(world.homes[0][0].card().to_bytes())
    done = run(
        environment, "consortium", "create", "--without-alignment", "--name", "x", "--threshold", "1", "--member",
        str(card), "--model", str(tmp_path / "initial.safetensors"), "--base",
        str(world.folder / "base.safetensors"), "--out", str(tmp_path / "c"),
    )  # fmt: skip
    assert done.returncode != 0
    assert "fixes no gauge: start from a random A" in done.stderr
    assert not (tmp_path / "c").exists()


def test_it_is_agreed_on_for_ever(world: World, tmp_path: Path) -> None:
    others = replace(LORA, layers=LORA.layers[:2])
    terms = world.manifest.terms
    for policy in ({"z": "6"}, {"z": "6", "lora": others.digest()}):
        with pytest.raises(RecordError, match="a successor's lora must not change, come or go"):
            check_terms_follow(replace(terms, policy=Policy.of(policy)), terms)
    (tmp_path / "other.json").write_bytes(others.to_bytes())
    with pytest.raises(RecordError, match="the consortium agreed on others"):
        Reference.read(world.folder / "consortium.json", lora=tmp_path / "other.json")
    # another base is noticed when it is needed
    wrong = replace(world.reference, base_source=base_model(1))
    prepare(wrong, world.marked, lora=True)
    with pytest.raises(RecordError, match="the base is not the one that was agreed on"):
        prepare(wrong, merged(world.marked), lora=True)
    with pytest.raises(RecordError, match="name it with --base"):
        prepare(replace(world.reference, base_source=None), merged(world.marked), lora=True)
    with pytest.raises(RecordError, match=r"lora\.json is not here"):
        prepare(replace(world.reference, lora=None), world.marked, lora=True)
    with pytest.raises(RecordError, match="groups are the base model's"):
        prepare(world.reference, world.marked, align=True)


def test_suspects_that_do_not_fit(world: World) -> None:
    reference = world.reference
    unequal = dict(world.marked)
    unequal[down("q")] = unequal[down("q")][:3]
    query = prepare(reference, unequal, lora=True).query
    assert query.covered == LAYOUT.carrier_size - RANK * sum(SHAPES["q"])
    assert any(reason.code == "read.factors-do-not-fit" for reason in query.matching)
    for suspect, code in (
        ({n: w[:0] if "lora_A" in n else w[:, :0] for n, w in world.marked.items()}, "read.factors-do-not-fit"),
        ({n: w for n, w in world.marked.items() if "lora_A" in n}, "read.carriers-missing"),
        ({n: w for n, w in world.marked.items() if "lora_B" in n}, "read.carriers-missing"),
        ({n: (100 * w).astype(np.int8) for n, w in world.marked.items()}, "read.no-scale"),
        ({n: w[None] for n, w in world.marked.items()}, "read.carrier-shape"),
    ):
        with pytest.raises(InconclusiveError, match="does not fit the consortium's model") as caught:
            prepare(reference, suspect, lora=True)
        assert code in [problem.code for problem in caught.value.problems]
    with pytest.raises(InconclusiveError, match="does not fit the consortium's model"):
        prepare(reference, {"something.weight": np.ones((4, 4), np.float32)}, lora=True)
    with pytest.raises(InconclusiveError, match="the anchor itself, all zeros, or not finite"):
        prepare(reference, base_model(), lora=True)
    # factors that lie beside whole weights are no factors of theirs
    decoys = {**merged(world.marked), **trained(initial(), 55)}
    assert z_of(world, decoys) == pytest.approx(z_of(world, merged(world.marked)), abs=1e-9)


# --- together ---------------------------------------------------------------------------------------------


def test_an_adapter_as_peft_saves_it(world: World, tmp_path: Path) -> None:
    """The configuration says a rank and a strength; nobody reads it."""
    model = refactored(world.marked, 8)
    write_safetensors(model, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 999, "lora_alpha": 1}')
    query = prepare(world.reference, tmp_path, lora=True).query
    assert [file.name for file in query.files] == ["suspect.safetensors"]  # a single file's name is nobody's choice
    assert query.x == prepare(world.reference, model, lora=True).query.x
    assert query.matching[-1] == Reason.of("read.adapter")
    other = prepare(world.reference, of_rank(model, 5), lora=True).query
    assert other.matching[-1] == Reason.of("read.adapter-of-rank", ranks=(5,))


def test_members_compute_the_factors_themselves(world: World) -> None:
    suspect = bfloat16(merged(world.marked))
    query = prepare(world.reference, suspect, lora=True).query
    assert query.alignment == f"anchor-gauge/v1:{LORA.digest()}"
    assert query.matching[-1] == Reason.of("read.whole-model")
    for change in ({"alignment": "none"}, {"alignment": f"anchor-gauge/v1:{'ab' * 32}"}, {"covered": 5}):
        with pytest.raises((EvidenceError, InconclusiveError)):
            answer(*world.homes[0], world.reference, suspect, replace(query, **change), approved=True)
    _, partials = world.answers(suspect, (1, 2, 4), query)
    certificate = world.certified(query, partials)
    assert certificate.finding.verdict == "PASSED"
    with pytest.raises(EvidenceError, match="another way than the one that was agreed on"):
        combine(world.manifest, replace(query, alignment=f"anchor-gauge/v1:{'ab' * 32}"), partials)
    checked, left = check_certificate(certificate, [world.manifest], suspect=suspect, reference=world.reference)
    assert (len(checked), left) == (5, [])
    without = replace(world.reference, lora=None)
    _, left = check_certificate(certificate, [world.manifest], suspect=suspect, reference=without)
    assert left == [Reason.of("check.no-factors")]
    without = replace(world.reference, base_source=None)
    _, left = check_certificate(certificate, [world.manifest], suspect=suspect, reference=without)
    assert left == [Reason.of("check.no-base")]


def test_from_the_terms_to_the_certificate(world: World, tmp_path: Path, environment: dict[str, str]) -> None:
    """The commands: terms of an adapter, and a merged suspect in a folder of its own."""

    def command(*arguments: Any, code: int = 0) -> str:
        done = run(environment, *map(str, arguments))
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout

    for point, (home, _) in enumerate(world.homes, 1):
        (tmp_path / f"{point}.json").write_bytes(home.card().to_bytes())
    cards = [x for point in range(1, 6) for x in ("--member", tmp_path / f"{point}.json")]
    about = ("--name", "hospitals", "--threshold", 3, "--model", world.folder / "anchor.safetensors")
    command(
        "consortium",
        "create",
        "--without-alignment",
        *about,
        *cards,
        "--base",
        world.folder / "base.safetensors",
        "--out",
        tmp_path / "c",
    )
    assert (tmp_path / "c" / "lora.json").read_bytes() == LORA.to_bytes()
    assert LORA.digest() in command("consortium", "show", tmp_path / "c" / "terms.json")
    (tmp_path / "suspect").mkdir()
    tuned = trained(world.marked, 77, moved=0.2)  # another model than those that members were asked about
    write_safetensors(merged(refactored(tuned, 4)), tmp_path / "suspect" / "model.safetensors")
    query, suspect = tmp_path / "query.json", tmp_path / "suspect"
    manifest = ("--manifest", world.folder / "consortium.json")
    command("verify", "prepare", suspect, "--lora", "--out", query, *manifest, "--home", tmp_path / "nobody")
    partials = []
    for point in (1, 3, 5):
        folder = world.homes[point - 1][0].path
        partials.append(tmp_path / f"p{point}.json")
        key = ("--home", folder, "--key-file", f"{folder}.key")
        command("verify", "partial", query, "--suspect", suspect, "--approve", "--out", partials[-1], *manifest, *key)
    out = tmp_path / "certificate.json"
    said = command("verify", "combine", query, *partials, "--out", out, *manifest, "--home", tmp_path / "nobody")
    assert said.startswith("PASSED: z = ")
