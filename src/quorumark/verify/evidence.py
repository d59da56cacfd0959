"""What travels between the people who verify a model: the query, the partials, and what follows from them.

    Query      what is asked: which suspect, under which manifest, by which statistic, and the digest of the public
               vector x that everybody computes from the suspect
    Partial    one member's answer ⟨x, its share⟩ mod p: a small signed file that can be e-mailed
    Finding    what the partials say together: z, the verdict, and all that it rests on; a certificate's content

All three are canonical JSON with a version (docs/format.md, "Evidence"); fractions are decimal texts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from quorumark.errors import RecordError
from quorumark.field import P
from quorumark.identity import Identity, verify
from quorumark.records import Terms, canonical, digest, parse
from quorumark.verify.statistic import vector_digest

__all__ = ["CORROBORATION", "VERDICTS", "Finding", "Partial", "Query", "SuspectFile", "now", "vector_digest"]

VERDICTS = ("PASSED", "FAILED", "INCONCLUSIVE")
CORROBORATION = ("uncorroborated", "corroborated", "corrected")
"""m = t partials (one liar decides); more, and all agree; more, and some were wrong and are named."""

OUTCOMES = ("passed", "failed", "open")
"""What became of an earlier query: open until its certificate is known, and counted as failed until then."""


def now() -> str:
    """The time in UTC, as records write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _check(good: bool, what: str, rule: str) -> None:
    if not good:
        raise RecordError(f"{what} {rule}")


def _is_hex(value: object, size: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{2 * size}}}", value) is not None


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_time(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value) is not None


def _is_text(value: object, most: int = 1000) -> bool:
    return isinstance(value, str) and len(value) <= most and (not value or value.isprintable())


def _is_decimal(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}(\.[0-9]{1,18})?", value) is not None


def _take(body: object, cls: type[Any], what: str) -> dict[str, Any]:
    """Exactly the fields of a record; others only if their name starts with x-."""
    if not isinstance(body, Mapping):
        raise RecordError(f"{what} must be a JSON object")
    names = [f.name for f in fields(cls)]
    missing = [name for name in names if name not in body]
    unknown = [name for name in body if name not in names and name != "format" and not name.startswith("x-")]
    if missing or unknown:
        problem = f"it lacks {missing[0]!r}" if missing else f"it has the unknown critical field {unknown[0]!r}"
        raise RecordError(f"this is not {what} that can be used: {problem}")
    return {name: body[name] for name in names}


@dataclass(frozen=True)
class SuspectFile:
    """A file that holds the suspect's weights, or the index of those files; `name` is relative to the folder."""

    name: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        _check(_is_text(self.name) and bool(self.name), "a suspect's file name", "must be printable text")
        _check(_is_hex(self.sha256, 32), "a suspect's file digest", "must be 32 bytes in hex")
        _check(_is_count(self.size), "a suspect's file size", "must be a whole number")

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Query:
    """What is asked. All of it but `created` follows from the suspect, the manifest, the layout, the anchor and
    `burnt`, so everybody can compute it again.

    x is a vector of whole numbers, one for each of the d = `coordinates` of the key; `norm1`, `norm2` and `norm4` are
    Σ|x|, Σx² and Σx⁴. `covered` of the `carriers` coordinates that could carry were found in the suspect. `burnt`: the
    leaves of the shares that were opened in audits and are left out. `matching` says how the suspect was read:
    texts for people (prefix, casts, missing and extra tensors, numbers that are not finite).
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
    matching: tuple[str, ...]
    created: str

    def __post_init__(self) -> None:
        for name in ("manifest", "suspect", "x"):
            _check(_is_hex(getattr(self, name), 32), f"a query's {name}", "must be 32 bytes in hex")
        for name in ("epoch", "coordinates", "carriers", "covered", "norm1", "norm2", "norm4"):
            _check(_is_count(getattr(self, name)), f"a query's {name}", "must be a whole number, at least 0")
        for name in ("statistic", "alignment"):
            _check(_is_text(getattr(self, name), 100), f"a query's {name}", "must be a text")
        _check(self.covered <= self.carriers, "a query's coverage", "must not exceed the carriers")
        _check(
            all(_is_count(leaf) for leaf in self.burnt) and list(self.burnt) == sorted(set(self.burnt)),
            "a query's burnt leaves",
            "must be whole numbers in order, each once",
        )
        _check(all(_is_text(text) for text in self.matching), "a query's matching", "must be printable texts")
        _check(_is_time(self.created), "a query's time", "must be in UTC like 2026-01-31T12:00:00Z")

    @property
    def effective(self) -> int:
        """‖x‖₂⁴/‖x‖₄⁴: on how many coordinates x really depends, rounded down."""
        return self.norm2 * self.norm2 // self.norm4 if self.norm4 else 0

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {
            "files": [file.as_dict() for file in self.files],
            "burnt": list(self.burnt),
            "matching": list(self.matching),
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
        taken = _take(body, cls, "a query")
        for name in ("files", "burnt", "matching"):
            _check(isinstance(taken[name], list), f"a query's {name}", "must be a list")
        taken["files"] = tuple(SuspectFile(**_take(entry, SuspectFile, "a suspect's file")) for entry in taken["files"])
        return cls(**{**taken, "burnt": tuple(taken["burnt"]), "matching": tuple(taken["matching"])})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls.from_dict(parse(data, cls.FORMAT, "a query"))


@dataclass(frozen=True)
class Partial:
    """A member's answer y = ⟨x, s⟩ mod p (in decimal digits), signed.

    `members` is empty for an open partial. For a masked one, λ·y plus masks that cancel over these points, it names
    the fixed set. `history` maps the x digests of all queries that this member answered before, or knows of, to what
    became of them; `ledger` is the head of its hash-chained ledger after this answer.
    """

    FORMAT: ClassVar[str] = "quorumark-partial/v1"

    manifest: str
    epoch: int
    point: int
    query: str
    suspect: str
    x: str
    answer: str
    members: tuple[int, ...]
    history: Mapping[str, str]
    ledger: str
    created: str
    signature: str = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("manifest", "query", "suspect", "x", "ledger"):
            _check(_is_hex(getattr(self, name), 32), f"a partial's {name}", "must be 32 bytes in hex")
        _check(_is_hex(self.signature, 64), "a partial's signature", "must be 64 bytes in hex")
        _check(_is_count(self.epoch) and _is_count(self.point, 1), "a partial's epoch and point", "must be numbers")
        sound = isinstance(self.answer, str) and re.fullmatch("0|[1-9][0-9]{0,18}", self.answer) is not None
        _check(sound and int(self.answer) < P, "a partial's answer", "must be a number below 2^61 − 1, in digits")
        _check(
            all(_is_count(x, 1) for x in self.members) and list(self.members) == sorted(set(self.members)),
            "a partial's members",
            "must be points in order",
        )
        sound = isinstance(self.history, Mapping) and all(
            _is_hex(x, 32) and outcome in OUTCOMES for x, outcome in self.history.items()
        )
        _check(sound, "a partial's history", "must map digests to passed, failed or open")
        _check(_is_time(self.created), "a partial's time", "must be in UTC like 2026-01-31T12:00:00Z")

    @property
    def value(self) -> int:
        return int(self.answer)

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {"members": list(self.members), "history": dict(self.history)}

    def signed_bytes(self) -> bytes:
        """What the signature covers: everything else."""
        body = self.as_dict()
        del body["signature"]
        return canonical({"format": self.FORMAT, **body})

    def to_bytes(self) -> bytes:
        return canonical({"format": self.FORMAT, **self.as_dict()})

    @classmethod
    def sign(cls, identity: Identity, **values: Any) -> Self:
        """A partial with its member's signature."""
        unsigned = cls(**values, signature="00" * 64)
        return cls(**values, signature=identity.sign("partial", unsigned.signed_bytes()).hex())

    def verify(self, terms: Terms) -> None:
        """Whether the member at its point signed it; a SignatureError names it."""
        member = terms.member(self.point)
        verify(member.ed25519, "partial", self.signed_bytes(), self.signature, member.name)

    @classmethod
    def from_dict(cls, body: object) -> Self:
        taken = _take(body, cls, "a partial")
        _check(isinstance(taken["members"], list), "a partial's members", "must be a list")
        return cls(**{**taken, "members": tuple(taken["members"])})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls.from_dict(parse(data, cls.FORMAT, "a partial"))


@dataclass(frozen=True)
class Finding:
    """What a coalition's partials say, with everything that it rests on: the predicate of a certificate.

    `value` is Y = ⟨x, τ⟩ as a signed whole number in digits, `z` = Y/‖x‖; `threshold` the z* that applied, which is
    `agreed` (the policy's z*, or the one for `alpha`) raised by `failed` earlier queries. `wrong` lists points whose
    partials contradict the others. `reasons` are sentences: why this verdict, and what limits it. `known` are all
    earlier queries that any of the partials knows of.
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
    failed: int
    threshold: str
    known: Mapping[str, str]
    verdict: str
    reasons: tuple[str, ...]
    created: str

    def __post_init__(self) -> None:
        _check(_is_text(self.consortium, 100) and bool(self.consortium), "a finding's consortium", "must be a name")
        for name in ("members", "quorum", "failed"):
            _check(_is_count(getattr(self, name)), f"a finding's {name}", "must be a whole number")
        _check(self.verdict in VERDICTS, "a verdict", f"must be one of {', '.join(VERDICTS)}")
        _check(self.corroboration in CORROBORATION, "corroboration", f"must be one of {', '.join(CORROBORATION)}")
        for name in ("value", "z", "cosine", "log10_p", "log10_bound", "agreed", "threshold"):
            _check(_is_decimal(getattr(self, name)), f"a finding's {name}", "must be a decimal number as text")
        _check(_is_text(self.alpha, 100), "a finding's alpha", "must be a text")
        _check(all(_is_count(x, 1) for x in self.wrong), "a finding's wrong partials", "must be points")
        sound = isinstance(self.names, Mapping) and all(_is_text(v, 100) for pair in self.names.items() for v in pair)
        _check(sound, "a finding's names", "must map points to names")
        sound = isinstance(self.known, Mapping) and all(_is_hex(x, 32) and o in OUTCOMES for x, o in self.known.items())
        _check(sound, "a finding's known queries", "must map digests to passed, failed or open")
        _check(all(_is_text(text) for text in self.reasons), "a finding's reasons", "must be printable texts")
        _check(_is_time(self.created), "a finding's time", "must be in UTC like 2026-01-31T12:00:00Z")

    def as_dict(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return body | {
            "query": self.query.as_dict(),
            "partials": [partial.as_dict() for partial in self.partials],
            "names": dict(self.names),
            "wrong": list(self.wrong),
            "known": dict(self.known),
            "reasons": list(self.reasons),
        }

    @classmethod
    def from_dict(cls, body: object) -> Self:
        taken = _take(body, cls, "a certificate")
        for name in ("partials", "wrong", "reasons"):
            _check(isinstance(taken[name], list), f"a certificate's {name}", "must be a list")
        return cls(
            **{
                **taken,
                "query": Query.from_dict(taken["query"]),
                "partials": tuple(Partial.from_dict(entry) for entry in taken["partials"]),
                "wrong": tuple(taken["wrong"]),
                "reasons": tuple(taken["reasons"]),
            }
        )
