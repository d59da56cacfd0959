"""The server's side: a phase for the key, one for training, one for verification."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import save_file

import quorumark as qm
from quorumark.flower import make_key, verify_model, watermarked

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """The phase that the run config names."""
    folder = Path(str(context.run_config["consortium"]))
    {"setup": setup, "train": train, "verify": verify}[str(context.run_config["phase"])](grid, context, folder)


def train(grid: Grid, context: Context, folder: Path) -> None:
    """As in every Flower app; the strategy is wrapped."""
    from hospitals import task  # here: the other phases need no torch

    config = context.run_config
    waiting = {"stage_timeout": float(config["stage-timeout"]), "patience": float(config["patience"]) or None}
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=4, min_available_nodes=4)
    strategy = watermarked(strategy, folder / "consortium.json", **waiting)
    test_data = task.load_data(None)
    times: list[float] = []

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        model = task.Net()
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = task.test(model, test_data)
        times.append(time.monotonic())
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.initial_model().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["train-timeout"]),
        evaluate_fn=evaluate,
    )
    save_file({name: array.numpy() for name, array in result.arrays.items()}, folder / "model.safetensors")
    rounds = [
        {
            "round": report.round,
            "members": report.members,
            "attempts": report.attempts,
            "marked": report.marked,
            "rho": report.rho,
            "expected_z": report.expected_z,
            "corrected_z": report.corrected_z,
            "seconds": report.seconds,
            "bytes_up": report.metrics.get("bytes-up", 0),
            "bytes_down": report.metrics.get("bytes-down", 0),
            "messages": report.metrics.get("messages", 0),
            "lost": report.lost,
            "excluded": report.excluded,
            "excluded_codes": report.excluded_codes,
            "given_up": report.given_up,
            "given_up_code": report.given_up_code,
        }
        for report in getattr(strategy, "reports", [])  # plain FedAvg has none
    ]
    accuracy = {number: dict(record) for number, record in result.evaluate_metrics_serverapp.items()}
    seconds = [after - before for before, after in pairwise(times)]
    written = {"rounds": rounds, "metrics": accuracy, "round_seconds": seconds}
    _write(folder / "training.json", json.dumps(written, indent=1).encode())


def setup(grid: Grid, _: Context, folder: Path) -> None:
    """All hospitals make the key; nobody sees it. Their operators pinned the digest of these terms."""
    terms = qm.Terms.from_bytes((folder / "terms.json").read_bytes())
    manifest = make_key(grid, terms, note=lambda text: log(INFO, text))
    _write(folder / "consortium.json", manifest.to_bytes())


def verify(grid: Grid, context: Context, folder: Path) -> None:
    """Asks the hospitals whether a model is theirs. Each answers under its own policy."""
    certificate = verify_model(
        grid,
        qm.Reference.read(folder / "consortium.json"),
        str(context.run_config["suspect"]),
        stage_timeout=float(context.run_config["stage-timeout"]),
        note=lambda text: log(INFO, text),
    )
    _write(folder / "certificate.json", certificate.to_bytes())


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: others wait for these files."""
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").replace(path)
