"""Server optimisers over Flower: the members compute them, with the terms' settings, and refuse any other model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.serverapp import strategy as strategies

from quorumark.consortium.optimiser import Optimiser
from quorumark.errors import RecordError
from quorumark.flower import watermarked
from quorumark.node import remembered
from quorumark.node.journal import Journal
from quorumark.round.history import History
from quorumark.round.optimiser import OptimiserState, Taken
from quorumark.round.server import RoundServer
from quorumark.simulation import Losses
from tests.kit.flower_runs import SEED, as_stages, fedavg, run, same
from tests.kit.flowers import Consortium, LocalGrid, app_for
from tests.kit.refusals import stopped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

LOSSES = {(2, "train"): [4], (3, "train"): [4], (4, "upload"): [2], (5, "unmask"): [1], (6, "train"): [5]}
CASES: dict[str, tuple[Any, dict[str, float]]] = {
    "fedavgm:server_momentum=0.5": (strategies.FedAvgM, {"server_momentum": 0.5}),
    "fedadam:eta=0.01": (strategies.FedAdam, {"eta": 0.01}),
    "fedyogi:eta=0.01": (strategies.FedYogi, {}),
    "fedadagrad:eta=0.01": (strategies.FedAdagrad, {"eta": 0.01}),
}
ADAM = "fedadam:eta=0.01"


def made(folder: Path, text: str = ADAM, **policy: str) -> Consortium:
    folder.mkdir(exist_ok=True)
    return Consortium.make(folder, policy={"sums": "checked", "optimiser": text, **policy})


def strategy(text: str = ADAM, **changes: float) -> Any:
    kind, settings = CASES[text]
    return kind(min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0, **{**settings, **changes})


@pytest.mark.parametrize("text", CASES)
def test_the_model_is_the_one_in_one_process(tmp_path: Path, text: str) -> None:
    """Bit for bit, with members lost at every stage, one of them for two rounds, and a server that is started again
    from its folder: momentum and roots come with the state."""
    world = made(tmp_path, text, packing="1" if text == ADAM else "2")  # one of them without packing, too
    lost = as_stages(LOSSES)
    wrapped, _ = run(world, LocalGrid(app_for(world.folder, lost=lost), 5), 4, strategy(text), folder=tmp_path / "run")
    again = LocalGrid(app_for(world.folder, lost=lost), 5)
    more, model = run(world, again, 7, strategy(text), folder=tmp_path / "run")
    expected = world.in_process(7, SEED, Losses(LOSSES))
    assert same(model, expected.model)
    assert not any(report.given_up for report in (*wrapped.reports, *more.reports))
    assert more.reports[-1].marked
    assert all(model[name].dtype == world.model[name].dtype for name in model)


def test_a_run_without_its_folder_goes_on_from_what_members_hand_out(tmp_path: Path) -> None:
    world = made(tmp_path)
    run(world, LocalGrid(app_for(world.folder), 5), 3, strategy())
    wrapped, model = run(world, LocalGrid(app_for(world.folder), 5, run_id=8), 5, strategy(), go_on=True)
    assert [report.given_up for report in wrapped.reports] == [
        ""
    ] * 3  # the third one is made again: nobody saw its model
    assert same(model, world.in_process(5, SEED).model)


def test_other_optimisers_and_other_settings_are_refused(tmp_path: Path) -> None:
    world = made(tmp_path)
    assert watermarked(strategy(), world.path).strategy
    assert watermarked(strategy(tau=0.001), world.path).strategy
    wrong = [fedavg(), strategies.FedProx(proximal_mu=0.1), strategy("fedyogi:eta=0.01"), strategy(eta=0.02)]
    wrong += [strategy(beta_1=0.8), strategy(beta_2=0.999), strategy(tau=0.01)]
    for inner in wrong:
        with stopped("round.other-optimiser"):
            watermarked(inner, world.path)

    class Own(strategies.FedAdam):  # type: ignore[misc]
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return super().aggregate_train(server_round, replies)

    with stopped("round.other-optimiser"):
        watermarked(Own(eta=0.01), world.path, linear=True)


def test_without_an_optimiser_in_the_terms_none_is_taken(world: Consortium) -> None:
    """The error says what to agree on; FedAvgM with the rate 1 and no momentum is FedAvg."""
    for text, (kind, settings) in CASES.items():
        with stopped("round.other-optimiser") as caught:
            watermarked(kind(**settings), world.path)
        named = str(caught.value).split("optimiser=")[1]
        assert Optimiser.of(named) == Optimiser.of(text)
    assert watermarked(strategies.FedAvgM(), world.path).strategy


@pytest.mark.parametrize("lie", ["settings", "optimiser", "state", "model"])
def test_a_server_that_computes_something_else_finds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """Other settings, another optimiser, momentum that was made up, or a model of its choice: no member joins the next
    round. The server's side alone lies; members use the same functions as always."""
    world, lying = made(tmp_path), [False]
    take, finish = OptimiserState.take, RoundServer.finish

    def wrong(state: OptimiserState, raw: Any) -> Taken:
        if not lying[0]:
            return take(state, raw)
        if lie == "state":
            return take(replace(state, momentum=state.momentum + (1 << 24)), raw)
        other = {"settings": "fedadam:eta=0.02", "optimiser": "fedyogi:eta=0.01"}[lie]
        taken = take(replace(state, optimiser=Optimiser.of(other)), raw)
        return replace(taken, after=replace(taken.after, optimiser=state.optimiser))

    def finished(server: RoundServer) -> dict[str, Any]:
        lying[0] = lie != "model"
        try:
            weights = finish(server)
        finally:
            lying[0] = False
        if lie == "model":
            settled = server.settled
            moved = {k: v + np.float32(1e-3) if k == "a.weight" else v for k, v in settled.weights.items()}
            server._settled = replace(settled, weights=moved, vector=server.layout.flatten(moved))
            return moved
        return weights

    monkeypatch.setattr(OptimiserState, "take", wrong)
    monkeypatch.setattr(RoundServer, "finish", finished)
    wrapped, _ = run(world, LocalGrid(app_for(world.folder), 5), 2, strategy())
    assert wrapped.reports[0].given_up == ""
    assert set(wrapped.reports[1].excluded_codes.values()) == {"round.other-history"}
    assert len(wrapped.reports[1].excluded_codes) == 5


def test_a_state_whose_vectors_were_changed_is_refused(tmp_path: Path) -> None:
    """What a member that missed rounds is told: every vector is named by its digest."""
    world = made(tmp_path)
    run(world, LocalGrid(app_for(world.folder), 5), 4, strategy())
    home, unlock = world.home(1)
    journal = Journal(home.only_consortium(), home.identity(unlock))
    assert world.manifest is not None
    mark = journal.history(world.layout).mark
    vectors, fresh = mark.vectors(), History(world.manifest, world.layout, mark.anchor)
    assert set(vectors) == {"momentum", "root", "mark", "drag", "embedded", "travelled"}
    assert fresh.read_mark(mark.to_bytes(), mark.model, mark.anchor, vectors).digest() == mark.digest()
    for name, vector in vectors.items():
        changed = vector.copy()
        changed[-1] += 1
        for wrong in (changed, vector[:-1], vector.astype(np.float64)):
            with pytest.raises(RecordError):
                fresh.read_mark(mark.to_bytes(), mark.model, mark.anchor, {**vectors, name: wrong})
        with pytest.raises(RecordError):
            fresh.read_mark(mark.to_bytes(), mark.model, mark.anchor, {k: v for k, v in vectors.items() if k != name})
    body = json.loads(mark.to_bytes())
    body["optimiser"]["optimiser"] = str(Optimiser.of("fedadam:eta=0.02"))
    with pytest.raises(RecordError):
        fresh.read_mark(json.dumps(body).encode(), mark.model, mark.anchor, vectors)


def test_a_member_with_a_damaged_file_is_one_that_missed_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = made(tmp_path)
    run(world, LocalGrid(app_for(world.folder), 5), 3, strategy(), folder=tmp_path / "run")
    for x, content in ((2, b"PK\x03\x04 broken"), (3, b"")):
        home, _ = world.home(x)
        (path,) = home.only_consortium().path.glob("rounds/state-*/optimiser.npz")
        path.write_bytes(content)
    monkeypatch.setattr(remembered, "_KNOWN", {})  # as in a new process
    wrapped, model = run(world, LocalGrid(app_for(world.folder), 5), 5, strategy(), folder=tmp_path / "run")
    assert [report.given_up for report in wrapped.reports] == [""] * 2
    assert [len(report.members) for report in wrapped.reports] == [5, 5]
    assert same(model, world.in_process(5, SEED).model)


def test_strategies_are_as_before_after_a_run(tmp_path: Path) -> None:
    world, inner = made(tmp_path), strategy()
    run(world, LocalGrid(app_for(world.folder), 5), 1, inner)
    assert "aggregate_train" not in vars(inner)
    assert inner.m_t is None  # its own arithmetic was never used
