"""Federated training on one device, round by round, with the mark as the ideal functionality.

A round: every member gets the global model and a new optimiser, trains one epoch on its own images, and the models'
weighted sum with the mark is the next global model:

    θ_new = decode(Σ E(a_k·θ_k) + S ⊙ τ)

Everything random comes from the run's seed and the round's number, so that a run made in pieces is the same run. On the
CPU it is so to the last bit; on CUDA, convolutions may add up in another order from one time to the next.

A member's last batch of a round is filled up from the beginning of its order, so that all batches have one size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quorumark.errors import RecordError
from quorumark.model.layout import ModelLayout
from quorumark.research.known import SeededKey
from quorumark.research.lab import augment, data, models
from quorumark.research.lab.config import Settings, strength_settings
from quorumark.research.lab.dither import Continuity, Dither
from quorumark.research.lab.federated_run import FederatedRun, RoundLog, check_loss, mixed_seed
from quorumark.research.lab.fleet import Fleet, Optimiser
from quorumark.research.lab.mark import Mark, decoded, weighted_sum
from quorumark.research.lab.observer import Observer
from quorumark.research.lab.packed import PackedSum
from quorumark.research.lab.papercode import CodeKey, CodeMark, Trainable
from quorumark.round.units import Packing

__all__ = ["ImageRound", "ImageRun"]


@dataclass
class ImageRound(RoundLog):
    """A round with images; accuracy on the validation images, None where it was not measured."""

    accuracy: float | None = None


class ImageRun(FederatedRun[ImageRound]):
    """A run with images."""

    ENTRY = ImageRound
    SIGN = 1  # accuracy

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
        super().__init__()
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
        if fleet is None or fleet.made_of != (*args, streams, settings.kept):
            fleet = self._made_fleet(module, *args, streams=streams)
        self.fleet = fleet
        fleet.forget()  # what the run before left
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
        self._open: list[tuple[ImageRound, Tensor]] = []  # rounds that the device may still be at
        self._since = 0.0
        self._lazy = self._cuda  # rounds are not waited for: where the CPU trains, there is nothing to gain
        self._begun: torch.cuda.Event | None = None  # when the device begins the last round
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

    def _made_fleet(self, module: Any, *args: Any, streams: int) -> Fleet:
        """Of another kind where members train otherwise (`lab.rivals`)."""
        return Fleet(module, *args, streams=streams, kept=self.settings.kept)

    def _mark(self) -> Mark | CodeMark | None:
        return self.made_mark(self.keys)

    def made_mark(self, keys: Sequence[SeededKey]) -> Mark | CodeMark | None:
        """The mark of these settings, with these keys in place of the run's own."""
        settings, strength = self.settings, strength_settings(self.settings.strength)
        if strength is None:
            return None
        if settings.papers_code:
            args = float(strength["c"]), self.layout, self.trainable, self.initial, self.code_keys, self.device
            return CodeMark(*args)
        dither = Dither(settings.dither, settings.seed) if settings.dither else None
        packing = Packing(settings.packing, settings.members)
        return Mark(strength, self.layout, self.initial, keys, self.device, dither, packing)

    def _observer(self, coalitions: Sequence[int]) -> Observer:
        return Observer(self.layout, self.initial, coalitions, self.settings.members)

    # --- a round ---

    def batches(self, round_no: int) -> tuple[Tensor, Tensor]:
        """What the members train on in a round: images[steps, K, B, H, W, C], augmented, and labels."""
        generator = torch.Generator(self.device).manual_seed(mixed_seed(self.settings.seed, round_no))
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

    def summed(self) -> tuple[Tensor, PackedSum | None]:
        """What the members' results add up to in 2^-40, without the mark; how, where updates are packed."""
        if isinstance(self.mark, Mark) and self.mark.packing.packs:
            packed = self.mark.packed_sum(self.model, self.weights, self.fleet.model)
            return packed.total, packed
        return weighted_sum(self.fleet.theta, self.weights)[self.fleet.order.to_layout], None

    def round(self) -> ImageRound:
        """One round. On CUDA it may not be over, and its loss not known, before the next one that is validated."""
        number, settings = self.round_no + 1, self.settings
        if not self._open:
            self._since = time.perf_counter()
        loss = self.local_models(number)
        if not self._lazy:
            check_loss(number, float(loss))  # before the mark, which would say something else of such a model
        if number < settings.rounds:
            self._prepare(number + 1)
        total, packed = self.summed()
        c, before = 0.0, self.model
        if self.mark is None:
            self.model = decoded(total)
        else:
            sums = self.fleet.update_sums if self._cuda else None
            self.model, c = self.mark.apply(number, before, total, self.weights, self.fleet.model, sums, packed)
        if self.observer is not None:
            own = self.observer.own(self.fleet.theta, self.weights, before, self.fleet.order.to_layout)
            added = None if self.mark is None or self.mark.added is None else self.mark.added.double() * 2.0**-40
            self.observer.see(before, self.model, added, own)
        if self.continuity is not None:
            self.continuity.see(before, self.model)
        accuracy = None
        if self.validates(number):
            accuracy = self.fleet.accuracy(self.model, *self.validation)
            self.keep_best(accuracy, number)
        done = ImageRound(number, float("nan"), c, 0.0, accuracy)
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

    # --- making it last ---

    def _state(self) -> dict[str, Any]:
        return {
            "observer": None if self.observer is None else self.observer.saved(),
            "continuity": None if self.continuity is None else self.continuity.saved(),
        }

    def _restore_state(self, body: Mapping[str, Any], path: Path) -> None:
        self._open = []
        if self.settings.kept and 0 < self.round_no < self.settings.rounds:
            raise RecordError(
                f"{str(path)!r} lacks the members' optimisers, which this run keeps: remove it, and begin again"
            )
        if self.continuity is not None:
            self.continuity.restore(body["continuity"])
        seen = body.get("observer")
        if seen is not None:
            self.observer = self._observer(seen["coalitions"])
            self.observer.restore(seen)
        elif self.observer is not None and self.log:
            raise RecordError(f"{str(path)!r} is of a run that was not observed from its first round: begin it again")

    def _tensors(self, vector: Tensor) -> Mapping[str, Any]:
        like = {name: tensor.cpu().numpy() for name, tensor in self.fleet.module.state_dict().items()}
        return self.layout.unflatten(vector.cpu().numpy(), like)
