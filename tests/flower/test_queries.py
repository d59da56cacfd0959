"""Verification over Flower: who answers, who signs, what is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from quorumark.align.groups import Group, Groups
from quorumark.canonical import canonical
from quorumark.cli import app
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.errors import EvidenceError, InputError, QuorumarkError, RecordError
from quorumark.files import write_private
from quorumark.flower import make_key, verify_model
from quorumark.model.layout import write_safetensors
from quorumark.model.suspect import read_suspect
from quorumark.node.member import MemberNode
from quorumark.node.queries import pack_query
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import check_certificate
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.examine import examine
from quorumark.verify.layered import Opened
from quorumark.verify.ledger import Ledger
from quorumark.verify.proof import Audit
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference
from tests.kit.audits import audit
from tests.kit.consortium import Tensors, World, make_world, trained_from
from tests.kit.disguises import CHANNELS, adapter_world, aligned_world, merged, permuted, turned
from tests.kit.flower_runs import allow, run
from tests.kit.flowers import Consortium, LocalGrid, app_for, train
from tests.kit.layered import evaded, layered_world
from tests.kit.refusals import stopped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def test_a_key_is_made_a_model_trained_and_verified(tmp_path: Path) -> None:
    """All of it over Flower's messages: three whose policies allow it prove that the model is theirs, two cannot."""
    strength = {"rule": "rho", "rho": "0.25", "c_max": "0.25", "lr": "constant", "dither": "0"}
    world = Consortium.agree(tmp_path, strength=strength)
    pinned = world.terms.digest().hex()
    grid = LocalGrid(app_for(tmp_path, pinned=pinned), 5)
    steps: list[str] = []
    manifest = make_key(grid, world.terms, note=steps.append)
    world.keep(manifest)
    assert manifest.terms == world.terms
    assert len({home.only_consortium().share(unlock).root() for home, unlock in map(world.home, range(1, 6))}) == 5
    assert not list(tmp_path.glob("member-*/ceremonies/*"))
    _, model = run(world, grid, 10)
    suspect = tmp_path / "suspect.safetensors"
    write_safetensors(model, suspect)
    reference = Reference.read(world.path)
    said: list[str] = []
    allow(world, 1)
    allow(world, 2)
    with pytest.raises(EvidenceError, match="2 members answered, and 3 must"):
        verify_model(grid, reference, suspect, note=said.append)
    assert len([text for text in said if "nobody has approved" in text]) == 3
    allow(world, 4)
    certificate = verify_model(grid, reference, suspect)
    assert certificate.finding.verdict == "PASSED"
    assert {member.point for member in certificate.signers(manifest)} == {1, 2, 4}
    check_certificate(certificate, reference.chain, suspect=suspect, reference=reference)
    strange = tmp_path / "strange.safetensors"
    write_safetensors(train(world.model, 0.05, 99, 1.0), strange)
    assert verify_model(grid, reference, strange).finding.verdict == "FAILED"


def test_after_an_audit_a_model_is_verified_with_its_proof(tmp_path: Path) -> None:
    """Members 1 to 3 opened leaves by command line; over Flower's messages 4 and 5 take the proof with the query."""
    owners = make_world(tmp_path, rho=0.35)
    done = audit(owners, owners.suspect, (1, 2, 3))
    proof = done.proof(owners, (1, 2, 3))
    policy = {"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 9}
    for home, _ in owners.homes:
        write_private(home.rules_path, canonical(policy))
    grid = LocalGrid(
        app_for(tmp_path, find=lambda context: MemberNode(*owners.homes[int(context.node_config["partition-id"])])), 5
    )
    said: list[str] = []
    with pytest.raises(EvidenceError, match="2 members answered, and 3 must"):
        # those who opened refuse to answer about what is public; the others have answered the very same query before
        verify_model(grid, owners.reference, owners.suspect, note=said.append)
    assert len([text for text in said if "leaves of the key that an audit opened" in text]) == 3
    certificate = verify_model(grid, owners.reference, owners.suspect, audits=[proof])
    assert certificate.finding.verdict == "PASSED"
    assert certificate.finding.audits == {proof.name: done.challenge.leaves}
    assert len(certificate.signers(owners.manifest)) == 5


def test_a_signature_of_something_else_is_not_taken(world: Consortium) -> None:
    """Hospital 2 signs the certificate with another date: a signature that holds, but not of what the others signed."""
    suspect = world.folder / "suspect.safetensors"
    write_safetensors(train(world.model, 0.05, 99, 1.0), suspect)
    for x in (1, 2, 3):
        allow(world, x)

    class Elsewhere:
        def __init__(self, context: Any) -> None:
            self.x = int(context.node_config["partition-id"]) + 1

        def handle(self, stage: str, config: Any, arrays: Any) -> Any:
            if (stage, self.x) != ("sign", 2):
                return MemberNode(*world.home(self.x)).handle(stage, config, arrays)
            home, unlock = world.home(2)
            finding = replace(Certificate.from_bytes(config["certificate"]).finding, created="2026-02-01T00:00:00Z")
            return {"certificate": Certificate.of(finding).signed_by(home.identity(unlock)).to_bytes()}, {}

    said: list[str] = []
    reference = Reference.read(world.path)
    grid = LocalGrid(app_for(world.folder, find=Elsewhere), 3)
    certificate = verify_model(grid, reference, suspect, note=said.append)
    assert said == ["node 102: it signed another certificate than the one that it was sent"]
    assert {member.point for member in certificate.signers(reference.manifest)} == {1, 3}


# --- the same as on the command line ----------------------------------------------------------------------


def permit(world: World, **more: Any) -> None:
    policy = {"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 9, **more}
    for home, _ in world.homes:
        write_private(home.rules_path, canonical(policy))


def over_flower(world: World, suspect: Path, **how: Any) -> Certificate:
    def node(context: Any) -> MemberNode:
        return MemberNode(*world.homes[int(context.node_config["partition-id"])])

    grid = LocalGrid(app_for(world.folder, find=node), len(world.homes))
    return verify_model(grid, world.reference, suspect, note=pytest.fail, **how)


def command(*words: Any, code: int = 0) -> None:
    done = CliRunner().invoke(app, ["verify", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == code, done.output


def by_commands(
    folder: Path, homes: list[str], suspect: Path, audits: Sequence[Audit], *options: str, fails: bool = False
) -> Certificate:
    """The same query with `quorumark verify`, each member's commands on its own home."""
    query, made = folder / "query.json", folder / "certificate.json"
    manifest, nobody = ("--manifest", folder / "consortium.json"), ("--home", folder / "nobody")
    proofs: list[Any] = []
    for number, proof in enumerate(audits):
        (folder / f"audit-{number}.json").write_bytes(proof.to_bytes())
        proofs += ["--audit", folder / f"audit-{number}.json"]
    command("prepare", suspect, "--out", query, *options, *proofs, *manifest, *nobody)
    partials = []
    for name in homes:
        home = ("--home", folder / name, "--key-file", folder / f"{name}.key")
        partials.append(folder / f"partial-{name}.json")
        command("partial", query, "--suspect", suspect, "--out", partials[-1], *proofs, *manifest, *home)
    command("combine", query, *partials, "--out", made, *proofs, *manifest, *nobody, code=int(fails))
    for name in homes:
        command("sign", made, "--home", folder / name, "--key-file", folder / f"{name}.key")
    return Certificate.from_bytes(made.read_bytes())


def _saved_in_shards(model: Tensors, folder: Path) -> Path:
    folder.mkdir()
    places = {}
    for number, (name, tensor) in enumerate(sorted(model.items()), 1):
        places[name] = f"model-{number}.safetensors"
        write_safetensors({name: tensor}, folder / places[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


CASES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "permuted channels": (aligned_world, permuted, ("align",)),
    "an adapter with other factors": (adapter_world, lambda model: turned(model, 4), ("lora",)),
    "a whole model with an adapter in it": (adapter_world, merged, ("lora",)),
    "shards": (aligned_world, dict, ()),
    "shards with permuted channels": (aligned_world, permuted, ("align",)),
    "permuted channels after an audit": (aligned_world, permuted, ("align",)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_certificate_is_the_one_of_the_command_line(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, at the same time of day; no member has groups, adapter or base in its home."""
    stopped = SimpleNamespace(gmtime=time.gmtime, strftime=lambda *_: "2026-03-01T08:00:00Z")
    monkeypatch.setattr("quorumark.verify.evidence.time", stopped)
    make, disguise, options = CASES[case]
    folder = tmp_path / "one"
    folder.mkdir()
    world = make(folder)
    permit(world)
    # after an audit, a model that was tuned further: about the audited one itself nothing more is answered
    hidden = disguise(trained_from(world.marked, 7) if "audit" in case else world.marked)
    sharded = "shards" in case
    suspect = _saved_in_shards(hidden, folder / "shards") if sharded else world.save(hidden, "hidden.safetensors")
    proofs = [audit(world, world.suspect, (1, 2, 3)).proof(world, (1, 2, 3))] if "audit" in case else []
    shutil.copytree(folder, tmp_path / "two")
    made = over_flower(world, suspect, audits=proofs, **dict.fromkeys(options, True))
    assert made.finding.verdict == "PASSED"
    assert bool(made.finding.query.burnt) == bool(proofs)
    names = [home.path.name for home, _ in world.homes]
    expected = by_commands(tmp_path / "two", names, suspect, proofs, *(f"--{option}" for option in options))
    assert made.to_bytes() == expected.to_bytes()
    assert len(made.signers(world.manifest)) == 5
    assert not list(folder.glob("*/consortia/*/query-*"))  # what was sent is removed


def test_by_layers_the_certificates_are_those_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain query that fails, then one by layers that passes: both byte for byte. Answers are sealed with one fresh
    key here, and at one time of day."""
    stopped = SimpleNamespace(gmtime=time.gmtime, strftime=lambda *_: "2026-03-01T08:00:00Z")
    monkeypatch.setattr("quorumark.verify.evidence.time", stopped)
    fresh = X25519PrivateKey.generate()
    monkeypatch.setattr("quorumark.verify.layered.X25519PrivateKey", SimpleNamespace(generate=lambda: fresh))
    folder = tmp_path / "one"
    folder.mkdir()
    world = layered_world(folder, 3, 2)
    permit(world, layers=True)
    suspect = world.save(evaded(world), "evaded.safetensors")
    Unlock.new_key_file(folder / "judge.key")
    judge = HomeFolder.create(folder / "judge", "Judge Oak", Unlock.key_file(folder / "judge.key"))
    identity = judge.identity(Unlock.key_file(folder / "judge.key"))
    (folder / "judge.json").write_bytes(judge.card().to_bytes())
    shutil.copytree(folder, tmp_path / "two")

    plain = over_flower(world, suspect)
    assert plain.finding.verdict == "FAILED"
    handed: list[int] = []

    def opener(query: Query, partials: Sequence[Partial]) -> Opened:
        handed.extend(partial.point for partial in partials)
        return examine(identity, world.manifest, query, partials).opened

    made = over_flower(world, suspect, after=plain, examiner=judge.card(), opener=opener)
    assert made.finding.verdict == "PASSED"
    assert sorted(handed) == [1, 2, 3]
    assert len(made.signers(world.manifest)) == 3
    check_certificate(made, world.reference.chain, suspect=suspect, reference=world.reference)

    two = tmp_path / "two"
    names = [home.path.name for home, _ in world.homes]
    assert by_commands(two, names, suspect, [], fails=True).to_bytes() == plain.to_bytes()
    assert by_commands_in_layers(two, names, suspect).to_bytes() == made.to_bytes()


def by_commands_in_layers(folder: Path, homes: list[str], suspect: Path) -> Certificate:
    """A query by layers after the plain one of `by_commands`, which left its certificate in the folder."""
    before = ("--after", folder / "certificate.json")
    query, opened, made = (folder / f"{name}.json" for name in ("layers", "opened", "by-layers"))
    manifest, nobody = ("--manifest", folder / "consortium.json"), ("--home", folder / "nobody")
    examiner = ("--examiner", folder / "judge.json")
    command("prepare", suspect, "--layers", *before, *examiner, "--out", query, *manifest, *nobody)
    partials = []
    for name in homes:
        home = ("--home", folder / name, "--key-file", folder / f"{name}.key")
        partials.append(folder / f"sealed-{name}.json")
        command("partial", query, "--suspect", suspect, *before, "--out", partials[-1], *manifest, *home)
    judge = ("--home", folder / "judge", "--key-file", folder / "judge.key")
    command("open", query, *partials, "--out", opened, *manifest, *judge)
    command("combine", query, *partials, "--opened", opened, "--out", made, *manifest, *nobody)
    for name in homes:
        command("sign", made, "--home", folder / name, "--key-file", folder / f"{name}.key")
    return Certificate.from_bytes(made.read_bytes())


def test_over_flower_layers_need_rules_that_allow_them_and_an_examiner(tmp_path: Path) -> None:
    world = layered_world(tmp_path, 3, 2)
    permit(world)
    suspect = world.save(evaded(world), "evaded.safetensors")
    plain = over_flower(world, suspect)
    card = Identity.generate("Judge Oak").card()
    with pytest.raises(InputError):
        over_flower(world, suspect, after=plain, examiner=card)
    said: list[str] = []
    nodes = [MemberNode(*home) for home in world.homes]
    grid = LocalGrid(app_for(tmp_path, find=lambda context: nodes[int(context.node_config["partition-id"])]), 3)
    with pytest.raises(EvidenceError, match="0 members answered"):
        verify_model(
            grid,
            world.reference,
            suspect,
            after=plain,
            examiner=card,
            opener=lambda *_: pytest.fail("nobody answered"),
            note=said.append,
        )
    assert len([text for text in said if "nobody has approved" in text]) == 3


def test_without_alignment_the_disguise_works(tmp_path: Path) -> None:
    """What the test above would say if `align` did nothing."""
    world = aligned_world(tmp_path)
    permit(world)
    suspect = world.save(permuted(world.marked), "hidden.safetensors")
    assert over_flower(world, suspect).finding.verdict == "FAILED"


def test_what_a_server_sends_is_checked_against_the_manifest(tmp_path: Path) -> None:
    """Other groups, factors, anchors and layouts than the agreed ones are refused by name; the right ones are not."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    aligned, adapted = aligned_world(tmp_path / "a", 3, 2), adapter_world(tmp_path / "b", 3, 2)
    hidden = aligned.save(permuted(aligned.marked), "hidden.safetensors")
    whole = adapted.save(merged(adapted.marked), "whole.safetensors")
    questions = []
    for world, path, align in ((aligned, hidden, True), (adapted, whole, False)):
        permit(world)
        suspect = read_suspect(path)
        query = prepare(world.reference, suspect, align=align, lora=not align).query
        questions.append(pack_query(world.reference, suspect, query))
    for world, question, name, content, reason in (
        (aligned, 0, "groups", Groups((Group(60, CHANNELS.slots[:1]),)).to_bytes(), "the groups are not the ones"),
        (adapted, 1, "lora", _other_lora(adapted), "the factors are not the ones"),
        (adapted, 1, "base:base.safetensors", hidden.read_bytes(), "the base is not the one that was agreed on"),
        (aligned, 0, "anchor:anchor.safetensors", aligned.suspect.read_bytes(), "the anchor is not the model"),
        (aligned, 0, "layout", adapted.reference.layout.to_bytes(), "the layout is not the one"),
        (aligned, 0, "suspect:hidden.safetensors", aligned.suspect.read_bytes(), "does not describe this suspect"),
    ):
        config, arrays = questions[question]
        assert name in arrays
        changed = {**arrays, name: np.frombuffer(content, np.uint8)}
        with pytest.raises(QuorumarkError, match=reason):
            MemberNode(*world.homes[0]).handle("answer", config, changed)
        assert not Ledger.open(world.homes[0][0].only_consortium(), world.manifest).answered()
    for world, (config, arrays) in zip((aligned, adapted), questions, strict=True):
        assert MemberNode(*world.homes[0]).handle("answer", config, arrays)[0]["partial"]


def _other_lora(world: World) -> bytes:
    lora = world.reference.lora
    assert lora is not None
    return replace(lora, layers=lora.layers[:1]).to_bytes()


def test_files_that_are_not_sent_are_read_from_the_members_own_folder(tmp_path: Path) -> None:
    world = aligned_world(tmp_path, 3, 2)
    permit(world)
    suspect = read_suspect(world.save(permuted(world.marked), "hidden.safetensors"))
    config, arrays = pack_query(world.reference, suspect, prepare(world.reference, suspect, align=True).query)
    only = {name: array for name, array in arrays.items() if name.startswith("suspect:")}
    node = MemberNode(*world.homes[0])
    own = world.homes[0][0].only_consortium().path
    for name, reason in (
        ("layout.json", "the layout is not at"),
        ("anchor.safetensors", "the anchor is not at"),
        ("groups.json", "the consortium's groups are not here"),
    ):
        with pytest.raises(RecordError, match=reason):
            node.handle("answer", config, only)
        shutil.copy(world.folder / name, own / name)
    assert node.handle("answer", config, only)[0]["partial"]
    # what is there and is not the manifest's is refused as well
    (own / "groups.json").write_bytes(Groups((Group(60, CHANNELS.slots[:1]),)).to_bytes())
    with pytest.raises(RecordError, match="the groups are not the ones"):
        node.handle("answer", config, only)


def test_a_base_model_need_not_be_sent(tmp_path: Path) -> None:
    world = adapter_world(tmp_path, 3, 2)
    permit(world)
    suspect = world.save(merged(world.marked), "whole.safetensors")
    said: list[str] = []
    nodes = [MemberNode(*home) for home in world.homes]
    grid = LocalGrid(app_for(tmp_path, find=lambda context: nodes[int(context.node_config["partition-id"])]), 3)
    with pytest.raises(EvidenceError, match="0 members answered"):
        verify_model(grid, world.reference, suspect, lora=True, with_base=False, note=said.append)
    assert len(said) == 3
    for home, _ in world.homes:
        shutil.copy(tmp_path / "base.safetensors", home.only_consortium().path)
    assert verify_model(grid, world.reference, suspect, lora=True, with_base=False).finding.verdict == "PASSED"


NAMES = ["../rules.json", "/etc/x.npz", "..", ".", "", "a\nb", "a\0b", "x" * 300]


@pytest.mark.parametrize("name", [f"suspect:{name}" for name in NAMES] + ["anchor:a/b", "base:a/b"])
def test_a_server_does_not_choose_where_files_are_written(tmp_path: Path, name: str) -> None:
    world = make_world(tmp_path, 3, 2)
    permit(world)
    suspect = read_suspect(world.suspect)
    config, arrays = pack_query(world.reference, suspect, prepare(world.reference, suspect).query)
    before = sorted(tmp_path.rglob("*"))
    with stopped("message.malformed"):
        MemberNode(*world.homes[0]).handle("answer", config, {**arrays, name: np.zeros(3, np.uint8)})
    home = world.homes[0][0].path
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and "rounds" not in path.parts] == []
    assert "approve" in (home / "rules.json").read_text()


@pytest.mark.parametrize("checked", [True, False])
def test_a_server_cannot_write_a_member_s_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """The attack that the names are checked for: a member that answers nothing by itself is made to answer always."""
    world = make_world(tmp_path, 3, 2)
    home, unlock = world.homes[0]
    suspect = read_suspect(world.suspect)
    config, arrays = pack_query(world.reference, suspect, prepare(world.reference, suspect).query)
    policy = canonical({"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 999})
    arrays["base:../../../../rules.json"] = np.frombuffer(policy, np.uint8)
    if not checked:
        monkeypatch.setattr("quorumark.node.queries._check_names", lambda *_: None)
    with contextlib.suppress(QuorumarkError):
        MemberNode(home, unlock).handle("answer", config, arrays)
    assert home.rules_path.exists() != checked
