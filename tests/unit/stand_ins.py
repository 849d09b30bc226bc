"""Stand-ins for tests that hand a function only what it looks at, and note what it hands on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def fake(**fields: Any) -> Any:
    """Return something that has these fields and no others: whatever else a function looks at is an error."""
    return SimpleNamespace(**fields)


def noted(where: list[Any], given: Any) -> Any:
    """Note what was handed on; nothing comes back, so that an answer may stand behind ``or``."""
    where.append(given)
