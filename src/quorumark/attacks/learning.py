"""Attacks that train: fine-tuning, fine-tuning against an estimate of the key, distillation.

The settings are the paper's: AdamW (Adam for distillation), learning rate 10⁻³, weight decay 10⁻⁴, batches of 128, 100
epochs on 1, 5, 10 or 20 % of the training data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.attacks.base import Attack, Target, Weights, _cross_entropy, _torch, logits_of
from quorumark.codec import FRACTION_BITS
from quorumark.embed import MarkState, Strength
from quorumark.errors import InputError
from quorumark.field import Vector
from quorumark.layout import ModelLayout

ESTIMATES = ("sum", "last", "regression")


# --- fine-tuning ------------------------------------------------------------------------------------------


def _subset(target: Target, fraction: float, seed: int) -> tuple[Any, Any]:
    """A uniform sample of the training data."""
    torch = _torch()
    if not 0 < fraction <= 1:
        raise InputError("fraction", "must be above 0 and at most 1", fraction)
    inputs, labels = target.data or (torch.empty(0), torch.empty(0))
    count = max(1, round(fraction * len(labels)))
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:count]
    return _taken(inputs, chosen), labels[chosen.to(labels.device)]


def _taken(inputs: Any, chosen: Any, device: Any = None) -> Any:
    """Some of the inputs, on a device: a tensor, or a mapping of them."""
    if isinstance(inputs, Mapping):
        return {name: _taken(part, chosen, device) for name, part in inputs.items()}
    part = inputs[chosen.to(inputs.device)]
    return part if device is None else part.to(device)


def _fit(
    module: Any,
    data: tuple[Any, Any],
    loss: Callable[[Any, Any, Any], Any],
    seed: int,
    *,
    epochs: int,
    batch: int,
    learning_rate: float,
    decay: float | None,
) -> dict[str, Any]:
    """Trains a module in place, by AdamW with that decay or by Adam without one; returns what it cost."""
    torch = _torch()
    inputs, labels = data
    parameters = [p for p in module.parameters() if p.requires_grad]
    if decay is None:
        optimiser = torch.optim.Adam(parameters, lr=learning_rate)
    else:
        optimiser = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=decay, betas=(0.9, 0.999))
    order = torch.Generator().manual_seed(seed)
    device = parameters[0].device
    module.train()
    steps = 0
    total = torch.full((), float("nan"), dtype=torch.float64, device=device)
    for _ in range(epochs):
        total = torch.zeros_like(total)
        for part in torch.randperm(len(labels), generator=order).split(batch):
            if len(part) == 1 < batch and len(labels) > 1:
                continue  # a batch of one has no statistics for BatchNorm
            optimiser.zero_grad()
            value = loss(module, _taken(inputs, part, device), _taken(labels, part, device))
            value.backward()
            optimiser.step()
            steps += 1
            total += value.detach() * len(part)  # stays on the device: nothing waits for a number
    module.eval()
    return {"examples": len(labels), "steps": steps, "loss": float(total) / len(labels)}


def _weights(module: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def fine_tune(
    target: Target,
    seed: int,
    *,
    fraction: float = 0.2,
    epochs: int = 100,
    batch: int = 128,
    learning_rate: float = 1e-3,
    decay: float = 1e-4,
) -> tuple[Weights, dict[str, Any]]:
    """Trains the released model on."""
    module = target.module()
    cost = _fit(
        module,
        _subset(target, fraction, seed),
        target.loss,
        seed,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        decay=decay,
    )
    return _weights(module), cost


# --- against an estimate of the key -----------------------------------------------------------------------


def estimate_key(target: Target, how: str = "sum", *, coalition: bool = False, last: int = 5) -> NDArray[np.float64]:
    """τ′, a guess at the key from the public global models θ_0 … θ_T, one number for each carrying coordinate.

    With D_r = θ_r − θ_(r−1), less the attacking members' own part of it for a coalition:

        sum          Σ D_r                            the paper's; without a coalition it telescopes to θ_T − θ_0
        last         Σ D_r over the last rounds       where training moves little
        regression   Σ S_r·D_r / Σ S_r²               D_r = S_r·τ + noise, for the public amplitudes S_r
    """
    if how not in ESTIMATES:
        raise InputError("estimate", f"must be one of {', '.join(ESTIMATES)}", repr(how))
    layout = target.layout or ModelLayout.of(target.module())
    models = [layout.flatten(model)[layout.carrying()].astype(np.float64) for model in target.checkpoints]
    if len(models) < 2:
        raise InputError("target", "must have two checkpoints or more for an estimate of the key", len(models))
    deltas = [after - before for before, after in pairwise(models)]
    for what, there in (("own", coalition), ("scales", how == "regression")):
        if there and len(getattr(target, what)) != len(deltas):
            raise InputError(
                "target", f"must have {what} for each of the {len(deltas)} rounds", len(getattr(target, what))
            )
    if coalition:
        deltas = [d - np.asarray(o, np.float64)[layout.carrying()] for d, o in zip(deltas, target.own, strict=True)]
    if how == "last":
        deltas = deltas[-last:]
    total: NDArray[np.float64] = np.sum(deltas, axis=0)
    if how != "regression":
        return total
    scales = [np.asarray(s, np.float64) for s in target.scales]
    above = np.sum([s * d for s, d in zip(scales, deltas, strict=True)], axis=0)
    below = np.sum([s * s for s in scales], axis=0)
    return np.divide(above, below, out=total * 0, where=below > 0)  # type: ignore[no-any-return]


def public_scales(
    layout: ModelLayout,
    strength: Mapping[str, str],
    checkpoints: Sequence[Mapping[str, Any]],
    norms: Sequence[Vector] | None = None,
) -> list[NDArray[np.float64]]:
    """The amplitudes S_r of every round, which anybody can work out from the global models and the terms.

    With the strength setting `alike` = `skip` it also takes the sums of norms that each round opened.
    """
    encoded = [layout.encode(model) for model in checkpoints]
    state = MarkState(Strength.of(strength, layout.coordinates), layout, "rademacher", encoded[0])
    found = []
    for number, model in enumerate(encoded[1:], 1):
        amplitudes = state.amplitudes(number)
        state.advance(number, model, amplitudes, None if norms is None else norms[number - 1])
        found.append(amplitudes.vector.astype(np.float64) / 2.0**FRACTION_BITS)
    return found


def fine_tune_against(
    target: Target,
    seed: int,
    *,
    alpha: float = 0.5,
    estimate: str = "sum",
    coalition: bool = False,
    from_anchor: bool = False,
    fraction: float = 0.2,
    epochs: int = 100,
    batch: int = 128,
    learning_rate: float = 1e-3,
    decay: float = 1e-4,
) -> tuple[Weights, dict[str, Any]]:
    """Minimises (1 − α)·loss + α·|cos(θ, τ′)| over the carriers; with `from_anchor` θ − θ_0 instead of θ."""
    torch = _torch()
    if not 0 <= alpha <= 1:
        raise InputError("alpha", "must be from 0 to 1", alpha)
    layout = target.layout or ModelLayout.of(target.module())
    carrying = layout.carrying()
    module = target.module()
    device = next(module.parameters()).device
    guess = torch.from_numpy(estimate_key(target, estimate, coalition=coalition)).float().to(device)
    guess = guess / guess.norm().clamp_min(1e-30)
    places = torch.from_numpy(np.arange(layout.carrier_size)[carrying]).to(device)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = [spec.name for spec, _ in layout.spans("carrier")]
    anchor = torch.cat([target.checkpoints[0][name].flatten() for name in names]).to(device)

    def loss(module: Any, inputs: Any, labels: Any) -> Any:
        flat = torch.cat([parameters[name].flatten() for name in names]).float()
        theta = (flat - anchor if from_anchor else flat)[places]
        cosine = (theta @ guess) / theta.norm().clamp_min(1e-30)
        return (1 - alpha) * target.loss(module, inputs, labels) + alpha * cosine.abs()

    data = _subset(target, fraction, seed)
    cost = _fit(module, data, loss, seed, epochs=epochs, batch=batch, learning_rate=learning_rate, decay=decay)
    return _weights(module), cost


# --- distillation -----------------------------------------------------------------------------------------


def distil(
    target: Target,
    seed: int,
    *,
    fraction: float = 0.2,
    epochs: int = 100,
    batch: int = 128,
    learning_rate: float = 1e-3,
    temperature: float = 3.0,
    alpha: float = 0.5,
) -> tuple[Weights, dict[str, Any]]:
    """A new student learns from the released model: α·KL(σ(z_s/T) ‖ σ(z_t/T)) + (1 − α)·CE(z_s, y).

    The note `agreement` is on how many of the examples both give the same class, the transfer on what was seen;
    `transfer_rate` measures it on others.
    """
    torch = _torch()
    teacher = target.module().eval()
    torch.manual_seed(seed)
    student = target.make().to(next(teacher.parameters()).device)

    def loss(module: Any, inputs: Any, labels: Any) -> Any:
        logits = logits_of(module, inputs)
        with torch.no_grad():
            wanted = torch.log_softmax(logits_of(teacher, inputs) / temperature, dim=-1)
        given = torch.log_softmax(logits / temperature, dim=-1)
        divergence = (given.exp() * (given - wanted)).sum(-1).mean()
        return alpha * divergence + (1 - alpha) * _cross_entropy(lambda *_, **__: logits, inputs, labels)

    data = _subset(target, fraction, seed)
    cost = _fit(student, data, loss, seed, epochs=epochs, batch=batch, learning_rate=learning_rate, decay=None)
    cost["agreement"] = transfer_rate(teacher, student, data[0])
    return _weights(student), cost


def transfer_rate(teacher: Any, student: Any, inputs: Any) -> float:
    """The share of inputs on which both give the same class."""
    torch = _torch()
    device = next(teacher.parameters()).device
    same = []
    with torch.no_grad():
        for part in torch.arange(len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)).split(
            256
        ):
            chosen = _taken(inputs, part, device)
            one, two = (logits_of(model.eval(), chosen).argmax(-1) for model in (teacher, student))
            same.append((one == two).flatten())
    return float(torch.cat(same).float().mean())


_FRACTIONS = (0.01, 0.05, 0.1, 0.2)
ATTACKS = (
    Attack("fine-tuning", fine_tune, tuple({"fraction": p} for p in _FRACTIONS), needs=("data",)),
    Attack(
        "adaptive-fine-tuning",
        fine_tune_against,
        tuple({"fraction": p, "alpha": a} for p in _FRACTIONS for a in (0.1, 0.3, 0.5, 0.7)),
        needs=("data", "checkpoints"),
    ),
    Attack("distillation", distil, tuple({"fraction": p} for p in _FRACTIONS), needs=("data",)),
)
