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

A member's own randomness all comes from one seed, so a step repeated after a crash gives the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from quorumark import field, shamir
from quorumark.errors import CeremonyError, DecodingError, InputError, MessageError
from quorumark.field import P, Stream, Vector, derive_key
from quorumark.identity import Header, Identity, exchange, open_message, verify
from quorumark.merkle import SALT_ELEMENTS
from quorumark.records import Genesis, Manifest, Terms, digest
from quorumark.shares import share_root

__all__ = ["STEPS", "DkgMember", "check_terms", "header", "openers", "relay_sum"]

STEPS = ("commit", "reveal", "deal", "open", "confirm", "root", "echo", "health", "sign")
_NO_SESSION = "00" * 32
_BLIND_AT = 1 << 40  # where a member's own stream gives the blinding of its answer: far from everything else
_SMALL = 2 + SALT_ELEMENTS  # elements besides the vector in a deal: two health masks and the salt


def check_terms(terms: Terms) -> None:
    """Whether the leak-free protocol can run: a product of two shared numbers needs 2t−1 members to open."""
    if terms.setup != "dkg":
        raise CeremonyError(f"the terms of {terms.name!r} ask for the setup {terms.setup!r}, not 'dkg'")
    if terms.key != "rademacher":
        raise CeremonyError("the dealer-free setup makes signs only: a 'gaussian' key needs a dealer")
    if terms.members < 2 * terms.threshold - 1:
        raise CeremonyError(
            f"the dealer-free setup needs K ≥ 2t−1 = {2 * terms.threshold - 1} members, but there are {terms.members}: "
            f"lower the threshold to {(terms.members + 1) // 2}, add members, or use a dealer (setup 'dealer')"
        )


def openers(terms: Terms) -> tuple[int, ...]:
    """The members who open the squares: the first 2t−1."""
    return tuple(range(1, 2 * terms.threshold))


def header(terms: Terms, session: str, step: str, sender: int, recipient: int = 0) -> Header:
    """The header of a ceremony's message."""
    return Header(terms.digest().hex(), session, f"dkg/{step}", sender, recipient)


class DkgMember:
    """One member's side of the ceremony. `seed` is 32 bytes from the operating system, kept sealed until the end."""

    def __init__(self, identity: Identity, terms: Terms, seed: bytes) -> None:
        check_terms(terms)
        self.terms = terms
        self.point = terms.point_of(identity.ed25519)
        self.session = _NO_SESSION
        self._identity = identity
        self._t, self._k = terms.threshold, terms.members
        self._rows = self._k - self._t + 1  # m: combinations that no t−1 members know anything about
        self._length = -(-terms.coordinates // self._rows)
        self._everyone = tuple(range(1, self._k + 1))
        self._nonce = derive_key(seed, "dkg nonce", terms.digest())
        self._key = X25519PrivateKey.from_private_bytes(derive_key(seed, "dkg session key", terms.digest()))
        self._private = Stream(seed, "dkg private", terms.digest())
        self._pairs: dict[int, bytes] = {}
        self._commits: dict[int, bytes] = {}
        self._r: Vector | None = None
        self._squares: Vector | None = None
        self._opened_by: tuple[int, ...] | None = None
        self.share: Vector | None = None
        self.salt = self._private.elements(SALT_ELEMENTS)
        self.others_salts = np.zeros((self._k, SALT_ELEMENTS), np.uint64)

    def __repr__(self) -> str:
        return f"DkgMember(point {self.point} of {self.terms.name!r}, secrets hidden)"

    # --- commit, reveal: a session that nobody chose ---

    def commit(self) -> bytes:
        own = self._nonce + self._key.public_key().public_bytes_raw()
        return self._say("commit", self._commitment(self.point, own))

    def _commitment(self, point: int, revealed: bytes) -> bytes:
        return digest("dkg commit", self.terms.digest(), point.to_bytes(8, "big"), revealed)

    def reveal(self, commits: Mapping[int, bytes]) -> bytes:
        self._commits = self._hear("commit", commits, 32)
        return self._say("reveal", self._nonce + self._key.public_key().public_bytes_raw())

    def _join(self, reveals: Mapping[int, bytes]) -> None:
        """Fixes the session and the keys that this member shares with each other one."""
        bodies = self._hear("reveal", reveals, 64)
        for point, body in bodies.items():
            if self._commitment(point, body) != self._commits[point]:
                raise MessageError(
                    f"{self._name(point)} reveals something else than it committed to (step 'dkg/reveal')"
                )
        own = self._nonce + self._key.public_key().public_bytes_raw()
        whole = b"".join(own if point == self.point else bodies[point] for point in self._everyone)
        self.session = digest("dkg session", self.terms.digest(), whole).hex()
        for point, body in bodies.items():
            # both the members' lasting keys and this session's: the first say who, the second can be forgotten
            try:
                session_secret = exchange(self._key, body[32:].hex())
            except MessageError:
                raise MessageError(f"{self._name(point)} reveals a key of no use (step 'dkg/reveal')") from None
            secret = session_secret + self._identity.exchange(self.terms.member(point).x25519)
            self._pairs[point] = derive_key(secret, "dkg pair", bytes.fromhex(self.session))

    # --- deal: random sharings, most of them generated ---

    def deal(self, reveals: Mapping[int, bytes]) -> dict[int, bytes]:
        """One message for each other member."""
        self._join(reveals)
        small, dealt = self._small_dealing(), self._dealing()
        messages = {}
        for point in self._everyone:
            if point == self.point:
                continue
            body = _bytes(small[point - 1])
            if point in dealt:
                body += _bytes(dealt[point])
            messages[point] = self._say("deal", body, point)
        return messages

    def _small_dealing(self) -> Vector:
        """K×7: for each member a share of a random number, of zero with twice the degree, and of this member's salt."""
        t = self._t
        coefficients = self._private.elements(t + 2 * (t - 1) + SALT_ELEMENTS * (t - 1), start=SALT_ELEMENTS)
        at_points = np.array([[pow(x, j, P) for j in range(2 * t - 1)] for x in self._everyone], np.uint64)
        masks, zeros, salts = np.split(coefficients, [t, t + 2 * (t - 1)])
        out = np.empty((self._k, _SMALL), np.uint64)
        out[:, 0] = _evaluate(at_points[:, :t], masks)
        out[:, 1] = _evaluate(at_points[:, 1:], zeros)
        for i, row in enumerate(salts.reshape(SALT_ELEMENTS, t - 1)):
            constant = np.concatenate([self.salt[i : i + 1], row])
            out[:, 2 + i] = _evaluate(at_points[:, :t], constant)
        return out

    def _dealing(self) -> dict[int, Vector]:
        """The vectors for those members whose values are not generated, this member among them."""
        generated = self._generated(self.point)
        known = np.stack([self._dealt_stream(self.point, point).elements(self._length) for point in generated])
        others = [point for point in self._everyone if point not in generated]
        values = field.matmul(shamir.lagrange_matrix(generated, others), known, checked=False)
        return dict(zip(others, values, strict=True))

    def _generated(self, dealer: int) -> list[int]:
        """The t members after a dealer, round the table: they know the generator, so nothing is sent to them."""
        return [1 + (dealer + i) % self._k for i in range(self._t)]

    def _dealt_stream(self, dealer: int, recipient: int) -> Stream:
        """Ordered: one key for both directions would make f_i(x_j) = f_j(x_i), and that gives signs away."""
        other = recipient if dealer == self.point else dealer
        return Stream(self._pairs[other], "dkg dealing", dealer.to_bytes(8, "big"), recipient.to_bytes(8, "big"))

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
        small = np.empty((self._k, _SMALL), np.uint64)
        small[self.point - 1] = self._small_dealing()[self.point - 1]
        received[self.point - 1] = self._dealing()[self.point]
        for dealer, body in bodies.items():
            words = self._elements(body, dealer, "deal")
            small[dealer - 1] = words[:_SMALL]
            if self.point in self._generated(dealer):
                received[dealer - 1] = self._dealt_stream(dealer, self.point).elements(self._length)
            else:
                received[dealer - 1] = words[_SMALL:]
        vandermonde = np.array([[pow(x, a, P) for x in self._everyone] for a in range(self._rows)], np.uint64)
        self._r = field.matmul(vandermonde, received, checked=False).reshape(-1)[: self.terms.coordinates].copy()
        self._masks = [sum(int(v) for v in small[:, column]) % P for column in range(2)]
        self.others_salts = small[:, 2:].copy()

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
            raise CeremonyError(f"these dealings were opened by the members {self._opened_by}: start a new ceremony")
        self._opened_by = chosen
        weight = shamir.lagrange(chosen)[chosen.index(self.point)]
        vector = field.mul(r, r, checked=False)
        field.scale(weight, vector, out=vector, checked=False)
        context = b"".join(x.to_bytes(8, "big") for x in chosen)
        for other in chosen:
            if other != self.point:
                low, high = sorted((self.point, other))
                pair = low.to_bytes(8, "big"), high.to_bytes(8, "big")
                stream = Stream(self._pairs[other], "dkg square mask", *pair, context)
                stream.add_to(vector, negate=self.point == high, checked=False)
        return self._say("open", _bytes(vector))

    # --- confirm, root: everybody sees the same squares, and commits to a share ---

    def confirm(self, total: bytes) -> bytes:
        """Checks the relay's sum and says its hash."""
        if len(total) != 8 * self.terms.coordinates:
            raise CeremonyError(f"the relay's sum must have {self.terms.coordinates} elements")
        squares = np.frombuffer(total, "<u8").astype(np.uint64)
        if int(squares.max()) >= P or not squares.all():
            raise CeremonyError("the opened squares hold 0 or no field element: discard this ceremony and start anew")
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
            raise CeremonyError("the squares have not been opened yet")
        different = [x for x, body in self._hear("confirm", confirms, 32).items() if body != self._seen]
        if different:
            names = ", ".join(self._name(x) for x in different)
            raise CeremonyError(
                f"{names} saw other squares than this member: the relay told members different things; "
                "discard this ceremony and start anew"
            )
        try:
            roots = field.inv_sqrt(self._squares, checked=False)
        except InputError:
            raise CeremonyError(
                "what was opened are not squares: a dealing or an opening was wrong; "
                "discard this ceremony and start anew"
            ) from None
        self.share = field.mul(r, roots, checked=False)
        self._own_root = share_root([self.share], self.salt, self.terms.leaf, self.terms.coordinates)
        return self._say("root", self._own_root)

    # --- health: the shares fit together, and hold signs ---

    def echo(self, roots: Mapping[int, bytes]) -> bytes:
        """Computes two random combinations of this share, drawn after everybody committed to theirs, each under a mask.

        They are not said yet. First everybody must have seen the same roots: members who answer for different weights
        under one mask open the key bit by bit. And everybody commits to its answer before any is known, or the last
        one to speak could make a wrong share look right.
        """
        if self.share is None:
            raise CeremonyError("this member has no share yet")
        bodies = self._hear("root", roots, 32) | {self.point: self._own_root}
        self._roots = tuple(bodies[point].hex() for point in self._everyone)
        # Σ ρ_j·s_j and Σ ρ'_j·s_j², and what the second must be for signs: Σ ρ'_j
        degree, square = self._masks
        self._expected = 0
        for rho, rho_square, part in self._coins():
            piece = self.share[part]
            degree += field.dot(rho, piece, checked=False)
            square += field.dot(rho_square, field.mul(piece, piece, checked=False), checked=False)
            self._expected += field.dot(rho_square, np.ones_like(piece), checked=False)
        self._answer = np.array([degree % P, square % P], np.uint64)
        self._blind = bytes(self._private.elements(4, start=_BLIND_AT).astype("<u8").tobytes())
        return self._say(
            "echo", self._roots_digest() + self._answer_digest(self.point, _bytes(self._answer), self._blind)
        )

    def _roots_digest(self) -> bytes:
        return digest("dkg roots", bytes.fromhex(self.session), *(bytes.fromhex(root) for root in self._roots))

    def _answer_digest(self, point: int, answer: bytes, blind: bytes) -> bytes:
        return digest("dkg answer", bytes.fromhex(self.session), point.to_bytes(8, "big"), answer, blind)

    def health(self, echoes: Mapping[int, bytes]) -> bytes:
        """Once all saw the same roots and committed to their answers: this member's answer."""
        bodies = self._hear("echo", echoes, 64)
        different = [x for x, body in bodies.items() if body[:32] != self._roots_digest()]
        if different:
            names = ", ".join(self._name(x) for x in different)
            raise CeremonyError(f"{names} saw other roots than this member: discard this ceremony and start anew")
        self._promised = {x: body[32:] for x, body in bodies.items()}
        return self._say("health", _bytes(self._answer) + self._blind)

    def _coins(self) -> Iterator[tuple[Vector, Vector, slice]]:
        """ρ and ρ', piece by piece."""
        seed = digest("dkg health", bytes.fromhex(self.session), *(bytes.fromhex(root) for root in self._roots))
        one, two = Stream(seed, "degree"), Stream(seed, "square")
        for part in field.chunks(self.terms.coordinates):
            size = part.stop - part.start
            yield one.elements(size, part.start), two.elements(size, part.start), part

    def finish(self, healths: Mapping[int, bytes]) -> Manifest:
        """Checks everybody's combinations; the manifest to sign, without signatures."""
        bodies = self._hear("health", healths, 48)
        for x, body in bodies.items():
            if self._answer_digest(x, body[:16], body[16:]) != self._promised[x]:
                raise MessageError(f"{self._name(x)} answers something else than it committed to (step 'dkg/health')")
        bodies = {x: body[:16] for x, body in bodies.items()}
        answers = {x: self._elements(body, x, "health") for x, body in bodies.items()} | {self.point: self._answer}
        self._judge({x: int(v[0]) for x, v in answers.items()}, self._t, None, "do not lie on one polynomial")
        expected = self._expected % P
        self._judge({x: int(v[1]) for x, v in answers.items()}, 2 * self._t - 1, expected, "do not hold signs")
        return self.manifest()

    def _judge(self, answers: dict[int, int], threshold: int, expected: int | None, fault: str) -> None:
        try:
            decoded = shamir.decode(answers, threshold)
        except DecodingError:
            raise CeremonyError(f"the shares {fault}, and there are too few members to tell whose are wrong") from None
        if decoded.wrong:
            raise CeremonyError(f"the shares {fault}: {', '.join(self._name(x) for x in decoded.wrong)} must be wrong")
        if expected is not None and decoded.value != expected:
            raise CeremonyError(f"the shares {fault}: a dealing or an opening was wrong; discard this ceremony")

    # --- sign ---

    def manifest(self) -> Manifest:
        terms = self.terms
        genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, self.session, self._roots)
        return Manifest(terms, genesis, self._roots)

    def sign(self) -> bytes:
        return self._say("sign", self._identity.sign("manifest", self.manifest().sign_bytes()))

    def signed(self, signatures: Mapping[int, bytes]) -> Manifest:
        """The manifest with all signatures, each checked."""
        manifest = self.manifest()
        own = self._identity.sign("manifest", manifest.sign_bytes())
        for point, body in {**self._hear("sign", signatures, 64), self.point: own}.items():
            member = self.terms.member(point)
            verify(member.ed25519, "manifest", manifest.sign_bytes(), body, member.name)
            manifest = manifest.with_signature(point, body)
        return manifest

    # --- messages ---

    def _say(self, step: str, body: bytes, recipient: int = 0) -> bytes:
        session = _NO_SESSION if step in ("commit", "reveal") else self.session
        to = self.terms.member(recipient).x25519 if recipient else None
        return self._identity.write(header(self.terms, session, step, self.point, recipient), body, to)

    def _hear(self, step: str, messages: Mapping[int, bytes], size: int | Mapping[int, int]) -> dict[int, bytes]:
        """The bodies of a step's messages: one from each other member, each as long as it must be."""
        wanted = [point for point in self._everyone if point != self.point]
        missing = [point for point in wanted if point not in messages]
        if missing:
            names = ", ".join(self._name(x) for x in missing)
            raise CeremonyError(f"step 'dkg/{step}' needs a message from everybody: {names} missing")
        bodies = {}
        for point in wanted:
            expected = size if isinstance(size, int) else size[point]
            bodies[point] = self.read(step, point, messages[point])
            if len(bodies[point]) != expected:
                raise MessageError(
                    f"the message of {self._name(point)} for step 'dkg/{step}' must hold {expected} bytes, "
                    f"not {len(bodies[point])}"
                )
        return bodies

    def read(self, step: str, sender: int, data: bytes) -> bytes:
        """One message's body, if it is that member's for this step (and sealed to this one, for a dealing)."""
        session = _NO_SESSION if step in ("commit", "reveal") else self.session
        recipient = self.point if step == "deal" else 0
        return self._identity.read(data, self.terms, header(self.terms, session, step, sender, recipient))

    def _elements(self, body: bytes, sender: int, step: str) -> Vector:
        words = np.frombuffer(body, "<u8").astype(np.uint64)
        if int(words.max()) >= P:
            raise MessageError(f"the message of {self._name(sender)} for step 'dkg/{step}' holds no field elements")
        return words

    def _received(self) -> Vector:
        if self._r is None:
            raise CeremonyError("the dealings have not been received yet")
        return self._r

    def _name(self, point: int) -> str:
        return repr(self.terms.member(point).name)


def relay_sum(terms: Terms, session: str, messages: Mapping[int, bytes]) -> bytes:
    """What the relay does: adds the openings of 2t−1 members. It learns r², as everybody does, and nothing else."""
    if len(messages) != 2 * terms.threshold - 1:
        raise CeremonyError(f"an opening needs 2t−1 = {2 * terms.threshold - 1} members, not {len(messages)}")
    total = np.zeros(terms.coordinates, np.uint64)
    for point, data in messages.items():
        body = open_message(data, terms, header(terms, session, "open", point))
        name = repr(terms.member(point).name)
        if len(body) != 8 * terms.coordinates:
            raise MessageError(f"the message of {name} for step 'dkg/open' must hold {terms.coordinates} elements")
        words = np.frombuffer(body, "<u8").astype(np.uint64)
        if int(words.max()) >= P:
            raise MessageError(f"the message of {name} for step 'dkg/open' holds no field elements")
        field.add(total, words, out=total, checked=False)
    return _bytes(total)


def _bytes(vector: Vector) -> bytes:
    return vector.astype("<u8", copy=False).tobytes()


def _evaluate(powers: Vector, coefficients: Vector) -> Vector:
    """Polynomials at points: powers (K×n) times coefficients (n)."""
    result: Vector = field.matmul(powers, coefficients.reshape(-1, 1), checked=False).reshape(-1)
    return result
