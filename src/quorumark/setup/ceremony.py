"""What all ceremonies share: a session that nobody chose, signed messages, and answers that leak nothing.

A ceremony is a class with stage functions, bytes in, bytes out; how the bytes travel is somebody else's business
(`folder` is one way). Everybody first commits to a nonce and a session key, then reveals them; together they make the
session, which enters every derivation and every message after it.

A check of the shares is a random linear combination, drawn after everybody committed to its share, under a mask that
nobody knows. Before anybody says its answer, all must have seen the same roots (answers for different weights under one
mask are equations in the key) and must have committed to their answers (or the last to speak could make a wrong share
look right): the step "echo" does both.

A member's own randomness all comes from one seed, so a step repeated after a crash gives the same values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from quorumark import field, shamir
from quorumark.canonical import digest
from quorumark.consortium.identity import Header, Identity, exchange, verify
from quorumark.consortium.merkle import SALT_ELEMENTS
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import CeremonyError, DecodingError, MessageError
from quorumark.field import P, Stream, Vector, derive_key

__all__ = [
    "Ceremony",
    "SigningCeremony",
    "evaluate",
    "round_table",
    "slices",
    "squares_are_known",
    "to_bytes",
    "view",
]

_NO_SESSION = "00" * 32
_BLIND_AT = 1 << 40  # where a member's own stream gives the blinding of its answer: far from everything else
_UNBOUND = ("commit", "reveal")  # said before there is a session


class Ceremony:
    """One member's side of a ceremony. `seed` is 32 bytes from the operating system, kept sealed until the end.

    `context` is the digest of everything that is fixed before it starts.
    """

    NAME: ClassVar[str]
    STEPS: ClassVar[tuple[str, ...]]

    def __init__(self, identity: Identity, terms: Terms, seed: bytes, context: bytes) -> None:
        self.terms = terms
        self.point = terms.point_of(identity.ed25519)
        self.session = _NO_SESSION
        self._identity = identity
        self._context = context
        self._t, self._k = terms.threshold, terms.members
        self._everyone = tuple(range(1, self._k + 1))
        self._nonce = derive_key(seed, f"{self.NAME} nonce", context)
        self._key = X25519PrivateKey.from_private_bytes(derive_key(seed, f"{self.NAME} session key", context))
        self._private = Stream(seed, f"{self.NAME} private", context)
        self._alone = derive_key(seed, f"{self.NAME} alone", context)
        self._pairs: dict[int, bytes] = {}
        self._commits: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(point {self.point} of {self.terms.name!r}, secrets hidden)"

    # --- commit, reveal: a session that nobody chose ---

    def commit(self) -> bytes:
        """A hash of this member's nonce and session key, to everybody."""
        return self._say("commit", self._commitment(self.point, self._revealed()))

    def _revealed(self) -> bytes:
        return self._nonce + self._key.public_key().public_bytes_raw()

    def _commitment(self, point: int, revealed: bytes) -> bytes:
        return digest(f"{self.NAME} commit", self._context, point.to_bytes(8, "big"), revealed)

    def reveal(self, commits: Mapping[int, bytes]) -> bytes:
        """The nonce and the session key, to everybody, once all have committed."""
        self._commits = self._hear("commit", commits, 32)
        return self._say("reveal", self._revealed())

    def _join(self, reveals: Mapping[int, bytes]) -> None:
        """Fixes the session and the keys that this member shares with each other one."""
        bodies = self._hear("reveal", reveals, 64)
        for point, body in bodies.items():
            if self._commitment(point, body) != self._commits[point]:
                raise MessageError(
                    f"{self._name(point)} reveals something else than it committed to (step '{self.NAME}/reveal')",
                    code="message.not-as-committed",
                )
        whole = b"".join(self._revealed() if point == self.point else bodies[point] for point in self._everyone)
        self.session = digest(f"{self.NAME} session", self._context, whole).hex()
        for point, body in bodies.items():
            # both the members' lasting keys and this session's: the first say who, the second can be forgotten
            try:
                session_secret = exchange(self._key, body[32:].hex())
            except MessageError:
                raise MessageError(
                    f"{self._name(point)} reveals a key that cannot be used (step '{self.NAME}/reveal')",
                    code="message.invalid-key",
                ) from None
            secret = session_secret + self._identity.exchange(self.terms.member(point).x25519)
            self._pairs[point] = derive_key(secret, f"{self.NAME} pair", bytes.fromhex(self.session))
        # where nearly everybody's values are generated, a dealer's own are too
        self._pairs[self.point] = derive_key(self._alone, f"{self.NAME} pair", bytes.fromhex(self.session))

    def _dealt_stream(self, dealer: int, recipient: int, purpose: str = "dealing") -> Stream:
        """Ordered: one key for both directions would make f_i(x_j) = f_j(x_i), and that gives signs away."""
        other = recipient if dealer == self.point else dealer
        return Stream(
            self._pairs[other], f"{self.NAME} {purpose}", dealer.to_bytes(8, "big"), recipient.to_bytes(8, "big")
        )

    # --- small sharings ---

    def _small_sharings(self, sharings: Iterable[tuple[int | None, int, Sequence[int]]]) -> list[dict[int, int]]:
        """Sharings of single numbers: (secret or None for a random one, degree, points) → a value for each point.

        Coefficients come from the member's own stream after its salt, in order, so that they are the same every time.
        """
        out, start = [], SALT_ELEMENTS
        for secret, degree, points in sharings:
            drawn = [int(v) for v in self._private.elements(degree + 1, start=start)]
            start += degree + 1
            coefficients = drawn if secret is None else [secret, *drawn[1:]]
            out.append({x: evaluate(coefficients, x) for x in points})
        return out

    def _health_sharings(self) -> list[tuple[int | None, int, Sequence[int]]]:
        """What masks the check of shares: a random number, and a zero of twice the degree for products."""
        return [(None, self._t - 1, self._everyone), (0, 2 * (self._t - 1), self._everyone)]

    # --- health: shares fit together, and hold what they must ---

    def _echo(self, seen: bytes, answer: Vector) -> bytes:
        """Says what this member saw, and commits to its answer."""
        self._seen_roots, self._answer = seen, answer
        self._blind = bytes(self._private.elements(4, start=_BLIND_AT).astype("<u8").tobytes())
        return self._say("echo", seen + self._answer_digest(self.point, to_bytes(answer), self._blind))

    def _answer_digest(self, point: int, answer: bytes, blind: bytes) -> bytes:
        return digest(f"{self.NAME} answer", bytes.fromhex(self.session), point.to_bytes(8, "big"), answer, blind)

    def health(self, echoes: Mapping[int, bytes]) -> bytes:
        """Once all saw the same and committed to their answers: this member's answer."""
        bodies = self._hear("echo", echoes, 64)
        different = [x for x, body in bodies.items() if body[:32] != self._seen_roots]
        if different:
            raise CeremonyError(
                f"{self._names(different)} saw other roots than this member: discard this ceremony and start anew",
                code="ceremony.members-differ",
            )
        self._promised = {x: body[32:] for x, body in bodies.items()}
        return self._say("health", to_bytes(self._answer) + self._blind)

    def _answers(self, healths: Mapping[int, bytes]) -> dict[int, Vector]:
        """Everybody's answers, each the one that was committed to."""
        size = self._answer.nbytes
        answers = {self.point: self._answer}
        for x, body in self._hear("health", healths, size + 32).items():
            if self._answer_digest(x, body[:size], body[size:]) != self._promised[x]:
                raise MessageError(
                    f"{self._name(x)} answers something else than it committed to (step '{self.NAME}/health')",
                    code="message.not-as-committed",
                )
            answers[x] = self._elements(body[:size], x, "health")
        return answers

    def _combined(self, seed: bytes, label: str, pieces: Iterable[Vector], squares: bool = False) -> tuple[int, int]:
        """Σ ρ_j·v_j (or v_j²) over a vector given in pieces, with public ρ from `seed`; and Σ ρ_j."""
        coins, at, total, weights = Stream(seed, label), 0, 0, 0
        for piece in pieces:
            for part in field.chunks(piece.size) if piece.size else ():
                values = piece[part]
                rho = coins.elements(values.size, at)
                at += values.size
                values = field.mul(values, values, checked=False) if squares else values
                total += field.dot(rho, values, checked=False)
                weights += field.dot(rho, np.ones_like(values), checked=False)
        return total % P, weights % P

    def _square_check(self, seed: bytes, manifest: Manifest, pieces: Iterable[Vector]) -> tuple[int, int]:
        """A combination of the squares of a share of the key, and what all together must open to; where it is known.

        For signs Σ ρ_j·s_j², which opens to Σ ρ_j; for a dealer's gaussian key Σ s_j², which opens to the committed
        norm. (0, 0) where nothing is known, or K < 2t−1 members cannot open a product.
        """
        if not squares_are_known(self.terms):
            return 0, 0
        if self.terms.key == "rademacher":
            return self._combined(seed, "square", pieces, squares=True)
        norm = manifest.commitment["norm"] if manifest.commitment else "0"
        return sum(field.dot(piece, piece, checked=False) for piece in pieces) % P, int(norm) % P

    def _judge(
        self,
        answers: Mapping[int, int],
        threshold: int,
        fault: str,
        expected: int | None = None,
        seats: Mapping[int, int] | None = None,
    ) -> int:
        """The number that the answers share; a CeremonyError names who is wrong, where the numbers allow.

        `seats`: where the members of another sharing sit in this roster, by their points in that one.
        """
        try:
            decoded = shamir.decode(answers, threshold)
        except DecodingError:
            raise CeremonyError(
                f"the shares {fault}, and there are too few members to tell whose are wrong",
                code="ceremony.shares-misfit",
            ) from None
        if decoded.wrong:
            names = self._names(x if seats is None else seats[x] for x in decoded.wrong)
            raise CeremonyError(
                f"the shares {fault}: what {names} holds must be wrong, or what was dealt to it",
                code="ceremony.wrong-share",
            )
        if expected is not None and decoded.value != expected:
            raise CeremonyError(
                f"the shares {fault}: what they were made from was wrong; discard this ceremony",
                code="ceremony.wrong-dealing",
            )
        return decoded.value

    # --- messages ---

    def _header(self, step: str, sender: int, recipient: int = 0) -> Header:
        session = _NO_SESSION if step in _UNBOUND else self.session
        return Header(self._context.hex(), session, f"{self.NAME}/{step}", sender, recipient)

    def _say(self, step: str, body: bytes | memoryview, recipient: int = 0) -> bytes:
        """To everybody, or sealed to one member under a key of this session, which dies with it: who steals that
        member's lasting keys later cannot read what was dealt to it, and so cannot go back from new shares to old."""
        secret = self._pairs[recipient] if recipient else None
        return self._identity.write(self._header(step, self.point, recipient), body, secret=secret)

    def _hear(
        self,
        step: str,
        messages: Mapping[int, bytes],
        size: int | Mapping[int, int],
        wanted: Iterable[int] | None = None,
    ) -> dict[int, bytes]:
        """The bodies of a step's messages: one from each other member, each as long as it must be."""
        wanted = [point for point in wanted or self._everyone if point != self.point]
        missing = [point for point in wanted if point not in messages]
        if missing:
            raise CeremonyError(
                f"step '{self.NAME}/{step}' needs a message from everybody: {self._names(missing)} missing",
                code="ceremony.messages-missing",
            )
        bodies = {}
        for point in wanted:
            expected = size if isinstance(size, int) else size[point]
            bodies[point] = self.read(step, point, messages[point])
            if len(bodies[point]) != expected:
                raise MessageError(
                    f"the message of {self._name(point)} for step '{self.NAME}/{step}' must hold {expected} bytes, "
                    f"not {len(bodies[point])}",
                    code="message.malformed",
                )
        return bodies

    def read(self, step: str, sender: int, data: bytes) -> bytes:
        """One message's body, if it is that member's for this step (and sealed to this one, for a dealing)."""
        if step != "deal":
            return self._identity.read(data, self.terms, self._header(step, sender))
        header = self._header(step, sender, self.point)
        return self._identity.read(data, self.terms, header, secret=self._pairs[sender])

    def _elements(self, body: bytes, sender: int, step: str) -> Vector:
        words = np.frombuffer(body, "<u8").astype(np.uint64, copy=False)
        if words.size and int(words.max()) >= P:
            raise MessageError(
                f"the message of {self._name(sender)} for step '{self.NAME}/{step}' holds no field elements",
                code="message.malformed",
            )
        return words

    def _name(self, point: int) -> str:
        return repr(self.terms.member(point).name)

    def _names(self, points: Iterable[int]) -> str:
        return ", ".join(self._name(x) for x in points)


class SigningCeremony(Ceremony, ABC):
    """A ceremony that ends with a manifest which all sign."""

    @abstractmethod
    def manifest(self) -> Manifest:
        """What all sign, without signatures."""

    def sign(self) -> bytes:
        """This member's signature, to everybody."""
        return self._say("sign", self._identity.sign("manifest", self.manifest().sign_bytes()))

    def _with_signatures(self, signatures: Mapping[int, bytes]) -> Manifest:
        """The manifest with all signatures, each checked."""
        manifest = self.manifest()
        own = self._identity.sign("manifest", manifest.sign_bytes())
        for point, body in {**self._hear("sign", signatures, 64), self.point: own}.items():
            member = self.terms.member(point)
            verify(member.ed25519, "manifest", manifest.sign_bytes(), body, member.name)
            manifest = manifest.with_signature(point, body)
        return manifest


def squares_are_known(terms: Terms) -> bool:
    """Whether a check of the key's squares is possible: of signs, or of a dealer's norm, by 2t−1 members or more."""
    return terms.members >= 2 * terms.threshold - 1 and terms.setup != "paper"


def round_table(members: Sequence[int], after: int, count: int) -> list[int]:
    """The `count` members after a dealer, round the table: they know a generator, so nothing is sent to them."""
    at = members.index(after) + 1
    return [members[(at + i) % len(members)] for i in range(count)]


def to_bytes(vector: Vector) -> bytes:
    return vector.astype("<u8", copy=False).tobytes()


def view(vector: Vector) -> memoryview:
    """The same without a copy, for vectors as long as the model."""
    return np.ascontiguousarray(vector.astype("<u8", copy=False)).data.cast("B")


def evaluate(coefficients: Sequence[int], x: int) -> int:
    """A polynomial at a point, lowest coefficient first."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % P
    return value


def slices(total: int, sizes: Iterable[int]) -> Iterator[slice]:
    """Consecutive slices of the given sizes, which must fill `total`."""
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size
    if start != total:
        raise CeremonyError("a message has another length than its parts", code="message.malformed")
