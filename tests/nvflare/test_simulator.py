"""Rounds in FLARE's simulator: the same models as without it, whichever site drops out; ceremony, z, certificate."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the extra 'nvflare' is not installed")

from quorumark.canonical import canonical
from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest
from quorumark.errors import QuorumarkError
from quorumark.files import write_private, write_shared
from quorumark.simulation import Losses
from quorumark.verify.certificate import Certificate
from quorumark.verify.check import check_certificate
from quorumark.verify.evidence import Partial, Query
from quorumark.verify.examine import examine
from tests.kit.flare_runs import FEDADAM, SEED, STRENGTH, ask, make_key, simulate
from tests.kit.flowers import Consortium, allow, same
from tests.kit.layered import evaded, layered_world

QUERIES = [{"sites": ["site-1", "site-2"]}, {}]


def founded(folder: Path, count: int) -> Consortium:
    """A consortium whose members made their key over FLARE, and answer queries."""
    world = Consortium.agree(folder, count, 3, policy={"sums": "checked"}, strength=STRENGTH)
    made = make_key(world)
    world.keep(Manifest.from_bytes(world.path.read_bytes()))
    assert world.manifest is not None
    assert made["manifest"] == world.manifest.digest().hex()
    for x in range(1, count + 1):
        allow(world, x)
        assert world.home(x)[0].only_consortium().share_path().exists()
    return world


def proved(world: Consortium, summary: dict[str, Any], signers: list[int]) -> None:
    """Two sites prove nothing; all together, with the signatures of those who are there."""
    two, rest = summary["queries"]
    assert "2 members answered, and 3 must" in two["refused"]
    assert rest["verdict"] == "PASSED"
    certificate = Certificate.from_bytes((world.folder / "out" / rest["certificate"]).read_bytes())
    assert float(certificate.finding.z) > 6
    assert world.manifest is not None
    assert [member.point for member in certificate.signers(world.manifest)] == signers


def test_five_sites_make_a_key_train_and_prove_it(tmp_path: Path) -> None:
    """With sites that fail at every stage, one of them for good: the models of one process, bit for bit, checked."""
    world = founded(tmp_path, 5)
    plan = {(2, "train"): [4], (3, "upload"): [2], (4, "unmask"): [1]}
    summary, model = simulate(
        world, 5, [[r, s, points] for (r, s), points in plan.items()], "site-5:5", patience=10.0, queries=QUERIES
    )
    expected = world.in_process(5, SEED, Losses({**plan, (5, "train"): [5]}))
    rounds = summary["rounds"]
    assert [tuple(r["members"]) for r in rounds] == [r.members for r in expected.reports]
    assert same(model, expected.model)
    assert [r["attempts"] for r in rounds] == [1, 1, 2, 1, 1]
    assert [r["marked"] for r in rounds] == [r.marked for r in expected.reports]
    assert [r["expected_z"] for r in rounds] == [r.expected_z for r in expected.reports]
    assert [r["survival_error"] > 0 for r in rounds] == [False] * 4 + [True]  # sites are asked in the fifth round
    assert rounds[3]["excluded_codes"] == {"1": "node.failed"}
    assert rounds[4]["lost"]["train"] == [5]
    assert rounds[4]["metrics"]["moved"] == 1.0  # the scripts' own
    proved(world, summary, [1, 2, 3, 4])


def test_five_sites_that_sum_alone(tmp_path: Path) -> None:
    """`secure(recipe)`: members sign over FLARE, without a key, and the sums are those of one process, bit for bit."""
    world = Consortium.agree(tmp_path, setup="sums", policy={"sums": "checked"})
    make_key(world)
    world.keep(Manifest.from_bytes(world.path.read_bytes()))
    assert not any(world.home(x)[0].only_consortium().share_path().exists() for x in range(1, 6))
    plan = {(2, "train"): [4], (3, "upload"): [2], (4, "unmask"): [1]}
    summary, model = simulate(world, 4, [[r, s, points] for (r, s), points in plan.items()], queries=[{}])
    expected = world.in_process(4, SEED, Losses(plan))
    assert [tuple(r["members"]) for r in summary["rounds"]] == [r.members for r in expected.reports]
    assert [r["attempts"] for r in summary["rounds"]] == [1, 1, 2, 1]
    assert same(model, expected.model)
    assert not any(r["marked"] or r["given_up"] for r in summary["rounds"])
    for row in summary["rounds"]:
        assert row["uploaded_bytes"] <= 8.1 * world.layout.size * sum(row["attempts"] * [len(row["members"]) + 1])
    assert "nothing to verify" in summary["queries"][0]["refused"]


def test_five_sites_step_as_the_terms_say(tmp_path: Path) -> None:
    """A job with FLARE's FedOpt and the settings of the terms; with sites that fail, one of them for two rounds."""
    pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    policy = {"sums": "checked", "optimiser": FEDADAM}
    world = Consortium.make(tmp_path, policy=policy, strength=STRENGTH)
    plan = {(2, "train"): [4], (3, "train"): [4], (4, "unmask"): [1]}
    summary, model = simulate(world, 5, [[r, s, points] for (r, s), points in plan.items()], steps=True)
    expected = world.in_process(5, SEED, Losses(plan))
    assert same(model, expected.model)
    assert expected.history.mark.applied is not None
    assert expected.history.mark.applied.state.steps == 5
    assert [tuple(r["members"]) for r in summary["rounds"]] == [r.members for r in expected.reports]
    assert [r["marked"] for r in summary["rounds"]] == [False, False, True, True, True]


def test_some_of_six_sites_are_drawn(tmp_path: Path) -> None:
    """Four for each round, with checked sums: sites that rest follow links when they come back."""
    world = Consortium.deal(tmp_path, 6, 2, policy={"sums": "checked", "cohort": "4"}, strength=STRENGTH)
    summary, model = simulate(world, 6)
    expected = world.in_process(6, SEED)
    assert same(model, expected.model)
    drawn = [tuple(r["members"]) for r in summary["rounds"]]
    assert drawn == [r.members for r in expected.reports]
    assert len(set(drawn)) > 2
    assert all(len(members) == 4 for members in drawn)
    assert {code for r in summary["rounds"] for code in r["excluded_codes"].values()} == {"round.not-drawn"}
    assert not any(r["excluded_codes"] for r in summary["rounds"][1:])  # by then the server knows who is who


def test_three_sites_answer_by_layers_and_an_examiner_opens(tmp_path: Path) -> None:
    """After a plain query that failed. The answers lie sealed at the server until the examiner's word is there;
    that it came from somebody else, or that there is no time left, is refused."""
    folder = tmp_path / "members"
    folder.mkdir()
    world = layered_world(folder, 3, 2)
    suspect = world.save(evaded(world), "evaded.safetensors")
    for home, _ in world.homes:
        rules = {"format": "quorumark-answer-rules/v1", "approve": "always", "max_queries_per_day": 9, "layers": True}
        write_private(home.rules_path, canonical(rules))
    plain = ask(folder, 3, suspect)
    assert plain["verdict"] == "FAILED"
    after = folder / "plain.json"
    (folder / "out" / plain["certificate"]).rename(after)
    judge, other = Identity.generate("Judge Oak"), Identity.generate("Judge Elm")
    card = tmp_path / "judge.json"
    card.write_bytes(judge.card().to_bytes())

    late = ask(folder, 3, suspect, after=str(after), examiner=str(card), opening_timeout=0.5)
    assert "the examiner's word was not there" in late["refused"]
    sealed = folder / "out" / "layers-1"
    query = Query.from_bytes((sealed / "query.json").read_bytes())
    partials = [Partial.from_bytes(path.read_bytes()) for path in sorted(sealed.glob("partial-*.json"))]
    assert [partial.point for partial in partials] == [1, 2, 3]
    with pytest.raises(QuorumarkError):
        examine(other, world.manifest, query, partials)

    def opened() -> None:
        """As the judge does it by hand, once all answers are there anew."""
        while not (sealed / "query.json").exists() or len(list(sealed.glob("partial-*.json"))) < 3:
            time.sleep(0.1)
        time.sleep(0.5)
        asked = Query.from_bytes((sealed / "query.json").read_bytes())
        answers = [Partial.from_bytes(path.read_bytes()) for path in sorted(sealed.glob("partial-*.json"))]
        write_shared(sealed / "opened.json", examine(judge, world.manifest, asked, answers).opened.to_bytes())

    shutil.rmtree(sealed)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(opened)
        found = ask(folder, 3, suspect, after=str(after), examiner=str(card), opening_timeout=120.0)
        done.result()
    assert found["verdict"] == "PASSED"
    certificate = Certificate.from_bytes((folder / "out" / found["certificate"]).read_bytes())
    assert certificate.finding.layers is not None
    assert [member.point for member in certificate.signers(world.manifest)] == [1, 2, 3]
    check_certificate(certificate, world.reference.chain, suspect=suspect, reference=world.reference)


@pytest.mark.slow
def test_ten_sites_make_a_key_drop_out_and_prove_it(tmp_path: Path) -> None:
    world = founded(tmp_path, 10)
    plan = {(2, "train"): [3], (3, "upload"): [7], (4, "unmask"): [1, 9], (5, "train"): [2, 10]}
    summary, model = simulate(
        world, 6, [[r, s, points] for (r, s), points in plan.items()], "site-8:6", patience=10.0, queries=QUERIES
    )
    expected = world.in_process(6, SEED, Losses({**plan, (6, "train"): [8]}))
    assert [tuple(r["members"]) for r in summary["rounds"]] == [r.members for r in expected.reports]
    assert [r["attempts"] for r in summary["rounds"]] == [1, 1, 2, 1, 1, 1]
    assert same(model, expected.model)
    proved(world, summary, [1, 2, 3, 4, 5, 6, 7, 9, 10])


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["1", "3", "4"])
def test_other_packings_than_the_default(tmp_path: Path, packing: str) -> None:
    """The models of one process, bit for bit, with a site that is lost; the mark is found, and bytes are so many."""
    policy = {"sums": "checked", "packing": packing}
    world = Consortium.make(tmp_path, policy=policy, strength=STRENGTH)
    for x in range(1, 6):
        allow(world, x)
    plan = {(2, "train"): [4], (3, "upload"): [2]}
    summary, model = simulate(world, 5, [[r, s, points] for (r, s), points in plan.items()], queries=[{}])
    expected = world.in_process(5, SEED, Losses(plan))
    rounds = summary["rounds"]
    assert same(model, expected.model)
    assert [tuple(r["members"]) for r in rounds] == [r.members for r in expected.reports]
    assert [r["marked"] for r in rounds] == [r.marked for r in expected.reports]
    assert 8 / int(packing) < rounds[-1]["uploaded_bytes"] / 5 / world.layout.size < 8 / int(packing) + 0.6
    assert summary["queries"][0]["verdict"] == "PASSED"
    certificate = Certificate.from_bytes((world.folder / "out" / summary["queries"][0]["certificate"]).read_bytes())
    assert float(certificate.finding.z) > 6
