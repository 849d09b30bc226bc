"""Whether worker processes would run the caller's script again, because nothing in it keeps them from doing so.

A process that is spawned imports the script it was started from. What stands there outside ``if __name__ == "__main__":`` is run
again, and whoever starts processes there starts them for ever; Python answers with a page of tracebacks from each.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType

__all__ = ["starts_again_in_workers"]


def starts_again_in_workers() -> bool:
    """Whether the statement of the main script that led here would be executed in a spawned process, too."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if main is None or not file:  # typed in, or handed over by a notebook: nothing is imported again
        return False
    line = _line_of(main.__dict__)
    if line is None:
        return False
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    around = (each for each in ast.walk(tree) if isinstance(each, ast.If) and each.lineno <= line <= (each.end_lineno or 0))
    return not any(_is_guard(each) for each in around)


def _line_of(names: dict[str, object]) -> int | None:
    """Return the line of the main script, outside its functions, that is being executed."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is names and frame.f_code.co_name == "<module>":
            return frame.f_lineno
        frame = frame.f_back
    return None


def _is_guard(statement: ast.If) -> bool:
    """Whether an ``if`` asks whether this is the main script."""
    parts = list(ast.walk(statement.test))
    asked = any(isinstance(each, ast.Name) and each.id == "__name__" for each in parts)
    return asked and any(isinstance(each, ast.Constant) and each.value == "__main__" for each in parts)
