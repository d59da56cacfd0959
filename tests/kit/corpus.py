"""Every kind of file and message that somebody else may have made, with what reads it: the corpus of the fuzzer.

`corpus(folder)` builds small consortia and their files there, once. A `FileKind` puts a damaged file where the sound
one belongs, in a copy of everything beside it, and reads it as a member would; what a reader returns is content that is
signed or sealed, and must be the sound file's whenever it is accepted. A `CallKind` does the same for what an engine
hands to a member.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quorumark.align.groups import Group, Groups, Slot
from quorumark.align.lora import Factors, Lora
from quorumark.canonical import canonical
from quorumark.consortium.archive import Archive, leaf_count, write_archive
from quorumark.consortium.home import _KEPT, HomeFolder, read_as, read_file
from quorumark.consortium.identity import verify_card
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import root_from
from quorumark.consortium.records import Card, Manifest, Terms
from quorumark.errors import GuardError, RecordError
from quorumark.model.layout import ModelLayout
from quorumark.model.suspect import match_layout, read_suspect
from quorumark.node.ceremony import CeremonyServer
from quorumark.node.member import MemberNode
from quorumark.node.signer import _receive, _send
from quorumark.report import certificate_page
from quorumark.research.attacks import suite
from quorumark.research.attacks.plan import read_plan
from quorumark.research.lab import attacked as lab_attacked
from quorumark.research.lab import config as lab_config
from quorumark.research.lab import results as lab_results
from quorumark.research.rows import parsed_rows
from quorumark.room.statement import Standing
from quorumark.round import checked_sums
from quorumark.round.amplitudes import MarkState
from quorumark.round.applied import read_vectors, write_vectors
from quorumark.round.memory import MemoryState
from quorumark.round.secagg.member import SecAggMember
from quorumark.round.secagg.messages import Upload, pack, unpack
from quorumark.round.server import RoundServer
from quorumark.round.statements import Turn
from quorumark.setup.amend import propose, successor
from quorumark.setup.amend import sign as sign_amendment
from quorumark.setup.dealer import accept, deal
from quorumark.setup.dkg import check_terms
from quorumark.setup.exchange import set_up
from quorumark.setup.recover import help_recover, request
from quorumark.simulation import Federation, FederationMember
from quorumark.stamps.record import Stamps
from quorumark.stamps.tokens import ask, check_token, read_request, read_roots
from quorumark.verify.answer import answer
from quorumark.verify.audit import check_audit
from quorumark.verify.certificate import Certificate
from quorumark.verify.challenge import Challenge, challenge
from quorumark.verify.check import check_certificate
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.guard import check_query
from quorumark.verify.ledger import Ledger
from quorumark.verify.opening import KeyOpening
from quorumark.verify.query import prepare
from quorumark.verify.reference import read_chain
from quorumark.verify.rules import AnswerRules, read_rules
from tests.kit import checked, secure_sums, suspects
from tests.kit import liars as shared_keys
from tests.kit import mutations as m
from tests.kit.authority import make_authority
from tests.kit.consortium import World, make_world, trained_from
from tests.kit.flowers import Consortium, train
from tests.kit.optimised import run as run_optimised
from tests.kit.optimised import walk
from tests.kit.rounds import SEED, Run

Mutators = tuple[m.Mutator, ...]


def _with(*first: m.Mutator) -> Mutators:
    """These, and everything that can be done to bytes."""
    return (*first, *m.BYTES)


JSON, SEALED, PLAIN = _with(m.in_json, m.in_json, m.in_json), _with(m.HEADED, m.HEADED), _with()


class WrongError(Exception):
    """Something was accepted that must not be."""


@dataclass
class FileKind:
    """`beside` is copied to the case's folder, and the file is at `path` in it; without it, it is the only one."""

    name: str
    read: Callable[[Path], Any]
    mutators: Sequence[m.Mutator]
    path: str = "file"
    data: bytes = b""
    beside: Path | None = None
    weight: int = 1
    content: Any = None
    sound: bytes = field(default=b"", init=False)

    def prepare(self, case: Path) -> None:
        """The sound file is accepted; what it holds is kept."""
        self.sound = (self.beside / self.path).read_bytes() if self.beside is not None else self.data
        self._lay(case)
        self.content = self.read(case / "here")

    def _lay(self, case: Path) -> Path:
        here = case / "here"
        if self.beside is not None:
            shutil.copytree(self.beside, here, symlinks=True)
        else:
            here.mkdir()
        target = here / self.path
        target.write_bytes(self.sound)
        return target

    def attempt(self, rng: random.Random, case: Path) -> Callable[[], None]:
        target = self._lay(case)
        if rng.random() < 0.04:
            m.replaced(rng, target)
        else:
            data = self.sound
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                data = rng.choice(self.mutators)(rng, data) or data
            target.write_bytes(data)
        return lambda: self._check(self.read(case / "here"))

    def _check(self, found: Any) -> None:
        if self.content is not None and found != self.content:
            raise WrongError("content was accepted that is not what was signed or sealed")


@dataclass
class CallKind:
    """A stage of an engine, with the member's home as it was before."""

    name: str
    stage: str
    config: Mapping[str, Any]
    arrays: Mapping[str, Any]
    home: Path
    node: Callable[[Path], MemberNode]
    weight: int = 1

    def prepare(self, case: Path) -> None:
        shutil.copytree(self.home, case / "here")
        self.node(case / "here").handle(self.stage, self.config, self.arrays)

    def attempt(self, rng: random.Random, case: Path) -> Callable[[], None]:
        shutil.copytree(self.home, case / "here")
        config, arrays = dict(self.config), dict(self.arrays)
        for _ in range(rng.choice((1, 1, 2))):
            names = [(config, n) for n in config] + [(arrays, n) for n in arrays]
            if not names:
                break
            held, name = rng.choice(names)
            if held is config:
                _change_config(rng, config, name)
            else:
                _change_array(rng, arrays, name)
        node = self.node(case / "here")

        def run() -> None:
            node.handle(self.stage, config, arrays)

        return run


def _change_config(rng: random.Random, config: dict[str, Any], name: str) -> None:
    value = config[name]
    what = rng.randrange(4)
    if what == 0:
        del config[name]
    elif isinstance(value, bytes) and what < 3:
        config[name] = rng.choice(_with(m.HEADED, m.in_json, m.PAYLOAD))(rng, value) or b""
    elif what == 1:
        config[name] = m._near(rng, value)
    else:
        config[name] = rng.choice((b"", b"\xff" * 40, None, m._odd(rng)))


def _change_array(rng: random.Random, arrays: dict[str, Any], name: str) -> None:
    array = np.array(arrays[name])
    what = rng.randrange(8)
    if what == 0:
        del arrays[name]
    elif what == 1:
        arrays[name] = array.astype(rng.choice((np.float16, np.float32, np.float64, np.int8, np.uint64, np.bool_)))
    elif what == 2:
        arrays[name] = array.reshape(-1)[: rng.randrange(array.size + 1)]
    elif what == 3:
        arrays[name] = array.reshape((1, *array.shape))
    elif what == 4 and array.size and array.dtype.kind == "f":
        array.reshape(-1)[rng.randrange(array.size)] = rng.choice((np.nan, np.inf, -np.inf, 1e30, 1e38))
        arrays[name] = array
    elif what == 5:
        arrays[f"{name}x"] = arrays.pop(name)
    elif what == 6:
        arrays[name] = rng.choice(
            (np.array("text"), np.array([None]), np.zeros(0), np.zeros((0, 5)), b"bytes", None, 3)
        )
    else:
        raw = rng.choice(m.BYTES)(rng, array.tobytes()) or b""
        size = max(1, array.itemsize)
        arrays[name] = np.frombuffer(raw[: len(raw) // size * size], array.dtype)


Kind = FileKind | CallKind


def corpus(folder: Path, marker: Path) -> list[Kind]:
    """All kinds; `marker` is a folder that a pickle would make if it were run."""
    from tests.kit.corpus_layers import by_layers  # which is made of the kinds above
    from tests.kit.corpus_room import in_a_room

    found: list[Kind] = []
    makers = (_records, _homes, _audits, _ceremonies, _sums, _engines, _suspects, _labs, by_layers, in_a_room)
    for index, make in enumerate(makers):
        place = folder / str(index)
        place.mkdir()
        found.extend(make(place, marker))
    return found


# --- records and evidence ---------------------------------------------------------------------------------


def _card(here: Path) -> bytes:
    card = read_as(here / "file", "a member's card", Card.from_bytes)
    verify_card(card)
    return card.signed_bytes()


def _terms(here: Path) -> None:
    terms = read_as(here / "file", "terms", Terms.from_bytes)
    check_terms(terms)


def _records(folder: Path, _: Path) -> Iterator[Kind]:
    world = make_world(folder, members=3, threshold=2)
    manifest, chain = world.manifest, [world.manifest]
    # under other names, in half precision: the query and the certificate then hold reasons of every kind of value
    copy = {f"module.{name}": w.astype(np.float16) for name, w in world.marked.items()}
    copy["module.conv.weight"][0, 0, 0, 0] = np.inf
    suspect = world.save({**copy, "module.fc.weight": copy["module.fc.weight"][:, :119]}, "copy.safetensors")
    query, partials = world.answers(suspect, (1, 2, 3))
    certificate = world.certified(query, partials)
    yield FileKind("card", _card, JSON, data=world.homes[0][0].card().to_bytes())
    yield FileKind("terms", _terms, JSON, data=manifest.terms.to_bytes())
    yield FileKind("manifest", lambda p: read_chain(p / "file")[-1].digest(), JSON, data=manifest.to_bytes())
    layout = world.reference.layout
    yield FileKind("layout", lambda p: _layout(p, layout), JSON, data=layout.to_bytes())
    groups = Groups((Group(60, (Slot("conv.weight", 0, 0, 1, 1, 1),)), Group(80, (Slot("fc.weight", 0, 0, 1, 1, 1),))))
    yield FileKind("groups", lambda p: _groups(p, layout), JSON, data=groups.to_bytes())
    lora = Lora("ab" * 32, (Factors("a.lora_A.weight", "a.lora_B.weight", "a.weight"),))
    yield FileKind("lora", lambda p: _lora(p), JSON, data=lora.to_bytes())
    word = Standing("ab" * 32, "cd" * 32, 0, "sound", 1, "ef" * 32, 1, 16, 0, "2026-01-31T12:00:00Z")
    teller = world.homes[0][0].identity(world.homes[0][1])
    yield FileKind(
        "standing",
        lambda p: Standing.read(read_file(p / "file", "a member's word"), teller.ed25519),
        JSON,
        data=word.signed(teller),
    )
    yield FileKind("rules", lambda p: _rules(p), JSON, data=canonical({
        "format": AnswerRules.FORMAT, "approve": "always", "max_queries_per_day": 3, "max_answers": 9,
        "statistics": [query.statistic],
    }))  # fmt: skip

    def combined(here: Path) -> Any:
        asked = Query.from_bytes(read_file(here / "file", "a query"))
        return combine(manifest, asked, partials).query.digest()

    def answered(here: Path) -> Any:
        asked = Query.from_bytes(read_file(here / "query", "a query"))
        home, unlock = HomeFolder(here / "home"), world.homes[0][1]
        partial = answer(home, unlock, world.reference, suspect, asked, approved=True)
        # when it was asked and what it leaves out is the asker's to say, and all else follows from the suspect
        return partial.suspect, asked.files, asked.statistic, asked.alignment, asked.manifest

    def with_partial(here: Path) -> Any:
        partial = Partial.from_bytes(read_file(here / "file", "a partial"))
        finding = combine(manifest, query, [partial, *partials[1:]])
        return partial.signed_bytes(), finding.value, finding.verdict

    def checked(here: Path) -> Any:
        found = Certificate.from_bytes(read_file(here / "file", "a certificate"))
        told, _ = check_certificate(found, chain)
        certificate_page(found, manifest, signers=found.signers(manifest), checked=told)  # every reason in words
        return found.payload

    yield FileKind("query", combined, JSON, data=query.to_bytes(), weight=2)
    (folder / "asked").mkdir()
    shutil.copytree(world.homes[0][0].path, folder / "asked" / "home")
    (folder / "asked" / "query").write_bytes(query.to_bytes())
    yield FileKind("query to answer", answered, JSON, "query", beside=folder / "asked")
    yield FileKind("partial", with_partial, JSON, data=partials[0].to_bytes(), weight=2)
    yield FileKind("certificate", checked, (m.PAYLOAD, *JSON), data=certificate.to_bytes(), weight=2)
    yield from _archived(folder, world)
    yield from _stamps(folder, manifest)


def _stamps(folder: Path, manifest: Manifest) -> Iterator[Kind]:
    """A file of stamps, an authority's answer and a request, against the manifest that they date."""
    authority = make_authority(folder / "authority")
    roots, message = read_roots([authority.root]), manifest.to_bytes()
    query = ask(message)
    response = authority.answer(query, chain=True)
    stamps = Stamps.of("manifest", message).with_response(0, response)
    stamps = stamps.with_response(0, authority.answer(ask(stamps.message(0, message))))

    first = check_token(response, message, roots).latest

    def dated(here: Path) -> Any:
        """A stamp fewer is another file that holds as well; but nothing shows another date."""
        found = Stamps.from_bytes(read_file(here / "file", "a file of stamps"))
        shown = [found.check(number, message, roots) for number in range(len(found.chains))]
        return all((one.authority, one.latest) == (authority.name, first) for one in shown)

    def answered(here: Path) -> Any:
        token = check_token(read_file(here / "file", "an answer"), message, roots)
        return token.time, token.latest, token.imprint

    def requested(here: Path) -> None:
        read_request(read_file(here / "file", "a request"))

    yield FileKind("stamps", dated, JSON, data=stamps.to_bytes())
    yield FileKind("stamp", answered, PLAIN, data=response)
    yield FileKind("request for a stamp", requested, PLAIN, data=query)


def _layout(here: Path, agreed: ModelLayout) -> None:
    data = read_file(here / "file", "a layout")
    layout = ModelLayout.from_bytes(data)
    if layout.digest() == agreed.digest() and data != agreed.to_bytes():
        raise WrongError("another layout has the digest that was agreed on")
    assert layout.coordinates >= 0


def _groups(here: Path, layout: ModelLayout) -> None:
    read_as(here / "file", "groups", Groups.from_bytes).check(layout)


def _lora(here: Path) -> None:
    read_as(here / "file", "an adapter's description", Lora.from_bytes).digest()


def _rules(here: Path) -> None:
    read_rules(here / "file")


def _archived(folder: Path, world: World) -> Iterator[Kind]:
    home, unlock = world.homes[1]
    share, terms = home.only_consortium().share(unlock), world.manifest.terms
    keys = np.arange(3 * leaf_count(terms.coordinates, terms.leaf), dtype=np.uint64)
    write_archive(folder / "archive.bin", share, keys)

    def opened(here: Path) -> bytes:
        archive = Archive.read(here / "file", world.manifest)
        leaves = [archive.open(i, keys[3 * i : 3 * i + 3]) for i in range(3)]
        for leaf in leaves:
            if root_from(leaf, terms.leaf, terms.coordinates).hex() != world.manifest.genesis.roots[archive.point - 1]:
                raise RecordError("another root")
        return b"".join(leaf.values.tobytes() for leaf in leaves)

    yield FileKind("archive", opened, SEALED, data=(folder / "archive.bin").read_bytes())


# --- homes ------------------------------------------------------------------------------------------------


def _homes(folder: Path, _: Path) -> Iterator[Kind]:
    world = make_world(folder, members=3, threshold=2)
    home, unlock = world.homes[0]
    for seed in (7, 8):
        model = trained_from(world.marked, seed)
        with contextlib.suppress(GuardError):  # nobody approves: the ledger has a refusal too
            answer(home, unlock, world.reference, model, prepare(world.reference, model).query)
        answer(home, unlock, world.reference, model, prepare(world.reference, model).query, approved=True)
    other = prepare(world.reference, trained_from(world.marked, 9))
    home.rules_path.write_bytes(canonical({"format": AnswerRules.FORMAT, "approve": "ask"}))

    def read(here: Path) -> Any:
        mine = HomeFolder(here)
        place = mine.only_consortium()
        mine.card()
        secret = mine.identity(unlock).to_secret_bytes()
        manifest = place.manifest()
        root = place.verify_share(unlock).root()
        place.pending()
        ledger = Ledger.open(place, manifest)
        check_query(other.query, other.form.x, manifest, ledger, read_rules(mine.rules_path), approved=True)
        return secret, manifest.digest(), root, ledger.entries

    place = home.only_consortium()
    files = {
        "identity": (home.path / "identity.sealed", SEALED), "home card": (home.path / "member.json", JSON),
        "home terms": (place.path / "terms.json", JSON), "home manifest": (place.manifest_path, JSON),
        "share": (place.share_path(), SEALED), "ledger": (place.ledger_path, _with(m.in_lines, m.in_lines)),
        "ledger head": (place.ledger_head_path, JSON), "signed": (place._signed_path, JSON),
        "kept query": (next(place.queries_path.iterdir()), PLAIN), "home rules": (home.rules_path, JSON),
    }  # fmt: skip
    for name, (path, mutators) in files.items():
        yield FileKind(name, read, mutators, str(path.relative_to(home.path)), beside=home.path)
    home.backup(folder / "backup.tar")

    def restore(here: Path) -> None:
        restored = HomeFolder.restore(here / "file", here / "restored")
        for path in restored.path.rglob("*"):
            relative = path.relative_to(restored.path).as_posix()
            if path.is_symlink() or (path.is_file() and not _KEPT.fullmatch(relative)):
                raise WrongError(f"a backup made {relative!r}")
        restored.card()

    yield FileKind("backup", restore, _with(m.in_tar, m.in_tar), data=(folder / "backup.tar").read_bytes(), weight=3)
    phrase = Unlock.passphrase("correct horse battery")
    HomeFolder.create(folder / "phrase", "Avon", phrase)

    def passphrase(here: Path) -> bytes:
        return HomeFolder(here).identity(phrase).to_secret_bytes()

    # every one of these takes scrypt's half second: one case in a hundred
    yield FileKind("passphrase", passphrase, SEALED, "identity.sealed", beside=folder / "phrase", weight=0)


# --- audits -----------------------------------------------------------------------------------------------


def _audits(_: Path, __: Path) -> Iterator[Kind]:
    rng = np.random.default_rng(3)
    size = 12_000
    raw = rng.choice(np.array([-1, 1]), size)
    liars = shared_keys.Liars(shared_keys.shared(raw))
    key = raw * shared_keys.signs(liars.manifest.genesis, size)
    x = shared_keys.vector(rng, key, 60.0, size)
    query = shared_keys.query_of(x, liars.manifest)
    asked = challenge(query, liars.manifest, shared_keys.score(x, key), shared_keys.SEED)
    openings = liars.openings(asked)

    def audited(here: Path) -> Any:
        told = Challenge.from_bytes(read_file(here / "file", "a challenge"))
        result = check_audit(told, query, x, [liars.manifest], openings)
        return told.digest() if result.proof else asked.digest()  # only openings of this very challenge prove anything

    def opened(here: Path) -> Any:
        data = read_file(here / "file", "an opening")
        result = check_audit(asked, query, x, [liars.manifest], [data, *openings[1:]])
        if result.faults and 1 in result.members:
            raise WrongError("an opening that is at fault was counted")
        return result.z, result.verdict

    yield FileKind("challenge", audited, JSON, data=asked.to_bytes(), weight=2)
    yield FileKind("opening", opened, JSON, data=openings[0], weight=2)
    keys = {1: np.arange(9, dtype=np.uint64), 2: np.arange(9, dtype=np.uint64)}
    common = {"manifest": query.manifest, "challenge": asked.digest(), "point": 1}
    later = KeyOpening.sign(liars.people[0], **common, indices=(3, 4, 8), keys=keys)

    def opened_keys(here: Path) -> bytes:
        found = KeyOpening.from_bytes(read_file(here / "file", "an opening"))
        found.verify(liars.terms)
        return found.signed_bytes()

    yield FileKind("opening of keys", opened_keys, JSON, data=later.to_bytes())


# --- ceremonies -------------------------------------------------------------------------------------------


def _ceremonies(folder: Path, _: Path) -> Iterator[Kind]:
    """A ceremony over a folder, as it is before each turn of the first member; recovery's request as well."""
    group = Consortium.agree(folder, 3, 2, model={"w": np.ones((8, 40), np.float32)})
    homes = [group.home(x) for x in (1, 2, 3)]
    exchange, unlock = folder / "exchange", homes[0][1]

    def turn(here: Path) -> None:
        set_up(HomeFolder(here / "home"), unlock, group.terms, here / "exchange")

    for number in range(20):
        if exchange.exists():
            snapshot = folder / f"turn-{number}"
            shutil.copytree(homes[0][0].path, snapshot / "home")
            shutil.copytree(exchange, snapshot / "exchange")
            steps = sorted(exchange.iterdir())
            new = [path for path in steps[-1].iterdir() if path.suffix == ".msg" and not path.name.startswith("1")]
            for path in sorted(new)[:1]:
                relative = path.relative_to(exchange)
                yield FileKind(
                    f"ceremony {steps[-1].name}", turn, SEALED, f"exchange/{relative}", beside=snapshot
                )  # fmt: skip
            sealed = next((snapshot / "home" / "consortia").glob("*/ceremony.sealed"), None)
            if number == 2 and sealed is not None:
                relative = sealed.relative_to(snapshot)
                yield FileKind("ceremony state", turn, SEALED, str(relative), beside=snapshot)
        progress = [set_up(home, key, group.terms, exchange) for home, key in homes]
        if all(one.finished for one in progress):
            break
    yield from _amended(folder, group)
    yield from _recovery(folder, group)
    yield from _dealt(folder)


def _amended(folder: Path, group: Consortium) -> Iterator[Kind]:
    """Two have signed an amendment; the third is to sign."""
    place, begun = group.home(1)[0].only_consortium(), folder / "amendment"
    before = place.manifest()
    terms = propose(before.terms, examples={1: 7})
    (begun / "folder").mkdir(parents=True)
    for x in (2, 3):
        home, unlock = group.home(x)
        sign_amendment(home, unlock, terms, begun / "folder", home.only_consortium())
    (begun / "folder" / "terms.json").write_bytes(terms.to_bytes())
    shutil.copytree(group.home(1)[0].path, begun / "home")
    after = successor(before, terms).digest()

    def signed(here: Path) -> Any:
        home = HomeFolder(here / "home")
        told = read_as(here / "folder" / "terms.json", "terms", Terms.from_bytes)
        made = sign_amendment(home, group.home(1)[1], told, here / "folder", home.only_consortium()).manifest
        return after if made is None else made.digest()  # it comes into force as it was signed, or not at all

    yield FileKind("amendment", signed, JSON, "folder/terms.json", beside=begun)
    yield FileKind("amendment signature", signed, PLAIN, "folder/signature-2.hex", beside=begun)


def _dealt(folder: Path) -> Iterator[Kind]:
    """A dealer's files, which the first member is to accept; the second one has."""
    (folder / "dealer").mkdir()
    group = Consortium.agree(folder / "dealer", 2, 2, model={"w": np.ones((8, 40), np.float32)}, setup="dealer")
    begun = folder / "dealt"
    deal(group.terms, begun / "folder")
    accept(*group.home(2), begun / "folder", group.terms)
    shutil.copytree(group.home(1)[0].path, begun / "home")
    unlock = group.home(1)[1]
    whole = read_as(begun / "folder" / "dealing.json", "a dealing", Manifest.from_bytes).digest()

    def accepted(here: Path) -> Any:
        made = accept(HomeFolder(here / "home"), unlock, here / "folder", group.terms).manifest
        return whole if made is None else made.digest()  # a signature that is not there is waited for

    for name, mutators in (("dealing.json", JSON), ("share-1.sealed", SEALED), ("signature-2.hex", PLAIN)):
        yield FileKind(f"dealt {name}", accepted, mutators, f"folder/{name}", beside=begun)


def _recovery(folder: Path, group: Consortium) -> Iterator[Kind]:
    (lost, lost_key), (helper, helper_key) = group.home(3), group.home(1)
    place = lost.only_consortium()
    place.share_path().unlink()
    begun = folder / "recovery"
    (begun / "folder").mkdir(parents=True)
    request(lost, place, lost_key, begun / "folder", (1, 2))
    shutil.copytree(helper.path, begun / "home")

    def helped(here: Path) -> None:
        home = HomeFolder(here / "home")
        help_recover(home, home.only_consortium(), helper_key, here / "folder")

    headed = m.Wrap(lambda d: m.HEADED.out(d[2:]), lambda d, inner: d[:2] + m.HEADED.back(d[2:], inner))
    yield FileKind("recovery request", helped, _with(headed), "folder/request.msg", beside=begun)


# --- secure aggregation -----------------------------------------------------------------------------------


def _sums(_: Path, __: Path) -> Iterator[Kind]:
    net = secure_sums.Net(3, 2)
    readies = {x: net.members[x].ready(1, secure_sums.BINDING, net.length) for x in net.members}
    for x, ready in readies.items():
        net.server.take_ready(x, ready)
    announcement = net.server.announce()
    before = {x: net.states[x]._load() for x in net.members}
    net.upload(announcement, net.members)
    uploads = {x: net.uploads[1][x].to_bytes() for x in net.members}
    uploaded = {x: net.states[x]._load() for x in net.members}
    requests = {x: net.server.request(x) for x in net.members}
    answers = {x: net.members[x].unmask(requests[x]) for x in net.members}
    for x, message in answers.items():
        net.server.take_answer(x, message)
    total = net.server.finish().tobytes()

    def member(memory: bytes) -> SecAggMember:
        state = MemoryState(net.group)
        state._save(memory)
        return SecAggMember(secure_sums.PEOPLE[0], net.group, state)

    def serve(ready: bytes, upload: bytes | None = None, reply: bytes | None = None) -> Any:
        server = net.serve(1)
        for x, message in {**readies, 1: ready}.items():
            server.take_ready(x, message)
        if upload is None:
            return server._readies[1]
        server.announce()
        for x, message in {**uploads, 1: upload}.items():
            server.take_upload(x, message)
        if reply is None:
            return server._sum.tobytes()
        for x, message in {**answers, 1: reply}.items():
            server.request(x)
            server.take_answer(x, message)
        return server.finish().tobytes()

    def planned(data: bytes) -> Any:
        one = member(before[1])
        plan = one.plan(data)
        one.upload(plan, np.zeros(net.length, np.uint64))
        return plan

    def asked(data: bytes) -> Any:
        return member(uploaded[1]).unmask(data)

    def packed(data: bytes) -> Any:
        upload = Upload.from_bytes(data)
        return serve(readies[1], Upload(upload.head, upload.vector).to_bytes())

    assert serve(readies[1], uploads[1], answers[1]) == total
    one = _with(m.HEADED)
    yield _bytes_kind("secagg ready", lambda d: serve(d), one, readies[1])
    yield _bytes_kind("secagg announcement", planned, one, announcement)
    yield _bytes_kind("secagg upload", packed, one, uploads[1])
    yield _bytes_kind("secagg request", asked, one, requests[1])
    yield _bytes_kind("secagg answer", lambda d: serve(readies[1], uploads[1], d), one, answers[1])
    people, group = checked.five_people(3)
    boxes = {x: checked_sums.seal_keys(person, group, 4, bytes(32)) for x, person in enumerate(people, 1)}

    def key(data: bytes) -> bytes:
        checked_sums.check_said(group, 4, bytes(32), 2, data, b"")
        each = [checked_sums.box_for(b, 1) for b in (boxes[1], data, boxes[3])]
        return checked_sums.round_key(people[0], group, 4, bytes(32), (1, 2, 3), each)

    def vouched(data: bytes) -> Any:
        return checked_sums.vouchers(group, 4, bytes(32), {2: data}) or (2,)  # nobody needs to vouch

    yield _bytes_kind("sums boxes", lambda d: _same_box(d, boxes[2], key), PLAIN, boxes[2])
    yield _bytes_kind("sums voucher", vouched, one, checked_sums.vouch(people[1], group, 4, bytes(32)))
    yield _bytes_kind("packed list", lambda d: unpack(d, "list") and None, one, pack([b"one", b"", b"three"]))


def _same_box(data: bytes, sound: bytes, key: Callable[[bytes], bytes]) -> bytes:
    """The key of a sum from boxes of which one's own is the only one that is looked at."""
    found = key(data)
    if checked_sums.box_for(data, 1) != checked_sums.box_for(sound, 1):
        raise WrongError("a box was opened that nobody sealed")
    return found


def _bytes_kind(name: str, read: Callable[[bytes], Any], mutators: Sequence[m.Mutator], data: bytes) -> FileKind:
    """A message that never lies in a file of ours: what replaces the file is passed over."""

    def from_file(here: Path) -> Any:
        if not (here / "file").is_file() or (here / "file").stat().st_size > 1 << 24:
            raise RecordError("no message")
        return read((here / "file").read_bytes())

    return FileKind(name, from_file, mutators, data=data)


# --- engines ----------------------------------------------------------------------------------------------


class _Recorded(Run):
    """A run that keeps what the first member was sent, and its home as it was."""

    def __init__(self, world: Consortium, kept: Path, **options: Any) -> None:
        super().__init__(world, **options)
        self.kept, self.calls = kept, list[tuple[str, dict[str, Any], dict[str, Any], Path]]()

    def node(self, x: int) -> Any:
        real = super().node(x)
        if x != 1:
            return real
        outer = self

        class Recorder:
            def handle(self, stage: str, config: Any, arrays: Any) -> Any:
                snapshot = outer.kept / str(len(outer.calls))
                shutil.copytree(outer.world.home(1)[0].path, snapshot)
                outer.calls.append((stage, dict(config), dict(arrays), snapshot))
                return real.handle(stage, config, arrays)

        return Recorder()


def _engines(folder: Path, _: Path) -> Iterator[Kind]:
    (folder / "made").mkdir()
    model = {"a.weight": np.random.default_rng(1).standard_normal((40, 50)).astype(np.float32), "steps": np.array(7)}
    world = Consortium.make(folder / "made", 3, 2, model=model, policy=checked.CHECKED)
    run = _Recorded(world, folder / "calls", folder=folder / "run")
    for _round in range(2):
        run.round()
    state = {"of-state": run.server.history.state.hex()}
    run.ask("state", {**state, "with-model": True})
    of = {"of-round": 1, "of-manifest": run.server.manifest.digest().hex()}
    asked = [dict(call[1]) for call in run.calls if call[0] == "unmask"]
    run.ask("again", {"requests": json.dumps({"1": asked[-1]["request"].hex()})})
    run.ask("never", {"state": "11" * 32, **of})
    said = {1: b"one", 2: b"two"}
    turn = Turn(7, 2, 5, {5: said}, {0: said}, {"ab" * 32: said}, {2: said}, draw=1)
    yield _bytes_kind("turn", lambda d: Turn.from_bytes(d) and None, JSON, turn.to_bytes())
    unlock = world.home(1)[1]

    def node(home: Path) -> MemberNode:
        return MemberNode(HomeFolder(home), unlock)

    for number, (stage, config, arrays, home) in enumerate(run.calls):
        yield CallKind(f"engine {stage} {number // 4 + 1}", stage, config, arrays, home, node)
    # what lies in the member's folder between two messages
    stage, config, arrays, home = [call for call in run.calls if call[0] == "upload"][-1]

    def go_on(here: Path) -> None:
        node(here).handle(stage, config, arrays)

    for path in sorted(home.glob("consortia/*/rounds/*")):
        if path.is_file() and path.suffix in (".json", ".npy", ".safetensors", ".sealed"):
            kinds = {".json": JSON, ".sealed": SEALED}
            kind: Sequence[m.Mutator] = kinds.get(path.suffix, _with(m.SAFETENSORS))
            yield FileKind(f"rounds {path.name}", go_on, kind, str(path.relative_to(home)), beside=home)
    memory = next(home.glob("consortia/*/rounds/memory/rounds.sealed"))
    yield FileKind("rounds memory", go_on, SEALED, str(memory.relative_to(home)), beside=home)
    yield from _servers(folder, world, run)
    yield from _simulated(folder, world)
    yield from _frames(run)
    yield from _setup_stage(folder)


def _servers(folder: Path, world: Consortium, run: _Recorded) -> Iterator[Kind]:
    assert world.manifest is not None
    manifest = world.manifest

    def resumed(here: Path) -> None:
        RoundServer(manifest, world.layout, world.model, run="1", seed=SEED, folder=here)

    for path in sorted((folder / "run").iterdir()):
        kind = {".json": JSON, ".safetensors": _with(m.SAFETENSORS), ".npz": _with(m.in_zip(folder / "no"))}
        if path.is_file() and not path.name.startswith("."):
            yield FileKind(f"run {path.name}", resumed, kind.get(path.suffix, PLAIN), path.name, beside=folder / "run")
    beside = run.server.catch_up("anchor")
    vectors = run.server.history.mark.model, beside["anchor"]
    strength = manifest.terms.strength

    def marked(data: bytes) -> None:
        MarkState.from_bytes(data, strength, world.layout, manifest.terms.key, *vectors)

    yield _bytes_kind("mark state", marked, JSON, beside["state"].tobytes())
    yield from _optimised(folder / "optimised")


def _optimised(folder: Path) -> Iterator[Kind]:
    """A state under a server optimiser, and the vectors beside it."""
    ran = run_optimised("fedadam:eta=0.01", 4, 1, {"rho": "0.1", "c_max": "0.1"}, world=walk).history
    assert ran is not None
    mark = ran.mark
    folder.mkdir()
    (folder / "state.json").write_bytes(mark.to_bytes())
    write_vectors(folder / "optimiser.npz", mark.vectors())

    def read(here: Path) -> Any:
        data = read_file(here / "state.json", "a state")
        return ran.read_mark(data, mark.model, mark.anchor, read_vectors(here / "optimiser.npz")).digest()

    def state(here: Path) -> None:  # which other members' digests settle
        read(here)

    yield FileKind("optimiser state", state, JSON, "state.json", beside=folder)
    yield FileKind("optimiser vectors", read, _with(m.in_zip(folder / "no")), "optimiser.npz", beside=folder)


def _simulated(folder: Path, world: Consortium) -> Iterator[Kind]:
    """A run in one process that goes on from its folder."""
    assert world.manifest is not None
    manifest, shares = world.manifest, {x: world.home(x)[0].only_consortium() for x in (1, 2, 3)}

    def federation(place: Path) -> Federation:
        members = {
            x: FederationMember(
                world.home(x)[0].identity(world.home(x)[1]), manifest, world.layout, train, 0.01,
                shares[x].share(world.home(x)[1]),
            )
            for x in shares
        }  # fmt: skip
        return Federation(manifest, world.layout, world.model, members, seed=3, folder=place)

    list(federation(folder / "simulated").rounds(2))

    def resumed(here: Path) -> None:
        federation(here)

    for path in sorted((folder / "simulated").iterdir()):
        kinds = {".json": JSON, ".safetensors": _with(m.SAFETENSORS), ".npy": PLAIN}
        if path.suffix in kinds:
            yield FileKind(
                f"simulation {path.name}", resumed, kinds[path.suffix], path.name, beside=folder / "simulated"
            )  # fmt: skip


def _frames(run: _Recorded) -> Iterator[Kind]:
    stage, config, _, _ = next(call for call in run.calls if call[0] == "unmask")
    arrays = {"vector": np.arange(20, dtype=np.uint64)}
    left, right = socket.socketpair()
    with left, right:
        _send(left, {**config, "stage": stage}, arrays)
        frame = right.recv(1 << 20)

    def received(data: bytes) -> None:
        one, two = socket.socketpair()
        with one, two:
            two.settimeout(5)
            sender = threading.Thread(target=_feed, args=(one, data))
            sender.start()
            try:
                _receive(two, lambda _: 1 << 20)
            finally:
                two.close()
                sender.join()

    yield _bytes_kind("signer frame", received, _with(m.FRAMED, m.FRAMED), frame)


def _feed(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the reader has heard enough


def _setup_stage(folder: Path) -> Iterator[Kind]:
    (folder / "setup").mkdir()
    group = Consortium.agree(folder / "setup", 3, 2, model={"w": np.ones((8, 40), np.float32)})
    pinned = group.terms.digest().hex()
    server = CeremonyServer(group.terms, "1")

    def node(home: Path) -> MemberNode:
        return MemberNode(HomeFolder(home), group.home(1)[1], terms=pinned)

    for turn in range(3):
        for x in (1, 2, 3):
            config, arrays = server.turn(x if turn else None)
            config["node"] = str(x)
            home, unlock = group.home(x)
            if x == 1:
                shutil.copytree(home.path, folder / f"setup-{turn}")
                yield CallKind(f"engine setup {turn}", "setup", config, arrays, folder / f"setup-{turn}", node)
            reply, messages = MemberNode(home, unlock, terms=pinned).handle("setup", config, arrays)
            server.take(x, str(x), reply, messages)


# --- suspects and the lab ---------------------------------------------------------------------------------


def _suspects(folder: Path, marker: Path) -> Iterator[Kind]:
    zipped, pickled = m.in_zip(marker), m.as_pickle(marker)
    kinds: dict[str, Sequence[m.Mutator]] = {
        "as_safetensors": _with(m.SAFETENSORS, m.SAFETENSORS), "as_index": JSON, "as_shards": PLAIN,
        "as_npz": _with(zipped, zipped), "as_compressed_npz": _with(zipped, zipped), "as_npy": PLAIN,
        "as_pt": _with(zipped, zipped, pickled), "as_old_pt": _with(pickled),
        "as_checkpoint": _with(zipped, pickled), "as_torch_shards": _with(m.in_json, zipped, pickled),
    }  # fmt: skip
    for name, mutators in kinds.items():
        place = folder / name
        place.mkdir()
        source: Path = getattr(suspects, name)(place)
        below = source.relative_to(place)
        paths = sorted(place.iterdir())
        chosen = source if source.is_file() else paths[0]

        def read(here: Path, below: Path = below) -> None:
            suspect = read_suspect(here / below)
            match = match_layout(suspect, suspects.LAYOUT)
            suspect.digest()
            for tensor in match.names.values():
                for _ in suspect.blocks(tensor):
                    pass

        yield FileKind(f"suspect {name}", read, mutators, chosen.name, beside=place, weight=2)


def _labs(folder: Path, _: Path) -> Iterator[Kind]:
    root = Path(__file__).resolve().parents[2]
    for name in ("table2", "language"):
        data = (root / "src/quorumark/research/lab/configs" / f"{name}.toml").read_bytes()
        (folder / name).mkdir()
        (folder / name / "c.toml").write_bytes(data)
        yield FileKind(
            f"lab {name}", lambda p: lab_config.read(p / "c.toml") and None, _with(m.in_text, m.in_text), "c.toml",
            beside=folder / name,
        )  # fmt: skip
    plan = (root / "src/quorumark/research/attacks/configs/quick.toml").read_bytes()
    yield FileKind("attack plan", lambda p: read_plan(p / "file") and None, _with(m.in_text, m.in_text), data=plan)
    result = min((root / "results").glob("*.json"), key=lambda p: p.stat().st_size)
    (folder / "results").mkdir()
    shutil.copy(result, folder / "results")
    yield FileKind(
        "lab result", lambda p: lab_results.read_all(p) and None, JSON, result.name, beside=folder / "results"
    )
    attack = min((root / "results/attacks").glob("*.json"), key=lambda p: p.stat().st_size)
    (folder / "attacks").mkdir()
    for path in (attack, attack.with_suffix(".csv")):
        shutil.copy(path, folder / "attacks")
    yield FileKind(
        "lab attacks", lambda p: lab_attacked.read_attacked(p) and None, JSON, attack.name, beside=folder / "attacks"
    )
    state = {"format": suite._STATE, "title": "x", "attacked": "ab" * 32, "threshold": "6"}
    (folder / "suite").mkdir()
    (folder / "suite" / "suite.json").write_bytes(canonical(state))
    shutil.copy(attack.with_suffix(".csv"), folder / "suite" / "results.csv")
    for name in ("suite.json", "results.csv"):
        yield FileKind(
            f"suite {name}", lambda p: suite.read_results(p) and None, JSON, name, beside=folder / "suite"
        )  # fmt: skip
    rows = attack.with_suffix(".csv").read_bytes()
    yield _bytes_kind(
        "attack rows",
        lambda d: parsed_rows(d.decode("latin-1"), "rows") and None,
        PLAIN,
        b"\n".join(rows.splitlines()[:9]),
    )
