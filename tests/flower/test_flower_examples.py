"""The examples run as they stand: the quickstart app with its two changed lines, the hospitals in simulation."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
pytest.importorskip("torch", reason="the extra 'demo' is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_the_changed_lines_are_the_ones_that_the_readmes_show() -> None:
    for name, package in (("flower-quickstart", "quickstart"), ("flower-hospitals", "hospitals")):
        readme = (ROOT / "examples" / name / "README.md").read_text()
        diff = readme.split("```diff")[1].split("```")[0].splitlines()
        added = [line[1:] for line in diff if line.startswith("+") and not line.startswith("+++")]
        code = "".join((ROOT / "examples" / name / package / f).read_text() for f in ("client_app.py", "server_app.py"))
        assert len(added) >= 4
        for line in added:
            first = line.partition("  #")[0].partition("(strategy, ")[0].strip()
            assert first in code, line


@pytest.mark.parametrize(("name", "package"), [("flower-quickstart", "quickstart"), ("flower-hospitals", "hospitals")])
def test_the_apps_are_whole(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `flwr run` would load is there, with the mod in it."""
    import tomllib

    folder = ROOT / "examples" / name
    monkeypatch.syspath_prepend(str(folder))
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    for component in app["components"].values():
        module, _, attribute = component.partition(":")
        assert hasattr(importlib.import_module(module), attribute)
    from quorumark.flower import quorumark_mod

    assert importlib.import_module(f"{package}.client_app").app._mods == [quorumark_mod]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["flower-quickstart", "flower-hospitals"])
def test_what_a_run_left_behind_is_not_sent_with_the_app(name: str, tmp_path: Path) -> None:
    """`flwr run` packs the folder with its JSON files, and homes and results may lie in it."""
    from flwr.cli.build import build_fab_from_disk

    app = tmp_path / name
    shutil.copytree(ROOT / "examples" / name, app)
    for folder in ("deployment", "deployment-2") if name == "flower-hospitals" else ("consortium",):
        (app / folder / "member-1").mkdir(parents=True, exist_ok=True)
        (app / folder / "member-1" / "rules.json").write_text("{}")
    (app / "kept.json").write_text("{}")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as packed:
        names = packed.namelist()
    assert "kept.json" in names
    assert not [path for path in names if path.startswith(("consortium", "deployment"))]


def test_what_the_mark_costs_is_measured_in_simulation(tmp_path: Path, environment: dict[str, str]) -> None:
    """The same app with and without it: two more messages, and vectors of 8 bytes instead of 4 on the way up."""
    pytest.importorskip("ray", reason="flwr's simulation is not installed")
    told = {"seconds": 30.0, "messages": 3.0, "bytes_down": 1100.0, "bytes_up": 2100.0}
    plain = {"seconds": 10.0, "messages": 1.0, "bytes_down": 1000.0, "bytes_up": 1000.0}
    summary = tmp_path / "summary.json"
    command = [sys.executable, "-m", "quorumark", "bench", "flower", "--quick", "--deployment", str(summary)]
    summary.write_text("{}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "deploy --compare N" in done.stderr
    summary.write_text(json.dumps({"plain": plain, "marked": told, "coordinates": 283_424}))
    command += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    deployed, simulated = json.loads((tmp_path / "rows.json").read_text())
    assert (deployed["ratio"], deployed["messages"], deployed["plain_messages"]) == (3.0, 3.0, 1.0)
    assert (simulated["messages"], simulated["plain_messages"], simulated["nodes"]) == (3.0, 1.0, 5)
    assert simulated["plain_bytes_down"] < simulated["bytes_down"] < 1.1 * simulated["plain_bytes_down"]
    assert 2 * simulated["plain_bytes_up"] < simulated["bytes_up"] < 2.1 * simulated["plain_bytes_up"]
    assert min(simulated["seconds"], simulated["plain_seconds"]) > 0  # which is less, a busy machine decides


def test_the_quickstart_runs_in_simulation(tmp_path: Path) -> None:
    """Three rounds with five nodes; `flwr run` would give it the same settings."""
    pytest.importorskip("ray", reason="flwr's simulation is not installed")
    path = f"{ROOT / 'src'}:{ROOT}:{ROOT / 'examples' / 'flower-quickstart'}"
    environment = {**os.environ, "PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    said = ""
    for words in ([str(ROOT / "examples" / "flower-quickstart" / "prepare")], ["-m", "tests.kit.flower_quickstart"]):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        said += done.stdout + done.stderr
    assert "num-supernodes=5" in said
    assert done.returncode == 0, said[-3000:]
    assert said.count("of 5 members, not marked, attempt 1") == 2, said[-3000:]
    assert said.count("of 5 members, marked, attempt 1") == 1, said[-3000:]
    assert "given up" not in said
    accuracy = [float(found) for found in re.findall(r"'eval_acc': ([0-9.]+)}", said)]
    assert accuracy[-1] > 0.6  # it learns, in three rounds: with chance it would be 0.1
    assert (tmp_path / "final_model.pt").stat().st_size > 4 * 19_518
