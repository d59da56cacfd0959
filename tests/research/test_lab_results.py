"""The lab's configurations, and the pages and figures made of its results."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quorumark.cli import app
from quorumark.errors import InputError, RecordError, RoundError
from quorumark.model.layout import read_safetensors
from quorumark.research.lab.config import configurations, read
from quorumark.research.lab.results import groups, read_all
from tests.kit.lab_runs import MINI

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.research, pytest.mark.usefixtures("one_thread")]


def test_settings_are_checked() -> None:
    for wrong in ({"strength": "rho"}, {"strength": "loud:1"}, {"partition": "dirichlet:x"}, {"rounds": 0},
                  {"packing": 2}, {"packing": 5, "strength": "rho:0.05"}, {"label": "r-60"},
                  {"packing": 2, "strength": "rho:0.05", "dither": 3.0},
                  {"packing": 2, "strength": "per-client-rho:0.05"}):  # fmt: skip
        with pytest.raises(InputError):
            replace(MINI, **wrong)
    assert replace(MINI, partition="dirichlet:0.5").gamma == 0.5
    with pytest.raises(InputError, match="one of"):
        read("table9")


def test_the_paper_s_cells_have_their_configurations() -> None:
    runs = {name: {run.id for run in read(name).runs} for name in configurations()}
    assert set(runs) == {
        "clients",
        "code",
        "dither",
        "forecast",
        "kept",
        "language",
        "layers",
        "null",
        "packing",
        "robustness",
        "strength",
        "table1",
        "table2",
    }
    for strength in ("none", "rho0.05", "paper-code0.025", "paper-code0.05", "paper-code0.075", "paper-code0.1"):
        for dataset in ("cifar10", "cifar100", "tiny-imagenet"):
            assert {f"{dataset}-resnet18-k32-iid-{strength}-s{seed}" for seed in (0, 1, 2)} <= runs["table1"]
    assert {f"cifar100-resnet18-k32-dirichlet{g}-none-s0" for g in ("0.25", "0.5", "0.75", "1.0")} <= runs["table2"]
    for strength in ("per-client0.1", "per-client-paper-code0.1", "paper-code0.025"):
        assert {f"cifar10-resnet18-k{k}-iid-{strength}-s0" for k in (4, 8, 16, 32, 64, 128)} <= runs["clients"]
    first = read("table1").runs[0]
    assert (first.rounds, first.global_batch, first.lr, first.decay) == (300, 2048, 1e-3, 1e-4)
    assert read("table1").figure("accuracy", first) == "88.08 ± 0.53"


def _miniature(name: str, path: Path) -> int:
    """A configuration with every kind of run that it has, small: one seed, few members, images of noise with bars."""
    lines, seen = ['title = "miniature"', f'plot = "{read(name).plot}"'], set()
    for run in read(name).runs:
        members = 4 if run.members <= 32 else 6
        chosen = (run.strength, run.partition, members, run.augment, bool(run.null_keys), run.dither, run.packing)
        if run.seed != read(name).runs[0].seed or chosen in seen:
            continue
        seen.add(chosen)
        model = "cnn" if "autoaugment" in run.augment else "mlp"  # told apart by their ids
        lines += [
            "[[grid]]", 'dataset = "shapes"', f'model = "{model}"', "rounds = 3", "global_batch = 192",
            f'strength = "{run.strength}"', f'partition = "{run.partition}"', f"members = {chosen[2]}",
            f"augment = {json.dumps(run.augment)}", f"null_keys = {20 if run.null_keys else 0}",
            f"dither = {run.dither}", f"continuity = {str(run.continuity).lower()}",
            f"packing = {run.packing}", f'label = "{run.label}"', f"kept = {str(run.kept).lower()}",
            f"decay = {run.decay}",
        ]  # fmt: skip
    path.write_text("\n".join(lines))
    return len(seen)


@pytest.mark.parametrize("name", [name for name in configurations() if read(name).task == "vision"])
def test_a_miniature_of_every_configuration(name: str, tmp_path: Path) -> None:
    count = _miniature(name, tmp_path / "mini.toml")
    folders = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    words = ["lab", "run", str(tmp_path / "mini.toml"), *folders, "--device", "cpu"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    files = sorted((tmp_path / "results").glob("*.json"))
    assert len(files) == count
    for file in files:
        body = json.loads(file.read_text())
        assert body["rounds"] == 3
        assert set(body["z"]["released"]) >= {"balanced-anchor/v1", "global-cosine/v1", "mean-tensor-cosine/v1"}
        assert (body["rho"] is None) == (body["settings"]["strength"] == "none")
        released = tmp_path / "runs" / body["id"] / "released.safetensors"
        assert sum(t.size for n, t in read_safetensors(released).items() if "tracked" not in n) == body["parameters"]
    again = CliRunner().invoke(app, words, catch_exceptions=False)
    assert again.output.count("done (3 rounds)") == count


def test_runs_abreast_are_the_same_runs(tmp_path: Path) -> None:
    """Bit for bit: nothing that threads share decides anything, not even the numbers that first weights come from."""
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "cnn"\nmembers = 2\nrounds = 3\nglobal_batch = 480\n'
        '[[grid]]\nstrength = ["none", "relative:0.1"]\nseed = [0, 1, 2]\n'
    )
    made = {}
    for abreast in ("1", "3"):
        folder = tmp_path / abreast
        words = ["lab", "run", str(config), "--results", str(folder / "results"), "--runs", str(folder / "runs")]
        done = CliRunner().invoke(app, [*words, "--device", "cpu", "--abreast", abreast], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert done.output.count("3 rounds, test") == 6
        made[abreast] = {
            path.parent.name: path.read_bytes() for path in (folder / "runs").glob("*/released.safetensors")
        }
        told = [json.loads(file.read_text()).get("abreast") for file in (folder / "results").glob("*.json")]
        assert told == 6 * [None if abreast == "1" else 3]  # what its seconds are worth
    assert len(made["1"]) == 6
    assert len(set(made["1"].values())) >= 3  # seeds; before the first marked round the mark changes nothing
    assert made["1"] == made["3"]


def test_a_run_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "mlp"\nmembers = 2\nrounds = 2\nglobal_batch = 480\n'
        '[[grid]]\nstrength = "none"\nseed = [0, 1, 2, 3]\n'
    )
    checkpoint = tmp_path / "runs" / "shapes-mlp-k2-iid-none-s0" / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    torch.save({"settings": {}}, checkpoint)
    words = ["lab", "run", str(config), "--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    failed = CliRunner().invoke(app, [*words, "--device", "cpu", "--abreast", "2"])
    assert isinstance(failed.exception, RecordError)
    assert {file.stem[-2:] for file in (tmp_path / "results").glob("*.json")} == {"s1", "s2", "s3"}


def test_results_become_a_page_and_a_changed_page_is_noticed(tmp_path: Path) -> None:
    from quorumark.research.lab.page import page as make_page

    results, page = tmp_path / "results", tmp_path / "page.md"
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "mlp"\nmembers = 2\nrounds = 2\nglobal_batch = 480\n'
        '[[grid]]\nstrength = ["none", "relative:0.1"]\n'
    )
    runs = ["--results", str(results), "--runs", str(tmp_path / "runs")]
    CliRunner().invoke(app, ["lab", "run", str(config), *runs, "--rounds", "1"], catch_exceptions=False)
    CliRunner().invoke(app, ["lab", "run", str(config), *runs], catch_exceptions=False)  # goes on to the second round
    bodies = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
    assert [body["rounds"] for body in bodies] == [2, 2]
    for body in bodies:  # as if they were of table 1
        strength = {"none": "none", "relative:0.1": "rho:0.05"}[body["settings"]["strength"]]
        run = replace(read("table1").runs[0], strength=strength)
        body["id"], body["settings"] = run.id, {**run.asdict(), "rounds": 2}
        (results / f"{body['id']}.json").write_text(json.dumps(body))
    for file in results.glob("shapes*.json"):
        file.unlink()
    words = ["lab", "table", "--results", str(results), "--out", str(page)]
    astray = CliRunner().invoke(app, [*words[:3], str(tmp_path / "nowhere"), *words[4:]])
    assert isinstance(astray.exception, InputError)
    assert not page.exists()
    assert CliRunner().invoke(app, words).exit_code == 0
    text = page.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| cifar10 | 32 | iid | none | 88.08"))
    assert f"{100 * bodies[0]['accuracy']['released']:.2f}" in row
    assert "shorter (2 rounds, 1 of 3 seeds)" in row
    assert "| cifar10 | 32 | iid | paper-code:0.1 | 86.89 ± 0.32 |  |" in text
    assert CliRunner().invoke(app, [*words, "--check"]).exit_code == 0
    page.write_text(text.replace("88.08", "88.09"))
    assert isinstance(CliRunner().invoke(app, [*words, "--check"]).exception, RecordError)
    # differences are of the runs that are shown: a pair of short runs says nothing about a long one
    every = {body["id"]: body for body in map(json.loads, (file.read_text() for file in results.glob("*.json")))}
    long = {name: {**body, "rounds": 300, "accuracy": {"released": 0.5}} for name, body in every.items()}
    for name, body in every.items():
        other = name.replace("-s0", "-s1")
        short = {"released": 0.5 if "none" in name else 0.1}
        long[other] = {**body, "id": other, "settings": {**body["settings"], "seed": 1}, "accuracy": short}
    row = next(line for line in make_page([read("table1")], long).splitlines() if "| 32 | iid | rho:0.05 |" in line)
    assert "full (300 rounds, 1 of 3 seeds); seed 1: 2 rounds, 10.00, z " in row
    assert "| +0.00 |" in row
    # a result stands for the run that it is of, and for no other
    file = results / f"{bodies[0]['id']}.json"
    for change, match in (
        ({"lr": 0.5}, "was run with lr 0.5"),
        ({"dataset": "shapes"}, "named after"),
        (None, "named"),
    ):
        settings = None if change is None else {**bodies[0]["settings"], **change}
        file.write_text(json.dumps({**bodies[0], "settings": settings}))
        with pytest.raises(RecordError, match=match):
            CliRunner().invoke(app, words, catch_exceptions=False)
    file.write_text(json.dumps(bodies[0]))
    (results / "forged.json").write_text("{}")
    with pytest.raises(RecordError, match="named after"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_only_chooses_runs_and_their_order(tmp_path: Path) -> None:
    config = tmp_path / "mini.toml"
    config.write_text(
        'title = "mini"\n[run]\ndataset = "shapes"\nmodel = "mlp"\nmembers = 2\nrounds = 1\nglobal_batch = 480\n'
        '[[grid]]\nstrength = ["none", "rho:0.02", "rho:0.05"]\nseed = [0, 1]\n'
    )
    words = ["lab", "run", str(config), "--results", str(tmp_path), "--runs", str(tmp_path)]
    late = CliRunner().invoke(app, [*words, "--seconds", "1"], catch_exceptions=False)
    assert late.output.count("no time left") == 6
    done = CliRunner().invoke(app, [*words, "--only", "*rho0.05*,*none*", "--seed", "1"], catch_exceptions=False)
    ends = [line.split(":")[0] for line in done.output.splitlines() if "1 rounds, test" in line]
    assert ends == ["shapes-mlp-k2-iid-rho0.05-s1", "shapes-mlp-k2-iid-none-s1"]
    with pytest.raises(InputError, match="must leave some"):
        CliRunner().invoke(app, [*words, "--only", "cifar*"], catch_exceptions=False)


def test_a_run_that_diverges_ends_and_the_others_go_on(tmp_path: Path) -> None:
    """Its round is named, nothing is recorded of it, and the command fails in the end."""
    text = """
        title = "one of two diverges"
        [run]
        dataset = "shapes"
        model = "mlp"
        global_batch = 64
        members = 2
        rounds = 3
        [[grid]]
        strength = "none"
        lr = 1e30
        [[grid]]
        strength = "rho:0.05"
    """
    (tmp_path / "two.toml").write_text(text)
    words = ["lab", "run", str(tmp_path / "two.toml"), "--results", str(tmp_path / "r"), "--runs", str(tmp_path / "c")]
    done = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert isinstance(done.exception, RoundError)
    assert str(done.exception) == "diverged, and not recorded: shapes-mlp-k2-iid-none-s0"
    assert "shapes-mlp-k2-iid-none-s0: round " in done.output
    assert ", the run has diverged; try a smaller learning rate" in done.output
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["shapes-mlp-k2-iid-rho0.05-s0.json"]


def test_a_shorter_run_does_not_take_a_longer_one_s_place(tmp_path: Path) -> None:
    from quorumark.research.lab.results import write

    body = {"id": "a", "rounds": 3}
    assert write(body, tmp_path) is not None
    assert write({"id": "a", "rounds": 2}, tmp_path) is None
    assert json.loads((tmp_path / "a.json").read_text())["rounds"] == 3


def test_readme_and_short_page_say_what_the_runs_found() -> None:
    from quorumark.research.lab.results import BALANCED, best_evidence, groups, read_all
    from quorumark.research.lab.tables import compared_means

    root = Path(__file__).parents[2]
    page, results = " ".join((root / "docs/measured.md").read_text().split()), read_all(root / "results")
    readme = (root / "README.md").read_text()
    found = {
        (runs[0].dataset, runs[0].members, runs[0].strength): best_evidence(runs, results)
        for runs in (*groups(read("clients")), *groups(read("table1")))
    }

    def shown(dataset: str) -> tuple[str, str]:
        marked, plain = found[dataset, 32, "rho:0.05"], found[dataset, 32, "none"]
        assert [body["rounds"] for body in (*marked, *plain)] == [300] * (3 + 3)
        z = np.mean([body["z"]["released"][BALANCED] for body in marked])
        assert f" | {accuracy(marked)} % | {accuracy(plain)} % | z = {z:.0f} |" in readme
        return f"z = {z:.0f} at {accuracy(marked)} %", f"{accuracy(plain)} % without"

    def accuracy(bodies: list[dict[str, Any]]) -> str:
        found = [100 * body["accuracy"]["released"] for body in bodies]
        return f"{np.mean(found):.1f}" + (f" ± {np.std(found, ddof=1):.1f}" if len(found) > 1 else "")

    assert "on CIFAR-10 {} accuracy, {} the mark;".format(*shown("cifar10")) in page
    assert "on CIFAR-100 {}, {}.".format(*shown("cifar100")) in page
    changes, most = [], []
    for dataset in ("cifar10", "cifar100"):
        with_it, without = (
            [100 * body["accuracy"]["released"] for body in found[dataset, 32, strength]]
            for strength in ("rho:0.05", "none")
        )
        change, noise = compared_means(with_it, without)
        assert noise is not None
        assert change - noise < -0.1 < change + noise  # "cannot be told"
        changes.append(f"{change:+.2f} ± {noise:.2f}".replace("-", "−"))
        most.append(f"{noise - change:.2f}")
    assert "cannot be told at three seeds: {} and {} points (95 %), which".format(*changes) in page
    assert "which excludes a loss above {} and above {} points and no smaller one.".format(*most) in page
    counts = (4, 8, 16, 32, 64, 128)
    shared, own = (
        [np.mean([body["z"]["released"][BALANCED] for body in found["cifar10", k, strength]]) for k in counts]
        for strength in ("rho:0.05", "per-client-rho:0.05")
    )
    assert f"z stays between {min(shared):.0f} and {max(shared):.0f} from 4 members to 128" in page
    assert f"fall from {own[0]:.0f} to {own[-1]:.0f}." in page


def test_the_page_says_whether_the_mark_costs_accuracy() -> None:
    """True and false only where the whole interval is on one side of the aim; a z that is too small is no success."""
    from quorumark.research.lab.page import page
    from quorumark.research.lab.results import BALANCED, GLOBAL, read_all

    results = read_all(Path(__file__).parents[2] / "results")
    name = "cifar10-resnet18-k32-iid-{}-s{}".format

    def row(change: float, spread: float, z: float = 400, cosine: float = 400) -> list[str]:
        """Three marked runs that differ by `spread` from one to the next, beside three unmarked ones that do so too."""
        bodies = dict(results)
        for strength, mean in (("none", 90.0), ("rho0.1", 90.0 + change)):
            for seed, off in enumerate((-spread, 0.0, spread)):
                body = results[name(strength, seed)]
                zs = {**body["z"]["released"], BALANCED: z, GLOBAL: cosine}
                bodies[body["id"]] = {
                    **body, "accuracy": {**body["accuracy"], "released": (mean + off) / 100}, "z": {"released": zs}
                }  # fmt: skip
        text = page([read("table1")], bodies)
        (line,) = (line for line in text.splitlines() if line.startswith("| cifar10 | rho:0.1 | 3 and 3 |"))
        return line.strip("| ").split(" | ")[3:]

    # t of 4 degrees is 2.776, and the standard error spread·√(2/3)
    assert row(0.0, 0.04) == ["+0.00", "± 0.09", "0.09", "true", "400.0", "400.0", "true (≥ 320)"]
    assert row(0.0, 0.2)[:4] == ["+0.00", "± 0.45", "0.45", "cannot be told at three seeds"]
    assert row(-0.5, 0.2)[3] == "cannot be told at three seeds"
    assert row(1.0, 0.2)[2] == "0.00"  # no loss at all is left
    assert row(-0.6, 0.2)[3] == "false"
    assert row(0.0, 0.04, z=319.0)[-1] == row(0.0, 0.04, cosine=319.0)[-1] == "false (≥ 320)"
    assert f"| {name('rho0.05', 0)} |" in page([read("table1")], results)
    others = {name(s, seed) for s in ("none", "rho0.1") for seed in (1, 2)}
    alone = page([read("table1")], {key: body for key, body in results.items() if key not in others})
    assert "| cifar10 | rho:0.1 | 1 and 1 | " in alone
    assert "| not known | not known | cannot be told at one seed |" in alone


def test_the_forecast_is_near_what_was_measured_in_the_mean_over_seeds(root: Path) -> None:
    """Within max(10 %, 2) in each kind of run that its configuration has."""
    results = read_all(root / "results")
    kinds = groups(read("forecast"))
    assert len(kinds) == 3
    for runs in kinds:
        bodies = [results[run.id] for run in runs]
        told = statistics.fmean(body["expected_z"] for body in bodies)
        measured = statistics.fmean(body["z"]["final"]["balanced-anchor/v1"] for body in bodies)
        assert abs(told - measured) < max(0.1 * measured, 2), runs[0].id


def test_noise_must_come_from_both_sides() -> None:
    """Three seeds of one accuracy with and without: an interval from one side's seeds excludes the truth too often.

    The deviation of three runs is often far too small by chance, and then everything looks significant.
    """
    from quorumark.research.lab.tables import compared_means

    rng, trials = np.random.default_rng(0), 4000
    both = one = 0
    for ours, theirs in rng.normal(90.0, 0.3, (trials, 2, 3)):
        change, noise = compared_means(ours.tolist(), theirs.tolist())
        assert noise is not None
        both += abs(change) > noise
        one += abs(change) > 2 * np.std(ours, ddof=1) * (1 / 3 + 1 / 3) ** 0.5
    assert both / trials < 0.05
    assert one / trials > 0.15
    assert compared_means([90.0, 91.0], [90.0]) == (0.5, None)
    # scipy.stats.ttest_ind(…, equal_var=False) has 3.92 degrees of freedom; 3 here, for a wider interval
    assert compared_means([1.0, 2.0, 4.0], [1.0, 1.5, 3.5])[1] == pytest.approx(
        3.182 * (7 / 9 + 7 / 12) ** 0.5, rel=0.02
    )


def test_rho_of_a_key_for_each_member_is_that_of_all_marks_together() -> None:
    """K marks of S/K with independent signs have a norm of ‖S‖/√K; the state, which knows of one key, says ‖S‖."""
    from quorumark.research.lab.page import page
    from quorumark.research.lab.results import read_all

    results = read_all(Path(__file__).parents[2] / "results")
    shown = page([read("clients")], results).splitlines()
    for run in read("clients").runs:
        if run.per_client and run.id in results:
            row = next(line for line in shown if line.startswith(f"| cifar10 | {run.members} | iid | {run.strength} |"))
            assert f"| {results[run.id]['rho'] / run.members**0.5:.4f} |" in row
    signs = np.random.default_rng(0).choice([-1, 1], (16, 100_000)).sum(axis=0) / 16
    assert np.linalg.norm(signs) / 100_000**0.5 == pytest.approx(16**-0.5, rel=0.02)


@pytest.mark.parametrize("name", ["clients", "strength"])
def test_the_lab_s_figures_are_of_these_results(name: str) -> None:
    """`quorumark lab plot` was run since results changed: what a figure shows is named in it."""
    from quorumark.research.lab.plot import digest, points
    from quorumark.research.lab.results import read_all

    root = Path(__file__).parents[2]
    found = points(read(name), read_all(root / "results"))
    assert digest(found) in (root / "docs" / "figures" / f"lab-{name}.svg").read_text()
    assert digest(found[1:]) != digest(found)


def test_the_figures_of_attacks_and_of_the_setup_are_of_these_results() -> None:
    """`quorumark lab attack RUN --plot` and `quorumark bench plot` were run since the rows changed."""
    from quorumark.research.bench import plot
    from quorumark.research.lab.attacked import read_attacked
    from quorumark.research.page import rows_digest

    root = Path(__file__).parents[2]
    figures, seen = root / "docs" / "figures", 0
    for name, attacked in read_attacked(root / "results" / "attacks").items():
        digest = rows_digest(attacked.rows, 6.0)
        mine = sorted(figures.glob(f"attacks-{name}-*.svg"))
        assert [path.name for path in mine if f"<!-- drawn from {digest} -->" not in path.read_text()] == []
        seen += len(mine)
    assert seen == len(list(figures.glob("attacks-*.svg"))) > 15
    rows = [plot._rows(root / "benchmarks" / "results" / f"{name}.json") for name in ("dkg", "dealer")]
    assert plot.digest(*rows) in (figures / "setup-overhead.svg").read_text()
    assert plot.digest(rows[0][1:], rows[1]) != plot.digest(*rows)


def test_a_figure_s_line_joins_runs_of_one_length() -> None:
    from quorumark.research.lab.plot import Point, joined, points
    from quorumark.research.lab.results import read_all

    drawn = [Point("a", at, 1.0, None, rounds == 300, rounds) for at, rounds in ((4, 30), (8, 30), (32, 300), (64, 30))]
    assert [point.at for point in joined(drawn)] == [4, 8, 64]
    assert [point.at for point in joined(drawn[1:3])] == [32]
    assert joined([]) == []
    found = points(read("clients"), read_all(Path(__file__).parents[2] / "results"))
    code = [point for point in found if point.line == "paper-code:0.025"]
    assert {point.at for point in code} - {point.at for point in joined(code)} == {32}  # 300 rounds among 30
    zs = {point.at: point.papers or 0.0 for point in joined(code)}
    assert (f"{zs[4]:.1f}", f"{zs[8]:.1f}", f"{zs[128]:.1f}") == ("3.7", "4.1", "8.1")  # as the notes say
    assert min(z for at, z in zs.items() if at > 8) > zs[8]
    assert max(zs.values()) == zs[128]


def test_figures_and_timings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "figures" / "f.svg"
    words = ["lab", "plot", "clients", "--out", str(out), "--results"]
    with pytest.raises(InputError, match="with results of clients"):  # from another folder, say: no empty figure
        CliRunner().invoke(app, [*words, str(tmp_path)], catch_exceptions=False)
    assert not out.exists()
    done = CliRunner().invoke(app, [*words, str(Path(__file__).parents[2] / "results")], catch_exceptions=False)
    assert f"drawn: {out}, " in done.output
    assert out.read_text().startswith("<?xml")
    words = ["lab", "time", "--members", "2", "--model", "cnn", "--rounds", "1", "--device", "cpu"]
    shown = CliRunner().invoke(app, [*words, "--profile"], catch_exceptions=False).output
    assert "s a round" in shown
    assert "µs in all" in shown
