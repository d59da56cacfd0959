"""The front door, as `import quorumark as qm` opens it: everything that the README does, by six names.

    homes = [qm.Home.create(f"members/{name}", name, key_file=f"members/{name}.key") for name in names]
    groups = qm.derive_groups(net, example)
    cards = [(home.card, examples) for home, examples in …]
    terms = qm.Terms.agree("hospitals", 3, cards, model, groups=groups, rounds=30)  # or strength={…}
    qm.Home.make_key(homes, terms)                                   # or, on each machine: home.setup(terms, folder)
    run = qm.Federation.of_homes(homes, model, train, data)
    for report in run.rounds(20): …

    public = qm.Reference.publish("public", homes[0], model)         # what anybody needs who verifies
    query = public.ask("suspect.safetensors")
    partials = [home.answer(public, "suspect.safetensors", query, approve=True) for home in homes[:3]]
    certificate = public.combine(query, partials)                    # z, verdict, and what they rest on
    for home in homes[:3]: certificate = home.sign(certificate)
    public.check(certificate, "suspect.safetensors", report="report.html")

Nothing here computes: each method is a call or two of the packages behind it, which other engines use directly.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from quorumark.align.groups import Groups
from quorumark.align.trace import derive_groups
from quorumark.canonical import canonical
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.records import Card, Manifest, Terms
from quorumark.errors import InputError
from quorumark.files import write_private, write_shared
from quorumark.model.layout import ModelLayout, Source, write_safetensors
from quorumark.model.suspect import Suspect
from quorumark.node.journal import allow_repeats
from quorumark.report import certificate_page, write_page
from quorumark.setup import exchange, inprocess
from quorumark.setup.waiting import until_finished
from quorumark.simulation import Federation as Simulation
from quorumark.simulation import FederationMember, Losses, watch
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import check_certificate, sign
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Finding, Partial, Query
from quorumark.verify.examine import Examined, examine
from quorumark.verify.layered import Opened
from quorumark.verify.public import publish
from quorumark.verify.query import AskLayers, prepare
from quorumark.verify.reference import ANCHOR, GROUPS, LAYOUT, LORA
from quorumark.verify.reference import Reference as PublicSide
from quorumark.verify.rules import AnswerRules

__all__ = ["Certificate", "Federation", "Home", "Reference", "Terms", "derive_groups"]


class Home:
    """A member's folder, with what opens it: identity, terms, manifest, sealed share.

    Pass `key_file` (made by `create`, 0600; keep it apart from the folder) or `passphrase`. A home remembers where its
    key file is, so that an existing one can do without.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, key_file: str | os.PathLike[str] | None = None, passphrase: str = ""
    ) -> None:
        self.folder = HomeFolder(path)
        self.unlock = _unlock(key_file or (None if passphrase else self.folder.key_file()), passphrase)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        name: str,
        *,
        key_file: str | os.PathLike[str] | None = None,
        passphrase: str = "",
    ) -> Self:
        """A new home with new keys. A key file that does not exist is made."""
        if key_file is not None and not Path(key_file).exists():
            Path(key_file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            Unlock.new_key_file(key_file)
        home = cls(path, key_file=key_file, passphrase=passphrase)
        made = HomeFolder.create(path, name, home.unlock)
        if key_file is not None:
            made.remember_key_file(key_file)
        return home

    def __repr__(self) -> str:
        return f"Home({str(self.folder.path)!r}, secrets hidden)"

    @property
    def card(self) -> Card:
        """The public face of this member: send it to the others."""
        return self.folder.card()

    @property
    def name(self) -> str:
        return self.card.name

    def consortium(self, which: str | None = None) -> ConsortiumFolder:
        """This member's folder for a consortium, by the start of its id, or the only one there is."""
        return self.folder.only_consortium(which)

    @property
    def manifest(self) -> Manifest:
        """The signed manifest of this member's only consortium, every signature checked."""
        return self.consortium().manifest()

    def setup(
        self, terms: Terms, folder: str | os.PathLike[str], *, wait: float = 0.0, note: Callable[[str], None] = print
    ) -> Manifest | None:
        """Takes part in making the key, over a folder that all members can reach: does what can be done now.

        Gives the manifest once the ceremony is finished, None before that: call it again when the others have written,
        or let it `wait` so many seconds for them. `note` hears of each step. A crash loses nothing.
        """
        return until_finished(lambda: exchange.set_up(self.folder, self.unlock, terms, folder, note), wait).manifest

    @staticmethod
    def make_key(homes: Sequence[Home], terms: Terms, *, repeatable: bool = False) -> Manifest:
        """The same for members who are all on this machine: for simulations and trials.

        `repeatable`: these homes are for a simulation, whose runs may begin again from the initial model. Members in
        earnest never do that unasked: two sums from one model can show the key (docs/secagg.md).
        """
        with tempfile.TemporaryDirectory(prefix="quorumark-setup-") as made:
            manifest = inprocess.set_up_all([(h.folder, h.unlock) for h in homes], terms, Path(made) / "exchange")
        for home in homes if repeatable else ():
            allow_repeats(home.consortium(), home.folder.identity(home.unlock))
        return manifest

    def answer_by_itself(self, queries_per_day: int) -> None:
        """A standing rule: this home answers so many queries a day without asking a person, in Flower as well."""
        rules = {"format": AnswerRules.FORMAT, "approve": "always", "max_queries_per_day": queries_per_day}
        write_private(self.folder.rules_path, canonical(rules))

    def answer(
        self,
        reference: PublicSide,
        suspect: Source | Suspect,
        query: Query,
        *,
        approve: bool = False,
        members: Collection[int] = (),
        after: Certificate | None = None,
    ) -> Partial:
        """This member's answer ⟨x, its share⟩, after every check of the query; it goes into the member's ledger first.

        `approve`: a person has read what is asked. Without it only a standing rule of this home may approve. `members`
        are those who will answer, if that is known. `after`: for a query by layers, the certificate before it.
        """
        return answer(
            self.folder, self.unlock, reference, suspect, query, approved=approve, members=members, after=after
        )

    def open(self, reference: PublicSide, query: Query, partials: Sequence[Partial]) -> Examined:
        """Opens answers by layers that are sealed to this home (docs/layers.md): numbers by block, for its eyes only.

        `examined.opened` is its signed word, for `Reference.combine`.
        """
        return examine(self.folder.identity(self.unlock), reference.manifest, query, partials)

    def sign(self, certificate: Certificate) -> Certificate:
        """The certificate with this member's signature, if it answered and agrees with what is in it."""
        return sign(self.folder, self.unlock, certificate)


class Federation(Simulation):
    """Rounds of training with the server and all members in one process: see `quorumark.simulation.Federation`."""

    @classmethod
    def of_homes(
        cls,
        homes: Sequence[Home],
        model: Mapping[str, Any],
        train: Callable[..., Mapping[str, Any]],
        data: Sequence[Any],
        *,
        evaluate: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None,
        mark: bool = True,
        losses: Losses | Mapping[tuple[Any, ...], Iterable[int]] | None = None,
        seed: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        layout: ModelLayout | None = None,
    ) -> Self:
        """All members from their homes, in the order of the roster; `data[i]` is what `train` gets at home i.

        `train(weights, data)` gives weights; it may also take `seed`, `round_no` and `rate`. With a `folder`, every
        round is kept, and a run that was killed goes on. `losses` loses members on purpose, to try what happens then:
        {(round, stage): points} with the stages train, upload and unmask. `layout`: the one that the terms were made
        with, if that was not the model's default.
        """
        if len(homes) != len(data):
            raise InputError("data", f"must have one entry for each of the {len(homes)} homes", len(data))
        manifest = homes[0].manifest
        layout = layout or ModelLayout.of(model)
        members = {}
        for home, own in zip(homes, data, strict=True):
            identity = home.folder.identity(home.unlock)
            share = home.consortium().share(home.unlock) if manifest.terms.has_key else None
            member = FederationMember(identity, manifest, layout, train, own, share, mark=mark)
            members[member.point] = member
        plan = losses if isinstance(losses, Losses) or losses is None else Losses(losses)
        return cls(manifest, layout, model, members, evaluate=evaluate, losses=plan, seed=seed, folder=folder)

    def watch(self, rounds: int, console: Console | None = None, title: str = "training") -> None:
        """Runs until so many rounds are done, with a table of the last ones that grows while it runs."""
        watch(self, rounds, console or Console(), title)


class Reference(PublicSide):
    """The public side of a consortium: what a suspect is compared with, and by which anybody checks a certificate."""

    @classmethod
    def publish(
        cls,
        folder: str | os.PathLike[str],
        member: Home,
        model: Mapping[str, Any],
        groups: Groups | None = None,
        layout: ModelLayout | None = None,
    ) -> Self:
        """Writes what anybody needs who verifies: the manifests, the layout, the initial model, the groups."""
        consortium, out = member.consortium(), Path(folder)
        cls.write_agreed(out, consortium.terms(), model, groups, layout)
        found = publish(consortium, out, {name: out / name for name in (LAYOUT, ANCHOR, GROUPS, LORA)})
        return cls(found.chain, found.layout, found.anchor, found.groups, found.lora)

    @staticmethod
    def write_agreed(
        folder: str | os.PathLike[str],
        terms: Terms,
        model: Mapping[str, Any],
        groups: Groups | None = None,
        layout: ModelLayout | None = None,
    ) -> None:
        """Writes what is agreed on before there is a key: the terms, the layout, the initial model, the groups."""
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        write_shared(out / "terms.json", terms.to_bytes())
        write_shared(out / LAYOUT, (layout or ModelLayout.of(model)).to_bytes())
        write_safetensors(_arrays(model), out / ANCHOR)
        if groups is not None:
            write_shared(out / GROUPS, groups.to_bytes())

    def ask(
        self,
        suspect: Source | Suspect,
        *,
        align: bool = False,
        lora: bool = False,
        after: Certificate | None = None,
        examiner: Card | None = None,
    ) -> Query:
        """The question whether a suspect is this consortium's: a small file that members answer.

        `align`: its channels were moved or scaled (docs/alignment.md). `lora`: it is an adapter (docs/lora.md). With
        `after`, the certificate of the plain query that did not pass, and the card of an `examiner`, it asks layer by
        layer (docs/layers.md).
        """
        if (after is None) != (examiner is None):
            raise InputError("after, examiner", "must be given together, to ask by layers", "one of them")
        layers = None if after is None or examiner is None else AskLayers.of(after, examiner)
        return prepare(self, suspect, align=align, lora=lora, layers=layers).query

    def combine(self, query: Query, partials: Sequence[Partial], *, opened: Opened | None = None) -> Certificate:
        """What the answers say together, for those who answered to sign; by layers with the examiner's word."""
        return Certificate.of(combine(self.manifest, query, partials, opened=opened))

    def check(
        self,
        certificate: Certificate,
        suspect: Source | Suspect | None = None,
        *,
        report: str | os.PathLike[str] | None = None,
    ) -> Finding:
        """Checks everything in a certificate, with the suspect down to x and z. A page for people goes to `report`."""
        checked, left = check_certificate(certificate, self.chain, suspect=suspect, reference=self)
        if report is not None:
            signers = certificate.signers(self.manifest)
            write_page(
                report, certificate_page(certificate, self.manifest, signers=signers, checked=checked, left=left)
            )
        return certificate.finding


def _unlock(key_file: str | os.PathLike[str] | None, passphrase: str) -> Unlock:
    if (key_file is None) == (not passphrase):
        raise InputError("key_file, passphrase", "must be exactly one of the two", "both" if passphrase else "neither")
    return Unlock.passphrase(passphrase) if key_file is None else Unlock.key_file(key_file)


def _arrays(model: Mapping[str, Any]) -> dict[str, Any]:
    """numpy arrays of tensors of either kind."""
    return {name: tensor.numpy() if hasattr(tensor, "numpy") else tensor for name, tensor in model.items()}
