"""A person walks through it with a real browser: founding, asking, approving, the verdict, the judge's link."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.browser import CHROMIUM, Browser, browser
from tests.kit.rooms import Group, room_on, until

pytest.importorskip("starlette")
pytestmark = [pytest.mark.room, pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")]

from quorumark.room.agent_page import AgentPage  # noqa: E402 - after the check that its packages are there


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where pictures go: kept, if ROOM_PICTURES says where."""
    folder = Path(os.environ.get("ROOM_PICTURES", str(tmp_path / "pictures")))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with room_on(tmp_path / "room") as room:
        made = Group.join(tmp_path / "members", room.address, members=5, threshold=3)
        made.start()
        yield made
        made.stop()


def no_wider_than_the_screen(tab: Browser) -> bool:
    return bool(tab.run("document.documentElement.scrollWidth <= window.innerWidth"))


def test_a_person_walks_through(group: Group, pictures: Path, tmp_path: Path) -> None:
    pages = [AgentPage(agent) for agent in group.agents]
    for page in pages:
        page.start()
    group.terms()
    digest = group.propose()
    with browser(tmp_path / "profile") as tab:
        tab.size(1100)
        for number, page in enumerate(pages):
            tab.go(page.address)
            tab.wait("document.body.innerText.includes('Make a key')")
            assert digest in tab.text()
            assert "3 of 5 to prove ownership" in tab.text()
            if number == 0:
                tab.picture(pictures / "agent-terms.png")
            tab.press("Agree")
        for index in range(5):
            group.matter(index, "terms", "done")
        # Avon drops a file on its page
        tab.go(pages[0].address)
        tab.press("Is this model ours? Ask")
        tab.choose("The model in question", group.marked())
        tab.write("Why do you ask?", "offered by a reseller")
        tab.run("document.getElementById('answers').value = '3'")
        tab.picture(pictures / "agent-ask.png")
        tab.size(360, 740, dark=True)
        assert no_wider_than_the_screen(tab)
        tab.picture(pictures / "agent-ask-narrow.png")
        tab.size(1100)
        tab.press("Ask all members")
        tab.wait("document.body.innerText.includes('who asks')")  # live

        # Birch watches the room, from its own page
        tab.go(pages[1].address)
        tab.press("Open the room")
        tab.press("Open the room's page")
        tab.wait("document.body.innerText.includes('any 3 of them')")
        tab.picture(pictures / "room-overview.png")
        tab.press("suspect.safetensors")
        tab.wait("document.body.innerText.includes('0 of 3 answers')")
        with browser(tmp_path / "other") as second:
            second.size(1100)
            for index in (0, 1):
                second.go(pages[index].address)
                second.wait("document.body.innerText.includes('Is ')")
                if index == 0:
                    second.picture(pictures / "agent-query.png")
                second.press("Approve")
            second.go(pages[4].address)
            second.press("Decline")
            tab.wait("document.body.innerText.includes('2 of 3 answers')")  # live
            tab.wait("document.body.innerText.includes('declined')")
            assert "PASSED" not in tab.text()  # two are not enough
            second.size(360, 740, dark=True)
            second.go(pages[2].address)
            second.wait("document.body.innerText.includes('Approve')")
            assert no_wider_than_the_screen(second)
            second.picture(pictures / "agent-query-narrow.png")
            second.without_scripts()  # all but the news works without them
            second.go(pages[2].address)
            second.without_scripts(False)
            second.press("Approve")
            assert not second.errors
        tab.wait("document.body.innerText.includes('PASSED')")  # it appears by itself
        tab.wait("document.body.innerText.includes('Report to read')")
        tab.picture(pictures / "room-passed.png")
        assert not tab.errors
        tab.press("Report to read and print")
        assert "PASSED" in tab.text()
        tab.errors.clear()

        # and on the page of a member who declined, with a report of its own agent
        tab.go(pages[4].address)
        tab.press("Is 'suspect.safetensors' ours?")
        tab.wait("document.body.innerText.includes('PASSED')")
        tab.wait("document.body.innerText.includes('answered and signed')")
        assert "declined" in tab.text()
        tab.picture(pictures / "agent-passed.png")
        assert not tab.errors
        tab.press("Report to read and print")
        assert "PASSED" in tab.text()
        tab.errors.clear()

        # another model: three answer, and it is not theirs
        tab.go(pages[3].address)
        tab.press("Is this model ours? Ask")
        tab.choose("The model in question", group.marked("other.safetensors", rho=0.0, seed=2))
        tab.write("Why do you ask?", "found on a forum")
        tab.run("document.getElementById('answers').value = '3'")
        tab.press("Ask all members")
        for index in (1, 2, 3):
            tab.go(pages[index].address)
            tab.wait("document.body.innerText.includes('found on a forum')")
            tab.press("Approve")
        tab.wait("document.body.innerText.includes('FAILED')")  # live, on the asker's own page
        assert not tab.errors

        # a judge's link, on a telephone
        query = next(dict(m.facts)["query"] for m in group.agent(0).desk.matters() if m.verdict == "PASSED")
        link = group.client(0).post("link", label="court", query=query, days=1)["link"]
        with browser(tmp_path / "judge") as judge:
            judge.size(360, 740)
            judge.go(link)
            assert "PASSED" in judge.text()
            assert "certificate.json" in judge.text()
            assert no_wider_than_the_screen(judge)
            judge.picture(pictures / "judge-narrow.png")
            group.client(0).post("unlink", label="court")
            judge.go(judge.run("location.href"))
            assert "PASSED" not in judge.text()
    for page in pages:
        page.stop()


EVIL = """<!doctype html><title>evil</title><iframe src="{address}"></iframe>
<form id="f" method="post" action="{address}decide" target="out">
<input name="about" value="{about}"><input name="shown" value="{shown}"><input name="say" value="yes"></form>
<iframe name="out"></iframe><script>
document.getElementById("f").submit();
fetch("{address}decide", {{method: "POST", mode: "no-cors", body: new URLSearchParams({{about: "{about}",
  shown: "{shown}", say: "yes"}})}}).catch(() => 0);
const form = new FormData();
form.append("suspect", new File(["12345678"], "x.safetensors"));
for (const [name, text] of [["purpose", "evil"], ["kind", "plain"], ["answers", "3"]]) form.append(name, text);
fetch("{address}ask", {{method: "POST", mode: "no-cors", body: form}}).catch(() => 0);
fetch("{address}").then(r => r.text()).then(t => document.title = "read " + t.length)
  .catch(() => document.title = "nothing");
</script>"""


def test_a_hostile_page_in_the_same_browser_gets_nothing_even_with_the_address(group: Group, tmp_path: Path) -> None:
    """It is given the whole address, which it could not guess, and tries frames, forms and fetch, from a file and from
    another port of the same machine."""
    import functools
    import threading
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    page = AgentPage(group.agent(1))
    page.start()
    group.terms()
    group.propose()
    matter = group.matter(1, "terms")
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.html").write_text(EVIL.format(address=page.address, about=matter.digest, shown=matter.shown))

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browser(tmp_path / "profile") as tab:
            for address in (f"http://127.0.0.1:{server.server_port}/evil.html", (folder / "evil.html").as_uri()):
                tab.go(address)
                tab.wait("document.title !== 'evil'")
                assert tab.run("document.title") == "nothing"
                assert group.agent(1).desk.said(matter.digest) == ("", "")
                assert not list((group.homes[1][0].path / "room" / group.consortium).glob("drafts/*"))
            tab.go(page.address)
            tab.press("Agree")  # the member itself can
        until(lambda: group.agent(1).desk.said(matter.digest) == ("yes", "person"), "the member's own word")
    finally:
        server.shutdown()
        server.server_close()
        page.stop()
