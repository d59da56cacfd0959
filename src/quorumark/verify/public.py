"""The public folder: what anybody needs who asks whether a model is a consortium's, or checks a certificate.

    FOLDER/consortium.json       the manifest in force, and history/ with those before it
    FOLDER/layout.json           which weights carry
    FOLDER/anchor.safetensors    the model that suspects are compared with
    FOLDER/groups.json           which channels belong together, if that was agreed on; lora.json for an adapter

A member keeps the same files beside its own manifest (`keep_agreed`), from where the terms were, so that it can answer
and publish without being told where they are. Every file is compared with the digest in the manifest before it is
copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from quorumark.align.groups import Groups
from quorumark.align.lora import Lora
from quorumark.consortium.home import ConsortiumFolder, read_as
from quorumark.consortium.records import Manifest, Terms
from quorumark.errors import InputError, QuorumarkError, RecordError
from quorumark.files import replacing, write_shared
from quorumark.model.layout import ModelLayout
from quorumark.model.suspect import read_suspect
from quorumark.verify.reference import ANCHOR, GROUPS, LAYOUT, LORA, Reference, digest_of_anchor

__all__ = ["MANIFEST", "OPTIONS", "agreed", "copy_public", "fits", "keep_agreed", "publish"]

MANIFEST = "consortium.json"
OPTIONS = {LAYOUT: "--layout", ANCHOR: "--anchor", GROUPS: "--groups", LORA: "--factors"}


def publish(
    place: ConsortiumFolder,
    out: Path,
    named: Mapping[str, Path | None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Reference:
    """Writes the public folder, or brings it up to date, from a member's folder for a consortium.

    `named`: files by the names that they will have there, where they are not beside the member's manifest. Without the
    groups, or the factors of an adapter, what is published is of less use, but of some .
    """
    terms = place.manifest().terms
    files = {name: (named or {}).get(name) or place.path / name for name in agreed(terms)}
    for name, path in list(files.items()):
        if not path.is_file():
            if name in (GROUPS, LORA) and path == place.path / name:
                del files[name]
                continue
            raise RecordError(f"{name} of {terms.name!r} is not at {str(path)!r}: name it with {OPTIONS[name]}")
    if files[ANCHOR].suffix != ".safetensors":
        raise InputError("the anchor", "must be one .safetensors file", str(files[ANCHOR]))
    _check_target(place, out)
    options = (files[LAYOUT], files[ANCHOR], files.get(GROUPS), files.get(LORA))
    found = Reference.read(place.manifest_path, *options, progress=progress)  # compares every digest
    for name, path in files.items():
        copy_public(path, out / name)
    for path in (*place.path.glob("history/*.json"), *place.path.glob("stamps-*.json")):
        copy_public(path, out / path.relative_to(place.path))
    write_shared(out / MANIFEST, found.manifest.to_bytes())  # last: it names all the others
    return found


def keep_agreed(place: ConsortiumFolder, source: Path) -> list[str]:
    """Copies the files that were agreed on from where the terms are to the member's own folder for the consortium.

    The names of those that are there, but are not what the terms name: they are left.
    """
    terms, strange = place.manifest().terms, []
    for name in agreed(terms):
        if (source / name).is_file() and not (place.path / name).exists():
            try:
                same = fits(name, source, terms)
            except QuorumarkError:  # damaged, or something else altogether
                same = False
            if same:
                copy_public(source / name, place.path / name)
            else:
                strange.append(name)
    return strange


def copy_public(source: Path, target: Path) -> None:
    """A copy that others may read, whole or not at all, of a file of any size."""
    if target.exists() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as content, replacing(target, 0o644) as file:
        shutil.copyfileobj(content, file, 1 << 20)


def agreed(terms: Terms) -> list[str]:
    """The names of the files that terms have digests of."""
    optional = {GROUPS: terms.policy.groups, LORA: terms.policy.lora}
    return [LAYOUT, ANCHOR, *(name for name, digest in optional.items() if digest is not None)]


def fits(name: str, folder: Path, terms: Terms) -> bool:
    """Whether a file is the one that the terms name."""
    path = folder / name
    if name == GROUPS:
        return read_as(path, "a model's groups", Groups.from_bytes).digest() == terms.policy.groups
    if name == LORA:
        return read_as(path, "an adapter's description", Lora.from_bytes).digest() == terms.policy.lora
    layout = read_as(folder / LAYOUT, "a layout", ModelLayout.from_bytes)
    if name == LAYOUT:
        return layout.digest() == terms.layout
    return digest_of_anchor(layout, read_suspect(path)) == terms.anchor


def _check_target(place: ConsortiumFolder, out: Path) -> None:
    """A public folder of another consortium, or of a later manifest, is not written over."""
    if not (out / MANIFEST).exists():
        return
    there = read_as(out / MANIFEST, "a consortium's manifest", Manifest.from_bytes)
    if there.digest() not in {link.digest() for link in place.chain()}:
        raise InputError(
            "--out", "must not hold a manifest of another consortium, or one that this member does not have", str(out)
        )
