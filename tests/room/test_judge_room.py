"""What a judge gets by a link, years later: the files and the command of a query's page confirm its certificate, also
of one under an earlier manifest. On a member's own page old results stay, too."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest

from quorumark.consortium.home import ConsortiumFolder
from quorumark.consortium.records import Manifest
from quorumark.room.agent_page import AgentPage
from quorumark.room.calls import put_call
from quorumark.room.desk import Matter
from quorumark.setup import amend
from quorumark.verify.certificate import Certificate
from tests.kit.commands import run
from tests.kit.rooms import Group, RoomProcess, identity, put_question, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room
AVON, BIRCH, CEDAR = range(3)


def ours(group: Group, index: int = AVON) -> ConsortiumFolder:
    return group.homes[index][0].only_consortium()


class Browser:
    """Follows a link, and saves what a page offers."""

    def __init__(self, room: RoomProcess, link: str) -> None:
        self._room = room
        status, headers, _ = visit(link)
        assert status == 303, link
        self.cookie = headers["set-cookie"].partition(";")[0]
        self.place = headers["location"]

    def look(self, place: str = "") -> tuple[int, str]:
        status, _, text = visit(urljoin(self._room.address, place or self.place), cookie=self.cookie)
        return status, text

    def save(self, folder: Path) -> str:
        """All that the page has for a judge, into one folder, as browsers save it; the page."""
        folder.mkdir()
        status, text = self.look()
        assert status == 200
        for place, name in re.findall(r'href="([^"]+)" download="([^"]+)"', text):
            assert "/" not in name
            found, content = self.look(place)
            assert found == 200, place
            (folder / name).write_bytes(content.encode("utf-8") if name.endswith(".json") else self._bytes(place))
        return text

    def _bytes(self, place: str) -> bytes:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self._room.port, timeout=30)
        connection.request("GET", place, headers={"cookie": self.cookie})
        data = connection.getresponse().read()
        connection.close()
        return data


class Scene:
    """Three members: a key, a certificate, new shares, another certificate, and one of the three leaves."""

    def __init__(self, folder: Path, room: RoomProcess) -> None:
        self.folder, self.room = folder, room
        self.group = Group.join(folder / "members", room.address, members=3, threshold=2)
        self.group.start()
        self.group.found()
        self.suspects = [self.group.marked("first.safetensors", seed=1)]
        self.queries = [self._certified(self.suspects[0])]
        self.manifests = [ours(self.group).manifest()]
        self._changed(AVON, BIRCH, CEDAR)
        self.suspects.append(self.group.marked("second.safetensors", seed=2))
        self.queries.append(self._certified(self.suspects[1]))
        self.manifests.append(ours(self.group).manifest())
        amended = amend.propose(self.manifests[-1].terms, removed=[3])
        self._changed(AVON, BIRCH, terms=amended, new_shares=True)
        self.manifests.append(ours(self.group).manifest())

    def _certified(self, suspect: Path) -> str:
        query = put_question(self.group, suspect, answers=3).digest()
        for index in (AVON, BIRCH, CEDAR):
            one = until(self.find(index, query, "waiting"), "the query")
            self.group.agent(index).desk.decide(one.digest, one.shown, "yes", "person")
        for index in (AVON, BIRCH, CEDAR):
            assert until(self.find(index, query, "done"), "the verdict").verdict == "PASSED"
        return query

    def find(self, index: int, query: str, state: str) -> Callable[[], Matter | None]:
        desk = self.group.agent(index).desk
        return lambda: next(
            (m for m in desk.matters() if dict(m.facts).get("query") == query and m.state == state), None
        )

    def _changed(self, *indices: int, **options: object) -> None:
        home, unlock = self.group.homes[AVON]
        about = put_call(self.group.client(AVON), home, unlock, ours(self.group), "as agreed", **options).digest()  # type: ignore[arg-type]
        for index in indices:
            desk = self.group.agent(index).desk
            until(lambda desk=desk: (one := desk.find(about)) and one.state == "waiting", "the call")  # type: ignore[misc]
            one = desk.find(about)
            assert one is not None
            desk.decide(about, one.shown, "yes", "person")
        for index in indices:
            desk = self.group.agent(index).desk
            until(lambda desk=desk: (one := desk.find(about)) and one.state == "done", "the change")  # type: ignore[misc]
        name = f"manifest/{ours(self.group).manifest().digest().hex()}.json"
        keys = {identity(self.group, index).ed25519 for index in indices}
        client = self.group.client(AVON)
        until(lambda: keys <= {one.author for one in client.whole_log() if one.name == name}, "it is in the room")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("judge")
    with room_on(folder / "room") as room:
        made = Scene(folder, room)
        yield made
        made.group.stop()


@pytest.mark.parametrize("number", [0, 1])
def test_the_printed_command_confirms_each_certificate_after_the_manifest_changed(
    scene: Scene, environment: dict[str, str], tmp_path: Path, number: int
) -> None:
    """The page has the manifest that the query is about, and all before it; and it shows the members of that time."""
    link = scene.group.client(AVON).link(f"court {number}", scene.queries[number], 3)
    text = Browser(scene.room, link).save(tmp_path / "saved")
    (command,) = (html.unescape(found) for found in re.findall(r"<pre>(quorumark verify check [^<]+)</pre>", text))
    words = shlex.split(command)[1:]
    saved = tmp_path / "saved"
    files = [str(saved / word) if word.endswith(".json") else word for word in words]
    done = run(environment, *(str(scene.suspects[number]) if word == "SUSPECT" else word for word in files))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "PASSED" in done.stdout
    manifest = Manifest.from_bytes((saved / "consortium.json").read_bytes())
    assert manifest.digest() == scene.manifests[number].digest()
    rows = re.findall(r"<tr><td>(\w+)</td>", text)
    assert rows == ["Avon", "Birch", "Cedar"]  # Cedar has left since
    assert len(scene.manifests[-1].terms.roster) == 2
    # without a file of the chain the command says which one it lacks
    for earlier in scene.manifests[:number]:
        (saved / f"{earlier.digest().hex()[:16]}.json").unlink()
        failed = run(environment, *files[:-2])
        assert failed.returncode == 2
        assert earlier.digest().hex()[:16] in failed.stderr


def test_a_link_gives_the_manifests_and_no_other_query(scene: Scene) -> None:
    group, room = scene.group, scene.room
    judge = Browser(room, group.client(AVON).link("a court", scene.queries[0], 3))
    start = f"/c/{group.consortium}"
    names = [f"{start}/manifest/{one.digest().hex()[:16]}.json" for one in scene.manifests]
    for place, one in zip(names, scene.manifests, strict=True):
        status, text = judge.look(place)
        assert status == 200
        assert Manifest.from_bytes(text.encode()).digest() == one.digest()
    assert judge.look(f"{start}/manifest/{'0' * 16}.json")[0] == 404
    assert judge.look(f"{start}/q/{scene.queries[1]}/consortium.json")[0] == 403
    status, text = visit(room.address + names[0])[::2]
    assert status == 403
    assert "roster" not in text


def results(scene: Scene, index: int) -> list[str]:
    """The reports of both queries, as the member's own page gives them; the certificates beside them are right."""
    page, reports = AgentPage(scene.group.agent(index)), []
    page.start()
    try:
        for number, query in enumerate(scene.queries):
            one = until(scene.find(index, query, "done"), "the old verdict")
            assert one.verdict == "PASSED"
            status, _, text = visit(f"{page.address}q/{one.digest}")
            assert status == 200
            offered = [name for name in re.findall(r'href="([^"]+)"', text) if f"/q/{one.digest}/" in name]
            assert [name.rpartition("/")[2] for name in offered] == ["report.html", "certificate.json"]
            found = [visit(urljoin(page.address, place)) for place in offered]
            assert [status for status, _, _ in found] == [200, 200]
            report, certificate = (text for _, _, text in found)
            finding = Certificate.from_bytes(certificate.encode()).finding
            assert finding.query.digest() == query
            assert finding.query.manifest == scene.manifests[number].digest().hex()
            assert "PASSED" in report
            assert "Cedar" in report
            reports.append(report)
    finally:
        page.stop()
    return reports


def test_a_report_that_is_first_read_after_the_manifest_changed(scene: Scene) -> None:
    """A member that did not ask makes the report when it is read: by the query's manifest, not by the one in force."""
    folder = scene.group.homes[BIRCH][0].path / "room" / scene.group.consortium / "certificates"
    for path in folder.glob("*/report*.html"):
        path.unlink()
    for report in results(scene, BIRCH):
        assert "the suspect&#39;s files are those" in report


@pytest.mark.parametrize("suspect", ["kept", "gone"])
def test_old_results_stay_on_the_members_own_page_after_a_restart(scene: Scene, suspect: str) -> None:
    """The query is about an earlier manifest: its certificate and report are there all the same. Without the suspect
    the report says that it was not compared."""
    group = scene.group
    agent = group.agent(BIRCH)
    agent.stop()
    group.agents.remove(agent)
    home = group.homes[BIRCH][0].path / "room" / group.consortium
    for query in scene.queries:
        for name in ("report.html", "certificate.json"):
            (home / "certificates" / query / name).unlink(missing_ok=True)
        for path in (home / "suspects" / query).iterdir():
            if suspect == "gone":
                path.unlink()
    group.start(BIRCH)
    for report in results(scene, BIRCH):
        assert ("the suspect&#39;s files are those" in report) == (suspect == "kept")
        assert ("the canonical form was computed again" in report) == (suspect == "kept")
        assert ("the suspect was not given" in report) == (suspect == "gone")
