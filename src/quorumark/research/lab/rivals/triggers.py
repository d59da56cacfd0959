"""Triggers: images that no data set has, with labels that only the owner knows, which a server trains the model on.

WAFFLE (arXiv 2008.07298): 100 images, a tenth for each class, that show the class's random pattern over noise. The
server trains the initial model on them, and after each round trains the average on them until it gets 98 % right, for
100 epochs at most: SGD with rate 0.0005. Its network has no batch normalisation; here running statistics stay as
they are, as FedTracker's code leaves them, since triggers' statistics would ruin the model.

FedTracker (arXiv 2211.07160) does the same, but in each tensor the gradient g of the triggers must not undo what
members learnt. m, the sum over rounds of the model before minus the members' average, stands for their gradients:

    g ← g − (g·m/m·m)·m          if g·m < 0

That is the constraint as its abstract and names describe it. Its code has m with the other sign, and adds m/2 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - its usual name

from quorumark.research.lab.fleet import Order
from quorumark.research.lab.mark import decoded

__all__ = ["Retrained", "Triggers", "patterned"]

EACH, ENOUGH, EPOCHS, FIRST = 10, 0.98, 100, 30  # images a class, share that is right, epochs a round and before
RATE, BATCH = 5e-4, 50
_COARSE = 4  # blocks of a pattern, each way


def patterned(image: tuple[int, int, int], count: int, each: int, seed: int) -> NDArray[np.uint8]:
    """`each` images of so many random patterns, one pattern after the other: coloured blocks and noise, half each."""
    height, width, channels = image
    rng = np.random.default_rng([0x74726967, seed])
    coarse = rng.integers(0, 256, (count, _COARSE, _COARSE, channels))
    rows, columns = (np.arange(size) * _COARSE // size for size in (height, width))
    patterns = coarse[:, rows][:, :, columns].repeat(each, axis=0)
    return ((patterns + rng.integers(0, 256, patterns.shape)) // 2).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class Triggers:
    """Images as the network takes them (NHWC) and their labels."""

    x: Tensor
    labels: Tensor
    classes: int

    def counts(self, classed: Tensor) -> NDArray[np.int64]:
        """How many images of each label are classed as what."""
        found = np.zeros((self.classes, self.classes), np.int64)
        np.add.at(found, (self.labels.cpu().numpy(), classed.cpu().numpy()), 1)
        return found


class Retrained:
    """What a server adds to a round's sum by training on triggers; used like `mark.Mark`."""

    rho = 0.0

    def __init__(
        self, module: Any, order: Order, triggers: Triggers, seed: int, *, kept: bool, rate: float = RATE
    ) -> None:
        """`kept`: steps keep what members learnt, as FedTracker's."""
        self._module, self._order, self._triggers, self._kept, self.rate = module, order, triggers, kept, rate
        self._x = triggers.x.float().permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        self._rng = np.random.default_rng([0x72657472, seed])
        device, trained = self._x.device, [place.name for place in (*order.carriers, *order.parameters)]
        # all that a step needs is always in the same place: on CUDA it is recorded once
        self._own, self._memory = (torch.zeros(order.size, device=device) for _ in range(2))
        tensors, memory = order.tensors(self._own), order.tensors(self._memory)
        self._leaves = [tensors[name].detach().requires_grad_() for name in trained]
        self._named = {**tensors, **dict(zip(trained, self._leaves, strict=True))}
        self._before = [memory[name] for name in trained]
        self._part = torch.arange(len(self._x) // -(-len(self._x) // BATCH), device=device)
        self._right = torch.zeros((), device=device)
        self._graphs: list[Any] = []
        self.epochs: list[int] = []  # that each round took
        self.shares: list[float] = []  # of triggers that were right then
        self.added: Tensor | None = None

    def apply(
        self,
        round_no: int,  # noqa: ARG002 - as Mark.apply
        before: Tensor,
        total: Tensor,
        weights: Sequence[Fraction],  # noqa: ARG002
        model: Any,  # noqa: ARG002
        sums: Any = None,  # noqa: ARG002
        packed: Any = None,  # noqa: ARG002
    ) -> tuple[Tensor, float]:
        """The round's average, retrained."""
        after = decoded(total)
        if self._kept:
            self._memory += (before - after)[self._order.to_device]
        return self.retrained(after), self.rate

    def retrained(self, vector: Tensor, most: int = EPOCHS, enough: float = ENOUGH) -> Tensor:
        """Until so many triggers are right, or for so many epochs."""
        was, done = self._module.training, 0
        self._module.eval()
        look, step = self._looked, self._stepped
        if vector.is_cuda:
            self._graphs = self._graphs or [_recorded(work) for work in (look, step)]
            look, step = (graph.replay for graph in self._graphs)
        self._own.copy_(vector[self._order.to_device])
        look()
        while done < most and float(self._right) < enough:
            for part in self._rng.permutation(len(self._x)).reshape(-1, len(self._part)):
                self._part.copy_(torch.from_numpy(part))
                step()
            look()
            done += 1
        self._module.train(was)
        self.epochs.append(done)
        self.shares.append(round(float(self._right), 4))
        return self._own[self._order.to_layout]

    @torch.no_grad()
    def _looked(self) -> None:
        classed = functional_call(self._module, self._named, (self._x,)).argmax(1)
        self._right.copy_((classed == self._triggers.labels).float().mean())

    def _stepped(self) -> None:
        x, y = self._x[self._part], self._triggers.labels[self._part]
        loss = F.cross_entropy(functional_call(self._module, self._named, (x,)), y)
        grads = list(torch.autograd.grad(loss, self._leaves))
        if self._kept:
            grads = [_keeping(g, m) for g, m in zip(grads, self._before, strict=True)]
        with torch.no_grad():
            torch._foreach_add_(self._leaves, grads, alpha=-self.rate)

    def saved(self) -> dict[str, Any]:
        """Rivals' runs are made in one go."""
        return {}

    def close(self) -> None:
        """There is no thread to end."""


def _keeping(g: Tensor, m: Tensor) -> Tensor:
    """g without what points against m."""
    against = (g * m).sum().clamp(max=0) / (m * m).sum().clamp(min=1e-30)
    return g - against * m


def _recorded(work: Callable[[], None]) -> Any:
    """A CUDA graph of it. What warms it up changes the model, which must be loaded afterwards."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph
