"""A member with a ledger, and suspects that differ a little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Genesis, Manifest
from quorumark.model.statistic import vector_digest
from quorumark.model.suspect import SuspectFile
from quorumark.verify.evidence import Query, now
from quorumark.verify.guard import check_query
from quorumark.verify.ledger import Ledger, Policy
from tests.kit.ceremony import identities, make_terms

Vector = NDArray[Any]


PEOPLE: list[Identity] = identities(3)


LEAF = 1024


class Member:
    """A member's home with a manifest of d coordinates, and queries about vectors."""

    def __init__(self, path: Path, coordinates: int = 20_000, **terms: object) -> None:
        agreed = make_terms(PEOPLE, 2, coordinates, leaf=LEAF, **terms)
        roots = ("11" * 32, "22" * 32, "33" * 32)
        genesis = Genesis(agreed.digest().hex(), agreed.layout, agreed.anchor, agreed.statistic, "ab" * 32, roots)
        self.manifest = Manifest(agreed, genesis, roots)
        self.home = HomeFolder(path)
        self.place = self.home.consortium(agreed)
        self.policy = Policy()

    def ledger(self) -> Ledger:
        return Ledger.open(self.place, self.manifest)

    def query(self, x: Vector, /, **changes: object) -> Query:
        wide = x.astype(object)
        values: dict[str, object] = {
            "manifest": self.manifest.digest().hex(),
            "epoch": self.manifest.epoch,
            "statistic": self.manifest.terms.statistic,
            "alignment": "by name",
            "suspect": vector_digest(x),
            "files": (SuspectFile("suspect.safetensors", "cd" * 32, 100),),
            "x": vector_digest(x),
            "coordinates": x.size,
            "carriers": x.size,
            "covered": x.size,
            "norm1": int(np.abs(wide).sum()),
            "norm2": int((wide**2).sum()),
            "norm4": int((wide**4).sum()),
            "burnt": (),
            "burnt_norm2": 0,
            "matching": (),
            "created": now(),
        }
        return Query(**{**values, **changes})  # type: ignore[arg-type]

    def check(self, x: Vector, /, approved: bool = True, **changes: object) -> str:
        query = self.query(x, **changes)
        return check_query(query, x, self.manifest, self.ledger(), self.policy, approved)

    def answer(self, x: Vector, /, **changes: object) -> None:
        """As the command does it: checked, then on disk."""
        ledger = self.ledger()
        with ledger.exclusive():
            query = self.query(x, **changes)
            by = check_query(query, x, self.manifest, ledger, self.policy, True)
            ledger.record_answer(query, x, by)


def rounded(values: NDArray[Any]) -> Vector:
    numbers: Vector = np.clip(np.rint(values), -127, 127).astype(np.int8)
    return numbers
