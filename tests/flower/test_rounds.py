"""Rounds over Flower: the same models as without it, whichever member drops out, in this process and in simulation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import Message, RecordDict

from quorumark.flower import watermarked
from quorumark.flower.wire import exchange, records
from quorumark.model.layout import read_safetensors
from quorumark.node.member import MemberNode
from quorumark.round.server import RoundServer
from quorumark.simulation import Losses
from tests.kit.flower_runs import SEED, as_stages, fedavg, run, same
from tests.kit.flowers import Consortium, LocalGrid, Model, app_for, records_of, train
from tests.kit.refusals import stopped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


LOSSES = {(2, "train"): [4], (4, "upload"): [2], (5, "unmask"): [1], (6, "train"): [5]}


def test_the_model_is_the_one_of_the_federation_in_one_process(world: Consortium) -> None:
    """Bit for bit, with members lost at every stage, who find their way back into the history."""
    grid = LocalGrid(app_for(world.folder, lost=as_stages(LOSSES)), 5)
    wrapped, model = run(world, grid, 7)
    expected = world.in_process(7, SEED, Losses(LOSSES))
    assert same(model, expected.model)
    assert [r.members for r in wrapped.reports] == [r.members for r in expected.reports]
    assert [r.attempts for r in wrapped.reports] == [r.attempts for r in expected.reports] == [1, 1, 1, 2, 1, 1, 1]
    assert [r.marked for r in wrapped.reports] == [r.marked for r in expected.reports]
    assert wrapped.reports[-1].marked
    assert [r.uploaded_bytes for r in wrapped.reports] == [r.uploaded_bytes for r in expected.reports]


@pytest.mark.parametrize("packing", ["1", "2", "3", "4"])
def test_a_run_whose_sums_are_checked_is_the_one_in_one_process(tmp_path: Path, packing: str) -> None:
    """With members lost at every stage, and a server that is started again: another run, from the folder's state."""
    world = Consortium.make(tmp_path, policy={"sums": "checked", "packing": packing})
    grid = LocalGrid(app_for(world.folder, lost=as_stages(LOSSES)), 5)
    wrapped, _ = run(world, grid, 4, folder=tmp_path / "run")
    again = LocalGrid(app_for(world.folder, lost=as_stages(LOSSES)), 5)
    more, model = run(world, again, 7, folder=tmp_path / "run")
    expected = world.in_process(7, SEED, Losses(LOSSES))
    assert same(model, expected.model)
    assert [r.members for r in (*wrapped.reports, *more.reports)] == [r.members for r in expected.reports]
    assert not any(r.given_up for r in (*wrapped.reports, *more.reports))
    # the sum goes down to five, and no model; four of them send as much up
    down, up = (wrapped.reports[1].metrics[f"bytes-{way}"] for way in ("down", "up"))
    assert down / 5 < 1.1 * up / 4
    assert more.reports[-1].marked


def test_evaluation_passes_and_metrics_say_what_a_round_cost(world: Consortium) -> None:
    grid = LocalGrid(app_for(world.folder), 5)
    wrapped = watermarked(fedavg(fraction_evaluate=1.0), world.path, seed=SEED)
    seen: list[int] = []
    result = wrapped.start(
        grid=grid,
        initial_arrays=records_of(world.model),
        num_rounds=2,
        evaluate_fn=lambda _, arrays: seen.append(arrays["steps"].numpy().dtype == np.int64),
    )
    assert seen == [True] * 3  # integer buffers stay what they are
    metrics = result.train_metrics_clientapp[2]
    # the members' own, weighted as FedAvg does it
    assert metrics["moved"] == pytest.approx(sum(x * (100 + x) for x in range(1, 6)) / sum(range(101, 106)))
    assert (metrics["quorumark-members"], metrics["quorumark-attempts"], metrics["quorumark-marked"]) == (5, 1, 0)
    assert metrics["quorumark-messages"] == 15  # train, upload, unmask
    assert {f"quorumark-seconds-{stage}" for stage in ("train", "upload", "unmask")} <= metrics.keys()
    vectors = 5 * 8 * (world.layout.size // 2 + 100 + 80 + 40 + 100 + 12 + 5 + 9)  # the model, and the norms behind it
    assert vectors < metrics["quorumark-bytes-up"] < 1.2 * vectors
    assert result.evaluate_metrics_clientapp[2]["sum"] == pytest.approx(
        sum(float(np.sum(a.numpy(), dtype=np.float64)) for a in result.arrays.values())
    )


def test_metrics_say_what_a_verification_should_find(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the model that each round made, the last one's too: forecast, what members' noise says is left, and both
    together; as the documentation lists them."""
    strength = {"rule": "rho", "rho": "0.2", "c_max": "0.1", "dither": "3"}
    world = Consortium.make(tmp_path, strength=strength, policy={"sums": "checked"})
    wrapped = watermarked(fedavg(), world.path, seed=SEED)
    with caplog.at_level("INFO", logger="flwr"):
        result = wrapped.start(
            grid=LocalGrid(app_for(world.folder), 5), initial_arrays=records_of(world.model), num_rounds=7
        )
    same_run = world.in_process(7, SEED)
    for number, (report, expected) in enumerate(zip(wrapped.reports, same_run.reports, strict=True), 1):
        metrics = result.train_metrics_clientapp[number]
        assert metrics["quorumark-expected-z"] == report.expected_z == expected.expected_z
        assert metrics["quorumark-rho"] == report.rho == expected.rho
        assert metrics["quorumark-corrected-z"] == report.corrected_z
        assert (report.survival_error > 0) == (number >= 5)  # asked in the fifth round, and in the last
    last, there = wrapped.reports[-1], same_run.reports[-1]
    assert abs(last.survival - there.survival) < 4 * last.survival_error
    assert last.corrected_z > 3
    assert f"a verification should find z = {last.corrected_z:.1f}" in caplog.text
    page = (root / "docs/flower.md").read_text(encoding="utf-8")
    for name in metrics:
        if name.startswith("quorumark-"):
            assert f"`{name}`" in page or f"`-{name.removeprefix('quorumark-')}`" in page, name


@pytest.mark.parametrize("rho", ["0.02", "0.4"])
def test_metrics_and_the_log_say_early_what_a_run_is_on_course_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rho: str
) -> None:
    """`quorumark-final-z` from the fifth round on, as the same run in one process has it. Where that is too little what
    helps is a warning, once, long before the end. A strong run is not warned."""
    strength = {"rule": "rho", "rho": rho, "c_max": "0.25", "dither": "0"}
    world, rounds = Consortium.make(tmp_path, strength=strength), 8
    wrapped = watermarked(fedavg(), world.path, seed=SEED)
    with caplog.at_level("INFO", logger="flwr"):
        result = wrapped.start(
            grid=LocalGrid(app_for(world.folder), 5), initial_arrays=records_of(world.model), num_rounds=rounds
        )
    there = world.in_process(rounds, SEED).reports
    told = [result.train_metrics_clientapp[number]["quorumark-final-z"] for number in range(1, rounds + 1)]
    assert told == [report.final_z for report in wrapped.reports] == [report.final_z for report in there]
    assert told[:4] == [0.0] * 4
    assert all(z > 0 for z in told[4:])
    assert told[-1] == pytest.approx(there[-1].corrected_z)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    weak = float(world.terms.policy.z) + 4 > told[4]
    assert weak == (rho == "0.02")
    assert [report.advice for report in wrapped.reports] == [report.advice for report in there]
    assert bool(there[4].advice) == weak
    assert [text for text in warned if "on course" in text] == ([f"quorumark: {there[4].advice}"] if weak else [])
    begun = [record.getMessage() for record in caplog.records]
    if weak:  # said when the fifth round ended, and in the run's last line
        said = begun.index(f"quorumark: {there[4].advice}")
        assert sum("quorumark: round " in text for text in begun[:said]) == 5
        assert there[-1].advice in begun[-2] + begun[-1]


def test_what_leaves_a_node_is_masked(world: Consortium) -> None:
    """Neither a member's model nor its share is in any reply; without the mod the model would be."""
    made: list[Model] = []

    def spy(model: Model, data: float, seed: int, rate: float) -> Model:
        made.append(train(model, data, seed, rate))
        return made[-1]

    grid = LocalGrid(app_for(world.folder, trained=spy), 5)
    run(world, grid, 3)
    home, unlock = world.home(1)
    share = home.only_consortium().share(unlock).vector()
    wanted = [share[:64].tobytes(), *(result["a.weight"].tobytes()[:256] for result in made)]
    sent = [array.data for reply in grid.seen for r in reply.content.array_records.values() for array in r.values()]
    sent += [
        v for m in grid.seen for r in m.content.config_records.values() for v in r.values() if isinstance(v, bytes)
    ]
    assert len(made) == 15
    assert not any(secret in content for secret in wanted for content in sent)
    plain = Message(RecordDict({"arrays": records_of(made[0])}), 101, "train")
    assert any(wanted[1] in array.data for array in plain.content["arrays"].values())


# --- simulation -------------------------------------------------------------------------------------------


def simulated(world: Consortium, rounds: int, losses: Losses) -> tuple[list[dict[str, Any]], Model]:
    """The app on Ray, losing whom the federation in one process loses."""
    pytest.importorskip("ray", reason="flwr's simulation is not installed")
    everyone = range(1, world.count + 1)
    plan = [
        (round_no, "join" if stage == "train" else stage, sorted(losses.at(round_no, stage, 1, everyone)))
        for round_no in range(1, rounds + 1)
        for stage in ("train", "upload", "unmask")
    ]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "RAY_DISABLE_IMPORT_WARNING": "1"}
    command = [
        sys.executable,
        "-m",
        "tests.kit.flower_simulation",
        world.folder,
        world.count,
        rounds,
        SEED,
        json.dumps(plan),
    ]
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads((world.folder / "reports.json").read_text())
    return reports, {name: np.array(t) for name, t in read_safetensors(world.folder / "out.safetensors").items()}


def test_ten_simulated_nodes(tmp_path: Path) -> None:
    world = Consortium.make(tmp_path, 10, 3)
    losses = Losses({(2, "train"): [3], (3, "upload"): [7], (4, "unmask"): [1, 9]})
    reports, model = simulated(world, 4, losses)
    expected = world.in_process(4, SEED, losses)
    assert same(model, expected.model)
    assert [tuple(r["members"]) for r in reports] == [r.members for r in expected.reports]
    assert [r["attempts"] for r in reports] == [1, 1, 2, 1]


def test_simulated_nodes_that_sum_alone(tmp_path: Path) -> None:
    """`secure(strategy)` on Ray: the sums of one process, bit for bit, with nodes that are lost at each stage."""
    world = Consortium.make(tmp_path, setup="sums", policy={"sums": "checked"})
    losses = Losses({(2, "train"): [4], (3, "upload"): [2], (4, "unmask"): [1]})
    reports, model = simulated(world, 4, losses)
    expected = world.in_process(4, SEED, losses)
    assert same(model, expected.model)
    assert [tuple(r["members"]) for r in reports] == [r.members for r in expected.reports]
    assert [r["attempts"] for r in reports] == [1, 1, 2, 1]


@pytest.mark.slow
def test_a_hundred_simulated_nodes_that_drop_out_at_random(tmp_path: Path) -> None:
    world = Consortium.deal(tmp_path, 100, 20)
    losses = Losses(rates={"train": 0.03, "unmask": 0.03}, plan={(3, "upload"): [40, 41]}, seed=11)
    reports, model = simulated(world, 4, losses)
    expected = world.in_process(4, SEED, losses)
    assert same(model, expected.model)
    assert [tuple(r["members"]) for r in reports] == [r.members for r in expected.reports]
    assert all(80 < len(r["members"]) < 100 for r in reports)


# --- runs that go on --------------------------------------------------------------------------------------


def test_a_member_that_comes_late_is_given_the_anchor(world: Consortium) -> None:
    plan = {(1, "train"): [5], (2, "train"): [5], (3, "train"): [5]}
    grid = LocalGrid(app_for(world.folder, lost=as_stages(plan)), 5)
    wrapped, model = run(world, grid, 5)
    assert wrapped.reports[3].members == (1, 2, 3, 4, 5)
    assert wrapped.reports[3].metrics["messages"] == 16  # one of them twice
    assert same(model, world.in_process(5, SEED, Losses(plan)).model)


def test_a_run_whose_server_died_goes_on(world: Consortium, tmp_path: Path) -> None:
    grid = LocalGrid(app_for(world.folder), 5)
    run(world, grid, 3, folder=tmp_path / "run")
    later = LocalGrid(app_for(world.folder), 5, run_id=8)
    wrapped, model = run(world, later, 6, folder=tmp_path / "run")
    assert [r.round for r in wrapped.reports] == [4, 5, 6]
    assert same(model, world.in_process(6, SEED).model)
    # started once more, it has nothing left to do, and gives that model
    done, again = run(world, LocalGrid(app_for(world.folder), 5, run_id=9), 6, folder=tmp_path / "run")
    assert not done.reports
    assert same(again, model)


@pytest.mark.parametrize("names", [3, 1], ids=["t members", "one member, as a control"])
def test_a_run_that_lost_its_folder_goes_on_whatever_one_member_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: int
) -> None:
    """Hospital 5 hands out a state of later rounds that only it has seen."""
    world = Consortium.make(tmp_path, policy={"sums": "checked"})
    run(world, LocalGrid(app_for(world.folder), 5), 2)
    elsewhere = world.copy(tmp_path / "elsewhere")
    run(elsewhere, LocalGrid(app_for(elsewhere.folder), 5, run_id=8), 4, go_on=True)
    monkeypatch.setattr(RoundServer, "names_needed", names)

    def member(context: Any) -> Any:
        x = int(context.node_config["partition-id"]) + 1
        true = MemberNode(*world.home(x), seeds=True)

        class Liar:
            def handle(self, stage: str, config: Any, arrays: Any) -> Any:
                return (MemberNode(*elsewhere.home(5)) if stage == "state" else true).handle(stage, config, arrays)

        return Liar() if x == 5 else true

    grid = LocalGrid(app_for(world.folder, find=member), 5, run_id=9)
    if names == 1:
        with stopped("round.none-finished"):
            run(world, grid, 5, go_on=True)
        return
    wrapped, model = run(world, grid, 3, go_on=True)
    assert [report.given_up for report in wrapped.reports] == [""] * len(wrapped.reports)
    assert same(model, world.in_process(3, SEED).model)


# --- messages ---------------------------------------------------------------------------------------------


def test_messages_hold_vectors_as_arrays() -> None:
    made = records({"round": 1, "head": b"x"}, {"vector": np.arange(5, dtype=np.uint64), "one": np.array(3)})
    assert made["quorumark.arrays"]["vector"].numpy().dtype == np.uint64
    assert made["quorumark.arrays"]["one"].shape == ()


def test_a_reply_that_never_ends_holds_up_nobody(world: Consortium) -> None:
    """Flower waits minutes for the rest of a reply whose node died while it sent it."""
    released, ended = threading.Event(), threading.Event()

    class Stuck(LocalGrid):
        def pull_messages(self, names: Any) -> list[Any]:
            if "3" in names:
                released.wait(300)
                ended.set()
            return super().pull_messages(names)

    content = RecordDict({"arrays": records_of(world.model)})
    # a node that was silent before is waited for only a little longer than the others, as are the last with a patience
    for waiting in ({"timeout": 1.0}, {"timeout": 300.0, "doubtful": {103}}, {"timeout": 300.0, "patience": 2.0}):
        grid = Stuck(app_for(world.folder), 5)
        replies = exchange(grid, [Message(content, node, "evaluate") for node in grid.apps], **waiting)
        assert not ended.is_set()  # it went on before that one
        assert set(replies) == {101, 102, 104, 105}
    released.set()
