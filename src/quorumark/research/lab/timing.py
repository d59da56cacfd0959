"""How long a round takes, by the number of members and the way that steps are made: for choosing, on a new machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from quorumark.errors import QuorumarkError
from quorumark.research.lab.config import Settings
from quorumark.research.lab.data import ImageSet
from quorumark.research.lab.image_run import ImageRun

__all__ = ["Timing", "kernels", "timings"]


@dataclass(frozen=True)
class Timing:
    """Seconds: of the first round, of a later one, and of its training alone. `error` if it did not work."""

    members: int
    streams: int
    first: float = 0.0
    round: float = 0.0
    training: float = 0.0
    gigabytes: float = 0.0
    error: str = ""


def timings(cases: Iterable[tuple[int, int]], settings: Settings, device: str, rounds: int = 4) -> Iterator[Timing]:
    """Each case is (members, streams); images are noise of CIFAR's size and number."""
    noise = _noise(device)
    for members, streams in cases:
        try:
            yield _timed(noise, settings, members, streams, device, rounds)
        except (RuntimeError, QuorumarkError) as error:  # out of memory, a capture that fails: the others go on
            yield Timing(members, streams, error=f"{type(error).__name__}: {str(error)[:200]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def kernels(members: int, streams: int, settings: Settings, device: str, most: int = 30) -> list[str]:
    """Where training spends its time on the device: the longest kernels, in microseconds per member and step."""
    from torch.profiler import ProfilerActivity, profile

    changed = Settings(**{**settings.asdict(), "members": members, "rounds": 2})
    run = ImageRun(changed, _noise(device), device, streams=streams)
    run.round()
    x, y = run.batches(2)
    activity = ProfilerActivity.CUDA if run.device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        run.fleet.train(x[:2], y[:2])
    each = members * len(x[:2])
    found = [
        (event.key, event.self_device_time_total or event.self_cpu_time_total, event.count)
        for event in profiler.key_averages()
    ]
    found.sort(key=lambda entry: -entry[1])
    total = sum(taken for _, taken, _ in found)
    lines = [f"{taken / each:9.1f} µs, {count / each:6.1f} times  {name[:90]}" for name, taken, count in found[:most]]
    return [f"{total / each:9.1f} µs in all", *lines]


def _noise(device: str) -> ImageSet:
    rng = np.random.default_rng(0)
    count = 50_000 if torch.device(device).type == "cuda" else 400
    images, labels = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, count)
    return ImageSet("noise", images, labels, images[:10_000], labels[:10_000])


def _timed(images: ImageSet, settings: Settings, members: int, streams: int, device: str, rounds: int) -> Timing:
    changed = Settings(**{**settings.asdict(), "members": members, "rounds": rounds + 1})
    cuda = torch.device(device).type == "cuda"

    def synchronised() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = synchronised()
    run = ImageRun(changed, images, device, streams=streams)
    run.round()
    first = synchronised() - start
    start = synchronised()
    for _ in range(rounds):
        run.round()
    each = (synchronised() - start) / rounds
    x, y = run.batches(1)
    start = synchronised()
    run.fleet.train(x, y)
    training = synchronised() - start
    memory = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    return Timing(members, streams, first, each, training, memory)
