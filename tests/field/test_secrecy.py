"""t−1 shares say nothing about the secret: the test, and proof that it would notice schemes that leak.

The schemes that leak are the two mistakes of the paper's public code: coefficients of 8 bits, and a composite
modulus (2^53−1 = 6361 · 69431 · 20394401).

False alarms: `assert_hides` makes fewer than 100 tests at p < 10^-10 each, so an honest scheme fails it less than once
in 10^8 runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from quorumark import field, shamir
from quorumark.research.bench.peers import PAPER_MODULUS, paper_sharing
from tests.kit.oracle import P
from tests.kit.secrecy import ALARM, features

Scheme: TypeAlias = Callable[[NDArray[np.uint64], int, int], NDArray[np.uint64]]


def _ours(secret: NDArray[np.uint64], threshold: int, members: int) -> NDArray[np.uint64]:
    return shamir.share(secret, threshold, members)


def _ours_compressed(secret: NDArray[np.uint64], threshold: int, members: int) -> NDArray[np.uint64]:
    return np.stack([s.expand() for s in shamir.share_compressed(secret, threshold, members, block=1024)])


def _python_scheme(modulus: int, coefficient_bits: int) -> Scheme:
    """Shamir's scheme by the book, with a modulus and a coefficient width of choice."""

    def scheme(secret: NDArray[np.uint64], threshold: int, members: int) -> NDArray[np.uint64]:
        draw = np.random.default_rng(5)
        span = min(1 << coefficient_bits, modulus)
        coefficients = draw.integers(0, span, (threshold - 1, secret.size), dtype=np.uint64).astype(object)
        values = np.empty((members, secret.size), dtype=object)
        for x in range(1, members + 1):
            total = np.zeros(secret.size, dtype=object)
            for row in coefficients[::-1]:
                total = (total + row) * x % modulus
            values[x - 1] = (total + secret.astype(object)) % modulus
        return values.astype(np.uint64)

    return scheme


def assert_hides(scheme: Scheme, modulus: int = P, size: int = 40_000) -> None:
    """Fails if t−1 shares of two secrets look different, or one share is not uniform where it must be."""
    for members, threshold in ((2, 2), (5, 3), (9, 4)):
        low = scheme(np.zeros(size, np.uint64), threshold, members)
        high = scheme(np.full(size, modulus // 2, np.uint64), threshold, members)
        for name, feature in features(threshold, modulus).items():
            a, b = feature(low), feature(high)
            # the same distribution for both secrets, and a uniform one
            counts = np.array([np.bincount(a, minlength=64), np.bincount(b, minlength=64)])
            seen = counts.sum(axis=0) > 0
            same = stats.chi2_contingency(counts[:, seen]).pvalue if seen.sum() > 1 else 0.0
            flat = min(stats.chisquare(row).pvalue for row in counts)
            assert same > ALARM, f"({members},{threshold}) {name}: two secrets can be told apart (p = {same:.1e})"
            assert flat > ALARM, f"({members},{threshold}) {name}: shares are not uniform (p = {flat:.1e})"
    # a member at a point that divides the modulus holds the secret mod that point
    point, trials = 6361, 400
    secret = np.arange(trials, dtype=np.uint64) * np.uint64(7919)
    share = scheme(secret, 2, point)[point - 1]
    hits = int((share % np.uint64(point) == secret % np.uint64(point)).sum())
    chance = stats.binom.sf(hits - 1, trials, 1 / point)
    assert chance > ALARM, f"the share at {point} repeats the secret mod {point} in {hits} of {trials} places"


def test_our_shares_hide_the_secret() -> None:
    assert_hides(_ours)


def test_our_compressed_shares_hide_the_secret() -> None:
    assert_hides(_ours_compressed)


@pytest.mark.slow
def test_our_shares_hide_the_secret_from_a_million_samples() -> None:
    assert_hides(_ours, size=1_000_000)
    assert_hides(_ours_compressed, size=1_000_000)


def test_the_test_passes_shamir_by_the_book() -> None:
    assert_hides(_python_scheme(P, 61))


def test_the_test_notices_coefficients_of_8_bits() -> None:
    with pytest.raises(AssertionError, match=r"two secrets can be told apart|not uniform"):
        assert_hides(_python_scheme(P, 8))


def test_the_test_notices_coefficients_that_are_a_little_too_small() -> None:
    with pytest.raises(AssertionError, match=r"two secrets can be told apart|not uniform"):
        assert_hides(_python_scheme(P, 60))


def test_the_test_notices_a_composite_modulus() -> None:
    assert PAPER_MODULUS == 6361 * 69431 * 20394401
    with pytest.raises(AssertionError, match="repeats the secret mod 6361 in 400 of 400"):
        assert_hides(_python_scheme(PAPER_MODULUS, 53), PAPER_MODULUS)


# --- the paper's public code, as a regression test --------------------------------------------------------


def _paper_shares(key: NDArray[np.int64], threshold: int, members: int) -> NDArray[np.float64]:
    """Shares of key/‖key‖ in 42-bit fixed point, as the paper's code makes and reads them: lifted to floats."""
    scaled = np.round(key / np.linalg.norm(key) * 2**42).astype(np.int64)
    call = paper_sharing([int(v) for v in scaled], threshold, members)
    if call is None:
        pytest.skip("the paper's code needs torch")
    shares: NDArray[np.int64] = call().numpy()  # type: ignore[attr-defined]
    return np.where(shares > PAPER_MODULUS // 2, shares - PAPER_MODULUS, shares) / 2.0**42


def _cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def _signs(count: int) -> NDArray[np.int64]:
    return 2 * np.random.default_rng(11).integers(0, 2, count) - 1


@pytest.mark.parametrize("members", [4, 8, 16, 24])
def test_one_share_of_the_papers_code_is_the_key_and_one_of_ours_is_noise(members: int) -> None:
    key = _signs(20_000)
    theirs = _paper_shares(key, members // 2, members)[0]
    assert _cosine(theirs, key) > 0.999
    ours = shamir.share(field.from_signed(key), members // 2, members)
    for share in ours:
        # |z| < 6.5 for each: a false alarm in less than 1 of 10^8 runs
        assert abs(_cosine(field.to_signed(share).astype(np.float64), key)) * np.sqrt(key.size) < 6.5


def test_t_shares_of_the_papers_code_do_not_reconstruct_and_ours_do() -> None:
    key = _signs(20_000)
    shares = _paper_shares(key, 16, 32)
    points = np.arange(1.0, 17.0)
    weights = [np.prod([-y / (x - y) for y in points if y != x]) for x in points]
    assert abs(_cosine(np.array(weights) @ shares[:16], key)) < 0.1
    ours = shamir.share(field.from_signed(key), 64, 128)
    found = shamir.reconstruct({x: ours[x - 1] for x in range(40, 104)}, 64)
    assert (field.to_signed(found) == key).all()
