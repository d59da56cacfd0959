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

from quorumark.codec import FRACTION_BITS
from quorumark.consortium.strength import Strength
from quorumark.errors import InputError
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout
from quorumark.research.attacks.base import Attack, Target, Weights, _cross_entropy, _torch, logits_of
from quorumark.round.amplitudes import MarkState

ESTIMATES = ("sum", "last", "regression", "gls")


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
        gls          as `LeastSquares` has it         the same, with what can be foreseen of the noise taken out, and
                                                      each row and round weighted by how quiet it is
    """
    if how not in ESTIMATES:
        raise InputError("estimate", f"must be one of {', '.join(ESTIMATES)}", repr(how))
    layout = target.layout or ModelLayout.of(target.module())
    models = [layout.flatten(model)[layout.carrying()].astype(np.float64) for model in target.checkpoints]
    if len(models) < 2:
        raise InputError("target", "must have two checkpoints or more for an estimate of the key", len(models))
    deltas = [after - before for before, after in pairwise(models)]
    for what, there in (("own", coalition), ("scales", how in ("regression", "gls"))):
        if there and len(getattr(target, what)) != len(deltas):
            raise InputError(
                "target", f"must have {what} for each of the {len(deltas)} rounds", len(getattr(target, what))
            )
    own = [np.asarray(o, np.float64)[layout.carrying()] for o in target.own] if coalition else []
    if how == "gls":
        return _generalised(layout, models, deltas, [np.asarray(s, np.float64) for s in target.scales], own)
    if coalition:
        deltas = [d - o for d, o in zip(deltas, own, strict=True)]
    if how == "last":
        deltas = deltas[-last:]
    total: NDArray[np.float64] = np.sum(deltas, axis=0)
    if how != "regression":
        return total
    scales = [np.asarray(s, np.float64) for s in target.scales]
    above = np.sum([s * d for s, d in zip(scales, deltas, strict=True)], axis=0)
    below = np.sum([s * s for s in scales], axis=0)
    return np.divide(above, below, out=total * 0, where=below > 0)  # type: ignore[no-any-return]


class LeastSquares:
    """τ′ by generalised least squares, round by round, over the rows of the carriers; for arrays of numpy or torch.

    D_r = S_r·τ + n_r. What an observer can foresee of n_r is taken out first, row by row, by least squares on known
    regressors b_j that hold m_j·τ of the mark themselves: the change of the round before (S_(r−1)·τ), the distance
    from the initial model (Σ S·τ), and for a coalition its own updates (nothing). What is left is

        E_r = D_r − Σ β_j·b_j = X_r·τ + e_r          X_r = S_r − Σ β_j·m_j,    v_r = the row's mean of E_r²

    and, for noise of variance v_r without correlation, the linear estimate of the least mean square error of a τ with
    mean 0 and variance 1 is τ′ = (Σ X_r·E_r/v_r) / (1 + Σ X_r²/v_r).
    """

    def __init__(self, rows: Sequence[tuple[slice, int]], above: Any, below: Any) -> None:
        """`rows`: where each tensor lies, and how many rows it has; two arrays of zeros to sum up in, in float64."""
        self.rows, self.above, self.below = rows, above, below

    def see(self, delta: Any, scale: Any, known: Sequence[tuple[Any, Any]]) -> None:
        """A round: its D_r and S_r, and pairs (b_j, m_j)."""
        for place, count in self.rows:
            d, x = delta[place].reshape(count, -1), scale[place].reshape(count, -1)
            basis: list[tuple[Any, Any]] = []
            for values, marks in known:
                b, m = _without(values[place].reshape(count, -1), marks[place].reshape(count, -1), basis)
                basis.append((b, m))
            d, x = _without(d, x, basis)
            variance = (d * d).mean(1)[:, None] + 1e-30
            self.above[place] += (x * d / variance).reshape(-1)
            self.below[place] += (x * x / variance).reshape(-1)

    def estimate(self) -> Any:
        return self.above / (1 + self.below)


def _without(d: Any, x: Any, basis: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """A change and its mark without their parts along orthogonal regressors, row by row."""
    for b, m in basis:
        beta = ((d * b).sum(1) / ((b * b).sum(1) + 1e-300))[:, None]
        d, x = d - beta * b, x - beta * m
    return d, x


def carrier_rows(layout: ModelLayout) -> list[tuple[slice, int]]:
    """Where each tensor lies among the carrying coordinates, and its rows; one row if not all of its weights carry."""
    spans = [(spec, place) for spec, place in layout.spans("carrier") if spec.size]
    if layout.coordinates == layout.carrier_size:
        return [(place, spec.shape[0]) for spec, place in spans]
    places = np.arange(layout.carrier_size)[layout.carrying()]
    ends = [(np.searchsorted(places, place.start), np.searchsorted(places, place.stop)) for _, place in spans]
    return [(slice(int(a), int(b)), 1) for a, b in ends if b > a]


def _generalised(
    layout: ModelLayout, models: Sequence[Any], deltas: Sequence[Any], scales: Sequence[Any], own: Sequence[Any]
) -> NDArray[np.float64]:
    zeros = np.zeros_like(deltas[0])
    found, marks = LeastSquares(carrier_rows(layout), zeros.copy(), zeros.copy()), zeros.copy()
    for r, (delta, scale) in enumerate(zip(deltas, scales, strict=True)):
        known = [(own[r], zeros)] if own else []
        if r:
            known += [(deltas[r - 1], scales[r - 1]), (models[r] - models[0], marks)]
        found.see(delta, scale, known)
        marks = marks + scale
    estimate: NDArray[np.float64] = found.estimate()
    return estimate


def public_scales(
    layout: ModelLayout,
    strength: Strength,
    checkpoints: Sequence[Mapping[str, Any]],
    norms: Sequence[Vector] | None = None,
) -> list[NDArray[np.float64]]:
    """The amplitudes S_r of every round, which anybody can work out from the global models and the terms.

    With the strength setting `alike` = `skip` it also takes the sums of norms that each round opened.
    """
    encoded = [layout.encode(model) for model in checkpoints]
    state = MarkState(strength, layout, "rademacher", encoded[0])
    found = []
    for number, model in enumerate(encoded[1:], 1):
        amplitudes = state.amplitudes(number)
        state.advance(number, model, amplitudes, None if norms is None else norms[number - 1])
        found.append(amplitudes.vector.astype(np.float64) / 2.0**FRACTION_BITS)
    return found


def carrying_weights(target: Target, module: Any, layout: ModelLayout, *, from_anchor: bool) -> Callable[[], Any]:
    """Gives a module's carrying weights as one vector that a loss can follow: less the anchor's, or as they are."""
    torch = _torch()
    device = next(module.parameters()).device
    places = torch.from_numpy(np.arange(layout.carrier_size)[layout.carrying()]).to(device)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = [spec.name for spec, _ in layout.spans("carrier")]
    anchor = torch.cat([target.checkpoints[0][name].flatten() for name in names]).to(device) if from_anchor else 0

    def weights() -> Any:
        return (torch.cat([parameters[name].flatten() for name in names]).float() - anchor)[places]

    return weights


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
    module = target.module()
    device = next(module.parameters()).device
    guess = torch.from_numpy(estimate_key(target, estimate, coalition=coalition)).float().to(device)
    guess = guess / guess.norm().clamp_min(1e-30)
    carrying = carrying_weights(target, module, layout, from_anchor=from_anchor)

    def loss(module: Any, inputs: Any, labels: Any) -> Any:
        theta = carrying()
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
