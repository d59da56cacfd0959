"""Alignment by this tree and by another one, in CPU seconds of one run.

    git worktree add ../before COMMIT
    python benchmarks/alignment.py ../before/src [--json benchmarks/results/alignment.json]

Suspects are made once: a ResNet-18 (11.2 million weights), and a language model of the shape of SmolLM2-135M with
random weights, each disguised. Each tree derives its own groups and aligns each suspect in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DISGUISES = {
    "resnet18": {
        "permuted, rescaled": ("permutation", "rescaling"),
        "with signs": ("permutation", "rescaling", "signs"),
    },
    "language model": {"permuted, rescaled, heads mixed": ("permutation", "rescaling", "rotation")},
}
HERE = Path(__file__).resolve().parent.parent / "src"


def network(name: str) -> tuple[Any, Any]:
    """A module with its initial weights, and an example of what it takes."""
    import torch

    torch.manual_seed(0)
    if name == "resnet18":
        from quorumark.research.lab import models

        return models.make("resnet18", 100, 3, 32, 0).eval(), torch.zeros(1, 3, 32, 32)
    import transformers

    shape = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192, rope_theta=100000.0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(shape).eval(), {"input_ids": torch.arange(8)[None]}


def make(name: str, folder: Path) -> None:
    """The anchor and its suspects, as files."""
    import copy

    import torch
    from safetensors.torch import save_file

    from quorumark.align.trace import derive_groups
    from quorumark.model.layout import ModelLayout
    from quorumark.research import attacks

    module, example = network(name)
    names = {spec.name for spec in ModelLayout.of(module).tensors}
    anchor = {n: t.detach().clone() for n, t in module.state_dict().items() if n in names}
    draw = torch.Generator().manual_seed(3)
    trained = {
        n: t + 0.5 * t.std() * torch.randn(t.shape, generator=draw) if t.dim() > 1 else t.clone()
        for n, t in anchor.items()
    }
    target = attacks.Target(
        lambda: copy.deepcopy(module), {**module.state_dict(), **trained}, example=example,
        known=derive_groups(module, example),
    )  # fmt: skip
    save_file(anchor, folder / "anchor.safetensors")
    for number, steps in enumerate(DISGUISES[name].values()):
        disguised = attacks.chain(target, [(step, {}) for step in steps], seed=1).weights
        save_file({n: t.contiguous() for n, t in disguised.items() if n in names}, folder / f"{number}.safetensors")


def measured(name: str, folder: Path) -> list[dict[str, float]]:
    """CPU seconds of each alignment by the tree on the path, and how near to the anchor the aligned suspect is."""
    from safetensors.torch import load_file
    from torch import nn, zeros

    from quorumark.align.procedure import align
    from quorumark.align.trace import derive_groups
    from quorumark.model.layout import ModelLayout
    from quorumark.research.known import TensorsInMemory

    small = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))  # kernels are compiled before the clock
    kernel = TensorsInMemory(dict(small.state_dict()))
    align(kernel, kernel, ModelLayout.of(small), derive_groups(small, zeros(1, 4)))
    module, example = network(name)
    layout, groups = ModelLayout.of(module), derive_groups(module, example)
    del module
    anchor = TensorsInMemory(load_file(folder / "anchor.safetensors"))
    found = []
    for number in range(len(DISGUISES[name])):
        suspect = TensorsInMemory(load_file(folder / f"{number}.safetensors"))
        start = time.process_time()
        alignment = align(suspect, anchor, layout, groups)
        seconds = time.process_time() - start
        found.append(
            {"seconds": round(seconds, 2), "cosine": round(_cosine(layout, alignment.model(suspect), anchor), 4)}
        )
    return found


def _cosine(layout: Any, model: Any, anchor: Any) -> float:
    """Between the aligned suspect and the anchor, over the weights that carry."""
    import numpy as np

    sums = np.zeros(3)
    for spec, _ in layout.spans("carrier"):
        one, two = (np.concatenate([b.ravel() for _, b in source.blocks(spec.name)]) for source in (model, anchor))
        one, two = one.astype(np.float64), two.astype(np.float64)
        sums += one @ two, one @ one, two @ two
    return float(sums[0] / np.sqrt(sums[1] * sums[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before", nargs="?", help="the other tree's src")
    parser.add_argument("--only", choices=DISGUISES, help="one of the models")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        sys.stdout.write(json.dumps(measured(given.case[0], Path(given.case[1]))))
        return
    rows = []
    for name, disguises in DISGUISES.items():
        if given.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            make(name, Path(folder))
            found = []
            for source in (HERE, Path(given.before)):
                command = [sys.executable, __file__, "--case", name, folder]
                environment = {**os.environ, "PYTHONPATH": str(source)}
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)  # noqa: S603 - this file
                found.append(json.loads(done.stdout))
        for what, now, before in zip(disguises, *found, strict=True):
            ratio = round(now["seconds"] / before["seconds"], 2)
            rows.append({"model": name, "disguise": what, "now": now, "before": before, "ratio": ratio})
            sys.stdout.write(f"{name}, {what}: {now['seconds']} s, before {before['seconds']} s: {ratio} of it; "
                             f"cosine {now['cosine']}, before {before['cosine']}\n")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
