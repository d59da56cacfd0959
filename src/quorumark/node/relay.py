"""The key ceremony and verification over any engine: the server relays, what is sealed to a member only that member
reads. Members make a key only for terms whose digest their operators pinned, and answer verifications only under their
own policies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from quorumark.consortium.records import Card, Manifest, Terms
from quorumark.errors import CeremonyError, EvidenceError, InputError, QuorumarkError, RoundError
from quorumark.model.suspect import read_suspect
from quorumark.node.ceremony import CeremonyServer
from quorumark.node.queries import pack_query
from quorumark.node.wire import Sent, Wire
from quorumark.verify.certificate import Certificate
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.layered import Opened
from quorumark.verify.proof import Audit, explain
from quorumark.verify.query import AskLayers, prepare
from quorumark.verify.reference import Reference

__all__ = ["relay_ceremony", "relay_query"]

_TURNS = 60  # a ceremony takes ten; members may come late
_TRIES = 4  # how often in a row a member may fail to reply


def relay_ceremony(
    wire: Wire,
    terms: Terms,
    *,
    timeout: float = 300.0,
    stage_timeout: float = 120.0,
    note: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """The dealer-free ceremony: every member ends with a share in its home, and the manifest comes out.

    All members must take part. A member that refuses says why, and the ceremony stops; a node that is no member's is
    left out. Where a reply is lost, or a node fails, it is asked again: members do every step once and show the same
    messages as often as they are asked. If the server itself dies, call this again with the same terms: the members go
    on where they were.
    """
    server = CeremonyServer(terms, wire.run)
    nodes = wire.present(terms.members, timeout)
    points: dict[int, int] = {}
    failures: dict[int, int] = {}  # in a row, by node
    for _ in range(_TURNS):
        before, waiting, made = server.progress, dict[int, str](), dict[int, Sent]()
        for node in nodes:
            config, arrays = server.turn(points.get(node))
            made[node] = Sent({**config, "stage": "setup"}, arrays)
        refused: dict[int, str] = {}
        replies = wire.exchange(made, stage_timeout)
        lost = {node: f"no reply in {stage_timeout:.0f} s" for node in nodes if node not in replies}
        for node, reply in replies.items():
            try:
                answer = reply.accepted()
            except RoundError as error:
                (lost if reply.has_failed else refused)[node] = str(error)
                continue
            try:
                point = int(answer["point"])
                if point in points.values() and points.get(node) != point:
                    raise CeremonyError(f"{terms.member(point).name!r} runs two nodes: stop one", code="node.twice")
                server.take(point, wire.label(node), answer, reply.arrays)
                points[node] = point
                waiting[point] = str(answer.get("waiting", ""))
                note(f"{terms.member(point).name}: {answer['step']}")
            except (QuorumarkError, KeyError, TypeError, ValueError) as error:
                refused[node] = str(error)
        if server.finished and server.manifest is not None:
            return server.manifest
        failures = {node: failures.get(node, 0) + 1 for node in lost}
        gone = {node: why for node, why in lost.items() if failures[node] >= _TRIES}
        stopped = {node: why for node, why in {**gone, **refused}.items() if node in points}
        if stopped:
            said = "; ".join(f"{terms.member(points[node]).name}: {why}" for node, why in stopped.items())
            raise CeremonyError(f"the ceremony stopped. {said}", code="ceremony.stopped")
        nodes = [node for node in nodes if node in points or (node in lost and node not in gone)]
        for node in lost.keys() & nodes:
            note(f"node {wire.label(node)} is asked again: {lost[node]}")
        if len(nodes) < terms.members:
            absent = [member.name for member in terms.roster if member.point not in points.values()]
            said = "".join(f"; node {wire.label(node)} says: {why}" for node, why in {**gone, **refused}.items())
            raise CeremonyError(
                f"the ceremony needs all members, and {', '.join(absent)} did not take part: start their nodes{said}",
                code="ceremony.members-missing",
            )
        if not lost and server.progress == before:
            stuck = "; ".join(f"{terms.member(x).name} waits for {names}" for x, names in waiting.items() if names)
            raise CeremonyError(
                f"the ceremony stands still ({stuck}): an earlier one under these terms was finished by some members "
                "and not by all, and its messages are gone; agree on terms with another date, and make a key for those",
                code="ceremony.stands-still",
            )
    raise CeremonyError("the ceremony does not end: look at the members' logs", code="ceremony.stands-still")


def relay_query(
    wire: Wire,
    reference: Reference,
    suspect: str | os.PathLike[str],
    *,
    align: bool = False,
    lora: bool = False,
    with_base: bool = True,
    audits: Sequence[Audit] = (),
    after: Certificate | None = None,
    examiner: Card | None = None,
    opener: Callable[[Query, Sequence[Partial]], Opened] | None = None,
    nodes: Collection[int] | None = None,
    timeout: float = 60.0,
    stage_timeout: float = 300.0,
    note: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Asks the members whether a model (a file or a folder of shards) is theirs; returns the signed certificate.

    Each answers under its own rules or says why not (`note` hears of it); fewer than t answers are an EvidenceError.
    `align` and `lora` ask as `quorumark verify prepare --align --lora` does; the members are sent the groups, the
    adapter's description and its base model, and compare them with the manifest (`with_base=False`: they have the base
    in their own folders). `nodes`: those to ask, by default all that are there. `audits`: proofs of all audits so far,
    whose leaves are left out; a member that knows of one that is not here refuses.

    With `after` (the certificate of the plain query that did not pass) and an `examiner` it asks by layers
    (docs/layers.md): `opener(query, partials)` hands the sealed answers to the examiner, and gives its word.
    """
    opened, manifest = read_suspect(suspect), reference.manifest
    explained = explain(reference.chain, audits)
    burnt = {leaf for leaves in explained.values() for leaf in leaves}
    if len({after is None, examiner is None, opener is None}) > 1:
        raise InputError("after, examiner, opener", "must be given together, to ask by layers", "some of them")
    layers = None if after is None or examiner is None else AskLayers.of(after, examiner)
    query = prepare(reference, opened, align=align, lora=lora, burnt=burnt, layers=layers).query
    config, arrays = pack_query(reference, opened, query, audits, with_base=with_base, after=after)
    chosen = sorted(nodes) if nodes is not None else wire.present(manifest.terms.threshold, timeout)

    def ask_each(config: dict[str, Any], vectors: dict[str, Any], to: Collection[int], name: str) -> dict[int, bytes]:
        """One stage at these nodes: the field `name` of each reply, by node."""
        found = {}
        replies = wire.exchange({node: Sent(config, vectors) for node in to}, stage_timeout)
        for node in set(to) - replies.keys():
            note(f"node {wire.label(node)}: no reply in {stage_timeout:.0f} s")
        for node, reply in replies.items():
            try:
                found[node] = bytes(reply.accepted()[name])
            except (QuorumarkError, KeyError, TypeError) as error:
                note(f"node {wire.label(node)}: {error}")
        return found

    partials: dict[int, Partial] = {}
    answers = ask_each({**config, "stage": "answer"}, arrays, chosen, "partial")
    for node, data in answers.items():
        try:
            partial = Partial.from_bytes(data)
            partial.verify(manifest.terms)
            partials[node] = partial
        except QuorumarkError as error:
            note(f"node {wire.label(node)}: {error}")
    if len({partial.point for partial in partials.values()}) < manifest.terms.threshold:
        raise EvidenceError(
            f"{len(partials)} members answered, and {manifest.terms.threshold} must: ask again when more of them are "
            "there and their policies allow it"
        )
    answered = list(partials.values())
    word = None if opener is None else opener(query, answered)
    certificate = Certificate.of(combine(manifest, query, answered, audits=explained, opened=word))
    signatures: dict[str, str] = {}
    sign = {"stage": "sign", "certificate": certificate.to_bytes()}
    for node, data in ask_each(sign, {}, list(partials), "certificate").items():
        try:
            signed = Certificate.from_bytes(data)
            if signed.payload != certificate.payload:
                raise EvidenceError("it signed another certificate than the one that it was sent")
            signed.signers(manifest)
            signatures |= signed.signatures
        except QuorumarkError as error:
            note(f"node {wire.label(node)}: {error}")
    return Certificate(certificate.payload, signatures)
