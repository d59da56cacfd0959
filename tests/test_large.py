"""A model of 1.1 billion weights, on a small machine: its suspect is read in blocks, its share is a sample."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quorumark.bench.verify import two_members
from quorumark.layout import BFLOAT16, ModelLayout, TensorSpec, write_safetensors
from quorumark.verify.reference import digest_of_anchor
from quorumark.verify.suspect import read_suspect

LAYERS, ROWS, COLUMNS = 22, 5120, 10_000
SAMPLE = 16 << 20
GIB = 1 << 30

# runs a command and says how much memory it took at most
MEASURE = """
import json, sys, time
from quorumark.cli import app
start = time.perf_counter()
try:
    app(standalone_mode=True)
except SystemExit as done:
    code = done.code
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
print(json.dumps({"code": code, "peak": peak, "seconds": time.perf_counter() - start}), file=sys.stderr)
"""


def _run(*arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return measured


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


@pytest.mark.slow
def test_a_billion_weights_are_verified_in_four_gigabytes(tmp_path: Path) -> None:
    specs = tuple(TensorSpec(f"layers.{i}.weight", "BF16", (ROWS, COLUMNS), "carrier") for i in range(LAYERS))
    layout = ModelLayout(tuple(sorted(specs, key=lambda s: s.name)), SAMPLE)
    assert layout.carrier_size > 1_100_000_000
    _write(tmp_path / "anchor", 0)
    _write(tmp_path / "suspect", 1, tmp_path / "anchor")
    (tmp_path / "layout.json").write_bytes(layout.to_bytes())
    homes = two_members(tmp_path, layout, digest_of_anchor(layout, read_suspect(tmp_path / "anchor")))
    common = ["--manifest", str(tmp_path / "manifest.json"), "--anchor", str(tmp_path / "anchor")]
    suspect, query = str(tmp_path / "suspect"), str(tmp_path / "query.json")
    nobody = ["--home", str(tmp_path / "nobody")]
    measured = {"prepare": _run("verify", "prepare", suspect, "--out", query, *common, *nobody)}
    partials = []
    for home in homes:
        partials.append(str(tmp_path / f"{home.name}.json"))
        measured[home.name] = _run(
            "verify", "partial", query, "--suspect", suspect, "--out", partials[-1], "--approve", *common,
            "--home", str(home), "--key-file", f"{home}.key",
        )  # fmt: skip
    manifest = common[:2]
    certificate = str(tmp_path / "certificate.json")
    measured["combine"] = _run("verify", "combine", query, *partials, "--out", certificate, *manifest, *nobody)
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    assert [round(one["code"]) for one in measured.values()] == [0, 0, 0, 1]  # nobody's mark is in it
    assert max(one["peak"] for one in measured.values()) < 4 * GIB
