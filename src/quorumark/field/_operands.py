"""Operands of the field: what is a vector of its elements, on the CPU or on a GPU, and what is refused."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError
from quorumark.field import kernels, parallel

P = (1 << 61) - 1
"""The field's prime, 2^61 − 1."""

Vector: TypeAlias = NDArray[np.uint64]
"""Field elements on the CPU. Functions also take CUDA tensors of int64; see the module's text."""

_ARRAYS = (np.ndarray, np.memmap)


def on_cuda(x: Any) -> bool:
    """Whether x is a torch tensor, which must then be on a GPU; without importing torch."""
    if type(x).__module__.partition(".")[0] != "torch":
        return False
    if not x.is_cuda:
        raise InputError(
            "operands", "must be numpy arrays of uint64 or CUDA tensors of int64", f"a tensor on {x.device}"
        )
    return True


def cuda() -> Any:
    from quorumark.field import _triton  # imported only when a CUDA tensor comes in

    return _triton


def check_scalar(name: str, a: Any) -> np.uint64:
    """One element, as the kernels take it; anything else is refused by name."""
    if not isinstance(a, (int, np.integer)) or isinstance(a, bool):
        raise InputError(name, "must be an integer in [0, p)", type(a).__name__)
    if not 0 <= int(a) < P:
        raise InputError(name, "must be in [0, p) for p = 2^61−1", int(a))
    return np.uint64(a)


def as_array(name: str, x: Any) -> Vector:
    if type(x) not in _ARRAYS:  # not np.matrix or masked arrays, which index in ways of their own
        raise InputError(name, "must be a numpy array of uint64", type(x).__name__)
    if x.dtype != np.uint64:
        raise InputError(name, "must have dtype uint64", x.dtype)
    if x.size == 0:
        raise InputError(name, "must not be empty", f"shape {x.shape}")
    return x if x.ndim == 0 else np.ascontiguousarray(x)  # which would make one dimension of none


def check_range(name: str, flat: Vector) -> None:
    largest = max(int(m) for m in parallel.spread(lambda b, e: kernels.maximum(flat[b:e]), flat.size))  # type: ignore[call-overload]
    if largest >= P:
        where = int(np.flatnonzero(flat >= P)[0])
        raise InputError(name, "must hold values in [0, p) for p = 2^61−1", f"{flat[where]} at index {where}")


def operands(named: dict[str, Any], checked: bool) -> list[Vector]:
    """The arguments as flat contiguous vectors, checked: dtype, size, one shape, and the range if asked."""
    arrays = {name: as_array(name, x) for name, x in named.items()}
    shapes = {name: x.shape for name, x in arrays.items()}
    if len(set(shapes.values())) > 1:
        names = " and ".join(shapes)
        raise InputError(names, "must have the same shape", " and ".join(str(s) for s in shapes.values()))
    flat = [x.reshape(-1) for x in arrays.values()]
    if checked:
        for name, x in zip(arrays, flat, strict=True):
            check_range(name, x)
    return flat


def check_output(out: Any, shape: tuple[int, ...]) -> None:
    """Refuses what cannot receive a result of this shape."""
    if type(out) not in _ARRAYS or out.dtype != np.uint64 or out.shape != shape:
        received = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InputError("out", f"must be a uint64 array of shape {shape}", received)
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise InputError("out", "must be contiguous and writable")


def output(out: Any, named: dict[str, Any]) -> Vector:
    """`out` as a flat vector, or a new one; never one that overlaps an input in part."""
    shape = next(iter(named.values())).shape
    if out is None:
        return np.empty(int(np.prod(shape)), np.uint64)
    check_output(out, shape)
    for name, x in named.items():
        same = x.ctypes.data == out.ctypes.data and x.flags.c_contiguous
        if not same and np.may_share_memory(x, out):
            raise InputError("out", f"must be {name} itself or not overlap it")
    flat: Vector = out.reshape(-1)
    return flat


def check(x: Any, name: str = "x") -> None:
    """Refuses what is not a vector of field elements: the check to run once on everything that comes in."""
    if on_cuda(x):
        cuda().check(x, name)
        return
    check_range(name, as_array(name, x).reshape(-1))
