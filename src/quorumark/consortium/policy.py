"""What members agree on besides the key and the mark: thresholds, budgets, how rounds run (docs/format.md, "Policy").

A policy is read and checked where terms are made: what is misspelt would be signed by all, and do nothing or harm. In
terms it is a map of strings, in one spelling: every setting that has a default is written out, the others only where
the members agreed on them, and numbers have no needless zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, ClassVar

from quorumark.checks import is_count, is_hex, plain_decimal
from quorumark.consortium.optimiser import Optimiser
from quorumark.errors import InputError
from quorumark.model.blocks import RULES
from quorumark.packing import BITS

__all__ = ["NO_BLOCKS", "Policy"]

NO_BLOCKS = "none"
"""Instead of a rule for blocks: nothing is tested by layers."""

_LARGEST = 10**18
_RULE = f"must be an integer, at least 1 and below {_LARGEST}"
_INTEGERS = ("attempts", "packing", "budget", "effective", "cohort")
_ALWAYS = ("attempts", "packing")


@dataclass(frozen=True)
class Policy:
    """The agreed settings; `Policy()` has the safe defaults.

    z:          the threshold z* of a verification, above 0.
    sums:       "checked" or "unchecked": whether members check the sums that a server announces.
    attempts:   how often a round is tried.
    packing:    how many weights an element of an upload holds, 1 to 4.
    budget:     how many different queries are answered in the consortium's life; None: `guard.budget`.
    effective:  on how many coordinates a query must rest; None: `guard.least_effective`.
    cohort:     how many members are drawn from each state; None: all take part.
    optimiser:  what members make of a sum, in place of FedAvg: "fedadam:eta=0.01,…"; None: the sum is the model.
    groups:     digest of the agreed groups of channels; None: nothing is aligned.
    lora:       digest of the agreed factors of an adapter; None: the model is no adapter.
    blocks:     the rule that cuts the coordinates into blocks for a test by layers, or "none".
    """

    DIGESTS: ClassVar[tuple[str, ...]] = ("groups", "lora")
    FIXED: ClassVar[tuple[str, ...]] = (*DIGESTS, "blocks", "optimiser")
    """How suspects are read, matched and cut, and what a run's state consists of: agreed on with the first terms or
    never."""

    z: Decimal = Decimal(6)
    sums: str = "checked"
    attempts: int = 20
    packing: int = 2
    budget: int | None = None
    effective: int | None = None
    cohort: int | None = None
    optimiser: Optimiser | None = None
    groups: str | None = None
    lora: str | None = None
    blocks: str = RULES[0]

    def __post_init__(self) -> None:
        if not isinstance(self.z, Decimal) or not _is_decimal(format(self.z, "f")) or self.z <= 0:
            raise InputError("policy 'z'", "must be a decimal number above 0, such as 6 or 6.5", repr(self.z))
        for name in _INTEGERS:
            value = getattr(self, name)
            agreed = value is not None or name in _ALWAYS
            if agreed and not (is_count(value, 1) and value < _LARGEST):
                raise InputError(f"policy {name!r}", _RULE, repr(value))
        for name in self.DIGESTS:
            value = getattr(self, name)
            if value is not None and not is_hex(value, 32):
                raise InputError(f"policy {name!r}", "must be a digest of 32 bytes in hex", repr(value))
        if self.blocks not in (*RULES, NO_BLOCKS):
            raise InputError("policy 'blocks'", f"must be one of {', '.join((*RULES, NO_BLOCKS))}", repr(self.blocks))
        if self.packing not in BITS:
            raise InputError("policy 'packing'", f"must be one of {', '.join(map(str, BITS))}", repr(self.packing))
        if self.sums not in ("checked", "unchecked"):
            raise InputError("policy 'sums'", "must be checked or unchecked", repr(self.sums))
        if self.optimiser is not None and not isinstance(self.optimiser, Optimiser):
            raise InputError("policy 'optimiser'", "must be an Optimiser", type(self.optimiser).__name__)
        if self.optimiser is not None and self.sums != "checked":
            rule = "must be checked with a server optimiser: members compute its model from the sum"
            raise InputError("policy 'sums'", rule, repr(self.sums))

    @classmethod
    def of(cls, settings: Mapping[str, str] | Policy) -> Policy:
        """Reads settings as strings; what is left out has its default. Anything unknown is refused."""
        if isinstance(settings, Policy):
            return settings
        if not isinstance(settings, Mapping):
            raise InputError("policy", "must map names to strings", type(settings).__name__)
        names = [f.name for f in fields(cls)]
        for name, text in settings.items():
            if name not in names:
                raise InputError("policy", f"has the settings {', '.join(names)} and no other", repr(name))
            if not isinstance(text, str) or not text:
                raise InputError(f"policy {name!r}", "must be a string that is not empty", repr(text))
        values: dict[str, Any] = dict(settings)
        return cls(**values | {name: read(name, values[name]) for name, read in _READ.items() if name in values})

    @property
    def checks_sums(self) -> bool:
        """Whether members check what a server announces as a sum (docs/secagg.md, "Checked sums")."""
        return self.sums == "checked"

    @property
    def has_links(self) -> bool:
        """Whether members who are drawn follow links from one state to the next (docs/secagg.md, "Links")."""
        return self.checks_sums and self.cohort is not None

    def as_dict(self) -> dict[str, str]:
        """The settings in force as strings, each in its one spelling."""
        agreed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return {name: str(value) for name, value in agreed.items()} | {"z": plain_decimal(format(self.z, "f"))}

    def check_possible(self, members: int, threshold: int, coordinates: int, key: str = "rademacher") -> None:
        """Whether a consortium of this size, with this kind of key, can keep to it at all."""
        if self.packing > 1 and members >= 1 << (BITS[self.packing] - 3):
            rule = f"must be lower for {members} members: their rounding alone would fill the parts of an element"
            raise InputError("policy 'packing'", rule, self.packing)
        if self.packing > 2 and key == "gaussian":
            rule = "must be 1 or 2 with Gaussian keys, whose values have 8 bits below the point"
            raise InputError("policy 'packing'", rule, self.packing)
        least = max(3, threshold)  # of two members, each learns the other's vector from the sum
        if self.cohort is not None and not least <= self.cohort <= members:
            rule = f"must be from {least} to {members}: the threshold is {threshold}, and there are {members} members"
            raise InputError("policy 'cohort'", rule, self.cohort)
        if self.effective is not None and self.effective > coordinates:
            raise InputError("policy 'effective'", f"must not exceed the {coordinates} coordinates", self.effective)


def _is_decimal(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,18})?", text) is not None


def _decimal(name: str, text: str) -> Decimal:
    if not _is_decimal(text):
        raise InputError(f"policy {name!r}", "must be a decimal number above 0, such as 6 or 6.5", repr(text))
    return Decimal(text)


def _integer(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise InputError(f"policy {name!r}", _RULE, repr(text))
    return int(text)


def _optimiser(name: str, text: str) -> Optimiser:  # noqa: ARG001 - all readers take both
    return Optimiser.of(text)


_READ: dict[str, Callable[[str, str], Any]] = {
    "z": _decimal,
    "optimiser": _optimiser,
    **dict.fromkeys(_INTEGERS, _integer),
}
