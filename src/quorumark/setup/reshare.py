"""New shares of the same key: for the same members (a refresh) or for others (t′ of K′), without anybody seeing it.

The members who stay, D, deal random numbers ρ twice: under the old polynomial to D, under the new one to everybody.
Each of D says its share of τ−ρ, which shows nothing, because ρ hides τ; and everybody's new share is (τ−ρ) plus its
new share of ρ. What was dealt and the old shares are erased. Steps, in the style of `dkg`:

    commit, reveal   a session that nobody chose                                                to everybody
    deal             ⌈N/m⌉ numbers, m = |D|−t+1, shared under both polynomials; salts; masks    to each member
    difference       s_i − ρ_i, from each of D                                                  to everybody
    root             the commitment to the new share, and what differences were seen            to everybody
    echo, health     random combinations of old and of new shares under the same mask: both must
                     have their degree, and open to the same number; and the new ones' squares,
                     which must be those of signs                                               to everybody
    sign             the signature of the successor; the new share is on disk by then           to everybody
    kept             the successor is in force here. Once all say so, old shares are erased     to everybody

Why t−1 of the old and t′−1 of the new members learn nothing: at least m of the dealings are honest, any m columns of
the Vandermonde matrix are invertible, so the N combinations ρ are uniform, and so are both their polynomials; the
differences are uniform because of the old one, the new shares because of the new one. What it cannot do: make t old
members forget. Anyone who kept t old copies still has the key.

Who lies about its share could move everybody to another key. It is noticed if more of D than t + the liars take part;
and, for a key of signs with K′ ≥ 2t′−1 new members, always, because what comes out must be signs. Where neither holds
(`unchecked` says so), the members must trust each other in this.

At the first resharing every one of D also archives its genesis share (`archive`): the archive's keys, three elements
for each leaf, are shared among the new members and are a part of their shares from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quorumark import field, shamir
from quorumark.canonical import digest
from quorumark.consortium.archive import leaf_count
from quorumark.consortium.identity import Identity, verify_chain
from quorumark.consortium.merkle import SALT_ELEMENTS
from quorumark.consortium.records import ARCHIVE_KEY, Manifest, Terms
from quorumark.consortium.shares import share_root
from quorumark.consortium.succession import check_follows, check_terms_follow
from quorumark.errors import CeremonyError
from quorumark.field import P, Vector
from quorumark.setup.ceremony import SigningCeremony, round_table, slices, squares_are_known, to_bytes

__all__ = ["ReshareMember"]

_MASKS = 3  # of the key's combination, of the archives' keys', of the squares'
_MASK_AT, _KEYS_AT = 1 << 41, 1 << 42  # where a member's own stream gives its mask and its archive's keys


class ReshareMember(SigningCeremony):
    """One member's side. `chain` ends with the manifest in force; `share` is this member's old share, if it stays."""

    NAME = "reshare"
    STEPS = ("commit", "reveal", "deal", "difference", "root", "echo", "health", "sign", "kept")

    def __init__(
        self, identity: Identity, chain: Sequence[Manifest], terms: Terms, seed: bytes, share: Vector | None
    ) -> None:
        verify_chain(chain)
        before = chain[-1]
        self._old_points = check_terms_follow(terms, before.terms)
        super().__init__(identity, terms, seed, digest("reshare", before.digest(), terms.digest()))
        self._chain, self._before = list(chain), before
        self._seats = {earlier: now for now, earlier in self._old_points.items()}
        self.dealers = tuple(self._old_points)
        self.deals_here = self.point in self._old_points
        self.was_here = any(m.ed25519 == identity.ed25519 for earlier in chain for m in earlier.terms.roster)
        self._old_t = before.terms.threshold
        self._size = before.share_length
        self._rows = len(self.dealers) - self._old_t + 1  # m: combinations that no t−1 old members know anything about
        self._length = -(-self._size // self._rows)
        leaves = leaf_count(terms.coordinates, terms.leaf)
        self._keys_size = 0 if before.archived else leaves * ARCHIVE_KEY
        self.archived = before.archived or tuple(sorted(self._old_points.values()))
        if self.deals_here and (share is None or share.shape != (self._size,)):
            raise CeremonyError("a member who stays needs its old share", code="ceremony.no-share")
        self._old_share = share if self.deals_here else None
        self.share: Vector | None = None
        self.salt = self._private.elements(SALT_ELEMENTS)
        self.others_salts = np.zeros((self._k, SALT_ELEMENTS), np.uint64)

    def archive_keys(self) -> Vector:
        """The keys of this member's archive, one for each leaf of its genesis share."""
        keys: Vector = (
            self._private.elements(self._keys_size, start=_KEYS_AT) if self._keys_size else np.empty(0, np.uint64)
        )
        return keys

    # --- deal ---

    def deal(self, reveals: Mapping[int, bytes]) -> dict[int, bytes]:
        """One message for each other member."""
        self._join(reveals)
        small = self._small_dealing()
        dealt = self._dealing() if self.deals_here else {}
        others = [x for x in self._everyone if x != self.point]
        bodies = {
            x: to_bytes(np.array(small[x], np.uint64)) + b"".join(map(to_bytes, dealt.get(x, ()))) for x in others
        }
        return {x: self._say("deal", body, x) for x, body in bodies.items()}

    def _small_dealing(self) -> dict[int, list[int]]:
        """For each member: shares of this member's salt; of a dealer also of two masks, one of them old and new."""
        sharings: list[tuple[int | None, int, Sequence[int]]] = []
        sharings += [(int(v), self._t - 1, self._everyone) for v in self.salt]
        old = [self._old_points[x] for x in self.dealers]
        if self.deals_here:
            mask = int(self._private.elements(1, start=_MASK_AT)[0])
            sharings += [(mask, self._t - 1, self._everyone), (None, self._t - 1, self._everyone)]
            sharings += [(0, 2 * (self._t - 1), self._everyone), (mask, self._old_t - 1, old)]
        values = self._small_sharings(sharings)
        always = values[: SALT_ELEMENTS + _MASKS] if self.deals_here else values
        out = {x: [sharing[x] for sharing in always] for x in self._everyone}
        for x in self.dealers if self.deals_here else ():
            out[x].append(values[-1][self._old_points[x]])
        return out

    def _parts(self, dealer: int, recipient: int) -> list[int]:
        """The lengths of what a dealer sends to a member: small numbers, then the vectors that are not generated."""
        if dealer not in self._old_points:
            return [SALT_ELEMENTS]
        stays = recipient in self._old_points
        new = recipient not in self._generated_new(dealer)
        old = stays and recipient not in self._generated_old(dealer)
        return [
            SALT_ELEMENTS + _MASKS + stays,
            self._length if old else 0,
            self._length if new else 0,
            self._keys_size if new else 0,
        ]

    def _generated_old(self, dealer: int) -> list[int]:
        return round_table(self.dealers, dealer, self._old_t)

    def _generated_new(self, dealer: int) -> list[int]:
        """One fewer than t′: the number itself is the last value that fixes the polynomial."""
        return round_table(self._everyone, dealer, self._t - 1)

    def _dealing(self) -> dict[int, list[Vector]]:
        """The vectors for each member whose values are not generated, as `_parts` lists them; this one's among them."""
        generated = self._generated_old(self.point)
        known = np.empty((self._old_t, self._length), np.uint64)
        for row, x in zip(known, generated, strict=True):
            self._dealt_stream(self.point, x, "old").elements(self._length, out=row)
        places = [self._old_points[x] for x in generated]
        others = [x for x in self.dealers if x not in generated]
        targets = [0, *(self._old_points[x] for x in others)]
        values = field.matmul(shamir.lagrange_matrix(places, targets), known, checked=False)
        out: dict[int, list[Vector]] = {x: [] for x in self._everyone}
        for x, vector in zip(others, values[1:], strict=True):
            out[x].append(vector)
        for secret, purpose in ((values[0], "new"), (self.archive_keys(), "archive keys")):
            for x, vector in self._share_new(secret, purpose).items() if secret.size else ():
                out[x].append(vector)
        return out

    def _share_new(self, secret: Vector, purpose: str) -> dict[int, Vector]:
        """Shares of given numbers among all, for those whose values are not generated."""
        generated = self._generated_new(self.point)
        streams = [self._dealt_stream(self.point, x, purpose).elements(secret.size) for x in generated]
        others = [x for x in self._everyone if x not in generated]
        matrix = shamir.lagrange_matrix(generated, others, secret=True)
        values = field.matmul(matrix, np.stack([secret, *streams]), checked=False)
        return dict(zip(others, values, strict=True))

    def receive(self, deals: Mapping[int, bytes]) -> None:
        """Takes all dealings in."""
        expected = {x: 8 * sum(self._parts(x, self.point)) for x in self._everyone if x != self.point}
        bodies = self._hear("deal", deals, expected)
        count = len(self.dealers)
        new = np.empty((count, self._length), np.uint64)
        old = np.empty((count if self.deals_here else 0, self._length), np.uint64)
        keys: dict[int, Vector] = {}
        small: dict[int, list[int]] = {}
        for x in self._everyone:
            if x == self.point:
                small[x] = self._small_dealing()[x]
                vectors = self._own_vectors()
            else:
                words = self._elements(bodies[x], x, "deal")
                parts = [words[part] for part in slices(words.size, self._parts(x, self.point))]
                small[x] = [int(v) for v in parts[0]]
                vectors = parts[1:]
            if x not in self._old_points:
                continue
            row = self.dealers.index(x)
            if self.deals_here:
                old[row] = self._dealt_or("old", x, self._generated_old(x), vectors[0], self._length)
            new[row] = self._dealt_or("new", x, self._generated_new(x), vectors[1], self._length)
            keys[self._old_points[x]] = self._dealt_or(
                "archive keys", x, self._generated_new(x), vectors[2], self._keys_size
            )
        vandermonde = np.array([[pow(x + 1, a, P) for x in range(count)] for a in range(self._rows)], np.uint64)
        self._new_rho = field.matmul(vandermonde, new, checked=False).reshape(-1)[: self._size]
        if self.deals_here:
            self._old_rho = field.matmul(vandermonde, old, checked=False).reshape(-1)[: self._size]
        self._key_shares = [keys[x] for x in sorted(keys)] if self._keys_size else []
        self._take_small(small)

    def _own_vectors(self) -> list[Vector]:
        """What this member deals to itself, in the order of `_parts`."""
        nothing = np.empty(0, np.uint64)
        if not self.deals_here:
            return [nothing] * 3
        own = iter(self._dealing()[self.point])
        return [next(own) if size else nothing for size in self._parts(self.point, self.point)[1:]]

    def _dealt_or(self, purpose: str, dealer: int, generated: list[int], sent: Vector, size: int) -> Vector:
        if size and self.point in generated:
            sent = self._dealt_stream(dealer, self.point, purpose).elements(size)
        return sent

    def _take_small(self, received: Mapping[int, Sequence[int]]) -> None:
        self.others_salts = np.array([received[x][:SALT_ELEMENTS] for x in self._everyone], np.uint64)
        masks = [received[x][SALT_ELEMENTS:] for x in self.dealers]
        self._masks = [sum(row[i] for row in masks) % P for i in range(len(masks[0]))]

    # --- difference, root: new shares ---

    def difference(self) -> bytes:
        """s_i − ρ_i, of a member who stays. Said once: the same dealings give the same message."""
        if self._old_share is None:
            raise CeremonyError("only members who stay say a difference", code="ceremony.not-asked")
        self._own_difference = to_bytes(field.sub(self._old_share, self._old_rho))
        return self._say("difference", self._own_difference)

    def root(self, differences: Mapping[int, bytes]) -> bytes:
        """The new share from the differences of all who stay, and the commitment to it."""
        bodies = self._hear("difference", differences, 8 * self._size, self.dealers)
        if self.deals_here:
            bodies[self.point] = self._own_difference
        seen = digest("reshare differences", bytes.fromhex(self.session), *(bodies[x] for x in self.dealers))
        vectors = {self._old_points[x]: self._elements(bodies[x], x, "difference") for x in self.dealers}
        answers = {x: self._combined(seen, "difference", [vector])[0] for x, vector in vectors.items()}
        self._judge(answers, self._old_t, "that were handed in do not lie on one polynomial", seats=self._seats)
        chosen = list(vectors)[: self._old_t]
        new = self._new_rho.copy()
        for x, weight in zip(chosen, shamir.lagrange(chosen), strict=True):
            field.axpy(weight, vectors[x], new, out=new, checked=False)
        self.share = np.concatenate([new, *self._key_shares])
        self._seen_differences = seen
        self._own_root = share_root([self.share], self.salt, self.terms.leaf, self.share.size)
        return self._say("root", self._own_root + seen)

    # --- health: the new shares hold what the old ones held ---

    def echo(self, roots: Mapping[int, bytes]) -> bytes:
        """Random combinations of the new share and, where there is one, of the old share; not said yet."""
        if self.share is None:
            raise CeremonyError("this member has no new share yet", code="ceremony.too-early")
        bodies = self._hear("root", roots, 64) | {self.point: self._own_root + self._seen_differences}
        different = [x for x, body in bodies.items() if body[32:] != self._seen_differences]
        if different:
            raise CeremonyError(
                f"{self._names(different)} saw other differences than this member: discard and start anew",
                code="ceremony.members-differ",
            )
        self._roots = tuple(bodies[x][:32].hex() for x in self._everyone)
        seen = digest("reshare roots", bytes.fromhex(self.session), *(bytes.fromhex(root) for root in self._roots))
        # the same public coins for old and new: under one mask both must open to Σ ρ_j·τ_j + mask
        new, _ = self._combined(seen, "key", [self.share[: self._size]])
        keys, _ = self._combined(seen, "archive keys", [self.share[self._size :]])
        square, self._expected = self._square_check(seen, self._before, [self.share[: self.terms.coordinates]])
        old = 0
        if self._old_share is not None:
            old = self._combined(seen, "key", [self._old_share])[0] + self._masks[_MASKS]
        answer = [value + mask for value, mask in zip((new, keys, square), self._masks, strict=False)]
        return self._echo(seen, np.array([value % P for value in (*answer, old)], np.uint64))

    @property
    def unchecked(self) -> str:
        """What nobody would notice, in words; nothing where everything is checked."""
        if squares_are_known(self.terms) or len(self.dealers) >= 2 * self._old_t - 1:
            return ""
        liars = len(self.dealers) - self._old_t + 1
        return (
            f"with {len(self.dealers)} members who stay and a threshold of {self._old_t}, {liars} who lie could change "
            "the key unnoticed: reshare only among members who trust each other in this"
        )

    def finish(self, healths: Mapping[int, bytes]) -> Manifest:
        """Checks everybody's combinations; the successor to sign."""
        answers = self._answers(healths)
        new = self._judge({x: int(v[0]) for x, v in answers.items()}, self._t, "of the key do not fit together")
        self._judge({x: int(v[1]) for x, v in answers.items()}, self._t, "of the archives' keys do not fit together")
        old = {self._old_points[x]: int(answers[x][_MASKS]) for x in self.dealers}
        if self._judge(old, self._old_t, "from before do not fit together", seats=self._seats) != new:
            raise CeremonyError(
                "the new shares do not hold the key that the old ones hold: a dealing was wrong",
                code="ceremony.wrong-dealing",
            )
        if squares_are_known(self.terms):
            squares = {x: int(v[2]) for x, v in answers.items()}
            self._judge(squares, 2 * self._t - 1, "do not hold a key any more", self._expected)
        return self.manifest()

    # --- sign ---

    def manifest(self) -> Manifest:
        before = self._before
        manifest = Manifest(
            self.terms,
            before.genesis,
            self._roots,
            before.epoch + 1,
            before.commitment,
            before.digest().hex(),
            self.archived,
        )
        check_follows(manifest, before)
        return manifest

    def signed(self, signatures: Mapping[int, bytes]) -> list[Manifest]:
        """The chain with the successor and all its signatures, each checked."""
        chain = [*self._chain, self._with_signatures(signatures)]
        verify_chain(chain)
        return chain
