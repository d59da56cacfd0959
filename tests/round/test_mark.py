"""What a member adds to its upload for the mark, and which rounds it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from quorumark import codec, field, shamir
from quorumark.consortium.strength import Strength
from quorumark.round.amplitudes import MarkState, _scaled
from quorumark.round.mark import check_round, ideal_mark, marked_vector, weights
from tests.kit.marks import RHO, make_layout, make_manifest, random_walk
from tests.kit.refusals import stopped, wrong_argument

# --- what a member adds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_coordinates": 57}])
@pytest.mark.parametrize("key", ["rademacher", "gaussian"])
def test_members_parts_add_up_to_the_mark_for_every_set(options: dict[str, Any], key: str) -> None:
    layout = make_layout(**options)
    d = layout.coordinates
    manifest = make_manifest(layout, key=key, strength=RHO)
    rng = np.random.default_rng(4)
    models = random_walk(layout, 4)
    state = MarkState(Strength.of(RHO, d), layout, key, models[0])
    for round_no in (1, 2):
        state.advance(round_no, models[round_no], None)
    amplitudes = state.amplitudes(3)
    tau = rng.choice([-1, 1], d) if key == "rademacher" else np.round(rng.normal(0, 256, d)).astype(np.int64)
    shares = shamir.share(field.from_signed(tau), 3, 5)
    results = {x: rng.normal(0, 0.1, layout.size) for x in range(1, 6)}
    signs = np.where(manifest.genesis.whitening(0, d), -1, 1)
    for size in (3, 4, 5):
        for members in (
            itertools.permutations(range(1, 6), size) if size == 3 else itertools.combinations(range(1, 6), size)
        ):
            total = plain = np.zeros(layout.size, np.uint64)
            for x in members:
                y = codec.encode(results[x], float(weights(manifest, members)[x]))
                plain = field.add(plain, y)
                longer = np.concatenate([shares[x - 1], field.random(11)])  # as after a resharing
                marked_vector(y, amplitudes, manifest, members, x, (longer[i : i + 13] for i in range(0, d + 11, 13)))
                total = field.add(total, y)
            ideal = plain.copy()
            ideal_mark(ideal, amplitudes, tau, manifest.genesis)
            assert np.array_equal(total, ideal)
    difference = field.to_signed(field.sub(total, plain))
    expected = np.zeros(layout.size, np.int64)
    expected[layout.carrying()] = amplitudes.vector.astype(np.int64) * signs * tau
    assert np.array_equal(difference, expected)
    assert expected.any()
    whitened = plain.copy()
    ideal_mark(whitened, amplitudes, signs * tau)
    assert np.array_equal(whitened, total)


def test_shares_enter_only_among_enough_members() -> None:
    layout = make_layout()
    manifest, y = make_manifest(layout), np.zeros(layout.size, np.uint64)
    amplitudes = MarkState(Strength.of(RHO, 9), layout, "rademacher", y).amplitudes(1)
    share = field.random(layout.coordinates)
    for members in ([1, 2], [2, 3, 4]):
        with stopped("round.too-few"):
            marked_vector(y, amplitudes, manifest, members, 1, [share])
    with wrong_argument("share"):
        marked_vector(y, amplitudes, manifest, [1, 2, 3], 1, [share[:-1]])
    assert not y.any()


# --- refusals ---------------------------------------------------------------------------------------------


def _round(threshold: int = 3, key: str = "rademacher", **changes: str) -> tuple[Any, ...]:
    """A round that a member accepts: the arguments of check_round."""
    layout = make_layout()
    manifest = make_manifest(layout, threshold, key=key, strength={**RHO, **changes})
    strength = Strength.of(manifest.terms.strength, layout.coordinates)
    models = random_walk(layout, 4)
    state = MarkState(strength, layout, key, models[0])
    for round_no in (1, 2):
        state.advance(round_no, models[round_no], None)
    return strength, manifest, state.amplitudes(3), (1, 2, 3, 4, 5), models[2], models[3]


def test_an_honest_round_is_accepted() -> None:
    strength, manifest, amplitudes, members, before, after = _round()
    told: dict[str, Any] = {"told_weights": weights(manifest, members), "told_rate": Fraction(1)}
    assert check_round(strength, manifest, amplitudes, members, before, after, **told) is True
    assert weights(manifest, (2, 5)) == {2: Fraction(200, 700), 5: Fraction(500, 700)}
    nothing = replace(amplitudes, scales=_scaled(amplitudes.scales, 0, 1))
    assert check_round(strength, manifest, nothing, members, before, after) is False


def test_what_is_not_the_manifests_is_refused() -> None:
    strength, manifest, amplitudes, members, before, after = _round(lr="cosine:50")

    def refused(code: str, *changed: Any, **told: Any) -> None:
        arguments = [strength, manifest, amplitudes, members, before, after]
        for place, value in changed:
            arguments[place] = value
        with stopped(f"round.{code}"):
            check_round(*arguments, **told)

    inflated = {**weights(manifest, members), 1: Fraction(1, 2)}
    refused("not-agreed", told_weights=inflated)
    refused("not-agreed", told_rate=strength.rate(3) * 2)
    refused("not-agreed", (0, Strength.of({**RHO, "rho": "0.1"}, amplitudes.layout.coordinates)))
    refused("not-agreed", (1, make_manifest(make_layout({"other": (9, 9)}), strength=manifest.terms.strength)))
    refused("not-agreed", (2, replace(amplitudes, key="gaussian")))
    for strange in ((1, 2, 3, 6), (0, 1, 2, 3), (1, 1, 2, 3)):
        refused("wrong-members", (3, strange))
    with wrong_argument("after"):
        check_round(strength, manifest, amplitudes, members, before, after[1:])


def test_weights_must_hide_every_member() -> None:
    strength, manifest, amplitudes, members, before, after = _round()
    roster = manifest.terms.roster
    heavy = replace(manifest.terms, roster=(*roster[:4], replace(roster[4], examples=2500)))
    with stopped("round.hides-too-little", names="1/Σa² = 1.87 < 2.0; 'Elm'"):
        check_round(strength, replace(manifest, terms=heavy, predecessor="cd" * 32), amplitudes, members, before, after)
    # 1/Σa² = 1500²/550000 = 4.09 of five members: enough for t = 5, and 2.4 of three are not
    strength, manifest, amplitudes, members, before, after = _round(threshold=5, below_threshold="skip")
    assert check_round(strength, manifest, amplitudes, members, before, after) is True
    with stopped("round.hides-too-little", names="< 2.5"):
        check_round(strength, manifest, amplitudes, (1, 2, 4), before, after)


def test_too_few_members() -> None:
    strength, manifest, amplitudes, _, before, after = _round(threshold=4)
    with stopped("round.too-few"):
        check_round(strength, manifest, amplitudes, (3, 4, 5), before, after)
    strength, manifest, amplitudes, _, before, after = _round(threshold=4, below_threshold="skip")
    assert check_round(strength, manifest, amplitudes, (3, 4, 5), before, after) is False


@pytest.mark.parametrize("key", ["rademacher", "gaussian"])
def test_a_mark_that_would_show_is_refused(key: str) -> None:
    strength, manifest, amplitudes, members, before, after = _round(key=key)
    signed = field.to_signed(amplitudes.vector).astype(float) * (256 if key == "gaussian" else 1)
    for name, part in amplitudes.tensors():
        mark = np.linalg.norm(signed[part])
        step = np.linalg.norm(field.to_signed(field.sub(after, before))[part].astype(float))
        if not mark:
            assert name in ("one", "out")  # a single weight in a row always moves along itself
            continue
        for factor, good in ((1.01, True), (0.99, False)):
            # this member's own update of one tensor, shrunk until the mark is 4·c_max times it
            own = after.copy()
            shrink = mark / (0.12 * step) * factor
            update = field.to_signed(field.sub(after, before))[part] * shrink
            own[part] = field.add(before[part], field.from_signed(update.astype(np.int64)))
            if good:
                assert check_round(strength, manifest, amplitudes, members, before, own)
            else:
                with stopped("round.too-strong", names=repr(name)):
                    check_round(strength, manifest, amplitudes, members, before, own)
    with stopped("round.too-strong"):
        check_round(strength, manifest, amplitudes, members, before, before)
