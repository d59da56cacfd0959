"""The examples run as they stand: the quickstart app with its two changed lines, the hospitals in simulation."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorumark.cli.new import NEXT
from tests.kit.blocks import blocks_of, commands_of

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
pytest.importorskip("torch", reason="the extra 'demo' is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_the_hospitals_lines_are_the_ones_that_the_readme_shows() -> None:
    example = ROOT / "examples" / "flower-hospitals"
    diff = (example / "README.md").read_text().split("```diff")[1].split("```")[0].splitlines()
    added = [line[1:] for line in diff if line.startswith("+") and not line.startswith("+++")]
    code = "".join((example / "hospitals" / name).read_text() for name in ("client_app.py", "server_app.py"))
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
    """The same app with and without it: two more messages, and no more bytes a weight either way."""
    pytest.importorskip("ray", reason="flwr's simulation is not installed")
    told = {"seconds": 30.0, "messages": 3.0, "bytes_down": 1100.0, "bytes_up": 2100.0}
    plain = {"seconds": 10.0, "messages": 1.0, "bytes_down": 1000.0, "bytes_up": 1000.0}
    summary = tmp_path / "summary.json"
    command = [sys.executable, "-m", "quorumark", "bench", "flower", "--quick", "--deployment", str(summary)]
    summary.write_text("{}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "deploy --compare N" in done.stderr
    summary.write_text(
        json.dumps({"plain": plain, "marked": told, "coordinates": 283_424, "packing": 2, "sums": "checked"})
    )
    command += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    deployed, simulated = json.loads((tmp_path / "rows.json").read_text())
    assert (deployed["ratio"], deployed["messages"], deployed["plain_messages"]) == (3.0, 3.0, 1.0)
    assert (simulated["messages"], simulated["plain_messages"], simulated["nodes"]) == (3.0, 1.0, 5)
    assert simulated["plain_bytes_down"] < simulated["bytes_down"] < 1.1 * simulated["plain_bytes_down"]
    assert simulated["plain_bytes_up"] < simulated["bytes_up"] < 1.05 * simulated["plain_bytes_up"]
    assert min(simulated["seconds"], simulated["plain_seconds"]) > 0  # which is less, a busy machine decides


QUICKSTART = ROOT / "examples" / "flower-quickstart"
PLANNED = 21  # rounds that the plan proposes for the quickstart's network


def _changed(folder: Path) -> Path:
    """The plain app with the diff of the README, and nothing else."""
    app = folder / "app"
    shutil.copytree(QUICKSTART / "plain", app, ignore=shutil.ignore_patterns("__pycache__"))
    diff = (QUICKSTART / "README.md").read_text().split("```diff\n")[1].split("```")[0]
    command = ["git", "apply", "--unidiff-zero", "-"]
    done = subprocess.run(command, cwd=app, input=diff, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return app


def test_the_documented_diff_makes_the_example_of_the_plain_app(tmp_path: Path) -> None:
    app = _changed(tmp_path)
    files = [path.relative_to(app) for path in app.rglob("*") if path.is_file()]
    assert len(files) == 6
    for name in files:
        assert (app / name).read_text() == (QUICKSTART / name).read_text(), name
    code = "".join(path.read_text() for path in (QUICKSTART / "plain").rglob("*.*") if path.suffix in (".py", ".toml"))
    assert "quorumark" not in code.replace('publisher = "quorumark"', "")


@pytest.fixture
def flower_home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Flower's own folder and ports. The SuperLink that `flwr run` leaves running is ended."""
    home = tmp_path / "flower"
    home.mkdir()
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in (one, two)]
    yield {
        "FLWR_HOME": str(home),
        "HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
    }
    mark = f"FLWR_HOME={home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the SuperLink that Flower leaves in /proc")
def test_the_commands_that_the_page_prints_lead_to_passed(tmp_path: Path, flower_home: dict[str, str]) -> None:
    """The plain app with the diff, `prepare` beside it, and every command as it is printed, `flwr run` too; only what
    they import is not installed with pip, and is this tree's. Whether a run failed Flower's exit code does not say:
    one that did leaves no model."""
    pytest.importorskip("ray", reason="flwr's simulation is not installed")
    app, page = _changed(tmp_path), (QUICKSTART / "README.md").read_text()
    shutil.copy2(QUICKSTART / "prepare", app)
    (console,) = (block.text for block in blocks_of(page) if block.kind == "console")
    install, prepare, run = (command for command, _, _ in commands_of(console))
    assert install.startswith("pip install")
    assert (prepare, f"num-server-rounds={PLANNED}" in run) == ("./prepare", True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    told = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"} | flower_home
    environment = {**os.environ, **told, "PATH": path, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    environment.pop("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", None)  # the page says it

    def bash(command: str) -> str:
        begun = ["bash", "-c", command]
        done = subprocess.run(begun, cwd=app, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout + done.stderr

    prepared = bash(prepare)
    words = " ".join(run.replace("\\\n", " ").replace("$PWD", str(app)).split())
    assert words in " ".join(prepared.replace("\\\n", " ").split()), "what `prepare` prints is another command"
    said = bash(run)
    assert (app / "final_model.pt").exists(), said[-3000:]
    assert f"quorumark: {PLANNED} rounds; a verification should find z = " in said
    assert not list((Path(flower_home["FLWR_HOME"]) / "apps").rglob("consortium")), "homes were packed with the app"
    (verify,) = (block.text for block in blocks_of(page) if block.kind == "python")
    (app / "verify.py").write_text(verify)
    verdict, z = bash(f"{sys.executable} verify.py").split()[-2:]
    assert verdict == "PASSED"
    assert float(z) > 12
    # what `quorumark new flower` says, in an app like this one
    prepare, partial, combine = re.findall(r"quorumark verify (?:\\\n|.)*", "\n".join(NEXT["flower"]))
    bash(prepare)
    for name in ("Avon", "Birch", "Delta", "Elm"):
        bash(partial.replace("Avon", name))
    assert f"PASSED: z = {float(z):.6f}" in bash(combine)


def test_the_plain_app_with_the_documented_diff_passes_on_the_first_try(tmp_path: Path) -> None:
    """`prepare`, the run with the rounds that it plans, and the README's lines for verification."""
    pytest.importorskip("ray", reason="flwr's simulation is not installed")
    app = _changed(tmp_path)
    path = f"{app}:{ROOT / 'src'}:{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    verify = (QUICKSTART / "README.md").read_text().split("```python\n")[1].split("```")[0]
    said = []
    rounds = PLANNED
    for words in ([str(QUICKSTART / "prepare")], ["-m", "tests.kit.flower_quickstart", str(rounds)], ["-c", verify]):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True, timeout=300)
        said.append(done.stdout + done.stderr)
        assert done.returncode == 0, said[-1][-3000:]
    prepared, run, verified = said
    assert f"--run-config \"quorumark-homes='{app}/consortium' num-server-rounds={rounds}\"" in prepared
    marked = re.findall(r"of 5 members, (not marked|marked), attempt 1", run)
    assert len(marked) == rounds
    assert marked[:3] == ["not marked", "not marked", "marked"]
    assert "given up" not in run
    accuracy = [float(found) for found in re.findall(r"'eval_acc': ([0-9.]+)}", run)]
    assert accuracy[-1] > 0.8  # without the mark it is as high; by chance it would be 0.1
    verdict, z = verified.split()[-2:]
    assert verdict == "PASSED"
    assert float(z) > 12
