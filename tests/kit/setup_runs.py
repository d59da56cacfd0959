"""Setups and resharings in one process, message by message, and what an eavesdropper scores."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest, Terms
from quorumark.field import Vector
from quorumark.setup.dkg import DkgMember, openers, relay_sum
from tests.kit.ceremony import identities, make_terms


@dataclass
class Run:
    """A whole ceremony, step by step, with every message kept."""

    people: list[Identity]
    terms: Terms
    members: list[DkgMember]
    messages: dict[str, dict[int, bytes]] = dataclass_field(default_factory=dict)
    deals: dict[int, dict[int, bytes]] = dataclass_field(default_factory=dict)
    total: bytes = b""

    @classmethod
    def start(cls, count: int, threshold: int, coordinates: int, people: list[Identity] | None = None) -> Run:
        people = people or identities(count)
        terms = make_terms(people, threshold, coordinates)
        return cls(people, terms, [DkgMember(p, terms, os.urandom(32)) for p in people])

    def each(self, step: str, call: Callable[[DkgMember], bytes]) -> None:
        self.messages[step] = {m.point: call(m) for m in self.members}

    def until_dealt(self) -> Run:
        self.each("commit", lambda m: m.commit())
        self.each("reveal", lambda m: m.reveal(self.messages["commit"]))
        self.deals = {m.point: m.deal(self.messages["reveal"]) for m in self.members}
        return self

    def received(self) -> Run:
        for m in self.members:
            m.receive({x: self.deals[x][m.point] for x in self.deals if x != m.point})
        return self

    def opened(self) -> Run:
        self.messages["open"] = {m.point: m.open() for m in self.members if m.point in openers(self.terms)}
        self.total = relay_sum(self.terms, self.members[0].session, self.messages["open"])
        return self

    def shared(self) -> Run:
        self.each("confirm", lambda m: m.confirm(self.total))
        self.each("root", lambda m: m.root(self.messages["confirm"]))
        return self

    def healthy(self) -> Run:
        self.each("echo", lambda m: m.echo(self.messages["root"]))
        self.each("health", lambda m: m.health(self.messages["echo"]))
        for m in self.members:
            m.finish(self.messages["health"])
        return self

    def whole(self) -> Manifest:
        self.until_dealt().received().opened().shared().healthy()
        self.each("sign", lambda m: m.sign())
        manifests = {m.signed(self.messages["sign"]).to_bytes() for m in self.members}
        assert len(manifests) == 1
        return Manifest.from_bytes(manifests.pop())

    def key(self, chosen: tuple[int, ...] | None = None) -> NDArray[np.int64]:
        points = chosen or tuple(range(1, self.terms.threshold + 1))
        shares = {x: share(self.members[x - 1]) for x in points}
        return field.to_signed(shamir.reconstruct(shares, self.terms.threshold))


def share(member: DkgMember) -> Vector:
    assert member.share is not None
    return member.share


LEAK = 6.5  # about 40 correlations below this: a false alarm less than once in 10^8 runs


def score(view: NDArray[np.float64], key: NDArray[Any]) -> float:
    """How many standard deviations a view's correlation with the key is away from chance."""
    return abs(float(view @ key)) / float(np.linalg.norm(view)) / float(np.sqrt(np.mean(key * key)))
