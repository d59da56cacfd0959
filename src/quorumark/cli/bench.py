"""`quorumark bench …`"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Benchmarks: ratios to memcpy and to the alternatives, measured in one run.", no_args_is_help=True
)

Json = Annotated[Path | None, typer.Option("--json", help="Also write the rows as a JSON list to this file.")]
Quick = Annotated[bool, typer.Option("--quick", help="Smaller sizes: under 30 seconds, noisier.")]


@app.command("field")
def field(
    json: Json = None,
    quick: Quick = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="The kernels for CUDA, on this machine's GPU.")] = False,
) -> None:
    """Arithmetic mod 2^61−1: against memcpy, one thread, galois and Python ints."""
    from quorumark.research.bench import field as bench

    if cuda:
        _run("Field arithmetic mod 2^61−1 on a GPU", bench.cuda_rows(), json, with_peers=False)
    else:
        _run("Field arithmetic mod 2^61−1", bench.rows(quick), json)


@app.command("shamir")
def shamir(json: Json = None, quick: Quick = False) -> None:
    """Sharing: against the paper's torch code, galois and Python ints."""
    from quorumark.research.bench import shamir as bench

    _run("Shamir sharing", bench.rows(quick), json)


@app.command("dkg")
def dkg(json: Json = None, quick: Quick = False) -> None:
    """The dealer-free setup: one member's computation and traffic, against the paper's protocol."""
    from quorumark.research.bench import dkg as bench

    _run("Dealer-free setup, one member", bench.rows(quick), json)


@app.command("dealer")
def dealer(json: Json = None, quick: Quick = False) -> None:
    """The setup with a dealer: the dealer's and one member's computation and traffic, against the paper's."""
    from quorumark.research.bench import dealer as bench

    _run("Setup with a dealer", bench.rows(quick), json)


@app.command("plot")
def plot(
    results: Annotated[Path, typer.Option(help="The folder with dkg.json and dealer.json.")] = Path(
        "benchmarks/results"
    ),
    out: Annotated[Path, typer.Option(help="Where the SVG goes.")] = Path("docs/figures/setup-overhead.svg"),
) -> None:
    """Draw the setup's overhead from the results: needs the extra `report`."""
    from quorumark.errors import InputError
    from quorumark.research.bench.plot import draw

    if not out.parent.is_dir():
        raise InputError("--out", "must name a file in a folder that exists", str(out))
    draw(results / "dkg.json", results / "dealer.json", out)
    typer.echo(f"drawn: {out}")


@app.command("verify")
def verify(
    json: Json = None,
    quick: Quick = False,
    billion: Annotated[
        bool, typer.Option("--billion", help="Two models of 1.126 billion weights instead: minutes, and 5 GiB of disk.")
    ] = False,
) -> None:
    """Verification: the canonical form, the inner product and the commands, for ResNet-18's weights."""
    from quorumark.research.bench import billion as large
    from quorumark.research.bench import verify as bench

    if billion:
        _run("Verification of 1.126 billion weights", large.rows(), json, with_peers=False)
    else:
        _run("Verification", bench.rows(quick), json, with_peers=False)


@app.command("align")
def align(
    json: Json = None,
    model: Annotated[
        Path | None, typer.Option(help="A language model's folder, as transformers writes it; else a small random one.")
    ] = None,
) -> None:
    """Alignment of a language model in disguise: what it brings back of z, and its time against z without it."""
    from quorumark.research.bench import align as bench

    _run("Alignment", bench.rows(model), json, with_peers=False)


@app.command("secagg")
def secagg(
    json: Json = None,
    quick: Quick = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="Instead: several weights in an element, against one.")
    ] = False,
) -> None:
    """Secure aggregation: a client's and the server's computation, against Flower's SecAgg+."""
    from quorumark.research.bench import secagg as bench

    _run("Secure aggregation", bench.packed_rows(quick) if packed else bench.rows(quick), json, with_peers=False)


@app.command("round")
def round_(json: Json = None, quick: Quick = False) -> None:
    """A whole round of members and server in one process, without training and by packing, against plain FedAvg."""
    from quorumark.research.bench import round as bench

    _run("A round", bench.rows(quick), json, with_peers=False)


@app.command("flower")
def flower(
    json: Json = None,
    quick: Quick = False,
    deployment: Annotated[
        Path | None, typer.Option(help="The summary.json of examples/flower-hospitals/deploy --compare N.")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="Instead: one to four weights in an element, with sums checked.")
    ] = False,
) -> None:
    """A round of the same Flower app with and without the mark: in simulation, and from a deployment's summary."""
    from quorumark.research.bench import flower as bench

    def rows() -> Iterator[Any]:
        if deployment is not None:
            yield bench.deployed(deployment)
        yield from bench.packed_rows(quick) if packed else bench.rows(quick)

    _run("A round in Flower", rows(), json, with_peers=False)


def _run(title: str, rows: Iterator[Any], json: Path | None, *, with_peers: bool = True) -> None:
    from rich.table import Table

    from quorumark.cli.console import make_console
    from quorumark.errors import InputError
    from quorumark.research.bench import peers, write_rows

    if json is not None and not json.parent.is_dir():
        raise InputError("--json", "must name a file in a folder that exists", str(json))
    console, done = make_console(), []
    table = Table("ours", "against", "size", "threads", "ratio", "that is", "ms", title=title, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    for column in table.columns[:2]:
        column.overflow = "fold"
    with console.status("measuring …") as status:
        for row in rows:
            done.append(row)
            speed = f"{1 / row.ratio:,.1f}× less" if row.ratio < 1 else f"{row.ratio:.2f}× the time"
            size, seconds = f"{row.size:,}", f"{1e3 * row.seconds:,.1f}"
            table.add_row(row.name, row.against, size, str(row.threads), f"{row.ratio:.3g}", speed, seconds)
            status.update(f"measured: {row.name} against {row.against}")
    console.print(table)
    for row in done:
        if hasattr(row, "plain_messages"):
            console.print(
                f"{row.name}, {row.size:,} weights: {row.seconds:.2f} s a round, plain {row.plain_seconds:.2f} s; for "
                f"each node {row.messages:.1f} messages, plain {row.plain_messages:.1f}; bytes to it "
                f"{row.bytes_down:,.0f}, plain {row.plain_bytes_down:,.0f}; bytes from it {row.bytes_up:,.0f}, plain "
                f"{row.plain_bytes_up:,.0f}"
                + (f"; CPU {row.cpu:.2f} s, plain {row.plain_cpu:.2f} s" if row.plain_cpu else "")
            )
        if hasattr(row, "marked"):
            console.print(
                f"{row.name}: CPU {row.cpu:.2f} s, plain {row.plain_cpu:.2f} s; bytes a weight to each member "
                f"{row.bytes_down / row.size:.2f}, from it {row.bytes_up / row.size:.2f}, plain 4 and 4"
            )
        if hasattr(row, "elements_per_member"):
            moves = "sends each member" if row.role == "dealer" else "sends and receives"
            console.print(
                f"{row.name}: {moves} {row.elements_per_member:.2f}·d field elements "
                f"({row.communication_seconds:.1f} s in all at 1 Gbit/s), computes {row.seconds:.2f} s; "
                f"the paper's {row.paper_communication_seconds:.1f} s and {row.paper_seconds:.2f} s"
            )
    for row in done:
        if hasattr(row, "peak"):
            console.print(
                f"{row.name}: {row.cpu_seconds:.1f} s of CPU, {row.cpu_ratio:.1f} times hashing's; "
                f"{row.peak / 2**30:.2f} GiB of memory at most"
            )
    for row in done:
        if hasattr(row, "z_aligned"):
            console.print(f"{row.name}: z {row.z:.1f}, in disguise {row.z_disguised:.1f}, aligned {row.z_aligned:.1f}")
    fewest = min((row.runs for row in done if hasattr(row, "runs")), default=5)
    console.print(
        "ratio = our time over theirs: "
        f"the median of at least {fewest} runs each, in turns; per element where sizes differ"
    )
    for package in peers.missing() if with_peers else ():
        console.print(f"not compared with {package}: the package is not installed")
    if json is not None:
        write_rows(done, json)
        console.print(f"{len(done)} rows written to {json}")
