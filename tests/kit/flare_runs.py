"""Runs in NVIDIA FLARE's simulator, in a process of their own: python -m tests.kit.flare_runs OPTIONS, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from quorumark.consortium.records import Manifest
from quorumark.model.layout import read_safetensors
from quorumark.node.journal import allow_repeats
from tests.kit.flowers import Consortium, Model

SEED = 3
STRENGTH = {"rule": "rho", "rho": "0.3", "c_max": "0.25", "lr": "cosine:40", "dither": "2"}
SCRIPT = Path(__file__).with_name("flare_script.py")
ROOT = Path(__file__).resolve().parents[2]


ADAM = {"path": "torch.optim.Adam", "args": {"lr": 0.01}}
FEDADAM = "fedadam:eta=0.01,beta_1=0.9,beta_2=0.999,tau=0.00000001"
"""The same, as members agree on it."""


def training_job(name: str = "training", die: str = "") -> Any:
    """A job as a user has it: a script, and the controller that is replaced."""
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

    job = FedJob(name, min_clients=2)
    words = f"--die {die}" if die else ""
    job.to_clients(ScriptRunner(str(SCRIPT), words, framework=FrameworkType.NUMPY), tasks=["train"])
    return job


def stepping_job() -> Any:
    """The same with what FLARE's FedOpt recipe has at the server: a controller, an average and torch's Adam."""
    from nvflare.apis.dxo import DataKind
    from nvflare.app_common.aggregators import InTimeAccumulateWeightedAggregator
    from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather
    from nvflare.app_opt.pt.fedopt import PTFedOptModelShareableGenerator

    job = training_job()
    average = InTimeAccumulateWeightedAggregator(expected_data_kind=DataKind.WEIGHT_DIFF)
    parts = {"aggregator": average, "shareable_generator": PTFedOptModelShareableGenerator(optimizer_args=ADAM)}
    for name, part in parts.items():
        job.to_server(part, id=name)
    job.to_server(ScatterAndGather(min_clients=5, num_rounds=2, **{f"{name}_id": name for name in parts}))
    return job


def simulate(
    world: Consortium, rounds: int, plan: list[Any] | None = None, die: str = "", steps: bool = False, **options: Any
) -> tuple[dict[str, Any], Model]:
    """A run of the world's members in the simulator, watermarked if they have a key: its summary and the last model.
    `steps`: the job has an optimiser of FLARE's."""
    for x in range(1, world.count + 1):
        home, unlock = world.home(x)
        allow_repeats(home.only_consortium(), home.identity(unlock))
    asked = {"kind": "train", "rounds": rounds, "plan": plan or [], "die": die, "steps": steps, "options": options}
    run_apart(world, asked)
    out = world.folder / "out"
    model = {name: np.array(tensor) for name, tensor in read_safetensors(out / "model.safetensors").items()}
    return json.loads((out / "summary.json").read_text()), model


def make_key(world: Consortium) -> dict[str, Any]:
    """The key ceremony in the simulator."""
    (world.folder / "terms.json").write_bytes(world.terms.to_bytes())
    run_apart(world, {"kind": "key"})
    return dict(json.loads((world.folder / "made" / "summary.json").read_text()))


def ask(folder: Path, sites: int, suspect: Path, **options: Any) -> dict[str, Any]:
    """A query about a file in the simulator, without training: what the summary says of it."""
    _run(folder, sites, {"kind": "query", "suspect": str(suspect), "options": options})
    (found,) = json.loads((folder / "out" / "summary.json").read_text())["queries"]
    return dict(found)


def run_apart(world: Consortium, asked: dict[str, Any]) -> None:
    _run(world.folder, world.count, asked)


def _run(folder: Path, sites: int, asked: dict[str, Any]) -> None:
    whole = {**asked, "folder": str(folder), "sites": sites}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "HOME": str(folder)}
    command = [sys.executable, "-m", "tests.kit.flare_runs", json.dumps(whole)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def _main(asked: dict[str, Any]) -> int:
    from nvflare.apis.job_def import ALL_SITES
    from nvflare.recipe.sim_env import SimEnv

    from quorumark.nvflare import QuorumarkExecutor, key_ceremony, secure, verification, watermarked
    from tests.kit import flare_parts as parts

    folder, workspace = Path(asked["folder"]), Path(asked["folder"]) / "workspace"
    if asked["kind"] == "key":
        recipe = key_ceremony(folder / "terms.json", homes=folder, folder=str(folder / "made"))
        recipe.run(SimEnv(num_clients=asked["sites"], workspace_root=str(workspace), log_config="concise"))
        return 0
    if asked["kind"] == "query":
        given = {"homes": folder, "folder": str(folder / "out"), **asked["options"]}
        recipe = verification(folder / "consortium.json", asked["suspect"], **given)
        recipe.run(SimEnv(num_clients=asked["sites"], workspace_root=str(workspace), log_config="concise"))
        return 0
    job = stepping_job() if asked["steps"] else training_job(die=asked["die"])
    options = {"seed": SEED, "folder": str(folder / "out"), "num_rounds": asked["rounds"], **asked["options"]}
    wraps = watermarked if Manifest.from_bytes((folder / "consortium.json").read_bytes()).terms.has_key else secure
    wraps(job, folder / "consortium.json", homes=folder, **options)
    if asked["plan"]:  # the same job, with machines that fail
        app = job._deploy_map[ALL_SITES].app_config
        for tasks, filters in app.task_data_filters:
            assert tasks == {"train"}
            filters[:] = [parts.FailingJoin(one.homes, asked["plan"]) for one in filters]
        for entry in app.executors:
            if isinstance(entry.executor, QuorumarkExecutor):
                entry.executor = parts.FailingExecutor(entry.executor.homes, "", asked["plan"])
        job.set_app_packages(["quorumark", "tests"])
    return int(job.simulator_run(str(workspace), n_clients=asked["sites"], log_config="concise") or 0)


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
