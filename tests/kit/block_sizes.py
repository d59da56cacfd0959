"""Small models and their attackers, for the tables of docs/layers.md: `python -m benchmarks.layers` keeps the results.

Five members train them with ρ = 0.1 in 20 rounds, without dither; attacks have 20 % of the data and 60 epochs. For each
attacked model: accuracy (or loss), z, Q and log10 of its bound, for blocks of several sizes as well.
`python -m tests.kit.block_sizes [mlp cnn gpt2]` prints them. Takes minutes for each model.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
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


def _told(marked: lab.Run, weights: Any) -> dict[str, Any]:
    """Accuracy (or loss), z, Q by the agreed blocks with log10 of its bound; that log10 for other blocks."""
    form = marked.known.form(TensorsInMemory(weights))
    bounds = {}
    for size in SIZES:
        z = [float(form.x[s].astype(float) @ marked.key[s]) / float(np.linalg.norm(form.x[s].astype(float)))
             for s in cut_blocks(marked.layout, size, size).spans]  # fmt: skip
        bounds[str(size)] = float(log10_layers(f"{sum(one * one for one in z):.2f}", len(z)))
    tensors = [float(form.x[s].astype(float) @ marked.key[s]) / float(np.linalg.norm(form.x[s].astype(float)))
               for _, s in marked.layout.spans("carrier")]  # fmt: skip
    bounds["tensors"] = float(log10_layers(f"{sum(one * one for one in tensors):.2f}", len(tensors)))
    q, log10_q = marked.known.q_of(form) or (0.0, 0.0)
    worth, z_all = _worth(marked, weights), marked.known.z_of(form)
    return {"worth": round(worth, 4), "z": round(z_all, 2), "q": round(q, 1), "log10_q": log10_q, "by_size": bounds}


def _oracle(marked: lab.Run, weights: Any) -> list[float]:
    return marked.known.z_by_block(marked.known.form(TensorsInMemory(weights)))


def trained(name: str) -> lab.Run:
    """One of MODELS, marked."""
    lab.MODELS.update(MODELS)
    if "wide-gpt2" not in lab.LANGUAGE:
        setattr(lab, "LANGUAGE", (*lab.LANGUAGE, "wide-gpt2"))  # noqa: B010
    return lab.marked(f"wide-{name}", rounds=20, rho="0.1", members=5)


def about(marked: lab.Run) -> dict[str, Any]:
    return {"coordinates": marked.layout.coordinates, "blocks": blocks_of(marked.layout).count, "parts": {
        str(size): cut_blocks(marked.layout, size, size).count for size in SIZES
    } | {"tensors": len(list(marked.layout.spans("carrier")))}}  # fmt: skip


def rows(marked: lab.Run, done: Collection[tuple[str, str]] = ()) -> Iterator[dict[str, Any]]:
    """The released model, then each attack that is not done yet; keys are (attack, settings as JSON)."""
    layout = marked.layout
    scales = public_scales(layout, Strength.of(marked.strength, layout.coordinates), marked.checkpoints)
    plain = marked.target(checkpoints=marked.checkpoints, scales=scales, layout=layout)
    plain = replace(plain, oracle=partial(_oracle, marked))
    helped = replace(plain, own=[np.sum(updates[:2], axis=0) for updates in marked.own])
    if ("none", "{}") not in done:
        yield {"attack": "none", "settings": {}} | _told(marked, marked.released)
    for attack, settings in tried():
        if (attack, json.dumps(settings)) in done:
            continue
        target: Target = helped if settings.get("coalition") else plain
        result = run(attack, target, **{**TRAINED, **settings})
        left = {"left": round(result.notes["left"], 3)} if "left" in result.notes else {}
        yield {"attack": attack, "settings": settings} | _told(marked, result.weights) | left


def tried() -> list[tuple[str, dict[str, Any]]]:
    """Every estimate, with and without two members, in every way; those that docs/layers.md shows come first."""
    who = [{"estimate": how, "coalition": c} for how in ("sum", "regression", "gls") for c in (False, True)]
    found: list[tuple[str, dict[str, Any]]] = [("fine-tuning", {})]
    for some, amounts in itertools.product(who, ("expected", "oracle")):
        found.append(("removal", {**some, "amounts": amounts, "rho": 0.1}))
    found += [("removal", {**some, "amounts": "oracle", "epochs": 0}) for some in who]
    for some, alpha in itertools.product(who, (0.5, 0.7)):
        found.append(("adaptive-fine-tuning", {**some, "alpha": alpha, "from_anchor": True}))
    for some, by, alpha in itertools.product(who, ("block", "row"), (0.5, 0.9)):
        found.append(("adaptive-by-part", {**some, "by": by, "alpha": alpha}))
    for some, weights in itertools.product(who, ("random", "alternating")):
        found.append(("adaptive-by-part", {**some, "by": "block", "weights": weights, "alpha": 0.9}))
    return sorted(found, key=lambda one: not _shown(*one))


def _shown(attack: str, settings: Mapping[str, Any]) -> bool:
    """Whether docs/layers.md has a row for it, for every model."""
    how, helped, alpha = settings.get("estimate"), settings.get("coalition"), settings.get("alpha")
    if attack == "removal":
        return how == "gls" or (how == "regression" and settings["amounts"] == "oracle" and not helped)
    if attack == "adaptive-fine-tuning":
        return alpha == 0.5 and not helped
    if attack == "adaptive-by-part" and how == "gls":
        return (not helped or settings["by"] == "row") and alpha == (0.9 if "weights" in settings else 0.5)
    plain = "weights" not in settings
    return attack == "fine-tuning" or (plain and (settings["by"], how, helped, alpha) == ("block", "sum", False, 0.9))


def main(*names: str) -> None:
    torch.set_num_threads(1)
    for name in names or ("mlp", "cnn", "gpt2"):
        marked = trained(name)
        print(f"{name}: {about(marked)}")  # noqa: T201
        for row in rows(marked):
            print(row, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
