"""An examiner's work: opening sealed answers by layers (docs/layers.md).

    examined = examine(identity, manifest, query, partials)      # numbers by block: for the examiner's eyes
    examined.opened                                              # its signed word, for the certificate

With m partials at most ⌊(m−t)/2⌋ members may be wrong, over all blocks together: a member that lies in one block is
named, and so many liars in different blocks as could each pass alone are too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quorumark import shamir
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest
from quorumark.errors import DecodingError, EvidenceError
from quorumark.field import P
from quorumark.verify import null
from quorumark.verify.answer import seal_context
from quorumark.verify.evidence import Partial, Query, now
from quorumark.verify.layered import Layers, Opened, unseal

__all__ = ["Examined", "examine"]


@dataclass(frozen=True, repr=False)
class Examined:
    """What only an examiner sees: Y_b of each block (None: left out). `opened` is what it tells others."""

    query: Query
    values: tuple[int | None, ...]
    opened: Opened

    def __repr__(self) -> str:
        return f"Examined(Q = {self.opened.q}, numbers by block hidden)"

    @property
    def z(self) -> tuple[str | None, ...]:
        """z_b = Y_b/‖x_b‖ of each block."""
        layers = self.query.layers
        norms = () if layers is None else layers.norm2
        return tuple(None if y is None else null.z_text(y, n) for y, n in zip(self.values, norms, strict=True))


def examine(
    identity: Identity, manifest: Manifest, query: Query, partials: Sequence[Partial], created: str | None = None
) -> Examined:
    """Opens the partials of a query by layers that names this examiner. An EvidenceError says whose is refused."""
    terms, layers = manifest.terms, query.layers
    # 1. the query is by layers, for this examiner and this manifest
    if layers is None or (layers.examiner.ed25519, layers.examiner.x25519) != (identity.ed25519, identity.x25519):
        raise EvidenceError("the query is not by layers, or names another examiner")
    if query.manifest != manifest.digest().hex():
        raise EvidenceError("the query was made under another manifest than the one given")
    # 2. each partial is a member's, signed by it, answers this query, and opens
    numbers: dict[int, tuple[int, ...]] = {}
    for partial in partials:
        name = terms.member(partial.point).name
        partial.verify(terms)
        if partial.query != query.digest() or partial.x != query.x or not partial.sealed:
            raise EvidenceError(f"the partial of {name!r} is for another query: leave it out or ask again")
        if partial.point in numbers:
            raise EvidenceError(f"there are two partials of {name!r}: leave one out")
        numbers[partial.point] = _open(identity, query, layers, partial, name)
    # 3. there are enough of them
    if len(numbers) < terms.threshold:
        raise EvidenceError(f"{len(numbers)} partials are too few: {terms.name!r} needs {terms.threshold}")
    # 4. they open one number in each block; wrong ones are counted over all blocks together
    values, wrong = _decode(numbers, layers, terms.threshold)
    # 5. which a key of signs can give, block by block, and which add up to what the plain query opened
    _check_values(query, layers, values)
    q = null.three_digits([(y, n) for y, n in zip(values, layers.norm2, strict=True) if y is not None])
    opened = Opened.sign(
        identity,
        query=query.digest(),
        partials=tuple(sorted(partial.digest() for partial in partials)),
        q=q,
        wrong=wrong,
        created=created or now(),
    )
    return Examined(query, values, opened)


def _open(identity: Identity, query: Query, layers: Layers, partial: Partial, name: str) -> tuple[int, ...]:
    try:
        found = unseal(identity, partial.sealed, seal_context(query, partial.point))
    except EvidenceError as error:
        raise EvidenceError(f"the partial of {name!r} is refused: {error}") from None
    if len(found) != len(layers.norm2):
        raise EvidenceError(f"the partial of {name!r} has {len(found)} numbers for {len(layers.norm2)} blocks")
    return found


def _decode(
    numbers: dict[int, tuple[int, ...]], layers: Layers, threshold: int
) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Y_b of each block, and everybody who is wrong in any of them."""
    most, wrong = (len(numbers) - threshold) // 2, set[int]()
    values: list[int | None] = []
    for block, norm2 in enumerate(layers.norm2):
        if not norm2:
            values.append(None)
            continue
        try:
            decoded = shamir.decode({point: found[block] for point, found in numbers.items()}, threshold)
        except DecodingError:
            raise EvidenceError(
                f"the partials contradict each other in block {block}, and more than {most} of them are wrong: nobody "
                "can be named, and nothing follows; collect more"
            ) from None
        wrong.update(decoded.wrong)
        values.append(decoded.value - P if decoded.value > P // 2 else decoded.value)
    if len(wrong) > most:
        raise EvidenceError(
            f"{len(wrong)} members are wrong in one block or another, and with {len(numbers)} partials at most {most} "
            "can be corrected: nothing follows; collect more"
        )
    return tuple(values), tuple(sorted(wrong))


def _check_values(query: Query, layers: Layers, values: Sequence[int | None]) -> None:
    if any(y is not None and abs(y) > most for y, most in zip(values, layers.norm1, strict=True)):
        raise EvidenceError("no key can give a number that the partials open: at least one of them is wrong")
    rest = query.norm1 - sum(layers.norm1)  # what the blocks that are left out may add
    if abs(sum(y for y in values if y is not None) - int(layers.value)) > rest:
        raise EvidenceError(
            "the blocks do not add up to the number that the plain query opened: one of the two rests on a false "
            "partial; ask both again, with more members"
        )
