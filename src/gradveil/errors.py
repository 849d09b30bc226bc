"""One exception tree. Every class carries the exit code the command line ends with.

GradveilError                 4  internal: a fault of ours
├── UsageError                2  unknown name, bad value, unreadable file
│   ├── MissingKnowledge      2  an attack asks for something its threat model does not grant
│   ├── UnsupportedModel      2  this model cannot be handled
│   │   ├── NeverSupported    2  … and never will be: the question has no answer
│   │   └── ReplaceLayer      2  … unless the user swaps the named layer
│   ├── DefenseOrder          2  a chain in an order that cannot work
│   └── BadUpdate             2  an update or payload that must be refused
├── Unreliable                3  there is a result, and it should not be trusted
└── LeakAboveLimit            1  the measured leak exceeds the limit the user asked for
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "BadUpdate",
    "DefenseOrder",
    "GradveilError",
    "LeakAboveLimit",
    "MissingKnowledge",
    "NeverSupported",
    "ReplaceLayer",
    "Unreliable",
    "UnsupportedModel",
    "UsageError",
    "suggest",
]


class GradveilError(Exception):
    """Root of the tree; raised directly only for faults of our own."""

    exit_code: ClassVar[int] = 4


class UsageError(GradveilError):
    """The request cannot be carried out as it was made; the message says what to change."""

    exit_code = 2


class MissingKnowledge(UsageError):
    """An attack needs knowledge that the threat model withholds."""


class UnsupportedModel(UsageError):
    """The model cannot be handled."""


class NeverSupported(UnsupportedModel):
    """The question has no answer for this kind of model."""


class ReplaceLayer(UnsupportedModel):
    """Works once the named layer is replaced."""


class DefenseOrder(UsageError):
    """A chain of defenses in an order that cannot work."""


class BadUpdate(UsageError):
    """An update or payload with wrong names, shapes or values."""


class Unreliable(GradveilError):
    """A result exists and should not be trusted; the message says why."""

    exit_code = 3


class LeakAboveLimit(GradveilError):
    """The measured leak exceeds the limit the user set with ``--fail-if``."""

    exit_code = 1


def suggest(wrong: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, else the list of names.

    >>> suggest("gausian_noise", ["gaussian_noise", "none"])
    "; did you mean 'gaussian_noise'?"
    """
    names = sorted(name for name in known if name)
    near = difflib.get_close_matches(wrong.lower(), [n.lower() for n in names], n=1, cutoff=0.6)
    if near:
        match = next(n for n in names if n.lower() == near[0])
        return f"; did you mean {match!r}?"
    return f"; known: {', '.join(names)}" if names else ""
