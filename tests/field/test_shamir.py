"""quorumark.shamir against Python ints: sharing, Lagrange, compression, decoding, the degree check."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumark import field, shamir
from quorumark.errors import DecodingError, InputError, QuorumarkError, ShareError
from quorumark.field import kernels
from tests.kit.oracle import EDGES, P, array, elements, evaluate, interpolate, ints

SIZES = [(2, 2), (3, 2), (5, 3), (5, 5), (6, 4), (7, 7), (8, 3), (9, 5), (32, 16), (128, 64), (128, 128), (20, 20)]


@pytest.mark.parametrize(("members", "threshold"), SIZES)
@pytest.mark.parametrize("length", [1, 8, 13])
def test_shares_lie_on_a_polynomial_of_degree_t_minus_1_through_the_secret(
    members: int, threshold: int, length: int
) -> None:
    secret = field.random(length)
    secret[: min(length, 5)] = array(EDGES[: min(length, 5)])
    shares = shamir.share(secret, threshold, members)
    assert shares.shape == (members, length)
    for column in range(length):
        points = [(x, int(shares[x - 1, column])) for x in range(1, members + 1)]
        first = points[:threshold]
        assert interpolate(first, 0) == int(secret[column])
        for x, y in points[threshold:]:
            assert interpolate(first, x) == y
        # and of no lower degree: without one point it would still give the secret (chance 1/p)
        assert interpolate(first[1:], 0) != int(secret[column])


@pytest.mark.parametrize(("members", "threshold"), SIZES)
def test_any_t_of_k_reconstruct_exactly(members: int, threshold: int) -> None:
    secret = field.random(1003)
    shares = shamir.share(secret, threshold, members)
    choose = random.Random(members * 1000 + threshold)
    for _ in range(5):
        chosen = choose.sample(range(1, members + 1), threshold)
        assert (shamir.reconstruct({x: shares[x - 1] for x in chosen}, threshold) == secret).all()


def test_every_coalition_of_five() -> None:
    secret = field.random(50)
    shares = shamir.share(secret, 3, 5)
    for size in (3, 4, 5):
        for chosen in itertools.combinations(range(1, 6), size):
            assert (shamir.reconstruct({x: shares[x - 1] for x in chosen}, 3) == secret).all()


def test_a_missing_share_can_be_computed_from_t_others() -> None:
    shares = shamir.share(field.random(100), 3, 5)
    assert (shamir.reconstruct({x: shares[x - 1] for x in (1, 2, 5)}, 3, at=4) == shares[3]).all()


def test_two_sharings_of_one_secret_are_unrelated_and_add_up() -> None:
    a, b = field.random(500), field.random(500)
    first, second, other = shamir.share(a, 3, 5), shamir.share(a, 3, 5), shamir.share(b, 3, 5)
    assert not (first == second).any(axis=1).all()
    total = field.add(first, other)
    assert (shamir.reconstruct({x: total[x - 1] for x in (2, 3, 4)}, 3) == field.add(a, b)).all()


def test_threads_share_correctly_across_their_borders() -> None:
    before = field.threads()
    secret = field.random(500_001)
    try:
        for count in (1, 2, 3):
            field.set_threads(count)
            shares = shamir.share(secret, 3, 5)
            shamir.check_degree({x: shares[x - 1] for x in range(1, 6)}, 3)
            assert (shamir.reconstruct({x: shares[x - 1] for x in (1, 4, 5)}, 3) == secret).all()
            # no coefficient used twice: with one constant secret, equal words would show as equal shares
            constant = shamir.share(np.zeros_like(secret), 2, 2)
            assert len(np.unique(constant[0])) == secret.size
    finally:
        field.set_threads(before)


# --- chunks and compression -------------------------------------------------------------------------------


def test_chunks_are_the_sharing_piece_by_piece() -> None:
    secret = field.random(1000)
    pieces = list(shamir.share_chunks(secret, 3, 5, chunk=300))
    assert [(start, piece.shape) for start, piece in pieces] == [
        (0, (5, 300)), (300, (5, 300)), (600, (5, 300)), (900, (5, 100))
    ]  # fmt: skip
    shares = np.concatenate([piece for _, piece in pieces], axis=1)
    assert (shamir.reconstruct({x: shares[x - 1] for x in (5, 1, 3)}, 3) == secret).all()
    streamed = shamir.share_chunks(iter([secret[:10], secret[10:11]]), 2, 3)
    assert [(start, piece.shape) for start, piece in streamed] == [(0, (3, 10)), (10, (3, 1))]


@pytest.mark.parametrize(("members", "threshold"), [(2, 2), (5, 3), (5, 5), (32, 16), (7, 2)])
@pytest.mark.parametrize(("length", "block"), [(1, 64), (63, 64), (64, 64), (65, 64), (1000, 64), (5000, 7)])
def test_compressed_shares_expand_to_a_sharing(members: int, threshold: int, length: int, block: int) -> None:
    secret = field.random(length)
    shares = shamir.share_compressed(secret, threshold, members, block)
    full = {share.point: share.expand() for share in shares}
    chosen = random.Random(length).sample(sorted(full), threshold)
    assert (shamir.reconstruct({x: full[x] for x in chosen}, threshold) == secret).all()
    if threshold < members:
        shamir.check_degree(full, threshold)


def test_compression_saves_alike_for_everyone() -> None:
    members, threshold, block = 10, 6, 16
    shares = shamir.share_compressed(field.random(members * block * 3), threshold, members, block)
    stored = {share.values.size for share in shares}
    assert stored == {(members - threshold + 1) * block * 3}


def test_a_compressed_share_hides_its_seed_and_refuses_missing_values() -> None:
    share = shamir.share_compressed(field.random(100), 3, 5, 10)[0]
    assert share.seed.hex() not in repr(share)
    assert repr(share.seed)[2:-1] not in repr(share)
    good = {name: getattr(share, name) for name in share.__dataclass_fields__}
    assert (shamir.CompressedShare(**good).expand() == share.expand()).all()
    spoiled = share.values.copy()
    spoiled[7] = P
    for name, value, text in [
        ("values", share.values[:-1], "must be the 60 elements"),
        ("values", np.append(share.values, np.uint64(1)), "must be the 60 elements"),
        ("values", spoiled, f"{P} at index 7"),
        ("seed", share.seed[:31], "32 bytes"),
        ("point", 6, "1..5"),
        ("point", 0, "1..5"),
        ("threshold", 6, "members = 5"),
        ("block", 0, "at least 1"),
    ]:
        with pytest.raises(InputError) as caught:
            shamir.CompressedShare(**{**good, name: value})
        assert text in str(caught.value)
        assert share.seed.hex() not in str(caught.value)
        assert repr(share.seed)[2:-3] not in str(caught.value)


def test_every_compressed_sharing_has_seeds_of_its_own() -> None:
    first, second = (shamir.share_compressed(S, 2, 3) for _ in range(2))
    assert len({share.seed for share in [*first, *second]}) == 6


# --- the kernel, with words of our choice ---


@pytest.mark.parametrize(("members", "threshold"), [(2, 2), (3, 2), (5, 3), (6, 6), (13, 5), (32, 16), (128, 64)])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 64, 65, 130])
def test_shares_are_the_newton_formula_word_for_word(members: int, threshold: int, size: int) -> None:
    rng = np.random.default_rng(size)
    words = rng.integers(0, 2**64, (threshold - 1, size), dtype=np.uint64)
    words[rng.random(words.shape) < 0.2] = np.uint64(P)  # p counts as 0
    words[rng.random(words.shape) < 0.2] = np.uint64(2**64 - 1)
    secret = array([*EDGES, *range(size)][:size])
    out = np.zeros((members, size + 3), np.uint64)
    kernels.newton_shares(secret, words.reshape(-1), threshold, members, out, 2)
    for c in range(size):
        for x in (1, 2, 3, 4, members - 1, members):
            if 1 <= x <= members:
                total = int(secret[c]) + sum((int(words[j - 1, c]) & P) * math.comb(x, j) for j in range(1, threshold))
                assert int(out[x - 1, c + 2]) == total % P
    assert not out[:, :2].any()
    assert not out[:, size + 2 :].any()


def test_every_tile_and_thread_takes_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a known stream, coordinate c of tile [a, b) uses words (t−1)·a + (j−1)·(b−a) + (c−a)."""
    stream = field.Stream(bytes(32), "known")
    monkeypatch.setattr(field.Stream, "fresh", classmethod(lambda _cls, _purpose: stream))
    before = field.threads()
    try:
        for count in (1, 3):
            field.set_threads(count)
            secret = np.zeros(3_000_000, np.uint64)
            shares = shamir.share(secret, 2, 2)  # f(x) = r_1·x
            assert (shares[0] == stream.elements(secret.size)).all()
            three = shamir.share(secret[:400_000], 3, 3)  # f(1) = r_1, f(2) = 2·r_1 + r_2
            second = field.sub(three[1], field.add(three[0], three[0]))
            used = np.sort(np.concatenate([three[0], second]))
            assert (used == np.sort(stream.elements(800_000))).all()
    finally:
        field.set_threads(before)


# --- Lagrange ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, P - 1), min_size=1, max_size=12, unique=True), elements, st.data())
def test_lagrange_is_interpolation_at_any_target(points: list[int], at: int, data: st.DataObject) -> None:
    coefficients = data.draw(st.lists(elements, min_size=len(points), max_size=len(points)))
    values = [evaluate(coefficients, x) for x in points]
    weights = shamir.lagrange(points, at)
    assert sum(w * y for w, y in zip(weights, values, strict=True)) % P == evaluate(coefficients, at)
    assert shamir.lagrange_matrix(points, [at, points[0]]).tolist() == [weights, [1] + [0] * (len(points) - 1)]


def test_lagrange_coefficients_of_many_members_are_exact() -> None:
    weights = shamir.lagrange(range(1, 129))
    assert sum(weights) % P == 1  # the constant polynomial
    assert sum(w * x**127 for x, w in enumerate(weights, 1)) % P == 0  # x^127 vanishes at 0


# --- decoding ---------------------------------------------------------------------------------------------


@given(st.integers(2, 7), st.integers(0, 9), st.data())
def test_decoding_corrects_and_names_up_to_half_the_spare_shares(t: int, spare: int, data: st.DataObject) -> None:
    n = t + spare
    points = data.draw(st.lists(st.integers(1, 1000), min_size=n, max_size=n, unique=True))
    coefficients = data.draw(st.lists(elements, min_size=t, max_size=t))
    shares = {x: evaluate(coefficients, x) for x in points}
    wrong = data.draw(st.lists(st.sampled_from(points), max_size=spare // 2, unique=True))
    for x in wrong:
        shares[x] = (shares[x] + data.draw(st.integers(1, P - 1))) % P
    at = data.draw(st.sampled_from([0, 5, P - 1]))
    decoded = shamir.decode(shares, t, at)
    assert decoded == shamir.Decoded(evaluate(coefficients, at), tuple(sorted(wrong)), spare)


@given(st.integers(2, 6), st.integers(1, 8), st.data())
def test_more_wrong_shares_are_noticed(t: int, spare: int, data: st.DataObject) -> None:
    """Up to n − t random errors cannot make another codeword (but for a chance of about 1/p)."""
    points = list(range(1, t + spare + 1))
    coefficients = data.draw(st.lists(elements, min_size=t, max_size=t))
    shares = {x: evaluate(coefficients, x) for x in points}
    count = data.draw(st.integers(spare // 2 + 1, spare))
    noise = random.Random(data.draw(st.integers(0, 2**32)))
    for x in noise.sample(points, count):
        shares[x] = (shares[x] + noise.randrange(1, P)) % P
    with pytest.raises(DecodingError, match=f"more than {spare // 2} of them"):
        shamir.decode(shares, t)


def test_colluders_beyond_the_bound_can_frame_the_honest() -> None:
    """The limit that the docs state: ⌈(n−t)/2⌉ + 1 liars set the value and make others look wrong."""
    shares = {x: evaluate([12345, 67, 89], x) for x in range(1, 8)}
    for x in (3, 4, 5):  # a multiple of a polynomial that vanishes at two honest points: no honest share is needed
        shares[x] = (shares[x] + 1000 * (x - 1) * (x - 2)) % P
    decoded = shamir.decode(shares, 3)
    assert (decoded.value, decoded.wrong) == (14345, (6, 7))
    # who must not be fooled accepts only shares that all agree
    with pytest.raises(DecodingError, match="do not all agree"):
        shamir.decode(shares, 3, correct=False)


@given(st.integers(2, 5), st.integers(1, 6), st.data())
def test_without_correction_any_n_minus_t_lies_are_noticed(t: int, spare: int, data: st.DataObject) -> None:
    """The liars choose a polynomial through t of the honest shares at best: some honest share must disagree."""
    points = list(range(1, t + spare + 1))
    honest, lie = (data.draw(st.lists(elements, min_size=t, max_size=t)) for _ in range(2))
    liars = data.draw(st.lists(st.sampled_from(points), min_size=1, max_size=spare, unique=True))
    shares = {x: evaluate(lie if x in liars else honest, x) for x in points}
    if all(shares[x] == evaluate(honest, x) for x in points):
        assert shamir.decode(shares, t, correct=False).value == honest[0]
    else:
        with pytest.raises(DecodingError):
            shamir.decode(shares, t, correct=False)


def test_decoding_with_exactly_t_corrects_nothing_and_says_so() -> None:
    assert shamir.decode({1: 6, 2: 7}, 2) == shamir.Decoded(5, (), 0)


def test_decoding_at_128_of_64() -> None:
    rng = random.Random(1)
    coefficients = [rng.randrange(P) for _ in range(64)]
    shares = {x: evaluate(coefficients, x) for x in range(1, 129)}
    wrong = sorted(rng.sample(range(1, 129), 32))
    for x in wrong:
        shares[x] = rng.randrange(P)
    assert shamir.decode(shares, 64) == shamir.Decoded(coefficients[0], tuple(wrong), 64)


@pytest.mark.slow
def test_a_thousand_members() -> None:
    secret = field.random(200)
    shares = shamir.share(secret, 500, 1000)
    chosen = random.Random(2).sample(range(1, 1001), 500)
    assert (shamir.reconstruct({x: shares[x - 1] for x in chosen}, 500) == secret).all()
    answers = {x: int(shares[x - 1, 0]) for x in range(1, 1001)}
    wrong = sorted(random.Random(3).sample(range(1, 1001), 250))
    for x in wrong:
        answers[x] = (answers[x] + 1) % P
    assert shamir.decode(answers, 500) == shamir.Decoded(int(secret[0]), tuple(wrong), 500)


# --- the degree check -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", ["one element by one", "a whole vector", "the last element"])
def test_degree_check_finds_and_names_what_does_not_fit(spoil: str) -> None:
    shares = shamir.share(field.random(2_000), 3, 6)
    vectors = {x: shares[x - 1] for x in range(1, 7)}
    shamir.check_degree(vectors, 3)
    if spoil == "one element by one":
        shares[3, 1234] = (int(shares[3, 1234]) + 1) % P
    elif spoil == "a whole vector":
        shares[3] = field.random(2_000)
    else:
        shares[3, -1] = (int(shares[3, -1]) + P // 2) % P
    with pytest.raises(ShareError, match="points 4 do not fit"):
        shamir.check_degree(vectors, 3)
    with pytest.raises(ShareError, match="points 4 do not fit"):
        shamir.reconstruct(vectors, 3)
    with pytest.raises(ShareError, match="too few"):
        shamir.check_degree({x: vectors[x] for x in (1, 2, 3, 4)}, 3)


def test_degree_check_is_not_fooled_by_errors_that_cancel() -> None:
    """+1 and −1 in two places, near each other or in different chunks: only random weights tell them from nothing."""
    shares = shamir.share(field.random((1 << 20) + 10), 2, 4)
    for first, second in ((3, 4), (5, (1 << 20) + 5)):
        spoiled = shares.copy()
        spoiled[2, first] = (int(spoiled[2, first]) + 1) % P
        spoiled[2, second] = (int(spoiled[2, second]) - 1) % P
        with pytest.raises(ShareError, match="points 3 do not fit"):
            shamir.check_degree({x: spoiled[x - 1] for x in range(1, 5)}, 2)


def test_degree_check_draws_new_weights_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def spy(totals: object, _threshold: int) -> shamir.Decoded:
        seen.append(totals)
        return shamir.Decoded(0, (), 0)

    monkeypatch.setattr(shamir, "decode", spy)
    shares = shamir.share(field.random(10), 2, 3)
    for _ in range(2):
        shamir.check_degree({x: shares[x - 1] for x in (1, 2, 3)}, 2)
    assert seen[0] != seen[1]


def test_degree_check_refuses_a_higher_degree() -> None:
    shares = shamir.share(field.random(100), 4, 6)
    vectors = {x: shares[x - 1] for x in range(1, 7)}
    shamir.check_degree(vectors, 4)
    with pytest.raises(ShareError):
        shamir.check_degree(vectors, 3)


# --- bad input --------------------------------------------------------------------------------------------

S = array([1, 2, 3])
M = np.ones((3, 3), np.uint64)
BAD_CALLS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "t > K": (lambda: shamir.share(S, 4, 3), ["threshold", "members = 3", "4"]),
    "t = 1": (lambda: shamir.share(S, 1, 3), ["threshold", "at least 2", "1"]),
    "t = 0": (lambda: shamir.decode({1: 1}, 0), ["threshold", "at least 2", "0"]),
    "t a float": (lambda: shamir.share(S, 2.0, 3), ["threshold", "integer", "float"]),  # type: ignore[arg-type]
    "arguments swapped": (lambda: shamir.share(3, S, 5), ["threshold", "integer", "ndarray"]),  # type: ignore[arg-type]
    "no mapping": (lambda: shamir.decode([1, 2], 2), ["shares", "map points", "list"]),  # type: ignore[arg-type]
    "no points at all": (lambda: shamir.lagrange(5), ["points", "sequence", "int"]),  # type: ignore[arg-type]
    "no vectors": (lambda: shamir.share_chunks(5, 2, 3), ["secret", "vectors", "int"]),  # type: ignore[arg-type]
    "out is the secret": (
        lambda: shamir.share(M[0], 2, 3, out=M),
        ["out", "share memory"],
    ),
    "seeds": (lambda: shamir.compressed_block(S, 0, {1: bytes(32), 3: bytes(32)}, 2), ["seeds", "1..2"]),
    "K = 0": (lambda: shamir.share(S, 2, 0), ["members", "at least 1", "0"]),
    "secret value": (lambda: shamir.share(array([P]), 2, 3), ["secret", "[0, p)", f"{P} at index 0"]),
    "secret dtype": (lambda: shamir.share(S.astype(np.float64), 2, 3), ["secret", "uint64", "float64"]),
    "secret empty": (lambda: shamir.share(S[:0], 2, 3), ["secret", "non-empty", "(0,)"]),
    "secret 2-D": (lambda: shamir.share(S.reshape(1, 3), 2, 3), ["secret", "1-D", "(1, 3)"]),
    "out shape": (lambda: shamir.share(S, 2, 3, out=np.zeros((3, 2), np.uint64)), ["out", "(3, 3)", "(3, 2)"]),
    "chunk": (lambda: shamir.share_chunks(S, 2, 3, chunk=0), ["chunk", "at least 1", "0"]),
    "block": (lambda: shamir.share_compressed(S, 2, 3, block=-5), ["block", "at least 1", "-5"]),
    "zero point": (lambda: shamir.lagrange([0, 1]), ["points", "not include 0", "0"]),
    "duplicate point": (lambda: shamir.lagrange([3, 4, 3]), ["points", "distinct", "3 twice"]),
    "no points": (lambda: shamir.lagrange([]), ["points", "at least one"]),
    "point p": (lambda: shamir.lagrange([P]), ["points", "[0, p)", str(P)]),
    "target": (lambda: shamir.lagrange([1], -1), ["at", "[0, p)", "-1"]),
    "targets": (lambda: shamir.lagrange_matrix([1], []), ["targets", "empty"]),
    "too few": (lambda: shamir.reconstruct({1: S, 2: S}, 3), ["shares", "at least t = 3", "2"]),
    "lengths": (lambda: shamir.reconstruct({1: S, 2: S[:2]}, 2), ["shares", "same length", "3 and 2 (point 2)"]),
    "share value": (lambda: shamir.reconstruct({1: S, 2: array([P, 0, 0])}, 2), ["shares[2]", "[0, p)", str(P)]),
    "share dtype": (lambda: shamir.reconstruct({1: S, 2: S.astype(int)}, 2), ["shares[2]", "uint64", "int64"]),
    "zero share": (lambda: shamir.reconstruct({0: S, 2: S}, 2), ["shares", "not include 0"]),
    "decode value": (lambda: shamir.decode({1: 1, 2: P}, 2), ["shares[2]", "[0, p)", str(P)]),
    "decode too few": (lambda: shamir.decode({1: 1}, 2), ["shares", "at least t = 2", "1"]),
    "nothing to check": (lambda: shamir.check_degree({1: S, 2: S}, 2), ["shares", "more than t = 2", "2"]),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_refused_by_name_rule_and_value(case: str) -> None:
    call, texts = BAD_CALLS[case]
    with pytest.raises(InputError) as caught:
        call()
    assert isinstance(caught.value, QuorumarkError)
    for text in texts:
        assert text in str(caught.value)


def test_a_bad_chunk_in_a_stream_is_refused_when_it_comes() -> None:
    chunks = shamir.share_chunks(iter([S, array([P])]), 2, 3)
    assert ints(next(chunks)[1].shape) == [3, 3]
    with pytest.raises(InputError, match="secret"):
        next(chunks)
