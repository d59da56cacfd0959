"""Makes the certificate that later releases must still confirm: python -m tests.kit.frozen [FOLDER]

A consortium of three with a dealer-free setup, a small marked model, and a certificate that all three signed, with
everything that the whole check takes. Keys are fresh in every run, so the files differ: they are made once per format.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.kit.consortium import Tensors, make_world

FOLDER = Path(__file__).parents[1] / "vectors" / "v1" / "certificate"
FILES = ("certificate.json", "consortium.json", "layout.json", "anchor.safetensors", "suspect.safetensors")


def _models() -> tuple[Tensors, Tensors]:
    """An anchor of odd multiples of 2^-12, so that its digest sees every bit of a weight; and one trained from it."""
    rng = np.random.default_rng(20)
    anchor = {"fc.weight": ((2 * rng.integers(-400, 400, (80, 80)) + 1) / 4096).astype(np.float32)}
    return anchor, {name: (w + 0.05 * rng.standard_normal(w.shape)).astype(np.float32) for name, w in anchor.items()}


def make(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        world = make_world(Path(temporary), members=3, threshold=2, models=_models())
        # as a thief would hand it on: half precision, other names, a tensor too many; the query says so in codes
        model = {f"module.{name}": w.astype(np.float16) for name, w in world.marked.items()}
        suspect = world.save({**model, "module.head.bias": np.zeros(4, np.float16)}, "suspect.safetensors")
        query, partials = world.answers(suspect, (1, 2, 3))
        certificate = world.certified(query, partials)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILES[0]).write_bytes(certificate.to_bytes())
        for name in FILES[1:]:
            shutil.copyfile(world.folder / name, folder / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
