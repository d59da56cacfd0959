"""A dealer-free setup with all members in one process, message by message: for research, the demo and tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from quorumark.errors import CeremonyError
from quorumark.field import Vector
from quorumark.identity import Identity
from quorumark.records import Manifest, Terms
from quorumark.setup.dkg import DkgMember, openers, relay_sum

__all__ = ["make_key"]


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
        raise CeremonyError("a member has no share")
    return manifest, shares
