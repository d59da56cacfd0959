"""The documents that members sign and keep: cards, terms, manifests (docs/format.md).

Every record is JSON with a `format` field that names its version. A reader refuses versions that it does not know, and
fields that it does not know. Numbers are integers; fractions are decimal strings, so that no reader rounds them.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import canonical, digest, parse, started
from quorumark.checks import field_names, is_count, is_hex, is_name, is_time, require, take
from quorumark.consortium.curve import is_ed25519_key, is_x25519_key
from quorumark.consortium.plan import TARGET_Z, Advice, Plan, PlanWarning, unplanned
from quorumark.consortium.policy import Policy
from quorumark.consortium.strength import Strength
from quorumark.errors import InputError, RecordError
from quorumark.model.layout import ModelLayout, Source

__all__ = [
    "ARCHIVE_KEY",
    "KEY_KINDS",
    "SETUP_KINDS",
    "Card",
    "Genesis",
    "Manifest",
    "Member",
    "Terms",
    "anchor_digest",
    "anchor_of",
    "roster_of",
    "streamed_anchor_digest",
]


KEY_KINDS = ("rademacher", "gaussian")
SETUP_KINDS = ("dealer", "dkg", "paper", "sums")
"""`sums`: there is no key, and nothing is marked: secure aggregation alone."""
ARCHIVE_KEY = 3
"""Field elements in the key of one archived leaf: 183 random bits."""


def _check_keys(ed25519: object, x25519: object) -> None:
    """Under a key of small order one signature fits many messages: no such key enters a card or a roster."""
    require(is_hex(ed25519, 32) and is_hex(x25519, 32), "a member's keys", "must be 32 bytes in hex")
    rule = "must be a point of prime order, as quorumark member init makes it: ask the member for another card"
    require(is_ed25519_key(str(ed25519)), "a member's signing key", rule)
    require(is_x25519_key(str(x25519)), "a member's sealing key", rule)


@dataclass(frozen=True)
class Card:
    """A member's public face: its name and public keys, signed by itself (`identity.Identity.card` makes one)."""

    FORMAT: ClassVar[str] = "quorumark-member/v1"

    name: str
    ed25519: str
    x25519: str
    signature: str

    def __post_init__(self) -> None:
        require(is_name(self.name), "a member's name", "must be 1 to 100 printable characters")
        _check_keys(self.ed25519, self.x25519)
        require(is_hex(self.signature, 64), "a card's signature", "must be 64 bytes in hex")

    def signed_bytes(self) -> bytes:
        """What the signature covers."""
        return canonical({"format": self.FORMAT, "name": self.name, "ed25519": self.ed25519, "x25519": self.x25519})

    def fingerprint(self) -> str:
        """What people compare by phone: of the name and both keys."""
        return digest("card", self.signed_bytes()).hex()

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **{f.name: getattr(self, f.name) for f in fields(self)}})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        what = "a member's card"
        return cls(**take(parse(data, cls.FORMAT, what), field_names(cls), what))


@dataclass(frozen=True)
class Member:
    """A member as the consortium knows it: at a point, with keys, weighing in with its number of examples."""

    point: int
    name: str
    ed25519: str
    x25519: str
    examples: int

    def __post_init__(self) -> None:
        require(is_count(self.point, 1), "a member's point", "must be an integer, at least 1")
        require(is_name(self.name), "a member's name", "must be 1 to 100 printable characters")
        _check_keys(self.ed25519, self.x25519)
        require(is_count(self.examples, 1), "a member's number of examples", "must be an integer, at least 1")

    def __hash__(self) -> int:
        return hash((self.point, self.ed25519))  # all of it would be as right, and slower: rosters are looked up often

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


DEFAULT_STATISTIC = "balanced-anchor/v1"
DEFAULT_STRENGTH = Strength.of({}, coordinates=1)  # the rule `rho`, which does not depend on d
DEFAULT_POLICY = Policy()


class AgreedGroups(Protocol):
    """A model's groups: terms name them by their digest."""

    def digest(self) -> str: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Terms:
    """Everything that is fixed before the key exists. Setup messages are bound to the terms' digest.

    Strength and policy may be given as maps of strings, too, as the command line and JSON have them: they are read and
    checked here, and what is left out has its safe default. Terms that are read from bytes must have every setting in
    its one spelling, so that nothing that was signed depends on a reader's defaults.
    """

    FORMAT: ClassVar[str] = "quorumark-terms/v1"

    name: str
    threshold: int
    roster: tuple[Member, ...]
    layout: str
    coordinates: int
    anchor: str
    created: str
    key: str = "rademacher"
    setup: str = "dkg"
    leaf: int = 1024
    strength: Strength = DEFAULT_STRENGTH
    statistic: str = DEFAULT_STATISTIC
    policy: Policy = DEFAULT_POLICY
    buffers: str = ""  # `ModelLayout.buffers_digest` of the initial model: its integers and booleans; "": left open

    def __post_init__(self) -> None:
        members = len(self.roster)
        require(is_name(self.name), "a consortium's name", "must be 1 to 100 printable characters")
        require(members >= 2, "a consortium", "must have at least two members")
        require(is_count(self.threshold, 2), "the threshold", "must be an integer, at least 2")
        require(self.threshold <= members, "the threshold", f"must not exceed the {members} members")
        points = [member.point for member in self.roster]
        require(points == list(range(1, members + 1)), "the roster", f"must list the points 1..{members} in order")
        for what in ("name", "ed25519", "x25519"):
            values = [getattr(member, what) for member in self.roster]
            require(len(set(values)) == members, "the roster", f"must not give two members one {what}")
        require(is_hex(self.layout, 32), "the layout's digest", "must be 32 bytes in hex")
        require(is_hex(self.anchor, 32), "the anchor's digest", "must be 32 bytes in hex")
        require(self.buffers == "" or is_hex(self.buffers, 32), "the buffers' digest", "must be 32 bytes in hex")
        require(is_count(self.coordinates, 1), "coordinates", "must be an integer, at least 1")
        require(is_count(self.leaf, 1), "leaf", "must be an integer, at least 1")
        require(self.key in KEY_KINDS, "key", f"must be one of {', '.join(KEY_KINDS)}, not {self.key!r}")
        require(self.setup in SETUP_KINDS, "setup", f"must be one of {', '.join(SETUP_KINDS)}, not {self.setup!r}")
        require(is_name(self.statistic), "statistic", "must be a text")
        require(is_time(self.created), "created", "must be a time in UTC like 2026-01-31T12:00:00Z")
        try:
            object.__setattr__(self, "strength", Strength.of(self.strength, self.coordinates))
            object.__setattr__(self, "policy", Policy.of(self.policy))
            self.policy.check_possible(members, self.threshold, self.coordinates, self.key)
            if self.policy.optimiser is not None and self.strength.rule == "paper":
                raise InputError("strength 'rule'", "must not be paper with a server optimiser", "paper")
        except InputError as error:
            raise RecordError(f"the terms' {error}") from None

    @classmethod
    def agree(
        cls,
        name: str,
        threshold: int,
        members: Iterable[tuple[Card, int]],
        model: Source,
        *,
        layout: ModelLayout | None = None,
        groups: AgreedGroups | None = None,
        without_alignment: bool = False,
        policy: Mapping[str, str] | None = None,
        rounds: int | None = None,
        target_z: float | None = None,
        strength: Mapping[str, str] | Strength | None = None,
        **settings: Any,
    ) -> Self:
        """Terms for a public initial model: each member's card with its number of examples, in the order of points.

        `layout` says which weights carry, if the default will not do. `groups` are the channels that belong together
        (`derive_groups`). Without them no suspect can be aligned later, so that anyone who renumbers channels hides the
        mark; that must be said with `without_alignment`. `rounds` is how long you will train: the strength is chosen so
        that a verification finds `target_z` (12) then, but for what `strength` sets; a `PlanWarning` says where that
        may not be reached, or where nobody said how long you will train (`quorumark.consortium.plan`). With `target_z`
        alone the plan says how many rounds it takes: `terms.strength.rounds`. The others are fields of the terms.
        `setup="sums"`: there is no key, and none of this about a mark; members sum securely, and that is all.
        """
        has_key = settings.get("setup") != "sums"
        if has_key and not groups and not without_alignment:
            raise InputError(
                "groups",
                "must be the model's groups (quorumark.derive_groups), or without_alignment must be True",
            )
        layout = layout or ModelLayout.of(model)
        chosen = (
            _planned(layout.coordinates, rounds, target_z, strength)
            if has_key
            else Strength.of(strength or {}, layout.coordinates)
        )
        rules = dict(policy or {}) | ({} if groups is None else {"groups": groups.digest()})
        about = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "buffers": layout.buffers_digest(model).hex(),
        }
        return cls(
            name, threshold, roster_of(members), layout.digest(), layout.coordinates, anchor_of(layout, model),
            policy=Policy.of(rules), strength=chosen, **{**about, **settings},
        )  # fmt: skip

    @property
    def members(self) -> int:
        return len(self.roster)

    @property
    def has_key(self) -> bool:
        """Whether the members share a key; without one their sums are not marked, and no model can be verified."""
        return self.setup != "sums"

    def member(self, point: int) -> Member:
        """The member at a point."""
        if point not in range(1, self.members + 1):
            raise RecordError(f"the consortium {self.name!r} has no member at point {point}")
        return self.roster[point - 1]

    def point_of(self, ed25519: str) -> int:
        """Where the holder of a key sits."""
        for member in self.roster:
            if member.ed25519 == ed25519:
                return member.point
        raise RecordError(f"this identity is not a member of the consortium {self.name!r}")

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        body["roster"] = [member.as_dict() for member in self.roster]
        return body | {"strength": self.strength.as_dict(), "policy": self.policy.as_dict()}

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **self.as_dict()})

    def digest(self) -> bytes:
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return digest("terms", self.to_bytes())

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        what = "a consortium's terms"
        taken = take(body, field_names(cls), what)
        require(isinstance(taken["roster"], list), "the roster", "must be a list")
        names = field_names(Member)
        taken["roster"] = tuple(Member(**take(entry, names, "a member's entry")) for entry in taken["roster"])
        terms = cls(**taken)
        for name, settings in (("strength", terms.strength.as_dict()), ("policy", terms.policy.as_dict())):
            rule = f"must have every setting in its one spelling: {json.dumps(settings, sort_keys=True)}"
            require(taken[name] == settings, f"the {name} in a consortium's terms", rule)
        return terms

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls.from_dict(parse(data, cls.FORMAT, "a consortium's terms"))


def _planned(
    coordinates: int, rounds: int | None, target_z: float | None, strength: Mapping[str, str] | Strength | None
) -> Strength:
    """The strength for so many rounds, with a warning where it may not be enough, or where nobody said."""
    given = strength.as_dict() if isinstance(strength, Strength) else strength
    if rounds is None and target_z is None:
        chosen = Strength.of(given or {}, coordinates)
        plan = Plan.of(chosen, coordinates, chosen.rounds) if chosen.rounds else None
        advice: tuple[Advice, ...] = (unplanned(chosen, coordinates),)
    else:
        aim = TARGET_Z if target_z is None else target_z
        plan = Plan.propose(coordinates, rounds, target_z=aim, strength=given)
        chosen = Strength.of(plan.strength, coordinates)
    if plan is not None:
        advice = () if plan.enough else plan.advice
    for one in advice:
        warnings.warn(f"{one.text} ({one.code})", PlanWarning, stacklevel=3)
    return chosen


def roster_of(members: Iterable[tuple[Card, int]]) -> tuple[Member, ...]:
    """Members at the points 1, 2, …, from their cards (or identities) and their numbers of examples."""
    return tuple(Member(x, who.name, who.ed25519, who.x25519, count) for x, (who, count) in enumerate(members, 1))


def anchor_of(layout: ModelLayout, model: Source) -> str:
    """What terms name as their anchor."""
    return anchor_digest(layout.digest(), layout.encode(model))


def anchor_digest(layout: str, encoded: NDArray[np.uint64]) -> str:
    """What terms name as their anchor: of a model of that layout, as field elements (`ModelLayout.encode`)."""
    content = np.ascontiguousarray(encoded).astype("<u8", copy=False).tobytes()
    return streamed_anchor_digest(layout, len(content), [content])


def streamed_anchor_digest(layout: str, length: int, pieces: Iterable[bytes | memoryview]) -> str:
    """The same of a model that comes in pieces, `length` bytes in all: digest("anchor", layout, all pieces)."""
    hashed = started("anchor", bytes.fromhex(layout))
    hashed.update(length.to_bytes(8, "big"))
    for piece in pieces:
        hashed.update(piece)
        length -= len(piece)
    require(length == 0, "an anchor's pieces", "must have the length that was named")
    return hashed.hexdigest()


@dataclass(frozen=True)
class Genesis:
    """What the key in use depends on for ever: the first terms, the setup's session and the Merkle roots of all shares.

    The sign whitening comes from here, so nobody could have fitted the key to a model that existed before.
    """

    terms: str
    layout: str
    anchor: str
    statistic: str
    session: str
    roots: tuple[str, ...]

    def __post_init__(self) -> None:
        for what in ("terms", "layout", "anchor", "session"):
            require(is_hex(getattr(self, what), 32), f"genesis {what}", "must be 32 bytes in hex")
        require(all(is_hex(root, 32) for root in self.roots), "genesis roots", "must be 32 bytes in hex each")
        require(is_name(self.statistic), "genesis statistic", "must be a text")

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"roots": list(self.roots)}

    def whitening(self, start: int, count: int) -> NDArray[np.bool_]:
        """Where the public signs σ are −1, for coordinates start … start+count−1: the key in use is σ ⊙ τ_raw.

        Bit i of the stream SHAKE-128(seed ‖ block as 8 bytes), 65,536 coordinates a block, least significant bit of
        each byte first; seed = digest("sign whitening", canonical genesis).
        """
        out = np.empty(count, np.bool_)
        done = 0
        while done < count:
            block, offset = divmod(start + done, _WHITENING_BLOCK)
            taken = _whitening_block(self._seed, block)[offset : offset + count - done]
            out[done : done + taken.size] = taken
            done += taken.size
        return out

    @cached_property
    def _seed(self) -> bytes:
        return digest("sign whitening", canonical(self.as_dict()))


_WHITENING_BLOCK = 1 << 16


@lru_cache(maxsize=64)
def _whitening_block(seed: bytes, block: int) -> NDArray[np.bool_]:
    """Shares come in smaller pieces than a block, and all members of a simulation need the same ones."""
    stream = hashlib.shake_128(seed + block.to_bytes(8, "big")).digest(_WHITENING_BLOCK // 8)
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little").view(np.bool_)
    bits.flags.writeable = False
    return bits


_SHAPES = (("terms", dict), ("genesis", dict), ("roots", list), ("archived", list), ("signatures", dict))


@dataclass(frozen=True)
class Manifest:
    """The consortium as all members signed it: terms, genesis, the current roots and epoch, and what came before.

    A change of any of it is a new manifest that names its predecessor; genesis never changes. `archived` lists the
    first members (by their points then) whose genesis shares are archived: the keys of those archives are shared like
    the key itself, behind it in every share (docs/protocol.md, "The life of a share").
    """

    FORMAT: ClassVar[str] = "quorumark-manifest/v1"

    terms: Terms
    genesis: Genesis
    roots: tuple[str, ...]
    epoch: int = 0
    commitment: Mapping[str, str] | None = None
    predecessor: str | None = None
    archived: tuple[int, ...] = ()
    signatures: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shares = self.terms.members if self.terms.has_key else 0
        require(len(self.roots) == shares, "roots", f"must be {shares}, one for each member's share")
        require(all(is_hex(root, 32) for root in self.roots), "roots", "must be 32 bytes in hex each")
        require(is_count(self.epoch), "epoch", "must be an integer, at least 0")
        dealt = self.terms.setup == "dealer"
        require((self.commitment is not None) == dealt, "commitment", "must be there for a dealer only")
        require(
            all(is_count(x, 1) for x in self.archived) and list(self.archived) == sorted(set(self.archived)),
            "archived",
            "must list points in order",
        )
        require(bool(self.archived) == (self.epoch > 0), "archived", "must be there exactly after a first resharing")
        require(all(x <= len(self.genesis.roots) for x in self.archived), "archived", "must list points of the genesis")
        if self.predecessor is not None:
            require(is_hex(self.predecessor, 32), "predecessor", "must be 32 bytes in hex")
        else:
            require(self.epoch == 0, "a manifest", "must name its predecessor unless it is the first one (epoch 0)")
            mine = (self.terms.digest().hex(), self.terms.layout, self.terms.anchor, self.terms.statistic, self.roots)
            theirs = tuple(getattr(self.genesis, n) for n in ("terms", "layout", "anchor", "statistic", "roots"))
            require(mine == theirs, "genesis", "must repeat the first manifest's terms and roots")
        same = all(getattr(self.genesis, n) == getattr(self.terms, n) for n in ("layout", "anchor", "statistic"))
        require(same, "genesis", "must have the terms' layout, anchor and statistic")
        if self.commitment is not None:
            names = {"hash", "nonce"} | ({"norm"} if self.terms.key == "gaussian" else set())
            sound = isinstance(self.commitment, Mapping) and self.commitment.keys() == names
            sound = sound and all(is_hex(self.commitment[name], 32) for name in ("hash", "nonce"))
            norm = self.commitment.get("norm", "0") if sound else "0"
            sound = sound and isinstance(norm, str) and norm.isascii() and norm.isdecimal() and len(norm) < 40
            require(sound, "commitment", "must hold a hash and a nonce of 32 bytes in hex, and a gaussian key's norm")

    @property
    def share_length(self) -> int:
        """Field elements in a share: the key's, then those of the archives' keys."""
        leaves = -(-self.terms.coordinates // self.terms.leaf)
        return self.terms.coordinates + len(self.archived) * leaves * ARCHIVE_KEY

    def body(self) -> dict[str, Any]:
        """Everything but the signatures."""
        return {
            "terms": self.terms.as_dict(),
            "genesis": self.genesis.as_dict(),
            "roots": list(self.roots),
            "epoch": self.epoch,
            "commitment": None if self.commitment is None else dict(self.commitment),
            "predecessor": self.predecessor,
            "archived": list(self.archived),
        }

    def digest(self) -> bytes:
        """What members sign and pin."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return digest("manifest", canonical({"format": self.FORMAT, **self.body()}))

    def to_bytes(self) -> bytes:
        signatures = {str(point): signature for point, signature in sorted(self.signatures.items())}
        return canonical({"format": self.FORMAT, **self.body(), "signatures": signatures})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        what = "a consortium's manifest"
        names = ["terms", "genesis", "roots", "epoch", "commitment", "predecessor", "archived", "signatures"]
        taken = take(parse(data, cls.FORMAT, what), names, what)
        for name, kind in _SHAPES:
            require(isinstance(taken[name], kind), name, "has the wrong shape")
        genesis = take(taken["genesis"], [f.name for f in fields(Genesis)], "a genesis")
        require(isinstance(genesis["roots"], list), "genesis roots", "must be a list")
        signatures = {}
        for point, signature in taken["signatures"].items():
            sound = point.isascii() and point.isdecimal() and len(point) < 10 and str(int(point)) == point
            require(sound, "signatures", "must be named by points")
            require(is_hex(signature, 64), "signatures", "must be 64 bytes in hex")
            signatures[int(point)] = signature
        return cls(
            Terms.from_dict(taken["terms"]),
            Genesis(**{**genesis, "roots": tuple(genesis["roots"])}),
            tuple(taken["roots"]),
            taken["epoch"],
            taken["commitment"],
            taken["predecessor"],
            tuple(taken["archived"]),
            signatures,
        )

    def with_signature(self, point: int, signature: bytes) -> Self:
        return replace(self, signatures={**self.signatures, point: signature.hex()})

    def sign_bytes(self) -> bytes:
        """What each member's signature covers."""
        return self.digest()
