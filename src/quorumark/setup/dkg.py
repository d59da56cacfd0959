"""Dealer-free setup: every member ends with a share of signs τ = ±1 that nobody knows (docs/protocol.md, "Setup").

Each member runs a `DkgMember` through these steps; every step takes the messages of the one before, as bytes, and gives
messages, as bytes. How they travel is somebody else's business.

    commit   a hash of this member's nonce and session key                                      to everybody
    reveal   the nonce and the session key; together they make the session                      to everybody
    deal     ⌈d/m⌉ random sharings, m = K−t+1, sealed; t of the K recipients need none of it:
             their values are the output of a generator that both sides can run                 to each member
    open     2t−1 members: λ_i·r_i² under masks that cancel in the sum                          to the relay
    confirm  the hash of the sum r², which must be the same for everybody                       to everybody
    root     the commitment to the share s_i = r_i·(r²)^(2^59−1)                                to everybody
    echo     the hash of all roots, which must be the same for everybody, and a commitment to
             the answer that follows                                                            to everybody
    health   two masked random combinations: degree t−1, and τ² = 1                             to everybody
    sign     the signature of the manifest                                                      to everybody

Why it leaks nothing to t−1 members and the relay: of the K dealt sharings at least m are honest and random, any m
columns of the m×K Vandermonde matrix are invertible, so the m combinations are uniformly random sharings; r² is opened
and hides the sign of r; everything else is masked. It needs K ≥ 2t−1 members to open a product, all K of them to deal,
and members who follow the protocol: who does not is noticed by the health check, and named where the numbers allow.

The masked combinations, the echo and the session are `ceremony`'s.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from quorumark import field, shamir
from quorumark.canonical import digest
from quorumark.consortium.identity import Header, Identity, open_message
from quorumark.consortium.merkle import SALT_ELEMENTS
from quorumark.consortium.records import Genesis, Manifest, Terms
from quorumark.consortium.shares import share_root
from quorumark.errors import CeremonyError, InputError, MessageError
from quorumark.field import P, Stream, Vector
from quorumark.setup.ceremony import SigningCeremony, round_table, to_bytes, view

__all__ = ["DkgMember", "KeyCeremony", "check_terms", "neighbours", "openers", "relay_sum"]

_SMALL = 2 + SALT_ELEMENTS  # elements besides the vector in a deal: two health masks and the salt
_PIECE = 1 << 18


def check_terms(terms: Terms) -> None:
    """Whether the leak-free protocol can run: a product of two shared numbers needs 2t−1 members to open."""
    if terms.setup != "dkg":
        raise CeremonyError(
            f"the terms of {terms.name!r} ask for the setup {terms.setup!r}, not 'dkg'", code="ceremony.other-setup"
        )
    if terms.key != "rademacher":
        raise CeremonyError(
            "the leak-free setup makes signs only: a 'gaussian' key needs a dealer or the paper's protocol, which "
            "leaks",
            code="ceremony.other-key",
        )
    if terms.members < 2 * terms.threshold - 1:
        raise CeremonyError(
            f"the dealer-free setup needs K ≥ 2t−1 = {2 * terms.threshold - 1} members, but there are {terms.members}: "
            f"lower the threshold to {(terms.members + 1) // 2}, add members, or use a dealer (setup 'dealer')",
            code="ceremony.too-few-members",
        )


def openers(terms: Terms) -> tuple[int, ...]:
    """The members who open the squares: the first 2t−1."""
    return tuple(range(1, 2 * terms.threshold))


def neighbours(chosen: Sequence[int], point: int, threshold: int) -> list[int]:
    """With whom an opener shares masks: the ⌈t/2⌉ on either side, round the table of 2t−1.

    Such a ring stays in one piece when any t−1 members are taken out of it (a Harary graph: 2⌈t/2⌉ ≥ t of them would
    have to go), so t−1 colluders who strip their own masks still see only the sum of all the others' vectors.
    """
    at, size, reach = chosen.index(point), len(chosen), (threshold + 1) // 2
    return sorted({chosen[(at + step) % size] for step in range(-reach, reach + 1) if step})


class KeyCeremony(SigningCeremony):
    """The end of every setup without a dealer: from shares to a manifest that all have signed."""

    SQUARES: ClassVar[bool]  # whether shares must hold signs, and K ≥ 2t−1

    def __init__(self, identity: Identity, terms: Terms, seed: bytes) -> None:
        super().__init__(identity, terms, seed, terms.digest())
        self.share: Vector | None = None
        self.salt = self._private.elements(SALT_ELEMENTS)
        self.others_salts = np.zeros((self._k, SALT_ELEMENTS), np.uint64)

    @abstractmethod
    def deal(self, reveals: Mapping[int, bytes]) -> dict[int, bytes]:
        """One message for each other member."""

    @abstractmethod
    def receive(self, deals: Mapping[int, bytes]) -> None:
        """Takes all K dealings in."""

    def _small_dealing(self) -> dict[int, list[int]]:
        """For each member: a share of a random number, of zero with twice the degree, and of this member's salt."""
        salts = [(int(v), self._t - 1, self._everyone) for v in self.salt]
        sharings = self._small_sharings([*self._health_sharings(), *salts])
        return {x: [sharing[x] for sharing in sharings] for x in self._everyone}

    def _take_small(self, received: Mapping[int, Sequence[int]]) -> None:
        """The masks for the health check, and this member's shares of all salts."""
        self._masks = [sum(row[column] for row in received.values()) % P for column in range(2)]
        self.others_salts = np.array([received[x][2:] for x in self._everyone], np.uint64)

    def _commit_to(self, share: Vector) -> bytes:
        self.share = share
        self._own_root = share_root([share], self.salt, self.terms.leaf, self.terms.coordinates)
        return self._say("root", self._own_root)

    def echo(self, roots: Mapping[int, bytes]) -> bytes:
        """Computes two random combinations of this share, drawn after everybody committed to theirs, each under a mask.

        They are not said yet: see `ceremony`.
        """
        if self.share is None:
            raise CeremonyError("this member has no share yet", code="ceremony.too-early")
        bodies = self._hear("root", roots, 32) | {self.point: self._own_root}
        self._roots = tuple(bodies[point].hex() for point in self._everyone)
        seen = [bytes.fromhex(self.session), *(bytes.fromhex(root) for root in self._roots)]
        self._coins = coins = digest(f"{self.NAME} health", *seen)
        # Σ ρ_j·s_j and Σ ρ'_j·s_j², and what the second must be for signs: Σ ρ'_j
        degree, _ = self._combined(coins, "degree", [self.share])
        answer = [(degree + self._masks[0]) % P]
        if self.SQUARES:
            square, self._expected = self._combined(coins, "square", [self.share], squares=True)
            answer.append((square + self._masks[1]) % P)
        return self._echo(digest(f"{self.NAME} roots", *seen), np.array(answer, np.uint64))

    def finish(self, healths: Mapping[int, bytes]) -> Manifest:
        """Checks everybody's combinations; the manifest to sign, without signatures."""
        answers = self._answers(healths)
        self._judge({x: int(v[0]) for x, v in answers.items()}, self._t, "do not lie on one polynomial")
        if self.SQUARES:
            squares = {x: int(v[1]) for x, v in answers.items()}
            self._judge(squares, 2 * self._t - 1, "do not hold signs", self._expected)
        return self.manifest()

    def manifest(self) -> Manifest:
        terms = self.terms
        genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, self.session, self._roots)
        return Manifest(terms, genesis, self._roots)

    def signed(self, signatures: Mapping[int, bytes]) -> Manifest:
        """The manifest with all signatures, each checked."""
        return self._with_signatures(signatures)


class DkgMember(KeyCeremony):
    """One member's side of the leak-free setup."""

    NAME = "dkg"
    STEPS = ("commit", "reveal", "deal", "open", "confirm", "root", "echo", "health", "sign")
    SQUARES = True

    def __init__(self, identity: Identity, terms: Terms, seed: bytes) -> None:
        check_terms(terms)
        super().__init__(identity, terms, seed)
        self._rows = self._k - self._t + 1  # m: combinations that no t−1 members know anything about
        self._length = -(-terms.coordinates // self._rows)
        self._r: Vector | None = None
        self._squares: Vector | None = None
        self._opened_by: tuple[int, ...] | None = None

    # --- deal: random sharings, most of them generated ---

    def deal(self, reveals: Mapping[int, bytes]) -> dict[int, bytes]:
        """One message for each other member."""
        self._join(reveals)
        small, dealt = self._small_dealing(), self._dealing()
        messages = {}
        for point in self._everyone:
            if point == self.point:
                continue
            parts = [view(np.array(small[point], np.uint64))] + ([view(dealt[point])] if point in dealt else [])
            messages[point] = self._say("deal", b"".join(parts), point)
        return messages

    def _dealing(self) -> dict[int, Vector]:
        """The vectors for those members whose values are not generated, this member among them."""
        generated = self._generated(self.point)
        known = np.empty((self._t, self._length), np.uint64)
        for row, point in zip(known, generated, strict=True):
            self._dealt_stream(self.point, point).elements(self._length, out=row)
        others = [point for point in self._everyone if point not in generated]
        values = field.matmul(shamir.lagrange_matrix(generated, others), known, checked=False)
        return dict(zip(others, values, strict=True))

    def _generated(self, dealer: int) -> list[int]:
        return round_table(self._everyone, dealer, self._t)

    # --- open: the squares of numbers that nobody knows ---

    def receive(self, deals: Mapping[int, bytes]) -> None:
        """Takes all K dealings in; all of them, or the combinations are not random."""
        expected = {
            dealer: 8 * (_SMALL + (0 if self.point in self._generated(dealer) else self._length))
            for dealer in self._everyone
            if dealer != self.point
        }
        bodies = self._hear("deal", deals, expected)
        received = np.empty((self._k, self._length), np.uint64)
        small: dict[int, Sequence[int]] = {self.point: self._small_dealing()[self.point]}
        received[self.point - 1] = self._dealing()[self.point]
        for dealer, body in bodies.items():
            words = self._elements(body, dealer, "deal")
            small[dealer] = [int(v) for v in words[:_SMALL]]
            if self.point in self._generated(dealer):
                self._dealt_stream(dealer, self.point).elements(self._length, out=received[dealer - 1])
            else:
                received[dealer - 1] = words[_SMALL:]
        vandermonde = np.array([[pow(x, a, P) for x in self._everyone] for a in range(self._rows)], np.uint64)
        self._r = field.matmul(vandermonde, received, checked=False).reshape(-1)[: self.terms.coordinates]
        self._take_small(small)

    def open(self, chosen: Sequence[int] | None = None) -> bytes:
        """This member's part of the opening: λ_i·r_i² plus masks that cancel over exactly this set.

        Dealings are opened once. If an opener is lost, start a new ceremony: a second opening by another set is
        harmless only if every dealing was right, and with a wrong one the difference of the two shows r.
        """
        r = self._received()
        chosen = tuple(sorted(chosen or openers(self.terms)))
        if len(chosen) != 2 * self._t - 1 or len(set(chosen)) != len(chosen) or not set(chosen) <= set(self._everyone):
            raise InputError("chosen", f"must be 2t−1 = {2 * self._t - 1} different members", chosen)
        if self.point not in chosen:
            raise InputError("chosen", f"must include this member (point {self.point})", chosen)
        if self._opened_by not in (None, chosen):
            raise CeremonyError(
                f"these dealings were opened by the members {self._opened_by}: start a new ceremony",
                code="ceremony.opened-already",
            )
        self._opened_by = chosen
        weight = shamir.lagrange(chosen)[chosen.index(self.point)]
        vector = field.mul(r, r, checked=False)
        field.scale(weight, vector, out=vector, checked=False)
        context = b"".join(x.to_bytes(8, "big") for x in chosen)
        masks = []
        for other in neighbours(chosen, self.point, self._t):
            low, high = sorted((self.point, other))
            pair = low.to_bytes(8, "big"), high.to_bytes(8, "big")
            masks.append((Stream(self._pairs[other], "dkg square mask", *pair, context), self.point == high))
        for part in field.chunks(vector.size, _PIECE):
            piece = vector[part]  # stays in a cache while all masks are added to it
            for stream, negate in masks:
                stream.add_to(piece, part.start, negate=negate, checked=False)
        return self._say("open", view(vector))

    # --- confirm, root: everybody sees the same squares, and commits to a share ---

    def confirm(self, total: bytes) -> bytes:
        """Checks the relay's sum and says its hash."""
        if len(total) != 8 * self.terms.coordinates:
            raise CeremonyError(
                f"the relay's sum must have {self.terms.coordinates} elements", code="message.malformed"
            )
        squares = np.frombuffer(total, "<u8").astype(np.uint64)
        if int(squares.max()) >= P or not squares.all():
            raise CeremonyError(
                "the opened squares hold 0 or no field element: discard this ceremony and start anew",
                code="ceremony.wrong-dealing",
            )
        self._squares, self._seen = squares, self.squares_digest(total)
        return self._say("confirm", self._seen)

    @staticmethod
    def squares_digest(total: bytes) -> bytes:
        """What `confirm` says."""
        return digest("dkg squares", total)

    def root(self, confirms: Mapping[int, bytes]) -> bytes:
        """Once all saw the same squares: this member's share, and the commitment to it."""
        r = self._received()
        if self._squares is None:
            raise CeremonyError("the squares have not been opened yet", code="ceremony.too-early")
        different = [x for x, body in self._hear("confirm", confirms, 32).items() if body != self._seen]
        if different:
            raise CeremonyError(
                f"{self._names(different)} saw other squares than this member: the relay told members "
                "different things; discard this ceremony and start anew",
                code="ceremony.members-differ",
            )
        try:
            roots = field.inv_sqrt(self._squares, checked=False)
        except InputError:
            raise CeremonyError(
                "what was opened are not squares: a dealing or an opening was wrong; "
                "discard this ceremony and start anew",
                code="ceremony.wrong-dealing",
            ) from None
        return self._commit_to(field.mul(r, roots, out=roots, checked=False))

    def _received(self) -> Vector:
        if self._r is None:
            raise CeremonyError("the dealings have not been received yet", code="ceremony.too-early")
        return self._r


def relay_sum(terms: Terms, session: str, messages: Mapping[int, bytes]) -> bytes:
    """What the relay does: adds the openings of 2t−1 members. It learns r², as everybody does, and nothing else."""
    if len(messages) != 2 * terms.threshold - 1:
        raise CeremonyError(
            f"an opening needs 2t−1 = {2 * terms.threshold - 1} members, not {len(messages)}",
            code="ceremony.messages-missing",
        )
    total = np.zeros(terms.coordinates, np.uint64)
    for point, data in messages.items():
        body = open_message(data, terms, Header(terms.digest().hex(), session, "dkg/open", point))
        name = repr(terms.member(point).name)
        if len(body) != 8 * terms.coordinates:
            raise MessageError(
                f"the message of {name} for step 'dkg/open' must hold {terms.coordinates} elements",
                code="message.malformed",
            )
        words = np.frombuffer(body, "<u8").astype(np.uint64)
        if int(words.max()) >= P:
            raise MessageError(
                f"the message of {name} for step 'dkg/open' holds no field elements", code="message.malformed"
            )
        field.add(total, words, out=total, checked=False)
    return to_bytes(total)
