"""The table by architecture of docs/alignment.md: python -m tests.kit.zoo_table writes its figures.

For each model of `zoo`, seed 1: z as released, disguised, aligned, and aligned after more was done to the disguised
one, each of these with what knowing the disguise gives.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.kit import zoo, zoo_runs
from tests.kit.zoo_disguises import disguised, revealed

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.json"


def pruned(_: str, weights: zoo_runs.State) -> zoo_runs.State:
    """Half of the weights of every tensor are 0."""
    return {n: w * (w.abs() > w.abs().median()) if w.shape[1:].numel() > 1 else w for n, w in weights.items()}


def four_bits(_: str, weights: zoo_runs.State) -> zoo_runs.State:
    """Fifteen numbers for the weights of a row."""

    def rounded(w: torch.Tensor) -> torch.Tensor:
        unit = w.abs().flatten(1).amax(1).clamp_min(1e-12).view(-1, *[1] * (w.dim() - 1)) / 7
        return (w / unit).round() * unit

    return {n: rounded(w) if w.shape[1:].numel() > 1 else w for n, w in weights.items()}


def tuned(name: str, weights: zoo_runs.State) -> zoo_runs.State:
    return zoo_runs.trained(name, weights, 77, 1, 1e-3)


ROUGH = {"fine-tuned": tuned, "50 % pruned": pruned, "4 bits": four_bits}


def row(name: str) -> dict[str, list[float]]:
    """z as it is, disguised, aligned; then for each of ROUGH aligned and with the disguise taken back."""
    made = zoo_runs.marked(name)
    hidden = disguised(name, made.released, 1)
    found = {"z": [made.z(made.released), made.z(hidden), made.z_aligned(hidden)]}
    for what, change in ROUGH.items():
        changed = change(name, hidden)
        found[what] = [made.z_aligned(changed), made.z(revealed(name, changed, 1))]
    return {what: [round(z, 1) for z in values] for what, values in found.items()}


def line(name: str, entry: dict[str, list[float]]) -> str:
    """A line of the table."""
    cells = [f"{z:.1f}" for z in entry["z"]]
    cells += [f"{aligned:.1f} of {known:.1f}" for aligned, known in (entry[what] for what in ROUGH)]
    return f"| {name} | {' | '.join(cells).replace('-', '−')} |"


def main() -> None:
    made = {name: row(name) for name in zoo.MODELS}
    FILE.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(line(name, entry) for name, entry in made.items()) + "\n")


if __name__ == "__main__":
    main()
