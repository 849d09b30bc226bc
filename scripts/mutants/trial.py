"""Try one fault: put it into the running code, and run the tests that reach it until one fails."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch

from scripts.mutants.cover import Covering
from scripts.mutants.running import run_test
from scripts.mutants.sites import Mutant

BUDGET = 60.0
"""Seconds of a processor that the tests of one fault may take."""

Functions = Mapping[tuple[str, str, int], Sequence[FunctionType]]


def import_rooms(package: Path, rooms: Sequence[str]) -> None:
    """Import every module of the rooms, and what torch imports when it first maps a gradient, so that no child has to."""
    torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(torch.ones(2, 3))
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            dotted = path.relative_to(package.parent).with_suffix("").parts
            importlib.import_module(".".join(dotted).removesuffix(".__init__"))


def live_functions(package: Path) -> Functions:
    """Find every function object of the package by file, qualified name and first line, wrapped or not."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(f"{package}/"):
            found.setdefault(_name(each.__code__), []).append(each)
    return found


def put_in(mutant: Mutant, package: Path, functions: Functions) -> int:
    """Give the functions that hold the fault the faulty code; return how many there are."""
    path = package / mutant.path
    whole = compile(mutant.apply(path.read_bytes()), str(path), "exec", dont_inherit=True)
    changed = 0
    for code in _codes(whole):
        if code.co_qualname == mutant.function:
            for function in functions.get(_name(code), ()):
                function.__code__ = code
                changed += 1
    return changed


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _name(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def spent() -> float:
    """Return the seconds that a processor worked for this process and its children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def first_failure(tests: Sequence[Covering], items: Mapping[str, pytest.Item], budget: float = BUDGET) -> dict[str, Any]:
    """Run tests until one fails or the budget is spent; one that takes far longer than it should ends this process."""
    begun, run = spent(), 0
    for index, test in enumerate(tests):
        if spent() - begun > budget:
            return {"killer": None, "tests": run, "seconds": spent() - begun, "cut": True}
        following = items[tests[index + 1].name] if index + 1 < len(tests) else None
        # The signal's own answer is to end the process, which works in the middle of a long computation, too.
        signal.setitimer(signal.ITIMER_PROF, 20 + 10 * test.seconds)
        outcome = run_test(items[test.name], following)
        signal.setitimer(signal.ITIMER_PROF, 0)
        run += 1
        if outcome == "failed":
            return {"killer": test.name, "tests": run, "seconds": spent() - begun, "cut": False}
    return {"killer": None, "tests": run, "seconds": spent() - begun, "cut": False}
