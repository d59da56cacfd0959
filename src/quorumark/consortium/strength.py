"""The strength of the mark, as terms set it (docs/strength.md, "Rules"). Ratios are integers of 2^-32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import isqrt

from quorumark.canonical import canonical, digest
from quorumark.checks import plain_decimal
from quorumark.errors import InputError

__all__ = ["KEY_BITS", "ONE", "Strength"]

ONE = 1 << 32
"""Ratios (ρ, c, learning rates) are integers of 2^-32."""

KEY_BITS = {"rademacher": 0, "gaussian": 8}
"""Fractional bits of a key's values; the amplitudes have the other ones of the 40."""

_NETS = {"alike": "skip", "dither": "3", "continuity": "off"}
_RULES: dict[str, tuple[set[str], dict[str, str]]] = {
    # the settings that each rule needs, and those that it may have, with their defaults
    "rho": (set(), {"rho": "0.05", "c_max": "0.03", **_NETS}),
    "target": ({"z"}, {"c_max": "0.03", **_NETS}),
    "relative": ({"c"}, _NETS),
    "paper": ({"c"}, {"c_max": "0.1", "per": "model"}),
}
_COMMON = {"warmup_rounds": "0", "lr": "constant", "below_threshold": "refuse"}
_OPTIONAL = {"rounds", "decay"}  # left out, or 0: not said; none
_DECIMALS = ("rho", "z", "c", "c_max", "dither", "continuity", "decay")


@dataclass(frozen=True)
class Strength:
    """The consortium's strength rule, as its terms have it. Ratios are integers of 2^-32, rounded down.

    `dither` is κ, `continuity` the factor of a jump, both in 2^-32 as well; 0 is none. `settings` are all settings as
    strings, in one spelling: those that were left out have their defaults, and numbers have no needless zeros.
    """

    rule: str
    rho: int
    c_max: int
    warmup_rounds: int
    lr: str
    below_threshold: str
    per: str
    alike: str
    dither: int
    continuity: int
    settings: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, settings: Mapping[str, str] | Strength, coordinates: int) -> Strength:
        """Reads settings; what is left out has its default, and the rule is `rho` if none is named.

        Anything unknown is refused: a rule that is half understood marks half right. `coordinates` is d, which the
        rule `target` needs: ρ = z/√d.
        """
        if isinstance(settings, Strength):
            settings = settings.as_dict()
        if not isinstance(settings, Mapping):
            raise InputError("strength", "must map names to strings", type(settings).__name__)
        for name, text in settings.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise InputError(f"strength {name!r}", "must be a string", repr(text))
        rule = settings.get("rule", "rho")
        if rule not in _RULES:
            raise InputError("strength", f"must name a rule: {', '.join(_RULES)}", repr(rule))
        needed, defaults = _RULES[rule]
        given = {name: text for name, text in settings.items() if name not in _OPTIONAL or text != "0"}
        known = {"rule": rule, **defaults, **_COMMON, **given}
        allowed_names = needed | defaults.keys() | _COMMON.keys() | _OPTIONAL
        missing, unknown = needed - known.keys(), known.keys() - allowed_names - {"rule"}
        if missing or unknown:
            wanted = ", ".join(sorted(allowed_names))
            received = f"without {min(missing)!r}" if missing else f"with {min(unknown)!r}"
            raise InputError("strength", f"under the rule {rule!r} has the settings {wanted}", f"one {received}")
        rho = ratio_of("strength 'rho'", known["rho"], Fraction(1, 2)) if rule == "rho" else 0
        if rule == "target":
            z = _fraction("strength 'z'", known["z"])
            rho = isqrt(z.numerator**2 * ONE**2 // (z.denominator**2 * coordinates))  # ρ = z/√d
            if not 0 < rho <= ONE // 2:
                rule_text = f"must be above 0 and at most √d/2 for d = {coordinates} coordinates"
                raise InputError("strength 'z'", rule_text, known["z"])
        limit = ratio_of("strength 'c'", known["c"], Fraction(1, 4)) if "c" in known else 0
        c_max = ratio_of("strength 'c_max'", known["c_max"], Fraction(1, 4)) if "c_max" in known else limit
        if not re.fullmatch("0|[1-9][0-9]{0,5}", known["warmup_rounds"]):
            raise InputError("strength 'warmup_rounds'", "must be an integer, at least 0", repr(known["warmup_rounds"]))
        choices = {"below_threshold": ("refuse", "skip"), "per": ("model", "tensor"), "alike": ("skip", "mark")}
        for name, allowed in choices.items():
            if known.get(name, allowed[0]) not in allowed:
                raise InputError(f"strength {name!r}", f"must be {' or '.join(allowed)}", repr(known[name]))
        if "rounds" in known and not re.fullmatch("[1-9][0-9]{0,5}", known["rounds"]):
            raise InputError("strength 'rounds'", "must be an integer, at least 1", repr(known["rounds"]))
        if "decay" in known:
            ratio_of("strength 'decay'", known["decay"], Fraction(9, 10))
        _rates(known["lr"])
        dither, continuity = _nets(known, c_max)
        return cls(
            rule,
            rho,
            c_max,
            int(known["warmup_rounds"]),
            _spelled(known)["lr"],
            known["below_threshold"],
            known.get("per", "model"),
            known.get("alike", "mark"),
            dither,
            continuity,
            tuple(sorted(_spelled(known).items())),
        )

    def changed(self, settings: Mapping[str, str], coordinates: int) -> Strength:
        """The same with other settings; under another rule only those stay that every rule has."""
        mine = self.as_dict()
        if settings.get("rule", self.rule) != self.rule:
            mine = {name: text for name, text in mine.items() if name in _COMMON or name in _OPTIONAL}
        return Strength.of({**mine, **settings}, coordinates)

    def as_dict(self) -> dict[str, str]:
        """All settings as strings, each in its one spelling."""
        return dict(self.settings)

    @property
    def rounds(self) -> int:
        """How many rounds are planned; 0 if the terms do not say."""
        return int(self.as_dict().get("rounds", "0"))

    def kept(self, round_no: int) -> int:
        """f: the share of the weights that a round's weight decay leaves, in 2^-32; the mark shrinks with them.

        `decay` is what it takes off in a round at the first one's rate: 1 − (1 − rate·weight_decay)^steps.
        """
        text = self.as_dict().get("decay")
        lost = Fraction(0) if text is None else Fraction(text) * min(self.rate(round_no), Fraction(1))
        return ONE - lost.numerator * ONE // lost.denominator

    @property
    def needs_norms(self) -> bool:
        """Whether members upload norms, so that what moved alike at all of them gets no mark."""
        return self.alike == "skip"

    @property
    def c(self) -> int:
        """The fixed c of the rules that have one."""
        return ratio_of("strength 'c'", dict(self.settings)["c"], Fraction(1, 4))

    def digest(self) -> bytes:
        """Of all settings, those that were left out included."""
        return digest("strength", canonical(self.as_dict()))

    def rate(self, round_no: int) -> Fraction:
        """The learning rate of a round, in units of the first one's: what members must train with."""
        kind, numbers = _rates(self.lr)
        if kind == "constant":
            return Fraction(1)
        if kind == "cosine":
            return Fraction(_cosine(round_no - 1, int(numbers[0][0])), ONE)
        return next((rate for start, rate in reversed(numbers) if round_no >= start), Fraction(1))


def _spelled(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings that were read, with numbers in their one spelling."""
    rates = re.sub(r"[0-9.]+", lambda number: plain_decimal(number.group()), settings["lr"])
    return {n: plain_decimal(text) if n in _DECIMALS else text for n, text in settings.items()} | {"lr": rates}


def _rates(text: str) -> tuple[str, list[tuple[int, Fraction]]]:
    """A table of learning rates: its kind, and (first round, rate) pairs in order."""
    kind, _, rest = text.partition(":")
    rule = "must be constant, cosine:ROUNDS, step:ROUND=RATE,… or list:RATE,…"
    name = "strength 'lr'"
    if text == "constant":
        return kind, []
    if kind == "cosine" and re.fullmatch("[1-9][0-9]{0,5}", rest):
        return kind, [(int(rest), Fraction(0))]
    if kind == "step" and re.fullmatch(r"[1-9][0-9]{0,5}=[0-9.]+(,[1-9][0-9]{0,5}=[0-9.]+)*", rest):
        pairs = [entry.split("=") for entry in rest.split(",")]
        steps = [(int(start), _fraction(name, rate)) for start, rate in pairs]
        if all(a < b for (a, _), (b, _) in pairwise(steps)):
            return kind, steps
    if kind == "list" and re.fullmatch(r"[0-9.]+(,[0-9.]+)*", rest):
        return kind, [(start, _fraction(name, rate)) for start, rate in enumerate(rest.split(","), 1)]
    raise InputError(name, rule, repr(text))


_PI = 0x3243F6A8885A308D313198A2E03707344  # ⌊π·2^128⌋


def _cosine(done: int, rounds: int) -> int:
    """2^32·(1 + cos(π·done/rounds))/2 to the nearest, by Taylor's series in integer multiples of 2^-128; then 0."""
    if done >= rounds:
        return 0
    angle, term, total, k = _PI * done // rounds, 1 << 128, 1 << 128, 0
    while term:
        total += -term if k % 4 else term
        k += 2
        term = (term * angle * angle >> 256) // (k * (k - 1))
    return (total + (1 << 96)) >> 97


def _fraction(name: str, text: str) -> Fraction:
    """A decimal text, exactly."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,18})?", text):
        raise InputError(name, "must be a decimal number such as 0.05", repr(text))
    return Fraction(text)


def ratio_of(name: str, text: str, most: Fraction) -> int:
    value = _fraction(name, text)
    ratio = value.numerator * ONE // value.denominator
    if not ratio or value > most:
        raise InputError(name, f"must be above 2^-32 and at most {float(most)}", repr(text))
    return ratio


def _nets(known: Mapping[str, str], c_max: int) -> tuple[int, int]:
    """κ and the factor of a jump, in 2^-32; 0 where there is none."""
    kappa = _fraction("strength 'dither'", known.get("dither", "0"))
    if kappa * c_max * 2 > ONE:
        rule = "times c_max must be at most 1/2: the noise must stay small beside what members learn"
        raise InputError("strength 'dither'", rule, f"{known['dither']} times {c_max / ONE:.3g}: choose smaller ones")
    text = known.get("continuity", "off")
    factor = Fraction(0) if text == "off" else _fraction("strength 'continuity'", text)
    if text != "off" and not 2 <= factor <= 1000:
        raise InputError("strength 'continuity'", "must be off, or a factor from 2 to 1000", repr(text))
    return kappa.numerator * ONE // kappa.denominator, factor.numerator * ONE // factor.denominator
