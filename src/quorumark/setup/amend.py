"""Amendments: the consortium changes, the shares stay. New numbers of examples, a stolen key replaced, another policy,
another strength of the mark.

An amendment is a successor of the manifest in force, signed by all its members, of whom at least t and more than half
must be the old ones with their old keys (`records.quorum`). So the others can replace a member's stolen keys without
that member's old signature; nobody can do it alone.

    FOLDER/chain/….json          the manifests so far, for a member with new keys
    FOLDER/signature-POINT.hex   of the successor, which everybody computes from the terms that were agreed
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quorumark.consortium.home import ConsortiumFolder, HomeFolder, follow_back, read_file
from quorumark.consortium.identity import verify, verify_card, verify_chain
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Card, Manifest, Member, Terms
from quorumark.consortium.succession import check_follows, check_terms_follow, unchanged
from quorumark.errors import CeremonyError
from quorumark.files import only_one, write_shared
from quorumark.setup.chain import chain_for_newcomer, show_chain, started_from, wait_for_chain
from quorumark.setup.waiting import Progress

__all__ = ["changes", "propose", "sign", "successor", "update"]


def propose(
    before: Terms,
    *,
    threshold: int | None = None,
    examples: Mapping[int, int] | None = None,
    replaced: Mapping[int, Card] | None = None,
    removed: Sequence[int] = (),
    added: Sequence[tuple[Card, int]] = (),
    policy: Mapping[str, str] | None = None,
    strength: Mapping[str, str] | None = None,
    anchor: str | None = None,
) -> Terms:
    """Terms that follow others. Points count anew if somebody leaves; whether it may be so is checked."""
    for point in [*(examples or {}), *(replaced or {}), *removed]:
        before.member(point)
    for card in [*(replaced or {}).values(), *(card for card, _ in added)]:
        verify_card(card)
    roster = []
    for member in before.roster:
        if member.point in removed:
            continue
        new = (replaced or {}).get(member.point)
        kept = member if new is None else replace(member, name=new.name, ed25519=new.ed25519, x25519=new.x25519)
        roster.append(replace(kept, examples=(examples or {}).get(member.point, member.examples)))
    roster += [Member(1, card.name, card.ed25519, card.x25519, count) for card, count in added]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    terms = replace(
        before,
        threshold=before.threshold if threshold is None else threshold,
        roster=tuple(replace(member, point=point) for point, member in enumerate(roster, 1)),
        policy=Policy.of({**before.policy.as_dict(), **(policy or {})}),
        strength=before.strength.changed(strength or {}, before.coordinates),
        anchor=before.anchor if anchor is None else anchor,
        created=now,
    )
    check_terms_follow(terms, before)
    return terms


def needs_new_shares(terms: Terms, before: Terms) -> bool:
    """Whether other people hold shares, or another number of them is needed: an amendment cannot do that."""
    stay = unchanged(terms, before)
    moved = any(now != earlier for now, earlier in stay.items())
    return moved or (terms.threshold, terms.members) != (before.threshold, before.members)


def changes(terms: Terms, before: Terms) -> list[str]:
    """What is different, in words, so that people know what they sign."""
    found = []
    if terms.threshold != before.threshold:
        found.append(f"threshold {before.threshold} → {terms.threshold}")
    known = {member.ed25519: member for member in before.roster}
    for member in terms.roster:
        earlier = known.pop(member.ed25519, None)
        if earlier is None:
            found.append(f"point {member.point}: {member.name} is new, or has new keys")
            continue
        for what in ("name", "x25519", "point", "examples"):
            one, two = getattr(earlier, what), getattr(member, what)
            if one != two:
                found.append(f"{member.name}: {what} {one} → {two}")
    found += [f"point {member.point}: the keys of {member.name} no longer count" for member in known.values()]
    if terms.anchor != before.anchor:
        found.append(
            f"the anchor is the model after the warm-up rounds, {terms.anchor[:16]}…; the signs are drawn anew"
        )
    for what in ("strength", "policy"):
        old, new = getattr(before, what).as_dict(), getattr(terms, what).as_dict()
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                found.append(f"{what} {name}: {old.get(name, 'not set')} → {new.get(name, 'not set')}")
    return found


def successor(before: Manifest, terms: Terms) -> Manifest:
    """The amendment that all sign: other terms, the same shares."""
    if needs_new_shares(terms, before.terms):
        raise CeremonyError(
            "members or the threshold change: that needs new shares (quorumark share reshare), not an amendment",
            code="ceremony.needs-new-shares",
        )
    genesis = replace(before.genesis, anchor=terms.anchor)  # the same, but after warm-up rounds
    manifest = replace(before, terms=terms, genesis=genesis, predecessor=before.digest().hex(), signatures={})
    check_follows(manifest, before)
    return manifest


def sign(
    home: HomeFolder,
    unlock: Unlock,
    terms: Terms,
    folder: Path,
    consortium: ConsortiumFolder | None = None,
    pinned: str | None = None,
) -> Progress:
    """Signs the amendment; once all have signed, makes it the manifest in force.

    A member with new keys has no `consortium` yet: it takes the manifests so far from the folder, up to the
    `pinned` digest.
    """
    known = consortium is not None
    if consortium is None:
        if pinned is not None and started_from(folder) is None:
            return wait_for_chain(folder)
        newcomers_chain = chain_for_newcomer(folder, terms, pinned)
        consortium = home.consortium(newcomers_chain[0].terms)
    with only_one(consortium.path):
        consortium.check_idle()
        chain = consortium.chain() if known else newcomers_chain
        if chain[-1].terms.digest() == terms.digest():
            return Progress("sign", (), chain[-1])
        identity = home.identity(unlock)
        point = terms.point_of(identity.ed25519)
        manifest = successor(chain[-1], terms)
        if known:
            show_chain(chain, folder)
        consortium.remember_signed(chain[-1].digest().hex(), manifest.digest().hex())
        signature = identity.sign("manifest", manifest.sign_bytes()).hex()
        write_shared(folder / f"signature-{point}.hex", signature.encode())
        for member in terms.roster:
            path = folder / f"signature-{member.point}.hex"
            if path.exists():
                found = read_file(path, "a signature").decode(errors="replace").strip()
                verify(member.ed25519, "manifest", manifest.sign_bytes(), found, member.name)
                manifest = manifest.with_signature(member.point, bytes.fromhex(found))
        missing = [member for member in terms.roster if member.point not in manifest.signatures]
        if missing:
            files = tuple(folder / f"signature-{member.point}.hex" for member in missing)
            return Progress("sign", tuple(member.name for member in missing), files=files)
        verify_chain([*chain, manifest])
        consortium.adopt([*chain, manifest])
        return Progress("sign", (), manifest)


def update(home: HomeFolder, manifest: Manifest, history: Path) -> ConsortiumFolder:
    """Takes over a later manifest that this member missed. Its share of a later epoch must then be recovered."""
    chain = follow_back(manifest, history)
    manifest.terms.point_of(home.card().ed25519)
    consortium = home.consortium(chain[0].terms)
    with only_one(consortium.path):
        consortium.check_idle()
        consortium.check_followed_by(chain)
        for before, link in itertools.pairwise(chain):
            consortium.remember_signed(
                before.digest().hex(), link.digest().hex()
            )  # none that this member's own forbids
        consortium.adopt(chain)
    return consortium
