"""The room's pages about what comes after the founding: ceremonies live, audits, the ledger, manifests. What a member
puts there in another's name, or beside what it says, is not shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from quorumark.canonical import canonical
from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.identity import Header
from quorumark.room.auditing import bring_audit
from quorumark.room.calls import Call
from quorumark.room.notices import RESHARING
from quorumark.setup.reshare import ReshareMember
from quorumark.verify.certificate import Certificate
from quorumark.verify.ledger import Ledger
from tests.kit.browser import CHROMIUM, Browser, browser, kept_pictures, no_wider_than_the_screen
from tests.kit.rooms import Group, identity, put_question, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room

from quorumark.room.agent_page import AgentPage  # noqa: E402 - after the check that its packages are there

AVON, BIRCH, CEDAR, DELTA = range(4)


class Scene:
    """Four members, two of whom prove ownership; three answered about a suspect."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.query = put_question(group, group.marked(), answers=3).digest()
        for index in (AVON, BIRCH, CEDAR):
            group.decide(index, "query")
        for index in range(4):
            group.matter(index, "query", "done")
        self.manifest = self._ours(AVON).manifest()

    def _ours(self, index: int) -> ConsortiumFolder:
        return self.group.homes[index][0].only_consortium()

    def audit(self) -> str:
        """Avon brings an audit; Avon and Birch open."""
        path = next(self.group.homes[AVON][0].path.glob("room/*/certificates/*/certificate.json"))
        home, client = self.group.homes[AVON][0], self.group.client(AVON)
        certificate, coin = Certificate.from_bytes(path.read_bytes()), bytes([7]) * 32
        made = bring_audit(
            client, home, identity(self.group, AVON), certificate, "the court", coin, "a beacon's pulse 1"
        )
        return made.digest()

    def agree(self, index: int, call: str) -> None:
        desk = self.group.agent(index).desk
        until(lambda: (one := desk.find(call)) is not None and one.state == "waiting", "the call waits")
        matter = desk.find(call)
        assert matter is not None
        desk.decide(call, matter.shown, "yes", "person")

    def lines(self, index: int) -> int:
        return len(Ledger.open(self._ours(index), self._ours(index).manifest()).lines)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("pages")
    with room_on(folder / "room") as room:
        group = Group.join(folder / "members", room.address, members=4, threshold=2)
        group.start()
        group.found()
        yield Scene(group)
        group.stop()


class Reader:
    """A member who reads the room's pages, without a browser."""

    def __init__(self, group: Group, index: int = DELTA) -> None:
        ticket = group.client(index).ticket()
        _, headers, _ = visit(ticket)
        self._cookie, parts = headers["set-cookie"].partition(";")[0], urlsplit(ticket)
        self._place = f"{parts.scheme}://{parts.netloc}/c/{group.consortium}"

    def status(self, page: str) -> int:
        return visit(f"{self._place}/{page}".rstrip("/"), cookie=self._cookie)[0]

    def read(self, page: str) -> str:
        status, _, text = visit(f"{self._place}/{page}".rstrip("/"), cookie=self._cookie)
        assert status == 200, text
        return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", text.partition("<main")[2]))


def test_the_steps_are_those_of_the_ceremony() -> None:
    assert RESHARING == ReshareMember.STEPS


def test_nobody_else_s_word_counts_on_these_pages(scene: Scene) -> None:
    """Mallory is Delta, who is a member; it writes calls and openings in names of others, or that are none."""
    group, mallory = scene.group, scene.group.client(DELTA)
    reader, before = Reader(group), Reader(group).read("")
    manifest = scene.manifest.digest().hex()
    point = scene.manifest.terms.point_of(identity(group, AVON).ed25519)

    def put_call_of(caller: str, name: str = "", of: str = manifest) -> str:
        call = Call("refresh", caller, of, "", "", (), "give me your shares", "ab" * 16)
        about = name or call.digest()
        header = Header(of, call.digest(), "room/call", point)
        mallory.upload(identity(group, DELTA).write(header, call.to_bytes()), f"call/{about}/call.msg")
        return about

    avon, own = identity(group, AVON).ed25519, identity(group, DELTA).ed25519
    false = [put_call_of(avon), put_call_of(own, name="77" * 32), put_call_of(own, of="66" * 32)]
    mallory.upload(canonical({"query": scene.query, "manifest": manifest}), f"audit/{'55' * 32}/challenge.json")
    for about in false:
        assert reader.status(f"ceremony/{about}") == 404
    assert "give me" not in reader.read("")
    assert "Nobody" not in before
    assert "There is none" in reader.read("audits")
    right = put_call_of(own)  # the control: in its own name, about the manifest in force
    assert "give me your shares" in reader.read(f"ceremony/{right}")
    # and its messages count as its own, not as those that they are called
    mallory.upload(b"x", f"call/{right}/1-commit/{point}.msg")
    assert "commit 0 of 4 – reveal" in reader.read(f"ceremony/{right}")
    mallory.upload(b"x", f"call/{right}/1-commit/4.msg")
    assert "commit 1 of 4 Delta reveal" in reader.read(f"ceremony/{right}")
    # a head that is another member's is not one of Delta's
    head = f"query/{'99' * 32}/head.json"
    name = f"query/{scene.query}/head.json"
    theirs = next(one for one in group.client(AVON).whole_log() if one.name == name and one.author == avon)
    mallory.upload(group.client(AVON).small(theirs, 1 << 20), head)
    ledger = reader.read("ledger")
    assert "999999999999" not in ledger
    assert "suspect.safetensors" in ledger
    theirs = next(one for one in mallory.whole_log() if one.name == name and one.author == own)
    mallory.upload(mallory.small(theirs, 1 << 20), f"query/{'88' * 32}/head.json")
    assert "888888888888… member" in reader.read("ledger")  # the control: its own, though nobody knows the query
    link = group.client(AVON).post("link", label="one query", query=scene.query, days=1)["link"]
    cookie = visit(link)[1]["set-cookie"].partition(";")[0]
    place = link.partition("/open/")[0] + f"/c/{group.consortium}"
    for page in ("audits", "ledger", "manifests", f"ceremony/{right}"):
        assert visit(f"{place}/{page}", cookie=cookie)[0] == 403  # who was sent one query sees that one
        assert visit(f"{place}/{page}")[0] == 403
    assert visit(f"{place}/q/{scene.query}", cookie=cookie)[0] == 200


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_an_audit_a_refresh_and_the_ledger_are_seen_live(scene: Scene, tmp_path: Path) -> None:
    group, pictures = scene.group, kept_pictures(tmp_path)

    def pages(tab: Browser, name: str) -> None:
        for width, dark in ((1100, False), (1100, True), (360, False), (360, True)):
            tab.size(width, 900 if width > 400 else 740, dark=dark)
            assert no_wider_than_the_screen(tab), (name, width)
            tab.picture(pictures / f"room-{name}-{width}{'-dark' if dark else ''}.png")
        tab.size(1100)

    with browser(tmp_path / "profile") as tab:
        tab.size(1100)
        tab.go(group.client(CEDAR).ticket())
        tab.press("Ledger")
        pages(tab, "ledger")
        assert "suspect.safetensors, plain" in tab.text()
        # when it had answered: the second line came with its signature
        tab.wait("/Birch\\s+0\\s+1\\s/.test(document.body.innerText)")
        until(lambda: scene.lines(BIRCH) == 2, "Birch's lines: its answer, and its signature")
        tab.wait("/Birch\\s+2\\s+[0-9a-f]{16}…\\s+1 of 16 equations/.test(document.body.innerText)")  # live

        tab.press("Audits")
        assert "There is none" in tab.text()
        about = scene.audit()
        tab.wait("document.body.innerText.includes('0 of 2 have opened')")  # live
        for number, index in enumerate((AVON, BIRCH), 1):
            group.decide(index, "audit")
            tab.wait(
                f"document.body.innerText.includes({f'{number} of 2 have opened' if number < 2 else 'proof.json'!r})"
            )
        said = tab.text()
        assert "a beacon's pulse 1" in said
        assert "07" * 32 in said
        assert "Avon, Birch; 2 of 4 must" in said
        assert tab.run("document.getElementById('news').textContent").endswith("opened")
        pages(tab, "audits")
        assert tab.run(f"fetch('audit/{about}/proof.json').then(r => r.status)") == 200
        tab.press("suspect.safetensors")
        assert "PASSED" in tab.text()
        pages(tab, "query")

        # Avon calls for new shares, on its own page, and decides as everybody else
        page = AgentPage(group.agent(AVON))
        page.start()
        tab.go(page.address)
        tab.tab_to("Make new shares for the same members")
        tab._key("Enter", 13, "\r")
        tab.write("Why?", "once a year")
        pages(tab, "agent-call")
        tab.press("Call all members")
        tab.wait("document.body.innerText.includes('Make new shares for all members')")
        page.stop()
        called = [
            one
            for one in group.agent(AVON).desk.matters()
            if one.kind == "call" and "once a year" in dict(one.facts).values()
        ]
        (call,) = (one.digest for one in called)
        assert group.agent(AVON).desk.said(call) == ("", "")
        tab.go(group.client(CEDAR).ticket())
        tab.press("New shares for the same members")
        tab.wait("document.body.innerText.includes('once a year')")
        assert tab.run("document.querySelector('.verdict strong').textContent") == "called"
        for index in (AVON, BIRCH, CEDAR):
            scene.agree(index, call)
        tab.wait("document.querySelector('.verdict strong').textContent === 'under way'")  # live
        tab.wait("document.querySelector('progress').value === 3")
        pages(tab, "ceremony")
        scene.agree(DELTA, call)
        tab.wait("document.querySelector('.verdict strong').textContent === 'in force'")
        assert "4 of 4" in tab.text()
        assert tab.run("[...document.querySelectorAll('progress')].every(e => e.value === 4)")
        assert tab.run("document.getElementById('news').textContent")
        tab.press("Manifests")
        said = tab.text()
        assert said.index("epoch 1") < said.index("epoch 0")
        first = f"{scene.manifest.digest().hex()[:16]}.json"
        assert tab.run(f"fetch('manifest/{first}').then(async r => (await r.text()).length > 0 && r.status)") == 200
        assert scene.manifest.digest().hex() in said
        pages(tab, "manifests")
        tab.press("Overview")
        assert tab.run("document.querySelector('nav [aria-current]').textContent") == "Overview"
        pages(tab, "overview")
        states = "[...document.querySelectorAll('[data-say^=\"New shares\"]')].map(e => e.textContent)"
        assert tab.run(states) == ["in force", "over"]  # what only Delta called for came to nothing
        assert not tab.errors
