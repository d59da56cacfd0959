"""Answering: a member's partial, one signed number (docs/verification.md).

    partial = answer(home, unlock, ours, "suspect.safetensors", query, approved=True)       # each member

A member computes x from the suspect itself and takes nobody's word for it; the one number that leaves its machine is
⟨x, its share⟩ mod p. The answers are a Shamir sharing of Y = ⟨x, τ⟩, which is opened anyway, and say no more. By layers
(docs/layers.md) it is one number for each block, sealed to the examiner that the query names.
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
from quorumark.model.blocks import Blocks
from quorumark.model.layout import Source
from quorumark.model.statistic import inner_product
from quorumark.model.suspect import Suspect
from quorumark.reasons import Reason
from quorumark.verify.certificate import Certificate
from quorumark.verify.combine import check_signed
from quorumark.verify.evidence import Partial, Query, now
from quorumark.verify.guard import check_content, check_query
from quorumark.verify.layered import Layers, seal
from quorumark.verify.ledger import Ledger
from quorumark.verify.proof import Audit, explain
from quorumark.verify.query import Prepared, Progress, agreed_blocks, difference, prepare_again
from quorumark.verify.reference import Reference
from quorumark.verify.rules import AnswerRules, read_rules

__all__ = ["answer", "answer_layers", "answer_with", "check_answerable", "seal_context", "whitened"]


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
    after: Certificate | None = None,
    consortium: ConsortiumFolder | None = None,
    rules: AnswerRules | None = None,
    progress: Progress | None = None,
) -> Partial:
    """A member's partial, from its home. A GuardError says why the member does not answer; the ledger keeps that too.

    `members`: for the paper's variant, the points whose answers are to be added up under masks (none: an open partial).
    `audits`: what the query leaves out, where the member took no part in opening it. What they prove goes into the
    ledger, whatever becomes of the query. `after`: for a query by layers, the certificate of the plain one before it.
    `rules`: this member's rules, if not those in its home.
    """
    consortium = consortium or home.only_consortium()
    manifest = consortium.manifest()
    if manifest.digest() != reference.manifest.digest():
        raise EvidenceError("this member's manifest in force is another one than the query's: compare their digests")
    prepared = prepare_again(reference, suspect, query, progress)
    if prepared.query != query:
        raise EvidenceError(f"the query does not describe this suspect: {difference(prepared.query, query)}")
    identity = home.identity(unlock)
    point = manifest.terms.point_of(identity.ed25519)
    _check_set(manifest, point, members)
    if query.layers is not None and members:
        raise InputError("members", "must be none for a query by layers, whose answers are sealed", list(members))
    blocks = agreed_blocks(reference)
    ledger = Ledger.open(consortium, manifest)
    with ledger.exclusive():  # nobody else answers here between the check and the entry
        for name, leaves in explain(consortium.chain(), audits, ledger.audits()).items():
            ledger.record_burnt(leaves, name)
        rules = rules or read_rules(home.rules_path)
        try:
            if query.layers is not None:
                found = _check_before(query, query.layers, after, manifest, ledger)
                if ledger.known().get(query.x) != "failed":
                    ledger.record_outcome(query.x, "failed", found.digest())
            approved_by = check_query(query, prepared.form.x, manifest, ledger, rules, approved, blocks)
        except GuardError as error:
            ledger.record_refusal(query, error.reason)
            raise
        cut = blocks if query.layers is not None and blocks is not None else Blocks((0, prepared.form.x.size), ("",))
        values = _inner_products(consortium, unlock, manifest, point, prepared.form.x, cut)
        history = {x: outcome for x, outcome in ledger.known().items() if x != query.x}
        opened = {x: count for x, count in ledger.equations().items() if x in history and count > 1}
        # on disk before the answer leaves: a crash costs an answer, never an entry
        ledger.record_answer(query, prepared.form.x, approved_by)
    if query.layers is not None:
        return answer_layers(identity, manifest, query, values, history, ledger.head, opened)
    return answer_with(identity, manifest, query, values[0], members, history, ledger.head, opened)


def check_answerable(
    home: HomeFolder,
    reference: Reference,
    prepared: Prepared,
    *,
    after: Certificate | None = None,
    consortium: ConsortiumFolder | None = None,
) -> None:
    """Whether `answer` could answer once somebody approves: the checks that need no approval, before a person is asked.

    `prepared` is what this member computed from the suspect. An error says why not; nothing is written.
    """
    consortium, query = consortium or home.only_consortium(), prepared.query
    manifest = consortium.manifest()
    ledger = Ledger.open(consortium, manifest)
    with ledger.exclusive():
        if query.layers is not None:
            _check_before(query, query.layers, after, manifest, ledger)
        rules = read_rules(home.rules_path)
        check_content(query, prepared.form.x, manifest, ledger, rules, agreed_blocks(reference))


def _check_before(
    query: Query, layers: Layers, after: Certificate | None, manifest: Manifest, ledger: Ledger
) -> Certificate:
    """A query by layers costs many equations: it is answered after a plain one about the same x did not pass."""
    if after is None or after.digest() != layers.after:
        raise EvidenceError("a query by layers takes the certificate of the plain query before it: pass it (--after)")
    check_signed(after, manifest)
    found = after.finding
    plain = found.query.layers is None and found.query.x == query.x and found.value == layers.value
    if not plain:
        raise EvidenceError("the certificate before the query is not that of a plain query about the same suspect")
    if found.verdict == "PASSED" or ledger.known().get(query.x) == "passed":
        raise GuardError(
            "the plain query about this suspect has passed: that is proof enough, and an answer by layers would only "
            "tell of the key",
            reason=Reason.of("guard.passed-before"),
        )
    return after


def _inner_products(
    consortium: ConsortiumFolder, unlock: Unlock, manifest: Manifest, point: int, x: NDArray[Any], blocks: Blocks
) -> list[int]:
    """⟨x_b, σ ⊙ s⟩ mod p of each block over the sealed share, checked against its root in the same pass."""
    share = consortium.share(unlock)
    if share.info != ShareInfo.under(manifest, point, share.info.block):
        raise KeystoreError(f"{str(consortium.share_path())!r} belongs to another consortium, member or epoch")
    tree = Tree(salt_seed(share.salt), share.info.leaf, share.info.length)
    totals, start = [0] * blocks.count, 0
    for piece in share.pieces():
        tree.update(piece)
        used = piece[: max(0, x.size - start)]  # the keys of the archives come after the key
        if used.size:
            signed = whitened(manifest, x, start, used.size)
            for block, low, high in blocks.of(start, start + used.size):
                part = slice(low - start, high - start)
                totals[block] += inner_product(signed[part], used[part])
        start += piece.size
    if tree.root().hex() != manifest.roots[point - 1]:
        raise KeystoreError(f"{str(consortium.share_path())!r} is not the share that the manifest's root commits to")
    return [total % P for total in totals]


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
    blocks: Mapping[str, int] | None = None,
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
    about = _about(query, point, history, blocks, ledger)
    return Partial.sign(identity, **about, answer=str(value % P), members=chosen)


def answer_layers(
    identity: Identity,
    manifest: Manifest,
    query: Query,
    values: Sequence[int],
    history: Mapping[str, str] | None = None,
    ledger: str = "00" * 32,
    blocks: Mapping[str, int] | None = None,
) -> Partial:
    """Signs ⟨x_b, share⟩ of every block, sealed to the query's examiner; 0 for blocks that are left out."""
    if query.layers is None:
        raise InputError("query", "must be one by layers", "a plain one")
    point = manifest.terms.point_of(identity.ed25519)
    kept = [value if norm2 else 0 for value, norm2 in zip(values, query.layers.norm2, strict=True)]
    sealed = seal(kept, query.layers.examiner, seal_context(query, point))
    about = _about(query, point, history, blocks, ledger)
    return Partial.sign(identity, **about, answer="", members=(), sealed=sealed)


def seal_context(query: Query, point: int) -> bytes:
    """What sealed numbers answer, and whose they are."""
    return canonical({"query": query.digest(), "point": point})


def _about(
    query: Query, point: int, history: Mapping[str, str] | None, blocks: Mapping[str, int] | None, ledger: str
) -> dict[str, Any]:
    return {
        "manifest": query.manifest,
        "epoch": query.epoch,
        "point": point,
        "query": query.digest(),
        "suspect": query.suspect,
        "x": query.x,
        "history": dict(history or {}),
        "blocks": dict(blocks or {}),
        "ledger": ledger,
        "created": now(),
    }


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
