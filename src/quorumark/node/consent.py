"""What a member's operator may consent to: another sum from a model that this member has answered from, or sums without
a key beside a key (docs/secagg.md, "One state, one opened sum")."""

from __future__ import annotations

from quorumark.errors import InputError
from quorumark.node.journal import Journal
from quorumark.node.marked import UNMARKED

__all__ = ["consent_text", "give_consent"]


def consent_text(journal: Journal, *, here: bool = False, unmarked: bool = False) -> str:
    """What an operator would consent to, in words: another sum from the anchor, or from the last model (`here`); or
    sums without a key of models that another consortium of this home marks (`unmarked`)."""
    if unmarked:
        _check_keyless(journal)
        return (
            f"{journal.name} also belongs to a consortium that marks models of this kind. If both ever train the same "
            "weights, a server that sees both sums reads that consortium's whole key from their difference: "
            "consent only if they never do."
        )
    with journal.memory().edit() as memory:
        marked = bool(memory["marked"])
    if here:
        return (
            f"{journal.name} has answered for a sum from the last model. Another sum from it can show the key to a "
            "server that holds both, above all if a member helps it: consent only if a member or the server's "
            "files are lost for ever."
        )
    text = f"{journal.name} has taken part in a run from the initial model. A second run shows more of the members' "
    if not marked:
        return text + "updates: two sums from one model differ by what training did. Nothing was marked yet."
    return text + (
        "updates, and each run with marked rounds tells a server more about the key: this can show the key, above "
        "all where training repeats itself."
    )


def give_consent(journal: Journal, *, here: bool = False, unmarked: bool = False) -> None:
    """The operator's: this member may answer once more from a state; or take part in `unmarked` sums."""
    if unmarked:
        _check_keyless(journal)
        name = UNMARKED
    else:
        name = (journal.last_state() if here else journal.state_of_anchor()).hex()
    with journal.memory().edit() as memory:
        memory["consents"][name] = True


def _check_keyless(journal: Journal) -> None:
    if journal.manifest.terms.has_key:
        raise InputError("--unmarked", "must be for a consortium without a key", repr(journal.manifest.terms.name))
