"""Setups with all members in one process: for research, benchmarks, the demo and tests.

`make_key` is the dealer-free ceremony, message by message; `found` runs it over a folder, as members on machines of
their own do, and leaves their homes. `deal_key` is a dealer in memory, who knows the key: for consortia that are too
large to wait for a ceremony.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from quorumark import field, shamir
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import new_salt
from quorumark.consortium.records import Genesis, Manifest, Terms
from quorumark.consortium.shares import share_root
from quorumark.errors import CeremonyError
from quorumark.field import Stream, Vector
from quorumark.setup.dealer import commitment, draw_key
from quorumark.setup.dkg import DkgMember, openers, relay_sum
from quorumark.setup.exchange import set_up

__all__ = ["deal_key", "make_key", "set_up_all"]


def make_key(
    people: Sequence[Identity], terms: Terms, note: Callable[[str], None] = lambda _: None
) -> tuple[Manifest, dict[int, Vector]]:
    """The signed manifest, and every member's share by its point. `note` hears of each step."""
    members = [DkgMember(person, terms, os.urandom(32)) for person in people]

    def each(step: str, call: Callable[[DkgMember], bytes]) -> dict[int, bytes]:
        note(step)
        return {m.point: call(m) for m in members}

    commits = each("commit", lambda m: m.commit())
    reveals = each("reveal", lambda m: m.reveal(commits))
    note("deal")
    deals = {m.point: m.deal(reveals) for m in members}
    for m in members:
        m.receive({dealer: messages[m.point] for dealer, messages in deals.items() if dealer != m.point})
    note("open")
    openings = {m.point: m.open() for m in members if m.point in openers(terms)}
    total = relay_sum(terms, members[0].session, openings)
    confirms = each("confirm", lambda m: m.confirm(total))
    roots = each("root", lambda m: m.root(confirms))
    echoes = each("echo", lambda m: m.echo(roots))
    healths = each("health", lambda m: m.health(echoes))
    for m in members:
        m.finish(healths)  # raises if anything is wrong
    signatures = each("sign", lambda m: m.sign())
    manifest = members[0].signed(signatures)
    shares = {m.point: m.share for m in members if m.share is not None}
    if len(shares) != len(members):
        raise CeremonyError("a member has no share", code="ceremony.too-early")
    return manifest, shares


def set_up_all(homes: Sequence[tuple[HomeFolder, Unlock]], terms: Terms, folder: str | os.PathLike[str]) -> Manifest:
    """The ceremony over a folder: every member is called in turn until all have finished."""
    steps = 0
    while True:
        progress = [set_up(home, unlock, terms, folder) for home, unlock in homes]
        manifest = progress[-1].manifest
        if manifest is not None and all(one.manifest is not None for one in progress):
            return manifest
        steps += 1
        if steps > 100:  # every turn does a step for everybody, and there are fewer
            raise CeremonyError(
                f"the ceremony does not end: {progress[0].step}, waiting for {progress[0].waiting}",
                code="ceremony.stands-still",
            )


def deal_key(people: Sequence[Identity], terms: Terms) -> tuple[Manifest, dict[int, Vector]]:
    """A dealer's setup without files: the signed manifest, and every member's share by its point."""
    session, nonce, points = os.urandom(32).hex(), os.urandom(32), range(1, terms.members + 1)
    entries = draw_key(Stream.fresh("dealer key"), terms.key, 0, terms.coordinates)
    hashed = commitment(nonce, terms.digest())
    hashed.update(entries.astype("<i4").tobytes())
    committed = {"hash": hashed.hexdigest(), "nonce": nonce.hex()}
    if terms.key == "gaussian":
        committed["norm"] = str(int(entries @ entries))
    shares = shamir.share(field.from_signed(entries), terms.threshold, terms.members)
    roots = tuple(share_root([row], new_salt(), terms.leaf, terms.coordinates).hex() for row in shares)
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, session, roots)
    manifest = Manifest(terms, genesis, roots, commitment=committed)
    for person in people:
        signature = person.sign("manifest", manifest.sign_bytes())
        manifest = manifest.with_signature(terms.point_of(person.ed25519), signature)
    return manifest, dict(zip(points, shares, strict=True))
