"""The server optimiser that members agree on (policy `optimiser`; docs/optimisers.md).

    fedadam:eta=0.01,beta_1=0.9,beta_2=0.99,tau=0.001

Names and settings are Flower's, and so are the defaults. What members compute with are integers: rates in 2^-40, ratios
in 2^-32, tau in 2^-44, each rounded down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from quorumark.checks import plain_decimal
from quorumark.errors import InputError

__all__ = ["OPTIMISERS", "RATE_BITS", "RATIO_BITS", "ROOT_BITS", "Optimiser"]

RATE_BITS, RATIO_BITS, ROOT_BITS = 40, 32, 44

OPTIMISERS: dict[str, dict[str, str]] = {
    "fedavgm": {"server_learning_rate": "1", "server_momentum": "0"},
    "fedadam": {"eta": "0.1", "beta_1": "0.9", "beta_2": "0.99", "tau": "0.001"},
    "fedyogi": {"eta": "0.01", "beta_1": "0.9", "beta_2": "0.99", "tau": "0.001"},
    "fedadagrad": {"eta": "0.1", "tau": "0.001"},
}
"""The settings of each, with their defaults."""

_RATE = (Fraction(1, 10_000), Fraction(100))
_BETA = (Fraction(0), Fraction(999, 1000))
_RANGES = {
    "server_learning_rate": (Fraction(1, 100), Fraction(100)),
    "server_momentum": _BETA,
    "eta": _RATE,
    "beta_1": _BETA,
    "beta_2": _BETA,
    "tau": (Fraction(1, 10**9), Fraction(1)),
}


@dataclass(frozen=True)
class Optimiser:
    """An optimiser's name and its settings as decimal texts, each in its one spelling."""

    name: str
    settings: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, text: str) -> Optimiser:
        """Reads NAME or NAME:SETTING=NUMBER,…; what is left out has its default, and anything unknown is refused."""
        rule = f"must be one of {', '.join(OPTIMISERS)}, then perhaps a colon and settings such as eta=0.01"
        name, colon, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
        if name not in OPTIMISERS:
            raise InputError("policy 'optimiser'", rule, repr(text))
        given: dict[str, str] = {}
        for entry in rest.split(",") if colon else ():
            setting, _, number = entry.partition("=")
            if setting not in OPTIMISERS[name] or setting in given:
                wanted = ", ".join(OPTIMISERS[name])
                raise InputError("policy 'optimiser'", f"{name} has the settings {wanted}, each once", repr(entry))
            given[setting] = _checked(setting, number)
        return cls(name, tuple({**OPTIMISERS[name], **given}.items()))

    def __str__(self) -> str:
        return f"{self.name}:" + ",".join(f"{name}={text}" for name, text in self.settings)

    def number(self, setting: str) -> Fraction:
        """A setting's value; 0 where this optimiser does not have it."""
        return Fraction(dict(self.settings).get(setting, "0"))

    def integer(self, setting: str, bits: int) -> int:
        value = self.number(setting)
        return (value.numerator << bits) // value.denominator

    @property
    def adapts(self) -> bool:
        """Whether it divides each weight's step by the size of that weight's updates."""
        return self.name != "fedavgm"


def _checked(setting: str, text: str) -> str:
    low, high = _RANGES[setting]
    sound = re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,12})?", text) is not None
    if not sound or not low <= Fraction(text) <= high:
        rule = f"must be a decimal number from {float(low):g} to {float(high):g}"
        raise InputError(f"policy 'optimiser' {setting}", rule, repr(text))
    return plain_decimal(text)
