"""Whether the members' weights in a sum hide each of them among the others (docs/strength.md, "What a member refuses").

1/Σa² members of equal weight would hide one of them as well as members with the weights a do.

    from the server alone             over all members of the round                       1/Σa² ≥ max(2, t/2)
    from t−1 members and the server   over those who are left, whichever t−1 collude      1/Σa² ≥ 4/3

Colluders know their own models and subtract them; what is left is the others' weighted sum, with weights scaled to 1.
Often two members are left, and two of different weights never reach 2: with 4/3 one of them has at most 3+√8 = 5.8
times the other's examples. Where t−1 colluders would leave one member (t = |U|), the rule holds for the last two: one
alone is hidden by nobody, whatever it weighs.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from quorumark.consortium.records import Member, Terms
from quorumark.errors import InputError

__all__ = ["check_roster", "exposed"]

LEFT_TO_COLLUDERS = Fraction(4, 3)


def check_roster(terms: Terms) -> None:
    """Whether rounds of all members are possible: if not, terms are refused before a key is made for them."""
    problem = exposed(terms, [member.point for member in terms.roster])
    if problem:
        raise InputError(
            "the roster's numbers of examples",
            "must let every member hide among the others, also if t−1 collude: let the largest member count fewer "
            "examples, choose a smaller threshold, or add members",
            problem,
        )


def exposed(terms: Terms, members: Sequence[int]) -> str:
    """Why the weights of these members do not hide each of them; empty if they do."""
    return _exposed(tuple(terms.member(x) for x in members), terms.threshold)


@lru_cache(maxsize=64)
def _exposed(members: tuple[Member, ...], threshold: int) -> str:
    roster = sorted(members, key=lambda member: member.examples)
    least = max(Fraction(2), Fraction(threshold, 2))
    if _spread(roster) < least:
        largest = f"; {roster[-1].name!r} is the largest" if roster else ""
        return f"1/Σa² = {float(_spread(roster)):.3g} < {float(least)}{largest}"
    left = max(2, len(roster) - (threshold - 1))
    remain = _worst(roster, left)
    if _spread(remain) >= LEFT_TO_COLLUDERS:
        return ""
    return (
        f"if the other {len(roster) - left} collude, 1/Σa² = {float(_spread(remain)):.3g} < {LEFT_TO_COLLUDERS} for "
        f"{', '.join(repr(member.name) for member in remain)}; {remain[-1].name!r} is too large beside the others"
    )


def _worst(roster: Sequence[Member], left: int) -> list[Member]:
    """Of all sets of `left` members of a sorted roster the one with the smallest 1/Σa².

    (s+n)²/(q+n²), with s and q of the others, rises in n up to q/s and then falls: it is smallest for the smallest or
    the largest n that there is. So the set is some of the lightest together with some of the heaviest.
    """
    counts = [member.examples for member in roster]
    sums = [0, *accumulate(counts)]
    squares = [0, *accumulate(n * n for n in counts)]

    def spread(light: int) -> Fraction:
        heavy = len(roster) - (left - light)
        total = sums[light] + sums[-1] - sums[heavy]
        square = squares[light] + squares[-1] - squares[heavy]
        return Fraction(total**2, square) if square else Fraction(0)

    best = min(range(left + 1), key=spread)
    return [*roster[:best], *roster[len(roster) - (left - best) :]]


def _spread(members: Sequence[Member]) -> Fraction:
    """1/Σa² = (Σn)²/Σn² for a = n/Σn."""
    counts = [member.examples for member in members]
    return Fraction(sum(counts) ** 2, sum(n * n for n in counts)) if counts else Fraction(0)
