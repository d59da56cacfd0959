"""What members' agents sign about their shares and ledgers; and a home that was set back, noticed by it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorumark.errors import QuorumarkError
from quorumark.room.asking import ask
from quorumark.room.heads import accept_ledger
from quorumark.room.statement import PURPOSE, Standing, name_of
from quorumark.verify.ledger import Ledger
from tests.kit.rooms import Group, room_on, until, visit

pytest.importorskip("starlette")
pytestmark = pytest.mark.room


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("standing")
    with room_on(folder / "room") as room:
        made = Group.join(folder / "members", room.address, members=3, threshold=2)
        made.start()
        made.found()
        yield made
        made.stop()


def said(group: Group, index: int) -> list[Standing]:
    """All that a member said, in the room's order."""
    key, client = group.homes[index][0].card().ed25519, group.client(0)
    found = []
    for one in client.whole_log():
        if one.name.startswith("standing/") and one.author == key:
            with contextlib.suppress(QuorumarkError):  # what somebody else signed
                found.append(Standing.read(client.small(one, 4096), key))
    return found


def answered(group: Group, name: str, seed: int) -> None:
    """A query that Avon and Birch answer."""
    home, unlock = group.homes[0]
    query = ask(group.client(0), home, home.identity(unlock), group.marked(name, seed=seed), "why", answers=2)

    def waits(index: int) -> bool:
        desk = group.agent(index).desk
        for one in desk.matters():
            if dict(one.facts).get("query") == query.digest() and one.state == "waiting":
                desk.decide(one.digest, one.shown, "yes", "person")
                return True
        return False

    for index in (0, 1):
        until(lambda index=index: waits(index), "the query")  # type: ignore[misc]
    desk = group.agent(1).desk
    until(lambda: [m for m in desk.matters() if m.verdict and dict(m.facts).get("query") == query.digest()], "done")


def test_members_say_how_their_shares_are_and_the_room_shows_what_they_signed(group: Group) -> None:
    manifest = group.homes[0][0].only_consortium().manifest()
    for index in range(3):
        first = until(lambda index=index: said(group, index), "its word")[0]  # type: ignore[misc]
        assert (first.manifest, first.epoch, first.share) == (manifest.digest().hex(), 0, "sound")
        assert (first.entries, first.used, first.stamps) == (0, 0, 0)
    answered(group, "one.safetensors", 1)
    ours = group.homes[1][0].only_consortium()
    until(lambda: said(group, 1)[-1].head == Ledger.open(ours, manifest).head, "Birch's ledger has grown")
    assert said(group, 1)[-1].used == 1
    # on the room's page; and a word that somebody else signed is not there
    genesis = manifest.genesis.terms
    lie = Standing(genesis, manifest.digest().hex(), 7, "unsound", 99, "ab" * 32, 99, 100, 5, "2026-01-31T12:00:00Z")
    group.client(2).upload(lie.signed(group.homes[0][0].identity(group.homes[0][1])), name_of(genesis, 9_000_000_000))
    link = group.client(0).ticket()
    _, headers, _ = visit(link)
    cookie = headers["set-cookie"].partition(";")[0]
    text = visit(f"{group.address}/c/{group.consortium}", cookie=cookie)[2]
    table = text[text.index("Shares and ledgers") :]
    assert table.count(">sound<") >= 2
    assert said(group, 1)[-1].head[:12] in table
    assert "unsound" not in table
    assert "99 of 100" not in table


def test_an_agent_does_not_repeat_itself(group: Group) -> None:
    before = until(lambda: said(group, 0), "its word")
    time.sleep(5)  # two looks at what is on disk
    assert len(said(group, 0)) <= len(before) + 1


def test_a_share_that_was_damaged_is_said(group: Group) -> None:
    index = 2
    group.agent(index).stop()
    group.agents = [one for one in group.agents if one.identity.name != "Cedar"]
    ours = group.homes[index][0].only_consortium()
    path = ours.share_path(0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + bytes(40))
    group.start(index)
    until(lambda: any(one.share == "unsound" for one in said(group, index)), "the damage is said")
    group.agent(index).stop()
    group.agents = [one for one in group.agents if one.identity.name != "Cedar"]
    path.write_bytes(whole)
    group.start(index)
    until(lambda: said(group, index)[-1].share == "sound", "it is sound again")


@pytest.mark.parametrize("what", ["ledger", "key"])
def test_a_home_that_was_set_back_is_named_and_signs_nothing(group: Group, tmp_path: Path, what: str) -> None:
    """Birch's disk of an earlier day: before an answer, or before the key was made."""
    index = 1
    home = group.homes[index][0].path
    until(lambda: said(group, index), "its word")
    before = said(group, index)[-1].entries
    group.agent(index).stop()
    group.agents = [one for one in group.agents if one.identity.name != "Birch"]
    kept = tmp_path / "kept"
    shutil.copytree(home, kept)
    try:
        if what == "ledger":
            group.start(index)
            answered(group, "two.safetensors", 2)
            until(lambda: said(group, index)[-1].entries > before, "it said so")
            group.agent(index).stop()
            group.agents = [one for one in group.agents if one.identity.name != "Birch"]
            newest = tmp_path / "newest"
            shutil.copytree(home, newest)
            shutil.rmtree(home)
            shutil.copytree(kept, home)
        else:
            newest = kept
            shutil.rmtree(home / "consortia")
        group.start(index)
        agent = group.agent(index)
        words = "ledger had" if what == "ledger" else "a key that is not in this home"
        until(lambda: words in agent.desk.troubles.get("agent", ""), f"it is named: {agent.desk.troubles}")
        there = len(group.client(0).whole_log())
        suspect = group.marked("three.safetensors", seed=3) if what == "ledger" else None
        if suspect is not None:
            avon, unlock = group.homes[0]
            ask(group.client(0), avon, avon.identity(unlock), suspect, "why", answers=2)
            time.sleep(4)
            own = agent.identity.ed25519
            assert not [n for n in group.client(0).whole_log()[there:] if n.author == own]
            assert not [m for m in agent.desk.matters() if m.state == "waiting"]
            # lost for good: its owner says so, and the agent goes on; the others' agents have their own say
            birch, unlock = group.homes[index]
            accept_ledger(group.client(index), birch, birch.identity(unlock), "Birch", "")
            until(lambda: "agent" not in agent.desk.troubles, "it goes on")
    finally:
        group.agent(index).stop()
        group.agents = [one for one in group.agents if one.identity.name != "Birch"]
        shutil.rmtree(home)
        shutil.copytree(newest, home)
        group.start(index)
    until(lambda: "agent" not in group.agent(index).desk.troubles, "with the newest copy it goes on")


def test_a_word_is_read_only_if_its_author_signed_it(group: Group) -> None:
    home, unlock = group.homes[0]
    identity = home.identity(unlock)
    word = Standing("ab" * 32, "cd" * 32, 0, "sound", 0, "ef" * 32, 0, 16, 0, "2026-01-31T12:00:00Z")
    data = word.signed(identity)
    assert Standing.read(data, identity.ed25519) == word
    for wrong in (data.replace(b'"sound"', b'"unsound"'), data.replace(b'"entries":0', b'"entries":1'), data[:-3]):
        assert wrong != data
        with pytest.raises(QuorumarkError):
            Standing.read(wrong, identity.ed25519)
    with pytest.raises(QuorumarkError):
        Standing.read(data, group.homes[1][0].card().ed25519)
    assert PURPOSE == "room standing"
