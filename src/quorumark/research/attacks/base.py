"""What all attacks share: what the attacker has, what comes out, and modules of other sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from quorumark.align.groups import Groups
from quorumark.errors import InputError, MissingDependencyError
from quorumark.model.layout import ModelLayout

Weights = dict[str, Any]


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("quorumark[torch]", "attacking a model") from None
    return torch


def logits_of(module: Any, inputs: Any) -> Any:
    """What a module gives for inputs: a tensor, or keyword arguments such as a tokeniser makes."""
    out = module(**inputs) if isinstance(inputs, Mapping) else module(inputs)
    return out.logits if hasattr(out, "logits") else out


def _cross_entropy(module: Any, inputs: Any, labels: Any) -> Any:
    """Of classes; where logits and labels have a place for each word, of the next word (−100 is not counted)."""
    logits = logits_of(module, inputs)
    if logits.dim() == 3 and labels.dim() == 2:
        logits, labels = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return _torch().nn.functional.cross_entropy(logits, labels)


def same_sizes(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two models have the same tensors of the same shapes: then the same channels are coupled."""
    return {n: tuple(w.shape) for n, w in one.items()} == {n: tuple(w.shape) for n, w in other.items()}


@dataclass(frozen=True, eq=False)
class Target:
    """What an attacker has. Attacks run on the device that the weights are on.

    Attributes:
        make: gives a module of the released architecture.
        weights: the released model.
        data: (inputs, labels), the whole training set; attacks take their fraction of it. For a language model the
            inputs are words (batch × places), or a mapping of such tensors, and the labels the same words.
        checkpoints: the public global models θ_0 … θ_T of the training, the initial one first.
        scales: for each round 1 … T the public amplitudes S_r, one number for each carrying coordinate.
        own: for each round 1 … T the sum of the attacking members' own weighted updates, as a flat vector.
        other: a second model of the architecture, for averaging.
        base: the model that training began with, for merging; the anchor is public.
        loss: of (module, inputs, labels); cross-entropy of classes, or of the next word, if not given.
        example: an input to find groups with; one of the data if not given.
        oracle: tells an attacker z of each block of a model, as only somebody with the key could: the worst case.
        known: the coupled channels, where they have been found before: it takes a while for a large model.
    """

    make: Callable[[], Any]
    weights: Mapping[str, Any]
    data: tuple[Any, Any] | None = None
    checkpoints: Sequence[Mapping[str, Any]] = ()
    scales: Sequence[Any] = ()
    own: Sequence[Any] = ()
    other: Mapping[str, Any] | None = None
    loss: Callable[[Any, Any, Any], Any] = _cross_entropy
    example: Any = None
    layout: ModelLayout | None = None
    base: Mapping[str, Any] | None = None
    known: Groups | None = None
    oracle: Callable[[Weights], Sequence[float]] | None = None

    def module(self, weights: Mapping[str, Any] | None = None) -> Any:
        """A module with these weights, of whatever sizes they have, where they are."""
        weights = self.weights if weights is None else weights
        return fitted(self.make(), weights).to(next(iter(weights.values())).device)

    def copied(self) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in self.weights.items()}

    def with_weights(self, weights: Mapping[str, Any]) -> Target:
        """The same with another model; channels that were coupled are so as long as all sizes stay."""
        return replace(self, weights=weights, known=self.known if same_sizes(self.weights, weights) else None)

    @cached_property
    def carriers(self) -> tuple[str, ...]:
        """The weights of its layers (matrices and kernels, no embeddings), in the module's order."""
        layout = self.layout or ModelLayout.of(self.module())
        chosen = {spec.name for spec in layout.tensors if spec.role == "carrier"}
        return tuple(name for name in self.weights if name in chosen)

    def one(self) -> Any:
        if self.example is not None:
            return self.example
        if self.data is None:
            raise InputError("target", "must have data or an example for this attack")
        inputs = self.data[0]
        return {name: part[:1].cpu() for name, part in inputs.items()} if isinstance(inputs, Mapping) else inputs[:1]

    @cached_property
    def groups(self) -> Groups:
        """The coupled channels of the model as it is now."""
        from quorumark.align.trace import derive_groups

        if self.known is not None:
            return self.known
        return derive_groups(self.module().cpu(), self.one())


@dataclass(frozen=True, eq=False)
class Result:
    """An attacked model, and what it cost: distinct examples, steps of the optimiser, seconds."""

    attack: str
    settings: Mapping[str, Any]
    seed: int
    weights: Weights
    examples: int = 0
    steps: int = 0
    seconds: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def budget(self) -> dict[str, Any]:
        """What a table of results says about it."""
        return {**self.settings, "examples": self.examples, "steps": self.steps}


@dataclass(frozen=True)
class Attack:
    """One way of attacking: `function(target, seed, **settings)` gives weights and a record of its costs.

    `settings` is a grid of what to try; `keeps` says that the function of the model does not change at all; `needs`
    names what a target must have.
    """

    name: str
    function: Callable[..., tuple[Weights, dict[str, Any]]]
    settings: tuple[Mapping[str, Any], ...] = ({},)
    needs: tuple[str, ...] = ()
    keeps: bool = False


_SIZES = {
    "Linear": ("out_features", "in_features"),
    "Conv1d": ("out_channels", "in_channels"),
    "Conv2d": ("out_channels", "in_channels"),
    "Conv1D": (None, "nf"),
    "BatchNorm1d": ("num_features",),
    "BatchNorm2d": ("num_features",),
}  # a layer's own record of its sizes, by the axes of its weight


def aliases(module: Any) -> dict[str, str]:
    """Second names of tied weights, with the first."""
    seen: dict[int, str] = {}
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            found[name] = seen[id(tensor)]
        seen.setdefault(id(tensor), name)
    return found


def kind_of(layer: Any) -> str:
    """The name of PyTorch's layer that this one is or derives from; its own if it is none that can be resized."""
    names = [base.__name__ for base in type(layer).__mro__]
    return next((name for name in names if name in _SIZES), names[0])


def fitted(module: Any, weights: Mapping[str, Any]) -> Any:
    """The module with these weights; layers whose sizes changed are changed likewise, tied ones that differ are untied.

    A second name of a tied tensor may be left out.
    """
    torch = _torch()
    module = copy.deepcopy(module)
    weights = dict(weights)
    for second, first in aliases(module).items():
        if second not in weights and first in weights:
            weights[second] = weights[first]
        elif weights[second] is not weights[first] and not torch.equal(weights[second], weights[first]):
            path, _, leaf = second.rpartition(".")
            setattr(module.get_submodule(path), leaf, torch.nn.Parameter(weights[second].detach().clone()))
            if hasattr(getattr(module, "config", None), "tie_word_embeddings"):
                module.config.tie_word_embeddings = False
    state = module.state_dict(keep_vars=True)
    for name, tensor in weights.items():
        if name not in state or tuple(state[name].shape) == tuple(tensor.shape):
            continue
        path, _, leaf = name.rpartition(".")
        layer = module.get_submodule(path)
        kind = kind_of(layer)
        if kind not in _SIZES:
            raise InputError(
                f"tensor {name!r}", f"must keep its shape: a {kind} cannot be resized", tuple(tensor.shape)
            )
        values = tensor.detach().clone()
        setattr(layer, leaf, torch.nn.Parameter(values) if leaf in layer._parameters else values)
        if leaf == "weight":
            for size, attribute in zip(tensor.shape, _SIZES[kind], strict=False):
                if attribute is not None:
                    setattr(layer, attribute, int(size))
    module.load_state_dict(weights)
    return module
