"""`quorumark attack …`: a plan over a model of one's own, gone on with after an interruption, and its figures."""

from __future__ import annotations

import csv
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from quorumark.errors import InputError, RecordError
from quorumark.research.page import (
    _KINDS,
    Row,
    _frontier,
    _interval,
    _kind,
    attacks_page,
    figures,
    read_rows,
    rows_digest,
    standalone,
    write_rows,
)

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from quorumark.align.trace import derive_groups  # noqa: E402
from quorumark.model.layout import ModelLayout  # noqa: E402
from quorumark.research.attacks import ATTACKS, suite  # noqa: E402
from quorumark.research.attacks.plan import read_plan  # noqa: E402
from tests.kit import lab  # noqa: E402
from tests.kit.commands import run  # noqa: E402
from tests.kit.consortium import World, make_world  # noqa: E402

CODE = """
import torch
from sklearn.datasets import load_digits

def make():
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10))

def data():
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
    labels = torch.tensor(labels)[order]
    return (inputs[:1437], labels[:1437]), (inputs[1437:], labels[1437:])
"""
PLAN = """
title = "a perceptron"
[target]
code = "code.py"
model = "world/suspect.safetensors"
manifest = "world/consortium.json"
[target.members]
"world/Avon" = "world/Avon.key"
"world/Birch" = "world/Birch.key"
[[attack]]
name = "pruning"
ratio = [0.3, 0.9]
[[attack]]
name = "fine-tuning"
fraction = [0.05, 0.2]
epochs = 2
seeds = [1, 2, 3]
[[attack]]
chain = ["permutation", "rescaling"]
[[attack]]
name = "channel-removal"
ratio = 0.3
[[attack]]
name = "padding"
[[attack]]
name = "averaging"
share = 0.5
"""

pytestmark = pytest.mark.research


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A consortium with a marked perceptron, agreed groups, the code of the network, and a plan."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "code.py").write_text(CODE)
    (folder / "plan.toml").write_text(PLAN)
    (folder / "world").mkdir()
    start = lab.initial(lab.mlp, 3)
    trained = lab.trained(lab.mlp, start, lab.data_of("mlp"), 1, 8, 2e-3)
    groups = derive_groups(lab.mlp(), lab.digits()[0][:1])
    groups.check(ModelLayout.of(lab.mlp()))
    (folder / "world" / "groups.json").write_bytes(groups.to_bytes())
    arrays = tuple({name: tensor.numpy() for name, tensor in model.items()} for model in (start, trained))
    policy = {"z": "6", "groups": groups.digest()}
    world: World = make_world(folder / "world", 3, 2, 0.2, models=(arrays[0], arrays[1]), policy=policy)
    assert world.known.z(world.marked) > 15
    world.save(arrays[1], "unmarked.safetensors")
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_plan_is_run_gone_on_with_and_drawn(folder: Path, environment: dict[str, str]) -> None:
    out = folder / "out"
    done = run(environment, "attack", "run", str(folder / "plan.toml"), "--out", str(out), "--no-plot")
    assert done.returncode == 0, done.stderr
    assert "11 attacked models" in done.stdout
    assert "could not be run: averaging: target must have other for the attack 'averaging'" in done.stderr
    assert re.match(r"0 of \d+: \S", done.stderr), done.stderr  # how far it is, where there is no terminal
    rows = table(out / "results.csv")
    assert list(rows[0])[:6] == ["attack", "budget", "accuracy", "z", "z_aligned", "seconds"]
    by_name = {row["attack"]: row for row in rows}
    original = by_name["none"]
    assert float(original["z"]) > 15
    assert original["z"] == original["z_aligned"]
    assert float(original["accuracy"]) > 0.9
    hidden = by_name["permutation + rescaling"]
    assert abs(float(hidden["z"])) < 6
    assert float(hidden["z_aligned"]) > 0.95 * float(original["z"])
    assert hidden["accuracy"] == original["accuracy"]
    removed = by_name["channel-removal"]
    assert removed["z"] == ""  # no carrier has its shape: not testable as it is
    assert float(removed["z_aligned"]) > 6
    assert int(by_name["padding"]["surplus"]) > 0
    tuned = [row for row in rows if row["attack"] == "fine-tuning"]
    assert len(tuned) == 6
    assert tuned[0]["budget"] == "fraction=0.05, epochs=2, 72 examples, 2 steps"
    # rows that are there are not run again: what an interruption lost is
    lines = (out / "results.csv").read_text().splitlines(keepends=True)
    changed = [line.replace(rows[2]["seconds"], "77.000") if i == 3 else line for i, line in enumerate(lines)]
    (out / "results.csv").write_text("".join(changed[:-2]))
    done = run(environment, "attack", "run", str(folder / "plan.toml"), "--out", str(out))
    assert done.returncode == 0, done.stderr
    again = table(out / "results.csv")
    assert again[2]["seconds"] == "77.000"
    for one, two in zip(rows, again, strict=True):
        assert {**one, "seconds": ""} == {**two, "seconds": ""}
    drawn = ("index.html", "pareto.svg", "pruning.svg", "fine-tuning.svg", "fixed.svg")
    before = {name: (out / name).read_bytes() for name in drawn}
    done = run(environment, "attack", "plot", str(out))
    assert done.returncode == 0, done.stderr
    assert {name: (out / name).read_bytes() for name in drawn} == before


def test_results_of_another_model_are_not_gone_on_with(folder: Path, environment: dict[str, str]) -> None:
    out = folder / "other"
    plan = folder / "other.toml"
    plan.write_text(PLAN.replace("suspect.safetensors", "unmarked.safetensors").partition("[[attack]]")[0]
                    + '[[attack]]\nname = "pruning"\nratio = 0.3\n')  # fmt: skip
    done = run(environment, "attack", "run", str(plan), "--out", str(out), "--no-plot")
    assert done.returncode == 0, done.stderr
    done = run(environment, "attack", "run", str(folder / "plan.toml"), "--out", str(out))
    assert done.returncode == 2
    assert "this one holds attacks on another model" in done.stderr
    plan.write_text(plan.read_text().replace("unmarked.safetensors", "anchor.safetensors"))
    done = run(environment, "attack", "run", str(plan), "--out", str(folder / "x"))
    assert done.returncode == 2
    assert "must be one that can be tested" in done.stderr
    done = run(environment, "attack", "suite", str(folder), "--quick", "--out", str(folder / "x"))
    assert done.returncode == 2
    assert "must be what `quorumark demo --out` of this release left" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = 3\n", r"must have \[\[attack\]\] entries"),
        ("[[attack]]\nname = 'pruning\n", "must be TOML"),
        ("[[attack]]\nname = 'magic'\n", "must be one of adaptive-by-part, adaptive-fine-tuning"),
        ("[[attack]]\nname = 'pruning'\nratios = 0.3\n", "a setting of 'pruning' must be one of ratio"),
        ("[[attack]]\nseeds = [1]\n", "must have a name or a chain"),
        ("[[attack]]\nchain = []\n", "must be a list of attacks"),
        ("[[attack]]\nname = 'noise'\nseeds = 3\n", "seeds must be a list"),
        ("surprise = 1\n[[attack]]\nname = 'noise'\n", "must have only attack, seeds, target, title"),
    ],
)
def test_plans_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_plan(tmp_path / "plan.toml")


def test_plans_that_come_along() -> None:
    quick, paper = read_plan("quick"), read_plan("paper")
    everybody = set(ATTACKS) - {"rotation", "residual-rotation"}  # those are for transformers only
    assert {name for job in quick.jobs for name, _ in job.steps} == everybody
    assert {name for job in paper.jobs for name, _ in job.steps} == everybody
    assert len({job.key for job in paper.jobs}) == len(paper.jobs) > len(quick.jobs)
    with pytest.raises(InputError, match="must name code, model, manifest and members"):
        suite.read_subject(quick)


# --- figures ----------------------------------------------------------------------------------------------


def made_up() -> list[Row]:
    rng = np.random.default_rng(0)
    rows = [Row("none", 0.98, 21.0, 21.0)]
    for fraction in (0.05, 0.2):
        for seed in (1, 2, 3):
            z = 20 - 10 * fraction + rng.normal()
            rows.append(Row("fine-tuning", 0.97, z, z, 1.0, seed, {"fraction": fraction}, 100, 10))
    rows += [Row("quantisation", 0.9, 15.0, 15.0, settings={"scheme": s}) for s in ("static8", "static4")]
    rows += [Row("decoys <b>", 0.98, None, 0.4, surplus=40), Row("gone", 0.1, None, None)]
    return rows


class Ids(HTMLParser):
    """Every id of a page, and what it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href") and not str(value).startswith("#"):
                self.loads.append(f"{tag} {value}")
        if tag in ("script", "img", "link", "iframe"):
            self.loads.append(tag)


def test_one_page_with_everything() -> None:
    rows = made_up()
    html = attacks_page("our model & co", rows, 6.0)
    assert attacks_page("our model & co", rows, 6.0) == html
    found = Ids()
    found.feed(html)
    assert not found.loads
    assert len(found.ids) == len(set(found.ids))
    assert html.count("<svg") == 4  # Pareto, two with a dial, one without
    assert "our model &amp; co" in html
    assert "decoys <b>" not in html
    assert "After decoys &lt;b&gt; the model has more channels than it should" in html
    assert "inconclusive: decoys?" in html
    drawn = figures(rows, 6.0)
    assert list(drawn) == ["pareto", "fine-tuning", "quantisation", "fixed"]
    assert "stroke-dasharray" in drawn["pareto"]
    assert "20 % of the data" in drawn["pareto"]
    assert "currentColor" in drawn["pareto"]
    with pytest.raises(RecordError, match="lack the model as it was released"):
        figures(rows[1:], 6.0)


def adaptive() -> list[Row]:
    """Three shares of the data, four estimates, and coalitions at one of the shares."""
    rows = [Row("none", 0.7, 250.0, None)]
    for fraction, alpha in itertools.product((0.01, 0.05, 0.2), (0.1, 0.3, 0.7)):
        for estimate, coalition in itertools.product(("sum", "last", "regression", "gls"), (None, 8, 16)):
            if coalition is None or fraction == 0.05:
                more = {} if coalition is None else {"coalition": coalition}
                settings = {"fraction": fraction, "alpha": alpha, "estimate": estimate, **more}
                z = 200 - 300 * alpha * len(estimate) / 10 - (coalition or 0)
                rows.append(Row("adaptive-fine-tuning", 0.6, z, None, settings=settings))
    return rows


def words_of(svg: str) -> dict[str, list[float]]:
    """Every text of a figure, and how far to the right it begins (or is centred)."""
    found: dict[str, list[float]] = {}
    for place, text in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        at = re.search(r'(?:translate\(|x=")(-?[\d.]+)', place)
        assert at is not None
        found.setdefault(text, []).append(float(at[1]))
    return found


def panels_of(svg: str) -> set[tuple[float, float]]:
    """Where the panels begin and end, from left to right."""
    rects = re.findall(r'<clipPath id="[^"]*">\s*<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    return {(float(x), float(x) + float(width)) for x, width in rects}


def lines_of(svg: str) -> set[str]:
    """The colours of lines."""
    return set(re.findall(r"fill: none; stroke: (#[0-9a-f]{6})", svg))


def test_a_panel_for_each_share_of_the_data() -> None:
    svg = figures(adaptive(), 6.0)["adaptive-fine-tuning"]
    words, panels = words_of(svg), panels_of(svg)
    assert "None" not in svg
    assert len(panels) == 3
    titles = [words[title] for title in ("1 % of the data", "5 % of the data", "20 % of the data")]
    assert all(low < at < high for [at], (low, high) in zip(titles, sorted(panels), strict=True))
    beside = ("estimate", "sum", "last", "regression", "gls", "who", "anybody", "8 members", "16 members", "z* = 6")
    for word in beside:  # each once, right of all data
        assert len(words[word]) == 1
        assert words[word][0] > max(end for _, end in panels)
    assert len(lines_of(svg)) == 5  # four estimates and the released model
    alone = figures([row for row in adaptive() if row.fraction in (0.0, 0.01)], 6.0)["adaptive-fine-tuning"]
    assert len(panels_of(alone)) == 2  # z and accuracy
    assert "% of the data" not in alone
    assert "anybody" not in alone


def test_no_colour_is_used_twice() -> None:
    rows = [Row("none", 0.7, 250.0, None)]
    for k in range(1, 10):
        for ratio in (0.3, 0.5):
            rows.append(Row("pruning", 0.5 + ratio / 10, 100 * ratio + k, None, settings={"ratio": ratio, "part": k}))
            tuned = {"fraction": k / 100, "epochs": 1}
            rows.append(Row("fine-tuning", 0.5 + ratio / 10, 100 * ratio + k, None, settings=tuned))
    drawn = figures(rows, 6.0)
    assert len(lines_of(drawn["pruning"])) == 9 + 1  # the released model's, too
    assert len(lines_of(drawn["pareto"])) == 9 + 1  # no data


def test_markers_of_the_pareto_plot() -> None:
    assert {name for name in ATTACKS if _kind(name)[1] != name} == set()  # who adds an attack says its kind
    assert _kind("permutation + rescaling") == _kind("pruning + noise") != _kind("pruning")
    assert _kind("magic") == ("<", "other")
    names = [name for names in _KINDS.values() for name in names]
    assert len(names) == len(set(names))
    rows = [*adaptive(), Row("permutation + rescaling", 0.7, 1.0, 250.0), Row("permutation + noise", 0.7, 1.0, 240.0)]
    svg = figures([*rows, Row("noise", 0.6, 99.0, None), Row("merging", 0.6, 98.0, None)], 6.0)["pareto"]
    words = words_of(svg)
    [(_, end)] = panels_of(svg)
    for word in ("chain of attacks", "noise, merging", "adaptive-fine-tuning", "none, as released", "no data"):
        assert len(words[word]) == 1
        assert words[word][0] > end
    assert "z* = 6" in words
    assert "permutation" not in svg
    assert "fewer epochs" not in svg
    assert "fewer epochs" in figures([*rows, Row("noise", 0.6, 9.0, None, settings={"epoch": 1})], 6.0)["pareto"]


def test_rows_that_name_no_learning_rate_have_the_usual_one() -> None:
    named = {"fraction": 0.2, "estimate": "gls"}
    rows = [Row("adaptive", 0.5, 9.0, None, settings={**named, "alpha": alpha}) for alpha in (0.3, 0.7)]
    rows += [Row("adaptive", 0.6, 8.0, None, settings={**row.settings, "lr": 0.0001}) for row in rows]
    words = words_of(figures([Row("none", 0.9, 20.0, 20.0), *rows], 6.0)["adaptive"])
    assert {"0.001", "0.0001", "lr"} <= set(words)


def test_z_is_drawn_twice_only_where_alignment_changes_it() -> None:
    def drawn(z: float | None, aligned: float | None) -> str:
        rows = [Row("pruning", 0.9, z, aligned, settings={"ratio": ratio}) for ratio in (0.3, 0.5)]
        return figures([Row("none", 0.9, 20.0, 20.0), *rows], 6.0)["pruning"]

    assert "as it is" in drawn(1.0, 19.0)
    assert "as it is" not in drawn(19.0, 19.01)
    assert "as it is" not in drawn(19.0, None)
    assert "z, aligned" in drawn(None, 19.0)


def test_figures_are_the_same_bytes_in_another_process(tmp_path: Path, environment: dict[str, str]) -> None:
    many = [dict.fromkeys(("part", "text", "epochs", "batch", "decay"), k) | {"ratio": k / 10} for k in (1, 2, 3)]
    rows = [*adaptive(), *(Row("pruning", 0.6, 99.0, None, settings=settings) for settings in many)]
    write_rows(tmp_path / "results.csv", rows)
    code = (
        "import pathlib, sys; from quorumark.research.page import figures, read_rows;"
        "print(*figures(read_rows(pathlib.Path(sys.argv[1])), 6.0).values())"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "results.csv")]
    first, second = (
        subprocess.run(words, env=environment | {"PYTHONHASHSEED": seed}, check=True, capture_output=True).stdout
        for seed in ("1", "2")
    )
    assert first == second
    assert b"<svg" in first


def test_a_figure_as_a_file_is_on_white() -> None:
    svg = figures(made_up(), 6.0)["pareto"]
    head = '<?xml version="1.0" encoding="utf-8"?>\n<!-- drawn from abc -->\n<svg style="background: #fff" '
    assert standalone(svg, "abc").startswith(head)
    assert "style=" not in svg[: svg.index(">")]  # one attribute of a name: XML takes no second
    assert "background" not in svg  # a page has its own


def test_a_figure_names_the_rows_that_it_was_drawn_from() -> None:
    rows = made_up()
    digest = rows_digest(rows, 6.0)
    assert digest != rows_digest(rows, 4.0)
    assert digest != rows_digest(rows[:-1], 6.0)
    assert digest != rows_digest([*rows[:-1], replace(rows[-1], accuracy=0.123)], 6.0)


def test_the_pareto_plot_has_q_beside_z_where_it_was_measured() -> None:
    rows = made_up()
    assert len(panels_of(figures(rows, 6.0)["pareto"])) == 1
    layered = [replace(row, q=100.0, log10_q=-50.0 - i) for i, row in enumerate(rows)]
    svg = figures(layered, 6.0)["pareto"]
    assert len(panels_of(svg)) == 2
    words = words_of(svg)
    for word in ("z, the larger of aligned and unaligned", "Q by layers: −log10 of its bound", "z* = 6",
                 "PASSED by layers"):  # fmt: skip
        assert len(words[word]) == 1
    some = [*layered[:3], *rows[3:]]  # a row without Q is in the first panel only
    assert len(panels_of(figures(some, 6.0)["pareto"])) == 2
    assert figures(some, 6.0)["pareto"] != svg


def test_rows_are_read_back(tmp_path: Path) -> None:
    rows = made_up()
    write_rows(tmp_path / "results.csv", rows)
    back = read_rows(tmp_path / "results.csv")
    assert [row.key for row in back] == [row.key for row in rows]
    assert back[-1].z is None
    text = (tmp_path / "results.csv").read_text()
    (tmp_path / "results.csv").write_text(re.sub(r"0\.98\d*", "good", text, count=1))
    with pytest.raises(RecordError, match=r"line 2 of .* is not a result"):
        read_rows(tmp_path / "results.csv")


def test_the_frontier_is_what_nobody_betters() -> None:
    points = [(5.0, 0.9), (5.0, 0.8), (3.0, 0.5), (4.0, 0.4), (9.0, 0.95), (8.0, 0.9)]
    rows = [Row("noise", accuracy, z, None) for z, accuracy in points]
    assert _frontier(rows, lambda row: row.best) == [(3.0, 50.0), (5.0, 90.0), (9.0, 95.0)]


def test_intervals_hold_the_mean_95_times_in_100() -> None:
    """2,000 samples of three: the share within is 0.95 ± 0.015, three of its deviations."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        mean, half = _interval([float(v) for v in rng.normal(3.0, 2.0, 3)])
        hits += abs(mean - 3.0) <= half
    assert abs(hits / 2000 - 0.95) < 0.015
    assert _interval([4.0]) == (4.0, 0.0)
