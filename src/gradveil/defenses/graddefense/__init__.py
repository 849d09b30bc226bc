"""GradDefense, its parts and the attacker who knows it."""

from gradveil.defenses.graddefense.defense import GradDefense

__all__ = ["GradDefense"]
