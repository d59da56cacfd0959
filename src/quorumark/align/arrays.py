"""Small operations on a model's tensors that every step of alignment uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.align.groups import Axis, Indices, Signs
from quorumark.errors import InconclusiveError
from quorumark.model import kernels, statistic
from quorumark.model.statistic import BLOCK, Model

__all__ = ["finite", "gathered", "in_blocks", "octaves_of", "read", "with_signs"]


def read(model: Model, name: str) -> NDArray[Any]:
    """A whole tensor."""
    parts = [values for _, values in model.blocks(name, BLOCK)]
    if not parts:
        raise InconclusiveError(f"tensor {name!r} of the suspect is empty: nothing can be matched to it")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def in_blocks(values: NDArray[Any], limit: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Some rows at a time, at most `limit` numbers unless one row has more."""
    if values.ndim == 0:
        values = values.reshape(1)
    step = max(1, limit // max(1, prod(values.shape[1:])))
    for begin in range(0, values.shape[0], step):
        yield begin, values[begin : begin + step]


def finite(values: NDArray[Any]) -> NDArray[np.float64]:
    """As float64; what is not a number, or is beyond float32, counts as 0."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = values.astype(np.float32)
    if not np.isfinite(rounded).all():
        rounded = np.nan_to_num(rounded, nan=0.0, posinf=0.0, neginf=0.0)
    return rounded.astype(np.float64)


def gathered(values: NDArray[Any], axis: int, indices: Indices) -> NDArray[Any]:
    """Entries along an axis in a new order, zeros for −1."""
    taken = np.take(values, np.maximum(indices, 0), axis=axis)
    if (indices < 0).any():
        shape = [1] * values.ndim
        shape[axis] = indices.size
        taken = np.where((indices >= 0).reshape(shape), taken, taken.dtype.type(0))
    return taken


def with_signs(values: NDArray[Any], name: str, signs: Mapping[Axis, Signs]) -> NDArray[Any]:
    """A tensor times the signs of its axes."""
    for axis in range(values.ndim):
        if (name, axis) in signs:
            shape = [1] * values.ndim
            shape[axis] = -1
            values = values * signs[name, axis].reshape(shape).astype(values.dtype)
    return values


def octaves_of(values: NDArray[Any]) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int32]]:
    """A tensor's bits, and the scales of its rows and columns, in 1/256 octave."""
    bits = statistic.bits_of(values)
    logs = np.empty(bits.size, np.int16)
    kernels.logarithms(bits, logs, kernels.EVERY_LOG)
    return bits, *statistic.scales_of(lambda: iter([(0, logs)]), values.shape)
