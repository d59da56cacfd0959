"""A folder with a consortium's homes, a suspect and a question, for the command line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.kit.commands import run
from tests.kit.consortium import World


class Desk:
    """A folder to work in, and the commands of all members."""

    def __init__(self, world: World, folder: Path, environment: dict[str, str]) -> None:
        self.world, self.folder, self.environment = world, folder, environment
        names = ("consortium.json", "layout.json", "anchor.safetensors")
        self.reference = [
            str(x)
            for option, name in zip(("--manifest", "--layout", "--anchor"), names, strict=True)
            for x in (option, world.folder / name)
        ]

    def __call__(self, *arguments: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = run(self.environment, "verify", *map(str, arguments))
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    def home(self, point: int) -> list[str]:
        home = self.world.homes[point - 1][0].path
        return ["--home", str(home), "--key-file", f"{home}.key"]

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def prepare(self, suspect: Path, name: str = "query.json") -> str:
        nobody = ["--home", self.path("nobody")]
        self("prepare", suspect, "--out", self.path(name), *self.reference, *nobody)
        return self.path(name)

    def partial(self, query: str, suspect: Path, point: int, *more: str, code: int = 0) -> str:
        out = self.path(f"p{point}-{Path(query).name}")
        self("partial", query, "--suspect", suspect, "--out", out, *self.reference, *self.home(point), *more, code=code)
        return out

    def combine(self, query: str, partials: list[str], out: str = "certificate.json", code: int = 0) -> Any:
        nobody = ["--home", self.path("nobody")]
        done = self(
            "combine", query, *partials, "--manifest", self.world.folder / "consortium.json", "--out", self.path(out),
            "--json", *nobody, code=code,
        )  # fmt: skip
        return json.loads(done.stdout) if done.stdout else done.stderr
