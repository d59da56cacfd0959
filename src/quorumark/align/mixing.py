"""Channels that can be mixed, not only permuted, are restored to the anchor's (docs/alignment.md, "Mixings").

The values of a head and what reads them compute the same function under v → A·v, o → o·A⁻¹ for any invertible A. What
such a map leaves of a block of h rows is the space that they span. So a block is replaced by rows of that space that
are like the anchor's:

    S → A·Vᵀ·R·U,  U and V the orthonormal rows that span the suspect's S and the anchor's A: U = (S·Sᵀ)^(−1/2)·S

R = V·Uᵀ gives the least-squares map of the suspect's rows to the anchor's, the anchor's block projected onto the space:
A·Uᵀ·U. `Fit.restored` has a better R: it shares what the other side of the mixing shows, which was mixed by the inverse
of the same matrix, and it is nearer to an orthogonal matrix.

Queries and keys with rotary positions can only be rotated, pair by pair: a pair of rows (s₁, s₂) is the complex row
s₁ + i·s₂, and the angle that brings it closest to the anchor's a is that of Σ a·s̄.

Two kinds of steps are used, which give the same bits on every machine: products of integer matrices so small that
float64 holds every partial sum exactly, in any order (Cauchy and Schwarz: Σ|x·y| ≤ ‖x‖·‖y‖), and single operations
(+ − × / √, rounding) on single numbers, which IEEE 754 rounds correctly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ONE",
    "Fit",
    "Rows",
    "column_scales",
    "common_span",
    "integer_rows",
    "orthonormal",
    "pair_cosines",
    "projected",
    "rotated_pairs",
]

Rows = NDArray[np.float64]
"""… × rows × features; integers where the docstring says so."""

ONE = float(1 << 25)  # what 1 is in fixed point: products of rows of length 1 are below 2^51
_STEPS = 48  # of Newton and Schulz: each raises a small singular value by 1.5, so that 2^-25 is reached
_NEAR = 8.0  # in units of 2^-25: orthonormal to that is as near as rounding lets it come
_ITERATIONS = 12  # between the scales of columns and the blocks of all heads, at most
_SETTLED = 2.0**-10  # scales that change by less have settled
_LARGEST_SCALE = 16.0


def integer_rows(rows: Rows, *, pairs: bool = False) -> tuple[Rows, NDArray[np.float64]]:
    """Rows as integers of a length of at most 2^25, and the power of 2 of each row.

    rows = integers·power, up to rounding. The two rows of a pair (r and r + 1) share one power.
    """
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    if pairs:
        shape = largest.shape
        largest = largest.reshape(*shape[:-2], -1, 2, 1).max(axis=-2, keepdims=True)
        largest = np.broadcast_to(largest, (*largest.shape[:-2], 2, 1)).reshape(shape)
    width = (int(rows.shape[-1]) - 1).bit_length() + 1 >> 1  # √features ≤ 2^width
    power = np.ldexp(1.0, np.frexp(largest)[1] + width - 25)
    return np.rint(rows / power), power


def orthonormal(rows: Rows) -> Rows:
    """U = (S·Sᵀ)^(−1/2)·S in units of 2^-25, for stacks of h × features: orthonormal rows with the same span.

    Newton and Schulz: X ← (3·I − X·Xᵀ)/2·X, from X = S scaled so that no singular value is above 1. Rows that are
    0, or the same as others, leave a space of fewer dimensions.
    """
    return _polar(integer_rows(rows)[0])


def _polar(x: Rows) -> Rows:
    """The same for integers, which are not scaled row by row: for an orthogonal matrix Q, Q·X becomes Q·U."""
    square = x @ x.swapaxes(-1, -2)
    bound = np.abs(square).astype(np.int64).sum(axis=-1).max(axis=-1).astype(np.float64)  # ≥ the largest σ²
    x = np.rint(x * (ONE / np.sqrt(np.maximum(bound, 1.0)))[..., None, None])
    unit = ONE * np.eye(x.shape[-2])
    for _ in range(_STEPS):
        square = np.rint((x @ x.swapaxes(-1, -2)) / ONE)
        if np.abs(square - unit).max(initial=0.0) <= _NEAR:
            break
        x = np.rint((np.rint((3 * unit - square) / 2) @ x) / ONE)
    found: Rows = x
    return found


def projected(anchor: Rows, basis: Rows) -> Rows:
    """A·Uᵀ·U in the anchor's units."""
    a, power = integer_rows(anchor)
    return (np.rint((a @ basis.swapaxes(-1, -2)) / ONE) @ basis) / ONE * power


def common_span(one: Rows, two: Rows) -> NDArray[np.int64]:
    """How much two spans share, for all pairs of n × h × features and m × h × features: Σ cos² in units of 2^-30."""
    found = np.empty((one.shape[0], two.shape[0]), np.int64)
    for i, u in enumerate(one):
        cosines = np.rint((u @ two.swapaxes(-1, -2)) / float(1 << 35))  # m × h × h, 15 bits
        found[i] = (cosines * cosines).sum(axis=(-1, -2)).astype(np.int64)
    return found


def _complex_products(one: Rows, two: Rows) -> tuple[Rows, Rows, Rows, Rows]:
    """For pairs of rows (… × pairs × 2 × features): real and imaginary part of Σ a·s̄, and both squared lengths."""
    real = (one[..., 0, :] * two[..., 0, :] + one[..., 1, :] * two[..., 1, :]).sum(axis=-1)
    imaginary = (one[..., 1, :] * two[..., 0, :] - one[..., 0, :] * two[..., 1, :]).sum(axis=-1)
    return real, imaginary, (one * one).sum(axis=(-1, -2)), (two * two).sum(axis=(-1, -2))


def pair_cosines(one: Rows, two: Rows) -> NDArray[np.int64]:
    """For n and m blocks of pairs (n × 2p × features), Σ over pairs of |Σ a·s̄|/(‖a‖·‖s‖), in units of 2^-30."""
    a, s = (integer_rows(x, pairs=True)[0].reshape(x.shape[0], -1, 2, x.shape[-1]) for x in (one, two))
    found = np.empty((a.shape[0], s.shape[0]), np.int64)
    for i, each in enumerate(a):
        real, imaginary, mine, theirs = _complex_products(each[None], s)
        size = np.sqrt(real * real + imaginary * imaginary) / np.sqrt(np.maximum(mine * theirs, 1.0))
        found[i] = np.rint(size * float(1 << 30)).astype(np.int64).sum(axis=-1)
    return found


def rotated_pairs(rows: Rows, clipped: Rows, anchor: Rows) -> Rows:
    """Pairs of rows (… × 2p × columns), each rotated to the anchor's by the angle between `clipped` rows and these."""
    a, s = (integer_rows(x, pairs=True)[0].reshape(*x.shape[:-2], -1, 2, x.shape[-1]) for x in (anchor, clipped))
    real, imaginary, _, _ = _complex_products(a, s)
    size = np.sqrt(real * real + imaginary * imaginary)
    there = size > 0
    size = np.where(there, size, 1.0)
    cos = np.where(there, np.rint(real / size * ONE), ONE)[..., None]
    sin = np.where(there, np.rint(imaginary / size * ONE), 0.0)[..., None]
    pairs = rows.reshape(*rows.shape[:-2], -1, 2, rows.shape[-1])
    one, two = pairs[..., 0, :], pairs[..., 1, :]
    return np.stack([(cos * one - sin * two) / ONE, (sin * one + cos * two) / ONE], axis=-2).reshape(rows.shape)


def column_scales(suspect: Rows, anchor: Rows) -> NDArray[np.float64]:
    """The factor that gives each column of the suspect the anchor's size, with the same weight for every row."""
    theirs, ours = (_coarse(integer_rows(rows)[0], rows.shape[-1]) for rows in (suspect, anchor))
    return _ratio(np.sqrt(_sums(ours, ours)), np.sqrt(_sums(theirs, theirs)))


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where both are above 0; 1 elsewhere."""
    there = (above > 0) & (below > 0)
    found = np.divide(above, below, out=np.ones_like(above), where=there)
    return np.clip(found, 1 / _LARGEST_SCALE, _LARGEST_SCALE)


@dataclass(frozen=True, eq=False)
class Fit:
    """Blocks of a tensor (n × h × copies·columns) and the spaces that those of the suspect span.

    Attributes:
        suspect, anchor: the blocks, all copies of a block side by side, since the same matrix mixed them.
        basis: orthonormal rows that span the suspect's, in units of 2^-25.
        scales: what brings the suspect's columns to the anchor's.
        mixed: which blocks are to be replaced by `restored` ones.
    """

    suspect: Rows
    anchor: Rows
    basis: Rows
    scales: NDArray[np.float64]
    mixed: NDArray[np.bool_]

    @classmethod
    def of(cls, suspect: Rows, anchor: Rows, scales: NDArray[np.float64]) -> Fit:
        """Fits blocks (n × copies × h × columns). The `scales` of columns are a first guess, which is improved."""
        copies, size, columns = suspect.shape[1:]
        theirs, ours = (x.swapaxes(1, 2).reshape(-1, size, copies * columns) for x in (suspect, anchor))
        found, basis, fitted = _fitted(theirs, ours, scales)
        alone, _, _ = _fitted(theirs.reshape(-1, 1, copies * columns), ours.reshape(-1, 1, copies * columns), scales)
        exact, _ = integer_rows(ours)
        energy = _units((exact * exact).sum(axis=-1))
        after, before = (_distance(exact, fit) for fit in (found, alone.reshape(ours.shape)))
        each = zip(after.tolist(), before.tolist(), energy.tolist(), strict=True)
        mixed = [_is_mixed(int(p), int(u), int(e), size, copies * columns) for p, u, e in each]
        return cls(theirs, ours, basis, fitted, np.array(mixed, np.bool_))

    def restored(self, number: int, other: tuple[Rows, Rows] | None = None) -> Rows:
        """A block (copies × h × columns) like the anchor's, in its scales: A·Vᵀ·R·U.

        V·Uᵀ has the cosines between both spaces, and noise: each row of the anchor is a little like every other row of
        the suspect. So it is averaged with the same from the `other` side of the mixing, the suspect's and the anchor's
        (h × features), if it is known. Then a step of Newton and Schulz, (3·I − C·Cᵀ)/2·C, raises small cosines, and so
        takes out some of what is not a rotation.
        """
        exact, power = integer_rows(self.anchor[number])
        ours, basis = orthonormal(exact), self.basis[number]
        cosines = np.rint((ours @ basis.T) / ONE)
        root = np.rint((exact @ ours.T) / ONE)
        copies = basis.shape[-1] // self.scales.size
        if other is not None:
            rows = _root(self.suspect[number] * np.tile(self.scales, copies), basis)
            cosines = np.rint((cosines + _other_cosines(root * power, other[1], rows, other[0])) / 2)
        square = np.rint((cosines @ cosines.T) / ONE)
        cosines = np.rint((np.rint((3 * ONE * np.eye(len(exact)) - square) / 2) @ cosines) / ONE)
        found: Rows = (np.rint((root @ cosines) / ONE) @ basis) / ONE * power
        return found.reshape(len(exact), copies, -1).swapaxes(0, 1)


def _fitted(theirs: Rows, ours: Rows, scales: NDArray[np.float64]) -> tuple[Rows, Rows, NDArray[np.float64]]:
    """The anchor's blocks (n × h × copies·columns) projected onto the suspect's spans; these; the scales of columns."""
    columns = scales.size
    copies = theirs.shape[-1] // columns
    exact, power = integer_rows(ours)
    a = _coarse(exact, columns)
    basis = orthonormal(theirs * np.tile(scales, copies))
    for step in range(_ITERATIONS):
        found = projected(ours, basis)
        p = _coarse(found / power, columns)
        change = _ratio(_sums(a, p), _sums(p, p))  # the scale of least squares for each column: ⟨a, p⟩/⟨p, p⟩
        if np.abs(change - 1).max() < _SETTLED or step + 1 == _ITERATIONS:
            break
        scales = scales * change
        basis = orthonormal(basis * np.tile(change, copies))  # the same span, and nearly orthonormal already
    return found, basis, scales


def _root(rows: Rows, basis: Rows) -> Rows:
    """S·Uᵀ, so that S = S·Uᵀ·U."""
    s, power = integer_rows(rows)
    return np.rint((s @ basis.T) / ONE) * power


def _other_cosines(our_root: Rows, anchor: Rows, their_root: Rows, suspect: Rows) -> Rows:
    """What the other side shows of R, in units of 2^-25.

    With U = N·S, N^(−ᵀ) = (S·Uᵀ)ᵀ belongs to the other side O, and so for the anchor. Then one orthogonal matrix
    relates suspect and anchor on both sides. It still does if the rows of N^(−ᵀ)·O are made orthonormal in a way that
    commutes with orthogonal matrices.
    """
    one, two = (_polar(_scaled_product(root.T, rows)) for root, rows in ((our_root, anchor), (their_root, suspect)))
    return np.rint((one @ two.T) / ONE)


def _scaled_product(left: Rows, right: Rows) -> Rows:
    """left·right as integers, with one scale for all of them."""
    x, y = (integer_rows(rows.reshape(1, -1))[0].reshape(rows.shape) for rows in (left, right))
    return integer_rows((x @ y).reshape(1, -1))[0].reshape(len(left), -1)


def _is_mixed(after: int, before: int, energy: int, size: int, features: int) -> bool:
    """Whether z gets more from a restored block than from its rows as they are (docs/alignment.md, "Mixings").

    Two fits to the anchor's block, of the squared length `energy`, leave a squared distance: `after` if each row is a
    mixture of h = `size` rows, `before` if rows were only scaled. Of noise, with n = `features` numbers in a row, a fit
    of k parameters leaves 1 − k/n. So with P and U, the distances as parts of the energy, what exceeds noise is
    C_p = 1 − P·n/(n − h) and C_u = 1 − U·n/(n − 1), the cos² to the anchor of rows without the mixing and with it.

        z² as they are     ∝ (C_u/C_p)/U                           a mixture has that part of its own row's mark
        z² if restored     ∝ (1 − h/n)²·(C_p/(1 − P))/P            the fit takes h/n of the mark, and adds noise

    Both are estimates: rows are replaced where the second is larger.
    """
    left = (features - size) * energy - features * after  # C_p, times (n − h)·energy
    if left <= 0:  # as far away as any other span
        return False
    if_restored = before * left * left * (features - 1)
    as_it_is = after * (energy - after) * ((features - 1) * energy - features * before) * features * features
    return if_restored > as_it_is


def _distance(anchor: Rows, rows: Rows) -> NDArray[np.float64]:
    """Σ over the rows of a block of ‖a‖² − ⟨a, s⟩²/‖s‖², the distance after the best scale; in units of 2^20."""
    s, _ = integer_rows(rows)
    along, size = (anchor * s).sum(axis=-1), np.maximum((s * s).sum(axis=-1), 1.0)
    return _units((anchor * anchor).sum(axis=-1) - along * along / size)


def _units(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Σ over the rows of a block of squared lengths, in units of 2^20."""
    found: NDArray[np.float64] = np.maximum(np.rint(lengths / float(1 << 20)), 0.0).sum(axis=-1)
    return found


def _coarse(numbers: Rows, columns: int) -> NDArray[np.int64]:
    """Integers of 21 bits, the rows of all blocks stacked: sums of products fit 63 bits."""
    found: NDArray[np.int64] = np.rint(numbers / 16.0).astype(np.int64).reshape(-1, columns)
    return found


def _sums(one: NDArray[np.int64], two: NDArray[np.int64]) -> NDArray[np.float64]:
    """Σ over rows, for each column."""
    found: NDArray[np.float64] = (one * two).sum(axis=0).astype(np.float64)
    return found
