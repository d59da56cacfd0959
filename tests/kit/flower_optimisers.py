"""The hospitals' network under server optimisers over Flower, sums checked: trains it under each, and verifies it.

python -m tests.kit.flower_optimisers            # the second table in docs/optimisers.md
"""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import strategy as strategies

from quorumark.flower import watermarked
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.verify.reference import Reference
from tests.kit.flowers import Consortium, LocalGrid, Model, app_for, records_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "flower-hospitals"))
ROUNDS = 20
STRENGTH = {"rule": "rho", "rho": "0.1", "c_max": "0.1"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavgm:server_momentum=0.9": ("FedAvgM", {"server_momentum": 0.9}),
    "fedadam:eta=0.01": ("FedAdam", {"eta": 0.01}),
    "fedyogi:eta=0.01": ("FedYogi", {"eta": 0.01}),
    "fedadagrad:eta=0.02": ("FedAdagrad", {"eta": 0.02}),
}


def measure(text: str, name: str, options: dict[str, Any]) -> tuple[float, float, float, int, int]:
    """z, the forecast before the last round, accuracy, and how many rounds were marked and given up."""
    from hospitals import task

    torch.set_num_threads(1)
    data = [task.load_data(i) for i in range(5)]

    def trained(model: Model, _: float, seed: int, rate: float) -> Model:
        torch.manual_seed(seed)
        net = task.Net()
        net.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in model.items()})
        task.train(net, data[at[0]], 1, 0.001 * rate)
        return {k: v.numpy() for k, v in net.state_dict().items()}

    at = [0]

    def examples(x: int) -> int:
        return int(task.EXAMPLES[x - 1])

    initial = {k: v.numpy() for k, v in task.initial_model().state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        world = Consortium.agree(Path(folder), 5, 3, model=initial, strength=STRENGTH, policy={"optimiser": text})
        roster = tuple(replace(m, examples=n) for m, n in zip(world.terms.roster, task.EXAMPLES, strict=True))
        world.terms = replace(world.terms, roster=roster)
        world.set_up()
        app = app_for(Path(folder), trained=trained, examples=examples)

        def which(message: Any, context: Any) -> Any:
            at[0] = int(context.node_config["partition-id"])
            return app(message, context)

        kind = getattr(strategies, name)
        inner = kind(min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0, **options)
        wrapped = watermarked(inner, world.path, seed=1)
        start = {"initial_arrays": records_of(initial), "num_rounds": ROUNDS}
        result = wrapped.start(grid=LocalGrid(which, 5), **start)
        model = {k: a.numpy() for k, a in result.arrays.items()}
        shares = {}
        for x in range(1, 6):
            home, unlock = world.home(x)
            shares[x] = home.only_consortium().share(unlock).vector()
        reference = Reference.read(world.path)
        known = KnownKey.from_shares(reference.manifest, shares, reference.layout, reference.anchor)
        net = task.Net()
        net.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in model.items()})
        marked = sum(report.marked for report in wrapped.reports)
        given_up = sum(bool(report.given_up) for report in wrapped.reports)
        accuracy = task.test(net, task.load_data(None))[1]
        z, expected = known.z(TensorsInMemory(model)), wrapped.reports[-1].expected_z
        return z, expected, accuracy, marked, given_up


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    for chosen, (strategy, settings) in CASES.items():
        z, expected, right, rounds, lost = measure(chosen, strategy, settings)
        print(f"| `{chosen}` | {z:.1f} | {expected:.1f} | {100 * right:.1f} % | {rounds} | {lost} |", flush=True)  # noqa: T201
