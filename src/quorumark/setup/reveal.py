"""Reconstructing the key, where it must be revealed: from t shares, checked against what was committed to."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quorumark import field, shamir
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.shares import ShareFile, ShareInfo
from quorumark.errors import CeremonyError, ShareError
from quorumark.files import write_private
from quorumark.setup.dealer import check_commitment

__all__ = ["reconstruct_key"]


def reconstruct_key(
    home: HomeFolder,
    consortium: ConsortiumFolder,
    unlock: Unlock,
    handed_over: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
) -> str:
    """Writes the raw key to `out`; says in words what it was checked against.

    Every share is first checked against its root in the signed manifest, so a wrong one is named by its member.
    """
    manifest, identity = consortium.manifest(), home.identity(unlock)
    terms = manifest.terms
    vectors = {}
    for share in [consortium.share(unlock), *(ShareFile(path, Unlock.by_identity(identity)) for path in handed_over)]:
        name = terms.member(share.info.point).name
        if share.info != ShareInfo.under(manifest, share.info.point, share.info.block):
            raise ShareError(f"the share of {name!r} belongs to another consortium or epoch")
        if share.root().hex() != manifest.roots[share.info.point - 1]:
            raise ShareError(f"the share of {name!r} is not the one that its root in the manifest commits to")
        vectors[share.info.point] = share.vector()[: terms.coordinates]
    if len(vectors) < terms.threshold:
        raise ShareError(f"the key needs the shares of {terms.threshold} members, but there are {len(vectors)}")
    key = field.to_signed(shamir.reconstruct(vectors, terms.threshold))
    if terms.key == "rademacher" and not np.isin(key, (-1, 1)).all():
        raise CeremonyError("what these shares give are not signs: the setup was faulty", code="ceremony.wrong-dealing")
    if manifest.commitment is not None and not check_commitment(manifest, key):
        raise CeremonyError(
            "the reconstructed key is not the one that the dealer committed to", code="ceremony.wrong-dealing"
        )
    buffer = io.BytesIO()
    np.save(buffer, key.astype(np.int32))
    write_private(Path(out), buffer.getvalue())
    checked = "every share against its root in the signed manifest"
    return checked + (", the key against the dealer's commitment" if manifest.commitment is not None else "")
