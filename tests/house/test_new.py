"""`quorumark new`: an app to begin with, from a clone and from an installed wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quorumark.cli.new import FILES
from tests.kit.commands import run

EXAMPLES = {"flower": "flower-quickstart", "nvflare": "nvflare-quickstart"}


def _example(root: Path, engine: str) -> dict[str, bytes]:
    """The example's own files, without what is for readers of the project."""
    folder = root / "examples" / EXAMPLES[engine]
    tracked = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=True).stdout.split()
    names = [name for name in tracked if name != "README.md" and not name.startswith("plain/")]
    return {name: (folder / name).read_bytes() for name in names}


def _written(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("engine", FILES)
def test_it_writes_the_example_as_it_is_tested(root: Path, tmp_path: Path, engine: str) -> None:
    done = run({}, "new", engine, str(tmp_path / "app"))
    assert done.returncode == 0, done.stderr
    assert "./prepare" in done.stdout
    assert _written(tmp_path / "app") == _example(root, engine)
    assert (tmp_path / "app" / "prepare").stat().st_mode & 0o111


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert run({}, "new", "flower", str(tmp_path)).returncode == 2
    assert run({}, "new", "flower", str(tmp_path / "mine.txt")).returncode == 2
    assert run({}, "new", "fedml", str(tmp_path / "app")).returncode == 2
    assert _written(tmp_path) == {"mine.txt": b"mine"}


def test_a_wheel_has_the_templates_and_nothing_of_the_plain_apps(root: Path, tmp_path: Path) -> None:
    source, wheels, where = (tmp_path / name for name in ("source", "wheels", "installed"))
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", "examples"):  # a build leaves files behind
        shutil.copytree(root / folder, source / folder, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    words = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = wheels.glob("quorumark-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        packed.extractall(where)
    wanted = {f"quorumark/templates/{engine}/{name}" for engine, files in FILES.items() for name in files}
    assert {name for name in names if name.startswith("quorumark/templates/")} == wanted
    assert {"quorumark/py.typed", "quorumark/trial/templates/images.py", "quorumark/room/templates/base.html"} <= names
    # -I: nothing of this clone comes before what was unpacked
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from quorumark.cli import main; main()"
    for engine in FILES:
        command = [sys.executable, "-I", "-c", start, str(where), "new", engine, str(tmp_path / engine)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        assert _written(tmp_path / engine) == _example(root, engine)
