"""What a caller of a defense can give it, and the refusal of a defense that needs more."""

from __future__ import annotations

from collections.abc import Collection

from gradveil.defenses.base import NEEDS, Defense, Need
from gradveil.defenses.chain import parts_of
from gradveil.registry import spell

__all__ = ["unmet_need"]


def unmet_need(defense: Defense, given: Collection[Need], reason: str) -> str | None:
    """Return None where a caller can give all that every part of a defense needs, else one sentence what is missing.

    Whoever calls hooks from a loop of their own asks this first: a hook that is never called, or sees less than it needs,
    protects nothing, and nobody would notice.

    Args:
        defense: A defense or chain.
        given: What the caller has beside the update.
        reason: Why the rest is not there, to go on after a comma.
    """
    for part in parts_of(defense):
        missing = [words for need, words in NEEDS.items() if need in part.needs() and need not in given]
        if missing:
            return f"{spell(part)} needs {' and '.join(missing)}, {reason}"
    return None
