"""quorumark.field against Python ints: every function, in place and not, on one core and on all."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quorumark import field
from quorumark.errors import EncodingError, InputError, MissingDependencyError, QuorumarkError
from quorumark.field import kernels, parallel
from tests.kit.oracle import EDGES, P, array, elements, ints, nonzero, vectors


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = field.threads()
    yield
    field.set_threads(before)


# --- the mathematics --------------------------------------------------------------------------------------


@given(vectors(3), elements)
def test_elementwise_functions_agree_with_python_ints(rows: list[list[int]], a: int) -> None:
    x, y, z = rows
    assert ints(field.add(array(x), array(y))) == [(u + v) % P for u, v in zip(x, y, strict=True)]
    assert ints(field.sub(array(x), array(y))) == [(u - v) % P for u, v in zip(x, y, strict=True)]
    assert ints(field.neg(array(x))) == [-u % P for u in x]
    assert ints(field.mul(array(x), array(y))) == [u * v % P for u, v in zip(x, y, strict=True)]
    assert ints(field.scale(a, array(x))) == [a * u % P for u in x]
    assert ints(field.axpy(a, array(x), array(y))) == [(a * u + v) % P for u, v in zip(x, y, strict=True)]
    expected = [(w * u + v) % P for w, u, v in zip(z, x, y, strict=True)]
    assert ints(field.axpy(array(z), array(x), array(y))) == expected
    assert field.dot(array(x), array(y)) == sum(u * v for u, v in zip(x, y, strict=True)) % P


@given(vectors(3), elements, st.data())
def test_signed_products_are_added_as_python_ints_are(rows: list[list[int]], a: int, data: st.DataObject) -> None:
    x, y, z = rows
    minus = data.draw(st.one_of(st.just([]), st.lists(st.booleans(), min_size=len(x), max_size=len(x))))
    out, signs = array(z), np.array(minus, np.bool_)
    field.add_products(a, array(x), array(y), signs, out)
    each = zip(x, y, z, minus or [False] * len(x), strict=True)
    assert ints(out) == [(w + (-1 if m else 1) * a * u * v) % P for u, v, w, m in each]
    with pytest.raises(InputError):
        field.add_products(a, array(x), array([*y, 1]), signs, out)


def test_all_pairs_of_edge_values() -> None:
    x, y = (array(v) for v in zip(*[(a, b) for a in EDGES for b in EDGES], strict=True))
    for minus in (np.zeros(0, np.bool_), np.ones(x.size, np.bool_)):
        out, sign = y.copy(), -1 if minus.size else 1
        field.add_products(P - 1, x, y, minus, out)
        assert ints(out) == [(b - sign * a * b) % P for a in EDGES for b in EDGES]
    assert ints(field.mul(x, y)) == [a * b % P for a in EDGES for b in EDGES]
    assert ints(field.add(x, y)) == [(a + b) % P for a in EDGES for b in EDGES]
    assert ints(field.sub(x, y)) == [(a - b) % P for a in EDGES for b in EDGES]


@given(vectors(1, of=nonzero))
def test_inverse_and_inverse_square_root(rows: list[list[int]]) -> None:
    (x,) = rows
    assert ints(field.inv(array(x))) == [pow(v, -1, P) for v in x]
    squares = array([v * v % P for v in x])
    roots = field.inv_sqrt(squares)
    assert ints(roots) == [pow(v * v % P, (P - 3) // 4, P) for v in x]
    # r·(r²)^((p−3)/4) is the Legendre symbol of r: ±1
    assert set(ints(field.mul(array(x), roots))) <= {1, P - 1}


def test_inverse_of_whole_blocks_and_more() -> None:
    for size in (255, 256, 257, 1000):
        x = field.random(size)
        x[x == 0] = 1
        assert ints(field.mul(x, field.inv(x))) == [1] * size


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 20), st.data())
def test_matmul_agrees_with_python_ints(m: int, k: int, n: int, data: st.DataObject) -> None:
    a = data.draw(st.lists(elements, min_size=m * k, max_size=m * k))
    b = data.draw(st.lists(elements, min_size=k * n, max_size=k * n))
    found = field.matmul(array(a).reshape(m, k), array(b).reshape(k, n))
    for i in range(m):
        for j in range(n):
            assert int(found[i, j]) == sum(a[i * k + q] * b[q * n + j] for q in range(k)) % P


@pytest.mark.parametrize("k", [1, 3, 4, 5, 64, 128, 1000])
def test_lazy_sums_do_not_overflow(k: int) -> None:
    """The largest operands, many terms, all lanes: where a lazy reduction would break first."""
    top = np.full((k, 40), P - 1, np.uint64)
    weights = np.full((3, k), P - 1, np.uint64)
    assert set(ints(field.matmul(weights, top))) == {k % P}
    assert field.dot(top.reshape(-1), top.reshape(-1)) == 40 * k % P
    halves = np.full((k, 40), 2**60, np.uint64)
    assert set(ints(field.matmul(np.full((2, k), 2**60, np.uint64), halves))) == {k * 2**120 % P}


# --- in place, threads, shapes ----------------------------------------------------------------------------

IN_PLACE: dict[str, Callable[..., Any]] = {
    "add": field.add,
    "sub": field.sub,
    "mul": field.mul,
    "axpy": lambda x, y, out: field.axpy(P - 2, x, y, out=out),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 1003])
def test_output_may_be_either_operand(name: str, size: int) -> None:
    function = IN_PLACE[name]
    x, y = field.random(size), field.random(size)
    expected = ints(function(x, y, out=None))
    into_x, into_y, both = x.copy(), y.copy(), x.copy()
    assert ints(function(into_x, y, out=into_x)) == ints(into_x) == expected
    assert ints(function(x, into_y, out=into_y)) == ints(into_y) == expected
    assert ints(function(both, both, out=both)) == ints(function(x, x.copy(), out=None))


def test_powers_in_place() -> None:
    x = field.random(1003)
    x[x == 0] = 1
    squares, inverses = field.mul(x, x), field.inv(x)
    roots = field.inv_sqrt(squares)
    assert field.inv(x, out=x) is x
    assert (x == inverses).all()
    assert field.inv_sqrt(squares, out=squares) is squares
    assert (squares == roots).all()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_thread_count_changes_no_bit(count: int) -> None:
    size = 3_000_001
    stream = field.Stream(bytes(32), "threads")
    field.set_threads(1)
    x, y = stream.elements(size), stream.elements(size, start=size)
    x[x == 0] = 1
    small, wide = x[:15].reshape(3, 5), y[: size // 5 * 5].reshape(5, -1)

    def everything() -> list[Any]:
        masked = x.copy()
        stream.add_to(masked, start=11)
        return [
            field.add(x, y), field.mul(x, y), field.axpy(3, x, y), field.dot(x, y), field.inv(x), masked,
            field.matmul(small, wide), stream.elements(size, start=5),
        ]  # fmt: skip

    alone = everything()
    field.set_threads(count)
    for a, b in zip(alone, everything(), strict=True):
        assert np.array_equal(a, b)


def test_calls_from_many_threads_at_once() -> None:
    x, y = field.random(1_200_000), field.random(1_200_000)
    expected = field.mul(x, y)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: field.mul(x, y), range(24)))
    assert all((result == expected).all() for result in results)


def test_spread_covers_waits_and_passes_errors_on() -> None:
    field.set_threads(4)
    done: list[tuple[int, int]] = []
    parallel.spread(lambda a, b: done.append((a, b)), 1003, smallest=10)
    assert sorted(done)[0][0] == 0
    assert sorted(done)[-1][1] == 1003
    assert all(a[1] == b[0] for a, b in itertools.pairwise(sorted(done)))
    assert len(done) == 4

    finished = []

    def part(start: int, _stop: int) -> None:
        if start == 0:
            raise InputError("part", "must not fail", "first")
        time.sleep(0.2)
        finished.append(start)

    with pytest.raises(InputError, match="first"):
        parallel.spread(part, 1003, smallest=10)
    assert len(finished) == 3  # the other parts were waited for

    def last(_start: int, stop: int) -> None:
        if stop == 1003:
            raise InputError("part", "must not fail", "last")

    with pytest.raises(InputError, match="last"):
        parallel.spread(last, 1003, smallest=10)

    # a part that spreads again stays in its own thread: a full pool cannot wait for itself
    inner: list[int] = []
    parallel.spread(
        lambda a, b: parallel.spread(lambda c, d: inner.append(d - c), b - a, smallest=10), 1003, smallest=10
    )
    assert sum(inner) == 1003


def test_a_forked_child_can_compute() -> None:
    """The pool's threads do not survive a fork: the child must not wait for them."""
    script = (
        "import os, warnings, numpy as np\n"
        "warnings.simplefilter('ignore')\n"
        "from quorumark import field\n"
        "field.set_threads(2)\n"
        "x = field.random(1_200_000); y = field.mul(x, x)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(0 if (field.mul(x, x) == y).all() else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_shapes_strides_and_read_only_views() -> None:
    x = field.random(24).reshape(4, 6)
    assert field.add(x, x).shape == (4, 6)
    assert ints(field.add(x[:, ::2], x[:, 1::2])) == [
        (a + b) % P for a, b in zip(ints(x[:, ::2]), ints(x[:, 1::2]), strict=True)
    ]
    frozen = np.frombuffer(x.tobytes(), np.uint64).reshape(4, 6)
    assert (field.mul(frozen, x) == field.mul(x, x)).all()


def test_chunks_cover_everything_once() -> None:
    assert [(s.start, s.stop) for s in field.chunks(10, 4)] == [(0, 4), (4, 8), (8, 10)]
    x, y = field.random(1001), field.random(1001)
    assert sum(field.dot(x[c], y[c]) for c in field.chunks(1001, 64)) % P == field.dot(x, y)


@given(st.lists(st.integers(-(P // 2), P // 2), min_size=1, max_size=20))
def test_signed_round_trip(values: list[int]) -> None:
    encoded = field.from_signed(np.array(values, np.int64))
    assert ints(encoded) == [v % P for v in values]
    assert field.to_signed(encoded).tolist() == values


# --- randomness -------------------------------------------------------------------------------------------


def _hkdf(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256, no salt, one block of output."""
    prk = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(prk, info + b"\x01", hashlib.sha256).digest()


def _stream_by_hand(secret: bytes, purpose: str, context: list[bytes], count: int) -> list[int]:
    info = b"quorumark/v1" + b"".join(len(p).to_bytes(8, "big") + p for p in [purpose.encode(), *context])
    encryptor = Cipher(algorithms.AES(_hkdf(secret, info)), modes.CTR(bytes(16))).encryptor()
    data = encryptor.update(bytes(8 * count))
    words = [int.from_bytes(data[8 * i : 8 * i + 8], "little") & P for i in range(count)]
    return [word % P for word in words]


@pytest.mark.parametrize("start", [0, 1, 2, 7, 32767, 32768, 40001])
@pytest.mark.parametrize("count", [1, 8, 33])
def test_stream_is_aes_ctr_word_for_word_from_anywhere(start: int, count: int) -> None:
    secret = bytes(range(32))
    stream = field.Stream(secret, "test", b"context", b"")
    expected = _stream_by_hand(secret, "test", [b"context", b""], start + count)[start:]
    assert ints(stream.elements(count, start=start)) == expected
    vector = field.random(count)
    for negate, sign in ((False, 1), (True, -1)):
        masked = vector.copy()
        stream.add_to(masked, start=start, negate=negate)
        assert ints(masked) == [(v + sign * e) % P for v, e in zip(ints(vector), expected, strict=True)]
    raw = np.empty(count, np.uint64)
    stream.words(raw, start=start)
    assert [w & P for w in ints(raw)] == expected


@pytest.mark.parametrize("size", [1, 8, 11])
def test_words_of_every_kind_become_elements(size: int) -> None:
    """Words that a stream gives once in 2^61 times: p must count as 0, whatever the top bits are."""
    special = [P, 2**64 - 1, 0, 2**61, P - 1, 2**63 + P, 1]
    words = array([special[i % len(special)] for i in range(size)])
    expected = [(w & P) % P for w in ints(words)]
    out = np.zeros(size, np.uint64)
    kernels.reduce_words(words, out)
    assert ints(out) == expected
    for start in (0, 1, P - 1):
        for negate, sign in ((False, 1), (True, -1)):
            vector = np.full(size, start, np.uint64)
            kernels.add_words(words, vector, negate)
            assert ints(vector) == [(start + sign * e) % P for e in expected]


def test_streams_are_separated_by_purpose_context_and_its_boundaries() -> None:
    secret = os.urandom(32)
    variants = [
        ("a",),
        ("b",),
        ("a", b"x"),
        ("a", b"x", b""),
        ("a", b"", b"x"),
        ("ax",),
        ("a", b"xy"),
        ("a", b"x", b"y"),
    ]
    first = {int(field.Stream(secret, *variant).elements(1)[0]) for variant in variants}  # type: ignore[arg-type]
    assert len(first) == len(variants)
    assert int(field.Stream(os.urandom(32), "a").elements(1)[0]) not in first


def test_random_elements_are_uniform_and_never_repeat() -> None:
    """False alarms: about 1 in 10^8 runs over all bins and bits."""
    x = field.random(400_000)
    assert int(x.max()) < P
    assert _uniformity(x) > 1e-9
    assert not np.array_equal(field.random(100), field.random(100))
    # the same test must notice what is only nearly uniform: one bit in sixty-one that is set 51 % of the time
    biased = x.copy()
    biased[: len(x) // 50] |= np.uint64(1 << 60)
    assert _uniformity(biased) < 1e-9


def _uniformity(x: np.ndarray[Any, np.dtype[np.uint64]]) -> float:
    """The smallest p-value of chi-square tests on the top byte, the low byte and each single bit."""
    tops = np.bincount((x >> np.uint64(53)).astype(int), minlength=256)
    lows = np.bincount((x & np.uint64(255)).astype(int), minlength=256)
    bits = [int(((x >> np.uint64(b)) & np.uint64(1)).sum()) for b in range(61)]
    singles = [stats.chisquare([b, len(x) - b]).pvalue for b in bits]
    return float(min(stats.chisquare(tops).pvalue, stats.chisquare(lows).pvalue, *singles))


def test_a_stream_shows_and_sends_no_key() -> None:
    secret = b"a secret of thirty-two bytes ..."
    stream = field.Stream(secret, "p")
    key = stream._key
    for text in (repr(stream), str(stream)):
        assert key.hex() not in text
        assert repr(key)[2:-1] not in text
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(stream)
    with pytest.raises(InputError) as caught:
        field.Stream(secret[:31], "p")
    assert "thirty" not in str(caught.value)


# --- bad input --------------------------------------------------------------------------------------------

GOOD = array([1, 2, 3])
BAD_CALLS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "dtype": (lambda: field.add(GOOD.astype(np.int64), GOOD), ["x", "uint64", "int64"]),
    "not an array": (lambda: field.mul(GOOD, [1, 2, 3]), ["y", "numpy array", "list"]),
    "value p": (lambda: field.add(GOOD, array([0, P, 1])), ["y", "[0, p)", f"{P} at index 1"]),
    "value above p": (lambda: field.dot(array([2**64 - 1, 0, 0]), GOOD), ["x", "[0, p)", f"{2**64 - 1} at index 0"]),
    "scalar p": (lambda: field.axpy(P, GOOD, GOOD), ["a", "[0, p)", str(P)]),
    "scalar negative": (lambda: field.scale(-1, GOOD), ["a", "[0, p)", "-1"]),
    "scalar float": (lambda: field.scale(1.5, GOOD), ["a", "integer", "float"]),  # type: ignore[arg-type]
    "shapes": (lambda: field.sub(GOOD, GOOD[:2]), ["x and y", "same shape", "(3,) and (2,)"]),
    "empty": (lambda: field.neg(GOOD[:0]), ["x", "empty", "(0,)"]),
    "zero inverse": (lambda: field.inv(array([1, 0])), ["x", "no inverse", "0 at index 1"]),
    "zero scalar inverse": (lambda: field.scalar_inv(0), ["a", "no inverse", "0"]),
    "non-square": (lambda: field.inv_sqrt(array([4, P - 1])), ["x", "squares", "index 1"]),
    "zero square": (lambda: field.inv_sqrt(array([0])), ["x", "squares", "index 0"]),
    "matmul shapes": (lambda: field.matmul(GOOD.reshape(1, 3), GOOD.reshape(1, 3)), ["a and b", "m×k", "(1, 3)"]),
    "out shape": (lambda: field.add(GOOD, GOOD, out=GOOD[:2].copy()), ["out", "shape (3,)", "(2,)"]),
    "out dtype": (lambda: field.add(GOOD, GOOD, out=np.zeros(3)), ["out", "uint64", "float64"]),
    "signed range": (lambda: field.from_signed(np.array([P // 2 + 1])), ["values", "±(p−1)/2", str(P // 2 + 1)]),
    "signed floats": (lambda: field.from_signed(np.array([0.5])), ["values", "integers", "float64"]),
    "threads": (lambda: field.set_threads(0), ["count", "at least 1", "0"]),
    "chunk size": (lambda: field.chunks(5, 0), ["size", "at least 1", "0"]),
    "random count": (lambda: field.random(0), ["count", "at least 1", "0"]),
    "stream start": (lambda: field.Stream(bytes(32), "p").elements(1, start=-1), ["start", "at least 0", "-1"]),
    "stream purpose": (lambda: field.Stream(bytes(32), ""), ["purpose", "names what"]),
    "stream end": (lambda: field.Stream(bytes(32), "p").elements(6, start=2**129 - 2), ["start", "2^64"]),
    "mask values": (
        lambda: field.Stream(bytes(32), "p").add_to(np.full(9, 2**64 - 1, np.uint64)),
        ["vector", "[0, p)", f"{2**64 - 1} at index 0"],
    ),
    "matrix": (lambda: field.add(GOOD, GOOD, out=GOOD.copy().view(np.matrix)), ["out", "uint64 array"]),
    "masked": (lambda: field.neg(np.ma.array(GOOD)), ["x", "numpy array", "MaskedArray"]),
    "matmul a": (lambda: field.matmul(array([P]).reshape(1, 1), GOOD.reshape(1, 3)), ["a", "[0, p)", str(P)]),
    "matmul b": (lambda: field.matmul(array([1]).reshape(1, 1), array([P]).reshape(1, 1)), ["b", "[0, p)", str(P)]),
    "to signed": (lambda: field.to_signed(array([P])), ["x", "[0, p)", str(P)]),
    "no dimension": (lambda: field.add(np.array(5, np.uint64), array([5])), ["x and y", "same shape", "() and (1,)"]),
    "stream context": (lambda: field.Stream(bytes(32), "p", "c"), ["context[0]", "bytes", "str"]),  # type: ignore[arg-type]
    "mask target": (lambda: field.Stream(bytes(32), "p").add_to(np.zeros(3)), ["vector", "uint64", "float64"]),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_refused_by_name_rule_and_value(case: str) -> None:
    call, texts = BAD_CALLS[case]
    with pytest.raises(InputError) as caught:
        call()
    assert isinstance(caught.value, QuorumarkError)
    assert isinstance(caught.value, ValueError)
    for text in texts:
        assert text in str(caught.value)


def test_a_bad_value_is_found_in_every_threads_part() -> None:
    field.set_threads(4)
    x = field.random(1_200_000)
    for where in (0, 400_000, 700_000, len(x) - 1):
        spoiled = x.copy()
        spoiled[where] = P
        with pytest.raises(InputError, match=f"{P} at index {where}"):
            field.check(spoiled)


def test_errors_travel_between_processes() -> None:
    for error in (
        InputError("a", "must b", 3),
        EncodingError("a", "must b", 3, 7),
        MissingDependencyError("package", "this"),
    ):
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_errors_do_not_show_what_may_be_secret() -> None:
    with pytest.raises(InputError) as caught:
        field.from_signed(np.array([-424242, 7, 2**61]))
    assert "424242" not in str(caught.value)
    with pytest.raises(InputError) as caught:
        field.Stream(bytes(32), b"a second secret")  # type: ignore[arg-type]
    assert "second" not in str(caught.value)


def test_nothing_is_written_when_an_operand_is_refused() -> None:
    size = 100_000
    good, bad = field.random(size), field.random(size)
    bad[-1] = P
    kept = good.copy()
    for call in (
        lambda: field.add(good, bad, out=good),
        lambda: field.axpy(5, bad, good, out=good),
        lambda: field.mul(bad, good, out=good),
    ):
        with pytest.raises(InputError):
            call()
        assert (good == kept).all()
    zero = good.copy()
    zero[-1] = 0
    out = kept.copy()
    for function in (field.inv, field.inv_sqrt):
        with pytest.raises(InputError):
            function(zero, out=out)
        assert (out == kept).all()


def test_partial_overlap_is_refused() -> None:
    x = field.random(100)
    with pytest.raises(InputError, match="overlap"):
        field.add(x[:-1], x[1:], out=x[1:])
    with pytest.raises(InputError, match="share memory"):
        field.matmul(field.random(4).reshape(2, 2), x.reshape(2, 50), out=x.reshape(2, 50))
    square = field.random(4).reshape(2, 2)
    with pytest.raises(InputError, match="share memory"):
        field.matmul(square, field.random(4).reshape(2, 2), out=square)


def test_a_read_only_output_is_refused() -> None:
    x = field.random(8)
    out = np.frombuffer(x.tobytes(), np.uint64)
    with pytest.raises(InputError, match="writable"):
        field.add(x, x, out=out)


def test_torch_tensors_on_the_cpu_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match="operands must be numpy arrays of uint64 or CUDA tensors of int64, but got a"):
        field.add(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))


def test_unchecked_calls_give_the_same_on_field_elements() -> None:
    x, y = field.random(1000), field.random(1000)
    assert (field.mul(x, y, checked=False) == field.mul(x, y)).all()
    assert field.dot(x, y, checked=False) == field.dot(x, y)
