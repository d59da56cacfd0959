"""A first run in Flower: what it takes by itself, and what each single mistake says."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import quorumark as qm
from quorumark.consortium.plan import PlanWarning
from quorumark.errors import InputError, KeystoreError, RoundError
from quorumark.flower import watermarked
from quorumark.flower.client import member_of
from quorumark.model.layout import read_safetensors, write_safetensors
from quorumark.node.journal import allow_repeats, create_lost_memory
from quorumark.node.member import refusal
from quorumark.setup.exchange import set_up
from tests.kit.flower_runs import SEED, fedavg, run, same
from tests.kit.flowers import Consortium, LocalGrid, app_for, records_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return Consortium.make(tmp_path_factory.mktemp("first"))


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    """Nobody has taken part in a round yet."""
    return made.copy(tmp_path / "world")


def start(world: Consortium, grid: Any, rounds: int = 1, arrays: Any = None, **options: Any) -> Any:
    wrapped = watermarked(fedavg(len(grid.apps)), world.path, seed=SEED, **options)
    wrapped.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, timeout=60)
    return wrapped


# --- the initial model ------------------------------------------------------------------------------------


def test_a_run_begins_with_the_anchor_beside_the_manifest(world: Consortium) -> None:
    other = world.copy(world.folder.with_name("other"))
    models = []
    for place, arrays in ((world, None), (other, records_of(read_safetensors(world.folder / "anchor.safetensors")))):
        wrapped = watermarked(fedavg(), place.path, seed=SEED)
        result = wrapped.start(grid=LocalGrid(app_for(place.folder), 5), initial_arrays=arrays, num_rounds=1)
        models.append({name: array.numpy().reshape(array.shape) for name, array in result.arrays.items()})
    assert same(*models)
    assert not same(models[0], world.model)


def test_a_model_that_is_a_list_keeps_its_order(tmp_path: Path) -> None:
    """Flower calls the arrays of a list 0, 1, …; apps take them by place, and in a file 10 stands before 2."""
    rng = np.random.default_rng(2)
    model = {str(i): rng.standard_normal((4, 4)).astype(np.float32) for i in range(11)}
    world, seen = Consortium.agree(tmp_path, 3, 2, model=model), list[str]()
    world.set_up()
    watermarked(fedavg(3), world.path).start(
        LocalGrid(app_for(world.folder), 3), num_rounds=0, evaluate_fn=lambda _, arrays: seen.extend(arrays)
    )
    assert seen == [str(i) for i in range(11)]
    assert list(read_safetensors(world.folder / "anchor.safetensors")) != seen


def test_another_initial_model_is_refused_with_both_digests(world: Consortium) -> None:
    grid = LocalGrid(app_for(world.folder), 5)
    other = {**world.model, "a.bias": world.model["a.bias"] + np.float32(0.5)}
    with pytest.raises(InputError) as caught:
        start(world, grid, arrays=records_of(other))
    assert caught.value.argument == "initial_arrays"
    assert world.terms.anchor in caught.value.rule
    assert "strategy.start(grid=grid, num_rounds=" in caught.value.rule
    found = str(caught.value.received).split()[-1]
    assert len(bytes.fromhex(found)) == 32
    assert found != world.terms.anchor
    assert not grid.seen  # nobody was asked
    smaller = {**world.model, "b.weight": world.model["b.weight"][:39]}
    with pytest.raises(InputError, match="tensors of the agreed layout"):
        start(world, grid, arrays=records_of(smaller))
    (world.folder / "layout.json").unlink()
    with pytest.raises(InputError, match=world.terms.layout):
        start(world, grid, arrays=records_of(smaller))


def test_an_anchor_that_is_missing_or_another_one(world: Consortium) -> None:
    grid, path = LocalGrid(app_for(world.folder), 5), world.folder / "anchor.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in read_safetensors(path).items()}
    path.unlink()
    with pytest.raises(InputError, match=r"anchor\.safetensors") as caught:
        start(world, grid)
    assert caught.value.argument == "initial_arrays"
    write_safetensors({**tensors, "a.bias": tensors["a.bias"] * 2}, path)
    with pytest.raises(InputError, match=world.terms.anchor) as caught:
        start(world, grid)
    assert caught.value.argument == "anchor.safetensors"
    with pytest.raises(InputError, match="looked for at '/") as caught:
        watermarked(fedavg(), "nowhere/consortium.json")
    assert caught.value.argument == "consortium"


# --- nobody takes part ------------------------------------------------------------------------------------


def test_a_run_that_all_nodes_refuse_ends_in_its_first_round(world: Consortium) -> None:
    for x in range(1, 6):
        world.home(x)[0].only_consortium().memory_path.unlink()
    grid, rounds = LocalGrid(app_for(world.folder), 5), list[int]()
    wrapped = watermarked(fedavg(), world.path, seed=SEED)
    with pytest.raises(RoundError, match="all 5 nodes that replied refuse") as caught:
        wrapped.start(grid=grid, num_rounds=3, evaluate_fn=lambda number, _: rounds.append(number))
    text = str(caught.value)
    assert all(f"'Hospital {x}'" in text for x in range(1, 6))
    assert text.count("quorumark member rounds --lost") == 5
    assert str(world.folder) not in text
    assert (len(wrapped.reports), rounds) == (1, [0])


def test_what_every_node_says_alike_is_said_once_and_an_app_that_fails_ends_the_run(world: Consortium) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("a weight of 654321")

    grid = LocalGrid(app_for(world.folder, trained=broken), 5)
    with pytest.raises(RoundError, match="refuse") as caught:
        start(world, grid, 3)
    assert str(caught.value).count("ValueError") == 1
    assert all(f"node {node}" in str(caught.value) for node in grid.apps)
    assert "654321" not in str(caught.value)


def test_a_run_goes_on_if_one_node_is_ready_or_another_round_can_mend_it(world: Consortium) -> None:
    """Four lost their memory, and say so; then the fifth does."""
    for x in range(1, 5):
        home, unlock = world.home(x)
        home.only_consortium().memory_path.unlink()
    for mend in (False, True):
        wrapped = watermarked(fedavg(), world.path, seed=SEED)
        with pytest.raises(RoundError, match="no round of this run was finished"):
            wrapped.start(grid=LocalGrid(app_for(world.folder), 5, run_id=8 + mend), num_rounds=2)
        assert len(wrapped.reports) == 2
        for x in range(1, 6) if not mend else ():
            home, unlock = world.home(x)
            home.only_consortium().memory_path.unlink(missing_ok=True)
            create_lost_memory(home.only_consortium(), home.identity(unlock))


# --- homes in a simulation --------------------------------------------------------------------------------


def simulated(homes: str | None) -> Callable[[Any], Any]:
    """Which member a node is, as the mod finds it in a simulation."""

    def find(context: Any) -> Any:
        told = copy.copy(context)
        told.run_config = {} if homes is None else {"quorumark-homes": homes}
        return member_of(told)

    return find


def rename(world: Consortium, names: list[str]) -> None:
    for x, name in enumerate(names, 1):
        (world.folder / f"member-{x}").rename(world.folder / name)
        (world.folder / f"member-{x}.key").rename(world.folder / f"{name}.key")


def test_homes_may_have_any_names(world: Consortium) -> None:
    """A member is found by its keys, so each node trains on its own examples, whatever its folder is called."""
    rename(world, ["zoe", "member-1", "Ärzte", "4", "a home"])
    app = app_for(world.folder, find=simulated(str(world.folder)))
    wrapped = start(world, LocalGrid(app, 5))
    assert wrapped.reports[0].members == (1, 2, 3, 4, 5)
    first, second = (
        SimpleNamespace(node_config={"partition-id": n}, run_config={"quorumark-homes": str(world.folder)})
        for n in (0, 1)
    )
    assert "/zoe'" in repr(member_of(first))
    assert "/member-1'" in repr(member_of(second))
    # before there is a key nobody knows who is where: by name, and a node stays what it is
    assert "/4'" in repr(member_of(first, setup=True))


@pytest.mark.parametrize("wrong", ["", None, "nowhere", "/nowhere/at/all"])
def test_a_setting_that_is_missing_or_wrong_is_named_with_an_example(world: Consortium, wrong: str | None) -> None:
    app = app_for(world.folder, find=simulated(wrong))
    with pytest.raises(RoundError, match="all 5 nodes that replied refuse") as caught:
        start(world, LocalGrid(app, 5), 3)
    for part in ("quorumark-homes", "--run-config", "'$PWD/consortium'", "[tool.flwr.app.config]"):
        assert part in str(caught.value)
    assert ("name the whole path" in str(caught.value)) == (wrong == "nowhere")


def test_homes_that_are_missing_twice_there_or_without_their_key_file(world: Consortium) -> None:
    def found(partition: int) -> Any:
        settings = {"partition-id": partition, "num-partitions": 6}
        return member_of(SimpleNamespace(node_config=settings, run_config={"quorumark-homes": str(world.folder)}))

    def refused(partition: int, argument: str) -> str:
        with pytest.raises(InputError) as caught:
            found(partition)
        assert caught.value.argument == argument
        return refusal(caught.value)

    assert "member-2" in repr(found(1))
    assert "'num-supernodes=5'" in refused(5, "num-supernodes")
    (world.folder / "member-2.key").rename(world.folder / "second.key")
    assert "no 'member-2.key'" in refused(1, "quorumark-homes")
    shutil.copytree(world.folder / "member-3", world.folder / "copy")
    assert "copy and member-3 are 'Hospital 3'" in refused(2, "quorumark-homes")
    shutil.rmtree(world.folder / "member-4")
    assert "without the home of 'Hospital 4', member 4" in refused(3, "quorumark-homes")
    for path in world.folder.glob("*/member.json"):
        path.unlink()
    assert "quorumark member init" in refused(0, "quorumark-homes")


# --- the memory of rounds ---------------------------------------------------------------------------------


def test_the_ceremony_makes_the_memory_once(world: Consortium, tmp_path: Path) -> None:
    """One that was deleted, also before any round, or is not in a restored backup, counts as lost: asking for the
    ceremony again makes no other."""
    home, unlock = world.home(1)
    place = home.only_consortium()
    assert place.memory_path.stat().st_mode & 0o777 == 0o600
    start(world, LocalGrid(app_for(world.folder), 5))
    shutil.rmtree(place.path / "rounds")
    assert set_up(home, unlock, world.terms, tmp_path / "again").manifest is not None
    assert not place.memory_path.exists()
    home.backup(tmp_path / "backup.tar")
    shutil.rmtree(home.path)
    type(home).restore(tmp_path / "backup.tar", home.path)
    assert not place.memory_path.exists()
    create_lost_memory(place, home.identity(unlock))
    with pytest.raises(KeystoreError, match="exists already"):
        create_lost_memory(place, home.identity(unlock))


def test_a_false_number_of_the_last_round_is_noticed(world: Consortium) -> None:
    """One that is too low costs nothing: the members are asked. One that is far too high they refuse."""
    for x in range(1, 6):
        home, unlock = world.home(x)
        allow_repeats(home.only_consortium(), home.identity(unlock))
    wrapped, _ = run(world, LocalGrid(app_for(world.folder), 5), 2)
    assert [report.round for report in wrapped.reports] == [1, 2]
    again, _ = run(world, LocalGrid(app_for(world.folder), 5, run_id=8), 1, after=0)
    assert [report.round for report in again.reports] == [3]
    with pytest.raises(RoundError, match=r"after=3"):
        start(world, LocalGrid(app_for(world.folder), 5, run_id=9), 3, after=1 << 40)


def test_homes_on_one_machine_begin_without_another_command(tmp_path: Path, made: Consortium) -> None:
    homes = [
        qm.Home.create(tmp_path / name, name, key_file=tmp_path / f"{name}.key") for name in ("Avon", "Birch", "C")
    ]
    cards, strength = [(home.card, 100) for home in homes], {"rho": "0.05"}
    with pytest.warns(PlanWarning):
        terms = qm.Terms.agree("three", 2, cards, made.model, strength=strength, without_alignment=True)
    qm.Home.make_key(homes, terms)
    assert all(home.consortium().memory_path.exists() for home in homes)


# --- the documentation ------------------------------------------------------------------------------------


def test_the_table_of_what_a_run_needs_has_every_setting_and_what_its_error_says() -> None:
    root = Path(__file__).resolve().parents[2]
    table = (root / "docs" / "flower.md").read_text().split("## What a run needs")[1].split("## What happens")[0]
    code = (root / "src" / "quorumark" / "flower" / "client.py").read_text()
    told = {"quorumark-rate", "quorumark-round", "quorumark-seed"}  # not set by anybody: what the app is told
    settings = set(re.findall(r"quorumark-[a-z]+(?:-[a-z]+)*", code)) - told
    assert {"quorumark-homes", "quorumark-key-file"} <= settings
    assert not {name for name in settings if name not in table}
    for words in ("num-supernodes must be the number of members", "quorumark member rounds --lost", "initial_arrays"):
        assert words in table
