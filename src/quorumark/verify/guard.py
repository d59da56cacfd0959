"""A member's guard over the key: what it refuses to answer, and why (docs/verification.md, "The guard").

An answered query opens Y = ⟨x, τ⟩, one linear equation in the secret key τ ∈ {±1}^d with a public x; one by layers
opens an equation for each block (docs/layers.md). Three things follow from too many of them, or from crafted ones:

    a direction     n equations give a vector of cosine √(n/d) with τ: Σ Y_i·x_i/‖x_i‖², if the x_i are orthogonal
    a forgery       n equations of models that failed combine into one "model" of z ≈ √n: 64 give 8
    an oracle       answers whose combination rests on few coordinates read those off: x₂ = x₁ + e_j gives τ_j

The first is bounded by a budget, the second by raising z* (`combine.reconcile` counts, `null.raised_threshold` raises),
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
import time
from collections.abc import Sequence

import numpy as np

from quorumark.consortium.policy import NO_BLOCKS, Policy
from quorumark.consortium.records import Manifest, Terms
from quorumark.consortium.strength import ONE
from quorumark.errors import GuardError
from quorumark.model.blocks import Blocks
from quorumark.model.statistic import norms, vector_digest
from quorumark.reasons import Reason, Value
from quorumark.verify.breadth import narrow_remainder
from quorumark.verify.evidence import Query
from quorumark.verify.layered import BROAD, Layers, broad_blocks
from quorumark.verify.ledger import Ledger
from quorumark.verify.residual import Asked, residual
from quorumark.verify.rules import AnswerRules
from quorumark.verify.vectors import Numbers

__all__ = ["block_breadth", "budget", "check_content", "check_query", "layers_offered", "least_effective"]

_ADDED = 1024  # coordinates that what a query adds must rest on
_DISTINCT = 1e-10  # what floating point can tell: far above its 2^-52, below 1024 places in 10^9 coordinates
_DAY = 24 * 60 * 60
_SHOWN = 5  # leaves in a reason


def budget(terms: Terms, reached: int | None = None) -> int:
    """How many equations are answered in a consortium's life: ⌊(ρ/4)²·d⌋, or `budget` in the terms' policy.

    n equations give a vector of cosine √(n/d) with the key, so all answers together tell a quarter of the ρ that the
    public models tell. ρ is what the terms aim at, or what was `reached` (in 2^-32) if that is less. Where the model is
    too small for that, or the rule has no ρ, it is max(16, ⌊d/10⁴⌋), for plain queries only.
    """
    if terms.policy.budget is not None:
        return terms.policy.budget
    return max(_plain_budget(terms), _quarter(terms, reached))


def _plain_budget(terms: Terms) -> int:
    return max(16, terms.coordinates // 10_000)


def _quarter(terms: Terms, reached: int | None) -> int:
    """⌊(ρ/4)²·d⌋; 0 for rules of strength without a ρ."""
    rho = min(terms.strength.rho, terms.strength.rho if reached is None else reached)
    return rho * rho * terms.coordinates // (16 * ONE * ONE)


def layers_offered(terms: Terms, reached: int | None = None) -> bool:
    """Whether members answer by layers at all: a rule for blocks, a key of signs, and a budget that allows it."""
    agreed = terms.policy.blocks != NO_BLOCKS and terms.key == "rademacher"
    return agreed and _quarter(terms, reached) >= _plain_budget(terms)


def block_breadth(terms: Terms) -> int:
    """On how many coordinates each block of a query by layers must rest."""
    return min(least_effective(terms.coordinates, terms.policy), _ADDED)


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
    query: Query,
    x: Numbers,
    manifest: Manifest,
    ledger: Ledger,
    rules: AnswerRules,
    approved: bool,
    blocks: Blocks | None = None,
) -> str:
    """Whether this member answers a query with the vector x, which it has computed from the suspect itself.

    `blocks`: those of the layout, by the terms' rule; needed where anything was or is asked by layers. A GuardError
    says why not, and its `reason` says so in a code. Otherwise it returns who approved: "person" (the command's
    --approve) or "rules".
    """
    with ledger.exclusive():
        check_content(query, x, manifest, ledger, rules, blocks)
        return _approved_by(query, ledger, rules, approved)


def check_content(
    query: Query, x: Numbers, manifest: Manifest, ledger: Ledger, rules: AnswerRules, blocks: Blocks | None = None
) -> None:
    """What this member refuses whatever a person says: so it can be told before anybody is asked. Changes nothing."""
    terms, d = manifest.terms, manifest.terms.coordinates
    again = query.equations <= ledger.opened(query.x)  # the same answer once more tells nobody anything

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
        f"the query does not leave out {_leaves(forgotten)} that an audit opened: prepare it again with --audit PROOF, "
        "the file that `verify audit check --keep` wrote",
        count=len(forgotten),
        leaves=tuple(forgotten[:_SHOWN]),
    )
    _require(
        not added,
        "unexplained-leaves",
        f"the query leaves out {_leaves(added)}, and this member knows of no audit that opened them: answer with "
        "--audit PROOF, the file that `verify audit check --keep` wrote, or prepare the query again without it",
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

    # 4. The budget, for the consortium's life: n equations give a vector of cosine √(n/d) with the key.
    if not again:
        opened = ledger.equations()
        opened[query.x] = max(query.equations, opened.get(query.x, 0))
        most = budget(terms, rules.reached)
        _require(
            sum(opened.values()) <= most,
            "budget",
            f"{most} equations are the budget of this consortium's life; {sum(opened.values()) - query.equations} are "
            f"used, and this query would open {query.equations}; the members can amend the terms with another policy "
            "budget=N, which tells more of the key",
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

    # 6. By layers: offered here, and enough blocks are as broad by themselves. The others are not answered.
    if query.layers is not None:
        _check_layers(query.layers, x, terms, rules, blocks)

    # 7. So does what x adds to the answers that were given. Signs in burnt leaves are public, so whatever an earlier x
    # had there can be subtracted, and must not make up the number.
    if not again:
        _check_residual(query, x, ledger, least, [slice(i * terms.leaf, (i + 1) * terms.leaf) for i in burnt], blocks)


def _approved_by(query: Query, ledger: Ledger, rules: AnswerRules, approved: bool) -> str:
    """8. A person approved it, or the member's rules do."""
    if approved:
        return "person"
    _require(
        rules.approve == "always" and (query.layers is None or rules.layers),
        "not-approved",
        "nobody has approved this query here; look at the suspect, its purpose and what it costs, then answer with "
        "--approve",
    )
    again = query.equations <= ledger.opened(query.x)
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
    """A leaf of the key; 33 leaves of the key. Which ones helps nobody; the reason's values have the first of them."""
    return f"{len(numbers):,} {'leaf' if len(numbers) == 1 else 'leaves'} of the key"


def _check_layers(layers: Layers, x: Numbers, terms: Terms, rules: AnswerRules, blocks: Blocks | None) -> None:
    if blocks is None or blocks.count < 2 or not layers_offered(terms, rules.reached):
        text = (
            "this consortium answers nothing by layers: its model is too small, its mark too weak, its key not of "
            "signs, or it agreed on no blocks"
        )
        raise GuardError(text, reason=Reason.of("guard.no-layers"))
    measured = broad_blocks(x, blocks, block_breadth(terms))
    _require(
        layers.rule == terms.policy.blocks and (layers.norm1, layers.norm2) == measured,
        "blocks",
        f"the query's blocks and norms are not those of the agreed rule {terms.policy.blocks!r}; prepare it again",
    )
    _require(
        100 * layers.count >= BROAD * blocks.count,
        "narrow-blocks",
        f"only {layers.count} of {blocks.count} blocks depend on many coordinates by themselves, fewer than {BROAD} %; "
        "ask about a model whose weights differ from the anchor in more places",
        broad=layers.count,
        blocks=blocks.count,
    )


def _check_residual(
    query: Query, x: Numbers, ledger: Ledger, least: int, public: Sequence[slice], blocks: Blocks | None
) -> None:
    past = ledger.kept_queries()
    asked = None
    if query.layers is not None:
        # the whole of x was opened before. Alone, its blocks are orthogonal, and broad by themselves
        past = [entry for entry in past if entry["x"] != query.x]
        asked = [b for b, norm2 in enumerate(query.layers.norm2) if norm2]
    if not past:
        return
    least = min(least, _ADDED)
    answered = [Asked(ledger.vector_path(entry["x"]), entry["equations"] > 1) for entry in past]
    found = residual(x, answered, public, () if blocks is None else blocks.edges, asked)
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
