"""What is made from other files is what those say: the index of methods, tables of keys, and tables of published studies."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gradveil.registry import INDEX
from gradveil.report.study_tables import fill_studies
from gradveil.storage.study_file import read_study
from gradveil.study.document import SECTIONS
from gradveil.study.published import load_study
from gradveil.study.reference import fill_page, table_of
from scripts.generate import DOCS, PAGES, RESULTS, ROOT, STUDIES, index_text, page_text, shown_by

AGAIN = "run `make index`"


def test_the_index_names_every_method() -> None:
    assert json.loads(INDEX.read_text(encoding="utf-8")) == json.loads(index_text()), AGAIN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_in_the_docs_are_current(page: Path) -> None:
    assert page_text(page) == page.read_text(encoding="utf-8"), AGAIN


@pytest.mark.parametrize("file", sorted(STUDIES.glob("*.toml")), ids=lambda file: file.stem)
def test_a_study_its_results_and_its_page_agree(file: Path) -> None:
    layout = load_study(file).layout
    if not (RESULTS / f"{file.stem}.json.xz").is_file():
        assert layout.page == "", "a page shows a study that has no results"
        return
    content = read_study(RESULTS / f"{file.stem}.json.xz")
    assert {**content, **shown_by(file)} == content, AGAIN
    if layout.table != "none" and layout.page:
        marks = re.findall(r"<!-- study: (.*?) -->", (ROOT / layout.page).read_text(encoding="utf-8"))
        named = [name.strip().partition("#")[0] for mark in marks for name in mark.split(",")]
        assert file.stem in named, f"{layout.page} has no table of it"


def test_every_table_of_a_script_is_shown_somewhere() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    marks = {mark for page in pages for mark in re.findall(r"<!-- study: (.*?) -->", page)}
    for path in RESULTS.glob("*.json.xz"):
        content = read_study(path)
        for part in content.get("tables", {}):
            assert (f"{content['name']}#{part}" if part else content["name"]) in marks


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_its_table_in_the_docs(section: str) -> None:
    assert table_of(section) in (DOCS / "plans.md").read_text(encoding="utf-8")


def test_a_stale_table_is_noticed() -> None:
    page = "# Page\n\n<!-- keys: data -->\n| key |\n<!-- end -->\n"
    assert "`source`" in fill_page(page) != page
    stale = "<!-- study: first_light_audit -->\n| `none` | 15 of 16 |\n<!-- end -->\n"
    assert "| `none` | 16 of 16 (81–100 %), null 22 % |" in fill_studies(stale, RESULTS) != stale


def test_an_example_of_a_mark_stays_an_example() -> None:
    example = "    <!-- study: first_light_audit -->\n    <!-- end -->\n"
    assert fill_studies(example, RESULTS) == example
