"""The life of a share through the commands: refreshed, reshared, amended, audited, checked, and killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quorumark import field, shamir
from quorumark.canonical import canonical
from quorumark.cli import app
from quorumark.consortium.archive import Archive, key_place, leaf_count
from quorumark.consortium.home import ConsortiumFolder, HomeFolder
from quorumark.consortium.identity import verify_chain
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.merkle import root_from
from quorumark.consortium.records import Manifest
from quorumark.consortium.shares import ShareFile, ShareInfo, ShareWriter, share_root
from quorumark.errors import CeremonyError, KeystoreError, QuorumarkError, RecordError, ShareError
from quorumark.model.layout import write_safetensors
from quorumark.setup.amend import propose, successor
from quorumark.setup.check import CheckMember
from quorumark.setup.recover import _mask
from tests.kit.ceremony import NAMES
from tests.kit.ceremony_folder import Consortium
from tests.kit.evidence import consortium


def place(home: Path) -> ConsortiumFolder:
    return HomeFolder(home).only_consortium()


def unlock(home: Path) -> Unlock:
    return Unlock.key_file(home.with_suffix(".key"))


def together(group: Consortium, homes: list[Path], *command: str, rounds: int = 12) -> list[str]:
    """All run a command until all have finished."""
    for _ in range(rounds):
        outputs = [group.run(*command, *group.secrets(home)) for home in homes]
        if not any("waiting for" in output for output in outputs):
            return outputs
    raise AssertionError("the ceremony does not end")


def refresh(group: Consortium, name: str) -> None:
    together(group, group.homes, "share", "refresh", "--folder", str(group.base / name))


def newcomer(group: Consortium, index: int) -> Path:
    home = group.base / NAMES[index]
    group.run("member", "init", "--name", NAMES[index], *group.secrets(home))
    return home


def reshared(group: Consortium, name: str, *changes: str) -> Path:
    """New terms from Cedar, a member who stays in all these tests."""
    terms = group.base / f"{name}.json"
    group.run("consortium", "amend", "--out", str(terms), *changes, "--home", str(group.homes[2]))
    return terms


def audited_leaf(archives: dict[int, Path], homes: list[Path], index: int) -> np.ndarray[Any, Any]:
    """What an audit does: t members open one leaf's keys, and everybody's genesis values come out, checked."""
    manifest = place(homes[0]).manifest()
    opened = {}
    for point, path in archives.items():
        archive = Archive.read(path, manifest)
        assert archive.point == point
        where = key_place(manifest, point, index)
        parts = {}
        for home in homes[: manifest.terms.threshold]:
            share = place(home).share(unlock(home))
            parts[share.info.point] = share.vector()[where]
        opening = archive.open(index, shamir.reconstruct(parts, manifest.terms.threshold))
        terms = manifest.terms
        assert root_from(opening, terms.leaf, terms.coordinates).hex() == manifest.genesis.roots[point - 1]
        opened[point] = opening.values
    return field.to_signed(shamir.reconstruct(opened, 3))


def test_years_of_a_consortium(tmp_path: Path) -> None:
    """Three refreshes, one leaves and two come: the key is the same, old shares are worth nothing, audits still reach
    the genesis roots."""
    group = Consortium(tmp_path, size=400)  # 2,800 coordinates, three leaves
    group.finish()
    key, first = group.key(), group.manifests()[0]
    kept = place(group.homes[0]).share(unlock(group.homes[0])).vector()  # what a careless member might keep
    for name in ("one", "two", "three"):
        refresh(group, name)
    manifest = group.manifests()[0]
    assert (manifest.epoch, manifest.genesis) == (3, first.genesis)
    assert (manifest.genesis.whitening(0, 2800) == first.genesis.whitening(0, 2800)).all()
    for path in tmp_path.glob("handed-*"):
        path.unlink()
    group.base.joinpath("key-0-1-2.npy").unlink()
    assert (group.key() == key).all()
    # Birch leaves with its share, Hazel and Iris come, four are needed from now on
    birch = place(group.homes[1]).share(unlock(group.homes[1])).vector()
    hazel, iris = newcomer(group, 7), newcomer(group, 8)
    changes = ["--remove", "2", "--threshold", "4", "--add", f"{hazel}/member.json:70", "--add", f"{iris}/member.json"]
    terms = reshared(group, "later", *changes)
    homes = [group.homes[0], *group.homes[2:], hazel, iris]
    command = ["share", "reshare", "--terms", str(terms), "--folder", str(tmp_path / "reshare")]
    assert "give it with --from" in group.run(*command, *group.secrets(hazel), fails=QuorumarkError)
    told = ["--from", manifest.digest().hex()]
    assert "waiting for a member who holds a share (manifests)" in group.run(*command, *told, *group.secrets(hazel))
    assert "not a member" in group.run(*command, *group.secrets(group.homes[1]), fails=QuorumarkError)
    said = group.run(*command, *group.secrets(group.homes[0]))
    assert "threshold 3 → 4" in said
    assert "the keys of Birch no longer count" in said
    wrong = ["--from", first.digest().hex()]
    assert "begun from the manifest" in group.run(*command, *wrong, *group.secrets(hazel), fails=QuorumarkError)
    for _ in range(14):
        outputs = [group.run(*command, *group.secrets(home)) for home in homes[:4]]
        outputs += [group.run(*command, *told, *group.secrets(home)) for home in (hazel, iris)]
        if not any("waiting for" in output for output in outputs):
            break
    assert all("epoch 4" in output for output in outputs)
    chains = [place(home).chain() for home in homes]
    assert {tuple(m.digest() for m in chain) for chain in chains} == {tuple(m.digest() for m in chains[0])}
    verify_chain(chains[0])
    assert len(chains[0]) == 5
    shown = group.run("consortium", "check", str(place(iris).manifest_path))
    assert "4 steps after the first one" in shown
    assert first.digest().hex() in shown
    later = Consortium.__new__(Consortium)
    later.base, later.homes, later.folder, later.terms = tmp_path / "later", homes, group.folder, terms
    later.base.mkdir()
    assert (later.key((0, 1, 2, 3)) == key).all()
    assert (later.key((5, 4, 3, 2)) == key).all()
    # nothing old is left, except the archive of those who were there at first
    for home in homes:
        names = {p.name for p in place(home).path.iterdir()}
        always = {".lock", "terms.json", "manifest.json", "history", "rounds", "share-4.sealed", "signed.json"}
        first_ones = {"archive.bin", "layout.json", "anchor.safetensors"}
        assert names == always | (set() if home in (hazel, iris) else first_ones)
        assert place(home).memory_path.exists()
    # Birch's last share, or a genesis share that somebody kept, adds nothing to three new ones
    new = {x: place(homes[x - 1]).share(unlock(homes[x - 1])).vector()[:2800] for x in (1, 2, 3)}
    for extra in (birch[:2800], kept):
        for point in (4, 5, 6, 9):
            guess = field.to_signed(shamir.reconstruct({**new, point: extra}, 4))
            assert not (guess == key).any()
    # the audit: every leaf of the genesis shares of all who stayed, by four of the members of today
    archives = {1: homes[0], 3: homes[1], 4: homes[2], 5: homes[3]}
    paths = {point: place(home).archive_path for point, home in archives.items()}
    for index in range(leaf_count(2800, 1024)):
        values = audited_leaf(paths, [iris, hazel, homes[0], homes[2]], index)
        assert (values == key[index * 1024 : (index + 1) * 1024]).all()
    # the archive alone, and fewer than four members with it, show nothing
    manifest = chains[0][-1]
    archive = Archive.read(paths[1], manifest)
    where = key_place(manifest, 1, 0)
    parts = {x: place(homes[x - 1]).share(unlock(homes[x - 1])).vector()[where] for x in (1, 2, 3)}
    with pytest.raises(KeystoreError, match="wrong key or damaged"):
        archive.open(0, shamir.reconstruct(parts, 3))
    # and a health check of what lies on the disks
    outputs = together(group, homes, "setup", "check", "--folder", str(tmp_path / "health"))
    assert all("lie on one polynomial of degree 3" in output for output in outputs)


def test_archives_are_checked(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    refresh(group, "one")
    manifest = group.manifests()[0]
    path = place(group.homes[0]).archive_path
    assert path.stat().st_mode & 0o777 == 0o600
    whole = path.read_bytes()
    for at in (5, 4 + int.from_bytes(whole[:4], "big") + 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(RecordError):
            Archive.read(path, manifest)
    path.write_bytes(whole[:40])
    with pytest.raises(RecordError):
        Archive.read(path, manifest)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    key = shamir.reconstruct(
        {
            i + 1: place(home).share(unlock(home)).vector()[key_place(manifest, 1, 0)]
            for i, home in enumerate(group.homes[:2])
        },
        2,
    )
    with pytest.raises(KeystoreError, match="damaged"):
        Archive.read(path, manifest).open(0, key)
    with pytest.raises(RecordError, match="leaves 0 to 0"):
        key_place(manifest, 1, 1)
    with pytest.raises(RecordError, match="not archived"):
        key_place(manifest, 4, 0)


def test_a_refreshed_share_can_be_recovered_and_restored_backups_catch_up(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    group.finish()
    key = group.key()
    cedar = group.homes[2]
    group.run("member", "backup", str(tmp_path / "old.tar"), "--home", str(cedar))
    refresh(group, "one")
    # Cedar's disk dies; its backup is from before the refresh
    later = place(group.homes[0])
    restored = tmp_path / "Cedar restored"
    restored.with_suffix(".key").write_bytes(cedar.with_suffix(".key").read_bytes())
    restored.with_suffix(".key").chmod(0o600)
    group.run("member", "restore", str(tmp_path / "old.tar"), "--home", str(restored))
    group.homes[2] = restored
    update = ["consortium", "update", "--manifest", str(later.manifest_path), "--home", str(restored)]
    assert "share must be recovered" in group.run(*update)
    folder = str(tmp_path / "recovery")
    recover = ["share", "recover", "--folder", folder, *group.secrets(restored)]
    group.run(*recover, "--helpers", "1,2,5")
    for i in (0, 1, 4, 0, 1):
        group.run("share", "help", "--folder", folder, *group.secrets(group.homes[i]))
    assert "recovered" in group.run(*recover)
    assert not (place(restored).path / "share-0.sealed").exists()
    for path in tmp_path.glob("handed-*"):
        path.unlink()
    assert (group.key((0, 2, 4)) == key).all()
    # a manifest of somebody else's chain is refused
    other = Consortium(tmp_path / "other", count=3, threshold=2)
    other.finish()
    foreign = ["consortium", "update", "--manifest", str(place(other.homes[0]).manifest_path), "--home", str(restored)]
    assert "not a member" in group.run(*foreign, fails=QuorumarkError)


def test_old_and_new_files_do_not_mix(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    group.finish()
    birch = group.homes[1]
    old = place(birch).share_path().read_bytes()
    handed = tmp_path / "handed-early"
    group.run(
        "share", "hand-over", "--to", f"{group.homes[0]}/member.json", "--out", str(handed),
        "--i-understand-this-hands-over-my-share", *group.secrets(birch),
    )  # fmt: skip
    refresh(group, "one")
    place(birch).share_path().write_bytes(old)
    assert "belongs to another consortium or epoch" in group.run(
        "share", "verify", *group.secrets(birch), fails=QuorumarkError
    )
    said = group.run(
        "key", "reconstruct", "--share", str(handed), "--out", str(tmp_path / "k"),
        "--i-understand-this-reveals-the-key", *group.secrets(group.homes[0]), fails=ShareError,
    )  # fmt: skip
    assert "'Birch' belongs to another consortium or epoch" in said


# --- amendments -------------------------------------------------------------------------------------------


def test_new_numbers_of_examples(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    group.finish()
    before = group.manifests()[0]
    terms = reshared(group, "more", "--examples", "2=250", "--policy", "z=7")
    sign = ["consortium", "sign", "--terms", str(terms), "--folder", str(tmp_path / "signatures")]
    said = group.run(*sign, *group.secrets(group.homes[0]))
    assert "Birch: examples 101 → 250" in said
    assert "waiting for Birch, Cedar, Delta, Elm" in said
    assert group.manifests()[0].digest() == before.digest()  # nothing is in force before all have signed
    outputs = together(group, group.homes, *sign)
    assert all("in force" in output for output in outputs)
    after = group.manifests()
    assert len({m.to_bytes() for m in after}) == 1
    assert after[0].terms.member(2).examples == 250
    assert after[0].terms.policy.z == 7
    assert (after[0].predecessor, after[0].roots, after[0].genesis) == (
        before.digest().hex(),
        before.roots,
        before.genesis,
    )
    for home in group.homes:
        group.run("share", "verify", *group.secrets(home))
    # a forged signature is named
    terms = reshared(group, "most", "--examples", "2=300")
    folder = tmp_path / "forged"
    sign = ["consortium", "sign", "--terms", str(terms), "--folder", str(folder)]
    group.run(*sign, *group.secrets(group.homes[0]))
    (folder / "signature-2.hex").write_text((folder / "signature-1.hex").read_text())
    assert "signature of Birch does not hold" in group.run(*sign, *group.secrets(group.homes[0]), fails=QuorumarkError)
    group.run(*sign, *group.secrets(group.homes[1]))
    together(group, group.homes, *sign)
    # shares stay usable: a refresh after amendments
    refresh(group, "after")
    assert [m.epoch for m in place(group.homes[0]).chain()] == [0, 0, 0, 1]
    for options, text in [
        ((), "must change something"),
        (("--examples", "x=3"), "POINT=VALUE"),
        (("--examples", "2=many"), "POINT=NUMBER"),
        (("--remove", "9"), "no member at point 9"),
        (("--threshold", "9"), "must not exceed"),
        (("--examples", "2=9000"), "'Birch' is the largest"),
    ]:
        said = group.run(
            "consortium", "amend", "--out", str(tmp_path / "bad"), *options, "--home", str(group.homes[0]),
            fails=QuorumarkError,
        )  # fmt: skip
        assert text in said
        assert not (tmp_path / "bad").exists()


def test_a_stolen_identity_is_replaced_by_the_others(tmp_path: Path) -> None:
    """Elm's keys and share were stolen: an amendment gives Elm new keys, a recovery its share, a refresh makes the
    stolen one worthless; the thief, with everything that Elm had, gets in nowhere."""
    group = Consortium(tmp_path)
    group.finish()
    key, thief = group.key(), group.homes[4]
    stolen = place(thief).share(unlock(thief)).vector()
    elm = newcomer(group, 5)
    terms = reshared(group, "replaced", "--replace", f"5={elm}/member.json")
    sign = ["consortium", "sign", "--terms", str(terms), "--folder", str(tmp_path / "signatures")]
    homes = [*group.homes[:4], elm]
    told = ["--from", group.manifests()[0].digest().hex()]
    assert "give it with --from" in group.run(*sign, *group.secrets(elm), fails=QuorumarkError)
    for home in homes[:4]:
        group.run(*sign, *group.secrets(home))
    assert "share recover" in group.run(*sign, *told, *group.secrets(elm))
    assert all("in force" in group.run(*sign, *group.secrets(home)) for home in homes)
    said = group.run(*sign, *group.secrets(thief), fails=QuorumarkError)
    assert "not a member" in said or "--from" in said
    folder = str(tmp_path / "recovery")
    group.run("share", "recover", "--folder", folder, *group.secrets(elm), "--helpers", "1,2,3")
    # the thief asks too, with the old keys: nobody answers
    (tmp_path / "thief").mkdir()
    group.run("share", "inspect", "--home", str(thief))
    place(thief).share_path().unlink()
    group.run("share", "recover", "--folder", str(tmp_path / "thief"), *group.secrets(thief), "--helpers", "1,2,3")
    said = group.run(
        "share", "help", "--folder", str(tmp_path / "thief"), *group.secrets(homes[0]), fails=QuorumarkError
    )
    assert "belongs elsewhere" in said
    for home in [*homes[:3], *homes[:2]]:
        group.run("share", "help", "--folder", folder, *group.secrets(home))
    assert "recovered" in group.run("share", "recover", "--folder", folder, *group.secrets(elm))
    assert not place(elm).memory_path.exists()  # what Elm answered under its old keys it does not know
    together(group, homes, "share", "refresh", "--folder", str(tmp_path / "one"))
    group.homes = homes
    for path in tmp_path.glob("handed-*"):
        path.unlink()
    assert (group.key((0, 1, 4)) == key).all()
    mixed = {x: place(homes[x - 1]).share(unlock(homes[x - 1])).vector()[:280] for x in (1, 2)}
    assert not (field.to_signed(shamir.reconstruct({**mixed, 5: stolen}, 3)) == key).any()


def test_nobody_signs_two_successors_of_one_manifest(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    one, two = reshared(group, "one", "--examples", "1=150"), reshared(group, "two", "--examples", "1=160")
    sign = ["consortium", "sign", "--folder", str(tmp_path / "signatures"), *group.secrets(group.homes[0])]
    group.run(*sign, "--terms", str(one))
    assert "signed another successor" in group.run(*sign, "--terms", str(two), fails=QuorumarkError)
    # nor a resharing after an amendment that is not in force; nor is what was signed lost with a backup
    steps = ["share", "refresh", "--folder", str(tmp_path / "refresh")]
    for _ in range(9):
        for home in group.homes[1:]:
            group.run(*steps, *group.secrets(home))
        result = CliRunner().invoke(app, [*steps, "--no-wait", *group.secrets(group.homes[0])])
        if result.exit_code:
            break
    assert "bring it into force first" in str(result.exception)
    group.run("member", "backup", str(tmp_path / "b.tar"), "--home", str(group.homes[0]))
    restored = tmp_path / "restored"
    group.run("member", "restore", str(tmp_path / "b.tar"), "--home", str(restored))
    assert place(restored).has_signed(group.manifests()[0].digest().hex())
    # what cannot come into force any more can be forgotten, said loudly
    discard = ["setup", "discard", "--home", str(group.homes[0])]
    assert "there is no running ceremony" in group.run(*discard)
    group.run(*discard, "--although-signed")
    assert not place(group.homes[0]).has_signed(group.manifests()[0].digest().hex())


def test_a_ceremony_under_way_is_not_lost_to_other_commands(tmp_path: Path) -> None:
    """Neither setup, nor an update, nor a file in the folder makes a member forget a refresh that it is in."""
    group = Consortium(tmp_path)
    group.finish()
    key = group.key()
    folder = tmp_path / "refresh"
    steps = ["share", "refresh", "--folder", str(folder)]
    # all have signed; the first has gone on, the others not yet
    for home in [home for _ in range(9) for home in group.homes]:
        group.run(*steps, *group.secrets(home))
        if place(home).manifest().epoch == 1:
            break
    late = [home for home in group.homes if place(home).manifest().epoch == 0]
    assert late
    assert all((place(home).path / "share-0.sealed").exists() for home in group.homes)  # nobody erased anything yet
    cedar = late[-1]
    assert place(cedar).ceremony_path.exists()
    group.run("setup", "dkg", "--terms", str(group.terms), "--folder", str(group.folder), *group.secrets(cedar))
    assert place(cedar).ceremony_path.exists()
    update = ["consortium", "update", "--manifest", str(place(home).manifest_path), "--home", str(cedar)]
    assert "under way" in group.run(*update, fails=QuorumarkError)
    assert "has signed already" in group.run("setup", "discard", "--home", str(cedar), fails=QuorumarkError)
    current = (folder / "chain" / "current").read_text()
    (folder / "chain" / "current").write_text("ab" * 32)
    CliRunner().invoke(app, [*steps, "--no-wait", *group.secrets(cedar)])
    assert place(cedar).ceremony_path.exists() or place(cedar).manifest().epoch == 1
    (folder / "chain" / "current").write_text(current)
    together(group, group.homes, *steps)
    for path in tmp_path.glob("handed-*"):
        path.unlink()
    (tmp_path / "key-0-1-2.npy").unlink()
    assert (group.key() == key).all()
    for home in group.homes:
        assert [p.name for p in place(home).path.glob("share-*")] == ["share-1.sealed"]
        assert not place(home).ceremony_path.exists()


def test_commitments_are_fixed_before_anything_is_revealed(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    for index in (0, 1, 2, 0):
        group.step(index)
    assert (group.folder / "2-reveal" / "1.msg").exists()
    # Cedar has seen Avon's reveal, and now wants another nonce
    place(group.homes[2]).ceremony_path.unlink()
    for step in ("1-commit", "2-reveal"):
        (group.folder / step / "3.msg").unlink(missing_ok=True)
    group.step(2)
    arguments = ["setup", "dkg", "--terms", str(group.terms), "--folder", str(group.folder)]
    said = group.run(*arguments, *group.secrets(group.homes[0]), fails=QuorumarkError)
    assert "'Cedar' says something else for step 'dkg/commit'" in said


def test_a_member_comes_back(tmp_path: Path) -> None:
    """It may have taken part in rounds before it left: a memory that it lost is not made as if it were new."""
    group = Consortium(tmp_path)
    group.finish()
    key, elm = group.key(), group.homes[4]
    place(elm).memory_path.unlink()
    terms = reshared(group, "without", "--remove", "5")
    leave = ["share", "reshare", "--terms", str(terms), "--folder", str(tmp_path / "leave")]
    together(group, group.homes[:4], *leave)
    now = place(group.homes[0]).manifest()
    terms = reshared(group, "again", "--add", f"{elm}/member.json")
    back = ["share", "reshare", "--terms", str(terms), "--folder", str(tmp_path / "back")]
    told = ["--from", now.digest().hex()]
    for _ in range(14):
        outputs = [group.run(*back, *group.secrets(home)) for home in group.homes[:4]]
        outputs.append(group.run(*back, *told, *group.secrets(elm)))
        if not any("waiting for" in output for output in outputs):
            break
    assert place(elm).manifest().epoch == 2
    assert not place(elm).memory_path.exists()
    assert len(place(elm).chain()) == 3
    for path in tmp_path.glob("handed-*"):
        path.unlink()
    assert (group.key((4, 0, 1)) == key).all()


def test_two_consortia_of_one_model_do_not_mix(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    hazel = newcomer(group, 7)
    # Hazel is in a pilot with the same public model
    cards = [item for home in (hazel, *group.homes[1:]) for item in ("--member", f"{home}/member.json")]
    group.run(
        "consortium", "create", "--without-alignment", "--name", "pilot", "--threshold", "2", *cards,
        "--model", str(tmp_path / "model.safetensors"), "--out", str(tmp_path / "pilot"),
    )  # fmt: skip
    pilot = [
        "setup",
        "dkg",
        "--terms",
        str(tmp_path / "pilot/terms.json"),
        "--folder",
        str(tmp_path / "pilot-exchange"),
    ]
    together(group, [hazel, *group.homes[1:]], *pilot)
    terms = tmp_path / "later.json"
    add = ["--add", f"{hazel}/member.json", "--out", str(terms), "--home", str(group.homes[0])]
    group.run("consortium", "amend", *add)
    told = ["--from", place(group.homes[0]).manifest().digest().hex()]
    command = ["share", "reshare", "--terms", str(terms), "--folder", str(tmp_path / "reshare")]
    assert "--from" in group.run(*command, *group.secrets(hazel), fails=QuorumarkError)
    assert not (tmp_path / "reshare").exists()  # and nothing of the pilot was written there
    for _ in range(14):
        outputs = [group.run(*command, *group.secrets(home)) for home in group.homes]
        outputs.append(group.run(*command, *told, *group.secrets(hazel)))
        if not any("waiting for" in output for output in outputs):
            break
    assert len(HomeFolder(hazel).consortia()) == 2
    assert "finished" in outputs[-1]


def test_forged_histories_are_refused(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    refresh(group, "one")
    where = place(group.homes[0])
    (old,) = (where.path / "history").iterdir()
    good = old.read_bytes()
    forged = Manifest.from_bytes(good)
    old.write_bytes(forged.with_signature(2, bytes(64)).to_bytes())
    check = ["consortium", "check", str(where.manifest_path)]
    assert "signature of Birch does not hold" in group.run(*check, fails=QuorumarkError)
    assert "signature of Birch" in group.run("share", "verify", *group.secrets(group.homes[0]), fails=QuorumarkError)
    old.write_bytes(where.manifest_path.read_bytes())
    assert "not the manifest that its successor names" in group.run(*check, fails=QuorumarkError)
    old.unlink()
    assert "no such file" in group.run(*check, fails=QuorumarkError)
    old.write_bytes(good)
    group.run(*check)


def test_a_wrong_share_never_enters_a_ceremony(tmp_path: Path) -> None:
    """A share that is not what its root commits to, or another member's, is refused before anything is said."""
    group = dealt(tmp_path, count=5)
    home = group.homes[3]
    good = place(home).share_path().read_bytes()
    share = place(home).share(unlock(home))
    values = share.vector()
    values[5] = (int(values[5]) + 1) % field.P
    with ShareWriter(
        place(home).share_path(), unlock(home), _dense(share.info), share.salt, share.others_salts
    ) as file:
        file.write(values)
    for command in (["setup", "check"], ["share", "refresh"]):
        arguments = [*command, "--folder", str(tmp_path / command[1]), *group.secrets(home)]
        assert "is not the share that the manifest's root commits to" in group.run(*arguments, fails=QuorumarkError)
        assert not list((tmp_path / command[1]).rglob("*.msg"))
    other = place(group.homes[0]).share(unlock(group.homes[0]))
    other.copy_to(place(home).share_path(), unlock(home))
    assert "the share of another member" in group.run("share", "verify", *group.secrets(home), fails=QuorumarkError)
    place(home).share_path().write_bytes(good)
    group.run("share", "verify", *group.secrets(home))


def test_a_check_opens_nothing(tmp_path: Path) -> None:
    """Without masks Σ ρ_j·τ_j would be open."""
    group = dealt(tmp_path)
    manifest = group.manifests()[0]
    members = []
    for home in group.homes:
        identity = HomeFolder(home).identity(unlock(home))
        members.append(CheckMember(identity, manifest, place(home).share(unlock(home)), os.urandom(32)))
    commits = {m.point: m.commit() for m in members}
    reveals = {m.point: m.reveal(commits) for m in members}
    deals = {m.point: m.deal(reveals) for m in members}
    for m in members:
        m.echo({x: deals[x][m.point] for x in deals if x != m.point})
    seen = members[0]._seen_roots
    for i, label in enumerate(("degree", "square")):
        bare = {m.point: m._combined(seen, label, m._share.pieces(), squares=bool(i))[0] for m in members}
        answers = {m.point: int(m._answer[i]) for m in members}
        masks = {x: (answers[x] - bare[x]) % field.P for x in bare}
        assert len(set(masks.values())) == 5
        assert 0 not in masks.values()
        value = shamir.decode(answers, 5 if i else 3).value
        assert (value == shamir.decode(bare, 5 if i else 3).value) == bool(i)  # squares open to what is public anyway


def test_leaf_keys_belong_to_one_leaf() -> None:
    """The same elements are another key for another leaf and another archive."""
    from quorumark.consortium.archive import _cipher

    key = np.array([1, 2, 3], np.uint64)
    made = {
        _cipher(key, header, index).encrypt(bytes(12), b"x" * 32, None) for header in (b"a", b"b") for index in (0, 1)
    }
    assert len(made) == 4


def until_adopted(group: Consortium, steps: list[str]) -> Path:
    """Runs a refresh until the first member has the new manifest in force; who that is."""
    for home in [home for _ in range(9) for home in group.homes]:
        group.run(*steps, *group.secrets(home))
        if place(home).manifest().epoch == 1:
            return home
    raise AssertionError("it does not end")


def shares_of(home: Path) -> list[str]:
    return sorted(p.name for p in place(home).path.glob("share-*"))


def test_nothing_is_erased_before_all_have_kept_their_shares(tmp_path: Path) -> None:
    """Discarding and verifying at the wrong moment must not leave fewer than t shares of either epoch."""
    group = dealt(tmp_path, count=3, threshold=3)
    steps = ["share", "refresh", "--folder", str(tmp_path / "refresh")]
    first = until_adopted(group, steps)
    assert "has signed already" in group.run("setup", "discard", "--home", str(first), fails=QuorumarkError)
    group.run("setup", "discard", "--although-signed", "--home", str(first))
    group.run("share", "verify", *group.secrets(first))
    assert shares_of(first) == ["share-0.sealed", "share-1.sealed"]
    other = next(home for home in group.homes if home != first)
    group.run("setup", "discard", "--although-signed", "--home", str(other))
    group.run("share", "verify", *group.secrets(other))
    assert shares_of(other) == ["share-0.sealed", "share-1.sealed"]  # what it signed for is still there
    # it can be brought into force after all: by the manifest of one who has it
    group.run("consortium", "update", "--manifest", str(place(first).manifest_path), "--home", str(other))
    together(group, group.homes, *steps)
    assert all(shares_of(home) == ["share-1.sealed"] for home in group.homes)


def test_the_last_step_can_be_said_again(tmp_path: Path) -> None:
    """A lost or damaged message, a discarded state, another folder: nobody waits for ever."""
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    folder = tmp_path / "refresh"
    steps = ["share", "refresh", "--folder", str(folder)]
    first = until_adopted(group, steps)
    # its own message is damaged
    mine = folder / "9-kept" / f"{group.homes.index(first) + 1}.msg"
    mine.write_bytes(b"rubbish")
    group.run(*steps, *group.secrets(first))
    assert mine.read_bytes() != b"rubbish"
    # it forgets its state, and still can say it
    group.run("setup", "discard", "--although-signed", "--home", str(first))
    mine.unlink()
    group.run(*steps, *group.secrets(first))
    assert mine.exists()
    # the state holds no secret of the ceremony any more
    together(group, group.homes, *steps)
    mine.unlink()
    assert "finished" in group.run(*steps, *group.secrets(first))
    assert mine.exists()
    assert place(first).manifest().epoch == 1
    # a new refresh in a new folder is a new one
    refresh(group, "second")
    assert place(first).manifest().epoch == 2


def test_an_unfinished_resharing_does_not_spoil_the_next_folder(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    one, two = (["share", "refresh", "--folder", str(tmp_path / name)] for name in ("one", "two"))
    until_adopted(group, one)
    for _ in range(3):
        for home in group.homes[:2]:
            group.run(*one, *group.secrets(home))
    for home in group.homes:
        group.run(*one, *group.secrets(home))
    done = [home for home in group.homes if not place(home).ceremony_path.exists()]
    left = [home for home in group.homes if place(home).ceremony_path.exists()]
    assert left
    group.run(*two, *group.secrets(done[0]))  # begins the next one
    said = group.run(*two, *group.secrets(left[0]), fails=QuorumarkError)
    assert "not finished here: run it with its own folder" in said
    assert not (tmp_path / "two" / "9-kept").exists()
    together(group, group.homes, *one)
    together(group, group.homes, *two)
    assert {place(home).manifest().epoch for home in group.homes} == {2}


def test_an_unfinished_refresh_is_not_taken_for_the_resharing_that_follows(tmp_path: Path) -> None:
    """Who has not said the last word of a refresh, and goes on to other terms in a new folder, is told so there."""
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    behind = until_adopted(group, ["share", "refresh", "--folder", str(tmp_path / "refresh")])
    terms = tmp_path / "later.json"
    group.run("consortium", "amend", "--threshold", "3", "--out", str(terms), "--home", str(behind))
    next_one = ["share", "reshare", "--terms", str(terms), "--folder", str(tmp_path / "reshare")]
    assert "run it with its own folder" in group.run(*next_one, *group.secrets(behind), fails=CeremonyError)
    assert not (tmp_path / "reshare").exists()
    refresh(group, "refresh")
    # its folder is no place for the next ceremony, and to say so again is not to refresh again
    wrong = ["share", "reshare", "--terms", str(terms), "--folder", str(tmp_path / "refresh")]
    assert "use a new, empty one" in group.run(*wrong, *group.secrets(behind), fails=CeremonyError)
    again = group.run("share", "refresh", "--folder", str(tmp_path / "refresh"), *group.secrets(behind))
    assert "epoch 1 was reached in this folder before: newer shares take a new folder" in again
    together(group, group.homes, *next_one)
    assert {place(home).manifest().epoch for home in group.homes} == {2}


def test_a_newcomer_who_signed_and_gave_up_can_try_again(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    hazel = newcomer(group, 7)
    homes = [*group.homes, hazel]
    terms = reshared(group, "later", "--add", f"{hazel}/member.json")
    told = ["--from", group.manifests()[0].digest().hex()]

    def step(folder: str, home: Path) -> str:
        command = ["share", "reshare", "--terms", str(terms), "--folder", str(tmp_path / folder)]
        return group.run(*command, *(told if home == hazel else []), *group.secrets(home))

    for _ in range(12):
        if (tmp_path / "first" / "8-sign" / "4.msg").exists():
            break
        for home in homes[1:] if (tmp_path / "first" / "7-health" / "1.msg").exists() else homes:
            step("first", home)
    discard = ["setup", "discard", "--home", str(hazel)]
    assert "has signed already" in group.run(*discard, fails=QuorumarkError)
    group.run(*discard, "--although-signed")
    for home in group.homes:
        result = CliRunner().invoke(app, ["setup", "discard", "--although-signed", "--home", str(home)])
        assert result.exit_code == 0
    for _ in range(14):
        outputs = [step("second", home) for home in homes]
        if not any("waiting for" in output for output in outputs):
            break
    assert {place(home).manifest().epoch for home in homes} == {1}


def test_discarding_a_check_forgets_no_signature(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    one, two = reshared(group, "one", "--examples", "1=150"), reshared(group, "two", "--examples", "1=160")
    sign = ["consortium", "sign", "--folder", str(tmp_path / "signatures"), *group.secrets(group.homes[0])]
    group.run(*sign, "--terms", str(one))
    group.run("setup", "check", "--folder", str(tmp_path / "check"), *group.secrets(group.homes[0]))
    group.run("setup", "discard", "--home", str(group.homes[0]))
    assert "signed another successor" in group.run(*sign, "--terms", str(two), fails=QuorumarkError)
    refreshing = ["share", "refresh", "--folder", str(tmp_path / "refresh"), *group.secrets(group.homes[0])]
    assert "bring it into force first" in group.run(*refreshing, fails=QuorumarkError)


def test_two_recoveries_at_once(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    group.finish()
    key = group.key()
    lost = group.homes[3:]
    for home in lost:
        place(home).share_path().unlink()
        folder = str(tmp_path / f"for-{home.name}")
        group.run("share", "recover", "--folder", folder, *group.secrets(home), "--helpers", "1,2,3")
    for _ in range(3):
        for helper in group.homes[:3]:
            for home in lost:
                group.run("share", "help", "--folder", str(tmp_path / f"for-{home.name}"), *group.secrets(helper))
    for home in lost:
        folder = str(tmp_path / f"for-{home.name}")
        assert "recovered" in group.run("share", "recover", "--folder", folder, *group.secrets(home))
    for path in tmp_path.glob("handed-*"):
        path.unlink()
    assert (group.key((3, 4, 0)) == key).all()
    # a second request needs another folder, and an answer to another request is not taken for one
    place(lost[0]).share_path().unlink()
    again = ["share", "recover", *group.secrets(lost[0]), "--helpers", "1,2,3", "--folder"]
    used = tmp_path / f"for-{lost[0].name}"
    assert "use a new, empty folder" in group.run(*again, str(used), fails=QuorumarkError)
    group.run(*again, str(tmp_path / "new"))
    (tmp_path / "new" / "answer-1.msg").write_bytes((used / "answer-1.msg").read_bytes())
    help_again = ["share", "help", "--folder", str(tmp_path / "new"), *group.secrets(group.homes[0])]
    assert "belongs elsewhere" in group.run(*help_again, fails=QuorumarkError)


def test_masks_of_a_recovery_hang_on_everything_that_they_must() -> None:
    """With one mask in two answers of a helper, their difference would be a multiple of its share."""
    _, manifest = consortium(5, 3)
    _, other = consortium(5, 2)
    right: dict[str, Any] = {"manifest": manifest, "secret": bytes(64), "own": 1, "other": 2, "point": 4}
    right["request"] = b"of Delta"
    changes: list[dict[str, Any]] = [{}, {"manifest": other}, {"secret": bytes(63) + b"1"}, {"own": 3}, {"other": 3}]
    changes += [{"point": 5}, {"request": b"of Delta, once more"}]
    made = {bytes(_mask(**{**right, **change}).elements(4)) for change in changes}
    assert len(made) == len(changes)
    assert bytes(_mask(**{**right, "own": 2, "other": 1}).elements(4)) in made  # both helpers have the same


def test_nobody_is_taken_back_to_an_older_manifest(tmp_path: Path) -> None:
    """A quorum of the first manifest signs an amendment of it, long after others follow: who holds those refuses."""
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    first = group.manifests()[0]
    refresh(group, "one")
    where = place(group.homes[0])
    amended = successor(first, propose(first.terms, examples={1: 7}))
    for x, home in enumerate(group.homes, 1):
        identity = HomeFolder(home).identity(unlock(home))
        amended = amended.with_signature(x, identity.sign("manifest", amended.sign_bytes()))
    with pytest.raises(RecordError, match="do not follow the one that this member holds"):
        where.adopt([first, amended])
    assert where.manifest().epoch == 1


# --- health -----------------------------------------------------------------------------------------------


def rewrite(home: Path, group: Consortium, change: Any) -> None:
    """Another share in a member's home, with a manifest that all sign for it: what a faulty setup would have left."""
    where = place(home)
    share = where.share(unlock(home))
    values, salt, others, info = share.vector(), share.salt, share.others_salts, share.info
    change(values)
    with ShareWriter(where.share_path(), unlock(home), _dense(info), salt, others) as file:
        file.write(values)
    root = share_root([values], salt, info.leaf, info.length).hex()
    _sign_with_roots(group, {info.point: root})


def _dense(info: ShareInfo) -> ShareInfo:
    return ShareInfo(**{**info.__dict__, "block": 0})


def _sign_with_roots(group: Consortium, changed: dict[int, str]) -> None:
    from dataclasses import replace

    old = Manifest.from_bytes(place(group.homes[0]).manifest_path.read_bytes())
    roots = tuple(changed.get(i + 1, root) for i, root in enumerate(old.roots))
    manifest = replace(old, roots=roots, genesis=replace(old.genesis, roots=roots), signatures={})
    for i, home in enumerate(group.homes, 1):
        identity = HomeFolder(home).identity(unlock(home))
        manifest = manifest.with_signature(i, identity.sign("manifest", manifest.sign_bytes()))
    for home in group.homes:
        place(home).manifest_path.write_bytes(manifest.to_bytes())


def dealt(base: Path, **options: Any) -> Consortium:
    group = Consortium(base, setup="dealer", **options)
    group.run("setup", "dealer", "--terms", str(group.terms), "--folder", str(base / "dealt"))
    for _ in range(2):
        for home in group.homes:
            group.run("setup", "accept", "--folder", str(base / "dealt"), *group.secrets(home))
    return group


@pytest.mark.parametrize("key", ["rademacher", "gaussian"])
def test_a_dealers_shares_are_checked_against_each_other(tmp_path: Path, key: str) -> None:
    group = dealt(tmp_path, key=key)
    check = ["setup", "check", "--folder"]
    outputs = together(group, group.homes, *check, str(tmp_path / "health"))
    held = "hold signs" if key == "rademacher" else "hold a key of the committed norm"
    assert all("healthy" in output and held in output for output in outputs)
    again = [*check, str(tmp_path / "health"), *group.secrets(group.homes[0])]
    assert "healthy" in group.run(*again)  # and again changes nothing
    # one coordinate of one share, with a root that commits to it: no member sees it alone, all together do

    def change(values: Any) -> None:
        values[17] = (int(values[17]) + 1) % field.P

    rewrite(group.homes[3], group, change)
    for home in group.homes:
        group.run("share", "verify", *group.secrets(home))
    assert "use a new, empty folder" in group.run(*again, fails=QuorumarkError)
    with pytest.raises(AssertionError, match="what 'Delta' holds must be wrong"):
        together(group, group.homes, *check, str(tmp_path / "second"))
    group.run("setup", "discard", "--home", str(group.homes[0]))


def test_shares_that_fit_together_but_hold_no_signs_are_noticed(tmp_path: Path) -> None:
    """All shares doubled lie on one polynomial; the key would be ±2."""
    group = dealt(tmp_path)
    for home in group.homes:
        rewrite(home, group, lambda values: field.scale(2, values, out=values))
    with pytest.raises(AssertionError, match="do not hold signs"):
        together(group, group.homes, "setup", "check", "--folder", str(tmp_path / "health"))


def test_a_check_where_numbers_allow_less(tmp_path: Path) -> None:
    group = dealt(tmp_path / "a", count=4, threshold=3)
    outputs = together(group, group.homes, "setup", "check", "--folder", str(tmp_path / "health"))
    assert all("not checked (K < 2t−1)" in output for output in outputs)
    group = dealt(tmp_path / "b", count=3, threshold=3)
    said = group.run(
        "setup", "check", "--folder", str(tmp_path / "c"), *group.secrets(group.homes[0]), fails=CeremonyError
    )
    assert "with t = K any shares lie on one polynomial" in said


# --- the paper's protocol ---------------------------------------------------------------------------------


def test_the_papers_protocol_runs_where_its_leak_is_accepted(tmp_path: Path) -> None:
    group = Consortium(tmp_path, setup="paper", key="gaussian", count=4, threshold=3)
    step = ["setup", "dkg", "--terms", str(group.terms), "--folder", str(group.folder)]
    said = group.run(*step, *group.secrets(group.homes[0]), fails=QuorumarkError)
    assert "must be what the terms ask for" in said
    said = group.run(*step, "--protocol", "paper", *group.secrets(group.homes[0]), fails=QuorumarkError)
    assert "--accept-leak must be given" in said
    assert "cosine 0.707" in said  # √((t−1)/K) = √(2/4)
    accepted = [*step, "--protocol", "paper", "--accept-leak"]
    result = CliRunner().invoke(app, [*accepted, "--no-wait", *group.secrets(group.homes[0])])
    assert "cosine 0.707 to the key, √((t−1)/K)" in result.stderr
    together(group, group.homes, *accepted)
    key = group.key((0, 1, 2)) / 2**8
    assert abs(key.std() - 1) < 6 / np.sqrt(2 * key.size)
    assert (group.key((3, 2, 1)) / 2**8 == key).all()
    outputs = together(group, group.homes, "setup", "check", "--folder", str(tmp_path / "health"))
    assert all("what they hold was not checked" in output for output in outputs)
    with pytest.raises(AssertionError, match="makes a 'gaussian' key"):
        Consortium(tmp_path / "other", setup="paper")


# --- killed on the way ------------------------------------------------------------------------------------


def killed(what: str, base: Path, environment: dict[str, str], *how: str) -> int:
    command = [sys.executable, "-m", "tests.kit.killed", what, str(base), *how]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    return int(json.loads(result.stdout.splitlines()[-1])["killed"])


@pytest.mark.parametrize("what", ["setup", "refresh"])
def test_processes_killed_again_and_again_lose_nothing(tmp_path: Path, what: str, environment: dict[str, str]) -> None:
    """SIGKILL before and after files that the members write, in processes of their own (tests/kit/killed.py)."""
    assert killed(what, tmp_path, environment) > 60


@pytest.mark.slow
@pytest.mark.parametrize("what", ["setup", "refresh"])
def test_a_process_killed_at_any_write_loses_nothing(tmp_path: Path, what: str, environment: dict[str, str]) -> None:
    """The same with a ceremony of its own for each write of a member: messages, states, share, archive, manifest."""
    assert killed(what, tmp_path, environment, "each") >= 2 * 24


def test_share_files_of_later_epochs_are_found(tmp_path: Path) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    group.finish()
    refresh(group, "one")
    info = json.loads(group.run("share", "inspect", "--home", str(group.homes[0]), "--json"))
    assert (info["epoch"], info["length"]) == (1, 280 + 3 * 3)
    assert isinstance(place(group.homes[0]).share(unlock(group.homes[0])), ShareFile)
    group.run("member", "backup", str(tmp_path / "b.tar"), "--home", str(group.homes[0]))
    restored = tmp_path / "restored"
    group.run("member", "restore", str(tmp_path / "b.tar"), "--home", str(restored))
    names = {p.relative_to(place(restored).path).as_posix() for p in place(restored).path.rglob("*") if p.is_file()}
    old = place(group.homes[0]).manifest().predecessor
    assert old is not None
    kept = {"terms.json", "manifest.json", "share-1.sealed", "archive.bin", "signed.json", f"history/{old[:16]}.json"}
    assert names == kept | {"layout.json", "anchor.safetensors"}


def test_the_anchor_after_warm_up_rounds_through_the_commands(tmp_path: Path) -> None:
    """Terms with warm-up rounds; the amendment names another model, and the signs are drawn anew."""
    group = Consortium(tmp_path, count=3, threshold=2)
    agreed = json.loads(group.terms.read_text())
    agreed["strength"] = {**agreed["strength"], "warmup_rounds": "5"}
    group.terms.write_bytes(canonical(agreed))
    group.finish()
    before = group.manifests()[0]
    warm = tmp_path / "warm.safetensors"
    write_safetensors({"w": np.ones((40, 7), np.float32), "b": np.zeros(3, np.float32)}, warm)
    amend = ["consortium", "amend", "--out", str(tmp_path / "anchor.json"), "--home", str(group.homes[0])]
    assert "--layout must be given" in group.run(*amend, "--anchor", str(warm), fails=QuorumarkError)
    layout = ["--layout", str(tmp_path / "agreed" / "layout.json")]
    assert "the signs are drawn anew" in group.run(*amend, "--anchor", str(warm), *layout)
    sign = ["consortium", "sign", "--terms", str(tmp_path / "anchor.json"), "--folder", str(tmp_path / "signatures")]
    together(group, group.homes, *sign)
    after = group.manifests()[0]
    assert after.genesis.anchor == after.terms.anchor != before.terms.anchor
    assert (after.genesis.whitening(0, 280) != before.genesis.whitening(0, 280)).any()
    for home in group.homes:
        group.run("share", "verify", *group.secrets(home))
    refresh(group, "one")  # and life goes on
