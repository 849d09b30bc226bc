"""A plan as a document: its keys by section, how they are read from TOML, and how values are written there.

All keys are declared where their settings are; here they only find their place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError, suggest
from gradveil.registry import indexed, split_chain
from gradveil.study.cell import Cell
from gradveil.study.declare import key, keys_of, read_value
from gradveil.study.federation import UtilitySettings
from gradveil.study.readers import flag, named, text

__all__ = ["KEYS", "NO_OPTION", "OF_PLAN", "PAIRED", "SECTIONS", "read_document", "start_at", "toml_text"]

NETWORK_FILE = re.compile(r"""(["'])([^"']+\.(?:safetensors|json))\1""")
"""Weights, or the card beside them, that a setting inside a spelling names, as in refiner(network='own.safetensors')."""
PAIRED = {"labels": "data", "weights": "model"}
"""Lists that go with another one, entry by entry, instead of spanning an axis."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Settings of a plan as a whole, which no cell has."""

    title: str = key("", text, "what the report is called", section="audit")
    fail_if: str = key(
        "",
        named,
        "exit with 1 if more leaks, as in identified>0.05, list>0.05, label>0.5 or invre>0.45",
        section="audit",
        axis=True,
        metavar="LIMIT",
        docs="one limit or a list, see below",
    )
    power: bool = key(
        False,
        flag,
        "whether to show how strong the attackers are: weaker settings of every defense, and planted leaks",
        section="audit",
        docs="whether to show [how strong the attackers are](power.md): the same ensemble against weaker settings of every "
        "defense and against planted leaks; always with `standard` and `strong`. No part of a cell's key",
    )
    out: str = key(
        "", text, "folder for results", section="audit", docs="folder for results; left out: `audit-NAME`, after the plan"
    )


OF_PLAN = (*keys_of(Whole), *keys_of(Cell))
"""Keys that are fields of a plan; those of ``[utility]`` are one field together."""
NO_OPTION = ("out", "title")
"""Keys that are no plain option: the folder has one of its own, and a title belongs in a file."""
SECTIONS = ("audit", "data", "training", "grid", "vertical", "utility")
KEYS = tuple(sorted((*OF_PLAN, *keys_of(UtilitySettings, section="utility")), key=lambda each: SECTIONS.index(each.section)))
"""Every key a plan file may hold, section by section."""


def read_document(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a plan from its parsed TOML, or raise with the nearest right section or key.

    The section ``utility`` becomes one field, a table of its own; that it is there, be it empty, asks for utility.

    Args:
        document: Sections with their keys.
        where: Name of the file, for sentences.
    """
    fields: dict[str, Any] = {}
    for section, table in document.items():
        if section not in SECTIONS:
            raise UsageError(f"{where}: {_unknown_section(section, table)}")
        if not isinstance(table, Mapping):
            raise UsageError(f"{where}: {section} is {table!r}; write it as a section, [{section}], with keys below it")
        found = fields.setdefault("utility", {}) if section == "utility" else fields
        for name, value in table.items():
            key = next((key for key in KEYS if (key.section, key.toml) == (section, name)), None)
            if key is None:
                raise UsageError(f"{where}: {_unknown_key(section, name)}")
            place = f"{where}: {name} in [{section}]"
            if key.axis and value == []:
                raise UsageError(f"{place} is an empty list; name at least one, or leave the key out")
            found[key.name] = read_value(key, place, value, keys=KEYS, paired=PAIRED)
    return fields


def _unknown_section(section: str, table: Any) -> str:
    home = next((key.section for key in KEYS if key.toml == section), None)
    if home is not None and not isinstance(table, Mapping):
        return f"{section!r} stands outside a section; it belongs in [{home}]"
    return f"there is no section [{section}]{suggest(section, SECTIONS)}"


def _unknown_key(section: str, name: str) -> str:
    homes = [key.section for key in KEYS if key.toml == name]
    if homes:
        return f"[{section}] has no key {name!r}; it belongs in [{homes[0]}]"
    own = suggest(name, [key.toml for key in KEYS if key.section == section])
    if own.endswith("?"):
        return f"[{section}] has no key {name!r}{own}"
    anywhere = suggest(name, [key.toml for key in KEYS])
    if anywhere.endswith("?"):
        right = anywhere.split("'")[1]
        home = next(key.section for key in KEYS if key.toml == right)
        return f"[{section}] has no key {name!r}; did you mean {right!r} in [{home}]?"
    return f"[{section}] has no key {name!r}{own}"


def toml_text(value: Any) -> str:
    """Return a value as TOML; texts, numbers, flags and lists of them.

    >>> toml_text(["a", True, 1e-3])
    '["a", true, 0.001]'
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_text(each) for each in value)}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def start_at(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields with relative paths starting at the plan's folder."""
    base = "" if folder == Path() else str(folder)

    def join(text: str) -> str:
        return text if not text or text.startswith("~") else os.path.join(base, text)

    def join_source(text: str) -> str:
        named = not (os.sep in text or "/" in text or Path(text).suffix)
        return text if named and _is_name(text, base) else join(text)

    def join_code(text: str) -> str:
        parts = [re.sub(r"^[^(:]+\.py(?=:)", lambda file: join(file[0]), part) for part in split_chain(text)]
        return " + ".join(NETWORK_FILE.sub(lambda found: f"{found[1]}{join(found[2])}{found[1]}", part) for part in parts)

    moves = {
        **dict.fromkeys(("labels", "weights", "out"), join),
        **dict.fromkeys(("model", "loss", "defense"), join_code),
        "data": join_source,
    }
    moved = dict(fields)
    for name, move in moves.items():
        if name in fields:
            value = fields[name]
            moved[name] = tuple(move(each) for each in value) if isinstance(value, tuple) else move(value)
    return moved


def _is_name(text: str, base: str) -> bool:
    """Whether a bare word is a built-in name rather than a folder beside the plan."""
    if not os.path.exists(os.path.join(base, text)):
        return True
    return text in indexed("dataset")
