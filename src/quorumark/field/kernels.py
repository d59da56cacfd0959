"""The field's kernels for the CPU: numba, explicit vectors, the GIL released, compiled once and cached.

First part: eight 64-bit lanes as one value inside numba code, and arithmetic mod p = 2^61−1 on them. Why explicit
vectors: numba leaves vectorising to LLVM, which gives up where the output may be one of the inputs (in-place axpy: 5×
slower) and where values must stay in registers across an inner loop (Newton stepping: 1.5–2× slower). LLVM lowers eight
lanes to one AVX-512, two AVX2 or four NEON registers; every machine gives the same bits, because all of it is integer
arithmetic (and one IEEE rounding in the codec). `load`/`store` move lanes, `add64` … `shr61` are plain 64-bit lane
operations, and `fold`, `canon`, `addmod`, `submod`, `mulmod` are the field's.

Second part: the kernels. Every one takes contiguous 1-D arrays (or 2-D where said) of field elements that the caller
has checked, and writes `out`, which may be one of the inputs. Lanes beyond the last multiple of eight go through a
small buffer, so that one body serves all of them. Nothing here allocates more than a few kilobytes (sharing: 576·K).

Both parts are one file because numba's cache watches the file that a kernel stands in, and no other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8
P = (1 << 61) - 1
_I64 = ir.IntType(64)
_VEC = ir.VectorType(_I64, LANES)
_F64 = ir.VectorType(ir.DoubleType(), LANES)


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="quorumark_u64x8")


lanes = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _VEC)


def _constant(value: int) -> Any:
    return ir.Constant(_VEC, [value] * LANES)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, to: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


@intrinsic
def load(_typing: Any, array: Any, index: Any) -> Any:
    """array[index : index+8] (uint64)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _VEC)
        return builder.load(pointer, align=8)

    return lanes(array, types.intp), code


@intrinsic
def store(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index : index+8] = value (uint64)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _VEC)
        builder.store(args[2], pointer, align=8)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), code


@intrinsic
def splat(_typing: Any, value: Any) -> Any:
    """The same uint64 in all lanes."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        first = builder.insert_element(ir.Constant(_VEC, ir.Undefined), args[0], ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(first, ir.Constant(_VEC, ir.Undefined), zeros)

    return lanes(types.uint64), code


def _lane_operation(name: str, emit: Any) -> Any:
    """An intrinsic (lanes, lanes) → lanes from one LLVM instruction."""

    def operation(_typing: Any, x: Any, y: Any) -> Any:
        return lanes(lanes, lanes), lambda _c, builder, _s, args: emit(builder, args[0], args[1])

    operation.__name__ = name
    return intrinsic(operation)


def _constant_operation(name: str, emit: Any) -> Any:
    """An intrinsic lanes → lanes from a few LLVM instructions with constants."""

    def operation(_typing: Any, x: Any) -> Any:
        return lanes(lanes), lambda _c, builder, _s, args: emit(builder, args[0])

    operation.__name__ = name
    return intrinsic(operation)


def _shift(instruction: str, bits: int) -> Any:
    return lambda b, x: getattr(b, instruction)(x, _constant(bits))


add64 = _lane_operation("add64", lambda b, x, y: b.add(x, y))
sub64 = _lane_operation("sub64", lambda b, x, y: b.sub(x, y))
# the masks tell LLVM that the upper halves are zero, for the 32×32-bit multiply instruction; they cost nothing
mul32 = _lane_operation(
    "mul32", lambda b, x, y: b.mul(b.and_(x, _constant(2**32 - 1)), b.and_(y, _constant(2**32 - 1)))
)
min64 = _lane_operation("min64", lambda b, x, y: b.select(b.icmp_unsigned("<", x, y), x, y))
max64 = _lane_operation("max64", lambda b, x, y: b.select(b.icmp_unsigned(">", x, y), x, y))
zero_where_p = _constant_operation(
    "zero_where_p", lambda b, x: b.select(b.icmp_unsigned("==", x, _constant(P)), _constant(0), x)
)
and64 = _lane_operation("and64", lambda b, x, y: b.and_(x, y))
least_signed = _lane_operation("least_signed", lambda b, x, y: b.select(b.icmp_signed("<", x, y), x, y))
most_signed = _lane_operation("most_signed", lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y))
low61 = _constant_operation("low61", lambda b, x: b.and_(x, _constant(P)))
low32 = _constant_operation("low32", lambda b, x: b.and_(x, _constant(2**32 - 1)))
low31 = _constant_operation("low31", lambda b, x: b.and_(x, _constant(2**31 - 1)))
low30 = _constant_operation("low30", lambda b, x: b.and_(x, _constant(2**30 - 1)))
low29 = _constant_operation("low29", lambda b, x: b.and_(x, _constant(2**29 - 1)))
shr61 = _constant_operation("shr61", _shift("lshr", 61))
shr32 = _constant_operation("shr32", _shift("lshr", 32))
shr31 = _constant_operation("shr31", _shift("lshr", 31))
shr30 = _constant_operation("shr30", _shift("lshr", 30))
shr29 = _constant_operation("shr29", _shift("lshr", 29))
shl32 = _constant_operation("shl32", _shift("shl", 32))
shl31 = _constant_operation("shl31", _shift("shl", 31))
shl3 = _constant_operation("shl3", _shift("shl", 3))
shl1 = _constant_operation("shl1", _shift("shl", 1))
minus_p = _constant_operation("minus_p", lambda b, x: b.sub(x, _constant(P)))
p_minus = _constant_operation("p_minus", lambda b, x: b.sub(_constant(P), x))


@njit(forceinline=True)
def fold(x: Any) -> Any:
    """x mod p up to a small excess: 2^61 ≡ 1, so the top three bits are added to the rest (≤ p+7)."""
    return add64(low61(x), shr61(x))


@njit(forceinline=True)
def canon(x: Any) -> Any:
    """x in [0, 2p) → x mod p in [0, p). Below p the subtraction wraps to something huge."""
    return min64(x, minus_p(x))


@njit(forceinline=True)
def addmod(x: Any, y: Any) -> Any:
    return canon(add64(x, y))


@njit(forceinline=True)
def submod(x: Any, y: Any) -> Any:
    return canon(add64(x, p_minus(y)))


@njit(forceinline=True)
def product(xh: Any, xl: Any, yh: Any, yl: Any) -> Any:
    """x·y mod p, below 2^63, from 32-bit halves x = xh·2^32 + xl with xh < 2^29.

    x·y = hh·2^64 + mid·2^32 + ll with ll < 2^64, mid < 2^62, hh < 2^58, and mod p
    2^64 ≡ 8, mid·2^32 ≡ (mid >> 29) + (mid mod 2^29)·2^32, ll ≡ (ll >> 61) + (ll mod 2^61).
    The terms are below 2^61, 2^33 + 2^61 and 2^61 + 8: together below 2^63.
    """
    ll = mul32(xl, yl)
    mid = add64(mul32(xl, yh), mul32(xh, yl))
    hh = mul32(xh, yh)
    middle = add64(shr29(mid), shl32(low29(mid)))
    return add64(add64(fold(ll), middle), shl3(hh))


@njit(forceinline=True)
def mulmod(x: Any, y: Any) -> Any:
    return canon(fold(product(shr32(x), low32(x), shr32(y), low32(y))))


def _rounded(context: Any, builder: Any, array_type: Any, array: Any, index: Any, scale: Any) -> Any:
    """round_half_even(array[index : index+8]·scale) as field elements, for an array of floats."""
    single = array_type.dtype == types.float32
    kind = ir.VectorType(ir.FloatType(), LANES) if single else _F64
    x = builder.load(_pointer(context, builder, array_type, array, index, kind), align=4 if single else 8)
    if single:
        x = builder.fpext(x, _F64)
    whole = builder.fptosi(_rint(builder, builder.fmul(x, _splat_double(builder, scale))), _VEC)
    # v < 0 becomes v + p: the sign, spread over all bits, selects p
    return builder.add(whole, builder.and_(builder.ashr(whole, _constant(63)), _constant(P)))


def _splat_double(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(_F64, ir.Undefined), value, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(_F64, ir.Undefined), zeros)


def _of_doubles(builder: Any, name: str, x: Any) -> Any:
    function = ir.FunctionType(_F64, [_F64])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.v{LANES}f64"), [x])


def _rint(builder: Any, x: Any) -> Any:
    """To nearest, ties to even, in the default mode that every thread starts with."""
    return _of_doubles(builder, "rint", x)


def _signed(builder: Any, x: Any) -> Any:
    """x − p where x > p/2."""
    negative = builder.icmp_unsigned(">", x, _constant(P // 2))
    return builder.select(negative, builder.sub(x, _constant(P)), x)


@intrinsic
def encode_lanes(_typing: Any, values: Any, index: Any, scale: Any) -> Any:
    """round_half_even(values[index : index+8]·scale) as field elements; |product| must be below 2^60."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _rounded(context, builder, signature.args[0], *args)

    return lanes(values, types.intp, types.float64), code


@intrinsic
def load_encoded(_typing: Any, values: Any, index: Any) -> Any:
    """E of values[index : index+8]: floats, or E of them already (uint64)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0].dtype == types.uint64:
            pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _VEC)
            return builder.load(pointer, align=8)
        scale = ir.Constant(ir.DoubleType(), 2.0**40)
        return _rounded(context, builder, signature.args[0], args[0], args[1], scale)

    return lanes(values, types.intp), code


@intrinsic
def unit_lanes(_typing: Any, x: Any, weight: Any, scale: Any) -> Any:
    """|round(round(v·weight)·scale)| for the signed v that x stands for, both to nearest with ties to even."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = builder.sitofp(_signed(builder, args[0]), _F64)
        for factor in args[1:]:
            value = _rint(builder, builder.fmul(value, _splat_double(builder, factor)))
        return builder.fptosi(_of_doubles(builder, "fabs", value), _VEC)

    return lanes(lanes, types.float64, types.float64), code


@intrinsic
def move_lanes(_typing: Any, values: Any, index: Any, before: Any, factor: Any) -> Any:
    """The bits of (values[index : index+8]·2^40 − before)·factor, in doubles, for floats and signed integers."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        single = signature.args[0].dtype == types.float32
        kind = ir.VectorType(ir.FloatType() if single else ir.DoubleType(), LANES)
        value = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], kind), align=4)
        value = builder.fpext(value, _F64) if single else value
        scaled = builder.fmul(value, ir.Constant(_F64, [2.0**40] * LANES))
        moved = builder.fsub(scaled, builder.sitofp(args[2], _F64))
        return builder.bitcast(builder.fmul(moved, _splat_double(builder, args[3])), _VEC)

    return lanes(values, types.intp, lanes, types.float64), code


@intrinsic
def add_scaled(_typing: Any, bits: Any, extra: Any, scale: Any) -> Any:
    """The bits of x + extra·scale, for the bits of doubles x and signed integers."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = builder.fmul(builder.sitofp(args[1], _F64), _splat_double(builder, args[2]))
        return builder.bitcast(builder.fadd(builder.bitcast(args[0], _F64), value), _VEC)

    return lanes(lanes, lanes, types.float64), code


@intrinsic
def add_double(_typing: Any, bits: Any, value: Any) -> Any:
    """The bits of x + value, for the bits of doubles x."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        moved = builder.fadd(builder.bitcast(args[0], _F64), _splat_double(builder, args[1]))
        return builder.bitcast(moved, _VEC)

    return lanes(lanes, types.float64), code


@intrinsic
def negate_where(_typing: Any, x: Any, flags: Any, index: Any) -> Any:
    """p − x where flags[index : index+8] (booleans), else x."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes_ = ir.VectorType(ir.IntType(8), LANES)
        pointer = _pointer(context, builder, signature.args[1], args[1], args[2], bytes_)
        chosen = builder.icmp_unsigned("!=", builder.load(pointer, align=1), ir.Constant(bytes_, [0] * LANES))
        return builder.select(chosen, builder.sub(_constant(P), args[0]), args[0])

    return lanes(lanes, flags, types.intp), code


@intrinsic
def signed_lanes(_typing: Any, x: Any) -> Any:
    """lift(x) = x − p for x > p/2, as signed integers."""
    return lanes(lanes), lambda _c, builder, _s, args: _signed(builder, args[0])


def _shift_by(name: str, instruction: str) -> Any:
    """An intrinsic that shifts all lanes by as many bits, 0 to 63."""

    def operation(_typing: Any, x: Any, bits: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            first = builder.insert_element(ir.Constant(_VEC, ir.Undefined), args[1], ir.IntType(32)(0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            bits_of_all = builder.shuffle_vector(first, ir.Constant(_VEC, ir.Undefined), zeros)
            return getattr(builder, instruction)(args[0], bits_of_all)

        return lanes(lanes, types.int64), code

    operation.__name__ = name
    return intrinsic(operation)


shl_by = _shift_by("shl_by", "shl")
shr_signed_by = _shift_by("shr_signed_by", "ashr")


@intrinsic
def store_scaled(_typing: Any, out: Any, index: Any, x: Any, scale: Any) -> Any:
    """out[index : index+8] = x·scale for signed integers x, in out's own precision; one rounding."""
    single = out.dtype == types.float32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        float_type = ir.FloatType() if single else ir.DoubleType()
        kind = ir.VectorType(float_type, LANES)
        value = builder.sitofp(args[2], kind)
        factor = builder.fptrunc(args[3], float_type) if single else args[3]
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), factor, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        factors = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], kind)
        builder.store(builder.fmul(value, factors), pointer, align=4 if single else 8)
        return context.get_dummy_value()

    return types.void(out, types.intp, lanes, types.float64), code


@njit(forceinline=True)
def decode_lanes(out: Any, index: Any, x: Any, scale: Any) -> None:
    """out[index : index+8] = lift(x)·scale, where lift(x) = x − p for x > p/2; one rounding."""
    store_scaled(out, index, signed_lanes(x), scale)


# --- kernels ----------------------------------------------------------------------------------------------


def inlined(function: Any) -> Any:
    """A part of kernels."""
    return njit(forceinline=True)(function)


def kernel(function: Any) -> Any:
    """Compiles when first called, and keeps the result on disk where numba finds a place for it.

    In a container where neither the package's folder nor the home can be written, and NUMBA_CACHE_DIR names no other,
    kernels are compiled anew in each process.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return njit(nogil=True)(function)


_GROUP = 64  # columns whose shares are gathered before they are written out
_BLOCK = 256  # elements that a power chain works on at a time: 4 buffers of 2 KiB stay in the first-level cache


@njit(forceinline=True)
def _load_tail(array: Any, start: int, buffer: Any) -> Any:
    for i in range(array.size - start):
        buffer[i] = array[start + i]
    return load(buffer, 0)


@njit(forceinline=True)
def _store_tail(array: Any, start: int, value: Any, buffer: Any) -> None:
    store(buffer, 0, value)
    for i in range(array.size - start):
        array[start + i] = buffer[i]


@kernel
def add(x: Any, y: Any, out: Any) -> None:
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        store(out, i, addmod(load(x, i), load(y, i)))
    if full < out.size:
        a, b = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        _store_tail(out, full, addmod(_load_tail(x, full, a), _load_tail(y, full, b)), a)


@kernel
def sub(x: Any, y: Any, out: Any) -> None:
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        store(out, i, submod(load(x, i), load(y, i)))
    if full < out.size:
        a, b = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        _store_tail(out, full, submod(_load_tail(x, full, a), _load_tail(y, full, b)), a)


@kernel
def mul(x: Any, y: Any, out: Any) -> None:
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        store(out, i, mulmod(load(x, i), load(y, i)))
    if full < out.size:
        a, b = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        _store_tail(out, full, mulmod(_load_tail(x, full, a), _load_tail(y, full, b)), a)


@kernel
def scale(a: Any, x: Any, out: Any) -> None:
    """out = a·x for one field element a."""
    factor = splat(a)
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        store(out, i, mulmod(factor, load(x, i)))
    if full < out.size:
        buffer = np.zeros(8, np.uint64)
        _store_tail(out, full, mulmod(factor, _load_tail(x, full, buffer)), buffer)


@njit(forceinline=True)
def _muladd(x: Any, y: Any, z: Any) -> Any:
    """x·y + z mod p: the product is below 2^63, so z fits on top of it before the one reduction."""
    lazy = product(shr32(x), low32(x), shr32(y), low32(y))
    return canon(fold(add64(lazy, z)))


@kernel
def axpy(a: Any, x: Any, y: Any, out: Any) -> None:
    """out = y + a·x for one field element a."""
    factor = splat(a)
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        store(out, i, _muladd(factor, load(x, i), load(y, i)))
    if full < out.size:
        b, c = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        _store_tail(out, full, _muladd(factor, _load_tail(x, full, b), _load_tail(y, full, c)), b)


@kernel
def muladd(a: Any, x: Any, y: Any, out: Any) -> None:
    """out = y + a ⊙ x for a vector a."""
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        store(out, i, _muladd(load(a, i), load(x, i), load(y, i)))
    if full < out.size:
        b, c, d = np.zeros(8, np.uint64), np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        value = _muladd(_load_tail(a, full, b), _load_tail(x, full, c), _load_tail(y, full, d))
        _store_tail(out, full, value, b)


@kernel
def add_products(a: Any, x: Any, y: Any, flags: Any, out: Any) -> None:
    """out += ±a·x ⊙ y for one field element a, with the minus where `flags` (booleans, or none of them)."""
    factor, flagged = splat(a), flags.size > 0
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        z = mulmod(load(x, i), load(y, i))
        if flagged:
            z = negate_where(z, flags, i)
        store(out, i, _muladd(factor, z, load(out, i)))
    if full < out.size:
        b, c, d = np.zeros(8, np.uint64), np.zeros(8, np.uint64), np.zeros(8, np.bool_)
        z = mulmod(_load_tail(x, full, b), _load_tail(y, full, c))
        if flagged:
            d[: out.size - full] = flags[full:]
            z = negate_where(z, d, 0)
        _store_tail(out, full, _muladd(factor, z, _load_tail(out, full, b)), b)


@kernel
def dot(x: Any, y: Any, sums: Any) -> None:
    """sums[4, 8] with Σ x·y = Σ_lanes (s0 + s1·2^32 + s2·2^64 + s3·2^96): exact, for up to 2^31 elements.

    x·y = ll + mid·2^32 + hh·2^64 (see `product`). Each accumulator only ever adds numbers below 2^33.
    """
    zero = splat(np.uint64(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    full = x.size - x.size % 8
    a, b = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
    for i in range(0, x.size, 8):
        if i < full:
            xi, yi = load(x, i), load(y, i)
        else:
            xi, yi = _load_tail(x, full, a), _load_tail(y, full, b)
        xh, xl, yh, yl = shr32(xi), low32(xi), shr32(yi), low32(yi)
        ll = mul32(xl, yl)
        mid = add64(mul32(xl, yh), mul32(xh, yl))
        top = add64(mul32(xh, yh), shr32(mid))
        s0 = add64(s0, low32(ll))
        s1 = add64(s1, add64(shr32(ll), low32(mid)))
        s2 = add64(s2, low32(top))
        s3 = add64(s3, shr32(top))
    store(sums, 0, s0)
    store(sums, 8, s1)
    store(sums, 16, s2)
    store(sums, 24, s3)


@kernel
def maximum(x: Any) -> Any:
    """The largest word, to find what is not a field element in one pass."""
    best = splat(np.uint64(0))
    full = x.size - x.size % 8
    buffer = np.zeros(8, np.uint64)
    for i in range(0, full, 8):
        best = max64(best, load(x, i))
    if full < x.size:
        best = max64(best, _load_tail(x, full, buffer))
    store(buffer, 0, best)
    return buffer.max()


@njit(forceinline=True)
def _square(buffer: Any, times: int) -> None:
    for _ in range(times):
        for i in range(0, _BLOCK, 8):
            x = load(buffer, i)
            store(buffer, i, mulmod(x, x))


@njit(forceinline=True)
def _multiply(x: Any, y: Any) -> None:
    """x *= y, block by block."""
    for i in range(0, _BLOCK, 8):
        store(x, i, mulmod(load(x, i), load(y, i)))


@njit(forceinline=True)
def _copy(source: Any, target: Any) -> None:
    for i in range(_BLOCK):
        target[i] = source[i]


@njit(forceinline=True)
def _power(x: Any, e: Any, saved: Any) -> None:
    """e = x^(2^59 − 1), by e(2n) = e(n)^(2^n)·e(n) and e(n+1) = e(n)²·x, where e(n) = x^(2^n − 1)."""
    _copy(x, e)  # n = 1
    n = 1
    for bit in (1, 1, 0, 1, 1):  # 59 = 0b111011: after the leading one
        _copy(e, saved)
        _square(e, n)
        _multiply(e, saved)
        n *= 2
        if bit == 1:
            _square(e, 1)
            _multiply(e, x)
            n += 1


@kernel
def inverse(x: Any, out: Any) -> None:
    """out = x^(p−2) = (x^(2^59−1))^4·x, since p − 2 = 4·(2^59 − 1) + 1. Zero stays zero."""
    block, e, saved = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    for start in range(0, x.size, _BLOCK):
        n = min(_BLOCK, x.size - start)
        block[:n] = x[start : start + n]
        block[n:] = np.uint64(1)
        _power(block, e, saved)
        _square(e, 2)
        _multiply(e, block)
        out[start : start + n] = e[:n]


@kernel
def inverse_sqrt(x: Any, out: Any) -> int:
    """out = x^((p−3)/4) = x^(2^59−1), and how many elements it is not an inverse root of (x·out² ≠ 1)."""
    block, e, saved = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    wrong = 0
    for start in range(0, x.size, _BLOCK):
        n = min(_BLOCK, x.size - start)
        block[:n] = x[start : start + n]
        block[n:] = np.uint64(1)
        _power(block, e, saved)
        out[start : start + n] = e[:n]
        _square(e, 1)
        _multiply(e, block)
        for i in range(n):
            wrong += e[i] != np.uint64(1)
    return wrong


@njit(forceinline=True)
def _reduce_lazy(low: Any, middle: Any, high: Any) -> Any:
    """low + middle·2^31 + high·2^62 mod p, at most p + 7; each below 2^64, high below 2^62."""
    spread = add64(shr30(middle), shl31(low30(middle)))
    return fold(add64(add64(fold(low), spread), fold(shl1(high))))


@kernel
def matmul(low: Any, high: Any, b: Any, out: Any) -> None:
    """out[m, n] = A·B for a small A = high·2^31 + low and a wide B[k, n], two rows of A at a time.

    The caller pads with zeros: m to a multiple of two, k of four, n of eight. With 31-bit low halves
    (x = x1·2^31 + x0, x1 < 2^30) four products fit the 64-bit sums of x0·y0, x0·y1 + x1·y0 and x1·y1, since
    4·(2^31−1)² and 8·(2^31−1)(2^30−1) are below 2^64: one reduction per four products.
    """
    m, k = low.shape
    n = b.shape[1]
    wide, result = b.reshape(-1), out.reshape(-1)
    zero = splat(np.uint64(0))
    for column in range(0, n, 8):
        for row in range(0, m, 2):
            even, odd = zero, zero
            for start in range(0, k, 4):
                l0, m0, h0, l1, m1, h1 = zero, zero, zero, zero, zero, zero
                for i in range(start, start + 4):
                    x = load(wide, i * n + column)
                    x0, x1 = low31(x), shr31(x)
                    y0, y1 = splat(low[row, i]), splat(high[row, i])
                    l0 = add64(l0, mul32(y0, x0))
                    m0 = add64(m0, add64(mul32(y0, x1), mul32(y1, x0)))
                    h0 = add64(h0, mul32(y1, x1))
                    y0, y1 = splat(low[row + 1, i]), splat(high[row + 1, i])
                    l1 = add64(l1, mul32(y0, x0))
                    m1 = add64(m1, add64(mul32(y0, x1), mul32(y1, x0)))
                    h1 = add64(h1, mul32(y1, x1))
                even = fold(add64(even, _reduce_lazy(l0, m0, h0)))
                odd = fold(add64(odd, _reduce_lazy(l1, m1, h1)))
            store(result, row * n + column, canon(even))
            store(result, (row + 1) * n + column, canon(odd))


@kernel
def newton_shares(secret: Any, words: Any, threshold: int, members: int, out: Any, first: int) -> None:
    """out[k, first : first+n] = f(k+1) for f(x) = secret + Σ_j r_j·C(x, j), by additions only.

    `words` holds t−1 rows of n random 64-bit words; r_j is row j−1 mod 2^61, with p counted as 0. C(x, j) has
    differences Δ^i C(0, j) = [i = j], so (secret, r_1, …, r_{t−1}) is the difference table of f at 0, and
    one step x → x+1 is d_j += d_{j+1}.

    Columns are worked in groups whose shares are gathered in `group` and written out row by row: K scattered
    cache lines per eight columns would cost more than the additions.
    """
    n = secret.size
    group = np.empty((members, _GROUP + 8), np.uint64)  # + 8: rows a power of two apart would share cache sets
    gathered, flat = group.reshape(-1), out.reshape(-1)
    table = np.zeros(threshold * 8, np.uint64)
    for start in range(0, n, _GROUP):
        width = min(_GROUP, n - start)
        for column in range(0, width, 8):
            at = start + column
            if at + 8 <= n:
                store(table, 0, load(secret, at))
                for j in range(1, threshold):
                    store(table, j * 8, low61(load(words, (j - 1) * n + at)))
            else:
                for i in range(n - at):
                    table[i] = secret[at + i]
                    for j in range(1, threshold):
                        table[j * 8 + i] = words[(j - 1) * n + at + i] & np.uint64(P)
            _newton_steps(table, threshold, members, gathered, column, group.shape[1])
        for member in range(members):
            source, target = member * group.shape[1], member * out.shape[1] + first + start
            for i in range(0, width - 7, 8):
                store(flat, target + i, load(gathered, source + i))
            for i in range(width - width % 8, width):
                flat[target + i] = gathered[source + i]


@njit(forceinline=True)
def _newton_steps(table: Any, threshold: int, members: int, out: Any, at: int, stride: int) -> None:
    """Steps eight difference tables through the points 1..K and writes their values to out[at + k·stride].

    Four steps go in one sweep from the highest difference down: step i+1 at j needs step i at j and j+1, and those
    are still in registers. Sums of two steps stay below 4p + 16 before a `fold`, which leaves at most p + 4: no
    overflow, however many sweeps.
    """
    zero = splat(np.uint64(0))
    for _ in range(members // 4):
        above0, above1, above2, above3 = zero, zero, zero, zero  # at j+1, after 0, 1, 2, 3 steps
        for j in range(threshold - 1, -1, -1):
            now = load(table, j * 8)
            one = add64(now, above0)
            two = fold(add64(one, above1))
            three = add64(two, above2)
            store(table, j * 8, fold(add64(three, above3)))
            above0, above1, above2, above3 = now, one, two, three
        store(out, at, canon(fold(above1)))
        store(out, at + stride, canon(above2))
        store(out, at + 2 * stride, canon(fold(above3)))
        store(out, at + 3 * stride, canon(load(table, 0)))
        at += 4 * stride
    for _ in range(members % 4):
        for j in range(threshold - 1):
            store(table, j * 8, fold(add64(load(table, j * 8), load(table, j * 8 + 8))))
        store(out, at, canon(load(table, 0)))
        at += stride


@kernel
def reduce_words(words: Any, out: Any) -> None:
    """Random 64-bit words to field elements: the low 61 bits, with p counted as 0."""
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        store(out, i, zero_where_p(low61(load(words, i))))
    if full < out.size:
        buffer = np.zeros(8, np.uint64)
        _store_tail(out, full, zero_where_p(low61(_load_tail(words, full, buffer))), buffer)


@kernel
def add_words(words: Any, out: Any, negate: bool) -> None:
    """out ± element(word), fused: the key stream is never stored as elements."""
    full = out.size - out.size % 8
    if negate:
        for i in range(0, full, 8):
            store(out, i, canon(add64(load(out, i), p_minus(low61(load(words, i))))))
    else:
        for i in range(0, full, 8):
            store(out, i, canon(add64(load(out, i), low61(load(words, i)))))
    for i in range(full, out.size):
        word = words[i] & np.uint64(P)
        total = out[i] + (np.uint64(P) - word if negate else word)
        out[i] = total if total < np.uint64(P) else total - np.uint64(P)


@kernel
def within(values: Any, limit: float) -> bool:
    """Whether every |value| is at most the limit; NaN and infinity are not."""
    fine = True
    for i in range(values.size):
        fine &= abs(values[i]) <= limit
    return fine


@njit(forceinline=True)
def _encode_tail(values: Any, start: int, scale: float) -> Any:
    buffer = np.zeros(8, values.dtype)
    for i in range(values.size - start):
        buffer[i] = values[start + i]
    return encode_lanes(buffer, 0, scale)


@kernel
def encode(values: Any, scale: float, out: Any) -> None:
    """out = round(values·scale), negative numbers as p − |·|."""
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        store(out, i, encode_lanes(values, i, scale))
    if full < out.size:
        _store_tail(out, full, _encode_tail(values, full, scale), np.zeros(8, np.uint64))


@kernel
def encode_axpy(values: Any, scale: float, a: Any, x: Any, out: Any) -> None:
    """out = round(values·scale) + a·x."""
    factor = splat(a)
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        store(out, i, _muladd(factor, load(x, i), encode_lanes(values, i, scale)))
    if full < out.size:
        buffer = np.zeros(8, np.uint64)
        value = _muladd(factor, _load_tail(x, full, buffer), _encode_tail(values, full, scale))
        _store_tail(out, full, value, buffer)


@kernel
def decode(x: Any, scale: float, out: Any) -> None:
    """out = lift(x)·scale in out's own precision, where lift(x) = x − p above p/2."""
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        decode_lanes(out, i, load(x, i), scale)
    if full < out.size:
        buffer, result = np.zeros(8, np.uint64), np.zeros(8, out.dtype)
        decode_lanes(result, 0, _load_tail(x, full, buffer), scale)
        for i in range(out.size - full):
            out[full + i] = result[i]


@kernel
def round_trip(values: Any, scale: float, out: Any) -> None:
    """out = decode(encode(values)), of one type with the values, without the field elements in between."""
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        decode_lanes(out, i, encode_lanes(values, i, scale), 1 / scale)
    if full < out.size:
        result = np.zeros(8, out.dtype)
        decode_lanes(result, 0, _encode_tail(values, full, scale), 1 / scale)
        for i in range(out.size - full):
            out[full + i] = result[i]


# --- exact sums of squares (of the signed numbers that field elements stand for) ---------------------------


@njit(forceinline=True)
def _magnitude(x: Any) -> Any:
    """|v| for the signed v that x stands for: below 2^60."""
    return min64(x, p_minus(x))


@njit(forceinline=True)
def _square_parts(v: Any) -> Any:
    """v² = s0 + s1·2^32 + s2·2^64 + s3·2^96 for v < 2^60, each part below 2^33: 2^31 of them add up in a word."""
    h, low = shr32(v), low32(v)
    ll, mid = mul32(low, low), shl1(mul32(low, h))
    top = add64(mul32(h, h), shr32(mid))
    return low32(ll), add64(shr32(ll), low32(mid)), low32(top), shr32(top)


@kernel
def squares(x: Any, sums: Any) -> None:
    """sums[4, 8]: Σ v², in the parts of `_square_parts`, eight lanes each."""
    s0 = s1 = s2 = s3 = splat(np.uint64(0))
    full = x.size - x.size % 8
    buffer = np.zeros(8, np.uint64)
    for i in range(0, x.size, 8):
        v = load(x, i) if i < full else _load_tail(x, full, buffer)
        p0, p1, p2, p3 = _square_parts(_magnitude(v))
        s0, s1, s2, s3 = add64(s0, p0), add64(s1, p1), add64(s2, p2), add64(s3, p3)
    store(sums, 0, s0)
    store(sums, 8, s1)
    store(sums, 16, s2)
    store(sums, 24, s3)


_COLUMNS = 2048  # columns worked on at a time: their sums, 12 words each, stay in the second-level cache


@njit(forceinline=True)
def add_square(v: Any, by_row: Any, row: int, by_column: Any, column: int, stride: int) -> None:
    """v² into the sums of a row (eight lanes of each part) and of eight columns, for v < 2^60."""
    p0, p1, p2, p3 = _square_parts(v)
    store(by_row, row, add64(load(by_row, row), p0))
    store(by_row, row + 8, add64(load(by_row, row + 8), p1))
    store(by_row, row + 16, add64(load(by_row, row + 16), p2))
    store(by_row, row + 24, add64(load(by_row, row + 24), p3))
    store(by_column, column, add64(load(by_column, column), p0))
    store(by_column, column + stride, add64(load(by_column, column + stride), p1))
    store(by_column, column + 2 * stride, add64(load(by_column, column + 2 * stride), p2))
    store(by_column, column + 3 * stride, add64(load(by_column, column + 3 * stride), p3))


@kernel
def moments(now: Any, before: Any, width: int, by_row: Any, by_column: Any) -> None:
    """Σ v² for v = now, before and now − before, along each row and each column of matrices with `width` columns.

    by_row[rows, 12] and by_column[12, stride], flat, zero at first, stride = width rounded up to a multiple of 8;
    entries 4k … 4k+3 are the parts of the k-th of the three sums. Exact for up to 2^31 elements.
    """
    rows = now.size // width
    stride = by_column.size // 12
    a, b, lanes_ = np.zeros(8, np.uint64), np.zeros(8, np.uint64), np.zeros(96, np.uint64)
    for first in range(0, width, _COLUMNS):
        last = min(first + _COLUMNS, width)
        full = last - (last - first) % 8
        for i in range(rows):
            lanes_[:] = 0
            for j in range(first, last, 8):
                at = i * width + j
                if j < full:
                    x, y = load(now, at), load(before, at)
                else:
                    end = i * width + last
                    x, y = _load_tail(now[:end], at, a), _load_tail(before[:end], at, b)
                add_square(_magnitude(x), lanes_, 0, by_column, j, stride)
                add_square(_magnitude(y), lanes_, 32, by_column, 4 * stride + j, stride)
                add_square(_magnitude(submod(x, y)), lanes_, 64, by_column, 8 * stride + j, stride)
            for k in range(12):
                for lane in range(8):
                    by_row[12 * i + k] += lanes_[8 * k + lane]
