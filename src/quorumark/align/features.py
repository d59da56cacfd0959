"""What matching compares: balanced weights in 8 bits, and where the gains of norms are negative."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from quorumark.align.arrays import octaves_of, read
from quorumark.align.groups import Groups
from quorumark.errors import InconclusiveError, LayoutError
from quorumark.model import kernels
from quorumark.model.layout import TensorSpec
from quorumark.model.statistic import Model

__all__ = ["Gains", "Weights", "compared_weights", "is_vector", "negative_gains"]

Weights = Mapping[str, NDArray[np.int8]]
"""For each tensor that is compared, its balanced weights in 8 bits."""
Gains = Mapping[str, tuple[NDArray[np.bool_], NDArray[np.bool_]]]
"""For each gain of a norm, where the anchor's and the suspect's are negative."""


def compared_weights(
    suspect: Model,
    anchor: Model,
    specs: Mapping[str, TensorSpec],
    names: Mapping[str, str] | None,
    progress: Callable[[str], None] | None,
) -> tuple[dict[str, NDArray[np.int8]], dict[str, NDArray[np.int8]]]:
    """The anchor's and the suspect's weights of some tensors."""
    ours, theirs = {}, {}
    for name, spec in specs.items():
        if progress is not None:
            progress(f"aligning: {name}")
        ours[name] = _balanced(anchor, name, spec)
        theirs[name] = _balanced(suspect, name if names is None else names[name], None)
        if theirs[name].ndim != ours[name].ndim:
            raise _other_dimensions(name)
    return ours, theirs


def negative_gains(
    suspect: Model,
    anchor: Model,
    groups: Groups,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str] | None,
) -> dict[str, tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Where gains are negative: vectors with signs that all have the same sign in the anchor, or are named weight.

    A vector may have axes of length 1 after the first. One with a 0 in the anchor shows nothing.
    """
    found = {}
    for name in sorted(
        {slot.tensor for group in groups.groups for slots in (*group.signs, *group.turns) for slot in slots}
    ):
        if is_vector(shapes[name]) and (names is None or name in names):
            ours, theirs = (
                read(model, at) for model, at in ((anchor, name), (suspect, names[name] if names else name))
            )
            fits = ours.shape == shapes[name] and theirs.ndim == ours.ndim and bool((ours != 0).all())
            if fits and (name.split(".")[-1] == "weight" or (ours > 0).all() or (ours < 0).all()):
                found[name] = (ours.reshape(-1) < 0, theirs.reshape(-1) < 0)
    return found


def is_vector(shape: tuple[int, ...]) -> bool:
    """Whether a tensor has one number for each channel: gains, and the lengths of rows that weight_norm keeps."""
    return len(shape) > 0 and all(length == 1 for length in shape[1:])


def _balanced(model: Model, name: str, spec: TensorSpec | None) -> NDArray[np.int8]:
    """A tensor without the scales of its rows and columns (as in the canonical form), in 8 bits."""
    values = np.ascontiguousarray(read(model, name))
    if spec is not None and values.shape != spec.shape:
        raise LayoutError(f"tensor {name!r} of the anchor must have the shape {spec.shape}, not {values.shape}")
    if values.ndim < 2:
        raise _other_dimensions(name)
    if not values.size:
        raise InconclusiveError(f"tensor {name!r} of the suspect is empty: nothing can be matched to it")
    bits, by_row, by_column = octaves_of(values)
    # balanced weights have 12 fractional bits and a deviation of about 2: 8 bits keep four deviations
    rounded = np.empty(bits.size, np.int8)
    kernels.balance_coarse(bits, by_row, by_column, rounded, kernels.POWERS)
    return rounded.reshape(values.shape)


def _other_dimensions(name: str) -> InconclusiveError:
    return InconclusiveError(
        f"tensor {name!r} of the suspect has another number of dimensions than the anchor's, so that it cannot be "
        "aligned: try without --align"
    )
