"""Write what follows from other files: the index of methods, tables of keys, tables of studies. ``make index`` runs it.

The index lets ``gradveil list`` and ``gradveil show`` answer without torch, and a client load one defense without the others.
Tests compare all with what they are made of, so a new method, key or measurement is one place and one run of this script. What
``studies/`` says of tables goes into the results too, which carry it to those who have no checkout; their figures stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gradveil.registry import INDEX
from gradveil.report.study_tables import fill_studies
from gradveil.run.scripted import tables_of
from gradveil.storage.files import write_whole
from gradveil.storage.study_file import read_study, write_study
from gradveil.study.published import ScriptedStudy, load_study
from gradveil.study.reference import fill_page
from gradveil.testing.index import make_index

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS, STUDIES = ROOT / "docs", ROOT / "results", ROOT / "studies"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))


def index_text() -> str:
    """Return the index as its file holds it: a line for each method, because indentation was a third of its weight."""

    def listed(methods: dict[str, Any]) -> str:
        lines = (
            f"{json.dumps(name)}: {json.dumps(told, ensure_ascii=False, sort_keys=True)}"
            for name, told in sorted(methods.items())
        )
        return "{\n" + ",\n".join(lines) + "\n}"

    return "{\n" + ",\n".join(f'"{kind}": {listed(methods)}' for kind, methods in sorted(make_index().items())) + "\n}\n"


def page_text(page: Path) -> str:
    """Return a page with all its tables made anew."""
    return fill_studies(fill_page(page.read_text(encoding="utf-8")), RESULTS)


def shown_by(file: Path) -> dict[str, Any]:
    """Return what the results of a study should say of its tables: the layout, and what a script makes of the documents."""
    study, found = load_study(file), read_study(RESULTS / f"{file.stem}.json.xz")
    made = {"tables": tables_of(study, found["documents"])} if isinstance(study, ScriptedStudy) else {}
    return {"study": study.layout.as_dict(), **made}


def renew_layouts() -> None:
    """Bring what the results say of their tables to what the study files say now."""
    for file in sorted(STUDIES.glob("*.toml")):
        path = RESULTS / f"{file.stem}.json.xz"
        if path.is_file() and {**(found := read_study(path)), **shown_by(file)} != found:
            write_study(path, {**found, **shown_by(file)})
            print(f"{path.name} written")


def main() -> int:
    """Write every file that differs from what it should hold."""
    renew_layouts()
    wanted = {INDEX: index_text()}
    wanted |= {page: page_text(page) for page in PAGES}
    for path, text in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text.encode())
            print(f"{path.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
