"""Where a small fault can be put: places in the functions of the package, found in their syntax trees."""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.mutants.kinds import KINDS, Edit, Place
from scripts.mutants.signatures import Signatures, read_signatures

ROOMS = ("attacks", "audit", "defenses", "proofs", "verdict")


@dataclass(frozen=True)
class Mutant:
    """One small fault.

    Attributes:
        path: The file, beside the package's folder, as in ``defenses/dgp.py``.
        function: The outermost function it is in, by its qualified name.
        kind: What was done.
        line: Where.
        lines: First and last line of the statement it is in.
        before: The source it replaces.
        after: What stands there instead.
        edit: Where in the file, in bytes, and with what.
        number: Tells apart equal changes in one function.
    """

    path: str
    function: str
    kind: str
    line: int
    lines: tuple[int, int]
    before: str
    after: str
    edit: Edit
    number: int = 0

    @property
    def room(self) -> str:
        """Return the room of the package it is in."""
        return self.path.split("/")[0]

    @property
    def key(self) -> str:
        """Return what names this fault, whatever moves around it."""
        return f"{self.path}::{self.function}::{self.kind}::{self.before} -> {self.after}#{self.number}"

    def rank(self, seed: str) -> str:
        """Return its place in the lottery of a seed: the same on every machine, and untouched by other changes of the code."""
        return hashlib.sha256(f"{seed}|{self.key}".encode()).hexdigest()

    def apply(self, source: bytes) -> bytes:
        """Return the file with the fault in it."""
        return source[: self.edit.start] + self.edit.text.encode() + source[self.edit.end :]

    def diff(self, source: bytes) -> tuple[str, str]:
        """Return the changed lines before and after, on one line each."""
        start = source.rfind(b"\n", 0, self.edit.start) + 1
        end = source.find(b"\n", self.edit.end)
        old = source[start:end]
        new = source[start : self.edit.start] + self.edit.text.encode() + source[self.edit.end : end]
        return " ".join(old.decode().split()), " ".join(new.decode().split())


def find_mutants(package: Path, rooms: Sequence[str] = ROOMS) -> list[Mutant]:
    """Find every place of the rooms where a fault of a known kind fits, in the order of the files."""
    signatures = read_signatures(sorted(package.rglob("*.py")))
    found: list[Mutant] = []
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            found += mutants_of(path.read_bytes(), str(path.relative_to(package)), signatures)
    return found


def mutants_of(source: bytes, path: str, signatures: Signatures) -> list[Mutant]:
    """Find the places of one file; what does not compile, or compiles to the same, is none."""
    found: dict[str, Mutant] = {}
    starts = _line_starts(source)
    for name, function in outermost_functions(ast.parse(source)):
        place = Place(source, starts, function, signatures)
        for kind, find in KINDS.items():
            for node, edit in find(place):
                one = _mutant(place, path, name, kind, node, edit)
                if not _compiles(one, place):
                    continue
                while one.key in found:
                    one = replace(one, number=one.number + 1)
                found[one.key] = one
    return list(found.values())


def outermost_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Walk functions and methods by qualified name; what is defined inside a function belongs to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from outermost_functions(node, f"{prefix}{node.name}.")


def _mutant(place: Place, path: str, name: str, kind: str, node: ast.AST, edit: Edit) -> Mutant:
    before = " ".join(place.source[edit.start : edit.end].decode().split())
    after = " ".join(edit.text.split())
    line = getattr(node, "lineno", place.function.lineno)
    return Mutant(path, name, kind, line, place.statement_lines(line), before, after, edit)


def _compiles(one: Mutant, place: Place) -> bool:
    """Say whether the function still is one, by itself: to compile the whole file every time takes long."""
    changed = one.apply(place.source)
    start = place.starts[place.function.lineno - 1]
    end = place.end(place.function) + len(changed) - len(place.source)
    try:
        compile(textwrap.dedent(changed[start:end].decode()), "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _line_starts(source: bytes) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts
