"""Runs with images, one after the other or several abreast, until the time that a command has is over.

A run does not keep a GPU busy all the time: at its end, and where it is validated or small, the device waits. Abreast,
each run has a thread and a stream of its own, and the others use what it leaves: little, where networks are large.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quorumark.errors import RoundError
from quorumark.research.lab.config import Settings
from quorumark.research.lab.data import ImageSet, load
from quorumark.research.lab.fleet import Fleet
from quorumark.research.lab.image_run import ImageRound, ImageRun
from quorumark.research.lab.results import BALANCED, read_all, record, write

__all__ = ["Clock", "Series"]

_LEAST = 10.0  # seconds that it takes to begin a run: with less it is left for another time


class Clock:
    """What is left of the time that a command has."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        return None if self._end is None else self._end - time.monotonic()

    @property
    def short(self) -> bool:
        return self.left is not None and self.left < _LEAST


@dataclass
class Series:
    """Where runs are made: folders, the device, and how. `observe` is `ImageRun`'s; `tell` gets lines for people."""

    data: Path
    results: Path
    runs: Path
    device: str
    streams: int
    clock: Clock
    observe: Sequence[int] | None = None
    abreast: int = 1
    tell: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._building = threading.Lock()  # a network's first weights are drawn with what all threads share
        self._interrupted = threading.Event()
        self._loaded: dict[str, ImageSet] = {}
        self._diverged: list[str] = []

    def do(self, chosen: Sequence[Settings]) -> None:
        """Makes these runs, or the rest of them, in their order; those that are done are left out.

        One that diverges ends there, the others go on, and in the end it is an error.
        """
        self._work(chosen)
        if self._diverged:
            raise RoundError(f"diverged, and not recorded: {', '.join(self._diverged)}", code="round.diverged")

    def _work(self, chosen: Sequence[Settings]) -> None:
        waiting, taking = iter(chosen), threading.Lock()

        def work() -> None:
            fleet = None
            with _own_stream(self.device if self.abreast > 1 else "cpu"):
                for settings in _shared(waiting, taking):
                    fleet = self._next(settings, fleet)

        if self.abreast == 1:
            work()
            return
        with ThreadPoolExecutor(self.abreast) as threads:
            try:
                for done in [threads.submit(work) for _ in range(self.abreast)]:
                    done.result()
            except KeyboardInterrupt:
                self._interrupted.set()
                raise

    def images(self, name: str) -> ImageSet:
        """A data set, of which one is in memory at a time."""
        if name not in self._loaded:
            self._loaded = {name: load(name, self.data)}
        return self._loaded[name]

    def _next(self, settings: Settings, fleet: Fleet | None) -> Fleet | None:
        """One run, unless it is done or there is no time; its fleet, for the next one."""
        done = read_all(self.results).get(settings.id)
        if done is not None and done["rounds"] >= settings.rounds:
            self.tell(f"{settings.id}: done ({done['rounds']} rounds)")
        elif self.clock.short:
            self.tell(f"{settings.id}: no time left")
        else:
            with self._building:
                made: dict[str, Any] = {"streams": self.streams, "observe": self.observe}
                run = ImageRun(settings, self.images(settings.dataset), self.device, fleet=fleet, **made)
            try:
                self._made(run, self.runs / settings.id)
            except RoundError as error:
                self.tell(f"{settings.id}: {error}")
                self._diverged.append(settings.id)
                run.close()
            return run.fleet
        return fleet

    def _made(self, run: ImageRun, folder: Path) -> None:
        """Trains a run from where it was left, and writes what came out."""
        settings, checkpoint = run.settings, folder / "checkpoint.pt"
        if checkpoint.exists():
            run.restore(checkpoint)

        def tell(entry: ImageRound) -> None:
            if self._interrupted.is_set():
                raise KeyboardInterrupt  # of the main thread: no other gets it
            known = entry.seconds > 0  # of a round that the device is at it is not
            if known and (entry.round <= 5 or entry.round % 25 == 0 or entry.round == settings.rounds):
                shown = "" if entry.accuracy is None else f", validation {100 * entry.accuracy:.2f} %"
                self.tell(f"{settings.id}: round {entry.round}, loss {entry.loss:.3f}{shown}, {entry.seconds:.2f} s")

        run.train(seconds=self.clock.left, checkpoint=checkpoint, tell=tell)
        if run.round_no:
            body = record(run, self.abreast)
            written = write(body, self.results)
            run.export(folder / "released.safetensors")
            z, accuracy = body["z"]["released"][BALANCED], 100 * body["accuracy"]["released"]
            self.tell(
                f"{settings.id}: {run.round_no} rounds, test {accuracy:.2f} %, z {z:.1f}, "
                f"{body['seconds_per_round']} s a round; {written or 'a longer run is there already'}"
            )
        run.close()


def _shared(waiting: Iterator[Settings], taking: threading.Lock) -> Iterator[Settings]:
    """What is left, of which every thread takes its next one."""
    while True:
        with taking:
            settings = next(waiting, None)
        if settings is None:
            return
        yield settings


@contextmanager
def _own_stream(device: str) -> Iterator[None]:
    """On CUDA, what a thread does goes into a stream of its own: all threads' usual one is the same."""
    with torch.cuda.stream(torch.cuda.Stream()) if torch.device(device).type == "cuda" else nullcontext():
        yield
