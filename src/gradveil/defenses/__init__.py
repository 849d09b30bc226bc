"""Defenses, one file or folder each. Adding one: write the file, then ``make index``.

Nothing here imports a defense: `build_defense` and `DEFENSES` find one by its name, so that a client loads the one it runs.
"""

from gradveil.defenses.base import DEFENSES, AdaptedModel, ClientView, Defense, DefenseCard, State
from gradveil.defenses.chain import Chain, adapt, build_defense, chain, granularity_of, is_adapted, parts_of, spell_defense

__all__ = [
    "DEFENSES",
    "AdaptedModel",
    "Chain",
    "ClientView",
    "Defense",
    "DefenseCard",
    "State",
    "adapt",
    "build_defense",
    "chain",
    "granularity_of",
    "is_adapted",
    "parts_of",
    "spell_defense",
]
