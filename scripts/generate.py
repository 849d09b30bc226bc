"""Write what follows from declarations: the index of methods, and the tables of keys in the docs. ``make index`` runs it.

The index lets ``gradveil list`` and ``gradveil show`` answer without torch, and a client load one defense without the others.
Tests compare both with what they are made of, so a new method or key is one place in the code and one run of this script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gradveil.registry import INDEX
from gradveil.storage.files import write_whole
from gradveil.study.reference import fill_page
from gradveil.testing.index import make_index

DOCS = Path(__file__).resolve().parents[1] / "docs"


def index_text() -> str:
    """Return the index as its file holds it."""
    return json.dumps(make_index(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main() -> int:
    """Write every file that differs from what it should hold."""
    wanted = {INDEX: index_text()}
    wanted |= {page: fill_page(page.read_text(encoding="utf-8")) for page in sorted(DOCS.glob("*.md"))}
    for path, text in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text.encode())
            print(f"{path.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
