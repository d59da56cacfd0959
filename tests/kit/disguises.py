"""Models whose owners must be found although somebody changed how they look: permuted channels, merged adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quorumark.align.groups import Group, Groups, Slot
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.verify.reference import Reference, describe_lora
from tests.kit.consortium import Tensors, World, make_world

# the model of `consortium.anchor_model`: 60 channels of the convolution, of which fc reads two places each
CHANNELS = Group(60, (Slot("conv.weight", 0, 0, 1, 1, 1), Slot("fc.weight", 1, 0, 2, 2, 1)))
GROUPS = Groups((CHANNELS,))


def permuted(model: Tensors, seed: int = 5) -> Tensors:
    """Channels permuted and rescaled: the same function, and another model to who compares weights."""
    rng = np.random.default_rng(seed)
    order, scale = rng.permutation(60), np.exp2(rng.integers(-3, 4, 60)).astype(np.float32)
    return {
        "conv.weight": (model["conv.weight"] * scale[:, None, None, None])[order],
        "fc.weight": (model["fc.weight"].reshape(80, 60, 2) / scale[:, None])[:, order].reshape(80, 120),
        "fc.bias": model["fc.bias"],
    }


def aligned_world(folder: Path, members: int = 5, threshold: int = 3, rho: float = 0.35) -> World:
    """A consortium that agreed on groups; groups.json is beside the manifest, and in no member's home."""
    (folder / "groups.json").write_bytes(GROUPS.to_bytes())
    return make_world(folder, members, threshold, rho, policy={"z": "6", "groups": GROUPS.digest()})


# --- adapters ---------------------------------------------------------------------------------------------


RANK = 8
LAYERS = {"q": (96, 128), "up": (160, 128), "down": (128, 160)}
_PEFT = "base_model.model.model.layers.0."


def base_model() -> Tensors:
    rng = np.random.default_rng(1)
    return {
        f"model.layers.0.{name}.weight": (0.05 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in LAYERS.items()
    }


def adapter(seed: int | None = None) -> Tensors:
    """As PEFT begins (A uniform, B zero), or what somebody trained from that."""
    rng = np.random.default_rng(2)
    model: Tensors = {}
    for name, (rows, columns) in LAYERS.items():
        model[f"{_PEFT}{name}.lora_A.weight"] = (rng.uniform(-1, 1, (RANK, columns)) / 11).astype(np.float32)
        model[f"{_PEFT}{name}.lora_B.weight"] = np.zeros((rows, RANK), np.float32)
    if seed is None:
        return model
    rng = np.random.default_rng([3, seed])
    return {name: (w + 0.04 * rng.standard_normal(w.shape)).astype(np.float32) for name, w in model.items()}


def turned(trained: Tensors, seed: int) -> Tensors:
    """Other factors of the same products."""
    rng, model = np.random.default_rng(seed), dict(trained)
    for name in LAYERS:
        turn = np.linalg.qr(rng.standard_normal((RANK, RANK)))[0] * 3
        down, up = f"{_PEFT}{name}.lora_A.weight", f"{_PEFT}{name}.lora_B.weight"
        model[down] = (turn @ trained[down]).astype(np.float32)
        model[up] = (trained[up] @ np.linalg.inv(turn)).astype(np.float32)
    return model


def merged(trained: Tensors) -> Tensors:
    """The base with the adapter added: a whole model."""
    model = base_model()
    for name in LAYERS:
        down, up = trained[f"{_PEFT}{name}.lora_A.weight"], trained[f"{_PEFT}{name}.lora_B.weight"]
        whole = f"model.layers.0.{name}.weight"
        model[whole] = (model[whole] + 2 * up @ down).astype(np.float32)
    return model


def adapter_world(folder: Path, members: int = 5, threshold: int = 3) -> World:
    """A consortium whose mark is in an adapter; lora.json and the base are beside the manifest, and in no home."""
    lora = describe_lora(ModelLayout.of(adapter()), base_model())
    policy = {"z": "6", "lora": lora.digest()}
    made = make_world(folder, members, threshold, 0.3, models=(adapter(), adapter(1)), policy=policy)
    (folder / "lora.json").write_bytes(lora.to_bytes())
    write_safetensors(base_model(), folder / "base.safetensors")
    made.reference = Reference.read(folder / "consortium.json")
    return made
