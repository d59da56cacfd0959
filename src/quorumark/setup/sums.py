"""Secure aggregation alone: members agree on terms without a key (docs/flower.md, "Sums alone").

There is nothing to make together: the manifest follows from the terms, and every member signs it. The threshold t says
what it says everywhere in rounds: t−1 members may collude, and T = ⌊(K+t−1)/2⌋+1 must stay.

    FOLDER/1-sign/POINT.msg    a member's signature of the manifest, in hex
"""

from __future__ import annotations

import os
from pathlib import Path

from quorumark.canonical import digest
from quorumark.consortium import memory
from quorumark.consortium.hiding import check_roster
from quorumark.consortium.home import HomeFolder, read_exchanged
from quorumark.consortium.identity import verify, verify_manifest
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Genesis, Manifest, Terms
from quorumark.errors import CeremonyError
from quorumark.files import only_one, write_exchanged, write_shared
from quorumark.setup.waiting import Progress

__all__ = ["STEP", "check_sums_terms", "sign_terms", "unsigned"]

STEP = "1-sign"
_LARGEST = 1 << 10


def check_sums_terms(terms: Terms) -> None:
    if terms.has_key:
        raise CeremonyError(
            f"the terms of {terms.name!r} ask for the setup {terms.setup!r}, not 'sums'", code="ceremony.other-setup"
        )
    if terms.strength.warmup_rounds or terms.strength.rule == "paper":
        raise CeremonyError(
            "terms without a key have no mark to steer: leave out the strength's warmup_rounds and the rule 'paper'",
            code="ceremony.other-setup",
        )
    check_roster(terms)


def unsigned(terms: Terms) -> Manifest:
    """What all members sign: a function of the terms."""
    check_sums_terms(terms)
    session = digest("sums session", terms.digest()).hex()
    return Manifest(terms, Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, session, ()), ())


def sign_terms(home: HomeFolder, unlock: Unlock, terms: Terms, folder: str | os.PathLike[str]) -> Progress:
    """Signs, and takes the manifest once all have signed. Call it again when others have written.

    The memory of rounds is on disk before this member signs: without its signature nobody takes part in a round.
    """
    manifest, source = unsigned(terms), Path(folder)
    point = terms.point_of(home.card().ed25519)
    consortium = home.consortium(terms)
    with only_one(consortium.path):
        if consortium.manifest_path.exists():
            return Progress("sign", (), consortium.manifest())
        identity = home.identity(unlock)
        memory.begin(consortium, identity)
        consortium.remember_signed(terms.digest().hex(), manifest.digest().hex())
        signature = identity.sign("manifest", manifest.sign_bytes()).hex()
        write_exchanged(source / STEP / f"{point}.msg", signature.encode())
        files = {member: source / STEP / f"{member.point}.msg" for member in terms.roster}
        missing = {member.name: path for member, path in files.items() if not path.exists()}
        if missing:
            return Progress("sign", tuple(missing), files=tuple(missing.values()))
        for member, path in files.items():
            found = read_exchanged(path, "a signature", _LARGEST).decode(errors="replace").strip()
            verify(member.ed25519, "manifest", manifest.sign_bytes(), found, member.name)
            manifest = manifest.with_signature(member.point, bytes.fromhex(found))
        verify_manifest(manifest)
        write_shared(consortium.manifest_path, manifest.to_bytes())
        return Progress("sign", (), manifest)
