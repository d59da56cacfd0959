"""In Flower's simulation the stages of a sum are served in the server's process: the same models, and only there."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from quorumark.errors import InputError, KeystoreError, RecordError
from quorumark.flower.simulation import HOME, SimulationWire
from quorumark.node.homes import Words, simulated_member
from quorumark.node.journal import allow_repeats
from quorumark.node.member import MemberNode
from quorumark.simulation import Losses
from tests.kit.flower_runs import SEED, run
from tests.kit.flowers import Consortium, LocalGrid, app_for, same
from tests.kit.refusals import stopped
from tests.kit.rounds import Run
from tests.kit.states import amend, small
from tests.kit.ways import of_way, ways

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


class Grid(LocalGrid):
    """A Grid that counts messages by stage."""

    def __init__(self, *about: Any, **options: Any) -> None:
        super().__init__(*about, **options)
        self.stages = Counter[str]()

    def push_messages(self, messages: Any) -> list[str]:
        made = list(messages)
        self.stages.update(str(m.content.config_records["quorumark"]["stage"]) for m in made)
        return super().push_messages(made)


class Simulation(Grid):
    """As Flower's, whose messages are in this process."""

    state = None


def made_for_simulation(world: Consortium, *points: int) -> Consortium:
    for x in points or range(1, world.count + 1):
        home, unlock = world.home(x)
        allow_repeats(home.only_consortium(), home.identity(unlock))
    return world


@pytest.mark.parametrize("policy", [{"sums": "unchecked"}, {"sums": "checked"}, {"sums": "checked", "packing": "2"}])
def test_the_models_are_those_of_one_process(tmp_path: Path, policy: dict[str, str]) -> None:
    """With members who are lost in training; uploads and answers need no message, and are counted as if they did."""
    world = made_for_simulation(Consortium.make(tmp_path, policy=policy))
    lost = {2: 4, 4: 1}
    grid = Simulation(_losing(world, lost), 5)
    wrapped, model = run(world, grid, 5)
    expected = world.in_process(5, SEED, Losses({(r, "train"): [x] for r, x in lost.items()}))
    assert same(model, expected.model)
    assert [r.members for r in wrapped.reports] == [r.members for r in expected.reports]
    assert [r.marked for r in wrapped.reports] == [r.marked for r in expected.reports]
    assert wrapped.reports[2].marked
    assert not grid.stages.keys() & {"upload", "unmask"}
    first = wrapped.reports[0]
    assert first.metrics["messages"] == 15
    assert first.uploaded_bytes < first.metrics["bytes-up"] < 1.1 * first.uploaded_bytes + 20_000


def _losing(world: Consortium, lost: dict[int, int]) -> Any:
    """An app whose training fails for one member in some rounds."""
    from flwr.clientapp import ClientApp

    inner = app_for(world.folder)

    class App(ClientApp):  # type: ignore[misc]
        def __call__(self, message: Any, context: Any) -> Any:
            number = message.content.config_records["quorumark"].get("round")
            if lost.get(number) == int(context.node_config["partition-id"]) + 1:
                raise OSError("the power went out")
            return inner(message, context)

    return App()


def test_a_member_that_fails_is_out_of_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its node had: the others upload again, and the model is theirs."""
    world = made_for_simulation(Consortium.make(tmp_path))
    handle = MemberNode.handle

    def failing(node: MemberNode, stage: str, config: Any, arrays: Any) -> Any:
        if stage == "upload" and config["round"] == 2 and "member-3" in repr(node):
            raise OSError("the disk is full")
        return handle(node, stage, config, arrays)

    monkeypatch.setattr(MemberNode, "handle", failing)
    wrapped, model = run(world, Simulation(app_for(world.folder), 5), 3)
    monkeypatch.undo()
    assert same(model, world.in_process(3, SEED, Losses({(2, "upload"): [3]})).model)
    assert [report.attempts for report in wrapped.reports] == [1, 2, 1]
    assert wrapped.reports[1].excluded_codes == {3: "node.failed"}


def test_homes_that_were_not_made_for_a_simulation_are_served_by_messages(tmp_path: Path) -> None:
    """Nor are any, where one of them was not: the masks that two members share must be in both vectors or in none."""
    world = Consortium.make(tmp_path)
    expected = world.in_process(2, SEED).model
    other = made_for_simulation(world.copy(tmp_path / "mixed"), 1, 2, 3, 4)
    for found in (world, other):
        grid = Simulation(app_for(found.folder), 5)
        _, model = run(found, grid, 2)
        assert same(model, expected)
        assert (grid.stages["upload"], grid.stages["unmask"]) == (10, 10)


NOISY = {"rho": "0.1", "c_max": "0.1"}


@pytest.mark.parametrize("way", ways("plain", "cohort", of=("plain", "cohort")))
def test_the_server_s_process_follows_all_members_noise(tmp_path: Path, way: str) -> None:
    """What is left of the mark is what a federation in one process finds, members who are lost included. No member
    follows its own, and none is asked."""
    world = made_for_simulation(of_way(tmp_path, way, strength=NOISY))
    lost = {3: 2, 6: 4, 7: 4}
    wrapped, model = run(world, Simulation(_losing(world, lost), world.count), 10)
    expected = world.in_process(10, SEED, Losses({(r, "train"): [x] for r, x in lost.items()}))
    assert same(model, expected.model)
    for asked in (5, 10):
        found, right = (
            wrapped.reports[asked - 1],
            expected.reports[asked - 2],
        )  # of the state that the round begins with
        assert (found.survival, found.survival_error) == (right.survival, right.survival_error)
        assert 0 < found.survival_error < 1
    assert not [path for x in range(1, world.count + 1) for path in rounds_of(world, x).glob("state-*/noise.sealed")]


def test_a_home_that_was_not_made_for_a_simulation_follows_its_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the server says; and it tells what that says where it is asked."""
    world = Consortium.deal(tmp_path, 5, 3, strength=NOISY, policy={"sums": "checked"})
    copy = world.copy(tmp_path / "told")
    wrapped, _ = run(world, Simulation(app_for(world.folder), 5), 5)
    assert 0 < wrapped.reports[-1].survival_error < 1
    monkeypatch.setattr(SimulationWire, "serves_all", True)
    run(copy, Simulation(app_for(copy.folder), 5), 4)
    for found in (world, copy):
        assert all(list(rounds_of(found, x).glob("state-*/noise.sealed")) for x in range(1, 6))


def rounds_of(world: Consortium, x: int) -> Path:
    return world.home(x)[0].only_consortium().path / "rounds"


def test_members_of_a_simulation_keep_one_file_of_the_same_model(tmp_path: Path) -> None:
    """All have the model and the sum that they checked it by. Who is not there keeps what it had, and catches up."""
    world, seen = made_for_simulation(Consortium.make(tmp_path, policy={"sums": "checked"})), {}
    losing = _losing(world, {4: 3})

    def files() -> dict[int, list[tuple[int, bytes]]]:
        names = ("model.safetensors", "sum.npz")
        paths = {x: [path for n in names for path in rounds_of(world, x).glob(f"state-*/{n}")] for x in range(1, 6)}
        return {x: [(path.stat().st_ino, path.read_bytes()) for path in found] for x, found in paths.items()}

    class App:
        def __call__(self, message: Any, context: Any) -> Any:
            number = int(message.content.config_records["quorumark"].get("round", 0))
            if number not in seen and number > 2:
                seen[number] = files()
            return losing(message, context)

    _, model = run(world, Simulation(App(), 5), 5)
    assert same(model, world.in_process(5, SEED, Losses({(4, "train"): [3]})).model)
    before, after = seen[4], seen[5]  # of rounds 3 and 4, as they were when the next one began
    assert all(before[x] == before[1] for x in range(2, 6))
    assert all(after[x] == after[1] for x in (2, 4, 5))
    assert after[3] == before[3]
    assert all(one[1] != two[1] for one, two in zip(after[1], before[1], strict=True))
    last = files()
    assert all(last[x] == last[1] for x in range(2, 6))


@pytest.mark.parametrize("told", ["first", "second"])
def test_a_simulation_s_members_check_each_announced_sum(tmp_path: Path, told: str) -> None:
    """One process computes once what follows from a sum, for all members: another sum is refused by the one that is
    told of it, whether the true one is known there already or not."""
    world = made_for_simulation(Consortium.make(tmp_path, policy={"sums": "checked"}))
    one, liar = Run(world), 1 if told == "first" else 2
    one.node = Kept(world).node  # type: ignore[method-assign]
    one.round()
    offer, arrays = one.offer()
    changed = {**arrays, "sum": arrays["sum"].copy()}
    changed["sum"][0] ^= np.uint64(1)
    for x in range(1, 6):
        one.join_one(x, offer, changed if x == liar else arrays)
    assert one.refused == {liar: "round.wrong-tag"}
    one.server.announce()
    one.upload()
    one.unmask()
    assert len(one.server.members) == 4


class Kept:
    """Members whose nodes are kept for all messages, as a simulation's are."""

    def __init__(self, world: Consortium) -> None:
        self.nodes = {x: MemberNode(*world.home(x), seeds=True, together=True) for x in range(1, world.count + 1)}

    def node(self, x: int) -> MemberNode:
        return self.nodes[x]


def test_a_node_that_is_kept_notices_what_changes_between_two_messages(tmp_path: Path) -> None:
    """Another manifest, another consortium in the home, another process that served the member, a lost memory."""
    world = made_for_simulation(small(tmp_path / "world", 5, 3))
    nodes = Kept(world)
    one = Run(world)
    one.node = nodes.node  # type: ignore[method-assign]
    one.round()
    offer, arrays = one.offer()
    for x in range(1, 6):
        one.join_one(x, offer, arrays)
    about = {"state": one.server.history.state.hex(), "of-round": one.server.round_no, "run": "1", "node": "1"}
    about["of-manifest"] = one.server.manifest.digest().hex()
    MemberNode(*world.home(1)).handle("never", about, {})  # another process serves it: it has left the round
    one.server.announce()
    with stopped("round.over"):
        nodes.node(1).handle("upload", one.server.asked(1), {})
    place = world.home(2)[0].only_consortium()
    place.memory_path.rename(tmp_path / "memory")
    with pytest.raises(KeystoreError, match="has lost its memory of rounds"):
        nodes.node(2).handle("upload", one.server.asked(2), {})
    (tmp_path / "memory").rename(place.memory_path)
    nodes.node(2).handle("upload", one.server.asked(2), {})
    shutil.copytree(place.path, place.path.with_name("0" * 16))
    with pytest.raises(RecordError, match="several consortia"):
        nodes.node(2).handle("state", {"of-state": "00" * 32, "run": "1", "node": "1"}, {})
    shutil.rmtree(place.path.with_name("0" * 16))
    amend(world, tmp_path / "amended", examples={1: 111})
    with stopped("round.other-manifest"):
        nodes.node(3).handle("join", offer, arrays)


def test_a_simulation_finds_its_members_again_as_long_as_they_are_there(tmp_path: Path) -> None:
    world = made_for_simulation(small(tmp_path / "world", 5, 3))
    words = Words("here", "quorumark-", "homes", "so", "nodes", "so")
    found = {x: simulated_member(world.folder, x, {}, words) for x in range(1, 6)}
    assert all(simulated_member(world.folder, x, {}, words) is found[x] for x in range(1, 6))
    assert simulated_member(world.folder, 1, {}, words, setup=True) is not found[1]
    one, two = (world.folder / f"member-{x}" for x in (1, 2))
    for place, name in ((one, "x"), (two, "member-1"), (world.folder / "x", "member-2")):  # they change places
        place.rename(world.folder / name)
        (world.folder / f"{place.name}.key").rename(world.folder / f"{name}.key")
    again = simulated_member(world.folder, 1, {}, words)
    assert again is not found[1]
    assert again.simulated_home() == (str(two), "")
    plain = small(tmp_path / "plain", 5, 3)  # homes of a deployment are opened for each message
    assert simulated_member(plain.folder, 1, {}, words) is not simulated_member(plain.folder, 1, {}, words)


def test_a_server_on_another_machine_is_told_of_homes_in_vain(tmp_path: Path) -> None:
    """What a node says about its home counts in Flower's simulation only."""
    world = made_for_simulation(Consortium.make(tmp_path))
    grid = Grid(app_for(world.folder), 5)
    run(world, grid, 1)
    told = [reply for reply in grid.seen if HOME in reply.content.config_records["quorumark"]]
    assert len(told) == 5
    assert (grid.stages["upload"], grid.stages["unmask"]) == (5, 5)


def test_a_member_on_its_own_machine_leaves_no_mask_out(tmp_path: Path) -> None:
    """`together` is refused for a home that was not made for a simulation, before anything is masked or kept."""
    world, vectors = Consortium.make(tmp_path), {}
    kept = world.copy(tmp_path / "kept")
    for place, flagged in ((world, False), (kept, True)):
        if flagged:
            made_for_simulation(place)
        nodes = {x: MemberNode(*place.home(x), seeds=True, together=x == 1) for x in range(1, 6)}

        def find(context: Any, nodes: dict[int, MemberNode] = nodes) -> MemberNode:
            return nodes[int(context.node_config["partition-id"]) + 1]

        grid = Grid(app_for(place.folder, find=find), 5)
        wrapped, model = run(place, grid, 1, stage_timeout=5.0)
        vectors[flagged] = wrapped.reports[0], model
    assert list(vectors[False][0].excluded) == [1]
    assert "made for a simulation" in vectors[False][0].excluded[1]
    assert vectors[False][0].members == (2, 3, 4, 5)
    # with the refusal out of the way, one who leaves masks out that the others made turns the sum into noise
    assert not vectors[True][0].excluded
    assert not same(vectors[True][1], kept.in_process(1, SEED).model)
    with pytest.raises(InputError, match="made for a simulation"):
        MemberNode(*world.home(2), together=True).handle("unmask", {"request": b""}, {})
