"""Remainders of an answer: crafted entries show signs of the key in them; those of models never do."""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark.model.blocks import Blocks
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import canonical_form, count_sizes
from quorumark.research.known import TensorsInMemory
from quorumark.verify import guard
from quorumark.verify.breadth import narrow_remainder
from quorumark.verify.layered import broad_blocks
from tests.kit.ledgers import Member, rounded
from tests.kit.refusals import refused

Vector = NDArray[Any]
DIGITS = np.array([1, 2, 4, 8])


def _digits(d: int, seed: int, base: int = 25, per_query: int = 4, queries: int = 8) -> list[tuple[Vector, Vector]]:
    """Queries of entries ±25, but for 26, 27, 29 and 33 at four places each: Y mod 25 is their signs' sum."""
    rng = np.random.default_rng(seed)
    places = rng.permutation(d)[: per_query * queries].reshape(queries, per_query)
    made = []
    for here in places:
        x = rng.choice([-base, base], d).astype(np.int8)
        x[here] = base + DIGITS[:per_query]
        made.append((here, x))
    return made


def _read_off(value: int, base: int) -> Vector:
    """Σ 2^k·τ_k from its remainder: the four signs."""
    sums = {sum(int(w) * s for w, s in zip(DIGITS, signs, strict=True)) % base: signs for signs in _signs()}
    return np.array(sums[value % base])


def _signs() -> list[tuple[int, ...]]:
    return [tuple(1 - 2 * (i >> k & 1) for k in range(4)) for i in range(16)]


@pytest.mark.parametrize("base", [25, 48, 90])
def test_signs_are_read_off_a_remainder_without_the_rule_and_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: int
) -> None:
    """8 answers show 32 signs exactly; every query rests on all coordinates, as ‖x‖₂⁴/‖x‖₄⁴ counts."""
    d = 350_000
    tau = np.random.default_rng(1).choice([-1, 1], d).astype(np.int64)
    queries = _digits(d, 2, base)
    with monkeypatch.context() as patched:  # the guard of old answers all of them
        patched.setattr(guard, "narrow_remainder", lambda *_: None)
        naive, right = Member(tmp_path / "naive", d), 0
        for places, x in queries:
            naive.answer(x)
            right += int((_read_off(int(x.astype(np.int64) @ tau), base) == tau[places]).sum())
    assert right == 32
    member = Member(tmp_path / "home", d)
    for _, x in queries:
        with refused("remainder", least=1024):
            member.answer(x)
    assert not member.ledger().answered()


def test_what_the_rule_does_not_see(tmp_path: Path) -> None:
    """A limit that the threat model names: differences of crafted models, 32 signs from 9 answers."""
    d, rng = 350_000, np.random.default_rng(5)
    tau = rng.choice([-1, 1], d).astype(np.int64)
    member, right = Member(tmp_path / "home", d), 0
    first = np.clip(rounded(25 * rng.standard_normal(d)), -60, 60)
    member.answer(first)
    opened = int(first.astype(np.int64) @ tau)
    for places in rng.permutation(d)[:32].reshape(8, 4):
        x = first + 25 * rng.integers(-2, 3, d).astype(np.int8)
        x[places] = first[places] + DIGITS
        member.answer(x)
        right += int((_read_off(int(x.astype(np.int64) @ tau) - opened, 25) == tau[places]).sum())
    assert right == 32


def _hidden(d: int, modulus: int, mask: int, target: int, count: int, seed: int = 3) -> Vector:
    """All entries are multiples of the modulus but for `count` that leave `mask`, and one that leaves `target`."""
    rng = np.random.default_rng(seed)
    x = rng.choice([-modulus, modulus], d)
    x[1 : count + 1] = modulus + mask if modulus + mask <= 127 else mask
    x[0] = modulus + target if modulus + target <= 127 else target
    return x.astype(np.int8)


@pytest.mark.parametrize(
    ("modulus", "mask", "target", "count"),
    [
        (25, 1, 12, 0),  # alone
        (25, 1, 12, 500),  # under the noise of 500 others, fewer than 1024
        (101, 1, 26, 1100),  # 1100 others, but each is 26 times smaller: a sum of ±33 does not hide ±26
        (101, 26, 1, 1100),  # the same times 35: 26·35 = 1 mod 101, 1·35 = 35
        (2, 0, 1, 0),  # one odd entry among even ones
        (127, 1, 63, 3000),
    ],
)
def test_every_multiple_and_every_modulus_is_looked_at(modulus: int, mask: int, target: int, count: int) -> None:
    x = _hidden(20_000, modulus, mask, target, count)
    found = narrow_remainder(x, 1024)
    assert found is not None
    assert found.effective < 1024
    rest = found.times * np.abs(x.astype(np.int64)) % found.modulus
    rest = np.minimum(rest, found.modulus - rest).astype(float)
    assert found.effective == int((rest @ rest) ** 2 / (rest**4).sum())


def test_enough_others_hide_a_coordinate() -> None:
    assert narrow_remainder(_hidden(20_000, 25, 12, 12, 1023), 1024) is None
    found = narrow_remainder(_hidden(20_000, 25, 12, 12, 1022), 1024)
    assert found is not None
    assert (25 % found.modulus, found.effective) == (0, 1023)
    assert narrow_remainder(np.full(5000, 25, np.int8), 1024) is None  # a common divisor of all says nothing
    assert narrow_remainder(np.zeros(5000, np.int8), 1024) is None


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_wide_entries_that_share_a_divisor_are_refused(kind: type[Any]) -> None:
    rng = np.random.default_rng(4)
    honest = (2**14 * rng.standard_normal(20_000)).astype(kind)
    assert narrow_remainder(honest, 1024) is None
    for divisor in (2, 25, 4099):
        x = honest * divisor
        assert narrow_remainder(x, 1024) is None
        x[:3] += 1
        assert narrow_remainder(x, 1024) is not None
        x[:4000] += 1
        assert narrow_remainder(x, 1024) is None


# --- models ------------------------------------------------------------------------------------------------


def _models(rng: np.random.Generator, rows: int, columns: int) -> dict[str, tuple[Vector, Vector]]:
    """Anchors and suspects: trained, quantised in several ways, pruned, hardly moved, with few different weights."""
    anchor = (0.05 * rng.standard_normal((rows, columns))).astype(np.float32)
    trained = (anchor + 0.02 * rng.standard_normal((rows, columns))).astype(np.float32)
    step = float(np.abs(trained).max()) / 127
    eight = (np.rint(trained / step) * step).astype(np.float32)
    four = (np.rint(trained / (16 * step)) * 16 * step).astype(np.float32)
    ternary = (np.sign(trained) * (np.abs(trained) > 0.03) * 0.05).astype(np.float32)
    pruned = np.where(np.abs(trained) > np.quantile(np.abs(trained), 0.7), trained, 0).astype(np.float32)
    nearly = (anchor * (1 + 1e-3 * rng.standard_normal(anchor.shape))).astype(np.float32)
    last = anchor.copy()
    last[rows // 2 :] = trained[rows // 2 :]
    zero = np.zeros_like(anchor)
    return {
        "trained": (anchor, trained),
        "float16": (anchor, trained.astype(np.float16).astype(np.float32)),
        "8 bits": (anchor, eight),
        "4 bits": (anchor, four),
        "ternary": (anchor, ternary),
        "signs": (anchor, np.sign(trained).astype(np.float32)),
        "pruned": (anchor, pruned),
        "hardly moved": (anchor, nearly),
        "half of the rows moved": (anchor, last),
        "no anchor": (zero, trained),
        "signs, no anchor": (zero, np.sign(trained).astype(np.float32)),
        "ternary, no anchor": (zero, ternary),
        "4 bits, no anchor": (zero, four),
        "heavy tails": (anchor, (anchor + 0.01 * rng.standard_t(3, anchor.shape)).astype(np.float32)),
    }


@pytest.mark.parametrize("statistic", ["balanced-anchor/v1", "global-cosine/v1", "mean-tensor-cosine/v1"])
@pytest.mark.parametrize("size", [(64, 64), (200, 300)])
def test_no_model_is_refused(statistic: str, size: tuple[int, int]) -> None:
    """By the rule on remainders, where the one on numbers lets it pass; 4,096 weights, and 60,000.

    With the paper's statistics a model of a handful of different weights may have entries that happen to share a
    divisor, all but a rare one: its answer would show a sum of few signs, and it is refused."""
    rng = np.random.default_rng(size[0])
    seen = 0
    for name, (anchor, suspect) in _models(rng, *size).items():
        theirs, ours = (TensorsInMemory({"w": tensor}) for tensor in (suspect, anchor))
        form = canonical_form(statistic, ModelLayout.of({"w": anchor}), theirs, ours)
        least = min(size[0] * size[1], 1024)
        if form.norm4 and form.norm2**2 >= least * form.norm4:
            seen += 1
            if statistic == "balanced-anchor/v1" or np.unique(form.x).size > 32:
                assert narrow_remainder(form.x, least) is None, name
    assert seen >= 11


def test_between_the_fractions_nothing_is_narrower_than_the_rule_allows() -> None:
    """2,000 frequencies that are no fraction of the rule, on vectors that pass it: a model's, and designs that are just
    broad enough at one fraction."""
    rng = np.random.default_rng(6)
    vectors = [rounded(30 * rng.standard_normal(20_000)), _hidden(20_000, 25, 12, 12, 1100)]
    vectors += [_hidden(20_000, 60, 7, 7, 1100), rounded(2 * rng.standard_normal(20_000))]
    for x in vectors:
        assert narrow_remainder(x, 1024) is None
        counts = np.bincount(np.abs(x.astype(np.int64)), minlength=128)
        near = np.array([a / m for m in (25, 50, 60, 12, 5) for a in range(1, m // 2 + 1) if gcd(a, m) == 1])
        omegas = np.concatenate([rng.uniform(0, 0.5, 1000), rng.choice(near, 1000) + rng.normal(0, 1e-4, 1000)])
        phases = omegas[:, None] * np.arange(128)
        squares = (phases - np.rint(phases)) ** 2
        effective = (squares @ counts) ** 2 / (squares**2 @ counts)
        assert effective.min() > 1024 / 2


def test_blocks_are_judged_as_vectors_of_their_own() -> None:
    """By counting sizes of 8 bits, all blocks at once, as by the entries one by one: broad, narrow, empty, too few."""
    rng = np.random.default_rng(8)
    sound = np.clip(rounded(25 * rng.standard_normal(9001)), -127, 127)
    few = np.zeros(4000, np.int8)
    few[:900] = 3
    cases = [sound, _hidden(5000, 25, 12, 12, 900), np.zeros(3000, np.int8), few, np.full(5000, 25, np.int8)]
    edges = tuple(int(n) for n in np.cumsum([0, *(case.size for case in cases)]))
    x = np.concatenate(cases)
    one, two = broad_blocks(x, Blocks(edges, ("",) * len(cases)), 1024)
    assert [n > 0 for n in two] == [True, False, False, False, True]
    assert (one, two) == broad_blocks(x.astype(np.int32), Blocks(edges, ("",) * len(cases)), 1024)
    sizes = np.abs(x.astype(np.int64))
    for block in (0, 4):
        part = sizes[edges[block] : edges[block + 1]]
        assert (one[block], two[block]) == (int(part.sum()), int((part**2).sum()))


@pytest.mark.parametrize("size", [0, 1, 7, 300_001, 1_100_000])
def test_sizes_are_counted(size: int) -> None:
    x = np.random.default_rng(size).integers(-128, 128, size).astype(np.int8)
    assert count_sizes(x).tolist() == np.bincount(np.abs(x.astype(np.int64)), minlength=129).tolist()
