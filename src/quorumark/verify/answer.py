"""Answering: a member's partial, one signed number (docs/verification.md).

    partial = answer(home, unlock, ours, "suspect.safetensors", query, approved=True)       # each member

A member computes x from the suspect itself and takes nobody's word for it; the one number that leaves its machine is
⟨x, its share⟩ mod p. The answers are a Shamir sharing of Y = ⟨x, τ⟩, which is opened anyway, and say no more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import shamir
from quorumark.canonical import canonical
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import Tree, salt_seed
from quorumark.consortium.records import Manifest
from quorumark.consortium.shares import ShareInfo
from quorumark.errors import EvidenceError, GuardError, InputError, KeystoreError
from quorumark.field import P, derive_key
from quorumark.model.layout import Source
from quorumark.model.statistic import inner_product
from quorumark.model.suspect import Suspect
from quorumark.verify.evidence import Partial, Query, now
from quorumark.verify.guard import check_query
from quorumark.verify.ledger import Ledger
from quorumark.verify.proof import Audit, explain
from quorumark.verify.query import Progress, difference, prepare_again
from quorumark.verify.reference import Reference
from quorumark.verify.rules import read_rules

__all__ = ["answer", "answer_with", "whitened"]


def answer(
    home: HomeFolder,
    unlock: Unlock,
    reference: Reference,
    suspect: Source | Suspect,
    query: Query,
    *,
    approved: bool = False,
    members: Collection[int] = (),
    audits: Sequence[Audit] = (),
    place: ConsortiumFolder | None = None,
    progress: Progress | None = None,
) -> Partial:
    """A member's partial, from its home. A GuardError says why the member does not answer; the ledger keeps that too.

    `members`: for the paper's variant, the points whose answers are to be added up under masks (none: an open partial).
    `audits`: what the query leaves out, where the member took no part in opening it. What they prove goes into the
    ledger, whatever becomes of the query.
    """
    place = place or home.only_consortium()
    manifest = place.manifest()
    if manifest.digest() != reference.manifest.digest():
        raise EvidenceError("this member's manifest in force is another one than the query's: compare their digests")
    prepared = prepare_again(reference, suspect, query, progress)
    if prepared.query != query:
        raise EvidenceError(f"the query does not describe this suspect: {difference(prepared.query, query)}")
    identity = home.identity(unlock)
    point = manifest.terms.point_of(identity.ed25519)
    _check_set(manifest, point, members)
    ledger = Ledger.open(place, manifest)
    with ledger.exclusive():  # nobody else answers here between the check and the entry
        for name, leaves in explain(place.chain(), audits, ledger.audits()).items():
            ledger.record_burnt(leaves, name)
        try:
            approved_by = check_query(query, prepared.form.x, manifest, ledger, read_rules(home.rules_path), approved)
        except GuardError as error:
            ledger.record_refusal(query, error.reason)
            raise
        value = _inner_product(place, unlock, manifest, point, prepared.form.x)
        history = {x: outcome for x, outcome in ledger.known().items() if x != query.x}
        # on disk before the answer leaves: a crash costs an answer, never an entry
        ledger.record_answer(query, prepared.form.x, approved_by)
    return answer_with(identity, manifest, query, value, members, history, ledger.head)


def _inner_product(place: ConsortiumFolder, unlock: Unlock, manifest: Manifest, point: int, x: NDArray[Any]) -> int:
    """⟨x, σ ⊙ s⟩ mod p over the sealed share, checked against its root in the same pass."""
    share = place.share(unlock)
    if share.info != ShareInfo.under(manifest, point, share.info.block):
        raise KeystoreError(f"{str(place.share_path())!r} belongs to another consortium, member or epoch")
    tree = Tree(salt_seed(share.salt), share.info.leaf, share.info.length)
    total, start = 0, 0
    for piece in share.pieces():
        tree.update(piece)
        used = piece[: max(0, x.size - start)]  # the keys of the archives come after the key
        if used.size:
            total += inner_product(whitened(manifest, x, start, used.size), used)
        start += piece.size
    if tree.root().hex() != manifest.roots[point - 1]:
        raise KeystoreError(f"{str(place.share_path())!r} is not the share that the manifest's root commits to")
    return total % P


def whitened(manifest: Manifest, x: NDArray[Any], start: int, count: int) -> NDArray[Any]:
    """σ ⊙ x for some coordinates: ⟨x, σ ⊙ τ_raw⟩ = ⟨σ ⊙ x, τ_raw⟩, and shares are of τ_raw."""
    part = x[start : start + count]
    return np.where(manifest.genesis.whitening(start, count), -part, part).astype(x.dtype, copy=False)


def answer_with(
    identity: Identity,
    manifest: Manifest,
    query: Query,
    value: int,
    members: Collection[int] = (),
    history: Mapping[str, str] | None = None,
    ledger: str = "00" * 32,
) -> Partial:
    """Signs ⟨x, share⟩ as a partial: open, or masked for a set of members.

    Masked: λ·y + Σ± masks, one for each other member of the set, from the key that the two share. Over the whole set
    they cancel, and the sum opens Y and nothing else; nobody can be corrected or named then.
    """
    point = manifest.terms.point_of(identity.ed25519)
    chosen = _check_set(manifest, point, members)
    if chosen:
        weights = dict(zip(chosen, shamir.lagrange(chosen), strict=True))
        value = weights[point] * value
        for other in chosen:
            if other != point:
                secret = identity.exchange(manifest.terms.member(other).x25519)
                pair = canonical({"query": query.digest(), "members": list(chosen), "pair": sorted((point, other))})
                mask = int.from_bytes(derive_key(secret, "partial mask", pair), "big")
                value += mask if point < other else -mask
    return Partial.sign(
        identity,
        manifest=query.manifest,
        epoch=query.epoch,
        point=point,
        query=query.digest(),
        suspect=query.suspect,
        x=query.x,
        answer=str(value % P),
        members=chosen,
        history=dict(history or {}),
        ledger=ledger,
        created=now(),
    )


def _check_set(manifest: Manifest, point: int, members: Collection[int]) -> tuple[int, ...]:
    """The points of a masked partial, in order: t members or more, this one among them; none for an open one."""
    chosen, terms = tuple(sorted(set(members))), manifest.terms
    sound = point in chosen and len(chosen) >= terms.threshold and chosen[0] >= 1 and chosen[-1] <= terms.members
    if chosen and not sound:
        rule = (
            f"must be at least {terms.threshold} of the points 1 to {terms.members}, this member's {point} among them"
        )
        raise InputError("members", rule, list(chosen))
    return chosen
