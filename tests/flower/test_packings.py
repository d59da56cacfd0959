"""The demo's network through Flower with one to four weights in an element: what it learns, and z."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
pytest.importorskip("torch", reason="the extra 'demo' is not installed")
pytest.importorskip("sklearn", reason="the extra 'demo' is not installed")

import torch

from quorumark import demo
from quorumark.flower import watermarked
from quorumark.research.known import KnownKey, TensorsInMemory
from tests.kit.flower_runs import SEED, InOrder
from tests.kit.flowers import Consortium, LocalGrid, Model, app_for, records_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

ROUNDS = 12


class Hospitals:
    """Members in the order in which they are called, each with its own digits."""

    def __init__(self, world: demo.Digits) -> None:
        self.world, self.calls = world, 0

    def __call__(self, model: Model, _: float, seed: int, rate: float) -> Model:
        mine = self.world.data[self.calls % len(self.world.data)]
        self.calls += 1
        made = self.world.train({k: torch.from_numpy(v.copy()) for k, v in model.items()}, mine, seed, rate)
        return {name: tensor.numpy() for name, tensor in made.items()}


@pytest.mark.parametrize(
    "packing", [pytest.param(q, marks=[pytest.mark.slow] if q != "4" else []) for q in ("1", "2", "3", "4")]
)
def test_it_learns_and_the_mark_is_found(tmp_path: Path, packing: str) -> None:
    """Its accuracy is that of a network that learned, and z is near its forecast, in bytes that the packing says. The
    key is another one in each run: z differs from the forecast by about 1 for that alone."""
    data = demo.digits()
    model = {name: tensor.numpy() for name, tensor in data.initial(1).items()}
    policy = {"sums": "checked", "packing": packing}
    world = Consortium.deal(tmp_path, 5, 3, model=model, strength=demo.STRENGTH, policy=policy)
    wrapped = watermarked(
        InOrder(min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0), world.path, seed=SEED
    )
    grid = LocalGrid(app_for(world.folder, trained=Hospitals(data)), 5)
    result = wrapped.start(grid=grid, initial_arrays=records_of(model), num_rounds=ROUNDS, timeout=60)
    trained = {name: np.asarray(array.numpy()).reshape(array.shape) for name, array in result.arrays.items()}

    reports = wrapped.reports
    assert [report.given_up for report in reports] == [""] * ROUNDS
    assert all(report.marked for report in reports[3:])
    a_weight = reports[-1].uploaded_bytes / 5 / world.layout.size
    assert 8 / int(packing) <= a_weight <= 8 / int(packing) + 0.1
    accuracy = data.evaluate({name: torch.from_numpy(tensor.copy()) for name, tensor in trained.items()})["accuracy"]
    shares = {}
    for x in (1, 2, 3):
        home, unlock = world.home(x)
        shares[x] = home.only_consortium().share(unlock).vector()
    assert world.manifest is not None
    z = KnownKey.from_shares(world.manifest, shares, world.layout, TensorsInMemory(model)).z(trained)
    assert accuracy > 0.9
    assert reports[-1].expected_z is not None
    assert z > max(6, reports[-1].expected_z - 6)
