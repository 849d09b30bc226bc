"""Attacks: everything an attacker can do with what it saw. Never imports data, defenses, client or federation.

Adding one: write the file, then ``make index``.
"""

from gradveil.attacks.base import ATTACKS, Attack, AttackCard, AttackContext, Cost, launch
from gradveil.attacks.engine.matching import Recipe, run_recipe
from gradveil.attacks.ensembles import ENSEMBLES, Ensemble, informed_twins, line_up, resolve
from gradveil.attacks.gradient_matching import GradientMatching
from gradveil.attacks.referee import Referee, Verdict

__all__ = [
    "ATTACKS",
    "ENSEMBLES",
    "Attack",
    "AttackCard",
    "AttackContext",
    "Cost",
    "Ensemble",
    "GradientMatching",
    "Recipe",
    "Referee",
    "Verdict",
    "informed_twins",
    "launch",
    "line_up",
    "resolve",
    "run_recipe",
]
