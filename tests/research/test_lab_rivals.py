"""Rivals in miniature: each embeds what it should, is detected, calibrated, attacked and forged; their page."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from quorumark.cli import app  # noqa: E402
from quorumark.errors import InputError, RecordError  # noqa: E402
from quorumark.model.layout import ModelLayout  # noqa: E402
from quorumark.research.lab import data, models  # noqa: E402
from quorumark.research.lab.config import Settings  # noqa: E402
from quorumark.research.lab.fleet import Order  # noqa: E402
from quorumark.research.lab.results import read_all  # noqa: E402
from quorumark.research.lab.rivals import chance, picture, table  # noqa: E402
from quorumark.research.lab.rivals.gains import GainSigns, fingerprinted, norm_gains  # noqa: E402
from quorumark.research.lab.rivals.harness import Harness, Tuners, _mixed_in  # noqa: E402
from quorumark.research.lab.rivals.methods import RivalRun, detector_of  # noqa: E402
from quorumark.research.lab.rivals.triggers import Retrained, Triggers, _keeping, patterned  # noqa: E402

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def images() -> data.ImageSet:
    return data.load("shapes")


def _settings(**more: Any) -> Settings:
    return Settings("shapes", **{"model": "cnn", "members": 2, "rounds": 2, "global_batch": 64, **more})


def _run(method: str, images: data.ImageSet, **more: Any) -> RivalRun:
    strength = {"quorumark": "rho:0.05", "paper-code": "paper-code:0.025"}.get(method, "none")
    options = {"server_rate": more.pop("server_rate")} if "server_rate" in more else {}
    return RivalRun(method, _settings(strength=strength, **more), images, "cpu", **options)


# --- probabilities ----------------------------------------------------------------------------------------


def test_bits_are_fair_coins() -> None:
    assert chance.bits(0, 40) == 0
    assert chance.bits(40, 40) == pytest.approx(-40 * math.log10(2))
    assert 10 ** chance.bits(3, 4) == pytest.approx(5 / 16)
    assert 10 ** chance.independent(2, 2, 10) == pytest.approx(0.01)
    with pytest.raises(InputError, match="from 0 to 4"):
        chance.bits(5, 4)


def test_how_many_signs_so_many_numbers_can_meet() -> None:
    """Against a linear programme, and at the edges of Cover's formula."""
    assert chance.agreed(5, 5) == 0
    assert chance.agreed(10, 5) == pytest.approx(math.log10(0.5))  # twice as many signs as numbers: a coin
    optimize, rng, met = pytest.importorskip("scipy.optimize"), np.random.default_rng(0), 0
    for _ in range(300):
        rows = rng.standard_normal((9, 3)) * rng.choice([-1, 1], (9, 1))
        found = optimize.linprog(np.zeros(3), A_ub=-rows, b_ub=-np.ones(9), bounds=(None, None))
        met += found.status == 0
    assert met / 300 == pytest.approx(10 ** chance.agreed(9, 3), abs=0.06)  # 37 of 256: four deviations are 0.08
    assert chance.agreed(320, 512) == 0
    assert chance.agreed(1280, 512) == pytest.approx(-12.46, abs=0.01)
    with pytest.raises(InputError, match="1 or more"):
        chance.agreed(0, 5)


def test_labels_are_counted_over_all_assignments() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        counts = rng.integers(0, 4, (5, 5))
        sums = [sum(counts[i, j] for i, j in enumerate(p)) for p in itertools.permutations(range(5))]
        wanted = np.mean(np.array(sums) >= np.trace(counts))
        assert 10 ** chance.labels(counts) == pytest.approx(wanted)
    assert chance.labels(10 * np.eye(10, dtype=np.int64)) == pytest.approx(-math.log10(math.factorial(10)))
    assert chance.labels(np.ones((4, 4), np.int64)) == 0
    with pytest.raises(InputError, match="square"):
        chance.labels(np.ones((13, 13), np.int64))


def test_images_of_one_pattern_are_no_independent_trials() -> None:
    """An innocent model that classes all images of a pattern alike: the binomial accuses it, assignments do not."""
    rng, wrong, right = np.random.default_rng(1), 0, 0
    for _ in range(400):
        counts = np.zeros((10, 10), np.int64)
        counts[np.arange(10), rng.integers(0, 10, 10)] = 10  # each pattern is some class, with all of its images
        wrong += chance.independent(int(np.trace(counts)), 100, 10) <= -2
        right += chance.labels(counts) <= -2
    assert wrong > 80
    assert right <= 12


def test_signs_are_bounded() -> None:
    assert chance.signs(-3.0) == 0
    assert chance.signs(10) == pytest.approx(-50 / math.log(10))
    assert chance.signs(10) > math.log10(math.erfc(10 / math.sqrt(2)) / 2)  # the bound is above the normal's tail
    assert chance.many(-3.0, 10) == pytest.approx(-2)
    assert chance.many(-0.5, 10) == 0


# --- signs in gains ---------------------------------------------------------------------------------------


def _resnet_signs(method: str, members: int, bits: int) -> tuple[GainSigns, Any]:
    """Of a network with the real one's names and an eighth of its width."""
    module = models.make("resnet18-tiny", 10, 3, 32, 0)
    layout = ModelLayout.of(module)
    names = norm_gains(method, "resnet18-tiny")
    vector = torch.from_numpy(layout.flatten(module))
    return GainSigns.draw(layout, names, members, bits, 0, "cpu", by_layer=method == "fedipr"), vector


def test_a_bit_of_fedipr_is_of_one_layer() -> None:
    signs, vector = _resnet_signs("fedipr", 3, 8)
    assert signs.matrix.shape == (3, 8, 4 * 64)
    assert (vector[signs.places] == 1).all()  # gains at the start
    blocks = (signs.matrix != 0).view(3, 8, 4, 64).any(3)
    assert (blocks.sum(2) == 1).all()
    assert (blocks.sum(1) == 2).all()
    with pytest.raises(InputError, match="for fedipr"):
        norm_gains("fedipr", "mlp")


def test_fedipr_embeds_every_member_s_bits(images: data.ImageSet) -> None:
    """By its code's α, rate and momentum. Bits of others, and of a run without it, are fair coins."""
    run = _run("fedipr", images, rounds=20)
    signs = GainSigns.draw(run.layout, norm_gains("fedipr", "cnn"), 2, 8, 0, "cpu", by_layer=True)
    run.fleet.embed(signs)  # type: ignore[attr-defined]
    before = signs.hits(run.model)
    assert sum(before) < 14
    run.train()
    assert signs.hits(run.model) == [8, 8]
    others = [
        sum(GainSigns.draw(run.layout, signs.names, 2, 8, seed, "cpu", by_layer=True).hits(run.model))
        for seed in range(1, 60)
    ]
    assert 7 < np.mean(others) < 9
    plain = _run("none", images, rounds=4)
    plain.train()
    assert sum(signs.hits(plain.model)) < 14


def test_fedtracker_s_copies_have_their_fingerprints() -> None:
    signs, vector = _resnet_signs("fedtracker", 4, 16)
    gains = vector[signs.places]
    copies = gains
    for _ in range(30):  # rounds: the average of the copies is what the next ones begin with
        copies = fingerprinted(signs, gains)
        gains = copies.mean(0)
    for k, copy in enumerate(copies):
        model = vector.clone()
        model[signs.places] = copy
        assert int(np.argmax(signs.scores(model))) == k
        assert signs.scores(model)[k] >= 0.85
        assert signs.hits(model)[k] >= 15
    assert max(signs.scores(vector)) < 0.85


# --- triggers ---------------------------------------------------------------------------------------------


def test_patterns_are_the_seed_s() -> None:
    one, other = patterned((8, 8, 3), 4, 3, 0), patterned((8, 8, 3), 4, 3, 1)
    assert one.shape == (12, 8, 8, 3)
    assert (one == patterned((8, 8, 3), 4, 3, 0)).all()
    assert not (one == other).all()
    apart = np.abs(one.astype(int).mean((1, 2))[:, None] - one.astype(int).mean((1, 2))[None]).sum(2)
    assert apart[:3, :3].max() < apart[:3, 3:].max()  # images of one pattern are alike


def test_a_server_trains_until_its_triggers_are_right(images: data.ImageSet) -> None:
    run = _run("waffle", images, server_rate=0.05)
    assert run.server is not None
    run.train()
    assert run.server.shares[-1] >= 0.98
    assert len(run.server.epochs) == 3  # before the first round, and after each
    detector = detector_of(run, lambda: pytest.fail("not aligned"), {})
    assert detector is not None
    found = detector.look(run.model)
    assert found["triggers"] >= 0.98
    assert found["log10_p"] == pytest.approx(-math.log10(math.factorial(images.classes)), abs=0.01)
    plain = _run("none", images)
    plain.train()
    assert detector.look(plain.model)["log10_p"] > -1.3
    statistics = run.fleet.order.statistics
    kept, again = run.server.retrained(run.model, 3, 2.0), run.model  # 3 epochs: more than all are never right
    where = torch.cat([torch.arange(p.start, p.stop) for p in statistics])
    assert torch.equal(kept[run.fleet.order.to_device][where], again[run.fleet.order.to_device][where])
    assert not torch.equal(kept, again)


def test_fedtracker_s_steps_do_not_undo_what_members_learnt() -> None:
    g, m = torch.tensor([1.0, -2.0]), torch.tensor([0.0, 1.0])
    assert torch.equal(_keeping(g, m), torch.tensor([1.0, 0.0]))
    assert torch.equal(_keeping(g, -m), g)
    assert torch.equal(_keeping(g, 0 * m), g)


def test_a_server_that_keeps_goes_another_way(images: data.ImageSet) -> None:
    module = models.make("cnn", images.classes, images.image[2], images.image[0], 0)
    layout = ModelLayout.of(module)
    order = Order(module, layout, torch.device("cpu"))
    vector = torch.from_numpy(layout.flatten(module))
    x = torch.from_numpy(patterned(images.image, images.classes, 10, 0)).float() / 64 - 2
    triggers = Triggers(x, torch.arange(images.classes).repeat_interleave(10), images.classes)
    found = []
    for kept in (False, True):
        server = Retrained(module, order, triggers, 0, kept=kept, rate=0.01)
        if kept:
            server._memory += torch.randn(order.size, generator=torch.Generator().manual_seed(0))
        found.append(server.retrained(vector, 3, 2.0))
    assert not torch.equal(*found)
    assert not torch.equal(found[0], vector)


# --- the harness ------------------------------------------------------------------------------------------


def test_tuners_even_out_gains(images: data.ImageSet) -> None:
    run = _run("none", images)
    tuners = Tuners(run.fleet.module, run.layout, 3, images.classes, images.image, run.device, streams=1)
    tuners.against(["bn2.weight"])
    start = run.model.clone()
    place = next(place for spec, place in run.layout.spans() if spec.name == "bn2.weight")
    start[place] += torch.randn(place.stop - place.start, generator=torch.Generator().manual_seed(0))
    from quorumark.research.lab.retrain import Attacker

    tuners.begin([Attacker(start, rate=0.1)] * 3)
    assert tuners.even is not None
    tuners.even[2] = 0.5
    tuners.epoch(torch.zeros(4, 1, 128, *images.image), torch.zeros(4, 1, 128, dtype=torch.int64))
    spreads = [float(tuners.model(k)[place].std()) for k in range(3)]
    assert spreads[0] == spreads[1] > 5 * spreads[2]


def test_patterns_are_mixed_into_the_adaptive_attackers_batches_only() -> None:
    x, y = torch.zeros(2, 1, 16, 4, 4, 3), torch.zeros(2, 1, 16, dtype=torch.int64)
    images, labels = _mixed_in(x, y, torch.ones(4, 4, 4, 3), 1, 10)
    assert images.shape == (2, 4, 16, 4, 4, 3)
    assert float(images[:, :2].sum()) == 0
    for k in (2, 3):
        assert (images[:, k].flatten(2).mean(2) > 0).sum(1).tolist() == [2, 2]  # an eighth
    assert torch.equal(labels[:, 2], labels[:, 3])
    assert (labels[:, :2] == 0).all()


@pytest.mark.parametrize("method", ["quorumark", "fedipr", "waffle", "fedtracker"])
def test_a_method_in_miniature(method: str, images: data.ImageSet, tmp_path: Path) -> None:
    """All of the harness: unmarked models, the run, attacks, calibration, false claims, and a file that can be read."""
    told: list[str] = []
    harness = Harness(_settings(), images, tmp_path / "runs", tmp_path / "results", "cpu", epochs=1, secrets=2,
                      server_rate=0.005, unmarked_rounds=1, tell=told.append)  # fmt: skip
    harness.do(method)
    bodies = table.read_rivals(tmp_path / "results")
    assert {body["method"] for body in bodies.values()} == {"none", method}
    (body,) = (body for body in bodies.values() if body["method"] == method)
    assert body["rounds"] == 2
    assert body["commit"]
    assert body["hardware"].startswith("CPU")
    assert [row["attack"] for row in body["attacks"]] == list(table.ATTACKS)
    assert all(row["log10_p"] <= 0 for row in body["attacks"])
    assert body["calibration"]["models"] == 5
    assert set(body["forged"]) == {"after", "advance"}
    if method == "fedipr":  # gains are near 1 in every network: bits that fit one fit the next
        assert body["forged"]["advance"]["log10_p"] < -6
    if method == "quorumark":  # a key that fits, and is then whitened, is noise
        assert body["forged"]["after"]["z without whitening"] > 30
        assert abs(body["forged"]["after"]["z"]) < 5
        gentle, full = (row["z"] for row in body["attacks"] if row["attack"].startswith("adaptive"))
        assert full < gentle  # the full rate moves it further
    moved = next(row for row in body["attacks"] if row["attack"].startswith("permutation"))
    assert moved["accuracy"] == pytest.approx(body["accuracy"]["released"], abs=0.02)
    again = len(told)
    harness.do("none")  # unmarked models are there already
    assert len(told) == again
    with pytest.raises(InputError, match="one of none"):
        harness.do("other")


def test_a_file_under_a_wrong_name_is_refused(tmp_path: Path) -> None:
    name = "cifar10-resnet18-k32-iid-waffle-s0-rate0.005"
    body = json.loads((ROOT / "results" / "rivals" / f"{name}.json").read_text())
    (tmp_path / f"{name}.json").write_text(json.dumps({**body, "method": "fedipr"}))
    with pytest.raises(RecordError, match="named after"):
        table.read_rivals(tmp_path)
    assert table.section(tmp_path / "none", {}, tmp_path) == ""


def test_files_of_another_machine_are_taken(tmp_path: Path) -> None:
    words = ["lab", "collect", str(ROOT / "results"), "--results", str(tmp_path)]
    for expected in ("taken", "taken"):  # as long is taken again, shorter is not
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert f"rivals/cifar10-resnet18-k32-iid-fedipr-s0: 60 rounds, {expected}" in done.output
    assert table.read_rivals(tmp_path / "rivals") == _results()
    name = "rivals/cifar10-resnet18-k32-iid-fedipr-s0.json"
    body = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps({**body, "rounds": 61}))
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "fedipr-s0: 60 rounds, a longer run is here" in done.output


# --- what was found ---------------------------------------------------------------------------------------


def _results() -> dict[str, dict[str, Any]]:
    return table.read_rivals(ROOT / "results" / "rivals")


def test_the_picture_is_of_these_results(tmp_path: Path) -> None:
    found = picture.dots(_results())
    assert len({dot.method for dot in found}) == 5
    assert len(found) == 5 * (1 + len(table.ATTACKS) - 1)  # adaptive fine-tuning at the full rate was not run
    assert table.FULL_RATE not in {dot.attack for dot in found}
    assert picture.digest(found) in (ROOT / "docs" / "figures" / "lab-rivals.svg").read_text()
    assert picture.digest([replace(found[0], accuracy=0.5), *found[1:]]) != picture.digest(found)
    pytest.importorskip("matplotlib")
    out = tmp_path / "f" / "p.svg"
    words = ["lab", "plot", "rivals", "--out", str(out), "--results"]
    done = CliRunner().invoke(app, [*words, str(ROOT / "results")], catch_exceptions=False)
    assert f"drawn: {out}, {len(found)} points" in done.output
    with pytest.raises(InputError, match="lab rivals"):
        CliRunner().invoke(app, [*words, str(tmp_path)], catch_exceptions=False)


def test_the_page_has_every_figure_of_the_results() -> None:
    """The section is made from the files: another figure there is another page."""
    bodies, results = ROOT / "results" / "rivals", read_all(ROOT / "results")
    page = (ROOT / "docs" / "results.md").read_text()
    section = table.section(bodies, results, ROOT / "docs" / "figures")
    assert section in page
    found = _results()["cifar10-resnet18-k32-iid-fedipr-s0"]
    for row in found["attacks"]:
        assert f"{100 * row['accuracy']:.1f} %" in section
    assert found["detection"]["bits"] == 1
    assert "| FedIPR | -12.0 (all members -48), 30 rounds | -12.0 (all members -385) |" in section
    # WAFFLE and FedTracker at their code's rate, and each number of members by itself
    assert "| K = 32: **no** (98 % of triggers; 86 %) | 62.18 |" in section
    told = "K = 4: yes (98 % of triggers; 99 %); K = 32: yes (98 % of triggers; 98 %); "
    assert told + "K = 128: **no** (98 % of triggers; 96 %)" in section
    told = (
        "K = 4: yes (all bits); K = 32: yes (all bits); K = 128: **no** (all bits; 56.7 %, and no gains could have all)"
    )
    assert told in section
    held = chance.agreed(table.FEDIPR_BITS * 128, table.FEDIPR_GAINS)
    assert f"(the chance is\n10^{held:.1f} for one norm" in section
    assert "WAFFLE -13.3 and FedTracker -15.0 points here are no figures of these methods" in section
    assert "they are at 10 times their codes' rate, after 60 rounds" in section
    assert 2e8 < math.exp(6.2**2 / 2) < 2.5e8  # "about 2·10^8"


def test_settings_are_those_that_the_table_cites() -> None:
    """docs/lab.md, "Rivals": what stands under "here" is what the code has."""
    from quorumark.research.lab.rivals import gains, methods, triggers

    text = (ROOT / "docs" / "lab.md").read_text()
    layout = ModelLayout.of(models.make("resnet18", 10, 3, 32, 0))
    wide = {
        method: [spec.size for spec, _ in layout.spans() if spec.name in gains.norm_gains(method, "resnet18")]
        for method in ("fedipr", "fedtracker")
    }
    assert wide["fedipr"] == [table.FEDIPR_GAINS] * 4
    assert methods.BITS["fedipr"] == 4 * table.FEDIPR_BITS
    for cited in (
        f"| α | {gains.ALPHA} |",
        f"{methods.BITS['fedipr']}, ten for each norm",
        f"| {gains.RATE:g}, {gains.MOMENTUM:g}; new in each round |",
        f"| {triggers.EACH * 10} images of 10 random patterns of ours, in batches of {triggers.BATCH} |",
        f"| {triggers.RATE:g}, and 0.005 |",
        f"| {triggers.ENOUGH:.0%} are right, {triggers.EPOCHS} epochs at most |".replace("%", " %"),
        f"| {triggers.FIRST} epochs, at the server's rate |",
        f"| {methods.BITS['fedtracker']}, drawn at random |",
        f"gains of two norms of the last stage, {sum(wide['fedtracker']):,}",
        f"| {gains.STEP:g}, six at most; ε = {gains.EPSILON:g}, until {gains.ENOUGH:g} |",
    ):
        assert cited in text, cited
    assert (gains.ALPHA, gains.STEPS, len(wide["fedtracker"])) == (0.2, 6, 2)
    for commit in (
        "purp1eHaze/FedIPR) at d1b9312",
        "ssg-research/WAFFLE) at 2f0ae30",
        "shaoshuo-ss/FedTracker) at 21e92a1",
    ):
        assert commit in text


def test_the_short_page_says_what_became_of_rivals() -> None:
    page = " ".join((ROOT / "docs/measured.md").read_text().split())
    rows = {
        (body["method"], table.rate_of(body)): {row["attack"]: row for row in body["attacks"]}
        for body in _results().values()
        if "attacks" in body
    }
    ours = rows["quorumark", None]
    least = min(max(row["z"], row.get("z aligned", 0)) for row in ours.values())
    assert f"Ours is at z = {least:.1f} or more after each attack." in page
    assert {table.FULL_RATE} == set(table.ATTACKS) - set(ours)  # "at a tenth of the rate only"
    tuned = [rows["fedtracker", 0.005][name]["fingerprint"] for name in list(table.ATTACKS)[:2]]
    assert "(log10 p = {:.0f}, and {:.0f} at a tenth of the rate)".format(*tuned).replace("-", "−") in page
    names = list(table.ATTACKS)[:2]
    assert {rows["fedtracker", 0.005][name]["traced"] for name in names} == {0}  # "which name the member who leaked"
    bits = rows["fedipr", None]["fine-tuning 20 %"]
    told = f"({bits['log10_p']:.0f} for the median member, {bits['together']:.0f} for all together)"
    assert told.replace("-", "−") in page
    for method, rate in (("fedipr", None), ("waffle", 0.005), ("fedtracker", 0.005)):
        for attack in ("pruning 50 %", "4 bits"):
            assert table.best_p(rows[method, rate][attack]) < -6  # "leave all of them"
    bodies = {(b["method"], table.rate_of(b)): b for b in _results().values() if b["settings"]["members"] == 32}
    lost = {
        key: 100 * (bodies["none", None]["accuracy"]["released"] - body["accuracy"]["released"])
        for key, body in bodies.items()
    }
    assert lost["fedipr", None] < 0  # "no accuracy that one seed shows"
    told = "WAFFLE's {:.1f} points and FedTracker's {:.1f} are at ten times their codes' rate"
    assert told.format(lost["waffle", 0.005], lost["fedtracker", 0.005]) in page
    assert 10 * table.PAPERS_RATE == 0.005
    gone = -1.3  # log10 0.05
    for method, rate in (("waffle", 0.005), ("fedtracker", 0.005)):
        for attack in ("fine-tuning 20 %", "fine-tuning 20 %, a tenth of the rate"):
            assert rows[method, rate][attack]["log10_p"] > gone  # "fine-tuning erases triggers"
    moved = "permutation and rescaling"
    assert rows["fedipr", None][moved]["together"] > gone
    assert rows["fedtracker", 0.005][moved]["fingerprint"] > gone
    for body in _results().values():
        if "forged" in body:  # "can be claimed"
            best = min(table.best_p(claim) for claim in body["forged"].values())
            assert best > gone if body["method"] == "quorumark" else best < -6
    assert "figures/lab-rivals.svg" in page
    assert "docs/figures/lab-rivals.svg" in (ROOT / "README.md").read_text()


def test_lab_md_says_how_long_it_takes() -> None:
    text = " ".join((ROOT / "docs" / "lab.md").read_text().split())
    bodies = [body for body in _results().values() if "attacks" in body]
    assert {(body["rounds"], body["settings"]["members"]) for body in bodies} == {(60, 32)}
    training, rest = ([body[name] for body in bodies] for name in ("seconds", "seconds_in_all"))
    assert f"take {min(training):.0f} to {max(training):.0f} s, and the rest of a method {min(rest):.0f} to" in text
    assert f"{max(rest):.0f} s." in text
