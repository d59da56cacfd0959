"""Checked sums: tags and keys, a run whose server tells the truth, and servers that lie (docs/secagg.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorumark import field, sums
from quorumark.embed import norm_count
from quorumark.engine.member import MODEL, RESULT, MemberNode
from quorumark.engine.server import RoundServer
from quorumark.errors import MessageError, QuorumarkError, RecordError, RoundError
from quorumark.federation import Losses
from quorumark.field import P
from quorumark.identity import Identity
from quorumark.records import DEFAULT_POLICY
from quorumark.secagg import Group
from tests.flowers import Consortium, Model, train

CHECKED = {**DEFAULT_POLICY, "sums": "checked"}
SEED = 11
BINDING = bytes(range(32))


# --- the tag ----------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 300), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_tags_add_up_to_the_sum_s(members: int, length: int, seed: int) -> None:
    """Against whole numbers: Σ tag(x_k) = Σ_j g_j·O_j + β, and `holds` says so."""
    rng, key = np.random.default_rng(seed), seed.to_bytes(32, "big")
    vectors = [rng.integers(0, P, length, dtype=np.uint64) for _ in range(members)]
    tags = [sums.tag(key, vector, first=i == 0) for i, vector in enumerate(vectors)]
    g = [int(e) for e in field.Stream(key, "sum tag").elements(length)]
    beta = int(field.Stream(key, "sum offset").elements(1)[0])
    total = [sum(int(vector[j]) for vector in vectors) % P for j in range(length)]
    assert sum(tags) % P == (sum(a * b for a, b in zip(g, total, strict=True)) + beta) % P
    opened = np.array([*total, sum(tags) % P], np.uint64)
    assert sums.holds(key, opened)
    place = int(rng.integers(length + 1))
    opened[place] = (int(opened[place]) + 1) % P
    assert not sums.holds(key, opened)
    assert not sums.holds(bytes(32)[:-1] + b"\x07", np.array([*total, sum(tags) % P], np.uint64))


def test_long_vectors_are_tagged_piece_by_piece() -> None:
    rng = np.random.default_rng(1)
    vector = rng.integers(0, P, (1 << 20) + 5, dtype=np.uint64)
    whole = field.dot(field.Stream(BINDING, "sum tag").elements(vector.size), vector)
    assert sums.tag(BINDING, vector, first=False) == whole


def test_what_is_proportional_is_another_sum() -> None:
    """Without β a server could announce twice the sum, with twice the tag; or nothing at all, with the tag 0."""
    vector = np.random.default_rng(2).integers(0, P, 50, dtype=np.uint64)
    opened = np.append(vector, np.uint64(sums.tag(BINDING, vector, first=True)))
    plain = np.append(vector, np.uint64(sums.tag(BINDING, vector, first=False)))
    for factor in (0, 2, P - 1):
        assert not sums.holds(BINDING, field.scale(factor, opened))
        # the same without β is a forgery that would have passed
        assert sums.tag(BINDING, field.scale(factor, plain)[:-1], first=False) == field.scale(factor, plain)[-1]


# --- the key ----------------------------------------------------------------------------------------------


def _people(count: int = 5) -> tuple[list[Identity], Group]:
    people = [Identity.generate(f"Hospital {x}") for x in range(1, count + 1)]
    group = Group.of_cards([person.card() for person in people], 3, b"sums")
    return sorted(people, key=lambda person: group.point_of(person.ed25519)), group


def test_all_members_of_a_round_have_its_key_and_nobody_else() -> None:
    people, group = _people()
    said = {x: sums.seal_keys(person, group, 4, BINDING) for x, person in enumerate(people, 1)}
    members = (1, 2, 4, 5)

    def key(x: int, round_no: int = 4, binding: bytes = BINDING, chosen: tuple[int, ...] = members) -> bytes:
        boxes = [sums.box_for(said[k], x) for k in chosen]
        return sums.round_key(people[x - 1], group, round_no, binding, chosen, boxes)

    assert len({key(x) for x in members}) == 1
    assert len({key(1), key(1, chosen=(1, 2, 4)), key(1, chosen=(1, 2, 3, 4, 5))}) == 3
    assert all(said[x] == sums.seal_keys(people[x - 1], group, 4, BINDING) for x in members)  # nothing to remember
    # boxes are of one round, one binding and two members: the server cannot hand on others, nor make any
    for wrong in (lambda: key(1, 5), lambda: key(1, binding=bytes(32))):
        with pytest.raises(MessageError, match="cannot be opened"):
            wrong()
    own = Identity.generate("server")
    forged = sums.seal_keys(own, Group.of_cards([own.card(), *(p.card() for p in people)], 3, b"sums"), 4, BINDING)
    for box in (sums.box_for(said[2], 4), sums.box_for(forged, 1), b"", bytes(48)):
        boxes = [sums.box_for(said[k], 1) if k != 2 else box for k in members]
        with pytest.raises(MessageError, match="cannot be opened"):
            sums.round_key(people[0], group, 4, BINDING, members, boxes)
    with pytest.raises(MessageError, match="one box of every member"):
        sums.round_key(people[0], group, 4, BINDING, members, [b""])


def test_vouchers_are_of_one_member_round_and_history() -> None:
    people, group = _people()
    said = {x: sums.vouch(person, group, 4, BINDING) for x, person in enumerate(people, 1)}
    assert sums.vouchers(group, 4, BINDING, {**said, 2: b""}) == (1, 3, 4, 5)
    sums.check_vouchers(group, 4, BINDING, {1: said[1], 2: b"", 3: said[3], 5: said[5]})
    with pytest.raises(RoundError, match="3 members of the announced set must have checked"):
        sums.check_vouchers(group, 4, BINDING, {1: said[1], 2: said[2], 3: b"", 4: b"", 5: b""})
    for told in ({1: said[2]}, {1: sums.vouch(people[0], group, 3, BINDING)}):
        with pytest.raises(MessageError):
            sums.vouchers(group, 4, BINDING, told)
    with pytest.raises(MessageError, match="vouches for something else"):
        sums.vouchers(group, 4, bytes(32), said)


def test_lists_of_messages_that_are_cut_are_refused() -> None:
    packed = sums.pack([b"one", b"", b"three"])
    assert sums.unpack(packed) == [b"one", b"", b"three"]
    whole = {7: [b"one"], 11: [b"one", b""]}
    for cut in set(range(1, len(packed))) - set(whole):
        with pytest.raises(MessageError, match="cut short"):
            sums.unpack(packed[:cut])
    assert {cut: sums.unpack(packed[:cut]) for cut in whole} == whole
    with pytest.raises(MessageError, match="must be bytes"):
        sums.unpack("text")  # type: ignore[arg-type]


# --- a run ------------------------------------------------------------------------------------------------


class Run:
    """A server and its members, stage by stage, as an engine carries them."""

    def __init__(self, world: Consortium, **options: Any) -> None:
        self.world = world
        assert world.manifest is not None
        self.server = RoundServer(world.manifest, world.layout, world.model, **{"run": "1", "seed": SEED, **options})
        self.model: Mapping[str, Any] = dict(self.server.resumed or world.model)
        self.refused: dict[int, str] = {}
        self.asked: dict[int, dict[str, Any]] = {}

    def node(self, x: int) -> MemberNode:
        return MemberNode(*self.world.home(x))  # a new process each time

    def round(
        self,
        absent: Iterable[int] = (),
        lost: Iterable[int] = (),
        lie: Callable[[dict[str, Any], dict[str, Any]], None] = lambda *_: None,
        change: Callable[[dict[str, Any]], None] = lambda *_: None,
    ) -> Model:
        """One round without those who are `absent`, and with those who are `lost` before they upload.

        `lie` changes what members are told when they join, `change` what they are told before they upload.
        """
        server, self.refused = self.server, {}
        offer, arrays = server.offer(self.model)
        told = {**arrays, "anchor": server.anchor, **{MODEL + name: tensor for name, tensor in self.model.items()}}
        lie(offer, told)
        model = {name.removeprefix(MODEL): tensor for name, tensor in told.items() if name.startswith(MODEL)}
        for x in range(1, self.world.count + 1):
            if x not in set(absent):
                self._join(x, offer, told, model)
        server.announce()
        self._upload(set(lost), change)
        if server.missing:
            server.retry()
            self._upload(set(), change)
        for x in server.members:
            server.take_answer(x, self.node(x).handle("unmask", {"request": server.request(x)}, {})[0]["answer"])
        self.model = server.finish()
        return dict(self.model)

    def _join(self, x: int, offer: dict[str, Any], told: dict[str, Any], model: Model) -> None:
        try:
            reply, _ = self.node(x).handle("join", offer, told)
        except QuorumarkError as error:
            self.refused[x] = str(error)
            return
        made = train(model, 0.01, reply["seed"], reply["rate"])
        about = {**offer, "examples": 100 + x, "node": "1", "joined": reply.get("joined", "")}
        ready, _ = self.node(x).handle("ready", about, {RESULT + name: tensor for name, tensor in made.items()})
        self.asked[x] = ready
        self.server.take_ready(x, ready["ready"], ready.get("boxes", b""), ready.get("vouch", b""))

    def _upload(self, lost: set[int], change: Callable[[dict[str, Any]], None]) -> None:
        for x in self.server.members:
            if x in lost:
                continue
            asked = self.server.asked(x)
            change(asked)
            try:
                head, vector = self.node(x).handle("upload", asked, {})
            except QuorumarkError as error:
                self.refused[x] = str(error)
                continue
            self.server.take_upload(x, head["head"], vector["vector"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return Consortium.make(tmp_path_factory.mktemp("sums"), policy=CHECKED)


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    """The consortium, before its first round."""
    return made.copy(tmp_path / "world")


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a if name != "steps")


def test_a_run_with_losses_is_the_one_in_one_process(world: Consortium) -> None:
    """Members who miss rounds, who are lost before they upload, and a server that dies and goes on: nobody refuses, and
    the models are those of a federation in one process."""
    folder = world.folder / "run"
    run = Run(world, folder=folder)
    run.round()
    run.round(absent=[2])
    run.round(lost=[4])
    assert run.refused == {}
    run.server.offer(run.model)  # the server dies in its fourth round, which is lost
    run = Run(world, folder=folder, run="2")
    run.round(absent=[5])
    run.round()
    last = run.round()
    assert run.refused == {}
    losses = {(2, "train"): [2], (3, "upload"): [4], (4, "train"): [1, 2, 3, 4, 5], (5, "train"): [5]}
    alone = world.in_process(7, SEED, Losses(losses))
    assert [bool(report.given_up) for report in alone.reports] == [False] * 3 + [True] + [False] * 3
    assert same(last, alone.model)
    assert all(run.asked[x]["vouch"] for x in range(1, 6))


def test_the_sums_are_those_of_a_run_that_is_not_checked(world: Consortium, tmp_path: Path) -> None:
    """The tag changes nothing but the vectors' length: without a mark, which hangs on the key, models are the same."""
    (tmp_path / "plain").mkdir()
    plain = Consortium.make(tmp_path / "plain")
    first = {name: tensor for name, tensor in Run(plain).round().items() if name != "steps"}
    assert same(first, Run(world).round())  # the first round is not marked


def test_what_members_say_where_sums_are_not_checked(tmp_path: Path) -> None:
    world = Consortium.make(tmp_path)
    run = Run(world)
    run.round()
    assert "boxes" not in run.asked[1]
    assert run.server.asked(1).keys() == {"round", "announcement"}


# --- servers that lie -------------------------------------------------------------------------------------


def _other(run: Run) -> dict[str, Any]:
    """A model that a server would like better."""
    return {MODEL + "a.weight": run.model["a.weight"] * np.float32(0.5)}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("model", "is not the sum of round 2"),
        ("rest", "is not the sum of round 2"),
        ("norms", "is not the sum of round 2"),
        ("tag", "is not the sum of round 2"),
        ("model and rest", "is not the sum that it announces with it"),
        ("nothing", "lacks 'rest'"),
        ("fractions", "as 12640 whole numbers"),
        ("state", "is not the one that"),
    ],
)
def test_a_server_that_announces_another_sum_is_refused_by_all(world: Consortium, what: str, why: str) -> None:
    run = Run(world)
    run.round()
    run.round()
    layout = world.layout

    def lie(offer: dict[str, Any], told: dict[str, Any]) -> None:
        if what in ("model", "model and rest"):
            before = layout.encode(run.model)
            told.update(_other(run))
            after = layout.encode({name.removeprefix(MODEL): t for name, t in told.items() if name.startswith(MODEL)})
            if what == "model and rest":  # so that the sum is the true one, and the model is not
                told["rest"] = told["rest"] + field.to_signed(field.sub(before, after))
        if what == "rest":
            told["rest"] = told["rest"] + np.eye(1, told["rest"].size, 3, dtype=told["rest"].dtype)[0]
        if what == "norms":
            told["norms"] = told["norms"] + np.eye(1, told["norms"].size, 3, dtype=np.uint64)[0]
        if what == "tag":
            offer["tag"] = (offer["tag"] + 1) % P
        if what == "nothing":
            del told["rest"]
        if what == "fractions":
            told["rest"] = told["rest"].astype(np.float64)
        if what == "state":
            told["state"] = np.frombuffer(told["state"].tobytes().replace(b'"round":2', b'"round":3'), np.uint8)

    assert layout.size == 12640
    with pytest.raises(RoundError, match="0 members are left"):
        run.round(lie=lie)
    assert set(run.refused) == {1, 2, 3, 4, 5}
    assert all(why in text for text in run.refused.values()), run.refused


def _moved(model: Mapping[str, Any], seed: int) -> Model:
    rng = np.random.default_rng(seed)
    noise = {name: rng.standard_normal(t.shape).astype(np.float32) for name, t in model.items() if name != "steps"}
    return {**model, **{name: model[name] + np.float32(0.1) * tensor for name, tensor in noise.items()}}


def _made_up(run: Run) -> None:
    """A history that nobody has seen, of a run that nobody knows: members would take it at the server's word."""
    world = run.world
    assert world.manifest is not None
    run.server = server = RoundServer(world.manifest, world.layout, world.model, run="9", after=6, seed=SEED)
    norms = np.full(norm_count(world.layout), 1 << 40, np.uint64)
    for round_no in (5, 6):
        run.model = _moved(world.model, round_no)
        server.history.accept(round_no, world.layout.encode(run.model), None, norms)
    server._before, server._norms = 5, norms
    server._rest, server._tag, server._accepted_as_of = np.zeros(world.layout.size, np.int16), 5, 6


def _gone_on(run: Run) -> None:
    """The true history, and behind it a round that never was: everybody derives what the server says."""
    server = run.server
    norms = np.full(norm_count(run.world.layout), 1 << 40, np.uint64)
    run.model, amplitudes = _moved(run.model, 3), server.history.amplitudes(3)
    server._before, server.round_no, server._pending, server._opened = server.history.mark.round, 3, None, None
    encoded = run.world.layout.encode(run.model)
    server.history.accept(3, encoded, amplitudes if amplitudes.marks else None, norms)
    server._norms, server._rest, server._tag = norms, np.zeros(encoded.size, np.int16), 5
    server._as_of, server._accepted_as_of = 0, 3


@pytest.mark.parametrize("invent", [_made_up, _gone_on])
def test_a_server_that_makes_history_up_finds_nobody_who_vouches(
    world: Consortium, invent: Callable[[Run], None]
) -> None:
    """All members take part where sums are not checked, which the test of the key that is read so shows
    (`tests/test_flower.py`); here they train and get ready, and none of them uploads."""
    run = Run(world)
    run.round()
    run.round()
    invent(run)
    for _ in range(2):  # nor do they after a second try, when each of them has seen it before
        with pytest.raises(RoundError, match="members are left"):
            run.round()
        assert set(run.refused) == {1, 2, 3, 4, 5}
        assert all("and only nobody did" in text for text in run.refused.values()), run.refused
    fresh = Run(world, run="10", after=8)  # what is true goes on: from the anchor
    fresh.round()
    fresh.round()
    assert fresh.refused == {}


def test_a_run_begins_from_the_anchor_with_an_empty_history(world: Consortium) -> None:
    run = Run(world)

    def lie(offer: dict[str, Any], told: dict[str, Any]) -> None:
        text = told["state"].tobytes()
        offer["accepted"] = 0
        told["state"] = np.frombuffer(text.replace(b'"round":1', b'"round":0'), np.uint8)

    run.round()
    with pytest.raises(RoundError, match="0 members are left"):
        run.round(lie=lie)
    assert len(run.refused) == 5


def test_a_member_that_cannot_check_goes_on_with_those_who_can(world: Consortium) -> None:
    """It takes the history at the server's word, does not vouch, and refuses where fewer than t others do."""
    run = Run(world)
    run.round()
    run.round(absent=[2])
    run.round(absent=[2])
    run.round()
    assert run.asked[2]["vouch"] == b""
    assert all(run.asked[x]["vouch"] for x in (1, 3, 4, 5))
    run.round()
    assert run.asked[2]["vouch"]  # t others vouched in the round before, and the sum since then it has checked

    def withheld(asked: dict[str, Any]) -> None:
        first, second, *rest = sums.unpack(asked["vouches"])
        asked["vouches"] = sums.pack([first, second, *(b"" for _ in rest)])

    with pytest.raises(RoundError, match="members are left"):
        run.round(change=withheld)
    assert all("3 members of the announced set must have checked" in text for text in run.refused.values())
    assert len(run.refused) == 5


def test_vouchers_and_boxes_of_others_are_of_no_use(world: Consortium) -> None:
    run = Run(world)
    run.round()
    old = {x: ready["vouch"] for x, ready in run.asked.items()}

    def replayed(asked: dict[str, Any]) -> None:
        asked["vouches"] = sums.pack(old.values())

    def swapped(asked: dict[str, Any]) -> None:
        boxes = sums.unpack(asked["boxes"])
        asked["boxes"] = sums.pack([*boxes[1:], boxes[0]])

    def fewer(asked: dict[str, Any]) -> None:
        asked["vouches"] = sums.pack(sums.unpack(asked["vouches"])[:-1])

    for change, why in ((replayed, "belongs elsewhere"), (swapped, "cannot be opened"), (fewer, "what every member")):
        with pytest.raises(RoundError, match="members are left"):
            run.round(change=change)
        assert len(run.refused) == 5
        assert all(why in text for text in run.refused.values()), run.refused
    run.round()
    assert run.refused == {}


def test_a_strategy_that_does_not_take_the_sum_as_it_is_says_so(world: Consortium) -> None:
    run = Run(world)
    run.round()
    run.model = {**run.model, "a.bias": run.model["a.bias"] * np.float32(0.9)}  # as FedAdam would
    with pytest.raises(RoundError, match="use a strategy that takes the sum as it is, such as FedAvg"):
        run.round()


def test_the_policy_is_checked(made: Consortium) -> None:
    for policy in ({"sums": "yes"}, {"sums": "checked", "cohort": "4"}):
        with pytest.raises(RecordError, match="the policy's sums must be"):
            replace(made.terms, policy={**DEFAULT_POLICY, **policy})
    replace(made.terms, policy={**DEFAULT_POLICY, "sums": "unchecked", "cohort": "4"})
