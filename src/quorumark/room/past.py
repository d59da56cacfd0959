"""Queries under a manifest that is not in force any more: their certificates stay on a member's own page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quorumark.consortium.home import ConsortiumFolder, history_name
from quorumark.consortium.records import Manifest
from quorumark.errors import QuorumarkError
from quorumark.room.seat import sha256_of
from quorumark.verify.evidence import Query
from quorumark.verify.reference import ANCHOR, GROUPS, LAYOUT, LORA, Reference

__all__ = ["Past"]


@dataclass(frozen=True)
class Past:
    """A query under a manifest that is not in force any more; of what it was about, what is still on this disk."""

    query: Query
    ours: ConsortiumFolder
    manifest: Manifest
    suspects: Path

    @property
    def tested(self) -> Path | None:
        """The suspect, if all its files are here as they were."""
        files = [(self.suspects / file.name, file) for file in self.query.files]
        if not files or not all(path.is_file() and sha256_of(path) == file.sha256 for path, file in files):
            return None
        return files[0][0] if len(files) == 1 else self.suspects

    def compared_with(self) -> Reference | None:
        """Layout, anchor and groups, as far as they are those of that manifest."""
        place = self.ours.path
        manifest = place / "history" / history_name(self.query.manifest)
        here = {name: place / name for name in (GROUPS, LORA) if (place / name).exists()}
        try:
            return Reference.read(
                manifest if manifest.exists() else self.ours.manifest_path,
                place / LAYOUT,
                place / ANCHOR,
                here.get(GROUPS) if self.manifest.terms.policy.groups else None,
                here.get(LORA) if self.manifest.terms.policy.lora else None,
            )
        except QuorumarkError:
            return None
