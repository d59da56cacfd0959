"""How far a member's last run came, from what its machine keeps: the model that it accepted last, and what a
verification of that should find. Nothing secret is read."""

from __future__ import annotations

from quorumark.consortium.home import ConsortiumFolder, read_array, read_file
from quorumark.model.layout import ModelLayout
from quorumark.node.notes import Notes
from quorumark.node.state_files import StateFiles
from quorumark.round.history import History
from quorumark.round.outlook import Outlook, outlook
from quorumark.round.survival import Survival

__all__ = ["standing"]


def standing(consortium: ConsortiumFolder) -> tuple[int, Outlook] | None:
    """So many rounds were accepted, and what they led to; None for a member that was in no round yet, or whose terms
    have no key."""
    folder, chain = consortium.path / "rounds", consortium.chain()
    manifest = chain[-1]
    if not (folder / "notes.json").is_file() or not manifest.terms.has_key:
        return None
    notes = Notes.from_bytes(read_file(folder / "notes.json", "a member's notes of rounds"))
    if not notes.mark:
        return None
    layout = ModelLayout.from_bytes(read_file(folder / "layout.json", "a layout"))
    anchor = read_array(folder / "anchor.npy", "an anchor")
    files = StateFiles(folder, notes.place)
    history = History(manifest, layout, anchor, chain[:-1])
    mark = history.read_mark(notes.mark.encode(), layout.encode(files.read_model()), anchor, files.vectors())
    told = Survival.said(*map(float, notes.survival.split())) if notes.survival else None
    return mark.round, outlook(mark, manifest.terms, manifest.terms.strength.rounds, told)
