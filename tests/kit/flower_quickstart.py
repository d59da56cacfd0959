"""Runs examples/flower-quickstart in Flower's simulation, with the consortium that its `prepare` made here."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from quickstart import client_app, server_app

HOMES = Path("consortium").resolve()
SETTINGS = {
    "num-server-rounds": 3,
    "fraction-train": 1.0,
    "local-epochs": 10,
    "lr": 0.05,
    "quorumark-homes": str(HOMES),
}


class Configured(ClientApp):  # type: ignore[misc]
    """The app with the run config that `flwr run` would give it."""

    def __call__(self, message: Any, context: Any) -> Any:
        configured = copy.copy(context)  # Flower refuses the replies of an app that changes its run config
        configured.run_config = {**context.run_config, **SETTINGS}
        return client_app.app(message, configured)


def main() -> None:
    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def begin(grid: Any, context: Any) -> None:
        context.run_config.update(SETTINGS)
        server_app.app(grid=grid, context=context)

    backend: Any = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "include_dashboard": False}}
    run_simulation(server, Configured(), 5, backend_config=backend)


if __name__ == "__main__":
    main()
