"""Components of jobs that tests run in NVIDIA FLARE."""

from __future__ import annotations

import pickle
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.controller_spec import Task
from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.impl.controller import Controller
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from quorumark.model.layout import read_safetensors
from quorumark.nvflare import JoinRound, QuorumarkExecutor

Plan = list[Any]
"""[round, stage, points]: whose machine fails at which stage."""


def _fails(plan: Plan, site: str, round_no: int, stage: str) -> bool:
    return any((round_no, stage) == (r, s) and int(site.removeprefix("site-")) in points for r, s, points in plan)


class FailingJoin(JoinRound):
    """A site that fails before it trains."""

    def __init__(self, homes: str = "", plan: Plan | None = None) -> None:
        super().__init__(homes)
        self.plan = plan

    def process(self, shareable: Any, fl_ctx: Any) -> Any:
        round_no = shareable["quorumark"]["config"]["round"]
        if _fails(self.plan or [], fl_ctx.get_identity_name(), round_no, "train"):
            raise OSError("the power went out")
        return super().process(shareable, fl_ctx)


class FailingExecutor(QuorumarkExecutor):
    """A site that fails when it is asked for its upload or its answer."""

    def __init__(self, homes: str = "", terms: str = "", plan: Plan | None = None) -> None:
        super().__init__(homes, terms)
        self.plan = plan
        self._round = 0

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        config = from_shareable(shareable).data["quorumark"]["config"]
        self._round = config.get("round", self._round)  # the request for an answer does not name it
        if _fails(self.plan or [], fl_ctx.get_identity_name(), self._round, str(config["stage"])):
            raise OSError("the power went out")
        return super().execute(task_name, shareable, fl_ctx, abort_signal)


class Recorder(Filter):  # type: ignore[misc]
    """At the server: keeps everything that sites send, as it arrives."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def process(self, shareable: Any, fl_ctx: Any) -> Any:  # noqa: ARG002
        with (Path(self.folder) / f"received-{secrets.token_hex(8)}.bin").open("wb") as file:
            for part in _leaves(dict(shareable)):
                file.write(part.tobytes() if isinstance(part, np.ndarray) else pickle.dumps(part))
                file.write(bytes(16))
        return shareable


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value] if isinstance(value, np.ndarray | bytes | str | int | float) else []


class TakeWeights(Controller):  # type: ignore[misc]
    """A server that wants single models: a plain task of training for every site, under any name. What comes is written
    to FOLDER/SITE.npz."""

    def __init__(self, model: str, folder: str, task_name: str = "train", timeout: int = 30) -> None:
        super().__init__()
        self.model, self.folder, self.task_name, self.timeout = model, folder, task_name, timeout

    def start_controller(self, fl_ctx: Any) -> None: ...

    def stop_controller(self, fl_ctx: Any) -> None: ...

    def process_result_of_unknown_task(self, *args: Any, **kwargs: Any) -> None: ...

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        params = {name: np.asarray(tensor) for name, tensor in read_safetensors(Path(self.model)).items()}
        sent = FLModel(ParamsType.FULL, params, current_round=0, total_rounds=1)
        task = Task(
            self.task_name, FLModelUtils.to_shareable(sent), timeout=self.timeout, result_received_cb=self._take
        )
        everyone = len(fl_ctx.get_engine().get_clients())
        self.broadcast_and_wait(task, fl_ctx, min_responses=everyone, abort_signal=abort_signal)

    def _take(self, client_task: Any, fl_ctx: Any) -> None:  # noqa: ARG002
        result, path = client_task.result, Path(self.folder) / client_task.client.name
        path.with_suffix(".code").write_text(str(result.get_return_code()))
        if result.get_return_code() == ReturnCode.OK:
            np.savez(path.with_suffix(".npz"), **from_shareable(result).data)
