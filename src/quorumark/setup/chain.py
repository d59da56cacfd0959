"""The manifests so far, in a folder: how members who hold none yet come to know a consortium.

FOLDER/chain/….json      by the first 16 digits of their digests
FOLDER/chain/current     the digest of the one in force when the folder was begun
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from quorumark.consortium.home import ConsortiumFolder, HomeFolder, follow_back, history_name, read_as, read_exchanged
from quorumark.consortium.records import Manifest, Terms
from quorumark.consortium.succession import check_terms_follow
from quorumark.errors import CeremonyError, RecordError
from quorumark.files import write_exchanged
from quorumark.setup.waiting import Progress

__all__ = [
    "chain_for_newcomer",
    "find_consortium",
    "folder_for_newcomer",
    "show_chain",
    "started_from",
    "wait_for_chain",
]


def show_chain(chain: list[Manifest], folder: Path) -> None:
    """Writes the manifests so far, unless they are there."""
    for manifest in chain:
        path = folder / "chain" / history_name(manifest.digest().hex())
        if not path.exists():
            write_exchanged(path, manifest.to_bytes())
    if started_from(folder) is None:
        write_exchanged(folder / "chain" / "current", chain[-1].digest().hex().encode())


def started_from(folder: Path) -> str | None:
    """The digest of the manifest that was in force when the folder was begun."""
    path = folder / "chain" / "current"
    return read_exchanged(path, "a digest").decode(errors="replace").strip() if path.exists() else None


def find_consortium(home: HomeFolder, terms: Terms, which: str | None = None) -> ConsortiumFolder | None:
    """The consortium that these terms follow (or are already in force in); None if this member holds none such."""
    if which is not None:
        return home.only_consortium(which)
    found = []
    for consortium in home.consortia():
        if not consortium.manifest_path.exists():
            continue
        current = consortium.manifest().terms
        with contextlib.suppress(RecordError):
            if current.digest() != terms.digest():
                check_terms_follow(terms, current)
            current.point_of(home.card().ed25519)
            found.append(consortium)
    if len(found) > 1:
        raise RecordError(
            f"these terms could follow several consortia of {str(home.path)!r}: name one with --consortium"
        )
    return found[0] if found else None


def chain_for_newcomer(folder: Path, terms: Terms, pinned: str | None) -> list[Manifest]:
    """The manifests so far, every link checked, up to the one that this member was told of: `pinned`, its digest.

    Without it anyone who writes to the folder could invent a consortium.
    """
    if pinned is None:
        raise CeremonyError(
            "this member holds no manifest of this consortium: ask the others for the digest of the one in force, and "
            "give it with --from",
            code="ceremony.no-manifest",
        )
    current = started_from(folder)
    if current is None:  # who may wait for it looks first (`wait_for_chain`)
        raise CeremonyError(
            "the manifests so far are not in the folder yet: a member who holds a share must go first",
            code="ceremony.no-manifest",
        )
    if current != pinned:
        raise RecordError(f"the folder was begun from the manifest {current[:16]}…, not from {pinned[:16]}…")
    manifest = read_as(folder / "chain" / Path(history_name(current)).name, "a manifest", Manifest.from_bytes)
    if manifest.digest().hex() != pinned:
        raise RecordError("the manifest in the folder is not the one that it names as current")
    chain = follow_back(manifest, folder / "chain")
    check_terms_follow(terms, chain[-1].terms)
    return chain


def wait_for_chain(folder: Path) -> Progress:
    """What a newcomer waits for: somebody who holds a share shows the manifests so far."""
    return Progress("manifests", ("a member who holds a share",), files=(folder / "chain" / "current",))


def folder_for_newcomer(home: HomeFolder, chain: list[Manifest]) -> ConsortiumFolder:
    """Where a member who is new, or who comes back, keeps a consortium."""
    consortium = home.consortium(chain[0].terms)
    consortium.check_followed_by(chain)
    if consortium.manifest_path.exists() and consortium.manifest().digest() == chain[-1].digest():
        raise CeremonyError(
            "this member holds the manifest in force: it is not new (leave --from away)", code="ceremony.not-new"
        )
    with contextlib.suppress(RecordError):
        chain[-1].terms.point_of(home.card().ed25519)
        raise CeremonyError(
            "this member belongs to the consortium, but its own manifest is older: first run quorumark consortium "
            "update, then quorumark share recover",
            code="ceremony.member-behind",
        )
    return consortium
