"""Rounds of a federation in one process, by this tree and by another one, in CPU seconds of one run.

    git worktree add ../before COMMIT
    python benchmarks/federation.py ../before/src [--members 128] [--json benchmarks/results/federation.json]

Each case runs in a process of its own, once for each tree: three rounds, of which the third is the first marked one.
Making the members, a round without the mark and one with it are compared. Training moves every weight a little. With
--members only that case is run, and takes the place of its row in the JSON, which says of which commits it is, on which
processor, and how long it took. The JSON is written after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = ((128, 10, 1_000, 1_000), (300, 16, 100, 100), (1_000, 32, 100, 100))
"""Members, threshold, rows and columns of the model."""

HERE = Path(__file__).resolve().parent.parent / "src"


def measured(count: int, threshold: int, rows: int, columns: int) -> dict[str, float]:
    """CPU seconds, in this process."""
    import numpy as np

    from quorumark.consortium.identity import Identity
    from quorumark.consortium.records import Terms, anchor_of, roster_of
    from quorumark.consortium.strength import Strength
    from quorumark.model.layout import ModelLayout
    from quorumark.setup.inprocess import deal_key
    from quorumark.simulation import Federation, FederationMember

    initial = {"w": np.random.default_rng(0).standard_normal((rows, columns), np.float32)}
    layout = ModelLayout.of(initial)
    people = [Identity.generate(f"member {x}") for x in range(1, count + 1)]
    terms = Terms(
        "bench", threshold, roster_of((person.card(), 100 + x) for x, person in enumerate(people, 1)),
        layout.digest(), layout.coordinates, anchor_of(layout, initial), created="2026-01-31T12:00:00Z",
        setup="dealer", strength=Strength.of({"rule": "relative", "c": "0.03"}, layout.coordinates),
    )  # fmt: skip
    manifest, shares = deal_key(people, terms)

    def train(model: dict[str, Any], data: int, round_no: int) -> dict[str, Any]:
        step = np.random.default_rng(1000 * round_no + data).standard_normal(model["w"].shape, np.float32)
        return {"w": model["w"] + np.float32(0.01) * step}

    start = sum(os.times()[:2])
    members = {x: FederationMember(person, manifest, layout, train, x, shares[x]) for x, person in enumerate(people, 1)}
    run = Federation(manifest, layout, initial, members)
    times = [sum(os.times()[:2]) - start]
    for number in (1, 2, 3):
        start = sum(os.times()[:2])
        report = run.round()
        times.append(sum(os.times()[:2]) - start)
        if report.given_up or report.marked != (number == 3):
            raise AssertionError(report.given_up or "the mark is not what this row is about")
    return {"make": times[0], "unmarked": times[2], "marked": times[3]}


def commit_of(source: Path) -> str:
    """Of the tree that a source folder is in; "+" behind it if there are changes that are not committed."""
    git = ["git", "-C", str(source)]
    name, changes = (
        subprocess.run([*git, *what], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()  # noqa: S603
        for what in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    return name + ("+" if changes else "")


def processor() -> str:
    """Its name and how many cores there are."""
    about = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in about.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before", nargs="?", help="the other tree's src")
    parser.add_argument("--members", type=int, choices=[case[0] for case in CASES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        sys.stdout.write(json.dumps(measured(*json.loads(given.case))))
        return
    rows = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    for case in CASES:
        if given.members not in (None, case[0]):
            continue
        found, began = [], time.monotonic()
        for source in (HERE, Path(given.before)):
            command = [sys.executable, __file__, "--case", json.dumps(case)]
            environment = {**os.environ, "PYTHONPATH": str(source)}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)  # noqa: S603 - this file
            found.append(json.loads(done.stdout))
        now, before = found
        rows = [row for row in rows if row["members"] != case[0]]
        about = {"commit": commit_of(HERE), "before_commit": commit_of(Path(given.before)), "hardware": processor()}
        about["seconds"] = round(time.monotonic() - began)
        rows.append({"members": case[0], "weights": case[2] * case[3], "now": now, "before": before, **about})
        for name in now:
            times = f"{now[name]:.1f} s, before {before[name]:.1f} s: {before[name] / now[name]:.1f} times as fast"
            sys.stdout.write(f"{case[0]} members, {name}: {times}\n")
        if given.json:
            given.json.write_text(json.dumps(sorted(rows, key=lambda row: row["members"]), indent=1) + "\n")


if __name__ == "__main__":
    main()
