"""The kinds of small faults: each finds its places in one function and says what to write there instead."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scripts.mutants.signatures import UNKNOWN, Parameter, Signatures

TORCH_WORDS = frozenset({"generator", "dim", "keepdim", "correction", "largest", "descending", "axis", "side", "right"})
"""Keywords of foreign callables whose defaults mean something else."""

FIRST_VALUES = {"int": "1", "float": "1.0"}
"""What a variable of a type is frozen to where its parameter has no default."""

NOTHING = {"float": "0.0", "int": "0", "bool": "False", "str": "''", "None": ""}
"""What a function of a type returns early where no argument of that type can be handed through."""


@dataclass(frozen=True)
class Edit:
    """Bytes of a file from start to end, and the text that comes there."""

    start: int
    end: int
    text: str


Found = Iterator[tuple[ast.AST, Edit]]


@dataclass(frozen=True)
class Place:
    """One outermost function with what is needed to change it."""

    source: bytes
    starts: Sequence[int]
    function: ast.FunctionDef
    signatures: Signatures

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of the body, without docstrings; decorators and defaults are no part of what runs."""
        return [node for statement in self.body for node in ast.walk(statement) if not isinstance(node, ast.expr_context)]

    @cached_property
    def body(self) -> list[ast.stmt]:
        """The statements after the docstring."""
        first, *rest = self.function.body
        spoken = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return rest if spoken else [first, *rest]

    @cached_property
    def typed(self) -> dict[str, str]:
        """Parameters and annotated locals of the function with their annotations."""
        arguments = self.function.args
        declared = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        found = {each.arg: ast.unparse(each.annotation) for each in declared if each.annotation}
        for node in self.nodes:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = ast.unparse(node.annotation)
        return found

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call in the body, save those that only make a message."""
        raised = {id(inner) for node in self.nodes if isinstance(node, ast.Raise) for inner in ast.walk(node)}
        return [node for node in self.nodes if isinstance(node, ast.Call) and id(node) not in raised]

    def start(self, node: Any) -> int:
        """Return where a node begins, in bytes."""
        return int(self.starts[node.lineno - 1] + node.col_offset)

    def end(self, node: Any) -> int:
        """Return where a node ends, in bytes."""
        return int(self.starts[node.end_lineno - 1] + node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        """Return the source of a node."""
        return self.source[self.start(node) : self.end(node)].decode()

    def instead(self, node: ast.AST, text: str) -> tuple[ast.AST, Edit]:
        """Return the edit that puts a text in place of a node."""
        return node, Edit(self.start(node), self.end(node), text)

    def statement_lines(self, line: int) -> tuple[int, int]:
        """Return the lines of the innermost statement around a line; of one with a body, its head."""
        best = (self.function.lineno, self.function.end_lineno or self.function.lineno)
        for node in ast.walk(self.function):
            if isinstance(node, ast.stmt):
                inner = getattr(node, "body", None)
                last = inner[0].lineno - 1 if inner else node.end_lineno or node.lineno
                span = (node.lineno, max(node.lineno, last))
                if span[0] <= line <= span[1] and span[1] - span[0] <= best[1] - best[0]:
                    best = span
        return best


def called(call: ast.Call) -> str:
    """Return the bare name of what is called, or ""."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def arguments_of(place: Place, call: ast.Call) -> Iterator[tuple[ast.expr, Parameter]]:
    """Walk the arguments of a call with the parameters they are handed to, where these are known."""
    name = called(call)
    for index, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            break
        parameter = place.signatures.positional(name, index)
        if parameter:
            yield argument, parameter
    for keyword in call.keywords:
        parameter = place.signatures.keyword(name, keyword.arg) if keyword.arg else None
        if parameter:
            yield keyword.value, parameter


def drop(place: Place) -> Found:
    """Leave out a keyword argument, so that its default is taken; of ``replace``, so that the old value stays."""
    for call in place.calls:
        name = called(call)
        for keyword in call.keywords:
            if keyword.arg is None:
                continue
            parameter = place.signatures.keyword(name, keyword.arg)
            default = parameter.default if parameter else None
            if default == place.text(keyword.value):
                continue
            if default is not None or (name == "replace" and call.args) or (parameter is None and keyword.arg in TORCH_WORDS):
                yield keyword, _without(place, call, keyword)


def _without(place: Place, call: ast.Call, keyword: ast.keyword) -> Edit:
    every = sorted([*call.args, *call.keywords], key=place.start)
    index = every.index(keyword)
    if index:
        return Edit(place.end(every[index - 1]), place.end(keyword), "")
    following = place.start(every[1]) if len(every) > 1 else place.end(keyword)
    return Edit(place.start(keyword), following, "")


def swap(place: Place) -> Found:
    """Exchange two neighbours among the positional arguments whose parameters are of one type."""
    for call in place.calls:
        for index, (left, right) in enumerate(zip(call.args, call.args[1:], strict=False)):
            kinds = [place.signatures.positional(called(call), each) for each in (index, index + 1)]
            alike = kinds[0] and kinds[1] and kinds[0].annotation == kinds[1].annotation
            if alike and place.text(left) != place.text(right):
                between = place.source[place.end(left) : place.start(right)].decode()
                text = place.text(right) + between + place.text(left)
                yield left, Edit(place.start(left), place.end(right), text)


def freeze(place: Place) -> Found:
    """Hand on a constant in place of a variable: the default, the first value of its type, or the first of a sequence."""
    for call in place.calls:
        given = {id(each.value) for each in call.keywords}
        for argument, parameter in arguments_of(place, call):
            if isinstance(argument, ast.Constant) or parameter.default == UNKNOWN:
                continue
            constant = FIRST_VALUES.get(parameter.annotation) if parameter.default is None else parameter.default
            keyword_with_default = id(argument) in given and parameter.default is not None
            if constant and not keyword_with_default and _is_literal(constant):
                yield place.instead(argument, constant)
    counters = _counters(place)
    for node in place.nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name) and node.slice.id in counters:
            yield place.instead(node.slice, "0")


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except ValueError:
        return False
    return True


def _counters(place: Place) -> set[str]:
    """Return the names that count in loops over ``range`` and ``enumerate``."""
    found = set()
    for node in place.nodes:
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Call):
            target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
            if called(node.iter) in {"range", "enumerate"} and isinstance(target, ast.Name):
                found.add(target.id)
    return found


def negate(place: Place) -> Found:
    """Turn a condition or a boolean argument round."""
    for node in place.nodes:
        tests = node.ifs if isinstance(node, ast.comprehension) else [node.test] if isinstance(node, ast.If | ast.IfExp) else []
        for test in tests:
            yield place.instead(test, _opposite(place, test))
    for call in place.calls:
        for argument, parameter in arguments_of(place, call):
            if parameter.annotation == "bool":
                yield place.instead(argument, _opposite(place, argument))


def _opposite(place: Place, test: ast.expr) -> str:
    if isinstance(test, ast.Constant) and isinstance(test.value, bool):
        return str(not test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return place.text(test.operand)
    return f"(not ({place.text(test)}))"


def early(place: Place) -> Found:
    """Return at once: an argument of the right type unchanged, or the empty value of the type."""
    function, first = place.function, place.body[0]
    returns = ast.unparse(function.returns) if function.returns else ""
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in place.nodes) or isinstance(first, ast.Raise):
        return
    values = [name for name in place.typed if place.typed[name] == returns and name in {each.arg for each in function.args.args}]
    if not values:
        container = {"list": "[]", "dict": "{}", "tuple": "()"}.get(returns.split("[")[0])
        empty = NOTHING.get(returns, container)
        values = ["None"] if " | None" in returns else [] if empty is None else [empty]
    at = place.start(first)
    for value in values[:1]:
        if place.text(first) != f"return {value}".strip():
            yield first, Edit(at, at, f"return {value}".strip() + "\n" + " " * first.col_offset)


def count(place: Place) -> Found:
    """Count one more or one less: in ranges, beside a one, in whole-number arguments, at the edge of a comparison."""
    for node in place.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and _is_one(node.right):
            yield node, Edit(place.start(node), place.end(node), f"({place.text(node.left)})")
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and any(_counts(place, each) for each in _sides(node)):
            turned = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}.get(type(node.ops[0]))
            if turned:
                text = f"{place.text(node.left)} {turned} {place.text(node.comparators[0])}"
                yield place.instead(node, text)
    for call in place.calls:
        if called(call) == "range" and isinstance(call.func, ast.Name):
            yield place.instead(call.args[-1], f"({place.text(call.args[-1])}) - 1")
        for argument, parameter in arguments_of(place, call):
            if parameter.annotation == "int":
                yield place.instead(argument, f"({place.text(argument)}) + 1")


def _sides(node: ast.Compare) -> tuple[ast.expr, ast.expr]:
    return node.left, node.comparators[0]


def _counts(place: Place, node: ast.expr) -> bool:
    """Say whether a side of a comparison is a count: two real numbers are hardly ever equal, so their edge means nothing."""
    if isinstance(node, ast.Call):
        return called(node) in {"len", "sum", "int", "numel", "count"}
    if isinstance(node, ast.Constant):
        return type(node.value) is int and node.value != 0
    return isinstance(node, ast.Name) and place.typed.get(node.id) == "int"


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1 and not isinstance(node.value, bool)


def other(place: Place) -> Found:
    """Hand on another argument or annotated local of the same type."""
    for call in place.calls:
        for argument in [*call.args, *(each.value for each in call.keywords)]:
            if isinstance(argument, ast.Name) and argument.id in place.typed:
                kind = place.typed[argument.id]
                for name in place.typed:
                    if name != argument.id and place.typed[name] == kind:
                        yield place.instead(argument, name)


KINDS: dict[str, Callable[[Place], Found]] = {
    "drop": drop,
    "swap": swap,
    "freeze": freeze,
    "negate": negate,
    "early": early,
    "count": count,
    "other": other,
}
