"""Codes in records, where people want sentences (docs/format.md, "Reasons").

A record that is signed or compared holds no sentence: one better word would change its digest. It holds a `Reason`, a
code with its values, and `quorumark.report.texts` makes the sentence when somebody reads it.

    Reason.of("finding.passed", z="21.4", threshold="6").as_dict()
        == {"code": "finding.passed", "z": "21.4", "threshold": "6"}

The codes and the values of each are closed: a reader refuses an unknown code, a missing value and one too many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self, TypeAlias

from quorumark.checks import is_count, is_decimal, is_text, require
from quorumark.errors import RecordError

__all__ = ["CODES", "Reason", "Value", "printable"]

Value: TypeAlias = int | str | tuple[int, ...] | tuple[str, ...]

LONGEST = 200
"""Characters of a text in a reason: names of tensors, files and members."""


def _each(rule: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(rule(one) for one in value)


def _is_short(value: object) -> bool:
    return is_text(value, LONGEST)


KINDS: Mapping[str, Callable[[object], bool]] = {
    "count": is_count,
    "decimal": is_decimal,
    "text": _is_short,
    "counts": _each(is_count),
    "texts": _each(_is_short),
}
"""What a value may be: an integer from 0, a decimal number, a printable string, or a list of the first or the last."""

_OPENED = {"name": "text"}
_READ = {"tensor": "text"}
_Z = {"z": "decimal", "threshold": "decimal"}
_SHOWN = {"claimed": "decimal", "predicted": "decimal", "tolerance": "decimal", "z": "decimal"}
_DATED = {"what": "text", "authority": "text", "when": "text", "until": "text"}
_EARLIER = {"query": "text", "answered": "text", "cosine": "decimal"}

CODES: Mapping[str, Mapping[str, str]] = {
    # how a suspect was read (`Query.matching`)
    "read.names-stripped": {"prefix": "text"},
    "read.names-added": {"prefix": "text"},
    "read.cast": {"tensors": "count", "layout": "text", "suspect": "text"},
    "read.dequantised-per-tensor": {"tensors": "count", "layout": "text", "suspect": "text"},
    "read.dequantised-per-row": {"tensors": "count", "layout": "text", "suspect": "text"},
    "read.carriers-missing": {"missing": "count", "carriers": "count", "some": "texts"},
    "read.carrier-ambiguous": {**_READ, "candidates": "count", "some": "texts"},
    "read.carrier-shape": {**_READ, "shape": "counts", "wanted": "counts"},
    "read.carrier-transposed": {**_READ, "shape": "counts", "wanted": "counts"},
    "read.factors-do-not-fit": {"down": "text", "up": "text"},
    "read.type-unknown": {**_READ, "type": "text"},
    "read.damaged": _READ,
    "read.no-scale": {**_READ, "type": "text"},
    "read.several-scales": {**_READ, "some": "texts"},
    "read.scale-shape": {**_READ, "helper": "text", "shape": "counts", "wanted": "counts"},
    "read.row-order": {**_READ, "helper": "text"},
    "read.scale-type": {**_READ, "helper": "text", "type": "text"},
    "read.zero-point-type": {**_READ, "helper": "text", "type": "text"},
    "read.extra-tensors": {"tensors": "count"},
    "read.not-finite": {**_READ, "numbers": "count"},
    "read.adapter": {},
    "read.adapter-of-rank": {"ranks": "counts"},
    "read.whole-model": {},
    "read.aligned": {"found": "count", "channels": "count", "moved": "count", "sweeps": "count"},
    "read.aligned-unsettled": {"found": "count", "channels": "count", "moved": "count", "sweeps": "count"},
    "read.like-the-anchor": {"groups": "count", "judged": "count", "weights": "count", "compared": "count"},
    "read.stream-turned": {},
    "read.signs": {"lines": "count", "tensors": "count"},
    "read.unmixed": {"blocks": "count"},
    "read.resized": {"tensors": "count"},
    "read.channels-left-over": {"surplus": "count", "channels": "count"},
    # why a suspect cannot be tested
    "untestable.empty": {},
    "untestable.coverage": {"covered": "count", "carriers": "count"},
    "untestable.no-layers": {"coordinates": "count", "budget": "count"},
    "untestable.narrow-blocks": {"broad": "count", "blocks": "count"},
    # why this verdict, and what limits it (`Finding.reasons`)
    "finding.passed": _Z,
    "finding.failed": _Z,
    "finding.coverage": {**_Z, "covered": "count", "carriers": "count"},
    "finding.left-out": {**_Z, "left_out": "count", "coordinates": "count"},
    "finding.charged": {**_Z, "uncharged": "decimal"},
    "finding.surplus": {**_Z, "surplus": "count"},
    "finding.doubtful": {**_Z, "weights": "count", "compared": "count"},
    "finding.unrelated": {"weights": "count", "compared": "count"},
    "finding.uncorroborated": {"partials": "count"},
    "finding.corroborated": {"partials": "count", "liars": "count"},
    "finding.corrected": {"partials": "count", "members": "texts", "liars": "count"},
    "finding.weights-missing": {"missing": "count", "carriers": "count"},
    "finding.alpha": {"alpha": "text"},
    "finding.layers-passed": {"q": "decimal", "threshold": "decimal", "blocks": "count"},
    "finding.layers-failed": {"q": "decimal", "threshold": "decimal", "blocks": "count"},
    "finding.far-below": {"z": "decimal"},
    "finding.next-align": {"threshold": "decimal"},
    "finding.next-layers": {"blocks": "count", "left": "count", "threshold": "decimal"},
    "finding.next-lora": {"threshold": "decimal"},
    "finding.next-names": {},
    "finding.raised": {"equations": "count", "charged": "decimal", "threshold": "decimal"},
    # what a member refuses to answer (the ledger's `refused`)
    "guard.manifest": {},
    "guard.vector": {},
    "guard.statistic": {"statistic": "text", "agreed": "text"},
    "guard.statistic-policy": {"statistic": "text"},
    "guard.forgotten-leaves": {"count": "count", "leaves": "counts"},
    "guard.unexplained-leaves": {"count": "count", "leaves": "counts"},
    "guard.leaf-not-zero": {"leaf": "count"},
    "guard.budget": {"budget": "count"},
    "guard.max-answers": {"answers": "count"},
    "guard.norms": {},
    "guard.narrow": {"effective": "count", "least": "count"},
    "guard.remainder": {"effective": "count", "least": "count"},
    "guard.adds-little": {"effective": "count", "least": "count", **_EARLIER},
    "guard.too-close": _EARLIER,
    "guard.no-layers": {},
    "guard.blocks": {},
    "guard.narrow-blocks": {"broad": "count", "blocks": "count"},
    "guard.passed-before": {},
    "guard.not-approved": {},
    "guard.per-day": {"allowed": "count", "answered": "count"},
    # what an audit shows (`AuditResult.reasons`)
    "audit.too-few-shares": {"opened": "count", "needed": "count"},
    "audit.not-one-key": {"members": "count"},
    "audit.not-signs": {"odd": "count", "entries": "count"},
    "audit.too-large": {"odd": "count", "entries": "count"},
    "audit.x-is-zero": {},
    "audit.by-layers": {},
    "audit.proof": {"z": "decimal", "proof": "decimal"},
    "audit.bound-too-weak": {"z": "decimal", "bound": "decimal", "enough": "decimal"},
    "audit.no-mark": {"z": "decimal"},
    "audit.below-proof": {"z": "decimal", "proof": "decimal"},
    "audit.bad-luck": {"z": "decimal", "proof": "decimal"},
    "audit.confirmed": _SHOWN,
    "audit.neither": _SHOWN,
    "audit.contradicted": _SHOWN,
    "audit.seed": {"source": "text"},
    "audit.some-members": {"opened": "count", "members": "count"},
    "audit.burnt-vouched": {"leaves": "count", "sources": "texts"},
    "audit.burnt-claimed": {"leaves": "count", "sources": "texts"},
    "audit.burnt-unexplained": {"leaves": "count"},
    "audit.dated": {"authority": "text", "when": "text"},
    "audit.older": {"when": "text", "appeared": "text"},
    "audit.not-older": {"when": "text", "appeared": "text"},
    "audit.no-roots": {"stamps": "count"},
    "audit.undated": {},
    # what is wrong with a file that an audit goes on without (`AuditResult.faults`)
    "fault.opening-malformed": {"number": "count", "files": "count"},
    "fault.opening-of-nobody": {"point": "count"},
    "fault.opening-signature": _OPENED,
    "fault.opening-of-another-challenge": _OPENED,
    "fault.opening-of-other-leaves": _OPENED,
    "fault.opening-lacks-archives": _OPENED,
    "fault.opening-leaf": {**_OPENED, "leaf": "count"},
    "fault.share-misfit": _OPENED,
    "fault.keys-misfit": {"members": "texts"},
    "fault.too-few-keys": {"opened": "count", "needed": "count"},
    "fault.archive-unusable": {"file": "text"},
    "fault.archive-of-nobody": {"file": "text"},
    "fault.archive-closed": {"point": "count"},
    "fault.archive-leaf": {"point": "count", "leaf": "count"},
    # what the check of a certificate has checked, and what it could not
    "check.manifest": {"members": "count", "consortium": "text"},
    "check.signatures": {"members": "texts"},
    "check.partials": {"partials": "count"},
    "check.audits": {"audits": "count"},
    "check.unexplained": {"leaves": "count"},
    "check.suspect": {},
    "check.form": {},
    "check.no-proof": {"audits": "count", "threshold": "decimal"},
    "check.no-suspect": {},
    "check.no-reference": {},
    "check.no-groups": {},
    "check.no-factors": {},
    "check.no-base": {},
    "check.dated": _DATED,
    "check.renewed": {"what": "text", "authorities": "texts"},
    "check.stamp-untrusted": {"what": "text", "authority": "text"},
    "check.stamp-expired": {"what": "text", "authority": "text", "expired": "text"},
    "check.no-roots": {"what": "text", "stamps": "count"},
    "check.undated": {"what": "text"},
    # why a time stamp is refused
    "stamp.too-large": {"bytes": "count", "most": "count"},
    "stamp.malformed": {},
    "stamp.unsorted": {},
    "stamp.refused": {"status": "count"},
    "stamp.hash": {},
    "stamp.other-bytes": {},
    "stamp.nonce": {},
    "stamp.no-certificate": {},
    "stamp.purpose": {"authority": "text"},
    "stamp.signer": {"authority": "text"},
    "stamp.untrusted": {"authority": "text"},
    "stamp.not-valid-then": {"authority": "text", "time": "text"},
    "stamp.signature": {},
    "stamp.future": {"authority": "text", "time": "text"},
    "stamp.expired": {"authority": "text", "expired": "text"},
    "stamp.renewed-late": {"expired": "text", "renewed": "text"},
    "stamp.renewed-early": {"time": "text", "renewed": "text"},
    "stamp.twice": {},
}
"""Every code, with the name and kind of each of its values. The part before the dot says where it belongs."""


@dataclass(frozen=True)
class Reason:
    """A code and its values, as `CODES` lists them."""

    code: str
    values: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = CODES.get(self.code) if isinstance(self.code, str) else None
        if kinds is None:
            raise RecordError(f"a reason's code must be one that this release knows, not {str(self.code)[:80]!r}")
        what = f"the reason {self.code!r}"
        require(self.values.keys() == kinds.keys(), what, f"must have the values {', '.join(kinds) or 'none'}")
        for name, kind in kinds.items():
            require(KINDS[kind](self.values[name]), f"{what}: its {name}", f"must be of the kind {kind}")
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    @classmethod
    def of(cls, code: str, /, **values: Value) -> Self:
        return cls(code, values)

    @property
    def family(self) -> str:
        """Where it belongs: the part before the dot."""
        return self.code.partition(".")[0]

    def as_dict(self) -> dict[str, Any]:
        body = {name: list(value) if isinstance(value, tuple) else value for name, value in self.values.items()}
        return {"code": self.code, **body}

    @classmethod
    def from_dict(cls, body: object) -> Self:
        if not isinstance(body, Mapping) or "code" not in body:
            raise RecordError("a reason must be a JSON object with a code")
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in body.items() if name != "code"}
        return cls(body["code"], values)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, dict(self.values))


def printable(name: str) -> str:
    """A name from anywhere as a reason may hold it: strange characters escaped, and cut where it is long."""
    text = name if name.isprintable() else name.encode("unicode_escape").decode()
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
