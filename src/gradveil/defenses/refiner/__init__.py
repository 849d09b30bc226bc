"""Refiner, its parts and the attacker who knows it."""

from gradveil.defenses.refiner.defense import Refiner

__all__ = ["Refiner"]
