"""`quorumark verify …` as people use it: from their own homes, with files that are e-mailed about."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from math import isqrt
from pathlib import Path

import numpy as np
import pytest

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.model.layout import write_safetensors
from quorumark.verify.answer import answer_with
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import Challenge
from quorumark.verify.check import sign
from quorumark.verify.combine import combine
from quorumark.verify.ledger import Ledger
from tests.kit.answers import through
from tests.kit.commands import run
from tests.kit.consortium import anchor_model, make_world, trained_from
from tests.kit.desk import Desk
from tests.kit.layered import evaded, layered_world, plain_certificate


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Desk:
    world = make_world(tmp_path_factory.mktemp("world"), rho=0.35)
    return Desk(world, tmp_path_factory.mktemp("desk"), environment)


def test_from_the_question_to_the_report(desk: Desk) -> None:
    suspect = desk.world.suspect
    query = desk.prepare(suspect)
    asked = Path(query).read_bytes()
    time.sleep(1.1)  # a query says when it was made, to the second
    assert Path(desk.prepare(suspect)).read_bytes() == asked  # asked again it stays, so that answers still fit
    partials = [desk.partial(query, suspect, point, "--approve") for point in (2, 3, 5)]
    assert all(len(Path(path).read_bytes()) < 1000 for path in partials)
    assert "1 partial is too few" in desk.combine(query, partials[:1], code=2)
    two = desk.combine(query, partials[:2], code=2)
    assert two == "quorumark: 2 partials are too few: 'hospitals' needs 3; collect more\n"
    found = desk.combine(query, partials)
    assert (found["verdict"], found["corroboration"]) == ("PASSED", "uncorroborated")
    assert found["members"] == ["Birch", "Cedar", "Elm"]
    certificate = desk.path("certificate.json")
    check = ["check", certificate, "--manifest", desk.world.folder / "consortium.json"]
    assert "nobody has signed the certificate" in desk(*check, code=2).stderr
    for point in (2, 3, 5):
        said = desk("sign", certificate, *desk.home(point), "--json")
    assert json.loads(said.stdout)["signed_by"] == ["Birch", "Cedar", "Elm"]
    # combined again, signatures are not lost
    assert "is a signed certificate with all of these partials" in desk.combine(query, partials, code=2)
    done = desk(*check, "--suspect", suspect, "--report", desk.path("report.html"))
    assert done.stdout.startswith("PASSED: z = ")
    assert done.stdout.count("checked: ") == 5
    assert "NOT checked" not in done.stdout
    assert "This model carries the mark of" in Path(desk.path("report.html")).read_text()
    # without the suspect less can be said, and is
    assert desk(*check).stdout.count("NOT checked: ") == 2
    # a certificate that somebody improved
    body = Certificate.from_bytes(Path(certificate).read_bytes()).to_bytes()
    envelope = json.loads(body)
    for spoil in (lambda e: e.update(payload=e["payload"][:-8]), lambda e: e.update(signatures=[])):
        copy = json.loads(json.dumps(envelope))
        spoil(copy)
        Path(desk.path("spoilt.json")).write_text(json.dumps(copy))
        error = desk("check", desk.path("spoilt.json"), "--manifest", check[-1], code=2).stderr
        assert error.startswith("quorumark: ")
        assert error.count("\n") == 1


def test_an_answer_that_comes_late_is_added_to_a_signed_certificate(desk: Desk) -> None:
    suspect, manifest = desk.world.suspect, ["--manifest", desk.world.folder / "consortium.json"]
    query, out = desk.prepare(suspect, "late.json"), "late-certificate.json"
    partials = [desk.partial(query, suspect, point, "--approve") for point in (1, 2, 3)]
    first = desk.combine(query, partials, out)
    assert first["corroboration"] == "uncorroborated"
    for point in (1, 2, 3):
        desk("sign", desk.path(out), *desk.home(point))
    signed = Path(desk.path(out)).read_bytes()
    other = desk.prepare(desk.world.save(trained_from(anchor_model(), 78), "others.safetensors"), "others.json")
    assert "must not be a signed certificate of another query" in desk.combine(other, partials, out, code=2)
    assert "is a signed certificate with all of these partials" in desk.combine(query, partials[:1], out, code=2)
    assert Path(desk.path(out)).read_bytes() == signed
    found = desk.combine(query, [desk.partial(query, suspect, 4, "--approve")], out)  # the late one alone
    assert (found["z"], found["corroboration"]) == (first["z"], "corroborated")
    assert found["members"] == ["Avon", "Birch", "Cedar", "Delta"]
    kept = desk.path("late-certificate-1.json")
    assert found["kept"] == kept
    assert Path(kept).read_bytes() == signed
    desk("check", kept, *manifest, "--suspect", suspect)
    assert "nobody has signed the certificate" in desk("check", desk.path(out), *manifest, code=2).stderr
    for point in (1, 2, 3, 4):
        desk("sign", desk.path(out), *desk.home(point))
    desk("check", desk.path(out), *manifest, "--suspect", suspect)
    # a fifth: the second certificate is kept as well
    found = desk.combine(query, [desk.partial(query, suspect, 5, "--approve")], out)
    assert found["kept"] == desk.path("late-certificate-2.json")
    assert len(found["members"]) == 5


def test_a_terminal_hears_what_is_worked_on_and_a_file_does_not(desk: Desk) -> None:
    line = ["verify", "prepare", str(desk.world.suspect), "--out", desk.path("shown.json"), *desk.reference]
    line += ["--home", desk.path("nobody")]
    assert run(desk.environment, *line).stderr == ""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from quorumark.cli import main; main()", *line]
    environment = {**desk.environment, "TERM": "xterm"}
    shown = b""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # how a terminal ends
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert process.returncode == 0, shown
    assert b"checking the anchor, tensor 3 of 3: fc.bias" in shown  # the last one stays until it is done
    assert b"hashing the suspect's files" in shown


def test_breaking_off_at_the_question_is_no_verdict(desk: Desk) -> None:
    query = desk.prepare(desk.world.suspect, "asked.json")
    out = desk.path("none.json")
    line = ["verify", "partial", query, "--suspect", str(desk.world.suspect), "--out", out, *desk.reference]
    command = [sys.executable, "-c", "from quorumark.cli import main; main()", *line, *desk.home(4)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=desk.environment
    ) as process:
        os.close(theirs)
        os.write(ours, b"\x04")  # the end of the input
        shown, error = process.communicate(timeout=120)
    os.close(ours)
    assert b"answer this query?" in shown
    assert error.decode().strip() == "quorumark: interrupted"
    assert process.returncode == 130
    assert not Path(out).exists()


def test_a_failed_and_an_inconclusive_model(desk: Desk, tmp_path: Path) -> None:
    innocent = desk.world.save(trained_from(anchor_model(), 77), "innocent.safetensors")
    query = desk.prepare(innocent, "innocent.json")
    partials = [desk.partial(query, innocent, point, "--approve") for point in (1, 2, 4)]
    found = desk.combine(query, partials, "innocent-certificate.json", code=1)
    assert found["verdict"] == "FAILED"
    for point in (1, 2, 4):
        desk("sign", desk.path("innocent-certificate.json"), *desk.home(point))
    manifest = desk.world.folder / "consortium.json"
    desk("check", desk.path("innocent-certificate.json"), "--manifest", manifest, "--suspect", innocent, code=1)
    other = tmp_path / "other.safetensors"
    write_safetensors({"w": np.ones((4, 4), np.float32)}, other)
    nobody = ["--home", desk.path("nobody")]
    done = desk("prepare", other, "--out", desk.path("x.json"), *desk.reference, *nobody, "--json", code=2)
    said = json.loads(done.stdout)
    codes = [reason["code"] for reason in said["reasons"]]
    assert (said["verdict"], codes) == ("INCONCLUSIVE", ["untestable.coverage", "read.carriers-missing"])
    assert len(said["texts"]) == 2
    done = desk("prepare", other, "--out", desk.path("x.json"), *desk.reference, *nobody, code=2)
    assert done.stderr.startswith("quorumark: the suspect does not fit the consortium's model: 0 of")
    assert "\n- left out: 2 of 2 carrying tensors are missing" in done.stderr
    assert not Path(desk.path("x.json")).exists()


def test_approval_rules_and_ledger(desk: Desk) -> None:
    suspect = desk.world.save(trained_from(anchor_model(), 78), "another.safetensors")
    query = desk.prepare(suspect, "another.json")
    done = desk(
        "partial", query, "--suspect", suspect, "--out", desk.path("no.json"), *desk.reference, *desk.home(3), code=2
    )
    assert "nobody has approved this query here" in done.stderr
    assert not Path(desk.path("no.json")).exists()
    home = desk.world.homes[2][0].path
    rules = {"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 100}
    (home / "rules.json").write_text(json.dumps(rules))
    try:
        desk.partial(query, suspect, 3)
    finally:
        (home / "rules.json").unlink()
    said = json.loads(desk("ledger", "--home", home, "--json").stdout)
    kinds = [entry["kind"] for entry in said["entries"]]
    assert kinds[-2:] == ["refused", "answered"]
    assert said["entries"][-1]["approved_by"] == "rules"
    assert said["budget"] == 16
    assert "of 16 in the consortium's life" in desk("ledger", "--home", home).stdout
    # a ledger that was cut is noticed before anything is answered
    ledger = next(home.glob("consortia/*/ledger.jsonl"))
    whole = ledger.read_bytes()
    ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    try:
        done = desk(
            "partial", query, "--suspect", suspect, "--out", desk.path("no.json"), "--approve", *desk.reference,
            *desk.home(3), code=2,
        )  # fmt: skip
        assert "ledger" in done.stderr
    finally:
        ledger.write_bytes(whole)


def test_the_papers_variant(desk: Desk) -> None:
    suspect = desk.world.suspect
    query = desk.prepare(suspect, "masked.json")
    partials = [desk.partial(query, suspect, point, "--approve", "--masked", "1,4,5") for point in (1, 4, 5)]
    found = desk.combine(query, partials, "masked-certificate.json")
    assert (found["verdict"], found["corroboration"]) == ("PASSED", "uncorroborated")
    assert "must be points like 1,3,4" in desk(
        "partial", query, "--suspect", suspect, "--out", desk.path("no.json"), "--approve", "--masked", "a,b",
        *desk.reference, *desk.home(1), code=2,
    ).stderr  # fmt: skip


def test_a_thief_of_files_and_bad_usage(desk: Desk, tmp_path: Path) -> None:
    query = desk.prepare(desk.world.suspect, "usage.json")
    nobody = ["--home", str(tmp_path / "nobody")]
    manifest = str(desk.world.folder / "consortium.json")
    for arguments, text in (
        (["prepare", "nowhere.safetensors", *desk.reference, *nobody], "nowhere.safetensors"),
        (["prepare", str(desk.world.suspect), *nobody], "holds no consortium yet"),
        (["combine", query, query, "--manifest", manifest, *nobody], "is refused: this is not a partial"),
        (["check", query, "--manifest", manifest], "certificate"),
        (["combine", "nothing.json", query, "--manifest", manifest, *nobody], "there is no such file"),
    ):
        done = desk(*arguments, code=2)
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
    # somebody else's share file in one's own home opens nothing
    home = tmp_path / "thief"
    shutil.copytree(desk.world.homes[0][0].path, home)
    done = desk(
        "partial", query, "--suspect", desk.world.suspect, "--approve", "--out", desk.path("no.json"),
        *desk.reference, "--home", home, "--key-file", f"{desk.world.homes[1][0].path}.key", code=2,
    )  # fmt: skip
    assert done.stderr.count("\n") == 1


def test_an_audit_from_the_challenge_to_the_proof(desk: Desk) -> None:
    """The model has z ≈ 47, so a tenth of the leaves is a proof. They are burnt, and left out of the next query."""
    suspect = desk.world.suspect
    query = desk.prepare(suspect, "audited.json")
    partials = [desk.partial(query, suspect, point, "--approve") for point in range(1, 6)]
    found = desk.combine(query, partials, "audited-certificate.json")
    assert float(found["z"]) > 40
    certificate, challenge = desk.path("audited-certificate.json"), desk.path("challenge.json")
    manifest = desk.world.folder / "consortium.json"
    said = desk("audit", "challenge", certificate, "--manifest", manifest, "--out", challenge, "--json")
    asked = json.loads(said.stdout)
    assert 0.05 < len(asked["leaves"]) / asked["of"] < 0.25
    # nothing is opened for what nobody signed, or for more leaves than the certificate's z makes necessary
    opening = ["audit", "open", challenge, "--certificate", certificate, "--out", desk.path("no.json"), *desk.home(1)]
    assert "nobody has signed the certificate" in desk(*opening, code=2).stderr
    for point in range(1, 6):
        desk("sign", certificate, *desk.home(point))
    more = replace(Challenge.from_bytes(Path(challenge).read_bytes()), z="30.0")
    total = asked["of"]
    Path(desk.path("more.json")).write_bytes(replace(more, leaves=more.drawn(total)).to_bytes())
    opening[2] = desk.path("more.json")
    assert "the challenge is for z = 30.0, but the certificate says" in desk(*opening, code=2).stderr
    openings = []
    for point in range(1, 5):
        openings.append(desk.path(f"opening{point}.json"))
        desk("audit", "open", challenge, "--certificate", certificate, "--out", openings[-1], *desk.home(point))
    check = ["--certificate", certificate, "--suspect", suspect, *desk.reference]
    result = json.loads(desk("audit", "check", challenge, *openings, *check, "--json").stdout)
    assert result["verdict"] == "PASSED"
    assert result["agrees"]
    assert float(result["z"]) >= 12
    desk("audit", "check", challenge, openings[0], *check, code=2)
    unfit = ["--certificate", certificate, "--suspect", suspect, *desk.reference]
    assert "the challenge is for z = 30.0" in desk("audit", "check", opening[2], *openings, *unfit, code=2).stderr
    # what proves that they were opened; two openings are too few for that, and a challenge is nothing
    proof, few = desk.path("audit.json"), desk.path("few.json")
    desk("audit", "check", challenge, *openings, *check, "--keep", proof)
    done = desk("audit", "check", challenge, *openings[:2], *check, "--keep", few, code=2)
    assert "2 members' openings hold, but it takes 3" in done.stderr
    assert not Path(few).exists()
    fifth = desk.home(5)[:2]
    assert "cannot be used" in desk("audit", "record", challenge, *fifth, code=2).stderr
    assert json.loads(desk("ledger", *fifth, "--json").stdout)["burnt"] == []
    # the next query leaves the burnt leaves out, and members insist on it
    later = desk.path("later.json")
    home = desk.home(1)[:2]
    prepared = json.loads(desk("prepare", suspect, "--out", later, *desk.reference, *home, "--json").stdout)
    assert prepared["burnt"] == asked["leaves"]
    partials = [desk.partial(later, suspect, point, "--approve") for point in (1, 2, 3)]
    # the fifth did not open: it takes the proof, and says what it was asked to leave out, and why
    options = ["--suspect", suspect, "--out", desk.path("p5.json"), "--approve", *desk.reference, *desk.home(5)]
    refused = desk("partial", later, *options, code=2)
    count = len(asked["leaves"])
    assert f"NOTHING EXPLAINS why {count} of these leaves are left out" in refused.stdout
    assert "answer with --audit PROOF" in refused.stderr
    assert not Path(desk.path("p5.json")).exists()
    told = desk("partial", later, *options, "--audit", proof).stdout
    assert f"left out: {count} of the key's leaves" in told
    assert f"leaves of them that the audit {asked['digest'][:16]} opened: {count}" in told
    assert "NOTHING" not in told
    partials.append(desk.path("p5.json"))
    assert json.loads(desk("ledger", *fifth, "--json").stdout)["burnt"] == asked["leaves"]
    assert f"0 more leaves are recorded as burnt, {count} in all" in desk("audit", "record", proof, *fifth).stdout
    # a combiner without the proof gets a higher threshold than with it
    charged = desk.combine(later, partials, "charged.json")
    assert charged["audits"] == {}
    nobody, manifest_option = ["--home", desk.path("nobody")], ["--manifest", manifest]
    out = desk.path("later-certificate.json")
    done = desk("combine", later, *partials, *manifest_option, "--out", out, "--audit", proof, "--json", *nobody)
    found = json.loads(done.stdout)
    assert found["verdict"] == charged["verdict"] == "PASSED"
    assert found["audits"] == {asked["digest"]: asked["leaves"]}
    assert 6 < float(found["threshold"]) <= float(charged["threshold"])
    for point in (1, 2, 3, 5):
        desk("sign", out, *desk.home(point))
    report = desk.path("later.html")
    done = desk("check", out, "--suspect", suspect, *desk.reference, "--audit", proof, "--report", report)
    assert "checked: audits opened what the query leaves out: 1, all proved here" in done.stdout
    assert "What was left out" in Path(report).read_text()
    done = desk("check", out, *manifest_option)
    assert "NOT checked: audits said to explain what the query leaves out, without a proof: 1" in done.stdout
    stale = desk.prepare(suspect, "stale.json")
    for point in (4, 5):
        desk.partial(stale, suspect, point, "--approve", code=2)
    # an asker that is no member names the proof
    done = desk("prepare", suspect, "--out", stale, "--audit", proof, *desk.reference, "--home", "none", "--json")
    assert json.loads(done.stdout)["burnt"] == asked["leaves"]
    no = desk("prepare", suspect, "--out", stale, "--audit", challenge, *desk.reference, "--home", "none", code=2)
    assert "cannot be used" in no.stderr


def test_one_liar_does_not_have_a_quarter_of_the_key_opened(tmp_path: Path, environment: dict[str, str]) -> None:
    """With t partials one of them sets z, here to 32 for a model without the mark; all sign what follows. An audit of
    that would make 72 of 319 leaves public for ever."""
    (tmp_path / "world").mkdir()
    world = make_world(tmp_path / "world")
    desk = Desk(world, tmp_path, environment)
    query, partials = world.answers(world.save(trained_from(anchor_model(), 7), "innocent.safetensors"), (1, 2))
    liar = world.homes[2][0].identity(world.homes[2][1])
    wanted = {0: 32 * isqrt(query.norm2), **{partial.point: partial.value for partial in partials}}
    partials.append(answer_with(liar, world.manifest, query, through(wanted, 3)))
    certificate = Certificate.of(combine(world.manifest, query, partials)).signed_by(liar)
    for home, unlock in world.homes[:2]:
        certificate = sign(home, unlock, certificate)
    Path(desk.path("certificate.json")).write_bytes(certificate.to_bytes())
    files = [desk.path("challenge.json"), "--certificate", desk.path("certificate.json")]
    desk("audit", "challenge", files[2], "--manifest", world.folder / "consortium.json", "--out", files[0])
    done = desk("audit", "open", *files, "--out", desk.path("opening.json"), *desk.home(1), code=2)
    assert "rests on t answers, of which one could have set its number: let another member answer" in done.stderr
    assert not Path(desk.path("opening.json")).exists()
    assert not Ledger.open(world.homes[0][0].only_consortium(), world.manifest).burnt()


def test_by_layers_from_the_plain_certificate_to_the_examiners_page(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    world = layered_world(tmp_path, 3, 2)
    desk = Desk(world, tmp_path, environment)
    suspect = world.save(evaded(world), "evaded.safetensors")
    before = tmp_path / "plain.json"
    before.write_bytes(plain_certificate(world, suspect, (1, 2, 3)).to_bytes())
    Unlock.new_key_file(tmp_path / "judge.key")
    judge = HomeFolder.create(tmp_path / "judge", "Judge Oak", Unlock.key_file(tmp_path / "judge.key"))
    card = tmp_path / "judge.json"
    card.write_bytes(judge.card().to_bytes())
    manifest = ("--manifest", str(world.folder / "consortium.json"))
    asked = desk.path("layers.json")
    ask = ["prepare", suspect, "--out", asked, "--layers", *manifest]
    assert "takes --after" in desk(*ask, "--after", before, code=2).stderr
    said = desk(*ask, "--after", before, "--examiner", card).stdout
    assert "9 blocks by the rule rows/v1" in said
    assert "Judge Oak" in said
    partials = []
    for point in (1, 2, 3):
        out = desk.path(f"sealed-{point}.json")
        extra = ("--suspect", suspect, "--approve", "--out", out, *manifest, *desk.home(point))
        if point == 1:
            assert "takes the certificate of the plain query" in desk("partial", asked, *extra, code=2).stderr
        said = desk("partial", asked, *extra, "--after", before).stdout
        assert "an answer opens 9 of the 1,180 equations" in said
        assert "z* rises from 6.00 to 9.00" in said
        partials.append(out)
    assert "verify open" in desk("combine", asked, *partials, *manifest, code=2).stderr
    opened, page = desk.path("opened.json"), Path(desk.path("bars.html"))
    home = ("--home", tmp_path / "judge", "--key-file", tmp_path / "judge.key")
    said = desk("open", asked, *partials, "--out", opened, "--report", page, *manifest, *home).stdout
    assert "Q = " in said
    assert page.stat().st_mode & 0o777 == 0o600
    html = page.read_text()
    assert html.count('class="track"') == 9
    assert "This model was trained against the mark." in html
    certificate = desk.path("by-layers.json")
    combined = desk("combine", asked, *partials, "--opened", opened, "--out", certificate, *manifest, "--json")
    found = json.loads(combined.stdout)
    assert (found["verdict"], found["layers"]["blocks"]) == ("PASSED", 9)
    for point in (1, 2, 3):
        desk("sign", certificate, *desk.home(point))
    done = desk("check", certificate, *manifest, "--suspect", suspect, "--report", desk.path("public.html"))
    assert done.stdout.startswith("PASSED: ")
    assert "by layers: Q = " in done.stdout
    public = Path(desk.path("public.html")).read_text()
    assert "Q* = " in public
    assert 'class="track"' not in public
