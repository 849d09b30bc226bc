"""The reference pages that follow from declarations: tables of the keys of a plan, and of the options of commands.

A page marks the place of a table with ``<!-- keys: SECTION -->`` or ``<!-- options: COMMAND -->``, and ``<!-- end -->``;
``make index`` fills it, a test compares.
"""

from __future__ import annotations

import re
from typing import Any

from gradveil.study.declare import keys_of
from gradveil.study.document import KEYS, NO_OPTION, OF_PLAN, PAIRED, toml_text
from gradveil.study.federation import FederationSettings
from gradveil.study.published import STUDY_KEYS

__all__ = ["OPTIONS", "fill_page", "options_of", "table_of"]

MARK = re.compile(r"(<!-- (keys|options): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
OPTIONS = {
    "audit": tuple(key for key in OF_PLAN if key.name not in NO_OPTION),
    "train": tuple(key for key in keys_of(FederationSettings) if key.name != "device"),
}
"""Settings that a command has an option for."""
LONG = 40


def table_of(section: str) -> str:
    """Return the keys of a section as a table in Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key in (key for key in (*KEYS, *STUDY_KEYS) if key.section == section):
        spans = key.axis and key.name not in (*PAIRED, "fail_if", "notes")
        lead = "*axis*: " if spans else ""
        rows.append(f"| `{key.toml}` | {_default(key.in_plan)} | {lead}{key.docs or key.meaning} |")
    return "\n".join(rows) + "\n"


def fill_page(page: str) -> str:
    """Return a page with every marked table made anew."""
    makers = {"keys": table_of, "options": options_of}
    return MARK.sub(lambda found: f"{found[1]}{makers[found[2]](found[3])}{found[4]}", page)


def options_of(command: str) -> str:
    """Return the options of a command that follow from settings, as a table in Markdown."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for key in OPTIONS[command]:
        default = key.in_plan if command == "audit" else key.default
        again = "; repeatable" if command == "audit" and key.axis else ""
        rows.append(f"| `{key.option}` | {_default(default)} | {key.meaning}{again} |")
    return "\n".join(rows) + "\n"


def _default(value: Any) -> str:
    if isinstance(value, tuple):
        value = value[0] if len(value) == 1 else list(value)
    if value in ("", []):
        return ""
    text = toml_text(value)
    if isinstance(value, list) and len(text) > LONG:
        return f"{len(value)} of them"
    return f"`{text}`" if isinstance(value, str) else text
