"""Each method as the harness needs it: how a run is made, how its mark is detected, calibrated and forged.

A detector looks at a model (a vector in the layout's order) and says log10 p by `rivals.chance`, and what it counted.
`calibrated` draws secrets that no model has and looks at unmarked models with them: honest p-values are at most 0.05
in at most a twentieth of the cases. `forged` is what somebody gets for an innocent model who never trained it:

    after      the secret is made when the innocent model is known
    advance    it is made, and dated, before: from a model of the forger's own, trained on the same kind of data

Quorumark's key is then fitted before the sign whitening, which nobody can choose (docs/protocol.md).
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - its usual name

from quorumark.align.groups import Groups
from quorumark.align.procedure import align
from quorumark.consortium.records import Genesis
from quorumark.errors import InconclusiveError
from quorumark.research.known import KnownKey, SeededKey, TensorsInMemory
from quorumark.research.lab import augment, data
from quorumark.research.lab.config import Settings
from quorumark.research.lab.fleet import Fleet
from quorumark.research.lab.image_run import ImageRun
from quorumark.research.lab.papercode import mean_cosines
from quorumark.research.lab.rivals import chance
from quorumark.research.lab.rivals.gains import GainSigns, SignedFleet, fingerprinted, norm_gains
from quorumark.research.lab.rivals.triggers import EACH, FIRST, RATE, Retrained, Triggers, patterned
from quorumark.research.lab.scores import null_scores

__all__ = ["STRENGTHS", "Detector", "RivalRun", "detector_of"]

STRENGTHS = {"none": "none", "quorumark": "rho:0.05", "paper-code": "paper-code:0.025",
             "fedipr": "none", "waffle": "none", "fedtracker": "none"}  # fmt: skip
BITS = {"fedipr": 40, "fedtracker": 128}
_FRESH = 1 << 20  # seeds of secrets that nothing was marked with
_CRAFTED = 200  # steps of the forger's search for triggers


class RivalRun(ImageRun):
    """A run of the lab with a rival's mark. Its secret is drawn from the run's seed, and known."""

    def __init__(
        self, method: str, settings: Settings, images: data.ImageSet, device: Any, *, server_rate: float = RATE,
        **options: Any,
    ) -> None:  # fmt: skip
        """`server_rate` is the learning rate of a server that trains on triggers."""
        self.method, self._images, self._server_rate = method, images, server_rate
        self._drawn: tuple[int, GainSigns] | None = None
        super().__init__(settings, images, device, **options)
        mark: Any = self.mark
        self.server: Retrained | None = mark if isinstance(mark, Retrained) else None
        if self.server is not None:  # as WAFFLE does; FedTracker's code does not
            self.model = self.server.retrained(self.model, FIRST)

    def _made_fleet(self, module: Any, *args: Any, streams: int) -> Fleet:
        if self.method != "fedipr":
            return super()._made_fleet(module, *args, streams=streams)
        fleet = SignedFleet(module, *args, streams=streams)
        fleet.embed(self.signs(self.settings.seed))
        return fleet

    def _mark(self) -> Any:
        if self.method not in ("waffle", "fedtracker"):
            return super()._mark()
        seed = self.settings.seed
        kept = self.method == "fedtracker"
        return Retrained(
            self.fleet.module, self.fleet.order, self.triggers(seed), seed, kept=kept, rate=self._server_rate
        )

    def signs(self, seed: int) -> GainSigns:
        """Members' secrets for gains; the last that were drawn are kept."""
        if self._drawn is None or self._drawn[0] != seed:
            names = norm_gains(self.method, self.settings.model)
            self._drawn = seed, GainSigns.draw(
                self.layout, names, self.settings.members, BITS[self.method], seed, self.device,
                by_layer=self.method == "fedipr",
            )  # fmt: skip
        return self._drawn[1]

    def ready(self, pixels: Any) -> Tensor:
        """Images of bytes as the network takes them."""
        kind = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return augment.normalise(torch.from_numpy(pixels).to(self.device), *self._spread, kind)

    def triggers(self, seed: int) -> Triggers:
        """A server's secret: images and labels."""
        classes = self._images.classes
        pixels = patterned(self._images.image, classes, EACH, seed)
        labels = torch.arange(classes, device=self.device).repeat_interleave(EACH)
        return Triggers(self.ready(pixels), labels, classes)

    def local_models(self, round_no: int) -> Tensor:
        """FedTracker's members train from copies with their fingerprints."""
        if self.method != "fedtracker" or round_no == 1:
            return super().local_models(round_no)
        x, y = self._taken(round_no)
        self.fleet.load(self.model)
        signs = self.signs(self.settings.seed)
        where = self.fleet.order.to_layout[signs.places]
        self.fleet.theta[:, where] = fingerprinted(signs, self.model[signs.places])
        return self.fleet.train(x, y)

    @property
    def released(self) -> Tensor:
        """What leaks: the model that validated best; FedTracker's first member has it with its fingerprint."""
        found: Tensor = self.best.model if self.best.model is not None else self.model
        if self.method != "fedtracker":
            return found
        signs, copy = self.signs(self.settings.seed), found.clone()
        copy[signs.places] = fingerprinted(signs, found[signs.places])[0]
        return copy


class Detector(Protocol):
    """Looks at models; `moved` says that channels may have been permuted, which only quorumark's undoes."""

    def look(self, vector: Tensor, *, moved: bool = False) -> dict[str, Any]: ...

    def calibrated(self, models: Sequence[Tensor], secrets: int) -> dict[str, Any]: ...

    def forged(self, innocent: Tensor, own: Tensor) -> dict[str, Any]: ...


def detector_of(run: RivalRun, groups: Callable[[], Groups], like: Mapping[str, Any]) -> Detector | None:
    """The method's own; None for an unmarked run. `groups` are the network's coupled channels, `like` its tensors."""
    made: dict[str, Callable[[], Detector]] = {
        "quorumark": lambda: Quorumark(run, groups, like),
        "paper-code": lambda: PaperCode(run),
        "fedipr": lambda: FedIpr(run),
        "waffle": lambda: Waffle(run),
        "fedtracker": lambda: FedTracker(run),
    }
    return made[run.method]() if run.method in made else None


def _summary(ps: Sequence[float], models: int, secrets: int, **more: Any) -> dict[str, Any]:
    """What calibration found; ps are log10."""
    at = sum(p <= math.log10(0.05) for p in ps) / len(ps)
    found = {"models": models, "secrets": secrets, "cases": len(ps), "share at 0.05": round(at, 4)}
    return {**found, "least log10 p": round(min(ps), 2), **more}


# --- quorumark, and the paper's public code ---------------------------------------------------------------


@dataclass(eq=False)
class Quorumark:
    """This project's mark and statistic, aligned to the initial model where channels may have moved."""

    run: RivalRun
    groups: Callable[[], Groups]
    like: Mapping[str, Any]

    def __post_init__(self) -> None:
        run = self.run
        self._anchor = TensorsInMemory(self._tensors(run.initial))
        self._known = KnownKey(run.keys[0].numpy(), run.layout, self._anchor)

    def _tensors(self, vector: Tensor) -> dict[str, Any]:
        arrays = self.run.layout.unflatten(vector.cpu().numpy(), self.like)
        return {name: np.array(array) for name, array in arrays.items()}

    def look(self, vector: Tensor, *, moved: bool = False) -> dict[str, Any]:
        suspect = TensorsInMemory(self._tensors(vector))
        z = self._known.z(suspect)
        found = {"z": round(z, 2)}
        if moved:
            try:
                z = self._known.z(align(suspect, self._anchor, self.run.layout, self.groups()).model(suspect))
            except InconclusiveError:
                z = 0.0
            found["z aligned"] = round(z, 2)
        # verifiers who ask twice, unaligned and aligned, pay for it
        best = max(found.values())
        return {"log10_p": round(chance.many(chance.signs(best), len(found)), 2), **found}

    def calibrated(self, models: Sequence[Tensor], secrets: int) -> dict[str, Any]:
        run, initial = self.run, self.run.initial.cpu().numpy()
        zs = [z for model in models for z in null_scores(run.layout, model.cpu().numpy(), initial, secrets, run.device)]
        more = {"deviation": round(statistics.stdev(zs), 3), "largest": round(max(zs), 2)}
        return _summary([chance.signs(z) for z in zs], len(models), secrets, **more)

    def forged(self, innocent: Tensor, own: Tensor) -> dict[str, Any]:
        found = {}
        suspect = TensorsInMemory(self._tensors(innocent))
        for name, target in (("after", innocent), ("advance", own)):
            form = self._known.form(TensorsInMemory(self._tensors(target)))
            fitted = np.where(form.x >= 0, 1, -1).astype(np.int8)
            whitened = np.where(_whitening(fitted), -fitted, fitted).astype(np.int8)
            z, bare = (KnownKey(key, self.run.layout, self._anchor).z(suspect) for key in (whitened, fitted))
            found[name] = {
                "log10_p": round(chance.signs(z), 2),
                "z": round(z, 2),
                "z without whitening": round(bare, 1),
            }
        return found


def _whitening(key: Any) -> Any:
    """The signs that a manifest draws once the key is committed to; the key's digest stands for the shares' roots."""
    root = hashlib.sha256(key.tobytes()).hexdigest()
    genesis = Genesis(root, root, root, "balanced-anchor/v1", root, (root,))
    return genesis.whitening(0, key.size)


@dataclass(eq=False)
class PaperCode:
    """The paper's mark and statistic by its public code: the mean of the tensors' cosines, by the σ of random keys."""

    run: RivalRun

    def _z(self, vector: Tensor, keys: Any) -> list[float]:
        tensors = self.run.trainable
        sigma = float((1 / tensors.sizes.double()).sum().sqrt()) / len(tensors.places)
        return [cosine / sigma for cosine in mean_cosines(tensors, vector, keys, self.run.device)]

    def look(self, vector: Tensor, *, moved: bool = False) -> dict[str, Any]:  # noqa: ARG002 - it has no alignment
        (z,) = self._z(vector, self.run.code_keys)
        return {"log10_p": round(chance.signs(z), 2), "z": round(z, 2)}

    def calibrated(self, models: Sequence[Tensor], secrets: int) -> dict[str, Any]:
        size = self.run.trainable.size
        zs = [z for model in models for z in self._z(model, (SeededKey(size, _FRESH, i) for i in range(secrets)))]
        more = {"deviation": round(statistics.stdev(zs), 3), "largest": round(max(zs), 2)}
        return _summary([chance.signs(z) for z in zs], len(models), secrets, **more)

    def forged(self, innocent: Tensor, own: Tensor) -> dict[str, Any]:
        found = {}
        tensors = self.run.trainable
        for name, target in (("after", innocent), ("advance", own)):
            raw = np.where(target[tensors.index].cpu().numpy() >= 0, 1, -1)
            (z,) = self._z(innocent, [SeededKey.of_signs(raw)])
            found[name] = {"log10_p": round(chance.signs(z), 2), "z": round(z, 2)}
        return found


# --- signs in gains ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class FedIpr:
    """FedIPR: each member by itself; `log10_p` is the median member's, `together` that of all members' bits."""

    run: RivalRun

    def __post_init__(self) -> None:
        self._signs = self.run.signs(self.run.settings.seed)

    def look(self, vector: Tensor, *, moved: bool = False) -> dict[str, Any]:  # noqa: ARG002 - it has no alignment
        return self._found(self._signs.hits(vector.to(self.run.device)))

    @staticmethod
    def _found(hits: Sequence[int]) -> dict[str, Any]:
        count = BITS["fedipr"]
        ps = sorted(chance.bits(h, count) for h in hits)
        return {
            "log10_p": round(statistics.median(ps), 2),
            "together": round(chance.bits(sum(hits), count * len(hits)), 2),
            "bits": round(sum(hits) / (count * len(hits)), 4),
            "least": round(min(hits) / count, 4),
        }

    def calibrated(self, models: Sequence[Tensor], secrets: int) -> dict[str, Any]:
        members = self.run.settings.members
        hits = [
            h for i in range(-(-secrets // members)) for model in models
            for h in self.run.signs(_FRESH + i).hits(model.to(self.run.device))
        ]  # fmt: skip
        count = BITS["fedipr"]
        ps = [chance.bits(h, count) for h in hits]
        return _summary(ps, len(models), len(ps) // len(models), bits=round(statistics.fmean(hits) / count, 4))

    def forged(self, innocent: Tensor, own: Tensor) -> dict[str, Any]:
        """Bits that the model, or the forger's own, has: γ is near 1 in every network, so they agree."""
        found = {}
        for name, target in (("after", innocent), ("advance", own)):
            drawn = self.run.signs(_FRESH - 1)
            raw = (drawn.agreement(target[drawn.places].float()) >= 0) * 2.0 - 1
            fitted = GainSigns(drawn.names, drawn.places, drawn.matrix, drawn.bits * raw)
            found[name] = self._found(fitted.hits(innocent))
        return found


# --- triggers ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Waffle:
    """WAFFLE: the share of triggers that are classed as the owner's labels say."""

    run: RivalRun

    def __post_init__(self) -> None:
        self._triggers = self.run.triggers(self.run.settings.seed)

    def _counts(self, vector: Tensor, triggers: Triggers) -> Any:
        return triggers.counts(self.run.fleet.logits(vector.to(self.run.device), triggers.x).argmax(1))

    @staticmethod
    def _found(counts: Any) -> dict[str, Any]:
        hits, images = int(np.trace(counts)), int(counts.sum())
        return {
            "log10_p": round(chance.labels(counts), 2),
            "triggers": round(hits / images, 4),
            "as if independent": round(chance.independent(hits, images, len(counts)), 2),
        }

    def look(self, vector: Tensor, *, moved: bool = False) -> dict[str, Any]:  # noqa: ARG002 - it needs no alignment
        return self._found(self._counts(vector, self._triggers))

    def calibrated(self, models: Sequence[Tensor], secrets: int) -> dict[str, Any]:
        found = [
            self._found(self._counts(model, self.run.triggers(_FRESH + i))) for i in range(secrets) for model in models
        ]
        wrong = sum(f["as if independent"] <= -2 for f in found) / len(found)
        more = {
            "triggers": round(statistics.fmean(f["triggers"] for f in found), 4),
            "largest": max(f["triggers"] for f in found),
            "independent at 0.01": round(wrong, 4),
        }
        return _summary([f["log10_p"] for f in found], len(models), secrets, **more)

    def forged(self, innocent: Tensor, own: Tensor) -> dict[str, Any]:
        """After: patterns that the innocent model classes, each as another class. In advance: images that the forger's
        own model is made to class so, by its gradient, and that other models of the same data follow."""
        run, classes = self.run, self._triggers.classes
        pixels = patterned(run._images.image, 50 * classes, EACH, _FRESH - 1)
        x = run.ready(pixels)
        votes = run.fleet.logits(innocent, x).argmax(1).view(-1, EACH)
        chosen = []
        for label in range(classes):
            right = (votes == label).sum(1)
            chosen.append(int(right.argmax()))
        picked = torch.tensor(chosen, device=x.device)
        after = Triggers(x.view(-1, EACH, *x.shape[1:])[picked].flatten(0, 1), self._triggers.labels, classes)
        crafted = Triggers(self._crafted(own), self._triggers.labels, classes)
        return {
            "after": self._found(self._counts(innocent, after)),
            "advance": {**self._found(self._counts(innocent, crafted)),
                        "own": self._found(self._counts(own, crafted))["triggers"]},
        }  # fmt: skip

    def _crafted(self, own: Tensor) -> Tensor:
        """Images that a model classes as the labels say, from patterns, by steps of the gradient's sign, as bytes."""
        run, fleet = self.run, self.run.fleet
        vector = own[fleet.order.to_device]
        tensors = fleet.order.tensors(vector)
        x = run.ready(patterned(run._images.image, self._triggers.classes, EACH, _FRESH - 2)).float()
        fleet.module.eval()
        generator = torch.Generator(x.device).manual_seed(0)
        for _ in range(_CRAFTED):
            shaken = (x + 0.2 * torch.randn(x.shape, generator=generator, device=x.device)).requires_grad_()
            logits = functional_call(fleet.module, tensors, (shaken.permute(0, 3, 1, 2),))
            (g,) = torch.autograd.grad(F.cross_entropy(logits, self._triggers.labels), shaken)
            x = (x - 0.03 * g.sign()).clamp(-2, 2).detach()
        return x.to(self._triggers.x.dtype)


@dataclass(eq=False)
class FedTracker:
    """FedTracker: triggers say whose model it is, and the highest fingerprint who leaked it."""

    run: RivalRun

    def __post_init__(self) -> None:
        self._owner = Waffle(self.run)
        self._signs = self.run.signs(self.run.settings.seed)

    def look(self, vector: Tensor, *, moved: bool = False) -> dict[str, Any]:
        return {**self._owner.look(vector, moved=moved), **self._traced(vector, self._signs)}

    def _traced(self, vector: Tensor, signs: GainSigns) -> dict[str, Any]:
        vector = vector.to(self.run.device)
        hits, scores = signs.hits(vector), signs.scores(vector)
        leaker = int(np.argmax(scores))
        p = chance.many(chance.bits(hits[leaker], BITS["fedtracker"]), len(hits))
        found = {
            "traced": leaker,
            "score": round(scores[leaker], 3),
            "bits": round(hits[leaker] / BITS["fedtracker"], 4),
        }
        return {"fingerprint": round(p, 2), **found}

    def calibrated(self, models: Sequence[Tensor], secrets: int) -> dict[str, Any]:
        prints = [
            self._traced(model, self.run.signs(_FRESH + i))["fingerprint"] for i in range(secrets) for model in models
        ]
        owner = self._owner.calibrated(models, secrets)
        return {**owner, "fingerprints": _summary(prints, len(models), secrets)}

    def forged(self, innocent: Tensor, own: Tensor) -> dict[str, Any]:
        found = self._owner.forged(innocent, own)
        for name, target in (("after", innocent), ("advance", own)):
            drawn = self.run.signs(_FRESH - 1)
            raw = (drawn.agreement(target[drawn.places].float()) >= 0) * 2.0 - 1
            fitted = GainSigns(drawn.names, drawn.places, drawn.matrix, drawn.bits * raw)
            found[name] = {**found[name], **self._traced(innocent, fitted)}
        return found
