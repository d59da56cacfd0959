"""Bytes of a round, up and down, from real messages: 32 members, a ResNet-18 with 11.2 million weights.

    python -m benchmarks.bytes [--only 2,4] [--quick] [--out benchmarks/results/bytes.json]

Server and members exchange what an engine carries, names and values; members are a new process for every message, as
far as their memory goes, and leave out the masks of pairs, which change no byte's number. All carriers have norms, but
only 65,536 weights carry the mark: a share, which no round sends, would be 90 MB for each member otherwise. Beside them
plain FedAvg, and what Flower's own SecAgg+ functions make of the same model, if flwr is there. Bytes are exact,
whatever else the machine does; seconds say what it took to count them, with 10 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.kit.counted import CountedRun, links, typical
from tests.kit.flowers import Consortium

from quorumark.node.journal import allow_repeats
from quorumark.research.bench.member import resnet18

OUT = Path("benchmarks/results/bytes.json")
MEMBERS, THRESHOLD = 32, 16
SMALL = {"a.weight": (40, 50), "b.weight": (30, 10, 3, 3), "c.bias": (40,)}
Row = dict[str, Any]


def world(shapes: dict[str, tuple[int, ...]], folder: Path, threshold: int = THRESHOLD, **policy: str) -> Consortium:
    rng = np.random.default_rng(1)
    model = {name: np.float32(0.05) * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    carry = min(1 << 16, sum(v.size for v in model.values() if v.ndim > 1))
    strength = {"rule": "rho", "rho": "0.05"}
    made = Consortium.deal(
        folder, MEMBERS, threshold, model=model, max_coordinates=carry, strength=strength, policy=policy, leaf=4096
    )
    for x in range(1, MEMBERS + 1):  # so that they need not make the masks of pairs, nor sync files
        home, unlock = made.home(x)
        allow_repeats(home.only_consortium(), home.identity(unlock))
    return made


def by_packing(shapes: dict[str, tuple[int, ...]], packing: int, folder: Path) -> Iterator[Row]:
    """The first round, a later one, and what members get who missed one or come late."""
    run = CountedRun(world(shapes, folder, packing=str(packing), sums="checked"), together=True)
    everybody, size = range(1, MEMBERS + 1), run.world.layout.size
    most = everybody[:-2]

    def row(name: str, count: Any, among: Any) -> Row:
        up, down = (typical(count, among, way) / size for way in ("up", "down"))
        return {"name": name, "packing": packing, "size": size, "up": up, "down": down}

    yield row("first round", run.counted([MEMBERS]), most)
    yield row("later round", run.counted([MEMBERS - 1, MEMBERS]), most)
    if packing == 2:
        count = run.counted()
        yield row("who missed a round", count, [MEMBERS - 1])
        yield row("who comes later", count, [MEMBERS])


def unchecked(shapes: dict[str, tuple[int, ...]], folder: Path) -> Row:
    run = CountedRun(world(shapes, folder, packing="2", sums="unchecked"), together=True)
    run.counted()
    count, size = run.counted(), run.world.layout.size
    up, down = (typical(count, range(1, MEMBERS + 1), way) / size for way in ("up", "down"))
    return {"name": "sums not checked", "packing": 2, "size": size, "up": up, "down": down}


def drawn(shapes: dict[str, tuple[int, ...]], folder: Path) -> Row:
    """Cohorts of eight, in the round after one whose link they sign; those among them who had no part in the last one
    get the model as well."""
    run = CountedRun(world(shapes, folder, 3, packing="2", sums="checked", cohort="8"), together=True)
    run.counted()
    before = run.server.members
    count, size = run.counted(), run.world.layout.size
    new = [x for x in run.server.members if x not in before]
    up, down = (typical(count, new, way) / size for way in ("up", "down"))
    asked = {"links_up": links(count, "up") / size, "links_down": links(count, "down") / size}
    return {"name": "cohorts of eight", "packing": 2, "size": size, "up": up, "down": down, **asked}


def others(shapes: dict[str, tuple[int, ...]]) -> Iterator[Row]:
    """Plain FedAvg, and Flower's SecAgg+: its masked words as its client sends them, and the model to it."""
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    yield {"name": "plain FedAvg", "packing": 0, "size": size, "up": 4.0, "down": 4.0}
    try:
        from flwr.common import ndarray_to_bytes
    except ImportError:
        return
    from quorumark.research.bench.secagg import SecAggPlus

    model = np.random.default_rng(1).normal(0, 0.05, size).astype(np.float32)
    up = sum(len(ndarray_to_bytes(part)) for part in SecAggPlus(model).client()) / size
    yield {"name": "SecAgg+ of flwr", "packing": 0, "size": size, "up": up, "down": len(ndarray_to_bytes(model)) / size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="others,1,2,3,4,unchecked,drawn")
    parser.add_argument("--quick", action="store_true", help="a small model: to try it")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--folder", type=Path, help="where members keep their homes meanwhile")
    given = parser.parse_args()
    shapes = SMALL if given.quick else resnet18()
    known = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else []
    for what in given.only.split(","):
        begun, folder = time.perf_counter(), Path(tempfile.mkdtemp(dir=given.folder))
        try:
            if what.isdigit():
                rows = list(by_packing(shapes, int(what), folder))
            else:
                makers = {"others": others, "unchecked": unchecked, "drawn": drawn}
                made = makers[what](shapes, *([] if what == "others" else [folder]))  # type: ignore[operator]
                rows = [made] if isinstance(made, dict) else list(made)
        finally:
            shutil.rmtree(folder)
        about = {"commit": _commit(), "seconds": round(time.perf_counter() - begun), "hardware": platform.machine()}
        names = {(row["name"], row["packing"]) for row in rows}
        known = [row for row in known if (row["name"], row["packing"]) not in names] + [r | about for r in rows]
        known.sort(key=lambda row: (row["packing"], row["name"]))
        given.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        for row in rows:
            print(row["name"], row["packing"], f"up {row['up']:.4f} down {row['down']:.4f}", flush=True)  # noqa: T201


def _commit() -> str:
    """Of the code that runs, with a + if it has been changed since."""
    ask = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(ask, capture_output=True, check=True, text=True).stdout.strip()  # noqa: S603


if __name__ == "__main__":
    main()
