"""Sentences are for people: rewording all of them changes no record, no verdict and no answer."""

from __future__ import annotations

import json
import shutil
import string
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quorumark.cli import app
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.errors import GuardError
from quorumark.reasons import CODES, KINDS, Reason, Value
from quorumark.report import certificate_page, texts
from quorumark.verify.answer import answer, answer_with
from quorumark.verify.audit import check_audit
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import challenge
from quorumark.verify.check import check_certificate, sign
from quorumark.verify.combine import combine
from quorumark.verify.ledger import Ledger
from quorumark.verify.opening import open_leaves
from quorumark.verify.proof import Audit, explain
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference
from tests.kit.consortium import NAMES, make_world

EXAMPLES: dict[str, Value] = {
    "count": 7, "decimal": "1.500000", "text": "name", "counts": (3, 4), "texts": ("a", "b"),
}  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_sentence_that_uses_its_values(code: str) -> None:
    kinds = CODES[code]
    named = {field for _, field, _, _ in string.Formatter().parse(texts.SENTENCES[code]) if field}
    assert named <= kinds.keys()
    reason = Reason.of(code, **{name: EXAMPLES[kind] for name, kind in kinds.items()})
    text = texts.sentence(reason)
    assert text
    assert "{" not in text
    assert Reason.from_dict(json.loads(json.dumps(reason.as_dict()))) == reason


def test_the_tables_have_no_other_entries() -> None:
    assert texts.SENTENCES.keys() == CODES.keys()
    assert EXAMPLES.keys() == KINDS.keys()


def test_the_page_about_formats_lists_every_code(root: Path) -> None:
    page = (root / "docs/format.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `") and line[3:].partition("`")[0] in CODES]
    expected = [
        f"| `{code}` | {', '.join(f'{name} ({kind})' for name, kind in kinds.items()) or '–'} |"
        for code, kinds in CODES.items()
    ]
    assert rows == expected


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A consortium that has answered nothing yet, and a suspect about which there is something to say."""
    world = make_world(tmp_path_factory.mktemp("world"))
    model = {f"module.{name}": w.astype(np.float16) for name, w in world.marked.items()}
    model["module.conv.weight"][0, 0, 0, :2] = np.nan
    world.save({**model, "module.extra": np.zeros(3, np.float32)}, "suspect.safetensors")
    return world.folder


def all_of_it(folder: Path) -> tuple[dict[str, Any], str]:
    """From the question to the audit: what records, verdicts and answers there are, and what people read of them."""
    members = [(HomeFolder(folder / name), Unlock.key_file(folder / f"{name}.key")) for name in NAMES[:5]]
    suspect, reference = folder / "suspect.safetensors", Reference.read(folder / "consortium.json")
    manifest = reference.manifest
    query = prepare(reference, suspect).query
    with pytest.raises(GuardError) as refused:
        answer(*members[0], reference, suspect, query)
    partials = [answer(*member, reference, suspect, query, approved=True) for member in members]
    home, unlock = members[3]
    partials[3] = answer_with(home.identity(unlock), manifest, query, 5, (), {}, partials[3].ledger)  # a liar
    finding = combine(manifest, query, partials)
    certificate = Certificate.of(finding)
    for member in (*members[:3], members[4]):
        certificate = sign(*member, certificate)
    read = Certificate.from_bytes(certificate.to_bytes())
    checked, left = check_certificate(read, reference.chain, suspect=suspect, reference=reference)
    _, without = check_certificate(read, reference.chain)
    # the audit; one opening is cut, so that there is a fault
    asked = challenge(query, manifest, finding.z, bytes(range(32)))
    ledgers = [Ledger.open(member[0].only_consortium(), manifest) for member in members]
    openings = [
        open_leaves(home, home.only_consortium(), unlock, asked, query, answered=True, burns=ledger)
        for (home, unlock), ledger in zip(members, ledgers, strict=True)
    ]
    x = prepare(reference, suspect).form.x
    audited = check_audit(asked, query, x, reference.chain, [openings[0][:-100], *openings[1:]])
    proof = Audit.of(certificate, asked, openings, reference.chain)
    opened = explain(reference.chain, [proof])
    burnt = {leaf for leaves in opened.values() for leaf in leaves}
    later = prepare(reference, suspect, burnt=burnt).query
    page = certificate_page(read, manifest, signers=read.signers(manifest), checked=checked, left=without)
    later_page = certificate_page(
        replace(finding, query=later, audits=opened, charged="7.000000"), manifest, signers=(), checked=()
    )
    said = CliRunner().invoke(app, ["verify", "ledger", "--home", str(members[0][0].path)]).output
    said += "\n".join(texts.sentences((*audited.reasons, *audited.faults)))
    records = {
        "query": query.to_bytes(),
        "partials": [partial.to_bytes() for partial in partials],
        "certificate": certificate.to_bytes(),
        "digests": [query.digest(), certificate.digest(), manifest.digest(), asked.digest(), proof.name],
        "verdicts": [finding.verdict, audited.verdict, refused.value.reason],
        "checked": (checked, left, without),
        "audit": audited.as_dict(),
        "proof": proof.to_bytes(),
        "later": later.to_bytes(),
        "ledgers": [member[0].only_consortium().ledger_path.read_bytes() for member in members],
        "heads": [ledger.head for ledger in ledgers],
    }
    return records, page + later_page + said


def test_rewording_every_sentence_changes_no_record_and_every_text(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = time.gmtime()
    monkeypatch.setattr(time, "gmtime", lambda *_: moment)  # every record of both runs is of the same second
    shutil.copytree(before, tmp_path / "plain")
    shutil.copytree(before, tmp_path / "reworded")
    plain, said = all_of_it(tmp_path / "plain")
    assert plain["verdicts"][:2] == ["PASSED", "PASSED"]
    for table in (texts.SENTENCES, texts.PHRASES):
        for name in table:
            monkeypatch.setitem(table, name, f"REWORDED {name}")
    reworded, other = all_of_it(tmp_path / "reworded")
    assert reworded == plain
    used = {code for code in (*CODES, *texts.PHRASES) if f"REWORDED {code}" in other}
    # the texts did change, so that a sentence in a record would have been seen
    assert "REWORDED" not in said
    assert used >= {
        "read.names-stripped", "read.cast", "read.extra-tensors", "read.not-finite", "finding.passed",
        "finding.corrected", "guard.not-approved", "check.manifest", "check.form", "audit.proof",
        "audit.confirmed", "audit.seed", "fault.opening-malformed", "left-out", "audit-opened", "charges",
        "not-checked",
    }  # fmt: skip


def test_a_sentence_in_a_record_would_be_seen(before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comparison fails as soon as a reason holds its own sentence."""
    moment = time.gmtime()
    monkeypatch.setattr(time, "gmtime", lambda *_: moment)
    reference = Reference.read(before / "consortium.json")
    found = []
    for wording in ("stored as {suspect}, not {layout}: {tensors}", "{tensors} tensors were cast"):
        monkeypatch.setitem(texts.SENTENCES, "read.cast", wording)
        query = prepare(reference, before / "suspect.safetensors").query
        with monkeypatch.context() as patched:
            found.append(query.digest())
            patched.setattr(Reason, "as_dict", lambda self: {"code": texts.sentence(self)})
            found.append(query.digest())
    assert found[0] == found[2]
    assert found[1] != found[3]
