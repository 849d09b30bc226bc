"""Count the files and functions of ours that one audit of two cells enters: how much of the house a reader must walk through.

python -m scripts.audit_reach
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gradveil

ROOT = str(Path(gradveil.__file__).parent)
AUDIT = ("audit", "--defense", "none", "--defense", "pruning", "--records", "2", "--steps", "3", "--workers", "1", "--quiet")


def main() -> int:
    """Run a small audit in this process and print the counts."""
    from gradveil.cli import main as command_line

    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            entered.add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(note)
        try:
            status = command_line([*AUDIT, "--out", folder])
        finally:
            sys.setprofile(None)
    # Bodies of modules and classes run on import and tell nothing; comprehensions belong to their function.
    functions = {code for code in entered if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")}
    files = {code.co_filename for code in functions}
    loaded = [name for name in sys.modules if name.split(".")[0] == "gradveil"]
    print(f"{len(files)} files and {len(functions)} functions entered, {len(loaded)} modules loaded; exit code {status}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
