"""All members of a federation on one device: their parameters and AdamW states in flat tensors, one row per member.

On the device a vector has an order of its own, so that a training step moves nothing about:

    [ carriers: weights of convolutions and linear layers | other parameters | running statistics ]
      with a copy in bfloat16 for the network on CUDA        float32            float32, not trained

with each convolution's weights channels-last. `Fleet.load` and `Fleet.model` translate from and to the order of the
`ModelLayout`, once a round.

On CUDA a step of all members is one graph. Small batches do not fill a GPU, so members are spread over several streams
within the graph. On the CPU the same step is a plain loop in float32.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - its usual name

from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout
from quorumark.research.lab.mark import carrying_axes

__all__ = ["Fleet", "Optimiser", "Order"]

_CAPTURING = threading.Lock()
_ALIGN = 64  # elements that a row's length is a multiple of, so that all rows are aligned alike
_LARGE = 1 << 18  # weights from which on a carrier's gradient is not copied together with others
_WIDE = 8  # channels that tensor cores want; black ones are added to images with fewer


@dataclass(frozen=True)
class Optimiser:
    """AdamW, as the paper has it."""

    lr: float = 1e-3
    decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a vector of the device's order."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self, vector: Tensor) -> Tensor:
        """The tensor, as a view; a convolution's weights are channels-last."""
        part = vector[self.start : self.stop]
        if len(self.shape) != 4:
            return part.view(self.shape)
        o, i, h, w = self.shape
        return part.view(o, h, w, i).permute(0, 3, 1, 2)


class Order:
    """Where each tensor lies on the device, and how that order and the layout's translate."""

    def __init__(self, module: nn.Module, layout: ModelLayout, device: torch.device) -> None:
        trained = {name for name, _ in module.named_parameters()}
        groups: list[list[Any]] = [[], [], []]  # carriers, other parameters, statistics
        for spec, place in layout.spans():
            groups[0 if spec.role == "carrier" else 1 if spec.name in trained else 2].append((spec, place))
        groups[0].sort(key=lambda pair: pair[0].size >= _LARGE)  # large ones last
        groups[1].sort(key=lambda pair: pair[0].size % _ALIGN != 0)  # odd sizes last: the others stay aligned
        self.carriers: list[Place] = []
        self.parameters: list[Place] = []
        self.statistics: list[Place] = []
        sources, start = [], 0
        for group, places in zip(groups, (self.carriers, self.parameters, self.statistics), strict=True):
            for spec, place in group:
                places.append(Place(spec.name, spec.shape, start, start + spec.size))
                start += spec.size
                index = torch.arange(place.start, place.stop)
                if len(spec.shape) == 4:
                    index = index.view(spec.shape).permute(0, 2, 3, 1).reshape(-1)
                sources.append(index)
        self.low = layout.carrier_size
        self.large = [place for place in self.carriers if place.stop - place.start >= _LARGE]
        self.small = self.large[0].start if self.large else self.low
        self.trained = self.low + sum(p.stop - p.start for p in self.parameters)
        self.size = layout.size
        source = torch.cat(sources)
        self.to_device = source.to(device)  # a vector on the device = the layout's vector[to_device]
        self.to_layout = torch.argsort(source).to(device)

    def cubes(self, layout: ModelLayout) -> list[tuple[int, int, int, int, int, int]]:
        """The carriers that carry, in the layout's order, as `_kernels.axis_sums` takes them: where they begin on the
        device, rows, columns, taps, and the steps between taps and columns."""
        starts = {place.name: place for place in self.carriers}
        names = {place.start: spec.name for spec, place in layout.spans("carrier")}
        found = []
        for place, (rows, columns, taps) in carrying_axes(layout):
            own = starts[names[place.start]]
            steps = (columns, 1) if len(own.shape) == 4 else (1, taps)
            found.append((own.start, rows, columns, taps, *steps))
        return found

    def tensors(self, vector: Tensor, low: Tensor | None = None) -> dict[str, Tensor]:
        """All tensors of a vector, as views; carriers from `low` if given."""
        carriers = vector if low is None else low
        out = {place.name: place.view(carriers) for place in self.carriers}
        return out | {place.name: place.view(vector) for place in (*self.parameters, *self.statistics)}


def _rows(count: int, length: int, kind: torch.dtype, device: torch.device) -> Tensor:
    """A matrix whose rows are aligned."""
    return torch.zeros(count, length + -length % _ALIGN, dtype=kind, device=device)[:, :length]


class Fleet:
    """K copies of a network that train side by side. `batch` is one member's, `image` (height, width, channels)."""

    def __init__(
        self,
        module: nn.Module,
        layout: ModelLayout,
        members: int,
        batch: int,
        image: tuple[int, int, int],
        device: torch.device,
        optimiser: Optimiser | None = None,
        *,
        streams: int = 5,
        kept: bool = False,
    ) -> None:
        """`kept`: AdamW's state goes on from one loaded model to the next."""
        self.module, self.device, self.members = module.to(device), device, members
        self.active = members  # how many of them take part in a step
        self.optimiser = optimiser or Optimiser()
        self.made_of = (layout, members, batch, image, device, self.optimiser, streams, kept)
        self.kept, self.steps = kept, 0  # steps of AdamW so far
        self.order = order = Order(module, layout, device)
        self.cuda = device.type == "cuda"
        self.kind = kind = torch.bfloat16 if self.cuda else torch.float32
        self.theta = _rows(members, order.size, torch.float32, device)
        self._m = _rows(members, order.trained, torch.float32, device)
        self._v = _rows(members, order.trained, torch.float32, device)
        self._low = _rows(members, order.low, kind, device) if self.cuda else None
        self._parameters, self._statistics = [], []
        for k, row in enumerate(self.theta):
            low = row if self._low is None else self._low[k]
            views = [p.view(low) for p in order.carriers] + [p.view(row) for p in order.parameters]
            self._parameters.append([view.detach().requires_grad_() for view in views])
            # in memory of their own: all aligned, as kernels want them
            self._statistics.append([torch.zeros(p.shape, device=device) for p in order.statistics])
        height, width, channels = image
        self._stem = self._widened(channels)
        wide = channels if self._stem is None else _WIDE
        self._x = torch.zeros(members, batch, height, width, wide, dtype=kind, device=device)
        self._pixels = self._x[..., :channels]
        self._y = torch.zeros(members, batch, dtype=torch.int64, device=device)
        self._corrections = torch.zeros(2, device=device)
        self._losses = torch.zeros(members, device=device)
        self._streams = [torch.cuda.Stream() for _ in range(min(streams, members))] if self.cuda else []
        lanes = max(1, len(self._streams))
        self._grads_low = _rows(lanes, order.low, kind, device)
        self._grads = _rows(lanes, order.trained - order.low, torch.float32, device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loaded: Tensor | None = None
        self._table = torch.zeros(0, 2, device=device)
        self._cubes = order.cubes(layout)

    def _widened(self, channels: int) -> str | None:
        """The network's first convolution, if it gets images with black channels added: on CUDA, since with three it is
        nothing for tensor cores, and takes as long as layers with twenty times its weights."""
        name = next((name for name, _ in self.module.named_parameters()), None)
        first = next((place for place in self.order.carriers if place.name == name), None)
        if first is None or not self.cuda or len(first.shape) != 4 or first.shape[1] != channels or channels >= _WIDE:
            return None
        return first.name

    # --- models in and out ---

    def load(self, vector: Tensor) -> None:
        """Gives everybody the global model, in the layout's order, and a new optimiser unless the old one is kept."""
        self._loaded = vector
        own = vector[self.order.to_device]
        self.theta.copy_(own.expand_as(self.theta))
        if self._low is not None:
            self._low.copy_(own[: self.order.low].expand_as(self._low))
        if self.order.statistics:
            sources = [place.view(own) for place in self.order.statistics]
            for statistics in self._statistics:
                torch._foreach_copy_(statistics, sources)
        if not self.kept:
            self.forget()

    def forget(self) -> None:
        """A new optimiser for everybody."""
        self._m.zero_()
        self._v.zero_()
        self.steps = 0

    def model(self, k: int) -> Tensor:
        """A member's model, in the layout's order."""
        return self.theta[k][self.order.to_layout]

    def update_sums(self) -> Tensor:
        """`mark.axis_sums` of the members' updates since the model was loaded, in one pass over their models (CUDA)."""
        from quorumark.research.lab import _kernels

        if self._loaded is None:
            raise InputError("a fleet", "must have a model")
        return _kernels.axis_sums(self.theta, self._loaded[self.order.to_device], self._cubes)  # type: ignore[no-any-return]

    # --- training ---

    def train(self, images: Tensor, labels: Tensor) -> Tensor:
        """A round from the loaded model: images[steps, K, B, H, W, C], labels[steps, K, B]; the mean loss."""
        self.module.train()
        if self.cuda and self._graph is None:
            with _CAPTURING:
                self._capture(images[0], labels[0])
        self._losses.zero_()
        if self.kept or len(self._table) != len(images):  # made once: nothing may wait for the device here
            self._table = self._biases(range(self.steps + 1, self.steps + len(images) + 1))
        self.steps += len(images)
        for x, y, corrections in zip(images, labels, self._table, strict=True):
            self._pixels.copy_(x)
            self._y.copy_(y)
            self._corrections.copy_(corrections)
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        self._settle()
        return self._losses.mean() / len(images)

    def _biases(self, steps: range) -> Tensor:
        """Adam's 1/(1 − β1^t) and 1/(1 − β2^t), for each step."""
        b1, b2 = self.optimiser.betas
        return torch.tensor([[1 / (1 - b1**t), 1 / (1 - b2**t)] for t in steps], device=self.device)

    def _settle(self) -> None:
        """Running statistics, which train in memory of their own, into the members' rows."""
        if self.order.statistics:
            for row, statistics in zip(self.theta, self._statistics, strict=True):
                torch.cat([s.view(-1) for s in statistics], out=row[self.order.trained :])

    def _capture(self, x: Tensor, y: Tensor) -> None:
        """Records a step of all members. What warms it up changes models: they are loaded again.

        Fleets of other threads may go on meanwhile, but not begin.
        """
        self._pixels.copy_(x)
        self._y.copy_(y)
        self._corrections.fill_(1.0)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._member(0, 0)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        self._graph = graph
        self.forget()
        if self._loaded is not None:
            self.load(self._loaded)

    def _step(self) -> None:
        """One step of every member."""
        if not self._streams:
            for k in range(self.active):
                self._member(k, 0)
            return
        main = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(main)
        for k in range(self.active):
            lane = k % len(self._streams)
            with torch.cuda.stream(self._streams[lane]):
                self._member(k, lane)
        for stream in self._streams:
            main.wait_stream(stream)

    def _loss(self, parameters: list[Tensor], statistics: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self._outputs(parameters, statistics, x), y)

    def _outputs(self, parameters: list[Tensor], statistics: list[Tensor], x: Tensor) -> Tensor:
        places = (*self.order.carriers, *self.order.parameters, *self.order.statistics)
        named = {place.name: t for place, t in zip(places, (*parameters, *statistics), strict=True)}
        if self._stem is not None and x.shape[1] == _WIDE:
            weights = named[self._stem]
            named[self._stem] = F.pad(weights, (0, 0, 0, 0, 0, _WIDE - weights.shape[1]))
        return functional_call(self.module, named, (x,)).float()  # type: ignore[no-any-return]

    def _inputs(self, k: int) -> tuple[Any, ...]:
        """What the loss of a member is computed from, after its parameters and statistics."""
        return self._x[k].permute(0, 3, 1, 2), self._y[k]

    def _member(self, k: int, lane: int) -> None:
        """One member's step: gradients, then AdamW on the member's row."""
        parameters = self._parameters[k]
        loss = self._loss(parameters, self._statistics[k], *self._inputs(k))
        grads = torch.autograd.grad(loss, parameters)
        self._losses[k].add_(loss.detach())
        flat = [g.permute(0, 2, 3, 1).reshape(-1) if g.dim() == 4 else g.reshape(-1) for g in grads]
        self._follow(k, lane, flat)

    def _follow(self, k: int, lane: int, gradients: list[Tensor]) -> None:
        """AdamW with a member's gradients: large ones where they are, small ones copied together in the lane's buffers,
        so that few kernels do it."""
        order, carriers = self.order, len(self.order.carriers)
        few = carriers - len(order.large)
        large = zip(order.large, gradients[few:carriers], strict=True)
        parts = [(place.start, place.stop, g.contiguous()) for place, g in large]  # they are, but for odd shapes
        if few:
            parts.append((0, order.small, torch.cat(gradients[:few], out=self._grads_low[lane, : order.small])))
        if order.trained > order.low:
            parts.append((order.low, order.trained, torch.cat(gradients[carriers:], out=self._grads[lane])))
        for start, stop, gradient in parts:
            self._adamw(k, start, stop, gradient)

    def _correction(self, _k: int) -> Tensor:
        """Adam's two factors for a member in this step."""
        return self._corrections

    def _adamw(self, k: int, start: int, stop: int, g: Tensor) -> None:
        """A step of a part of a member's row, in place; what the network computes with in bfloat16 goes along."""
        p, m, v = (rows[k, start:stop] for rows in (self.theta, self._m, self._v))
        low = self._low[k, start:stop] if self._low is not None and stop <= self.order.low else None
        o = self.optimiser
        if self.cuda:
            from quorumark.research.lab import _kernels

            _kernels.adamw(p, m, v, g, low, self._correction(k), o.lr, o.decay, o.betas, o.eps)
            return
        first, second = self._correction(k)
        m.lerp_(g, 1 - o.betas[0])
        v.mul_(o.betas[1]).addcmul_(g, g, value=1 - o.betas[1])
        p.mul_(1 - o.lr * o.decay).sub_(o.lr * first * m / ((v * second).sqrt_() + o.eps))

    # --- using a model ---

    @torch.no_grad()
    def logits(self, vector: Tensor, images: Tensor, batch: int = 2000) -> Tensor:
        """The outputs of a model, in the layout's order, for normalised images in NHWC."""
        own = vector[self.order.to_device]
        tensors = self.order.tensors(own, own[: self.order.low].to(self.kind) if self.cuda else None)
        self.module.eval()
        parts = images.permute(0, 3, 1, 2).split(batch)
        return torch.cat([functional_call(self.module, tensors, (part,)).float() for part in parts])

    def accuracy(self, vector: Tensor, images: Tensor, labels: Tensor) -> float:
        """The share of images that a model gets right."""
        return float((self.logits(vector, images).argmax(1) == labels).float().mean())
