"""How fine should blocks be? The tables of docs/layers.md: python -m tests.kit.block_sizes [mlp cnn gpt2]

Small models that five members train with ρ = 0.1 in 20 rounds, without dither; attacked on 20 % of the data, 60 epochs.
For each attacked model: accuracy (or loss), z, and log10 of the bound of Q for blocks of several sizes. Takes minutes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from quorumark.consortium.strength import Strength
from quorumark.model.blocks import blocks_of, cut_blocks
from quorumark.research.attacks import Target, public_scales, run
from quorumark.research.known import TensorsInMemory
from quorumark.verify.null import log10_layers
from tests.kit import lab

SIZES = (1024, 2048, 4096, 8192, 16384)
TRAINED: dict[str, Any] = {"seed": 1, "fraction": 0.2, "epochs": 60}


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 192), nn.ReLU(), nn.Linear(192, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 112), nn.ReLU(), nn.Linear(112, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        "vocab_size": 61,
        "n_positions": 16,
        "n_embd": 80,
        "n_layer": 2,
        "n_head": 4,
        "use_cache": False,
    }
    settings |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**settings))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"wide-mlp": _mlp, "wide-cnn": _cnn, "wide-gpt2": _gpt2}


def _worth(marked: lab.Run, weights: Any) -> float:
    module = marked.make()
    module.load_state_dict(weights)
    if marked.name not in lab.LANGUAGE:
        return lab.accuracy(module)
    with torch.no_grad():
        return float(lab.loss(module.eval(), *(part[:300] for part in lab.data_of(marked.name))))


def _told(marked: lab.Run, what: str, weights: Any) -> str:
    form = marked.known.form(TensorsInMemory(weights))
    bounds = []
    for size in SIZES:
        z = [float(form.x[s].astype(float) @ marked.key[s]) / float(np.linalg.norm(form.x[s].astype(float)))
             for s in cut_blocks(marked.layout, size, size).spans]  # fmt: skip
        bounds.append(log10_layers(f"{sum(one * one for one in z):.2f}", len(z)))
    return f"{what}: {_worth(marked, weights):.3f}, z {marked.known.z_of(form):.1f}, {', '.join(bounds)}"


def _oracle(marked: lab.Run, weights: Any) -> list[float]:
    return marked.known.z_by_block(marked.known.form(TensorsInMemory(weights)))


def main(*names: str) -> None:
    lab.MODELS.update(MODELS)
    setattr(lab, "LANGUAGE", (*lab.LANGUAGE, "wide-gpt2"))  # noqa: B010
    torch.set_num_threads(1)
    for name in names or ("mlp", "cnn", "gpt2"):
        marked = lab.marked(f"wide-{name}", rounds=20, rho="0.1", members=5)
        layout = marked.layout
        print(f"{name}: d = {layout.coordinates}, {blocks_of(layout).count} blocks; sizes {SIZES}")  # noqa: T201
        scales = public_scales(layout, Strength.of(marked.strength, layout.coordinates), marked.checkpoints)
        plain = marked.target(checkpoints=marked.checkpoints, scales=scales, layout=layout)
        plain = replace(plain, oracle=partial(_oracle, marked))
        helped = replace(plain, own=[np.sum(updates[:2], axis=0) for updates in marked.own])
        print(_told(marked, "as released", marked.released), flush=True)  # noqa: T201
        for attack, settings in _tried():
            target: Target = helped if settings.get("coalition") else plain
            weights = run(attack, target, **TRAINED, **settings).weights
            print(_told(marked, f"{attack} {settings}", weights), flush=True)  # noqa: T201


def _tried() -> list[tuple[str, dict[str, Any]]]:
    who = [{"estimate": how, "coalition": c} for how in ("sum", "regression", "gls") for c in (False, True)]
    found: list[tuple[str, dict[str, Any]]] = [("fine-tuning", {})]
    for some, alpha in itertools.product(who, (0.5, 0.7, 0.9)):
        found.append(("adaptive-fine-tuning", {**some, "alpha": alpha, "from_anchor": True}))
    for some, by, alpha in itertools.product(who, ("block", "row"), (0.5, 0.9)):
        found.append(("adaptive-by-part", {**some, "by": by, "alpha": alpha}))
    for some, amounts in itertools.product(who[2:], ("expected", "oracle")):
        found.append(("removal", {**some, "amounts": amounts, "rho": 0.1}))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
