"""A plan: a validated grid data × model × training state × batch size × local steps × defense × attack.

    plan = Plan.from_toml(Path("plan.toml"))       # or Plan.default(records=64, defense=["none", "pruning:ladder"])
    cells = cells_of(plan)                         # gradveil.run.grid: every name is looked up there, before any work

Paths in a plan file are relative to its folder. All keys are in docs/plans.md.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError, suggest
from gradveil.study.declare import read_value
from gradveil.study.document import KEYS, OF_PLAN, PAIRED, SECTIONS, read_document, start_at, toml_text
from gradveil.study.federation import UtilitySettings

__all__ = ["Plan"]

PATHS = ("data", "labels", "weights")


class Plan:
    """What to measure: one value for every setting of a cell, or a tuple for those that span an axis of the grid.

    A plan has an attribute for every key that a cell declares, and for its own: ``title``, ``fail_if`` and ``out``. One value may
    be given for a tuple of one. Plans are values: equal ones are equal, and none changes.

    Attributes:
        utility: How to train with every defense, to measure accuracy, bytes and time; None measures privacy alone.
    """

    utility: UtilitySettings | None

    def __init__(self, *, utility: UtilitySettings | None = None, **given: Any) -> None:
        """Check every value; names are looked up later, by `gradveil.run.grid`."""
        names = [key.name for key in OF_PLAN]
        for name in given:
            if name not in names:
                raise UsageError(f"a plan has no {name!r}{suggest(name, [*names, 'utility'])}")
        values = {}
        for key in OF_PLAN:
            value = read_value(key, key.name, given.get(key.name, key.in_plan), keys=OF_PLAN, paired=PAIRED)
            if key.axis and not value and key.in_plan:
                raise UsageError(f"{key.name} is empty; name at least one")
            values[key.name] = tuple(os.path.expanduser(each) for each in value) if key.name in PATHS else value
        values["scale"] = "" if values["scale"] == "auto" else values["scale"]
        for name, partner in PAIRED.items():
            count, wanted = len(values[name]), len(values[partner])
            if count not in (0, 1, wanted):
                raise UsageError(f"there are {count} {name} for {wanted} entries of {partner}; give one for all, or one for each")
        self.__dict__.update(values, utility=utility)

    def __getattr__(self, name: str) -> Any:
        """Answer a misspelt setting with the nearest one; those there are were set when the plan was made."""
        raise AttributeError(f"a plan has no {name!r}{suggest(name, self.__dict__)}")

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: a plan is a value."""
        raise AttributeError(f"a plan does not change; use plan.override({name}=...)")

    def __eq__(self, other: object) -> bool:
        """Whether all settings are equal."""
        return isinstance(other, Plan) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        """Return a hash of all settings."""
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        """Return the plan with what differs from the default."""
        usual = Plan().__dict__ if self.__dict__ else {}
        changed = (f"{name}={value!r}" for name, value in self.__dict__.items() if value != usual.get(name))
        return f"Plan({', '.join(changed)})"

    @classmethod
    def default(cls, **overrides: Any) -> Plan:
        """Return the plan that runs without a plan file, with some values changed."""
        return cls().override(**overrides)

    @classmethod
    def from_toml(cls, path: Path) -> Plan:
        """Read a plan file; raise one sentence for whatever is wrong with it."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{str(path)!r} cannot be read as TOML: {error}") from error
        except OSError as error:
            raise UsageError(f"cannot read the plan {str(path)!r}: {error.strerror or error}") from error
        return cls.from_dict(document, where=str(path), folder=path.parent)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, where: str = "plan", folder: Path | None = None) -> Plan:
        """Return the plan of a parsed document, as `as_dict` gives it.

        Args:
            document: Sections with their keys.
            where: What to call it in sentences.
            folder: Where relative paths start; None leaves them alone.
        """
        fields = read_document(document, where)
        try:
            if "utility" in fields:
                fields["utility"] = UtilitySettings(**fields["utility"])
            return cls(**(fields if folder is None else start_at(fields, folder)))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error

    def override(self, **changes: Any) -> Plan:
        """Return a copy with some values changed; None leaves a value alone.

        What belongs to a replaced value goes with it: labels, scale and read with the data, weights with the model.
        """
        given = {name: value for name, value in changes.items() if value is not None}
        if "data" in given:
            given = {"labels": (), "scale": "", "read": "", **given}
        if "model" in given:
            given = {"weights": (), "state": tuple(s for s in self.state if s != "given"), **given}
        if given.get("weights") and "state" not in changes:
            given["state"] = ()
        return self.replace(**given)

    def replace(self, **changes: Any) -> Plan:
        """Return a copy with some values changed, and all others as they are."""
        return Plan(**{**self.__dict__, **changes})

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the plan as sections of plain values, without those that are empty; no utility or cut, no section for it."""
        absent = {"utility" if self.utility is None else "", "" if self.cut else "vertical"}
        asked = [section for section in SECTIONS if section not in absent]
        document: dict[str, dict[str, Any]] = {section: {} for section in asked}
        for key in (key for key in KEYS if key.section in asked):
            value = getattr(self.utility if key.section == "utility" else self, key.name)
            if isinstance(value, tuple):
                value = value[0] if len(value) == 1 else list(value)
            if value not in ("", []):
                document[key.section][key.toml] = value
        return document

    def to_toml(self) -> str:
        """Return the plan as a file that `from_toml` reads; paths are written as they are."""
        parts = []
        for section, table in self.as_dict().items():
            parts.append("\n".join([f"[{section}]", *(f"{name} = {toml_text(value)}" for name, value in table.items())]))
        return "\n\n".join(parts) + "\n"
