"""The spot audit: it convinces a stranger who trusts no member (docs/verification.md, "The spot audit").

A certificate is worth as much as the t members who signed it: together they could have agreed on any number. An audit
needs no trust in them. Once the suspect, and with it x, is fixed, a seed picks a small part of the leaves of the
shares; members open those leaves of their *genesis* shares; and anyone computes z on that part of the coordinates:

    z_sub = Σ_opened x_j·τ_j / √(Σ_opened x_j²)            signs;   τ = σ ⊙ τ_raw, σ the public sign whitening
    z_sub = Σ_opened x_j·τ_j / √(Σ_opened (x_j·τ_j)²)      gaussian keys: the whitening covers signs, not magnitudes

Why z_sub ≥ 12 is a proof. The genesis roots fix every genesis share, hence τ_raw, before σ exists, which is a hash of
those roots. To a model that does not come from the key, σ is a row of coin flips, and Hoeffding's inequality gives
P(z_sub ≥ a) ≤ exp(−a²/2): 10^-31 for a = 12. Who repeats the setup, or draws seeds, until it fits needs 10^31 tries.

Which members. Shares that do not lie on one polynomial of degree t−1 (t: the first threshold) give another τ_raw for
every choice of members, so the same members must open all leaves, and the choice has a price. Every t points fix one
τ_raw, and m points that agree stand for C(m,t) such choices with the same τ_raw; so no more than C(K,t)/C(m,t)
different keys can be shown by m of K members, and the bound is multiplied by that: 1 if all K open.

Which leaves. x is 0 on leaves that earlier audits opened ("burnt"). Whoever could name any leaves as burnt would leave
out those that speak against it; u leaves that nothing explains cost a factor L·C(L,u). Earlier challenges explain
leaves: they are drawn again from their seeds, and must leave out nothing but what challenges before them opened. But
whoever knows the key can make up challenges, and draw seeds until they fit. So a challenge of c leaves costs a factor
L·min(C(L,c), 2^80), for all the seeds that anybody can try, unless the reader vouches for it: it drew that seed itself,
or asked whoever did.

How many. z_sub is about z·√φ for a part φ of the leaves, with a standard deviation of s = √(1 + h²·z²/L) where the
leaves' contributions differ by h of their mean; h = 1/2 is assumed. φ is chosen such that z·√φ = 12 + 2.4·s, so that an
honest audit falls short in 1 of 100 cases. For L ≫ z² that is (14.4/z)²: 0.7 % at z = 170.

In epoch 0 members open leaves of their share files (`ShareOpening`). Later the genesis shares are archived
(docs/protocol.md, "Archives"): then t members of today open what their shares hold of those leaves' keys (`KeyOpening`)
and anyone with copies of the archives reads the leaves. A wrong key opens nothing, and what is read must lead to the
genesis root, so nobody has to be believed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from math import comb, prod
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quorumark import field as arithmetic
from quorumark import shamir
from quorumark.archive import Archive, key_place, leaf_count
from quorumark.checks import field_names, is_count, is_decimal, is_hex, is_text, is_time, require, take
from quorumark.errors import DecodingError, InputError, QuorumarkError, RecordError, ShareError
from quorumark.field import P, Stream, Vector
from quorumark.home import ConsortiumFolder, Home
from quorumark.identity import verify_chain
from quorumark.keystore import Unlock
from quorumark.merkle import Opening, Tree, levels_of, path_of, root_from, salt_seed
from quorumark.records import ARCHIVE_KEY, Genesis, Manifest, Terms, canonical, digest, parse
from quorumark.shares import ShareFile
from quorumark.verify.evidence import VERDICTS, Query, Signed, now, vector_digest
from quorumark.verify.null import decimal_of, log10_bound, z_text

__all__ = [
    "LIFE",
    "PROOF",
    "AuditResult",
    "Burns",
    "Challenge",
    "KeyOpening",
    "ShareOpening",
    "burnt_by",
    "challenge",
    "check_audit",
    "check_challenge",
    "genesis_digest",
    "leaves_needed",
    "open_leaves",
]

PROOF = Decimal(12)
"""The z_sub that is a proof by itself."""

LIFE = 4
"""A member opens at most one in so many of its leaves in its life."""

_ENOUGH = Decimal(-24)  # log10 of the bound after all charges: 2^-80, what nobody can make up for by trying again
_NOTHING = Decimal(6)  # a smaller z_sub is no more than a model that knows nothing of the key may show
_MARGIN = Decimal("2.4")  # standard deviations; the normal tail beyond is 0.8 %
_FAR = Decimal(5)  # standard deviations between z_sub and what the certificate's z predicts
_LARGEST_ENTRY = 1 << 12  # of a gaussian key, in steps of 2^-8: 16 standard deviations
_MOST_SEEDS = 1 << 80  # that anybody can try
_MOST_SETS = 256  # of key openings that are tried where they contradict each other
# contexts of our own: what a host program does to the default one must not change a result
_MATH = Context(prec=60, rounding=ROUND_HALF_EVEN)
_UP = Context(prec=60, rounding=ROUND_CEILING)

Integers: TypeAlias = NDArray[np.integer[Any]]


def genesis_digest(genesis: Genesis) -> str:
    """digest("genesis", canonical genesis): names the commitment that the sign whitening hangs on."""
    return digest("genesis", canonical(genesis.as_dict())).hex()


# --- the challenge ----------------------------------------------------------------------------------------


def _spread(z: Decimal, usable: int) -> Decimal:
    """s = √(1 + z²/(4·L)), the standard deviation of z_sub around z·√φ: see the module's text."""
    return _MATH.sqrt(_MATH.add(Decimal(1), _MATH.divide(_MATH.multiply(z, z), Decimal(4 * usable))))


def leaves_needed(z: str, usable: int) -> int:
    """⌈φ·L⌉ with z·√φ = 12 + 2.4·s: how many of L leaves must be opened so that z_sub ≥ 12 in 99 of 100 cases."""
    value = decimal_of("z", z)
    rule = "must be so large that half of the leaves are enough to show 12 (about 21, more where there are few leaves)"
    if value <= 0 or usable < 2:
        raise InputError("z", f"{rule}: below that there is no audit", f"{z} with {usable} leaves")
    ratio = _MATH.divide(_MATH.add(PROOF, _MATH.multiply(_MARGIN, _spread(value, usable))), value)
    exact = _MATH.multiply(_MATH.multiply(ratio, ratio), Decimal(usable))
    count = int(exact.to_integral_value(rounding=ROUND_CEILING, context=_UP))
    if 2 * count > usable:
        raise InputError("z", f"{rule}: below that there is no audit", f"{z} with {usable} leaves")
    return count


def _draw(query: str, seed: str, burnt: Sequence[int], leaves: int, count: int) -> tuple[int, ...]:
    """The first `count` leaves, burnt ones left out, in the order of their 8 bytes of SHAKE-128(digest("audit", …)).

    Numbers are read big-endian; of equal ones the smaller leaf comes first. The result is sorted.
    """
    start = digest("audit", bytes.fromhex(query), bytes.fromhex(seed))
    ranks = np.frombuffer(hashlib.shake_128(start).digest(8 * leaves), ">u8").astype(np.uint64)
    order = np.argsort(ranks, kind="stable")
    kept = order[~np.isin(order, np.array(burnt, np.int64))]
    return tuple(sorted(int(leaf) for leaf in kept[:count]))


@dataclass(frozen=True)
class Challenge:
    """Which leaves are to be opened, and how they were drawn. Public; anyone can draw them again.

    `z` is what the certificate says; it decides how many leaves are asked. `seed` must have been drawn after the query
    was fixed, by `source`: the challenger, or a public beacon. `burnt` are the query's burnt leaves.
    """

    FORMAT: ClassVar[str] = "quorumark-challenge/v1"

    manifest: str
    genesis: str
    query: str
    x: str
    z: str
    seed: str
    source: str
    burnt: tuple[int, ...]
    leaves: tuple[int, ...]
    created: str

    def __post_init__(self) -> None:
        for name in ("manifest", "genesis", "query", "x", "seed"):
            require(is_hex(getattr(self, name), 32), f"a challenge's {name}", "must be 32 bytes in hex")
        require(is_decimal(self.z), "a challenge's z", "must be a decimal number as text")
        require(is_text(self.source, 200) and bool(self.source), "a challenge's source", "must be a printable text")
        for name in ("burnt", "leaves"):
            numbers = getattr(self, name)
            sound = all(is_count(n) for n in numbers) and list(numbers) == sorted(set(numbers))
            require(sound, f"a challenge's {name}", "must be leaf numbers in order, each once")
        require(bool(self.leaves), "a challenge", "must ask for at least one leaf")
        require(is_time(self.created), "a challenge's time", "must be in UTC like 2026-01-31T12:00:00Z")

    def drawn(self, leaves: int) -> tuple[int, ...]:
        """The leaves that the seed picks, in shares of so many leaves: must be those that are asked."""
        burnt = [leaf for leaf in self.burnt if leaf < leaves]
        count = leaves_needed(self.z, leaves - len(burnt))
        return _draw(self.query, self.seed, burnt, leaves, count)

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {"burnt": list(self.burnt), "leaves": list(self.leaves)}

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **self.as_dict()})

    def digest(self) -> str:
        return digest("challenge", self.to_bytes()).hex()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        taken = take(parse(data, cls.FORMAT, "a challenge"), field_names(cls), "a challenge")
        for name in ("burnt", "leaves"):
            require(isinstance(taken[name], list), f"a challenge's {name}", "must be a list")
        return cls(**{**taken, "burnt": tuple(taken["burnt"]), "leaves": tuple(taken["leaves"])})


def challenge(
    query: Query, manifest: Manifest, z: str, seed: bytes | None = None, source: str = "challenger"
) -> Challenge:
    """Asks for as many leaves as a certificate's z makes necessary; the seed is fresh unless it is given."""
    seed = os.urandom(32) if seed is None else seed
    if len(seed) != 32:
        raise InputError("seed", "must be 32 bytes: hash a longer public value first", f"{len(seed)} bytes")
    total = leaf_count(manifest.terms.coordinates, manifest.terms.leaf)
    count = leaves_needed(z, total - len(query.burnt))
    leaves = _draw(query.digest(), seed.hex(), query.burnt, total, count)
    names = genesis_digest(manifest.genesis), query.digest(), query.x
    made = Challenge(query.manifest, *names, z, seed.hex(), source, query.burnt, leaves, now())
    check_challenge(made, query, manifest)
    return made


def check_challenge(challenge: Challenge, query: Query, manifest: Manifest) -> None:
    """Whether a challenge is about this query under this manifest, and asks for what its seed draws."""
    terms, genesis = manifest.terms, manifest.genesis
    # 1. the query is about this consortium's key as it is today, by the statistic that the genesis names
    require(query.manifest == manifest.digest().hex(), "the query", "is about another manifest than the one given")
    facts = (query.coordinates, query.epoch, query.statistic)
    agreed = (terms.coordinates, manifest.epoch, genesis.statistic)
    require(facts == agreed, "the query", "contradicts the manifest in coordinates, epoch or statistic")
    leaves = leaf_count(terms.coordinates, terms.leaf)
    require(
        all(leaf < leaves for leaf in query.burnt), "the query", f"names burnt leaves beyond the last, {leaves - 1}"
    )
    # 2. the challenge is about this query
    require(challenge.genesis == genesis_digest(genesis), "the challenge", "is for another genesis")
    same = (challenge.manifest, challenge.query, challenge.x, challenge.burnt)
    wanted = (query.manifest, query.digest(), query.x, query.burnt)
    require(same == wanted, "the challenge", "is for another query")
    # 3. and it asks for the leaves that its seed draws, no others and no more of them than its z needs
    require(challenge.leaves == challenge.drawn(leaves), "the challenge", "asks for other leaves than its seed draws")


# --- what members open ------------------------------------------------------------------------------------


def _text(words: Vector) -> str:
    return base64.b64encode(words.astype("<u8", copy=False).tobytes()).decode()


def _words(text: object, what: str) -> Vector:
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b"?"
    except (binascii.Error, ValueError):
        raw = b"?"
    require(len(raw) % 8 == 0, what, "must be 8-byte numbers in base64")
    return np.frombuffer(raw, "<u8").astype(np.uint64)


def _leaf_dict(leaf: Opening) -> dict[str, Any]:
    path = [node.hex() for node in leaf.path]
    return {"index": leaf.index, "values": _text(leaf.values), "salt": leaf.salt.hex(), "path": path}


def _leaf_from(body: object) -> Opening:
    taken = take(body, field_names(Opening), "an opened leaf")
    path = taken["path"]
    require(is_count(taken["index"]), "an opened leaf's number", "must be a whole number")
    require(is_hex(taken["salt"], 32), "an opened leaf's salt", "must be 32 bytes in hex")  # one length: it is hashed
    sound = isinstance(path, list) and all(is_hex(node, 32) for node in path)
    require(sound, "an opened leaf's path", "must be hashes of 32 bytes in hex")
    nodes = tuple(bytes.fromhex(node) for node in path)
    return Opening(
        taken["index"], _words(taken["values"], "an opened leaf's values"), bytes.fromhex(taken["salt"]), nodes
    )


@dataclass(frozen=True, eq=False)
class _Answer(Signed):
    """What both kinds of openings share: what they answer, whose they are, and the signature over all of it."""

    PURPOSE: ClassVar[str] = "audit"

    manifest: str
    challenge: str
    point: int
    signature: str = field(repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("manifest", "challenge"):
            require(is_hex(getattr(self, name), 32), f"an opening's {name}", "must be 32 bytes in hex")
        require(is_count(self.point, 1), "an opening's point", "must be a whole number, at least 1")
        require(is_hex(self.signature, 64), "an opening's signature", "must be 64 bytes in hex")


@dataclass(frozen=True, eq=False)
class ShareOpening(_Answer):
    """In epoch 0: the asked leaves of a member's genesis share, with their salts and paths. Never a seed."""

    FORMAT: ClassVar[str] = "quorumark-opening/v1"

    leaves: tuple[Opening, ...] = field(repr=False)

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(leaf.index for leaf in self.leaves)

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {"leaves": [_leaf_dict(leaf) for leaf in self.leaves]}

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        taken = take(parse(data, cls.FORMAT, "an opening"), field_names(cls), "an opening")
        require(isinstance(taken["leaves"], list), "an opening's leaves", "must be a list")
        return cls(**{**taken, "leaves": tuple(_leaf_from(leaf) for leaf in taken["leaves"])})


@dataclass(frozen=True, eq=False)
class KeyOpening(_Answer):
    """After a resharing: what a member's share of today holds of the asked leaves' archive keys.

    `keys` maps each archived point to three elements for each of `indices`, in order.
    """

    FORMAT: ClassVar[str] = "quorumark-opening-keys/v1"

    indices: tuple[int, ...]
    keys: Mapping[int, Vector] = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        sound = all(is_count(leaf) for leaf in self.indices) and list(self.indices) == sorted(set(self.indices))
        require(sound, "an opening's leaves", "must be leaf numbers in order, each once")
        for words in self.keys.values():
            sound = words.shape == (ARCHIVE_KEY * len(self.indices),) and bool((words < P).all())
            require(sound, "an opening's keys", f"must be {ARCHIVE_KEY} field elements for each leaf")

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        keys = {str(point): _text(words) for point, words in self.keys.items()}
        return body | {"indices": list(self.indices), "keys": keys}

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        taken = take(parse(data, cls.FORMAT, "an opening of keys"), field_names(cls), "an opening of keys")
        keys = taken["keys"]
        require(isinstance(taken["indices"], list), "an opening's leaves", "must be a list")
        require(isinstance(keys, Mapping), "an opening's keys", "must be named by points")
        sound = all(
            point.isascii() and point.isdecimal() and len(point) < 10 and str(int(point)) == point for point in keys
        )
        require(sound, "an opening's keys", "must be named by points")
        words = {int(point): _words(text, "an opening's keys") for point, text in keys.items()}
        return cls(**{**taken, "indices": tuple(taken["indices"]), "keys": words})


class Burns(Protocol):
    """A member's memory of what it opened: its ledger."""

    def burnt(self) -> tuple[int, ...]:
        """All leaves that this member ever opened."""

    def record_burnt(self, leaves: Sequence[int], digest: str) -> None:
        """Writes them down for good, with the challenge's digest, before the opening leaves; twice is once."""


def open_leaves(
    home: Home,
    place: ConsortiumFolder,
    unlock: Unlock,
    challenge: Challenge,
    query: Query,
    *,
    answered: bool,
    burns: Burns,
) -> bytes:
    """A member's answer to a challenge: the file to hand out. The leaves are burnt from then on.

    `answered`: whether this member has answered the query. It opens nothing for one that it has not, and no more than
    a quarter of its leaves in its life.
    """
    manifest = place.manifest()
    check_challenge(challenge, query, manifest)
    if not answered:
        raise RecordError("this member has not answered the query that the challenge is about: answer it first")
    leaves = leaf_count(manifest.terms.coordinates, manifest.terms.leaf)
    after = len({*burns.burnt(), *challenge.leaves})
    if LIFE * after > leaves:
        raise RecordError(
            f"with this audit {after} of {leaves} leaves would be burnt, but a member opens at most a quarter of them "
            f"in its life: the key must not be given away piece by piece"
        )
    share, identity = place.verify_share(unlock), home.identity(unlock)
    common = {"manifest": query.manifest, "challenge": challenge.digest(), "point": share.info.point}
    opening: Signed
    if manifest.epoch == 0:
        opening = ShareOpening.sign(identity, **common, leaves=_opened(share, challenge.leaves))
    else:
        keys = _key_parts(share, manifest, challenge.leaves)
        opening = KeyOpening.sign(identity, **common, indices=challenge.leaves, keys=keys)
    burns.record_burnt(challenge.leaves, challenge.digest())
    return opening.to_bytes()


def _opened(share: ShareFile, indices: Sequence[int]) -> tuple[Opening, ...]:
    """Leaves of a share with their salts and paths. Values alone: where a generator made them, its seed stays here."""
    size, length = share.info.leaf, share.info.length
    tree = Tree(salt_seed(share.salt), size, length)

    def fed() -> Iterator[Vector]:
        for piece in share.pieces():
            tree.update(piece)
            yield piece

    values = _gather(fed(), [slice(i * size, min((i + 1) * size, length)) for i in indices])
    levels = levels_of(tree.leaves())
    return tuple(Opening(i, v, tree.salt(i), path_of(levels, i)) for i, v in zip(indices, values, strict=True))


def _key_parts(share: ShareFile, manifest: Manifest, indices: Sequence[int]) -> dict[int, Vector]:
    """What a share holds of the keys of these leaves, for each archived point."""
    places = [key_place(manifest, point, i) for point in manifest.archived for i in indices]
    parts, n = _gather(share.pieces(), places), len(indices)
    return {point: np.concatenate(parts[a * n : (a + 1) * n]) for a, point in enumerate(manifest.archived)}


def _gather(pieces: Iterator[Vector], places: Sequence[slice]) -> list[Vector]:
    """Parts of a vector that comes in pieces; `places` are in order. Every piece is read."""
    found: list[list[Vector]] = [[] for _ in places]
    start = first = 0
    for piece in pieces:
        stop = start + piece.size
        for i in range(first, len(places)):
            if places[i].start >= stop:
                break
            found[i].append(piece[max(places[i].start - start, 0) : places[i].stop - start].copy())
            first = i if places[i].stop > stop else i + 1
        start = stop
    return [np.concatenate(parts) for parts in found]


def burnt_by(openings: Sequence[bytes]) -> tuple[int, ...]:
    """The leaves that these files opened, whoever's they are: later queries leave them out."""
    found: set[int] = set()
    for data in openings:
        found.update(_either(data).indices)
    return tuple(sorted(found))


def _either(data: bytes) -> ShareOpening | KeyOpening:
    try:
        return KeyOpening.from_bytes(data)
    except RecordError:
        return ShareOpening.from_bytes(data)


# --- the check --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditResult:
    """What an audit shows. `verdict` PASSED is a proof; `reasons` and `faults` are sentences.

    `z` is z_sub, and `predicted` what the certificate's z leads one to expect, ± `tolerance`; `agrees` whether the two
    fit. The certificate's number counts as confirmed if they do and predicted − tolerance ≥ 6: with less, what a model
    without the mark may show would agree as well. `log10_bound` bounds the chance of such a z_sub for a model that
    knows nothing of the key, after the charges for choices (`charge`, log10 of a factor). `members` are the genesis
    points whose shares were opened. z, predicted and the others are empty where the openings do not get that far.
    `faults` say what was wrong, and whose it was.
    """

    verdict: str
    reasons: tuple[str, ...]
    faults: tuple[str, ...]
    members: tuple[int, ...]
    leaves: int
    coordinates: int
    z: str = ""
    predicted: str = ""
    tolerance: str = ""
    agrees: bool = False
    charge: str = ""
    log10_bound: str = ""

    def __post_init__(self) -> None:
        require(self.verdict in VERDICTS, "a verdict", f"must be one of {', '.join(VERDICTS)}")

    @property
    def proof(self) -> bool:
        return self.verdict == "PASSED"

    def as_dict(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("reasons", "faults", "members")}
        return {f.name: getattr(self, f.name) for f in fields(self)} | lists


def check_audit(
    challenge: Challenge,
    query: Query,
    x: Integers,
    chain: Sequence[Manifest],
    openings: Sequence[bytes],
    archives: Sequence[str | os.PathLike[str]] = (),
    earlier: Sequence[Challenge] = (),
    vouched: Sequence[Challenge] = (),
) -> AuditResult:
    """Checks an audit from public files alone. `chain`: all manifests up to the query's; `x`: computed by the reader.

    `archives`: copies of members' archives, after a resharing. `earlier`: the challenges of the audits in which the
    query's burnt leaves were opened; each is charged for, since its seed may have been chosen. `vouched`: those whose
    seeds the reader drew, or confirmed with whoever did; they cost nothing. What the question itself gets wrong is an
    error; a member's fault is named in the result, and the audit goes on without that member.
    """
    # 1.–3. the chain, the query under its last manifest, the challenge for that query, leaves drawn from the seed
    verify_chain(chain)
    manifest = chain[-1]
    check_challenge(challenge, query, manifest)
    # 4. x is the query's, and leaves out what is burnt
    _check_x(x, query, manifest.terms)
    # 5. whose openings are good: signed, for this challenge, of exactly the asked leaves
    # 6. every leaf leads to the genesis root of its member
    if manifest.epoch == 0:
        opened, faults = _from_shares(challenge, chain, openings)
    else:
        opened, faults = _from_archives(challenge, chain, openings, archives)
    facts = _Facts(challenge, query, x, chain, opened, tuple(faults))
    # 7. one set of members for all leaves, and no fewer than the first threshold
    if len(opened) < facts.threshold:
        text = f"{len(opened)} members' genesis shares were opened, but it takes {facts.threshold}"
        return facts.result("INCONCLUSIVE", text)
    # 8. their values lie on polynomials of degree t−1: there is one key
    try:
        facts = _of_one_key(facts)
    except ShareError as error:
        return facts.result("FAILED", f"the committed shares are not shares of one key: {error}")
    # 9. that key is of the kind that the terms say
    some = dict(itertools.islice(facts.opened.items(), facts.threshold))
    raw = arithmetic.to_signed(shamir.reconstruct(some, facts.threshold))
    wrong = _odd_entries(raw, manifest.terms.key)
    if wrong:
        return facts.result("FAILED", wrong)
    # 10. z on the opened part, under the whitening; 11. what it is worth after the charges; 12. against the certificate
    told = _Earlier.of(facts, earlier, vouched)
    return facts.judged(raw, _charge(facts, told), _about_choices(facts, told))


def _check_x(x: Integers, query: Query, terms: Terms) -> None:
    """The reader's x against the query."""
    if not isinstance(x, np.ndarray) or x.dtype.kind != "i" or x.dtype.itemsize > 2:
        raise InputError("x", "must be a vector of int8 or int16", getattr(x, "dtype", type(x).__name__))
    if x.shape != (terms.coordinates,):
        raise InputError("x", f"must have {terms.coordinates} entries", f"shape {x.shape}")
    require(vector_digest(x) == query.x, "x", "is not the one that the query names: compute it from the suspect again")
    require(_sum_squares(x) == query.norm2, "the query's norm", "is not that of x")
    for leaf in query.burnt:
        empty = not x[leaf * terms.leaf : (leaf + 1) * terms.leaf].any()
        require(empty, "x", f"is not 0 on leaf {leaf}, which the query calls burnt")


def _sum_squares(values: Integers) -> int:
    """Σ v², exact: pieces whose sum stays below 2^63 for entries below 2^27."""
    wide = 1 << 8 if values.dtype.itemsize > 2 else 1 << 20
    total = 0
    for start in range(0, values.size, wide):
        part = values[start : start + wide].astype(np.int64)
        total += int(part @ part)
    return total


def _from_shares(
    challenge: Challenge, chain: Sequence[Manifest], files: Sequence[bytes]
) -> tuple[dict[int, Vector], list[str]]:
    """Epoch 0: the opened values by point, leaf after leaf, and what was wrong with the other files."""
    terms, genesis = chain[-1].terms, chain[-1].genesis
    opened, faults = {}, []
    for number, data in enumerate(files, 1):
        who = f"opening {number} of {len(files)}"
        try:
            opening = ShareOpening.from_bytes(data)
            who = f"the opening of {terms.member(opening.point).name!r}"
            _check_opening(opening, challenge, terms)
            for leaf in opening.leaves:
                if root_from(leaf, terms.leaf, terms.coordinates).hex() != genesis.roots[opening.point - 1]:
                    raise RecordError(f"leaf {leaf.index} is not what the genesis root commits to")
            opened[opening.point] = np.concatenate([leaf.values for leaf in opening.leaves])
        except QuorumarkError as error:
            faults.append(f"{who} is left out: {error}")
    return dict(sorted(opened.items())), faults


def _check_opening(opening: ShareOpening | KeyOpening, challenge: Challenge, terms: Terms) -> None:
    """Signed by its member, for this challenge, and of all asked leaves: nobody opens some of them only."""
    opening.verify(terms)
    answers = (opening.challenge, opening.manifest) == (challenge.digest(), challenge.manifest)
    require(answers, "it", "answers another challenge")
    require(opening.indices == challenge.leaves, "it", "does not open exactly the leaves that were asked")


def _from_archives(
    challenge: Challenge,
    chain: Sequence[Manifest],
    files: Sequence[bytes],
    archives: Sequence[str | os.PathLike[str]],
) -> tuple[dict[int, Vector], list[str]]:
    """Later epochs: keys from t members of today, leaves from copies of the archives, checked as above."""
    manifest = chain[-1]
    terms = manifest.terms
    parts, faults = {}, []
    for number, data in enumerate(files, 1):
        who = f"opening {number} of {len(files)}"
        try:
            opening = KeyOpening.from_bytes(data)
            who = f"the opening of {terms.member(opening.point).name!r}"
            _check_opening(opening, challenge, terms)
            require(tuple(sorted(opening.keys)) == manifest.archived, "it", "must hold keys for all archives")
            parts[opening.point] = np.concatenate([opening.keys[point] for point in manifest.archived])
        except QuorumarkError as error:
            faults.append(f"{who} is left out: {error}")
    readable: dict[int, Archive] = {}
    for path in archives:
        try:
            archive = Archive.read(path, manifest)
            require(archive.point in manifest.archived, f"the archive {os.fspath(path)!r}", "is of no archived share")
            readable.setdefault(archive.point, archive)
        except QuorumarkError as error:
            faults.append(str(error))
    if len(parts) < terms.threshold:
        faults.append(f"the archives' keys take {terms.threshold} members' openings, but there are {len(parts)}")
        return {}, faults
    opened, why = _read_archives(challenge, manifest, parts, readable)
    return opened, faults + why


def _read_archives(
    challenge: Challenge, manifest: Manifest, parts: Mapping[int, Vector], archives: Mapping[int, Archive]
) -> tuple[dict[int, Vector], list[str]]:
    """The leaves that the key parts open. Parts that contradict each other are told apart by what opens an archive."""
    terms, t = manifest.terms, manifest.terms.threshold
    best: dict[int, Vector] = {}
    faults: list[str] = []
    for chosen in _sets_to_try(parts, t):
        keys = shamir.reconstruct({point: parts[point] for point in chosen}, t)
        opened, why = _open_archives(challenge, manifest, keys, archives)
        if not best or len(opened) > len(best):
            best, faults = opened, why
            if opened:
                others = [point for point in parts if point not in chosen]
                misfits = _misfits(parts, chosen, others)
                names = ", ".join(repr(terms.member(point).name) for point in misfits)
                faults += [f"the keys that {names} opened do not fit the others' and were left out"] if misfits else []
        if len(best) == len(archives):
            break
    return best, faults


def _sets_to_try(parts: Mapping[int, Vector], threshold: int) -> Iterator[tuple[int, ...]]:
    """Sets of t members whose parts may be right: the one that decoding gives, and where parts contradict each other
    others too, since liars who work together can make it go wrong."""
    points = sorted(parts)
    try:
        wrong = _outliers(parts, threshold)
        yield tuple([x for x in points if x not in wrong][:threshold])
    except DecodingError:
        wrong = tuple(points)
    if wrong:
        yield from itertools.islice(itertools.combinations(points, threshold), _MOST_SETS)


def _misfits(parts: Mapping[int, Vector], chosen: Sequence[int], others: Sequence[int]) -> list[int]:
    known = np.stack([parts[point] for point in chosen])
    if not others:
        return []
    expected = arithmetic.matmul(shamir.lagrange_matrix(chosen, others), known)
    return [point for point, row in zip(others, expected, strict=True) if (row != parts[point]).any()]


def _open_archives(
    challenge: Challenge, manifest: Manifest, keys: Vector, archives: Mapping[int, Archive]
) -> tuple[dict[int, Vector], list[str]]:
    """All asked leaves of each archive, checked against its genesis root; an archive counts whole or not at all."""
    terms, genesis, n = manifest.terms, manifest.genesis, len(challenge.leaves)
    opened, faults = {}, []
    for point, archive in sorted(archives.items()):
        start, values = manifest.archived.index(point) * n, []
        try:
            for i, index in enumerate(challenge.leaves, start):
                leaf = archive.open(index, keys[i * ARCHIVE_KEY : (i + 1) * ARCHIVE_KEY])
                if root_from(leaf, terms.leaf, terms.coordinates).hex() != genesis.roots[point - 1]:
                    raise RecordError(f"leaf {index} of {str(archive.path)!r} is not what the genesis root commits to")
                values.append(leaf.values)
            opened[point] = np.concatenate(values)
        except (QuorumarkError, OSError) as error:
            faults.append(f"the archive of the genesis share at point {point} is left out: {error}")
    return opened, faults


def _of_one_key(facts: _Facts) -> _Facts:
    """Without the members whose values are off the polynomials of the others, if so few are wrong that it shows who.

    Leaving them out is a choice like any other: it is charged. That the rest fits is checked by a random combination,
    which values that do not fit pass with probability 1/p.
    """
    wrong = _outliers(facts.opened, facts.threshold)
    first = facts.chain[0].terms
    faults = [
        f"the committed share of {first.member(x).name!r} does not fit the others' and is left out" for x in wrong
    ]
    left = {point: values for point, values in facts.opened.items() if point not in wrong}
    return replace(facts, opened=left, faults=(*facts.faults, *faults))


def _outliers(rows: Mapping[int, Vector], threshold: int) -> tuple[int, ...]:
    """The points whose vectors do not fit the others, by a random combination; a DecodingError if it shows not who."""
    weights = Stream.fresh("audit").elements(next(iter(rows.values())).size)
    return shamir.decode({x: arithmetic.dot(weights, row) for x, row in rows.items()}, threshold).wrong


def _odd_entries(raw: NDArray[np.int64], kind: str) -> str:
    """Why the shared values are no key; empty if they are one."""
    if kind == "rademacher":
        odd = int(np.count_nonzero(np.abs(raw) != 1))
        return f"{odd} of the {raw.size} opened entries of the key are not ±1" if odd else ""
    odd = int(np.count_nonzero(np.abs(raw) > _LARGEST_ENTRY))
    return f"{odd} of the {raw.size} opened entries of the key are larger than any normal number" if odd else ""


@dataclass(frozen=True, eq=False)
class _Facts:
    """What the last steps of a check work on."""

    challenge: Challenge
    query: Query
    x: Integers
    chain: Sequence[Manifest]
    opened: Mapping[int, Vector]
    faults: tuple[str, ...]

    @property
    def threshold(self) -> int:
        return self.chain[0].terms.threshold  # the genesis shares are the first terms'

    @property
    def leaves(self) -> int:
        terms = self.chain[-1].terms
        return leaf_count(terms.coordinates, terms.leaf)

    def result(self, verdict: str, *reasons: str, **values: Any) -> AuditResult:
        members, asked = tuple(self.opened), len(self.challenge.leaves)
        size = sum(part.stop - part.start for part in self._parts())
        return AuditResult(verdict, reasons, self.faults, members, asked, size, **values)

    def _parts(self) -> list[slice]:
        """Where the opened leaves lie."""
        terms = self.chain[-1].terms
        size, length = terms.leaf, terms.coordinates
        return [slice(leaf * size, min((leaf + 1) * size, length)) for leaf in self.challenge.leaves]

    def judged(self, raw: NDArray[np.int64], charge: Fraction, about: Sequence[str]) -> AuditResult:
        parts, genesis = self._parts(), self.chain[-1].genesis
        x = np.concatenate([self.x[part] for part in parts]).astype(np.int64)
        minus = np.concatenate([genesis.whitening(part.start, part.stop - part.start) for part in parts])
        products = x * np.where(minus, -raw, raw)
        value, squares = int(products.sum()), _sum_squares(products)
        if squares == 0:
            return self.result("INCONCLUSIVE", "x is 0 on all opened leaves: they say nothing", *about)
        z = z_text(value, squares)
        share = _MATH.divide(Decimal(_sum_squares(x)), Decimal(self.query.norm2))
        claimed = decimal_of("z", self.challenge.z)
        predicted = _MATH.multiply(claimed, _MATH.sqrt(share))
        tolerance = _MATH.multiply(_FAR, _spread(claimed, self.leaves - len(self.query.burnt)))
        agrees = abs(Decimal(z) - predicted) <= tolerance
        log_charge = _MATH.subtract(_log10(charge.numerator), _log10(charge.denominator))
        bound = min(_MATH.add(Decimal(log10_bound(z)), log_charge), Decimal(0))
        verdict, reasons = _verdict(Decimal(z), bound, agrees)
        expected = f"the certificate's z = {self.challenge.z} predicts {predicted:.2f} ± {tolerance:.2f} on the "
        if agrees and _MATH.subtract(predicted, tolerance) >= _NOTHING:
            reasons.append(
                f"{expected}opened leaves, and they show {Decimal(z):.2f}: the certificate's number is confirmed"
            )
        elif agrees:
            reasons.append(
                f"{expected}opened leaves, and they show {Decimal(z):.2f}: that neither confirms nor contradicts the "
                "certificate's number, since a model without the mark may show as much; too few leaves were opened"
            )
        else:
            reasons.append(
                f"{expected}opened leaves, but they show {Decimal(z):.2f}: the certificate's number is contradicted"
            )
        return self.result(
            verdict,
            *reasons,
            *about,
            z=z,
            predicted=f"{_MATH.quantize(predicted, Decimal('0.000001')):f}",
            tolerance=f"{_MATH.quantize(tolerance, Decimal('0.000001')):f}",
            agrees=agrees,
            charge=f"{_UP.quantize(log_charge, Decimal('0.01')):f}",
            log10_bound=f"{_UP.quantize(bound, Decimal('0.01')):f}",
        )


def _verdict(z: Decimal, bound: Decimal, agrees: bool) -> tuple[str, list[str]]:
    """z_sub ≥ 12 that the charges leave standing is a proof; less may be bad luck, if it agrees with the claim."""
    if z >= PROOF and bound <= _ENOUGH:
        return "PASSED", [f"z = {z:.2f} on the opened leaves is at least {PROOF}: it proves itself"]
    if z >= PROOF:
        return "INCONCLUSIVE", [
            f"z = {z:.2f} on the opened leaves, but after the charges for choices the bound is 10^{bound:.1f}, and "
            f"10^{_ENOUGH} is needed: let more members open, show the challenges that burnt leaves come from, and "
            "vouch for those whose seeds you drew, or confirmed with whoever did"
        ]
    if z < _NOTHING:
        return "FAILED", [f"z = {z:.2f} on the opened leaves is no more than a model without the mark may show"]
    if not agrees:
        return "FAILED", [f"z = {z:.2f} on the opened leaves is below {PROOF}"]
    return "INCONCLUSIVE", [
        f"z = {z:.2f} on the opened leaves is below {PROOF}, as 1 honest audit in 100 is: draw another challenge"
    ]


def _log10(value: int) -> Decimal:
    return _MATH.log10(Decimal(value))


@dataclass(frozen=True)
class _Earlier:
    """Challenges of earlier audits and the leaves that they drew: with the reader's word for the seeds, or without."""

    claimed: tuple[Challenge, ...]
    vouched: tuple[Challenge, ...]
    leaves: frozenset[int]
    sure: frozenset[int]

    @classmethod
    def of(cls, facts: _Facts, earlier: Sequence[Challenge], vouched: Sequence[Challenge]) -> _Earlier:
        """Draws them again. Each may leave out only what others here opened, or it could be made to draw anything; and
        the query leaves out all that they opened."""
        known = {one.digest(): one for one in vouched}
        claimed = {one.digest(): one for one in earlier if one.digest() not in known}
        waiting = list(enumerate((*known.values(), *claimed.values()), 1))
        found: set[int] = set()
        while waiting:
            ready = [(number, one) for number, one in waiting if found.issuperset(one.burnt)]
            for number, one in ready or waiting[:1]:
                what = f"earlier challenge {number}"
                require(one.genesis == facts.challenge.genesis, what, "is for another genesis")
                require(one.leaves == one.drawn(facts.leaves), what, "asks for other leaves than its seed draws")
                lacking = set(one.burnt) - found
                rule = f"leaves out {len(lacking)} leaves that no challenge before it opened: show those challenges too"
                require(not lacking, what, rule)
                kept = set(one.leaves) - set(facts.query.burnt)
                require(not kept, what, f"opened {len(kept)} leaves that the query does not leave out")
            found.update(leaf for _, one in ready for leaf in one.leaves)
            waiting = [item for item in waiting if item not in ready]
        sure = frozenset(leaf for one in known.values() for leaf in one.leaves)
        return cls(tuple(claimed.values()), tuple(known.values()), frozenset(found), sure)


def _charge(facts: _Facts, earlier: _Earlier) -> Fraction:
    """By what the bound is multiplied: C(K,t)/C(m,t) for the members; for burnt leaves that the reader does not vouch
    for, the smaller of two counts of choices: as if nothing explained them, or by the challenges that do."""
    t, members, leaves = facts.threshold, len(facts.chain[-1].genesis.roots), facts.leaves

    def any_leaves(count: int) -> int:
        return leaves * comb(leaves, count) if count else 1

    burnt = set(facts.query.burnt)
    seeds = prod(leaves * min(comb(leaves, len(one.leaves)), _MOST_SEEDS) for one in earlier.claimed)
    choices = min(any_leaves(len(burnt - earlier.sure)), seeds * any_leaves(len(burnt - earlier.leaves)))
    return Fraction(comb(members, t), comb(len(facts.opened), t)) * choices


def _about_choices(facts: _Facts, earlier: _Earlier) -> list[str]:
    """What a reader must know to believe that nobody chose what suited it."""
    source = facts.challenge.source
    said = f"the leaves were drawn by a seed of {source!r}"
    texts = [f"{said}: it must have been drawn after the query was fixed, by you or by somebody who you trust in this"]
    members, opened = len(facts.chain[-1].genesis.roots), len(facts.opened)
    if opened < members:
        texts.append(
            f"{opened} of the {members} first members' shares were opened; the bound is charged for the choice"
        )
    burnt = set(facts.query.burnt)
    if burnt:
        sure, left = len(burnt & earlier.sure), len(burnt - earlier.leaves)
        texts.append(
            f"{len(burnt)} leaves are left out as burnt: {sure} of them by earlier challenges that you vouch for"
            f"{_sources(earlier.vouched)}; {len(burnt) - sure - left} by others{_sources(earlier.claimed)}, whose "
            f"seeds may have been chosen, and {left} are not explained: both are charged for"
        )
    return texts


def _sources(challenges: Sequence[Challenge]) -> str:
    names = sorted({repr(one.source) for one in challenges})
    return f", drawn by seeds of {', '.join(names)}" if names else ""
