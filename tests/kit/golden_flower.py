"""The Flower part of the golden digests: in this process, or (FOLDER) in Flower's simulation on Ray."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Genesis
from quorumark.flower import watermarked
from quorumark.model.layout import read_safetensors
from quorumark.node.member import MemberNode
from quorumark.setup import dealer
from tests.kit import golden
from tests.kit.flower_simulation import simulate
from tests.kit.flowers import Consortium, Failing, LocalGrid, app_for, records_of

ROUNDS = 4
LOST = {(2, "join"): [4], (4, "upload"): [2]}


def no_signs(self: Genesis, start: int, count: int) -> NDArray[np.bool_]:  # noqa: ARG001
    """σ = 1: the dealt key is the key in use. Roots and terms, which σ comes from, are new in every setup."""
    return np.zeros(count, np.bool_)


def known_key(_stream: Any, _kind: str, start: int, count: int) -> Any:
    return golden.signs("key", start + count)[start:]


def make(folder: Path) -> Consortium:
    """A consortium with homes on disk, and the known key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dealer, "draw_key", known_key)
        return Consortium.deal(
            folder, golden.MEMBERS, golden.THRESHOLD, model=golden.initial(), strength=golden.RHO, policy=golden.CHECKED
        )


def app(folder: Path) -> Any:
    def member(context: Any) -> Any:
        Genesis.whitening = no_signs  # type: ignore[method-assign]  # here, because nodes may be other processes
        x = int(context.node_config["partition-id"]) + 1
        node = MemberNode(HomeFolder(folder / f"member-{x}"), Unlock.key_file(folder / f"member-{x}.key"), seeds=True)
        return Failing(node, x, dict(LOST))

    return app_for(folder, find=member, trained=golden.train)


def told(model: Any, members: list[Any], attempts: list[int]) -> golden.Entry:
    return {"model": golden.model_digest(model), "members": [list(m) for m in members], "attempts": attempts}


def in_process(folder: Path) -> golden.Entry:
    """Flower's own strategy, apps and messages, with nodes in this process."""
    from flwr.serverapp.strategy import FedAvg

    world, count = make(folder), golden.MEMBERS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Genesis, "whitening", no_signs)
        wrapped = watermarked(
            FedAvg(min_train_nodes=count, min_available_nodes=count, fraction_evaluate=0.0),
            world.path,
            seed=golden.SEED,
        )
        result = wrapped.start(
            grid=LocalGrid(app(folder), count),
            initial_arrays=records_of(world.model),
            num_rounds=ROUNDS,
            timeout=60,
        )
    model = {name: np.asarray(array.numpy()).reshape(array.shape) for name, array in result.arrays.items()}
    return told(model, [r.members for r in wrapped.reports], [r.attempts for r in wrapped.reports])


def simulated(folder: Path) -> golden.Entry:
    """What a simulation left in its folder (`simulate`)."""
    model = {name: np.array(t) for name, t in read_safetensors(folder / "out.safetensors").items()}
    reports = json.loads((folder / "reports.json").read_text())
    return told(model, [r["members"] for r in reports], [r["attempts"] for r in reports])


if __name__ == "__main__":
    where = Path(sys.argv[1])
    made = make(where)
    simulate(where, app(where), golden.MEMBERS, ROUNDS, golden.SEED, made.model)
