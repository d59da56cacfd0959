"""`quorumark consortium …`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quorumark.cli.bundles import Here, Keys, Waiting, bundled
from quorumark.cli.options import DEFAULT_HOME, From, HomeOption, Json, answered, awaited

if TYPE_CHECKING:
    from quorumark.align.groups import Groups
    from quorumark.consortium.records import Terms
    from quorumark.consortium.strength import Strength
    from quorumark.model.layout import ModelLayout

app = typer.Typer(
    help="What the members agree on: terms before the key exists, the manifest after, and its amendments.",
    no_args_is_help=True,
)


@app.command("create")
def create(
    name: Annotated[str, typer.Option(help="The consortium's name.")],
    threshold: Annotated[int, typer.Option(help="t: how many members it takes.")],
    model: Annotated[Path, typer.Option(help="The public initial model (.safetensors): layout and anchor.")],
    out: Annotated[Path, typer.Option(help="The folder to write terms.json, layout.json and the anchor to.")],
    member: Annotated[
        list[str] | None, typer.Option(help="CARD.json or CARD.json:EXAMPLES; once for each, in order.")
    ] = None,
    room: Annotated[
        Path | None, typer.Option(help="Instead of --member: a home; all who joined its room, as they said themselves.")
    ] = None,
    setup: Annotated[
        str,
        typer.Option(
            help="dkg (nobody ever knows the key), dealer, paper (the published protocol, which leaks), or sums: no "
            "key and no mark; secure aggregation alone."
        ),
    ] = "dkg",
    key: Annotated[str, typer.Option(help="rademacher or gaussian.")] = "rademacher",
    max_coordinates: Annotated[int | None, typer.Option(help="Carry on a public sample of this many.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Glob of tensors that may carry; may be repeated.")] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Glob of tensors that must not, besides embeddings.")
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            help="Coupled channels for alignment, which cannot be added later: what `quorumark groups` wrote, or, with "
            "--example, FILE.py:FUNCTION that gives the module, to find them now."
        ),
    ] = None,
    example: Annotated[
        list[str] | None,
        typer.Option(help="With --groups FILE.py:FUNCTION: the shape of an input, as `quorumark groups` takes it."),
    ] = None,
    without_alignment: Annotated[
        bool, typer.Option("--without-alignment", help="Do without groups: renumbered channels will hide the mark.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(help="Where the model is a LoRA adapter: the public base model, a file or a folder."),
    ] = None,
    strength: Annotated[
        list[str] | None,
        typer.Option(
            help="How strong the mark is: NAME=VALUE, like lr=cosine:50 or rho=0.1 (docs/strength.md); may be "
            "repeated. What is left out is chosen for --rounds; without that, rho=0.05, c_max=0.03."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How many rounds you will train: how strong the mark must be depends on it.")
    ] = None,
    target_z: Annotated[
        float | None,
        typer.Option(
            help="What z a verification should find after those; 12 by default. Without --rounds, the plan says how "
            "many it takes."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE: z (6 by default), budget, effective, attempts, cohort, optimiser (such as "
            "fedadam:eta=0.01; docs/optimisers.md), or sums: checked (the default: members check what the server "
            "announces) or unchecked; may be repeated."
        ),
    ] = None,
    statistic: Annotated[str, typer.Option(help="What a suspect is tested by.")] = "balanced-anchor/v1",
) -> None:
    """Write the terms that all members will sign.

    With --base the model is the initial adapter, and its factors carry; groups, if any, are the base model's.
    """
    import datetime

    from quorumark.align.groups import Groups
    from quorumark.align.lora import base_layout
    from quorumark.cli.groups import find_groups
    from quorumark.consortium.hiding import check_roster
    from quorumark.consortium.home import read_as
    from quorumark.consortium.policy import Policy
    from quorumark.consortium.records import (
        Member,
        Terms,
        anchor_of,
    )
    from quorumark.consortium.strength import Strength
    from quorumark.errors import InputError
    from quorumark.files import write_shared
    from quorumark.model.layout import DEFAULT_EXCLUDE, ModelLayout
    from quorumark.model.suspect import read_suspect
    from quorumark.room.people import read_people
    from quorumark.room.place import Place
    from quorumark.verify.public import copy_public
    from quorumark.verify.reference import describe_lora

    if (out / "terms.json").exists():
        raise InputError("--out", "must not hold terms already", str(out))
    layout = ModelLayout.of(
        model, include=include or ("*",), exclude=[*DEFAULT_EXCLUDE, *(exclude or ())], max_coordinates=max_coordinates
    )
    anchor = anchor_of(layout, model)
    if bool(member) == (room is not None):
        raise InputError("--member", "must be given once for each member, or --room instead")
    people = read_people(room) if room is not None else [_card(text) for text in member or ()]
    roster = [
        Member(point, card.name, card.ed25519, card.x25519, examples)
        for point, (card, examples) in enumerate(people, 1)
    ]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    digests: dict[str, Any] = {
        "layout": layout.digest(),
        "anchor": anchor,
        "buffers": layout.buffers_digest(model).hex(),
    }
    coupled, unknown = None, list[str]()
    if example:
        coupled, _, unknown = find_groups("--groups", "" if groups is None else str(groups), example)
    elif groups is not None:
        coupled = read_as(groups, "a model's groups", Groups.from_bytes)
    if setup != "sums" and not coupled and not without_alignment:
        given = "none" if coupled is None else f"{groups} without a group"
        raise InputError("--groups", "must name what `quorumark groups` wrote, or pass --without-alignment", given)
    adapted = None if base is None else read_suspect(base)
    factors = None if adapted is None else describe_lora(layout, adapted)
    if factors is not None:
        factors.check_anchor(read_suspect(model))
    agreed = _policy(policy)
    if coupled is not None:
        coupled.check(layout if adapted is None else base_layout(adapted))
        agreed["groups"] = coupled.digest()
    if factors is not None:
        agreed["lora"] = factors.digest()
    if setup == "sums" and (rounds is not None or target_z is not None or strength or coupled or factors):
        rule = "must come without --rounds, --target-z, --strength, --groups and --base, which are for a mark"
        raise InputError("--setup sums", rule)
    chosen, expected = (
        _planned(layout.coordinates, rounds, target_z, _pairs("--strength", strength))
        if setup != "sums"
        else (Strength.of({}, layout.coordinates), ["no key: secure aggregation alone"])
    )
    digests |= {
        "policy": Policy.of(agreed),
        "strength": chosen,
        "statistic": _statistic(statistic),
    }
    terms = Terms(
        name, threshold, tuple(roster), coordinates=layout.coordinates, created=now, key=key, setup=setup, **digests
    )
    check_roster(terms)
    if setup == "dkg":
        from quorumark.setup.dkg import check_terms

        check_terms(terms)
    elif setup == "paper":
        from quorumark.setup.paper import check_paper_terms

        check_paper_terms(terms)
    elif setup == "sums":
        from quorumark.setup.sums import check_sums_terms

        check_sums_terms(terms)
    write_shared(out / "layout.json", layout.to_bytes())
    if coupled is not None:
        write_shared(out / "groups.json", coupled.to_bytes())
    if factors is not None:
        write_shared(out / "lora.json", factors.to_bytes())
    if model.suffix == ".safetensors":
        copy_public(model, out / "anchor.safetensors")
    write_shared(out / "terms.json", terms.to_bytes())  # last: without it nothing was made
    typer.echo(
        f"{name}: {threshold} of {terms.members} members, {terms.coordinates:,} coordinates\n"
        f"terms {terms.digest().hex()}\nwritten to {out}; every member should compare this digest"
    )
    covered = _coverage(coupled, layout if adapted is None else base_layout(adapted)) if terms.has_key else []
    typer.echo("\n".join([*unknown, *covered, *expected, *_optimised(terms)]))
    if room is not None:
        Place(room).hand_over(terms.digest().hex(), out)
        typer.echo("your agent proposes it to all who are in the room")


def _planned(
    coordinates: int, rounds: int | None, target_z: float | None, given: dict[str, str]
) -> tuple[Strength, list[str]]:
    """The strength for so many rounds, and what to expect of it in plain words."""
    from quorumark.consortium.plan import TARGET_Z, Plan, unplanned
    from quorumark.consortium.strength import Strength
    from quorumark.errors import InputError

    if rounds is None and target_z is None:
        chosen = Strength.of(given, coordinates)
        return chosen, [f"WARNING: {unplanned(chosen, coordinates).text}: --rounds, or --target-z alone"]
    if "rounds" in given:
        raise InputError("--strength", "must not set rounds: pass --rounds", given["rounds"])
    plan = Plan.propose(coordinates, rounds, target_z=TARGET_Z if target_z is None else target_z, strength=given)
    return Strength.of(plan.strength, coordinates), plan.lines()


def _expected(terms: Terms) -> list[str]:
    """What z to expect of terms, if they say for how many rounds."""
    from quorumark.consortium.plan import Plan, unplanned

    if not terms.strength.rounds:
        return [unplanned(terms.strength, terms.coordinates).text, *_optimised(terms)]
    return [*Plan.of(terms.strength, terms.coordinates, terms.strength.rounds).lines(), *_optimised(terms)]


def _optimised(terms: Terms) -> list[str]:
    """A plan's figures were measured without a server optimiser."""
    if terms.policy.optimiser is None or not terms.has_key:
        return []
    return [
        "that is for FedAvg: with a server optimiser less of the mark arrives; the forecast in each round says how much"
    ]


def _coverage(groups: Groups | None, layout: ModelLayout) -> list[str]:
    """How much of the mark can be aligned, in plain words."""
    from quorumark.align.coverage import WITHOUT, Coverage

    return [WITHOUT] if groups is None or not groups else Coverage.of(groups, layout).lines()


def _coverage_beside(folder: Path, terms: Terms) -> list[str]:
    """The same from the files beside terms or a manifest, if they are those that the terms name."""
    from quorumark.align.coverage import WITHOUT
    from quorumark.align.groups import Groups
    from quorumark.consortium.home import read_as
    from quorumark.model.layout import ModelLayout

    if terms.policy.groups is None:
        return [WITHOUT]
    if not (folder / "groups.json").exists() or not (folder / "layout.json").exists():
        return ["groups.json and layout.json are not beside this file: what they cover is not shown"]
    groups = read_as(folder / "groups.json", "a model's groups", Groups.from_bytes)
    layout = read_as(folder / "layout.json", "a layout", ModelLayout.from_bytes)
    if groups.digest() != terms.policy.groups or layout.digest() != terms.layout:
        return ["groups.json or layout.json beside this file is not what the terms name: what is covered is not shown"]
    return _coverage(groups, layout)


def _reached(file: Path) -> list[str]:
    """Of a manifest in a member's home: what a verification of the last model that it accepted should find."""
    from quorumark.consortium.home import ConsortiumFolder
    from quorumark.errors import QuorumarkError
    from quorumark.node.standing import standing
    from quorumark.round.outlook import will_pass

    place = ConsortiumFolder(file.parent)
    if not place.manifest_path.is_file() or not place.manifest_path.samefile(file):
        return []
    try:
        found = standing(place)
    except QuorumarkError as error:
        return [f"what its last run came to cannot be read: {error}"]
    if found is None:
        return []
    return [f"this member's last model: {will_pass(found[1], place.terms().policy.z, found[0])}"]


@app.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="terms.json, manifest.json or dealing.json")], json: Json = False
) -> None:
    """Show terms or a manifest in plain words."""
    from rich.table import Table

    from quorumark.cli.console import make_console
    from quorumark.consortium.policy import Policy

    terms, manifest = _read(file)
    if json:
        typer.echo(file.read_text())
        return
    console = make_console()
    console.print(f"{terms.name}: any {terms.threshold} of {terms.members} members; made {terms.created}")
    console.print(
        f"key {terms.key}, setup {terms.setup}, {terms.coordinates:,} coordinates, statistic {terms.statistic}"
        if terms.has_key
        else "no key: secure aggregation alone (setup sums)"
    )
    console.print(f"terms    {terms.digest().hex()}\nlayout   {terms.layout}\nanchor   {terms.anchor}")
    for what in Policy.DIGESTS:
        if (digest := getattr(terms.policy, what)) is not None:
            console.print(f"{what:<8} {digest}")
    titled = {"strength": terms.strength.as_dict()} if terms.has_key else {}
    for title, settings in {**titled, "policy": terms.policy.as_dict()}.items():
        shown = [f"{key}={value}" for key, value in sorted(settings.items()) if key not in Policy.DIGESTS]
        console.print(f"{title:<8} {' '.join(shown)}")
    for line in [*_expected(terms), *_coverage_beside(file.parent, terms)] if terms.has_key else ():
        console.print(line)
    for line in _reached(file):
        console.print(line)
    if manifest is not None:
        console.print(f"manifest {manifest.digest().hex()}, epoch {manifest.epoch}")
    table = Table("point", "member", "examples", "signs with", "signed")
    for member in terms.roster:
        signed = "" if manifest is None else ("yes" if member.point in manifest.signatures else "no")
        table.add_row(str(member.point), member.name, f"{member.examples:,}", member.ed25519[:16] + "…", signed)
    console.print(table)


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="manifest.json")],
    history: Annotated[
        Path | None, typer.Option(help="The folder with the manifests before it; by default the one beside it.")
    ] = None,
) -> None:
    """Check a manifest: every member's signature, and every step since the first one."""
    from quorumark.consortium.home import follow_back
    from quorumark.errors import RecordError

    terms, manifest = _read(file)
    if manifest is None:
        raise RecordError(f"{str(file)!r} holds terms: there is nothing signed in it yet")
    chain = follow_back(manifest, history or file.parent / "history")
    after = len(chain) - 1
    steps = f", {after} step{'s' * (after > 1)} after the first one, each signed by its members" if after else ""
    typer.echo(
        f"{terms.name}: the manifest is sound and signed by all {terms.members} members{steps}\n"
        f"{manifest.digest().hex()}, epoch {manifest.epoch}, first {chain[0].digest().hex()}"
    )


@app.command("amend", short_help="Write new terms that follow the present ones.")
@bundled
def amend(
    out: Annotated[Path, typer.Option(help="The file to write the new terms to; all members must agree on it.")],
    examples: Annotated[list[str] | None, typer.Option(help="POINT=NUMBER: a member's new number of examples.")] = None,
    replace: Annotated[list[str] | None, typer.Option(help="POINT=CARD.json: new keys for old, stolen ones.")] = None,
    remove: Annotated[list[int] | None, typer.Option(help="POINT: a member who leaves.")] = None,
    add: Annotated[list[str] | None, typer.Option(help="CARD.json or CARD.json:EXAMPLES: a new member.")] = None,
    threshold: Annotated[int | None, typer.Option(help="Another threshold.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, like z=7; also budget, effective, attempts, cohort, sums.")
    ] = None,
    strength: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, like c_max=0.08 or rounds=60: how strong the mark is from the next round on."),
    ] = None,
    anchor: Annotated[Path | None, typer.Option(help="The model after the warm-up rounds (.safetensors).")] = None,
    layout: Annotated[Path | None, typer.Option(help="layout.json, with --anchor.")] = None,
    *,
    here: Here,
) -> None:
    """Write new terms that follow the present ones, and say what must be done to bring them into force."""
    from quorumark.consortium.hiding import check_roster
    from quorumark.consortium.home import read_as
    from quorumark.consortium.records import Card
    from quorumark.errors import InputError
    from quorumark.files import write_shared
    from quorumark.setup.amend import changes, needs_new_shares, propose

    def pairs(option: str, texts: list[str] | None) -> dict[str, str]:
        found = _pairs(option, texts, "POINT")
        if not all(map(str.isdecimal, found)):
            raise InputError(option, "must be like POINT=VALUE", ", ".join(texts or ()))
        return found

    if out.exists():
        raise InputError("--out", "must not exist yet", str(out))
    current = here.folder.manifest()
    before = current.terms
    numbers = pairs("--examples", examples)
    if not all(map(str.isdecimal, numbers.values())):
        raise InputError("--examples", "must be like POINT=NUMBER", ", ".join(examples or ()))
    terms = propose(
        before,
        threshold=threshold,
        examples={int(point): int(number) for point, number in numbers.items()},
        replaced={
            int(point): read_as(Path(path), "a member's card", Card.from_bytes)
            for point, path in pairs("--replace", replace).items()
        },
        removed=remove or (),
        added=[_card(text) for text in add or ()],
        policy=_policy(policy),
        strength=_pairs("--strength", strength),
        anchor=None if anchor is None else _anchor(anchor, layout, before.layout),
    )
    found = changes(terms, before)
    if not found:
        raise InputError("the options", "must change something")
    if examples or remove or add or threshold is not None:
        check_roster(terms)
    write_shared(out, terms.to_bytes())
    what = "share reshare" if needs_new_shares(terms, before) else "consortium sign"
    typer.echo("\n".join([*found, *(_expected(terms) if strength else ())]))
    typer.echo(
        f"terms {terms.digest().hex()}\nwritten to {out}; once all agree, every member of the new terms runs: "
        f"quorumark {what} --terms … --folder …\nwho is new, or has new keys, adds: --from {current.digest().hex()}"
    )


@app.command("sign")
@bundled
def sign_amendment(
    terms: Annotated[Path, typer.Option(help="The new terms, from `consortium amend`, as agreed.")],
    folder: Annotated[Path, typer.Option(help="The folder to exchange signatures through.")],
    pinned: From = None,
    *,
    here: Here,
    keys: Keys,
    waiting: Waiting,
) -> None:
    """Sign an amendment: new terms, the same shares. It comes into force here once all have signed."""
    from quorumark.consortium.home import read_as
    from quorumark.consortium.records import Terms
    from quorumark.setup.amend import changes, sign
    from quorumark.setup.chain import find_consortium

    member = here.member
    agreed = read_as(terms, "a consortium's terms", Terms.from_bytes)
    ours = None if pinned is not None else find_consortium(member, agreed, here.consortium)
    if ours is not None and ours.manifest_path.exists():
        typer.echo("\n".join(changes(agreed, ours.manifest().terms)) or "in force already")
    opened = keys.unlock(here.home)
    progress = waiting.until_finished(lambda: sign(member, opened, agreed, folder, ours, pinned))
    manifest = progress.manifest
    if manifest is None:
        typer.echo(f"{awaited(progress)}; run this again when they have signed")
        return
    typer.echo(f"in force: manifest {manifest.digest().hex()}, epoch {manifest.epoch}")
    ours = find_consortium(member, agreed, here.consortium)
    if ours is None or not ours.share_path().exists():
        typer.echo("this member's share is not here: get it with quorumark share recover")


@app.command("update")
def update_manifest(
    manifest: Annotated[Path, typer.Option(help="A later manifest that this member missed.")],
    history: Annotated[Path | None, typer.Option(help="The manifests before it; by default beside it.")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Take over a later manifest, after an old backup was restored. The share must then be recovered."""
    from quorumark.consortium.home import HomeFolder, read_as
    from quorumark.consortium.records import Manifest
    from quorumark.setup.amend import update

    later = read_as(manifest, "a consortium's manifest", Manifest.from_bytes)
    ours = update(HomeFolder(home), later, history or manifest.parent / "history")
    there = "" if ours.share_path().exists() else "; its share must be recovered: quorumark share recover"
    typer.echo(f"in force: manifest {later.digest().hex()}, epoch {later.epoch}{there}")


@app.command("forget")
@bundled
def forget(
    although_under_way: Annotated[
        bool,
        typer.Option("--although-under-way", help="Even while a ceremony is not finished: others wait."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    *,
    here: Here,
) -> None:
    """Erase all that this member has of a consortium: its share, its ledger, the manifests. The others keep theirs."""
    import sys

    from quorumark.errors import CeremonyError, InputError

    ours = here.folder
    name, threshold = ours.terms().name, ours.terms().threshold
    if not although_under_way and (what := ours.under_way()):
        raise CeremonyError(
            f"{what} is under way in {name!r}: finish it, or give --although-under-way", code="ceremony.under-way"
        )
    if not yes:
        if not sys.stdin.isatty():
            raise InputError("--yes", "must be given where nobody can be asked")
        typer.echo(
            f"{name} ({ours.path.name}): this member's share, ledger and memory of rounds are erased in {here.home}. "
            f"Without a backup, the share comes back only with the help of {threshold} others."
        )
        if not answered(lambda: typer.confirm("Forget it?")):
            raise typer.Exit(1)
    ours.forget()
    typer.echo(f"{name} ({ours.path.name}) is forgotten in {here.home}")


def _anchor(model: Path, layout: Path | None, wanted: str) -> str:
    """The digest of a model as an anchor."""
    from quorumark.consortium.home import read_as
    from quorumark.consortium.records import anchor_digest
    from quorumark.errors import InputError
    from quorumark.model.layout import ModelLayout

    if layout is None:
        raise InputError("--layout", "must be given with --anchor")
    found = read_as(layout, "a layout", ModelLayout.from_bytes)
    if found.digest() != wanted:
        raise InputError("--layout", "must be the consortium's", str(layout))
    return anchor_digest(wanted, found.encode(model))


def _pairs(option: str, texts: list[str] | None, name: str = "NAME") -> dict[str, str]:
    """NAME=VALUE, once for each name."""
    from quorumark.errors import InputError

    found = dict(text.partition("=")[::2] for text in texts or ())
    if any(not a or not b for a, b in found.items()) or len(found) != len(texts or ()):
        raise InputError(option, f"must be like {name}=VALUE, once for each", ", ".join(texts or ()))
    return found


def _policy(texts: list[str] | None) -> dict[str, str]:
    """Settings of a policy as they were typed; `Policy.of` checks them. Digests are not typed: they come from files."""
    from quorumark.consortium.policy import Policy
    from quorumark.errors import InputError

    found = _pairs("--policy", texts)
    for name in Policy.DIGESTS:
        if name in found:
            raise InputError("--policy", f"must not set {name!r}: pass the file that is agreed on", found[name])
    return found


def _statistic(name: str) -> str:
    """A statistic that members can answer with."""
    from quorumark.errors import InputError
    from quorumark.model.statistic import STATISTICS

    if name not in STATISTICS:
        raise InputError("--statistic", f"must be one of {', '.join(STATISTICS)}", repr(name))
    return name


def _card(text: str) -> tuple[Any, int]:
    """A card and a number of examples from CARD.json or CARD.json:EXAMPLES."""
    from quorumark.consortium.home import read_as
    from quorumark.consortium.identity import verify_card
    from quorumark.consortium.records import Card

    path, _, examples = text.rpartition(":") if text.rpartition(":")[2].isdecimal() else (text, "", "1")
    card = read_as(Path(path), "a member's card", Card.from_bytes)
    verify_card(card)
    return card, int(examples)


def _read(file: Path) -> tuple[Any, Any]:
    from quorumark.consortium.home import read_file
    from quorumark.consortium.records import Manifest, Terms

    data = read_file(file, "terms or a manifest")
    if b'"quorumark-terms/' in data[:4096] and b'"quorumark-manifest/' not in data:
        return Terms.from_bytes(data), None
    manifest = Manifest.from_bytes(data)
    return manifest.terms, manifest
