"""Secure aggregation alone: no key, exact sums, and none from a model that another consortium of the home marks."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.serverapp import strategy as strategies

import quorumark as qm
from quorumark import field, shamir
from quorumark.consortium.optimiser import Optimiser
from quorumark.consortium.records import Manifest, Terms, anchor_of
from quorumark.errors import InputError, KeystoreError, QuorumarkError, RecordError
from quorumark.flower import make_key, secure, watermarked
from quorumark.node.journal import Journal
from quorumark.node.marked import MarkedModels
from quorumark.node.member import MemberNode
from quorumark.round.server import RoundServer
from quorumark.setup.amend import propose, sign
from quorumark.setup.inprocess import set_up_all
from quorumark.setup.sums import sign_terms
from quorumark.verify.query import prepare
from quorumark.verify.reference import Reference
from tests.kit import commands
from tests.kit.flower_runs import SEED, InOrder, as_stages, fedavg
from tests.kit.flowers import Consortium, LocalGrid, Model, app_for, records_of, same, train
from tests.kit.opened import summed
from tests.kit.optimiser_oracle import Oracle
from tests.kit.refusals import stopped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

LOSSES = {(2, "train"): [4], (4, "upload"): [2], (5, "unmask"): [1]}


def made(folder: Path, **policy: str) -> Consortium:
    folder.mkdir(exist_ok=True)
    return Consortium.make(folder, setup="sums", policy={"sums": "checked", **policy})


def in_order() -> Any:
    return InOrder(min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0)


def run(world: Consortium, grid: Any, rounds: int, inner: Any = None, **options: Any) -> tuple[Any, Model]:
    wrapped = secure(inner or in_order(), world.path, **{"seed": SEED, **options})
    result = wrapped.start(grid=grid, initial_arrays=records_of(world.model), num_rounds=rounds, timeout=60)
    return wrapped, {name: np.asarray(array.numpy()).reshape(array.shape) for name, array in result.arrays.items()}


class Recorded:
    """What members trained, and from which model, in the order of the calls."""

    def __init__(self) -> None:
        self.before: list[Model] = []
        self.after: list[Model] = []

    def __call__(self, model: Model, data: float, seed: int, rate: float) -> Model:
        self.before.append(model)
        self.after.append(train(model, data, seed, rate))
        return self.after[-1]


def average(results: list[Model], name: str, places: slice) -> list[Fraction]:
    """FedAvg in exact arithmetic; the x-th member has 100 + x examples."""
    counts = [100 + x for x in range(1, len(results) + 1)]
    columns = zip(*(np.ravel(result[name])[places] for result in results), strict=True)
    shares = [Fraction(n, sum(counts)) for n in counts]
    products = ([a * Fraction(float(v)) for a, v in zip(shares, row, strict=True)] for row in columns)
    return [sum(row, Fraction(0)) for row in products]


class Opened(list[Any]):
    """The sums as servers opened them, in 2^-40, and the units that each tensor had."""

    def __init__(self) -> None:
        self.units: list[dict[str, Fraction]] = []


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    found, finish = Opened(), RoundServer.finish

    def finished(server: RoundServer) -> dict[str, Any]:
        weights = finish(server)
        found.append(field.to_signed(summed(server)))
        shifts = {place.start: shift for place, shift in server.history.mark.spans(server.level)}
        found.units.append(
            {s.name: Fraction(1 << shifts.get(place.start, 0), 1 << 40) for s, place in server.layout.spans()}
        )
        return weights

    monkeypatch.setattr(RoundServer, "finish", finished)
    return found


def furthest(world: Consortium, total: Any, results: list[Model], units: dict[str, Fraction]) -> Fraction:
    """Of a sum from the exact average, in units, over some weights of each tensor."""
    far = Fraction(0)
    for spec, place in world.layout.spans():
        some = slice(0, None, max(1, spec.size // 50))
        wanted = average(results, spec.name, some)
        off = (abs(Fraction(int(v), 1 << 40) - w) for v, w in zip(total[place][some], wanted, strict=True))
        far = max(far, *(n / units[spec.name] for n in off))
    return far


@pytest.mark.parametrize(
    ("sums", "packing"), [("checked", "2"), ("unchecked", "2"), ("checked", "1"), ("checked", "3"), ("checked", "4")]
)
def test_fedavg_is_exact(tmp_path: Path, sums: str, packing: str, opened: Opened) -> None:
    """The opened sum is the weighted average to K/2 units, against fractions; with two members' weights changed, or
    one counted twice in place of another, it is not. With one weight in an element units are 2^-40."""
    world, seen = made(tmp_path, sums=sums, packing=packing), Recorded()
    wrapped, model = run(world, LocalGrid(app_for(world.folder, trained=seen), 5), 3)
    assert [report.given_up for report in wrapped.reports] == [""] * 3
    assert not any(report.marked or report.rho or report.expected_z for report in wrapped.reports)
    for number, (total, units) in enumerate(zip(opened, opened.units, strict=True)):
        assert packing != "1" or set(units.values()) == {Fraction(1, 1 << 40)}
        results = seen.after[5 * number : 5 * number + 5]
        assert furthest(world, total, results, units) <= Fraction(5, 2)
        if packing in ("1", "2"):  # units of the others are as large as that
            assert furthest(world, total, [results[4], *results[1:4], results[0]], units) > 1000
        assert furthest(world, total, [*results[:4], results[0]], units) > 25
    # the last model is that sum in the model's own types
    flat = (opened[-1].astype(np.float64) / 2.0**40).astype(np.float32)
    assert all(np.array_equal(flat[place], np.ravel(model[spec.name])) for spec, place in world.layout.spans())
    assert model["steps"] == world.model["steps"]


@pytest.mark.parametrize(("packing", "most"), [("1", 8.1), ("2", 4.2), ("3", 2.9), ("4", 2.3)])
def test_bytes_a_weight(tmp_path: Path, packing: str, most: float) -> None:
    """Everything that an upload has: the head, boxes, the tag. The model has 12,640 weights."""
    world = made(tmp_path, packing=packing)
    wrapped, _ = run(world, LocalGrid(app_for(world.folder), 5), 2)
    for report in wrapped.reports:
        a_weight = report.uploaded_bytes / 5 / world.layout.size
        assert 8 / int(packing) <= a_weight <= most


def test_members_who_are_lost_at_each_stage_find_their_way_back(tmp_path: Path) -> None:
    world = made(tmp_path)
    grid = LocalGrid(app_for(world.folder, lost=as_stages(LOSSES)), 5)
    wrapped, _ = run(world, grid, 4, folder=tmp_path / "run")
    more, _ = run(world, LocalGrid(app_for(world.folder, lost=as_stages(LOSSES)), 5), 7, folder=tmp_path / "run")
    reports = [*wrapped.reports, *more.reports]
    assert not any(report.given_up for report in reports)
    assert [len(report.members) for report in reports] == [5, 4, 5, 4, 5, 5, 5]
    assert [report.attempts for report in reports] == [1, 1, 1, 2, 1, 1, 1]


def test_a_server_that_changes_the_sum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = made(tmp_path)
    offer = RoundServer.offer

    def lying(server: RoundServer, model: Any) -> Any:
        config, arrays = offer(server, model)
        if "sum" in arrays:
            arrays["sum"] = arrays["sum"].copy()
            arrays["sum"][0] = (int(arrays["sum"][0]) + 1) % ((1 << 61) - 1)
        return config, arrays

    monkeypatch.setattr(RoundServer, "offer", lying)
    wrapped, _ = run(world, LocalGrid(app_for(world.folder), 5), 2)
    assert wrapped.reports[0].given_up == ""
    assert set(wrapped.reports[1].excluded_codes.values()) == {"round.wrong-tag"}
    assert len(wrapped.reports[1].excluded_codes) == 5


@pytest.mark.parametrize("packing", ["1", "2"])
def test_fedadam_is_exact_to_its_own_arithmetic(tmp_path: Path, packing: str, opened: Opened) -> None:
    """The opened sum is the weighted average to K/2 units, against fractions; every model is what the oracle makes of
    that sum in Python's integers, rounded to the model's types once."""
    text = "fedadam:eta=0.02,beta_2=0.9,tau=0.0001"
    world, seen = made(tmp_path, optimiser=text, packing=packing), Recorded()

    class Adam(InOrder, strategies.FedAdam):  # type: ignore[misc]
        pass

    inner = Adam(min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0, eta=0.02, beta_2=0.9, tau=0.0001)
    wrapped, model = run(world, LocalGrid(app_for(world.folder, trained=seen), 5), 3, inner)
    assert [report.given_up for report in wrapped.reports] == [""] * 3
    chosen = Optimiser.of(text)
    oracle = Oracle(chosen.name, dict(chosen.settings), world.layout.size)
    for number, (total, units) in enumerate(zip(opened, opened.units, strict=True)):
        assert furthest(world, total, seen.after[5 * number : 5 * number + 5], units) <= Fraction(5, 2)
        before = [round(Fraction(float(v)) * 2**40) for v in world.layout.flatten(seen.before[5 * number])]
        moves = oracle.take([int(x) - b for x, b in zip(total, before, strict=True)])
        wanted = np.array([(b + m) / 2**40 for b, m in zip(before, moves, strict=True)]).astype(np.float32)
        after = seen.before[5 * number + 5] if number < 2 else model
        assert np.array_equal(world.layout.flatten(after), wanted)
    assert not np.array_equal(wanted, (opened[-1] / 2.0**40).astype(np.float32))  # it did something


def test_a_changed_number_of_examples_is_signed_as_elsewhere(tmp_path: Path) -> None:
    world = made(tmp_path)
    terms = propose(world.terms, examples={1: 150})
    for _ in range(2):
        for x in range(1, 6):
            home, unlock = world.home(x)
            place = home.only_consortium()
            manifest = sign(home, unlock, terms, tmp_path / "amendment", place).manifest
    assert manifest is not None
    assert manifest.terms.member(1).examples == 150
    assert manifest.roots == ()


def test_nothing_can_be_verified_or_shared(tmp_path: Path) -> None:
    world = made(tmp_path)
    assert world.manifest is not None
    reference = Reference.of((world.manifest,), world.layout, world.model)
    with pytest.raises(RecordError, match=r"sums alone .* nothing to verify"):
        prepare(reference, world.model)
    home, unlock = world.home(1)
    with pytest.raises(KeystoreError, match="sums alone"):
        home.only_consortium().share(unlock)
    with pytest.raises(InputError, match=r"secure\(strategy"):
        watermarked(fedavg(), world.path)


def test_a_manifest_with_a_key_is_for_watermarked(world: Consortium) -> None:
    with pytest.raises(InputError, match=r"watermarked\(strategy"):
        secure(fedavg(), world.path)


def test_terms_without_a_key_need_neither_groups_nor_a_plan(tmp_path: Path) -> None:
    world = Consortium.agree(tmp_path)
    cards = [(world.home(x)[0].card(), 100) for x in range(1, 6)]
    terms = Terms.agree("sums", 3, cards, world.model, setup="sums")
    assert not terms.has_key
    assert Terms.from_bytes(terms.to_bytes()) == terms


# --- a model that another consortium of the same home marks -----------------------------------------------


def beside(world: Consortium, model: Model) -> tuple[Consortium, str]:
    """The members of a consortium with a key agree on sums alone as well, of the same kind of model."""
    old = world.terms
    terms = Terms(
        "plain", 3, old.roster, old.layout, old.coordinates, anchor_of(world.layout, model), old.created,
        setup="sums", leaf=64, policy=old.policy,
    )  # fmt: skip
    other = Consortium(world.folder / "plain", 5, terms, model, world.layout)
    other.folder.mkdir()
    other.keep(set_up_all([world.home(x) for x in range(1, 6)], terms, world.folder / "signing"))
    return other, terms.digest().hex()[:16]


def grid_of(world: Consortium, which: str, run_id: int, trained: Any = train) -> LocalGrid:
    """Nodes of homes that hold two consortia."""

    def find(context: Any) -> MemberNode:
        home, unlock = world.home(int(context.node_config["partition-id"]) + 1)
        return MemberNode(home, unlock, consortium=which, seeds=True)

    return LocalGrid(app_for(world.folder, find=find, trained=trained), 5, run_id=run_id)


def journal_of(world: Consortium, x: int, which: str) -> Journal:
    home, unlock = world.home(x)
    return Journal(home.only_consortium(which), home.identity(unlock))


def consent(world: Consortium, x: int, which: str, *options: str) -> Any:
    """`quorumark member consent --unmarked`, as an operator types it."""
    home = world.folder / f"member-{x}"
    where = ["--home", str(home), "--key-file", f"{home}.key", "--consortium", which]
    return commands.run({}, "member", "consent", "--unmarked", *options, *where)


def marked_run(world: Consortium, rounds: int, run_id: int, trained: Any = train, **options: Any) -> Any:
    wrapped = watermarked(in_order(), world.path, seed=SEED, **options)
    grid = grid_of(world, world.terms.digest().hex()[:16], run_id, trained)
    result = wrapped.start(grid=grid, initial_arrays=records_of(world.model), num_rounds=rounds, timeout=60)
    return wrapped, {name: np.asarray(array.numpy()).reshape(array.shape) for name, array in result.arrays.items()}


def test_sums_of_a_model_that_is_marked_elsewhere_take_consent(tmp_path: Path) -> None:
    world = Consortium.make(tmp_path)
    keyed = world.terms.digest().hex()[:16]
    plain, which = beside(world, world.model)
    with stopped("round.none-finished") as caught:
        run(plain, grid_of(world, which, 7), 1)
    assert "quorumark member consent --unmarked" in str(caught.value)
    for x in range(1, 5):
        said = consent(world, x, which, "--yes")
        assert (said.returncode, said.stderr) == (0, "")
        assert "whole key" in said.stdout
    wrapped, _ = run(plain, grid_of(world, which, 8), 1)
    assert list(wrapped.reports[0].excluded_codes.values()) == ["round.marked-elsewhere"]
    assert wrapped.reports[0].members == (1, 2, 3, 4)
    # and who has summed a model without a key puts no mark into a sum from it
    again = watermarked(in_order(), world.path, seed=SEED)
    with stopped("round.none-finished"):
        again.start(grid=grid_of(world, keyed, 9), initial_arrays=records_of(world.model), num_rounds=1, timeout=60)
    assert list(again.reports[0].excluded_codes.values()) == ["round.other-consortium"] * 4
    refused = consent(world, 1, keyed, "--yes")
    assert refused.returncode == 2
    assert "--unmarked must be for a consortium without a key" in refused.stderr
    assert consent(world, 1, which, "--here").returncode == 2


def test_nobody_consents_by_a_command_that_is_not_answered(tmp_path: Path) -> None:
    world = Consortium.make(tmp_path)
    plain, which = beside(world, world.model)
    for x in range(1, 6):
        assert consent(world, x, which).returncode == 1  # it asks, and nobody is there
    with stopped("round.none-finished"):
        run(plain, grid_of(world, which, 7), 1)


class Repeated:
    """Training that repeats itself to the bit: member x moves by the same step in every run."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, model: Model, data: float, seed: int, rate: float) -> Model:  # noqa: ARG002
        self._calls += 1
        return train(model, data, self._calls % 5, 1.0)


def test_without_the_refusal_two_sums_show_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    """Two rounds, a third one with the mark, and a sum without a key from the same model: their difference is the mark.
    With the refusal nothing is opened."""
    world = Consortium.make(tmp_path)
    _, model = marked_run(world, 2, 7, Repeated(), folder=tmp_path / "run")
    wrapped, _ = marked_run(world, 3, 8, Repeated(), folder=tmp_path / "run")
    assert wrapped.reports[-1].marked
    marked = opened[-1]
    plain, which = beside(world, model)
    with stopped("round.none-finished"):
        run(plain, grid_of(world, which, 9, Repeated()), 1)
    assert len(opened) == 3
    monkeypatch.setattr(MarkedModels, "check_unmarked", lambda *_: None)
    run(plain, grid_of(world, which, 10, Repeated()), 1)
    difference = (marked - opened[-1])[world.layout.carrying()]
    shares = {x: _share(world, x) for x in (1, 2, 3)}
    key = field.to_signed(shamir.reconstruct(shares, 3))[: world.layout.coordinates]
    assert world.manifest is not None
    signs = np.where(world.manifest.genesis.whitening(0, key.size), -key, key)
    units = max(unit for one in (opened.units[2], opened.units[3]) for unit in one.values())
    shown = np.abs(difference) > 5 * int(units * 2**40)  # beyond what rounding leaves: K/2 units of each sum
    assert shown.mean() > 0.9
    assert np.array_equal(np.sign(difference[shown]), signs[shown])


def _share(world: Consortium, x: int) -> Any:
    home, unlock = world.home(x)
    return home.only_consortium(world.terms.digest().hex()[:16]).share(unlock).vector()


# --- signing ----------------------------------------------------------------------------------------------


def test_members_sign_by_one_command(tmp_path: Path) -> None:
    world = Consortium.agree(tmp_path)
    command = ["consortium", "create", "--setup", "sums", "--name", "sums", "--threshold", "3"]
    command += ["--model", str(tmp_path / "anchor.safetensors"), "--out", str(tmp_path / "agreed")]
    for x in range(1, 6):
        command += ["--member", f"{tmp_path}/member-{x}/member.json:{100 + x}"]
    refused = commands.run({}, *command, "--rounds", "30")
    assert refused.returncode != 0
    assert "must come without --rounds" in refused.stderr
    written = commands.run({}, *command)
    assert (written.returncode, written.stderr) == (0, "")
    assert "no key" in written.stdout
    assert "WARNING" not in written.stdout
    shown = commands.run({}, "consortium", "show", str(tmp_path / "agreed" / "terms.json"))
    assert "no key: secure aggregation alone" in shown.stdout
    assert not [word for word in ("rademacher", "strength", "statistic", "align") if word in shown.stdout]
    terms, folder = str(tmp_path / "agreed" / "terms.json"), str(tmp_path / "signing")
    where = ["--terms", terms, "--folder", folder, "--no-wait"]
    said = [
        commands.run(
            {}, "setup", "sums", *where, "--home", f"{tmp_path}/member-{x}", "--key-file", f"{tmp_path}/member-{x}.key"
        )
        for x in (1, 2, 3, 4, 5, 1)
    ]
    assert "waiting for Hospital 2" in said[0].stdout
    assert "waiting" not in said[-1].stdout
    for x in (2, 3, 4):
        home, unlock = world.home(x)
        assert sign_terms(home, unlock, home.only_consortium().terms(), folder).manifest is not None
    one = Manifest.from_bytes(world.home(1)[0].only_consortium().manifest_path.read_bytes())
    assert one == Manifest.from_bytes(world.home(5)[0].only_consortium().manifest_path.read_bytes())
    assert len(one.signatures) == 5


def test_a_signature_of_something_else_is_refused(tmp_path: Path) -> None:
    world = Consortium.agree(tmp_path, setup="sums")
    signed = tmp_path / "signing" / "1-sign"
    for x in range(1, 5):
        assert sign_terms(*world.home(x), world.terms, signed.parent).waiting
    (signed / "5.msg").write_text((signed / "4.msg").read_text())
    with pytest.raises(QuorumarkError, match="Hospital 5"):
        sign_terms(*world.home(1), world.terms, signed.parent)
    home, unlock = world.home(5)
    assert sign_terms(home, unlock, world.terms, signed.parent).manifest is not None


def test_members_sign_over_flower(tmp_path: Path) -> None:
    """As a key is made: by members who pinned the terms."""
    world = Consortium.agree(tmp_path, setup="sums", policy={"sums": "checked"})
    app = app_for(world.folder, pinned=world.terms.digest().hex())
    world.keep(make_key(LocalGrid(app, 5), world.terms))
    wrapped, _ = run(world, LocalGrid(app_for(world.folder), 5, run_id=8), 1)
    assert wrapped.reports[0].members == (1, 2, 3, 4, 5)


def test_a_federation_in_one_process_needs_no_key(tmp_path: Path) -> None:
    """The same models as over Flower, bit for bit."""
    world = made(tmp_path)
    _, model = run(world, LocalGrid(app_for(world.folder), 5), 3)
    homes = [qm.Home(tmp_path / f"member-{x}", key_file=tmp_path / f"member-{x}.key") for x in range(1, 6)]
    federation = qm.Federation.of_homes(homes, world.model, train, [0.01] * 5, seed=SEED)
    assert not any(report.given_up or report.marked for report in federation.rounds(3))
    assert same(model, federation.model)
