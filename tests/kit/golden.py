"""Golden digests: what the code computes, pinned before anything is changed about how it does so.

    python -m tests.kit.golden              compares with tests/golden.json
    python -m tests.kit.golden --write      makes tests/golden.json anew, where a change of the results is meant

Both need all extras, Flower included; `tests/house/test_golden.py` skips what is not installed.

A builder makes one entry. An entry is named after what was computed, not after the module that does it. `may_change`
says for which reason an entry may become another one; all the others must stay the same bits.

Everything here is the same on every machine:
- Weights, data, keys and orders come from SHAKE-128, as integers times a power of two: not from a library's generator.
- Networks are trained in float32 with + − × of whole arrays, and sums in a written order. BLAS, convolutions and
  `numpy.sum` add up in an order of their own, so nothing here uses them. Weights of larger networks are not trained.
- torch gives names and shapes of networks, and what depends on what in them. No result of its arithmetic is digested.

Nothing here depends on what must be random. Identities, masks and polynomials come from the operating system. The key
in use is known: a setup's public signs σ differ from one run to the next, so members get shares of σ ⊙ τ. A digest
therefore does not depend on the bytes of terms and manifests either, except where its entry says so.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark import field, shamir
from quorumark.align.groups import Groups
from quorumark.align.lora import Base, gauge_suspect
from quorumark.align.procedure import align
from quorumark.consortium.identity import Identity
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import SALT_ELEMENTS
from quorumark.consortium.records import Genesis, Manifest, Terms, anchor_of
from quorumark.consortium.shares import ShareFile, ShareInfo, ShareWriter, share_root
from quorumark.field import Vector
from quorumark.files import write_private
from quorumark.model.layout import ModelLayout
from quorumark.model.statistic import STATISTICS, canonical_form
from quorumark.model.suspect import read_suspect
from quorumark.research.known import TensorsInMemory
from quorumark.round.history import research_seed
from quorumark.setup import inprocess
from quorumark.setup.dkg import DkgMember
from quorumark.simulation import Federation, FederationMember, Losses, RoundReport
from quorumark.verify.reference import describe_lora
from tests.kit.ceremony import NAMES, identities, make_terms

FILE = Path(__file__).parent / "golden.json"
Model = dict[str, NDArray[Any]]
Entry = dict[str, Any]


# --- what is the same everywhere --------------------------------------------------------------------------


def integers(label: str, count: int) -> NDArray[np.int64]:
    """Uniform from −32,768 to 32,767."""
    return np.frombuffer(hashlib.shake_128(label.encode()).digest(2 * count), "<i2").astype(np.int64)


def numbers(label: str, *shape: int, scale: int = 0) -> NDArray[np.float32]:
    """Uniform from −1 to 1 in steps of 2^-15, times 2^scale."""
    words = integers(label, int(np.prod(shape))).astype(np.float32)
    return np.ldexp(words, scale - 15).astype(np.float32).reshape(shape)


def signs(label: str, count: int) -> NDArray[np.int64]:
    return np.where(integers(label, count) < 0, -1, 1)


def order_of(label: str, size: int) -> NDArray[np.int64]:
    """A permutation."""
    return np.argsort(integers(label, size), kind="stable")


def digest_of(*arrays: Any) -> str:
    """Of arrays with their types and shapes, little-endian."""
    hashed = hashlib.sha256()
    for array in arrays:
        whole = np.asarray(array)
        little = np.ascontiguousarray(whole.astype(whole.dtype.newbyteorder("<"), copy=False))
        hashed.update(f"{whole.dtype.name}{whole.shape};".encode() + little.tobytes())
    return hashed.hexdigest()


def model_digest(model: Mapping[str, Any]) -> str:
    """Of every tensor's bytes, by name."""
    hashed = hashlib.sha256()
    for name in sorted(model):
        hashed.update(f"{name}:{digest_of(model[name])};".encode())
    return hashed.hexdigest()


# --- a network that is trained, the same way on every machine ---------------------------------------------

_BATCH, _STEPS = 8, 2
_OUTPUTS = 9
_ALIKE = 4


def initial() -> Model:
    """A convolution of 5 images of 4×4, two layers, and a count."""
    return {
        "c.weight": numbers("c", 12, 5, 3, 3, scale=-2),
        "a.weight": numbers("a", 24, 48, scale=-2),
        "a.bias": numbers("bias", 24, scale=-4),
        "b.weight": numbers("b", _OUTPUTS, 24, scale=-2),
        "steps": np.array(7, np.int64),
    }


def product(one: NDArray[np.float32], two: NDArray[np.float32]) -> NDArray[np.float32]:
    """Σ_k one[:, k]·two[k, :], in the order of k, every step rounded."""
    total = np.zeros((one.shape[0], two.shape[1]), np.float32)
    for k in range(one.shape[1]):
        total += one[:, k, None] * two[k]
    return total


def gradients(model: Mapping[str, NDArray[Any]], label: str) -> tuple[Model, float]:
    """Of the squared error on a batch whose targets are linear in the images, and the error itself."""
    images = numbers(label, _BATCH, 5, 4, 4)
    wanted = product(images.reshape(_BATCH, 80), numbers("teacher", 80, _OUTPUTS, scale=-2))
    patches = np.stack([images[:, :, i : i + 3, j : j + 3] for i in range(2) for j in range(2)], axis=1)
    columns = patches.reshape(4 * _BATCH, 45)
    first = np.maximum(product(columns, model["c.weight"].reshape(12, 45).T), 0).reshape(_BATCH, 48)
    second = np.maximum(product(first, model["a.weight"].T) + model["a.bias"], 0)
    error = product(second, model["b.weight"].T) - wanted
    at_second = product(error, model["b.weight"]) * (second > 0)
    at_first = (product(at_second, model["a.weight"]) * (first > 0)).reshape(4 * _BATCH, 12)
    found = {
        "b.weight": product(error.T, second),
        "a.weight": product(at_second.T, first),
        "a.bias": product(at_second.T, np.ones((_BATCH, 1), np.float32))[:, 0],
        "c.weight": product(at_first.T, columns).reshape(12, 5, 3, 3),
    }
    return found, float((error.astype(np.float64) ** 2).mean())


def train(model: Mapping[str, NDArray[Any]], data: Any, seed: int, rate: float) -> Model:
    """Two steps of gradient descent on batches that depend on the member's data and its seed.

    A row of `a.weight` moves by the sign of its weights instead, alike at all members: for the setting `alike`.
    """
    made = {name: np.array(tensor) for name, tensor in model.items()}
    step = np.float32(rate) * np.float32(2.0**-5)
    for number in range(_STEPS):
        found, _ = gradients(made, f"images {data} {seed} {number}")
        found["a.weight"][_ALIKE] = np.sign(made["a.weight"][_ALIKE])
        for name, gradient in found.items():
            made[name] = made[name] - step * gradient
    made["steps"] = np.asarray(made["steps"] + 1)
    return made


# --- federations ------------------------------------------------------------------------------------------

SEED = 3
MEMBERS, THRESHOLD = 5, 3
CHECKED = {"sums": "checked"}
UNCHECKED = {"sums": "unchecked"}
WITHOUT_NETS = {"rule": "rho", "rho": "0.05", "c_max": "0.03", "dither": "0"}
RHO = {"rule": "rho", "rho": "0.1", "c_max": "0.05", "lr": "cosine:40", "dither": "0"}
PAPER = {"rule": "paper", "c": "0.025", "lr": "cosine:40"}
EVENTS = {(2, "train"): [4], (4, "upload"): [2], (5, "unmask"): [1]}  # lost, lost after U is fixed, does not answer


def known_shares(manifest: Manifest, label: str = "key") -> dict[int, Vector]:
    """Shares by which the key in use is the known one, whatever public signs the manifest draws."""
    terms = manifest.terms
    key = signs(label, terms.coordinates)
    raw = np.where(manifest.genesis.whitening(0, terms.coordinates), -key, key)
    made = shamir.share(field.from_signed(raw), terms.threshold, terms.members)
    return {x: np.ascontiguousarray(made[x - 1]) for x in range(1, terms.members + 1)}


def known_deal(people: Any, terms: Terms) -> tuple[Manifest, dict[int, Vector]]:
    """A dealer's setup in memory, with the known key."""
    manifest, _ = inprocess.deal_key(people, terms)
    return manifest, known_shares(manifest)


class Consortium:
    """Five members, a known key, and as many runs as wanted."""

    def __init__(self, strength: Mapping[str, str], policy: Mapping[str, str]) -> None:
        self.people = identities(MEMBERS)
        self.model = initial()
        self.layout = ModelLayout.of(self.model)
        anchor = anchor_of(self.layout, self.model)
        terms = make_terms(
            self.people, THRESHOLD, self.layout.coordinates, layout=self.layout.digest(), anchor=anchor,
            setup="dealer", strength=dict(strength), policy=dict(policy),
        )  # fmt: skip
        self.manifest, self.shares = known_deal(self.people, terms)

    def federation(
        self, losses: Mapping[Any, Any], folder: Path | None = None, trained: Callable[..., Model] = train
    ) -> Federation:
        members = {
            x: FederationMember(person, self.manifest, self.layout, trained, x, self.shares[x])
            for x, person in enumerate(self.people, 1)
        }
        return Federation(
            self.manifest, self.layout, self.model, members, losses=Losses(losses), seed=SEED, folder=folder
        )


def told(models: list[str], reports: list[RoundReport]) -> Entry:
    """ρ and c are integers of 2^-32, so that JSON holds them exactly."""
    return {
        "models": models,
        "rho in 2^-32": [int(r.rho * 2**32) for r in reports],
        "c in 2^-32": [int(r.c * 2**32) for r in reports],
        "marked": [r.marked for r in reports],
        "members": [list(r.members) for r in reports],
        "attempts": [r.attempts for r in reports],
        "given up": [bool(r.given_up) for r in reports],
    }


def rounds_of(
    strength: Mapping[str, str],
    policy: Mapping[str, str],
    rounds: int,
    losses: Mapping[Any, Any] | None = None,
    folder: Path | None = None,
    resume_after: int | None = None,
) -> Entry:
    """A run; with `resume_after`, taken up from its folder by new objects after so many rounds."""
    world, models = Consortium(strength, policy), list[str]()
    for stop in sorted({resume_after or rounds, rounds}):
        run = world.federation(losses or {}, folder)
        models += [model_digest(run.model) for _ in run.rounds(stop)]
    found = told(models, run.reports)
    if strength["rule"] != "paper":  # its amplitudes are opened in the round itself
        found["amplitudes of the next round"] = digest_of(run.history.amplitudes().vector)
    return found


def with_events(folder: Path) -> Entry:
    return rounds_of(RHO, CHECKED, 6, EVENTS, folder, resume_after=3)


def alike_marked(_folder: Path) -> Entry:
    return rounds_of({**RHO, "alike": "mark"}, CHECKED, 4)


def sums_unchecked(_folder: Path) -> Entry:
    return rounds_of(RHO, UNCHECKED, 4)


def rule_paper(_folder: Path) -> Entry:
    return rounds_of(PAPER, CHECKED, 4)


def given_up(_folder: Path) -> Entry:
    """T is 4: two of five that do not answer end round 4 after the others did."""
    return rounds_of(RHO, CHECKED, 6, {(4, "unmask"): [1, 2]})


def packed(folder: Path) -> Entry:
    """The same rounds as `with_events` has with two weights in an element, with one, three and four."""
    found = {}
    for count in ("1", "3", "4"):
        (folder / count).mkdir()
        policy = {"sums": "checked", "packing": count}
        found[count] = rounds_of(RHO, policy, 6, EVENTS, folder / count, resume_after=3)
    return found


OPTIMISERS = (
    "fedavgm:server_momentum=0.5",
    "fedadam:eta=0.01,beta_1=0.5",
    "fedyogi:eta=0.01,beta_1=0.5,tau=0.0001",
    "fedadagrad:eta=0.02",
)
_TURN = 5  # rounds
_ROUNDS = {research_seed(SEED, number, x): number for number in range(1, 20) for x in range(1, MEMBERS + 1)}


def turn(model: Mapping[str, NDArray[Any]], data: Any, seed: int, rate: float) -> Model:  # noqa: ARG001
    """A common way, with noise of a member's own; after some rounds the first rows, or all, go the other way."""
    number = _ROUNDS[seed]
    made = {name: np.array(tensor) for name, tensor in model.items()}
    for name in ("c.weight", "a.weight", "b.weight"):
        way = numbers(f"way {name}", *model[name].shape, scale=-6)
        if number > _TURN:
            way[: len(way) // 2 if name == "a.weight" else None] *= np.float32(-1)
        made[name] += way + numbers(f"{name} {data} {number}", *model[name].shape, scale=-8)
    return made


def optimisers(folder: Path) -> Entry:
    """Server optimisers through a turn, where the momentum of most weights begins anew; taken up again after it."""
    found = {}
    for number, text in enumerate(OPTIMISERS):
        (folder / str(number)).mkdir()
        world = Consortium({**WITHOUT_NETS, "rho": "0.3", "c_max": "0.1"}, {**CHECKED, "optimiser": text})
        models: list[str] = []
        for stop in (_TURN + 2, _TURN + 4):
            run = world.federation(EVENTS, folder / str(number), turn)
            models += [model_digest(run.model) for _ in run.rounds(stop)]
        applied = run.history.mark.applied
        assert applied is not None
        vectors = {name: digest_of(vector) for name, vector in applied.vectors().items()}
        found[text] = told(models, run.reports) | {"vectors": vectors}
    return found


def flower(folder: Path) -> Entry:
    from tests.kit.golden_flower import in_process  # imports Flower

    return in_process(folder)


# --- verification -----------------------------------------------------------------------------------------


def _filled(module: Any, label: str, moved: bool) -> Any:
    """A network's tensors under its own names, with known weights: an anchor, or a model that was trained from it."""
    state = {}
    for name, tensor in module.state_dict().items():
        shape = tuple(tensor.shape)
        if not tensor.is_floating_point():
            state[name] = np.zeros(shape, np.int64)
            continue
        base = numbers(f"{label} {name}", *shape, scale=-3) if len(shape) > 1 else np.ones(shape, np.float32)
        more = numbers(f"{label} {name} moved", *shape, scale=-4)
        state[name] = base + more if moved else base
    return state


def _network(name: str) -> tuple[Any, Any]:
    """A module and an input for it."""
    import torch

    from tests.kit import lab

    return lab.MODELS[name](), torch.zeros(2, 1, 8, 8)


def canonical_forms(_folder: Path) -> Entry:
    found: Entry = {}
    for name in ("cnn", "resnet", "vit"):
        module, _ = _network(name)
        layout = ModelLayout.of(module)
        anchor, model = (TensorsInMemory(_filled(module, name, moved)) for moved in (False, True))
        for statistic in STATISTICS:
            form = canonical_form(statistic, layout, model, anchor)
            found[f"{name}, {statistic}"] = {"x": digest_of(form.x), "norms": [form.norm1, form.norm2, form.norm4]}
    return found


def alignments(_folder: Path) -> Entry:
    """Suspects whose channels were put in another order, and one that has nothing to do with the anchor."""
    from quorumark.align.trace import derive_groups

    found: Entry = {}
    for name in ("cnn", "vit"):
        module, example = _network(name)
        layout, groups = ModelLayout.of(module), derive_groups(module, example)
        anchor, suspect = (_filled(module, name, moved) for moved in (False, True))
        orders = [order_of(f"{name} {g}", group.size) for g, group in enumerate(groups.groups)]
        shapes = {n: w.shape for n, w in suspect.items()}
        for (tensor, axis), places in groups.axis_orders(shapes, orders).items():
            suspect[tensor] = np.take(suspect[tensor], places, axis=axis)
        stranger = {n: w if w.ndim < 2 else numbers(f"stranger {n}", *w.shape) for n, w in anchor.items()}
        for who, model in (("in another order", suspect), ("a stranger", stranger)):
            found[f"{name}, {who}"] = _aligned(layout, groups, anchor, model)
    return found


def _aligned(layout: ModelLayout, groups: Groups, anchor: Model, model: Model) -> Entry:
    start, suspect = TensorsInMemory(anchor), TensorsInMemory(model)
    done = align(suspect, start, layout, groups)
    form = canonical_form("balanced-anchor/v1", layout, done.model(suspect), start)
    axes = sorted(done.indices)
    return {
        "groups": groups.digest(),
        "axes": len(axes),
        "places": digest_of(*(done.indices[axis].astype(np.int64) for axis in axes)),
        "moved": list(done.moved),
        "blocks put back": done.blocks,
        "x": digest_of(form.x),
    }


def lora_gauge(_folder: Path) -> Entry:
    """An adapter, the same as other factors of the same product, and added to the base."""
    shapes, rank = {"q": (64, 96), "up": (80, 64)}, 4
    base: Model = {f"{n}.weight": numbers(f"base {n}", *shape, scale=3) for n, shape in shapes.items()}
    anchor: Model = {}
    whole: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    for name, (rows, columns) in shapes.items():
        anchor[f"{name}.lora_A.weight"] = numbers(f"A0 {name}", rank, columns, scale=-3)
        anchor[f"{name}.lora_B.weight"] = np.zeros((rows, rank), np.float32)
        down = integers(f"A {name}", rank * columns).reshape(rank, columns) >> 8
        down += integers(f"A0 {name}", rank * columns).reshape(rank, columns) >> 7
        whole[name] = down, integers(f"B {name}", rows * rank).reshape(rows, rank) >> 8
    # R has an integer inverse: B·R⁻¹ and R·A are exact
    turn = np.array([[1, 2, 0, -1], [0, 1, 3, 0], [0, 0, 1, 1], [0, 0, 0, 1]])
    back = np.array([[1, -2, 6, -5], [0, 1, -3, 3], [0, 0, 1, -1], [0, 0, 0, 1]])
    adapter, refactored, merged = dict(anchor), dict(anchor), dict(base)
    for name, (down, up) in whole.items():
        for model, (a, b) in ((adapter, (down, up)), (refactored, (turn @ down, up @ back))):
            model[f"{name}.lora_A.weight"] = np.ldexp(a.astype(np.float32), -11)
            model[f"{name}.lora_B.weight"] = np.ldexp(b.astype(np.float32), -11)
        added = np.ldexp((up @ down).astype(np.float64), -22)
        merged[f"{name}.weight"] = (base[f"{name}.weight"] + added).astype(np.float32)
    layout, stored = ModelLayout.of(anchor), read_suspect(base)
    lora, start = describe_lora(layout, base), TensorsInMemory(anchor)
    found: Entry = {}
    for who, suspect in (("adapter", adapter), ("other factors", refactored), ("added to the base", merged)):
        gauged = gauge_suspect(read_suspect(suspect), layout, start, lora, lambda: Base(stored, stored))
        factors = {n: np.concatenate([values for _, values in gauged.blocks(n)]) for n in gauged.names}
        form = canonical_form("balanced-anchor/v1", layout, gauged, start)
        found[who] = {"factors": model_digest(factors), "x": digest_of(form.x)}
    return found


# --- shares -----------------------------------------------------------------------------------------------


def _seed(label: str) -> bytes:
    return hashlib.sha256(label.encode()).digest()


def _elements(label: str, *shape: int) -> Vector:
    count = int(np.prod(shape))
    found: Vector = field.Stream(_seed(label), "golden").elements(count).reshape(shape)
    return found


@contextmanager
def known_randomness(label: str) -> Iterator[None]:
    """`os.urandom` from a hash: for the salt of a sealed file."""
    calls = 0

    def known(count: int) -> bytes:
        nonlocal calls
        calls += 1
        return hashlib.shake_128(f"{label} {calls}".encode()).digest(count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.urandom", known)
        yield


def share_files(folder: Path) -> Entry:
    """A dealer's compressed shares of the known key under known seeds, sealed, as bytes on disk."""
    length, leaf, block = 5000, 64, 1024
    key = field.from_signed(signs("key", length))
    seeds = {x: _seed(f"seed {x}") for x in range(1, MEMBERS + 1)}
    write_private(folder / "unlock.key", _seed("unlock"))
    unlock = Unlock.key_file(folder / "unlock.key")
    found: Entry = {"files": [], "values": [], "roots": []}
    for x in range(1, MEMBERS + 1):
        info = ShareInfo("aa" * 32, "bb" * 32, 0, x, THRESHOLD, MEMBERS, length, leaf, block)
        salt, others = _elements(f"salt {x}", SALT_ELEMENTS), _elements(f"salts {x}", MEMBERS, SALT_ELEMENTS)
        path = folder / f"share-{x}.sealed"
        with known_randomness(f"file {x}"), ShareWriter(path, unlock, info, salt, others, seeds[x]) as file:
            for index, part, generated in info.parts():
                if not generated:
                    file.write(shamir.compressed_block(key[part], index, seeds, THRESHOLD)[x])
        read = ShareFile(path, unlock)
        found["files"].append(hashlib.sha256(path.read_bytes()).hexdigest())
        found["values"].append(digest_of(read.vector()))
        found["roots"].append(share_root(read.pieces(), salt, leaf, length).hex())
    return found


def ceremony(_folder: Path) -> Entry:
    """The dealer-free setup with known identities and seeds: every share, and the public signs."""
    people = [Identity.from_secret_bytes(name, _seed(f"sign {name}") + _seed(f"seal {name}")) for name in NAMES[:5]]
    terms = make_terms(people, THRESHOLD, 3000, leaf=64, strength=WITHOUT_NETS)

    def known(person: Identity, agreed: Terms, _: bytes) -> DkgMember:
        return DkgMember(person, agreed, _seed(f"dkg {person.name}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inprocess, "DkgMember", known)
        manifest, shares = inprocess.make_key(people, terms)
    key = field.to_signed(shamir.reconstruct({x: shares[x] for x in range(1, THRESHOLD + 1)}, THRESHOLD))
    return {
        "shares": [digest_of(shares[x]) for x in sorted(shares)],
        "key": digest_of(key),
        "signs": digest_of(manifest.genesis.whitening(0, key.size)),
    }


def public_signs(_folder: Path) -> Entry:
    """Of a genesis whose fields are known, beyond the first block of the stream."""
    genesis = Genesis("11" * 32, "22" * 32, "33" * 32, "balanced-anchor/v1", "44" * 32, ("55" * 32, "66" * 32))
    return {"signs": digest_of(genesis.whitening(60000, 10000))}


# --- the lab ----------------------------------------------------------------------------------------------


def lab_masked(_folder: Path) -> Entry:
    """`quorumark lab run … --masked`: the protocol beside the lab's sum, with local results that are known."""
    import torch

    from quorumark.research.lab import data, masked, models
    from quorumark.research.lab.config import Settings
    from quorumark.research.lab.image_run import ImageRun

    class Known(ImageRun):
        def local_models(self, round_no: int) -> torch.Tensor:
            self.fleet.load(self.model)
            for k, row in enumerate(self.fleet.theta):
                step = torch.from_numpy(numbers(f"member {k} round {round_no}", self.layout.size, scale=-8))
                row += step[self.fleet.order.to_device]
            return torch.zeros(())

    class Seen(Federation):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            seen.append(self)

    def make(*arguments: Any) -> Any:
        module = real_make(*arguments)
        tensors = _filled(module, "lab", moved=False)
        module.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
        return module

    found: Entry = {}
    images, real_make = data.load("shapes"), models.make
    for strength in ("rho:0.05", "paper:0.025"):
        seen: list[Federation] = []
        settings = Settings("shapes", strength=strength, members=4, rounds=4, model="cnn", global_batch=128)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(masked, "ImageRun", Known)
            patch.setattr(masked, "Federation", Seen)
            patch.setattr(masked, "deal_key", known_deal)
            patch.setattr(models, "make", make)
            done = masked.compare(settings, images, 4)
        found[strength] = {
            "model": model_digest({name: tensor.numpy() for name, tensor in seen[0].model.items()}),
            "marked": [r.marked for r in done],
            "weights that differ": [r.different for r in done],
            "the mark's largest part": [r.largest.hex() for r in done],
        }
    return found


# --- all of them ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Builder:
    """What makes one entry from an empty folder. `may_change`: for which reason the entry may change."""

    make: Callable[[Path], Entry]
    may_change: str = ""
    needs: str = ""  # a package that is not always installed


BUILDERS = {
    "federation: checked sums, six rounds, a loss, a retry, a resume": Builder(with_events),
    "federation: rows that move alike are marked": Builder(alike_marked),
    "federation: sums not checked": Builder(sums_unchecked),
    "federation: the paper's rule": Builder(rule_paper),
    "federation: a round is given up": Builder(
        given_up, "what follows a round that was given up: which round is repeated, and with which data and mark"
    ),
    "flower: checked sums, four rounds, a loss and a retry": Builder(flower, needs="flwr"),
    "packed rounds: one, three and four weights in an element": Builder(packed),
    "server optimisers: four of them, a turn, a resume": Builder(optimisers),
    "canonical forms": Builder(canonical_forms, needs="torch"),
    "alignments": Builder(alignments, needs="torch"),
    "LoRA gauge": Builder(lora_gauge),
    "share files": Builder(share_files, "the format of share files: `files` and `roots`, never `values`"),
    "dealer-free setup": Builder(ceremony, "the bytes of the terms, to which all messages and streams are bound"),
    "public signs": Builder(public_signs, "the fields of a genesis"),
    "lab: masked rounds": Builder(lab_masked, needs="torch"),
}


def build(name: str) -> Entry:
    """One entry, as it is in the file."""
    builder = BUILDERS[name]
    with tempfile.TemporaryDirectory() as folder:
        made = builder.make(Path(folder))
    return {"builder": builder.make.__name__, "may_change": builder.may_change, "digests": made}


def read() -> dict[str, Entry]:
    found: dict[str, Entry] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def text_of(entries: Mapping[str, Entry]) -> str:
    """JSON with lists of numbers on one line."""
    text = json.dumps(entries, indent=1, ensure_ascii=False)
    return (
        re.sub(
            r"\[[\s\d,truefals-]*\]",
            lambda found: re.sub(r",\s+", ", ", re.sub(r"(?<=\[)\s+|\s+(?=\])", "", found[0])),
            text,
        )
        + "\n"
    )


def main(*arguments: str) -> int:
    made = {name: build(name) for name in BUILDERS}
    if arguments == ("--write",):
        FILE.write_text(text_of(made), encoding="utf-8")
        return 0
    other = {name: entry for name, entry in made.items() if read().get(name) != entry}
    if other:
        print(text_of(other))  # noqa: T201
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
