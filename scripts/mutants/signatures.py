"""What the callables of the package take, read from their source: names, annotations and defaults."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "…"
"""Stands for a default that is made anew for every call."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a callable.

    Attributes:
        name: As it is declared.
        annotation: Its source, or "".
        default: Its source, UNKNOWN where a factory makes it, or None where there is none.
        keyword_only: Whether its place in a call means nothing.
    """

    name: str
    annotation: str
    default: str | None
    keyword_only: bool


Signature = tuple[Parameter, ...]


@dataclass(frozen=True)
class Signatures:
    """Callables by their bare name; where several share one, only what all agree upon is said."""

    known: Mapping[str, Sequence[Signature]]

    def keyword(self, function: str, name: str) -> Parameter | None:
        """Return the parameter of that name, if all callables of this name declare it alike."""
        found = [next((each for each in one if each.name == name), None) for one in self.known.get(function, ())]
        return _agreed(found)

    def positional(self, function: str, place: int) -> Parameter | None:
        """Return the parameter at a place, if all callables of this name declare it alike."""
        found = []
        for one in self.known.get(function, ()):
            places = [each for each in one if not each.keyword_only]
            found.append(places[place] if place < len(places) else None)
        return _agreed(found)


def _agreed(found: Sequence[Parameter | None]) -> Parameter | None:
    first = found[0] if found else None
    return first if all(each == first for each in found) else None


def read_signatures(files: Sequence[Path]) -> Signatures:
    """Read functions, methods and the fields of dataclasses."""
    classes: dict[str, ast.ClassDef] = {}
    known: dict[str, list[Signature]] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
            elif isinstance(node, ast.FunctionDef):
                known.setdefault(node.name, []).append(_of_function(node))
    for name, node in classes.items():
        known[name] = [tuple(_of_class(node, classes))]
    return Signatures(known)


def _of_function(node: ast.FunctionDef) -> Signature:
    places = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(places) - len(node.args.defaults)) + list(node.args.defaults)
    found = [_parameter(each, default, False) for each, default in zip(places, defaults, strict=True)]
    found += [_parameter(each, default, True) for each, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return tuple(each for each in found if each.name not in {"self", "cls"})


def _parameter(each: ast.arg, default: ast.expr | None, keyword_only: bool) -> Parameter:
    annotation = ast.unparse(each.annotation) if each.annotation else ""
    return Parameter(each.arg, annotation, ast.unparse(default) if default else None, keyword_only)


def _of_class(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[Parameter]:
    """Walk the fields of a dataclass, those it inherits first; or the arguments of ``__init__``."""
    own = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    if own:
        yield from _of_function(own[0])
        return
    for base in node.bases:
        name = ast.unparse(base).split("[")[0]
        if name in classes and name != node.name:
            yield from _of_class(classes[name], classes)
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if not any("dataclass" in each for each in decorators):
        return
    keyword_only = any("kw_only=True" in each for each in decorators)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if not annotation.startswith("ClassVar"):
                yield Parameter(statement.target.id, annotation, _field_default(statement.value), keyword_only)


def _field_default(value: ast.expr | None) -> str | None:
    if value is None:
        return None
    if isinstance(value, ast.Call):
        return UNKNOWN
    return ast.unparse(value)
