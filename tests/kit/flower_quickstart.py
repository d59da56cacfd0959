"""Runs the quickstart app that is in this folder in Flower's simulation, with the settings of its pyproject.toml, the
consortium that `prepare` made here, and the rounds that it planned: python -m tests.kit.flower_quickstart ROUNDS."""

from __future__ import annotations

import copy
import sys
import tomllib
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from quickstart import client_app, server_app

SETTINGS = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
assert "quorumark-homes" in SETTINGS  # Flower refuses others in --run-config
SETTINGS["quorumark-homes"] = str(Path("consortium").resolve())
SETTINGS["num-server-rounds"] = int(sys.argv[1])


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
