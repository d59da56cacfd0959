"""A resharing in one process, message by message."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest, Terms
from quorumark.field import Vector
from quorumark.setup.reshare import ReshareMember


class Reshare:
    """A whole resharing, step by step, with every message kept."""

    def __init__(
        self, chain: Sequence[Manifest], terms: Terms, people: Sequence[Identity], shares: dict[int, Vector]
    ) -> None:
        self.terms, self.chain = terms, chain
        old = chain[-1].terms
        known = {m.ed25519: m.point for m in old.roster}
        by_key = {p.ed25519: p for p in people}
        self.members: list[ReshareMember] = []
        for entry in terms.roster:
            share = shares.get(known.get(entry.ed25519, 0))
            self.members.append(ReshareMember(by_key[entry.ed25519], chain, terms, os.urandom(32), share))
        self.messages: dict[str, dict[int, bytes]] = {}
        self.deals: dict[int, dict[int, bytes]] = {}

    def each(self, step: str, call: Callable[[ReshareMember], bytes]) -> None:
        self.messages[step] = {m.point: call(m) for m in self.members}

    def until_dealt(self) -> Reshare:
        self.each("commit", lambda m: m.commit())
        self.each("reveal", lambda m: m.reveal(self.messages["commit"]))
        self.deals = {m.point: m.deal(self.messages["reveal"]) for m in self.members}
        return self

    def received(self) -> Reshare:
        for m in self.members:
            m.receive({x: self.deals[x][m.point] for x in self.deals if x != m.point})
        return self

    def differences(self) -> Reshare:
        self.messages["difference"] = {m.point: m.difference() for m in self.members if m.deals_here}
        return self

    def rooted(self) -> Reshare:
        self.each("root", lambda m: m.root(self.messages["difference"]))
        return self

    def healthy(self) -> Reshare:
        self.each("echo", lambda m: m.echo(self.messages["root"]))
        self.each("health", lambda m: m.health(self.messages["echo"]))
        for m in self.members:
            m.finish(self.messages["health"])
        return self

    def whole(self) -> list[Manifest]:
        self.until_dealt().received().differences().rooted().healthy()
        self.each("sign", lambda m: m.sign())
        chains = [m.signed(self.messages["sign"]) for m in self.members]
        assert len({chain[-1].to_bytes() for chain in chains}) == 1
        return chains[0]

    def shares(self) -> dict[int, Vector]:
        return {m.point: share_of(m) for m in self.members}

    def key(self, points: Sequence[int] | None = None) -> NDArray[np.int64]:
        return key_of(self.shares(), self.terms, points)


def share_of(member: ReshareMember) -> Vector:
    assert member.share is not None
    return member.share


def key_of(shares: dict[int, Vector], terms: Terms, points: Sequence[int] | None = None) -> NDArray[np.int64]:
    points = points or range(1, terms.threshold + 1)
    chosen = {x: shares[x][: terms.coordinates] for x in points}
    return field.to_signed(shamir.reconstruct(chosen, terms.threshold))
