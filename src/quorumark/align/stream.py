"""A residual stream that was turned is turned back to the anchor's (docs/alignment.md, "The residual stream").

Between RMSNorms whose gains were folded into what reads them, the function stays if everything that writes to the
stream or reads it is multiplied by one orthogonal matrix Q. Every word of an embedding, every neuron that reads or
writes is a vector v of the stream, v → Q·v. So Q is what brings the anchor's vectors a closest to the suspect's s:

    Q = argmin Σ‖s − Q·a‖² = (C·Cᵀ)^(−1/2)·C,   C = Σ s·aᵀ over all vectors, each of length 1

The gains of both models' norms are in the vectors of what reads them, whether they were folded or not; what was turned
back is divided by the anchor's gains again.

As in `quorumark.align.mixing`, products of matrices are of whole numbers whose partial sums float64 holds exactly, and
all else is done number by number: the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.align import mixing
from quorumark.align.mixing import ONE, Rows
from quorumark.errors import InconclusiveError
from quorumark.model.statistic import BLOCK, Model

UNIT = float(1 << 15)  # the length of a vector: products of 2^23 of them are below 2^53
_VECTORS = 1 << 13  # that are worked on at a time
_STEPS = 32  # of Newton and Schulz; each brings a small singular value up by 1.5, but rounding is not to come up, too
_NEAR = 8.0  # in units of 2^-25
_CLOSER = 15, 16  # a stream was turned where it comes so much closer than by fitting noise
_SEEN = 22  # and cosines of vectors rise by 2^-22: what rounding does to a suspect that is the anchor is no turn
_ALIKE = 16  # as those of channels must by 2^-16


def read(model: Model, name: str) -> NDArray[Any]:
    """A tensor whole."""
    parts = [values for _, values in model.blocks(name, BLOCK)]
    if not parts:
        raise InconclusiveError(f"tensor {name!r} of the suspect is empty")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


# --- the matrix -------------------------------------------------------------------------------------------


def units(vectors: Rows) -> Rows:
    """Each row as whole numbers of a length of about 2^15, so that a huge one counts no more than others; 0 stays."""
    exact, _ = mixing.whole(vectors)
    length = np.sqrt((exact * exact).sum(axis=-1, keepdims=True))
    found: Rows = np.rint(exact * (UNIT / np.maximum(length, 1.0)))
    return found


class Agreement:
    """C = Σ s·aᵀ of pairs of vectors, exactly; how many they are, and Σ (‖s‖² + ‖a‖²)/2."""

    def __init__(self, theirs: int, ours: int) -> None:
        self.matrix = np.zeros((theirs, ours), np.int64)
        self.count = 0
        self.doubled = 0  # Σ ‖s‖² + ‖a‖²

    def add(self, suspect: Rows, anchor: Rows) -> None:
        """Vectors as rows; pairs of which one is missing (0) do not count."""
        for begin in range(0, len(anchor), _VECTORS):
            s, a = (units(x[begin : begin + _VECTORS]) for x in (suspect, anchor))
            there = s.any(axis=1) & a.any(axis=1)
            s, a = s[there], a[there]
            self.matrix += (s.T @ a).astype(np.int64)
            self.count += len(a)
            self.doubled += int((s * s).sum()) + int((a * a).sum())

    def distance(self, matrix: Rows) -> int:
        """Σ‖s − Q·a‖²/2 for a matrix in 2^-25, which also is the unit of the result."""
        return (self.doubled * int(ONE) >> 1) - _inner(matrix.astype(np.int64), self.matrix)

    def is_turned(self, turned: Rows, moved: Rows) -> bool:
        """Whether the matrix that was fitted comes closer than the best permutation, by more than fitting noise gives.

        An orthogonal d × d matrix has d·(d − 1)/2 free parameters, d·F numbers are compared: if there is only noise in
        between, the squared distance falls to 1 − d/2F. A stream was turned where it falls below 15/16 of that.
        """
        before, after = self.distance(moved), self.distance(turned)
        above, below = _CLOSER
        closer = below * 2 * self.count * after < above * (2 * self.count - turned.shape[1]) * before
        return closer and (before - after) << _SEEN > self.count * int(UNIT * UNIT * ONE)


class Likeness:
    """How like the anchor's each channel is after Mᵀ·s, for some matrices M: its cosine over all vectors.

    Loud channels outweigh quiet ones in a distance of vectors, but the mark is as strong in either: whoever turned only
    the quiet ones would not be seen. A cosine counts every channel alike.
    """

    def __init__(self, *matrices: Rows) -> None:
        self._matrices = matrices
        self._sums = np.zeros((len(matrices), 3, matrices[0].shape[1]))  # Σ t·a, Σ t² and Σ a² in 2^-8
        self.count = 0

    def add(self, suspect: Rows, anchor: Rows) -> None:
        for begin in range(0, len(anchor), _VECTORS):
            s, a = (units(x[begin : begin + _VECTORS]) for x in (suspect, anchor))
            there = s.any(axis=1) & a.any(axis=1)
            s, a = s[there], 16 * a[there]
            self.count += len(a)
            for number, matrix in enumerate(self._matrices):
                t = np.rint((s @ matrix) * (16 / ONE))  # below 2^20: 2^13 squares are below 2^53
                for k, products in enumerate((t * a, t * t, a * a)):
                    self._sums[number, k] += np.rint(products.sum(axis=0) / 256.0)

    def distances(self) -> list[int]:
        """Σ (1 − cosine) over channels for each matrix, in 2^-25."""
        along, theirs, ours = self._sums.swapaxes(0, 1)
        cosines = along / np.maximum(np.sqrt(theirs) * np.sqrt(ours), 1.0)
        return [int(each) for each in np.rint((1.0 - cosines) * ONE).sum(axis=1)]

    def is_turned(self) -> bool:
        """As of an agreement: whether the first matrix is closer than the second by more than fitting noise gives."""
        (after, before), (above, below) = self.distances(), _CLOSER
        width = self._sums.shape[2]
        closer = below * 2 * self.count * after < above * (2 * self.count - width) * before
        return closer and (before - after) << _ALIKE > width * int(ONE)


def _inner(one: NDArray[np.int64], two: NDArray[np.int64]) -> int:
    """Σ one·two for numbers below 2^26 and 2^54, in parts of 13 and 27 bits: the products of a row fit 63 bits."""
    ones, twos = (one & 0x1FFF, one >> 13), (two & 0x7FFFFFF, two >> 27)
    return sum(
        sum((x * y).sum(axis=1).tolist()) << (13 * i + 27 * j) for i, x in enumerate(ones) for j, y in enumerate(twos)
    )


def polar(matrix: NDArray[np.int64]) -> Rows:
    """(C·Cᵀ)^(−1/2)·C in units of 2^-25: the orthogonal matrix that is closest to C.

    Newton and Schulz: X ← (3·I − X·Xᵀ)/2·X, from C scaled so that no singular value is above 1. Directions of which C
    says nothing stay near 0. A suspect with fewer channels has orthonormal rows only, one with more only columns.
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


# --- the suspect, turned back -----------------------------------------------------------------------------


def vectors(values: NDArray[Any], axis: int, gain: NDArray[Any] | None) -> Rows:
    """What a tensor has of the stream on an axis, a vector in each row, times the gains before it."""
    rows = np.moveaxis(mixing.finite(values), axis, -1).reshape(-1, values.shape[axis])
    return rows if gain is None else rows * gain


def gain_of(suspect: Model, name: str | None, names: Mapping[str, str] | None, size: int) -> NDArray[np.float64] | None:
    """A suspect's gains of a norm; None without a norm, or where the suspect has not that many."""
    if name is None or (names is not None and name not in names):
        return None
    found = mixing.finite(read(suspect, name if names is None else names[name]))
    return found if found.shape == (size,) else None


@dataclass(frozen=True, eq=False)
class Turn:
    """How a suspect's stream was turned.

    Attributes:
        matrix: Q in units of 2^-25, suspect's × anchor's channels; the suspect has Q·a where the anchor has a.
        axes: the tensors of the stream: their axis, and the gains of the norm that they read, if any.
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

    @property
    def mixes(self) -> bool:
        """Whether channels were mixed; otherwise they were at most permuted, and gains had other signs."""
        return bool(np.count_nonzero(self.matrix) > min(self.matrix.shape))

    def to_bytes(self) -> bytes:
        return self.matrix.astype("<i4").tobytes()

    def model(self, suspect: Model, names: Mapping[str, str] | None = None) -> Unturned:
        """The suspect with its stream turned back, under the layout's names."""
        return Unturned(suspect, self, names)

    def back(self, values: NDArray[Any], axis: int, theirs: NDArray[Any] | None, ours: NDArray[Any] | None) -> Rows:
        """A tensor Qᵀ·v, with the suspect's gains taken into it and the anchor's out of it."""
        shape = (*values.shape[:axis], *values.shape[axis + 1 :], self.matrix.shape[1])
        rows = vectors(values, axis, theirs)
        found = np.empty((len(rows), self.matrix.shape[1]))
        for begin in range(0, len(rows), _VECTORS):
            exact, power = mixing.whole(rows[begin : begin + _VECTORS])
            found[begin : begin + _VECTORS] = (exact @ self.matrix) / ONE * power
        if ours is not None:
            found /= np.where(ours == 0, 1.0, ours)
        return np.moveaxis(found.reshape(shape), -1, axis)


class Unturned:
    """A suspect whose stream is read as it was before it was turned."""

    def __init__(self, suspect: Model, turn: Turn, names: Mapping[str, str] | None) -> None:
        self._suspect, self._turn, self._names = suspect, turn, names

    def tensor(self, name: str) -> NDArray[Any]:
        if name in self._turn.gains:
            return self._turn.gains[name].astype(np.float32)
        values = read(self._suspect, name if self._names is None else self._names[name])
        axis, gain = self._turn.axes.get(name, (values.ndim, None))
        size = len(self._turn.matrix)
        if axis >= values.ndim or values.shape[axis] != size:
            return values  # not of the stream, or of another size, which matching says
        theirs = gain_of(self._suspect, gain, self._names, size)
        ours = None if gain is None else self._turn.gains[gain]
        with np.errstate(over="ignore", under="ignore"):  # what is beyond float32 counts as 0 later
            return np.ascontiguousarray(self._turn.back(values, axis, theirs, ours), np.float32)

    def blocks(self, name: str, limit: int = BLOCK) -> Iterator[tuple[int, NDArray[Any]]]:
        """Some rows of a tensor at a time."""
        return in_blocks(self.tensor(name), limit)


class Cut:
    """A suspect with as many words as the anchor: those that come after them are left out, missing ones are 0.

    `words` says for tensors, by the layout's names, on which axis words are, and how many; `widest` how many numbers
    a word may have: missing words of a suspect with few but endless ones would need any amount of memory.
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
                raise InconclusiveError(f"tensor {name!r} of the suspect has far more channels than the anchor's")
            there = (slice(None),) * axis + (slice(0, min(count, values.shape[axis])),)
            whole = np.zeros(shape, values.dtype)
            whole[there] = values[there]
            values = whole
        yield from in_blocks(values, limit)


def in_blocks(values: NDArray[Any], limit: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Some rows at a time."""
    if values.ndim == 0:
        values = values.reshape(1)
    step = max(1, limit // max(1, prod(values.shape[1:])))
    for begin in range(0, values.shape[0], step):
        yield begin, values[begin : begin + step]


def permutation(order: NDArray[np.int64], columns: int) -> Rows:
    """In units of 2^-25, the matrix with a 1 in row i and column order[i], if that is not −1."""
    found = np.zeros((order.size, columns))
    found[order >= 0, order[order >= 0]] = ONE
    return found
