"""What is made from declarations is what the declarations say: the index of methods, and the tables of keys in the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradveil.registry import INDEX
from gradveil.study.document import SECTIONS
from gradveil.study.reference import fill_page, table_of
from scripts.generate import DOCS, index_text

AGAIN = "run `make index`"


def test_the_index_names_every_method() -> None:
    assert json.loads(INDEX.read_text(encoding="utf-8")) == json.loads(index_text()), AGAIN


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_tables_in_the_docs_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill_page(text) == text, AGAIN


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_its_table_in_the_docs(section: str) -> None:
    assert table_of(section) in (DOCS / "plans.md").read_text(encoding="utf-8")


def test_a_stale_table_is_noticed() -> None:
    page = "# Page\n\n<!-- keys: data -->\n| key |\n<!-- end -->\n"
    assert "`source`" in fill_page(page) != page
