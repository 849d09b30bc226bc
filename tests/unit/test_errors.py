"""One exception tree with exit codes, and answers with the nearest right name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from gradveil import errors
from gradveil.errors import BadUpdate, GradveilError, LeakAboveLimit, Unreliable, UsageError, suggest

CLASSES: list[Any] = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_tree_with_a_code_a_sentence_and_an_export(kind: type[GradveilError]) -> None:
    assert issubclass(kind, GradveilError)
    assert kind.exit_code in {1, 2, 3, 4}
    assert kind.__doc__
    assert kind.__name__ in errors.__all__


def test_exit_codes_say_what_happened() -> None:
    assert GradveilError.exit_code == 4
    assert LeakAboveLimit.exit_code == 1
    assert Unreliable.exit_code == 3
    assert {kind.exit_code for kind in CLASSES if issubclass(kind, UsageError)} == {2}
    assert issubclass(BadUpdate, UsageError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = [
        line.split() for line in (errors.__doc__ or "").splitlines() if any(kind.__name__ in line.split() for kind in CLASSES)
    ]
    codes = {}
    for words in drawn:
        name = next(word for word in words if word.isidentifier() and word[0].isupper())
        codes[name] = int(words[words.index(name) + 1])
    assert codes == {kind.__name__: kind.exit_code for kind in CLASSES}


@pytest.mark.parametrize(
    ("wrong", "known", "answer"),
    [
        ("Clipping", ["clipping", "none"], "; did you mean 'clipping'?"),
        ("cliping", ["clipping", "none"], "; did you mean 'clipping'?"),
        ("xyz", ["clipping", "none"], "; known: clipping, none"),
        ("xyz", [], ""),
        ("", ["b", "a"], "; known: a, b"),
    ],
)
def test_the_nearest_name_or_all_of_them(wrong: str, known: list[str], answer: str) -> None:
    assert suggest(wrong, known) == answer
