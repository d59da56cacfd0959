"""Members who run ceremonies over a folder by the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer.main
from click.testing import CliRunner

from quorumark.cli import app
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.records import Manifest
from quorumark.model.layout import write_safetensors
from tests.kit.ceremony import NAMES

COMMANDS = typer.main.get_command(app)  # built once: that is most of what a call would cost
STEPS = {("setup", name) for name in ("dkg", "check", "accept")} | {("consortium", "sign")}
STEPS |= {("share", name) for name in ("recover", "help", "refresh", "reshare")}


class Consortium:
    """Five homes, each with a key file, on one disk."""

    def __init__(
        self,
        base: Path,
        setup: str = "dkg",
        key: str = "rademacher",
        size: int = 40,
        count: int = 5,
        threshold: int = 3,
    ) -> None:
        self.base, self.folder = base, base / "exchange"
        base.mkdir(exist_ok=True)
        self.homes = [base / name for name in NAMES[:count]]
        for name, home in zip(NAMES, self.homes, strict=False):
            self.run("member", "init", "--name", name, *self.secrets(home))
        model = base / "model.safetensors"
        rng = np.random.default_rng(0)
        write_safetensors({"w": rng.standard_normal((size, 7)).astype(np.float32), "b": np.zeros(3, np.float32)}, model)
        cards = [item for i, home in enumerate(self.homes) for item in ("--member", f"{home}/member.json:{100 + i}")]
        self.run(
            "consortium", "create", "--without-alignment", "--name", "hospitals", "--threshold", str(threshold), *cards,
            "--model", str(model), "--out", str(base / "agreed"), "--setup", setup, "--key", key,
        )  # fmt: skip
        self.terms = base / "agreed" / "terms.json"

    def secrets(self, home: Path) -> list[str]:
        return ["--home", str(home), "--key-file", str(home.with_suffix(".key"))]

    def run(self, *arguments: str, fails: type[Exception] | None = None) -> str:
        """A command. One that would wait for others does what it can do now: they run in this process as well."""
        waits = arguments[:2] in STEPS and not {"--wait", "--timeout"} & set(arguments)
        result = CliRunner().invoke(COMMANDS, [*arguments, *["--no-wait"] * waits])
        if fails is None:
            assert result.exit_code == 0, (arguments, result.output, result.exception)
            return result.output
        assert isinstance(result.exception, fails), (result.output, result.exception)
        return str(result.exception)

    def step(self, index: int) -> str:
        arguments = ["--terms", str(self.terms), "--folder", str(self.folder)]
        return self.run("setup", "dkg", *arguments, *self.secrets(self.homes[index]))

    def finish(self, rounds: int = 12) -> None:
        for _ in range(rounds):
            if all("finished" in output for output in [self.step(i) for i in range(len(self.homes))]):
                return
        raise AssertionError("the ceremony does not end")

    def manifests(self) -> list[Manifest]:
        return [HomeFolder(home).only_consortium().manifest() for home in self.homes]

    def key(self, points: tuple[int, ...] = (0, 1, 2)) -> np.ndarray[Any, Any]:
        """Through the commands: hand over, reconstruct."""
        first, *others = points
        files = []
        for i in others:
            out = self.base / f"handed-{i}-to-{first}"
            self.run(
                "share", "hand-over", "--to", f"{self.homes[first]}/member.json", "--out", str(out),
                "--i-understand-this-hands-over-my-share", *self.secrets(self.homes[i]),
            )  # fmt: skip
            files += ["--share", str(out)]
        out = self.base / f"key-{'-'.join(map(str, points))}.npy"
        said = self.run(
            "key", "reconstruct", *files, "--out", str(out), "--i-understand-this-reveals-the-key",
            *self.secrets(self.homes[first]),
        )  # fmt: skip
        assert "against its root" in said
        assert out.stat().st_mode & 0o777 == 0o600
        found: np.ndarray[Any, Any] = np.load(out)
        return found
