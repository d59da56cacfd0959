"""`quorumark try`: a user's file in, an answer out; and what it says of files that cannot be tried."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.errors import InputError, MissingDependencyError, UserCodeError
from tests.kit.commands import run

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from quorumark.trial import TEMPLATES, Options, results, template
from quorumark.trial.run import Prepared, prepare
from quorumark.trial.userfile import Score, open_file

# 33,536 carriers: enough for five rounds, and a key in a second
GOOD = """
import torch
from torch import nn

X = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.randn(64, 4, generator=torch.Generator().manual_seed(2))).argmax(1)

def make():
    return nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 108), nn.ReLU(), nn.Linear(108, 4))

def data(member, members):
    return X[member::members], Y[member::members]

def train(weights, data, seed, round_no):
    net, (x, y) = make(), data
    net.load_state_dict(weights)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for batch in torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).split(12):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
    return net.state_dict()

def evaluate(weights):
    net = make()
    net.load_state_dict(weights)
    with torch.no_grad():
        return net(X).argmax(1) == Y
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "my.py"
    path.write_text(GOOD)
    return path


def _prepared(path: Path, rounds: int = 5) -> Prepared:
    with open_file(path) as user:
        return prepare(user, Options(rounds=rounds))


def _more(path: Path, text: str) -> Path:
    """The good file with something said differently at its end."""
    path.write_text(GOOD + text)
    return path


# --- files that cannot be tried ---------------------------------------------------------------------------


def test_a_good_file_is_prepared(user_file: Path) -> None:
    """The negative control of all that follows: without a fault nothing is refused."""
    found = _prepared(user_file)
    assert (found.setting.members, found.setting.threshold, found.setting.answering) == (5, 3, 4)
    assert found.setting.examples == (60, 60, 60, 60, 60)
    assert found.setting.carriers == 64 * 192 + 192 * 108 + 108 * 4
    assert found.setting.groups == 2  # the example was taken from the data
    assert found.setting.planned >= 6


@pytest.mark.parametrize(
    ("fault", "argument", "told"),
    [
        ("del train", "", "train()"),
        ("evaluate = 3", "", "evaluate()"),
        ("def make(): return 3", "make()", "a int"),
        ("def make(): return nn.ReLU()", "make()", "without any"),
        ("def train(weights, data): return make()", "train()", "a Sequential"),
        ("def train(weights, data): return {'0.weight': weights['0.weight']}", "train()", "'0.bias'"),
        ("def train(weights, data): return {f'net.{n}': w for n, w in weights.items()}", "train()", "'net.0.bias'"),
        ("def train(weights, data): return {n: w[None] for n, w in weights.items()}", "train()", "(1, 192, 64)"),
        ("def train(weights, data): return {n: w.numpy() for n, w in weights.items()}", "train()", "ndarray"),
        ("def train(weights, data): return {n: w / 0 for n, w in weights.items()}", "train()", "'0.weight'"),
        ("def train(weights, data): return {n: w + 1e9 for n, w in weights.items()}", "train()", "1e+09"),
        ("def train(weights, data): return weights", "train()", "unchanged"),
        ("def evaluate(weights): return 'good'", "evaluate()", "a str"),
        ("def evaluate(weights): return float('nan')", "evaluate()", "NaN"),
    ],
)
def test_a_wrong_file_is_refused_before_training(user_file: Path, fault: str, argument: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        _prepared(_more(user_file, fault))
    assert str(user_file) in caught.value.argument
    assert argument in caught.value.argument
    assert told in str(caught.value)


@pytest.mark.parametrize(("width", "rounds"), [(8, 30), (64, 3)])
def test_a_model_too_small_or_a_run_too_short_is_told_before_training(
    user_file: Path, width: int, rounds: int, environment: dict[str, str]
) -> None:
    _more(user_file, f"def make(): return nn.Sequential(nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, 4))\n")
    with user_file.open("a") as file:
        file.write("def train(weights, data): raise AssertionError('trained')\n")
    done = run(environment, "try", str(user_file), "--rounds", str(rounds))
    assert done.returncode == 2
    assert f"{64 * width + 4 * width:,} weights" in done.stderr
    assert f"{rounds} rounds" in done.stderr
    assert "trained" not in done.stderr


def test_an_exception_shows_the_users_own_lines(user_file: Path, environment: dict[str, str]) -> None:
    _more(
        user_file, "def train(weights, data):\n    return helper(weights)\n\ndef helper(w):\n    return w['no such']\n"
    )
    done = run(environment, "try", str(user_file), "--rounds", "5")
    assert done.returncode == 2
    line = GOOD.count("\n") + 5
    assert f"train() in {user_file} failed, line {line}:" in done.stderr
    assert "return w['no such']" in done.stderr
    assert done.stderr.rstrip().endswith("KeyError: 'no such'")
    assert "userfile.py" not in done.stderr  # nothing of ours above the user's frames


def test_a_file_that_cannot_be_imported(user_file: Path) -> None:
    with pytest.raises(UserCodeError, match="line 3") as caught:
        _prepared(_written(user_file, "import torch\n\ndef make(:\n"))
    assert "SyntaxError" in str(caught.value)
    with pytest.raises(UserCodeError, match="line 2"):
        _prepared(_written(user_file, "import torch\nimport no_such_module\n"))
    with pytest.raises(InputError, match="FILE"):
        _prepared(user_file.with_name("none.py"))


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(("package", "extra"), [("torch", "quorumark[torch]"), ("sklearn", "quorumark[demo]")])
def test_a_missing_package_names_the_extra(
    user_file: Path, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_file.write_text(f"import {package}\n{GOOD}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError) as caught:
        _prepared(user_file)
    assert caught.value.package == extra


def test_without_an_example_it_goes_on_without_alignment(user_file: Path) -> None:
    fault = "_data = data\ndef data(member, members): return {'x': 'text', 'y': 'label'}\ndef train(weights, data): "
    found = _prepared(_more(user_file, fault + "return {n: w + 0.01 for n, w in weights.items()}\n"))
    assert found.groups is None
    assert found.setting.groups == 0
    assert len([text for text in found.setting.warnings if "example()" in text]) == 1
    assert found.setting.examples == (4, 4, 4, 4, 4)


def test_a_model_whose_channels_are_not_understood_goes_on_with_a_warning(user_file: Path) -> None:
    found = _prepared(_more(user_file, "def example(): return torch.zeros(1, 63)\n"))
    assert found.groups is None
    assert len(found.setting.warnings) == 2  # this, and what the plan says of five rounds


def test_options_are_checked(user_file: Path, environment: dict[str, str]) -> None:
    for wrong in (
        ["--members", "2"],
        ["--threshold", "6"],
        ["--rounds", "0"],
        ["--strength", "rho"],
        ["--strength", "warmup_rounds=2"],
        ["--template", "images"],
        ["--out", str(user_file.parent)],
    ):
        done = run(environment, "try", str(user_file), *wrong)
        assert done.returncode == 2, wrong
        assert wrong[0] in done.stderr
    assert run(environment, "try").returncode == 2
    assert run(environment, "try", "--template", "music").returncode == 2


# --- what breaks off --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code", "told", "kept"),
    [
        ("raise KeyboardInterrupt", 130, "interrupted", False),
        ("raise KeyboardInterrupt", 130, "interrupted", True),
        ("net[0].bias.data[0] = float('nan')", 2, "round 2", False),
    ],
)
def test_what_breaks_off_leaves_nothing_behind(
    user_file: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    code: int,
    told: str,
    kept: bool,
) -> None:
    """Ctrl-C, and a run that diverges in its second round: that is the user's error, not a member that drops out."""
    changed = f"    if round_no == 2:\n        {fault}\n    return net.state_dict()"
    user_file.write_text(GOOD.replace("    return net.state_dict()", changed))
    folder = user_file.parent / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    out = user_file.parent / "out"
    done = run(environment, "try", str(user_file), "--rounds", "5", *(["--out", str(out)] if kept else []))
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "key " in done.stdout  # it got as far as training
    assert list(folder.iterdir()) == []
    assert not out.exists()


# --- what follows from the numbers ------------------------------------------------------------------------


def _trial(z: float, *, marked: Any = 0.9, attacked: tuple[str, float] = ("PASSED", 0.9)) -> results.Trial:
    strength = {"rule": "rho", "rho": "0.05", "c_max": "0.03"}
    setting = results.Setting(
        "my.py", 5, 3, 30, 0, strength, (), ("a", "b", "c"), (1, 1, 1), 10, 10, 1, 1.0, True, 12.0, 10.0
    )
    trial = results.Trial(setting)
    trial.curves = {"marked": [_score(marked)], "unmarked": [_score(0.9)]}
    trial.original = results.Tested("original", "PASSED" if z >= 6 else "FAILED", z, 6.0)
    trial.attacks = [results.Tested("attacked", attacked[0], 5.0, 6.0, Score(attacked[1]))]
    return trial


def _score(share: float, count: int = 1000) -> Score:
    each = (np.arange(count) < share * count).astype(np.float64)
    return Score(float(each.mean()), each)


def test_what_counts_as_working() -> None:
    assert _trial(15).works
    assert not _trial(5).works
    assert not _trial(8).works  # too near the threshold
    assert _trial(15, marked=0.899).works  # one example in a thousand is chance
    assert not _trial(15, marked=0.88).works
    assert not _trial(15, attacked=("FAILED", 0.89)).works  # the mark is gone, and the model as good
    assert _trial(15, attacked=("FAILED", 0.7)).works  # the mark is gone, and the model with it
    assert len(_trial(5, marked=0.88).findings) == 2
    assert "--strength rho=0.1 --strength c_max=0.06" in _trial(5).findings[0].remedy
    assert "--strength rho=0.025" in _trial(15, marked=0.88).findings[0].remedy


def test_a_paired_difference_has_a_paired_error() -> None:
    difference, error = _score(0.88).less(_score(0.9))
    assert difference == pytest.approx(-0.02)
    assert error == pytest.approx(np.sqrt(0.02 * 0.98 / 999), rel=1e-6)
    assert _score(0.9).less(_score(0.9)) == (0.0, 1 / 1000)
    assert Score(0.8).less(Score(0.9))[1] is None


# --- templates, and the whole of it -----------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_printed_and_can_be_prepared(name: str, tmp_path: Path, environment: dict[str, str]) -> None:
    done = run(environment, "try", "--template", name)
    assert done.returncode == 0
    assert done.stdout == template(name)
    path = tmp_path / "my.py"
    path.write_text(done.stdout)
    found = _prepared(path, rounds=30)
    assert found.setting.carriers >= 100_000
    assert found.setting.covered == 1.0
    assert found.setting.warnings == ()


def answers_again(environment: dict[str, str], figures: dict[str, Any]) -> None:
    """The members in out/ are asked anew, by the command line; the certificate there is confirmed."""
    tested = {row["what"]: row for row in figures["tested"]}
    manifest = ["--manifest", "out/consortium.json"]
    for suspect, code in (("model", 0), ("unmarked", 1)):
        file = f"out/{suspect}.safetensors"
        assert run(environment, "verify", "prepare", file, *manifest, "--out", f"{suspect}.json").returncode == 0
        partials = []
        for name in ("Birch", "Cedar", "Delta", "Elm"):  # Elm has answered nothing yet
            keys = ["--home", f"out/members/{name}", "--key-file", f"out/members/{name}.key"]
            partials.append(f"{suspect}-{name}.json")
            answered = run(
                environment, "verify", "partial", f"{suspect}.json", "--suspect", file, *manifest, *keys, "--approve",
                "--out", partials[-1],
            )  # fmt: skip
            assert answered.returncode == 0, answered.stderr
        words = [f"{suspect}.json", *partials, *manifest, "--json", "--out", f"c-{suspect}.json"]
        combined = run(environment, "verify", "combine", *words)
        assert combined.returncode == code, combined.stderr
        which = "as it was trained" if suspect == "model" else "trained without the mark"
        assert float(json.loads(combined.stdout)["z"]) == pytest.approx(tested[which]["z"], abs=1e-6)
    checked = run(
        environment,
        "verify",
        "check",
        "out/certificate.json",
        *manifest,
        "--suspect",
        "out/model.safetensors",
        "--json",
    )
    assert checked.returncode == 0
    assert float(json.loads(checked.stdout)["z"]) == pytest.approx(figures["z"]["measured"], abs=1e-6)


@pytest.mark.research
def test_the_consortium_that_it_leaves_answers_on_the_command_line(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickest template, shortened; then its members are asked again, as any others would be."""
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(template("tables"))
    done = run(environment, "try", "my.py", "--rounds", "12", "--out", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(Path("out/trial.json").read_text())
    tested = {row["what"]: row for row in figures["tested"]}
    assert [row["verdict"] for row in tested.values()] == ["PASSED"] * 5 + ["FAILED"] * 2 + ["PASSED"]
    assert figures["works"]
    assert abs(tested["trained without the mark"]["z"]) < 6
    assert abs(figures["difference"]["value"]) <= figures["difference"]["chance"]
    z = figures["z"]
    assert abs(z["corrected"] - z["measured"]) < 4 * (1 + z["corrected_error"] ** 2) ** 0.5  # the key's own chance is 1
    assert 0 < z["survival_error"] < 0.1
    assert figures["corroboration"] == "corroborated"
    assert len(figures["score"]["marked"]) == 13
    assert figures["costs"]["marked_bytes"] > figures["costs"]["summed_bytes"] > figures["costs"]["plain_bytes"]
    assert {"certificate.html", "report.html", "settings.txt"} <= {path.name for path in Path("out").iterdir()}

    answers_again(environment, figures)

    # the line that it prints agrees on the same strength
    line = Path("out/settings.txt").read_text().replace("NAME", "earnest")
    for number, name in enumerate(("Avon", "Birch", "Cedar", "Delta", "Elm"), 1):
        line = line.replace(f"CARD-{number}.json", f"out/members/{name}/member.json")
    created = run(environment, *shlex.split(line.replace("\\\n", " "))[1:])
    assert created.returncode == 0, created.stderr
    terms = [json.loads(Path(path).read_text()) for path in ("agreed/terms.json", "out/terms.json")]
    for same in ("strength", "policy", "layout", "anchor", "coordinates", "threshold"):
        assert terms[0][same] == terms[1][same], same


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_works_as_it_is_and_its_consortium_answers(
    name: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(template(name))
    before = os.times().children_user + os.times().children_system
    done = run(environment, "try", "my.py", "--out", "out")
    taken = os.times().children_user + os.times().children_system - before
    assert taken < 2 * 180  # of CPU: three minutes on two cores, whatever else runs on the machine
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(Path("out/trial.json").read_text())
    assert figures["works"]
    assert figures["z"]["measured"] >= 12
    assert abs(figures["difference"]["value"]) <= figures["difference"]["chance"]
    answers_again(environment, figures)
