"""SVDefense, its parts and the attacker who knows it."""

from gradveil.defenses.svdefense.defense import SVDefense

__all__ = ["SVDefense"]
