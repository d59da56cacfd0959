"""The lab's copy of the paper's public code, and its safety nets: against oracles in numpy, in miniature on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quorumark.cli import app
from quorumark.errors import InputError
from quorumark.model.layout import ModelLayout
from quorumark.research.known import SeededKey
from quorumark.research.lab import data
from quorumark.research.lab.config import LanguageSettings, Settings, read
from quorumark.research.lab.page import page
from quorumark.research.lab.results import read_all, record
from quorumark.research.lab.tables import compared_means

torch = pytest.importorskip("torch")
from quorumark.research.lab import models  # noqa: E402
from quorumark.research.lab.dither import Continuity, Dither, raised  # noqa: E402
from quorumark.research.lab.image_run import ImageRun  # noqa: E402
from quorumark.research.lab.mark import Mark, weighted_sum  # noqa: E402
from quorumark.research.lab.papercode import CodeKey, CodeMark, Trainable, code_scores, mean_cosines  # noqa: E402
from quorumark.research.lab.scores import shown  # noqa: E402

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]

MINI = Settings("shapes", members=4, rounds=4, model="cnn", global_batch=128, augment=("flip",))


class Small:
    """A small network with norms, as the lab sees it and as named arrays."""

    def __init__(self) -> None:
        self.module = models.make("resnet18-tiny", 10, 3, 16, 0)
        self.layout = ModelLayout.of(self.module)
        self.names = {name for name, _ in self.module.named_parameters()}
        self.start = torch.from_numpy(self.layout.flatten(self.module))
        self.trainable = Trainable(self.layout, self.names, "cpu")

    def tensors(self, vector: Any) -> dict[str, Any]:
        """The trainable tensors of a vector, by name; what is averaged but not trained is left out."""
        flat = np.asarray(vector, np.float64)
        return {spec.name: flat[place] for spec, place in self.layout.spans() if spec.name in self.names}

    def keys(self, count: int) -> list[CodeKey]:
        found = [SeededKey(self.layout.coordinates, 0, n) for n in range(count)]
        return [CodeKey.of(self.trainable, key, 0, n) for n, key in enumerate(found)]

    def signs(self, key: CodeKey) -> dict[str, Any]:
        """A key by tensor, of unit norm, as the paper's code has it."""
        parts = np.split(np.asarray(key.signs("cpu"), np.float64), np.cumsum(self.trainable.sizes.numpy())[:-1])
        order = [spec.name for spec, _ in self.layout.spans() if spec.name in self.names]
        return {name: part / np.sqrt(part.size) for name, part in zip(order, parts, strict=True)}


# --- the paper's code -------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_client", [False, True])
def test_the_rule_of_the_paper_s_code(per_client: bool) -> None:
    """Four rounds of three members, tensor by tensor as the code's client and server do it, in float64."""
    small, rng, c, members = Small(), np.random.default_rng(0), 0.3, 3
    assert small.trainable.others > 0
    assert small.layout.size > small.trainable.size  # running statistics are averaged, and get no mark
    keys = small.keys(members if per_client else 1)
    marks = [small.signs(key) for key in keys] * (1 if per_client else members)
    mark = CodeMark(c, small.layout, small.trainable, small.start, keys, "cpu")
    shares, model = [Fraction(1, members)] * members, small.start
    averages = [0.0] * members
    total: dict[str, Any] = dict.fromkeys(small.names, 0.0)
    for number in range(1, 5):
        rows = model + 0.02 * torch.from_numpy(rng.standard_normal((members, model.numel()), np.float32))
        expected = {name: np.zeros_like(part) for name, part in small.tensors(model).items()}
        for k in range(members):
            before, after = small.tensors(model), small.tensors(rows[k])
            norms = {name: np.linalg.norm(after[name] - before[name]) for name in before}
            averages[k] = 0.9 * averages[k] + 0.1 * float(np.mean(list(norms.values())))
            for name in before:
                scale = c * averages[k] * norms[name]
                expected[name] += (after[name] + scale * marks[k][name]) / members
                total[name] += scale / members
        plain = np.mean(rows.double().numpy(), axis=0)
        model, told = mark.apply(number, model, weighted_sum(rows, shares), shares, rows.__getitem__)
        assert told == c
        found = small.tensors(model)
        for name, part in expected.items():
            assert np.allclose(found[name], part, rtol=0, atol=3e-7 * max(1.0, np.abs(part).max()))
            added = np.linalg.norm(part - small.tensors(plain)[name])
            assert added > 1e-4 * np.sqrt(part.size)  # the tolerance is far below what is looked for
        untrained = [place for spec, place in small.layout.spans() if spec.name not in small.names]
        assert all(np.allclose(model[p], plain[p], atol=1e-6) for p in untrained)
    carriers = [(spec.name, place) for spec, place in small.layout.spans("carrier")]
    size = np.sqrt(sum(total[name] ** 2 for name, _ in carriers))
    end = small.layout.carrier_size
    assert mark.rho == pytest.approx(size / np.linalg.norm((model - small.start)[:end].double().numpy()), rel=1e-5)


def test_the_statistic_of_the_paper_s_code() -> None:
    small, rng = Small(), np.random.default_rng(1)
    right, wrong = small.keys(2)
    vector = small.start + 0.01 * torch.from_numpy(rng.standard_normal(small.layout.size, np.float32))
    vector[small.trainable.index] += 0.02 * right.signs("cpu")
    theta = small.tensors(vector)
    for key in (right, wrong):
        cosines = [part @ small.signs(key)[name] / np.linalg.norm(part) for name, part in theta.items()]
        found = code_scores(small.trainable, vector, [key], "cpu", count=400)
        assert found["paper-code"] == pytest.approx(np.mean(cosines) / 0.01, abs=1e-3)
        calibrated = np.mean(cosines) / found["paper-code sigma"]
        assert found["paper-code calibrated"] == pytest.approx(calibrated, abs=0.05)
    # σ over random keys is √(Σ 1/n_T)/|T|, whatever the model; 400 keys tell it to 3.5 %
    exact = np.sqrt(sum(1 / part.size for part in theta.values())) / len(theta)
    assert found["paper-code sigma"] == pytest.approx(exact, rel=0.14)
    assert abs(found["paper-code calibrated"]) < 5
    assert code_scores(small.trainable, vector, [right], "cpu", count=400)["paper-code calibrated"] > 5
    both = code_scores(small.trainable, vector, [right, wrong], "cpu", count=50)
    assert both["paper-code least"] < both["paper-code"] < both["paper-code largest"]
    assert both["paper-code"] == pytest.approx((both["paper-code least"] + both["paper-code largest"]) / 2, abs=2e-3)
    assert mean_cosines(small.trainable, torch.zeros_like(vector), [right], "cpu") == [0.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 3])
def test_the_paper_s_code_on_a_gpu_is_as_on_the_cpu(count: int) -> None:
    small, ends = Small(), []
    keys, shares = small.keys(count), [Fraction(1, 3)] * 3
    for device in ("cpu", "cuda"):
        trainable, model = Trainable(small.layout, small.names, device), small.start.to(device)
        mark = CodeMark(0.3, small.layout, trainable, model, keys, device)
        generator = torch.Generator().manual_seed(0)
        for number in range(1, 4):
            rows = model + 0.02 * torch.randn(3, model.numel(), generator=generator).to(device)
            model, _ = mark.apply(number, model, weighted_sum(rows, shares), shares, rows.__getitem__)
        ends.append((model.cpu().numpy(), mark.rho, code_scores(trainable, model, keys, device, count=20)))
    assert np.allclose(ends[0][0], ends[1][0], rtol=0, atol=1e-6)
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-4)
    assert ends[0][2] == pytest.approx(ends[1][2], rel=1e-2, abs=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_safety_nets_on_a_gpu() -> None:
    scale, total = torch.full((40_000,), 1 << 22, device="cuda"), torch.zeros(40_000, dtype=torch.int64, device="cuda")
    Dither(3.0, 0).add(total, slice(0, 40_000), scale, 1, 4)
    assert float(total.double().std()) / 2**22 == pytest.approx(3.0, rel=0.03)
    run = ImageRun(
        replace(MINI, strength="rho:0.1", dither=3.0, continuity=True, rounds=6), data.load("shapes"), "cuda"
    )
    run.train()
    assert run.continuity is not None
    assert run.continuity.summary()["rows"] < 0.5
    run.close()


def test_what_sigma_is_for_the_paper_s_network() -> None:
    """0.01, by which the code divides, is σ for 10 classes; for 100 it is 0.0089."""
    for classes, sigma in ((10, 0.0101), (100, 0.0089)):
        module = models.make("resnet18", classes, 3, 32, 0)
        sizes = [p.numel() for p in module.parameters()]
        assert len(sizes) == 62
        assert np.sqrt(sum(1 / n for n in sizes)) / 62 == pytest.approx(sigma, abs=5e-5)


def test_where_the_paper_s_code_cannot_go() -> None:
    for strength in ("paper-code", "paper-code:x", "paper-code:-1", "per-client-paper-code:"):
        with pytest.raises(InputError, match="strength"):
            replace(MINI, strength=strength)
    with pytest.raises(InputError, match="for text"):
        LanguageSettings(strength="paper-code:0.1")
    pytest.importorskip("cryptography")
    from quorumark.research.lab.masked import compare

    for wrong in (replace(MINI, strength="paper-code:0.1"), replace(MINI, strength="rho:0.1", dither=3.0)):
        with pytest.raises(InputError, match="--masked"):
            compare(wrong, data.load("shapes"), 1)


def test_a_strong_mark_by_the_paper_s_code_is_seen_by_every_statistic() -> None:
    run = ImageRun(replace(MINI, strength="paper-code:40", rounds=6), data.load("shapes"))
    run.train()
    run.best.model = run.model
    body = record(run)
    z = body["z"]["released"]
    assert z["balanced-anchor/v1"] > 20
    assert z["global-cosine/v1"] > 5
    before = code_scores(run.trainable, run.initial, run.code_keys, "cpu", count=50)["paper-code"]
    assert z["paper-code"] > before + 10  # in units of 0.01; σ of so small a network is 0.066
    assert body["rho"] > 0.3
    assert body["shown"]["cosine"] == pytest.approx(body["rho"], rel=0.2)
    assert "paper-code" not in body["z"]["final"]
    run.close()


def test_dead_rows_show_their_signs() -> None:
    """A row that only the mark moves is bare; without the mark nothing is."""
    small = Small()
    key, end = SeededKey(small.layout.coordinates, 0), small.layout.carrier_size
    model = small.start + 0.01 * torch.randn(small.start.numel(), generator=torch.Generator().manual_seed(0))
    spec, place = list(small.layout.spans("carrier"))[3]
    width = spec.size // spec.shape[0]
    dead = slice(place.start, place.start + 2 * width)
    model[dead] = small.start[dead]
    marked = model.clone()
    marked[:end] += 0.001 * key.signs("cpu")
    found = shown(small.layout, marked, small.start, key)
    assert found["bare"] == pytest.approx(2 * width / end, abs=1e-5)
    assert found["cosine"] == pytest.approx(0.1, abs=0.02)
    assert 0.5 < found["signs"] < 0.6
    assert shown(small.layout, model, small.start, key)["bare"] == 0.0


def test_a_configuration_has_the_recipe_of_the_paper_s_code() -> None:
    """Each run as table 1's but for what the code has otherwise, and known from it by its name."""
    runs, usual = read("code").runs, {run.id: run for run in read("table1").runs}
    assert len(runs) == 14
    assert not {run.id for run in runs} & ({*usual} | {run.id for run in read("kept").runs})
    for run in runs:
        assert run.unmarked in runs
        assert (run.augment, run.kept, run.decay) == (("autoaugment",), True, 0.01)
        assert run.id.endswith("-autoaugment-kept-decay0.01")
        assert (run.evaluate_every, run.global_batch, run.lr, run.beta1, run.beta2) == (1, 2048, 1e-3, 0.9, 0.999)
        assert (run.members, run.rounds) == (32, 300) or (run.members, run.rounds, run.seed) == (64, 350, 0)
        if run.members == 32:
            plain = replace(run, augment=("crop", "flip", "autoaugment"), kept=False, decay=1e-4)
            assert plain == replace(usual[plain.id], null_keys=0)
            assert read("code").figure("accuracy", run) == read("table1").figure("accuracy", plain) != ""
        else:
            assert read("code").figure("accuracy", run) == ""  # the paper's table is of 32 members


def test_augmentation_is_part_of_a_run_s_name() -> None:
    usual = Settings("cifar100", augment=("crop", "flip", "autoaugment"))
    assert usual.id == "cifar100-resnet18-k32-iid-none-s0"  # the names of runs that there are
    assert replace(usual, augment=("autoaugment",)).id == f"{usual.id}-autoaugment"
    assert replace(usual, augment=("flip", "crop", "autoaugment")).id == f"{usual.id}-flip+crop+autoaugment"
    assert replace(usual, augment=()).id == f"{usual.id}-plain"
    assert (MINI.id, replace(MINI, augment=()).id) == ("shapes-cnn-k4-iid-none-s0-flip", "shapes-cnn-k4-iid-none-s0")


def test_a_short_run_of_the_code_s_recipe() -> None:
    """The configuration's own runs with small images: its augmentation, optimiser and page."""
    small: dict[str, Any] = {"dataset": "shapes", "model": "cnn", "members": 4, "rounds": 3, "global_batch": 128}
    first, bodies = read("code").runs[0], []
    for strength in ("none", "paper-code:0.025"):
        run = ImageRun(replace(first, strength=strength, **small), data.load("shapes"))
        x, again = run.batches(1)[0], run.batches(1)[0]
        assert torch.equal(x, again)
        without = ImageRun(replace(run.settings, augment=()), data.load("shapes"), fleet=run.fleet)
        assert not torch.equal(without.batches(1)[0], x)
        mirrored = replace(run.settings, augment=("crop", "flip", "autoaugment"))
        assert not torch.equal(ImageRun(mirrored, data.load("shapes"), fleet=run.fleet).batches(1)[0], x)
        assert run.train()
        bodies.append(record(run))
        run.close()
    plain, marked = bodies
    assert (plain["rho"], marked["rounds"]) == (None, 3)
    assert marked["rho"] > 0
    assert marked["settings"]["augment"] == ["autoaugment"]
    here = [{**body, "id": replace(first, strength=body["settings"]["strength"]).id} for body in bodies]
    for body in here:  # as if they were the configuration's
        body["settings"] = {**replace(first, strength=body["settings"]["strength"]).asdict()}
        body["settings"]["augment"] = list(first.augment)
    text = _page("code", *here)
    assert "The paper reproduced, cifar100, paper-code:0.025, 3 of 300 rounds: z by its own statistic" in text
    assert text.count("The paper reproduced") == 1  # of 32 members, and not of 64
    assert "| cifar100 | 32 | iid | paper-code:0.025 | 61.31 ± 0.78 |" in text


# --- dither and continuity --------------------------------------------------------------------------------


def test_dither_s_noise_in_the_sum_is_kappa_times_the_mark() -> None:
    size, members, kappa = 40_000, 5, 3.0
    scale = torch.full((size,), 1 << 24)
    scale[: size // 2] = 1 << 20
    scale[:100] = 0

    def noise(kappa: float, round_no: int, seed: int = 0) -> Any:
        total = torch.zeros(size + 7, dtype=torch.int64)
        Dither(kappa, seed).add(total, slice(0, size), scale, round_no, members)
        assert not total[size:].any()
        return total[:size].double().numpy() / np.maximum(scale.numpy(), 1)

    found = noise(kappa, 1)
    assert not found[:100].any()  # no mark, no noise
    for part in (found[100 : size // 2], found[size // 2 :]):
        assert np.std(part) == pytest.approx(kappa, rel=0.03)  # of 20,000: 0.5 %; κ/√K or κ·√K would be far away
        assert abs(np.mean(part)) < 5 * kappa / len(part) ** 0.5
    assert np.array_equal(found, noise(kappa, 1))  # a run in pieces is the same run
    for other in (noise(kappa, 2), noise(kappa, 1, seed=1)):
        assert abs(np.corrcoef(found[100:], other[100:])[0, 1]) < 0.03
    # members' streams differ: one stream for all five would add up to κ·√5
    assert np.std(noise(1.0, 1)[100:]) == pytest.approx(1.0, rel=0.03)


def test_dither_does_not_count_as_motion_that_members_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """With much noise ‖D‖ is above N, which would silence every row; its energy is taken off again."""
    exact = [(7, 0.0), (1 << 40, float(1 << 78)), (3, 1e6)]
    norms, energies = np.array([n for n, _ in exact], np.uint64), np.array([e for _, e in exact])
    for (n, energy), higher in zip(exact, raised(norms, energies).tolist(), strict=True):
        assert higher == pytest.approx((n * n + 64 / 63 * energy) ** 0.5, rel=1e-6, abs=1)

    def strengths() -> list[float]:
        run = ImageRun(replace(MINI, strength="rho:0.1", dither=100.0, rounds=6), data.load("shapes"))
        norms = []
        for _ in range(6):
            run.round()
            assert isinstance(run.mark, Mark)
            norms.append(0.0 if run.mark.added is None else float((run.mark.added > 0).double().mean()))
        run.close()
        return norms

    kept = strengths()
    monkeypatch.setattr("quorumark.research.lab.mark.raised", lambda norms, _: norms)
    lost = strengths()
    assert max(kept) > 0.5
    assert kept[-1] > 2 * lost[-1]


def test_a_run_with_dither_goes_on_as_it_was(tmp_path: Path) -> None:
    settings, images = replace(MINI, strength="rho:0.1", dither=3.0, continuity=True), data.load("shapes")
    whole, first, second = (ImageRun(settings, images) for _ in range(3))
    whole.train()
    first.round()
    first.round()
    first.round()
    first.save(tmp_path / "c.pt")
    second.restore(tmp_path / "c.pt")
    second.train()
    assert torch.equal(second.model, whole.model)
    assert second.continuity is not None
    assert whole.continuity is not None
    assert second.continuity.summary() == whole.continuity.summary()
    plain = ImageRun(replace(settings, dither=0.0), images)
    plain.train()
    assert not torch.equal(plain.model, whole.model)
    without = ImageRun(replace(settings, dither=0.0, continuity=False), images)
    without.train()
    assert torch.equal(plain.model, without.model)  # who only counts changes nothing
    for run in (whole, first, second, plain, without):
        run.close()
    for wrong in ({"strength": "none"}, {"strength": "paper-code:0.1"}, {"dither": -1.0}):
        with pytest.raises(InputError, match="dither"):
            replace(settings, **wrong)
    assert settings.unmarked.id == replace(MINI).id


def test_rows_that_jump_are_counted() -> None:
    layout = ModelLayout.of({"a": np.zeros((4, 6), np.float32), "b": np.zeros((3, 2, 5), np.float32)})
    rng = np.random.default_rng(0)
    continuity, model = Continuity(layout, "cpu"), torch.zeros(layout.size)
    widths, ema, silenced = np.array([6] * 4 + [10] * 3), None, []
    for number in range(1, 9):
        step = 0.01 * rng.standard_normal(layout.size).astype(np.float32)
        if number == 5:
            step[6:12] *= 8  # the second row of a
        if number == 7:
            step[24:34] *= 30  # the first row of b
        after = model + torch.from_numpy(step)
        d = (after - model).double().numpy()
        rows = [*np.split(d[:24], 4), *np.split(d[24:], 3)]
        move = np.array([np.sqrt(np.mean(row**2)) for row in rows])
        expected = np.zeros(7, bool) if ema is None else move > 4 * ema
        ema = move if ema is None else 0.9 * ema + 0.1 * move
        assert np.array_equal(continuity.see(model, after).numpy(), expected)
        silenced.append((expected.mean(), (expected * widths).sum() / widths.sum()))
        model = after
    found = continuity.summary()
    assert [entry[0] for entry in found["rounds"]] == [5, 7]
    assert found["rounds"][0][1:] == [pytest.approx(1 / 7, abs=1e-5), pytest.approx(6 / 54, abs=1e-5)]
    assert found["coordinates largest"] == pytest.approx(10 / 54, abs=1e-5)
    assert found["rows"] == pytest.approx(np.mean([row for row, _ in silenced]), abs=1e-6)
    assert found["coordinates"] == pytest.approx(np.mean([part for _, part in silenced]), abs=1e-6)


# --- the command and the page -----------------------------------------------------------------------------


def test_options_add_safety_nets_to_any_configuration(tmp_path: Path) -> None:
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "mlp"\nmembers = 2\nrounds = 2\nglobal_batch = 480\n'
        '[[grid]]\nstrength = "rho:0.1"\n'
    )
    words = ["lab", "run", str(config), "--results", str(tmp_path / "r"), "--runs", str(tmp_path / "c"), "--device=cpu"]
    done = CliRunner().invoke(app, [*words, "--dither", "3", "--continuity"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    body = json.loads((tmp_path / "r" / "shapes-mlp-k2-iid-rho0.1-s0-dither3-continuity.json").read_text())
    assert (body["settings"]["dither"], body["settings"]["continuity"]) == (3.0, True)
    assert set(body["continuity"]) >= {"rows", "coordinates"}
    read_all(tmp_path / "r")


def _made_up(name: str, strength: str, accuracy: float, members: int = 32, **more: Any) -> dict[str, Any]:
    run = next(r for r in read(name).runs if r.strength == strength and r.members == members and r.seed == 0)
    if name == "table1":
        run = replace(run, dataset="cifar100")
    z = {"balanced-anchor/v1": 1390.0, "global-cosine/v1": 50.0, "mean-tensor-cosine/v1": 9.0, **more.pop("z", {})}
    figures = {"released": accuracy, "released_round": 1}
    settings = {**run.asdict(), "augment": list(run.augment)}
    where = {"commit": "0" * 40, "hardware": "CPU", "torch": "2", "seconds": 1.0, "seconds_per_round": 0.5}
    body = {"id": run.id, "settings": settings, "rounds": run.rounds, "accuracy": figures, "z": {"released": z}}
    return {**body, "rho": 0.3, "null": None, "data": {"note": ""}, **where, **more}


def _page(name: str, *bodies: dict[str, Any]) -> str:
    return page([read(name)], {body["id"]: body for body in bodies})


def test_the_page_holds_the_paper_s_claims_against_its_own_rule() -> None:
    plain = _made_up("table1", "none", 0.614)
    code = {"paper-code": 14.7, "paper-code calibrated": 16.3, "paper-code sigma": 0.009}
    key = {"cosine": 0.31, "signs": 0.66, "bare": 0.012}
    text = _page("table1", plain, _made_up("table1", "paper-code:0.025", 0.6130, z=code, shown=key))
    assert (
        "within 12.6 ± 5.6: true (14.7); accuracy less than 1.0 points lower than without the mark: true (-0.10)"
        in text
    )
    assert "| 14.7 (16.3) |" in text
    assert "z of the same models by the balanced statistic: 1390." in text
    assert "| cifar100 | paper-code:0.025 | 300 | 0.300 | 0.310 | 66.0 % | 1.20 % |" in text
    far = _made_up("table1", "paper-code:0.025", 0.6, z={**code, "paper-code": 20.0})
    assert "± 5.6: false (20.0); accuracy less than 1.0 points lower than without the mark: false (-1.40)" in _page(
        "table1", plain, far
    )
    assert "without the mark: not known" in _page("table1", far)
    assert "The paper reproduced" not in _page("table1", plain)


def test_the_page_says_whether_the_baseline_fades() -> None:
    own, counts = "per-client-paper-code:0.1", (4, 8, 16, 32, 64, 128)
    bodies = [
        _made_up("clients", own, 0.8, k, z={"paper-code": 40.0 / k, "paper-code calibrated": 1.0}) for k in counts
    ]
    text = _page("clients", *bodies)
    assert f"by its own rule ({own}) and statistic, after 300 of 300 rounds: below 4 from 16 members on: true;" in text
    seen = "from there: {}. 10.0 (K = 4), 5.0 (K = 8),".format
    assert seen("seen, the last z of 4 or more is that of 8 members") in text
    assert "z of the same models by the balanced statistic: 1390.0 (K = 4), 1390.0 (K = 8)," in text
    some = _page("clients", bodies[0])
    assert "after 300 of 300 rounds: not all numbers of members were run. 10.0 (K = 4)." in some
    for body in bodies:
        body["rounds"] = 30
    assert "after 30 of 300 rounds: below 4 from 16 members on: true;" in _page("clients", *bodies)
    for at, z, said in (
        (-1, 4.5, "false; its shape, 4 or more with fewer than 16 and below 4 from there: **not seen**, z is 4.5 with"),
        (1, 3.9, "true; its shape, 4 or more with fewer than 16 and below 4 from there: **not seen**, the last z of 4 "
                 "or more is that of 4 members"),
    ):  # fmt: skip
        was = bodies[at]["z"]["released"]["paper-code"]
        bodies[at]["z"]["released"]["paper-code"] = z
        assert f"below 4 from 16 members on: {said}" in _page("clients", *bodies)
        bodies[at]["z"]["released"]["paper-code"] = was


def test_a_baseline_that_is_never_above_4_has_not_the_paper_s_shape() -> None:
    """What was measured: z falls, and is below 4 with 4 members already."""
    measured = (2.9, 1.8, 1.0, 0.3, 0.0, 0.0)
    bodies = [
        _made_up("clients", "per-client-paper-code:0.1", 0.8, k, z={"paper-code": z, "paper-code calibrated": z})
        for k, z in zip((4, 8, 16, 32, 64, 128), measured, strict=True)
    ]
    said = "**not seen**, z is below 4 with every number of members, so it crosses 4 nowhere. 2.9 (K = 4), 1.8 (K = 8),"
    assert said in _page("clients", *bodies)
    real = page([read("clients")], read_all(Path(__file__).parents[2] / "results"))
    assert said in real
    assert "after 30 of 300 rounds: below 4 from 16 members on: true; its shape" in real


def test_the_page_has_a_table_of_safety_nets() -> None:
    shares = {"rows": 0.001, "rows largest": 0.1, "coordinates": 0.00025, "coordinates largest": 0.05, "rounds": []}
    text = _page("dither", _made_up("dither", "rho:0.05", 0.5, continuity=shares))
    assert (
        "| cifar100 | 32 | rho:0.05 | 0 | 100 | 50.00 | 1390.0 | 0.3000 | 0.50 | 0.100 % | 0.025 % | 5.000 % |" in text
    )
    assert "Not run: cifar100 rho:0.05 κ = 3; cifar100 rho:0.05 κ = 10." in text


def test_the_page_holds_packings_against_packing_1() -> None:
    """Welch's interval of the difference, from both sides' seeds; what is beyond it is named."""
    bodies = []
    for run in read("packing").runs:
        accuracy, z = 0.35 + 0.002 * run.seed, 185.0 + run.seed - (9 if run.packing == 4 else 0)
        body = _made_up("packing", "rho:0.05", accuracy - (0.02 if run.packing == 3 else 0))
        more = {"id": run.id, "settings": {**run.asdict(), "augment": list(run.augment)}, "widened": [[1, 5]]}
        bodies.append({**body, **more, "z": {"released": {**body["z"]["released"], "balanced-anchor/v1": z}}})
    text = _page("packing", *bodies)
    start = "| cifar100 | 32 | rho:0.05 |"
    assert f"{start} 1 | 40 | 3 | 35.20 ± 0.20 |  | 186.0 ± 1.0 |  |  | 0.3000 |  | 0.50 |" in text
    assert f"{start} 2 | 40 | 3 | 35.20 ± 0.20 | +0.00 ± 0.45 | 186.0 ± 1.0 | +0.0 ± 2.3 | no | 0.3000 | 1.0 |" in text
    assert "33.20 ± 0.20 | -2.00 ± 0.45 | 186.0 ± 1.0 | +0.0 ± 2.3 | accuracy |" in text
    assert "35.20 ± 0.20 | +0.00 ± 0.45 | 177.0 ± 1.0 | -9.0 ± 2.3 | z |" in text
    one_seed = _page("packing", *[body for body in bodies if body["settings"]["seed"] == 0])
    assert "| +0.00 | 185.0 | +0.0 | one seed says nothing |" in one_seed
    assert "Not run: cifar100 rho:0.05 packing 1; cifar100 rho:0.05 packing 2;" in _page("packing")


def test_results_of_another_machine_are_taken_unless_they_are_shorter(tmp_path: Path) -> None:
    from quorumark.research.lab.results import FORMAT, write

    here, there = tmp_path / "here", tmp_path / "there"
    for folder, strength, rounds in (
        (here, "none", 5),
        (there, "none", 3),
        (here, "rho:0.1", 2),
        (there, "rho:0.1", 4),
    ):
        run = replace(MINI, strength=strength)
        write({"format": FORMAT, "id": run.id, "settings": run.asdict(), "rounds": rounds}, folder)
    done = CliRunner().invoke(app, ["lab", "collect", str(there), "--results", str(here)], catch_exceptions=False)
    assert "none-s0-flip: 3 rounds, a longer run is here" in done.output
    assert "rho0.1-s0-flip: 4 rounds, taken" in done.output
    assert [body["rounds"] for body in read_all(here).values()] == [5, 4]
    with pytest.raises(InputError, match="with result files"):
        CliRunner().invoke(app, ["lab", "collect", str(tmp_path / "x"), "--results", str(here)], catch_exceptions=False)


# --- numbers in prose -------------------------------------------------------------------------------------


def _prose(page: str) -> str:
    text = (Path(__file__).parents[2] / page).read_text()
    return " ".join(text.replace("\n>", "\n").split())


def test_strength_md_says_what_the_runs_found() -> None:
    results = read_all(Path(__file__).parents[2] / "results")
    marked, plain = (results[f"cifar10-resnet18-k32-iid-{strength}-s0"] for strength in ("paper0.025", "none"))
    lost = 100 * (plain["accuracy"]["released"] - marked["accuracy"]["released"])
    assert marked["rounds"] == plain["rounds"] == 300
    text = f"(ρ = {marked['rho']:.3f}) and loses {lost:.1f} points of accuracy on CIFAR-10"
    assert text in _prose("docs/strength.md")


def test_strength_md_says_what_the_code_s_rule_does() -> None:
    """The table, and Δ against the mean of all unmarked seeds."""
    results = read_all(Path(__file__).parents[2] / "results")
    prose, name = _prose("docs/strength.md"), "{}-resnet18-k32-iid-{}-s{}".format
    cases = [("cifar10", "0.025"), ("cifar10", "0.1"), ("cifar100", "0.025"), ("cifar100", "0.1")]
    changes = []
    for images, c in cases:
        body, plain = results[name(images, f"paper-code{c}", 0)], _accuracies(results, images, "none")
        (accuracy,), z, key = _accuracies(results, images, f"paper-code{c}"), body["z"]["released"], body["shown"]
        assert (body["rounds"], len(plain)) == (300, 3)
        assert min(plain) == plain[0]  # seed 0 "is the lowest of three"
        change = f"{accuracy - plain[0]:+.2f}".replace("-", "−")
        title = images.upper().replace("CIFAR", "CIFAR-")
        row = f"| {title} | {c} | {accuracy:.2f} | {change} | {z['paper-code']:.1f} "
        row += f"| {z['balanced-anchor/v1']:.0f} | {body['rho']:.3f} | {key['cosine']:.3f} "
        row += f"| {100 * key['signs']:.1f} % |"
        assert row in prose
        changes.append(f"{accuracy - np.mean(plain):+.2f}")
    assert "against the mean of all three Δ is {}, {}, {} and {}.".format(*changes).replace("-", "−") in prose

    body = results[name("cifar100", "paper-code0.025", "0-kept-decay0.01")]
    z = body["z"]["released"]
    assert body["rounds"] == 300
    assert (
        f"have z = {z['paper-code']:.1f} by the code's statistic, at {100 * body['accuracy']['released']:.2f} %"
        in prose
    )
    assert f"and {z['balanced-anchor/v1']:.0f} by ours (ρ = {body['rho']:.3f};" in prose

    lab = _prose("docs/lab.md")
    accuracy = 100 * body["accuracy"]["released"]
    assert f"Its z is the paper's ({z['paper-code']:.1f}), its accuracy is eleven points above the paper's" in lab
    assert f"({accuracy:.2f} % against 61.31 %)" in lab
    assert round(accuracy - 61.31) == 11
    assert round(100 * results[name("cifar100", "paper-code0.025", 0)]["accuracy"]["released"] - 61.31) == 6
    table1 = [results[run.id] for run in read("table1").runs if run.id in results and "cifar" in run.dataset]
    assert {body["settings"]["evaluate_every"] for body in table1} == {5}  # "every fifth round"
    assert {body["data"]["note"] for body in table1} == {"stored as JPEG of quality 95"}
    done = [run.id for run in read("code").runs if run.id in results]
    for page_ in (lab, prose):  # the first result makes these sentences wrong
        assert ("has not been run" in page_) == (not done)

    ours = [
        results[name(images, "rho0.1", seed)]["z"]["released"]
        for images in ("cifar10", "cifar100")
        for seed in range(3)
    ]
    balanced = [np.mean([z["balanced-anchor/v1"] for z in ours[at : at + 3]]) for at in (0, 3)]
    assert "z balanced is {:.0f} on CIFAR-10 and {:.0f} on CIFAR-100".format(*balanced) in prose
    seen = [z["paper-code"] for z in ours if "paper-code" in z]
    assert len(seen) == 4
    assert f"z code is between {min(seen):.1f} and {max(seen):.1f}" in prose


def test_table_1_says_what_three_seeds_tell_of_the_cost() -> None:
    results = read_all(Path(__file__).parents[2] / "results")
    notes = " ".join(read("table1").notes)

    def compared(data: str, strength: str) -> tuple[float, float]:
        """Δ of the means, and ± by Welch."""
        marked, plain = (_accuracies(results, data, s) for s in (strength, "none"))
        assert len(marked) == len(plain) == 3
        change, noise = compared_means(marked, plain)
        assert noise is not None
        assert change - noise < -0.1 < 0 < change + noise  # "cannot be told", "a cost of nothing is in all four"
        return change, noise

    cases = [(data, strength) for data in ("cifar100", "cifar10") for strength in ("rho0.05", "rho0.1")]
    found = [compared(*case) for case in cases]
    (default, noise), (strong, more) = found[:2]
    assert (
        f"the default loses {-default:.2f} ± {noise:.2f} points and ρ* = 0.1 loses {-strong:.2f} ± {more:.2f};" in notes
    )
    (gain, noise), (loss, more) = found[2:]
    assert f"on CIFAR-10 they gain {gain:.2f} ± {noise:.2f} and lose {-loss:.2f} ± {more:.2f} (95 %" in notes
    assert sum(change - noise < -0.5 for change, noise in found) == 3  # "one of half a point in three"
    most = [f"{noise - change:.2f}" for change, noise in found]
    assert "a loss above {} and {} points on CIFAR-100, and above {} and {} on CIFAR-10.".format(*most) in notes
    old = [results[f"{data}-resnet18-k32-iid-none-s0"]["commit"][:7] for data in ("cifar10", "cifar100")]
    assert "({} on CIFAR-10, {} on CIFAR-100)".format(*old) in notes
    for images in ("cifar10", "cifar100"):
        plain = [results[f"{images}-resnet18-k32-iid-none-s{seed}"] for seed in range(3)]
        assert plain[0]["commit"] not in {body["commit"] for body in plain[1:]}
        assert min(plain, key=lambda body: body["accuracy"]["released"]) is plain[0]  # "it is the lowest of the three"
    shown = page([read("table1")], results)
    for images, strength, (change, noise) in zip(*zip(*cases, strict=True), found, strict=True):
        row = f"| {images} | {strength.replace('rho', 'rho:')} | 3 and 3 | {change:+.2f} | ± {noise:.2f} "
        assert f"{row}| {noise - change:.2f} | cannot be told" in shown
    assert f"cifar10 none {old[0]}, " in shown
    deviations = [float(np.std(_accuracies(results, "cifar100", s), ddof=1)) for s in ("rho0.05", "none")]
    assert "(deviation {:.2f}, the unmarked ones' is {:.2f})".format(*deviations) in notes
    means = {data: float(np.mean(_accuracies(results, data, "none"))) for data in ("cifar10", "cifar100")}
    changes = {
        (data, c): _accuracies(results, data, f"paper-code{c}")[0] - means[data]
        for data in means
        for c in ("0.025", "0.1")
    }
    ten, hundred = changes["cifar10", "0.025"], changes["cifar100", "0.025"]
    assert f"Δ of paper-code:0.025 is {ten:.2f} on CIFAR-10 and {hundred:.2f} on CIFAR-100" in notes
    ten, hundred = changes["cifar10", "0.1"], changes["cifar100", "0.1"]
    assert f"and that of paper-code:0.1 {ten:.2f} and {hundred:.2f}." in notes


def _accuracies(results: dict[str, Any], data: str, strength: str) -> list[float]:
    """Of the released models of all seeds that there are, in percent."""
    names = [f"{data}-resnet18-k32-iid-{strength}-s{seed}" for seed in range(3)]
    return [100 * results[name]["accuracy"]["released"] for name in names if name in results]


def test_strength_md_says_what_dither_costs_a_resnet() -> None:
    """The table of κ, and the sentences below it."""
    results, prose = read_all(Path(__file__).parents[2] / "results"), _prose("docs/strength.md")
    name = "cifar100-resnet18-k32-iid-rho0.05-s0"
    bodies = {k: results[f"{name}{part}-continuity"] for k, part in ((0, ""), (3, "-dither3"), (10, "-dither10"))}
    silenced: dict[int, list[int]] = {}
    for kappa, body in bodies.items():
        assert (body["rounds"], body["accuracy"]["released_round"]) == (100, 100)
        found, z = body["continuity"], body["z"]["released"]
        rows = [round(4900 * entry[1]) for entry in found["rounds"]]
        assert found["rows"] == pytest.approx(sum(rows) / 4900 / 99, abs=2e-6)  # of the rounds after the first
        silenced[kappa] = [entry[0] for entry in found["rounds"]]
        accuracy = [100 * body["accuracy"][what] for what in ("released", "validation")]
        row = f"| {kappa} | {accuracy[0]:.2f} | {accuracy[1]:.2f} | {z['balanced-anchor/v1']:.1f} "
        row += f"| {z['global-cosine/v1']:.1f} | {body['rho']:.4f} | {body['shown']['cosine']:.4f} "
        row += f"| {body['seconds_per_round']:.3f} | {100 * found['rows']:.4f} % ({sum(rows)}) |"
        assert row in prose, row
    most = max(100 * body["continuity"]["coordinates largest"] for body in bodies.values())
    assert f"The most in one round is {most:.2f} % of the coordinates." in prose
    assert silenced[3][-1] == 77
    assert silenced[10][-1] == 83
    assert all(number <= 5 for numbers in silenced.values() for number in numbers if number not in (77, 83))
    validated = [100 * body["accuracy"]["validation"] for body in bodies.values()]
    assert f"the three differ by {max(validated) - min(validated):.1f} points after round 100" in prose
    (before,) = (100 * entry[1] for entry in results[name]["curve"] if entry[0] == 100)
    assert f"an earlier one of the same seed had {before:.2f} there" in prose
    assert f"two runs of κ = 0 by {before - validated[0]:.1f}" in prose
    seconds = [body["seconds_per_round"] for body in bodies.values()]
    assert f"**The time** is {seconds[1] - seconds[0]:.3f} s a round more" in prose


def test_lab_md_says_what_a_round_takes() -> None:
    results, prose = read_all(Path(__file__).parents[2] / "results"), _prose("docs/lab.md")

    def seconds(strength: str, *seeds: int) -> tuple[float, float]:
        names = [f"{d}-resnet18-k32-iid-{strength}-s{seed}" for d in ("cifar10", "cifar100") for seed in seeds]
        found = [results[name] for name in names]
        assert {(body["rounds"], body["hardware"], body.get("abreast", 1)) for body in found} == {
            (300, "NVIDIA H200", 1)
        }
        assert {body["settings"]["evaluate_every"] for body in found} == {5}
        return min(body["seconds_per_round"] for body in found), max(body["seconds_per_round"] for body in found)

    plain, marked = seconds("none", 1, 2), seconds("rho0.1", 0, 1, 2)
    told = "takes {:.2f} to {:.2f} s without the mark and {:.2f} to {:.2f} s with it (`rho:0.1`)"
    assert told.format(*plain, *marked) in prose
    assert "which took {:.1f} to {:.1f} s".format(*seconds("none", 0)) in prose
    whole = [
        results[f"{d}-resnet18-k32-iid-{strength}-s{seed}"]["seconds"]
        for d in ("cifar10", "cifar100") for strength in ("none", "rho0.05", "rho0.1") for seed in (1, 2)
    ]  # fmt: skip
    assert f"took {min(whole):.0f} to {max(whole):.0f} s on an H200 (table 1's of seeds 1" in prose
    asked = [run.id for run in read("code").runs if fnmatchcase(run.id, "cifar100-*-k32-*-s0-*")]
    assert len(asked) == 2
    few, many = (results[f"cifar10-resnet18-k{k}-iid-rho0.05-s0"]["seconds_per_round"] for k in (4, 128))
    assert f"takes {few:.2f} s, with 128, whose batches are 16 images, {many:.2f} s." in prose


def test_strength_md_says_how_the_baseline_fades() -> None:
    results = read_all(Path(__file__).parents[2] / "results")
    counts, name = (4, 8, 16, 32, 64, 128), "cifar10-resnet18-k{}-iid-per-client-paper-code0.1-s0".format
    bodies = {k: results[name(k)] for k in counts}
    assert {body["rounds"] for body in bodies.values()} == {30}
    prose = _prose("docs/strength.md")
    for label, statistic in (("z code", "paper-code"), ("z balanced", "balanced-anchor/v1")):
        zs = [f"{bodies[k]['z']['released'][statistic]:.1f}" for k in counts]
        assert f"| {label} | {' | '.join(zs)} |" in prose
    ranges = {k: [body["z"]["released"][f"paper-code {end}"] for end in ("least", "largest")]
              for k, body in bodies.items()}  # fmt: skip
    assert [k for k, (_, largest) in ranges.items() if largest >= 4] == [4, 8]  # "no single key from 16 members on"
    least = min(body["z"]["released"]["balanced-anchor/v1 least"] for body in bodies.values())
    assert f"the lowest of all members' keys has {least:.1f}" in prose


def test_the_short_page_s_language_figures_are_of_the_results() -> None:
    root = Path(__file__).parents[2]
    results, name = read_all(root / "results"), "wikitext2-smollm2-135m-k4-iid-{}-s{}".format
    marked = [results[name("rho0.05", seed)] for seed in range(3)]
    changes = [
        100 * (body["perplexity"]["released"] / results[name("none", seed)]["perplexity"]["released"] - 1)
        for seed, body in enumerate(marked)
    ]
    z = np.mean([body["z"]["released"]["balanced-anchor/v1"] for body in marked])
    others = [body["z"]["released"][s] for body in marked for s in ("global-cosine/v1", "mean-tensor-cosine/v1")]
    page = _prose("docs/measured.md")
    change = f"{np.mean(changes):.3f} ± {np.std(changes, ddof=1):.3f} %"
    assert f"three seeds): z = {z:.0f} at a perplexity that is {change} higher" in page
    assert f"| perplexity + {change} | | z = {z:.0f} |" in _prose("README.md")
    means = [np.mean(others[0::2]), np.mean(others[1::2])]
    assert f"the statistics of the paper see z = {min(means):.0f} to {max(means):.0f} in it" in page
    attacked = [json.loads(path.read_text()) for path in (root / "results/attacks/language").glob("*.json")]
    left = [max(z for z in (row["z"], row.get("z_aligned")) if z is not None)
            for body in attacked for row in body["rows"] if row["change"] <= 5]  # fmt: skip
    assert f"and {min(left):.1f} or more after every attack" in page
