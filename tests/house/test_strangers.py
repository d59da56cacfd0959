"""Files from strangers: what waits, has no end, inflates or says what its sender likes is refused, and quickly."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import resource
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quorumark.canonical import canonical, digest
from quorumark.consortium.home import HomeFolder
from quorumark.consortium.keystore import Unlock
from quorumark.errors import EvidenceError, GuardError, KeystoreError, LayoutError, RecordError
from quorumark.model.layout import write_safetensors
from quorumark.model.suspect import read_suspect
from quorumark.verify.answer import answer
from quorumark.verify.guard import check_query
from quorumark.verify.ledger import Ledger
from quorumark.verify.query import prepare
from quorumark.verify.rules import AnswerRules
from tests.kit.consortium import World, make_world, trained_from

LIMIT = 1 << 30
SECONDS = 30  # for a process that imports everything; without the defence each of them takes for ever


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), members=3, threshold=2)


def limited(program: str, *arguments: object, first: str = "") -> str:
    """What a process says that may not take a GiB more than its imports do."""
    head = (
        f"{first}\nimport resource, sys\nfrom pathlib import Path\nfrom quorumark.errors import QuorumarkError\n"
        "from quorumark.model.suspect import read_suspect\nfrom quorumark.consortium.home import HomeFolder\n"
        "size = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (size + {LIMIT}, size + {LIMIT}))\n"
    )
    body = f"try:\n    {program}\n    print('accepted')\nexcept QuorumarkError as error:\n    print(error)\n"
    done = subprocess.run(
        [sys.executable, "-c", head + body, *map(str, arguments)],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


# --- suspects ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w.npy", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "it is no regular file" in limited("read_suspect(sys.argv[1])", tmp_path)


@pytest.mark.parametrize("name", ["w.npy", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_a_link_to_a_device_without_an_end_is_not_begun(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    assert "it is no regular file" in limited("read_suspect(sys.argv[1])", tmp_path)


@pytest.mark.parametrize("name", ["w.npy", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_a_folder_that_is_named_like_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(LayoutError, match="no regular file"):
        read_suspect(tmp_path)


def test_an_index_is_not_larger_than_an_index(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(1 << 40)  # a hole
    assert "too large to be an index" in limited("read_suspect(sys.argv[1])", tmp_path)


def test_a_shard_with_a_name_that_no_file_has(tmp_path: Path) -> None:
    body = {"weight_map": {"w": "x" * 300 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(body))
    with pytest.raises(LayoutError, match="File name too long"):
        read_suspect(tmp_path)


def test_millions_of_empty_tensors_are_not_read(tmp_path: Path) -> None:
    entry = '"dtype":"F32","shape":[0],"data_offsets":[0,0]'
    header = ("{" + ",".join(f'"{i}":{{{entry}}}' for i in range(300_000)) + "}").encode()
    path = tmp_path / "empty.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(LayoutError, match="more than 262,144 tensors"):
        read_suspect(path)
    path.write_bytes((1 << 50).to_bytes(8, "little") + header)
    with pytest.raises(LayoutError, match="header is too long"):
        read_suspect(path)


def test_a_zip_file_of_very_many_files_is_not_read(tmp_path: Path) -> None:
    path, entry = tmp_path / "many.npz", zipfile.ZipInfo("x")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry, b"")
    data = path.read_bytes()
    start, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    listed = data[start:end] * 400_000
    tail = bytearray(data[end:])
    tail[12:16] = len(listed).to_bytes(4, "little")
    path.write_bytes(data[:start] + listed + tail)
    with pytest.raises(LayoutError, match="too many files"):
        read_suspect(path)


def test_a_checkpoint_neither_runs_nor_allocates_what_it_is_told_to(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Runs:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    class Allocates:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
            return bytearray, (800 << 20,)

    # not ru_maxrss, which a new process takes over from the one that started it
    most = "next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))"
    said = f"try: read_suspect(sys.argv[1])\n    finally: print(int({most}.split()[1]) >> 10)"
    for thing, zipped in ((Runs(), True), (Runs(), False), (Allocates(), True), (Allocates(), False)):
        path = tmp_path / "model.pt"
        torch.save({"w": torch.ones(2, 2), "x": thing}, path, _use_new_zipfile_serialization=zipped)
        mebibytes, error = limited(said, path, first="import torch").splitlines()
        assert "holds more than tensors" in error
        assert int(mebibytes) < 800
    assert not (tmp_path / "ran").exists()


# --- names ------------------------------------------------------------------------------------------------


def test_what_a_file_is_called_is_not_signed(world: World) -> None:
    """The asker's own words must not come back as the members' signed subject."""
    said = world.save(world.marked, "stolen by Elm Ltd.safetensors")
    query = prepare(world.reference, said).query
    assert [file.name for file in query.files] == ["suspect.safetensors"]
    partials = [answer(*home, world.reference, world.suspect, query, approved=True) for home in world.homes]
    subject = json.loads(world.certified(query, partials).payload)["subject"]
    assert [entry["name"] for entry in subject] == ["suspect.safetensors", "openssf-model-signing"]
    crafted = replace(query, files=(replace(query.files[0], name=said.name),))
    with pytest.raises(EvidenceError, match="does not describe this suspect: files"):
        answer(*world.homes[0], world.reference, said, crafted, approved=True)


# --- ledgers and kept queries -----------------------------------------------------------------------------


def rewritten(world: World, **changes: Any) -> None:
    """The first member's ledger with another last line, and a head that fits it."""
    place = world.homes[0][0].only_consortium()
    *before, last = place.ledger_path.read_bytes().splitlines()
    line = canonical(json.loads(last) | changes)
    place.ledger_path.write_bytes(b"".join(entry + b"\n" for entry in (*before, line)))
    head = {"format": "quorumark-ledger-head/v1", "number": len(before) + 1, "head": digest("ledger entry", line).hex()}
    place.ledger_head_path.write_bytes(canonical(head))


@pytest.mark.parametrize(
    "changes",
    [
        {"previous": []}, {"previous": {}}, {"previous": None}, {"time": []}, {"time": "2026-99-99T99:99:99Z"},
        {"number": True}, {"x": []}, {"suspect": {}}, {"files": 1}, {"files": [[]]}, {"approved_by": None},
        {"approved_by": "somebody"}, {"kind": "refused"},
        {"x": "../../../../outside"},
    ],
)  # fmt: skip
def test_ledger_lines_of_other_types(world: World, changes: dict[str, Any]) -> None:
    home, unlock = world.homes[0]
    place = home.only_consortium()
    model = trained_from(world.marked, seed=7)
    query = prepare(world.reference, model).query
    answer(home, unlock, world.reference, model, query, approved=True)
    kept = place.ledger_path.read_bytes(), place.ledger_head_path.read_bytes()
    rewritten(world, **changes)
    with pytest.raises(RecordError, match=r"line .* of "):
        Ledger.open(place, world.manifest)
    place.ledger_path.write_bytes(kept[0])
    place.ledger_head_path.write_bytes(kept[1])
    Ledger.open(place, world.manifest)


@pytest.mark.parametrize(
    "reason",
    [
        "nobody has approved this query", {}, [], {"code": "guard.because"}, {"code": "finding.passed"}, {"code": []},
        {"code": "guard.not-approved", "note": 1}, {"code": "guard.budget"}, {"code": "guard.budget", "budget": "16"},
        {"code": "guard.forgotten-leaves", "count": 1, "leaves": [[]]},
    ],
)  # fmt: skip
def test_ledger_refusals_of_other_codes(world: World, reason: Any) -> None:
    home, unlock = world.homes[0]
    place = home.only_consortium()
    model = trained_from(world.marked, seed=17)
    with pytest.raises(GuardError):
        answer(home, unlock, world.reference, model, prepare(world.reference, model).query)
    ledger = Ledger.open(place, world.manifest)
    assert ledger.entries[-1]["reason"] == {"code": "guard.not-approved"}
    kept = place.ledger_path.read_bytes(), place.ledger_head_path.read_bytes()
    rewritten(world, reason=reason)
    with pytest.raises(RecordError, match=r"line .* of "):
        Ledger.open(place, world.manifest)
    place.ledger_path.write_bytes(kept[0])
    place.ledger_head_path.write_bytes(kept[1])


def test_a_kept_query_that_inflates(world: World) -> None:
    home, unlock = world.homes[1]
    model = trained_from(world.marked, seed=8)
    query = prepare(world.reference, model).query
    answer(home, unlock, world.reference, model, query, approved=True)
    place = home.only_consortium()
    path = place.queries_path / f"{query.x}.bin"
    packer, kept = zlib.compressobj(1), path.read_bytes()
    head = kept.split(b"\n", 1)[0] + b"\n"
    vector = zlib.decompress(kept[len(head) :])
    bomb = packer.compress(vector) + b"".join(packer.compress(bytes(1 << 26)) for _ in range(16)) + packer.flush()
    path.write_bytes(head + bomb)
    other = prepare(world.reference, trained_from(world.marked, seed=9))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ledger = Ledger.open(place, world.manifest)
    with pytest.raises(KeystoreError, match="not a whole vector"):
        check_query(other.query, other.form.x, world.manifest, ledger, AnswerRules(), approved=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB: the bomb is a GiB
    path.write_bytes(kept)
    check_query(other.query, other.form.x, world.manifest, ledger, AnswerRules(), approved=True)


# --- sealed files -----------------------------------------------------------------------------------------


def test_a_header_may_not_ask_for_much_work(tmp_path: Path) -> None:
    home = HomeFolder.create(tmp_path / "home", "Avon", Unlock.passphrase("correct horse"))
    path = home.path / "identity.sealed"
    data = path.read_bytes()
    length = int.from_bytes(data[:4], "big")
    header, rest = json.loads(data[4 : 4 + length]), data[4 + length :]
    for changes in ({"n": 1 << 20}, {"p": 16}, {"r": 1 << 20}, {"n": 1 << 40}):
        text = canonical(header | {"key": header["key"] | changes})
        path.write_bytes(len(text).to_bytes(4, "big") + text + rest)
        with pytest.raises(KeystoreError, match="more scrypt work than is allowed"):
            home.identity(Unlock.passphrase("correct horse"))


# --- backups ----------------------------------------------------------------------------------------------


@pytest.fixture
def backup(tmp_path: Path, world: World) -> Path:
    world.homes[2][0].backup(tmp_path / "backup.tar")
    return tmp_path / "backup.tar"


def refused(path: Path) -> None:
    target = path.with_name("restored")
    with pytest.raises(KeystoreError, match="is not a backup of a member's home, or is damaged"):
        HomeFolder.restore(path, target)
    assert not target.exists()


def with_entry(backup: Path, entry: tarfile.TarInfo, content: bytes = b"", form: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(backup, "a", format=form) as archive:
        archive.addfile(entry, io.BytesIO(content))
    return backup


def test_a_backup_is_a_plain_tar_file(backup: Path) -> None:
    plain = backup.read_bytes()
    for pack in (gzip.compress, lzma.compress):
        backup.write_bytes(pack(plain))
        refused(backup)
    for cut in (1, 511, 512, len(plain) // 2, len(plain) - tarfile.RECORDSIZE):
        backup.write_bytes(plain[:cut])
        refused(backup)
    backup.write_bytes(plain)
    assert HomeFolder.restore(backup, backup.with_name("whole")).card().name == "Cedar"


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CONTTYPE]
)
def test_a_backup_holds_files_only(backup: Path, kind: bytes) -> None:
    entry = tarfile.TarInfo("rules.json")
    entry.type, entry.linkname = kind, "/etc/passwd"
    refused(with_entry(backup, entry))


@pytest.mark.parametrize("name", ["/rules.json", "../rules.json", "consortia/../rules.json", "member.json", "x"])
def test_a_backup_holds_known_names_once(backup: Path, name: str) -> None:
    refused(with_entry(backup, tarfile.TarInfo(name)))


def test_a_sparse_file_in_a_backup(backup: Path) -> None:
    """512 bytes that say that they are 8 GiB, in both of the ways there are."""
    block = bytearray(tarfile.TarInfo("rules.json").tobuf(tarfile.GNU_FORMAT))
    block[156:157] = tarfile.GNUTYPE_SPARSE
    block[386:398] = b"%011o\0" % 0
    block[483:495] = b"77777777777\0"
    block[148:156] = b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:512]))
    plain = backup.read_bytes()
    backup.write_bytes(bytes(block[:512]) + plain)
    with tarfile.open(backup) as archive:
        assert archive.getmembers()[0].issparse()
        assert archive.getmembers()[0].size == 8**11 - 1
    refused(backup)
    backup.write_bytes(plain)
    entry = tarfile.TarInfo("rules.json")
    entry.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(8 << 30), "GNU.sparse.name": "rules.json"}
    refused(with_entry(backup, entry, form=tarfile.PAX_FORMAT))


def test_a_backup_may_not_fill_the_disk(backup: Path) -> None:
    """A record of a GiB, and a share that is larger than the disk, both as holes."""
    for name, size, text in (("rules.json", 1 << 30, "is not a backup"), ("share-0.sealed", 1 << 42, "no space")):
        entry = tarfile.TarInfo(name if name == "rules.json" else f"consortia/{'0' * 16}/{name}")
        entry.size = size
        plain = backup.read_bytes()
        with backup.open("wb") as file:
            file.write(plain[: -tarfile.RECORDSIZE] if plain.endswith(bytes(tarfile.RECORDSIZE)) else plain)
            end = len(plain.rstrip(b"\0")) // 512 * 512 + 512
            file.seek(end)
            file.write(entry.tobuf(tarfile.GNU_FORMAT))
            file.truncate(end + 512 + size + tarfile.RECORDSIZE)
        with pytest.raises(KeystoreError, match=text):
            HomeFolder.restore(backup, backup.with_name("restored"))
        assert not backup.with_name("restored").exists()
        backup.write_bytes(plain)


def test_a_model_folder_of_plain_files_is_still_read(tmp_path: Path) -> None:
    write_safetensors({"w": np.ones((2, 2), np.float32)}, tmp_path / "blob")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to(tmp_path / "blob")  # as Hugging Face's cache does
    assert set(read_suspect(tmp_path / "folder").tensors) == {"w"}
