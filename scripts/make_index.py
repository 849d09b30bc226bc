"""Write the index of methods: name, module and catalogue entry of everything that is registered. ``make index`` runs it.

The index lets ``gradveil list`` and ``gradveil show`` answer without torch, and a client load one defense without the others.
A test compares it with what the modules register, so a new method is one file and one run of this script.
"""

from __future__ import annotations

import json
import sys

from gradveil.registry import INDEX
from gradveil.storage.files import write_whole
from gradveil.testing.index import make_index


def main() -> int:
    """Write the index where it differs from what is there."""
    text = json.dumps(make_index(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    if INDEX.is_file() and INDEX.read_text(encoding="utf-8") == text:
        print(f"{INDEX.name} is up to date")
        return 0
    write_whole(INDEX, text.encode())
    print(f"{INDEX.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
