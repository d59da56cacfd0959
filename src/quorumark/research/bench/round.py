"""`quorumark bench round`: what a round costs on top of training, against plain FedAvg on the same models.

All members and the server run in one process, with the protocol's real messages. Training is not timed: every member
moves its model a little, and that time is taken off. Plain FedAvg is the weighted average of those models in float64,
one pass each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

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
CASES = ((5, 3), (8, 4))
_WARM, _REPEATS = 3, 5  # the mark is there from the third round on


def rows(quick: bool = False) -> Iterator[Row]:
    """One row without and one with the mark for each case."""
    for count, threshold in CASES:
        for mark in (False, True):
            yield _case(count, threshold, QUICK_ROWS if quick else FULL_ROWS, mark)


def _case(count: int, threshold: int, height: int, mark: bool) -> Row:
    initial = {"w": np.random.default_rng(0).standard_normal((height, 1000), np.float32)}
    layout = ModelLayout.of(initial)
    people = [Identity.generate(f"member {x}") for x in range(1, count + 1)]
    roster = roster_of((person.card(), 100 + x) for x, person in enumerate(people, 1))
    terms = Terms(
        "bench", threshold, roster, layout.digest(), layout.coordinates,
        anchor_of(layout, initial), created="2026-01-31T12:00:00Z",
        setup="dealer", strength=Strength.of({"rule": "relative", "c": "0.03", "dither": "0"}, layout.coordinates),
        policy=Policy(sums="unchecked"),  # the round itself, as it was always measured
    )  # fmt: skip
    manifest, shares = deal_key(people, terms)
    results: dict[int, NDArray[np.float32]] = {}

    def train(model: dict[str, NDArray[np.float32]], data: int, round_no: int) -> dict[str, NDArray[np.float32]]:
        results[data] = _moved(model["w"], 1000 * round_no + data)
        return {"w": results[data]}

    members = {
        x: FederationMember(person, manifest, layout, train, x, shares[x], mark=mark)
        for x, person in enumerate(people, 1)
    }
    run = Federation(manifest, layout, initial, members, pair_masks=True)
    shares_of = weights(manifest, range(1, count + 1))
    times, plain_times = [], []
    for number in range(_WARM + _REPEATS):
        start = time.perf_counter()
        report = run.round()
        taken = time.perf_counter() - start - report.seconds["train"]
        if report.given_up or report.marked != (mark and number >= 2):
            raise AssertionError(report.given_up or "the mark is not what this row is about")
        start = time.perf_counter()
        total = np.zeros((height, 1000))
        for x, weight in shares_of.items():
            total += float(weight) * results[x]
        total.astype(np.float32)
        plain = time.perf_counter() - start
        if number >= _WARM:
            times.append(taken)
            plain_times.append(plain)
    seconds = statistics.median(times)
    name = f"a round of {count} members, {'with' if mark else 'without'} the mark"
    ratio = seconds / statistics.median(plain_times)
    return Row(name, "plain FedAvg", layout.size, field.threads(), ratio, seconds)


def _moved(model: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    return model + np.float32(0.01) * np.random.default_rng(seed).standard_normal(model.shape, np.float32)
