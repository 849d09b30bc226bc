"""The page: nothing private leaves, nothing is fetched, every user string is escaped, and half a run still makes a page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from gradveil.errors import UsageError
from gradveil.report import write_report
from gradveil.report.charts import on_frontier
from gradveil.report.pictures import data_uri, psnr
from tests.unit.report.example_results import DEFENSES, FAIL, HOSTILE, make_results

GRID = [{"state": state, "batch_size": batch} for state in ("untrained", "trained") for batch in (1, 4)]


class Reader(HTMLParser):
    """Collects the page's text, tags and attributes, and checks that tags are closed in order."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style", "script"}:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


def test_the_first_screen_tells_the_story(tmp_path: Path) -> None:
    text = read(write_report(make_results(tmp_path))).text
    first = text[: text.index("Share identified, per defense")]
    assert "identified 15 of 16 records (94 %, 95 % interval 65–99 %); guessing would find 1 in 128" in first
    assert "Not identified by quick-1" in first
    assert "Accuracy not measured in this run" in first
    assert "An honest-but-curious server sees one client's update" in first
    assert "membership inference" in first
    assert "2 checks passed" in first
    assert "15 of 16 · 94 % (72–99 %)" in text


def test_the_word_safe_is_never_used(tmp_path: Path) -> None:
    for private in (False, True):
        text = read(write_report(make_results(tmp_path, builtin=False), private=private)).text
        assert not re.search(r"\bsafe(ly|r|st|ty)?\b", text, re.IGNORECASE)


def test_a_shared_report_of_user_data_shows_no_picture_no_label_and_no_folder(tmp_path: Path) -> None:
    page = write_report(make_results(tmp_path, builtin=False, owners=True))
    html = page.read_text(encoding="utf-8")
    assert page.name == "report.html"
    assert "data:" not in html and "<img" not in html
    assert "/home/ada" not in html and "ward-7" not in html
    assert "<th>Label</th>" not in html
    assert "r-5fec" in html and "o-0000" in html


def test_a_private_report_shows_pictures_labels_and_ids(tmp_path: Path) -> None:
    make_results(tmp_path, builtin=False)
    for path in (tmp_path / "cells").glob("*.npz"):
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files}
        with path.open("wb") as file:
            np.savez(file, ids=np.array([f"patient-{i}" for i in range(16)]), **arrays)
    shared = write_report(tmp_path).read_text(encoding="utf-8")
    private = write_report(tmp_path, private=True)
    html = private.read_text(encoding="utf-8")
    assert private.name == "report-private.html"
    assert "data:image/png" in html and "<th>Label</th>" in html and "patient-3" in html and "/home/ada/ward-7" in html
    assert "must not leave the building" in html
    assert "patient-" not in shared


def test_built_in_data_shows_pictures_beside_the_null(tmp_path: Path) -> None:
    reader = read(write_report(make_results(tmp_path)))
    assert reader.tags.count("img") == 4 + len(DEFENSES) * 3 * 5 - 3 + 10  # the last are the most and least exposed
    assert "Best null" in reader.text and "fixed random record" in reader.text


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    for private in (False, True):
        page = write_report(make_results(tmp_path, builtin=False, hostile=True, owners=True), private=private)
        reader = read(page)
        assert HOSTILE not in page.read_text(encoding="utf-8")
        assert reader.tags.count("script") == 1
        assert "evil.example" in reader.text
        assert not any(name.startswith("on") for _, name, _ in reader.attributes)
        assert all(value.startswith("data:image/png;base64,") for tag, name, value in reader.attributes if name == "src")


def test_nothing_is_fetched(tmp_path: Path) -> None:
    reader = read(write_report(make_results(tmp_path, hostile=True, grid=GRID)))
    assert {"link", "iframe", "object", "embed", "form", "base"}.isdisjoint(reader.tags)
    linked = [value for _, name, value in reader.attributes if name in {"src", "href", "srcset", "action", "data", "xlink:href"}]
    assert linked and all(value.startswith(("#", "data:image/png;base64,")) for value in linked)
    assert not any(name == "style" for _, name, _ in reader.attributes)


@pytest.mark.parametrize(("builtin", "images"), [(True, "img-src data:"), (False, "img-src 'none'")])
def test_the_policy_names_the_one_script_and_style_by_hash(tmp_path: Path, builtin: bool, images: str) -> None:
    html = write_report(make_results(tmp_path, builtin=builtin)).read_text(encoding="utf-8")
    policy = next(
        value for _, name, value in read(tmp_path / "report.html").attributes if name == "content" and "default-src" in value
    )
    assert policy.startswith("default-src 'none'") and images in policy
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_no_number_is_ever_nan(tmp_path: Path) -> None:
    make_results(tmp_path, builtin=False)
    for path in (tmp_path / "cells").glob("*[0-9a-f].json"):
        if ".timing" in path.name:
            continue
        raw = json.loads(path.read_text())
        for summary in (raw["selected"], raw["plain"], raw["best_by_truth"], *raw["nulls"].values()):
            summary["psnr"] = dict.fromkeys(summary["psnr"], float("nan"))
            summary["ssim"]["high"] = float("inf")
        raw["records"][0] |= {"psnr": float("nan"), "rank": None}
        raw["regret_db"] = {"median": float("nan"), "worst": float("-inf"), "flagged": True}
        raw["bytes"] = {"up": float("nan"), "dense": 0}
        raw["bar"] = {"identified": {"value": float("nan")}}
        path.write_text(json.dumps(raw))
    text = read(write_report(tmp_path)).text
    assert not re.search(r"\b(nan|inf|infinity|none type|undefined)\b", text, re.IGNORECASE)


def test_an_unfinished_run_says_so_with_the_command(tmp_path: Path) -> None:
    text = read(write_report(make_results(tmp_path, missing=2))).text
    assert "6 of 8 cells are done. The same command continues it. gradveil audit" in text


def test_a_failing_check_is_shown_with_its_remedy(tmp_path: Path) -> None:
    failing = [replace(DEFENSES[0], checks=[FAIL]), *DEFENSES[1:]]
    text = read(write_report(make_results(tmp_path, defenses=failing))).text
    assert "No verdict, because a check failed: The matching loss never fell" in text
    assert "Remedy: Raise the step budget" in text
    assert "identified 15 of 16 records" not in text[: text.index("Who attacks")]


def test_missing_and_damaged_pictures_cost_only_the_pictures(tmp_path: Path) -> None:
    make_results(tmp_path, without_pictures=[0, 1])
    (tmp_path / "cells" / (json.loads((tmp_path / "run.json").read_text())["cells"][2] + ".npz")).write_bytes(
        b"PK\x03\x04 not a zip"
    )
    text = read(write_report(tmp_path)).text
    assert text.count("is missing or cannot be read") == 3


def test_a_run_of_one_undefended_cell_makes_a_page(tmp_path: Path) -> None:
    text = read(write_report(make_results(tmp_path, defenses=DEFENSES[:1]))).text
    assert "No defense was measured in this run." in text
    assert "Privacy against cost" not in text and "Batch size, local steps" not in text


def test_a_grid_gets_a_heat_map_and_one_chart_per_setting(tmp_path: Path) -> None:
    page = write_report(make_results(tmp_path, grid=GRID, missing=1))
    text = read(page).text
    assert "Batch size, local steps, training state" in text and "not measured" in text
    assert page.read_text(encoding="utf-8").count('class="chart wide-only"') == len(GRID)


def test_costs_are_told_where_they_make_no_chart(tmp_path: Path) -> None:
    text = read(write_report(make_results(tmp_path, defenses=[DEFENSES[0], replace(DEFENSES[3], defense_ms=2.9)]))).text
    assert "Privacy against cost" in text and "against client time" not in text and "63.3 kB" in text


def test_charts_are_well_formed_and_described(tmp_path: Path) -> None:
    html = write_report(make_results(tmp_path, hostile=True, grid=GRID)).read_text(encoding="utf-8")
    drawings = re.findall(r'<svg viewBox[^>]*role="img".*?</svg>', html, re.DOTALL)
    assert len(drawings) == 2 * len(GRID) + 2 + 2 + len(DEFENSES)  # the last are risk against error
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert [child.tag for child in root][:2] == ["title", "desc"]
        assert all(child.text for child in root[:2])


def test_the_report_goes_where_asked_and_leaves_nothing_beside(tmp_path: Path) -> None:
    make_results(tmp_path / "in")
    out = write_report(tmp_path / "in", out=tmp_path / "new" / "my.html")
    assert out == tmp_path / "new" / "my.html"
    assert [path.name for path in out.parent.iterdir()] == ["my.html"]


def test_a_place_that_cannot_be_written_is_one_clear_sentence(tmp_path: Path) -> None:
    make_results(tmp_path / "in")
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "report.html"):
        with pytest.raises(UsageError, match="cannot write the report"):
            write_report(tmp_path / "in", out=out)


def test_the_report_needs_no_torch(tmp_path: Path) -> None:
    make_results(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; from gradveil.report import write_report; "
        "write_report(Path(sys.argv[1])); print(sorted({'skimage', 'sklearn', 'scipy', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    make_results(tmp_path)
    assert write_report(tmp_path).read_bytes() == write_report(tmp_path, out=tmp_path / "again.html").read_bytes()


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (2, 8, 8), (5, 300, 200)])
def test_pictures_of_any_channels_and_size_can_be_shown(shape: tuple[int, ...]) -> None:
    picture = np.full(shape, np.nan, np.float32)
    assert data_uri(picture).startswith("data:image/png;base64,")
    assert len(data_uri(np.random.default_rng(0).random(shape).astype(np.float32))) < 60_000


def test_psnr_of_a_picture() -> None:
    zeros, tenth = np.zeros((1, 2, 2), np.float32), np.full((1, 2, 2), 0.1, np.float32)
    assert psnr(zeros, tenth) == pytest.approx(20.0)
    assert psnr(zeros, zeros) == 60.0
    assert psnr(zeros, np.zeros((3, 2, 2), np.float32)) is None


def test_the_frontier_keeps_what_nothing_beats() -> None:
    assert on_frontier([1.0, 1.2, None, 1.1], [0.9, 0.3, 0.1, 0.9]) == [True, True, False, False]
    assert on_frontier([0.6, 0.5], [0.9, 0.3], lower_is_better=False) == [True, True]
    assert on_frontier([1.0, 1.0], [0.5, 0.5]) == [True, True]
