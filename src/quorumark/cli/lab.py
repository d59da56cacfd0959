"""`quorumark lab …`"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from quorumark.research.lab.config import Settings
    from quorumark.research.lab.data import ImageSet

app = typer.Typer(help="The paper's experiments: run them, and see what came out.", no_args_is_help=True)

Results = Annotated[Path, typer.Option("--results", help="The folder with the results.")]
Data = Annotated[Path, typer.Option("--data", help="The folder with the data sets.")]
Only = Annotated[
    str, typer.Option("--only", help="Only runs whose id matches one of these globs (with commas), in their order.")
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto: cuda if there is one.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Only this seed.")]
Models = Annotated[Path, typer.Option("--models", help="The folder with language models, a folder each.")]
Cache = Annotated[Path, typer.Option("--cache", help="The folder where texts are kept as tokens.")]
Patience = Annotated[
    int | None, typer.Option("--patience", help="Stop when validation has not improved for so many rounds.")
]
OtherText = Annotated[Path | None, typer.Option("--other-text", help="A text file that an attacker trains with.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Another number of rounds.")]


@app.command("list")
def list_(results: Results = Path("results")) -> None:
    """The configurations, and how many of their runs have results."""
    from quorumark.research.lab.config import configurations, read
    from quorumark.research.lab.results import finished, read_all

    done = read_all(results)
    for name in configurations():
        configuration = read(name)
        full = sum(finished(done[r.id], r) for r in configuration.runs if r.id in done)
        shorter = sum(r.id in done for r in configuration.runs) - full
        typer.echo(f"{name}: {configuration.title}")
        typer.echo(f"    {len(configuration.runs)} runs, {full} in full, {shorter} shorter")


@app.command("run")
def run(
    configuration: Annotated[str, typer.Argument(help="A configuration's name, or a TOML file.")],
    only: Only = "*",
    seed: Seed = None,
    rounds: Rounds = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Validate every so many rounds.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long, and keep what there is.")] = None,
    device: Device = "auto",
    data: Data = Path("data"),
    results: Results = Path("results"),
    runs: Annotated[Path, typer.Option(help="The folder for checkpoints and models.")] = Path("runs/lab"),
    streams: Annotated[int, typer.Option(help="Members in flight at once on a GPU.")] = 5,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile a language model on a GPU.")] = True,
    observe: Annotated[
        str | None,
        typer.Option(help="Keep what outsiders and coalitions of these sizes (8,16) could learn about the key."),
    ] = None,
    abreast: Annotated[
        int, typer.Option(min=1, help="Runs with images that are made at once, each in a thread of its own.")
    ] = 1,
    dither: Annotated[
        float | None, typer.Option(help="κ: members add noise of κ times the mark's amplitude beside it, in all.")
    ] = None,
    continuity: Annotated[
        bool, typer.Option("--continuity", help="Count the rows that the continuity rule would silence.")
    ] = False,
    packing: Annotated[
        int | None, typer.Option(help="So many weights in an element of an upload: 1, 2, 3 or 4.")
    ] = None,
    masked: Annotated[
        int, typer.Option(help="Instead: so many rounds through the real protocol as well, and compare the models.")
    ] = 0,
    models: Models = Path("models"),
    cache: Cache = Path("runs/tokens"),
    patience: Patience = None,
    attacks: Annotated[
        str | None, typer.Option("--attacks", help="Attack what language models release: `language`, or a TOML plan.")
    ] = None,
    other_text: OtherText = None,
) -> None:
    """Run a configuration's runs, or go on with them; those that are done are left out."""
    from quorumark.errors import InputError
    from quorumark.research.lab.config import read
    from quorumark.research.lab.removal import read_plan
    from quorumark.research.lab.series import Clock, Series
    from quorumark.research.lab.workbench import Workbench

    chosen, clock = _chosen(configuration, only, seed, rounds, evaluate_every, patience), Clock(seconds)
    nets: Any = ({} if dither is None else {"dither": dither}) | ({"continuity": True} if continuity else {})
    nets |= {} if packing is None else {"packing": packing}
    chosen = [replace(settings, **nets) for settings in chosen]
    if read(configuration).task == "language":
        plan = None if attacks is None else read_plan(attacks)
        bench = Workbench(
            models, data, cache, results, runs, _device(device), compiled, clock, other_text, plan,
            lambda t: typer.echo(t),
        )  # fmt: skip
        for settings in chosen:
            bench.do(settings)
        bench.finish()
        return
    if attacks is not None:
        raise InputError("--attacks", "must be left out for images", attacks)
    coalitions = None if observe is None else [int(size) for size in observe.split(",") if size]
    series = Series(data, results, runs, _device(device), streams, clock, coalitions, abreast, lambda t: typer.echo(t))
    if masked:
        for settings in chosen:
            _masked(settings, series.images(settings.dataset), masked)
        return
    series.do(chosen)


@app.command("attack", short_help="Attack a run's released model with the paper's budgets, or go on with it.")
def attack(
    run: Annotated[str, typer.Argument(help="A run's id: its checkpoint must be in --runs.")],
    seconds: Annotated[float | None, typer.Option(help="Stop after so long, and keep what there is.")] = None,
    innocents: Annotated[int, typer.Option(help="Also train so many innocent models, which must not be accused.")] = 0,
    innocent_epochs: Annotated[int, typer.Option("--innocent-rounds", help="Their epochs.")] = 5,
    epochs: Annotated[int, typer.Option(help="Of attacks that train; the paper's are 100.")] = 100,
    only: Annotated[
        str,
        typer.Option(help="Only attacks that this names with their settings, as the table file does: '*lr=0.0001*'."),
    ] = "*",
    layers: Annotated[
        bool, typer.Option("--layers", help="Also attackers who know the test by layers, with an oracle if need be.")
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Only draw the figures, from the results.")] = False,
    figures: Annotated[Path, typer.Option(help="The folder for figures.")] = Path("docs/figures"),
    device: Device = "auto",
    data: Data = Path("data"),
    results: Results = Path("results"),
    runs: Annotated[Path, typer.Option(help="The folder for checkpoints and models.")] = Path("runs/lab"),
    side: Annotated[int, typer.Option(help="Attacks that train side by side.")] = 8,
    streams: Annotated[int, typer.Option(help="Attacks in flight at once on a GPU.")] = 8,
) -> None:
    """Attack a run's released model with the paper's budgets, or go on with it; results are in RESULTS/attacks."""
    from quorumark.errors import InputError
    from quorumark.research.lab.attacked import Attacked, draw, read_attacked

    if plot:
        found = read_attacked(results / "attacks")
        if run not in found:
            raise InputError("RUN", f"must be one that was attacked: {', '.join(found) or 'none is'}", run)
        drawn = draw(found[run], figures)
        typer.echo(f"{len(found[run].rows)} rows; drawn: {', '.join(path.name for path in drawn)}")
        return
    from quorumark.research.lab.attack import Suite, open_run

    start = time.monotonic()
    opened, images = open_run(runs / run, data, _device(device))
    left = None if seconds is None else seconds - (time.monotonic() - start)
    suite = Suite(
        opened, images, runs / run, results / "attacks", epochs, side, streams, left,
        lambda t: typer.echo(t), only, layers,
    )  # fmt: skip
    done = suite.run_all(innocents, innocent_epochs)
    suite.close()
    for text, holds, shown in Attacked(suite.rows, suite.body).aims():
        typer.echo(f"{text}: {'not known' if holds is None else str(holds).lower()}; {shown}")
    typer.echo(f"{run}: {len(suite.rows) - 1} attacked models{'' if done else '; not all yet: run it again'}")


@app.command("rivals", short_help="Other methods' marks beside ours: the same network, data, rounds and attacks.")
def rivals(
    methods: Annotated[list[str], typer.Argument(help="none, quorumark, paper-code, fedipr, waffle, fedtracker.")],
    dataset: Annotated[str, typer.Option(help="The images.")] = "cifar10",
    model: Annotated[str, typer.Option(help="The network.")] = "resnet18",
    members: Annotated[int, typer.Option(help="How many members there are.")] = 32,
    rounds: Annotated[int, typer.Option(help="How many rounds they train.")] = 60,
    unmarked_rounds: Annotated[
        int,
        typer.Option(help="Of the unmarked models that detectors are calibrated on, after the first; 0: as others."),
    ] = 0,
    attacks: Annotated[
        bool, typer.Option("--attacks/--no-attacks", help="Attack, calibrate and forge as well.")
    ] = True,
    epochs: Annotated[int, typer.Option(help="Of attacks that train.")] = 100,
    secrets: Annotated[int, typer.Option(help="Fresh secrets that each unmarked model is tested with.")] = 40,
    server_rate: Annotated[
        float, typer.Option(help="The learning rate of servers that train on triggers; the papers' is 0.0005.")
    ] = 5e-4,
    evaluate_every: Annotated[int, typer.Option(help="Validate every so many rounds.")] = 5,
    seed: Annotated[int, typer.Option(help="The seed.")] = 0,
    device: Device = "auto",
    data: Data = Path("data"),
    results: Results = Path("results"),
    runs: Annotated[Path, typer.Option(help="The folder for unmarked models.")] = Path("runs/rivals"),
    streams: Annotated[int, typer.Option(help="Members in flight at once on a GPU.")] = 5,
) -> None:
    """Train other methods' marks beside ours, attack, calibrate and forge them; results are in RESULTS/rivals."""
    from quorumark.research.lab.config import Settings
    from quorumark.research.lab.data import load
    from quorumark.research.lab.rivals.harness import Harness
    from quorumark.research.lab.rivals.table import FOLDER

    steps = ("crop", "flip", "autoaugment") if dataset.startswith("cifar") else ()
    base = Settings(
        dataset, members=members, rounds=rounds, seed=seed, model=model, augment=steps, evaluate_every=evaluate_every
    )
    harness = Harness(
        base, load(dataset, data), runs, results / FOLDER, _device(device), epochs, secrets, streams, server_rate,
        unmarked_rounds, lambda t: typer.echo(t),
    )  # fmt: skip
    for method in methods:
        harness.do(method, attacked=attacks)


@app.command("tokens")
def tokens(
    configuration: Annotated[str, typer.Argument(help="A configuration of language models, or a TOML file.")],
    only: Only = "*",
    data: Data = Path("data"),
    models: Models = Path("models"),
    cache: Cache = Path("runs/tokens"),
    other_text: OtherText = None,
) -> None:
    """Make the tokens that runs need, for a machine without the tokenizers package."""
    from quorumark.research.lab.series import Clock
    from quorumark.research.lab.workbench import Workbench

    bench = Workbench(models, data, cache, Path("results"), Path("runs/lab"), "cpu", False, Clock(None), other_text)
    for name, dataset in {(s.model, s.dataset): None for s in _chosen(configuration, only, None, None)}:
        found = bench.corpus(name, dataset)
        counts = ", ".join(f"{split} {ids.size}" for split, ids in found.splits.items())
        typer.echo(f"{name}, {dataset}: {counts} tokens in {cache}")


@app.command("import-model")
def import_model(
    source: Annotated[Path, typer.Argument(help="A GGUF file.")],
    out: Annotated[Path, typer.Argument(help="The folder that it becomes.")],
) -> None:
    """Make a folder for transformers from a GGUF file, dequantised: needs the extra `gguf`."""
    from quorumark.research.lab.language import import_gguf

    typer.echo(f"written: {out}, {import_gguf(source, out):,} parameters")


@app.command("table")
def table(
    results: Results = Path("results"),
    out: Annotated[Path, typer.Option(help="The page.")] = Path("docs/results.md"),
    check: Annotated[bool, typer.Option("--check", help="Fail if the page is not what the results say.")] = False,
) -> None:
    """Make docs/results.md from the result files."""
    from quorumark.errors import InputError, RecordError
    from quorumark.files import write_shared
    from quorumark.research.lab.attacked import section
    from quorumark.research.lab.config import configurations, read
    from quorumark.research.lab.page import attack_section, page
    from quorumark.research.lab.results import ATTACKED, read_all
    from quorumark.research.lab.rivals import table as rivals

    if not results.is_dir():
        raise InputError("--results", "must be a folder with the results of runs", str(results))
    figures = out.parent / "figures"
    bodies = read_all(results)
    sections = [
        section(results / "attacks", figures),
        rivals.section(results / rivals.FOLDER, bodies, figures),
        attack_section(results / ATTACKED),
    ]
    more = "\n".join(filter(None, sections))
    text = page([read(name) for name in configurations()], bodies, more, figures)
    if check:
        if not out.exists() or out.read_text() != text:
            raise RecordError(f"{str(out)!r} is not what the result files say: run quorumark lab table")
        typer.echo(f"{out} is what the result files say")
        return
    write_shared(out, text.encode())
    typer.echo(f"written: {out}")


@app.command("collect")
def collect(
    source: Annotated[Path, typer.Argument(help="A folder with result files, of runs on another machine.")],
    results: Results = Path("results"),
) -> None:
    """Take over result files that are new, or of longer runs than those that are here."""
    from quorumark.errors import InputError
    from quorumark.research.lab.results import read_all, write
    from quorumark.research.lab.rivals.table import FOLDER, read_rivals

    found, rivals = read_all(source), read_rivals(source / FOLDER)
    if not found and not rivals:
        raise InputError("SOURCE", "must be a folder with result files", str(source))
    for name, body in found.items():
        taken = write(body, results) is not None
        typer.echo(f"{name}: {body['rounds']} rounds, {'taken' if taken else 'a longer run is here'}")
    for name, body in rivals.items():
        (results / FOLDER).mkdir(parents=True, exist_ok=True)
        taken = write(body, results / FOLDER) is not None
        typer.echo(f"{FOLDER}/{name}: {body['rounds']} rounds, {'taken' if taken else 'a longer run is here'}")


@app.command("plot")
def plot(
    configuration: Annotated[str, typer.Argument(help="clients, strength or rivals.")] = "clients",
    results: Results = Path("results"),
    out: Annotated[Path | None, typer.Option(help="Where the SVG goes; by default docs/figures/lab-NAME.svg.")] = None,
) -> None:
    """Draw z against the number of members or the strength, or all methods' attacks: needs the extra `report`."""
    from quorumark.errors import InputError
    from quorumark.research.lab.config import read
    from quorumark.research.lab.plot import draw
    from quorumark.research.lab.results import read_all
    from quorumark.research.lab.rivals import picture, table

    if configuration == "rivals":
        target = out or Path("docs/figures/lab-rivals.svg")
        marks = picture.dots(table.read_rivals(results / table.FOLDER))
        if not marks:
            raise InputError("--results", "must be a folder with results of `lab rivals`", str(results))
        target.parent.mkdir(parents=True, exist_ok=True)
        picture.draw(marks, target)
        typer.echo(f"drawn: {target}, {len(marks)} points")
        return
    found = read(configuration)
    target = out or Path(f"docs/figures/lab-{found.name}.svg")
    bodies = read_all(results)
    if not any(run.id in bodies for run in found.runs):
        raise InputError("--results", f"must be a folder with results of {found.name}", str(results))
    target.parent.mkdir(parents=True, exist_ok=True)
    typer.echo(f"drawn: {target}, {draw(found, bodies, target)} points")


@app.command("time")
def time_(
    members: Annotated[str, typer.Option(help="Numbers of members.")] = "8,32,128",
    streams: Annotated[str, typer.Option(help="Numbers of streams.")] = "5",
    strength: Annotated[str, typer.Option(help="The mark.")] = "rho:0.05",
    model: Annotated[str, typer.Option(help="The network.")] = "resnet18",
    rounds: Annotated[int, typer.Option(help="Rounds to time.")] = 4,
    profile: Annotated[bool, typer.Option("--profile", help="Also the longest kernels of each case.")] = False,
    device: Device = "auto",
) -> None:
    """Seconds a round on this machine, with images of noise of CIFAR's size and number."""
    from quorumark.research.lab.config import Settings
    from quorumark.research.lab.timing import kernels, timings

    steps = ("crop", "flip", "autoaugment")
    settings = Settings("noise", strength, model=model, augment=steps)
    cases = [(int(k), int(s)) for k in members.split(",") for s in streams.split(",")]
    for t in timings(cases, settings, _device(device), rounds):
        what = f"K={t.members} streams={t.streams}"
        numbers = f"{t.round:.3f} s a round ({t.training:.3f} s training), first {t.first:.1f} s, {t.gigabytes:.1f} GB"
        typer.echo(f"{what}: {t.error or numbers}")
        if profile and not t.error:
            typer.echo("\n".join(kernels(t.members, t.streams, settings, _device(device))))


def _device(name: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _chosen(
    configuration: str,
    only: str,
    seed: int | None,
    rounds: int | None,
    evaluate_every: int | None = None,
    patience: int | None = None,
) -> list[Settings]:
    from fnmatch import fnmatchcase

    from quorumark.errors import InputError
    from quorumark.research.lab.config import read

    found_in = read(configuration)
    if patience is not None and found_in.task != "language":
        raise InputError("--patience", "must be left out for images", patience)
    runs = [settings for settings in found_in.runs if seed in (None, settings.seed)]
    found = {s.id: s for glob in only.split(",") for s in runs if fnmatchcase(s.id, glob)}
    if not found:
        raise InputError("--only and --seed", "must leave some runs of the configuration")
    changes: Any = {"rounds": rounds, "evaluate_every": evaluate_every, "patience": patience}
    return [replace(s, **{k: v for k, v in changes.items() if v is not None}) for s in found.values()]


def _masked(settings: Settings, images: ImageSet, rounds: int) -> None:
    from quorumark.research.lab.masked import compare

    for r in compare(settings, images, rounds):
        mark = f"the mark's largest part {r.largest:.2e}" if r.marked else "no mark yet"
        history = "" if r.alike else ", ANOTHER HISTORY"
        wider = f", {r.widened} members needed wider units" if r.widened else ""
        told = f"{r.different} weights differ{history}, {mark}{wider}, {r.seconds:.1f} s"
        typer.echo(f"{settings.id}: round {r.round}, {told}")
