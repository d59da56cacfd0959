"""The forecast of z, and what the members' noise makes of it, beside the z that is measured, over three seeds.

    python -m benchmarks.forecast [--only resnet-bn demo] [--out benchmarks/results/forecast.json]

The demo's training with the protocol's real messages; kinds of training that five members do with the strength that a
plan proposes (`tests.kit.planned_runs`); and the 24 architectures of docs/alignment.md, trained by one who knows the
key, with the noise of five members (`tests.kit.zoo_runs`). The file keeps the rows that are not run again.
docs/strength.md shows the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import packing
from tests.kit import planned_runs, zoo, zoo_runs
from tests.kit.planned import marked_run
from tests.kit.zoo_runs import likely

from quorumark import demo
from quorumark.consortium.plan import Plan
from quorumark.round.survival import Survival

OUT = Path("benchmarks/results/forecast.json")
SEEDS = (1, 2, 3)
Row = dict[str, Any]
Run = tuple[float, float, Survival | None, Survival | None]
"""The forecast, z, and what noise says is left: all members' together, and the median of what each would tell."""


def demo_run(seed: int) -> Run:
    found = packing.run("digits", 2, seed, demo.ROUNDS, "")
    told = Survival(found["survival"], found["survival_error"])
    return found["expected_z"], found["z"], told if told.error else None, None


def planned_run(planned: planned_runs.Planned, seed: int) -> Run:
    size = sum(tensor.numel() for tensor in planned.recipe.make().state_dict().values() if tensor.dim() > 1)
    plan = Plan.propose(size, planned.rounds, strength=planned.strength)
    ran = marked_run(planned.recipe, plan.rounds, plan.strength, seed)
    return ran.expected, ran.z, ran.survival, ran.told


def zoo_run(name: str, seed: int) -> Run:
    made = zoo_runs.marked(name, seed, rounds=20, rho="0.1", c_max="0.1", dither="3")
    zoo_runs.marked.cache_clear()
    return made.expected_z, made.z(made.released), made.survival, made.told


PLANNED = ("README's CNN, Adam", "FedProx", "two classes each", "BatchNorm, Adam", "weight decay")
CASES: dict[str, Callable[[int], Run]] = {
    "demo": demo_run,
    **{
        each.name.replace("the same", "README's CNN"): partial(planned_run, each)
        for each in planned_runs.ROWS
        if any(part in each.name for part in PLANNED)
    },
    **{name: partial(zoo_run, name) for name in zoo.MODELS},
}


def row(name: str, commit: str) -> Row:
    start = time.perf_counter()
    runs = [CASES[name](seed) for seed in SEEDS]
    return {
        "name": name,
        "forecast": [round(forecast, 2) for forecast, *_ in runs],
        "survival": [found and found.part for *_, found, _ in runs],
        "error": [found and found.error for *_, found, _ in runs],
        "corrected": [round(likely(found) * forecast, 2) for forecast, _, found, _ in runs],
        "told": [found and found.part for *_, found in runs],
        "told_error": [found and found.error for *_, found in runs],
        "told_z": [round(likely(found) * forecast, 2) for forecast, *_, found in runs],
        "z": [round(z, 2) for _, z, *_ in runs],
        "seconds": round(time.perf_counter() - start, 1),
        "commit": commit,
    }


def line(entry: Mapping[str, Any]) -> str:
    """The row as docs/strength.md has it."""
    forecast, corrected, told, z = (np.mean(entry[name]) for name in ("forecast", "corrected", "told_z", "z"))
    parts = (left(entry["survival"], entry["error"]), left(entry["told"], entry["told_error"]))
    deployed = f"{told:.1f}" if parts[1] else ""
    return f"| {entry['name']} | {forecast:.1f} | {parts[0]} | {corrected:.1f} | {parts[1]} | {deployed} | {z:.1f} |"


def left(parts: list[float | None], errors: list[float | None]) -> str:
    """The mean over seeds, with the largest error."""
    found = [part for part in parts if part is not None]
    return f"{100 * np.mean(found):.0f} ± {100 * max(filter(None, errors)):.0f} %" if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    ask = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(ask, capture_output=True, check=True, text=True).stdout.strip()  # noqa: S603
    known = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else []
    rows = {entry["name"]: entry for entry in known}
    for name in chosen.only:
        rows[name] = row(name, commit)
        print(line(rows[name]), flush=True)  # noqa: T201
        ordered = [rows[each] for each in CASES if each in rows]
        chosen.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
