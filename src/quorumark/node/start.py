"""What a run begins with: the manifest's file, and beside it the members' initial model and its layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.home import read_as
from quorumark.consortium.records import Manifest, anchor_of
from quorumark.errors import InputError, LayoutError
from quorumark.model.layout import ModelLayout, read_safetensors
from quorumark.verify.reference import ANCHOR, LAYOUT, read_chain

__all__ = ["Start"]

Model = Mapping[str, NDArray[Any]]


class Start:
    """The signed manifest in a file, with those before it. `elsewhere` ends the sentence that says where a relative
    path begins."""

    def __init__(self, consortium: Path, layout: str | os.PathLike[str] | None = None, elsewhere: str = "") -> None:
        if not consortium.is_file():
            raise InputError(
                "consortium",
                f"must be the file of the signed manifest; {elsewhere or 'name the whole path'}",
                f"{str(consortium)!r}, looked for at {str(consortium.absolute())!r}",
            )
        self._path = consortium
        earlier: list[Manifest]
        *earlier, self.manifest = read_chain(consortium)
        self.earlier = tuple(earlier)
        usual, self.anchor_path = consortium.parent / LAYOUT, consortium.parent / ANCHOR
        self._layout_path = Path(layout) if layout is not None else usual if usual.exists() else None

    def check_kind(self, wraps: str, *, sums_alone: bool) -> None:
        """Whether the members have a key where a mark is wanted, and none where sums alone are; `wraps` is what an
        engine's functions take, a strategy or a recipe."""
        if self.manifest.terms.has_key != sums_alone:
            return
        rule = (
            f"must be a manifest without a key (quorumark setup sums); with a key write watermarked({wraps}, …)"
            if sums_alone
            else f"must be the manifest of members with a key; for sums alone write secure({wraps}, …)"
        )
        raise InputError("consortium", rule, f"{str(self._path)!r}, whose setup is {self.manifest.terms.setup!r}")

    def model(
        self,
        given: Model | None = None,
        folder: str | os.PathLike[str] | None = None,
        argument: str = "the initial model",
        call: str = "",
    ) -> tuple[dict[str, NDArray[Any]], ModelLayout]:
        """The model that a run begins with, which must be the one that the members agreed on, and its layout. It is
        `given` as an `argument`, or it is the file beside the manifest; `call` shows how to leave the argument out."""
        terms, path = self.manifest.terms, self.anchor_path
        if given is None and not path.is_file():
            raise InputError(
                argument,
                f"must be given, or the members' initial model must be beside the manifest as {ANCHOR} "
                "(qm.Reference.publish writes it there)",
                f"nothing, and there is no {str(path)!r}",
            )
        model = dict(given) if given is not None else _read_anchor(path)
        layout = (
            ModelLayout.of(model)
            if self._layout_path is None
            else read_as(self._layout_path, "a layout", ModelLayout.from_bytes)
        )
        remedy = (
            f"leave {argument} out, and the run begins with that model: {call}"
            if path.is_file()
            else f"put that model beside the manifest as {ANCHOR}, and leave {argument} out: {call}"
        )
        what = (argument, remedy) if given is not None else (ANCHOR, "get the file from the member who published it")
        if layout.digest() != terms.layout:
            raise _not_agreed(*what, "names and shapes", layout.digest(), terms.layout)
        if folder is not None and (Path(folder) / "run.json").exists():
            return model, layout  # the run goes on from its folder
        try:
            found = anchor_of(layout, model)
        except LayoutError as error:
            raise InputError(what[0], f"must have the tensors of the agreed layout: {what[1]}", error) from None
        if found != terms.anchor:
            raise _not_agreed(*what, "weights", found, terms.anchor)
        if terms.buffers and layout.buffers_digest(model).hex() != terms.buffers:
            raise _not_agreed(*what, "integers", layout.buffers_digest(model).hex(), terms.buffers)
        return model, layout


def _read_anchor(path: Path) -> dict[str, NDArray[Any]]:
    """The model in a file. Files are sorted by name; where names are numbers, as Flower gives them to a list of arrays,
    apps rely on their order."""
    found = {name: np.asarray(tensor) for name, tensor in read_safetensors(path).items()}
    return {name: found[name] for name in (sorted(found, key=int) if all(map(str.isdecimal, found)) else found)}


def _not_agreed(argument: str, remedy: str, part: str, found: str, agreed: str) -> InputError:
    rule = f"must be the model that the members agreed on, whose {part} have the digest {agreed}: {remedy}"
    return InputError(argument, rule, f"a model with the digest {found}")
