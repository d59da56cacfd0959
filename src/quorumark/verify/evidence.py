"""What travels between the people who verify a model: the query, the partials, and what follows from them.

    Query      what is asked: which suspect, under which manifest, by which statistic, and the digest of the public
               vector x that everybody computes from the suspect
    Partial    one member's answer ⟨x, its share⟩ mod p: a small signed file that can be e-mailed
    Finding    what the partials say together: z, the verdict, and all that it rests on; a certificate's content

All three are canonical JSON with a version (docs/format.md, "Evidence"); fractions are decimal strings, and what people
read as sentences is in codes (`consortium.reasons`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from quorumark.canonical import canonical, digest, parse
from quorumark.checks import field_names, is_count, is_decimal, is_hex, is_text, is_time, require, take
from quorumark.field import P
from quorumark.model.statistic import vector_digest
from quorumark.model.suspect import SuspectFile
from quorumark.reasons import Reason
from quorumark.verify.layered import Found, Layers, Opened
from quorumark.verify.signed import SignedByMember

__all__ = ["CORROBORATION", "VERDICTS", "Finding", "Partial", "Query", "now", "vector_digest"]

VERDICTS = ("PASSED", "FAILED", "INCONCLUSIVE")
CORROBORATION = ("uncorroborated", "corroborated", "corrected")
"""m = t partials (one liar decides); more, and all agree; more, and some were wrong and are named."""

OUTCOMES = ("passed", "failed", "open")
"""What became of an earlier query: open until its certificate is known, and counted as failed until then."""


def now() -> str:
    """The time in UTC, as records write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _are(reasons: tuple[object, ...], family: str) -> bool:
    """Whether these are reasons that belong here."""
    return all(isinstance(reason, Reason) and reason.family == family for reason in reasons)


_BLOCKS = "must map digests of its queries to numbers of equations, at least 2"


def _are_blocks(blocks: object, known: Mapping[str, str]) -> bool:
    return isinstance(blocks, Mapping) and all(x in known and is_count(count, 2) for x, count in blocks.items())


@dataclass(frozen=True)
class Query:
    """What is asked. All of it but `created` follows from the suspect, the manifest, the layout, the anchor and
    `burnt`, so everybody can compute it again.

    x is a vector of integers, one for each of the d = `coordinates` of the key; `norm1`, `norm2` and `norm4` are
    Σ|x|, Σx² and Σx⁴. `covered` of the `carriers` coordinates that could carry were found in the suspect. `burnt`: the
    leaves of the shares that are left out, since audits opened them; `burnt_norm2` is the Σx² that x would have had on
    them. `matching` says how the suspect was read, in
    codes (prefix, casts, missing and extra tensors, numbers that are not finite, what was aligned).
    `alignment` is "none", or procedures, each with the digest of what was agreed on for it: the groups for an alignment
    (docs/alignment.md), the factors for an adapter (docs/lora.md), both joined by "+".
    `surplus` counts the suspect's channels that the alignment left over: with any, a low z does not clear the suspect
    (docs/alignment.md, "Limits"). `blocks` is how many blocks the agreed rule gives, 0 without one. `layers` makes it a
    query by layers (docs/layers.md); None: a plain one.
    """

    FORMAT: ClassVar[str] = "quorumark-query/v1"

    manifest: str
    epoch: int
    statistic: str
    alignment: str
    suspect: str
    files: tuple[SuspectFile, ...]
    x: str
    coordinates: int
    carriers: int
    covered: int
    norm1: int
    norm2: int
    norm4: int
    burnt: tuple[int, ...]
    burnt_norm2: int
    matching: tuple[Reason, ...]
    created: str
    surplus: int = 0
    blocks: int = 0
    layers: Layers | None = None

    def __post_init__(self) -> None:
        for name in ("manifest", "suspect", "x"):
            require(is_hex(getattr(self, name), 32), f"a query's {name}", "must be 32 bytes in hex")
        for name in (
            "epoch",
            "coordinates",
            "carriers",
            "covered",
            "norm1",
            "norm2",
            "norm4",
            "burnt_norm2",
            "surplus",
            "blocks",
        ):
            require(is_count(getattr(self, name)), f"a query's {name}", "must be an integer, at least 0")
        require(self.carriers > 0, "a query's carriers", "must be at least 1")
        for name, most in (("statistic", 100), ("alignment", 200)):
            require(is_text(getattr(self, name), most), f"a query's {name}", "must be a printable string")
        require(self.covered <= self.carriers, "a query's coverage", "must not exceed the carriers")
        require(
            all(is_count(leaf) for leaf in self.burnt) and list(self.burnt) == sorted(set(self.burnt)),
            "a query's burnt leaves",
            "must be integers in order, each once",
        )
        require(bool(self.burnt) or not self.burnt_norm2, "a query's burnt_norm2", "must be 0 if nothing is left out")
        require(_are(self.matching, "read"), "a query's matching", "must be reasons whose codes start with read")
        require(is_time(self.created), "a query's time", "must be in UTC like 2026-01-31T12:00:00Z")

    @property
    def equations(self) -> int:
        """How many equations in the key an answer opens."""
        return 1 if self.layers is None else self.layers.count

    @property
    def effective(self) -> int:
        """‖x‖₂⁴/‖x‖₄⁴: on how many coordinates x really depends, rounded down."""
        return self.norm2 * self.norm2 // self.norm4 if self.norm4 else 0

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {
            "files": [file.as_dict() for file in self.files],
            "burnt": list(self.burnt),
            "matching": [reason.as_dict() for reason in self.matching],
            "layers": None if self.layers is None else self.layers.as_dict(),
        }

    def same_but_time(self, other: Query) -> bool:
        """Whether two people computed the same."""
        return {**self.as_dict(), "created": ""} == {**other.as_dict(), "created": ""}

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **self.as_dict()})

    def digest(self) -> str:
        return digest("query", self.to_bytes()).hex()

    @classmethod
    def from_dict(cls, body: object) -> Self:
        taken = take(body, field_names(cls), "a query")
        for name in ("files", "burnt", "matching"):
            require(isinstance(taken[name], list), f"a query's {name}", "must be a list")
        taken["files"] = tuple(
            SuspectFile(**take(entry, field_names(SuspectFile), "a suspect's file")) for entry in taken["files"]
        )
        matching = tuple(Reason.from_dict(entry) for entry in taken["matching"])
        layers = None if taken["layers"] is None else Layers.from_dict(taken["layers"])
        return cls(**{**taken, "burnt": tuple(taken["burnt"]), "matching": matching, "layers": layers})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls.from_dict(parse(data, cls.FORMAT, "a query"))


@dataclass(frozen=True)
class Partial(SignedByMember):
    """A member's answer y = ⟨x, s⟩ mod p (in decimal digits), signed.

    `members` is empty for an open partial. For a masked one, λ·y plus masks that cancel over these points, it names
    the fixed set. `history` maps the x digests of all queries that this member answered before, or knows of, to what
    became of them; `blocks` says of those that were answered by layers how many equations that opened. `ledger` is the
    head of its hash-chained ledger after this answer.

    An answer by layers has one number for each block, sealed to the query's examiner: `sealed` instead of `answer`.
    """

    FORMAT: ClassVar[str] = "quorumark-partial/v1"
    PURPOSE: ClassVar[str] = "partial"

    manifest: str
    epoch: int
    point: int
    query: str
    suspect: str
    x: str
    answer: str
    members: tuple[int, ...]
    history: Mapping[str, str]
    blocks: Mapping[str, int]
    ledger: str
    created: str
    signature: str = field(repr=False)
    sealed: str = field(repr=False, default="")

    def __post_init__(self) -> None:
        for name in ("manifest", "query", "suspect", "x", "ledger"):
            require(is_hex(getattr(self, name), 32), f"a partial's {name}", "must be 32 bytes in hex")
        require(is_hex(self.signature, 64), "a partial's signature", "must be 64 bytes in hex")
        require(
            is_count(self.epoch) and is_count(self.point, 1),
            "a partial's epoch and point",
            "must be integers, from 0 and from 1",
        )
        if self.sealed:
            sound = (
                isinstance(self.sealed, str) and re.fullmatch("[A-Za-z0-9+/]{64,2000}={0,2}", self.sealed) is not None
            )
            require(sound and self.answer == "", "a sealed partial", "must be in base64, with no answer beside it")
            require(self.members == (), "a sealed partial", "must not be masked")
        else:
            sound = isinstance(self.answer, str) and re.fullmatch("0|[1-9][0-9]{0,18}", self.answer) is not None
            sound = sound and self.sealed == "" and int(self.answer) < P
            require(sound, "a partial's answer", "must be an integer below 2^61 − 1, in decimal digits")
        require(
            all(is_count(x, 1) for x in self.members) and list(self.members) == sorted(set(self.members)),
            "a partial's members",
            "must be points in order",
        )
        sound = isinstance(self.history, Mapping) and all(
            is_hex(x, 32) and outcome in OUTCOMES for x, outcome in self.history.items()
        )
        require(sound, "a partial's history", "must map digests to passed, failed or open")
        require(_are_blocks(self.blocks, self.history), "a partial's blocks", _BLOCKS)
        require(is_time(self.created), "a partial's time", "must be in UTC like 2026-01-31T12:00:00Z")

    @property
    def value(self) -> int:
        return int(self.answer)

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {"members": list(self.members), "history": dict(self.history), "blocks": dict(self.blocks)}

    def digest(self) -> str:
        """What an examiner names it by."""
        return digest("partial", self.to_bytes()).hex()

    @classmethod
    def from_dict(cls, body: object) -> Self:
        taken = take(body, field_names(cls), "a partial")
        require(isinstance(taken["members"], list), "a partial's members", "must be a list")
        return cls(**{**taken, "members": tuple(taken["members"])})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls.from_dict(parse(data, cls.FORMAT, "a partial"))


@dataclass(frozen=True)
class Finding:
    """What a coalition's partials say, with everything that it rests on: the predicate of a certificate.

    `value` is Y = ⟨x, τ⟩ as a signed integer in digits, `z` = Y/‖x‖; `threshold` the z* that applied, which is
    `agreed` (the policy's z*, or the one for `alpha`) raised for the `equations` that earlier queries opened without
    passing. `wrong` lists points whose partials contradict the others. `reasons` are codes: why this verdict, and what
    limits it. `known` are all earlier queries that any of the partials knows of, `blocks` how many equations those of
    them opened that were answered by layers.

    `audits` explain what the query leaves out: leaves, by the digest of the challenge that had them opened.
    `log10_choices` counts the choices that the asker had (`omissions`). `charged` is `agreed` raised for them,
    before `equations` raise it further; `log10_p` and `log10_bound` allow for them too.

    By layers, `layers` has Q and `opened` the examiner's word for it; `value` and z are the plain query's.
    """

    FORMAT: ClassVar[str] = "quorumark-certificate/v1"

    consortium: str
    members: int
    quorum: int
    query: Query
    partials: tuple[Partial, ...]
    names: Mapping[str, str]
    corroboration: str
    wrong: tuple[int, ...]
    value: str
    z: str
    cosine: str
    log10_p: str
    log10_bound: str
    agreed: str
    alpha: str
    audits: Mapping[str, tuple[int, ...]]
    log10_choices: str
    charged: str
    equations: int
    threshold: str
    known: Mapping[str, str]
    blocks: Mapping[str, int]
    layers: Found | None
    opened: Opened | None
    verdict: str
    reasons: tuple[Reason, ...]
    created: str

    def __post_init__(self) -> None:
        require(is_text(self.consortium, 100) and bool(self.consortium), "a finding's consortium", "must be a name")
        for name in ("members", "quorum", "equations"):
            require(is_count(getattr(self, name)), f"a finding's {name}", "must be an integer, at least 0")
        require(self.verdict in VERDICTS, "a verdict", f"must be one of {', '.join(VERDICTS)}")
        require(self.corroboration in CORROBORATION, "corroboration", f"must be one of {', '.join(CORROBORATION)}")
        for name in (
            "value",
            "z",
            "cosine",
            "log10_p",
            "log10_bound",
            "agreed",
            "log10_choices",
            "charged",
            "threshold",
        ):
            require(is_decimal(getattr(self, name)), f"a finding's {name}", "must be a decimal number as a string")
        require(is_text(self.alpha, 100), "a finding's alpha", "must be a printable string")
        require(all(is_count(x, 1) for x in self.wrong), "a finding's wrong partials", "must be points")
        sound = isinstance(self.names, Mapping) and all(is_text(v, 100) for pair in self.names.items() for v in pair)
        require(sound, "a finding's names", "must map points to names")
        sound = isinstance(self.known, Mapping) and all(is_hex(x, 32) and o in OUTCOMES for x, o in self.known.items())
        require(sound, "a finding's known queries", "must map digests to passed, failed or open")
        require(_are_blocks(self.blocks, self.known), "a finding's blocks", _BLOCKS)
        by_layers = self.query.layers is not None
        sound = (self.layers is not None) == by_layers and (self.opened is not None) == by_layers
        require(sound, "a finding by layers", "must be about a query by layers, and have Q and the examiner's word")
        sound = isinstance(self.audits, Mapping) and all(
            is_hex(name, 32)
            and isinstance(leaves, tuple)
            and all(is_count(leaf) for leaf in leaves)
            and list(leaves) == sorted(set(leaves))
            for name, leaves in self.audits.items()
        )
        require(sound, "a finding's audits", "must map digests to leaf numbers in order, each once")
        require(_are(self.reasons, "finding"), "a finding's reasons", "must be reasons whose codes start with finding")
        require(is_time(self.created), "a finding's time", "must be in UTC like 2026-01-31T12:00:00Z")

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {
            "query": self.query.as_dict(),
            "partials": [partial.as_dict() for partial in self.partials],
            "names": dict(self.names),
            "wrong": list(self.wrong),
            "audits": {name: list(leaves) for name, leaves in self.audits.items()},
            "known": dict(self.known),
            "blocks": dict(self.blocks),
            "layers": None if self.layers is None else self.layers.as_dict(),
            "opened": None if self.opened is None else self.opened.as_dict(),
            "reasons": [reason.as_dict() for reason in self.reasons],
        }

    @classmethod
    def from_dict(cls, body: object) -> Self:
        taken = take(body, field_names(cls), "a certificate")
        for name in ("partials", "wrong", "reasons"):
            require(isinstance(taken[name], list), f"a certificate's {name}", "must be a list")
        audits = taken["audits"]
        sound = isinstance(audits, Mapping) and all(isinstance(leaves, list) for leaves in audits.values())
        require(sound, "a certificate's audits", "must map digests to lists of leaf numbers")
        return cls(
            **{
                **taken,
                "query": Query.from_dict(taken["query"]),
                "partials": tuple(Partial.from_dict(entry) for entry in taken["partials"]),
                "wrong": tuple(taken["wrong"]),
                "audits": {name: tuple(leaves) for name, leaves in audits.items()},
                "layers": None if taken["layers"] is None else Found.from_dict(taken["layers"]),
                "opened": None if taken["opened"] is None else Opened.from_dict(taken["opened"]),
                "reasons": tuple(Reason.from_dict(entry) for entry in taken["reasons"]),
            }
        )
