"""The example runs as it stands: the plain job with its two changed lines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra 'nvflare' is not installed")
pytest.importorskip("torch", reason="the extra 'demo' is not installed")

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "nvflare-quickstart"


def _changed(folder: Path) -> Path:
    """The plain job with the diff of the README, and nothing else."""
    app = folder / "app"
    shutil.copytree(QUICKSTART / "plain", app, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    diff = (QUICKSTART / "README.md").read_text().split("```diff\n")[1].split("```")[0]
    command = ["git", "apply", "--unidiff-zero", "-"]
    done = subprocess.run(command, cwd=app, input=diff, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return app


def test_the_documented_diff_makes_the_example_of_the_plain_job(tmp_path: Path) -> None:
    """Two lines, both in the job: the sites' script stays as it is."""
    app = _changed(tmp_path)
    files = [path.relative_to(app) for path in app.rglob("*.py")]
    assert len(files) == 3
    for name in files:
        assert (app / name).read_text() == (QUICKSTART / name).read_text(), name
    plain = "".join(path.read_text() for path in (QUICKSTART / "plain").glob("*.py"))
    assert "quorumark" not in plain
    added = set((app / "job.py").read_text().splitlines()) - set(plain.splitlines())
    assert len(added) == 2
    for script in ("client.py", "net.py"):
        assert (app / script).read_text() == (QUICKSTART / "plain" / script).read_text()


def test_the_plain_job_with_the_documented_diff_passes_on_the_first_try(tmp_path: Path) -> None:
    """`prepare`, the job, and the README's lines for verification; the persistor has the same model."""
    app = _changed(tmp_path)
    path = f"{app}{os.pathsep}{ROOT / 'src'}"
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    verify = (QUICKSTART / "README.md").read_text().split("```python\n")[1].split("```")[0]
    prepare = shutil.copy(QUICKSTART / "prepare", app)  # it imports the model beside it
    said = []
    for words in ([str(prepare)], ["job.py"], ["-c", verify + _SAME]):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True, timeout=400)
        said.append(done.stdout + done.stderr)
        assert done.returncode == 0, said[-1][-3000:]
    _, run, verified = said
    assert run.count("of 5 members, not marked, attempt 1") == 2
    assert run.count("of 5 members, marked, attempt 1") == 4
    assert "given up" not in run
    verdict, z, same = verified.split()[-3:]
    assert (verdict, same) == ("PASSED", "True")
    assert float(z) > 12


_SAME = """
import torch
from safetensors.torch import load_file

kept = torch.load("runs/quickstart/server/simulate_job/app_server/FL_global_model.pt", weights_only=False)["model"]
print(all(torch.equal(torch.as_tensor(kept[name]), tensor) for name, tensor in load_file(model).items()))
"""
