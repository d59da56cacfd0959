"""What was tried to see from public models alone how much of the mark is left (docs/strength.md, "Survival").

    python -m benchmarks.public_forecast [--only resnet-bn weight-norm] [--out benchmarks/results/public-forecast.json]

For the 24 architectures of docs/alignment.md, three seeds, trained as in `benchmarks.forecast`. Nothing is fitted:

    radial    a row or column that training shrinks takes the mark along: A ← f·A + S in each round, with
              f = 1 + ⟨D, θ⟩/‖θ‖² of the row or of the column, whichever is less, and at most 1
    reversal  training takes back in the next round what the last one moved by chance, and so does it the mark: the
              autocovariance of updates after one round, below its level after two to five, over that at once
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.kit import zoo, zoo_runs

from quorumark import codec, field
from quorumark.model.layout import ModelLayout
from quorumark.round.amplitudes import Amplitudes, MarkState
from quorumark.round.forecast import rises
from quorumark.round.survival import Step

OUT = Path("benchmarks/results/public-forecast.json")
SEEDS = (1, 2, 3)
LATER = (2, 3, 4, 5)  # rounds after which an update's autocovariance is its drift alone
KINDS = ("forecast", "radial", "reversal", "both", "z")
Row = dict[str, Any]


class Public:
    """What anybody sees of a run: updates of the carriers and amplitudes, round by round."""

    def __init__(self) -> None:
        self.updates: list[NDArray[np.float64]] = []
        self.left = np.zeros(0)  # A, with what rows and columns lost
        self.embedded: list[NDArray[np.float64]] = []
        self.state: Any = None

    def __call__(self, step: Step, state: MarkState, amplitudes: Amplitudes) -> None:
        spot = state.layout.carrying()
        before, moved = (
            np.asarray(field.to_signed(v)[spot] * 2.0**-codec.FRACTION_BITS, np.float64)
            for v in (step.model, field.sub(state.model, step.model))
        )
        new = np.asarray(amplitudes.vector * 2.0**-codec.FRACTION_BITS, np.float64)
        kept = shrunk(state.layout, before, moved)
        self.left = kept * self.left + new if self.left.size else new
        self.updates.append(moved)
        self.embedded.append(new)
        self.state = state

    def radial(self) -> float:
        """Over the forecast."""
        whole, part = (float(rises(self.state, zoo_runs.BALANCED, a).sum()) for a in (self.state.embedded(), self.left))
        return part / whole

    def reversal(self) -> float:
        total = np.sum(self.embedded, axis=0)
        each = np.array([np.divide(d, total, out=np.zeros_like(d), where=total > 0) for d in self.updates[3:]])
        gram, count = each @ each.T, len(each)

        def after(rounds: int) -> float:
            return float(np.mean(np.diagonal(gram, rounds))) if rounds < count else 0.0

        drift = float(np.mean([after(rounds) for rounds in LATER]))
        return 1 + min(0.0, (after(1) - drift) / max(after(0) - drift, 1e-9 * after(0)))


def shrunk(layout: ModelLayout, before: NDArray[np.float64], moved: NDArray[np.float64]) -> NDArray[np.float64]:
    """f for each weight."""
    out = np.ones_like(before)
    for spec, place in layout.spans("carrier"):
        w, d = (v[place].reshape(spec.shape[0], spec.shape[1], -1) for v in (before, moved))
        both = []
        for axes in ((1, 2), (0, 2)):
            along, size = (d * w).sum(axes, keepdims=True), (w * w).sum(axes, keepdims=True)
            part = 1 + np.divide(along, size, out=np.zeros_like(along), where=size > 0)
            both.append(np.broadcast_to(np.clip(part, 0, 1), w.shape))
        out[place] = np.minimum(*both).reshape(-1)
    return out


def row(name: str, commit: str) -> Row:
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in SEEDS:
        seen = Public()
        made = zoo_runs.marked(name, seed, rounds=20, rho="0.1", c_max="0.1", dither="3", watch=seen)
        zoo_runs.marked.cache_clear()
        forecast, radial, reversal = made.expected_z, seen.radial(), seen.reversal()
        values = (forecast, forecast * radial, forecast * reversal, forecast * radial * reversal, made.z(made.released))
        for kind, value in zip(found, values, strict=True):
            found[kind].append(round(value, 2))
    return {"name": name, **found, "commit": commit}


def off(entry: Row, kind: str) -> bool:
    """Whether it misses z by max(10 %, 2) or more, in the mean over seeds."""
    value, z = (sum(entry[name]) / len(entry[name]) for name in (kind, "z"))
    return abs(value - z) >= max(0.1 * z, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=zoo.MODELS, default=list(zoo.MODELS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    ask = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(ask, capture_output=True, check=True, text=True).stdout.strip()  # noqa: S603
    known = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else []
    rows = {entry["name"]: entry for entry in known}
    for name in chosen.only:
        rows[name] = row(name, commit)
        print(name, *(f"{kind} {np.mean(rows[name][kind]):.1f}" for kind in KINDS), flush=True)  # noqa: T201
        ordered = [rows[each] for each in zoo.MODELS if each in rows]
        chosen.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    for kind in KINDS[:-1]:
        print(kind, "is off for", [name for name in zoo.MODELS if name in rows and off(rows[name], kind)])  # noqa: T201


if __name__ == "__main__":
    main()
