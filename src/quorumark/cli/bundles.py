"""Options that belong together, as one parameter of a command.

    @app.command("sign")
    @bundled
    def sign(certificate: …, here: Here, keys: Keys, json: Json = False) -> None:

A bundle is a dataclass whose fields are options. `bundled` puts the fields in the parameter's place, so that typer
shows and reads them like any others; the command gets the bundle.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from quorumark.cli.options import DEFAULT_HOME, HomeOption, answered

if TYPE_CHECKING:
    from quorumark.consortium.home import ConsortiumFolder, HomeFolder
    from quorumark.consortium.keystore import Unlock
    from quorumark.setup.waiting import Progress
    from quorumark.verify.reference import Reference

__all__ = ["AgreedFiles", "Here", "Keys", "Waiting", "bundled"]


@dataclass(frozen=True)
class Here:
    """Which member this is, and which of its consortia is meant."""

    home: HomeOption = DEFAULT_HOME
    consortium: Annotated[str | None, typer.Option(help="The start of its id, if there are several.")] = None

    @property
    def member(self) -> HomeFolder:
        from quorumark.consortium.home import HomeFolder

        return HomeFolder(self.home)

    @property
    def folder(self) -> ConsortiumFolder:
        """The member's folder for the consortium."""
        return self.member.only_consortium(self.consortium)

    def folder_for(self, manifest: str) -> ConsortiumFolder:
        """The same for a query or a certificate, which names a manifest by its digest."""
        found = None if self.consortium is not None else self.member.consortium_of(manifest)
        return self.folder if found is None else found

    def folder_unless(self, manifest: Path | None) -> ConsortiumFolder | None:
        """The same for a manifest's file, or None if this is no member's home, or not that consortium's: anybody may
        prepare and combine."""
        from quorumark.consortium.home import read_as
        from quorumark.consortium.records import Manifest

        if manifest is None or self.consortium is not None:
            return self.folder
        if not (self.home / "identity.sealed").exists():
            return None
        if not manifest.is_file():
            return self.folder  # what is wrong with it is said when it is read
        there = read_as(manifest, "a consortium's manifest", Manifest.from_bytes)
        return self.member.consortium_of(there.digest().hex(), there.genesis.terms)


@dataclass(frozen=True)
class Keys:
    """What opens the member's secrets.

    Never from the command line or the environment, where other processes can see it. Where a key file is may be said
    once: `member init` writes its path, and no secret, into the home.
    """

    key_file: Annotated[
        Path | None,
        typer.Option(help="A file that opens this member's secrets (mode 0600); by default the one of `member init`."),
    ] = None
    passphrase_file: Annotated[
        Path | None, typer.Option(help="A file whose first line is the passphrase (mode 0600).")
    ] = None

    def unlock(self, home: Path, *, new: bool = False) -> Unlock:
        """A key file, a passphrase from a file, the key file that the home remembers, or a passphrase that is asked
        for."""
        from quorumark.consortium.home import HomeFolder
        from quorumark.consortium.keystore import Unlock
        from quorumark.errors import InputError

        if self.key_file is not None and self.passphrase_file is not None:
            raise InputError("--key-file and --passphrase-file", "exclude each other")
        if self.key_file is not None:
            if new and not self.key_file.exists():
                Unlock.new_key_file(self.key_file)
            return Unlock.key_file(self.key_file)
        if self.passphrase_file is not None:
            return Unlock.passphrase_file(self.passphrase_file)
        remembered = None if new else HomeFolder(home).key_file()
        if remembered is not None:
            if not remembered.exists():
                raise InputError("--key-file", f"must name this home's key file: it is not at {str(remembered)!r}")
            return Unlock.key_file(remembered)
        if not new and not (home / "identity.sealed").exists():
            raise InputError("--home", "must be a member's home, which quorumark member init makes", str(home))
        if not sys.stdin.isatty():
            raise InputError("--key-file or --passphrase-file", "must be given where nobody can be asked")
        return Unlock.passphrase(answered(lambda: typer.prompt("passphrase", hide_input=True, confirmation_prompt=new)))


@dataclass(frozen=True)
class Waiting:
    """How long a member's command goes on in a ceremony in which others take part too."""

    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Go on until it is finished, or do what can be done now and stop."),
    ] = True
    timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Wait for others no longer than so many seconds: exit code 3. Run again, it goes on."),
    ] = None

    def until_finished(self, visit: Callable[[], Progress], name: str = "") -> Progress:
        """Visits until the ceremony is finished, and shows who is awaited, by whom if `name` says it; with --no-wait it
        is one visit."""
        from quorumark.cli.waiting import wait_visibly
        from quorumark.errors import InputError

        if not self.wait and self.timeout is not None:
            raise InputError("--timeout", "is for a command that waits: leave out --no-wait")
        return wait_visibly(visit, self.timeout, name) if self.wait else visit()


@dataclass(frozen=True)
class AgreedFiles:
    """Files that members agreed on, where they are not beside the manifest."""

    layout: Annotated[Path | None, typer.Option(help="layout.json; by default the one beside the manifest.")] = None
    anchor: Annotated[
        Path | None, typer.Option(help="The public anchor model; by default anchor.safetensors beside the manifest.")
    ] = None
    groups: Annotated[
        Path | None, typer.Option(help="The agreed groups; by default groups.json beside the manifest.")
    ] = None
    factors: Annotated[Path | None, typer.Option(help="The agreed factors; by default lora.json beside it.")] = None
    base: Annotated[
        Path | None,
        typer.Option(help="An adapter's public base model; by default base.safetensors or base/ beside it."),
    ] = None

    def reference(self, manifest: Path, progress: Any = None) -> Reference:
        """All that a suspect is compared with."""
        from quorumark.verify.reference import Reference

        files = self.layout, self.anchor, self.groups, self.factors, self.base
        return Reference.read(manifest, *files, progress=progress)

    def are_there(self, manifest: Path) -> bool:
        """Whether the layout and the anchor are named, or beside the manifest."""
        from quorumark.verify.reference import ANCHOR, LAYOUT

        named = self.layout is not None or self.anchor is not None
        return named or ((manifest.parent / LAYOUT).exists() and (manifest.parent / ANCHOR).exists())


def bundled(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer must see it: with the fields of its bundles as options."""
    hints = get_type_hints(command, include_extras=True)
    bundles: dict[str, type] = {}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            bundles[parameter.name] = kind
            parameters += _options_of(kind)
        else:
            parameters.append(
                parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY)
            )  # order is typer's affair

    def called(**given: Any) -> None:
        for name, kind in bundles.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def _options_of(bundle: type) -> list[inspect.Parameter]:
    hints = get_type_hints(bundle, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(bundle)
    ]
