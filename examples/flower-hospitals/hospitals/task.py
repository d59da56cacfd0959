"""The model, the data and local training: nothing here knows of watermarks."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

EXAMPLES = (437, 350, 280, 220, 150)
TEST = 360


class Net(nn.Sequential):
    """A small convolutional network: 283,000 weights carry the mark."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * 4 * 4, 256), nn.ReLU(),
            nn.Linear(256, 10),
        )  # fmt: skip


def initial_model() -> Net:
    """The public model that the run begins with."""
    torch.manual_seed(2026)
    return Net()


def load_data(partition: int | None, file: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A hospital's digits, from its own file or by its number; with neither, those that the server tests with."""
    if file is not None:
        with np.load(file) as kept:
            return torch.from_numpy(kept["inputs"]), torch.from_numpy(kept["labels"])
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    part = torch.split(order, [TEST, *EXAMPLES])[0 if partition is None else partition + 1]
    inputs = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return inputs[part], torch.tensor(labels)[part]


def train(model: Net, data: tuple[torch.Tensor, torch.Tensor], epochs: int, rate: float) -> float:
    """AdamW on shuffled batches; the last loss."""
    inputs, labels = data
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    loss = torch.zeros(())
    for _ in range(epochs):
        for part in torch.randperm(len(labels)).split(32):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[part]), labels[part])
            loss.backward()
            optimiser.step()
    return float(loss.detach())


def test(model: Net, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Loss and accuracy."""
    inputs, labels = data
    with torch.no_grad():
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
    return float(loss), float((logits.argmax(1) == labels).float().mean())
