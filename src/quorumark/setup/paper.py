"""The paper's dealer-free setup (its Alg. 2), kept for comparison: it leaks, so it runs only where that is accepted.

Every member draws w_k ~ N(0, I/K), shares it with all, and adds up what it receives: the key is τ = Σ w_k. A coalition
of m members knows a part of that sum, a vector with cosine √(m/K) to the key: one member of four verifies alone with
half the z. The default protocol (`dkg`) does not do that, but needs K ≥ 2t−1.

    commit, reveal, deal, root, echo, health, sign    as in `dkg`, without an opening; the check is of the degree alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quorumark import field
from quorumark.consortium.identity import Identity
from quorumark.consortium.merkle import SALT_ELEMENTS
from quorumark.consortium.records import Terms
from quorumark.errors import CeremonyError
from quorumark.field import Stream, Vector, derive_key
from quorumark.setup.ceremony import to_bytes
from quorumark.setup.dealer import draw_normal
from quorumark.setup.dkg import KeyCeremony

__all__ = ["PaperMember", "check_paper_terms", "leak"]

_SMALL = 2 + SALT_ELEMENTS


def leak(terms: Terms) -> float:
    """The cosine with the key that t−1 members know from their own parts: √((t−1)/K)."""
    return float(np.sqrt((terms.threshold - 1) / terms.members))


def check_paper_terms(terms: Terms) -> None:
    if terms.setup != "paper":
        raise CeremonyError(
            f"the terms of {terms.name!r} ask for the setup {terms.setup!r}, not 'paper'", code="ceremony.other-setup"
        )
    if terms.key != "gaussian":
        raise CeremonyError(
            "the paper's protocol makes a 'gaussian' key: a sum of normal vectors is not signs",
            code="ceremony.other-key",
        )


class PaperMember(KeyCeremony):
    """One member's side of the paper's protocol."""

    NAME = "paper"
    STEPS = ("commit", "reveal", "deal", "root", "echo", "health", "sign")
    SQUARES = False

    def __init__(self, identity: Identity, terms: Terms, seed: bytes) -> None:
        check_paper_terms(terms)
        super().__init__(identity, terms, seed)
        self._entries = Stream(derive_key(seed, "paper entries", terms.digest()), "entries")
        self._coefficients = Stream(derive_key(seed, "paper coefficients", terms.digest()), "coefficients")
        self._sum: Vector | None = None

    def part(self) -> Vector:
        """This member's part w_k of the key, in steps of 2^-8 with variance 1/K, as field elements."""
        return field.from_signed(draw_normal(self._entries, 0, self.terms.coordinates, 1 / self._k))

    def _share_for(self, point: int, part: Vector) -> Vector:
        """f(x) by Horner's rule, with coefficients that can be drawn again."""
        length = self.terms.coordinates
        value = np.zeros(length, np.uint64)
        for j in reversed(range(self._t - 1)):
            value = field.add(value, self._coefficients.elements(length, j * length), out=value, checked=False)
            value = field.scale(point, value, out=value, checked=False)
        field.add(value, part, out=value, checked=False)
        return value

    def deal(self, reveals: Mapping[int, bytes]) -> dict[int, bytes]:
        """One message for each other member: a whole vector to each."""
        self._join(reveals)
        small, part = self._small_dealing(), self.part()
        others = [x for x in self._everyone if x != self.point]
        bodies = {x: to_bytes(np.array(small[x], np.uint64)) + to_bytes(self._share_for(x, part)) for x in others}
        return {x: self._say("deal", body, x) for x, body in bodies.items()}

    def receive(self, deals: Mapping[int, bytes]) -> None:
        """Adds up all K dealings."""
        small: dict[int, Sequence[int]] = {self.point: self._small_dealing()[self.point]}
        total = self._share_for(self.point, self.part())
        for dealer, body in self._hear("deal", deals, 8 * (_SMALL + self.terms.coordinates)).items():
            words = self._elements(body, dealer, "deal")
            small[dealer] = [int(v) for v in words[:_SMALL]]
            field.add(total, words[_SMALL:], out=total, checked=False)
        self._take_small(small)
        self._sum = total

    def root(self) -> bytes:
        """The commitment to this member's share."""
        if self._sum is None:
            raise CeremonyError("the dealings have not been received yet", code="ceremony.too-early")
        return self._commit_to(self._sum)
