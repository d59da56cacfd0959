"""`quorumark bench round`: what a round costs on top of training, against plain FedAvg on the same models.

All members and the server run in one process, with the protocol's real messages, sums checked, and one to four weights
in an element. Training is not timed: every member moves its model a little, and that time is taken off. Plain FedAvg is
the weighted average of those models in float64, one pass each, and four bytes a weight up and down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quorumark import field
from quorumark.consortium.identity import Identity
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Terms, anchor_of, roster_of
from quorumark.consortium.strength import Strength
from quorumark.model.layout import ModelLayout
from quorumark.research.bench import Row
from quorumark.round.mark import weights
from quorumark.setup.inprocess import deal_key
from quorumark.simulation import Federation, FederationMember

FULL_ROWS, QUICK_ROWS = 11_200, 500  # times 1,000 columns
CASES = ((5, 3),)
"""Members and threshold."""

PACKINGS = (1, 2, 3, 4)
_WARM, _REPEATS = 3, 5  # the mark is there from the third round on, or from the fourth with four weights in an element


@dataclass(frozen=True)
class RoundRow(Row):
    """`seconds` is a round's wall time, `cpu` its CPU time over all threads, of all members and the server together.
    Bytes are of a round and a member; what an engine adds is not among them. Those from it are counted. Those to it are
    calculated: the sum that is announced and the layout, without the announcement of the set and the request, which
    `benchmarks.bytes` counts."""

    packing: int
    members: int
    marked: bool
    plain_seconds: float
    cpu: float
    plain_cpu: float
    bytes_down: float
    plain_bytes_down: float
    bytes_up: float
    plain_bytes_up: float


def rows(quick: bool = False) -> Iterator[RoundRow]:
    """For each case a row without and one with the mark, with one to four weights in an element."""
    for count, threshold in CASES:
        for mark in (False, True):
            for packing in PACKINGS:
                yield _case(count, threshold, QUICK_ROWS if quick else FULL_ROWS, mark, packing)


def _case(count: int, threshold: int, height: int, mark: bool, packing: int) -> RoundRow:
    initial = {"w": np.random.default_rng(0).standard_normal((height, 1000), np.float32)}
    layout = ModelLayout.of(initial)
    people = [Identity.generate(f"member {x}") for x in range(1, count + 1)]
    roster = roster_of((person.card(), 100 + x) for x, person in enumerate(people, 1))
    terms = Terms(
        "bench", threshold, roster, layout.digest(), layout.coordinates,
        anchor_of(layout, initial), created="2026-01-31T12:00:00Z",
        setup="dealer", strength=Strength.of({"rule": "relative", "c": "0.03", "dither": "0"}, layout.coordinates),
        policy=Policy(packing=packing),
    )  # fmt: skip
    manifest, shares = deal_key(people, terms)
    results: dict[int, NDArray[np.float32]] = {}
    trained = _Times()

    def train(model: dict[str, NDArray[np.float32]], data: int, round_no: int) -> dict[str, NDArray[np.float32]]:
        begun = _Times.now()
        results[data] = _moved(model["w"], 1000 * round_no + data)
        trained.add(begun)
        return {"w": results[data]}

    members = {
        x: FederationMember(person, manifest, layout, train, x, shares[x], mark=mark)
        for x, person in enumerate(people, 1)
    }
    run = Federation(manifest, layout, initial, members, pair_masks=True)
    shares_of = weights(manifest, range(1, count + 1))
    times, plain_times = [], []
    for number in range(_WARM + _REPEATS):
        begun, taken = _Times.now(), _Times()
        trained.clear()
        report = run.round()
        taken.add(begun)
        if report.given_up or (number >= _WARM and report.marked != mark):
            raise AssertionError(report.given_up or "the mark is not what this row is about")
        begun, plain = _Times.now(), _Times()
        total = np.zeros((height, 1000))
        for x, weight in shares_of.items():
            total += float(weight) * results[x]
        total.astype(np.float32)
        plain.add(begun)
        if number >= _WARM:
            times.append((taken.wall - trained.wall, taken.cpu - trained.cpu))
            plain_times.append((plain.wall, plain.cpu))
    seconds, cpu = map(statistics.median, zip(*times, strict=True))
    plain_seconds, plain_cpu = map(statistics.median, zip(*plain_times, strict=True))
    kind = f"{packing} weight{'s' if packing > 1 else ''} in an element"
    name = f"a round of {count} members, {'with' if mark else 'without'} the mark, {kind}"
    up, down, flat = report.uploaded_bytes / count, 8 * run.server.length() + len(layout.to_bytes()), 4 * layout.size
    return RoundRow(
        name, "plain FedAvg", layout.size, field.threads(), seconds / plain_seconds, seconds, packing, count, mark,
        plain_seconds, cpu, plain_cpu, down, flat, up, flat,
    )  # fmt: skip


class _Times:
    """Seconds of wall and of CPU time."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    @staticmethod
    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def add(self, begun: tuple[float, float]) -> None:
        wall, cpu = self.now()
        self.wall, self.cpu = self.wall + wall - begun[0], self.cpu + cpu - begun[1]

    def clear(self) -> None:
        self.wall = self.cpu = 0.0


def _moved(model: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    return model + np.float32(0.01) * np.random.default_rng(seed).standard_normal(model.shape, np.float32)
