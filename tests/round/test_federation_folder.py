"""Rounds in one process: runs that are killed and go on from their folder."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quorumark import simulation
from quorumark.canonical import canonical
from quorumark.consortium.records import anchor_of
from quorumark.errors import RecordError
from quorumark.files import write_shared
from quorumark.model.layout import ModelLayout, read_safetensors
from quorumark.round import open_sum
from quorumark.round import server as server_module
from quorumark.round.group import group_of
from quorumark.round.memory import FolderState
from quorumark.setup.inprocess import make_key
from quorumark.simulation import Federation, FederationMember
from tests.kit.ceremony import identities, make_terms
from tests.kit.federation import World, train, vector


def test_a_killed_run_goes_on_with_the_same_result(world: World, tmp_path: Path) -> None:
    whole = world.federation()
    for _ in range(6):
        whole.round()
    for stop in (1, 3, 5):
        folder = tmp_path / str(stop)
        first = world.federation(folder=folder)
        for _ in range(stop):
            first.round()
        # killed in the middle of the next round: new objects, nothing but the folder
        again = world.federation(folder=folder)
        assert again.round_no == stop
        reports = list(again.rounds(6))
        assert [report.round for report in reports] == list(range(stop + 1, 7))
        assert (vector(again) == vector(whole)).all()
        assert again.history.mark.digest() == whole.history.mark.digest()
        assert [r.round for r in again.reports] == [1, 2, 3, 4, 5, 6]
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [event["round"] for event in events] == [1, 2, 3, 4, 5, 6]
        kept = read_safetensors(folder / "model.safetensors")
        assert (world.layout.flatten(kept) == vector(whole)).all()
        assert kept["steps"] == 7
    with pytest.raises(RecordError, match="holds another run"):
        world.federation(folder=folder, mark=False)
    with pytest.raises(RecordError, match="holds another run"):
        world.federation(folder=folder, seed=4)
    other = World()
    with pytest.raises(RecordError, match="holds a run of another consortium"):
        other.federation(folder=folder)


def test_a_crash_between_any_two_writes_of_a_round_loses_nothing(world: World, tmp_path: Path) -> None:
    """Every write of the third round in turn is the last that happens; then the run is made again."""
    whole = world.federation()
    for _ in range(4):
        whole.round()

    class Dead(BaseException):
        pass

    done: list[int] = []
    writes = {
        (module, name): getattr(module, name)
        for module, names in (
            (server_module, ("write_safetensors", "write_private", "replacing")),
            (open_sum, ("replacing",)),
            (simulation, ("write_safetensors", "write_shared")),
        )
        for name in names
    }
    for moment in range(10):
        folder = tmp_path / str(moment)
        run = world.federation(folder=folder)
        for _ in range(2):
            run.round()
        count, kept = 0, False

        def dying(*arguments: Any, real: Any, moment: int = moment) -> Any:
            nonlocal count, kept
            if count == moment:
                raise Dead
            count += 1
            kept = kept or real is write_shared  # what people look at is written when the round is kept
            return real(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            for (module, name), real in writes.items():
                patch.setattr(module, name, partial(dying, real=real))
            try:
                run.round()
                died = False
            except Dead:
                died = True
        again = world.federation(folder=folder)
        done.append(again.round_no)
        assert again.history.mark.round == again.round_no
        assert again.round_no == 3 or not kept
        list(again.rounds(4))
        assert (vector(again) == vector(whole)).all()
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [event["round"] for event in events] == [1, 2, 3, 4]
        assert (world.layout.flatten(read_safetensors(folder / "model.safetensors")) == vector(whole)).all()
        assert sorted(p.name for p in folder.glob("model-*")) == ["model-4.safetensors"]
        if not died:
            break
    # before the round: its number; then the open sum, the model, what members check it by, and the state that names it
    assert done == [2] * 5 + [3] * 3
    (folder / "run.json").write_bytes(canonical({"format": "quorumark-engine-run/v2"}))
    with pytest.raises(RecordError, match="another consortium"):
        world.federation(folder=folder)


def test_members_may_keep_their_rounds_on_disk(world: World, tmp_path: Path) -> None:
    group = group_of(world.manifest)
    members = {}
    for x, person in enumerate(world.people, 1):
        state = FolderState.create(tmp_path / str(x), person, group, after=0)
        members[x] = FederationMember(
            person, world.manifest, world.layout, train, 0.01 * x, world.shares[x], state=state
        )
    run = world.federation(members=members, folder=tmp_path / "run")
    assert [run.round().given_up for _ in range(2)] == ["", ""]
    # a server that lost its folder starts at round 1 again: no member takes part in a round that is over
    fresh = world.federation(members=members, folder=tmp_path / "lost")
    report = fresh.round()
    assert report.given_up_code == "round.too-few"
    assert report.excluded_codes == dict.fromkeys(range(1, 6), "round.over")
    (event,) = [json.loads(line) for line in (tmp_path / "lost/events.jsonl").read_text().splitlines()]
    assert event["given_up_code"] == "round.too-few"
    assert event["excluded_codes"] == {str(x): "round.over" for x in members}
    assert world.federation(members=members, folder=tmp_path / "lost").reports == [report]


def test_torch_models_train_and_resume(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.kit.training import torch_evaluate, torch_train

    torch.set_num_threads(1)

    def make() -> Any:
        return torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
        )

    torch.manual_seed(0)
    model = make().state_dict()
    layout = ModelLayout.of(make())
    people = identities(3)
    anchor = anchor_of(layout, model)
    terms = make_terms(people, 2, layout.coordinates, layout=layout.digest(), anchor=anchor)
    manifest, shares = make_key(people, terms)
    inputs = torch.randn(90, 4)
    data = (inputs, (inputs[:, 0] > 0).long())

    def federation() -> Federation:
        training = torch_train(make, learning_rate=0.02)
        members = {x: FederationMember(p, manifest, layout, training, data, shares[x]) for x, p in enumerate(people, 1)}
        evaluate = torch_evaluate(make, data)
        return Federation(manifest, layout, model, members, evaluate=evaluate, seed=1, folder=tmp_path / "run")

    run = federation()
    for _ in range(3):
        run.round()
    again = federation()
    reports = list(again.rounds(6))
    assert reports[-1].metrics["accuracy"] > 0.9
    assert again.model["1.num_batches_tracked"].dtype == torch.int64
    assert reports[-1].marked


def test_bfloat16_models_are_kept_and_resumed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = {"w": torch.randn(12, 10, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    people = identities(3)
    layout = ModelLayout.of(model)
    anchor = anchor_of(layout, model)
    manifest, shares = make_key(people, make_terms(people, 2, 120, layout=layout.digest(), anchor=anchor))

    def training(weights: Any, data: float, seed: int) -> Any:
        noise = torch.randn(12, 10, generator=torch.Generator().manual_seed(seed >> 1))
        return {"w": (weights["w"].float() + data * noise).to(torch.bfloat16)}

    def federation(folder: Path | None) -> Federation:
        members = {x: FederationMember(p, manifest, layout, training, 0.1, shares[x]) for x, p in enumerate(people, 1)}
        return Federation(manifest, layout, model, members, seed=1, folder=folder)

    whole, first = federation(None), federation(tmp_path)
    list(whole.rounds(4))
    list(first.rounds(2))
    again = federation(tmp_path)
    list(again.rounds(4))
    assert again.model["w"].dtype == torch.bfloat16
    assert (vector(again) == vector(whole)).all()
