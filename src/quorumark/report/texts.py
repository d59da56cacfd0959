"""Sentences about what records say in numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from quorumark.consortium.records import Terms
from quorumark.verify.evidence import Finding, Query
from quorumark.verify.omissions import left_out

__all__ = ["about_charges", "about_left_out"]


def about_left_out(query: Query, terms: Terms, audits: Mapping[str, Collection[int]]) -> list[str]:
    """What a query leaves out, how much, and why. `audits`: those that explain it, by the digest of their challenge."""
    if not query.burnt:
        return []
    burnt, whole = set(query.burnt), query.norm2 + query.burnt_norm2
    gone = left_out(terms, query.burnt)
    texts = [
        f"left out: {_count(len(burnt), 'leaf', 'leaves')} of the key, {gone:,} of {terms.coordinates:,} coordinates "
        f"({100 * gone / terms.coordinates:.2f} %), with {100 * query.burnt_norm2 / max(whole, 1):.2f} % of what the "
        "suspect would have shown"
    ]
    explained: set[int] = set()
    for name, leaves in sorted(audits.items()):
        if burnt.issuperset(leaves):
            explained.update(leaves)
            texts.append(f"the audit {name[:16]} opened {_count(len(leaves), 'leaf', 'leaves')} of them")
    rest = len(burnt - explained)
    if rest:
        texts.append(f"NOTHING EXPLAINS why {_count(rest, 'leaf is', 'leaves are')} left out")
    return texts


def about_charges(finding: Finding) -> list[str]:
    """By how much the threshold was raised for what the asker could choose."""
    if finding.charged == finding.agreed:
        return []
    return [
        f"the asker had up to 10^{finding.log10_choices} ways to read the suspect and to leave something out; the "
        f"threshold pays for that: {finding.charged} instead of {finding.agreed}"
    ]


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
