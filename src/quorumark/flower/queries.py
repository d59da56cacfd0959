"""The key ceremony and verification over Flower's `query` messages (`quorumark.node.relay`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from quorumark.consortium.records import Card, Manifest, Terms
from quorumark.flower.client import QUERY
from quorumark.flower.wire import FlowerWire
from quorumark.node.relay import relay_ceremony, relay_query
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.layered import Opened
from quorumark.verify.proof import Audit
from quorumark.verify.reference import Reference

__all__ = ["make_key", "verify_model"]


def make_key(
    grid: Any,
    terms: Terms,
    *,
    timeout: float = 300.0,
    stage_timeout: float = 120.0,
    note: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """The dealer-free ceremony: every member ends with a share in its home, and the manifest comes out.

    All members must take part. A member that refuses says why, and the ceremony stops; a node that is no member's is
    left out. Where a reply is lost, or a node fails, it is asked again: members do every step once and show the same
    messages as often as they are asked. If the server itself dies, call this again with the same terms: the members go
    on where they were.
    """
    wire = FlowerWire(grid, f"query.{QUERY}")
    return relay_ceremony(wire, terms, timeout=timeout, stage_timeout=stage_timeout, note=note)


def verify_model(
    grid: Any,
    reference: Reference,
    suspect: str | os.PathLike[str],
    *,
    align: bool = False,
    lora: bool = False,
    with_base: bool = True,
    audits: Sequence[Audit] = (),
    after: Certificate | None = None,
    examiner: Card | None = None,
    opener: Callable[[Query, Sequence[Partial]], Opened] | None = None,
    nodes: Collection[int] | None = None,
    timeout: float = 60.0,
    stage_timeout: float = 300.0,
    note: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Asks the members whether a model (a file or a folder of shards) is theirs; returns the signed certificate.

    Each answers under its own rules or says why not (`note` hears of it); fewer than t answers are an EvidenceError.
    `align` and `lora` ask as `quorumark verify prepare --align --lora` does; the members are sent the groups, the
    adapter's description and its base model, and compare them with the manifest (`with_base=False`: they have the base
    in their own folders). `nodes`: those to ask, by default all that are there. `audits`: proofs of all audits so far,
    whose leaves are left out; a member that knows of one that is not here refuses.

    With `after` (the certificate of the plain query that did not pass) and an `examiner` it asks by layers
    (docs/layers.md): `opener(query, partials)` hands the sealed answers to the examiner, and gives its word.
    """
    return relay_query(
        FlowerWire(grid, f"query.{QUERY}"),
        reference,
        suspect,
        align=align,
        lora=lora,
        with_base=with_base,
        audits=audits,
        after=after,
        examiner=examiner,
        opener=opener,
        nodes=nodes,
        timeout=timeout,
        stage_timeout=stage_timeout,
        note=note,
    )
