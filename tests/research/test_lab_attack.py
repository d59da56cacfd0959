"""Attacks on the lab's models: what an observer learns, attackers side by side, the suite, what its files say."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quorumark.cli import app
from quorumark.consortium.strength import Strength
from quorumark.errors import InputError, RecordError
from quorumark.research.attacks import Target, estimate_key, public_scales
from quorumark.research.attacks.by_layers import parts_of
from quorumark.research.attacks.learning import LeastSquares
from quorumark.research.lab import data
from quorumark.research.lab.attacked import Attacked, read_attacked, section, write
from quorumark.research.lab.config import Settings, strength_settings
from quorumark.research.rows import ORIGINAL, Row

torch = pytest.importorskip("torch")
from quorumark.model.layout import ModelLayout  # noqa: E402
from quorumark.research.lab import models  # noqa: E402
from quorumark.research.lab.attack import Suite, open_run  # noqa: E402
from quorumark.research.lab.image_run import ImageRun  # noqa: E402
from quorumark.research.lab.mark import axis_norms, axis_sums, encoded  # noqa: E402
from quorumark.research.lab.observer import LAST, Observer  # noqa: E402
from quorumark.research.lab.parted import PartedAttackers  # noqa: E402
from quorumark.research.lab.retrain import TEMPERATURE, Attacker, Attackers, Feed  # noqa: E402
from quorumark.research.lab.tried import Trained, layered_plan, plan  # noqa: E402

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]


MINI = Settings("shapes", "relative:0.1", members=4, rounds=7, model="cnn", global_batch=128, augment=("flip",))


def cosine(one: Any, two: Any) -> float:
    return float(one @ two / (np.linalg.norm(one) * np.linalg.norm(two)))


# --- the observer -----------------------------------------------------------------------------------------


def watched(settings: Settings, observe: list[int]) -> tuple[ImageRun, Target, dict[int, list[Any]]]:
    """A run, all of its global models as an attacker would have kept them, and coalitions' own updates."""
    run = ImageRun(settings, data.load("shapes", "."), observe=observe)
    kept, scales = [run.initial], []
    own: dict[int, list[Any]] = {c: [] for c in observe}
    weights = np.array([float(w) for w in run.weights])
    for _ in range(settings.rounds):
        before = run.model
        run.round()
        kept.append(run.model)
        assert run.mark is not None
        added = run.mark.added
        scales.append(np.zeros(run.layout.coordinates) if added is None else added.numpy() / 2.0**40)
        each = np.stack([(run.fleet.model(k).double() - before.double()).numpy() for k in range(settings.members)])
        for c in observe:
            own[c].append(weights[:c] @ each[:c])
    like = {name: tensor.numpy() for name, tensor in run.fleet.module.state_dict().items()}
    checkpoints = [run.layout.unflatten(model.numpy(), like) for model in kept]
    return run, Target(lambda: run.fleet.module, {}, checkpoints=checkpoints, scales=scales, layout=run.layout), own


@pytest.mark.parametrize("strength", ["relative:0.1", "rho:0.05", "paper:0.1"])
def test_an_observer_needs_no_models_to_estimate_as_with_all_of_them(strength: str) -> None:
    run, target, own = watched(replace(MINI, strength=strength), [1, 3])
    assert run.observer is not None
    for coalition in (0, 1, 3):
        known = replace(target, own=own[coalition]) if coalition else target
        for how in ("sum", "last", "regression", "gls"):
            wanted = estimate_key(known, how, coalition=coalition > 0, last=LAST)
            assert np.abs(wanted).max() > 0
            assert np.allclose(run.observer.estimate(how, coalition), wanted, rtol=1e-6, atol=1e-6 * wanted.std())
    with pytest.raises(InputError, match="estimate"):
        run.observer.estimate("sum", 2)
    run.close()


def test_the_amplitudes_that_are_observed_are_those_that_anybody_works_out() -> None:
    """From the global models, the terms and the norms that rounds open."""
    run = ImageRun(MINI, data.load("shapes", "."), observe=[])
    kept, seen, norms = [run.initial], [], []
    for _ in range(MINI.rounds):
        run.round()
        origin = encoded(kept[-1][: run.layout.carrier_size])
        each = [encoded(run.fleet.model(k)[: run.layout.carrier_size]) - origin for k in range(MINI.members)]
        sums = axis_sums(torch.stack(each), run.layout).numpy()
        parts = [axis_norms(sums[:, k], w) for k, w in enumerate(run.weights)]
        norms.append(np.sum(parts, axis=0).astype(np.uint64))
        kept.append(run.model)
        assert run.mark is not None
        seen.append(np.zeros(run.layout.coordinates) if run.mark.added is None else run.mark.added.numpy() / 2.0**40)
    like = {name: tensor.numpy() for name, tensor in run.fleet.module.state_dict().items()}
    checkpoints = [run.layout.unflatten(model.numpy(), like) for model in kept]
    strength = strength_settings(MINI.strength)
    assert strength is not None
    worked_out = public_scales(run.layout, Strength.of(strength, run.layout.coordinates), checkpoints, norms)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(seen, worked_out, strict=True))
    assert max(scale.max() for scale in worked_out) > 0
    run.close()


def test_an_observer_outlasts_a_checkpoint(tmp_path: Path) -> None:
    images, found = data.load("shapes", "."), []
    for stops in ((), (3,)):
        run = ImageRun(MINI, images, observe=[2])
        while run.round_no < MINI.rounds:
            run.round()
            if run.round_no in stops:
                run.save(tmp_path / "c.pt")
                run.close()
                run = ImageRun(MINI, images)
                run.restore(tmp_path / "c.pt")
        assert run.observer is not None
        found.append([run.observer.estimate(how, c) for how in ("sum", "last", "regression", "gls") for c in (0, 2)])
        run.close()
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    blind = ImageRun(MINI, images)
    blind.round()
    blind.save(tmp_path / "blind.pt")
    blind.close()
    late = ImageRun(MINI, images, observe=[2])
    with pytest.raises(RecordError, match="not observed from its first round"):
        late.restore(tmp_path / "blind.pt")
    late.close()
    with pytest.raises(InputError, match="below all 4"):
        Observer(late.layout, late.initial, [4], 4)


def test_generalised_least_squares_is_as_near_as_theory_says() -> None:
    """White noise of known variance in each row: cos² = the mean of I/(1 + I), I = Σ S²/v, for the best linear τ′.

    Over seeds the cosine varies by about 1/√d = 0.006.
    """
    rng = np.random.default_rng(0)
    rows, columns, rounds = 40, 600, 20
    key = rng.choice([-1.0, 1.0], rows * columns)
    noise = np.repeat(np.exp(rng.uniform(-1.5, 1.5, rows)), columns)  # some rows are quieter than others
    scales = [np.full(key.size, s) for s in rng.uniform(0.02, 0.1, rounds)]
    deltas = [s * key + noise * rng.standard_normal(key.size) for s in scales]
    found = LeastSquares([(slice(0, key.size), rows)], np.zeros(key.size), np.zeros(key.size))
    for delta, scale in zip(deltas, scales, strict=True):
        found.see(delta, scale, [])
    information = sum(s * s for s in scales) / noise**2
    expected = np.sqrt(np.mean(information / (1 + information)))
    assert cosine(found.estimate(), key) == pytest.approx(expected, abs=0.03)
    plain = sum(s * d for s, d in zip(scales, deltas, strict=True)) / sum(s * s for s in scales)
    assert cosine(found.estimate(), key) > 1.3 * cosine(plain, key)


def test_what_can_be_foreseen_of_the_noise_does_not_hide_the_mark() -> None:
    """Training that goes on as before, ten times as large as what is new in it, makes no difference to the estimate."""
    rng = np.random.default_rng(1)
    size, rounds = 12000, 15
    key = rng.choice([-1.0, 1.0], size)
    scale = np.full(size, 0.05)
    drift = 10 * rng.standard_normal(size)
    with_past, without = (LeastSquares([(slice(0, size), 6)], np.zeros(size), np.zeros(size)) for _ in range(2))
    before = drift.copy()
    for _ in range(rounds):
        delta = 0.9 * before + scale * key + rng.standard_normal(size)
        with_past.see(delta, scale, [(before, np.zeros(size))])
        without.see(delta, scale, [])
        before = drift
    assert cosine(with_past.estimate(), key) == pytest.approx(0.05 * np.sqrt(rounds), rel=0.25)
    assert cosine(without.estimate(), key) < 0.3 * cosine(with_past.estimate(), key)


# --- attackers --------------------------------------------------------------------------------------------


def reference(module: Any, layout: ModelLayout, batches: Any, attacker: Attacker, teacher: Any) -> Any:
    """The same attack by PyTorch's own optimiser and autograd."""
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-3 * attacker.rate, weight_decay=attacker.decay)
    names = [spec.name for spec, _ in layout.spans("carrier")]
    parameters = dict(module.named_parameters())
    module.train()
    for x, y, t in zip(*batches, teacher, strict=True):
        logits = module(x.permute(0, 3, 1, 2))
        loss = torch.nn.functional.cross_entropy(logits, y)
        if attacker.kappa:
            given, wanted = (torch.log_softmax(part / TEMPERATURE, -1) for part in (logits, t))
            loss = 0.5 * loss + 0.5 * (given.exp() * (given - wanted)).sum(-1).mean()
        if attacker.guess is not None:
            theta = torch.cat([parameters[name].flatten() for name in names])
            against = theta @ attacker.guess / (theta.norm() * attacker.guess.norm())
            loss = (1 - attacker.alpha) * loss + attacker.alpha * against.abs()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return torch.from_numpy(layout.flatten(module))


def test_attackers_side_by_side_do_what_each_would_do_alone() -> None:
    """Fine-tuning, adaptive fine-tuning (a guess beside, against the weights; slowly), distillation; after others."""
    made = [models.make("cnn", 4, 3, 16, seed) for seed in range(5)]
    layout = ModelLayout.of(made[0])
    starts = [torch.from_numpy(layout.flatten(module)) for module in made]
    generator = torch.Generator().manual_seed(5)
    guess = torch.randn(layout.coordinates, generator=generator) - 0.5 * starts[1][: layout.coordinates]
    attackers = [
        Attacker(starts[0]),
        Attacker(starts[1], guess, 0.7),
        Attacker(starts[2], -guess, 0.3),
        Attacker(starts[3], kappa=0.5, decay=0.0),
        Attacker(starts[4], guess, 0.5, decay=10.0, rate=0.1),
    ]
    x = torch.randn(5, 1, 16, 16, 16, 3, generator=generator)
    y = torch.randint(0, 4, (5, 1, 16), generator=generator)
    teacher = torch.randn(5, 1, 16, 4, generator=generator)
    fleet = Attackers(models.make("cnn", 4, 3, 16, 9), layout, 6, 4, (16, 16, 3), torch.device("cpu"), batch=16)
    fleet.begin([Attacker(starts[3], guess, 0.9, rate=3.0)] * 6)  # leaves nothing behind
    fleet.epoch(x, y)
    fleet.begin(attackers)
    fleet.epoch(x[:2], y[:2], teacher[:2])
    fleet.epoch(x[2:], y[2:], teacher[2:])
    batches, end = (x[:, 0], y[:, 0]), layout.carrier_size
    for k, (module, attacker) in enumerate(zip(made, attackers, strict=True)):
        wanted = reference(module, layout, batches, attacker, teacher[:, 0])
        moved = (wanted - attacker.start)[:end].norm()
        # Adam divides by the gradient's size: where that is next to nothing, rounding decides a step of 10⁻³
        assert (fleet.model(k) - wanted)[:end].norm() < 0.03 * moved
        assert torch.allclose(fleet.model(k)[end:], wanted[end:], rtol=1e-3, atol=1e-3)  # running statistics, too
        plain = reference(models.make("cnn", 4, 3, 16, k), layout, batches, Attacker(attacker.start), teacher[:, 0])
        assert k == 0 or (plain - wanted)[:end].norm() > 0.1 * moved  # fine-tuning does something else


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_attackers_on_a_gpu_do_as_on_the_cpu() -> None:
    """Up to bfloat16; more of them, fewer, and more again, each number of them a graph of its own."""
    module = models.make("cnn", 4, 3, 16, 0)
    layout, start = ModelLayout.of(module), torch.from_numpy(ModelLayout.of(module).flatten(module))
    generator = torch.Generator().manual_seed(5)
    end = layout.carrier_size
    guess = torch.randn(end, generator=generator) + start[:end] / start[:end].std()
    attackers = [Attacker(start), Attacker(start, guess, 0.7), Attacker(start, kappa=0.5, decay=0.0)]
    attackers.append(Attacker(start, rate=0.1))
    x = torch.randn(6, 1, 64, 16, 16, 3, generator=generator)
    y = torch.randint(0, 4, (6, 1, 64), generator=generator)
    x[..., 0] += 0.3 * y[..., None, None]
    teacher = torch.randn(6, 1, 64, 4, generator=generator)
    updates: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        own = models.make("cnn", 4, 3, 16, 0)
        fleet = Attackers(
            own, layout, 4, 4, (16, 16, 3), torch.device(device), batch=64, streams=2
        )  # fmt: skip
        fleet.prepare([4, 1])
        for chosen in (attackers, attackers[:1], attackers):
            fleet.begin(chosen)
            fleet.epoch(x.to(device, fleet.kind), y.to(device), teacher.to(device))
        updates[device] = [(fleet.model(k).cpu() - start)[:end] for k in range(4)]
    for ours, theirs in zip(updates["cuda"], updates["cpu"], strict=True):
        assert torch.cosine_similarity(ours, theirs, dim=0) > 0.8
    assert 0.05 < updates["cuda"][3].norm() / updates["cuda"][0].norm() < 0.2
    before, after = (
        float(torch.cosine_similarity(v, guess, dim=0).abs()) for v in (start[:end], start[:end] + updates["cuda"][1])
    )
    assert after < before


def test_a_feed_gives_every_image_in_every_epoch_in_an_order_of_its_own() -> None:
    run = ImageRun(replace(MINI, augment=()), data.load("shapes", "."))
    own = torch.arange(300)[None].expand(2, -1)
    feed = Feed(run, own, [1, 2], torch.float32)
    assert feed.steps == 3
    x, y = feed.take(1)
    assert x.shape == (3, 2, 128, 16, 16, 3)
    assert sorted(y[:, 0].flatten()[:300].tolist()) == sorted(run._y[:300].tolist())
    assert not torch.equal(y[:, 0], y[:, 1])
    feed.ahead(2)
    assert not torch.equal(feed.take(2)[1], y)
    assert torch.equal(feed.take(1)[0], x)
    run.close()


def test_a_feed_augments_as_the_run_does() -> None:
    """With flips every other image is mirrored, and none is anything else; the last batch begins the order again."""
    run = ImageRun(replace(MINI, augment=("flip",)), data.load("shapes", "."))
    x, y = Feed(run, torch.arange(300)[None], [1], torch.float32).take(1)
    mean, spread = run._spread
    pixels = torch.round((x.flatten(0, 2) * torch.tensor(spread) + torch.tensor(mean)) * 255).to(torch.uint8)
    originals = {image.numpy().tobytes(): place for place, image in enumerate(run._x[:300])}
    as_it_is = [originals.get(one.numpy().tobytes()) for one in pixels]
    mirrored = [originals.get(one.flip(1).contiguous().numpy().tobytes()) for one in pixels]
    places = [next((p for p in pair if p is not None), -1) for pair in zip(as_it_is, mirrored, strict=True)]
    assert -1 not in places
    assert 130 < sum(place is None for place in as_it_is) < 254  # of 384, half: 6 deviations either way
    assert sorted(places[:300]) == list(range(300))
    assert places[300:] == places[:84]
    assert torch.equal(y.flatten(), run._y[torch.tensor(places)])
    run.close()


# --- what is tried ----------------------------------------------------------------------------------------


def test_the_plan_has_the_paper_s_budgets_first() -> None:
    groups = plan((8, 16), observed=True)
    assert all(len({job.fraction for job in group}) == 1 and len(group) <= 8 for group in groups)
    jobs = [job for group in groups for job in group]
    assert len(set(jobs)) == len(jobs)
    for fraction in (0.01, 0.05, 0.1, 0.2):
        assert Trained("fine-tuning", fraction) in jobs
        assert Trained("distillation", fraction) in jobs
        for alpha in (0.1, 0.3, 0.5, 0.7):
            assert Trained("adaptive-fine-tuning", fraction, alpha, "sum") in jobs
    tried = {(job.estimate, job.coalition) for job in jobs if job.estimate}
    assert tried == {("sum", 0), ("gls", 0), ("regression", 0), ("last", 0)} | {
        (how, c) for how in ("gls", "sum", "regression") for c in (8, 16)
    }
    assert groups[0][0] == Trained("fine-tuning", 0.2)
    gentle = [job for job in jobs if job.lr == 1e-4]
    assert {(job.estimate, job.coalition) for job in gentle} == {
        *(("", 0), ("sum", 0), ("gls", 0), ("regression", 0), ("gls", 8), ("gls", 16))
    }
    assert gentle[0].settings == {"fraction": 0.2, "lr": 1e-4}
    assert "lr" not in groups[0][0].settings
    assert {job.estimate for group in plan((), observed=False) for job in group} == {"", "sum"}


# --- the suite --------------------------------------------------------------------------------------------

RUN = "shapes-mlp-k4-iid-relative0.1-s0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with an unmarked one beside it, attacked in two pieces by processes with little installed."""
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "mini.toml").write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "mlp"\nmembers = 4\nrounds = 8\nglobal_batch = 96\n'
        '[[grid]]\nstrength = ["relative:0.1", "none"]\n'
    )
    places = ["--results", str(folder / "results"), "--runs", str(folder / "runs"), "--device", "cpu"]
    commands = [
        ["lab", "run", str(folder / "mini.toml"), "--observe", "1,2", *places],
        ["lab", "attack", RUN, "--epochs", "2", "--seconds", "6", *places],
        ["lab", "attack", RUN, "--epochs", "2", "--innocents", "3", "--innocent-rounds", "2", *places],
    ]
    script = (
        "import sys, json\n"
        "for name in ('cryptography', 'flwr', 'safetensors', 'PIL', 'sklearn', 'matplotlib', 'torch_pruning'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "torch.set_num_threads(1)\n"
        "from quorumark.cli import app\n"
        "for words in json.load(sys.stdin):\n"
        "    app(words, standalone_mode=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(commands), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (folder / "output.txt").write_text(done.stdout)
    return folder


def test_a_suite_in_pieces(folder: Path) -> None:
    with (folder / "results" / "attacks" / f"{RUN}.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert lines[0]["attack"] == ORIGINAL
    keys = [(line["attack"], line["settings"]) for line in lines]
    assert len(set(keys)) == len(keys)
    found = read_attacked(folder / "results" / "attacks")[RUN]
    original, by_name = found.original, {row.attack: row for row in found.last}
    assert original.z is not None
    assert original.z > 8
    trained = [row for row in found.rows if row.attack in ("fine-tuning", "adaptive-fine-tuning", "distillation")]
    assert sum("epoch" in row.settings for row in trained) == len(trained) / 2  # after one epoch, and after both
    assert len(trained) / 2 == sum(len(group) for group in plan((1, 2), observed=True))
    hidden = by_name["permutation + rescaling"]
    assert abs(hidden.z or 0) < 4.5
    assert hidden.z_aligned == pytest.approx(original.z, rel=0.05)
    assert hidden.accuracy == original.accuracy
    assert by_name["channel-removal"].z is None
    assert (by_name["fine-tuning + permutation"].z_aligned or 0) > 0.8 * original.z
    assert (by_name["distillation"].z or 0) < 4.5
    assert {row.settings["share"] for row in found.last if row.attack == "averaging"} == {0.25, 0.5}
    best = {(e["estimate"], e["coalition"]): e["cosine"] for e in found.body["estimates"]}
    assert len(best) == 12
    assert best["gls", 0] > best["sum", 0] > 0.05
    strongest = [r for r in found.last if r.settings.get("estimate") == "gls" and r.settings.get("coalition") == 2]
    mildest = next(r for r in found.last if r.attack == "fine-tuning" and r.fraction == 0.2)
    assert min(r.z or 0 for r in strongest) < (mildest.z or 0)
    kinds = [entry["kind"] for entry in found.body["innocents"]]
    assert sorted(kinds) == ["another start", "half-trained", "the same start", "unmarked run"]
    assert max(abs(entry["z_anchor"]) for entry in found.body["innocents"]) < 4.5
    stranger = next(entry for entry in found.body["innocents"] if entry["kind"] == "another start")
    assert stranger["z_released"] != stranger["z_anchor"]  # another reference, other channels
    text = (folder / "output.txt").read_text()
    assert "not all yet" in text
    assert text.splitlines()[-1] == f"{RUN}: {len(lines) - 1} attacked models"


def test_what_is_done_is_not_done_again(folder: Path) -> None:
    table = folder / "results" / "attacks" / f"{RUN}.csv"
    before = table.read_text()
    table.unlink()
    places = ["--results", str(folder / "results"), "--runs", str(folder / "runs"), "--device", "cpu"]
    words = ["lab", "attack", RUN, "--epochs", "2", "--innocents", "3", "--innocent-rounds", "2", *places]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "images a second" not in done.output
    assert table.read_text() == before


def test_some_attacks_by_their_names(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs" / RUN
    runs.mkdir(parents=True)
    (runs / "checkpoint.pt").write_bytes((folder / "runs" / RUN / "checkpoint.pt").read_bytes())
    places = ["--results", str(tmp_path), "--runs", str(tmp_path / "runs"), "--device", "cpu", "--epochs", "1"]
    for pattern, attacks, count in (
        ("*lr=0.0001*", {"fine-tuning", "adaptive-fine-tuning"}, 11),
        ("quantisation, scheme=static4", {"quantisation"}, 1),
        ("permutation", {"permutation"}, 1),
        ("fine-tuning, fraction=0.2, epochs=1", {"fine-tuning"}, 1),
    ):
        before = {row.key for row in read_attacked(tmp_path / "attacks").get(RUN, Attacked([], {})).rows}
        words = ["lab", "attack", RUN, "--only", pattern, *places]
        CliRunner().invoke(app, words, catch_exceptions=False)
        found = read_attacked(tmp_path / "attacks")[RUN]
        new = [row for row in found.rows if row.key not in before and row.attack != ORIGINAL]
        assert {row.attack for row in new} == attacks
        assert len(new) == count
    for pattern in ("quantization*", "permutation, *"):
        with pytest.raises(InputError, match="--only must name an attack"):
            CliRunner().invoke(app, ["lab", "attack", RUN, "--only", pattern, *places], catch_exceptions=False)
    tuned = next(row for row in found.rows if row.settings == {"fraction": 0.2, "lr": 0.0001, "epochs": 1})
    plain = next(row for row in found.rows if row.settings == {"fraction": 0.2, "epochs": 1})
    slow, fast = (abs((row.z or 0) - (found.original.z or 0)) for row in (tuned, plain))
    assert 0 < 4 * slow < fast  # a tenth of the rate: next to nothing has moved
    paper, ours = found.aims()[1:3]
    assert paper[2].endswith("; 2 models")  # a tenth of the rate is not the paper's
    assert ours[2].endswith("; 12 models")


def test_attacks_have_a_section_of_the_page_and_figures(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("cryptography")
    results, page = folder / "results", folder / "docs" / "results.md"
    page.parent.mkdir()
    words = ["lab", "table", "--results", str(results), "--out", str(page)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert f"### {RUN}" in page.read_text()
    assert "pareto" not in page.read_text()
    figures = ["--plot", "--results", str(results), "--figures", str(folder / "docs" / "figures")]
    drawn = CliRunner().invoke(app, ["lab", "attack", RUN, *figures], catch_exceptions=False)
    assert f"attacks-{RUN}-pareto.svg" in drawn.output
    assert f"attacks-{RUN}-adaptive-fine-tuning.svg" in drawn.output
    assert isinstance(CliRunner().invoke(app, [*words, "--check"]).exception, RecordError)  # the figure is there now
    CliRunner().invoke(app, words, catch_exceptions=False)
    text = page.read_text()
    assert (
        f"(figures/attacks-{RUN}-pareto.svg)\n\n*Accuracy against z, and against Q where it was measured, for every"
        in text
    )
    assert f"(figures/attacks-{RUN}-adaptive-fine-tuning.svg)" in text
    assert CliRunner().invoke(app, [*words, "--check"]).exit_code == 0
    found = read_attacked(results / "attacks")[RUN]
    row = next(r for r in found.last if r.attack == "quantisation")
    assert f"| quantisation | scheme {row.settings['scheme']} | {100 * row.accuracy:.2f} |" in text
    with pytest.raises(InputError, match="must be one that was attacked"):
        CliRunner().invoke(app, ["lab", "attack", "nobody", *figures], catch_exceptions=False)


def test_what_cannot_be_attacked_is_refused(folder: Path) -> None:
    places = ["--results", str(folder / "results"), "--runs", str(folder / "runs"), "--device", "cpu"]
    with pytest.raises(InputError, match="must be one with a checkpoint"):
        CliRunner().invoke(app, ["lab", "attack", "nobody", *places], catch_exceptions=False)
    with pytest.raises(InputError, match="one mark"):
        CliRunner().invoke(app, ["lab", "attack", RUN.replace("relative0.1", "none"), *places], catch_exceptions=False)


def test_a_suite_that_was_killed_says_everything_once(folder: Path) -> None:
    """As it was before a distilled student's row came, with half of the model that chains begin with."""
    here, table = folder / "runs" / RUN, folder / "results" / "attacks" / f"{RUN}.csv"
    places = ["--results", str(folder / "results"), "--runs", str(folder / "runs"), "--device", "cpu"]
    words = ["lab", "attack", RUN, "--epochs", "2", "--innocents", "3", "--innocent-rounds", "2", *places]
    before, said = table.read_text(), json.loads((here / "attacks.json").read_text())
    gone = [line for line in before.splitlines() if line.startswith("distillation,") and '""fraction"": 0.05' in line]
    assert len(gone) == 2
    (here / "attacks.csv").write_text("".join(f"{x}\n" for x in before.splitlines() if x not in gone))
    CliRunner().invoke(app, words, catch_exceptions=False)
    again = json.loads((here / "attacks.json").read_text())
    assert sorted(e["fraction"] for e in again["distillation"]) == [0.01, 0.05, 0.1, 0.2]
    assert [e["agreement"] for e in sorted(again["distillation"], key=lambda e: e["fraction"])] == [
        e["agreement"] for e in sorted(said["distillation"], key=lambda e: e["fraction"])
    ]
    assert again["released_digest"] == said["released_digest"]
    assert again["seconds"] > said["seconds"]  # of all commands together
    assert not list(here.glob(".*partial"))
    # chains are of the model with as many epochs as they say, or they are not made
    chains = [line for line in before.splitlines() if line.startswith("fine-tuning +")]
    assert chains
    assert all('""0.epochs"": 2' in line for line in chains)
    CliRunner().invoke(app, [*words, "--epochs", "3", "--seconds", "0"], catch_exceptions=False)
    assert '""0.epochs"": 3' not in (here / "attacks.csv").read_text()


def test_attacks_on_another_model_of_the_same_name_are_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    """The same round of a run that was made again: nothing of the old one's attacks is left."""
    shutil.copytree(folder / "runs" / RUN, tmp_path / "runs" / RUN)
    here = tmp_path / "runs" / RUN
    body = torch.load(here / "checkpoint.pt", weights_only=False)
    accuracy, number, model = body["best"]
    body["best"] = accuracy, number, model * 1.5
    torch.save(body, here / "checkpoint.pt")
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    words = ["lab", "attack", RUN, "--epochs", "2", "--seconds", "0", *places]
    CliRunner().invoke(app, words, catch_exceptions=False)
    rows = list(csv.DictReader((here / "attacks.csv").read_text().splitlines()))
    assert rows[0]["attack"] == ORIGINAL
    assert not any(row["attack"].startswith("fine-tuning") for row in rows)
    assert not list(here.glob("tuned*"))


def _opened(folder: Path, tmp_path: Path) -> tuple[Any, Any]:
    """The small run, in a copy whose state a test may change."""
    shutil.copytree(folder / "runs" / RUN, tmp_path / RUN)
    return open_run(tmp_path / RUN, ".", "cpu")


def test_what_an_attacker_begins_with(folder: Path, tmp_path: Path) -> None:
    """A fraction of the data is a sample of all of it; a student's weights are nobody's; guesses are their own."""
    run, images = _opened(folder, tmp_path)
    suite = Suite(run, images, tmp_path / RUN, tmp_path / "results", epochs=2)
    count = len(run._y)
    fifth, twentieth = suite._subset(0.2), suite._subset(0.05)
    assert (len(fifth), len(twentieth)) == (round(0.2 * count), round(0.05 * count))
    assert len(fifth.unique()) == len(fifth)
    assert torch.equal(fifth, suite._subset(0.2))
    assert fifth.max() > 0.9 * count
    assert abs(float(fifth.double().mean()) / count - 0.5) < 0.15  # 5 deviations of the mean of 96 places
    # what it is worth is measured of the model that is attacked
    tuned = torch.load(tmp_path / RUN / "tuned-2.pt", weights_only=True)
    row = next(r for r in suite.rows if r.attack == "fine-tuning" and r.settings == {"fraction": 0.2, "epochs": 2})
    assert row.accuracy == pytest.approx(run.fleet.accuracy(tuned, *run.test), abs=1e-6)
    assert row.z == pytest.approx(suite._known.z(suite._tensors(tuned)), abs=1e-3)
    assert (row.examples, row.steps) == (len(fifth), 2)
    student = suite._attacker(Trained("distillation", 0.2))
    end = run.layout.carrier_size
    for known in (run.initial, suite.released):
        assert abs(cosine(student.start[:end].numpy(), known[:end].numpy())) < 0.05
    assert (student.kappa, student.decay, student.guess) == (0.5, 0.0, None)
    plain = suite._attacker(Trained("fine-tuning", 0.2))
    assert torch.equal(plain.start, suite.released)
    assert (plain.alpha, plain.kappa, plain.decay, plain.guess) == (0.0, 0.0, 1e-4, None)
    guesses = [suite._attacker(Trained("adaptive-fine-tuning", 0.2, 0.3, "gls", c)).guess for c in (0, 1, 2)]
    key = run.keys[0].numpy()
    shown = {(e["estimate"], e["coalition"]): e["cosine"] for e in suite.body["estimates"]}
    for c, guess in enumerate(guesses):
        assert guess is not None
        assert cosine(guess.numpy(), key) == pytest.approx(shown["gls", c], abs=1e-4)
    assert shown["gls", 0] < shown["gls", 1] < shown["gls", 2]
    suite.close()


def test_students_hear_the_released_model_and_are_tested_on_the_test_images(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all test labels wrong: nobody can be right there who is right on images like these."""
    run, images = _opened(folder, tmp_path)
    run.test = run.test[0], (run.test[1] + 1) % 4
    suite = Suite(run, images, tmp_path / RUN, tmp_path / "results", epochs=3)
    fleet, heard = suite._attackers(), list[tuple[Any, ...]]()
    plain = fleet.epoch

    def epoch(*batches: Any) -> None:
        heard.append(batches)
        plain(*batches)

    monkeypatch.setattr(fleet, "epoch", epoch)
    assert suite._train([Trained("fine-tuning", 0.1), Trained("distillation", 0.1)])
    suite._drain(wait=True)
    assert len(heard) == 3
    for x, y, teacher in heard:
        assert torch.allclose(teacher.flatten(0, 2), run.fleet.logits(suite.released, x.flatten(0, 2)))
        assert (teacher.argmax(-1) == y).float().mean() > 0.9
    made = {row.attack: row for row in suite.rows if row.settings == {"fraction": 0.1, "epochs": 3}}
    assert made["fine-tuning"].accuracy < 0.1 < 0.9 < run.fleet.accuracy(suite.released, *run.validation)
    entry = suite.body["distillation"][-1]
    assert (entry["fraction"], entry["epochs"]) == (0.1, 3)
    suite.close()


def test_time_that_is_up_stops_attackers_between_epochs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they were on the way is kept; the attack itself is not done, and a group that does not fit is not begun."""
    run, images = _opened(folder, tmp_path)
    suite = Suite(run, images, tmp_path / RUN, tmp_path / "results", epochs=4)
    left = iter([60.0, 60.0])  # when it begins, and after the first epoch
    monkeypatch.setattr(Suite, "left", property(lambda _: next(left, -1.0)))
    job = Trained("fine-tuning", 0.1)
    assert not suite._train([job])
    suite._drain(wait=True)
    made = [row.settings.get("epoch", 0) for row in suite.rows if row.settings.get("epochs") == 4]
    assert sorted(made) == [1, 2]
    assert suite._open([job]) == [job]
    assert not suite._train([job])
    suite.close()


def test_innocent_models_are_of_three_kinds(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From elsewhere, each from its own start; from θ_0; and from θ_0 for half as long."""
    run, images = _opened(folder, tmp_path)
    suite = Suite(run, images, tmp_path / RUN, tmp_path / "results", epochs=2)
    found: dict[str, Any] = {}
    monkeypatch.setattr(suite, "_judge", lambda name, kind, vector: found.update({f"{kind}: {name}": vector.clone()}))
    suite._raise([(i, str(i)) for i in (0, 1, 2, 3)], 4)
    end, start = run.layout.carrier_size, run.initial
    one, two = (found[f"another start: {i}"] for i in (0, 3))
    same, half = found["the same start: 1"], found["half-trained: 2"]
    for vector, other in ((one, start), (two, start), (one, two)):
        assert abs(cosine(vector[:end].numpy(), other[:end].numpy())) < 0.1
    for vector in (same, half):
        assert cosine(vector[:end].numpy(), start[:end].numpy()) > 0.5
    ways = [float((vector - start)[:end].norm()) for vector in (half, same)]
    assert 0.3 * ways[1] < ways[0] < 0.85 * ways[1]
    suite.close()


def test_a_run_with_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    torch.save({"settings": {"dataset": "toy", "sequence": 16}}, tmp_path / "toy" / "checkpoint.pt")
    words = ["lab", "attack", "toy", "--runs", str(tmp_path), "--device", "cpu"]
    with pytest.raises(InputError, match="must be a run with images"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_files_of_attacks_are_what_they_are_named_after(folder: Path, tmp_path: Path) -> None:
    names = [folder / "results" / "attacks" / f"{RUN}.{kind}" for kind in ("json", "csv")]
    body = json.loads(names[0].read_text())

    def refused(text: str, name: str = RUN, table: str | None = None, **changed: Any) -> None:
        here = tmp_path / str(len(list(tmp_path.iterdir())))
        here.mkdir()
        (here / f"{name}.json").write_text(json.dumps({**body, **changed}))
        if table != "":
            (here / f"{name}.csv").write_text(names[1].read_text() if table is None else table)
        with pytest.raises(RecordError, match=text):
            read_attacked(here)

    refused("is not of attacks on the run that it is named after", name="another")
    refused("is not of attacks on the run that it is named after", format="quorumark-lab-attacks/v9")
    refused("are damaged", table="")
    lines = names[1].read_text().splitlines(keepends=True)
    refused("lacks the model as it was released", table="".join([lines[0], *lines[2:]]))
    refused("is not a result", table="".join([*lines[:2], "pruning,x,y\n"]))


def test_the_section_says_what_the_files_say(folder: Path, tmp_path: Path) -> None:
    found = read_attacked(folder / "results" / "attacks")[RUN]
    innocents = [
        {"name": f"x {k}", "kind": "another start", "accuracy": 0.5, "z": z, "z_anchor": -z, "z_released": 10 + z}
        for k, z in enumerate((1.0, -3.0, 0.5))
    ]
    students = [{"fraction": 0.2, "agreement": 0.75}, {"fraction": 0.05, "agreement": 0.5, "epochs": 2}]
    body = {**found.body, "innocents": innocents, "distillation": students}
    write(found.rows, body, tmp_path, RUN)
    text = section(tmp_path, tmp_path / "figures")
    assert "\n8 rounds (the paper: 300), 4 members" in text
    assert "| another start | 3 | 50.0 | -0.50 | 0.50 | 3.00 | 9.50 | 11.00 |" in text
    assert "5 %, 2 epochs: 50.0 %, 20 %: 75.0 %" in text
    assert "| no innocent model, aligned to the anchor, has z ≥ 4 | true | 3 models: mean 0.50, largest 3.00 |" in text
    write(found.rows, {**body, "rounds": 300}, tmp_path, RUN)
    assert "\n300 rounds, 4 members" in section(tmp_path, tmp_path / "figures")


def test_aims_are_true_or_false_by_the_rows() -> None:
    body = {"innocents": [{"z_anchor": 1.0}, {"z_anchor": -2.0}]}
    tuned = Row("fine-tuning", 0.61, 60.0, None, settings={"fraction": 0.2})
    rows = [
        Row(ORIGINAL, 0.6, 160.0, None),
        tuned,
        Row("fine-tuning", 0.61, 3.0, None, settings={"fraction": 0.2, "epochs": 5}),  # no attack of the paper's length
        Row("pruning", 0.54, 2.0, None, settings={"ratio": 0.9}),  # six points less: it may
        Row("distillation", 0.6, 0.1, None, settings={"fraction": 0.2}),
        Row("adaptive-fine-tuning", 0.6, 9.0, None, settings={"fraction": 0.2, "alpha": 0.7, "estimate": "gls"}),
        Row("permutation", 0.6, 0.0, 150.0),
    ]

    def verdicts(rows: list[Row]) -> list[bool | None]:
        return [holds for _, holds, _ in Attacked(rows, body).aims()]

    assert verdicts([r for r in rows if "epochs" not in r.settings]) == [True, True, False, True]
    assert verdicts(rows) == [True, False, False, True]
    weak = replace(tuned, z=49.0)
    assert verdicts([rows[0], weak]) == [False, True, None, True]
    on_the_way = Row("pruning", 0.55, 9.9, None, settings={"ratio": 0.7})
    assert verdicts([rows[0], tuned, on_the_way]) == [True, False, None, True]
    assert verdicts([rows[0]]) == [None, None, None, True]
    # what cannot be tested at all is no success of ours, unless it is worth less
    removed = Row("channel-removal", 0.56, None, None, settings={"ratio": 0.5})
    assert verdicts([*rows[:2], rows[6], removed]) == [True, True, False, True]
    assert verdicts([*rows[:2], rows[6], replace(removed, accuracy=0.54)]) == [True, True, True, True]
    assert verdicts([*rows[:2], rows[4]]) == [True, True, None, True]  # a student is a new model
    coalition = Row("adaptive-fine-tuning", 0.6, 3.0, None, settings={"estimate": "sum", "coalition": 8})
    assert verdicts([*rows[:2], coalition]) == [True, True, False, True]  # the paper knows none
    assert verdicts([*rows[:2], replace(rows[3], accuracy=0.56)]) == [True, False, None, True]
    body["innocents"].append({"z_anchor": 4.1})
    assert verdicts([rows[0]])[-1] is False


def test_the_docs_tables_of_a_resnet_are_what_was_measured(root: Path) -> None:
    """docs/attacks.md, "On a ResNet-18" and "Estimates of the key": each accuracy with its z, and each cosine."""
    found = read_attacked(root / "results" / "attacks")["cifar100-resnet18-k32-iid-rho0.05-s0"]
    page = (root / "docs" / "attacks.md").read_text()
    section = page.split("**On a ResNet-18**")[1].split("**An attacker who goes slowly**")[0]
    pairs = {(f"{100 * row.accuracy:.2f} %", f"{row.best:.1f}".replace("-", "−")) for row in found.last}
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    shown = [
        pair for _, accuracies, zs in lines[1:] for pair in zip(accuracies.split("; "), zs.split("; "), strict=True)
    ]
    assert len(shown) == 18
    assert {(accuracy, z.strip("*")) for accuracy, z in shown} <= pairs
    assert f"{len(found.rows) - 1} models in" in section
    assert f"z = {found.original.z:.1f} as released" in section
    least = min((aim[2].split(" at ")[0].removeprefix("least z = ") for aim in found.aims()[1:3]), key=float)
    assert f"within five points leaves z ≥ {least}." in section
    near = [row for row in found.rows if row.attack != ORIGINAL and row.accuracy >= found.original.accuracy - 0.05]
    assert f"{len(found.last)} attacks" in section
    assert f"Those are {len(near)} models, and none was trained." in section
    beaten = [row for row in found.rows if row.attack != "distillation" and (row.best or 0.0) < 6]
    assert [dict(row.settings) for row in beaten] == [{"fraction": 0.2, "alpha": 0.7, "estimate": "regression"}]
    plain = next(row for row in found.last if row.attack == "fine-tuning" and row.fraction == 0.2)
    student = next(row for row in found.last if row.attack == "distillation" and row.fraction == 0.2)
    falls = [round(100 * (found.original.accuracy - row.accuracy)) for row in (*beaten, plain, student)]
    assert falls == [14, 12, 11]  # "fourteen", "twelve" and "eleven" points, "two below plain fine-tuning"
    short, readme = (" ".join((root / name).read_text().split()) for name in ("docs/measured.md", "README.md"))
    assert f"{len(found.last)} attacks with the paper's budgets. The {len(near)} that cost less than five" in short
    assert f"left z ≥ {int(float(least))}. " in short
    assert f"after {len(near)} attacks that cost less than five points | | | z ≥ {int(float(least))} |" in readme
    assert "a distilled student, eleven points below, has no mark" in short
    assert "A distilled student, eleven points below, has no mark" in readme
    trained = [row for row in found.rows if row.attack in ("fine-tuning", "adaptive-fine-tuning")]
    assert max(row.accuracy for row in trained) < found.original.accuracy - 0.05
    table = page.split("For the ResNet-18 above")[1].split("**What that is good for.**")[0]
    cosines = [
        line.strip("| ").replace("*", "").split(" | ")[1:] for line in table.splitlines() if line.startswith("| ")
    ]
    hows = ("sum", "last", "regression", "gls")
    by = {(entry["coalition"], entry["estimate"]): f"{entry['cosine']:.3f}" for entry in found.body["estimates"]}
    assert cosines[1:] == [[by[coalition, how] for how in hows] for coalition in (0, 8, 16)]


def test_the_docs_table_of_slow_attackers_is_what_was_measured(root: Path) -> None:
    """docs/attacks.md, "An attacker who goes slowly": who, α and rate of each cell; short in README and measured.md."""
    found = read_attacked(root / "results" / "attacks")["cifar100-resnet18-k32-iid-rho0.05-s1"]
    page = (root / "docs" / "attacks.md").read_text()
    section = page.split("**An attacker who goes slowly**")[1].split("**On a language model**")[0]
    z, accuracy = found.original.z or 0.0, found.original.accuracy
    assert f"{100 * accuracy:.2f} %, z = {z:.1f} as released" in " ".join(section.split())
    assert f"{len(found.rows) - 1} models in all" in section

    def cell(row: Row) -> tuple[str, int]:
        how, size, alpha = (row.settings.get(key) for key in ("estimate", "coalition", "alpha"))
        name = (
            f"adaptive, {how}{f' of {size} of the 32 members' if size else ''}, α = {alpha}" if how else "fine-tuning"
        )
        return name, 0 if row.settings.get("lr") else 1

    measured = {cell(row): f"{100 * row.accuracy:.2f} %, {row.best:.1f}".replace("-", "−") for row in found.last}
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    shown = {
        (name.strip(), i): text.strip().replace("*", "")
        for name, *cells in lines
        for i, text in enumerate(cells)
        if text.strip()
    }
    assert len(shown) == 15
    assert shown.items() <= measured.items()
    trained = [row for row in found.last if row.attack != ORIGINAL]
    slow = [row for row in trained if row.settings.get("lr")]
    least = min(row.best or 0.0 for row in slow)
    assert len(slow) == 11
    assert min(row.accuracy for row in slow) > accuracy - 0.05
    assert f"nobody comes below z = {least:.1f}." in section
    half = {"fraction": 0.2, "alpha": 0.7, "estimate": "gls", "coalition": 16, "lr": 0.0001, "epoch": 50}
    earlier = next(row for row in found.rows if row.settings == half)
    assert f"(from {earlier.best:.1f} after 50)" in section
    plain = next(row for row in trained if row.attack == "fine-tuning" and row not in slow)
    removed = {cell(row)[0]: row for row in trained if (row.best or 0.0) < 6}
    falls = {name: round(100 * (accuracy - row.accuracy)) for name, row in removed.items()}
    assert falls["adaptive, gls of 8 of the 32 members, α = 0.7"] == 13  # "a quarter of the members ... thirteen"
    assert falls["adaptive, gls of 16 of the 32 members, α = 0.7"] == 12
    assert 0 < plain.accuracy - removed["adaptive, gls of 16 of the 32 members, α = 0.7"].accuracy < 0.01
    other = read_attacked(root / "results" / "attacks")["cifar100-resnet18-k32-iid-rho0.05-s0"]
    fall = next(
        round(100 * (other.original.accuracy - row.accuracy))
        for row in other.last
        if row.attack != "distillation" and (row.best or 0.0) < 6
    )
    assert (min(falls.values()), max(*falls.values(), fall)) == (12, 14)
    assert round(100 * (accuracy - plain.accuracy)) == 12
    short, readme = (" ".join((root / name).read_text().split()) for name in ("docs/measured.md", "README.md"))
    assert "removed the mark and twelve to fourteen points, twelve of which plain fine-tuning costs as well" in short
    assert f"stayed within five points as well and left z ≥ {int(least)}." in short
    assert f"by half of the members too | | | z ≥ {int(least)} |" in readme
    assert "takes z to 0 for twelve to fourteen points of accuracy" in readme


# --- attackers who know the test by layers ----------------------------------------------------------------


def test_the_plan_by_layers_has_every_estimate_coalition_and_rate() -> None:
    groups = layered_plan((8, 16), observed=True)
    assert all(len({(job.by, job.fraction) for job in group}) == 1 and len(group) <= 8 for group in groups)
    jobs = [job for group in groups for job in group]
    assert len(set(jobs)) == len(jobs)
    everybody = {(how, c) for how in ("sum", "regression", "gls") for c in (0, 8, 16)}
    strongest = {("gls", c) for c in (0, 8, 16)}

    def who(lr: float = 1e-3, **wanted: Any) -> set[tuple[str, int]]:
        mine = [j for j in jobs if j.lr == lr and all(getattr(j, name) == value for name, value in wanted.items())]
        return {(job.estimate, job.coalition) for job in mine}

    assert who(amounts="oracle") == who(attack="adaptive-fine-tuning", alpha=0.7) == everybody
    assert who(amounts="expected") == strongest
    for lr in (3e-4, 1e-4):
        assert who(lr, attack="fine-tuning") == {("", 0)}
        assert who(lr, amounts="oracle") == strongest
        assert who(lr, attack="adaptive-fine-tuning") == {("gls", 0), ("gls", 16)}
        assert all(who(lr, by=by) == strongest for by in ("block", "row"))
    assert all(who(by=by, weights="even") == strongest | {("sum", 0), ("sum", 16)} for by in ("block", "row"))
    assert all(who(weights=w) == {("gls", 0), ("gls", 16)} for w in ("random", "alternating"))
    assert {job.estimate for group in layered_plan((), observed=False) for job in group} == {"", "sum"}


def test_one_part_is_as_the_whole_and_many_push_each() -> None:
    made = models.make("cnn", 4, 3, 16, 0)
    layout = ModelLayout.of(made)
    start = torch.from_numpy(layout.flatten(made))
    generator = torch.Generator().manual_seed(5)
    guess = torch.randn(layout.coordinates, generator=generator) + start[: layout.coordinates]
    x = torch.randn(6, 1, 16, 16, 16, 3, generator=generator)
    y = torch.randint(0, 4, (6, 1, 16), generator=generator)
    place: tuple[Any, ...] = (layout, 2, 4, (16, 16, 3), torch.device("cpu"))
    whole = Attackers(models.make("cnn", 4, 3, 16, 9), *place, batch=16)
    whole.begin([Attacker(start, guess, 0.7)])
    whole.epoch(x, y)
    parted = PartedAttackers(
        models.make("cnn", 4, 3, 16, 9), *place, batch=16, most=5000, anchor=torch.zeros_like(start)
    )
    one = torch.zeros(layout.coordinates, dtype=torch.int64)
    parted.begin_parts([Attacker(start, guess, 0.7)], one, ["even"])
    parted.epoch(x, y)
    assert torch.allclose(parted.model(0), whole.model(0), atol=2e-4)
    with pytest.raises(InputError, match="whole rows"):
        parted.begin_parts([Attacker(start, guess, 0.7)], torch.arange(layout.coordinates), ["even"])
    rows = torch.from_numpy(parts_of(layout, "row"))
    parted.begin_parts([Attacker(start, guess, 0.9)] * 2, rows, ["alternating", "random"])
    parted.epoch(x, y)
    for k in range(2):
        assert not torch.allclose(parted.model(k), whole.model(0), atol=2e-4)


def test_a_suite_by_layers(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs" / RUN
    runs.mkdir(parents=True)
    (runs / "checkpoint.pt").write_bytes((folder / "runs" / RUN / "checkpoint.pt").read_bytes())
    places = ["--results", str(tmp_path), "--runs", str(tmp_path / "runs"), "--device", "cpu", "--epochs", "1"]
    for only in ("removal, *estimate=gls*", "adaptive-by-part, *alpha=0.9, estimate=gls*"):
        CliRunner().invoke(app, ["lab", "attack", RUN, "--layers", "--only", only, *places], catch_exceptions=False)
    rows = read_attacked(tmp_path / "attacks")[RUN].rows
    keys = read_attacked(tmp_path / "attacks")[RUN].body["random_keys"]
    assert rows[0].q is not None
    taken = [row for row in rows if row.attack == "removal"]
    assert {(row.settings["amounts"], row.settings.get("lr", 1e-3)) for row in taken} == {
        ("oracle", 1e-3), ("oracle", 3e-4), ("oracle", 1e-4), ("expected", 1e-3),
    }  # fmt: skip
    removed = [row for row in taken if row.settings["amounts"] == "oracle"]
    assert all(row.left is not None and row.left < 1 and not row.unsolved for row in removed), "each found its amounts"
    assert all(row.left is None for row in rows if row not in removed)
    at_once = [row for row in removed if row.settings.get("epoch") == 0]
    assert len(at_once) * 2 == len(removed) > 0, "a row for each before the repair"
    assert all(abs(row.z or 0) < 1 and (row.q or 0) < keys["blocks"] for row in at_once)
    assert all(abs(row.z or 9) < 6 for row in removed)
    assert (rows[0].z or 0) > 6
    assert keys["keys"] == 10_000
    assert keys["largest_ratio"] <= 0
    assert abs(keys["mean"] / keys["blocks"] - 1) < 0.1
    assert {row.settings["by"] for row in rows if row.attack == "adaptive-by-part"} == {"block", "row"}
    assert all(row.q is not None and row.log10_q is not None for row in rows)


def test_the_push_away_from_the_estimate_is_its_gradient() -> None:
    """A step with α = 1 and plain gradients would be that of Σ w_p·|cos(θ_p − θ_0p, τ′_p)|: autograd says so too."""
    made = models.make("cnn", 4, 3, 16, 0)
    layout = ModelLayout.of(made)
    generator = torch.Generator().manual_seed(6)
    anchor = torch.from_numpy(layout.flatten(made))
    start = anchor + 0.1 * torch.randn(anchor.shape, generator=generator)
    guess = torch.randn(layout.coordinates, generator=generator)
    parts = torch.from_numpy(parts_of(layout, "row"))
    fleet = PartedAttackers(
        models.make("cnn", 4, 3, 16, 9), layout, 1, 4, (16, 16, 3), torch.device("cpu"), batch=16, most=5000,
        anchor=anchor,
    )  # fmt: skip
    fleet.begin_parts([Attacker(start, guess, 1.0)], parts, ["even"])
    fleet._before(0)
    seen: list[Any] = []
    fleet._descend = lambda *given: seen.append(given[-1].clone())  # type: ignore[method-assign]
    zeros = [torch.zeros(place.stop - place.start) for place in (*fleet.order.carriers, *fleet.order.parameters)]
    fleet._follow(0, 0, zeros)
    theta = start[: layout.coordinates].clone().requires_grad_()
    moved, count = theta - anchor[: layout.coordinates], int(parts.max()) + 1

    def sums(values: Any) -> Any:
        return torch.zeros(count).index_add(0, parts, values)

    cosines = sums(moved * guess) / (sums(moved * moved) * sums(guess * guess)).sqrt()
    (wanted,) = torch.autograd.grad(cosines.abs().mean(), theta)
    assert torch.allclose(seen[0], wanted[fleet.order.to_device[: fleet.order.low]], rtol=1e-3, atol=1e-8)
