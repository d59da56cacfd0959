"""Tries what was derived: if random weights are permuted, mixed, rotated or rescaled, the output must stay the same.

The functions at the end make these changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quorumark.align.groups import Groups, Mixing, Slot, Stream
from quorumark.align.trace.handlers import REMEDY
from quorumark.align.trace.labels import Scaling
from quorumark.align.trace.running import run_model
from quorumark.errors import LayoutError

__all__ = [
    "EXACT",
    "check_change",
    "error_of",
    "flip_elements",
    "flip_signs",
    "map_tensors",
    "mix",
    "noise_like",
    "permute",
    "rescale",
    "rotate_stream",
]

EXACT = 1e-6  # of the output: what a change may do that leaves the function as it is


def check_change(model: Any, example: Any, change: Callable[..., dict[str, Any]], what: str) -> None:
    """Raises a LayoutError if a change of the weights changes the output."""
    error = error_of(model, example, change)
    if not error < EXACT:
        raise LayoutError(
            f"the channels that were derived cannot be {what} without changing the output (by {error:.1e}), so that "
            f"this model has no groups: {REMEDY}"
        )


def error_of(model: Any, example: Any, change: Callable[..., dict[str, Any]]) -> float:
    """By what part a change of the weights changes the output of a copy with random weights, in double precision."""
    import torch

    rng = np.random.default_rng(0)
    module = copy.deepcopy(model).double().eval()
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.eps = 1e-300  # the variance is scaled without it; some versions of PyTorch refuse 0
    with torch.no_grad(), _in_doubles():
        for tensor in [*module.parameters(), *[b for b in module.buffers() if b.is_floating_point()]]:
            noise = torch.from_numpy(rng.uniform(0.5, 1.5, tuple(tensor.shape)))
            if tensor.dim() < 2:  # gains, biases, running statistics: positive, and all different
                tensor.copy_(noise)
        inputs = map_tensors(_double(example), _varied)
        before = run_model(module, inputs)
        state = {name: t.clone() for name, t in module.state_dict().items()}
        module.load_state_dict(change(state, rng))
        after = run_model(module, inputs)
    errors = [
        float((two - one).abs().max() / one.abs().max().clamp_min(1e-30))
        for one, two in zip(before, after, strict=True)
        if one.numel()
    ]
    return max(errors, default=0.0) if np.isfinite(errors).all() else float("inf")


def _in_doubles() -> Any:
    """Keeps double precision where a model casts to float32, as Llama's norms always do.

    The output must stay the same to 10⁻⁶. With thirty layers of norms in float32 it would not, and a large model would
    have no groups.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = dict(kwargs or {})
            if args and isinstance(args[0], torch.Tensor):
                if func is torch.Tensor.float:
                    return args[0].double()  # integers as well: positions meet frequencies that are doubles
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                named = {k: torch.float64 if v is torch.float32 else v for k, v in named.items()}
            return func(*args, **named)

    return Doubles()


def _double(example: Any) -> Any:
    return map_tensors(example, lambda x: x.double())


def noise_like(x: Any) -> Any:
    import torch

    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


def _varied(x: Any) -> Any:
    """An example in which all numbers are the same shows little: noise instead."""
    return noise_like(x).to(x) if x.numel() > 1 and bool((x == x.reshape(-1)[0]).all()) else x


def map_tensors(example: Any, change: Callable[[Any], Any]) -> Any:
    """An example with its floating-point tensors changed."""
    import torch

    if isinstance(example, Mapping):
        return {name: map_tensors(x, change) for name, x in example.items()}
    if isinstance(example, (list, tuple)):
        return type(example)(map_tensors(x, change) for x in example)
    return change(example) if isinstance(example, torch.Tensor) and example.is_floating_point() else example


# --- changes that should leave the output as it is ---------------------------------------------------------


def permute(state: dict[str, Any], rng: np.random.Generator, groups: Groups) -> dict[str, Any]:
    """A random permutation of each group."""
    import torch

    orders = [rng.permutation(group.size) for group in groups.groups]
    moved = groups.axis_orders({name: tuple(t.shape) for name, t in state.items()}, orders)
    for (name, axis), order in moved.items():
        state[name] = state[name].index_select(axis, torch.from_numpy(order))
    return state | {name: state[source] for name, source in groups.swapped(orders).items()}


def rescale(state: dict[str, Any], rng: np.random.Generator, scalings: Sequence[Scaling]) -> dict[str, Any]:
    """A random factor for each scaling."""
    for scaling in scalings:
        factor = float(np.exp2(rng.uniform(-2, 2)))
        for knob in scaling:
            state[knob.tensor].select(knob.axis, knob.index).mul_(factor**knob.exponent)
    return state


def flip_signs(state: dict[str, Any], rng: np.random.Generator, signs: Sequence[Scaling]) -> dict[str, Any]:
    """The other sign for about half of the scalings, at least one."""
    for number, scaling in enumerate(signs):
        if number == 0 or rng.integers(2):
            for knob in scaling:
                if knob.tensor in state:
                    state[knob.tensor].select(knob.axis, knob.index).neg_()
    return state


def flip_elements(
    state: dict[str, Any],
    rng: np.random.Generator,
    signs: Sequence[tuple[int, Sequence[Slot], bool]],
) -> dict[str, Any]:
    """The other sign at the indices of slots, for about half of their elements or, where that is said, for all."""
    import torch

    for size, slots, whole in signs:
        chosen = np.ones(size, np.bool_) if whole else rng.integers(2, size=size).astype(np.bool_)
        chosen[0] = True
        for slot in slots:
            lines = state[slot.tensor].movedim(slot.axis, 0)  # a view: written in place
            lines[torch.from_numpy(slot.indices(size)[chosen].reshape(-1))] *= -1
    return state


def mix(state: dict[str, Any], rng: np.random.Generator, mixings: Sequence[Mixing]) -> dict[str, Any]:
    """A random matrix for each mixing."""
    import torch

    for mixing in mixings:
        if mixing.rotates:
            angles = rng.uniform(0, 2 * np.pi, mixing.size)
            by = np.zeros((mixing.size, 2, mixing.size, 2))
            each = np.arange(mixing.size)
            by[each, 0, each, 0] = by[each, 1, each, 1] = np.cos(angles)
            by[each, 1, each, 0] = np.sin(angles)
            by[each, 0, each, 1] = -np.sin(angles)
            forward = by.reshape(2 * mixing.size, 2 * mixing.size)
        else:
            forward = np.linalg.qr(rng.standard_normal((mixing.size, mixing.size)))[0]
            forward = forward * rng.uniform(0.5, 2.0, mixing.size)
        for slots, matrix in ((mixing.slots, forward), (mixing.against, np.linalg.inv(forward).T)):
            for slot in slots:
                values = state[slot.tensor].movedim(slot.axis, 0)  # a view: written in place
                indices = torch.from_numpy(slot.indices(mixing.size).reshape(-1))
                rows = values[indices]
                mixed = torch.from_numpy(matrix).to(rows) @ rows.reshape(len(matrix), -1)
                values[indices] = mixed.view(rows.shape)
    return state


def rotate_stream(state: dict[str, Any], rng: np.random.Generator, flow: Stream) -> dict[str, Any]:
    """Gains folded into what reads them, then a random orthogonal matrix."""
    import torch

    by = torch.from_numpy(np.linalg.qr(rng.standard_normal((flow.size, flow.size)))[0])
    for name, (axis, gain) in flow.axes().items():
        values = state[name].movedim(axis, -1)
        values = values if gain is None else values * state[gain]
        state[name] = (values @ by.T.to(values)).movedim(-1, axis).contiguous()
    for gain in flow.gains():
        state[gain] = torch.ones_like(state[gain])
    return state
