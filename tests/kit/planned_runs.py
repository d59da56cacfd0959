"""What came of planned runs: python -m tests.kit.planned_runs benchmarks/results/plans.json [NAME …]

Small models that five members train on scikit-learn's digits, with the strength that a plan proposes; some minutes.
With names only those rows are run, and the file keeps the others. docs/strength.md shows the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quorumark.consortium.plan import Plan
from tests.kit.planned import Recipe, cnn, marked_run, mlp, normed, quickstart, strided

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Planned:
    """A kind of training, with what is set before the plan is asked; no rounds: the fewest that the plan proposes."""

    name: str
    recipe: Recipe
    rounds: int | None = 30
    seeds: int = 3
    strength: Mapping[str, str] = field(default_factory=dict)
    compare: bool = False  # with the same runs without a mark


DECAYED = Recipe(make=mlp, optimiser="sgd", learning_rate=0.05, decay=5e-3, epochs=2)
ROWS = [
    Planned("README's CNN, Adam", Recipe(make=cnn), seeds=5, compare=True),
    Planned("the same with FedProx (μ = 0.1)", Recipe(make=cnn, pull=0.1)),
    Planned("the same, members with two classes each", Recipe(make=cnn, split="classes")),
    Planned("the same, SGD at rate 0.02", Recipe(make=cnn, optimiser="sgd", learning_rate=0.02)),
    Planned("the same, Adam, the fewest rounds", Recipe(make=cnn), None),
    Planned("the same, Adam, too few rounds", Recipe(make=cnn), 5),
    Planned("MLP, Adam", Recipe(make=mlp)),
    Planned("the same, SGD at rate 0.02", Recipe(make=mlp, optimiser="sgd", learning_rate=0.02)),
    Planned("BatchNorm, Adam", Recipe(make=normed)),
    Planned("BatchNorm and strides, SGD at rate 0.1", Recipe(make=strided, optimiser="sgd", learning_rate=0.1), None),
    Planned("the same, SGD at rate 0.005", Recipe(make=strided, optimiser="sgd", learning_rate=0.005), None),
    Planned("the same, Adam at rate 0.001", Recipe(make=strided), None),
    Planned("Flower's quickstart, SGD at rate 0.05, five epochs", quickstart(0.05, 5), None),
    Planned("the same, one epoch", quickstart(0.05, 1), None),
    Planned("the same, one epoch at rate 0.1", quickstart(0.1, 1), None),
    # one round: 18 steps of rate 0.05 with momentum 0.9 from 0: 0.05·5e-3·Σ_j (1 − 0.9^j)/(1 − 0.9)
    Planned("MLP, SGD, weight decay 5·10^-3", DECAYED, 120, 2, {"decay": "0.0259", "rho": "0.1", "c_max": "0.1"}),
]


def carriers(row: Planned) -> int:
    return sum(tensor.numel() for tensor in row.recipe.make().state_dict().values() if tensor.dim() > 1)


def measured(row: Planned) -> dict[str, Any]:
    """A row of the table: the plan, and what came of it in the mean over seeds."""
    size = carriers(row)
    plan = Plan.propose(size, row.rounds, strength=row.strength)
    runs = [marked_run(row.recipe, plan.rounds, plan.strength, seed) for seed in range(row.seeds)]
    plain = [marked_run(row.recipe, plan.rounds, None, seed) for seed in range(row.seeds if row.compare else 0)]
    return {
        "name": row.name,
        "carriers": size,
        "rounds": plan.rounds,
        "rho": plan.strength["rho"],
        "c_max": plan.strength["c_max"],
        "expected_z": plan.expected_z,
        "least_z": plan.least_z,
        "forecast": [round(run.expected, 2) for run in runs],
        "z": [round(run.z, 2) for run in runs],
        "seen": [round(run.seen, 3) for run in runs],
        "accuracy": [round(run.accuracy, 4) for run in runs],
        "plain_accuracy": [round(run.accuracy, 4) for run in plain],
    }


def line(row: Mapping[str, Any]) -> str:
    """The row as docs/strength.md has it."""
    forecast, z = (float(np.mean(row[name])) for name in ("forecast", "z"))
    return (
        f"| {row['name']} | {row['carriers']:,} | {row['rounds']} | {row['rho']}, {row['c_max']} | {len(row['z'])} | "
        f"{row['expected_z']:.0f}, {row['least_z']:.0f} | {forecast:.1f} | {z:.1f} ({min(row['z']):.1f} to "
        f"{max(row['z']):.1f}) | {max(row['seen']):.2f} |"
    )


def main(out: Path, only: Collection[str]) -> None:
    torch.set_num_threads(1)
    known: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": []}
    rows: dict[tuple[str, int], Any] = {  # "the same" is said of several models
        (row["name"], row["carriers"]): {"commit": known.get("commit", ""), **row} for row in known["rows"]
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for planned in ROWS:
        if not only or planned.name in only:
            found = rows[planned.name, carriers(planned)] = {"commit": commit.strip(), **measured(planned)}
            print(line(found), flush=True)  # noqa: T201
            ordered = [rows[key] for key in ((each.name, carriers(each)) for each in ROWS) if key in rows]
            out.write_text(json.dumps({"rows": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
