"""Some rounds of a run through the real protocol, beside the ideal functionality: the models must be the same bits.

Both get the same local results. On one side members with shares of a key, masks and a server (`quorumark.simulation`);
on the other the lab's sum with the key put together. This runs on the CPU and needs `cryptography`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quorumark import field, shamir
from quorumark.consortium.identity import Identity
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Manifest, Member, Terms, anchor_of
from quorumark.consortium.strength import Strength
from quorumark.errors import InputError, RoundError
from quorumark.research.known import SeededKey
from quorumark.research.lab import data
from quorumark.research.lab.config import Settings, strength_settings
from quorumark.research.lab.image_run import ImageRun
from quorumark.research.lab.mark import decoded
from quorumark.setup.inprocess import deal_key
from quorumark.simulation import Federation, FederationMember

__all__ = ["MaskedRound", "compare"]


@dataclass(frozen=True)
class MaskedRound:
    """One round on both sides."""

    round: int
    marked: bool
    different: int  # weights of the global model that are not the same bits
    alike: bool  # whether both sides have the same history: all models, marks and norms so far
    widened: int  # members whose update needed wider units
    alone: int  # members who were left out because too few others need units as wide
    largest: float  # the mark's largest part, so that "no difference" means something
    seconds: float


def compare(settings: Settings, images: data.ImageSet, rounds: int) -> list[MaskedRound]:
    """Runs the first rounds of a run on both sides."""
    if settings.papers_code or settings.dither:
        raise InputError("--masked", "must be left out under paper-code and with dither: only the lab has them", rounds)
    run = ImageRun(replace(settings, rounds=rounds), images)
    federation, manifest, shares = _federation(run)
    if run.mark is not None:
        keys = run.keys if settings.per_client else [_key(manifest, shares)]
        run.mark = run.made_mark(keys)
    found = []
    for number in range(1, rounds + 1):
        run.local_models(number)
        report = federation.round()
        alone = [x for x, code in report.excluded_codes.items() if code == "round.level-alone"]
        if report.given_up or len(report.excluded) > len(alone):
            raise RoundError(
                f"round {number} of the protocol failed: {report.given_up or report.excluded}", code="round.given-up"
            )
        total, packed = run.summed()
        plain = decoded(total.clone())
        if run.mark is None:
            ours = plain
        else:
            ours, _ = run.mark.apply(number, run.model, total, run.weights, run.fleet.model, packed=packed)
        theirs = torch.from_numpy(run.layout.flatten(federation.model))
        different = int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())
        largest, taken = float((ours - plain).abs().max()), sum(report.seconds.values())
        alike = run.mark is None or _chain(run.mark) == federation.history.mark.chain
        if packed is not None:
            alike = alike and report.members == tuple(k + 1 for k in packed.members)
        counts = len(report.widened), len(alone)
        found.append(MaskedRound(number, report.marked, different, alike, *counts, largest, taken))
        run.model = ours
    return found


def _federation(run: ImageRun) -> tuple[Federation, Manifest, dict[int, Any]]:
    """The run's members as a consortium with a key from a dealer in memory, and their server."""
    layout, settings = run.layout, run.settings
    module = run.fleet.module
    like = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    initial = layout.unflatten(run.initial.numpy(), like)
    people = [Identity.generate(f"member {x}") for x in range(1, settings.members + 1)]
    roster = tuple(
        Member(x, person.name, person.ed25519, person.x25519, int(count))
        for x, (person, count) in enumerate(zip(people, run._counts, strict=True), 1)
    )
    anchor = anchor_of(layout, initial)
    strength = strength_settings(settings.strength)
    threshold = max(2, settings.members // 2 + 1)
    size, created = layout.coordinates, "2026-01-31T12:00:00Z"
    # what the members add up is compared, not what they check of it
    policy = Policy(sums="unchecked", packing=settings.packing)
    terms = Terms("lab", threshold, roster, layout.digest(), size, anchor, created, setup="dealer", policy=policy)
    if strength is not None:
        terms = replace(terms, strength=Strength.of(strength, size))
    manifest, shares = deal_key(people, terms)

    def train(_model: Any, k: int) -> Any:
        return layout.unflatten(run.fleet.model(k).numpy(), like)  # what the lab's member k has just trained

    members = {}
    for x, person in enumerate(people, 1):
        own = run.keys[x - 1].numpy().astype(np.int64) if settings.per_client else None
        share = shares[x] if strength is not None and own is None else None
        members[x] = FederationMember(
            person, manifest, layout, train, x - 1, share, mark=strength is not None, own_key=own
        )
    return Federation(manifest, layout, initial, members), manifest, shares


def _chain(mark: Any) -> bytes:
    mark._wait()  # the state moves on in a thread
    return bytes(mark.state.chain)


def _key(manifest: Manifest, shares: dict[int, Any]) -> SeededKey:
    """The key in use, put together: σ ⊙ τ_raw."""
    raw = field.to_signed(shamir.reconstruct(shares, manifest.terms.threshold))[: manifest.terms.coordinates]
    signs = np.where(manifest.genesis.whitening(0, raw.size), -raw, raw)
    return SeededKey.of_signs(signs)
