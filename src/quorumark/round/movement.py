"""How far a model moved, exactly: squares by rows, columns and taps, and the norms that members upload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.errors import EncodingError, InputError
from quorumark.field import Vector, kernels, parallel
from quorumark.field.norms import PARTS, update_squares
from quorumark.model.layout import ModelLayout
from quorumark.packing import Span

__all__ = [
    "Axes",
    "Carrier",
    "Sums",
    "axis_sums",
    "carriers_of",
    "checked_model",
    "distance",
    "ideal_norms",
    "learnt_axes",
    "least",
    "least_by_weight",
    "moved_axes",
    "norm_count",
    "norm_of",
    "norm_places",
    "residual_rms",
    "signed_norm",
    "sum_squares",
    "update_norms",
    "upload_norms",
]

_STILL = 36  # what moved by less than 2^-18 of its size (squared: 2^-36) did not move
_ALIKE = 64  # members moved alike where ‖Σ a_k·D_k‖² is all but a 64th of (Σ a_k·‖D_k‖)²
_LARGEST = 1 << 31  # elements of a tensor whose squares the kernels add up exactly
Axes = tuple[tuple[int, ...], ...]  # for one tensor: a number per row, per column and, if it has them, per tap
Sums = list[list[tuple[int, int, int]]]  # the same with three sums each


@dataclass(frozen=True)
class Carrier:
    """A carrier as rows × columns × taps: output channels, input channels, and the places of the kernel flattened."""

    place: slice
    rows: int
    columns: int
    taps: int

    @property
    def axes(self) -> tuple[int, ...]:
        """How many numbers each axis has; a single tap is no axis."""
        return (self.rows, self.columns, self.taps)[: 3 if self.taps > 1 else 2]

    @property
    def size(self) -> int:
        return self.rows * self.columns * self.taps

    @property
    def has_norms(self) -> bool:
        """Not if a row, column or tap is a single weight: it carries no mark, and nobody's single weights are shown."""
        return self.size > max(self.axes)


def carriers_of(layout: ModelLayout) -> list[Carrier]:
    found = []
    for spec, place in layout.spans("carrier"):
        if spec.size >= _LARGEST:
            raise InputError(f"tensor {spec.name!r}", f"must have fewer than {_LARGEST} elements", spec.size)
        if spec.size:
            found.append(Carrier(place, spec.shape[0], spec.shape[1], prod(spec.shape[2:])))
    return found


def _whole(parts: Any) -> list[int]:
    """Sums from their parts: parts[4, n] → n Python ints."""
    low, second, third, high = (part.tolist() for part in parts)
    return [a + (b << 32) + (c << 64) + (d << 96) for a, b, c, d in zip(low, second, third, high, strict=True)]


def sum_squares(x: Vector) -> int:
    """Σ v² of the signed numbers that x stands for, exactly."""

    def part(begin: int, end: int) -> int:
        sums = np.zeros(32, np.uint64)
        kernels.squares(x[begin:end], sums)
        return sum(_whole(sums.reshape(4, 8)))

    return sum(int(s) for s in parallel.spread(part, x.size))  # type: ignore[call-overload]


def distance(x: Vector, y: Vector) -> int:
    """Σ (v − w)², exactly, chunk by chunk."""
    if not x.size:
        return 0
    return sum(sum_squares(field.sub(x[part], y[part], checked=False)) for part in field.chunks(x.size))


def axis_sums(carrier: Carrier, now: Vector, before: Vector) -> Sums:
    """‖θ+D‖², ‖θ‖² and ‖D‖² of each row, column and tap, for an update D of θ."""
    return [
        list(zip(_whole(parts[0:4]), _whole(parts[4:8]), _whole(parts[8:12]), strict=True))
        for parts in _axis_parts(carrier, now, before)
    ]


def _axis_parts(carrier: Carrier, now: Vector, before: Vector) -> list[NDArray[np.uint64]]:
    """The same as parts of integers, four for each of the three (`_whole`)."""
    return _summed(carrier, now, before, 12, kernels.moments)


def _summed(
    carrier: Carrier, now: Vector, before: Vector, words: int, kernel: Callable[..., None], *more: Any
) -> list[NDArray[np.uint64]]:
    """What a kernel adds up by rows and columns, by rows, columns and taps; so many words each."""
    width = carrier.columns * carrier.taps
    stride = width + -width % 8
    a, b = now[carrier.place], before[carrier.place]
    by_row = np.zeros((carrier.rows, words), np.uint64)

    def part(begin: int, end: int) -> NDArray[np.uint64]:
        by_column = np.zeros(words * stride, np.uint64)
        rows = slice(begin * width, end * width)
        kernel(a[rows], b[rows], width, *more, by_row[begin:end].reshape(-1), by_column)
        return by_column.reshape(words, stride)[:, :width]

    smallest = max(1, parallel.SMALLEST_PART // width)
    # wrapping is impossible: all parts below 2^33, fewer than 2^31 of them
    columns = sum(parallel.spread(part, carrier.rows, smallest=smallest, step=1))  # type: ignore[arg-type]
    cube = np.asarray(columns).reshape(words, carrier.columns, carrier.taps)
    sums = (np.ascontiguousarray(by_row.T), cube.sum(axis=2, dtype=np.uint64), cube.sum(axis=1, dtype=np.uint64))
    return [parts for parts, _ in zip(sums, carrier.axes, strict=False)]


def moved_axes(carrier: Carrier, sums: Sums, quiet: list[list[int]]) -> Axes:
    """How far each row, column and tap moved: the rms of its update without the part along its own weights.

    `quiet` are squares of moves that do not count, by row, column and tap (`MarkState._quiet`).
    """
    counted = zip(sums, quiet, carrier.axes, strict=True)
    return tuple(
        tuple(residual_rms(*three, carrier.size // count, none) for three, none in zip(axis, least, strict=True))
        for axis, least, count in counted
    )


def residual_rms(now: int, before: int, update: int, count: int, quiet: int) -> int:
    """⌊√(‖D − (⟨D,θ⟩/‖θ‖²)·θ‖²/count)⌋ from ‖θ+D‖², ‖θ‖², ‖D‖²; 0 if it is below 2^-18 of ‖θ‖.

    Weight decay moves dead weights along themselves: what it did is taken out. The floor is what the rounding of
    float32 in thousands of steps leaves of such a move. What is left is 0 as well if its square is at most `quiet`.
    """
    if not before:
        return isqrt(update // count) if update > quiet else 0
    along = now - before - update  # 2·⟨D, θ⟩
    left = 4 * update * before - along * along  # 4·‖θ‖² times the square of what is left; never below 0
    if left << _STILL <= 4 * before * before or left <= 4 * before * quiet:
        return 0
    return isqrt(left // (4 * before * count))


@lru_cache(maxsize=64)
def least(tensor: Axes) -> tuple[int, int]:
    """Σ and Σ of squares, over all weights of a tensor, of the least of the weight's axes' numbers.

    Σ min = Σ over the values v_1 ≤ v_2 ≤ … of (v_i − v_{i−1}) · (how many weights have all of their numbers ≥ v_i).
    """
    counts = [len(values) for values in tensor]
    total = squares = last = 0
    left = prod(counts)
    for value, axis in sorted((value, axis) for axis, values in enumerate(tensor) for value in values):
        total += (value - last) * left
        squares += (value * value - last * last) * left
        last = value
        left = left // counts[axis] * (counts[axis] - 1)
        counts[axis] -= 1
        if not left:
            break
    return total, squares


def least_by_weight(layout: ModelLayout, axes: Sequence[Axes]) -> Vector:
    """For each of the d carrying coordinates the least of its axes' numbers."""
    carrying = layout.carrying()
    out = np.zeros(layout.coordinates, np.uint64)
    for carrier, tensor in zip(carriers_of(layout), axes, strict=True):
        rows, *others = (np.array(values, np.uint64) for values in tensor)
        across = others[0] if len(others) == 1 else np.minimum.outer(*others).reshape(-1)
        if isinstance(carrying, slice):
            target = out[carrier.place].reshape(carrier.rows, -1)
            np.minimum(rows[:, None], across[None, :], out=target)
        else:
            part = slice(*np.searchsorted(carrying, (carrier.place.start, carrier.place.stop)))
            row, column = np.divmod(carrying[part] - carrier.place.start, across.size)
            out[part] = np.minimum(rows[row], across[column])
    return out


def signed_norm(x: NDArray[np.int64]) -> int:
    """⌊√Σ x²⌋ of signed numbers below 2^60 in size."""
    return isqrt(sum_squares(field.from_signed(x))) if x.size else 0


def norm_of(axes: Sequence[Axes]) -> int:
    return isqrt(sum(least(tensor)[1] for tensor in axes))


def checked_model(name: str, model: Vector, layout: ModelLayout) -> Vector:
    """E of a model of this layout, contiguous."""
    if not isinstance(model, np.ndarray) or model.shape != (layout.size,):
        raise InputError(
            name, f"must be a vector of length {layout.size}", getattr(model, "shape", type(model).__name__)
        )
    field.check(model, name)
    return np.ascontiguousarray(model)


def norm_count(layout: ModelLayout) -> int:
    """How many norms a member uploads: one for each row, column and tap of the carriers that can carry."""
    return sum(sum(carrier.axes) for carrier in carriers_of(layout) if carrier.has_norms)


def norm_places(layout: ModelLayout) -> Iterator[tuple[str, slice]]:
    """The carriers that have norms, by name, and where those are among all of them."""
    start = 0
    named = [spec.name for spec, _ in layout.spans("carrier") if spec.size]
    for name, carrier in zip(named, carriers_of(layout), strict=True):
        if carrier.has_norms:
            yield name, slice(start, start + sum(carrier.axes))
            start += sum(carrier.axes)


def update_norms(layout: ModelLayout, before: Vector, after: Vector, weight: Fraction) -> Vector:
    """⌊a_k·‖D_k‖⌋ in 2^-40 for each row, column and tap: what a member adds to its upload about its own update D_k.

    `before` and `after` are E of the global model and of the member's own result. Rounded down, so that what is too
    small to tell counts as not learnt.
    """
    return upload_norms(layout, before, after, weight, ())


def upload_norms(layout: ModelLayout, before: Vector, after: Vector, weight: Fraction, spans: Sequence[Span]) -> Vector:
    """The same, or that of the weighted update as it is rounded to the units of `spans`, whichever is smaller.

    Where members move alike and round alike, N would exceed ‖D‖ by what rounding took off, and the row would count as
    learnt: the rounded norms do not. Where they round apart the other ones do not.
    """
    before, after = checked_model("before", before, layout), checked_model("after", after, layout)
    shifts = {place.start: shift for place, shift in spans if place.stop > place.start}
    norms: list[Vector] = []
    for carrier in carriers_of(layout):
        if not carrier.has_norms:
            continue
        shift = shifts.get(carrier.place.start, -1)  # none where spans are not given: then nothing is rounded
        found = np.concatenate(_summed(carrier, after, before, PARTS, update_squares, float(weight), shift), axis=1)
        most = int(_sizes(found[:4]).argmax())
        largest = isqrt(*_whole(found[:4, most : most + 1])) / 2**codec.FRACTION_BITS
        if largest >= codec.LIMIT:
            rule = f"must have norms below {codec.LIMIT:g} in each row, column and tap to fit into fixed point"
            raise EncodingError("this member's update", rule, f"{largest:g}", carrier.place.start)
        own = _roots(found[:4], weight)
        norms.append(np.minimum(own, _roots(found[4:])) if shift >= 0 else own)
    return np.concatenate(norms) if norms else np.empty(0, np.uint64)


def _sizes(parts: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Integers in their parts (`_whole`), as floats."""
    scales = 2.0 ** (32 * np.arange(len(parts)))
    sizes: NDArray[np.float64] = (parts.astype(np.float64) * scales[:, None]).sum(axis=0)
    return sizes


def _roots(parts: NDArray[np.uint64], times: Fraction = Fraction(1)) -> Vector:
    """⌊times·√n⌋ for integers n in their parts (`_whole`), exactly.

    r = ⌊a·√n/b⌋ is off by at most 1 as float64 if it is below 2^48. What it is off by says a²·n − r²·b², which is then
    small enough to be known from its last 64 bits. Larger ones are computed one by one.
    """
    a, b = times.numerator, times.denominator
    roots = np.floor(float(a) * np.sqrt(_sizes(parts)) / b)
    fits = (roots < 2.0**48) & ((4 * roots + 8) * float(b) ** 2 < 2.0**62)
    r: Vector = np.where(fits, roots, 0).astype(np.uint64)
    low, bb = parts[0] + (parts[1] << np.uint64(32)), np.uint64(b * b % (1 << 64))
    left = (np.uint64(a * a % (1 << 64)) * low - r * r * bb).view(np.int64)
    step = ((2 * r + np.uint64(1)) * bb).view(np.int64)
    r = r + (left >= step) - (left < 0)
    large = np.flatnonzero(~fits)
    r[large] = np.array([isqrt(a * a * n // (b * b)) for n in _whole(parts[:, large])], np.uint64)
    return r


def ideal_norms(
    layout: ModelLayout, before: Vector, results: Mapping[int, Vector], shares: Mapping[int, Fraction]
) -> Vector:
    """What all members' norms add up to, for those who may see E of all results; `shares` are the `weights`."""
    total = np.zeros(norm_count(layout), np.uint64)
    for x, after in results.items():
        total += update_norms(layout, before, after, shares[x])  # far below p
    return total


def learnt_axes(carrier: Carrier, sums: Sums, norms: Iterator[int], noise: list[list[int]]) -> Axes:
    """1 for each row, column and tap where members moved apart, 0 where they moved alike.

    ‖Σ a_k·D_k‖ ≤ Σ a_k·‖D_k‖ = N, and they are equal only if all D_k point the same way, however far each went. What
    nobody learns from data goes the same way at all members, whatever moves it. ‖D‖ of the public update stands for the
    left side: it has the mark in it as well, which is small beside it, and the dither, whose expected square (`noise`)
    is taken off.
    """
    if not carrier.has_norms:
        return tuple((0,) * count for count in carrier.axes)
    return tuple(
        tuple(
            int((_ALIKE - 1) * next(norms) ** 2 > _ALIKE * (square - extra))
            for (_, _, square), extra in zip(axis, extras, strict=True)
        )
        for axis, extras in zip(sums, noise, strict=True)
    )
