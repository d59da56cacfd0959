"""A model's digest as OpenSSF model signing computes it (docs/predicate.md), from the digests of its files.

    root = SHA-256(digest of file 1 ‖ digest of file 2 ‖ …)      SHA-256 of each file, in the order of the files' names

It is the subject's digest in a signature that `model_signing sign` makes (v1.0: method "files", sha256), so that a
certificate and such a signature name one model by one number. A file by itself is a model of one file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import PurePosixPath

from quorumark.model.suspect import SuspectFile

__all__ = ["signing_digest"]


def signing_digest(files: Iterable[SuspectFile]) -> str:
    """The digest, in hex, of a model that consists of these files. Names order them, and are not hashed."""
    ordered = sorted(files, key=lambda file: PurePosixPath(file.name))
    return hashlib.sha256(b"".join(bytes.fromhex(file.sha256) for file in ordered)).hexdigest()
