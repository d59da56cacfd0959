"""The README's path exactly as it is printed, five times: z, accuracy with the mark and without, and how many commands.

    python -m benchmarks.readme [--seeds 0 1 2 3 4] [--out benchmarks/results/readme.json]

The file keeps the seeds that are not run again.

Each run has a process and an empty folder of its own. The seed is torch's, set before the page begins, so that the
initial model is another one; keys and what training is seeded with are new each time, from the operating system. Beside
it, plain FedAvg trains the same initial model with the page's own `digits.py`, without this project.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tests.kit.blocks import run_page, written_out

import quorumark as qm
from quorumark.simulation import RoundReport

OUT = Path("benchmarks/results/readme.json")
SEEDS = (0, 1, 2, 3, 4)
ROUNDS = 30
Row = dict[str, Any]


def one(page: str, seed: int) -> Row:
    """In the present folder, which is empty."""
    start, cpu = time.perf_counter(), sum(os.times()[:4])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sys.path.insert(0, os.getcwd())
    torch.manual_seed(seed)
    session = run_page(page, Path.cwd(), os.environ | {"PATH": path, "HOME": os.getcwd(), "COLUMNS": "120"})
    digits, model = session["digits"], session["model"]
    finding = qm.Certificate.from_bytes(Path("certificate.json").read_bytes()).finding
    last: RoundReport = session["run"].reports[-1]
    return {
        "seed": seed,
        "verdict": finding.verdict,
        "z": round(float(finding.z), 2),
        "expected_z": round(last.corrected_z, 2),
        "accuracy": accuracy(digits, session["run"].model),
        "plain_accuracy": accuracy(digits, plain(digits, model, seed)),
        "commands": written_out(page).total(),
        "most_commands": max(count for name, count in written_out(page).items() if name),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(sum(os.times()[:4]) - cpu, 1),
    }


def measured(seed: int) -> Row:
    """One run in a process of its own, with this tree's code, in an empty folder that is removed."""
    root = Path(__file__).resolve().parents[1]
    where = {name: value for name, value in os.environ.items() if not name.startswith("QUORUMARK_")}
    where |= {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "benchmarks.readme", "--one", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=where, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(done.stderr)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def accuracy(digits: Any, weights: Any) -> float:
    return float(digits.evaluate(weights).float().mean())


def plain(digits: Any, model: Any, seed: int) -> Any:
    """FedAvg by hand: five members, each round's average weighted by their examples."""
    parts = [digits.data(member, 5) for member in range(5)]
    shares = [len(labels) / sum(len(each[1]) for each in parts) for _, labels in parts]
    for number in range(ROUNDS):
        made = [digits.train(model, part, seed=10_000 * seed + 10 * number + k) for k, part in enumerate(parts)]
        model = {name: sum(a * each[name] for a, each in zip(shares, made, strict=True)) for name in model}
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--one", type=int, help="one run, in the present folder")
    chosen = parser.parse_args()
    root = Path(__file__).parents[1]
    if chosen.one is not None:
        print(json.dumps(one((root / "README.md").read_text(encoding="utf-8"), chosen.one)))  # noqa: T201
        return
    ask = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(ask, capture_output=True, check=True, text=True).stdout.strip()  # noqa: S603
    hardware = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    known = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {"rows": []}
    rows: dict[int, Row] = {row["seed"]: row for row in known["rows"]}
    for seed in chosen.seeds:
        rows[seed] = {"commit": commit, "hardware": hardware, **measured(seed)}
        print(rows[seed], flush=True)  # noqa: T201
        ordered = [rows[each] for each in sorted(rows)]
        chosen.out.write_text(json.dumps({"rows": ordered}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
