"""Rounds in one process: exact sums, the mark exactly where it belongs, members who come and go, runs that go on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quorumark import codec, field, shamir
from quorumark.embed import Amplitudes, ideal_mark, weights
from quorumark.errors import InputError, MessageError, RecordError, RoundError
from quorumark.federation import Federation, FederationMember, Losses, anchor_digest, bound, group_of
from quorumark.field import Vector
from quorumark.identity import Identity
from quorumark.layout import ModelLayout, read_safetensors
from quorumark.records import Genesis, Manifest
from quorumark.secagg import FolderState, SecAggServer
from quorumark.setup.amend import propose, successor
from quorumark.setup.local import make_key
from tests.ceremony import identities, make_terms

Model = dict[str, NDArray[Any]]
SHAPES = {"a.weight": (24, 30), "a.bias": (24,), "b.weight": (9, 24), "c.weight": (12, 5, 3, 3)}


def initial() -> Model:
    rng = np.random.default_rng(5)
    model: Model = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return {**model, "steps": np.array(7, np.int64)}


def train(model: Model, data: float, seed: int) -> Model:
    """A step that differs between members and rounds, and moves every weight."""
    rng = np.random.default_rng(seed)
    moved = {k: v + np.float32(data) * rng.standard_normal(v.shape).astype(np.float32) for k, v in model.items()}
    return {**moved, "steps": model["steps"]}


class World:
    """A small consortium; its members can be made again for every run."""

    def __init__(self, count: int = 5, threshold: int = 3, **changes: Any) -> None:
        self.people = identities(count)
        self.model = initial()
        self.layout = ModelLayout.of(self.model)
        anchor = anchor_digest(self.layout, self.layout.encode(self.model))
        settings = {"layout": self.layout.digest(), "anchor": anchor, **changes}
        terms = make_terms(self.people, threshold, self.layout.coordinates, **settings)
        self.manifest, self.shares = make_key(self.people, terms)

    def key(self) -> NDArray[np.int64]:
        t = self.manifest.terms.threshold
        return field.to_signed(shamir.reconstruct({x: self.shares[x] for x in range(1, t + 1)}, t))

    def members(self, training: Callable[..., Model] = train, **options: Any) -> dict[int, FederationMember]:
        group = group_of(self.manifest)
        found = {}
        for x, person in enumerate(self.people, 1):
            found[x] = FederationMember(
                person, self.manifest, self.layout, training, 0.01 * x, self.shares[x], group=group, **options
            )
        return found

    def federation(self, **options: Any) -> Federation:
        members = options.pop("members", None) or self.members()
        return Federation(self.manifest, self.layout, self.model, members, **{"seed": 3, **options})


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def average(world: World, run: Federation, round_no: int, points: tuple[int, ...]) -> NDArray[np.float64]:
    """Plain FedAvg in float64, by another way: the same local results, weighted by examples."""
    counts = {x: world.manifest.terms.member(x).examples for x in points}
    total = sum(counts.values())
    out = np.zeros(world.layout.size)
    before = world.layout.unflatten(run._vector.copy(), world.model)
    for x in points:
        seed = run._seed_for(round_no, x)
        assert seed is not None
        out += counts[x] / total * world.layout.flatten(train(before, 0.01 * x, seed)).astype(np.float64)
    return out


# --- exactness --------------------------------------------------------------------------------------------

PATTERNS = [
    {},
    {(1, "train"): [2]},
    {(1, "upload"): [4]},
    {(1, "unmask"): [5]},
    {(1, "train"): [1], (1, "unmask"): []},
]


@pytest.mark.parametrize("plan", PATTERNS)
def test_without_the_mark_a_round_is_fedavg(world: World, plan: dict[Any, Any]) -> None:
    run = world.federation(mark=False, losses=Losses(plan))
    out = set(plan.get((1, "train"), ())) | set(plan.get((1, "upload"), ()))
    points = tuple(x for x in range(1, 6) if x not in out)
    wanted = average(world, run, 1, points)
    report = run.round()
    assert report.members == points
    assert not report.given_up
    assert report.attempts == (2 if (1, "upload") in plan else 1)
    got = run._vector.astype(np.float64)
    # the sum itself is within K·2^-41; the model is that, rounded once to float32
    assert np.abs(got - wanted).max() <= 5 * 2.0**-41 + np.abs(wanted).max() * 2.0**-24
    assert run.model["steps"] == 7  # whole numbers survive


def test_the_sum_is_within_k_steps_of_the_fixed_point(world: World) -> None:
    """Before it is rounded to float32."""
    run = world.federation(mark=False)
    sums: list[Vector] = []
    honest = run._sum

    def spy(*arguments: Any) -> Any:
        result = honest(*arguments)
        sums.append(result[0].copy())
        return result

    run._sum = spy  # type: ignore[method-assign, assignment]
    wanted = average(world, run, 1, (1, 2, 3, 4, 5))
    run.round()
    assert np.abs(codec.decode(sums[0], np.float64) - wanted).max() <= 5 * 2.0**-41


def test_with_the_mark_the_difference_is_exactly_the_amplitudes_times_the_key(world: World) -> None:
    """For every set U of three members or more that may take part, and for the fast path."""
    key = world.key()
    for out in [(), *((x,) for x in range(1, 6))]:
        pair: list[Any] = []
        for mark in (True, False):
            run = world.federation(mark=mark, losses=Losses({(4, "train"): out}))
            seen: list[tuple[Vector, Amplitudes | None]] = []
            honest = run._sum

            def spy(*arguments: Any, honest: Any = honest, seen: list[tuple[Vector, Amplitudes | None]] = seen) -> Any:
                result = honest(*arguments)
                seen.append((result[0].copy(), arguments[2]))
                return result

            run._sum = spy  # type: ignore[method-assign, assignment]
            for _ in range(3):
                run.round()
            if pair:  # the unmarked run goes on from the marked one's model, so that only round 4 differs
                run._vector, run.mark = pair[0]
            else:
                pair.append((run._vector.copy(), run.mark))
            report = run.round()
            assert len(report.members) == 5 - len(out)
            pair.append(seen[-1])
        (marked, amplitudes), (plain, nothing) = pair[1], pair[2]
        assert isinstance(amplitudes, Amplitudes)
        assert nothing is None
        assert amplitudes.marks
        ideal_mark(plain, amplitudes, key, world.manifest.genesis)
        assert (marked == plain).all()


def test_two_runs_with_one_seed_are_one(world: World) -> None:
    runs = [world.federation() for _ in range(2)]
    for run in runs:
        for _ in range(5):
            run.round()
    assert (runs[0]._vector == runs[1]._vector).all()
    assert runs[0].mark.digest() == runs[1].mark.digest()
    other = world.federation(seed=4)
    other.round()
    assert not (other._vector == runs[0]._vector).all()


def test_without_a_research_seed_the_order_comes_from_the_operating_system(world: World) -> None:
    runs = [world.federation(seed=None) for _ in range(2)]
    for run in runs:
        run.round()
    assert not (runs[0]._vector == runs[1]._vector).any()


# --- who comes and goes -----------------------------------------------------------------------------------


def test_a_round_that_cannot_live_is_given_up_and_the_last_model_stands(world: World) -> None:
    # T = ⌊(5+2)/2⌋+1 = 4
    run = world.federation(losses=Losses({(2, "train"): [1, 2], (3, "unmask"): [1, 2]}))
    first = run.round()
    model = run._vector.copy()
    for why in ("3 members are left, and at least 4", "3 members answered, and 4 must"):
        report = run.round()
        assert why in report.given_up
        assert not report.members
        assert (run._vector == model).all()
    last = run.round()
    assert (first.members, last.members) == ((1, 2, 3, 4, 5),) * 2
    assert not last.given_up


def test_members_with_rubbish_are_named_and_the_round_goes_on(world: World) -> None:
    def bad(kind: str) -> Callable[..., Model]:
        def training(model: Model, data: float, seed: int) -> Model:
            good = train(model, data, seed)
            if data != 0.03:
                return good
            if kind == "nan":
                good["a.weight"][3, 4] = np.nan
            if kind == "large":
                good["a.weight"][3, 4] = 1e9
            if kind == "shape":
                good["a.weight"] = good["a.weight"][:, :5]
            if kind == "missing":
                del good["a.bias"]
            return good

        return training

    for kind, text in [("nan", "finite"), ("large", "below"), ("shape", "a.weight"), ("missing", "a.bias")]:
        run = world.federation(members=world.members(bad(kind)))
        report = run.round()
        assert report.members == (1, 2, 4, 5), kind
        assert text in report.excluded[3]


def test_random_losses_never_make_a_wrong_model(world: World) -> None:
    """12 rounds with losses everywhere: each is FedAvg over its members, or the last model stands."""
    rates = {"train": 0.1, "upload": 0.1, "unmask": 0.05}
    run = world.federation(mark=False, losses=Losses(rates=rates, seed=11))
    lived = 0
    for round_no in range(1, 13):
        before = run._vector.copy()
        probe = world.federation(mark=False)
        probe._vector = before
        report = run.round()
        if report.given_up:
            assert (run._vector == before).all()
            continue
        lived += 1
        wanted = average(world, probe, round_no, report.members)
        assert np.abs(run._vector - wanted).max() < 1e-6
    assert 4 <= lived < 12  # this seed loses some


def test_cohorts_are_drawn_in_public() -> None:
    world = World(7, 3)
    group = group_of(world.manifest, cohort_size=5)
    members = {}
    for x, person in enumerate(world.people, 1):
        members[x] = FederationMember(person, world.manifest, world.layout, train, 0.01, world.shares[x], group=group)
    run = Federation(world.manifest, world.layout, world.model, members, seed=1)
    seen = set()
    for _ in range(6):
        report = run.round()
        assert report.members == group.cohort(report.round)
        seen.add(report.members)
    assert len(seen) > 1


# --- what members refuse ----------------------------------------------------------------------------------


def test_members_who_know_other_histories_share_no_sum(world: World) -> None:
    """The server shows Cedar another global model: it is bound to another history, and its message is refused."""
    run = world.federation()
    run.round()
    victim = run.members[3]
    other = world.federation(seed=9)
    other.round()
    honest = victim.ready
    victim.ready = lambda round_no, _mark, amplitudes, purpose="model": honest(  # type: ignore[method-assign, assignment]
        round_no, other.mark, amplitudes, purpose
    )
    report = run.round()
    assert report.members == (1, 2, 4, 5)
    assert "starts from another model" in report.excluded[3]


def test_amplitudes_that_were_not_derived_are_refused(world: World) -> None:
    """A server that wants a stronger mark tells everybody other amplitudes: every member derives its own."""
    run = world.federation()
    for _ in range(3):
        run.round()
    amplitudes = run.mark.amplitudes(4)
    loud = Amplitudes(
        amplitudes.layout,
        amplitudes.key,
        4,
        amplitudes.c,
        amplitudes.rho,
        tuple(tuple(tuple(1000 * n for n in values) for values in axes) for axes in amplitudes.scales),
    )
    member = run.members[1]
    server = SecAggServer(run.group, 4, bound(world.manifest, 4, run.mark, loud), world.layout.size)
    member.train(run.model, 1)
    with pytest.raises(MessageError, match="starts from another model, other weights"):
        server.take_ready(1, member.ready(4, run.mark, amplitudes))
    # and even where all were told so, the mark would be larger than what the member's own training moved
    server = SecAggServer(run.group, 5, bound(world.manifest, 5, run.mark, loud), world.layout.size)
    for x, other in run.members.items():
        other.train(run.model, x)
        server.take_ready(x, other.ready(5, run.mark, loud))
    with pytest.raises(RoundError, match="times this member's own update"):
        member.upload(server.announce(), run.mark, loud)


def test_epochs_and_amendments_do_not_mix(world: World) -> None:
    """A member whose data grew has its new number by a signed amendment; the old manifest does not take it."""
    terms = propose(world.manifest.terms, examples={1: 5000})
    later = successor(world.manifest, terms)
    for x, person in enumerate(world.people, 1):
        later = later.with_signature(x, person.sign("manifest", later.sign_bytes()))
    assert weights(later, (1, 2))[1] == Fraction(5000, 5200)
    with pytest.raises(InputError, match="must be of this manifest"):
        Federation(later, world.layout, world.model, world.members())
    old, new = group_of(world.manifest), group_of(later)
    assert old.id != new.id
    moved = FederationMember(world.people[0], later, world.layout, train, 0.01, world.shares[1])
    run = world.federation()
    server = SecAggServer(run.group, 1, bound(world.manifest, 1, run.mark, None), world.layout.size)
    with pytest.raises(MessageError, match="belongs elsewhere: its consortium"):
        server.take_ready(1, moved.ready(1, run.mark, None))


def test_inputs_are_checked(world: World) -> None:
    other = {**world.model, "a.bias": world.model["a.bias"] + 1}
    with pytest.raises(InputError, match="initial model that the manifest names"):
        Federation(world.manifest, world.layout, other, world.members())
    with pytest.raises(InputError, match="layout must be the one"):
        Federation(world.manifest, ModelLayout.of({"w": np.zeros((3, 4), np.float32)}), world.model, world.members())
    with pytest.raises(InputError, match="each at its point"):
        Federation(world.manifest, world.layout, world.model, {2: world.members()[1]})
    with pytest.raises(InputError, match="at the stages train, upload, unmask"):
        Losses({(1, "lunch"): [1]})
    with pytest.raises(InputError, match="warmup_rounds"):
        World(strength={"rule": "rho", "rho": "0.05", "warmup_rounds": "2"}).federation()
    with pytest.raises(RoundError, match="has not trained"):
        world.members()[1]._trained()


# --- other rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["model", "tensor"])
def test_the_papers_rule_sums_scales_first(per: str) -> None:
    world = World(strength={"rule": "paper", "c": "0.001", "c_max": "0.1", "per": per})
    run = world.federation(losses=Losses({(2, "train"): [2]}))
    reports = [run.round() for _ in range(3)]
    assert all(report.marked for report in reports)
    assert reports[1].members == (1, 3, 4, 5)
    key = world.key() * np.where(world.manifest.genesis.whitening(0, world.layout.coordinates), -1, 1)
    moved = (run._vector - world.layout.flatten(world.model))[world.layout.carrying()]
    plain = world.federation(mark=False, losses=Losses({(2, "train"): [2]}))
    for _ in range(3):
        plain.round()
    unmarked = (plain._vector - world.layout.flatten(world.model))[world.layout.carrying()]
    assert (moved - unmarked) @ key > 0


def test_the_baseline_of_a_key_for_each_member(world: World) -> None:
    """The mark of one of five is a fifth of the shared key's, weighted by its examples."""
    rng = np.random.default_rng(2)
    keys = {x: rng.choice([-1, 1], world.layout.coordinates) for x in range(1, 6)}
    group = group_of(world.manifest)
    members = {}
    for x, person in enumerate(world.people, 1):
        members[x] = FederationMember(
            person, world.manifest, world.layout, train, 0.01 * x, group=group, own_key=keys[x]
        )
    run = world.federation(members=members)
    plain = world.federation(mark=False)
    for _ in range(3):
        plain.round()
        report = run.round()
    assert report.marked
    amplitude = run.mark
    assert amplitude.rho > 0
    difference = (run._vector.astype(np.float64) - plain._vector)[world.layout.carrying()]
    shares = weights(world.manifest, range(1, 6))
    found = {x: float(difference @ keys[x]) / float(shares[x]) for x in keys}
    middle = np.median(list(found.values()))
    assert all(abs(value / middle - 1) < 0.35 for value in found.values())


# --- a run's folder ---------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_with_the_same_result(world: World, tmp_path: Path) -> None:
    whole = world.federation()
    for _ in range(6):
        whole.round()
    for stop in (1, 3, 5):
        folder = tmp_path / str(stop)
        first = world.federation(folder=folder)
        for _ in range(stop):
            first.round()
        # killed in the middle of the next round: new objects, nothing but the folder
        again = world.federation(folder=folder)
        assert again.round_no == stop
        reports = list(again.rounds(6))
        assert [report.round for report in reports] == list(range(stop + 1, 7))
        assert (again._vector == whole._vector).all()
        assert again.mark.digest() == whole.mark.digest()
        assert [r.round for r in again.reports] == [1, 2, 3, 4, 5, 6]
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [event["round"] for event in events] == [1, 2, 3, 4, 5, 6]
        kept = read_safetensors(folder / "model.safetensors")
        assert (world.layout.flatten(kept) == whole._vector).all()
        assert kept["steps"] == 7
    with pytest.raises(RecordError, match="holds another run"):
        world.federation(folder=folder, mark=False)
    other = World()
    with pytest.raises(RecordError, match="holds another run"):
        other.federation(folder=folder)


def test_members_may_keep_their_rounds_on_disk(world: World, tmp_path: Path) -> None:
    group = group_of(world.manifest)
    states = [FolderState.create(tmp_path / str(x), p, group) for x, p in enumerate(world.people)]
    members = {}
    for x, (person, state) in enumerate(zip(world.people, states, strict=True), 1):
        members[x] = FederationMember(
            person, world.manifest, world.layout, train, 0.01 * x, world.shares[x], group=group, state=state
        )
    run = world.federation(members=members, folder=tmp_path / "run")
    assert [run.round().given_up for _ in range(2)] == ["", ""]
    # a server that lost its folder starts at round 1 again: no member takes part in a round that is over
    fresh = world.federation(members=members)
    report = fresh.round()
    assert "at least 4 must take part" in report.given_up
    assert all("is over" in why for why in report.excluded.values())


def test_torch_models_train_and_resume(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from quorumark.training import torch_evaluate, torch_train

    torch.set_num_threads(1)

    def make() -> Any:
        return torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
        )

    torch.manual_seed(0)
    model = make().state_dict()
    layout = ModelLayout.of(make())
    people = identities(3)
    anchor = anchor_digest(layout, layout.encode(model))
    terms = make_terms(people, 2, layout.coordinates, layout=layout.digest(), anchor=anchor)
    manifest, shares = make_key(people, terms)
    inputs = torch.randn(90, 4)
    data = (inputs, (inputs[:, 0] > 0).long())

    def federation() -> Federation:
        group = group_of(manifest)
        members = {
            x: FederationMember(p, manifest, layout, torch_train(make, rate=0.02), data, shares[x], group=group)
            for x, p in enumerate(people, 1)
        }
        evaluate = torch_evaluate(make, data)
        return Federation(manifest, layout, model, members, evaluate=evaluate, seed=1, folder=tmp_path / "run")

    run = federation()
    for _ in range(3):
        run.round()
    again = federation()
    reports = list(again.rounds(6))
    assert reports[-1].metrics["accuracy"] > 0.9
    assert again.model["1.num_batches_tracked"].dtype == torch.int64
    assert reports[-1].marked


def test_shares_of_later_epochs_mark_the_same() -> None:
    """After a resharing a share is longer: what follows the key in it is not used."""
    world = World(3, 2)
    key = world.key()
    longer = {x: np.concatenate([share, field.random(9)]) for x, share in world.shares.items()}
    group = group_of(world.manifest)
    runs = []
    for shares in (world.shares, longer):
        members = {
            x: FederationMember(p, world.manifest, world.layout, train, 0.01, shares[x], group=group)
            for x, p in enumerate(world.people, 1)
        }
        run = world.federation(members=members)
        for _ in range(4):
            run.round()
        runs.append(run)
    assert (runs[0]._vector == runs[1]._vector).all()
    assert set(np.unique(key)) == {-1, 1}
    assert isinstance(world.manifest, Manifest)
    assert all(isinstance(p, Identity) for p in world.people)
    assert len(list(itertools.islice(runs[0].rounds(4), 1))) == 0


# --- many members (slow) ----------------------------------------------------------------------------------


def _crowd(count: int, threshold: int, shape: tuple[int, int]) -> tuple[Manifest, ModelLayout, Model, Any, Any]:
    """A consortium whose shares come from one place: its ceremony would take longer than its rounds."""
    people = [Identity.generate(f"member {x}") for x in range(1, count + 1)]
    model: Model = {"w": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    layout = ModelLayout.of(model)
    anchor = anchor_digest(layout, layout.encode(model))
    terms = make_terms(people, threshold, layout.coordinates, layout=layout.digest(), anchor=anchor, setup="dealer")
    roots = tuple(f"{x:064x}" for x in range(count))
    genesis = Genesis(terms.digest().hex(), terms.layout, terms.anchor, terms.statistic, "ab" * 32, roots)
    manifest = Manifest(terms, genesis, roots, commitment={"hash": "11" * 32, "nonce": "22" * 32})
    for x, person in enumerate(people, 1):
        manifest = manifest.with_signature(x, person.sign("manifest", manifest.sign_bytes()))
    key = np.random.default_rng(1).choice([-1, 1], layout.coordinates).astype(np.int64)
    return manifest, layout, model, people, key


def _many_rounds(count: int, threshold: int, shape: tuple[int, int], rounds: int, rates: dict[str, float]) -> None:
    manifest, layout, model, people, key = _crowd(count, threshold, shape)
    shares = shamir.share(field.from_signed(key), threshold, count)
    group = group_of(manifest, attempts=40)
    members = {
        x: FederationMember(p, manifest, layout, train_quickly, x, shares[x - 1], group=group)
        for x, p in enumerate(people, 1)
    }
    run = Federation(manifest, layout, model, members, seed=1, losses=Losses(rates=rates, seed=7))
    signs = np.where(manifest.genesis.whitening(0, key.size), -1, 1) * key
    for round_no in range(1, rounds + 1):
        before = run._vector.astype(np.float64)
        report = run.round()
        assert not report.given_up, report.given_up
        assert len(report.members) >= group.least
        total = sum(manifest.terms.member(x).examples for x in report.members)
        wanted = before + sum(
            manifest.terms.member(x).examples / total * step(layout.size, x, run._seed_for(round_no, x))
            for x in report.members
        )
        # FedAvg, and besides it nothing but a mark of a few hundredths of the update
        left = run._vector - wanted
        assert np.linalg.norm(left) < 0.2 * np.linalg.norm(wanted - before)
        if report.marked:
            cosine = float(left @ signs) / float(np.linalg.norm(left) * np.sqrt(left.size))
            assert cosine > 0.5
        print(round_no, len(report.members), report.attempts, {k: round(v, 1) for k, v in report.seconds.items()})  # noqa: T201
    assert report.marked


def step(size: int, point: int, seed: int | None) -> NDArray[np.float64]:
    return 0.01 * np.random.default_rng([seed or 0, point]).standard_normal(size)


def train_quickly(model: Model, data: int, seed: int) -> Model:
    return {"w": (model["w"] + step(model["w"].size, data, seed).reshape(model["w"].shape)).astype(np.float32)}


@pytest.mark.slow
def test_128_members_of_a_million_weights() -> None:
    """20 rounds, 10 % lost while training, 1 % after U is fixed: no round is lost, no wrong model appears."""
    _many_rounds(128, 64, (1000, 1000), 20, {"train": 0.1, "upload": 0.01})


@pytest.mark.slow
def test_1000_members() -> None:
    """3 rounds, 10 % lost while training, 0.05 % after U is fixed."""
    _many_rounds(1000, 400, (100, 100), 3, {"train": 0.1, "upload": 0.0005})
