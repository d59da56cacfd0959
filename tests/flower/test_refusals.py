"""What a node refuses, what it says then, and what a server cannot make it do."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import ConfigRecord, Message, RecordDict

from quorumark.errors import RecordError
from quorumark.flower import watermarked
from quorumark.flower.wire import records
from quorumark.node.journal import MODEL, create_lost_memory
from quorumark.node.member import RESULT, MemberNode
from quorumark.node.signer import SignerClient
from quorumark.round.memory import FolderState
from quorumark.round.server import RoundServer
from quorumark.simulation import Losses
from quorumark.verify.reference import Reference
from tests.kit.flower_runs import SEED, InOrder, fedavg, run, run_in_vain, same
from tests.kit.flowers import Consortium, LocalGrid, Model, app_for, initial, records_of, train
from tests.kit.refusals import stopped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def test_a_number_of_examples_that_is_not_the_manifests(world: Consortium) -> None:
    grid = LocalGrid(app_for(world.folder, examples=lambda x: 90 if x == 2 else 100 + x), 5)
    wrapped, model = run(world, grid, 1)
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert wrapped.reports[0].excluded_codes == {-102: "round.other-examples"}
    assert "consortium amend --examples 2=90" in wrapped.reports[0].excluded[-102]
    assert same(model, world.in_process(1, SEED, Losses({(1, "train"): [2]})).model)


def test_members_that_cannot_take_part_say_why_and_the_others_go_on(world: Consortium, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Consortium.make(tmp_path / "other")
    (world.folder / "member-3").rename(world.folder / "kept")
    (other.folder / "member-3").rename(world.folder / "member-3")
    (world.folder / "member-3.key").rename(world.folder / "kept.key")
    (other.folder / "member-3.key").rename(world.folder / "member-3.key")
    grid, folder = LocalGrid(app_for(world.folder), 5), tmp_path / "server"
    wrapped, _ = run(world, grid, 1, folder=folder)
    assert wrapped.reports[0].members == (1, 2, 4, 5)
    assert wrapped.reports[0].excluded_codes == {-103: "round.other-manifest"}
    (world.folder / "member-3").rename(other.folder / "member-3")
    (world.folder / "kept").rename(world.folder / "member-3")
    (world.folder / "member-3.key").unlink()
    (world.folder / "kept.key").rename(world.folder / "member-3.key")

    home, _ = world.home(3)
    share = home.only_consortium().share_path()
    share.rename(tmp_path / "share")
    again, _ = run(world, LocalGrid(app_for(world.folder), 5, run_id=8), 2, folder=folder)
    assert again.reports[0].members == (1, 2, 4, 5)
    assert set(again.reports[0].excluded) == {-103}
    assert "no share" in again.reports[0].excluded[-103]
    (tmp_path / "share").rename(share)

    # a second run from the initial model: the server's operator forgot the folder
    second = run_in_vain(world, LocalGrid(app_for(world.folder), 5, run_id=9), "round.gone-on")
    assert second.reports[0].given_up_code == "round.too-few"
    told = [reason for point, reason in second.reports[0].excluded.items() if point not in (3, -103)]
    assert len(told) == 4
    assert all("go_on=True" in reason and "quorumark member consent" in reason for reason in told)


def test_one_member_with_a_later_number_or_another_layout_of_its_own(tmp_path: Path) -> None:
    """Member 3 has joined a later round elsewhere, and the run goes on after that; member 2's code has another model
    than the agreed one; member 4's went astray. Those are told why, without a single weight, and the others go on."""
    world = Consortium.deal(tmp_path, 9, 3)
    home, unlock = world.home(3)
    with FolderState(home.only_consortium().memory_path.parent, home.identity(unlock)).edit() as memory:
        memory["round"] = 6

    def smaller(*told: Any) -> Model:
        made = train(*told)
        return {**made, "b.weight": made["b.weight"][:39]}

    def astray(*told: Any) -> Model:
        made = train(*told)
        return {**made, "a.bias": np.where(np.arange(100) == 7, np.float32(-654321), made["a.bias"])}

    grid = LocalGrid(app_for(world.folder), 9)
    grid.apps[102] = app_for(world.folder, trained=smaller)
    grid.apps[104] = app_for(world.folder, trained=astray)
    wrapped, model = run(world, grid, 1)
    report = wrapped.reports[0]
    assert (report.given_up, report.members) == ("", (1, 3, 5, 6, 7, 8, 9))
    assert report.round == 7
    assert report.excluded_codes == {-102: "node.refused", -104: "round.not-encodable"}
    assert "'b.weight'" in report.excluded[-102]
    assert "(40, 100)" in report.excluded[-102]
    assert "'a.bias'" in report.excluded[-104]
    assert not any("654321" in str(reply) for reply in grid.seen)
    assert same(model, world.in_process(1, SEED, Losses({(1, "train"): [2, 4]})).model)


def test_stages_that_come_at_the_wrong_time(world: Consortium) -> None:
    """An upload without training, a second one for the same attempt, a request for a round that is over."""
    assert world.manifest is not None
    server = RoundServer(world.manifest, world.layout, world.model, run="1")
    offer, arrays = server.offer(world.model)
    model = {MODEL + name: tensor for name, tensor in world.model.items()}
    nodes = {x: MemberNode(*world.home(x)) for x in range(1, 6)}
    with stopped("round.not-trained", names="'Hospital 1'"):
        nodes[1].handle("upload", {"round": 1, "announcement": b""}, {})
    result = {RESULT + name: tensor for name, tensor in train(world.model, 0.01, 1, 1.0).items()}
    for x, node in nodes.items():
        reply, _ = node.handle("join", offer, {**arrays, **model})
        about = {**offer, "examples": 100 + x, "node": "1", "joined": reply["joined"]}
        ready, _ = node.handle("ready", about, result)
        server.take_ready(x, ready["ready"])
    told = {"round": 1, "announcement": server.announce()}
    for x, node in nodes.items():
        head, vector = node.handle("upload", told, {})
        server.take_upload(x, head["head"], vector["vector"])
    with stopped("round.wrong-attempt"):
        nodes[1].handle("upload", told, {})
    with stopped("round.not-trained"):
        nodes[1].handle("upload", {**told, "round": 2}, {})
    said, _ = nodes[1].handle("unmask", {"request": server.request(1)}, {})
    assert nodes[1].handle("unmask", {"request": server.request(1)}, {})[0] == said  # the same once more
    with stopped("round.answered-already"):
        nodes[1].handle("upload", told, {})


def test_what_an_exception_says_stays_on_the_node(world: Consortium) -> None:
    """Flower would send it to the server, and it may quote a member's data."""

    def careless(model: Model, *_: Any) -> Model:
        raise ValueError(f"cannot train on {model['a.weight'][0, :3]} of patient 4711")

    app, careful = app_for(world.folder, trained=careless), app_for(world.folder)
    grid = LocalGrid(careful, 5)
    grid.apps[102] = app
    wrapped, _ = run(world, grid, 1)
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert wrapped.reports[0].excluded_codes == {-102: "node.failed"}
    assert "ValueError" in wrapped.reports[0].excluded[-102]
    assert not any("patient" in str(reply) for reply in grid.seen)  # a number alone is in some key by chance


def test_what_an_exception_says_stays_on_the_node_wherever_it_is_raised(world: Consortium) -> None:
    """In another mod that makes a reply of it, in the app's evaluation, in a message that cannot be read."""
    from flwr.app import Array, ArrayRecord, Error

    def telling(message: Any, context: Any, call_next: Any) -> Any:
        if message.metadata.message_type == "evaluate":
            raise ValueError("cannot evaluate patient 4711")
        call_next(message, context)
        return Message(Error(2, "ValueError: patient 4711"), reply_to=message)

    grid = LocalGrid(app_for(world.folder), 5)
    grid.apps[102] = app_for(world.folder, mods=[telling])
    wrapped, _ = run(world, grid, 1, fedavg(fraction_evaluate=1.0))
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert wrapped.reports[0].excluded_codes == {-102: "node.failed"}
    assert "RuntimeError" in wrapped.reports[0].excluded[-102]
    assert any(reply.has_error() and reply.error.reason.startswith("ValueError; ") for reply in grid.seen)
    damaged = ArrayRecord({"one": Array("uint8", (3,), "numpy.ndarray", b"no array")})
    content = RecordDict({"quorumark": ConfigRecord({"stage": "setup"}), "quorumark.arrays": damaged})
    for kind in ("train", "query.quorumark"):
        grid.send_and_receive([Message(content, 101, kind)])
        assert grid.seen[-1].content["quorumark"]["failed"].endswith("; the node's log has the rest")
    assert not any("patient" in str(reply) for reply in grid.seen)  # a number alone is in some key by chance


def test_a_refusal_does_not_say_where_the_files_lie(world: Consortium) -> None:
    (world.folder / "member-2.key").unlink()
    (world.folder / "member-3.key").chmod(0o644)
    grid = LocalGrid(app_for(world.folder), 5)
    excluded = run_in_vain(world, grid, "node.refused").reports[0].excluded
    assert "cannot read the key file '…/member-2.key'" in excluded[-102]
    assert excluded[-103].endswith("'…/member-3.key' is open to others: chmod 600 …/member-3.key")
    assert not any(world.folder.name in str(reply) for reply in grid.seen)


def test_another_model_than_the_agreed_one(world: Consortium) -> None:
    """The server's own check first; a server that passes it over is refused by every member."""
    changed = {**initial(), "b.weight": np.zeros((41, 100), np.float32)}
    wrapped = watermarked(fedavg(), world.path)
    grid = LocalGrid(app_for(world.folder), 5)
    with pytest.raises(Exception, match=r"does not fit the layout|must be F32 of shape"):
        wrapped.start(grid=grid, initial_arrays=records_of(changed), num_rounds=1)
    home, unlock = world.home(1)
    assert world.manifest is not None
    from quorumark.model.layout import ModelLayout

    offer, arrays = RoundServer(world.manifest, world.layout, world.model, run="1").offer(world.model)
    model = {MODEL + name: tensor for name, tensor in changed.items()}
    with pytest.raises(Exception, match=r"b\.weight"):
        MemberNode(home, unlock).handle("join", offer, {**arrays, **model})
    arrays["layout"] = np.frombuffer(ModelLayout.of(changed).to_bytes(), np.uint8)
    with pytest.raises(RecordError, match="train the model that was agreed"):
        MemberNode(home, unlock).handle("join", offer, {**arrays, **model})


def test_a_member_may_evaluate_nothing(world: Consortium) -> None:
    """A server that sends any model learns its loss on a member's data, unless the member's own node says no."""
    app = app_for(world.folder)

    def with_setting(value: object) -> Any:
        def node(message: Any, context: Any) -> Any:
            context.run_config["quorumark-evaluate"] = "on"  # the server's, which does not count
            context.node_config["quorumark-evaluate"] = value
            return app(message, context)

        return node

    grid = LocalGrid(app, 5)
    grid.apps |= {102: with_setting("off"), 103: with_setting("on"), 104: with_setting("no")}
    chosen = {name: np.full_like(tensor, 3) for name, tensor in world.model.items()}  # no model of any run
    content = RecordDict({"arrays": records_of(chosen), "config": ConfigRecord()})
    replies = {
        reply.metadata.src_node_id: reply
        for reply in grid.send_and_receive([Message(content, node, "evaluate") for node in grid.apps])
    }
    told = {node for node, reply in replies.items() if reply.has_content() and "sum" in reply.content["metrics"]}
    assert told == {101, 103, 105}
    assert "evaluates no models: its operator switched it off" in replies[102].error.reason
    assert "must be on or off in the node config, but got 'no'" in replies[104].error.reason
    # it trains as before, and the strategy works with the metrics of the others
    wrapped = watermarked(fedavg(fraction_evaluate=1.0), world.path, seed=SEED)
    result = wrapped.start(grid, records_of(world.model), num_rounds=1)
    assert set(wrapped.reports[0].members) == {1, 2, 3, 4, 5}
    assert "sum" in result.evaluate_metrics_clientapp[1]


def test_what_a_message_lacks_is_the_servers_fault_and_our_own_faults_are_ours(
    world: Consortium, signers: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert world.manifest is not None
    node, server = MemberNode(*world.home(1)), RoundServer(world.manifest, world.layout, world.model, run="1")
    offer, arrays = server.offer(world.model)
    vectors = {**arrays, **{MODEL + name: tensor for name, tensor in world.model.items()}}
    for name in ("manifest", "round", "turn", "accepted", "history"):
        with stopped("message.incomplete", names=repr(name)):
            node.handle("join", {key: value for key, value in offer.items() if key != name}, vectors)
    for name in ("layout",):
        with stopped("message.incomplete", names=repr(name)):
            node.handle("join", offer, {key: value for key, value in vectors.items() if key != name})
    for stage, name, value in [
        ("join", "run", 1),
        ("join", "run", "\ud800"),
        ("join", "manifest", b"00"),
        ("upload", "announcement", "text"),
        ("unmask", "request", 5),
        ("sign", "certificate", "text"),
        ("answer", "query", 1.5),
        ("setup", "session", 1),
        ("setup", "have", 1),
    ]:
        with stopped("message.malformed", names=f"{stage!r} must give {name!r}"):
            node.handle(stage, {**offer, name: value}, vectors)

    def ours(*_: Any) -> None:
        raise KeyError("no field of any message")

    monkeypatch.setattr("quorumark.node.journal.Journal.check_share", ours)
    with pytest.raises(KeyError, match="no field of any message"):
        node.handle("join", offer, vectors)
    with stopped("node.failed", names="KeyError"):
        SignerClient(signers / "1.sock").handle("join", offer, vectors)
    assert "no field of any message" in capfd.readouterr().err


def test_a_server_cannot_say_what_a_member_has_trained(world: Consortium) -> None:
    """If it could, for all but one, the sum would show that one's model: joining and being ready are the node's own."""
    assert world.manifest is not None
    offer, arrays = RoundServer(world.manifest, world.layout, world.model, run="7").offer(world.model)
    model = {MODEL + name: tensor for name, tensor in world.model.items()}
    known = {RESULT + name: tensor for name, tensor in world.model.items()}
    grid = LocalGrid(app_for(world.folder), 5)

    def told(stage: str, vectors: dict[str, Any], kind: str = "train") -> str:
        content = RecordDict(records({**offer, "examples": 102, "node": "102", "stage": stage}, vectors))
        [reply] = grid.send_and_receive([Message(content, 102, kind)])
        return str(reply.content["quorumark"].get("refused"))

    assert "there is no stage 'join'" in told("join", {**arrays, **model})
    MemberNode(*world.home(2)).handle("join", offer, {**arrays, **model})  # as its node does
    assert "there is no stage 'ready'" in told("ready", known)
    assert "not a query" in told("ready", known, "query.quorumark")
    for stage in ("setup", "answer", "sign"):  # for an app that serves queries
        assert f"there is no stage {stage!r}" in told(stage, {})
    assert not list(world.folder.rglob("result-*.sealed"))


@pytest.mark.parametrize("checked", [False, True])
def test_a_server_that_lies_about_the_model_reads_the_key_unless_sums_are_checked(
    tmp_path: Path, checked: bool
) -> None:
    """docs/threat-model.md, "The server that trains": members train honestly, on data of their own, and the server
    tells them all the same: a history that never was, and a model most of whose units are dead for inputs that are not
    negative. What did not move shows S ⊙ τ. Two such rounds give the whole key. Where sums are checked nobody
    uploads."""
    from quorumark.research.known import KnownKey
    from quorumark.round.movement import norm_count

    units, rng = 48, np.random.default_rng(3)
    true = {
        "a.weight": (rng.standard_normal((units, 64)) / 8).astype(np.float32),
        "b.weight": (rng.standard_normal((10, units)) / 8).astype(np.float32),
    }
    policy = {"sums": "checked" if checked else "unchecked"}
    world = Consortium.make(tmp_path, model=true, strength={"dither": "0"}, policy=policy)
    assert world.manifest is not None
    nodes = {x: MemberNode(*world.home(x)) for x in range(1, 6)}
    guess = {name: np.zeros(tensor.shape) for name, tensor in true.items()}
    for after, alive in ((3, slice(0, 12)), (6, slice(12, 24))):
        dead = np.delete(np.arange(units), alive)
        chosen = {**true, "a.weight": true["a.weight"].copy()}
        chosen["a.weight"][dead] = -np.abs(chosen["a.weight"][dead])
        server = RoundServer(world.manifest, world.layout, true, run=f"run {after}", after=after)
        norms = np.full(norm_count(world.layout), 1 << 40, np.uint64)
        for number in range(1, after + 1):
            noise = {n: rng.standard_normal(t.shape).astype(np.float32) for n, t in chosen.items()}
            near = {n: t + np.float32(1e-4) * noise[n] for n, t in chosen.items()}
            server.history.accept(number, world.layout.encode(chosen if number == after else near), None, norms)
        offer, arrays = server.offer(chosen)
        told = {**arrays, **server.catch_up("anchor"), **{MODEL + name: tensor for name, tensor in chosen.items()}}
        for x, node in nodes.items():
            reply, _ = node.handle("join", offer, told)
            result = {RESULT + name: tensor for name, tensor in _two_layers(chosen, x).items()}
            about = {**offer, "examples": 100 + x, "node": "1", "joined": reply["joined"]}
            ready, _ = node.handle("ready", about, result)
            server.take_ready(x, ready["ready"], ready.get("boxes", b""), ready.get("vouch", b""))
        server.announce()
        for x, node in nodes.items():
            if checked:
                with stopped("round.unchecked-sum"):
                    node.handle("upload", server.asked(x), {})
                continue
            head, vector = node.handle("upload", server.asked(x), {})
            server.take_upload(x, head["head"], vector["vector"])
        if checked:
            continue
        for x, node in nodes.items():
            server.take_answer(x, node.handle("unmask", {"request": server.request(x)}, {})[0]["answer"])
        opened = server.finish()
        guess["a.weight"][dead] = np.sign(opened["a.weight"] - chosen["a.weight"])[dead]
        guess["b.weight"][:, dead] = np.sign(opened["b.weight"] - chosen["b.weight"])[:, dead]
    if checked:
        return
    shares = {
        x: home.only_consortium().share(unlock).vector() for x, (home, unlock) in enumerate(map(world.home, nodes), 1)
    }
    known = KnownKey.from_shares(world.manifest, shares, world.layout, Reference.read(world.path).anchor)
    for spec, place in world.layout.spans("carrier"):
        assert (guess[spec.name].reshape(-1) == known.key[place]).all()


def _two_layers(model: Model, point: int) -> Model:
    """Plain gradient descent on a member's own data, inputs from 0 to 1: softmax(b·relu(a·x))."""
    rng = np.random.default_rng(1000 + point)
    labels = rng.integers(0, 10, 600)
    data = np.clip(np.random.default_rng(4).random((10, 64))[labels] + 0.3 * rng.standard_normal((600, 64)), 0, 1)
    a, b = model["a.weight"].astype(np.float64), model["b.weight"].astype(np.float64)
    for _ in range(40):
        some = rng.integers(0, 600, 32)
        before = data[some] @ a.T
        hidden = np.maximum(before, 0)
        odds = np.exp(hidden @ b.T)
        error = (odds / odds.sum(1, keepdims=True) - np.eye(10)[labels[some]]) / 32
        a, b = a - 0.05 * ((error @ b) * (before > 0)).T @ data[some], b - 0.05 * error.T @ hidden
    return {"a.weight": a.astype(np.float32), "b.weight": b.astype(np.float32)}


def test_a_node_gives_a_plain_strategy_nothing(world: Consortium) -> None:
    """With the mod in the app and no wrapper at the server the models would be sent as they are."""
    grid = LocalGrid(app_for(world.folder), 5)
    content = RecordDict({"arrays": records_of(world.model), "config": ConfigRecord({"server-round": 1})})
    grid.send_and_receive([Message(content, 101, "train")])
    reply = grid.seen[-1]
    assert not reply.content.array_records
    assert "quorumark.flower.watermarked" in reply.content["quorumark"]["refused"]


def test_a_node_without_the_mod_and_a_stranger_are_left_out(world: Consortium) -> None:
    from flwr.clientapp import ClientApp

    bare = ClientApp()

    @bare.train()  # type: ignore[untyped-decorator]
    def step(message: Any, context: Any) -> Any:  # noqa: ARG001
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    grid = LocalGrid(app_for(world.folder), 6)  # the sixth has no home
    grid.apps[102] = bare
    wrapped, _ = run(world, grid, 1)
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert wrapped.reports[0].excluded_codes == {-102: "node.no-mod", -106: "node.refused"}


def test_nobody_passes_for_another_member(world: Consortium) -> None:
    """A node that shows another member's introduction and key is left out, and the member is not."""
    app = app_for(world.folder)
    grid = LocalGrid(app, 5)
    copied: list[Any] = []

    def thief(message: Any, context: Any) -> Any:
        if copied:
            return Message(copied[0], reply_to=message)
        return app(message, context)

    def honest(message: Any, context: Any) -> Any:
        training = message.content["quorumark"]["stage"] == "train"
        reply = app(message, context)
        if training:
            copied.append(reply.content)
        return reply

    grid.apps = {101: honest, 102: thief, 103: app, 104: app, 105: app}
    wrapped = watermarked(
        InOrder(min_train_nodes=5, min_available_nodes=5, fraction_evaluate=0.0), world.path, seed=SEED
    )
    wrapped.start(grid=grid, initial_arrays=records_of(world.model), num_rounds=1)
    assert wrapped.reports[0].members == (1, 3, 4, 5)
    assert wrapped.reports[0].excluded_codes[-102] == "message.not-from-member"


def test_a_member_that_runs_twice_is_in_once(world: Consortium) -> None:
    """A home was copied, and both machines are up: the second would put another model under the same masks."""
    shutil.copytree(world.folder / "member-1", world.folder / "member-6")
    shutil.copy(world.folder / "member-1.key", world.folder / "member-6.key")
    grid = LocalGrid(app_for(world.folder, examples=lambda x: 101 if x == 6 else 100 + x), 6)
    ordered = InOrder(min_train_nodes=6, min_available_nodes=6, fraction_evaluate=0.0)
    wrapped, model = run(world, grid, 1, ordered)
    assert wrapped.reports[0].members == (1, 2, 3, 4, 5)
    assert wrapped.reports[0].excluded_codes == {-106: "node.twice"}
    assert same(model, world.in_process(1, SEED).model)


def test_a_false_history_is_refused(world: Consortium) -> None:
    """A server that tells a member another history of the same run than it has seen."""
    from quorumark.round.movement import norm_count

    grid = LocalGrid(app_for(world.folder), 5)
    run(world, grid, 2)
    assert world.manifest is not None
    liar = RoundServer(world.manifest, world.layout, world.model, run="7", after=2)
    offer, arrays = liar.offer(world.model)
    home, unlock = world.home(1)
    other = train(world.model, 0.01, 1, 1.0)
    changed = copy.deepcopy(liar)
    changed.history.accept(1, world.layout.encode(other), None, np.ones(norm_count(world.layout), np.uint64))
    made_up, state = changed.offer(other)
    with stopped("round.other-history", names="'Hospital 1'"):
        MemberNode(home, unlock).handle("join", made_up, {**state, **{MODEL + n: t for n, t in other.items()}})
    # nor does it begin anew
    model = {MODEL + name: tensor for name, tensor in world.model.items()}
    with stopped("round.gone-on"):
        MemberNode(home, unlock).handle("join", {**offer, "node": "101"}, {**arrays, **model})
    with stopped("message.incomplete", names="'round'"):
        MemberNode(home, unlock).handle("join", {"manifest": offer["manifest"]}, {})


def test_without_a_memory_of_rounds_nobody_takes_part(world: Consortium, tmp_path: Path) -> None:
    """The key ceremony made it: one that is gone counts as lost, also before the first round."""
    home, unlock = world.home(1)
    place = home.only_consortium()
    place.memory_path.unlink()
    wrapped, _ = run(world, LocalGrid(app_for(world.folder), 5), 1, folder=tmp_path / "server")
    assert wrapped.reports[0].members == (2, 3, 4, 5)
    assert "quorumark member rounds --lost" in wrapped.reports[0].excluded[-101]
    create_lost_memory(place, home.identity(unlock))
    again, _ = run(world, LocalGrid(app_for(world.folder), 5, run_id=8), 4, folder=tmp_path / "server")
    assert [1 in report.members for report in again.reports] == [False, False, True]
