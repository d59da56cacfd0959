"""The lab's networks. Their parameters have the names that PyTorch users know from these architectures.

BatchNorm's count of batches stays where it is: nothing here uses it, and it would cost a kernel per layer and step.
Weights of convolutions and linear layers may be in bfloat16; everything with one dimension stays in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from quorumark.errors import InputError

__all__ = ["MODELS", "make"]


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that leaves `num_batches_tracked` alone. In training on CUDA it has kernels of its own."""

    def forward(self, x: Tensor, shortcut: Tensor | None = None, *, cut: bool = False) -> Tensor:
        """x normalised, plus a shortcut if given; with `cut`, what is below 0 becomes 0."""
        mean, variance = self.running_mean, self.running_var
        if self.training and x.is_cuda:
            from quorumark.research.lab import _norms

            running: Any = (mean, variance)
            return _norms.norm(x, shortcut, self.weight, self.bias, running, cut=cut, eps=self.eps)
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, self.training, 0.1, self.eps)
        if shortcut is not None:
            x = x + shortcut
        return F.relu(x) if cut else x


class Linear(nn.Linear):
    """A linear layer whose shift may be more precise than the rest."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias.to(x.dtype))


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, outputs, 3, stride), BatchNorm(outputs)
        self.conv2, self.bn2 = _conv(outputs, outputs), BatchNorm(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(_conv(inputs, outputs, 1, stride), BatchNorm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x), cut=True)
        return self.bn2(self.conv2(out), self.downsample(x), cut=True)  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """ResNet-18 for small images: a 3×3 stem and no pooling before the blocks. 11.2 million parameters."""

    def __init__(self, classes: int, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, width), BatchNorm(width)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.fc = Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x), cut=True)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


_VGG = {
    "vgg11": "64 M 128 M 256 256 M 512 512 M 512 512 M",
    "vgg16": "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M",
}


class VGG(nn.Module):
    """VGG with batch normalisation and one linear layer, for images of 32×32 or larger."""

    def __init__(self, name: str, classes: int, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for word in _VGG[name].split():
            if word == "M":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [_conv(channels, int(word)), BatchNorm(int(word)), nn.ReLU()]
                channels = int(word)
        self.features = nn.Sequential(*layers)
        self.classifier = Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class SmallCNN(nn.Module):
    """Two convolutions with batch normalisation and two linear layers: for small grey images and tests."""

    def __init__(self, classes: int, channels: int = 1, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, width), BatchNorm(width)
        self.conv2, self.bn2 = _conv(width, 2 * width, stride=2), BatchNorm(2 * width)
        self.fc1, self.fc2 = Linear(2 * width, 4 * width), Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn2(self.conv2(self.bn1(self.conv1(x), cut=True)), cut=True)
        return self.fc2(F.relu(self.fc1(x.mean(dim=(2, 3)))))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """One hidden layer, for the smallest tests."""

    def __init__(self, classes: int, inputs: int, width: int = 64) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(inputs, width), Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {  # from (classes, channels, image size)
    "resnet18": lambda classes, channels, _size: ResNet18(classes, channels),
    "resnet18-tiny": lambda classes, channels, _size: ResNet18(classes, channels, 8),
    "vgg11": lambda classes, channels, _size: VGG("vgg11", classes, channels),
    "vgg16": lambda classes, channels, _size: VGG("vgg16", classes, channels),
    "cnn": lambda classes, channels, _size: SmallCNN(classes, channels),
    "mlp": lambda classes, channels, size: MLP(classes, channels * size * size),
}


def make(name: str, classes: int, channels: int, size: int, seed: int) -> nn.Module:
    """A network with its usual random initialisation, drawn from a seed on the CPU: the same on every machine."""
    if name not in MODELS:
        raise InputError("model", f"must be one of {', '.join(MODELS)}", repr(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](classes, channels, size)
