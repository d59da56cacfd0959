"""A small model with every kind of tensor, and the files that it may come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark.model.layout import BFLOAT16, ModelLayout, write_safetensors


def model() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    bits = (rng.standard_normal((4, 6)).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    return {
        "conv.weight": rng.standard_normal((5, 3, 2, 2)).astype(np.float32),
        "conv.bias": rng.standard_normal(5).astype(np.float32),
        "half.weight": rng.standard_normal((7, 3)).astype(np.float16),
        "brain.weight": bits.view(BFLOAT16),
        "wide.weight": rng.standard_normal((3, 4)),
        "head.weight": rng.standard_normal((2, 9)).astype(np.float32),
        "temperature": np.array(0.5, np.float32),
        "steps": np.array(17, np.int64),
    }


LAYOUT = ModelLayout.of(model())


torch = pytest.importorskip("torch")


def to_torch(tensors: dict[str, NDArray[Any]]) -> dict[str, Any]:
    return {
        name: torch.from_numpy(t.view(np.int16)).view(torch.bfloat16) if t.dtype == BFLOAT16 else torch.from_numpy(t)
        for name, t in tensors.items()
    }


def halves(tensors: dict[str, Any]) -> list[dict[str, Any]]:
    names = sorted(tensors)
    return [{n: tensors[n] for n in names[:4]}, {n: tensors[n] for n in names[4:]}]


def write_index(folder: Path, shards: dict[str, dict[str, Any]], name: str) -> None:
    claims = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": claims}))


def as_safetensors(folder: Path) -> Path:
    write_safetensors(model(), folder / "ours.safetensors")
    return folder / "ours.safetensors"


def as_shards(folder: Path) -> Path:
    shards = {f"model-0000{i + 1}-of-00002.safetensors": part for i, part in enumerate(halves(model()))}
    for name, part in shards.items():
        write_safetensors(part, folder / name)
    write_index(folder, shards, "model.safetensors.index.json")
    (folder / "config.json").write_text("{}")
    return folder


def as_index(folder: Path) -> Path:
    return as_shards(folder) / "model.safetensors.index.json"


def as_files_without_index(folder: Path) -> Path:
    for i, part in enumerate(halves(model())):
        write_safetensors(part, folder / f"part{i}.safetensors")
    return folder


def as_hugging_face(folder: Path) -> Path:
    write_safetensors(model(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"not weights")
    return folder


def as_torch_folder(folder: Path) -> Path:
    torch.save(to_torch(model()), folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    return folder


def as_torch_shards(folder: Path) -> Path:
    tensors = model()
    biases = {name: tensors.pop(name) for name in ("conv.bias", "temperature", "steps")}  # a shard of no matrices
    shards = {"pytorch_model-1.bin": tensors, "pytorch_model-2.bin": biases}
    for name, part in shards.items():
        torch.save(to_torch(part), folder / name)
    write_index(folder, shards, "pytorch_model.bin.index.json")
    return folder


def as_pt(folder: Path) -> Path:
    torch.save(to_torch(model()), folder / "ours.pt")
    return folder / "ours.pt"


def as_old_pt(folder: Path) -> Path:
    torch.save(to_torch(model()), folder / "old.pth", _use_new_zipfile_serialization=False)
    return folder / "old.pth"


def as_checkpoint(folder: Path) -> Path:
    moments = {"state": {0: {"exp_avg": torch.ones(3, 3)}}, "param_groups": [{"lr": 0.1}]}
    body = {"state_dict": to_torch(model()), "optimizer": moments, "epoch": 3, "best": torch.tensor(0.5)}
    torch.save(body, folder / "last.pt")
    return folder / "last.pt"


def as_npz(folder: Path) -> Path:
    np.savez(folder / "ours.npz", **model())  # type: ignore[arg-type]
    return folder / "ours.npz"


def as_compressed_npz(folder: Path) -> Path:
    np.savez_compressed(folder / "ours.npz", **model())  # type: ignore[arg-type]
    return folder / "ours.npz"


def as_npy(folder: Path) -> Path:
    for name, tensor in model().items():
        np.save(folder / f"{name}.npy", tensor)
    return folder


def as_columns(folder: Path) -> Path:
    """Column by column, and with the most significant byte first."""
    for name, tensor in model().items():
        other = tensor if tensor.dtype == BFLOAT16 else tensor.astype(tensor.dtype.newbyteorder(">"))
        np.save(folder / f"{name}.npy", np.array(other, order="F"))
    return folder
