"""A fuzzer over every kind of file and message that somebody else may have made (`make fuzz`).

    python -m tests.kit.fuzz --seed 0 --count 2000        prints a JSON object with what it found; exits with 1 if any
    python -m tests.kit.fuzz --seed 0 --case 1234         one case again, with its traceback

Case number n of a seed is the same in every run but for keys, which are new. What must hold for every case:

    errors    it is accepted, or refused with an error of our own tree
    limits    it takes less than 10 s, and a GiB of memory
    content   what is signed or sealed is accepted only as it was
    places    nothing changes outside of the case's own folder, and no pickle runs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quorumark import field
from quorumark.errors import QuorumarkError
from tests.kit.corpus import Kind, corpus

SECONDS = 10
MEMORY = 1 << 30
EVERY = 20  # cases between two looks at what is outside of them


class _LateError(BaseException):
    """Not an Exception: nobody on the way may catch it."""


def _late(*_: object) -> None:
    raise _LateError


def _resident() -> int:
    """Bytes of memory that this process ever had at once, since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _seen(folder: Path, case: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder but the case: names, sizes, times."""
    found = {}
    for root, folders, files in os.walk(folder):
        if case.name in folders and Path(root) == folder:
            folders.remove(case.name)
        for name in (*folders, *files):
            stat = os.lstat(os.path.join(root, name))
            found[f"{root}/{name}"] = stat.st_size if name in files else 0, stat.st_mtime_ns if name in files else 0
    return found


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Addresses enough for what is there and a GiB: what asks for more gets a MemoryError, and the machine lives on."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MEMORY, before[1]))
    signal.signal(signal.SIGALRM, _late)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Fuzzer:
    """The corpus in a folder, and the cases of a seed over it."""

    def __init__(self, folder: Path, seed: int, kinds: Callable[[Path, Path], Sequence[Kind]] = corpus) -> None:
        self.folder, self.seed, self.case = folder, seed, folder / "case"
        self.marker = folder / "a-pickle-ran"
        (folder / "corpus").mkdir()
        (folder / "cwd").mkdir()
        os.chdir(folder / "cwd")
        self.kinds = kinds(folder / "corpus", self.marker)
        for kind in self.kinds:
            with self._fresh():
                kind.prepare(self.case)  # sound files are accepted, or the fuzzer tests nothing
        self.drawn = [kind for kind in self.kinds for _ in range(kind.weight)]
        self.slow = [kind for kind in self.kinds if kind.weight == 0]
        self.outside = _seen(folder, self.case)
        self.outcomes: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[None]:
        self.case.mkdir()
        tempfile.tempdir = str(self.case)
        try:
            yield
        finally:
            shutil.rmtree(self.case, ignore_errors=True)

    def _changed(self, number: int) -> str:
        """What changed outside of the cases since the last look, which takes longer than most cases."""
        if number % EVERY != EVERY - 1:
            return ""
        before, self.outside = self.outside, _seen(self.folder, self.case)
        changed = sorted(name for name, _ in before.items() ^ self.outside.items())
        return f"outside of its folder changed, in this case or up to {EVERY} before: {changed[:3]}" if changed else ""

    def run(self, number: int) -> tuple[str, str, str, float]:
        """Case `number`: its kind, what was wrong (or nothing), the traceback, and the seconds."""
        rng = random.Random(f"{self.seed}/{number}")
        kind = rng.choice(self.slow if self.slow and number % 100 == 50 else self.drawn)
        problem = trace = ""
        with self._fresh():
            attempt = kind.attempt(rng, self.case)
            _reset_peak()
            before, began = _resident(), time.monotonic()
            signal.alarm(SECONDS)
            try:
                attempt()
                outcome = "accepted"
            except QuorumarkError:
                outcome = "refused"
            except _LateError:
                outcome, problem, trace = "late", f"it takes more than {SECONDS} s", traceback.format_exc()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
                outcome, trace = "error", traceback.format_exc()
                problem = f"{type(error).__name__}: {str(error)[:200]}"
            finally:
                signal.alarm(0)
            seconds, taken = time.monotonic() - began, _resident() - before
            if taken > MEMORY:
                problem = problem or f"it takes {taken >> 20} MiB"
        if self.marker.exists():
            problem = "a pickle ran"
            self.marker.rmdir()
        problem = problem or self._changed(number)
        self.outcomes[kind.name, outcome] += 1
        return kind.name, problem, trace, seconds


def fuzz(seed: int, count: int, only: int | None = None, first: int = 0, most: float = 1e9) -> dict[str, Any]:
    """Cases `first` … of a seed, at most for so many seconds; what was wrong, by kind and problem."""
    warnings.simplefilter("ignore")
    field.set_threads(1)
    problems: dict[str, dict[str, Any]] = {}
    began, done, slowest = time.monotonic(), 0, 0.0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        fuzzer = Fuzzer(Path(folder).resolve(), seed)
        built = time.monotonic() - began
        with _limits():
            for number in range(first, first + count) if only is None else [only]:
                if time.monotonic() - began > most:
                    break
                kind, problem, trace, seconds = fuzzer.run(number)
                done, slowest = done + 1, max(slowest, seconds)
                if problem:
                    where = [line.strip() for line in trace.splitlines() if "/quorumark/" in line][-1:]
                    entry = problems.setdefault(
                        f"{kind}: {problem[:90]} {''.join(where)[-90:]}", {"cases": [], "trace": trace[-3000:]}
                    )
                    entry["cases"].append(number)
        os.chdir("/")
        tempfile.tempdir = None
    outcomes: dict[str, dict[str, int]] = {}
    for (name, outcome), times in sorted(fuzzer.outcomes.items()):
        outcomes.setdefault(name, {})[outcome] = times
    return {
        "seed": seed, "cases": done, "kinds": len(fuzzer.kinds), "built_seconds": round(built, 1),
        "seconds": round(time.monotonic() - began, 1), "slowest_seconds": round(slowest, 2),
        "problems": problems, "outcomes": outcomes,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Damaged files and messages, by the thousand.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, default=None, help="this case only")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    chosen = parser.parse_args()
    found = fuzz(chosen.seed, chosen.count, chosen.case, chosen.first, chosen.seconds)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
