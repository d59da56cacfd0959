"""In Flower's simulation the stages of a sum are served in the server's process: the same models, and only there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from quorumark.errors import InputError
from quorumark.flower.simulation import HOME
from quorumark.node.journal import allow_repeats
from quorumark.node.member import MemberNode
from quorumark.simulation import Losses
from tests.kit.flower_runs import SEED, run
from tests.kit.flowers import Consortium, LocalGrid, app_for, same

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
