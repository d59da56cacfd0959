"""A member's folder: its identity, and for each consortium the terms, the manifest and the sealed share.

    HOME/member.json                     the card: public, to be sent to the others
    HOME/identity.sealed                 the private keys
    HOME/key-file                        where the key file is that opens this home: the path only, never backed up
    HOME/rules.json                      what this member answers without asking a person (written by hand, optional)
    HOME/consortia/ID/terms.json         ID: the first 16 digits of the first terms' digest
    HOME/consortia/ID/ceremony.sealed    while a ceremony runs
    HOME/consortia/ID/finished.json      which health check this member finished last, and what it showed
    HOME/consortia/ID/signed.json        which successor of which manifest this member signed: never two of one
    HOME/consortia/ID/manifest.json      the current one, once setup is finished
    HOME/consortia/ID/history/….json     the manifests before it, by the first 16 digits of their digests
    HOME/consortia/ID/layout.json        public, with anchor.safetensors, groups.json, lora.json: what was agreed on
    HOME/consortia/ID/share-EPOCH.sealed
    HOME/consortia/ID/rounds/            what this member must not do twice in rounds of training (`consortium.memory`),
                                         and what an engine's node keeps (`node.journal`); in no backup
    HOME/consortia/ID/archive.bin        after a resharing: the genesis share, under keys that nobody holds alone
    HOME/consortia/ID/ledger.jsonl       what this member answered, refused and learnt in verifications, hash-chained
    HOME/consortia/ID/ledger.head        the hash of its last entry, so that a cut ledger is noticed
    HOME/consortia/ID/queries/….bin      the vectors x of the queries that were answered, by their digests

Folders have mode 0700. Nothing in it needs a network or a server.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from quorumark.canonical import canonical, parse
from quorumark.checks import DAMAGED
from quorumark.consortium.identity import Identity, verify_chain
from quorumark.consortium.keystore import SealedReader, Unlock, read_sealed, write_sealed
from quorumark.consortium.records import Card, Manifest, Terms
from quorumark.consortium.shares import ShareFile, ShareInfo
from quorumark.errors import CeremonyError, EvidenceError, KeystoreError, LayoutError, RecordError
from quorumark.files import only_one, replacing, write_private, write_shared

__all__ = ["ConsortiumFolder", "HomeFolder", "follow_back", "history_name"]

UNDER_WAY = (
    "another ceremony of this consortium (setup, check, refresh or reshare) is under way here: run its command with "
    "its own folder until it is done, or, if it cannot go on, quorumark setup discard"
)
_LARGEST_RECORD = 1 << 26
_MOST_ENTRIES = 1 << 17  # in a backup: manifests, and a vector for each answered query
_SIGNED = "quorumark-signed/v1"
Record = TypeVar("Record")
# what a home consists of, and all that a backup may hold
_KEPT = re.compile(
    r"member\.json|identity\.sealed|rules\.json|consortia/[0-9a-f]{16}/"
    r"(terms\.json|manifest\.json|history/[0-9a-f]{16}\.json|(history/)?stamps-[0-9a-f]{16}\.json|signed\.json"
    r"|share-[0-9]{1,9}\.sealed|archive\.bin"
    r"|ledger\.jsonl|ledger\.head|queries/[0-9a-f]{64}\.bin"
    r"|layout\.json|anchor\.safetensors|groups\.json|lora\.json)"
)
_PUBLIC = ("member.json", "manifest.json", "layout.json", "anchor.safetensors", "groups.json", "lora.json")


def read_file(path: Path, what: str, most: int = 0) -> bytes:
    """A small public file, or one of at most so many bytes. It may be anybody's: what has no end is not begun."""
    try:
        if not path.is_file():
            kind = "it is a folder" if path.is_dir() else "it is no regular file"
            problem = kind if path.exists() else "there is no such file"
            raise RecordError(f"cannot read {what} from {str(path)!r}: {problem}")
        if path.stat().st_size > max(_LARGEST_RECORD, most):
            raise RecordError(f"{str(path)!r} is too large to be {what}")
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {what} from {str(path)!r}: {error.strerror}") from None


def read_exchanged(path: Path, what: str, most: int = 0) -> bytes:
    """The same from a folder that others can write to: neither the file nor its folder may be a link."""
    for part in (path, path.parent):
        if part.is_symlink():
            raise RecordError(f"cannot read {what} from {str(path)!r}: {part.name!r} is a link")
    return read_file(path, what, most)


def read_array(path: Path, what: str) -> NDArray[Any]:
    """An array in numpy's format. It is mapped first: a header cannot ask for more than the file has."""
    try:
        if not path.is_file():
            raise RecordError(f"cannot read {what} from {str(path)!r}: there is no such file")
        return np.array(np.lib.format.open_memmap(path, mode="r"))
    except DAMAGED as error:
        raise RecordError(f"{str(path)!r} is not {what}, or is damaged ({type(error).__name__})") from None


def read_as(path: Path, what: str, parse: Callable[[bytes], Record]) -> Record:
    """A small public file as what it should be; whatever is wrong with it, the error names the file."""
    data = read_file(path, what)
    try:
        return parse(data)
    except (EvidenceError, LayoutError, RecordError) as error:
        raise type(error)(f"{str(path)!r} cannot be used: {error}") from None


class HomeFolder:
    """A member's folder on its own machine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.rules_path = self.path / "rules.json"
        self._key_file_path = self.path / "key-file"

    @classmethod
    def create(cls, path: str | os.PathLike[str], name: str, unlock: Unlock) -> HomeFolder:
        """Makes the folder with a new identity; refuses to touch one that is there."""
        home = cls(path)
        if (home.path / "identity.sealed").exists():
            raise KeystoreError(f"{str(home.path)!r} already holds an identity")
        identity = Identity.generate(name)
        home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.path.chmod(0o700)
        write_sealed(home.path / "identity.sealed", unlock, "identity", identity.to_secret_bytes(), {"name": name})
        write_shared(home.path / "member.json", identity.card().to_bytes())  # public: copies of it can be read
        return home

    def card(self) -> Card:
        return read_as(self.path / "member.json", "a member's card", Card.from_bytes)

    def identity(self, unlock: Unlock) -> Identity:
        path = self.path / "identity.sealed"
        name = str(SealedReader(path, None, "identity").about.get("name"))
        return Identity.from_secret_bytes(name, read_sealed(path, unlock, "identity"))

    def remember_key_file(self, path: str | os.PathLike[str]) -> None:
        """Where the file is that opens this home's secrets, so that nobody has to say it again: the path, no secret."""
        write_private(self._key_file_path, os.fsencode(Path(path).absolute()))

    def key_file(self) -> Path | None:
        """What `remember_key_file` was told."""
        if not self._key_file_path.exists():
            return None
        return Path(os.fsdecode(read_file(self._key_file_path, "the path of a key file")))

    def consortium(self, terms: Terms) -> ConsortiumFolder:
        """This member's folder for one consortium, made if need be."""
        folder = self.path / "consortia" / terms.digest().hex()[:16]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / "terms.json").exists():
            write_private(folder / "terms.json", terms.to_bytes())
        return ConsortiumFolder(folder)

    def consortia(self) -> list[ConsortiumFolder]:
        base = self.path / "consortia"
        return [ConsortiumFolder(p) for p in sorted(base.iterdir())] if base.is_dir() else []

    def only_consortium(self, which: str | None = None) -> ConsortiumFolder:
        """The consortium by the start of its id, or the only one there is."""
        found = [c for c in self.consortia() if which is None or c.path.name.startswith(which)]
        if len(found) != 1:
            known = ", ".join(f"{c.path.name} ({c.terms().name})" for c in self.consortia())
            if not known:
                raise RecordError(
                    f"{str(self.path)!r} holds no consortium yet: finish a setup, or name another folder with --home"
                )
            how_many = "several consortia" if which is None or found else f"no consortium {which!r}"
            raise RecordError(
                f"{str(self.path)!r} holds {how_many}: name one with --consortium, by the start of its id ({known})"
            )
        return found[0]

    def consortium_of(self, manifest: str, genesis: str = "") -> ConsortiumFolder | None:
        """The consortium that a manifest belongs to, by its digest, or by that of its first terms; None: no such."""
        for place in self.consortia():
            if genesis and genesis.startswith(place.path.name):
                return place
            files = (place.manifest_path, place.path / "history" / history_name(manifest))
            for path in (path for path in files if path.exists()):
                if read_as(path, "a manifest", Manifest.from_bytes).digest().hex() == manifest:
                    return place
        return None

    # --- backup ---

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def backup(self, target: str | os.PathLike[str], *, shares: bool = True) -> int:
        """All of it in one tar file, or all but the shares. Secrets stay sealed as they are; how many files went in."""
        # not a running ceremony's state: brought back later, it could open the same dealings a second time
        found = [p for p in self.path.rglob("*") if not p.is_symlink() and _KEPT.fullmatch(self._relative(p))]
        # nor a share of another epoch than the one in force
        current = {place.share_path() for place in self.consortia()}
        names = sorted(p for p in found if not p.name.startswith("share-") or (shares and p in current))
        if not shares:
            names = [p for p in names if p.name != "archive.bin"]
        if not names:
            raise KeystoreError(f"there is nothing to back up in {str(self.path)!r}")
        # GNU's format needs no extended headers for what is in a home, so that `restore` can refuse them
        with (
            replacing(Path(target)) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive,
        ):
            for path in names:
                archive.add(path, arcname=str(path.relative_to(self.path)), recursive=False)
        return len(names)

    @classmethod
    def restore(cls, source: str | os.PathLike[str], path: str | os.PathLike[str]) -> HomeFolder:
        """A home from its backup, into a folder that does not hold one yet."""
        home, what = cls(path), os.fspath(source)
        no_backup = KeystoreError(f"{what!r} is not a backup of a member's home, or is damaged")
        try:
            there = home.path.exists()
            if there and any(home.path.iterdir()):
                raise KeystoreError(f"{str(home.path)!r} is not empty: restore into a new folder")
            if Path(source).exists() and not Path(source).is_file():  # a pipe would be waited for
                raise no_backup
            with Path(source).open("rb") as file:
                if not _is_plain_tar(file):
                    raise no_backup
                file.seek(0)
                archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the file is closed
                members = archive.getmembers()
                names = [m.name for m in members]
                if not all(map(_is_kept, members)) or "identity.sealed" not in names or len(set(names)) < len(names):
                    raise no_backup
                _require_space(home.path, sum(m.size for m in members))
                try:
                    _unpack(archive, home.path)
                except BaseException:  # half a home would look like a whole one
                    for left in home.path.iterdir():
                        shutil.rmtree(left) if left.is_dir() else left.unlink()
                    if not there:
                        home.path.rmdir()
                    raise
        except (tarfile.TarError, ValueError):  # tarfile lets some of the latter through
            raise no_backup from None
        except OSError as error:
            raise KeystoreError(f"cannot restore {what!r} to {str(home.path)!r}: {error.strerror or error}") from None
        return home


def _is_plain_tar(file: BinaryIO) -> bool:
    """Whether a file is a tar file of nothing but files, whole, and of a sensible number of them.

    Its headers are looked at before tarfile acts on any: links, devices, sparse files (which take as much space as they
    say, not as they have) and extended headers (which can say anything) have types of their own. A name of more than
    100 characters has an entry before the file's.
    """
    size, place = os.fstat(file.fileno()).st_size, 0
    for _ in range(_MOST_ENTRIES):
        file.seek(place)
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE or not any(block):
            return place > 0 and len(block) == tarfile.BLOCKSIZE
        entry = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        named = entry.type == tarfile.GNUTYPE_LONGNAME and entry.size <= tarfile.BLOCKSIZE
        if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) and not named:
            return False
        place += tarfile.BLOCKSIZE * (1 + -(-entry.size // tarfile.BLOCKSIZE))
        if entry.size < 0 or place > size:
            return False
    return False


def _is_kept(entry: tarfile.TarInfo) -> bool:
    """Whether a home may hold such a file: by its name, and by its size where records have one."""
    small = entry.size <= _LARGEST_RECORD or entry.name.endswith((".sealed", ".bin", ".safetensors"))
    return entry.isfile() and not entry.issparse() and small and _KEPT.fullmatch(entry.name) is not None


def _require_space(folder: Path, size: int) -> None:
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if size > shutil.disk_usage(place).free:
        raise KeystoreError(f"the backup holds {size:,} bytes, for which {str(place)!r} has no space")


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in archive.getmembers():
        target = folder / entry.name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = archive.extractfile(entry)
        if content is None:
            raise tarfile.ReadError("not a file")
        with replacing(target, 0o644 if target.name in _PUBLIC else 0o600) as file:
            shutil.copyfileobj(content, file, 1 << 20)


class ConsortiumFolder:
    """One consortium in a member's home."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive_path = path / "archive.bin"
        self.ceremony_path = path / "ceremony.sealed"
        self.manifest_path = path / "manifest.json"
        self.ledger_path = path / "ledger.jsonl"
        self.ledger_head_path = path / "ledger.head"
        self.queries_path = path / "queries"
        self.memory_path = path / "rounds" / "memory" / "rounds.sealed"

    def terms(self) -> Terms:
        return read_as(self.path / "terms.json", "a consortium's terms", _terms)

    def share_path(self, epoch: int | None = None) -> Path:
        """Where the share of an epoch lies; of the current one by default.

        The manifest decides which share counts, so one file's replacement moves a member to the next epoch.
        """
        if epoch is None:
            epoch = self._current().epoch if self.manifest_path.exists() else 0
        return self.path / f"share-{epoch}.sealed"

    def _current(self) -> Manifest:
        if not self.manifest_path.exists():
            raise RecordError(
                f"there is no manifest at {str(self.manifest_path)!r}: the setup of this consortium is not finished "
                "here; run quorumark setup dkg (or accept) until it says finished"
            )
        return read_as(self.manifest_path, "a consortium's manifest", _manifest)

    def manifest(self) -> Manifest:
        """The current manifest; every signature since the first one is checked."""
        return self.chain()[-1]

    def chain(self) -> list[Manifest]:
        """All manifests from the first to the current one, checked."""
        current = self._current()
        chain = follow_back(current, self.path / "history")
        if chain[0].terms.digest() != self.terms().digest():
            raise RecordError(f"{str(self.manifest_path)!r} is not a manifest of this consortium")
        return chain

    def adopt(self, chain: Sequence[Manifest]) -> None:
        """Makes the last of a checked chain the current manifest."""
        self.check_followed_by(chain)
        for manifest in chain[:-1]:
            write_shared(self.path / "history" / history_name(manifest.digest().hex()), manifest.to_bytes())
        write_shared(self.manifest_path, chain[-1].to_bytes())  # public: copies of it can be read

    def check_followed_by(self, chain: Sequence[Manifest]) -> None:
        """A chain must hold the manifest that is in force here: nobody is taken back, or to another branch."""
        if self.manifest_path.exists() and self._current().digest() not in {link.digest() for link in chain}:
            raise RecordError("these manifests do not follow the one that this member holds")

    def remember_signed(self, predecessor: str, successor: str) -> None:
        """Before a signature leaves: of each manifest (or of the first terms) this member signs one successor."""
        signed = self._signed()
        if signed.get(predecessor, successor) != successor:
            raise CeremonyError(
                "this member has signed another successor of the same manifest; if that one never came into force, and "
                "never can, run: quorumark setup discard --although-signed",
                code="ceremony.signed-already",
            )
        if predecessor not in signed:
            write_private(
                self._signed_path, canonical({"format": _SIGNED, "signed": {**signed, predecessor: successor}})
            )

    def has_signed(self, predecessor: str) -> bool:
        return predecessor in self._signed()

    def pending(self) -> set[str]:
        """What this member signed that is not in force here: the digests of such successors."""
        known = {link.digest().hex() for link in self.chain()} if self.manifest_path.exists() else set()
        return set(self._signed().values()) - known

    def forget_signed(self, successors: Collection[str]) -> None:
        left = {before: after for before, after in self._signed().items() if after not in successors}
        write_private(self._signed_path, canonical({"format": _SIGNED, "signed": left}))

    @property
    def _signed_path(self) -> Path:
        return self.path / "signed.json"

    def _signed(self) -> dict[str, str]:
        if not self._signed_path.exists():
            return {}
        signed = parse(read_file(self._signed_path, "what was signed"), _SIGNED, "what was signed").get("signed")
        if not isinstance(signed, dict) or not all(isinstance(v, str) for v in signed.values()):
            raise RecordError(f"{str(self._signed_path)!r} is damaged")
        return signed

    def under_way(self) -> str:
        """What is not finished here, in words; "" if nothing is."""
        if self.ceremony_path.exists():
            return "a ceremony (setup, check, refresh or reshare)"
        if (self.path / "recovery.sealed").exists() or any(self.path.glob("help-*.sealed")):
            return "a recovery"
        return "an amendment that this member signed" if self.pending() else ""

    def forget(self) -> None:
        """Erases all that this member has of the consortium, secrets first. Nobody else's share changes."""
        with only_one(self.path):
            for path in (*self.path.rglob("*.sealed"), self.archive_path):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.path)

    def check_idle(self) -> None:
        """No ceremony may be under way where the manifest is to change."""
        if self.ceremony_path.exists():
            raise CeremonyError(UNDER_WAY, code="ceremony.under-way")

    def tidy(self) -> None:
        """Removes shares of earlier epochs than the current one: t kept copies of one still give the key.

        Only once the current one was checked, and all members are known to have theirs.
        """
        current = self._current().epoch
        if self.share_path(current).exists():
            for epoch in range(current):
                self.share_path(epoch).unlink(missing_ok=True)

    def check_share(self) -> Path:
        """Where the current share lies; it must be there."""
        if not self.terms().has_key:
            raise KeystoreError(
                f"the members of {self.terms().name!r} agreed on sums alone (setup 'sums'): there is no key, and "
                "nobody has a share of one"
            )
        path = self.share_path()
        if not path.exists():
            raise KeystoreError(
                f"this member's share is not at {str(path)!r}: bring it back from a backup, or get it with quorumark "
                "share recover"
            )
        return path

    def share(self, unlock: Unlock) -> ShareFile:
        return ShareFile(self.check_share(), unlock)

    def verify_share(self, unlock: Unlock) -> ShareFile:
        """Opens the share and checks every bit of it against the manifest."""
        manifest, share = self.manifest(), self.share(unlock)
        path = str(self.share_path(manifest.epoch))
        if share.info != ShareInfo.under(manifest, share.info.point, share.info.block):
            raise KeystoreError(f"{path!r} belongs to another consortium or epoch than the manifest")
        own = read_as(self.path.parent.parent / "member.json", "a member's card", Card.from_bytes)
        if share.info.point != manifest.terms.point_of(own.ed25519):
            raise KeystoreError(f"{path!r} is the share of another member")
        if share.root().hex() != manifest.roots[share.info.point - 1]:
            raise KeystoreError(f"{path!r} is not the share that the manifest's root commits to")
        return share


@lru_cache(maxsize=32)
def _manifest(data: bytes) -> Manifest:
    """Bytes that were read once mean the same again: every message of a round begins with the same manifest."""
    return Manifest.from_bytes(data)


@lru_cache(maxsize=32)
def _terms(data: bytes) -> Terms:
    return Terms.from_bytes(data)


def history_name(digest: str) -> str:
    """The file of an earlier manifest."""
    return f"{digest[:16]}.json"


def follow_back(manifest: Manifest, *folders: Path) -> list[Manifest]:
    """The chain that ends with a manifest, from the files of its predecessors, each in the first of the folders that
    has it; every link is checked."""
    chain = [manifest]
    while chain[0].predecessor is not None:
        wanted = chain[0].predecessor
        paths = [folder / history_name(wanted) for folder in folders]
        path = next((path for path in paths if path.exists()), paths[0])
        before = read_as(path, "an earlier manifest", _manifest)
        if before.digest().hex() != wanted:
            raise RecordError(f"{history_name(wanted)!r} is not the manifest that its successor names")
        chain.insert(0, before)
    verify_chain(chain)
    return chain
