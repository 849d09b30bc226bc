"""Cards and lookup: one registry per kind of method, and the one-line spelling users write.

A method registers itself with a card and is then found by the command line, the docs, the report and the contract suites;
nothing else lists methods. Where each one lives stands in a generated index (``make index``), so that one method is found without
importing the others. Registries refuse duplicates, answer an unknown name or field with the nearest right one, and read plug-ins
from the entry-point group ``gradveil.<kind>`` (a module that registers on import).

Spelling: ``gaussian_noise(std=0.01)``; several defenses in a row: ``clipping(bound=1) + gaussian_noise(std=0.01)``.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from gradveil.errors import GradveilError, UsageError, suggest

__all__ = ["INDEX", "Card", "Registry", "config_of", "import_object", "indexed", "parse_call", "spell", "split_chain"]

INDEX = Path(__file__).with_name("index.json")
"""Name, module and catalogue entry of every method of the package, by kind; written by ``make index``, checked by a test."""

T = TypeVar("T")
C = TypeVar("C", bound="Card")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What a reader needs to know about a method before using it.

    Attributes:
        name: The one name used everywhere, lower case with underscores.
        summary: One sentence.
        paper: Author, title, year; empty for common knowledge.
        url: Where to read it; empty if ``paper`` is.
        cost: What it costs in time, memory or bytes, in words.
        weakness: What is known to go wrong with it.
    """

    name: str
    summary: str
    paper: str = ""
    url: str = ""
    cost: str = ""
    weakness: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the card as plain JSON values."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(v) for v in value)
    return value


@cache
def indexed(kind: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the methods of a kind that the package holds, by name, each with ``module`` and ``entry``; maybe none."""
    everything: dict[str, dict[str, Any]] = json.loads(INDEX.read_text(encoding="utf-8")) if INDEX.is_file() else {}
    return everything.get(kind, {})


class Registry(Generic[T, C]):
    """Named methods of one kind, each with a card of class ``C``."""

    def __init__(self, kind: str, home: str, *, hyphens: bool = False) -> None:
        """Make a registry of ``kind`` whose methods live in the package ``home``; names may hold hyphens where said so."""
        self.kind = kind
        self._home = home
        self._hyphens = hyphens
        self._entries: dict[str, tuple[T, C]] = {}
        self._plugged = False

    def register(self, card: C) -> Callable[[T], T]:
        """Return a decorator that files the decorated method under ``card``."""

        def file(method: T) -> T:
            if card.name in self._entries:
                raise GradveilError(f"two {self.kind}s are called {card.name!r}; rename one")
            bare = card.name.replace("-", "_") if self._hyphens else card.name
            if not bare.isidentifier() or card.name != card.name.lower():
                raise GradveilError(f"{card.name!r} is no name for a {self.kind}: lower case, digits and underscores only")
            if isinstance(method, type):
                method.card = card  # type: ignore[attr-defined]
            self._entries[card.name] = (method, card)
            return method

        return file

    def _plug_in(self) -> None:
        """Load what other packages register; their modules are their own, so the index cannot name them."""
        if self._plugged:
            return
        self._plugged = True
        if not indexed(self.kind):
            importlib.import_module(self._home)
        for point in importlib.metadata.entry_points(group=f"gradveil.{self.kind}"):
            point.load()

    def registered(self) -> Mapping[str, tuple[T, C]]:
        """Return what is registered so far, without importing anything: method and card by name."""
        return dict(self._entries)

    def names(self, pattern: str = "*") -> list[str]:
        """Return the known names that match a shell-style pattern, sorted."""
        self._plug_in()
        return sorted(fnmatch.filter({*indexed(self.kind), *self._entries}, pattern))

    def get(self, name: str) -> T:
        """Return the method called ``name``, or raise with the nearest name."""
        if name not in self._entries and name in indexed(self.kind):
            importlib.import_module(indexed(self.kind)[name]["module"])
        if name not in self._entries:
            self._plug_in()
        if name not in self._entries:
            raise UsageError(f"there is no {self.kind} called {name!r}{suggest(name, self.names())}")
        return self._entries[name][0]

    def card(self, name: str) -> C:
        """Return the card of the method called ``name``."""
        self.get(name)
        return self._entries[name][1]

    def cards(self, pattern: str = "*") -> list[C]:
        """Return the cards of all methods that match ``pattern``."""
        return [self.card(name) for name in self.names(pattern)]

    def build(self, spelling: str | Mapping[str, Any]) -> Any:
        """Return an instance from ``name(field=value)`` or ``{"name": ..., field: value}``.

        A name with a colon, ``module:Class``, is imported instead of looked up.
        """
        if isinstance(spelling, Mapping):
            values = dict(spelling)
            name = str(values.pop("name", ""))
        else:
            name, values = parse_call(spelling)
        method: Any = import_object(name) if ":" in name else self.get(name)
        if not (isinstance(method, type) and dataclasses.is_dataclass(method)):
            raise UsageError(f"{name!r} takes no settings here; it is not a {self.kind} class")
        fields = [f.name for f in dataclasses.fields(method) if f.init]
        for key in values:
            if key not in fields:
                raise UsageError(f"{self.kind} {name!r} has no setting {key!r}{suggest(key, fields)}")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        try:
            return method(**values)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self.kind} {name!r}: {error}") from error


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Split ``name(field=value, ...)`` into the name and its literal settings.

    >>> parse_call("gaussian_noise(std=0.01)")
    ('gaussian_noise', {'std': 0.01})
    """
    text = text.strip()
    name, bracket, rest = text.partition("(")
    name = name.strip()
    if not name:
        raise UsageError(f"{text!r} names no method; write it as name or name(setting=value)")
    if not bracket:
        return name, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return name, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"cannot read {text!r}; write it as name(setting=value, other=2)") from error


def split_chain(text: str) -> list[str]:
    """Split ``a(x=1) + b`` at the plus signs outside brackets.

    >>> split_chain("a(x=1e+3) + b")
    ['a(x=1e+3)', 'b']
    >>> split_chain("a(x='+)') + b")
    ["a(x='+)')", 'b']
    """
    parts, depth, start, quote = [], 0, 0, ""
    for index, character in enumerate(text):
        if quote or character in "'\"":
            quote = "" if character == quote else quote or character
            continue
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "+" and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def config_of(method: Any) -> dict[str, Any]:
    """Return ``{"name": ..., field: value}`` of a registered dataclass instance, as plain JSON values."""
    fields = {f.name: _plain(getattr(method, f.name)) for f in dataclasses.fields(method) if f.init}
    return {"name": type(method).card.name, **fields}


def spell(method: Any) -> str:
    """Return the one-line spelling, leaving out settings at their default."""
    shown = []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.init and not (field.default is not dataclasses.MISSING and value == field.default):
            shown.append(f"{field.name}={value!r}")
    name = type(method).card.name
    return f"{name}({', '.join(shown)})" if shown else str(name)


def import_object(path: str) -> Any:
    """Import ``package.module:object`` or ``folder/file.py:object``."""
    module_name, _, attribute = path.rpartition(":")
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except GradveilError:
        raise
    except (Exception, SystemExit) as error:  # user code may fail in any way while it is imported
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"cannot import {module_name!r} ({why}); mend it, or run from the folder that holds it") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UsageError(f"{module_name!r} has no {attribute!r}{suggest(attribute, public)}")
    return getattr(module, attribute)


def _import_module(name: str) -> Any:
    # The installed command does not have the user's folder on its path; python -m has.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


_files: dict[tuple[str, int], Any] = {}
"""User files already executed, by path and time of change: a file that registers a method must run once, not at every look-up."""


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    key = (str(path.resolve()), path.stat().st_mtime_ns)
    if key in _files:
        return _files[key]
    # A name of its own: a user's random.py must not stand in for the standard library's.
    name = f"gradveil_user_{path.stem}_{hashlib.sha256(repr(key).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    _files[key] = module
    return module
