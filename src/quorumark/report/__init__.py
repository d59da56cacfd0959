"""Pages for people: a certificate as one HTML file that a judge, a regulator or a colleague can read and print.

The page needs nothing else: no script, no font, no picture, no network. It shows what the finding says and computes
nothing about the model; names of members and files come from others and are escaped.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from typing import TYPE_CHECKING, Any

from quorumark.consortium.records import Manifest, Member
from quorumark.errors import RecordError
from quorumark.files import write_shared
from quorumark.reasons import Reason
from quorumark.report.plot import draw
from quorumark.report.texts import PHRASES, about_charges, about_left_out, sentences
from quorumark.stamps.record import Dated
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Finding

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["certificate_page", "write_page"]

_WIDE, _NARROW = 720, 340  # the picture is drawn twice, so that its letters are readable on a phone too


def certificate_page(
    certificate: Certificate | Finding,
    manifest: Manifest,
    *,
    signers: Sequence[Member],
    checked: Sequence[Reason],
    left: Sequence[Reason] = (),
    audit: Mapping[str, str] | None = None,
    dates: Sequence[Dated] = (),
    command: str | None = None,
) -> str:
    """A certificate, or a finding that nobody has signed yet, as one HTML page.

    signers: the members whose signatures hold (`Certificate.signers`).
    checked, left: what was checked before the page was made, and what could not be (`check_certificate`); the page
        says so if nothing was.
    audit: what a spot audit showed, as label → text.
    dates: what time stamps show, where they were checked (`verify.dates`).
    command: how to check it again; by default `quorumark verify check` with the names that are known here.
    """
    finding = certificate.finding if isinstance(certificate, Certificate) else certificate
    if finding.query.manifest != manifest.digest().hex():
        raise RecordError("this certificate was made under another manifest than the one it is shown with")
    answered = _answers(finding, manifest, signers)
    agreeing = [row for row in answered if not row["wrong"]]
    z, threshold = _shown(finding.z, finding.threshold)
    labels = (f"threshold z* = {_minus(threshold)}", f"this model: z = {_minus(z)}")
    known = len(agreeing) >= finding.quorum  # fewer give no number that could be drawn
    numbers = (float(finding.z), float(finding.threshold), labels)
    return (
        environment()
        .get_template("certificate.html")
        .render(
            finding=finding,
            query=finding.query,
            terms=manifest.terms,
            manifest=manifest,
            digest=certificate.digest() if isinstance(certificate, Certificate) else None,
            signers=sorted(signers, key=lambda member: member.point),
            witnesses=[m for m in signers if m.point not in {row["point"] for row in answered}],
            answered=answered,
            agreeing=len(agreeing),
            liars=len(agreeing) - finding.quorum + 1,
            masked=any(partial.members for partial in finding.partials),
            z=z,
            threshold=threshold,
            plots=[draw("wide", *numbers, _WIDE), draw("narrow", *numbers, _NARROW)] if known else [],
            left_out=about_left_out(finding.query, manifest.terms, finding.audits),
            reasons=sentences(finding.reasons) + about_charges(finding),
            matching=sentences(finding.query.matching),
            checked=[*sentences(checked), *(PHRASES["not-checked"].format(what=text) for text in sentences(left))],
            audit=audit,
            dates=dates,
            command=command or _command(finding),
        )
    )


def write_page(path: str | os.PathLike[str], html: str) -> None:
    """A page as a file that others may read."""
    write_shared(path, html.encode())


def _answers(finding: Finding, manifest: Manifest, signers: Sequence[Member]) -> list[dict[str, Any]]:
    signed = {member.point for member in signers}
    return [
        {
            "point": partial.point,
            "name": manifest.terms.member(partial.point).name,
            "created": partial.created,
            "wrong": partial.point in finding.wrong,
            "signed": partial.point in signed,
        }
        for partial in sorted(finding.partials, key=lambda partial: partial.point)
    ]


def _shown(z: str, threshold: str) -> tuple[str, str]:
    """Both with two decimals, or as many as it takes for the eye to see which one is larger."""
    pair = Decimal(z), Decimal(threshold)
    for digits in range(2, 19):
        short = [number.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_EVEN) for number in pair]
        if (short[0] >= short[1]) == (pair[0] >= pair[1]) and (short[0] == short[1]) == (pair[0] == pair[1]):
            break
    return f"{short[0]:f}", f"{short[1]:f}"


def _command(finding: Finding) -> str:
    files = [shlex.quote(file.name) for file in finding.query.files]
    return " ".join(
        ["quorumark verify check certificate.json --manifest manifest.json --suspect", *(files or ["MODEL"])]
    )


def environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("quorumark.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "exponent": _exponent,
        "group": _group,
        "minus": _minus,
        "names": _names,
        "when": _when,
    }
    return environment


def _minus(text: object) -> str:
    return str(text).replace("-", "−")


def _group(number: object) -> str:
    """Thousands apart."""
    return _minus(f"{int(str(number)):,}")


def _exponent(text: str) -> str:
    """A logarithm, thousands apart: it can have six digits."""
    return _minus(f"{Decimal(text):,}")


def _when(time: str) -> str:
    return time.replace("T", " ").replace("Z", " UTC")


def _names(names: Sequence[str]) -> str:
    """Avon, Birch and Cedar."""
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), *names[-1:]])
