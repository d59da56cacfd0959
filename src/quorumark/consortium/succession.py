"""Which terms and manifests may follow which: amendments, resharings, the anchor after warm-up rounds."""

from __future__ import annotations

from dataclasses import replace

from quorumark.checks import require
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Manifest, Terms

__all__ = ["check_follows", "check_terms_follow", "is_warm_up", "quorum", "unchanged"]


# what no successor may change: the key depends on it
_FIXED = ("name", "layout", "coordinates", "anchor", "buffers", "key", "setup", "leaf", "statistic")


def unchanged(terms: Terms, before: Terms) -> dict[int, int]:
    """The members who stay, with both their keys: point now → point before."""
    known = {(member.ed25519, member.x25519): member.point for member in before.roster}
    now = {member.point: known.get((member.ed25519, member.x25519)) for member in terms.roster}
    return {point: earlier for point, earlier in now.items() if earlier is not None}


def quorum(terms: Terms) -> int:
    """How many members must stay for a successor to count: the threshold, and more than half.

    Fewer than t have no say over the key; and of two successors that exclude each other only one finds more than half.
    """
    return max(terms.threshold, terms.members // 2 + 1)


def is_warm_up(terms: Terms, before: Terms) -> bool:
    """Whether terms follow others by naming the anchor after warm-up rounds: nothing else may change with it."""
    return terms.anchor != before.anchor


def _check_warm_up(terms: Terms, before: Terms) -> None:
    require(before.strength.warmup_rounds > 0, "a successor's anchor", "must not change: there are no warm-up rounds")
    same = replace(terms, anchor=before.anchor, created=before.created) == before
    require(same, "an amendment that names the warm-up anchor", "must change nothing else")


def check_terms_follow(terms: Terms, before: Terms) -> dict[int, int]:
    """Whether terms may follow others; the members who stay, as `unchanged` gives them."""
    if is_warm_up(terms, before):
        _check_warm_up(terms, before)
    for name in _FIXED:
        if name == "anchor":
            continue
        require(
            getattr(terms, name) == getattr(before, name),
            f"a successor's {name}",
            "must not change: the key depends on it",
        )
    # who may choose, once a suspect is known, how it is read and matched has many tries, and the null does not hold
    for what in Policy.FIXED:
        require(
            getattr(terms.policy, what) == getattr(before.policy, what),
            f"a successor's {what}",
            "must not change, come or go: they are agreed on with the first terms, before there is anything to fit",
        )
    require(
        before.policy.has_links or not terms.policy.has_links,
        "a successor's cohort",
        "must come with sums=unchecked, if sums were not checked with a cohort before: members whose cohorts are drawn "
        "follow what those before them signed, and nobody signed anything of the rounds so far",
    )
    _check_strength(terms, before)
    stay = unchanged(terms, before)
    require(
        len(stay) >= quorum(before),
        f"a successor of {before.name!r}",
        f"must keep at least {quorum(before)} members with their keys, but keeps {len(stay)}",
    )
    return stay


def _check_strength(terms: Terms, before: Terms) -> None:
    """The mark may become stronger or weaker: its state goes on, and what it has spent of ρ and of the leak counts on.

    What the state is made of stays: which model is the anchor, and whether members upload norms.
    """
    now, then = terms.strength, before.strength
    for what in ("warmup_rounds", "alike"):
        require(
            getattr(now, what) == getattr(then, what), f"a successor's strength {what!r}", "must not change: begin anew"
        )
    paper = (now.rule == "paper", then.rule == "paper")
    require(paper[0] == paper[1], "a successor's strength 'rule'", "must not change to 'paper', nor from it")


def check_follows(manifest: Manifest, before: Manifest) -> None:
    """Whether a manifest may follow another: an amendment (same shares) or a resharing (the next epoch)."""
    require(manifest.predecessor == before.digest().hex(), "a successor", "must name its predecessor by digest")
    genesis = before.genesis
    if is_warm_up(manifest.terms, before.terms):
        # once, before anything was marked: the sign whitening is drawn anew, from a genesis with the new anchor
        first = before.terms.digest().hex() == genesis.terms and before.epoch == manifest.epoch == 0
        require(first, "a warm-up anchor", "must be named before any other change, and once")
        genesis = replace(genesis, anchor=manifest.terms.anchor)
    require(manifest.genesis == genesis, "a successor's genesis", "must not change: the key depends on it")
    require(manifest.commitment == before.commitment, "a successor's commitment", "must not change")
    stay = check_terms_follow(manifest.terms, before.terms)
    if manifest.epoch == before.epoch:
        same = (manifest.roots, manifest.archived) == (before.roots, before.archived)
        require(same, "an amendment", "must leave the shares as they are: a new epoch needs a resharing")
        sizes = [(m.terms.threshold, m.terms.members) for m in (manifest, before)]
        require(sizes[0] == sizes[1], "an amendment", "must keep the threshold and the number of members")
        require(
            all(now == earlier for now, earlier in stay.items()), "an amendment", "must leave members at their points"
        )
    else:
        require(manifest.epoch == before.epoch + 1, "a successor's epoch", "must be the next one")
        require(
            not before.archived or manifest.archived == before.archived, "a successor's archives", "must not change"
        )
        require(not set(manifest.roots) & set(before.roots), "a resharing", "must make new shares for everybody")
