"""`quorumark bench verify --billion`: a suspect of 1.126 billion weights against a share of 16 million coordinates.

The two models are random: 22 shards of bfloat16 each, 4.5 GB in all, in a temporary folder. Every command runs in a
process of its own that says what it took: CPU time over all its threads, and its largest resident memory. The time is
compared with reading the same files and hashing them with SHA-256, in one thread, in turns with the commands.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quorumark import field
from quorumark.errors import InputError
from quorumark.model.layout import BFLOAT16, ModelLayout, TensorSpec, write_safetensors
from quorumark.model.suspect import read_suspect
from quorumark.research.bench import Row
from quorumark.research.bench.verify import two_members
from quorumark.verify.reference import digest_of_anchor

LAYERS, ROWS, COLUMNS = 22, 5120, 10_000
SAMPLE = 16 << 20
_DISK = 5 << 30
_RUNS = 3

# runs a command as its process does, and says at the end what it took
_MEASURE = """
import json, sys, time
from quorumark.cli import app
try:
    code = app(standalone_mode=True)
except SystemExit as done:
    code = done.code
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
print(json.dumps({"code": code or 0, "peak": peak, "cpu": time.process_time()}), file=sys.stderr)
"""


@dataclass(frozen=True)
class LargeRow(Row):
    """A command on large files: also its CPU time (user and system, all threads), that over the CPU time of hashing,
    and its largest resident memory in bytes."""

    cpu_seconds: float
    cpu_ratio: float
    peak: int
    runs: int  # the medians are of so many


@dataclass(frozen=True)
class Taken:
    """What a command took: its exit code, seconds on the clock and of CPU, and its largest resident memory in bytes."""

    code: int
    seconds: float
    cpu_seconds: float
    peak: int


@dataclass(frozen=True)
class Scene:
    """Two members, an anchor and a suspect, as files."""

    folder: Path
    homes: tuple[Path, ...]

    def run(self, *arguments: str) -> Taken:
        """`quorumark verify …` in a process of its own."""
        start = time.perf_counter()
        line = [sys.executable, "-c", _MEASURE, "verify", *arguments, "--manifest", str(self.folder / "manifest.json")]
        done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        said = json.loads(done.stderr.splitlines()[-1])
        return Taken(said["code"], seconds, said["cpu"], said["peak"])

    def prepare(self) -> Taken:
        return self.run("prepare", self._at("suspect"), "--out", self._at("query.json"), *self._anchor, *self._nobody)

    def partial(self, home: Path) -> Taken:
        answer = ["partial", self._at("query.json"), "--suspect", self._at("suspect"), "--approve", *self._anchor]
        own = ["--out", f"{home}.json", "--home", str(home), "--key-file", f"{home}.key"]
        return self.run(*answer, *own)

    def combine(self) -> Taken:
        partials = [f"{home}.json" for home in self.homes]
        out = ["--out", self._at("certificate.json")]
        return self.run("combine", self._at("query.json"), *partials, *out, *self._nobody)

    def hash_models(self) -> Taken:
        """Reads both models and hashes them: what nobody who checks files can do without."""
        start, cpu = time.perf_counter(), time.process_time()
        for path in sorted(self.folder.glob("*/*.safetensors")):
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")
        return Taken(0, time.perf_counter() - start, time.process_time() - cpu, 0)

    def _at(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def _anchor(self) -> list[str]:
        return ["--anchor", self._at("anchor")]

    @property
    def _nobody(self) -> list[str]:
        return ["--home", self._at("nobody")]


def build(folder: Path) -> Scene:
    """Writes both models, the layout and the members' homes."""
    specs = [TensorSpec(f"layers.{i}.weight", "BF16", (ROWS, COLUMNS), "carrier") for i in range(LAYERS)]
    layout = ModelLayout(tuple(sorted(specs, key=lambda s: s.name)), SAMPLE)
    _write(folder / "anchor", 0)
    _write(folder / "suspect", 1, folder / "anchor")
    (folder / "layout.json").write_bytes(layout.to_bytes())
    homes = two_members(folder, layout, digest_of_anchor(layout, read_suspect(folder / "anchor")))
    return Scene(folder, tuple(homes))


def _write(folder: Path, seed: int, around: Path | None = None) -> None:
    """Shards of bfloat16, one layer each, with an index: random weights, or those of another model, moved."""
    folder.mkdir()
    index = {}
    rng = np.random.default_rng(seed)
    for layer in range(LAYERS):
        values = rng.standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.006 if around else 0.02)
        name = f"model-{layer:05}.safetensors"
        if around is not None:
            values += read_suspect(around / name).rows(f"layers.{layer}.weight", 0, ROWS)
        half = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(BFLOAT16)
        write_safetensors({f"layers.{layer}.weight": half}, folder / name)
        index[f"layers.{layer}.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def rows() -> Iterator[LargeRow]:
    """prepare and partial: medians of three runs each."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < _DISK:
        rule = f"must have {_DISK >> 30} GiB free for two models: name another folder with TMPDIR"
        raise InputError("the temporary folder", rule, f"{free >> 30} GiB")
    with tempfile.TemporaryDirectory(prefix="quorumark-bench-") as folder:
        scene = build(Path(folder))
        for name, command in (("prepare", scene.prepare), ("partial", lambda: scene.partial(scene.homes[0]))):
            taken, hashed = [], []
            for _ in range(_RUNS):
                taken.append(command())
                hashed.append(scene.hash_models())
            seconds, cpu = (
                statistics.median(x) for x in zip(*((t.seconds, t.cpu_seconds) for t in taken), strict=True)
            )
            yield LargeRow(
                name=f"verify {name}, 1.126 billion weights",
                against="sha256 of both models",
                size=LAYERS * ROWS * COLUMNS,
                threads=field.threads(),
                ratio=seconds / statistics.median(one.seconds for one in hashed),
                seconds=seconds,
                cpu_seconds=cpu,
                cpu_ratio=cpu / statistics.median(one.cpu_seconds for one in hashed),
                peak=max(one.peak for one in taken),
                runs=_RUNS,
            )
