"""Pages for keyboards and screen readers, in a real browser: news take nobody's focus away, and are said."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorumark.canonical import canonical
from quorumark.room.client import Client
from tests.kit.browser import CHROMIUM, Browser, browser
from tests.kit.rooms import Group, put_question, room_on, until

pytest.importorskip("starlette")
pytestmark = [pytest.mark.room, pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")]

from quorumark.room.agent_page import AgentPage  # noqa: E402 - after the check that its packages are there

FIRST, SECOND = "cd" * 32, "ef" * 32


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with room_on(tmp_path / "room") as room:
        made = Group.join(tmp_path / "members", room.address, members=3, threshold=2)
        yield made
        made.stop()


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as made:
        made.size(1100)
        yield made


def put_query(client: Client, query: str, name: str) -> None:
    """What a room shows as a query: it cannot check more of it."""
    client.upload(canonical({"files": [{"name": name}]}), f"query/{query}/query.json")
    word = canonical({"purpose": "a reseller", "answers": 2})
    client.upload((2).to_bytes(4, "big") + b"{}" + bytes(64) + word, f"query/{query}/ask.msg")


def put_verdict(client: Client, query: str, verdict: str) -> None:
    finding = canonical({"predicate": {"verdict": verdict, "z": "21.4", "threshold": "12.0"}})
    envelope = canonical({"payload": base64.b64encode(finding).decode()})
    client.upload(envelope, f"query/{query}/certificate.json")


def test_the_room_s_overview_keeps_the_focus_and_says_what_is_new(group: Group, tab: Browser) -> None:
    client = group.client(0)
    group.terms()
    group.propose()
    put_query(client, FIRST, "first.safetensors")
    tab.go(client.ticket())
    tab.run("document.getElementById('news').mark = document.querySelector('summary').mark = 'as it was'")
    tab.tab_to("Steps of the ceremony")
    tab._key("Enter", 13, "\r")
    tab.wait("document.querySelector('details').open")
    put_query(client, SECOND, "second.safetensors")  # comes above the first one
    tab.wait("document.body.innerText.includes('second.safetensors')")
    assert tab.focused() == "Steps of the ceremony"
    assert tab.run("document.querySelector('summary').mark") == "as it was"  # it was not even replaced
    assert tab.run("document.querySelector('details').open") is True
    assert tab.run("document.getElementById('news').textContent") == "second.safetensors: open"

    tab.run("document.activeElement.blur()")
    tab.run("[...document.querySelectorAll('a')].find(e => e.textContent === 'first.safetensors').focus()")
    put_verdict(client, FIRST, "FAILED")  # in the very row that has the focus
    tab.wait("document.body.innerText.includes('FAILED')")
    assert tab.focused() == "first.safetensors"
    assert tab.run("document.getElementById('news').textContent") == "first.safetensors: FAILED"
    assert tab.run("document.getElementById('news').mark") == "as it was"
    tab.enter()
    assert FIRST in tab.run("location.href")
    assert not tab.errors


def test_a_verdict_is_said_by_a_region_that_was_there_before(group: Group, tab: Browser) -> None:
    client = group.client(0)
    put_query(client, FIRST, "first.safetensors")
    tab.go(client.ticket())
    tab.press("first.safetensors")
    region = "document.getElementById('news')"
    assert tab.run(f"[{region}.getAttribute('role'), {region}.getAttribute('aria-live'), {region}.textContent]") == [
        "status",
        "polite",
        "",
    ]
    tab.run(f"{region}.mark = 'as it was'")
    tab.tab_to("hospitals")
    for number, index in enumerate((0, 1), 1):
        group.client(index).upload(b"{}", f"query/{FIRST}/partial.json")
        tab.wait(f"{region}.textContent === 'open: {number} of 2 answers are there.'")
        assert tab.focused() == "hospitals"
    put_verdict(client, FIRST, "PASSED")
    tab.wait(f"{region}.textContent.startsWith('PASSED: It is theirs: z = 21.4')")
    assert tab.run(f"{region}.mark") == "as it was"
    assert not tab.run("document.querySelector('main [role=status], main [aria-live]')")
    assert tab.run("document.title").startswith("PASSED")
    assert not tab.errors


def test_columns_have_headers_that_say_so(group: Group, tab: Browser) -> None:
    client = group.client(0)
    group.terms()
    group.propose()
    put_query(client, FIRST, "first.safetensors")
    tab.go(client.ticket())
    for page in ("overview", "query"):
        heads = tab.run("[...document.querySelectorAll('th')].map(e => e.scope)")
        assert heads, page
        assert set(heads) <= {"col", "row"}, page
        if page == "overview":
            tab.press("first.safetensors")


def test_by_keyboard_alone_a_member_agrees_and_approves(group: Group, tab: Browser) -> None:
    group.start()
    pages = [AgentPage(agent) for agent in group.agents]
    for page in pages:
        page.start()
    try:
        group.terms()
        group.propose()
        for page in pages:
            tab.go(page.address)
            tab.wait("document.body.innerText.includes('Make a key')")
            tab.tab_to("Agree")
            tab.enter()
            tab.wait("!document.body.innerText.includes('Compare the digest')")
        for index in range(3):
            group.matter(index, "terms", "done")
        tab.go(pages[1].address)
        tab.tab_to("Is this model ours? Ask")  # and stays there while a question comes in
        put_question(group, group.marked(), "offered by a reseller", answers=3)
        tab.wait("document.body.innerText.includes('offered by a reseller')")
        assert tab.focused() == "Is this model ours? Ask"
        assert tab.run("document.getElementById('news').textContent").startswith("1 waiting for you")
        for page in pages:
            tab.go(page.address)
            tab.wait("document.body.innerText.includes('offered by a reseller')")
            tab.tab_to("Approve")
            tab.enter()
        tab.tab_to("Is 'suspect.safetensors' ours?")
        tab.wait("document.body.innerText.includes('PASSED')")
        assert tab.focused() == "Is 'suspect.safetensors' ours?"
        said = "document.getElementById('news').textContent"
        until(lambda: "PASSED" in tab.run(said), "the verdict is said")
        tab.enter()
        tab.tab_to("Report to read and print")
        assert not tab.errors
    finally:
        for page in pages:
            page.stop()
