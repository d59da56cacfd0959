"""Policy and strength in terms: safe defaults, one spelling; what is misspelt or impossible cannot be signed."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from quorumark.checks import plain_decimal
from quorumark.cli import app
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Terms
from quorumark.consortium.strength import Strength
from quorumark.consortium.succession import check_terms_follow
from quorumark.errors import InputError, QuorumarkError, RecordError
from quorumark.files import write_shared
from quorumark.model.layout import write_safetensors
from quorumark.setup.amend import changes, propose
from tests.kit.ceremony import identities, make_terms
from tests.kit.oracle import spelled

PEOPLE = identities(5)
D = 5000
TERMS = make_terms(PEOPLE, 3, D)
DIGESTS = {"groups": "ab" * 32, "lora": "cd" * 32}

# every setting, with values that it may have, and values that it must not have
GOOD: dict[str, dict[str, list[str]]] = {
    "policy": {
        "z": ["6", "7", "6.5", "0.001"],
        "sums": ["checked", "unchecked"],
        "attempts": ["1", "40"],
        "packing": ["1", "2", "3", "4"],
        "budget": ["1", "100000"],
        "effective": ["1", "5000"],
        "blocks": ["rows/v1", "none"],
        **{name: [digest] for name, digest in DIGESTS.items()},
    },
    "strength": {
        "rule": ["rho"],
        "rho": ["0.1", "0.5"],
        "c_max": ["0.1", "0.001"],
        "alike": ["skip", "mark"],
        "dither": ["0", "3", "2.5"],
        "continuity": ["off", "4"],
        "warmup_rounds": ["0", "12"],
        "lr": ["constant", "cosine:50", "step:3=0.5,9=0.05", "list:1,0.9"],
        "below_threshold": ["refuse", "skip"],
    },
}
BAD: dict[str, dict[str, list[str]]] = {
    "policy": {
        "z": ["banana", "0", "0.0", "-6", "6e0", "inf", "nan", " 6", "6 ", "٦", "1" * 10, "0." + "1" * 19, "6,5", "+6"],
        "sums": ["yes", "Checked", "check", "none", " checked"],
        "attempts": ["0", "-1", "1.0", "many", "1e3", "1" * 19, "٣"],
        "budget": ["0", "-1", "1.5", "many"],
        "effective": ["0", "5001", "all"],
        "cohort": ["0", "2", "6", "many", "4.0"],
        "groups": ["abc", "AB" * 32, "ab" * 31, "none"],
        "lora": ["abc", "zz" * 32],
        "blocks": ["rows/v0", "rows", "None", "tensors"],
        "Z": ["6"],
        "threshold": ["6"],
        "sum": ["checked"],
    },
    "strength": {
        "rule": ["loud", "RHO", "target", "relative", "paper"],  # the last three lack what they need
        "rho": ["0", "0.6", "5e-2", "-0.1", "half", "0.05 "],
        "c_max": ["0", "0.3", "little"],
        "alike": ["maybe", "Skip"],
        "dither": ["-1", "17", "loud", "off"],
        "continuity": ["1", "1001", "on"],
        "warmup_rounds": ["-1", "1.0", "few", "01"],
        "lr": ["linear", "cosine:0", "cosine", "step:9=0.1,9=0.2", "list:", "list:1,.5", "constant:1"],
        "below_threshold": ["maybe"],
        "z": ["8"],  # of another rule
        "per": ["tensor"],
        "kappa": ["3"],
    },
}
BAD_PAIRS = [(part, name, value) for part, found in BAD.items() for name, values in found.items() for value in values]


def _json(terms: Terms) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(terms.to_bytes())
    return body


def _read(body: dict[str, Any]) -> Terms:
    return Terms.from_bytes(spelled(body))


# --- defaults ---------------------------------------------------------------------------------------------


def test_the_defaults_are_the_safe_ones() -> None:
    assert TERMS.policy == Policy() == Policy.of({})
    assert TERMS.policy.as_dict() == {
        "z": "6", "sums": "checked", "attempts": "20", "packing": "2", "blocks": "rows/v1"
    }  # fmt: skip
    assert TERMS.policy.checks_sums
    assert TERMS.strength == Strength.of({}, D)
    assert TERMS.strength.as_dict() == {
        "rule": "rho", "rho": "0.05", "c_max": "0.03", "alike": "skip", "dither": "3", "continuity": "off",
        "warmup_rounds": "0", "lr": "constant", "below_threshold": "refuse",
    }  # fmt: skip
    for rule in ({"rule": "target", "z": "5"}, {"rule": "relative", "c": "0.02"}, {"rho": "0.1"}):
        assert make_terms(PEOPLE, 3, D, strength=rule).strength.as_dict()["dither"] == "3"


def test_sums_are_checked_wherever_that_can_be() -> None:
    for settings in ({}, {"z": "7"}, {"attempts": "3"}, DIGESTS):
        assert make_terms(PEOPLE, 3, D, policy=settings).policy.sums == "checked"
    drawn = make_terms(PEOPLE, 3, D, policy={"cohort": "4"})
    assert (drawn.policy.sums, drawn.policy.cohort) == ("checked", 4)
    assert not make_terms(PEOPLE, 3, D, policy={"sums": "unchecked"}).policy.checks_sums


# --- what is misspelt or impossible cannot be made --------------------------------------------------------


@pytest.mark.parametrize(("part", "name", "value"), BAD_PAIRS)
def test_bad_settings_are_refused_from_python_and_from_bytes(part: str, name: str, value: str) -> None:
    with pytest.raises(RecordError, match=part):
        make_terms(PEOPLE, 3, D, **{part: {name: value}})
    body = _json(TERMS)
    if name == "cohort":
        body["policy"]["sums"] = "unchecked"
    body[part][name] = value
    with pytest.raises(RecordError):
        _read(body)


@given(st.data())
def test_any_other_name_or_value_is_refused(data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(["policy", "strength"]))
    known = {*GOOD[part], "cohort"}
    name = data.draw(st.text(min_size=1, max_size=12).filter(lambda text: text not in known))
    with pytest.raises(RecordError):
        make_terms(PEOPLE, 3, D, **{part: {name: data.draw(st.sampled_from(["6", "checked", "0.05", ""]))}})
    # a value that no setting has: nothing that is not a string, and no string beyond these letters
    key = data.draw(st.sampled_from(sorted(known - DIGESTS.keys())))
    value = data.draw(st.one_of(st.integers(), st.none(), st.lists(st.text()), st.text("xyz ,;=-_", max_size=9)))
    with pytest.raises(RecordError):
        make_terms(
            PEOPLE, 3, D, **{part: {key if key in GOOD[part] else "budget" if part == "policy" else "rho": value}}
        )


@given(st.data())
def test_one_changed_letter_is_refused_or_is_another_setting(data: st.DataObject) -> None:
    """From bytes: whatever is changed in a name is refused; in a value, it is refused or has another digest."""
    part = data.draw(st.sampled_from(["policy", "strength"]))
    body = _json(TERMS)
    name = data.draw(st.sampled_from(sorted(body[part])))
    at, letter = data.draw(st.integers(0, 30)), data.draw(st.sampled_from("azZ0159._-+ "))
    misspelt = name[: at % len(name)] + letter + name[at % len(name) + 1 :]
    if misspelt != name:
        renamed = {**body, part: {misspelt if key == name else key: text for key, text in body[part].items()}}
        with pytest.raises(RecordError):
            _read(renamed)
    value = body[part][name]
    other = value[: at % len(value)] + letter + value[at % len(value) + 1 :]
    try:
        read = _read({**body, part: {**body[part], name: other}})
    except RecordError:
        return
    assert (read.digest() == TERMS.digest()) == (other == value)


@pytest.mark.parametrize("part", ["policy", "strength"])
@pytest.mark.parametrize("value", [None, "rho", 6, ["z", "6"], [["z", "6"]], {"z": 6}, {1: "6"}, {"z": None}, b"z"])
def test_what_is_no_map_of_strings_is_refused(part: str, value: Any) -> None:
    with pytest.raises(RecordError, match=part):
        make_terms(PEOPLE, 3, D, **{part: value})


def test_typed_policies_are_checked_too() -> None:
    wrong: list[dict[str, Any]] = [
        {"z": 6}, {"z": "6"}, {"z": Decimal(0)}, {"z": Decimal("NaN")}, {"z": Decimal("Infinity")}, {"z": 6.5},
        {"attempts": None}, {"attempts": True}, {"attempts": "20"}, {"budget": 0}, {"cohort": "4"},
        {"groups": "ab"}, {"lora": b"ab"}, {"sums": None},
    ]  # fmt: skip
    for values in wrong:
        with pytest.raises(InputError):
            Policy(**values)
    with pytest.raises(RecordError, match="from 3 to 5"):
        replace(TERMS, policy=Policy(cohort=6))
    with pytest.raises(RecordError, match="from 4 to 5"):
        make_terms(PEOPLE, 4, D, policy=Policy(cohort=3))


def test_a_strength_is_that_of_its_terms() -> None:
    """ρ = z/√d: a strength that was made for another number of coordinates is read again for these."""
    strength = Strength.of({"rule": "target", "z": "5"}, 10**6)
    terms = make_terms(PEOPLE, 3, 10_000, strength=strength)
    assert terms.strength == Strength.of({"rule": "target", "z": "5"}, 10_000) != strength
    forged = make_terms(PEOPLE, 3, D, strength=replace(TERMS.strength, rho=1, dither=0))
    assert forged.strength == TERMS.strength
    with pytest.raises(RecordError, match="√d/2"):
        make_terms(PEOPLE, 3, 25, strength=strength)


# --- one policy, one spelling, one digest -----------------------------------------------------------------


@given(st.data())
def test_one_policy_has_one_digest(data: st.DataObject) -> None:
    """What is left out, written out, in another order or with needless zeros is the same terms, and is read back."""
    parts = {}
    for part, settings in GOOD.items():
        chosen = data.draw(st.lists(st.sampled_from(sorted(settings)), unique=True))
        parts[part] = {name: data.draw(st.sampled_from(settings[name])) for name in chosen}
    terms = make_terms(PEOPLE, 3, D, **parts)
    assert Terms.from_bytes(terms.to_bytes()) == terms
    assert make_terms(PEOPLE, 3, D, policy=terms.policy, strength=terms.strength).digest() == terms.digest()
    kept = ("attempts", "packing", "budget", "effective", "blocks", "warmup_rounds", *DIGESTS)
    zeros = {
        part: {name: _with_zeros(value) if name not in kept
               else value for name, value in reversed(getattr(terms, part).as_dict().items())}
        for part in GOOD
    }  # fmt: skip
    assert make_terms(PEOPLE, 3, D, **zeros).to_bytes() == terms.to_bytes()
    written = _json(terms)
    for part, respelt in zeros.items():
        if respelt != written[part]:
            with pytest.raises(RecordError, match="one spelling"):
                _read({**written, part: respelt})


def _with_zeros(text: str) -> str:
    number = text.replace(".", "", 1).isdecimal()
    return f"0{text}{'00' if '.' in text else '.0'}" if number else text


def test_what_was_signed_does_not_depend_on_a_readers_defaults() -> None:
    for part in ("policy", "strength"):
        body = _json(TERMS)
        for name in body[part]:
            shorter = {**body, part: {key: value for key, value in body[part].items() if key != name}}
            with pytest.raises(RecordError):
                _read(shorter)


def test_decimals_have_one_spelling() -> None:
    spelled = {"06.50": "6.5", "0.0": "0", "000": "0", "10": "10", "10.0": "10", "0.05": "0.05", "100.010": "100.01"}
    assert {text: plain_decimal(text) for text in spelled} == spelled
    assert Policy(z=Decimal("6.50")).as_dict()["z"] == "6.5"
    assert Policy(z=Decimal("1E+1")).as_dict()["z"] == "10"
    assert Policy(z=Decimal("1E-7")).as_dict()["z"] == "0.0000001"


# --- amendments -------------------------------------------------------------------------------------------


def test_an_amendment_changes_what_it_names_and_nothing_that_is_fixed() -> None:
    before = make_terms(PEOPLE, 3, D, policy={**DIGESTS, "budget": "50"})
    after = propose(before, policy={"z": "7", "attempts": "40"})
    assert after.policy == Policy(z=Decimal(7), attempts=40, budget=50, **DIGESTS)  # type: ignore[arg-type]
    assert changes(after, before) == ["policy attempts: 20 → 40", "policy z: 6 → 7"]
    for name in DIGESTS:
        others = {key: value for key, value in before.policy.as_dict().items() if key != name}
        for policy in (Policy.of(others), Policy.of({**others, name: "ef" * 32})):
            with pytest.raises(RecordError, match=f"a successor's {name} must not change"):
                check_terms_follow(replace(before, policy=policy), before)
        with pytest.raises(RecordError, match=f"a successor's {name} must not change"):
            propose(TERMS, policy={name: DIGESTS[name]})


@pytest.mark.parametrize(("name", "value"), [(name, value) for part, name, value in BAD_PAIRS if part == "policy"])
def test_an_amendment_with_bad_settings_is_refused(name: str, value: str) -> None:
    with pytest.raises(QuorumarkError):
        propose(TERMS, policy={name: value})
    with pytest.raises(RecordError, match="nobody signed anything of the rounds so far"):
        propose(TERMS, policy={"cohort": "4"})  # sums are checked until the members say that they are not
    drawn = propose(TERMS, policy={"cohort": "4", "sums": "unchecked"})
    assert drawn.policy.cohort == 4
    with pytest.raises(RecordError, match="nobody signed anything of the rounds so far"):
        propose(drawn, policy={"sums": "checked"})
    linked = replace(TERMS, policy=Policy(cohort=4, sums="checked"))
    assert propose(linked, policy={"cohort": "3"}).policy.has_links


# --- the command line -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def create(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`consortium create` without --out, for five members and a model of 5,000 weights."""
    folder = tmp_path_factory.mktemp("create")
    write_safetensors({"w": np.ones((50, 100), np.float32)}, folder / "model.safetensors")
    command = ["consortium", "create", "--without-alignment", "--name", "hospitals", "--threshold", "3"]
    for person in PEOPLE:
        write_shared(folder / f"{person.name}.json", person.card().to_bytes())
        command += ["--member", f"{folder / person.name}.json:100"]
    return [*command, "--model", str(folder / "model.safetensors")]


def test_the_command_line_has_the_defaults_of_terms(create: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*create, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    made = Terms.from_bytes((tmp_path / "terms.json").read_bytes())
    assert (made.policy, made.strength) == (TERMS.policy, TERMS.strength)


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, found in BAD.items() for name in found])
def test_bad_settings_are_refused_on_the_command_line(part: str, name: str, create: list[str], tmp_path: Path) -> None:
    for value in BAD[part][name][:2]:
        done = CliRunner().invoke(app, [*create, "--out", str(tmp_path), f"--{part}", f"{name}={value}"])
        assert isinstance(done.exception, QuorumarkError), done.output
        assert not (tmp_path / "terms.json").exists()
