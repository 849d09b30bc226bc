"""The report in a real browser: it shows, logs no error, sorts its tables, prints, and fits a phone.

Chromium runs headless, once per question, with no network service it could use. Questions that need a script are put to a copy
of the page without its content security policy, shown in a frame as wide as a phone; the frame reports by message.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gradveil.report import write_report
from tests.unit.report.example_results import HOSTILE, make_results
from tests.unit.report.example_trainings import make_training

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

PROBE = """
window.alert = function () { window.attacked = true; };
addEventListener("load", function () {
  function column() {
    var rows = Array.from(document.querySelectorAll("#TABLE tbody tr"));
    return rows.map(function (row) { return row.cells[COLUMN].textContent.trim(); });
  }
  var header = document.querySelectorAll("#TABLE thead th")[COLUMN];
  var before = column();
  header.querySelector(".sort").click();
  var down = column(), downState = header.getAttribute("aria-sort");
  header.querySelector(".sort").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
  var up = column(), upState = header.getAttribute("aria-sort");
  document.querySelectorAll("details").forEach(function (fold) { fold.open = true; });
  var wide = Array.from(document.querySelectorAll("body *")).filter(function (element) {
    return !element.closest(".scroll, .heat, svg, .skip") && element.getBoundingClientRect().right > innerWidth + 0.5;
  }).map(function (element) { return element.tagName + "." + element.className; });
  parent.postMessage(JSON.stringify({
    before: before, down: down, downState: downState, up: up, upState: upState, wide: wide, attacked: Boolean(window.attacked),
    width: innerWidth, scroll: document.documentElement.scrollWidth,
    chart: getComputedStyle(document.querySelector(".wide-only") || document.body).display
  }), "*");
});
"""
FRAME = """<!DOCTYPE html><title>frame</title><iframe src="PAGE" width="390" height="800"></iframe><pre id="said"></pre>
<script>addEventListener("message", function (event) { document.getElementById("said").textContent = event.data; });</script>"""


def chromium(profile: Path, page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile / 'profile'}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)


def probe(folder: Path, page: Path, column: int, table: str = "records-table") -> dict[str, Any]:
    """Ask a copy of the page, 390 pixels wide, about sorting a table, overflow and hostile strings."""
    text = page.read_text(encoding="utf-8")
    free, removed = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert removed == 1
    copy, frame = folder / "copy.html", folder / "frame.html"
    script = PROBE.replace("COLUMN", str(column)).replace("TABLE", table)
    copy.write_text(free.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    frame.write_text(FRAME.replace("PAGE", copy.as_uri()), encoding="utf-8")
    dom = chromium(folder, frame, "--virtual-time-budget=4000", "--dump-dom").stdout
    said = re.search(r'<pre id="said">(.*?)</pre>', dom, re.DOTALL)
    assert said is not None and said.group(1), "the page did not answer"
    answer: dict[str, Any] = json.loads(html.unescape(said.group(1)))
    return answer


def test_the_page_shows_its_verdict_and_logs_nothing(tmp_path: Path) -> None:
    page = write_report(make_results(tmp_path / "results"))
    done = chromium(tmp_path, page, "--dump-dom")
    text = html.unescape(re.sub(r"<[^>]+>", "", done.stdout)).replace("\u00a0", " ")
    assert "identified 15 of 16 records (94 %, 95 % interval 65–99 %)" in text
    # The policy let our own script run, and had nothing to refuse.
    assert 'role="button"' in done.stdout
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screenshot_is_not_empty_and_follows_the_scheme(tmp_path: Path, scheme: str) -> None:
    page = write_report(make_results(tmp_path / "results"))
    shot = tmp_path / "shot.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    chromium(tmp_path, page, "--window-size=1280,900", f"--screenshot={shot}", *dark)
    with Image.open(shot) as image:
        grey = image.convert("L")
        assert image.width == 1280
        # PIL's histogram: how many pixels have each of 256 shades.
        assert sum(pixels > 0 for pixels in grey.histogram()) > 100
        paper = grey.getpixel((5, 400))
    assert isinstance(paper, (int, float)) and (paper < 60) == (scheme == "dark")


def test_tables_sort_and_a_phone_needs_no_sideways_scrolling(tmp_path: Path) -> None:
    grid = [{"batch_size": batch} for batch in (1, 4)]
    page = write_report(make_results(tmp_path / "results", grid=grid, missing=1))
    said = probe(tmp_path, page, column=4)
    decibels = [float(text.split("\u00a0")[0]) for text in said["down"]]
    assert decibels == sorted(decibels, reverse=True) and said["downState"] == "descending"
    assert said["up"] == said["down"][::-1] and said["upState"] == "ascending"
    assert sorted(said["before"]) == sorted(said["up"])
    assert said["width"] == 390 and said["scroll"] <= 390 and said["wide"] == []
    assert said["chart"] == "none"


def test_the_table_to_decide_by_sorts_and_fits_a_phone(tmp_path: Path) -> None:
    page = write_report(make_results(tmp_path / "results", seeds=3))
    said = probe(tmp_path, page, column=3, table="decision-table")
    accuracy = [float(text.split("\u00a0")[0]) for text in said["down"]]
    assert len(accuracy) == 8 and accuracy == sorted(accuracy, reverse=True)
    assert said["width"] == 390 and said["scroll"] <= 390 and said["wide"] == []


def test_the_risk_section_shows_sorts_and_fits_a_phone(tmp_path: Path) -> None:
    page = write_report(make_results(tmp_path / "results"))
    done = chromium(tmp_path, page, "--dump-dom")
    section = re.search(r'<section id="risk">.*?</section>', done.stdout, re.DOTALL)
    assert section is not None
    text = html.unescape(re.sub(r"<[^>]+>", " ", section.group(0)))
    assert "does not acquit" in text and "Spearman" in text
    # Ten pictures, and one chart per defense with one mark per record; the policy had nothing to refuse.
    assert section.group(0).count("<img") == 10
    assert section.group(0).count("<circle") == 8 * 16
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    said = probe(tmp_path, page, column=2, table="risk-table")
    scores = [float(text) for text in said["down"]]
    assert len(scores) == 8 and scores == sorted(scores, reverse=True) and said["up"] == said["down"][::-1]
    assert said["scroll"] <= 390 and said["wide"] == []


def test_the_page_of_a_training_logs_nothing_and_fits_a_phone(tmp_path: Path) -> None:
    page = write_report(make_training(tmp_path / "trained"))
    done = chromium(tmp_path, page, "--dump-dom")
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    said = probe(tmp_path, page, column=0, table="rounds-table")
    assert said["down"] == ["4", "3", "2", "1"]
    assert said["scroll"] <= 390 and said["wide"] == []


def test_hostile_strings_do_nothing_even_without_the_policy(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", builtin=False, hostile=True, owners=True)
    said = probe(tmp_path, write_report(results, private=True), column=4)
    assert not said["attacked"]
    assert said["scroll"] <= 390 and said["wide"] == []
    assert HOSTILE not in (results / "report-private.html").read_text(encoding="utf-8")


def test_the_page_prints(tmp_path: Path) -> None:
    page = write_report(make_results(tmp_path / "results"))
    paper = tmp_path / "report.pdf"
    chromium(tmp_path, page, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    printed = paper.read_bytes()
    assert printed.startswith(b"%PDF") and 5 < printed.count(b"/Type /Page\n") + printed.count(b"/Type/Page/") < 20
