"""The member's own page against other pages in the member's browser, and against what changes under its eyes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorumark.consortium.keystore import Unlock
from quorumark.errors import BusyError, RoomError
from quorumark.room.agent import Agent
from quorumark.room.desk import Matter
from quorumark.room.place import Place, Policy, Settings
from tests.kit.rooms import make_home, visit

starlette = pytest.importorskip("starlette")
pytestmark = pytest.mark.room

from quorumark.room.agent_page import AgentPage  # noqa: E402 - after the check that its packages are there

ABOUT = "ab" * 32


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    """An agent whose room is away, with one query before its member."""
    home, unlock = make_home(tmp_path, "Avon")
    Place(home.path).remember(Settings("http://127.0.0.1:9", "00" * 16, 0))
    agent = Agent(home, unlock)
    agent.desk.put(Matter("query", ABOUT, "Is '<b>x</b>' ours?", (("why", "<script>alert(1)</script>"),), "waiting"))
    return agent


@pytest.fixture
def page(agent: Agent) -> Iterator[AgentPage]:
    page = AgentPage(agent)
    page.start()
    yield page
    page.stop()


def form(agent: Agent) -> dict[str, str]:
    matter = agent.desk.find(ABOUT)
    assert matter is not None
    return {"about": ABOUT, "shown": matter.shown, "say": "yes"}


def origin(page: AgentPage) -> str:
    return page.address.rpartition("/")[0].rpartition("/")[0]


def test_a_person_approves(page: AgentPage, agent: Agent) -> None:
    status, headers, text = visit(page.address)
    assert status == 200
    assert "<script>alert" not in text
    assert "<b>x</b>" not in text  # names come from others
    assert not re.findall(r'(?:src|href)="(?!/|#)', text)  # nothing from elsewhere, and no link away
    assert dict(re.findall(r'name="(about|shown)" value="([0-9a-f]+)"', text)) == {
        name: value for name, value in form(agent).items() if name != "say"
    }
    assert headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "same-origin"  # the token is in the address
    assert "set-cookie" not in headers
    assert "access-control-allow-origin" not in headers
    status, headers, _ = visit(page.address + "decide", "POST", form(agent), origin=origin(page))
    assert (status, headers["location"]) == (303, "/" + page.address.split("/")[3] + "/")
    assert agent.desk.said(ABOUT) == ("yes", "person")


HOSTILE = {
    "no origin": {},
    "another site": {"origin": "https://evil.example"},
    "a sandboxed frame": {"origin": "null"},
    "another port of this machine": {"origin": "http://127.0.0.1:80"},
    "a name for this machine": {"origin": "http://localhost:{port}"},
    "a rebound name": {"host": "evil.example:{port}", "origin": "http://evil.example:{port}"},
    "a rebound name with the right origin": {"host": "evil.example:{port}", "origin": "{origin}"},
    "a host without its port": {"host": "127.0.0.1", "origin": "{origin}"},
    "what a browser says of other sites": {"origin": "{origin}", "sec-fetch-site": "cross-site"},
    "what it says of other ports": {"origin": "{origin}", "sec-fetch-site": "same-site"},
    "a frame": {"origin": "{origin}", "sec-fetch-dest": "iframe"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nobody_else_approves_or_reads(
    page: AgentPage, agent: Agent, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = page.address.split(":")[2].split("/")[0]
    headers = {name: text.format(port=port, origin=origin(page)) for name, text in HOSTILE[what].items()}
    status, _, text = visit(page.address + "decide", "POST", form(agent), **headers)
    assert status == 403
    assert text.startswith("room.elsewhere")
    assert agent.desk.said(ABOUT) == ("", "")
    if what != "no origin":  # a GET has none
        status, _, text = visit(page.address, **headers)
        assert status == 403
        assert ABOUT not in text
    # without the check the same request would have been the member's word
    monkeypatch.setattr(AgentPage, "_check", lambda *_: None)
    assert visit(page.address + "decide", "POST", form(agent), **headers)[0] == 303
    assert agent.desk.said(ABOUT) == ("yes", "person")


def test_nothing_without_the_token_and_no_other_ways_in(page: AgentPage, agent: Agent) -> None:
    token = page.address.split("/")[3]
    assert len(token) >= 43
    start, good = origin(page), {"origin": origin(page)}
    for path in ("/", "/x/", f"/{token[:-1]}/", f"/{token}x/", f"/{token}/static/../agent.html", "/static/room.css"):
        status, _, text = visit(start + path)
        assert status in (403, 404), path
        assert ABOUT not in text
    assert visit(start + "/x/decide", "POST", form(agent), **good)[0] == 403
    assert visit(page.address + "decide?about=" + ABOUT, **good)[0] >= 400  # a GET decides nothing
    for kind in ("text/plain", "multipart/form-data", "application/json"):
        assert visit(page.address + "decide", "POST", form(agent), content_type=kind, **good)[0] == 400
    assert agent.desk.said(ABOUT) == ("", "")
    assert Place(agent.home.path).page.stat().st_mode & 0o777 == 0o600


def test_a_decision_is_for_what_was_shown(page: AgentPage, agent: Agent) -> None:
    before = form(agent)
    agent.desk.put(Matter("query", ABOUT, "Is 'x' ours?", (("why", "something else"),), "waiting"))
    status, _, text = visit(page.address + "decide", "POST", before, origin=origin(page))
    assert status == 409
    assert "Nothing was decided" in text
    for wrong in ({"say": "maybe"}, {"about": "cd" * 32}, {"shown": ""}):
        assert visit(page.address + "decide", "POST", form(agent) | wrong, origin=origin(page))[0] == 409
    assert agent.desk.said(ABOUT) == ("", "")
    agent.desk.decide(ABOUT, form(agent)["shown"], "no", "person")
    agent.desk.move(ABOUT, "declined")
    with pytest.raises(RoomError) as caught:
        agent.desk.decide(ABOUT, form(agent)["shown"], "yes", "person")
    assert caught.value.code == "room.not-shown"
    assert agent.desk.said(ABOUT) == ("no", "person")


def test_two_agents_on_one_home_are_noticed(agent: Agent) -> None:
    home, place = agent.home, agent.place
    agent.start()
    try:
        second = Agent(home, _unlock(home.path))
        with pytest.raises(BusyError):
            second.start()
        assert place.joined
    finally:
        agent.stop()


def _unlock(home: Path) -> Unlock:
    return Unlock.key_file(home.parent / f"{home.name}.key")


def test_a_policy_decides_what_it_lists(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(
        json.dumps({"format": "quorumark-room-policy/v1", "agree": [ABOUT], "askers": ["Avon"], "kinds": ["plain"]})
    )
    policy = Policy.read(path)
    assert policy.agrees(ABOUT)
    assert not policy.agrees("cd" * 32)
    assert policy.approves("Avon", "plain", 1)
    assert not policy.approves("Birch", "plain", 1)
    assert not policy.approves("Avon", "aligned", 1)
    assert not policy.approves("Avon", "plain", 2)
    assert not Policy().approves("Avon", "plain", 1)
    for bad in (
        '{"format": "quorumark-room-policy/v1", "kinds": ["by layers"]}',
        '{"format": "quorumark-room-policy/v1", "all": 1}',
    ):
        path.write_text(bad)
        with pytest.raises(Exception, match="policy"):
            Policy.read(path)
