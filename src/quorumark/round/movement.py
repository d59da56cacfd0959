"""How far a model moved, exactly: squares by rows, columns and taps, and the norms that members upload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import codec, field
from quorumark.errors import EncodingError, InputError
from quorumark.field import Vector, kernels, parallel
from quorumark.field.norms import PARTS
from quorumark.field.norms import update_squares as kernel_squares
from quorumark.model.layout import ModelLayout
from quorumark.packing import Span

__all__ = [
    "Axes",
    "Carrier",
    "Squares",
    "Sums",
    "axis_sums",
    "carriers_of",
    "checked_model",
    "distance",
    "distances",
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
    "update_squares",
    "upload_norms",
]

_STILL = 36  # what moved by less than 2^-18 of its size (squared: 2^-36) did not move
_ALIKE = 64  # members moved alike where ‖Σ a_k·D_k‖² is all but a 64th of (Σ a_k·‖D_k‖)²
_LARGEST = 1 << 31  # elements of a tensor whose squares the kernels add up exactly
Axes = tuple[tuple[int, ...], ...]  # for one tensor: a number per row, per column and, if it has them, per tap
Sums = list[list[tuple[int, int, int]]]  # the same with three sums each
Squares = list[list[NDArray[np.uint64]]]
"""Sums of squares of each carrier's rows, columns and taps, as parts of integers."""

_FLOATS_TELL = 2.0**-47  # floats of roots are off by less than that, of their size


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


def least(tensor: Axes) -> tuple[int, int]:
    """Σ and Σ of squares, over all weights of a tensor, of the least of the weight's axes' numbers.

    Σ min = Σ over the values v_1 < v_2 < … of (v_i − v_{i−1}) · (how many weights have all of their numbers ≥ v_i).
    """
    ladders = [sorted(values, reverse=True) for values in tensor]
    counts = [len(values) for values in ladders]
    total = squares = last = 0
    for value in sorted({v for values in ladders for v in values if v > 0}):
        for i, values in enumerate(ladders):
            while counts[i] and values[counts[i] - 1] < value:
                counts[i] -= 1
        total += (value - last) * prod(counts)
        squares += (value * value - last * last) * prod(counts)
        last = value
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


def upload_norms(
    layout: ModelLayout,
    before: Vector,
    after: NDArray[Any],
    weight: Fraction,
    spans: Sequence[Span],
    squares: Squares | None = None,
) -> Vector:
    """The same, or that of the weighted update as it is rounded to the units of `spans`, whichever is smaller.

    Where members move alike and round alike, N would exceed ‖D‖ by what rounding took off, and the row would count as
    learnt: the rounded norms do not. Where they round apart the other ones do not. `after` may be the floats; `squares`
    are the `update_squares` where they are known.
    """
    before, after = checked_model("before", before, layout), _result(after, layout)
    shifts = {place.start: shift for place, shift in spans if place.stop > place.start}
    known = update_squares(layout, before, after) if squares is None else squares
    norms = [np.zeros(0, np.uint64)]
    for carrier, axes in zip(carriers_of(layout), known, strict=True):
        if not carrier.has_norms:
            continue
        own = np.concatenate(axes, axis=1)
        _check_norms(own, carrier.place.start)
        shift = shifts.get(carrier.place.start, -1)  # none where spans are not given: then nothing is rounded
        if shift < 0:
            norms.append(_roots([(own, weight)]))
            continue
        units = _update_squares(carrier, after, before, float(weight), 2.0**-shift)
        norms.append(_roots([(own, weight), (np.concatenate(units, axis=1), Fraction(1 << shift))]))
    return np.concatenate(norms)


def update_squares(layout: ModelLayout, before: Vector, after: NDArray[Any]) -> Squares:
    """‖D‖² of each carrier's rows, columns and taps, for the update D from E of a model to another one, floats or E of
    them."""
    return [_update_squares(carrier, after, before) for carrier in carriers_of(layout)]


def distances(layout: ModelLayout, squares: Squares) -> dict[str, int]:
    """‖D‖² of each carrier that is not empty, by name."""
    named = [spec.name for spec, _ in layout.spans("carrier") if spec.size]
    return {name: sum(_whole(axes[0])) for name, axes in zip(named, squares, strict=True)}


def _update_squares(
    carrier: Carrier, after: NDArray[Any], before: Vector, weight: float = 1.0, scale: float = 0.0
) -> list[NDArray[np.uint64]]:
    """Of an update, or of the weighted update in units of 1/scale."""
    return _summed(carrier, after, before, PARTS, kernel_squares, weight, scale)


def _check_norms(squares: NDArray[np.uint64], place: int) -> None:
    """Whether all norms fit into fixed point."""
    most, limit = squares[:, np.argmax(_floats(squares))], int(codec.LIMIT) << codec.FRACTION_BITS
    largest = isqrt(_whole(most[:, None])[0])
    if largest >= limit:
        rule = f"must have norms below {codec.LIMIT:g} in each row, column and tap to fit into fixed point"
        raise EncodingError("this member's update", rule, f"{largest / 2**codec.FRACTION_BITS:g}", place)


def _floats(parts: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Sums from their parts, to a few in 2^53."""
    scales = np.array([2.0 ** (32 * k) for k in range(len(parts))])
    total: NDArray[np.float64] = scales @ parts.astype(np.float64)
    return total


def _roots(sums: Sequence[tuple[NDArray[np.uint64], Fraction]]) -> Vector:
    """⌊factor·√sum⌋ of each number, of several lists of sums the least. Floats tell all but what is next to an integer:
    that is computed exactly."""
    about = np.min([np.sqrt(_floats(parts)) * float(factor) for parts, factor in sums], axis=0)
    near = np.flatnonzero(np.abs(about - np.rint(about)) <= about * _FLOATS_TELL)
    found: Vector = about.astype(np.uint64)
    exact = [
        [isqrt(factor.numerator**2 * square // factor.denominator**2) for square in _whole(parts[:, near])]
        for parts, factor in sums
    ]
    found[near] = np.array(list(map(min, *exact)) if len(exact) > 1 else exact[0], np.uint64)
    return found


def _result(after: NDArray[Any], layout: ModelLayout) -> NDArray[Any]:
    if isinstance(after, np.ndarray) and after.dtype.kind == "f" and after.shape == (layout.size,):
        return after
    return checked_model("after", after, layout)


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
