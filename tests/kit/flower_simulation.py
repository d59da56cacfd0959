"""Runs the app of `flowers` in Flower's simulation on Ray, in a process of its own: FOLDER COUNT ROUNDS SEED PLAN."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from quorumark.consortium.records import Manifest
from quorumark.flower import secure, watermarked
from quorumark.model.layout import write_safetensors
from tests.kit.flowers import Model, app_for, initial, records_of


def simulate(folder: Path, app: Any, count: int, rounds: int, seed: int, model: Model) -> None:
    """Leaves the last model and what the rounds were in the folder."""
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def begin(grid: Any, context: Any) -> None:  # noqa: ARG001
        inner = FedAvg(min_train_nodes=count, min_available_nodes=count, fraction_evaluate=0.0)
        path = folder / "consortium.json"
        wraps = watermarked if Manifest.from_bytes(path.read_bytes()).terms.has_key else secure
        wrapped = wraps(inner, path, seed=seed, stage_timeout=1800)
        result = wrapped.start(grid=grid, initial_arrays=records_of(model), num_rounds=rounds, timeout=1800)
        write_safetensors({k: a.numpy().reshape(a.shape) for k, a in result.arrays.items()}, folder / "out.safetensors")
        reports = [{"members": r.members, "attempts": r.attempts, "seconds": r.seconds} for r in wrapped.reports]
        (folder / "reports.json").write_text(json.dumps(reports))

    init = {"num_cpus": 2, "include_dashboard": False}
    backend: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": init}
    run_simulation(server, app, count, backend_config=backend)


if __name__ == "__main__":
    where, number, turns, origin, lost = sys.argv[1:]
    stages = {(int(r), str(stage)): points for r, stage, points in json.loads(lost)}
    client = app_for(Path(where), lost=stages)
    simulate(Path(where), client, int(number), int(turns), int(origin), initial())
