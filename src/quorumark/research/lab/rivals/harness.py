"""Trains each method, looks at what it released, attacks it, and writes what came out: one file for each run.

All methods have the same network, data, partition, optimiser and number of rounds, and the same attacks:

    fine-tuning           on a fifth of the training images, with the paper's learning rate and with a tenth of it
    pruning, 4 bits       half of the weights; blocks of 32 weights with a scale each (GGUF's Q4_0)
    permutation           of all channels, each rescaled, which changes nothing that the model computes
    adaptive              fine-tuning with a tenth of the rate, and with all of it, by somebody who knows the method and
                          all public models, but no secret. Against quorumark and the paper's code: away from what the
                          model moved by. Against signs in gains: every layer's gains are evened out. Against triggers:
                          an eighth of each batch are patterns of the attacker's own with labels drawn at random
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quorumark.align.groups import Groups
from quorumark.align.trace import derive_groups
from quorumark.errors import InputError
from quorumark.files import replacing
from quorumark.research.attacks import Target, chain
from quorumark.research.lab import data, models
from quorumark.research.lab.config import Settings
from quorumark.research.lab.image_run import ImageRound
from quorumark.research.lab.results import where_run, write_lines
from quorumark.research.lab.retrain import Attacker, Attackers, Feed
from quorumark.research.lab.rivals.gains import norm_gains
from quorumark.research.lab.rivals.methods import STRENGTHS, Detector, RivalRun, detector_of
from quorumark.research.lab.rivals.table import FORMAT, FULL_RATE, METHODS, name_of
from quorumark.research.lab.rivals.triggers import RATE, patterned

__all__ = ["Harness"]

UNMARKED = 5  # models that detectors are calibrated on
_SEED, _FRACTION, _ALPHA, _GENTLE = 1, 0.2, 0.3, 0.1
_EVEN = 0.01  # how much of their differences gains lose in a step
_OWN = 8  # every so many-th image of a batch is a pattern of the attacker's own
_WEIGHTS: tuple[tuple[str, tuple[tuple[str, dict[str, Any]], ...]], ...] = (
    ("pruning 50 %", (("pruning", {"ratio": 0.5}),)),
    ("4 bits", (("quantisation", {"scheme": "q4_0"}),)),
    ("permutation and rescaling", (("permutation", {}), ("rescaling", {}))),
)
TUNED = ("fine-tuning 20 %", "fine-tuning 20 %, a tenth of the rate", "adaptive fine-tuning", FULL_RATE)
_ADAPTIVE = slice(2, 4)  # of them


class Tuners(Attackers):
    """Attackers who fine-tune; some of them even out gains."""

    even: Tensor | None = None
    _layers: tuple[tuple[int, int], ...] = ()

    def against(self, names: Sequence[str]) -> None:
        """The gains that may be evened out, before anything is recorded."""
        places = {place.name: (place.start, place.stop) for place in self.order.parameters}
        self._layers = tuple(places[name] for name in names if name in places)
        self.even = torch.zeros(self.members, device=self.device)

    def _follow(self, k: int, lane: int, gradients: list[Tensor]) -> None:
        super()._follow(k, lane, gradients)
        if self.even is not None:
            for start, stop in self._layers:
                part = self.theta[k, start:stop]
                part.add_((part.mean() - part) * self.even[k])


@dataclass(eq=False)
class Harness:
    """`base` are the settings of all runs, with 32 members, say; models of unmarked runs are kept in `folder`."""

    base: Settings
    images: data.ImageSet
    folder: Path
    results: Path
    device: str
    epochs: int = 100
    secrets: int = 40
    streams: int = 5
    server_rate: float = RATE  # of servers that train on triggers
    unmarked_rounds: int = 0  # of the unmarked models after the first; 0: as many as the others
    tell: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._fleet: Any = None
        self._tuners: Tuners | None = None
        self._found: Groups | None = None
        self._worker = ThreadPoolExecutor(1)

    # --- training ---

    def _trained(self, method: str, settings: Settings) -> RivalRun:
        start = time.perf_counter()
        fleet = None if method == "fedipr" else self._fleet
        options: dict[str, Any] = {"streams": self.streams, "fleet": fleet, "server_rate": self.server_rate}
        run = RivalRun(method, settings, self.images, self.device, **options)
        if method != "fedipr":
            self._fleet = run.fleet

        def tell(entry: ImageRound) -> None:
            if entry.accuracy is not None and (entry.round <= 5 or entry.round % 10 == 0):
                server = (
                    ""
                    if run.server is None
                    else f", {run.server.epochs[-1]} epochs, {run.server.shares[-1]} of triggers"
                )
                self.tell(f"{method}: round {entry.round}, validation {100 * entry.accuracy:.2f} %{server}")

        run.train(tell=tell)
        self.tell(f"{method}: {run.round_no} rounds in {time.perf_counter() - start:.1f} s")
        return run

    def unmarked(self) -> list[Tensor]:
        """Models of unmarked runs with different seeds, trained once."""
        found = []
        for seed in range(UNMARKED):
            path = self.folder / f"unmarked-{seed}.pt"
            rounds = self.base.rounds if seed == 0 else self.unmarked_rounds or self.base.rounds
            if not path.exists():
                settings = replace(self.base, strength="none", seed=seed, rounds=rounds)
                run = self._trained("none", settings)
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path, 0o644) as file:
                    torch.save(run.released.cpu(), file)
                if seed == 0:
                    write_lines(self._body(run), self._path(run))
            found.append(torch.load(path, map_location=self.device, weights_only=True))
        return found

    # --- a method ---

    def do(self, method: str, *, attacked: bool = True) -> None:
        """Trains a method's run and writes its file; again with each part that is measured."""
        if method not in METHODS:
            raise InputError("method", f"must be one of {', '.join(METHODS)}", repr(method))
        if method == "none":
            self.unmarked()
            return
        plain = self.unmarked() if attacked else []
        run = self._trained(method, replace(self.base, strength=STRENGTHS[method]))
        like = {name: tensor.cpu().numpy() for name, tensor in run.fleet.module.state_dict().items()}
        detector = detector_of(run, lambda: self._groups(), like)
        assert detector is not None  # noqa: S101 - METHODS has it
        body = self._body(run)
        body["detection"] = detector.look(run.released)
        write_lines(body, self._path(run))
        self.tell(f"{method}: accuracy {100 * body['accuracy']['released']:.2f} %, {body['detection']}")
        if attacked:
            self._attackers(run).prepare([len(TUNED)])  # nothing else may run while steps are recorded
            waiting = self._worker.submit(self._on_weights, run, like)
            body["attacks"] = self._tuned(run, detector)
            write_lines(body, self._path(run))
            body["attacks"] += self._weighed(run, detector, waiting)
            write_lines(body, self._path(run))
            body["calibration"] = detector.calibrated(plain, self.secrets)
            body["forged"] = detector.forged(plain[0], plain[1])
            self.tell(f"{method}: calibrated {body['calibration']}, forged {body['forged']}")
        body["seconds_in_all"] = round(time.perf_counter() - self._since, 1)
        write_lines(body, self._path(run))
        run.close()

    def _path(self, run: RivalRun) -> Path:
        self.results.mkdir(parents=True, exist_ok=True)
        return self.results / f"{_name(run)}.json"

    def _body(self, run: RivalRun) -> dict[str, Any]:
        self._since = time.perf_counter()
        released, taken = run.released, [entry.seconds for entry in run.log]
        body: dict[str, Any] = {
            "format": FORMAT,
            "id": _name(run),
            "method": run.method,
            "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in run.settings.asdict().items()},
            "rounds": run.round_no,
            "accuracy": {
                "released": round(run.fleet.accuracy(released, *run.test), 5),
                "validation": round(run.best.measure, 5),
                "released_round": run.best.round,
            },
            "data": {"train": len(run._y), "test": len(run.test[1]), "note": run.note},
            "seconds": round(sum(taken), 1),
            "seconds_per_round": round(float(np.median(taken)), 3),
            **where_run(run),
        }
        if run.server is not None:
            epochs = run.server.epochs
            body["server_epochs"] = {"first": epochs[0], "mean": round(float(np.mean(epochs[1:])), 1),
                                     "most": max(epochs[1:]), "rate": run.server.rate,
                                     "shares": run.server.shares[1:]}  # fmt: skip
        if run.method == "fedtracker":  # what everybody's copy costs, and whether each is traced to its owner
            best = run.best.model if run.best.model is not None else run.model
            body["accuracy"]["without fingerprint"] = round(run.fleet.accuracy(best, *run.test), 5)
        return body

    # --- attacks ---

    def _groups(self) -> Groups:
        if self._found is None:
            height, width, channels = self.images.image
            self._found = derive_groups(self._module(), torch.zeros(1, channels, height, width))
        return self._found

    def _module(self) -> Any:
        height, _, channels = self.images.image
        return models.make(self.base.model, self.images.classes, channels, height, self.base.seed)

    def _on_weights(self, run: RivalRun, like: Mapping[str, Any]) -> list[tuple[str, Any, float]]:
        """Attacks that do not train, on the CPU, while others do on the device."""
        arrays = run.layout.unflatten(run.released.cpu().numpy(), like)
        weights = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        height, width, channels = self.images.image
        target = Target(
            self._module, weights, example=torch.zeros(1, channels, height, width), layout=run.layout,
            known=self._groups(),
        )  # fmt: skip
        found = []
        for name, steps in _WEIGHTS:
            start = time.perf_counter()
            vector = torch.from_numpy(run.layout.flatten(chain(target, steps, seed=_SEED).weights))
            found.append((name, vector, time.perf_counter() - start))
        return found

    def _weighed(self, run: RivalRun, detector: Detector, waiting: Future[Any]) -> list[dict[str, Any]]:
        return [
            self._row(run, detector, name, vector.to(run.device), seconds, moved=name.startswith("permutation"))
            for name, vector, seconds in waiting.result()
        ]

    def _row(
        self, run: RivalRun, detector: Detector, name: str, vector: Tensor, seconds: float, *, moved: bool = False
    ) -> dict[str, Any]:
        accuracy = run.fleet.accuracy(vector, *run.test)
        row = {"attack": name, "accuracy": round(accuracy, 5), **detector.look(vector, moved=moved)}
        self.tell(f"{run.method}, {name}: accuracy {100 * accuracy:.2f} %, {row}")
        return {**row, "seconds": round(seconds, 1)}

    def _tuned(self, run: RivalRun, detector: Detector) -> list[dict[str, Any]]:
        """Attacks that train, side by side: the paper's rate, a tenth of it, and the adaptive ones at both."""
        start, tuners = time.perf_counter(), self._attackers(run)
        guess = (run.model - run.initial)[: run.layout.coordinates] if run.mark and not run.server else None
        alpha = _ALPHA if guess is not None else 0.0
        adaptive = [Attacker(run.released, guess, alpha, rate=rate) for rate in (_GENTLE, 1.0)]
        plain = [Attacker(run.released), Attacker(run.released, rate=_GENTLE)]
        tuners.begin([*plain, *adaptive])
        assert tuners.even is not None  # noqa: S101 - `_attackers` has made it
        tuners.even.zero_()
        if run.method in ("fedipr", "fedtracker"):
            tuners.even[_ADAPTIVE] = _EVEN
        count = max(2, round(_FRACTION * len(run._y)))
        own = torch.from_numpy(np.random.default_rng([_SEED, run.settings.seed]).permutation(len(run._y))[:count])
        feed = Feed(run, own[None].to(run.device), [_SEED], tuners.kind)
        patterns = self._patterns(run, feed) if run.server is not None else None
        for epoch in range(1, self.epochs + 1):
            x, y = feed.take(epoch)
            if epoch < self.epochs:
                feed.ahead(epoch + 1)
            if patterns is not None:
                x, y = _mixed_in(x, y, patterns, epoch, self.images.classes)
            tuners.epoch(x, y)
        vectors = [tuners.model(k) for k in range(len(TUNED))]
        taken = (time.perf_counter() - start) / len(TUNED)
        settings = {"fraction": _FRACTION, "epochs": self.epochs}
        return [
            {**self._row(run, detector, name, vector, taken), **settings}
            for name, vector in zip(TUNED, vectors, strict=True)
        ]

    def _attackers(self, run: RivalRun) -> Tuners:
        if self._tuners is None:
            classes, image = self.images.classes, self.images.image
            count = len(TUNED)
            self._tuners = Tuners(run.fleet.module, run.layout, count, classes, image, run.device, streams=count)
            self._tuners.against(norm_gains("fedipr", run.settings.model))
        return self._tuners

    def _patterns(self, run: RivalRun, feed: Feed) -> Tensor:
        """Images with as many patterns as an epoch has places for: the attacker's own."""
        places = feed.steps * (feed.batch // _OWN)
        return run.ready(patterned(self.images.image, -(-places // 10), 10, 1 << 21))[:places]


def _name(run: RivalRun) -> str:
    return name_of(run.method, run.settings, None if run.server is None else run.server.rate)


def _mixed_in(x: Tensor, y: Tensor, patterns: Tensor, epoch: int, classes: int) -> tuple[Tensor, Tensor]:
    """The adaptive attackers' batches get patterns, with labels that change from epoch to epoch."""
    some, count = x.shape[2] // _OWN, len(TUNED)
    images, labels = x.expand(-1, count, *x.shape[2:]).clone(), y.expand(-1, count, -1).clone()
    generator = torch.Generator(x.device).manual_seed(epoch)
    order = torch.randperm(len(patterns), generator=generator, device=x.device)
    images[:, _ADAPTIVE, :some] = patterns[order].view(len(x), 1, some, *x.shape[3:]).to(x.dtype)
    labels[:, _ADAPTIVE, :some] = torch.randint(classes, (len(x), 1, some), generator=generator, device=x.device)
    return images, labels
