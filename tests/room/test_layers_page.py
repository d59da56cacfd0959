"""By layers from the members' pages: asked there, opened on the examiner's own page, and with a late answer."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quorumark.canonical import canonical
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.errors import QuorumarkError, RoomError
from quorumark.model.layout import write_safetensors
from quorumark.room import layering
from quorumark.room.agent import Agent
from quorumark.room.asking import ask
from quorumark.room.client import Client
from quorumark.room.desk import Matter
from quorumark.room.examining import bring_word
from quorumark.room.people import read_cards
from quorumark.room.place import Place, Settings
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Query
from quorumark.verify.ledger import Ledger
from tests.kit.browser import CHROMIUM, browser
from tests.kit.commands import run
from tests.kit.consortium import trained_from
from tests.kit.forms import body, send
from tests.kit.layered import STRENGTH, evaded, layered_anchor
from tests.kit.rooms import Group, Host, about, identity, make_home, put_question, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room

from quorumark.room.agent_page import AgentPage  # noqa: E402 - after the check that its packages are there


class Scene:
    """Four members; a suspect whose z is gone, and its plain certificate; a judge with an agent of its own."""

    def __init__(self, group: Group, host: Host) -> None:
        self.group, self.host = group, host
        self.suspect = self.evaded(1)
        self.pages = [AgentPage(agent) for agent in group.agents]
        self.judge = self._judge()
        self.pages.append(AgentPage(self.judge))
        for page in self.pages:
            page.start()
        self.plain = put_question(group, self.suspect, answers=3)

    def evaded(self, seed: int) -> Path:
        """A model whose z is gone, and whose layers show the mark."""
        known, reference = self.group.known()
        marked = self.group.marked_model(0.1, seed)
        world: Any = SimpleNamespace(marked=marked, known=known, reference=reference)
        path = self.group.folder / f"evaded-{seed}.safetensors"
        anchor = self.group.anchor
        write_safetensors(evaded(world, models=(anchor, trained_from(anchor, seed=seed))), path)
        return path

    def _judge(self) -> Agent:
        home, unlock = make_home(self.group.folder, "Judge Oak")
        client = Client(self.group.address, home.identity(unlock), self.group.consortium)
        client.join(self.group.client(0).post("invite", count=1)["invitations"][0].partition("#")[2])
        Place(home.path).remember(Settings(self.group.address, self.group.consortium, 0))
        agent = Agent(home, unlock)
        agent.start()
        return agent

    def own(self, index: int) -> dict[str, str]:
        return {"origin": self.pages[index].address.rpartition("/")[0].rpartition("/")[0]}

    def matter(self, index: int, query: Query) -> Matter:
        found: Matter = until(about(self.group, index, query.digest()), "the query")
        return found

    def say(self, index: int, query: Query) -> None:
        until(lambda: (m := self.matter(index, query)).state == "waiting" or m.late, "it waits")
        matter = self.matter(index, query)
        self.group.agent(index).desk.decide(matter.digest, matter.shown, "yes", "person")

    def form(self) -> str:
        return visit(self.pages[0].address + "ask")[2]

    def asked(self) -> set[str]:
        return {one.name.split("/")[1] for one in self.group.client(0).whole_log() if one.name.endswith("/ask.msg")}

    def query(self, digest: str) -> Query:
        return Query.from_bytes(self.host.read(identity(self.group, 0).ed25519, f"query/{digest}/query.json"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("layers")
    with room_on(folder / "room") as room:
        group = Group.join(folder / "members", room.address, members=4, threshold=2)
        group.anchor = layered_anchor()
        group.start()
        group.found(strength=STRENGTH)
        made = Scene(group, Host(room, group))
        yield made
        for page in made.pages:
            page.stop()
        made.judge.stop()
        group.stop()


FIELDS = {"purpose": "for the court", "kind": "layers", "answers": "3"}


def test_nothing_is_asked_by_layers_before_a_plain_question_failed(scene: Scene) -> None:
    assert re.search('value="layers"[^>]* disabled', scene.form())
    before = scene.asked()
    content = body({}, {**FIELDS, "after": "ab" * 32, "examiner": scene.judge.identity.card().fingerprint()})
    status, text = send(scene.pages[0].address, content, **scene.own(0))
    assert status == 409
    assert "choose the question" in text
    assert scene.asked() == before
    for index in range(3):
        scene.say(index, scene.plain)
    until(lambda: scene.matter(0, scene.plain).state == "done", "the plain verdict")
    assert scene.matter(0, scene.plain).verdict == "FAILED"


def chosen(scene: Scene) -> dict[str, str]:
    """What a person sees in the form and chooses."""
    text = scene.form()
    after = re.search(r'<select id="after".*?<option value="([0-9a-f]{64})"', text, re.DOTALL)
    judge = re.search(r'<option value="([0-9a-f]{64})">Judge Oak, card ([0-9a-f]{16})', text)
    assert after is not None
    assert judge is not None
    assert judge[1] == scene.judge.identity.card().fingerprint()
    assert text.count(judge[1]) == 2  # whole, to compare
    return {"after": after[1], "examiner": judge[1]}


def look(scene: Scene, address: str, name: str) -> None:
    """Pictures of a page, wide and narrow, for whoever looks at them; nothing is wider than the screen."""
    with browser(scene.group.folder / f"profile-{name}") as tab:
        for width in (1100, 360):
            tab.size(width, dark=width == 360)
            tab.go(address)
            assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
            tab.picture(scene.group.folder / f"{name}-{width}.png")
        assert not tab.errors


def test_from_the_form_to_the_examiners_page_and_a_late_answer(scene: Scene) -> None:
    link = visit(f"{scene.pages[0].address}q/{scene.matter(0, scene.plain).digest}")[2]
    assert "Ask by layers" in link
    fields, before = {**FIELDS, **chosen(scene)}, scene.asked()
    if CHROMIUM is None:  # no file: it is the plain question's suspect
        assert send(scene.pages[0].address, body({}, fields), **scene.own(0))[0] == 303
    else:
        with browser(scene.group.folder / "profile") as tab:
            tab.size(360)
            tab.go(f"{scene.pages[0].address}q/{scene.matter(0, scene.plain).digest}")
            tab.press("Ask by layers")
            tab.write("Why do you ask?", FIELDS["purpose"])
            tab.run(f"document.getElementById('examiner').value = '{fields['examiner']}'")
            assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
            tab.picture(scene.group.folder / "ask-by-layers.png")
            tab.press("Ask all members")
            assert not tab.errors
    digest = until(lambda: scene.asked() - before, "the question").pop()
    query = scene.query(digest)
    facts = dict(scene.matter(1, query).facts)
    assert facts["kind of query"].startswith("by layers; equations: 9")
    assert facts["the examiner's card, to compare by phone"] == fields["examiner"]
    assert "9 " in facts["cost"]
    for index in range(3):
        scene.say(index, query)

    judge = scene.judge.desk
    until(lambda: [m for m in judge.matters() if m.kind == "examine" and m.status.startswith("3 of 3")], "the answers")
    (sealed,) = (m for m in judge.matters() if m.kind == "examine")
    assert sealed.state == "waiting"
    assert query.manifest in dict(sealed.facts)["consortium"]
    numbers = f"{scene.pages[4].address}q/{sealed.digest}/numbers.html"
    assert visit(numbers)[0] == 404  # nobody has pressed
    assert "Open the answers" in visit(scene.pages[4].address)[2]
    if CHROMIUM is not None:
        look(scene, scene.pages[4].address, "examiner")
    form = {"about": sealed.digest, "shown": sealed.shown, "say": "yes"}
    assert visit(f"{scene.pages[4].address}decide", "POST", form, **scene.own(4))[0] == 303
    for index in range(4):
        until(lambda index=index: scene.matter(index, query).verdict == "PASSED", "the verdict")  # type: ignore[misc]
    status, headers, text = visit(numbers)
    assert status == 200
    assert headers["content-security-policy"].startswith("sandbox;")
    assert "Layer by layer" in text
    assert "For your eyes" in visit(f"{scene.pages[4].address}q/{sealed.digest}")[2]
    if CHROMIUM is not None:
        look(scene, f"{scene.pages[4].address}q/{sealed.digest}", "examined")
        look(scene, numbers, "numbers")
        look(scene, f"{scene.pages[3].address}q/{scene.matter(3, query).digest}", "late")
    home = scene.judge.home.path
    (kept,) = home.glob("room/*/examined/*.html")
    assert kept.stat().st_mode & 0o777 == 0o600
    for index in range(4):  # on nobody else's page, and in nobody else's home
        place = f"{scene.pages[index].address}q/{scene.matter(index, query).digest}"
        assert visit(f"{place}/numbers.html")[0] == 404
        assert "Numbers by layer" not in visit(place)[2]
        assert not list(scene.group.homes[index][0].path.glob("room/*/examined/*"))
    values = set(re.findall(r"-?[0-9]+\.[0-9]{2}", text))
    assert len(values) >= 9

    scene.say(3, query)  # a late answer: sealed, opened anew, and added
    papers = scene.group.agent(3).report

    def result() -> tuple[int, str]:
        found = papers(scene.matter(3, query).digest)
        assert found is not None
        finding = Certificate.from_bytes(found.certificate.read_bytes()).finding
        return len(finding.partials), finding.verdict

    until(lambda: result() == (4, "PASSED"), "the late answer")
    for member, _ in scene.group.homes:
        ours = member.only_consortium()
        assert Ledger.open(ours, ours.manifest()).opened(query.x) == 9


def test_an_examiner_under_a_members_name_is_the_member_or_nobody(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A room that introduces somebody of its own as Birch, to have answers sealed to it."""
    false = Identity.generate("Birch")
    card = {"format": "quorumark-room-person/v1", "card": false.card().to_bytes().decode(), "examples": 1}
    signature = false.sign("room person", canonical(card)).hex()
    scene.host.put(false.ed25519, "person/1.json", canonical(card | {"signature": signature}))
    people = Place(scene.group.homes[0][0].path).people
    until(lambda: list(people.glob(f"{false.ed25519}-*.json")), "the room's own card")
    assert false.card().fingerprint() not in scene.form()
    assert scene.form().count(">Birch, a member<") == 1
    fields = {**FIELDS, **chosen(scene), "examiner": false.card().fingerprint()}
    before = scene.asked()
    status, text = send(scene.pages[0].address, body({}, fields), **scene.own(0))
    assert (status, "choose the examiner" in text) == (409, True)
    assert scene.asked() == before
    with monkeypatch.context() as patch:  # without the comparison it would be there to choose
        patch.setattr(layering, "_examiners", lambda place, _: [layering.Candidate(c, True) for c in read_cards(place)])
        assert false.card().fingerprint() in scene.form()
    for path in people.glob(f"{false.ed25519}*"):
        path.unlink()


def failed(scene: Scene, seed: int) -> tuple[Path, Query, Certificate]:
    """Another suspect, its plain query, and the certificate, which did not pass."""
    suspect = scene.evaded(seed)
    plain = put_question(scene.group, suspect, answers=3)
    for index in range(3):
        scene.say(index, plain)
    until(lambda: scene.matter(0, plain).verdict == "FAILED", "the plain verdict")
    papers = scene.group.agent(0).report(scene.matter(0, plain).digest)
    assert papers is not None
    return suspect, plain, Certificate.from_bytes(papers.certificate.read_bytes())


def test_a_member_examines_as_well(scene: Scene) -> None:
    _, _, before = failed(scene, 3)
    cedar = scene.group.homes[2][0].card()
    assert f'<option value="{cedar.fingerprint()}">Cedar, a member<' in scene.form()
    fields = {**FIELDS, "after": before.digest(), "examiner": cedar.fingerprint()}
    asked = scene.asked()
    assert send(scene.pages[0].address, body({}, fields), **scene.own(0))[0] == 303
    query = scene.query(until(lambda: scene.asked() - asked, "the question").pop())
    for index in (0, 1, 2):
        scene.say(index, query)
    desk = scene.group.agent(2).desk

    def sealed() -> Matter | None:
        return next((m for m in desk.matters() if m.kind == "examine" and m.state == "waiting"), None)

    matter: Matter = until(lambda: (m := sealed()) and m.status.startswith("3 of 3") and m, "the answers")
    desk.decide(matter.digest, matter.shown, "yes", "person")
    until(lambda: scene.matter(0, query).verdict == "PASSED", "the verdict")
    assert "Layer by layer" in visit(f"{scene.pages[2].address}q/{matter.digest}/numbers.html")[2]


def command(*arguments: str) -> str:
    done = run({**os.environ}, *arguments)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def test_the_word_of_an_examiner_who_is_not_in_the_room_comes_by_a_file(scene: Scene, tmp_path: Path) -> None:
    group = scene.group
    outside, _ = make_home(tmp_path, "Auditor Elm")
    home: HomeFolder = group.homes[0][0]
    suspect, plain, before = failed(scene, 2)
    options: Any = {"answers": 3, "after": before, "examiner": outside.card()}
    query = ask(group.client(0), home, identity(group, 0), suspect, "an auditor", **options)
    for index in range(3):
        scene.say(index, query)
    until(lambda: "Auditor Elm must open them" in scene.matter(0, query).status, "the answers")
    birch = group.homes[1][0]
    examine = ("room", "examine", query.digest()[:16], "--home", str(birch.path))
    assert command(*examine, "--save", str(tmp_path / "sealed")) == f"3 sealed answers are in {tmp_path / 'sealed'}\n"
    sealed = [str(path) for path in sorted((tmp_path / "sealed").glob("partial-*.json"))]
    where = ("--manifest", str(tmp_path / "sealed" / "consortium.json"), "--home", str(outside.path))
    command("verify", "open", str(tmp_path / "sealed" / "query.json"), *sealed, *where, "--out", str(tmp_path / "w"))
    word = (tmp_path / "w").read_bytes()
    forged = word.replace(b'"wrong":[]', b'"wrong":[1]')
    assert forged != word
    for bad, start in ((forged, query.digest()), (word, plain.digest())):
        with pytest.raises(QuorumarkError):
            bring_word(group.client(1), birch, identity(group, 1), start, bad)
    command(*examine, "--word", str(tmp_path / "w"))
    until(lambda: scene.matter(0, query).verdict == "PASSED", "the verdict")
    with pytest.raises(RoomError):
        bring_word(group.client(1), birch, identity(group, 1), "00", word)


def test_a_suspect_that_is_gone_must_be_chosen(scene: Scene) -> None:
    suspects = scene.group.homes[0][0].path / "room" / scene.group.consortium / "suspects"
    before = scene.asked()
    suspects.rename(suspects.with_name("away"))
    try:
        status, text = send(scene.pages[0].address, body({}, {**FIELDS, **chosen(scene)}), **scene.own(0))
        assert status == 404
        assert "choose its file" in text
        assert scene.asked() == before
    finally:
        shutil.rmtree(suspects, ignore_errors=True)
        suspects.with_name("away").rename(suspects)
