"""The mark under server optimisers: what it costs, what a verification finds, and what sums and steps show of it.

    OMP_NUM_THREADS=1 python -m benchmarks.optimisers [--only trained turning] [--out FILE]

Rounds as a federation computes them, without its messages (`tests.kit.optimised`): five members, updates packed two to
an element, dither 3, ρ* = c_max = 0.1 unless a row says otherwise.

`trained`: the hospitals' network with FedAvg and each optimiser, with the mark and without, over five seeds.
`still`: half of the weights of its large layers, in all rows, never move. `decayed`: an MLP whose members' weight decay
takes 2.6 % off the weights in a round. `turning`: members who walk, and turn round after round 12, with much noise and
with little. `slowing`: members whose updates are suddenly smaller. The file keeps the kinds that are not run again.
docs/optimisers.md and docs/strength.md show the tables.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.kit.optimised import Ran, decayed, hospitals, run, slowing, turning

OUT = Path("benchmarks/results/optimisers.json")
OPTIMISERS = ("fedavgm:server_momentum=0.9", "fedadam:eta=0.01", "fedyogi:eta=0.01", "fedadagrad:eta=0.02")
ROUNDS, LAST = 30, 5  # accuracies are means of the last five rounds: one test image is 0.28 points
NOISES = {"noisy": 0.005, "quiet": 0.0005}  # beside a common way of 0.002
Row = dict[str, Any]


def row(name: str | None, seeds: Iterable[int], rounds: int, strength: Mapping[str, str], **about: Any) -> Row:
    """Marked runs, one for each seed."""
    wanted = {"rho": "0.1", "c_max": "0.1", **strength}
    runs = [run(name, rounds, seed, wanted, **about) for seed in seeds]
    return {"optimiser": name or "fedavg", "rounds": rounds, "strength": wanted} | measured(runs)


def measured(runs: list[Ran]) -> Row:
    shown = {
        "loudest_sum": [one.raw.loudest for one in runs],
        "loudest_step": [one.applied.loudest for one in runs],
        "best_sums": [one.raw.best for one in runs],
        "best_steps": [one.applied.best for one in runs],
        "part": [one.share for one in runs],
        "rho": [one.rho for one in runs],
    }
    about = {
        "z": [round(one.z, 2) for one in runs],
        "forecast": [round(one.expected, 2) for one in runs],
        "accuracy": [last(one) for one in runs],
        "accuracies": [round(100 * float(a), 2) for a in np.mean([one.accuracies for one in runs], axis=0)],
        **{name: [round(value, 4) for value in values] for name, values in shown.items()},
    }
    counts = ("marked", "refused", "halved", "held", "anew")
    return about | {name: [getattr(one, name) for one in runs] for name in counts}


def last(one: Ran) -> float:
    return round(100 * sum(one.accuracies[-LAST:]) / LAST, 2)


def trained() -> Iterable[Row]:
    for name in (None, *OPTIMISERS):
        found = row(name, range(5), ROUNDS, {}, world=hospitals)
        plain = [run(name, ROUNDS, seed, None) for seed in range(5)]
        means = np.mean([one.accuracies for one in plain], axis=0)
        yield found | {
            "plain": [last(one) for one in plain],
            "plain_accuracies": [round(100 * float(a), 2) for a in means],
        }


def still() -> Iterable[Row]:
    for name in OPTIMISERS:
        yield row(name, range(2), ROUNDS, {}, world=hospitals, still=0.5)


def with_decay() -> Iterable[Row]:
    for name in (*OPTIMISERS, "fedavgm:server_momentum=0.5"):
        yield row(name, range(3), 40, {"decay": "0.0259"}, world=decayed)


def turned() -> Iterable[Row]:
    for way, noise in NOISES.items():
        for c_max in ("0.1", "0.03"):
            for name in (None, *OPTIMISERS):
                found = row(name, (1, 2, 3), 24, {"c_max": c_max}, world=turning(12, noise))
                before = [run(name, 12, seed, found["strength"], world=turning(12, noise)) for seed in (1, 2, 3)]
                yield {"way": way} | found | {"best_before": [round(one.raw.best, 4) for one in before]}


def slowed() -> Iterable[Row]:
    for rho in ("0.1", "0.5"):
        for factor in (0.5, 0.2, 0.1):
            yield {"factor": factor} | row(None, (1, 2, 3), 14, {"rho": rho}, world=slowing(10, factor))


KINDS: dict[str, Callable[[], Iterable[Row]]] = {
    "trained": trained,
    "still": still,
    "decayed": with_decay,
    "turning": turned,
    "slowing": slowed,
}


def mean(found: Row, name: str) -> float:
    return float(np.mean(found[name]))


def line(found: Row) -> str:
    """A row as docs/optimisers.md has it, for `trained`, `still` and `decayed`."""
    z = found["z"]
    text = f"| `{found['optimiser']}` | {len(z)} | {mean(found, 'z'):.1f} ({min(z):.1f} to {max(z):.1f}) "
    text += f"| {mean(found, 'forecast'):.1f} | {mean(found, 'accuracy'):.1f} % "
    text += f"| {mean(found, 'plain'):.1f} % " if "plain" in found else "| "
    cosines = [f"{max(found[name]):.3f}" for name in ("loudest_sum", "loudest_step", "best_sums", "best_steps")]
    return text + f"| {mean(found, 'rho'):.3f} | {cosines[0]}, {cosines[1]} | {cosines[2]}, {cosines[3]} |"


def rounds_line(found: Row) -> str:
    """Accuracy by rounds, with the mark and without."""
    at = (5, 10, 15, 20, 25, 30)
    pairs = (f"{found['accuracies'][n - 1]:.1f}, {found['plain_accuracies'][n - 1]:.1f}" for n in at)
    return f"| `{found['optimiser']}` | {' | '.join(pairs)} |"


def turn_line(found: Row) -> str:
    """A turn, as docs/strength.md has it."""
    shown = (f"{mean(found, name):.2f}" for name in ("best_before", "best_sums", "loudest_sum"))
    return f"| {found['way']} | {found['strength']['c_max']} | {' | '.join(shown)} |"


def step_line(found: Row) -> str:
    """A turn, as docs/optimisers.md has it."""
    part = max(found["part"]) / float(found["strength"]["c_max"])
    shown = (f"{max(found[name]):.3f}" for name in ("loudest_sum", "loudest_step", "best_sums", "best_steps"))
    cells = f"{part:.2f}", *shown
    return f"| `{found['optimiser']}` | {found['way']} | {found['strength']['c_max']} | {' | '.join(cells)} |"


def slow_line(found: Row) -> str:
    """A sudden fall, as docs/strength.md has it."""
    cells = (
        found["strength"]["rho"],
        f"{mean(found, 'loudest_sum'):.2f}",
        f"{sum(found['halved'])} of {len(found['z'])}",
    )
    return f"| {found['factor']} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    ask = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(ask, capture_output=True, check=True, text=True).stdout.strip()  # noqa: S603
    known = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {}
    for kind in chosen.only:
        start, rows = time.process_time(), []
        for found in KINDS[kind]():
            rows.append(found)
            print(kind, line(found), flush=True)  # noqa: T201
        seconds = round(time.process_time() - start, 1)
        known[kind] = {
            "commit": commit,
            "cpu_seconds": seconds,
            "hardware": f"CPU ({platform.machine()})",
            "rows": rows,
        }
        ordered = {name: known[name] for name in KINDS if name in known}
        chosen.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
