"""Local training with PyTorch, as a function from (weights, data) to weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def torch_train(
    make: Callable[[], Any],
    *,
    epochs: int = 1,
    batch: int = 32,
    learning_rate: float = 1e-3,
    decay: float = 0.0,
) -> Callable[..., dict[str, Any]]:
    """A `train` for classifiers: AdamW on shuffled batches. `make` gives the module; data are (inputs, labels).

    The order of the data comes from the seed that the federation hands over, by default from the operating system; the
    learning rate follows the manifest's table.
    """

    def train(weights: Mapping[str, Any], data: tuple[Any, Any], seed: int, rate: float = 1.0) -> dict[str, Any]:
        module = make()
        module.load_state_dict(weights)
        module.train()
        inputs, labels = data
        optimiser = torch.optim.AdamW(module.parameters(), lr=learning_rate * rate, weight_decay=decay)
        order = torch.Generator().manual_seed(seed & (1 << 63) - 1)
        for _ in range(epochs):
            for part in torch.randperm(len(labels), generator=order).split(batch):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(module(inputs[part]), labels[part]).backward()
                optimiser.step()
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    return train


def torch_evaluate(make: Callable[[], Any], data: tuple[Any, Any]) -> Callable[[Mapping[str, Any]], dict[str, float]]:
    """An `evaluate` for classifiers: accuracy and mean loss."""

    def evaluate(weights: Mapping[str, Any]) -> dict[str, float]:
        module = make()
        module.load_state_dict(weights)
        module.eval()
        inputs, labels = data
        with torch.no_grad():
            logits = module(inputs)
            loss = torch.nn.functional.cross_entropy(logits, labels)
            right = (logits.argmax(dim=1) == labels).float().mean()
        return {"accuracy": float(right), "loss": float(loss)}

    return evaluate
