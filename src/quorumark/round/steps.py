"""Kernels of the server optimisers: integers of 64 bits, products and squares of 128, and no floating point in results.

Numbers are as in `quorumark.round.optimiser`: weights, updates, momentum and steps in 2^-40, roots and tau in 2^-44,
ratios in 2^-32. Products are rounded towards 0. A file of its own: numba's cache watches the file that a kernel stands
in.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numba import njit

from quorumark.field.kernels import kernel

ADAM, YOGI, ADAGRAD = 0, 1, 2

_U0, _U1, _U4, _U32 = np.uint64(0), np.uint64(1), np.uint64(4), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_BASE = np.uint64(1 << 32)
_MOST = np.uint64((1 << 60) - 1)  # no update, momentum, step or mark is larger: 2^20
_TOP = np.uint64(1 << 63)
_RATE = np.uint64(1 << 40)


@njit(forceinline=True)
def _product(a: Any, b: Any) -> Any:
    """a·b as two words, the higher one first."""
    al, ah, bl, bh = a & _LOW, a >> _U32, b & _LOW, b >> _U32
    low = al * bl
    middle = ah * bl + (low >> _U32)
    other = al * bh + (middle & _LOW)
    return ah * bh + (middle >> _U32) + (other >> _U32), (other << _U32) | (low & _LOW)


@njit(forceinline=True)
def _digit(left: Any, following: Any, upper: Any, lower: Any) -> Any:
    """The next digit of 32 bits: guessed from the divisor's upper half, and at most 2 too large."""
    q = left // upper
    rest = left - q * upper
    while q >= _BASE or q * lower > ((rest << _U32) | following):
        q -= _U1
        rest += upper
        if rest >= _BASE:
            break
    return q


@njit(forceinline=True)
def _quotient(high: Any, low: Any, d: Any) -> Any:
    """⌊(high·2^64 + low)/d⌋ for high < d: two digits of 32 bits (Knuth's algorithm D)."""
    shift = _U0
    while d < _TOP:
        d <<= _U1
        shift += _U1
    if shift > _U0:
        high = (high << shift) | (low >> (np.uint64(64) - shift))
        low <<= shift
    upper, lower = d >> _U32, d & _LOW
    first = _digit(high, low >> _U32, upper, lower)
    left = ((high << _U32) | (low >> _U32)) - first * d  # mod 2^64, where it is exact
    return (first << _U32) + _digit(left, low & _LOW, upper, lower)


@njit(forceinline=True)
def _ratio(a: Any, b: Any, d: Any) -> Any:
    """⌊a·b/d⌋, at most 2^60 − 1."""
    high, low = _product(a, b)
    if high >= d:
        return _MOST
    return min(_quotient(high, low, d), _MOST)


@njit(forceinline=True)
def _times(high: Any, low: Any, ratio: Any) -> Any:
    """⌊(high·2^64 + low)·ratio/2^32⌋ as two words, for a ratio of at most 1."""
    t0 = (low & _LOW) * ratio
    t1 = (low >> _U32) * ratio + (t0 >> _U32)
    t2 = (high & _LOW) * ratio + (t1 >> _U32)
    t3 = (high >> _U32) * ratio + (t2 >> _U32)
    return t3, (t1 & _LOW) | (t2 << _U32)


@njit(forceinline=True)
def _plus(ah: Any, al: Any, bh: Any, bl: Any) -> Any:
    """The sum of two such numbers, at most 2^128 − 1."""
    low = al + bl
    carry = _U1 if low < al else _U0
    high = ah + bh
    wrapped = high < ah
    total = high + carry
    if wrapped or total < high:
        return _ALL, _ALL
    return total, low


@njit(forceinline=True)
def _root(high: Any, low: Any) -> Any:
    """⌊√(high·2^64 + low)⌋: a guess in floating point, one step of Newton, and then exact, whatever the guess was."""
    if high == _U0 and low == _U0:
        return _U0
    guess = sqrt(float(high) * 18446744073709551616.0 + float(low))
    x = _ALL if guess >= 18446744073709549568.0 else np.uint64(guess)
    x = max(x, _U1)
    if high < x:
        half, odd = x >> _U1, x & _U1
        q = _quotient(high, low, x)
        x = max(half + (q >> _U1) + (odd & q & _U1), _U1)
    ph, pl = _product(x, x)
    while ph > high or (ph == high and pl > low):
        x -= _U1
        ph, pl = _product(x, x)
    while x < _ALL:
        nh, nl = _product(x + _U1, x + _U1)
        if nh > high or (nh == high and nl > low):
            break
        x += _U1
    return x


@njit(forceinline=True)
def _size(x: Any) -> Any:
    return np.uint64(-x) if x < 0 else np.uint64(x)


@njit(forceinline=True)
def _signed(size: Any, negative: Any) -> Any:
    value = np.int64(min(size, _MOST))
    return -value if negative else value


@njit(forceinline=True)
def _share(x: Any, ratio: Any) -> Any:
    """x·ratio/2^32 towards 0, for |x| < 2^60 and a ratio of at most 1."""
    size = _size(x)
    return _signed((size >> _U32) * ratio + (((size & _LOW) * ratio) >> _U32), x < 0)


@njit(forceinline=True)
def _bounded(x: Any) -> Any:
    most = np.int64(_MOST)
    return max(-most, min(most, x))


@njit(forceinline=True)
def _over(root: Any, tau: Any) -> Any:
    total = root + tau
    return _ALL if total < root else total


@kernel
def momentum_step(g: Any, m: Any, rate: Any, beta: Any, moves: Any, after: Any) -> None:
    """m ← β·m + g; the step is rate·m. `rate` is in 2^-40."""
    for i in range(g.size):
        now = _bounded(_share(m[i], beta) + g[i])
        after[i] = now
        moves[i] = _signed(_ratio(_size(now), rate, _RATE), now < 0)


@kernel
def adaptive_step(
    kind: Any, g: Any, m: Any, r: Any, rate: Any, beta_1: Any, beta_2: Any, tau: Any, moves: Any, after: Any, root: Any
) -> None:
    """m ← β1·m + (1−β1)·g; v by its rule, of which r is the root; the step is rate·m/(r + τ)."""
    rest_1, rest_2 = _BASE - beta_1, _BASE - beta_2
    for i in range(g.size):
        now = _bounded(_share(m[i], beta_1) + _share(g[i], rest_1))
        size = _size(g[i]) << _U4
        gh, gl = _product(size, size)
        vh, vl = _product(r[i], r[i])
        if kind == ADAGRAD:
            vh, vl = _plus(vh, vl, gh, gl)
        else:
            th, tl = _times(gh, gl, rest_2)
            if kind == ADAM:
                vh, vl = _times(vh, vl, beta_2)
                vh, vl = _plus(vh, vl, th, tl)
            elif vh < gh or (vh == gh and vl < gl):
                vh, vl = _plus(vh, vl, th, tl)
            elif vh != gh or vl != gl:
                borrow = _U1 if vl < tl else _U0
                vh, vl = vh - th - borrow, vl - tl
        found = _root(vh, vl)
        after[i], root[i] = now, found
        moves[i] = _signed(_ratio(_size(now) << _U4, rate, _over(found, tau)), now < 0)


@kernel
def momentum_mark(marks: Any, rate: Any, beta: Any, m: Any, shown: Any) -> None:
    """What a round's mark adds to the momentum, in place, and what of it is in the step."""
    for i in range(marks.size):
        m[i] = _bounded(_share(m[i], beta) + marks[i])
        shown[i] = _signed(_ratio(_size(m[i]), rate, _RATE), m[i] < 0)


@kernel
def adaptive_mark(
    kind: Any, marks: Any, g: Any, moves: Any, before: Any, root: Any, rate: Any, beta_1: Any, beta_2: Any, tau: Any,
    m: Any, drag: Any, shown: Any,
) -> None:  # fmt: skip
    """The same where steps are divided by r + τ, to first order: the mark is in m, and by g² in r as well (`drag`)."""
    rest_1, rest_2 = _BASE - beta_1, _BASE - beta_2
    for i in range(marks.size):
        m[i] = _bounded(_share(m[i], beta_1) + _share(marks[i], rest_1))
        now, old = root[i], before[i]
        if now == _U0:
            drag[i] = 0
        else:
            # r'·dr' = β2·r·dr + (1−β2)·g·s for Adam; Yogi keeps r·dr, and its second term has the sign of g² − v
            size = _size(g[i]) << _U4
            kept = _share(drag[i], beta_2) if kind == ADAM else drag[i]
            part = marks[i] if kind == ADAGRAD else _share(marks[i], rest_2)
            first = _signed(_ratio(_size(kept), old, now), kept < 0)
            against = (part < 0) != (g[i] < 0)
            if kind == YOGI and old > size:
                against = not against
            elif kind == YOGI and old == size:
                part = np.int64(0)
            drag[i] = _bounded(first + _signed(_ratio(_size(part), size, now), against))
        d = _over(now, tau)
        direct = _signed(_ratio(_size(m[i]) << _U4, rate, d), m[i] < 0)
        through = _signed(_ratio(_size(moves[i]), _size(drag[i]) << _U4, d), (moves[i] < 0) != (drag[i] < 0))
        shown[i] = _bounded(direct - through)


@kernel
def momentum_room(most: Any, caps: Any, m: Any, rate: Any, beta: Any, room: Any, gained: Any, pending: Any) -> None:
    """The largest mark, at most `caps`, whose momentum, with what is left of the one before, shows at most `most` in
    the next step; what it will come to in all later steps (`gained`); and what is still to come of the momentum."""
    rest = _BASE - beta
    for i in range(most.size):
        held = np.uint64(0 if m[i] < 0 else _share(m[i], beta))
        allowed = _ratio(most[i], _RATE, rate)
        room[i] = min(allowed - min(allowed, held), caps[i])
        gained[i] = _ratio(_ratio(room[i], rate, _RATE), _BASE, rest)
        pending[i] = np.int64(_ratio(_ratio(held, rate, _RATE), _BASE, rest))


@kernel
def adaptive_room(
    most: Any,
    caps: Any,
    floor: Any,
    m: Any,
    root: Any,
    rate: Any,
    beta: Any,
    shrink: Any,
    tau: Any,
    room: Any,
    gained: Any,
    pending: Any,
) -> None:
    """The same where steps are divided by r + τ: r may fall to `shrink` times what it is. None where it is below its
    `floor`."""
    rest = _BASE - beta
    for i in range(most.size):
        held = np.uint64(0 if m[i] < 0 else _share(m[i], beta))
        least = _over(_ratio(root[i], shrink, _BASE), tau)
        pending[i] = np.int64(_ratio(_ratio(held << _U4, rate, least), _BASE, rest))
        room[i] = _U0
        if root[i] >= floor[i] and root[i] > _U0:
            allowed = _ratio(most[i], least, rate << _U4)
            room[i] = min(_ratio(allowed - min(allowed, held), _BASE, rest), caps[i])
        gained[i] = _ratio(room[i] << _U4, rate, least)
