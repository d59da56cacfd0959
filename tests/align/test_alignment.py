"""Verification with alignment, from the agreed groups to the certificate: disguises are undone, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.align.alignment import PROCEDURE
from quorumark.align.groups import Group, Groups
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Terms
from quorumark.consortium.succession import check_terms_follow
from quorumark.errors import EvidenceError, InconclusiveError, RecordError
from quorumark.model.layout import write_safetensors
from quorumark.reasons import Reason
from quorumark.setup.amend import propose
from quorumark.verify.answer import answer
from quorumark.verify.check import check_certificate
from quorumark.verify.combine import combine
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference
from tests.kit.commands import run
from tests.kit.consortium import Tensors, World, anchor_model, make_world, trained_from
from tests.kit.desk import Desk
from tests.kit.disguises import CHANNELS, GROUPS, permuted

AGREED = {"z": "6", "groups": GROUPS.digest()}


def chosen(model: Tensors, channels: Any) -> Tensors:
    """Only some channels."""
    fc = model["fc.weight"].reshape(80, 60, 2)[:, channels].reshape(80, -1)
    return {"conv.weight": model["conv.weight"][channels], "fc.weight": fc, "fc.bias": model["fc.bias"]}


def beside(one: Tensors, two: Tensors) -> Tensors:
    """The channels of both."""
    joined = {
        name: np.concatenate([one[name], two[name]], axis) for name, axis in (("conv.weight", 0), ("fc.weight", 1))
    }
    return {**joined, "fc.bias": one["fc.bias"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    (folder / "groups.json").write_bytes(GROUPS.to_bytes())
    return make_world(folder, members=3, threshold=2, policy=AGREED)


def marked(world: World, seed: int) -> Tensors:
    """Another model that carries the key: members do not answer twice about one."""
    model = trained_from(anchor_model(), seed)
    for spec, place in world.reference.layout.spans("carrier"):
        moved = float((model[spec.name] - anchor_model()[spec.name]).std())
        model[spec.name] += (0.25 * moved * world.known.key[place]).reshape(spec.shape).astype(np.float32)
    return model


def asked(world: World, suspect: Any, *, align: bool = True) -> Any:
    query = prepare(world.reference, suspect, align=align).query
    _, partials = world.answers(suspect, (1, 2), query)
    return combine(world.manifest, query, partials)


def test_a_disguise_fails_as_it_is_and_passes_aligned_with_the_same_z(world: World) -> None:
    original = prepare(world.reference, world.marked)
    hidden = permuted(world.marked)
    as_it_is, aligned = asked(world, hidden, align=False), asked(world, hidden)
    assert as_it_is.verdict == "FAILED"
    assert abs(float(as_it_is.z)) < 5
    assert aligned.verdict == "PASSED"
    assert float(aligned.z) == pytest.approx(world.known.z_of(original.form), rel=0.01)
    assert aligned.query.alignment == f"{PROCEDURE}:{GROUPS.digest()}"
    assert as_it_is.query.alignment == "none"
    assert (aligned.query.surplus, aligned.query.covered) == (0, aligned.query.carriers)
    reason = aligned.query.matching[-2]
    assert (reason.code, reason.values["found"], reason.values["channels"]) == ("read.aligned", 60, 60)
    # two questions: the first one, which did not pass, raised the threshold of the second; there were two ways to ask
    assert (aligned.equations, aligned.charged, aligned.threshold) == (1, "6.114434", "7.114434")
    # where channels lie makes no difference at all: only rescaling costs a bit of rounding
    order = np.random.default_rng(2).permutation(60)
    assert prepare(world.reference, chosen(world.marked, order), align=True).form.digest == original.form.digest


def test_an_innocent_model_fails_aligned_too(world: World) -> None:
    """|z| < 5 fails once in two million."""
    found = asked(world, permuted(trained_from(anchor_model(), 99)))
    assert found.verdict == "FAILED"
    assert abs(float(found.z)) < 5


def likeness(finding: Any) -> tuple[int, int]:
    (reason,) = (r for r in finding.query.matching if r.code == "read.like-the-anchor")
    return reason.values["weights"], reason.values["compared"]


def test_a_part_that_cannot_be_matched_is_doubt_where_the_rest_is_of_our_origin(world: World) -> None:
    """The outputs' rows are in no group: who exchanges them, and what reads them elsewhere, hides that part."""
    model = trained_from(anchor_model(), 95)
    order = np.random.default_rng(3).permutation(80)
    found = asked(world, permuted({**model, "fc.weight": model["fc.weight"][order]}))
    assert found.verdict == "INCONCLUSIVE"
    sizes = model["conv.weight"].size, model["conv.weight"].size + model["fc.weight"].size
    assert likeness(found) == sizes
    expected = Reason.of("finding.doubtful", z=found.z, threshold=found.threshold, weights=sizes[0], compared=sizes[1])
    assert found.reasons[0] == expected


def test_a_model_of_another_origin_fails_and_is_said_to_be_one(world: World) -> None:
    """An innocent model is no reason for doubt: nothing in it is like the anchor, or everything is."""
    found = asked(world, permuted(trained_from(anchor_model(7), 97)))
    assert found.verdict == "FAILED"
    weights, compared = likeness(found)
    assert weights == 0
    assert Reason.of("finding.unrelated", weights=0, compared=compared) in found.reasons
    related = asked(world, permuted(trained_from(anchor_model(), 96)))
    assert related.verdict == "FAILED"
    assert likeness(related) == (compared, compared)
    assert "finding.unrelated" not in {reason.code for reason in related.reasons}


def test_removed_channels(world: World) -> None:
    smaller = chosen(permuted(marked(world, 11)), np.arange(40))
    with pytest.raises(InconclusiveError, match="does not fit the consortium's model: 0 of"):
        prepare(world.reference, smaller)
    found = asked(world, smaller)
    assert found.verdict == "PASSED"
    assert found.query.covered * 3 == found.query.carriers * 2
    assert Reason.of("read.resized", tensors=2) in found.query.matching
    innocent = asked(world, chosen(trained_from(anchor_model(), 98), np.arange(40)))
    assert innocent.verdict == "INCONCLUSIVE"
    with pytest.raises(InconclusiveError, match="too little of the consortium's model was found in the suspect: 1,"):
        prepare(world.reference, chosen(world.marked, np.arange(4)), align=True)
    other = {**world.marked, "fc.weight": world.marked["fc.weight"][:, :100]}
    with pytest.raises(InconclusiveError, match="fit no number of channels"):
        prepare(world.reference, other, align=True)


def test_surplus_channels_are_inconclusive_where_the_mark_is_not_found(world: World) -> None:
    padded = beside(marked(world, 12), trained_from(anchor_model(7), 7))
    found = asked(world, disguised_wide(padded))
    assert (found.verdict, found.query.surplus) == ("PASSED", 60)
    # decoys: the anchor's own channels, moved less than training moved the right ones
    anchor = anchor_model()
    near = {name: (2 * anchor[name] + w) / 3 for name, w in trained_from(anchor, 3).items()}
    found = asked(world, disguised_wide(beside(near, marked(world, 13))))
    assert (found.verdict, found.query.surplus) == ("INCONCLUSIVE", 60)
    assert (found.reasons[0].code, found.reasons[0].values["surplus"]) == ("finding.surplus", 60)
    assert found.query.matching[-1] == Reason.of("read.channels-left-over", surplus=60, channels=120)


def disguised_wide(model: Tensors) -> Tensors:
    order = np.random.default_rng(1).permutation(120)
    fc = model["fc.weight"].reshape(80, 120, 2)[:, order].reshape(80, 240)
    return {"conv.weight": model["conv.weight"][order], "fc.weight": fc, "fc.bias": model["fc.bias"]}


def test_members_compute_the_alignment_themselves(world: World) -> None:
    hidden = permuted(marked(world, 14), 6)
    query = prepare(world.reference, hidden, align=True).query
    without = replace(world.reference, groups=None)
    with pytest.raises(RecordError, match=r"put groups\.json beside the manifest"):
        answer(*world.homes[0], without, hidden, query, approved=True)
    for change, text in (
        ({"alignment": "none"}, "the query does not describe this suspect: x is"),
        ({"surplus": 1}, "surplus is 0"),
        ({"matching": query.matching[:-1]}, "matching is"),
        ({"alignment": f"{PROCEDURE}:{'ab' * 32}"}, "another way than the one that was agreed on"),
    ):
        with pytest.raises(EvidenceError, match=text):
            answer(*world.homes[0], world.reference, hidden, replace(query, **change), approved=True)
    foreign = replace(query, alignment=f"{PROCEDURE}:{'ab' * 32}")
    with pytest.raises(EvidenceError, match="another way than the one that was agreed on"):
        combine(world.manifest, foreign, [])
    _, partials = world.answers(hidden, (1, 2, 3), query)
    certificate = world.certified(query, partials)
    checked, left = check_certificate(certificate, [world.manifest], suspect=hidden, reference=world.reference)
    assert (len(checked), left) == (5, [])
    _, left = check_certificate(certificate, [world.manifest], suspect=hidden, reference=without)
    assert left == [Reason.of("check.no-groups")]


def test_groups_are_the_agreed_ones_for_ever(world: World, tmp_path: Path) -> None:
    assert world.reference.groups == GROUPS
    # other groups, or any where none were agreed on, are refused
    others = Groups((Group(60, CHANNELS.slots[:1]),))
    (tmp_path / "groups.json").write_bytes(others.to_bytes())
    with pytest.raises(RecordError, match="the consortium agreed on others"):
        Reference.read(world.folder / "consortium.json", groups=tmp_path / "groups.json")
    terms = world.manifest.terms
    for policy in ({"z": "6"}, {**AGREED, "groups": others.digest()}):
        with pytest.raises(RecordError, match="a successor's groups must not change, come or go"):
            check_terms_follow(replace(terms, policy=Policy.of(policy)), terms)
        with pytest.raises(RecordError, match="a successor's groups must not change, come or go"):
            check_terms_follow(terms, replace(terms, policy=Policy.of(policy)))
    check_terms_follow(replace(terms, policy=Policy.of({**AGREED, "z": "7"})), terms)
    with pytest.raises(RecordError, match="a successor's groups"):
        propose(terms, policy={"groups": others.digest()})


def test_a_consortium_without_groups(tmp_path: Path) -> None:
    (tmp_path / "groups.json").write_bytes(GROUPS.to_bytes())
    plain = make_world(tmp_path, members=3, threshold=2)
    assert plain.reference.groups is None  # what lies there by chance is not looked at
    with pytest.raises(RecordError, match="agreed on no groups when it was made"):
        prepare(plain.reference, plain.marked, align=True)
    with pytest.raises(RecordError, match="agreed on none when it was made"):
        Reference.read(tmp_path / "consortium.json", groups=tmp_path / "groups.json")


# --- the commands -----------------------------------------------------------------------------------------


def test_align_through_the_commands(world: World, tmp_path: Path, environment: dict[str, str]) -> None:
    desk = Desk(world, tmp_path, environment)
    suspect = world.save(permuted(marked(world, 15), 8), "hidden.safetensors")
    query, nobody = desk.path("query.json"), ["--home", desk.path("nobody")]
    said = desk("prepare", suspect, "--align", "--out", query, *desk.reference, *nobody)
    assert "aligned to the anchor: 60 of 60 channels were found" in said.stdout
    partials = [desk.partial(query, suspect, point, "--approve") for point in (1, 2)]
    assert desk.combine(query, partials)["verdict"] == "PASSED"
    for point in (1, 2):
        desk("sign", desk.path("certificate.json"), *desk.home(point))
    check = ["check", desk.path("certificate.json"), "--manifest", world.folder / "consortium.json"]
    done = desk(*check, "--suspect", suspect, "--report", desk.path("report.html"))
    assert done.stdout.count("checked: ") == 5
    assert PROCEDURE in Path(desk.path("report.html")).read_text()
    wrong = tmp_path / "wrong.json"
    wrong.write_bytes(Groups((Group(60, CHANNELS.slots[:1]),)).to_bytes())
    done = desk("prepare", suspect, "--align", "--groups", wrong, *desk.reference, *nobody, code=2)
    assert done.stderr == (
        "quorumark: the groups are not the ones that the manifest names: the consortium agreed on others\n"
    )


NET = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4))

def words():
    return nn.Sequential(nn.Embedding(9, 12), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 9))

def broken():
    raise ValueError("no weights here")

number = 3
"""


def test_groups_from_a_file_of_code_to_the_terms(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(NET)
    code, out = f"{tmp_path}/net.py", str(tmp_path / "groups.json")
    done = run(environment, "groups", "--model", f"{code}:make", "--example", "1,1,8,8", "--out", out)
    assert done.returncode == 0, done.stderr
    found = Groups.from_bytes(Path(out).read_bytes())
    assert [group.size for group in found.groups] == [6]
    assert found.digest() in done.stdout
    words = str(tmp_path / "words.json")
    done = run(environment, "groups", "--model", f"{code}:words", "--example", "int:1,5", "--out", words)
    assert done.returncode == 0, done.stderr
    assert sorted(group.size for group in Groups.from_bytes(Path(words).read_bytes()).groups) == [12, 16]
    cards = []
    for name in ("Avon", "Birch", "Cedar"):
        Unlock.new_key_file(tmp_path / f"{name}.key")
        home = HomeFolder.create(tmp_path / name, name, Unlock.key_file(tmp_path / f"{name}.key"))
        cards += ["--member", str(home.path / "member.json")]
    model = tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    shapes = {"0.weight": (6, 1, 3, 3), "0.bias": (6,), "3.weight": (4, 216), "3.bias": (4,)}
    write_safetensors({n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}, model)
    create = ["consortium", "create", "--name", "three", "--threshold", "2", *cards, "--model", str(model)]
    refused = run(environment, *create, "--out", str(tmp_path / "terms"))
    assert refused.returncode == 2
    assert "--without-alignment" in refused.stderr
    assert not (tmp_path / "terms").exists()
    without = run(environment, *create, "--out", str(tmp_path / "without"), "--without-alignment")
    assert "hides the whole mark" in without.stdout
    shown = run(environment, "consortium", "show", str(tmp_path / "without" / "terms.json"))
    assert "hides the" in shown.stdout
    done = run(environment, *create, "--out", str(tmp_path / "terms"), "--groups", out)
    assert done.returncode == 0, done.stderr
    assert "are in groups" in done.stdout
    terms = Terms.from_bytes((tmp_path / "terms" / "terms.json").read_bytes())
    assert terms.policy == Policy(groups=found.digest())
    assert (tmp_path / "terms" / "groups.json").read_bytes() == Path(out).read_bytes()
    at_once = [*create, "--out", str(tmp_path / "once"), "--example", "1,1,8,8"]
    done = run(environment, *at_once, "--groups", f"{code}:make")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "once" / "groups.json").read_bytes() == Path(out).read_bytes()
    for given in ((), ("--groups", out)):
        refused = run(environment, *create, "--out", str(tmp_path / "twice"), "--example", "1,1,8,8", *given)
        assert refused.returncode == 2
        assert "--groups must be like FILE.py:FUNCTION" in refused.stderr
    shown = run(environment, "consortium", "show", str(tmp_path / "terms" / "terms.json"))
    assert f"groups   {found.digest()}" in shown.stdout
    assert "are in groups" in shown.stdout
    done = run(environment, *create, "--out", str(tmp_path / "others"), "--groups", words)
    assert "a group goes beyond the end of tensor '0.weight'" in done.stderr
    assert not (tmp_path / "others").exists()


@pytest.mark.parametrize(
    ("model", "example", "text"),
    [
        ("net.py", "1", "--model must be like FILE.py:FUNCTION"),
        ("other.py:make", "1", "must name a Python file that is there"),
        ("net.py:nothing", "1", "must name a function"),
        ("net.py:number", "1", "must name a function"),
        ("net.py:broken", "1", "must be a function that runs, but got ValueError: no weights here"),
        ("net.py:make", "1,x", "--example must be a shape like 1,3,32,32"),
        ("net.py:make", "1,1,9,9", "must be an input that the model takes"),
    ],
)
def test_bad_code_and_bad_examples(
    model: str,
    example: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    from quorumark.cli import main

    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["quorumark", "groups", "--model", model, "--example", example])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert text in said
    assert said.count("\n") == 1
    assert not (tmp_path / "groups.json").exists()
