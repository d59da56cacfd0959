"""What leaves a site, through FLARE's own chain of filters: its policy first, then the job's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="the extra 'nvflare' is not installed")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.statistics_privacy_filter import StatisticsPrivacyFilter
from nvflare.private.privacy_manager import Scope

from quorumark.errors import InputError
from quorumark.node.journal import allow_repeats
from quorumark.node.member import MemberNode
from quorumark.node.signer import SignerServer
from quorumark.node.wire import Sent
from quorumark.nvflare import JoinRound, KeepResult, NoPlainWeights, QuorumarkExecutor
from quorumark.nvflare import site as sites
from quorumark.nvflare.wire import KEY, SiteWire, packed, to_shareable, unpacked
from quorumark.round.server import RoundServer
from tests.kit.flare_runs import SEED
from tests.kit.flowers import Consortium, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    made = Consortium.make(tmp_path_factory.mktemp("world"), policy={"sums": "checked"})
    home, unlock = made.home(1)
    allow_repeats(home.only_consortium(), home.identity(unlock))
    return made


class Site:
    """One site's chain as FLARE runs it: data filters, an executor, result filters; the site's own ones first."""

    def __init__(
        self,
        world: Consortium,
        *policy: Any,
        watermarked: bool = True,
        name: str = "site-1",
        local: Path = Path("/nowhere"),
    ) -> None:
        self._manager = FLContextManager(SimpleNamespace(), name, "job", {}, {})
        came, goes = (f"train{FilterKey.DELIMITER}{way}" for way in (FilterKey.IN, FilterKey.OUT))
        self._data: dict[str, Any] = {came: [JoinRound(str(world.folder))]} if watermarked else {}
        self._results: dict[str, Any] = {goes: [KeepResult()]} if watermarked else {}
        self.executor = QuorumarkExecutor(str(world.folder))
        self.scope = Scope()
        self.scope.set_name("own")
        for one in policy:
            self.scope.add_task_result_filter(one, FilterKey.OUT)
        self._local = local

    def run(self, task: str, data: Shareable, execute: Callable[[Shareable], Shareable]) -> Shareable:
        with self._manager.new_context() as fl_ctx:
            about = {
                FLContextKey.TASK_NAME: task,
                FLContextKey.SCOPE_OBJECT: self.scope,
                FLContextKey.SIMULATE_MODE: True,
                FLContextKey.WORKSPACE_OBJECT: SimpleNamespace(get_site_config_dir=lambda: str(self._local)),
            }
            for key, value in about.items():
                fl_ctx.set_prop(key, value, private=True, sticky=False)
            try:
                data = apply_filters(Scope.TASK_DATA_FILTERS_NAME, data, fl_ctx, self._data, task, FilterKey.IN)
            except ValueError:  # as FLARE's client does
                return make_reply(ReturnCode.TASK_DATA_FILTER_ERROR)
            reply = self.executor.execute(task, data, fl_ctx, None) if task == "quorumark" else execute(data)
            return apply_filters(Scope.TASK_RESULT_FILTERS_NAME, reply, fl_ctx, self._results, task, FilterKey.OUT)

    def ask(self, **config: Any) -> dict[str, Any]:
        found = unpacked(self.run("quorumark", to_shareable(config, {}), lambda data: data))
        assert found is not None
        return dict(found["config"])


def script(kind: str = DataKind.WEIGHTS, metrics: Any = None) -> Callable[[Shareable], Shareable]:
    def execute(data: Shareable) -> Shareable:
        got = from_shareable(data)
        made = train(got.data, 0.01, got.meta.get("quorumark-seed", 1), 1.0)
        if kind == DataKind.WEIGHT_DIFF:
            made = {name: made[name] - got.data[name] for name in made}
        meta = {} if metrics is None else {MetaKey.INITIAL_METRICS: metrics}
        return DXO(kind, data=made, meta=meta).to_shareable()

    return execute


def offered(world: Consortium, number: int) -> Shareable:
    """What the server sends for training in a round."""
    assert world.manifest is not None
    server = RoundServer(world.manifest, world.layout, world.model, run="1", seed=SEED, after=number)
    config, arrays = server.offer(world.model)
    data = DXO(DataKind.WEIGHTS, data=dict(world.model)).to_shareable()
    data["quorumark"] = packed({**config, "stage": "train"}, arrays)
    return data


def plain(world: Consortium) -> Shareable:
    return DXO(DataKind.WEIGHTS, data=dict(world.model)).to_shareable()


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
@pytest.mark.parametrize("policy", [(), (NoPlainWeights(),)])
def test_a_result_stays_and_the_server_hears_that_the_member_is_ready(
    world: Consortium, policy: tuple[Any, ...], kind: str
) -> None:
    site = Site(world, *policy)
    number = 10 * (1 + len(policy)) + (kind == DataKind.WEIGHT_DIFF)
    reply = site.run("train", offered(world, number), script(kind, {"loss": 0.5, "weights": np.ones(9), "who": "me"}))
    message = unpacked(reply)
    assert message is not None
    assert set(message["config"]) >= {"ready", "introduction", "boxes", "vouch"}
    assert message["arrays"] == {}
    assert message["metrics"] == {"loss": 0.5}  # numbers only


def test_a_share_stays_with_the_signer_of_another_user(world: Consortium, tmp_path: Path) -> None:
    """A process of another user in a deployment; a thread here. The site's own process has neither home nor key."""
    path = tmp_path / "1.sock"
    signer = SignerServer(MemberNode(*world.home(2), seeds=True), path)
    thread = threading.Thread(target=signer.serve)
    thread.start()
    try:
        site = Site(world, NoPlainWeights(), name="elsewhere", local=tmp_path)
        (tmp_path / sites.SETTINGS).write_text(json.dumps({"socket": str(path)}))
        message = unpacked(site.run("train", offered(world, 60), script()))
        assert message is not None
        assert (message["config"]["point"], "ready" in message["config"]) == (2, True)
        assert site.ask(stage="unmask", request=b"none")["code"]  # the signer refuses, as the member would
    finally:
        signer.stop()
        thread.join()


def test_a_job_that_wants_plain_weights_gets_nothing(world: Consortium) -> None:
    """Whatever its tasks and kinds are called. Without the site's filter it gets them."""
    for task in ("train", "learn"):
        for kind in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF, DataKind.APP_DEFINED, DataKind.COLLECTION):
            taken = Site(world, watermarked=False).run(task, plain(world), script(kind))
            assert "a.weight" in from_shareable(taken).data
            held = Site(world, NoPlainWeights(), watermarked=False).run(task, plain(world), script(kind))
            assert held.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
            assert "DXO" not in held


def test_a_job_cannot_dress_weights_as_a_message_of_ours(world: Consortium) -> None:
    def dressed(data: Shareable) -> Shareable:
        return to_shareable({"ready": b"x"}, dict(from_shareable(data).data), {"loss": 1.0})

    assert unpacked(Site(world, watermarked=False).run("train", plain(world), dressed)) is not None
    held = Site(world, NoPlainWeights(), watermarked=False).run("train", plain(world), dressed)
    assert held.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR
    assert unpacked(held) is None


def test_errors_say_their_code_and_no_more(world: Consortium) -> None:
    def failed(data: Shareable) -> Shareable:
        reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply["left"] = dict(from_shareable(data).data)
        return reply

    held = Site(world, NoPlainWeights(), watermarked=False).run("train", plain(world), failed)
    assert held.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "left" not in held


@pytest.mark.parametrize("code", ["0.25 0.5 0.75", {"a": [0.25, 0.5]}, ["OK"]])
def test_a_return_code_carries_no_weights(world: Consortium, code: Any) -> None:
    held = Site(world, NoPlainWeights(), watermarked=False).run("train", plain(world), lambda _: make_reply(code))
    assert held.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "0.25" not in repr(held)


@pytest.mark.parametrize(
    ("found", "passes"), [({"acc": 0.5}, True), ({"acc": np.ones(2)}, False), ({"0.25 0.5 " * 9: 1.0}, False)]
)
def test_numbers_of_a_validation_pass_unless_the_site_says_no(world: Consortium, found: Any, passes: bool) -> None:
    def measured(data: Shareable) -> Shareable:  # noqa: ARG001
        return DXO(DataKind.METRICS, data=found).to_shareable()

    for policy, allowed in ((NoPlainWeights(), passes), (NoPlainWeights(metrics=False), False)):
        reply = Site(world, policy, watermarked=False).run("validate", plain(world), measured)
        assert (reply.get_return_code() == ReturnCode.OK) == allowed
    many = {str(n): float(n) for n in range(65)}  # a model is many numbers
    reply = Site(world, NoPlainWeights(), watermarked=False).run(
        "validate", plain(world), lambda _: DXO(DataKind.METRICS, data=many).to_shareable()
    )
    assert reply.get_return_code() == ReturnCode.TASK_RESULT_FILTER_ERROR


def test_a_site_trains_for_a_watermarked_job_only(world: Consortium) -> None:
    site = Site(world)
    assert site.run("train", plain(world), script()).get_return_code() == ReturnCode.TASK_DATA_FILTER_ERROR
    assert site.ask(stage="why")["code"] == "node.not-watermarked"
    assert site.ask(stage="why")["failed"]  # said once


@pytest.mark.parametrize("order", [0, 1])
def test_a_policy_that_damages_what_members_send_is_named(
    world: Consortium, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A percentile filter clips all weights to ±0.01 before they are masked. Without the check the member would send
    what is left of its model."""
    policy = [PercentilePrivacy(), StatisticsPrivacyFilter([])] + [NoPlainWeights()] * order
    site = Site(world, *policy)
    reply = site.run("train", offered(world, 40), script())
    assert reply.get_return_code() == ReturnCode.TASK_DATA_FILTER_ERROR
    why = site.ask(stage="why")
    assert why["code"] == "node.site-filter"
    assert "PercentilePrivacy" in why["refused"]
    assert "StatisticsPrivacyFilter" not in why["refused"]  # which works on statistics alone
    assert site.ask(stage="upload")["code"] == "node.site-filter"
    if not order:
        monkeypatch.setattr(sites, "check_policy", lambda _: None)
        seen: list[Any] = []
        monkeypatch.setattr(sites, "_ready", lambda _, dxo, *__: {"seen": str(seen.append(dxo))})  # type: ignore[func-returns-value]
        site.run("train", offered(world, 50), script())
        assert np.abs(seen[0].data["a.weight"]).max() <= 0.0100001


class Rounding(PercentilePrivacy):  # type: ignore[misc]
    """A filter that works on anything, and changes it a little."""

    def process(self, shareable: Shareable, fl_ctx: Any) -> Shareable:  # noqa: ARG002
        message = unpacked(shareable)
        if message is not None and "vector" in message["arrays"]:
            message["arrays"]["vector"][0] ^= np.uint64(1)
        return shareable


def test_a_message_that_a_filter_changed_is_noticed_at_the_server() -> None:
    vector = np.arange(9, dtype=np.uint64)
    wire = SiteWire(None, SimpleNamespace(get_job_id=lambda: "job"), None, "train")
    whole = to_shareable({"head": b"1"}, {"vector": vector})
    assert wire._read(whole).accepted() == {"head": b"1"}
    damaged = wire._read(Rounding().process(whole, None))
    assert (damaged.code, damaged.has_failed) == ("message.altered", False)
    bare = wire._read(DXO(DataKind.WEIGHTS, data={"a": vector}).to_shareable())
    assert bare.code == "node.no-mod"


@pytest.mark.parametrize(
    "content",
    [
        {"config": {"a": 1, 2: 3}, "arrays": {}},
        {"config": {}, "arrays": {"a": np.array([{}, []], object)}},
        {"config": {}, "arrays": {3: np.zeros(2), "a": np.zeros(2)}},
        {"config": [], "arrays": {}},
    ],
)
def test_one_site_cannot_end_the_job_with_a_message_of_no_shape(content: dict[str, Any]) -> None:
    wire = SiteWire(None, SimpleNamespace(get_job_id=lambda: "job"), None, "train")
    reply = wire._read(DXO(DataKind.APP_DEFINED, data={KEY: content}).to_shareable())
    assert reply.code == "node.no-mod"


@pytest.mark.parametrize("metrics", [{"acc": "abc"}, ["acc"], {"acc": [0.5]}, 7])
def test_metrics_that_are_no_numbers_are_left_out_at_the_server(metrics: Any) -> None:
    wire = SiteWire(None, SimpleNamespace(get_job_id=lambda: "job"), None, "train")
    content = {**packed({"head": b"1"}, {}), "metrics": metrics}
    assert not wire._read(DXO(DataKind.APP_DEFINED, data={KEY: content}).to_shareable()).beside


def test_a_server_asks_for_listed_stages_only(world: Consortium) -> None:
    site = Site(world)
    for stage in ("join", "ready", "reveal", ""):
        assert site.ask(stage=stage)["code"] == "message.no-stage"
    assert Sent({"stage": "why"}).beside is None


def test_which_member_a_site_is_its_operator_says(world: Consortium, tmp_path: Path) -> None:
    def context(name: str, local: Path, simulated: bool) -> Any:
        props = {
            FLContextKey.WORKSPACE_OBJECT: SimpleNamespace(get_site_config_dir=lambda: str(local)),
            FLContextKey.SIMULATE_MODE: simulated,
        }
        return SimpleNamespace(
            get_prop=lambda key, default=None: props.get(key, default), get_identity_name=lambda: name
        )

    homes = str(world.folder)
    assert "member-2'" in repr(sites.member_of(context("site-2", tmp_path, True), homes))
    for wrong in (
        context("site-2", tmp_path, False),
        context("Avon", tmp_path, True),
        context("site-9", tmp_path, True),
    ):
        with pytest.raises(InputError):
            sites.member_of(wrong, homes)
    member = world.folder / "member-3"
    (tmp_path / sites.SETTINGS).write_text(f'{{"home": "{member}", "key-file": "{member}.key"}}')
    assert "member-3'" in repr(sites.member_of(context("anything", tmp_path, False), "/elsewhere"))
    for text in ('{"home": "x"}', "{}", "[]", "{", '{"socket": "s", "manifest": "m"}'):
        (tmp_path / sites.SETTINGS).write_text(text)
        with pytest.raises(InputError):
            sites.member_of(context("site-1", tmp_path, True), homes)
