"""The key ceremony over Flower: replies that get lost, servers that cheat, members that stay silent."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from quorumark.consortium.identity import Header, open_message
from quorumark.consortium.records import Manifest
from quorumark.errors import KeystoreError
from quorumark.field import P
from quorumark.flower import make_key
from quorumark.node.journal import MODEL
from quorumark.node.member import RESULT, MemberNode
from quorumark.round.server import RoundServer
from quorumark.setup.amend import propose
from quorumark.setup.amend import sign as amend
from quorumark.setup.exchange import expected_messages
from tests.kit.flowers import Consortium, LocalGrid, app_for, train
from tests.kit.refusals import stopped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def test_terms_that_were_not_pinned_are_refused(tmp_path: Path) -> None:
    world = Consortium.agree(tmp_path)
    for pinned in (None, "00" * 32):
        grid = LocalGrid(app_for(tmp_path, pinned=pinned), 5)
        with stopped("ceremony.members-missing"):
            make_key(grid, world.terms, timeout=1)
        assert [reply.content["quorumark"]["code"] for reply in grid.seen] == ["ceremony.not-pinned"] * 5
    with stopped("ceremony.members-missing", names="Hospital 5"):
        make_key(LocalGrid(app_for(tmp_path, pinned=world.terms.digest().hex()), 4), world.terms, timeout=1)


def test_a_ceremony_goes_on_where_a_reply_was_lost(tmp_path: Path) -> None:
    """Every reply of a member once, as an error or as silence, and then many at random: members show the same again."""
    world = Consortium.agree(tmp_path)
    app = app_for(tmp_path, pinned=world.terms.digest().hex())
    rng, counts = np.random.default_rng(8), {103: 0, 104: 0}
    said: dict[tuple[int, str], bytes] = {}

    def shaky(message: Any, context: Any) -> Any:
        reply = app(message, context)
        assert "refused" not in reply.content["quorumark"]
        for record in reply.content.array_records.values():
            for name, array in record.items():  # never a second message for the same step
                assert said.setdefault((context.node_id, name), array.data) == array.data
        if context.node_id in counts:
            counts[context.node_id] += 1
            if counts[context.node_id] % 2:  # each of its replies once
                if context.node_id == 103:
                    raise OSError("the reply got lost")
                return None
        elif rng.random() < 0.2:
            raise OSError("the reply got lost")
        return reply

    notes: list[str] = []
    manifest = make_key(LocalGrid(shaky, 5), world.terms, timeout=1, stage_timeout=0.2, note=notes.append)
    assert min(counts.values()) >= 20  # ten turns, each at least twice
    assert any("no reply in" in text for text in notes)
    assert any("OSError" in text for text in notes)
    places = [home.only_consortium().verify_share(unlock) for home, unlock in map(world.home, range(1, 6))]
    assert {place.info.session for place in places} == {manifest.genesis.session}
    assert not list(tmp_path.glob("member-*/ceremonies/*"))


def test_a_member_that_hears_a_message_twice_says_the_same_twice(tmp_path: Path) -> None:
    world = Consortium.agree(tmp_path)
    app = app_for(tmp_path, pinned=world.terms.digest().hex())

    def twice(message: Any, context: Any) -> Any:
        first = app(copy.deepcopy(message), context)
        again = app(message, context)
        assert first.content == again.content
        return again

    assert make_key(LocalGrid(twice, 5), world.terms, timeout=1).terms == world.terms


def test_a_server_cannot_fill_a_members_disk(tmp_path: Path) -> None:
    """Messages of other steps, senders and sizes than the terms allow, and sessions without end."""
    world = Consortium.agree(tmp_path)
    home, unlock = world.home(1)
    node = MemberNode(home, unlock, terms=world.terms.digest().hex())
    terms = np.frombuffer(world.terms.to_bytes(), np.uint8)
    config = {"run": "1", "node": "1"}

    def send(session: int, **messages: int) -> None:
        arrays = {f"message:{name}": np.zeros(size, np.uint8) for name, size in messages.items()}
        node.handle("setup", {**config, "session": f"{session:032x}"}, {"terms": terms, **arrays})

    def kept() -> int:
        return sum(path.stat().st_size for path in (home.path / "ceremonies").rglob("*") if path.is_file())

    send(0)
    own = kept()
    assert 0 < own < 1000  # its commitment
    long = 8 * world.terms.coordinates + (1 << 13)
    for name, size in [
        ("1-commit/2.msg", 1 << 20),
        ("1-commit/2.msg", (1 << 13) + 1),
        ("3-deal/2-to-1.msg", long + 1),
        ("4-open/2.msg", long + 1),
        ("99-junk/2.msg", 1),
        ("2-commit/2.msg", 1),
        ("1-commit/6.msg", 1),
        ("1-commit/02.msg", 1),
        ("1-commit/1.msg", 1),
        ("1-commit/2-to-1.msg", 1),
        ("3-deal/2.msg", 1),
        ("3-deal/2-to-3.msg", 1),
    ]:
        with stopped("message.unexpected", "message.too-large"):
            send(0, **{"1-commit/3.msg": 10, name: size})
        assert kept() == own  # nothing is kept of a turn that is refused
    for session in range(30):
        send(session, **{"8-health/2.msg": 1 << 13})
    assert kept() == own + (1 << 13)
    assert len(list((home.path / "ceremonies").iterdir())) == 1
    # all that it may ever send: nine steps of four members, of which deal and open are long
    everything = expected_messages(world.terms, 1)
    assert len(everything) == 9 * 4
    assert sum(everything.values()) == 36 * (1 << 13) + 8 * 8 * world.terms.coordinates


class Relay:
    """A server of a ceremony that does as it likes: every member in sessions of its own, with whose messages it wants.

    `said` has all that members ever sent, by name.
    """

    def __init__(self, world: Consortium) -> None:
        pinned = world.terms.digest().hex()
        self.nodes = {x: MemberNode(*world.home(x), terms=pinned) for x in range(1, world.count + 1)}
        self.said: dict[str, list[bytes]] = {}
        self._terms = np.frombuffer(world.terms.to_bytes(), np.uint8)

    def turn(self, x: int, session: str, messages: dict[str, bytes] | None = None) -> dict[str, Any]:
        """One message to a member, and its reply. By default it hears the last thing that everybody said."""
        if messages is None:
            messages = {name: said[-1] for name, said in self.said.items()}
        heard = {n: m for n, m in messages.items() if _sender(n) != x and _recipient(n) in (0, x)}
        arrays = {f"message:{name}": np.frombuffer(message, np.uint8) for name, message in heard.items()}
        config = {"session": session, "run": "7", "node": "1"}
        told, found = self.nodes[x].handle("setup", config, {"terms": self._terms, **arrays})
        for name, array in found.items():
            self.said.setdefault(name.removeprefix("message:"), []).append(array.tobytes())
        return told


def _sender(name: str) -> int:
    return int(name.partition("/")[2].partition("-to-")[0].removesuffix(".msg"))


def _recipient(name: str) -> int:
    return int(name.partition("-to-")[2].removesuffix(".msg") or 0)


def test_a_server_that_asks_again_in_other_sessions_hears_nothing_else(tmp_path: Path) -> None:
    """It empties the members' folders by naming other sessions, and shows them all messages, or those of some."""
    world = Consortium.agree(tmp_path)
    relay = Relay(world)
    done: set[int] = set()
    for turn in range(20):
        for x in relay.nodes:
            relay.turn(x, f"{turn:031x}0", {n: said[0] for n, said in relay.said.items() if _sender(n) != 1 + x % 5})
            relay.turn(x, "f" * 32, {n: said[0] for n, said in relay.said.items() if _sender(n) > 2})
            if "manifest" in relay.turn(x, f"{turn:031x}1"):
                done.add(x)
    assert done == set(relay.nodes)
    assert len(relay.said) == 8 * 5 + 5 * 4  # eight steps to everybody, one to each other member
    assert all(len(said) > 2 for name, said in relay.said.items() if name < "8")  # who has signed soon forgets
    for name, said in relay.said.items():
        # dealings are sealed anew each time; had one held something else, the member that heard both had refused
        assert (len(set(said)) == 1) == (not _recipient(name)), name
    for home, unlock in map(world.home, relay.nodes):
        home.only_consortium().verify_share(unlock)


def test_a_server_that_asks_for_the_ceremony_once_more_makes_nobody_forget_rounds(tmp_path: Path) -> None:
    """A turn of a ceremony that is long over must not make a new memory of rounds, neither after an amendment nor after
    a loss: the same round would be summed twice."""
    world = Consortium.make(tmp_path)
    assert world.manifest is not None
    relay = Relay(world)
    model = {MODEL + name: tensor for name, tensor in world.model.items()}
    result = {RESULT + name: tensor for name, tensor in train(world.model, 0.01, 1, 1.0).items()}

    def ask(stage: str, config: dict[str, Any], /, **_: Any) -> dict[int, dict[str, Any]]:
        """Of the others: they answer nothing more under the manifest before."""
        return {x: relay.nodes[x].handle(stage, {**config, "run": "7", "node": "1"}, {})[0] for x in (2, 3, 4, 5)}

    def join(*manifests: Manifest, after: int) -> None:
        *earlier, manifest = manifests
        server = RoundServer(manifest, world.layout, world.model, run="7", after=after, earlier=tuple(earlier))
        server.prepare(ask, world.model)
        offer, arrays = server.offer(world.model)
        reply, _ = relay.nodes[1].handle("join", {**offer, "node": "1"}, {**arrays, **model})
        about = {**offer, "examples": 101, "node": "1", "joined": reply["joined"]}
        relay.nodes[1].handle("ready", about, result)

    join(world.manifest, after=4)
    terms = propose(world.manifest.terms, examples={2: 90})
    for x in (*relay.nodes, *relay.nodes):  # all sign, then all take the manifest
        home, unlock = world.home(x)
        amended = amend(home, unlock, terms, tmp_path / "amendment", home.only_consortium()).manifest
    assert amended is not None
    assert "manifest" in relay.turn(1, "0" * 32)
    for after in (0, 4):
        with stopped("round.over", names="'Hospital 1'"):
            join(world.manifest, amended, after=after)
    join(world.manifest, amended, after=5)
    # one whose memory is gone waits for its operator
    shutil.rmtree(world.home(1)[0].only_consortium().path / "rounds")
    assert "manifest" in relay.turn(1, "1" * 32)
    with pytest.raises(KeystoreError, match="has lost its memory of rounds"):
        join(world.manifest, amended, after=6)


@pytest.mark.parametrize("session", ["0" * 32, "1" * 32])
def test_a_server_and_a_member_cannot_make_another_confirm_two_sums(tmp_path: Path, session: str) -> None:
    """Member 2 signs two openings, and the server shows both to member 1: one after the other, in the same session or
    in another. With two sums confirmed, members would go on with different squares: their shares show in the check."""
    world = Consortium.agree(tmp_path)
    relay = Relay(world)

    def without_confirms() -> dict[str, bytes]:
        return {name: said[-1] for name, said in relay.said.items() if not name.startswith("5-confirm/")}

    while "5-confirm/1.msg" not in relay.said:
        for x in relay.nodes:
            relay.turn(x, "0" * 32, without_confirms())
    data = relay.said["4-open/2.msg"][0]
    head = json.loads(data[4 : 4 + int.from_bytes(data[:4], "big")])
    header = Header(*(head[field] for field in ("consortium", "session", "step", "sender")))
    vector = np.frombuffer(open_message(data, world.terms, header), np.uint64).copy()
    vector[0] = (int(vector[0]) + 3) % P
    home, unlock = world.home(2)
    other = without_confirms() | {"4-open/2.msg": home.identity(unlock).write(header, vector.tobytes())}
    with stopped("message.changed", names="'Hospital 2'"):
        relay.turn(1, session, other)
    assert len(set(relay.said["5-confirm/1.msg"])) == 1
    for _ in range(20):  # nothing is lost: with what it heard first it goes on
        told = [relay.turn(x, "0" * 32) for x in relay.nodes]
    assert all("manifest" in one for one in told)


def test_a_member_that_stays_silent_stops_the_ceremony_and_a_new_run_goes_on_with_it(tmp_path: Path) -> None:
    """Nothing is lost: the members go on with what they have, under the next run's messages."""
    world = Consortium.agree(tmp_path)
    app = app_for(tmp_path, pinned=world.terms.digest().hex())
    grid, calls = LocalGrid(app, 5), list[int]()

    def dying(message: Any, context: Any) -> Any:
        calls.append(1)
        if len(calls) > 6:
            raise OSError("the power went out")
        return app(message, context)

    grid.apps[103] = dying
    with stopped("ceremony.stopped", names="Hospital 3"):
        make_key(grid, world.terms, timeout=1)
    assert len(calls) == 6 + 4
    manifest = make_key(LocalGrid(app, 5, run_id=8), world.terms, timeout=1)
    roots = [home.only_consortium().verify_share(unlock).root() for home, unlock in map(world.home, range(1, 6))]
    assert len(set(roots)) == 5
    assert make_key(LocalGrid(app, 5, run_id=9), world.terms, timeout=1) == manifest  # it stands


def test_a_ceremony_that_some_have_finished_and_whose_messages_are_gone(tmp_path: Path) -> None:
    """The one case that asking again cannot mend: said, with what to do."""
    world = Consortium.agree(tmp_path)
    app = app_for(tmp_path, pinned=world.terms.digest().hex())
    grid, calls = LocalGrid(app, 5), list[int]()

    def dying(message: Any, context: Any) -> Any:
        calls.append(1)
        if len(calls) > 9:  # the others get all signatures in the tenth turn, and finish
            raise OSError("the power went out")
        return app(message, context)

    grid.apps[103] = dying
    with stopped("ceremony.stopped", names="Hospital 3"):
        make_key(grid, world.terms, timeout=1)
    assert world.home(1)[0].only_consortium().manifest_path.exists()
    assert not world.home(3)[0].only_consortium().manifest_path.exists()
    with stopped("ceremony.stands-still", names="Hospital 3"):
        make_key(LocalGrid(app, 5, run_id=8), world.terms, timeout=1)
