"""Which public keys are sound: points of prime order on Curve25519, in the one spelling that they have.

`cryptography` verifies signatures under any 32 bytes that name a point. Eight points have small order: under such a
key A the check [S]B = R + [h]A does not depend on the message h (or only on h mod 8), so that one signature fits many
messages. A point of mixed order, and a second spelling of the same point, give a key a twin. All three are refused:
honest keys are multiples of the base point, which has the prime order L, and are spelled canonically.

This is a check of public values only; nothing here signs, verifies or shares a secret, or needs constant time.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["is_ed25519_key", "is_x25519_key"]

# RFC 8032, section 5.1: −x² + y² = 1 + d·x²·y² over p; the base point has order L, the curve 8·L points
_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT = pow(2, (_P - 1) // 4, _P)  # √−1

_Point = tuple[int, int, int, int]  # extended coordinates: x = X/Z, y = Y/Z, x·y = T/Z
_IDENTITY: _Point = (0, 1, 1, 0)


@lru_cache(maxsize=1 << 12)
def is_ed25519_key(key: str) -> bool:
    """Whether 32 bytes in hex are y and x's lowest bit (RFC 8032, section 5.1.3) of a point of order L.

    Milliseconds, so the answer is kept: the same few keys are read again and again.
    """
    if len(key) != 64:
        return False
    raw = int.from_bytes(bytes.fromhex(key), "little")
    y, odd = raw & (1 << 255) - 1, raw >> 255
    if y >= _P:
        return False
    x = _x_of(y)
    if x is None or (x == 0 and odd):
        return False
    return _has_prime_order(x if x & 1 == odd else _P - x, y)


@lru_cache(maxsize=1 << 12)
def is_x25519_key(key: str) -> bool:
    """Whether 32 bytes in hex are the u of a point of order L: y = (u − 1)/(u + 1) is its y on the Edwards curve.

    The sign of x does not matter, since P and −P have one order. u = −1 is not on the curve, but on its twist.
    """
    u = int.from_bytes(bytes.fromhex(key), "little")
    if len(key) != 64 or u >= _P - 1:
        return False
    y = (u - 1) * pow(u + 1, -1, _P) % _P
    x = _x_of(y)
    return x is not None and _has_prime_order(x, y)


def _x_of(y: int) -> int | None:
    """A root of x² = (y² − 1)/(d·y² + 1), or None if there is no point with this y."""
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P  # d is no square, so that the denominator is never 0
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * _ROOT % _P
    return x if x * x % _P == square else None


def _has_prime_order(x: int, y: int) -> bool:
    """[L]P = O and P ≠ O. L is prime, so this is order L; points of order 2, 4, 8, 2L, 4L and 8L fail."""
    if (x, y) == (0, 1):
        return False
    point: _Point = (x, y, 1, x * y % _P)
    total = _IDENTITY
    for bit in bin(_L)[2:]:
        total = _add(total, total)
        if bit == "1":
            total = _add(total, point)
    return total[0] == 0 and total[1] == total[2]


def _add(a: _Point, b: _Point) -> _Point:
    """RFC 8032, section 5.1.4; the formulas are complete, so that they double as well."""
    left, right = (a[1] - a[0]) * (b[1] - b[0]), (a[1] + a[0]) * (b[1] + b[0])
    c, d = 2 * a[3] * b[3] * _D, 2 * a[2] * b[2]
    e, f, g, h = (right - left) % _P, (d - c) % _P, (d + c) % _P, (right + left) % _P
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P
