"""The page that people read: what it says, that nobody can write into it, and that a browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumark.consortium.identity import Identity
from quorumark.consortium.records import Manifest
from quorumark.errors import RecordError
from quorumark.model.suspect import SuspectFile
from quorumark.reasons import Reason
from quorumark.report import certificate_page, write_page
from quorumark.report.plot import draw
from quorumark.report.texts import sentences
from quorumark.stamps.record import Dated
from quorumark.verify.certificate import Certificate
from quorumark.verify.evidence import Finding
from tests.kit.evidence import NORM2, consortium, label, make_finding, make_query

PEOPLE, MANIFEST = consortium(6, 3)
CHECKED = (Reason.of("check.partials", partials=4), Reason.of("check.form"))
VOID = {"meta", "br", "wbr", "path", "circle", "link", "img", "input"}


class Reader(HTMLParser):
    """Texts, headings, attributes; complains of tags that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.text += " " if tag == "small" else ""
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag in {"h1", "h2", "h3"}:
            self.headings.append((tag, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += "" if tag in {"code", "em", "span", "strong", "sup"} else " "

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        for level in ("h1", "h2", "h3"):
            if level in self.open:
                tag, text = self.headings[-1]
                self.headings[-1] = (tag, text + data)


def signed(finding: Finding, people: list[Identity] = PEOPLE, *, without: tuple[int, ...] = ()) -> Certificate:
    certificate = Certificate.of(finding)
    for partial in finding.partials:
        if partial.point not in (*finding.wrong, *without):
            certificate = certificate.signed_by(people[partial.point - 1])
    return certificate


def page_of(certificate: Certificate, manifest: Manifest = MANIFEST, **options: Any) -> str:
    return certificate_page(
        certificate, manifest, signers=certificate.signers(manifest), **{"checked": CHECKED, **options}
    )


def read(z: float, answered: tuple[int, ...] = (1, 2, 3, 4), *, options: Any = None, **changes: Any) -> Reader:
    return Reader(page_of(signed(make_finding(PEOPLE, MANIFEST, z, answered, **changes)), **(options or {})))


# --- dates --------------------------------------------------------------------------------------------------


def test_dates_say_what_existed_by_when_and_who_says_so() -> None:
    """Only where stamps were checked; an authority's name is its own words, and is escaped."""
    when = datetime(2026, 1, 31, 12, tzinfo=UTC)
    later = when + timedelta(days=900)
    dates = [Dated("manifest", "<b>Avon</b>", when, later, ("Birch",)), Dated("certificate", "Cedar", later, later)]
    plain, dated = read(20.0), read(20.0, options={"dates": dates})
    assert "Dates" not in [text for _, text in plain.headings]
    assert "no clock outside vouches for them" in plain.text
    assert "Dates" in [text for _, text in dated.headings]
    assert "no clock outside vouches for them" not in dated.text
    assert "b" not in dated.tags
    for text in ("2026-01-31 12:00:00 UTC", "<b>Avon</b>; renewed by Birch", "2028-07-19 12:00:00 UTC", "Cedar"):
        assert text in dated.text


# --- what it says -----------------------------------------------------------------------------------------


SECTIONS = [
    "What this means",
    "What it does not mean",
    "Why this verdict",
    "What was tested",
    "Who tested it",
    "How it was tested",
    "The threshold",
    "The numbers",
    "How to check it again",
    "Limits",
    "Digests",
]


@pytest.mark.parametrize(
    ("z", "changes", "sentence", "meaning", "limit"),
    [
        (
            21.374512,
            {},
            "This model carries the mark of hospitals.",
            "with a probability of at most 10−99.21",
            "It does not prove who took the model, when, or how.",
        ),
        (
            0.7,
            {},
            "The mark of hospitals was not found in this model.",
            "Nobody is accused.",
            "It is not proof of innocence. The mark could have been removed",
        ),
        (
            3.2,
            {"verdict": "INCONCLUSIVE", "reasons": (Reason.of("finding.weights-missing", missing=88, carriers=100),)},
            "Whether this model carries the mark of hospitals could not be decided.",
            "Something that a verdict needs was missing.",
            "It is no weak PASSED and no weak FAILED.",
        ),
    ],
)
def test_the_verdict_comes_first_with_what_it_means_and_does_not(
    z: float, changes: dict[str, Any], sentence: str, meaning: str, limit: str
) -> None:
    reader = read(z, **changes)
    assert [text for tag, text in reader.headings if tag == "h1"] == [sentence]
    assert reader.headings[0] == ("h1", sentence)
    assert [text for tag, text in reader.headings if tag == "h2"] == SECTIONS
    assert [text for tag, text in reader.headings if tag == "h3"] == [
        "Whom you have to trust",
        "Checked when this page was made",
    ]
    means, not_means = reader.text.index("What this means"), reader.text.index("What it does not mean")
    assert means < reader.text.index(meaning) < not_means < reader.text.index(limit)
    verdict = changes.get("verdict", "PASSED" if z > 6 else "FAILED")
    assert f" {verdict} {sentence} " in reader.text
    other = {"PASSED", "FAILED", "INCONCLUSIVE"} - {verdict, *re.findall("PASSED|FAILED", limit)}
    assert not [word for word in other if word in reader.text]


def test_every_number_is_the_findings_own() -> None:
    """Numbers that contradict each other are shown as they are: the page computes none."""
    odd: dict[str, Any] = {"cosine": "0.424242", "log10_p": "-3.21", "log10_bound": "-1.23", "value": "-9876543"}
    finding = replace(
        make_finding(PEOPLE, MANIFEST, 12.345678, (1, 2, 3, 4), threshold="7.654321", agreed="5.5"), **odd
    )
    text = Reader(page_of(signed(finding))).text
    for shown in ("12.345678", "0.424242", "10−3.21", "10−1.23", "−9,876,543", "7.654321", "agreed on 5.5 as"):
        assert shown in text, shown
    assert f"{finding.query.norm2:,}" in text
    assert f"{finding.query.effective:,}" in text


def test_numbers_that_look_alike_get_more_digits() -> None:
    text = read(5.9996).text
    assert "z = 5.9996" in text
    assert "z* = 6.0000" in text
    assert "z = 6.00 " in read(6).text  # equal ones need none


def test_huge_logarithms_are_readable() -> None:
    text = read(900).text
    assert "10−175,889.27" in text
    assert "The axis is cut" in text


def test_how_many_would_have_had_to_lie() -> None:
    assert "If one of these 3 members lied, it could have made the number up" in read(21, (1, 2, 5)).text
    assert "one member who lied could have made it up" in read(21, (1, 2, 5)).text
    more = read(21, (1, 2, 3, 4)).text
    assert "3 answers suffice and 4 agree. For the number to be false, at least 2 of these 4" in more
    assert "made it up" not in more
    assert "6 agree. For the number to be false, at least 4 of these 6" in read(21, (1, 2, 3, 4, 5, 6)).text
    assert "4 agree. For the number to be false, at least 2 of" in read(21, (1, 2, 3, 4, 5), wrong=(2,)).text


def test_wrong_answers_are_named_and_not_accused() -> None:
    reader = read(21, (1, 2, 3, 4, 5, 6), wrong=(4,))
    assert "Delta 4 2026-03-01 09:04:00 UTC ✗ wrong not signed " in reader.text
    assert "The answer of Delta contradicts those of the others" in reader.text
    assert "shows that it is wrong, not why" in reader.text
    assert "wrong" not in read(21).text


def test_who_signed_and_who_did_not() -> None:
    finding = make_finding(PEOPLE, MANIFEST, 21, (1, 2, 3, 4))
    text = Reader(page_of(signed(finding, without=(2,)).signed_by(PEOPLE[5]))).text
    assert "Signed by 4 members Avon, Cedar, Delta and Fir " in text
    assert text.count(" ✓ signed ") == 4
    assert text.count("not signed") == 1
    assert "✓ signed as a witness" in text
    unsigned = Reader(certificate_page(finding, MANIFEST, signers=(), checked=())).text
    assert "nobody yet" in unsigned
    assert "a finding that nobody has signed yet, not a certificate" in unsigned


def test_too_few_answers_show_no_number() -> None:
    reader = read(21, (1,), verdict="INCONCLUSIVE", reasons=(Reason.of("finding.uncorroborated", partials=1),))
    assert "svg" in reader.tags  # the sign of the verdict
    assert "figure" not in reader.tags
    assert "Only 1 usable answer came in; 3 are needed" in reader.text
    assert "21.0" not in reader.text


def test_what_was_tested() -> None:
    files = (SuspectFile("a.safetensors", label("a"), 4_987_654_321), SuspectFile("b.safetensors", label("b"), 12))
    query = make_query(
        MANIFEST,
        files=files,
        covered=2_000_000,
        burnt=(4, 9, 11),
        burnt_norm2=NORM2 // 99,
        matching=(Reason.of("read.cast", tensors=9, layout="F32", suspect="BF16"),),
        alignment="perm/v1",
    )
    name = label("a challenge")
    text = read(21, query=query, audits={name: (4, 9)}, charged="7.5", log10_choices="12.34").text
    for shown in (
        "a.safetensors",
        "4,987,654,321",
        label("a"),
        label("b"),
        "Of the 2,560,000 weights that could carry the mark, 2,000,000 were found",
        "left out: 3 of the key's leaves, 3,072 of 2,560,000 coordinates (0.12 %), with 1.00 % of what the suspect",
        f"leaves of them that the audit {name[:16]} opened: 2",
        "NOTHING EXPLAINS why 1 of these leaves are left out; --audit with a proof would",
        "up to 10^12.34 ways to read the suspect and to leave something out; the threshold pays for that: 7.5 instead",
        "raised by the asker’s choices",
        "tensors stored as BF16 instead of F32: 9",
        "560,000 weights that could carry the mark were not found",
        "balanced-anchor/v1",
        "perm/v1",
        "--suspect a.safetensors b.safetensors",
    ):
        assert shown in text, shown
    memory = make_query(MANIFEST, files=())
    text = read(21, query=memory).text
    assert f"which was not read from a file. Its digest: {memory.suspect}" in text


def test_how_the_threshold_came_about() -> None:
    text = read(21, failed=3).text
    assert "agreed on 6 as the number to reach. Every test that fails tells a little about the key" in text
    assert (
        "opened 3 equations in the key (a test by layers opens one for each block), which raises it to 7.732051" in text
    )
    assert "no earlier test is known" in read(21).text
    assert "a probability of false alarms of 1e-9" in read(21, alpha="1e-9", agreed="6.437899").text
    many = read(90, failed=1200).text
    assert "and 1,180 more, which the certificate lists" in many
    assert many.count(" failed") < 60


def test_what_was_checked_and_how_to_do_it_again() -> None:
    certificate = signed(make_finding(PEOPLE, MANIFEST, 21, (1, 2, 3, 4)))
    text = Reader(page_of(certificate)).text
    assert all(line in text for line in sentences(CHECKED))
    left = (Reason.of("check.no-suspect"),)
    assert f"not checked: {sentences(left)[0]}" in Reader(page_of(certificate, left=left)).text
    assert certificate.digest() in text
    assert MANIFEST.digest().hex() in text
    assert "quorumark verify check certificate.json --manifest manifest.json --suspect model.safetensors" in text
    assert (
        "quorumark verify check my.json" in Reader(page_of(certificate, command="quorumark verify check my.json")).text
    )
    assert "Nothing. This page shows only what the certificate says." in Reader(page_of(certificate, checked=())).text


def test_the_spot_audit() -> None:
    assert "None is part of this page." in read(21).text
    reader = read(21, options={"audit": {"Result": "64 of 64 pieces are <right>"}})
    assert ("h3", "Spot audit") in reader.headings
    assert "64 of 64 pieces are <right>" in reader.text
    assert "None is part of this page." not in reader.text


def test_a_dealer_is_a_limit() -> None:
    terms = replace(MANIFEST.terms, setup="dealer")
    genesis = replace(MANIFEST.genesis, terms=terms.digest().hex())
    dealt = replace(MANIFEST, terms=terms, genesis=genesis, commitment={"hash": "00" * 32, "nonce": "11" * 32})
    finding = make_finding(PEOPLE, dealt, 21, (1, 2, 3, 4))
    page = certificate_page(finding, dealt, signers=(), checked=())
    assert "The key was made by a dealer, who could have kept it" in Reader(page).text
    assert "dealer" not in read(21).text


def test_a_key_whose_parts_are_known_is_a_limit() -> None:
    terms = replace(MANIFEST.terms, setup="paper", key="gaussian")
    summed = replace(MANIFEST, terms=terms, genesis=replace(MANIFEST.genesis, terms=terms.digest().hex()))
    text = Reader(certificate_page(make_finding(PEOPLE, summed, 21, (1, 2, 3)), summed, signers=(), checked=())).text
    assert "fewer than 3 of them together know something of it" in text
    assert "No approximation is behind it" not in text  # that holds for signs
    assert "if the key’s entries are normal draws" in text


def test_another_manifest_is_refused() -> None:
    _, other = consortium(6, 3, title="others")
    with pytest.raises(RecordError, match="another manifest"):
        certificate_page(make_finding(PEOPLE, MANIFEST, 21, (1, 2, 3)), other, signers=(), checked=())


# --- that nobody writes into it, and it needs nothing ------------------------------------------------------

ATTACK = "<script>document.title='owned'</script>"
HOSTILE = {"names": ('"><img src=x onerror=alert(1)>', "</td></table><b>Bob", "&lt;i&gt;", "x" * 100), "title": ATTACK}
READ = Reason.of("read.names-stripped", prefix=ATTACK)
WHY = Reason.of("finding.corrected", partials=4, members=("<b>Bob</b>", ATTACK), liars=1)
DONE = Reason.of("check.manifest", members=4, consortium=ATTACK)


def hostile_page() -> tuple[str, Reader]:
    people, manifest = consortium(4, 2, **HOSTILE)  # type: ignore[arg-type]
    files = (SuspectFile(f"{ATTACK}; rm -rf $(pwd) '\".safetensors", label("h"), 1),)
    query = make_query(manifest, files=files, matching=(READ,), statistic="<u>s</u>", alignment="<u>a</u>")
    finding = make_finding(people, manifest, 21, (1, 2, 3, 4), wrong=(2,), query=query, reasons=(WHY,), alpha="<hr>")
    page = page_of(signed(finding, people), manifest, checked=(DONE,), audit={ATTACK: ATTACK})
    return page, Reader(page)


def test_names_cannot_write_into_the_page() -> None:
    page, reader = hostile_page()
    assert reader.tags.count("script") == reader.tags.count("img") == reader.tags.count("hr") == 0
    assert not [a for a in reader.attributes if a[1].startswith("on")]
    assert sorted(set(reader.tags)) == sorted(
        set(read(21, (1, 2, 3, 4, 5), wrong=(2,), options={"audit": {"a": "b"}}).tags)
    )
    for text in (*HOSTILE["names"], ATTACK):
        assert text in reader.text
    # the command can be pasted: the file's name is quoted for a shell
    assert "'<script>document.title='\"'\"'owned'" in reader.text
    assert "&lt;script&gt;" in page


def test_it_loads_nothing() -> None:
    for page in (hostile_page()[0], page_of(signed(make_finding(PEOPLE, MANIFEST, 900, (1, 2, 3, 4))))):
        reader = Reader(page)
        loading = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background", "style"}
        assert not [a for a in reader.attributes if a[1] in loading]
        assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(reader.tags)
        assert not re.search(r"https?://|url\(|@import", page)
        assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in reader.attributes


def test_it_can_be_read_by_machines_that_read_aloud() -> None:
    reader = read(21, (1, 2, 3, 4, 5), wrong=(2,), failed=2)
    assert ("html", "lang", "en") in reader.attributes
    ids = [value for _, name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for _, name, value in reader.attributes:
        if name == "aria-labelledby":
            assert set(value.split()) <= set(ids)
    assert reader.tags.count("title") == 1 + 2  # the page's and one for each size of the picture
    assert reader.tags.count("desc") == 2
    assert reader.tags.count("th") == len([a for a in reader.attributes if a[:2] == ("th", "scope")])
    assert "A dashed line: threshold z* = 7.41. A solid line with a diamond: this model: z = 21.00." in reader.text


def _luminance(colour: str) -> float:
    parts = colour.strip("#")
    if len(parts) == 3:
        parts = "".join(c + c for c in parts)
    channels = [int(parts[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_of_text_has_contrast() -> None:
    """WCAG AA, 4.5 : 1, on paper and on shaded ground; in light, in dark and in print."""
    page = page_of(signed(make_finding(PEOPLE, MANIFEST, 21, (1, 2, 3, 4))))
    schemes = [
        dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", block)) for block in re.findall(r":root \{(.*?)\}", page, re.S)
    ]
    assert len(schemes) == 3
    for scheme in schemes:
        for text in ("ink", "soft", "passed", "failed", "inconclusive"):
            for ground in ("paper", "wash"):
                a, b = sorted((_luminance(scheme[text]), _luminance(scheme[ground])))
                assert (b + 0.05) / (a + 0.05) >= 4.5, (text, ground, scheme)


def test_it_is_written_for_others_to_read(tmp_path: Path) -> None:
    path = tmp_path / "pages" / "certificate.html"
    write_page(path, "<p>größe ✓</p>")
    assert path.read_text(encoding="utf-8") == "<p>größe ✓</p>"
    assert path.stat().st_mode & 0o777 == 0o644


# --- the picture ------------------------------------------------------------------------------------------


@given(
    st.floats(-1e6, 1e6) | st.floats(-50, 50),
    st.floats(0.5, 40) | st.floats(0.5, 2000),
    st.sampled_from([720.0, 340.0]),
)
def test_the_picture_holds_any_z(z: float, threshold: float, width: float) -> None:
    labels = (f"threshold z* = {threshold:.2f}", f"this model: z = {z:.2f}")
    plot = draw("p", z, threshold, labels, width)
    inside = [plot.model.x, plot.threshold.x, *plot.chance, *plot.marked, *plot.cuts, *(x for x, _ in plot.ticks)]
    inside += [end for run in plot.runs for end in run]
    assert all(10 <= x <= width - 10 for x in inside)
    for mark in (plot.model, plot.threshold):
        assert 0 <= mark.left <= mark.x <= mark.left + mark.span <= width
    # nearer to the right means larger, and one scale everywhere but at the cuts
    middle = sum(plot.chance) / 2
    if abs(z - threshold) > 1e-6:
        assert (plot.model.x < plot.threshold.x) == (z < threshold)
    assert middle < plot.threshold.x
    if not plot.cuts:
        scale = (plot.chance[1] - plot.chance[0]) / 6
        assert plot.model.x - middle == pytest.approx(z * scale, abs=1e-6 * width)
    # the bell can be seen, and ticks do not run into each other
    assert plot.chance[1] - plot.chance[0] > width / 16
    for (a, text), (b, after) in zip(plot.ticks, plot.ticks[1:], strict=False):
        assert b - a > 3.5 * (len(text) + len(after))


@pytest.mark.parametrize(
    ("z", "threshold", "cuts"), [(0.7, 6, 0), (21, 6, 0), (38, 6, 0), (44, 6, 1), (-47, 6, 1), (900, 60, 2)]
)
def test_the_axis_is_cut_only_where_nothing_lies_for_long(z: float, threshold: float, cuts: int) -> None:
    assert len(draw("p", z, threshold, ("a", "b"), 720).cuts) == cuts


# --- in a browser -----------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")


def _browse(folder: Path, page: Path, *options: str) -> tuple[str, list[str]]:
    """The page's DOM after loading, and what the browser's console says."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _colours(png: Path) -> int:
    """How many different bytes its (filtered) pixels have: a handful if it is blank."""
    data, at, packed = png.read_bytes(), 8, b""
    while at < len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        packed += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    return len(set(zlib.decompress(packed)))


@browser
@pytest.mark.parametrize(
    ("z", "sentence"), [(21.4, "This model carries the mark of"), (0.7, "was not found in this model.")]
)
def test_a_browser_shows_it(tmp_path: Path, z: float, sentence: str) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    write_page(page, page_of(signed(make_finding(PEOPLE, MANIFEST, z, (1, 2, 3, 4)))))
    dom, console = _browse(tmp_path, page, "--dump-dom")
    assert sentence in dom
    assert "<em>hospitals</em>" in dom
    assert console == []
    _browse(tmp_path, page, "--window-size=900,1200", f"--screenshot={picture}")
    assert _colours(picture) > 100


@browser
def test_a_browser_runs_nothing_of_what_names_hold(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_page(page, hostile_page()[0])
    dom, console = _browse(tmp_path, page, "--dump-dom")
    assert "<title>PASSED: certificate about the mark of &lt;script&gt;" in dom
    assert console == []


@browser
def test_the_browser_tests_can_fail(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(f"<title>a</title>{ATTACK}<script>console.error('seen')</script>")
    dom, console = _browse(tmp_path, page, "--dump-dom")
    assert "<title>owned</title>" in dom
    assert len(console) == 1
    _browse(tmp_path, page, "--window-size=900,1200", f"--screenshot={picture}")
    assert _colours(picture) < 20


@browser
def test_it_prints_on_a_few_sheets(tmp_path: Path) -> None:
    page, sheet = tmp_path / "page.html", tmp_path / "page.pdf"
    write_page(page, page_of(signed(make_finding(PEOPLE, MANIFEST, 21, (1, 2, 3, 4, 5, 6), wrong=(4,), failed=5))))
    _browse(tmp_path, page, "--no-pdf-header-footer", f"--print-to-pdf={sheet}")
    data = sheet.read_bytes()
    assert len(re.findall(rb"/Type\s*/Page\b", data)) in (3, 4)
    boxes = re.findall(rb"/MediaBox\s*\[0 0 ([\d.]+) ([\d.]+)\]", data)
    assert {(round(float(w)), round(float(h))) for w, h in boxes} == {(595, 842)}  # A4, in points
