"""Recipes and jobs: the user's own with secure aggregation and the mark, the key ceremony, verification."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import CLASS_ALLOW_LIST
from nvflare.client.config import ExchangeFormat
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe.sim_env import SimEnv
from nvflare.recipe.spec import Recipe

from quorumark.consortium.home import read_as
from quorumark.consortium.records import Terms
from quorumark.errors import InputError
from quorumark.node.start import Start
from quorumark.nvflare.controller import QuorumarkController
from quorumark.nvflare.optimisers import check_named, is_fedopt, named_by
from quorumark.nvflare.site import JoinRound, KeepResult, QuorumarkExecutor
from quorumark.nvflare.wire import TASK
from quorumark.round.group import group_of

__all__ = ["key_ceremony", "secure", "verification", "watermarked"]

PACKAGE = "quorumark.nvflare."
"""What a site adds to the `class_allow_list` of its resources for jobs that bring no code of their own."""

_OURS = ("FedAvg",)
_AVERAGES = ("InTimeAccumulateWeightedAggregator",)
_UNUSED = {
    "aggregator": "an aggregator of its own sees single results",
    "aggregation_weights": "the manifest's numbers of examples weigh the members",
    "exclude_vars": "all weights of the agreed layout are summed",
    "stop_cond": "it stops by single sites' metrics; set num_rounds",
}
_EVERY = {"server": {"task_request_interval": 0.5}}
"""How often a site asks for its next task, in seconds: FLARE's two are long where a round has three tasks."""


def watermarked(
    recipe: Any,
    consortium: str | os.PathLike[str],
    *,
    homes: str | os.PathLike[str] = "",
    num_rounds: int = 0,
    **options: Any,
) -> Any:
    """The same recipe (or FedJob), with secure aggregation and the consortium's mark.

    `consortium` is the file of the signed manifest on the server's machine; anchor.safetensors beside it is the model
    that the run begins with, in place of the recipe's own. `homes` is for the simulator: the folder with the homes of
    all members. `num_rounds` is the recipe's own unless it is given; `options` are those of `QuorumarkController`.

    Recipes for FedAvg can be changed so: their controller is replaced by one that opens the sum alone. The task of
    training, the script and its executor, and the persistor stay as they are. FLARE's FedOpt is read for its settings,
    which must be those of the terms: members make the step.
    """
    return _changed(recipe, consortium, homes, num_rounds, options)


def secure(
    recipe: Any,
    consortium: str | os.PathLike[str],
    *,
    homes: str | os.PathLike[str] = "",
    num_rounds: int = 0,
    **options: Any,
) -> Any:
    """The same recipe (or FedJob), with secure aggregation alone: no key, no mark. The server sees sums and nothing
    else. `consortium` is the file of the manifest that the members signed (`quorumark setup sums`, or `key_ceremony`
    with such terms). All else is as in `watermarked`."""
    return _changed(recipe, consortium, homes, num_rounds, {**options, "sums_alone": True})


def _changed(
    recipe: Any,
    consortium: str | os.PathLike[str],
    homes: str | os.PathLike[str],
    num_rounds: int,
    options: dict[str, Any],
) -> Any:
    job = recipe if isinstance(recipe, FedJob) else getattr(recipe, "_job", None)
    if not isinstance(job, FedJob):
        raise InputError("recipe", "must be a recipe or a FedJob of nvflare", type(recipe).__name__)
    exchanged = getattr(recipe, "server_expected_format", ExchangeFormat.NUMPY)
    if exchanged != ExchangeFormat.NUMPY:
        raise InputError(
            "server_expected_format", "must be NUMPY, FLARE's default: the sum is one of arrays", exchanged
        )
    if isinstance(recipe, Recipe):
        recipe._ensure_client_apps_prepared()
    before, named = _take_controller(job)
    task, path = str(_one_of(before, "task_name", "train_task_name") or "train"), _whole(consortium)
    where = str(_whole(homes)) if homes else ""
    pinned = _digest(options["terms"]) if homes and options.get("terms") else ""
    controller = QuorumarkController(
        consortium=str(path),
        num_rounds=num_rounds or int(_one_of(before, "num_rounds", "_num_rounds") or 0),
        task_name=task,
        persistor_id=str(_one_of(before, "_persistor_id", "persistor_id") or ""),
        optimiser=named,
        **options,
    )
    if controller.num_rounds < 1:
        raise InputError("num_rounds", "must be at least 1", controller.num_rounds)
    job.to_server(controller)
    job.to_server(dict(_EVERY))
    for target in [name for name in job._deploy_map if name != SERVER_SITE_NAME] or [ALL_SITES]:
        job.to(JoinRound(where), target, filter_type=FilterType.TASK_DATA, tasks=[task])
        job.to(KeepResult(), target, filter_type=FilterType.TASK_RESULT, tasks=[task])
        job.to(QuorumarkExecutor(where, pinned), target, tasks=[TASK])
    if path.is_file():  # a job ends when fewer sites than this are left, and a round can do with so many
        start = Start(path)
        start.check_kind("recipe", sums_alone=controller.sums_alone)
        check_named(named, start.manifest.terms)
        job.job.min_clients = group_of(start.manifest).least
    _leave_at_home(job)
    return recipe


def _one_of(controller: Any, *names: str) -> Any:
    """What the recipe's controller has under the first of these names that it knows."""
    return next((getattr(controller, name) for name in names if hasattr(controller, name)), None)


def key_ceremony(
    terms: str | os.PathLike[str],
    consortium: str | os.PathLike[str] | None = None,
    *,
    homes: str | os.PathLike[str] = "",
    name: str = "quorumark-key",
    **options: Any,
) -> Recipe:
    """A recipe in which all members make their key for the terms in a file on the server's machine. The manifest goes
    to `consortium`, by default consortium.json beside the terms. Each operator has pinned the digest of these terms
    (in the simulator all do)."""
    path = _whole(terms)
    target = path.with_name("consortium.json") if consortium is None else _whole(consortium)
    controller = QuorumarkController(consortium=str(target), terms=str(path), **options)
    members = read_as(path, "terms", Terms.from_bytes).members
    return _recipe(name, members, controller, homes, _digest(path) if homes else "")


def verification(
    consortium: str | os.PathLike[str],
    suspect: str | os.PathLike[str],
    *,
    after: str | os.PathLike[str] | None = None,
    examiner: str | os.PathLike[str] | None = None,
    sites: list[str] | None = None,
    homes: str | os.PathLike[str] = "",
    name: str = "quorumark-query",
    **options: Any,
) -> Recipe:
    """A recipe that asks the members whether a model (a file or a folder on the server's machine) is theirs. The
    certificate is certificate-1.json in the controller's folder. `align`, `lora` and `with_base` ask as
    `quorumark.flower.verify_model` does.

    With `after` (the file of the plain query's certificate, which did not pass) and `examiner` (the file of a card) it
    asks by layers: the sealed answers are in layers-1 of the controller's folder, where the examiner leaves a word."""
    query: dict[str, Any] = {"suspect": str(_whole(suspect))}
    if (after is None) != (examiner is None):
        raise InputError("after, examiner", "must be given together, to ask by layers", "one of them")
    if after is not None and examiner is not None:
        query |= {"after": str(_whole(after)), "examiner": str(_whole(examiner))}
    query |= {key: options.pop(key) for key in ("align", "lora", "with_base") if key in options}
    if sites is not None:
        query["sites"] = list(sites)
    path = _whole(consortium)
    controller = QuorumarkController(consortium=str(path), queries=[query], **options)
    return _recipe(name, Start(path).manifest.terms.threshold, controller, homes)


def _recipe(name: str, sites: int, controller: QuorumarkController, homes: Any, pinned: str = "") -> Recipe:
    job = FedJob(name=name, min_clients=sites)
    job.to_server(controller)
    job.to_server(dict(_EVERY))
    job.to_clients(QuorumarkExecutor(str(_whole(homes)) if homes else "", pinned), tasks=[TASK])
    _leave_at_home(job)
    return _OwnRecipe(job)


class _OwnRecipe(Recipe):  # type: ignore[misc]
    """A recipe without code of a user's. FLARE builds the components of such a job only where a site's resources allow
    their classes; in a simulation nobody but the user can say so, and does by running it."""

    def process_env(self, env: Any) -> None:
        if isinstance(env, SimEnv):
            local = Path(env.workspace_root) / self.name / "local"
            local.mkdir(parents=True, exist_ok=True)
            allowed = {CLASS_ALLOW_LIST: [*DEFAULT_CLASS_ALLOW_LIST, PACKAGE]}
            (local / "resources.json.default").write_text(json.dumps({"format_version": 2, **allowed}))


def _take_controller(job: FedJob) -> tuple[Any, str]:
    """Takes the job's controller out of it, and the server optimiser that it names (`named_by`), if there is one."""
    server = job._deploy_map.get(SERVER_SITE_NAME)
    workflows = [] if server is None else server.app_config.workflows
    kinds = [type(one.controller).__name__ for one in workflows]
    named = named_by(server.app_config) if server is not None else ""
    if not workflows:
        return None, named
    controller = workflows[0].controller
    if len(workflows) > 1 or not (_is(controller, _OURS) or _scatters_fedopt(controller, server.app_config)):
        raise InputError(
            "recipe",
            "must have one controller, FedAvg: what the server works with is the members' sum alone",
            ", ".join(kinds),
        )
    components = server.app_config.components
    for part in (controller, components.get(getattr(controller, "aggregator_id", ""))):
        for name, why in _UNUSED.items():
            if getattr(part, name, None) or getattr(part, f"_{name}", None):
                raise InputError(name, f"must be left out of the recipe: {why}")
    for cid, one in list(components.items()):  # what would make the optimiser's step at the server
        if is_fedopt(one) or (named and _is(one, _AVERAGES)):
            del components[cid]
            server.app_config.handlers[:] = [other for other in server.app_config.handlers if other is not one]
    communicator = controller.communicator
    server.app_config.handlers[:] = [one for one in server.app_config.handlers if one is not communicator]
    server.app_config.ids.remove(workflows[0].id)
    workflows.clear()
    return controller, named


def _is(one: Any, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(one).__mro__)


def _scatters_fedopt(controller: Any, app: Any) -> bool:
    """FLARE's FedOpt recipe has an older controller, with parts of its own for the average and the step."""
    if type(controller).__name__ != "ScatterAndGather":
        return False
    parts = [app.components.get(getattr(controller, name)) for name in ("shareable_generator_id", "aggregator_id")]
    return is_fedopt(parts[0]) and type(parts[1]).__name__ in _AVERAGES


def _leave_at_home(job: FedJob) -> None:
    """Sites and server use the package that they installed, not a copy that a job brings."""
    job.set_app_packages(sorted({*(job.job.app_packages or ()), "quorumark"}))


def _digest(terms: str | os.PathLike[str]) -> str:
    return read_as(Path(terms), "terms", Terms.from_bytes).digest().hex()


def _whole(path: str | os.PathLike[str]) -> Path:
    """FLARE's processes run in folders of their own."""
    return Path(path).absolute()
