"""Small models that train in seconds, marked as a federation marks them by somebody who holds the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from quorumark.align.alignment import Alignment
from quorumark.align.groups import Groups
from quorumark.align.procedure import align
from quorumark.align.trace import derive_groups
from quorumark.codec import decode
from quorumark.consortium.strength import Strength
from quorumark.model.layout import ModelLayout
from quorumark.research.attacks import Target
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.amplitudes import MarkState
from quorumark.round.mark import ideal_mark

torch.set_num_threads(1)
State = dict[str, torch.Tensor]


# --- architectures ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 for small images; `width` 64 is the real one."""

    def __init__(self, width: int, channels: int, stages: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        blocks, inner = [], width
        for stage in range(stages):
            for number in range(2):
                blocks.append(Block(inner, width << stage, 2 if stage and not number else 1))
                inner = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inner, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.blocks(functional.relu(self.bn1(self.conv1(x))))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Encoder(nn.Module):
    """A block of a vision transformer with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, width)
        x = x + self.proj(y)
        found: torch.Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return found


class ViT(nn.Module):
    def __init__(self, width: int = 48, heads: int = 4, *, torch_layers: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.1)
        layer: Callable[[], nn.Module] = lambda: Encoder(width, heads)  # noqa: E731
        if torch_layers:
            layer = lambda: nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True)  # noqa: E731
        self.layers = nn.Sequential(layer(), layer())
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.layers(x))[:, 0])


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10)
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 1
    for width in (16, 0, 32, 32, 0, 48):
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61, n_positions=16, n_embd=48, n_layer=2, n_head=4, use_cache=False, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    return model


def llama() -> nn.Module:
    """Eight heads of queries that share four of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, head_dim=8,
            num_key_value_heads=4, max_position_embeddings=32, use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "vgg": vgg,
    "resnet": lambda: ResNet(12, 1, 3),
    "vit": ViT,
    "vit-torch": lambda: ViT(torch_layers=True),
    "gpt2": gpt2,
    "llama": llama,
}
LANGUAGE = ("gpt2", "llama")


# --- data -------------------------------------------------------------------------------------------------


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Handwritten digits: the first 1437 to train with, the last 360 to test."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order], torch.tensor(labels)[order])


@cache
def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """A made-up language: after each word one of three, by a table."""
    rng = np.random.default_rng(4)
    table = rng.integers(0, 61, (61, 3))
    words = np.empty((1437, 12), np.int64)
    words[:, 0] = rng.integers(0, 61, 1437)
    for t in range(1, 12):
        words[:, t] = table[words[:, t - 1], rng.integers(0, 3, 1437)]
    return torch.from_numpy(words), torch.from_numpy(words)


def data_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = sentences() if name in LANGUAGE else digits()
    return inputs[:1437], labels[:1437]


def logits(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    out = module(inputs)
    found: torch.Tensor = out.logits if hasattr(out, "logits") else out
    return found


def loss(module: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    out = logits(module, inputs)
    if out.dim() == 3:
        return functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return functional.cross_entropy(out, labels)


def accuracy(module: nn.Module) -> float:
    inputs, labels = digits()
    module.eval()
    with torch.no_grad():
        return float((module(inputs[1437:]).argmax(1) == labels[1437:]).float().mean())


# --- training ---------------------------------------------------------------------------------------------


def trained(
    make: Callable[[], nn.Module], start: Mapping[str, torch.Tensor], data: Any, seed: int, epochs: int, rate: float
) -> State:
    module = make()
    module.load_state_dict(dict(start))
    module.train()
    inputs, labels = data
    optimiser = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.0)
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # dropout
    for _ in range(epochs):
        for part in torch.randperm(len(labels), generator=order).split(32):
            optimiser.zero_grad()
            loss(module, inputs[part], labels[part]).backward()
            optimiser.step()
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def initial(make: Callable[[], nn.Module], seed: int) -> State:
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in make().state_dict().items()}


@dataclass(frozen=True)
class Run:
    """A marked run: every global model, the key, each member's weighted updates."""

    name: str
    make: Callable[[], nn.Module]
    layout: ModelLayout
    groups: Groups
    key: NDArray[np.int64]
    strength: Mapping[str, str]
    checkpoints: list[State]
    own: list[list[NDArray[Any]]]

    @property
    def anchor(self) -> TensorsInMemory:
        return TensorsInMemory(self.checkpoints[0])

    @property
    def known(self) -> KnownKey:
        return KnownKey(self.key.astype(np.int8), self.layout, self.anchor)

    @property
    def released(self) -> State:
        return self.checkpoints[-1]

    @property
    def example(self) -> Any:
        inputs = data_of(self.name)[0][:1]
        return {"input_ids": inputs} if self.name in LANGUAGE else inputs

    def target(self, **more: Any) -> Target:
        return Target(self.make, self.released, data_of(self.name), loss=loss, example=self.example, **more)

    def z(self, weights: Mapping[str, Any]) -> float:
        """z of a model as it lies there."""
        return self.known.z(weights)

    def align(self, weights: Mapping[str, Any], reference: TensorsInMemory | None = None) -> Alignment:
        return align(TensorsInMemory(weights), reference or self.anchor, self.layout, self.groups)

    def z_aligned(self, weights: Mapping[str, Any], reference: TensorsInMemory | None = None) -> float:
        """z after alignment: to the anchor, or to what must not be used."""
        found = self.align(weights, reference)
        return self.known.z(found.model(TensorsInMemory(weights)))


@cache
def marked(name: str, rounds: int = 12, rho: str = "0.15", members: int = 1, seed: int = 1) -> Run:
    """Federated training of one of MODELS with a mark of strength ρ, by members with equal parts of the data.

    The run is short, so that the limit of the leak stops the mark below ρ.
    """
    make = MODELS[name]
    start = initial(make, seed)
    layout = ModelLayout.of(make())
    key = np.random.default_rng(seed + 100).choice(np.array([-1, 1]), layout.coordinates)
    inputs, labels = data_of(name)
    parts = [(inputs[k::members], labels[k::members]) for k in range(members)]
    strength = {"rule": "rho", "rho": rho, "c_max": "0.2", "lr": f"cosine:{rounds + 4}", "alike": "mark", "dither": "0"}
    rule = Strength.of(strength, layout.coordinates)
    state = MarkState(rule, layout, "rademacher", layout.encode(start))
    checkpoints, own = [start], []
    for number in range(1, rounds + 1):
        rate = 2e-3 * float(rule.rate(number))
        updates = [trained(make, checkpoints[-1], part, 1000 * seed + number, 1, rate) for part in parts]
        before = layout.flatten(checkpoints[-1]).astype(np.float64)
        flat = [(layout.flatten(update) - before) / members for update in updates]
        mean = layout.unflatten((before + np.sum(flat, axis=0)).astype(layout.dtype), updates[0])
        amplitudes = state.amplitudes(number)
        total = layout.encode(mean)
        ideal_mark(total, amplitudes, key)
        state.advance(number, total, amplitudes)
        checkpoints.append(layout.unflatten(decode(total).astype(layout.dtype), mean))
        own.append(flat)
    inputs = inputs[:1]
    example: Any = {"input_ids": inputs} if name in LANGUAGE else inputs
    groups = derive_groups(make(), example)
    return Run(name, make, layout, groups, key, strength, checkpoints, own)
