"""Servers that try harder, and members who have bad luck, where sums are checked (docs/secagg.md, "Checked sums")."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import field
from quorumark.embed import norm_count
from quorumark.engine.member import MODEL, RESULT
from quorumark.engine.server import RoundServer
from quorumark.errors import KeystoreError, MessageError, QuorumarkError, RoundError
from quorumark.federation import Federation, FederationMember, Losses
from quorumark.field import P
from quorumark.research import KnownKey
from quorumark.verify.reference import Reference
from tests.flowers import Consortium, Model, initial, train
from tests.test_sums import CHECKED, SEED, Run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return Consortium.make(tmp_path_factory.mktemp("sums"), policy=CHECKED)


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    """The consortium, before its first round."""
    return made.copy(tmp_path / "world")


def _told(run: Run, arrays: dict[str, Any], model: Any) -> dict[str, Any]:
    return {**arrays, "anchor": run.server.anchor, **{MODEL + name: tensor for name, tensor in model.items()}}


# --- servers that lie -------------------------------------------------------------------------------------


def test_a_true_sum_behind_a_history_that_it_does_not_belong_to(world: Consortium) -> None:
    """The sum of round 3 is true, and so is the anchor; that the one came after the other is not. It would begin the
    count of rounds, and of what the mark has reached, anew as often as a server likes."""
    run = Run(world)
    for _ in range(3):
        run.round()
    true = run.server
    assert world.manifest is not None
    assert true._opened is not None
    begun = RoundServer(world.manifest, world.layout, world.model, run="2", after=3, seed=SEED)
    offer, arrays = begun.offer(world.model)
    for x in range(1, 6):  # everybody begins anew, and is sure of the anchor
        run.node(x).handle("join", offer, _told(run, arrays, world.model))
    spliced = RoundServer(world.manifest, world.layout, world.model, run="2", after=4, seed=SEED)
    norms = true._opened[world.layout.size : -1].copy()
    spliced._pending, spliced._opened = (3, None, norms), true._opened
    run.server = spliced
    with pytest.raises(RoundError, match="members are left"):
        run.round()


def test_tied_weights_are_announced_once(tmp_path: Path) -> None:
    """The vector holds a tied tensor once; training loads it under both names, and what comes last counts."""
    model = initial()
    model["z.weight"] = model["b.weight"]
    world = Consortium.make(tmp_path, model=model, policy=CHECKED)
    assert {spec.name: spec.of for spec in world.layout.tensors}["z.weight"] == "b.weight"
    run = Run(world)
    run.round()
    run.round()

    def lie(_: dict[str, Any], told: dict[str, Any]) -> None:
        told[MODEL + "z.weight"] = np.zeros_like(told[MODEL + "z.weight"])

    with pytest.raises(RoundError, match="0 members are left"):
        run.round(lie=lie)
    assert all("'z.weight'" in text for text in run.refused.values()), run.refused
    run.round()
    assert run.refused == {}


@pytest.mark.parametrize("told_to", [{1, 2, 3, 4, 5}, {2}])
def test_whole_numbers_in_a_model_stay_as_they_were(world: Consortium, told_to: set[int]) -> None:
    """Integers and booleans (a mask, an index) are in no sum, and decide what a model does."""
    run = Run(world)
    run.round()
    run.round(absent=[2])
    run.round(absent=[2])  # so that member 2 cannot tell, and takes the server's word
    offer, arrays = run.server.offer(run.model)
    told = _told(run, arrays, run.model)
    for x in range(1, 6):
        lie = {MODEL + "steps": np.array(0, np.int64)} if x in told_to else {}
        try:
            reply, _ = run.node(x).handle("join", offer, {**told, **lie})
            result = {RESULT + n: t for n, t in train(run.model, 0.01, reply["seed"], 1.0).items()}
            about = {**offer, **reply, "examples": 100 + x, "node": "1"}
            ready, _ = run.node(x).handle("ready", about, result)
            run.server.take_ready(x, ready["ready"], ready["boxes"], ready["vouch"])
        except QuorumarkError as error:
            run.refused[x] = str(error)
    assert set(run.refused) == told_to


def test_a_result_is_of_the_model_that_was_joined(world: Consortium) -> None:
    """A server that asks a member twice at once: first with a model of its own, then with the anchor. What was trained
    from the first must not go into the round as if it were of the second: its sum would be what the server chose."""
    run = Run(world)
    assert world.manifest is not None
    lying = RoundServer(world.manifest, world.layout, world.model, run="1", after=2, seed=SEED)
    chosen = {**world.model, "a.weight": np.zeros_like(world.model["a.weight"])}
    norms = np.full(norm_count(world.layout), 1 << 40, np.uint64)
    lying.history.accept(2, world.layout.encode(chosen), None, norms)
    run.server.round_no = 2
    made_up, true = lying.offer(chosen), run.server.offer(world.model)
    for x in range(1, 6):
        first, _ = run.node(x).handle("join", made_up[0], _told(run, made_up[1], chosen))
        second, _ = run.node(x).handle("join", true[0], _told(run, true[1], world.model))
        result = {RESULT + name: tensor for name, tensor in train(chosen, 0.01, 1, 1.0).items()}
        about = {**true[0], "examples": 100 + x, "node": "1"}
        with pytest.raises(RoundError, match="is not of the model"):
            run.node(x).handle("ready", {**about, "joined": first["joined"]}, result)
        run.node(x).handle("ready", {**about, "joined": second["joined"]}, result)


@pytest.mark.parametrize(
    "change",
    [
        {"tag": 1 << 70},
        {"tag": P},
        {"tag": True},
        {"tag": -1},
        {"accepted-as-of": 0},
        {"accepted-as-of": 2, "accepted": 1},
        {"accepted-as-of": 1 << 62},
        {"as-of": "3"},
        {"norms": None},
        {"norms": np.zeros((2, 3), np.uint64)},
        {"norms": np.array(["a"])},
        {"rest": np.zeros(3, np.int16)},
        {"rest": np.zeros((12640, 1), np.int16)},
        {"rest": np.full(12640, np.iinfo(np.int64).min)},
        {"rest": np.zeros(12640, bool)},
    ],
    ids=repr,
)
def test_numbers_of_the_wrong_kind_are_refused(world: Consortium, change: dict[str, Any]) -> None:
    run = Run(world)
    run.round()
    run.round()
    offer, arrays = run.server.offer(run.model)
    told = _told(run, arrays, run.model)
    for name, value in change.items():
        if name in ("tag", "accepted", "as-of", "accepted-as-of"):
            offer[name] = value
        else:
            told[name] = value
    with pytest.raises(QuorumarkError):
        run.node(1).handle("join", offer, told)


def test_a_run_never_goes_back(tmp_path: Path) -> None:
    """Of 7 members 5 go on, and the 2 who are held back are t: they vouch for what is true, and over."""
    rng = np.random.default_rng(1)
    model: Model = {"a.weight": rng.standard_normal((8, 6)).astype(np.float32), "steps": np.array(7)}
    world = Consortium.make(tmp_path, count=7, threshold=2, model=model, policy=CHECKED)
    run = Run(world)
    run.round()
    start = run.round()
    run.round()
    server = run.server
    told = copy(server.history.mark), server._before, server._norms, server._rest, server._tag
    strengths = server._as_of, server._accepted_as_of
    for _ in range(2):
        run.round(absent=[6, 7])
    assert run.refused == {}
    server._pending = server._opened = server.history._known = None
    server.history.mark, server._before, server._norms, server._rest, server._tag = told
    server._as_of, server._accepted_as_of = strengths
    run.model = start

    def forget(offer: dict[str, Any], _: dict[str, Any]) -> None:
        """What they are told first, to make them forget where they are: a run that begins."""
        begun = RoundServer(server.manifest, world.layout, world.model, run="2", after=offer["round"] - 1, seed=SEED)
        anew, more = begun.offer(world.model)
        for x in range(1, 6):
            run.node(x).handle("join", anew, _told(run, more, world.model))

    for lie in (lambda *_: None, forget):
        with pytest.raises(RoundError, match="2 members are left"):
            run.round(lie=lie)
        assert set(run.refused) == {1, 2, 3, 4, 5}
        assert all("the server goes back to round 2" in text for text in run.refused.values()), run.refused


class Repeating(Run):
    """Members whose training repeats itself: of one model they always make the same."""

    def _join(self, x: int, offer: dict[str, Any], told: dict[str, Any], model: Model) -> None:
        reply, _ = self.node(x).handle("join", offer, told)
        made = train(model, 0.01, 1000 * offer["accepted"] + x, 1.0)
        about = {**offer, "examples": 100 + x, "node": "1", "joined": reply.get("joined", "")}
        ready, _ = self.node(x).handle("ready", about, {RESULT + name: tensor for name, tensor in made.items()})
        self.server.take_ready(x, ready["ready"], ready.get("boxes", b""), ready.get("vouch", b""))


def _opened(run: Run) -> Any:
    """A round that is opened and kept back: the server goes on as if it had been given up."""
    run.round()
    assert run.server.marked
    assert run.server._opened is not None
    found = run.server._opened[: run.world.layout.carrier_size]
    run.server._pending, run.server._opened = None, None
    return found


def test_a_round_that_is_repeated_has_the_same_mark(world: Consortium) -> None:
    """Else two sums from one model would differ by a part of the mark, and where training repeats itself by nothing
    more: that is the key. A server opens round 3, keeps it to itself, and begins again where it began."""
    run = Repeating(world)
    run.round()
    start = run.round()
    first = _opened(run)
    for _ in range(4):  # after three rounds that were given up there would be no mark at all
        run.model = start
        assert (_opened(run) == first).all()
    # the members saw to that, not the server: it says that it repeats another round, or none
    kept = run.server._as_of
    for other in (0, kept + 1):
        run.model, run.server._as_of, run.server.history._known = start, other, None
        with pytest.raises(RoundError, match="and takes part in no other from it"):
            run.round()
    for other in (2, run.server.round_no + 9):

        def lie(offer: dict[str, Any], _: dict[str, Any], other: int = other) -> None:
            offer["as-of"] = other

        run.model, run.server._as_of, run.server.history._known = start, kept, None
        with pytest.raises(MessageError, match="a round since the last accepted one"):
            run.round(lie=lie)
    run.model, run.server._as_of, run.server.history._known = start, kept, None
    run.round()
    run.round()  # and it goes on from there


def test_without_that_rule_two_rounds_give_the_key(tmp_path: Path) -> None:
    """What the rule is for: where sums are not checked the same server, two rounds later, has every sign."""
    world = Consortium.make(tmp_path)
    run = Repeating(world)
    run.round()
    start = run.round()
    sums_of = []
    for _ in range(2):
        run.model = start
        weights = run.round()
        assert run.server.marked
        sums_of.append(world.layout.encode(weights)[: world.layout.carrier_size])
        run.server._pending = None
    guess = np.sign(field.to_signed(field.sub(*sums_of)))
    assert world.manifest is not None
    shares = {
        x: home.only_consortium().share(unlock).vector()
        for x, (home, unlock) in enumerate(map(world.home, range(1, 6)), 1)
    }
    known = KnownKey.from_shares(world.manifest, shares, world.layout, Reference.read(world.path).anchor)
    assert (guess == known.key[: guess.size]).mean() > 0.99  # models are rounded to float32


def test_what_was_answered_is_remembered_whatever_comes_in_between(world: Consortium) -> None:
    """A server that shows another model between upload and answer does not make members forget which one it was for."""
    run = Repeating(world)
    run.round()
    run.round()
    elsewhere = RoundServer(run.server.manifest, world.layout, world.model, run="2", after=7, seed=SEED)
    anew, more = elsewhere.offer(world.model)

    ask = run.server.request

    def request(point: int) -> bytes:
        run.node(point).handle("join", anew, _told(run, more, world.model))
        return ask(point)

    run.server.request = request  # type: ignore[method-assign]
    _opened(run)
    run.server.request = ask  # type: ignore[method-assign]
    diary = json.loads(next((world.folder / "member-1").glob("consortia/*/rounds/*/diary.json")).read_text())
    assert diary["answered_state"] == run.server.history.mark.digest().hex()
    assert diary["answered_as_of"] == 3


def test_a_member_that_joined_before_it_answered_does_not_go_on(world: Consortium) -> None:
    """A server asks members to join the next round from the same model before it lets them answer in this one: when
    they joined they had not answered yet. What they train for it would open a second sum, with half of the mark."""
    run = Repeating(world)
    run.round()
    start = run.round()
    heard: list[dict[str, Any]] = []
    joined: dict[int, str] = {}
    ask = run.server.request

    def request(point: int) -> bytes:
        offer, told = heard
        joined[point] = run.node(point).handle("join", {**offer, "round": 4, "as-of": 4}, told)[0]["joined"]
        return ask(point)

    run.server.request = request  # type: ignore[method-assign]
    run.round(lie=lambda *said: heard.extend(said))
    assert run.server.marked
    for x in range(1, 6):
        result = {RESULT + name: tensor for name, tensor in train(start, 0.01, x, 1.0).items()}
        about = {**heard[0], "round": 4, "examples": 100 + x, "node": "1", "joined": joined[x]}
        with pytest.raises(RoundError, match="and takes part in no other from it"):
            run.node(x).handle("ready", about, result)


def test_a_run_from_the_anchor_in_between_does_not_make_members_forget(tmp_path: Path) -> None:
    """Of 7 members 5 answer, in one round from a model that is marked and in one from the anchor; the 2 others vouch
    that the marked one is still the last."""
    rng = np.random.default_rng(1)
    model: Model = {"a.weight": rng.standard_normal((8, 6)).astype(np.float32), "steps": np.array(7)}
    world = Consortium.make(tmp_path, count=7, threshold=2, model=model, policy=CHECKED)
    run = Repeating(world)
    run.round()
    run.round()
    start = run.round()
    server = run.server
    run.round(absent=[6, 7])
    server._pending, server._opened = None, None
    anew = Repeating(world, run="2", after=server.round_no)
    anew.round(absent=[6, 7])
    assert anew.refused == {}
    server.round_no, run.model, server._as_of, server.history._known = anew.server.round_no, start, 0, None
    with pytest.raises(RoundError, match="and takes part in no other from it"):
        run.round(absent=[1, 2])


@pytest.mark.parametrize("folder", [True, False])
def test_rounds_that_fail_after_some_have_answered_are_repeated(world: Consortium, folder: bool) -> None:
    """Too few answers, or a server that dies while it asks for them: nobody gets stuck, and the mark is the same."""
    options: dict[str, Any] = {"folder": world.folder / "run"} if folder else {}
    run = Run(world, **options)
    run.round()
    start = run.round()
    take = run.server.take_answer

    def few(point: int, message: bytes) -> None:
        if point <= 2:
            take(point, message)

    run.server.take_answer = few  # type: ignore[method-assign]
    with pytest.raises(RoundError, match="2 members answered"):
        run.round()
    if folder:
        run = Run(world, run="2", **options)
        assert run.server.round_no == 3
    else:
        run.server.take_answer = take  # type: ignore[method-assign]
        run.model = start
    run.round()
    assert run.refused == {}
    assert run.server.marked
    losses = {(3, "unmask"): [3, 4, 5]}
    alone = world.in_process(4, SEED, Losses(losses))
    assert alone.reports[2].given_up
    assert all(np.array_equal(run.model[name], alone.model[name]) for name in run.model if name != "steps")
    run.round()
    assert run.refused == {}


# --- bad luck ---------------------------------------------------------------------------------------------


class Unlucky(Run):
    """Members whose upload does not arrive: they have sent it, and think that they took part."""

    vanish: Iterable[int] = ()

    def _upload(self, lost: set[int], change: Any) -> None:
        for x in set(self.vanish) & set(self.server.members):
            self.node(x).handle("upload", self.server.asked(x), {})
        super()._upload(lost | set(self.vanish), change)


def test_a_member_whose_upload_was_lost_goes_on_with_the_others(world: Consortium) -> None:
    """It knows the key of a sum that was never opened: that says nothing about the one that was."""
    run = Unlucky(world)
    run.round()
    run.vanish = [4]
    run.round()
    run.vanish = []
    run.round(absent=[5])  # one of the four who were in the last sum is away: member 4 is needed
    assert run.refused == {}
    assert run.asked[4]["vouch"] == b""
    run.round()
    assert run.refused == {}
    assert run.asked[4]["vouch"]


@pytest.mark.parametrize("at", ["model.npy", "diary.json"])
def test_a_member_that_dies_while_it_joins_comes_back(world: Consortium, at: str, tmp_path: Path) -> None:
    """Between the files that it writes: what is left does not fit together, and it takes the server's word then."""
    run = Run(world)
    run.round()
    run.round()
    folder = next((world.folder / "member-3" / "consortia").glob("*/rounds/*"))
    shutil.copytree(folder, tmp_path / "before")
    offer, arrays = run.server.offer(run.model)
    told = _told(run, arrays, run.model)
    run.node(3).handle("join", offer, told)
    shutil.copy(tmp_path / "before" / at, folder / at)  # as if this one had not been written
    run.round()
    assert run.refused == {}


def test_a_member_s_voucher_or_boxes_that_are_none_exclude_it_alone(world: Consortium) -> None:
    run = Run(world)
    run.round()
    offer, arrays = run.server.offer(run.model)
    told = _told(run, arrays, run.model)
    for x in range(1, 6):
        run._join(x, offer, told, dict(run.model))
    said = run.asked[2]
    for boxes, vouch in ((said["boxes"], b"yes"), (said["boxes"], run.asked[1]["vouch"]), (b"", said["vouch"])):
        offer, arrays = run.server.offer(run.model)
        told = _told(run, arrays, run.model)
        for x in (1, 3, 4, 5):
            run._join(x, offer, told, dict(run.model))
        reply, _ = run.node(2).handle("join", offer, told)
        result = {RESULT + n: t for n, t in train(run.model, 0.01, reply["seed"], 1.0).items()}
        ready, _ = run.node(2).handle("ready", {**offer, **reply, "examples": 102, "node": "1"}, result)
        with pytest.raises(MessageError, match="Hospital"):
            run.server.take_ready(2, ready["ready"], boxes, vouch)
        run.server.announce()
        assert run.server.members == (1, 3, 4, 5)


def test_one_message_of_a_round_at_a_time(world: Consortium) -> None:
    """Two that are served at once would each write a diary without what the other has noted: a *join* that takes long
    would make a member forget an answer that it gave meanwhile."""
    run = Run(world)
    run.round()
    offer, arrays = run.server.offer(run.model)
    told = _told(run, arrays, run.model)
    found: list[str] = []

    class Slow(dict[str, Any]):
        """What a member reads while it serves *join*, as far as it has come by then."""

        def __getitem__(self, name: str) -> Any:
            if name == "layout":
                with pytest.raises(KeystoreError, match="wait until it is done") as refused:
                    run.node(1).handle("unmask", {"request": b""}, {})
                found.append(str(refused.value))
            return super().__getitem__(name)

    run.node(1).handle("join", offer, Slow(told))
    assert found


def test_a_run_in_one_process_that_goes_on_repeats_with_the_same_mark(world: Consortium, tmp_path: Path) -> None:
    losses = Losses({(3, "unmask"): [3, 4, 5]})
    alone = world.in_process(4, SEED, losses)
    assert world.manifest is not None
    for until in (3, 4):  # a new process after the round that was given up
        members = {
            x: FederationMember(
                home.identity(unlock), world.manifest, world.layout, train, 0.01, home.only_consortium().share(unlock)
            )
            for x, (home, unlock) in enumerate(map(world.home, range(1, 6)), 1)
        }
        run = Federation(
            world.manifest, world.layout, world.model, members, seed=SEED, losses=losses, folder=tmp_path / "run"
        )
        list(run.rounds(until))
    assert run.reports[2].given_up
    assert run.reports[3].c == alone.reports[3].c > 0
    assert all(np.array_equal(run.model[name], alone.model[name]) for name in run.model)


@pytest.mark.parametrize("seed", range(2))
def test_runs_with_every_kind_of_bad_luck_go_on(tmp_path: Path, seed: int) -> None:
    """Messages are lost before or after members serve them, the server dies anywhere, rounds are given up: nobody is
    accused, nobody refuses for ever, and all that is asked for from one model has one mark."""
    rng = np.random.default_rng([7, seed])
    model: Model = {"a.weight": rng.standard_normal((8, 6)).astype(np.float32), "steps": np.array(7)}
    world = Consortium.make(tmp_path, count=5, threshold=2, model=model, policy=CHECKED)
    run, marks, given_up, whole = Stormy(world, rng), dict[str, set[bytes]](), list[str](), 0
    for _ in range(25):
        try:
            run.round()
        except QuorumarkError as error:
            given_up.append(str(error))
        except DiedError:
            pass
        else:
            whole += 1
        accused = ("has answered", "not the one that", "is not the sum", "goes back", "not those of", "since the last")
        assert not any(text in said for text in accused for said in run.refused.values()), run.refused
        if run.asking is not None:
            state, scales = run.asking
            marks.setdefault(state, set()).add(scales)
        run.settle()
    assert all("is given up" in text or "must have checked" in text for text in given_up), given_up
    assert whole > 3
    assert len(marks) > 3
    assert all(len(found) == 1 for found in marks.values())
    run.calm = True
    run.round()
    run.settle()
    run.round()
    assert run.refused == {}
    assert all(run.asked[x]["vouch"] for x in run.asked)


class DiedError(Exception):
    """The server, in the middle of something."""


class Stormy(Run):
    """A run in which anything may be lost."""

    def __init__(self, world: Consortium, rng: np.random.Generator) -> None:
        self._rng, self.calm, self._runs, self._dead = rng, False, 0, False
        self._stood: dict[str, Any] = {}
        self.asking: tuple[str, bytes] | None = None
        super().__init__(world, folder=world.folder / "run")

    def settle(self) -> None:
        """After a round, whole or not: the next one starts from the last model that stands."""
        if self._dead or self._happens(0.2):
            self._runs += 1
            run = Run(self.world, folder=self.world.folder / "run", run=f"again {self._runs}")
            self.server, self.model = run.server, run.model
        elif self.server._pending is None:
            self.model = self._stood
        self._stood = dict(self.model)

    def round(self, *_: Any, **__: Any) -> Model:
        self.asking, self._dead, self.refused = None, False, {}
        self._stood = dict(self.model)
        server = self.server
        offer, arrays = server.offer(self.model)
        told = _told(self, arrays, self.model)
        self._may_die()
        for x in range(1, 6):
            if not self._happens(0.06):
                self._join(x, offer, told, dict(self.model))
        self._may_die()
        server.announce()
        for attempt in range(4):
            if attempt:
                server.retry()
            for x in server.members:
                if self._happens(0.05):
                    continue
                try:
                    head, vector = self.node(x).handle("upload", server.asked(x), {})
                except QuorumarkError as error:
                    self.refused[x] = str(error)
                    continue
                if not self._happens(0.05):
                    server.take_upload(x, head["head"], vector["vector"])
            self._may_die()
            if not server.missing:
                break
        asked = {x: server.request(x) for x in server.members}
        assert server._amplitudes is not None
        scales = json.dumps(server._amplitudes.scales).encode()
        self.asking = server.history.mark.digest().hex(), scales
        self._may_die()
        for x, request in asked.items():
            if self._happens(0.15):
                continue
            said = self.node(x).handle("unmask", {"request": request}, {})[0]
            self._may_die(0.02)
            if not self._happens(0.1):
                server.take_answer(x, said["answer"])
        self.model = server.finish()
        self._may_die()
        return dict(self.model)

    def _join(self, x: int, offer: dict[str, Any], told: dict[str, Any], model: Model) -> None:
        if self._happens(0.05):  # it is asked, and its answer does not arrive; or it is asked twice
            self.node(x).handle("join", offer, told)
            if self._happens(0.5):
                return
        super()._join(x, offer, told, model)

    def _happens(self, share: float) -> bool:
        return not self.calm and bool(self._rng.random() < share)

    def _may_die(self, share: float = 0.04) -> None:
        if self._happens(share):
            self._dead = True
            raise DiedError
