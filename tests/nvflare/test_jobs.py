"""What a job becomes: its own script and executor, our controller and filters, and no copy of this package."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the extra 'nvflare' is not installed")

from nvflare.app_common.workflows.cyclic import Cyclic
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.client.config import ExchangeFormat

from quorumark.consortium.optimiser import Optimiser
from quorumark.errors import InputError
from quorumark.nvflare import key_ceremony, secure, verification, watermarked
from quorumark.nvflare.controller import QuorumarkController
from quorumark.nvflare.optimisers import check_named
from tests.kit.flare_runs import ADAM, FEDADAM, SCRIPT, training_job
from tests.kit.flowers import Consortium
from tests.kit.refusals import stopped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return Consortium.make(tmp_path_factory.mktemp("world"))


def exported(job: Any, folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The job's folder, its meta, and the configs of server and sites."""
    job.export_job(str(folder))
    place = folder / str(job.name)
    config = place / "app" / "config"
    read = (place / "meta.json", config / "config_fed_server.json", config / "config_fed_client.json")
    meta, server, client = (json.loads(path.read_text()) for path in read)
    return place, meta, server, client


def test_a_watermarked_job_has_one_controller_and_three_parts_at_the_sites(world: Consortium, tmp_path: Path) -> None:
    job = training_job()
    job.to_server(FedAvg(num_clients=5, num_rounds=7, task_name="train", persistor_id="kept"))
    assert watermarked(job, world.path, patience=3.0) is job
    place, meta, server, client = exported(job, tmp_path)
    assert meta["min_clients"] == 4  # T of K = 5, t = 3
    (workflow,) = server["workflows"]
    assert workflow["path"] == "quorumark.nvflare.controller.QuorumarkController"
    said = {"consortium": str(world.path), "num_rounds": 7, "persistor_id": "kept", "patience": 3.0}
    assert workflow["args"] == said
    assert server["server"]["task_request_interval"] == 0.5
    executors = {tuple(one["tasks"]): one["executor"]["path"].rpartition(".")[2] for one in client["executors"]}
    assert executors == {("train",): "ClientAPIExecutor", ("quorumark",): "QuorumarkExecutor"}
    for name, filters in (("task_data_filters", ["JoinRound"]), ("task_result_filters", ["KeepResult"])):
        (entry,) = client[name]
        assert entry["tasks"] == ["train"]
        assert [one["path"].rpartition(".")[2] for one in entry["filters"]] == filters
    brought = [path.relative_to(place / "app" / "custom") for path in (place / "app" / "custom").rglob("*.py")]
    assert not [path for path in brought if path.parts[0] == "quorumark"]
    assert "flare_script.py" in {path.name for path in brought}


def test_recipes_of_their_own_bring_no_code(world: Consortium, tmp_path: Path) -> None:
    (tmp_path / "terms.json").write_bytes(world.terms.to_bytes())
    ceremony, query = key_ceremony(tmp_path / "terms.json"), verification(world.path, "suspect.safetensors", align=True)
    for recipe, fewest in ((ceremony, 5), (query, 3)):
        place, meta, server, _ = exported(recipe._job, tmp_path)
        assert meta["min_clients"] == fewest
        assert not (place / "app" / "custom").exists()
        made = QuorumarkController(**server["workflows"][0]["args"])  # what FLARE does at the server
        assert Path(made.consortium).is_absolute()
    assert made.queries == [{"suspect": str(Path.cwd() / "suspect.safetensors"), "align": True}]


def test_a_query_by_layers_names_its_files_and_needs_both(world: Consortium, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"after": "plain.json", "examiner": "judge.json"}
    _, _, server, _ = exported(verification(world.path, "suspect.safetensors", **asked)._job, tmp_path)
    (query,) = QuorumarkController(**server["workflows"][0]["args"]).queries or []
    assert query == {name: str(Path.cwd() / path) for name, path in {**asked, "suspect": "suspect.safetensors"}.items()}
    for name, path in asked.items():
        with pytest.raises(InputError) as caught:
            verification(world.path, "suspect.safetensors", **dict[str, Any]({name: path}))
        assert caught.value.argument == "after, examiner"


@pytest.mark.parametrize("option", ["aggregation_weights", "exclude_vars", "stop_cond"])
def test_what_needs_single_results_is_refused_by_name(world: Consortium, option: str) -> None:
    values: dict[str, Any] = {"aggregation_weights": {"site-1": 2.0}, "exclude_vars": "a.*", "stop_cond": "loss <= 1"}
    job = training_job()
    job.to_server(FedAvg(num_clients=5, num_rounds=7, **{option: values[option]}))
    with pytest.raises(InputError) as caught:
        watermarked(job, world.path)
    assert caught.value.argument == option


def test_a_recipe_that_exchanges_tensors_is_refused(world: Consortium) -> None:
    pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    import torch
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

    made = {"min_clients": 5, "model": torch.nn.Linear(2, 2), "train_script": str(SCRIPT)}
    with pytest.raises(InputError) as caught:
        watermarked(FedAvgRecipe(**made, server_expected_format=ExchangeFormat.PYTORCH), world.path)
    assert caught.value.argument == "server_expected_format"
    assert watermarked(FedAvgRecipe(**made), world.path) is not None


def test_other_controllers_and_missing_rounds_are_refused(world: Consortium) -> None:
    job = training_job()
    job.to_server(Cyclic(num_clients=5, num_rounds=2))
    with pytest.raises(InputError) as caught:
        watermarked(job, world.path)
    assert caught.value.argument == "recipe"
    with pytest.raises(InputError) as caught:
        watermarked(training_job(), world.path)
    assert caught.value.argument == "num_rounds"
    with pytest.raises(InputError):
        watermarked("job.py", world.path)


SGD = {"path": "torch.optim.SGD", "args": {"lr": 0.5, "momentum": 0.9}}
FEDAVGM = "fedavgm:server_learning_rate=0.5,server_momentum=0.9"


@pytest.fixture(scope="module")
def stepping(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Consortium]:
    """Consortia whose members agreed on an optimiser."""
    made = {}
    for text in (FEDAVGM, FEDADAM):
        folder = tmp_path_factory.mktemp("stepping")
        made[text] = Consortium.make(folder, policy={"sums": "checked", "optimiser": text})
    return made


def with_fedopt(chosen: dict[str, Any], schedule: Any = None) -> Any:
    """FedAvg's controller, with FLARE's FedOpt beside it."""
    from nvflare.app_opt.pt.fedopt import PTFedOptModelShareableGenerator

    job = training_job()
    job.to_server(FedAvg(num_clients=5, num_rounds=7))
    job.to_server(PTFedOptModelShareableGenerator(optimizer_args=chosen, lr_scheduler_args=schedule), id="generator")
    return job


def fedopt_recipe(chosen: dict[str, Any]) -> Any:
    """FLARE's own recipe, whose controller is an older one."""
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe

    model = torch.nn.Linear(2, 2)
    return FedOptRecipe(model=model, min_clients=5, num_rounds=7, train_script=str(SCRIPT), optimizer_args=chosen)


def named(refusal: Any) -> str:
    """The optimiser that a refusal says to agree on."""
    found = re.search(r"--policy optimiser=([^)]*)\)", str(refusal.value))
    assert found is not None, refusal.value
    return str(Optimiser.of(found[1]))


@pytest.mark.parametrize(("chosen", "text"), [(SGD, FEDAVGM), (ADAM, FEDADAM)], ids=["SGD", "Adam"])
def test_fedopt_is_told_what_to_agree_on(world: Consortium, chosen: dict[str, Any], text: str) -> None:
    """Its settings are read; the arithmetic is the members'."""
    for made in (with_fedopt(chosen), fedopt_recipe(chosen)):
        with stopped("round.other-optimiser") as caught:
            watermarked(made, world.path)
        assert named(caught) == text


@pytest.mark.parametrize(("chosen", "text"), [(SGD, FEDAVGM), (ADAM, FEDADAM)], ids=["SGD", "Adam"])
def test_fedopt_with_the_settings_of_the_terms_is_taken(
    stepping: dict[str, Consortium], chosen: dict[str, Any], text: str
) -> None:
    """Its own parts are gone: nothing at the server makes a step. The controller looks once more before it trains."""
    for made in (with_fedopt(chosen), fedopt_recipe(chosen)):
        assert watermarked(made, stepping[text].path) is made
        app = getattr(made, "_job", made)._deploy_map["server"].app_config
        (workflow,) = app.workflows
        assert type(workflow.controller) is QuorumarkController
        assert (workflow.controller.optimiser, workflow.controller.num_rounds) == (text, 7)
        left = {type(part).__name__ for part in (*app.components.values(), *app.handlers)}
        assert not any(word in name for name in left for word in ("FedOpt", "Aggregator", "Scatter"))


def test_fedopt_with_other_settings_than_the_terms_is_refused(stepping: dict[str, Consortium]) -> None:
    """By the recipe and, where the manifest is on another machine, by the controller."""
    for text, others in ((FEDAVGM, (ADAM, {**SGD, "args": {"lr": 0.5}})), (FEDADAM, (SGD, {**ADAM, "args": {}}))):
        for chosen in others:
            with stopped("round.other-optimiser", names="give the recipe those settings"):
                watermarked(with_fedopt(chosen), stepping[text].path)
        terms = stepping[text].terms
        with stopped("round.other-optimiser"):
            check_named(FEDADAM if text == FEDAVGM else FEDAVGM, terms)
        check_named(text, terms)
        check_named("", terms)  # the FedAvg recipe: the terms decide


@pytest.mark.parametrize(
    "chosen",
    [
        {"path": "torch.optim.SGD", "args": {"lr": 0.5, "momentum": 0.9, "nesterov": True}},
        {"path": "torch.optim.SGD", "args": {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}},
        {"path": "torch.optim.Adam", "args": {"lr": 0.01, "amsgrad": True}},
        {"path": "torch.optim.Adam", "args": {"lr": 0.01, "betas": (0.9, 0.9999)}},
        {"path": "torch.optim.Adagrad", "args": {"lr": 0.01}},  # its eps is 10^-10, which no terms have
        {"path": "torch.optim.AdamW", "args": {"lr": 0.01}},
        {"path": "mine.Adam", "args": {"lr": 0.01}},
        {"path": "tensorflow.keras.optimizers.Adagrad", "args": {"learning_rate": 0.01}},  # it begins with v = 0.1
        {"path": "torch.optim.Adam", "args": {"lr": "fast"}},
    ],
    ids=str,
)
def test_an_optimiser_that_no_terms_have_is_refused(
    world: Consortium, stepping: dict[str, Consortium], chosen: dict[str, Any]
) -> None:
    for of in (world, *stepping.values()):
        with stopped("round.other-optimiser", names=r"docs/optimisers.md does not have"):
            watermarked(with_fedopt(chosen), of.path)


def test_a_schedule_is_refused_and_plain_fedavg_is_not(world: Consortium, stepping: dict[str, Consortium]) -> None:
    schedule = {"path": "torch.optim.lr_scheduler.CosineAnnealingLR", "args": {"T_max": 3}}
    with stopped("round.other-optimiser"):
        watermarked(with_fedopt(SGD, schedule), stepping[FEDAVGM].path)
    plain = {"path": "torch.optim.SGD", "args": {"lr": 1.0}}
    assert watermarked(with_fedopt(plain), world.path) is not None


def test_a_fedopt_controller_is_told_the_same(world: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's controllers for torch and Keras are FedAvgs by class: nobody may lose the optimiser without a word."""
    from nvflare.app_opt.pt import fedopt_ctl

    if find_spec("tensorflow") is None:  # its class is FLARE's own, and needs nothing of it until it runs
        monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
    kinds = fedopt_ctl.FedOpt, import_module("nvflare.app_opt.tf.fedopt_ctl").FedOpt
    keras = {"path": "tensorflow.keras.optimizers.Adam", "args": {"learning_rate": 0.02, "beta_1": 0.8}}
    more: dict[str, Any] = {"source_model": "model"}
    cases = {
        FEDADAM: (kinds[0], ADAM, more),
        "fedadam:eta=0.02,beta_1=0.8,beta_2=0.999,tau=0.0000001": (kinds[1], keras, {}),
    }
    for text, (kind, chosen, rest) in cases.items():
        job = training_job()
        job.to_server(kind(num_clients=5, num_rounds=7, optimizer_args=chosen, lr_scheduler_args=None, **rest))
        with stopped("round.other-optimiser") as caught:
            watermarked(job, world.path)
        assert named(caught) == text
    job = training_job()
    job.to_server(kinds[0](num_clients=5, num_rounds=7, source_model="model"))  # with a schedule, as its default is
    with stopped("round.other-optimiser", names="does not have"):
        watermarked(job, world.path)


def test_a_manifest_of_the_other_kind_is_refused(world: Consortium, tmp_path: Path) -> None:
    plain = Consortium.make(tmp_path, setup="sums")
    with pytest.raises(InputError, match=r"for sums alone write secure\(recipe"):
        watermarked(training_job(), plain.path, num_rounds=2)
    with pytest.raises(InputError, match=r"with a key write watermarked\(recipe"):
        secure(training_job(), world.path, num_rounds=2)
    job = training_job()
    assert secure(job, plain.path, num_rounds=2) is job
    _, meta, server, _ = exported(job, tmp_path / "job")
    assert meta["min_clients"] == 4
    assert server["workflows"][0]["args"] == {"consortium": str(plain.path), "num_rounds": 2, "sums_alone": True}
