"""A member's guard over the key: what it refuses to answer, and why (docs/verification.md, "The guard").

An answered query opens Y = ⟨x, τ⟩, one linear equation in the secret key τ ∈ {±1}^d with a public x. Three things
follow from too many of them, or from crafted ones:

    a direction     n answers give a vector of cosine √(n/d) with τ: Σ Y_i·x_i/‖x_i‖², if the x_i are orthogonal
    a forgery       n models that failed combine into one "model" of z ≈ √n: 64 give 8
    an oracle       answers whose combination rests on few coordinates read those off: x₂ = x₁ + e_j gives τ_j

The first is bounded by a budget, the second by raising z* (`ledger.reconcile` counts, `null.raised_threshold` raises),
the third by rules on every query: x, its remainders (`breadth`), and what x adds to the span of the queries answered
before (its residual r) must rest on many coordinates, measured as ‖r‖₂⁴/‖r‖₄⁴ ≥ E. The residuals of m answers are
orthogonal, so a combination v of them with ‖v‖₂ = 1 has ‖v‖₄ ≤ √m·E^(−1/4): it rests on at least E/m² coordinates,
whatever the queries were. Residuals are computed in floating point, so an x is refused too if rounding could hide what
it adds. For residuals and remainders E is 1024: a copy of a tested model in another number format is another suspect,
and must be answered; m such copies that were crafted to differ on the same 1024 coordinates give a vector of cosine
√(m/1024) with the key there.

A fourth thing follows from queries that leave out leaves of somebody's choice: z of an innocent model rises. So a query
leaves out exactly what this member knows to be opened (`omissions`).

Each member guards alone, and knows of other members' answers only what it is told. t−1 colluders need one more answer,
so they can let each of the other K−t+1 members spend a budget of its own, and put x to one and x + e_j to another: the
bounds hold for each member's answers, not for all together. A member who lists failed queries that never were can hold
up a proof, in a partial that it signed. And setting a member's whole folder back to an earlier day makes it
forget; others hold the later heads of its ledger in its partials.

    with ledger.exclusive():                                    # nobody else answers between the check and the record
        approved_by = check_query(query, x, manifest, ledger, rules, approved)
        ledger.record_answer(query, x, approved_by)             # on disk before the answer leaves
"""

from __future__ import annotations

import calendar
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Manifest
from quorumark.errors import GuardError, KeystoreError
from quorumark.model.statistic import norms, vector_digest
from quorumark.reasons import Reason, Value
from quorumark.verify.breadth import narrow_remainder
from quorumark.verify.evidence import Query
from quorumark.verify.ledger import Ledger
from quorumark.verify.rules import AnswerRules
from quorumark.verify.vectors import Numbers, StoredVector

__all__ = ["budget", "check_query", "least_effective"]

_ADDED = 1024  # coordinates that what a query adds must rest on
_DISTINCT = 1e-10  # what floating point can tell: far above its 2^-52, below 1024 places in 10^9 coordinates
_DAY = 24 * 60 * 60
_FLOATS = 1 << 22  # float64 numbers in memory while residuals are computed: 32 MB
_SHOWN = 5  # leaves in a reason


def budget(coordinates: int, policy: Policy | None = None) -> int:
    """How many different x are answered in a consortium's life: max(16, ⌊d/10⁴⌋), or `budget` in the terms' policy.

    n answers give a vector of cosine √(n/d) with the key: 1 % at this bound, from d = 160,000 on.
    """
    agreed = None if policy is None else policy.budget
    return max(16, coordinates // 10_000) if agreed is None else agreed


def least_effective(coordinates: int, policy: Policy | None = None) -> int:
    """On how many coordinates a query must rest, at least: max(1024, ⌊d/32⌋), or `effective` in the terms' policy;
    never more than d.

    Weights that spread like a normal distribution rest on d/3 coordinates, so models of d < 3,072 need an agreed
    `effective` to be verified at all.
    """
    agreed = None if policy is None else policy.effective
    return min(coordinates, max(1024, coordinates // 32) if agreed is None else agreed)


def _require(good: bool, code: str, text: str, **values: Value) -> None:
    """The text is for the person who asks; the ledger keeps the code."""
    if not good:
        raise GuardError(text, reason=Reason.of(f"guard.{code}", **values))


def check_query(
    query: Query, x: Numbers, manifest: Manifest, ledger: Ledger, rules: AnswerRules, approved: bool
) -> str:
    """Whether this member answers a query with the vector x, which it has computed from the suspect itself.

    A GuardError says why not, and its `reason` says so in a code. Otherwise it returns who approved: "person" (the
    command's --approve) or "rules".
    """
    with ledger.exclusive():
        return _check_query(query, x, manifest, ledger, rules, approved)


def _check_query(
    query: Query, x: Numbers, manifest: Manifest, ledger: Ledger, rules: AnswerRules, approved: bool
) -> str:
    terms, d = manifest.terms, manifest.terms.coordinates
    again = query.x in ledger.answered()  # the same answer once more tells nobody anything

    # 1. It is about this consortium as it is now, and x is the vector that it names.
    _require(
        query.manifest == manifest.digest().hex() and query.epoch == manifest.epoch,
        "manifest",
        "the query is for another manifest or epoch than the one in force here; run consortium update, and ask again "
        "under the newest manifest",
    )
    _require(
        query.coordinates == d == x.size and vector_digest(x) == query.x,
        "vector",
        "the query does not name the vector x that this member computed from the suspect; compare the suspect's files",
    )

    # 2. The statistic is the agreed one: another could be made to show other combinations of the key.
    _require(
        query.statistic == terms.statistic,
        "statistic",
        f"the query uses the statistic {query.statistic!r}, but {terms.statistic!r} is agreed; ask again with that one",
        statistic=query.statistic,
        agreed=terms.statistic,
    )
    _require(
        rules.statistics is None or query.statistic in rules.statistics,
        "statistic-policy",
        f"this member's rules do not list the statistic {query.statistic!r}; its statistics can be changed there",
        statistic=query.statistic,
    )

    # 3. It leaves out exactly what this member knows to be opened. Signs there are public, so weights there can be made
    # to fit; and who could leave out more would drop what speaks for a suspect, or against it (`omissions`).
    burnt = ledger.burnt()
    forgotten, added = sorted(set(burnt) - set(query.burnt)), sorted(set(query.burnt) - set(burnt))
    _require(
        not forgotten,
        "forgotten-leaves",
        f"the query does not leave out {_leaves(forgotten)}, which an audit opened; ask again with what explains that "
        "audit (verify prepare --audit)",
        count=len(forgotten),
        leaves=tuple(forgotten[:_SHOWN]),
    )
    _require(
        not added,
        "unexplained-leaves",
        f"the query leaves out {_leaves(added)}, and nothing that this member knows explains why; send it the audits "
        "that opened them (verify partial --audit), or ask again without leaving them out",
        count=len(added),
        leaves=tuple(added[:_SHOWN]),
    )
    for leaf in query.burnt:
        _require(
            not x[leaf * terms.leaf : (leaf + 1) * terms.leaf].any(),
            "leaf-not-zero",
            f"the vector x is not zero on the leaf {leaf}, which an audit opened; ask again without it",
            leaf=leaf,
        )

    # 4. The budget, for the consortium's life: n answers give a vector of cosine √(n/d) with the key.
    if not again:
        known, most = ledger.known().keys() | {query.x}, budget(d, terms.policy)
        _require(
            len(known) <= most,
            "budget",
            f"{most} different queries are the budget of this consortium's life, and all are used; the members can "
            "amend the terms with another policy budget=N, which tells more of the key",
            budget=most,
        )
        answers = len(ledger.answered()) + 1
        _require(
            rules.max_answers is None or answers <= rules.max_answers,
            "max-answers",
            f"this member's rules allow {rules.max_answers} answers, and all are given; raise max_answers there",
            answers=rules.max_answers or 0,
        )

    # 5. x rests on many coordinates: ‖x‖₂⁴/‖x‖₄⁴, from x itself; and so does every remainder of ⟨x, τ⟩ (`breadth`).
    least = least_effective(d, terms.policy)
    norm1, norm2, norm4 = norms(x)
    _require(
        (norm1, norm2, norm4) == (query.norm1, query.norm2, query.norm4),
        "norms",
        "the query's norms are not those of its vector x; compute the query again from the suspect",
    )
    effective = norm2 * norm2 // norm4 if norm4 else 0
    _require(
        norm4 > 0 and norm2 * norm2 >= least * norm4,
        "narrow",
        f"the query rests on {effective} coordinates, fewer than {least}, and would read off signs of the key; ask "
        "about a model whose weights differ from the anchor in more places",
        effective=effective,
        least=least,
    )

    narrow = narrow_remainder(x, min(least, _ADDED))
    _require(
        narrow is None,
        "remainder",
        f"a remainder of the answer would rest on {narrow.effective if narrow else 0} coordinates, fewer than "
        f"{min(least, _ADDED)}, and would read off signs of the key: nearly all entries of x share a divisor; no "
        "trained model looks like that",
        effective=narrow.effective if narrow else 0,
        least=min(least, _ADDED),
    )

    # 6. So does what x adds to the answers that were given. Signs in burnt leaves are public, so whatever an earlier x
    # had there can be subtracted, and must not make up the number.
    if not again:
        _check_residual(x, ledger, least, [slice(i * terms.leaf, (i + 1) * terms.leaf) for i in burnt])

    # 7. A person approved it, or the member's rules do.
    if approved:
        return "person"
    _require(
        rules.approve == "always",
        "not-approved",
        "nobody has approved this query here; look at the suspect and its purpose, then answer with --approve",
    )
    today = ledger.answers_since(calendar.timegm(time.gmtime()) - _DAY)
    _require(
        again or today < (rules.max_queries_per_day or 0),
        "per-day",
        f"this member's rules approve {rules.max_queries_per_day} queries in 24 hours, and {today} were answered; "
        "wait, or answer with --approve",
        allowed=rules.max_queries_per_day or 0,
        answered=today,
    )
    return "rules"


def _leaves(numbers: Sequence[int]) -> str:
    """The leaf 3; the leaves 3, 7 and 40 more."""
    if len(numbers) == 1:
        return f"the leaf {numbers[0]}"
    more = len(numbers) - _SHOWN
    return f"the leaves {', '.join(map(str, numbers[:_SHOWN]))}{f' and {more} more' if more > 0 else ''}"


def _check_residual(x: Numbers, ledger: Ledger, least: int, public: Sequence[slice]) -> None:
    past = ledger.kept_queries()
    if not past:
        return
    least = min(least, _ADDED)
    found = _residual(x, [ledger.vector_path(entry["x"]) for entry in past], public)
    if found.known:
        return  # an answered x but for leaves that were burnt since: its answer follows from the earlier one
    nearest = int(np.argmax(np.abs(found.cosines)))
    entry, cosine = past[nearest], abs(float(found.cosines[nearest]))
    near: dict[str, Value] = {"query": entry["query"], "answered": entry["time"][:10], "cosine": f"{cosine:.3f}"}
    earlier = f"the model of query {entry['query'][:16]} that was answered on {entry['time'][:10]}"
    _require(
        found.effective >= least,
        "adds-little",
        f"this query adds {found.effective} coordinates to those answered before, fewer than {least}, and would read "
        f"off signs of the key; the closest is {earlier} (cosine {cosine:.3f}), whose result stands",
        effective=found.effective,
        least=least,
        **near,
    )
    _require(
        found.distinct >= _DISTINCT,
        "too-close",
        "this query is too close to a combination of those answered before to tell what it adds, and could be made to "
        f"read off signs of the key; the closest is {earlier} (cosine {cosine:.3f}), whose result stands",
        **near,
    )


@dataclass(frozen=True)
class _Residual:
    """r = x − its projection onto the span of stored vectors: ‖r‖₂², ⌊‖r‖₂⁴/‖r‖₄⁴⌋; x's cosines with the stored ones,
    and whether it is one of them; `distinct`: the smallest ‖Σ b_i·x_i/‖x_i‖‖² over them and x, for ‖b‖ = 1."""

    squared: float
    effective: int
    cosines: NDArray[np.float64]
    known: bool
    distinct: float


def _residual(x: Numbers, paths: Sequence[Path], public: Sequence[slice]) -> _Residual:
    """What x adds to stored vectors, outside of coordinates that are public.

    r = x − Σ a_i·x_i with G·a = c, where G_ij = ⟨x_i, x_j⟩ and c_i = ⟨x_i, x⟩ (scaled to vectors of length 1). Files
    are read in step, piece by piece; the projection is repeated on what is left until r is orthogonal to rounding. m
    stored vectors cost about m²·d multiplications.

    r can be far smaller than rounding, and still be one coordinate that integers read exactly: x_1 = 32·c_1 − c_2,
    x_2 = 32·c_2 − c_3, … So `distinct`, the smallest eigenvalue of G, says whether rounding can hide anything.
    """
    count = len(paths)
    gram, names = np.zeros((count + 1, count + 1)), [hashlib.blake2b() for _ in range(count + 1)]
    for rows in _in_step(x, paths, public):
        gram += rows @ rows.T
        for name, row in zip(names, rows, strict=True):
            name.update(row)
    lengths = np.sqrt(gram.diagonal())
    first = {name.digest(): i for i, name in reversed(list(enumerate(names)))}  # equal ones but for public coordinates
    told = [i for i in sorted(first.values()) if lengths[i] > 0]
    lengths[lengths == 0] = 1  # a vector that was on public coordinates alone
    unit = gram / np.outer(lengths, lengths)
    distinct = float(np.linalg.eigvalsh(unit[np.ix_(told, told)])[0])
    weights, target = np.zeros(count), gram[:count, count]
    for _ in range(4):
        weights += np.linalg.lstsq(unit[:count, :count], target / lengths[:count], rcond=1e-12)[0] / lengths[:count]
        two = four = 0.0
        target = np.zeros(count)
        for rows in _in_step(x, paths, public):
            rest = rows[count] - weights @ rows[:count]
            square = rest * rest
            two, four = two + float(square.sum()), four + float(square @ square)
            target += rows[:count] @ rest
        if np.abs(target / lengths[:count]).max() <= 1e-9 * lengths[count]:
            break
    effective = math.floor(two * two / four) if four > 0 else 0
    return _Residual(two, effective, unit[:count, count], first[names[count].digest()] < count, distinct)


def _in_step(x: Numbers, paths: Sequence[Path], public: Sequence[slice]) -> Iterator[NDArray[np.float64]]:
    """Pieces of the stored vectors, and of x as the last row, as a matrix in a bounded memory; 0 where it is public."""
    stored = [StoredVector(path) for path in paths]
    wrong = [path for path, vector in zip(paths, stored, strict=True) if vector.size != x.size]
    if wrong:
        raise KeystoreError(f"{str(wrong[0])!r} is not a vector of this consortium: it has another length")
    width = max(1024, _FLOATS // (len(paths) + 1))
    for start in range(0, x.size, width):
        part = x[start : start + width]
        rows = np.empty((len(paths) + 1, part.size))
        for row, vector in zip(rows, stored, strict=False):
            row[:] = vector.take(part.size)
        rows[-1] = part
        for span in public:
            rows[:, max(span.start - start, 0) : max(span.stop - start, 0)] = 0
        yield rows
