"""Runs of a wrapped strategy over a Grid; import it after `pytest.importorskip("flwr")`."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.serverapp import strategy as strategies

from quorumark.flower import watermarked
from tests.kit.flowers import Consortium, Model, records_of
from tests.kit.flowers import allow as allow
from tests.kit.flowers import same as same
from tests.kit.refusals import stopped

SEED = 3


def fedavg(nodes: int = 5, **options: Any) -> Any:
    return strategies.FedAvg(min_train_nodes=nodes, min_available_nodes=nodes, **{"fraction_evaluate": 0.0, **options})


def run(world: Consortium, grid: Any, rounds: int, inner: Any = None, **options: Any) -> tuple[Any, Model]:
    """A wrapped run: the strategy with its reports, and the last model."""
    wrapped = watermarked(inner or fedavg(len(grid.apps)), world.path, **{"seed": SEED, **options})
    result = wrapped.start(grid=grid, initial_arrays=records_of(world.model), num_rounds=rounds, timeout=60)
    return wrapped, {name: np.asarray(array.numpy()).reshape(array.shape) for name, array in result.arrays.items()}


def run_in_vain(world: Consortium, grid: Any, code: str) -> Any:
    """A wrapped run of one round that is given up: it gives no model that an app could save, and repeats the sentence
    of a node that refused with this code."""
    wrapped = watermarked(fedavg(), world.path, seed=SEED)
    with stopped("round.none-finished") as caught:
        wrapped.start(grid=grid, initial_arrays=records_of(world.model), num_rounds=1, timeout=60)
    report = wrapped.reports[0]
    assert any(report.excluded[x] in str(caught.value) for x, said in report.excluded_codes.items() if said == code)
    return wrapped


def as_stages(plan: dict[tuple[int, str], list[int]]) -> dict[tuple[int, str], list[int]]:
    return {(r, "join" if stage == "train" else stage): points for (r, stage), points in plan.items()}


class InOrder(strategies.FedAvg):  # type: ignore[misc]
    """Sends to the nodes in their order, so that a test knows who comes first."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        messages = super().configure_train(server_round, arrays, config, grid)
        return sorted(messages, key=lambda message: message.metadata.dst_node_id)
