"""Packed rounds as engines carry them: losses, members who missed rounds, servers that die, and lies about units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import field
from quorumark.node.journal import MODEL, Journal
from quorumark.round.memory import MemoryState
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.server import SecAggServer
from quorumark.simulation import Losses
from tests.kit.checked import five_people
from tests.kit.flowers import Consortium, Model, train
from tests.kit.refusals import stopped
from tests.kit.rounds import SEED, Run
from tests.kit.states import amend


def same(a: Any, b: Any) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a if name != "steps")


class Wide(Run):
    """Member 3's update is 1000 times as large in round 4. `trainings` are the rounds in which anybody trained."""

    def trained(self, x: int, model: Model, reply: dict[str, Any]) -> Model:
        self.trainings = [*getattr(self, "trainings", []), reply["round"]]
        made = train(model, 0.01, reply["seed"], reply["rate"])
        if (x, reply["round"]) == (3, 4):
            made["a.weight"] = model["a.weight"] + np.float32(1000) * (made["a.weight"] - model["a.weight"])
        return made


@pytest.mark.parametrize(("packing", "sums"), [("2", "checked"), ("4", "checked"), ("3", "unchecked")])
def test_a_packed_run_with_losses_is_the_one_in_one_process(tmp_path: Path, packing: str, sums: str) -> None:
    """Members who miss rounds, who are lost before they upload, and a server that dies and goes on."""
    world = Consortium.make(tmp_path, policy={"sums": sums, "packing": packing})
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
    assert alone.reports[-1].marked
    assert same(last, alone.model)


@pytest.mark.parametrize("packing", ["2", "3", "4"])
def test_an_update_that_needs_wider_units_costs_nothing_but_precision(tmp_path: Path, packing: str) -> None:
    world = Consortium.make(tmp_path, policy={"sums": "checked", "packing": packing})
    run = Wide(world)
    for number in range(1, 7):
        before = run.model["a.weight"]
        run.round(absent=[5] if number == 5 else [])  # 5 must hear of the units of round 4 from the server
        assert run.refused == {}
        if number == 4:
            assert run.server.widened == {3: 1}
            assert (run.server.attempt, run.trainings.count(4)) == (1, 5), "no attempt and no training"
            assert np.abs(run.model["a.weight"] - before).max() > 1
    level = bytes.fromhex(run.server._last["level"])
    assert not any(level)

    def lie(offer: dict[str, Any], _: dict[str, Any]) -> None:
        offer["sum-level"] = "01" * run.server.history.tensors

    with stopped("round.too-few"):
        run.round(lie=lie)
    assert run.refused == dict.fromkeys(range(1, 6), "round.wrong-tag")
    for wrong in ("0", "zz", "08", "00" * run.server.history.tensors, "01", 5):
        offer, told = run.offer(lambda offer, _, wrong=wrong: offer.update({"sum-level": wrong}))  # type: ignore[misc]
        with stopped("message.malformed"):
            run.node(1).handle("join", offer, told)
    run.round()
    assert run.refused == {}


@pytest.mark.parametrize("packing", ["2", "4"])
def test_wider_units_outlive_a_killed_server_and_reach_who_comes_late(tmp_path: Path, packing: str) -> None:
    """Member 5 first comes after the round with wider units, in which the server is killed once it has opened the sum:
    the units that follow are the same ones, and all go on."""
    for dies in (False, True):
        (tmp_path / str(dies)).mkdir()
        world = Consortium.make(tmp_path / str(dies), policy={"sums": "checked", "packing": packing})
        folder = tmp_path / f"run {dies}"
        run = Wide(world, folder=folder)
        for _ in range(4):
            run.round(absent=[5])
        assert run.server.widened == {3: 1}
        run.server.close(run.model)
        known = run.server.history.mark.spans()
        if dies:
            run = Wide(world, run="2", folder=folder)
            assert run.server.history.mark.spans() == known
        assert run.node(5).handle("join", *run.offer())[0] == {"needs": "anchor"}
        for _ in range(2):
            run.round()
            assert run.refused == {}
            assert 5 in run.server.members
        assert all(np.isfinite(tensor).all() for name, tensor in run.model.items() if name != "steps")


def test_a_member_that_missed_rounds_gets_the_model_once(tmp_path: Path) -> None:
    """It asks for it; the others are told the sum alone."""
    world = Consortium.make(tmp_path, policy={"sums": "checked", "packing": "2"})
    run = Run(world)
    run.round()
    run.round(absent=[2])
    run.round(absent=[2])
    offer, told = run.offer()
    assert sorted(told) == ["layout", "sum"]
    assert run.node(2).handle("join", offer, told) == ({"needs": "model"}, {})
    assert told["sum"].nbytes < 4.3 * world.layout.size
    reply, computed = run.node(1).handle("join", offer, told)
    assert "joined" in reply
    assert same({name.removeprefix(MODEL): tensor for name, tensor in computed.items()}, run.model)


def test_packing_can_be_amended_between_rounds(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    world = Consortium.make(tmp_path / "w", policy={"sums": "checked", "packing": "1"})
    run = Run(world, folder=tmp_path / "run")
    for _ in range(3):
        run.round()
    run.server.close(run.model)
    later = amend(world, tmp_path / "amendment", policy={"packing": "2"})
    assert world.manifest is not None
    again = Run(later, run="amended", folder=tmp_path / "run", earlier=(world.manifest,))
    for _ in range(3):
        again.round()
        assert again.refused == {}
    assert again.server.marked
    assert again.server.opened.size < run.server.layout.size


# --- one sum, one level -----------------------------------------------------------------------------------


def summed(levels: dict[int, bytes]) -> tuple[SecAggServer, dict[int, SecAggMember]]:
    people, group = five_people()
    members = {x: SecAggMember(person, group, MemoryState(group)) for x, person in enumerate(people, 1)}
    server = SecAggServer(group, 1, bytes(32), 4, tensors=2)
    for x, member in members.items():
        server.take_ready(x, member.ready(1, bytes(32), 4, level=levels.get(x, b"")))
    return server, members


def test_members_who_are_told_of_other_levels_share_no_masks() -> None:
    """A member that signs two levels, and a server that shows one of them to each half: the marks of both halves would
    be of different strengths, and their sum would show shares. The level is in ctx, so nothing opens."""
    server, members = summed({2: b"\1\0"})
    plan = members[1].plan(server.announce())
    assert plan.level == server.plan.level == b"\1\0"
    assert replace(plan, level=b"").ctx != plan.ctx


def test_a_level_for_another_model_excludes_its_sender() -> None:
    people, group = five_people()
    server = SecAggServer(group, 1, bytes(32), 4, tensors=2)
    member = SecAggMember(people[0], group, MemoryState(group))
    with stopped("message.malformed"):
        server.take_ready(1, member.ready(1, bytes(32), 4, level=b"\1\1\1"))
    assert 1 in server.excluded


def test_without_whoever_needs_it_a_level_is_gone() -> None:
    server, members = summed({2: b"\1\0", 4: b"\0\3"})
    announced = server.announce()
    assert server.plan.level == b"\1\3"
    vector = np.arange(4, dtype=np.uint64)
    for x in (1, 3, 4, 5):
        server.take_upload(x, members[x].upload(members[x].plan(announced), vector.copy()))
    announced = server.retry()
    assert server.plan.level == b"\0\3"
    for x in (1, 3, 4, 5):
        server.take_upload(x, members[x].upload(members[x].plan(announced), vector.copy()))
    for x in (1, 3, 4, 5):
        server.take_answer(x, members[x].unmask(server.request(x)))
    assert server.finish().tolist() == field.scale(4, vector).tolist()


def test_a_sum_that_is_made_again_keeps_its_units(tmp_path: Path) -> None:
    """Two sums of the same results in different units differ by more than rounding where the mark is rounded away in
    one of them: it would show."""
    world = Consortium.make(tmp_path, policy={"sums": "checked", "packing": "4"})
    run = Wide(world)
    for _ in range(3):
        run.round()
    offer, told = run.offer()
    run.join(offer, told)
    run.server.announce()
    run.upload()
    for x in (1, 2, 3):
        run.node(x).handle("unmask", {"request": run.server.request(x)}, {})
    again = Wide(world, run="2", after=run.server.round_no)
    again.server.survey(again.ask, go_on=True)
    again.model = dict(again.server.resumed or {})
    # member 3 would now need no wider units: its kept result is used all the same, and so is the level of then
    home, unlock = world.home(1)
    with Journal(home.only_consortium(), home.identity(unlock)).memory().edit() as memory:
        assert memory["sent"]["model"]["level"] != ""
        memory["sent"]["model"]["level"] = ""  # as if the level had been another one
    again.server.take_answered(1, run.server.round_no, (1, 2, 3, 4, 5))
    with stopped("round.too-few", "round.repeat-waits"):
        again.round()
    assert again.refused[1] == "round.other-repeat"
