"""The field's kernels for CUDA tensors (Triton): int64 tensors in [0, p), the same bits as on the CPU.

Imported only when a torch tensor reaches `quorumark.field`. torch has no complete uint64, and p < 2^63, so
the elements travel as int64 and are read as unsigned inside the kernels.
"""

from __future__ import annotations

from typing import Any

from quorumark.errors import InputError, MissingDependencyError

try:
    import torch
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingDependencyError("triton", "field arithmetic on CUDA tensors") from error

P = (1 << 61) - 1
_P = tl.constexpr(P)
_BLOCK = 1024


@triton.jit
def _canon(x):  # type: ignore[no-untyped-def]
    """x in [0, 2p) → [0, p)."""
    return tl.where(x >= _P, x - _P, x)


@triton.jit
def _fold(x):  # type: ignore[no-untyped-def]
    """2^61 ≡ 1: the top three bits onto the rest."""
    return (x & _P) + (x >> 61)


@triton.jit
def _product(x, y):  # type: ignore[no-untyped-def]
    """x·y mod p, at most 2p: hi·2^64 + lo ≡ (lo mod 2^61) + (hi·8 + (lo >> 61))."""
    lo = x * y
    hi = tl.umulhi(x, y)
    return (lo & _P) + ((hi << 3) | (lo >> 61))


@triton.jit
def _mulmod(x, y):  # type: ignore[no-untyped-def]
    return _canon(_canon(_product(x, y)))


@triton.jit
def _load(pointer, at, mask, other: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(pointer + at, mask=mask, other=other).to(tl.uint64, bitcast=True)


@triton.jit
def _store(pointer, at, value, mask):  # type: ignore[no-untyped-def]
    tl.store(pointer + at, value.to(tl.int64, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["a"])
def _elementwise(a, x, y, z, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    u = _load(x, at, mask, 0)
    factor = a.to(tl.uint64)
    if OP == "add":
        r = _canon(u + _load(y, at, mask, 0))
    elif OP == "sub":
        r = _canon(u + (_P - _load(y, at, mask, 0)))
    elif OP == "mul":
        r = _mulmod(u, _load(y, at, mask, 0))
    elif OP == "scale":
        r = _mulmod(u, factor)
    elif OP == "axpy":
        r = _canon(_mulmod(u, factor) + _load(y, at, mask, 0))
    else:  # muladd: z·x + y
        r = _canon(_mulmod(u, _load(z, at, mask, 0)) + _load(y, at, mask, 0))
    _store(out, at, r, mask)


@triton.jit
def _square_times(e, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
    for _ in range(TIMES):
        e = _mulmod(e, e)
    return e


@triton.jit
def _power(x):  # type: ignore[no-untyped-def]
    """x^(2^59 − 1): e(n) = x^(2^n − 1) for n = 1, 2, 3, 6, 7, 14, 28, 29, 58, 59."""
    e = _mulmod(_square_times(x, 1), x)
    e = _mulmod(_square_times(e, 1), x)
    e = _mulmod(_square_times(e, 3), e)
    e = _mulmod(_square_times(e, 1), x)
    e = _mulmod(_square_times(e, 7), e)
    e = _mulmod(_square_times(e, 14), e)
    e = _mulmod(_square_times(e, 1), x)
    e = _mulmod(_square_times(e, 29), e)
    return _mulmod(_square_times(e, 1), x)


@triton.jit
def _powers(x, out, n, INVERSE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    u = _load(x, at, mask, 1)
    e = _power(u)
    if INVERSE:  # p − 2 = 4·(2^59 − 1) + 1
        e = _mulmod(_square_times(e, 2), u)
    _store(out, at, e, mask)


@triton.jit
def _dot(x, y, low, high, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Per block: sums of the low and high 32 bits of the reduced products; neither can overflow."""
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    r = _mulmod(_load(x, at, mask, 0), _load(y, at, mask, 0))
    tl.store(low + block, tl.sum((r & 0xFFFFFFFF).to(tl.int64, bitcast=True), axis=0))
    tl.store(high + block, tl.sum((r >> 32).to(tl.int64, bitcast=True), axis=0))


@triton.jit
def _matmul(a, b, out, inner, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks = tl.cdiv(n, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    at = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    total = tl.zeros((BLOCK,), tl.uint64)
    for k in range(inner):
        factor = tl.load(a + row * inner + k).to(tl.uint64, bitcast=True)
        # at most (p+4) + 2p before the fold, at most p+1 after it
        total = _fold(total + _product(factor, _load(b, tl.cast(k, tl.int64) * n + at, mask, 0)))
    _store(out, row * n + at, _canon(total), mask)


def check(x: Any, name: str) -> None:
    _tensor(name, x)
    _check_range(name, x)


def check_vector(x: Any, name: str) -> int:
    """The length of a contiguous 1-D vector."""
    _tensor(name, x)
    if x.ndim != 1 or not x.is_contiguous():
        raise InputError(name, "must be a contiguous 1-D tensor", f"shape {tuple(x.shape)}")
    return int(x.numel())


def add(x: Any, y: Any, out: Any, checked: bool) -> Any:
    return _run("add", {"x": x, "y": y}, out, checked)


def sub(x: Any, y: Any, out: Any, checked: bool) -> Any:
    return _run("sub", {"x": x, "y": y}, out, checked)


def neg(x: Any, out: Any, checked: bool) -> Any:
    return _run("scale", {"x": x}, out, checked, a=P - 1)


def mul(x: Any, y: Any, out: Any, checked: bool) -> Any:
    return _run("mul", {"x": x, "y": y}, out, checked)


def scale(a: int, x: Any, out: Any, checked: bool) -> Any:
    return _run("scale", {"x": x}, out, checked, a=a)


def axpy(a: int, x: Any, y: Any, out: Any, checked: bool) -> Any:
    return _run("axpy", {"x": x, "y": y}, out, checked, a=a)


def muladd(a: Any, x: Any, y: Any, out: Any, checked: bool) -> Any:
    return _run("muladd", {"x": x, "y": y, "a": a}, out, checked)


def dot(x: Any, y: Any, checked: bool) -> int:
    x, y = _operands({"x": x, "y": y}, checked)
    blocks = triton.cdiv(x.numel(), _BLOCK)
    low, high = (torch.empty(blocks, dtype=torch.int64, device=x.device) for _ in range(2))
    with torch.cuda.device(x.device):
        _dot[(blocks,)](x, y, low, high, x.numel(), BLOCK=_BLOCK)
    # each partial sum is below 2^42, so int64 holds the total of 2^21 blocks at a time
    total = 0
    for part in range(0, blocks, 1 << 20):
        below, above = (int(half[part : part + (1 << 20)].sum()) for half in (low, high))
        total += below + (above << 32)
    return total % P


def inv(x: Any, out: Any, checked: bool) -> Any:
    (flat,) = _operands({"x": x}, checked)
    if bool((flat == 0).any()):
        where = int(torch.nonzero(flat.reshape(-1) == 0)[0])
        raise InputError("x", "must not hold 0, which has no inverse", f"0 at index {where}")
    result = _result(out, {"x": x})
    with torch.cuda.device(flat.device):
        _powers[_grid(flat)](flat, result, flat.numel(), INVERSE=True, BLOCK=_BLOCK)
    return result


def inv_sqrt(x: Any, out: Any, checked: bool) -> Any:
    (flat,) = _operands({"x": x}, checked)
    _result(out, {"x": x})
    result = torch.empty_like(flat)  # not `out`: nothing is written there if x holds a non-square
    with torch.cuda.device(flat.device):
        _powers[_grid(flat)](flat, result, flat.numel(), INVERSE=False, BLOCK=_BLOCK)
    wrong = mul(mul(result, result, None, False), flat, None, False) != 1
    if bool(wrong.any()):
        where = int(torch.nonzero(wrong.reshape(-1))[0])
        raise InputError("x", "must hold non-zero squares mod p only", f"none at index {where}")
    return result if out is None else out.copy_(result)


def matmul(a: Any, b: Any, out: Any, checked: bool) -> Any:
    small, wide = _tensor("a", a), _tensor("b", b)
    if small.ndim != 2 or wide.ndim != 2 or small.shape[1] != wide.shape[0]:
        raise InputError("a and b", "must be matrices m×k and k×n", f"{tuple(a.shape)} and {tuple(b.shape)}")
    if small.device != wide.device:
        raise InputError("a and b", "must be on the same device", f"{small.device} and {wide.device}")
    if checked:
        _check_range("a", small)
        _check_range("b", wide)
    m, n = small.shape[0], wide.shape[1]
    if out is None:
        out = torch.empty((m, n), dtype=torch.int64, device=wide.device)
    _check_output(out, (m, n), wide.device)
    for name, x in (("a", small), ("b", wide)):
        if _overlap(out, x):
            raise InputError("out", f"must not share memory with {name}")
    with torch.cuda.device(wide.device):
        _matmul[(triton.cdiv(n, _BLOCK) * m,)](small, wide, out, small.shape[1], n, BLOCK=_BLOCK)
    return out


def _grid(x: Any) -> tuple[int]:
    return (triton.cdiv(x.numel(), _BLOCK),)


def _tensor(name: str, x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        raise InputError(name, "must be a CUDA tensor like the other operands", type(x).__name__)
    if x.dtype != torch.int64 or not x.is_cuda:
        raise InputError(
            name, "must be a CUDA tensor of int64 (or a numpy array of uint64)", f"{x.dtype} on {x.device}"
        )
    if x.numel() == 0:
        raise InputError(name, "must not be empty", f"shape {tuple(x.shape)}")
    return x.contiguous()


def _check_range(name: str, x: Any) -> None:
    low, high = (int(value) for value in torch.aminmax(x))
    if low < 0 or high >= P:
        flat = x.reshape(-1)
        where = int(torch.nonzero((flat < 0) | (flat >= P))[0])
        raise InputError(name, "must hold values in [0, p) for p = 2^61−1", f"{int(flat[where])} at index {where}")


def _operands(named: dict[str, Any], checked: bool) -> list[Any]:
    tensors = {name: _tensor(name, x) for name, x in named.items()}
    if len({x.shape for x in tensors.values()}) > 1 or len({x.device for x in tensors.values()}) > 1:
        received = " and ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors.values())
        raise InputError(" and ".join(tensors), "must have the same shape and device", received)
    if checked:
        for name, x in tensors.items():
            _check_range(name, x)
    return list(tensors.values())


def _check_output(out: Any, shape: Any, device: Any) -> None:
    fine = isinstance(out, torch.Tensor) and out.dtype == torch.int64
    if not fine or tuple(out.shape) != tuple(shape) or out.device != device or not out.is_contiguous():
        received = f"{out.dtype} of shape {tuple(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise InputError("out", f"must be a contiguous int64 tensor of shape {tuple(shape)} on {device}", received)


def _overlap(x: Any, y: Any) -> bool:
    begin_x, begin_y = x.data_ptr(), y.data_ptr()
    return bool(begin_x < begin_y + 8 * y.numel() and begin_y < begin_x + 8 * x.numel())


def _result(out: Any, named: dict[str, Any]) -> Any:
    """`out`, or a new tensor; never one that overlaps an input in part."""
    x = next(iter(named.values()))
    if out is None:
        return torch.empty(x.shape, dtype=torch.int64, device=x.device)
    _check_output(out, x.shape, x.device)
    for name, tensor in named.items():
        same = tensor.data_ptr() == out.data_ptr() and tensor.is_contiguous()
        if (
            not same
            and tensor.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
            and _overlap(out, tensor)
        ):
            raise InputError("out", f"must be {name} itself or not overlap it")
    return out


def _run(operation: str, named: dict[str, Any], out: Any, checked: bool, a: int = 0) -> Any:
    operands = _operands(named, checked)
    result = _result(out, named)
    x, y, z = (operands + [operands[0]] * 2)[:3]
    with torch.cuda.device(x.device):
        _elementwise[_grid(x)](a, x, y, z, result, x.numel(), OP=operation, BLOCK=_BLOCK)
    return result
