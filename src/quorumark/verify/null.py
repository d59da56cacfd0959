"""What z means for a model that knows nothing of the key (docs/verification.md, "The number z").

The statistic is z = ⟨x, τ⟩/‖x‖ with a public x that does not depend on the key τ. For signs τ = ±1 drawn by coin flips
z has mean 0 and variance 1 exactly, whatever x is, and Hoeffding's inequality gives a bound that needs no
approximation: P(z ≥ a) ≤ exp(−a²/2). The normal tail is what z follows in practice.

Everything that ends up in a certificate is computed here with integers and the decimal module, so that another
machine, years later, prints the same digits.

By layers (docs/layers.md): with blocks b of coordinates, z_b = ⟨x_b, τ_b⟩/‖x_b‖ and Q = Σ z_b² over B blocks. Each z_b
is sub-gaussian with variance 1, E exp(λ·z_b²) ≤ (1 − 2λ)^(−1/2) for 0 ≤ λ < 1/2, and blocks are independent; the best λ
gives P(Q ≥ q) ≤ (q/m)^(m/2)·exp(−(q − m)/2) for q ≥ m = B, again without any approximation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from math import isqrt

from quorumark.checks import plain_decimal
from quorumark.errors import InputError

__all__ = [
    "cosine_text",
    "decimal_of",
    "layers_threshold",
    "log10_bound",
    "log10_layers",
    "log10_p",
    "raised_threshold",
    "three_digits",
    "threshold_for",
    "z_text",
]

_DIGITS = 6  # decimals of z and of a cosine in a certificate
# contexts of our own: what a host program does to the default one must not change a certificate
_MATH = Context(prec=40, rounding=ROUND_HALF_EVEN)
_UP = Context(prec=40, rounding=ROUND_CEILING)
_LN10 = _MATH.ln(Decimal(10))
_LOG_ROOT_2PI = _MATH.divide(_MATH.ln(Decimal("6.283185307179586476925286766559005768394338798750")), Decimal(2))


def _quotient(value: int, squared: int) -> Decimal:
    """value/√squared, rounded to nearest at six decimals, from integers only."""
    if squared <= 0:
        raise InputError("squared", "must be above 0", squared)
    scale = 10**_DIGITS
    # ⌊2·|value|·10^6/√squared⌋ = ⌊√(4·value²·10^12/squared)⌋; the half that was doubled rounds to nearest
    doubled = isqrt(4 * value * value * scale * scale // squared)
    magnitude = Decimal((doubled + 1) // 2).scaleb(-_DIGITS, _MATH)
    return _MATH.minus(magnitude) if value < 0 else magnitude


def z_text(value: int, norm_squared: int) -> str:
    """z = Y/‖x‖ for Y = ⟨x, τ⟩ and ‖x‖², to six decimals."""
    return f"{_quotient(value, norm_squared):f}"


def cosine_text(value: int, norm_squared: int, coordinates: int) -> str:
    """The cosine of x and a key of ±1: Y/(‖x‖·√d), to six decimals."""
    return f"{_quotient(value, norm_squared * coordinates):f}"


def decimal_of(name: str, text: str) -> Decimal:
    """A decimal number from its text."""
    if not isinstance(text, str) or not re.fullmatch(r"-?[0-9]{1,12}(\.[0-9]{1,18})?", text):
        raise InputError(name, "must be a decimal number such as 6.5", repr(text))
    return Decimal(text)


def log10_p(z: str) -> str:
    """log10 of the normal tail P(Z ≥ z), to two decimals; right for any z, where p itself would underflow at 38."""
    return _two(_MATH.divide(_log_tail(decimal_of("z", z)), _LN10))


def log10_bound(z: str) -> str:
    """log10 of Hoeffding's bound exp(−z²/2): for keys of ±1 no assumption is behind it. 0 for z ≤ 0."""
    value = max(decimal_of("z", z), Decimal(0))
    return _two(_MATH.divide(_MATH.multiply(value, value), _MATH.multiply(Decimal(-2), _LN10)))


def threshold_for(alpha: str) -> str:
    """The z* whose Hoeffding bound is α: √(−2·ln α), rounded up, so that the false alarms stay below α."""
    if not isinstance(alpha, str) or not re.fullmatch(r"[0-9]{0,3}\.?[0-9]{1,60}([eE]-[0-9]{1,6})?", alpha):
        raise InputError("alpha", "must be a probability such as 0.001 or 1e-9", repr(alpha))
    value = Decimal(alpha)
    if not 0 < value < 1:
        raise InputError("alpha", "must be above 0 and below 1", alpha)
    exact = _MATH.sqrt(_MATH.multiply(Decimal(-2), _MATH.ln(value)))
    return f"{_UP.quantize(exact, Decimal('0.000001')):f}"


def raised_threshold(z: str, equations: int) -> str:
    """z* + √E, E = how many equations queries opened that did not pass (docs/verification.md, "The guard").

    A plain query opens one, a query by layers one for each block. With unit vectors x_1 … x_E, none of them marked,
    they can be combined into one "model" whose z is the norm of (z_1, …, z_E), about √E: so much is not evidence.
    """
    if equations < 0:
        raise InputError("equations", "must not be negative", equations)
    root = _MATH.sqrt(Decimal(equations))
    return f"{_UP.quantize(_MATH.add(decimal_of('z*', z), root), Decimal('0.000001')):f}"


def log10_layers(q: str, freedom: int, log_choices: Decimal = Decimal(0)) -> str:
    """log10 of N·(q/m)^(m/2)·exp(−(q − m)/2) for Q with m degrees of freedom, after N choices; at most 0."""
    exponent = _MATH.subtract(log_choices, _layers_exponent(decimal_of("q", q), freedom))
    return _two(_MATH.divide(min(exponent, Decimal(0)), _LN10))


def layers_threshold(z: str, freedom: int, log_choices: Decimal = Decimal(0)) -> str:
    """The q* whose bound, after N choices, is that of z*: exp(−z*²/2); rounded up to two decimals.

    The bound falls in q from m on, and m + 2·√(m·u) + 2·u is always enough for exp(−u).
    """
    half = _MATH.divide(_MATH.multiply(decimal_of("z*", z), decimal_of("z*", z)), Decimal(2))
    wanted, m = _MATH.add(half, log_choices), Decimal(freedom)
    low = m
    high = _MATH.add(m, _MATH.multiply(Decimal(2), _MATH.add(_MATH.sqrt(_MATH.multiply(m, wanted)), wanted)))
    while _MATH.subtract(high, low) > Decimal("0.0001"):
        middle = _MATH.divide(_MATH.add(low, high), Decimal(2))
        low, high = (low, middle) if _layers_exponent(middle, freedom) >= wanted else (middle, high)
    return f"{_UP.quantize(high, Decimal('0.01')):f}"


def _layers_exponent(q: Decimal, freedom: int) -> Decimal:
    """(q − m)/2 − (m/2)·ln(q/m): minus the logarithm of the bound; 0 up to m."""
    m = Decimal(freedom)
    if freedom < 1:
        raise InputError("freedom", "must be at least 1", freedom)
    if q <= m:
        return Decimal(0)
    logarithm = _MATH.multiply(m, _MATH.ln(_MATH.divide(q, m)))
    return _MATH.divide(_MATH.subtract(_MATH.subtract(q, m), logarithm), Decimal(2))


def three_digits(squares: Sequence[tuple[int, int]]) -> str:
    """Q = Σ Y_b²/‖x_b‖² from pairs (Y_b, ‖x_b‖²), rounded down to three digits.

    An exact Q is more than a number: with the exact Y it can be solved for the Y_b where blocks are few.
    """
    total = sum((Fraction(value * value, norm2) for value, norm2 in squares), Fraction(0))
    hundredths = int(total * 100)  # rounded down
    unit = 10 ** max(0, len(str(hundredths)) - 3)
    return plain_decimal(f"{Decimal(hundredths // unit * unit).scaleb(-2, _MATH):f}")


def _two(value: Decimal) -> str:
    rounded = _MATH.quantize(value, Decimal("0.01"))
    return f"{rounded if rounded else Decimal('0.00'):f}"


def _log_tail(z: Decimal) -> Decimal:
    """ln P(Z ≥ z). For z > 3 the continued fraction of Mills' ratio, below it the series of the distribution.

    P(Z ≥ z) = φ(z)·1/(z + 1/(z + 2/(z + 3/(z + …)))),   φ(z) = exp(−z²/2)/√(2π)
    P(Z ≥ z) = 1/2 − φ(z)·(z + z³/3 + z⁵/(3·5) + …)
    """
    density = _MATH.subtract(_MATH.divide(_MATH.multiply(z, z), Decimal(-2)), _LOG_ROOT_2PI)
    if z > 3:
        ratio = z
        for k in range(300, 0, -1):
            ratio = _MATH.add(z, _MATH.divide(Decimal(k), ratio))
        return _MATH.subtract(density, _MATH.ln(ratio))
    if z < -12:
        return Decimal(0)  # ln(1 − 10⁻³³)
    term = total = z
    k = 1
    while abs(term) > Decimal("1e-45"):
        k += 2
        term = _MATH.divide(_MATH.multiply(_MATH.multiply(term, z), z), Decimal(k))
        total = _MATH.add(total, term)
    return _MATH.ln(_MATH.subtract(Decimal("0.5"), _MATH.multiply(_MATH.exp(density), total)))
