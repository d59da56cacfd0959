"""The README's path by commands: five members, from nothing to a signed certificate, and how many commands it takes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import quorumark as qm
from quorumark.model.layout import write_safetensors
from tests.kit.commands import run

torch = pytest.importorskip("torch")
NAMES = ("avon", "birch", "cedar", "delta", "elm")
NET = """
import torch


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
"""


def commands_of_the_readme() -> int:
    """How many commands the README's path has, a loop's for each of its names."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    path = text[text.index("**Does it work for my model?**") : text.index(" commands for all five together")]
    blocks = [part.split("```")[0] for part in path.split("```console\n")[1:]]
    found = 0
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            names = re.match(r"\$ for name in ([A-Za-z ]+); do ", line)
            found += line.count("quorumark ") * (len(names[1].split()) if names else 1)
    return found


def test_the_readme_counts_its_commands() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"That is {commands_of_the_readme()} commands for all five together" in text


def test_five_members_get_from_nothing_to_a_certificate_with_few_commands(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    total: Counter[str] = Counter()

    def count(words: list[str]) -> None:
        who = words[words.index("--home") + 1] if "--home" in words else "anybody"
        total[who] += 1

    def quorumark(line: str, code: int = 0) -> str:
        words = line.split()
        count(words)
        done = run(environment, *words)
        assert done.returncode == code, (line, done.stdout, done.stderr)
        return done.stdout

    Path("net.py").write_text(NET)
    scope: dict[str, object] = {}
    exec(NET, scope)  # noqa: S102 - the file that users write
    model = scope["make"]().state_dict()  # type: ignore[operator]
    write_safetensors({name: tensor.numpy() for name, tensor in model.items()}, "initial.safetensors")
    for name in NAMES:
        quorumark(f"member init --name {name.title()} --home {name} --key-file {name}.key")
    quorumark("groups --model net.py:make --example 1,64 --out groups.json")
    cards = " ".join(f"--member {name}/member.json:{1000 + 10 * i}" for i, name in enumerate(NAMES))
    strong = "--strength rho=0.2 --strength c_max=0.25 --strength dither=2"  # this run is short
    quorumark(
        "consortium create --name hospitals --threshold 3 --model initial.safetensors --groups groups.json "
        f"--out agreed {cards} {strong}"
    )
    started = []
    for name in NAMES:
        words = ["setup", "dkg", "--terms", "agreed/terms.json", "--folder", "exchange", "--home", name]
        count(words)
        command = [sys.executable, "-c", "from quorumark.cli import main; main()", *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    assert all("finished" in one.communicate(timeout=240)[0] for one in started)

    generator = torch.Generator().manual_seed(1)

    def train(weights: dict[str, Any], _: object) -> dict[str, Any]:
        return {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}

    homes = [qm.Home(name, key_file=f"{name}.key") for name in NAMES]
    trained = qm.Federation.of_homes(homes, model, train, data=[None] * 5, seed=3)
    for _ in trained.rounds(12):
        pass
    write_safetensors({name: tensor.numpy() for name, tensor in trained.model.items()}, "suspect.safetensors")

    quorumark("public --out public --home avon")
    said = quorumark("verify prepare suspect.safetensors --manifest public/consortium.json")
    assert "ask 4" in said  # t+1
    for name in NAMES[:4]:
        quorumark(f"verify partial query.json --suspect suspect.safetensors --approve --home {name}")
    partials = " ".join(f"partial-{name.title()}.json" for name in NAMES[:4])
    said = quorumark(f"verify combine query.json {partials} --manifest public/consortium.json")
    assert said.startswith("PASSED")
    assert "corroborated: 4 partials agree" in said
    for name in NAMES[:4]:
        quorumark(f"verify sign certificate.json --home {name}")
    said = quorumark(
        "verify check certificate.json --manifest public/consortium.json --suspect suspect.safetensors "
        "--report report.html"
    )
    assert "NOT checked" not in said
    # the README's path begins with `try --template`; the file that it writes is NET here
    assert sum(total.values()) + 1 == commands_of_the_readme(), total
    assert max(total[name] for name in NAMES) <= 5, total
    public = {path.name for path in Path("public").iterdir()}
    assert public == {"consortium.json", "layout.json", "anchor.safetensors", "groups.json"}
