"""Checked sums: tags and keys, runs with good and bad luck, and servers that lie (docs/secagg.md, "Checked sums")."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorumark import field, packing
from quorumark.consortium.identity import Identity
from quorumark.consortium.policy import Policy
from quorumark.errors import KeystoreError, LayoutError, MessageError, QuorumarkError, RecordError, RoundError, code_of
from quorumark.field import P
from quorumark.node.journal import MODEL, Journal
from quorumark.node.member import RESULT
from quorumark.round import checked_sums
from quorumark.round.group import Group
from quorumark.round.memory import State
from quorumark.round.movement import norm_count
from quorumark.round.secagg.messages import pack, unpack
from quorumark.round.server import RoundServer
from quorumark.round.statements import Turn
from quorumark.simulation import Federation, FederationMember, Losses
from tests.kit.checked import CHECKED, five_people
from tests.kit.flowers import Consortium, Model, initial, train
from tests.kit.opened import summed
from tests.kit.refusals import stopped
from tests.kit.rounds import SEED, Repeating, Run

BINDING = bytes(range(32))


# --- the tag ----------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 300), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_tags_add_up_to_the_sum_s(members: int, length: int, seed: int) -> None:
    """Against integers: Σ tag(x_k) = Σ_j g_j·O_j + β, and `holds` says so."""
    rng, key = np.random.default_rng(seed), seed.to_bytes(32, "big")
    vectors = [rng.integers(0, P, length, dtype=np.uint64) for _ in range(members)]
    tags = [checked_sums.tag(key, vector, first=i == 0) for i, vector in enumerate(vectors)]
    g = [int(e) for e in field.Stream(key, "sum tag").elements(length)]
    beta = int(field.Stream(key, "sum offset").elements(1)[0])
    total = [sum(int(vector[j]) for vector in vectors) % P for j in range(length)]
    assert sum(tags) % P == (sum(a * b for a, b in zip(g, total, strict=True)) + beta) % P
    opened = np.array([*total, sum(tags) % P], np.uint64)
    assert checked_sums.holds(key, opened)
    place = int(rng.integers(length + 1))
    opened[place] = (int(opened[place]) + 1) % P
    assert not checked_sums.holds(key, opened)
    assert not checked_sums.holds(bytes(32)[:-1] + b"\x07", np.array([*total, sum(tags) % P], np.uint64))


def test_long_vectors_are_tagged_piece_by_piece() -> None:
    rng = np.random.default_rng(1)
    vector = rng.integers(0, P, (1 << 20) + 5, dtype=np.uint64)
    whole = field.dot(field.Stream(BINDING, "sum tag").elements(vector.size), vector)
    assert checked_sums.tag(BINDING, vector, first=False) == whole


def test_what_is_proportional_is_another_sum() -> None:
    """Without β a server could announce twice the sum, with twice the tag; or nothing at all, with the tag 0."""
    vector = np.random.default_rng(2).integers(0, P, 50, dtype=np.uint64)
    opened = np.append(vector, np.uint64(checked_sums.tag(BINDING, vector, first=True)))
    plain = np.append(vector, np.uint64(checked_sums.tag(BINDING, vector, first=False)))
    for factor in (0, 2, P - 1):
        assert not checked_sums.holds(BINDING, field.scale(factor, opened))
        # the same without β is a forgery that would have passed
        assert checked_sums.tag(BINDING, field.scale(factor, plain)[:-1], first=False) == field.scale(factor, plain)[-1]


def test_all_members_of_a_round_have_its_key_and_nobody_else() -> None:
    people, group = five_people()
    said = {x: checked_sums.seal_keys(person, group, 4, BINDING) for x, person in enumerate(people, 1)}
    members = (1, 2, 4, 5)

    def key(x: int, round_no: int = 4, binding: bytes = BINDING, chosen: tuple[int, ...] = members) -> bytes:
        boxes = [checked_sums.box_for(said[k], x) for k in chosen]
        return checked_sums.round_key(people[x - 1], group, round_no, binding, chosen, boxes)

    assert len({key(x) for x in members}) == 1
    assert len({key(1), key(1, chosen=(1, 2, 4)), key(1, chosen=(1, 2, 3, 4, 5))}) == 3
    assert all(
        said[x] == checked_sums.seal_keys(people[x - 1], group, 4, BINDING) for x in members
    )  # nothing to remember
    # boxes are of one round, one binding and two members: the server cannot hand on others, nor make any
    for wrong in (lambda: key(1, 5), lambda: key(1, binding=bytes(32))):
        with stopped("message.cannot-open"):
            wrong()
    own = Identity.generate("server")
    forged = checked_sums.seal_keys(
        own, Group.of_cards([own.card(), *(p.card() for p in people)], 3, b"sums"), 4, BINDING
    )
    for box in (checked_sums.box_for(said[2], 4), checked_sums.box_for(forged, 1), b"", bytes(48)):
        boxes = [checked_sums.box_for(said[k], 1) if k != 2 else box for k in members]
        with stopped("message.cannot-open"):
            checked_sums.round_key(people[0], group, 4, BINDING, members, boxes)
    with stopped("message.incomplete"):
        checked_sums.round_key(people[0], group, 4, BINDING, members, [b""])


def test_vouchers_are_of_one_member_round_and_history() -> None:
    people, group = five_people()
    said = {x: checked_sums.vouch(person, group, 4, BINDING) for x, person in enumerate(people, 1)}
    assert checked_sums.vouchers(group, 4, BINDING, {**said, 2: b""}) == (1, 3, 4, 5)
    checked_sums.check_vouchers(group, 4, BINDING, {1: said[1], 2: b"", 3: said[3], 5: said[5]})
    with stopped("round.unchecked-sum"):
        checked_sums.check_vouchers(group, 4, BINDING, {1: said[1], 2: said[2], 3: b"", 4: b"", 5: b""})
    for told in ({1: said[2]}, {1: checked_sums.vouch(people[0], group, 3, BINDING)}):
        with pytest.raises(MessageError):
            checked_sums.vouchers(group, 4, BINDING, told)
    with stopped("message.other-vouch"):
        checked_sums.vouchers(group, 4, bytes(32), said)


def test_lists_of_messages_that_are_cut_are_refused() -> None:
    packed = pack([b"one", b"", b"three"])
    assert unpack(packed, "list") == [b"one", b"", b"three"]
    whole = {7: [b"one"], 11: [b"one", b""]}
    for cut in set(range(1, len(packed))) - set(whole):
        with stopped("message.malformed"):
            unpack(packed[:cut], "list")
    assert {cut: unpack(packed[:cut], "list") for cut in whole} == whole
    with stopped("message.malformed"):
        unpack("text", "list")  # type: ignore[arg-type]


# --- a run ------------------------------------------------------------------------------------------------


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
    """The tag changes only the vectors' length: without a mark, which depends on the key, models are the same."""
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
        ("weight", "round.wrong-tag"),
        ("norm", "round.wrong-tag"),
        ("tag", "round.wrong-tag"),
        ("model", "round.not-the-sum"),
        ("nothing", "message.incomplete"),
        ("fractions", "message.malformed"),
        ("shorter", "message.malformed"),
        ("history", "round.other-history"),
    ],
)
def test_a_server_that_announces_another_sum_is_refused_by_all(world: Consortium, what: str, why: str) -> None:
    run = Run(world)
    run.round()
    run.round()
    places = {"weight": 3, "norm": _length(run.server) + 3, "tag": -1}

    def lie(offer: dict[str, Any], told: dict[str, Any]) -> None:
        assert not any(name.startswith(MODEL) for name in told)  # the sum is all that members are told
        if what in places:
            told["sum"] = told["sum"].copy()
            told["sum"][places[what]] = (int(told["sum"][places[what]]) + 1) % P
        if what == "model":  # the true sum, and beside it a model that does not follow from it
            told.update(run.told_model() | _other(run))
        if what == "nothing":
            del told["sum"]
        if what == "fractions":
            told["sum"] = told["sum"].astype(np.float64)
        if what == "shorter":
            told["sum"] = told["sum"][1:]
        if what == "history":
            offer["history"] = bytes(32).hex()

    with stopped("round.too-few"):
        run.round(lie=lie)
    assert run.refused == dict.fromkeys(range(1, 6), why)


def consent(world: Consortium, state: bytes) -> None:
    """All operators let their members answer once more from a state."""
    for x in range(1, world.count + 1):
        with remembered(world, x).edit() as memory:
            memory["consents"][state.hex()] = True


def remembered(world: Consortium, x: int) -> State:
    home, unlock = world.home(x)
    return Journal(home.only_consortium(), home.identity(unlock)).memory()


def _moved(model: Mapping[str, Any], seed: int) -> Model:
    rng = np.random.default_rng(seed)
    noise = {name: rng.standard_normal(t.shape).astype(np.float32) for name, t in model.items() if name != "steps"}
    return {**model, **{name: model[name] + np.float32(0.1) * tensor for name, tensor in noise.items()}}


def _length(server: RoundServer) -> int:
    """Of a sum without norms and tag."""
    return server.history.packing.length(server.layout)


def _announced(server: RoundServer, model: Mapping[str, Any], summed_up: Any, round_no: int) -> None:
    """What a server says of the sum that a model comes from, made up."""
    made_up = np.append(summed_up, np.uint64(5))
    about = {"round": round_no, "halvings": 0, "level": "", "under": server.manifest.digest().hex(), "held": "[]"}
    server._last = {"sum": made_up, "norms": None, **about}
    server._settled = server._opened = server._open = None
    server.like = dict(model)


def _made_up(run: Run) -> None:
    """A history that nobody has seen, of a run that nobody knows: members would take it at the server's word."""
    world = run.world
    assert world.manifest is not None
    run.server = server = RoundServer(world.manifest, world.layout, world.model, run="9", after=6, seed=SEED)
    norms = np.full(norm_count(world.layout), 1 << 40, np.uint64)
    for number in range(1, 7):
        run.model = _moved(world.model, number)
        server.history.accept(number, world.layout.encode(run.model), None, norms)
    _announced(server, run.model, np.append(np.zeros(_length(server), np.uint64), norms), 6)


def _gone_on(run: Run) -> None:
    """The true history, and after it a round that never was: everybody derives what the server says."""
    server = run.server
    norms = np.full(norm_count(run.world.layout), 1 << 40, np.uint64)
    history, amplitudes = server.history, server.history.amplitudes()
    moves = packing.weighted_moves(run.world.layout.encode(_moved(run.model, 3)), history.mark.model, 1.0)
    summed_up = np.append(packing.pack(moves, history.mark.spans(), history.packing.count), norms)
    settled = history.settle(summed_up, run.model, amplitudes, norms=True)
    history.accept(history.round, settled.encoded, settled.embedded, norms)
    server.round_no, run.model = 3, settled.weights
    _announced(server, run.model, summed_up, 3)


@pytest.mark.parametrize("invent", [_made_up, _gone_on])
def test_a_server_that_makes_history_up_finds_nobody_who_vouches(
    world: Consortium, invent: Callable[[Run], None]
) -> None:
    """All members take part where sums are not checked, which the test of the key that is read so shows
    (`tests/flower/test_refusals.py`); here they train and get ready, and none of them uploads."""
    run = Run(world)
    run.round()
    run.round()
    invent(run)
    for _ in range(2):  # nor do they after a second try, when each of them has seen it before
        with stopped("round.too-few"):
            run.round()
        assert set(run.refused) == {1, 2, 3, 4, 5}
        assert set(run.refused.values()) == {"round.unchecked-sum"}
    # what is true goes on: from the anchor, if the members' operators consent to a second run from it
    fresh = Run(world, run="10", after=8)
    with stopped("round.too-few"):
        fresh.round()
    assert set(fresh.refused.values()) == {"round.gone-on"}
    fresh = Run(world, run="11", after=9, seed=SEED + 1)
    consent(world, fresh.server.history.state)
    fresh.round()
    fresh.round()
    assert fresh.refused == {}


@pytest.mark.parametrize(
    ("model", "why"),
    [("the last one", "node.refused"), ("the anchor", "round.other-history")],
)
def test_a_run_begins_from_the_anchor_with_an_empty_history(world: Consortium, model: str, why: str) -> None:
    run = Run(world)
    run.round()

    def lie(offer: dict[str, Any], told: dict[str, Any]) -> None:
        offer["accepted"] = 0
        if model == "the anchor":
            told |= {MODEL + name: tensor for name, tensor in world.model.items()}

    with stopped("round.too-few"):
        run.round(lie=lie)
    assert run.refused == dict.fromkeys(range(1, 6), why)


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
        first, second, *rest = unpack(asked["vouches"], "list")
        asked["vouches"] = pack([first, second, *(b"" for _ in rest)])

    with stopped("round.too-few"):
        run.round(change=withheld)
    assert set(run.refused.values()) == {"round.unchecked-sum"}
    assert len(run.refused) == 5


def test_vouchers_and_boxes_of_others_are_of_no_use(world: Consortium) -> None:
    run = Run(world)
    run.round()
    old = {x: ready["vouch"] for x, ready in run.asked.items()}

    def replayed(asked: dict[str, Any]) -> None:
        asked["vouches"] = pack(old.values())

    def swapped(asked: dict[str, Any]) -> None:
        boxes = unpack(asked["boxes"], "list")
        asked["boxes"] = pack([*boxes[1:], boxes[0]])

    def fewer(asked: dict[str, Any]) -> None:
        asked["vouches"] = pack(unpack(asked["vouches"], "list")[:-1])

    for change, why in (
        (replayed, "message.elsewhere"),
        (swapped, "message.cannot-open"),
        (fewer, "message.incomplete"),
    ):
        with stopped("round.too-few"):
            run.round(change=change)
        assert run.refused == dict.fromkeys(range(1, 6), why)
    run.round()
    assert run.refused == {}


def test_a_strategy_that_does_not_take_the_sum_as_it_is_says_so(world: Consortium) -> None:
    run = Run(world)
    run.round()
    run.model = {**run.model, "a.bias": run.model["a.bias"] * np.float32(0.9)}  # as FedAdam would
    with stopped("round.not-the-sum"):
        run.round()


def test_the_policy_is_checked(made: Consortium) -> None:
    with pytest.raises(RecordError, match="policy 'sums' must be"):
        replace(made.terms, policy={"sums": "yes"})  # type: ignore[arg-type]
    for sums in ("checked", "unchecked"):
        assert replace(made.terms, policy=Policy(sums=sums, cohort=4)).policy.sums == sums


# --- servers that try harder ------------------------------------------------------------------------------


def _told(run: Run, arrays: dict[str, Any], model: Any) -> dict[str, Any]:
    return {**arrays, "anchor": run.server.anchor, **{MODEL + name: tensor for name, tensor in model.items()}}


def test_a_true_sum_behind_a_history_that_it_does_not_belong_to(world: Consortium) -> None:
    """The sum of round 3 is true, and so is the anchor; that the one came after the other is not. It would begin the
    count of rounds, and of what the mark has reached, anew as often as a server likes."""
    run = Run(world)
    for _ in range(3):
        run.round()
    true = run.server
    assert world.manifest is not None
    begun = RoundServer(world.manifest, world.layout, world.model, run="2", after=3, seed=SEED)
    offer, arrays = begun.offer(world.model)
    consent(world, begun.history.state)
    for x in range(1, 6):  # everybody begins anew, and is sure of the anchor
        run.node(x).handle("join", {**offer, "node": "1"}, _told(run, arrays, world.model))
    spliced = RoundServer(world.manifest, world.layout, world.model, run="2", after=4, seed=SEED)
    spliced._settled = spliced.history.settle(true.opened[:-1], world.model, None, norms=True)
    spliced._opened, spliced._turn = true.opened, Turn(3)
    run.server, run.model = spliced, spliced.settled.weights
    with stopped("round.too-few"):
        run.round()
    assert set(run.refused) == {1, 2, 3, 4, 5}
    assert set(run.refused.values()) == {"round.unchecked-sum"}


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
        told.update(run.told_model())
        told[MODEL + "z.weight"] = np.zeros_like(told[MODEL + "z.weight"])

    with stopped("round.too-few"):
        run.round(lie=lie)
    assert run.refused == dict.fromkeys(range(1, 6), "node.refused")
    offer, told = run.offer(lie)
    with pytest.raises(LayoutError, match=r"'z\.weight'"):
        run.node(1).handle("join", offer, told)
    run.round()
    assert run.refused == {}


@pytest.mark.parametrize("told_to", [{1, 2, 3, 4, 5}, {2}])
def test_whole_numbers_in_a_model_stay_as_they_were(world: Consortium, told_to: set[int]) -> None:
    """Integers and booleans (a mask, an index) are in no sum, and decide what a model does."""
    run = Run(world)
    run.round()
    run.round(absent=[2])
    run.round(absent=[2])  # so that member 2 cannot tell, and takes the server's word
    offer, told = run.offer()
    for x in range(1, 6):
        lie = {MODEL + "steps": np.array(0, np.int64)} if x in told_to else {}
        more = run.told_model() | run.server.catch_up("model") if lie or x == 2 else {}
        try:
            reply, _ = run.node(x).handle("join", offer, {**told, **more, **lie})
            result = {RESULT + n: t for n, t in train(run.model, 0.01, reply["seed"], 1.0).items()}
            about = {**offer, "joined": reply["joined"], "examples": 100 + x}
            ready, _ = run.node(x).handle("ready", about, result)
            run.server.take_ready(x, ready["ready"], ready["boxes"], ready["vouch"])
        except QuorumarkError as error:
            run.refused[x] = code_of(error)
    assert set(run.refused) == told_to


def test_a_result_is_of_the_model_that_was_joined(world: Consortium) -> None:
    """A server that asks a member twice at once: first with a model of its own, then with the anchor. What was trained
    from the first must not go into the round as if it were of the second: its sum would be what the server chose."""
    run = Run(world)
    assert world.manifest is not None
    lying = RoundServer(world.manifest, world.layout, world.model, run="1", after=2, seed=SEED)
    chosen = {**world.model, "a.weight": np.zeros_like(world.model["a.weight"])}
    norms = np.full(norm_count(world.layout), 1 << 40, np.uint64)
    lying.history.accept(1, world.layout.encode(chosen), None, norms)
    run.server.round_no = 2
    made_up, true = lying.offer(chosen), run.server.offer(world.model)
    for x in range(1, 6):
        lies = {**_told(run, made_up[1], chosen), **lying.catch_up("anchor")}
        first, _ = run.node(x).handle("join", made_up[0], lies)
        second, _ = run.node(x).handle("join", true[0], _told(run, true[1], world.model))
        result = {RESULT + name: tensor for name, tensor in train(chosen, 0.01, 1, 1.0).items()}
        about = {**true[0], "examples": 100 + x, "node": "1"}
        with stopped("round.joined-otherwise"):
            run.node(x).handle("ready", {**about, "joined": first["joined"]}, result)
        run.node(x).handle("ready", {**about, "joined": second["joined"]}, result)


@pytest.mark.parametrize(
    "change",
    [
        {"history": 7},
        {"history": "00"},
        {"names": "[3]"},
        {"names": "[[[["},
        {"names": '["a.weight"]'},
        {"sum-round": -1},
        {"sum-round": "2"},
        {"sum-halvings": 1 << 62},
        {"sum-halvings": True},
        {"sum-under": "00" * 32},
        {"sum-under": 3},
        {"accepted": "2"},
        {"turn": "3"},
        {"turn": b"3"},
        {"turn": b"\xff"},
        {"turn": None},
        {"sum": None},
        {"sum": np.zeros((2, 3), np.uint64)},
        {"sum": np.array(["a"])},
        {"sum": np.zeros(3, np.uint64)},
        {"sum": np.full(12923, P, np.uint64)},
        {"sum": np.zeros(12923, np.int64)},
    ],
    ids=repr,
)
def test_numbers_of_the_wrong_kind_are_refused(world: Consortium, change: dict[str, Any]) -> None:
    run = Run(world)
    run.round()
    run.round()
    offer, arrays = run.server.offer(run.model)
    told = _told(run, arrays, run.model)
    offer |= {"node": "1"}
    numbers = {name: value for name, value in change.items() if name != "sum"}
    with pytest.raises(QuorumarkError):
        run.node(1).handle(
            "join", {**offer, **numbers}, {**told, **{n: v for n, v in change.items() if n not in numbers}}
        )
    assert "joined" in run.node(1).handle("join", offer, told)[0]  # as it was, it is taken


def test_a_run_never_goes_back(tmp_path: Path) -> None:
    """Of 7 members 5 go on, and the 2 who are held back are t: they vouch for what is true, and over."""
    rng = np.random.default_rng(1)
    model: Model = {"a.weight": rng.standard_normal((8, 6)).astype(np.float32), "steps": np.array(7)}
    world = Consortium.make(tmp_path, count=7, threshold=2, model=model, policy=CHECKED)
    run = Run(world)
    run.round()
    run.round()
    start = run.round()
    before = deepcopy(run.server)
    for _ in range(2):
        run.round(absent=[6, 7])
    assert run.refused == {}
    true = run.server

    def forget(offer: dict[str, Any], _: dict[str, Any]) -> None:
        """What they are told first, to make them forget where they are: a run that begins."""
        begun = RoundServer(true.manifest, world.layout, world.model, run="2", after=offer["round"] - 1, seed=SEED)
        anew, more = begun.offer(world.model)
        for x in range(1, 6):
            with stopped("round.gone-on"):
                run.node(x).handle("join", {**anew, "node": "1"}, _told(run, more, world.model))

    for after, lie in ((5, lambda *_: None), (6, forget)):
        run.server, run.model = deepcopy(before), start
        run.server.round_no = after
        with stopped("round.too-few"):
            run.round(lie=lie)
        assert set(run.refused) == {1, 2, 3, 4, 5}
        assert set(run.refused.values()) == {"round.gone-on"}


def _opened(run: Run) -> Any:
    """A round that is opened and kept back: the server goes on as if it had been given up."""
    start = run.model
    run.round()
    server = run.server
    assert server.marked
    found = summed(server)[: run.world.layout.carrier_size]
    server._settled = server._opened = server._open = None
    run.model = start
    return found


def test_what_was_answered_is_remembered_whatever_comes_in_between(world: Consortium) -> None:
    """A server that shows another model between upload and answer does not make members forget which one it was for."""
    run = Repeating(world)
    run.round()
    run.round()
    elsewhere = RoundServer(run.server.manifest, world.layout, world.model, run="2", after=7, seed=SEED)
    anew, more = elsewhere.offer(world.model)
    consent(world, elsewhere.history.state)

    ask = run.server.request

    def request(point: int) -> bytes:
        run.node(point).handle("join", {**anew, "node": "1"}, _told(run, more, world.model))
        return ask(point)

    run.server.request = request  # type: ignore[method-assign]
    _opened(run)
    run.server.request = ask  # type: ignore[method-assign]
    state = run.server.history.state
    for x in range(1, 6):
        with remembered(world, x).edit() as memory:
            assert memory["answered"][state.hex()] == {"model": [[3, run.server.group.id.hex(), 0]]}  # draw 0
    with stopped("round.too-few"):
        run.round()
    assert set(run.refused.values()) == {"round.answered-already"}


def test_a_member_that_joined_before_it_answered_does_not_go_on(world: Consortium) -> None:
    """A server asks members to join the next round from the same model before it lets them answer in this one: when
    they joined they had not answered yet. What they train for it would open a second sum, with half of the mark."""
    run = Repeating(world)
    run.round()
    start = run.round()
    heard: list[dict[str, Any]] = []
    later = Turn(4).to_bytes()
    joined: dict[int, str] = {}
    ask = run.server.request

    def request(point: int) -> bytes:
        offer, told = heard
        joined[point] = run.node(point).handle("join", {**offer, "round": 4, "turn": later}, told)[0]["joined"]
        return ask(point)

    run.server.request = request  # type: ignore[method-assign]
    run.round(lie=lambda *said: heard.extend(said))
    assert run.server.marked
    for x in range(1, 6):
        result = {RESULT + name: tensor for name, tensor in train(start, 0.01, x, 1.0).items()}
        about = {**heard[0], "round": 4, "examples": 100 + x, "joined": joined[x]}
        with stopped("round.answered-already"):
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
    server.accept(start)
    run.round(absent=[6, 7])
    assert server.marked
    server._settled = server._opened = server._open = None
    anew = Repeating(world, run="2", after=server.round_no)
    consent(world, anew.server.history.state)
    anew.round(absent=[6, 7])
    assert anew.refused == {}
    server.round_no, run.model = anew.server.round_no, start
    with stopped("round.too-few"):
        run.round(absent=[1, 2])
    assert set(run.refused) == {3, 4, 5}
    assert set(run.refused.values()) == {"round.answered-already"}


@pytest.mark.parametrize("folder", [True, False])
def test_a_sum_that_lacks_answers_is_opened_later(world: Consortium, folder: bool) -> None:
    """Too few answers, or a server that dies while it asks for them: nobody gets stuck, and nobody trains again."""
    options: dict[str, Any] = {"folder": world.folder / "run"} if folder else {}
    run = Run(world, **options)
    run.round()
    run.round()
    with stopped("round.too-few-answers"):
        run.round(silent=[3, 4, 5])
    if folder:
        run = Run(world, run="2", **options)
        assert run.server.round_no == 3
    run.asked = {}
    run.round()
    assert run.refused == {}
    assert run.asked == {}
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


@pytest.mark.parametrize("at", ["model.safetensors", "notes.json"])
def test_a_member_whose_disk_went_back_in_part_comes_back(world: Consortium, at: str, tmp_path: Path) -> None:
    """A file of the state before, which does not fit the others: it takes the server's word then. (Power that is lost
    between two writes leaves no such thing: tests/node/test_outages.py.)"""
    run = Run(world)
    run.round()
    run.round()
    folder = next((world.folder / "member-3" / "consortia").glob("*/rounds/memory")).parent

    def place() -> Path:
        (found,) = [path for path in (folder / at, *folder.glob(f"state-*/{at}")) if path.exists()]
        return found

    before = shutil.copy(place(), tmp_path / "before")
    offer, told = run.offer()
    run.node(3).handle("join", offer, told)
    assert place().read_bytes() != Path(before).read_bytes()
    shutil.copy(before, place())
    run.round()
    assert run.refused == {}


def test_a_member_s_voucher_or_boxes_that_are_none_exclude_it_alone(world: Consortium) -> None:
    run = Run(world)
    run.round()
    run.join(*run.offer())
    said = run.asked[2]
    for boxes, vouch in ((said["boxes"], b"yes"), (said["boxes"], run.asked[1]["vouch"]), (b"", said["vouch"])):
        offer, told = run.offer()
        run.join(offer, told, absent=[2])
        reply, _ = run.node(2).handle("join", offer, told)
        result = {RESULT + n: t for n, t in train(run.model, 0.01, reply["seed"], 1.0).items()}
        about = {**offer, "joined": reply["joined"], "examples": 102}
        ready, _ = run.node(2).handle("ready", about, result)
        with stopped("message.malformed", "message.other-vouch", "message.elsewhere", names="Hospital"):
            run.server.take_ready(2, ready["ready"], boxes, vouch)
        run.server.announce()
        assert run.server.members == (1, 3, 4, 5)


def test_one_message_of_a_round_at_a_time(world: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are served at once would each write notes without what the other has noted: a *join* that takes long
    would make a member forget an answer that it gave meanwhile."""
    run = Run(world)
    run.round()
    offer, told = run.offer()
    found: list[str] = []

    real = Journal.layout

    def slow(desk: Any, data: bytes) -> Any:
        """In the middle of *join*."""
        with pytest.raises(KeystoreError, match="wait until it is done") as refused:
            run.node(1).handle("unmask", {"request": b""}, {})
        found.append(str(refused.value))
        return real(desk, data)

    monkeypatch.setattr(Journal, "layout", slow)
    run.node(1).handle("join", offer, told)
    assert found


def test_a_run_in_one_process_that_goes_on_has_the_same_mark(world: Consortium, tmp_path: Path) -> None:
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
    accused, nobody refuses for ever, and from one model one sum is opened, with one mark."""
    rng = np.random.default_rng([7, seed])
    model: Model = {"a.weight": rng.standard_normal((8, 6)).astype(np.float32), "steps": np.array(7)}
    world = Consortium.make(tmp_path, count=5, threshold=2, model=model, policy=CHECKED)
    run, marks, given_up, whole = Stormy(world, rng), dict[str, set[bytes]](), list[str](), 0
    for _ in range(25):
        try:
            run.round()
        except QuorumarkError as error:
            given_up.append(error.code)
        except DiedError:
            pass
        else:
            whole += 1
        accused = {"round.other-history", "round.wrong-tag", "round.not-the-sum", "round.other-integers"}
        assert not accused & set(run.refused.values()), run.refused
        if run.asking is not None:
            state, scales = run.asking
            marks.setdefault(state, set()).add(scales)
        run.settle()
    assert set(given_up) <= {
        "round.too-few", "round.no-more-attempts", "round.unchecked-sum", "round.too-few-answers",
        "round.wrong-answers", "round.sum-open", "round.repeat-waits",
    }  # fmt: skip
    assert whole > 3
    assert all(len(found) == 1 for found in run.sums.values())
    assert len(marks) > 3
    assert all(len(found) == 1 for found in marks.values())
    run.calm = True
    for _ in range(3):  # what is open is settled first
        with contextlib.suppress(RoundError):
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
        self.sums: dict[bytes, set[bytes]] = {}
        self.asking: tuple[str, bytes] | None = None
        super().__init__(world, folder=world.folder / "run")

    def settle(self) -> None:
        """After a round, whole or not: the next one starts from the last model that stands."""
        if self._dead or self._happens(0.2):
            self._runs += 1
            run = Run(self.world, folder=self.world.folder / "run", run=f"again {self._runs}")
            self.server, self.model = run.server, run.model
        elif self.server._settled is None:
            self.model = self._stood
        self._stood = dict(self.model)

    def round(self, *_: Any, **__: Any) -> Model:
        self.asking, self._dead, self.refused = None, False, {}
        self._stood = dict(self.model)
        server = self.server
        weights = server.prepare(self.ask, self.model)
        self._may_die()
        if weights is None:
            self._sum(server)
            weights = server.finish()
        self.sums.setdefault(server.history.state, set()).add(server.opened.tobytes())
        self.model = weights
        self._may_die()
        return dict(self.model)

    def ask(self, stage: str, config: dict[str, Any], /, **more: Any) -> dict[int, dict[str, Any]]:
        return {x: said for x, said in super().ask(stage, config, **more).items() if not self._happens(0.1)}

    def _sum(self, server: RoundServer) -> None:
        offer, told = self.offer()
        self._may_die()
        for x in range(1, 6):
            if not self._happens(0.06):
                self.join_one(x, offer, told)
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
                    self.refused[x] = code_of(error)
                    continue
                if not self._happens(0.05):
                    server.take_upload(x, head["head"], vector["vector"])
            self._may_die()
            if not server.missing:
                break
        asked = {x: server.request(x) for x in server.members}
        assert server._amplitudes is not None
        scales = json.dumps(server._amplitudes.scales).encode()
        self.asking = server.history.state.hex(), scales
        self._may_die()
        for x, request in asked.items():
            if self._happens(0.15):
                continue
            said = self.node(x).handle("unmask", {"request": request}, {})[0]
            self._may_die(0.02)
            if not self._happens(0.1):
                server.take_answer(x, said["answer"])

    def join_one(self, x: int, offer: dict[str, Any], told: dict[str, Any]) -> None:
        if self._happens(0.05):  # it is asked, and its answer does not arrive; or it is asked twice
            more = self.told_model() | self.server.catch_up("anchor") if self._happens(0.5) else {}
            self.node(x).handle("join", offer, {**told, **more})
            if self._happens(0.5):
                return
        super().join_one(x, offer, told)

    def _happens(self, share: float) -> bool:
        return not self.calm and bool(self._rng.random() < share)

    def _may_die(self, share: float = 0.04) -> None:
        if self._happens(share):
            self._dead = True
            raise DiedError
