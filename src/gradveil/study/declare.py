"""One declaration of a setting, from which everything else about it follows.

    learning_rate: float = key(0.01, positive, "step size of the local steps", section="training")

The line gives the field and its default, its place in a plan file, its JSON name, its part in the key of a result, its
command-line option, the sentence that refuses a wrong value, and its line in docs/plans.md. Nothing else lists settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gradveil.errors import UsageError
from gradveil.study.readers import Reader

__all__ = ["Key", "again", "check_values", "key", "keys_of", "part_of", "read_value", "without_unused"]

METADATA = "gradveil key"
UNSET: Any = object()
S = TypeVar("S")


@dataclass(frozen=True)
class Key:
    """One setting.

    Attributes:
        name: Of the field, in JSON and, with hyphens, on the command line.
        section: The table of a plan file it stands in.
        toml: Its name there.
        default: Of a single cell or training.
        read: Checks one value: ``(place, value) -> value``.
        meaning: One phrase, for help texts and the commented plan.
        docs: What docs/plans.md says of it; the phrase where there is no more to say.
        axis: Whether a plan may give a list, which spans an axis of its grid.
        plan: What a plan takes where nothing is said, if not the default.
        metavar: What its option calls a value.
    """

    name: str
    section: str
    toml: str
    default: Any
    read: Reader
    meaning: str
    docs: str = ""
    axis: bool = False
    plan: Any = UNSET
    metavar: str = ""

    @property
    def option(self) -> str:
        """The command-line option."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def in_plan(self) -> Any:
        """What a plan takes where nothing is said: a tuple for an axis, empty where the default is."""
        if self.plan is not UNSET:
            return self.plan
        return ((self.default,) if self.default != "" else ()) if self.axis else self.default


def key(default: Any, read: Reader, meaning: str, **more: Any) -> Any:
    """Declare a setting as a field of a dataclass; ``more`` holds other attributes of `Key`."""
    return dataclasses.field(default=default, metadata={METADATA: {"read": read, "meaning": meaning, **more}})


def again(home: type, name: str, default: Any, **more: Any) -> Any:
    """Declare an inherited setting with another default; everything else about it stays as it was said, but for ``more``."""
    declared = next(field for field in dataclasses.fields(home) if field.name == name)
    told = {**declared.metadata[METADATA], **more}
    return dataclasses.field(default=default, metadata={METADATA: told})


def keys_of(kind: type, *, section: str = "") -> list[Key]:
    """Return the settings of a class in the order they were declared, all in one section where one is named."""
    found = []
    for field in dataclasses.fields(kind):
        if METADATA in field.metadata:
            told = {"toml": field.name, "section": section, **field.metadata[METADATA]}
            found.append(Key(name=field.name, default=field.default, **(told | ({"section": section} if section else {}))))
    return found


def check_values(settings: Any, prefix: str = "") -> None:
    """Read every value of a settings object again, in its place; called once, when it is made."""
    for each in keys_of(type(settings)):
        object.__setattr__(settings, each.name, each.read(prefix + each.name, getattr(settings, each.name)))


def part_of(kind: type[S], settings: Any) -> S:
    """Return the settings of a larger object that belong to one kind, as in ``part_of(DataSource, cell)``."""
    return kind(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]


def without_unused(kind: type, values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return values without the named ones that have their default: settings that came later change no key where not used."""
    usual = {field.name: field.default for field in dataclasses.fields(kind) if field.name in set(names)}
    return {name: value for name, value in values.items() if name not in usual or usual[name] != value}


def read_value(found: Key, place: str, value: Any, *, keys: Iterable[Key] = (), paired: Mapping[str, str] | None = None) -> Any:
    """Return the checked value of a key of a plan: one value, or a tuple for an axis.

    Args:
        found: The key.
        place: Where it stands, for the sentence.
        value: What was given.
        keys: All keys, to tell which may be lists.
        paired: Axes that go with another one, entry by entry; their equal entries are kept.
    """
    if not found.axis:
        if isinstance(value, (list, tuple)):
            raise UsageError(f"{place} is a list; only {', '.join(each.toml for each in keys if each.axis)} may be lists")
        return found.read(place, value)
    values = value if isinstance(value, (list, tuple)) else [value]
    checked = [found.read(place, each) for each in values]
    # Equal points of an axis would be the same cells twice; lists that pair up with another one are kept as they are.
    together = {name for pair in (paired or {}).items() for name in pair}
    return tuple(checked if found.name in together else dict.fromkeys(checked))
