"""Flower's server optimisers: read for their settings, which must be those of the terms; members do the arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from decimal import Decimal
from types import MethodType
from typing import Any

from quorumark.consortium.optimiser import OPTIMISERS, Optimiser
from quorumark.consortium.records import Terms
from quorumark.errors import RoundError

__all__ = ["averaging", "check_optimiser"]

_NAMES = {"FedAvgM": "fedavgm", "FedAdam": "fedadam", "FedYogi": "fedyogi", "FedAdagrad": "fedadagrad"}
_PLAIN = {"server_learning_rate": 1.0, "server_momentum": 0.0}  # FedAvgM with these is FedAvg


def check_optimiser(strategy: Any, terms: Terms) -> None:
    """Whether a strategy's server optimiser, with all its settings, is the one in the terms."""
    kind = next((k for k in type(strategy).__mro__ if k.__name__ in _NAMES and k.__module__.startswith("flwr.")), None)
    agreed, name = terms.policy.optimiser, type(strategy).__name__
    own = None if kind is None else _settings(_NAMES[kind.__name__], strategy)
    if agreed is None:
        if kind is None or own == ("fedavgm", _PLAIN):
            return
        raise _refusal(
            f"{name} is a server optimiser, and the terms name none: members would have to take any model that the "
            f"server makes. Agree on it in the terms: quorumark consortium create --policy optimiser={_text(own)}"
        )
    if own != _agreed(agreed):
        wanted = next(k for k, v in _NAMES.items() if v == agreed.name)
        settings = ", ".join(f"{setting}={text}" for setting, text in agreed.settings)
        found = name if own is None else f"{name}({', '.join(f'{k}={v:g}' for k, v in own[1].items())})"
        raise _refusal(f"the terms name the server optimiser {wanted}({settings}), and the strategy is {found}")
    maker = next(k for k in type(strategy).__mro__ if "aggregate_train" in vars(k))
    if not maker.__module__.startswith("flwr."):
        raise _refusal(
            f"{name} has an aggregate_train of its own, which is not used where members compute the optimiser's model: "
            "take Flower's class as it is"
        )


@contextlib.contextmanager
def averaging(strategy: Any, terms: Terms) -> Iterator[None]:
    """While a run lasts a strategy hands on what members made of the sum, in place of its own arithmetic."""
    from flwr.serverapp.strategy import FedAvg

    if terms.policy.optimiser is None:
        yield
        return
    strategy.aggregate_train = MethodType(FedAvg.aggregate_train, strategy)
    try:
        yield
    finally:
        del strategy.aggregate_train


def _settings(name: str, strategy: Any) -> tuple[str, dict[str, float]]:
    return name, {setting: float(getattr(strategy, setting)) for setting in OPTIMISERS[name]}


def _agreed(optimiser: Optimiser) -> tuple[str, dict[str, float]]:
    return optimiser.name, {setting: float(text) for setting, text in optimiser.settings}


def _text(own: tuple[str, dict[str, float]] | None) -> str:
    assert own is not None  # noqa: S101
    return f"{own[0]}:" + ",".join(f"{setting}={Decimal(repr(value)):f}" for setting, value in own[1].items())


def _refusal(text: str) -> RoundError:
    return RoundError(text, code="round.other-optimiser")
