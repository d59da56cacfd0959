"""Eight 64-bit lanes as one value inside numba code, and arithmetic mod p = 2^61−1 on them.

Why explicit vectors: numba leaves vectorising to LLVM, which gives up where the output may be one of the
inputs (in-place axpy: 5× slower) and where values must stay in registers across an inner loop (Newton
stepping: 1.5–2× slower). LLVM lowers eight lanes to one AVX-512, two AVX2 or four NEON registers; every
machine gives the same bits, because all of it is integer arithmetic (and one IEEE rounding in the codec).

Only `_cpu` uses this module. Names: `load`/`store` move lanes, `add64` … `shr` are plain 64-bit lane
operations, and `fold`, `canon`, `addmod`, `submod`, `mulmod` are the field's.
"""

from __future__ import annotations

from typing import Any

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


@intrinsic
def encode(_typing: Any, values: Any, index: Any, scale: Any) -> Any:
    """round_half_even(values[index : index+8]·scale) as field elements; |product| must be below 2^60."""
    single = values.dtype == types.float32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.FloatType(), LANES) if single else _F64
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], kind)
        x = builder.load(pointer, align=4 if single else 8)
        if single:
            x = builder.fpext(x, _F64)
        factor = builder.insert_element(ir.Constant(_F64, ir.Undefined), args[2], ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        factor = builder.shuffle_vector(factor, ir.Constant(_F64, ir.Undefined), zeros)
        # rint: to nearest, ties to even, in the default mode that every thread starts with
        rounding = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_F64, [_F64]), f"llvm.rint.v{LANES}f64"
        )
        whole = builder.fptosi(builder.call(rounding, [builder.fmul(x, factor)]), _VEC)
        # v < 0 becomes v + p: the sign, spread over all bits, selects p
        return builder.add(whole, builder.and_(builder.ashr(whole, _constant(63)), _constant(P)))

    return lanes(values, types.intp, types.float64), code


@intrinsic
def decode(_typing: Any, out: Any, index: Any, x: Any, scale: Any) -> Any:
    """out[index : index+8] = lift(x)·scale, where lift(x) = x − p for x > p/2; one rounding."""
    single = out.dtype == types.float32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        float_type = ir.FloatType() if single else ir.DoubleType()
        kind = ir.VectorType(float_type, LANES)
        negative = builder.icmp_unsigned(">", args[2], _constant(P // 2))
        lifted = builder.select(negative, builder.sub(args[2], _constant(P)), args[2])
        value = builder.sitofp(lifted, kind)
        factor = builder.fptrunc(args[3], float_type) if single else args[3]
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), factor, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        factors = builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], kind)
        builder.store(builder.fmul(value, factors), pointer, align=4 if single else 8)
        return context.get_dummy_value()

    return types.void(out, types.intp, lanes, types.float64), code
