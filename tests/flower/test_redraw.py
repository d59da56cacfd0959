"""Cohorts under Flower: one that cannot be completed is drawn anew, with the same models as in one process."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.serverapp import strategy as strategies

from quorumark.flower import watermarked
from quorumark.round.group import group_of
from quorumark.simulation import Losses
from tests.kit.flowers import LocalGrid, app_for, records_of
from tests.kit.states import with_cohorts

SEED = 3
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.mark.parametrize(("sums", "rounds"), [("unchecked", 4), ("checked", 8)])
def test_a_cohort_that_fails_is_drawn_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sums: str, rounds: int
) -> None:
    """Where sums are checked, members who come back after several rounds follow the links of those they missed."""
    for name, value in {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}.items():
        monkeypatch.setenv(name, value)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    world = with_cohorts(tmp_path, 8, 3, 5, sums)
    assert world.manifest is not None
    alone = world.in_process(rounds, SEED, Losses({(2, "train"): range(1, 9)}))
    grid = LocalGrid(app_for(tmp_path, lost={(2, "join"): range(1, 9)}), 8)
    inner = strategies.FedAvg(min_train_nodes=8, min_available_nodes=8, fraction_evaluate=0.0)
    wrapped = watermarked(inner, world.path, seed=SEED)
    result = wrapped.start(grid=grid, initial_arrays=records_of(world.model), num_rounds=rounds, timeout=60)
    drawn = [report.members for report in wrapped.reports]
    assert drawn == [report.members for report in alone.reports]
    assert [bool(report.given_up) for report in wrapped.reports] == [number == 2 for number in range(1, rounds + 1)]
    assert wrapped.reports[1].given_up_code == "round.too-few"
    group = group_of(world.manifest)
    assert all(len(members) == group.size for number, members in enumerate(drawn, 1) if number != 2)
    assert all(report.excluded == {} for report in wrapped.reports[2:])
    for name, tensor in alone.model.items():
        assert np.array_equal(np.asarray(result.arrays[name].numpy()).reshape(tensor.shape), tensor)
