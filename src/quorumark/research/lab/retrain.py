"""Attacks that train, side by side on one device: every attacker is a member of a fleet, with a model of its own.

Attackers who train on the same images do so on the same batches. Each minimises

    (1 − α)·[(1 − κ)·CE(z, y) + κ·KL(σ(z/T) ‖ σ(t/T))] + α·|cos(θ, τ′)|

with α = κ = 0 for fine-tuning, α > 0 for adaptive fine-tuning against an estimate τ′ of the key, κ = 0.5 and T = 3 for
distillation from a teacher's outputs t (docs/attacks.md). The cosine is over the carriers, and its gradient is added to
the network's in float32, without autograd:

    ∇|cos(θ, τ′)| = sign(cos)·(u/‖θ‖ − cos·θ/‖θ‖²)          u = τ′/‖τ′‖
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from quorumark.model.layout import ModelLayout
from quorumark.research.lab import augment
from quorumark.research.lab.fleet import Fleet, Optimiser, _rows
from quorumark.research.lab.image_run import ImageRun

__all__ = ["BATCH", "TEMPERATURE", "Attacker", "Attackers", "Feed"]

BATCH, TEMPERATURE = 128, 3.0


@dataclass(frozen=True, eq=False)
class Attacker:
    """One who trains: from `start` (the layout's order), against `guess` (its carriers) with weight α, or distils."""

    start: Tensor
    guess: Tensor | None = None
    alpha: float = 0.0
    kappa: float = 0.0
    decay: float = 1e-4  # of AdamW; 0 is Adam
    rate: float = 1.0  # of the learning rate, 10⁻³


class Attackers(Fleet):
    """A fleet of up to `members` attackers; how many take part may change from one time to the next."""

    def __init__(
        self,
        module: nn.Module,
        layout: ModelLayout,
        members: int,
        classes: int,
        image: tuple[int, int, int],
        device: torch.device,
        *,
        batch: int = BATCH,
        streams: int = 8,
    ) -> None:
        plain = Optimiser(decay=0.0)  # each attacker has its own weight decay, below
        super().__init__(module, layout, members, batch, image, device, plain, streams=streams)
        low = self.order.low
        self._guess = _rows(members, low, torch.float32, device)  # u
        self._alpha = torch.zeros(members, device=device)
        self._kappa = [torch.zeros((), device=device) for _ in range(members)]
        self._teacher = torch.zeros(members, batch, classes, device=device)
        self._wide = _rows(len(self._grads_low), low, torch.float32, device)
        self._shrink = torch.ones(members, device=device)  # 1 − lr·decay
        self._rates = torch.ones(members, 2, device=device)  # of the first factor, which the learning rate multiplies
        self._own = _rows(members, 2, torch.float32, device)  # both factors; aligned alike, for one kernel serves all
        self._graphs: dict[int, Any] = {}
        self._steps = 0

    def begin(self, attackers: Sequence[Attacker]) -> None:
        """Gives everybody a model to start from, and a new optimiser."""
        self.active = len(attackers)
        self._record()  # before models are there: what warms it up changes them
        self._steps = 0
        for k, attacker in enumerate(attackers):
            own = attacker.start.to(self.device)[self.order.to_device]
            self.theta[k].copy_(own)
            if self._low is not None:
                self._low[k].copy_(own[: self.order.low])
            for place, target in zip(self.order.statistics, self._statistics[k], strict=True):
                target.copy_(place.view(own))
            self._alpha[k] = attacker.alpha
            self._shrink[k] = 1 - self.optimiser.lr * attacker.rate * attacker.decay
            self._rates[k, 0] = attacker.rate
            self._kappa[k].fill_(attacker.kappa)
            self._guess[k].zero_()
            if attacker.guess is not None:
                guess = attacker.guess.to(self.device)[self.order.to_device[: self.order.low]].double()
                self._guess[k].copy_(guess / guess.norm().clamp_min(1e-300))
        for state in (self._m, self._v, self._teacher):
            state.zero_()

    def prepare(self, sizes: Sequence[int]) -> None:
        """Records the steps of so many attackers each, on CUDA; models are lost."""
        for self.active in sizes:
            self._record()

    def _record(self) -> None:
        """One graph for each number of attackers."""
        if not self.cuda:
            return
        self.module.train()
        if self.active not in self._graphs:
            self._capture(self._pixels.zero_(), self._y.zero_())
            self._graphs[self.active] = self._graph
        self._graph = self._graphs[self.active]

    def epoch(self, images: Tensor, labels: Tensor, teacher: Tensor | None = None) -> None:
        """images[steps, 1 or attackers, B, H, W, C], labels[steps, 1 or attackers, B], the teacher's outputs alike."""
        self.module.train()
        n = self.active
        table = self._biases(range(self._steps + 1, self._steps + len(images) + 1))
        for step, corrections in enumerate(table):
            self._pixels[:n].copy_(images[step].expand_as(self._pixels[:n]))
            self._y[:n].copy_(labels[step].expand_as(self._y[:n]))
            if teacher is not None:
                self._teacher[:n].copy_(teacher[step].expand_as(self._teacher[:n]))
            torch.mul(self._rates, corrections, out=self._own)
            self._before(self._steps + step)
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        self._steps += len(images)
        self._settle()

    def _before(self, step: int) -> None:
        """What a step needs besides its batch."""

    # --- a step of one attacker ---

    def _correction(self, k: int) -> Tensor:
        return self._own[k]

    def _inputs(self, k: int) -> tuple[Any, ...]:
        return (*super()._inputs(k), self._teacher[k], self._kappa[k])

    def _loss(
        self,
        parameters: list[Tensor],
        statistics: list[Tensor],
        x: Tensor,
        y: Tensor,
        teacher: Tensor | None = None,
        kappa: Tensor | None = None,
    ) -> Tensor:
        logits = self._outputs(parameters, statistics, x)
        loss = F.cross_entropy(logits, y)
        if teacher is None or kappa is None:
            return loss
        given = F.log_softmax(logits / TEMPERATURE, dim=-1)
        wanted = F.log_softmax(teacher / TEMPERATURE, dim=-1)
        return (1 - kappa) * loss + kappa * (given.exp() * (given - wanted)).sum(-1).mean()

    def _follow(self, k: int, lane: int, gradients: list[Tensor]) -> None:
        """Towards a smaller |cos(θ, τ′)| as well; in float32, where the small part is not lost beside the large one."""
        order, carriers = self.order, len(self.order.carriers)
        theta, guess, alpha, wide = self.theta[k, : order.low], self._guess[k], self._alpha[k], self._wide[lane]
        norm = theta.norm().clamp_min(1e-30)
        cosine = (theta * guess).sum() / norm
        pull = alpha * cosine.sign() / norm
        wide.copy_(torch.cat(gradients[:carriers], out=self._grads_low[lane]))
        wide.mul_(1 - alpha).addcmul_(guess, pull).addcmul_(theta, pull * cosine / norm, value=-1)
        self._descend(k, lane, gradients, wide)

    def _descend(self, k: int, lane: int, gradients: list[Tensor], wide: Tensor) -> None:
        """AdamW's step, with the carriers' gradients in `wide`."""
        order, carriers, alpha = self.order, len(self.order.carriers), self._alpha[k]
        self.theta[k, : order.trained].mul_(self._shrink[k])  # AdamW's decay, before the rest of its step
        self._adamw(k, 0, order.low, wide)
        if order.trained > order.low:
            others = torch.cat(gradients[carriers:], out=self._grads[lane]).mul_(1 - alpha)
            self._adamw(k, order.low, order.trained, others)


class Feed:
    """Batches of an attacker's images, epoch by epoch, augmented as the run's; the next ones are made ahead.

    `own` has a row of image numbers for each stream of batches, with as many seeds. The last batch of an epoch is
    filled up from the beginning of its order, as in training.
    """

    def __init__(self, run: ImageRun, own: Tensor, seeds: Sequence[int], kind: torch.dtype, batch: int = BATCH) -> None:
        self._run, self._own, self._seeds, self._kind = run, own, list(seeds), kind
        self.batch = batch
        self.steps = -(-own.shape[1] // batch)
        self._aside = torch.cuda.Stream() if run.device.type == "cuda" else None
        self._ready: tuple[int, Tensor, Tensor] | None = None

    def _made(self, epoch: int) -> tuple[Tensor, Tensor]:
        run, device = self._run, self._run.device
        images, labels = [], []
        for own, seed in zip(self._own, self._seeds, strict=True):
            mixed = np.random.SeedSequence([0x66656564, seed, epoch]).generate_state(1, np.uint64)[0] >> 1
            generator = torch.Generator(device).manual_seed(int(mixed))
            order = own[torch.rand(len(own), generator=generator, device=device).argsort()]
            chosen = order[torch.arange(self.steps * self.batch, device=device) % len(own)]
            pixels = augment.apply(run.settings.augment, run._x[chosen], generator)
            x = augment.normalise(pixels, *run._spread, self._kind)
            images.append(x.view(self.steps, self.batch, *x.shape[1:]))
            labels.append(run._y[chosen].view(self.steps, self.batch))
        return torch.stack(images, 1), torch.stack(labels, 1)

    def ahead(self, epoch: int) -> None:
        """Begins to make an epoch's batches."""
        if self._aside is None:
            self._ready = epoch, *self._made(epoch)
            return
        with torch.cuda.stream(self._aside):
            self._ready = epoch, *self._made(epoch)

    def take(self, epoch: int) -> tuple[Tensor, Tensor]:
        """An epoch's images and labels."""
        if self._ready is None or self._ready[0] != epoch:
            self.ahead(epoch)
        assert self._ready is not None  # noqa: S101
        _, x, y = self._ready
        if self._aside is not None:
            main = torch.cuda.current_stream()
            main.wait_stream(self._aside)
            x.record_stream(main)
            y.record_stream(main)
        self._ready = None
        return x, y
