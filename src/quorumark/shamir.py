"""Threshold sharing: any t of K shares give the secret back, t−1 of them say nothing about it.

A secret s in the field is hidden in a random polynomial f of degree t−1 with f(0) = s; member k gets
f(x_k), and members sit at the points 1..K (docs/protocol.md, "Sharing"). Everything is exact arithmetic
mod p = 2^61−1, on whole vectors, coordinate by coordinate:

- `share`, `share_chunks`: f(x) = s + Σ r_j·C(x, j) with uniform r_j. The binomial (Newton) basis costs
  additions only, and since the change of basis is invertible mod p, the shares have exactly the distribution of
  Shamir's (1979).
- `lagrange`, `reconstruct`: f(target) = Σ λ_i·f(x_i), for any points and any target.
- `share_compressed`: t−1 shares of every block are the output of a generator, given by 32 bytes.
- `decode`: one shared number from shares of which some are missing or wrong, and who was wrong.
- `check_degree`: whether long share vectors lie on polynomials of degree t−1, by one random combination.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field

import numpy as np

from quorumark import field
from quorumark.errors import DecodingError, InputError, ShareError
from quorumark.field import P, Stream, Vector, kernels, parallel

__all__ = [
    "CompressedShare",
    "Decoded",
    "check_degree",
    "compressed_block",
    "decode",
    "generated_block",
    "is_generated",
    "lagrange",
    "lagrange_matrix",
    "reconstruct",
    "share",
    "share_chunks",
    "share_compressed",
]

_TILE_WORDS = 1 << 16  # random words made at a time: half a megabyte, so that they stay in the second-level cache
DEFAULT_BLOCK = 1 << 16


# --- sharing ----------------------------------------------------------------------------------------------


def share(secret: Vector, threshold: int, members: int, out: Vector | None = None) -> Vector:
    """All K shares of a vector, as a K×d matrix; row k−1 belongs to the member at point k.

    `out`, where given, is a K×d matrix that receives them. For K·d that does not fit into memory, use
    `share_chunks`.
    """
    _check_numbers(threshold, members)
    vector = _secret(secret)
    if out is None:
        out = np.empty((members, vector.size), np.uint64)
    field.check_output(out, (members, vector.size))
    if np.may_share_memory(out, vector):
        raise InputError("out", "must not share memory with the secret")
    _share_into(vector, threshold, out)
    return out


def share_chunks(
    secret: Vector | Iterable[Vector], threshold: int, members: int, chunk: int = 1 << 16
) -> Iterator[tuple[int, Vector]]:
    """The shares chunk by chunk: (start, K×n matrix) pairs, in order. Memory: one chunk, K·chunk·8 bytes.

    `secret` is a vector (in memory or memory-mapped) or any iterable of vectors, which are then the chunks. Each
    matrix is the reader's to keep: it is not written again.
    """
    _check_numbers(threshold, members)
    _positive("chunk", chunk)
    if isinstance(secret, np.ndarray):
        _check_vector("secret", secret)
        parts: Iterable[Vector] = (secret[part] for part in field.chunks(secret.size, chunk))
    else:
        if not isinstance(secret, Iterable):
            raise InputError("secret", "must be a vector or vectors", type(secret).__name__)
        parts = secret
    return _share_parts(parts, threshold, members)


def _share_parts(parts: Iterable[Vector], threshold: int, members: int) -> Iterator[tuple[int, Vector]]:
    start = 0
    for part in parts:
        vector = _secret(part)
        out = np.empty((members, vector.size), np.uint64)
        _share_into(vector, threshold, out)
        yield start, out
        start += vector.size


def _share_into(secret: Vector, threshold: int, out: Vector) -> None:
    """Fills out[K, d], with fresh coefficients from the operating system by way of AES-256-CTR."""
    members = out.shape[0]
    stream = Stream.fresh("sharing coefficients")
    tile = max(8, _TILE_WORDS // (threshold - 1) // 8 * 8)

    def part(begin: int, end: int) -> None:
        words = np.empty((threshold - 1) * min(tile, end - begin), np.uint64)
        for start in range(begin, end, tile):
            stop = min(start + tile, end)
            used = words[: (threshold - 1) * (stop - start)]
            stream.words(used, start=start * (threshold - 1))
            kernels.newton_shares(secret[start:stop], used, threshold, members, out, start)

    additions = threshold * members  # per element, each a quarter of a multiplication
    parallel.spread(part, secret.size, smallest=max(64, 4 * parallel.SMALLEST_WORK // additions))


# --- Lagrange ---------------------------------------------------------------------------------------------


def lagrange(points: Sequence[int], at: int = 0) -> list[int]:
    """Coefficients λ_i with f(at) = Σ λ_i·f(x_i) for every polynomial f of degree below the number of points.

    λ_i = Π_{j≠i} (at − x_j)/(x_i − x_j) mod p (the paper's Eq. 1, for any target).
    """
    return list(_coefficients(tuple(_check_points("points", points)), _check_target("at", at)))


@functools.lru_cache(maxsize=32)
def _coefficients(xs: tuple[int, ...], target: int) -> tuple[int, ...]:
    """All members of a round need the same ones."""
    return tuple(_lagrange(xs, target))


def _lagrange(xs: Sequence[int], target: int) -> list[int]:
    """The same for points that may include 0, where the secret sits."""
    if target in xs:
        return [int(x == target) for x in xs]
    whole = 1
    for x in xs:
        whole = whole * (target - x) % P
    return [whole * pow(below * (target - x), -1, P) % P for x, below in zip(xs, _differences(tuple(xs)), strict=True)]


@functools.lru_cache(maxsize=512)
def _differences(xs: tuple[int, ...]) -> tuple[int, ...]:
    """Π_{j≠i} (x_i − x_j) for each i: the part that is the same for all targets, and for all blocks of a sharing."""
    result = []
    for i, x in enumerate(xs):
        below = 1
        for j, other in enumerate(xs):
            if j != i:
                below = below * (x - other) % P
        result.append(below)
    return tuple(result)


def lagrange_matrix(points: Sequence[int], targets: Sequence[int], *, secret: bool = False) -> Vector:
    """One row of Lagrange coefficients per target: `matmul` with it moves shares from points to targets.

    With `secret`, f(0) is known too: its coefficient comes first in each row.
    """
    xs = _check_points("points", points)
    targets = list(targets)
    if not targets:
        raise InputError("targets", "must not be empty")
    known = [0, *xs] if secret else xs
    return np.array([_lagrange(known, _check_target("targets", target)) for target in targets], dtype=np.uint64)


def reconstruct(shares: Mapping[int, Vector], threshold: int, at: int = 0) -> Vector:
    """f(at), by default the secret, from t or more shares (a mapping from point to vector).

    The first t shares give the result. Any further ones must agree with them, which one random linear
    combination checks (a wrong one passes with probability 1/p): a ShareError names the points otherwise.
    """
    xs, rows = _check_shares(shares, threshold)
    if len(xs) > threshold:
        check_degree(dict(zip(xs, rows, strict=True)), threshold)
    used = rows[:threshold]
    weights = _lagrange(xs[:threshold], _check_target("at", at))
    out = np.empty(used[0].size, np.uint64)
    for part in field.chunks(out.size):
        block = np.stack([row[part] for row in used])
        field.matmul(np.array([weights], np.uint64), block, out=out[None, part], checked=False)
    return out


# --- compressed shares ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CompressedShare:
    """One member's share with its generated blocks left out: `expand` gives the full vector.

    In block b (of `block` coordinates) the t−1 members at points 1 + (b + i) mod K, i = 0..t−2, hold generator
    output; the others hold what the polynomial through the secret and those values says. So every member stores
    (K−t+1)/K of the vector and 32 bytes.
    """

    point: int
    threshold: int
    members: int
    length: int
    block: int
    seed: bytes = dataclass_field(repr=False)
    values: Vector = dataclass_field(repr=False)

    def __post_init__(self) -> None:
        _check_numbers(self.threshold, self.members)
        _positive("length", self.length)
        _positive("block", self.block)
        if type(self.point) is not int or self.point not in range(1, self.members + 1):
            raise InputError("point", f"must be an integer in 1..{self.members}", repr(self.point))
        if not isinstance(self.seed, bytes) or len(self.seed) != field.KEY_BYTES:
            raise InputError("seed", f"must be {field.KEY_BYTES} bytes")
        expected = sum(part.stop - part.start for generated, part in self._blocks() if not generated)
        if not isinstance(self.values, np.ndarray) or self.values.shape != (expected,):
            received = getattr(self.values, "shape", type(self.values).__name__)
            raise InputError("values", f"must be the {expected} elements that this share stores", received)
        if expected:
            field.check(self.values, "values")

    def _blocks(self) -> Iterator[tuple[bool, slice]]:
        """Whether each block is generated, and where it lies."""
        for index, part in enumerate(field.chunks(self.length, self.block)):
            yield self.point in _generated_points(index, self.threshold, self.members), part

    def expand(self) -> Vector:
        """The whole share vector."""
        out = np.empty(self.length, np.uint64)
        stored = 0
        for index, (generated, part) in enumerate(self._blocks()):
            if generated:
                _generated(self.seed, self.point, index, out[part])
            else:
                size = part.stop - part.start
                out[part] = self.values[stored : stored + size]
                stored += size
        return out


def share_compressed(secret: Vector, threshold: int, members: int, block: int = DEFAULT_BLOCK) -> list[CompressedShare]:
    """All K shares, compressed. Distributed like Shamir's for anyone who cannot break AES-256."""
    _check_numbers(threshold, members)
    _positive("block", block)
    vector = _secret(secret)
    seeds = {point: os.urandom(field.KEY_BYTES) for point in range(1, members + 1)}
    stored: dict[int, list[Vector]] = {point: [] for point in seeds}
    for index, part in enumerate(field.chunks(vector.size, block)):
        for point, values in compressed_block(vector[part], index, seeds, threshold).items():
            stored[point].append(values)
    none = np.empty(0, np.uint64)  # a member may store nothing at all: one block, and it is generated
    return [
        CompressedShare(point, threshold, members, vector.size, block, seeds[point], np.concatenate([*parts, none]))
        for point, parts in stored.items()
    ]


def compressed_block(secret: Vector, index: int, seeds: Mapping[int, bytes], threshold: int) -> dict[int, Vector]:
    """Block `index` of a compressed sharing: what the members outside its generated set must store.

    The seeds must be fresh for every sharing: two secrets under the same seeds would differ by what one member sees.
    """
    _check_numbers(threshold, len(seeds))
    secret = _secret(secret)
    if sorted(seeds) != list(range(1, len(seeds) + 1)):
        raise InputError("seeds", f"must be one for each of the points 1..{len(seeds)}", f"{len(seeds)} others")
    members = len(seeds)
    generated = _generated_points(index, threshold, members)
    others = [point for point in range(1, members + 1) if point not in generated]
    known = np.empty((threshold, secret.size), np.uint64)
    known[0] = secret
    for row, point in enumerate(generated, start=1):
        _generated(seeds[point], point, index, known[row])
    # t values fix the polynomial: the secret at 0 and the t−1 generated ones
    weights = lagrange_matrix(generated, others, secret=True)
    values = field.matmul(weights, known, checked=False)
    return dict(zip(others, values, strict=True))


def is_generated(point: int, index: int, threshold: int, members: int) -> bool:
    """Whether a member's values in block `index` of a compressed sharing are generator output."""
    return point in _generated_points(index, threshold, members)


def generated_block(seed: bytes, point: int, index: int, size: int) -> Vector:
    """Those values."""
    out = np.empty(size, np.uint64)
    _generated(seed, point, index, out)
    return out


def _generated_points(index: int, threshold: int, members: int) -> list[int]:
    return [1 + (index + i) % members for i in range(threshold - 1)]


def _generated(seed: bytes, point: int, index: int, out: Vector) -> None:
    context = point.to_bytes(8, "big"), index.to_bytes(8, "big")
    Stream(seed, "compressed share", *context).elements(out.size, out=out)


# --- decoding one shared number ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """A number opened from its shares.

    Attributes:
        value: f(at).
        wrong: the points whose shares were wrong, in ascending order.
        spare: shares beyond the threshold, n − t. Up to ⌊spare/2⌋ wrong ones are corrected and named; with more, see
            `decode`.
    """

    value: int
    wrong: tuple[int, ...]
    spare: int


def decode(shares: Mapping[int, int], threshold: int, at: int = 0, *, correct: bool = True) -> Decoded:
    """Opens one shared number from n ≥ t shares, correcting up to ⌊(n−t)/2⌋ wrong ones and naming them.

    Reed–Solomon decoding by Gao's method: missing points are simply absent. More wrong shares than that are noticed
    (a DecodingError) unless their holders work together: ⌈(n−t)/2⌉ + 1 colluders, who need nobody else's share, can
    set the value at will and make honest members look wrong. `correct=False` accepts only shares that all agree: then
    any n − t wrong ones are noticed, whatever they do, and nobody is named.
    """
    _check_threshold(threshold)
    target = _check_target("at", at)
    if not isinstance(shares, Mapping):
        raise InputError("shares", "must map points to values", type(shares).__name__)
    xs = _check_points("shares", list(shares))
    if len(xs) < threshold:
        raise InputError("shares", f"must be at least t = {threshold}", f"{len(xs)}")
    ys = [int(field.check_scalar(f"shares[{x}]", shares[x])) for x in xs]
    polynomial = _nearest_polynomial(xs, ys, threshold)
    wrong = sorted(x for x, y in zip(xs, ys, strict=True) if _evaluate(polynomial, x) != y)
    if wrong and not correct:
        raise DecodingError(f"the {len(xs)} shares do not all agree, and were not to be corrected")
    return Decoded(_evaluate(polynomial, target), tuple(wrong), len(xs) - threshold)


def _nearest_polynomial(xs: Sequence[int], ys: Sequence[int], threshold: int) -> list[int]:
    """The polynomial of degree below t that all but ⌊(n−t)/2⌋ of the values lie on (Gao 2003).

    With g0 = Π (x − x_i) and g1 the interpolation of all values, run Euclid on (g0, g1) until the remainder's
    degree is below (n+t)/2. Then remainder = u·g0 + v·g1, and f = remainder/v if that division leaves nothing.
    """
    n = len(xs)
    g0, g1 = [1], [0]
    for x, y in zip(xs, ys, strict=True):  # Newton's interpolation: add the multiple of g0 that fits the next value
        step = (y - _evaluate(g1, x)) * pow(_evaluate(g0, x), -1, P) % P
        g1 = _trim([(a + step * b) % P for a, b in zip(g1 + [0] * (len(g0) - len(g1)), g0, strict=True)])
        g0 = [(low - x * high) % P for low, high in zip([0, *g0], [*g0, 0], strict=True)]
    r0, r1, v0, v1 = g0, g1, [0], [1]
    while 2 * (len(r1) - 1) >= n + threshold:
        quotient, remainder = _divide(r0, r1)
        r0, r1 = r1, remainder
        v0, v1 = v1, _subtract(v0, _multiply(quotient, v1))
    result, rest = _divide(r1, v1)
    errors = sum(_evaluate(result, x) != y for x, y in zip(xs, ys, strict=True))
    if any(rest) or len(result) > threshold or 2 * errors > n - threshold:
        correctable = (n - threshold) // 2
        raise DecodingError(
            f"the {n} shares do not lie on one polynomial of degree {threshold - 1}: more than {correctable} of them "
            f"are wrong, and {n} shares with threshold {threshold} cannot tell which; collect more shares"
        )
    return result


def _trim(a: list[int]) -> list[int]:
    """Coefficients, lowest first, without leading zeros; the zero polynomial is [0]."""
    while len(a) > 1 and a[-1] == 0:
        a.pop()
    return a


def _evaluate(a: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(a):
        value = (value * x + coefficient) % P
    return value


def _multiply(a: list[int], b: list[int]) -> list[int]:
    out = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            out[i + j] += x * y
    return _trim([c % P for c in out])


def _subtract(a: list[int], b: list[int]) -> list[int]:
    size = max(len(a), len(b))
    padded = zip(a + [0] * (size - len(a)), b + [0] * (size - len(b)), strict=True)
    return _trim([(x - y) % P for x, y in padded])


def _divide(a: list[int], b: list[int]) -> tuple[list[int], list[int]]:
    """Quotient and remainder of a by b ≠ 0."""
    rest = list(a)
    quotient = [0] * max(1, len(a) - len(b) + 1)
    lead = pow(b[-1], -1, P)
    for shift in range(len(a) - len(b), -1, -1):
        factor = rest[shift + len(b) - 1] * lead % P
        quotient[shift] = factor
        if factor:
            for i, c in enumerate(b):
                rest[shift + i] = (rest[shift + i] - factor * c) % P
    return _trim(quotient), _trim(rest)


# --- checking long shares ---------------------------------------------------------------------------------


def check_degree(shares: Mapping[int, Vector], threshold: int) -> None:
    """Raises ShareError unless the share vectors (point → vector, more than t) lie on polynomials of degree t−1.

    One random combination Σ_j ρ_j·s_i[j] per member, ρ fresh from the operating system: wrong vectors pass with
    probability 1/p, about 4·10^-19. Where the numbers allow it, the error names the wrong points.

    This is for somebody who holds the vectors. The combination of t members opens Σ_j ρ_j·secret[j]: parties who
    must not learn that send masked combinations instead.
    """
    xs, rows = _check_shares(shares, threshold)
    if len(xs) == threshold:
        raise InputError("shares", f"must be more than t = {threshold}, or any vectors fit", f"{len(xs)}")
    stream = Stream.fresh("degree check")
    totals = dict.fromkeys(xs, 0)
    for part in field.chunks(rows[0].size):
        rho = stream.elements(part.stop - part.start, start=part.start)
        for x, row in zip(xs, rows, strict=True):
            totals[x] = (totals[x] + field.dot(rho, row[part], checked=False)) % P
    try:
        wrong = decode(totals, threshold).wrong
    except DecodingError:
        raise ShareError(
            f"the {len(xs)} share vectors do not lie on polynomials of degree {threshold - 1}, and there are too few "
            f"of them to tell which are wrong"
        ) from None
    if wrong:
        raise ShareError(f"the shares at the points {', '.join(map(str, wrong))} do not fit the others")


# --- checks -----------------------------------------------------------------------------------------------


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        received = repr(value) if isinstance(value, int) else type(value).__name__
        raise InputError(name, "must be an integer, at least 1", received)


def _check_threshold(threshold: object) -> None:
    if not isinstance(threshold, int) or isinstance(threshold, bool) or threshold < 2:
        received = threshold if isinstance(threshold, int) else type(threshold).__name__  # never a secret by mistake
        rule = "must be an integer, at least 2 (with 1, everybody holds the secret)"
        raise InputError("threshold", rule, received)


def _check_numbers(threshold: int, members: int) -> None:
    _check_threshold(threshold)
    _positive("members", members)
    if threshold > members:
        raise InputError("threshold", f"must not exceed members = {members}", threshold)


def _check_vector(name: str, x: object) -> None:
    if not isinstance(x, np.ndarray) or x.dtype != np.uint64 or x.ndim != 1 or x.size == 0:
        received = f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise InputError(name, "must be a non-empty 1-D uint64 vector", received)


def _secret(x: Vector) -> Vector:
    _check_vector("secret", x)
    field.check(x, "secret")
    return np.ascontiguousarray(x)


def _check_target(name: str, at: object) -> int:
    return int(field.check_scalar(name, at))


def _check_points(name: str, points: Sequence[int]) -> list[int]:
    if not isinstance(points, Iterable):
        raise InputError(name, "must be a sequence of points", type(points).__name__)
    xs = [int(field.check_scalar(name, x)) for x in points]
    if not xs:
        raise InputError(name, "must name at least one point")
    if 0 in xs:
        raise InputError(name, "must not include 0, the point of the secret", "0")
    if len(set(xs)) != len(xs):
        twice = next(x for i, x in enumerate(xs) if x in xs[:i])
        raise InputError(name, "must be distinct", f"{twice} twice")
    return xs


def _check_shares(shares: Mapping[int, Vector], threshold: int) -> tuple[list[int], list[Vector]]:
    _check_threshold(threshold)
    xs = _check_points("shares", list(shares))
    if len(xs) < threshold:
        raise InputError("shares", f"must be at least t = {threshold}", f"{len(xs)}")
    rows = list(shares.values())
    for x, row in zip(xs, rows, strict=True):
        _check_vector(f"shares[{x}]", row)
        field.check(row, f"shares[{x}]")
        if row.size != rows[0].size:
            raise InputError("shares", "must have the same length", f"{rows[0].size} and {row.size} (point {x})")
    return xs, rows
