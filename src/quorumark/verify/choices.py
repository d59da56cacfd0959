"""What choices cost in an audit: of the members who open, and of leaves that are left out (docs/verification.md).

Which members. Shares that are not on one polynomial of degree t−1 (t: the first threshold) give another τ_raw for
every choice of members, so the same members must open all leaves, and the choice has a price. Every t points fix one
τ_raw, and m points that agree stand for C(m,t) such choices with the same τ_raw; so no more than C(K,t)/C(m,t)
different keys can be shown by m of K members, and the bound is multiplied by that: 1 if all K open.

Which leaves. x is 0 on leaves that earlier audits opened ("burnt"). Members who could name any leaves as burnt would
leave out those that speak against them; u leaves that nothing explains cost a factor L·C(L,u). Earlier challenges
explain leaves: they are drawn again from their seeds, and must leave out nothing but what challenges before them
opened. But a member who knows the key can make up challenges, and draw seeds until they fit. So a challenge of c leaves
costs a factor L·min(C(L,c), 2^80), for all the seeds that anybody can try, unless the reader vouches for it: it drew
that seed itself, or asked the person who did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, prod

from quorumark.checks import require
from quorumark.reasons import Reason
from quorumark.verify.challenge import Challenge
from quorumark.verify.evidence import Query
from quorumark.verify.omissions import MOST_SEEDS

__all__ = ["Earlier", "about_choices", "charge_of"]


@dataclass(frozen=True)
class Earlier:
    """Challenges of earlier audits and the leaves that they drew: with the reader's word for the seeds, or without."""

    claimed: tuple[Challenge, ...]
    vouched: tuple[Challenge, ...]
    leaves: frozenset[int]
    sure: frozenset[int]

    @classmethod
    def of(
        cls,
        challenge: Challenge,
        query: Query,
        leaves: int,
        earlier: Sequence[Challenge],
        vouched: Sequence[Challenge],
    ) -> Earlier:
        """Draws them again. Each may leave out only what others here opened, or it could be made to draw anything; and
        the query leaves out all that they opened."""
        known = {one.digest(): one for one in vouched}
        claimed = {one.digest(): one for one in earlier if one.digest() not in known}
        waiting = list(enumerate((*known.values(), *claimed.values()), 1))
        found: set[int] = set()
        while waiting:
            ready = [(number, one) for number, one in waiting if found.issuperset(one.burnt)]
            for number, one in ready or waiting[:1]:
                what = f"earlier challenge {number}"
                require(one.genesis == challenge.genesis, what, "is for another genesis")
                require(one.leaves == one.drawn(leaves), what, "asks for other leaves than its seed draws")
                lacking = set(one.burnt) - found
                rule = f"leaves out {len(lacking)} leaves that no challenge before it opened: show those challenges too"
                require(not lacking, what, rule)
                kept = set(one.leaves) - set(query.burnt)
                require(not kept, what, f"opened {len(kept)} leaves that the query does not leave out")
            found.update(leaf for _, one in ready for leaf in one.leaves)
            waiting = [item for item in waiting if item not in ready]
        sure = frozenset(leaf for one in known.values() for leaf in one.leaves)
        return cls(tuple(claimed.values()), tuple(known.values()), frozenset(found), sure)


def charge_of(query: Query, leaves: int, earlier: Earlier, members: int, opened: int, threshold: int) -> Fraction:
    """By what the bound is multiplied: C(K,t)/C(m,t) for the members; for burnt leaves that the reader does not vouch
    for, the smaller of two counts of choices: as if nothing explained them, or by the challenges that do."""

    def any_leaves(count: int) -> int:
        return leaves * comb(leaves, count) if count else 1

    burnt = set(query.burnt)
    seeds = prod(leaves * min(comb(leaves, len(one.leaves)), MOST_SEEDS) for one in earlier.claimed)
    choices = min(any_leaves(len(burnt - earlier.sure)), seeds * any_leaves(len(burnt - earlier.leaves)))
    return Fraction(comb(members, threshold), comb(opened, threshold)) * choices


def about_choices(challenge: Challenge, query: Query, earlier: Earlier, members: int, opened: int) -> list[Reason]:
    """What a reader must know to believe that nobody chose what suited it."""
    reasons = [Reason.of("audit.seed", source=challenge.source)]
    if opened < members:
        reasons.append(Reason.of("audit.some-members", opened=opened, members=members))
    burnt = set(query.burnt)
    sure, left = len(burnt & earlier.sure), len(burnt - earlier.leaves)
    if sure:
        reasons.append(Reason.of("audit.burnt-vouched", leaves=sure, sources=_sources(earlier.vouched)))
    if len(burnt) - sure - left:
        claimed = len(burnt) - sure - left
        reasons.append(Reason.of("audit.burnt-claimed", leaves=claimed, sources=_sources(earlier.claimed)))
    if left:
        reasons.append(Reason.of("audit.burnt-unexplained", leaves=left))
    return reasons


def _sources(challenges: Sequence[Challenge]) -> tuple[str, ...]:
    return tuple(sorted({one.source for one in challenges}))
