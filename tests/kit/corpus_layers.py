"""What is sent for a query by layers, for the fuzzer: query, sealed answers, the examiner's word, renewed stamps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quorumark.consortium.home import HomeFolder, read_file
from quorumark.consortium.identity import Identity
from quorumark.report import certificate_page
from quorumark.stamps.record import Stamps
from quorumark.stamps.tokens import ask, check_token, read_request, read_roots
from quorumark.verify.answer import answer
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import check_certificate
from quorumark.verify.combine import combine
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.examine import examine
from quorumark.verify.layered import Opened
from tests.kit import mutations as m
from tests.kit.authority import make_authority
from tests.kit.consortium import make_world, trained_from
from tests.kit.corpus import JSON, PLAIN, FileKind, Kind
from tests.kit.layered import STRENGTH, Asked, ask_by_layers, layered_anchor


def by_layers(folder: Path, _: Path) -> Iterator[Kind]:
    anchor = {"in.weight": layered_anchor()["fc.weight"]}  # 40,960 coordinates: five blocks
    world = make_world(folder, 3, 2, models=(anchor, trained_from(anchor, 1)), strength=STRENGTH)
    asked = ask_by_layers(world, world.save(trained_from(anchor, 8), "innocent.safetensors"), (1, 2, 3))
    yield from _asked(folder, asked)
    yield from _answered(asked)
    yield from _renewed(folder, asked.certified().to_bytes())


def _asked(folder: Path, asked: Asked) -> Iterator[Kind]:
    """The query and the certificate before it, as a member gets them."""
    world, query = asked.world, asked.query
    begun = folder / "asked"
    begun.mkdir()
    shutil.copytree(world.homes[0][0].path, begun / "home")
    (begun / "query").write_bytes(query.to_bytes())
    (begun / "before").write_bytes(asked.before.to_bytes())

    def answered(here: Path) -> Any:
        told = Query.from_bytes(read_file(here / "query", "a query"))
        before = Certificate.from_bytes(read_file(here / "before", "a certificate"))
        home, unlock = HomeFolder(here / "home"), world.homes[0][1]
        partial = answer(home, unlock, world.reference, asked.suspect, told, approved=True, after=before)
        # whom it is sealed to and when it was asked is the asker's to say; without layers it is a plain query
        layers = told.layers or query.layers
        assert layers is not None
        return partial.suspect, partial.x, layers.rule, layers.after, layers.value, layers.norm1, layers.norm2

    yield FileKind("query by layers to answer", answered, JSON, "query", beside=begun)
    yield FileKind("certificate before", answered, (m.PAYLOAD, *JSON), "before", beside=begun)


def _answered(asked: Asked) -> Iterator[Kind]:
    """Sealed answers as the examiner gets them, its word as anybody gets it, and the certificate."""
    world, judge, query, partials = asked.world, asked.judge, asked.query, asked.partials
    manifest, honest = world.manifest, asked.examined()
    home, unlock = world.homes[0]
    member: Identity = home.identity(unlock)

    def queried(here: Path) -> Any:
        told = Query.from_bytes(read_file(here / "file", "a query"))
        return combine(manifest, told, partials, opened=honest.opened).query.digest()

    def opened_query(here: Path) -> Any:
        told = Query.from_bytes(read_file(here / "file", "a query"))
        return examine(judge, manifest, told, partials, created=honest.opened.created).opened

    def with_partial(here: Path) -> Any:
        partial = Partial.from_bytes(read_file(here / "file", "a partial"))
        found = examine(judge, manifest, query, [partial, *partials[1:]])
        return partial.signed_bytes(), found.values, found.opened.wrong

    def with_sealed(here: Path) -> Any:
        """A member signs whatever it likes; but what it did not seal for this query does not open."""
        text = read_file(here / "file", "a sealed answer").decode("latin-1")
        lied = Partial.sign(member, **{**partials[0].as_dict(), "members": (), "sealed": text})
        return examine(judge, manifest, query, [lied, *partials[1:]]).values

    def with_word(here: Path) -> Any:
        word = Opened.from_bytes(read_file(here / "file", "an examiner's word"))
        finding = combine(manifest, query, partials, opened=word)
        return word.signed_bytes(), finding.layers, finding.verdict

    def checked(here: Path) -> Any:
        found = Certificate.from_bytes(read_file(here / "file", "a certificate"))
        told, _ = check_certificate(found, [manifest])
        certificate_page(found, manifest, signers=found.signers(manifest), checked=told)
        return found.payload

    yield FileKind("query by layers", queried, JSON, data=query.to_bytes())
    yield FileKind("query by layers to open", opened_query, JSON, data=query.to_bytes())
    yield FileKind("sealed partial", with_partial, JSON, data=partials[0].to_bytes())
    yield FileKind("sealed numbers", with_sealed, PLAIN, data=partials[0].sealed.encode())
    yield FileKind("opened", with_word, JSON, data=honest.opened.to_bytes())
    yield FileKind("certificate by layers", checked, (m.PAYLOAD, *JSON), data=asked.certified().to_bytes())


def _renewed(folder: Path, message: bytes) -> Iterator[Kind]:
    """A certificate's stamp that is renewed by another authority: its answer, and the request that it answers."""
    first, second = (make_authority(folder / name) for name in ("first", "second"))
    roots = read_roots([first.root, second.root])
    stamps = Stamps.of("certificate", message).with_response(0, first.answer(ask(message)))
    request = ask(stamps.message(0, message))

    def renewed(here: Path) -> Any:
        found = stamps.with_response(0, read_file(here / "file", "an answer")).check(0, message, roots)
        return found.authority, found.latest, found.renewals

    def requested(here: Path) -> Any:
        return stamps.place_of(read_request(read_file(here / "file", "a request")), message)

    both = stamps.with_response(0, second.answer(request))
    shown = check_token(both.chains[0][0], message, roots)

    def dated(here: Path) -> Any:
        """Whoever renewed it: the date is the first stamp's."""
        found = Stamps.from_bytes(read_file(here / "file", "a file of stamps"))
        dates = [found.check(number, message, roots) for number in range(len(found.chains))]
        return all((one.authority, one.latest) == (shown.authority, shown.latest) for one in dates)

    yield FileKind("renewal", renewed, PLAIN, data=both.chains[0][1])
    yield FileKind("request for a renewal", requested, PLAIN, data=request)
    yield FileKind("renewed stamps", dated, JSON, data=both.to_bytes())
