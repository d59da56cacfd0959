"""The key ceremony as five organisations run it: folders of their own, files exchanged, commands; and faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from typer.testing import CliRunner

from quorumark import field, shamir
from quorumark.cli import app
from quorumark.consortium import home as home_module
from quorumark.consortium import keystore
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.identity import Header, verify_manifest
from quorumark.consortium.keystore import Unlock
from quorumark.consortium.policy import Policy
from quorumark.consortium.records import Terms
from quorumark.consortium.strength import Strength
from quorumark.errors import MessageError, QuorumarkError
from quorumark.files import only_one, write_private
from quorumark.setup import recover as recover_module
from tests.kit.ceremony_folder import Consortium
from tests.kit.oracle import spelled
from tests.kit.refusals import stopped


@pytest.fixture
def five(tmp_path: Path) -> Consortium:
    return Consortium(tmp_path)


def test_five_members_without_a_dealer(five: Consortium) -> None:
    assert "waiting for Birch, Cedar, Delta, Elm (commit)" in five.step(0)
    five.finish()
    assert len({m.to_bytes() for m in five.manifests()}) == 1
    verify_manifest(five.manifests()[0])
    for i, home in enumerate(five.homes):
        secrets = five.secrets(home)
        assert f"point {i + 1} is whole" in five.run("share", "verify", *secrets)
        info = json.loads(five.run("share", "inspect", "--home", str(home), "--json"))
        assert (info["point"], info["threshold"], info["length"]) == (i + 1, 3, 280)
        place = HomeFolder(home).only_consortium()
        kept = {".lock", "manifest.json", "rounds", "share-0.sealed", "signed.json", "terms.json"}
        assert {p.name for p in place.path.iterdir()} == kept | {"anchor.safetensors", "layout.json"}
        assert place.memory_path.stat().st_mode & 0o777 == 0o600
        assert place.share_path().stat().st_mode & 0o777 == 0o600
        assert home.stat().st_mode & 0o777 == 0o700
        for public in (home / "member.json", place.manifest_path):  # a copy in a public folder is for others to read
            assert public.stat().st_mode & 0o777 == 0o644
    key = five.key()
    assert set(np.unique(key)) == {-1, 1}
    assert (five.key((4, 3, 1)) == key).all()
    manifest = HomeFolder(five.homes[0]).only_consortium().manifest_path
    assert "signed by all 5 members" in five.run("consortium", "check", str(manifest))
    assert "Delta" in five.run("consortium", "show", str(manifest))
    assert "finished" in five.step(0)  # and again changes nothing


def test_two_shares_are_not_enough_and_a_wrong_one_is_named(five: Consortium) -> None:
    five.finish()
    with pytest.raises(AssertionError, match="needs the shares of 3 members"):
        five.key((0, 1))
    # Birch's share was swapped for Cedar's on the way
    for i in (1, 2):
        five.run(
            "share", "hand-over", "--to", f"{five.homes[0]}/member.json", "--out", str(five.base / f"h{i}"),
            "--i-understand-this-hands-over-my-share", *five.secrets(five.homes[i]),
        )  # fmt: skip
    said = five.run(
        "key", "reconstruct", "--share", str(five.base / "h1"), "--share", str(five.base / "h1"), "--out",
        str(five.base / "key.npy"), "--i-understand-this-reveals-the-key", *five.secrets(five.homes[0]),
        fails=QuorumarkError,
    )  # fmt: skip
    assert "needs the shares of 3 members, but there are 2" in said
    assert not (five.base / "key.npy").exists()
    said = five.run(
        "key", "reconstruct", "--share", "x", "--out", "y", *five.secrets(five.homes[0]), fails=QuorumarkError
    )
    assert "--i-understand-this-reveals-the-key must be given" in said


def test_damaged_and_foreign_files_are_refused_and_the_ceremony_goes_on(five: Consortium) -> None:
    for _ in range(3):
        for i in range(5):
            five.step(i)
    # Birch has just dealt; spoil what it wrote for Avon
    path = five.folder / "3-deal" / "2-to-1.msg"
    good = path.read_bytes()
    arguments = ["setup", "dkg", "--terms", str(five.terms), "--folder", str(five.folder), *five.secrets(five.homes[0])]
    for spoiled in (good[:-1], good[:50] + b"!" + good[51:], b"", (five.folder / "3-deal" / "3-to-1.msg").read_bytes()):
        path.write_bytes(spoiled)
        assert "'Birch' for step 'dkg/deal'" in five.run(*arguments, fails=QuorumarkError)
    path.unlink()
    assert "waiting for Birch (deal)" in five.step(0)
    five.step(1)  # Birch writes it again
    five.finish()
    assert set(np.unique(five.key())) == {-1, 1}


def test_before_the_setup_is_finished_commands_say_so(five: Consortium) -> None:
    five.step(0)
    for command in ("share verify", "share inspect", "verify ledger", "setup check"):
        options = ["--home", str(five.homes[0])] if command in ("share inspect", "verify ledger") else []
        options = options or five.secrets(five.homes[0])
        options += ["--folder", str(five.base / "other")] if command == "setup check" else []
        text = five.run(*command.split(), *options, fails=QuorumarkError)
        assert "the setup of this consortium is not finished here" in text


def test_what_a_killed_process_was_writing_is_removed(five: Consortium) -> None:
    five.step(0)
    place = HomeFolder(five.homes[0]).only_consortium().path
    # as a process leaves it that is killed between writing and renaming: the seed of the ceremony, sealed
    left = place / ".ceremony.sealed.0123456789ab.partial"
    shutil.copy(place / "ceremony.sealed", left)
    five.step(0)
    assert not left.exists()
    assert (place / "ceremony.sealed").exists()


def test_what_was_used_must_not_change(five: Consortium) -> None:
    for _ in range(3):
        for i in range(5):
            five.step(i)
    # Birch loses its state after all have used its messages, and starts anew: its commitment is another one
    place = HomeFolder(five.homes[1]).only_consortium()
    place.ceremony_path.unlink()
    arguments = ["setup", "dkg", "--terms", str(five.terms), "--folder", str(five.folder)]
    said = five.run(*arguments, *five.secrets(five.homes[1]), fails=QuorumarkError)
    assert "holds an earlier ceremony of this member: use a new, empty folder" in said
    (five.folder / "1-commit" / "2.msg").unlink()
    CliRunner().invoke(app, [*arguments, "--no-wait", *five.secrets(five.homes[1])])
    said = five.run(*arguments, *five.secrets(five.homes[0]), fails=QuorumarkError)
    assert "'Birch'" in said
    assert "says something else for step 'dkg/commit'" in said


def test_after_a_fault_nothing_is_opened_again_until_all_start_anew(five: Consortium) -> None:
    for _ in range(4):
        for i in range(5):
            five.step(i)
    # Elm confirms squares that nobody else saw: it must have been told something else
    elm = HomeFolder(five.homes[4]).identity(Unlock.key_file(five.homes[4].with_suffix(".key")))
    terms = HomeFolder(five.homes[4]).only_consortium().terms()
    path = five.folder / "5-confirm" / "5.msg"
    session = json.loads(path.read_bytes()[4 : 4 + int.from_bytes(path.read_bytes()[:4], "big")])["session"]
    path.write_bytes(elm.write(Header(terms.digest().hex(), session, "dkg/confirm", 5), bytes(32)))
    step = ["setup", "dkg", "--terms", str(five.terms), "--folder", str(five.folder), *five.secrets(five.homes[0])]
    assert "'Elm' saw other squares" in five.run(*step, fails=QuorumarkError)
    shutil.rmtree(five.folder / "5-confirm")
    assert "this ceremony has failed" in five.run(*step, fails=QuorumarkError)
    for home in five.homes:
        assert "forgotten" in five.run("setup", "discard", "--terms", str(five.terms), "--home", str(home))
    five.folder = five.base / "second"
    five.finish()
    assert set(np.unique(five.key())) == {-1, 1}


def test_two_visits_at_once_are_refused(five: Consortium) -> None:
    five.step(0)
    place = HomeFolder(five.homes[0]).only_consortium()
    step = ["setup", "dkg", "--terms", str(five.terms), "--folder", str(five.folder), *five.secrets(five.homes[0])]
    with only_one(place.path):
        assert "another command is working" in five.run(*step, fails=QuorumarkError)
    five.finish()


def test_a_running_ceremony_is_not_backed_up(five: Consortium) -> None:
    five.step(0)
    backup = five.base / "avon.tar"
    five.run("member", "backup", str(backup), "--home", str(five.homes[0]))
    with tarfile.open(backup) as archive:
        assert not [name for name in archive.getnames() if "ceremony" in name]


def test_unreadable_messages_are_named(five: Consortium) -> None:
    for i in range(5):
        five.step(i)
    path = five.folder / "1-commit" / "3.msg"
    path.unlink()
    path.mkdir()
    step = ["setup", "dkg", "--terms", str(five.terms), "--folder", str(five.folder), *five.secrets(five.homes[0])]
    assert "'Cedar' for step 'dkg/commit' cannot be read" in five.run(*step, fails=QuorumarkError)


def test_messages_without_end_are_named_and_not_read(five: Consortium) -> None:
    """Anyone who writes to the folder puts a device there, or a file that is all hole: neither fills this machine."""
    for i in range(5):
        five.step(i)
    path = five.folder / "1-commit" / "3.msg"
    step = ["setup", "dkg", "--terms", str(five.terms), "--folder", str(five.folder), *five.secrets(five.homes[0])]
    path.unlink()
    path.symlink_to("/dev/full")  # gives zeros without end
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))"
    run = [sys.executable, "-c", f"{code}; from quorumark.cli import app; app({step!r})"]

    def said() -> str:
        return subprocess.run(run, capture_output=True, text=True, timeout=120, check=False).stderr

    assert "MemoryError" not in said()
    assert "cannot be read" in five.run(*step, fails=QuorumarkError)
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 36)
    assert "MemoryError" not in said()
    assert "too large to be a message" in five.run(*step, fails=QuorumarkError)


@pytest.mark.parametrize("defended", [True, False])
def test_a_step_folder_that_is_a_link_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    """Anyone who writes to the exchange folder could else let a member write into any folder of its own machine."""
    group, elsewhere = Consortium(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    group.folder.mkdir()
    link = group.folder / "1-commit"
    link.symlink_to(elsewhere)
    if not defended:
        monkeypatch.setattr(os, "O_NOFOLLOW", 0)
        group.step(0)
        assert [path.name for path in elsewhere.iterdir()] == ["1.msg"]
        return
    step = ["setup", "dkg", "--terms", str(group.terms), "--folder", str(group.folder)]
    step += group.secrets(group.homes[0])
    assert "1-commit': it is a link" in group.run(*step, fails=QuorumarkError)
    assert not list(elsewhere.iterdir())
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    assert "1-commit': it is a link" in group.run(*step, fails=QuorumarkError)
    assert not (tmp_path / "nothing").exists()
    link.unlink()
    for i in range(5):
        group.step(i)
    # nor is anything read through a link, though it is right
    message = link / "2.msg"
    message.rename(elsewhere / "2.msg")
    message.symlink_to(elsewhere / "2.msg")
    said = group.run(*step, fails=QuorumarkError)
    assert "'Birch' for step 'dkg/commit' cannot be read" in said
    assert "'2.msg' is a link" in said
    (elsewhere / "2.msg").replace(message)
    link.rename(tmp_path / "moved")
    link.symlink_to(tmp_path / "moved")
    assert "'1-commit' is a link" in group.run(*step, fails=QuorumarkError)
    link.unlink()
    (tmp_path / "moved").rename(link)
    folder = tmp_path / "linked"  # the exchange folder itself is what the member's operator named
    folder.symlink_to(group.folder)
    group.folder = folder
    group.finish()


# --- with a dealer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["rademacher", "gaussian"])
def test_a_dealer(tmp_path: Path, key: str) -> None:
    group = Consortium(tmp_path, "dealer", key, size=20_000)
    said = group.run("setup", "dealer", "--terms", str(group.terms), "--folder", str(group.folder))
    assert said.startswith("dealt to 5 members in ")  # a bar of progress is for terminals
    assert "the key is gone" in said
    arguments = ["setup", "accept", "--folder", str(group.folder), "--terms", str(group.terms)]
    for home in group.homes[:-1]:
        assert "run this again" in group.run(*arguments, *group.secrets(home))
    for home in group.homes[::-1]:
        assert "finished" in group.run(*arguments, *group.secrets(home))
    for home in group.homes:
        group.run("share", "verify", *group.secrets(home))
        assert HomeFolder(home).only_consortium().memory_path.exists()
    sizes = [HomeFolder(home).only_consortium().share_path().stat().st_size for home in group.homes]
    assert max(sizes) < 0.7 * 8 * 140_000  # compressed: (K−t+1)/K of a vector each, about
    found = group.key((4, 0, 2))
    assert (group.key((1, 2, 3)) == found).all()
    if key == "rademacher":
        assert set(np.unique(found)) == {-1, 1}
    else:
        values = found / 256
        assert abs(values.mean()) < 6 / np.sqrt(values.size)
        assert abs(values.std() - 1) < 0.02
        norm = group.manifests()[0].commitment
        assert norm is not None
        assert int(norm["norm"]) == int(found.astype(np.int64) @ found.astype(np.int64))
    said = group.run(
        "setup", "dealer", "--terms", str(group.terms), "--folder", str(group.folder), fails=QuorumarkError
    )
    assert "already holds a dealing" in said


def test_a_dealer_who_swaps_or_spoils_shares_is_caught(tmp_path: Path) -> None:
    group = Consortium(tmp_path, "dealer")
    group.run("setup", "dealer", "--terms", str(group.terms), "--folder", str(group.folder))
    arguments = ["setup", "accept", "--folder", str(group.folder), *group.secrets(group.homes[0])]
    path = group.folder / "share-1.sealed"
    good = path.read_bytes()
    path.write_bytes((group.folder / "share-2.sealed").read_bytes())
    assert "cannot be opened" in group.run(*arguments, fails=QuorumarkError)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "cannot be opened" in group.run(*arguments, fails=QuorumarkError)
    path.write_bytes(good)
    # another root in the dealing: the share is not the one that everybody would sign for
    dealing = group.folder / "dealing.json"
    manifest = json.loads(dealing.read_text())
    manifest["roots"][0] = manifest["genesis"]["roots"][0] = "ab" * 32
    original = dealing.read_bytes()
    dealing.write_bytes(spelled(manifest))
    assert "not the one that its root commits to" in group.run(*arguments, fails=QuorumarkError)
    dealing.write_bytes(original)
    group.run(*arguments)
    # a second dealing under the same terms: this member holds a share of the first
    shutil.copytree(group.folder, group.base / "first")
    shutil.rmtree(group.folder)
    group.run("setup", "dealer", "--terms", str(group.terms), "--folder", str(group.folder))
    assert "not the one of this dealing" in group.run(*arguments, fails=QuorumarkError)
    # a dealt key for terms that promise that nobody ever knew it
    body = json.loads((group.folder / "dealing.json").read_text())
    body["terms"]["setup"] = "dkg"
    (group.folder / "dealing.json").write_bytes(spelled(body))
    assert "for a dealer only" in group.run(*arguments, fails=QuorumarkError)
    shutil.rmtree(group.folder)
    shutil.copytree(group.base / "first", group.folder)
    # terms that this member did not agree to
    other = Consortium(tmp_path / "other", "dealer")
    said = group.run(*arguments, "--terms", str(other.terms), fails=QuorumarkError)
    assert "other terms than this member agreed to" in said


# --- homes ------------------------------------------------------------------------------------------------


def test_backup_and_restore(five: Consortium) -> None:
    five.finish()
    home, backup = five.homes[2], five.base / "cedar.tar"
    assert "8 files backed up" in five.run("member", "backup", str(backup), "--home", str(home))
    assert backup.stat().st_mode & 0o777 == 0o600
    shutil.rmtree(home)
    assert "Cedar restored" in five.run("member", "restore", str(backup), "--home", str(home))
    five.run("share", "verify", *five.secrets(home))
    # the memory of rounds is in no backup, so it is lost, and nobody can say that there never was a round
    place, again = HomeFolder(home).only_consortium(), ["member", "rounds", *five.secrets(home)]
    assert "finished" in five.step(2)
    assert not place.memory_path.exists()
    assert "--lost" in five.run(*again, fails=QuorumarkError)
    assert "two rounds" in five.run(*again, "--lost")
    assert "exists already" in five.run(*again, "--lost", fails=QuorumarkError)
    assert "not empty" in five.run("member", "restore", str(backup), "--home", str(home), fails=QuorumarkError)
    evil = five.base / "evil.tar"
    with tarfile.open(evil, "w") as archive:
        for name in ("identity.sealed", "consortia/../../pwned"):
            archive.addfile(tarfile.TarInfo(name))
    said = five.run("member", "restore", str(evil), "--home", str(five.base / "fresh"), fails=QuorumarkError)
    assert "not a backup" in said
    assert not (five.base / "pwned").exists()
    (five.base / "junk.tar").write_bytes(b"no tar at all")
    said = five.run(
        "member", "restore", str(five.base / "junk.tar"), "--home", str(five.base / "new"), fails=QuorumarkError
    )
    assert "is not a backup of a member's home, or is damaged" in said


def test_a_request_under_another_manifest_says_what_to_do(five: Consortium) -> None:
    five.finish()
    folder = five.base / "recovery"
    HomeFolder(five.homes[1]).only_consortium().share_path().unlink()
    five.run("share", "recover", "--helpers", "1,3,4", "--folder", str(folder), *five.secrets(five.homes[1]))
    request = folder / "request.msg"
    ours = five.manifests()[0].digest().hex().encode()
    request.write_bytes(request.read_bytes().replace(ours, b"ab" * 32))  # as from a member who is an epoch ahead
    text = five.run("share", "help", "--folder", str(folder), *five.secrets(five.homes[0]), fails=QuorumarkError)
    assert "not made under the manifest in force here" in text
    assert "quorumark consortium update" in text


def test_masks_of_a_recovery_are_for_one_request_of_one_member(five: Consortium) -> None:
    """With equal masks for two requesters, the difference of a helper's answers would be a multiple of its share."""
    five.finish()
    manifest = five.manifests()[0]
    streams = [
        recover_module._mask(manifest, b"s" * 32, own, other, point, request).elements(4)
        for own, other, point, request in [(3, 4, 1, b"a"), (3, 4, 2, b"a"), (3, 4, 1, b"b"), (3, 5, 1, b"a")]
    ]
    assert len({tuple(map(int, stream)) for stream in streams}) == 4
    both = recover_module._mask(manifest, b"s" * 32, 4, 3, 1, b"a").elements(4)
    assert (both == streams[0]).all()  # the two sides agree


def test_what_was_sent_for_a_recovery_cannot_be_read_with_keys_that_are_stolen_later(five: Consortium) -> None:
    """The whole folder is kept, and after the recovery everybody's lasting keys are stolen: nothing opens."""
    five.finish()
    birch, folder = five.homes[1], five.base / "recovery"
    HomeFolder(birch).only_consortium().share_path().unlink()
    five.run("share", "recover", "--folder", str(folder), *five.secrets(birch), "--helpers", "1,3,5")
    for _ in range(2):
        for i in (0, 2, 4):
            five.run("share", "help", "--folder", str(folder), *five.secrets(five.homes[i]))
    assert "recovered" in five.run("share", "recover", "--folder", str(folder), *five.secrets(birch))
    stolen = HomeFolder(birch).identity(Unlock.key_file(birch.with_suffix(".key")))
    manifest = five.manifests()[0]
    request = stolen.read(
        (folder / "request.msg").read_bytes()[2:], manifest.terms, recover_module._header(manifest, "request", 2)
    )
    head = recover_module._header(manifest, "answer", 1, 2, json.loads(request)["nonce"])
    with stopped("message.cannot-open"):
        stolen.read((folder / "answer-1.msg").read_bytes(), manifest.terms, head)
    for home in five.homes:  # and the keys that were made for it are gone
        assert not [
            p for p in HomeFolder(home).only_consortium().path.iterdir() if p.name in ("help.sealed", "recovery.sealed")
        ]


def test_dealings_cannot_be_read_with_keys_that_are_stolen_later(five: Consortium) -> None:
    """A dealing is sealed under the session's keys, which die with it, not to the member's lasting key."""
    five.finish()
    elm = HomeFolder(five.homes[4]).identity(Unlock.key_file(five.homes[4].with_suffix(".key")))
    manifest = five.manifests()[0]
    data = (five.folder / "3-deal" / "1-to-5.msg").read_bytes()
    header = Header(manifest.terms.digest().hex(), manifest.genesis.session, "dkg/deal", 1, 5)
    for secret in (None, elm.exchange(manifest.terms.member(1).x25519)):
        with pytest.raises(MessageError):
            elm.read(data, manifest.terms, header, secret=secret)


def test_a_lost_share_comes_back_and_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    five = Consortium(tmp_path, size=400)
    five.finish()
    # a share may be larger than any record may be: the limit on records must not stop it
    manifest = HomeFolder(five.homes[0]).only_consortium().manifest_path
    assert manifest.stat().st_size < 8 * 2800
    monkeypatch.setattr(home_module, "_LARGEST_RECORD", manifest.stat().st_size + 1)
    key, folder = five.key(), five.base / "recovery"
    lost = HomeFolder(five.homes[1]).only_consortium().share_path()
    original = HomeFolder(five.homes[1]).only_consortium().share(Unlock.key_file(five.homes[1].with_suffix(".key")))
    values, salts = original.vector(), original.others_salts
    recover = ["share", "recover", "--folder", str(folder), *five.secrets(five.homes[1])]
    assert "still there" in five.run(*recover, "--helpers", "1,3,5", fails=QuorumarkError)
    lost.unlink()
    for wrong in ("1,3", "1,1,3", "1,2,3", "1,3,9"):
        assert "exactly t = 3" in five.run(*recover, "--helpers", wrong, fails=QuorumarkError)
    five.run(*recover, "--helpers", "1,3,5")
    assert "waiting for Avon, Cedar, Elm" in five.run(*recover)
    stranger = ["share", "help", "--folder", str(folder), *five.secrets(five.homes[3])]
    assert "asks other members" in five.run(*stranger, fails=QuorumarkError)
    help_birch = ["share", "help", "--folder", str(folder)]
    assert "waiting for Cedar, Elm (hello)" in five.run(*help_birch, *five.secrets(five.homes[0]))
    five.run(*help_birch, *five.secrets(five.homes[2]))
    for i in (4, 0, 2, 0):  # and once more changes nothing
        assert "Birch can now read its own share" in five.run(*help_birch, *five.secrets(five.homes[i]))
    # one answer alone is no share: masked, and unrelated to the helper's own
    birch = HomeFolder(five.homes[1]).identity(Unlock.key_file(five.homes[1].with_suffix(".key")))
    avon = (
        HomeFolder(five.homes[0]).only_consortium().share(Unlock.key_file(five.homes[0].with_suffix(".key"))).vector()
    )
    place = HomeFolder(five.homes[1]).only_consortium()
    body = json.loads(
        keystore.read_sealed(
            place.path / "recovery.sealed", Unlock.key_file(five.homes[1].with_suffix(".key")), "recovery"
        )
    )
    head = recover_module._header(place.manifest(), "answer", 1, 2, json.loads(body["request"])["nonce"])
    key_of_request = X25519PrivateKey.from_private_bytes(bytes.fromhex(body["key"]))
    data = (folder / "answer-1.msg").read_bytes()
    answer = np.frombuffer(birch.read(data, place.terms(), head, private=key_of_request), "<u8")[-2800:]
    weight = shamir.lagrange((1, 3, 5), 2)[0]
    assert not (answer == field.scale(weight, avon)).any()
    # a falsified answer is found
    good = (folder / "answer-3.msg").read_bytes()
    (folder / "answer-3.msg").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "'Cedar'" in five.run(*recover, fails=QuorumarkError)
    (folder / "answer-3.msg").write_bytes(good)
    assert "recovered" in five.run(*recover)
    again = place.verify_share(Unlock.key_file(five.homes[1].with_suffix(".key")))
    assert (again.vector() == values).all()
    assert (again.others_salts == salts).all()
    assert (five.key((1, 0, 3)) == key).all()


def test_passphrases_and_errors(tmp_path: Path) -> None:
    secret = "a passphrase that nobody guesses"  # noqa: S105
    file = tmp_path / "passphrase"
    write_private(file, secret.encode() + b"\n")
    runner = CliRunner()
    init = ["member", "init", "--name", "Avon", "--home", str(tmp_path / "home")]
    result = runner.invoke(app, init)
    assert "must be given where nobody can be asked" in str(result.exception)
    result = runner.invoke(app, [*init, "--passphrase-file", str(file)])
    assert result.exit_code == 0
    assert secret not in result.output
    assert HomeFolder(tmp_path / "home").identity(Unlock.passphrase(secret)).name == "Avon"
    for path in (tmp_path / "home").rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes()
    result = runner.invoke(app, [*init, "--passphrase-file", str(file)])
    assert "already holds an identity" in str(result.exception)
    result = runner.invoke(app, ["share", "inspect", "--home", str(tmp_path / "home")])
    assert "holds no consortium yet" in str(result.exception)
    file.chmod(0o644)
    result = runner.invoke(app, [*init, "--passphrase-file", str(file)])
    assert "open to others" in str(result.exception)


def test_the_terms_have_the_strength_policy_and_statistic_that_were_asked_for(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    cards = [item for home in group.homes for item in ("--member", f"{home}/member.json")]
    create = ["consortium", "create", "--without-alignment", "--name", "x", "--threshold", "3", *cards]
    create += ["--model", str(tmp_path / "model.safetensors"), "--out"]
    chosen = ["--strength", "lr=cosine:24", "--strength", "rho=0.1", "--policy", "z=7", "--policy", "attempts=5"]
    group.run(*create, str(tmp_path / "one"), *chosen, "--statistic", "global-cosine/v1")
    terms = Terms.from_bytes((tmp_path / "one" / "terms.json").read_bytes())
    assert terms.strength == Strength.of({"rho": "0.1", "lr": "cosine:24"}, terms.coordinates)
    assert terms.policy == Policy(z=Decimal(7), attempts=5, sums="checked")
    assert terms.statistic == "global-cosine/v1"
    shown = group.run("consortium", "show", str(tmp_path / "one" / "terms.json"))
    assert "c_max=0.03 continuity=off dither=3 lr=cosine:24 rho=0.1 rule=rho warmup_rounds=0" in " ".join(shown.split())
    assert "policy   attempts=5 blocks=rows/v1 packing=2 sums=checked z=7" in shown
    group.run(*create, str(tmp_path / "drawn"), "--policy", "cohort=4")
    drawn = Terms.from_bytes((tmp_path / "drawn" / "terms.json").read_bytes())
    assert drawn.policy == Policy(cohort=4, sums="checked")
    group.run(*create, str(tmp_path / "two"), "--strength", "rule=target", "--strength", "z=5")
    terms = Terms.from_bytes((tmp_path / "two" / "terms.json").read_bytes())
    assert terms.strength == Strength.of({"rule": "target", "z": "5", "dither": "3"}, terms.coordinates)
    for arguments, text in [
        (["--strength", "warmup=3"], "under the rule 'rho' has the settings"),
        (["--strength", "rho"], "must be like NAME=VALUE"),
        (["--policy", "zz=7"], "and no other, but got 'zz'"),
        (["--policy", "z=high"], "must be a decimal number"),
        (["--policy", "budget=0"], "must be an integer, at least 1"),
        (["--policy", "sums=yes"], "must be checked or unchecked"),
        (["--statistic", "mine"], "must be one of"),
    ]:
        assert text in group.run(*create, str(tmp_path / "three"), *arguments, fails=QuorumarkError)
    assert not (tmp_path / "three").exists()
    group.finish()
    amend = ["consortium", "amend", "--home", str(group.homes[0]), "--out", str(tmp_path / "new.json")]
    for setting, text in [("zz=7", "but got 'zz'"), ("z=high", "a decimal number"), ("groups=00", "pass the file")]:
        assert text in group.run(*amend, "--policy", setting, fails=QuorumarkError)
    assert "policy z: 6 → 7" in group.run(*amend, "--policy", "z=7")
    amend[-1] = str(tmp_path / "newer.json")
    assert "nobody signed anything of the rounds so far" in group.run(
        *amend, "--policy", "cohort=4", fails=QuorumarkError
    )
    assert "policy sums: checked → unchecked" in group.run(*amend, "--policy", "sums=unchecked", "--policy", "cohort=4")


def test_bad_consortia_are_refused(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    model = str(tmp_path / "model.safetensors")
    cards = [item for home in group.homes for item in ("--member", f"{home}/member.json")]
    create = [
        "consortium",
        "create",
        "--without-alignment",
        "--name",
        "x",
        "--model",
        model,
        "--out",
        str(tmp_path / "new"),
    ]
    for arguments, text in [
        ([*cards, "--threshold", "4"], "needs K ≥ 2t−1 = 7 members, but there are 5: lower the threshold to 3"),
        ([*cards, "--threshold", "1"], "at least 2"),
        ([*cards, "--threshold", "9"], "must not exceed the 5 members"),
        ([*cards, "--member", f"{group.homes[0]}/member.json", "--threshold", "3"], "two members one name"),
        ([*cards, "--threshold", "3", "--setup", "magic"], "setup must be one of dealer, dkg"),
        ([*cards, "--threshold", "3", "--key", "wooden"], "key must be one of rademacher, gaussian"),
        (["--member", model, "--threshold", "2"], "this is not a member's card"),
        (["--member", str(group.homes[0]), "--threshold", "2"], "it is a folder"),
        ([*cards[:-1], f"{cards[-1]}:90", "--threshold", "3"], "got 1/Σa² = 1.09 < 2.0; 'Elm' is the largest"),
    ]:
        assert text in group.run(*create, *arguments, fails=QuorumarkError)
    assert not (tmp_path / "new").exists()
    assert "nothing signed in it yet" in group.run("consortium", "check", str(group.terms), fails=QuorumarkError)
