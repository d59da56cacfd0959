"""A person walks through it with a real browser: founding, asking, approving, the verdict, the judge's link."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.browser import CHROMIUM, Browser, browser, kept_pictures, no_wider_than_the_screen
from tests.kit.rooms import Group, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = [pytest.mark.room, pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")]

from quorumark.room.agent_page import AgentPage  # noqa: E402 - after the check that its packages are there


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return kept_pictures(tmp_path)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with room_on(tmp_path / "room") as room:
        made = Group.join(tmp_path / "members", room.address, members=5, threshold=3)
        made.start()
        yield made
        made.stop()


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
            assert second.run("document.querySelector('noscript a').textContent") == "Look again"  # they are off
            second.press("Approve")
            second.without_scripts(False)
            assert group.agent(2).desk.said(group.matter(2, "query", "working").digest) == ("yes", "person")
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

        # another model: it is not theirs; asked and answered with scripts switched off
        tab.without_scripts()
        tab.go(pages[3].address)
        tab.press("Is this model ours? Ask")
        tab.choose("The model in question", group.marked("other.safetensors", rho=0.0, seed=2))
        tab.write("Why do you ask?", "found on a forum")
        tab.run("document.getElementById('answers').value = '3'")
        tab.press("Ask all members")
        for index in (1, 2, 3):
            until(lambda index=index: "found on a forum" in visit(pages[index].address)[2], "the question")  # type: ignore[misc]
            tab.go(pages[index].address)
            assert tab.run("document.querySelector('noscript a').textContent") == "Look again"
            tab.press("Approve")
        until(lambda: "FAILED" in visit(pages[3].address)[2], "the verdict")
        tab.press("Look again")
        assert "FAILED" in tab.text()
        tab.without_scripts(False)
        assert not tab.errors

        # two members only: no verdict comes, and the pages say so
        tab.go(pages[0].address)
        tab.press("Is this model ours? Ask")
        tab.choose("The model in question", group.marked("third.safetensors", seed=3))
        tab.write("Why do you ask?", "in an app store")
        tab.run("document.getElementById('answers').value = '3'")
        tab.press("Ask all members")
        tab.go(group.client(1).ticket())
        tab.wait("document.querySelectorAll('td a').length === 3")
        tab.press("suspect.safetensors")  # the latest is the first
        tab.wait("document.body.innerText.includes('in an app store')")
        with browser(tmp_path / "people") as second:
            second.size(1100)
            for index in range(5):
                second.go(pages[index].address)
                second.wait("document.body.innerText.includes('in an app store')")
                second.press("Approve" if index < 2 else "Decline")
            tab.wait("document.body.innerText.includes('no verdict can come of it')")  # live
            assert "2 of 3 answers are there; Cedar, Delta, Elm declined." in tab.text()
            assert tab.run("document.getElementById('news').textContent").startswith("open: 2 of 3 answers are there;")
            tab.picture(pictures / "room-two-only.png")
            second.go(pages[0].address)
            query = tab.run("location.href").rpartition("/")[2]
            matter = next(m for m in group.agent(0).desk.matters() if dict(m.facts).get("query") == query)
            second.go(f"{pages[0].address}q/{matter.digest}")
            second.wait("document.body.innerText.split('declined').length === 4")
            said = second.text()
            assert "you approved; 2 of 3 answers (Avon, Birch)" in said
            second.picture(pictures / "agent-two-only.png")
            for text in (said, tab.text()):
                assert not [word for word in ("PASSED", "FAILED", "INCONCLUSIVE", "certificate.json") if word in text]

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

        every_page_on_a_telephone(tab, group, pages, pictures)
    for page in pages:
        page.stop()


def every_page_on_a_telephone(tab: Browser, group: Group, pages: list[AgentPage], pictures: Path) -> None:
    """Nothing is wider than 360 pixels: the agent's pages, the room's, and those that say no."""
    own, ticket = pages[0].address, group.client(0).ticket()
    asked = next(m for m in group.agent(0).desk.matters() if m.verdict == "PASSED")
    terms = next(m for m in group.agent(0).desk.matters() if m.kind == "terms")
    room = f"{group.address}/c/{group.consortium}"
    query = f"{room}/q/{dict(asked.facts)['query']}"
    addresses = {
        "agent": own,
        "agent-ask": f"{own}ask",
        "agent-done": f"{own}q/{asked.digest}",
        "agent-report": f"{own}q/{asked.digest}/report.html",
        "room": ticket,
        "room-ceremony": f"{room}/ceremony/{terms.digest}",
        "room-audits": f"{room}/audits",
        "room-ledger": f"{room}/ledger",
        "room-manifests": f"{room}/manifests",
        "room-query": query,
        "room-report": f"{query}/report",
        "room-welcome": f"{group.address}/",
        "room-refused": f"{group.address}/c/{'00' * 16}",
    }

    def look(name: str) -> None:
        for width, dark in ((360, False), (360, True), (1100, False), (1100, True)):
            tab.size(width, 740 if width == 360 else 900, dark=dark)
            assert no_wider_than_the_screen(tab), (name, width)
            tab.picture(pictures / f"page-{name}-{width}{'-dark' if dark else ''}.png")
        tab.size(360, 740)

    for name, address in addresses.items():
        tab.go(address)
        assert tab.run("document.querySelector('h1') !== null"), name
        look(name)
    tab.go(own)
    tab.press("Open the room")
    look("agent-ticket")
    # what is decided already: a form that was left open
    tab.go(own)
    form = f'<form method="post" action="{own}decide"><input name="about" value="{asked.digest}">'
    form += '<input name="shown" value="x"><input name="say" value="yes"><button>Send</button></form>'
    tab.run(f"document.querySelector('main').innerHTML = {json.dumps(form)}")
    tab.press("Send")
    assert "Look again" in tab.text()
    look("agent-changed")
