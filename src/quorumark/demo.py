"""The demo: five hospitals train one model, and any three of them can prove afterwards that it is theirs.

It runs the real thing, small: the dealer-free key ceremony over a folder, federated training under secure aggregation
with members who drop out, and verification with the same functions as the commands `quorumark verify …`, down to the
signed certificate. Handwritten digits, which scikit-learn brings along, stand for the hospitals' data.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from quorumark.align.matching import Groups
from quorumark.consortium.home import Home
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock, replacing, write_shared
from quorumark.consortium.records import DEFAULT_POLICY, Manifest, Member, Terms, anchor_digest
from quorumark.errors import EvidenceError, InputError, MissingDependencyError, RoundError
from quorumark.field import Vector
from quorumark.model.layout import ModelLayout, write_safetensors
from quorumark.model.training import torch_evaluate, torch_train
from quorumark.report import certificate_page, write_page
from quorumark.research.attacks.suite import Subject, classifier, key_of_members, load_weights
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.round.amplitudes import Amplitudes
from quorumark.setup.inprocess import found, make_key
from quorumark.simulation import Federation, FederationMember, Losses, watch
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import check_certificate, sign
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Finding, Partial, Query
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference, read_chain

HOSPITALS = ("Avon", "Birch", "Cedar", "Delta", "Elm")
EXAMPLES = (437, 350, 280, 220, 150)
THRESHOLD = 3
ROUNDS = 20
TEST = 360
# a short run of a small model needs a larger step a round to reach ρ = 0.05 (docs/strength.md)
STRENGTH = {"rule": "rho", "rho": "0.05", "c_max": "0.1", "lr": "cosine:24", "dither": "3", "continuity": "4"}
LOSSES = Losses({(4, "train"): [5], (7, "upload"): [2], (10, "unmask"): [1]})
NAMES = {
    "balanced-anchor/v1": "ours",
    "global-cosine/v1": "the paper's text",
    "mean-tensor-cosine/v1": "the paper's code",
}


@dataclass(frozen=True)
class _World:
    """The data, and how to make the network."""

    make: Callable[[], Any]
    data: tuple[tuple[Any, Any], ...]
    test: tuple[Any, Any]


def run(console: Console | None = None, out: Path | None = None) -> dict[str, Any]:
    """Runs the demo, prints what happened, and gives the figures; with `out`, everything is kept there."""
    console = console or Console()
    started = time.perf_counter()
    world = _world()
    initial = _initial(world, seed=2026)
    layout = ModelLayout.of(world.make())
    groups = _groups(world)
    console.print(
        f"quorumark demo: {len(HOSPITALS)} hospitals train one model; any {THRESHOLD} of them can prove that it is "
        f"theirs.\nThe model has {layout.size:,} weights; {layout.coordinates:,} of them carry the mark.\n"
    )
    table = Table("what was done", "result", "what it means", title_justify="left")
    with _folder(out) as folder:
        before = time.perf_counter()
        hospitals = _Hospitals.found(folder, layout, initial, groups)
        table.add_row(
            f"a secret key of {layout.coordinates:,} signs is made, without a dealer",
            f"{time.perf_counter() - before:.1f} s for all five",
            f"a share of {8 * layout.coordinates / 2**20:.1f} MiB each; nobody saw the key",
        )
        marked = _train(console, world, hospitals.people, hospitals.manifest, hospitals.shares, layout, initial, out)
        # the control has a consortium of its own: no two sums of one round are ever opened in one
        people = tuple(Identity.generate(name) for name in HOSPITALS)
        manifest, shares = make_key(people, _terms(people, layout, initial, groups))
        unmarked = _train(console, world, people, manifest, shares, layout, initial, out, mark=False)
        given_up = [report for run_ in (marked, unmarked) for report in run_.reports if report.given_up]
        if given_up:
            raise RoundError(f"a round of the demo was given up: {given_up[0].given_up}")
        lost = sum(len(points) for report in marked.reports for points in report.lost.values())
        retried = sum(report.attempts > 1 for report in marked.reports)
        accuracies = [run_.reports[-1].metrics["accuracy"] for run_ in (marked, unmarked)]
        table.add_row(
            f"they train it for {ROUNDS} rounds; Elm, Birch and Avon drop out once each",
            f"accuracy {100 * accuracies[0]:.1f} %",
            f"without a mark {100 * accuracies[1]:.1f} %; only sums were opened",
        )
        unrelated = torch_train(world.make, epochs=8)(_initial(world, seed=7), world.data[0], seed=7)
        with console.status("verification"):
            summary = _verify(table, hospitals, folder, marked.model, unmarked.model, unrelated)
        console.print(table)
        console.print(
            "z counts standard deviations from chance. It is PASSED from 6.2 on; every model that was tested before "
            f"and failed\nraises that a little. {lost} losses in training, {retried} of them cost a second attempt. "
            f"Done in {time.perf_counter() - started:.1f} s."
        )
        summary |= {
            "accuracy_marked": accuracies[0],
            "accuracy_unmarked": accuracies[1],
            "members": len(HOSPITALS),
            "threshold": THRESHOLD,
            "dropped": lost,
            "rho": marked.reports[-1].rho,
            "coordinates": layout.coordinates,
            "rounds": ROUNDS,
        }
        if out is not None:
            write_shared(out / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
            console.print(
                f"\nIn {out}: report.html to read; certificate.json, and what it takes to check it anywhere:\n"
                f"  quorumark verify check {out}/certificate.json --manifest {out}/consortium.json "
                f"--suspect {out}/suspect.safetensors\n"
                "Since it is a demo, all members' homes are in members/, with the keys that open them. How hard is the "
                f"mark to remove?\n  quorumark attack suite {out} --quick --out {out}-attacked",
                soft_wrap=True,  # a command in two lines could not be copied
            )
    return summary


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where the files go: to stay, or for as long as the demo runs."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="quorumark-demo-") as folder:
        yield Path(folder)


def _world() -> _World:
    try:
        import torch
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError("quorumark[demo]", f"the demo ({error.name} is not installed)") from None
    torch.set_num_threads(1)  # small steps: a second thread costs more than it brings
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    parts = torch.split(order, [TEST, *EXAMPLES])
    sets = tuple((inputs[part], targets[part]) for part in parts)

    def make() -> Any:
        nn = torch.nn
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * 4 * 4, 256), nn.ReLU(),
            nn.Linear(256, 10),
        )  # fmt: skip

    return _World(make, sets[1:], sets[0])


def _initial(world: _World, seed: int) -> dict[str, Any]:
    """A public initial model: nothing about it is secret."""
    import torch

    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in world.make().state_dict().items()}


def _groups(world: _World) -> Groups:
    """Which channels of the network belong together: agreed on before the key exists, for verification with --align."""
    from quorumark.align.trace import derive_groups

    return derive_groups(world.make(), world.test[0][:1])


def _terms(people: Sequence[Identity], layout: ModelLayout, initial: Mapping[str, Any], groups: Groups) -> Terms:
    cards = enumerate(zip(people, EXAMPLES, strict=True), 1)
    roster = tuple(Member(x, person.name, person.ed25519, person.x25519, count) for x, (person, count) in cards)
    anchor = anchor_digest(layout.digest(), layout.encode(initial))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    policy = {**DEFAULT_POLICY, "sums": "checked", "groups": groups.digest()}
    return Terms(
        "demo", THRESHOLD, roster, layout.digest(), layout.coordinates, anchor, created=now, strength=STRENGTH,
        policy=policy, buffers=layout.beside(initial).hex(),
    )  # fmt: skip


@dataclass(frozen=True)
class _Hospitals:
    """The consortium: every member's home and what opens it, and what is public."""

    homes: tuple[tuple[Home, Unlock], ...]
    people: tuple[Identity, ...]
    reference: Reference
    shares: dict[int, Vector]

    @property
    def manifest(self) -> Manifest:
        return self.reference.manifest

    @classmethod
    def found(cls, folder: Path, layout: ModelLayout, initial: Mapping[str, Any], groups: Groups) -> _Hospitals:
        """The hospitals agree on terms and make a key, over a folder, each from a home of its own."""
        members = folder / "members"
        members.mkdir(mode=0o700)
        homes = []
        for name in HOSPITALS:
            Unlock.new_key_file(members / f"{name}.key")
            unlock = Unlock.key_file(members / f"{name}.key")
            homes.append((Home.create(members / name, name, unlock), unlock))
        people = tuple(home.identity(unlock) for home, unlock in homes)
        manifest = found(homes, _terms(people, layout, initial, groups), folder / "ceremony")
        shutil.rmtree(folder / "ceremony")
        write_shared(folder / "consortium.json", manifest.to_bytes())
        write_shared(folder / "layout.json", layout.to_bytes())
        write_shared(folder / "groups.json", groups.to_bytes())
        write_safetensors({name: tensor.numpy() for name, tensor in initial.items()}, folder / "anchor.safetensors")
        shares = {x: home.only_consortium().share(unlock).vector() for x, (home, unlock) in enumerate(homes, 1)}
        return cls(tuple(homes), people, Reference.read(folder / "consortium.json"), shares)

    def ask(self, suspect: Any, points: Sequence[int]) -> tuple[Query, list[Partial]]:
        """A query about a suspect, and the answers of some."""
        query = prepare(self.reference, suspect).query
        partials = []
        for point in points:
            home, unlock = self.homes[point - 1]
            partials.append(answer(home, unlock, self.reference, suspect, query, approved=True))
        return query, partials

    def certify(self, query: Query, partials: Sequence[Partial]) -> Certificate:
        """What the partials say, signed by everybody who answered."""
        certificate = Certificate.of(combine(self.manifest, query, partials))
        for partial in partials:
            certificate = sign(*self.homes[partial.point - 1], certificate)
        return certificate


def _verify(
    table: Table,
    hospitals: _Hospitals,
    folder: Path,
    marked: Mapping[str, Any],
    unmarked: Mapping[str, Any],
    unrelated: Mapping[str, Any],
) -> dict[str, Any]:
    """Is it theirs? Asked of the model, of the one without the mark, and of one that has nothing to do with them."""
    suspect = folder / "suspect.safetensors"
    write_safetensors({name: tensor.numpy() for name, tensor in marked.items()}, suspect)
    query, partials = hospitals.ask(suspect, range(1, len(HOSPITALS) + 1))
    for partial in partials:
        write_shared(folder / "partials" / f"{HOSPITALS[partial.point - 1]}.json", partial.to_bytes())
    write_shared(folder / "query.json", query.to_bytes())
    threes = [combine(hospitals.manifest, query, some) for some in combinations(partials, THRESHOLD)]
    first = threes[0]
    table.add_row("Avon, Birch and Cedar test the model", *_verdict(first))
    if {(finding.verdict, finding.z, finding.corroboration) for finding in threes} != {
        (first.verdict, first.z, "uncorroborated")
    }:
        raise EvidenceError("three hospitals do not get the same as three others")
    table.add_row(
        f"so do all {len(threes)} groups of three", f"{first.verdict} each time", "any three get the same number"
    )
    try:
        combine(hospitals.manifest, query, partials[: THRESHOLD - 1])
        raise AssertionError("two were enough")
    except EvidenceError:
        table.add_row("Avon and Birch try it alone", "refused", "two cannot: what they have says nothing about z")
    certificate = hospitals.certify(query, partials)
    write_shared(folder / "certificate.json", certificate.to_bytes())
    checked, _ = check_certificate(
        certificate, read_chain(folder / "consortium.json"), suspect=suspect, reference=hospitals.reference
    )
    signers = certificate.signers(hospitals.manifest)
    command = "quorumark verify check certificate.json --manifest consortium.json --suspect suspect.safetensors"
    page = certificate_page(certificate, hospitals.manifest, signers=signers, checked=checked, command=command)
    write_page(folder / "report.html", page)
    table.add_row(
        "all five answer and sign a certificate",
        f"{certificate.finding.verdict}, {certificate.finding.corroboration}",
        "two liars would have been noticed",
    )
    others = {}
    for name, model in (("the same model, trained without the mark", unmarked), ("an unrelated model", unrelated)):
        found_, answers = hospitals.ask({key: tensor.numpy() for key, tensor in model.items()}, (1, 3, 4))
        others[name] = hospitals.certify(found_, answers).finding
        table.add_row(f"three test {name}", *_verdict(others[name]))
    known = KnownKey.from_shares(
        hospitals.manifest, hospitals.shares, hospitals.reference.layout, hospitals.reference.anchor
    )
    by_statistic = known.all_z(TensorsInMemory(marked))
    shown = ", ".join(f"{NAMES[statistic]} {z:.1f}" for statistic, z in by_statistic.items())
    table.add_row("z of the model by other statistics", shown, "computed with the key put together: research only")
    z_unmarked, z_unrelated = (float(finding.z) for finding in others.values())
    return {
        "z_marked": float(first.z),
        "z_unmarked": z_unmarked,
        "z_unrelated": z_unrelated,
        "z_by_statistic": by_statistic,
        "verdicts": [first.verdict, *(finding.verdict for finding in others.values())],
        "corroboration": [first.corroboration, certificate.finding.corroboration],
    }


def _verdict(finding: Finding) -> tuple[str, str]:
    meaning = {"PASSED": "it is theirs, beyond doubt", "FAILED": "noise: not accused"}
    return f"{finding.verdict}, z = {float(finding.z):.1f}", meaning.get(finding.verdict, "nothing follows")


def _train(
    console: Console,
    world: _World,
    people: Sequence[Identity],
    manifest: Manifest,
    shares: Mapping[int, Vector],
    layout: ModelLayout,
    initial: Mapping[str, Any],
    out: Path | None,
    *,
    mark: bool = True,
) -> Federation:
    """Federated training under secure aggregation, with a table that says how far it is."""
    train = torch_train(world.make)
    members = {}
    kept: dict[int, Vector] = {}
    for x, (person, data) in enumerate(zip(people, world.data, strict=True), 1):
        member = _Recorder(person, manifest, layout, train, data, shares[x], mark=mark)
        member.opened = kept
        members[x] = member
    name = "marked" if mark else "unmarked"
    folder = None if out is None else out / name
    score = torch_evaluate(world.make, world.test)
    rounds = out / "rounds" if out is not None and mark else None

    def evaluate(model: Mapping[str, Any]) -> dict[str, float]:
        if rounds is not None:  # global models are public, and an attacker has all of them
            rounds.mkdir(exist_ok=True)
            write_safetensors({n: t.numpy() for n, t in model.items()}, rounds / f"{training.round_no:02d}.safetensors")
        return score(model)

    training = Federation(manifest, layout, initial, members, evaluate=evaluate, losses=LOSSES, folder=folder)
    watch(training, ROUNDS, console, f"training, {name}")
    if rounds is not None and kept:
        with replacing(rounds / "norms.npy", 0o644) as file:
            np.save(file, np.stack([kept[number] for number in sorted(kept)]))
    return training


class _Recorder(FederationMember):
    """A member that keeps the sums of norms that rounds open: they are public, and say how strong each mark was."""

    opened: dict[int, Vector]

    def accept(self, round_no: int, encoded: Vector, embedded: Amplitudes | None, norms: Vector | None = None) -> None:
        if norms is not None:
            self.opened[round_no] = norms
        super().accept(round_no, encoded, embedded, norms)


# --- for those who attack ---------------------------------------------------------------------------------


def subject(folder: Path) -> Subject:
    """What `quorumark attack suite` needs, from the folder of an earlier `quorumark demo --out`.

    The key is put together from the members' homes, which lie there with what opens them: research only.
    """
    needed = ("consortium.json", "suspect.safetensors", "groups.json", "rounds", "members")
    for name in needed:
        if not (folder / name).exists():
            raise InputError("the folder", "must be what `quorumark demo --out` of this release left", f"no {name}")
    import torch

    from quorumark.research.attacks import Target, public_scales

    world = _world()
    reference = Reference.read(folder / "consortium.json")
    homes = sorted(path for path in (folder / "members").iterdir() if path.is_dir())[:THRESHOLD]
    known = key_of_members(reference, {home: home.with_name(f"{home.name}.key") for home in homes})
    models = [folder / "anchor.safetensors", *sorted((folder / "rounds").glob("*.safetensors"))]
    checkpoints = [load_weights(path) for path in models]
    norms = np.load(folder / "rounds" / "norms.npy") if (folder / "rounds" / "norms.npy").exists() else None
    scales = public_scales(reference.layout, reference.manifest.terms.strength, checkpoints, norms)
    parts = [torch.cat(both) for both in zip(*world.data, strict=True)]
    other = torch_train(world.make, epochs=8)(_initial(world, seed=7), (parts[0], parts[1]), seed=7)
    released = load_weights(folder / "suspect.safetensors")
    data = (parts[0], parts[1])
    target = Target(
        world.make, released, data, checkpoints, scales, other=other, layout=reference.layout, base=checkpoints[0]
    )
    return Subject("the demo's model", target, classifier(*world.test), reference, known)
