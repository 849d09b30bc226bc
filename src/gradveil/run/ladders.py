"""Defenses as a plan names them: one spelling, or a whole ladder of strengths."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from gradveil.audit.materials import Materials
from gradveil.defenses import DEFENSES, Defense, chain
from gradveil.errors import GradveilError, UsageError
from gradveil.registry import parse_call, split_chain

__all__ = ["expand_defense", "look_up", "spell_part"]

T = TypeVar("T")
LADDER = ":ladder"


def expand_defense(text: str, materials: Materials | None = None) -> list[str]:
    """Return the spellings behind one entry: one, or with ``name:ladder`` one for every strength; parts of a chain multiply.

    The spelling shows the settings that decide the strength, also at their default, so that equal defenses are spelt equally.

    Args:
        text: As the plan says it.
        materials: Takes in the defenses that are built on the way.
    """
    materials = materials or Materials()
    if text in materials.spellings:
        return list(materials.spellings[text])
    spellings = []
    for parts in itertools.product(*(_expand_part(part) for part in split_chain(text))):
        spelling = " + ".join(spelt for spelt, _ in parts)
        built = chain(*(part for _, part in parts))  # an impossible order is noticed here
        materials.keep(spelling, built)
        spellings.append(spelling)
    materials.spellings[text] = tuple(spellings)
    return spellings


def _expand_part(text: str) -> list[tuple[str, Defense]]:
    ladder = text.endswith(LADDER)
    name, given = parse_call(text.removesuffix(LADDER))
    ladder, name = ladder or name.endswith(LADDER), name.removesuffix(LADDER)
    head, _, tail = name.partition(":")
    if tail and head in DEFENSES.names():
        raise UsageError(f"only ':ladder' may follow the name of a defense, not {':' + tail!r}")
    first = look_up({**given, "name": name}, DEFENSES.build)
    if not isinstance(first, Defense) or not hasattr(type(first), "card"):
        raise UsageError(f"{name!r} is no defense: subclass gradveil.defenses.Defense and give it a card")
    card = type(first).card
    if ladder and not card.ladder:
        raise UsageError(f"defense {name!r} has no ladder of strengths; name its settings instead")
    shown = {key for rung in card.ladder for key in rung}
    built = [DEFENSES.build({**given, **rung, "name": name}) for rung in card.ladder] if ladder else [first]
    return [(_spell(name, each, shown), each) for each in built]


def _spell(name: str, defense: Any, shown: set[str]) -> str:
    settings = []
    for field in dataclasses.fields(defense):
        value = getattr(defense, field.name)
        if field.init and (field.name in shown or value != field.default):
            # 1 and 1.0 are the same strength, and the spelling is part of a cell's key.
            whole = isinstance(field.default, float) and isinstance(value, int)
            settings.append(f"{field.name}={float(value) if whole else value!r}")
    return f"{name}({', '.join(settings)})" if settings else name


def spell_part(text: str, defense: Defense) -> str:
    """Return the spelling of one part with other settings, as a plan's entries are spelt; ``text`` names it."""
    name, _ = parse_call(text)
    return _spell(name, defense, {key for rung in type(defense).card.ladder for key in rung})


def look_up(name: Any, find: Callable[[Any], T]) -> T:
    """Look a name up; code of the user's that cannot be imported is the user's fault, said in one sentence."""
    try:
        return find(name)
    except GradveilError:
        raise
    except Exception as error:  # anything may go wrong in code that is not ours
        spelt = name["name"] if isinstance(name, dict) else name
        raise UsageError(f"{spelt!r} cannot be used ({type(error).__name__}: {error}); correct it first") from error
