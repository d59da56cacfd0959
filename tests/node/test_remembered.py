"""What a node's process remembers between two messages, and what it must not: files on disk count."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.errors import RecordError
from quorumark.model.layout import read_safetensors, write_safetensors
from quorumark.node import remembered
from quorumark.node.journal import allow_repeats
from tests.kit.flowers import Consortium
from tests.kit.rounds import Run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return Consortium.make(tmp_path_factory.mktemp("remembered"))


@pytest.fixture
def world(made: Consortium, tmp_path: Path) -> Consortium:
    return made.copy(tmp_path / "world")


def rounds_of(world: Consortium, x: int) -> Path:
    return world.home(x)[0].only_consortium().path / "rounds"


def test_a_process_that_remembers_makes_the_same_models_as_new_processes(
    made: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    for name in ("remembers", "forgets"):
        if name == "forgets":
            monkeypatch.setattr(remembered, "find", lambda *_: None)
            monkeypatch.setattr(remembered, "match", lambda *_: None)
            monkeypatch.setattr("quorumark.round.history._LARGEST_ADVANCED", -1)
        run = Run(made.copy(tmp_path / name))
        for _ in range(4):
            model = run.round()
        models.append({tensor: np.asarray(value).tobytes() for tensor, value in model.items()})
    assert models[0] == models[1]


def test_a_model_that_was_changed_on_disk_is_noticed(world: Consortium) -> None:
    run = Run(world)
    run.round()
    run.round()
    offer, told = run.offer()
    run.join(offer, told)
    run.server.announce()
    (path,) = rounds_of(world, 2).glob("state-*/model.safetensors")
    model = {name: np.array(tensor) for name, tensor in read_safetensors(path).items()}
    name = next(name for name, tensor in model.items() if tensor.dtype.kind == "f")
    model[name] = model[name] + 1
    write_safetensors(model, path)
    run.node(3).handle("upload", run.server.asked(3), {})
    with pytest.raises(RecordError):  # it is not the model that the member's notes name
        run.node(2).handle("upload", run.server.asked(2), {})


@pytest.mark.parametrize("simulation", [False, True])
def test_files_are_synced_except_in_a_simulation(
    world: Consortium, simulation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if simulation:
        for x in range(1, world.count + 1):
            home, unlock = world.home(x)
            allow_repeats(home.only_consortium(), home.identity(unlock))
    counted: list[int] = []
    real = os.fsync

    def counting(descriptor: int) -> None:
        counted.append(1)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", counting)
    run = Run(world)
    stages: dict[str, int] = {}

    def count(stage: str, act: Any) -> None:
        before = len(counted)
        act()
        stages[stage] = len(counted) - before

    offer, told = run.offer()
    count("join and ready", lambda: run.join(offer, told))
    run.server.announce()
    count("upload", run.upload)
    count("unmask", run.unmask)
    assert all(found == 0 if simulation else found >= 2 * world.count for found in stages.values()), stages
