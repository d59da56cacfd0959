"""What tests of certificates and reports share: a consortium with fixed keys, and findings that hang together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Genesis, Manifest
from quorumark.field import P
from quorumark.model.suspect import SuspectFile
from quorumark.reasons import Reason
from quorumark.verify.evidence import Finding, Partial, Query
from quorumark.verify.null import cosine_text, log10_bound, log10_p, raised_threshold, z_text
from tests.kit.ceremony import NAMES, make_terms

NORM2 = 10**12


def label(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def consortium(
    members: int, threshold: int, *, names: Sequence[str] = NAMES, title: str = "hospitals"
) -> tuple[list[Identity], Manifest]:
    """The same people in every run, and a manifest that all of them signed."""
    names = [names[i] if i < len(names) else f"member {i + 1}" for i in range(members)]
    people = [
        Identity.from_secret_bytes(name, hashlib.sha512(f"{i} {name}".encode()).digest())
        for i, name in enumerate(names)
    ]
    terms = make_terms(people, threshold, 2_560_000, name=title)
    roots = tuple(label(f"root {x}") for x in range(members))
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, label("session"), roots)
    manifest = Manifest(terms, genesis, roots)
    for point, person in enumerate(people, 1):
        manifest = manifest.with_signature(point, person.sign("manifest", manifest.sign_bytes()))
    return people, manifest


def make_query(manifest: Manifest, **changes: Any) -> Query:
    values: dict[str, Any] = {
        "manifest": manifest.digest().hex(),
        "epoch": manifest.epoch,
        "statistic": manifest.terms.statistic,
        "alignment": "none",
        "suspect": label("suspect"),
        "files": (SuspectFile("model.safetensors", label("model.safetensors"), 10_240_688),),
        "x": label("x"),
        "coordinates": manifest.terms.coordinates,
        "carriers": manifest.terms.coordinates,
        "covered": manifest.terms.coordinates,
        "norm1": 10**9,
        "norm2": NORM2,
        "norm4": 10**18,
        "burnt": (),
        "burnt_norm2": 0,
        "matching": (),
        "created": "2026-03-01T08:00:00Z",
    }
    return Query(**{**values, **changes})


def make_finding(
    people: Sequence[Identity],
    manifest: Manifest,
    z: float,
    answered: Sequence[int],
    *,
    wrong: Sequence[int] = (),
    failed: int = 0,
    query: Query | None = None,
    **changes: Any,
) -> Finding:
    """What these points find out about a model at z; those in `wrong` answer with something else."""
    query = query or make_query(manifest)
    terms = manifest.terms
    value = round(z * 10**6)
    known = {label(f"earlier {i}"): "failed" for i in range(failed)}
    partials = []
    for x in answered:
        answer = value + sum((7**k) * x**k for k in range(1, terms.threshold)) + (x in wrong)
        partial = Partial.sign(
            people[x - 1],
            manifest=query.manifest,
            epoch=query.epoch,
            point=x,
            query=query.digest(),
            suspect=query.suspect,
            x=query.x,
            answer=str(answer % P),
            members=(),
            history=known,
            blocks={},
            ledger=label(f"ledger {x}"),
            created=f"2026-03-01T09:{x:02d}:00Z",
        )
        partials.append(partial)
    corroboration = "corrected" if wrong else "corroborated" if len(answered) > terms.threshold else "uncorroborated"
    text = z_text(value, query.norm2)
    threshold = raised_threshold("6", failed)
    passed = float(text) >= float(threshold)
    values: dict[str, Any] = {
        "consortium": terms.name,
        "members": terms.members,
        "quorum": terms.threshold,
        "query": query,
        "partials": tuple(partials),
        "names": {str(x): terms.member(x).name for x in answered},
        "corroboration": corroboration,
        "wrong": tuple(wrong),
        "value": str(value),
        "z": text,
        "cosine": cosine_text(value, query.norm2, terms.coordinates),
        "log10_p": log10_p(text),
        "log10_bound": log10_bound(text),
        "agreed": "6",
        "alpha": "",
        "audits": {},
        "log10_choices": "0.00",
        "charged": "6",
        "equations": failed,
        "threshold": threshold,
        "known": known,
        "blocks": {},
        "layers": None,
        "opened": None,
        "verdict": "PASSED" if passed else "FAILED",
        "reasons": (Reason.of(f"finding.{'passed' if passed else 'failed'}", z=text, threshold=threshold),),
        "created": "2026-03-01T10:00:00Z",
    }
    return Finding(**{**values, **changes})
