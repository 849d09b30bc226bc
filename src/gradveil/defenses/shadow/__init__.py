"""Shadow, its parts and the attacker who knows it."""

from gradveil.defenses.shadow.defense import Shadow

__all__ = ["Shadow"]
