"""The attack suite with the paper's budgets on a model of the lab, on the device that trained it (docs/lab.md).

Attacks that train do so side by side (`lab.retrain`); those that change weights run on the CPU meanwhile, and so does
z. Every attacked model is a row of a table; what is there is not done again, so that a suite can be made in pieces. The
innocent models, which must not be accused, are trained and tested here as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quorumark.align.groups import Groups
from quorumark.align.procedure import align
from quorumark.align.trace import derive_groups
from quorumark.errors import InconclusiveError, InputError
from quorumark.files import replacing
from quorumark.model.blocks import MOST, blocks_of
from quorumark.research.attacks import Target, chain
from quorumark.research.attacks.by_layers import parts_of
from quorumark.research.known import KnownKey, TensorsInMemory
from quorumark.research.lab import data, models
from quorumark.research.lab.attacked import DISTILLATION, EPOCHS, FORMAT, LR, write
from quorumark.research.lab.config import Settings
from quorumark.research.lab.image_run import ImageRun
from quorumark.research.lab.null import random_q, tail
from quorumark.research.lab.parted import PartedAttackers, expected, less, removed
from quorumark.research.lab.results import scores_of, where_run
from quorumark.research.lab.retrain import Attacker, Attackers, Feed
from quorumark.research.lab.tried import Trained, layered_plan, plan
from quorumark.research.rows import ORIGINAL, Row, parsed_rows

__all__ = ["Suite", "open_run"]

_LOGGED = (1, 2, 5, 10, 20, 50)  # epochs whose models are rows as well, beside the last
_SEED = 1
_KEYS = 10_000  # random keys whose Q the released model is tried with
_KINDS = ("another start", "the same start", "half-trained")  # innocent models
_SHAPELESS = ("quantisation", "pruning", "structured-pruning", "noise", "overwriting")
_MOVED: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (  # measured aligned as well
    (("permutation", {}),),
    (("permutation", {}), ("rescaling", {})),
    (("signs", {}),),
    (("channel-removal", {"ratio": 0.3}),),
    (("permutation", {}), ("rescaling", {}), ("quantisation", {"scheme": "static4"})),
    (("pruning", {"ratio": 0.5}), ("permutation", {}), ("rescaling", {})),
    (("channel-removal", {"ratio": 0.1}),),
    (("channel-removal", {"ratio": 0.5}),),
)
_TUNED: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (  # after fine-tuning on a fifth of the data
    (("permutation", {}),),
    (("pruning", {"ratio": 0.5}), ("permutation", {}), ("rescaling", {})),
    (("quantisation", {"scheme": "static4"}),),
)

Steps = Sequence[tuple[str, Mapping[str, Any]]]
Scores = tuple[float | None, float | None, float | None]
"""z, Q, log10 of its bound."""


# --- what is attacked -------------------------------------------------------------------------------------


def open_run(folder: Path, images: str | Path, device: str, **options: Any) -> tuple[ImageRun, data.ImageSet]:
    """A run from the folder of its checkpoint, with its data."""
    checkpoint = folder / "checkpoint.pt"
    if not checkpoint.exists():
        raise InputError("RUN", "must be one with a checkpoint in --runs (quorumark lab run)", str(folder))
    body = torch.load(checkpoint, map_location="cpu", weights_only=False)
    if "augment" not in body["settings"]:
        raise InputError(
            "RUN", "must be a run with images (for text: quorumark lab run language --attacks)", folder.name
        )
    kept = {**body["settings"], "augment": tuple(body["settings"]["augment"])}
    settings = Settings(**kept, rounds=max(1, len(body["log"])))
    found = data.load(settings.dataset, Path(images))
    run = ImageRun(settings, found, device, **options)
    run.restore(checkpoint)
    return run, found


def _keep(vector: Tensor, path: Path) -> None:
    """A model in a file: whole, or not there."""
    with replacing(path, 0o644) as file:
        torch.save(vector.cpu(), file)


@dataclass(eq=False)
class _Waiting:
    """Something that is computed on the CPU, and what to do with it then, in the main thread."""

    future: Future[Any]
    finish: Callable[[Any], None]
    urgent: bool


@dataclass(eq=False)
class Suite:
    """Attacks on a run's released model. `run_all` goes on with them until all are done or the time is up."""

    run: ImageRun
    images: data.ImageSet
    folder: Path
    results: Path
    epochs: int = EPOCHS
    side: int = 8
    streams: int = 8
    seconds: float | None = None
    tell: Callable[[str], None] = lambda _: None
    only: str = "*"
    layers: bool = False
    rows: list[Row] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.run.mark is None or self.run.settings.per_client:
            raise InputError("RUN", "must be a run with one mark", self.run.settings.strength)
        self._start, self._lock = time.monotonic(), threading.Lock()
        self.released = self.run.released
        some = max(1, (os.cpu_count() or 1) // 6)
        self._workers = {urgent: ThreadPoolExecutor(some) for urgent in (True, False)}
        self._waiting: list[_Waiting] = []
        self._speed: float | None = None  # attackers' images a second
        self._fleet: Attackers | None = None
        self._parted: PartedAttackers | None = None
        self._taken: dict[tuple[str, int, str], Future[tuple[Tensor, float | None]]] = {}
        self._found: Groups | None = None
        self._like = {name: tensor.cpu().numpy() for name, tensor in self.run.fleet.module.state_dict().items()}
        self._original, self._anchor = self._tensors(self.released), self._tensors(self.run.initial)
        self._known = KnownKey(self.run.keys[0].numpy(), self.run.layout, TensorsInMemory(self._anchor))
        self._before = 0.0  # seconds of earlier commands
        self._any = False  # whether `only` has named something
        self._begin()

    # --- state ---

    def _begin(self) -> None:
        """What an earlier command left, or the released model as the first row."""
        run, mark = self.run, hashlib.sha256(self.released.cpu().numpy().tobytes()).hexdigest()
        table, rest = self.folder / "attacks.csv", self.folder / "attacks.json"
        if table.exists() and rest.exists():
            body = json.loads(rest.read_text())
            if body.get("released_digest") == mark:
                self.rows, self.body = parsed_rows(table.read_text(), str(table)), body
                self._before = float(body["seconds"])
                write(self.rows, self.body, self.results, body["id"])
                return
        for path in self.folder.glob("tuned*.pt"):  # of another model
            path.unlink()
        self.body = {
            "format": FORMAT,
            "id": run.settings.id,
            "rounds": run.round_no,
            "released_round": run.best.round,
            "released_digest": mark,
            "settings": {**run.settings.asdict(), "augment": list(run.settings.augment)},
            "rho": round(run.mark.rho, 5) if run.mark is not None else None,
            "z": scores_of(run, self.released),
            "epochs": self.epochs,
            "data": {"train": len(run._y), "test": len(run.test[1]), "note": run.note},
            "estimates": self._cosines(),
            "distillation": [],
            "innocents": [],
            "seconds": 0.0,
            **where_run(run),
        }
        if self.layers:
            form = self._known.form(TensorsInMemory(self._original))
            spans = blocks_of(run.layout).spans
            self.body["random_keys"] = tail(random_q(form.x, spans, _KEYS, run.device, _SEED), len(spans))
        z, q, log10_q = self._scores(self._original)
        accuracy = run.fleet.accuracy(self.released, *run.test)
        self._add(Row(ORIGINAL, accuracy, z, None, q=q, log10_q=log10_q))

    def _cosines(self) -> list[dict[str, Any]]:
        """How near each estimate comes to the key."""
        key = self.run.keys[0].signs(self.run.device).double()
        found = []
        for how, coalition in self._estimates():
            guess = self.guess(how, coalition).double()
            cosine = float(guess @ key / (guess.norm() * key.norm()).clamp_min(1e-300))
            found.append({"estimate": how, "coalition": coalition, "cosine": round(cosine, 5)})
        return found

    def _estimates(self) -> list[tuple[str, int]]:
        watched = self.run.observer
        if watched is None:
            return [("sum", 0)]
        return [(how, c) for c in watched.coalitions for how in ("sum", "last", "regression", "gls")]

    def guess(self, how: str, coalition: int = 0) -> Tensor:
        """An estimate of the key, over the carriers."""
        if self.run.observer is not None:
            return self.run.observer.estimate(how, coalition)
        return (self.run.model - self.run.initial)[: self.run.layout.coordinates]

    def _add(self, *rows: Row) -> None:
        self.rows += rows
        self.body["seconds"] = round(self._before + time.monotonic() - self._start, 1)
        write(self.rows, self.body, self.folder, "attacks")
        write(self.rows, self.body, self.results, self.body["id"])

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return float("inf") if self.seconds is None else self.seconds - (time.monotonic() - self._start)

    def _chosen(self, attack: str, settings: Mapping[str, Any]) -> bool:
        """Whether `only` names it: a pattern for the attack with its settings, as the table file has them."""
        name = ", ".join(filter(None, (attack, Row(attack, 0.0, None, None, settings=settings).budget)))
        chosen = fnmatchcase(name, self.only)
        self._any = self._any or chosen
        return chosen

    def _done(self, attack: str, settings: Mapping[str, Any]) -> bool:
        return Row(attack, 0.0, None, None, seed=_SEED, settings=settings).key in {row.key for row in self.rows}

    # --- measuring ---

    def _tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """A model as an attacker has it, on the CPU."""
        arrays = self.run.layout.unflatten(vector.cpu().numpy(), self._like)
        return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}

    @property
    def _groups(self) -> Groups:
        """The channels that move together, found once; several threads ask."""
        with self._lock:
            if self._found is None:
                height, width, channels = self.images.image
                self._found = derive_groups(self._make(), torch.zeros(1, channels, height, width))
            return self._found

    def _make(self) -> Any:
        height, _, channels = self.images.image
        settings = self.run.settings
        return models.make(settings.model, self.images.classes, channels, height, settings.seed)

    def _scores(self, weights: Mapping[str, Any]) -> Scores:
        """z as it is, Q by layers and log10 of its bound; None where the sizes are others."""
        specs = self.run.layout.spans("carrier")
        if any(tuple(weights[spec.name].shape) != spec.shape for spec, _ in specs):
            return None, None, None
        return self._scored(TensorsInMemory(weights))

    def _scored(self, suspect: Any) -> Scores:
        form = self._known.form(suspect)
        return self._known.z_of(form), *(self._known.q_of(form) or (None, None))

    def _aligned(self, weights: Mapping[str, Any], reference: Mapping[str, Any] | None = None) -> tuple[Scores, int]:
        """The same and the surplus after alignment to the anchor, or to what must not be used."""
        suspect = TensorsInMemory(weights)
        try:
            found = align(suspect, TensorsInMemory(reference or self._anchor), self.run.layout, self._groups)
        except InconclusiveError:
            return (None, None, None), 0
        return self._scored(found.model(suspect)), found.surplus

    def _accuracy(self, weights: Mapping[str, Any]) -> float:
        """On the test images; a model of other sizes computes in float32."""
        if all(tuple(weights[name].shape) == array.shape for name, array in self._like.items()):
            vector = torch.from_numpy(self.run.layout.flatten(weights)).to(self.run.device)
            return self.run.fleet.accuracy(vector, *self.run.test)
        module = self._target().module(weights).to(self.run.device).eval()
        x, y = self.run.test
        with torch.no_grad():
            parts = [module(part.float()).argmax(1) for part in x.permute(0, 3, 1, 2).split(1000)]
        return float((torch.cat(parts) == y).float().mean())

    def _target(self, weights: Mapping[str, Any] | None = None, other: Mapping[str, Any] | None = None) -> Target:
        height, width, channels = self.images.image
        return Target(
            self._make,
            self._original if weights is None else weights,
            checkpoints=(self._anchor,),
            other=other,
            example=torch.zeros(1, channels, height, width),
            layout=self.run.layout,
        )

    # --- the CPU's part ---

    def _submit(self, work: Callable[[], Any], finish: Callable[[Any], None], *, urgent: bool = False) -> None:
        """Something for the CPU. What took training is urgent: it is waited for, even if the time is up."""
        self._waiting.append(_Waiting(self._workers[urgent].submit(work), finish, urgent))

    def _drain(self, *, wait: bool = False) -> None:
        """Finishes what is ready; with `wait` all of it, as long as there is time, and what is urgent in any case."""
        while self._waiting:
            ready = [w for w in self._waiting if w.future.done()]
            self._waiting = [w for w in self._waiting if w not in ready]
            for waiting in ready:
                waiting.finish(waiting.future.result())
            if not wait or (self.left < 0 and not any(w.urgent for w in self._waiting)):
                return
            if not ready:
                time.sleep(0.02)

    def _weigh(
        self, steps: Steps, *, start: Mapping[str, Any] | None = None, before: Steps = (), aligned: bool = False,
        other: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """An attack on weights, or a chain of them; `before` names what has been done to `start` already."""
        links = [*before, *steps]
        name = " + ".join(link for link, _ in links)
        settings = dict(links[0][1]) if len(links) == 1 else {
            f"{k}.{what}": value for k, (_, more) in enumerate(links) for what, value in more.items()
        }  # fmt: skip
        if not self._chosen(name, settings) or self._done(name, settings):
            return

        def work() -> tuple[Any, ...]:
            result = chain(self._target(start, other), steps, seed=_SEED)
            plain = self._scores(result.weights)
            return result, plain, *(self._aligned(result.weights) if aligned else ((None, None, None), 0))

        def finish(found: tuple[Any, ...]) -> None:
            result, plain, moved, surplus = found
            accuracy = self._accuracy(result.weights)
            q = min((s[1:] for s in (plain, moved) if s[2] is not None), key=lambda s: s[1], default=(None, None))
            row = Row(name, accuracy, plain[0], moved[0], result.seconds, _SEED, settings, 0, 0, surplus, *q)
            self._told(row)
            self._add(row)

        self._submit(work, finish)

    def _told(self, row: Row) -> None:
        z = "not testable" if row.best is None else f"{row.best:.1f}"
        by = "" if row.q is None else f", Q {row.q:.0f} (10^{row.log10_q})"
        self.tell(f"{row.attack}, {row.budget}: accuracy {100 * row.accuracy:.2f} %, z {z}{by}")

    # --- the device's part ---

    def _attackers(self) -> Attackers:
        if self._fleet is None:
            run = self.run
            self._fleet = Attackers(
                run.fleet.module, run.layout, self.side, self.images.classes, self.images.image, run.device,
                streams=self.streams,
            )  # fmt: skip
        return self._fleet

    def _parted_attackers(self) -> PartedAttackers:
        if self._parted is None:
            run = self.run
            most = int(parts_of(run.layout, "row")[-1]) + 1
            self._parted = PartedAttackers(
                run.fleet.module, run.layout, self.side, self.images.classes, self.images.image, run.device,
                streams=self.streams, most=max(most, MOST), anchor=run.initial,
            )  # fmt: skip
        return self._parted

    def _removed(self, job: Trained) -> tuple[Tensor, float | None]:
        """The released model less an estimate of the key in every block, by expected amounts or an oracle's who knows
        the key; and the largest |z_b| that the oracle's leave. The oracle answers on the CPU: `_ask_ahead` begins with
        all of them while others train."""
        wanted = job.estimate, job.coalition, job.amounts
        if wanted not in self._taken:
            self._ask_ahead([job])
        return self._taken[wanted].result()

    def _ask_ahead(self, jobs: Sequence[Trained]) -> None:
        parts = torch.from_numpy(parts_of(self.run.layout, "block"))
        released = self.released.cpu()
        moved = (released - self.run.initial.cpu())[: len(parts)]

        def work(guess: Tensor, amounts: str) -> tuple[Tensor, float | None]:
            if amounts == "expected":
                rho = self.run.mark.rho if self.run.mark is not None else 0.0
                return less(released, guess, parts, expected(moved, guess, parts, rho)), None
            sums = [torch.bincount(parts, (v * v).double()).sqrt() for v in (moved, guess)]
            model, amount = removed(released, guess, parts, sums[0] / sums[1].clamp_min(1e-300), oracle)
            return model, amount.left

        def oracle(vector: Tensor) -> list[float]:
            return self._known.z_by_block(self._known.form(TensorsInMemory(self._tensors(vector))))

        for how, coalition, amounts in dict.fromkeys((j.estimate, j.coalition, j.amounts) for j in jobs if j.amounts):
            guess = self.guess(how, coalition).to(released)
            self._taken[how, coalition, amounts] = self._workers[True].submit(work, guess, amounts)

    def _subset(self, fraction: float) -> Tensor:
        """A uniform sample of the training images: the same for all attacks with this fraction."""
        run = self.run
        count = max(2, round(fraction * len(run._y)))
        order = np.random.default_rng([_SEED, run.settings.seed]).permutation(len(run._y))
        return torch.from_numpy(order[:count]).to(run.device)

    @property
    def _tuned(self) -> Path:
        """Where the model is that chains begin with, fine-tuned for so many epochs."""
        return self.folder / f"tuned-{self.epochs}.pt"

    def _student(self) -> Tensor:
        """Where a distilled model starts: weights that nobody else had."""
        height, _, channels = self.images.image
        settings = self.run.settings
        module = models.make(settings.model, self.images.classes, channels, height, settings.seed + 1000)
        return torch.from_numpy(self.run.layout.flatten(module))

    def _attacker(self, job: Trained) -> Attacker:
        if job.attack == DISTILLATION:
            return Attacker(self._student(), kappa=0.5, decay=0.0)
        if job.amounts:
            return Attacker(self._removed(job)[0])
        guess = self.guess(job.estimate, job.coalition) if job.estimate else None
        return Attacker(self.released, guess, job.alpha, rate=job.lr / LR)

    def _settings(self, job: Trained) -> dict[str, Any]:
        return job.settings | ({} if self.epochs == EPOCHS else {"epochs": self.epochs})

    def _fits(self, images: float) -> bool:
        """Whether so many attackers' images can be trained on in the time that is left."""
        return self.left > 5 and (self._speed is None or images / self._speed < self.left - 5)

    def _open(self, group: Sequence[Trained]) -> list[Trained]:
        """Those of a group that are wanted, and not done yet."""
        wanted = [job for job in group if self._chosen(job.attack, self._settings(job))]
        return [job for job in wanted if not self._done(job.attack, self._settings(job))]

    def _prepare(self, sizes: set[int]) -> None:
        """Records every step that will be needed before anything else runs: other threads would disturb it."""
        if self.run.device.type == "cuda" and sizes - {0}:
            self._attackers().prepare(sorted(sizes - {0}, reverse=True))
            if self.layers:
                self._parted_attackers().prepare(sorted(sizes - {0}, reverse=True))

    def _train(self, jobs: Sequence[Trained]) -> bool:
        """Trains attackers with one fraction side by side; False if the time was up before their last epoch."""
        if not jobs:
            return True
        own = self._subset(jobs[0].fraction)
        fleet = self._parted_attackers() if jobs[0].by else self._attackers()
        feed = Feed(self.run, own[None], [_SEED], fleet.kind)
        images = len(jobs) * feed.steps * feed.batch * self.epochs
        if not self._fits(images):
            return False
        teach = any(job.attack == DISTILLATION for job in jobs)
        attackers = [self._attacker(job) for job in jobs]
        if isinstance(fleet, PartedAttackers):
            parts = torch.from_numpy(parts_of(self.run.layout, jobs[0].by))
            fleet.begin_parts(attackers, parts, [job.weights for job in jobs])
        else:
            fleet.begin(attackers)
        for k, job in enumerate(jobs):
            if job.amounts:  # what the repair begins with
                self._look(job, fleet.model(k), 0, 0, len(own), 0.0)
        begun = time.perf_counter()
        for epoch in range(1, self.epochs + 1):
            x, y = feed.take(epoch)
            if epoch < self.epochs:
                feed.ahead(epoch + 1)
            teacher = None
            if teach:
                flat = self.run.fleet.logits(self.released, x.flatten(0, 2))
                teacher = flat.view(*x.shape[:3], -1)
            fleet.epoch(x, y, teacher)
            if epoch in _LOGGED or epoch == self.epochs:
                taken = time.perf_counter() - begun
                for k, job in enumerate(jobs):
                    self._look(job, fleet.model(k), epoch, feed.steps * epoch, len(own), taken / len(jobs))
                self._drain()
            if self.left < 0 and epoch < self.epochs:
                return False
        self._speed = images / (time.perf_counter() - begun)
        self.tell(f"{len(jobs)} attackers on {len(own)} images: {self._speed:.0f} images a second")
        return True

    def _look(self, job: Trained, vector: Tensor, epoch: int, steps: int, examples: int, seconds: float) -> None:
        """A model on its way, or at its end: a row."""
        accuracy = self.run.fleet.accuracy(vector, *self.run.test)
        last, weights = epoch == self.epochs, self._tensors(vector)
        settings = self._settings(job) | ({} if last else {"epoch": epoch})
        learnt = None
        if last and job.attack == DISTILLATION:
            ours, theirs = (self.run.fleet.logits(v, self.run.test[0]).argmax(1) for v in (self.released, vector))
            learnt = {**settings, "agreement": round(float((ours == theirs).float().mean()), 4)}
        if last and job == Trained("fine-tuning", 0.2):
            _keep(vector, self._tuned)

        def finish(found: Scores) -> None:
            z, q, log10_q = found
            left = self._removed(job)[1] if job.amounts else None
            row = Row(job.attack, accuracy, z, None, seconds, _SEED, settings, examples, steps, 0, q, log10_q, left)
            if last:
                self._told(row)
            if learnt is not None:
                others = [e for e in self.body["distillation"] if {**e, "agreement": 0} != {**learnt, "agreement": 0}]
                self.body["distillation"] = [*others, learnt]
            if not self._done(row.attack, row.settings):
                self._add(row)

        self._submit(lambda: self._scores(weights), finish, urgent=True)

    # --- innocent models ---

    def innocents(self, count: int, epochs: int) -> None:
        """Models that are not marked with this key, tested aligned to the anchor, and to the released model.

        A third starts elsewhere; a third starts from θ_0, and sees the images in another order; a third does so for
        half as long. Unmarked runs beside this one are tested as well, if they are of the same kind.
        """
        done = self._judged()
        for name, vector in self._neighbours():
            if name not in done:
                self._judge(name, "unmarked run", vector)
        pending = iter(self._wanted(count))
        while group := list(islice(pending, self.side)):
            if not self._fits(len(group) * epochs * len(self.run._y)):
                return
            self._raise(group, epochs)
            self._drain()

    def _judged(self) -> set[str]:
        return {entry["name"] for entry in self.body["innocents"]}

    def _wanted(self, count: int) -> list[tuple[int, str]]:
        """Those that are still to be trained, with their numbers."""
        names = [f"{_KINDS[i % 3]} {i // 3 + 1}" for i in range(count)]
        return [(i, name) for i, name in enumerate(names) if name not in self._judged()]

    def _sizes(self, count: int) -> set[int]:
        """How many innocent models train at once."""
        there = len(self._wanted(count))
        return {min(self.side, there), there % self.side}

    def _raise(self, group: Sequence[tuple[int, str]], epochs: int) -> None:
        """Trains innocent models side by side, each on its own order of all images."""
        run, fleet = self.run, self._attackers()
        height, _, channels = self.images.image
        settings = run.settings
        starts = []
        for i, _ in group:
            module = models.make(settings.model, self.images.classes, channels, height, settings.seed + 2000 + i)
            starts.append(torch.from_numpy(run.layout.flatten(module)) if i % 3 == 0 else run.initial)
        own = torch.arange(len(run._y), device=run.device).expand(len(group), -1)
        feed = Feed(run, own, [3000 + i for i, _ in group], fleet.kind)
        fleet.begin([Attacker(start) for start in starts])
        for epoch in range(1, epochs + 1):
            x, y = feed.take(epoch)
            if epoch < epochs:
                feed.ahead(epoch + 1)
            fleet.epoch(x, y)
            for k, (i, name) in enumerate(group):
                half = i % 3 == 2
                if epoch == (-(-epochs // 2) if half else epochs):
                    vector = fleet.model(k)
                    self._judge(name, _KINDS[i % 3], vector)
                    if i == 1:
                        _keep(vector, self.folder / "innocent.pt")

    def _neighbours(self) -> list[tuple[str, Tensor]]:
        """The released models of unmarked runs of the same data and network, of any seed."""
        found, own = [], self.run.settings
        for path in sorted(self.folder.parent.glob("*/checkpoint.pt")):
            if path.parent.name.startswith(f"{own.dataset}-{own.model}-") and "-none-" in path.parent.name:
                body = torch.load(path, map_location="cpu", weights_only=False)
                best = body["best"][2] if body["best"][2] is not None else body["model"]
                if best.numel() == self.run.layout.size:
                    found.append((path.parent.name, best.to(self.run.device)))
        return found

    def _judge(self, name: str, kind: str, vector: Tensor) -> None:
        accuracy = self.run.fleet.accuracy(vector, *self.run.test)
        weights = self._tensors(vector)

        def work() -> tuple[Any, ...]:
            return self._scores(weights), self._aligned(weights)[0], self._aligned(weights, self._original)[0]

        def finish(found: tuple[Any, ...]) -> None:
            plain, right, wrong = (None if z is None else round(z, 3) for z, _, _ in found)
            entry = {"name": name, "kind": kind, "accuracy": round(accuracy, 4)}
            entry |= {"z": plain, "z_anchor": right, "z_released": wrong}
            entry |= {"log10_q": found[0][2], "log10_q_anchor": found[1][2]}
            self.body["innocents"].append(entry)
            self.tell(f"innocent, {name}: accuracy {100 * accuracy:.1f} %, z {plain}, aligned {right}, wrongly {wrong}")
            self._add()

        self._submit(work, finish)

    # --- all of it ---

    def run_all(self, innocents: int = 0, innocent_epochs: int = 5) -> bool:
        """Everything that is not there yet; True if all of it is there now."""
        from quorumark.research.attacks import ATTACKS

        watched = self.run.observer
        coalitions = [] if watched is None else [c for c in watched.coalitions if c]
        every = layered_plan(coalitions, watched is not None, self.side) if self.layers else []
        named = {job for group in every for job in group}  # what is in both is trained once
        every += [[j for j in group if j not in named] for group in plan(coalitions, watched is not None, self.side)]
        groups = [self._open(group) for group in every]
        self._prepare({len(group) for group in groups} | self._sizes(innocents))
        self._ask_ahead([job for group in groups for job in group])
        for name in _SHAPELESS[:3]:
            for settings in ATTACKS[name].settings:
                self._weigh([(name, settings)])
        for steps in _MOVED:
            self._weigh(steps, aligned=True)
        for name in _SHAPELESS[3:]:
            for settings in ATTACKS[name].settings:
                self._weigh([(name, settings)])
        left = [group for group in groups if not self._train(group)]  # a smaller one may still fit
        self._after_training()
        if innocents:
            self.innocents(innocents, innocent_epochs)
        path = self.folder / "innocent.pt"
        if path.exists():
            other = self._tensors(torch.load(path, weights_only=True))
            for share in (0.25, 0.5):
                self._weigh([("averaging", {"share": share})], other=other)
        self._drain(wait=True)
        if not self._any and not innocents:
            raise InputError("--only", "must name an attack with its settings, such as 'pruning, ratio=0.5'", self.only)
        done = not left and not self._waiting
        if innocents:
            done = done and len([e for e in self.body["innocents"] if e["kind"] != "unmarked run"]) >= innocents
        return done

    def _after_training(self) -> None:
        """Chains that begin with fine-tuning."""
        if not self._tuned.exists():
            return
        start = self._tensors(torch.load(self._tuned, weights_only=True))
        before = [("fine-tuning", self._settings(Trained("fine-tuning", 0.2)))]
        for steps in _TUNED:
            self._weigh(steps, start=start, before=before, aligned=True)

    def close(self) -> None:
        """Leaves what has not begun for another time."""
        for pool in self._workers.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self.run.close()
