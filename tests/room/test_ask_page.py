"""Asking from the member's own page: a file through a browser's form, to disk, to the room; and who else cannot ask."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from quorumark.room.desk import Matter
from quorumark.room.drafts import Draft, plain_name
from quorumark.room.place import Policy
from quorumark.verify.evidence import Query
from quorumark.verify.ledger import Ledger
from tests.kit.forms import body, send
from tests.kit.rooms import Group, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room

from quorumark.room import forms  # noqa: E402 - after the check that its packages are there
from quorumark.room.agent_page import AgentPage  # noqa: E402

FIELDS = {"purpose": "offered by a reseller", "kind": "plain", "answers": "2"}


class Scene:
    def __init__(self, group: Group) -> None:
        self.group = group
        group.found()
        self.suspect = group.marked()
        self.page = AgentPage(group.agent(0))
        self.page.start()

    @property
    def own(self) -> dict[str, str]:
        return {"origin": self.page.address.rpartition("/")[0].rpartition("/")[0]}

    @property
    def drafts(self) -> Path:
        return self.group.homes[0][0].path / "room" / self.group.consortium / "drafts"

    def left(self) -> list[Path]:
        return [path for path in self.drafts.rglob("*") if path.is_file()]

    def queries(self) -> set[str]:
        return {one.name.split("/")[1] for one in self.group.client(0).whole_log() if one.name.endswith("/ask.msg")}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("ask")
    with room_on(folder / "room") as room:
        group = Group.join(folder / "members", room.address, members=3, threshold=2)
        group.start()
        made = Scene(group)
        yield made
        made.page.stop()
        group.stop()


def test_a_member_asks_on_its_page_and_all_get_report_and_certificate(scene: Scene) -> None:
    group, content = scene.group, scene.suspect.read_bytes()
    status, _ = send(scene.page.address, body({"a model.safetensors": content}, FIELDS), **scene.own)
    assert status == 303
    matters = [group.decide(index, "query") for index in (0, 1)]
    assert dict(matters[1].facts)["why"] == FIELDS["purpose"]
    assert hashlib.sha256(content).hexdigest() in dict(matters[1].facts)["suspect"]
    done = [group.matter(index, "query", "done") for index in (0, 1)]
    assert [one.verdict for one in done] == ["PASSED", "PASSED"]
    assert done[1].people == (("Avon", "answered and signed"), ("Birch", "answered and signed"), ("Cedar", ""))
    until(lambda: not scene.left(), "nothing is left of the draft")
    other = AgentPage(group.agent(1))
    other.start()
    try:
        for page, matter in ((scene.page, done[0]), (other, done[1])):  # the other one's report is its own agent's work
            place = f"{page.address}q/{matter.digest}"
            status, _, text = visit(place)
            assert status == 200
            assert "answered and signed" in text
            status, headers, text = visit(f"{place}/report.html")
            assert status == 200
            assert headers["content-security-policy"].startswith("sandbox;")
            assert "PASSED" in text
            assert '"payload"' in visit(f"{place}/certificate.json")[2]
            assert visit(f"{place}/draft.json")[0] == 404
    finally:
        other.stop()


def test_a_confidential_suspect_stays_here(scene: Scene) -> None:
    suspect = scene.group.marked("secret.safetensors", seed=9)
    before = scene.queries()
    assert (
        send(
            scene.page.address,
            body({"secret.safetensors": suspect.read_bytes()}, FIELDS | {"keep": "yes"}),
            **scene.own,
        )[0]
        == 303
    )
    (query,) = until(lambda: scene.queries() - before, "the question")
    names = {one.name for one in scene.group.client(1).whole_log() if one.name.startswith(f"query/{query}/")}
    # agents say their ledgers' heads when they see it
    assert names - {f"query/{query}/head.json"} == {f"query/{query}/query.json", f"query/{query}/ask.msg"}
    digest = hashlib.sha256(suspect.read_bytes()).hexdigest()
    assert digest not in {one.sha256 for one in scene.group.client(1).whole_log()}

    def named(index: int) -> list[Matter]:
        matters = scene.group.agent(index).desk.matters()
        return [one for one in matters if query[:12] in one.title or query in str(one.facts)]

    assert until(lambda: named(0), "it waits here")[0].state == "waiting"
    assert until(lambda: named(1), "it is missing there")[0].code == "room.not-found"


HOSTILE: dict[str, dict[str, str]] = {
    "no origin": {},
    "another site": {"origin": "https://evil.example"},
    "a sandboxed frame": {"origin": "null"},
    "another port": {"origin": "http://127.0.0.1:80"},
    "a rebound name": {"host": "evil.example:{port}", "origin": "{origin}"},
    "what a browser says of other sites": {"origin": "{origin}", "sec-fetch-site": "cross-site"},
    "a frame": {"origin": "{origin}", "sec-fetch-dest": "iframe"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nobody_else_asks(scene: Scene, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(urlsplit(scene.page.address).port)
    headers = {n: text.format(port=port, origin=scene.own["origin"]) for n, text in HOSTILE[what].items()}
    made: list[Draft] = []
    monkeypatch.setattr(type(scene.group.agent(0).drafts), "finish", lambda _, __, draft: made.append(draft))
    content = body({"x.safetensors": b"12345678"}, FIELDS)
    status, text = send(scene.page.address, content, **headers)
    assert (status, text[:14]) == (403, "room.elsewhere")
    assert not made
    assert not scene.left()
    monkeypatch.setattr(AgentPage, "_check", lambda *_: None)  # without the check it would have been asked
    assert send(scene.page.address, content, **headers)[0] == 303
    assert len(made) == 1
    for folder in scene.drafts.iterdir():
        scene.group.agent(0).drafts.drop(folder)


WRONG: dict[str, tuple[bytes, str]] = {
    "no file": (body({}, FIELDS), "choose the file"),
    "an empty file": (body({"x": b""}, FIELDS), "choose the file"),
    "no purpose": (body({"x": b"1"}, FIELDS | {"purpose": " "}), "why you ask"),
    "another kind": (body({"x": b"1"}, FIELDS | {"kind": "everything"}), "kind of query"),
    "too many answers": (body({"x": b"1"}, FIELDS | {"answers": "4"}), "number of answers"),
    "no number": (body({"x": b"1"}, FIELDS | {"answers": "-1"}), "no form"),
    "two files of one name": (body({"a/x": b"1", "b/x": b"2"}, FIELDS), "same name"),
    "a field twice": (body({"x": b"1"}, FIELDS)[:-20] + body({}, {"purpose": "y"}), "no form"),
    "a file in another field": (body({"x": b"1"}, FIELDS, "purpose"), "no form"),
    "cut short": (body({"x": b"1" * 9000}, FIELDS)[:6000], "no form"),
    "a long field": (body({"x": b"1"}, FIELDS | {"purpose": "y" * 9000}), "no form"),
    "no form at all": (os.urandom(300), "no form"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_form_asks_nothing_and_leaves_nothing(scene: Scene, what: str) -> None:
    content, words = WRONG[what]
    status, text = send(scene.page.address, content, **scene.own)
    assert 400 <= status < 500
    assert words in text
    assert not scene.left()


def test_a_file_above_the_limit_is_not_kept(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "LARGEST_SUSPECT", 1 << 20)
    content = body({"x": bytes(2 << 20)}, FIELDS)
    status, text = send(scene.page.address, content, **scene.own)
    assert status == 413
    assert "place for 1,048,576 bytes" in text
    assert not scene.left()
    # a length that is not true does not help
    assert (
        send(scene.page.address, body({"x": bytes(10)}, FIELDS), content_length="999999999999", **scene.own)[0] == 413
    )
    monkeypatch.setattr(forms, "free_bytes", lambda _: 100)
    assert send(scene.page.address, body({"x": bytes(500)}, FIELDS), **scene.own)[0] == 413


def test_what_is_no_model_is_said_and_discarded(scene: Scene) -> None:
    before = scene.queries()
    assert send(scene.page.address, body({"notes.safetensors": b"no model at all"}, FIELDS), **scene.own)[0] == 303
    drafts = scene.group.agent(0).drafts
    failed = until(lambda: [one for one in drafts.shown() if one.failed], "it is refused")[0]
    assert failed.files == "notes.safetensors"
    text = visit(scene.page.address)[2]
    assert "Nothing was asked" in text
    for wrong in ("00" * 8, "../../..", ""):
        assert visit(scene.page.address + "discard", "POST", {"draft": wrong}, **scene.own)[0] == 404
    assert visit(scene.page.address + "discard", "POST", {"draft": failed.id}, **scene.own)[0] == 303
    assert not drafts.shown()
    assert not scene.left()
    assert scene.queries() == before


def test_an_agent_that_died_while_it_asked_asks_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after the query is computed: the same query is sent by the next agent, once."""
    group, before = scene.group, scene.queries()
    sent: list[str] = []

    def die(_: Any, __: Any, ___: Any, query: Query, *____: Any, **_____: Any) -> None:
        sent.append(query.digest())
        raise RuntimeError("as if the agent had died here")

    monkeypatch.setattr("quorumark.room.drafts.send_question", die)
    suspect = group.marked("late.safetensors", seed=11)
    assert send(scene.page.address, body({"late.safetensors": suspect.read_bytes()}, FIELDS), **scene.own)[0] == 303
    until(lambda: sent, "it begins to send")
    assert scene.queries() == before
    scene.page.stop()
    group.agent(0).stop()
    group.agents = [agent for agent in group.agents if agent.identity.name != "Avon"]
    monkeypatch.undo()
    (scene.drafts / "half" / "files").mkdir(parents=True)  # an upload that never ended
    (scene.drafts / "half" / "files" / "x").write_bytes(b"half")
    group.start(0)
    assert until(lambda: scene.queries() - before, "it is asked") == {sent[0]}
    until(lambda: not scene.left(), "nothing is left")
    ours = group.homes[0][0].only_consortium()
    assert not [e for e in Ledger.open(ours, ours.manifest()).entries if e.get("query") == sent[0]]  # nobody decided
    scene.page = AgentPage(group.agent(0))
    scene.page.start()


def test_a_large_suspect_is_fetched_when_a_person_wants_it(scene: Scene) -> None:
    group, index = scene.group, 2
    group.agent(index).stop()
    group.agents = [agent for agent in group.agents if agent.identity.name != "Cedar"]
    group.start(index, policy=Policy(most_mib=0))
    suspect, before = group.marked("large.safetensors", seed=21), scene.queries()
    assert send(scene.page.address, body({"x.safetensors": suspect.read_bytes()}, FIELDS), **scene.own)[0] == 303
    (query,) = until(lambda: scene.queries() - before, "the question")
    desk = group.agent(index).desk

    def shown() -> list[Matter]:
        return [one for one in desk.matters() if query[:12] in one.title or query in str(one.facts)]

    found = until(shown, "it is shown")[0]
    assert (found.state, found.code) == ("refused", "room.not-fetched")
    digest = hashlib.sha256(suspect.read_bytes()).hexdigest()
    assert digest in found.status
    assert f"{suspect.stat().st_size:,} bytes" in found.status
    folder = group.homes[index][0].path / "room" / group.consortium / "suspects" / query
    assert not [path for path in folder.glob("*") if path.stat().st_size]
    page = AgentPage(group.agent(index))
    page.start()
    try:
        own = {"origin": page.address.rpartition("/")[0].rpartition("/")[0]}
        assert "Fetch it" in visit(page.address)[2]
        assert visit(page.address + "fetch", "POST", {"about": found.digest}, origin="https://evil.example")[0] == 403
        assert shown()[0].code == "room.not-fetched"
        assert visit(page.address + "fetch", "POST", {"about": found.digest}, **own)[0] == 303
        until(lambda: shown()[0].state == "waiting", "it is here")
        assert [path for path in folder.glob("*") if hashlib.sha256(path.read_bytes()).hexdigest() == digest]
    finally:
        page.stop()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("model.safetensors", "model.safetensors"),
        ("C:\\models\\model 1.pt", "model 1.pt"),
        ("../../etc/passwd", "passwd"),
        ("..", "suspect.."),
        (".hidden", "suspect.hidden"),
        ("modèle\n.bin", "mod_le_.bin"),
        ("", "suspect"),
    ],
)
def test_names_of_files_are_plain(given: str, kept: str) -> None:
    assert plain_name(given) == kept
