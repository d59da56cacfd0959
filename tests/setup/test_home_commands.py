"""What a member need not say: where its key file is, which consortium is meant, where the agreed files are; and the end
of a consortium in a home."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark import doctor
from quorumark.consortium.home import HomeFolder
from quorumark.model.layout import write_safetensors
from quorumark.verify.reference import Reference
from tests.kit.ceremony_folder import Consortium
from tests.kit.commands import run


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    group = Consortium(tmp_path_factory.mktemp("three"), count=3, threshold=2)
    group.finish()
    return group


def again(three: Consortium, folder: Path) -> Consortium:
    """A copy, for what would change it. Remembered key files are still the first one's."""
    copy = object.__new__(Consortium)
    shutil.copytree(three.base, folder, dirs_exist_ok=True)
    copy.base, copy.folder, copy.terms = folder, folder / "exchange", folder / "agreed" / "terms.json"
    copy.homes = [folder / home.name for home in three.homes]
    return copy


def said(environment: dict[str, str], *arguments: Any, code: int = 0) -> str:
    done = run(environment, *map(str, arguments))
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_a_home_is_named_by_the_environment_and_knows_its_key_file(
    three: Consortium, tmp_path: Path, environment: dict[str, str]
) -> None:
    there = {**environment, "QUORUMARK_HOME": str(three.homes[1])}
    assert "point 2 is whole" in said(there, "share", "verify")
    assert "point 1 is whole" in said(there, "share", "verify", "--home", three.homes[0])  # an option counts more
    remembered = three.homes[1] / "key-file"
    assert remembered.read_text() == str(
        three.homes[1].with_suffix(".key")
    )  # where it is, and nothing of what it holds
    assert remembered.stat().st_mode & 0o777 == 0o600
    backup = tmp_path / "birch.tar"
    said(there, "member", "backup", backup)
    with tarfile.open(backup) as archive:
        names = archive.getnames()
    assert "key-file" not in names
    assert {"layout.json", "anchor.safetensors"} <= {Path(name).name for name in names}
    restored = tmp_path / "restored"
    said(there, "member", "restore", backup, "--home", restored)
    assert "must be given where nobody can be asked" in said(environment, "share", "verify", "--home", restored, code=2)
    misspelt = ["--terms", three.terms, "--folder", tmp_path / "exchange", "--home", tmp_path / "Brich"]
    nowhere = said(environment, "setup", "dkg", *misspelt, code=2)
    assert "--home must be a member's home, which quorumark member init makes, but got " in nowhere
    HomeFolder(restored).remember_key_file(tmp_path / "gone.key")
    assert "it is not at" in said(environment, "share", "verify", "--home", restored, code=2)


def test_the_public_folder_holds_what_the_manifest_names(
    three: Consortium, tmp_path: Path, environment: dict[str, str]
) -> None:
    group, out = again(three, tmp_path / "copy"), tmp_path / "public"
    here = ["--home", str(group.homes[0])]
    said(environment, "public", "--out", out, *here)
    assert {path.name for path in out.iterdir()} == {"consortium.json", "layout.json", "anchor.safetensors"}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.iterdir())
    assert Reference.read(out / "consortium.json").manifest == group.manifests()[0]
    # another anchor is refused, and nothing is written
    write_safetensors({"w": np.ones((40, 7), np.float32), "b": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    before = (out / "anchor.safetensors").read_bytes()
    wrong = ["public", "--out", out, *here, "--anchor", tmp_path / "other.safetensors"]
    assert "the anchor is not the model that the manifest names" in said(environment, *wrong, code=2)
    assert (out / "anchor.safetensors").read_bytes() == before
    # without the member's own copies the options are named, and do
    place = HomeFolder(group.homes[0]).only_consortium().path
    (place / "anchor.safetensors").unlink()
    assert "name it with --anchor" in said(environment, "public", "--out", out, *here, code=2)
    said(environment, "public", "--out", out, *here, "--anchor", group.base / "agreed" / "anchor.safetensors")
    # after an amendment it is brought up to date; a member who is behind does not take it back
    new = tmp_path / "new.json"
    group.run("consortium", "amend", *here, "--out", str(new), "--policy", "z=7")
    for home in [*group.homes[:2], *group.homes[::-1]]:
        group.run("consortium", "sign", "--terms", str(new), "--folder", str(tmp_path / "s"), *group.secrets(home))
    said(environment, "public", "--out", out, "--home", group.homes[1])
    assert len(Reference.read(out / "consortium.json").chain) == 2
    behind = ["public", "--out", out, "--home", three.homes[1]]
    assert "one that this member does not have" in said(environment, *behind, code=2)


def test_agreed_files_that_are_not_what_the_terms_name_are_not_kept(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    group = Consortium(tmp_path, count=3, threshold=2)
    shutil.copy(group.base / "model.safetensors", tmp_path / "agreed" / "layout.json")
    group.finish()
    place = HomeFolder(group.homes[0]).only_consortium().path
    assert not (place / "layout.json").exists()
    assert "name it with --layout" in said(
        environment, "public", "--out", tmp_path / "public", "--home", group.homes[0], code=2
    )


def test_the_consortium_is_found_from_the_manifest_or_the_query(
    three: Consortium, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Members of two consortia with the same people."""
    group = again(three, tmp_path / "copy")
    rng = np.random.default_rng(5)
    other = tmp_path / "other.safetensors"
    write_safetensors({"v": rng.standard_normal((80, 70)).astype(np.float32)}, other)
    cards = [item for home in group.homes for item in ("--member", f"{home}/member.json:100")]
    group.run(
        "consortium", "create", "--without-alignment", "--name", "banks", "--threshold", "2", *cards, "--model",
        str(other), "--out", str(tmp_path / "banks"),
    )  # fmt: skip
    first, group.terms, group.folder = group.terms, tmp_path / "banks" / "terms.json", tmp_path / "exchange-2"
    group.finish()
    here = ["--home", group.homes[0]]
    for command in (["share", "verify"], ["verify", "ledger"], ["public", "--out", tmp_path / "p"]):
        text = said(environment, *command, *here, code=2)
        assert "--consortium" in text
        assert "banks" in text
        assert "hospitals" in text
    ids = {place.terms().name: place.path.name for place in HomeFolder(group.homes[0]).consortia()}
    assert "holds no consortium 'zz'" in said(environment, "share", "verify", *here, "--consortium", "zz", code=2)
    said(environment, "public", "--out", tmp_path / "p", *here, "--consortium", ids["banks"][:6])
    moved = tmp_path / "moved.safetensors"
    write_safetensors({"v": rng.standard_normal((80, 70)).astype(np.float32)}, moved)
    files = [tmp_path / name for name in ("query.json", "p1.json", "p2.json", "certificate.json")]
    manifest = ["--manifest", tmp_path / "p" / "consortium.json"]
    said(environment, "verify", "prepare", moved, *manifest, "--out", files[0], *here)
    for number in (1, 2):
        member = ["--home", group.homes[number - 1], "--key-file", group.homes[number - 1].with_suffix(".key")]
        answer = ["verify", "partial", files[0], "--suspect", moved, "--approve", "--out", files[number], *member]
        said(environment, *answer)
    said(environment, "verify", "combine", *files[:3], "--out", files[3], *here, code=1)  # noise: FAILED
    said(environment, "verify", "sign", files[3], *member)
    books = {place.terms().name: place.ledger_path.exists() for place in HomeFolder(group.homes[0]).consortia()}
    assert books == {"banks": True, "hospitals": False}
    assert first.exists()


def test_a_home_forgets_a_consortium(three: Consortium, tmp_path: Path, environment: dict[str, str]) -> None:
    group = again(three, tmp_path / "copy")
    home = HomeFolder(group.homes[0])
    forget = ["consortium", "forget", "--home", home.path]
    assert "--yes must be given" in said(environment, *forget, code=2)
    group.run("share", "refresh", "--folder", str(tmp_path / "refresh"), *group.secrets(home.path))
    assert "under way" in said(environment, *forget, "--yes", code=2)
    assert home.only_consortium().share_path().exists()
    assert "hospitals" in said(environment, *forget, "--yes", "--although-under-way")
    assert not list(home.path.rglob("share-*"))
    assert home.consortia() == []
    assert home.card().name == "Avon"  # its identity stays
    assert "holds no consortium yet" in said(environment, *forget, "--yes", code=2)
    new = tmp_path / "new.json"
    group.run("consortium", "amend", "--home", str(group.homes[1]), "--out", str(new), "--policy", "z=7")
    sign = ["consortium", "sign", "--terms", str(new), "--folder", str(tmp_path / "s")]
    group.run(*sign, *group.secrets(group.homes[1]))
    assert "under way" in said(environment, "consortium", "forget", "--yes", "--home", group.homes[1], code=2)
    assert "forgotten" in said(environment, "consortium", "forget", "--yes", "--home", group.homes[2])


def test_the_doctor_names_what_is_wrong_and_the_remedy(
    three: Consortium, tmp_path: Path, environment: dict[str, str]
) -> None:
    def look(home: Path, code: int) -> dict[str, Any]:
        found = json.loads(said(environment, "doctor", "--home", home, "--json", code=code))
        assert found["well"] == (code == 0)
        return {check["name"]: check for check in found["checks"]}

    nobody = look(tmp_path / "nobody", 0)
    assert nobody["home"]["well"] is None
    assert {"python", "numba", "kernels' cache", "GPU", "clock", "disk", "extra torch"} <= nobody.keys()
    assert look(three.homes[0], 0)["key file"]["well"]
    group = again(three, tmp_path / "copy")
    home, key = group.homes[0], group.homes[0].with_suffix(".key")
    HomeFolder(home).remember_key_file(key)
    place = HomeFolder(home).only_consortium()
    terms, content = place.path / "terms.json", (place.path / "terms.json").read_bytes()
    late = replace(place.terms(), created="2999-01-01T00:00:00Z").to_bytes()

    def damage(name: str) -> Any:
        return {
            "home": lambda: home.chmod(0o755),
            "sealed files": lambda: place.share_path().chmod(0o644),
            "key file": lambda: key.chmod(0o644),
            "clock": lambda: terms.write_bytes(late),
            f"consortium {place.path.name}": lambda: place.share_path().rename(tmp_path / "away"),
        }[name]

    def mend() -> None:
        if (tmp_path / "away").exists():
            (tmp_path / "away").rename(place.share_path())
        home.chmod(0o700)
        place.share_path().chmod(0o600)
        key.chmod(0o600)
        terms.write_bytes(content)

    for name in ("home", "sealed files", "key file", f"consortium {place.path.name}"):
        damage(name)()
        found = look(home, 1)
        assert [check["name"] for check in found.values() if check["well"] is False] == [name]
        assert found[name]["remedy"]
        mend()
    damage("clock")()
    assert look(home, 1)["clock"]["well"] is False
    mend()
    key.rename(tmp_path / "away.key")
    assert "is not there" in look(home, 1)["key file"]["found"]
    HomeFolder(home).remember_key_file(home / "inside.key")
    shutil.copy(tmp_path / "away.key", home / "inside.key")
    assert look(home, 1)["key file's place"]["well"] is False
    (home / "inside.key").unlink()
    (home / "key-file").unlink()
    assert "all is well" in said(environment, "doctor", "--home", home)


def test_the_doctor_knows_the_extras(root: Path) -> None:
    import tomllib

    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert doctor.EXTRAS.keys() <= extras.keys()
