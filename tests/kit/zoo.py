"""Small models of the architectures that people train, each of at most 100,000 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.kit import lab

Norm = Callable[[int], nn.Module]


def _group_norm(groups: int) -> Norm:
    return lambda channels: nn.GroupNorm(groups, channels, eps=1e-9)  # so that a rescaled model is the same to 1e-5


class Residual(nn.Module):
    """ResNet's basic block with any norm."""

    def __init__(self, inner: int, outer: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), norm(outer)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), norm(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), norm(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, norm: Norm, width: int = 16) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, 1, 1, bias=False), norm(width)
        self.blocks = nn.Sequential(
            Residual(width, width, 1, norm),
            Residual(width, 2 * width, 2, norm),
            Residual(2 * width, 2 * width, 1, norm),
        )
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.blocks(functional.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Inverted(nn.Module):
    """The block of MobileNetV2, or with squeeze-and-excitation and SiLU that of EfficientNet."""

    def __init__(self, inner: int, outer: int, stride: int, *, excite: bool) -> None:
        super().__init__()
        hidden = 4 * inner
        self.same = stride == 1 and inner == outer
        self.expand, self.norm1 = nn.Conv2d(inner, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.act: nn.Module = nn.SiLU() if excite else nn.ReLU6()
        self.squeeze: nn.Module | None = nn.Conv2d(hidden, 8, 1) if excite else None
        self.excite: nn.Module | None = nn.Conv2d(8, hidden, 1) if excite else None
        self.project, self.norm3 = nn.Conv2d(hidden, outer, 1, bias=False), nn.BatchNorm2d(outer)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.expand(x)))
        y = self.act(self.norm2(self.depthwise(y)))
        if self.squeeze is not None and self.excite is not None:
            y = y * torch.sigmoid(self.excite(functional.silu(self.squeeze(functional.adaptive_avg_pool2d(y, 1)))))
        y = self.norm3(self.project(y))
        found: Tensor = x + y if self.same else y
        return found


class MobileNet(nn.Module):
    def __init__(self, *, excite: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        shapes = ((16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 24, 1))
        self.blocks = nn.Sequential(*(Inverted(*shape, excite=excite) for shape in shapes))
        self.last, self.norm_last = nn.Conv2d(24, 96, 1, bias=False), nn.BatchNorm2d(96)
        self.act: nn.Module = nn.SiLU() if excite else nn.ReLU6()
        self.fc = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.blocks(self.act(self.norm(self.stem(x))))
        return self.fc(self.act(self.norm_last(self.last(x))).mean((2, 3)))


class Dense(nn.Module):
    """A layer of DenseNet: what it computes is put beside what it read."""

    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inner), nn.Conv2d(inner, 32, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(32), nn.Conv2d(32, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(functional.relu(self.norm2(y)))], 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.one = nn.Sequential(Dense(16, 16), Dense(32, 16))
        self.norm1, self.between = nn.BatchNorm2d(48), nn.Conv2d(48, 24, 1, bias=False)
        self.two = nn.Sequential(Dense(24, 16), Dense(40, 16))
        self.norm2, self.fc = nn.BatchNorm2d(56), nn.Linear(56, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.one(self.stem(x))
        x = functional.avg_pool2d(self.between(functional.relu(self.norm1(x))), 2)
        return self.fc(functional.relu(self.norm2(self.two(x))).mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(functional.gelu(self.up(y)))
        found: Tensor = x + y.permute(0, 3, 1, 2)
        return found


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 24, 2, 2)
        self.one = nn.Sequential(ConvNeXtBlock(24), ConvNeXtBlock(24))
        self.norm, self.between = nn.GroupNorm(1, 24, eps=1e-9), nn.Conv2d(24, 40, 2, 2)
        self.two = ConvNeXtBlock(40)
        self.norm_last, self.fc = nn.LayerNorm(40, eps=1e-9), nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.two(self.between(self.norm(self.one(self.stem(x)))))
        return self.fc(self.norm_last(x.mean((2, 3))))


class Bottleneck(nn.Module):
    """ResNeXt's: the convolution in the middle has four groups."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        hidden = outer
        self.conv1, self.norm1 = nn.Conv2d(inner, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=4, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.conv3, self.norm3 = nn.Conv2d(hidden, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(Bottleneck(32, 32, 1), Bottleneck(32, 64, 2), Bottleneck(64, 64, 1))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.blocks(functional.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Twice(nn.Module):
    """Two convolutions with norms, as every level of a U-Net has."""

    def __init__(self, inner: int, outer: int, volume: bool) -> None:
        super().__init__()
        conv: Any = nn.Conv3d if volume else nn.Conv2d
        norm: Norm = nn.BatchNorm2d
        if volume:
            norm = lambda channels: nn.InstanceNorm3d(channels, affine=True, eps=1e-9)  # noqa: E731
        self.conv1, self.norm1 = conv(inner, outer, 3, padding=1), norm(outer)
        self.conv2, self.norm2 = conv(outer, outer, 3, padding=1), norm(outer)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(self.norm1(self.conv1(x)), 0.01)
        return functional.leaky_relu(self.norm2(self.conv2(x)), 0.01)


class UNet(nn.Module):
    """Which pixels belong to the digit: every pixel gets one of two classes."""

    def __init__(self, up: str, volume: bool = False) -> None:
        super().__init__()
        a, b = (8, 16) if volume else (16, 32)
        self.down, self.bottom, self.join = Twice(1, a, volume), Twice(a, b, volume), Twice(a + a, a, volume)
        self.pool: nn.Module = nn.MaxPool3d(2) if volume else nn.MaxPool2d(2)
        transposed: Any = nn.ConvTranspose3d if volume else nn.ConvTranspose2d
        conv: Any = nn.Conv3d if volume else nn.Conv2d
        if up == "transposed":
            self.up: nn.Module = transposed(b, a, 2, 2)
        else:
            mode = "trilinear" if volume else "bilinear"
            self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode=mode), conv(b, a, 1))
        self.out = conv(a, 2, 1)

    def forward(self, x: Tensor) -> Any:
        left = self.down(x)
        return self.out(self.join(torch.cat([left, self.up(self.bottom(self.pool(left)))], 1)))


class Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self, kind: Any, width: int, layers: int, both_ways: bool = False) -> None:
        super().__init__()
        self.rnn: nn.Module = kind(8, width, layers, batch_first=True, bidirectional=both_ways)
        self.fc = nn.Linear(width * (2 if both_ways else 1), 10)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.rnn(x.flatten(1, 2))[0][:, -1])


class ExpertModules(nn.Module):
    """A layer of experts, of which the best two compute for each input."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.gate(x), -1).topk(2)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            found = found.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return found


class ExpertStack(nn.Module):
    """The same with all experts in two tensors."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        hidden = torch.relu(torch.bmm(x.expand(len(self.up), -1, -1), self.up))
        return (torch.bmm(hidden, self.down) * weights.T[:, :, None]).sum(0)


class Mixture(nn.Module):
    def __init__(self, layer: Callable[[int, int, int], nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm, self.moe = nn.Linear(64, 48), nn.LayerNorm(48), layer(48, 64, 4)
        self.norm_last, self.fc = nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x.flatten(1))
        return self.fc(self.norm_last(x + self.moe(self.norm(x))))


class Translator(nn.Module):
    """PyTorch's own encoder and decoder, trained to say a sentence again."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.heard, self.said = nn.Embedding(61, width), nn.Embedding(61, width)
        self.places = nn.Parameter(torch.randn(1, 12, width) * 0.1)
        self.both = nn.Transformer(width, 4, 1, 1, 2 * width, 0.0, "relu", batch_first=True)
        self.out = nn.Linear(width, 61)

    def forward(self, x: Tensor) -> Any:
        heard, said = self.heard(x) + self.places, self.said(functional.pad(x[:, :-1], (1, 0)))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(heard.dtype)
        return self.out(self.both(heard, said, tgt_mask=mask, tgt_is_causal=True))


class Graph(nn.Module):
    """A graph network: pixels are nodes, each averages what its neighbours have."""

    near: Tensor
    at: Tensor

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        at = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), -1).reshape(64, 2)
        near = ((at[:, None] - at).abs().amax(-1) <= 1).float()
        self.register_buffer("near", near / near.sum(1, keepdim=True), persistent=False)
        self.first, self.second, self.third = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("at", at.float() / 8, persistent=False)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Any:
        x = torch.cat([x.flatten(1)[:, :, None], self.at.expand(len(x), -1, -1).to(x)], 2)
        for layer in (self.first, self.second, self.third):
            x = functional.relu(self.near.to(x) @ layer(x))
        return self.fc(x.mean(1))


def weight_normed() -> nn.Module:
    from torch.nn.utils.parametrizations import weight_norm

    return nn.Sequential(
        weight_norm(nn.Conv2d(1, 24, 3, padding=1)), nn.ReLU(), nn.MaxPool2d(2),
        weight_norm(nn.Conv2d(24, 32, 3, padding=1)), nn.ReLU(), nn.Flatten(),
        weight_norm(nn.Linear(512, 64)), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lab.mlp,
    "vgg": lab.vgg,
    "resnet-bn": lambda: ResNet(nn.BatchNorm2d),
    "resnet-gn1": lambda: ResNet(_group_norm(1)),
    "resnet-gn8": lambda: ResNet(_group_norm(8)),
    "mobilenetv2": lambda: MobileNet(excite=False),
    "efficientnet": lambda: MobileNet(excite=True),
    "densenet": DenseNet,
    "convnext": ConvNeXt,
    "resnext": ResNeXt,
    "unet-transposed": lambda: UNet("transposed"),
    "unet-bilinear": lambda: UNet("bilinear"),
    "unet-3d": lambda: UNet("transposed", volume=True),
    "lstm": lambda: Recurrent(nn.LSTM, 48, 2),
    "lstm-both-ways": lambda: Recurrent(nn.LSTM, 32, 2, both_ways=True),
    "gru": lambda: Recurrent(nn.GRU, 48, 2),
    "experts-modules": lambda: Mixture(ExpertModules),
    "experts-stacked": lambda: Mixture(ExpertStack),
    "vit": lab.ViT,
    "gpt2": lab.gpt2,
    "llama": lab.llama,
    "encoder-decoder": Translator,
    "graph": Graph,
    "weight-norm": weight_normed,
}
WORDS = ("gpt2", "llama", "encoder-decoder")
PIXELS = ("unet-transposed", "unet-bilinear", "unet-3d")


def data_of(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Digits, sentences, or noisy digits with the class of every pixel."""
    if name in WORDS:
        words, _ = lab.sentences()
        return words[:count], words[:count]
    pixels, labels = lab.digits()
    pixels, labels = pixels[:count], labels[:count]
    if name not in PIXELS:
        return pixels, labels
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(6))
    if name == "unet-3d":
        depth = torch.tensor([0.5, 1.0, 1.0, 0.5])[:, None, None]
        pixels, noise = pixels[:, :, None] * depth, noise[:, :, None].expand(-1, -1, 4, -1, -1)
    return pixels + 0.3 * noise, (pixels[:, 0] > 0.4).long()


def loss(name: str, module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    out = lab.logits(module, inputs)
    if name in ("gpt2", "llama"):
        return functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return (
        functional.cross_entropy(out.flatten(0, 1), labels.flatten())
        if name in WORDS
        else (functional.cross_entropy(out, labels))
    )
