"""`quorumark stamp request|attach|show`, from files and from an authority on loopback."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quorumark.cli import app
from quorumark.errors import InputError, QuorumarkError, RecordError, StampError
from quorumark.stamps.record import stamps_name
from quorumark.stamps.tokens import LARGEST
from quorumark.verify.certificate import Certificate
from tests.kit.authority import NOW, Authority, make_authority, openssl, serving
from tests.kit.evidence import consortium, make_finding

REPLY = "application/timestamp-reply"


@dataclass
class Office:
    """A folder with a manifest, a certificate about to be signed, and two authorities."""

    folder: Path
    avon: Authority
    birch: Authority

    def run(self, *words: Any, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["stamp", *map(str, words)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output

    def json(self, *words: Any, code: int = 0) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.run(*words, "--json", code=code))
        return body

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    def stamped(self, file: Path, authority: Authority, *more: Any) -> dict[str, Any]:
        """Request, answer, attach: three steps, three files."""
        query, answer = self.folder / "request.tsq", self.folder / "response.tsr"
        self.run("request", file, "--out", query, *more)
        answer.write_bytes(authority.answer(query.read_bytes()))
        return self.json("attach", file, answer, "--request", query, "--tsa-roots", authority.root)


PEOPLE, MANIFEST = consortium(3, 2)


@pytest.fixture
def office(tmp_path: Path) -> Office:
    (tmp_path / "manifest.json").write_bytes(MANIFEST.to_bytes())
    certificate = Certificate.of(make_finding(PEOPLE, MANIFEST, 20.0, (1, 2, 3)))
    (tmp_path / "unsigned.json").write_bytes(certificate.to_bytes())
    for person in PEOPLE:
        certificate = certificate.signed_by(person)
    (tmp_path / "certificate.json").write_bytes(certificate.to_bytes())
    return Office(tmp_path, make_authority(tmp_path / "a"), make_authority(tmp_path / "b", "Birch Stamps"))


def test_from_a_request_to_a_stamp_that_is_shown(office: Office) -> None:
    assert "no time stamp dates this manifest" in office.run("show", office.manifest)
    done = office.stamped(office.manifest, office.avon)
    assert (done["stamp"], done["authority"], done["what"]) == (1, "Avon Stamps", "manifest")
    assert Path(done["stamps"]).parent == office.folder
    shown = office.run("show", office.manifest)
    assert "by 'Avon Stamps'" in shown
    assert "NOT checked" in shown
    assert "NOT checked" not in office.run("show", office.manifest, "--tsa-roots", office.avon.root)
    held = office.json("show", office.manifest, "--tsa-roots", office.avon.root)["stamps"][0]
    assert held["holds"] is True
    assert held["existed_by"] == done["existed_by"]


def test_several_authorities_and_a_renewal(office: Office) -> None:
    office.stamped(office.manifest, office.avon)
    assert office.stamped(office.manifest, office.birch)["stamp"] == 2
    query, answer = office.folder / "renewal.tsq", office.folder / "renewal.tsr"
    office.run("request", office.manifest, "--renew", 1, "--out", query)
    answer.write_bytes(office.birch.answer(query.read_bytes()))
    roots = ["--tsa-roots", office.avon.root, "--tsa-roots", office.birch.root]
    done = office.json("attach", office.manifest, answer, "--request", query, *roots)
    assert (done["stamp"], done["authority"], done["renewals"]) == (1, "Avon Stamps", ["Birch Stamps"])
    assert [one["holds"] for one in office.json("show", office.manifest, *roots)["stamps"]] == [True, True]
    # a reader who knows only one of the two cannot check a chain that needs both
    partly = office.json("show", office.manifest, "--tsa-roots", office.birch.root, code=2)["stamps"]
    assert [one["holds"] for one in partly] == [False, True]
    assert partly[0]["code"] == "stamp.untrusted"
    with pytest.raises(InputError, match="--renew"):
        office.run("request", office.manifest, "--renew", 3, "--out", query)


def test_what_is_extracted_holds_with_openssl_alone(office: Office) -> None:
    office.stamped(office.manifest, office.avon)
    query, answer, out = (office.folder / name for name in ("q", "r", "out"))
    office.run("request", office.manifest, "--renew", 1, "--out", query)
    answer.write_bytes(office.avon.answer(query.read_bytes()))
    office.run("attach", office.manifest, answer, "--request", query, "--tsa-roots", office.avon.root)
    office.run("show", office.manifest, "--extract", out)
    assert (out / "stamp-1.data").read_bytes() == office.manifest.read_bytes()  # the dated bytes are the file
    for name in ("stamp-1", "stamp-1-renewal-1"):
        said = openssl(
            "ts", "-verify", "-in", out / f"{name}.tsr", "-data", out / f"{name}.data", "-CAfile", office.avon.root
        )
        assert b"Verification: OK" in said


def test_a_certificate_is_stamped_after_it_is_signed(office: Office) -> None:
    with pytest.raises(RecordError, match="sign first"):
        office.run("request", office.folder / "unsigned.json", "--out", office.folder / "q")
    done = office.stamped(office.folder / "certificate.json", office.avon)
    assert done["what"] == "certificate"
    # one more or one fewer signature is another file: its stamps are not these
    signed = Certificate.from_bytes((office.folder / "certificate.json").read_bytes())
    fewer = Certificate(signed.payload, dict(list(signed.signatures.items())[:2]))
    (office.folder / "certificate.json").write_bytes(fewer.to_bytes())
    assert office.json("show", office.folder / "certificate.json")["stamps"] == []


@pytest.mark.parametrize("file", ["layout.json", "nothing.json"])
def test_other_files_are_not_stamped(office: Office, file: str) -> None:
    (office.folder / "layout.json").write_text('{"format":"quorumark-layout/v1"}')
    with pytest.raises(RecordError):
        office.run("request", office.folder / file)


def test_what_attach_refuses(office: Office) -> None:
    query, answer = office.folder / "q", office.folder / "r"
    office.run("request", office.manifest, "--out", query)
    answer.write_bytes(office.avon.answer(query.read_bytes()))
    good = ["attach", office.manifest, answer, "--request", query, "--tsa-roots", office.avon.root]
    with pytest.raises(StampError) as caught:
        office.run(*good[:-1], office.birch.root)
    assert caught.value.code == "stamp.untrusted"
    with pytest.raises(InputError, match="--tsa-roots"):
        office.run(*good[:-2])
    with pytest.raises(InputError, match="--request"):
        office.run("attach", office.manifest, answer, "--tsa-roots", office.avon.root)
    other = office.folder / "other"
    office.run("request", office.manifest, "--out", other)
    with pytest.raises(StampError) as caught:  # the answer to another request for the same file
        office.run("attach", office.manifest, answer, "--request", other, "--tsa-roots", office.avon.root)
    assert caught.value.code == "stamp.nonce"
    with pytest.raises(StampError, match="not about this file"):
        office.run("attach", office.folder / "certificate.json", *good[2:])
    huge = office.folder / "huge"
    huge.write_bytes(bytes(LARGEST + 1))
    with pytest.raises(StampError, match="too large"):
        office.run("attach", office.manifest, huge, *good[3:])
    assert not list(office.folder.glob("stamps-*.json"))  # nothing refused is kept
    office.run(*good)
    with pytest.raises(StampError) as caught:
        office.run(*good)
    assert caught.value.code == "stamp.twice"


def test_a_file_of_stamps_of_something_else_is_refused(office: Office) -> None:
    office.stamped(office.manifest, office.avon)
    office.stamped(office.folder / "certificate.json", office.avon)
    mine = office.folder / stamps_name(office.manifest.read_bytes())
    (other,) = set(office.folder.glob("stamps-*.json")) - {mine}
    mine.write_bytes(other.read_bytes())
    with pytest.raises(RecordError, match="something else"):
        office.run("show", office.manifest)


# --- from an authority on the network -------------------------------------------------------------------------


def attach(office: Office, url: str, *more: Any) -> dict[str, Any]:
    return office.json("attach", office.manifest, "--url", url, "--tsa-roots", office.avon.root, *more)


def test_an_authority_is_asked_by_its_address(office: Office) -> None:
    seen: list[bytes] = []

    def reply(asked: bytes) -> tuple[int, str, bytes]:
        seen.append(asked)
        return 200, REPLY, office.avon.answer(asked)

    with serving(reply) as url:
        assert attach(office, url)["authority"] == "Avon Stamps"
        assert attach(office, url, "--renew", 1)["renewals"] == ["Avon Stamps"]
    assert len(seen) == 2
    assert all(len(asked) < 120 for asked in seen)  # a hash and a nonce: nothing of the file goes out
    assert office.json("show", office.manifest, "--tsa-roots", office.avon.root)["stamps"][0]["holds"]


@pytest.mark.parametrize(
    ("status", "kind", "body", "text"),
    [
        (500, REPLY, b"", "HTTP status 500"),
        (302, REPLY, b"", "HTTP status 302"),  # an address that was not named is not asked
        (200, "text/html", b"<p>hello", "text/html"),
        (200, REPLY, b"hello", "not an answer"),
        (200, REPLY, bytes(10 * LARGEST), "larger than any answer"),
    ],
)
def test_what_a_web_server_may_answer_instead(office: Office, status: int, kind: str, body: bytes, text: str) -> None:
    with serving(lambda _: (status, kind, body)) as url, pytest.raises(StampError, match=text):
        attach(office, url)
    assert not list(office.folder.glob("stamps-*.json"))


def test_an_old_answer_to_another_request_is_refused(office: Office) -> None:
    """A web server that replays what it once got: the nonce is not ours."""
    kept: list[bytes] = []

    def replay(asked: bytes) -> tuple[int, str, bytes]:
        kept.append(kept[0] if kept else office.avon.answer(asked))
        return 200, REPLY, kept[0]

    with serving(replay) as url:
        attach(office, url)
        with pytest.raises(StampError) as caught:
            attach(office, url)
    assert caught.value.code == "stamp.nonce"


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "https://name:word@host/", "http:///x", "host/tsr"])
def test_only_web_addresses_without_a_password_are_asked(office: Office, url: str) -> None:
    with pytest.raises(InputError, match="--url"):
        attach(office, url)


def test_nobody_at_the_address(office: Office) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/tsr"
        with pytest.raises(StampError, match="cannot be reached"):
            attach(office, url)


def test_nothing_else_opens_a_connection(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection")

    answer = office.folder / "r"
    office.run("request", office.manifest, "--out", office.folder / "q")
    answer.write_bytes(office.avon.answer((office.folder / "q").read_bytes()))
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    roots = ["--tsa-roots", office.avon.root]
    office.run("request", office.manifest, "--out", office.folder / "q2")
    office.run("attach", office.manifest, answer, "--request", office.folder / "q", *roots)
    office.run("show", office.manifest, *roots)
    with pytest.raises((AssertionError, QuorumarkError)):  # the guard works
        attach(office, "http://127.0.0.1:9/tsr")


def test_an_expired_stamp_is_shown_as_refused(office: Office, tmp_path: Path) -> None:
    old = make_authority(
        tmp_path / "old", "Old Stamps", begin=NOW - timedelta(days=900), end=NOW + timedelta(seconds=0)
    )
    office.run("request", office.manifest, "--out", office.folder / "q")
    answer = office.folder / "r"
    answer.write_bytes(old.answer((office.folder / "q").read_bytes(), at=NOW - timedelta(days=500)))
    with pytest.raises(StampError) as caught:
        office.run("attach", office.manifest, answer, "--request", office.folder / "q", "--tsa-roots", old.root)
    assert caught.value.code == "stamp.expired"
