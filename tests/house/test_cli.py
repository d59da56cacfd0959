"""The commands, as a user runs them."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.model.layout import ModelLayout, write_safetensors
from tests.kit.commands import process, run


def test_demo_tells_its_story(environment: dict[str, str], tmp_path: Path) -> None:
    done = process(environment, "demo", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    text = re.sub(r"\s+", " ", done.stdout)
    assert text.count("it is theirs, beyond doubt") == 1
    assert text.count("noise: not accused") == 2
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["coordinates"] >= 200_000
    assert summary["z_marked"] > 15
    # noise: six standard deviations
    assert abs(summary["z_unmarked"]) < 6
    assert abs(summary["z_unrelated"]) < 6
    assert summary["accuracy_marked"] > 0.93
    assert abs(summary["accuracy_marked"] - summary["accuracy_unmarked"]) < 0.05
    assert (summary["members"], summary["threshold"], summary["dropped"]) == (5, 3, 3)
    events = [json.loads(line) for line in (tmp_path / "out" / "marked" / "events.jsonl").read_text().splitlines()]
    assert [event["round"] for event in events] == list(range(1, 21))
    assert events[6]["attempts"] == 2
    assert summary["verdicts"] == ["PASSED", "FAILED", "FAILED"]
    assert summary["corroboration"] == ["uncorroborated", "corroborated"]
    _check_elsewhere(environment, tmp_path)
    _attack(environment, tmp_path)
    again = run(environment, "demo", "--out", str(tmp_path / "out"))
    assert again.returncode == 2
    assert "must be a new or empty folder" in again.stderr


def _attack(environment: dict[str, str], tmp_path: Path) -> None:
    """What the demo left can be attacked: also with what only its rounds tell, and aligned to its groups."""
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[[attack]]\nchain = ["permutation", "rescaling"]\n'
        '[[attack]]\nname = "adaptive-fine-tuning"\nestimate = "regression"\nepochs = 1\n'
    )
    out = tmp_path / "attacked"
    done = run(environment, "attack", "suite", str(tmp_path / "out"), "--plan", str(plan), "--out", str(out))
    assert done.returncode == 0, done.stderr
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:6] == ["attack", "budget", "accuracy", "z", "z_aligned", "seconds"]
    assert [row["attack"] for row in rows] == ["none", "permutation + rescaling", "adaptive-fine-tuning"]
    original, disguised, _ = (float(row["z_aligned"]) for row in rows)
    assert original > 15
    assert disguised > 0.95 * original
    assert abs(float(rows[1]["z"])) < 6
    assert "<svg" in (out / "index.html").read_text()


def _check_elsewhere(environment: dict[str, str], tmp_path: Path) -> None:
    """The certificate checks out in another place, from the files that the demo names."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("certificate.json", "consortium.json", "layout.json", "anchor.safetensors", "suspect.safetensors"):
        shutil.copy(tmp_path / "out" / name, elsewhere / name)
    files = [str(elsewhere / name) for name in ("certificate.json", "consortium.json", "suspect.safetensors")]
    command = ["verify", "check", files[0], "--manifest", files[1], "--suspect", files[2], "--json"]
    done = run(environment, *command)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["verdict"], len(said["checked"]), said["not_checked"]) == ("PASSED", 5, [])
    assert len(list((tmp_path / "out" / "partials").glob("*.json"))) == 5
    assert "carries the mark of" in (tmp_path / "out" / "report.html").read_text()
    assert {p.name for p in (tmp_path / "out" / "members").glob("*.key")} == {
        f"{name}.key" for name in ("Avon", "Birch", "Cedar", "Delta", "Elm")
    }


CREATE = ["consortium", "create", "--without-alignment", "--name", "h", "--threshold", "2"]
SETUP_KEYS = [
    "elements_per_member",
    "role",
    "members",
    "threshold",
    "runs",
    "communication_seconds",
    "paper_seconds",
    "paper_best_seconds",
    "paper_elements",
    "paper_communication_seconds",
]


def test_the_benchmark_of_alignment_says_what_it_brings_back(environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "rows.json"
    done = run(environment, "bench", "align", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert [row["name"].count("residual") for row in rows] == [0, 1, 1, 0]
    for row in rows:
        assert row["z"] > 20
        assert row["z_disguised"] < 0.6 * row["z"]
        assert row["z_aligned"] > 0.9 * row["z"]
        assert row["ratio"] > 1
    assert f"aligned {rows[0]['z_aligned']:.1f}" in done.stdout


ROUND_KEYS = [
    "packing", "members", "marked", "plain_seconds", "cpu", "plain_cpu", "bytes_down", "plain_bytes_down", "bytes_up",
    "plain_bytes_up",
]  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {  # for rows of the right shape; what they say of speed is noise
    "field": {"QUICK_SIZE": 100_000},
    "shamir": {"CASES": ((5, 3), (8, 4)), "_QUICK_WORK": 3e6},
    "dkg": {"CASES": (4, 8), "LAYER_BYTES": 1 << 20},
    "dealer": {"CASES": (4, 8), "RUNS": 2, "LAYER_BYTES": 1 << 20},
    "round": {"QUICK_ROWS": 40},
}


@pytest.mark.parametrize("name", list(SMALL))
def test_quick_benchmarks_write_rows_of_one_shape(
    environment: dict[str, str], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting, value in SMALL[name].items():
        monkeypatch.setattr(import_module(f"quorumark.research.bench.{name}"), setting, value)
    path = tmp_path / "rows.json"
    done = run(environment, "bench", name, "--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    setup = name in ("dkg", "dealer")
    assert len(rows) >= {"field": 20, "shamir": 8, "dkg": 2, "dealer": 4, "round": 4}[name]
    extra = SETUP_KEYS if setup else ROUND_KEYS if name == "round" else []
    for row in rows:
        assert list(row) == ["name", "against", "size", "threads", "ratio", "seconds", *extra]
        assert row.get("elements_per_member", 0) <= 4.0
        assert row["ratio"] > 0
        assert row["seconds"] > 0
        assert row["size"] > 0
        assert row["threads"] >= 1
        assert row["name"].split()[0] in done.stdout
    assert f"{len(rows)} rows written" in done.stdout
    for row in rows if setup else ():
        assert row["ratio"] == pytest.approx(row["seconds"] / row["paper_seconds"])
        wire = row["elements_per_member"] * (row["members"] if row["role"] == "dealer" else 1)
        assert row["communication_seconds"] == pytest.approx(wire * row["size"] * 8 / 125e6)
        assert row["paper_communication_seconds"] == pytest.approx(row["paper_elements"] * row["size"] * 8 / 125e6)
    if name == "dealer":
        assert [row["role"] for row in rows] == ["dealer", "member"] * (len(rows) // 2)
        # of K shares K−t+1 are stored: (K−t+1)/K of d for each, and a little for headers, salts and records
        for row in rows:
            stored = (row["members"] - row["threshold"] + 1) / row["members"]
            assert stored * 0.95 < row["elements_per_member"] < stored * 1.1


@pytest.mark.slow
def test_the_benchmark_of_verification_has_a_row_by_layers(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = run(environment, "bench", "verify", "--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    row = json.loads(path.read_text())[-1]
    assert (row["name"], row["against"]) == ("a partial by layers, CPU time", "a plain one")
    assert row["ratio"] > 0


def test_a_dealing_is_scaled_to_half_the_free_disk() -> None:
    from quorumark.research.bench.dealer import _fitting

    assert _fitting(11_200_000, 128, 64, 10**12) == 11_200_000
    size = _fitting(11_200_000, 128, 64, 4 * 10**9)
    assert 1 <= size < 11_200_000
    assert size * 8 * (128 - 64 + 2) <= 2 * 10**9


def test_the_figure_of_the_setup_is_drawn_from_the_results(
    environment: dict[str, str], tmp_path: Path, root: Path
) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for name in ("one.svg", "two.svg"):
        done = run(
            environment, "bench", "plot", "--results", str(root / "benchmarks/results"), "--out", str(tmp_path / name)
        )
        assert done.returncode == 0, done.stderr
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(b"<?xml")
    assert b"<dc:date>" not in drawn[0]


def test_a_figure_needs_results_of_the_present_shape(environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = str(tmp_path / "figure.svg")
    done = run(environment, "bench", "plot", "--results", str(tmp_path), "--out", out)
    assert done.returncode == 2
    assert "--results must be a folder with the rows" in done.stderr
    for name in ("dkg", "dealer"):
        (tmp_path / f"{name}.json").write_text('[{"name": "old", "seconds": 1}]')
    done = run(environment, "bench", "plot", "--results", str(tmp_path), "--out", out)
    assert done.returncode == 2
    assert "run the benchmark again" in done.stderr
    assert not Path(out).exists()


def test_a_figure_without_matplotlib_names_the_extra(environment: dict[str, str], tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['matplotlib'] = None; from quorumark.cli import main; main()"
    command = [sys.executable, "-c", hidden, "bench", "plot", "--out", str(tmp_path / "figure.svg")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 2
    assert "pip install quorumark[report]" in done.stderr


def test_layout_shows_what_carries(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors({"w": np.ones((20, 30), np.float32), "wte": np.ones((9, 9), np.float32)}, path)
    done = run(environment, "layout", str(path))
    assert done.returncode == 0, done.stderr
    assert "600 of 681 numbers carry" in done.stdout
    assert ModelLayout.of(path).digest() in done.stdout
    printed = run(environment, "layout", str(path), "--max-coordinates", "50", "--carry-embeddings", "--json").stdout
    layout = ModelLayout.from_bytes(printed.strip().encode())
    assert (layout.coordinates, layout.carrier_size) == (50, 681)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["layout", "nowhere.safetensors"], "cannot read 'nowhere.safetensors'"),
        (
            ["bench", "field", "--quick", "--json", "no/such/folder/rows.json"],
            "--json must name a file in a folder that exists",
        ),
        (["nonsense"], "No such command"),
        (["layout"], "Missing argument"),
        (["layout", "."], "cannot read '.': it is no regular file"),
    ],
)
def test_errors_are_one_sentence_and_exit_2(environment: dict[str, str], arguments: list[str], text: str) -> None:
    done = run(environment, *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_names_are_shown_as_they_are(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "[red]odd.safetensors"
    name = "blk[/x].[bold]" + "very_long_name." * 9 + "weight"
    write_safetensors({name: np.ones((2, 2), np.float32)}, path)
    done = run(environment, "layout", str(path))
    assert done.returncode == 0, done.stderr
    joined = re.sub(r"[\s│]+", "", done.stdout)
    assert name in joined.replace("F322×24carrier", "")
    assert "[red]odd.safetensors" in joined


def test_it_runs_where_nothing_can_be_cached(environment: dict[str, str]) -> None:
    """A container with a read-only file system: numba finds no place for its cache, and compiles anew."""
    script = (
        "from numba.core import caching\n"
        "def nowhere(*_): raise RuntimeError('cannot cache function: no locator available')\n"
        "caching.FunctionCache.__init__ = nowhere\n"
        "from quorumark import field\n"
        "import numpy as np\n"
        "x = np.array([5, 7], np.uint64)\n"
        "assert field.mul(x, x).tolist() == [25, 49]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_plain_terminals_and_closed_pipes(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "Σ.safetensors"
    write_safetensors({f"w{i}": np.ones((1, 1), np.float32) for i in range(2000)}, path)
    ascii_only = process({**environment, "PYTHONIOENCODING": "ascii"}, "layout", str(path))
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    assert "1?1" in ascii_only.stdout, "1×1 in a terminal that has no ×"
    assert len(ascii_only.stdout) > 1 << 16, "more than a pipe holds: somebody must read it"
    piped = subprocess.run(
        f"{sys.executable} -m quorumark layout {path} | head -1; exit ${{PIPESTATUS[0]}}", shell=True,
        executable="/bin/bash", capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert len(piped.stdout.splitlines()) == 1
    assert (piped.returncode, piped.stderr) == (1, "")


def test_version(environment: dict[str, str]) -> None:
    done = run(environment, "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("quorumark 0.")


def _helps(environment: dict[str, str]) -> dict[str, str]:
    """What every command says of itself, by the words that name it."""
    script = (
        "import json, click, typer\n"
        "from quorumark.cli import app\n"
        "def walk(command, words, above):\n"
        "    context = click.Context(command, info_name=words[-1], parent=above, **command.context_settings)\n"
        "    found = {' '.join(words): command.get_help(context)}\n"
        "    for name in command.list_commands(context) if hasattr(command, 'list_commands') else ():\n"
        "        found |= walk(command.get_command(context, name), [*words, name], context)\n"
        "    return found\n"
        "print(json.dumps(walk(typer.main.get_command(app), ['quorumark'], None)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_help_is_plain_and_says_what_each_argument_is(environment: dict[str, str]) -> None:
    found = _helps(environment)
    assert len(found) > 60
    for words, text in found.items():
        assert "\\[" not in text, words
        _, _, rest = text.partition("Arguments:\n")
        for line in rest.partition("\n\n")[0].splitlines():
            # NAME, then what it is, then whether it is required: not the bare name
            bare = re.fullmatch(r"\s+\S+\s+\[(required|default: .*)\]", line)
            assert not bare, (words, line, "is click as pyproject.toml has it?")
    assert "..." not in found["quorumark"].partition("Commands:\n")[2]  # in 80 columns nothing is cut
    first = re.findall(r"^  (\w+)  ", found["quorumark"].partition("Commands:\n")[2], re.MULTILINE)
    assert first[:9] == ["demo", "try", "new", "doctor", "member", "consortium", "setup", "share", "public"]


def test_what_the_operating_system_refuses_is_one_sentence(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    key = ["--key-file", str(tmp_path / "a.key")]
    for command in (["demo", "--out", str(file)], ["member", "init", "--name", "A", "--home", str(file), *key]):
        done = run(environment, *command)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"quorumark: .*file.*\n", done.stderr), done.stderr
    assert file.read_text() == "x"


def _limited(environment: dict[str, str], most: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that cannot write files of more than so many bytes: a full disk, as far as a program can tell."""
    script = (
        "import resource, sys\n"
        "from quorumark.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))\n"
        "main()\n"
    )
    command = [sys.executable, "-B", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_what_is_no_file_is_not_replaced_by_one(environment: dict[str, str], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # as /dev/stdout and /dev/full are: to root they could be replaced
    os.mkfifo(pipe)
    run(environment, "member", "init", "--name", "Avon", "--home", str(tmp_path / "a"), "--key-file", f"{tmp_path}/k")
    done = run(environment, "member", "backup", str(pipe), "--home", str(tmp_path / "a"))
    assert done.returncode == 2
    assert done.stderr == f"quorumark: cannot write {str(pipe)!r}: it is no regular file\n"
    assert pipe.is_fifo()


def test_a_full_disk_leaves_nothing_that_looks_whole(environment: dict[str, str], tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    write_safetensors({"w": np.random.default_rng(0).standard_normal((40, 7)).astype(np.float32)}, model)
    members = []
    for name in ("Avon", "Birch", "Cedar"):
        home = tmp_path / name
        command = ["member", "init", "--name", name, "--home", str(home), "--key-file", f"{home}.key"]
        assert run(environment, *command).returncode == 0
        members += ["--member", f"{home}/member.json"]
    out = tmp_path / "agreed"
    create = [*CREATE, *members, "--model", str(model)]
    full = _limited(environment, 500, *create, "--out", str(out))
    assert full.returncode == 2
    assert re.fullmatch(r"quorumark: cannot write '.*anchor.safetensors': .*\n", full.stderr), full.stderr
    assert [path.name for path in out.iterdir()] == ["layout.json"]
    assert run(environment, *create, "--out", str(out)).returncode == 0  # once there is space, the same command

    avon, copy, backup = tmp_path / "Avon", tmp_path / "copy", tmp_path / "backup.tar"
    (avon / "rules.json").write_text(" " * 2000)  # what does not fit
    assert run(environment, "member", "backup", str(backup), "--home", str(avon)).returncode == 0
    restore = ["member", "restore", str(backup), "--home", str(copy)]
    full = _limited(environment, 1000, *restore)
    assert full.returncode == 2
    assert re.fullmatch(r"quorumark: cannot .*\n", full.stderr), full.stderr
    assert not copy.exists()
    assert run(environment, *restore).returncode == 0
    no_backup = run(environment, "member", "restore", str(model), "--home", str(tmp_path / "other"))
    assert no_backup.stderr == f"quorumark: {str(model)!r} is not a backup of a member's home, or is damaged\n"


def test_a_file_that_is_something_else_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    """Of several files on one command line, the error says which."""
    home, odd, model = tmp_path / "Avon", tmp_path / "odd.json", tmp_path / "model.safetensors"
    write_safetensors({"w": np.ones((4, 7), np.float32)}, model)
    odd.write_text("{not JSON")
    made = run(environment, "member", "init", "--name", "Avon", "--home", str(home), "--key-file", f"{home}.key")
    assert made.returncode == 0, made.stderr
    secrets = ["--home", str(home), "--key-file", f"{home}.key"]
    create = [*CREATE, "--member", f"{home}/member.json"]
    for command in (
        [*create, "--member", str(odd), "--model", str(model), "--out", str(tmp_path / "out")],
        ["setup", "dkg", "--terms", str(odd), "--folder", str(tmp_path / "exchange"), *secrets],
        ["calibrate", str(model), "--layout", str(odd), "--anchor", str(model)],
    ):
        done = run(environment, *command)
        assert done.returncode == 2
        assert re.fullmatch(rf"quorumark: '{odd}' cannot be used: .*\n", done.stderr), done.stderr
    absent = [
        "verify",
        "prepare",
        str(model),
        "--manifest",
        str(tmp_path / "none.json"),
        "--home",
        str(tmp_path / "no"),
    ]
    assert "--manifest must name the consortium's manifest" in run(environment, *absent).stderr
    layout = tmp_path / "layout.json"
    layout.write_bytes(ModelLayout.of(model).to_bytes())
    itself = run(environment, "calibrate", str(model), "--layout", str(layout), "--anchor", str(model))
    assert "not be the anchor itself" in itself.stderr
