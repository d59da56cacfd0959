"""The member's side in FLARE: filters around the job's own task of training, and an executor for all other stages.

    JoinRound          before training: joins the round, and tells the script its rate, round and seed
    KeepResult         after training: keeps the result on this machine, and says that the member is ready
    QuorumarkExecutor  uploads the masked vector, answers; the key ceremony, queries, signatures
    NoPlainWeights     KeepResult as a site's own policy, for every task of every job

The script gets three more numbers in its model's `meta`: `quorumark-rate` (the learning rate that the manifest has for
this round, in units of the first one's), `quorumark-round`, which counts the accepted rounds, and `quorumark-seed`.
What it returns never leaves the site as it is.

Which member a site is, its operator says in the site's own folder, never the job: local/quorumark.json has `home` and
`key-file`, and the pins `terms` and `manifest`; or `socket`, where a process of another user holds the share
(`quorumark member serve`, which takes the pins). In the simulator all homes are in one folder, which the job names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.shareable import Shareable, make_reply

from quorumark.errors import InputError, MessageError, QuorumarkError, RoundError
from quorumark.node.homes import Stages, Words, named_member, simulated_member
from quorumark.node.journal import MODEL
from quorumark.node.member import RESULT, Config, refused
from quorumark.nvflare.wire import digest_of, numbers_of, to_shareable, unpacked

__all__ = ["SETTINGS", "JoinRound", "KeepResult", "NoPlainWeights", "QuorumarkExecutor"]

SETTINGS = "quorumark.json"
"""The file in a site's `local` folder in which its operator says which member the site is."""

_ASKED = ("upload", "unmask", "again", "never", "vouch", "second", "state", "setup", "answer", "sign")
"""The stages that a server asks for. What a member joins with and has trained only its own site says: a server that
could say it for all but one would find that one's model in the sum."""

_JOINED, _SENT, _WHY = "quorumark-joined", "quorumark-sent", "quorumark-why"
_WEIGHTS = {DataKind.WEIGHTS, DataKind.WEIGHT_DIFF, DataKind.FL_MODEL, DataKind.COLLECTION, DataKind.APP_DEFINED}
_CODES = frozenset(value for value in vars(ReturnCode).values() if isinstance(value, str) and value.isupper())
_WORDS = Words(
    place=f"local/{SETTINGS}",
    prefix="",
    homes="homes",
    set_homes="to the folder with all members' homes, as a whole path: watermarked(recipe, …, homes=…)",
    nodes="num_clients",
    set_nodes="SimEnv(num_clients={count})",
)


# --- which member this site is ----------------------------------------------------------------------------


def member_of(fl_ctx: Any, homes: str, terms: str = "", *, setup: bool = False) -> Stages:
    """The member that this site is: from its own folder; in a simulation by its number, or the name of a home."""
    folder = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_site_config_dir())
    path, site = folder / SETTINGS, str(fl_ctx.get_identity_name())
    if path.is_file():
        try:
            settings = json.loads(path.read_bytes())
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            raise InputError(_WORDS.place, "must hold a JSON object")
        member = named_member(settings, _WORDS)
        if member is None:
            raise InputError(_WORDS.place, "must name this member's folder (home) and key file (key-file)")
        return member
    if not fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False):
        raise InputError(
            _WORDS.place, "must be in this site's folder, and say which member the site is", "no such file"
        )
    if not homes:
        raise InputError(_WORDS.homes, f"must be set in a simulation, {_WORDS.set_homes}")
    number = re.fullmatch(r"site-(\d+)", site)
    if number is None:
        raise InputError("clients", "must be site-1, site-2, … in a simulation: SimEnv(num_clients=…)", site)
    pins = {"terms": terms} if terms else {}
    return simulated_member(Path(homes), int(number[1]), pins, _WORDS, setup=setup)


def _answer(component: Any, fl_ctx: Any, act: Callable[[], Config]) -> Config:
    """What a stage gives, or what the server may know of a refusal or an unexpected failure: what an exception says
    stays in this site's log (and fires no event, which a job could send on)."""
    try:
        return act()
    except QuorumarkError as error:
        component.log_warning(fl_ctx, f"quorumark: this site refuses: {error}", fire_event=False)
        return refused(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, what it says stays here
        component.log_exception(fl_ctx, "quorumark: this site failed", fire_event=False)
        why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        return {"failed": f"{type(error).__name__}{why}; the site's log has the rest"}


# --- policies ---------------------------------------------------------------------------------------------


def check_policy(fl_ctx: Any) -> None:
    """Whether this site's own privacy policy leaves results alone. Its filters run before a job's: they would change
    the model before it is masked, or the masked vector, and the sum would be wrong for everybody."""
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    if scope is None:
        return
    chains = (scope.task_result_filters.get(FilterKey.OUT, ()), scope.task_data_filters.get(FilterKey.IN, ()))
    foreign = sorted({type(one).__name__ for chain in chains for one in chain if not _is_harmless(one)})
    if foreign:
        raise RoundError(
            f"the privacy policy of this site (local/privacy.json, scope {scope.name!r}) runs {', '.join(foreign)} on "
            "what members send: put these jobs into a scope without it (job meta `scope`), or let the site sit out",
            code="node.site-filter",
        )


def _is_harmless(one: Any) -> bool:
    """A filter of ours, or one that works on other kinds of data, such as statistics."""
    if isinstance(one, JoinRound | KeepResult):
        return True
    return isinstance(one, DXOFilter) and bool(one.data_kinds) and not _WEIGHTS.intersection(one.data_kinds)


# --- training ---------------------------------------------------------------------------------------------


class JoinRound(Filter):  # type: ignore[misc]
    """For the data of the job's task of training. A site that does not take part stops here, before it trains."""

    def __init__(self, homes: str = "") -> None:
        super().__init__()
        self.homes = homes

    def process(self, shareable: Shareable, fl_ctx: Any) -> Shareable:
        fl_ctx.set_prop(_JOINED, None, private=True, sticky=True)
        reply = _answer(self, fl_ctx, lambda: self._join(shareable, fl_ctx))
        if "joined" not in reply:
            fl_ctx.set_prop(_WHY, reply, private=True, sticky=True)
            raise ValueError("this site takes no part in the round: see above")
        return shareable

    def _join(self, shareable: Shareable, fl_ctx: Any) -> Config:
        message = unpacked(shareable)
        shareable.pop("quorumark", None)
        if message is None:
            raise RoundError(
                "this site trains for a watermarked job only, since another server would see its model: make the job "
                "with quorumark.nvflare.watermarked, or take the filters out of it",
                code="node.not-watermarked",
            )
        check_policy(fl_ctx)
        dxo = from_shareable(shareable)
        if dxo.data_kind != DataKind.WEIGHTS:
            raise MessageError(
                f"a task of training must hold a model's weights, not {dxo.data_kind}", code="message.malformed"
            )
        model = {name: np.asarray(tensor) for name, tensor in dxo.data.items()}
        about = {**message["config"], "node": str(fl_ctx.get_identity_name()), "settings": _settings(fl_ctx, dxo)}
        held = {**message["arrays"], **{MODEL + name: tensor for name, tensor in model.items()}}
        joined, _ = member_of(fl_ctx, self.homes).handle("join", about, held)
        if "joined" not in joined:
            return joined
        if joined["settings-changed"]:
            text = "quorumark: the job's code or settings differ from the last round's: look at them"
            self.log_warning(fl_ctx, text, fire_event=False)
        told = {"quorumark-rate": joined["rate"], "quorumark-round": joined["round"]}
        dxo.meta.update(told | {"quorumark-seed": joined["seed"] & (1 << 63) - 1})
        dxo.update_shareable(shareable)
        task = str(fl_ctx.get_prop(FLContextKey.TASK_NAME))
        fl_ctx.set_prop(_JOINED, (task, about, joined, model, self.homes), private=True, sticky=True)
        return joined


def _settings(fl_ctx: Any, dxo: DXO) -> str:
    """A digest of what a script is told from outside and of the code that the job ships, but for the round's number."""
    state = hashlib.sha256(repr(sorted((k, repr(v)) for k, v in dxo.meta.items() if "round" not in k.lower())).encode())
    root = fl_ctx.get_prop(FLContextKey.APP_ROOT)
    for path in sorted(Path(root).rglob("*")) if root else ():
        if path.is_file() and path.suffix in (".py", ".json", ".conf", ".yml", ".sh"):
            state.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return state.hexdigest()


class KeepResult(Filter):  # type: ignore[misc]
    """For the results of the job's task of training: the model stays here, and the server hears that the member is
    ready, with a signed key. Anything else than a result of a joined round is left out, but for numbers of a
    validation."""

    metrics = True

    def process(self, shareable: Shareable, fl_ctx: Any) -> Shareable:
        code = shareable.get_return_code()
        if code != ReturnCode.OK:  # an error says no more than its code, and only FLARE's own are codes
            known = isinstance(code, str) and code in _CODES
            return make_reply(code if known else ReturnCode.EXECUTION_EXCEPTION)
        message = unpacked(shareable)
        if message is not None and digest_of(message["config"], message["arrays"]) == fl_ctx.get_prop(_SENT):
            # of this project's own, and nothing beside it
            return to_shareable(message["config"], message["arrays"], numbers_of(message.get("metrics")))
        joined, task = fl_ctx.get_prop(_JOINED), str(fl_ctx.get_prop(FLContextKey.TASK_NAME))
        if joined is None or joined[0] != task:
            return self._held_back(shareable, task, fl_ctx)
        fl_ctx.set_prop(_JOINED, None, private=True, sticky=True)
        dxo = _dxo(shareable)
        reply = _answer(self, fl_ctx, lambda: _ready(fl_ctx, dxo, *joined[1:]))
        measured = numbers_of(dxo.get_meta_prop(MetaKey.INITIAL_METRICS)) if dxo is not None and self.metrics else {}
        return _sent(fl_ctx, reply, {}, measured)

    def _held_back(self, shareable: Shareable, task: str, fl_ctx: Any) -> Shareable:
        dxo = _dxo(shareable)
        if self.metrics and dxo is not None and dxo.data_kind == DataKind.METRICS:
            measured = numbers_of(dxo.data)
            if len(measured) == len(dxo.data):
                return DXO(DataKind.METRICS, data=measured).to_shareable()
        kind = "something" if dxo is None else str(dxo.data_kind)
        text = f"quorumark: {kind} in the result of task {task!r} was held back: it is no message of a round"
        self.log_error(fl_ctx, text, fire_event=False)
        return make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)


class NoPlainWeights(KeepResult):
    """A site's own rule, in the task_result_filters of its local/privacy.json: whatever a job says, models, updates and
    anything else that a task makes stay here. What goes out are messages of this project, return codes, and (unless
    `metrics` is false) at most 64 numbers of a validation or of a round."""

    def __init__(self, metrics: bool = True) -> None:
        super().__init__()
        self.metrics = metrics


def _ready(
    fl_ctx: Any, dxo: DXO | None, about: Config, joined: Config, model: Mapping[str, NDArray[Any]], homes: str
) -> Config:
    """Keeps what the script made."""
    node = member_of(fl_ctx, homes)
    if joined["repeats"]:  # the same result goes into the same sum once more, whatever was trained now
        return node.handle("ready", about, {})[0]
    if dxo is None or dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
        raise RoundError("the script must send a model's weights or their difference", code="node.wrong-result")
    made = {name: _array(tensor) for name, tensor in dxo.data.items()}
    if dxo.data_kind == DataKind.WEIGHT_DIFF:
        made = {n: np.asarray(t + made[n], t.dtype) if n in made else t for n, t in model.items()}
    # the manifest's numbers of examples weigh the sum; FLARE's own weights are numbers of steps
    told = {**about, "examples": joined["examples"], "joined": joined["joined"]}
    return node.handle("ready", told, {RESULT + name: tensor for name, tensor in made.items()})[0]


def _array(tensor: Any) -> NDArray[Any]:
    return np.asarray(tensor.detach().cpu() if hasattr(tensor, "detach") else tensor)


def _dxo(shareable: Shareable) -> DXO | None:
    try:
        return from_shareable(shareable)
    except ValueError:
        return None


def _sent(
    fl_ctx: Any, config: Config, arrays: Mapping[str, NDArray[Any]], metrics: Mapping[str, float] | None = None
) -> Shareable:
    """A message that the filters of this site let pass, since this process made it."""
    fl_ctx.set_prop(_SENT, digest_of(config, arrays), private=True, sticky=False)
    return to_shareable(config, arrays, metrics)


# --- all other stages -------------------------------------------------------------------------------------


class QuorumarkExecutor(Executor):  # type: ignore[misc]
    """For the task `quorumark`. `terms` is for simulations: the digest that every simulated member pins."""

    def __init__(self, homes: str = "", terms: str = "") -> None:
        super().__init__()
        self.homes, self.terms = homes, terms

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: Any, abort_signal: Any) -> Shareable:  # noqa: ARG002
        arrays: dict[str, NDArray[Any]] = {}

        def act() -> Config:
            message = unpacked(shareable)
            stage = str(message["config"].get("stage")) if message else ""
            if stage == "why":
                found = fl_ctx.get_prop(_WHY) or {"failed": "the site does not know any more why it refused"}
                fl_ctx.set_prop(_WHY, None, private=True, sticky=True)
                return dict(found)
            if message is None or stage not in _ASKED:
                raise MessageError(
                    f"there is no stage {stage[:40]!r} that a server may ask for: use {', '.join(_ASKED)}",
                    code="message.no-stage",
                )
            if stage == "upload":
                check_policy(fl_ctx)
            node = member_of(fl_ctx, self.homes, self.terms, setup=stage == "setup")
            config, made = node.handle(
                stage, {**message["config"], "node": str(fl_ctx.get_identity_name())}, message["arrays"]
            )
            arrays.update(made)
            return config

        config = _answer(self, fl_ctx, act)
        return _sent(fl_ctx, config, arrays)
