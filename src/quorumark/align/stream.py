"""A residual stream that was rotated is rotated back to the anchor's (docs/alignment.md, "The residual stream").

Between RMSNorms whose gains were folded into what reads them, the function stays the same if everything that writes to
the stream or reads it is multiplied by one orthogonal matrix Q. Every word of an embedding and every neuron that reads
or writes is a vector v of the stream, v → Q·v. So Q is what brings the anchor's vectors a closest to the suspect's s:

    Q = argmin Σ‖s − Q·a‖² = (C·Cᵀ)^(−1/2)·C,   C = Σ s·aᵀ over all vectors, each of length 1

The gains of both models' norms are multiplied into the vectors of what reads them, whether they were folded or not.
After the stream is rotated back, it is divided by the anchor's gains again.

As in `quorumark.align.mixing`, matrices are multiplied as integers whose partial sums float64 holds exactly, and
everything else is done number by number: the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.align.arrays import finite, in_blocks, read
from quorumark.align.assignment import assign
from quorumark.align.mixing import ONE, Rows, integer_rows
from quorumark.errors import InconclusiveError
from quorumark.model.statistic import BLOCK, Model

UNIT = float(1 << 15)  # the length of a vector: products of 2^23 of them are below 2^53
_VECTORS = 1 << 13  # processed at a time
_STEPS = 32  # of Newton and Schulz; each raises a small singular value by 1.5, but rounding errors must stay small
_NEAR = 8.0  # in units of 2^-25
_CLOSER = 15, 16  # a stream counts as rotated where it comes so much closer than by fitting noise
_SEEN = 22  # and cosines of vectors rise by 2^-22: rounding of a suspect that is the anchor is not a rotation
_CHANNELS_SEEN = 16  # as those of channels must by 2^-16


# --- the matrix -------------------------------------------------------------------------------------------


def units(vectors: Rows) -> Rows:
    """Each row as integers of a length of about 2^15, so that a huge one counts no more than others; 0 stays."""
    exact, _ = integer_rows(vectors)
    length = np.sqrt((exact * exact).sum(axis=-1, keepdims=True))
    found: Rows = np.rint(exact * (UNIT / np.maximum(length, 1.0)))
    return found


class Agreement:
    """C = Σ s·aᵀ of pairs of vectors, exactly; how many there are, and Σ ‖s‖² + ‖a‖²."""

    def __init__(self, theirs: int, ours: int) -> None:
        self.matrix = np.zeros((theirs, ours), np.int64)
        self.count = 0
        self.doubled = 0  # Σ ‖s‖² + ‖a‖²

    def add(self, suspect: Rows, anchor: Rows) -> None:
        """Vectors as rows; pairs of which one is 0 do not count."""
        for begin in range(0, len(anchor), _VECTORS):
            s, a = (units(x[begin : begin + _VECTORS]) for x in (suspect, anchor))
            there = s.any(axis=1) & a.any(axis=1)
            s, a = s[there], a[there]
            self.matrix += (s.T @ a).astype(np.int64)
            self.count += len(a)
            self.doubled += int(np.vdot(s, s)) + int(np.vdot(a, a))

    def distance(self, matrix: Rows) -> int:
        """Σ‖s − Q·a‖²/2 for a matrix in units of 2^-25, which is also the unit of the result."""
        return (self.doubled * int(ONE) >> 1) - _inner(matrix.astype(np.int64), self.matrix)

    def is_rotated(self, fitted: Rows, permutation: Rows) -> bool:
        """Whether the fitted matrix comes closer than the best permutation, by more than fitting noise explains.

        An orthogonal d × d matrix has d·(d − 1)/2 free parameters, and d·F numbers are compared (F vectors). If the
        models differ by noise only, the squared distance falls to 1 − d/2F. A stream counts as rotated where it falls
        below 15/16 of that.
        """
        before, after = self.distance(permutation), self.distance(fitted)
        above, below = _CLOSER
        closer = below * 2 * self.count * after < above * (2 * self.count - fitted.shape[1]) * before
        return closer and (before - after) << _SEEN > self.count * int(UNIT * UNIT * ONE)


class ChannelCosines:
    """The cosine of each channel with the anchor's after Mᵀ·s, over all vectors, for some matrices M.

    Loud channels outweigh quiet ones in a distance of vectors, but the mark is as strong in both: an attacker who
    rotated only the quiet ones would not be seen. Cosines give every channel the same weight.
    """

    def __init__(self, *matrices: Rows) -> None:
        self._matrices = matrices
        self._columns = [_column_of(matrix) for matrix in matrices]
        self._sums = np.zeros((len(matrices), 3, matrices[0].shape[1]))  # Σ t·a, Σ t² and Σ a² in 2^-8
        self.count = 0

    def add(self, suspect: Rows, anchor: Rows) -> None:
        for begin in range(0, len(anchor), _VECTORS):
            s, a = (units(x[begin : begin + _VECTORS]) for x in (suspect, anchor))
            there = s.any(axis=1) & a.any(axis=1)
            s, a = s[there], 16 * a[there]
            self.count += len(a)
            squared = _column_sums(a, a)
            for number, (matrix, column) in enumerate(zip(self._matrices, self._columns, strict=True)):
                if column is None:
                    t = np.rint((s @ matrix) * (16 / ONE))  # below 2^20: 2^13 squares are below 2^53
                else:
                    t = s[:, column] * (matrix[column, np.arange(column.size)] * (16 / ONE))
                for k, products in enumerate((_column_sums(t, a), _column_sums(t, t), squared)):
                    self._sums[number, k] += np.rint(products / 256.0)

    def distances(self) -> list[int]:
        """Σ (1 − cosine) over channels for each matrix, in 2^-25."""
        along, theirs, ours = self._sums.swapaxes(0, 1)
        cosines = along / np.maximum(np.sqrt(theirs) * np.sqrt(ours), 1.0)
        return [int(each) for each in np.rint((1.0 - cosines) * ONE).sum(axis=1)]

    def is_rotated(self) -> bool:
        """As for `Agreement`: whether the first matrix is closer than the second by more than fitting noise."""
        (after, before), (above, below) = self.distances(), _CLOSER
        width = self._sums.shape[2]
        closer = below * 2 * self.count * after < above * (2 * self.count - width) * before
        return closer and (before - after) << _CHANNELS_SEEN > width * int(ONE)


def _column_sums(one: Rows, two: Rows) -> Rows:
    """Σ one·two over rows, exact where float64 holds all sums."""
    found: Rows = np.einsum("ij,ij->j", one, two)
    return found


def _column_of(matrix: Rows) -> NDArray[np.int64] | None:
    """For a signed permutation, which channel each column takes: no product is needed then. None for other matrices."""
    if ((matrix != 0).sum(axis=0) > 1).any() or not np.isin(np.abs(matrix), (0.0, ONE)).all():
        return None
    found: NDArray[np.int64] = np.abs(matrix).argmax(axis=0)
    return found


def _inner(one: NDArray[np.int64], two: NDArray[np.int64]) -> int:
    """Σ one·two for numbers below 2^26 and 2^54, in parts of 13 and 27 bits: the products of a row fit 63 bits."""
    ones, twos = (one & 0x1FFF, one >> 13), (two & 0x7FFFFFF, two >> 27)
    return sum(
        sum((x * y).sum(axis=1).tolist()) << (13 * i + 27 * j) for i, x in enumerate(ones) for j, y in enumerate(twos)
    )


def polar(matrix: NDArray[np.int64]) -> Rows:
    """(C·Cᵀ)^(−1/2)·C in units of 2^-25: the orthogonal matrix that is closest to C.

    Newton and Schulz: X ← (3·I − X·Xᵀ)/2·X, from C scaled so that no singular value is above 1. Directions about
    which C says nothing stay near 0. With fewer rows than columns only the rows are orthonormal, with more only the
    columns.
    """
    rows, columns = matrix.shape
    if rows > columns:
        return polar(matrix.T).T
    numbers = matrix.astype(np.float64)
    width = (columns - 1).bit_length() + 1 >> 1  # rows of entries below 2^(25 − width) have a length of at most 2^25
    numbers = np.ldexp(numbers, 25 - width - int(np.frexp(np.abs(numbers).max(initial=0.0))[1]))
    coarse = np.rint(numbers)
    bound = np.ceil(np.abs(coarse @ coarse.T) / 1024.0).astype(np.int64).sum(axis=1).max(initial=1) * 1024.0  # ≥ all σ²
    x: Rows = np.rint(numbers * (ONE / np.sqrt(bound)))
    unit = ONE * np.eye(rows)
    for _ in range(_STEPS):
        square = np.rint((x @ x.T) / ONE)
        if np.abs(square - unit).max(initial=0.0) <= _NEAR:
            break
        x = np.rint((np.rint((3 * unit - square) / 2) @ x) / ONE)
    return x


# --- the suspect, rotated back ----------------------------------------------------------------------------


def vectors(values: NDArray[Any], axis: int, gain: NDArray[Any] | None) -> Rows:
    """The vectors of the stream that a tensor has along an axis, one in each row, times the gains before it."""
    rows = np.moveaxis(finite(values), axis, -1).reshape(-1, values.shape[axis])
    return rows if gain is None else rows * gain


def gain_of(suspect: Model, name: str | None, names: Mapping[str, str] | None, size: int) -> NDArray[np.float64] | None:
    """A suspect's gains of a norm; None without a norm, or if the suspect has another number of them."""
    if name is None or (names is not None and name not in names):
        return None
    found = finite(read(suspect, name if names is None else names[name]))
    return found if found.shape == (size,) else None


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a suspect's stream was rotated.

    Attributes:
        matrix: Q in units of 2^-25, the suspect's × the anchor's channels; the suspect has Q·a where the anchor has a.
        axes: for each tensor of the stream its axis, and the gains of the norm that it reads, or None.
        gains: the anchor's gains.
    """

    matrix: Rows
    axes: Mapping[str, tuple[int, str | None]]
    gains: Mapping[str, NDArray[np.float64]]

    @property
    def surplus(self) -> int:
        """How many more channels the suspect's stream has than the anchor's."""
        theirs, ours = self.matrix.shape
        return max(0, int(theirs) - int(ours))

    def to_bytes(self) -> bytes:
        return self.matrix.astype("<i4").tobytes()

    def model(self, suspect: Model, names: Mapping[str, str] | None = None) -> Unrotated:
        """The suspect with its stream rotated back, under the layout's names."""
        return Unrotated(suspect, self, names)

    def back(self, values: NDArray[Any], axis: int, theirs: NDArray[Any] | None, ours: NDArray[Any] | None) -> Rows:
        """Qᵀ·v for a tensor's vectors, with the suspect's gains multiplied in and the anchor's divided out."""
        shape = (*values.shape[:axis], *values.shape[axis + 1 :], self.matrix.shape[1])
        rows = vectors(values, axis, theirs)
        found = np.empty((len(rows), self.matrix.shape[1]))
        for begin in range(0, len(rows), _VECTORS):
            exact, power = integer_rows(rows[begin : begin + _VECTORS])
            found[begin : begin + _VECTORS] = (exact @ self.matrix) / ONE * power
        if ours is not None:
            found /= np.where(ours == 0, 1.0, ours)
        return np.moveaxis(found.reshape(shape), -1, axis)


class Unrotated:
    """A suspect whose stream is read as it was before it was rotated."""

    def __init__(self, suspect: Model, rotation: Rotation, names: Mapping[str, str] | None) -> None:
        self._suspect, self._rotation, self._names = suspect, rotation, names

    def tensor(self, name: str) -> NDArray[Any]:
        if name in self._rotation.gains:
            return self._rotation.gains[name].astype(np.float32)
        values = read(self._suspect, name if self._names is None else self._names[name])
        axis, gain = self._rotation.axes.get(name, (values.ndim, None))
        size = len(self._rotation.matrix)
        if axis >= values.ndim or values.shape[axis] != size:
            return values  # not of the stream, or of another size, which matching reports
        theirs = gain_of(self._suspect, gain, self._names, size)
        ours = None if gain is None else self._rotation.gains[gain]
        with np.errstate(over="ignore", under="ignore"):  # what is beyond float32 counts as 0 later
            return np.ascontiguousarray(self._rotation.back(values, axis, theirs, ours), np.float32)

    def blocks(self, name: str, limit: int = BLOCK) -> Iterator[tuple[int, NDArray[Any]]]:
        """Some rows of a tensor at a time."""
        return in_blocks(self.tensor(name), limit)


class Trimmed:
    """A suspect with as many words as the anchor: words after those are left out, missing ones are 0.

    `words` maps tensors, by the layout's names, to the axis of words and how many there are. `widest` is how many
    numbers a word may have: filling in missing words of a suspect with huge ones could need any amount of memory.
    """

    def __init__(
        self, suspect: Model, words: Mapping[str, tuple[int, int]], names: Mapping[str, str] | None, widest: int
    ) -> None:
        self._suspect, self._widest = suspect, widest
        self._words = {name if names is None else names[name]: at for name, at in words.items()}

    def blocks(self, name: str, limit: int = BLOCK) -> Iterator[tuple[int, NDArray[Any]]]:
        """Some rows of a tensor at a time."""
        if name not in self._words:
            yield from self._suspect.blocks(name, limit)
            return
        values, (axis, count) = read(self._suspect, name), self._words[name]
        if axis < values.ndim and values.shape[axis] != count:
            shape = (*values.shape[:axis], count, *values.shape[axis + 1 :])
            if prod(shape) > count * self._widest:
                raise InconclusiveError(
                    f"tensor {name!r} of the suspect has far more channels than the anchor's: it is not aligned; try "
                    "without --align"
                )
            there = (slice(None),) * axis + (slice(0, min(count, values.shape[axis])),)
            whole = np.zeros(shape, values.dtype)
            whole[there] = values[there]
            values = whole
        yield from in_blocks(values, limit)


def signed_permutation(matrix: Rows) -> Rows:
    """The permutation of channels, each with a sign, that is closest to a matrix, in units of 2^-25."""
    order = assign(np.abs(matrix).astype(np.int64))
    found = np.zeros(matrix.shape)
    rows = np.flatnonzero(order >= 0)
    found[rows, order[rows]] = np.where(matrix[rows, order[rows]] < 0, -ONE, ONE)
    return found
