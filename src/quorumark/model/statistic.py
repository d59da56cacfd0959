"""From a suspect to the public vector x whose inner product with the key decides (docs/verification.md).

Everything here is public, deterministic and independent of the key, so that z = ⟨x, τ⟩/‖x‖ has an exact null. It is
done in integers only: the same bytes on every machine, for every number of threads and version of the libraries.

    balanced-anchor/v1      the default: rows and columns balanced, the anchor taken out row by row, cut, 8 bits
    global-cosine/v1        the paper's text: the weights as they are; z/√d is the cosine with the whole key
    mean-tensor-cosine/v1   the paper's code: each tensor divided by its norm; the mean of the tensors' cosines

What it costs to choose one after seeing z: a consortium names its statistic in its terms, before there is a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.canonical import digest
from quorumark.errors import InputError
from quorumark.field import P, Vector, parallel
from quorumark.model import kernels
from quorumark.model.layout import ModelLayout, TensorSpec

__all__ = [
    "SIZES",
    "STATISTICS",
    "Canonical",
    "canonical_form",
    "count_sizes",
    "inner_product",
    "norms",
    "vector_digest",
]

_CUT = 8 * 256  # octaves that one weight may pull at its row's or column's scale
_PASSES = 3  # over rows, then columns
_MIDDLE = 25  # the mean of |x| that 8 bits are scaled to: for a normal shape the cut at 127 is four deviations
KEPT = 1 << 26  # a tensor of up to so many weights is held in memory while it is worked on: 3 arrays of 256 MiB
BLOCK = 1 << 20  # weights that are read and worked on at a time: they stay in a cache in between
_WIDEST = 1 << 29  # sums over a row then fit 63 bits
SIZES = 129
"""An entry of 8 bits has a size from 0 to 128."""
_MOST_PRODUCTS = 1 << 22  # of the inner product, that are added up before they are reduced

Blocks = Callable[[], Iterator[tuple[int, NDArray[Any]]]]
Scales = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Of a tensor's rows and columns (`scales_of`)."""


class Model(Protocol):
    """A model whose tensors are read block by block, some rows at a time, as float32 or float64."""

    def blocks(self, name: str, limit: int = BLOCK) -> Iterator[tuple[int, NDArray[Any]]]: ...


def vector_digest(x: NDArray[Any]) -> str:
    """Of the public vector x: its type and its little-endian bytes."""
    if not isinstance(x, np.ndarray) or x.ndim != 1 or x.dtype.kind != "i":
        raise InputError("x", "must be a vector of integers", getattr(x, "dtype", type(x).__name__))
    little = np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<"), copy=False)
    return digest("canonical form", x.dtype.name.encode(), little.tobytes()).hex()


@dataclass(frozen=True, eq=False)
class Canonical:
    """x, one integer for each coordinate of the key, and what a query says about it. `omitted` is the Σx² of what
    was left out."""

    statistic: str
    x: NDArray[Any]
    digest: str
    norm1: int
    norm2: int
    norm4: int
    omitted: int = 0

    @classmethod
    def of(cls, statistic: str, x: NDArray[Any], omitted: int = 0) -> Canonical:
        return cls(statistic, x, vector_digest(x), *norms(x), omitted)


def norms(x: NDArray[Any]) -> tuple[int, int, int]:
    """Σ|x|, Σx² and Σx⁴ of integers below 2^31 in size, exactly."""
    if x.dtype == np.int8:
        counts = count_sizes(x).tolist()
        return tuple(sum(n * size**power for size, n in enumerate(counts)) for power in (1, 2, 4))
    norm1, norm2, norm4 = 0, 0, 0
    for start in range(0, x.size, 1 << 20):
        sizes = np.abs(x[start : start + (1 << 20)].astype(np.int64))
        if sizes.max() >= 1 << 31:
            raise InputError("x", "must hold numbers below 2^31 in size")
        norm1 += int(sizes.sum())
        low, high = sizes & 0xFFFF, sizes >> 16  # parts of 16 and 15 bits
        a, b, c = low * low, low * high, high * high  # x² = a + 2^17·b + 2^32·c
        norm2 += int(a.sum()) + (int(b.sum()) << 17) + (int(c.sum()) << 32)
        norm4 += _square_sum(a + ((b & 0x7FFF) << 17), (b >> 15) + c)  # x² in units of 1 and of 2^32
    return norm1, norm2, norm4


def count_sizes(x: NDArray[np.int8]) -> NDArray[np.int64]:
    """How many entries of 8 bits have each size, 0 to 128: norms and remainders follow from that alone."""

    def part_of(low: int, high: int) -> NDArray[np.int64]:
        counts = np.zeros(SIZES, np.int64)
        kernels.count_sizes(x[low:high], counts)
        return counts

    total = np.zeros(SIZES, np.int64)
    for counts in parallel.spread(part_of, x.size):
        total += counts  # type: ignore[arg-type]
    return total


def _square_sum(low: NDArray[np.int64], high: NDArray[np.int64]) -> int:
    """Σ (low + 2^32·high)² for low < 2^33 and high < 2^31, a million at a time, exactly."""
    parts = [low & 0x7FFFF, low >> 19, high & 0x7FFF, high >> 15]  # in units of 2^0, 2^19, 2^32, 2^47
    weights = [0, 19, 32, 47]
    total = 0
    for i, one in enumerate(parts):
        for j in range(i, 4):
            total += int((one * parts[j]).sum()) << (weights[i] + weights[j] + (i != j))
    return total


@dataclass(frozen=True, eq=False)
class _Tensor:
    """One carrier of the suspect: `name` is the suspect's name for it, `chosen` which of its weights carry (all: None).

    `exponent` is the one in the middle of all carriers, where a statistic needs that. `memory`, for each of the two
    models, holds a tensor while it is worked on; it is the same for all tensors, because fresh memory costs as much as
    reading into it.
    """

    spec: TensorSpec
    suspect: Model
    name: str
    anchor: Model
    chosen: NDArray[np.int64] | None
    exponent: int
    memory: NDArray[np.uint32]
    known: dict[str, Scales]

    @property
    def width(self) -> int:
        """Weights of a row."""
        return self.spec.size // self.spec.shape[0]


def canonical_form(
    statistic: str,
    layout: ModelLayout,
    suspect: Model,
    anchor: Model,
    names: Mapping[str, str] | None = None,
    *,
    omit: NDArray[np.bool_] | None = None,
    progress: Callable[[str], None] | None = None,
    known: dict[str, Scales] | None = None,
) -> Canonical:
    """x of a suspect. `names` maps carriers to the suspect's names for them; a carrier that is not there gets zeros.

    `omit` marks coordinates of the key to leave out (those that audits opened); `progress` is told what is being worked
    on, in words. `known` keeps the anchor's scales by tensor, for a caller with several suspects of one anchor.

    Nothing that enters x may be chosen by somebody who has seen a marked model, except by rules that the terms fix:
    such a model shows a part of the key's signs, and any choice (of a statistic, an anchor, an alignment, a part of the
    weights) can be made to agree with them. So the statistic, the layout, the anchor and the groups are in the terms,
    and `omit` comes from audits that are proved, or is paid for (`omissions`).
    """
    if statistic not in STATISTICS:
        raise InputError("statistic", f"must be one of {', '.join(STATISTICS)}", repr(statistic))
    carriers = [(spec, place) for spec, place in layout.spans("carrier") if spec.size]
    names = {spec.name: spec.name for spec, _ in carriers} if names is None else names
    dtype, one = STATISTICS[statistic]
    carrying = layout.carrying()
    x = np.zeros(layout.coordinates, dtype)
    exponent = _common_exponent(suspect, carriers, names) if statistic == "global-cosine/v1" else 0
    memory = np.empty((2, max((spec.size for spec, _ in carriers if spec.size <= KEPT), default=0)), np.uint32)
    for number, (spec, place) in enumerate(carriers, 1):
        if spec.name not in names:
            continue
        if progress is not None:
            progress(f"reading the suspect, tensor {number} of {len(carriers)}: {spec.name}")
        # which of the tensor's weights carry, and where they lie in x
        if isinstance(carrying, slice):
            target, chosen = x[place], None
        else:
            begin, end = np.searchsorted(carrying, (place.start, place.stop))
            target, chosen = x[begin:end], carrying[begin:end] - place.start
        if target.size:
            tensor = _Tensor(
                spec, suspect, names[spec.name], anchor, chosen, exponent, memory, {} if known is None else known
            )
            one(tensor, target)
    omitted = 0
    if omit is not None:
        omitted = norms(x[omit])[1] if omit.any() else 0
        x[omit] = 0
    return Canonical.of(statistic, x, omitted)


# --- reading ----------------------------------------------------------------------------------------------


def bits_of(values: NDArray[Any]) -> NDArray[np.uint32]:
    """The bits of float32 numbers; float64 ones are rounded to float32, to the nearest."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)


def _reader(model: Model, name: str, spec: TensorSpec, memory: NDArray[np.uint32]) -> Blocks:
    """Blocks of a tensor's bits, as often as wanted: from memory if it fits there."""
    if spec.size > memory.size:
        return lambda: ((begin, bits_of(values)) for begin, values in model.blocks(name, BLOCK))
    whole, width = memory[: spec.size], spec.size // spec.shape[0]
    filled = 0
    for begin, values in model.blocks(name, BLOCK):
        whole[begin * width : begin * width + values.size] = bits_of(values)
        filled += values.size
    if filled != spec.size:
        raise InputError(f"tensor {name!r}", f"must have {spec.size} weights", filled)
    step = max(1, BLOCK // width)
    return lambda: ((begin, whole[begin * width : (begin + step) * width]) for begin in range(0, spec.shape[0], step))


# --- balanced-anchor/v1 -----------------------------------------------------------------------------------


def _balanced_anchor(tensor: _Tensor, out: NDArray[Any]) -> None:
    """One tensor: rows × columns × taps (output channels, input channels, places of the kernel)."""
    spec, width = tensor.spec, tensor.width
    if width >= _WIDEST:
        raise InputError(f"tensor {spec.name!r}", f"must have rows of fewer than {_WIDEST} weights", width)
    models = ((tensor.suspect, tensor.name, tensor.memory[0]), (tensor.anchor, spec.name, tensor.memory[1]))
    ours, theirs = parallel.each(lambda of: _reader(of[0], of[1], spec, of[2]), models)
    if spec.name not in tensor.known:
        tensor.known[spec.name] = scales_of(theirs, spec.shape)
    scales = scales_of(ours, spec.shape), tensor.known[spec.name]

    space = np.empty(0, np.int32)

    def left() -> Iterator[tuple[slice, NDArray[np.int32], int]]:
        """Block by block what is left of the suspect without the anchor, where it goes in x, and Σ|…| of the block."""
        nonlocal space
        for (begin, one), (other, two) in zip(ours(), theirs(), strict=True):
            if (begin, one.size) != (other, two.size):
                raise InputError("suspect and anchor", f"must come in the same blocks of {spec.name!r}", (begin, other))
            if (
                tensor.chosen is None or space.size < one.size
            ):  # what is chosen of a block is copied: then space is free
                space = np.empty(one.size, np.int32)
            values = space[: one.size]

            def part(low: int, high: int, begin: int = begin, one: Any = one, two: Any = two, out: Any = values) -> int:
                span, here = slice(low * width, high * width), slice(begin + low, begin + high)
                (by_row, by_column), (their_rows, their_columns) = scales
                mine, other = (one[span], by_row[here], by_column), (two[span], their_rows[here], their_columns)
                return int(kernels.leave(*mine, *other, out[span], kernels.POWERS))

            total = sum(_spread_rows(part, one.size // width, width))
            yield *_carrying(begin * width, values, tensor.chosen), total

    kept = list(left()) if out.size <= KEPT else None
    total = sum(found for _, _, found in (kept if kept is not None else left()))
    # x = R·25·n/Σ|R|; a tensor that is the anchor to within 2^-10 keeps its small numbers instead of blown-up noise
    # (values are below 2^22 and n below 2^31: 25·n·R stays below 2^58)
    numerator, denominator = _MIDDLE * spec.size, max(total, 4 * spec.size)
    for place, values, _ in kept if kept is not None else left():
        _emit(values, numerator, denominator, out[place])


def _carrying(
    start: int, values: NDArray[np.int32], chosen: NDArray[np.int64] | None
) -> tuple[slice, NDArray[np.int32]]:
    """Of a block, from weight `start` of its tensor on: which places in x it has, and its values for them."""
    if chosen is None:
        return slice(start, start + values.size), values
    begin, end = (int(n) for n in np.searchsorted(chosen, (start, start + values.size)))
    return slice(begin, end), values[chosen[begin:end] - start]


def _emit(values: NDArray[np.int32], numerator: int, denominator: int, out: NDArray[np.int8]) -> None:
    """Rounds a block to 8 bits."""

    def part(low: int, high: int) -> None:
        kernels.to_int8(values[low:high], numerator, denominator, out[low:high])

    if values.size:
        parallel.spread(part, values.size)


def scales_of(blocks: Blocks, shape: Sequence[int]) -> Scales:
    """How large each row and each column is, as mean logarithms in 1/256 octave: log|w| ≈ row + column.

    Rows and columns in turns, so that a scaled channel is seen as such whatever the others are. A weight's own
    deviation counts for ±8 octaves at most, except for rows in the first turn, so that in the end one huge weight
    moves its row by about 8/n octaves. A row's scale follows from that row alone, once the columns are known, so that
    one walk does both halves of a turn.

    The columns' scales come once for every weight of a row. Blocks have the bits of weights, or their logarithms in
    int16.
    """
    rows, columns, taps = shape[0], shape[1], prod(shape[2:])
    width = columns * taps
    by_row, by_column = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    spread_out = np.zeros(width, np.int32)
    own = 1 << 30
    for _ in range(_PASSES):
        sums = np.zeros((2, width), np.int64)
        for begin, bits in blocks():

            def part(
                low: int, high: int, begin: int = begin, bits: Any = bits, own: int = own, now: Any = spread_out
            ) -> NDArray[np.int64]:
                mine = np.zeros((2, width), np.int64)
                of_rows = by_row[begin + low : begin + high]
                weights = bits[low * width : high * width]
                if weights.dtype == np.int16:
                    kernels.turn_again(weights, of_rows, now, own, _CUT, mine)
                else:
                    kernels.turn(weights, of_rows, now, own, _CUT, mine, kernels.EVERY_LOG)
                return mine

            for mine in _spread_rows(part, bits.size // width, width):
                sums += mine
        by_column += _mean(sums.reshape(2, columns, taps).sum(2))
        spread_out, own = np.repeat(by_column, taps).astype(np.int32), _CUT
    return by_row, spread_out


def _mean(sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """sum/count, rounded down; 0 where nothing was counted."""
    return np.where(sums[1] > 0, sums[0] // np.maximum(sums[1], 1), 0)


def _spread_rows(part: Callable[[int, int], Any], rows: int, width: int) -> list[Any]:
    return list(parallel.spread(part, rows, smallest=max(1, parallel.SMALLEST_PART // width), step=1))


# --- the paper's ------------------------------------------------------------------------------------------


def median_exponent(histogram: NDArray[np.int64]) -> int:
    """The exponent in the middle of those that count; 0 if none does."""
    total = int(histogram.sum())
    return int(np.searchsorted(np.cumsum(histogram), (total + 1) // 2)) - 127 if total else 0


def _common_exponent(suspect: Model, carriers: list[tuple[TensorSpec, slice]], names: Mapping[str, str]) -> int:
    histogram = np.zeros(256, np.int64)
    for spec, _ in carriers:
        if spec.name in names:
            for _, values in suspect.blocks(names[spec.name], BLOCK):
                kernels.exponents(bits_of(values), histogram)
    return median_exponent(histogram)


def _fixed(tensor: _Tensor, exponent: int, out: NDArray[np.int32]) -> None:
    """The weights with a middle of about 2^10, cut at 2^24."""
    for begin, values in tensor.suspect.blocks(tensor.name, BLOCK):
        bits, start = bits_of(values), begin * tensor.width
        fixed = np.empty(bits.size, np.int32)
        kernels.fixed_point(bits, exponent - 10, fixed)
        if tensor.chosen is None:
            out[start : start + fixed.size] = fixed
        else:
            low, high = np.searchsorted(tensor.chosen, (start, start + fixed.size))
            out[low:high] = fixed[tensor.chosen[low:high] - start]


def _global_cosine(tensor: _Tensor, out: NDArray[Any]) -> None:
    """Every weight in the same units."""
    _fixed(tensor, tensor.exponent, out)


def _mean_tensor_cosine(tensor: _Tensor, out: NDArray[Any]) -> None:
    """2^32·w/(‖w‖·√n) for the n weights of the tensor that carry: equal weight for every tensor's cosine."""
    histogram = np.zeros(256, np.int64)
    for _, values in tensor.suspect.blocks(tensor.name, BLOCK):
        kernels.exponents(bits_of(values), histogram)
    _fixed(tensor, median_exponent(histogram), out)
    squared = sum(int((out[part].astype(np.int64) ** 2).sum()) for part in field.chunks(out.size, 1 << 14))
    norm = isqrt(squared * out.size)
    if norm:
        wide = out.astype(np.int64) << 32
        out[:] = np.clip((2 * wide + norm) // (2 * norm), -(2**31) + 1, 2**31 - 1)


STATISTICS: dict[str, tuple[type[Any], Callable[[_Tensor, NDArray[Any]], None]]] = {
    "balanced-anchor/v1": (np.int8, _balanced_anchor),
    "global-cosine/v1": (np.int32, _global_cosine),
    "mean-tensor-cosine/v1": (np.int32, _mean_tensor_cosine),
}
"""By name and version: the type of x and the function that makes one tensor's part of it."""


# --- the inner product ------------------------------------------------------------------------------------


def inner_product(x: NDArray[Any], share: Vector, start: int = 0) -> int:
    """⟨x, share⟩ mod p for a part of x: the coordinates from `start` on, as many as the share's part has."""
    mine = x[start : start + share.size]
    if mine.shape != share.shape:
        raise InputError("share", f"must have as many elements as x, {mine.size}", share.size)
    if not mine.size:
        return 0
    if mine.dtype != np.int8:
        return (
            sum(
                field.dot(field.from_signed(mine[part].astype(np.int64)), share[part])
                for part in field.chunks(mine.size)
            )
            % P
        )

    def part_of(low: int, high: int) -> int:
        sums, total = np.zeros(2, np.int64), 0
        for begin in range(low, high, _MOST_PRODUCTS):
            part = slice(begin, min(begin + _MOST_PRODUCTS, high))
            kernels.dot_int8(mine[part], share[part], sums)
            total += int(sums[0]) + (int(sums[1]) << 32)
        return total

    return sum(int(value) for value in parallel.spread(part_of, mine.size)) % P  # type: ignore[call-overload]
