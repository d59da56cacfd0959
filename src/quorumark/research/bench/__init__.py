"""Benchmarks that compare: every figure is a ratio to something timed in the same process, interleaved.

Machines are shared and noisy, so seconds say little; the ratio of two medians, taken in turns, says more. All
benchmarks of the project write the same rows (`Row`), as a JSON list.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from quorumark.files import write_shared

__all__ = ["Row", "SetupRow", "compare", "setup_row", "write_rows"]

GIGABIT = 1e9 / 8  # bytes a second on the network that the paper assumes


@dataclass(frozen=True)
class Row:
    """One comparison: `ratio` is our time over theirs, `seconds` our median.

    `size` is the number of elements we worked on. Where the other side worked on fewer, `against` says on how
    many, and the ratio is per unit of work.
    """

    name: str
    against: str
    size: int
    threads: int
    ratio: float
    seconds: float


@dataclass(frozen=True)
class SetupRow(Row):
    """A comparison of key ceremonies: one party's computation (`seconds`) and traffic, and the paper's for the same K.

    `elements_per_member` is what a member sends and receives, in field elements over d; in a dealer's row, what the
    dealer sends to each member. Seconds of communication are the party's whole traffic at 1 Gbit/s: calculated, not
    measured. `paper_seconds` is what the paper's code would take for `size` elements, from what it took for fewer.
    """

    elements_per_member: float
    role: str  # "dealer" or "member"
    members: int
    threshold: int
    runs: int  # the medians are of so many
    communication_seconds: float
    paper_seconds: float
    paper_best_seconds: float  # the same with its matrices small enough to stay in a cache, which no real layer's are
    paper_elements: float  # what the paper's party sends and receives, over d
    paper_communication_seconds: float


def setup_row(
    name: str,
    against: str,
    *,
    size: int,
    few: int,
    role: str,
    members: int,
    threshold: int,
    times: Sequence[float],
    their_times: Sequence[float],
    their_best: Sequence[float] | None = None,
    few_best: int = 0,
    moved: int,
    paper_elements: float,
) -> SetupRow:
    """The row for one party: `times` for `size` elements, `their_times` for `few`; `moved` is all its bytes.

    `their_best`: for `few_best` elements, so few that the paper's matrices stay in a cache.
    """
    seconds = statistics.median(times)
    paper_seconds = statistics.median(their_times) * size / few
    return SetupRow(
        name=name,
        against=f"{against}, {few} elements",
        size=size,
        threads=1,
        ratio=seconds / paper_seconds,
        seconds=seconds,
        elements_per_member=moved / 8 / size / (members if role == "dealer" else 1),
        role=role,
        members=members,
        threshold=threshold,
        runs=len(times),
        communication_seconds=moved / GIGABIT,
        paper_seconds=paper_seconds,
        paper_best_seconds=statistics.median(their_best) * size / few_best if their_best else paper_seconds,
        paper_elements=paper_elements,
        paper_communication_seconds=paper_elements * 8 * size / GIGABIT,
    )


def compare(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    name: str,
    against: str,
    size: int,
    threads: int = 1,
    work: float = 1.0,
    their_work: float = 1.0,
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
    between: Callable[[], object] = lambda: None,
) -> Row:
    """Times both in turns after one untimed call each; the row holds the ratio of the medians per unit of work.
    `between` is called before each call and not timed."""
    our_times: list[float] = []
    their_times: list[float] = []
    for _ in range(max(5, repeats) + 1):
        for call, times in ((ours, our_times), (theirs, their_times)):
            between()
            times.append(_seconds(call, clock))
    del our_times[0], their_times[0]
    mine, other = statistics.median(our_times), statistics.median(their_times)
    return Row(name, against, size, threads, (mine / work) / (other / their_work), mine)


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def write_rows(rows: Iterable[Row], path: str | os.PathLike[str]) -> None:
    """The rows as a JSON list; the whole file, or the old one stays."""
    write_shared(path, (json.dumps([asdict(row) for row in rows], indent=1) + "\n").encode())
