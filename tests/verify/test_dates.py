"""What time stamps say in `verify check` and in an audit: with them, without them, and with the wrong ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quorumark.cli import app
from quorumark.consortium.home import read_as
from quorumark.errors import InputError, RecordError, StampError
from quorumark.files import write_shared
from quorumark.reasons import Reason
from quorumark.report.texts import sentences
from quorumark.stamps.record import Stamps, stamps_path
from quorumark.stamps.tokens import ask, read_roots, time_text
from quorumark.verify.audit import check_audit
from quorumark.verify.dates import about_age, check_stamps, read_appeared, read_dated
from quorumark.verify.query import prepare
from tests.kit.audits import Audited, audit
from tests.kit.authority import NOW, Authority, make_authority
from tests.kit.consortium import World, make_world

DAY = timedelta(days=1)


@dataclass
class Case:
    """An audited certificate on disk, and two authorities."""

    world: World
    audited: Audited
    folder: Path
    avon: Authority
    birch: Authority

    @property
    def manifest(self) -> Path:
        return self.folder / "consortium.json"

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.json"

    def stamp(self, file: Path, authority: Authority, days: int = 0) -> Path:
        """A stamp of so many days ago, kept beside the file."""
        record = read_dated(file)
        path = stamps_path(file, record.to_bytes())
        kind = "manifest" if file == self.manifest else "certificate"
        stamps = read_as(path, "", Stamps.from_bytes) if path.exists() else Stamps.of(kind, record.to_bytes())
        response = authority.answer(ask(record.to_bytes()), at=NOW - days * DAY)
        write_shared(path, stamps.with_response(len(stamps.chains), response).to_bytes())
        return path

    def check(self, *words: Any, code: int = 0) -> dict[str, Any]:
        command = ["verify", "check", self.certificate, "--manifest", self.manifest, "--json", *words]
        return self._run(command, code)

    def audit(self, *words: Any, code: int = 0) -> dict[str, Any]:
        openings = [self.folder / f"opening-{point}.json" for point in self.audited.openings]
        command = [
            "verify", "audit", "check", self.folder / "challenge.json", *openings, "--certificate", self.certificate,
            "--suspect", self.world.suspect, "--manifest", self.manifest, "--json", *words,
        ]  # fmt: skip
        return self._run(command, code)

    @staticmethod
    def _run(command: list[Any], code: int) -> dict[str, Any]:
        done = CliRunner().invoke(app, list(map(str, command)))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        body: dict[str, Any] = json.loads(done.output)
        return body


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("dates")
    world = make_world(folder, members=3, threshold=2, rho=0.6)
    audited = audit(world, world.suspect, (1, 2, 3))
    write_shared(folder / "certificate.json", audited.certificate.to_bytes())
    write_shared(folder / "challenge.json", audited.challenge.to_bytes())
    for point, opening in audited.openings.items():
        write_shared(folder / f"opening-{point}.json", opening)
    return Case(
        world,
        audited,
        folder,
        make_authority(folder / "avon-tsa"),
        make_authority(folder / "birch-tsa", "Birch Stamps"),
    )


@pytest.fixture
def case(made: Case, tmp_path: Path) -> Case:
    """The same with no stamps yet."""
    for name in ("consortium.json", "certificate.json", "challenge.json", "layout.json", "anchor.safetensors"):
        shutil.copyfile(made.folder / name, tmp_path / name)
    for path in made.folder.glob("opening-*.json"):
        shutil.copyfile(path, tmp_path / path.name)
    return replace(made, folder=tmp_path)


def codes(reasons: list[dict[str, Any]], *families: str) -> list[str]:
    found = [reason["code"] for reason in reasons]
    return [code for code in found if not families or code.startswith(families)]


# --- verify check -------------------------------------------------------------------------------------------


def test_check_says_that_nothing_is_dated(case: Case) -> None:
    body = case.check()
    assert body["dates"] == []
    assert [reason["what"] for reason in body["undated"]] == ["manifest", "certificate"]


def test_check_says_what_was_dated_by_whom_and_when(case: Case, tmp_path: Path) -> None:
    case.stamp(case.manifest, case.avon, 90)
    case.stamp(case.certificate, case.birch, 3)
    roots = ["--tsa-roots", case.avon.root, "--tsa-roots", case.birch.root]
    report = tmp_path / "report.html"
    body = case.check(*roots, "--report", report)
    said = [(one["what"], one["authority"], one["existed_by"]) for one in body["dates"]]
    assert said == [
        ("manifest", "Avon Stamps", time_text(NOW - 90 * DAY + timedelta(seconds=1))),
        ("certificate", "Birch Stamps", time_text(NOW - 3 * DAY + timedelta(seconds=1))),
    ]
    assert codes(body["checked"], "check.dated") == ["check.dated"] * 2
    assert body["undated"] == []
    assert not codes(body["not_checked"], "check.no-roots", "check.stamp")
    page = report.read_text()
    assert "<h2>Dates</h2>" in page
    assert "Avon Stamps" in page
    assert time_text(NOW - 90 * DAY + timedelta(seconds=1)) in page
    assert "no clock outside vouches for them" not in page
    case.check("--report", report)
    assert "<h2>Dates</h2>" not in report.read_text()  # what was not checked is not shown as a date
    assert "no clock outside vouches for them" in report.read_text()


def test_check_without_roots_says_that_stamps_were_not_checked(case: Case) -> None:
    case.stamp(case.manifest, case.avon)
    body = case.check()
    assert body["dates"] == []
    assert codes(body["not_checked"], "check.no-roots") == ["check.no-roots"]
    assert [reason["what"] for reason in body["undated"]] == ["certificate"]


def test_a_reader_who_knows_one_of_two_authorities_is_content(case: Case) -> None:
    case.stamp(case.manifest, case.avon)
    case.stamp(case.manifest, case.birch)
    body = case.check("--tsa-roots", case.birch.root)
    assert [one["authority"] for one in body["dates"]] == ["Birch Stamps"]
    assert codes(body["not_checked"], "check.stamp") == ["check.stamp-untrusted"]


def test_stamps_that_do_not_hold_are_errors(case: Case, tmp_path: Path) -> None:
    kept = case.stamp(case.manifest, case.avon)
    with pytest.raises(StampError) as caught:
        case.check("--tsa-roots", case.birch.root)
    assert caught.value.code == "stamp.untrusted"
    # a good stamp, of the certificate, put in the manifest's file
    stamps = read_as(kept, "", Stamps.from_bytes)
    other = read_as(case.stamp(case.certificate, case.avon), "", Stamps.from_bytes)
    write_shared(kept, replace(stamps, chains=(*stamps.chains, *other.chains)).to_bytes())
    with pytest.raises(StampError) as caught:
        case.check("--tsa-roots", case.avon.root)
    assert caught.value.code == "stamp.other-bytes"
    old = make_authority(tmp_path / "old", "Old Stamps", begin=NOW - 900 * DAY, end=NOW - 100 * DAY)
    kept.unlink()
    case.stamp(case.manifest, old, 500)
    with pytest.raises(StampError) as caught:
        case.check("--tsa-roots", old.root)
    assert caught.value.code == "stamp.expired"
    case.stamp(case.manifest, case.avon)  # another authority dates it as well
    body = case.check("--tsa-roots", old.root, "--tsa-roots", case.avon.root)
    assert codes(body["not_checked"], "check.stamp") == ["check.stamp-expired"]
    kept.write_bytes(kept.read_bytes()[:-9])
    with pytest.raises(RecordError):
        case.check("--tsa-roots", case.avon.root)


def test_stamps_of_a_manifest_in_the_history_are_found(case: Case, tmp_path: Path) -> None:
    """A manifest moves to history/ when another follows it; its stamps are known by what they date."""
    case.stamp(case.manifest, case.avon)
    history = tmp_path / "history"
    history.mkdir()
    moved = history / f"{case.world.manifest.digest().hex()[:16]}.json"
    shutil.move(case.manifest, moved)
    chain = case.world.reference.chain
    roots = read_roots([case.avon.root])
    for manifest in (moved, case.manifest):  # named itself, or as one of a chain that ends beside the folder
        dates = check_stamps(case.audited.certificate, case.certificate, chain, manifest, roots).dates
        assert [one.what for one in dates] == ["manifest"]
    for path in tmp_path.glob("stamps-*.json"):
        shutil.move(path, history / path.name)
    dates, _ = about_age(chain, case.manifest, roots)
    assert [one.authority for one in dates] == ["Avon Stamps"]


# --- the audit ----------------------------------------------------------------------------------------------


def test_the_audit_of_an_unstamped_manifest_says_what_must_be_believed(case: Case) -> None:
    body = case.audit("--appeared", "2020-01-01")
    assert body["verdict"] == "PASSED"
    assert codes(body["reasons"], "audit.undated", "audit.dated", "audit.older") == ["audit.undated"]
    assert any("must be believed" in text for text in body["texts"])


def test_the_audit_says_that_the_key_is_older_than_the_suspect_without_a_members_clock(case: Case) -> None:
    """Stamped ninety days ago, a suspect that appeared ten days ago; and one that was there before."""
    case.stamp(case.manifest, case.avon, 30)
    case.stamp(case.manifest, case.birch, 90)
    roots = ["--tsa-roots", case.avon.root, "--tsa-roots", case.birch.root]
    day = (NOW - 10 * DAY).strftime("%Y-%m-%d")
    body = case.audit(*roots, "--appeared", day, "--report", case.folder / "report.html")
    assert codes(body["reasons"], "audit.dated", "audit.older", "audit.not-older", "audit.undated") == [
        "audit.dated",
        "audit.older",
    ]
    dated = next(reason for reason in body["reasons"] if reason["code"] == "audit.dated")
    assert dated["authority"] == "Birch Stamps"  # the earliest one counts
    assert "no member's clock is trusted" in " ".join(body["texts"])
    page = (case.folder / "report.html").read_text()
    assert "<h3>Spot audit</h3>" in page
    assert "the key is older than the suspect" in page
    before = case.audit(*roots, "--appeared", (NOW - 200 * DAY).strftime("%Y-%m-%dT%H:%M:%SZ"))
    assert codes(before["reasons"], "audit.older", "audit.not-older") == ["audit.not-older"]
    assert "must be believed" in " ".join(before["texts"])
    open_ = case.audit(*roots)
    assert codes(open_["reasons"], "audit.older", "audit.not-older") == []
    unchecked = case.audit("--appeared", day)
    assert codes(unchecked["reasons"], "audit.dated", "audit.no-roots", "audit.older") == ["audit.no-roots"]


def test_a_stamp_does_not_make_a_proof(case: Case) -> None:
    """The verdict is what it was: dates are said beside it."""
    world, audited = case.world, case.audited
    prepared = prepare(world.reference, world.suspect, created=audited.challenge.created)
    query = audited.certificate.finding.query
    files = [audited.openings[1]]  # one opening, two are needed
    age = [Reason.of("audit.dated", authority="Avon Stamps", when="2020-01-01T00:00:00Z")]
    result = check_audit(audited.challenge, query, prepared.form.x, world.reference.chain, files, age=age)
    assert result.verdict == "INCONCLUSIVE"
    assert [reason.code for reason in result.reasons] == ["audit.too-few-shares", "audit.dated"]
    bare = check_audit(audited.challenge, query, prepared.form.x, world.reference.chain, files)
    assert [reason.code for reason in bare.reasons] == ["audit.too-few-shares", "audit.undated"]


def test_another_genesis_is_another_key(case: Case) -> None:
    """A stamp of a manifest from before a new anchor says nothing about the key under the new whitening."""
    case.stamp(case.manifest, case.avon, 90)
    manifest = case.world.manifest
    terms = replace(manifest.terms, anchor="ab" * 32)
    genesis = replace(manifest.genesis, anchor=terms.anchor)
    other = replace(manifest, terms=terms, genesis=genesis, predecessor=manifest.digest().hex())
    roots = read_roots([case.avon.root])
    assert about_age([manifest], case.manifest, roots)[0]
    _, reasons = about_age([manifest, other], case.manifest, roots)
    assert [reason.code for reason in reasons] == ["audit.undated"]


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01", "2026-01-01 12:00", "2026-1-1", ""])
def test_when_a_suspect_appeared_is_a_day_or_a_time(text: str) -> None:
    with pytest.raises(InputError, match="--appeared"):
        read_appeared(text)
    assert time_text(read_appeared("2026-01-31")) == "2026-01-31T00:00:00Z"


def test_every_refusal_has_a_sentence() -> None:
    assert sentences([Reason.of("stamp.expired", authority="Avon", expired="2026-01-31T00:00:00Z")])
