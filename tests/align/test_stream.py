"""quorumark.align.stream: a residual stream that was turned is turned back, and nobody is accused by that."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark.align import mixing, stream
from quorumark.align.alignment import Alignment
from quorumark.align.groups import Group, Groups, Slot, Stream
from quorumark.align.procedure import align
from quorumark.errors import InconclusiveError, LayoutError, RecordError
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import canonical_form
from quorumark.model.suspect import read_suspect
from quorumark.reasons import Reason
from quorumark.research.known import TensorsInMemory
from quorumark.verify.combine import combine
from quorumark.verify.query import prepare
from tests.kit.commands import run
from tests.kit.consortium import Tensors, World, make_world
from tests.kit.desk import Desk
from tests.kit.oracle import spelled

WORDS, WIDTH, NEURONS = 90, 24, 40
FLOW = Stream(
    WIDTH,
    (("down", 0), ("embed", 1)),
    (("gain", (("gate", 1), ("up", 1))), ("last", (("head", 1),))),
)


def slots(*axes: tuple[str, int]) -> tuple[Slot, ...]:
    return tuple(Slot(name, axis, 0, 1, 1, 1) for name, axis in axes)


MOVED = Group(NEURONS, slots(("down", 1), ("gate", 0), ("up", 0)), signs=(slots(("down", 1), ("up", 0)),))
AXES = {"down": 0, "embed": 1, "gain": 0, "gate": 1, "head": 1, "last": 0, "up": 1}
SIGNS = (
    slots(("down", 0), ("embed", 1), ("gate", 1), ("head", 1), ("up", 1)),
    slots(("gain", 0), ("gate", 1), ("up", 1)),
    slots(("head", 1), ("last", 0)),
)
CHANNELS = Group(WIDTH, slots(*AXES.items()), signs=SIGNS)
GROUPS = Groups((CHANNELS, MOVED), (), FLOW)
SHAPES = {
    "down": (WIDTH, NEURONS), "embed": (WORDS, WIDTH), "gain": (WIDTH,), "gate": (NEURONS, WIDTH),
    "head": (WORDS, WIDTH), "last": (WIDTH,), "up": (NEURONS, WIDTH),
}  # fmt: skip


def numbers(label: str, *shape: int) -> NDArray[np.float32]:
    """Weights that are the same on every machine: integers from a hash."""
    words = np.frombuffer(hashlib.shake_128(label.encode()).digest(2 * int(np.prod(shape))), "<i2")
    return (words.astype(np.float32) / np.float32(32768)).reshape(shape)


def small(label: str = "anchor") -> Tensors:
    """One block of a Llama without attention; gains are around 1."""
    model = {name: numbers(f"{label} {name}", *shape) for name, shape in SHAPES.items()}
    return {name: 1 + w / 2 if w.ndim == 1 else w for name, w in model.items()}


def trained(anchor: Tensors, seed: int, size: float = 0.2) -> Tensors:
    """Weights moved by a part of their size; gains, which are larger than weights, by less."""
    rng = np.random.default_rng(seed)
    return {
        name: (w + (size if w.ndim > 1 else size / 10) * w.std() * rng.standard_normal(w.shape)).astype(np.float32)
        for name, w in anchor.items()
    }


def orthogonal(size: int, seed: int) -> NDArray[np.float64]:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]


def turned(model: Tensors, by: NDArray[np.float64]) -> Tensors:
    """Gains folded, and the stream multiplied by a matrix, suspect's × own channels."""
    found = {}
    for name, (axis, gain) in FLOW.axes().items():
        rows = np.moveaxis(model[name].astype(np.float64), axis, -1)
        rows = rows if gain is None else rows * model[gain]
        found[name] = np.ascontiguousarray(np.moveaxis(rows @ by.T, -1, axis), np.float32)
    return {**found, **{gain: np.ones(len(by), np.float32) for gain in FLOW.gains()}}


def moved(model: Tensors, seed: int) -> Tensors:
    """Neurons permuted and rescaled, gains scaled against what reads them, the stream permuted."""
    rng = np.random.default_rng(seed)
    model = dict(model)
    order, scale = rng.permutation(NEURONS), np.exp2(rng.uniform(-2, 2, NEURONS)).astype(np.float32)
    model["down"] = model["down"][:, order] * scale
    model["up"] = model["up"][order] / scale[:, None]
    model["gate"] = model["gate"][order]
    for gain, readers in FLOW.norms:
        by = np.exp2(rng.uniform(-2, 2, model[gain].size)).astype(np.float32)
        model[gain] = model[gain] * by
        for name, _ in readers:
            model[name] = model[name] / by
    return shuffled(model, rng.permutation(model["gain"].size))


def shuffled(model: Tensors, order: Any) -> Tensors:
    """The channels of the stream in another order."""
    return {name: np.ascontiguousarray(np.take(w, order, AXES[name])) for name, w in model.items()}


LAYOUT = ModelLayout.of(small(), include=["down", "gate", "up"])


def aligned(suspect: Tensors, groups: Groups = GROUPS, anchor: Tensors | None = None, **more: Any) -> Alignment:
    return align(TensorsInMemory(suspect), TensorsInMemory(anchor or small()), LAYOUT, groups, **more)


def marked(seed: int, size: float = 0.2) -> tuple[Tensors, NDArray[np.int64]]:
    """A model that was trained from the anchor with a mark, and its key."""
    key = np.random.default_rng(seed + 1000).choice(np.array([-1, 1]), LAYOUT.coordinates)
    model, anchor = trained(small(), seed, size), small()
    for spec, place in LAYOUT.spans("carrier"):
        mark = 0.4 * size * anchor[spec.name].std() * key[place].reshape(spec.shape)
        model[spec.name] = (model[spec.name] + mark).astype(np.float32)
    return model, key


def z(found: Any, key: NDArray[np.int64]) -> float:
    x = canonical_form("balanced-anchor/v1", LAYOUT, found, TensorsInMemory(small())).x.astype(np.int64)
    return float(x @ key / np.sqrt(x @ x))


def z_aligned(suspect: Tensors, key: NDArray[np.int64], groups: Groups = GROUPS) -> float:
    return z(aligned(suspect, groups).model(TensorsInMemory(suspect)), key)


# --- the arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (64, 64), (40, 64), (64, 40)])
def test_the_matrix_is_that_of_a_decomposition(rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    size = min(rows, columns)
    left, right = (np.linalg.qr(rng.standard_normal((n, size)))[0] for n in (rows, columns))
    matrix = np.rint(2.0**40 * (left * 10.0 ** rng.uniform(-2, 0, size)) @ right.T).astype(np.int64)
    found = stream.polar(matrix)
    assert np.array_equal(found, np.rint(found))
    assert np.abs(found / mixing.ONE - left @ right.T).max() < 1e-5
    assert not stream.polar(np.zeros((rows, columns), np.int64)).any()


def test_what_the_vectors_say_nothing_about_stays_zero() -> None:
    rng = np.random.default_rng(0)
    matrix = np.rint(2.0**30 * rng.standard_normal((12, 4)) @ rng.standard_normal((4, 12))).astype(np.int64)
    left, values, right = np.linalg.svd(matrix.astype(np.float64))
    assert values[4] < 1e-6 * values[3]
    found = stream.polar(matrix) / mixing.ONE
    assert np.abs(found - left[:, :4] @ right[:4]).max() < 0.1


def test_sums_are_exact() -> None:
    """Against Python's integers, at the largest sizes that occur."""
    rng = np.random.default_rng(0)
    one, two = rng.integers(-(1 << 26), 1 << 26, (7, 9)), rng.integers(-(1 << 53), 1 << 53, (7, 9))
    expected = sum(x * y for x, y in zip(one.reshape(-1).tolist(), two.reshape(-1).tolist(), strict=True))
    assert stream._inner(one, two) == expected
    vectors, others = rng.standard_normal((2, 50, 6))
    found = stream.Agreement(6, 6)
    found.add(vectors, others)
    s, a = (stream.units(x) for x in (vectors, others))
    assert found.matrix.tolist() == [
        [sum(int(p) * int(q) for p, q in zip(s[:, i], a[:, j], strict=True)) for j in range(6)] for i in range(6)
    ]
    assert np.abs(np.linalg.norm(s, axis=1) / stream.UNIT - 1).max() < 1e-4
    turn = np.rint(mixing.ONE * orthogonal(6, 1))
    expected = np.square(s - a @ turn.T / mixing.ONE).sum() / 2
    assert found.distance(turn) / mixing.ONE == pytest.approx(expected, rel=1e-6)


def test_the_bytes_are_pinned() -> None:
    """The same matrix on every machine: of a turned model, and of an unrelated one that none fits.

    I − v·vᵀ/12 in 8 bits: products with it are exact, so that suspects are the same everywhere.
    """
    assert GROUPS.digest() == "205b36d3c4b2340c8a70417e15973389bb100834fc81b9b8964ee2081edd9036"
    v = np.sign(numbers("v", WIDTH)).astype(np.float64)
    by = np.rint(256 * (np.eye(WIDTH) - np.outer(v, v) / 12)) / 256
    for label, digest in (
        ("anchor", "d37eabfadc5f27850e44a4175048ea5af84d5b5c6059a1290bd6749733282577"),
        ("other", "f8ac4cb3df9a3e00b9924a0e24b1c243eaaa47a58ae7e359a10454cdd11274d6"),
    ):
        suspect = turned(small(label), by)
        found = aligned(suspect)
        assert found.rotation is not None
        assert found.digest() == digest


def test_other_kernels_and_threads_give_the_same_bytes() -> None:
    """OpenBLAS with and without fused operations and vectors of other lengths: sums are exact, so nothing differs."""
    script = (
        "import numpy as np\n"
        "from quorumark.model.layout import ModelLayout\n"
        "from quorumark.align.groups import Group, Groups, Slot, Stream\n"
        "from quorumark.align.procedure import align\n"
        "class Model(dict):\n"
        "    def blocks(self, name, limit=0): yield 0, self[name]\n"
        "rng = np.random.default_rng(0)\n"
        "one, two = (Model(e=rng.integers(-9999, 9999, (3000, 160)).astype(np.float32)) for _ in range(2))\n"
        "two['e'][:, ::2] += 2 * one['e'][:, 1::2] - one['e'][:, ::2]\n"
        "for model in (one, two): model['g'] = np.ones(160, np.float32)\n"
        "for model in (one, two): model['h'] = model['e'][:50].copy()\n"
        "flow = Stream(160, (('e', 1),), (('g', (('h', 1),)),))\n"
        "moved = Group(160, (Slot('e', 1, 0, 1, 1, 1), Slot('g', 0, 0, 1, 1, 1), Slot('h', 1, 0, 1, 1, 1)))\n"
        "found = align(two, one, ModelLayout.of(dict(one), include=['h']), Groups((moved,), (), flow))\n"
        "assert found.rotation is not None\n"
        "print(found.digest(), found.model(two).tensor('h').tobytes().hex()[:4096])\n"
    )
    seen = set()
    for more in (
        {"OPENBLAS_NUM_THREADS": "2"},
        {"OPENBLAS_CORETYPE": "Prescott", "OPENBLAS_NUM_THREADS": "1"},
        {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "1"},
    ):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **more}
        )
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 1


# --- a small model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["turned", "turned, then moved", "moved, then turned"])
def test_what_was_turned_is_as_it_was(order: str) -> None:
    """The anchor itself in disguise is the anchor again, to what float32 keeps, but for scales."""
    suspect = moved(small(), 5) if order.startswith("moved") else small()
    suspect = turned(suspect, orthogonal(WIDTH, 3))
    suspect = moved(suspect, 6) if order.endswith("moved") else suspect
    found = aligned(suspect)
    assert (found.surplus, found.as_dict()["rotated"]) == (0, WIDTH)
    model = found.model(TensorsInMemory(suspect))
    for name, w in small().items():
        got = model.tensor(name)
        if name in ("up", "down"):  # neurons of the two are scaled against each other
            got, w = ((x / np.linalg.norm(x, axis=int(name == "down") ^ 1, keepdims=True)) for x in (got, w))
        assert np.abs(got - w).max() < 1e-4, name


def test_a_mark_is_found_again() -> None:
    model, key = marked(1)
    as_it_is = z(TensorsInMemory(model), key)
    assert as_it_is > 15
    for by in (orthogonal(WIDTH, 3), np.diag(np.random.default_rng(0).choice([-1.0, 1.0], WIDTH))):
        suspect = moved(turned(model, by), 4)
        assert abs(z(TensorsInMemory(suspect), key)) < 4
        if np.count_nonzero(by) > WIDTH:  # without the stream it stays hidden; signs alone do not
            assert z_aligned(suspect, key, Groups(GROUPS.groups)) < 0.5 * as_it_is
        assert z_aligned(suspect, key) > 0.9 * as_it_is
    # an honest model is left alone: the same places, the same bytes as without a stream
    for honest in (model, shuffled(model, np.random.default_rng(1).permutation(WIDTH))):
        found = aligned(honest)
        assert found.rotation is None
        assert found.as_dict()["rotated"] is None
        assert found.digest() == aligned(honest, Groups(GROUPS.groups)).digest()
        assert z_aligned(honest, key) > 0.99 * as_it_is


def other_signs(model: Tensors, seed: int, *, gains: bool, neurons: bool) -> Tensors:
    """The same function, bit for bit: gains and what reads them, what gated neurons compute and what reads that."""
    rng, model = np.random.default_rng(seed), dict(model)
    for gain, readers in FLOW.norms if gains else ():
        by = rng.choice(np.array([-1, 1], np.float32), model[gain].size)
        for name in (gain, *(name for name, _ in readers)):
            model[name] = model[name] * by
    if neurons:
        by = rng.choice(np.array([-1, 1], np.float32), NEURONS)
        model["up"], model["down"] = model["up"] * by[:, None], model["down"] * by
    return model


@pytest.mark.parametrize(("gains", "neurons"), [(True, False), (False, True), (True, True)])
def test_signs_hide_nothing(gains: bool, neurons: bool) -> None:
    model, key = marked(1)
    as_it_is = z(TensorsInMemory(model), key)
    suspect = other_signs(model, 5, gains=gains, neurons=neurons)
    assert z(TensorsInMemory(suspect), key) < 0.5 * as_it_is
    for groups in (GROUPS, Groups(GROUPS.groups)):
        found = aligned(suspect, groups)
        assert z_aligned(suspect, key, groups) > 0.98 * as_it_is
        assert found.digest() != replace(found, signs={}).digest()
        assert found.rotation is None
    by = orthogonal(WIDTH, 3)
    before, after = turned(suspect, by), other_signs(turned(model, by), 5, gains=gains, neurons=neurons)
    assert min(z_aligned(moved(hidden, 4), key) for hidden in (before, after)) > 0.9 * as_it_is


@pytest.mark.parametrize("count", [1, 3, 6])
def test_few_signs_hide_nothing_either(count: int) -> None:
    """Six of 40 neurons take 40 % of z: a row of the other sign is further away than training ever gets."""
    model, key = marked(1)
    as_it_is = z(TensorsInMemory(model), key)
    model["up"][:count] *= -1
    model["down"][:, :count] *= -1
    assert z(TensorsInMemory(model), key) < (1 - 0.05 * count) * as_it_is
    assert z_aligned(model, key) > 0.98 * as_it_is


def test_signs_accuse_nobody() -> None:
    """48 models that were trained from the anchor or not, against fresh keys: a mean square of z of 1 ± 0.7.

    48·mean follows χ² with 48 degrees of freedom: beyond these bounds once in 1,000 seeds.
    """
    squares = []
    for seed in range(48):
        innocent = trained(small(), seed) if seed % 2 else trained(small("other"), seed)
        suspect = other_signs(innocent, seed, gains=True, neurons=True)
        key = np.random.default_rng(seed + 5000).choice(np.array([-1, 1]), LAYOUT.coordinates)
        squares.append(z_aligned(suspect, key) ** 2)
    assert 0.3 < np.mean(squares) < 1.7


def test_a_wrong_stream_does_not_help() -> None:
    """What is not named is not turned back, and what is not of the stream is turned away."""
    model, key = marked(1)
    suspect = turned(model, orthogonal(WIDTH, 3))
    right = z_aligned(suspect, key)
    for wrong in (
        Stream(WIDTH, (("embed", 1),), (("last", (("head", 1),)),)),
        Stream(WIDTH, (("embed", 1), ("gate", 1)), (("last", (("head", 1),)),)),
    ):
        assert z_aligned(suspect, key, replace(GROUPS, stream=wrong)) < 0.7 * right


@pytest.mark.parametrize("size", [1e4, 1e12, 1e30])
def test_vectors_that_nothing_reads_hide_nothing(size: float) -> None:
    """Huge words that never occur, and huge neurons that never fire, count as much as others."""
    model, key = marked(1)
    plain = z_aligned(turned(model, orthogonal(WIDTH, 3)), key)
    rng = np.random.default_rng(0)
    for name, places in (("embed", slice(0, 20)), ("head", slice(30, 50)), ("gate", slice(0, 2)), ("up", slice(7, 9))):
        model[name][places] = size * rng.standard_normal(model[name][places].shape)
    assert z_aligned(turned(model, orthogonal(WIDTH, 3)), key) > 0.8 * plain


@pytest.mark.parametrize("width", [20, 32, 60])
def test_a_stream_of_another_width(width: int) -> None:
    """Padded before it was turned: all is found, and what is too much is told. Cut afterwards: what is left is."""
    model, key = marked(1)
    by = orthogonal(max(width, WIDTH), 3)[:width, :WIDTH]
    suspect = turned(model, by)
    found = aligned(suspect)
    assert (found.surplus, found.as_dict()["rotated"]) == (max(0, width - WIDTH), width)
    least = 0.9 if width > WIDTH else 0.4
    assert z_aligned(suspect, key) > least * z(TensorsInMemory(model), key)
    assert found.digest() == aligned(suspect).digest()


def test_fewer_words_than_channels() -> None:
    """What the words leave open, neurons tell."""
    model, key = marked(1)
    words = 10
    short = {name: w[:words] if w.shape == (WORDS, WIDTH) else w for name, w in model.items()}
    anchor = {name: w[:words] if w.shape == (WORDS, WIDTH) else w for name, w in small().items()}
    layout = ModelLayout.of(anchor, include=["down", "gate", "up"])
    suspect = moved(turned(short, orthogonal(WIDTH, 3)), 4)
    found = align(TensorsInMemory(suspect), TensorsInMemory(anchor), layout, GROUPS)
    x = canonical_form(
        "balanced-anchor/v1", layout, found.model(TensorsInMemory(suspect)), TensorsInMemory(anchor)
    ).x.astype(np.int64)
    assert float(x @ key / np.sqrt(x @ x)) > 0.8 * z(TensorsInMemory(model), key)


@pytest.mark.parametrize("more", [-20, -1, 1, 38])
def test_other_numbers_of_words(more: int) -> None:
    """Words that were added do not hide a turn, and those that were taken away are only missing."""
    model, key = marked(1)
    rng = np.random.default_rng(0)
    for name in ("embed", "head"):
        model[name] = np.concatenate([model[name], rng.standard_normal((38, WIDTH)).astype(np.float32)])[: WORDS + more]
    suspect = turned(model, orthogonal(WIDTH, 3))
    found = aligned(suspect)
    assert found.rotation is not None
    assert found.model(TensorsInMemory(suspect)).tensor("embed").shape == (WORDS, WIDTH)
    assert z_aligned(suspect, key) > 0.9 * z(TensorsInMemory(marked(1)[0]), key)
    assert GROUPS.resizable()["embed"] == {0, 1}  # matched by name in spite of its size
    assert Groups(GROUPS.groups).resizable()["embed"] == {1}


def test_a_small_turn_is_worth_nothing_either() -> None:
    """There is no size at which a turn is not seen but does harm."""
    model, key = marked(1)
    skew = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
    seen = set()
    for size in (0.01, 0.03, 0.1, 0.3, 1.0):
        by = np.linalg.solve(np.eye(WIDTH) - size * (skew - skew.T), np.eye(WIDTH) + size * (skew - skew.T))
        seen.add(aligned(turned(model, by)).rotation is None)
        assert z_aligned(turned(model, by), key) > 0.9 * z(TensorsInMemory(model), key)
    assert seen == {True, False}


@pytest.mark.parametrize("quiet", [6, 12, 18])
@pytest.mark.parametrize("size", [0.2, 1.0])
def test_quiet_channels_that_were_turned_alone(quiet: int, size: float) -> None:
    """Channels of e^±1.5 times the middle size, of which the quietest are turned: hardly any vector moves."""
    by_channel = np.exp(1.5 * np.random.default_rng(9).standard_normal(WIDTH)).astype(np.float32)

    def uneven(model: Tensors) -> Tensors:
        louder = {"down": by_channel[:, None], "embed": by_channel, "gain": by_channel, "last": by_channel}
        return {name: w * louder.get(name, np.float32(1)) for name, w in model.items()}

    def of(found: Any) -> float:
        x = canonical_form("balanced-anchor/v1", LAYOUT, found, TensorsInMemory(anchor)).x.astype(np.int64)
        return float(x @ key / np.sqrt(x @ x))

    model, key = marked(1, size)
    model, anchor = uneven(model), uneven(small())
    assert aligned(model, anchor=anchor).rotation is None
    places = np.argsort(by_channel)[:quiet]
    by = np.eye(WIDTH)
    by[np.ix_(places, places)] = orthogonal(quiet, 7)
    suspect = turned(model, by)
    found = aligned(suspect, anchor=anchor)
    assert found.rotation is not None
    assert of(found.model(TensorsInMemory(suspect))) > 0.8 * of(TensorsInMemory(model))


@pytest.mark.parametrize("number", [0.0, np.nan, np.inf, 1e300, 1e-320, 3.4e38, 1.0, -1.0])
def test_suspects_of_one_number(number: float) -> None:
    """No error and no warning, whatever the numbers are."""
    for names in (SHAPES, ["gain", "last"], ["embed", "head"], ["up"]):
        suspect: Tensors = {**small("other"), **{name: np.full(SHAPES[name], number) for name in names}}
        found = aligned(suspect)
        x = canonical_form(
            "balanced-anchor/v1", LAYOUT, found.model(TensorsInMemory(suspect)), TensorsInMemory(small())
        )
        assert x.norm2 >= 0


@pytest.mark.parametrize("name", ["embed", "gain", "up"])
def test_sizes_that_do_not_fit_are_told(name: str) -> None:
    suspect = turned(small(), orthogonal(WIDTH, 3))
    suspect[name] = np.ones((*SHAPES[name][:-1], WIDTH + 1), np.float32)
    if name == "gain":  # counts as if it were not there
        assert aligned(suspect).rotation is not None
    else:
        with pytest.raises(InconclusiveError, match="fit no number of channels"):
            aligned(suspect)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed", (0, WIDTH)), ("embed", (WORDS, 0)), ("head", (0, 0)), ("gain", (0,)), ("up", (0, WIDTH)),
        ("down", (WIDTH, 0)), ("embed", (1, 1 << 22)), ("embed", (WORDS + 1, 8 * WIDTH + 1)),
    ],
)  # fmt: skip
def test_empty_and_endless_tensors_are_told(name: str, shape: tuple[int, ...]) -> None:
    """One sentence, and no memory for words that a suspect has not: 90 of 2^22 channels would be 1.5 GB."""
    suspect = {**turned(small(), orthogonal(WIDTH, 3)), name: np.ones(shape, np.float32)}
    tracemalloc.start()
    with pytest.raises(InconclusiveError, match=r"is empty|far more channels|fit no number"):
        align(read_suspect(suspect), TensorsInMemory(small()), LAYOUT, GROUPS)
    assert tracemalloc.get_traced_memory()[1] < 1 << 28
    tracemalloc.stop()


def test_tensors_that_are_missing() -> None:
    """Gains that a suspect has not count as 1; without the words nothing is known of the stream."""
    model, key = marked(1)
    suspect = turned(model, orthogonal(WIDTH, 3))
    names = {name: name for name in SHAPES if name not in FLOW.gains()}
    found = aligned({name: suspect[name] for name in names}, names=names)
    assert found.rotation is not None
    assert z(found.model(TensorsInMemory(suspect), names), key) == z_aligned(suspect, key)
    del names["embed"], names["head"]
    assert aligned({name: suspect[name] for name in names}, names=names).rotation is None


# --- as a file --------------------------------------------------------------------------------------------


def test_groups_with_a_stream_are_written_and_read() -> None:
    assert Groups.from_bytes(GROUPS.to_bytes()) == GROUPS
    GROUPS.check(LAYOUT)
    without = Groups(GROUPS.groups)
    assert json.loads(without.to_bytes())["stream"] is None
    assert without.digest() != GROUPS.digest()


def test_damaged_streams_are_refused() -> None:
    body = json.loads(GROUPS.to_bytes())

    def refused(change: Any, match: str) -> None:
        damaged = json.loads(json.dumps(body))
        change(damaged)
        with pytest.raises(RecordError, match=match):
            Groups.from_bytes(spelled(damaged))

    refused(lambda b: b.pop("stream"), "stream")
    refused(lambda b: b.update(stream=3), "a stream")
    refused(lambda b: b.update(format=["quorumark-groups/v1"]), "format")
    refused(lambda b: b["stream"].update(size=1), "2 to 65535 channels")
    refused(lambda b: b["stream"].update(writers=[]), "writers and norms")
    refused(lambda b: b["stream"].update(norms=[]), "writers and norms")
    refused(lambda b: b["stream"].update(writers=3), "must be a list")
    refused(lambda b: b["stream"]["writers"][0].pop(), "must be listed as")
    refused(lambda b: b["stream"]["writers"][0].__setitem__(1, -1), "invalid axis")
    refused(lambda b: b["stream"]["norms"][0].update(gain=3), "name the gains of its norms")
    refused(lambda b: b["stream"]["norms"][0].pop("gain"), "a norm of a stream")
    norms = FLOW.norms
    for flow, match in (
        (Stream(WIDTH, (("nobody", 0),), norms), "not in the layout"),
        (Stream(WIDTH, (("embed", 2),), norms), "not in the layout"),
        (Stream(WIDTH, (("embed", 0),), norms), f"the stream has {WIDTH} channels"),
        (Stream(WIDTH, (("gate", 1),), norms), "a tensor twice"),
        (Stream(WIDTH, (("embed", 1),), (("down", (("up", 1),)),)), "must have one dimension"),
    ):
        with pytest.raises(LayoutError, match=match):
            replace(GROUPS, stream=flow).check(LAYOUT)


# --- with a consortium ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    (folder / "groups.json").write_bytes(GROUPS.to_bytes())
    agreed = {"z": "6", "groups": GROUPS.digest()}
    return make_world(folder, members=3, threshold=2, rho=0.35, models=(small(), trained(small(), 1)), policy=agreed)


def test_a_certificate_for_a_stream_that_was_turned(world: World) -> None:
    """From the suspect's file to the verdict: FAILED as it is, PASSED aligned; an innocent one fails aligned."""

    def asked(suspect: Tensors, *, align: bool) -> Any:
        path = world.save(suspect, f"{hashlib.sha256(suspect['up'].tobytes()).hexdigest()[:8]}.safetensors")
        query = prepare(world.reference, path, align=align).query
        _, partials = world.answers(path, (1, 2), query)
        return combine(world.manifest, query, partials)

    hidden = moved(turned(world.marked, orthogonal(WIDTH, 3)), 4)
    as_it_is, found = asked(hidden, align=False), asked(hidden, align=True)
    assert (as_it_is.verdict, found.verdict) == ("FAILED", "PASSED")
    assert float(found.z) > 0.9 * world.known.z(world.marked)
    assert found.query.alignment == f"anchor-assignment/v1:{GROUPS.digest()}"
    assert Reason.of("read.stream-turned") in found.query.matching
    innocent = asked(turned(trained(small(), 77), orthogonal(WIDTH, 5)), align=True)
    assert innocent.verdict == "FAILED"
    longer = {**hidden, **{name: np.concatenate([hidden[name], hidden[name][:6]]) for name in ("embed", "head")}}
    assert world.known.z_of(prepare(world.reference, longer, align=True).form) > 0.9 * world.known.z(world.marked)
    padded = asked(turned(trained(small(), 78), orthogonal(32, 5)[:, :WIDTH]), align=True)
    assert (padded.verdict, padded.query.surplus) == ("INCONCLUSIVE", 8)


# --- models of transformers -------------------------------------------------------------------------------

research = pytest.mark.research
TURN: tuple[str, dict[str, Any]] = ("residual-rotation", {})
MIX: tuple[str, dict[str, Any]] = ("rotation", {"octaves": 1.0})
MOVE: list[tuple[str, dict[str, Any]]] = [("permutation", {}), ("rescaling", {})]
BITS: tuple[str, dict[str, Any]] = ("quantisation", {"scheme": "q8_0"})
SEED = 7


@pytest.fixture(scope="module")
def lab() -> Any:
    for name in ("torch", "sklearn", "transformers"):
        pytest.importorskip(name)
    from tests.kit import lab as found

    return found


def derived(kind: str, **more: Any) -> Groups:
    import torch
    import transformers

    from quorumark.align.trace import derive_groups

    settings = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, **more}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    found = derive_groups(model, {"input_ids": torch.arange(6)[None]})
    found.check(ModelLayout.of(model))
    return found


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_stream_is_found(kind: str, tied: bool) -> None:
    found = derived(kind, tie_word_embeddings=tied)
    assert found.stream is not None
    assert Groups.from_bytes(found.to_bytes()) == found
    written = {name.split(".")[-2] for name, _ in found.stream.writers}
    assert written == {"embed_tokens", "o_proj", "down_proj"}
    norms = {gain: {name.split(".")[-2] for name, _ in readers} for gain, readers in found.stream.norms}
    assert len(norms) == 5
    assert norms["model.norm.weight"] == {"lm_head"}
    assert norms["model.layers.1.input_layernorm.weight"] == {"q_proj", "k_proj", "v_proj"}
    assert norms["model.layers.1.post_attention_layernorm.weight"] == {"gate_proj", "up_proj"}


@pytest.mark.usefixtures("lab")
def test_the_command_says_that_there_is_a_stream(environment: dict[str, str], tmp_path: Path) -> None:
    code, out = tmp_path / "net.py", tmp_path / "groups.json"
    code.write_text("from tests.kit.lab import llama, gpt2\n")
    environment = {**environment, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    done = run(environment, "groups", "--model", f"{code}:llama", "--example", "int:1,6", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "16 mixings, a stream of 48 channels" in done.stdout
    found = Groups.from_bytes(out.read_bytes())
    assert found.stream is not None
    assert found.stream.size == 48


@pytest.mark.usefixtures("lab")
def test_a_llama_that_was_turned_through_the_commands(environment: dict[str, str], tmp_path: Path) -> None:
    """From code to groups, and from a turned suspect to a certificate that others recompute on a copy."""
    import torch

    from tests.kit.lab import llama

    (tmp_path / "net.py").write_text("from tests.kit.lab import llama\n")
    more = {**environment, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    made = ["groups", "--model", f"{tmp_path}/net.py:llama", "--example", "int:1,6", "--out", f"{tmp_path}/groups.json"]
    assert run(more, *made).returncode == 0
    groups = Groups.from_bytes((tmp_path / "groups.json").read_bytes())
    torch.manual_seed(0)
    anchor = {name: tensor.numpy() for name, tensor in llama().state_dict().items()}
    agreed = {"z": "6", "groups": groups.digest()}
    models = (anchor, trained(anchor, 1))
    world = make_world(tmp_path, members=3, threshold=2, rho=0.35, models=models, policy=agreed)
    desk, hidden, flow = Desk(world, tmp_path, environment), dict(world.marked), groups.stream
    assert flow is not None
    by = orthogonal(flow.size, 3)
    for name, (axis, gain) in flow.axes().items():
        rows = np.moveaxis(hidden[name].astype(np.float64), axis, -1) * (1 if gain is None else hidden[gain])
        hidden[name] = np.ascontiguousarray(np.moveaxis(rows @ by.T, -1, axis), np.float32)
    hidden |= {gain: np.ones(flow.size, np.float32) for gain in flow.gains()}
    suspect, query, nobody = world.save(hidden, "hidden.safetensors"), desk.path("query.json"), desk.path("nobody")
    said = desk("prepare", suspect, "--align", "--out", query, *desk.reference, "--home", nobody).stdout
    assert "its residual stream had been turned" in " ".join(said.split())
    assert desk.combine(query, [desk.partial(query, suspect, n, "--approve") for n in (1, 2)])["verdict"] == "PASSED"
    for point in (1, 2):
        desk("sign", desk.path("certificate.json"), *desk.home(point))
    payload = json.loads(Path(desk.path("certificate.json")).read_text())["payload"]
    assert b'"code":"read.stream-turned"' in base64.b64decode(payload)
    check = ["check", desk.path("certificate.json"), "--manifest", world.folder / "consortium.json"]
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(suspect).read_bytes())
    assert desk(*check, "--suspect", copy).stdout.count("checked: ") == 5
    hidden["model.norm.weight"] = np.full(flow.size, 2, np.float32)  # another file
    assert desk(*check, "--suspect", world.save(hidden, "other.safetensors"), code=2).stderr


def test_what_has_other_norms_has_no_stream(lab: Any) -> None:
    """Gemma's gain is 1 + w, GPT-2 and vision transformers subtract the mean, the others have none at all."""
    from quorumark.align.trace import derive_groups

    assert derived("Gemma").stream is None
    for name in ("gpt2", "vit", "resnet", "mlp"):
        inputs = lab.data_of(name)[0][:1]
        example = {"input_ids": inputs} if name in lab.LANGUAGE else inputs
        assert derive_groups(lab.MODELS[name](), example).stream is None


@research
@pytest.mark.parametrize(
    "steps",
    [[TURN], [TURN, *MOVE], [*MOVE, TURN], [TURN, MIX, *MOVE, BITS], [MIX, *MOVE, TURN, BITS]],
    ids=["turned", "then moved", "moved before", "all", "all before"],
)
def test_a_llama_is_turned_back(lab: Any, steps: list[tuple[str, dict[str, Any]]]) -> None:
    from quorumark.research.attacks import chain

    marked = lab.marked("llama")
    original = marked.z(marked.released)
    weights = chain(marked.target(), steps, seed=SEED).weights
    assert abs(marked.z(weights)) < 4
    without = replace(marked.groups, stream=None)
    found = align(TensorsInMemory(weights), marked.anchor, marked.layout, without)
    assert marked.known.z(found.model(TensorsInMemory(weights))) < 0.2 * original
    assert marked.z_aligned(weights) >= 0.9 * original


@research
@pytest.mark.parametrize(
    "on_top",
    [
        ("fine-tuning", {"epochs": 5, "fraction": 0.2}),
        ("quantisation", {"scheme": "q4_0"}),
        ("pruning", {"ratio": 0.3}),
    ],
    ids=["fine-tuned", "4 bits", "pruned"],
)
def test_what_comes_on_top_of_a_turn(lab: Any, on_top: tuple[str, dict[str, Any]]) -> None:
    from quorumark.research.attacks import chain

    marked = lab.marked("llama")
    weights = chain(marked.target(), [TURN, on_top], seed=SEED).weights
    plain = chain(marked.target(), [on_top], seed=SEED + 1).weights
    assert marked.z_aligned(weights) >= 0.9 * marked.z_aligned(plain)


@research
def test_an_honest_llama_is_left_alone(lab: Any) -> None:
    """Whatever else was done to it: not one byte differs from what alignment without a stream gives."""
    from quorumark.research.attacks import chain

    marked = lab.marked("llama")
    for steps in ([], MOVE, [MIX], [BITS], [("fine-tuning", {"epochs": 5, "fraction": 0.2})]):
        weights = chain(marked.target(), steps, seed=SEED).weights if steps else marked.released
        found = marked.align(weights)
        plain = align(TensorsInMemory(weights), marked.anchor, marked.layout, replace(marked.groups, stream=None))
        assert found.rotation is None
        assert found.digest() == plain.digest()
        assert marked.z_aligned(weights) >= 0.93 * marked.z(marked.released)


@research
def test_no_innocent_model_is_accused(lab: Any) -> None:
    """24 models against the real key: |z| < 4 for all fails by chance once in 660 runs with fresh seeds.

    A third of them began where the marked one did, half of them were turned. Fitted to the released model, which holds
    the key, the null would not hold.
    """
    from quorumark.research.attacks import chain

    marked, data = lab.marked("llama"), lab.data_of("llama")
    released = TensorsInMemory(marked.released)
    seen, wrong, turns = [], [], 0
    for seed in range(24):
        start = marked.checkpoints[0] if seed % 3 == 0 else lab.initial(marked.make, 50 + seed)
        weights = lab.trained(marked.make, start, data, seed, 1, 2e-3)
        if seed % 2:
            weights = chain(marked.target().with_weights(weights), [TURN], seed=seed).weights
        found = marked.align(weights)
        turns += found.rotation is not None
        seen.append(marked.known.z(found.model(TensorsInMemory(weights))))
        if seed % 3 and seed < 12:
            wrong.append(marked.z_aligned(weights, released))
    assert turns >= 12
    assert max(map(abs, seen)) < 4
    assert abs(np.mean(seen)) < 3 / np.sqrt(len(seen))
    assert np.mean(wrong) > 3  # of 8 models; of 8 standard normal numbers that has a chance of 10⁻¹⁷
    assert marked.z_aligned(chain(marked.target(), [TURN], seed=1).weights) > 12  # the same key finds what is marked


@research
def test_a_wider_llama_that_was_turned(lab: Any) -> None:
    """Eight channels of zeros, then a turn of all 56: the same function, and the mark is found."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quorumark.research.attacks.rotation import orthogonal as uniform

    marked = lab.marked("llama")
    flow, config = marked.groups.stream, lab.llama().config.to_dict()
    by = torch.from_numpy(uniform(56, np.random.default_rng(3))[:, :48])
    weights = dict(marked.released)
    for name, (axis, gain) in flow.axes().items():
        rows = weights[name].double().movedim(axis, -1)
        rows = rows if gain is None else rows * weights[gain].double()
        weights[name] = (rows @ by.T).movedim(-1, axis).float().contiguous()
    for gain in flow.gains():
        weights[gain] = torch.full((56,), (48 / 56) ** 0.5)  # x/√(Σx²/n) grows with n
    model = LlamaForCausalLM(LlamaConfig(**{**config, "hidden_size": 56, "rms_norm_eps": 1e-6 * 48 / 56}))
    model.load_state_dict(weights)
    inputs = lab.data_of("llama")[0][:32]
    with torch.no_grad():
        before, after = (lab.logits(m.eval(), inputs) for m in (marked.target().module(marked.released), model))
    assert float((after - before).abs().max()) < 1e-4 * float(before.abs().max())
    found = marked.align(weights)
    assert found.surplus == 8
    assert marked.known.z(found.model(TensorsInMemory(weights))) >= 0.9 * marked.z(marked.released)
