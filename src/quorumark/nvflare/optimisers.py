"""FLARE's server optimisers: read for their settings, which must be those of the terms; members do the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from quorumark.consortium.optimiser import Optimiser
from quorumark.consortium.records import Terms
from quorumark.errors import InputError, RoundError

__all__ = ["check_named", "is_fedopt", "named_by"]

_FEDOPT = ("FedOpt", "PTFedOptModelShareableGenerator")
_TORCH, _KERAS = "torch.optim.", "tensorflow.keras.optimizers."
_PLAIN = Optimiser.of("fedavgm")  # FedAvgM with these settings is FedAvg
_UNKNOWN = "none"
_HARMLESS = {"params", "foreach", "fused", "differentiable", "capturable", "name"}
"""Of an optimiser's arguments: how it computes, not what."""


def named_by(app: Any) -> str:
    """The server optimiser of a job, as the policy `optimiser` spells it; nothing if it has none, "none" if none has
    its settings. It is a component beside the controller, or the controller itself."""
    for one in [*app.components.values(), *(workflow.controller for workflow in app.workflows)]:
        if is_fedopt(one):
            found = _read(one)
            return _UNKNOWN if found is None else str(found)
    return ""


def is_fedopt(component: Any) -> bool:
    return any(kind.__name__ in _FEDOPT for kind in type(component).__mro__)


def check_named(named: str, terms: Terms) -> None:
    """Whether a job's server optimiser is the one in the terms. A job without one takes any: the terms decide."""
    agreed = terms.policy.optimiser
    if not named or (agreed is not None and named == str(agreed)) or (agreed is None and named == str(_PLAIN)):
        return
    if named == _UNKNOWN:
        told = "the recipe has a server optimiser, an argument or a schedule that docs/optimisers.md does not have"
    elif agreed is None:
        told = f"the recipe has the server optimiser {named}, and the terms name none"
    else:
        told = f"the recipe has the server optimiser {named}"
    remedy = "agree on one in the terms (quorumark consortium create --policy optimiser=…)"
    if agreed is not None:
        told, remedy = f"the terms name the server optimiser {agreed}, and {told}", "give the recipe those settings"
    elif named != _UNKNOWN:
        remedy = f"agree on it in the terms (quorumark consortium create --policy optimiser={named})"
    raise RoundError(
        f"{told}: members compute the optimiser, so {remedy}, or take the FedAvg recipe, with which the terms decide",
        code="round.other-optimiser",
    )


def _read(fedopt: Any) -> Optimiser | None:
    about = dict(fedopt.optimizer_args or {})
    path = str(about.get("path") or about.get("class_path") or about.get("name") or "")
    args, name = dict(about.get("args") or {}), path.rpartition(".")[2]
    if getattr(fedopt, "lr_scheduler_args", None) or not path.startswith((_TORCH, _KERAS)):
        return None
    torch = path.startswith(_TORCH)
    rate, epsilon = ("lr", "eps") if torch else ("learning_rate", "epsilon")
    known: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
        "SGD": (
            "fedavgm",
            {"server_learning_rate": (rate, 0.001 if torch else 0.01), "server_momentum": ("momentum", 0)},
        ),
        "Adam": ("fedadam", {"eta": (rate, 0.001), "tau": (epsilon, 1e-8 if torch else 1e-7)}),
        "Adagrad": (
            "fedadagrad",
            {"eta": (rate, 0.01 if torch else 0.001), "tau": (epsilon, 1e-10 if torch else 1e-7)},
        ),
    }
    if name not in known:
        return None
    kind, settings = known[name]
    values = {setting: args.pop(argument, usual) for setting, (argument, usual) in settings.items()}
    if name == "Adam" and torch:
        values["beta_1"], values["beta_2"] = args.pop("betas", (0.9, 0.999))
    elif name == "Adam":
        values |= {beta: args.pop(beta, usual) for beta, usual in (("beta_1", 0.9), ("beta_2", 0.999))}
    elif name == "Adagrad" and not torch:
        args.setdefault("initial_accumulator_value", 0.1)  # Keras'
    return None if _has_more(args) else _of(kind, values)


def _has_more(args: Mapping[str, Any]) -> bool:
    """Whether there are arguments that make another optimiser of it, such as Nesterov's momentum or weight decay."""
    return any(value not in (None, False, 0) for name, value in args.items() if name not in _HARMLESS)


def _of(name: str, values: Mapping[str, Any]) -> Optimiser | None:
    try:
        texts = ",".join(f"{setting}={Decimal(repr(float(value))):f}" for setting, value in values.items())
        return Optimiser.of(f"{name}:{texts}")
    except (InputError, InvalidOperation, TypeError, ValueError):  # out of the ranges that terms may have
        return None
