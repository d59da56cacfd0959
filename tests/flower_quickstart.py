"""Runs examples/flower-quickstart in Flower's simulation, with a consortium made in the current folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from quickstart import client_app, server_app, task
from tests.flowers import Consortium

HOMES = Path("consortium").resolve()
SETTINGS = {"num-server-rounds": 3, "fraction-train": 1.0, "local-epochs": 1, "lr": 0.01, "quorumark-homes": str(HOMES)}


class Configured(ClientApp):  # type: ignore[misc]
    """The app with the run config that `flwr run` would give it."""

    def __call__(self, message: Any, context: Any) -> Any:
        context.run_config.update(SETTINGS)
        return client_app.app(message, context)


def main() -> None:
    HOMES.mkdir()
    torch.manual_seed(2026)
    model = {name: tensor.numpy() for name, tensor in task.Net().state_dict().items()}
    world = Consortium.agree(HOMES, 5, 3, model=model, strength={"rule": "rho", "rho": "0.1", "c_max": "0.1"})
    counts = [len(task.load_data(i, 5)[0].dataset) for i in range(5)]
    roster = tuple(replace(m, examples=n) for m, n in zip(world.terms.roster, counts, strict=True))
    world.terms = replace(world.terms, roster=roster)
    world.found()
    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def begin(grid: Any, context: Any) -> None:
        context.run_config.update(SETTINGS)
        server_app.app(grid=grid, context=context)

    backend: Any = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "include_dashboard": False}}
    run_simulation(server, Configured(), 5, backend_config=backend)


if __name__ == "__main__":
    main()
