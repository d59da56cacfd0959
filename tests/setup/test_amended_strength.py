"""The mark's strength can be amended between runs; what it has shown so far counts on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quorumark.consortium.strength import ONE, Strength
from quorumark.consortium.succession import check_terms_follow
from quorumark.errors import QuorumarkError, RecordError
from quorumark.round.amplitudes import MarkState
from quorumark.setup.amend import changes, propose
from tests.kit.ceremony_folder import Consortium
from tests.kit.marks import PEOPLE, RHO, make_layout, make_manifest, random_walk


def test_all_sign_another_strength_through_the_commands(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    before, terms = group.manifests()[0], tmp_path / "stronger.json"
    amend = ["consortium", "amend", "--home", str(group.homes[0]), "--out"]
    said = group.run(*amend, str(terms), "--strength", "c_max=0.08", "--strength", "rounds=60")
    assert "strength c_max: 0.03 → 0.08" in said
    assert "plan: after 60 rounds" in said
    sign = ["consortium", "sign", "--terms", str(terms), "--folder", str(tmp_path / "signatures")]
    for home in [*group.homes, *group.homes]:
        group.run(*sign, *group.secrets(home))
    after = group.manifests()
    assert len({manifest.to_bytes() for manifest in after}) == 1
    assert after[0].terms.strength.as_dict()["c_max"] == "0.08"
    assert after[0].terms.strength.rounds == 60
    assert (after[0].genesis, after[0].predecessor) == (before.genesis, before.digest().hex())
    for bad in ("c_max=0.3", "rho=0.6", "loud=yes", "warmup_rounds=3", "alike=mark", "rule=paper"):
        group.run(*amend, str(tmp_path / "bad"), "--strength", bad, fails=QuorumarkError)
        assert not (tmp_path / "bad").exists()


def test_which_settings_may_change() -> None:
    before = make_manifest(make_layout()).terms
    for settings in ({"rho": "0.1"}, {"lr": "cosine:9"}, {"decay": "0.01"}, {"rule": "relative", "c": "0.02"}):
        terms = propose(before, strength=settings)
        assert terms.strength.as_dict().items() >= settings.items()
        assert changes(terms, before)
    assert propose(propose(before, strength={"rounds": "9"}), strength={"rounds": "0"}).strength == before.strength
    loud = replace(before, strength=before.strength.changed({"warmup_rounds": "2"}, before.coordinates))
    with pytest.raises(RecordError, match="warmup_rounds"):
        check_terms_follow(loud, before)
    assert len(PEOPLE) == 5


def test_what_the_mark_has_shown_counts_on_under_another_strength() -> None:
    """A stronger ρ* leaves room for a new mark, but less than a run has that begins anew; a weaker one leaves none."""
    layout = make_layout()
    models = random_walk(layout, 16, seed=2)
    settings = {**RHO, "rho": "0.1", "c_max": "0.2"}

    def after(rounds: int, marked: bool = True) -> MarkState:
        state = MarkState(Strength.of(settings, layout.coordinates), layout, "rademacher", models[0])
        for number in range(1, rounds + 1):
            amplitudes = state.amplitudes(number)
            state.advance(number, models[number], amplitudes if marked and amplitudes.marks else None)
        return state

    def c(state: MarkState, **other: str) -> float:
        strength = Strength.of({**settings, **other}, layout.coordinates)
        carried = MarkState.from_bytes(state.to_bytes(), strength, layout, "rademacher", state.model, state.anchor)
        assert carried.leak == state.leak
        return carried.amplitudes(state.round + 1).c / ONE

    spent, fresh = after(12), after(12, marked=False)
    assert 0 < spent.leak <= 1.01 * spent.leak_limit  # the next update is taken to be as large as the last
    assert fresh.leak == 0
    assert c(spent, rho="0.02") == 0 < c(fresh, rho="0.02")
    assert 0 < c(spent, rho="0.11", c_max="0.25") < c(fresh, rho="0.11", c_max="0.25")


def test_a_rate_that_falls_by_an_amendment_takes_the_mark_down_with_it() -> None:
    """The last update was trained with the old table's rate: the new table does not say what that was."""
    layout = make_layout()
    models = random_walk(layout, 8)
    state = MarkState(Strength.of(RHO, layout.coordinates), layout, "rademacher", models[0])
    for number in range(1, 5):
        state.advance(number, models[number], state.amplitudes(number))
    plain = state.amplitudes(5).vector.astype(float)
    state.strength = Strength.of({**RHO, "rule": "rho", "lr": "list:0.1"}, layout.coordinates)
    lower = state.amplitudes(5).vector.astype(float)
    assert 0 < lower.max() < 0.25 * plain.max()
