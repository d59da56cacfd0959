"""Rounds of some members, drawn from many, sums checked, 10 % of them lost: what is finished, z and its forecast.

    OMP_NUM_THREADS=1 python -m benchmarks.sampled [--out benchmarks/results/sampled.json]

10 of 50 members (t = 5) and 16 of 128 (t = 8), 30 rounds, three seeds; 10 % are lost while they train, or at every
stage, each time anew. A dealer makes the key, so that z can be computed from it. At the end the server makes a state
up, and asks those who are drawn from there. docs/secagg.md shows the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tests.kit.sampled import ALL, measured

OUT = Path("benchmarks/results/sampled.json")
SIZES = ((50, 5, 10), (128, 8, 16))
STAGES = {"training": ("train",), "every stage": ALL}
ROUNDS, SIDE, SEEDS = 30, 300, (1, 2, 3)
Row = dict[str, Any]


def row(size: tuple[int, int, int], stages: str, commit: str) -> Row:
    start = time.process_time()
    lost = dict.fromkeys(STAGES[stages], 0.1)
    runs = [asdict(measured(size, lost, ROUNDS, SIDE, seed)) for seed in SEEDS]
    sizes = dict(zip(("members", "threshold", "cohort"), size, strict=True))
    about = {"carriers": SIDE**2, "lost": stages, "rounds": ROUNDS, "commit": commit}
    seconds = round(time.process_time() - start, 1)
    return {**sizes, **about, "cpu_seconds": seconds, "hardware": f"CPU ({platform.machine()})", "runs": runs}


def line(found: Row) -> str:
    """The row as docs/secagg.md has it."""
    runs = found["runs"]
    z, forecast = (float(np.mean([one[name] for one in runs])) for name in ("z", "forecast"))
    done, redrawn = (", ".join(str(one[name]) for one in runs) for name in ("done", "redrawn"))
    wasted = sum(len(one["wasted"]) for one in runs)
    who = f"{found['cohort']} of {found['members']} (t = {found['threshold']})"
    joined = sum(sum(one["refusals"].values()) != 2 * found["cohort"] for one in runs)
    text = f"| {who} | {found['lost']} | {done} of {found['rounds']} | {wasted} | {redrawn} "
    return text + f"| {z:.1f} | {forecast:.1f} | {joined} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    ask = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(ask, capture_output=True, check=True, text=True).stdout.strip()  # noqa: S603
    rows = []
    for size in SIZES:
        for stages in STAGES:
            rows.append(row(size, stages, commit))
            print(line(rows[-1]), flush=True)  # noqa: T201
            chosen.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
