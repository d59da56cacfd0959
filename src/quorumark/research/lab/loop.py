"""Federated training on one device, round by round, with the mark as the ideal functionality.

A round: every member gets the global model and a new optimiser, trains one epoch on its own images, and the models'
weighted sum with the mark is the next global model:

    θ_new = decode(Σ E(a_k·θ_k) + S ⊙ τ)

Everything random comes from the run's seed and the round's number, so that a run made in pieces is the same run. On the
CPU it is so to the last bit; on CUDA, convolutions may add up in another order from one time to the next.

A member's last batch of a round is filled up from the beginning of its order, so that all batches have one size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quorumark.errors import RecordError, RoundError
from quorumark.files import replacing
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.research.known import SeededKey
from quorumark.research.lab import augment, data, models
from quorumark.research.lab.config import Settings, strength_settings
from quorumark.research.lab.dither import Continuity, Dither
from quorumark.research.lab.fleet import Fleet, Optimiser
from quorumark.research.lab.mark import Mark, decoded, weighted_sum
from quorumark.research.lab.observer import Observer
from quorumark.research.lab.papercode import CodeKey, CodeMark, Trainable

__all__ = ["RoundLog", "Run", "check_loss"]


@dataclass
class RoundLog:
    """What a round was: accuracy on the validation images (None where it was not measured), mean training loss."""

    round: int
    loss: float
    accuracy: float | None
    c: float
    seconds: float


@dataclass
class Best:
    """The model with the highest validation accuracy so far."""

    accuracy: float = -1.0
    round: int = 0
    model: Any = field(default=None, repr=False)


class Run:
    """One run of the lab. `round()` is one round; `save` and `restore` make it last."""

    def __init__(
        self,
        settings: Settings,
        images: data.ImageSet,
        device: str | torch.device = "cpu",
        *,
        streams: int = 5,
        fleet: Fleet | None = None,
        observe: Sequence[int] | None = None,
    ) -> None:
        """`fleet` is that of a run before, which serves again if it is of the same kind: making one takes a while.

        `observe` keeps what could be learnt about the key from outside, and by coalitions of these sizes.
        """
        self.settings, self.device, self.note = settings, torch.device(device), images.note
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            torch.backends.cudnn.benchmark = True  # all batches have one size: the fastest kernel is looked for once
        height, _, channels = images.image
        module = models.make(settings.model, images.classes, channels, height, settings.seed)
        self.layout = ModelLayout.of(module)
        self.initial = torch.from_numpy(self.layout.flatten(module)).to(self.device)
        self.model = self.initial
        self._split(images)
        self.batch = max(1, settings.global_batch // settings.members)
        self.steps = -(-int(self._counts.max()) // self.batch)
        optimiser = Optimiser(settings.lr, settings.decay, (settings.beta1, settings.beta2))
        args = self.layout, settings.members, self.batch, images.image, self.device, optimiser
        if fleet is None or fleet.made_of != (*args, streams):
            fleet = Fleet(module, *args, streams=streams)
        self.fleet = fleet
        total = int(self._counts.sum())
        self.weights = [Fraction(int(n), total) for n in self._counts]
        self.keys = [
            SeededKey(self.layout.coordinates, settings.seed, number)
            for number in range(settings.members if settings.per_client else 1)
        ]
        self.trainable = Trainable(self.layout, {name for name, _ in module.named_parameters()}, self.device)
        self.code_keys = [CodeKey.of(self.trainable, key, settings.seed, n) for n, key in enumerate(self.keys)]
        self.mark = self._mark()
        self.observer = None if observe is None else self._observer(observe)
        self.continuity = Continuity(self.layout, self.device) if settings.continuity else None
        self.log: list[RoundLog] = []
        self._open: list[tuple[RoundLog, Tensor]] = []  # rounds that the device may still be at
        self._since = 0.0
        self._lazy = self._cuda  # rounds are not waited for: where the CPU trains, there is nothing to gain
        self._begun: torch.cuda.Event | None = None  # when the device begins the last round
        self.best = Best()
        self._ahead = torch.cuda.Stream(priority=-1) if self._cuda else None
        self._ready: tuple[int, Tensor, Tensor] | None = None

    def _split(self, images: data.ImageSet) -> None:
        """Everything onto the device: training images as bytes, the others as the network takes them."""
        settings = self.settings
        train, held_out = data.split(images.train_y, settings.validation, settings.seed)
        labels = images.train_y[train]
        if settings.gamma is None:
            parts = data.iid_partition(labels, settings.members, settings.seed)
        else:
            parts = data.dirichlet_partition(labels, settings.members, settings.gamma, settings.seed)
        self._counts = np.array([len(part) for part in parts])
        own = np.zeros((len(parts), int(self._counts.max())), np.int64)
        for row, part in zip(own, parts, strict=True):
            row[: len(part)] = part
        self._own = torch.from_numpy(own).to(self.device)  # each member's images, padded
        self._x = torch.from_numpy(images.train_x[train]).to(self.device)
        self._y = torch.from_numpy(labels).to(self.device)
        self._spread = images.spread()
        kind = torch.bfloat16 if self._cuda else torch.float32

        def ready(x: Any, y: Any) -> tuple[Tensor, Tensor]:
            pixels = torch.from_numpy(np.ascontiguousarray(x)).to(self.device)
            return augment.normalise(pixels, *self._spread, kind), torch.from_numpy(y).to(self.device)

        self.validation = ready(images.train_x[held_out], images.train_y[held_out])
        self.test = ready(images.test_x, images.test_y)

    def _mark(self) -> Mark | CodeMark | None:
        settings, strength = self.settings, strength_settings(self.settings.strength)
        if strength is None:
            return None
        if settings.papers_code:
            args = float(strength["c"]), self.layout, self.trainable, self.initial, self.code_keys, self.device
            return CodeMark(*args)
        dither = Dither(settings.dither, settings.seed) if settings.dither else None
        return Mark(strength, self.layout, self.initial, self.keys, self.device, dither)

    def _observer(self, coalitions: Sequence[int]) -> Observer:
        return Observer(self.layout, self.initial, coalitions, self.settings.members)

    # --- a round ---

    @property
    def round_no(self) -> int:
        """The rounds that are done."""
        return self.log[-1].round if self.log else 0

    def batches(self, round_no: int) -> tuple[Tensor, Tensor]:
        """What the members train on in a round: images[steps, K, B, H, W, C], augmented, and labels."""
        generator = torch.Generator(self.device).manual_seed(_mixed(self.settings.seed, round_no))
        counts = torch.from_numpy(self._counts).to(self.device)
        keys = torch.rand(self._own.shape, generator=generator, device=self.device)
        keys.masked_fill_(torch.arange(self._own.shape[1], device=self.device) >= counts[:, None], 2.0)
        order = self._own.gather(1, keys.argsort(1))
        slots = torch.arange(self.steps * self.batch, device=self.device) % counts[:, None]
        chosen = order.gather(1, slots).view(-1, self.steps, self.batch).transpose(0, 1)
        pixels = augment.apply(self.settings.augment, self._x[chosen.reshape(-1)], generator)
        x = augment.normalise(pixels, *self._spread, self.fleet.kind)
        return x.view(*chosen.shape, *x.shape[1:]), self._y[chosen]

    def _taken(self, round_no: int) -> tuple[Tensor, Tensor]:
        """The round's batches, which were made while the last one trained."""
        if self._ready is None or self._ready[0] != round_no:
            self._prepare(round_no)
        assert self._ready is not None  # noqa: S101
        _, x, y = self._ready
        if self._ahead is not None:
            main = torch.cuda.current_stream()
            main.wait_stream(self._ahead)
            if self._begun is not None:
                self._begun.synchronize()  # one round ahead, not all of them: each has its images in memory
            self._begun = main.record_event()
            x.record_stream(main)
            y.record_stream(main)
        self._ready = None
        return x, y

    def _prepare(self, round_no: int) -> None:
        if self._ahead is None:
            self._ready = round_no, *self.batches(round_no)
            return
        with torch.cuda.stream(self._ahead):
            self._ready = round_no, *self.batches(round_no)

    def local_models(self, round_no: int) -> Tensor:
        """Everybody trains from the global model; the mean loss. The results are in the fleet."""
        x, y = self._taken(round_no)
        self.fleet.load(self.model)
        return self.fleet.train(x, y)

    def round(self) -> RoundLog:
        """One round. On CUDA it may not be over, and its loss not known, before the next one that is validated."""
        number, settings = self.round_no + 1, self.settings
        if not self._open:
            self._since = time.perf_counter()
        loss = self.local_models(number)
        if not self._lazy:
            check_loss(number, float(loss))  # before the mark, which would say something else of such a model
        if number < settings.rounds:
            self._prepare(number + 1)
        total = weighted_sum(self.fleet.theta, self.weights)[self.fleet.order.to_layout]
        c, before = 0.0, self.model
        if self.mark is None:
            self.model = decoded(total)
        else:
            sums = self.fleet.update_sums if self._cuda else None
            self.model, c = self.mark.apply(number, before, total, self.weights, self.fleet.model, sums)
        if self.observer is not None:
            own = self.observer.own(self.fleet.theta, self.weights, before, self.fleet.order.to_layout)
            added = None if self.mark is None or self.mark.added is None else self.mark.added.double() * 2.0**-40
            self.observer.see(before, self.model, added, own)
        if self.continuity is not None:
            self.continuity.see(before, self.model)
        accuracy = None
        if number % settings.evaluate_every == 0 or number == settings.rounds:
            accuracy = self.fleet.accuracy(self.model, *self.validation)
            if accuracy > self.best.accuracy:
                self.best = Best(accuracy, number, self.model)
        done = RoundLog(number, float("nan"), accuracy, c, 0.0)
        self.log.append(done)
        self._open.append((done, loss))
        if accuracy is not None or number == 1 or not self._lazy:
            self.settle()
        return done

    def settle(self) -> None:
        """Waits for the device, and fills in what rounds were: their losses, and what each took of the time."""
        losses = [float(loss) for _, loss in self._open]
        each = (time.perf_counter() - self._since) / max(1, len(losses))
        for (entry, _), loss in zip(self._open, losses, strict=True):
            check_loss(entry.round, loss)
            entry.loss, entry.seconds = loss, each
        self._open = []

    def train(
        self,
        *,
        seconds: float | None = None,
        checkpoint: Path | None = None,
        every: int = 50,
        tell: Callable[[RoundLog], None] = lambda _: None,
    ) -> bool:
        """Rounds until all are done (True) or the time is up; saved every so many rounds and at the end."""
        start = time.perf_counter()
        while self.round_no < self.settings.rounds:
            if seconds is not None and time.perf_counter() - start > seconds:
                break
            tell(self.round())
            if checkpoint is not None and self.round_no % every == 0:
                self.save(checkpoint)
        self.settle()
        if checkpoint is not None:
            self.save(checkpoint)
        return self.round_no >= self.settings.rounds

    # --- making it last ---

    def save(self, path: Path) -> None:
        """All that the rest of the run depends on; the whole file, or the old one stays."""
        self.settle()
        body = {
            "settings": _kept(self.settings),
            "model": self.model.cpu(),
            "best": (self.best.accuracy, self.best.round, None if self.best.model is None else self.best.model.cpu()),
            "log": [asdict(entry) for entry in self.log],
            "mark": None if self.mark is None else self.mark.saved(),
            "observer": None if self.observer is None else self.observer.saved(),
            "continuity": None if self.continuity is None else self.continuity.saved(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, 0o644) as file:
            torch.save(body, file)

    def export(self, path: Path) -> None:
        """The released model, as a .safetensors file with the network's names."""
        chosen = self.best.model if self.best.model is not None else self.model
        like = {name: tensor.cpu().numpy() for name, tensor in self.fleet.module.state_dict().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(self.layout.unflatten(chosen.cpu().numpy(), like), path)

    def close(self) -> None:
        """Ends the mark's thread."""
        if self.mark is not None:
            self.mark.close()

    def restore(self, path: Path) -> None:
        """Goes on where `save` was."""
        body = torch.load(path, map_location="cpu", weights_only=False)
        if body["settings"] != _kept(self.settings):
            raise RecordError(f"{str(path)!r} is of a run with other settings: remove it, or use another folder")
        self.model = body["model"].to(self.device)
        accuracy, number, best = body["best"]
        self.best = Best(accuracy, number, None if best is None else best.to(self.device))
        self.log, self._open = [RoundLog(**entry) for entry in body["log"]], []
        if self.mark is not None:
            self.mark.restore(body["mark"], self.model)
        if self.continuity is not None:
            self.continuity.restore(body["continuity"])
        seen = body.get("observer")
        if seen is not None:
            self.observer = self._observer(seen["coalitions"])
            self.observer.restore(seen)
        elif self.observer is not None and self.log:
            raise RecordError(f"{str(path)!r} is of a run that was not observed from its first round: begin it again")


def check_loss(round_no: int, loss: float) -> None:
    """What is no number stays none: a run that has diverged ends here."""
    if not math.isfinite(loss):
        raise RoundError(
            f"round {round_no}: the loss is {loss}, the run has diverged; try a smaller learning rate or mark"
        )


def _kept(settings: Settings) -> dict[str, Any]:
    """What must be the same for a run to go on: all but its length and what is only looked at."""
    return {k: v for k, v in settings.asdict().items() if k not in ("rounds", "null_keys", "patience")}


def _mixed(seed: int, round_no: int) -> int:
    """One seed from two numbers."""
    return int(np.random.SeedSequence([0x6C6F6F70, seed, round_no]).generate_state(1, np.uint64)[0] >> 1)
