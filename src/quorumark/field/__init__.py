"""Exact arithmetic mod p = 2^61−1 on vectors.

A vector is a numpy array of uint64 in [0, p), of any shape, or a CUDA tensor of int64 in [0, p); both go
through the same functions, and give the same bits. Scalars are Python ints in [0, p).

Rules that hold for all of them:

- Vectors of one call have one shape, at least one element, and live on one device.
- `out`, where given, receives the result; it may be one of the inputs (in place), but not overlap one in part.
- Operands are checked to be field elements before anything is written. `checked=False` skips that pass: for
  vectors that this package made, or that went through `check` when they came in.
- Numpy arrays use all cores (`set_threads`); the count changes speed only.
- To work through something larger than memory, call them on slices: `for part in chunks(n): dot(x[part], y[part])`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.errors import InputError
from quorumark.field import kernels, parallel
from quorumark.field._operands import (
    P,
    Vector,
    as_array,
    check,
    check_output,
    check_range,
    check_scalar,
    cuda,
    on_cuda,
    operands,
    output,
)
from quorumark.field._random import KEY_BYTES, Stream, derive_key
from quorumark.field.parallel import set_threads, threads

__all__ = [
    "KEY_BYTES",
    "P",
    "Stream",
    "Vector",
    "add",
    "add_products",
    "axpy",
    "check",
    "check_output",
    "check_scalar",
    "chunks",
    "derive_key",
    "dot",
    "from_signed",
    "inv",
    "inv_sqrt",
    "matmul",
    "mul",
    "neg",
    "on_cuda",
    "random",
    "scalar_inv",
    "scale",
    "set_threads",
    "sub",
    "threads",
    "to_signed",
]

_SMALLEST_POWERS = parallel.SMALLEST_WORK // 70  # 70 multiplications per element


def add(x: Any, y: Any, out: Any = None, *, checked: bool = True) -> Any:
    """x + y."""
    if on_cuda(x):
        return cuda().add(x, y, out, checked)
    return _elementwise(kernels.add, {"x": x, "y": y}, out, checked)


def sub(x: Any, y: Any, out: Any = None, *, checked: bool = True) -> Any:
    """x − y."""
    if on_cuda(x):
        return cuda().sub(x, y, out, checked)
    return _elementwise(kernels.sub, {"x": x, "y": y}, out, checked)


def neg(x: Any, out: Any = None, *, checked: bool = True) -> Any:
    """−x."""
    if on_cuda(x):
        return cuda().neg(x, out, checked)
    return _elementwise(kernels.scale, {"x": x}, out, checked, first=np.uint64(P - 1))


def mul(x: Any, y: Any, out: Any = None, *, checked: bool = True) -> Any:
    """x·y, element by element."""
    if on_cuda(x):
        return cuda().mul(x, y, out, checked)
    return _elementwise(kernels.mul, {"x": x, "y": y}, out, checked)


def scale(a: int, x: Any, out: Any = None, *, checked: bool = True) -> Any:
    """a·x for one element a."""
    factor = check_scalar("a", a)
    if on_cuda(x):
        return cuda().scale(int(factor), x, out, checked)
    return _elementwise(kernels.scale, {"x": x}, out, checked, first=factor)


def axpy(a: Any, x: Any, y: Any, out: Any = None, *, checked: bool = True) -> Any:
    """y + a·x, for one element a or for a vector a of x's shape."""
    if isinstance(a, (int, np.integer)) and not isinstance(a, bool):
        factor = check_scalar("a", a)
        if on_cuda(x):
            return cuda().axpy(int(factor), x, y, out, checked)
        return _elementwise(kernels.axpy, {"x": x, "y": y}, out, checked, first=factor)
    if on_cuda(x):
        return cuda().muladd(a, x, y, out, checked)
    return _elementwise(kernels.muladd, {"a": a, "x": x, "y": y}, out, checked)


def add_products(a: int, x: Vector, y: Vector, negative: NDArray[np.bool_], out: Vector) -> None:
    """out += ±a·x ⊙ y in place, for one element a, with the minus where `negative` says so (or none of it, if that is
    empty). Numpy vectors of field elements that were checked when they came in."""
    factor = check_scalar("a", a)

    def part(begin: int, end: int) -> None:
        kernels.add_products(factor, x[begin:end], y[begin:end], negative[begin:end], out[begin:end])

    if not x.size == y.size == out.size or negative.size not in (0, out.size):
        raise InputError("x, y and out", "must be of one size", (x.size, y.size, negative.size, out.size))
    parallel.spread(part, out.size)


def dot(x: Any, y: Any, *, checked: bool = True) -> int:
    """Σ x·y mod p, as a Python int."""
    if on_cuda(x):
        result: int = cuda().dot(x, y, checked)
        return result
    a, b = operands({"x": x, "y": y}, checked)

    def part(begin: int, end: int) -> int:
        total = 0
        for start in range(begin, end, 1 << 30):  # the kernel's sums are exact up to 2^31 elements
            sums = np.zeros(32, np.uint64)
            stop = min(start + (1 << 30), end)
            kernels.dot(a[start:stop], b[start:stop], sums)
            total += sum(int(s) << (32 * (i // 8)) for i, s in enumerate(sums))
        return total

    return sum(int(s) for s in parallel.spread(part, a.size)) % P  # type: ignore[call-overload]


def inv(x: Any, out: Any = None, *, checked: bool = True) -> Any:
    """1/x. Zero has no inverse: an InputError, whatever `checked` says."""
    if on_cuda(x):
        return cuda().inv(x, out, checked)
    (a,) = operands({"x": x}, checked)
    if not a.all():
        where = int(np.flatnonzero(a == 0)[0])
        raise InputError("x", "must not hold 0, which has no inverse", f"0 at index {where}")
    return _elementwise(kernels.inverse, {"x": x}, out, checked=False, smallest=_SMALLEST_POWERS)


def inv_sqrt(x: Any, out: Any = None, *, checked: bool = True) -> Any:
    """1/√x, the one that is x^((p−3)/4). What is not a non-zero square is an InputError.

    For x = r² it is ±1/r, with the sign that makes r·inv_sqrt(r²) = r^((p−1)/2), the Legendre symbol of r:
    this is how the dealer-free setup makes signs that nobody knows.
    """
    if on_cuda(x):
        return cuda().inv_sqrt(x, out, checked)
    (a,) = operands({"x": x}, checked)
    result = np.empty(a.size, np.uint64)  # not `out`: nothing is written there if x holds a non-square
    wrong = parallel.spread(
        lambda begin, end: kernels.inverse_sqrt(a[begin:end], result[begin:end]), a.size, smallest=_SMALLEST_POWERS
    )
    if any(wrong):
        roots = mul(mul(result, result, checked=False), a, checked=False)
        where = int(np.flatnonzero(roots != 1)[0])
        raise InputError("x", "must hold non-zero squares mod p only", f"none at index {where}")
    if out is None:
        return result.reshape(np.shape(x))
    target = output(out, {"x": x})
    target[:] = result
    return out


def matmul(a: Any, b: Any, out: Any = None, *, checked: bool = True) -> Any:
    """A·B for a small matrix A (m×k) and a wide B (k×n), with one reduction per four products.

    `out` may not be B. For Lagrange combinations, sharings and Vandermonde products: k rows of length n in, m out.
    """
    if on_cuda(b):
        return cuda().matmul(a, b, out, checked)
    small, wide = as_array("a", a), as_array("b", b)
    if small.ndim != 2 or wide.ndim != 2 or small.shape[1] != wide.shape[0]:
        raise InputError("a and b", "must be matrices m×k and k×n", f"{small.shape} and {wide.shape}")
    if checked:
        check_range("a", small.reshape(-1))
        check_range("b", wide.reshape(-1))
    m, k = small.shape
    n = wide.shape[1]
    if out is None:
        out = np.empty((m, n), np.uint64)
    check_output(out, (m, n))
    if np.may_share_memory(out, wide) or np.may_share_memory(out, small):
        raise InputError("out", "must not share memory with a or b")
    low, high = (np.zeros((m + m % 2, k + -k % 4), np.uint64) for _ in range(2))
    low[:m, :k], high[:m, :k] = small & np.uint64(2**31 - 1), small >> np.uint64(31)
    # columns at a time: B's block stays in the second-level cache
    width = min(max(64, (1 << 15) // k // 8 * 8), n + -n % 8)
    target = out

    def part(begin: int, end: int) -> None:
        block = np.zeros((low.shape[1], width), np.uint64)
        result = np.empty((low.shape[0], width), np.uint64)
        for start in range(begin, end, width):
            stop = min(start + width, end)
            block[:k, : stop - start] = wide[:, start:stop]
            kernels.matmul(low, high, block, result)
            target[:, start:stop] = result[:m, : stop - start]

    parallel.spread(part, n, smallest=max(64, parallel.SMALLEST_WORK // (m * k)))
    return out


def random(count: int) -> Vector:
    """`count` uniform elements that nobody can repeat, from the operating system by way of AES-256-CTR."""
    elements: Vector = Stream.fresh("random elements").elements(count)
    return elements


def from_signed(values: Any) -> Vector:
    """Integers v, |v| < p/2, as field elements: v or p + v."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or array.size == 0:
        raise InputError("values", "must be a non-empty array of integers", f"{array.dtype} of shape {array.shape}")
    if int(array.max()) > P // 2 or int(array.min()) < -(P // 2):
        outside = array[(array > P // 2) | (array < -(P // 2))].reshape(-1)
        raise InputError("values", "must lie within ±(p−1)/2", f"{outside[0]}")
    signed = array.astype(np.int64)
    return np.where(signed < 0, signed + P, signed).astype(np.uint64)


def to_signed(x: Any, *, checked: bool = True) -> NDArray[np.int64]:
    """The representative of smallest size: x, or x − p where x > p/2."""
    array = as_array("x", x)
    if checked:
        check_range("x", array.reshape(-1))
    signed = array.astype(np.int64)
    return np.where(signed > P // 2, signed - P, signed)


def scalar_inv(a: int) -> int:
    """1/a for one element."""
    value = int(check_scalar("a", a))
    if value == 0:
        raise InputError("a", "must not be 0, which has no inverse", "0")
    return pow(value, -1, P)


def chunks(length: int, size: int = 1 << 20) -> Iterator[slice]:
    """Slices of at most `size` that cover [0, length), in order."""
    for argument, value in (("length", length), ("size", size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(argument, "must be an integer, at least 1", repr(value))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _elementwise(
    kernel: Any,
    named: dict[str, Any],
    out: Any,
    checked: bool,
    first: np.uint64 | None = None,
    smallest: int = parallel.SMALLEST_PART,
) -> Any:
    """Runs kernel([first,] x, y, …, out) over all cores."""
    arrays = operands(named, checked)
    target = output(out, named)
    leading = () if first is None else (first,)

    def part(begin: int, end: int) -> None:
        kernel(*leading, *(x[begin:end] for x in arrays), target[begin:end])

    parallel.spread(part, target.size, smallest=smallest)
    return target.reshape(next(iter(named.values())).shape) if out is None else out
