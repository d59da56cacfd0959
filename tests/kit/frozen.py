"""Makes the certificates that later releases must still confirm: python -m tests.kit.frozen plain|layers [FOLDER]

A consortium of three with a dealer-free setup, a small marked model, and a certificate that all three signed, with
everything that the whole check takes: of a plain query, and of one by layers about a model whose z was taken out. Keys
are fresh in every run, so the files differ: they are made once per format.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from quorumark.verify.certificate import Certificate
from tests.kit.consortium import Tensors, World, make_world
from tests.kit.layered import STRENGTH, ask_by_layers, evaded

FOLDER = Path(__file__).parents[1] / "vectors" / "v1"
FOLDERS = ("certificate", "certificate-by-layers")
FILES = ("certificate.json", "consortium.json", "layout.json", "anchor.safetensors", "suspect.safetensors")


def _models(shapes: dict[str, tuple[int, int]]) -> tuple[Tensors, Tensors]:
    """An anchor of odd multiples of 2^-12, so that its digest sees every bit of a weight; and one trained from it."""
    rng = np.random.default_rng(20)
    anchor = {n: ((2 * rng.integers(-400, 400, shape) + 1) / 4096).astype(np.float32) for n, shape in shapes.items()}
    return anchor, {name: (w + 0.05 * rng.standard_normal(w.shape)).astype(np.float32) for name, w in anchor.items()}


def _disguised(model: Tensors) -> Tensors:
    """As a thief would hand it on: half precision, other names, a tensor too many; the query says so in codes."""
    renamed = {f"module.{name}": w.astype(np.float16) for name, w in model.items()}
    return {**renamed, "module.head.bias": np.zeros(4, np.float16)}


def make_plain(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        world = make_world(Path(temporary), members=3, threshold=2, models=_models({"fc.weight": (80, 80)}))
        suspect = world.save(_disguised(world.marked), "suspect.safetensors")
        _keep(world, world.certified(*world.answers(suspect, (1, 2, 3))), folder)


def make_layers(folder: Path) -> None:
    """Four blocks of 6,400 coordinates. With ρ = 0.09 the layers are at about 7, −7, 7 and 0."""
    with tempfile.TemporaryDirectory() as temporary:
        models = _models({"in.weight": (160, 80), "out.weight": (80, 160)})
        world = make_world(Path(temporary), 3, 2, 0.09, models, strength=STRENGTH)
        suspect = world.save(_disguised(evaded(world, 0.09, models)), "suspect.safetensors")
        asked = ask_by_layers(world, suspect, (1, 2, 3))
        certificate = asked.certified()
        assert (asked.before.finding.verdict, certificate.finding.verdict) == ("FAILED", "PASSED"), "run it again"
        _keep(world, certificate, folder)


def _keep(world: World, certificate: Certificate, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILES[0]).write_bytes(certificate.to_bytes())
    for name in FILES[1:]:
        shutil.copyfile(world.folder / name, folder / name)


if __name__ == "__main__":
    kind, *chosen = sys.argv[1:]
    make, usual = {"plain": (make_plain, FOLDERS[0]), "layers": (make_layers, FOLDERS[1])}[kind]
    make(Path(chosen[0]) if chosen else FOLDER / usual)
