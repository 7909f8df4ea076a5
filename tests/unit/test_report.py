"""The report: data round-trips, verdicts follow the measurements, the page needs no network and opens in a browser."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from report_sample import LIMITS, sample, side
from rich.console import Console

from acc.ir import LayerShape, ModelShape
from acc.report import html, svg, units
from acc.report.data import LimitLine, Report, limit_lines, read, spread
from acc.report.rows import fallback_rows, headline, note_rows
from acc.report.terminal import summary
from acc.target import Limit

SHAPE = ModelShape(64, 100, 16, (LayerShape(4, 2, 128),), tied=True)


def text(report: Report, width: int = 130) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary(report))
    return console.export_text()


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(sample().model_dump_json())
    assert read(path) == sample()


def test_relative_limit_is_resolved_by_the_parents_measurement() -> None:
    parent, child = side("parent", SHAPE, 1.0), side("child", SHAPE, 0.66)
    line = LimitLine.of(Limit("tpot", 0.7, relative=True), parent, child)
    assert line.limit is not None
    assert parent.measured is not None
    assert line.limit.value == pytest.approx(0.7 * parent.measured.tpot)
    assert (line.verdict, line.judged_by) == ("kept", "measured")


def test_measurement_overrules_prediction() -> None:
    parent, child = side("parent", SHAPE, 1.0), side("child", SHAPE, 0.66)
    assert child.predicted is not None
    assert child.measured is not None
    between = (child.predicted.tpot.value + child.measured.tpot) / 2  # the prediction is the larger of the two here
    line = LimitLine.of(Limit("tpot", between), parent, child)
    assert line.verdict == "kept"
    assert LimitLine.of(Limit("tpot", child.measured.tpot * 0.99), parent, child).verdict == "broken"


def test_throughput_is_a_floor() -> None:
    parent, child = side("parent", SHAPE, 1.0), side("child", SHAPE, 0.5)
    assert child.measured is not None
    reached = child.measured.throughput
    verdicts = [LimitLine.of(Limit("throughput", reached * k), parent, child).verdict for k in (0.9, 1.1)]
    assert verdicts == ["kept", "broken"]


def test_relative_limit_without_any_base_is_unknown() -> None:
    bare = side("parent", SHAPE, 1.0, here=False).model_copy(update={"predicted": None})
    line = LimitLine.of(Limit("tpot", 0.7, relative=True), bare, bare)
    assert (line.limit, line.verdict, line.judged_by) == (None, "unknown", "nothing")


def test_one_broken_limit_breaks_the_report() -> None:
    report = sample()
    tight = limit_lines((*LIMITS, Limit("memory", 1.0)), report.parent, report.child)
    assert report.model_copy(update={"limits": tight}).verdict == "broken"
    assert report.verdict == "kept"


def test_headline_says_what_the_verdict_rests_on() -> None:
    assert headline(sample()) == "every limit kept, as measured"
    assert headline(sample(here=False)) == "every limit kept (estimated, not measured)"


def test_spread_is_half_the_interquartile_range() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1 / 3)
    assert spread([1.0]) == 0.0


def test_notes_that_say_the_same_are_told_once() -> None:
    rows = note_rows(sample().notes)
    assert [(note.code, places) for note, places in rows] == [
        ("LC020", ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]),
        ("ACC210", ["lm_head"]),
    ]
    assert fallback_rows(sample().child.fallbacks) == [("Q4_K", "Q5_0", 1, 608256)]


def test_terminal_keeps_predicted_and_measured_apart() -> None:
    told = text(sample())
    head = next(line for line in told.splitlines() if "parent, predicted" in line)
    row = next(line for line in told.splitlines() if line.startswith("time per output token"))
    columns = [head.index(name) + len(name) for name in ("child, predicted", "child, measured")]
    assert row[: columns[0]].endswith("4.36 ms ± 5.0 %")
    assert row[: columns[1]].endswith("4.27 ms ± 1.5 %")
    assert "fallback: 1 tensor (594 KiB) stored as Q5_0, not Q4_K" in told
    assert "est." not in told


def test_terminal_labels_every_estimate() -> None:
    told = text(sample(here=False))
    row = next(line for line in told.splitlines() if line.startswith("memory"))
    assert row.count("est.") == 2
    assert "not on this machine" in told


def test_page_is_self_contained() -> None:
    page = html.render(sample())
    assert not re.findall(r"(?:src|href|srcset|data)\s*=|url\(|@import|https?://|<script|<link|<iframe", page)


def test_page_escapes_what_it_quotes() -> None:
    page = html.render(sample().model_copy(update={"model": "<script>alert(1)</script>"}))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "tied to &lt;the embedding&gt; &amp; not cut" in page


def test_page_draws_every_layer_and_marks_what_was_dropped() -> None:
    page = html.render(sample())
    drawn = {int(number) for number in re.findall(r"layer (\d+): FFN width", page)}
    assert drawn == set(range(30))
    assert "layer 7: FFN width 1536 → 0" in page
    assert page.count('class="gone"') == 4  # layer 7 loses both sub-blocks, layer 11 its attention, layer 12 its MLP


def test_page_without_measurement_says_so() -> None:
    page = html.render(sample(here=False))
    assert "Nothing was measured" in page
    assert ">measured</small>" not in page
    assert 'class="measured' not in page


def test_axis_ticks() -> None:
    assert svg.ticks(9, whole=True) == [0, 5]
    assert svg.ticks(1536) == [0, 500, 1000, 1500]
    assert svg.ticks(0.0066) == pytest.approx([0, 0.002, 0.004, 0.006])


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0043, "4.3 ms"), (31.2, "31.2 s"), (142, "2 min 22 s"), (9000, "2.5 h")]
)
def test_durations(seconds: float, told: str) -> None:
    assert units.duration(seconds) == told


def test_page_opens_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    page, picture = tmp_path / "report.html", tmp_path / "page.png"
    html.write(sample(), page)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    common = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", *quiet]
    common += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]  # no network at all
    shot = [f"--screenshot={picture}", "--window-size=1280,4000"]
    subprocess.run([*common, *shot, page.as_uri()], check=True, capture_output=True, timeout=120)
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1280, 4000)
    assert len(data) > 100_000, "an empty page compresses to a few kB"
    dom = subprocess.run(
        [*common, "--dump-dom", page.as_uri()], check=True, capture_output=True, text=True, timeout=120
    )
    assert dom.stdout.count("<svg") == 7
    assert "every limit kept, as measured" in dom.stdout
