"""The files of the state that a member is at (HOME/consortia/ID/rounds/state-N/).

    model.safetensors      its model
    optimiser.npz          the server optimiser's numbers for each weight, where the terms name one
    sum.npz                what the others check that model by, if this member hands it out
    noise.sealed           its own noise in the models so far, which tells what is left of the mark (`node.noise`)

They change together: those of the next state are written to the other one of two folders, then the member's notes name
that folder, and the files before are removed. A process that dies in between leaves one state or the other, whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import canonical
from quorumark.files import replacing
from quorumark.model.layout import read_safetensors, write_safetensors
from quorumark.round.applied import OPTIMISER, read_vectors, write_vectors
from quorumark.round.survey import HANDED_OUT, SUMMED

__all__ = ["MODEL", "StateFiles", "write_each"]

Config = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]
Write = Callable[[str, Arrays, Path, Callable[[], None]], None]
MODEL = "model:"


def write_each(what: str, arrays: Arrays, path: Path, write: Callable[[], None]) -> None:  # noqa: ARG001 - see `after`
    """Every member writes its own files."""
    write()


class StateFiles:
    """Those in one of the two folders, 0 or 1."""

    def __init__(self, rounds: Path, place: int) -> None:
        self._rounds, self.place = rounds, place
        self._folder = rounds / f"state-{place}"
        self.model, self._vectors = self._folder / "model.safetensors", self._folder / "optimiser.npz"
        self._sum, self.noise = self._folder / "sum.npz", self._folder / "noise.sealed"

    def after(
        self,
        model: Mapping[str, Any],
        vectors: Arrays | None,
        config: Mapping[str, Any],
        arrays: Arrays,
        write: Write = write_each,
    ) -> StateFiles:
        """Writes those of the next state beside these. `config` and `arrays` are what came with it: the sum, if it was
        announced, for a server that loses its folder. `write` is given what a file is, the arrays that it holds, its
        path, and a function that writes it: in a simulation all members have the same ones."""
        made = StateFiles(self._rounds, 1 - self.place)
        made.remove()  # of a state that was never reached
        made._folder.mkdir(mode=0o700, exist_ok=True)
        kept = {name: np.asarray(tensor) for name, tensor in model.items()}
        write("model", kept, made.model, partial(write_safetensors, kept, made.model))
        if vectors is not None:
            write_vectors(made._vectors, vectors)
        if "sum-under" in config:
            about = canonical({name: config[f"sum-{name}"] for name in HANDED_OUT})
            found = {name: arrays[name] for name in SUMMED if name in arrays}
            found["about"] = np.frombuffer(about, np.uint8)
            write("sum", found, made._sum, partial(_write_arrays, made._sum, found))
        return made

    def remove(self) -> None:
        for path in self._folder.glob("*"):
            path.unlink(missing_ok=True)

    @property
    def has_sum(self) -> bool:
        return self._sum.exists()

    def read_model(self) -> dict[str, Any]:
        return read_safetensors(self.model)

    def vectors(self) -> dict[str, NDArray[Any]]:
        return read_vectors(self._vectors)

    def hand_out(self) -> tuple[Config, dict[str, NDArray[Any]]]:
        """All of it, as a server needs it to go on."""
        with self._sum.open("rb") as file, np.load(file) as kept:
            about = json.loads(kept["about"].tobytes())
            arrays = {name: kept[name] for name in SUMMED if name in kept}
        arrays |= {MODEL + name: np.array(tensor) for name, tensor in self.read_model().items()}
        arrays |= {OPTIMISER + name: vector for name, vector in self.vectors().items()}
        return {f"sum-{name}": value for name, value in about.items()}, arrays


def _write_arrays(path: Path, arrays: Arrays) -> None:
    with replacing(path) as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]
