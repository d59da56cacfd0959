"""What a trial leaves behind: its figures, the commands for a consortium in earnest, pages to read."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

from rich.console import Console

from quorumark.files import write_shared
from quorumark.model.layout import ModelLayout
from quorumark.report import write_page
from quorumark.trial.page import trial_page
from quorumark.trial.results import Trial
from quorumark.trial.run import FILES, Prepared

__all__ = ["commands", "write_outputs"]


def commands(prepared: Prepared, folder: str = ".") -> str:
    """The line that agrees on the same terms in earnest: only the members' cards and examples are yours to fill in."""
    setting, where = prepared.setting, Path(folder)
    words = ["quorumark consortium create --name NAME", f"--threshold {setting.threshold}"]
    words.append(f"--model {shlex.quote(str(where / 'anchor.safetensors'))}")
    words.append(
        "--without-alignment" if prepared.groups is None else f"--groups {shlex.quote(str(where / 'groups.json'))}"
    )
    words += [f"--exclude {shlex.quote(name)}" for name in _excluded(prepared)]
    words.append(f"--rounds {setting.rounds}")
    words += [f"--strength {shlex.quote(f'{name}={value}')}" for name, value in setting.shown.items()]
    words += [f"--member {shlex.quote(f'CARD-{n}.json:{count}')}" for n, count in enumerate(setting.examples, 1)]
    return " \\\n    ".join([*words, "--out agreed"])


def _excluded(prepared: Prepared) -> list[str]:
    """Tensors that carry by their names alone, and do not because the module says that they are embeddings."""

    def carriers(layout: ModelLayout) -> set[str]:
        return {spec.name for spec in layout.tensors if spec.role == "carrier"}

    return sorted(carriers(ModelLayout.of(prepared.initial)) - carriers(prepared.layout))


def write_outputs(prepared: Prepared, trial: Trial, folder: Path, console: Console, *, kept: bool) -> None:
    """Writes what stays, if anything does, and says how to go on."""
    shutil.rmtree(folder / "control")
    write_shared(folder / "trial.json", (json.dumps(trial.as_dict(), indent=2) + "\n").encode())
    line = commands(prepared, str(folder) if kept else "")
    write_shared(folder / "settings.txt", (line + "\n").encode())
    write_page(folder / "report.html", trial_page(trial, line))
    console.print(f"\nThe same settings in earnest, with cards of your own:\n{line}", soft_wrap=True)
    if kept:
        console.print(
            f"\nIn {folder}: report.html and certificate.html to read, trial.json, and the consortium. Ask it again:\n"
            f"  quorumark verify check {folder}/{FILES['certificate']} --manifest {folder}/consortium.json "
            f"--suspect {folder}/{FILES['model']}\n\nDone in {trial.seconds:.0f} s.",
            soft_wrap=True,
        )
    else:
        console.print(
            f"\nDone in {trial.seconds:.0f} s. Nothing was kept: --out DIR keeps these files, the consortium, the "
            "certificate and a report.",
            soft_wrap=True,
        )
