"""What every run of the lab is, whatever it trains: rounds, the model that validates best, and how it is made to last.

A subclass says what a round is, and by which measure one model is better than another.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from quorumark.errors import RecordError, RoundError
from quorumark.files import replacing
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.research.lab.config import Settings
from quorumark.research.lab.mark import Mark
from quorumark.research.lab.papercode import CodeMark

__all__ = ["Best", "FederatedRun", "RoundLog", "check_loss", "mixed_seed"]

_CHECKPOINT_EVERY = 50  # rounds


@dataclass
class RoundLog:
    """What a round was: the mean training loss, c of the mark, how long it took."""

    round: int
    loss: float
    c: float
    seconds: float


Entry = TypeVar("Entry", bound=RoundLog)


@dataclass
class Best:
    """The model that validates best so far, and what validation gave."""

    measure: float = math.nan
    round: int = 0
    model: Any = field(default=None, repr=False)


class FederatedRun(ABC, Generic[Entry]):
    """One run. `round()` is one round; `save` and `restore` make it last."""

    ENTRY: ClassVar[type[RoundLog]]
    SIGN: ClassVar[int]
    """1 where a larger measure is better, −1 where a smaller one is."""

    settings: Settings
    device: torch.device
    layout: ModelLayout
    initial: Tensor
    model: Tensor
    weights: list[Fraction]
    mark: Mark | CodeMark | None

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.best = Best()

    # --- what a subclass says ---

    @abstractmethod
    def round(self) -> Entry:
        """One round."""

    @abstractmethod
    def _tensors(self, vector: Tensor) -> Mapping[str, Any]:
        """A model by the names of its tensors."""

    def settle(self) -> None:
        """Waits for rounds that the device is still at, and fills in what they were."""

    def _state(self) -> dict[str, Any]:
        """What the rest of the run depends on besides the models, the log and the mark."""
        return {}

    def _restore_state(self, body: Mapping[str, Any], path: Path) -> None:
        """Takes back what `_state` gave."""

    # --- rounds ---

    @property
    def round_no(self) -> int:
        """The rounds that are done."""
        return self.log[-1].round if self.log else 0

    @property
    def released(self) -> Tensor:
        """The model that validates best; the last one, if none was validated."""
        chosen: Tensor = self.best.model if self.best.model is not None else self.model
        return chosen

    @property
    def done(self) -> bool:
        return self.round_no >= self.settings.rounds

    def validates(self, round_no: int) -> bool:
        """Whether the model of a round is validated."""
        return round_no % self.settings.evaluate_every == 0 or round_no == self.settings.rounds

    def keep_best(self, measure: float, round_no: int) -> None:
        """Keeps the present model if it validates better than those before."""
        if self.best.model is None or self.SIGN * measure > self.SIGN * self.best.measure:
            self.best = Best(measure, round_no, self.model)

    def train(
        self,
        *,
        seconds: float | None = None,
        checkpoint: Path | None = None,
        every: int = _CHECKPOINT_EVERY,
        tell: Callable[[Entry], None] = lambda _: None,
    ) -> bool:
        """Rounds until the run is done (True) or the time is up; saved every so many rounds and at the end."""
        start = time.perf_counter()
        while not self.done:
            if seconds is not None and time.perf_counter() - start > seconds:
                break
            tell(self.round())
            if checkpoint is not None and self.round_no % every == 0:
                self.save(checkpoint)
        self.settle()
        if checkpoint is not None:
            self.save(checkpoint)
        return self.done

    # --- making it last ---

    def save(self, path: Path) -> None:
        """All that the rest of the run depends on; the whole file, or the old one stays."""
        self.settle()
        best = None if self.best.model is None else self.best.model.cpu()
        body = {
            "settings": _kept(self.settings),
            "model": self.model.cpu(),
            "best": (self.best.measure, self.best.round, best),
            "log": [asdict(entry) for entry in self.log],
            "mark": None if self.mark is None else self.mark.saved(),
            **self._state(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, 0o644) as file:
            torch.save(body, file)

    def restore(self, path: Path) -> None:
        """Goes on where `save` was."""
        body = torch.load(path, map_location="cpu", weights_only=False)
        if body["settings"] != _kept(self.settings):
            raise RecordError(f"{str(path)!r} is of a run with other settings: remove it, or use another folder")
        self.model = body["model"].to(self.device)
        measure, number, best = body["best"]
        self.best = Best(measure, number, None if best is None else best.to(self.device))
        self.log = [self.ENTRY(**entry) for entry in body["log"]]  # type: ignore[misc]
        if self.mark is not None:
            self.mark.restore(body["mark"], self.model)
        self._restore_state(body, path)

    def export(self, path: Path) -> None:
        """The released model, as a .safetensors file with the network's names."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(self._tensors(self.released), path)

    def close(self) -> None:
        """Ends the mark's thread."""
        if self.mark is not None:
            self.mark.close()


def check_loss(round_no: int, loss: float) -> None:
    """A loss that is no number ends a run: what follows would be worth nothing."""
    if not math.isfinite(loss):
        raise RoundError(
            f"round {round_no}: the loss is {loss}, the run has diverged; try a smaller learning rate or mark",
            code="round.diverged",
        )


def _kept(settings: Settings) -> dict[str, Any]:
    """What must be the same for a run to go on: all but its length and what is only looked at."""
    return {k: v for k, v in settings.asdict().items() if k not in ("rounds", "null_keys", "patience")}


def mixed_seed(seed: int, round_no: int) -> int:
    """One seed from two numbers."""
    return int(np.random.SeedSequence([0x6C6F6F70, seed, round_no]).generate_state(1, np.uint64)[0] >> 1)
