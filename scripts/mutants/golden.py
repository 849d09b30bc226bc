"""Which tests compare with a golden number: what only they notice is not noticed by anyone who thought about it."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = "golden"


def golden_tests(path: Path) -> frozenset[str]:
    """Return the names of a file's tests that read a golden number, by themselves or through what they use."""
    if path.suffix != ".py" or not path.name.startswith("test_"):
        return frozenset()
    uses: dict[str, set[str]] = {}
    for node in ast.parse(path.read_bytes()).body:
        for name in _declared(node):
            uses.setdefault(name, set()).update(_names(node))
    tainted = {FOLDER}
    while True:
        more = {name for name, used in uses.items() if used & tainted} - tainted
        if not more:
            return frozenset(name for name in tainted if name.startswith("test_"))
        tainted |= more


def _declared(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def _names(node: ast.AST) -> set[str]:
    """Return what a node mentions: names, arguments (fixtures), and the folder where a path is spelled with it."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.arg):
            found.add(each.arg)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and FOLDER in each.value.split("/"):
            found.add(FOLDER)
    # A parameter may be called so without any file behind it.
    return found - {FOLDER} | ({FOLDER} if _spells_folder(node) else set())


def _spells_folder(node: ast.AST) -> bool:
    """Say whether a path is put together with the folder: ``… / "golden" / …`` or ``"tests/golden/…"``."""
    for each in ast.walk(node):
        sides = [each.left, each.right] if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div) else []
        if any(isinstance(side, ast.Constant) and side.value == FOLDER for side in sides):
            return True
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and f"{FOLDER}/" in each.value:
            return True
    return False
