"""A study: a plan whose results are published, and the table that is made of them.

``studies/NAME.toml`` is a plan with one more table, ``[study]``, that says how the results are shown. Where a table compares what
no single grid holds, ``[[study.grids]]`` lists several: each changes some keys of the plan, and the study is all their cells.

    study = Study.from_toml(Path("studies/first_light_photos.toml"))
    study.plans                     # one plan, or one for every grid

What no plan says is a scripted study: ``script`` in ``[study]`` names a Python file beside it, ``[settings]`` what it is given.
`load_study` reads either kind.

Data and weights that are not ours are named by their file alone, never by a place on somebody's machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError, suggest
from gradveil.study.declare import Key, key, keys_of, read_value
from gradveil.study.document import OF_PLAN, PAIRED, start_at
from gradveil.study.plan import Plan
from gradveil.study.readers import choice, named, text

__all__ = ["BEFORE", "STUDY_FORMAT", "STUDY_KEYS", "TABLES", "Layout", "ScriptedStudy", "Study", "load_study"]

STUDY_FORMAT = "gradveil-study-1"
BEFORE = "before provenance"
"""What stands for the provenance of results that were kept before there was any: which code made them is not known."""
TABLES = ("attacks", "levels", "settings", "summary", "accuracy", "none")
SCRIPTED = "script"
"""What the results say of tables that a script made."""
GRIDS, SETTINGS = "grids", "settings"


def titles(place: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Read what spellings are called in the table, in the order of its rows."""
    if isinstance(value, Mapping):
        return tuple((named(place, spelling), named(f"{place}: {spelling}", title)) for spelling, title in value.items())
    if isinstance(value, tuple) and not value:
        return ()
    raise UsageError(f'{place} is {value!r}; write it as a section, [study.rows], with lines such as "dgp" = "DGP"')


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the results of a study are shown; what it measures stands in its plan."""

    title: str = key("", text, "what the study shows, in one line", section="study")
    table: str = key(
        "attacks",
        choice(*TABLES),
        "kind of its table: attacks, levels, settings, summary, accuracy or none",
        section="study",
        docs="kind of its table: `attacks` (one row a defense: plain, informed and null), `levels` (one row a defense: label, "
        "list, picture, gap and power), `settings` (one row a model, batch and attackers), `summary` (as the README's), "
        "`accuracy` (over paired seeds; nothing is attacked), or `none`",
    )
    page: str = key("", text, "page of the docs that shows its table", section="study")
    rows: tuple[tuple[str, str], ...] = key(
        (),
        titles,
        "a table of its own: spelling of a defense or model = what it is called, in the order shown",
        section="study",
        docs="a table of its own, `[study.rows]`: spelling of a defense or model = what it is called, in the order shown; left "
        "out: every row, under its spelling",
    )
    notes: tuple[str, ...] = key((), text, "remarks, one or a list", section="study", axis=True, plan=())
    script: str = key("", text, "Python file beside the study that measures it and makes its tables", section="study")

    def as_dict(self) -> dict[str, Any]:
        """Return the layout as plain values, as ``[study]`` holds it; rows are a list, because their order counts."""
        return {
            "title": self.title,
            "table": SCRIPTED if self.script else self.table,
            "page": self.page,
            "rows": [list(row) for row in self.rows],
            "notes": list(self.notes),
        }


STUDY_KEYS = keys_of(Layout)


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is measured and how it is shown.

    Attributes:
        name: Of its file, its results and its marks in the docs.
        layout: The section ``[study]``.
        plan: What all grids have in common.
        plans: One for every grid; the plan alone where there are none.
    """

    name: str
    layout: Layout
    plan: Plan
    plans: tuple[Plan, ...]

    @property
    def attacks(self) -> bool:
        """Whether records are attacked; a table of accuracies needs trainings alone."""
        return self.layout.table != "accuracy"

    @classmethod
    def from_toml(cls, path: Path) -> Study:
        """Read a study file; raise one sentence for whatever is wrong with it."""
        return cls.from_dict(_read_toml(path), name=path.stem, where=str(path), folder=path.parent)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, name: str, where: str = "study", folder: Path | None = None) -> Study:
        """Return the study of a parsed document.

        Args:
            document: The sections of a plan, and ``study``.
            name: What the study is called.
            where: What to call the document in sentences.
            folder: Where relative paths start; None leaves them alone.
        """
        table = document.get("study")
        if not isinstance(table, Mapping):
            raise UsageError(f"{where} is a plan and no study: it has no section [study]; add one with a title and a table")
        if table.get(SCRIPTED):
            raise UsageError(f"{where} is measured by {table[SCRIPTED]!r} and has no plan; `gradveil study run` runs it")
        plan = Plan.from_dict({each: keys for each, keys in document.items() if each != "study"}, where=where, folder=folder)
        plan = plan if plan.title else plan.replace(title=str(table.get("title", "")))
        asked = table.get(GRIDS, [])
        if not isinstance(asked, list) or not all(isinstance(each, Mapping) for each in asked):
            raise UsageError(f"{where}: grids in [study] is {asked!r}; write each as a section of its own, [[study.{GRIDS}]]")
        grids = [_read_grid(each, f"{where}: grid {number}", folder) for number, each in enumerate(asked, start=1)]
        layout = Layout(**_read_layout(table, where))
        if layout.table == "accuracy" and plan.utility is None:
            raise UsageError(f"{where}: a table of accuracies needs trainings; add a section [utility]")
        return cls(name=name, layout=layout, plan=plan, plans=tuple(plan.override(**grid) for grid in grids) or (plan,))


@dataclass(frozen=True, kw_only=True)
class ScriptedStudy:
    """What no plan says: measured by a script of its own, which makes the tables, too.

    Attributes:
        name: Of its file, its results and its marks in the docs.
        layout: The section ``[study]``.
        script: The Python file.
        settings: The section ``[settings]``; ``data``, ``weights`` and ``device`` mean what they mean in a plan.
    """

    name: str
    layout: Layout
    script: Path
    settings: dict[str, Any]


def load_study(path: Path) -> Study | ScriptedStudy:
    """Read a study file of either kind; raise one sentence for whatever is wrong with it."""
    document = _read_toml(path)
    table = document.get("study")
    if not isinstance(table, Mapping) or SCRIPTED not in table:
        return Study.from_toml(path)
    layout, settings = Layout(**_read_layout(table, str(path))), document.get(SETTINGS, {})
    excess = sorted({*document} - {"study", SETTINGS} | {f"study.{each}" for each in ("table", "rows", GRIDS) if each in table})
    if excess:
        raise UsageError(f"{path}: a scripted study has no [{excess[0]}]; what its script needs to know goes into [{SETTINGS}]")
    if not layout.script or Path(layout.script).name != layout.script:
        raise UsageError(f"{path}: script in [study] is {layout.script!r}; name a Python file beside the study, NAME.py")
    if not isinstance(settings, dict):
        raise UsageError(f"{path}: settings is {settings!r}; write it as a section, [{SETTINGS}]")
    return ScriptedStudy(name=path.stem, layout=layout, script=path.parent / layout.script, settings=settings)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read as TOML: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read the study {str(path)!r}: {error.strerror or error}") from error


def _read_layout(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {each.toml: each for each in STUDY_KEYS}
    fields = {}
    for name, value in table.items():
        if name == GRIDS:
            continue
        if name not in known:
            raise UsageError(f"{where}: [study] has no key {name!r}{suggest(name, [*known, GRIDS])}")
        fields[known[name].name] = read_value(known[name], f"{where}: {name} in [study]", value, keys=STUDY_KEYS)
    return fields


def _read_grid(table: Mapping[str, Any], where: str, folder: Path | None) -> dict[str, Any]:
    known: dict[str, Key] = {each.toml: each for each in OF_PLAN if each.section != "audit" or each.name not in ("title", "out")}
    fields = {}
    for name, value in table.items():
        if name not in known:
            raise UsageError(f"{where} has no key {name!r}{suggest(name, known)}")
        fields[known[name].name] = read_value(known[name], f"{where}: {name}", value, keys=OF_PLAN, paired=PAIRED)
    return fields if folder is None else start_at(fields, folder)
