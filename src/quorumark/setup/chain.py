"""The manifests so far, in a folder: how members who hold none yet come to know a consortium.

FOLDER/chain/….json      by the first 16 digits of their digests
FOLDER/chain/current     the digest of the one in force when the folder was begun
"""

from __future__ import annotations

from pathlib import Path

from quorumark.errors import CeremonyError, RecordError
from quorumark.home import follow_back, history_name, read_file
from quorumark.keystore import write_shared
from quorumark.records import Manifest, Terms, check_terms_follow

__all__ = ["chain_for_newcomer", "show_chain", "started_from"]


def show_chain(chain: list[Manifest], folder: Path) -> None:
    """Writes the manifests so far, unless they are there."""
    for manifest in chain:
        path = folder / "chain" / history_name(manifest.digest().hex())
        if not path.exists():
            write_shared(path, manifest.to_bytes())
    if started_from(folder) is None:
        write_shared(folder / "chain" / "current", chain[-1].digest().hex().encode())


def started_from(folder: Path) -> str | None:
    """The digest of the manifest that was in force when the folder was begun."""
    path = folder / "chain" / "current"
    return read_file(path, "a digest").decode(errors="replace").strip() if path.exists() else None


def chain_for_newcomer(folder: Path, terms: Terms) -> list[Manifest]:
    """The manifests so far, every link checked; the terms that were agreed must be able to follow them.

    So nobody can invent them without the keys of most of the members in those terms.
    """
    current = started_from(folder)
    if current is None:
        raise CeremonyError("the manifests so far are not in the folder yet: a member who holds a share must go first")
    manifest = Manifest.from_bytes(read_file(folder / "chain" / Path(history_name(current)).name, "a manifest"))
    if manifest.digest().hex() != current:
        raise RecordError("the manifest in the folder is not the one that it names as current")
    chain = follow_back(manifest, folder / "chain")
    check_terms_follow(terms, chain[-1].terms)
    return chain
