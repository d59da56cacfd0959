"""What an answer adds to those given before, as real numbers (docs/verification.md, "The guard").

An answer opens equations in the key: ⟨x, τ⟩, or ⟨x_b, τ⟩ for blocks b of x. With r = an equation less its projection
onto the span of all earlier ones, r must rest on many coordinates: x₂ = x₁ + e_j would give τ_j. The residuals are
orthogonal, so a combination of m of them rests on E/m² coordinates at least, if each rests on E.

Blocks are contiguous, so all inner products between equations follow from the inner products of whole vectors within
each block, and one pass over the stored vectors gives those.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import KeystoreError
from quorumark.verify.vectors import Numbers, StoredVector

__all__ = ["Asked", "Residual", "residual"]

_FLOATS = 1 << 22  # float64 numbers in memory while residuals are computed: 32 MB
_PASSES = 4
_WHOLE = -1


class Asked(NamedTuple):
    """An answered query: where its vector is, and whether its blocks were opened one by one."""

    path: Path
    by_layers: bool


class _Equation(NamedTuple):
    """⟨x_b, τ⟩ of a vector by its row, in one block or in all of them."""

    row: int
    block: int = _WHOLE


@dataclass(frozen=True)
class Residual:
    """`effective`: ⌊‖r‖₂⁴/‖r‖₄⁴⌋, the least of all new equations; x's cosines with the stored vectors, and whether it
    is one of them; `distinct`: the smallest ‖Σ b_i·e_i/‖e_i‖‖² over all equations e_i, for ‖b‖ = 1."""

    effective: int
    cosines: NDArray[np.float64]
    known: bool
    distinct: float


def residual(
    x: Numbers,
    stored: Sequence[Asked],
    public: Sequence[slice],
    edges: Sequence[int] = (),
    asked: Sequence[int] | None = None,
) -> Residual:
    """What x adds to stored vectors, outside of coordinates that are public.

    `edges` are the blocks' edges, needed where anything was or is asked by layers; `asked`: the blocks of x that are
    opened now, where its whole was opened before. r = e − Σ a_i·e_i with G·a = c, G the Gram matrix of the earlier
    equations. The projection is repeated on what is left until r is orthogonal to rounding.

    r can be far smaller than rounding, and still be one coordinate that integers read exactly: x_1 = 32·c_1 − c_2,
    x_2 = 32·c_2 − c_3, … So `distinct`, the smallest eigenvalue of G, says whether rounding can hide anything.
    """
    by_layers = asked is not None or any(one.by_layers for one in stored)
    ends = list(edges) if by_layers else [0, x.size]
    paths, count = [one.path for one in stored], len(stored)
    gram = np.zeros((len(ends) - 1, count + 1, count + 1))
    names = [hashlib.blake2b() for _ in range(count + 1)]
    for block, rows in _in_step(x, paths, public, ends, count + 1):
        gram[block] += rows @ rows.T
        for name, row in zip(names, rows, strict=True):
            name.update(row)
    first = {name.digest(): i for i, name in reversed(list(enumerate(names)))}  # equal ones but for public coordinates
    told = [_Equation(i) for i in sorted(first.values()) if i < count]
    told += [_Equation(i, b) for i, _ in told for b in _blocks(gram, i, stored[i].by_layers)]
    if asked is None:
        new = [_Equation(count)] if first[names[count].digest()] == count else []
    else:
        told.append(_Equation(count))
        new = [_Equation(count, b) for b in list(asked)[:-1]]  # the last one follows from the whole and the others
    told = [e for e in told if _inner(gram, e, e) > 0]  # not a vector that was on public coordinates alone
    new = [e for e in new if _inner(gram, e, e) > 0]
    every = told + new
    products = np.array([[_inner(gram, e, f) for f in every] for e in every])
    lengths = np.sqrt(products.diagonal()) if every else np.zeros(0)
    distinct = float(np.linalg.eigvalsh(products / np.outer(lengths, lengths))[0]) if every else 1.0
    whole = gram.sum(0)
    sizes = np.sqrt(np.maximum(whole.diagonal(), 1e-300))
    cosines = whole[:count, count] / (sizes[:count] * sizes[count])
    if not new:
        return Residual(0, cosines, True, distinct)
    effective = _effective(x, paths, public, ends, every, len(told), products)
    return Residual(effective, cosines, False, distinct)


def _blocks(gram: NDArray[np.float64], row: int, by_layers: bool) -> list[int]:
    """The blocks of a vector that were opened one by one: all but the last one, which follows from the whole."""
    return [b for b in range(len(gram)) if gram[b, row, row] > 0][:-1] if by_layers else []


def _inner(gram: NDArray[np.float64], one: _Equation, two: _Equation) -> float:
    if one.block == two.block == _WHOLE:
        return float(gram[:, one.row, two.row].sum())
    if one.block != two.block and _WHOLE not in (one.block, two.block):
        return 0.0
    return float(gram[max(one.block, two.block), one.row, two.row])


def _effective(
    x: Numbers,
    paths: Sequence[Path],
    public: Sequence[slice],
    edges: Sequence[int],
    every: Sequence[_Equation],
    known: int,
    products: NDArray[np.float64],
) -> int:
    """The least ⌊‖r‖₂⁴/‖r‖₄⁴⌋ of the equations after the first `known`, each against all before it."""
    added, lengths = len(every) - known, np.sqrt(products.diagonal())
    unit = products / np.outer(lengths, lengths)
    weights = np.zeros((added, len(every)))  # r_k = e_k − Σ weights[k, j]·e_j
    targets = products[known:]  # ⟨r_k, e_j⟩, at first ⟨e_k, e_j⟩
    two = four = np.zeros(added)
    for _ in range(_PASSES):
        for k in range(added):
            j = known + k
            if j:
                found = np.linalg.lstsq(unit[:j, :j], targets[k, :j] / lengths[:j], rcond=1e-12)[0]
                weights[k, :j] += found / lengths[:j]
        # in block c, r_k is a combination of rows: coefficients by block
        mixed = np.zeros((len(edges) - 1, added, len(paths) + 1))
        for j, (row, block) in enumerate(every):
            factors = -weights[:, j]
            if j >= known:
                factors = factors + (np.arange(added) == j - known)
            where = slice(None) if block == _WHOLE else slice(block, block + 1)
            mixed[where, :, row] += factors
        two, four = np.zeros(added), np.zeros(added)
        left = np.zeros((len(edges) - 1, added, len(paths) + 1))
        for block, rows in _in_step(x, paths, public, edges, len(paths) + 1 + added):
            rest = mixed[block] @ rows
            left[block] += rest @ rows.T
            np.square(rest, out=rest)
            two += rest.sum(1)
            four += np.einsum("ij,ij->i", rest, rest)
        targets = np.stack(
            [left[:, :, e.row].sum(0) if e.block == _WHOLE else left[e.block, :, e.row] for e in every], 1
        )
        off = [np.abs(targets[k, : known + k] / lengths[: known + k]).max(initial=0) for k in range(added)]
        if all(error <= 1e-9 * lengths[known + k] for k, error in enumerate(off)):
            break
    return min(math.floor(a * a / b) if b > 0 else 0 for a, b in zip(two, four, strict=True))


def _in_step(
    x: Numbers, paths: Sequence[Path], public: Sequence[slice], edges: Sequence[int], height: int
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Pieces of the stored vectors, and of x as the last row, within one block each; 0 where it is public."""
    stored = [StoredVector(path) for path in paths]
    wrong = [path for path, vector in zip(paths, stored, strict=True) if vector.size != x.size]
    if wrong:
        raise KeystoreError(f"{str(wrong[0])!r} is not a vector of this consortium: it has another length")
    width = max(1024, _FLOATS // height)
    for block, (low, high) in enumerate(itertools.pairwise(edges)):
        for start in range(low, high, width):
            part = x[start : min(start + width, high)]
            rows = np.empty((len(paths) + 1, part.size))
            for row, vector in zip(rows, stored, strict=False):
                row[:] = vector.take(part.size)
            rows[-1] = part
            for span in public:
                rows[:, max(span.start - start, 0) : max(span.stop - start, 0)] = 0
            yield block, rows
