"""The health of a finished setup, on the shares as they lie on disk: do they fit together, and do they hold a key?

Every member's share is first checked against its root in the signed manifest. But roots are what members (or a dealer)
said their shares are: nothing yet shows that these shares lie on one polynomial of degree t−1, or that the key consists
of signs. Two masked random combinations show both, and say nothing else about the key:

    commit, reveal   a session that nobody chose                                                to everybody
    deal             shares of a random number and of zero, which mask the answers              to each member
    echo, health     the answers, committed to before any is said                               to everybody

All K members take part. The degree needs K > t; signs (or a dealer's gaussian norm) need K ≥ 2t−1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from quorumark.canonical import digest
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest
from quorumark.consortium.shares import ShareFile
from quorumark.errors import CeremonyError
from quorumark.field import P, Vector
from quorumark.setup.ceremony import Ceremony, squares_are_known, to_bytes

__all__ = ["CheckMember"]


class CheckMember(Ceremony):
    """One member's side of the check. `share` must be what the manifest's root commits to."""

    NAME = "check"
    STEPS = ("commit", "reveal", "deal", "echo", "health")

    def __init__(self, identity: Identity, manifest: Manifest, share: ShareFile, seed: bytes) -> None:
        super().__init__(identity, manifest.terms, seed, digest("check", manifest.digest()))
        if self._k == self._t:
            raise CeremonyError(
                "with t = K any shares lie on one polynomial: there is nothing to check but each share by itself "
                "(quorumark share verify)",
                code="ceremony.nothing-to-check",
            )
        self.checked = manifest
        self._share = share

    def deal(self, reveals: Mapping[int, bytes]) -> dict[int, bytes]:
        """One message for each other member: its shares of two masks."""
        self._join(reveals)
        others = [x for x in self._everyone if x != self.point]
        return {x: self._say("deal", to_bytes(self._small_for(x)), x) for x in others}

    def _small_for(self, point: int) -> Vector:
        return np.array([sharing[point] for sharing in self._small_sharings(self._health_sharings())], np.uint64)

    def echo(self, deals: Mapping[int, bytes]) -> bytes:
        """Computes this member's answers, and commits to them."""
        bodies = self._hear("deal", deals, 16)
        masks = [self._small_for(self.point), *(self._elements(body, x, "deal") for x, body in bodies.items())]
        seen = digest("check session", bytes.fromhex(self.session), self.checked.digest())
        degree, _ = self._combined(seen, "degree", self._share.pieces())
        square, self._expected = self._square_check(seen, self.checked, self._key_pieces())
        answer = [(value + sum(int(mask[i]) for mask in masks)) % P for i, value in enumerate((degree, square))]
        return self._echo(seen, np.array(answer, np.uint64))

    def _key_pieces(self) -> Iterable[Vector]:
        left = self.terms.coordinates
        for piece in self._share.pieces():
            yield piece[:left]
            left -= min(left, piece.size)
            if not left:
                return

    def finish(self, healths: Mapping[int, bytes]) -> str:
        """Checks everybody's answers; what was found, in words."""
        answers = self._answers(healths)
        self._judge({x: int(v[0]) for x, v in answers.items()}, self._t, "do not lie on one polynomial")
        found = f"the shares of all {self._k} members lie on one polynomial of degree {self._t - 1}"
        if not squares_are_known(self.terms):
            why = "the norm of such a key is not known" if self.terms.setup == "paper" else "K < 2t−1"
            return f"{found}; what they hold was not checked ({why})"
        fault = "do not hold signs" if self.terms.key == "rademacher" else "do not hold a key of the committed norm"
        self._judge({x: int(v[1]) for x, v in answers.items()}, 2 * self._t - 1, fault, self._expected)
        return found + (
            " and hold signs" if self.terms.key == "rademacher" else " and hold a key of the committed norm"
        )
