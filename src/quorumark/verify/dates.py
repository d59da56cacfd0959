"""What time stamps say about a certificate, about manifests, and about an audit's key (docs/dates.md).

The bytes that are dated: of a manifest, its canonical bytes with all signatures, which are the file; of a certificate,
the envelope as `Certificate.to_bytes` writes it, with the signatures that it has. So stamps come after signatures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quorumark.canonical import read_json
from quorumark.consortium.home import read_as, read_file
from quorumark.consortium.records import Manifest
from quorumark.errors import InputError, RecordError, StampError
from quorumark.reasons import Reason
from quorumark.stamps.record import Dated, Stamps, stamps_name
from quorumark.stamps.tokens import time_text
from quorumark.verify.certificate import Certificate

if TYPE_CHECKING:
    from cryptography import x509

__all__ = [
    "Dates",
    "Found",
    "about_age",
    "check_stamps",
    "dates_of",
    "find_stamps",
    "kind_of",
    "read_appeared",
    "read_dated",
]

_TOLERATED = {"stamp.untrusted": "check.stamp-untrusted", "stamp.expired": "check.stamp-expired"}


def kind_of(record: Manifest | Certificate) -> str:
    return "certificate" if isinstance(record, Certificate) else "manifest"


def read_dated(path: Path) -> Manifest | Certificate:
    """A manifest or a signed certificate, from its file: what can be stamped."""
    body = read_json(read_file(path, "a manifest or a certificate"), "a manifest or a certificate")
    if not isinstance(body, dict) or "payload" not in body:
        return read_as(path, "a consortium's manifest", Manifest.from_bytes)
    certificate = read_as(path, "a certificate", Certificate.from_bytes)
    if not certificate.signatures:
        raise RecordError(f"nobody has signed {str(path)!r} yet: a stamp dates signatures too, so sign first")
    return certificate


@dataclass(frozen=True)
class Found:
    """The stamps of one record, as they lie beside it: none (`stamps` has no chains), or some."""

    record: Manifest | Certificate
    stamps: Stamps

    @property
    def message(self) -> bytes:
        return self.record.to_bytes()

    def held(self, roots: Sequence[x509.Certificate], at: datetime | None = None) -> tuple[list[Dated], list[Reason]]:
        """What its chains show, and those whose authority the reader does not know or whose certificates ended.

        One of those is an error only where nothing else dates the record: who stamps with two authorities does so
        because a reader may know only one. Anything else that is wrong with a stamp is an error at once.
        """
        dated: list[Dated] = []
        passed: list[StampError] = []
        for number in range(len(self.stamps.chains)):
            try:
                dated.append(self.stamps.check(number, self.message, roots, at))
            except StampError as error:
                if error.code not in _TOLERATED:
                    raise
                passed.append(error)
        if passed and not dated:
            raise passed[0]
        left = [
            Reason.of(_TOLERATED[error.code], what=self.stamps.kind, **dict(error.reason.values)) for error in passed
        ]
        return sorted(dated, key=lambda one: one.latest), left


def find_stamps(record: Manifest | Certificate, folders: Sequence[Path]) -> Found:
    """The stamps of a record: in the first of these folders that has some. A file is known by what it dates."""
    message = record.to_bytes()
    empty = Stamps.of(kind_of(record), message)
    for folder in folders:
        path = folder / stamps_name(message)
        if not path.exists():
            continue
        stamps = read_as(path, "a file of stamps", Stamps.from_bytes)
        if (stamps.kind, stamps.sha512) != (empty.kind, empty.sha512):
            raise RecordError(f"{str(path)!r} holds the stamps of something else")
        return Found(record, stamps)
    return Found(record, empty)


def _folders(manifest: Path) -> list[Path]:
    """Where the stamps of a chain of manifests may be: beside the manifest, and beside those before it."""
    here = manifest.parent
    return (
        [here, here.parent] if Path(os.path.realpath(manifest)).parent.name == "history" else [here, here / "history"]
    )


class Dates(NamedTuple):
    """The dates that hold; what was checked of them, and what could not be; and of what there is no date at all."""

    dates: list[Dated]
    checked: list[Reason]
    left: list[Reason]
    undated: list[Reason]


def check_stamps(
    certificate: Certificate,
    path: Path,
    chain: Sequence[Manifest],
    manifest: Path,
    roots: Sequence[x509.Certificate],
    at: datetime | None = None,
) -> Dates:
    """The dates of a certificate and of the manifest that it was made under.

    `path`, `manifest`: their files, beside which the stamps are. Without roots nothing is checked, which is said.
    """
    dates: list[Dated] = []
    checked: list[Reason] = []
    left: list[Reason] = []
    undated: list[Reason] = []
    for found in (find_stamps(chain[-1], _folders(manifest)), find_stamps(certificate, [path.parent])):
        what = found.stamps.kind
        if not found.stamps.chains:
            undated.append(Reason.of("check.undated", what=what))
        elif not roots:
            left.append(Reason.of("check.no-roots", what=what, stamps=len(found.stamps.chains)))
        else:
            dated, passed = found.held(roots, at)
            dates += dated
            left += passed
            checked += [reason for one in dated for reason in dates_of(one)]
    return Dates(dates, checked, left, undated)


def dates_of(dated: Dated) -> Iterator[Reason]:
    """What was checked, in codes."""
    values = {"what": dated.what, "authority": dated.authority, "when": dated.when, "until": dated.until}
    yield Reason.of("check.dated", **values)
    if dated.renewals:
        yield Reason.of("check.renewed", what=dated.what, authorities=dated.renewals)


# --- audits -------------------------------------------------------------------------------------------------


def read_appeared(text: str) -> datetime:
    """When the suspect first appeared: a day (its beginning, in UTC) or a time as records write it."""
    full = f"{text}T00:00:00Z" if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) else text
    try:
        return datetime.strptime(full, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise InputError("--appeared", "must be like 2026-01-31 or 2026-01-31T12:00:00Z", repr(text[:80])) from None


def about_age(
    chain: Sequence[Manifest],
    manifest: Path,
    roots: Sequence[x509.Certificate],
    appeared: datetime | None = None,
    at: datetime | None = None,
) -> tuple[list[Dated], list[Reason]]:
    """Whether the key is older than the suspect, for an audit: what stamps show, or what must be believed.

    Every manifest with the same genesis fixes the same key: the roots of the shares, the anchor, the statistic, and by
    them the whitening. So the earliest stamp of any of those counts.
    """
    same = [one for one in chain if one.genesis == chain[-1].genesis]
    found = [one for one in (find_stamps(m, _folders(manifest)) for m in same) if one.stamps.chains]
    if not found:
        return [], [Reason.of("audit.undated")]
    if not roots:
        return [], [Reason.of("audit.no-roots", stamps=sum(len(one.stamps.chains) for one in found))]
    dates, left = [], []
    for one in found:
        dated, passed = one.held(roots, at)
        dates += dated
        left += passed
    dates.sort(key=lambda one: one.latest)
    first = dates[0]
    reasons = [Reason.of("audit.dated", authority=first.authority, when=first.when)]
    if appeared is not None:
        code = "audit.older" if first.latest < appeared else "audit.not-older"
        reasons.append(Reason.of(code, when=first.when, appeared=time_text(appeared)))
    return dates, [*reasons, *left]
