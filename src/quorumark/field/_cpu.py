"""The field's kernels for the CPU: numba, explicit vectors, the GIL released, compiled once and cached.

Every kernel takes contiguous 1-D arrays (or 2-D where said) of field elements that the caller has checked,
and writes `out`, which may be one of the inputs. Lanes beyond the last multiple of eight go through a small
buffer, so that one body serves all of them. Nothing here allocates more than a few kilobytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from quorumark.field import _vector as v


def _kernel(function: Any) -> Any:
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
    return v.load(buffer, 0)


@njit(forceinline=True)
def _store_tail(array: Any, start: int, value: Any, buffer: Any) -> None:
    v.store(buffer, 0, value)
    for i in range(array.size - start):
        array[start + i] = buffer[i]


@_kernel
def add(x: Any, y: Any, out: Any) -> None:
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.store(out, i, v.addmod(v.load(x, i), v.load(y, i)))
    if full < out.size:
        a, b = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        _store_tail(out, full, v.addmod(_load_tail(x, full, a), _load_tail(y, full, b)), a)


@_kernel
def sub(x: Any, y: Any, out: Any) -> None:
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.store(out, i, v.submod(v.load(x, i), v.load(y, i)))
    if full < out.size:
        a, b = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        _store_tail(out, full, v.submod(_load_tail(x, full, a), _load_tail(y, full, b)), a)


@_kernel
def mul(x: Any, y: Any, out: Any) -> None:
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.store(out, i, v.mulmod(v.load(x, i), v.load(y, i)))
    if full < out.size:
        a, b = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        _store_tail(out, full, v.mulmod(_load_tail(x, full, a), _load_tail(y, full, b)), a)


@_kernel
def scale(a: Any, x: Any, out: Any) -> None:
    """out = a·x for one field element a."""
    factor = v.splat(a)
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.store(out, i, v.mulmod(factor, v.load(x, i)))
    if full < out.size:
        buffer = np.zeros(8, np.uint64)
        _store_tail(out, full, v.mulmod(factor, _load_tail(x, full, buffer)), buffer)


@njit(forceinline=True)
def _muladd(x: Any, y: Any, z: Any) -> Any:
    """x·y + z mod p: the product is below 2^63, so z fits on top of it before the one reduction."""
    lazy = v.product(v.shr32(x), v.low32(x), v.shr32(y), v.low32(y))
    return v.canon(v.fold(v.add64(lazy, z)))


@_kernel
def axpy(a: Any, x: Any, y: Any, out: Any) -> None:
    """out = y + a·x for one field element a."""
    factor = v.splat(a)
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.store(out, i, _muladd(factor, v.load(x, i), v.load(y, i)))
    if full < out.size:
        b, c = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        _store_tail(out, full, _muladd(factor, _load_tail(x, full, b), _load_tail(y, full, c)), b)


@_kernel
def muladd(a: Any, x: Any, y: Any, out: Any) -> None:
    """out = y + a ⊙ x for a vector a."""
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.store(out, i, _muladd(v.load(a, i), v.load(x, i), v.load(y, i)))
    if full < out.size:
        b, c, d = np.zeros(8, np.uint64), np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        value = _muladd(_load_tail(a, full, b), _load_tail(x, full, c), _load_tail(y, full, d))
        _store_tail(out, full, value, b)


@_kernel
def dot(x: Any, y: Any, sums: Any) -> None:
    """sums[4, 8] with Σ x·y = Σ_lanes (s0 + s1·2^32 + s2·2^64 + s3·2^96): exact, for up to 2^31 elements.

    x·y = ll + mid·2^32 + hh·2^64 (see `product`). Each accumulator only ever adds numbers below 2^33.
    """
    zero = v.splat(np.uint64(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    full = x.size - x.size % 8
    a, b = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
    for i in range(0, x.size, 8):
        if i < full:
            xi, yi = v.load(x, i), v.load(y, i)
        else:
            xi, yi = _load_tail(x, full, a), _load_tail(y, full, b)
        xh, xl, yh, yl = v.shr32(xi), v.low32(xi), v.shr32(yi), v.low32(yi)
        ll = v.mul32(xl, yl)
        mid = v.add64(v.mul32(xl, yh), v.mul32(xh, yl))
        top = v.add64(v.mul32(xh, yh), v.shr32(mid))
        s0 = v.add64(s0, v.low32(ll))
        s1 = v.add64(s1, v.add64(v.shr32(ll), v.low32(mid)))
        s2 = v.add64(s2, v.low32(top))
        s3 = v.add64(s3, v.shr32(top))
    v.store(sums, 0, s0)
    v.store(sums, 8, s1)
    v.store(sums, 16, s2)
    v.store(sums, 24, s3)


@_kernel
def maximum(x: Any) -> Any:
    """The largest word, to find what is not a field element in one pass."""
    best = v.splat(np.uint64(0))
    full = x.size - x.size % 8
    buffer = np.zeros(8, np.uint64)
    for i in range(0, full, 8):
        best = v.max64(best, v.load(x, i))
    if full < x.size:
        best = v.max64(best, _load_tail(x, full, buffer))
    v.store(buffer, 0, best)
    return buffer.max()


@njit(forceinline=True)
def _square(buffer: Any, times: int) -> None:
    for _ in range(times):
        for i in range(0, _BLOCK, 8):
            x = v.load(buffer, i)
            v.store(buffer, i, v.mulmod(x, x))


@njit(forceinline=True)
def _multiply(x: Any, y: Any) -> None:
    """x *= y, block by block."""
    for i in range(0, _BLOCK, 8):
        v.store(x, i, v.mulmod(v.load(x, i), v.load(y, i)))


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


@_kernel
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


@_kernel
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
    spread = v.add64(v.shr30(middle), v.shl31(v.low30(middle)))
    return v.fold(v.add64(v.add64(v.fold(low), spread), v.fold(v.shl1(high))))


@_kernel
def matmul(low: Any, high: Any, b: Any, out: Any) -> None:
    """out[m, n] = A·B for a small A = high·2^31 + low and a wide B[k, n], two rows of A at a time.

    The caller pads with zeros: m to a multiple of two, k of four, n of eight. With 31-bit low halves
    (x = x1·2^31 + x0, x1 < 2^30) four products fit the 64-bit sums of x0·y0, x0·y1 + x1·y0 and x1·y1, since
    4·(2^31−1)² and 8·(2^31−1)(2^30−1) are below 2^64: one reduction per four products.
    """
    m, k = low.shape
    n = b.shape[1]
    wide, result = b.reshape(-1), out.reshape(-1)
    zero = v.splat(np.uint64(0))
    for column in range(0, n, 8):
        for row in range(0, m, 2):
            even, odd = zero, zero
            for start in range(0, k, 4):
                l0, m0, h0, l1, m1, h1 = zero, zero, zero, zero, zero, zero
                for i in range(start, start + 4):
                    x = v.load(wide, i * n + column)
                    x0, x1 = v.low31(x), v.shr31(x)
                    y0, y1 = v.splat(low[row, i]), v.splat(high[row, i])
                    l0 = v.add64(l0, v.mul32(y0, x0))
                    m0 = v.add64(m0, v.add64(v.mul32(y0, x1), v.mul32(y1, x0)))
                    h0 = v.add64(h0, v.mul32(y1, x1))
                    y0, y1 = v.splat(low[row + 1, i]), v.splat(high[row + 1, i])
                    l1 = v.add64(l1, v.mul32(y0, x0))
                    m1 = v.add64(m1, v.add64(v.mul32(y0, x1), v.mul32(y1, x0)))
                    h1 = v.add64(h1, v.mul32(y1, x1))
                even = v.fold(v.add64(even, _reduce_lazy(l0, m0, h0)))
                odd = v.fold(v.add64(odd, _reduce_lazy(l1, m1, h1)))
            v.store(result, row * n + column, v.canon(even))
            v.store(result, (row + 1) * n + column, v.canon(odd))


@_kernel
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
                v.store(table, 0, v.load(secret, at))
                for j in range(1, threshold):
                    v.store(table, j * 8, v.low61(v.load(words, (j - 1) * n + at)))
            else:
                for i in range(n - at):
                    table[i] = secret[at + i]
                    for j in range(1, threshold):
                        table[j * 8 + i] = words[(j - 1) * n + at + i] & np.uint64(v.P)
            _newton_steps(table, threshold, members, gathered, column, group.shape[1])
        for member in range(members):
            source, target = member * group.shape[1], member * out.shape[1] + first + start
            for i in range(0, width - 7, 8):
                v.store(flat, target + i, v.load(gathered, source + i))
            for i in range(width - width % 8, width):
                flat[target + i] = gathered[source + i]


@njit(forceinline=True)
def _newton_steps(table: Any, threshold: int, members: int, out: Any, at: int, stride: int) -> None:
    """Steps eight difference tables through the points 1..K and writes their values to out[at + k·stride].

    Four steps go in one sweep from the highest difference down: step i+1 at j needs step i at j and j+1, and those
    are still in registers. Sums of two steps stay below 4p + 16 before a `fold`, which leaves at most p + 4: no
    overflow, however many sweeps.
    """
    zero = v.splat(np.uint64(0))
    for _ in range(members // 4):
        above0, above1, above2, above3 = zero, zero, zero, zero  # at j+1, after 0, 1, 2, 3 steps
        for j in range(threshold - 1, -1, -1):
            now = v.load(table, j * 8)
            one = v.add64(now, above0)
            two = v.fold(v.add64(one, above1))
            three = v.add64(two, above2)
            v.store(table, j * 8, v.fold(v.add64(three, above3)))
            above0, above1, above2, above3 = now, one, two, three
        v.store(out, at, v.canon(v.fold(above1)))
        v.store(out, at + stride, v.canon(above2))
        v.store(out, at + 2 * stride, v.canon(v.fold(above3)))
        v.store(out, at + 3 * stride, v.canon(v.load(table, 0)))
        at += 4 * stride
    for _ in range(members % 4):
        for j in range(threshold - 1):
            v.store(table, j * 8, v.fold(v.add64(v.load(table, j * 8), v.load(table, j * 8 + 8))))
        v.store(out, at, v.canon(v.load(table, 0)))
        at += stride


@_kernel
def reduce_words(words: Any, out: Any) -> None:
    """Random 64-bit words to field elements: the low 61 bits, with p counted as 0."""
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.store(out, i, v.zero_where_p(v.low61(v.load(words, i))))
    if full < out.size:
        buffer = np.zeros(8, np.uint64)
        _store_tail(out, full, v.zero_where_p(v.low61(_load_tail(words, full, buffer))), buffer)


@_kernel
def add_words(words: Any, out: Any, negate: bool) -> None:
    """out ± element(word), fused: the key stream is never stored as elements."""
    full = out.size - out.size % 8
    if negate:
        for i in range(0, full, 8):
            v.store(out, i, v.canon(v.add64(v.load(out, i), v.p_minus(v.low61(v.load(words, i))))))
    else:
        for i in range(0, full, 8):
            v.store(out, i, v.canon(v.add64(v.load(out, i), v.low61(v.load(words, i)))))
    for i in range(full, out.size):
        word = words[i] & np.uint64(v.P)
        total = out[i] + (np.uint64(v.P) - word if negate else word)
        out[i] = total if total < np.uint64(v.P) else total - np.uint64(v.P)


@_kernel
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
    return v.encode(buffer, 0, scale)


@_kernel
def encode(values: Any, scale: float, out: Any) -> None:
    """out = round(values·scale), negative numbers as p − |·|."""
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.store(out, i, v.encode(values, i, scale))
    if full < out.size:
        _store_tail(out, full, _encode_tail(values, full, scale), np.zeros(8, np.uint64))


@_kernel
def encode_axpy(values: Any, scale: float, a: Any, x: Any, out: Any) -> None:
    """out = round(values·scale) + a·x."""
    factor = v.splat(a)
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.store(out, i, _muladd(factor, v.load(x, i), v.encode(values, i, scale)))
    if full < out.size:
        buffer = np.zeros(8, np.uint64)
        value = _muladd(factor, _load_tail(x, full, buffer), _encode_tail(values, full, scale))
        _store_tail(out, full, value, buffer)


@_kernel
def decode(x: Any, scale: float, out: Any) -> None:
    """out = lift(x)·scale in out's own precision, where lift(x) = x − p above p/2."""
    full = out.size - out.size % 8
    for i in range(0, full, 8):
        v.decode(out, i, v.load(x, i), scale)
    if full < out.size:
        buffer, result = np.zeros(8, np.uint64), np.zeros(8, out.dtype)
        v.decode(result, 0, _load_tail(x, full, buffer), scale)
        for i in range(out.size - full):
            out[full + i] = result[i]
