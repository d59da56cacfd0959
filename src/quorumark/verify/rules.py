"""A member's own rules for answering queries: what it answers without asking a person (HOME/rules.json).

These are one member's decision, and nobody else sees them. What all members agreed on and signed is the terms' policy
(`consortium.policy`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from quorumark.canonical import parse
from quorumark.checks import field_names, is_count, is_decimal
from quorumark.consortium.home import read_file
from quorumark.consortium.strength import ONE
from quorumark.errors import RecordError

__all__ = ["AnswerRules", "read_rules"]


@dataclass(frozen=True)
class AnswerRules:
    """What a member answers, by its own decision; the file is HOME/rules.json.

    `approve`: "ask" (a person approves each query) or "always" (up to `max_queries_per_day` in 24 hours without a
    person). `statistics`: only these; None leaves it to the terms. `max_answers`: how many different x this member
    answers in its life, if fewer than the consortium's budget. `rho`: what the mark's ρ has reached, where that is less
    than agreed, as a decimal number: the budget follows the smaller one. `layers`: whether queries by layers, which
    open many equations, need no person either.
    """

    FORMAT: ClassVar[str] = "quorumark-answer-rules/v1"

    approve: str = "ask"
    max_queries_per_day: int | None = None
    statistics: tuple[str, ...] | None = None
    max_answers: int | None = None
    rho: str | None = None
    layers: bool = False

    def __post_init__(self) -> None:
        if self.approve not in ("ask", "always"):
            raise RecordError(f"approve in a member's rules must be ask or always, not {self.approve!r}")
        for name in ("max_queries_per_day", "max_answers"):
            value = getattr(self, name)
            if value is not None and not is_count(value):
                raise RecordError(f"{name} in a member's rules must be an integer, at least 0, not {value!r}")
        if self.approve == "always" and self.max_queries_per_day is None:
            raise RecordError("a member's rules that approve always must set max_queries_per_day")
        if self.statistics is not None and not all(isinstance(text, str) for text in self.statistics):
            raise RecordError("statistics in a member's rules must be a list of strings")
        if not isinstance(self.layers, bool):
            raise RecordError(f"layers in a member's rules must be true or false, not {self.layers!r}")
        if self.rho is not None and (not is_decimal(self.rho) or not 0 <= Fraction(self.rho) <= 1):
            raise RecordError(f"rho in a member's rules must be a decimal number from 0 to 1, not {self.rho!r}")

    @property
    def reached(self) -> int | None:
        """ρ in units of 2^-32."""
        return None if self.rho is None else int(Fraction(self.rho) * ONE)


def read_rules(path: str | os.PathLike[str]) -> AnswerRules:
    """A member's rules; without a file, a person is asked."""
    if not Path(path).exists():
        return AnswerRules()
    body = parse(read_file(Path(path), "a member's rules"), AnswerRules.FORMAT, "a member's rules", by_hand=True)
    names = field_names(AnswerRules)
    unknown = [name for name in body if name not in ("format", *names) and not name.startswith("x-")]
    if unknown:
        raise RecordError(f"a member's rules cannot be used: unknown field {unknown[0]!r}")
    if "approve" not in body:
        raise RecordError("a member's rules cannot be used: 'approve' is missing")
    values = {name: body[name] for name in names if name in body}
    if "statistics" in values:
        if not isinstance(values["statistics"], list):
            raise RecordError("statistics in a member's rules must be a list of strings")
        values["statistics"] = tuple(values["statistics"])
    return AnswerRules(**values)
