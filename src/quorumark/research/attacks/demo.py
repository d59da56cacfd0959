"""The demo's model for `quorumark attack suite`: what its folder holds, with the key put together. Research only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quorumark.demo import THRESHOLD, digits
from quorumark.errors import InputError
from quorumark.research.attacks.base import Target
from quorumark.research.attacks.suite import Subject, classifier, key_of_members, load_weights
from quorumark.verify.reference import Reference

__all__ = ["subject"]


def subject(folder: Path) -> Subject:
    """What `quorumark attack suite` needs, from the folder of an earlier `quorumark demo --out`.

    The key is put together from the members' homes, which are there with what opens them: research only.
    """
    needed = ("consortium.json", "suspect.safetensors", "groups.json", "rounds", "members")
    for name in needed:
        if not (folder / name).exists():
            raise InputError("the folder", "must be what `quorumark demo --out` of this release left", f"no {name}")
    import torch

    from quorumark.research.attacks import public_scales

    world = digits()
    reference = Reference.read(folder / "consortium.json")
    homes = sorted(path for path in (folder / "members").iterdir() if path.is_dir())[:THRESHOLD]
    known = key_of_members(reference, {home: home.with_name(f"{home.name}.key") for home in homes})
    models = [folder / "anchor.safetensors", *sorted((folder / "rounds").glob("*.safetensors"))]
    checkpoints = [load_weights(path) for path in models]
    norms = np.load(folder / "rounds" / "norms.npy") if (folder / "rounds" / "norms.npy").exists() else None
    scales = public_scales(reference.layout, reference.manifest.terms.strength, checkpoints, norms)
    parts = [torch.cat(both) for both in zip(*world.data, strict=True)]
    other = world.train(world.initial(seed=7), (parts[0], parts[1]), seed=7, epochs=8)
    released = load_weights(folder / "suspect.safetensors")
    data = (parts[0], parts[1])
    target = Target(
        world.make, released, data, checkpoints, scales, other=other, layout=reference.layout, base=checkpoints[0]
    )
    return Subject("the demo's model", target, classifier(*world.test), reference, known)
