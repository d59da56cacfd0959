"""Flower: the same models as in one process, whoever drops out; refusals that say why; ceremony and verification."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import strategy as strategies

from quorumark.canonical import canonical
from quorumark.consortium.files import write_private
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Header, open_message
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Manifest
from quorumark.errors import (
    CeremonyError,
    EvidenceError,
    InputError,
    KeystoreError,
    MessageError,
    RecordError,
    RoundError,
)
from quorumark.field import P
from quorumark.flower import make_key, verify_model, watermarked
from quorumark.flower.wire import exchange, records
from quorumark.model.layout import read_safetensors, write_safetensors
from quorumark.node.journal import MODEL, create_memory
from quorumark.node.member import RESULT, MemberNode
from quorumark.node.signer import SignerClient, SignerServer
from quorumark.round.server import RoundServer
from quorumark.setup.amend import propose
from quorumark.setup.amend import sign as amend
from quorumark.setup.exchange import expected_messages
from quorumark.simulation import Losses
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import check_certificate
from quorumark.verify.reference import Reference
from tests.kit.audits import audit
from tests.kit.consortium import make_world
from tests.kit.flowers import Consortium, LocalGrid, Model, app_for, initial, pulled, records_of, train

SEED = 3
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}.items():
        monkeypatch.setenv(name, value)
    logging.getLogger("flwr").setLevel(logging.ERROR)


@pytest.fixture
def world(tmp_path: Path) -> Consortium:
    return Consortium.make(tmp_path)


def fedavg(nodes: int = 5, **options: Any) -> Any:
    return strategies.FedAvg(min_train_nodes=nodes, min_available_nodes=nodes, **{"fraction_evaluate": 0.0, **options})


def run(world: Consortium, grid: Any, rounds: int, inner: Any = None, **options: Any) -> tuple[Any, Model]:
    """A wrapped run: the strategy with its reports, and the last model."""
    wrapped = watermarked(inner or fedavg(len(grid.apps)), world.path, **{"seed": SEED, **options})
    result = wrapped.start(grid=grid, initial_arrays=records_of(world.model), num_rounds=rounds, timeout=60)
    return wrapped, {name: np.asarray(array.numpy()).reshape(array.shape) for name, array in result.arrays.items()}


def run_in_vain(world: Consortium, grid: Any, reason: str) -> Any:
    """A wrapped run of one round that is given up: it says why, and gives no model that an app could save."""
    wrapped = watermarked(fedavg(), world.path, seed=SEED)
    with pytest.raises(RoundError, match=f"no round of this run was finished.*{reason}"):
        wrapped.start(grid=grid, initial_arrays=records_of(world.model), num_rounds=1, timeout=60)
    return wrapped


def same(one: Model, two: Model) -> bool:
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and np.array_equal(one[name], two[name]) for name in one
    )


# --- the same as in one process ---------------------------------------------------------------------------


LOSSES = {(2, "train"): [4], (4, "upload"): [2], (5, "unmask"): [1], (6, "train"): [5]}


def as_stages(plan: dict[tuple[int, str], list[int]]) -> dict[tuple[int, str], list[int]]:
    return {(r, "join" if stage == "train" else stage): points for (r, stage), points in plan.items()}


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


def test_a_run_whose_sums_are_checked_is_the_one_in_one_process(tmp_path: Path) -> None:
    """With members lost at every stage, and a server that is started again: another run, from the folder's state."""
    world = Consortium.make(tmp_path, policy={"sums": "checked"})
    grid = LocalGrid(app_for(world.folder, lost=as_stages(LOSSES)), 5)
    wrapped, _ = run(world, grid, 4, folder=tmp_path / "run")
    again = LocalGrid(app_for(world.folder, lost=as_stages(LOSSES)), 5)
    more, model = run(world, again, 7, folder=tmp_path / "run")
    expected = world.in_process(7, SEED, Losses(LOSSES))
    assert same(model, expected.model)
    assert [r.members for r in (*wrapped.reports, *more.reports)] == [r.members for r in expected.reports]
    assert not any(r.given_up for r in (*wrapped.reports, *more.reports))
    assert more.reports[-1].marked


def test_where_sums_are_checked_a_server_optimiser_is_told_why_not(tmp_path: Path) -> None:
    world = Consortium.make(tmp_path, policy={"sums": "checked"})
    inner = strategies.FedAdam(min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0, eta=0.01)
    wrapped = watermarked(inner, world.path, seed=SEED)
    start = {"initial_arrays": records_of(world.model), "num_rounds": 3, "timeout": 60}
    with pytest.raises(RoundError, match="such as FedAvg"):
        wrapped.start(grid=LocalGrid(app_for(world.folder), 5), **start)
    assert wrapped.reports[0].given_up == ""
    assert all("such as FedAvg" in report.given_up for report in wrapped.reports[1:])


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
    vectors = 5 * 8 * (world.layout.size + 100 + 80 + 40 + 100 + 12 + 5 + 9)  # the model, and the norms behind it
    assert vectors < metrics["quorumark-bytes-up"] < 1.2 * vectors
    assert result.evaluate_metrics_clientapp[2]["sum"] == pytest.approx(
        sum(float(np.sum(a.numpy(), dtype=np.float64)) for a in result.arrays.values())
    )


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


@pytest.mark.slow
def test_a_hundred_simulated_nodes_that_drop_out_at_random(tmp_path: Path) -> None:
    world = Consortium.deal(tmp_path, 100, 20)
    losses = Losses(rates={"train": 0.03, "unmask": 0.03}, plan={(3, "upload"): [40, 41]}, seed=11)
    reports, model = simulated(world, 4, losses)
    expected = world.in_process(4, SEED, losses)
    assert same(model, expected.model)
    assert [tuple(r["members"]) for r in reports] == [r.members for r in expected.reports]
    assert all(80 < len(r["members"]) < 100 for r in reports)


# --- strategies -------------------------------------------------------------------------------------------


class Careful(strategies.FedAvg):  # type: ignore[misc]
    """A user's own, which changes nothing about the average."""

    def summary(self) -> None: ...


class Odd(strategies.FedAvg):  # type: ignore[misc]
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return super().aggregate_train(server_round, replies)


def test_strategies_that_need_single_updates_are_refused_with_the_reason(world: Consortium) -> None:
    refused: dict[str, Any] = {
        "chooses among single updates": strategies.Krum(num_malicious_nodes=1),
        "median": strategies.FedMedian(),
        "trimmed mean": strategies.FedTrimmedAvg(),
        "own loss": strategies.QFedAvg(client_learning_rate=0.1),
        "trees": strategies.FedXgbBagging(),
        "next": strategies.FedXgbCyclic(),
        "fixedclipping_mod": strategies.DifferentialPrivacyServerSideFixedClipping(fedavg(), 1.0, 1.0, 5),
        "norm bit": strategies.DifferentialPrivacyClientSideAdaptiveClipping(fedavg(), 0.1, 50),
        "linear=True": Odd(),
    }
    for reason, strategy in refused.items():
        with pytest.raises(InputError, match=reason):
            watermarked(strategy, world.path)
    for kind in (strategies.Bulyan, strategies.MultiKrum):
        with pytest.raises(InputError, match="chooses among single updates"):
            watermarked(kind(num_malicious_nodes=1), world.path)
    with pytest.raises(InputError, match="FedMedian"):  # inside a wrapper as well
        watermarked(
            strategies.DifferentialPrivacyClientSideFixedClipping(strategies.FedMedian(), 1.0, 1.0, 5), world.path
        )
    assert watermarked(Odd(), world.path, linear=True).strategy
    assert watermarked(Careful(), world.path).strategy
    assert watermarked(strategies.FedProx(proximal_mu=0.1), world.path).strategy


def test_fedprox_is_fedavg_of_what_its_term_makes_of_the_members(world: Consortium) -> None:
    """Its μ reaches the app, which pulls its step back; the sum is FedAvg's of those models, to the bit."""
    mu = 0.5
    inner = strategies.FedProx(proximal_mu=mu, min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0)
    wrapped, model = run(world, LocalGrid(app_for(world.folder), 5), 4, inner)

    def prox(model: Model, data: float, seed: int, rate: float) -> Model:
        return pulled(model, train(model, data, seed, rate), mu)

    expected = world.in_process(4, SEED, trained=prox)
    assert same(model, expected.model)
    assert [r.marked for r in wrapped.reports] == [r.marked for r in expected.reports] == [False, False, True, True]
    assert not same(model, world.in_process(4, SEED).model)


OPTIMISERS = {
    "FedAvgM": {"server_momentum": 0.5},
    "FedAdam": {"eta": 0.01},
    "FedYogi": {"eta": 0.01},
    "FedAdagrad": {"eta": 0.01},
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_server_optimisers_work_with_the_average_and_the_mark(tmp_path: Path, name: str) -> None:
    """What they get is the sum that FedAvg gets in the same round, to the bit; the history follows what they make."""
    strength = {"rule": "relative", "c": "0.02", "alike": "mark", "dither": "0"}
    world = Consortium.make(tmp_path, strength=strength)
    kind = getattr(strategies, name)
    got: list[Model] = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            got.append({k: a.numpy() for k, a in replies[0].content["arrays"].items()})
            return super().aggregate_train(server_round, replies)

    inner = Watched(min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0, **OPTIMISERS[name])
    wrapped, model = run(world, LocalGrid(app_for(tmp_path), 5), 4, inner, linear=True)
    assert [r.given_up for r in wrapped.reports] == [""] * 4
    assert [r.marked for r in wrapped.reports] == [False, False, True, True]
    assert same({**got[0], "steps": world.model["steps"]}, world.in_process(1, SEED).model)
    assert not same(model, world.in_process(4, SEED).model)
    assert all(model[k].dtype == world.model[k].dtype for k in model)


def test_clipping_at_the_members_and_noise_at_the_server(world: Consortium) -> None:
    """DifferentialPrivacyClientSideFixedClipping: its mod clips before the mark's mod sees the model."""
    from flwr.clientapp.mod import fixedclipping_mod

    norm = 0.05
    inner = strategies.DifferentialPrivacyClientSideFixedClipping(fedavg(), 0.0, norm, 5)
    grid = LocalGrid(app_for(world.folder, mods=[fixedclipping_mod]), 5)
    wrapped, model = run(world, grid, 1, inner)
    assert wrapped.reports[0].members == (1, 2, 3, 4, 5)
    moved = np.sqrt(sum(float(((model[n] - world.model[n]) ** 2).sum()) for n in model if n != "steps"))
    plain = world.in_process(1, SEED).model
    free = np.sqrt(sum(float(((plain[n] - world.model[n]) ** 2).sum()) for n in plain if n != "steps"))
    assert moved <= norm * 1.001 < free


def test_noise_at_the_server_comes_on_top_and_the_mark_goes_on(world: Consortium, tmp_path: Path) -> None:
    """The sum is exact; the noise has the deviation that Flower's wrapper gives it; members follow the noisy models."""
    from flwr.clientapp.mod import fixedclipping_mod

    norm, noise = 1000.0, 2e-6  # nothing is clipped
    longer = world.copy(tmp_path / "longer")
    inner = strategies.DifferentialPrivacyClientSideFixedClipping(fedavg(), noise, norm, 5)
    wrapped, model = run(world, LocalGrid(app_for(world.folder, mods=[fixedclipping_mod]), 5), 1, inner)
    plain = world.in_process(1, SEED).model
    moved = np.concatenate([(model[n] - plain[n]).ravel() for n in plain if n != "steps"])
    assert moved.std() == pytest.approx(noise * norm / 5, rel=0.05)
    grid = LocalGrid(app_for(longer.folder, mods=[fixedclipping_mod]), 5, run_id=8)
    wrapped, _ = run(longer, grid, 4, inner)
    assert [r.given_up for r in wrapped.reports] == [""] * 4
    assert wrapped.reports[-1].marked


def test_an_accountant_is_refused(world: Consortium) -> None:
    """It checks every single reply, and there is one for all; without it the same strategy is taken."""
    from types import SimpleNamespace

    from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod

    config = PrivacyConfig(1e-5, 5, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    noisy = strategies.DifferentialPrivacyClientSideFixedClipping
    assert watermarked(noisy(fedavg(), 1.0, 1.0, 5), world.path).strategy
    with pytest.raises(InputError, match="account outside"):
        watermarked(noisy(fedavg(), 1.0, 1.0, 5, accountant=SimpleNamespace(config=config)), world.path)


# --- refusals ---------------------------------------------------------------------------------------------


def test_a_number_of_examples_that_is_not_the_manifests(world: Consortium) -> None:
    grid = LocalGrid(app_for(world.folder, examples=lambda x: 90 if x == 2 else 100 + x), 5)
    wrapped, model = run(world, grid, 1)
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert "consortium amend --examples 2=90" in wrapped.reports[0].excluded[-102]
    assert same(model, world.in_process(1, SEED, Losses({(1, "train"): [2]})).model)


def test_members_that_cannot_take_part_say_why_and_the_others_go_on(world: Consortium, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Consortium.make(tmp_path / "other")
    (world.folder / "member-3").rename(world.folder / "kept")
    (other.folder / "member-3").rename(world.folder / "member-3")
    (world.folder / "member-3.key").rename(world.folder / "kept.key")
    (other.folder / "member-3.key").rename(world.folder / "member-3.key")
    grid, folder = LocalGrid(app_for(world.folder), 5), tmp_path / "server"
    wrapped, _ = run(world, grid, 1, folder=folder)
    assert wrapped.reports[0].members == (1, 2, 4, 5)
    assert "consortium update" in wrapped.reports[0].excluded[-103]  # the wrong manifest
    (world.folder / "member-3").rename(other.folder / "member-3")
    (world.folder / "kept").rename(world.folder / "member-3")
    (world.folder / "member-3.key").unlink()
    (world.folder / "kept.key").rename(world.folder / "member-3.key")

    home, _ = world.home(3)
    share = home.only_consortium().share_path()
    share.rename(tmp_path / "share")
    again, _ = run(world, LocalGrid(app_for(world.folder), 5, run_id=8), 2, folder=folder)
    assert again.reports[0].members == (1, 2, 4, 5)
    assert "no share" in again.reports[0].excluded[-103]
    (tmp_path / "share").rename(share)

    # a second run from the initial model: the server's operator forgot the folder
    second = run_in_vain(world, LocalGrid(app_for(world.folder), 5, run_id=9), "has gone on from this model")
    assert "members are left" in second.reports[0].given_up
    told = [reason for point, reason in second.reports[0].excluded.items() if point not in (3, -103)]
    assert len(told) == 4
    assert all("go_on=True" in reason and "quorumark member consent" in reason for reason in told)


def test_one_member_with_a_later_number_or_another_layout_of_its_own(tmp_path: Path) -> None:
    """Member 3 has joined a later round elsewhere, and the run goes on after that; member 2's code has another model
    than the agreed one; member 4's went astray. Those are told why, without a single weight, and the others go on."""
    world = Consortium.deal(tmp_path, 9, 3)
    home, unlock = world.home(3)
    place = home.only_consortium()
    (place.path / "rounds" / "memory" / "rounds.sealed").unlink()
    create_memory(place, home.identity(unlock), 6)

    def smaller(*told: Any) -> Model:
        made = train(*told)
        return {**made, "b.weight": made["b.weight"][:39]}

    def astray(*told: Any) -> Model:
        made = train(*told)
        return {**made, "a.bias": np.where(np.arange(100) == 7, np.float32(-654321), made["a.bias"])}

    grid = LocalGrid(app_for(world.folder), 9)
    grid.apps[102] = app_for(world.folder, trained=smaller)
    grid.apps[104] = app_for(world.folder, trained=astray)
    wrapped, model = run(world, grid, 1)
    report = wrapped.reports[0]
    assert (report.given_up, report.members) == ("", (1, 3, 5, 6, 7, 8, 9))
    assert report.round == 7
    assert set(report.excluded) == {-102, -104}
    assert "'b.weight'" in report.excluded[-102]
    assert "(40, 100)" in report.excluded[-102]
    assert "'a.bias'" in report.excluded[-104]
    assert not any("654321" in str(reply) for reply in grid.seen)
    assert same(model, world.in_process(1, SEED, Losses({(1, "train"): [2, 4]})).model)


def test_stages_that_come_at_the_wrong_time(world: Consortium) -> None:
    """An upload without training, a second one for the same attempt, a request for a round that is over."""
    assert world.manifest is not None
    server = RoundServer(world.manifest, world.layout, world.model, run="1")
    offer, arrays = server.offer(world.model)
    model = {MODEL + name: tensor for name, tensor in world.model.items()}
    nodes = {x: MemberNode(*world.home(x)) for x in range(1, 6)}
    with pytest.raises(RoundError, match="'Hospital 1' has not trained in round 1"):
        nodes[1].handle("upload", {"round": 1, "announcement": b""}, {})
    result = {RESULT + name: tensor for name, tensor in train(world.model, 0.01, 1, 1.0).items()}
    for x, node in nodes.items():
        reply, _ = node.handle("join", offer, {**arrays, **model})
        about = {**offer, "examples": 100 + x, "node": "1", "joined": reply["joined"]}
        ready, _ = node.handle("ready", about, result)
        server.take_ready(x, ready["ready"])
    told = {"round": 1, "announcement": server.announce()}
    for x, node in nodes.items():
        head, vector = node.handle("upload", told, {})
        server.take_upload(x, head["head"], vector["vector"])
    with pytest.raises(RoundError, match="attempt 1"):
        nodes[1].handle("upload", told, {})
    with pytest.raises(RoundError, match="has not trained in round 2"):
        nodes[1].handle("upload", {**told, "round": 2}, {})
    said, _ = nodes[1].handle("unmask", {"request": server.request(1)}, {})
    assert nodes[1].handle("unmask", {"request": server.request(1)}, {})[0] == said  # the same once more
    with pytest.raises(RoundError, match="has answered in round 1 from this model"):
        nodes[1].handle("upload", told, {})


def test_what_an_exception_says_stays_on_the_node(world: Consortium) -> None:
    """Flower would send it to the server, and it may quote a member's data."""

    def careless(model: Model, *_: Any) -> Model:
        raise ValueError(f"cannot train on {model['a.weight'][0, :3]} of patient 4711")

    app, careful = app_for(world.folder, trained=careless), app_for(world.folder)
    grid = LocalGrid(careful, 5)
    grid.apps[102] = app
    wrapped, _ = run(world, grid, 1)
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert "its node failed: ValueError; the node's log has the rest" in wrapped.reports[0].excluded[-102]
    assert not any("patient" in str(reply) for reply in grid.seen)  # a number alone is in some key by chance


def test_what_an_exception_says_stays_on_the_node_wherever_it_is_raised(world: Consortium) -> None:
    """In another mod that makes a reply of it, in the app's evaluation, in a message that cannot be read."""
    from flwr.app import Array, ArrayRecord, Error

    def telling(message: Any, context: Any, call_next: Any) -> Any:
        if message.metadata.message_type == "evaluate":
            raise ValueError("cannot evaluate patient 4711")
        call_next(message, context)
        return Message(Error(2, "ValueError: patient 4711"), reply_to=message)

    grid = LocalGrid(app_for(world.folder), 5)
    grid.apps[102] = app_for(world.folder, mods=[telling])
    wrapped, _ = run(world, grid, 1, fedavg(fraction_evaluate=1.0))
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert "its node failed: RuntimeError; the node's log has the rest" in wrapped.reports[0].excluded[-102]
    assert any(reply.has_error() and reply.error.reason.startswith("ValueError; ") for reply in grid.seen)
    damaged = ArrayRecord({"one": Array("uint8", (3,), "numpy.ndarray", b"no array")})
    content = RecordDict({"quorumark": ConfigRecord({"stage": "setup"}), "quorumark.arrays": damaged})
    for kind in ("train", "query.quorumark"):
        grid.send_and_receive([Message(content, 101, kind)])
        assert grid.seen[-1].content["quorumark"]["failed"].endswith("; the node's log has the rest")
    assert not any("patient" in str(reply) for reply in grid.seen)  # a number alone is in some key by chance


def test_a_refusal_does_not_say_where_the_files_lie(world: Consortium) -> None:
    (world.folder / "member-2.key").unlink()
    (world.folder / "member-3.key").chmod(0o644)
    grid = LocalGrid(app_for(world.folder), 5)
    excluded = run_in_vain(world, grid, "the key file").reports[0].excluded
    assert "cannot read the key file '…/member-2.key'" in excluded[-102]
    assert excluded[-103].endswith("'…/member-3.key' is open to others: chmod 600 …/member-3.key")
    assert not any(world.folder.name in str(reply) for reply in grid.seen)


def test_another_model_than_the_agreed_one(world: Consortium) -> None:
    """The server's own check first; a server that passes it over is refused by every member."""
    changed = {**initial(), "b.weight": np.zeros((41, 100), np.float32)}
    wrapped = watermarked(fedavg(), world.path)
    grid = LocalGrid(app_for(world.folder), 5)
    with pytest.raises(Exception, match=r"does not fit the layout|must be F32 of shape"):
        wrapped.start(grid=grid, initial_arrays=records_of(changed), num_rounds=1)
    home, unlock = world.home(1)
    assert world.manifest is not None
    from quorumark.model.layout import ModelLayout

    offer, arrays = RoundServer(world.manifest, world.layout, world.model, run="1").offer(world.model)
    model = {MODEL + name: tensor for name, tensor in changed.items()}
    with pytest.raises(Exception, match=r"b\.weight"):
        MemberNode(home, unlock).handle("join", offer, {**arrays, **model})
    arrays["layout"] = np.frombuffer(ModelLayout.of(changed).to_bytes(), np.uint8)
    with pytest.raises(RecordError, match="train the model that was agreed"):
        MemberNode(home, unlock).handle("join", offer, {**arrays, **model})


def test_a_member_may_evaluate_nothing(world: Consortium) -> None:
    """A server that sends any model learns its loss on a member's data, unless the member's own node says no."""
    app = app_for(world.folder)

    def with_setting(value: object) -> Any:
        def node(message: Any, context: Any) -> Any:
            context.run_config["quorumark-evaluate"] = "on"  # the server's, which does not count
            context.node_config["quorumark-evaluate"] = value
            return app(message, context)

        return node

    grid = LocalGrid(app, 5)
    grid.apps |= {102: with_setting("off"), 103: with_setting("on"), 104: with_setting("no")}
    chosen = {name: np.full_like(tensor, 3) for name, tensor in world.model.items()}  # no model of any run
    content = RecordDict({"arrays": records_of(chosen), "config": ConfigRecord()})
    replies = {
        reply.metadata.src_node_id: reply
        for reply in grid.send_and_receive([Message(content, node, "evaluate") for node in grid.apps])
    }
    told = {node for node, reply in replies.items() if reply.has_content() and "sum" in reply.content["metrics"]}
    assert told == {101, 103, 105}
    assert "evaluates no models: its operator switched it off" in replies[102].error.reason
    assert "must be on or off in the node config, but got 'no'" in replies[104].error.reason
    # it trains as before, and the strategy works with the metrics of the others
    wrapped = watermarked(fedavg(fraction_evaluate=1.0), world.path, seed=SEED)
    result = wrapped.start(grid, records_of(world.model), num_rounds=1)
    assert set(wrapped.reports[0].members) == {1, 2, 3, 4, 5}
    assert "sum" in result.evaluate_metrics_clientapp[1]


def test_what_a_message_lacks_is_the_servers_fault_and_our_own_faults_are_ours(
    world: Consortium, signers: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert world.manifest is not None
    node, server = MemberNode(*world.home(1)), RoundServer(world.manifest, world.layout, world.model, run="1")
    offer, arrays = server.offer(world.model)
    vectors = {**arrays, **{MODEL + name: tensor for name, tensor in world.model.items()}}
    for name in ("manifest", "round", "turn", "accepted"):
        with pytest.raises(MessageError, match=f"the stage 'join' lacks '{name}'"):
            node.handle("join", {key: value for key, value in offer.items() if key != name}, vectors)
    for name in ("layout", "state"):
        with pytest.raises(MessageError, match=f"the stage 'join' lacks '{name}'"):
            node.handle("join", offer, {key: value for key, value in vectors.items() if key != name})
    for stage, name, value in [
        ("join", "run", 1),
        ("join", "run", "\ud800"),
        ("join", "manifest", b"00"),
        ("upload", "announcement", "text"),
        ("unmask", "request", 5),
        ("sign", "certificate", "text"),
        ("answer", "query", 1.5),
        ("setup", "session", 1),
        ("setup", "have", 1),
    ]:
        with pytest.raises(MessageError, match=f"the stage '{stage}' must give '{name}' as"):
            node.handle(stage, {**offer, name: value}, vectors)

    def ours(*_: Any) -> None:
        raise KeyError("no field of any message")

    monkeypatch.setattr("quorumark.node.journal.Journal.check_share", ours)
    with pytest.raises(KeyError, match="no field of any message"):
        node.handle("join", offer, vectors)
    with pytest.raises(RoundError, match=r"the signer failed \(KeyError\): its log has the rest"):
        SignerClient(signers / "1.sock").handle("join", offer, vectors)
    assert "no field of any message" in capfd.readouterr().err


def test_a_server_cannot_say_what_a_member_has_trained(world: Consortium) -> None:
    """If it could, for all but one, the sum would show that one's model: joining and being ready are the node's own."""
    assert world.manifest is not None
    offer, arrays = RoundServer(world.manifest, world.layout, world.model, run="7").offer(world.model)
    model = {MODEL + name: tensor for name, tensor in world.model.items()}
    known = {RESULT + name: tensor for name, tensor in world.model.items()}
    grid = LocalGrid(app_for(world.folder), 5)

    def told(stage: str, vectors: dict[str, Any], kind: str = "train") -> str:
        content = RecordDict(records({**offer, "examples": 102, "node": "102", "stage": stage}, vectors))
        [reply] = grid.send_and_receive([Message(content, 102, kind)])
        return str(reply.content["quorumark"].get("refused"))

    assert "there is no stage 'join'" in told("join", {**arrays, **model})
    MemberNode(*world.home(2)).handle("join", offer, {**arrays, **model})  # as its node does
    assert "there is no stage 'ready'" in told("ready", known)
    assert "not a query" in told("ready", known, "query.quorumark")
    for stage in ("setup", "answer", "sign"):  # for an app that serves queries
        assert f"there is no stage {stage!r}" in told(stage, {})
    assert not list(world.folder.rglob("result.sealed"))


@pytest.mark.parametrize("checked", [False, True])
def test_a_server_that_lies_about_the_model_reads_the_key_unless_sums_are_checked(
    tmp_path: Path, checked: bool
) -> None:
    """docs/threat-model.md, "The server that trains": members train honestly, on data of their own, and the server
    tells them all the same: a history that never was, and a model most of whose units are dead for inputs that are not
    negative. What did not move shows S ⊙ τ. Two such rounds give the whole key. Where sums are checked nobody
    uploads."""
    from quorumark.research.known import KnownKey
    from quorumark.round.movement import norm_count

    units, rng = 48, np.random.default_rng(3)
    true = {
        "a.weight": (rng.standard_normal((units, 64)) / 8).astype(np.float32),
        "b.weight": (rng.standard_normal((10, units)) / 8).astype(np.float32),
    }
    policy = {"sums": "checked" if checked else "unchecked"}
    world = Consortium.make(tmp_path, model=true, strength={"dither": "0"}, policy=policy)
    assert world.manifest is not None
    nodes = {x: MemberNode(*world.home(x)) for x in range(1, 6)}
    guess = {name: np.zeros(tensor.shape) for name, tensor in true.items()}
    for after, alive in ((3, slice(0, 12)), (6, slice(12, 24))):
        dead = np.delete(np.arange(units), alive)
        chosen = {**true, "a.weight": true["a.weight"].copy()}
        chosen["a.weight"][dead] = -np.abs(chosen["a.weight"][dead])
        server = RoundServer(world.manifest, world.layout, true, run=f"run {after}", after=after)
        norms = np.full(norm_count(world.layout), 1 << 40, np.uint64)
        for number in range(1, after + 1):
            noise = {n: rng.standard_normal(t.shape).astype(np.float32) for n, t in chosen.items()}
            near = {n: t + np.float32(1e-4) * noise[n] for n, t in chosen.items()}
            server.history.accept(number, world.layout.encode(chosen if number == after else near), None, norms)
        offer, arrays = server.offer(chosen)
        told = {**arrays, "anchor": server.anchor, **{MODEL + name: tensor for name, tensor in chosen.items()}}
        for x, node in nodes.items():
            reply, _ = node.handle("join", offer, told)
            result = {RESULT + name: tensor for name, tensor in _two_layers(chosen, x).items()}
            about = {**offer, "examples": 100 + x, "node": "1", "joined": reply["joined"]}
            ready, _ = node.handle("ready", about, result)
            server.take_ready(x, ready["ready"], ready.get("boxes", b""), ready.get("vouch", b""))
        server.announce()
        for x, node in nodes.items():
            if checked:
                with pytest.raises(RoundError, match="and only nobody did"):
                    node.handle("upload", server.asked(x), {})
                continue
            head, vector = node.handle("upload", server.asked(x), {})
            server.take_upload(x, head["head"], vector["vector"])
        if checked:
            continue
        for x, node in nodes.items():
            server.take_answer(x, node.handle("unmask", {"request": server.request(x)}, {})[0]["answer"])
        opened = server.finish()
        guess["a.weight"][dead] = np.sign(opened["a.weight"] - chosen["a.weight"])[dead]
        guess["b.weight"][:, dead] = np.sign(opened["b.weight"] - chosen["b.weight"])[:, dead]
    if checked:
        return
    shares = {
        x: home.only_consortium().share(unlock).vector() for x, (home, unlock) in enumerate(map(world.home, nodes), 1)
    }
    known = KnownKey.from_shares(world.manifest, shares, world.layout, Reference.read(world.path).anchor)
    for spec, place in world.layout.spans("carrier"):
        assert (guess[spec.name].reshape(-1) == known.key[place]).all()


def _two_layers(model: Model, point: int) -> Model:
    """Plain gradient descent on a member's own data, inputs from 0 to 1: softmax(b·relu(a·x))."""
    rng = np.random.default_rng(1000 + point)
    labels = rng.integers(0, 10, 600)
    data = np.clip(np.random.default_rng(4).random((10, 64))[labels] + 0.3 * rng.standard_normal((600, 64)), 0, 1)
    a, b = model["a.weight"].astype(np.float64), model["b.weight"].astype(np.float64)
    for _ in range(40):
        some = rng.integers(0, 600, 32)
        before = data[some] @ a.T
        hidden = np.maximum(before, 0)
        odds = np.exp(hidden @ b.T)
        error = (odds / odds.sum(1, keepdims=True) - np.eye(10)[labels[some]]) / 32
        a, b = a - 0.05 * ((error @ b) * (before > 0)).T @ data[some], b - 0.05 * error.T @ hidden
    return {"a.weight": a.astype(np.float32), "b.weight": b.astype(np.float32)}


def test_a_node_gives_a_plain_strategy_nothing(world: Consortium) -> None:
    """With the mod in the app and no wrapper at the server the models would be sent as they are."""
    grid = LocalGrid(app_for(world.folder), 5)
    content = RecordDict({"arrays": records_of(world.model), "config": ConfigRecord({"server-round": 1})})
    grid.send_and_receive([Message(content, 101, "train")])
    reply = grid.seen[-1]
    assert not reply.content.array_records
    assert "quorumark.flower.watermarked" in reply.content["quorumark"]["refused"]


def test_a_node_without_the_mod_and_a_stranger_are_left_out(world: Consortium) -> None:
    from flwr.clientapp import ClientApp

    bare = ClientApp()

    @bare.train()  # type: ignore[untyped-decorator]
    def step(message: Any, context: Any) -> Any:  # noqa: ARG001
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    grid = LocalGrid(app_for(world.folder), 6)  # the sixth has no home
    grid.apps[102] = bare
    wrapped, _ = run(world, grid, 1)
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert "mods" in wrapped.reports[0].excluded[-102]
    assert -106 in wrapped.reports[0].excluded


def test_nobody_passes_for_another_member(world: Consortium) -> None:
    """A node that shows another member's introduction and key is left out, and the member is not."""
    app = app_for(world.folder)
    grid = LocalGrid(app, 5)
    copied: list[Any] = []

    def thief(message: Any, context: Any) -> Any:
        if copied:
            return Message(copied[0], reply_to=message)
        return app(message, context)

    def honest(message: Any, context: Any) -> Any:
        training = message.content["quorumark"]["stage"] == "train"
        reply = app(message, context)
        if training:
            copied.append(reply.content)
        return reply

    grid.apps = {101: honest, 102: thief, 103: app, 104: app, 105: app}
    wrapped = watermarked(
        InOrder(min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0), world.path, seed=SEED
    )
    wrapped.start(grid=grid, initial_arrays=records_of(world.model), num_rounds=1)
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert "introduction of another node" in wrapped.reports[0].excluded[-102]


def test_a_member_that_runs_twice_is_in_once(world: Consortium) -> None:
    """A home was copied, and both machines are up: the second would put another model under the same masks."""
    shutil.copytree(world.folder / "member-1", world.folder / "member-6")
    shutil.copy(world.folder / "member-1.key", world.folder / "member-6.key")
    grid = LocalGrid(app_for(world.folder, examples=lambda x: 101 if x == 6 else 100 + x), 6)
    ordered = InOrder(min_train_nodes=6, min_available_nodes=6, fraction_evaluate=0.0)
    wrapped, model = run(world, grid, 1, ordered)
    assert wrapped.reports[0].members == (1, 2, 3, 4, 5)
    assert wrapped.reports[0].excluded == {-106: "'Hospital 1' runs two nodes: stop one"}
    assert same(model, world.in_process(1, SEED).model)


class InOrder(strategies.FedAvg):  # type: ignore[misc]
    """Sends to the nodes in their order, so that a test knows who comes first."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        messages = super().configure_train(server_round, arrays, config, grid)
        return sorted(messages, key=lambda message: message.metadata.dst_node_id)


def test_a_false_history_is_refused(world: Consortium) -> None:
    """A server that tells a member another history of the same run than it has seen."""
    from quorumark.round.movement import norm_count

    grid = LocalGrid(app_for(world.folder), 5)
    run(world, grid, 2)
    assert world.manifest is not None
    liar = RoundServer(world.manifest, world.layout, world.model, run="7", after=2)
    offer, arrays = liar.offer(world.model)
    home, unlock = world.home(1)
    other = train(world.model, 0.01, 1, 1.0)
    changed = copy.deepcopy(liar)
    changed.history.accept(1, world.layout.encode(other), None, np.ones(norm_count(world.layout), np.uint64))
    made_up, state = changed.offer(other)
    with pytest.raises(RoundError, match="not the one that 'Hospital 1' has seen"):
        MemberNode(home, unlock).handle("join", made_up, {**state, **{MODEL + n: t for n, t in other.items()}})
    # nor does it begin anew
    model = {MODEL + name: tensor for name, tensor in world.model.items()}
    with pytest.raises(RoundError, match="has gone on from this model"):
        MemberNode(home, unlock).handle("join", {**offer, "node": "101"}, {**arrays, **model})
    with pytest.raises(MessageError, match="lacks 'round'"):
        MemberNode(home, unlock).handle("join", {"manifest": offer["manifest"]}, {})


def test_without_a_memory_of_rounds_nobody_takes_part(world: Consortium, tmp_path: Path) -> None:
    home, unlock = world.home(1)
    place = home.only_consortium()
    (place.path / "rounds" / "memory" / "rounds.sealed").unlink()
    wrapped, _ = run(world, LocalGrid(app_for(world.folder), 5), 1, folder=tmp_path / "server")
    assert "quorumark member rounds --new" in wrapped.reports[0].excluded[-101]
    create_memory(place, home.identity(unlock), 1)
    again, _ = run(world, LocalGrid(app_for(world.folder), 5, run_id=8), 2, folder=tmp_path / "server")
    assert again.reports[0].members == (1, 2, 3, 4, 5)


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


# --- the ceremony and verification ------------------------------------------------------------------------


def allow(world: Consortium, x: int) -> None:
    rules = {"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 5}
    write_private(world.home(x)[0].rules_path, canonical(rules))


def test_a_key_is_made_a_model_trained_and_verified(tmp_path: Path) -> None:
    """All of it over Flower's messages: three whose policies allow it prove that the model is theirs, two cannot."""
    strength = {"rule": "rho", "rho": "0.25", "c_max": "0.25", "lr": "constant", "dither": "0"}
    world = Consortium.agree(tmp_path, strength=strength)
    pinned = world.terms.digest().hex()
    grid = LocalGrid(app_for(tmp_path, pinned=pinned), 5)
    steps: list[str] = []
    manifest = make_key(grid, world.terms, note=steps.append)
    world.keep(manifest)
    assert manifest.terms == world.terms
    assert len({home.only_consortium().share(unlock).root() for home, unlock in map(world.home, range(1, 6))}) == 5
    assert not list(tmp_path.glob("member-*/ceremonies/*"))
    _, model = run(world, grid, 10)
    suspect = tmp_path / "suspect.safetensors"
    write_safetensors(model, suspect)
    reference, anchor = Reference.read(world.path), tmp_path / "anchor.safetensors"
    said: list[str] = []
    allow(world, 1)
    allow(world, 2)
    with pytest.raises(EvidenceError, match="2 members answered, and 3 must"):
        verify_model(grid, reference, suspect, anchor=anchor, note=said.append)
    assert len([text for text in said if "nobody has approved" in text]) == 3
    allow(world, 4)
    certificate = verify_model(grid, reference, suspect, anchor=anchor)
    assert certificate.finding.verdict == "PASSED"
    assert {member.point for member in certificate.signers(manifest)} == {1, 2, 4}
    check_certificate(certificate, reference.chain, suspect=suspect, reference=reference)
    strange = tmp_path / "strange.safetensors"
    write_safetensors(train(world.model, 0.05, 99, 1.0), strange)
    assert verify_model(grid, reference, strange, anchor=anchor).finding.verdict == "FAILED"


def test_after_an_audit_a_model_is_verified_with_its_proof(tmp_path: Path) -> None:
    """Members 1 to 3 opened leaves by command line; over Flower's messages 4 and 5 take the proof with the query."""
    owners = make_world(tmp_path, rho=0.35)
    done = audit(owners, owners.suspect, (1, 2, 3))
    proof = done.proof(owners, (1, 2, 3))
    rules = {"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 9}
    for home, _ in owners.homes:
        write_private(home.rules_path, canonical(rules))
    grid = LocalGrid(
        app_for(tmp_path, find=lambda context: MemberNode(*owners.homes[int(context.node_config["partition-id"])])), 5
    )
    anchor, said = tmp_path / "anchor.safetensors", list[str]()
    with pytest.raises(EvidenceError, match="2 members answered, and 3 must"):
        # those who opened refuse to answer about what is public; the others have answered the very same query before
        verify_model(grid, owners.reference, owners.suspect, anchor=anchor, note=said.append)
    assert len([text for text in said if "does not leave out the leaves" in text]) == 3
    certificate = verify_model(grid, owners.reference, owners.suspect, anchor=anchor, audits=[proof])
    assert certificate.finding.verdict == "PASSED"
    assert certificate.finding.audits == {proof.name: done.challenge.leaves}
    assert len(certificate.signers(owners.manifest)) == 5


def test_a_signature_of_something_else_is_not_taken(world: Consortium) -> None:
    """Hospital 2 signs the certificate with another date: a signature that holds, but not of what the others signed."""
    suspect = world.folder / "suspect.safetensors"
    write_safetensors(train(world.model, 0.05, 99, 1.0), suspect)
    for x in (1, 2, 3):
        allow(world, x)

    class Elsewhere:
        def __init__(self, context: Any) -> None:
            self.x = int(context.node_config["partition-id"]) + 1

        def handle(self, stage: str, config: Any, arrays: Any) -> Any:
            if (stage, self.x) != ("sign", 2):
                return MemberNode(*world.home(self.x)).handle(stage, config, arrays)
            home, unlock = world.home(2)
            finding = replace(Certificate.from_bytes(config["certificate"]).finding, created="2026-02-01T00:00:00Z")
            return {"certificate": Certificate.of(finding).signed_by(home.identity(unlock)).to_bytes()}, {}

    said: list[str] = []
    reference, anchor = Reference.read(world.path), world.folder / "anchor.safetensors"
    grid = LocalGrid(app_for(world.folder, find=Elsewhere), 3)
    certificate = verify_model(grid, reference, suspect, anchor=anchor, note=said.append)
    assert said == ["node 102: it signed something else"]
    assert {member.point for member in certificate.signers(reference.manifest)} == {1, 3}


def test_terms_that_were_not_pinned_are_refused(tmp_path: Path) -> None:
    world = Consortium.agree(tmp_path)
    with pytest.raises(CeremonyError, match="has pinned no terms"):
        make_key(LocalGrid(app_for(tmp_path), 5), world.terms, timeout=1)
    with pytest.raises(CeremonyError, match="compare them"):
        make_key(LocalGrid(app_for(tmp_path, pinned="00" * 32), 5), world.terms, timeout=1)
    with pytest.raises(CeremonyError, match="needs all members, and Hospital 5"):
        make_key(LocalGrid(app_for(tmp_path, pinned=world.terms.digest().hex()), 4), world.terms, timeout=1)


def test_a_ceremony_goes_on_where_a_reply_was_lost(tmp_path: Path) -> None:
    """Every reply of a member once, as an error or as silence, and then many at random: members show the same again."""
    world = Consortium.agree(tmp_path)
    app = app_for(tmp_path, pinned=world.terms.digest().hex())
    rng, counts = np.random.default_rng(8), {103: 0, 104: 0}
    said: dict[tuple[int, str], bytes] = {}

    def shaky(message: Any, context: Any) -> Any:
        reply = app(message, context)
        assert "refused" not in reply.content["quorumark"]
        for record in reply.content.array_records.values():
            for name, array in record.items():  # never a second message for the same step
                assert said.setdefault((context.node_id, name), array.data) == array.data
        if context.node_id in counts:
            counts[context.node_id] += 1
            if counts[context.node_id] % 2:  # each of its replies once
                if context.node_id == 103:
                    raise OSError("the reply got lost")
                return None
        elif rng.random() < 0.2:
            raise OSError("the reply got lost")
        return reply

    notes: list[str] = []
    manifest = make_key(LocalGrid(shaky, 5), world.terms, timeout=1, stage_timeout=0.2, note=notes.append)
    assert min(counts.values()) >= 20  # ten turns, each at least twice
    assert any("no reply in" in text for text in notes)
    assert any("OSError" in text for text in notes)
    places = [home.only_consortium().verify_share(unlock) for home, unlock in map(world.home, range(1, 6))]
    assert {place.info.session for place in places} == {manifest.genesis.session}
    assert not list(tmp_path.glob("member-*/ceremonies/*"))


def test_a_member_that_hears_a_message_twice_says_the_same_twice(tmp_path: Path) -> None:
    world = Consortium.agree(tmp_path)
    app = app_for(tmp_path, pinned=world.terms.digest().hex())

    def twice(message: Any, context: Any) -> Any:
        first = app(copy.deepcopy(message), context)
        again = app(message, context)
        assert first.content == again.content
        return again

    assert make_key(LocalGrid(twice, 5), world.terms, timeout=1).terms == world.terms


def test_a_server_cannot_fill_a_members_disk(tmp_path: Path) -> None:
    """Messages of other steps, senders and sizes than the terms allow, and sessions without end."""
    world = Consortium.agree(tmp_path)
    home, unlock = world.home(1)
    node = MemberNode(home, unlock, terms=world.terms.digest().hex())
    terms = np.frombuffer(world.terms.to_bytes(), np.uint8)
    config = {"run": "1", "node": "1"}

    def send(session: int, **messages: int) -> None:
        arrays = {f"message:{name}": np.zeros(size, np.uint8) for name, size in messages.items()}
        node.handle("setup", {**config, "session": f"{session:032x}"}, {"terms": terms, **arrays})

    def kept() -> int:
        return sum(path.stat().st_size for path in (home.path / "ceremonies").rglob("*") if path.is_file())

    send(0)
    own = kept()
    assert 0 < own < 1000  # its commitment
    long = 8 * world.terms.coordinates + (1 << 13)
    for name, size in [
        ("1-commit/2.msg", 1 << 20),
        ("1-commit/2.msg", (1 << 13) + 1),
        ("3-deal/2-to-1.msg", long + 1),
        ("4-open/2.msg", long + 1),
        ("99-junk/2.msg", 1),
        ("2-commit/2.msg", 1),
        ("1-commit/6.msg", 1),
        ("1-commit/02.msg", 1),
        ("1-commit/1.msg", 1),
        ("1-commit/2-to-1.msg", 1),
        ("3-deal/2.msg", 1),
        ("3-deal/2-to-3.msg", 1),
    ]:
        with pytest.raises(MessageError, match="the server sends"):
            send(0, **{"1-commit/3.msg": 10, name: size})
        assert kept() == own  # nothing is kept of a turn that is refused
    for session in range(30):
        send(session, **{"8-health/2.msg": 1 << 13})
    assert kept() == own + (1 << 13)
    assert len(list((home.path / "ceremonies").iterdir())) == 1
    # all that it may ever send: nine steps of four members, of which deal and open are long
    everything = expected_messages(world.terms, 1)
    assert len(everything) == 9 * 4
    assert sum(everything.values()) == 36 * (1 << 13) + 8 * 8 * world.terms.coordinates


class Relay:
    """A server of a ceremony that does as it likes: every member in sessions of its own, with whose messages it wants.

    `said` has all that members ever sent, by name.
    """

    def __init__(self, world: Consortium) -> None:
        pinned = world.terms.digest().hex()
        self.nodes = {x: MemberNode(*world.home(x), terms=pinned) for x in range(1, world.count + 1)}
        self.said: dict[str, list[bytes]] = {}
        self._terms = np.frombuffer(world.terms.to_bytes(), np.uint8)

    def turn(self, x: int, session: str, messages: dict[str, bytes] | None = None) -> dict[str, Any]:
        """One message to a member, and its reply. By default it hears the last thing that everybody said."""
        if messages is None:
            messages = {name: said[-1] for name, said in self.said.items()}
        heard = {n: m for n, m in messages.items() if _sender(n) != x and _recipient(n) in (0, x)}
        arrays = {f"message:{name}": np.frombuffer(message, np.uint8) for name, message in heard.items()}
        config = {"session": session, "run": "7", "node": "1"}
        told, found = self.nodes[x].handle("setup", config, {"terms": self._terms, **arrays})
        for name, array in found.items():
            self.said.setdefault(name.removeprefix("message:"), []).append(array.tobytes())
        return told


def _sender(name: str) -> int:
    return int(name.partition("/")[2].partition("-to-")[0].removesuffix(".msg"))


def _recipient(name: str) -> int:
    return int(name.partition("-to-")[2].removesuffix(".msg") or 0)


def test_a_server_that_asks_again_in_other_sessions_hears_nothing_else(tmp_path: Path) -> None:
    """It empties the members' folders by naming other sessions, and shows them all messages, or those of some."""
    world = Consortium.agree(tmp_path)
    relay = Relay(world)
    done: set[int] = set()
    for turn in range(20):
        for x in relay.nodes:
            relay.turn(x, f"{turn:031x}0", {n: said[0] for n, said in relay.said.items() if _sender(n) != 1 + x % 5})
            relay.turn(x, "f" * 32, {n: said[0] for n, said in relay.said.items() if _sender(n) > 2})
            if "manifest" in relay.turn(x, f"{turn:031x}1"):
                done.add(x)
    assert done == set(relay.nodes)
    assert len(relay.said) == 8 * 5 + 5 * 4  # eight steps to everybody, one to each other member
    assert all(len(said) > 2 for name, said in relay.said.items() if name < "8")  # who has signed soon forgets
    for name, said in relay.said.items():
        # dealings are sealed anew each time; had one held something else, the member that heard both had refused
        assert (len(set(said)) == 1) == (not _recipient(name)), name
    for home, unlock in map(world.home, relay.nodes):
        home.only_consortium().verify_share(unlock)


def test_a_server_that_asks_for_the_ceremony_once_more_makes_nobody_forget_rounds(tmp_path: Path) -> None:
    """A turn of a ceremony that is long over must not make a new memory of rounds, neither after an amendment nor after
    a loss: the same round would be summed twice."""
    world = Consortium.make(tmp_path)
    assert world.manifest is not None
    relay = Relay(world)
    model = {MODEL + name: tensor for name, tensor in world.model.items()}
    result = {RESULT + name: tensor for name, tensor in train(world.model, 0.01, 1, 1.0).items()}

    def ask(stage: str, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Of the others: they answer nothing more under the manifest before."""
        return {x: relay.nodes[x].handle(stage, {**config, "run": "7", "node": "1"}, {})[0] for x in (2, 3, 4, 5)}

    def join(*manifests: Manifest, after: int) -> None:
        *earlier, manifest = manifests
        server = RoundServer(manifest, world.layout, world.model, run="7", after=after, earlier=tuple(earlier))
        server.prepare(ask, world.model)
        offer, arrays = server.offer(world.model)
        reply, _ = relay.nodes[1].handle("join", {**offer, "node": "1"}, {**arrays, **model})
        about = {**offer, "examples": 101, "node": "1", "joined": reply["joined"]}
        relay.nodes[1].handle("ready", about, result)

    join(world.manifest, after=4)
    terms = propose(world.manifest.terms, examples={2: 90})
    for x in (*relay.nodes, *relay.nodes):  # all sign, then all take the manifest
        home, unlock = world.home(x)
        amended, _ = amend(home, unlock, terms, tmp_path / "amendment", home.only_consortium())
    assert "manifest" in relay.turn(1, "0" * 32)
    for after in (0, 4):
        with pytest.raises(
            RoundError, match=f"round {after + 1} is over for 'Hospital 1', which last took part in round"
        ):
            join(world.manifest, amended, after=after)
    join(world.manifest, amended, after=5)
    # one whose memory is gone waits for its operator
    shutil.rmtree(world.home(1)[0].only_consortium().path / "rounds")
    assert "manifest" in relay.turn(1, "1" * 32)
    with pytest.raises(KeystoreError, match="has no memory of rounds: if it never took part in any"):
        join(world.manifest, amended, after=6)


@pytest.mark.parametrize("session", ["0" * 32, "1" * 32])
def test_a_server_and_a_member_cannot_make_another_confirm_two_sums(tmp_path: Path, session: str) -> None:
    """Member 2 signs two openings, and the server shows both to member 1: one after the other, in the same session or
    in another. With two sums confirmed, members would go on with different squares: their shares show in the check."""
    world = Consortium.agree(tmp_path)
    relay = Relay(world)

    def without_confirms() -> dict[str, bytes]:
        return {name: said[-1] for name, said in relay.said.items() if not name.startswith("5-confirm/")}

    while "5-confirm/1.msg" not in relay.said:
        for x in relay.nodes:
            relay.turn(x, "0" * 32, without_confirms())
    data = relay.said["4-open/2.msg"][0]
    head = json.loads(data[4 : 4 + int.from_bytes(data[:4], "big")])
    header = Header(*(head[field] for field in ("consortium", "session", "step", "sender")))
    vector = np.frombuffer(open_message(data, world.terms, header), np.uint64).copy()
    vector[0] = (int(vector[0]) + 3) % P
    home, unlock = world.home(2)
    other = without_confirms() | {"4-open/2.msg": home.identity(unlock).write(header, vector.tobytes())}
    with pytest.raises(MessageError, match="'Hospital 2' says something else for step 'dkg/open'"):
        relay.turn(1, session, other)
    assert len(set(relay.said["5-confirm/1.msg"])) == 1
    for _ in range(20):  # nothing is lost: with what it heard first it goes on
        told = [relay.turn(x, "0" * 32) for x in relay.nodes]
    assert all("manifest" in one for one in told)


def test_a_member_that_stays_silent_stops_the_ceremony_and_a_new_run_goes_on_with_it(tmp_path: Path) -> None:
    """Nothing is lost: the members go on with what they have, under the next run's messages."""
    world = Consortium.agree(tmp_path)
    app = app_for(tmp_path, pinned=world.terms.digest().hex())
    grid, calls = LocalGrid(app, 5), list[int]()

    def dying(message: Any, context: Any) -> Any:
        calls.append(1)
        if len(calls) > 6:
            raise OSError("the power went out")
        return app(message, context)

    grid.apps[103] = dying
    with pytest.raises(CeremonyError, match=r"the ceremony stopped\. Hospital 3: its node failed"):
        make_key(grid, world.terms, timeout=1)
    assert len(calls) == 6 + 4
    manifest = make_key(LocalGrid(app, 5, run_id=8), world.terms, timeout=1)
    roots = [home.only_consortium().verify_share(unlock).root() for home, unlock in map(world.home, range(1, 6))]
    assert len(set(roots)) == 5
    assert make_key(LocalGrid(app, 5, run_id=9), world.terms, timeout=1) == manifest  # it stands


def test_a_ceremony_that_some_have_finished_and_whose_messages_are_gone(tmp_path: Path) -> None:
    """The one case that asking again cannot mend: said, with what to do."""
    world = Consortium.agree(tmp_path)
    app = app_for(tmp_path, pinned=world.terms.digest().hex())
    grid, calls = LocalGrid(app, 5), list[int]()

    def dying(message: Any, context: Any) -> Any:
        calls.append(1)
        if len(calls) > 9:  # the others get all signatures in the tenth turn, and finish
            raise OSError("the power went out")
        return app(message, context)

    grid.apps[103] = dying
    with pytest.raises(CeremonyError, match="Hospital 3"):
        make_key(grid, world.terms, timeout=1)
    assert world.home(1)[0].only_consortium().manifest_path.exists()
    assert not world.home(3)[0].only_consortium().manifest_path.exists()
    with pytest.raises(CeremonyError, match=r"Hospital 3 waits for .*agree on terms with another date"):
        make_key(LocalGrid(app, 5, run_id=8), world.terms, timeout=1)


# --- the signer -------------------------------------------------------------------------------------------


@pytest.fixture
def signers(world: Consortium) -> Iterator[Path]:
    """A process of another user in a deployment; a thread here."""
    folder = world.folder / "sockets"
    folder.mkdir()
    servers = [SignerServer(MemberNode(*world.home(x), seeds=True), folder / f"{x}.sock") for x in range(1, 6)]
    threads = [threading.Thread(target=server.serve) for server in servers]
    for thread in threads:
        thread.start()
    yield folder
    for server, thread in zip(servers, threads, strict=True):
        server.stop()
        thread.join()
    assert not list(folder.iterdir())


def test_a_share_behind_a_socket(world: Consortium, signers: Path) -> None:
    """The node's own process has neither home nor key; the model is the same."""
    for x in range(1, 6):
        assert (signers / f"{x}.sock").stat().st_mode & 0o777 == 0o660
    grid = LocalGrid(
        app_for(world.folder, find=lambda c: SignerClient(signers / f"{c.node_config['partition-id'] + 1}.sock")), 5
    )
    _, model = run(world, grid, 3)
    assert same(model, world.in_process(3, SEED).model)
    client = SignerClient(signers / "1.sock")
    with pytest.raises(RoundError, match="there is no stage 'reveal'"):
        client.handle("reveal", {}, {})
    with pytest.raises(KeystoreError, match="quorumark member serve"):
        SignerClient(signers / "none.sock").handle("join", {}, {})


def _tell(path: Path, *pieces: bytes) -> tuple[str, int]:
    """What a signer says to these bytes, and the most memory that it took for them."""
    tracemalloc.start()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(20)
            connection.connect(str(path))
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return reply.decode("utf-8", "replace"), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _head(stage: str, *arrays: Any) -> bytes:
    head = json.dumps({"config": {"stage": stage}, "arrays": arrays}, separators=(",", ":")).encode()
    return len(head).to_bytes(8, "big") + head


def test_a_signer_takes_memory_for_what_has_come_only(world: Consortium, signers: Path) -> None:
    path = signers / "1.sock"
    few = _head("join", ["a", "uint8", [1 << 29]])
    assert len(few) < 80
    said, peak = _tell(path, few)
    assert "ended in the middle of a message" in said
    assert peak < 1 << 23
    said, peak = _tell(path, (1 << 26).to_bytes(8, "big"), b"{")
    assert "ended in the middle" in said
    assert peak < 1 << 23
    said, peak = _tell(path, few, bytes(1 << 22))  # of what has come at most twice as much, and one copy
    assert "ended in the middle" in said
    assert 1 << 22 < peak < 1 << 25
    for stage in ("upload", "unmask", "sign"):
        assert "has more than 0 bytes" in _tell(path, _head(stage, ["a", "uint8", [1]]))[0]
    run(world, LocalGrid(app_for(world.folder), 5), 1)  # the layout is known now
    size = 64 * world.layout.size + (1 << 26)
    assert (
        f"'join' has more than {size} bytes"
        in _tell(path, _head("join", ["a", "uint8", [size]], ["b", "bool", [1]]))[0]
    )
    assert "ended in the middle" in _tell(path, _head("join", ["a", "uint8", [size]]))[0]
    for bad in (["a", "uint8", [1] * 99], ["a", "uint8", [-1]], ["a", "object", [1]]):
        assert "of an unknown" in _tell(path, _head("answer", bad), b"1")[0]
    for head in (b"[" * 100_000, b'{"config":{},"arrays":[["a","bool",[Infinity]]]}', b"\xff"):
        assert "a head that cannot be read" in _tell(path, len(head).to_bytes(8, "big"), head)[0]
    assert "a head that is too long" in _tell(path, b"\xff" * 8)[0]


def test_the_commands_for_a_signer(world: Consortium, environment: dict[str, str]) -> None:
    """`member rounds` once; `member serve` until it is told to stop."""
    home, _ = world.home(1)
    options = ["--home", str(home.path), "--key-file", str(world.folder / "member-1.key")]
    command = [sys.executable, "-m", "quorumark", "member"]
    again = subprocess.run([*command, "rounds", "--new", *options], env=environment, capture_output=True, text=True)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    path = world.folder / "s.sock"
    serving = subprocess.Popen(
        [*command, "serve", "--socket", str(path), *options], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        assert "Hospital 1 is served" in serving.stdout.readline()
        with pytest.raises(RoundError, match="lacks 'manifest'"):
            SignerClient(path).handle("join", {}, {})
        for more, text in [
            (options, "another process serves at"),
            ([*options[:3], str(world.folder / "member-2.key")], "the passphrase or key file is wrong"),
            ([*options, "--manifest", "abc"], "--manifest must be a digest of 64 hex digits"),
        ]:
            refused = subprocess.run(
                [*command, "serve", "--socket", str(path), *more], env=environment, capture_output=True, text=True
            )
            assert refused.returncode == 2
            assert text in refused.stderr
        with pytest.raises(RoundError, match="lacks 'manifest'"):  # the first one still serves
            SignerClient(path).handle("join", {}, {})
    finally:
        serving.terminate()
        assert serving.wait(20) == 0
    assert not path.exists()


# --- small things -----------------------------------------------------------------------------------------


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


def test_a_node_config_names_the_member(world: Consortium) -> None:
    from types import SimpleNamespace

    from quorumark.flower.client import member_of

    folder = str(world.folder)
    home = {"quorumark-home": f"{folder}/member-1"}
    named = SimpleNamespace(node_config={**home, "quorumark-key-file": f"{folder}/member-1.key"}, run_config={})
    assert "member-1" in repr(member_of(named))
    with pytest.raises(InputError, match="quorumark-key-file"):
        member_of(SimpleNamespace(node_config=home, run_config={}))
    with pytest.raises(InputError, match="quorumark-home"):
        member_of(SimpleNamespace(node_config={}, run_config={}))
    homes = SimpleNamespace(node_config={"partition-id": 1}, run_config={"quorumark-homes": folder})
    assert "member-2" in repr(member_of(homes))
    assert isinstance(
        member_of(SimpleNamespace(node_config={"quorumark-socket": "/run/q.sock"}, run_config={})), SignerClient
    )
    pinned = MemberNode(HomeFolder(f"{folder}/member-1"), Unlock.key_file(f"{folder}/member-1.key"), manifest="00" * 32)
    with pytest.raises(RecordError, match="its operator pinned"):
        pinned.handle("unmask", {"request": b""}, {})
