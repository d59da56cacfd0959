"""Which models a home has summed, and with which key: two keys in sums from one model show where they differ."""

from __future__ import annotations

from quorumark.consortium.home import ConsortiumFolder, read_file
from quorumark.consortium.records import Manifest
from quorumark.errors import RoundError
from quorumark.field import Vector
from quorumark.files import append_private
from quorumark.model.layout import ModelLayout
from quorumark.round.amplitudes import model_digest
from quorumark.round.member import RoundMember
from quorumark.round.memory import State

__all__ = ["UNMARKED", "MarkedModels"]

_MARKED = "marked.txt"
UNMARKED = "unmarked"
"""Among the consents, which are by state: one for all sums without a key."""


class MarkedModels:
    """Of one consortium (`marked.txt`), and what its others say. `name` is the member's."""

    def __init__(self, consortium: ConsortiumFolder, manifest: Manifest, name: str) -> None:
        self._consortium, self._manifest, self._name = consortium, manifest, name
        self._path = consortium.path / "rounds" / _MARKED

    def note(self, side: RoundMember) -> None:
        """Before it uploads: from a model with a mark no other key may be summed, nor a key where a sum had none."""
        if side.history is not None and (side.is_marked or not self._manifest.terms.has_key):
            name = side.history.mark.model_digest.hex()
            known = self._path.read_text().split() if self._path.exists() else []
            if name not in known:
                append_private(self._path, name.encode())

    def check_other_keys(self, encoded: Vector) -> None:
        """Two keys in sums from one model show where they differ: half of the signs of both. A sum with a key and one
        without show all of them."""
        if not self._manifest.terms.has_key:
            return  # which `check_unmarked` has looked at
        others = [path for path in self._consortium.path.parent.glob(f"*/rounds/{_MARKED}") if path != self._path]
        name = model_digest(encoded).hex() if others else ""
        for path in others:
            if name in path.read_text().split():
                raise RoundError(
                    f"{self._name} has trained this model in another consortium ({path.parts[-3][:16]}…), with its "
                    "mark or without any: sums from it with another key would show the keys. Go on with that "
                    "consortium, or start from another model",
                    code="round.other-consortium",
                )

    def check_unmarked(self, layout: ModelLayout, memory: State) -> None:
        """Before it sums without a key: a marked and an unmarked sum from one model differ by the mark, and show every
        sign of the key. So no model of the kind that another consortium of this home marks, unless the operator
        consents."""
        if self._manifest.terms.has_key:
            return
        with memory.edit() as known:
            if known["consents"].get(UNMARKED):
                return
        for place in map(ConsortiumFolder, sorted(self._consortium.path.parent.iterdir())):
            other = place.path != self._consortium.path and place.manifest_path.exists()
            if other and _marks_such(place, layout):
                raise RoundError(
                    f"{self._name} marks such models in the consortium {place.terms().name!r} "
                    f"({place.path.name[:16]}…), and this run would sum them without a mark: a marked and an unmarked "
                    "sum from one model show the key. Train it there, or, if the two never train the same weights, let "
                    "this member's operator consent (quorumark member consent --unmarked)",
                    code="round.marked-elsewhere",
                )


def _marks_such(place: ConsortiumFolder, layout: ModelLayout) -> bool:
    """Whether a consortium has a key for models with these tensors, whichever of them carry."""
    terms = place.terms()
    if not terms.has_key or terms.layout == layout.digest():
        return terms.has_key
    for path in (place.path / "layout.json", place.path / "rounds" / "layout.json"):
        if path.is_file():
            known = ModelLayout.from_bytes(read_file(path, "a layout"))
            return {(s.name, s.shape) for s in known.tensors} == {(s.name, s.shape) for s in layout.tensors}
    return False
