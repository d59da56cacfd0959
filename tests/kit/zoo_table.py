"""The tables by architecture of docs/alignment.md: python -m tests.kit.zoo_table [--quick] [MODEL…] writes the figures.

For each model of `zoo`: z as released, disguised, aligned, and aligned after more was done to the disguised one, each
of these with what knowing the disguise gives (seed 1); the least of ten seeds; the worst of 200 disguises; what z is
for people who did nothing; and how much of each suspect is like the anchor, by which doubt is decided. With --quick
only what seed 1 gives; all of it takes a quarter of an hour of one core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quorumark.align.alignment import Alignment
from quorumark.model.statistic import canonical_form
from quorumark.research.known import TensorsInMemory
from tests.kit import zoo, zoo_runs
from tests.kit.zoo_disguises import disguised, revealed

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.json"
# What reads a part of a tensor's rows can be permuted apart from what reads the others, and groups are of whole axes:
# the columns of grouped convolutions, of experts in one tensor, and of the packed projections of a decoder.
SHORT = ("resnext", "experts-stacked", "encoder-decoder")
TRIED = ("mlp", "resnet-bn", "mobilenetv2", "lstm", "gpt2")
SEEDS, ROUGH_SEEDS, INNOCENTS, DISGUISES = range(1, 11), range(1, 4), range(1, 4), range(1000, 1200)
LONG = 3 * zoo_runs.ROUNDS  # epochs after which a model is far from the anchor


def pruned(_: str, weights: zoo_runs.State, part: float = 0.5) -> zoo_runs.State:
    """A part of the weights of every tensor is 0."""
    return {n: w * (w.abs() > w.abs().quantile(part)) if w.shape[1:].numel() > 1 else w for n, w in weights.items()}


def rounded(_: str, weights: zoo_runs.State, steps: int = 7) -> zoo_runs.State:
    """So many steps on either side of 0 for the weights of a row: 7 are fifteen numbers, which 4 bits can hold."""

    def row_by_row(w: torch.Tensor) -> torch.Tensor:
        unit = w.abs().flatten(1).amax(1).clamp_min(1e-12).view(-1, *[1] * (w.dim() - 1)) / steps
        return (w / unit).round() * unit

    return {n: row_by_row(w) if w.shape[1:].numel() > 1 else w for n, w in weights.items()}


def tuned(name: str, weights: zoo_runs.State, epochs: int = 1) -> zoo_runs.State:
    return zoo_runs.trained(name, weights, 77, epochs, 1e-3)


ROUGH = {"fine-tuned": tuned, "50 % pruned": pruned, "4 bits": rounded}
# what leaves little of a model: doubt is asked of these as well
RUINED = {
    "90 % pruned": lambda name, weights: pruned(name, weights, 0.9),
    "2 bits": lambda name, weights: rounded(name, weights, 1),
}


def kept(name: str, seed: int) -> list[float]:
    """z as released, disguised, and aligned."""
    made = zoo_runs.marked(name, seed)
    hidden = disguised(name, made.released, seed)
    return [made.z(made.released), made.z(hidden), made.z_aligned(hidden)]


def roughened(name: str, what: str, seed: int) -> list[float]:
    """z of a disguised model after something more was done to it: aligned, and with the disguise taken back."""
    made = zoo_runs.marked(name, seed)
    changed = ROUGH[what](name, disguised(name, made.released, seed))
    return [made.z_aligned(changed), made.z(revealed(name, changed, seed))]


def tried(name: str) -> list[float]:
    """Aligned z of many disguises of one model."""
    made = zoo_runs.marked(name)
    return [made.z_aligned(disguised(name, made.released, attempt)) for attempt in DISGUISES]


def innocent(name: str, seed: int) -> tuple[float, float]:
    """Of a model from the same start without a mark, disguised and aligned: z, and how normal z is for 1,000 keys.

    The latter is the p-value of Kolmogorov and Smirnov.
    """
    from scipy import stats

    made = zoo_runs.marked(name)
    weights = disguised(name, zoo_runs.innocent(name, seed), seed)
    suspect = made.align(weights).model(TensorsInMemory(weights))
    form = canonical_form("balanced-anchor/v1", made.layout, suspect, TensorsInMemory(made.anchor))
    x = form.x.astype(np.float64)
    keys = np.random.default_rng(seed).integers(0, 2, (1000, x.size), np.int8)
    drawn = (2.0 * (keys @ x) - x.sum()) / np.linalg.norm(x)
    return made.known.z(suspect), float(stats.kstest(drawn, "norm").pvalue)


def likeness(name: str) -> dict[str, list[list[float]]]:
    """For suspects of each kind, what share of their weights is like the anchor's, and aligned z."""
    made = zoo_runs.marked(name)
    hidden = [disguised(name, made.released, seed) for seed in ROUGH_SEEDS]
    suspects = {
        "marked, disguised": hidden,
        **{f"… + {what}": [change(name, w) for w in hidden] for what, change in (ROUGH | RUINED).items()},
        "… + fine-tuned for long": [tuned(name, hidden[0], LONG)],
        "not marked, from the same start": [disguised(name, zoo_runs.innocent(name, n), n) for n in INNOCENTS],
        "… for long": [disguised(name, zoo_runs.innocent(name, 9, LONG), 9)],
        "of another origin": [disguised(name, zoo_runs.marked(name, seed).released, seed) for seed in SEEDS[1:]],
    }
    found: dict[str, list[list[float]]] = {}
    for kind, every in suspects.items():
        for weights in every:
            aligned = made.align(weights)
            z = made.known.z(aligned.model(TensorsInMemory(weights)))
            found.setdefault(kind, []).append([round(share(aligned), 3), round(z, 1)])
    return found


def share(aligned: Alignment) -> float:
    """Of the weights that are judged, those that are like the anchor's."""
    return aligned.like.weights / max(1, aligned.like.compared)


def row(name: str, quick: bool = False) -> dict[str, Any]:
    every = [kept(name, seed) for seed in SEEDS[: 1 if quick else None]]
    found: dict[str, Any] = {"z": [round(z, 1) for z in every[0]]}
    least = []
    for what in ROUGH:
        each = [roughened(name, what, seed) for seed in ROUGH_SEEDS[: 1 if quick else None]]
        found[what] = [round(z, 1) for z in each[0]]
        least.append(min(aligned / known for aligned, known in each))
    if quick:
        return found
    found["least of ten seeds"] = round(min(aligned / original for original, _, aligned in every), 3)
    found["least, rough"] = [round(part, 3) for part in least]
    if name in TRIED:
        found["worst of 200"] = round(min(tried(name)) / every[0][0], 3)
    innocents = [innocent(name, seed) for seed in INNOCENTS]
    found["innocents"] = [round(z, 1) for z, _ in innocents]
    found["normal"] = [round(p, 4) for _, p in innocents]
    found["like the anchor"] = likeness(name)
    return found


def line(name: str, entry: dict[str, Any]) -> str:
    """A line of the first table."""
    cells = [f"{z:.1f}" for z in entry["z"]]
    cells += [f"{aligned:.1f} of {known:.1f}" for aligned, known in (entry[what] for what in ROUGH)]
    return f"| {name} | {' | '.join(cells).replace('-', '−')} |"


def seeds_line(name: str, entry: dict[str, Any]) -> str:
    """A line of the second table."""
    parts = [entry["least of ten seeds"], *entry["least, rough"]]
    cells = [f"{100 * part:.1f} %" for part in parts]
    cells.append(f"{100 * entry['worst of 200']:.1f} %" if "worst of 200" in entry else "")
    cells.append("; ".join(f"{z:.1f}" for z in entry["innocents"]))
    return f"| {name} | {' | '.join(cells).replace('-', '−')} |"


def doubt(entries: dict[str, Any]) -> dict[str, list[int]]:
    """How many suspects there are of each kind; and those of which less than 10 %, 10 to 90 %, more is like the anchor.

    Without the models that cannot be aligned.
    """
    found: dict[str, list[int]] = {}
    for name, entry in entries.items():
        for kind, every in entry.get("like the anchor", {}).items() if name not in SHORT else ():
            at = found.setdefault(kind, [0, 0, 0, 0])
            for part, _ in every:
                at[0] += 1
                at[1 if part < 0.1 else 2 if part < 0.9 else 3] += 1
    return found


def doubt_line(kind: str, cells: list[int]) -> str:
    """A line of the third table."""
    return f"| {kind} | {' | '.join(str(each) for each in cells)} |"


def main() -> None:
    made = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    quick, names = "--quick" in sys.argv, [name for name in sys.argv[1:] if name != "--quick"]
    for name in names or zoo.MODELS:
        made[name] = row(name, quick)
        zoo_runs.marked.cache_clear()
        ordered = {each: made[each] for each in zoo.MODELS if each in made}
        FILE.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sys.stdout.write(line(name, made[name]) + "\n" + ("" if quick else seeds_line(name, made[name]) + "\n"))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
