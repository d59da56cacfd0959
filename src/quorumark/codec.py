"""Real numbers as field elements: fixed point with 40 fractional bits (docs/protocol.md, "Numbers").

E(v) = round(v·2^40), to nearest with ties to even; negative numbers become p − |·|. A number must satisfy
|v| < 2^19: then sums of thousands of weighted models still fit into ±p/2 = ±2^20 with 40 fractional bits. NaN, infinity
and overflow are refused before anything is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from quorumark import field
from quorumark.errors import EncodingError, InputError
from quorumark.field import Vector, kernels, parallel

__all__ = ["FRACTION_BITS", "LIMIT", "check", "decode", "encode", "encode_axpy", "fits", "round_trip"]

FRACTION_BITS = 40
LIMIT = 2.0**19
"""Numbers must be smaller than this in size."""

_SCALE = 2.0**FRACTION_BITS


def check(values: Any, *, name: str = "values") -> NDArray[Any]:
    """The values, if all of them can be encoded: an EncodingError names the first that cannot."""
    _prepare(values, 1.0, name)
    return values  # type: ignore[no-any-return]


def fits(values: NDArray[Any]) -> bool:
    """Whether all of these float32 or float64 numbers are finite and below 2^19 in size."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return _are_within(flat, _largest(1.0, flat.dtype))


def encode(values: Any, weight: float = 1.0, out: Vector | None = None, *, name: str = "values") -> Vector:
    """E(weight·values) for float32 or float64 values of any shape. `name` is what errors call them.

    The product is rounded once to float64 and once to fixed point: within 2^-41 + 2^-53·|weight·v|.
    """
    flat, scale = _prepare(values, weight, name)
    target = np.empty(flat.size, np.uint64) if out is None else _target(out, values)
    parallel.spread(lambda b, e: kernels.encode(flat[b:e], scale, target[b:e]), flat.size)
    return target.reshape(values.shape) if out is None else out


def encode_axpy(
    values: Any,
    weight: float,
    a: int,
    x: Vector,
    out: Vector | None = None,
    *,
    checked: bool = True,
    name: str = "values",
) -> Vector:
    """E(weight·values) + a·x in one pass: a member's weighted model plus its scaled share.

    `out` may be x. `checked=False` skips the range check of x (not that of the values).
    """
    factor = field.check_scalar("a", a)
    flat, scale = _prepare(values, weight, name)
    if not isinstance(x, np.ndarray) or x.shape != values.shape:
        received = f"shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise InputError("x", f"must be a vector of {name}' shape {values.shape}", received)
    if checked:
        field.check(x)
    elif x.dtype != np.uint64:
        raise InputError("x", "must have dtype uint64", x.dtype)
    if out is not None and out is not x and np.may_share_memory(out, x):
        raise InputError("out", "must be x itself or not overlap it")
    addend = np.ascontiguousarray(x).reshape(-1)
    target = np.empty(flat.size, np.uint64) if out is None else _target(out, values)
    parallel.spread(lambda b, e: kernels.encode_axpy(flat[b:e], scale, factor, addend[b:e], target[b:e]), flat.size)
    return target.reshape(values.shape) if out is None else out


def decode(
    x: Vector, dtype: DTypeLike = np.float32, out: NDArray[Any] | None = None, *, checked: bool = True
) -> NDArray[Any]:
    """The numbers that field elements stand for, as float32 or float64, rounded once."""
    if np.dtype(dtype) not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise InputError("dtype", "must be float32 or float64", np.dtype(dtype))
    if checked:
        field.check(x)
    elif not isinstance(x, np.ndarray) or x.dtype != np.uint64:
        raise InputError("x", "must be a uint64 vector", getattr(x, "dtype", type(x).__name__))
    if out is None:
        out = np.empty(x.shape, dtype)
    elif not isinstance(out, np.ndarray):
        raise InputError("out", "must be a numpy array", type(out).__name__)
    elif np.may_share_memory(out, x) or not out.flags.writeable:
        raise InputError("out", "must be writable and not share memory with x")
    elif out.dtype != np.dtype(dtype) or out.shape != x.shape or not out.flags.c_contiguous:
        raise InputError(
            "out", f"must be a contiguous {np.dtype(dtype)} array of shape {x.shape}", f"{out.dtype} {out.shape}"
        )
    flat, target = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)
    parallel.spread(lambda b, e: kernels.decode(flat[b:e], 1 / _SCALE, target[b:e]), flat.size)
    return out


def round_trip(values: Any, *, name: str = "values") -> NDArray[Any]:
    """decode(encode(values)) in the values' own type: what fixed point leaves of them."""
    flat, scale = _prepare(values, 1.0, name)
    out = np.empty_like(flat)
    parallel.spread(lambda b, e: kernels.round_trip(flat[b:e], scale, out[b:e]), flat.size)
    return out.reshape(values.shape)


def _prepare(values: Any, weight: float, name: str) -> tuple[NDArray[Any], float]:
    """The values as a flat contiguous vector and the factor to the fixed-point grid, all checked."""
    if not isinstance(values, np.ndarray) or values.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        received = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
        raise InputError(name, "must be a numpy array of float32 or float64", received)
    if values.size == 0:
        raise InputError(name, "must not be empty", f"shape {values.shape}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < abs(weight) < LIMIT:
        raise InputError("weight", "must be a number other than 0, below 2^19 in size", repr(weight))
    flat = np.ascontiguousarray(values).reshape(-1)
    bound = _largest(float(abs(weight)), flat.dtype)
    if not _are_within(flat, bound):
        raise _refusal(flat, bound, weight, name)
    return flat, float(weight) * _SCALE


def _are_within(flat: NDArray[Any], bound: Any) -> bool:
    return all(parallel.spread(lambda b, e: kernels.within(flat[b:e], bound), flat.size))


def _largest(weight: float, dtype: np.dtype[Any]) -> Any:
    """The largest v of this type with v and weight·v below 2^19: an average of such numbers fits as well."""
    bound = np.float64(LIMIT / max(weight, 1.0))
    while bound >= LIMIT or bound * weight >= LIMIT:
        bound = np.nextafter(bound, 0.0)
    rounded = dtype.type(bound)
    return rounded if rounded <= bound else np.nextafter(rounded, dtype.type(0))


def _refusal(flat: NDArray[Any], bound: Any, weight: float, name: str) -> EncodingError:
    where = int(np.flatnonzero(~(np.abs(flat) <= bound))[0])
    value = float(flat[where])
    if not np.isfinite(value):
        return EncodingError(name, "must be finite", f"{value} at index {where}", where)
    rule = f"must be below {LIMIT / max(abs(weight), 1.0):g} in size to fit into fixed point"
    return EncodingError(name, rule, f"{value:g} at index {where}", where)


def _target(out: Any, values: NDArray[Any]) -> Vector:
    field.check_output(out, values.shape)
    if np.may_share_memory(out, values):
        raise InputError("out", "must not share memory with the values")
    flat: Vector = out.reshape(-1)
    return flat
